"""An attention call as the cost model sees it, and what the model predicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ringjax.checks import integer, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.wire_format import WireLike, wire_of
from ringjax.ops.mask import (
  And,
  Everything,
  Mask,
  SameSegment,
  Window,
)
from ringjax.parallel.chips import LOCALS, number_bytes
from ringjax.parallel.layout import Layout

# Wires that have a name.
WIRES = ("int8", "float8_e4m3fn", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallShape:
  """Shapes of an attention call: one device's share of batch and heads.

  Attributes:
    batch: B, examples on a device.
    queries: T, tokens of the whole sequence of queries.
    keys: S, tokens of the whole sequence of keys.
    heads: N, query heads on a device before any exchange.
    kv_heads: K.
    head_dim: H, of queries and keys.
    value_dim: J, of values; default H.
    dtype: name of the dtype of queries, keys and values.
    mask: over positions.
    layout: order of the tokens on the shards; None leaves the choice open.
    axes: (name, size) of the mesh axes that shard the sequence, slow ones
      first: one, or two (groups of devices, devices of a group).
    backward: whether gradients are wanted too.
    offset: position of the first query.
    wire: of `WIRES`, or an `rj.kv.Codec`: also show K and V sent as such codes;
      None: do not.
    longest_document: tokens of the longest document of packed data, if known.
    local: the local algorithm, of `chips.LOCALS`.
  """

  batch: int
  queries: int
  keys: int
  heads: int
  kv_heads: int
  head_dim: int
  value_dim: int | None = None
  dtype: str = "bfloat16"
  mask: Mask = Everything()
  layout: Layout | None = None
  axes: tuple[tuple[str, int], ...] = (("seq", 1),)
  backward: bool = True
  offset: int = 0
  wire: WireLike | None = None
  longest_document: int | None = None
  local: str = "blockwise"

  def __post_init__(self) -> None:
    if self.value_dim is None:
      object.__setattr__(self, "value_dim", self.head_dim)
    for name in ("batch", "queries", "keys", "heads", "kv_heads", "head_dim",
                 "value_dim"):  # fmt: skip
      positive_int(name, getattr(self, name))
    if self.heads % self.kv_heads:
      raise OptionError(
        "heads",
        f"{self.heads} query heads over {self.kv_heads} kv heads",
        "a multiple of the kv heads",
        "pass the heads of one device",
      )
    axes = tuple((str(name), size) for name, size in self.axes)
    object.__setattr__(self, "axes", axes)
    if not 1 <= len(axes) <= 2 or len({name for name, _ in axes}) < len(axes):
      raise OptionError(
        "axes",
        repr(self.axes),
        "one mesh axis, or two: groups, then devices of a group",
        "pass the axes that shard the sequence, e.g. (('seq', 8),)",
      )
    for name, size in axes:
      positive_int(f"size of axis {name!r}", size)
    if not isinstance(self.mask, Mask):
      raise OptionError(
        "mask",
        type(self.mask).__name__,
        "a ringjax mask such as Causal()",
        "leave an array out: it bounds no tile",
      )
    if self.layout is not None and not isinstance(self.layout, Layout):
      raise OptionError(
        "layout", repr(self.layout), "a Layout or None", "use Contiguous()"
      )
    integer("offset", self.offset, least=0)
    if isinstance(self.wire, str):
      one_of("wire", self.wire, WIRES)
    elif self.wire is not None:
      object.__setattr__(self, "wire", wire_of(self.wire))
    if self.longest_document is not None:
      positive_int("longest_document", self.longest_document)
    one_of("local", self.local, LOCALS)
    number_bytes(self.dtype)

  @property
  def shards(self) -> int:
    """R."""
    return math.prod(size for _, size in self.axes)

  @property
  def same_tokens(self) -> bool:
    """Whether queries and keys are of the same positions."""
    return self.queries == self.keys and not self.offset

  @property
  def packed(self) -> bool:
    """Whether a query sees its own document only."""
    return _has_documents(self.mask)

  @property
  def seen(self) -> Mask:
    """The mask, as far as it is known without the documents."""
    if self.packed and self.longest_document is not None:
      return self.mask & Window(self.longest_document)
    return self.mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """What a strategy costs for a call: seconds, bytes, memory.

  Attributes:
    strategy: its name.
    options: what to build it with: q_block, kv_block and what is its own.
    layout: order of the tokens on the shards.
    forward_s: seconds of the forward pass.
    backward_s: seconds of the backward pass, 0 where none is wanted.
    bytes_by_link: bytes that a device sends in all, by the link they take.
    sends: messages of a device in all.
    memory_bytes: of a device at most, operands and results included.
    busy: part of the time in which the devices compute tiles and sums.
    notes: remarks for the reader.
  """

  strategy: str
  options: Mapping[str, Any]
  layout: Layout
  forward_s: float
  backward_s: float
  bytes_by_link: Mapping[str, float]
  sends: int
  memory_bytes: float
  busy: float
  notes: tuple[str, ...] = ()

  @property
  def seconds(self) -> float:
    """Of both passes."""
    return self.forward_s + self.backward_s

  def record(self) -> dict[str, Any]:
    """Plain values for JSON."""
    body = {**vars(self), "layout": repr(self.layout), "seconds": self.seconds}
    return body | {
      "options": _plain(self.options),
      "notes": list(self.notes),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
  """Why a strategy is not for this call.

  Attributes:
    strategy: its name.
    options: that tell it from another candidate of the strategy.
    reason: one sentence.
  """

  strategy: str
  reason: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def record(self) -> dict[str, Any]:
    """Plain values for JSON."""
    return {**vars(self), "options": _plain(self.options)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
  return {n: str(x) if n == "wire" else x for n, x in options.items()}


def _has_documents(mask: Mask) -> bool:
  if isinstance(mask, And):
    return _has_documents(mask.left) or _has_documents(mask.right)
  return isinstance(mask, SameSegment)

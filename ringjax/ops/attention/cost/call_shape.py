"""Description of an attention call for the cost model, and its predictions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringjax.checks import integer, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.strategies.wire_format import WireLike, wire_of
from ringjax.ops.mask import (
  And,
  Everything,
  Mask,
  SameSegment,
  Window,
)
from ringjax.parallel.chips import LOCALS, number_bytes
from ringjax.parallel.layout import Layout

# Wire formats with a name.
WIRES = ("int8", "float8_e4m3fn", "bfloat16")


# What latent attention sends of a token: keys and values of all heads, its row,
# projected at arrival, or its row, to which absorbed queries attend.
FORMS = ("heads", "rows", "absorbed")


class RowShape(NamedTuple):
  """Row of a token of latent attention, see `strategies/latents.py`.

  Fields:
    latent: Numbers of the latent, C.
    shared: Key dims that the heads share, R.
  """

  latent: int
  shared: int

  @property
  def size(self) -> int:
    """Numbers of a row."""
    return self.latent + self.shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallShape:
  """Shapes of an attention call: one device's share of batch and heads.

  Attributes:
    batch: Examples on a device, B.
    queries: Tokens of the whole sequence of queries, T.
    keys: Tokens of the whole sequence of keys, S.
    heads: Query heads on a device before any exchange, N.
    kv_heads: Key heads on a device before any exchange, K.
    head_dim: Head dim of queries and keys, H.
    value_dim: Head dim of values, J; default H.
    dtype: Name of the dtype of queries, keys and values.
    mask: Mask over positions.
    layout: Order of the tokens on the shards; None leaves the choice open.
    axes: (name, size) of the mesh axes that shard the sequence, slow ones
      first: one, or two (groups of devices, devices of a group).
    backward: Whether gradients are computed too.
    offset: Position of the first query.
    wire: Lossy format in which to also consider sending K and V, of `WIRES`, or
      an `rj.kv.Codec`; None: no such format.
    longest_document: Tokens of the longest document of packed data, if known.
    local: Local algorithm, of `chips.LOCALS`.
    rows: Rows of latent attention, from which keys and values are projected;
      None: other attention.
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
  rows: RowShape | None = None

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
    """Number of shards of the sequence, R."""
    return math.prod(size for _, size in self.axes)

  @property
  def same_tokens(self) -> bool:
    """Whether queries and keys have the same positions."""
    return self.queries == self.keys and not self.offset

  @property
  def packed(self) -> bool:
    """Whether a query only sees its own document."""
    return _has_documents(self.mask)

  @property
  def seen(self) -> Mask:
    """The mask, as far as it is known without the documents."""
    if self.packed and self.longest_document is not None:
      return self.mask & Window(self.longest_document)
    return self.mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """Predicted cost of a strategy for a call: seconds, bytes, memory.

  Attributes:
    strategy: Name of the strategy.
    options: Options to build it with: q_block, kv_block and the strategy's own.
    layout: Order of the tokens on the shards.
    forward_s: Seconds of the forward pass.
    backward_s: Seconds of the backward pass, 0 without one.
    bytes_by_link: Bytes that a device sends in all, by the link they take.
    sends: Messages that a device sends in all.
    memory_bytes: Peak memory of a device, operands and results included.
    busy: Share of the time in which the devices compute tiles and sums.
    notes: Remarks for the user.
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
    """Seconds of both passes."""
    return self.forward_s + self.backward_s

  def record(self) -> dict[str, Any]:
    """Return plain values for JSON."""
    body = {**vars(self), "layout": repr(self.layout), "seconds": self.seconds}
    return body | {
      "options": _plain(self.options),
      "notes": list(self.notes),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
  """Reason why a strategy does not serve a call.

  Attributes:
    strategy: Name of the strategy.
    options: Options that distinguish the candidate.
    reason: One sentence.
  """

  strategy: str
  reason: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def record(self) -> dict[str, Any]:
    """Return plain values for JSON."""
    return {**vars(self), "options": _plain(self.options)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
  return {n: str(x) if n == "wire" else x for n, x in options.items()}


def _has_documents(mask: Mask) -> bool:
  if isinstance(mask, And):
    return _has_documents(mask.left) or _has_documents(mask.right)
  return isinstance(mask, SameSegment)

"""Reading a prompt: by which strategy, in chunks or all at once.

Guarantees: every method leaves a cache from which the same tokens follow.
Memory: the cache is written in place, once; there is no second copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ringjax import plan as plans
from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.kv.base import CallCache
from ringjax.kv.cache_kind import WINDOWED, CacheKind
from ringjax.kv.state import StateShape
from ringjax.models import work_profile
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import (
  CachedAttention,
  ChainParallel,
  ContextParallel,
  ShardingContext,
)
from ringjax.ops.attention.chain import Chain
from ringjax.ops.attention.dense import Dense as DenseLocal
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.nesting import coded, group_of
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.ulysses import Ulysses
from ringjax.ops.attention.wire_format import WireLike, wire_of
from ringjax.parallel.layout import Contiguous, Layout, Striped, Uneven, Zigzag
from ringjax.parallel.programs import bounded
from ringjax.plan import cost
from ringjax.plan.choice import KEEPS, Machine
from ringjax.typing import Lengths

# name: (layout, strategy, whether it shards the sequence)
_STRATEGIES: dict[str, tuple[Layout, Any, bool]] = {
  "dense": (Contiguous(), Gather(DenseLocal()), False),
  "blockwise": (Contiguous(), Gather(), False),
  "ring": (Contiguous(), Ring(), True),
  "striped": (Striped(), Ring(), True),
  "zigzag": (Zigzag(), Ring(), True),
  "gather": (Contiguous(), Gather(), True),
  "ulysses": (Contiguous(), Ulysses(), True),
  "bidirectional": (Striped(), Ring(two_way=True), True),
  "hybrid": (Striped(), Ulysses(Ring()), True),
}
METHODS = ("auto", *_STRATEGIES, "kvr", "chunked")
# Those by which no keys travel from shard to shard.
_UNWIRED = ("dense", "blockwise", "ulysses", "chunked")
# Tokens of a chunk, unless a size is asked for.
_CHUNK = 4096
# Parts of a sequence are whole numbers of these.
_TILE = 128


class PromptCall(NamedTuple):
  """A call's tokens of some prompts, in the order of the shards.

  Fields:
    tokens: int32 [B, T].
    pos: int32 [B, T], or None: those of the layout.
    seg: int32 [B, T], 0 where there is no token.
    rows: int32 [B], which of the T is a prompt's last one.
    ends: bool [B], whether a prompt's last token is among them.
    done: tokens of the longest prompt that are read after it.
  """

  tokens: np.ndarray
  pos: np.ndarray | None
  seg: np.ndarray
  rows: np.ndarray
  ends: np.ndarray
  done: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
  """How a prompt is read.

  Attributes:
    name: one of `METHODS`, "auto" resolved.
    attend: what the model is called with.
    chunk: tokens of a chunk, of which the last can have fewer; None for all
      at once.
    width: tokens that the compiled calls read in all, padding included.
    slots: of the cache, that they fill on each shard at most.
    why: why "auto" chose it.
    layout: which tokens of a call are on which shard. Chunks are striped, so
      that the tokens of a short row are level over the shards; for recurrent
      layers they are consecutive.
  """

  name: str
  attend: ShardingContext
  chunk: int | None
  width: int
  slots: int
  why: str
  layout: Layout

  def taken(self, lengths: np.ndarray) -> np.ndarray:
    """Slots that prompts of these lengths [B] take on each shard, [B, R]."""
    found: Any = 0
    for first, order in self._orders():
      at = order.reshape(self.attend.size, -1)
      here = (at >= 0) & (first + at < lengths[:, None, None])
      found = found + np.max(here * np.arange(1, at.shape[1] + 1), 2)
    return found

  def calls(
    self, prompts: Sequence[np.ndarray], start: np.ndarray
  ) -> Iterator[PromptCall]:
    """The calls of `read` that read prompts, one after another.

    Args:
      prompts: int32 [T] each.
      start: int [B], the position of each prompt's first token.
    """
    lengths = np.array([p.size for p in prompts])
    longest = int(lengths.max())
    for first, order in self._orders():
      real = np.flatnonzero(order >= 0)
      # Where each of the call's tokens is.
      where = np.zeros(order.size, np.int32)
      where[order[real]] = real
      index = first + order
      seg = (order >= 0) & (index < lengths[:, None])
      tokens = np.zeros(seg.shape, np.int32)
      for row, prompt, have in zip(tokens, prompts, seg, strict=True):
        row[have] = prompt[index[have]]
      last = lengths - 1 - first
      yield PromptCall(
        tokens=tokens,
        pos=None
        if self.chunk is None
        else (start[:, None] + index).astype(np.int32),
        seg=seg.astype(np.int32),
        rows=where[np.clip(last, 0, order.size - 1)],
        ends=(last >= 0) & (last < order.size),
        done=min(first + order.size, longest),
      )

  def _orders(self) -> Iterator[tuple[int, np.ndarray]]:
    """Each call's first token, and its tokens counted from there; -1: none."""
    step = self.chunk or self.width
    for first in range(0, self.width, step):
      size = min(step, self.width - first)
      yield first, self.layout.padded_order(size, self.attend.size)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillOptions:
  """How a caller wants prompts to be read.

  Attributes:
    method: one of `METHODS`.
    chunk: most tokens of a chunk, for "chunked".
    partition: tokens of each shard, for "kvr".
    machine: what "auto" chooses by; None: by rules.
    keep: where the cache is wanted, one of `KEEPS`.
    wire: how keys and values travel between shards, as in `Ring`; None: as
      they are.

  Raises:
    OptionError: an unknown name, or options that do not go together.
  """

  method: str = "auto"
  chunk: int | None = None
  partition: Sequence[int] | None = None
  machine: Machine | None = None
  keep: str = KEEPS[0]
  wire: WireLike | None = None

  def __post_init__(self) -> None:
    leave = "leave it out for the default, or pass one of these"
    one_of("prefill", self.method, METHODS, remedy=leave)
    one_of("keep", self.keep, KEEPS, remedy=leave)
    if self.chunk is not None:
      object.__setattr__(self, "chunk", positive_int("chunk", self.chunk))
    if self.wire is not None:
      object.__setattr__(self, "wire", wire_of(self.wire))
    machine = self.machine
    if machine is not None and not isinstance(machine, Machine):
      raise OptionError(
        "machine",
        type(machine).__name__,
        "an rj.plan.Machine",
        "pass rj.plan.Machine(profile=..., network=...)",
      )
    for name, methods in (
      ("machine", ("auto",)),
      ("partition", ("kvr",)),
      ("chunk", ("chunked", "auto")),
    ):
      value = getattr(self, name)
      if value is not None and self.method not in methods:
        raise OptionError(
          name,
          f"{'one' if value is machine else value} with "
          f"prefill={self.method!r}",
          f"prefill={methods[0]!r}",
          f"leave {name}= or prefill= out",
        )
    if machine is not None and self.chunk is not None:
      raise OptionError(
        "machine",
        f"one with chunk={self.chunk!r}",
        "no chunk, which leaves it nothing to choose",
        "leave chunk= or machine= out",
      )

  def plan(
    self,
    tokens: int,
    model: Transformer,
    mesh: Mesh | None,
    axis: str | None,
    *,
    room: int | None = None,
    behind: bool = False,
    kind: CacheKind = WINDOWED,
  ) -> Prefill:
    """Resolves the method for a prompt.

    On one shard there is nothing to send: every method that shards the
    sequence is then "blockwise", which computes the same, and `Prefill.why`
    says so.

    Args:
      tokens: of the longest prompt.
      model: what reads it.
      mesh: the mesh, None for one device.
      axis: the axis that shards the sequence, or None.
      room: tokens that the cache has room for, if there is one already.
      behind: whether the cache holds tokens, which the prompt has to see.
      kind: of the cache. Where older tokens go to the hosts' memory, "auto"
        reads a prompt in chunks that is longer than what stays, and any prompt
        where a codec stores them: a row is read as if it were alone.

    Raises:
      OptionError: a method that does not fit the mesh, the model or the
        cache, or a machine where there is no choice.
    """
    size = 1
    if axis is not None:
      assert mesh is not None
      size = mesh.shape[axis]
    recurrent = any(isinstance(kind, StateShape) for kind in model.kinds)
    width = padded(tokens, size, room)
    name, partition, why = self._resolved(
      width, model, size, recurrent, behind, kind
    )
    if self.wire is not None and size > 1 and name in _UNWIRED:
      raise OptionError(
        "wire",
        f"{self.wire} with prefill={name!r} ({why})",
        "a method that sends keys from shard to shard",
        "pass prefill='striped', for instance, or leave wire out",
      )
    alone = self.wire is not None and size == 1
    sends = "; one shard sends nothing" if alone else ""
    if name == "chunked":
      most = self.chunk
      if most is None and kind.device is not None:
        most = min(_CHUNK, kind.device)
      chunk, width = chunks(tokens, size, most, room)
      return Prefill(
        name=name,
        attend=CachedAttention(mesh=mesh, axis=axis, replicated=False),
        chunk=chunk,
        width=width,
        slots=width // size,
        why=why + sends,
        layout=Contiguous() if recurrent else Striped(),
      )
    chain = name == "kvr"
    ordered = not chain and isinstance(_STRATEGIES[name][0], Contiguous)
    if recurrent and size > 1 and not ordered:
      raise OptionError(
        "prefill",
        f"{name!r} for a model with recurrent layers",
        "even shards of consecutive tokens, over which their state goes on",
        "pass prefill='ring', or leave it out",
      )
    slots, counts = width // size, (width,)
    if chain:
      counts = _partition(model, tokens, width, size, partition)
      width, slots = sum(counts), max(counts)
      if partition is None:
        why = f"parts of {counts} tokens, computed from FLOPs"
    if size == 1 and (chain or _STRATEGIES[name][2]):
      why = f"{name!r} was asked for, and on one shard it is this"
      name = "blockwise"
    if name == "kvr":
      attend: ContextParallel = ChainParallel(
        mesh=mesh,
        axis=axis,
        layout=Uneven(counts),
        strategy=Chain(wire=self.wire),
      )
    else:
      layout, strategy, sharded = _STRATEGIES[name]
      if not sharded and size > 1:
        raise OptionError(
          "prefill",
          f"{name!r} on a mesh whose {axis!r} has {size} shards",
          "a method that shards the sequence, or one device",
          "pass prefill='striped', or no mesh",
        )
      if name == "hybrid":
        _check_groups(model, strategy, size)
      if self.wire is not None and size > 1:
        strategy = coded(strategy, self.wire)
      attend = ContextParallel(
        mesh=mesh, axis=axis, layout=layout, strategy=strategy
      )
    return Prefill(
      name=name,
      attend=attend,
      chunk=None,
      width=width,
      slots=slots,
      why=why + sends,
      layout=attend.layout,
    )

  def _resolved(
    self,
    width: int,
    model: Transformer,
    size: int,
    recurrent: bool,
    behind: bool,
    kind: CacheKind,
  ) -> tuple[str, Sequence[int] | None, str]:
    """A method that is not "auto", its partition, and why it is this one."""
    name, machine = self.method, self.machine
    if machine is not None:
      machine.profile.check_layers(len(model.config.layers))
      if recurrent and size > 1:
        raise OptionError(
          "machine",
          "one for a model with recurrent layers",
          "none: on a sharded sequence prefill='auto' is 'ring' for them",
          "leave it out",
        )
    if behind and name not in ("auto", "chunked"):
      raise OptionError(
        "prefill",
        f"{name!r} into a cache that holds tokens",
        "'chunked', which sees them",
        "pass prefill='auto'",
      )
    if name != "auto":
      return name, self.partition, "as asked"
    if behind:
      return "chunked", None, "it continues a conversation"
    if self.chunk is not None:
      return "chunked", None, "a chunk size was given"
    stay = kind.device
    longer = stay is not None and (width > stay or kind.codec is not None)
    if longer and machine is None:
      return "chunked", None, f"{stay} tokens of a row stay on the devices"
    if size > 1 and recurrent:
      return "ring", None, "a recurrent layer's state goes from shard to shard"
    if size == 1:
      why = "one shard"
      if machine is not None:
        why += ": the machine leaves nothing to choose"
      return "blockwise", None, why
    if machine is None:
      why = f"{size} shards: striped keeps all busy in every hop"
      return "striped", None, why
    choice = plans.choose(
      machine,
      cost.Prompt(tokens=width, window=work_profile.window(model)),
      size,
      keep=self.keep,
      tile=tile(width, size),
    )
    name = choice.way.method
    partition = choice.way.lengths if name == "kvr" else None
    return name, partition, "; ".join(choice.why)


def _check_groups(model: Transformer, strategy: Any, size: int) -> None:
  """Refuses shards of which no groups can trade heads evenly."""
  mixers = (m for layer in model.config.layers for m in layer.mixers)
  for mixer in mixers:
    if isinstance(mixer.cache_shape(1), StateShape):
      continue
    spec: Any = mixer
    # Latent attention is expanded where keys travel.
    heads = getattr(spec, "kv_heads", spec.heads)
    try:
      group_of(strategy, size, heads)
    except OptionError:
      raise OptionError(
        "prefill",
        f"'hybrid' on {size} shards for {heads} kv heads",
        "groups of two shards or more, but not all, which share the heads",
        "pass prefill='striped' or 'ulysses', or use another mesh",
      ) from None


def _partition(
  model: Transformer,
  tokens: int,
  width: int,
  shards: int,
  given: Sequence[int] | None,
) -> tuple[int, ...]:
  """Tokens of each shard of a chain; adds up to `width`, or as given."""
  if given is None:
    shares = plans.balanced(
      work_profile.profile(model, width), cost.Prompt(tokens=width), shards
    )
    return plans.round_to_tiles(shares, width, tile(width, shards))
  whole = isinstance(given, Sequence | np.ndarray) and all(
    isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0
    for n in given
  )
  if not whole or len(given) != shards or sum(given) < tokens:
    raise OptionError(
      "partition",
      f"{given}, in all {sum(given) if whole else '?'}",
      f"{shards} positive ints that add up to at least {tokens}",
      "leave it out, or see python -m launch.plan kvr",
    )
  return tuple(int(n) for n in given)


def tile(tokens: int, shards: int) -> int:
  """The tokens of which a chain's parts are multiples."""
  return max(1, min(_TILE, tokens // (4 * shards)))


def chunks(
  tokens: int, shards: int, most: int | None, room: int | None = None
) -> tuple[int, int]:
  """Tokens of a chunk, a multiple of the shards, and of all chunks together.

  A chunk has as many as `most` allows, however long the prompt is: each row of
  a batch is cut as if it were alone. The last chunk has few sizes, so that
  turns share programs; where the room does not hold it, it is shorter.
  """

  def up(n: int) -> int:
    return -(-n // shards) * shards

  chunk = up(_CHUNK if most is None else most)
  before = max(0, tokens - 1) // chunk * chunk
  last = min(chunk, padded(tokens - before, shards))
  if room is not None and before + last > room:
    last = max(up(tokens - before), (room - before) // shards * shards)
  return min(chunk, before + last), before + last


def padded(tokens: int, shards: int, room: int | None = None) -> int:
  """A length of which there are few (8 an octave), so that few are compiled.

  A multiple of 8 tokens a shard; where the room is less than that, what there
  is of it, or what the tokens take at least.
  """
  least = 8 * shards
  step = max(least, 1 << max(0, tokens.bit_length() - 4))
  step = -(-step // least) * least
  length = -(-max(tokens, 1) // step) * step
  if room is None or length <= room:
    return length
  # Two tokens a shard suit every layout.
  unit = 2 * shards if shards > 1 else 1
  return max(-(-tokens // unit), room // unit) * unit


@bounded
@functools.partial(
  jax.jit, static_argnums=(1,), donate_argnums=(5,), keep_unused=True
)
def read(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "B T"] | None,
  seg: Int[Array, "B T"],
  cache: CallCache,
  rows: Int[Array, " B"],
  length: Lengths,
) -> tuple[Float[Array, "B V"], Any]:
  """The compiled call: logits of the tokens behind `rows`, and the cache.

  `length` is that of the whole context or of each row's prompt, for rotations
  that depend on it.
  """
  logits, cache = forward(
    model, attend, tokens, pos, seg, cache, rows[:, None], length
  )
  return attend.everywhere(logits[:, 0]), cache

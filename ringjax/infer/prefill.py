"""Reading a prompt: which way its keys go, and in chunks or at once.

Law: every way leaves a cache from which the same tokens follow.
Memory: the cache is written in place, once; there is no second copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import plan as plans
from ringjax.errors import OptionError
from ringjax.kv.state import StateShape
from ringjax.models import work_profile
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import (
  CachedAttention,
  ChainParallel,
  ContextParallel,
  ShardingContext,
)
from ringjax.ops.attention.dense import Dense as DenseLocal
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.nesting import group_of
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.ulysses import Ulysses
from ringjax.parallel.layout import Contiguous, Striped, Uneven, Zigzag
from ringjax.plan import cost
from ringjax.plan.choice import KEEPS, Machine

# name: (layout, strategy, whether it needs an axis)
_WAYS: dict[str, tuple[Any, Any, bool]] = {
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
# Tokens of a chunk, unless a size is asked for.
_CHUNK = 4096
METHODS = ("auto", *_WAYS, "kvr", "chunked")
# Parts of a sequence are whole numbers of these.
_TILE = 128


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
    consecutive: whether a shard's tokens of a chunk are consecutive.
    why: why "auto" chose it.
  """

  name: str
  attend: ShardingContext
  chunk: int | None
  width: int
  slots: int
  why: str
  consecutive: bool = False

  def taken(self, lengths: np.ndarray, shards: int) -> np.ndarray:
    """Slots that prompts of these lengths [B] take on each shard, [B, R]."""
    if self.chunk is None:
      order = self.attend.layout.padded_order(self.width, shards)
      at = order.reshape(shards, -1)
      here = (at >= 0) & (at < lengths[:, None, None])
      return np.max(np.where(here, np.arange(1, at.shape[1] + 1), 0), 2)
    found = np.zeros((lengths.size, shards), np.int64)
    for first in range(0, self.width, self.chunk):
      size = min(self.chunk, self.width - first)
      at = first + self.order(size, shards).reshape(shards, -1)
      found += (at < lengths[:, None, None]).sum(2)
    return found

  def order(self, size: int, shards: int) -> np.ndarray:
    """The tokens of a chunk in the order of the shards, int [size].

    Striped, so that a short row's tokens are level over the shards, but for
    recurrent layers, which want consecutive tokens.
    """
    layout = Contiguous() if self.consecutive else Striped()
    return layout.order(size, shards)


def plan(
  name: str,
  tokens: int,
  model: Transformer,
  mesh: Any,
  axis: str | None,
  *,
  chunk: int | None = None,
  partition: Sequence[int] | None = None,
  room: int | None = None,
  machine: Machine | None = None,
  keep: str = KEEPS[0],
) -> Prefill:
  """Resolves a method by name for a prompt of `tokens`.

  Args:
    name: one of `METHODS`.
    tokens: of the longest prompt.
    model: what reads it.
    mesh: the mesh, None for one device.
    axis: the axis that shards the sequence, or None.
    chunk: most tokens of a chunk, for "chunked".
    partition: tokens of each shard, for "kvr".
    room: tokens that the cache has room for, if there is one already.
    machine: what "auto" chooses by; None: by rules.
    keep: where the cache is wanted, for "auto".

  On one shard there is nobody to send to: every way that shards the sequence
  is then "blockwise", which computes the same, and `Prefill.why` says so.

  Raises:
    OptionError: an unknown name, or one that does not fit the mesh, or a
      machine where there is no choice.
  """
  if name not in METHODS:
    raise OptionError(
      "prefill", repr(name), f"one of {', '.join(METHODS)}", "leave it out"
    )
  if chunk is not None and (
    not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1
  ):
    raise OptionError("chunk", repr(chunk), "a positive int", "leave it out")
  if chunk is not None and name not in ("auto", "chunked"):
    raise OptionError(
      "chunk",
      f"{chunk} with prefill={name!r}",
      "prefill='chunked'",
      "leave one of them out",
    )
  if partition is not None and name != "kvr":
    raise OptionError(
      "partition",
      f"{partition} with prefill={name!r}",
      "prefill='kvr'",
      "leave one of them out",
    )
  size = 1 if axis is None else mesh.shape[axis]
  why = "as asked"
  recurrent = any(isinstance(kind, StateShape) for kind in model.kinds)
  if machine is not None:
    check_machine(machine, name, model, chunk)
    if recurrent and size > 1:
      raise OptionError(
        "machine",
        "one for a model with recurrent layers",
        "none: on a sharded sequence prefill='auto' is 'ring' for them",
        "leave it out",
      )
  if name == "auto":
    name, why = _choose(size, chunk, recurrent)
    if name == "striped" and machine is not None:
      width = padded(tokens, size, room)
      choice = plans.choose(
        machine,
        cost.Prompt(tokens=width, window=work_profile.window(model)),
        size,
        keep=keep,
        tile=tile(width, size),
      )
      name, why = choice.way.method, "; ".join(choice.why)
      if name == "kvr":
        partition = choice.way.lengths
    elif machine is not None:
      why += ": the machine leaves nothing to choose"
  if name == "chunked":
    chunk, width = chunks(tokens, size, chunk, room)
    return Prefill(
      name=name,
      attend=CachedAttention(mesh=mesh, axis=axis, replicated=False),
      chunk=chunk,
      width=width,
      slots=width // size,
      why=why,
      consecutive=recurrent,
    )
  width = padded(tokens, size, room)
  apart = name == "kvr" or not isinstance(_WAYS[name][0], Contiguous)
  if recurrent and size > 1 and apart:
    raise OptionError(
      "prefill",
      f"{name!r} for a model with recurrent layers",
      "even shards of consecutive tokens, over which their state goes on",
      "pass prefill='ring', or leave it out",
    )
  if name == "kvr":
    counts = _partition(model, tokens, width, size, partition)
    if size == 1:
      # One part, of the length that was asked for.
      return _alone(name, counts[0], mesh, axis)
    chained = ChainParallel(mesh=mesh, axis=axis, layout=Uneven(counts))
    return Prefill(
      name=name,
      attend=chained,
      chunk=None,
      width=sum(counts),
      slots=max(counts),
      why=why
      if partition is not None
      else f"parts of {counts} tokens, computed from FLOPs",
    )
  layout, strategy, sharded = _WAYS[name]
  if sharded and size == 1:
    return _alone(name, width, mesh, axis)
  if not sharded and size > 1:
    raise OptionError(
      "prefill",
      f"{name!r} on a mesh whose {axis!r} has {size} shards",
      "a method that shards the sequence, or one device",
      "pass prefill='striped', or no mesh",
    )
  if name == "hybrid":
    _check_groups(model, strategy, size)
  attend = ContextParallel(
    mesh=mesh, axis=axis, layout=layout, strategy=strategy
  )
  return Prefill(
    name=name,
    attend=attend,
    chunk=None,
    width=width,
    slots=width // size,
    why=why,
  )


def _check_groups(model: Transformer, strategy: Any, size: int) -> None:
  """Refuses shards that no groups of trade heads evenly."""
  for layer in model.config.layers:
    spec = layer.attention
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


def _alone(asked: str, width: int, mesh: Any, axis: str | None) -> Prefill:
  """A way that shards the sequence, where there is but one shard."""
  layout, strategy, _ = _WAYS["blockwise"]
  return Prefill(
    name="blockwise",
    attend=ContextParallel(
      mesh=mesh, axis=axis, layout=layout, strategy=strategy
    ),
    chunk=None,
    width=width,
    slots=width,
    why=f"{asked!r} was asked for, and on one shard it is this",
  )


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


def check_machine(
  machine: Any, name: str, model: Transformer, chunk: Any = None
) -> None:
  """Refuses what no prefill can be chosen by.

  Raises:
    OptionError: no machine, one of another model, or nothing to choose.
  """
  if not isinstance(machine, Machine):
    raise OptionError(
      "machine",
      type(machine).__name__,
      "an rj.plan.Machine",
      "pass rj.plan.Machine(profile=..., network=...)",
    )
  if name != "auto":
    raise OptionError(
      "machine",
      f"one with prefill={name!r}",
      "prefill='auto', which chooses by it",
      "leave one of them out",
    )
  if chunk is not None:
    raise OptionError(
      "machine",
      f"one with chunk={chunk!r}",
      "no chunk, which leaves it nothing to choose",
      "leave one of them out",
    )
  machine.profile.check_layers(len(model.config.layers))


def chunks(
  tokens: int, shards: int, most: int | None, room: int | None = None
) -> tuple[int, int]:
  """Tokens of a chunk, a multiple of the shards, and of all chunks together.

  Chunks are as few as `most` allows and equal, so that little of them is
  padding, and of few sizes, so that turns share programs. Where the room does
  not hold them all, the last one is shorter.
  """

  def up(n: int) -> int:
    return -(-n // shards) * shards

  limit = up(_CHUNK if most is None else most)
  count = -(-tokens // limit)
  chunk = min(limit, padded(-(-tokens // count), shards))
  width = count * chunk
  if room is not None and width > room:
    before = width - chunk
    left = max(up(tokens - before), (room - before) // shards * shards)
    width = before + min(padded(tokens - before, shards), left)
  return min(chunk, width), width


def _choose(size: int, chunk: int | None, recurrent: bool) -> tuple[str, str]:
  if chunk is not None:
    return "chunked", "a chunk size was given"
  if size > 1 and recurrent:
    return "ring", "a recurrent layer's state goes from shard to shard"
  if size > 1:
    return "striped", f"{size} shards: striped keeps all busy in every hop"
  return "blockwise", "one shard"


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


@functools.partial(
  jax.jit, static_argnums=(1,), donate_argnums=(5,), keep_unused=True
)
def read(
  model: Transformer,
  attend: ShardingContext,
  tokens: jax.Array,
  pos: Any,
  seg: Any,
  cache: Any,
  rows: jax.Array,
  length: jax.Array,
) -> tuple[jax.Array, Any]:
  """The compiled call: logits [B, V] behind `rows` [B], and the cache."""
  logits, cache = forward(
    model, attend, tokens, pos, seg, cache, rows[:, None], length
  )
  return attend.everywhere(logits[:, 0]), cache


def whole(
  model: Transformer,
  how: Prefill,
  tokens: np.ndarray,
  lengths: np.ndarray,
  cache: Any,
  length: int,
) -> tuple[jax.Array, Any]:
  """Reads all at once: logits [B, V] behind each last token, and the cache."""
  attend = how.attend
  layout, shards = attend.layout, attend.size
  # Slots of a shard that has fewer tokens than others are empty.
  order = np.asarray(layout.padded_order(tokens.shape[1], shards))
  where = np.zeros(tokens.shape[1], np.int32)
  where[order[order >= 0]] = np.flatnonzero(order >= 0)
  real = (order >= 0) & (order < lengths[:, None])
  return read(
    model,
    attend,
    jnp.asarray(np.where(real, tokens[:, order], 0)),
    None,
    jnp.asarray(real.astype(np.int32)),
    cache,
    jnp.asarray(where[lengths - 1]),
    jnp.int32(length),
  )


def chunked(
  model: Transformer,
  how: Prefill,
  tokens: np.ndarray,
  lengths: np.ndarray,
  start: np.ndarray,
  cache: Any,
  length: int,
  keep: Callable[[Any, int], Any],
  progress: Any = None,
) -> jax.Array:
  """Reads chunk by chunk, behind what the cache already holds: the logits.

  `start` [B] is the position of each example's first token. After each chunk
  `keep` gets the cache, which takes the place of the one before, and the
  tokens done so far; then `progress` is called with the tokens done.
  """
  assert how.chunk is not None
  total, shards = tokens.shape[1], how.attend.size
  found: Any = None
  for first in range(0, total, how.chunk):
    size = min(how.chunk, how.width - first)
    part = np.zeros((tokens.shape[0], size), np.int32)
    have = tokens[:, first : first + size]
    part[:, : have.shape[1]] = have
    order = how.order(size, shards)
    part, index = part[:, order], first + order
    seg = (index[None] < lengths[:, None]).astype(np.int32)
    pos = start[:, None] + index[None]
    last = lengths - 1 - first
    rows = np.argsort(order)[np.clip(last, 0, size - 1)].astype(np.int32)
    logits, cache = read(
      model,
      how.attend,
      jnp.asarray(part),
      jnp.asarray(pos.astype(np.int32)),
      jnp.asarray(seg),
      cache,
      jnp.asarray(rows),
      jnp.int32(length),
    )
    done = min(first + size, total)
    keep(cache, done)
    here = jnp.asarray((last >= 0) & (last < size))
    found = logits if found is None else jnp.where(here[:, None], logits, found)
    if progress is not None:
      jax.block_until_ready(logits)
      progress(done)
  return found

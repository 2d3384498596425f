"""Reading a prompt: which way its keys go, and in chunks or at once.

Law: every way leaves a cache from which the same tokens follow.
Memory: the cache is written in place, once; there is no second copy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.errors import OptionError, message
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.spread import Spread, Travel, Visit
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.dense import Dense as DenseLocal
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.ulysses import Ulysses
from ringjax.parallel.layout import Contiguous, Striped, Zigzag

# name: (layout, strategy, whether it needs an axis)
_WAYS: dict[str, tuple[Any, Any, bool]] = {
  "dense": (Contiguous(), Gather(DenseLocal()), False),
  "blockwise": (Contiguous(), Gather(Blockwise()), False),
  "ring": (Contiguous(), Ring(), True),
  "striped": (Striped(), Ring(), True),
  "zigzag": (Zigzag(), Ring(), True),
  "gather": (Contiguous(), Gather(), True),
  "ulysses": (Contiguous(), Ulysses(), True),
}
METHODS = ("auto", *_WAYS, "chunked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
  """How a prompt is read.

  Attributes:
    name: one of `METHODS`, "auto" resolved.
    spread: what the model is called with.
    chunk: tokens of a chunk, None for all at once.
    why: why "auto" chose it.
  """

  name: str
  spread: Spread
  chunk: int | None
  why: str


def plan(
  name: str, tokens: int, mesh: Any, axis: str | None, chunk: int | None
) -> Prefill:
  """Resolves a method by name for a prompt of `tokens`.

  Raises:
    OptionError: an unknown name, or one that does not fit the mesh.
  """
  if name not in METHODS:
    raise OptionError(
      message(
        "prefill", repr(name), f"one of {', '.join(METHODS)}", "leave it out"
      )
    )
  if chunk is not None and (
    not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1
  ):
    raise OptionError(
      message("chunk", repr(chunk), "a positive int", "leave it out")
    )
  if chunk is not None and name not in ("auto", "chunked"):
    raise OptionError(
      message(
        "chunk",
        f"{chunk} with prefill={name!r}",
        "prefill='chunked'",
        "leave one of them out",
      )
    )
  size = 1 if axis is None else mesh.shape[axis]
  why = "as asked"
  if name == "auto":
    name, why = _choose(size, chunk)
  if name == "chunked":
    chunk = min(chunk or 4096, max(tokens, 1))
    chunk = -(-chunk // size) * size
    return Prefill(
      name=name,
      spread=Visit(mesh=mesh, axis=axis, spread=False),
      chunk=chunk,
      why=why,
    )
  layout, strategy, sharded = _WAYS[name]
  if not sharded and size > 1:
    raise OptionError(
      message(
        "prefill",
        f"{name!r} on a mesh whose {axis!r} has {size} shards",
        "a method that shards the sequence, or one device",
        "pass prefill='striped', or no mesh",
      )
    )
  spread = Travel(mesh=mesh, axis=axis, layout=layout, strategy=strategy)
  return Prefill(name=name, spread=spread, chunk=None, why=why)


def _choose(size: int, chunk: int | None) -> tuple[str, str]:
  if chunk is not None:
    return "chunked", "a chunk size was given"
  if size > 1:
    return "striped", f"{size} shards: striped keeps all busy in every hop"
  return "blockwise", "one shard"


def padded(tokens: int, shards: int, capacity: int | None = None) -> int:
  """A length of which there are few (8 an octave), so that few are compiled.

  A multiple of 8 tokens a shard, at most `capacity` if that is enough.
  """
  least = 8 * shards
  step = max(least, 1 << max(0, tokens.bit_length() - 4))
  step = -(-step // least) * least
  length = -(-max(tokens, 1) // step) * step
  if capacity is not None and length > capacity >= tokens:
    return capacity
  return length


@functools.partial(
  jax.jit, static_argnums=(1,), donate_argnums=(5,), keep_unused=True
)
def _read(
  model: Transformer,
  spread: Spread,
  tokens: jax.Array,
  pos: Any,
  seg: Any,
  cache: Any,
  rows: jax.Array,
  length: jax.Array,
) -> tuple[jax.Array, Any]:
  logits, cache = forward(
    model, spread, tokens, pos, seg, cache, rows[:, None], length
  )
  return spread.everywhere(logits[:, 0]), cache


def whole(
  model: Transformer,
  how: Prefill,
  tokens: np.ndarray,
  lengths: np.ndarray,
  cache: Any,
  length: int,
) -> tuple[jax.Array, Any]:
  """Reads all at once: logits [B, V] behind each last token, and the cache."""
  spread = how.spread
  layout, shards = spread.layout, spread.size
  total = tokens.shape[1]
  order = np.asarray(layout.order(total, shards))
  where = np.argsort(order)
  seg = (np.arange(total)[None] < lengths[:, None]).astype(np.int32)
  return _read(
    model,
    spread,
    jnp.asarray(tokens[:, order]),
    None,
    jnp.asarray(seg[:, order]),
    cache,
    jnp.asarray(where[lengths - 1].astype(np.int32)),
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
  progress: Any = None,
) -> tuple[jax.Array, Any]:
  """Reads chunk by chunk, behind what the cache already holds.

  `start` [B] is the position of each example's first token. `progress` is
  called with the tokens done so far, after each chunk.
  """
  assert how.chunk is not None
  size, total = how.chunk, tokens.shape[1]
  found: Any = None
  for first in range(0, total, size):
    part = np.zeros((tokens.shape[0], size), np.int32)
    have = tokens[:, first : first + size]
    part[:, : have.shape[1]] = have
    index = first + np.arange(size)
    seg = (index[None] < lengths[:, None]).astype(np.int32)
    pos = start[:, None] + index[None]
    last = lengths - 1 - first
    rows = np.clip(last, 0, size - 1).astype(np.int32)
    logits, cache = _read(
      model,
      how.spread,
      jnp.asarray(part),
      jnp.asarray(pos.astype(np.int32)),
      jnp.asarray(seg),
      cache,
      jnp.asarray(rows),
      jnp.int32(length),
    )
    here = jnp.asarray((last >= 0) & (last < size))
    found = logits if found is None else jnp.where(here[:, None], logits, found)
    if progress is not None:
      jax.block_until_ready(logits)
      progress(min(first + size, total))
  return found, cache

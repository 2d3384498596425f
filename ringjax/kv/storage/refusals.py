"""Refuse calls that a cache cannot serve: what does not fit, or clashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ringjax.errors import OptionError, PromptError, ShapeError
from ringjax.kv.base import CallCoords
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.storage.pages import host
from ringjax.kv.summaries.summary_spec import SummarySpec
from ringjax.ops.mask import SameSegment

if TYPE_CHECKING:
  from ringjax.kv.model_cache import ModelCache


def refused(doing: str, remedy: str) -> Callable[..., Any]:
  """A method of storage that cannot do this: it raises an OptionError."""

  def refuse(self: ModelCache, *args: Any, **options: Any) -> Any:
    raise OptionError(
      "cache", f"{doing} of {self.described}", self.instead, remedy
    )

  return refuse


def refuse_beyond_slack(cache: ModelCache, option: str, tokens: int) -> None:
  """Refuse to take back tokens of a call that overwrote others in a ring.

  Args:
    cache: Cache of the call, with or without ring buffers.
    option: Name of the argument, for the error.
    tokens: Number of tokens of the call, T.

  Raises:
    OptionError: If the slack of ring buffers is smaller.
  """
  slack = cache.kind.layout.slack
  if cache.rings and tokens > slack:
    raise OptionError(
      option,
      f"{tokens} tokens, with windowed layers",
      f"at most {slack}, of which these can take some back",
      "make the cache with kind='dense', or with a larger slack",
    )


def check_call(
  cache: ModelCache, batch: int, tokens: int, *, replicated: bool, sees: bool
) -> None:
  """Check that tokens [B, T] fit; see `ModelCache.check`."""
  size = cache.shards
  if batch != cache.batch:
    raise ShapeError(
      "cache",
      f"{batch} example(s) for a cache of {cache.batch}",
      "as many examples as the cache was made for",
      f"make one with model.init_cache({batch}, {cache.capacity})",
    )
  if not replicated and tokens % size:
    raise ShapeError(
      "tokens",
      f"{tokens} tokens over {size} shards",
      f"a multiple of {size}",
      "fill them up with tokens whose segment_ids are 0",
    )
  if cache.lost:
    raise OptionError(
      "cache",
      "one whose buffers were donated to an earlier call or to evict",
      "the cache that this returned",
      f"pass that one, or {cache.remake}",
    )
  older = None if sees else cache.older_ends
  if older is not None and not isinstance(older, jax.core.Tracer):
    refuse_unseen(sees, int(host(older).max(initial=0)))
  if cache.parts and not cache.resizes:
    for part in cache.parts:
      part.check(part.batch, tokens, replicated=replicated, sees=sees)
    return
  front, growth = cache.front, cache.growth
  # How a policy keeps to its limit is its own matter.
  remaining, free = None if cache.kind.evicting else cache.free(), front.free()
  if free is None:
    free = np.full((batch, size), front.capacity // size)
  refuse_unseen(sees, int(front.capacity - free.sum(1).min()))
  limit = cache.capacity if growth is None else growth.limit
  larger = "make a larger one, with model.init_cache(batch, capacity)"
  evict = f"call cache.evict().with_room({tokens}) before, outside of jit"
  grows = cache.resizes or growth is not None
  for slots, capacity, remedy in (
    (remaining, limit, larger),
    (free, front.capacity, evict if grows else larger),
  ):
    if slots is None:
      continue
    num_fitting = int(slots.sum(1).min() if replicated else size * slots.min())
    if tokens > num_fitting:
      raise PromptError(
        "cache",
        f"{tokens} more tokens for a cache of {capacity} slots, of which "
        f"{capacity - num_fitting} are taken",
        f"at most {num_fitting}",
        remedy,
      )


def refuse_unseen(sees: bool, tokens: int) -> None:
  """Refuse a call that does not attend to the tokens in the cache.

  Raises:
    OptionError: If there are `tokens` and the call does not see them.
  """
  if tokens and not sees:
    raise OptionError(
      "attend",
      f"ContextParallel() after {tokens} tokens in the cache",
      "an empty cache, for the old tokens would not be seen",
      "pass attend=CachedAttention(), or leave it out",
    )


def refuse_documents(
  kind: CacheConfig, shapes: Sequence[Any], coords: CallCoords
) -> None:
  """Refuse documents that see each other where their order decides what stays.

  Raises:
    OptionError: If the cache drops tokens and documents see each other.
  """
  segments = coords.segments
  if coords.seg is None or segments == SameSegment():
    return
  windows = any(getattr(shape, "reach", None) for shape in shapes)
  chooses = kind.evicting or kind.tier.hot is not None
  if chooses or (kind.layout.windowed and windows):
    raise OptionError(
      "cache",
      f"kind {kind} with segments={segments}",
      "a cache that keeps all tokens: what others drop depends on which "
      "documents see each other",
      'pass model.init_cache(..., kind="dense")',
    )


def refuse_gaps(cache: ModelCache, coords: CallCoords) -> None:
  """Refuse positions that leave gaps, for layers with summaries of windows.

  Traced arrays are not checked, nor those of several processes.

  Args:
    cache: Cache of the call.
    coords: Coordinates of the call's tokens.

  Raises:
    OptionError: If a row's positions are not those after its tokens.
  """
  summarized = any(isinstance(x, SummarySpec) for x in cache.shapes)
  if coords.pos is None or not summarized:
    return
  length = cache.length
  arrays = [x for x in (length, coords.pos, coords.seg) if x is not None]
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    return
  if not all(getattr(x, "is_fully_addressable", True) for x in arrays):
    return
  ends, pos = host(length), host(coords.pos)
  real = np.ones_like(pos) if coords.seg is None else host(coords.seg)
  pos, real = (
    np.broadcast_to(x, (ends.size, pos.shape[1])) for x in (pos, real)
  )
  for row, end in enumerate(ends):
    row_pos = np.sort(pos[row][real[row] > 0])
    if not np.array_equal(row_pos, end + np.arange(row_pos.size)):
      raise OptionError(
        "positions",
        f"{row_pos[:8].tolist()} in row {row}, which has {end} tokens, for "
        "layers that choose by means or compressed keys of successive tokens",
        f"successive positions from {end} on",
        "leave positions out",
      )


def refuse_holes(cache: ModelCache, kept: Bool[Array, "B T"]) -> None:
  """Refuse to drop tokens before kept ones, for layers with summaries.

  A traced array is not checked.

  Args:
    cache: Cache of the call.
    kept: Tokens of the last call that stay.

  Raises:
    OptionError: If a row keeps a token after one that it drops.
  """
  summarized = any(isinstance(x, SummarySpec) for x in cache.shapes)
  if not summarized or isinstance(kept, jax.core.Tracer):
    return
  if not np.array_equal(np.logical_and.accumulate(host(kept), 1), host(kept)):
    raise OptionError(
      "kept",
      "tokens after dropped ones, for layers that choose by means or "
      "compressed keys of successive tokens",
      "the first tokens of the last call",
      "pass jnp.arange(T)[None] < accepted[:, None], or use keep_first",
    )


def refuse_shared_positions(
  kind: CacheConfig, capacity: int, coords: CallCoords
) -> None:
  """Refuse tokens that share a position, for a policy that looks at ids.

  Traced arrays are not checked.

  Raises:
    OptionError: If there are several, or positions beyond the capacity.
  """
  largest = lambda x: (
    0 if x is None or isinstance(x, jax.core.Tracer) else int(jnp.max(x))
  )
  fault = None
  if coords.parents is not None:
    fault = "a tree of drafted tokens"
  elif largest(coords.seg) > 1:
    fault = f"document {largest(coords.seg)} of a row"
  elif largest(coords.pos) >= capacity:
    fault = f"position {largest(coords.pos)} of {capacity}"
  if fault is not None:
    raise OptionError(
      "cache",
      f"{fault}, with a policy that looks at ids: {kind.policy}",
      "one token at each position of the cache",
      "read one document a row, from position 0 on, or use a policy without "
      "punctuation=",
    )

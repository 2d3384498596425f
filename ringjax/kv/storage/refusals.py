"""Refuse calls that a cache cannot serve: what does not fit, or clashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ringjax.errors import OptionError, PromptError
from ringjax.kv.base import CallCoords
from ringjax.kv.cache_kind import CacheConfig
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


def refuse_lost(cache: ModelCache, calls: str, result: str) -> None:
  """Refuse a cache whose buffers were donated.

  Args:
    cache: Cache of a call.
    calls: Calls to which they may have been donated.
    result: Name of the cache to pass.

  Raises:
    OptionError: If they were.
  """
  if cache.lost:
    raise OptionError(
      "cache",
      f"one whose buffers were donated to {calls}",
      f"the cache that {result} returned",
      "pass that one, or make a new one with model.init_cache",
    )


def fitting(free: Int[np.ndarray, "B R"], *, replicated: bool) -> int:
  """Number of tokens of a call that fit in all rows.

  Args:
    free: Free slots of each row and shard.
    replicated: Whether the tokens are the same on all shards.
  """
  shards = free.shape[1]
  return int(free.sum(1).min() if replicated else shards * free.min())


def refuse_full(tokens: int, free: int, capacity: int, remedy: str) -> None:
  """Refuse more tokens than fit.

  Args:
    tokens: Number of tokens of the call, T.
    free: Number of tokens that fit in all rows.
    capacity: Number of slots of a row.
    remedy: Call that makes room, or a larger cache.

  Raises:
    PromptError: If they do not fit.
  """
  if tokens > free:
    raise PromptError(
      "cache",
      f"{tokens} more tokens for a cache of {capacity} slots, of which "
      f"{capacity - free} are taken",
      f"at most {free}",
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
  if kind.evicting or (kind.layout.windowed and windows):
    raise OptionError(
      "cache",
      f"kind {kind} with segments={segments}",
      "a cache that keeps all tokens: what others drop depends on which "
      "documents see each other",
      'pass model.init_cache(..., kind="dense")',
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

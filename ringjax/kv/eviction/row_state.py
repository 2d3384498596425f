"""State of the rows of an evicting cache, by compiled programs."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ringjax.kv.eviction.eviction import fixed_rows
from ringjax.kv.eviction.recorded_queries import Noted
from ringjax.parallel.programs import bounded

if TYPE_CHECKING:
  from ringjax.kv.eviction.evicting import EvictingCache


@bounded
@functools.partial(jax.jit, static_argnums=1)
def noting(cache: EvictingCache, window: int) -> EvictingCache:
  """Resize the records to `window` queries, keeping the newest."""
  watch, noted = cache.watch, cache.noted
  assert watch.at is not None
  if window > watch.at.pos.shape[1]:
    watch = watch.widened(window)
    noted = tuple(x.widened(window) for x in noted)
  order = watch.order(window)
  return dataclasses.replace(
    cache,
    watch=watch.ordered(order),
    noted=tuple(x.ordered(order) for x in noted),
  )


@bounded
@jax.jit
def lengths(cache: EvictingCache) -> Int[Array, " B"]:
  """Lengths of the rows, on all devices."""
  return cache.open.held._everywhere(cache.length)


@bounded
@jax.jit
def state_of_rows(
  cache: EvictingCache,
) -> tuple[Int[Array, " B"], Bool[Array, " B"], Int[Array, " B"]]:
  """State of each row before an eviction.

  Returns:
    Its length, whether it got tokens since its eviction, and how many of its
    queries are recorded.
  """
  slot_table, at = cache.open.held, cache.watch.at
  came = slot_table.tokens() > cache.stayed
  num_queries = jnp.zeros((cache.batch,), jnp.int32)
  if at is not None:
    num_queries = jnp.sum(at.seg > 0, 1, dtype=jnp.int32)
  length, came, num_queries = map(
    slot_table._everywhere, (cache.length, came, num_queries)
  )
  return length, came, num_queries


@bounded
@jax.jit
def with_fixed(
  noted: tuple[Noted, ...], rows: Bool[Array, " B"]
) -> tuple[Noted, ...]:
  """Fix the choices of rows."""
  return tuple(
    x if x.fixed is None else x._replace(fixed=x.fixed | rows[None, :, None])
    for x in noted
  )


@bounded
@jax.jit
def fixed_everywhere(cache: EvictingCache) -> Bool[Array, " B"] | None:
  """`fixed_rows` on all devices."""
  fixed = fixed_rows(cache)
  return None if fixed is None else cache.open.held._everywhere(fixed)

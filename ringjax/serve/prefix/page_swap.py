"""Swapping of preempted rows' pages to host memory and back.

Guarantees: a row comes back with the bits that it had.
Cost: one copy out and one back, some pages at a time by programs of one shape;
whether copying or computing again costs less is estimated from the measured
times of both.
Memory: on the host a preempted row's pages and states, of several processes
the shards of each; on the device until the next step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.kv.storage.page_pool import PagePool
from ringjax.parallel.local_arrays import HostShards, to_devices, to_host
from ringjax.parallel.programs import bounded
from ringjax.serve.scheduler import KeptPages, ServedRow, StepPlan

PREEMPTIONS = ("auto", "recompute", "swap")
# Initial estimates: seconds of a prompt's token, and bytes a second between the
# device and the host.
_TOKEN_SECONDS, _RATE = 1e-3, 2e9
# Pages of each shard in one copy.
_BATCH = 16


@bounded
@jax.jit
def _read(pool: PagePool, pages: tuple[Any, ...]) -> Any:
  return [pool.read_pages(group, x) for group, x in enumerate(pages)]


@bounded
@functools.partial(jax.jit, donate_argnums=0)
def _write(pool: PagePool, pages: tuple[Any, ...], held: Any) -> PagePool:
  for group, (x, arrays) in enumerate(zip(pages, held, strict=True)):
    pool = pool.write_pages(group, x, arrays)
  return pool


_read_states = jax.jit(PagePool.read_states)
_write_states = jax.jit(PagePool.write_states, donate_argnums=0)


def _batches(
  tables: list[np.ndarray], fill: list[int]
) -> list[tuple[np.ndarray, ...]]:
  """Split each group's pages, int32 [R, k], into padded batches [R, 16]."""

  def cut(x: np.ndarray, n: int) -> list[np.ndarray]:
    count = -(-x.shape[1] // _BATCH)
    padding = [(0, 0), (0, count * _BATCH - x.shape[1])]
    return np.split(np.pad(x, padding, constant_values=n), count, 1)

  return list(zip(*map(cut, tables, fill[: len(tables)]), strict=True))


class PageSwap:
  """Copies the pages of preempted rows to host memory and back.

  Attributes:
    count: Number of rows whose pages were copied.
  """

  def __init__(
    self,
    how: str,
    page: int,
    page_bytes: int,
    choose: Callable[[bool], bool] = lambda keeps: keeps,
  ):
    """Start with estimated costs.

    Args:
      how: Policy, one of `PREEMPTIONS`.
      page: Number of tokens of a page.
      page_bytes: Bytes of a page, over all groups of layers.
      choose: Function of a choice by measured times, which returns the choice
        of all processes.
    """
    self._choose = choose
    self._how, self._page, self._page_bytes = how, page, page_bytes
    self._token_seconds, self._rate = _TOKEN_SECONDS, _RATE
    self._leaving: list[KeptPages] = []
    self._stepped: float | None = None
    self.count = 0

  def warm_up(self, pool: PagePool) -> PagePool:
    """Compile the copy programs; returns the pool unchanged."""
    if self._how == "recompute":
      return pool
    shape = pool.shards, _BATCH
    pages = tuple(np.zeros(shape, np.int32) for _ in pool.groups)
    payload = to_host(_read(pool, pages))
    none = tuple(
      np.full(shape, group.pages // pool.shards, np.int32)
      for group in pool.groups
    )
    pool = _write(pool, none, to_devices(payload))
    if pool.recurrent:
      states = to_host(_read_states(pool, jnp.int32(0)))
      pool = _write_states(pool, jnp.int32(0), to_devices(states))
    return pool

  def keeps(self, row: ServedRow) -> bool:
    """Whether a row's pages are copied rather than computed again."""
    if self._how != "auto":
      return self._how == "swap"
    batches = -(-row.computed // (self._page * _BATCH))
    size = batches * _BATCH * self._page_bytes
    return self._choose(
      2 * size / self._rate < row.computed * self._token_seconds
    )

  def out(self, pool: PagePool, row: ServedRow) -> None:
    """Copies a row's pages out before the next calls overwrite them."""
    kept_pages = row.kept
    assert kept_pages is not None
    # Pages outside of a window are copied like the others.
    columns = -(-kept_pages.computed // (self._page * pool.shards))
    tables = [
      np.maximum(x[:, :columns], 0)
      for x in kept_pages.tables[: len(pool.groups)]
    ]
    batches = _batches(tables, [0] * len(tables))
    arrays = [_read(pool, pages) for pages in batches]
    states = (
      _read_states(pool, jnp.int32(kept_pages.slot)) if pool.recurrent else ()
    )
    kept_pages.payload = arrays, states
    jax.tree.map(lambda x: x.copy_to_host_async(), kept_pages.payload)
    self._leaving.append(kept_pages)
    self.count += 1

  def back(self, pool: PagePool, row: ServedRow) -> PagePool:
    """Pool with a row's pages copied back to the pages that it has now."""
    kept_pages, row.kept = row.kept, None
    assert kept_pages is not None and row.slot is not None
    num_blocks = -(-kept_pages.computed // self._page)
    tables, none = [], [group.pages // pool.shards for group in pool.groups]
    for fill, into in zip(none, kept_pages.into, strict=False):
      # Pages that are shared or outside of a window are not written.
      arrays = np.full(
        (pool.shards, -(-num_blocks // pool.shards)), fill, np.int32
      )
      for number, page in into.items():
        if number < num_blocks:
          arrays[number % pool.shards, number // pool.shards] = page
      tables.append(arrays)
    payload: Any = kept_pages.payload
    batches, states = to_devices(payload)
    for pages, arrays in zip(_batches(tables, none), batches, strict=True):
      pool = _write(pool, pages, arrays)
    if pool.recurrent:
      pool = _write_states(pool, jnp.int32(row.slot), states)
    return pool

  def measure(self, plan: StepPlan) -> None:
    """Updates the measured seconds of a prompt's token and copy rate."""
    current_time = time.monotonic()
    if self._stepped is not None and plan.pieces:
      token_seconds = (current_time - self._stepped) / max(1, plan.tokens)
      self._token_seconds += 0.1 * (token_seconds - self._token_seconds)
    for kept_pages in self._leaving:
      start = time.monotonic()
      kept_pages.payload = to_host(kept_pages.payload)
      size = sum(
        x.nbytes
        for x in jax.tree.leaves(
          kept_pages.payload, is_leaf=lambda x: isinstance(x, HostShards)
        )
      )
      rate = size / max(1e-6, time.monotonic() - start)
      self._rate += 0.2 * (min(rate, 1e11) - self._rate)
    self._leaving = []
    self._stepped = None if plan.empty else time.monotonic()

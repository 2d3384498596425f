"""Pages of preempted rows: to the host's memory and back.

Guarantees: a row comes back with the bits that it had.
Cost: one copy out and one back, some pages at a time by programs of one shape;
which of the two, copying or computing again, costs less is judged by what both
took so far.
Memory: on the host a preempted row's pages and states; on the device until the
next step.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.kv.page_pool import PagePool
from ringjax.parallel.programs import bounded
from ringjax.serve.scheduler import KeptPages, ServedRow, StepPlan

PREEMPTIONS = ("auto", "recompute", "swap")
# Until they are measured: seconds of a token of a prompt, and bytes a second
# between the device and the host.
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
  for group, (x, one) in enumerate(zip(pages, held, strict=True)):
    pool = pool.write_pages(group, x, one)
  return pool


_read_states = jax.jit(PagePool.read_states)
_write_states = jax.jit(PagePool.write_states, donate_argnums=0)


def _batches(
  tables: list[np.ndarray], fill: list[int]
) -> list[tuple[np.ndarray, ...]]:
  """Pages of each group, int32 [R, k], as batches [R, 16], filled up."""

  def cut(x: np.ndarray, n: int) -> list[np.ndarray]:
    count = -(-x.shape[1] // _BATCH)
    wide = [(0, 0), (0, count * _BATCH - x.shape[1])]
    return np.split(np.pad(x, wide, constant_values=n), count, 1)

  return list(zip(*map(cut, tables, fill[: len(tables)]), strict=True))


class PageSwap:
  """What an engine does with the pages of rows that make room.

  Attributes:
    count: rows whose pages were copied.
  """

  def __init__(self, how: str, page: int, page_bytes: int):
    """Nothing is copied yet.

    Args:
      how: of `PREEMPTIONS`.
      page: tokens of a page.
      page_bytes: of a page, of all groups of layers together.
    """
    self._how, self._page, self._page_bytes = how, page, page_bytes
    self._token_seconds, self._rate = _TOKEN_SECONDS, _RATE
    self._leaving: list[KeptPages] = []
    self._stepped: float | None = None
    self.count = 0

  def warm_up(self, pool: PagePool) -> PagePool:
    """The same pool, after each program of a copy ran once."""
    if self._how == "recompute":
      return pool
    shape = pool.shards, _BATCH
    pages = tuple(np.zeros(shape, np.int32) for _ in pool.groups)
    payload = jax.device_get(_read(pool, pages))
    none = tuple(
      np.full(shape, group.pages // pool.shards, np.int32)
      for group in pool.groups
    )
    pool = _write(pool, none, payload)
    if pool.recurrent:
      states = jax.device_get(_read_states(pool, jnp.int32(0)))
      pool = _write_states(pool, jnp.int32(0), states)
    return pool

  def keeps(self, row: ServedRow) -> bool:
    """Whether what a row has computed is copied and not computed again."""
    if self._how != "auto":
      return self._how == "swap"
    batches = -(-row.computed // (self._page * _BATCH))
    size = batches * _BATCH * self._page_bytes
    return 2 * size / self._rate < row.computed * self._token_seconds

  def out(self, pool: PagePool, row: ServedRow) -> None:
    """Copies a row's pages, which the next calls write."""
    kept = row.kept
    assert kept is not None
    # Pages that are out of sight are copied as any others.
    columns = -(-kept.computed // (self._page * pool.shards))
    tables = [
      np.maximum(x[:, :columns], 0) for x in kept.tables[: len(pool.groups)]
    ]
    batches = _batches(tables, [0] * len(tables))
    held = [_read(pool, pages) for pages in batches]
    states = _read_states(pool, jnp.int32(kept.slot)) if pool.recurrent else ()
    kept.payload = held, states
    jax.tree.map(lambda x: x.copy_to_host_async(), kept.payload)
    self._leaving.append(kept)
    self.count += 1

  def back(self, pool: PagePool, row: ServedRow) -> PagePool:
    """The pool with a row's pages where it has its place now."""
    kept, row.kept = row.kept, None
    assert kept is not None and row.slot is not None
    many = -(-kept.computed // self._page)
    tables, none = [], [group.pages // pool.shards for group in pool.groups]
    for fill, into in zip(none, kept.into, strict=False):
      # Pages that are shared, or out of sight, are not written.
      one = np.full((pool.shards, -(-many // pool.shards)), fill, np.int32)
      for number, page in into.items():
        if number < many:
          one[number % pool.shards, number // pool.shards] = page
      tables.append(one)
    payload: Any = kept.payload
    held, states = payload
    for pages, one in zip(_batches(tables, none), held, strict=True):
      pool = _write(pool, pages, one)
    if pool.recurrent:
      pool = _write_states(pool, jnp.int32(row.slot), states)
    return pool

  def measure(self, plan: StepPlan) -> None:
    """Notes how long a token of a prompt takes, and a byte to the host."""
    now = time.monotonic()
    if self._stepped is not None and plan.pieces:
      each = (now - self._stepped) / max(1, plan.tokens)
      self._token_seconds += 0.1 * (each - self._token_seconds)
    for kept in self._leaving:
      start = time.monotonic()
      kept.payload = jax.device_get(kept.payload)
      size = sum(x.nbytes for x in jax.tree.leaves(kept.payload))
      rate = size / max(1e-6, time.monotonic() - start)
      self._rate += 0.2 * (min(rate, 1e11) - self._rate)
    self._leaving = []
    self._stepped = None if plan.empty else time.monotonic()

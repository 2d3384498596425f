"""Contiguous rows of an engine, whose memory grows on demand.

Guarantees: the calls are those of an engine of pages, so that answers are the
same, bit for bit, as with a pool of as many pages; only the tables differ,
whose pages are one after another.
Cost: rows that outgrow an extent are copied within the pool, in place.
Memory: that of the pool; of reserved rows only the part in use.
Ref: Prabhu et al. 2024, vAttention, arXiv 2405.04437.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from ringjax.errors import OptionError
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.state import State
from ringjax.kv.storage.page_pool import PagePool
from ringjax.kv.storage.reserved import ReservedRows
from ringjax.parallel.programs import bounded
from ringjax.serve.scheduler import ServedRow
from ringjax.serve.vattention.row_space import DoublingSpace, RowSpace
from ringjax.typing import ArrayLeaf

# Pages of each shard in one copy, so that all copies use one program.
_BATCH = 16
LAYOUTS = ("pages", "contiguous", "doubling")


def check_contiguous(share: str, preempt: str) -> None:
  """Refuses options that contiguous rows do not support.

  Raises:
    OptionError: If prefixes are shared or rows are swapped.
  """
  if share != "nothing":
    raise OptionError(
      "share",
      f"{share!r}, for contiguous rows",
      "'nothing': each row has memory of its own",
      "leave share out, or pass layout='pages'",
    )
  if preempt == "swap":
    raise OptionError(
      "preempt",
      "'swap', for contiguous rows",
      "'auto' or 'recompute'",
      "leave preempt out, or pass layout='pages'",
    )


def check_dense_rows(
  layout: str, shards: int, kind: CacheConfig, trees: bool
) -> None:
  """Refuses rows whose keys a dense attention function can't read.

  Args:
    layout: Layout, one of `LAYOUTS`.
    shards: Number of shards of the pages.
    kind: Storage of keys and values.
    trees: Whether drafts form trees.

  Raises:
    OptionError: If there are pages, shards, other kinds of caches, or trees.
  """
  for refused, got, want in (
    (layout == "pages", "layout='pages'", "contiguous rows"),
    (shards > 1, f"pages over {shards} shards", "one shard of the sequence"),
    (
      kind.layout.unrotated,
      f"a cache of {kind}",
      "keys that are stored rotated",
    ),
    (trees, "trees of drafted tokens", "drafts that are chains"),
  ):
    if refused:
      raise OptionError(
        "attention_fn",
        f"a function with {got}",
        want,
        "pass layout='contiguous', or leave attention_fn out"
        if layout == "pages"
        else "leave attention_fn out, or the other",
      )


def row_reaches(page: int, tile: int, blocks: int) -> tuple[int, ...]:
  """Lengths of rows in dense calls: few, as each compiles a program.

  Args:
    page: Number of tokens of a page.
    tile: Number of tokens that are read at once, the smallest length.
    blocks: Maximum number of pages of a row.
  """
  max_tokens, sizes = page * blocks, [tile]
  while sizes[-1] < max_tokens:
    sizes.append(min(max_tokens, 2 * sizes[-1]))
  return tuple(sizes)


def row_pages(
  many: int, rows: int, blocks: int, shards: int, reserves: bool
) -> int:
  """Number of pages of a pool for rows, over all shards.

  Args:
    many: Number of pages in use at the same time, a multiple of the shards.
    rows: Number of slots.
    blocks: Maximum number of pages of a row.
    shards: Number of shards, R.
    reserves: Whether rows are reserved; else the number is a power of two for
      each shard, at most `many` in all.
  """
  if reserves:
    return rows * blocks
  return (1 << ((many // shards).bit_length() - 1)) * shards


@bounded
@functools.partial(jax.jit, donate_argnums=0)
def _moved(
  pool: PagePool, source: Int[ArrayLeaf, "R k"], target: Int[ArrayLeaf, "R k"]
) -> PagePool:
  """Pool with pages copied; no page is both source and target."""
  for group in range(len(pool.groups)):
    arrays = pool.read_pages(group, source)
    pool = pool.write_pages(group, target, arrays)
  return pool


def _copied(pool: PagePool, source: int, target: int, count: int) -> PagePool:
  """Pool with up to `_BATCH` successive pages copied."""
  number = np.arange(_BATCH, dtype=np.int32)
  real = number < count
  # Out-of-range targets, which a write drops, for the padding.
  into = np.where(real, target + number, np.iinfo(np.int32).max)
  per_shard = lambda x: np.tile(x.astype(np.int32), (pool.shards, 1))
  return _moved(
    pool, per_shard(np.where(real, source + number, 0)), per_shard(into)
  )


class ContiguousRows:
  """Space of an engine's contiguous rows, and their memory.

  Attributes:
    space: Slots and their page groups.
    memory: Memory of reserved rows; None for other layouts.
    place: Translates the pages of a slot; None where tables are used as they
      are.
  """

  def __init__(
    self,
    pool: PagePool,
    rows: int,
    blocks: int,
    many: int,
    reserves: bool,
    ahead: int = 1,
  ):
    """Make the rows of an empty pool.

    Args:
      pool: Pool with the number of pages from `row_pages`.
      rows: Number of slots.
      blocks: Maximum number of pages of a row.
      many: Number of pages in use at the same time.
      reserves: Whether the pool's arrays are reserved.
      ahead: Maximum number of tokens that a row gets in a step.
    """
    shards = pool.shards
    self.memory: ReservedRows | None = None
    self.place = None
    if reserves:
      arrays = tuple(x for x in pool.slots if not isinstance(x, State))
      self.memory = ReservedRows(arrays, blocks // shards)
      self.space = RowSpace(
        rows,
        max(1, many // shards),
        pool.page,
        blocks=blocks,
        shards=shards,
        memory=self.memory,
        ahead=ahead,
      )
    else:
      groups = row_pages(many, rows, blocks, shards, False) // shards
      space = DoublingSpace(
        rows, groups, pool.page, blocks=blocks, shards=shards, ahead=ahead
      )
      self.space, self.place = space, space.place

  def moved(self, pool: PagePool) -> PagePool:
    """Pool with rows copied to the extents to which they have grown."""
    if not isinstance(self.space, DoublingSpace):
      return pool
    for move in self.space.take_moves():
      for start in range(0, move.count, _BATCH):
        count = min(_BATCH, move.count - start)
        source, target = move.source + start, move.target + start
        pool = _copied(pool, source, target, count)
    return pool

  def warm_up(self, pool: PagePool) -> PagePool:
    """Compile the copy program; returns the pool unchanged."""
    if not isinstance(self.space, DoublingSpace):
      return pool
    return _copied(pool, 0, 0, 0)

  def look_ahead(self, running: Sequence[ServedRow | None]) -> None:
    """Maps the memory that decoding rows need next, on the space's thread."""
    self.space.look_ahead(
      {
        row.slot: row.computed
        for row in running
        if row is not None and row.slot is not None and not row.reading
      }
    )

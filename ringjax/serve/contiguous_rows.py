"""What an engine does for rows that are contiguous and grow on demand.

Guarantees: the calls are those of an engine of pages, so that answers are the
same, bit for bit, as with a pool of as many pages; only the tables differ,
whose pages are one after another.
Cost: rows that outgrow an extent are copied, in place of the pool.
Memory: that of the pool; of reserved rows what is in use.
Ref: Prabhu et al. 2024, vAttention, arXiv 2405.04437.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from ringjax.errors import OptionError
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.page_pool import PagePool
from ringjax.kv.reserved import ReservedRows
from ringjax.kv.state import State
from ringjax.parallel.programs import bounded
from ringjax.serve.row_space import DoublingSpace, RowSpace
from ringjax.serve.scheduler import ServedRow
from ringjax.typing import ArrayLeaf

# Pages of each shard in one copy: one program, however many are copied.
_BATCH = 16
LAYOUTS = ("pages", "contiguous", "doubling")


def check_contiguous(share: str, preempt: str) -> None:
  """Refuses what contiguous rows can't do.

  Raises:
    OptionError: shared prefixes, or rows that are swapped.
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
  layout: str, shards: int, kind: CacheKind, trees: bool
) -> None:
  """Refuses rows whose keys no dense function can read.

  Args:
    layout: one of `LAYOUTS`.
    shards: of the pages.
    kind: how keys are stored.
    trees: whether drafts form trees.

  Raises:
    OptionError: pages, shards, keys that are stored otherwise, or trees.
  """
  for refused, got, want in (
    (layout == "pages", "layout='pages'", "contiguous rows"),
    (shards > 1, f"pages over {shards} shards", "one shard of the sequence"),
    (kind.unrotated, f"a cache of {kind}", "keys that are stored rotated"),
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
  """Tokens of a row that a dense function may get: few, for each is a program.

  Args:
    page: tokens of a page.
    tile: tokens that are read at once, the fewest.
    blocks: pages of a row at most.
  """
  most, sizes = page * blocks, [tile]
  while sizes[-1] < most:
    sizes.append(min(most, 2 * sizes[-1]))
  return tuple(sizes)


def row_pages(
  many: int, rows: int, blocks: int, shards: int, reserves: bool
) -> int:
  """Pages that a pool for rows has, over all shards.

  Args:
    many: pages that are to be in use at a time, a multiple of the shards.
    rows: slots.
    blocks: pages of a row at most.
    shards: R.
    reserves: whether rows are reserved; else there are as many as a power of
      two for each shard, no more than `many`.
  """
  if reserves:
    return rows * blocks
  return (1 << ((many // shards).bit_length() - 1)) * shards


@bounded
@functools.partial(jax.jit, donate_argnums=0)
def _moved(
  pool: PagePool, source: Int[ArrayLeaf, "R k"], target: Int[ArrayLeaf, "R k"]
) -> PagePool:
  """The pool with pages copied; none is in both."""
  for group in range(len(pool.groups)):
    held = pool.read_pages(group, source)
    pool = pool.write_pages(group, target, held)
  return pool


def _copied(pool: PagePool, source: int, target: int, count: int) -> PagePool:
  """The pool with some pages one after another copied, `_BATCH` at most."""
  number = np.arange(_BATCH, dtype=np.int32)
  real = number < count
  # Far out of range where there is none.
  into = np.where(real, target + number, np.iinfo(np.int32).max)
  each = lambda x: np.tile(x.astype(np.int32), (pool.shards, 1))
  return _moved(pool, each(np.where(real, source + number, 0)), each(into))


class ContiguousRows:
  """The space of an engine's rows, and their memory.

  Attributes:
    space: slots and groups.
    memory: of reserved rows; None of others.
    place: where pages of a slot are, or None: where the tables say.
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
    """Of an empty pool.

    Args:
      pool: with as many pages as `row_pages` says.
      rows: slots.
      blocks: pages of a row at most.
      many: pages that are to be in use at a time.
      reserves: whether the pool's arrays are reserved.
      ahead: tokens that a row may get in a step.
    """
    shards = pool.shards
    self.memory: ReservedRows | None = None
    self.place = None
    if reserves:
      held = tuple(x for x in pool.slots if not isinstance(x, State))
      self.memory = ReservedRows(held, blocks // shards)
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
    """The pool with rows where they have grown to."""
    if not isinstance(self.space, DoublingSpace):
      return pool
    for move in self.space.take_moves():
      for start in range(0, move.count, _BATCH):
        count = min(_BATCH, move.count - start)
        source, target = move.source + start, move.target + start
        pool = _copied(pool, source, target, count)
    return pool

  def warm_up(self, pool: PagePool) -> PagePool:
    """The same pool, after the program that copies ran once."""
    if not isinstance(self.space, DoublingSpace):
      return pool
    return _copied(pool, 0, 0, 0)

  def look_ahead(self, running: Sequence[ServedRow | None]) -> None:
    """Maps what rows that decode need next, on the space's thread."""
    self.space.look_ahead(
      {
        row.slot: row.computed
        for row in running
        if row is not None and row.slot is not None and not row.reading
      }
    )

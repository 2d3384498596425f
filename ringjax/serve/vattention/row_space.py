"""Contiguous rows that grow on demand, in mapped page groups.

Guarantees: the tokens of a row are next to one another in the memory of its
slot, and a slot has memory for what its row needs, or `OutOfPages` is raised,
on which the scheduler preempts a row. All groups that no running row needs can
be used by others, so that at most one page group a row is wasted.
Cost: some comparisons for each allocation; memory is mapped one step ahead, on
a background thread, so that no row that decodes waits for it.
Memory: some numbers for each slot.

Plain Python, no JAX. A page group is one page of tokens on each shard, in all
tensors of the model. A slot that is freed keeps its groups (deferred
reclamation); a row that begins takes the free slot that fits best, and groups
of free slots go to others when the memory runs low.
Ref: Prabhu et al. 2024, vAttention, arXiv 2405.04437.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from ringjax.checks import boolean, integer, positive_int
from ringjax.errors import OptionError
from ringjax.serve.prefix.prefix_tree import GroupSpec, OutOfPages, PrefixTree


@runtime_checkable
class RowMemory(Protocol):
  """Memory whose pages a `RowSpace` maps and unmaps."""

  def map(self, slot: int, first: int, last: int) -> bool:
    """Map the groups `first` to `last` - 1 of a slot; False without memory."""
    ...

  def unmap(self, slot: int, first: int, last: int) -> None:
    """Unmap the memory of these groups."""
    ...


@dataclasses.dataclass(kw_only=True)
class RowSpaceCounters:
  """Counters of a row space, in page groups unless stated otherwise.

  Attributes:
    sync_maps: Number of groups mapped while a plan waited for them.
    decode_maps: Number of `sync_maps` for rows whose growth was known a step
      before.
    background_maps: Number of groups that the look-ahead mapped for running
      rows.
    eager_maps: Number of groups that it mapped for the row that begins next.
    reused: Number of groups that were mapped already when a row began.
    reuses: Number of rows with such groups.
    reclaimed: Number of groups taken from free slots, or after a row's end.
    moves: Number of rows that were copied to a larger extent.
    exhausted: Number of times that no group was left.
  """

  sync_maps: int = 0
  decode_maps: int = 0
  background_maps: int = 0
  eager_maps: int = 0
  reused: int = 0
  reuses: int = 0
  reclaimed: int = 0
  moves: int = 0
  exhausted: int = 0

  @property
  def maps(self) -> int:
    """Number of all groups that were mapped."""
    return self.sync_maps + self.background_maps + self.eager_maps


class RowSpace(PrefixTree):
  """Slots of rows and the page groups that are mapped in them.

  For a `Scheduler` it is a prefix tree without blocks: rows share nothing. The
  page that `allocate` returns is a place in reserved address space: pages of
  slot s begin at s times `each`.

  Attributes:
    each: Number of pages of a slot on each shard.
    mapped: Number of groups that each slot has memory for.
    needed: Number of groups of each slot that hold tokens of its row.
    space_counters: Counters of mapped and reused groups.
    settle: Called before memory is unmapped that calls in flight may still
      read, the memory of a slot whose row left after `join`.
  """

  def __init__(
    self,
    rows: int,
    groups: int,
    page: int,
    *,
    blocks: int,
    shards: int = 1,
    memory: RowMemory | None = None,
    ahead: int = 1,
    eager: int = 1,
    low: int | float = 0.1,
    background: bool = True,
  ):
    """Make slots without mapped memory.

    Args:
      rows: Number of slots.
      groups: Number of page groups that may be mapped at the same time.
      page: Number of tokens of a page.
      blocks: Maximum number of pages of a slot, a multiple of the shards.
      shards: Number of shards; page n of a row is on shard n % shards.
      memory: Memory to map, or None: groups are only counted.
      ahead: Number of tokens for which the look-ahead maps memory after the end
        of a row that decodes.
      eager: Number of groups to map in the free slot that is used next.
      low: Fraction of the groups; with fewer free ones, free slots are
        unmapped.
      background: Whether a thread looks ahead; otherwise all growth is
        synchronous.
    """
    positive_int("blocks", blocks)
    if blocks % positive_int("shards", shards):
      raise OptionError(
        "blocks",
        blocks,
        f"a multiple of the {shards} shards",
        "round it up",
      )
    groups = positive_int("groups", groups)
    super().__init__([GroupSpec(pages=groups)], page, shards=shards)
    self.each = blocks // shards
    self.mapped = [0] * positive_int("rows", rows)
    self.needed = [0] * rows
    self.space_counters = RowSpaceCounters()
    self._active = [False] * rows
    self._memory, self._total = memory, groups
    self._ahead = integer("ahead", ahead, least=0)
    self._eager = integer("eager", eager, least=0)
    if not 0 <= low <= 1:
      raise OptionError("low", low, "from 0 to 1", "pass a part, e.g. 0.1")
    self._low = int(low * groups)
    self._lock = threading.RLock()
    self._watched: set[int] = set()
    # Slots that were left since the last `join`.
    self._warm: set[int] = set()
    self.settle: Callable[[], Any] = lambda: None
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None
    self._pending: concurrent.futures.Future[None] | None = None
    if boolean("background", background):
      self._thread = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix="ringjax row space"
      )

  # -------------------------------------------------------------------------
  # Interface of a scheduler
  # -------------------------------------------------------------------------

  def free(self, group: int = 0) -> int:
    """Number of pages, on all shards, that are not mapped in any slot."""
    return self._free_groups() * self.shards

  def available(self, shard: int = 0) -> int:
    """Number of pages on a shard that no running row needs."""
    return self._total - sum(self.kept(n) for n in range(len(self.mapped)))

  def slot_for(self, free: Sequence[int], tokens: int) -> int:
    """Take the free slot that best fits a row of `tokens`.

    It is the slot with the fewest groups that are enough, or else the one with
    the most.
    """
    want = self.groups_of(tokens)
    with self._lock:
      enough = [n for n in free if self.mapped[n] >= want]
      if enough:
        slot = min(enough, key=lambda n: (self.mapped[n], n))
      else:
        slot = max(free, key=lambda n: (self.mapped[n], -n))
      num_reused = min(want, self.mapped[slot])
      self.space_counters.reused += num_reused
      self.space_counters.reuses += num_reused > 0
      self._active[slot] = True
    return slot

  def allocate(self, group: int, number: int, slot: int = 0) -> int:
    """Allocate a page for the block `number` of the row in a slot.

    Raises:
      OutOfPages: If running rows need all groups.
    """
    index = number // self.shards
    with self._lock:
      if index >= self.mapped[slot]:
        mapped_before = self.mapped[slot]
        if not self._grow(slot, index + 1):
          self.space_counters.exhausted += 1
          raise OutOfPages
        num_mapped = self.mapped[slot] - mapped_before
        self.space_counters.sync_maps += num_mapped
        self.space_counters.decode_maps += num_mapped * (slot in self._watched)
      self.needed[slot] = max(self.needed[slot], index + 1)
    return slot * self.each + index

  def give_back(self, group: int, number: int, page: int) -> None:
    """Does nothing: `leave` frees all pages of a slot."""

  def leave(self, slot: int) -> None:
    """A row leaves its slot, which keeps its groups for the next one."""
    with self._lock:
      self._active[slot], self.needed[slot] = False, 0
      self._watched.discard(slot)
      self._warm.add(slot)

  # -------------------------------------------------------------------------
  # Looking ahead
  # -------------------------------------------------------------------------

  def look_ahead(self, tokens: Mapping[int, int]) -> None:
    """Lets the thread map the groups that rows that decode need next.

    Args:
      tokens: Number of tokens of each slot's row once the calls in flight have
        been computed.
    """
    self._wait()
    with self._lock:
      self._watched = {n for n in tokens if self._active[n]}
    if self._thread is not None:
      self._pending = self._thread.submit(self._prepare, dict(tokens))

  def join(self) -> None:
    """Waits for the thread, before a plan is made.

    The calls of the plan before the last one have ended by then.
    """
    with self._lock:
      self._warm.clear()
    self._wait()

  def _wait(self) -> None:
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def close(self) -> None:
    """Ends the thread."""
    self._wait()
    if self._thread is not None:
      self._thread.shutdown()
      self._thread = None

  def groups_of(self, tokens: int) -> int:
    """Number of groups that hold `tokens` tokens of a row."""
    return -(-tokens // (self.page * self.shards))

  def _prepare(self, tokens: dict[int, int]) -> None:
    counters, any_mapped = self.space_counters, False
    for slot, num_tokens in tokens.items():
      with self._lock:
        want = min(self.groups_of(num_tokens + self._ahead), self.each)
        mapped_before = self.mapped[slot]
        if not self._active[slot] or want <= mapped_before:
          continue
        # If no group is left, a later plan preempts a row.
        any_mapped |= self._grow(slot, want)
        counters.background_maps += self.mapped[slot] - mapped_before
    with self._lock:
      empty = [n for n, on in enumerate(self._active) if not on]
      if empty and self._eager and self._free_groups() > self._low:
        slot = max(empty, key=lambda n: (self.mapped[n], -n))
        mapped_before = self.mapped[slot]
        want = min(self._eager, self.each)
        if mapped_before < want and self._extend(slot, want):
          counters.eager_maps += self.mapped[slot] - mapped_before
          any_mapped = True
      if not any_mapped and self._free_groups() < self._low:
        self._reclaim(1, None, running=False)

  # -------------------------------------------------------------------------
  # Memory
  # -------------------------------------------------------------------------

  def _free_groups(self) -> int:
    return self._total - sum(self.mapped)

  def kept(self, slot: int) -> int:
    """Number of groups of a slot that only a preemption frees."""
    return self.needed[slot]

  def _grow(self, slot: int, want: int) -> bool:
    """Map `want` groups of a slot, if need be taken from other slots."""
    while not self._extend(slot, want):
      if not self._reclaim(want - self.mapped[slot], slot, running=True):
        return False
    return True

  def _extend(self, slot: int, want: int) -> bool:
    """Map `want` groups of a slot, if that many are free."""
    have = self.mapped[slot]
    if want - have > self._free_groups():
      return False
    if self._memory is not None and not self._memory.map(slot, have, want):
      return False
    self.mapped[slot] = want
    return True

  def _reclaim(self, many: int, keep: int | None, *, running: bool) -> bool:
    """Frees up to `many` groups and returns whether any was freed.

    Groups of free slots come first, from the highest slot; with `running` also
    those after the ends of running rows.
    """
    slots = [n for n in reversed(range(len(self.mapped))) if n != keep]
    num_freed = 0
    for active in (False, True)[: 1 + running]:
      for slot in slots:
        over = self.mapped[slot] - self.kept(slot)
        if self._active[slot] != active or over < 1:
          continue
        if slot in self._warm and self._memory is not None:
          if not running:
            # The look-ahead thread must not wait for calls.
            continue
          self.settle()
          self._warm.clear()
        num_freed += self._cut(slot, min(over, many - num_freed))
        if num_freed >= many:
          break
      if num_freed >= many:
        break
    self.space_counters.reclaimed += num_freed
    return num_freed > 0

  def _cut(self, slot: int, many: int) -> int:
    """Unmap groups at the end of a slot; returns their number."""
    have = self.mapped[slot]
    if self._memory is not None:
      self._memory.unmap(slot, have - many, have)
    self.mapped[slot] = have - many
    return many

  # -------------------------------------------------------------------------
  # Proof
  # -------------------------------------------------------------------------

  def check(self) -> None:
    """Checks that rows have their groups and that the total is not exceeded.

    Raises:
      AssertionError: If a count does not hold.
    """
    with self._lock:
      for slot, (have, need) in enumerate(
        zip(self.mapped, self.needed, strict=True)
      ):
        if need > have or (need and not self._active[slot]):
          raise AssertionError(f"slot {slot}: {need} of {have} groups")
      if self._free_groups() < 0:
        raise AssertionError(f"{sum(self.mapped)} of {self._total} groups")


class ExtentMove(NamedTuple):
  """Copy of a row's pages to another extent, on each shard.

  Fields:
    source: First page to copy.
    target: First page of the target.
    count: Number of pages.
  """

  source: int
  target: int
  count: int


class DoublingSpace(RowSpace):
  """A `RowSpace` in memory of fixed size: an extent doubles when it is full.

  A row's extent is a power of two of groups, from a buddy allocator; the row is
  copied to another extent unless it can grow in place. At most half of an
  extent is unused.

  Attributes:
    base: First page of each slot's extent, on each shard.
  """

  def __init__(self, rows: int, groups: int, page: int, **options: Any):
    """Make slots as `RowSpace` does; `groups` is a power of two."""
    super().__init__(rows, groups, page, **options)
    if groups & (groups - 1):
      raise OptionError(
        "groups", groups, "a power of two", "round it up or down"
      )
    self.base = [0] * rows
    # First pages of free extents, by size.
    self._extents: dict[int, set[int]] = {groups: {0}}
    self._moves: list[ExtentMove] = []

  def take_moves(self) -> list[ExtentMove]:
    """Take the copies to make, in order, before the next call."""
    with self._lock:
      moves, self._moves = self._moves, []
    return moves

  def place(self, pages: np.ndarray, slot: int) -> Int[np.ndarray, "R m"]:
    """Translate pages of a slot, int32 [R, m], to its extent; -1 remains."""
    delta = self.base[slot] - slot * self.each
    return pages + (pages >= 0) * delta

  def kept(self, slot: int) -> int:
    need = self.needed[slot]
    return self.mapped[slot] if need else 0

  def _extend(self, slot: int, want: int) -> bool:
    size, have = 1 << (want - 1).bit_length(), self.mapped[slot]
    old = self.base[slot]
    if not have:
      at = self._take(size)
      if at is None:
        return False
      self.base[slot], self.mapped[slot] = at, size
      return True
    at, length, joined = old, have, list[tuple[int, int]]()
    # Grow in place as far as the buddies are free.
    while length < size and at ^ length in self._extents.get(length, ()):
      joined.append((at ^ length, length))
      at, length = min(at, at ^ length), 2 * length
    if length < size:
      extent = self._take(size)
      if extent is None:
        return False
      self._give(old, have)
      at = extent
    else:
      for buddy, buddy_size in joined:
        self._extents[buddy_size].remove(buddy)
    self.base[slot], self.mapped[slot] = at, size
    if self.base[slot] != old and self.needed[slot]:
      # The data is in the first pages of the old extent.
      self._moves.append(ExtentMove(old, self.base[slot], have))
      self.space_counters.moves += 1
    return True

  def _cut(self, slot: int, many: int) -> int:
    """Free the whole extent of a slot; returns its number of groups."""
    have, self.mapped[slot] = self.mapped[slot], 0
    self._give(self.base[slot], have)
    return have

  def _take(self, size: int) -> int | None:
    """Allocate an extent; its first page, or None."""
    sizes = [n for n, at in self._extents.items() if at and n >= size]
    if not sizes:
      return None
    free_size = min(sizes)
    at = min(self._extents[free_size])
    self._extents[free_size].remove(at)
    while free_size > size:
      free_size //= 2
      self._extents.setdefault(free_size, set()).add(at + free_size)
    return at

  def _give(self, at: int, size: int) -> None:
    """Frees an extent, and joins it with its free buddies."""
    while at ^ size in self._extents.get(size, ()):
      self._extents[size].remove(at ^ size)
      at, size = min(at, at ^ size), 2 * size
    self._extents.setdefault(size, set()).add(at)

  def check(self) -> None:
    super().check()
    with self._lock:
      used = [
        (self.base[n], size) for n, size in enumerate(self.mapped) if size
      ]
      used += [(at, n) for n, all_at in self._extents.items() for at in all_at]
      end = 0
      for at, size in sorted(used):
        if at != end:
          raise AssertionError(f"pages {end} to {at} are in {at < end} extents")
        end = at + size
      if end != self._total:
        raise AssertionError(f"{end} of {self._total} pages")

"""Contiguous rows that grow on demand: which page groups each row has.

Guarantees: the tokens of a row are next to one another in the memory of its
slot, and a slot has memory for what its row needs, or `OutOfPages` is raised,
which the scheduler answers by preempting a row. Groups that no running row
needs can all be had by others, so that at most one page group a row is wasted.
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

from ringjax.checks import boolean, integer, positive_int
from ringjax.errors import OptionError
from ringjax.serve.prefix_tree import GroupSpec, OutOfPages, PrefixTree


@runtime_checkable
class RowMemory(Protocol):
  """Memory whose pages a `RowSpace` maps and unmaps."""

  def map(self, slot: int, first: int, last: int) -> bool:
    """Memory for the groups `first` to `last` - 1 of a slot; whether there
    was any."""
    ...

  def unmap(self, slot: int, first: int, last: int) -> None:
    """Gives the memory of these groups back."""
    ...


@dataclasses.dataclass(kw_only=True)
class RowSpaceCounters:
  """What happened so far, in page groups unless said otherwise.

  Attributes:
    sync_maps: that were mapped while a plan waited for them.
    decode_maps: of these, for rows whose growth was known a step before.
    background_maps: that the look-ahead mapped for running rows.
    eager_maps: that it mapped for the row that begins next.
    reused: that a row found mapped when it began.
    reuses: rows that found some.
    reclaimed: that were taken from free slots, or from behind a row's end.
    moves: rows that were copied to a larger extent.
    exhausted: how often there was none.
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
    """All groups that were mapped."""
    return self.sync_maps + self.background_maps + self.eager_maps


class RowSpace(PrefixTree):
  """Slots of rows and the page groups that are mapped in them.

  For a `Scheduler` it is a tree of prefixes that has no blocks: nothing is
  shared between rows. The page that `allocate` returns is the place of a token
  in reserved address space: pages of slot s begin at s times `each`.

  Attributes:
    each: pages of a slot on each shard.
    mapped: of each slot, groups that it has memory for.
    needed: of each slot, groups that hold tokens of its row.
    space_counters: what happened.
    settle: called before memory is unmapped that calls on their way may still
      read: that of a slot whose row left after `join`.
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
    """With nothing mapped.

    Args:
      rows: slots.
      groups: page groups that may be mapped at the same time.
      page: tokens of a page.
      blocks: pages of a slot at most, a multiple of the shards.
      shards: page n of a row is on shard n % shards.
      memory: what is to be mapped, or None: groups are only counted.
      ahead: tokens of a row that decodes for which there is memory already.
      eager: groups that the free slot which is next has mapped.
      low: the part of the groups below which free slots give theirs back.
      background: whether a thread looks ahead; otherwise nobody does, and
        growth is synchronous.
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
  # What a scheduler asks
  # -------------------------------------------------------------------------

  def free(self, group: int = 0) -> int:
    """Pages without memory in any slot, on all shards."""
    return self._free_groups() * self.shards

  def available(self, shard: int = 0) -> int:
    """Pages on a shard that no running row needs."""
    return self._total - sum(self.kept(n) for n in range(len(self.mapped)))

  def slot_for(self, free: Sequence[int], tokens: int) -> int:
    """The free slot that fits a row of so many tokens best; it is taken.

    That is the one with the fewest groups that are enough, or else the one
    with the most.
    """
    want = self.groups_of(tokens)
    with self._lock:
      enough = [n for n in free if self.mapped[n] >= want]
      if enough:
        slot = min(enough, key=lambda n: (self.mapped[n], n))
      else:
        slot = max(free, key=lambda n: (self.mapped[n], -n))
      found = min(want, self.mapped[slot])
      self.space_counters.reused += found
      self.space_counters.reuses += found > 0
      self._active[slot] = True
    return slot

  def allocate(self, group: int, number: int, slot: int = 0) -> int:
    """A place for the block `number` of the row in a slot.

    Raises:
      OutOfPages: running rows need all groups.
    """
    index = number // self.shards
    with self._lock:
      if index >= self.mapped[slot]:
        before = self.mapped[slot]
        if not self._grow(slot, index + 1):
          self.space_counters.exhausted += 1
          raise OutOfPages
        many = self.mapped[slot] - before
        self.space_counters.sync_maps += many
        self.space_counters.decode_maps += many * (slot in self._watched)
      self.needed[slot] = max(self.needed[slot], index + 1)
    return slot * self.each + index

  def give_back(self, group: int, number: int, page: int) -> None:
    """Nothing: a row leaves its slot with all that is in it, see `leave`."""

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
    """Lets the thread map what rows that decode will need.

    Args:
      tokens: by slot, those that a row has once the calls that are on their
        way have been computed.
    """
    self._wait()
    with self._lock:
      self._watched = {n for n in tokens if self._active[n]}
    if self._thread is not None:
      self._pending = self._thread.submit(self._prepare, dict(tokens))

  def join(self) -> None:
    """Waits for the thread, before a plan is made.

    Calls of the plan before the last one are over by then.
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
    """Groups that hold so many tokens of a row."""
    return -(-tokens // (self.page * self.shards))

  def _prepare(self, tokens: dict[int, int]) -> None:
    counters, some = self.space_counters, False
    for slot, many in tokens.items():
      with self._lock:
        want = min(self.groups_of(many + self._ahead), self.each)
        before = self.mapped[slot]
        if not self._active[slot] or want <= before:
          continue
        # If there is none, a plan will have to preempt a row.
        some |= self._grow(slot, want)
        counters.background_maps += self.mapped[slot] - before
    with self._lock:
      empty = [n for n, on in enumerate(self._active) if not on]
      if empty and self._eager and self._free_groups() > self._low:
        slot = max(empty, key=lambda n: (self.mapped[n], -n))
        before = self.mapped[slot]
        want = min(self._eager, self.each)
        if before < want and self._extend(slot, want):
          counters.eager_maps += self.mapped[slot] - before
          some = True
      if not some and self._free_groups() < self._low:
        self._reclaim(1, None, running=False)

  # -------------------------------------------------------------------------
  # Memory
  # -------------------------------------------------------------------------

  def _free_groups(self) -> int:
    return self._total - sum(self.mapped)

  def kept(self, slot: int) -> int:
    """Groups of a slot that nothing but a preemption frees."""
    return self.needed[slot]

  def _grow(self, slot: int, want: int) -> bool:
    """Memory for `want` groups of a slot, taken from others if need be."""
    while not self._extend(slot, want):
      if not self._reclaim(want - self.mapped[slot], slot, running=True):
        return False
    return True

  def _extend(self, slot: int, want: int) -> bool:
    """Memory for `want` groups of a slot, if that many are free."""
    have = self.mapped[slot]
    if want - have > self._free_groups():
      return False
    if self._memory is not None and not self._memory.map(slot, have, want):
      return False
    self.mapped[slot] = want
    return True

  def _reclaim(self, many: int, keep: int | None, *, running: bool) -> bool:
    """Frees a few groups; whether there was one.

    Those of free slots first, the highest slot first; with `running` those
    behind the ends of running rows too.
    """
    slots = [n for n in reversed(range(len(self.mapped))) if n != keep]
    done = 0
    for active in (False, True)[: 1 + running]:
      for slot in slots:
        over = self.mapped[slot] - self.kept(slot)
        if self._active[slot] != active or over < 1:
          continue
        if slot in self._warm and self._memory is not None:
          if not running:
            # The thread does not wait for calls.
            continue
          self.settle()
          self._warm.clear()
        done += self._cut(slot, min(over, many - done))
        if done >= many:
          break
      if done >= many:
        break
    self.space_counters.reclaimed += done
    return done > 0

  def _cut(self, slot: int, many: int) -> int:
    """Takes groups from the end of a slot; how many."""
    have = self.mapped[slot]
    if self._memory is not None:
      self._memory.unmap(slot, have - many, have)
    self.mapped[slot] = have - many
    return many

  # -------------------------------------------------------------------------
  # Proof
  # -------------------------------------------------------------------------

  def check(self) -> None:
    """Rows have what they need, and no more groups are mapped than there are.

    Raises:
      AssertionError: they have not.
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
  """A row's pages that are to be copied, on each shard.

  Fields:
    source: the first page.
    target: where it goes.
    count: how many.
  """

  source: int
  target: int
  count: int


class DoublingSpace(RowSpace):
  """A `RowSpace` in memory of fixed size: an extent doubles when it is full.

  A row's extent is a power of two of groups, out of a buddy system; the row is
  copied to another one unless it can grow where it is. At most half of an
  extent is unused.

  Attributes:
    base: of each slot the first page of its extent, on each shard.
  """

  def __init__(self, rows: int, groups: int, page: int, **options: Any):
    """See `RowSpace`; `groups` is a power of two."""
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
    """What has to be copied, in order, before the next call."""
    with self._lock:
      moves, self._moves = self._moves, []
    return moves

  def place(self, pages: np.ndarray, slot: int) -> np.ndarray:
    """Where pages of a slot, int32 [R, m], are now; -1 remains."""
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
    at, now, joined = old, have, list[tuple[int, int]]()
    # Where it is, as far as its neighbours are free.
    while now < size and at ^ now in self._extents.get(now, ()):
      joined.append((at ^ now, now))
      at, now = min(at, at ^ now), 2 * now
    if now < size:
      found = self._take(size)
      if found is None:
        return False
      self._give(old, have)
      at = found
    else:
      for other, many in joined:
        self._extents[many].remove(other)
    self.base[slot], self.mapped[slot] = at, size
    if self.base[slot] != old and self.needed[slot]:
      # The data is in the first pages of the old extent.
      self._moves.append(ExtentMove(old, self.base[slot], have))
      self.space_counters.moves += 1
    return True

  def _cut(self, slot: int, many: int) -> int:
    """An extent goes as a whole."""
    have, self.mapped[slot] = self.mapped[slot], 0
    self._give(self.base[slot], have)
    return have

  def _take(self, size: int) -> int | None:
    """The first page of an extent, or None."""
    sizes = [n for n, at in self._extents.items() if at and n >= size]
    if not sizes:
      return None
    now = min(sizes)
    at = min(self._extents[now])
    self._extents[now].remove(at)
    while now > size:
      now //= 2
      self._extents.setdefault(now, set()).add(at + now)
    return at

  def _give(self, at: int, size: int) -> None:
    """Frees an extent, and joins it with its free neighbours."""
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

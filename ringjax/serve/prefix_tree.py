"""Which pages are in use, and by which prefix they can be found again.

Guarantees: a page is free, or cached (nobody uses it, but its tokens are
known), or in use; `check` proves that the three make up the pool. Blocks are
found by their whole prefix: their own tokens and those of all blocks before
them, and by a salt and an adapter, so that tenants do not see each other's.
Cost: a look-up is one look into a dict for each block; evicting is O(log n).
Memory: some hundred bytes for each cached block, on the host.

A block is one page of tokens, whole: a page that is filled in part belongs to
its row alone. The tree is plain Python and knows nothing of arrays. It can be
asked by tokens (`match`, a radix tree of blocks) and by hash (`find`).
Ref: Ye et al. 2024, ChunkAttention, arXiv 2402.15220; Zheng et al. 2023,
RadixAttention, arXiv 2312.07104.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from ringjax.checks import positive_int

# Notes of blocks that are stale, and roots without blocks, before they are
# looked through.
_STALE = 1024


class OutOfPages(Exception):
  """No page is free, and none is cached that could go."""


def next_digest(before: bytes, data: bytes) -> bytes:
  """`PrefixBlock.digest` of a block, from that of its parent and its bytes."""
  return hashlib.sha256(before + data).digest()


class PrefixBlock:
  """One page of tokens behind a prefix.

  Attributes:
    data: the bytes of its tokens, int32.
    parent: the block before it; None of a root.
    children: blocks behind it, by their bytes.
    pages: of each group of layers its page; None where that has gone.
    users: of each group how many rows have the page in sight.
    refs: rows that are at this block or behind it.
    ready: whether its keys are computed.
    depth: blocks before it.
    lost: whether no row finds it any more; it goes with its last user.
    used: when it was last in use, a count.
  """

  __slots__ = (
    "_digest",
    "children",
    "data",
    "depth",
    "lost",
    "pages",
    "parent",
    "ready",
    "refs",
    "used",
    "users",
  )

  def __init__(self, data: bytes, parent: PrefixBlock | None, groups: int):
    self.data, self.parent = data, parent
    self.children: dict[bytes, PrefixBlock] = {}
    self.pages: list[int | None] = [None] * groups
    self.users = [0] * groups
    self.refs = self.used = 0
    self.ready = self.lost = False
    self.depth = -1 if parent is None else parent.depth + 1
    self._digest: bytes | None = None

  @property
  def digest(self) -> bytes:
    """SHA-256 of the whole prefix, with its salt and adapter."""
    # Without recursion: a prefix may have thousands of blocks.
    missing, at = [], self
    while at._digest is None:
      missing.append(at)
      if at.parent is None:
        break
      at = at.parent
    for block in reversed(missing):
      before = b"" if block.parent is None else block.parent._digest or b""
      block._digest = next_digest(before, block.data)
    assert self._digest is not None
    return self._digest

  @property
  def idle(self) -> bool:
    """Whether its page of the first group could go, sooner or later."""
    return self.ready and not self.refs and self.pages[0] is not None

  @property
  def root(self) -> bool:
    """Whether it stands before all tokens."""
    return self.parent is None

  def path(self) -> list[PrefixBlock]:
    """From the first block to this one."""
    found, at = [], self
    while at.parent is not None:
      found.append(at)
      at = at.parent
    return found[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
  """Pages of a group of layers.

  Attributes:
    pages: on each shard.
    reach: tokens that its queries look back, None for all.
  """

  pages: int
  reach: int | None = None


@dataclasses.dataclass(kw_only=True)
class PrefixCounters:
  """What happened so far.

  Attributes:
    looked: blocks that were asked for.
    hit: of these, blocks that were there.
    evicted: blocks that went to make room.
    changes: how often the tree changed.
  """

  looked: int = 0
  hit: int = 0
  evicted: int = 0
  changes: int = 0


class PrefixTree:
  """Pages of all groups, and the blocks that cache some of them.

  Attributes:
    page: tokens of a block.
    groups: a `GroupSpec` for each group of layers; the first is the one that
      looks back the farthest.
    shards: page n of a row is on shard n % shards.
    counters: what happened.
    on_evict: called with (block, group, page) when the page of a block whose
      keys are computed is about to be free, or None.
  """

  def __init__(
    self, groups: Sequence[GroupSpec], page: int, *, shards: int = 1
  ):
    self.page = positive_int("page", page)
    self.shards = positive_int("shards", shards)
    self.groups = tuple(groups)
    self.counters = PrefixCounters()
    self.on_evict: Callable[[PrefixBlock, int, int], None] | None = None
    self._free = [
      [list(range(g.pages - 1, -1, -1)) for _ in range(shards)]
      for g in self.groups
    ]
    # Pages that rows hold outside of the tree; of those that several rows
    # hold, by (group, shard, page), how many beside the first.
    self._held = [[0] * shards for _ in self.groups]
    self._more: dict[tuple[int, int, int], int] = {}
    self._roots: dict[bytes, PrefixBlock] = {}
    self._by_digest: dict[bytes, PrefixBlock] = {}
    # Blocks that are lost and still in use.
    self._lost: set[PrefixBlock] = set()
    # Whole blocks that may go, and pages of groups that look back less.
    self._leaves: list[list[Any]] = [[] for _ in range(shards)]
    self._unseen: list[list[list[Any]]] = [
      [[] for _ in range(shards)] for _ in self.groups
    ]
    self._clock = itertools.count(1)
    self._order = itertools.count()
    # Pages of the first group that could go, sooner or later: those of blocks
    # that no row uses.
    self._idle = [0] * shards

  # -------------------------------------------------------------------------
  # Pages
  # -------------------------------------------------------------------------

  def free(self, group: int = 0) -> int:
    """Free pages of a group, on all shards."""
    return sum(map(len, self._free[group]))

  def available(self, shard: int = 0) -> int:
    """Pages of the first group on a shard that `allocate` would find."""
    return len(self._free[0][shard]) + self._idle[shard]

  def slot_for(self, free: Sequence[int], tokens: int) -> int:
    """Which of the free slots a row of so many tokens takes."""
    del tokens
    return min(free)

  def leave(self, slot: int) -> None:
    """A row leaves its slot; its pages were given back."""

  def allocate(self, group: int, number: int, slot: int = 0) -> int:
    """A page for the block `number` of the row in a slot; it belongs to it.

    Raises:
      OutOfPages: all pages are in use.
    """
    del slot
    shard = number % self.shards
    if not self._free[group][shard] and not self._evict(group, shard):
      raise OutOfPages
    self._held[group][shard] += 1
    return self._free[group][shard].pop()

  def share(self, group: int, number: int, page: int) -> None:
    """One more row has a page that belongs to a row; none may write it now."""
    key = group, number % self.shards, page
    self._more[key] = self._more.get(key, 0) + 1

  def give_back(self, group: int, number: int, page: int) -> None:
    """A row leaves a page of its own, which is free once all rows have."""
    shard = number % self.shards
    more = self._more.pop((group, shard, page), 0)
    if more:
      if more > 1:
        self._more[group, shard, page] = more - 1
      return
    self._held[group][shard] -= 1
    self._free[group][shard].append(page)

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def root(self, salt: str = "", adapter: str = "") -> PrefixBlock:
    """Before all tokens of a tenant and an adapter."""
    key = f"{len(salt)}:{salt}{adapter}".encode()
    found = self._roots.get(key)
    if found is None:
      if len(self._roots) > _STALE + self.groups[0].pages * self.shards:
        # Of tenants of whom nothing is known any more.
        self._roots = {k: x for k, x in self._roots.items() if x.children}
      found = self._roots[key] = PrefixBlock(key, None, len(self.groups))
      found.ready = True
    return found

  def match(
    self,
    root: PrefixBlock,
    tokens: Int[np.ndarray, " n"],
    *,
    most: int | None = None,
  ) -> list[PrefixBlock]:
    """The longest prefix of int32 tokens [n] that is known, block by block.

    Blocks that are not ready yet are among them. Of groups that look back a
    window the pages of the last ones are there, or the prefix is shorter.

    Args:
      root: see `root`.
      tokens: the tokens.
      most: blocks at most.
    """
    pieces = self.pieces(tokens, most)
    found = self._in_sight(self.chain(root, pieces))
    self.counters.looked += len(pieces)
    self.counters.hit += len(found)
    return found

  def pieces(
    self, tokens: Int[np.ndarray, " n"], most: int | None = None
  ) -> list[bytes]:
    """The bytes of the whole blocks of int32 tokens [n], `most` at most."""
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    size = 4 * self.page
    count = len(data) // size
    count = count if most is None else min(count, most)
    return [data[n * size : (n + 1) * size] for n in range(count)]

  def chain(
    self, root: PrefixBlock, pieces: Iterable[bytes]
  ) -> list[PrefixBlock]:
    """The blocks behind `root` that have these bytes, as far as there are;
    pages of groups that look back a window may have gone."""
    found, at = [], root
    for piece in pieces:
      child = at.children.get(piece)
      if child is None:
        break
      found.append(child)
      at = child
    return found

  def _in_sight(self, blocks: list[PrefixBlock]) -> list[PrefixBlock]:
    """As many of them as have the pages that the next token looks back on."""
    narrow = [
      (n, -(-(g.reach or 0) // self.page))
      for n, g in enumerate(self.groups)
      if g.reach is not None
    ]
    if not narrow:
      return blocks
    for count in range(len(blocks), 0, -1):
      if all(
        not block.ready or block.pages[n] is not None
        for n, back in narrow
        for block in blocks[max(0, count - back) : count]
      ):
        return blocks[:count]
    return []

  def find(self, digest: bytes) -> PrefixBlock | None:
    """The block whose whole prefix has this hash, if it is known and ready."""
    return self._by_digest.get(digest)

  def extend(self, parent: PrefixBlock, data: bytes) -> PrefixBlock:
    """A new block that is not ready; the caller is its first user.

    Raises:
      KeyError: there is such a block.
    """
    if data in parent.children:
      raise KeyError("there is such a block")
    made = PrefixBlock(data, parent, len(self.groups))
    parent.children[data] = made
    made.refs = 1
    if parent.lost:
      made.lost = True
      self._lost.add(made)
    self.counters.changes += 1
    return made

  def finish(
    self, block: PrefixBlock, pages: Sequence[int | None], indexed: bool = False
  ) -> None:
    """The keys of a block are computed; the row's pages go to the block."""
    block.ready = True
    shard = block.depth % self.shards
    for group, page in enumerate(pages):
      if page is not None:
        self._held[group][shard] -= 1
        block.pages[group] = page
        block.users[group] += 1
    if indexed and not block.lost:
      self._by_digest[block.digest] = block

  def attach(self, block: PrefixBlock, group: int, page: int) -> None:
    """A row's page of a group goes to a block whose own has gone; the row is
    at the block, or behind it, and sees the page."""
    assert block.ready and block.pages[group] is None
    self._held[group][block.depth % self.shards] -= 1
    block.pages[group] = page
    block.users[group] += 1

  def acquire(self, block: PrefixBlock, groups: Sequence[int]) -> None:
    """A row is at this block or behind it, and sees its pages of `groups`."""
    self._idle[block.depth % self.shards] -= block.idle
    block.refs += 1
    for group in groups:
      block.users[group] += 1

  def unsee(self, block: PrefixBlock, group: int) -> None:
    """A row has the block's page of a group out of sight."""
    block.users[group] -= 1
    narrow = self.groups[group].reach is not None
    if narrow and not block.users[group] and block.pages[group] is not None:
      block.used = next(self._clock)
      heap = self._unseen[group][block.depth % self.shards]
      self._note(heap, block, functools.partial(self._unneeded, group))

  def release(self, block: PrefixBlock, groups: Sequence[int]) -> None:
    """A row leaves a block whose pages of `groups` it had in sight.

    Release the last block of a row first.
    """
    for group in groups:
      self.unsee(block, group)
    block.refs -= 1
    block.used = next(self._clock)
    if block.refs:
      return
    if not block.ready:
      self._remove(block)
      return
    self._idle[block.depth % self.shards] += block.idle
    if block.lost:
      self._remove(block)
    else:
      self._offer(block)

  def lose(self, block: PrefixBlock) -> None:
    """Takes a block, and all behind it, to where no row finds them: what their
    pages hold is of no use. Pages that rows use are free when these leave."""
    waiting = [block]
    for lost in waiting:
      waiting.extend(lost.children.values())
    for lost in reversed(waiting):
      if lost.lost:
        continue
      lost.lost = True
      if lost.ready:
        self._by_digest.pop(lost.digest, None)
      if lost.refs:
        self._lost.add(lost)
      else:
        self._remove(lost)
    parent = block.parent
    if parent is not None and parent.children.get(block.data) is block:
      del parent.children[block.data]
      self.counters.changes += 1
      self._offer(parent)

  # -------------------------------------------------------------------------
  # Making room
  # -------------------------------------------------------------------------

  def _offer(self, block: PrefixBlock) -> None:
    """Notes a block that may go."""
    if block.refs or block.children or block.root or not block.ready:
      return
    self._note(self._leaves[block.depth % self.shards], block, self._stands)

  def _note(
    self,
    heap: list[Any],
    block: PrefixBlock,
    stands: Callable[[int, PrefixBlock], bool],
  ) -> None:
    """Notes a block by its last use; what was noted before may be stale."""
    heapq.heappush(heap, (block.used, next(self._order), block))
    if len(heap) > _STALE + 4 * self.groups[0].pages:
      known = {id(x[2]): x for x in heap if stands(x[0], x[2])}
      heap[:] = known.values()
      heapq.heapify(heap)

  @staticmethod
  def _stands(used: int, block: PrefixBlock) -> bool:
    """Whether a block may go, as it was when this was noted."""
    parent = block.parent
    here = parent is not None and parent.children.get(block.data) is block
    idle = not block.refs and not block.children
    return here and idle and block.used == used

  def _leaf(self, shard: int) -> PrefixBlock | None:
    """The block of a shard that was not used for the longest time."""
    heap = self._leaves[shard]
    while heap:
      used, _, block = heap[0]
      if self._stands(used, block):
        return block
      heapq.heappop(heap)
    return None

  def _page(self, group: int, shard: int) -> PrefixBlock | None:
    """The same of a page of a group that looks back a window."""
    heap = self._unseen[group][shard]
    while heap:
      used, _, block = heap[0]
      if self._unneeded(group, used, block):
        return block
      heapq.heappop(heap)
    return None

  @staticmethod
  def _unneeded(group: int, used: int, block: PrefixBlock) -> bool:
    """Whether a page may go, as it was when this was noted."""
    here = block.pages[group] is not None
    return here and not block.users[group] and block.used == used

  def _evict(self, group: int, shard: int) -> bool:
    """Makes room on a shard; whether there was something that could go."""
    if self.groups[group].reach is not None:
      block = self._page(group, shard)
      if block is not None:
        self._drop(block, group)
        return True
    while not self._free[group][shard]:
      block = self._leaf(shard)
      if block is None:
        # What stands behind it on other shards has to go first.
        others = [self._leaf(s) for s in range(self.shards)]
        some = [b for b in others if b is not None]
        if not some:
          return False
        block = min(some, key=lambda b: b.used)
      self.counters.evicted += 1
      self._remove(block)
    return True

  def _drop(self, block: PrefixBlock, group: int) -> None:
    page = block.pages[group]
    assert page is not None
    if self.on_evict is not None and block.ready and not block.lost:
      self.on_evict(block, group, page)
    shard = block.depth % self.shards
    if not group:
      self._idle[shard] -= block.idle
    block.pages[group] = None
    self._free[group][shard].append(page)

  def _remove(self, block: PrefixBlock) -> None:
    """Takes a leaf out of the tree and frees its pages."""
    assert block.parent is not None
    for group, page in enumerate(block.pages):
      if page is not None:
        self._drop(block, group)
    self._lost.discard(block)
    # Of one that is lost another may have taken the place.
    if block.parent.children.get(block.data) is block:
      del block.parent.children[block.data]
    if block.ready and not block.lost and self._by_digest:
      self._by_digest.pop(block.digest, None)
    self.counters.changes += 1
    self._offer(block.parent)

  # -------------------------------------------------------------------------
  # Proof
  # -------------------------------------------------------------------------

  def blocks(self) -> Iterator[PrefixBlock]:
    """All blocks, each before those behind it."""
    waiting = list(self._roots.values())
    while waiting:
      block = waiting.pop()
      waiting.extend(block.children.values())
      if not block.root:
        yield block

  def check(self) -> None:
    """Free, cached and held pages are the pool, and no page is there twice.

    Raises:
      AssertionError: they are not.
    """
    blocks = [*self.blocks(), *(b for b in self._lost if not b.root)]
    for group, spec in enumerate(self.groups):
      for shard in range(self.shards):
        free = self._free[group][shard]
        cached = [
          b.pages[group]
          for b in blocks
          if b.pages[group] is not None and b.depth % self.shards == shard
        ]
        both = [*free, *cached]
        shared = {p for g, s, p in self._more if (g, s) == (group, shard)}
        if len(set(both)) != len(both) or shared & set(both):
          raise AssertionError(f"group {group}: a page is there twice")
        total = len(both) + self._held[group][shard]
        if total != spec.pages:
          raise AssertionError(
            f"group {group}, shard {shard}: {len(free)} free + {len(cached)} "
            f"cached + {self._held[group][shard]} held of {spec.pages} pages"
          )
    for shard in range(self.shards):
      idle = [
        b for b in self.blocks() if b.idle and b.depth % self.shards == shard
      ]
      if len(idle) != self._idle[shard]:
        raise AssertionError(f"shard {shard}: {len(idle)} blocks are idle")
    for block in self.blocks():
      if block.refs < sum(c.refs > 0 for c in block.children.values()):
        raise AssertionError("a block is used less than those behind it")
      if min(block.refs, *block.users) < 0:
        raise AssertionError("a block was released too often")

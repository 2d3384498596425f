"""Prefix tree: the pages in use, and cached pages by their prefix.

Guarantees: a page is free, or cached (no row uses it, but its tokens are
known), or in use; `check` proves that the three make up the pool. Blocks are
found by their whole prefix: their own tokens and those of all blocks before
them, and by a salt and an adapter, so that tenants do not see each other's.
Cost: a look-up is one look into a dict for each block; evicting is O(log n).
Memory: some hundred bytes for each cached block, on the host.

A block is one full page of tokens: a partly filled page belongs to its row
alone. The tree is plain Python without arrays. It is searched by tokens
(`match`, a radix tree of blocks) or by hash (`find`).
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

# Number of stale heap entries, and of roots without blocks, before a clean-up.
_STALE = 1024


class OutOfPages(Exception):
  """No page is free, and no cached page can be evicted."""


def next_digest(before: bytes, data: bytes) -> bytes:
  """Compute a block's `digest` from that of its parent and its bytes."""
  return hashlib.sha256(before + data).digest()


class PrefixBlock:
  """One page of tokens after a prefix.

  Attributes:
    data: Bytes of its tokens, int32.
    parent: Block before it; None for a root.
    children: Blocks after it, by their bytes.
    pages: Page for each group of layers; None where it was freed.
    users: Number of rows that have the page within their window, for each
      group.
    refs: Number of rows that are at this block or after it.
    ready: Whether its keys are computed.
    depth: Number of blocks before it.
    lost: Whether it is out of the tree; it is freed with its last user.
    used: Time of its last use, as a count.
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
      parent_digest = (
        b"" if block.parent is None else block.parent._digest or b""
      )
      block._digest = next_digest(parent_digest, block.data)
    assert self._digest is not None
    return self._digest

  @property
  def idle(self) -> bool:
    """Whether its page of the first group can be evicted, now or later."""
    return self.ready and not self.refs and self.pages[0] is not None

  @property
  def root(self) -> bool:
    """Whether it is a root, before all tokens."""
    return self.parent is None

  def path(self) -> list[PrefixBlock]:
    """Blocks from the first one to this one."""
    path, at = [], self
    while at.parent is not None:
      path.append(at)
      at = at.parent
    return path[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
  """Pages of a group of layers.

  Attributes:
    pages: Number of pages on each shard.
    reach: Number of tokens that its queries look back, None for all.
  """

  pages: int
  reach: int | None = None


@dataclasses.dataclass(kw_only=True)
class PrefixCounters:
  """Counters of look-ups and evictions.

  Attributes:
    looked: Number of blocks that were looked up.
    hit: Number of these that were cached.
    evicted: Number of blocks evicted to make room.
    changes: Number of changes of the tree.
  """

  looked: int = 0
  hit: int = 0
  evicted: int = 0
  changes: int = 0


class PrefixTree:
  """Pages of all groups, and the blocks that cache some of them.

  Attributes:
    page: Number of tokens of a block.
    groups: A `GroupSpec` for each group of layers; the first is the one that
      looks back the farthest.
    shards: Number of shards; page n of a row is on shard n % shards.
    counters: Counters of look-ups and evictions.
    on_evict: Called with (block, group, page) when the page of a block whose
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
    # Number of pages that rows hold outside of the tree, and of rows after the
    # first one that hold a page, by (group, shard, page).
    self._held = [[0] * shards for _ in self.groups]
    self._more: dict[tuple[int, int, int], int] = {}
    self._roots: dict[bytes, PrefixBlock] = {}
    self._by_digest: dict[bytes, PrefixBlock] = {}
    # Blocks that are lost and still in use.
    self._lost: set[PrefixBlock] = set()
    # Heaps of evictable blocks, and of evictable pages of groups with windows.
    self._leaves: list[list[Any]] = [[] for _ in range(shards)]
    self._unseen: list[list[list[Any]]] = [
      [[] for _ in range(shards)] for _ in self.groups
    ]
    self._clock = itertools.count(1)
    self._order = itertools.count()
    # Number of pages of the first group that can be evicted, now or later:
    # those of blocks that no row uses.
    self._idle = [0] * shards

  # -------------------------------------------------------------------------
  # Pages
  # -------------------------------------------------------------------------

  def free(self, group: int = 0) -> int:
    """Number of free pages of a group, on all shards."""
    return sum(map(len, self._free[group]))

  def available(self, shard: int = 0) -> int:
    """Number of pages of the first group on a shard that can be allocated."""
    return len(self._free[0][shard]) + self._idle[shard]

  def slot_for(self, free: Sequence[int], tokens: int) -> int:
    """Free slot that a row of `tokens` tokens takes."""
    del tokens
    return min(free)

  def leave(self, slot: int) -> None:
    """Frees a row's slot; its pages were given back."""

  def allocate(self, group: int, number: int, slot: int = 0) -> int:
    """Allocate a private page for the block `number` of the row in a slot.

    Raises:
      OutOfPages: If all pages are in use.
    """
    del slot
    shard = number % self.shards
    if not self._free[group][shard] and not self._evict(group, shard):
      raise OutOfPages
    self._held[group][shard] += 1
    return self._free[group][shard].pop()

  def share(self, group: int, number: int, page: int) -> None:
    """Add a row to the owners of a private page; none may write to it now."""
    key = group, number % self.shards, page
    self._more[key] = self._more.get(key, 0) + 1

  def give_back(self, group: int, number: int, page: int) -> None:
    """Give a private page back; it is free once all its rows have done so."""
    shard = number % self.shards
    other_rows = self._more.pop((group, shard, page), 0)
    if other_rows:
      if other_rows > 1:
        self._more[group, shard, page] = other_rows - 1
      return
    self._held[group][shard] -= 1
    self._free[group][shard].append(page)

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def root(self, salt: str = "", adapter: str = "") -> PrefixBlock:
    """Root block of a salt and an adapter, before all tokens."""
    key = f"{len(salt)}:{salt}{adapter}".encode()
    root = self._roots.get(key)
    if root is None:
      if len(self._roots) > _STALE + self.groups[0].pages * self.shards:
        # Drop roots of tenants without cached blocks.
        self._roots = {k: x for k, x in self._roots.items() if x.children}
      root = self._roots[key] = PrefixBlock(key, None, len(self.groups))
      root.ready = True
    return root

  def match(
    self,
    root: PrefixBlock,
    tokens: Int[np.ndarray, " n"],
    *,
    most: int | None = None,
  ) -> list[PrefixBlock]:
    """Find the longest cached prefix of int32 tokens [n], as blocks.

    Blocks that are not ready yet are among them. For groups with a window the
    pages within the window of the next token are present, or the prefix is
    shorter.

    Args:
      root: Root block, see `root`.
      tokens: Token ids, int32 [n].
      most: Maximum number of blocks.
    """
    pieces = self.pieces(tokens, most)
    blocks = self._in_sight(self.chain(root, pieces))
    self.counters.looked += len(pieces)
    self.counters.hit += len(blocks)
    return blocks

  def pieces(
    self, tokens: Int[np.ndarray, " n"], most: int | None = None
  ) -> list[bytes]:
    """Bytes of the full blocks of int32 tokens [n], at most `most` blocks."""
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    size = 4 * self.page
    count = len(data) // size
    count = count if most is None else min(count, most)
    return [data[n * size : (n + 1) * size] for n in range(count)]

  def chain(
    self, root: PrefixBlock, pieces: Iterable[bytes]
  ) -> list[PrefixBlock]:
    """Find the blocks after `root` with these bytes, as far as they exist.

    Their pages of groups with a window may have been freed.
    """
    blocks, at = [], root
    for piece in pieces:
      child = at.children.get(piece)
      if child is None:
        break
      blocks.append(child)
      at = child
    return blocks

  def _in_sight(self, blocks: list[PrefixBlock]) -> list[PrefixBlock]:
    """Longest prefix whose pages within the next token's window exist."""
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
    """Find the block whose whole prefix has this hash, if it is ready."""
    return self._by_digest.get(digest)

  def extend(self, parent: PrefixBlock, data: bytes) -> PrefixBlock:
    """Add a block that is not ready; the caller is its first user.

    Raises:
      KeyError: If the block exists.
    """
    if data in parent.children:
      raise KeyError("there is such a block")
    child = PrefixBlock(data, parent, len(self.groups))
    parent.children[data] = child
    child.refs = 1
    if parent.lost:
      child.lost = True
      self._lost.add(child)
    self.counters.changes += 1
    return child

  def finish(
    self, block: PrefixBlock, pages: Sequence[int | None], indexed: bool = False
  ) -> None:
    """Mark a block as computed and move the row's pages to it."""
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
    """Move a row's page to a block whose page of the group was freed.

    The row is at the block or after it, and has the page within its window.
    """
    assert block.ready and block.pages[group] is None
    self._held[group][block.depth % self.shards] -= 1
    block.pages[group] = page
    block.users[group] += 1

  def acquire(self, block: PrefixBlock, groups: Sequence[int]) -> None:
    """Add a row at this block or after it that reads its pages of `groups`."""
    self._idle[block.depth % self.shards] -= block.idle
    block.refs += 1
    for group in groups:
      block.users[group] += 1

  def unsee(self, block: PrefixBlock, group: int) -> None:
    """Remove a row from the readers of a block's page of a group."""
    block.users[group] -= 1
    narrow = self.groups[group].reach is not None
    if narrow and not block.users[group] and block.pages[group] is not None:
      block.used = next(self._clock)
      heap = self._unseen[group][block.depth % self.shards]
      self._note(heap, block, functools.partial(self._unneeded, group))

  def release(self, block: PrefixBlock, groups: Sequence[int]) -> None:
    """Remove a row from a block whose pages of `groups` it has read.

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
    """Remove a block and all blocks after it from the tree, as invalid.

    Pages that rows use are freed when these rows leave.
    """
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

  def clear(self) -> None:
    """Remove all blocks, as of other weights; see `lose`."""
    for root in self._roots.values():
      for block in list(root.children.values()):
        self.lose(block)

  # -------------------------------------------------------------------------
  # Making room
  # -------------------------------------------------------------------------

  def _offer(self, block: PrefixBlock) -> None:
    """Add a block to the evictable ones, if no row or block needs it."""
    if block.refs or block.children or block.root or not block.ready:
      return
    self._note(self._leaves[block.depth % self.shards], block, self._stands)

  def _note(
    self,
    heap: list[Any],
    block: PrefixBlock,
    stands: Callable[[int, PrefixBlock], bool],
  ) -> None:
    """Add a block to a heap by its last use; older entries may be stale."""
    heapq.heappush(heap, (block.used, next(self._order), block))
    if len(heap) > _STALE + 4 * self.groups[0].pages:
      valid = {id(x[2]): x for x in heap if stands(x[0], x[2])}
      heap[:] = valid.values()
      heapq.heapify(heap)

  @staticmethod
  def _stands(used: int, block: PrefixBlock) -> bool:
    """Whether a heap entry is valid and its block can be evicted."""
    parent = block.parent
    in_tree = parent is not None and parent.children.get(block.data) is block
    idle = not block.refs and not block.children
    return in_tree and idle and block.used == used

  def _leaf(self, shard: int) -> PrefixBlock | None:
    """Least recently used evictable block of a shard."""
    heap = self._leaves[shard]
    while heap:
      used, _, block = heap[0]
      if self._stands(used, block):
        return block
      heapq.heappop(heap)
    return None

  def _page(self, group: int, shard: int) -> PrefixBlock | None:
    """Least recently used block with an unread page of a windowed group."""
    heap = self._unseen[group][shard]
    while heap:
      used, _, block = heap[0]
      if self._unneeded(group, used, block):
        return block
      heapq.heappop(heap)
    return None

  @staticmethod
  def _unneeded(group: int, used: int, block: PrefixBlock) -> bool:
    """Whether a heap entry is valid and its page can be evicted."""
    has_page = block.pages[group] is not None
    return has_page and not block.users[group] and block.used == used

  def _evict(self, group: int, shard: int) -> bool:
    """Evicts a page on a shard; whether one could be evicted."""
    if self.groups[group].reach is not None:
      block = self._page(group, shard)
      if block is not None:
        self._drop(block, group)
        return True
    while not self._free[group][shard]:
      block = self._leaf(shard)
      if block is None:
        # Blocks after it on other shards have to be evicted first.
        others = [self._leaf(s) for s in range(self.shards)]
        candidates = [b for b in others if b is not None]
        if not candidates:
          return False
        block = min(candidates, key=lambda b: b.used)
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
    # Another block may have replaced a lost one.
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
    """Iterate over all blocks, each before those after it."""
    waiting = list(self._roots.values())
    while waiting:
      block = waiting.pop()
      waiting.extend(block.children.values())
      if not block.root:
        yield block

  def check(self) -> None:
    """Checks that free, cached and held pages make up the pool, each once.

    Raises:
      AssertionError: If a count does not hold.
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
        pages = [*free, *cached]
        shared = {p for g, s, p in self._more if (g, s) == (group, shard)}
        if len(set(pages)) != len(pages) or shared & set(pages):
          raise AssertionError(f"group {group}: a page is there twice")
        total = len(pages) + self._held[group][shard]
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
        raise AssertionError("a block is used less than those after it")
      if min(block.refs, *block.users) < 0:
        raise AssertionError("a block was released too often")

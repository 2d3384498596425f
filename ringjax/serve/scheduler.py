"""Which tokens of which requests the next calls of the model compute.

Guarantees: every row gets on, or is preempted by rows that come before it; a
token is computed once, but for rows that were preempted. Pages are allocated
before a plan is returned, so a call never finds that one is missing.
Cost: a plan looks at each running row, and at few waiting ones.

Plain Python, no JAX: the engine and its simulator run the same code. A row's
order is (priority, arrival); rows whose prefix another row is computing at
the moment are held back until that is done, and then share it. Rows of a beam
search are a team: they begin and make room together.
Ref: Yu et al. 2022, Orca (OSDI); Agrawal et al. 2024, Sarathi-Serve,
arXiv 2403.02310.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ringjax.serve.prefix_tree import OutOfPages, PrefixBlock, PrefixTree

if TYPE_CHECKING:
  pass

# How many waiting rows a plan looks at.
_LOOK = 64


@dataclasses.dataclass(eq=False, kw_only=True)
class KeptPages:
  """Pages that a row had when it was preempted, which are copied elsewhere.

  Attributes:
    tables: for each group int32 [R, m], the pages that it had.
    computed: tokens whose keys they hold.
    slot: the row's place then.
    payload: the copy; whatever the engine makes of it.
    into: for each group the pages that it is to be copied into, by number of
      the block, once the row comes back.
  """

  tables: list[np.ndarray]
  computed: int
  slot: int
  payload: object = None
  into: list[dict[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPrefix:
  """How much of a row's prompt can be had with blocks from a store.

  Attributes:
    count: blocks, from the first one on.
    payloads: by (number of the block, group) the bytes of a page that has to
      be loaded; the other pages are in the tree.
    apart: whether the pages are the row's alone: the last ones of the blocks,
      in which some tokens of all blocks are.
  """

  count: int
  payloads: dict[tuple[int, int], Any]
  apart: bool = False

  @property
  def first(self) -> int:
    """Blocks before the first one that the row has a page for."""
    return self.count - len(self.payloads) if self.apart else 0


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedRow:
  """One prompt and its answer on their way through the engine.

  Attributes:
    prompt: int32 [n].
    most: tokens of the answer at most.
    priority: smaller ones come first.
    arrival: when it came, a count or a time; earlier ones come first.
    salt: rows of another salt share nothing with it.
    adapter: as salt.
    share: whether blocks of the prompt may be shared.
    owner: whatever it belongs to.
    answer: tokens that were chosen and are known to the host.
    chosen: tokens that were chosen, the host may not know the last ones yet.
    computed: tokens whose keys are in pages.
    slot: its place among the running rows, or None.
    blocks: of its prompt, those in the tree.
    pages: for each group its own pages, by number of the block.
    first: for each group the first block in sight.
    preemptions: how often it was preempted.
    hit: tokens whose keys it found.
    trusted: of these, tokens whose keys other rows had computed when it began
      for the first time.
    ended: whether it is over.
    held: whether it waits for another row that computes its prefix, or for
      blocks that come from a store.
    loaded: tokens whose keys come from a store, of those of `hit`.
    store_state: what a `BlockSource` remembers of it.
    kept: what a preempted row had computed, if it is to come back with it.
    team: rows of one beam search, itself among them: they have slots at the
      same time, the first one reads the prompt, and whichever reads a token
      waits until the host knows it; empty for a row of its own.
    parked: of a team, whether it has a slot and nothing else.
    source: the row that a parked one is to be a copy of, or None.
    apart: the part of its prefix that it reads in place of the whole; no other
      row finds what it computes behind that. None: it reads all.
    absent: slots before its first page, of a row that reads a part.
  """

  prompt: np.ndarray
  most: int
  priority: int = 0
  arrival: int | float = 0
  salt: str = ""
  adapter: str = ""
  share: bool = True
  owner: Any = None
  answer: list[int] = dataclasses.field(default_factory=list)
  chosen: int = 0
  computed: int = 0
  slot: int | None = None
  blocks: list[PrefixBlock] = dataclasses.field(default_factory=list)
  pages: list[dict[int, int]] = dataclasses.field(default_factory=list)
  first: list[int] = dataclasses.field(default_factory=list)
  preemptions: int = 0
  hit: int = 0
  trusted: int = 0
  ended: bool = False
  held: bool = False
  kept: KeptPages | None = None
  loaded: int = 0
  store_state: Any = None
  team: list[ServedRow] = dataclasses.field(default_factory=list)
  parked: bool = False
  source: ServedRow | None = None
  apart: StoredPrefix | None = None
  absent: int = 0

  @property
  def order(self) -> tuple[int, int | float]:
    """What comes first."""
    return self.priority, self.arrival

  @property
  def known(self) -> int:
    """Tokens of the prompt and of the answer so far."""
    return self.prompt.size + self.chosen

  @property
  def reading(self) -> bool:
    """Whether some of its prompt is not computed yet."""
    return self.computed < self.prompt.size

  @property
  def longest(self) -> int:
    """Tokens of prompt and answer at most."""
    return self.prompt.size + self.most

  def token(self, n: int) -> int:
    """Token `n` of the prompt and the answer, if the host knows it, or -1."""
    if n < self.prompt.size:
      return int(self.prompt[n])
    n -= self.prompt.size
    return self.answer[n] if n < len(self.answer) else -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptPiece:
  """Some tokens of a prompt that a call computes.

  Attributes:
    row: the row.
    start: the first of them.
    count: how many.
    chooses: whether the token behind the last one is to be chosen.
  """

  row: ServedRow
  start: int
  count: int
  chooses: bool


class RowDraft(NamedTuple):
  """Tokens that may follow the last one of a row.

  Fields:
    tokens: one behind another, or a tree.
    parents: of a tree which token each follows, an earlier one of `tokens`; -1
      for the row's last one. None: a chain.
  """

  tokens: tuple[int, ...] = ()
  parents: tuple[int, ...] | None = None

  @property
  def above(self) -> tuple[int, ...]:
    """The parents of a tree or a chain."""
    if self.parents is None:
      return tuple(range(-1, len(self.tokens) - 1))
    return self.parents

  @property
  def depths(self) -> list[int]:
    """How many tokens each is behind the row's last one."""
    found: list[int] = []
    for parent in self.above:
      found.append(1 + (found[parent] if parent >= 0 else 0))
    return found

  def first(self, count: int) -> RowDraft:
    """The first tokens, whose parents are among them."""
    parents = None if self.parents is None else self.parents[:count]
    return RowDraft(self.tokens[:count], parents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTurn:
  """A row's next token in a decoding call.

  Attributes:
    row: the row.
    slot: its place in the call.
    at: the position of the token that is read.
    chooses: whether the next one is to be chosen; otherwise it is known: the
      row was preempted and comes back.
    draft: what may follow the token that is read, which the call checks.
  """

  row: ServedRow
  slot: int
  at: int
  chooses: bool
  draft: RowDraft = RowDraft()

  @property
  def end(self) -> int:
    """Tokens of the row behind the call."""
    return self.at + 1 + len(self.draft.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFork:
  """A row that becomes a copy of another one.

  Attributes:
    row: the row.
    source: the slot of the other one, which has recurrent layers' states.
    number: of the block that is filled in part, and so is copied.
    pages: for each group (from, to) of that block; empty if all are whole.
  """

  row: ServedRow
  source: int
  number: int
  pages: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """What a step computes.

  Attributes:
    turns: of rows that decode.
    pieces: of prompts.
    admitted: rows that begin, or begin anew.
    preempted: rows that had to make room; those with `kept` pages are to be
      copied before a call.
    restored: of the rows that begin anew, those whose pages are to be copied
      back before a call.
    refused: of the preempted, those that ran alone: nobody can make room for
      them, so that they would be preempted for ever.
    forks: copies that are to be made before a call, behind those of
      `preempted` and `restored`.
  """

  turns: tuple[DecodeTurn, ...]
  pieces: tuple[PromptPiece, ...]
  admitted: tuple[ServedRow, ...]
  preempted: tuple[ServedRow, ...]
  restored: tuple[ServedRow, ...] = ()
  refused: tuple[ServedRow, ...] = ()
  forks: tuple[RowFork, ...] = ()

  @property
  def tokens(self) -> int:
    """That are computed."""
    turns = sum(turn.end - turn.at for turn in self.turns)
    return turns + sum(piece.count for piece in self.pieces)

  @property
  def empty(self) -> bool:
    """Whether there is nothing to compute."""
    return not self.turns and not self.pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLimits:
  """How large calls are.

  Attributes:
    rows: that run at the same time.
    pieces: of prompts in a call, each of one row.
    piece: tokens of a piece at most.
    budget: tokens of a step at most, of prompts and answers together.
    blocks: of a row at most, a multiple of the shards.
    one_piece: whether a call has one piece of a row at most, as recurrent
      layers need.
  """

  rows: int
  pieces: int
  piece: int
  budget: int
  blocks: int
  one_piece: bool = False


class BlockSource(Protocol):
  """Where blocks come from that the tree does not have."""

  def look(
    self, row: ServedRow, root: PrefixBlock, count: int, most: int
  ) -> StoredPrefix | None:
    """More blocks of a row's prompt than the tree has, or None while they are
    on their way.

    Args:
      row: which is about to begin.
      root: of its prefixes.
      count: blocks that the tree has.
      most: blocks at most.
    """
    ...


class Scheduler:
  """Waiting and running rows, and the pages that they hold.

  Attributes:
    tree: pages and prefixes.
    limits: how large calls are.
    tables: for each group int32 [rows, R, blocks / R], the pages of each slot;
      -1 is none. See `PagePool.call`.
    running: by slot, None where it is free.
    version: a count of changes of the tables.
    source: of blocks that the tree does not have, or None.
    drafts: asked for what may follow the last token of a row, so many tokens
      one behind another at most; or None. The host then knows all tokens of
      rows when it plans.
    loads: by (group, shard, page) the bytes that have to be in a page before
      the calls of the plan; whoever makes the calls takes them out.
  """

  def __init__(
    self,
    tree: PrefixTree,
    limits: StepLimits,
    *,
    share_answers: bool = False,
    reuse: bool = True,
    victim: Callable[[Sequence[ServedRow]], ServedRow] | None = None,
    keeps: Callable[[ServedRow], bool] | None = None,
  ):
    """Without rows.

    Args:
      tree: of pages.
      limits: of a call.
      share_answers: whether blocks with tokens of answers are shared too.
      reuse: whether prefixes are shared at all.
      victim: which of the running rows is preempted first; default: the last
        one in order.
      keeps: whether what a preempted row has computed is copied elsewhere, and
        not computed again; default: never.
    """
    self._keeps = keeps or (lambda _: False)
    self.tree, self.limits = tree, limits
    self.share_answers, self.reuse = share_answers, reuse
    self._victim = victim or (lambda rows: max(rows, key=lambda r: r.order))
    self.waiting: list[ServedRow] = []
    self.running: list[ServedRow | None] = [None] * limits.rows
    shape = (limits.rows, tree.shards, limits.blocks // tree.shards)
    self.tables = [np.full(shape, -1, np.int32) for _ in tree.groups]
    self._begun: set[ServedRow] = set()
    self._refused: list[ServedRow] = []
    self.version = 0
    self.source: BlockSource | None = None
    self.drafts: Callable[[ServedRow, int], RowDraft] | None = None
    self.loads: dict[tuple[int, int, int], Any] = {}

  # -------------------------------------------------------------------------
  # Rows come and go
  # -------------------------------------------------------------------------

  @property
  def busy(self) -> bool:
    """Whether there is a row at all."""
    return bool(self.waiting) or any(self.running)

  def add(self, row: ServedRow) -> None:
    """A row that waits."""
    bisect.insort(self.waiting, row, key=lambda r: r.order)

  def drop(self, row: ServedRow, *, lose: bool = False) -> None:
    """A row that is over, or not wanted any more; its pages are free.

    Args:
      row: the row.
      lose: whether the keys that it has computed are of no use to others.
    """
    if lose:
      for block in row.blocks[row.trusted // self.tree.page :][:1]:
        self.tree.lose(block)
    row.ended, row.kept, row.store_state, row.apart = True, None, None, None
    if row.slot is None:
      if row in self.waiting:
        self.waiting.remove(row)
      return
    self._leave(row)

  def fits(self, row: ServedRow) -> str | None:
    """Why a row can never be served, or None."""
    page, shards = self.tree.page, self.tree.shards
    need, many = -(-row.longest // page), max(1, len(row.team))
    if need > self.limits.blocks:
      return f"{self.limits.blocks * page:,} tokens of a row at most"
    if many > self.limits.rows:
      return f"{self.limits.rows} rows at the same time at most"
    # A team has the whole pages of its prompt once.
    once, total = 0, self._at_once(row.longest)
    if self.tree.groups[0].reach is None:
      once = row.prompt.size // page
    on = lambda shard, pages: -(-(pages - shard) // shards)
    each = (
      on(s, once) + many * (on(s, total) - on(s, once)) for s in range(shards)
    )
    if max(each) > self.tree.groups[0].pages:
      room = self.tree.groups[0].pages * shards * page
      return f"{room:,} tokens in the pool"
    return None

  def _at_once(self, tokens: int) -> int:
    """Pages of the first group that a row of so many tokens has at a time."""
    page, reach = self.tree.page, self.tree.groups[0].reach
    whole = -(-tokens // page)
    if reach is None:
      return whole
    # What a call reads and writes begins and ends within pages.
    seen = reach + self.limits.pieces * self.limits.piece
    return min(whole, -(-seen // page) + 1)

  def park(self, row: ServedRow, source: ServedRow | None = None) -> None:
    """A row of a team gives back what it has, but for its slot.

    Args:
      row: the row.
      source: of which it becomes a copy in the next plan; None for no one.
    """
    self._release(row)
    row.computed, row.parked, row.source = 0, True, source

  # -------------------------------------------------------------------------
  # A step
  # -------------------------------------------------------------------------

  def plan(self) -> StepPlan:
    """What to compute now; rows are then where the calls leave them."""
    preempted: list[ServedRow] = []
    # Rows of which this plan computes something: it may yet be given up.
    self._begun, self._refused = set(), []
    turns, left = [], self.limits.budget
    forks: list[RowFork] = []
    rows = [row for row in self.running if row is not None]
    for row in rows:
      # The calls before this one needed them.
      for group, spec in enumerate(self.tree.groups):
        if spec.reach is not None:
          self._forget(row, group)
    for row in sorted(rows, key=lambda r: r.order):
      if row.slot is not None and row.source is not None:
        self._fork(row, row.source, forks, preempted)
      if row.slot is None or row.reading or row.chosen < 1:
        continue
      if row.team and row.token(row.computed) < 0:
        continue
      if row.computed >= row.known or left < 1:
        continue
      if not self._make_room(row, row.computed, 1, preempted):
        continue
      known = row.computed + 1 < row.known
      if not known and row.chosen >= row.most:
        continue
      draft = RowDraft() if known else self._draft(row, left - 1)
      turns.append(
        DecodeTurn(
          row=row,
          slot=row.slot,
          at=row.computed,
          chooses=not known,
          draft=draft,
        )
      )
      left -= 1 + len(draft.tokens)
    pieces = self._pieces(left, preempted)
    admitted = self._admitted(left, pieces, preempted)
    # Rows may be preempted after their part was planned.
    turns = [turn for turn in turns if turn.row.slot is not None]
    pieces = [piece for piece in pieces if piece.row.slot is not None]
    admitted = [row for row in admitted if row.slot is not None]
    forks = [fork for fork in forks if fork.row.slot is not None]
    for turn in turns:
      turn.row.computed += 1
      turn.row.chosen += turn.chooses
    for piece in pieces:
      piece.row.chosen += piece.chooses
    # Only what is sure to be computed is for others to use.
    for row in dict.fromkeys(part.row for part in (*turns, *pieces)):
      self._passed(row)
    return StepPlan(
      turns=tuple(turns),
      pieces=tuple(pieces),
      admitted=tuple(admitted),
      preempted=tuple(preempted),
      restored=tuple(row for row in admitted if row.kept is not None),
      refused=tuple(self._refused),
      forks=tuple(forks),
    )

  def _fork(
    self,
    row: ServedRow,
    source: ServedRow,
    forks: list[RowFork],
    preempted: list[ServedRow],
  ) -> None:
    """A parked row shares the whole pages of another one of its team, and has
    its own of the one that is filled in part."""
    assert row.slot is not None and source.slot is not None
    if source.parked or source.reading:
      return
    number, rest = divmod(source.computed, self.tree.page)
    if rest and not self._make_room(row, source.computed - 1, 1, preempted):
      return
    pages = tuple(
      (own[number], mine[number])
      for own, mine in zip(source.pages, row.pages, strict=True)
      if rest
    )
    for group, own in enumerate(source.pages):
      for n, page in own.items():
        if n < number:
          self.tree.share(group, n, page)
          row.pages[group][n] = page
          self._set(row, group, n, page)
    row.first, row.blocks = [*source.first], [*source.blocks]
    for n, block in enumerate(row.blocks):
      self._acquire(row, n, block, self._seen(row, n))
    row.computed, row.parked, row.source = source.computed, False, None
    forks.append(
      RowFork(row=row, source=source.slot, number=number, pages=pages)
    )

  def _pieces(self, left: int, preempted: list[ServedRow]) -> list[PromptPiece]:
    """Pieces of the prompts of running rows."""
    found: list[PromptPiece] = []
    rows = [r for r in self.running if r is not None and r.reading]
    for row in sorted(rows, key=lambda r: r.order):
      if row.slot is not None and not row.parked:
        self._read(row, left, found, preempted)
    return found

  def _read(
    self,
    row: ServedRow,
    budget: int,
    pieces: list[PromptPiece],
    preempted: list[ServedRow],
  ) -> None:
    """Adds pieces of one prompt, as many as there is room for."""
    limits, first = self.limits, True
    while row.reading and len(pieces) < limits.pieces:
      if limits.one_piece and not first:
        return
      left = budget - sum(piece.count for piece in pieces)
      count = min(limits.piece, row.prompt.size - row.computed, left)
      if count < 1:
        return
      if not self._make_room(row, row.computed, count, preempted):
        return
      start = row.computed
      self._begun.add(row)
      row.computed += count
      ends = not row.reading and row.chosen == 0
      pieces.append(
        PromptPiece(row=row, start=start, count=count, chooses=ends)
      )
      first = False

  def _admitted(
    self,
    left: int,
    pieces: list[PromptPiece],
    preempted: list[ServedRow],
  ) -> list[ServedRow]:
    """Rows that begin, whose first pieces are added."""
    found: list[ServedRow] = []
    if preempted:
      return found
    for row in list(self.waiting[:_LOOK]):
      taken = sum(piece.count for piece in pieces)
      full = len(pieces) >= self.limits.pieces or taken >= left
      if full or self.running.count(None) < max(1, len(row.team)):
        break
      if not self._begin(row):
        if row.held:
          continue
        break
      self.waiting.remove(row)
      found += row.team or [row]
      self._read(row, left, pieces, preempted)
      if preempted:
        # Whoever made room comes before those that still wait.
        break
    return found

  def _begin(self, row: ServedRow) -> bool:
    """Gives a row a slot and what is known of its prefix, if there is room."""
    tree, page = self.tree, self.tree.page
    row.held = False
    root = tree.root(row.salt, row.adapter)
    shared: list[PrefixBlock] = []
    whole = (row.prompt.size - 1) // page
    reuse = self.reuse and row.share and row.apart is None
    if reuse:
      shared = tree.match(root, row.prompt, most=whole)
      if any(not block.ready for block in shared):
        # Another row is computing what this one needs.
        row.held = True
        return False
    stored = StoredPrefix(count=len(shared), payloads={})
    source = self.source if row.kept is None else None
    if source is not None and reuse:
      found = source.look(row, root, len(shared), whole)
      if found is None:
        row.held = True
        return False
      if found.apart:
        row.apart, shared, reuse = found, [], False
      elif found.count > len(shared):
        stored = found
        pieces = tree.pieces(row.prompt, found.count)
        shared = tree.chain(root, pieces)
    if row.apart is not None:
      stored = row.apart
    tokens = row.prompt.size
    if row.kept is not None:
      tokens = max(tokens, row.kept.computed)
    need = self._at_once(tokens) + 1 - len(shared) - stored.first
    # Behind its prompt a team has pages row by row.
    need += len(row.team) * (-(-row.known // page) - row.prompt.size // page)
    idle = sum(not block.refs for block in shared)
    room = sum(tree.available(s) for s in range(tree.shards)) - idle
    if need > room and any(r is not None for r in self.running):
      return False
    self._seat(row)
    row.blocks = list(shared)
    row.computed = row.hit = stored.count * page
    row.absent = stored.first * page
    if row.kept is not None:
      row.computed = max(row.computed, row.kept.computed)
    row.first = [
      max(stored.first, self._sight(g, row.computed))
      for g in range(len(tree.groups))
    ]
    for n, block in enumerate(shared):
      groups = [g for g, at in enumerate(block.pages) if at is not None]
      groups = [g for g in groups if n >= row.first[g]]
      self._acquire(row, n, block, groups)
    if not self._load(row, root, stored):
      self._leave(row)
      row.computed = row.hit = 0
      return False
    row.store_state = None
    if not row.preemptions:
      row.trusted = row.hit - row.loaded
    # No page in sight may be missing.
    assert all(
      at is not None or n < row.first[g]
      for n, block in enumerate(row.blocks)
      for g, at in enumerate(block.pages)
    )
    if reuse:
      # Others are to wait for these blocks.
      data = np.ascontiguousarray(row.prompt, "<i4").tobytes()
      at = row.blocks[-1] if row.blocks else root
      for n in range(len(row.blocks), row.prompt.size // page):
        piece = data[4 * page * n : 4 * page * (n + 1)]
        if piece in at.children:
          break
        at = tree.extend(at, piece)
        row.blocks.append(at)
    for other in row.team:
      if other is not row:
        self._seat(other)
        other.parked, other.source = True, row if other.chosen else None
    return row.kept is None or self._restored(row, len(shared))

  def _seat(self, row: ServedRow) -> None:
    """Gives a row a slot, and no pages yet."""
    free = [n for n, one in enumerate(self.running) if one is None]
    slot = self.tree.slot_for(free, row.longest)
    row.slot, self.running[slot] = slot, row
    row.pages, row.first = [{} for _ in self.tables], [0] * len(self.tables)
    row.parked, row.source, row.hit, row.loaded = False, None, 0, 0

  def _acquire(
    self, row: ServedRow, n: int, block: PrefixBlock, groups: Sequence[int]
  ) -> None:
    """A row has a block, of which it sees the pages of these groups."""
    self.tree.acquire(block, groups)
    for group in groups:
      own = block.pages[group]
      assert own is not None
      self._set(row, group, n, own)

  def _seen(self, row: ServedRow, n: int) -> list[int]:
    """Groups whose page of block n of the tree a row has in sight."""
    block = row.blocks[n]
    return [
      g
      for g in range(len(self.tree.groups))
      if block.ready
      and n >= row.first[g]
      and n not in row.pages[g]
      and block.pages[g] is not None
    ]

  def _restored(self, row: ServedRow, shared: int) -> bool:
    """Gives a row that comes back pages for what it had computed."""
    assert row.kept is not None and row.slot is not None
    slot = row.slot
    row.kept.into = [{} for _ in row.pages]
    try:
      for number in range(shared, -(-row.computed // self.tree.page)):
        for group, mine in enumerate(row.pages):
          if number >= row.first[group]:
            mine[number] = self.tree.allocate(group, number, slot)
            row.kept.into[group][number] = mine[number]
            self._set(row, group, number, mine[number])
    except OutOfPages:
      self._leave(row)
      row.computed = 0
      return False
    return True

  def _load(
    self, row: ServedRow, root: PrefixBlock, stored: StoredPrefix
  ) -> bool:
    """Pages for what comes from a store; whether there was room.

    The blocks are then like any others: they are loaded before the next call.
    """
    assert row.slot is not None
    tree, page = self.tree, self.tree.page
    row.loaded = 0
    if not stored.payloads:
      return True
    if stored.apart:
      return self._load_apart(row, stored)
    groups = range(len(tree.groups))
    pieces = tree.pieces(row.prompt, stored.count)
    for n in range(stored.count):
      wanted = [g for g in groups if (n, g) in stored.payloads]
      made: list[int | None] = [None for _ in groups]
      try:
        for g in wanted:
          made[g] = tree.allocate(g, n, row.slot)
      except OutOfPages:
        for g, at in enumerate(made):
          if at is not None:
            tree.give_back(g, n, at)
        return False
      if n < len(row.blocks):
        for g in wanted:
          own = made[g]
          assert own is not None
          tree.attach(row.blocks[n], g, own)
      else:
        last = row.blocks[-1] if row.blocks else root
        row.blocks.append(tree.extend(last, pieces[n]))
        tree.finish(row.blocks[-1], made)
        row.loaded += page
      for g in wanted:
        at = made[g]
        assert at is not None
        self._set(row, g, n, at)
        self.loads[g, n % tree.shards, at] = stored.payloads[n, g]
    return True

  def _load_apart(self, row: ServedRow, stored: StoredPrefix) -> bool:
    """Pages of a row's own for the part of a prefix; whether there was room."""
    # One that comes back with its pages has these among them.
    for (n, group), payload in stored.payloads.items() if not row.kept else ():
      if not self._allocate(row, n, group):
        return False
      self.loads[group, n % self.tree.shards, row.pages[group][n]] = payload
    row.loaded = stored.count * self.tree.page
    return True

  def _sight(self, group: int, computed: int) -> int:
    """The first block that the token at `computed` looks back on."""
    reach = self.tree.groups[group].reach
    if reach is None:
      return 0
    return max(0, computed - reach) // self.tree.page

  def _set(self, row: ServedRow, group: int, number: int, page: int) -> None:
    assert row.slot is not None
    shards = self.tree.shards
    table = self.tables[group]
    table[row.slot, number % shards, number // shards] = page
    self.version += 1

  def _draft(self, row: ServedRow, most: int) -> RowDraft:
    """Tokens that may follow; for these nobody has to make room."""
    path = min(most, row.most - row.chosen - 1)
    if self.drafts is None or path < 1 or row.team:
      return RowDraft()
    start = row.computed + 1
    # Of a tree more tokens than paths are long.
    most = min(most, self.limits.blocks * self.tree.page - start)
    found = self.drafts(row, path).first(most)
    for number, group in self._missing(row, start, len(found.tokens)):
      if not self._allocate(row, number, group):
        return found.first(max(0, number * self.tree.page - start))
    return found

  def _make_room(
    self,
    row: ServedRow,
    start: int,
    count: int,
    preempted: list[ServedRow],
  ) -> bool:
    """Pages for tokens of a row; others may have to go, or it goes itself."""
    for number, group in self._missing(row, start, count):
      while not self._allocate(row, number, group):
        rows = [r for r in self.running if r is not None]
        victim = self._victim(rows)
        self._preempt(victim, preempted)
        if row.slot is None:
          if not any(r.slot is not None for r in rows):
            self._refused.append(row)
          return False
    return True

  def _missing(
    self, row: ServedRow, start: int, count: int
  ) -> Iterator[tuple[int, int]]:
    """Pages that a row needs for tokens and does not have: (number, group)."""
    page = self.tree.page
    for number in range(start // page, -(-(start + count) // page)):
      if number < len(row.blocks) and row.blocks[number].ready:
        continue
      for group in range(len(self.tree.groups)):
        if number not in row.pages[group]:
          yield number, group

  def _allocate(self, row: ServedRow, number: int, group: int) -> bool:
    """A page for a row; whether there was one."""
    assert row.slot is not None
    try:
      page = self.tree.allocate(group, number, row.slot)
    except OutOfPages:
      return False
    row.pages[group][number] = page
    self._set(row, group, number, page)
    return True

  def _preempt(self, row: ServedRow, preempted: list[ServedRow]) -> None:
    """A row makes room and waits, with its team; what is computed may go."""
    for one in row.team or [row]:
      assert one.slot is not None
      one.kept = None
      keeps = one.computed and one not in self._begun and not one.team
      if keeps and self._keeps(one):
        tables = [table[one.slot].copy() for table in self.tables]
        one.kept = KeptPages(
          tables=tables, computed=one.computed, slot=one.slot
        )
      self._leave(one)
      one.preemptions += 1
      one.computed = 0
      preempted.append(one)
    self.add(row.team[0] if row.team else row)

  def _leave(self, row: ServedRow) -> None:
    """Takes a running row's pages and its slot."""
    self._release(row)
    assert row.slot is not None
    self.tree.leave(row.slot)
    self.running[row.slot] = None
    row.slot = None

  def _release(self, row: ServedRow) -> None:
    """Takes a running row's pages."""
    tree = self.tree
    for group, mine in enumerate(row.pages):
      for number, page in mine.items():
        tree.give_back(group, number, page)
    for n in range(len(row.blocks) - 1, -1, -1):
      tree.release(row.blocks[n], self._seen(row, n))
    assert row.slot is not None
    for table in self.tables:
      table[row.slot] = -1
    self.version += 1
    row.blocks, row.pages = [], [{} for _ in tree.groups]

  def _passed(self, row: ServedRow) -> None:
    """Blocks that are complete go to the tree."""
    tree, page = self.tree, self.tree.page
    whole = row.computed // page
    # Pages that a team shares belong to none of its rows.
    alone = not row.team and row.apart is None
    if self.share_answers and self.reuse and row.share and alone:
      self._share_answer(row, whole)
    for n in range(min(whole, len(row.blocks))):
      block = row.blocks[n]
      if not block.ready:
        tree.finish(block, [mine.pop(n, None) for mine in row.pages])

  def _forget(self, row: ServedRow, group: int) -> None:
    """Frees a group's pages that later tokens do not see."""
    first = self._sight(group, row.computed)
    for n in range(row.first[group], first):
      if n in row.pages[group]:
        self.tree.give_back(group, n, row.pages[group].pop(n))
      elif n < len(row.blocks) and row.blocks[n].ready:
        self.tree.unsee(row.blocks[n], group)
      self._set(row, group, n, -1)
    row.first[group] = max(row.first[group], first)

  def _share_answer(self, row: ServedRow, whole: int) -> None:
    """Blocks with tokens of the answer that the host knows."""
    page = self.tree.page
    while len(row.blocks) < whole:
      n = len(row.blocks)
      ids = [row.token(i) for i in range(n * page, (n + 1) * page)]
      at = (
        row.blocks[-1] if row.blocks else self.tree.root(row.salt, row.adapter)
      )
      data = np.asarray(ids, "<i4").tobytes()
      if min(ids) < 0 or data in at.children:
        return
      row.blocks.append(self.tree.extend(at, data))

"""Scheduler: chooses the tokens that the next model calls compute.

Guarantees: every row makes progress, or is preempted by rows that come before
it; a token is computed once, but for rows that were preempted. Pages are
allocated before a plan is returned, so a call never finds that one is missing.
Cost: a plan examines each running row, and few waiting ones.

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

from ringjax.serve.prefix.prefix_tree import OutOfPages, PrefixBlock, PrefixTree

if TYPE_CHECKING:
  pass

# Number of waiting rows that a plan examines.
_LOOK = 64


@dataclasses.dataclass(eq=False, kw_only=True)
class KeptPages:
  """Pages that a row had when it was preempted, which are copied elsewhere.

  Attributes:
    tables: Pages that it had, int32 [R, m] for each group.
    computed: Number of tokens whose keys they hold.
    slot: Slot that the row had.
    payload: Copy of the pages, in the engine's form.
    into: Pages to copy into once the row comes back, by block number, for each
      group.
  """

  tables: list[np.ndarray]
  computed: int
  slot: int
  payload: object = None
  into: list[dict[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPrefix:
  """Part of a row's prompt whose keys come from the tree and a store.

  Attributes:
    count: Number of blocks, from the first one on.
    payloads: Bytes of each page that has to be loaded, by (block number,
        group); the other pages are in the tree.
    apart: Whether the pages are private to the row: the last ones of the
      blocks, filled with the tokens that are kept of all blocks.
  """

  count: int
  payloads: dict[tuple[int, int], Any]
  apart: bool = False

  @property
  def first(self) -> int:
    """Number of blocks before the first one that the row has a page for."""
    return self.count - len(self.payloads) if self.apart else 0


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedRow:
  """State of one prompt and its answer while the engine serves them.

  Attributes:
    prompt: Token ids of the prompt, int32 [n].
    most: Maximum number of tokens of the answer.
    priority: Priority; smaller ones come first.
    arrival: Arrival as a count or a time; earlier rows come first.
    salt: Salt of its prefixes; rows with another salt share nothing with it.
    adapter: Adapter of the row; rows with another one share nothing with it.
    share: Whether blocks of the prompt may be shared.
    owner: Object of the caller that the row belongs to.
    answer: Chosen tokens that the host knows.
    chosen: Number of chosen tokens; the host may not know the last ones yet.
    computed: Number of tokens whose keys are in pages.
    slot: Number among the running rows, or None.
    blocks: Blocks of its prompt that are in the tree.
    pages: Private pages by block number, for each group.
    first: First block within the attention window, for each group.
    preemptions: Number of times that it was preempted.
    hit: Number of tokens whose keys were cached when it began.
    trusted: Number of tokens of `hit` whose keys other rows had computed when
      it first began.
    ended: Whether it has ended.
    held: Whether it waits for another row that computes its prefix, or for
      blocks that come from a store.
    loaded: Number of tokens of `hit` whose keys come from a store.
    store_state: State that a `BlockSource` keeps for the row.
    kept: Pages that a preempted row comes back with, or None.
    team: Rows of one beam search, including itself: they have slots at the same
      time, the first one computes the prompt, and each waits until the host
      knows a token before it reads it; empty for a single row.
    parked: Whether a row of a team has a slot but no pages.
    source: Row that a parked one becomes a copy of, or None.
    apart: Part of its prefix that it reads in place of the whole; no other row
      reuses the keys that it computes after it. None: it reads all.
    absent: Number of token slots before its first page, for a row that reads a
      part.
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
    """Sort key: rows with a smaller priority, then earlier ones, come first."""
    return self.priority, self.arrival

  @property
  def known(self) -> int:
    """Number of tokens of the prompt and of the answer so far."""
    return self.prompt.size + self.chosen

  @property
  def reading(self) -> bool:
    """Whether some of its prompt is not computed yet."""
    return self.computed < self.prompt.size

  @property
  def longest(self) -> int:
    """Maximum number of tokens of prompt and answer."""
    return self.prompt.size + self.most

  def token(self, n: int) -> int:
    """Token `n` of the prompt and the answer, if the host knows it, or -1."""
    if n < self.prompt.size:
      return int(self.prompt[n])
    n -= self.prompt.size
    return self.answer[n] if n < len(self.answer) else -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptPiece:
  """Chunk of a prompt that a call computes.

  Attributes:
    row: Row that the prompt belongs to.
    start: Position of its first token.
    count: Number of tokens.
    chooses: Whether the call chooses the token after the last one.
  """

  row: ServedRow
  start: int
  count: int
  chooses: bool


class RowDraft(NamedTuple):
  """Tokens that may follow the last one of a row.

  Fields:
    tokens: Drafted token ids, a chain or a tree.
    parents: Index of the token that each follows in a tree, an earlier one of
      `tokens`; -1 for the row's last token. None: a chain.
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
    """Distance of each token from the row's last one, at least 1."""
    depths: list[int] = []
    for parent in self.above:
      depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths

  def first(self, count: int) -> RowDraft:
    """Draft of the first `count` tokens, whose parents are among them."""
    parents = None if self.parents is None else self.parents[:count]
    return RowDraft(self.tokens[:count], parents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTurn:
  """A row's next token in a decoding call.

  Attributes:
    row: Row that decodes.
    slot: Number of the row in the call.
    at: Position of the token that is read.
    chooses: Whether the call chooses the next token; otherwise it is known, as
      the row was preempted and comes back.
    draft: Drafted tokens after the token that is read, which the call checks.
  """

  row: ServedRow
  slot: int
  at: int
  chooses: bool
  draft: RowDraft = RowDraft()

  @property
  def end(self) -> int:
    """Number of the row's tokens after the call."""
    return self.at + 1 + len(self.draft.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFork:
  """A row that becomes a copy of another one.

  Attributes:
    row: Row that becomes a copy.
    source: Slot of the other row, whose recurrent states are copied.
    number: Number of the block that is partly filled and therefore copied.
    pages: Pages (from, to) of that block, for each group; empty if all blocks
      are full.
  """

  row: ServedRow
  source: int
  number: int
  pages: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """Work of one step: rows, prompt chunks and copies.

  Attributes:
    turns: Next tokens of rows that decode.
    pieces: Chunks of prompts.
    admitted: Rows that begin or begin again.
    preempted: Rows that had to make room; their pages are copied before a call
      where `kept` is set.
    restored: Rows that begin again with pages that are copied back before a
      call.
    refused: Preempted rows that ran alone: no row can make room for them, so
      they would be preempted for ever.
    forks: Copies to make before a call, after those of `preempted` and
      `restored`.
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
    """Number of tokens that the step computes."""
    decoded = sum(turn.end - turn.at for turn in self.turns)
    return decoded + sum(piece.count for piece in self.pieces)

  @property
  def empty(self) -> bool:
    """Whether there is nothing to compute."""
    return not self.turns and not self.pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLimits:
  """Maximum sizes of calls and steps.

  Attributes:
    rows: Maximum number of rows that run at the same time.
    pieces: Maximum number of prompt chunks in a call, each of one row.
    piece: Maximum number of tokens of a chunk.
    budget: Maximum number of tokens of a step, of prompts and answers together.
    blocks: Maximum number of blocks of a row, a multiple of the shards.
    one_piece: Whether a call has at most one chunk of a row, as recurrent
      layers need.
    aligned: Number of tokens of which prefixes that are reused are multiples.
  """

  rows: int
  pieces: int
  piece: int
  budget: int
  blocks: int
  one_piece: bool = False
  aligned: int = 1


class BlockSource(Protocol):
  """Source of blocks that the tree does not have, for example a store."""

  def look(
    self, row: ServedRow, root: PrefixBlock, count: int, most: int
  ) -> StoredPrefix | None:
    """Look up more blocks of a row's prompt; None while they are in flight.

    Args:
      row: Row that is about to begin.
      root: Root of its prefixes in the tree.
      count: Number of blocks that the tree has.
      most: Maximum number of blocks.
    """
    ...


class Scheduler:
  """Waiting and running rows, and the pages that they hold.

  Attributes:
    tree: Tree of pages and prefixes.
    limits: Maximum sizes of calls and steps.
    tables: Pages of each slot, int32 [rows, R, blocks / R] for each group; -1
      marks no page. See `PagePool.call`.
    running: Rows by slot; None where it is free.
    version: Number of changes of the tables.
    source: Source of blocks that the tree does not have, or None.
    drafts: Function that drafts tokens after the last one of a row, a path of
      so many at most; or None. With drafts the host knows all tokens of rows
      when it plans.
    loads: Bytes to load into pages before the calls of the plan, by (group,
        shard, page); the caller takes them out.
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
    """Make a scheduler without rows.

    Args:
      tree: Tree of prefixes and pages.
      limits: Maximum sizes of calls and steps.
      share_answers: Whether blocks with tokens of answers are shared too.
      reuse: Whether prefixes are shared at all.
      victim: Chooses the running row that is preempted first; default: the last
        one in order.
      keeps: Whether a preempted row's pages are copied elsewhere, not computed
        again; default: never.
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
    """Whether any row waits or runs."""
    return bool(self.waiting) or any(self.running)

  def add(self, row: ServedRow) -> None:
    """Adds a row to the waiting ones."""
    bisect.insort(self.waiting, row, key=lambda r: r.order)

  def drop(self, row: ServedRow, *, lose: bool = False) -> None:
    """Removes a row that has ended or is not needed; its pages are free.

    Args:
      row: Row to remove.
      lose: Whether other rows must not reuse the keys that it has computed.
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
    """Limit because of which a row can never be served, or None."""
    page, shards = self.tree.page, self.tree.shards
    need, num_rows = -(-row.longest // page), max(1, len(row.team))
    if need > self.limits.blocks:
      return f"{self.limits.blocks * page:,} tokens of a row at most"
    if num_rows > self.limits.rows:
      return f"{self.limits.rows} rows at the same time at most"
    # A team shares the full pages of its prompt.
    shared, total = 0, self._at_once(row.longest)
    if self.tree.groups[0].reach is None:
      shared = row.prompt.size // page
    on = lambda shard, pages: -(-(pages - shard) // shards)
    shard_pages = (
      on(s, shared) + num_rows * (on(s, total) - on(s, shared))
      for s in range(shards)
    )
    if max(shard_pages) > self.tree.groups[0].pages:
      room = self.tree.groups[0].pages * shards * page
      return f"{room:,} tokens in the pool"
    return None

  def _at_once(self, tokens: int) -> int:
    """Pages of the first group that a row of `tokens` has at the same time."""
    page, reach = self.tree.page, self.tree.groups[0].reach
    num_blocks = -(-tokens // page)
    if reach is None:
      return num_blocks
    # The range that a call reads and writes may start and end within a page.
    seen = reach + self.limits.pieces * self.limits.piece
    return min(num_blocks, -(-seen // page) + 1)

  def park(self, row: ServedRow, source: ServedRow | None = None) -> None:
    """Frees the pages of a row of a team; it keeps its slot.

    Args:
      row: Row of a team.
      source: Row that it becomes a copy of in the next plan, or None.
    """
    self._release(row)
    row.computed, row.parked, row.source = 0, True, source

  # -------------------------------------------------------------------------
  # A step
  # -------------------------------------------------------------------------

  def plan(self) -> StepPlan:
    """Plan a step; the rows' counts then include the planned tokens."""
    preempted: list[ServedRow] = []
    # Rows with chunks in this plan; a preempted one of them loses its pages.
    self._begun, self._refused = set(), []
    decode_turns, budget = [], self.limits.budget
    forks: list[RowFork] = []
    rows = [row for row in self.running if row is not None]
    for row in rows:
      # Free pages out of sight only now: the previous calls read them.
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
      if row.computed >= row.known or budget < 1:
        continue
      if not self._make_room(row, row.computed, 1, preempted):
        continue
      next_known = row.computed + 1 < row.known
      if not next_known and row.chosen >= row.most:
        continue
      draft = RowDraft() if next_known else self._draft(row, budget - 1)
      decode_turns.append(
        DecodeTurn(
          row=row,
          slot=row.slot,
          at=row.computed,
          chooses=not next_known,
          draft=draft,
        )
      )
      budget -= 1 + len(draft.tokens)
    pieces = self._pieces(budget, preempted)
    admitted = self._admitted(budget, pieces, preempted)
    # Rows may be preempted after their part was planned.
    decode_turns = [turn for turn in decode_turns if turn.row.slot is not None]
    pieces = [piece for piece in pieces if piece.row.slot is not None]
    admitted = [row for row in admitted if row.slot is not None]
    forks = [fork for fork in forks if fork.row.slot is not None]
    for turn in decode_turns:
      turn.row.computed += 1
      turn.row.chosen += turn.chooses
    for piece in pieces:
      piece.row.chosen += piece.chooses
    # Share only blocks that are sure to be computed.
    for row in dict.fromkeys(part.row for part in (*decode_turns, *pieces)):
      self._passed(row)
    return StepPlan(
      turns=tuple(decode_turns),
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
    """Make a parked row a copy of another one of its team.

    It shares the full pages and gets its own copy of the partly filled one.
    """
    assert row.slot is not None and source.slot is not None
    if source.parked or source.reading:
      return
    number, remainder = divmod(source.computed, self.tree.page)
    if remainder and not self._make_room(
      row, source.computed - 1, 1, preempted
    ):
      return
    pages = tuple(
      (source_pages[number], row_pages[number])
      for source_pages, row_pages in zip(source.pages, row.pages, strict=True)
      if remainder
    )
    for group, source_pages in enumerate(source.pages):
      for n, page in source_pages.items():
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
    """Chunks of the prompts of running rows."""
    pieces: list[PromptPiece] = []
    rows = [r for r in self.running if r is not None and r.reading]
    for row in sorted(rows, key=lambda r: r.order):
      if row.slot is not None and not row.parked:
        self._read(row, left, pieces, preempted)
    return pieces

  def _read(
    self,
    row: ServedRow,
    budget: int,
    pieces: list[PromptPiece],
    preempted: list[ServedRow],
  ) -> None:
    """Adds chunks of one prompt, as many as there is room for."""
    limits, first = self.limits, True
    while row.reading and len(pieces) < limits.pieces:
      if limits.one_piece and not first:
        return
      remaining = budget - sum(piece.count for piece in pieces)
      count = min(limits.piece, row.prompt.size - row.computed, remaining)
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
    """Begin waiting rows and add their first chunks; returns these rows."""
    admitted: list[ServedRow] = []
    if preempted:
      return admitted
    for row in list(self.waiting[:_LOOK]):
      num_tokens = sum(piece.count for piece in pieces)
      full = len(pieces) >= self.limits.pieces or num_tokens >= left
      if full or self.running.count(None) < max(1, len(row.team)):
        break
      if not self._begin(row):
        if row.held:
          continue
        break
      self.waiting.remove(row)
      admitted += row.team or [row]
      self._read(row, left, pieces, preempted)
      if preempted:
        # A preempted row comes before those that still wait.
        break
    return admitted

  def _begin(self, row: ServedRow) -> bool:
    """Gives a row a slot and its cached prefix, if there is room."""
    tree, page = self.tree, self.tree.page
    row.held = False
    root = tree.root(row.salt, row.adapter)
    shared: list[PrefixBlock] = []
    max_blocks = (row.prompt.size - 1) // page
    reuse = self.reuse and row.share and row.apart is None
    if reuse:
      shared = tree.match(root, row.prompt, most=max_blocks)
      aligned = self.limits.aligned
      del shared[len(shared) * page // aligned * aligned // page :]
      if any(not block.ready for block in shared):
        # Another row is computing a block that this one needs.
        row.held = True
        return False
    stored = StoredPrefix(count=len(shared), payloads={})
    source = self.source if row.kept is None else None
    if source is not None and reuse:
      from_store = source.look(row, root, len(shared), max_blocks)
      if from_store is None:
        row.held = True
        return False
      if from_store.apart:
        row.apart, shared, reuse = from_store, [], False
      elif from_store.count > len(shared):
        stored = from_store
        pieces = tree.pieces(row.prompt, from_store.count)
        shared = tree.chain(root, pieces)
    if row.apart is not None:
      stored = row.apart
    tokens = row.prompt.size
    if row.kept is not None:
      tokens = max(tokens, row.kept.computed)
    need = self._at_once(tokens) + 1 - len(shared) - stored.first
    # After its prompt each row of a team has separate pages.
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
    # Each page within the window has to be there.
    assert all(
      at is not None or n < row.first[g]
      for n, block in enumerate(row.blocks)
      for g, at in enumerate(block.pages)
    )
    if reuse:
      # Later rows with this prefix wait for these blocks.
      data = np.ascontiguousarray(row.prompt, "<i4").tobytes()
      at = row.blocks[-1] if row.blocks else root
      for n in range(len(row.blocks), row.prompt.size // page):
        piece = data[4 * page * n : 4 * page * (n + 1)]
        if piece in at.children:
          break
        at = tree.extend(at, piece)
        row.blocks.append(at)
    for member in row.team:
      if member is not row:
        self._seat(member)
        member.parked, member.source = True, row if member.chosen else None
    return row.kept is None or self._restored(row, len(shared))

  def _seat(self, row: ServedRow) -> None:
    """Gives a row a slot, and no pages yet."""
    free = [
      n for n, running_row in enumerate(self.running) if running_row is None
    ]
    slot = self.tree.slot_for(free, row.longest)
    row.slot, self.running[slot] = slot, row
    row.pages, row.first = [{} for _ in self.tables], [0] * len(self.tables)
    row.parked, row.source, row.hit, row.loaded = False, None, 0, 0

  def _acquire(
    self, row: ServedRow, n: int, block: PrefixBlock, groups: Sequence[int]
  ) -> None:
    """Acquire a block for a row, with its pages of these groups."""
    self.tree.acquire(block, groups)
    for group in groups:
      page = block.pages[group]
      assert page is not None
      self._set(row, group, n, page)

  def _seen(self, row: ServedRow, n: int) -> list[int]:
    """Groups in which a row reads the tree's page of block n."""
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
    """Allocate the pages of a row that comes back; whether there was room."""
    assert row.kept is not None and row.slot is not None
    slot = row.slot
    row.kept.into = [{} for _ in row.pages]
    try:
      for number in range(shared, -(-row.computed // self.tree.page)):
        for group, row_pages in enumerate(row.pages):
          if number >= row.first[group]:
            row_pages[number] = self.tree.allocate(group, number, slot)
            row.kept.into[group][number] = row_pages[number]
            self._set(row, group, number, row_pages[number])
    except OutOfPages:
      self._leave(row)
      row.computed = 0
      return False
    return True

  def _load(
    self, row: ServedRow, root: PrefixBlock, stored: StoredPrefix
  ) -> bool:
    """Allocate pages for blocks from a store; whether there was room.

    The blocks count as computed: they are loaded before the next call.
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
      new_pages: list[int | None] = [None for _ in groups]
      try:
        for g in wanted:
          new_pages[g] = tree.allocate(g, n, row.slot)
      except OutOfPages:
        for g, at in enumerate(new_pages):
          if at is not None:
            tree.give_back(g, n, at)
        return False
      if n < len(row.blocks):
        for g in wanted:
          new_page = new_pages[g]
          assert new_page is not None
          tree.attach(row.blocks[n], g, new_page)
      else:
        last = row.blocks[-1] if row.blocks else root
        row.blocks.append(tree.extend(last, pieces[n]))
        tree.finish(row.blocks[-1], new_pages)
        row.loaded += page
      for g in wanted:
        at = new_pages[g]
        assert at is not None
        self._set(row, g, n, at)
        self.loads[g, n % tree.shards, at] = stored.payloads[n, g]
    return True

  def _load_apart(self, row: ServedRow, stored: StoredPrefix) -> bool:
    """Allocate private pages for part of a prefix; whether there was room."""
    # A row that comes back with its pages has these among them.
    for (n, group), payload in stored.payloads.items() if not row.kept else ():
      if not self._allocate(row, n, group):
        return False
      self.loads[group, n % self.tree.shards, row.pages[group][n]] = payload
    row.loaded = stored.count * self.tree.page
    return True

  def _sight(self, group: int, computed: int) -> int:
    """First block that the token at `computed` attends to."""
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
    """Draft of a row's next tokens; no row is preempted for its pages."""
    path = min(most, row.most - row.chosen - 1)
    if self.drafts is None or path < 1 or row.team:
      return RowDraft()
    start = row.computed + 1
    # A tree may have more tokens than its longest path.
    max_tokens = min(most, self.limits.blocks * self.tree.page - start)
    draft = self.drafts(row, path).first(max_tokens)
    for number, group in self._missing(row, start, len(draft.tokens)):
      if not self._allocate(row, number, group):
        return draft.first(max(0, number * self.tree.page - start))
    return draft

  def _make_room(
    self,
    row: ServedRow,
    start: int,
    count: int,
    preempted: list[ServedRow],
  ) -> bool:
    """Allocate pages for a row's tokens, if need be by preempting rows.

    Returns False if the row itself was preempted.
    """
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
    """Missing pages of a row for these tokens, as (block number, group)."""
    page = self.tree.page
    for number in range(start // page, -(-(start + count) // page)):
      if number < len(row.blocks) and row.blocks[number].ready:
        continue
      for group in range(len(self.tree.groups)):
        if number not in row.pages[group]:
          yield number, group

  def _allocate(self, row: ServedRow, number: int, group: int) -> bool:
    """Allocate a page for a row; whether one was free."""
    assert row.slot is not None
    try:
      page = self.tree.allocate(group, number, row.slot)
    except OutOfPages:
      return False
    row.pages[group][number] = page
    self._set(row, group, number, page)
    return True

  def _preempt(self, row: ServedRow, preempted: list[ServedRow]) -> None:
    """Preempt a row and its team: free their pages and let them wait."""
    for member in row.team or [row]:
      assert member.slot is not None
      member.kept = None
      keeps = member.computed and member not in self._begun and not member.team
      if keeps and self._keeps(member):
        tables = [table[member.slot].copy() for table in self.tables]
        member.kept = KeptPages(
          tables=tables, computed=member.computed, slot=member.slot
        )
      self._leave(member)
      member.preemptions += 1
      member.computed = 0
      preempted.append(member)
    self.add(row.team[0] if row.team else row)

  def _leave(self, row: ServedRow) -> None:
    """Free a running row's pages and its slot."""
    self._release(row)
    assert row.slot is not None
    self.tree.leave(row.slot)
    self.running[row.slot] = None
    row.slot = None

  def _release(self, row: ServedRow) -> None:
    """Free a running row's pages."""
    tree = self.tree
    for group, row_pages in enumerate(row.pages):
      for number, page in row_pages.items():
        tree.give_back(group, number, page)
    for n in range(len(row.blocks) - 1, -1, -1):
      tree.release(row.blocks[n], self._seen(row, n))
    assert row.slot is not None
    for table in self.tables:
      table[row.slot] = -1
    self.version += 1
    row.blocks, row.pages = [], [{} for _ in tree.groups]

  def _passed(self, row: ServedRow) -> None:
    """Give a row's full blocks to the tree."""
    tree, page = self.tree, self.tree.page
    full_blocks = row.computed // page
    # Pages shared by a team belong to none of its rows.
    alone = not row.team and row.apart is None
    if self.share_answers and self.reuse and row.share and alone:
      self._share_answer(row, full_blocks)
    for n in range(min(full_blocks, len(row.blocks))):
      block = row.blocks[n]
      if not block.ready:
        tree.finish(block, [row_pages.pop(n, None) for row_pages in row.pages])

  def _forget(self, row: ServedRow, group: int) -> None:
    """Frees a group's pages that later tokens do not attend to."""
    first = self._sight(group, row.computed)
    for n in range(row.first[group], first):
      if n in row.pages[group]:
        self.tree.give_back(group, n, row.pages[group].pop(n))
      elif n < len(row.blocks) and row.blocks[n].ready:
        self.tree.unsee(row.blocks[n], group)
      self._set(row, group, n, -1)
    row.first[group] = max(row.first[group], first)

  def _share_answer(self, row: ServedRow, whole: int) -> None:
    """Add blocks with answer tokens that the host knows to the tree."""
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

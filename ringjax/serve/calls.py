"""The two calls of an engine: their arguments, and what they compute.

Guarantees: a call has one shape whatever is to do, so that each of the two is
one program for good, that of prompts one for each part of the layers, and the
copies of forked rows another; what a row gets depends on no other row.
Cost: the host writes a few numbers for each row; what rows have in common is
found anew only when it has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ringjax.infer.finite import NOT_FINITE
from ringjax.infer.speculate.verifiers import right_path
from ringjax.kv.page_pool import PagePool, PooledRows
from ringjax.models.transformer import Transformer, forward, forward_layers
from ringjax.nn.adapted import adapter_rows
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops.ancestors import ancestor_matrix
from ringjax.ops.attention.pooled import SharedTiles
from ringjax.parallel.programs import bounded
from ringjax.serve.request import Request
from ringjax.serve.row_sampler import Choice, RowNumbers, choose
from ringjax.serve.scheduler import (
  DecodeTurn,
  PromptPiece,
  RowFork,
  Scheduler,
  ServedRow,
)
from ringjax.serve.shared_rows import shared_tiles
from ringjax.typing import ArrayLeaf


class RowBoard(NamedTuple):
  """What the device remembers of running rows, by slot.

  Fields:
    last: int32 [R], tokens that were chosen last.
    seen: bool [R, V], which tokens occurred.
    counts: int32 [R, V], how often in the answer.
  """

  last: Int[Array, " R"]
  seen: Bool[Array, "R V"]
  counts: Int[Array, "R V"]


class CallArrays(NamedTuple):
  """The arguments of a call of B rows of T tokens, made on the host.

  Fields:
    tokens: int32 [B, T], -1 for the one that was chosen last.
    pos: int32 [B, T].
    seg: int32 [B, T], 0 is padding.
    tables: for each group int32 [B, R, m], see `PagePool.call`.
    ends: int32 [B], tokens behind the call.
    slots: int32 [B]; out of range for padding.
    fresh: bool [B], rows that begin.
    last: int32 [B], which of the T is the row's last.
    chooses: bool [B], whether a token is chosen.
    how: settings of the rows.
    shared: for each group the tiles that rows share; None for prompts.
    adapter: int32 [B], which adapter each row has, 0 for none; or None.
    parents: int32 [B, T], of a call that checks trees the earlier token that
      each follows, -1 for the first; or None.
    prompts: int32 [B], tokens of each row's prompt, by which it rotates.
  """

  tokens: Int[ArrayLeaf, "B T"]
  pos: Int[ArrayLeaf, "B T"]
  seg: Int[ArrayLeaf, "B T"]
  tables: tuple[Any, ...]
  ends: Int[ArrayLeaf, " B"]
  slots: Int[ArrayLeaf, " B"]
  fresh: Bool[ArrayLeaf, " B"]
  last: Int[ArrayLeaf, " B"]
  chooses: Bool[ArrayLeaf, " B"]
  how: RowNumbers
  shared: tuple[SharedTiles, ...] | None = None
  adapter: Int[ArrayLeaf, " B"] | None = None
  parents: Int[ArrayLeaf, "B T"] | None = None
  prompts: Int[ArrayLeaf, " B"] | None = None


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(2, 4))
def compute_layers(
  part: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  call: CallArrays,
  x: Float[Array, "B T *D"] | None,
) -> tuple[jax.Array, PagePool]:
  """Computes what a part of the layers makes of a call for prompts.

  Args:
    part: of `models.layer_parts`, not the last one.
    attend: how tokens find their keys.
    pool: the pool.
    call: the same for all parts.
    x: what the part before returned; None for the first one.
  """
  held = pool.call(call.tables, call.ends, call.slots, call.fresh, call.shared)
  with adapter_rows(call.adapter):
    return forward_layers(
      part, attend, call.tokens, call.pos, call.seg, held, call.prompts, x
    )


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(2, 3))
def compute(
  model: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  board: RowBoard,
  call: CallArrays,
  allowed: Bool[Array, "B V"],
  x: Float[Array, "B T *D"] | None = None,
) -> tuple[Any, PagePool, RowBoard]:
  """Computes a call's tokens and chooses the next ones.

  `x` is what the layers before made, if the model is the last part of one.
  """
  rows = board.last.shape[0]
  inside = jnp.minimum(call.slots, rows - 1)
  before = board.last[inside][:, None]
  tokens = jnp.where(call.tokens < 0, before, call.tokens)
  last = call.last[:, None]
  logits, pool = _read(model, attend, pool, call, tokens, last, x)
  logits = logits[:, 0]
  choice = choose(
    logits,
    call.how,
    call.ends,
    board.seen[inside],
    board.counts[inside],
    allowed,
  )
  # A row without a token is over: the board keeps what it has of it.
  chooses = call.chooses & (choice.token != NOT_FINITE)
  into = jnp.where(chooses, call.slots, rows)
  board = RowBoard(
    board.last.at[into].set(choice.token, mode="drop"),
    board.seen.at[into, choice.token].set(True, mode="drop"),
    board.counts.at[into, choice.token].add(1, mode="drop"),
  )
  return attend.everywhere(choice), pool, attend.everywhere(board)


def _read(
  model: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  call: CallArrays,
  tokens: Int[Array, "B T"],
  rows: Int[Array, "B _"] | None,
  x: Float[Array, "B T *D"] | None = None,
) -> tuple[Float[Array, "B _ V"], PagePool]:
  """Logits behind some tokens of a call, or behind all, and the pool."""
  parents = call.parents
  held = pool.call(
    call.tables, call.ends, call.slots, call.fresh, call.shared, parents
  )
  with adapter_rows(call.adapter):
    logits, pool = forward(
      model,
      attend,
      tokens,
      call.pos,
      call.seg,
      held,
      rows,
      call.prompts,
      parents,
      x,
    )
  return attend.everywhere(logits), pool


class Checked(NamedTuple):
  """What a call that checks drafts chooses.

  Fields:
    choice: of B T rows, the T tokens of a row next to one another; of a tree
      those behind the right tokens first.
    count: int32 [B], how many of the T are the row's next tokens, of which
      the last one may be `finite.NOT_FINITE`.
  """

  choice: Choice
  count: Int[ArrayLeaf, " B"]


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(2, 3))
def check_drafts(
  model: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  board: RowBoard,
  call: CallArrays,
  allowed: Bool[Array, "B V"],
) -> tuple[Any, PagePool, RowBoard]:
  """Computes a call's tokens, of which those behind the first are drafts.

  Those that the row's own settings choose are right; of a tree they are a path,
  which is moved to where a chain's tokens are. What was written of the others
  is behind the row's end, where its next call writes.
  """
  rows, width = board.last.shape[0], call.tokens.shape[1]
  inside = jnp.minimum(call.slots, rows - 1)
  logits, pool = _read(model, attend, pool, call, call.tokens, None)
  batch, _, vocab = logits.shape
  drafted = jax.nn.one_hot(
    jnp.where(call.seg[:, 1:] > 0, call.tokens[:, 1:], -1),
    vocab,
    dtype=jnp.int32,
  )
  if call.parents is None:
    before = jnp.pad(jnp.cumsum(drafted, 1), ((0, 0), (1, 0), (0, 0)))
  else:
    known = ancestor_matrix(call.parents)[:, :, 1:].astype(jnp.float32)
    before = jnp.einsum("bij,bjv->biv", known, drafted.astype(jnp.float32))
    before = before.astype(jnp.int32)
  counts = board.counts[inside][:, None] + before
  seen = board.seen[inside][:, None] | (before > 0)
  flat = lambda x: x.reshape(batch * width, *x.shape[2:])
  each = np.repeat(np.arange(batch), width)
  choice = choose(
    flat(logits),
    call.how.of(each),
    flat(call.pos + 1),
    flat(seen),
    flat(counts),
    allowed[each],
  )
  tokens = choice.token.reshape(batch, width)
  if call.parents is None:
    right = (tokens[:, :-1] == call.tokens[:, 1:]) & (call.seg[:, 1:] > 0)
    count = 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), 1), 1)
    last = count[:, None] - 1
  else:
    real = call.seg > 0
    kept, last = right_path(call.tokens, call.parents, real, tokens)
    count = jnp.sum(kept, 1, dtype=jnp.int32)
    # Nodes of the path by their depth, behind them the others.
    order = jnp.argsort(~kept, axis=1, stable=True).astype(jnp.int32)
    choice = jax.tree.map(lambda x: flat(_taken(x, order)), choice)
    start = call.ends - jnp.sum(real, 1, dtype=jnp.int32)
    number = jnp.arange(width, dtype=jnp.int32)[None]
    moves = (number < count[:, None]) & (order != number)
    target = jnp.where(moves, start[:, None] + number, -1)
    pool = pool.moved(call.tables, start[:, None] + order, target)
  token = jnp.take_along_axis(tokens, last, 1)[:, 0]
  take = lambda x: jnp.take_along_axis(x, last[..., None], 1)[:, 0]
  new = jax.nn.one_hot(token, vocab, dtype=jnp.int32)
  chooses = call.chooses & (token != NOT_FINITE)
  into = jnp.where(chooses, call.slots, rows)
  board = RowBoard(
    board.last.at[into].set(token, mode="drop"),
    board.seen.at[into].set(take(seen) | (new > 0), mode="drop"),
    board.counts.at[into].set(take(counts) + new, mode="drop"),
  )
  found = attend.everywhere(Checked(choice, count))
  return found, pool, attend.everywhere(board)


def _taken(x: Any, order: Int[Array, "B T"]) -> jax.Array:
  """What [B T, ...] has for each token, in this order: [B, T, ...]."""
  each = x.reshape(*order.shape, *x.shape[1:])
  wide = order.reshape(*order.shape, *(1,) * (each.ndim - 2))
  return jnp.take_along_axis(each, wide, 1)


@bounded
@functools.partial(jax.jit, donate_argnums=0)
def marked(
  board: RowBoard,
  slot: Int[Array, ""],
  seen: Bool[Array, " V"],
  counts: Int[Array, " V"],
) -> RowBoard:
  """With what a row has read and said."""
  return board._replace(
    seen=board.seen.at[slot].set(seen),
    counts=board.counts.at[slot].set(counts),
  )


@bounded
@functools.partial(jax.jit, donate_argnums=0)
def _forked(
  pool: PagePool,
  pages: tuple[tuple[Any, Any], ...],
  source: Int[Array, " R"],
  target: Int[Array, " R"],
) -> PagePool:
  """The pool with pages, and states of rows, copied; none is in both."""
  for group, (old, new) in enumerate(pages):
    pool = pool.write_pages(group, new, pool.read_pages(group, old))
  return pool.copy_states(source, target)


def forked(pool: PagePool, forks: tuple[RowFork, ...], rows: int) -> PagePool:
  """The pool where rows have what they do not share with those that they are
  copies of.

  Args:
    pool: the pool.
    forks: at most one of each row.
    rows: slots.
  """
  source, target = np.zeros(rows, np.int32), np.full(rows, rows, np.int32)
  shape = pool.shards, rows
  pages = [
    (np.zeros(shape, np.int32), np.full(shape, group.pages, np.int32))
    for group in pool.groups
  ]
  for n, fork in enumerate(forks):
    assert fork.row.slot is not None
    source[n], target[n] = fork.source, fork.row.slot
    for at, pair in zip(pages, fork.pages, strict=False):
      for array, page in zip(at, pair, strict=True):
        array[fork.number % pool.shards, n] = page
  return _forked(pool, tuple(pages), source, target)


class CallBuilder:
  """Makes the arguments of calls of what a scheduler plans.

  Attributes:
    saved: keys that the last call for answers reads less often than its rows
      look at them.
    plans: how often it was found out what rows have in common.
  """

  def __init__(
    self,
    scheduler: Scheduler,
    vocab: int,
    *,
    tile: int,
    together: bool,
    adapters: dict[str, int],
    groups: int,
    drafted: int = 0,
    trees: bool = False,
    place: Callable[[np.ndarray, int], np.ndarray] | None = None,
  ):
    """For no rows yet.

    Args:
      scheduler: of the rows.
      vocab: V.
      tile: slots that are read at once.
      together: whether rows read together what they have in common.
      adapters: numbers of adapters, by name.
      groups: of layers that have pages.
      drafted: tokens behind that of a row which a call for answers checks.
      trees: whether these form trees.
      place: where pages of a slot are, if not where the tables say.
    """
    self._place = place
    self._scheduler, self._tile, self._together = scheduler, tile, together
    self._adapters, self._vocab, self._drafted = adapters, vocab, drafted
    self._trees = trees
    self._tables = scheduler.tables[:groups]
    # The last one is that of padding.
    self._how = RowNumbers.empty(scheduler.limits.rows + 1, vocab)
    self._shared: tuple[Any, Any] = (None, None)
    self.saved = self.plans = 0

  def begin(self, row: ServedRow, request: Request, draw: int) -> None:
    """Notes the settings of a row that has a slot now."""
    assert row.slot is not None
    search = request.beams is not None
    ranked = search or request.best_of is not None
    wanted = ranked or request.logprobs is not None
    self._how.put(row.slot, request.sampling, draw, wanted, search, self._vocab)

  @property
  def settings(self) -> RowNumbers:
    """Those of all rows, by slot."""
    return self._how.of(np.arange(self._scheduler.limits.rows))

  def held(self, pool: PagePool) -> PooledRows:
    """What rows that decode have in their pages, by slot.

    Call it where all pages are in their places.
    """
    call = self._blank(self._scheduler.limits.rows, 1)
    for slot, row in enumerate(self._scheduler.running):
      if row is not None and not row.reading:
        self._row(call, slot, row, slot, row.computed)
    return pool.rows(call.tables, call.ends)

  def turns(
    self, turns: tuple[DecodeTurn, ...], checks: bool = True
  ) -> CallArrays:
    """A call for answers: each row stands at its slot.

    Args:
      turns: what rows compute.
      checks: whether it has room for drafts.
    """
    checks = checks and self._drafted > 0
    width = 1 + self._drafted * checks
    call = self._blank(self._scheduler.limits.rows, width)
    parents: Any = None
    if self._trees and checks:
      parents = np.zeros_like(call.tokens)
      parents[:, 0] = -1
    for turn in turns:
      slot, count = turn.slot, turn.end - turn.at
      call.tokens[slot, :count] = turn.row.token(turn.at), *turn.draft.tokens
      call.pos[slot] = turn.at + np.arange(width)
      if parents is not None:
        parents[slot, 1:count] = 1 + np.asarray(turn.draft.above, np.int32)
        call.pos[slot, 1:count] = turn.at + np.asarray(turn.draft.depths)
      call.seg[slot, :count] = 1
      call.chooses[slot] = turn.chooses
      self._row(call, slot, turn.row, slot, turn.end)
    return call._replace(
      how=self._how.of(call.slots),
      shared=self._common(turns),
      parents=parents,
    )

  def pieces(self, pieces: tuple[PromptPiece, ...]) -> CallArrays:
    """A call for pieces of prompts, one after another."""
    limits = self._scheduler.limits
    call = self._blank(limits.pieces, limits.piece)
    for n, piece in enumerate(pieces):
      row, end = piece.row, piece.start + piece.count
      assert row.slot is not None
      call.tokens[n, : piece.count] = row.prompt[piece.start : end]
      call.pos[n] = piece.start + np.arange(limits.piece)
      call.seg[n, : piece.count] = 1
      call.fresh[n] = piece.start == 0
      call.last[n], call.chooses[n] = piece.count - 1, piece.chooses
      self._row(call, n, row, row.slot, end)
    return call._replace(how=self._how.of(call.slots))

  def _row(
    self, call: CallArrays, n: int, row: ServedRow, slot: int, end: int
  ) -> None:
    """What any row of a call has, written into it."""
    call.ends[n], call.slots[n] = end, slot
    if call.prompts is not None:
      call.prompts[n] = row.prompt.size
    if call.adapter is not None:
      call.adapter[n] = self._adapters[row.adapter]
    for mine, table in zip(call.tables, self._tables, strict=True):
      pages = table[slot]
      mine[n] = pages if self._place is None else self._place(pages, slot)

  def _blank(self, batch: int, tokens: int) -> CallArrays:
    """A call of padding."""
    zeros: Any = lambda *shape: np.zeros(shape, np.int32)
    no: Any = lambda: np.zeros(batch, bool)
    slots: Any = np.full(batch, self._scheduler.limits.rows, np.int32)
    return CallArrays(
      tokens=zeros(batch, tokens),
      pos=zeros(batch, tokens),
      seg=zeros(batch, tokens),
      tables=tuple(
        np.full((batch, *table.shape[1:]), -1, np.int32)
        for table in self._tables
      ),
      ends=zeros(batch),
      slots=slots,
      fresh=no(),
      last=zeros(batch),
      chooses=no(),
      how=self._how.of(slots),
      adapter=zeros(batch) if len(self._adapters) > 1 else None,
      prompts=zeros(batch),
    )

  def _common(self, turns: tuple[DecodeTurn, ...]) -> tuple[SharedTiles, ...]:
    """What the rows of a call have in common; made anew if it has changed."""
    scheduler, tile = self._scheduler, self._tile
    page, shards = scheduler.tree.page, scheduler.tree.shards
    ready = np.zeros(scheduler.limits.rows, np.int64)
    for turn in turns:
      ready[turn.slot] = turn.at if self._together else 0
    key = scheduler.version, (ready // tile).tobytes()
    if self._shared[0] != key:
      many = scheduler.limits.blocks * page // tile // shards
      most = max(1, many * max(1, ready.size // 2))
      made = tuple(
        shared_tiles(table, ready, page, tile, most) for table in self._tables
      )
      self.plans += 1
      self.saved = 0
      if made:
        self.saved = int(made[0].done.sum() - made[0].count.sum()) * tile
      self._shared = key, jax.tree.map(jnp.asarray, made)
    return self._shared[1]

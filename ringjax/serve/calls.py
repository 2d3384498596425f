"""The two calls of an engine: their arguments, and what they compute.

Guarantees: a call has the same shape for any work, so that `compute_step`,
which is both, is compiled once, or each of the two (that of prompts once for
each part of the layers), and so are the copies of forked rows; the result of a
row depends on no other row.
Cost: the host writes a few numbers for each row; tiles that rows share are
recomputed only when they have changed. A call for prompts that is cut into
tiles takes the time of the tiles that it holds, another the time of its room.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.infer.finite import NOT_FINITE
from ringjax.infer.speculate.verifiers import right_path
from ringjax.kv.storage.call_tiles import CallTiles, tiles_of
from ringjax.kv.storage.page_pool import PagePool
from ringjax.kv.storage.pooled_cache import (
  PooledCache,
  PooledRows,
)
from ringjax.models.transformer import (
  JointCall,
  Transformer,
  forward,
  forward_calls,
  forward_layers,
)
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.weights.adapter_rows import adapter_rows
from ringjax.ops.ancestors import ancestor_matrix
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.pooled import SharedTiles
from ringjax.parallel.programs import bounded
from ringjax.serve.prefix.shared_rows import shared_tiles
from ringjax.serve.request import Request
from ringjax.serve.row_sampler import Choice, RowNumbers, choose
from ringjax.serve.scheduler import (
  DecodeTurn,
  PromptPiece,
  RowFork,
  Scheduler,
  ServedRow,
)
from ringjax.typing import ArrayLeaf, Index


class RowBoard(NamedTuple):
  """Device state of running rows, by slot.

  Fields:
    last: Tokens that were chosen last, int32 [R].
    seen: Whether a token occurred in prompt or answer, bool [R, V].
    counts: Number of times that it occurred in the answer, int32 [R, V].
  """

  last: Int[Array, " R"]
  seen: Bool[Array, "R V"]
  counts: Int[Array, "R V"]


class CallArrays(NamedTuple):
  """Arguments of a call of B rows of T tokens, made on the host.

  Fields:
    tokens: Token ids, int32 [B, T]; -1 stands for the one that was chosen last.
    pos: Positions, int32 [B, T].
    seg: Segments, int32 [B, T]; 0 is padding.
    tables: Page tables, int32 [B, R, m] for each group, see `PagePool.call`.
    ends: Number of tokens of each row after the call, int32 [B].
    slots: Slots of the rows, int32 [B]; out of range for padding.
    fresh: Whether a row begins, bool [B].
    last: Index of the row's last token among the T, int32 [B].
    chooses: Whether a token is chosen, bool [B].
    sampling: Sampling settings of the rows.
    shared: Tiles that rows share, for each group; None for prompts.
    adapter: Adapter number of each row, int32 [B], 0 for none; or None.
    parents: Index of the earlier token that each follows, -1 for the first,
      int32 [B, T], in a call that checks trees; else None.
    prompts: Number of tokens of each row's prompt, int32 [B], on which
      rotations may depend.
    tiles: Tiles of the tokens, which pass each layer one by one; (): all
      tokens pass together.
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
  sampling: RowNumbers
  shared: tuple[SharedTiles, ...] | None = None
  adapter: Int[ArrayLeaf, " B"] | None = None
  parents: Int[ArrayLeaf, "B T"] | None = None
  prompts: Int[ArrayLeaf, " B"] | None = None
  tiles: tuple[CallTiles, ...] = ()


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(2, 4))
def compute_layers(
  part: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  call: CallArrays,
  x: Float[Array, "B T *D"] | None,
) -> tuple[Float[Array, "_ _ ..."], PagePool]:
  """Computes a part of the layers in a call for prompts.

  Args:
    part: Part of the model from `models.partition.layer_parts`, but the last.
    attend: Attention over cached keys.
    pool: Pool of pages, donated.
    call: Arguments of the call, the same for all parts.
    x: Result of the previous part; None for the first one.
  """
  rows = _pooled(pool, call)
  with adapter_rows(call.adapter):
    return forward_layers(
      part, attend, call.tokens, call.pos, call.seg, rows, call.prompts, x
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

  `x` is the result of the layers before, if the model is the last part of one.
  """
  # All devices have the call: the compiler would shard its rows as those of
  # the model, then the board's, [R, V] numbers, and gather the board.
  call = attend.everywhere(call)
  tokens, last = _with_last(board, call), call.last[:, None]
  logits, pool = _read(model, attend, pool, call, tokens, last, x)
  choice = _chosen(attend, board, call, logits[:, 0], allowed)
  board = _with_choice(board, call, choice)
  return attend.everywhere(choice), pool, attend.everywhere(board)


@bounded
@functools.partial(jax.jit, static_argnums=(1, 6), donate_argnums=(2, 3))
def compute_step(
  model: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  board: RowBoard,
  calls: tuple[CallArrays, CallArrays],
  allowed: tuple[Bool[Array, "R V"], Bool[Array, "B V"]],
  row_tile: int = 0,
) -> tuple[tuple[Any, Any], PagePool, RowBoard]:
  """Computes a step's call for answers and its call for prompts.

  The weights of a layer are read once for both: it computes the answers, then
  the prompts' tiles, or with `row_tile` both together. A call without tokens
  costs next to nothing. The head runs only for a call in which a token is
  chosen; with `row_tile` it runs once for both calls. A call for answers of
  several tokens a row checks drafts, see `check_drafts`, with `row_tile` alone.

  Args:
    model: The whole model.
    attend: Attention over cached keys.
    pool: Pool of pages, donated.
    board: State of the rows, donated.
    calls: Call for answers, of a token of each row, and call for prompts, which
      has tiles if there is no `row_tile`.
    allowed: Allowed next tokens of the rows of each call.
    row_tile: Number of rows of a tile, see `tiling.row_tile`; 0: none.
  """
  # As in `compute`.
  calls = attend.everywhere(calls)
  answers, prompts = calls
  caches = _pooled(pool, answers), _pooled(pool, prompts)
  checks = answers.tokens.shape[1] > 1
  if not row_tile:
    assert not checks
    present = jnp.any(answers.seg > 0).astype(jnp.int32)
    caches = (
      dataclasses.replace(caches[0], present=present),
      caches[1].borrowing(),
    )
  model_calls = [
    JointCall(
      _with_last(board, call),
      call.pos,
      call.seg,
      cache,
      None if checks and call is answers else call.last,
      call.prompts,
      call.adapter,
      call.parents,
    )
    for call, cache in zip(calls, caches, strict=True)
  ]
  outputs, pool = forward_calls(model, attend, model_calls, row_tile)
  choices = []
  if row_tile:
    logits = _logits_of_calls(model, attend, calls, outputs)
    if checks:
      choice, pool, board = _checked(
        attend, pool, board, answers, logits[0], allowed[0]
      )
    else:
      choice = _chosen_if_any(attend, board, answers, logits[0], allowed[0], 0)
      board = _with_choice(board, answers, choice)
    next_tokens = _chosen_if_any(
      attend, board, prompts, logits[1], allowed[1], 1
    )
    board = _with_choice(board, prompts, next_tokens)
    results = attend.everywhere((choice, next_tokens))
    return results, pool, attend.everywhere(board)
  for call, x, mask in zip(calls, outputs, allowed, strict=True):

    def choice_of(
      call: CallArrays = call,
      x: jax.Array = x,
      mask: jax.Array = mask,
      board: RowBoard = board,
    ) -> Choice:
      with adapter_rows(call.adapter):
        h = attend.head(model.head_input, x[:, None])
        logits = attend.over_vocab(attend.head(model.logits, h))
      logits = attend.everywhere(logits)[:, 0]
      return _chosen(attend, board, call, logits, mask)

    nothing = jax.tree.map(
      lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(choice_of)
    )
    choice = lax.cond(
      jnp.any(call.chooses), choice_of, lambda nothing=nothing: nothing
    )
    board = _with_choice(board, call, choice)
    choices.append(attend.everywhere(choice))
  return (choices[0], choices[1]), pool, attend.everywhere(board)


def _logits_of_calls(
  model: Transformer,
  attend: CachedAttention,
  calls: Sequence[CallArrays],
  outputs: Sequence[Float[Array, "_ ..."]],
) -> list[Float[Array, "_ _ V"]]:
  """Logits [B, T, V] after the layers' outputs; the head runs once."""
  outputs = [x.reshape(x.shape[0], -1, x.shape[-1]) for x in outputs]
  rows = [x.reshape(-1, x.shape[-1]) for x in outputs]
  adapters = [
    jnp.repeat(jnp.asarray(call.adapter), x.shape[1])
    for call, x in zip(calls, outputs, strict=True)
    if call.adapter is not None
  ]
  with adapter_rows(jnp.concatenate(adapters) if adapters else None):
    x = model.head_input(jnp.concatenate(rows)[:, None])
    logits = attend.everywhere(attend.over_vocab(model.logits(x)))[:, 0]
  first = outputs[0].shape[0] * outputs[0].shape[1]
  return [
    part.reshape(*x.shape[:2], -1)
    for part, x in zip(jnp.split(logits, [first]), outputs, strict=True)
  ]


def _with_last(board: RowBoard, call: CallArrays) -> Int[Array, "B T"]:
  """Token ids of a call, of which -1 stands for the one chosen last."""
  inside = jnp.minimum(call.slots, board.last.shape[0] - 1)
  last_tokens = board.last[inside][:, None]
  return jnp.where(call.tokens < 0, last_tokens, call.tokens)


def _chosen(
  attend: CachedAttention,
  board: RowBoard,
  call: CallArrays,
  logits: Float[Array, "B V"],
  allowed: Bool[Array, "B V"],
) -> Choice:
  """Next token of each row of a call."""
  inside = jnp.minimum(call.slots, board.last.shape[0] - 1)
  return choose(
    logits,
    call.sampling,
    call.ends,
    board.seen[inside],
    board.counts[inside],
    allowed,
    _log_softmax(attend),
  )


def _log_softmax(attend: CachedAttention) -> Callable[[Array], Array]:
  """Function of logits [B, V] that gives the log-probabilities of a call."""
  return lambda x: attend.head(jax.nn.log_softmax, x[:, None])[:, 0]


def _chosen_if_any(
  attend: CachedAttention,
  board: RowBoard,
  call: CallArrays,
  logits: Float[Array, "B 1 V"],
  allowed: Bool[Array, "B V"],
  number: int,
) -> Choice:
  """`_chosen` of the call with this number if a row chooses, else zeros."""
  arguments = board, call, logits[:, 0], allowed

  def step(n: Index, _: Choice) -> Choice:
    # Otherwise the compiler would choose before the loop.
    in_loop, _ = lax.optimization_barrier((arguments, n))
    return _chosen(attend, *in_loop)

  nothing = jax.tree.map(
    lambda like: jnp.zeros(like.shape, like.dtype),
    jax.eval_shape(functools.partial(_chosen, attend), *arguments),
  )
  chooses = jnp.any(call.chooses).astype(jnp.int32)
  with jax.named_scope(f"joint_call_{number}"):
    return loop(chooses, step, nothing)


def _with_choice(board: RowBoard, call: CallArrays, choice: Choice) -> RowBoard:
  """Board with the tokens of the rows that choose one."""
  # A row whose logits are not finite ends, so its state is not updated.
  chooses = call.chooses & (choice.token != NOT_FINITE)
  into = jnp.where(chooses, call.slots, board.last.shape[0])
  return RowBoard(
    board.last.at[into].set(choice.token, mode="drop"),
    board.seen.at[into, choice.token].set(True, mode="drop"),
    board.counts.at[into, choice.token].add(1, mode="drop"),
  )


def _pooled(pool: PagePool, call: CallArrays) -> PooledCache:
  """The pool as a call's rows see it."""
  return pool.call(
    call.tables,
    call.ends,
    call.slots,
    call.fresh,
    call.shared,
    call.parents,
    call.tiles,
  )


def _read(
  model: Transformer,
  attend: CachedAttention,
  pool: PagePool,
  call: CallArrays,
  tokens: Int[Array, "B T"],
  rows: Int[Array, "B _"] | None,
  x: Float[Array, "B T *D"] | None = None,
) -> tuple[Float[Array, "B _ V"], PagePool]:
  """Logits after the tokens `rows` of a call, or after all, and the pool."""
  with adapter_rows(call.adapter):
    logits, pool = forward(
      model,
      attend,
      tokens,
      call.pos,
      call.seg,
      _pooled(pool, call),
      rows,
      call.prompts,
      call.parents,
      x,
    )
  return attend.everywhere(logits), pool


class Checked(NamedTuple):
  """Choices of a call that checks drafts.

  Fields:
    choice: Choices of B T rows, the T tokens of a row next to one another; for
      a tree those after the accepted tokens come first.
    count: Number of the T that are the row's next tokens, int32 [B]; the last
      of these may be `finite.NOT_FINITE`.
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
  """Computes a call's tokens, of which those after the first are drafts.

  Drafts that equal the row's own choices are accepted; in a tree they form a
  path, whose keys are moved to the places of a chain. Keys of the others are
  after the row's end, where its next call overwrites them.
  """
  # As in `compute`.
  call = attend.everywhere(call)
  logits, pool = _read(model, attend, pool, call, call.tokens, None)
  checked, pool, board = _checked(attend, pool, board, call, logits, allowed)
  return attend.everywhere(checked), pool, attend.everywhere(board)


def _checked(
  attend: CachedAttention,
  pool: PagePool,
  board: RowBoard,
  call: CallArrays,
  logits: Float[Array, "B T V"],
  allowed: Bool[Array, "B V"],
) -> tuple[Checked, PagePool, RowBoard]:
  """Choices of a call that checks drafts, by the logits of its tokens."""
  rows, width = board.last.shape[0], call.tokens.shape[1]
  inside = jnp.minimum(call.slots, rows - 1)
  batch, _, vocab = logits.shape
  drafted = jax.nn.one_hot(
    jnp.where(call.seg[:, 1:] > 0, call.tokens[:, 1:], -1),
    vocab,
    dtype=jnp.int32,
  )
  if call.parents is None:
    earlier = jnp.pad(jnp.cumsum(drafted, 1), ((0, 0), (1, 0), (0, 0)))
  else:
    is_ancestor = ancestor_matrix(call.parents)[:, :, 1:].astype(jnp.float32)
    earlier = jnp.einsum(
      "bij,bjv->biv", is_ancestor, drafted.astype(jnp.float32)
    )
    earlier = earlier.astype(jnp.int32)
  counts = board.counts[inside][:, None] + earlier
  seen = board.seen[inside][:, None] | (earlier > 0)
  flat = lambda x: x.reshape(batch * width, *x.shape[2:])
  row_of_token = np.repeat(np.arange(batch), width)
  choice = choose(
    flat(logits),
    call.sampling.of(row_of_token),
    flat(call.pos + 1),
    flat(seen),
    flat(counts),
    allowed[row_of_token],
    _log_softmax(attend),
  )
  tokens = choice.token.reshape(batch, width)
  if call.parents is None:
    right = (tokens[:, :-1] == call.tokens[:, 1:]) & (call.seg[:, 1:] > 0)
    count = 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), 1), 1)
    last = count[:, None] - 1
  else:
    real = call.seg > 0
    on_path, last = right_path(call.tokens, call.parents, real, tokens)
    count = jnp.sum(on_path, 1, dtype=jnp.int32)
    # Nodes of the path by depth, then the others.
    order = jnp.argsort(~on_path, axis=1, stable=True).astype(jnp.int32)
    choice = jax.tree.map(lambda x: flat(_taken(x, order)), choice)
    start = call.ends - jnp.sum(real, 1, dtype=jnp.int32)
    number = jnp.arange(width, dtype=jnp.int32)[None]
    moves = (number < count[:, None]) & (order != number)
    target = jnp.where(moves, start[:, None] + number, -1)
    pool = pool.moved(call.tables, start[:, None] + order, target)
  token = jnp.take_along_axis(tokens, last, 1)[:, 0]
  take = lambda x: x[jnp.arange(batch), last[:, 0]]
  new = jax.nn.one_hot(token, vocab, dtype=jnp.int32)
  chooses = call.chooses & (token != NOT_FINITE)
  into = jnp.where(chooses, call.slots, rows)
  board = RowBoard(
    board.last.at[into].set(token, mode="drop"),
    board.seen.at[into].set(take(seen) | (new > 0), mode="drop"),
    board.counts.at[into].set(take(counts) + new, mode="drop"),
  )
  return Checked(choice, count), pool, board


def _taken(x: Any, order: Int[Array, "B T"]) -> jax.Array:
  """Reorder the tokens of [B T, ...] in each row, as [B, T, ...]."""
  per_token = x.reshape(*order.shape, *x.shape[1:])
  return jax.vmap(lambda row, at: row[at])(per_token, order)


@bounded
@functools.partial(jax.jit, donate_argnums=0)
def marked(
  board: RowBoard,
  slot: Int[Array, ""],
  seen: Bool[Array, " V"],
  counts: Int[Array, " V"],
) -> RowBoard:
  """Board with a row's occurred tokens and their counts set."""
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
  """Pool with pages and states copied; no row is both source and target."""
  for group, (old, new) in enumerate(pages):
    pool = pool.write_pages(group, new, pool.read_pages(group, old))
  return pool.copy_states(source, target)


def forked(pool: PagePool, forks: tuple[RowFork, ...], rows: int) -> PagePool:
  """Pool with the partly filled pages and the states of forked rows copied.

  Args:
    pool: Pool of pages, donated.
    forks: Forks, at most one of each row.
    rows: Number of slots.
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
  """Builds the arguments of the calls that a scheduler plans.

  Attributes:
    saved: Number of key reads that the last call for answers saves by shared
      tiles.
    plans: Number of times that shared tiles were computed.
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
    prompt_tiles: tuple[int, ...] = (),
  ):
    """Make a builder without rows.

    Args:
      scheduler: Scheduler of the rows.
      vocab: Vocabulary size V.
      tile: Number of token slots that are read at once.
      together: Whether rows read tiles that they share together.
      adapters: Numbers of adapters, by name.
      groups: Number of groups of layers that have pages.
      drafted: Maximum number of drafted tokens of a row that a call for answers
        checks.
      trees: Whether these form trees.
      place: Translates the pages of a slot; None where tables are used as they
        are.
      prompt_tiles: Sizes of the tiles of prompts, see `tiling.prompt_tiles`;
        (): all tokens of a call pass a layer together.
    """
    self._place, self._prompt_tiles = place, prompt_tiles
    self._scheduler, self._tile, self._together = scheduler, tile, together
    self._adapters, self._vocab, self._drafted = adapters, vocab, drafted
    self._trees = trees
    self._tables = scheduler.tables[:groups]
    # The last entry is for padding.
    self._how = RowNumbers.empty(scheduler.limits.rows + 1, vocab)
    self._shared: tuple[Any, Any] = (None, None)
    self.saved = self.plans = 0

  def begin(self, row: ServedRow, request: Request, draw: int) -> None:
    """Stores the settings of a row that got a slot."""
    assert row.slot is not None
    search = request.beams is not None
    ranked = search or request.best_of is not None
    wanted = ranked or request.logprobs is not None
    self._how.put(
      row.slot,
      request.sampling,
      draw,
      wanted,
      search,
      self._vocab,
      request.tempered,
    )

  @property
  def settings(self) -> RowNumbers:
    """Sampling settings of all rows, by slot."""
    return self._how.of(np.arange(self._scheduler.limits.rows))

  def row_pages(self, pool: PagePool) -> PooledRows:
    """Pages of the rows that decode, by slot.

    Call it once all pending moves of pages are done.
    """
    call = self._blank(self._scheduler.limits.rows, 1)
    for slot, row in enumerate(self._scheduler.running):
      if row is not None and not row.reading:
        self._row(call, slot, row, slot, row.computed)
    return pool.rows(call.tables, call.ends)

  def answer_call(
    self, turns: tuple[DecodeTurn, ...], checks: bool = True
  ) -> CallArrays:
    """Build a call for answers, in which the index of a row is its slot.

    Args:
      turns: Next tokens of the rows that decode.
      checks: Whether the call has room for drafts.
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
      sampling=self._how.of(call.slots),
      shared=self._common(turns),
      parents=parents,
    )

  def pieces(self, pieces: tuple[PromptPiece, ...]) -> CallArrays:
    """Build a call for chunks of prompts."""
    limits = self._scheduler.limits
    sizes, width = self._prompt_tiles, limits.piece
    # A tile may begin with the last token of a row.
    width += max(sizes, default=0)
    call = self._blank(limits.pieces, width)
    for n, piece in enumerate(pieces):
      row, end = piece.row, piece.start + piece.count
      assert row.slot is not None
      call.tokens[n, : piece.count] = row.prompt[piece.start : end]
      call.pos[n] = piece.start + np.arange(width)
      call.seg[n, : piece.count] = 1
      call.fresh[n] = piece.start == 0
      call.last[n], call.chooses[n] = piece.count - 1, piece.chooses
      self._row(call, n, row, row.slot, end)
    if sizes:
      positions, lengths = call.pos[:, 0], np.sum(call.seg, 1)
      tiles = tiles_of(
        positions.tolist(), lengths.tolist(), limits.piece, sizes
      )
      call = call._replace(tiles=tiles)
    return call._replace(sampling=self._how.of(call.slots))

  def _row(
    self, call: CallArrays, n: int, row: ServedRow, slot: int, end: int
  ) -> None:
    """Write the entries that every row of a call has."""
    call.ends[n], call.slots[n] = end, slot
    if call.prompts is not None:
      call.prompts[n] = row.prompt.size
    if call.adapter is not None:
      call.adapter[n] = self._adapters[row.adapter]
    for call_table, table in zip(call.tables, self._tables, strict=True):
      pages = table[slot]
      call_table[n] = pages if self._place is None else self._place(pages, slot)

  def _blank(self, batch: int, tokens: int) -> CallArrays:
    """Build a call of padding."""
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
      sampling=self._how.of(slots),
      adapter=zeros(batch) if len(self._adapters) > 1 else None,
      prompts=zeros(batch),
    )

  def _common(self, turns: tuple[DecodeTurn, ...]) -> tuple[SharedTiles, ...]:
    """Tiles that the rows of a call share, recomputed if they have changed."""
    scheduler, tile = self._scheduler, self._tile
    page, shards = scheduler.tree.page, scheduler.tree.shards
    ready = np.zeros(scheduler.limits.rows, np.int64)
    for turn in turns:
      ready[turn.slot] = turn.at if self._together else 0
    key = scheduler.version, (ready // tile).tobytes()
    if self._shared[0] != key:
      tiles_per_row = scheduler.limits.blocks * page // tile // shards
      max_tiles = max(1, tiles_per_row * max(1, ready.size // 2))
      tiles = tuple(
        shared_tiles(table, ready, page, tile, max_tiles)
        for table in self._tables
      )
      self.plans += 1
      self.saved = 0
      if tiles:
        self.saved = (
          int(tiles[0].shared_counts.sum() - tiles[0].count.sum()) * tile
        )
      self._shared = key, jax.tree.map(jnp.asarray, tiles)
    return self._shared[1]

"""Distance of an index's scores from attention, per shard, and its gradient.

Guarantees: for a query the loss is KL(p || softmax(I)) over the keys that it
sees, or over those of them that it has chosen. p is the sum of the heads'
attention probabilities, divided by its own sum; I are the index's scores. The
gradient reaches the index's queries, weights and keys, and nothing else.
Cost: the products of attention's scores and of the index, forward and again
backward. Keys and index keys go around the ring once each time, with the index
keys' gradients backward. With sharded heads the sum over heads of each pair is
summed over their shards.
Memory: scores of one chunk of queries, and a few numbers of each query.

Ref: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equations 3 and 4.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.scores import Scores
from ringjax.ops.attention.sparse.block_selection import (
  Dimensions,
  ShardTokens,
)
from ringjax.ops.attention.sparse.gathered import (
  ChoosingQueries,
  ChosenColumns,
  ChosenPiece,
  GatherChosen,
  ShardKeys,
  scan_queries,
)
from ringjax.ops.attention.sparse.index_learning.index_training import (
  LearningSelection,
)
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import finite_max, wide_dtype
from ringjax.parallel import collectives
from ringjax.typing import Index

# Most scores of single heads that are in memory at once, with all keys.
_HEAD_SCORES = 1 << 24
# Most queries of a chunk that read chosen keys.
_CHUNK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTraining(LearningSelection):
  """Arrays of `index_loss`, which takes the way of a selection to the shards.

  Attributes:
    q: Queries of the index, [B, T, I, E].
    weights: Weights of the index's heads, [B, T, I].
    keys: Keys of the index, [B, S, E].
    lse: Log-sum-exp of attention's scores, [B, T, N].
    chosen: Blocks that each query has chosen, int32 [B, T, 1, n], or None for
      all keys that it sees.
    block: Number of keys of a block.
  """

  q: Float[Array, "B T I E"]
  weights: Float[Array, "B T I"]
  keys: Float[Array, "B S E"]
  lse: Float[Array, "B T N"]
  chosen: Int[Array, "B T 1 n"] | None
  block: int

  dimensions: ClassVar[Dimensions] = {
    "q": ("B", "T"),
    "weights": ("B", "T"),
    "keys": ("B", "S"),
    "lse": ("B", "T", "N"),
    "chosen": ("B", "T"),
  }

  @property
  def by_position(self) -> bool:
    return False

  @property
  def block_size(self) -> int:
    return self.block

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    del heads, kv_heads
    return 1

  def loss(
    self, tokens: ShardTokens, scores: Scores, head_axes: tuple[str, ...]
  ) -> Float[Array, "B T 1"]:
    """Per shard: the loss of each query; all heads choose together."""
    b, t, n, _ = tokens.q.shape
    kv_heads = tokens.k.shape[2]
    grouped = lambda x: x.reshape(b, t, kv_heads, n // kv_heads, *x.shape[3:])
    rows = lambda x: jnp.broadcast_to(x, (b, x.shape[1]))
    attention = _Attention(
      grouped(tokens.q),
      jnp.swapaxes(tokens.k, 1, 2),
      grouped(self.lse),
      Coords(*map(rows, tokens.q_at)),
      Coords(*map(rows, tokens.k_at)),
      tokens.number,
      self.chosen,
      tokens.mask,
    )
    attention = lax.stop_gradient(attention)
    index = _IndexArrays(self.q, self.weights, self.keys)
    axes = collectives.varying_axes(attention, index)
    axes |= {*collectives.names(tokens.axis), *head_axes}
    attention, index = collectives.vary((attention, index), axes)
    names = (*collectives.names(tokens.axis), *head_axes)
    call = _LossCall(
      GatherChosen(tokens.length, self.block, tokens.axis),
      scores,
      head_axes,
      collectives.sizes(names),
    )
    return _loss(call, index, attention)[..., None]


tree.register(
  IndexTraining, ("q", "weights", "keys", "lse", "chosen"), ("block",)
)


class _IndexArrays(NamedTuple):
  """Arrays that the loss trains.

  Fields:
    q: Queries of the index, [B, T, I, E].
    weights: Weights of the index's heads, [B, T, I].
    keys: Keys of the index, [B, S, E].
  """

  q: jax.Array
  weights: jax.Array
  keys: jax.Array


class _Attention(NamedTuple):
  """Attention that the loss compares the index with.

  Fields:
    q: Queries, [B, T, K, G, H].
    k: Keys, [B, K, S, H].
    lse: Log-sum-exp of attention's scores, [B, T, K, G].
    q_at: Coordinates of the queries, [B, T].
    k_at: Coordinates of the keys, [B, S].
    number: Index of each key in the whole sequence, int32 [S].
    chosen: Blocks that each query has chosen, int32 [B, T, 1, n], or None.
    mask: Pairs that are visible.
  """

  q: jax.Array
  k: jax.Array
  lse: jax.Array
  q_at: Coords
  k_at: Coords
  number: jax.Array
  chosen: jax.Array | None
  mask: Mask


class _Sums(NamedTuple):
  """Sums over keys for each query, [B, T].

  Fields:
    largest: Largest score of the index.
    total: Sum of exp(score - largest).
    mass: Sum of the heads' probabilities.
    product: Sum of probabilities times (their logarithm - score).
  """

  largest: jax.Array
  total: jax.Array
  mass: jax.Array
  product: jax.Array


class _Tile(NamedTuple):
  """Some keys of each query of a chunk.

  Fields:
    p: Probabilities summed over heads, [B, q, s].
    dots: Products of the index, [B, q, I, s].
    scores: Scores of the index, -inf for pairs that do not count, [B, q, s].
    index_keys: Keys of the index, [B, s, E] or [B, q, s, E].
    piece: Places of gathered keys, or None for all keys of a shard.
  """

  p: jax.Array
  dots: jax.Array
  scores: jax.Array
  index_keys: jax.Array
  piece: ChosenPiece | None

  @property
  def keys(self) -> str:
    """Letters of the index's keys."""
    return "bse" if self.piece is None else "bqse"


@dataclasses.dataclass(frozen=True)
class _LossCall:
  """Static part of a call.

  Attributes:
    gather: Algorithm that finds chosen keys on a shard.
    scores: Score function of attention.
    head_axes: Manual axes that shard the heads.
    sizes: Sizes of the manual axes, see `collectives.bound`.
  """

  gather: GatherChosen
  scores: Scores
  head_axes: tuple[str, ...]
  sizes: tuple[tuple[str, int], ...]

  def chunk(self, index: _IndexArrays, attention: _Attention) -> int:
    """Number of queries of a chunk."""
    b, _, kv_heads, groups, _ = attention.q.shape
    heads = max(kv_heads * groups, index.q.shape[2])
    if attention.chosen is None:
      return max(1, _HEAD_SCORES // (b * heads * attention.k.shape[2]))
    return _CHUNK

  def tile(
    self,
    rows: PyTree,
    k: Float[Array, "B ..."],
    index_keys: Float[Array, "B ..."],
    seen: Bool[Array, "B q s"],
    piece: ChosenPiece | None,
  ) -> _Tile:
    """Compute the pairs of some queries and keys."""
    q, lse, index_q, weights = rows
    letters = "bmsh" if piece is None else "bqmsh"
    s = product(f"bqmgh,{letters}->bqmgs", q, k) * self.scores.scale
    if self.scores.soft_cap is not None:
      s = self.scores.soft_cap * jnp.tanh(s / self.scores.soft_cap)
    p = jnp.exp(s - lse[..., None])
    p = jnp.sum(jnp.where(seen[:, :, None, None], p, 0), (2, 3))
    if self.head_axes:
      axes = collectives.varying_axes(p)
      p = collectives.vary(collectives.total(p, self.head_axes), axes)
    tile = _Tile(p, p, p, index_keys, piece)
    dots = product(
      f"bqie,{tile.keys}->bqis", index_q, index_keys.astype(index_q.dtype)
    )
    weights = weights.astype(dots.dtype)
    scores = product("bqis,bqi->bqs", jnp.maximum(dots, 0), weights)
    scores = jnp.where(seen, scores, -jnp.inf)
    return tile._replace(dots=dots, scores=scores)

  def fold(self, rows: PyTree, keys: PyTree, mask: Mask, f: Any, carry: Any):
    """Fold f(tile, carry) over the keys of a shard that a chunk's queries read.

    Args:
      rows: Queries, log-sum-exps, index queries and weights, coordinates, and
        chosen blocks or None, of a chunk.
      keys: Keys, index keys, coordinates and numbers of a shard.
      mask: Pairs that are visible.
      f: Function that folds one tile.
      carry: Initial carry.
    """
    *queries, q_at, chosen = rows
    k, index_keys, k_at, number = keys
    if chosen is None:
      expand = lambda at, axis: Coords(*(jnp.expand_dims(x, axis) for x in at))
      seen = visible(mask, expand(q_at, 2), expand(k_at, 1))
      seen = jnp.broadcast_to(seen, (*q_at.pos.shape, k.shape[2]))
      return f(self.tile(queries, k, index_keys, seen, None), carry)
    shard_keys = ShardKeys(k, None, k_at.pos, k_at.seg, number)
    # One list for all heads.
    choosing = ChoosingQueries(queries[0], chosen, *q_at)
    table = shard_keys.table(self.gather.length)
    columns = self.gather.columns(shard_keys, table, choosing, mask)

    def add(i: Index, carry: Any) -> Any:
      piece = self._piece(columns, i, shard_keys)
      present = piece.present[:, :, 0]
      row, column = piece.row[:, :, 0], piece.column[:, :, 0]
      chosen_keys = index_keys[row, jnp.minimum(column, columns.size - 1)]
      chosen_keys = jnp.where(present[..., None], chosen_keys, 0)
      return f(self.tile(queries, piece.k, chosen_keys, present, piece), carry)

    return lax.fori_loop(0, columns.pieces, add, carry)

  def _piece(
    self, columns: ChosenColumns, index: Index, keys: ShardKeys
  ) -> ChosenPiece:
    return ChosenPiece.of(columns, index, keys.take, keys.k.shape[1])


def _operands(
  index: _IndexArrays, attention: _Attention
) -> tuple[tuple, tuple]:
  """Arrays of queries, and those of keys, which travel."""
  rows = attention.q, attention.lse, index.q, index.weights
  keys = attention.k, index.keys, attention.k_at, attention.number
  return (*rows, attention.q_at, attention.chosen), keys


def _totals(
  call: _LossCall, index: _IndexArrays, attention: _Attention
) -> _Sums:
  rows, keys = _operands(index, attention)
  b, t = attention.q.shape[:2]
  dtype = wide_dtype(index.q.dtype)
  zeros = collectives.zeros((b, t), dtype, (index, attention))
  sums = _Sums(jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros)

  def add(tile: _Tile, sums: _Sums) -> _Sums:
    largest = jnp.maximum(sums.largest, jnp.max(tile.scores, -1))
    safe = finite_max(largest)
    terms = jnp.exp(tile.scores - safe[..., None])
    p = tile.p.astype(dtype)
    logarithm = jnp.log(jnp.where(p > 0, p, 1))
    finite = jnp.where(p > 0, tile.scores, 0)
    return _Sums(
      largest,
      sums.total * jnp.exp(sums.largest - safe) + jnp.sum(terms, -1),
      sums.mass + jnp.sum(p, -1),
      sums.product + jnp.sum(p * (logarithm - finite), -1),
    )

  def hop(keys: tuple, sums: _Sums) -> _Sums:
    fold = lambda _, chunk: (
      (),
      call.fold(chunk[0], keys, attention.mask, add, chunk[1]),
    )
    size = call.chunk(index, attention)
    return scan_queries(fold, (), (rows, sums), size)[1]

  sums = hop(keys, sums)
  axis = call.gather.axis
  if axis is None:
    return sums

  def step(_: Index, state: tuple) -> tuple:
    keys, sums = state
    keys = collectives.rotate(keys, axis, 1)
    return keys, hop(keys, sums)

  return lax.fori_loop(1, call.gather.shards, step, (keys, sums))[1]


def _finish(sums: _Sums) -> tuple[jax.Array, jax.Array]:
  """Loss and the log-sum-exp of the index's scores, [B, T]."""
  lse = finite_max(sums.largest) + jnp.log(
    jnp.where(sums.total > 0, sums.total, 1)
  )
  mass = jnp.where(sums.mass > 0, sums.mass, 1)
  loss = sums.product / mass - jnp.log(mass) + lse
  return jnp.where(sums.mass > 0, loss, 0), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
  call: _LossCall, index: _IndexArrays, attention: _Attention
) -> Float[Array, "B T"]:
  return _finish(_totals(call, index, attention))[0]


def _loss_fwd(
  call: _LossCall, index: _IndexArrays, attention: _Attention
) -> tuple[jax.Array, PyTree]:
  sums = _totals(call, index, attention)
  loss, lse = _finish(sums)
  return loss, (index, attention, lse, sums.mass)


def _loss_bwd(
  call: _LossCall, saved: PyTree, gradient: Float[Array, "B T"]
) -> tuple[_IndexArrays, None]:
  with collectives.bound(call.sizes):
    index, attention, lse, mass = saved
    return _gradients(call, index, attention, lse, mass, gradient), None


def _gradients(
  call: _LossCall,
  index: _IndexArrays,
  attention: _Attention,
  lse: Float[Array, "B T"],
  mass: Float[Array, "B T"],
  gradient: Float[Array, "B T"],
) -> _IndexArrays:
  rows, keys = _operands(index, attention)
  dtype = wide_dtype(index.q.dtype)
  zeros = lambda x: collectives.zeros(x.shape, dtype, (index, attention))
  share = jnp.where(mass > 0, gradient / jnp.where(mass > 0, mass, 1), 0)
  gradient = jnp.where(mass > 0, gradient, 0)

  def hop(keys: tuple, dkeys: jax.Array, drows: tuple) -> tuple:
    def fold(dkeys: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple]:
      rows, drows, lse, share, gradient = chunk
      index_q, weights = rows[2], rows[3].astype(dtype)

      def add(tile: _Tile, state: tuple) -> tuple:
        dkeys, dq, dweights = state
        terms = jnp.exp(tile.scores - lse[..., None])
        ds = gradient[..., None] * terms - share[..., None] * tile.p
        dweights += product("bqs,bqis->bqi", ds, jnp.maximum(tile.dots, 0))
        ddots = ds[:, :, None] * weights[..., None]
        ddots = jnp.where(tile.dots > 0, ddots, 0)
        low = ddots.astype(index_q.dtype)
        index_keys = tile.index_keys.astype(index_q.dtype)
        dq += product(f"bqis,{tile.keys}->bqie", low, index_keys)
        piece_gradient = product(f"bqis,bqie->{tile.keys}", low, index_q)
        if tile.piece is None:
          return dkeys + piece_gradient, dq, dweights
        at = tile.piece.row[:, :, 0], tile.piece.column[:, :, 0]
        return dkeys.at[at].add(piece_gradient, mode="drop"), dq, dweights

      state = (dkeys, *drows)
      dkeys, *drows = call.fold(rows, keys, attention.mask, add, state)
      return dkeys, tuple(drows)

    size = call.chunk(index, attention)
    chunks = rows, drows, lse, share, gradient
    return scan_queries(fold, dkeys, chunks, size)

  drows = zeros(index.q), zeros(index.weights)
  dkeys, drows = hop(keys, zeros(index.keys), drows)
  axis = call.gather.axis
  if axis is not None:

    def step(_: Index, state: tuple) -> tuple:
      keys, dkeys, drows = state
      keys, dkeys = collectives.rotate((keys, dkeys), axis, 1)
      return keys, *hop(keys, dkeys, drows)

    state = keys, dkeys, drows
    _, dkeys, drows = lax.fori_loop(1, call.gather.shards, step, state)
    # The gradients arrive at the shard of their keys.
    dkeys = collectives.rotate(dkeys, axis, 1)
  gradients = _IndexArrays(drows[0], drows[1], dkeys)
  return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, index)


_loss.defvjp(_loss_fwd, _loss_bwd)

"""Distance of an index's scores of blocks from attention, per shard.

Guarantees: for a query the loss is KL(p || softmax(I)) over the blocks that it
is offered, or over those of them that it has chosen. p(c) is the sum of the
attention probabilities of the keys of block c, over the heads that choose
together, divided by the sum over these blocks; I are the index's scores. Blocks
that a query reads in any case count in neither. The gradient reaches the index
alone.
Cost: the products of attention's scores and of the index, forward and again
backward. Keys go around the ring of shards, over chosen blocks once each time;
over all blocks once for each part of the queries whose masses fit into memory.
What the index makes of its keys is gathered once.
Memory: masses of the blocks of a part of the queries, scores of one chunk, and
the index's keys of the whole sequence.

Ref: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equations 3 and 4, for blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.scores import Scores
from ringjax.ops.attention.sparse.block_selection import (
  ScoredBlocks,
  ShardTokens,
)
from ringjax.ops.attention.sparse.gathered import (
  ChoosingQueries,
  ChosenPiece,
  GatherChosen,
  ShardKeys,
  scan_queries,
)
from ringjax.ops.attention.sparse.index_learning.index_training import (
  LearningSelection,
)
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives
from ringjax.typing import Index

# Most masses of blocks, and most scores, that are in memory at once.
_NUMBERS = 1 << 24
# Most queries of a chunk that read chosen keys.
_CHUNK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockIndexTraining(LearningSelection):
  """Arrays of `index_loss`, which takes the way of a selection to the shards.

  Attributes:
    index: Index that learns.
    lse: Log-sum-exp of attention's scores, [B, T, N].
    chosen: Blocks that each query has chosen, int32 [B, T, M, n], or None for
      all that it sees.
  """

  index: ScoredBlocks
  lse: Float[Array, "B T N"]
  chosen: Int[Array, "B T M n"] | None

  @property
  def block_size(self) -> int:
    return self.index.block_size

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    return self.index.choice_heads(heads, kv_heads)

  def map_arrays(
    self, f: Callable[[Any, tuple[str, ...]], Any]
  ) -> BlockIndexTraining:
    lists = "K?" if self.index.sums_heads else "1"
    arrays: dict[str, Any] = {
      "index": self.index.map_arrays(f),
      "lse": f(self.lse, ("B", "T", "N")),
    }
    if self.chosen is not None:
      arrays["chosen"] = f(self.chosen, ("B", "T", lists))
    return tree.with_leaves(self, **arrays)

  def loss(
    self, tokens: ShardTokens, scores: Scores, head_axes: tuple[str, ...]
  ) -> Float[Array, "B T M"]:
    """Per shard: the loss of each query, for each of the heads that choose."""
    b, t, n, _ = tokens.q.shape
    kv_heads = tokens.k.shape[2]
    lists = self.index.choice_heads(n, kv_heads)
    grouped = lambda x: x.reshape(b, t, kv_heads, n // kv_heads, *x.shape[3:])
    rows = lambda x: jnp.broadcast_to(x, (b, x.shape[1]))
    units = self.index.units(tokens)
    k_pos, k_seg = map(rows, tokens.k_at)
    k = jnp.swapaxes(tokens.k, 1, 2)
    keys = ShardKeys(k, None, k_pos, k_seg, tokens.number)
    q_pos, q_seg = map(rows, tokens.q_at)
    attention = _AttentionRows(
      grouped(tokens.q), grouped(self.lse), q_pos, q_seg, self.chosen
    )
    keys, attention = lax.stop_gradient((keys, attention))
    operands = keys, attention, units, self.index.queries
    axes = collectives.varying_axes(operands)
    axes |= {*collectives.names(tokens.axis), *head_axes}
    keys, attention, units, queries = collectives.vary(operands, axes)
    masses = _Masses(
      GatherChosen(tokens.length, self.block_size, tokens.axis),
      scores,
      # One choice is that of the heads of all shards.
      () if self.index.sums_heads else head_axes,
      lists,
      tokens.mask,
    )
    blocks = -(-tokens.length // self.block_size)
    length = blocks if self.chosen is None else self.chosen.shape[3]
    # Blocks that were chosen are gathered for each query.
    numbers = self.index.scores_per_query(length) * (
      1 if self.chosen is None else max(x.shape[-1] for x in queries)
    )

    def terms(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      queries, attention, masses = rows
      scores, offered = self.index.unit_scores(
        queries, attention.at, units, tokens.mask, attention.chosen
      )
      return (), _divergence(scores, offered, masses)

    def part(_: tuple, rows: tuple) -> tuple[tuple, jax.Array]:
      queries, attention = rows
      of_blocks = lax.stop_gradient(masses.of(attention, keys))
      inputs = queries, attention._replace(q=attention.seg), of_blocks
      size = max(1, _NUMBERS // (b * numbers))
      return scan_queries(jax.checkpoint(terms), (), inputs, size)

    size = t
    if self.chosen is None:
      size = max(1, _NUMBERS // (b * lists * blocks))
    # Otherwise the backward pass would keep the masses of all parts.
    part = jax.checkpoint(part)
    return scan_queries(part, (), (queries, attention), size)[1]


tree.register(BlockIndexTraining, ("index", "lse", "chosen"), ())


class _AttentionRows(NamedTuple):
  """Queries of attention.

  Fields:
    q: Queries, [B, T, K, G, H].
    lse: Log-sum-exp of attention's scores, [B, T, K, G].
    pos: Positions, int32 [B, T].
    seg: Documents, int32 [B, T].
    chosen: Blocks that each has chosen, int32 [B, T, M, n], or None.
  """

  q: jax.Array
  lse: jax.Array
  pos: jax.Array
  seg: jax.Array
  chosen: jax.Array | None

  @property
  def at(self) -> Coords:
    """Coordinates of the queries."""
    return Coords(self.pos, self.seg)


@dataclasses.dataclass(frozen=True)
class _Masses:
  """Sums of attention's probabilities over the keys of blocks.

  Attributes:
    gather: Algorithm that finds chosen keys on a shard.
    scores: Score function of attention.
    head_axes: Manual axes over whose heads probabilities are summed.
    lists: Number of heads that choose, M.
    mask: Pairs that are visible.
  """

  gather: GatherChosen
  scores: Scores
  head_axes: tuple[str, ...]
  lists: int
  mask: Mask

  def of(
    self, rows: _AttentionRows, keys: ShardKeys
  ) -> Float[Array, "B T M c"]:
    """Masses of all blocks, or of the chosen ones."""
    run = self._of_all if rows.chosen is None else self._of_chosen
    masses = run(rows, keys)
    if not self.head_axes:
      return masses
    axes = collectives.varying_axes(masses)
    return collectives.vary(collectives.total(masses, self.head_axes), axes)

  def _over_ring(
    self, hop: Callable[[ShardKeys, Array], Array], keys: ShardKeys, sums: Array
  ) -> Array:
    """Fold the keys of all shards into sums."""
    sums = hop(keys, sums)
    axis = self.gather.axis
    if axis is None:
      return sums

    def step(_: Index, state: tuple) -> tuple:
      keys, sums = state
      keys = collectives.rotate(keys, axis, 1)
      return keys, hop(keys, sums)

    return lax.fori_loop(1, self.gather.shards, step, (keys, sums))[1]

  def _probabilities(
    self,
    letters: str,
    q: Float[Array, "B q M G H"],
    k: Float[Array, "B ..."],
    lse: Float[Array, "B q M G"],
    seen: Bool[Array, "B q #M #G s"],
  ) -> Float[Array, "B q M G s"]:
    s = product(f"bqmgh,{letters}->bqmgs", q, k) * self.scores.scale
    if self.scores.soft_cap is not None:
      s = self.scores.soft_cap * jnp.tanh(s / self.scores.soft_cap)
    return jnp.where(seen, jnp.exp(s - lse[..., None]), 0)

  def _of_all(
    self, rows: _AttentionRows, keys: ShardKeys
  ) -> Float[Array, "B T M c"]:
    b, t, kv_heads, groups, _ = rows.q.shape
    size = self.gather.block
    blocks = -(-self.gather.length // size)
    dtype = wide_dtype(rows.q.dtype)
    empty = collectives.zeros((b, t, self.lists, blocks), dtype, (rows, keys))

    def hop(keys: ShardKeys, masses: Array) -> Array:
      k_at = Coords(keys.pos[:, None], keys.seg[:, None])
      number = keys.number // size

      def fold(_: tuple, chunk: tuple) -> tuple[tuple, Array]:
        rows, masses = chunk
        q_at = Coords(*(x[..., None] for x in rows.at))
        seen = visible(self.mask, q_at, k_at)[:, :, None, None]
        p = self._probabilities("bmsh", rows.q, keys.k, rows.lse, seen)
        p = jnp.sum(p, 3)
        if self.lists == 1:
          p = jnp.sum(p, 2, keepdims=True)
        by_block = jnp.moveaxis(masses, 3, 0)
        p = jnp.moveaxis(p, 3, 0).astype(by_block.dtype)
        return (), jnp.moveaxis(by_block.at[number].add(p, mode="drop"), 0, 3)

      pairs = b * kv_heads * groups * keys.pos.shape[1]
      chunk = max(1, _NUMBERS // pairs)
      return scan_queries(fold, (), (rows, masses), chunk)[1]

    return self._over_ring(hop, keys, empty)

  def _of_chosen(
    self, rows: _AttentionRows, keys: ShardKeys
  ) -> Float[Array, "B T M n"]:
    assert rows.chosen is not None
    b, t = rows.seg.shape
    lists, count = self.lists, rows.chosen.shape[3]

    def by_list(x: Array) -> Array:
      x = x.reshape(b, t, lists, -1, *x.shape[3:])
      return jnp.moveaxis(x, 2, 1).reshape(b * lists, t, *x.shape[3:])

    repeated = lambda x: jnp.repeat(x, lists, 0)
    queries = ChoosingQueries(
      by_list(rows.q),
      jnp.swapaxes(rows.chosen, 1, 2).reshape(b * lists, t, 1, count),
      repeated(rows.pos),
      repeated(rows.seg),
    )
    inputs = queries, by_list(rows.lse)
    dtype = wide_dtype(rows.q.dtype)
    empty = collectives.zeros((b * lists, t, count), dtype, (rows, keys))

    def hop(keys: ShardKeys, masses: Array) -> Array:
      table = keys.table(self.gather.length)

      def fold(_: tuple, chunk: tuple) -> tuple[tuple, Array]:
        (queries, lse), masses = chunk
        columns = self.gather.columns(keys, table, queries, self.mask)

        def add(i: Index, masses: Array) -> Array:
          heads = queries.q.shape[2]
          piece = ChosenPiece.of(columns, i, keys.take, heads)
          present = piece.present[:, :, :, None]
          p = self._probabilities("bqmsh", queries.q, piece.k, lse, present)
          column = jnp.minimum(piece.column[:, :, 0], columns.size - 1)
          number = keys.number[column] // self.gather.block
          place = number[..., None] == queries.chosen
          p = jnp.sum(p, (2, 3)).astype(masses.dtype)
          return masses + product("bqp,bqpn->bqn", p, place.astype(p.dtype))

        return (), lax.fori_loop(0, columns.pieces, add, masses)

      return scan_queries(fold, (), (inputs, masses), _CHUNK)[1]

    masses = self._over_ring(hop, keys, empty)
    return jnp.moveaxis(masses.reshape(b, lists, t, count), 1, 2)


def _divergence(
  scores: Float[Array, "B q M c"],
  offered: Bool[Array, "B q M c"],
  masses: Float[Array, "B q M c"],
) -> Float[Array, "B q M"]:
  """KL(normalised masses || softmax of the scores), 0 for no mass."""
  dtype = masses.dtype
  is_offered_any = jnp.any(offered, -1, keepdims=True)
  scores = jnp.where(offered, scores.astype(dtype), -jnp.inf)
  logarithms = jax.nn.log_softmax(jnp.where(is_offered_any, scores, 0), -1)
  masses = jnp.where(offered, masses, 0)
  total = jnp.sum(masses, -1, keepdims=True)
  p = masses / jnp.where(total > 0, total, 1)
  log_p = jnp.log(jnp.where(p > 0, p, 1))
  return jnp.sum(jnp.where(p > 0, p * (log_p - logarithms), 0), -1)

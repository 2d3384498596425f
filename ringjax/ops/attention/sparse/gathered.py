"""Attention of each query over the keys that it has chosen, gathered.

Guarantees: the result is attention under the mask that the choice stands for:
a chosen key takes part if the call's mask shows it to the query. A query that
has chosen no visible key gives 0 and a gradient of 0.
Cost: products of T k pairs, in pieces of keys whose number is data; the longest
list of a chunk of queries decides how many pieces are computed, so that on each
hop chunks are made of queries with lists of about the same length.
`executed_pairs` counts them. Keys and values go around the ring of shards once
forward, and with their gradients once backward.
Memory: a table of a shard's keys by number, int32 of the sequence's length,
and the chosen keys of one chunk of queries and one piece.

Partials are added in the order in which keys arrive, so that the last bits
depend on the number of shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
  product,
)
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.ops.softmax import Partial, finite_max, merge
from ringjax.parallel import collectives
from ringjax.typing import Index

# Most numbers of gathered keys and values that are in memory at once.
_GATHERED = 1 << 22
# Most queries of a chunk, and fewest and most keys of a piece.
_CHUNK, _LEAST_PIECE, _MOST_PIECE = 64, 8, 128


def piece_keys(count: int, shards: int) -> int:
  """Number of keys of a piece: about a quarter of a shard's chosen keys."""
  share = max(1, count // (4 * shards))
  power = 1 << (share - 1).bit_length()
  return min(_MOST_PIECE, max(_LEAST_PIECE, power))


def executed_pairs(
  counts: Int[np.ndarray, "T R"], count: int, chunk: int
) -> int:
  """Number of pairs of one head whose products are computed on all shards.

  Args:
    counts: Number of visible chosen keys of each query on each shard of keys,
      for queries in the order of their shards, each of which `chunk` divides.
    count: Most keys that a query chooses.
    chunk: Number of queries of a chunk.
  """
  shards = counts.shape[1]
  piece = piece_keys(count, shards)
  by_length = np.sort(counts.reshape(shards, -1, shards), 1)
  longest = by_length.reshape(-1, chunk, shards).max(1)
  return int((-(-longest // piece) * piece * chunk).sum())


def scan_queries(
  f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
  carry: PyTree,
  x: PyTree,
  size: int,
) -> tuple[PyTree, PyTree]:
  """Scan f over chunks of `size` queries of arrays [B or 1, T, ...].

  The last chunk is padded with zeros, which are padding tokens to a mask.
  """
  t = jax.tree.leaves(x)[0].shape[1]
  size = min(size, t)
  parts = -(-t // size)

  def split(a: jax.Array) -> jax.Array:
    widths = [(0, 0), (0, parts * size - t), *[(0, 0)] * (a.ndim - 2)]
    a = jnp.pad(a, widths).reshape(a.shape[0], parts, size, *a.shape[2:])
    return jnp.moveaxis(a, 1, 0)

  def join(a: jax.Array) -> jax.Array:
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], parts * size, *a.shape[3:])[:, :t]

  carry, result = lax.scan(f, carry, jax.tree.map(split, x))
  return carry, jax.tree.map(join, result)


def scan_by_length(
  f: Callable[[PyTree, PyTree, Bool[Array, "B q"]], tuple[PyTree, PyTree]],
  sums: PyTree,
  x: PyTree,
  state: PyTree,
  order: Int[Array, "B T"],
  size: int,
) -> tuple[PyTree, PyTree]:
  """Scan f over chunks of `size` queries, in an order that each row has.

  Args:
    f: Function (sums, (x, state) of a chunk, which queries are real) -> (sums,
      state of the chunk). The last chunk repeats a query that is not real.
    sums: Initial sums.
    x: Arrays of the queries, [B, T, ...].
    state: Arrays of the queries, [B, T, ...], that f replaces in place.
    order: Index of each query.
    size: Number of queries of a chunk.
  """
  b, t = order.shape
  parts = -(-t // size)
  order = jnp.pad(order, ((0, 0), (0, parts * size - t)), constant_values=t)
  row = jnp.arange(b)[:, None]

  def step(carry: tuple, at: jax.Array) -> tuple[tuple, None]:
    sums, state = carry
    take = lambda a: a[row, jnp.minimum(at, t - 1)]
    chunk = jax.tree.map(take, (x, state))
    sums, chunk_state = f(sums, chunk, at < t)
    put = lambda a, rows: a.at[row, at].set(rows, mode="drop")
    return (sums, jax.tree.map(put, state, chunk_state)), None

  chunks = jnp.moveaxis(order.reshape(b, parts, size), 1, 0)
  return lax.scan(step, (sums, state), chunks)[0]


# Function (row, kv head, column) -> keys and values there; None for values that
# are their keys.
Take = Callable[
  [jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]
]


class ChosenColumns(NamedTuple):
  """Columns of the keys that each query of a chunk reads.

  Fields:
    column: Columns, those of keys first, int32 [B, q, 1, c]; `size` for none.
    pieces: Number of pieces in which the longest list of columns ends.
    size: Number of columns that there are.
    heads: Number of kv heads.
    piece: Number of columns of a piece, which divides c.
    lists: Number of rows, one after another, that a row of keys belongs to:
      those of the heads that choose.
  """

  column: jax.Array
  pieces: Index
  size: int
  heads: int
  piece: int
  lists: int = 1

  @classmethod
  def of(
    cls,
    column: Int[Array, "B q 1 c"],
    size: int,
    heads: int,
    piece: int,
    lists: int = 1,
  ) -> ChosenColumns:
    """Pad lists, in which columns of keys come first, to whole pieces."""
    longest = jnp.max(jnp.sum(column < size, -1, dtype=jnp.int32))
    widths = [(0, 0)] * 3 + [(0, -column.shape[3] % piece)]
    column = jnp.pad(column, widths, constant_values=size)
    pieces = (longest + piece - 1) // piece
    return cls(column, pieces, size, heads, piece, lists)


def fold_chosen(
  q: Float[Array, "B q M G H"],
  columns: ChosenColumns,
  take: Take,
  args: ScoreArgs,
  partial: Partial,
) -> Partial:
  """Fold the keys at the columns of each query into its partial, [B, q, M, G].

  Args:
    q: Queries of a chunk, by heads that choose and their groups.
    columns: Columns of the keys that they read.
    take: Function that gathers keys and values.
    args: Score function.
    partial: Partial of keys before.
  """

  def add(i: Index, partial: Partial) -> Partial:
    tile = ChosenPiece.of(columns, i, take, q.shape[2])
    s, _ = tile.scores(q, args)
    m = jnp.max(s, -1)
    p = jnp.exp(s - finite_max(m)[..., None])
    acc = product("bqmgp,bqmpj->bqmgj", p.astype(tile.v.dtype), tile.v)
    return merge(partial, Partial(acc, m, jnp.sum(p, -1)))

  return lax.fori_loop(0, columns.pieces, add, partial)


class ShardKeys(NamedTuple):
  """Keys that travel.

  Fields:
    k: Keys, [B, K, S, H].
    v: Values, [B, K, S, J]; None: each key is its value, too.
    pos: Positions, int32 [B or 1, S].
    seg: Segments, int32 [B or 1, S].
    number: Index of each key in the whole sequence, int32 [S].
  """

  k: jax.Array
  v: jax.Array | None
  pos: jax.Array
  seg: jax.Array
  number: jax.Array

  @classmethod
  def of(cls, x: Local, args: ScoreArgs) -> ShardKeys:
    number = args.context.number
    assert number is not None
    v = x.v if x.v.shape[-1] else None
    return cls(x.k, v, *args.context.k, number)

  def table(self, length: int) -> Int[Array, " length"]:
    """Column of each number; the number of columns where it is not here."""
    size = self.number.shape[0]
    empty = collectives.full((length,), size, jnp.int32, self.number)
    return empty.at[self.number].set(jnp.arange(size), mode="drop")

  def take(
    self,
    row: Int[Array, "#B #q #M #p"],
    head: Int[Array, "#B #q M #p"],
    column: Int[Array, "B q M p"],
  ) -> tuple[Float[Array, "B q M p _"], Float[Array, "B q M p _"] | None]:
    """Gather keys and values."""
    at = row, head, column
    return self.k[at], None if self.v is None else self.v[at]


class ChoosingQueries(NamedTuple):
  """Queries with a place for each token first; each row has one list of keys.

  Fields:
    q: Queries, [B L, T, M / L, G, H], where L heads choose.
    chosen: Blocks that each query reads, int32 [B L, T, 1, n].
    pos: Positions, int32 [B L, T].
    seg: Segments, int32 [B L, T].
  """

  q: jax.Array
  chosen: jax.Array
  pos: jax.Array
  seg: jax.Array

  @classmethod
  def of(cls, x: Local, args: ScoreArgs) -> ChoosingQueries:
    chosen = args.context.chosen
    assert chosen is not None
    b, t, lists, n = chosen.shape
    rows = lambda a: jnp.repeat(jnp.broadcast_to(a, (b, t)), lists, 0)
    return cls(
      by_list(x.q, lists),
      jnp.swapaxes(chosen, 1, 2).reshape(b * lists, t, 1, n),
      *map(rows, args.context.q),
    )


def by_list(
  x: Float[Array, "B M G T *H"], lists: int
) -> Float[Array, "_ T _ G *H"]:
  """Arrange an array of a local algorithm in rows, one of each list of keys."""
  b, heads = x.shape[:2]
  x = x.reshape(b * lists, heads // lists, *x.shape[2:])
  return jnp.moveaxis(x, 3, 1)


def by_head(
  x: Float[Array, "_ T _ G *H"], lists: int
) -> Float[Array, "B M G T *H"]:
  """Undo `by_list`."""
  x = jnp.moveaxis(x, 1, 3)
  return x.reshape(-1, x.shape[1] * lists, *x.shape[2:])


@dataclasses.dataclass(frozen=True)
class GatherChosen:
  """Local algorithm and strategy: chosen keys are gathered on every hop.

  Attributes:
    length: Number of positions of the whole sequence of keys.
    block: Number of positions of a block.
    axis: Manual axis that shards keys and queries, or None.
  """

  length: int
  block: int
  axis: str | tuple[str, ...] | None = None

  differentiable = False

  @property
  def axes(self) -> tuple[str, ...]:
    return collectives.names(self.axis)

  @property
  def shards(self) -> int:
    return 1 if self.axis is None else collectives.axis_size(self.axis)

  def span(self, keys: int) -> int:
    """Number of keys that a call sees whose operands hold `keys`."""
    return keys * self.shards

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the chosen keys of all shards into `carry`."""
    queries = ChoosingQueries.of(x, args)
    lists = queries.q.shape[0] // x.q.shape[0]

    def hop(keys: ShardKeys, partial: Partial) -> Partial:
      def fold(_: tuple, chunk: tuple, columns: ChosenColumns) -> tuple:
        rows, partial = chunk
        return (), fold_chosen(rows.q, columns, keys.take, args, partial)

      return self._scan(fold, (), keys, (queries,), partial, args)[1]

    keys = ShardKeys.of(x, args)
    partial = hop(keys, jax.tree.map(lambda a: by_list(a, lists), carry))
    if self.axis is not None:
      axis = self.axis

      def step(_: Index, state: tuple) -> tuple:
        keys, partial = state
        keys = collectives.rotate(keys, axis, 1)
        return keys, hop(keys, partial)

      partial = lax.fori_loop(1, self.shards, step, (keys, partial))[1]
    return jax.tree.map(lambda a: by_head(a, lists), partial)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of the chosen keys to `carry`."""
    queries = ChoosingQueries.of(x, args)
    lists = queries.q.shape[0] // x.q.shape[0]
    rows_of = tuple(
      by_list(a, lists) for a in (residuals.do, residuals.lse, residuals.delta)
    )
    dtype = residuals.lse.dtype

    def hop(keys: ShardKeys, dk: jax.Array, dv: Any, dq: jax.Array) -> tuple:
      def fold(sums: tuple, chunk: tuple, columns: ChosenColumns) -> tuple:
        (rows, (do, lse, delta)), dq = chunk

        def add(i: Index, state: tuple) -> tuple:
          dk, dv, dq = state
          tile = ChosenPiece.of(columns, i, keys.take, rows.q.shape[2])
          s, slope = tile.scores(rows.q, args)
          p = jnp.exp(s - lse[..., None])
          dp = product("bqmgj,bqmpj->bqmgp", do, tile.v)
          ds = p * (dp - delta[..., None]) * slope
          low = lambda a: a.astype(rows.q.dtype)
          dq += product("bqmgp,bqmph->bqmgh", low(ds), tile.k)
          dk_rows = product("bqmgp,bqmgh->bqmph", low(ds), rows.q)
          dv_rows = product("bqmgp,bqmgj->bqmpj", low(p), do)
          if dv is None:
            return tile.add(dk, dk_rows + dv_rows), None, dq
          return tile.add(dk, dk_rows), tile.add(dv, dv_rows), dq

        dk, dv, dq = lax.fori_loop(0, columns.pieces, add, (*sums, dq))
        return (dk, dv), dq

      inputs = queries, rows_of
      (dk, dv), dq = self._scan(fold, (dk, dv), keys, inputs, dq, args)
      return dk, dv, dq

    keys = ShardKeys.of(x, args)
    zeros = lambda a: collectives.zeros(a.shape, dtype, x)
    dv = None if keys.v is None else zeros(x.v)
    state = hop(keys, zeros(x.k), dv, zeros(queries.q))
    if self.axis is not None:
      axis = self.axis

      def step(_: Index, state: tuple) -> tuple:
        keys, dk, dv, dq = state
        keys, dk, dv = collectives.rotate((keys, dk, dv), axis, 1)
        return keys, *hop(keys, dk, dv, dq)

      _, *state = lax.fori_loop(1, self.shards, step, (keys, *state))
      # The gradients arrive at the shard of their keys.
      state = *collectives.rotate(tuple(state[:2]), axis, 1), state[2]
    dk, dv, dq = state
    if dv is None:
      dv = zeros(x.v)
    dq_sum, terms = carry
    dq_sum = dq_sum + jnp.moveaxis(by_head(dq, lists), 4, 2)
    return Gradients(dq_sum, dk, dv, terms)

  def _scan(
    self,
    fold: Callable[[PyTree, PyTree, ChosenColumns], tuple[PyTree, PyTree]],
    sums: PyTree,
    keys: ShardKeys,
    x: tuple,
    state: PyTree,
    args: ScoreArgs,
  ) -> tuple[PyTree, PyTree]:
    """Scan over chunks of queries with lists of about the same length.

    Args:
      fold: Function (sums, (x, state) of a chunk, columns) -> (sums, state).
      sums: Initial sums.
      keys: Keys of the hop.
      x: Arrays of queries, `ChoosingQueries` first.
      state: Arrays of queries that `fold` replaces.
      args: Score function.
    """
    table, mask = keys.table(self.length), args.context.mask
    queries: ChoosingQueries = x[0]
    x = x if len(x) > 1 else x[0]
    b, t, heads = queries.q.shape[:3]
    count = queries.chosen.shape[3] * self.block
    numbers = keys.k.shape[-1] + (0 if keys.v is None else keys.v.shape[-1])
    gathered = b * heads * piece_keys(count, self.shards) * numbers
    size = max(1, min(_CHUNK, _GATHERED // gathered))
    if t <= size:
      columns = self.columns(keys, table, queries, mask)
      return fold(sums, (x, state), columns)

    def lengths(_: tuple, rows: ChoosingQueries) -> tuple[tuple, jax.Array]:
      column = self._found(keys, table, rows, mask)
      present = column < keys.pos.shape[1]
      return (), jnp.sum(present, (2, 3), dtype=jnp.int32)

    # Queries themselves are not needed to find their keys.
    unread = queries._replace(q=queries.seg)
    order = jnp.argsort(scan_queries(lengths, (), unread, size)[1], 1)

    def fold_rows(sums: PyTree, chunk: PyTree, real: jax.Array) -> tuple:
      x = chunk[0]
      rows = x if isinstance(x, ChoosingQueries) else x[0]
      rows = rows._replace(seg=jnp.where(real, rows.seg, 0))
      return fold(sums, chunk, self.columns(keys, table, rows, mask))

    return scan_by_length(fold_rows, sums, x, state, order, size)

  def columns(
    self,
    keys: ShardKeys,
    table: Int[Array, " length"],
    rows: ChoosingQueries,
    mask: Mask,
  ) -> ChosenColumns:
    """Columns that queries read, first ones first."""
    size, heads = keys.pos.shape[1], keys.k.shape[1]
    column = jnp.sort(self._found(keys, table, rows, mask), -1)
    piece = piece_keys(column.shape[3], self.shards)
    lists = column.shape[0] // keys.k.shape[0]
    return ChosenColumns.of(column, size, heads, piece, lists)

  def _found(
    self,
    keys: ShardKeys,
    table: Int[Array, " length"],
    rows: ChoosingQueries,
    mask: Mask,
  ) -> Int[Array, "B q 1 c"]:
    """Columns that queries read; the number of columns for none."""
    size = keys.pos.shape[1]
    b, t, heads, n = rows.chosen.shape
    offsets = jnp.arange(self.block, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    # A key's number of a block that is out of range could overflow into it.
    chosen = rows.chosen[..., None]
    real = (chosen >= 0) & (chosen < -(-self.length // self.block))
    number = jnp.where(real, chosen * self.block + offsets, self.length)
    number = number.reshape(b, t, heads, n * self.block)
    in_range = number < self.length
    column = jnp.where(in_range, table[jnp.where(in_range, number, 0)], size)
    at = jnp.minimum(column, size - 1)
    key_rows = keys.k.shape[0]
    row = jnp.arange(b)[:, None, None, None] // (b // key_rows)
    pos, seg = (
      jnp.broadcast_to(x, (key_rows, size))[row, at]
      for x in (keys.pos, keys.seg)
    )
    k_at = Coords(pos, jnp.where(column < size, seg, 0))
    q_at = Coords(rows.pos[..., None, None], rows.seg[..., None, None])
    return jnp.where(visible(mask, q_at, k_at), column, size)


class ChosenPiece(NamedTuple):
  """Some chosen keys of each query of a chunk.

  Fields:
    k: Keys, [B, q, M, p, H]; 0 for no key.
    v: Values, [B, q, M, p, J]; 0 for no key.
    column: Column of each, int32 [B, q, M, p]; S for no key.
    row: Row of the keys of each, [B, 1, 1, 1].
    head: Kv head of each, [B or 1, 1, M, 1].
    present: Whether the place has a key, [B, q, M, p].
  """

  k: jax.Array
  v: jax.Array
  column: jax.Array
  row: jax.Array
  head: jax.Array
  present: jax.Array

  @classmethod
  def of(
    cls, columns: ChosenColumns, index: Index, take: Take, heads: int
  ) -> ChosenPiece:
    """Gather piece `index` of the columns for `heads` heads."""
    b, t, _, _ = columns.column.shape
    piece = columns.piece
    column = lax.dynamic_slice_in_dim(columns.column, index * piece, piece, 3)
    column = jnp.broadcast_to(column, (b, t, heads, piece))
    lists = columns.lists
    row = jnp.arange(b)[:, None, None, None]
    head = row % lists * heads + jnp.arange(heads)[None, None, :, None]
    row, head = row // lists, head // (heads * lists // columns.heads)
    present = column < columns.size
    k, v = take(row, head, jnp.minimum(column, columns.size - 1))
    only_present = lambda x: jnp.where(present[..., None], x, 0)
    k = only_present(k)
    v = k if v is None else only_present(v)
    return cls(k, v, column, row, head, present)

  def scores(
    self, q: Float[Array, "B q M G H"], args: ScoreArgs
  ) -> tuple[Any, Any]:
    """Scores [B, q, M, G, p], -inf for no key, and d score / d product."""
    options = args.scores
    s = product("bqmgh,bqmph->bqmgp", q, self.k) * options.scale
    slope: Any = options.scale
    if options.soft_cap is not None:
      tanh = jnp.tanh(s / options.soft_cap)
      s, slope = options.soft_cap * tanh, (1 - tanh**2) * slope
    return jnp.where(self.present[:, :, :, None], s, -jnp.inf), slope

  def add(
    self, total: Float[Array, "B K S H"], x: Float[Array, "_ q M p H"]
  ) -> Float[Array, "B K S H"]:
    """Add rows of gradients to those of their keys."""
    x = x.astype(total.dtype)
    return total.at[self.row, self.head, self.column].add(x, mode="drop")

"""Pass-Q ring attention: keys stay, queries and their partials travel.

Guarantees: equals `reference` on the gathered sequence, for every layout and
every mask over coordinates; forward and backward.
Cost: a full ring of R shards sends the queries R-1 times forward and their
float32 partials R-1 times, the last time to their owner; backward queries,
cotangents and two numbers a row R-1 times and the float32 sums dQ R-1 times.
No key or value moves. Nothing sent is zero or unused.
Memory: the current queries and those in flight, with their partials.
Ref: Yang et al. 2024, arXiv 2411.01783 (pass-Q), where a final all-to-all
brings all partials to their owners instead.

It pays where queries are few compared to keys: a chunk of a prompt after a long
cache, several tokens of decoding, cross attention to a long text; with grouped
heads as soon as T N (H + 2) 4 bytes and T N H numbers are less than S K 2 H.

Queries that see earlier keys travel to them: shard i's go to i - 1, i - 2, ...
`hops.py` has the schedule and the loop.

A bias or a boolean mask has a row for each query of a shard and columns for
all keys. Before the first hop the shards exchange these (one all-to-all) for
the columns of the shard's keys and the rows of all queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.strategies.hops import RingStrategy
from ringjax.ops.attention.strategies.kv_block import pack, unpack
from ringjax.ops.attention.strategies.strategy import tie_coords_to_queries
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial, merge
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.typing import Index


class QBlock(NamedTuple):
  """Queries in flight, in the order of axes of `Local`.

  Fields:
    rows: Queries; backward (q, do, (lse, delta)) as in `Residuals`.
    at: Coordinates of the queries, int32 [2, B or 1, T] or a pair (pos, seg).
  """

  rows: PyTree
  at: jax.Array | tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class RingQ(RingStrategy):
  """Pass-Q ring over a local algorithm.

  Attributes:
    local: Algorithm of one hop, `Blockwise()` or `Dense()`.
    axis: Mesh axis; filled in by the functions that take `axis=`.
    hops: (back, forward) numbers of shards whose keys the queries visit; None:
      the whole ring.
    unroll: Number of hops in the loop's body.
  """

  query_shift = -1

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
    if self.axis is not None:
      axes = collectives.varying_axes(x, terms, context) | {*self.axes}
      x, terms, context = collectives.vary((x, terms, context), axes)
      keys = x.k.shape[2]
      terms = terms._replace(bias=_exchange_pairs(terms.bias, self.axis, keys))
      allow = _exchange_pairs(context.allow, self.axis, keys)
      context = context._replace(allow=allow)
    return super().attend(scores, x, terms, context)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys of all shards into `carry`.

    The bias and the boolean mask of `args` have the rows of all shards'
    queries, and the columns of this shard's keys.
    """
    x, args = tie_coords_to_queries(x, args)

    def visit(
      _: None, block: QBlock | None, distance: Index
    ) -> tuple[None, Partial]:
      operands, start = x, carry
      if block is not None:
        operands = x._replace(q=block.rows)
        start = empty_partial(operands)
      block_args = self._of_block(args, block, distance)
      return None, self.local.forward(operands, block_args, start)

    own_block = QBlock(x.q, pack(*args.context.q))
    return self._walk(self._lanes(), own_block, None, visit, merge)[1]

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of a shard's own keys to `carry`, (dq, dterms)."""
    x, args = tie_coords_to_queries(x, args)
    dq, dterms = carry

    def visit(carry: tuple, block: QBlock | None, distance: Index) -> PyTree:
      """Add to (dk, dv, dterms); return the gradient of the block's queries."""
      sums, dterms = carry
      operands, rows, start = x, residuals, dq
      if block is not None:
        q, do, numbers = block.rows
        operands = x._replace(q=q)
        rows = Residuals.of(q, do, *unpack(numbers))
        start = collectives.zeros(dq.shape, dq.dtype, (dq, block))
      block_args = self._of_block(args, block, distance)
      block_rows = self._source(distance), x.q.shape[3]
      block_dterms = dterms._replace(bias=_rows(dterms.bias, *block_rows))
      grads = self.local.backward(
        operands, block_args, rows, (start, block_dterms)
      )
      kv_grads = pack(grads.k, grads.v)
      sums = kv_grads if sums is None else jax.tree.map(jnp.add, sums, kv_grads)
      bias = _put_rows(dterms.bias, grads.terms.bias, *block_rows)
      return (sums, grads.terms._replace(bias=bias)), grads.q

    # In Residuals no lse is -inf: it is inf instead.
    rows = x.q, residuals.do, pack(residuals.lse, residuals.delta)
    own_block = QBlock(rows, pack(*args.context.q))
    results, dq = self._walk(
      self._lanes(), own_block, (None, dterms), visit, jnp.add
    )
    dk, dv = unpack(results[0])
    return Gradients(dq, dk, dv, results[1])

  def _of_block(
    self, args: ScoreArgs, block: QBlock | None, distance: Index
  ) -> ScoreArgs:
    """Adapt `args` to a block's queries, or to the shard's own."""
    context, terms = args.context, args.terms
    at = context.q if block is None else Coords(*unpack(block.at))
    block_rows = self._source(distance), at.pos.shape[1]
    context = context._replace(q=at, allow=_rows(context.allow, *block_rows))
    terms = terms._replace(bias=_rows(terms.bias, *block_rows))
    return args._replace(context=context, terms=terms)


def _exchange_pairs(
  pair: jax.Array | None, axis: Axis, keys: int
) -> jax.Array | None:
  """Exchange local rows of all columns for all rows of `keys` columns."""
  if pair is None:
    return None
  if pair.shape[4] == 1:
    return pair if pair.shape[3] == 1 else collectives.gather(pair, axis, 3)
  if pair.shape[3] != 1:
    return collectives.exchange(pair, axis, 4, 3)
  first = collectives.axis_index(axis) * keys
  return lax.dynamic_slice_in_dim(pair, first, keys, 4)


def _rows(
  pair: jax.Array | None, source: Index, length: int
) -> jax.Array | None:
  """Slice the rows of the queries of shard `source`."""
  if pair is None or pair.shape[3] in (1, length):
    return pair
  return lax.dynamic_slice_in_dim(pair, source * length, length, 3)


def _put_rows(pair: Any, rows: Any, source: Index, length: int) -> Any:
  if pair is None or pair.shape[3] in (1, length):
    return rows
  return lax.dynamic_update_slice_in_dim(pair, rows, source * length, 3)

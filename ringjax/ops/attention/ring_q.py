"""Pass-Q ring attention: keys stay, queries and their partials travel.

Guarantees: equals `reference` on the gathered sequence, for every layout and
every mask over coordinates; forward and backward.
Cost: a full ring of R shards sends the queries R-1 times forward and their
float32 partials R-1 times, the last time to their owner; backward queries,
cotangents and two numbers a row R-1 times and the float32 sums dQ R-1 times.
No key or value moves. Nothing sent is zero or unused.
Memory: the queries at hand and those in flight, with their partials.
Ref: Yang et al. 2024, arXiv 2411.01783 (pass-Q), where a final all-to-all
brings all partials to their owners instead.

It pays where queries are few beside keys: a chunk of a prompt behind a long
cache, several tokens of decoding, cross attention to a long text; with grouped
heads as soon as T N (H + 2) 4 bytes and T N H numbers are less than S K 2 H.

Queries that see keys behind them travel to those: shard i's go to i - 1,
i - 2, ... `hops.py` has the schedule and the loop.

A bias or a boolean mask has a row for each query of a shard and columns for
all keys. Before the first hop the shards trade these (one all-to-all) for the
columns of their own keys and the rows of all queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.hops import RingStrategy
from ringjax.ops.attention.kv_block import pack, unpack
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.strategy import tie_coords_to_queries
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial, merge
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.typing import Index


class QBlock(NamedTuple):
  """Queries on their way, in the order of axes of `Local`.

  Fields:
    rows: the queries; backward (q, do, (lse, delta)) as in `Residuals`.
    at: their coordinates, int32 [2, B or 1, T] or a pair (pos, seg).
  """

  rows: PyTree
  at: jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class RingQ(RingStrategy):
  """Pass-Q ring over a local algorithm.

  Attributes:
    local: the algorithm of one hop, `Blockwise()` or `Dense()`.
    axis: the axis; filled in by the functions that take `axis=`.
    hops: (from behind, from ahead), how many shards' keys the queries visit
      in either direction; None is the whole ring.
    unroll: how many hops the loop's body holds.
  """

  behind = -1

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    if self.axis is not None:
      axes = collectives.varying_axes(x, terms, context) | {*self.axes}
      x, terms, context = collectives.vary((x, terms, context), axes)
      keys = x.k.shape[2]
      terms = terms._replace(bias=_trade(terms.bias, self.axis, keys))
      allow = _trade(context.allow, self.axis, keys)
      context = context._replace(allow=allow)
    return super().attend(scores, x, terms, context)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Folds the keys of all shards into `carry`.

    The bias and the boolean mask of `args` have the rows of all shards'
    queries, and the columns of this shard's keys.
    """
    x, args = tie_coords_to_queries(x, args)

    def visit(
      _: None, block: QBlock | None, distance: Index
    ) -> tuple[None, Partial]:
      there, start = x, carry
      if block is not None:
        there = x._replace(q=block.rows)
        start = empty_partial(there)
      here = self._of_block(args, block, distance)
      return None, self.local.forward(there, here, start)

    own = QBlock(x.q, pack(*args.context.q))
    return self._walk(self._lanes(), own, None, visit, merge)[1]

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Gradients of a shard's own keys; adds to `carry`, (dq, dterms)."""
    x, args = tie_coords_to_queries(x, args)
    dq, dterms = carry

    def visit(kept: tuple, block: QBlock | None, distance: Index) -> PyTree:
      """Adds to (dk, dv, dterms); finds the gradient of the block's queries."""
      sums, dterms = kept
      there, rows, start = x, residuals, dq
      if block is not None:
        q, do, numbers = block.rows
        there = x._replace(q=q)
        rows = Residuals.of(q, do, *unpack(numbers))
        start = collectives.zeros(dq.shape, dq.dtype, (dq, block))
      here = self._of_block(args, block, distance)
      which = self._source(distance), x.q.shape[3]
      mine = dterms._replace(bias=_rows(dterms.bias, *which))
      grads = self.local.backward(there, here, rows, (start, mine))
      more = pack(grads.k, grads.v)
      sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
      bias = _put_rows(dterms.bias, grads.terms.bias, *which)
      return (sums, grads.terms._replace(bias=bias)), grads.q

    # No lse is -inf any more, see `Residuals`.
    rows = x.q, residuals.do, pack(residuals.lse, residuals.delta)
    own = QBlock(rows, pack(*args.context.q))
    kept, dq = self._walk(self._lanes(), own, (None, dterms), visit, jnp.add)
    dk, dv = unpack(kept[0])
    return Gradients(dq, dk, dv, kept[1])

  def _of_block(
    self, args: ScoreArgs, block: QBlock | None, distance: Index
  ) -> ScoreArgs:
    """`args` for a block's queries, or for a shard's own."""
    context, terms = args.context, args.terms
    at = context.q if block is None else Coords(*unpack(block.at))
    which = self._source(distance), at.pos.shape[1]
    context = context._replace(q=at, allow=_rows(context.allow, *which))
    terms = terms._replace(bias=_rows(terms.bias, *which))
    return args._replace(context=context, terms=terms)


def _trade(pair: jax.Array | None, axis: Axis, keys: int) -> jax.Array | None:
  """Local rows of all columns -> all rows of the `keys` columns here."""
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
  """The rows of the queries of shard `source`."""
  if pair is None or pair.shape[3] in (1, length):
    return pair
  return lax.dynamic_slice_in_dim(pair, source * length, length, 3)


def _put_rows(pair: Any, rows: Any, source: Index, length: int) -> Any:
  if pair is None or pair.shape[3] in (1, length):
    return rows
  return lax.dynamic_update_slice_in_dim(pair, rows, source * length, 3)

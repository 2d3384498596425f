"""Pass-Q ring attention: keys stay, queries and their partials travel.

Law:   equals `reference` on the gathered sequence, for every layout and every
       mask over coordinates; forward and backward.
Cost:  a full ring of R shards sends the queries R-1 times forward and their
       float32 partials R-1 times, the last time home; backward queries,
       cotangents and two numbers a row R-1 times and the float32 sums dQ R-1
       times. No key or value moves. Nothing sent is zero or unused.
Memory: the queries at hand and those in flight, with their partials.
Ref:   Yang et al. 2024, arXiv 2411.01783 (pass-Q), where a final all-to-all
       brings all partials home instead.

It pays where queries are few beside keys: a chunk of a prompt behind a long
cache, several tokens of decoding, cross attention to a long text; with grouped
heads as soon as T N (H + 2) 4 bytes and T N H numbers are less than S K 2 H.

Queries that see keys behind them travel ahead of nobody: shard i's go to
i - 1, i - 2, ...; what came along with them goes on while a shard computes its
own contribution, and is merged in on arrival.

A bias or a boolean mask has a row for each query of a shard and columns for
all keys. Before the ring turns the shards trade these (one all-to-all) for the
columns of their own keys and the rows of all queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  Residuals,
)
from ringjax.ops.attention.kv_block import pack, unpack
from ringjax.ops.attention.ring import cut_hops
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.strategy import Strategy, pinned
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial, merge
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis


@dataclasses.dataclass(frozen=True)
class RingQ(Strategy):
  """Pass-Q ring over a local algorithm.

  Attributes:
    local: the algorithm of one hop, `Blockwise()` or `Dense()`.
    axis: the axis; filled in by the functions that take `axis=`.
    hops: (from behind, from ahead), how many shards' keys the queries visit
      in either direction; None is the whole ring.
    unroll: how many hops the loop's body holds.
  """

  hops: tuple[int, int] | None = None
  unroll: int = 2

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> RingQ:
    """This ring on `axis`, cut to the distances that are `needed`."""
    if needed is None or self.hops is not None:
      return dataclasses.replace(self, axis=axis)
    return dataclasses.replace(self, axis=axis, hops=cut_hops(needed))

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

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """Folds the keys of all shards into `carry`.

    `terms.bias` and `context.allow` have the rows of all shards' queries, and
    the columns of this shard's keys.
    """
    size, me = self._place()
    behind, ahead = self._hops()
    x, context = pinned(x, context)
    length = x.q.shape[3]

    def visit(there: tuple, source: Any) -> Partial:
      q, at = there
      seen = context._replace(
        q=Coords(*unpack(at)), allow=_rows(context.allow, source, length)
      )
      here = terms._replace(bias=_rows(terms.bias, source, length))
      x_there = Local(q, x.k, x.v)
      return self.local.forward(
        scores, x_there, here, seen, column, empty_partial(x_there)
      )

    own = x.q, pack(*context.q)

    def travel(hops: int, shift: int) -> Partial:
      """What `hops` shards know about this one's queries."""
      source = lambda n: (me - n * shift) % size
      there = self._rotate(own, shift)
      coming = self._rotate(there, shift) if hops > 1 else there
      partial = visit(there, source(1))

      def hop(state: tuple, n: jax.Array) -> tuple:
        there, partial = state
        coming = self._rotate(there, shift)
        moved = self._rotate(partial, shift)
        return (coming, merge(moved, visit(there, source(n)))), None

      middle = max(hops - 2, 0)
      if middle:
        numbers = jnp.arange(2, 2 + middle, dtype=jnp.int32)
        (coming, partial), _ = lax.scan(
          hop, (coming, partial), numbers, unroll=min(self.unroll, middle)
        )
      if hops > 1:
        moved = self._rotate(partial, shift)
        partial = merge(moved, visit(coming, source(hops)))
      return self._rotate(partial, -hops * shift)

    at_home = self.local.forward(
      scores,
      x,
      terms._replace(bias=_rows(terms.bias, me, length)),
      context._replace(allow=_rows(context.allow, me, length)),
      column,
      carry,
    )
    if behind:
      at_home = merge(at_home, travel(behind, -1))
    if ahead:
      at_home = merge(at_home, travel(ahead, 1))
    return at_home

  def backward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    residuals: Residuals,
    carry: tuple[jax.Array, Terms],
  ) -> Gradients:
    """Gradients of a shard's own keys; adds to `carry`, (dq, dterms)."""
    size, me = self._place()
    behind, ahead = self._hops()
    x, context = pinned(x, context)
    length = x.q.shape[3]
    dq, dterms = carry

    def visit(
      kept: tuple, there: tuple, rows: Residuals, dq: Any, source: Any
    ) -> tuple[tuple, jax.Array]:
      """Adds to (dk, dv, dterms); the gradient of the queries at hand."""
      sums, dterms = kept
      q, at = there
      seen = context._replace(
        q=Coords(*unpack(at)), allow=_rows(context.allow, source, length)
      )
      here = terms._replace(bias=_rows(terms.bias, source, length))
      mine = dterms._replace(bias=_rows(dterms.bias, source, length))
      grads = self.local.backward(
        scores, Local(q, x.k, x.v), here, seen, column, rows, (dq, mine)
      )
      more = pack(grads.k, grads.v)
      sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
      bias = _put_rows(dterms.bias, grads.terms.bias, source, length)
      return (sums, grads.terms._replace(bias=bias)), grads.q

    # Nobody's lse is -inf any more, see `Residuals`.
    own = x.q, pack(*context.q)
    ours = own, (residuals.do, pack(residuals.lse, residuals.delta))

    def travel(kept: tuple, hops: int, shift: int) -> tuple[tuple, jax.Array]:
      source = lambda n: (me - n * shift) % size

      def at(kept: tuple, visitor: Any, n: Any) -> tuple[tuple, jax.Array]:
        there, (do, numbers) = visitor
        rows = Residuals.of(there[0], do, *unpack(numbers))
        zero = collectives.zeros(dq.shape, dq.dtype, (dq, there))
        return visit(kept, there, rows, zero, source(n))

      visitor = self._rotate(ours, shift)
      coming = self._rotate(visitor, shift) if hops > 1 else visitor
      kept, sums = at(kept, visitor, 1)

      def hop(state: tuple, n: jax.Array) -> tuple:
        kept, visitor, sums = state
        coming = self._rotate(visitor, shift)
        moved = self._rotate(sums, shift)
        kept, more = at(kept, visitor, n)
        return (kept, coming, moved + more), None

      middle = max(hops - 2, 0)
      if middle:
        numbers = jnp.arange(2, 2 + middle, dtype=jnp.int32)
        (kept, coming, sums), _ = lax.scan(
          hop,
          (kept, coming, sums),
          numbers,
          unroll=min(self.unroll, middle),
        )
      if hops > 1:
        moved = self._rotate(sums, shift)
        kept, more = at(kept, coming, hops)
        sums = moved + more
      return kept, self._rotate(sums, -hops * shift)

    kept, dq = visit((None, dterms), own, residuals, dq, me)
    for hops, shift in ((behind, -1), (ahead, 1)):
      if hops:
        kept, more = travel(kept, hops, shift)
        dq = dq + more
    dk, dv = unpack(kept[0])
    return Gradients(dq, dk, dv, kept[1])

  def _hops(self) -> tuple[int, int]:
    return (self._place()[0] - 1, 0) if self.hops is None else self.hops

  def _rotate(self, tree: Any, shift: int) -> Any:
    assert self.axis is not None
    return collectives.rotate(tree, self.axis, shift)


def _trade(pair: Any, axis: Axis, keys: int) -> Any:
  """Local rows of all columns -> all rows of the `keys` columns here."""
  if pair is None:
    return None
  if pair.shape[4] == 1:
    return pair if pair.shape[3] == 1 else collectives.gather(pair, axis, 3)
  if pair.shape[3] != 1:
    return collectives.exchange(pair, axis, 4, 3)
  first = collectives.axis_index(axis) * keys
  return lax.dynamic_slice_in_dim(pair, first, keys, 4)


def _rows(pair: Any, source: Any, length: int) -> Any:
  """The rows of the queries of shard `source`."""
  if pair is None or pair.shape[3] in (1, length):
    return pair
  return lax.dynamic_slice_in_dim(pair, source * length, length, 3)


def _put_rows(pair: Any, rows: Any, source: Any, length: int) -> Any:
  if pair is None or pair.shape[3] in (1, length):
    return rows
  return lax.dynamic_update_slice_in_dim(pair, rows, source * length, 3)

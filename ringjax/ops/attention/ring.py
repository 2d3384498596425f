"""Ring attention: queries stay, keys and values travel around the axis.

Law:   equals `reference` on the gathered sequence, for every layout and every
       mask over coordinates; forward and backward.
Cost:  a full ring of R shards sends K and V R-1 times forward; backward K and
       V R-1 times and the float32 sums dK, dV R times, the last one home.
       Nothing sent is zero or unused. A window sends only as far as it sees.
       Two ways at once (`two_way`) these are ceil((R-1)/2) steps, in each of
       which a link carries a block in either direction.
Memory: the block at hand and the block in flight (two each, two ways at once);
       the backward pass turns the ring again instead of keeping R blocks.
Ref:   Liu et al. 2023, arXiv 2310.01889. With a striped layout this is
       striped attention (Brandon et al. 2023, arXiv 2311.09431).

The send of a hop depends on nothing that the hop computes: K and V leave
before the tiles run, and the sums that came with a block travel on while this
shard computes its own contribution, which is added on arrival. So a compiler
can hide every send but the last one home. K and V are one array where
their head dims agree, as are dK and dV; the coordinates ride along.

The hops are a rolled loop: the program does not grow with R.

A ring's local algorithm may be a ring: `Ring(Ring())` turns a ring of
neighbours for each block that comes around the ring of groups, while the next
such block is in flight. Links between groups then carry a block once and not
once for each neighbour.

Packed documents end somewhere. With `by_document` the shards tell each other,
in each call, which documents they hold, and the ring turns only as far as one
of them reaches: the number of hops is data, the program the same for every
batch. Both passes send K and V, and the backward pass the sums, as often as
there are hops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  Residuals,
)
from ringjax.ops.attention.kv_block import KVBlock, pack, unpack
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.strategy import Strategy, pinned
from ringjax.ops.attention.wire_format import as_wire
from ringjax.ops.mask import Coords, Extent, Mask, extent
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis

# Into so many pieces a shard is cut to see which documents it holds.
_PIECES = 16


@dataclasses.dataclass(frozen=True)
class Ring(Strategy):
  """Pass-KV ring over a local algorithm.

  Attributes:
    local: the algorithm of one hop: `Blockwise()`, `Dense()`, or for two
      levels another `Ring` or a `Gather`.
    axis: the axis; filled in by the functions that take `axis=`.
    hops: (from behind, from ahead), how many shards' keys come along either
      direction of the ring; None is the whole ring.
    unroll: how many hops the loop's body holds; two save the copy that a
      rotating buffer costs in a rolled loop.
    two_way: whether a whole ring turns in both directions at once.
    wire: how keys and values travel: None as they are, "bfloat16", "int8",
      "float8_e4m3fn", "float8_e5m2" or a `WireFormat`. A shard's own keys stay
      exact.
    by_document: whether packed documents cut the hops, see above.
    inner: with a second level on one mesh axis, how many neighbours it spans.
  """

  inside = ("Ring", "Gather")

  hops: tuple[int, int] | None = None
  unroll: int = 2
  two_way: bool = False
  wire: Any = None
  by_document: bool = False
  inner: int | None = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "wire", as_wire(self.wire, self.local))
    nested = hasattr(self.local, "attend")
    hops: Any = self.hops
    if hops is not None and not (
      isinstance(hops, tuple | list)
      and len(hops) == 2
      and all(isinstance(n, int | np.integer) and n >= 0 for n in hops)
    ):
      raise _bad_hops(hops, "None or a pair (from behind, from ahead)")
    if self.by_document and (self.two_way or nested):
      raise OptionError(
        "by_document",
        f"True in {self!r}",
        "one level and one direction at a time",
        "leave two_way and the second level out",
      )
    if self.by_document and self.differentiable:
      raise OptionError(
        "by_document",
        f"True around {self.local!r}",
        "a blockwise algorithm: a loop whose length is data has no gradient",
        "pass local=Blockwise()",
      )

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Ring:
    """This ring on `axis`, cut to the distances that are `needed`."""
    if needed is None or self.hops is not None:
      return dataclasses.replace(self, axis=axis)
    hops = cut_hops(needed, two_way=self.two_way)
    return dataclasses.replace(self, axis=axis, hops=hops)

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """Folds the keys of all shards into `carry`; those begin at `column`."""
    x, context = pinned(x, context)
    size, me = self._place()
    length = self.local.span(x.k.shape[2])

    def fold(carry: Partial, there: Local, seen: Context, distance: Any) -> Any:
      at = column + (me - distance) % size * length
      return self.local.forward(scores, there, terms, seen, at, carry)

    def compute(carry: Partial, visitor: KVBlock, distance: Any) -> Partial:
      return fold(carry, *visitor.seen_by(x, context, self.wire), distance)

    if size == 1:
      return fold(carry, x, context, 0)
    own = KVBlock.of(x, context, self.wire)

    def travel(
      carry: Partial, visitor: KVBlock, first: int, hops: Any, shift: int
    ) -> Partial:
      """Visits the block at hand and those that `hops` hops bring."""

      def hop(n: Any, state: tuple) -> tuple:
        carry, visitor = state
        coming = self._rotate(visitor, shift)
        return compute(carry, visitor, n * shift), coming

      carry, visitor = self._repeat(first, hops, hop, (carry, visitor))
      return compute(carry, visitor, (first + hops) * shift)

    def away(carry: Partial, hops: Any, shift: int) -> Partial:
      """The same without the block at hand."""
      return travel(carry, self._rotate(own, shift), 1, hops - 1, shift)

    if self.by_document:
      carry = fold(carry, x, context, 0)
      for hops, shift in zip(self._reach(context), (1, -1), strict=True):
        carry = lax.cond(
          hops > 0,
          lambda c, hops=hops, shift=shift: away(c, hops, shift),
          lambda c: c,
          carry,
        )
      return carry
    behind, ahead = self._hops()
    if not ahead:
      if self.wire is None:
        return travel(carry, own, 0, behind, 1)
      carry = fold(carry, x, context, 0)
      return away(carry, behind, 1) if behind else carry
    both = min(behind, ahead)
    comings = [self._rotate(own, shift) for shift in (1, -1)]
    if not both:
      carry = fold(carry, x, context, 0)
      return travel(carry, comings[1], 1, ahead - 1, -1)

    def pair(n: Any, state: tuple) -> tuple:
      carry, *visitors = state
      coming = [
        self._rotate(visitor, shift)
        for visitor, shift in zip(visitors, (1, -1), strict=True)
      ]
      carry = compute(carry, visitors[0], n)
      return compute(carry, visitors[1], -n), *coming

    carry = fold(carry, x, context, 0)
    carry, *visitors = self._repeat(1, both - 1, pair, (carry, *comings))
    # The longer way goes on while the last pair is computed.
    shift = 1 if behind >= ahead else -1
    more = abs(behind - ahead)
    longer = visitors[0] if shift == 1 else visitors[1]
    coming = self._rotate(longer, shift) if more else None
    carry = compute(carry, visitors[0], both)
    carry = compute(carry, visitors[1], -both)
    if coming is None:
      return carry
    return travel(carry, coming, both + 1, more - 1, shift)

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
    x, context = pinned(x, context)
    size, me = self._place()
    length = self.local.span(x.k.shape[2])

    def slopes(
      carry: tuple, there: Local, seen: Context, distance: Any
    ) -> tuple[tuple, Any]:
      at = column + (me - distance) % size * length
      grads = self.local.backward(
        scores, there, terms, seen, at, residuals, carry
      )
      return (grads.q, grads.terms), pack(grads.k, grads.v)

    def compute(carry: tuple, visitor: KVBlock, distance: Any) -> Any:
      return slopes(carry, *visitor.seen_by(x, context, self.wire), distance)

    def finish(carry: tuple, sums: Any) -> Gradients:
      dk, dv = unpack(sums)
      return Gradients(carry[0], dk, dv, carry[1])

    own = KVBlock.of(x, context, self.wire)

    def travel(
      carry: tuple, visitor: KVBlock, sums: Any, first: int, hops: Any,
      shift: int,
    ) -> tuple[tuple, Any]:  # fmt: skip
      """Visits the block at hand, whose `sums` are a shard behind, and on."""

      def hop(n: Any, state: tuple) -> tuple:
        carry, visitor, sums = state
        coming = self._rotate(visitor, shift)
        moved = self._rotate(sums, shift, coming)
        carry, more = compute(carry, visitor, n * shift)
        return carry, coming, _add(moved, more)

      state = self._repeat(first, hops, hop, (carry, visitor, sums))
      carry, visitor, sums = state
      moved = self._rotate(sums, shift)
      carry, more = compute(carry, visitor, (first + hops) * shift)
      return carry, _add(moved, more)

    def away(carry: tuple, hops: Any, shift: int) -> tuple[tuple, Any]:
      """Visits what `hops` hops bring, and brings the sums of those home."""
      coming = self._rotate(own, shift)

      def on(state: tuple) -> tuple:
        carry, visitor = state
        onward = self._rotate(visitor, shift)
        carry, sums = compute(carry, visitor, shift)
        return travel(carry, onward, sums, 2, hops - 2, shift)

      def done(state: tuple) -> tuple:
        carry, visitor = state
        return compute(carry, visitor, shift)

      if isinstance(hops, int):
        carry, sums = (on if hops > 1 else done)((carry, coming))
        return carry, self._rotate(sums, -hops * shift)
      carry, sums = lax.cond(hops > 1, on, done, (carry, coming))
      ways = [
        lambda s, n=n: self._rotate(s, -n * shift) for n in range(1, size)
      ]
      return carry, lax.switch(hops - 1, ways, sums)

    if size == 1:
      return finish(*slopes(carry, x, context, 0))
    if self.by_document:
      carry, sums = slopes(carry, x, context, 0)

      def further(state: tuple, hops: Any, shift: int) -> tuple:
        carry, sums = state
        carry, more = away(carry, hops, shift)
        return carry, _add(sums, more)

      state = carry, sums
      for hops, shift in zip(self._reach(context), (1, -1), strict=True):
        state = lax.cond(
          hops > 0,
          lambda s, hops=hops, shift=shift: further(s, hops, shift),
          lambda s: s,
          state,
        )
      return finish(*state)
    behind, ahead = self._hops()
    if ahead:
      return finish(*self._both_ways(carry, x, context, slopes, compute, away))
    if not behind:
      return finish(*slopes(carry, x, context, 0))
    coming = self._rotate(own, 1)
    carry, sums = slopes(carry, x, context, 0)
    carry, sums = travel(carry, coming, sums, 1, behind - 1, 1)
    return finish(carry, self._rotate(sums, -behind))

  def _both_ways(
    self,
    carry: tuple,
    x: Local,
    context: Context,
    slopes: Callable[..., Any],
    compute: Callable[..., Any],
    away: Callable[..., Any],
  ) -> tuple[tuple, Any]:
    """`backward` of keys from behind and from ahead at once."""
    behind, ahead = self._hops()
    both = min(behind, ahead)
    if not both:
      carry, sums = slopes(carry, x, context, 0)
      carry, more = away(carry, ahead, -1)
      return carry, _add(sums, more)
    own = KVBlock.of(x, context, self.wire)
    ways = (1, -1)
    comings = [self._rotate(own, shift) for shift in ways]
    carry, at_home = slopes(carry, x, context, 0)
    shift = 1 if behind >= ahead else -1
    more = abs(behind - ahead)

    def visit(carry: tuple, n: Any, visitors: Any) -> tuple[tuple, list]:
      found = []
      for visitor, way in zip(visitors, ways, strict=True):
        carry, sums = compute(carry, visitor, n * way)
        found.append(sums)
      return carry, found

    def onward(each: Any, after: Any = (None, None)) -> list:
      return [
        self._rotate(x, way, one)
        for x, way, one in zip(each, ways, after, strict=True)
      ]

    def hop(n: Any, state: tuple) -> tuple:
      carry, visitors, sums = state
      coming = onward(visitors)
      moved = onward(sums, coming)
      carry, found = visit(carry, n, visitors)
      return carry, coming, _add(moved, found)

    # The first pair has no sums to take along, the last no shard to go to.
    coming = onward(comings) if both > 1 else comings
    if both > 1:
      carry, sums = visit(carry, 1, comings)
      carry, coming, sums = self._repeat(
        2, both - 2, hop, (carry, coming, sums)
      )
      moved = onward(sums)
    else:
      moved = None
    way = ways.index(shift)
    further = self._rotate(coming[way], shift) if more else None
    carry, sums = visit(carry, both, coming)
    sums = sums if moved is None else _add(moved, sums)
    if further is not None:

      def alone(n: Any, state: tuple) -> tuple:
        carry, visitor, sums = state
        coming = self._rotate(visitor, shift)
        moved = self._rotate(sums, shift, coming)
        carry, found = compute(carry, visitor, n * shift)
        return carry, coming, _add(moved, found)

      state = (carry, further, sums[way])
      state = self._repeat(both + 1, more - 1, alone, state)
      carry, visitor, longer = state
      moved = self._rotate(longer, shift)
      carry, found = compute(carry, visitor, (both + more) * shift)
      sums[way] = _add(moved, found)
    home = [
      self._rotate(s, -n * way)
      for s, n, way in zip(sums, (behind, ahead), ways, strict=True)
    ]
    return carry, _add(at_home, _add(*home))

  def _hops(self) -> tuple[int, int]:
    size = self._place()[0]
    if self.hops is not None:
      behind, ahead = (int(n) for n in self.hops)
      if behind + ahead >= size:
        # A block that came twice would count twice.
        raise _bad_hops(self.hops, f"at most {size - 1} on {size} shards")
      return behind, ahead
    return (size // 2, (size - 1) // 2) if self.two_way else (size - 1, 0)

  def _reach(self, context: Context) -> tuple[jax.Array, jax.Array]:
    """(from behind, from ahead): how far this batch's documents reach."""
    assert self.axis is not None
    size, me = self._place()
    names = tuple(sorted(collectives.manual_axes() | {*self.axes}))
    keys = collectives.gather(_pieces(context.k), self.axis, 1)
    some = _some(context.mask, _pieces(context.q), keys)
    source = jnp.any(some.reshape(size, -1), 1)
    # Entry d: are keys of the shard d places behind wanted here.
    wanted = source[(me - jnp.arange(size, dtype=jnp.int32)) % size]
    wanted = collectives.vary(wanted.astype(jnp.int32), names)
    # All devices of the mesh run the same loops, or they wait for each other.
    wanted = collectives.largest(wanted, names)
    distance = np.arange(size, dtype=np.int32)
    # As `cut_hops`: row n has what is left for behind if n come from ahead.
    left = (size - distance[None]) > distance[:, None]
    behind = jnp.max(jnp.where(left, wanted * distance, 0), 1)
    ahead = jnp.argmin(behind + distance).astype(jnp.int32)
    return behind[ahead], ahead

  def _repeat(self, first: int, times: Any, body: Any, state: Any) -> Any:
    """state of body(n, state) for n = first, ..., `times` of them."""
    if not isinstance(times, int):
      return lax.fori_loop(
        jnp.int32(first), jnp.int32(first) + times, body, state
      )
    if times <= 0:
      return state
    numbers = jnp.arange(first, first + times, dtype=jnp.int32)
    # A loop that turns once is no loop to the compiler, which then sends all
    # blocks before the first is computed with: each hop waits for the last.
    rolled = times >= 2 * self.unroll

    def step(state: Any, n: Any) -> tuple[Any, None]:
      state = state if rolled else lax.optimization_barrier(state)
      return body(n, state), None

    return lax.scan(step, state, numbers, unroll=min(self.unroll, times))[0]

  def _rotate(self, tree: Any, shift: int, after: KVBlock | None = None) -> Any:
    """Sends to the next shard, once the coordinates of `after` have come.

    The next hop begins with coordinates: behind keys and values, or behind
    gradients, on the same link they would come as late as those.
    """
    assert self.axis is not None
    if isinstance(tree, KVBlock):
      at = collectives.rotate(tree.at, self.axis, shift)
      kv, at = lax.optimization_barrier((tree.kv, at))
      return KVBlock(collectives.rotate(kv, self.axis, shift), at)
    if after is not None:
      tree, _ = lax.optimization_barrier((tree, after.at))
    return collectives.rotate(tree, self.axis, shift)


def cut_hops(needed: np.ndarray, *, two_way: bool = False) -> tuple[int, int]:
  """The fewest (from behind, from ahead) hops that bring `needed` shards.

  `needed[d]` says whether the keys of the shard d places behind are wanted.
  `two_way`: hops in both directions count as one.
  """
  size = needed.size
  wanted = [d for d in range(1, size) if needed[d]]
  cost = lambda hops: (max(hops) if two_way else 0, sum(hops))
  best = (size // 2, (size - 1) // 2) if two_way else (size - 1, 0)
  for ahead in range(size):
    behind = max((d for d in wanted if size - d > ahead), default=0)
    if cost((behind, ahead)) < cost(best):
      best = (behind, ahead)
  return best


def _bad_hops(hops: Any, want: str) -> OptionError:
  return OptionError("hops", repr(hops), want, "leave it out: a mask cuts them")


def _pieces(at: Coords) -> Extent:
  """What the pieces [B, n] of a shard's tokens hold."""
  pieces = min(_PIECES, at.pos.shape[1])
  short = -at.pos.shape[1] % pieces
  cut = lambda x: jnp.pad(x, ((0, 0), (0, short))).reshape(
    x.shape[0], pieces, -1
  )
  return extent(Coords(cut(at.pos), cut(at.seg)))


def _some(mask: Mask, q: Extent, k: Extent) -> jax.Array:
  """bool [pieces of k]: does a query of any example see a key of it."""
  rows = jax.tree.map(lambda x: x[:, :, None], q)
  columns = jax.tree.map(lambda x: x[:, None, :], k)
  some = mask.bound(rows, columns)[0] & rows.some & columns.some
  return jnp.any(some, (0, 1))


def _add(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)

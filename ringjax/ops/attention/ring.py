"""Ring attention: queries stay, keys and values travel around the axis.

Law:   equals `reference` on the gathered sequence, for every layout and every
       mask over coordinates; forward and backward.
Cost:  a full ring of R shards sends K and V R-1 times forward; backward K and
       V R-1 times and the float32 sums dK, dV R times, the last one home.
       Nothing sent is zero or unused. A window sends only as far as it sees.
Memory: the block at hand and the block in flight; the backward pass turns the
       ring again instead of keeping R blocks.
Ref:   Liu et al. 2023, arXiv 2310.01889. With a striped layout this is
       striped attention (Brandon et al. 2023, arXiv 2311.09431).

The send of a hop depends on nothing that the hop computes: K and V leave
before the tiles run, and the sums that came with a block travel on while this
shard computes its own contribution, which is added on arrival. So a compiler
can hide every send but the last one home. K and V are one array where
their head dims agree, as are dK and dV; the coordinates ride along.

The hops are a rolled loop: the program does not grow with R.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringjax.ops.attention.attend import (
  attend,
  empty_partial,
  zero_gradients,
)
from ringjax.ops.attention.blockwise import (
  Blockwise,
  Gradients,
  Local,
  Residuals,
)
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives


class Visitor(NamedTuple):
  """Keys and values on their way, in the order of axes of `Local`."""

  kv: Any  # [2, B, K, S, H], or the pair (k, v) where the head dims differ
  at: Any  # int32 [2, B or 1, S], or the pair (pos, seg) where shapes differ

  @classmethod
  def of(cls, x: Local, context: Context) -> Visitor:
    """A shard's own keys."""
    return cls(pack(x.k, x.v), pack(*context.k))

  def seen_by(self, x: Local, context: Context) -> tuple[Local, Context]:
    """The operands and the context of a shard's queries over these keys."""
    k, v = unpack(self.kv)
    return Local(x.q, k, v), context._replace(k=Coords(*unpack(self.at)))


def pack(a: jax.Array, b: jax.Array) -> Any:
  """One array to send where that is possible, else the pair."""
  return jnp.stack([a, b]) if a.shape == b.shape else (a, b)


def unpack(packed: Any) -> tuple[jax.Array, jax.Array]:
  return packed[0], packed[1]


@dataclasses.dataclass(frozen=True)
class Ring:
  """Pass-KV ring over a local algorithm.

  Attributes:
    local: the algorithm of one hop, `Blockwise()` or `Dense()`.
    axis: the mesh axis; filled in by the functions that take `axis=`.
    hops: (from behind, from ahead), how many shards' keys come along either
      direction of the ring; None is the whole ring, from behind.
    unroll: how many hops the loop's body holds; two save the copy that a
      rotating buffer costs in a rolled loop.
  """

  local: Any = Blockwise()
  axis: str | None = None
  hops: tuple[int, int] | None = None
  unroll: int = 2

  def on(self, axis: str | None, needed: np.ndarray | None) -> Ring:
    """This ring on `axis`, cut to the distances that are `needed`."""
    hops = None if needed is None else cut_hops(needed)
    return dataclasses.replace(self, axis=axis, hops=hops)

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    return attend(self, scores, x, terms, context)

  def forward(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> Partial:
    x, context = _pin(x, context)
    size, me = self._place()
    behind, ahead = self._hops()
    own = Visitor.of(x, context)
    length = x.k.shape[2]

    def compute(carry: Partial, visitor: Visitor, distance: Any) -> Partial:
      source = (me - distance) % size
      there, seen = visitor.seen_by(x, context)
      return self.local.forward(
        scores, there, terms, seen, source * length, carry
      )

    def travel(
      carry: Partial, visitor: Visitor, first: int, hops: int, shift: int
    ) -> Partial:
      def hop(state: tuple, n: jax.Array) -> tuple:
        carry, visitor = state
        coming = self._rotate(visitor, shift)
        return (compute(carry, visitor, n * shift), coming), None

      numbers = jnp.arange(first, first + hops, dtype=jnp.int32)
      if hops:
        (carry, visitor), _ = lax.scan(
          hop, (carry, visitor), numbers, unroll=min(self.unroll, hops)
        )
      return compute(carry, visitor, (first + hops) * shift)

    ahead_of_us = self._rotate(own, -1) if ahead else None
    carry = travel(empty_partial(x), own, 0, behind, 1)
    if ahead_of_us is not None:
      carry = travel(carry, ahead_of_us, 1, ahead - 1, -1)
    return carry

  def backward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    residuals: Residuals,
  ) -> Gradients:
    x, context = _pin(x, context)
    size, me = self._place()
    behind, ahead = self._hops()
    own = Visitor.of(x, context)
    length = x.k.shape[2]

    def compute(
      carry: tuple, visitor: Visitor, distance: Any
    ) -> tuple[tuple, Any]:
      source = (me - distance) % size
      there, seen = visitor.seen_by(x, context)
      grads = self.local.backward(
        scores, there, terms, seen, source * length, residuals, carry
      )
      return (grads.q, grads.terms), pack(grads.k, grads.v)

    def travel(
      carry: tuple, visitor: Visitor, first: int, blocks: int, shift: int
    ) -> tuple[tuple, Any]:
      """Visits `blocks` blocks; returns the sums of the last, not yet home."""
      coming = self._rotate(visitor, shift) if blocks > 1 else visitor
      carry, sums = compute(carry, visitor, first * shift)

      def hop(state: tuple, n: jax.Array) -> tuple:
        carry, visitor, sums = state
        coming = self._rotate(visitor, shift)
        moved = self._rotate(sums, shift)
        carry, more = compute(carry, visitor, n * shift)
        return (carry, coming, _add(moved, more)), None

      middle = max(blocks - 2, 0)
      numbers = jnp.arange(first + 1, first + 1 + middle, dtype=jnp.int32)
      state = (carry, coming, sums)
      if middle:
        state, _ = lax.scan(
          hop, state, numbers, unroll=min(self.unroll, middle)
        )
      carry, visitor, sums = state
      if blocks > 1:
        moved = self._rotate(sums, shift)
        carry, more = compute(carry, visitor, (first + blocks - 1) * shift)
        sums = _add(moved, more)
      return carry, sums

    ahead_of_us = self._rotate(own, -1) if ahead else None
    carry = zero_gradients(x, terms, residuals.lse.dtype)
    carry, sums = travel(carry, own, 0, behind + 1, 1)
    sums = self._rotate(sums, -behind) if behind else sums
    if ahead_of_us is not None:
      carry, more = travel(carry, ahead_of_us, 1, ahead, -1)
      sums = _add(sums, self._rotate(more, ahead))
    dk, dv = unpack(sums)
    return Gradients(carry[0], dk, dv, carry[1])

  def _place(self) -> tuple[int, Any]:
    if self.axis is None:
      return 1, 0
    return (
      collectives.axis_size(self.axis),
      collectives.axis_index(self.axis),
    )

  def _hops(self) -> tuple[int, int]:
    size = self._place()[0]
    return (size - 1, 0) if self.hops is None else self.hops

  def _rotate(self, tree: Any, shift: int) -> Any:
    assert self.axis is not None
    return collectives.rotate(tree, self.axis, shift)


def cut_hops(needed: np.ndarray) -> tuple[int, int]:
  """The fewest (from behind, from ahead) hops that bring `needed` shards.

  `needed[d]` says whether the keys of the shard d places behind are wanted.
  """
  size = needed.size
  wanted = [d for d in range(1, size) if needed[d]]
  best = (size - 1, 0)
  for ahead in range(size):
    behind = max((d for d in wanted if size - d > ahead), default=0)
    if behind + ahead < sum(best):
      best = (behind, ahead)
  return best


def _add(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def _pin(x: Local, context: Context) -> tuple[Local, Context]:
  # Coordinates do not depend on data, so a remat pass would compute the masks
  # of all hops ahead of the loop and keep them: R tiles x T x S of booleans.
  q, q_at, k_at = lax.optimization_barrier((x.q, context.q, context.k))
  return x._replace(q=q), context._replace(q=q_at, k=k_at)

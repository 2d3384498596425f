"""All hops of one shard in turn, on one device, with nothing to send.

Law: equals the local algorithm over all keys at once. It is what a shard of a
ring computes, so checks and measurements of kernels need no second device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringjax.ops.attention.blockwise import Gradients, Local, Residuals
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial


@dataclasses.dataclass(frozen=True)
class InTurn:
  """A local algorithm over keys that are cut in equal parts.

  Attributes:
    local: the local algorithm.
    hops: how many parts, a divisor of the keys.
  """

  local: Any
  hops: int

  # Reverse mode goes through `backward`.
  differentiable = False
  # It moves nothing.
  axes = ()

  def span(self, keys: int) -> int:
    return keys

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """See `Blockwise.forward`."""

    def hop(carry: Partial, part: Any) -> tuple[Partial, None]:
      there, seen, at = self._visit(x, context, column, part)
      return self.local.forward(scores, there, terms, seen, at, carry), None

    return lax.scan(hop, carry, self._parts(x, context))[0]

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
    """See `Blockwise.backward`."""

    def hop(carry: tuple, part: Any) -> tuple[tuple, tuple]:
      there, seen, at = self._visit(x, context, column, part)
      found = self.local.backward(
        scores, there, terms, seen, at, residuals, carry
      )
      return (found.q, found.terms), (found.k, found.v)

    (dq, dterms), (dk, dv) = lax.scan(hop, carry, self._parts(x, context))
    join = lambda d, like: jnp.moveaxis(d, 0, 2).reshape(like.shape)
    return Gradients(dq, join(dk, x.k), join(dv, x.v), dterms)

  def _parts(self, x: Local, context: Context) -> Any:
    """What the hops bring: (number, k, v, coordinates)."""

    def cut(a: jax.Array, axis: int) -> jax.Array:
      shape = (*a.shape[:axis], self.hops, -1, *a.shape[axis + 1 :])
      return jnp.moveaxis(a.reshape(shape), axis, 0)

    at = Coords(*(cut(c, 1) for c in context.k))
    number = jnp.arange(self.hops, dtype=jnp.int32)
    return number, cut(x.k, 2), cut(x.v, 2), at

  def _visit(
    self, x: Local, context: Context, column: Any, part: Any
  ) -> tuple[Local, Context, Any]:
    number, k, v, at = part
    there = column + number * k.shape[2]
    return Local(x.q, k, v), context._replace(k=at), there

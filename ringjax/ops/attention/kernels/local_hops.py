"""Run all hops of a shard on one device, one after another, without sends.

Guarantees: equals the local algorithm over all keys at once. It is what a
shard of a ring computes, so that checks and benchmarks of kernels need no
second device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  LocalAlgorithm,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial


@dataclasses.dataclass(frozen=True)
class LocalHops(LocalAlgorithm):
  """A local algorithm over keys that are split into equal parts.

  Attributes:
    local: Local algorithm of each hop.
    hops: Number of parts, a divisor of the number of keys.
  """

  local: Any
  hops: int

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold all hops' keys into `carry`; see `Blockwise.forward`."""

    def hop(carry: Partial, part: PyTree) -> tuple[Partial, None]:
      return self.local.forward(*self._operands(x, args, part), carry), None

    return lax.scan(hop, carry, self._parts(x, args))[0]

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Gradients of all hops' keys; see `Blockwise.backward`."""

    def hop(carry: tuple, part: PyTree) -> tuple[tuple, tuple]:
      operands = self._operands(x, args, part)
      gradients = self.local.backward(*operands, residuals, carry)
      return (gradients.q, gradients.terms), (gradients.k, gradients.v)

    (dq, dterms), (dk, dv) = lax.scan(hop, carry, self._parts(x, args))
    merge_hops = lambda d, like: jnp.moveaxis(d, 0, 2).reshape(like.shape)
    return Gradients(dq, merge_hops(dk, x.k), merge_hops(dv, x.v), dterms)

  def _parts(self, x: Local, args: ScoreArgs) -> PyTree:
    """Split the keys by hop: (index, k, v, coordinates)."""

    def split_hops(a: jax.Array, axis: int) -> jax.Array:
      shape = (*a.shape[:axis], self.hops, -1, *a.shape[axis + 1 :])
      return jnp.moveaxis(a.reshape(shape), axis, 0)

    at = Coords(*(split_hops(c, 1) for c in args.context.k))
    index = jnp.arange(self.hops, dtype=jnp.int32)
    return index, split_hops(x.k, 2), split_hops(x.v, 2), at

  def _operands(
    self, x: Local, args: ScoreArgs, part: PyTree
  ) -> tuple[Local, ScoreArgs]:
    hop_index, k, v, at = part
    column = args.column + hop_index * k.shape[2]
    return Local(x.q, k, v), args.of_keys(at, column)

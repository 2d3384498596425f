"""All-gather attention: every shard gets all keys, then attends alone.

Law:  equals `reference` on the gathered sequence.
Cost: one all-gather of K and V forward; backward another one, and one
      reduce-scatter of float32 dK, dV. At short shards on fast links this
      beats a ring: one large message instead of R-1 small ones.
Memory: K and V of the whole sequence, while the call lasts.
Ref:  Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  Residuals,
)
from ringjax.ops.attention.kv_block import KVBlock, pack, unpack
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.strategy import Strategy
from ringjax.ops.attention.wire_format import as_wire
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives


@dataclasses.dataclass(frozen=True)
class Gather(Strategy):
  """All-gather of keys and values around a local algorithm.

  Attributes:
    local: `Blockwise()` or `Dense()`.
    axis: the axis; None attends to the keys at hand (one device).
    wire: how keys and values travel, as in `Ring`; a shard's own too.
  """

  wire: Any = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "wire", as_wire(self.wire, self.local))

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """Folds the keys of all shards into `carry`."""
    x, context = self._all_keys(x, context)
    return self.local.forward(scores, x, terms, context, column, carry)

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
    x, context = self._all_keys(x, context)
    grads = self.local.backward(
      scores, x, terms, context, column, residuals, carry
    )
    if self.axis is None:
      return grads
    sums = pack(grads.k, grads.v)
    dimension = 3 if isinstance(sums, jax.Array) else 2
    dk, dv = unpack(collectives.scatter_sum(sums, self.axis, dimension))
    return grads._replace(k=dk, v=dv)

  def _all_keys(self, x: Local, context: Context) -> tuple[Local, Context]:
    if self.axis is None:
      return x, context
    own = KVBlock.of(x, context, self.wire)
    dimension = 3 if x.k.shape == x.v.shape else 2
    every = KVBlock(
      collectives.gather(own.kv, self.axis, dimension),
      collectives.gather(own.at, self.axis, own.axis_of_tokens),
    )
    return every.seen_by(x, context, self.wire)

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
import numpy as np

from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import (
  Blockwise,
  Gradients,
  Local,
  Residuals,
)
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.visitor import Visitor, pack, unpack
from ringjax.ops.attention.wire import as_wire
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis


@dataclasses.dataclass(frozen=True)
class Gather:
  """All-gather of keys and values around a local algorithm.

  Attributes:
    local: `Blockwise()` or `Dense()`.
    axis: the axis; None attends to the keys at hand (one device).
    wire: how keys and values travel, as in `Ring`; a shard's own too.
  """

  local: Any = Blockwise()
  axis: Axis | None = None
  wire: Any = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "wire", as_wire(self.wire, self.local))

  @property
  def axes(self) -> tuple[str, ...]:
    return (*collectives.names(self.axis), *self.local.axes)

  @property
  def differentiable(self) -> bool:
    return self.local.differentiable

  def span(self, keys: int) -> int:
    """How many keys a call sees whose operands hold `keys`."""
    keys = self.local.span(keys)
    return (
      keys if self.axis is None else keys * collectives.axis_size(self.axis)
    )

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Gather:
    del needed
    return dataclasses.replace(self, axis=axis)

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    return attend(self, scores, x, terms, context)

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
    own = Visitor.of(x, context, self.wire)
    dimension = 3 if x.k.shape == x.v.shape else 2
    every = Visitor(
      collectives.gather(own.kv, self.axis, dimension),
      collectives.gather(own.at, self.axis, own.axis_of_tokens),
    )
    return every.seen_by(x, context, self.wire)

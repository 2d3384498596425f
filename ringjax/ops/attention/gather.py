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
from ringjax.ops.attention.ring import pack, unpack
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives


@dataclasses.dataclass(frozen=True)
class Gather:
  """All-gather of keys and values around a local algorithm.

  Attributes:
    local: `Blockwise()` or `Dense()`.
    axis: the mesh axis; None attends to the keys at hand (one device).
  """

  local: Any = Blockwise()
  axis: str | None = None

  def on(self, axis: str | None, needed: np.ndarray | None) -> Gather:
    del needed
    return dataclasses.replace(self, axis=axis)

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    return attend(self, scores, x, terms, context)

  def forward(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> Partial:
    x, context = self._all_keys(x, context)
    return self.local.forward(scores, x, terms, context, 0, empty_partial(x))

  def backward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    residuals: Residuals,
  ) -> Gradients:
    x, context = self._all_keys(x, context)
    zero = zero_gradients(x, terms, residuals.lse.dtype)
    grads = self.local.backward(scores, x, terms, context, 0, residuals, zero)
    if self.axis is None:
      return grads
    sums = pack(grads.k, grads.v)
    dimension = 3 if isinstance(sums, jax.Array) else 2
    dk, dv = unpack(collectives.scatter_sum(sums, self.axis, dimension))
    return grads._replace(k=dk, v=dv)

  def _all_keys(self, x: Local, context: Context) -> tuple[Local, Context]:
    if self.axis is None:
      return x, context
    kv = pack(x.k, x.v)
    dimension = 3 if isinstance(kv, jax.Array) else 2
    k, v = unpack(collectives.gather(kv, self.axis, dimension))
    k_at = Coords(*collectives.gather(tuple(context.k), self.axis, 1))
    return Local(x.q, k, v), context._replace(k=k_at)

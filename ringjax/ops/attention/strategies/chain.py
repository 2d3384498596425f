"""Chain attention: keys are sent to later shards only, never around a ring.

Guarantees: equals `reference` on the gathered sequence for masks under which
no query sees a key of a later shard; forward and backward.
Cost: R (R - 1) / 2 sends of one shard's K and V in all, half of a ring's: in
step t shard i gets the keys of shard i - t from shard i - 1, and only shards t
to R - 1 get any. Backward as many of K and V, as many of the sums dK and dV,
and R - 1 that take sums to their owners. A window sends only as far as it sees.
Nothing sent is zero.
Memory: the current block and the block in flight.
Ref: Cho et al. 2024, KV-Runahead, arXiv 2405.05329; there a shard sends all
that it has seen as one growing prefix, which is the same rows.

With an `Uneven` layout whose first counts are the larger ones all shards have
as much to do, and the first, which gets no keys, may run ahead if devices are
not in step. The steps differ in which shards send, so they are not a loop like
the hops of a ring: the program grows with R.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.attention.strategies.kv_block import KVBlock, KVStrategy
from ringjax.ops.attention.strategies.wire_format import WireLike, pack, unpack
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.parallel.layout import Contiguous, Layout, Uneven


@dataclasses.dataclass(frozen=True)
class Chain(KVStrategy):
  """Pass-KV chain over a local algorithm.

  Attributes:
    local: Algorithm of one step, `Blockwise()` or `Dense()`.
    axis: Mesh axis; filled in by the functions that take `axis=`.
    steps: Number of earlier shards whose keys a shard gets; None: all.
    wire: Wire format of keys and values, as in `Ring`.
  """

  layouts: ClassVar[tuple[type[Layout], ...]] = (Contiguous, Uneven)

  steps: int | None = None
  wire: WireLike | None = None

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Chain:
    """Bind to `axis`, restricted to the distances that are `needed`."""
    steps = None if needed is None else int(np.flatnonzero(needed).max())
    return dataclasses.replace(self, axis=axis, steps=steps)

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Chain:
    """Check that the chain serves a mask, and return it unchanged.

    `derived`: whether queries and keys are the same tokens, at the same places.

    Raises:
      OptionError: If a query may see a key of a later shard.
    """
    keys_after = mask.reach[1]
    if keys_after is None or keys_after > 0:
      raise OptionError(
        "strategy",
        f"a chain with the mask {mask}",
        "a mask that sees nothing ahead, such as Causal()",
        "pass is_causal=True, or strategy='ring'",
      )
    remedy = "layout=Contiguous() or Uneven(counts)"
    self._check_consecutive(layout, derived, remedy)
    return self

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys of the shards up to this one into `carry`."""
    size, steps = self._place()[0], self._steps()
    block = KVBlock.of(x, args.context, self._wire)
    for t in range(steps + 1):
      incoming = self._send(block, t + 1, size) if t < steps else block
      operands = self._operands(x, args, block if t else None, t)
      carry = self.local.forward(*operands, carry)
      block = incoming
    return carry

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of a shard's own keys to `carry`, (dq, dterms)."""
    size, steps = self._place()[0], self._steps()
    # Without the barrier a compiler merges these sends with those of the
    # forward pass, and keeps the blocks that they brought until now.
    block = lax.optimization_barrier(KVBlock.of(x, args.context, self._wire))
    sums = None
    total: Any = None
    for t in range(steps + 1):
      incoming = self._send(block, t + 1, size) if t < steps else block
      moved_sums = self._send(sums, t, size) if t else None
      operands = self._operands(x, args, block if t else None, t)
      grads = self.local.backward(*operands, residuals, carry)
      carry = grads.q, grads.terms
      kv_grads = pack(grads.k, grads.v)
      sums = (
        kv_grads
        if moved_sums is None
        else jax.tree.map(jnp.add, moved_sums, kv_grads)
      )
      # The last shard that gets a block has its complete sums.
      complete = range(steps, size) if t == steps else range(size - 1, size)
      total = self._to_owners(total, sums, t, complete)
      block = incoming
    dk, dv = unpack(total)
    return Gradients(carry[0], dk, dv, carry[1])

  def _to_owners(
    self, total: PyTree, sums: PyTree, t: int, complete: range
  ) -> PyTree:
    """Add the sums of the shards `complete` to those at their owners."""
    if t == 0:
      complete_here = self._place()[1] >= complete.start
      return jax.tree.map(
        lambda s: jnp.where(complete_here, s, jnp.zeros_like(s)), sums
      )
    assert self.axis is not None
    returned = collectives.send(sums, self.axis, [(i, i - t) for i in complete])
    return jax.tree.map(jnp.add, total, returned)

  def _send(self, tree: PyTree, t: int, size: int) -> PyTree:
    """Send to the next shard, if that one gets anything in step t."""
    assert self.axis is not None
    pairs = [(i - 1, i) for i in range(t, size)]
    return collectives.send(tree, self.axis, pairs)

  def _steps(self) -> int:
    max_steps = self._place()[0] - 1
    return max_steps if self.steps is None else min(self.steps, max_steps)

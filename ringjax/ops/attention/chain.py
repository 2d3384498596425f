"""Chain attention: keys go from each shard to those behind it, never around.

Law:   equals `reference` on the gathered sequence for masks under which no
       query sees a key of a later shard; forward and backward.
Cost:  R (R - 1) / 2 sends of one shard's K and V in all, half of a ring's: in
       step t shard i gets the keys of shard i - t from shard i - 1, and only
       shards t to R - 1 get any. Backward as many of K and V, of the sums dK
       and dV too, and R - 1 that take sums home. A window sends only as far
       as it sees. Nothing sent is zero.
Memory: the block at hand and the block in flight.
Ref:   Cho et al. 2024, KV-Runahead, arXiv 2405.05329; there a shard sends all
       that it has seen as one growing prefix, which is the same rows.

With an `Uneven` layout whose first counts are the larger ones all shards have
as much to do, and the first, which waits for nobody, may run ahead where
devices run apart. The steps differ in who sends, so they are not a loop: the
program grows with R.
"""

from __future__ import annotations

import dataclasses
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
from ringjax.ops.attention.strategy import Strategy
from ringjax.ops.attention.wire_format import as_wire
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.parallel.layout import Contiguous, Layout, Uneven


@dataclasses.dataclass(frozen=True)
class Chain(Strategy):
  """Pass-KV chain over a local algorithm.

  Attributes:
    local: the algorithm of one step, `Blockwise()` or `Dense()`.
    axis: the axis; filled in by the functions that take `axis=`.
    steps: from how many shards before it a shard gets keys; None is all.
    wire: how keys and values travel, as in `Ring`.
  """

  steps: int | None = None
  wire: Any = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "wire", as_wire(self.wire, self.local))

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Chain:
    """This chain on `axis`, cut to the distances that are `needed`."""
    steps = None if needed is None else int(np.flatnonzero(needed).max())
    return dataclasses.replace(self, axis=axis, steps=steps)

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Chain:
    """This chain.

    `derived`: queries and keys are the same tokens, where the layout has them.

    Raises:
      OptionError: a query may see a key of a later shard.
    """
    ahead = mask.reach[1]
    if ahead is None or ahead > 0:
      raise OptionError(
        "strategy",
        f"a chain with the mask {mask}",
        "a mask that sees nothing ahead, such as Causal()",
        "pass is_causal=True, or strategy='ring'",
      )
    if not derived or not isinstance(layout, Contiguous | Uneven):
      how = (
        f"the layout {layout}"
        if derived
        else ("positions of your own, or keys of another length")
      )
      raise OptionError(
        "strategy",
        f"a chain with {how}",
        "consecutive tokens on consecutive shards",
        "pass layout=Contiguous() or Uneven(counts), or strategy='ring'",
      )
    return self

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """Folds the keys of the shards up to this one into `carry`."""
    size, me = self._place()
    steps = self._steps(size)
    length = x.k.shape[2]
    visitor = KVBlock.of(x, context, self.wire)
    for t in range(steps + 1):
      coming = self._send(visitor, t + 1, size) if t < steps else visitor
      there, seen = self._seen(visitor, t, x, context)
      at = column + (me - t) % size * length
      carry = self.local.forward(scores, there, terms, seen, at, carry)
      visitor = coming
    return carry

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
    steps = self._steps(size)
    length = x.k.shape[2]
    # Else a compiler takes these sends for those of the forward pass, and keeps
    # what those brought until now.
    visitor = lax.optimization_barrier(KVBlock.of(x, context, self.wire))
    sums: Any = None
    home: Any = None
    for t in range(steps + 1):
      coming = self._send(visitor, t + 1, size) if t < steps else visitor
      moved = self._send(sums, t, size) if t else None
      there, seen = self._seen(visitor, t, x, context)
      at = column + (me - t) % size * length
      grads = self.local.backward(
        scores, there, terms, seen, at, residuals, carry
      )
      carry = grads.q, grads.terms
      more = pack(grads.k, grads.v)
      sums = more if moved is None else jax.tree.map(jnp.add, moved, more)
      # Who has no one behind it has the whole sums of the block at hand.
      done = range(steps, size) if t == steps else (size - 1,)
      home = self._home(home, sums, t, tuple(done), me)
      visitor = coming
    dk, dv = unpack(home)
    return Gradients(carry[0], dk, dv, carry[1])

  def _seen(
    self, visitor: KVBlock, t: int, x: Local, context: Context
  ) -> tuple[Local, Context]:
    """What is at hand in step t; a shard's own keys stay exact."""
    if t == 0 and self.wire is not None:
      return x, context
    return visitor.seen_by(x, context, self.wire)

  def _home(
    self, home: Any, sums: Any, t: int, done: tuple[int, ...], me: Any
  ) -> Any:
    """Adds what the shards `done` hold to the sums at their owners."""
    if t == 0:
      mine = me >= done[0]
      return jax.tree.map(lambda s: jnp.where(mine, s, jnp.zeros_like(s)), sums)
    assert self.axis is not None
    pairs = [(i, i - t) for i in done]
    back = collectives.send(sums, self.axis, pairs)
    return jax.tree.map(jnp.add, home, back)

  def _send(self, tree: Any, t: int, size: int) -> Any:
    """One step down the chain, to those who get anything in step t."""
    assert self.axis is not None
    pairs = [(i - 1, i) for i in range(t, size)]
    return collectives.send(tree, self.axis, pairs)

  def _steps(self, size: int) -> int:
    return size - 1 if self.steps is None else min(self.steps, size - 1)

"""All-gather attention: every shard gets all keys, then attends alone.

Guarantees: equals `reference` on the gathered sequence.
Cost: one all-gather of K and V forward; backward another one, and one
reduce-scatter of float32 dK, dV. At short shards on fast links this beats a
ring: one large message instead of R-1 small ones.
Memory: K and V of the whole sequence, while the call lasts.
Ref: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import dataclasses

import jax

from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.attention.strategies.kv_block import KVBlock, KVStrategy
from ringjax.ops.attention.strategies.wire_format import WireLike, pack, unpack
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives


@dataclasses.dataclass(frozen=True)
class Gather(KVStrategy):
  """All-gather of keys and values around a local algorithm.

  Attributes:
    local: `Blockwise()` or `Dense()`.
    axis: Mesh axis; None attends to the local keys (one device).
    wire: Wire format of keys and values, as in `Ring`; of a shard's own too.
  """

  wire: WireLike | None = None

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys of all shards into `carry`."""
    x, args = self._all_keys(x, args)
    return self.local.forward(x, args, carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of a shard's own keys to `carry`, (dq, dterms)."""
    x, args = self._all_keys(x, args)
    grads = self.local.backward(x, args, residuals, carry)
    if self.axis is None:
      return grads
    sums = pack(grads.k, grads.v)
    dimension = 3 if isinstance(sums, jax.Array) else 2
    dk, dv = unpack(collectives.scatter_sum(sums, self.axis, dimension))
    return grads._replace(k=dk, v=dv)

  def _all_keys(self, x: Local, args: ScoreArgs) -> tuple[Local, ScoreArgs]:
    """Operands of a shard's queries over the keys of all shards."""
    if self.axis is None:
      return x, args
    own_block, dimension = KVBlock.with_axis(x, args.context, self._wire)
    all_blocks = KVBlock(
      collectives.gather(own_block.kv, self.axis, dimension),
      collectives.gather(own_block.at, self.axis, own_block.axis_of_tokens),
    )
    return all_blocks.seen_by(x, args, args.column, self._wire)

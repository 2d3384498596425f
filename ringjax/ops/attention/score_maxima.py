"""Largest scores of queries, by the tiles of attention without its values.

Guarantees: of each query and head the maximum of scale q . k over the keys that
it may see, exactly, however keys are sharded; -inf where it sees none. Terms
that attention adds to the product, its soft cap and sinks are left out.
Cost: the first of the two products of attention's forward pass.
Memory: tiles of scores, nothing T x S.

The keys travel around a ring, so that each shard folds all of them into one
maximum: merging partial results would weigh them instead.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Blockwise, Keys, product
from ringjax.ops.attention.execution import run
from ringjax.ops.attention.scores import ScoreTile
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.softmax import Partial
from ringjax.parallel.call_sharding import CallSharding


@dataclasses.dataclass(frozen=True)
class _MaximumFold(Blockwise):
  """`Blockwise` whose log-sum-exp is the maximum, and which reads no value."""

  def fold(
    self,
    tile: ScoreTile,
    keys: Keys,
    q: Shaped[Array, "B K G q H"],
    carry: Partial,
    masked: bool,
  ) -> Partial:
    dot = product("bkgqh,bkht->bkgqt", q, tile.cut_k(keys.k, 3))
    s, _ = tile.scores_of(dot)
    if masked:
      s = jnp.where(tile.allowed(), s, -jnp.inf)
    m = jnp.maximum(carry.m, jnp.max(s, -1))
    # The logarithm of 1 is added to the maximum, that of 0 to none.
    return Partial(carry.acc, m, (m != -jnp.inf).astype(m.dtype))


def score_maxima(
  x: AttentionArgs, place: CallSharding
) -> Float[Array, "B T N"]:
  """Maximum of each query's scores, which has no gradient.

  Args:
    x: Checked arguments of a call, whose values are not read; with `up` its
      keys are rows of latents.
    place: Sharding of the arguments.
  """
  x = jax.lax.stop_gradient(x)
  if x.up is not None:
    x = x.up_projected()
  # Attention sums values, and here there is nothing to sum.
  values = jnp.zeros((*x.k.shape[:3], 1), x.k.dtype)
  return run(
    dataclasses.replace(x, v=values), place, Ring(_MaximumFold()), True
  )[1]

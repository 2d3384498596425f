"""A ring that keeps visiting keys: each shard the tokens that a plan gives it.

Guarantees: attention as by `Ring`; beside it each shard's slots hold the keys
and values that the plan puts there, whichever shard computed them.
Cost: what a whole ring sends, and nothing for the keys that are kept: a block
is written while it is at hand. A window does not cut the ring, since every
token has to pass every shard. The plan is data: another compiles nothing.
Memory: as `Ring`, and the slots, which are written in place.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 4.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.code_format import as_stored
from ringjax.ops.attention.kv_block import KVBlock
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.softmax import Partial
from ringjax.typing import Index


class LayerSlots(NamedTuple):
  """Where a shard keeps keys and values of layers of one kind.

  Fields:
    k: [L, B, K, S, H], S slots of this shard; or with zeros behind a key.
    v: [L, B, K, S, J], the same of values.
  """

  k: Shaped[Array, "L B K S _"]
  v: Shaped[Array, "L B K S _"]


@dataclasses.dataclass(frozen=True)
class RetainingRing(Ring):
  """A ring whose visits are kept; forward only, one level, keys as they are."""

  def retain(
    self,
    x: Local,
    args: ScoreArgs,
    slots: LayerSlots,
    layer: Index,
    place: Int[Array, "B T"],
  ) -> tuple[Partial, LayerSlots]:
    """Per shard: the partial of its queries, and its slots with their tokens.

    Args:
      x: queries, keys and values of the shard's tokens.
      args: what scores depend on beside them.
      slots: of this shard.
      layer: int32 [], which of the L.
      place: the slot of each token among those of all shards, in the order of
        the shards; -1 keeps it nowhere. The same on all shards, T all tokens.
    """
    size, me = self._place()
    length, own = x.k.shape[2], slots.k.shape[3]
    whole = dataclasses.replace(self, hops=(size - 1, 0))

    def keep(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
      row = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
      new = jnp.swapaxes(as_stored(new, old), 1, 2).astype(old.dtype)
      return old.at[layer, row, :, at].set(new, mode="drop")

    def visit(
      carry: tuple[Partial, LayerSlots], block: KVBlock | None, distance: Index
    ) -> tuple[tuple[Partial, LayerSlots], None]:
      partial, held = carry
      here, context = self._operands(x, args, block, distance)
      first = jnp.asarray(self._source(distance) * length, jnp.int32)
      at = lax.dynamic_slice_in_dim(place, first, length, 1) - me * own
      # Numbers below 0 would count from the end.
      at = jnp.where((at >= 0) & (at < own), at, own)
      held = LayerSlots(keep(held.k, here.k, at), keep(held.v, here.v, at))
      return (self.local.forward(here, context, partial), held), None

    carry: Any = (empty_partial(x), slots)
    block = KVBlock.of(x, args.context)
    return whole._walk(whole._lanes(), block, carry, visit)[0]

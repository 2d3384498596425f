"""Ring attention that stores the keys it visits in slots chosen by a plan.

Guarantees: attention as by `Ring`; in addition each shard's slots hold the keys
and values that the plan puts there, whichever shard computed them.
Cost: the sends of a whole ring, and none for the keys that are kept: a block is
written while it is on the shard. A window does not cut the ring, since every
token has to pass every shard. The plan is data: another one compiles nothing.
Memory: as `Ring`, and the slots, which are written in place.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 4.1.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.cached.code_format import as_stored
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.attention.strategies.kv_block import KVBlock
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.softmax import Partial
from ringjax.typing import Index


class LayerSlots(NamedTuple):
  """A shard's slots for keys and values of layers of one kind.

  Fields:
    k: Keys, [L, B, K, S, H], S slots of this shard; possibly padded with zeros.
    v: Values in the same layout, [L, B, K, S, J].
  """

  k: Shaped[Array, "L B K S _"]
  v: Shaped[Array, "L B K S _"]


@dataclasses.dataclass(frozen=True)
class RetainingRing(Ring):
  """A ring that keeps visited keys; forward only, one level, keys uncoded."""

  def retain(
    self,
    x: Local,
    args: ScoreArgs,
    slots: LayerSlots,
    layer: Index,
    place: Int[Array, "B T"],
  ) -> tuple[Partial, LayerSlots]:
    """Attend per shard, and write visited tokens into the shard's slots.

    Args:
      x: Queries, keys and values of the shard's tokens.
      args: Score function and its arrays.
      slots: Slots of this shard.
      layer: Index of the layer in the L, int32 [].
      place: Slot of each token among those of all shards, in the order of the
        shards, int32 [B, T]; -1 keeps it nowhere. The same on all shards, T all
        tokens.

    Returns:
      The partial of the shard's queries, and the updated slots.
    """
    size, shard = self._place()
    length, shard_slots = x.k.shape[2], slots.k.shape[3]
    full_ring = dataclasses.replace(self, hops=(size - 1, 0))

    def keep(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
      row = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
      new = jnp.swapaxes(as_stored(new, old), 1, 2).astype(old.dtype)
      return old.at[layer, row, :, at].set(new, mode="drop")

    def visit(
      carry: tuple[Partial, LayerSlots], block: KVBlock | None, distance: Index
    ) -> tuple[tuple[Partial, LayerSlots], None]:
      partial, kept_slots = carry
      operands, context = self._operands(x, args, block, distance)
      first = jnp.asarray(self._source(distance) * length, jnp.int32)
      slot = (
        lax.dynamic_slice_in_dim(place, first, length, 1) - shard * shard_slots
      )
      # Negative indices would count from the end.
      slot = jnp.where((slot >= 0) & (slot < shard_slots), slot, shard_slots)
      kept_slots = LayerSlots(
        keep(kept_slots.k, operands.k, slot),
        keep(kept_slots.v, operands.v, slot),
      )
      return (self.local.forward(operands, context, partial), kept_slots), None

    carry = (empty_partial(x), slots)
    block = KVBlock.of(x, args.context)
    return full_ring._walk(full_ring._lanes(), block, carry, visit)[0]

"""Slots of rows whose new tokens are stored on each row's master shard.

Rows are split evenly over the shards. A shard is the master of its rows: it
computes their new tokens and stores them in its own slots. Earlier tokens stay
where they are. A shard that joins becomes the master of some rows.

Guarantees: those of `ContiguousSlots`; no token is sent between shards.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 4.2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax import tree
from ringjax.kv.storage.slots import REPLICATED, ContiguousSlots
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class MasterSlots(ContiguousSlots):
  """Slot table for calls with one token per row, whose rows are sharded.

  A call has the rows of the cache, padded with empty rows to a multiple of the
  number of shards.
  """

  def allocate(self, at: Coords, mode: str) -> MasterSlots:
    """Allocate slots for one token of each row, [B', 1]."""
    assert mode == REPLICATED and at.pos.shape[1] == 1
    batch, rows = self.at.pos.shape[0], at.pos.shape[0] // self.shards
    master = jnp.arange(batch, dtype=jnp.int32) // rows
    shard = jnp.arange(self.shards, dtype=jnp.int32)
    real = self._everywhere(at.seg[:batch] > 0)
    is_new = (master[:, None] == shard[None]) & real
    allocated = dataclasses.replace(
      self,
      before=self._everywhere(self.used),
      used=self._everywhere(self.used + is_new.astype(jnp.int32)),
      mode=mode,
    )
    return dataclasses.replace(
      allocated,
      at=Coords(
        allocated.write(self.at.pos, at.pos),
        allocated.write(self.at.seg, at.seg),
      ),
    )

  def write(
    self,
    old: Shaped[Array, "B S"] | Shaped[Array, "L B K S H"],
    new: Shaped[Array, "C 1"] | Shaped[Array, "C K 1 H"],
    layer: Index | None = None,
  ) -> Shaped[Array, "B S"] | Shaped[Array, "L B K S H"]:
    """Write the tokens to slots of their rows' masters.

    Args:
      old: Slots to write to, [B, S], or with `layer` [L, B, K, S, H].
      new: Tokens of the call, [B', 1], or [B', K, 1, H].
      layer: Index of the layer in `old`, int32 [].
    """
    number = jnp.int32(0) if layer is None else jnp.asarray(layer, jnp.int32)

    def local(
      old: jax.Array,
      new: jax.Array,
      number: Index,
      before: jax.Array,
      used: jax.Array,
    ) -> jax.Array:
      me = collectives.axis_index(self.axis or ())
      rows, batch = new.shape[0], used.shape[0]
      slots = old.shape[1 if layer is None else 3]
      row = me * rows + jnp.arange(rows, dtype=jnp.int32)
      safe_row = jnp.minimum(row, batch - 1)
      take = lambda x: lax.dynamic_index_in_dim(x, me, 1, keepdims=False)[
        safe_row
      ]
      real = (row < batch) & (take(used) > take(before))
      slot = jnp.where(real, take(before), slots)
      new = new.astype(old.dtype)
      if layer is None:
        return old.at[safe_row, slot].set(new[:, 0], mode="drop")
      return old.at[number, safe_row, :, slot].set(new[:, :, 0], mode="drop")

    tokens = P(*(None,) * (1 if layer is None else 3), self.axis)
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(tokens, P(self.axis), P(), P(), P()),
      out_specs=tokens,
      axis_names={self.axis},
    )(old, new, number, self.before, self.used)


tree.register(
  MasterSlots,
  ("at", "used", "before"),
  ("mode", "mesh", "axis", "batch_axes", "head_axis"),
)

"""Move tokens of an open cache to blocks, in place."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from ringjax.kv.base import HOST
from ringjax.kv.cache import KVCache
from ringjax.kv.storage.pages import Places
from ringjax.kv.storage.slots import ContiguousSlots, by_token
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.mask import Coords
from ringjax.parallel.programs import bounded
from ringjax.typing import Index


@bounded
@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=0)
def moved_blocks(
  blocks: PyTree,
  slots: PyTree,
  older: Int[Array, "B R"],
  count: Int[Array, "B R"],
  memory: str,
  places: Places,
) -> PyTree:
  """Append the first tokens of the open cache to the blocks.

  Args:
    blocks: Blocks of each kind of layer, or None.
    slots: Slots of the open cache, the same tree.
    older: Slots of the blocks in use, int32 [B, R].
    count: Number of blocks to move, int32 [B, R].
    memory: Memory kind of the blocks.
    places: Mesh axes that shard the blocks.
  """
  space = jax.memory.Space.Host if memory == HOST else jax.memory.Space.Device

  def local(
    old: jax.Array, new: jax.Array, older: jax.Array, count: jax.Array
  ) -> jax.Array:
    layers, rows = new.shape[:2]
    blocks_per_layer = old.shape[0] // layers
    axis, block = token_axis(new), old.shape[token_axis(old)]
    size = [1, 1, *new.shape[2:]]
    size[axis] = block

    def row(b: Index, flat: jax.Array) -> jax.Array:
      first = older[b, 0] // block

      def step(n: Index, flat: jax.Array) -> jax.Array:
        def layer(which: Index, flat: jax.Array) -> jax.Array:
          corner = [which, b, *(jnp.int32(0),) * 3]
          corner[axis] = n * block
          block_slots = lax.dynamic_slice(new, corner, size)[0]
          place = (which * blocks_per_layer + first + n) * rows + b
          # A TPU can update host memory along a single axis only.
          return lax.dynamic_update_slice_in_dim(
            flat, jax.device_put(block_slots, space), place, 0
          )

        return loop(layers, layer, flat)

      return loop(count[b, 0], step, flat)

    return loop(rows, row, old.reshape(-1, *old.shape[2:])).reshape(old.shape)

  def move_layer(old: jax.Array, new: jax.Array) -> jax.Array:
    if not new.size:
      return old
    layer_places = with_heads(places, old.shape[2])
    spec = P(
      layer_places.tokens or None,
      layer_places.batch or None,
      layer_places.heads or None,
    )
    rows = layer_places.by_example
    return layer_places.local(
      local, (spec, layer_places.of_slots(new), rows, rows), spec
    )(old, new, older, count)

  return jax.tree.map(move_layer, blocks, slots)


@bounded
@functools.partial(jax.jit, static_argnums=(3, 4))
def noted_blocks(
  held: ContiguousSlots,
  newer: ContiguousSlots,
  count: Int[Array, "B R"],
  block: int,
  places: Places,
) -> ContiguousSlots:
  """Slot table of the blocks after `moved_blocks`."""

  def local(
    old: Coords, new: Coords, older: jax.Array, count: jax.Array
  ) -> Coords:
    slot = jnp.arange(old.pos.shape[1], dtype=jnp.int32)[None] - older
    moves_in = (slot >= 0) & (slot < block * count)
    index = jnp.clip(slot, 0, new.pos.shape[1] - 1)
    pick = lambda x, y: jnp.where(moves_in, jnp.take_along_axis(y, index, 1), x)
    return Coords(*map(pick, old, new))

  rows = places.by_example
  at = places.local(local, (rows,) * 4, rows)(
    held.at, newer.at, held.used, count
  )
  used = held._everywhere(held.used + block * count)
  return dataclasses.replace(held, at=at, used=used, before=used + 0)


@bounded
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def shifted(
  cache: KVCache,
  shift: Int[Array, "B R"],
  size: int,
  whole: tuple[bool, ...],
  places: Places,
) -> KVCache:
  """Drop the first `shift` tokens of the open cache and resize it.

  Args:
    cache: Open cache.
    shift: Number of tokens to drop, int32 [B, R].
    size: New number of slots per shard.
    whole: For each kind of layer, whether it keeps all tokens.
    places: Mesh axes that shard the slots.
  """

  def shift_tokens(x: jax.Array, shift: jax.Array) -> jax.Array:
    index = shift + jnp.arange(size, dtype=jnp.int32)[None]
    axis = token_axis(x)
    index = jnp.minimum(index, x.shape[axis] - 1)
    return jnp.take_along_axis(x, by_token(index, x), axis)

  def shift_layer(x: jax.Array) -> jax.Array:
    if not x.size:
      return jnp.zeros((*x.shape[:3], size * cache.shards, 0), x.dtype)
    layer_places = with_heads(places, x.shape[2])
    spec = layer_places.of_slots(x)
    return layer_places.local(
      shift_tokens, (spec, layer_places.by_example), spec
    )(x, shift)

  slot_table, rows = cache.held, places.by_example
  shift_coords = places.local(shift_tokens, (rows, rows), rows)
  pos, seg = (shift_coords(x, shift) for x in slot_table.at)
  used = slot_table._everywhere(slot_table.used - shift)
  slot = jnp.arange(size * cache.shards, dtype=jnp.int32) % size
  shard = jnp.arange(size * cache.shards, dtype=jnp.int32) // size
  real = slot[None] < jnp.take(used, shard, axis=1)
  return dataclasses.replace(
    cache,
    slots=tuple(
      jax.tree.map(shift_layer, x) if all_ else x
      for x, all_ in zip(cache.slots, whole, strict=True)
    ),
    held=dataclasses.replace(
      slot_table,
      at=Coords(pos, jnp.where(real, seg, 0)),
      used=used,
      # Negative: that many of the last call's tokens are in the blocks.
      before=slot_table._everywhere(slot_table.before - shift),
    ),
  )


def with_heads(places: Places, heads: int) -> Places:
  """Places of arrays with `heads` KV heads: sharded only if these divide."""
  if not places.heads or heads % places.size(places.heads) == 0:
    return places
  return dataclasses.replace(places, heads=())

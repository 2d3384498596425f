"""View of blocks in the host's memory, which are streamed through the device.

Guarantees: results equal those for the same tokens on the device, read in the
same tiles, bit for bit.
Cost: every block that counts is copied to the device, once for each call and
layer; `views.fold_tiles` does so while the block before it is read.
Memory: two tiles on the device, of a block or of several small ones.

TPUs slice an array in the host's memory along one axis only, and not every
program may reshape it: hence one axis for the blocks of all layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, Shaped

from ringjax import tree
from ringjax.ops.attention.blockwise import cut_coords
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.views import (
  Aligned,
  ContiguousView,
  Decoder,
  EncodedView,
  StoredView,
  UnrotatedView,
  coords_specs,
  in_basis,
)
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class HostView(StoredView):
  """One layer of a stack of blocks in the host's memory.

  Fields:
    k: Keys, [L N, B, K, P, H], N blocks of P slots for each of L layers, layer
      by layer on each shard; codes where a codec stores keys, uint8 [L N, B, K,
      P, X] or int8 [L N, B, K, X, P].
    v: Values in the same layout; the same array as `k` where values are parts
      of keys.
    at: Coordinates [B, N P]; segment 0 is an empty slot.
    layer: Index of the layer in the L, int32 [].
    constants: Arrays [K, n] of the layer's codecs, for keys and for values.
    rotation: Rotation on reading, for keys stored unrotated; or None.
    decoders: Decoders of the keys and of the values, or None.
    layers: Number of layers, L.
    tile_blocks: Number of blocks that are fetched together; N is a multiple.
  """

  k: Shaped[Array, "LN B K _ _"]
  v: Shaped[Array, "LN B K _ _"]
  at: Coords
  layer: Index
  constants: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
  rotation: Rotation | None = None
  decoders: tuple[Decoder, Decoder] | None = None
  layers: int = 1
  tile_blocks: int = 1

  @property
  def block(self) -> int:
    """Slots of a tile."""
    return self.tile_blocks * self.k.shape[token_axis(self.k)]

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    num_blocks, b, heads, *_ = self.k.shape
    tiles = num_blocks // self.layers // self.tile_blocks
    return b, heads, tiles * self.block, *self.dims

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> HostView:
    arrays = P(tokens, batch, heads)
    return tree.with_leaves(
      self,
      k=arrays,
      v=arrays,
      at=coords_specs(self.at, self.k.shape[1], batch, tokens),
      layer=P(),
      constants=jax.tree.map(lambda _: P(heads), self.constants),
      rotation=self.rotation and self.rotation.specs(batch),
    )

  def fetch(self, start: Index) -> tuple[Shaped[Array, "_ ..."], ...]:
    """Copy the tile of slot `start` to the device: keys, maybe values."""
    tile = jnp.asarray(start, jnp.int32) // self.block
    tiles_per_layer = self.k.shape[0] // self.layers // self.tile_blocks
    tile = jnp.asarray(self.layer, jnp.int32) * tiles_per_layer + tile

    def fetch_block(x: Shaped[Array, "M B K *block"]) -> jax.Array:
      first = tile * self.tile_blocks
      host_blocks = lax.dynamic_slice_in_dim(x, first, self.tile_blocks, 0)
      blocks = jax.device_put(host_blocks, jax.memory.Space.Device)
      return blocks if self.tile_blocks == 1 else _joined(blocks)

    if self.v is self.k or not self.v.size:
      return (fetch_block(self.k),)
    return fetch_block(self.k), fetch_block(self.v)

  def opened(
    self, stored: PyTree, start: Index
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    """Decode a fetched block to rotated keys and values [B, K, P, ...]."""
    at = cut_coords(self.at, start, self.block)
    k = v = stored[0]
    if self.v is not self.k:
      v = stored[1] if self.v.size else self.v[:1]
    view = ContiguousView(k, v, at, jnp.int32(0))
    if self.decoders is not None:
      view = EncodedView(k, v, at, jnp.int32(0), self.constants, self.decoders)
    if self.rotation is not None:
      view = UnrotatedView(view, self.rotation)
    return view.tile(jnp.int32(0), self.block)

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    assert size == self.block
    return self.opened(self.fetch(start), start)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    if self.decoders is None:
      return Aligned(self, q)
    # Keys are rotated in the basis in which they were computed.
    return in_basis(self, q, keys and self.rotation is None)


tree.register(
  HostView,
  ("k", "v", "at", "layer", "constants", "rotation"),
  ("decoders", "layers", "tile_blocks"),
)


def _joined(blocks: Shaped[Array, "n B K _ _"]) -> Shaped[Array, "1 B K _ _"]:
  """Join blocks of consecutive tokens to one."""
  axis, (count, *shape) = token_axis(blocks), blocks.shape
  shape[axis - 1] *= count
  return jnp.moveaxis(blocks, 0, axis - 1).reshape(1, *shape)

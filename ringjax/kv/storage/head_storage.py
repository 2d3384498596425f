"""Storage of layers with a separate codec for each head.

Guarantees: a kind of layers stores one array of slots for each codec, [n, B, g,
S, X] for n groups of g heads, so that all functions that map over arrays of
slots work as for one codec; a head takes the bytes of its codec.
Cost: an append encodes all heads with each codec that the kind of layers uses,
and writes each group of heads once per codec; writes of other codecs' groups
are masked. Reading is `PerHeadView`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec
from ringjax.kv.codecs.codec import Codec, VectorCodec, through
from ringjax.kv.codecs.head_codecs import HeadPlaces, PerHead
from ringjax.ops.attention.cached.code_format import as_stored, stored_codes
from ringjax.ops.attention.cached.per_head import PerHeadView
from ringjax.ops.attention.cached.views import Decoder
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.kv.layer_spec import LayerCacheSpec
  from ringjax.kv.storage.slots import ContiguousSlots
  from ringjax.kv.storage.window import WindowSlots


@dataclasses.dataclass(frozen=True)
class HeadStorage:
  """Storage layout of the layers of one kind, with a codec per head.

  Attributes:
    codec: Codecs of all heads.
    shape: Spec of the layers.
  """

  codec: PerHead
  shape: LayerCacheSpec

  @functools.cached_property
  def places(self) -> HeadPlaces:
    """Array and row of each head."""
    return HeadPlaces.of(self.codec, self.shape)

  @functools.cached_property
  def codecs(self) -> tuple[Codec, ...]:
    """Codecs that the layers use."""
    return tuple(self.codec.codecs[n] for n in self.places.ways)

  def slots(self, room: CacheSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Specs of the arrays of keys and of values.

    Raises:
      OptionError: If the mesh shards the heads.
    """
    axis = room.axes.get("heads")
    if axis is not None and room.mesh is not None and room.mesh.shape[axis] > 1:
      raise OptionError(
        "mesh",
        f"KV heads sharded over {axis!r}, with a codec for each head",
        "a mesh that shards the sequence and the batch alone",
        "make the mesh without that axis, or take one codec for all heads",
      )
    names = (None, "batch", None)

    def array_spec(way: int, vectors: VectorCodec, dim: int) -> ArrayLeaf:
      lead = (self.places.count(way), room.batch, self.places.group)
      shape, dtype = stored_codes(
        lead, room.capacity, vectors.width(dim), room.platform
      )
      last = (None, "tokens") if dtype == jnp.int8 else ("tokens",)
      return room.like(shape, dtype, (*names, *last))

    shape, pairs = (
      self.shape,
      [*zip(self.places.ways, self.codecs, strict=True)],
    )
    k = tuple(array_spec(n, codec.keys, shape.key) for n, codec in pairs)
    if not shape.value:
      return k, ()
    return k, tuple(
      array_spec(n, codec.values, shape.value) for n, codec in pairs
    )

  def written(
    self,
    held: ContiguousSlots | WindowSlots,
    slots: tuple[tuple[Any, ...], tuple[Any, ...]],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T J"],
    index: Index,
    constants: tuple[Any, ...],
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Write a call's keys and values of layer `index` to the slots.

    Args:
      held: Slot table of the layer.
      slots: Arrays of keys and of values.
      k: Keys, rotated if they are stored so.
      v: Values of the call.
      index: Index of the layer within its kind, int32 [].
      constants: Codec constants, see `PerHead.constants`.
    """
    of_k, of_v = zip(*self._of_layer(constants, index), strict=True)
    parts = (slots[0], "keys", k, of_k), (slots[1], "values", v, of_v)
    codes = tuple(
      tuple(
        as_stored(getattr(codec, part).encode(x, vector_constants), old)
        for codec, vector_constants, old in zip(
          self.codecs, layer_constants, arrays, strict=True
        )
      )
      if arrays
      else ()
      for arrays, part, x, layer_constants in parts
    )
    way, row = self._groups(index)
    group, single_codec = self.places.group, len(self.codecs) == 1

    def write(n: Index, slots: PyTree) -> PyTree:
      def write_codec(number: int, old: jax.Array, new: jax.Array) -> jax.Array:
        in_codec = way[n] == number
        new = lax.dynamic_slice_in_dim(new, n * group, group, 1)
        target_table = held if single_codec else held.only(in_codec)
        return target_table.write(old, new, jnp.where(in_codec, row[n], 0))

      return tuple(
        tuple(
          write_codec(number, old, new)
          for number, (old, new) in enumerate(
            zip(arrays, new_codes, strict=True)
          )
        )
        for arrays, new_codes in zip(slots, codes, strict=True)
      )

    return _loop(way.shape[0], write, slots)

  def view(
    self,
    slots: tuple[tuple[Any, ...], tuple[Any, ...]],
    at: Coords,
    index: Index,
    constants: tuple[Any, ...],
    dtype: DTypeLike,
    rotation: Rotation | None,
  ) -> PerHeadView:
    """View of layer `index` for its queries."""
    way, row = self._groups(index)
    decoders = tuple(
      (
        Decoder(codec.keys, self.shape.key, dtype),
        Decoder(codec.values, self.shape.value, dtype),
      )
      for codec in self.codecs
    )
    k, v = slots
    return PerHeadView(k, v, at, way, row, constants, rotation, decoders)

  def through(
    self,
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T J"],
    index: Index,
    constants: tuple[Any, ...],
  ) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T J"]]:
    """Encode and decode keys and values by the codecs of layer `index`."""
    way, _ = self._groups(index)
    heads = jnp.repeat(way, self.places.group)[None, :, None, None]
    of_layer = self._of_layer(constants, index)
    for number, codec in enumerate(self.codecs):
      of_k, of_v = of_layer[number]
      in_codec = heads == number
      k = jnp.where(in_codec, through(codec.keys, k, of_k), k)
      if v.shape[-1]:
        v = jnp.where(in_codec, through(codec.values, v, of_v), v)
    return k, v

  def _groups(self, index: Index) -> tuple[jax.Array, jax.Array]:
    """Array number and row of each group of layer `index`, int32 [K / g]."""
    of_layer = lambda table: lax.dynamic_index_in_dim(
      jnp.asarray(table, jnp.int32), index, 0, keepdims=False
    )
    return of_layer(self.places.way), of_layer(self.places.row)

  def _of_layer(self, constants: tuple[Any, ...], index: Index) -> list[Any]:
    """Constants of each codec for layer `index`, [K, x] each.

    Entries of heads with other codecs are arbitrary.
    """
    way, row = self._groups(index)

    def codec_constants(number: int) -> PyTree:
      rows = jnp.where(way == number, row, 0)
      flat = lambda x: x[rows].reshape(-1, x.shape[-1])
      return jax.tree.map(flat, constants[number])

    return [codec_constants(number) for number in range(len(self.codecs))]


def _loop(count: int, step: Callable[..., Any], start: PyTree) -> PyTree:
  if count == 1:
    return step(0, start)
  return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, start)

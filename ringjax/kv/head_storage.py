"""Storage of layers whose heads have codecs of their own.

Guarantees: what a kind of layers holds is an array of slots for each codec,
[n, B, g, S, X] of n groups of g heads, so that all that maps over arrays of
slots works as for one codec; a head takes the bytes of its codec.
Cost: an append encodes with each codec that occurs among the layers of a kind
and writes each group of heads once for each; what is not of the codec writes
nothing. Reading is `PerHeadView`'s.
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
from ringjax.ops.attention.code_format import as_stored, stored_codes
from ringjax.ops.attention.per_head import PerHeadView
from ringjax.ops.attention.views import Decoder
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.cache import LayerCacheSpec
  from ringjax.kv.slots import ContiguousSlots
  from ringjax.kv.window import WindowSlots


@dataclasses.dataclass(frozen=True)
class HeadStorage:
  """How the layers of one kind are stored.

  Attributes:
    codec: of all heads.
    shape: the `LayerCacheSpec` of the layers.
  """

  codec: PerHead
  shape: LayerCacheSpec

  @functools.cached_property
  def places(self) -> HeadPlaces:
    """Where the heads are."""
    return HeadPlaces.of(self.codec, self.shape)

  @functools.cached_property
  def codecs(self) -> tuple[Codec, ...]:
    """Those that occur."""
    return tuple(self.codec.codecs[n] for n in self.places.ways)

  def slots(self, room: CacheSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes, dtypes and shardings of the arrays of keys and of values.

    Raises:
      OptionError: a mesh that shards the heads.
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

    def one(way: int, vectors: VectorCodec, dim: int) -> Any:
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
    k = tuple(one(n, codec.keys, shape.key) for n, codec in pairs)
    if not shape.value:
      return k, ()
    return k, tuple(one(n, codec.values, shape.value) for n, codec in pairs)

  def written(
    self,
    held: ContiguousSlots | WindowSlots,
    slots: tuple[tuple[Any, ...], tuple[Any, ...]],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T J"],
    index: Index,
    constants: tuple[Any, ...],
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The slots with a call's keys and values of layer `index`.

    Args:
      held: the slots' `ContiguousSlots` or `WindowSlots`.
      slots: arrays of keys and of values.
      k: keys, rotated if they are stored so.
      v: values.
      index: int32 [], which of the layers.
      constants: see `PerHead.constants`.
    """
    of_k, of_v = zip(*self._of_layer(constants, index), strict=True)
    parts = (slots[0], "keys", k, of_k), (slots[1], "values", v, of_v)
    codes = tuple(
      tuple(
        as_stored(getattr(codec, part).encode(x, of), old)
        for codec, of, old in zip(self.codecs, given, arrays, strict=True)
      )
      if arrays
      else ()
      for arrays, part, x, given in parts
    )
    way, row = self._groups(index)
    group, alone = self.places.group, len(self.codecs) == 1

    def write(n: Index, slots: PyTree) -> PyTree:
      def one(number: int, old: jax.Array, new: jax.Array) -> jax.Array:
        here = way[n] == number
        new = lax.dynamic_slice_in_dim(new, n * group, group, 1)
        into = held if alone else held.only(here)
        return into.write(old, new, jnp.where(here, row[n], 0))

      return tuple(
        tuple(
          one(number, old, new)
          for number, (old, new) in enumerate(zip(arrays, made, strict=True))
        )
        for arrays, made in zip(slots, codes, strict=True)
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
    """How queries read layer `index`."""
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
  ) -> tuple[jax.Array, jax.Array]:
    """Keys and values as the codecs of layer `index` give them back."""
    way, _ = self._groups(index)
    heads = jnp.repeat(way, self.places.group)[None, :, None, None]
    of_layer = self._of_layer(constants, index)
    for number, codec in enumerate(self.codecs):
      of_k, of_v = of_layer[number]
      here = heads == number
      k = jnp.where(here, through(codec.keys, k, of_k), k)
      if v.shape[-1]:
        v = jnp.where(here, through(codec.values, v, of_v), v)
    return k, v

  def _groups(self, index: Index) -> tuple[jax.Array, jax.Array]:
    """Of layer `index` the way and the row of each group, int32 [K / g]."""
    one = lambda table: lax.dynamic_index_in_dim(
      jnp.asarray(table, jnp.int32), index, 0, keepdims=False
    )
    return one(self.places.way), one(self.places.row)

  def _of_layer(self, constants: tuple[Any, ...], index: Index) -> list[Any]:
    """For each codec its constants of layer `index`, [K, x] each.

    Those of heads of other codecs are some numbers.
    """
    way, row = self._groups(index)

    def one(number: int) -> PyTree:
      rows = jnp.where(way == number, row, 0)
      flat = lambda x: x[rows].reshape(-1, x.shape[-1])
      return jax.tree.map(flat, constants[number])

    return [one(number) for number in range(len(self.codecs))]


def _loop(count: int, step: Callable[..., Any], start: PyTree) -> PyTree:
  if count == 1:
    return step(0, start)
  return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, start)

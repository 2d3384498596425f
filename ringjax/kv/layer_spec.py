"""Arrays of the layers of one kind: vectors of a token, codes and constants."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Allocated, Codec, PerHead, VectorCodec
from ringjax.kv.query_reading import KeyReading
from ringjax.kv.state import StateShape
from ringjax.kv.storage.head_storage import HeadStorage
from ringjax.kv.summaries.summary_spec import SummarySpec
from ringjax.ops.attention.cached.code_format import (
  as_stored,
  filled_up,
  stored_codes,
)
from ringjax.ops.attention.cached.views import Decoder, KVView, UnrotatedView
from ringjax.ops.rope import Rotation
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True)
class LayerCacheSpec:
  """Cached vectors of one token in the layers of one kind.

  Attributes:
    layers: Number of layers that share the array, L.
    heads: Number of KV heads, K.
    key: Head dim of the keys, H.
    value: Head dim of the values, J; 0 where values are part of the keys.
    reach: Number of earlier tokens that a query attends to; None for all.
    reading: Rotation and scale of the queries, for eviction policies.
    which: Indices of the layers in the model.
  """

  layers: int
  heads: int
  key: int
  value: int
  reach: int | None = None
  reading: KeyReading | None = None
  which: tuple[int, ...] = ()

  def numbers(self) -> int:
    """Count the scalars that one token takes."""
    return self.layers * self.heads * (self.key + self.value)

  def decoders(self, codec: Codec, dtype: DTypeLike) -> tuple[Decoder, Decoder]:
    """Decoders of a codec's bytes to keys and to values."""
    return (
      Decoder(codec.keys, self.key, dtype),
      Decoder(codec.values, self.value, dtype),
    )

  def slots(self, room: CacheSpec) -> LayerKV:
    """Shapes, dtypes and shardings of the arrays."""
    names = (None, "batch", "heads", "tokens")
    lead = (self.layers, room.batch, self.heads, room.capacity)

    def array_spec(dim: int, vectors: VectorCodec | None) -> ArrayLeaf:
      if not dim:
        # Compiled programs return arrays of size 0 replicated.
        return room.like((*lead, dim), room.dtype, (None,) * 5)
      if vectors is None:
        return room.like((*lead, dim), room.dtype, names)
      shape, dtype = stored_codes(
        lead[:3], room.capacity, vectors.width(dim), room.platform
      )
      last = dtype == jnp.int8
      return room.like(
        shape, dtype, (*names[:3], None, "tokens") if last else names
      )

    if room.codec is None:
      return LayerKV(array_spec(self.key, None), array_spec(self.value, None))
    if isinstance(room.codec, PerHead):
      by_head: Any = HeadStorage(room.codec, self).slots(room)
      return LayerKV(*by_head)
    assert isinstance(room.codec, Codec)
    of_k, of_v = room.codec.keys, room.codec.values
    return LayerKV(array_spec(self.key, of_k), array_spec(self.value, of_v))

  def filled_slots(self, room: CacheSpec) -> LayerKV:
    """Specs of the arrays, with head dims padded on a TPU by `filled_up`."""
    layer_kv = self.slots(room)
    if room.codec is not None or room.platform != "tpu":
      return layer_kv
    return jax.tree.map(filled_up, layer_kv)

  def widths(self, slots: LayerKV) -> tuple[int, int] | None:
    """Head dims of keys and values if the slots are padded, else None."""
    widths = self.key, self.value
    return None if widths == tuple(x.shape[-1] for x in slots) else widths


def model_layers(
  shapes: Sequence[LayerCacheSpec | StateShape | SummarySpec],
) -> int:
  """Number of layers of a model, up to the last one that has a cache.

  A layer with several mixers has several shapes and counts once.
  """
  return 1 + max(n for shape in shapes for n in shape.which)


def check_one_set_of_keys(
  shapes: Sequence[LayerCacheSpec | StateShape | SummarySpec], result: str
) -> None:
  """Refuse layers that keep two sets of keys, for results by layer.

  Args:
    shapes: Shape of each kind of layer.
    result: Description of the result, for the error.

  Raises:
    OptionError: If a layer has two attentions, or an index with its own keys.
  """
  count = collections.Counter(
    n for x in shapes if isinstance(x, LayerCacheSpec) for n in x.which
  )
  layers = sorted(n for n, times in count.items() if times > 1)
  if layers:
    raise OptionError(
      "model",
      f"one whose layer {layers[0]} keeps {count[layers[0]]} sets of keys, "
      f"for {result}",
      "one set of keys in each layer",
      "use another model",
    )


def by_model_layer(
  shapes: Sequence[Any], values: Sequence[Sequence[Any] | None]
) -> list[Any]:
  """Value of each layer of the model; None for layers without.

  Args:
    shapes: Shape of each kind of layer.
    values: For each kind of layer a value for each of its layers, or None.
      Of a layer of several kinds they are lists by KV head, which are joined.
  """
  by_layer: list[Any] = [None] * model_layers(shapes)
  for shape, of_kind in zip(shapes, values, strict=True):
    if of_kind is not None:
      for layer, value in zip(shape.which, of_kind, strict=True):
        earlier = by_layer[layer]
        if earlier is not None and value is not None:
          value = [*earlier, *value]
        by_layer[layer] = earlier if value is None else value
  return by_layer


def unstacked(arrays: PyTree, layers: int) -> list[Any]:
  """Arrays of each layer, of those of all layers of a kind."""
  return [jax.tree.map(lambda x, n=n: x[n], arrays) for n in range(layers)]


class LayerKV(NamedTuple):
  """Keys and values of the layers of one kind.

  Fields:
    k: Keys [L, B, K, S, H]; with a codec its codes, see `stored_codes`. With a
      codec per head, one array for each codec, see `HeadStorage`.
    v: Values [L, B, K, S, J], or their codes.
  """

  k: Shaped[ArrayLeaf, "L B K _ _"]
  v: Shaped[ArrayLeaf, "L B K _ _"]


def _constants(
  number: int,
  shape: LayerCacheSpec | StateShape | SummarySpec,
  kind: CacheConfig,
) -> Any:
  """Codec constants of a kind of layer, [L, K, n] each."""
  if kind.codec is None or not isinstance(shape, LayerCacheSpec):
    return (), ()
  assert not isinstance(kind.codec, Allocated)
  return kind.codec.constants(number, shape)


def filled_constants(
  shapes: tuple[Any, ...], kind: CacheConfig, like: tuple[Any, ...]
) -> tuple[Any, ...]:
  """Codec constants of all kinds of layers, with dtypes of `like`."""
  fill = lambda like, x: jnp.asarray(x, like.dtype, device=like.sharding)
  constants = tuple(_constants(n, s, kind) for n, s in enumerate(shapes))
  return jax.tree.map(fill, like, constants)


def constants_spec(
  shape: LayerCacheSpec | StateShape | SummarySpec,
  kind: CacheConfig,
  room: CacheSpec,
) -> PyTree:
  """Specs of the codec constants of a kind of layer."""
  if kind.codec is None or not isinstance(shape, LayerCacheSpec):
    return (), ()
  assert not isinstance(kind.codec, Allocated)
  return jax.tree.map(
    lambda shape: room.like(shape, jnp.float32, (None, "heads", None)),
    kind.codec.constant_shapes(shape),
    is_leaf=lambda x: bool(x) and isinstance(x[0], int),
  )


def of_layer(arrays: PyTree, index: Index) -> Any:
  """Arrays of one layer, of those of all layers of a kind."""
  take = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
  return jax.tree.map(take, arrays)


def encoded(
  codec: Codec,
  tokens: LayerKV,
  constants: PyTree,
  slots: LayerKV,
  dtype: DTypeLike,
) -> LayerKV:
  """Encode a call's keys and values as the slots of a kind of layer store them.

  Args:
    codec: Codec of all heads.
    tokens: Keys [B, K, T, H] and values [B, K, T, J].
    constants: Constants of the layer's codecs, see `KVLayer`.
    slots: Slots that will store the codes.
    dtype: Dtype of keys and values before encoding.
  """

  def encode(
    vectors: VectorCodec, x: jax.Array, of_x: PyTree, stored: jax.Array
  ) -> jax.Array:
    return as_stored(vectors.encode(x.astype(dtype), of_x), stored)

  of_k, of_v = constants
  k, v = tokens
  return LayerKV(
    encode(codec.keys, k, of_k, slots.k),
    encode(codec.values, v, of_v, slots.v) if v.shape[-1] else v,
  )


def rotated_view(view: KVView, kind: CacheConfig, rotation: Rotation) -> KVView:
  """View whose keys are rotated when they are read, if stored unrotated."""
  if kind.layout.unrotated and not rotation.trivial:
    return UnrotatedView(view, rotation)
  return view

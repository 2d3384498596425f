"""One layer of a `KVCache` during a call: what it appends and what it reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ringjax.kv.base import KV, CallLayer
from ringjax.kv.codecs import Codec, PerHead
from ringjax.kv.codecs.codec import through
from ringjax.kv.layer_spec import (
  LayerCacheSpec,
  LayerKV,
  encoded,
  of_layer,
  rotated_view,
)
from ringjax.kv.storage.head_storage import HeadStorage
from ringjax.kv.storage.slots import ContiguousSlots
from ringjax.kv.storage.window import WindowSlots
from ringjax.ops.attention.cached.code_format import as_stored
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  EncodedView,
  KVView,
)
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.cache import KVCache


@dataclasses.dataclass(frozen=True)
class KVLayer(CallLayer):
  """One layer's part of a `KVCache` during one call.

  A call may overwrite tokens that its first queries still attend to. It then
  reads two views, the old slots and its own keys, and merges the partials.
  """

  cache: KVCache
  held: ContiguousSlots | WindowSlots
  slots: LayerKV
  index: Index
  kind: int
  fresh: KV | None = None
  rotation: Rotation = Rotation()
  old: LayerKV | None = None
  # The call's keys before rotation, if the cache stores unrotated keys.
  plain: Shaped[Array, "B K T H"] | None = None

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> KVLayer:
    rotated = rotation.own(k)
    if self.cache.kind.codec is not None:
      # Encode exactly the values that a strategy may encode for transfer.
      rotated, v = lax.optimization_barrier((rotated, v))
    return dataclasses.replace(
      self,
      slots=self._written(
        k if self.cache.kind.layout.unrotated else rotated, v
      ),
      fresh=KV(rotated, v, at),
      rotation=rotation.general(),
      old=self._alone() if self.held.apart else None,
      plain=k if self.cache.kind.layout.unrotated else None,
    )

  def load(
    self, k: Shaped[Array, "B K T X"], v: Shaped[Array, "B K T Y"]
  ) -> KVLayer:
    """Write the call's already encoded keys and values, bit for bit."""
    write = lambda old, new: self.held.write(
      old, as_stored(new, old), self.index
    )
    stored = LayerKV(write(self.slots.k, k), write(self.slots.v, v))
    return dataclasses.replace(self, slots=stored)

  def for_reading(self, rotation: Rotation) -> KVLayer:
    """Prepare for a call that appends nothing: `views` covers the cache.

    `rotation` applies to keys that are stored unrotated.
    """
    return dataclasses.replace(self, rotation=rotation.general())

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    if self.fresh is None:
      return (self._view(self.slots, self.held.at, self.index),)
    if self.old is None and not apart:
      return (self._view(self.slots, self.held.at, self.index),)
    # A call reads its own tokens as later calls will: after the codec.
    own_view = self._given_back(self.fresh).view(self.cache.shards)
    if self.old is None:
      return self._view(self.slots, self.held.earlier(), self.index), own_view
    assert self.held.previous is not None
    return self._old_view(self.old, self.held.previous), own_view

  def view(self, rotation: Rotation) -> KVView:
    """View of the cache; `rotation` applies to keys stored unrotated."""
    layer = dataclasses.replace(self, rotation=rotation)
    return layer._view(self.slots, self.held.at, self.index)

  def _given_back(self, fresh: KV) -> KV:
    """The call's keys and values after encoding and decoding."""
    codec, dtype = self.cache.kind.codec, self.cache.dtype
    k = fresh.k if self.plain is None else self.plain
    k, v = k.astype(dtype), fresh.v.astype(dtype)
    if self._by_head is not None:
      constants = self.cache.constants[self.kind]
      k, v = self._by_head.through(k, v, self.index, constants)
    elif isinstance(codec, Codec):
      of_k, of_v = self._constants()
      k, v = through(codec.keys, k, of_k), through(codec.values, v, of_v)
    if self.plain is not None:
      k = self.rotation.anywhere(k, fresh.at.pos)
    return KV(k, v, fresh.at)

  @property
  def _by_head(self) -> HeadStorage | None:
    """Storage of heads with a codec each; None for other codecs."""
    codec = self.cache.kind.codec
    if not isinstance(codec, PerHead):
      return None
    shape = self.cache.shapes[self.kind]
    assert isinstance(shape, LayerCacheSpec)
    return HeadStorage(codec, shape)

  def _written(self, k: jax.Array, v: jax.Array) -> LayerKV:
    """Write the call's keys and values to the slots."""
    by_head, constants = self._by_head, self.cache.constants[self.kind]
    if by_head is not None:
      dtype = self.cache.dtype
      k, v = k.astype(dtype), v.astype(dtype)
      slots: Any = (self.slots.k, self.slots.v)
      written: Any = by_head.written(
        self.held, slots, k, v, self.index, constants
      )
      return LayerKV(*written)
    write = lambda old, new: (
      self.held.write(old, new, self.index) if old.size else old
    )
    return LayerKV(*map(write, self.slots, self._encoded(k, v)))

  def _alone(self) -> LayerKV:
    """Slots of this layer as a stack of one layer; decoded if per head."""
    if self._by_head is None:
      take_layer = lambda x: lax.dynamic_index_in_dim(x, self.index, 0)
      return LayerKV(*map(take_layer, self.slots))
    unrotated = dataclasses.replace(self, rotation=Rotation())
    assert self.held.previous is not None
    view = unrotated._view(self.slots, self.held.previous, self.index)
    k, v = view.tile(jnp.int32(0), view.shape[2])
    return LayerKV(k[None], v[None] if self.slots.v else k[None])

  def _old_view(self, old: LayerKV, at: Coords) -> KVView:
    """View of the old slots by `_alone`."""
    if self._by_head is None:
      return self._view(old, at, jnp.int32(0))
    view = ContiguousView(*old, at, jnp.int32(0))
    return rotated_view(view, self.cache.kind, self.rotation)

  def _view(self, slots: LayerKV, at: Coords, index: Index) -> KVView:
    codec, by_head = self.cache.kind.codec, self._by_head
    shape: Any = self.cache.shapes[self.kind]
    view: Any
    if by_head is not None:
      rotates = self.cache.kind.layout.unrotated and not self.rotation.trivial
      parts: Any = (slots.k, slots.v)
      assert self.cache.dtype is not None
      return by_head.view(
        parts,
        at,
        index,
        self.cache.constants[self.kind],
        self.cache.dtype,
        self.rotation if rotates else None,
      )
    if codec is None:
      widths = shape.widths(slots)
      view = ContiguousView(*slots, at, index, widths=widths)
    else:
      decoders = shape.decoders(codec, self.cache.dtype)
      view = EncodedView(*slots, at, index, self._constants(), decoders)
    return rotated_view(view, self.cache.kind, self.rotation)

  def _encoded(self, k: jax.Array, v: jax.Array) -> LayerKV:
    """Encode keys and values as the slots store them."""
    codec, into = self.cache.kind.codec, self.slots
    if codec is None:
      return LayerKV(as_stored(k, into.k), as_stored(v, into.v))
    assert isinstance(codec, Codec) and self.cache.dtype is not None
    tokens, dtype = LayerKV(k, v), self.cache.dtype
    return encoded(codec, tokens, self._constants(), into, dtype)

  def _constants(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Codec constants of this layer, [K, n] each."""
    return of_layer(self.cache.constants[self.kind], self.index)

"""What a layer sees of a cache, and the cache that keeps nothing.

A cache belongs to a whole model. Before the layers run it makes room for the
call's tokens (`allocate`); a layer then gets a `LayerCache`, appends its keys
and values and passes it on; the cache is put together again from what the
layers return. Layers of one kind share an array with a leading axis, so that
a loop over layers carries it and writes in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.kv.codecs import CacheCodec
from ringjax.ops.attention.views import ContiguousView, KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation


class KV(NamedTuple):
  """Keys, values and where their tokens are.

  Fields:
    k: [B, K, S, H].
    v: [B, K, S, J].
    at: coordinates [B or 1, S]; segment 0 is an empty slot.
  """

  k: jax.Array
  v: jax.Array
  at: Coords

  def view(self, shards: int = 1) -> ContiguousView:
    """The same as a stack of one layer, with empty slots to a multiple."""
    over = -self.k.shape[2] % shards

    def pad(x: jax.Array, axis: int) -> jax.Array:
      if not over:
        return x
      return jnp.pad(x, [(0, over * (n == axis)) for n in range(x.ndim)])

    return ContiguousView(
      pad(self.k, 2)[None],
      pad(self.v, 2)[None],
      Coords(*(pad(x, 1) for x in self.at)),
      jnp.int32(0),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
  """Cache allocation: batch, capacity, dtype and sharding.

  Attributes:
    batch: B.
    capacity: tokens that fit.
    dtype: of keys and values.
    mesh: None is one device.
    axes: the mesh axes of "batch", "heads" and "tokens", as in a
      PartitionSpec.
    codec: stores keys and values in bytes, or None.
    target: the platform; None: the mesh's, or else the default one.
  """

  batch: int
  capacity: int
  dtype: Any
  mesh: Any = None
  axes: Any = dataclasses.field(default_factory=dict)
  codec: CacheCodec | None = None
  target: str | None = None

  @property
  def platform(self) -> str:
    """What the devices are."""
    if self.target is not None:
      return self.target
    if self.mesh is None:
      return jax.default_backend()
    return self.mesh.devices.flat[0].platform

  @property
  def shards(self) -> int:
    """Shards of the sequence."""
    axis = self.axes.get("tokens")
    return 1 if axis is None else self.mesh.shape[axis]

  def like(
    self, shape: tuple[int, ...], dtype: Any, names: tuple[str | None, ...]
  ) -> Any:
    """An array's shape, dtype and sharding, which is by the dimensions' names.

    Heads are sharded if they divide.
    """
    if self.mesh is None:
      return jax.ShapeDtypeStruct(shape, dtype)
    spec = [self.axes.get(name) for name in names]
    for i, name in enumerate(names):
      if name == "heads" and spec[i] and shape[i] % self.mesh.shape[spec[i]]:
        spec[i] = None
    # A program for P() is not found for P(None).
    while spec and spec[-1] is None:
      spec.pop()
    sharding = NamedSharding(self.mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def zeros(like: Any) -> Any:
  """Zeros of these shapes, dtypes and shardings."""
  one = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
  return jax.tree.map(one, like)


# The memory of a host from which devices read without a copy.
HOST = "pinned_host"


def bytes_each(tree: Any) -> int:
  """Bytes of arrays, or of what stands for them, on each device.

  What is in the host's memory is not among them.
  """

  def one(x: Any) -> int:
    if x.sharding is not None and x.sharding.memory_kind == HOST:
      return 0
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(one(x) for x in jax.tree.leaves(tree))


def donated(tree: Any) -> bool:
  """Whether some of its arrays were donated to a program."""
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  return any(
    x.is_deleted() for x in arrays if not isinstance(x, jax.core.Tracer)
  )


@runtime_checkable
class LayerCache(Protocol):
  """One layer's part of a cache during one call."""

  slots: Any
  fresh: Any

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> LayerCache:
    """Adds the call's keys [B, K, T, H] and values [B, K, T, J].

    The keys are those before `rotation`; the kind of cache says whether they
    are stored as they are. `fresh` has them rotated.
    """
    ...

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> LayerCache:
    """Notes the call's queries, [B, T, N, H], if the kind of cache needs them.

    Args:
      rotated: returns them.
      plain: returns them as they were before their rotation.
    """
    ...

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    """All keys and values, the appended ones too: partials that merge.

    `apart`: the last view is of the appended ones, the others of those before.
    """
    ...


@runtime_checkable
class StateCache(Protocol):
  """One recurrent layer's part of a cache during one call."""

  slots: Any

  def recall(self, empty: Any) -> Any:
    """What earlier calls left; `empty` if they left nothing."""
    ...

  def keep(self, state: Any) -> StateCache:
    """Leaves a state to later calls."""
    ...


@runtime_checkable
class Cache(Protocol):
  """A model's keys and values.

  `mesh` and `axis` say over what its tokens are sharded; None: one device.
  `states` are those of an encoder, which cross-attention reads, or None.
  """

  slots: tuple[Any, ...]
  mesh: Any
  axis: str | None
  states: Any

  @property
  def length(self) -> Any:
    """int32 [B], the position behind each example's last token; 0 if empty."""
    ...

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens [B, T] that it has no place for, as far as it can know.

    `sees`: whether the call looks at what the cache holds already.
    """
    ...

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> Cache:
    """Slots for tokens with these coordinates, [B, T].

    Args:
      at: the coordinates.
      replicated: whether the tokens are the same on all shards.
      sees: whether the call looks at what the cache holds; a call that does
        not starts the cache anew.
    """
    ...

  def layer(self, kind: int, slots: Any, index: Any) -> LayerCache | StateCache:
    """The part of layer `index` among those of a kind, which share `slots`."""
    ...

  def updated(self, slots: tuple[Any, ...]) -> Cache:
    """The cache after the layers."""
    ...

  def truncate(self, length: Any) -> Cache:
    """Without the tokens at positions from `length` on, an int or int [B]."""
    ...

  def take(self, examples: Any) -> Cache:
    """Of these examples, int [B'], each as often as it is named."""
    ...


class FreshLayer(NamedTuple):
  """A layer that forgets: what it sees is what the call brought.

  Fields:
    fresh: the call's keys and values.
    slots: what the layer leaves to its cache.
    change: None, or makes of keys before their rotation, values and the
      rotation: rotated keys, values and slots.
  """

  fresh: Any = None
  slots: Any = ()
  change: Callable[..., Any] | None = None

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> FreshLayer:
    if self.change is None:
      return FreshLayer(KV(rotation.own(k), v, at))
    k, v, slots = self.change(k, v, rotation)
    return FreshLayer(KV(k, v, at), slots)

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> FreshLayer:
    del rotated, plain
    return self

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    del apart
    return (self.fresh.view(),)

  def recall(self, empty: Any) -> Any:
    return empty

  def keep(self, state: Any) -> FreshLayer:
    del state
    return self


class NoCache:
  """The cache of a call that leaves nothing behind."""

  mesh: Any = None
  axis: str | None = None
  states: Any = None

  def __init__(self, kinds: int):
    self._kinds = kinds

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * self._kinds

  @property
  def length(self) -> int:
    return 0

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    del batch, tokens, replicated, sees

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> NoCache:
    del at, replicated, sees
    return self

  def layer(self, kind: int, slots: Any, index: Any) -> FreshLayer:
    del kind, slots, index
    return FreshLayer()

  def updated(self, slots: tuple[Any, ...]) -> NoCache:
    del slots
    return self

  def truncate(self, length: Any) -> NoCache:
    del length
    return self

  def take(self, examples: Any) -> NoCache:
    del examples
    return self

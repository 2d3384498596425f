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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax.kv.codecs import CacheCodec
from ringjax.ops.attention.code_format import row_major
from ringjax.ops.attention.views import ContiguousView, KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.encoder_states import EncoderStates

# Positions at which rows end: one for all of them, or one for each.
Ends = Int[Array | np.ndarray, " ..."] | Sequence[int | np.integer] | int
# Numbers of rows of a batch.
RowIndices = Int[Array | np.ndarray, " _"] | Sequence[int | np.integer]


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
  dtype: DTypeLike
  mesh: Mesh | None = None
  axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
    if axis is None:
      return 1
    assert self.mesh is not None
    return self.mesh.shape[axis]

  def like(
    self,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    names: tuple[str | None, ...],
  ) -> Any:
    """An array's shape, dtype and sharding, which is by the dimensions' names.

    Heads are sharded if they divide.
    """
    if self.mesh is None:
      return jax.ShapeDtypeStruct(shape, dtype)
    spec = [name and self.axes.get(name) for name in names]
    for i, name in enumerate(names):
      if name == "heads" and spec[i] and shape[i] % self.mesh.shape[spec[i]]:
        spec[i] = None
    # A program for P() is not found for P(None).
    while spec and spec[-1] is None:
      spec.pop()
    sharding = NamedSharding(self.mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def zeros(like: PyTree) -> PyTree:
  """Zeros of these shapes, dtypes and shardings."""
  one = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
  return jax.tree.map(one, like)


def scattered_layer(
  old: Shaped[Array, "L ..."],
  layer: Index,
  put: Callable[[Shaped[Array, "_ ..."], Index], Shaped[Array, "_ ..."]],
) -> jax.Array:
  """`put(old, layer)`, which scatters into one layer.

  To scatter narrow numbers XLA's CPU compiler makes all of an array wide and
  narrow again: there of that layer's, rather than of all layers'.
  """
  narrow = jnp.issubdtype(old.dtype, jnp.floating) and old.dtype.itemsize < 4
  if not narrow:
    return put(old, layer)

  def alone(old: jax.Array) -> jax.Array:
    made = put(lax.dynamic_index_in_dim(old, layer, 0), jnp.int32(0))
    made = lax.optimization_barrier(made)
    return lax.dynamic_update_slice_in_dim(row_major(old), made, layer, 0)

  return lax.platform_dependent(
    old, cpu=alone, default=lambda old: put(old, layer)
  )


# The memory of a host from which devices read without a copy.
HOST = "pinned_host"
# Where the weights and keys of a layer may be, the fastest memory first.
DEVICE, IN_HOST, DISK = TIERS = ("device", "host", "disk")


def bytes_each(tree: PyTree) -> int:
  """Bytes of arrays, or of what stands for them, on each device.

  What is in the host's memory is not among them.
  """

  def one(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    if x.sharding is not None and x.sharding.memory_kind == HOST:
      return 0
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(one(x) for x in jax.tree.leaves(tree))


def donated(tree: PyTree) -> bool:
  """Whether some of its arrays were donated to a program."""
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  return any(
    x.is_deleted() for x in arrays if not isinstance(x, jax.core.Tracer)
  )


@runtime_checkable
class LayerCache(Protocol):
  """One layer's part of a cache during one call."""

  @property
  def slots(self) -> PyTree: ...

  @property
  def fresh(self) -> KV | None: ...

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

  @property
  def slots(self) -> PyTree: ...

  def recall(self, empty: PyTree) -> PyTree:
    """What earlier calls left; `empty` if they left nothing."""
    ...

  def keep(self, state: PyTree) -> StateCache:
    """Leaves a state to later calls."""
    ...


@runtime_checkable
class HeldKeys(Protocol):
  """A model's keys and values, as a call that appends nothing sees them.

  `mesh` and `axis` say over what its tokens are sharded; None: one device.
  """

  @property
  def slots(self) -> tuple[Any, ...]: ...

  @property
  def mesh(self) -> Mesh | None: ...

  @property
  def axis(self) -> str | None: ...

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    """The part of layer `index` among those of a kind, which share `slots`."""
    ...


@runtime_checkable
class CallCache(HeldKeys, Protocol):
  """A model's keys and values, as a call of the model sees them.

  `states` are those of an encoder, which cross-attention reads, or None.
  """

  @property
  def states(self) -> EncoderStates | None: ...

  @property
  def length(self) -> Any:
    """int32 [B], the position behind each example's last token; 0 if empty."""
    ...

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> CallCache:
    """Slots for tokens with these coordinates, [B, T].

    Args:
      at: the coordinates.
      replicated: whether the tokens are the same on all shards.
      sees: whether the call looks at what the cache holds; a call that does
        not starts the cache anew.
    """
    ...

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> CallCache:
    """Notes the ids of a call's tokens, behind `allocate`, if it needs them.

    Args:
      tokens: the ids.
      at: the coordinates that `allocate` got.
    """
    ...

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> LayerCache | StateCache:
    """The part of layer `index` among those of a kind, which share `slots`."""
    ...

  def updated(self, slots: tuple[Any, ...]) -> Any:
    """The cache after the layers."""
    ...


class FetchedCache(CallCache, Protocol):
  """A cache whose layers come to the devices when they run."""

  def fetch(
    self,
    kind: int,
    slots: PyTree,
    index: Index,
    after: Shaped[Array, " ..."],
  ) -> Any:
    """What `layer` takes as `fetched`, on its way from behind `after` on."""
    ...

  def layer(
    self, kind: int, slots: PyTree, index: Index, fetched: PyTree | None = None
  ) -> Any: ...

  def behind(self, layer: LayerCache | StateCache, after: PyTree) -> Any:
    """A layer's part that is put back once `after` has been fetched."""
    ...


@runtime_checkable
class Cache(CallCache, Protocol):
  """A model's keys and values."""

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens [B, T] that it has no place for, as far as it can know.

    `sees`: whether the call looks at what the cache holds already.
    """
    ...

  def truncate(self, length: Ends, most: int | None = None) -> Cache:
    """Without the tokens at positions from `length` on, an int or int [B]."""
    ...

  def take(self, examples: RowIndices) -> Cache:
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

  fresh: KV | None = None
  slots: PyTree = ()
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
    assert self.fresh is not None
    return (self.fresh.view(),)

  def recall(self, empty: PyTree) -> PyTree:
    return empty

  def keep(self, state: PyTree) -> FreshLayer:
    del state
    return self


class NoCache:
  """The cache of a call that leaves nothing behind."""

  mesh: Mesh | None = None
  axis: str | None = None
  states: EncoderStates | None = None

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

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> NoCache:
    del tokens, at
    return self

  def layer(self, kind: int, slots: PyTree, index: Index) -> FreshLayer:
    del kind, slots, index
    return FreshLayer()

  def updated(self, slots: tuple[Any, ...]) -> NoCache:
    del slots
    return self

  def truncate(self, length: Ends, most: int | None = None) -> NoCache:
    del length, most
    return self

  def take(self, examples: RowIndices) -> NoCache:
    del examples
    return self

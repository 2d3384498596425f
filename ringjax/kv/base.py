"""Interfaces of KV caches for models and layers, and the cache of no keys.

A cache belongs to a whole model. Before the layers run it allocates slots for
the call's tokens (`allocate`). Each layer then gets a `LayerCache`, appends its
keys and values and returns it; `updated` makes the new cache of what the layers
returned. Layers of one kind share an array with a leading layer axis, so that
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

# Positions at which rows end: one for all rows, or one for each row.
Ends = Int[Array | np.ndarray, " ..."] | Sequence[int | np.integer] | int
# Indices of rows of a batch.
RowIndices = Int[Array | np.ndarray, " _"] | Sequence[int | np.integer]


class KV(NamedTuple):
  """Keys, values and the coordinates of their tokens.

  Fields:
    k: Keys, [B, K, S, H].
    v: Values, [B, K, S, J].
    at: Coordinates of the tokens, [B or 1, S]; segment 0 is an empty slot.
  """

  k: jax.Array
  v: jax.Array
  at: Coords

  def view(self, shards: int = 1) -> ContiguousView:
    """View of one layer, padded with empty slots to a multiple of `shards`."""
    padding = -self.k.shape[2] % shards

    def pad(x: jax.Array, axis: int) -> jax.Array:
      if not padding:
        return x
      return jnp.pad(x, [(0, padding * (n == axis)) for n in range(x.ndim)])

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
    batch: Number of rows, B.
    capacity: Maximum number of tokens of a row.
    dtype: Dtype of keys and values.
    mesh: Mesh of the cache; None for one device.
    axes: Mesh axes of "batch", "heads" and "tokens", as in a PartitionSpec.
    codec: Codec that stores keys and values in bytes, or None.
    target: Platform; None for that of the mesh, or else the default one.
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
    """Platform of the devices, such as "cpu" or "tpu"."""
    if self.target is not None:
      return self.target
    if self.mesh is None:
      return jax.default_backend()
    return self.mesh.devices.flat[0].platform

  @property
  def shards(self) -> int:
    """Number of shards of the sequence."""
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
    """Shape, dtype and sharding of an array, by the names of its dimensions.

    Heads are sharded if their number is divisible by the size of the mesh axis.
    """
    if self.mesh is None:
      return jax.ShapeDtypeStruct(shape, dtype)
    spec = [name and self.axes.get(name) for name in names]
    for i, name in enumerate(names):
      if name == "heads" and spec[i] and shape[i] % self.mesh.shape[spec[i]]:
        spec[i] = None
    # P() and P(None) are different keys of the cache of compiled programs.
    while spec and spec[-1] is None:
      spec.pop()
    sharding = NamedSharding(self.mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def zeros(like: PyTree) -> PyTree:
  """Allocate zeros of the given shapes, dtypes and shardings."""
  make_zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
  return jax.tree.map(make_zeros, like)


def scattered_layer(
  old: Shaped[Array, "L ..."],
  layer: Index,
  put: Callable[[Shaped[Array, "_ ..."], Index], Shaped[Array, "_ ..."]],
) -> jax.Array:
  """Compute `put(old, layer)`, which scatters into one layer.

  To scatter into a 16-bit array, XLA's CPU compiler converts the whole array to
  float32 and back. On CPUs only the layer is passed, so that only it is
  converted.
  """
  narrow = jnp.issubdtype(old.dtype, jnp.floating) and old.dtype.itemsize < 4
  if not narrow:
    return put(old, layer)

  def put_in_layer(old: jax.Array) -> jax.Array:
    new_layer = put(lax.dynamic_index_in_dim(old, layer, 0), jnp.int32(0))
    new_layer = lax.optimization_barrier(new_layer)
    return lax.dynamic_update_slice_in_dim(row_major(old), new_layer, layer, 0)

  return lax.platform_dependent(
    old, cpu=put_in_layer, default=lambda old: put(old, layer)
  )


# Memory kind of a host from which devices read without a copy.
HOST = "pinned_host"
# Memories for the weights and keys of a layer, the fastest first.
DEVICE, IN_HOST, DISK = TIERS = ("device", "host", "disk")


def bytes_each(tree: PyTree) -> int:
  """Bytes of arrays or of their shapes on each device, without host memory."""

  def array_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    if x.sharding is not None and x.sharding.memory_kind == HOST:
      return 0
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(array_bytes(x) for x in jax.tree.leaves(tree))


def donated(tree: PyTree) -> bool:
  """Whether some arrays of a tree were donated to a program."""
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

    The keys are not rotated yet; `LayoutConfig.unrotated` says whether they are
    stored before or after `rotation`. `fresh` has them rotated.
    """
    ...

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> LayerCache:
    """Records the call's queries, [B, T, N, H], if the kind of cache needs it.

    Args:
      rotated: Function that returns the rotated queries.
      plain: Function that returns the queries before their rotation.
    """
    ...

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    """Views of all keys and values, with the appended ones; partials merge.

    `apart`: the last view has the appended ones, the others the earlier ones.
    """
    ...


@runtime_checkable
class StateCache(Protocol):
  """One recurrent layer's part of a cache during one call."""

  @property
  def slots(self) -> PyTree: ...

  def recall(self, empty: PyTree) -> PyTree:
    """State that earlier calls kept, or else `empty`."""
    ...

  def keep(self, state: PyTree) -> StateCache:
    """Stores a state for later calls."""
    ...


@runtime_checkable
class HeldKeys(Protocol):
  """A model's keys and values, for a call that appends nothing.

  Tokens are sharded over `axis` of `mesh`; None for one device.
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
  """A model's keys and values, for a call that appends its own.

  `states` are an encoder's, which cross-attention reads, or None.
  """

  @property
  def states(self) -> EncoderStates | None: ...

  @property
  def length(self) -> Any:
    """int32 [B], the position after each example's last token; 0 if empty."""
    ...

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> CallCache:
    """Allocates slots for a call's tokens.

    Args:
      at: Coordinates of the tokens, [B, T].
      replicated: Whether the tokens are the same on all shards.
      sees: Whether the call attends to the tokens in the cache; if not, the
        cache is emptied first.
    """
    ...

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> CallCache:
    """Records a call's token ids after `allocate`, if the cache needs them.

    Args:
      tokens: Token ids, int32 [B, T].
      at: Coordinates that were passed to `allocate`.
    """
    ...

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> LayerCache | StateCache:
    """The part of layer `index` among those of a kind, which share `slots`."""
    ...

  def updated(self, slots: tuple[Any, ...]) -> Any:
    """Cache with the slots that the layers returned."""
    ...


class FetchedCache(CallCache, Protocol):
  """A cache whose layers are copied to the devices when they run."""

  def fetch(
    self,
    kind: int,
    slots: PyTree,
    index: Index,
    after: Shaped[Array, " ..."],
  ) -> Any:
    """Start to copy a layer's part after `after`, as `fetched` for `layer`."""
    ...

  def layer(
    self, kind: int, slots: PyTree, index: Index, fetched: PyTree | None = None
  ) -> Any: ...

  def behind(self, layer: LayerCache | StateCache, after: PyTree) -> Any:
    """Put a layer's part back, once `after` has been fetched."""
    ...


@runtime_checkable
class Cache(CallCache, Protocol):
  """A model's keys and values."""

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens [B, T] that do not fit, as far as that can be known.

    `sees`: whether the call attends to the tokens in the cache.
    """
    ...

  def truncate(self, length: Ends, most: int | None = None) -> Cache:
    """Removes the tokens at positions from `length` on, an int or int [B]."""
    ...

  def take(self, examples: RowIndices) -> Cache:
    """Gathers the given examples, int [B']; an index may occur repeatedly."""
    ...


class FreshLayer(NamedTuple):
  """A layer's part of a cache that stores nothing: only the call's own keys.

  Fields:
    fresh: Keys and values of the call.
    slots: Arrays that the layer returns to its cache.
    change: Function of unrotated keys, values and the rotation that returns
      rotated keys, values and slots; None only rotates.
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
  """The cache of a call that stores nothing."""

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

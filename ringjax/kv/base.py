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
from typing import (
  TYPE_CHECKING,
  Any,
  ClassVar,
  NamedTuple,
  Protocol,
  TypeVar,
  runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax.kv.codecs import CacheCodec
from ringjax.ops.attention.cached.code_format import row_major
from ringjax.ops.attention.cached.views import ContiguousView, KVView
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.rope import Rotation
from ringjax.typing import ArrayLeaf, Index, leaf

if TYPE_CHECKING:
  from ringjax.kv.composed.row_groups import RowGroups
  from ringjax.kv.encoder_states import EncoderStates
  from ringjax.kv.storage.call_tiles import CacheTile, CallTiles
  from ringjax.ops.attention.cached.selection import KeySelection

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

  @classmethod
  def of(
    cls,
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    codec: CacheCodec | None,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    head_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
    platform: str | None = None,
  ) -> CacheSpec:
    """Cache allocation by the arguments of `KVCache.spec`."""
    return cls(
      batch=batch,
      capacity=capacity,
      dtype=jnp.dtype(dtype),
      mesh=mesh,
      axes=dict(batch=batch_axes or None, heads=head_axis, tokens=axis),
      codec=codec,
      target=platform,
    )

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
  ) -> ArrayLeaf:
    """Shape, dtype and sharding of an array, by the names of its dimensions.

    Heads are sharded if their number is divisible by the size of the mesh axis.
    """
    if self.mesh is None:
      return leaf(jax.ShapeDtypeStruct(shape, dtype))
    spec = [name and self.axes.get(name) for name in names]
    for i, name in enumerate(names):
      if name == "heads" and spec[i] and shape[i] % self.mesh.shape[spec[i]]:
        spec[i] = None
    # P() and P(None) are different keys of the cache of compiled programs.
    while spec and spec[-1] is None:
      spec.pop()
    sharding = NamedSharding(self.mesh, P(*spec))
    return leaf(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))


def zeros(like: PyTree) -> PyTree:
  """Allocate zeros of the given shapes, dtypes and shardings."""
  make_zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
  return jax.tree.map(make_zeros, like)


def scattered_layer(
  old: Shaped[Array, "L ..."],
  layer: Index,
  put: Callable[[Shaped[Array, "_ ..."], Index], Shaped[Array, "_ ..."]],
) -> Shaped[Array, "L ..."]:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistantSlots:
  """Keys and values of layers that calls copy to the devices, one by one.

  Attributes:
    fetched: During a call, the arrays of its current layer, by `fetch`.
  """

  fetched: PyTree = ()

  if TYPE_CHECKING:

    @property
    def disk_bytes(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...

  def fetch(self, index: Index, after: Shaped[Array, " ..."]) -> PyTree:
    """Starts to copy a layer's part to the devices, see `CallCache.fetch`."""
    raise NotImplementedError


@runtime_checkable
class IndexedLayer(Protocol):
  """One layer's part of a cache that copies the keys that an index chooses."""

  def chosen_by(self, selection: KeySelection) -> LayerCache:
    """Copies the keys that the call's index queries choose to the devices."""
    ...


@runtime_checkable
class DistantLayer(Protocol):
  """One layer's part of a cache with `DistantSlots` during one call."""

  def written_after(self, fetched: PyTree) -> LayerCache:
    """Puts the part back only when these arrays have been fetched."""
    ...


class CallCoords(NamedTuple):
  """Coordinates of a call's tokens as they are passed, each [B or 1, T].

  Fields:
    pos: Positions, int32, or None for those after the cache's tokens.
    seg: Documents, int32, or None for one.
    parents: Parents of the tokens of a drafted tree, int32, or None.
    segments: Mask that says which documents see each other.
  """

  pos: Int[Array, "#B T"] | None
  seg: Int[Array, "#B T"] | None
  parents: Int[Array, "#B T"] | None
  segments: Mask


CallCacheT = TypeVar("CallCacheT", bound="CallCache")


class CallCache:
  """A model's keys and values, for a call that appends its own.

  A kind of cache has `slots`, `mesh`, `axis` (see `HeldKeys`), `states` of an
  encoder, which cross-attention reads, or None, and `length`, int32 [B], the
  position after each row's last token. What a method does here is what a cache
  does that needs nothing special.
  """

  # Whether the cache keeps the call's tokens for later calls.
  stores: ClassVar[bool] = True
  # Field that a cache which borrows takes from the call before; "": none does.
  lender: ClassVar[str] = ""
  # Whether its layers copy keys ahead by guessed queries: they have `begun`,
  # which returns the copies, and `having`, which gives them to the layer.
  begins_early: ClassVar[bool] = False

  if TYPE_CHECKING:
    # Kinds of caches are dataclasses.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def slots(self) -> tuple[Any, ...]: ...
    @property
    def mesh(self) -> Mesh | None: ...
    @property
    def axis(self) -> str | None: ...
    @property
    def states(self) -> EncoderStates | None: ...
    @property
    def length(self) -> Any: ...

  @property
  def tiles(self) -> tuple[CallTiles, ...]:
    """Tiles of the call's tokens; (): all tokens pass a layer together."""
    return ()

  def tile(self, level: int, n: Index) -> CacheTile:
    """Tile n of those of one size, `tiles[level]`."""
    raise NotImplementedError

  @property
  def present(self) -> Int[Array, ""] | None:
    """1, or 0 for a call that computes nothing; None: it always computes."""
    return None

  @property
  def borrows(self) -> bool:
    """Whether its keys are in the arrays of the call before it in a program.

    Its `slots` then have None in their places.
    """
    return False

  def onto(self: CallCacheT, before: PyTree) -> CallCacheT:
    """Cache that borrows, with what the call before it returned."""
    assert self.lender
    return dataclasses.replace(self, **{self.lender: before})

  @property
  def row_groups(self) -> RowGroups | None:
    """Groups of rows whose layers run one after another; None: all together."""
    return None

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens [B, T] that do not fit, as far as that can be known.

    Args:
      batch: Number of rows, B.
      tokens: Number of tokens per row, T.
      replicated: Whether the tokens are the same on all shards.
      sees: Whether the call attends to the tokens in the cache.
    """
    del batch, tokens, replicated, sees

  def check_coords(self, coords: CallCoords) -> None:
    """Refuses tokens whose coordinates the cache cannot keep apart."""
    del coords

  def allocate(
    self: CallCacheT,
    at: Coords,
    *,
    replicated: bool,
    sees: bool,
    tokens: Int[Array, "B T"] | None = None,
  ) -> CallCacheT:
    """Allocates slots for a call's tokens.

    Args:
      at: Coordinates of the tokens, [B, T].
      replicated: Whether the tokens are the same on all shards; otherwise T
        is sharded and each shard keeps its part.
      sees: Whether the call attends to the tokens in the cache; if not, the
        cache is emptied first.
      tokens: Token ids, int32 [B, T], for caches whose policy uses them; None
        if the call has none.
    """
    del at, replicated, sees, tokens
    return self

  def fetch(
    self,
    kind: int,
    slots: PyTree,
    index: Index,
    after: Shaped[Array, " ..."],
    queries: Callable[[], Array | None] = lambda: None,
  ) -> PyTree:
    """Starts to copy a layer's part to the devices, for `fetched_layer`.

    Args:
      kind: Index of the kind of layer.
      slots: Keys and values of the kind's layers.
      index: Index of the layer within the kind; one beyond the last gives
        what nothing reads.
      after: Array that must be computed before the copy, so that no layer
        takes device memory too early.
      queries: Function that guesses the layer's rotated queries [B, T, N, H]
        from the input of the layer before, or returns None if it can't.

    Returns:
      The arrays in flight; () for a layer that is on the devices.
    """
    if self.begins_early:
      return self.layer(kind, slots, index).begun(queries)
    return slots.fetch(index, after) if isinstance(slots, DistantSlots) else ()

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    """The part of layer `index` among those of a kind, which share `slots`."""
    raise NotImplementedError

  def fetched_layer(
    self, kind: int, slots: PyTree, index: Index, fetched: PyTree
  ) -> Any:
    """`layer`, of which `fetch` returned `fetched`."""
    if isinstance(slots, DistantSlots):
      slots = dataclasses.replace(slots, fetched=fetched)
    layer = self.layer(kind, slots, index)
    return layer.having(fetched) if self.begins_early and fetched else layer

  def behind(
    self, layer: LayerCache | StateCache, after: PyTree
  ) -> LayerCache | StateCache:
    """Puts a layer's part back only when `after` has been fetched."""
    if not isinstance(layer, DistantLayer):
      return layer
    return layer.written_after(after)

  def updated(self, slots: tuple[Any, ...]) -> Any:
    """Cache with the slots that the layers returned."""
    raise NotImplementedError


class CallLayer:
  """One layer's part of a cache that records no queries."""

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> Any:
    del rotated, plain
    return self


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


class NoCache(CallCache):
  """The cache of a call that stores nothing."""

  stores: ClassVar[bool] = False
  mesh: Mesh | None = None
  axis: str | None = None
  states: EncoderStates | None = None

  def __init__(self, kinds: int):
    self._kinds = kinds

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * self._kinds

  @property
  def length(self) -> Int[Array, " B"] | int:
    return 0

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
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

"""The cache of a model: keys of its layers, and states of recurrent ones.

Guarantees: rows are independent; appending tokens, removing some of them and
appending others is the same as never having appended the removed ones; exported
tokens are loaded bit for bit.
Memory: L B S K (H + J) numbers, where S is the capacity; for windowed layers
of kind "windowed" S is their window and a slack, see `window`.

`ContiguousSlots` and `WindowSlots` are tables of the token in each slot; each
kind of layer of the model has one array of keys and one of values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import (
  OptionError,
  PromptError,
  ShapeError,
)
from ringjax.kv.base import KV, CacheSpec, CallLayer, Ends, RowIndices, zeros
from ringjax.kv.cache_kind import DENSE, CacheConfig
from ringjax.kv.cache_report import CacheReport, report
from ringjax.kv.cache_rows import placed_as, row_indices
from ringjax.kv.codecs import Allocated, Codec, PerHead, VectorCodec
from ringjax.kv.codecs.codec import through
from ringjax.kv.encoder_states import EncoderStates, checked, inserted
from ringjax.kv.model_cache import ModelCache, refuse_unseen
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.query_reading import KeyReading
from ringjax.kv.state import State, StateShape
from ringjax.kv.storage.head_storage import HeadStorage
from ringjax.kv.storage.slots import (
  FILL,
  REPLICATED,
  SHARDED,
  ContiguousSlots,
)
from ringjax.kv.storage.window import WindowSlots, window_slots
from ringjax.ops.attention.cached.code_format import (
  as_stored,
  filled_up,
  stored_codes,
  token_axis,
)
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  KVView,
  UnrotatedView,
  tile_slots,
)
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.parallel import chips
from ringjax.parallel.local_arrays import move
from ringjax.parallel.programs import bounded
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


def model_layers(shapes: Sequence[LayerCacheSpec | StateShape]) -> int:
  """Number of layers of a model, up to the last one that has a cache.

  A layer with several mixers has several shapes and counts once.
  """
  return 1 + max(n for shape in shapes for n in shape.which)


class LayerKV(NamedTuple):
  """Keys and values of the layers of one kind.

  Fields:
    k: Keys [L, B, K, S, H]; with a codec its codes, see `stored_codes`. With a
      codec per head, one array for each codec, see `HeadStorage`.
    v: Values [L, B, K, S, J], or their codes.
  """

  k: Shaped[ArrayLeaf, "L B K _ _"]
  v: Shaped[ArrayLeaf, "L B K _ _"]


class Blocks(NamedTuple):
  """Exported tokens of one row of a cache.

  Fields:
    at: Coordinates [n], in order of position.
    parts: For each kind of layer keys [L, K, n, H] and values [L, K, n, J];
      codes on a TPU are [L, K, X, n].
    kind: Kind of the cache that exported them.

  Layers with a ring buffer export only the last `reach` tokens.
  """

  at: Coords
  parts: tuple[LayerKV, ...]
  kind: CacheConfig


class Growth(NamedTuple):
  """Growth policy of a cache's memory.

  Fields:
    step: Minimum number of slots to add.
    limit: Maximum number of tokens in a row.
  """

  step: int
  limit: int

  def size(self, tokens: int) -> int:
    """Capacity for `tokens` tokens, rounded up to one of few sizes.

    At most a ninth of the slots, or less than one step, stays unused.
    """
    step = self.step << max(0, tokens // (8 * self.step)).bit_length()
    return min(self.limit, -(-tokens // step) * step)


class Snapshot(NamedTuple):
  """State of a cache for `restore`; keys and values are not copied.

  Fields:
    slots: Coordinates and cursors of the layers that keep all tokens.
    rings: Coordinates and cursors of the ring buffers.
    states: Arrays of recurrent layers and ring buffers; None for others.
  """

  slots: ContiguousSlots
  rings: tuple[WindowSlots, ...]
  states: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class KVCache(ModelCache):
  """A cache of fixed capacity.

  Attributes:
    slots: For each kind of layer its `LayerKV`, or `State` if recurrent.
    held: Slot table (token of each slot) of the layers that keep all tokens.
    rings: Slot tables of the ring buffers, one for each size.
    ring_of: For each kind of layer the index of its ring in `rings`, or None.
    kind: Storage format of keys and values.
    mesh: Device mesh whose `axis` shards S; None for one device.
    axis: Mesh axis of the sequence.
    shapes: For each kind of layer, the shape of one token's cached vectors.
    dtype: Dtype of keys and values after decoding.
    constants: For each kind of layer the constants of its key and value codecs,
      [L, K, n] each; with a codec per head, constants for each codec.
    states: Encoder states that cross-attention reads, per row, or None.
    growth: Growth step and limit; None if the capacity is fixed.
  """

  slots: tuple[LayerKV | State, ...]
  held: ContiguousSlots
  rings: tuple[WindowSlots, ...] = ()
  ring_of: tuple[int | None, ...] = ()
  kind: CacheConfig = DENSE
  mesh: Mesh | None = None
  axis: str | None = None
  shapes: tuple[LayerCacheSpec | StateShape, ...] = ()
  dtype: DTypeLike | None = None
  constants: tuple[Any, ...] = ()
  states: EncoderStates | None = None
  growth: Growth | None = None
  row_axes: ClassVar[Mapping[str, int]] = {
    "slots": 1,
    "held": 0,
    "rings": 0,
    "states": 0,
  }

  @classmethod
  def spec(
    cls,
    shapes: tuple[LayerCacheSpec | StateShape, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheConfig = DENSE,
    mesh: Mesh | None = None,
    axis: str | None = None,
    head_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
    platform: str | None = None,
    filled: bool = False,
  ) -> KVCache:
    """Specs (shapes, dtypes, shardings) of an empty cache; allocates nothing.

    Args:
      shapes: For each kind of layer, the shape of one token's cached vectors.
      batch: Number of rows, B.
      capacity: Tokens per row, a multiple of the number of shards.
      dtype: Dtype of keys and values.
      kind: Storage format of keys and values.
      mesh: Device mesh; None for one device.
      axis: Mesh axis that shards the slots.
      head_axis: Mesh axis that shards the KV heads if it divides them.
      batch_axes: Mesh axes that shard the batch.
      platform: Target platform; default: the mesh's, or else JAX's default.
      filled: Whether to pad head dims on a TPU with zeros, so that programs
        need not copy the slots in and out: see `filled_up`.

    Raises:
      OptionError: If `capacity` is not a multiple of the number of shards.
    """
    size = 1 if axis is None or mesh is None else mesh.shape[axis]
    if capacity < 1 or capacity % size:
      raise OptionError(
        "capacity",
        capacity,
        f"a positive multiple of the {size} shards",
        f"round it up to {max(1, math.ceil(capacity / size)) * size}",
      )
    room = CacheSpec.of(
      batch,
      capacity,
      dtype,
      kind.codec,
      mesh=mesh,
      axis=axis,
      head_axis=head_axis,
      batch_axes=batch_axes,
      platform=platform,
    )
    sizes = [_ring_size(s, kind, room) for s in shapes]
    rings = sorted({x for x in sizes if x is not None})
    rooms = [dataclasses.replace(room, capacity=n) for n, _ in rings]
    ring_of = tuple(None if x is None else rings.index(x) for x in sizes)

    def slots(
      shape: LayerCacheSpec | StateShape, room: CacheSpec
    ) -> LayerKV | State:
      if filled and isinstance(shape, LayerCacheSpec):
        return shape.filled_slots(room)
      return shape.slots(room)

    return cls(
      tuple(
        slots(s, room if n is None else rooms[n])
        for s, n in zip(shapes, ring_of, strict=True)
      ),
      ContiguousSlots.spec(room),
      tuple(
        WindowSlots.spec(room, reach, kind.layout.slack)
        for room, (_, reach) in zip(rooms, rings, strict=True)
      ),
      ring_of,
      kind,
      mesh,
      axis,
      shapes,
      jnp.dtype(dtype),
      tuple(constants_spec(s, kind, room) for s in shapes),
    )

  def allocated(self, files: CacheFiles | None = None) -> KVCache:
    del files
    constants = filled_constants(self.shapes, self.kind, self.constants)
    return dataclasses.replace(zeros(self), constants=constants)

  @property
  def at(self) -> Coords:
    """Coordinates of all slots, [B, S]."""
    return self.held.at

  @property
  def shards(self) -> int:
    return self.held.shards

  @property
  def capacity(self) -> int:
    return self.held.capacity

  @property
  def batch(self) -> int:
    return self.at.pos.shape[0]

  @property
  def length(self) -> Int[Array, " B"]:
    return self.held.length

  @property
  def recurrent(self) -> bool:
    return any(isinstance(s, State) for s in self.slots)

  @property
  def irreversible(self) -> bool:
    return self.recurrent

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over a full cache's tiles.

    Args:
      platform: Platform whose tiles are counted, as JAX names it.
    """
    max_tiles = 0
    for slots, layer_spec in zip(self.slots, self.shapes, strict=True):
      if isinstance(slots, LayerKV):
        assert isinstance(layer_spec, LayerCacheSpec)
        length = slots.k.shape[token_axis(slots.k)] // self.shards
        shape = (*slots.k.shape[:3], length, layer_spec.key)
        # Tiles of decoded keys, in the cache's dtype.
        tile: Any = jax.ShapeDtypeStruct(shape, self.dtype)
        stored = ContiguousView(tile, tile, self.at, jnp.int32(0))
        max_tiles = max(max_tiles, -(-length // tile_slots(stored, platform)))
    return max_tiles / 2

  def explain(
    self,
    machine: chips.Machine | str | None = None,
    *,
    tokens: int | None = None,
    weights: int | float = 0,
  ) -> CacheReport:
    """Report memory by part, and the decode speed that it allows.

    Args:
      machine: Hardware to assume, from `ringjax.parallel.chips.MACHINES`.
        Default: the current devices.
      tokens: Tokens per row that a decode step reads; default: all that fit.
      weights: Bytes of weights per device that a step also reads.

    Returns:
      A report that prints as a table.

    Raises:
      OptionError: If the machine is unknown, or more tokens than fit.
    """
    return report(self, machine, tokens, weights)

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of free slots, int [B, R]; None under a trace.

    Slots that the cache can still grow by are included, see `growing`.
    """
    free = self.held.free()
    if free is None or self.growth is None:
      return free
    return free + self.growth.limit - self.capacity

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Check that tokens [B, T] fit.

    Under a trace the contents are unknown: only shapes are checked, and the
    caller must ensure that the tokens fit.

    Args:
      batch: Number of rows, B.
      tokens: Number of tokens per row, T.
      replicated: Whether the tokens are the same on all shards.
      sees: Whether the call attends to tokens already in the cache.

    Raises:
      ShapeError: If the batch differs, or the shards do not divide the tokens.
      PromptError: If there are too few free slots.
      OptionError: If the call would not see the tokens in the cache, or the
        buffers were donated.
    """
    size = self.shards
    if batch != self.batch:
      raise ShapeError(
        "cache",
        f"{batch} example(s) for a cache of {self.batch}",
        "as many examples as the cache was made for",
        f"make one with model.init_cache({batch}, {self.capacity})",
      )
    if not replicated and tokens % size:
      raise ShapeError(
        "tokens",
        f"{tokens} tokens over {size} shards",
        f"a multiple of {size}",
        "fill them up with tokens whose segment_ids are 0",
      )
    if self.lost:
      raise OptionError(
        "cache",
        "one whose buffers were donated to an earlier call",
        "the cache that the last call returned",
        "pass that one, or make a new one with model.init_cache",
      )
    free = self.held.free()
    if free is None:
      free = np.full((batch, size), self.capacity // size)
    refuse_unseen(sees, int(self.capacity - free.sum(1).min()))
    free_slots = int(free.sum(1).min() if replicated else size * free.min())
    if tokens > free_slots:
      raise PromptError(
        "cache",
        f"{tokens} more tokens for a cache of {self.capacity} slots, of "
        f"which {self.capacity - free_slots} are taken",
        f"at most {free_slots}",
        "make a larger one, with model.init_cache(batch, capacity)"
        if self.growth is None
        else f"call cache.with_room({tokens}) before, outside of jit",
      )

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> KVCache:
    """Allocate slots for T tokens with these coordinates, [B, T].

    Args:
      at: Coordinates of the tokens.
      replicated: Whether the tokens are the same on all shards; otherwise T
        is sharded and each shard keeps its part.
      sees: Whether the call attends to tokens in the cache; if not, it starts
        from an empty cache.
    """
    mode = REPLICATED if replicated else SHARDED if sees else FILL
    return self._with_tables(lambda table: table.allocate(at, mode))

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    if isinstance(slots, State):
      return slots.layer(self, index)
    return KVLayer(self, self.table(kind), slots, index, kind)

  def table(self, kind: int) -> ContiguousSlots | WindowSlots:
    """Slot table of a kind of layer: the token in each slot."""
    number = self._ring(kind)
    return self.held if number is None else self.rings[number]

  def _with_tables(self, f: Callable[..., Any]) -> KVCache:
    """Replace each slot table by f(table)."""
    return dataclasses.replace(
      self, held=f(self.held), rings=tuple(map(f, self.rings))
    )

  def _permuted(self, f: Callable[..., tuple[Any, Any]]) -> KVCache:
    """Replace each slot table, and the order of its layers' tokens.

    Args:
      f: Function of a table that returns the new one, and a function that
        permutes the arrays of a layer.
    """
    slot_table, permute = f(self.held)
    rings = [f(ring) for ring in self.rings]

    def permuted(kind: int, slots: PyTree) -> PyTree:
      if isinstance(slots, State):
        return slots
      number = self._ring(kind)
      move_tokens = permute if number is None else rings[number][1]
      return jax.tree.map(move_tokens, slots)

    return dataclasses.replace(
      self,
      slots=tuple(permuted(kind, x) for kind, x in enumerate(self.slots)),
      held=slot_table,
      rings=tuple(ring for ring, _ in rings),
    )

  def _ring(self, kind: int) -> int | None:
    """Index of a layer kind's ring; None if it keeps all tokens."""
    return self.ring_of[kind] if self.ring_of else None

  def updated(self, slots: tuple[Any, ...]) -> KVCache:
    """Return the cache with the slots that the layers returned."""
    cache = self._with_tables(lambda table: table.committed())
    return dataclasses.replace(cache, slots=slots)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def with_states(self, states: EncoderStates | None) -> KVCache:
    """Attach copies of encoder states for cross-attention of later calls.

    Tokens already in the cache were computed without them.

    Args:
      states: Encoder states of B rows, by `rj.models.cepe.encode`, or None.

    Raises:
      InputTypeError: If `states` is of another type.
      ShapeError: If its batch differs.
    """
    if states is None:
      return dataclasses.replace(self, states=None)
    states = checked(states, self.batch)
    # Calls donate a cache, and the caller may need the states again.
    size = -(-states.seg.shape[1] // self.shards) * self.shards
    states = jax.tree.map(jnp.copy, states.padded(size))
    at = self.at.pos
    if self.mesh is not None and not isinstance(at, jax.core.Tracer):
      # Each state is on one shard, as the slots are.
      states = jax.tree.map(lambda x: jax.device_put(x, at.sharding), states)
    return dataclasses.replace(self, states=states)

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> KVCache:
    """Return the cache, grown by a token's room if it is a growing one."""
    del rows
    return self.with_room(1)

  def growing(self, step: int, limit: int) -> KVCache:
    """Return the cache with memory that grows as tokens are appended.

    Args:
      step: Minimum number of slots to add; longer caches grow by more.
      limit: Maximum number of tokens in a row.

    Raises:
      OptionError: If the slots are sharded, or layers have ring buffers.
    """
    if self.shards > 1 or self.rings:
      raise OptionError(
        "grow",
        f"{step}, of slots over {self.shards} shard(s) with {len(self.rings)} "
        "sizes of ring buffers",
        "one shard of the sequence, and layers that keep all tokens",
        "leave it out, or pass cache_kind='dense' and no sequence axis",
      )
    return dataclasses.replace(self, growth=Growth(step, limit))

  def with_room(self, taken: Int[np.ndarray, "B R"] | int) -> KVCache:
    """Grow the cache to fit a call's tokens, if it grows; see `growing`.

    Each array is copied into a larger one and deleted, one after another.
    Blocks until the programs that fill the cache are done.

    Args:
      taken: Number of slots that the call takes.
    """
    if self.growth is None:
      return self
    need = self.capacity - self._spare() + int(np.max(taken))
    if need <= self.capacity or self.capacity >= self.growth.limit:
      return self
    added_slots = self.growth.size(need) - self.capacity

    def widened(x: jax.Array, axis: int) -> jax.Array:
      larger = _widened(x, axis, added_slots) if x.size else x
      if larger is not x:
        x.delete()
      return larger

    slots = tuple(
      s
      if isinstance(s, State)
      else jax.tree.map(lambda x: widened(x, token_axis(x)), s)
      for s in self.slots
    )
    at = Coords(*(widened(x, 1) for x in self.held.at))
    slot_table = dataclasses.replace(self.held, at=at)
    return dataclasses.replace(self, slots=slots, held=slot_table)

  def _spare(self) -> int:
    """Free slots after the last token of the longest row."""
    return int(np.asarray(self.held.free()).min())

  def steps(self) -> int:
    """Number of tokens that can be appended before `flush` is due."""
    return self.capacity + 1 if self.growth is None else self._spare()

  def truncate(self, length: Ends, most: int | None = None) -> KVCache:
    """Drop the tokens at positions from `length` on, an int or int [B].

    Slots after the last remaining token become free.

    Args:
      length: Number of tokens to keep; may be traced, with ring buffers only
        if `most` is given.
      most: Upper bound of the tokens dropped per row, known to the caller.

    Raises:
      OptionError: If a layer is recurrent, or if more than the last `slack`
        tokens of a ring buffer would be dropped.
    """
    self._refuse_states("truncate")
    end = self.row_ends(length)
    if self.rings and (most is None or most > self.kind.layout.slack):
      self._refuse_far(end)
    return self._with_tables(lambda table: table.truncate(end))

  def _refuse_far(self, end: jax.Array) -> None:
    """Check that ring buffers can be truncated as far as `end`."""
    slack = self.kind.layout.slack
    if isinstance(end, jax.core.Tracer) or isinstance(
      self.held.used, jax.core.Tracer
    ):
      raise OptionError(
        "length",
        "a traced value, with windowed layers",
        "one that is known, so that it can be checked",
        "truncate outside of jit, or make the cache with kind='dense'",
      )
    new = np.asarray(end)
    removed_tokens = np.where(new > 0, np.asarray(self.length) - new, 0)
    furthest = int(removed_tokens.max(initial=0))
    if furthest > slack:
      raise OptionError(
        "length",
        f"{furthest} tokens less than a row has, with windowed layers",
        f"at most the last {slack}, or all of a row",
        "make the cache with kind='dense', or with a larger slack",
      )

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> KVCache:
    """Keep only the tokens in `kept`, bool [B, T], of the last call's T tokens.

    The others are dropped as if never appended, for instance rejected draft
    tokens. The call's tokens must have been the same on all shards. Kept tokens
    move to the first slots of the call, in place if the cache is donated.

    Raises:
      OptionError: If a layer is recurrent: use `snapshot` and `restore`.
      ShapeError: If `kept` is not a bool for each token.
    """
    self._refuse_states("keep")
    kept = jnp.asarray(kept)
    if kept.dtype != bool or kept.ndim != 2 or kept.shape[0] != self.batch:
      raise ShapeError(
        "kept",
        f"{kept.dtype} {list(kept.shape)}",
        f"bool [{self.batch}, T], a value for each token of the last call",
        "pass jnp.arange(T)[None] < accepted[:, None], for instance",
      )
    self._refuse_beyond_slack("kept", kept.shape[1])
    return _keep(self, kept)

  def keep_first(
    self, count: Int[Array | np.ndarray, " B"], tokens: int
  ) -> KVCache:
    """Keep only the first `count` of the last call's tokens, in each row.

    As `keep` with these tokens, but no token moves: the cursors go back, and
    the slots after them are empty.

    Args:
      count: Number of tokens to keep, int [B].
      tokens: Number of tokens of the last call, T.

    Raises:
      OptionError: If a layer is recurrent: use `snapshot` and `restore`.
      ShapeError: If `count` is not an integer for each row.
    """
    self._refuse_states("keep_first")
    count = jnp.asarray(count)
    integers = jnp.issubdtype(count.dtype, jnp.integer)
    if not integers or count.shape != (self.batch,):
      raise ShapeError(
        "count",
        f"{count.dtype} {list(count.shape)}",
        f"int [{self.batch}], a number of tokens for each row",
        "pass jnp.sum(accepted, 1), for instance",
      )
    self._refuse_beyond_slack("tokens", tokens)
    return _keep_first(self, count)

  def _refuse_beyond_slack(self, option: str, tokens: int) -> None:
    """Refuse to take back tokens of a call that overwrote others in a ring."""
    if self.rings and tokens > self.kind.layout.slack:
      raise OptionError(
        option,
        f"{tokens} tokens, with windowed layers",
        f"at most {self.kind.layout.slack}, of which these can take some back",
        "make the cache with kind='dense', or with a larger slack",
      )

  def snapshot(self) -> Snapshot:
    """Save the state for `restore`; later calls may donate the cache."""
    states = tuple(
      s if isinstance(s, State) or self._ring(n) is not None else None
      for n, s in enumerate(self.slots)
    )
    return jax.tree.map(jnp.copy, Snapshot(self.held, self.rings, states))

  def restore(self, snapshot: Snapshot) -> KVCache:
    """Restore the state of a snapshot of this cache."""
    slots = tuple(
      old if state is None else jax.tree.map(jnp.copy, state)
      for old, state in zip(self.slots, snapshot.states, strict=True)
    )
    slot_table, rings = jax.tree.map(jnp.copy, (snapshot.slots, snapshot.rings))
    return dataclasses.replace(self, slots=slots, held=slot_table, rings=rings)

  def call_state(self, tokens: int) -> tuple[State | None, ...]:
    self._refuse_beyond_slack("tokens", tokens)
    states = tuple(s if isinstance(s, State) else None for s in self.slots)
    return jax.tree.map(jnp.copy, states)

  def undo_call(self, state: tuple[State | None, ...]) -> KVCache:
    nothing = jnp.zeros((self.batch,), jnp.int32)
    cache = self._with_tables(lambda table: table.kept_first(nothing))
    slots = tuple(
      old if saved is None else jax.tree.map(jnp.copy, saved)
      for old, saved in zip(self.slots, state, strict=True)
    )
    return dataclasses.replace(cache, slots=slots)

  def reset(self, rows: RowIndices) -> KVCache:
    """Empty these rows, int [n]; the others stay."""
    rows = row_indices(rows, self.batch)
    emptied = lambda table: placed_as(table.emptied(rows), table)
    cache = self._with_tables(emptied)
    clear = lambda x: x.at[:, rows].set(0)
    slots = tuple(
      jax.tree.map(clear, s) if isinstance(s, State) else s for s in self.slots
    )
    return dataclasses.replace(
      cache,
      slots=placed_as(slots, self.slots),
      states=self.states and self.states.reset(rows),
    )

  def insert(self, rows: RowIndices, other: KVCache) -> KVCache:
    """Replace `rows`, int [n], by the rows of another cache.

    Raises:
      OptionError: If model, capacity, kind or mesh of the caches differ.
      ShapeError: If `rows` are not as many as the other cache has.
    """
    indices = row_indices(rows, self.batch)
    shape = lambda c: (
      [(x.shape[0], *x.shape[2:]) for x in jax.tree.leaves(c.slots)]
      + [c.capacity, c.kind, c.shards]
    )
    if shape(other) != shape(self):
      raise OptionError(
        "other",
        f"a cache of {other.capacity} tokens, kind {other.kind}, over "
        f"{other.shards} shard(s)",
        f"one of the same model, capacity {self.capacity}, kind {self.kind} "
        f"and {self.shards} shard(s)",
        "make both with model.init_cache and the same arguments but batch",
      )
    if indices.size != other.batch:
      raise ShapeError(
        "rows",
        f"{indices.size} for a cache of {other.batch}",
        f"{other.batch}, one for each row of the other cache",
        "take the rows to insert: other.take(examples)",
      )
    states = inserted(self.states, indices, other.states, self.batch)
    slot_table = dataclasses.replace(other.held, mode=self.held.mode)
    other = dataclasses.replace(other, held=slot_table, states=None)
    stateless = dataclasses.replace(self, states=None)
    fields = stateless.rows_replaced(indices, other) | {"states": states}
    return dataclasses.replace(self, **fields)

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """Copy out a row's tokens at positions from `start` to `stop` - 1.

    Raises:
      OptionError: If a layer is recurrent: it has no state per token.
      PromptError: If the row lacks some of these positions; ring buffers need
        only the last `reach` of them.
    """
    row = int(row_indices([row], self.batch)[0])
    token_slots, rings = self.located(self.at, row, start, stop)

    def part(kind: int, slots: PyTree) -> PyTree:
      number = self._ring(kind)
      index = jnp.asarray(
        token_slots if number is None else rings[number], jnp.int32
      )
      take = lambda x: jnp.take(x[:, row], index, axis=token_axis(x) - 1)
      return self.unfilled(kind, jax.tree.map(take, slots))

    parts = tuple(part(kind, x) for kind, x in enumerate(self.slots))
    at = Coords(*(x[row][jnp.asarray(token_slots, jnp.int32)] for x in self.at))
    return Blocks(at, parts, self.kind)

  def unfilled(self, kind: int, part: PyTree) -> PyTree:
    """Strip the padding of head dims from slots or tokens of a kind of layer.

    Args:
      kind: Index of the kind of layer.
      part: Arrays [..., >=H] and [..., >=J]; codes are returned unchanged.
    """
    shape = self.shapes[kind]
    if self.kind.codec is not None or not isinstance(shape, LayerCacheSpec):
      return part
    return LayerKV(part.k[..., : shape.key], part.v[..., : shape.value])

  def located(
    self, at: Coords, row: int, start: int, stop: int
  ) -> tuple[Int[np.ndarray, " _"], list[Int[np.ndarray, " _"]]]:
    """Find the slots of a row's positions, by position; see `export`.

    Args:
      at: Coordinates of the slots of layers that keep all tokens.
      row: Index of the row in the cache.
      start: First position.
      stop: Position after the last.

    Returns:
      Slots of the layers that keep all tokens, and slots of each ring buffer.
    """
    self._refuse_states("export")
    token_slots, complete = _found(at, row, start, stop)
    if not complete:
      raise PromptError(
        "start, stop",
        f"{start} to {stop}, of which row {row} holds {token_slots.size}",
        f"positions from 0 to {_end(at, row)}",
        "name positions that the row has read",
      )
    rings = []
    for ring in self.rings:
      first = max(start, stop - ring.reach)
      last, complete = _found(ring.at, row, first, stop)
      if not complete:
        raise PromptError(
          "stop",
          f"{stop}, where windowed layers of row {row} hold no longer all "
          f"positions from {first} on",
          f"a position among the last {ring.slack} of the row",
          "export sooner, or make the cache with kind='dense'",
        )
      rings.append(last)
    return token_slots, rings

  def load(self, row: int, blocks: Blocks, at: Coords | None = None) -> KVCache:
    """Append exported tokens to a row, bit for bit.

    Args:
      row: Index of the row in the cache.
      blocks: Tokens by `export` of a cache of the same model and kind.
      at: New coordinates [n]; rotated keys must keep their positions.

    Raises:
      OptionError: If kind or model differ, or rotated keys would move.
      PromptError: If there are too few free slots.
    """
    self._refuse_states("load")
    row = int(row_indices([row], self.batch)[0])
    # Shape of one token: layers, heads, and head dim or bytes.
    token = lambda x: [n for i, n in enumerate(x.shape) if i != token_axis(x)]
    block_shapes = [token(x) for x in jax.tree.leaves(blocks.parts)]
    one_token = lambda n, x: self.unfilled(
      n, jax.tree.map(lambda x: x[:, 0], x)
    )
    row_of = lambda slots: [one_token(n, x) for n, x in enumerate(slots)]
    own_shapes = jax.tree.leaves(jax.eval_shape(row_of, self.slots))
    own_shapes = [token(x) for x in own_shapes]
    if blocks.kind != self.kind or block_shapes != own_shapes:
      raise OptionError(
        "blocks",
        f"of kind {blocks.kind}, {block_shapes}",
        f"kind {self.kind}, {own_shapes}",
        "export them from a cache of this model and kind",
      )
    at = blocks.at if at is None else at
    moved = not np.array_equal(np.asarray(at.pos), np.asarray(blocks.at.pos))
    if moved and not self.kind.layout.unrotated:
      raise OptionError(
        "at",
        "other positions for keys that are stored rotated",
        "the positions at which they were read",
        "make both caches with kind='unrotated'",
      )
    count = at.pos.shape[0]
    grown = self.with_room(count)
    row_cache = grown.take(np.array([row]))
    row_cache.check(1, count, replicated=True, sees=True)
    at = Coords(*(jnp.asarray(x, jnp.int32)[None] for x in at))
    filled = _appended(row_cache, blocks.parts, at)
    return grown.insert(np.array([row]), filled)

  def gathered(self, device: jax.Device) -> KVCache:
    """Copy the cache to one device."""
    to_device = lambda x: jax.tree.map(lambda y: move(y, device), x)
    cache = self._permuted(lambda table: table.gathered(device))
    return dataclasses.replace(
      cache,
      slots=tuple(
        to_device(x) if isinstance(x, State) else x for x in cache.slots
      ),
      constants=to_device(self.constants),
      states=to_device(self.states),
      mesh=None,
      axis=None,
    )

  def _refuse_states(self, what: str) -> None:
    if self.recurrent:
      raise OptionError(
        "cache",
        f"{what} of recurrent layers, whose state does not go back",
        "keys and values in every layer",
        "use snapshot and restore, or read the text into a new cache",
      )


tree.register(
  KVCache,
  ("slots", "held", "rings", "constants", "states"),
  ("ring_of", "kind", "mesh", "axis", "shapes", "dtype", "growth"),
)


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2))
def _widened(x: Shaped[Array, " ..."], axis: int, more: int) -> jax.Array:
  """Pad an axis at its end with zeros."""
  return jnp.pad(x, [(0, more * (n == axis)) for n in range(x.ndim)])


@bounded
@jax.jit
def _appended(cache: KVCache, parts: PyTree, at: Coords) -> KVCache:
  """Append stored keys and values [L, K, n, ...] to a cache of one row."""
  # Windowed layers export only their last tokens.
  rings = tuple(
    ring.allocate(Coords(*(x[:, -ring.reach :] for x in at)), REPLICATED)
    for ring in cache.rings
  )
  slot_table = cache.held.allocate(at, REPLICATED)
  allocated = dataclasses.replace(cache, held=slot_table, rings=rings)

  def append_layer(kind: int, old: PyTree, new: PyTree) -> PyTree:
    table = allocated.table(kind)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
      if not old.size:
        return old
      new = as_stored(new, old)
      layer = lambda n, x: table.write(
        x, lax.dynamic_index_in_dim(new, n, 0), n
      )
      return lax.fori_loop(jnp.int32(0), jnp.int32(old.shape[0]), layer, old)

    return jax.tree.map(write, old, new)

  pairs = enumerate(zip(cache.slots, parts, strict=True))
  slots = tuple(append_layer(kind, old, new) for kind, (old, new) in pairs)
  return allocated.updated(slots)


@bounded
@jax.jit
def _keep(cache: KVCache, kept: jax.Array) -> KVCache:
  return cache._permuted(lambda table: table.kept(kept))


@bounded
@jax.jit
def _keep_first(cache: KVCache, count: jax.Array) -> KVCache:
  count = jnp.maximum(count, 0).astype(jnp.int32)
  return cache._with_tables(lambda table: table.kept_first(count))


def _constants(
  number: int, shape: LayerCacheSpec | StateShape, kind: CacheConfig
) -> Any:
  """Codec constants of a kind of layer, [L, K, n] each."""
  if kind.codec is None or isinstance(shape, StateShape):
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
  shape: LayerCacheSpec | StateShape, kind: CacheConfig, room: CacheSpec
) -> PyTree:
  """Specs of the codec constants of a kind of layer."""
  if kind.codec is None or isinstance(shape, StateShape):
    return (), ()
  assert not isinstance(kind.codec, Allocated)
  return jax.tree.map(
    lambda shape: room.like(shape, jnp.float32, (None, "heads", None)),
    kind.codec.constant_shapes(shape),
    is_leaf=lambda x: bool(x) and isinstance(x[0], int),
  )


def _ring_size(
  shape: LayerCacheSpec | StateShape, kind: CacheConfig, room: CacheSpec
) -> tuple[int, int] | None:
  """Slots and reach of a layer's ring; None if it keeps all tokens."""
  reach = getattr(shape, "reach", None)
  if not kind.layout.windowed or reach is None:
    return None
  reach = max(1, reach)
  size = window_slots(reach, kind.layout.slack, room.shards)
  return (size, reach) if size < room.capacity else None


def _found(at: Coords, row: int, start: int, stop: int) -> tuple[Any, bool]:
  """Find slots of a row's positions; tell if each occurs exactly once."""
  pos, seg = (np.asarray(x)[row] for x in at)
  slots = np.flatnonzero((seg > 0) & (pos >= start) & (pos < stop))
  slots = slots[np.argsort(pos[slots], kind="stable")]
  complete = stop > start and np.array_equal(pos[slots], np.arange(start, stop))
  return slots, complete


def _end(at: Coords, row: int) -> int:
  """Position after a row's last token."""
  pos, seg = (np.asarray(x)[row] for x in at)
  return int(np.max(np.where(seg > 0, pos + 1, 0), initial=0))


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

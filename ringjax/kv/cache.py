"""The cache of a model: keys of its layers, and states of recurrent ones.

Guarantees: rows are independent; appending tokens, keeping fewer of them and
appending others is the same as never having appended the first; what a row
exports is loaded bit for bit.
Memory: L B S K (H + J) numbers, where S is the capacity; for windowed layers
of kind "windowed" S is what they look back and a slack, see `window`.

`ContiguousSlots` and `WindowSlots` say which token is in which slot; the arrays
of keys and values are one for each kind of layer of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import (
  OptionError,
  PromptError,
  ShapeError,
)
from ringjax.kv.base import KV, CacheSpec, Ends, RowIndices, donated, zeros
from ringjax.kv.cache_kind import DENSE, CacheKind
from ringjax.kv.cache_report import CacheReport, report
from ringjax.kv.codecs import Allocated, Codec, PerHead, VectorCodec
from ringjax.kv.codecs.codec import through
from ringjax.kv.encoder_states import EncoderStates, checked, inserted
from ringjax.kv.head_storage import HeadStorage
from ringjax.kv.reading import KeyReading
from ringjax.kv.slots import (
  FILL,
  REPLICATED,
  SHARDED,
  ContiguousSlots,
)
from ringjax.kv.state import State, StateShape
from ringjax.kv.window import WindowSlots, window_slots
from ringjax.ops.attention.code_format import (
  as_stored,
  filled_up,
  stored_codes,
  token_axis,
)
from ringjax.ops.attention.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  KVView,
  UnrotatedView,
)
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.parallel import chips
from ringjax.parallel.local import move
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True)
class LayerCacheSpec:
  """What the layers of one kind keep of a token.

  Attributes:
    layers: how many layers share the array.
    heads: kv heads, K.
    key: head dim of the keys, H.
    value: head dim of the values, J; 0 where values are part of the keys.
    reach: tokens before its own that a query looks back, None for all.
    reading: how queries read the keys, for policies of eviction.
    which: the layers' numbers in the model.
  """

  layers: int
  heads: int
  key: int
  value: int
  reach: int | None = None
  reading: KeyReading | None = None
  which: tuple[int, ...] = ()

  def numbers(self) -> int:
    """Numbers that one token takes."""
    return self.layers * self.heads * (self.key + self.value)

  def decoders(self, codec: Codec, dtype: DTypeLike) -> tuple[Decoder, Decoder]:
    """What makes keys and values of a codec's bytes."""
    return (
      Decoder(codec.keys, self.key, dtype),
      Decoder(codec.values, self.value, dtype),
    )

  def slots(self, room: CacheSpec) -> LayerKV:
    """Shapes, dtypes and shardings of the arrays."""
    names = (None, "batch", "heads", "tokens")
    lead = (self.layers, room.batch, self.heads, room.capacity)

    def one(dim: int, vectors: VectorCodec | None) -> Any:
      if not dim:
        # As compiled programs return it.
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
      return LayerKV(one(self.key, None), one(self.value, None))
    if isinstance(room.codec, PerHead):
      by_head: Any = HeadStorage(room.codec, self).slots(room)
      return LayerKV(*by_head)
    assert isinstance(room.codec, Codec)
    of_k, of_v = room.codec.keys, room.codec.values
    return LayerKV(one(self.key, of_k), one(self.value, of_v))

  def filled_slots(self, room: CacheSpec) -> LayerKV:
    """The same, on a TPU with zeros behind numbers: `filled_up`."""
    made = self.slots(room)
    if room.codec is not None or room.platform != "tpu":
      return made
    return jax.tree.map(filled_up, made)

  def widths(self, slots: LayerKV) -> tuple[int, int] | None:
    """Numbers of a key and of a value, if slots have zeros behind them."""
    widths = self.key, self.value
    return None if widths == tuple(x.shape[-1] for x in slots) else widths


def model_layers(shapes: Sequence[LayerCacheSpec | StateShape]) -> int:
  """Layers of a model up to the last that keeps something.

  Fewer than there are shapes of layers where one has several mixers.
  """
  return 1 + max(n for shape in shapes for n in shape.which)


class LayerKV(NamedTuple):
  """Keys and values of the layers of one kind.

  Fields:
    k: [L, B, K, S, H]; codes where a codec stores them, see `stored_codes`.
      Where heads have codecs of their own an array for each, see `HeadStorage`.
    v: [L, B, K, S, J], or bytes.
  """

  k: Shaped[ArrayLeaf, "L B K _ _"]
  v: Shaped[ArrayLeaf, "L B K _ _"]


class Blocks(NamedTuple):
  """Tokens of one row, taken out of a cache.

  Fields:
    at: coordinates [n], by position.
    parts: for each kind of layer keys [L, K, n, H] and values [L, K, n, J];
      codes on a TPU are [L, K, X, n].
    kind: of the cache that they came from.

  Layers with a ring buffer have the last tokens alone, as many as they look
  back.
  """

  at: Coords
  parts: tuple[LayerKV, ...]
  kind: CacheKind


class Growth(NamedTuple):
  """How the memory of a cache grows.

  Fields:
    step: tokens, the least by which it does.
    limit: tokens of a row at most.
  """

  step: int
  limit: int

  def size(self, tokens: int) -> int:
    """Slots for so many tokens, of which there are few sizes: a ninth or
    less than one step is not used."""
    step = self.step << max(0, tokens // (8 * self.step)).bit_length()
    return min(self.limit, -(-tokens // step) * step)


class Snapshot(NamedTuple):
  """What `restore` needs; keys and values are not copied.

  Fields:
    slots: coordinates and cursors.
    rings: those of ring buffers.
    states: of recurrent layers and ring buffers, None for others.
  """

  slots: ContiguousSlots
  rings: tuple[WindowSlots, ...]
  states: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class KVCache:
  """A cache of fixed capacity.

  Attributes:
    slots: for each kind of layer its `LayerKV`, or a recurrent one's `State`.
    held: which token is in which slot, of layers that keep all.
    rings: the same of ring buffers, one for each size.
    ring_of: for each kind of layer which of the rings it has, or None.
    kind: how keys and values are stored.
    mesh: whose `axis` shards S; None is one device.
    axis: the sequence's axis.
    shapes: what each kind of layer keeps of a token.
    dtype: of keys and values, once decoded.
    constants: for each kind of layer the numbers of its codecs, of keys and of
      values, each [L, K, n]; of heads with codecs of their own for each codec.
    states: of the rows' contexts, which cross-attention reads; None: none.
    growth: by how many tokens it grows and up to how many; None: its size is
      fixed.
  """

  slots: tuple[LayerKV | State, ...]
  held: ContiguousSlots
  rings: tuple[WindowSlots, ...] = ()
  ring_of: tuple[int | None, ...] = ()
  kind: CacheKind = DENSE
  mesh: Mesh | None = None
  axis: str | None = None
  shapes: tuple[LayerCacheSpec | StateShape, ...] = ()
  dtype: DTypeLike | None = None
  constants: tuple[Any, ...] = ()
  states: EncoderStates | None = None
  growth: Growth | None = None

  @classmethod
  def create(
    cls,
    shapes: tuple[LayerCacheSpec | StateShape, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    **where: Any,
  ) -> KVCache:
    """An empty cache of `capacity` tokens a row; see `spec`."""
    empty = cls.spec(shapes, batch, capacity, dtype, **where)
    constants = filled_constants(shapes, empty.kind, empty.constants)
    return dataclasses.replace(zeros(empty), constants=constants)

  @classmethod
  def spec(
    cls,
    shapes: tuple[LayerCacheSpec | StateShape, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheKind = DENSE,
    mesh: Mesh | None = None,
    axis: str | None = None,
    head_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
    platform: str | None = None,
    filled: bool = False,
  ) -> KVCache:
    """Such a cache of shapes, dtypes and shardings: nothing is allocated.

    Args:
      shapes: what each kind of layer keeps.
      batch: B.
      capacity: tokens of a row, a multiple of the shards.
      dtype: of keys and values.
      kind: how they are stored.
      mesh: None for one device.
      axis: the mesh axis that shards the slots.
      head_axis: the mesh axis that shards the kv heads where they divide.
      batch_axes: mesh axes that shard the batch.
      platform: for which it is; default: the mesh's, or else the default one.
      filled: whether on a TPU numbers have zeros behind them, so that programs
        copy no slots into and out of them: see `filled_up`.

    Raises:
      OptionError: a capacity that does not divide over the shards.
    """
    size = 1
    if axis is not None:
      assert mesh is not None
      size = mesh.shape[axis]
    if capacity < 1 or capacity % size:
      raise OptionError(
        "capacity",
        capacity,
        f"a positive multiple of the {size} shards",
        f"round it up to {max(1, math.ceil(capacity / size)) * size}",
      )
    room = CacheSpec(
      batch=batch,
      capacity=capacity,
      dtype=dtype,
      mesh=mesh,
      axes=dict(batch=batch_axes or None, heads=head_axis, tokens=axis),
      codec=kind.codec,
      target=platform,
    )
    sizes = [_ring_size(s, kind, room) for s in shapes]
    rings = sorted({x for x in sizes if x is not None})
    rooms = [dataclasses.replace(room, capacity=n) for n, _ in rings]
    which = tuple(None if x is None else rings.index(x) for x in sizes)

    def slots(
      shape: LayerCacheSpec | StateShape, room: CacheSpec
    ) -> LayerKV | State:
      if filled and isinstance(shape, LayerCacheSpec):
        return shape.filled_slots(room)
      return shape.slots(room)

    return cls(
      tuple(
        slots(s, room if n is None else rooms[n])
        for s, n in zip(shapes, which, strict=True)
      ),
      ContiguousSlots.spec(room),
      tuple(
        WindowSlots.spec(room, reach, kind.slack)
        for room, (_, reach) in zip(rooms, rings, strict=True)
      ),
      which,
      kind,
      mesh,
      axis,
      shapes,
      jnp.dtype(dtype),
      tuple(constants_spec(s, kind, room) for s in shapes),
    )

  @property
  def at(self) -> Coords:
    """Coordinates of all slots, [B, S]."""
    return self.held.at

  @property
  def shards(self) -> int:
    return self.held.shards

  @property
  def capacity(self) -> int:
    """Tokens of a row that fit."""
    return self.held.capacity

  @property
  def batch(self) -> int:
    """Rows, B."""
    return self.at.pos.shape[0]

  @property
  def length(self) -> jax.Array:
    """int32 [B], the position behind each row's last token; 0 if empty.

    It is how many tokens a row has, where they are counted from 0.
    """
    return jnp.max(jnp.where(self.at.seg > 0, self.at.pos + 1, 0), 1)

  @property
  def lost(self) -> bool:
    """Whether the arrays were donated to a program."""
    return donated(self)

  @property
  def recurrent(self) -> bool:
    """Whether some layers keep a state."""
    return any(isinstance(s, State) for s in self.slots)

  @property
  def irreversible(self) -> bool:
    """Whether a call leaves what `keep` can't take out: a state, a sum."""
    return self.recurrent

  def nbytes(self) -> int:
    """Bytes of all shards together."""
    return sum(x.nbytes for x in jax.tree.leaves(self))

  def explain(
    self,
    machine: chips.Machine | str | None = None,
    *,
    tokens: int | None = None,
    weights: int | float = 0,
  ) -> CacheReport:
    """What it takes, part by part, and how fast tokens come behind it.

    Args:
      machine: whose figures are taken, of `ringjax.parallel.chips.MACHINES`;
        default: that of the devices at hand.
      tokens: of a row that a decode step reads; default: all that fit.
      weights: bytes of weights on a device that a step reads too.

    Returns:
      a table when printed; its fields are the figures.

    Raises:
      OptionError: an unknown machine, or more tokens than fit.
    """
    return report(self, machine, tokens, weights)

  def free(self) -> np.ndarray | None:
    """Slots that are free, int [B, R]; None where they are traced.

    Those that are still to be made count too, see `growing`.
    """
    free = self.held.free()
    if free is None or self.growth is None:
      return free
    return free + self.growth.limit - self.capacity

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens [B, T] that do not fit.

    Under a trace what the cache holds is not known: there only shapes are
    checked, and the caller sees to it that the tokens fit.

    Args:
      batch: B.
      tokens: T.
      replicated: whether the tokens are the same on all shards.
      sees: whether the call looks at what the cache holds already.

    Raises:
      ShapeError: another batch, or tokens that do not divide over the shards.
      PromptError: too few free slots.
      OptionError: a call that would not see the tokens before it, or a cache
        whose buffers were donated.
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
    taken = self.capacity - free.sum(1).min()
    if not sees and taken:
      raise OptionError(
        "attend",
        f"ContextParallel() behind {taken} tokens in the cache",
        "an empty cache, for the old tokens would not be seen",
        "pass attend=CachedAttention(), or leave it out",
      )
    left = int(free.sum(1).min() if replicated else size * free.min())
    if tokens > left:
      raise PromptError(
        "cache",
        f"{tokens} more tokens for a cache of {self.capacity} slots, of "
        f"which {self.capacity - left} are taken",
        f"at most {left}",
        "make a larger one, with model.init_cache(batch, capacity)"
        if self.growth is None
        else f"call cache.with_room({tokens}) before, outside of jit",
      )

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> KVCache:
    """Slots for T tokens with these coordinates, [B, T].

    Args:
      at: the coordinates.
      replicated: whether the tokens are the same on all shards; otherwise T
        is sharded and each shard keeps its own.
      sees: whether the call looks at what the cache holds; a call that does
        not starts the cache anew.
    """
    mode = REPLICATED if replicated else SHARDED if sees else FILL
    return dataclasses.replace(
      self,
      held=self.held.allocate(at, mode),
      rings=tuple(ring.allocate(at, mode) for ring in self.rings),
    )

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> KVCache:
    """Itself: it keeps all tokens, whatever their ids are."""
    del tokens, at
    return self

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    if isinstance(slots, State):
      return slots.layer(self, index)
    number = self._ring(kind)
    held = self.held if number is None else self.rings[number]
    return KVLayer(self, held, slots, index, kind)

  def _ring(self, kind: int) -> int | None:
    """Which of the rings a kind of layer has, None where it keeps all."""
    return self.ring_of[kind] if self.ring_of else None

  def updated(self, slots: tuple[Any, ...]) -> KVCache:
    """The cache after the layers."""
    held = dataclasses.replace(self.held, mode=FILL)
    rings = tuple(ring.committed() for ring in self.rings)
    return dataclasses.replace(self, slots=slots, held=held, rings=rings)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def with_states(self, states: EncoderStates | None) -> KVCache:
    """With contexts that cross-attention of later calls reads, in copies.

    What it holds already was read without them.

    Args:
      states: of as many rows, by `rj.models.cepe.encode`; None for none.

    Raises:
      InputTypeError: something else.
      ShapeError: states of another batch.
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

  def evict(self) -> KVCache:
    """Itself: it keeps all tokens; see `EvictingCache.evict`."""
    return self

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> KVCache:
    """Itself, with room for a token if it grows; see `EvictingCache.flush`."""
    del rows
    return self.with_room(1)

  def growing(self, step: int, limit: int) -> KVCache:
    """The same, whose memory grows as tokens come.

    Args:
      step: tokens by which it grows, or more where it is much longer.
      limit: tokens of a row at most.

    Raises:
      OptionError: slots over several shards, or layers with ring buffers.
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
    """With room for a call's tokens, if it grows; see `growing`.

    Its arrays are then copied into larger ones, one after another, and are
    gone. It waits for the program that computes what the cache holds.

    Args:
      taken: slots that the call takes.
    """
    if self.growth is None:
      return self
    need = self.capacity - self._spare() + int(np.max(taken))
    if need <= self.capacity or self.capacity >= self.growth.limit:
      return self
    more = self.growth.size(need) - self.capacity

    def wide(x: jax.Array, axis: int) -> jax.Array:
      made = _widened(x, axis, more) if x.size else x
      if made is not x:
        x.delete()
      return made

    slots = tuple(
      s
      if isinstance(s, State)
      else jax.tree.map(lambda x: wide(x, token_axis(x)), s)
      for s in self.slots
    )
    at = Coords(*(wide(x, 1) for x in self.held.at))
    held = dataclasses.replace(self.held, at=at)
    return dataclasses.replace(self, slots=slots, held=held)

  def _spare(self) -> int:
    """Slots behind the last token of the longest row."""
    return int(np.asarray(self.held.free()).min())

  def steps(self) -> int:
    """How many single tokens may come before `flush` is called."""
    return self.capacity + 1 if self.growth is None else self._spare()

  def truncate(self, length: Ends, most: int | None = None) -> KVCache:
    """Without the tokens at positions from `length` on, an int or int [B].

    Slots behind the last token that is left are free again.

    Args:
      length: may be traced, with ring buffers only beside `most`.
      most: how many tokens of a row go at most, as the caller knows.

    Raises:
      OptionError: a recurrent layer, whose state cannot go back, or ring
        buffers of which more than the last `slack` tokens would go.
    """
    self._refuse_states("truncate")
    end = jnp.asarray(length, jnp.int32).reshape(-1)
    end = jnp.broadcast_to(end, (self.batch,))
    if self.rings and (most is None or most > self.kind.slack):
      self._refuse_far(end)
    return dataclasses.replace(
      self,
      held=self.held.truncate(end),
      rings=tuple(ring.truncate(end) for ring in self.rings),
    )

  def _refuse_far(self, end: jax.Array) -> None:
    """Refuses to go back further than ring buffers can."""
    slack = self.kind.slack
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
    left = np.where(new > 0, np.asarray(self.length) - new, 0)
    far = int(left.max(initial=0))
    if far > slack:
      raise OptionError(
        "length",
        f"{far} tokens less than a row has, with windowed layers",
        f"at most the last {slack}, or all of a row",
        "make the cache with kind='dense', or with a larger slack",
      )

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> KVCache:
    """Of the last call's T tokens those in `kept`, bool [B, T].

    The others are as if they had never been appended, for instance drafted
    tokens that were rejected. Of a call whose tokens were the same on all
    shards.

    Raises:
      OptionError: a recurrent layer: use `snapshot` and `restore`.
      ShapeError: not a bool for each token.
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
    if self.rings and kept.shape[1] > self.kind.slack:
      raise OptionError(
        "kept",
        f"{kept.shape[1]} tokens, with windowed layers",
        f"at most {self.kind.slack}, of which these can take some back",
        "make the cache with kind='dense', or with a larger slack",
      )
    return _keep(self, kept)

  def snapshot(self) -> Snapshot:
    """What `restore` goes back to; later calls may donate the cache."""
    states = tuple(
      s if isinstance(s, State) or self._ring(n) is not None else None
      for n, s in enumerate(self.slots)
    )
    return jax.tree.map(jnp.copy, Snapshot(self.held, self.rings, states))

  def restore(self, snapshot: Snapshot) -> KVCache:
    """As it was at a snapshot of the same cache, before later appends."""
    slots = tuple(
      old if state is None else jax.tree.map(jnp.copy, state)
      for old, state in zip(self.slots, snapshot.states, strict=True)
    )
    held, rings = jax.tree.map(jnp.copy, (snapshot.slots, snapshot.rings))
    return dataclasses.replace(self, slots=slots, held=held, rings=rings)

  def reset(self, rows: RowIndices) -> KVCache:
    """With these rows, int [n], empty; the others are as they were."""
    rows = self._rows(rows)
    held = self.held
    empty = lambda x: x.at[rows].set(0)
    held = dataclasses.replace(
      held,
      at=Coords(held.at.pos, empty(held.at.seg)),
      used=empty(held.used),
      before=empty(held.before),
    )
    rings = tuple(
      dataclasses.replace(
        ring,
        at=Coords(ring.at.pos, empty(ring.at.seg)),
        count=empty(ring.count),
        before=empty(ring.before),
      )
      for ring in self.rings
    )
    clear = lambda x: x.at[:, rows].set(0)
    slots = tuple(
      jax.tree.map(clear, s) if isinstance(s, State) else s for s in self.slots
    )
    made = self._placed(slots, held, rings)
    if self.states is None:
      return made
    return dataclasses.replace(made, states=self.states.reset(rows))

  def insert(self, rows: RowIndices, other: KVCache) -> KVCache:
    """With the rows of another cache in place of `rows`, int [n].

    Raises:
      OptionError: a cache of another model, capacity, kind or mesh.
      ShapeError: not as many rows as the other cache has.
    """
    found = self._rows(rows)
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
    if found.size != other.batch:
      raise ShapeError(
        "rows",
        f"{found.size} for a cache of {other.batch}",
        f"{other.batch}, one for each row of the other cache",
        "take the rows to insert: other.take(examples)",
      )
    put = lambda axis: (
      lambda x, new: (
        x.at[found].set(new) if axis == 0 else x.at[:, found].set(new)
      )
    )
    slots = jax.tree.map(put(1), self.slots, other.slots)
    held = jax.tree.map(
      put(0), self.held, dataclasses.replace(other.held, mode=self.held.mode)
    )
    rings = jax.tree.map(put(0), self.rings, other.rings)
    made = self._placed(slots, held, rings)
    states = inserted(self.states, found, other.states, self.batch)
    return dataclasses.replace(made, states=states)

  def take(self, examples: RowIndices) -> KVCache:
    """Of these rows, int [B'], each as often as it is named.

    For beams, or to continue one prefix in several ways.

    Raises:
      ShapeError: not a list of row numbers.
    """
    found = self._rows(examples, traced=True)
    one = lambda axis: lambda x: _taken(x, found.astype(jnp.int32), axis)
    return dataclasses.replace(
      self,
      slots=jax.tree.map(one(1), self.slots),
      held=jax.tree.map(one(0), self.held),
      rings=jax.tree.map(one(0), self.rings),
      states=jax.tree.map(one(0), self.states),
    )

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """The tokens of a row at positions from `start` to `stop` - 1, by position.

    Raises:
      OptionError: a recurrent layer, whose state is not of single tokens.
      PromptError: the row does not hold all of these positions; layers with a
        ring buffer have only to hold the last ones, as many as they look back.
    """
    (row,) = (int(n) for n in self._rows([row]))
    found, rings = self.located(self.at, row, start, stop)

    def part(kind: int, slots: PyTree) -> PyTree:
      number = self._ring(kind)
      index = jnp.asarray(found if number is None else rings[number], jnp.int32)
      take = lambda x: jnp.take(x[:, row], index, axis=token_axis(x) - 1)
      return self.unfilled(kind, jax.tree.map(take, slots))

    parts: Any = tuple(part(kind, x) for kind, x in enumerate(self.slots))
    at = Coords(*(x[row][jnp.asarray(found, jnp.int32)] for x in self.at))
    return Blocks(at, parts, self.kind)

  def unfilled(self, kind: int, part: PyTree) -> PyTree:
    """Slots of a kind of layer, or tokens out of them, without zeros behind.

    Args:
      kind: of the layer.
      part: arrays [..., H] and [..., J] or more numbers; codes as they are.
    """
    shape = self.shapes[kind]
    if self.kind.codec is not None or not isinstance(shape, LayerCacheSpec):
      return part
    return LayerKV(part.k[..., : shape.key], part.v[..., : shape.value])

  def located(
    self, at: Coords, row: int, start: int, stop: int
  ) -> tuple[np.ndarray, list[np.ndarray]]:
    """Slots of a row's positions, by position; see `export`.

    Args:
      at: coordinates of the slots of layers that keep all tokens.
      row: of the cache.
      start: the first position.
      stop: the position behind the last.

    Returns:
      the slots of layers that keep all, and for each ring buffer its own.
    """
    self._refuse_states("export")
    found, whole = _found(at, row, start, stop)
    if not whole:
      raise PromptError(
        "start, stop",
        f"{start} to {stop}, of which row {row} holds {found.size}",
        f"positions from 0 to {_end(at, row)}",
        "name positions that the row has read",
      )
    rings = []
    for ring in self.rings:
      first = max(start, stop - ring.reach)
      last, whole = _found(ring.at, row, first, stop)
      if not whole:
        raise PromptError(
          "stop",
          f"{stop}, where windowed layers of row {row} hold no longer all "
          f"positions from {first} on",
          f"a position among the last {ring.slack} of the row",
          "export sooner, or make the cache with kind='dense'",
        )
      rings.append(last)
    return found, rings

  def load(self, row: int, blocks: Blocks, at: Coords | None = None) -> KVCache:
    """Appends exported tokens to a row, bit for bit.

    Args:
      row: of the cache.
      blocks: from `export` of a cache of the same model and kind.
      at: other coordinates [n]; keys that are stored rotated stay at the
        positions at which they were read.

    Raises:
      OptionError: blocks of another kind or model, or rotated keys at other
        positions.
      PromptError: too few free slots.
    """
    self._refuse_states("load")
    (row,) = (int(n) for n in self._rows([row]))
    # Of one token: layers, heads, and its numbers or bytes.
    token = lambda x: [n for i, n in enumerate(x.shape) if i != token_axis(x)]
    theirs = [token(x) for x in jax.tree.leaves(blocks.parts)]
    one = lambda n, x: self.unfilled(n, jax.tree.map(lambda x: x[:, 0], x))
    row_of = lambda slots: [one(n, x) for n, x in enumerate(slots)]
    mine = jax.tree.leaves(jax.eval_shape(row_of, self.slots))
    mine = [token(x) for x in mine]
    if blocks.kind != self.kind or theirs != mine:
      raise OptionError(
        "blocks",
        f"of kind {blocks.kind}, {theirs}",
        f"kind {self.kind}, {mine}",
        "export them from a cache of this model and kind",
      )
    at = blocks.at if at is None else at
    moved = not np.array_equal(np.asarray(at.pos), np.asarray(blocks.at.pos))
    if moved and not self.kind.unrotated:
      raise OptionError(
        "at",
        "other positions for keys that are stored rotated",
        "the positions at which they were read",
        "make both caches with kind='unrotated'",
      )
    count = at.pos.shape[0]
    wide = self.with_room(count)
    one = wide.take(np.array([row]))
    one.check(1, count, replicated=True, sees=True)
    at = Coords(*(jnp.asarray(x, jnp.int32)[None] for x in at))
    filled = _appended(one, blocks.parts, at)
    return wide.insert(np.array([row]), filled)

  def gathered(self, device: jax.Device) -> KVCache:
    """The same tokens on one device."""
    held, along = self.held.gathered(device)
    rings = [ring.gathered(device) for ring in self.rings]

    def one(kind: int, slots: PyTree) -> PyTree:
      if isinstance(slots, State):
        return slots.gathered(device)
      number = self._ring(kind)
      put = along if number is None else rings[number][1]
      return jax.tree.map(put, slots)

    slots = tuple(one(kind, x) for kind, x in enumerate(self.slots))
    return dataclasses.replace(
      self,
      slots=slots,
      held=held,
      rings=tuple(ring for ring, _ in rings),
      constants=jax.tree.map(lambda x: move(x, device), self.constants),
      states=jax.tree.map(lambda x: move(x, device), self.states),
      mesh=None,
      axis=None,
    )

  def _placed(
    self, slots: PyTree, held: ContiguousSlots, rings: tuple[WindowSlots, ...]
  ) -> KVCache:
    """With new arrays where the old ones were."""
    made = dataclasses.replace(self, slots=slots, held=held, rings=rings)

    def same(x: jax.Array, old: jax.Array) -> jax.Array:
      if isinstance(old, jax.core.Tracer) or self.mesh is None:
        return x
      return jax.device_put(x, old.sharding)

    return jax.tree.map(
      same,
      made,
      dataclasses.replace(
        self, held=dataclasses.replace(self.held, mode=held.mode)
      ),
    )

  def _refuse_states(self, what: str) -> None:
    if self.recurrent:
      raise OptionError(
        "cache",
        f"{what} of recurrent layers, whose state does not go back",
        "keys and values in every layer",
        "use snapshot and restore, or read the text into a new cache",
      )

  def _rows(self, rows: RowIndices, traced: bool = False) -> Any:
    """Numbers of rows, int [n]."""
    found = jnp.asarray(rows) if traced else np.asarray(rows)
    good = found.ndim == 1 and jnp.issubdtype(found.dtype, jnp.integer)
    if good and not isinstance(found, jax.core.Tracer):
      host = np.asarray(found)
      good = host.size > 0 and bool(((host >= 0) & (host < self.batch)).all())
    if not good:
      raise ShapeError(
        "examples",
        f"{rows}",
        f"integers [B'] from 0 to {self.batch - 1}",
        "name the rows, e.g. jnp.array([0, 0])",
      )
    return found


tree.register(
  KVCache,
  ("slots", "held", "rings", "constants", "states"),
  ("ring_of", "kind", "mesh", "axis", "shapes", "dtype", "growth"),
)


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2))
def _widened(x: Shaped[Array, " ..."], axis: int, more: int) -> jax.Array:
  """An array with zeros behind an axis."""
  return jnp.pad(x, [(0, more * (n == axis)) for n in range(x.ndim)])


@bounded
@jax.jit
def _appended(cache: KVCache, parts: PyTree, at: Coords) -> KVCache:
  """A cache of one row with stored keys and values [L, K, n, ...] as well."""
  held = cache.held.allocate(at, REPLICATED)
  # Of windowed layers there are the last tokens alone.
  rings = tuple(
    ring.allocate(Coords(*(x[:, -ring.reach :] for x in at)), REPLICATED)
    for ring in cache.rings
  )

  def one(kind: int, old: PyTree, new: PyTree) -> PyTree:
    number = cache._ring(kind)
    into = held if number is None else rings[number]

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
      if not old.size:
        return old
      new = as_stored(new, old)
      layer = lambda n, x: into.write(x, lax.dynamic_index_in_dim(new, n, 0), n)
      return lax.fori_loop(jnp.int32(0), jnp.int32(old.shape[0]), layer, old)

    return jax.tree.map(write, old, new)

  pairs = enumerate(zip(cache.slots, parts, strict=True))
  slots = tuple(one(kind, old, new) for kind, (old, new) in pairs)
  return dataclasses.replace(cache, held=held, rings=rings).updated(slots)


@bounded
@jax.jit
def _keep(cache: KVCache, kept: jax.Array) -> KVCache:
  held, along = cache.held.kept(kept)
  rings = [ring.kept(kept) for ring in cache.rings]

  def one(kind: int, slots: PyTree) -> PyTree:
    number = cache._ring(kind)
    return jax.tree.map(along if number is None else rings[number][1], slots)

  return dataclasses.replace(
    cache,
    slots=tuple(one(kind, x) for kind, x in enumerate(cache.slots)),
    held=held,
    rings=tuple(ring for ring, _ in rings),
  )


def _constants(
  number: int, shape: LayerCacheSpec | StateShape, kind: CacheKind
) -> Any:
  """Numbers of the codecs of a kind of layer: [L, K, n] each."""
  if kind.codec is None or isinstance(shape, StateShape):
    return (), ()
  assert not isinstance(kind.codec, Allocated)
  return kind.codec.constants(number, shape)


def filled_constants(
  shapes: tuple[Any, ...], kind: CacheKind, like: tuple[Any, ...]
) -> tuple[Any, ...]:
  """Numbers of the codecs of all kinds of layers, where `like` says."""
  fill = lambda like, x: jnp.asarray(x, like.dtype, device=like.sharding)
  found = tuple(_constants(n, s, kind) for n, s in enumerate(shapes))
  return jax.tree.map(fill, like, found)


def constants_spec(
  shape: LayerCacheSpec | StateShape, kind: CacheKind, room: CacheSpec
) -> PyTree:
  """Shapes, dtypes and shardings of the same."""
  if kind.codec is None or isinstance(shape, StateShape):
    return (), ()
  assert not isinstance(kind.codec, Allocated)
  return jax.tree.map(
    lambda shape: room.like(shape, jnp.float32, (None, "heads", None)),
    kind.codec.constant_shapes(shape),
    is_leaf=lambda x: bool(x) and isinstance(x[0], int),
  )


def _ring_size(
  shape: LayerCacheSpec | StateShape, kind: CacheKind, room: CacheSpec
) -> tuple[int, int] | None:
  """Slots and reach of a layer's ring; None where it keeps all tokens."""
  reach = getattr(shape, "reach", None)
  if not kind.windowed or reach is None:
    return None
  reach = max(1, reach)
  size = window_slots(reach, kind.slack, room.shards)
  return (size, reach) if size < room.capacity else None


def _found(at: Coords, row: int, start: int, stop: int) -> tuple[Any, bool]:
  """Slots of a row's positions, and whether they are all there, once each."""
  pos, seg = (np.asarray(x)[row] for x in at)
  found = np.flatnonzero((seg > 0) & (pos >= start) & (pos < stop))
  found = found[np.argsort(pos[found], kind="stable")]
  whole = stop > start and np.array_equal(pos[found], np.arange(start, stop))
  return found, whole


def _end(at: Coords, row: int) -> int:
  """The position behind a row's last token."""
  pos, seg = (np.asarray(x)[row] for x in at)
  return int(np.max(np.where(seg > 0, pos + 1, 0), initial=0))


def _taken(x: jax.Array, examples: jax.Array, axis: int) -> jax.Array:
  """Rows of an axis, sharded as before where they divide."""
  found = jnp.take(x, examples, axis, mode="clip")
  if isinstance(x, jax.core.Tracer) or not isinstance(
    x.sharding, NamedSharding
  ):
    return found
  return jax.device_put(found, rows_sharding(x, found.shape[axis], axis))


def rows_sharding(
  x: Shaped[Array, " ..."], rows: int, axis: int
) -> jax.sharding.Sharding:
  """The sharding of an array with as many rows, where they divide over it."""
  sharding = x.sharding
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh, spec = sharding.mesh, [*sharding.spec]
  over = (spec[axis] if axis < len(spec) else None) or ()
  names = over if isinstance(over, tuple) else (over,)
  if rows % math.prod(mesh.shape[name] for name in names):
    spec[axis] = None
  return NamedSharding(mesh, P(*spec), memory_kind=sharding.memory_kind)


@dataclasses.dataclass(frozen=True)
class KVLayer:
  """One layer's part of a `KVCache` during one call.

  A call that replaces tokens which its first queries look back on reads what
  the slots held before it and its own keys: two views, whose partials merge.
  """

  cache: KVCache
  held: ContiguousSlots | WindowSlots
  slots: LayerKV
  index: Index
  kind: int
  fresh: KV | None = None
  rotation: Rotation = Rotation()
  old: LayerKV | None = None
  # The call's keys before their rotation, where they are stored so.
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
      # Of the very numbers that a strategy may encode for the way.
      rotated, v = lax.optimization_barrier((rotated, v))
    return dataclasses.replace(
      self,
      slots=self._written(k if self.cache.kind.unrotated else rotated, v),
      fresh=KV(rotated, v, at),
      rotation=rotation.general(),
      old=self._alone() if self.held.apart else None,
      plain=k if self.cache.kind.unrotated else None,
    )

  def load(
    self, k: Shaped[Array, "B K T X"], v: Shaped[Array, "B K T Y"]
  ) -> KVLayer:
    """With the call's keys and values, bytes of its codec, bit for bit."""
    write = lambda old, new: self.held.write(
      old, as_stored(new, old), self.index
    )
    stored = LayerKV(write(self.slots.k, k), write(self.slots.v, v))
    return dataclasses.replace(self, slots=stored)

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> KVLayer:
    del rotated, plain
    return self

  def for_reading(self, rotation: Rotation) -> KVLayer:
    """For a call that appends nothing: `views` is what the cache holds.

    `rotation` is of keys that are stored before theirs.
    """
    return dataclasses.replace(self, rotation=rotation.general())

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    if self.fresh is None:
      return (self._view(self.slots, self.held.at, self.index),)
    if self.old is None and not apart:
      return (self._view(self.slots, self.held.at, self.index),)
    # However many tokens a call has, it reads them as later ones will.
    own = self._given_back(self.fresh).view(self.cache.shards)
    if self.old is None:
      return self._view(self.slots, self.held.earlier(), self.index), own
    assert self.held.previous is not None
    return self._old_view(self.old, self.held.previous), own

  def view(self, rotation: Rotation) -> KVView:
    """What the cache holds, with keys rotated so where they are stored not."""
    made = dataclasses.replace(self, rotation=rotation)
    return made._view(self.slots, self.held.at, self.index)

  def _given_back(self, fresh: KV) -> KV:
    """The call's keys and values as later calls will read them."""
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
    """How heads are stored that have codecs of their own."""
    codec = self.cache.kind.codec
    if not isinstance(codec, PerHead):
      return None
    shape = self.cache.shapes[self.kind]
    assert isinstance(shape, LayerCacheSpec)
    return HeadStorage(codec, shape)

  def _written(self, k: jax.Array, v: jax.Array) -> LayerKV:
    """The slots with keys and values of the call."""
    by_head, constants = self._by_head, self.cache.constants[self.kind]
    if by_head is not None:
      dtype = self.cache.dtype
      k, v = k.astype(dtype), v.astype(dtype)
      slots: Any = (self.slots.k, self.slots.v)
      made: Any = by_head.written(self.held, slots, k, v, self.index, constants)
      return LayerKV(*made)
    write = lambda old, new: (
      self.held.write(old, new, self.index) if old.size else old
    )
    return LayerKV(*map(write, self.slots, self._encoded(k, v)))

  def _alone(self) -> LayerKV:
    """What the slots of this layer hold, as a stack of one layer.

    Of heads with codecs of their own the numbers.
    """
    if self._by_head is None:
      one = lambda x: lax.dynamic_index_in_dim(x, self.index, 0)
      return LayerKV(*map(one, self.slots))
    made = dataclasses.replace(self, rotation=Rotation())
    assert self.held.previous is not None
    view = made._view(self.slots, self.held.previous, self.index)
    k, v = view.tile(jnp.int32(0), view.shape[2])
    return LayerKV(k[None], v[None] if self.slots.v else k[None])

  def _old_view(self, old: LayerKV, at: Coords) -> KVView:
    """A view of what `_alone` found."""
    if self._by_head is None:
      return self._view(old, at, jnp.int32(0))
    view = ContiguousView(*old, at, jnp.int32(0))
    if self.cache.kind.unrotated and not self.rotation.trivial:
      return UnrotatedView(view, self.rotation)
    return view

  def _view(self, slots: LayerKV, at: Coords, index: Index) -> KVView:
    codec, by_head = self.cache.kind.codec, self._by_head
    shape: Any = self.cache.shapes[self.kind]
    view: Any
    if by_head is not None:
      turned = self.cache.kind.unrotated and not self.rotation.trivial
      parts: Any = (slots.k, slots.v)
      assert self.cache.dtype is not None
      return by_head.view(
        parts,
        at,
        index,
        self.cache.constants[self.kind],
        self.cache.dtype,
        self.rotation if turned else None,
      )
    if codec is None:
      widths = shape.widths(slots)
      view = ContiguousView(*slots, at, index, widths=widths)
    else:
      decoders = shape.decoders(codec, self.cache.dtype)
      view = EncodedView(*slots, at, index, self._constants(), decoders)
    if self.cache.kind.unrotated and not self.rotation.trivial:
      return UnrotatedView(view, self.rotation)
    return view

  def _encoded(self, k: jax.Array, v: jax.Array) -> LayerKV:
    """Keys and values as they are stored."""
    codec, into = self.cache.kind.codec, self.slots
    if codec is None:
      return LayerKV(as_stored(k, into.k), as_stored(v, into.v))
    assert isinstance(codec, Codec)

    def one(
      vectors: VectorCodec,
      x: jax.Array,
      constants: Sequence[Array],
      stored: jax.Array,
    ) -> jax.Array:
      data = vectors.encode(x.astype(self.cache.dtype), constants)
      return as_stored(data, stored)

    of_k, of_v = self._constants()
    return LayerKV(
      one(codec.keys, k, of_k, into.k),
      one(codec.values, v, of_v, into.v) if v.shape[-1] else v,
    )

  def _constants(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Those of this layer: [K, n] each."""
    one = lambda x: lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False)
    return jax.tree.map(one, self.cache.constants[self.kind])

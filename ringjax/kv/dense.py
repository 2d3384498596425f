"""The plain cache: an array of slots, sharded over the sequence's axis.

Law: a slot holds a key and a value and says whose they are by coordinates, so
tokens may lie in any order: a prompt stays in the layout in which it was read,
and what is generated goes around the shards, one token each, so that their
memory stays level. An empty slot has segment 0 and no query sees it.
Cost: an append writes the appended; nothing else moves.
Memory: L B S K (H + J) numbers, where S is the capacity.

A shard's slots fill up from its first. `base` of them are full on every shard;
behind them `tail` tokens lie around the ring, token n on shard n mod R.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ringjax.errors import OptionError, message
from ringjax.kv.base import KV, Room
from ringjax.kv.state import State, StateShape
from ringjax.ops.attention.stored import Stored
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.parallel.local import move


@dataclasses.dataclass(frozen=True)
class Shape:
  """Shape of a kind of layer's slots.

  Attributes:
    layers: how many layers share the array.
    heads: kv heads, K.
    key: head dim of the keys, H.
    value: head dim of the values, J; 0 where values are part of the keys.
  """

  layers: int
  heads: int
  key: int
  value: int

  def numbers(self) -> int:
    """Numbers that one token takes."""
    return self.layers * self.heads * (self.key + self.value)

  def slots(self, room: Room) -> Slots:
    """Empty slots."""
    names = (None, "batch", "heads", "tokens")
    lead = (self.layers, room.batch, self.heads, room.capacity)
    return Slots(
      room.zeros((*lead, self.key), room.dtype, names),
      room.zeros((*lead, self.value), room.dtype, names),
    )


class Slots(NamedTuple):
  """Keys and values of the layers of one kind.

  Fields:
    k: [L, B, K, S, H].
    v: [L, B, K, S, J].
  """

  k: jax.Array
  v: jax.Array

  def layer(self, cache: Dense, index: Any) -> Layer:
    """The part of layer `index` of a cache, where these are its slots."""
    return Layer(cache, self, index)

  def gathered(
    self, device: Any, put: Callable[[jax.Array, int], jax.Array]
  ) -> Slots:
    """The same on one device, where `put` brings an axis of tokens."""
    del device
    return Slots(put(self.k, 3), put(self.v, 3))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
  """A cache of fixed capacity.

  Attributes:
    slots: for each kind of layer its `Slots`, or a recurrent one's `State`.
    at: coordinates of all slots, [B, S].
    base: int32 [], slots that are full on every shard.
    tail: int32 [], tokens around the ring behind them.
    room: (first local slot, whether tokens go around the ring) of the tokens
      of the call at hand.
    mesh: whose `axis` shards S; None is one device.
    axis: the sequence's axis.
  """

  slots: tuple[Slots | State, ...]
  at: Coords
  base: jax.Array
  tail: jax.Array
  room: Any = None
  mesh: Any = dataclasses.field(default=None, metadata=dict(static=True))
  axis: str | None = dataclasses.field(default=None, metadata=dict(static=True))

  @classmethod
  def create(
    cls,
    shapes: tuple[Shape | StateShape, ...],
    batch: int,
    capacity: int,
    dtype: Any,
    *,
    mesh: Any = None,
    axis: str | None = None,
    head_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
  ) -> Dense:
    """An empty cache of `capacity` tokens, a multiple of the shards."""
    size = mesh.shape[axis] if axis is not None else 1
    if capacity < 1 or capacity % size:
      raise OptionError(
        message(
          "capacity",
          capacity,
          f"a positive multiple of the {size} shards",
          f"round it up to {max(1, math.ceil(capacity / size)) * size}",
        )
      )

    room = Room(
      batch=batch,
      capacity=capacity,
      dtype=dtype,
      mesh=mesh,
      axes=dict(batch=batch_axes or None, heads=head_axis, tokens=axis),
    )
    tokens = lambda: room.zeros(
      (batch, capacity), jnp.int32, ("batch", "tokens")
    )
    count = lambda: room.zeros((), jnp.int32, ())
    return cls(
      tuple(s.slots(room) for s in shapes),
      Coords(tokens(), tokens()),
      count(),
      count(),
      None,
      mesh,
      axis,
    )

  @property
  def shards(self) -> int:
    return 1 if self.axis is None else self.mesh.shape[self.axis]

  @property
  def capacity(self) -> int:
    """Tokens that fit."""
    return self.at.pos.shape[1]

  def nbytes(self) -> int:
    """Bytes of all shards together."""
    return sum(x.nbytes for x in jax.tree.leaves((self.slots, self.at)))

  def gathered(self, device: Any, used: int) -> Dense:
    """The same tokens on one device.

    Args:
      device: where.
      used: slots in use on the shard that has most.
    """
    size = self.shards
    put = lambda x, axis: _joined(move(x, device), axis, size, used)
    return Dense(
      tuple(s.gathered(device, put) for s in self.slots),
      Coords(put(self.at.pos, 1), put(self.at.seg, 1)),
      move(jnp.int32(used * size), device),
      move(jnp.int32(0), device),
    )

  def reserve(self, at: Coords, spread: bool) -> Dense:
    """Makes room for T tokens and notes their coordinates, [B, T].

    With `spread` the tokens are the same on all shards and go around the
    ring; without it T is sharded and each shard keeps its own.
    """
    size, tokens = self.shards, at.pos.shape[1]
    if spread:
      base, tail = self.base, self.tail + tokens
      room = (self.base, self.tail)
    else:
      start = self.base + (self.tail + size - 1) // size
      base, tail = start + tokens // size, jnp.zeros_like(self.tail)
      room = (start, None)
    batch = self.at.pos.shape[0]
    wide = lambda x: jnp.broadcast_to(x, (batch, tokens))
    put = lambda old, new: self._write(old, wide(new), room, 1)
    return dataclasses.replace(
      self,
      at=Coords(put(self.at.pos, at.pos), put(self.at.seg, at.seg)),
      base=base,
      tail=tail,
      room=room,
    )

  def layer(self, slots: Any, index: Any) -> Any:
    return slots.layer(self, index)

  def updated(self, slots: tuple[Any, ...]) -> Dense:
    return dataclasses.replace(self, slots=slots, room=None)

  def _write(
    self, old: jax.Array, new: jax.Array, room: Any, axis: int, index: Any = ()
  ) -> jax.Array:
    """Puts `new` into its room on `axis` of `old`, at `index` before it."""
    first, tail = room
    size = self.shards
    lead = len(index)

    def local(
      old: jax.Array, new: jax.Array, index: Any, first: Any, tail: Any
    ) -> jax.Array:
      new = new.astype(old.dtype)
      me = jnp.int32(0)
      if self.axis is not None:
        me = collectives.axis_index(self.axis)
      if tail is None:
        start = [jnp.int32(0)] * old.ndim
        start[axis + lead] = first
        start[:lead] = index
        return lax.dynamic_update_slice(old, new[(None,) * lead], tuple(start))
      tokens = new.shape[axis]
      mine = (me - tail) % size + size * jnp.arange(
        -(-tokens // size), dtype=jnp.int32
      )
      start = [jnp.int32(0)] * old.ndim
      start[axis + lead] = first + (tail + mine[0]) // size
      start[:lead] = index
      taken = jnp.take(new, jnp.minimum(mine, tokens - 1), axis=axis)
      taken = taken[(None,) * lead]
      there = lax.dynamic_slice(old, tuple(start), taken.shape)
      real = (mine < tokens).reshape(
        tuple(-1 if i == axis + lead else 1 for i in range(old.ndim))
      )
      return lax.dynamic_update_slice(
        old, jnp.where(real, taken, there), tuple(start)
      )

    if self.axis is None:
      return local(old, new, index, first, tail)
    over = lambda n: P(*(None,) * n, self.axis)
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(
        over(axis + lead),
        over(axis) if tail is None else P(),
        P(),
        P(),
        P(),
      ),
      out_specs=over(axis + lead),
      axis_names={self.axis},
    )(old, new, index, first, tail)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _joined(x: jax.Array, axis: int, shards: int, used: int) -> jax.Array:
  """The used slots of all shards first, then the empty ones."""
  lead, slots = x.shape[:axis], x.shape[axis] // shards
  by_shard = x.reshape(*lead, shards, slots, *x.shape[axis + 1 :])
  parts = jnp.split(by_shard, [used], axis + 1)
  flat = lambda y: y.reshape(*lead, -1, *x.shape[axis + 1 :])
  return jnp.concatenate([flat(y) for y in parts], axis)


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer's part of a `Dense` cache during one call."""

  cache: Dense
  slots: Slots
  index: Any
  fresh: Any = None

  def append(self, k: jax.Array, v: jax.Array, at: Coords) -> Layer:
    write = lambda old, new: self.cache._write(
      old, new, self.cache.room, 2, (self.index,)
    )
    slots = self.slots._replace(k=write(self.slots.k, k))
    if slots.v.shape[-1]:
      slots = slots._replace(v=write(slots.v, v))
    return dataclasses.replace(self, slots=slots, fresh=KV(k, v, at))

  def view(self) -> Stored:
    return Stored(*self.slots, self.cache.at, self.index)

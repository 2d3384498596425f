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
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import tree
from ringjax.errors import (
  OptionError,
  PromptError,
  ShapeError,
  message,
)
from ringjax.kv.base import KV, Room, zeros
from ringjax.kv.state import State, StateShape
from ringjax.ops.attention.views import ContiguousView, KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
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
    """What stands for the slots: shapes, dtypes and shardings."""
    names = (None, "batch", "heads", "tokens")
    lead = (self.layers, room.batch, self.heads, room.capacity)
    return Slots(
      room.like((*lead, self.key), room.dtype, names),
      room.like((*lead, self.value), room.dtype, names),
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
  mesh: Any = None
  axis: str | None = None

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
    slots, at = cls.spec(
      shapes,
      batch,
      capacity,
      dtype,
      mesh=mesh,
      axis=axis,
      head_axis=head_axis,
      batch_axes=batch_axes,
    )
    lies = None if mesh is None else NamedSharding(mesh, P())
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=lies)
    # Two arrays: one cannot be given away twice.
    base, tail = zeros((count, count))
    return cls(zeros(slots), zeros(at), base, tail, None, mesh, axis)

  @classmethod
  def spec(
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
  ) -> tuple[tuple[Any, ...], Coords]:
    """What stands for the slots and coordinates of such a cache.

    Shapes, dtypes and shardings: nothing is allocated.
    """
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
    tokens = room.like((batch, capacity), jnp.int32, ("batch", "tokens"))
    return tuple(s.slots(room) for s in shapes), Coords(tokens, tokens)

  @property
  def shards(self) -> int:
    return 1 if self.axis is None else self.mesh.shape[self.axis]

  @property
  def capacity(self) -> int:
    """Tokens that fit."""
    return self.at.pos.shape[1]

  @property
  def length(self) -> jax.Array:
    """int32 [B], the position behind each example's last token; 0 if empty.

    It is how many tokens an example has, where they are counted from 0.
    """
    return jnp.max(jnp.where(self.at.seg > 0, self.at.pos + 1, 0), 1)

  @property
  def lost(self) -> bool:
    """Whether a program was given the arrays and left nothing for them."""
    leaves = jax.tree.leaves((self.slots, self.at, self.base, self.tail))
    return any(isinstance(x, jax.Array) and _deleted(x) for x in leaves)

  def nbytes(self) -> int:
    """Bytes of all shards together."""
    return sum(x.nbytes for x in jax.tree.leaves((self.slots, self.at)))

  def filled(self) -> tuple[int, int] | None:
    """`base` and `tail`, or None where they are traced.

    Waits for the program that computes them.
    """
    counts = (self.base, self.tail)
    if any(isinstance(x, jax.core.Tracer) for x in counts):
      return None
    base, tail = (int(np.asarray(x)) for x in counts)
    return base, tail

  def check(self, batch: int, tokens: int, *, spread: bool, sees: bool) -> None:
    """Refuses tokens [B, T] that have no place here.

    Under a trace what it holds is not known: there the shapes are looked at,
    and the caller sees to it that the tokens fit.

    Args:
      batch: B.
      tokens: T.
      spread: as of `reserve`.
      sees: whether the call looks at what the cache holds already.

    Raises:
      ShapeError: another batch, or tokens that do not divide over the shards.
      PromptError: too little room.
      OptionError: a call that would not see the tokens before it, or a cache
        that was given away.
    """
    size, have = self.shards, self.at.pos.shape[0]
    if batch != have:
      raise ShapeError(
        message(
          "cache",
          f"{batch} example(s) for a cache of {have}",
          "as many examples as the cache was made for",
          f"make one with model.cache({batch}, {self.capacity})",
        )
      )
    if not spread and tokens % size:
      raise ShapeError(
        message(
          "tokens",
          f"{tokens} tokens over {size} shards",
          f"a multiple of {size}",
          "fill them up with tokens whose segment_ids are 0",
        )
      )
    if self.lost:
      raise OptionError(
        message(
          "cache",
          "one whose arrays were given away",
          "the cache that the last call returned",
          "go on with that one, or make a new one with model.cache",
        )
      )
    base, tail = self.filled() or (0, 0)
    if not sees and base + tail:
      raise OptionError(
        message(
          "attend",
          f"Travel() behind {base * size + tail} tokens in the cache",
          "an empty cache, for the old tokens would not be seen",
          "pass attend=Visit(), or leave it out",
        )
      )
    start = base * size + tail if spread else (base + -(-tail // size)) * size
    if start + tokens > self.capacity:
      raise PromptError(
        message(
          "cache",
          f"{tokens} more tokens for a cache of {self.capacity} slots, of "
          f"which {start} are taken",
          f"at most {max(0, self.capacity - start)}",
          "make a larger one, with model.cache(batch, capacity)",
        )
      )

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

  def truncate(self, length: Any) -> Dense:
    """Without the tokens at positions from `length` on, an int or int [B].

    Slots behind the last token that is left are free again.

    Raises:
      OptionError: a recurrent layer, whose state cannot go back.
    """
    if any(isinstance(s, State) for s in self.slots):
      raise OptionError(
        message(
          "cache",
          "recurrent layers, whose state does not go back",
          "keys and values in every layer",
          "read the shorter text into a new cache",
        )
      )
    end = jnp.asarray(length, jnp.int32).reshape(-1, 1)
    end = jnp.broadcast_to(end, (self.at.pos.shape[0], 1))
    gone = self.at.pos >= jnp.broadcast_to(end, self.at.pos.shape)
    seg = jnp.where(gone, 0, self.at.seg)
    used = jnp.any(seg > 0, 0)
    size = self.shards
    index = jnp.arange(self.capacity, dtype=jnp.int32)
    shard, slot = jnp.divmod(index, jnp.int32(self.capacity // size))
    around = (slot - self.base) * size + shard + 1
    most = lambda which, x: jnp.max(jnp.where(used & which, x, 0))
    tail = most(slot >= self.base, around)
    base = jnp.where(tail > 0, self.base, most(slot < self.base, slot + 1))
    if self.mesh is not None:
      whole = NamedSharding(self.mesh, P())
      base, tail = jax.lax.with_sharding_constraint((base, tail), whole)
    return dataclasses.replace(
      self, at=Coords(self.at.pos, seg), base=base, tail=tail
    )

  def take(self, examples: Any) -> Dense:
    """Of these examples, int [B'], each as often as it is named.

    For beams, or to go on from one prefix in several ways.

    Raises:
      ShapeError: not a row of numbers of examples.
    """
    have = self.at.pos.shape[0]
    examples = jnp.asarray(examples)
    whole = examples.ndim == 1 and jnp.issubdtype(examples.dtype, jnp.integer)
    if whole and not isinstance(examples, jax.core.Tracer):
      host = np.asarray(examples)
      whole = host.size > 0 and bool(((host >= 0) & (host < have)).all())
    if not whole:
      raise ShapeError(
        message(
          "examples",
          f"{examples}",
          f"integers [B'] from 0 to {have - 1}",
          "name the examples to keep, e.g. jnp.array([0, 0])",
        )
      )
    one = lambda x, axis: _taken(x, examples.astype(jnp.int32), axis)
    return dataclasses.replace(
      self,
      slots=jax.tree.map(lambda x: one(x, 1), self.slots),
      at=Coords(one(self.at.pos, 0), one(self.at.seg, 0)),
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
        in_order(old), jnp.where(real, taken, there), tuple(start)
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


tree.register(Dense, ("slots", "at", "base", "tail", "room"), ("mesh", "axis"))


def in_order(x: jax.Array) -> jax.Array:
  """The same array, in memory as its axes stand: the last one fastest.

  TPU's compiler would lay slots out as the write of one token likes it, and
  copy the slots of all layers, in each layer, to what reading likes.
  """
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _deleted(x: jax.Array) -> bool:
  return not isinstance(x, jax.core.Tracer) and x.is_deleted()


def _taken(x: jax.Array, examples: jax.Array, axis: int) -> jax.Array:
  """Rows of an axis, sharded as before where they divide."""
  found = jnp.take(x, examples, axis, mode="clip")
  if isinstance(x, jax.core.Tracer) or not isinstance(
    x.sharding, NamedSharding
  ):
    return found
  mesh, spec = x.sharding.mesh, [*x.sharding.spec]
  spec += [None] * (x.ndim - len(spec))
  over = spec[axis] or ()
  names = over if isinstance(over, tuple) else (over,)
  if found.shape[axis] % math.prod(mesh.shape[name] for name in names):
    spec[axis] = None
  return jax.device_put(found, NamedSharding(mesh, P(*spec)))


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

  def append(
    self, k: jax.Array, v: jax.Array, at: Coords, rotation: Rotation
  ) -> Layer:
    k = rotation.own(k)
    write = lambda old, new: self.cache._write(
      old, new, self.cache.room, 2, (self.index,)
    )
    slots = self.slots._replace(k=write(self.slots.k, k))
    if slots.v.shape[-1]:
      slots = slots._replace(v=write(slots.v, v))
    return dataclasses.replace(self, slots=slots, fresh=KV(k, v, at))

  def views(self) -> tuple[KVView, ...]:
    return (ContiguousView(*self.slots, self.cache.at, self.index),)

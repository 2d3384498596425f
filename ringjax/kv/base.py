"""What a layer sees of a cache, and the cache that keeps nothing.

A cache belongs to a whole model. Before the layers run it makes room for the
call's tokens (`reserve`); a layer then gets a `LayerCache`, appends its keys
and values and passes it on; the cache is put together again from what the
layers return. Layers of one kind share an array with a leading axis, so that
a loop over layers carries it and writes in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.ops.attention.stored import Stored
from ringjax.ops.mask import Coords


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

  def stored(self) -> Stored:
    """The same as a stack of one layer."""
    return Stored(self.k[None], self.v[None], self.at, jnp.int32(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
  """For whom a cache is made, and where its slots lie.

  Attributes:
    batch: B.
    capacity: tokens that fit.
    dtype: of keys and values.
    mesh: None is one device.
    axes: the mesh axes of "batch", "heads" and "tokens", as in a
      PartitionSpec.
  """

  batch: int
  capacity: int
  dtype: Any
  mesh: Any = None
  axes: Any = dataclasses.field(default_factory=dict)

  def zeros(
    self, shape: tuple[int, ...], dtype: Any, names: tuple[str | None, ...]
  ) -> jax.Array:
    """Zeros whose dimensions are sharded by name, heads if they divide."""
    if self.mesh is None:
      return jnp.zeros(shape, dtype)
    spec = [self.axes.get(name) for name in names]
    for i, name in enumerate(names):
      if name == "heads" and spec[i] and shape[i] % self.mesh.shape[spec[i]]:
        spec[i] = None
    return jnp.zeros(shape, dtype, device=NamedSharding(self.mesh, P(*spec)))


@runtime_checkable
class LayerCache(Protocol):
  """One layer's part of a cache during one call."""

  slots: Any
  fresh: Any

  def append(self, k: jax.Array, v: jax.Array, at: Coords) -> LayerCache:
    """Adds the call's keys [B, K, T, H] and values [B, K, T, J]."""
    ...

  def view(self) -> Stored:
    """All keys and values where they lie, the appended ones too."""
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
  """A model's keys and values."""

  slots: tuple[Any, ...]

  def reserve(self, at: Coords, spread: bool) -> Cache:
    """Makes room for tokens with these coordinates, [B, T]."""
    ...

  def layer(self, slots: Any, index: Any) -> LayerCache | StateCache:
    """The part of layer `index` among those that share `slots`."""
    ...

  def updated(self, slots: tuple[Any, ...]) -> Cache:
    """The cache after the layers."""
    ...


class _Fresh(NamedTuple):
  """A layer that forgets: what it sees is what the call brought."""

  fresh: Any = None
  slots: Any = ()

  def append(self, k: jax.Array, v: jax.Array, at: Coords) -> _Fresh:
    return _Fresh(KV(k, v, at))

  def view(self) -> Stored:
    return self.fresh.stored()

  def recall(self, empty: Any) -> Any:
    return empty

  def keep(self, state: Any) -> _Fresh:
    del state
    return self


class NoCache:
  """The cache of a call that leaves nothing behind."""

  def __init__(self, kinds: int):
    self.slots: tuple[Any, ...] = ((),) * kinds

  def reserve(self, at: Coords, spread: bool) -> NoCache:
    del at, spread
    return self

  def layer(self, slots: Any, index: Any) -> _Fresh:
    del slots, index
    return _Fresh()

  def updated(self, slots: tuple[Any, ...]) -> NoCache:
    del slots
    return self

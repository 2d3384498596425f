"""State of recurrent layers: fixed-size memory and a short convolution tail.

Guarantees: the state holds all that later tokens need of the context, so a call
that appends gives the same result as one call over all tokens.
Memory: L B N H J float32 numbers and the last tokens of the convolution, the
same on all shards of the sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ringjax.kv.base import CacheSpec, CallCache, zeros
from ringjax.kv.storage.call_tiles import CacheTile
from ringjax.ops.recurrent.conv import Tail
from ringjax.typing import Index


class State(NamedTuple):
  """The carried state of a layer, or with a leading axis of several.

  Fields:
    memory: Recurrent memory, float32 [B, N, H, J]; a tree of arrays in states
      that grow.
    tail: Last inputs of a convolution, such as queries, keys and values; its x
      are [B, n, *shape] for each of `StateShape.convolved`.
  """

  memory: PyTree
  tail: Tail

  def layer(self, cache: CallCache, index: Index) -> StateLayer:
    """Part of layer `index` for a call, with these states as its slots."""
    del cache
    return StateLayer(self, index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
  """Shape of a kind of recurrent layer's slots.

  Attributes:
    layers: Number of layers that share the array, L.
    heads: Number of value heads, N; 0 if only the tail is kept.
    key: Head dim of the keys, H.
    value: Head dim of the values, J.
    tail: Number of earlier tokens that a convolution reads.
    convolved: Shapes (heads, dim) of the convolution's inputs per token.
    which: Indices of the layers in the model.
  """

  # Whether the slots of a row grow with the tokens that it may have.
  grows: ClassVar[bool] = False

  layers: int
  heads: int
  key: int
  value: int
  tail: int
  convolved: tuple[tuple[int, int], ...]
  which: tuple[int, ...] = ()

  def numbers(self) -> int:
    """Count the scalars that one token takes: 0, the state does not grow."""
    return 0

  def slots(self, room: CacheSpec) -> State:
    """Specs (shapes, dtypes, shardings) of the states.

    No codec applies: their size does not grow with the context.
    """
    b, n = (self.layers, room.batch), self.tail
    memory = (*b, self.heads, self.key, self.value)
    # Compiled programs return an array of size 0 replicated.
    axes = (None, "batch", "heads") if self.heads else (None,) * 5
    return State(
      room.like(memory, jnp.float32, axes),
      Tail(
        tuple(
          room.like(
            (*b, n, *vector_shape), room.dtype, (None, "batch", None, "heads")
          )
          for vector_shape in self.convolved
        ),
        room.like((*b, n), jnp.int32, (None, "batch")),
      ),
    )

  def empty(self, batch: int, dtype: DTypeLike) -> State:
    """One layer's state before any token."""
    single_layer = dataclasses.replace(self, layers=1)
    state = zeros(
      single_layer.slots(CacheSpec(batch=batch, capacity=0, dtype=dtype))
    )
    return jax.tree.map(lambda x: x[0], state)


@dataclasses.dataclass(frozen=True)
class StateLayer:
  """One recurrent layer's part of a cache during one call."""

  slots: State
  index: Index

  def recall(self, empty: State) -> State:
    """Read the state that earlier calls left."""
    take = lambda x, like: lax.dynamic_index_in_dim(
      x, self.index, 0, keepdims=False
    ).astype(like.dtype)
    return jax.tree.map(take, self.slots, empty)

  def keep(self, state: State) -> StateLayer:
    """Store the state after this call."""
    put = lambda x, new: lax.dynamic_update_index_in_dim(
      x, new.astype(x.dtype), self.index, 0
    )
    return dataclasses.replace(self, slots=jax.tree.map(put, self.slots, state))

  def of_tile(self, tile: CacheTile) -> StateLayer:
    """Part of the layer for the row of a tile."""

    def take(x: jax.Array) -> jax.Array:
      return lax.dynamic_slice(x, self._at(x, tile), (1, 1, *x.shape[2:]))

    return StateLayer(jax.tree.map(take, self.slots), jnp.int32(0))

  def with_tile(self, tile: CacheTile, new: StateLayer) -> StateLayer:
    """Store the state of a tile's row, which `of_tile` returned."""

    def put(x: jax.Array, state: jax.Array) -> jax.Array:
      return lax.dynamic_update_slice(x, state, self._at(x, tile))

    slots = jax.tree.map(put, self.slots, new.slots)
    return dataclasses.replace(self, slots=slots)

  def _at(self, x: jax.Array, tile: CacheTile) -> tuple[Any, ...]:
    first = (jnp.int32(0) for _ in x.shape[2:])
    return (jnp.asarray(self.index, jnp.int32), tile.row, *first)

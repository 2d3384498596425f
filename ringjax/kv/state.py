"""What a recurrent layer keeps: a state of fixed size and a short tail.

Guarantees: whatever the length of the context, all that later tokens need of
it; so a call that appends gives what one call over all tokens gives.
Memory: L B N H J float32 numbers and the last tokens of the convolution, the
same on all shards of the sequence.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ringjax.kv.base import CacheSpec, CallCache, zeros
from ringjax.ops.conv import Tail
from ringjax.parallel.local import move
from ringjax.typing import Index


class State(NamedTuple):
  """The carried state of a layer, or with a leading axis of several.

  Fields:
    memory: float32 [B, N, H, J].
    tail: of what a convolution reads, such as queries, keys and values; its x
      are [B, n, *shape] for each of the `convolved` of a `StateShape`.
  """

  memory: jax.Array
  tail: Tail

  def layer(self, cache: CallCache, index: Index) -> StateLayer:
    """The part of layer `index` of a cache, where these are its slots."""
    del cache
    return StateLayer(self, index)

  def gathered(self, device: jax.Device) -> State:
    """The same on one device: a state has no axis of tokens."""
    return jax.tree.map(lambda x: move(x, device), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
  """Shape of a kind of recurrent layer's slots.

  Attributes:
    layers: how many layers share the array.
    heads: value heads, N; 0 where the tail is all that is kept.
    key: H.
    value: J.
    tail: tokens that a convolution looks back.
    convolved: the shapes of what it reads of a token, each (heads, numbers).
    which: the layers' numbers in the model.
  """

  layers: int
  heads: int
  key: int
  value: int
  tail: int
  convolved: tuple[tuple[int, int], ...]
  which: tuple[int, ...] = ()

  def numbers(self) -> int:
    """Numbers that one token takes: none, the state does not grow."""
    return 0

  def slots(self, room: CacheSpec) -> State:
    """What stands for the states: shapes, dtypes and shardings.

    No codec stores them: their size does not grow with the context.
    """
    b, n = (self.layers, room.batch), self.tail
    memory = (*b, self.heads, self.key, self.value)
    # Without a number in it a compiled program returns it replicated.
    axes = (None, "batch", "heads") if self.heads else (None,) * 5
    return State(
      room.like(memory, jnp.float32, axes),
      Tail(
        tuple(
          room.like((*b, n, *one), room.dtype, (None, "batch", None, "heads"))
          for one in self.convolved
        ),
        room.like((*b, n), jnp.int32, (None, "batch")),
      ),
    )

  def empty(self, batch: int, dtype: DTypeLike) -> State:
    """One layer's state before any token."""
    one = dataclasses.replace(self, layers=1)
    state = zeros(one.slots(CacheSpec(batch=batch, capacity=0, dtype=dtype)))
    return jax.tree.map(lambda x: x[0], state)


@dataclasses.dataclass(frozen=True)
class StateLayer:
  """One recurrent layer's part of a cache during one call."""

  slots: State
  index: Index

  def recall(self, empty: State) -> State:
    """What earlier calls left."""
    take = lambda x, like: lax.dynamic_index_in_dim(
      x, self.index, 0, keepdims=False
    ).astype(like.dtype)
    return jax.tree.map(take, self.slots, empty)

  def keep(self, state: State) -> StateLayer:
    """Writes what this call leaves."""
    put = lambda x, new: lax.dynamic_update_index_in_dim(
      x, new.astype(x.dtype), self.index, 0
    )
    return dataclasses.replace(self, slots=jax.tree.map(put, self.slots, state))

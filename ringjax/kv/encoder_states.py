"""Encoder states of contexts, stored next to a cache of keys.

All layers of a decoder with cross-attention read the same states, so a token of
the context takes E numbers, where its keys and values would take 2 L K H.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Float, Int

from ringjax import tree
from ringjax.errors import InputTypeError, ShapeError
from ringjax.kv.base import NoCache
from ringjax.typing import ArrayLeaf

if TYPE_CHECKING:
  from ringjax.kv.base import RowIndices


class EncoderStates(NamedTuple):
  """Encoder states of the contexts of a batch's rows.

  Fields:
    phi: State of each token of the context, in any order, [B, S, E].
    seg: Mask, 1 for a state and 0 for padding, int32 [B, S].
  """

  phi: Float[ArrayLeaf, "B S E"]
  seg: Int[ArrayLeaf, "B S"]

  def check(self, batch: int) -> None:
    """Check the batch of the states.

    Raises:
      ShapeError: If it is not `batch`.
    """
    if self.phi.shape[0] != batch:
      raise ShapeError(
        "states",
        f"contexts of {self.phi.shape[0]} rows for a batch of {batch}",
        "a context for each row",
        "encode as many contexts as there are rows, or states.take(rows)",
      )

  def take(self, rows: RowIndices) -> EncoderStates:
    """Gather these rows, int [B'], with repetition."""
    gather_rows = lambda x: jnp.take(x, jnp.asarray(rows), 0, mode="clip")
    return EncoderStates(gather_rows(self.phi), gather_rows(self.seg))

  def reset(self, rows: RowIndices) -> EncoderStates:
    """Remove the contexts of these rows, int [n]."""
    return self._replace(seg=self.seg.at[rows].set(0))

  def padded(self, tokens: int) -> EncoderStates:
    """Pad to `tokens` states per row."""
    padding = tokens - self.seg.shape[1]
    if padding <= 0:
      return self
    return EncoderStates(
      jnp.pad(self.phi, [(0, 0), (0, padding), (0, 0)]),
      jnp.pad(self.seg, [(0, 0), (0, padding)]),
    )


def checked(states: EncoderStates, batch: int) -> EncoderStates:
  """Check type and batch of `states` and return them.

  Raises:
    InputTypeError: If `states` is of another type.
    ShapeError: If the batch differs.
  """
  if not isinstance(states, EncoderStates):
    raise InputTypeError(
      "states",
      type(states).__name__,
      "encoder states",
      "make them with rj.models.cepe.encode(model, chunks)",
    )
  states.check(batch)
  return states


def attached(
  states: EncoderStates,
  batch: int,
  shards: int,
  like: Int[ArrayLeaf, "B _"],
) -> EncoderStates:
  """Copy states for a cache: calls donate it, and the caller may reuse them.

  Args:
    states: Encoder states of the rows.
    batch: Number of rows, B.
    shards: Number of shards of the sequence.
    like: Array whose sharding the states get: each state is on one shard.
  """
  states = checked(states, batch)
  size = -(-states.seg.shape[1] // shards) * shards
  copies = jax.tree.map(jnp.copy, states.padded(size))
  if isinstance(like, jax.core.Tracer) or not isinstance(
    like.sharding, NamedSharding
  ):
    return copies
  return jax.tree.map(lambda x: jax.device_put(x, like.sharding), copies)


def inserted(
  mine: EncoderStates | None,
  rows: RowIndices,
  other: EncoderStates | None,
  batch: int,
) -> EncoderStates | None:
  """Replace `rows`, int [n], of a batch's states by those of another batch.

  Either may be None, for no context.
  """
  if mine is None and other is None:
    return None
  template = other if mine is None else mine
  assert template is not None
  _, tokens, width = template.phi.shape
  if mine is None:
    mine = EncoderStates(
      jnp.zeros((batch, tokens, width), template.phi.dtype),
      jnp.zeros((batch, tokens), jnp.int32),
    )
  if other is None:
    return mine.reset(rows)
  tokens = max(mine.seg.shape[1], other.seg.shape[1])
  return jax.tree.map(
    lambda x, new: x.at[rows].set(new),
    mine.padded(tokens),
    other.padded(tokens),
  )


@dataclasses.dataclass(frozen=True)
class StatesAlone(NoCache):
  """Cache of a call that stores nothing and reads encoder states.

  Attributes:
    kinds: Number of kinds of layers of the model.
    states: Encoder states of the context.
  """

  kinds: int
  states: EncoderStates  # pyrefly: ignore

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * self.kinds


tree.register(StatesAlone, ("states",), ("kinds",))

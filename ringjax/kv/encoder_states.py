"""States of a context that an encoder has read, beside a cache of keys.

All layers of a decoder with cross-attention read the same states, so a token of
the context takes E numbers, where its keys and values would take 2 L K H.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from ringjax import tree
from ringjax.errors import InputTypeError, ShapeError
from ringjax.kv.base import NoCache
from ringjax.typing import ArrayLeaf

if TYPE_CHECKING:
  from ringjax.kv.base import RowIndices


class EncoderStates(NamedTuple):
  """What an encoder makes of the contexts of a batch's rows.

  Fields:
    phi: [B, S, E], a state for each token of the context, in any order.
    seg: int32 [B, S], 1 for a state and 0 for padding.
  """

  phi: Float[ArrayLeaf, "B S E"]
  seg: Int[ArrayLeaf, "B S"]

  def check(self, batch: int) -> None:
    """Refuses states of another batch.

    Raises:
      ShapeError: another batch.
    """
    if self.phi.shape[0] != batch:
      raise ShapeError(
        "states",
        f"contexts of {self.phi.shape[0]} rows for a batch of {batch}",
        "a context for each row",
        "encode as many contexts as there are rows, or states.take(rows)",
      )

  def take(self, rows: RowIndices) -> EncoderStates:
    """Of these rows, int [B'], each as often as it is named."""
    one = lambda x: jnp.take(x, jnp.asarray(rows), 0, mode="clip")
    return EncoderStates(one(self.phi), one(self.seg))

  def reset(self, rows: RowIndices) -> EncoderStates:
    """With no context in these rows, int [n]."""
    return self._replace(seg=self.seg.at[rows].set(0))

  def padded(self, tokens: int) -> EncoderStates:
    """With padding up to `tokens` states a row."""
    over = tokens - self.seg.shape[1]
    if over <= 0:
      return self
    return EncoderStates(
      jnp.pad(self.phi, [(0, 0), (0, over), (0, 0)]),
      jnp.pad(self.seg, [(0, 0), (0, over)]),
    )


def checked(states: EncoderStates, batch: int) -> EncoderStates:
  """`states` if they are those of a batch.

  Raises:
    InputTypeError: something else.
    ShapeError: states of another batch.
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


def inserted(
  mine: EncoderStates | None,
  rows: RowIndices,
  other: EncoderStates | None,
  batch: int,
) -> EncoderStates | None:
  """The states of a batch with those of another in place of `rows`, int [n].

  Either may be None, no context.
  """
  if mine is None and other is None:
    return None
  known = other if mine is None else mine
  assert known is not None
  _, tokens, width = known.phi.shape
  if mine is None:
    mine = EncoderStates(
      jnp.zeros((batch, tokens, width), known.phi.dtype),
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
  """The cache of a call that leaves nothing behind and reads a context.

  Attributes:
    kinds: how many kinds of layers the model has.
    states: of the context.
  """

  kinds: int
  states: EncoderStates  # pyrefly: ignore

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * self.kinds


tree.register(StatesAlone, ("states",), ("kinds",))

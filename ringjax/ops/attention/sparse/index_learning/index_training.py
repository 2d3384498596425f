"""Common part of losses of indexes: no choice is made and no value is read."""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ringjax.ops.attention.scores import Scores
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  ShardTokens,
)
from ringjax.ops.mask import Mask


class LearningSelection(BlockSelection):
  """A loss of an index, which takes the way of a selection to the shards."""

  @abc.abstractmethod
  def loss(
    self, tokens: ShardTokens, scores: Scores, head_axes: tuple[str, ...]
  ) -> Float[Array, "B T M"]:
    """Per shard: the loss of each query, for each of the heads that choose.

    Args:
      tokens: Queries and keys with their coordinates.
      scores: Way in which attention makes scores of its products.
      head_axes: Mesh axes that shard the heads.
    """

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    raise AssertionError("index_loss checks its arguments")

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T _ n"]:
    raise AssertionError("a loss chooses no keys")

  def attend(
    self,
    tokens: ShardTokens,
    v: Float[Array, "B S K J"],
    scores: Scores,
    sinks: Float[Array, " N"] | None,
    head_axes: tuple[str, ...],
  ) -> tuple[
    Float[Array, "B T N _"], Float[Array, "B T N"], Int[Array, "B T M n"]
  ]:
    """Per shard: no output, the loss of each query for each head, no blocks."""
    del v, sinks
    loss = self.loss(tokens, scores, head_axes)
    of_heads = jnp.repeat(loss, tokens.q.shape[2] // loss.shape[2], 2)
    no_blocks = jnp.zeros((*tokens.q.shape[:2], 1, 1), jnp.int32)
    return tokens.q[..., :0], of_heads, no_blocks

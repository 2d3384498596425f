"""Blocks of attention and feedforward whose weights several layers share.

Guarantees: a block's weights exist once, and its gradient is the sum over the
layers that use it; each use has its low-rank maps and its keys. A
block reads a layer's input next to the embedding, and its output is only added
to what the layer's state space reads, not to the residual.
Cost: that of a layer of attention of twice the width, for each use.
Ref:  Glorioso et al. 2024, The Zamba2 Suite, arXiv 2411.15242.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ringjax.kv.base import LayerCache, StateCache
from ringjax.nn.attention_layers.attention import Attention, GroupedQuery
from ringjax.nn.attention_layers.attention_and_state import AttentionAndState
from ringjax.nn.feedforward import ACTIVATIONS
from ringjax.nn.linear import Linear, Norm
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBlocks:
  """Blocks that layers use in turn.

  Attributes:
    count: Number of blocks.
    uses: Number of layers that use one; the n-th uses block n % count.
    attention: Attention of a block, whose input is twice as wide as the model.
    hidden: Width of the gated feedforward.
    act: Activation of its gate.
    bias: Whether the feedforward's maps have biases.
    norm: Norm before attention and before the feedforward.
    rank: Rank of the low-rank maps of each use, which are added to the gated
      feedforward's first maps.
    adapted: Whether queries, keys and values have such maps, too.
  """

  count: int
  uses: int
  attention: Attention
  hidden: int
  act: str
  bias: bool
  norm: Norm
  rank: int
  adapted: bool

  def build(self, rngs: nnx.Rngs, embed: int) -> SharedBlockTable:
    return SharedBlockTable(rngs, self, embed)


class LowRankMap(nnx.Module):
  """A map through few numbers."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    inputs: int,
    rank: int,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
  ):
    self.down = Linear(rngs, (inputs,), (rank,), (None, None))
    self.up = Linear(rngs, (rank,), shape, (None, *axes))

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B ..."]:
    return self.up(self.down(x))


class _Sum(nnx.Module):
  """Sum of two maps of the same input."""

  def __init__(self, first: Any, second: Any):
    self.first, self.second = first, second

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B ..."]:
    return self.first(x) + self.second(x)


class UseMaps(nnx.Module):
  """Low-rank maps of one use of a block."""

  def __init__(self, rngs: nnx.Rngs, spec: SharedBlocks, embed: int):
    rank, attend = spec.rank, spec.attention
    into = lambda: Linear(rngs, (rank,), (spec.hidden,), (None, "ffn"))
    self.down = Linear(rngs, (embed,), (rank,), (None, None))
    self.gate, self.up = into(), into()
    if spec.adapted:
      low_rank = lambda heads, name: LowRankMap(
        rngs, 2 * embed, rank, (heads, attend.head_dim), (name, None)
      )
      self.q = low_rank(attend.heads, "heads")
      self.k = low_rank(attend.kv_heads, "kv_heads")
      self.v = low_rank(attend.kv_heads, "kv_heads")


class SharedBlock(nnx.Module):
  """One block, with the maps of each of its uses."""

  def __init__(self, rngs: nnx.Rngs, spec: SharedBlocks, embed: int, uses: int):
    attend, f = spec.attention, spec.hidden
    self.act, self.adapted = spec.act, spec.adapted
    self.norm = spec.norm.build(rngs, 2 * embed)
    self.attention = GroupedQuery(rngs, attend, 2 * embed, embed)
    self.pre_feedforward = spec.norm.build(rngs, embed)
    into = lambda: Linear(
      rngs, (embed,), (f,), ("embed", "ffn"), bias=spec.bias
    )
    self.gate, self.up = into(), into()
    self.down = Linear(rngs, (f,), (embed,), ("ffn", "embed"), bias=spec.bias)
    self.uses = nnx.List([UseMaps(rngs, spec, embed) for _ in range(uses)])

  def attention_of(self, use: int) -> GroupedQuery:
    """Attention with the low-rank maps of a use."""
    if not self.adapted:
      return self.attention
    adapted: Any = nnx.clone(self.attention)
    maps = self.uses[use]
    adapted.q = _Sum(self.attention.q, maps.q)
    adapted.k = _Sum(self.attention.k, maps.k)
    adapted.v = _Sum(self.attention.v, maps.v)
    return adapted

  def __call__(
    self,
    x: Float[Array, "B T D"],
    embedding: Float[Array, "B T D"],
    use: int,
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], LayerCache]:
    """[B, T, D] and the cache with this call's keys.

    Args:
      x: Input of the layer.
      embedding: Embeddings of the tokens.
      use: Number of the use among those of this block.
      tokens: Tokens of the call.
      cache: Cache of the layer's keys.
      attend: Sharding of the tokens.
    """
    wide_input = jnp.concatenate([x, embedding.astype(x.dtype)], -1)
    attention = self.attention_of(use)
    mixed, cache = attention(self.norm(wide_input), tokens, cache, attend)
    maps = self.uses[use]

    def feed(x: jax.Array) -> jax.Array:
      low = maps.down(x)
      gate = ACTIVATIONS[self.act](self.gate(x) + maps.gate(low))
      return self.down(gate * (self.up(x) + maps.up(low)))

    return attend.rowwise(feed, self.pre_feedforward(mixed)), cache


class SharedBlockTable(nnx.Module):
  """The module of `SharedBlocks`."""

  def __init__(self, rngs: nnx.Rngs, spec: SharedBlocks, embed: int):
    numbers = range(spec.uses)
    self.blocks = nnx.List(
      SharedBlock(rngs, spec, embed, len(numbers[block :: spec.count]))
      for block in range(spec.count)
    )

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T D"],
    number: int,
  ) -> SharedUse:
    """The block of use `number`, for tokens with the embeddings x."""
    del tokens
    use, block = divmod(number, len(self.blocks))
    return SharedUse(self.blocks[block], x, use)


@dataclasses.dataclass(frozen=True)
class SharedUse:
  """A use of a block in a call.

  Attributes:
    block: Block.
    embedding: Embeddings of the call's tokens, [B, T, D].
    use: Number of the use among those of the block.
  """

  block: SharedBlock
  embedding: Float[Array, "B T D"]
  use: int

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], LayerCache]:
    """[B, T, D] and the cache with this call's keys."""
    return self.block(x, self.embedding, self.use, tokens, cache, attend)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterBlock(AttentionAndState):
  """A state space that reads its layer's input and a shared block's output.

  Attributes:
    norm: Norm of the state space's input.
    use: Number of the use of blocks.
  """

  norm: Norm
  use: int

  def build(self, rngs: nnx.Rngs, embed: int) -> AfterBlockLayer:
    return AfterBlockLayer(rngs, self, embed)


class AfterBlockLayer(nnx.Module):
  """The module of `AfterBlock`, without the block."""

  def __init__(self, rngs: nnx.Rngs, spec: AfterBlock, embed: int):
    self.spec = spec
    self.into = Linear(rngs, (embed,), (embed,), (None, "embed"))
    self.pre_state = spec.norm.build(rngs, embed)
    self.state = spec.state.build(rngs, embed)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, StateCache],
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, StateCache]]:
    """[B, T, D] and the layer's caches, of attention and of the state."""
    keys, state = cache
    assert tokens.inputs is not None
    use: SharedUse = tokens.inputs(self.spec.use)
    mixed, keys = use(x, tokens, keys, attend)
    into = x + attend.rows(self.into, mixed)
    y, state = self.state(self.pre_state(into), tokens, state, attend)
    return y, (keys, state)

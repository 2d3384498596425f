"""The block of a draft model that reads its target's cache (LongSpec).

Guarantees: its own keys and values are functions of a token and its position
alone, so those of a drafted token that is accepted are right.
Memory: its own keys of a window; the context's keys are the target's.
Ref: Yang et al. 2025, arXiv 2502.17421.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.kv.base import LayerCache
from ringjax.nn.attention_layers.attention import Attention, head_norm
from ringjax.nn.linear import Linear, part_dtype
from ringjax.nn.sharding_context import Attend, Extras
from ringjax.nn.tokens import Tokens

if TYPE_CHECKING:
  from ringjax.nn.block import Layer

# Function from queries [B, T, N, H] to attention over the target's keys.
ReadTarget = Callable[[Array, Extras], Array]


class TargetQuery(nnx.Module):
  """Attention to keys and values of a layer of another model.

  Queries and output have their own weights. It has that layer's heads, logit
  scale and rotation, and a norm of queries if that layer has one.
  """

  def __init__(self, rngs: nnx.Rngs, spec: Attention, embed: int):
    n, h = spec.heads, spec.head_dim
    self.spec = spec
    self.q = Linear(rngs, (embed,), (n, h), ("embed", "heads", None), bias=True)
    self.o = Linear(rngs, (n, h), (embed,), ("heads", None, "embed"))
    self.q_norm = head_norm(rngs, spec, n)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    read: ReadTarget,
    attend: Attend,
  ) -> Float[Array, "B T D"]:
    """Attention over the target's keys: zeros if `read` finds none."""
    spec = self.spec
    q = attend.rows(self.q, x)
    if spec.qk_norm_late:
      q = self.q_norm(tokens.rotate(spec.rope, q))
    else:
      q = tokens.rotate(spec.rope, self.q_norm(q))
    if spec.temperature is not None:
      q = spec.temperature(q, tokens.pos)
    slopes = spec.alibi
    extras = Extras(
      scale=spec.logit_scale,
      soft_cap=spec.soft_cap,
      slopes=None if slopes is None else jnp.asarray(slopes, jnp.float32),
    )
    return attend.rows(self.o, read(q, extras))


class DraftBlock(nnx.Module):
  """Attention to a window, attention to the target's keys, feedforward.

  Each reads through a norm and is added.
  """

  def __init__(
    self, rngs: nnx.Rngs, layer: Layer, target: Attention, embed: int
  ):
    """Make the block.

    Args:
      rngs: Random keys of its weights.
      layer: Attention, feedforward and kind of norms of the draft.
      target: Layer of the target whose keys and values it reads.
      embed: D, width of the model.
    """
    norm = lambda: layer.norm.build(rngs, embed)
    self.pre_attention, self.attention = (
      norm(),
      layer.attention.build(rngs, embed),
    )
    self.pre_cross, self.cross = norm(), TargetQuery(rngs, target, embed)
    self.pre_feedforward, self.feedforward = (
      norm(),
      layer.feedforward.build(rngs, embed),
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
    read: ReadTarget,
  ) -> tuple[Float[Array, "B T D"], LayerCache]:
    """[B, T, D] -> [B, T, D], and its own cache."""
    mix: Any = self.attention
    narrow = part_dtype(self, x.dtype)
    normed = self.pre_attention(x).astype(narrow)
    mixed, cache = mix(normed, tokens, cache, attend)
    x = attend.constrain(x + mixed.astype(x.dtype))
    normed = self.pre_cross(x).astype(narrow)
    x = x + self.cross(normed, tokens, read, attend).astype(x.dtype)
    normed = self.pre_feedforward(x).astype(narrow)
    x = x + self.feedforward(normed, attend).astype(x.dtype)
    return attend.constrain(x), cache

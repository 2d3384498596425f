"""What a model computes for a token and for a pair of tokens, and how far."""

from __future__ import annotations

import jax
from flax import nnx

from ringjax.models.transformer import Transformer
from ringjax.plan import cost


def profile(model: Transformer, tokens: int) -> cost.Profile:
  """A prompt's work in FLOPs, where a `Profile` has seconds.

  Two FLOPs for each weight that a token meets, of the experts those that it
  chooses; and what a layer's attention does with a pair. Behind a window a
  query sees no more, however long the prompt is: that counts with the token.

  Args:
    model: what reads.
    tokens: of the prompt.
  """
  layers = model.config.layers
  params = jax.tree.leaves(nnx.state(model.stack, nnx.Param))
  streamed = model.placement_report().streamed_parameters
  idle = sum(layer.feedforward.idle(model.config.embed) for layer in layers)
  token = 2.0 * (sum(x.size for x in params) + streamed - idle)
  pair = 0.0
  for layer in layers:
    each = float(layer.attention.pair_flops)
    behind = layer.attention.reach
    if behind is None:
      pair += each
    else:
      token += each * min(behind + 1, tokens)
  return cost.Profile(
    name="FLOPs",
    model=model.config.family,
    hardware="any",
    layers=len(layers),
    token_s=token,
    pair_s=pair,
    kv_bytes=0,
    kernel="causal",
  )


def window(model: Transformer) -> int | None:
  """Tokens that every layer's queries see, if it is the same number."""
  reaches = {layer.attention.reach for layer in model.config.layers}
  behind = reaches.pop() if len(reaches) == 1 else None
  return None if behind is None else behind + 1

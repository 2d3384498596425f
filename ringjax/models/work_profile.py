"""What a model computes for a token and for a pair of tokens, and how far."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ringjax.kv.base import bytes_each
from ringjax.models.transformer import Transformer
from ringjax.plan import cost
from ringjax.plan.offload_tiers import OffloadShape


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


def offload_shape(model: Transformer, name: str) -> OffloadShape:
  """The sizes that the planner of offloading goes by, of any family.

  Numbers of a layer are means: of experts all count as weights and the chosen
  ones as work. A layer with a window counts as if it kept all tokens.

  Args:
    model: one with or without numbers (`rj.models.checkpoint.abstract`).
    name: of the model, for people.
  """
  config = model.config
  layers = config.layers
  L, D = len(layers), config.embed
  params = jax.tree.leaves(nnx.state(model.stack, nnx.Param))
  weights = sum(x.size for x in params)
  idle = sum(layer.feedforward.idle(D) for layer in layers)
  table = config.vocab * D
  # Always on the device: what layers read of ids, and ends of streams.
  ends = [x for x in (model.inputs, model.streams) if x is not None]
  beside = sum(x.size for x in jax.tree.leaves(nnx.state(ends, nnx.Param)))
  # Between two lengths, so that what does not grow with tokens is left out.
  least = 1024
  one, two = (
    bytes_each(model.init_cache_spec(1, n, dtype=jnp.bfloat16))
    for n in (least, 2 * least)
  )
  # Positions and segments are there once, not for each layer.
  kv = max(0.0, (two - one) / least - 8) / 2
  return OffloadShape(
    name=name,
    layers=L,
    embed=D,
    heads=max(getattr(layer.attention, "heads", 1) for layer in layers),
    queries=max(1, max(layer.attention.pair_flops for layer in layers) // 4),
    hidden=max(layer.feedforward.width for layer in layers),
    weights=weights / L,
    active=(weights - idle) / L,
    kv=kv / L,
    attend=sum(layer.attention.pair_flops for layer in layers) / L,
    tables=table * (1 if config.tied else 2) + beside,
    head=table,
  )

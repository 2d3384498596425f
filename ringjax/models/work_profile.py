"""Work of a model per token and per pair of tokens, and its windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ringjax.kv.base import bytes_each
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import number_of_weights
from ringjax.plan import cost
from ringjax.plan.flexgen.offload_tiers import OffloadShape


def profile(model: Transformer, tokens: int) -> cost.Profile:
  """A prompt's work in FLOPs, in the fields that are seconds in a `Profile`.

  Two FLOPs per weight that a token uses, of experts those that it chooses; and
  the attention of each layer per pair. Beyond a window a query sees no more,
  however long the prompt is: that counts as work of the token.

  Args:
    model: Model that reads the prompt.
    tokens: Tokens of the prompt.
  """
  layers = model.config.layers
  streamed = model.placement_report().streamed_parameters
  idle = sum(layer.feedforward.idle(model.config.embed) for layer in layers)
  token = 2.0 * (_weights(model) + streamed - idle)
  pair = 0.0
  for layer in layers:
    pair_flops = float(layer.pair_flops)
    reach = layer.attention.reach
    if reach is None:
      pair += pair_flops
    else:
      token += pair_flops * min(reach + 1, tokens)
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


def _weights(model: Transformer) -> int:
  """Number of weights of the stack that are in memory."""
  params = jax.tree.leaves(nnx.state(model.stack, nnx.Param))
  return number_of_weights(params)


def window(model: Transformer) -> int | None:
  """Tokens that every layer's queries see, if all see the same number."""
  reaches = {layer.attention.reach for layer in model.config.layers}
  reach = reaches.pop() if len(reaches) == 1 else None
  return None if reach is None else reach + 1


def offload_shape(model: Transformer, name: str) -> OffloadShape:
  """Sizes for the planner of offloading, for any family.

  Numbers of a layer are means: all experts count as weights, the chosen ones
  as work. A layer with a window counts as if it kept all tokens.

  Args:
    model: Model of arrays or shapes (`rj.models.checkpoint.abstract`).
    name: Name of the model, to be shown.
  """
  config = model.config
  layers = config.layers
  L, D = len(layers), config.embed
  weights = _weights(model)
  idle = sum(layer.feedforward.idle(D) for layer in layers)
  table = config.vocab * D
  # Always on the device: inputs of all layers by ids, and ends of streams.
  ends = [x for x in (model.inputs, model.streams) if x is not None]
  beside = sum(x.size for x in jax.tree.leaves(nnx.state(ends, nnx.Param)))
  # The difference of two lengths cancels bytes that don't grow with tokens.
  short = 1024
  short_bytes, long_bytes = (
    bytes_each(model.init_cache_spec(1, n, dtype=jnp.bfloat16))
    for n in (short, 2 * short)
  )
  # Positions and segments are stored once, not for each layer.
  kv = max(0.0, (long_bytes - short_bytes) / short - 8) / 2
  return OffloadShape(
    name=name,
    layers=L,
    embed=D,
    heads=max(getattr(layer.attention, "heads", 1) for layer in layers),
    queries=max(1, max(layer.pair_flops for layer in layers) // 4),
    hidden=max(layer.feedforward.width for layer in layers),
    weights=weights / L,
    active=(weights - idle) / L,
    kv=kv / L,
    attend=sum(layer.pair_flops for layer in layers) / L,
    tables=table * (1 if config.tied else 2) + beside,
    head=table,
  )

"""Log-probabilities of answers by the training's forward pass.

Guarantees: in `OneOrderParallel` computed as in an engine with one_order, see
there; elsewhere equal up to rounding. Differentiable in the model, once.
Memory: logits of some tokens at a time, forward and backward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.models.transformer import Transformer
from ringjax.nn.one_order import OneOrderParallel
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.feedforward import blockwise_feedforward
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.train.batch import Batch
from ringjax.train.objective import hidden_states
from ringjax.train.token_logprobs import token_logprobs

# Tokens whose logits exist at the same time.
_BLOCK = 512


def policy_logprobs(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  *,
  temperature: int | float = 1.0,
) -> Float[Array, "B T"]:
  """Log-probabilities of a micro-batch's labels, float32 [B, T].

  0 for tokens whose label is -100 (`ops.loss.IGNORE_INDEX`).

  Args:
    model: Model with its parameters.
    batch: Micro-batch in the layout's order, whose fields are [B, T].
    attend: Sharding context of its tokens.
    temperature: Divisor of the logits.
  """
  if not isinstance(attend, OneOrderParallel):
    return token_logprobs(model, batch, attend, temperature=float(temperature))
  h = hidden_states(model, batch, attend)
  ignored = batch.labels == IGNORE_INDEX
  labels = jnp.where(ignored, 0, batch.labels)[..., None]
  # Ids below 2 ** 24 are exact in float32.
  x = jnp.concatenate([h.astype(jnp.float32), labels.astype(jnp.float32)], -1)

  def label_logprobs(x: Float[Array, "B n D1"]) -> Float[Array, "B n 1"]:
    # In two loops over tiles, as in the engine.
    logits = attend.head(model.logits, x[..., :-1].astype(h.dtype))
    logits = logits / jnp.float32(temperature)
    log_probs = attend.head(jax.nn.log_softmax, logits)
    return jnp.take_along_axis(log_probs, x[..., -1:].astype(jnp.int32), -1)

  block = max(1, _BLOCK // h.shape[0])
  logprobs = blockwise_feedforward(label_logprobs, x, block)[..., 0]
  return jnp.where(ignored, jnp.zeros_like(logprobs), logprobs)

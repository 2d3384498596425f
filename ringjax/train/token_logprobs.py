"""Log-probabilities of labels under a model, by blocks of tokens.

Guarantees: log p(label | tokens before it) of every token, and gradients, those
of the full logits of the plain model, whatever the layout and the mesh; 0, with
gradients of 0, for tokens whose label is -100 (`ops.loss.IGNORE_INDEX`).
Memory: the head works on a block of tokens at a time, forward and backward:
there is no [T, V] array, and no shard holds more of the sequence than its own
part.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import number, positive_int
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.feedforward import blockwise_feedforward
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.train.batch import Batch
from ringjax.train.objective import (
  head_losses,
  head_operands,
  hidden_states,
  on_shards,
)


class LabelStatistics(NamedTuple):
  """Statistics of the distributions that predict labels, float32 [B, T].

  Fields:
    logprobs: Log-probabilities of the labels.
    entropies: Entropies of the distributions over the vocabulary, nats.
  """

  logprobs: Float[Array, "B T"]
  entropies: Float[Array, "B T"]


@overload
def token_logprobs(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  *,
  temperature: float = 1.0,
  block: int = 1024,
  entropy: Literal[False] = False,
) -> Float[Array, "B T"]: ...


@overload
def token_logprobs(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  *,
  temperature: float = 1.0,
  block: int = 1024,
  entropy: Literal[True],
) -> LabelStatistics: ...


def token_logprobs(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  *,
  temperature: float = 1.0,
  block: int = 1024,
  entropy: bool = False,
) -> Float[Array, "B T"] | LabelStatistics:
  """Log-probabilities of a micro-batch's labels.

  Differentiable in the model, once, in reverse mode. The batch's weights are
  not used.

  Args:
    model: Model with its parameters.
    batch: Micro-batch in the layout's order, whose fields are [B, T].
    attend: Sharding context of its tokens.
    temperature: Number above 0 that divides the logits, as in sampling.
    block: Tokens per step of the head, on each shard.
    entropy: Whether to compute the entropies, too; costs the head's product
      once more.

  Returns:
    Log-probabilities, float32 [B, T], in the layout's order; NaN for a label
    that is outside of the vocabulary. With `entropy` a `LabelStatistics`.

  Raises:
    OptionError: If the temperature or the block is not above 0.
  """
  number("temperature", temperature, above=0)
  positive_int("block", block)
  unit = batch._replace(weights=jnp.ones(batch.labels.shape, jnp.float32))
  h = hidden_states(model, unit, attend)
  logprobs = -head_losses(
    model, unit, h, attend, block, 0.0, temperature=temperature
  )
  if not entropy:
    return logprobs
  return LabelStatistics(
    logprobs, _entropies(model, batch, h, attend, block, temperature)
  )


def _entropies(
  model: Transformer,
  batch: Batch,
  h: jax.Array,
  attend: ShardingContext,
  block: int,
  temperature: float,
) -> Float[Array, "B T"]:
  """Entropies of softmax(logits / temperature), nats; 0 without a label."""
  h, w, soft_cap = head_operands(model, h, temperature)

  def entropies(h: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    ignored = labels == IGNORE_INDEX
    exact = h.dtype == jnp.float32
    # A gradient of 0 times a hidden state that is not finite would be NaN.
    h = jnp.where(ignored[..., None], jnp.zeros_like(h), h)

    def token_entropy(h: jax.Array) -> jax.Array:
      logits = jnp.einsum(
        "btd,dv->btv",
        h,
        w,
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if exact else None,
      )
      if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
      logp = jax.nn.log_softmax(logits, -1)
      return -jnp.sum(jnp.exp(logp) * logp, -1, keepdims=True)

    values = blockwise_feedforward(token_entropy, h, block)[..., 0]
    return jnp.where(ignored, jnp.zeros_like(values), values)

  return on_shards(attend, entropies, h, w, batch.labels)

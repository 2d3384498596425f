"""QK-clip: queries and keys of heads whose attention logits grow too large.

Guarantees: after an update the maps of each head whose largest logit S in the
step's forward pass was above the threshold t are multiplied so that its logits
become t / S of what they are; others keep every bit. S is the maximum over all
tokens of the step, exactly, on every mesh.
A head whose key head no other reads has its queries and keys multiplied by
sqrt(t / S). Where query heads share a key head, or keys are values too, the
queries are multiplied by t / S and the keys stay, so that no other head
changes. In latent attention each head has maps of the dims without a rotation,
and both are multiplied by the root; the dims that the heads share stay in the
keys, and their queries are multiplied by t / S.
Cost: the first product of attention's forward pass a second time.
Memory: one number a head.
Ref: Kimi Team 2025, Kimi K2, arXiv 2507.20534, algorithm 1 (MuonClip).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from ringjax.errors import OptionError
from ringjax.kv.state import StateShape
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.block import Layer
from ringjax.nn.sums.layer_record import LayerSums
from ringjax.nn.tokens import Tokens

# Name in errors of a loss whose layer has attention of its own.
PREDICTING = "a loss of a layer that predicts further tokens"


class AttendingLayers(NamedTuple):
  """Layers with attention whose weights are stacked.

  Fields:
    run: Number of their run in the model's stack.
    position: Position in a repeat of the run.
    attention: Attention of each of them.
  """

  run: int
  position: int
  attention: Attention | Latent


def attending_layers(model: Transformer) -> tuple[AttendingLayers, ...]:
  """Groups of a model's layers that attend, in the stack's order."""
  return tuple(
    AttendingLayers(number, position, layer.attention)
    for number, run in enumerate(model.stack.runs)
    for position, layer in enumerate(run.layers)
    if isinstance(layer.attention, Attention | Latent)
  )


def check_qk_clip(threshold: float | None, model: Transformer) -> None:
  """Refuses a threshold for a model whose logits the maps cannot bound.

  Raises:
    OptionError: If a layer's logits are not products of linear maps alone.
  """
  if threshold is None:
    return
  reasons = [_why_not(layer) for layer in model.config.layers]
  reasons = [reason for reason in reasons if reason is not None]
  if not reasons and not attending_layers(model):
    reasons = ["layers without attention"]
  if reasons:
    raise OptionError(
      "qk_clip",
      f"{threshold:g} for a {model.config.family} with {reasons[0]}",
      "attention whose logits are products of queries and keys of linear maps",
      "leave it out",
    )


def check_clipped_training(
  threshold: float | None, others: Mapping[str, object]
) -> None:
  """Refuses a threshold with a training that it does not bound.

  Args:
    threshold: Largest attention logit that a head keeps, or None.
    others: Whether the training has each of these, by their names.

  Raises:
    OptionError: If it has one.
  """
  used = [name for name, value in others.items() if value]
  if threshold is not None and used:
    raise OptionError(
      "qk_clip",
      f"{threshold:g} with {used[0]}",
      "a training of all parameters of the model's own layers",
      "leave qk_clip out",
    )


def _why_not(layer: Layer) -> str | None:
  """The reason for which a layer's logits are not clipped, or None."""
  attention = layer.attention
  if layer.cross is not None:
    return "cross-attention"
  if type(attention) is Latent:
    if len(layer.mixers) > 1:
      return "layers of two attentions"
    return None if attention.index is None else "an index that chooses keys"
  if type(attention) is Attention:
    faults = {
      "norms of queries and keys, which undo a scale": attention.qk_norm,
      "a soft cap, which bounds the logits": attention.soft_cap,
      "clipped queries and keys": attention.clip,
      "layers that share keys": attention.group,
    }
    named = (name for name, value in faults.items() if value is not None)
    return next(named, None)
  states = [isinstance(x.cache_shape(1), StateShape) for x in layer.mixers]
  if states == [True]:
    return None
  return f"layers of {type(attention).__name__}"


class ScoreTotals(NamedTuple):
  """Largest logits over the tokens of a step, float32.

  Fields:
    heads: Largest logit of each query head, [L, N], for each group of layers as
      of `attending_layers`.
  """

  heads: tuple[Float[Array, "L N"], ...]

  @classmethod
  def of(cls, model: Transformer, tokens: Tokens) -> ScoreTotals:
    """Maxima that the layers of a model have recorded.

    Args:
      model: Model whose layers have run.
      tokens: Tokens that they have read.
    """
    heads = []
    for layer in attending_layers(model):
      sums = tokens.recorded[layer.run][layer.position]
      assert isinstance(sums, LayerSums)
      assert sums.scores is not None
      heads.append(sums.scores.heads)
    return cls(tuple(heads))

  def statistics(
    self, threshold: float, updates: Bool[Array, ""]
  ) -> ScoreStatistics:
    """Statistics of the logits of all heads.

    Args:
      threshold: Largest logit that a head keeps.
      updates: Whether the step updates parameters; if not, it clips no head.
    """
    heads = jnp.concatenate([x.ravel() for x in self.heads])
    clipped = jnp.sum((heads > threshold) & updates, dtype=jnp.int32)
    return ScoreStatistics(jnp.max(heads), clipped.astype(jnp.float32))


class ScoreStatistics(NamedTuple):
  """Statistics of a step's attention logits, float32 [].

  Fields:
    largest: Largest logit of all heads and tokens.
    clipped: Number of heads whose maps were multiplied.
  """

  largest: jax.Array | float
  clipped: jax.Array | float


def with_clipped_heads(
  params: Transformer, totals: ScoreTotals, threshold: float
) -> Transformer:
  """Multiply the maps of heads whose logits are above a threshold.

  Args:
    params: Model.
    totals: Largest logits of a step.
    threshold: Largest logit that a head keeps.
  """
  updated: dict[int, Any] = {}

  def multiply(variable: nnx.Variable | None, factor: jax.Array) -> None:
    if variable is not None:
      value = variable.get_value()
      updated[id(variable)] = value * factor.astype(value.dtype)

  for layer, heads in zip(attending_layers(params), totals.heads, strict=True):
    module: Any = params.stack.blocks[layer.run][layer.position].attention
    attention = layer.attention
    full_factor = jnp.where(heads > threshold, threshold / heads, 1.0)[
      ..., None
    ]
    if isinstance(attention, Latent):
      root = jnp.sqrt(full_factor)
      dims = lambda factor, size: jnp.repeat(factor, size, -1)
      query = [dims(root, attention.plain), dims(full_factor, attention.shared)]
      keys = [query[0], jnp.ones((*heads.shape, attention.value))]
      multiply(module.q.weight, jnp.concatenate(query, -1)[:, None])
      multiply(module.kv.weight, jnp.concatenate(keys, -1)[:, None])
      continue
    alone = attention.heads != attention.kv_heads or attention.one_map
    query_factor = full_factor if alone else jnp.sqrt(full_factor)
    maps = [module.q] if alone else [module.q, module.k]
    for linear in maps:
      multiply(linear.weight, query_factor[:, None])
      multiply(linear.bias, query_factor)
  is_variable = lambda x: isinstance(x, nnx.Variable)
  return jax.tree.map(
    lambda p: p.replace(updated[id(p)]) if id(p) in updated else p,
    params,
    is_leaf=is_variable,
  )

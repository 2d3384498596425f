"""Training of layers that choose the keys they read: loss and recall.

Guarantees: an index learns from the divergence of its scores from attention
alone, and nothing else does: gradients end at its input. Sums are of all real
tokens of a micro-batch, so losses and gradients do not depend on the mesh.
Recall is measured at 16 queries of each shard, so that of another number of
shards is of other queries.
Ref:  DeepSeek-AI 2025, DeepSeek-V3.2-Exp: first the index alone learns from
dense attention, then all learn, the index from the keys that it chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer
from ringjax.models.weights.linear_maps import INDEX_PATH
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  ChoosingAttention,
)
from ringjax.nn.attention_layers.choosing.index_block_attention import (
  IndexBlockAttention,
)
from ringjax.nn.attention_layers.choosing.indexed_attention import (
  IndexedAttention,
)
from ringjax.nn.attention_layers.choosing.pooled_block_attention import (
  PooledBlockAttention,
)
from ringjax.nn.attention_layers.compressed import CompressedAttention
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.attention_layers.pooled_latent import PooledLatent
from ringjax.nn.sums.choice_sums import ChoiceSums
from ringjax.nn.sums.layer_record import LayerSums
from ringjax.nn.tokens import Tokens


class ChoosingLayers(NamedTuple):
  """Layers that choose keys and whose weights are stacked.

  Fields:
    run: Number of their run in the model's stack.
    position: Position in a repeat of the run.
  """

  run: int
  position: int


def _has_index(attention: object) -> bool:
  """Whether a layer has an index, which learns from the index loss."""
  if isinstance(attention, CompressedAttention):
    compression = attention.compression
    return compression is not None and compression.index is not None
  kinds = IndexedAttention | IndexBlockAttention | PooledBlockAttention
  if isinstance(attention, PooledLatent | kinds):
    return True
  return isinstance(attention, Latent) and attention.index is not None


def choosing_layers(model: object) -> tuple[ChoosingLayers, ...]:
  """Groups of a model's layers that choose keys, in the stack's order."""
  if not isinstance(model, Transformer) or isinstance(model, DraftTransformer):
    return ()
  return tuple(
    ChoosingLayers(number, position)
    for number, run in enumerate(model.stack.runs)
    for position, layer in enumerate(run.layers)
    if _has_index(layer.attention)
    or isinstance(layer.attention, ChoosingAttention)
  )


def has_indexes(model: object) -> bool:
  """Whether layers of a model that is trained have an index of keys."""
  if not isinstance(model, Transformer) or isinstance(model, DraftTransformer):
    return False
  return any(_has_index(layer.attention) for layer in model.config.layers)


class ChoiceTotals(NamedTuple):
  """Sums over the tokens of a step, which micro-batches add up, float32.

  Fields:
    loss: Losses of the indexes of all layers that choose keys, [L].
    recall: Recalls at the sampled queries, [L].
    samples: Number of sampled queries, [L].
    tokens: Number of tokens without padding, [].
  """

  loss: Float[Array, " L"]
  recall: Float[Array, " L"]
  samples: Float[Array, " L"]
  tokens: Float[Array, ""]

  @classmethod
  def of(cls, model: Transformer, tokens: Tokens) -> ChoiceTotals:
    """Sums that the layers of a model have recorded.

    Args:
      model: Model whose layers have run.
      tokens: Tokens that they have read.
    """
    sums: list[ChoiceSums] = []
    for layer in choosing_layers(model):
      layer_sums = tokens.recorded[layer.run][layer.position]
      assert isinstance(layer_sums, LayerSums)
      assert layer_sums.choice is not None
      sums.append(layer_sums.choice)
    join = lambda name: jnp.concatenate([getattr(x, name) for x in sums])
    # All layers count the same tokens.
    count = sums[0].tokens[0]
    return cls(join("loss"), join("recall"), join("samples"), count)

  def index_loss(self) -> Float[Array, ""]:
    """Sum over layers of the mean loss of an index over the tokens."""
    return jnp.sum(self.loss) / jnp.maximum(self.tokens, 1.0)

  def statistics(self) -> ChoiceStatistics:
    """Statistics of all layers."""
    recall = self.recall / jnp.maximum(self.samples, 1.0)
    layers = jnp.float32(self.loss.shape[0])
    return ChoiceStatistics(
      self.index_loss() / layers, jnp.mean(recall), jnp.min(recall)
    )


class ChoiceStatistics(NamedTuple):
  """Statistics of the keys that layers choose in a step, float32 [].

  Fields:
    index_loss: Mean over layers and tokens of the loss of an index, nats; 0
      where none is trained.
    recall: Part of the attention over all visible keys that falls on chosen
      keys, mean over layers and sampled queries.
    recall_worst: The same of the layer where it is smallest.
  """

  index_loss: jax.Array | float
  recall: jax.Array | float
  recall_worst: jax.Array | float


def of_indexes(updates: PyTree) -> Any:
  """Updates of a model's indexes; those of other parameters become 0."""
  return _only(updates, indexes=True)


def without_indexes(updates: PyTree) -> Any:
  """Updates of other parameters; those of a model's indexes become 0."""
  return _only(updates, indexes=False)


def _only(updates: PyTree, *, indexes: bool) -> Any:
  """Updates of a model's indexes, or of its other parameters; else 0."""

  def keep(path: Any, x: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if (INDEX_PATH in name) == indexes:
      return x
    return jax.tree.map(jnp.zeros_like, x)

  return jax.tree_util.tree_map_with_path(
    keep, updates, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )

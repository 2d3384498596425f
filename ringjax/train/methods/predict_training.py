"""Training of the layer that predicts one token further, with its frozen model.

Guarantees: no other weight of the model gets a gradient or changes, so its
logits stay as they are.
Memory: gradients and moments of one layer.
"""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from ringjax.checks import integer
from ringjax.models.transformer import Transformer
from ringjax.nn.draft_layers.predict_layer import PredictBlock
from ringjax.train.methods.moved_positions import MovedPositions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictTraining(MovedPositions):
  """Trains the layer that predicts one token further, or a head, alone.

  It is used in place of `Lora`, with `Objective(predict_loss=...)`. Positions
  of a text's tokens are moved for the model and the layer alike; `anchors` is
  at least 1.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.longest:
      # The layer's mask knows the first token of a document by its position.
      integer("anchors", self.anchors, least=1)

  def start(self, model: Transformer, *, seed: int = 0) -> PredictBlock:
    """The initial parameters, copies of the layer's."""
    del seed
    block: PredictBlock = model.stack.blocks[-1][0]
    return jax.tree.map(jnp.copy, block)

  def model(self, params: PyTree, frozen: PyTree) -> Transformer:
    """The model with these parameters; others get no gradient."""
    return _with_block(jax.tree.map(jax.lax.stop_gradient, frozen), params)

  def merged(self, params: PyTree, frozen: PyTree) -> Transformer:
    """The model with these parameters, to be saved."""
    return _with_block(frozen, params)


def _with_block(model: Transformer, block: PredictBlock) -> Transformer:
  result = copy.copy(model)
  result.stack = copy.copy(model.stack)
  blocks = [*model.stack.blocks]
  # The arrays alone: a stage may have extended the context of the model.
  form = jax.tree.structure(blocks[-1][0])
  trained = jax.tree.unflatten(form, jax.tree.leaves(block))
  result.stack.blocks = nnx.List([*blocks[:-1], nnx.List([trained])])
  return result

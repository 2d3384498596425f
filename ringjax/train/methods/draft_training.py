"""Training of a draft block with its frozen target (LongSpec).

Guarantees: no weight of the target gets a gradient or changes. Positions and
lags of a row depend on its tokens and the seed alone, so a run that resumes
draws the same.
Memory: gradients and moments of the block.
Ref: Yang et al. 2025, arXiv 2502.17421: training with keys that lag, at moved
positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ringjax.checks import positive_int
from ringjax.data.batches.packing import PackedBatch
from ringjax.models.longspec import DraftTransformer
from ringjax.nn.attention_layers.draft_block import DraftBlock
from ringjax.train.batch import Batch
from ringjax.train.methods.moved_positions import MovedPositions, draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraining(MovedPositions):
  """Trains the block of a `DraftTransformer` alone.

  It is used in place of `Lora`.

  Attributes:
    longest: Largest number of positions, see `MovedPositions`; 0: they are not
      moved.
    anchors: Tokens of a document that keep their positions.
    lags: Largest lag of the target's keys behind the queries, in tokens; the
      smallest is 1.
  """

  longest: int = 32768
  lags: int = 3

  def __post_init__(self) -> None:
    super().__post_init__()
    positive_int("lags", self.lags)

  def start(self, model: DraftTransformer, *, seed: int = 0) -> DraftBlock:
    """The initial parameters, copies of the draft's."""
    del seed
    return jax.tree.map(jnp.copy, model.block)

  def model(self, params: PyTree, frozen: PyTree) -> DraftTransformer:
    """The draft with these parameters; its target gets no gradient."""
    draft = jax.tree.map(jax.lax.stop_gradient, frozen)
    draft.block = params
    return draft

  def merged(self, params: PyTree, frozen: PyTree) -> DraftTransformer:
    """The draft with these parameters, to be saved."""
    return DraftTransformer(frozen.target, frozen.draft_config, params)

  def rows(self, rows: PackedBatch | Batch, seed: int) -> Batch:
    """Packed rows with their positions and lags, as NumPy arrays.

    Args:
      rows: Rows [B, T] in token order.
      seed: Seed of the offsets and lags.
    """
    offsets, lags = [], []
    for draw in draws(rows, seed):
      offsets.append(self._offset(draw, rows.tokens.shape[1]))
      lags.append(int(draw.integers(1, self.lags + 1)))
    lag: Any = np.array(lags, np.int32)[:, None]
    # The draft's mask has an order of its own, that of the rows.
    return self._moved(rows, offsets)._replace(order=None, lag=lag)

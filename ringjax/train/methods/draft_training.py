"""Training of a draft block with its frozen target (LongSpec).

Guarantees: no weight of the target gets a gradient or changes. Positions and
lags of a row depend on its tokens and the seed alone, so a run that resumes
draws the same.
Memory: gradients and moments of the block.
Ref: Yang et al. 2025, arXiv 2502.17421: anchor-offset indices, and training
with keys that lag.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ringjax.checks import integer, positive_int
from ringjax.data.batches.packing import PackedBatch
from ringjax.errors import OptionError
from ringjax.models.longspec import DraftTransformer
from ringjax.nn.attention_layers.draft_block import DraftBlock
from ringjax.train.batch import BY_TOKEN, Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraining:
  """Trains the block of a `DraftTransformer` alone.

  It is used in place of `Lora`.

  Attributes:
    longest: Largest number of positions: in a row of N tokens, all but the
      first `anchors` of each document are moved by a random offset from 0 to
      `longest` - N. 0: positions are not moved.
    anchors: Tokens of a document that keep their positions.
    lags: Largest lag of the target's keys behind the queries, in tokens; the
      smallest is 1.
  """

  longest: int = 32768
  anchors: int = 4
  lags: int = 3

  def __post_init__(self) -> None:
    integer("longest", self.longest, least=0)
    integer("anchors", self.anchors, least=0)
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

  def check(self, length: int) -> None:
    """Refuses rows of more tokens than there are positions.

    Raises:
      OptionError: If rows are longer than `longest`.
    """
    if self.longest and self.longest < length:
      raise OptionError(
        "longest",
        f"{self.longest} for rows of {length} tokens",
        "0, or at least as many positions",
        "pass a larger one",
      )

  def rows(self, rows: PackedBatch | Batch, seed: int) -> Batch:
    """Packed rows with their positions and lags, as NumPy arrays.

    Args:
      rows: Rows [B, T] in token order.
      seed: Seed of the offsets and lags.
    """
    parts: list[Any] = [np.asarray(getattr(rows, name)) for name in BY_TOKEN]
    *fields, positions, segments = parts
    draws = [self._drawn(row, seed) for row in fields[0]]
    offset, lag = np.array(draws, np.int32).T[..., None]
    positions = np.where(
      positions < self.anchors, positions, positions + offset
    ).astype(np.int32)
    return Batch(*fields, positions=positions, segments=segments, lag=lag)

  def _drawn(self, row: np.ndarray, seed: int) -> tuple[int, int]:
    """Draws a row's position offset, and the lag of its keys."""
    code = zlib.crc32(np.ascontiguousarray(row).tobytes())
    draw = np.random.default_rng([seed, code])
    max_offset = self.longest - row.size if self.longest else 0
    return int(draw.integers(0, max_offset + 1)), int(
      draw.integers(1, self.lags + 1)
    )

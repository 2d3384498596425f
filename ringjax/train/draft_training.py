"""Training of a draft block beside its frozen target (LongSpec).

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
from ringjax.data.packing import PackedBatch
from ringjax.errors import OptionError
from ringjax.models.longspec import DraftTransformer
from ringjax.nn.draft_block import DraftBlock
from ringjax.train.batch import BY_TOKEN, Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraining:
  """Trains the block of a `DraftTransformer` alone.

  It takes the place of `Lora`.

  Attributes:
    longest: positions up to which texts are moved: of a row of N tokens all but
      the first `anchors` of each document are moved on by a random number from
      0 to `longest` - N. 0: positions as they are.
    anchors: tokens of a document that keep their positions.
    lags: the target's keys are 1 to so many tokens behind the queries.
  """

  longest: int = 32768
  anchors: int = 4
  lags: int = 3

  def __post_init__(self) -> None:
    integer("longest", self.longest, least=0)
    integer("anchors", self.anchors, least=0)
    positive_int("lags", self.lags)

  def start(self, model: DraftTransformer, *, seed: int = 0) -> DraftBlock:
    """The parameters to begin with, copies of the draft's."""
    del seed
    return jax.tree.map(jnp.copy, model.block)

  def model(self, params: PyTree, frozen: PyTree) -> DraftTransformer:
    """The draft with these parameters; its target gets no gradient."""
    made = jax.tree.map(jax.lax.stop_gradient, frozen)
    made.block = params
    return made

  def merged(self, params: PyTree, frozen: PyTree) -> DraftTransformer:
    """The draft with these parameters, to be saved."""
    return DraftTransformer(frozen.target, frozen.draft_config, params)

  def check(self, length: int) -> None:
    """Refuses rows of so many tokens that have no positions.

    Raises:
      OptionError: longer rows than `longest`.
    """
    if self.longest and self.longest < length:
      raise OptionError(
        "longest",
        f"{self.longest} for rows of {length} tokens",
        "0, or at least as many positions",
        "pass a larger one",
      )

  def rows(self, rows: PackedBatch | Batch, seed: int) -> Batch:
    """Packed rows with their positions and lags, arrays of NumPy.

    Args:
      rows: [B, T] in true order.
      seed: of what is drawn.
    """
    parts: list[Any] = [np.asarray(getattr(rows, name)) for name in BY_TOKEN]
    *rest, at, segments = parts
    draws = [self._drawn(row, seed) for row in rest[0]]
    offset, lag = np.array(draws, np.int32).T[..., None]
    at = np.where(at < self.anchors, at, at + offset).astype(np.int32)
    return Batch(*rest, positions=at, segments=segments, lag=lag)

  def _drawn(self, row: np.ndarray, seed: int) -> tuple[int, int]:
    """How far a row is moved on, and by how much its keys lag."""
    code = zlib.crc32(np.ascontiguousarray(row).tobytes())
    draw = np.random.default_rng([seed, code])
    most = self.longest - row.size if self.longest else 0
    return int(draw.integers(0, most + 1)), int(draw.integers(1, self.lags + 1))

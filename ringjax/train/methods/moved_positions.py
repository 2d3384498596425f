"""Rows of a text whose positions are those of a longer one (LongSpec).

Guarantees: offsets of a row depend on its tokens and the seed alone, so a run
that resumes draws the same.
Ref: Yang et al. 2025, arXiv 2502.17421: anchor-offset indices.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

from ringjax.checks import integer
from ringjax.data.batches.packing import PackedBatch
from ringjax.errors import OptionError
from ringjax.train.batch import BY_TOKEN, Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovedPositions:
  """Base of trainings of what drafts, whose rows are moved to far positions.

  Attributes:
    longest: Largest number of positions: in a row of N tokens, all but the
      first `anchors` of each document are moved by a random offset from 0 to
      `longest` - N. 0: positions are not moved.
    anchors: Tokens of a document that keep their positions.
  """

  longest: int = 0
  anchors: int = 4

  def __post_init__(self) -> None:
    integer("longest", self.longest, least=0)
    integer("anchors", self.anchors, least=0)

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

  def rows(self, rows: PackedBatch | Batch, seed: int) -> Batch | PackedBatch:
    """Packed rows with their positions, as NumPy arrays.

    Args:
      rows: Rows [B, T], also with their documents placed on shards.
      seed: Seed of the offsets.
    """
    if not self.longest:
      return rows
    length = rows.tokens.shape[1]
    offsets = [self._offset(draw, length) for draw in draws(rows, seed)]
    return self._moved(rows, offsets)

  def _offset(self, draw: np.random.Generator, length: int) -> int:
    largest = self.longest - length if self.longest else 0
    return int(draw.integers(0, largest + 1))

  def _moved(self, rows: PackedBatch | Batch, offsets: list[int]) -> Batch:
    """Rows with positions that are moved by an offset each."""
    parts: list[Any] = [np.asarray(getattr(rows, name)) for name in BY_TOKEN]
    *fields, order, segments = parts
    by_row = np.array(offsets, np.int32)[:, None]
    positions = np.where(order < self.anchors, order, order + by_row)
    return Batch(
      *fields,
      positions=positions.astype(np.int32),
      segments=segments,
      order=order,
    )


def draws(rows: PackedBatch | Batch, seed: int) -> list[np.random.Generator]:
  """Generators of what is drawn for each row, by its tokens in true order.

  Args:
    rows: Rows [B, T], also with their documents placed on shards.
    seed: Seed of all rows.
  """
  parts: list[Any] = [
    np.asarray(getattr(rows, name)) for name in ("positions", "segments")
  ]
  positions, segments = parts
  last = np.where(segments > 0, segments, segments.max() + 1)
  order = np.lexsort((positions, last))
  tokens = np.take_along_axis(np.asarray(rows.tokens), order, 1)
  codes = [zlib.crc32(row.tobytes()) for row in tokens]
  return [np.random.default_rng([seed, code]) for code in codes]

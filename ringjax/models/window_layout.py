"""Which blocks of weights a rank streams, in which order, and which stay.

  attention 0, feedforward 0, attention 1, ..., and on rank 0 the head

A block is read as a whole, before it is computed. `window` of them are in
memory at once, beside those that stay: of each `retain` feedforwards the first.
If all others fit the window, all stay. What stays is read once, all else in
each pass.
Of the embedding rank 0 reads the rows of the tokens at hand: it is no block.

`launch.generate --window` runs a layout and `launch.plan window` simulates it.
Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ringjax.checks import positive_int
from ringjax.models.tensor_shares import (
  ATTENTION,
  FEEDFORWARD,
  ModelShares,
  ModulePart,
)

HEAD = "head"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBlock:
  """Some of a rank's weights that are read and computed at once.

  Attributes:
    name: "attention 0", "feedforward 0", ... or "head".
    parts: the modules: "term", "pre" and "post" around it, or "head".
  """

  name: str
  parts: dict[str, ModulePart]

  @property
  def nbytes(self) -> int:
    """As they are stored; 0 where the rank has no part."""
    return sum(part.nbytes for part in self.parts.values())


def rank_blocks(model: ModelShares, rank: int) -> tuple[RankBlock, ...]:
  """The blocks of a rank, in their order.

  Rank 0 has the norms around each sum and the head too.
  """
  blocks = []
  for n, parts in enumerate(model.layers(rank)):
    norms = model.norms(n) if rank == 0 else {}
    for name in (ATTENTION, FEEDFORWARD):
      modules = {"term": parts[name]}
      for side in ("pre", "post"):
        if f"{side}_{name}" in norms:
          modules[side] = norms[f"{side}_{name}"]
      blocks.append(RankBlock(name=f"{name} {n}", parts=modules))
  if rank == 0:
    blocks.append(RankBlock(name=HEAD, parts={HEAD: model.head()}))
  return tuple(blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowLayout:
  """The blocks of a rank by their bytes, and which of them stay.

  Attributes:
    nbytes: of each block; one of 0 bytes is never read.
    window: blocks in memory at once, beside those that stay; None: all.
    beside: blocks that stay beside the window.
  """

  nbytes: tuple[int, ...]
  window: int | None = None
  beside: frozenset[int] = frozenset()

  def __post_init__(self) -> None:
    if self.window is not None:
      positive_int("window", self.window)

  @classmethod
  def of(
    cls,
    blocks: Sequence[RankBlock],
    window: int | None = None,
    retain: int | None = None,
  ) -> WindowLayout:
    """Of a rank's blocks.

    Args:
      blocks: of `rank_blocks`.
      window: as above.
      retain: of so many feedforwards the first stays beside the window.
    """
    stays: Any = ()
    if retain is not None:
      feedforwards = [
        k for k, one in enumerate(blocks) if one.name.startswith(FEEDFORWARD)
      ]
      stays = feedforwards[:: positive_int("retain", retain)]
    return cls(
      nbytes=tuple(one.nbytes for one in blocks),
      window=window,
      beside=frozenset(stays),
    )

  @property
  def order(self) -> tuple[int, ...]:
    """The blocks that are read, in their order."""
    return tuple(k for k, n in enumerate(self.nbytes) if n)

  @property
  def kept(self) -> frozenset[int]:
    """The blocks that stay once they are read."""
    passing = [k for k in self.order if k not in self.beside]
    if self.window is None or len(passing) <= self.window:
      return frozenset(self.order)
    return frozenset(self.order) & self.beside

  @property
  def pass_bytes(self) -> int:
    """Bytes that each pass reads, the first one aside."""
    kept = self.kept
    return sum(n for k, n in enumerate(self.nbytes) if k not in kept)

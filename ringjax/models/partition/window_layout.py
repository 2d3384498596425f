"""Blocks of weights that a rank streams: their order, and which ones stay.

  attention 0, feedforward 0, attention 1, ..., and on rank 0 the head

A block is read as a whole, before it is computed. `window` of them are in
memory at once, next to those that stay: the first of each `retain`
  feedforwards.
If all others fit the window, all stay. Blocks that stay are read once, all
others in each pass.
The embedding is not a block: rank 0 reads the rows of the current tokens.

`launch.generate --window` runs a layout and `launch.plan window` simulates it.
Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringjax.checks import positive_int
from ringjax.models.partition.tensor_shares import (
  ATTENTION,
  FEEDFORWARD,
  ModelShares,
  ModulePart,
)

HEAD = "head"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBlock:
  """Weights of a rank that are read and computed at once.

  Attributes:
    name: "attention 0", "feedforward 0", ... or "head".
    parts: Modules: "term", "pre" and "post" around it, or "head".
  """

  name: str
  parts: dict[str, ModulePart]

  @property
  def nbytes(self) -> int:
    """Bytes as stored; 0 if the rank has no part."""
    return sum(part.nbytes for part in self.parts.values())


def rank_blocks(model: ModelShares, rank: int) -> tuple[RankBlock, ...]:
  """The blocks of a rank, in their order.

  Rank 0 also has the norms around each sum and the head.
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
  """Bytes of a rank's blocks, and which blocks stay.

  Attributes:
    nbytes: Bytes of each block; one of 0 bytes is never read.
    window: Blocks in memory at once, next to those that stay; None: all.
    beside: Indices of blocks that stay next to the window.
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
    """Makes the layout of a rank's blocks.

    Args:
      blocks: Blocks by `rank_blocks`.
      window: Blocks in memory at once, next to those that stay; None: all.
      retain: Number of feedforwards of which the first stays; None: none stays.
    """
    resident = ()
    if retain is not None:
      feedforwards = [
        k
        for k, block in enumerate(blocks)
        if block.name.startswith(FEEDFORWARD)
      ]
      resident = feedforwards[:: positive_int("retain", retain)]
    return cls(
      nbytes=tuple(block.nbytes for block in blocks),
      window=window,
      beside=frozenset(resident),
    )

  @property
  def order(self) -> tuple[int, ...]:
    """The blocks that are read, in their order."""
    return tuple(k for k, n in enumerate(self.nbytes) if n)

  @property
  def kept_blocks(self) -> frozenset[int]:
    """The blocks that stay once they are read."""
    passing = [k for k in self.order if k not in self.beside]
    if self.window is None or len(passing) <= self.window:
      return frozenset(self.order)
    return frozenset(self.order) & self.beside

  @property
  def pass_bytes(self) -> int:
    """Bytes that each pass reads, after the first one."""
    resident = self.kept_blocks
    return sum(n for k, n in enumerate(self.nbytes) if k not in resident)

"""Keys that the caller has chosen: blocks of positions, or tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ringjax import tree
from ringjax.checks import as_array, positive_int
from ringjax.errors import DtypeError, OptionError, ShapeError
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  Dimensions,
  ShardTokens,
  check_shape,
)
from ringjax.ops.mask import Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenBlocks(BlockSelection):
  """Blocks of positions by number; a block that occurs twice counts once.

  Another layer's choice may be passed on: `sparse_attention` returns it as a
  `GivenBlocks` if asked.

  Attributes:
    blocks: Numbers of the blocks that each query reads, int32 [B, T, M, n], -1
      for none; M is 1, the number of kv heads or that of query heads. Under a
      trace, where numbers are not known, those out of range count as -1.
    block: Number of positions of a block; 1 for tokens.
  """

  blocks: Int[Array, "B T _ n"]
  block: int = 1

  dimensions: ClassVar[Dimensions] = {"blocks": ("B", "T", "N?")}

  @property
  def by_position(self) -> bool:
    return False

  @property
  def block_size(self) -> int:
    return self.block

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    del heads, kv_heads
    return self.blocks.shape[2]

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    del mask
    positive_int("block", self.block)
    blocks = as_array("blocks", self.blocks)
    if blocks.dtype != jnp.int32:
      raise DtypeError(
        "blocks", blocks.dtype, "int32", "pass blocks.astype(jnp.int32)"
      )
    expected = (*q[:2], None, None)
    check_shape("blocks", blocks, expected, "numbers of blocks per query")
    heads, n = blocks.shape[2:]
    if heads not in (1, k[2], q[2]) or n == 0:
      raise ShapeError(
        "blocks",
        f"shape {blocks.shape} for {q[2]} query heads and {k[2]} kv heads",
        f"[{q[0]}, {q[1]}, M, n] with M of 1, {k[2]} or {q[2]} and n above 0",
        "pass -1 for queries that read fewer blocks",
      )
    last_block = -(-k[1] // self.block) - 1
    if not isinstance(blocks, jax.core.Tracer):
      numbers = np.asarray(blocks)
      low, high = int(numbers.min()), int(numbers.max())
      if low < -1 or high > last_block:
        raise OptionError(
          "blocks",
          f"numbers from {low} to {high}",
          f"numbers from -1 (none) to {last_block}, as there are {k[1]} keys",
          f"count blocks of {self.block} positions from 0",
        )

  def choose(self, tokens: ShardTokens) -> Int[Array, "B T _ n"]:
    del tokens
    blocks = jnp.sort(jnp.asarray(self.blocks), -1)
    repeated = blocks[..., 1:] == blocks[..., :-1]
    first = jnp.pad(~repeated, [(0, 0)] * 3 + [(1, 0)], constant_values=True)
    return jnp.where(first, blocks, -1)


tree.register(GivenBlocks, ("blocks",), ("block",))

"""Rows sorted by expert in blocks of one expert each.

Guarantees: each row is in one block, whatever the load. `into_blocks` and
`out_of_blocks` are each other's transposes: both passes are gathers, as a
scatter of rows takes several times as long on a TPU.
Ref:  the block-sparse grouping of Gale et al. 2022, arXiv 2211.15841.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_rows(rows: int, experts: int) -> int:
  """Number of rows of a block: about an expert's share, from 8 to 256."""
  share = max(1, rows // experts)
  return min(256, max(8, 1 << (share - 1).bit_length()))


class RowBlocks(NamedTuple):
  """Rows sorted by expert, each expert's rows from a new block on.

  Attributes:
    expert: Expert of each block, int32 [n]; the number of experts where the
      block has no rows.
    row: Row in each place of a block, int32 [n, size]; the number of rows
      for padding.
    slot: Place of each row among those of all blocks, int32 [N]; their number
      for a row that is of no expert.
    used: Number of blocks that have rows, int32 []; they are the first ones.
  """

  expert: Int[Array, " n"]
  row: Int[Array, "n size"]
  slot: Int[Array, " N"]
  used: Int[Array, ""]

  @property
  def places(self) -> int:
    """Number of places of all blocks."""
    return self.row.shape[0] * self.row.shape[1]


def blocks_by_expert(
  experts: Int[Array, " N"], count: int, size: int
) -> RowBlocks:
  """Sort rows by expert into blocks of `size`; `count` stands for no expert."""
  rows = experts.shape[0]
  blocks = -(-rows // size) + min(count, rows)
  order = jnp.argsort(experts, stable=True)
  sorted_experts = experts[order]
  load = jnp.zeros((count,), jnp.int32).at[experts].add(1, mode="drop")
  filled = (load + size - 1) // size * size
  ends = jnp.cumsum(filled)
  first = ends - filled
  rank = (
    jnp.arange(rows, dtype=jnp.int32)
    - (jnp.cumsum(load) - load)[sorted_experts]
  )
  slot = jnp.where(
    sorted_experts < count, first[sorted_experts] + rank, blocks * size
  ).astype(jnp.int32)
  row_of = (
    jnp.full((blocks * size,), rows, jnp.int32)
    .at[slot]
    .set(order.astype(jnp.int32), mode="drop")
  )
  slot_of = jnp.zeros((rows,), jnp.int32).at[order].set(slot)
  # Number of experts whose blocks have ended where a block begins.
  finished = (
    jnp.zeros((blocks,), jnp.int32).at[ends // size].add(1, mode="drop")
  )
  return RowBlocks(
    jnp.cumsum(finished),
    row_of.reshape(blocks, size),
    slot_of,
    ends[-1] // size,
  )


@jax.custom_vjp
def into_blocks(
  x: Float[Array, "T D"], blocks: RowBlocks
) -> Float[Array, "P D"]:
  """Tokens of all blocks' places, zeros for padding.

  Args:
    x: Tokens, each of which has as many rows as the next one, in their order.
    blocks: Blocks of the rows.
  """
  chosen = blocks.slot.shape[0] // x.shape[0]
  token = blocks.row.reshape(-1) // chosen
  return x.at[token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def out_of_blocks(
  y: Float[Array, "P D"], blocks: RowBlocks
) -> Float[Array, "N D"]:
  """Rows in their own order, zeros for rows of no expert."""
  return y.at[blocks.slot].get(mode="fill", fill_value=0)


def _into_backward(kept: Any, g: Array) -> tuple[Array, None]:
  blocks, tokens = kept
  rows = out_of_blocks(g, blocks).reshape(tokens.shape[0], -1, g.shape[1])
  return jnp.sum(rows, 1, dtype=jnp.float32).astype(g.dtype), None


def _out_backward(blocks: RowBlocks, g: Array) -> tuple[Array, None]:
  return g.at[blocks.row.reshape(-1)].get(mode="fill", fill_value=0), None


into_blocks.defvjp(
  lambda x, blocks: (into_blocks(x, blocks), (blocks, x[:, :0])),
  _into_backward,
)
out_of_blocks.defvjp(
  lambda y, blocks: (out_of_blocks(y, blocks), blocks), _out_backward
)

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
from jax import lax
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
  number = jnp.arange(rows, dtype=jnp.int32)
  # Sorting again inverts an order, and a window of a sorted array is a slice:
  # on a TPU gathers and scatters of single numbers take ten times as long.
  sorted_experts, order = lax.sort((experts, number), num_keys=2)
  last = jnp.searchsorted(
    sorted_experts, jnp.arange(count, dtype=experts.dtype), side="right"
  ).astype(jnp.int32)
  start = jnp.concatenate([jnp.zeros((1,), jnp.int32), last[:-1]])
  load = last - start
  filled = (load + size - 1) // size * size
  ends = jnp.cumsum(filled)
  first = ends - filled
  # Padding before an expert's rows, which begins with its first one.
  padding = jnp.diff(first - start, prepend=jnp.int32(0))
  padding = jnp.zeros((rows,), jnp.int32).at[start].add(padding, mode="drop")
  place = jnp.where(
    sorted_experts < count, number + jnp.cumsum(padding), blocks * size
  )
  slot = lax.sort((order, place), num_keys=1)[1]
  # Number of experts whose blocks have ended where a block begins.
  finished = (
    jnp.zeros((blocks,), jnp.int32).at[ends // size].add(1, mode="drop")
  )
  expert = jnp.cumsum(finished)
  at = jnp.minimum(expert, count - 1)
  begin = jnp.arange(blocks, dtype=jnp.int32) * size + (start - first)[at]
  end = jnp.where(expert < count, last[at], 0)
  windows = jax.vmap(lambda n: lax.dynamic_slice(order_and_none, (n,), (size,)))
  order_and_none = jnp.pad(order, (0, size), constant_values=rows)
  place_of_row = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  row = jnp.where(
    place_of_row < end[:, None], windows(jnp.clip(begin, 0, rows)), rows
  )
  return RowBlocks(expert, row, slot, ends[-1] // size)


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

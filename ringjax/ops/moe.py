"""Mixture of experts without dropped tokens: rows sorted by expert.

Guarantees: `mix(f, x, experts, weights)` equals, for each token, the sum over
its experts of weight * f(expert, token); no token is dropped whatever the load.
Cost: f on k rows a token, and less than one block of padding for each expert.
Memory: k copies of the tokens and of the results; f's intermediates for one
block of rows.
Ref:  the block-sparse grouping of Gale et al. 2022, arXiv 2211.15841.

Rows are sorted by expert and each expert's rows begin a new block, so a block
has one expert, and a loop over blocks uses one expert's weights at a time.

`jax.lax.ragged_dot` computes the same. On CPUs it multiplies all rows by all
experts: with 32 experts of 4 for each token it took 2.6 to 25 times as long
(benchmarks/model/expert_products.py). For a TPU the compiler estimates a fifth
of the cycles for the forward pass of 8,192 tokens, at 1.7 times the temporary
memory, as it needs all rows and all experts of a layer at once, as floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax.parallel import collectives


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


def mix(
  f: Callable[[Array, Array], Array],
  x: Float[Array, "T D"],
  experts: Int[Array, "T k"],
  weights: Float[Array, "T k"],
  count: int,
  *,
  scale_input: bool = False,
) -> Float[Array, "T D"]:
  """Sum the weighted outputs of each token's experts.

  Args:
    f: Function (expert int32 [], rows [n, D]) -> [n, D], row by row.
    x: Tokens, [T, D].
    experts: Experts of each token, int32 [T, k].
    weights: Weights of the experts, float32 [T, k].
    count: Number of experts, E.
    scale_input: Whether the weights multiply the inputs of f, not its outputs.

  Returns:
    Outputs [T, D] in x's dtype; sums are float32.
  """
  tokens, chosen = experts.shape
  rows = tokens * chosen
  size = block_rows(rows, count)
  rows_of = blocks_by_expert(experts.reshape(-1), count, size)
  flat_weights = weights.reshape(-1)

  def body(carry: None, block: tuple) -> tuple[None, jax.Array]:
    expert, row_index = block

    def run(_: None) -> jax.Array:
      # Padding repeats the block's first row, which is never padding: f sees
      # rows of its expert alone, and may record their magnitude.
      safe = jnp.where(row_index < rows, row_index, row_index[0])
      part = x[safe // chosen]
      if scale_input:
        part = part * flat_weights[safe][:, None].astype(x.dtype)
      return f(expert, part)

    def skip(_: None) -> jax.Array:
      return collectives.zeros((size, x.shape[1]), x.dtype, x)

    return None, lax.cond(expert < count, run, skip, None)

  # Checkpoint the whole step: residuals of a branch of `cond` are outputs of
  # it, all experts' weights included, and would be kept for each block.
  step = jax.checkpoint(body, prevent_cse=False)
  _, outputs = lax.scan(step, None, (rows_of.expert, rows_of.row))
  outputs = outputs.reshape(rows_of.row.size, -1)[rows_of.slot]
  outputs = outputs.reshape(tokens, chosen, -1).astype(jnp.float32)
  if not scale_input:
    outputs = outputs * weights[..., None].astype(jnp.float32)
  return jnp.sum(outputs, 1).astype(x.dtype)

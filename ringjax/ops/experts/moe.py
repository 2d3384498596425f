"""Mixture of experts without dropped tokens: rows sorted by expert.

Guarantees: `mix(f, x, experts, weights)` equals, for each token, the sum over
its experts of weight * f(expert, token); no token is dropped whatever the load.
Cost: f on k rows a token, and less than one block of padding for each expert.
Memory: k copies of the tokens and of the results; f's intermediates for one
block of rows, or for all rows if a kernel computes all blocks at once.
Ref:  the block-sparse grouping of Gale et al. 2022, arXiv 2211.15841.

Rows are sorted by expert and each expert's rows begin a new block, so a block
has one expert, and a loop over blocks uses one expert's weights at a time. On
a TPU a kernel multiplies all blocks where it serves, see `grouped_product`.

`jax.lax.ragged_dot` computes the same. On CPUs it multiplies all rows by all
experts: with 32 experts of 4 for each token it took 2.6 to 25 times as long
(benchmarks/model/expert_products.py). On a TPU it needs all experts of a layer
as floats; docs/how/experts.md compares its cycles.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax.ops.experts.grouped_product import GroupedExperts
from ringjax.ops.experts.row_blocks import block_rows, blocks_by_expert
from ringjax.parallel import collectives


def mix(
  f: Callable[[Array, Array], Array],
  x: Float[Array, "T D"],
  experts: Int[Array, "T k"],
  weights: Float[Array, "T k"],
  count: int,
  *,
  scale_input: bool = False,
  grouped: GroupedExperts | None = None,
) -> Float[Array, "T D"]:
  """Sum the weighted outputs of each token's experts.

  Args:
    f: Function (expert int32 [], rows [n, D]) -> [n, D], row by row.
    x: Tokens, [T, D].
    experts: Experts of each token, int32 [T, k]; E for none.
    weights: Weights of the experts, float32 [T, k].
    count: Number of experts, E.
    scale_input: Whether the weights multiply the inputs of f, not its outputs.
    grouped: The same experts for the rows of all blocks at once, by a kernel,
      which then runs instead of f.

  Returns:
    Outputs [T, D] in x's dtype; sums are float32.
  """
  tokens, chosen = experts.shape
  rows = tokens * chosen
  size = (grouped.block_rows if grouped else block_rows)(rows, count)
  rows_of = blocks_by_expert(experts.reshape(-1), count, size)
  if grouped is not None:
    y = grouped.weighted(x, weights, rows_of, scale_input=scale_input)
    return y.astype(x.dtype)
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
  outputs = outputs.reshape(rows_of.row.size, -1)
  outputs = outputs.at[rows_of.slot].get(mode="fill", fill_value=0)
  outputs = outputs.reshape(tokens, chosen, -1).astype(jnp.float32)
  if not scale_input:
    outputs = outputs * weights[..., None].astype(jnp.float32)
  return jnp.sum(outputs, 1).astype(x.dtype)

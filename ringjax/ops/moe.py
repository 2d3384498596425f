"""Mixture of experts without dropped tokens: rows sorted by expert.

Guarantees: `mix(f, x, experts, weights)` equals, for each token, the sum over
its experts of weight * f(expert, token); no token is dropped whatever the load.
Cost: f on k rows a token, and less than one block of padding for each expert.
Memory: k copies of the tokens and of the results; f's intermediates for one
block of rows.
Ref:  the block-sparse grouping of Gale et al. 2022, arXiv 2211.15841.

Rows are sorted by expert and each expert's rows begin a new block, so a block
has one expert, and a loop over blocks uses one expert's weights at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax.parallel import collectives


def block_rows(rows: int, experts: int) -> int:
  """Number of rows of a block: about an expert's share, from 8 to 256."""
  share = max(1, rows // experts)
  return min(256, max(8, 1 << (share - 1).bit_length()))


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
  blocks = -(-rows // size) + min(count, rows)
  flat = experts.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  sorted_experts = flat[order]
  load = jnp.zeros((count,), jnp.int32).at[flat].add(1)
  filled = (load + size - 1) // size * size
  ends = jnp.cumsum(filled)
  first = ends - filled
  rank = (
    jnp.arange(rows, dtype=jnp.int32)
    - (jnp.cumsum(load) - load)[sorted_experts]
  )
  slot = first[sorted_experts] + rank
  # The row in each slot; `rows` for padding.
  row_of = (
    jnp.full((blocks * size,), rows, jnp.int32)
    .at[slot]
    .set(order.astype(jnp.int32))
  )
  slot_of = jnp.zeros((rows,), jnp.int32).at[order].set(slot.astype(jnp.int32))
  # Number of experts whose blocks have ended where a block begins.
  finished = (
    jnp.zeros((blocks,), jnp.int32).at[ends // size].add(1, mode="drop")
  )
  expert_of = jnp.cumsum(finished)
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
  _, outputs = lax.scan(step, None, (expert_of, row_of.reshape(blocks, size)))
  outputs = outputs.reshape(blocks * size, -1)[slot_of]
  outputs = outputs.reshape(tokens, chosen, -1).astype(jnp.float32)
  if not scale_input:
    outputs = outputs * weights[..., None].astype(jnp.float32)
  return jnp.sum(outputs, 1).astype(x.dtype)

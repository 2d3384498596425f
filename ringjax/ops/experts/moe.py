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

from ringjax.ops.attention.blockwise import loop
from ringjax.ops.experts.grouped_product import GroupedExperts
from ringjax.ops.experts.row_blocks import block_rows, blocks_by_expert
from ringjax.ops.flat_product_tpu import LiveTiles
from ringjax.parallel import collectives
from ringjax.typing import Index

# Rows of blocks that are gathered at once, about.
_GATHERED = 1024


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


def mix_in_tiles(
  f: Callable[[Array, Array], Array],
  x: Float[Array, "tiles size D"],
  experts: Int[Array, "tiles size k"],
  weights: Float[Array, "tiles size k"],
  count: int,
  live: LiveTiles,
  *,
  scale_input: bool = False,
  grouped: GroupedExperts | None = None,
  wide: bool = False,
) -> Float[Array, "tiles size D"]:
  """`mix` of the tokens of tiles, of which those that hold none cost nothing.

  An expert's weights are read once for the tokens of all tiles. A token's bits
  depend on that token alone.

  Args:
    f: Function (expert int32 [], rows [n, D]) -> [n, D], row by row.
    x: Tokens.
    experts: Experts of each token, int32; E for none, as for places without a
      token.
    weights: Weights of the experts, float32.
    count: Number of experts, E.
    live: Tiles that hold tokens.
    scale_input: Whether the weights multiply the inputs of f, not its outputs.
    grouped: The same experts by a kernel, which then runs instead of f.
    wide: Whether outputs are float32; else they are of x's dtype.

  Returns:
    Outputs, undefined for tiles without tokens.
  """
  tiles, size, chosen = experts.shape
  rows, tokens = experts.size, x.reshape(tiles * size, -1)
  flat_weights = weights.reshape(-1)
  block = (grouped.block_rows if grouped else block_rows)(rows, count)
  blocks = blocks_by_expert(experts.reshape(-1), count, block)
  total = blocks.expert.shape[0]

  def inputs_of(row: Int[Array, " n"]) -> Float[Array, "n D"]:
    """Inputs of f in places of blocks; of padding zeros."""
    part = tokens.at[row // chosen].get(mode="fill", fill_value=0)
    if scale_input:
      factor = flat_weights.at[row].get(mode="fill", fill_value=0)
      part = part * factor[:, None].astype(x.dtype)
    return part

  def by_block(n: Index, y: Array) -> Array:
    outputs = f(blocks.expert[n], inputs_of(blocks.row[n]))
    return lax.dynamic_update_slice_in_dim(y, outputs, n * block, 0)

  # Several blocks are gathered at once; the last ones begin early rather than
  # end late: rows that are gathered twice have the same numbers.
  step = min(total, max(1, _GATHERED // block))

  def gather(n: Index, y: Array) -> Array:
    first = jnp.minimum(n * step, total - step)
    row = lax.dynamic_slice_in_dim(blocks.row, first, step, 0)
    return lax.dynamic_update_slice_in_dim(
      y, inputs_of(row.reshape(-1)), first * block, 0
    )

  empty = lax.empty((total * block, tokens.shape[1]), x.dtype)
  with jax.named_scope("expert_blocks"):
    if grouped is None:
      y = loop(blocks.used, by_block, empty)
    else:
      y = loop(-(-blocks.used // step), gather, empty)
      y = grouped.f(grouped.kernel, grouped.weights, y, blocks)
  slots, order = blocks.slot.reshape(tiles, size * chosen), live.order

  def add_up(n: Index, sums: Array) -> Array:
    tile = jnp.asarray(order)[n]
    outputs = y.at[slots[tile]].get(mode="fill", fill_value=0)
    outputs = outputs.reshape(size, chosen, -1).astype(jnp.float32)
    if not scale_input:
      outputs = outputs * weights[tile][..., None].astype(jnp.float32)
    of_tile = jnp.sum(outputs, 1).astype(sums.dtype)
    return lax.dynamic_update_index_in_dim(sums, of_tile, tile, 0)

  with jax.named_scope("row_tiles"):
    empty = lax.empty(x.shape, jnp.float32 if wide else x.dtype)
    return loop(jnp.asarray(live.count), add_up, empty)

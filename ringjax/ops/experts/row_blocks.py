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
from jaxtyping import Array, Float, Int, Shaped


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
    begin: Number of rows in the blocks before each one, int32 [n].
  """

  expert: Int[Array, " n"]
  row: Int[Array, "n size"]
  slot: Int[Array, " N"]
  used: Int[Array, ""]
  begin: Int[Array, " n"]


def blocks_by_expert(
  experts: Int[Array, " N"], count: int, size: int
) -> RowBlocks:
  """Sort rows by expert into blocks of `size`; `count` stands for no expert."""
  rows = experts.shape[0]
  blocks = -(-rows // size) + min(count, rows)
  number = jnp.arange(rows, dtype=jnp.int32)
  # A window of a sorted array is a slice: on a TPU gathers of single numbers
  # take ten times as long.
  sorted_experts, order = lax.sort(
    (experts, number), num_keys=1, is_stable=True
  )
  is_expert = experts[:, None] == jnp.arange(count, dtype=experts.dtype)[None]
  load = jnp.sum(is_expert, 0, dtype=jnp.int32)
  last = jnp.cumsum(load)
  start = last - load
  filled = (load + size - 1) // size * size
  ends = jnp.cumsum(filled)
  first = ends - filled
  # Padding before an expert's rows, which begins with its first one.
  padding = jnp.diff(first - start, prepend=jnp.int32(0))
  padding = jnp.zeros((rows,), jnp.int32).at[start].add(padding, mode="drop")
  place = jnp.where(
    sorted_experts < count, number + jnp.cumsum(padding), blocks * size
  )
  slot = unsorted(order, place)
  # Number of experts whose blocks have ended where a block begins.
  finished = (
    jnp.zeros((blocks,), jnp.int32).at[ends // size].add(1, mode="drop")
  )
  expert = jnp.cumsum(finished)
  at = jnp.minimum(expert, count - 1)
  begin = jnp.arange(blocks, dtype=jnp.int32) * size + (start - first)[at]
  end = jnp.where(expert < count, last[at], 0)
  begin = jnp.clip(begin, 0, rows)
  place_of_row = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  row = windows(order, begin, size)
  row = jnp.where(place_of_row < end[:, None], row, rows)
  return RowBlocks(expert, row, slot, ends[-1] // size, begin)


def unsorted(
  order: Int[Array, "*M N"], numbers: Shaped[Array, "*M N"]
) -> Shaped[Array, "*M N"]:
  """Numbers in the order before a sort: the n-th goes to place order[n]."""

  def scattered(order: jax.Array, numbers: jax.Array) -> jax.Array:
    put = lambda order, numbers: jnp.zeros_like(numbers).at[order].set(numbers)
    for _ in range(order.ndim - 1):
      put = jax.vmap(put)
    return put(order, numbers)

  # On a TPU scatters of single numbers take ten times as long as to sort again,
  # on a CPU half as long.
  return lax.platform_dependent(
    order,
    numbers,
    cpu=scattered,
    default=lambda order, numbers: lax.sort((order, numbers), num_keys=1)[1],
  )


def windows(
  x: Shaped[Array, " N"], begin: Int[Array, " n"], size: int
) -> Shaped[Array, "n size"]:
  """Slices of x of `size` numbers, with zeros after its end."""
  padded = jnp.pad(x, (0, size))

  def slices(x: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.vmap(lambda n: lax.dynamic_slice(x, (n,), (size,)))(begin)

  def numbers(x: jax.Array, begin: jax.Array) -> jax.Array:
    return x[begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]]

  # XLA's CPU compiler makes a loop of slices.
  return lax.platform_dependent(padded, begin, cpu=numbers, default=slices)


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


@jax.custom_vjp
def numbers_into_blocks(
  x: Float[Array, " N"], blocks: RowBlocks
) -> Float[Array, " P"]:
  """Numbers of the rows of all blocks' places, zeros for padding."""
  sorted_x = lax.sort((blocks.slot, x), num_keys=1)[1]
  places = windows(sorted_x, blocks.begin, blocks.row.shape[1])
  return jnp.where(blocks.row < x.shape[0], places, 0).reshape(-1)


@jax.custom_vjp
def weighted_sum(
  y: Float[Array, "P D"], mixing: Float[Array, "T k"], blocks: RowBlocks
) -> Float[Array, "T D"]:
  """Sum of each token's rows times their weights, float32.

  Gradients of y are as wide as y: those of the sum are rounded before they are
  multiplied.

  Args:
    y: Rows of all blocks.
    mixing: Weights of the rows; those of no expert do not count.
    blocks: Blocks of the rows.
  """
  return _weighted_sum_forward(y, mixing, blocks)[0]


def _weighted_sum_forward(
  y: Float[Array, "P D"], mixing: Float[Array, "T k"], blocks: RowBlocks
) -> tuple[Float[Array, "T D"], Any]:
  rows = out_of_blocks(y, blocks).reshape(*mixing.shape, -1)
  factor = mixing[..., None].astype(jnp.float32)
  total = jnp.sum(rows.astype(jnp.float32) * factor, 1)
  return total, (rows, mixing, blocks)


def _weighted_sum_backward(
  kept: Any, g: Float[Array, "T D"]
) -> tuple[Float[Array, "P D"], Float[Array, "T k"], None]:
  rows, mixing, blocks = kept
  factor = numbers_into_blocks(mixing.reshape(-1).astype(jnp.float32), blocks)
  dy = into_blocks(g.astype(rows.dtype), blocks).astype(jnp.float32)
  dmixing = jnp.sum(rows.astype(jnp.float32) * g[:, None], -1)
  return (
    (dy * factor[:, None]).astype(rows.dtype),
    dmixing.astype(mixing.dtype),
    None,
  )


def _into_backward(
  kept: Any, g: Float[Array, "P D"]
) -> tuple[Float[Array, "T D"], None]:
  blocks, tokens = kept
  rows = out_of_blocks(g, blocks).reshape(tokens.shape[0], -1, g.shape[1])
  return jnp.sum(rows, 1, dtype=jnp.float32).astype(g.dtype), None


def _out_backward(
  blocks: RowBlocks, g: Float[Array, "N D"]
) -> tuple[Float[Array, "P D"], None]:
  return g.at[blocks.row.reshape(-1)].get(mode="fill", fill_value=0), None


into_blocks.defvjp(
  lambda x, blocks: (into_blocks(x, blocks), (blocks, x[:, :0])),
  _into_backward,
)
out_of_blocks.defvjp(
  lambda y, blocks: (out_of_blocks(y, blocks), blocks), _out_backward
)
numbers_into_blocks.defvjp(
  lambda x, blocks: (numbers_into_blocks(x, blocks), blocks.slot),
  lambda slot, g: (g.at[slot].get(mode="fill", fill_value=0), None),
)
weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)

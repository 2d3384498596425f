"""Products of rows in blocks with the maps of their experts.

Guarantees: `products` are those of each row with its expert's maps, and `gated`
is a function of two such products; both have gradients. Of blocks after the
last one that has rows, results are undefined. A kernel of `choose_product`
computes them; where none serves, `ops.experts.moe` applies all of an expert's
maps to one block after another.
Memory: gradients of float maps take one array of one layer's experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from ringjax import tree
from ringjax.ops.experts.grouped_product_tpu import (
  GROUPED_PRODUCTS,
  Combine,
  ExpertMaps,
  GroupedProductTPU,
)
from ringjax.ops.experts.row_blocks import (
  RowBlocks,
  into_blocks,
  numbers_into_blocks,
  weighted_sum,
)
from ringjax.ops.kernel_choice import KernelChoice, first_serving
from ringjax.parallel import chips, collectives
from ringjax.parallel.call_sharding import product_device

Maps = tuple[ExpertMaps, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedExperts:
  """Experts that compute the rows of all blocks at once, by a kernel.

  Attributes:
    kernel: The kernel, which chooses the size of blocks.
    f: Function (kernel, weights, rows [P, D], blocks) -> [P, D]. It closes over
      no arrays.
    weights: Weights of the experts.
  """

  kernel: GroupedProductTPU
  f: Callable[[GroupedProductTPU, Any, Array, RowBlocks], Array]
  weights: PyTree

  def block_rows(self, rows: int, experts: int) -> int:
    """Number of rows of a block."""
    return self.kernel.block_rows(rows, experts)

  def weighted(
    self,
    x: Float[Array, "T D"],
    mixing: Float[Array, "T k"],
    blocks: RowBlocks,
    *,
    scale_input: bool,
  ) -> Float[Array, "T D"]:
    """Sum of the tokens' rows, each times its mixing weight, float32.

    Args:
      x: Tokens.
      mixing: Weights of the rows; those of no expert do not count.
      blocks: Blocks of the rows.
      scale_input: Whether the weights multiply inputs, not outputs.
    """
    rows, flat = into_blocks(x, blocks), mixing.reshape(-1)
    if scale_input:
      factor = numbers_into_blocks(flat, blocks)
      rows = rows * factor[:, None].astype(x.dtype)
      mixing = jnp.ones_like(mixing)
    y = self.f(self.kernel, self.weights, rows, blocks)
    return weighted_sum(y, mixing, blocks)


def choose_product(
  x: Float[Array, "N D"], calls: Sequence[Maps]
) -> KernelChoice:
  """Choose the kernel for all maps of a layer's experts.

  Its algorithm is None where maps are applied to one block after another. In a
  model's call the call's mesh gives the platform, see `on_mesh`.

  Args:
    x: Tokens.
    calls: Maps of each call: one, or two with the same input.
  """
  platform, kind, alone = product_device((x,))
  kernels = [
    kernel(chip=chips.machine_name(kind))
    for kernel in GROUPED_PRODUCTS.get(platform, ())
  ]

  def decline(kernel: GroupedProductTPU) -> str | None:
    if not alone:
      return "XLA cuts no kernel over several devices"
    reasons = (kernel.decline(x.dtype, maps) for maps in calls)
    return next((reason for reason in reasons if reason is not None), None)

  return first_serving(kernels, decline, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def products(
  kernel: GroupedProductTPU,
  x: Float[Array, "P D"],
  maps: Maps,
  blocks: RowBlocks,
) -> tuple[Float[Array, "P F"], ...]:
  """The rows times each of the maps of their experts.

  Args:
    kernel: Kernel that serves the call.
    x: Rows of all blocks, zeros for padding.
    maps: One map, or two.
    blocks: Experts of the blocks.
  """
  return kernel.products(x, maps, blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated(
  kernel: GroupedProductTPU,
  combine: Combine,
  x: Float[Array, "P D"],
  maps: Maps,
  blocks: RowBlocks,
) -> Float[Array, "P F"]:
  """`combine` of the rows times two maps of their experts.

  Args:
    kernel: Kernel that serves the call.
    combine: Function of both products, number by number.
    x: Rows of all blocks, zeros for padding.
    maps: Two maps.
    blocks: Experts of the blocks.
  """
  return kernel.gated(x, maps, blocks, combine)


def products_by_loop(
  x: Float[Array, "P D"], maps: Maps, blocks: RowBlocks
) -> tuple[Float[Array, "P F"], ...]:
  """`products` without a kernel, one block after another."""
  layers = [map_.layer() for map_ in maps]

  def body(_: None, block: tuple) -> tuple[None, tuple[Array, ...]]:
    expert, rows = block
    run = lambda _: tuple(map_.product(rows, expert) for map_ in layers)
    skip = lambda _: tuple(
      collectives.zeros((rows.shape[0], map_.outputs), x.dtype, (x, maps))
      for map_ in layers
    )
    return None, lax.cond(expert < maps[0].experts, run, skip, None)

  parts = x.reshape(*blocks.row.shape, -1)
  # As in `ops.experts.moe`: no copy of the maps is kept for each block.
  step = jax.checkpoint(body, prevent_cse=False)
  _, outputs = lax.scan(step, None, (blocks.expert, parts))
  return tuple(y.reshape(x.shape[0], -1) for y in outputs)


def _products_forward(
  kernel: GroupedProductTPU, x: Array, maps: Maps, blocks: RowBlocks
) -> tuple[tuple[Float[Array, "P F"], ...], Any]:
  return products(kernel, x, maps, blocks), (x, maps, blocks)


def _products_backward(
  kernel: GroupedProductTPU,
  kept: Any,
  g: tuple[Float[Array, "P F"], ...],
) -> tuple[Any, ...]:
  x, maps, blocks = kept
  if maps[0].step is not None:
    # Steps have gradients, and codes none.
    loop = lambda x, maps: products_by_loop(x, maps, blocks)
    _, pull = jax.vjp(loop, x, maps)
    return *pull(g), _no_gradient(blocks)
  dx = kernel.summed(g, maps, blocks)
  dmaps = tuple(
    _gradient(kernel, x, dy, map_, blocks)
    for map_, dy in zip(maps, g, strict=True)
  )
  return dx, dmaps, _no_gradient(blocks)


def _gradient(
  kernel: GroupedProductTPU,
  x: Float[Array, "P D"],
  dy: Float[Array, "P F"],
  map_: ExpertMaps,
  blocks: RowBlocks,
) -> ExpertMaps:
  """Gradient of a map; of a stack it is zero but for the layer."""
  dtype = map_.stacked.dtype
  weight = kernel.gradients(x, dy, blocks, map_.experts, dtype)
  if map_.index:
    empty = collectives.zeros(map_.stacked.shape, dtype, (x, dy))
    weight = empty.at[map_.index].set(weight)
  return tree.with_leaves(map_, stacked=weight, index=_no_gradient(map_.index))


def _no_gradient(arrays: PyTree) -> PyTree:
  """Gradients of arrays of integers."""
  return jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), arrays)


def _gated_forward(
  kernel: GroupedProductTPU,
  combine: Combine,
  x: Float[Array, "P D"],
  maps: Maps,
  blocks: RowBlocks,
) -> tuple[Float[Array, "P F"], Any]:
  # Both products are kept, so that the backward pass computes none again.
  sums = products(kernel, x, maps, blocks)
  return combine(*sums), (x, maps, blocks, sums)


def _gated_backward(
  kernel: GroupedProductTPU,
  combine: Combine,
  kept: Any,
  g: Float[Array, "P F"],
) -> tuple[Any, ...]:
  *inputs, sums = kept
  _, pull = jax.vjp(combine, *sums)
  return _products_backward(kernel, tuple(inputs), pull(g))


products.defvjp(_products_forward, _products_backward)
gated.defvjp(_gated_forward, _gated_backward)

"""Gradients of products with weights that are codes.

Guarantees: the gradient of x is that of a product with the decoded weight; the
codes and their steps are constants, and get none. So adapters can be trained
next to codes (QLoRA).
Memory: the backward pass keeps the codes, not the floats that they stand for.
It decodes the weight of one map of one layer at a time, in the dtype of the
gradient.
Ref: Dettmers et al. 2023, QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, PyTree


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def coded_product(
  product: Callable[[Array, PyTree], Array],
  transposed: Callable[[Array, PyTree], Array],
  x: Float[Array, ...],
  arrays: PyTree,
) -> Float[Array, ...]:
  """Compute product(x, arrays), whose gradient is that of x alone.

  Args:
    product: Function (x, arrays) -> y. It closes over no arrays.
    transposed: Function (gradient of y, arrays) -> gradient of x, likewise.
    x: Activations.
    arrays: Codes, steps and their places in a stack of layers.
  """
  del transposed
  return product(x, arrays)


def _forward(
  product: Callable[[Array, PyTree], Array],
  transposed: Callable[[Array, PyTree], Array],
  x: Float[Array, ...],
  arrays: PyTree,
) -> tuple[jax.Array, PyTree]:
  del transposed
  return product(x, arrays), arrays


def _backward(
  product: Callable[[Array, PyTree], Array],
  transposed: Callable[[Array, PyTree], Array],
  arrays: PyTree,
  gradient: Float[Array, ...],
) -> tuple[Any, None]:
  del product
  return transposed(gradient, arrays), None


coded_product.defvjp(_forward, _backward)

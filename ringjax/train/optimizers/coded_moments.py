"""Moments of an optimizer as codes of 8 bits, between its updates.

Guarantees: an update is the optimizer's own, of the decoded moments, in
float32. Codes are rounded at random, to either neighbour, so that their mean is
the moment: with rounding to the nearest a moment that moves by less than half a
code a step would never move. The random numbers follow from the count of
updates, so that a run that resumes computes the same.
Levels: a block's largest number times (n / 127)^2 with a sign, or for second
moments (n / 255)^4, of which none above 0 becomes 0: the update divides by it.
Memory: a byte for a number, and 4 for a block of at most 256 of the last axis.
Arrays of fewer than 4,096 numbers stay floats.
Ref: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv
2110.02861 (blocks; there codes are a tree of exponents and fractions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from ringjax.typing import ArrayLeaf

_BLOCK = 256
# As in the paper: small arrays save little.
_SMALL = 4096
# Names of second moments in states of optimizers, which are never negative.
_SQUARES = ("nu",)


class CodedMoments(NamedTuple):
  """State of an optimizer whose moments are codes.

  Fields:
    count: Updates, int32 [].
    codes: State of the optimizer, with int8 or uint8 codes for its moments.
    scales: The same tree, with the largest number of each block for moments,
      float32 [..., blocks], and 0 for what has no codes.
  """

  count: Int[ArrayLeaf, ""]
  codes: PyTree
  scales: PyTree


def with_coded_moments(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """The optimizer, with its moments as codes of 8 bits between updates.

  Args:
    optimizer: Optimizer with moments of the shapes of the parameters.
  """

  def init(params: PyTree) -> CodedMoments:
    return _encoded(optimizer.init(params), jnp.int32(0))

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, CodedMoments]:
    moments = jax.tree.map(_decoded_leaf, state.codes, state.scales)
    updates, moments = optimizer.update(updates, moments, params)
    return updates, _encoded(moments, state.count + 1)

  return optax.GradientTransformation(init, update)


def _encoded(moments: PyTree, count: jax.Array) -> CodedMoments:
  """The state with codes for its moments."""
  leaves, form = jax.tree_util.tree_flatten_with_path(moments)
  key = jax.random.fold_in(jax.random.key(0), count)
  pairs = [
    _encoded_leaf(path, x, jax.random.fold_in(key, n))
    for n, (path, x) in enumerate(leaves)
  ]
  codes, scales = (
    jax.tree.unflatten(form, [pair[n] for pair in pairs]) for n in (0, 1)
  )
  return CodedMoments(count, codes, scales)


def _encoded_leaf(
  path: Sequence[Any], x: jax.Array, key: Key[Array, ""]
) -> tuple[jax.Array, jax.Array]:
  if x.dtype != jnp.float32 or x.size < _SMALL:
    return x, jnp.zeros((), jnp.float32)
  squares = any(getattr(k, "name", None) in _SQUARES for k in path)
  return encode(x, key, squares=squares)


def _decoded_leaf(codes: jax.Array, scale: jax.Array) -> jax.Array:
  return decode(codes, scale) if scale.ndim else codes


def encode(
  x: Float[Array, "*lead n"], key: Key[Array, ""], *, squares: bool = False
) -> tuple[Shaped[Array, "*lead n"], Float[Array, "*lead blocks"]]:
  """Encode numbers as codes of 8 bits and the largest number of each block.

  Args:
    x: Numbers, float32.
    key: Random key of the rounding.
    squares: Whether they are second moments, which are not negative.
  """
  blocks = _in_blocks(jnp.abs(x))
  scale = jnp.max(blocks, -1)
  divisor = jnp.where(scale > 0, scale, jnp.float32(1))
  parts = _joined(blocks / divisor[..., None], x.shape[-1])
  largest_code, power = (255, 4) if squares else (127, 2)
  unit = jnp.float32(1 / largest_code)
  root = jnp.sqrt(parts)
  root = jnp.sqrt(root) if squares else root
  lower = jnp.clip(jnp.floor(root * largest_code), 0, largest_code - 1)
  low, high = ((lower + n) * unit for n in (0, 1))
  low, high = low**power, high**power
  chance = (parts - low) / (high - low)
  number = jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.float32)
  level = lower + ((number + 0.5) / 256 < chance).astype(jnp.float32)
  if squares:
    level = jnp.where(parts > 0, jnp.maximum(level, 1), level)
    return level.astype(jnp.uint8), scale
  return (jnp.sign(x) * level).astype(jnp.int8), scale


def decode(
  codes: Shaped[Array, "*lead n"], scale: Float[Array, "*lead blocks"]
) -> Float[Array, "*lead n"]:
  """The numbers that codes of `encode` stand for, float32."""
  squares = codes.dtype == jnp.uint8
  largest_code, power = (255, 4) if squares else (127, 2)
  numbers = codes.astype(jnp.float32)
  parts = (jnp.abs(numbers) * jnp.float32(1 / largest_code)) ** power
  parts = jnp.sign(numbers) * parts
  blocks = _in_blocks(parts) * scale[..., None]
  return _joined(blocks, codes.shape[-1])


def _in_blocks(x: Shaped[Array, "*lead n"]) -> Shaped[Array, "*lead b m"]:
  """Blocks of equal size of the last axis, the last one padded with zeros."""
  count = -(-x.shape[-1] // _BLOCK)
  size = -(-x.shape[-1] // count)
  padding = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
  return jnp.pad(x, padding).reshape(*x.shape[:-1], count, size)


def _joined(
  blocks: Shaped[Array, "*lead b m"], size: int
) -> Shaped[Array, "*lead n"]:
  """Numbers of blocks, without the padding."""
  flat = blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))
  return flat[..., :size]

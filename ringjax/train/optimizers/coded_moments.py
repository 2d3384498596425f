"""Moments of an optimizer as codes of 8 bits, between its updates.

Guarantees: an update is the optimizer's own, of the decoded moments, in
float32. Codes are rounded at random, to either neighbour, so that their mean is
the moment: with rounding to the nearest a moment that moves by less than half a
code a step would never move. The random numbers follow from the count of
updates, so that a run that resumes computes the same.
Levels: a block's largest number times (n / 127)^2 with a sign, or for second
moments (n / 255)^4, of which none above 0 becomes 0: the update divides by it.
Memory: a byte for a number, and 4 for a block of at most 256 of the last axis,
of as many blocks as up to 64 shards of that axis divide, where its length has
such blocks of 32 numbers or more. An update holds no float32 moments: they are
computed from the codes twice, for the scales and for the new codes. Arrays of
fewer than 4,096 numbers stay floats.
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
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from ringjax.errors import CheckpointMismatchError
from ringjax.typing import ArrayLeaf

_BLOCK = 256
# Shorter blocks would have more than an eighth of a byte of scale for a number.
_LEAST_BLOCK = 32
# Number of shards of an axis that have whole blocks.
_SHARDS = 64
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
    moments = optimizer.init(params)
    return _encoded(moments, _scales(moments), jnp.int32(0))

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, CodedMoments]:
    decoded = lambda x: jax.tree.map(_decoded_leaf, x.codes, x.scales)
    _, moments = optimizer.update(updates, decoded(state), params)
    scales = _scales(moments)
    # Without the barrier XLA keeps the float32 moments, four bytes a number,
    # from one use to the other.
    state, scales = lax.optimization_barrier((state, scales))
    updates, moments = optimizer.update(updates, decoded(state), params)
    return updates, _encoded(moments, scales, state.count + 1)

  return optax.GradientTransformation(init, update)


def refuse_other_blocks(error: CheckpointMismatchError) -> None:
  """Refuses a saved state by name whose blocks alone have another size.

  Args:
    error: Error that restoring the state raised.

  Raises:
    CheckpointMismatchError: If only scales differ.
  """
  names = [leaf.split("/") for leaf in error.leaves]
  if names and all("scales" in parts for parts in names):
    raise CheckpointMismatchError(
      "moments",
      "'int8' of another version, whose blocks had other sizes",
      f"blocks of {_LEAST_BLOCK} to {_BLOCK} numbers, none on two shards",
      "end the run with the version that saved it, or begin a run in another "
      "folder from a model that is saved of it",
    ) from error


def _scales(moments: PyTree) -> PyTree:
  """Largest number of each block, and 0 for what has no codes."""

  def of_leaf(x: jax.Array) -> jax.Array:
    # Moments of bfloat16 parameters are bfloat16 before the first update.
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size < _SMALL:
      return jnp.zeros((), jnp.float32)
    return scale_of(_with_whole_blocks(x).astype(jnp.float32))

  return jax.tree.map(of_leaf, moments)


def _encoded(moments: PyTree, scales: PyTree, count: jax.Array) -> CodedMoments:
  """The state with codes for its moments."""
  leaves, form = jax.tree_util.tree_flatten_with_path(moments)
  key = jax.random.fold_in(jax.random.key(0), count)
  codes = [
    _encoded_leaf(path, x, scale, jax.random.fold_in(key, n))
    for n, ((path, x), scale) in enumerate(
      zip(leaves, jax.tree.leaves(scales), strict=True)
    )
  ]
  return CodedMoments(count, jax.tree.unflatten(form, codes), scales)


def _encoded_leaf(
  path: Sequence[Any], x: jax.Array, scale: jax.Array, key: Key[Array, ""]
) -> jax.Array:
  if not scale.ndim:
    return x
  squares = any(getattr(k, "name", None) in _SQUARES for k in path)
  gathered = _with_whole_blocks(x)
  codes = encode(gathered.astype(jnp.float32), scale, key, squares=squares)
  return codes if gathered is x else _placed_like(codes, x)


def _decoded_leaf(codes: jax.Array, scale: jax.Array) -> jax.Array:
  if not scale.ndim:
    return codes
  gathered = _with_whole_blocks(codes)
  x = decode(gathered, scale)
  return x if gathered is codes else _placed_like(x, codes)


def _with_whole_blocks(x: jax.Array) -> jax.Array:
  """The array, without shards of the last axis that cut a block.

  It is another array on meshes with explicit axes alone, which refuse to cut
  such an axis into blocks; the compiler gathers it on others.
  """
  sharding, count = jax.typeof(x).sharding, block_count(x.shape[-1])
  axes = sharding.spec[-1] if len(sharding.spec) == x.ndim else None
  if axes is None:
    return x
  names = axes if isinstance(axes, tuple) else (axes,)
  shards = math.prod(sharding.mesh.shape[name] for name in names)
  if count % shards == 0 == x.shape[-1] % count:
    return x
  spec = jax.P(*sharding.spec[:-1], None)
  return jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, spec))


def _placed_like(x: jax.Array, like: jax.Array) -> jax.Array:
  return jax.sharding.reshard(x, jax.typeof(like).sharding)


def scale_of(x: Float[Array, "*lead n"]) -> Float[Array, "*lead blocks"]:
  """The largest absolute number of each block of the last axis."""
  return jnp.max(_in_blocks(jnp.abs(x), block_count(x.shape[-1])), -1)


def encode(
  x: Float[Array, "*lead n"],
  scale: Float[Array, "*lead blocks"],
  key: Key[Array, ""],
  *,
  squares: bool = False,
) -> Shaped[Array, "*lead n"]:
  """Encode numbers as codes of 8 bits.

  Args:
    x: Numbers, float32.
    scale: Largest absolute number of each block, from `scale_of`.
    key: Random key of the rounding.
    squares: Whether they are second moments, which are not negative.
  """
  blocks = _in_blocks(jnp.abs(x), scale.shape[-1])
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
    return level.astype(jnp.uint8)
  return (jnp.sign(x) * level).astype(jnp.int8)


def decode(
  codes: Shaped[Array, "*lead n"], scale: Float[Array, "*lead blocks"]
) -> Float[Array, "*lead n"]:
  """The numbers that codes of `encode` stand for, float32."""
  squares = codes.dtype == jnp.uint8
  largest_code, power = (255, 4) if squares else (127, 2)
  numbers = codes.astype(jnp.float32)
  parts = (jnp.abs(numbers) * jnp.float32(1 / largest_code)) ** power
  parts = jnp.sign(numbers) * parts
  blocks = _in_blocks(parts, scale.shape[-1]) * scale[..., None]
  return _joined(blocks, codes.shape[-1])


def block_count(length: int) -> int:
  """Number of blocks of an axis.

  It is a multiple of the largest power of two up to 64 for which there are
  blocks of 32 to 256 numbers without padding, so that no block lies on two
  shards. An axis without such blocks has the fewest, the last one padded.
  """
  shards = _SHARDS
  while shards:
    for size in range(_BLOCK, _LEAST_BLOCK - 1, -1):
      if length % (size * shards) == 0:
        return length // size
    shards //= 2
  return -(-length // _BLOCK)


def _in_blocks(
  x: Shaped[Array, "*lead n"], count: int
) -> Shaped[Array, "*lead count m"]:
  """Blocks of equal size of the last axis, the last one padded with zeros."""
  size = -(-x.shape[-1] // count)
  padding = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
  return jnp.pad(x, padding).reshape(*x.shape[:-1], count, size)


def _joined(
  blocks: Shaped[Array, "*lead b m"], size: int
) -> Shaped[Array, "*lead n"]:
  """Numbers of blocks, without the padding."""
  flat = blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))
  return flat[..., :size]

"""Blockwise feedforward: a row-wise function, a block of tokens at a time.

Guarantees: `blockwise_feedforward(f, x)` equals `f(x)` for every f that treats
each token separately, forward and backward, for every length and every
sharding; no array of more than one block of hidden activations exists at any
time.
Cost: the FLOPs of f, once more in the backward pass (each block is recomputed
from its tokens); two copies of x and of f(x), to split and to join.
Memory: x, f(x) and the intermediates of one block.
Ref:  Liu and Abbeel 2023, arXiv 2305.19370.

A loop over consecutive tokens of a sharded sequence would visit one shard
after another, and the compiler would gather the sequence to run it. Here the
sequence is viewed as [rows, inner] with every shard a whole number of rows, and
a step takes some columns of all rows. So each step keeps every shard busy
with its own tokens, the sequence stays sharded and nothing is sent: that holds
under jit with automatic and with explicit meshes, and inside a shard_map the
loop is over the shard's own tokens.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from ringjax.checks import as_array, positive_int
from ringjax.errors import (
  InputTypeError,
  OptionError,
  ShapeError,
)
from ringjax.ops.softmax import widened


def blockwise_feedforward(
  f: Callable[[Array], Any],
  x: Shaped[Array, "*shape"],
  block: int = 1024,
  *,
  axis: int = 1,
  policy: Callable[..., bool] | None = None,
) -> Any:
  """Compute f(x) a block of tokens at a time, and its gradient likewise.

  Args:
    f: Function of separate tokens, [B, c, D] -> [B, c, E] or a pytree of such,
      for any number c of tokens. It may close over weights; their gradients
      are summed over blocks in float32. It sees the tokens of a block in no
      particular order, and a random key that it closes over gives the same
      numbers in each block.
    x: Tokens, [B, T, D], or any array with an axis of tokens.
    block: Most tokens in one step, counted over all shards of x as the caller
      sees it: a device holds the hidden activations of block / R tokens if T is
      sharded over R devices. A step takes at least one token of each shard, and
      a length that no suitable block divides has one shorter step.
    axis: Axis of tokens, in x and in every output of f.
    policy: Policy of `jax.checkpoint` for the intermediates to keep for the
      backward pass; default none.

  Returns:
    The result of f(x).

  Raises:
    InputTypeError: If f is not callable or x is not an array.
    OptionError: If block, axis or policy is of the wrong kind.
    ShapeError: If x has no such axis, or f changes the number of tokens.
  """
  if not callable(f):
    raise InputTypeError(
      "f",
      type(f).__name__,
      "a function of a block of tokens [B, c, D]",
      "pass the layer itself, not its result",
    )
  if policy is not None and not callable(policy):
    raise OptionError(
      "policy",
      repr(policy),
      "None or a policy of jax.checkpoint",
      "pick one from jax.checkpoint_policies",
    )
  x = as_array("x", x)
  block = positive_int("block", block)
  axis = _axis_of(axis, x.ndim)
  if x.shape[axis] <= block:
    return _remat(f, axis, policy, looped=False)(x)
  steps = Steps.of(x.shape[axis], block, shards_of(x))
  blocks, remainder = steps.cut(x, axis)
  block_results = steps.run(
    _hoisted(f, blocks[0], axis, policy, looped=True), blocks, axis
  )
  remainder_result = None
  if remainder is not None:
    remainder_result = _hoisted(f, remainder, axis, policy, looped=False)(
      remainder
    )
  return steps.join(block_results, remainder_result, axis)


@dataclasses.dataclass(frozen=True)
class Steps:
  """Loop over a length, viewed as [rows, inner], `width` columns a step.

  Attributes:
    rows: Parts of the sequence that every step touches; each shard holds a
      whole number of them.
    inner: Tokens of a row.
    width: Tokens that a step takes of each row.
  """

  rows: int
  inner: int
  width: int

  @classmethod
  def of(cls, length: int, block: int, shards: tuple[int, bool]) -> Steps:
    """Plan the fewest steps of at most `block` tokens.

    `shards` is the result of `shards_of`. Up to twice as many steps are taken
    where that makes them equal, since a shorter last one is a second program.
    """
    devices, certain = shards
    # Whatever mesh axes shard the sequence, their size divides both.
    rows = math.gcd(length, devices)
    while not certain and rows * 2 <= block and length % (rows * 2) == 0:
      rows *= 2
    inner = length // rows
    max_width = max(1, min(block // rows, inner))
    widths = range(max_width, (max_width - 1) // 2, -1)
    width = next((w for w in widths if inner % w == 0), 0)
    return cls(rows, inner, width or -(-inner // -(-inner // max_width)))

  @property
  def count(self) -> int:
    """Number of equal steps."""
    return self.inner // self.width

  def cut(
    self, x: Array, axis: int
  ) -> tuple[Shaped[Array, " ..."], Shaped[Array, " ..."] | None]:
    """Split into stacked blocks of the equal steps, and a remainder or None."""
    full, remainder = self.count * self.width, None
    x = _split(x, axis, (self.rows, self.inner))
    if full < self.inner:
      remainder = lax.slice_in_dim(x, full, self.inner, axis=axis + 1)
      remainder = _fuse(remainder, axis, 2)
      x = lax.slice_in_dim(x, 0, full, axis=axis + 1)
    x = _split(x, axis + 1, (self.count, self.width))
    return _fuse(jnp.moveaxis(x, axis + 1, 0), axis + 1, 2), remainder

  def run(self, f: Callable[[Any], Any], blocks: PyTree, axis: int) -> PyTree:
    """Apply f to every block, without a loop if there is one block."""
    if self.count == 1:
      return jax.tree.map(
        lambda y: y[None], f(jax.tree.map(lambda b: b[0], blocks))
      )
    return lax.scan(lambda _, b: (None, f(b)), None, blocks)[1]

  def join(self, done: PyTree, rest: PyTree, axis: int) -> PyTree:
    """Put tokens back in order: the inverse of `cut`, over a pytree."""

    def restore(y: Array, end: Array | None = None) -> Array:
      y = _split(y, axis + 1, (self.rows, self.width))
      y = _fuse(jnp.moveaxis(y, 0, axis + 1), axis + 1, 2)
      if end is not None:
        end = _split(end, axis, (self.rows, end.shape[axis] // self.rows))
        y = lax.concatenate([y, end], axis + 1)
      return _fuse(y, axis, 2)

    if rest is None:
      return jax.tree.map(restore, done)
    return jax.tree.map(restore, done, rest)


def shards_of(x: Array) -> tuple[int, bool]:
  """Return (devices over which jit may shard x, whether that is certain)."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    mesh = jax.typeof(x).sharding.mesh
  if not mesh.empty:
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(n for n, kind in kinds if kind != AxisType.Manual), True
  if not isinstance(x, jax.core.Tracer):
    return len(x.sharding.device_set), True
  # Under jit an automatic mesh is seen only if it was entered.
  return jax.device_count(), False


def _axis_of(axis: int, rank: int) -> int:
  if not isinstance(axis, numbers.Integral) or isinstance(axis, bool):
    raise OptionError("axis", repr(axis), "an int", "pass the axis of tokens")
  axis = int(axis)
  if not -rank <= axis < rank:
    raise ShapeError(
      "axis",
      f"{axis} for an x with {rank} axes",
      "the axis of tokens in x",
      "pass axis=0 for [T, D] and axis=1 for [B, T, D]",
    )
  return axis % rank


def _remat(
  f: Callable[[Array], Any],
  axis: int,
  policy: Callable[..., bool] | None,
  looped: bool,
) -> Callable[[Array], Any]:
  """Wrap f to keep nothing for its backward pass, and check its tokens."""

  def rows(x: Array) -> Any:
    y = f(x)
    for leaf in jax.tree.leaves(y):
      shape = jnp.shape(leaf)
      if len(shape) <= axis or shape[axis] != x.shape[axis]:
        raise ShapeError(
          "f",
          f"an output of shape {shape} for a block of shape {x.shape}",
          f"{x.shape[axis]} tokens in axis {axis}, as many as came in",
          "let f act on each token alone, and reduce over tokens outside",
        )
    return y

  # A loop body already separates the two computations of a block.
  return jax.checkpoint(rows, prevent_cse=not looped, policy=policy)


def _hoisted(
  f: Callable[[Array], Any],
  x: Array,
  axis: int,
  policy: Callable[..., bool] | None,
  looped: bool,
) -> Callable[[Array], Any]:
  """Wrap `_remat(f)` to sum its weights' gradients over steps in float32.

  Weights are converted to float32 outside of the loop and back inside, which
  costs nothing forward: a bfloat16 sum of a thousand terms stops growing.
  """
  pure, weights = jax.closure_convert(f, x)
  wide_weights = widened(weights)

  def narrow(x: Array) -> Any:
    pairs = zip(wide_weights, weights, strict=True)
    return pure(x, *(a.astype(w.dtype) for a, w in pairs))

  return _remat(narrow, axis, policy, looped)


def _split(x: Array, axis: int, sizes: tuple[int, ...]) -> Array:
  """Split an axis into several; the first keeps the sharding."""
  spec = spec_of(x)
  if spec is not None:
    extra = (None,) * (len(sizes) - 1)
    spec = (*spec[: axis + 1], *extra, *spec[axis + 1 :])
  return _reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), spec)


def _fuse(x: Array, axis: int, count: int) -> Array:
  """Merge `count` axes from `axis` on, with the first one's sharding."""
  spec, end = spec_of(x), axis + count
  if spec is not None:
    spec = (*spec[: axis + 1], *spec[end:])
  size = math.prod(x.shape[axis:end])
  return _reshape(x, (*x.shape[:axis], size, *x.shape[end:]), spec)


def _reshape(x: Array, shape: tuple[int, ...], spec: Any) -> Array:
  if spec is None:
    return lax.reshape(x, shape)
  mesh = jax.typeof(x).sharding.mesh
  return lax.reshape(
    x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )


def spec_of(x: Array) -> tuple[Any, ...] | None:
  """Explicit mesh axes of each axis; None without an explicit mesh."""
  sharding = jax.typeof(x).sharding
  if AxisType.Explicit not in sharding.mesh.axis_types:
    return None
  spec = tuple(sharding.spec)
  return spec + (None,) * (x.ndim - len(spec))

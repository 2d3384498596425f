"""Muon: the momentum of a matrix, made orthogonal by Newton-Schulz iterations.

Guarantees: a matrix W [in, out] moves along the orthogonal factor of its
Nesterov momentum, to the accuracy of five iterations, times 0.2 sqrt(max(in,
out)), so that its root mean square is that of an AdamW update; embeddings,
heads, norms, biases and routers move as AdamW moves them. Groups of axes count
as one: queries of all heads are one matrix, each expert of a mixture is one.
Cost: 30 in out min(in, out) FLOPs a matrix, whatever the batch is.
Memory: one moment a number of a matrix, two of other parameters. On a mesh each
device gets whole matrices of some layers or experts, in place of its part of
all of them: one exchange to and one from this placement, of a leaf at a time.
Matrices that the devices do not divide are computed on several of them.
Ref: Jordan et al. 2024, github.com/KellerJordan/Muon; Liu et al. 2025, Muon is
Scalable for LLM Training, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from ringjax.models.weights.linear_maps import maps_of
from ringjax.typing import ArrayLeaf

# Coefficients of X, X X^T X and (X X^T)^2 X, whose slope at 0 is large.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
# Root mean square of an AdamW update.
_RMS = 0.2
# Maps that choose experts or gate: AdamW moves them.
_CHOOSING = (".router", ".shared_gate")


class MuonState(NamedTuple):
  """State of `scale_by_muon`.

  Fields:
    count: Updates, int32 [].
    momentum: Momentum of matrices, first moment of other parameters.
    nu: Second moment of other parameters, float32 [] for matrices.
  """

  count: Int[ArrayLeaf, ""]
  momentum: PyTree
  nu: PyTree


class Matrix(NamedTuple):
  """Axes of a parameter that is a stack of matrices.

  Fields:
    lead: Number of axes before the matrices' own.
    inputs: Number of axes of a matrix that are its inputs.
  """

  lead: int
  inputs: int


def matrices(params: PyTree) -> list[Matrix | None]:
  """Matrix axes of each leaf of a tree; None for one that AdamW moves.

  Args:
    params: A model or adapters, of arrays, shapes or updates.
  """
  leaves = jax.tree_util.tree_flatten_with_path(
    params, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )[0]
  maps = maps_of(params, "") if isinstance(params, nnx.Module) else {}
  axes: list[Matrix | None] = []
  for path, leaf in leaves:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    map_path, _, last = name.rpartition(".")
    if not isinstance(leaf, nnx.Variable):
      # Adapters: A [layers, *in, r], B [layers, r, *out].
      factors = {"a": leaf.ndim - 2, "b": 1}
      inputs = factors.get(last)
      axes.append(None if inputs is None else Matrix(1, inputs))
      continue
    # A map's weight is known by the map, one of experts by itself.
    linear = maps.get(map_path) if last == "weight" else maps.get(name)
    if linear is None or map_path.endswith(_CHOOSING):
      axes.append(None)
      continue
    metadata = leaf.get_metadata()
    lead = leaf.get_value().ndim - len(metadata["axes"]) + linear.lead
    axes.append(Matrix(lead, linear.contracted))
  return axes


def scale_by_muon(
  b1: float = 0.95,
  b2: float = 0.95,
  eps: float = 1e-8,
  *,
  mesh: Mesh | None = None,
) -> optax.GradientTransformation:
  """Muon for matrices, and Adam for other parameters.

  Args:
    b1: Decay of the momentum of matrices. Adam's first moment has 0.9.
    b2: Decay of Adam's second moment.
    eps: Number added to the root of the second moment.
    mesh: Devices that share the matrices; None for one.
  """
  return with_orthogonal_matrices(scale_by_momenta(b1, b2, eps), mesh)


def with_orthogonal_matrices(
  optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> optax.GradientTransformationExtraArgs:
  """The optimizer, with the orthogonal factors of its updates of matrices.

  Args:
    optimizer: Optimizer, whose state this one has.
    mesh: Devices that share the matrices; None for one.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def update(
    updates: PyTree, state: Any, params: PyTree = None, **others: Any
  ) -> tuple[PyTree, Any]:
    axes = matrices(updates)
    updates, state = optimizer.update(updates, state, params, **others)
    leaves, form = jax.tree.flatten(updates)
    results = [
      x if matrix is None else _orthogonal(x, matrix, mesh).astype(x.dtype)
      for x, matrix in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(form, results), state

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


def momenta_by_leaf(
  b1: float, b2: float, eps: float
) -> Callable[[PyTree], list[optax.GradientTransformation]]:
  """Function from parameters to `scale_by_momenta` of each of their arrays."""
  return lambda params: [
    scale_by_momenta(b1, b2, eps, lambda _, matrix=matrix: [matrix])
    for matrix in matrices(params)
  ]


def scale_by_momenta(
  b1: float,
  b2: float,
  eps: float,
  axes_of: Callable[[PyTree], list[Matrix | None]] = matrices,
) -> optax.GradientTransformation:
  """The Nesterov momentum of matrices, and Adam for other parameters.

  Args:
    b1: Decay of the momentum of matrices.
    b2: Decay of Adam's second moment.
    eps: Number added to the root of the second moment.
    axes_of: Function from parameters to the axes of matrices of each array.
  """
  adam_b1 = 0.9

  def init(params: PyTree) -> MuonState:
    leaves, form = jax.tree.flatten(params)
    nu = [
      jnp.zeros_like(x) if matrix is None else jnp.zeros((), x.dtype)
      for x, matrix in zip(leaves, axes_of(params), strict=True)
    ]
    momentum = jax.tree.map(jnp.zeros_like, params)
    return MuonState(jnp.int32(0), momentum, jax.tree.unflatten(form, nu))

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, MuonState]:
    del params
    count: Any = optax.safe_increment(state.count)
    gradients, form = jax.tree.flatten(updates)
    updates_taken = count.astype(jnp.float32)
    first, second = 1 - adam_b1**updates_taken, 1 - b2**updates_taken
    results, momenta, nus = [], [], []
    for gradient, momentum, nu, matrix in zip(
      gradients,
      jax.tree.leaves(state.momentum),
      jax.tree.leaves(state.nu),
      axes_of(updates),
      strict=True,
    ):
      if matrix is None:
        momentum = adam_b1 * momentum + (1 - adam_b1) * gradient
        nu = b2 * nu + (1 - b2) * gradient * gradient
        moved = (momentum / first) / (jnp.sqrt(nu / second) + eps)
      else:
        momentum = b1 * momentum + gradient
        moved = b1 * momentum + gradient
      results.append(moved.astype(gradient.dtype))
      momenta.append(momentum)
      nus.append(nu)
    unflatten = lambda leaves: jax.tree.unflatten(form, leaves)
    return unflatten(results), MuonState(
      count, unflatten(momenta), unflatten(nus)
    )

  return optax.GradientTransformation(init, update)


def _orthogonal(x: jax.Array, matrix: Matrix, mesh: Mesh | None) -> jax.Array:
  """The scaled orthogonal factor of each matrix of x."""
  split = matrix.lead + matrix.inputs
  lead, inputs = x.shape[: matrix.lead], x.shape[matrix.lead : split]
  rows, columns = math.prod(inputs), math.prod(x.shape[split:])
  stacked = x.reshape(math.prod(lead), rows, columns)
  if rows > columns:
    stacked = stacked.swapaxes(1, 2)
  if mesh is not None and mesh.size > 1:
    axes = _dividing(stacked.shape[0], mesh)
    stacked = jax.lax.with_sharding_constraint(
      stacked, NamedSharding(mesh, P(axes))
    )
  stacked = newton_schulz(stacked.astype(jnp.float32))
  if rows > columns:
    stacked = stacked.swapaxes(1, 2)
  scale = _RMS * math.sqrt(max(rows, columns))
  return (stacked * jnp.float32(scale)).reshape(x.shape)


def newton_schulz(x: Float[Array, "n r c"]) -> Float[Array, "n r c"]:
  """Approximate the orthogonal factors of matrices with r <= c.

  Their singular values become about 0.7 to 1.2.
  """
  norm = jnp.sqrt(jnp.sum(x * x, (1, 2), keepdims=True))
  x = x / (norm + 1e-8)
  a, b, c = _COEFFICIENTS

  for _ in range(_ITERATIONS):
    gram = jnp.einsum("nrc,nsc->nrs", x, x)
    mixed = b * gram + c * jnp.einsum("nrs,nst->nrt", gram, gram)
    x = a * x + jnp.einsum("nrs,nsc->nrc", mixed, x)
  return x


def _dividing(count: int, mesh: Mesh) -> tuple[str, ...]:
  """Mesh axes, the first ones, whose sizes divide a number together."""
  axes: tuple[str, ...] = ()
  shards = 1
  for name, size in mesh.shape.items():
    if count % (shards * size) == 0:
      axes, shards = (*axes, name), shards * size
  return axes

"""Digests that distinguish models."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

from ringjax.models.grouping import STACK, looped, regrouped
from ringjax.nn.weights.placed_layers import PlacedLayers

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer


def digest(data: bytes) -> str:
  """The first 64 bits of a SHA-256, in hexadecimal digits."""
  return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(model: Transformer, dtype: DTypeLike | None = None) -> str:
  """A digest of a corner of each of a model's weights, in any memory.

  Args:
    model: A `Transformer`.
    dtype: Dtype that weights are rounded to first; None: as they are.
  """
  hasher = hashlib.sha256()
  for part in _corners(model):
    if dtype is not None and jnp.issubdtype(part.dtype, jnp.floating):
      part = part.astype(dtype)
    hasher.update(part.tobytes())
  return hasher.hexdigest()[:16]


def corner(leaf: Shaped[Array, " ..."]) -> Shaped[np.ndarray, " ..."]:
  """The first numbers of a weight along each axis.

  Of a weight that is spread over processes all of them make the same call.
  """
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    return np.asarray(_spread_corner(leaf))
  on_host = all(d.platform == "cpu" for d in leaf.devices())
  weight = np.asarray(leaf) if on_host else leaf
  return np.asarray(weight[(slice(0, EDGE),) * weight.ndim])


def _spread_corner(leaf: jax.Array) -> jax.Array:
  """Corner of a weight of several processes, whole in each."""
  sharding = leaf.sharding
  assert isinstance(sharding, NamedSharding)
  cut = jax.jit(
    lambda x: x[(slice(0, EDGE),) * x.ndim],
    out_shardings=NamedSharding(sharding.mesh, PartitionSpec()),
  )
  return cut(leaf)


def _corners(model: Transformer) -> Iterator[np.ndarray]:
  """The first numbers along each axis of each weight, with layers stacked."""
  stack = getattr(model, "stack", None)
  if stack is None:
    yield from map(corner, jax.tree.leaves(model))
    return
  leaves = jax.tree_util.tree_leaves_with_path(
    model, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  corners: dict[str, np.ndarray] = {}
  for keys, leaf in leaves:
    path = jax.tree_util.keystr(keys, simple=True, separator=".")
    if not isinstance(leaf, nnx.Variable):
      # Of placed layers these are parts in the host's memory.
      if stack.placed is None:
        corners[path] = corner(leaf)
      continue
    kind, name, run, position = None, "", "", ""
    if path.startswith(STACK) and stack.placed is not None:
      run, position, name = path.split(".", 4)[2:]
      kind = stack.placed[int(run)][int(position)]
    if kind is None or name not in kind.paths:
      corners[path] = corner(leaf.get_value())
      continue
    if kind not in _FETCHED:
      _FETCHED[kind] = _first_corners(stack, int(run), int(position), kind)
    corners[path] = _FETCHED[kind][kind.paths.index(name)]
  # The same model has the same digest, whether its layers are a loop or not.
  groups = looped(stack.runs)
  yield from regrouped(corners, stack.runs, groups, most=EDGE).values()


def _first_corners(
  stack: PyTree, run: int, position: int, kind: PlacedLayers
) -> list[np.ndarray]:
  """Corners of the weights of a kind's first layers, which are fetched."""
  fetch = jax.jit(lambda stack, n: stack.layer(run, position, n))
  layers = []
  for n in range(min(EDGE, len(kind.tiers))):
    leaves = jax.tree_util.tree_leaves_with_path(
      fetch(stack, n), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    by_path = {
      jax.tree_util.keystr(keys, simple=True, separator="."): p.get_value()
      for keys, p in leaves
    }
    # Adapters add a `base` to the path.
    plain = {k.replace(".base.", "."): x for k, x in by_path.items()}
    layers.append([corner((by_path | plain)[path]) for path in kind.paths])
  return [np.stack(corners) for corners in zip(*layers, strict=True)]


# Numbers of a corner along an axis.
EDGE = 4
# Weights do not change: their corners are read once.
_FETCHED: Any = weakref.WeakKeyDictionary()

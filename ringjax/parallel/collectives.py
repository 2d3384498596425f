"""Moves between shards: the only file that calls JAX's collectives.

Law: every function here also runs under `jax.vmap(..., axis_name=...)`, on one
device, with the same result; none of them looks at a mesh.
Per shard: letters mean local sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core  # extend_axis_env_nd has no public name

Tree = TypeVar("Tree")


def manual_axes() -> frozenset[str]:
  """Mesh axes that are manual here, i.e. owned by an enclosing shard_map."""
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(*trees: Any) -> frozenset[str]:
  """Manual axes over which any leaf of `trees` differs between devices."""
  axes: frozenset[str] = frozenset()
  for leaf in jax.tree.leaves(trees):
    kind = getattr(jax.typeof(leaf), "manual_axis_type", None)
    if kind is not None:
      axes |= frozenset(kind.varying)
  return axes


def vary(tree: Tree, axes: Sequence[str] | frozenset[str]) -> Tree:
  """Types every leaf as varying over the manual ones of `axes`.

  The transpose of this cast is a psum, so that a replicated operand of a
  custom_vjp gets the sum of all shards' gradients without further words.
  """
  manual = manual_axes()

  def cast(x: jax.Array) -> jax.Array:
    have = varying_axes(x)
    need = tuple(a for a in sorted(axes) if a in manual and a not in have)
    return lax.pcast(x, need, to="varying") if need else x

  return jax.tree.map(cast, tree)


def zeros(shape: Sequence[int], dtype: Any, like: Any) -> jax.Array:
  """Zeros that may start a loop carry beside `like` (same varying axes)."""
  return vary(jnp.zeros(shape, dtype), varying_axes(like))


def full(shape: Sequence[int], value: Any, dtype: Any, like: Any) -> jax.Array:
  """As `zeros`, filled with `value`."""
  return vary(jnp.full(shape, value, dtype), varying_axes(like))


def axis_size(axis: str) -> int:
  """Number of shards along `axis`, static."""
  return lax.axis_size(axis)


def axis_index(axis: str) -> jax.Array:
  """This shard's number along `axis`, int32."""
  return lax.axis_index(axis)


def is_bound(axis: str) -> bool:
  """Whether `axis` names a manual mesh axis or a vmap axis here."""
  try:
    lax.axis_size(axis)
  except NameError:
    return False
  mesh = jax.sharding.get_abstract_mesh()
  return axis not in mesh.axis_names or axis in mesh.manual_axes


@contextlib.contextmanager
def bound(axis: str | None, size: int) -> Iterator[None]:
  """Makes the size of a vmap axis known where JAX forgets it.

  JAX runs the backward rule of a custom_vjp under vmap without the names of
  the vmapped axes, and collectives ask for the size of theirs.
  """
  if axis is None or is_bound(axis):
    yield
    return
  with core.extend_axis_env_nd([(axis, size)]):
    yield


def rotate(tree: Tree, axis: str, shift: int) -> Tree:
  """Sends every leaf from shard i to shard (i + shift) mod R, one hop."""
  size = lax.axis_size(axis)
  pairs = [(i, (i + shift) % size) for i in range(size)]
  return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def send(tree: Tree, axis: str, pairs: Sequence[tuple[int, int]]) -> Tree:
  """Sends every leaf along (from, to) pairs; who gets nothing has zeros."""
  return jax.tree.map(lambda x: lax.ppermute(x, axis, list(pairs)), tree)


def gather(tree: Tree, axis: str, dimension: int) -> Tree:
  """Concatenates all shards' leaves along `dimension`, on every shard."""
  return jax.tree.map(
    lambda x: lax.all_gather(x, axis, axis=dimension, tiled=True), tree
  )


def scatter_sum(tree: Tree, axis: str, dimension: int) -> Tree:
  """Sums leaves over all shards; each keeps its part of `dimension`."""
  return jax.tree.map(
    lambda x: lax.psum_scatter(
      x, axis, scatter_dimension=dimension, tiled=True
    ),
    tree,
  )


def total(tree: Tree, axis: str) -> Tree:
  """Sums leaves over all shards, on every shard."""
  return jax.tree.map(lambda x: lax.psum(x, axis), tree)


def largest(tree: Tree, axis: str) -> Tree:
  """The largest of all shards' leaves, on every shard."""
  return jax.tree.map(lambda x: lax.pmax(x, axis), tree)


def exchange(x: jax.Array, axis: str, split: int, concat: int) -> jax.Array:
  """All-to-all: cuts `split` into R parts, joins the received on `concat`."""
  return lax.all_to_all(x, axis, split, concat, tiled=True)

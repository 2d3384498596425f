"""Collectives between shards: the only file that calls JAX's collectives.

Guarantees: every function here also runs under `jax.vmap(..., axis_name=...)`,
on one device, with the same result; none of them looks at a mesh. (JAX's own
limits under vmap: the moves over several axes at once, `send`, and `gather`,
`scatter_sum` and `exchange` over a `Part` of an axis are for real meshes.)
Per shard: letters mean local sizes. R is the size of the axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core  # extend_axis_env_nd has no public name
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int, PyTree, Shaped

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Part:
  """One level of an axis whose shards are numbered in two levels.

  Shards i, i + stride, ..., of which there are `size`, are a group; moves stay
  within groups.

  Attributes:
    axis: Name of the axis.
    size: Number of shards of a group.
    stride: Distance between neighbours of a group; 1 is the inner level.
  """

  axis: str
  size: int
  stride: int = 1

  def groups(self) -> list[list[int]]:
    """List the shards of each group, in order."""
    span = self.size * self.stride
    return [
      [start + first + n * self.stride for n in range(self.size)]
      for start in range(0, lax.axis_size(self.axis), span)
      for first in range(self.stride)
    ]


# An axis, several numbered as one (the last moves fastest), or a level of one.
Axis = str | tuple[str, ...] | Part


def names(axis: Axis | None) -> tuple[str, ...]:
  """Return the names of the mesh axes of `axis`."""
  if axis is None:
    return ()
  if isinstance(axis, Part):
    return (axis.axis,)
  return (axis,) if isinstance(axis, str) else axis


def manual_axes() -> frozenset[str]:
  """Mesh axes that are manual here, i.e. owned by an enclosing shard_map."""
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def partitioned() -> str | None:
  """Describe the axes over which XLA would partition a kernel, or None.

  These are the mesh axes that are not manual here: XLA cannot partition a
  kernel.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return None
  manual = manual_axes()
  auto_axes = [name for name in mesh.axis_names if name not in manual]
  if not auto_axes:
    return None
  return f"the mesh axes {', '.join(auto_axes)}"


def varying_axes(*trees: PyTree) -> frozenset[str]:
  """Manual axes over which any leaf of `trees` differs between devices."""
  axes: frozenset[str] = frozenset()
  for leaf in jax.tree.leaves(trees):
    kind = getattr(jax.typeof(leaf), "manual_axis_type", None)
    if kind is not None:
      axes |= frozenset(kind.varying)
  return axes


def vary(tree: Tree, axes: Sequence[str] | frozenset[str]) -> Tree:
  """Make every leaf's type vary over the manual ones of `axes`.

  The transpose of this cast is a psum, so that a replicated operand of a
  custom_vjp gets the sum of all shards' gradients.
  """
  manual = manual_axes()

  def cast(x: jax.Array) -> jax.Array:
    present = varying_axes(x)
    need = tuple(a for a in sorted(axes) if a in manual and a not in present)
    return lax.pcast(x, need, to="varying") if need else x

  return jax.tree.map(cast, tree)


def out_type(
  shape: Sequence[int], dtype: DTypeLike, *like: PyTree
) -> jax.ShapeDtypeStruct:
  """Type of a kernel's result that varies over the axes of `like`."""
  axes = varying_axes(*like)
  if not axes and not manual_axes():
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
  kind = jax.sharding.ManualAxisType(varying=axes)
  return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=kind)


def zeros(
  shape: Sequence[int], dtype: DTypeLike, like: PyTree
) -> Shaped[Array, " ..."]:
  """Zeros for a loop carry next to `like` (with the same varying axes)."""
  return vary(jnp.zeros(shape, dtype), varying_axes(like))


def full(
  shape: Sequence[int], value: ArrayLike, dtype: DTypeLike, like: PyTree
) -> Shaped[Array, " ..."]:
  """Array of `value` for a loop carry next to `like` (same varying axes)."""
  return vary(jnp.full(shape, value, dtype), varying_axes(like))


def axis_size(axis: Axis) -> int:
  """Number of shards along `axis`, static."""
  return axis.size if isinstance(axis, Part) else lax.axis_size(axis)


def axis_index(axis: Axis) -> Int[Array, ""]:
  """Index of this shard along `axis`, int32."""
  if isinstance(axis, Part):
    return lax.axis_index(axis.axis) // axis.stride % axis.size
  return lax.axis_index(axis)


def is_bound(axis: Axis) -> bool:
  """Whether `axis` names manual mesh axes or vmap axes here."""
  mesh = jax.sharding.get_abstract_mesh()
  try:
    for name in names(axis):
      lax.axis_size(name)
  except NameError:
    return False
  return all(
    name not in mesh.axis_names or name in mesh.manual_axes
    for name in names(axis)
  )


def sizes(axes: Sequence[str]) -> tuple[tuple[str, int], ...]:
  """Return the axes with their sizes, for `bound`."""
  return tuple((name, lax.axis_size(name)) for name in axes)


@contextlib.contextmanager
def bound(axes: Sequence[tuple[str, int]]) -> Iterator[None]:
  """Provide the sizes of vmap axes where JAX forgets them.

  JAX runs the backward rule of a custom_vjp under vmap without the names of
  the vmapped axes, but collectives need their sizes.
  """
  missing = [(name, size) for name, size in axes if not is_bound(name)]
  if not missing:
    yield
    return
  with core.extend_axis_env_nd(missing):
    yield


def rotate(tree: Tree, axis: Axis, shift: int) -> Tree:
  """Send every leaf from shard i to shard (i + shift) mod R, one hop."""
  if isinstance(axis, Part):
    groups = axis.groups()
    name = axis.axis
  else:
    groups, name = [list(range(lax.axis_size(axis)))], axis
  pairs = [
    (shard, group[(i + shift) % len(group)])
    for group in groups
    for i, shard in enumerate(group)
  ]
  # JAX's vmap needs the pairs in the order of the senders.
  pairs.sort()
  return jax.tree.map(lambda x: lax.ppermute(x, name, pairs), tree)


def sum_by_sends(x: Shaped[Array, "T D"], axis: Axis) -> Shaped[Array, "T D"]:
  """Sum over all shards, [T, D] on each of them, by point-to-point sends.

  Shard i adds up the i-th part of the rows, then sends it to all others: as
  many bytes as in a ring. A TPU runs `psum` alone, but overlaps sends with
  other work. If the shards do not divide the rows, it is a `psum`.
  """
  size = axis_size(axis)
  if x.shape[0] % size:
    return lax.psum(x, axis)
  shard, part_rows = axis_index(axis), x.shape[0] // size
  part_start = lambda n: (n % size) * part_rows
  total = lax.dynamic_slice_in_dim(x, part_start(shard), part_rows, 0)
  for distance in range(1, size):
    their_part = lax.dynamic_slice_in_dim(
      x, part_start(shard + distance), part_rows, 0
    )
    total = total + rotate(their_part, axis, distance)
  # The partial sums have been sent: their memory is reused for the results.
  x = lax.dynamic_update_slice_in_dim(x, total, part_start(shard), 0)
  for distance in range(1, size):
    their_sum = rotate(total, axis, distance)
    x = lax.dynamic_update_slice_in_dim(
      x, their_sum, part_start(shard - distance), 0
    )
  return x


def send(tree: Tree, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Tree:
  """Send every leaf along (from, to) pairs; other shards receive zeros."""
  if isinstance(axis, Part):
    pairs = [(group[i], group[j]) for group in axis.groups() for i, j in pairs]
    axis = axis.axis
  return jax.tree.map(lambda x: lax.ppermute(x, axis, list(pairs)), tree)


def shift(tree: Tree, axis: Axis, by: int) -> Tree:
  """Send every leaf from shard i to shard i + by; the ends get zeros."""
  size = axis_size(axis)
  if all(name in manual_axes() for name in names(axis)):
    return send(
      tree, axis, [(i, i + by) for i in range(size) if 0 <= i + by < size]
    )
  # Under JAX's vmap every shard has to receive from some shard.
  shard = axis_index(axis)
  inside = (shard >= by) & (shard < size + by)
  return jax.tree.map(
    lambda x: jnp.where(inside, x, jnp.zeros_like(x)), rotate(tree, axis, by)
  )


def gather(tree: Tree, axis: Axis, dimension: int) -> Tree:
  """Concatenate all shards' leaves along `dimension`, on every shard."""
  name, groups = _grouped(axis)
  return jax.tree.map(
    lambda x: lax.all_gather(
      x, name, axis=dimension, tiled=True, axis_index_groups=groups
    ),
    tree,
  )


def scatter_sum(tree: Tree, axis: Axis, dimension: int) -> Tree:
  """Sum leaves over all shards; each keeps its part of `dimension`."""
  name, groups = _grouped(axis)
  return jax.tree.map(
    lambda x: lax.psum_scatter(
      x,
      name,
      scatter_dimension=dimension,
      tiled=True,
      axis_index_groups=groups,
    ),
    tree,
  )


def total(tree: Tree, axis: str | tuple[str, ...]) -> Tree:
  """Sum leaves over all shards, on every shard."""
  return jax.tree.map(lambda x: lax.psum(x, axis), tree)


def largest(tree: Tree, axis: str | tuple[str, ...]) -> Tree:
  """Maximum over all shards' leaves, on every shard."""
  return jax.tree.map(lambda x: lax.pmax(x, axis), tree)


def exchange(
  x: Shaped[Array, " ..."], axis: Axis, split: int, concat: int
) -> Shaped[Array, " ..."]:
  """All-to-all: split `split` into R parts, join the received on `concat`."""
  name, groups = _grouped(axis)
  return lax.all_to_all(
    x, name, split, concat, tiled=True, axis_index_groups=groups
  )


def _grouped(axis: Axis) -> tuple[Any, Any]:
  """Convert an axis to a name and groups for JAX's collectives."""
  if not isinstance(axis, Part):
    return axis, None
  groups = axis.groups()
  # One group of all is passed as None: then it also runs under vmap.
  return axis.axis, groups if len(groups) > 1 else None

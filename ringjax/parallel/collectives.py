"""Moves between shards: the only file that calls JAX's collectives.

Guarantees: every function here also runs under `jax.vmap(..., axis_name=...)`,
on one device, with the same result; none of them looks at a mesh. (JAX's own
limits under vmap: the moves over several axes at once, `send`, and `gather`,
`scatter_sum` and `exchange` over a `Part` of an axis are for real meshes.)
Per shard: letters mean local sizes. R is the size of the axis at hand.
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
from jaxtyping import Array, PyTree, Shaped

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Part:
  """One level of an axis whose shards are numbered in two levels.

  Shards i, i + stride, ..., of which there are `size`, are a group; moves stay
  within groups.

  Attributes:
    axis: the axis.
    size: shards of a group.
    stride: how far its neighbours are apart; 1 is the inner level.
  """

  axis: str
  size: int
  stride: int = 1

  def groups(self) -> list[list[int]]:
    """The shards of each group, in order."""
    span = self.size * self.stride
    return [
      [start + first + n * self.stride for n in range(self.size)]
      for start in range(0, lax.axis_size(self.axis), span)
      for first in range(self.stride)
    ]


# An axis, several numbered as one (the last moves fastest), or a level of one.
Axis = str | tuple[str, ...] | Part


def names(axis: Axis | None) -> tuple[str, ...]:
  """The names of the mesh axes of `axis`."""
  if axis is None:
    return ()
  if isinstance(axis, Part):
    return (axis.axis,)
  return (axis,) if isinstance(axis, str) else axis


def manual_axes() -> frozenset[str]:
  """Mesh axes that are manual here, i.e. owned by an enclosing shard_map."""
  return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def partitioned() -> str | None:
  """Names what XLA would have to partition a kernel over; None if nothing.

  These are the mesh axes that are not manual here: XLA cannot partition a
  kernel.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return None
  manual = manual_axes()
  left = [name for name in mesh.axis_names if name not in manual]
  if not left:
    return None
  return f"the mesh axes {', '.join(left)}"


def varying_axes(*trees: PyTree) -> frozenset[str]:
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
  custom_vjp gets the sum of all shards' gradients.
  """
  manual = manual_axes()

  def cast(x: jax.Array) -> jax.Array:
    have = varying_axes(x)
    need = tuple(a for a in sorted(axes) if a in manual and a not in have)
    return lax.pcast(x, need, to="varying") if need else x

  return jax.tree.map(cast, tree)


def out_type(
  shape: Sequence[int], dtype: DTypeLike, *like: PyTree
) -> jax.ShapeDtypeStruct:
  """The type of a kernel's result that varies over the axes of `like`."""
  axes = varying_axes(*like)
  if not axes and not manual_axes():
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
  kind = jax.sharding.ManualAxisType(varying=axes)
  return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=kind)


def zeros(shape: Sequence[int], dtype: DTypeLike, like: PyTree) -> jax.Array:
  """Zeros that may start a loop carry beside `like` (same varying axes)."""
  return vary(jnp.zeros(shape, dtype), varying_axes(like))


def full(
  shape: Sequence[int], value: ArrayLike, dtype: DTypeLike, like: PyTree
) -> jax.Array:
  """As `zeros`, filled with `value`."""
  return vary(jnp.full(shape, value, dtype), varying_axes(like))


def axis_size(axis: Axis) -> int:
  """Number of shards along `axis`, static."""
  return axis.size if isinstance(axis, Part) else lax.axis_size(axis)


def axis_index(axis: Axis) -> jax.Array:
  """This shard's number along `axis`, int32."""
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
  """The axes with their sizes, for `bound`."""
  return tuple((name, lax.axis_size(name)) for name in axes)


@contextlib.contextmanager
def bound(axes: Sequence[tuple[str, int]]) -> Iterator[None]:
  """Makes the sizes of vmap axes known where JAX forgets them.

  JAX runs the backward rule of a custom_vjp under vmap without the names of
  the vmapped axes, and collectives ask for the size of theirs.
  """
  missing = [(name, size) for name, size in axes if not is_bound(name)]
  if not missing:
    yield
    return
  with core.extend_axis_env_nd(missing):
    yield


def rotate(tree: Tree, axis: Axis, shift: int) -> Tree:
  """Sends every leaf from shard i to shard (i + shift) mod R, one hop."""
  if isinstance(axis, Part):
    groups = axis.groups()
    name: Any = axis.axis
  else:
    groups, name = [list(range(lax.axis_size(axis)))], axis
  pairs = [
    (shard, group[(i + shift) % len(group)])
    for group in groups
    for i, shard in enumerate(group)
  ]
  # JAX's vmap needs them in the order of the senders.
  pairs.sort()
  return jax.tree.map(lambda x: lax.ppermute(x, name, pairs), tree)


def sum_by_sends(x: Shaped[Array, "T D"], axis: Axis) -> jax.Array:
  """The sum over all shards, [T, D] on each of them, by single sends.

  Shard i adds up the i-th part of the rows, then sends it to all others: as
  many bytes as a ring takes for it. TPU runs a sum of its own (`psum`) alone,
  and sends beside other work. Rows that shards do not divide are a `psum`.
  """
  size = axis_size(axis)
  if x.shape[0] % size:
    return lax.psum(x, axis)
  me, each = axis_index(axis), x.shape[0] // size
  first = lambda n: (n % size) * each
  total = lax.dynamic_slice_in_dim(x, first(me), each, 0)
  for by in range(1, size):
    theirs = lax.dynamic_slice_in_dim(x, first(me + by), each, 0)
    total = total + rotate(theirs, axis, by)
  # The partial sums have been sent: their memory takes the results.
  x = lax.dynamic_update_slice_in_dim(x, total, first(me), 0)
  for by in range(1, size):
    came = rotate(total, axis, by)
    x = lax.dynamic_update_slice_in_dim(x, came, first(me - by), 0)
  return x


def send(tree: Tree, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Tree:
  """Sends every leaf along (from, to) pairs; other shards receive zeros."""
  if isinstance(axis, Part):
    pairs = [(group[i], group[j]) for group in axis.groups() for i, j in pairs]
    axis = axis.axis
  return jax.tree.map(lambda x: lax.ppermute(x, axis, list(pairs)), tree)


def shift(tree: Tree, axis: Axis, by: int) -> Tree:
  """Sends every leaf from shard i to shard i + by; the ends get zeros."""
  size = axis_size(axis)
  if all(name in manual_axes() for name in names(axis)):
    return send(
      tree, axis, [(i, i + by) for i in range(size) if 0 <= i + by < size]
    )
  # Under JAX's vmap every shard has to receive from one.
  me = axis_index(axis)
  inside = (me >= by) & (me < size + by)
  return jax.tree.map(
    lambda x: jnp.where(inside, x, jnp.zeros_like(x)), rotate(tree, axis, by)
  )


def gather(tree: Tree, axis: Axis, dimension: int) -> Tree:
  """Concatenates all shards' leaves along `dimension`, on every shard."""
  name, groups = _grouped(axis)
  return jax.tree.map(
    lambda x: lax.all_gather(
      x, name, axis=dimension, tiled=True, axis_index_groups=groups
    ),
    tree,
  )


def scatter_sum(tree: Tree, axis: Axis, dimension: int) -> Tree:
  """Sums leaves over all shards; each keeps its part of `dimension`."""
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
  """Sums leaves over all shards, on every shard."""
  return jax.tree.map(lambda x: lax.psum(x, axis), tree)


def largest(tree: Tree, axis: str | tuple[str, ...]) -> Tree:
  """The largest of all shards' leaves, on every shard."""
  return jax.tree.map(lambda x: lax.pmax(x, axis), tree)


def exchange(
  x: Shaped[Array, " ..."], axis: Axis, split: int, concat: int
) -> jax.Array:
  """All-to-all: cuts `split` into R parts, joins the received on `concat`."""
  name, groups = _grouped(axis)
  return lax.all_to_all(
    x, name, split, concat, tiled=True, axis_index_groups=groups
  )


def _grouped(axis: Axis) -> tuple[Any, Any]:
  """An axis and its groups, as arguments of JAX's collectives."""
  if not isinstance(axis, Part):
    return axis, None
  groups = axis.groups()
  # A group of all is none: then the move also runs under vmap.
  return axis.axis, groups if len(groups) > 1 else None

"""Meshes whose sequence axis is a ring of neighbours.

Guarantees: in a mesh from `make_mesh` every hop of the `ring` axis, the one
that closes the ring included, is one link between neighbouring chips where the
slice's shape has such a ring. Plain device order makes hops of many links, and
on large v5e slices it makes every send too slow for compute to hide.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array, PyTree, Shaped

from ringjax.errors import MeshError
from ringjax.parallel.call_sharding import SEQ

_F = TypeVar("_F", bound=Callable[..., Any])


def make_mesh(
  shape: Sequence[int],
  axis_names: Sequence[str],
  *,
  devices: Sequence[Any] | None = None,
  axis_types: Sequence[AxisType] | AxisType = AxisType.Auto,
  ring: str = SEQ,
) -> Mesh:
  """Make a mesh of `shape` whose `ring` axis runs along physical links.

  Args:
    shape: Size of each axis; one of them may be -1, for all devices left.
    axis_names: Names of the axes, e.g. ("data", "seq", "model").
    devices: Devices of the mesh; default all of the default backend.
    axis_types: One type for all axes, or one for each.
    ring: Axis whose shards pass keys around. Axes before it tile the slice
      into boxes; axes after it take neighbours of the ring's order.

  Returns:
    A `jax.sharding.Mesh`. On devices without coordinates (CPU, GPU) the order
    of `devices` is kept.

  Raises:
    MeshError: If the sizes do not fit the devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = _sizes(tuple(shape), tuple(axis_names), len(devices))
  if isinstance(axis_types, AxisType):
    kinds = (axis_types,) * len(sizes)
  else:
    kinds = tuple(axis_types)
  devices = devices[: math.prod(sizes)]
  if ring in axis_names and hasattr(devices[0], "coords"):
    ring_axis = list(axis_names).index(ring)
    outer, inner = math.prod(sizes[:ring_axis]), math.prod(sizes[ring_axis:])
    devices = [d for box in _boxes(devices, outer, inner) for d in box]
  grid = np.empty(len(devices), dtype=object)
  grid[:] = devices
  return Mesh(grid.reshape(sizes), tuple(axis_names), axis_types=kinds)


def make_cpu_devices(count: int) -> bool:
  """Make JAX's CPU client have `count` devices, before JAX starts.

  XLA gets at least two threads for each device: its CPU client begins
  independent collectives at once, each of which blocks a thread until all
  devices have begun it. With a thread for each device, as by default, one
  device can take them all, and XLA aborts the process after 40 s.

  Returns:
    Whether there are as many; not if JAX has started with another number.
  """
  if count > 1:
    threads = max(os.cpu_count() or 1, 2 * count)
    os.environ.setdefault("NPROC", str(threads))
  config: Any = jax.config
  if config.jax_num_cpu_devices != count:
    try:
      jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
      return False
  return True


def automatic(mesh: Mesh | AbstractMesh) -> Mesh:
  """Return `mesh` with all of its axes automatic, as models need it.

  `jax.make_mesh` makes explicit axes, but a model's layers do not propagate
  explicit shardings: the compiler does.

  Raises:
    MeshError: If `mesh` is not a mesh, or has manual axes.
  """
  if not isinstance(mesh, Mesh):
    raise MeshError(
      "mesh",
      type(mesh).__name__,
      "a jax.sharding.Mesh",
      "build one with rj.make_mesh",
    )
  kinds = set(mesh.axis_types)
  if AxisType.Manual in kinds:
    raise MeshError(
      "mesh",
      f"axes of types {mesh.axis_types}",
      "automatic axes",
      "build it with rj.make_mesh, and call from outside of a shard_map",
    )
  if AxisType.Explicit not in kinds:
    return mesh
  types = (AxisType.Auto,) * len(mesh.axis_names)
  return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


# All-to-alls that run next to other work, as sends and gathers do by default.
_TPU_OPTIONS = {"xla_tpu_enable_async_all_to_all": True}


def compiler_options(mesh: Mesh | AbstractMesh | None) -> dict[str, bool]:
  """XLA's options for a program on a mesh, `compiler_options=` of `jax.jit`.

  On TPUs all-to-alls, which bring tokens to sharded experts, overlap with
  other work. Empty for other devices, and where the devices are unknown.
  """
  if not isinstance(mesh, Mesh):
    return {}
  return dict(_TPU_OPTIONS) if mesh.devices.flat[0].platform == "tpu" else {}


def check_current() -> None:
  """Refuse to compute with a model if the current mesh is explicit.

  Raises:
    MeshError: If the current mesh has explicit axes.
  """
  current = jax.sharding.get_abstract_mesh()
  if AxisType.Explicit in current.axis_types:
    raise MeshError(
      "mesh",
      f"a current mesh with axes of types {current.axis_types}",
      "automatic axes, for models",
      "enter jax.set_mesh(rj.make_mesh(...)), or leave it",
    )


def entering(mesh_of: Callable[..., Any]) -> Callable[[_F], _F]:
  """Decorate a function so that it enters its own mesh before it computes.

  JAX refuses arrays that are not on the current mesh. In a trace, where a mesh
  cannot be entered, the function is called as it is.

  Args:
    mesh_of: Function of the same arguments that returns the mesh; None keeps
      the current mesh, with automatic axes.
  """

  def decorate(f: _F) -> _F:
    @functools.wraps(f)
    def run(*args: Any, **options: Any) -> Any:
      current = jax.sharding.get_abstract_mesh()
      if current.empty or isinstance(jnp.zeros(()), jax.core.Tracer):
        return f(*args, **options)
      mesh = mesh_of(*args, **options)
      if not isinstance(mesh, Mesh):
        mesh = jax.sharding.get_mesh()
      with jax.set_mesh(automatic(mesh)):
        return f(*args, **options)

    return cast(_F, run)

  return decorate


def on_automatic(name: str, x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """Move an array from explicit axes to automatic ones of the same mesh.

  Other arrays are returned as they are.

  Raises:
    MeshError: If it is traced, so that it cannot be moved.
  """
  sharding = jax.typeof(x).sharding
  if AxisType.Explicit not in sharding.mesh.axis_types:
    return x
  if isinstance(x, jax.core.Tracer):
    raise MeshError(
      name,
      f"an array on axes of types {sharding.mesh.axis_types}",
      "automatic axes, for models",
      "put it on a mesh of rj.make_mesh before the jit",
    )
  mesh = automatic(cast(NamedSharding, x.sharding).mesh)
  return jax.device_put(x, NamedSharding(mesh, sharding.spec))


def with_shardings(form: PyTree, shardings: PyTree) -> PyTree:
  """Give each shape of a tree the sharding that its array will have."""
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    form,
    shardings,
  )


def _sizes(
  shape: tuple[int, ...], names: tuple[str, ...], count: int
) -> tuple[int, ...]:
  if len(shape) != len(names) or len(set(names)) != len(names):
    raise MeshError(
      "axis_names",
      f"{names} for shape {shape}",
      "one distinct name for each axis",
      "give as many names as sizes",
    )
  product = math.prod(s for s in shape if s != -1)
  if shape.count(-1) > 1 or any(s < 1 and s != -1 for s in shape):
    raise MeshError(
      "shape", shape, "positive sizes and at most one -1", "write the sizes out"
    )
  if -1 in shape:
    if count % product:
      raise MeshError(
        "shape",
        f"{shape} for {count} devices",
        f"a number of devices that {product} divides",
        "change the other axes, or pass fewer devices=",
      )
    shape = tuple(count // product if s == -1 else s for s in shape)
  if math.prod(shape) > count:
    raise MeshError(
      "shape",
      f"{shape}, which needs {math.prod(shape)} devices",
      f"at most the {count} devices there are",
      "make an axis smaller, or on CPU set jax_num_cpu_devices",
    )
  return shape


def _boxes(devices: list[Any], outer: int, inner: int) -> list[list[Any]]:
  """Split a slice into `outer` boxes of devices, each ordered as a ring."""
  by_coords: dict[tuple[int, ...], list[Any]] = {}
  for d in devices:
    by_coords.setdefault((getattr(d, "slice_index", 0), *d.coords), []).append(
      d
    )
  cores = len(next(iter(by_coords.values())))
  slices = sorted({key[0] for key in by_coords})
  points = [k[1:] for k in by_coords if k[0] == slices[0]]
  extent = tuple(max(c) - min(c) + 1 for c in zip(*points, strict=True))
  origin = tuple(min(c) for c in zip(*points, strict=True))
  regular = math.prod(extent) * cores * len(slices) == len(devices)
  if not regular or inner % cores or outer % len(slices):
    return [devices]
  box = _box_shape(extent, inner // cores)
  if box is None:
    return [devices]
  rings = []
  steps = zip(extent, box, strict=True)
  starts = [*itertools.product(*(range(0, e, b) for e, b in steps))]
  for slice_index in slices:
    for start in starts:
      walk: list[jax.Device] = []
      for point in ring_walk(box):
        coords = tuple(
          o + s + p for o, s, p in zip(origin, start, point, strict=True)
        )
        walk += by_coords[(slice_index, *coords)]
      rings.append(walk)
  return rings


def _box_shape(extent: tuple[int, ...], size: int) -> tuple[int, ...] | None:
  """Find the most compact box of `size` points that tiles `extent`."""
  divisors = [[d for d in range(1, e + 1) if e % d == 0] for e in extent]
  fitting = [
    box for box in itertools.product(*divisors) if math.prod(box) == size
  ]
  # An even side closes the ring without a jump; then prefer round boxes.
  closes = lambda box: (
    size < 3 or (sum(s > 1 for s in box) > 1 and any(s % 2 == 0 for s in box))
  )
  return min(fitting, key=lambda b: (not closes(b), max(b), b), default=None)


def ring_walk(box: tuple[int, ...]) -> list[tuple[int, ...]]:
  """List all points of `box`, neighbours in turn, the last next to the first.

  A ring of neighbours exists if some side is even and two sides are longer than
  1. Otherwise the walk is a snake whose ends are apart.
  """
  sides = [i for i, s in enumerate(box) if s > 1]
  if len(sides) >= 2:
    # The side to come back along, and an even side to snake over.
    for return_side in sides:
      other_sides = [i for i in sides if i != return_side]
      if box[return_side] == 2 or any(box[i] % 2 == 0 for i in other_sides):
        walk = _closed_walk(box, return_side, other_sides)
        if walk is not None:
          return walk
  order = sorted(range(len(box)), key=lambda i: -box[i])
  return [_reordered(p, order) for p in _snake([box[i] for i in order])]


def _closed_walk(
  box: tuple[int, ...], home: int, other_sides: list[int]
) -> list[tuple[int, ...]] | None:
  """Build a cycle: out over a snake with home > 0, back along home = 0."""
  order = other_sides + [home] + [i for i in range(len(box)) if box[i] == 1]
  path = _snake([box[i] for i in other_sides])
  if len(path) % 2:
    return None
  # Rows of the snake, each walked over the far part of the home side, in
  # alternating direction; an even number of rows ends at home index 1.
  walk = []
  for n, point in enumerate(path):
    line = range(1, box[home])
    for h in line if n % 2 == 0 else reversed(line):
      walk.append((*point, h))
  walk += [(*point, 0) for point in reversed(path)]
  pad = len(box) - len(other_sides) - 1
  return [_reordered((*p, *([0] * pad)), order) for p in walk]


def _snake(sides: Sequence[int]) -> list[tuple[int, ...]]:
  """Walk every point once, each next to the one before (boustrophedon)."""
  walk: list[tuple[int, ...]] = [()]
  for side in sides:
    walk = [
      (*point, i)
      for n, point in enumerate(walk)
      for i in (range(side) if n % 2 == 0 else reversed(range(side)))
    ]
  return walk


def _reordered(point: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
  """Reorder a point's coordinates, given in `order`, to the order of axes."""
  return tuple(value for _, value in sorted(zip(order, point, strict=True)))

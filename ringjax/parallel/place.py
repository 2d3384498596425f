"""How a call is sharded: on which mesh, and over which axes.

Guarantees: `locate` looks, in this order, at the caller's arguments, at the
operands (explicit shardings, or the shardings of concrete arrays) and at the
current mesh and its "seq" axis. In a `jax.jit` the type of an operand names the
mesh of automatic axes that its arguments lie on, though not what each axis
shards: `sequence_axis` of that mesh is taken, or the call is refused. The call
is local only where no axis is found, or no mesh at all: arguments without a
mesh whose shardings `in_shardings` alone gives are such a case. Several axes
that shard the sequence count as one, the last of them moving fastest.
In a shard_map nothing says which dimension a manual axis shards, so a function
with a JAX function's name and signature takes no axis because it is called so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array, PyTree, Shaped

from ringjax.errors import MeshError
from ringjax.parallel import collectives

# Mesh axes over which one dimension is sharded; the last moves fastest.
MeshAxes = str | tuple[str, ...] | None

SEQ = "seq"
# `axis` of a call whose axis is to be found; None is no axis at all.
AUTO = "auto"
# Names of mesh axes that shard another dimension.
_OTHERS = ("replica", "data", "model", "expert", "stage")


def sequence_axis(
  mesh: Mesh | AbstractMesh, used: Sequence[str] = (), required: bool = True
) -> str | None:
  """The axis of `mesh` that shards the sequence where a caller names none.

  "seq"; else the only axis of another name than "replica", "data", "model",
  "expert" and "stage"; None if there is none. `used` shard something else.
  `required`: the caller takes no axis=None.

  Raises:
    MeshError: several axes may be meant.
  """
  if SEQ in mesh.axis_names:
    return SEQ
  left = [a for a in mesh.axis_names if a not in (*_OTHERS, *used)]
  if len(left) > 1:
    raise MeshError(
      "axis",
      f"None, on a mesh with the axes {mesh.axis_names}",
      f"which of {', '.join(map(repr, left))} shards the sequence",
      f"pass axis=, e.g. axis={left[0]!r}"
      + ("" if required else ", or axis=None if none of them does"),
    )
  return left[0] if left else None


@dataclasses.dataclass(frozen=True)
class CallSharding:
  """How a call's operands are sharded; `locate` finds it.

  Attributes:
    axis: mesh axis over which the sequence is sharded, or several, or None.
    manual: whether operands are per shard, in the caller's shard_map or vmap.
    mesh: the mesh to open a shard_map on, or None.
    size: number of shards, 1 without an axis.
    batch: mesh axes over which the batch is sharded, where that is known.
    heads: mesh axes over which the heads are sharded, where that is known.
    whole: whether no other axis shards an operand, so that none is left to the
      compiler.
  """

  axis: str | tuple[str, ...] | None = None
  manual: bool = False
  mesh: Mesh | AbstractMesh | None = None
  size: int = 1
  batch: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  whole: bool = False

  @property
  def names(self) -> tuple[str, ...]:
    """The mesh axes over which the sequence is sharded."""
    return collectives.names(self.axis)


def device_of(
  place: CallSharding, operands: Sequence[Any]
) -> tuple[str, str, bool]:
  """(platform, device_kind, alone) of the devices that a call runs on.

  The platform is "cpu", "gpu" or "tpu"; alone is whether XLA does not partition
  the call itself: it is in a shard_map, or on one device. The mesh decides,
  then concrete operands, then the mesh around the call; a program that is
  traced without a mesh counts as one for JAX's default, and for all devices.
  """
  kind_of = lambda device: (device.platform, device.device_kind)
  if isinstance(place.mesh, Mesh):
    return *kind_of(place.mesh.devices.flat[0]), True
  around = place.mesh or jax.sharding.get_abstract_mesh()
  alone = place.manual or place.mesh is not None
  for a in operands:
    if isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer):
      return *kind_of(next(iter(a.devices()))), alone or len(a.devices()) == 1
  alone = alone or (around.empty and jax.device_count() == 1)
  kind = getattr(around.abstract_device, "device_kind", None)
  if kind is not None and kind.startswith("TPU"):
    return "tpu", kind, alone
  return *kind_of(jax.local_devices()[0]), alone


def check_axis(name: str, axis: MeshAxes) -> None:
  """Refuses an `axis` that is not a name, a tuple of distinct names or None.

  An empty tuple is refused for the sequence alone, whose absence is None.
  """
  least = 1 if name == "axis" else 0
  several = isinstance(axis, tuple) and len(set(axis)) == len(axis) >= least
  if not (
    axis is None
    or isinstance(axis, str)
    or (several and all(isinstance(one, str) for one in axis))
  ):
    raise MeshError(
      name,
      repr(axis),
      "the name of a mesh axis, or a tuple of such names, the slowest first",
      f"pass e.g. {name}={'seq' if name == 'axis' else 'data'!r}",
    )


def manual(axis: MeshAxes) -> CallSharding | None:
  """The sharding of a call whose operands are per shard, else None."""
  check_axis("axis", axis)
  bound = axis
  if axis == AUTO:
    bound = SEQ if SEQ in collectives.manual_axes() else None
  if bound is None or not collectives.is_bound(bound):
    return None
  size = collectives.axis_size(bound)
  return CallSharding(axis=bound, manual=True, size=size)


def shards_of(axis: MeshAxes) -> int:
  """Of how many shards the operands of a call are one; 1 of a whole mesh."""
  per_shard = manual(axis)
  return 1 if per_shard is None else per_shard.size


def locate(
  operands: Sequence[Any],
  mesh: Mesh | AbstractMesh | None,
  axis: str | tuple[str, ...] | None,
  required: bool,
  name: str = "q",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  by_name: bool = True,
) -> CallSharding:
  """Finds how a call with [B, T, heads, H] `operands` is sharded.

  Args:
    operands: arrays, the queries first.
    mesh: as the caller gave it.
    axis: the mesh axis of the sequence; `AUTO` to find it, None for none.
    required: whether an axis must be found; otherwise the call may be local.
    name: what the caller calls the first operand.
    batch_axis: the mesh axes of the batch; None is what explicit types say.
    head_axis: the same for the heads.
    by_name: whether a manual axis called "seq" is taken; otherwise shards of
      any manual axis are refused.

  Raises:
    MeshError: no such axis, or one that shards two dimensions.
  """
  shares = {"batch_axis": batch_axis, "head_axis": head_axis}
  given = {which: over for which, over in shares.items() if over is not None}
  for which, over in given.items():
    check_axis(which, over)
  first = next(iter(given), "axis")
  per_shard = manual(axis) if by_name or axis != AUTO else None
  if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
    raise MeshError(
      "mesh",
      type(mesh).__name__,
      "a jax.sharding.Mesh",
      "build one with rj.make_mesh or jax.make_mesh",
    )
  if per_shard is not None:
    if given:
      raise MeshError(
        first,
        f"{given[first]!r} for operands that are per shard",
        "operands of a whole mesh",
        "leave it out inside of a shard_map",
      )
    return per_shard
  specs = [sharding_of(x) for x in operands]
  found = next((m for m, _ in specs if m is not None), None)
  context = jax.sharding.get_abstract_mesh()
  use = mesh or found or (None if context.empty else context)
  if context.manual_axes:
    # A shard_map inside of another one is on the same mesh, as seen there.
    _check_same(mesh, context)
    use = context
  if use is None:
    named = axis not in (None, AUTO)
    if named or required or given:
      got = given.get(first, axis if named else None)
      raise MeshError(
        first,
        f"{got!r} outside of any mesh",
        "a mesh with that axis",
        "pass mesh=, or enter one with jax.set_mesh(mesh)",
      )
    return CallSharding()
  if axis == AUTO:
    used = [n for over in given.values() for n in collectives.names(over)]
    axis = _sequence_axis(specs, use, mesh is not None, used, required)
    if not by_name and context.manual_axes:
      axis = _not_manual(axis, specs, operands)
  if axis is None and required:
    raise MeshError(
      "axis",
      f"None, and no 'seq' among the mesh axes {use.axis_names}",
      "the mesh axis that shards the sequence",
      "pass one of them as axis=",
    )
  _check_names("axis", axis, use)
  explicit = [
    a
    for a, kind in zip(use.axis_names, use.axis_types, strict=True)
    if kind == AxisType.Explicit
  ]
  if axis is None and not explicit and not given:
    return CallSharding()
  spec = next((spec for m, spec in specs if m is not None), ()) or ()
  found_at = lambda i: tuple(
    a for a in (spec[i] if i < len(spec) else ()) if a in explicit
  )
  batch, heads = (
    _check_names(which, given[which], use) if which in given else found_at(i)
    for i, which in ((0, "batch_axis"), (2, "head_axis"))
  )
  if given:
    _check_disjoint(axis, batch, heads)
    _check_divides(operands, use, name, batch, heads)
  if {*collectives.names(axis)} & {*batch, *heads}:
    raise MeshError(
      name,
      f"a sharding that uses {axis!r} for the batch or the heads",
      "that axis for the sequence only",
      f"reshard {name}, or name the sequence's axis with axis=",
    )
  return CallSharding(
    axis=axis,
    mesh=use,
    size=math.prod(use.shape[name] for name in collectives.names(axis)),
    batch=batch,
    heads=heads,
    whole=bool(given),
  )


def _not_manual(
  axis: MeshAxes, specs: list[Any], operands: Sequence[Any]
) -> MeshAxes:
  """The axis that was found, unless a shard_map around the call owns it.

  Raises:
    MeshError: operands are, or may be, the shards of a manual axis.
  """
  free = not {*collectives.names(axis)} & collectives.manual_axes()
  if not (free and any(s and len(s) > 1 and s[1] for _, s in specs)):
    refuse_shards("query, key, value", operands, "axis={}", SEQ)
  return axis if free else None


def refuse_shards(name: str, x: PyTree, spelling: str, axis: str) -> None:
  """Refuses operands that are the shards of a shard_map's manual axes.

  Which dimension they shard is not known. `spelling` is the argument of the
  remedy, with a gap for the axis; `axis` is an example.

  Raises:
    MeshError: they vary over manual axes, or that is unknown.
  """
  axes = sorted(collectives.manual_axes())
  varying = sorted(collectives.varying_axes(x))
  # Without check_vma nothing is known to vary.
  known = all(
    a in collectives.varying_axes(collectives.axis_index(a)) for a in axes
  )
  if not axes or (known and not varying):
    return
  over = varying or axes
  example = axis if axis in over else over[0]
  raise MeshError(
    name,
    f"shards in a shard_map over the axes {', '.join(map(repr, over))}, "
    "and no axis",
    "whether the sequence is sharded over one of them",
    f"pass {spelling.format(repr(example))} for attention over the shards "
    f"of that axis, or {spelling.format(None)} for attention within each "
    "shard",
  )


def _check_same(
  mesh: Mesh | AbstractMesh | None, around: Mesh | AbstractMesh | None
) -> None:
  """Refuses a mesh that is not the one of the shard_map around the call."""
  shape = lambda one: tuple(zip(one.axis_names, one.axis_sizes, strict=True))
  if mesh is not None and shape(mesh) != shape(around):
    raise MeshError(
      "mesh",
      f"one of {shape(mesh)} inside of a shard_map over {shape(around)}",
      "the mesh of that shard_map",
      "leave mesh out",
    )


def _check_names(
  which: str, axes: MeshAxes, mesh: Mesh | AbstractMesh
) -> tuple[str, ...]:
  """The axes that a caller named, which have to be the mesh's."""
  names = collectives.names(axes)
  if any(one not in mesh.axis_names for one in names):
    raise MeshError(
      which,
      repr(axes),
      f"one of the mesh axes {mesh.axis_names}",
      "rename the axis or pass another mesh",
    )
  return names


def _check_disjoint(
  axis: MeshAxes, batch: tuple[str, ...], heads: tuple[str, ...]
) -> None:
  """Refuses a mesh axis that is to shard two dimensions."""
  uses = [*collectives.names(axis), *batch, *heads]
  twice = next((one for one in uses if uses.count(one) > 1), None)
  if twice is not None:
    raise MeshError(
      "axis, batch_axis, head_axis",
      f"{twice!r} for two of sequence, batch and heads",
      "another mesh axis for each",
      "take it out of one of them",
    )


def _check_divides(
  operands: Sequence[Any],
  mesh: Mesh | AbstractMesh,
  name: str,
  batch: tuple[str, ...],
  heads: tuple[str, ...],
) -> None:
  """Refuses a batch or query heads that their shards do not divide."""
  b, _, n, _ = operands[0].shape
  for which, many, over in (("examples", b, batch), ("heads", n, heads)):
    size = math.prod(mesh.shape[one] for one in over)
    if many % size:
      raise MeshError(
        name,
        f"{many} {which} over the {size} shards of {over}",
        "a multiple of the shards",
        "leave that axis out, or pad",
      )


def sharding_of(
  x: Shaped[Array | jax.ShapeDtypeStruct, " ..."],
) -> tuple[Any, tuple[tuple[str, ...], ...] | None]:
  """(mesh, mesh axes of each dimension) of an operand; (None, ()) without one.

  A concrete array and a `jax.ShapeDtypeStruct` have a sharding. The type of a
  traced array names the mesh of the arguments that it is computed from, and
  says over which explicit axes it lies; what automatic axes shard is known to
  the compiler alone: then None stands for the axes of the dimensions.
  """
  sharding: Any = getattr(jax.typeof(x), "sharding", None)
  kinds = () if sharding is None else sharding.mesh.axis_types
  if AxisType.Explicit not in kinds:
    if isinstance(x, jax.core.Tracer):
      unknown = any(n > 1 for n in sharding.mesh.axis_sizes)
      unknown = unknown and AxisType.Manual not in kinds
      return (sharding.mesh, None) if unknown else (None, ())
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
      return None, ()
  return sharding.mesh, tuple(collectives.names(a) for a in sharding.spec)


def _sequence_axis(
  found: list[Any],
  mesh: Mesh | AbstractMesh,
  given: bool,
  used: Sequence[str],
  required: bool,
) -> MeshAxes:
  """The axis of the operands' second dimension, else the one of the mesh."""
  for _, spec in found:
    if spec is not None and len(spec) > 1 and spec[1]:
      return spec[1] if len(spec[1]) > 1 else spec[1][0]
  if given or any(spec is None for _, spec in found):
    return sequence_axis(mesh, used, required)
  return SEQ if SEQ in mesh.axis_names else None

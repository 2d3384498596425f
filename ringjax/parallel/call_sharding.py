"""Sharding of a call: its mesh, and the axes that shard each dimension.

Guarantees: `locate` looks, in this order, at the caller's arguments, at the
operands (explicit shardings, or the shardings of concrete arrays) and at the
current mesh and its "seq" axis. In a `jax.jit` the type of an operand names the
mesh of automatic axes of its arguments, though not what each axis shards:
`sequence_axis` of that mesh is taken, or the call is refused. The call is local
only where no axis is found, or no mesh at all: arguments without a mesh whose
shardings `in_shardings` alone gives are such a case. Several axes that shard
the sequence count as one, the last of them moving fastest.
In a shard_map nothing tells which dimension a manual axis shards, so a function
with a JAX function's name and signature does not use an axis by its name alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped

from ringjax.errors import MeshError
from ringjax.parallel import collectives

# Mesh axes over which one dimension is sharded; the last moves fastest.
MeshAxes = str | tuple[str, ...] | None

SEQ = "seq"
# Value of `axis` for which a call finds its axis; None is no axis at all.
AUTO = "auto"
# Mesh axis that shards layers.
STAGE = "stage"
# Names of mesh axes that shard other dimensions.
_OTHERS = ("replica", "data", "model", "expert", STAGE)


def sequence_axis(
  mesh: Mesh | AbstractMesh, used: Sequence[str] = (), required: bool = True
) -> str | None:
  """Find the axis of `mesh` that shards the sequence where no axis is named.

  It is "seq"; else the only axis of another name than "replica", "data",
  "model", "expert" and "stage"; else None. Axes `used` shard other dimensions.
  `required`: the caller takes no axis=None.

  Raises:
    MeshError: If several axes may be meant.
  """
  if SEQ in mesh.axis_names:
    return SEQ
  candidates = [a for a in mesh.axis_names if a not in (*_OTHERS, *used)]
  if len(candidates) > 1:
    raise MeshError(
      "axis",
      f"None, on a mesh with the axes {mesh.axis_names}",
      f"which of {', '.join(map(repr, candidates))} shards the sequence",
      f"pass axis=, e.g. axis={candidates[0]!r}"
      + ("" if required else ", or axis=None if none of them does"),
    )
  return candidates[0] if candidates else None


def manual_over(
  mesh: Mesh | AbstractMesh, names: Iterable[str]
) -> dict[str, Any]:
  """Options of a shard_map of a model's call that is sharded over `names`.

  Axes of one device are manual, too: they shard nothing, and kernels need all
  axes manual. So is the axis of stages, over which JAX's vmap shards the calls
  of all stages; then types do not track varying axes, which JAX 0.10 to 0.12
  lose in a vmap of such calls.
  """
  unsharded = {name for name, n in mesh.shape.items() if n == 1}
  has_stages = dict(mesh.shape).get(STAGE, 1) > 1
  if has_stages:
    unsharded |= {STAGE}
  return {
    "axis_names": {*names} | (unsharded - collectives.manual_axes()),
    "check_vma": not has_stages,
  }


@dataclasses.dataclass(frozen=True)
class CallSharding:
  """Mesh and axes over which a call's operands are sharded, see `locate`.

  Attributes:
    axis: Mesh axis over which the sequence is sharded, or several, or None.
    manual: Whether operands are per shard, in the caller's shard_map or vmap.
    mesh: Mesh to open a shard_map on, or None.
    size: Number of shards, 1 without an axis.
    batch: Mesh axes over which the batch is sharded, where that is known.
    heads: Mesh axes over which the heads are sharded, where that is known.
    fully_manual: Whether no other axis shards an operand, so that XLA has
      nothing to partition.
  """

  axis: str | tuple[str, ...] | None = None
  manual: bool = False
  mesh: Mesh | AbstractMesh | None = None
  size: int = 1
  batch: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  fully_manual: bool = False

  @property
  def names(self) -> tuple[str, ...]:
    """The mesh axes over which the sequence is sharded."""
    return collectives.names(self.axis)


def device_of(
  place: CallSharding, operands: Sequence[Any]
) -> tuple[str, str, bool]:
  """Return (platform, device_kind, alone) of the devices that run a call.

  The platform is "cpu", "gpu" or "tpu"; alone is whether XLA does not partition
  the call itself: it is in a shard_map, or on one device. The mesh decides,
  then concrete operands, then the mesh around the call; a program that is
  traced without a mesh counts as one for JAX's default device, and for all
  devices.
  """
  platform_and_kind = lambda device: (device.platform, device.device_kind)
  if isinstance(place.mesh, Mesh):
    return *platform_and_kind(place.mesh.devices.flat[0]), True
  ambient_mesh = place.mesh or jax.sharding.get_abstract_mesh()
  unpartitioned = place.manual or place.mesh is not None
  for a in operands:
    if isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer):
      return *platform_and_kind(next(iter(a.devices()))), unpartitioned or len(
        a.devices()
      ) == 1
  unpartitioned = unpartitioned or (
    ambient_mesh.empty and jax.device_count() == 1
  )
  kind = getattr(ambient_mesh.abstract_device, "device_kind", None)
  if kind is not None and kind.startswith("TPU"):
    return "tpu", kind, unpartitioned
  return *platform_and_kind(jax.local_devices()[0]), unpartitioned


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCall:
  """Mesh of a model's call, and how it shards tokens.

  Attributes:
    mesh: Device mesh, or None.
    token_spec: Function from activations [B, T, ...] to their sharding; None:
      it is unknown.
  """

  mesh: Mesh | AbstractMesh | None = None
  token_spec: Callable[[Any], P] | None = None


_NO_CALL = ModelCall()
_CALL: contextvars.ContextVar[ModelCall] = contextvars.ContextVar(
  "ringjax_model_call", default=_NO_CALL
)


@contextlib.contextmanager
def on_mesh(
  mesh: Mesh | AbstractMesh | None,
  token_spec: Callable[[Any], P] | None = None,
) -> Iterator[None]:
  """Tell products the mesh of a model's call while it is traced.

  Linear maps take no sharding context, which knows it.

  Args:
    mesh: Device mesh, or None.
    token_spec: Function from activations [B, T, ...] to their sharding.
  """
  token = _CALL.set(ModelCall(mesh=mesh, token_spec=token_spec))
  try:
    yield
  finally:
    _CALL.reset(token)


def model_call() -> ModelCall:
  """Mesh of the model's call that is traced; None outside of one."""
  return _CALL.get()


def product_device(operands: Sequence[Any]) -> tuple[str, str, bool]:
  """Return `device_of` for a product within a model's call.

  On a mesh of several devices it is alone only where all axes are manual.
  """
  mesh = model_call().mesh
  platform, kind, alone = device_of(CallSharding(mesh=mesh), operands)
  if mesh is not None and mesh.size > 1:
    alone = {*mesh.axis_names} <= collectives.manual_axes()
  return platform, kind, alone


def check_axis(name: str, axis: MeshAxes) -> None:
  """Refuse an `axis` that is not a name, a tuple of distinct names or None.

  An empty tuple is refused only for the sequence, where None means no axis.
  """
  min_axes = 1 if name == "axis" else 0
  distinct = isinstance(axis, tuple) and len(set(axis)) == len(axis) >= min_axes
  if not (
    axis is None
    or isinstance(axis, str)
    or (
      distinct and all(isinstance(name_of_axis, str) for name_of_axis in axis)
    )
  ):
    raise MeshError(
      name,
      repr(axis),
      "the name of a mesh axis, or a tuple of such names, the slowest first",
      f"pass e.g. {name}={'seq' if name == 'axis' else 'data'!r}",
    )


def manual(axis: MeshAxes) -> CallSharding | None:
  """Return the sharding of a call whose operands are per shard, else None."""
  check_axis("axis", axis)
  bound = axis
  if axis == AUTO:
    bound = SEQ if SEQ in collectives.manual_axes() else None
  if bound is None or not collectives.is_bound(bound):
    return None
  size = collectives.axis_size(bound)
  return CallSharding(axis=bound, manual=True, size=size)


def shards_of(axis: MeshAxes) -> int:
  """Number of shards of the axis if operands are per shard, else 1."""
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
  """Find how a call with [B, T, heads, H] `operands` is sharded.

  Args:
    operands: Arrays, the queries first.
    mesh: Mesh that the caller passed, or None.
    axis: Mesh axis of the sequence; `AUTO` to find it, None for none.
    required: Whether an axis must be found; otherwise the call may be local.
    name: Name of the first operand in error messages.
    batch_axis: Mesh axes of the batch; None: those of explicit types.
    head_axis: Mesh axes of the heads; None: those of explicit types.
    by_name: Whether a manual axis called "seq" is used; otherwise shards of
      any manual axis are refused.

  Raises:
    MeshError: If there is no such axis, or it shards two dimensions.
  """
  shares = {"batch_axis": batch_axis, "head_axis": head_axis}
  named_axes = {
    argument: axes for argument, axes in shares.items() if axes is not None
  }
  for argument, axes in named_axes.items():
    check_axis(argument, axes)
  first = next(iter(named_axes), "axis")
  per_shard = manual(axis) if by_name or axis != AUTO else None
  if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
    raise MeshError(
      "mesh",
      type(mesh).__name__,
      "a jax.sharding.Mesh",
      "build one with rj.make_mesh or jax.make_mesh",
    )
  if per_shard is not None:
    if named_axes:
      raise MeshError(
        first,
        f"{named_axes[first]!r} for operands that are per shard",
        "operands of a whole mesh",
        "leave it out inside of a shard_map",
      )
    return per_shard
  specs = [sharding_of(x) for x in operands]
  operand_mesh = next((m for m, _ in specs if m is not None), None)
  context = jax.sharding.get_abstract_mesh()
  call_mesh = mesh or operand_mesh or (None if context.empty else context)
  if context.manual_axes:
    # A nested shard_map is on the same mesh, as the outer one shows it.
    _check_same(mesh, context)
    call_mesh = context
  if call_mesh is None:
    axis_named = axis not in (None, AUTO)
    if axis_named or required or named_axes:
      value = named_axes.get(first, axis if axis_named else None)
      raise MeshError(
        first,
        f"{value!r} outside of any mesh",
        "a mesh with that axis",
        "pass mesh=, or enter one with jax.set_mesh(mesh)",
      )
    return CallSharding()
  if axis == AUTO:
    used = [n for axes in named_axes.values() for n in collectives.names(axes)]
    axis = _sequence_axis(specs, call_mesh, mesh is not None, used, required)
    if not by_name and context.manual_axes:
      axis = _not_manual(axis, specs, operands)
  if axis is None and required:
    raise MeshError(
      "axis",
      f"None, and no 'seq' among the mesh axes {call_mesh.axis_names}",
      "the mesh axis that shards the sequence",
      "pass one of them as axis=",
    )
  _check_names("axis", axis, call_mesh)
  explicit = [
    a
    for a, kind in zip(call_mesh.axis_names, call_mesh.axis_types, strict=True)
    if kind == AxisType.Explicit
  ]
  if axis is None and not explicit and not named_axes:
    return CallSharding()
  spec = next((spec for m, spec in specs if m is not None), ()) or ()
  explicit_axes = lambda i: tuple(
    a for a in (spec[i] if i < len(spec) else ()) if a in explicit
  )
  batch, heads = (
    _check_names(argument, named_axes[argument], call_mesh)
    if argument in named_axes
    else explicit_axes(i)
    for i, argument in ((0, "batch_axis"), (2, "head_axis"))
  )
  if named_axes:
    _check_disjoint(axis, batch, heads)
    _check_divides(operands, call_mesh, name, batch, heads)
  if {*collectives.names(axis)} & {*batch, *heads}:
    raise MeshError(
      name,
      f"a sharding that uses {axis!r} for the batch or the heads",
      "that axis for the sequence only",
      f"reshard {name}, or name the sequence's axis with axis=",
    )
  return CallSharding(
    axis=axis,
    mesh=call_mesh,
    size=math.prod(call_mesh.shape[name] for name in collectives.names(axis)),
    batch=batch,
    heads=heads,
    fully_manual=bool(named_axes),
  )


def _not_manual(
  axis: MeshAxes, specs: list[Any], operands: Sequence[Any]
) -> MeshAxes:
  """Return the axis that was found, unless a surrounding shard_map owns it.

  Raises:
    MeshError: If operands are, or may be, the shards of a manual axis.
  """
  free = not {*collectives.names(axis)} & collectives.manual_axes()
  if not (free and any(s and len(s) > 1 and s[1] for _, s in specs)):
    refuse_shards("query, key, value", operands, "axis={}", SEQ)
  return axis if free else None


def refuse_shards(name: str, x: PyTree, spelling: str, axis: str) -> None:
  """Refuse operands that are the shards of a shard_map's manual axes.

  It is not known which dimension they shard. `spelling` is the argument to
  suggest, with a gap for the axis; `axis` is an example.

  Raises:
    MeshError: If they vary over manual axes, or that is unknown.
  """
  axes = sorted(collectives.manual_axes())
  varying = sorted(collectives.varying_axes(x))
  # Without check_vma JAX tracks no variation over axes.
  tracked = all(
    a in collectives.varying_axes(collectives.axis_index(a)) for a in axes
  )
  if not axes or (tracked and not varying):
    return
  shard_axes = varying or axes
  example = axis if axis in shard_axes else shard_axes[0]
  raise MeshError(
    name,
    f"shards in a shard_map over the axes {', '.join(map(repr, shard_axes))}, "
    "and no axis",
    "whether the sequence is sharded over one of them",
    f"pass {spelling.format(repr(example))} for attention over the shards "
    f"of that axis, or {spelling.format(None)} for attention within each "
    "shard",
  )


def _check_same(
  mesh: Mesh | AbstractMesh | None, ambient_mesh: Mesh | AbstractMesh | None
) -> None:
  """Refuse a mesh that differs from that of the shard_map around the call."""
  shape = lambda any_mesh: tuple(
    zip(any_mesh.axis_names, any_mesh.axis_sizes, strict=True)
  )
  if mesh is not None and shape(mesh) != shape(ambient_mesh):
    raise MeshError(
      "mesh",
      f"one of {shape(mesh)} inside of a shard_map over {shape(ambient_mesh)}",
      "the mesh of that shard_map",
      "leave mesh out",
    )


def _check_names(
  argument: str, axes: MeshAxes, mesh: Mesh | AbstractMesh
) -> tuple[str, ...]:
  """Return the axes that a caller named, which have to be the mesh's."""
  names = collectives.names(axes)
  if any(axis_name not in mesh.axis_names for axis_name in names):
    raise MeshError(
      argument,
      repr(axes),
      f"one of the mesh axes {mesh.axis_names}",
      "rename the axis or pass another mesh",
    )
  return names


def _check_disjoint(
  axis: MeshAxes, batch: tuple[str, ...], heads: tuple[str, ...]
) -> None:
  """Refuse a mesh axis that would shard two dimensions."""
  uses = [*collectives.names(axis), *batch, *heads]
  twice = next(
    (axis_name for axis_name in uses if uses.count(axis_name) > 1), None
  )
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
  """Refuse a batch or query heads that their shards do not divide."""
  b, _, n, _ = operands[0].shape
  for dimension, length, axes in (("examples", b, batch), ("heads", n, heads)):
    size = math.prod(mesh.shape[axis_name] for axis_name in axes)
    if length % size:
      raise MeshError(
        name,
        f"{length} {dimension} over the {size} shards of {axes}",
        "a multiple of the shards",
        "leave that axis out, or pad",
      )


def sharding_of(
  x: Shaped[Array | jax.ShapeDtypeStruct, " ..."],
) -> tuple[Any, tuple[tuple[str, ...], ...] | None]:
  """Return an operand's (mesh, mesh axes of each dimension), or (None, ()).

  A concrete array and a `jax.ShapeDtypeStruct` have a sharding. The type of a
  traced array names the mesh of the arguments that it is computed from, and the
  explicit axes that shard it; which dimensions automatic axes shard only the
  compiler knows: then None stands for the axes of the dimensions.
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
  operand_shardings: list[Any],
  mesh: Mesh | AbstractMesh,
  mesh_given: bool,
  used: Sequence[str],
  required: bool,
) -> MeshAxes:
  """Return the axis of the operands' second dimension, else the mesh's."""
  for _, spec in operand_shardings:
    if spec is not None and len(spec) > 1 and spec[1]:
      return spec[1] if len(spec[1]) > 1 else spec[1][0]
  if mesh_given or any(spec is None for _, spec in operand_shardings):
    return sequence_axis(mesh, used, required)
  return SEQ if SEQ in mesh.axis_names else None

"""Reads experts' tensors straight into the shards that hold their experts.

Guarantees: the arrays are those that reading every tensor everywhere gives; a
process reads the tensors of its devices' experts alone, and of them only the
ranges that these devices hold.
Cost: one program and one array for each expert of a shard, not for each expert.
Memory: in host memory one tensor, or its range, for each device of a process.

Where each expert has a separate tensor, its number is an index into a parameter
[..., E, ...] that is sharded over E, so no slice of the tensor says which
device needs it. A group takes the n-th expert of every shard, one tensor for
each, as an array that is sharded over its first axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from ringjax.models.contents import Contents
from ringjax.models.gguf.gguf_folder import GgufFolder
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.tensors import CheckpointTensor
from ringjax.nn.param import axis_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertGroup:
  """Tensors of the n-th expert of each shard, of equal forms.

  Attributes:
    tensors: Tensors by their shard.
    axes: Mesh axes that shard the experts, the last one moving fastest.
    index: Index in a shard's part of each parameter, the expert last.
  """

  tensors: tuple[CheckpointTensor, ...]
  axes: tuple[str, ...]
  index: tuple[int, ...]

  @property
  def paths(self) -> tuple[str, ...]:
    """Paths of the parameters that the tensors are parts of."""
    return tuple(path for path, _ in self.tensors[0].targets)


def expert_groups(
  model_contents: Contents,
  params: Mapping[str, Any],
  shardings: Mapping[str, Any],
  mesh: Mesh | None,
) -> tuple[list[ExpertGroup], Contents]:
  """Split tensors into those of sharded experts and the others.

  Args:
    model_contents: Folder, and its tensors.
    params: Parameters by their paths.
    shardings: Sharding of each parameter; None on one device.
    mesh: Mesh of the shardings; None for one device.

  Returns:
    Groups in the order of their tensors, and the contents without them. No
    groups without a mesh, and of a GGUF file, whose experts are one tensor.
  """
  if mesh is None or isinstance(model_contents.folder, GgufFolder):
    return [], model_contents
  by_place: dict[Any, dict[int, CheckpointTensor]] = {}
  others = []
  for t in model_contents.tensors:
    place = _place(t, params, shardings, mesh)
    if place is None:
      others.append(t)
      continue
    shard, key = place
    by_place.setdefault(key, {})[shard] = t
  groups = []
  for (_, axes, index), tensors in by_place.items():
    shards = math.prod(mesh.shape[a] for a in axes)
    forms = {t.form for t in tensors.values()}
    if len(tensors) != shards or len(forms) > 1:
      others.extend(tensors.values())
      continue
    ordered = tuple(tensors[n] for n in range(shards))
    groups.append(ExpertGroup(tensors=ordered, axes=axes, index=index))
  return groups, dataclasses.replace(model_contents, tensors=others)


def _place(
  t: CheckpointTensor,
  params: Mapping[str, Any],
  shardings: Mapping[str, Any],
  mesh: Mesh,
) -> tuple[int, Any] | None:
  """(shard, key of the group) of an expert's tensor; None for other tensors."""
  path, index = t.targets[0]
  param = params[path]
  axes = param.get_metadata()["axes"]
  shape = param.get_value().shape
  if "experts" not in axes:
    return None
  at = len(shape) - len(axes) + axes.index("experts")
  spec = shardings[path].spec
  over = axis_names(spec[at]) if at < len(spec) else ()
  # Tensors of all experts, and those of a part of an expert, are others.
  if not over or len(index) != at + 1:
    return None
  if any(part_index != index for _, part_index in t.targets):
    return None
  local = shape[at] // math.prod(mesh.shape[a] for a in over)
  shard, number = divmod(index[-1], local)
  paths = tuple(path for path, _ in t.targets)
  return shard, (paths, over, (*index[:-1], number))


def read_groups(
  groups: list[ExpertGroup],
  model_contents: Contents,
  targets: Callable[[CheckpointTensor], Mapping[str, jax.ShapeDtypeStruct]],
) -> Iterator[tuple[ExpertGroup, tuple[Shaped[Array, " ..."], ...]]]:
  """Read the tensors of groups, one group after another.

  Args:
    groups: Groups of `expert_groups`.
    model_contents: Folder of the tensors.
    targets: Function from a tensor to its pieces as device arrays, by name.

  Yields:
    Each group with the arrays of its pieces, [R, ...] for R shards.
  """
  for group in groups:
    pieces = zip(*(t.pieces for t in group.tensors), strict=True)
    shapes = list(targets(group.tensors[0]).values())
    arrays = []
    for of_shards, target in zip(pieces, shapes, strict=True):
      sharding: Any = target.sharding
      spec = P(group.axes, *sharding.spec)
      names = [piece.name for piece in of_shards]
      arrays.append(
        model_contents.folder.read_stacked(
          names, target, NamedSharding(sharding.mesh, spec)
        )
      )
    yield group, tuple(arrays)


def put_group(
  group: ExpertGroup,
  arrays: Mapping[str, Shaped[Array, " ..."]],
  x: tuple[Shaped[Array, " ..."], ...],
  shardings: Mapping[str, Any],
) -> tuple[Shaped[Array, " ..."], ...]:
  """Put a group's tensors into the parameters, which are donated.

  Args:
    group: Group of tensors.
    arrays: Arrays of the parameters, by their paths.
    x: Arrays of the group's pieces, [R, ...].
    shardings: Sharding of each parameter.

  Returns:
    The arrays of `group.paths`.
  """
  return _put(
    group.tensors[0].form,
    group.axes,
    len(group.index) - 1,
    tuple(shardings[path] for path in group.paths),
    tuple(arrays[path] for path in group.paths),
    x,
    tuple(jnp.int32(n) for n in group.index),
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(4,))
def _put(
  form: Any,
  axes: tuple[str, ...],
  at: int,
  shardings: tuple[Any, ...],
  leaves: tuple[jax.Array, ...],
  x: tuple[jax.Array, ...],
  index: tuple[Int[Array, ""], ...],
) -> tuple[jax.Array, ...]:
  """Put one expert on each shard into arrays, sharded over axis `at`."""

  def local(
    leaves: tuple[jax.Array, ...],
    x: tuple[jax.Array, ...],
    index: tuple[jax.Array, ...],
  ) -> tuple[jax.Array, ...]:
    x = tuple(a[0] for a in x)
    parts = form.split(x if isinstance(form, Packed) else x[0])
    updated = []
    for part, leaf in zip(parts, leaves, strict=True):
      part = part.astype(leaf.dtype)[(None,) * len(index)]
      start = [*index, *[jnp.int32(0)] * (leaf.ndim - len(index))]
      updated.append(lax.dynamic_update_slice(leaf, part, start))
    return tuple(updated)

  spec = P(*[None] * at, axes)
  put = jax.shard_map(
    local,
    mesh=shardings[0].mesh,
    in_specs=(spec, P(axes), P()),
    out_specs=spec,
    axis_names={*axes},
  )
  updated = put(leaves, x, index)
  return tuple(
    lax.with_sharding_constraint(a, sharding)
    for a, sharding in zip(updated, shardings, strict=True)
  )

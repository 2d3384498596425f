"""Parameters with named axes, and the rules that lay the names on a mesh."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import MeshError
from ringjax.parallel.call_sharding import STAGE

# One mesh axis, several, or none.
MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Mesh axes that shard each axis of the parameters; None for none.

  An axis that they do not divide leaves the parameter replicated, and so does a
  default ("model") on a mesh without that axis; of several mesh axes as many of
  the first ones are used as divide it together. One mesh axis for two axes of a
  parameter is an error, but mesh axes that shard its experts shard nothing else
  of it: then "model" may do so, and shard the width of other feedforwards.

  Attributes:
    embed: Mesh axis for the model's width.
    heads: Mesh axis for the query heads.
    kv_heads: Mesh axis for the heads of keys and values.
    ffn: Mesh axis for the width of the feedforward.
    vocab: Mesh axis for the ids of the vocabulary.
    experts: Mesh axis for the experts of a mixture. Their weights stay there,
      and tokens go to them, see `ops.experts.expert_shards`.
    layers: Mesh axis for the layers of a run of equal ones, which rows pass in
      stages, see `nn.call_parts.stages`.
  """

  embed: MeshAxes = None
  heads: MeshAxes = "model"
  kv_heads: MeshAxes = "model"
  ffn: MeshAxes = "model"
  vocab: MeshAxes = "model"
  experts: MeshAxes = None
  layers: str | None = STAGE

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      axes = getattr(self, field.name)
      if isinstance(axes, list):
        object.__setattr__(self, field.name, tuple(axes))

  def spec(
    self,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
  ) -> P:
    """Sharding of a parameter, whose leading axes may be unnamed."""
    lead = len(shape) - len(axes)
    names = (("layers",) if lead == 1 else (None,) * lead) + tuple(axes)
    spec: list[MeshAxes] = []
    used: set[str] = set()
    of_experts: tuple[str, ...] = ()
    for name, n in zip(names, shape, strict=True):
      wanted = axis_names(getattr(self, name, None) if name else None)
      if name != "experts":
        wanted = tuple(a for a in wanted if a not in of_experts)
      dividing = _dividing(wanted, n, mesh)
      if name == "experts":
        of_experts = dividing
      if twice := used & {*dividing}:
        raise MeshError(
          "rules",
          f"mesh axis {min(twice)!r} for two axes of {axes}",
          "another mesh axis for each",
          "set one of them to None",
        )
      used |= {*dividing}
      spec.append(dividing if len(dividing) > 1 else (*dividing, None)[0])
    while spec and spec[-1] is None:
      spec.pop()
    return P(*spec)

  def check(self, mesh: Mesh) -> None:
    """Check that the mesh has all axes that were chosen explicitly.

    Raises:
      MeshError: If not; it names the mesh's axes.
    """
    for field in dataclasses.fields(self):
      axis = getattr(self, field.name)
      # Defaults apply to meshes with or without the axis.
      if axis == field.default or {*axis_names(axis)} <= {*mesh.axis_names}:
        continue
      raise MeshError(
        "rules",
        f"{field.name}={axis!r}",
        f"one of the mesh's axes {', '.join(map(repr, mesh.axis_names))}",
        "correct the name, or set it to None",
      )

  def over_experts(self, experts: int, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes that shard this number of experts."""
    return _dividing(self.experts, experts, mesh)

  def sharding(
    self, param: nnx.Variable, mesh: Mesh | AbstractMesh
  ) -> NamedSharding:
    """Sharding of a parameter of a module, abstract or not."""
    shape, metadata = param.get_value().shape, param.get_metadata()
    axes = metadata["axes"]
    # Several axes may be stored as one, of which the first has to divide.
    if "last_axis" in metadata:
      shape = (*shape[:-1], metadata["last_axis"])
    return NamedSharding(mesh, self.spec(axes, shape, mesh))


def axis_names(axes: MeshAxes) -> tuple[str, ...]:
  """Names of one mesh axis, several, or none."""
  if axes is None:
    return ()
  return (axes,) if isinstance(axes, str) else tuple(axes)


def _dividing(
  axes: MeshAxes, n: int, mesh: Mesh | AbstractMesh
) -> tuple[str, ...]:
  """First ones of some mesh axes whose sizes divide n together."""
  names: tuple[str, ...] = ()
  for name in axis_names(axes):
    size = mesh.shape.get(name, 0)
    if not size or n % (size * math.prod(mesh.shape[x] for x in names)):
      break
    names = (*names, name)
  return names


def param(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  *,
  fan_in: int | None = None,
  value: float = 0.0,
  wide: bool = False,
  by_index: bool = False,
  by_rows: bool = False,
) -> nnx.Param:
  """Make a float32 parameter: normal of variance 1/fan_in, else `value`.

  `wide` parameters stay float32 when a model is cast. Of `by_index` ones a call
  reads some entries along the first axis, so a loop over layers that computes
  no gradient passes a `LayerArray` instead of copying a layer's array; so it
  does for `by_rows` ones where rows of several calls are in `nn.row_tiles`.
  """
  assert len(shape) == len(axes), (shape, axes)
  if fan_in is None:
    data = jnp.full(shape, value, jnp.float32)
  else:
    data = jax.random.normal(rngs.params(), shape, jnp.float32)
    data = data * jnp.float32(1 / math.sqrt(fan_in))
  return nnx.Param(
    data, axes=axes, wide=wide, by_index=by_index, by_rows=by_rows
  )

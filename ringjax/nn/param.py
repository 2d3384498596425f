"""Parameters with named axes, and the rules that lay the names on a mesh."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import MeshError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Mesh axis that shards each axis of the parameters; None for none.

  An axis that it does not divide leaves the parameter replicated, and so does a
  default ("model") on a mesh without that axis. One mesh axis for two axes of
  a parameter is an error.

  Attributes:
    embed: Mesh axis for the model's width.
    heads: Mesh axis for the query heads.
    kv_heads: Mesh axis for the heads of keys and values.
    ffn: Mesh axis for the width of the feedforward.
    vocab: Mesh axis for the ids of the vocabulary.
    experts: Mesh axis for the experts of a mixture.
  """

  embed: str | None = None
  heads: str | None = "model"
  kv_heads: str | None = "model"
  ffn: str | None = "model"
  vocab: str | None = "model"
  experts: str | None = None

  def spec(
    self, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh
  ) -> P:
    """Sharding of a parameter, whose leading axes may be unnamed."""
    names = (None,) * (len(shape) - len(axes)) + tuple(axes)
    spec: list[str | None] = []
    for name, n in zip(names, shape, strict=True):
      axis = getattr(self, name, None) if name else None
      divides = axis in mesh.axis_names and n % mesh.shape[axis] == 0
      if axis is not None and divides and axis in spec:
        raise MeshError(
          "rules",
          f"mesh axis {axis!r} for two axes of {axes}",
          "another mesh axis for each",
          "set one of them to None",
        )
      spec.append(axis if divides else None)
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
      if axis is None or axis == field.default or axis in mesh.axis_names:
        continue
      raise MeshError(
        "rules",
        f"{field.name}={axis!r}",
        f"one of the mesh's axes {', '.join(map(repr, mesh.axis_names))}",
        "correct the name, or set it to None",
      )

  def sharding(self, param: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """Sharding of a parameter of a module, abstract or not."""
    shape = param.get_value().shape
    axes = param.get_metadata()["axes"]
    return NamedSharding(mesh, self.spec(axes, shape, mesh))


def param(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  *,
  fan_in: int | None = None,
  value: float = 0.0,
  wide: bool = False,
) -> nnx.Param:
  """Make a float32 parameter: normal of variance 1/fan_in, else `value`.

  `wide` parameters stay float32 when a model is cast.
  """
  assert len(shape) == len(axes), (shape, axes)
  if fan_in is None:
    data = jnp.full(shape, value, jnp.float32)
  else:
    data = jax.random.normal(rngs.params(), shape, jnp.float32)
    data = data * jnp.float32(1 / math.sqrt(fan_in))
  return nnx.Param(data, axes=axes, wide=wide)

"""Products with a sharded weight, in which all mesh axes are manual.

XLA cannot partition a kernel, so a kernel serves a product on a mesh only where
nothing is left to partition: on each shard's part of the weight.

Guarantees: `product_per_shard` equals the product with the whole weight, up to
the order of float32 sums. No part of the weight leaves its shard.
Cost: outputs that are sharded cost no communication. Inputs that are sharded
cost one sum of float32 results over their shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import ModelCall, model_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightShards:
  """Mesh axes that shard a weight [I, O].

  Attributes:
    inputs: Axes that shard its inputs, the last one moving fastest.
    outputs: Axes that shard its outputs.
  """

  inputs: tuple[str, ...] = ()
  outputs: tuple[str, ...] = ()


def product_per_shard(
  f: Callable[[Array, PyTree, bool], Array],
  x: Float[Array, "*lead I"],
  weight: PyTree,
  specs: PyTree,
  shards: WeightShards,
) -> Float[Array, "*lead O"]:
  """Product of x and a weight on each shard of the weight, by f.

  In a model's call on a mesh, f runs with all mesh axes manual. Elsewhere, or
  where an enclosing shard_map owns axes of the weight, f runs once as it is.

  Args:
    f: Function (x, weight, wide) -> x . weight, float32 if `wide`, else of x's
      dtype. It closes over no arrays.
    x: Activations, [B, T, I] in a model's call.
    weight: Arrays of the weight.
    specs: Sharding of each array of `weight`.
    shards: Axes that shard inputs and outputs in `specs`.
  """
  call, manual = model_call(), collectives.manual_axes()
  used = {*shards.inputs, *shards.outputs}
  if call.mesh is None or call.mesh.size == 1:
    return f(x, weight, False)
  free = {*call.mesh.axis_names} - manual
  if not free or not used <= free:
    return f(x, weight, False)
  # A nested shard_map is on the mesh as the outer one shows it.
  mesh = jax.sharding.get_abstract_mesh() if manual else call.mesh
  lead = _row_axes(call, x, used | manual, mesh)

  def local(x: jax.Array, weight: PyTree) -> jax.Array:
    y = f(x, weight, bool(shards.inputs))
    if not shards.inputs:
      return y
    return collectives.total(y, shards.inputs).astype(x.dtype)

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P(*lead, shards.inputs or None), specs),
    out_specs=P(*lead, shards.outputs or None),
    axis_names=free,
    # Pallas' interpreter mixes arrays that vary over axes with ones that don't.
    check_vma=bool(manual),
  )(x, weight)


def _row_axes(
  call: ModelCall,
  x: Float[Array, "*lead I"],
  taken: set[str] | frozenset[str],
  mesh: Mesh | AbstractMesh,
) -> Sequence[tuple[str, ...] | None]:
  """Mesh axes of each leading axis of x, without those in `taken`."""
  count = x.ndim - 1
  if call.token_spec is None or count != 2:
    return (None,) * count
  spec = (*tuple(call.token_spec(x)), None, None)[:count]
  axes = []
  for size, entry in zip(x.shape, spec, strict=False):
    names = tuple(a for a in collectives.names(entry) if a not in taken)
    divides = size % math.prod(mesh.shape[a] for a in names) == 0
    axes.append(names if names and divides else None)
  return axes

"""Replaces linear maps of a model by other modules, in any memory tier.

Guarantees: a layer's numbers are bit for bit those that it would have with all
layers on the devices.
Cost: layers on the devices and in the host's memory are changed once. Those on
disk are stored unchanged, and are changed each time that they are read.
Memory: one layer at a time on the devices, next to the model; codes of layers
in the host's memory replace their floats once all layers of a kind are done.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import IN_HOST
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import Transformer
from ringjax.models.weights.linear_maps import maps_of, replaced
from ringjax.models.weights.streaming import in_host
from ringjax.nn.block import Block
from ringjax.nn.linear import Linear
from ringjax.nn.param import axis_names
from ringjax.nn.weights.placed_layers import PlacedLayers

# Makes the replacement of a map, whose weight is that of stacked layers.
Make = Callable[[Linear], nnx.Module]


def with_maps(model: Transformer, make: Mapping[str, Make]) -> Transformer:
  """Replaces some linear maps of a model by other modules.

  Args:
    model: Model; the result shares its other weights.
    make: Functions that make the modules, by path, see `rounded_maps`.

  Raises:
    OptionError: If a model with placed layers has adapters.
  """
  maps = {**maps_of(model.stack, "stack.")}
  result = replaced(model, {path: f(maps[path]) for path, f in make.items()})
  stack = model.stack
  if stack.placed is None:
    return result
  placed, hosted = [], []
  for g, kinds in enumerate(stack.placed):
    new_kinds, arrays = [], []
    for p, kind in enumerate(kinds):
      prefix = f"stack.blocks.{g}.{p}."
      kind_make = {
        path.removeprefix(prefix): f
        for path, f in make.items()
        if path.startswith(prefix)
      }
      if kind is None or not kind_make:
        new_kinds.append(kind)
        arrays.append(stack.hosted[g][p])
        continue
      change = _Change(
        stack.blocks[g][p], result.stack.blocks[g][p], kind, kind_make
      )
      new_kinds.append(change.kind())
      arrays.append(change.hosted(model, g, p))
    placed.append(tuple(new_kinds))
    hosted.append(tuple(arrays))
  result.stack = copy.copy(result.stack)
  result.stack.placed = tuple(placed)
  result.stack.hosted = nnx.data(tuple(hosted))
  return result


class _Change:
  """Replacement of the maps of one kind of layers."""

  def __init__(
    self,
    block: Block,
    changed: Block,
    kind: PlacedLayers,
    make: Mapping[str, Make],
  ):
    """Checks the layers and derives the new shapes and shardings.

    Args:
      block: Block of the layers on the devices.
      changed: Block with the other modules.
      kind: Placement of the layers.
      make: Functions that make the modules, by their paths in the block.
    """
    params, self._tree = jax.tree.flatten(
      block, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    # Without arrays: the readers of disk layers keep this object alive.
    self._params = [p.replace(None) for p in params]
    old_params = parameters(block)
    if tuple(old_params) != kind.paths:
      raise OptionError(
        "model",
        "one with adapters, whose layers are in host memory or on disk",
        "one without adapters",
        "round the model that rj.models.load returns",
      )
    self._kind, self._make = kind, make
    # Parameters that are shared by all layers stay on the devices.
    self._new = {
      path: p.replace(jax.typeof(p.get_value()))
      for path, p in parameters(changed).items()
      if not p.get_metadata().get("every")
    }
    self._specs = dict(zip(kind.paths, kind.specs, strict=True))
    for path in make:
      self._specs |= self._of_map(path, old_params)

  def _of_map(
    self, path: str, old_params: Mapping[str, nnx.Variable]
  ) -> dict[str, P]:
    """Shardings of the parameters that replace a map's."""
    name = path if path in old_params else f"{path}.weight"
    spec, mesh = tuple(self._specs[name]), self._kind.mesh
    axis_sizes = {} if mesh is None else dict(mesh.shape)
    named = dict(
      zip(old_params[name].get_metadata()["axes"], spec, strict=False)
    )
    specs = {}
    for key, p in self._new.items():
      if not key.startswith(f"{path}.") or key in old_params:
        continue
      cuts = [
        cut
        if (cut := named.get(axis))
        and n % math.prod(axis_sizes[a] for a in axis_names(cut)) == 0
        else None
        for axis, n in zip(
          p.get_metadata()["axes"], p.get_value().shape[1:], strict=True
        )
      ]
      specs[key] = P(*cuts)
    return specs

  def layers(self, arrays: Sequence[Shaped[Array, "L ..."]]) -> list[jax.Array]:
    """New parameters of some layers, from the old ones."""
    block = jax.tree.unflatten(
      self._tree,
      [p.replace(x) for p, x in zip(self._params, arrays, strict=True)],
    )
    maps = maps_of(block, "")
    changed = replaced(block, {k: f(maps[k]) for k, f in self._make.items()})
    new_params = parameters(changed)
    return [new_params[path].get_value() for path in self._new]

  def kind(self) -> PlacedLayers:
    """The placement with new shapes, shardings and weights."""

    def read(weights: Any, stored: Sequence[jax.Array]) -> list[jax.Array]:
      layers = self.layers([x[None] for x in weights(stored)])
      return [x[0] for x in layers]

    return dataclasses.replace(
      self._kind,
      paths=tuple(self._new),
      shapes=tuple(
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for x in (p.get_value() for p in self._new.values())
      ),
      specs=tuple(self._specs[path] for path in self._new),
      disk=tuple(
        dataclasses.replace(part, weights=functools.partial(read, part.weights))
        for part in self._kind.disk
      ),
    )

  def hosted(self, model: Transformer, g: int, p: int) -> tuple[Any, ...]:
    """The new parameters of layers in the host's memory."""
    count = self._kind.tiers.count(IN_HOST)
    if not count:
      return ()
    mesh = self._kind.mesh
    stacked = [
      None if mesh is None else NamedSharding(mesh, P(None, *self._specs[path]))
      for path in self._new
    ]

    @jax.jit
    def new_layer(stack: Any, n: jax.Array) -> list[jax.Array]:
      block = stack.layer(g, p, n)
      layers = self.layers([x[None] for x in jax.tree.leaves(block)])
      if mesh is None:
        return layers
      return [
        jax.lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(layers, stacked, strict=True)
      ]

    host_arrays = [
      np.zeros((count, *x.get_value().shape[1:]), x.get_value().dtype)
      for x in self._new.values()
    ]
    for n, tier in enumerate(self._kind.tiers):
      if tier != IN_HOST:
        continue
      rank = self._kind.rank(n)
      for out, x in zip(
        host_arrays, new_layer(model.stack, jnp.int32(n)), strict=True
      ):
        for shard in x.addressable_shards:
          out[rank : rank + 1][shard.index] = np.asarray(shard.data)
    return tuple(map(in_host, host_arrays, stacked))

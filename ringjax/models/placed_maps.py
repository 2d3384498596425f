"""Other modules in place of linear maps, wherever a model's layers are.

Guarantees: a layer has the numbers that it would have if all of them were on
the devices, to the bit.
Cost: layers on the devices and in the host's memory are changed once. Those on
disk stay as they are there: they are changed whenever they are read.
Memory: one layer at a time on the devices, beside the model; codes of layers
in the host's memory take the place of their floats once a kind of layers is
done.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
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
from ringjax.models.linear_maps import maps_of, replaced
from ringjax.models.streaming import in_host
from ringjax.models.transformer import Transformer
from ringjax.nn.block import Block
from ringjax.nn.linear import Linear
from ringjax.nn.placed import PlacedLayers

# What takes the place of a map, whose weight is that of any number of layers.
Make = Callable[[Linear], nnx.Module]


def with_maps(model: Transformer, make: Mapping[str, Make]) -> Transformer:
  """The model with other modules in place of some maps.

  Args:
    model: the model; it shares the rest.
    make: by path, see `rounded_maps`, what makes them.

  Raises:
    OptionError: adapters in a model some of whose layers are fetched.
  """
  found = {**maps_of(model.stack, "stack.")}
  made = replaced(model, {path: f(found[path]) for path, f in make.items()})
  stack = model.stack
  if stack.placed is None:
    return made
  placed, hosted = [], []
  for g, kinds in enumerate(stack.placed):
    new, arrays = [], []
    for p, kind in enumerate(kinds):
      prefix = f"stack.blocks.{g}.{p}."
      mine = {
        path.removeprefix(prefix): f
        for path, f in make.items()
        if path.startswith(prefix)
      }
      if kind is None or not mine:
        new.append(kind)
        arrays.append(stack.hosted[g][p])
        continue
      change = _Change(stack.blocks[g][p], made.stack.blocks[g][p], kind, mine)
      new.append(change.kind())
      arrays.append(change.hosted(model, g, p))
    placed.append(tuple(new))
    hosted.append(tuple(arrays))
  made.stack = copy.copy(made.stack)
  made.stack.placed = tuple(placed)
  made.stack.hosted = nnx.data(tuple(hosted))
  return made


class _Change:
  """How the layers of a kind become others."""

  def __init__(
    self,
    block: Block,
    made: Block,
    kind: PlacedLayers,
    make: Mapping[str, Make],
  ):
    """Prepares.

    Args:
      block: of the layers on the devices.
      made: the same with other modules.
      kind: where the layers are.
      make: what makes the modules, by their paths in the block.
    """
    params, self._tree = jax.tree.flatten(
      block, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    # Without numbers: what is read from disk holds on to this object.
    self._params = [p.replace(None) for p in params]
    before = parameters(block)
    if tuple(before) != kind.paths:
      raise OptionError(
        "model",
        "one with adapters, whose layers are in host memory or on disk",
        "one without adapters",
        "round the model that rj.models.load returns",
      )
    self._kind, self._make = kind, make
    # What is of every layer stays on the devices.
    self._new = {
      path: p.replace(jax.typeof(p.get_value()))
      for path, p in parameters(made).items()
      if not p.get_metadata().get("every")
    }
    self._specs = dict(zip(kind.paths, kind.specs, strict=True))
    for path in make:
      self._specs |= self._of_map(path, before)

  def _of_map(
    self, path: str, before: Mapping[str, nnx.Variable]
  ) -> dict[str, P]:
    """The shardings of what is there in place of a map."""
    name = path if path in before else f"{path}.weight"
    spec, mesh = tuple(self._specs[name]), self._kind.mesh
    named = dict(zip(before[name].get_metadata()["axes"], spec, strict=False))
    found = {}
    for key, p in self._new.items():
      if not key.startswith(f"{path}.") or key in before:
        continue
      cuts = [
        cut
        if (cut := named.get(axis)) and n % mesh.shape[cut] == 0  # pyrefly: ignore
        else None
        for axis, n in zip(
          p.get_metadata()["axes"], p.get_value().shape[1:], strict=True
        )
      ]
      found[key] = P(*cuts)
    return found

  def layers(self, arrays: Sequence[Shaped[Array, "L ..."]]) -> list[jax.Array]:
    """The new parameters of some layers, from what they have been."""
    block = jax.tree.unflatten(
      self._tree,
      [p.replace(x) for p, x in zip(self._params, arrays, strict=True)],
    )
    found = maps_of(block, "")
    made = replaced(block, {k: f(found[k]) for k, f in self._make.items()})
    after = parameters(made)
    return [after[path].get_value() for path in self._new]

  def kind(self) -> PlacedLayers:
    """Where the new layers are: where they have been."""

    def read(weights: Any, found: Sequence[jax.Array]) -> list[jax.Array]:
      made = self.layers([x[None] for x in weights(found)])
      return [x[0] for x in made]

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
    """The new layers that are in the host's memory."""
    count = self._kind.tiers.count(IN_HOST)
    if not count:
      return ()
    mesh = self._kind.mesh
    stacked = [
      None if mesh is None else NamedSharding(mesh, P(None, *self._specs[path]))
      for path in self._new
    ]

    @jax.jit
    def one(stack: Any, n: jax.Array) -> list[jax.Array]:
      block = stack.layer(g, p, n)
      made = self.layers([x[None] for x in jax.tree.leaves(block)])
      if mesh is None:
        return made
      return [
        jax.lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(made, stacked, strict=True)
      ]

    held = [
      np.zeros((count, *x.get_value().shape[1:]), x.get_value().dtype)
      for x in self._new.values()
    ]
    for n, tier in enumerate(self._kind.tiers):
      if tier != IN_HOST:
        continue
      rank = self._kind.rank(n)
      for out, x in zip(held, one(model.stack, jnp.int32(n)), strict=True):
        for shard in x.addressable_shards:
          out[rank : rank + 1][shard.index] = np.asarray(shard.data)
    return tuple(map(in_host, held, stacked))

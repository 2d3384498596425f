"""Tensor-parallel layers that sum over shards by explicit sends.

Guarantees: the layers' results, with sums in another order.
Cost: as many bytes as a ring all-reduce. The compiler overlaps sends with work
that does not depend on them, for instance of another group of rows, but does
not overlap a sum that it makes itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  RowwiseLayer,
  ShardingContext,
)
from ringjax.ops.feedforward import blockwise_feedforward
from ringjax.parallel import collectives

_MODEL = "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SplitSums(ShardingContext):
  """Sums over the mesh's axis "model" by sends, see the module's docstring."""

  def summed(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> jax.Array:
    return self._summed(f, f, x, P(None, None, _MODEL))

  def summed_rowwise(
    self, layer: RowwiseLayer, x: Shaped[Array, "B T D"]
  ) -> jax.Array:
    f = lambda layer, x: blockwise_feedforward(layer.row, x, self.block)
    return self._summed(layer, f, x, P())

  def _summed(self, module: Any, f: Any, x: jax.Array, spec: P) -> jax.Array:
    """Sum f(module, x) over the shards' parts of a module and of x."""
    mesh: Any = self.mesh
    variables, tree = jax.tree.flatten(
      module, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    specs = [Rules().sharding(v, mesh).spec for v in variables]

    def local(values: list[jax.Array], x: jax.Array) -> jax.Array:
      first = collectives.axis_index(_MODEL) == 0
      # Replicated arrays count once: the bias of the sum.
      shard_variables = [
        v.replace(y if s != P() else jnp.where(first, y, jnp.zeros_like(y)))
        for v, s, y in zip(variables, specs, values, strict=True)
      ]
      built = jax.tree.unflatten(tree, shard_variables)
      part = built(x) if f is module else f(built, x)
      rows = part.reshape(-1, part.shape[-1])
      return collectives.sum_by_sends(rows, _MODEL).reshape(part.shape)

    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(specs, spec),
      out_specs=P(),
      axis_names={_MODEL},
      # The sends give equal results on all shards, which JAX can't know.
      check_vma=False,
    )([v.get_value() for v in variables], x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSums(_SplitSums, ContextParallel):
  """Sums by sends where the call's own keys travel: whole prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedSplitSums(_SplitSums, CachedAttention):
  """Sums by sends where keys stay in a cache: chunked prefill and decode."""

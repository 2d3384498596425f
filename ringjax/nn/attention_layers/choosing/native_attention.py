"""Grouped-query attention to compressed, chosen and near keys (NSA).

Guarantees: the output is the sum, by gates, of attention to one compressed key
for each window of keys, to the blocks that this attention weighs most, and to
the nearest keys. A compressed key is a weighted sum of the rotated keys of its
window, with weights for each kv head and dim that begin as a mean; so is its
value. Gates are sigmoids of maps of the layer's input, for each query head;
without training they are those of `FIRST_GATES`. All three branches read the
same keys and values, where the paper has separate ones.
Ref:  Yuan et al. 2025, Native Sparse Attention, arXiv 2502.11089.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  SummaryAttention,
  SummaryQuery,
  refuse_tree,
)
from ringjax.nn.linear import Linear
from ringjax.nn.param import param
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.native_reading import (
  BRANCHES,
  NativeReading,
  PoolingWeights,
)
from ringjax.ops.attention.cached.summaries.window_sums import (
  WindowSizes,
  WindowWeights,
)
from ringjax.ops.attention.sparse.native_sparse import NativeSparse

# Gates of the compressed keys, the chosen blocks and the window at first.
FIRST_GATES = (0.1, 0.45, 0.45)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeAttention(SummaryAttention):
  """Native sparse attention of one layer.

  Attributes:
    sizes: Sizes of compressed keys, of blocks and of the window.
  """

  sizes: NativeSparse

  @classmethod
  def of(cls, attention: object, **sizes: int) -> NativeAttention:
    """Give a layer compressed keys, chosen blocks and a window.

    Args:
      attention: `Attention` whose queries see all keys before them.
      **sizes: Fields of `NativeSparse`.

    Raises:
      OptionError: If the layer cannot choose its keys, has a soft cap, or the
        sizes do not fit each other.
    """
    fields = cls.fields_of(attention)
    if fields["soft_cap"] is not None:
      raise OptionError(
        "sparse_attention",
        f"'nsa' for a layer with a soft cap of {fields['soft_cap']}",
        "layers without a soft cap of their logits",
        "pass 'index' or 'moba', or use another model",
      )
    return cls(**fields, sizes=NativeSparse(**sizes))

  @property
  def windows(self) -> WindowSizes:
    return WindowSizes(self.sizes.stride, self.sizes.length)

  @property
  def summarizes_values(self) -> bool:
    return True

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    key_limit = self.sizes.block * self.sizes.count + self.sizes.window
    reading = dataclasses.replace(
      shape.reading,
      most=key_limit,
      chooser="attention to compressed keys",
      plain=False,
    )
    return dataclasses.replace(shape, reading=reading)

  def build(self, rngs: nnx.Rngs, embed: int) -> NativeQuery:
    return NativeQuery(rngs, self, embed)


class NativeBranches(nnx.Module):
  """Gates of the three branches, and weights of compressed keys and values."""

  def __init__(self, rngs: nnx.Rngs, spec: NativeAttention, embed: int):
    n, k, length = spec.heads, spec.kv_heads, spec.sizes.length
    outputs, axes = (n, BRANCHES), ("embed", "heads", None)
    self.gates = Linear(rngs, (embed,), outputs, axes, bias=True)
    # Zeros: at first the gates do not depend on the input.
    self.gates.weight = param(rngs, (embed, *outputs), axes, by_rows=True)
    pool = lambda dim: param(
      rngs, (length, k, dim), (None, "kv_heads", None), value=1 / length
    )
    self.keys, self.values = pool(spec.head_dim), pool(spec.value)

  def gate(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N 3"]:
    """Gates of a layer's input."""
    first = jnp.asarray([math.log(g / (1 - g)) for g in FIRST_GATES], x.dtype)
    return jax.nn.sigmoid(self.gates(x) + first[None, None, None])

  @property
  def pooling(self) -> PoolingWeights:
    """Weights of compressed keys and values."""
    return PoolingWeights(self.keys[...], self.values[...])


class NativeQuery(SummaryQuery):
  """The module of `NativeAttention`."""

  def __init__(self, rngs: nnx.Rngs, spec: NativeAttention, embed: int):
    super().__init__(rngs, spec, embed)
    self.native = NativeBranches(rngs, spec, embed)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[LayerCache, Any],
    attend: Attend,
  ) -> tuple[Float[Array, "B T _"], tuple[LayerCache, Any]]:
    """[B, T, D] and the layer's caches: of its keys and of compressed ones."""
    spec: Any = self.spec
    refuse_tree(tokens)
    (q, k, v), gates = attend.rows(self._gated_maps, x)
    weights = self.native.pooling
    q, cache, summaries = self._appended_with_summaries(
      q, k, v, tokens, cache, attend, WindowWeights(*weights)
    )
    reading = NativeReading(
      config=spec.sizes, gates=gates, weights=weights, summaries=summaries
    )
    out = self._seen(q, tokens, cache[0], attend, reading)
    return self._projected(x, out, attend), cache

  def _gated_maps(self, x: Float[Array, "B T D"]) -> tuple[Any, Array]:
    """Project to queries, keys and values, and to gates."""
    return self._maps(x), self.native.gate(x)

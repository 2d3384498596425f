"""What a codec does to a model, at the speed of a call without a cache.

Guarantees: each key and value is what decoding its code gives, so that the
logits are those of a cache of that kind into which the tokens go one by one.
Memory: that of a call without a cache; nothing is stored.

For measuring what a codec costs in loss: a text is read in one call, on any
mesh and with any strategy of attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import FreshLayer, NoCache
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.state import StateShape
from ringjax.ops.rope import Rotation


@dataclasses.dataclass(frozen=True)
class SimulatedCache(NoCache):
  """A cache of some kind that keeps nothing, as `cache=` of a model's call.

  Attributes:
    constants: for each kind of layer the numbers of its codecs, [L, K, n].
    kind: of the cache.
  """

  constants: tuple[Any, ...]
  kind: CacheKind

  @classmethod
  def create(cls, model: Any, kind: CacheKind | str) -> SimulatedCache:
    """For the calls of a `Transformer`.

    Raises:
      OptionError: a kind without a codec.
    """
    found: CacheKind = model.cache_kind(kind)
    codec = found.codec
    if codec is None:
      raise OptionError(
        "kind", str(found), "one with a codec", "call the model without a cache"
      )
    constants = tuple(
      ((), ()) if isinstance(shape, StateShape) else codec.constants(n, shape)
      for n, shape in enumerate(model.kinds)
    )
    return cls(jax.tree.map(jnp.asarray, constants), found)

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * len(self.constants)

  def layer(self, kind: int, slots: Any, index: Any) -> FreshLayer:
    del slots
    codec, unrotated = self.kind.codec, self.kind.unrotated
    assert codec is not None
    one = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    of_k, of_v = jax.tree.map(one, self.constants[kind])

    def through(vectors: Any, x: jax.Array, constants: Any) -> jax.Array:
      if not x.shape[-1]:
        return x
      data = vectors.encode(x, constants)
      return vectors.decode(data, x.shape[-1], x.dtype, constants)

    def change(k: jax.Array, v: jax.Array, rotation: Rotation) -> Any:
      k = k if unrotated else rotation.own(k)
      k = through(codec.keys, k, of_k)
      k = rotation.own(k) if unrotated else k
      return k, through(codec.values, v, of_v), ()

    return FreshLayer(change=change)


tree.register(SimulatedCache, ("constants",), ("kind",))

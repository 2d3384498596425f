"""Keys and values on their way between shards."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.scores import Context
from ringjax.ops.attention.wire_format import WireFormat
from ringjax.ops.mask import Coords


class KVBlock(NamedTuple):
  """Keys and values on their way, in the order of axes of `Local`.

  Fields:
    kv: [2, B, K, S, H], or the pair (k, v) where the head dims differ; as the
      wire writes them.
    at: int32 [2, B or 1, S], or the pair (pos, seg) where shapes differ.
  """

  kv: Any
  at: Any

  @property
  def axis_of_tokens(self) -> int:
    """The dimension of `at` that runs over tokens."""
    return 1 if isinstance(self.at, tuple) else 2

  @classmethod
  def of(
    cls, x: Local, context: Context, wire: WireFormat | None = None
  ) -> KVBlock:
    """A shard's own keys."""
    kv = pack(x.k, x.v)
    if wire is not None:
      kv = jax.tree.map(wire.encode, kv)
    return cls(kv, pack(*context.k))

  def seen_by(
    self, x: Local, context: Context, wire: WireFormat | None = None
  ) -> tuple[Local, Context]:
    """The operands and the context of a shard's queries over these keys."""
    if wire is None:
      k, v = unpack(self.kv)
    elif x.k.shape == x.v.shape:
      k, v = unpack(wire.decode(self.kv, x.k))
    else:
      k, v = wire.decode(self.kv[0], x.k), wire.decode(self.kv[1], x.v)
    return Local(x.q, k, v), context._replace(k=Coords(*unpack(self.at)))


def pack(a: jax.Array, b: jax.Array) -> Any:
  """One array to send where that is possible, else the pair."""
  return jnp.stack([a, b]) if a.shape == b.shape else (a, b)


def unpack(packed: Any) -> tuple[jax.Array, jax.Array]:
  return packed[0], packed[1]

"""The codec of a cache as the format in which keys and values are sent.

Guarantees: what arrives is what the cache reads back of the same keys and
values, bit for bit: a vector is encoded once, by the shard that has it, from
numbers of the cache's dtype.
Memory: a token's bytes are those that it has in the cache, in one array.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

if TYPE_CHECKING:
  from ringjax.kv.codecs.codec import VectorCodec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecWire:
  """Wire format that sends keys and values as a codec's bytes.

  It is a `Wire` of `ops/attention/strategies/wire_format.py`.

  Attributes:
    keys: Codec of keys, a `VectorCodec`.
    values: Codec of values.
    dtype: Dtype of the cache, to which vectors are rounded before they are
      encoded; None for no rounding.
  """

  keys: VectorCodec
  values: VectorCodec
  dtype: DTypeLike | None = None

  def __str__(self) -> str:
    same_codec = self.keys == self.values
    return f"{self.keys}" if same_codec else f"{self.keys} and {self.values}"

  def send(
    self, k: Shaped[Array, "B K S H"], v: Shaped[Array, "B K S J"]
  ) -> tuple[Shaped[Array, "B K S X"], int]:
    """Encodes to uint8 [B, K, S, X]: bytes of keys, then those of values."""
    if self.dtype is not None:
      k, v = k.astype(self.dtype), v.astype(self.dtype)
    codes = self.keys.encode(k)
    # Rows of latent attention are keys without values.
    if v.shape[-1]:
      codes = jnp.concatenate([codes, self.values.encode(v)], -1)
    return codes, 2

  def receive(
    self,
    sent: Shaped[Array, "B K _ X"],
    k: Shaped[Array, "B K _ H"],
    v: Shaped[Array, "B K _ J"],
  ) -> tuple[Shaped[Array, "B K _ H"], Shaped[Array, "B K _ J"]]:
    """Keys and values, with the dtypes and head dims of `k` and `v`."""
    of_k = self.keys.width(k.shape[-1])
    keys = self.keys.decode(sent[..., :of_k], k.shape[-1], k.dtype)
    if not v.shape[-1]:
      return keys, keys[..., :0].astype(v.dtype)
    return (keys, self.values.decode(sent[..., of_k:], v.shape[-1], v.dtype))

  def token_bytes(self, key_dim: int, value_dim: int) -> int:
    """Bytes of a token's key and value in one KV head."""
    values = self.values.width(value_dim) if value_dim else 0
    return self.keys.width(key_dim) + values

"""Integers by channel: a group of tokens shares a scale in each channel.

Guarantees: an error of at most half a step of the channel, (largest - least) /
(2**bits - 1) over the tokens of a group, and the rounding of the two to
float16. Channels of keys that are far larger than the others, as many models
have them, cost the others nothing.
Cost: a group is encoded and decoded as a whole.
Memory: `bits` bits a number and four bytes a channel and group, in equal parts
after the codes of the group's tokens.
Ref: Liu et al. 2024, KIVI, arXiv 2402.02750: keys by channel, values by token,
and the newest tokens exact.

A group is a page of a cache (`LayoutConfig.page`), so that it moves as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from ringjax.checks import one_of, positive_int
from ringjax.errors import ShapeError
from ringjax.kv.codecs import code_bytes
from ringjax.ops.attention.cached.code_format import packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelGroups:
  """Groups of tokens, each with a least number and a step in each channel.

  Attributes:
    bits: 2, 3, 4 or 8.
    group: tokens of a group, P.
  """

  bits: int = 4
  group: int = 32

  def __post_init__(self) -> None:
    one_of("bits", self.bits, code_bytes.INTEGER_BITS)
    positive_int("group", self.group)

  @property
  def page(self) -> int:
    """Tokens that are encoded together."""
    return self.group

  def width(self, dim: int) -> int:
    """Bytes of a token: its codes, and its part of those of the scales."""
    return sum(self.byte_parts(dim).values())

  def byte_parts(self, dim: int) -> dict[str, int]:
    """Bytes of a token: codes, and its part of the group's scales."""
    codes = packed_bytes(dim, self.bits)
    return {"codes": codes, "scales": self._share(dim)}

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    """The bytes of whole groups, T = n P tokens.

    Raises:
      ShapeError: a part of a group.
    """
    del constants
    dim = x.shape[-1]
    cut = self._groups(x).astype(jnp.float32)
    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    smallest = half(jnp.min(cut, -2, keepdims=True))
    largest = jnp.max(cut, -2, keepdims=True)
    step = half((largest - smallest) / np.float32(2**self.bits - 1))
    codes = jnp.round((cut - smallest) / jnp.where(step > 0, step, 1))
    codes = jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)
    scales = code_bytes.half_bytes(jnp.concatenate([step, smallest], -1))
    scales = scales[..., 0, :]
    over = self.group * self._share(dim) - scales.shape[-1]
    scales = jnp.pad(scales, [(0, 0)] * (scales.ndim - 1) + [(0, over)])
    scales = scales.reshape(*cut.shape[:-1], -1)
    data = jnp.concatenate([code_bytes.pack(codes, self.bits), scales], -1)
    return data.reshape(*x.shape[:-1], -1)

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    """The numbers that the bytes of whole groups stand for.

    Raises:
      ShapeError: a part of a group.
    """
    del constants
    cut = self._groups(data)
    start = packed_bytes(dim, self.bits)
    scales = cut[..., start:].reshape(*cut.shape[:-2], 1, -1)
    step, smallest = jnp.split(code_bytes.halves(scales, 0, 2 * dim), 2, -1)
    codes = code_bytes.unpack(cut[..., :start], self.bits, dim)
    x = codes.astype(jnp.float32) * step + smallest
    return x.reshape(*data.shape[:-1], dim).astype(dtype)

  def _share(self, dim: int) -> int:
    """Bytes of the scales that a token has."""
    return -(-4 * dim // self.group)

  def _groups(self, x: jax.Array) -> jax.Array:
    """[B, K, T, D] -> [B, K, n, P, D]."""
    check_groups(x.shape[-2], self.group)
    return x.reshape(*x.shape[:-2], -1, self.group, x.shape[-1])


def check_groups(tokens: int, group: int) -> None:
  """Refuse a part of a group.

  Raises:
    ShapeError: A part of a group.
  """
  if tokens % group:
    raise ShapeError(
      "tokens",
      f"{tokens} tokens to encode together",
      f"groups of {group}",
      "store them with rj.kv.EvictingCache, which encodes whole groups",
    )

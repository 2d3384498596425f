"""What a codec is: numbers of a head to bytes and back, token by token.

Guarantees: a vector's bytes depend on the vector alone, so that appending
token by token is appending all at once, and bytes move between rows, shards
and caches as they are.
Memory: `width(D)` bytes for a vector of D numbers, scales included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, UInt8


@runtime_checkable
class VectorCodec(Protocol):
  """Vectors of D numbers as bytes; hashable, compared by value."""

  def width(self, dim: int) -> int:
    """Bytes of a vector of `dim` numbers."""
    ...

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    """The bytes; `constants` [K, n] are those of the layer, if it has some."""
    ...

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: Any,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    """The numbers that the bytes stand for."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
  """How a cache stores its keys and its values.

  Attributes:
    keys: of the keys.
    values: of the values.
    unrotated: whether keys are encoded as they are before their rotation.
    lossless: whether decoding gives the encoded numbers, in the cache's dtype.
  """

  keys: VectorCodec
  values: VectorCodec
  unrotated: bool = False
  lossless: bool = False

  def constants(
    self, number: int, shape: Any
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Numbers of the codecs of a kind of layer, those of keys and of values.

    Args:
      number: of the kind among those of the model.
      shape: its `LayerCacheSpec`.

    Returns:
      arrays [L, K, n]; nothing where codecs need none.
    """
    del number, shape
    return (), ()

  def constant_shapes(
    self, shape: Any
  ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Shapes of the `constants` of a kind of layer, which are float32."""
    del shape
    return (), ()

  def bits(self, dim: int) -> float:
    """Bits of a number of a head of `dim` numbers, scales included."""
    return 4 * (self.keys.width(dim) + self.values.width(dim)) / dim

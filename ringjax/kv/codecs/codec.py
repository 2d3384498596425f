"""Interface of codecs: numbers of a head to bytes and back, token by token.

Guarantees: a vector's bytes depend on the vector alone, so that appending
token by token is appending all at once, and bytes move between rows, shards
and caches as they are. Codecs with a `page` encode so many tokens together:
pages of a cache, which stay whole.
Memory: `width(D)` bytes for a vector of D numbers, scales included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from ringjax.errors import OptionError
from ringjax.kv.codecs.codec_wire import CodecWire

if TYPE_CHECKING:
  from ringjax.kv.layer_spec import LayerCacheSpec


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
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    """The numbers that the bytes stand for."""
    ...


def through(
  vectors: VectorCodec, x: Float[Array, "B K T D"], constants: Sequence[Any]
) -> Float[Array, "B K T D"]:
  """Encodes vectors and decodes them again."""
  if not x.shape[-1]:
    return x
  data = vectors.encode(x, constants)
  return vectors.decode(data, x.shape[-1], x.dtype, constants)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
  """Codecs of a cache's keys and values.

  Attributes:
    keys: Codec of the keys.
    values: Codec of the values.
    unrotated: Whether keys are encoded as they are before their rotation.
  """

  keys: VectorCodec
  values: VectorCodec
  unrotated: bool = False

  def constants(
    self, number: int, shape: LayerCacheSpec
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Constants of the codecs of keys and of values, for a kind of layer.

    Args:
      number: Number of the kind among those of the model.
      shape: Cache of one of its layers.

    Returns:
      Arrays [L, K, n]; none where codecs need none.
    """
    del number, shape
    return (), ()

  def constant_shapes(
    self, shape: LayerCacheSpec
  ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Shapes of the `constants` of a kind of layer, which are float32."""
    del shape
    return (), ()

  def for_model(self, load: Callable[[Any], Any]) -> Codec:
    """Reads or checks a model's calibration by `load`."""
    del load
    return self

  def without_weights(self) -> Codec:
    """Codec of the same bytes that depends on no model's weights."""
    return self

  @property
  def page(self) -> int | None:
    """Tokens that are encoded together; None: each is encoded alone."""
    pages = [getattr(x, "page", None) for x in (self.keys, self.values)]
    return max((n for n in pages if n is not None), default=None)

  def as_wire(self, dtype: DTypeLike | None = None) -> CodecWire:
    """The format in which strategies send keys and values, see `Ring.wire`.

    Args:
      dtype: Dtype of a cache that stores the same bytes, if there is one.

    Raises:
      OptionError: If a shard cannot decode the bytes alone.
    """
    if self.unrotated:
      raise OptionError(
        "wire",
        f"a codec of keys before their rotation, {type(self).__name__}",
        "a codec of keys as queries read them: what travels is rotated",
        "pass wire=rj.kv.Codec(keys=rj.kv.Hadamard(), values=...), or a dtype",
      )
    if self.page is not None:
      raise OptionError(
        "wire",
        f"{self.keys} and {self.values}, of {self.page} tokens together",
        "a codec of single tokens",
        "pass rj.kv.Integers, Floats or Hadamard",
      )
    for vectors in (self.keys, self.values):
      if getattr(vectors, "needs_constants", False):
        raise OptionError(
          "wire",
          f"{vectors}, whose levels are those of a layer",
          "a codec without a calibration",
          "pass rj.kv.Integers, Floats or Hadamard",
        )
    return CodecWire(keys=self.keys, values=self.values, dtype=dtype)

  def options(self) -> dict[str, Any]:
    """Options that text can set: "name", "keys.name" or "values.name"."""
    values = {name: getattr(self, name) for name in self._own()}
    for part in ("keys", "values"):
      vectors = getattr(self, part)
      for field in dataclasses.fields(vectors):
        values[f"{part}.{field.name}"] = getattr(vectors, field.name)
    return values

  def with_options(self, options: dict[str, Any]) -> Codec:
    """Replaces options that the codec has by other values."""
    new = {name: options[name] for name in self._own() if name in options}
    for part in ("keys", "values"):
      part_options = {
        name.removeprefix(f"{part}."): value
        for name, value in options.items()
        if name.startswith(f"{part}.")
      }
      vectors = getattr(self, part)
      new[part] = dataclasses.replace(vectors, **part_options)
    return dataclasses.replace(self, **new)

  def _own(self) -> tuple[str, ...]:
    fixed = ("keys", "values", "unrotated")
    names = (field.name for field in dataclasses.fields(self))
    return tuple(name for name in names if name not in fixed)

"""What a codec is: numbers of a head to bytes and back, token by token.

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
  from ringjax.kv.cache import LayerCacheSpec


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
  """Vectors as a codec gives them back."""
  if not x.shape[-1]:
    return x
  data = vectors.encode(x, constants)
  return vectors.decode(data, x.shape[-1], x.dtype, constants)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
  """How a cache stores its keys and its values.

  Attributes:
    keys: of the keys.
    values: of the values.
    unrotated: whether keys are encoded as they are before their rotation.
  """

  keys: VectorCodec
  values: VectorCodec
  unrotated: bool = False

  def constants(
    self, number: int, shape: LayerCacheSpec
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
    self, shape: LayerCacheSpec
  ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Shapes of the `constants` of a kind of layer, which are float32."""
    del shape
    return (), ()

  def for_model(self, load: Callable[[Any], Any]) -> Codec:
    """For a model; `load` reads its calibration, or compares one with it."""
    del load
    return self

  @property
  def page(self) -> int | None:
    """Tokens that are encoded together; None: each is encoded alone."""
    pages = [getattr(x, "page", None) for x in (self.keys, self.values)]
    return max((n for n in pages if n is not None), default=None)

  def as_wire(self, dtype: DTypeLike | None = None) -> CodecWire:
    """The format in which strategies send keys and values, see `Ring.wire`.

    Args:
      dtype: of a cache that stores the same bytes, if there is one.

    Raises:
      OptionError: a codec whose bytes no shard can decode alone.
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
    """What can be set: by name, or by "keys." and "values." and a name."""
    found = {name: getattr(self, name) for name in self._own()}
    for part in ("keys", "values"):
      vectors: Any = getattr(self, part)
      for field in dataclasses.fields(vectors):
        found[f"{part}.{field.name}"] = getattr(vectors, field.name)
    return found

  def with_options(self, options: dict[str, Any]) -> Codec:
    """With other values of those that are its own."""
    new = {name: options[name] for name in self._own() if name in options}
    for part in ("keys", "values"):
      own = {
        name.removeprefix(f"{part}."): value
        for name, value in options.items()
        if name.startswith(f"{part}.")
      }
      vectors: Any = getattr(self, part)
      new[part] = dataclasses.replace(vectors, **own)
    return dataclasses.replace(self, **new)

  def _own(self) -> tuple[str, ...]:
    fixed = ("keys", "values", "unrotated")
    names = (field.name for field in dataclasses.fields(self))
    return tuple(name for name in names if name not in fixed)

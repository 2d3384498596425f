"""What is measured of a model's keys and values, for codes that fit them.

Ref: Hooper et al. 2024, KVQuant, arXiv 2401.18079, sections 3.1 to 3.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from ringjax.errors import OptionError
from ringjax.kv.codecs.code_book import CodeBook
from ringjax.kv.codecs.codec import Codec

if TYPE_CHECKING:
  from ringjax.kv.cache import LayerCacheSpec

BITS = (2, 3, 4)
WEIGHTS = ("fisher", "none")


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
  """Scales of channels and levels of codes, for each kind of layer of a model.

  Attributes:
    model: digest of the model that was measured.
    digest: of all that is in here; two of the same digest are equal.
    arrays: by name, "N.keys.scale" and "N.keys.zero" [L, K, D], where N is the
      number of the kind of layer, and "N.keys.levelsB", "N.values.levelsB"
      [L, K, 2**B].
    weights: by what errors were weighed, one of `WEIGHTS`.
  """

  model: str
  digest: str
  arrays: dict[str, np.ndarray]
  weights: str = WEIGHTS[0]

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Calibration) and self.digest == other.digest

  def __hash__(self) -> int:
    return hash(self.digest)

  def __repr__(self) -> str:
    return f"Calibration({self.digest})"

  def part(
    self, number: int, part: str, vectors: CodeBook
  ) -> tuple[Float[np.ndarray, "L K n"], ...]:
    """Constants of a kind of layer's "keys" or "values"."""
    names = [f"{number}.{part}.levels{vectors.bits}"]
    if vectors.by == "channel":
      names = [f"{number}.{part}.scale", f"{number}.{part}.zero", *names]
    missing = [name for name in names if name not in self.arrays]
    if missing:
      raise OptionError(
        "calibration",
        f"one without {', '.join(missing)}",
        "one of this model's layers",
        "calibrate this model with python -m launch.calibrate",
      )
    return tuple(self.arrays[name] for name in names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated(Codec):
  """A codec whose constants come from a calibration: KVQuant.

  Attributes:
    calibration: the calibration, or the folder that has it.
  """

  keys: CodeBook = CodeBook(by="channel")
  values: CodeBook = CodeBook(by="token")
  unrotated: bool = True
  calibration: Calibration | str | None = None

  def for_model(self, load: Callable[[Any], Any]) -> Calibrated:
    if self.calibration is None:
      return self
    return dataclasses.replace(self, calibration=load(self.calibration))

  def constants(
    self, number: int, shape: LayerCacheSpec
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    found = self.calibration
    if not isinstance(found, Calibration):
      raise OptionError(
        "calibration",
        "none" if found is None else repr(found),
        "the calibration of this model",
        "name the folder, e.g. nuq3:calibration=DIR; to make one: python -m "
        "launch.calibrate --model=DIR --text=FILE --out=DIR",
      )
    keys = found.part(number, "keys", self.keys)
    if not shape.value:
      return keys, ()
    return keys, found.part(number, "values", self.values)

  def constant_shapes(
    self, shape: LayerCacheSpec
  ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    def one(vectors: CodeBook, dim: int) -> tuple[tuple[int, ...], ...]:
      if not dim:
        return ()
      lead = (shape.layers, shape.heads)
      levels = (*lead, 2**vectors.bits)
      channels = (*lead, dim)
      return (
        (channels, channels, levels) if vectors.by == "channel" else (levels,)
      )

    return one(self.keys, shape.key), one(self.values, shape.value)

"""Calibrations: ranges and levels of codes measured on a model's KV cache.

Ref: Hooper et al. 2024, KVQuant, arXiv 2401.18079, sections 3.1 to 3.4.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from ringjax.checks import is_address
from ringjax.errors import OptionError
from ringjax.kv.codecs import page_outliers
from ringjax.kv.codecs.code_book import CodeBook
from ringjax.kv.codecs.codec import Codec

if TYPE_CHECKING:
  from ringjax.kv.layer_spec import LayerCacheSpec

# File that `rj.infer.calibrate` writes next to a model.
CALIBRATION_FILE = "kv_calibration.safetensors"
WEIGHTS = ("fisher", "none")
KEYS = ("channel", "token")


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
  """Scales of channels and levels of codes, for each kind of layer of a model.

  Attributes:
    model: Digest of the model that was measured.
    digest: Digest of all fields; calibrations of the same digest are equal.
    arrays: Arrays by name: "N.keys.scale", "N.keys.zero" and "N.keys.sink"
      [L, K, D], where N is the number of the kind of layer, "N.keys.factor"
      [L, K, 1], and "N.keys.levelsB", "N.values.levelsB" [L, K, 2**B]. Files
      that were written before the sink was measured have none, and no key is
      near it.
    weights: Weight of an error, one of `WEIGHTS`.
    outliers: Part of a channel's numbers that its scale left out, "1%" where
      it is a part of a page of values and not of each; None: not stated in the
      file.
    first: Number of tokens at the beginning of each text that were left out,
      or None.
    keys: Vectors that share a scale of keys, one of `KEYS`: "channel", whose
      scales are in `arrays`; "token", where each key has its scale.
    rotated: Whether keys were measured after their rotation.
    rows: For each of a model's kinds of layers, the (N, index in L) of each
      layer; None: those of `arrays`. Equal layers of a model need not be of
      one kind.
  """

  model: str
  digest: str
  arrays: dict[str, np.ndarray]
  weights: str = WEIGHTS[0]
  outliers: int | float | str | None = None
  first: int | None = None
  keys: str = KEYS[0]
  rotated: bool = False
  rows: tuple[tuple[tuple[int, int], ...], ...] | None = None

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
    names = [f"levels{vectors.bits}"]
    if vectors.by == "channel":
      names = ["scale", "zero", *names]
    missing = [
      f"{number}.{part}.{name}"
      for name in names
      if self._array(number, part, name) is None
    ]
    if missing:
      raise OptionError(
        "calibration",
        f"one without {', '.join(missing)}",
        "one of this model's layers",
        "calibrate this model with python -m ringjax.launch.calibrate",
      )
    arrays: list[Any] = [self._array(number, part, name) for name in names]
    if vectors.sinks:
      zero = arrays[1]
      absent = {"sink": zero, "factor": np.ones_like(zero[..., :1])}
      for at, (name, default) in enumerate(absent.items()):
        x = self._array(number, part, name)
        arrays.insert(2 + at, default if x is None else x)
    return tuple(arrays)

  def _array(self, number: int, part: str, name: str) -> np.ndarray | None:
    """An array of a kind of layer of the model, or None."""
    if self.rows is None:
      return self.arrays.get(f"{number}.{part}.{name}")
    layers = [
      (self.arrays.get(f"{n}.{part}.{name}"), index)
      for n, index in (self.rows[number] if number < len(self.rows) else ())
    ]
    if not layers or any(x is None or index >= len(x) for x, index in layers):
      return None
    return np.stack([x[index] for x, index in layers if x is not None])

  def check(self, codec: Calibrated) -> None:
    """Refuses a codec of other keys or outliers than those measured.

    Raises:
      OptionError: If keys have scales of another sort, are encoded before
        their rotation and were measured after it or the reverse, or if the
        outliers differ.
    """
    if codec.keys.by != self.keys:
      raise OptionError(
        "keys.by",
        f"{codec.keys.by!r}, with a calibration of keys by {self.keys}",
        f"{self.keys!r}: levels are fitted to the scales that they are times",
        f"write keys.by={self.keys}, or calibrate with python -m "
        f"launch.calibrate --keys={codec.keys.by}",
      )
    if codec.unrotated == self.rotated:
      stages = "behind", "before"
      raise OptionError(
        "unrotated",
        f"{codec.unrotated}, with a calibration of keys "
        f"{stages[not self.rotated]} their rotation",
        f"{not self.rotated}: levels fit keys {stages[not self.rotated]} it",
        f"write unrotated={not self.rotated}, or calibrate with python -m "
        f"launch.calibrate --rotated={not codec.unrotated}",
      )
    if self.outliers is None:
      return
    for book in (codec.keys, codec.values):
      fits_outliers = book.outliers == self.outliers
      if book.by == "channel":
        # A channel's scale leaves them out, wherever they are kept.
        fits_outliers = book.share == page_outliers.share_of(self.outliers)
      if not fits_outliers:
        raise OptionError(
          "outliers",
          f"{book.outliers}, with a calibration of {self.outliers}",
          "the same part, by which scales and levels were measured",
          f"write outliers={self.outliers}, or calibrate with python -m "
          f"launch.calibrate --outliers={book.outliers}",
        )

  def check_first(self, first: int) -> None:
    """Refuses another number of first tokens than the one left out.

    Raises:
      OptionError: If `first` is such a number.
    """
    if self.first is None or first == self.first:
      return
    if first == 0 and self.first <= 1:
      # The codes have the sink.
      return
    raise OptionError(
      "first",
      f"{first}, with a calibration that left out {self.first} tokens",
      f"first={self.first}" + ", or 0" * (self.first <= 1),
      f"write first={self.first}, or calibrate with python -m "
      f"launch.calibrate --first={first}",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated(Codec):
  """A codec whose constants come from a calibration: KVQuant.

  Attributes:
    keys: Code book of keys: by channel, as in the paper, or by token, to
      compare with.
    values: Code book of values, by token.
    unrotated: Whether keys are encoded before their rotation, as the paper's.
    calibration: Calibration, of keys of the same sort, or the folder that has
      it.
  """

  keys: CodeBook = CodeBook(by="channel")
  values: CodeBook = CodeBook(by="token")
  unrotated: bool = True
  calibration: Calibration | str | None = None

  def without_weights(self) -> Calibrated:
    """Codec of the same bytes, without the calibration."""
    return dataclasses.replace(self, calibration=None)

  def __post_init__(self) -> None:
    if self.values.by != "token":
      raise OptionError(
        "values.by",
        repr(self.values.by),
        "'token': the levels of values are fitted to scales by token",
        "leave values.by out, or write keys.by for the keys alone",
      )

  def check_file(self) -> None:
    """Refuses a calibration that has no file.

    Raises:
      OptionError: If there is no calibration, no such file, or no file of a
        calibration in the folder.
    """
    if isinstance(self.calibration, Calibration):
      return
    if self.calibration is None:
      raise self.uncalibrated()
    if is_address(self.calibration):
      # Looked at when it is read.
      return
    path = pathlib.Path(self.calibration)
    if path.is_dir() and not (path / CALIBRATION_FILE).is_file():
      raise self.uncalibrated(f"{path}, without {CALIBRATION_FILE}")
    if not path.exists():
      raise self.uncalibrated(f"{path}, which does not exist")

  def uncalibrated(self, got: str | None = None) -> OptionError:
    """Error for a codec whose calibration was not read."""
    setting = "none" if self.calibration is None else repr(self.calibration)
    return OptionError(
      "calibration",
      got or setting,
      "the calibration of this model",
      "name the folder, e.g. nuq3:calibration=DIR; to make one: python -m "
      "launch.calibrate --model=DIR --text=FILE --out=DIR",
    )

  def for_model(self, load: Callable[[Any], Any]) -> Calibrated:
    if self.calibration is None:
      return self
    calibration = load(self.calibration)
    calibration.check(self)
    return dataclasses.replace(self, calibration=calibration)

  def constants(
    self, number: int, shape: LayerCacheSpec
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    calibration = self.calibration
    if not isinstance(calibration, Calibration):
      raise self.uncalibrated()
    keys = calibration.part(number, "keys", self.keys)
    if not shape.value:
      return keys, ()
    return keys, calibration.part(number, "values", self.values)

  def constant_shapes(
    self, shape: LayerCacheSpec
  ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    def shapes(vectors: CodeBook, dim: int) -> tuple[tuple[int, ...], ...]:
      if not dim:
        return ()
      lead = (shape.layers, shape.heads)
      levels = (*lead, 2**vectors.bits)
      channels = (*lead, dim)
      if vectors.by != "channel":
        return (levels,)
      sink = (channels, (*lead, 1)) if vectors.sinks else ()
      return (channels, channels, *sink, levels)

    return shapes(self.keys, shape.key), shapes(self.values, shape.value)

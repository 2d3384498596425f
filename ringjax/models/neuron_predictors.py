"""Predictors of active neurons, and their file beside the model.

Guarantees: a file is there whole or not at all; predictors of another model or
of another threshold are refused.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ringjax.errors import CheckpointMismatchError
from ringjax.models import calibration as files
from ringjax.nn.neuron_feedforward import LowRankPredictor

FILE = "neuron_predictors.safetensors"
_REMEDY = "train them again with rj.train.train_predictors"


@dataclasses.dataclass(frozen=True)
class NeuronPredictors:
  """Which neurons of each layer a token needs, by products of low rank.

  Attributes:
    model: digest of the model.
    threshold: size up to which an activation counts as zero.
    layers: by number, "down" [D, r], "up" [r, F] and "bias" [F], float32: a
      neuron is needed where x . down . up + bias is above zero, for the
      feedforward's input x.
    measured: of each layer on texts that they were not trained on,
      "false_negatives", the part of active neurons that they miss,
      "predicted" and "active", parts of all neurons.
  """

  model: str
  threshold: float
  layers: Mapping[int, Mapping[str, np.ndarray]]
  measured: Mapping[int, Mapping[str, float]]

  def module(
    self, numbers: Sequence[int], lead: tuple[int, ...], dtype: DTypeLike
  ) -> LowRankPredictor:
    """The predictor of layers that share arrays, of leading axes `lead`."""
    stacked = lambda name, dtype: jnp.asarray(
      np.stack([self.layers[n][name] for n in numbers]), dtype
    )
    shaped = lambda x: x.reshape(*lead, *x.shape[1:])
    return LowRankPredictor(
      shaped(stacked("down", dtype)),
      shaped(stacked("up", dtype)),
      shaped(stacked("bias", jnp.float32)),
    )

  def save(self, folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes neuron_predictors.safetensors into a folder; its path."""
    path = pathlib.Path(folder) / FILE
    arrays = {
      f"{n}.{name}": np.ascontiguousarray(x)
      for n, parts in self.layers.items()
      for name, x in parts.items()
    }
    arrays |= {
      f"{n}.measured.{name}": np.asarray(x, np.float32)
      for n, parts in self.measured.items()
      for name, x in parts.items()
    }
    said = {"model": self.model, "threshold": repr(self.threshold)}
    files.write_tensors(path, arrays, said)
    return path

  @classmethod
  def load(cls, folder: str | os.PathLike[str]) -> NeuronPredictors:
    """What `save` wrote into a folder.

    Raises:
      CheckpointFormatError: no such file, or no whole one.
    """
    arrays, said = files.read_tensors(pathlib.Path(folder) / FILE)
    layers: dict[int, dict[str, np.ndarray]] = {}
    measured: dict[int, dict[str, float]] = {}
    for key, x in arrays.items():
      number, *kind, name = key.split(".")
      if kind:
        measured.setdefault(int(number), {})[name] = float(x)
      else:
        layers.setdefault(int(number), {})[name] = x
    threshold = float(said.get("threshold", "nan"))
    return cls(said.get("model", ""), threshold, layers, measured)

  def check(self, model: str, threshold: float) -> None:
    """Refuses another model, by its digest, and another threshold.

    Raises:
      CheckpointMismatchError: it says what came.
    """
    for name, mine, wanted in (
      ("model", self.model, model),
      ("threshold", self.threshold, float(threshold)),
    ):
      if mine != wanted:
        raise CheckpointMismatchError(
          "predictors", f"those of {name} {mine}", f"{wanted}", _REMEDY
        )

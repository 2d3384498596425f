"""Predictors of active neurons, and their file next to the model.

Guarantees: a file is written completely or not at all; predictors of another
model or threshold are refused.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ringjax.checks import local_path
from ringjax.errors import CheckpointMismatchError
from ringjax.models.weights import calibration as files
from ringjax.nn.weights.neuron_feedforward import LowRankPredictor

FILE = "neuron_predictors.safetensors"
_REMEDY = "train them again with rj.train.train_predictors"


@dataclasses.dataclass(frozen=True)
class NeuronPredictors:
  """Low-rank predictors of the neurons that a token needs in each layer.

  Attributes:
    model: Digest of the model.
    threshold: Size up to which an activation counts as zero.
    layers: Weights by layer number: "down" [D, r], "up" [r, F] and "bias" [F],
      float32. A neuron is needed if x . down . up + bias is above zero, for the
      feedforward's input x.
    measured: Fractions by layer number, on texts that they were not trained on:
      "false_negatives" of active neurons that are missed, "predicted" and
      "active" of all neurons.
  """

  model: str
  threshold: float
  layers: Mapping[int, Mapping[str, np.ndarray]]
  measured: Mapping[int, Mapping[str, float]]

  def module(
    self, numbers: Sequence[int], lead: tuple[int, ...], dtype: DTypeLike
  ) -> LowRankPredictor:
    """The predictor of layers that share arrays, with leading axes `lead`."""
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
    """Writes neuron_predictors.safetensors into a folder; returns its path."""
    path = pathlib.Path(local_path("folder", folder)) / FILE
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
    metadata = {"model": self.model, "threshold": repr(self.threshold)}
    files.write_tensors(path, arrays, metadata)
    return path

  @classmethod
  def load(cls, folder: str | os.PathLike[str]) -> NeuronPredictors:
    """Reads the predictors of a folder that `save` wrote.

    Raises:
      CheckpointFormatError: If the file is missing or incomplete.
    """
    arrays, metadata = files.read_tensors(
      pathlib.Path(local_path("folder", folder)) / FILE
    )
    layers: dict[int, dict[str, np.ndarray]] = {}
    measured: dict[int, dict[str, float]] = {}
    for key, x in arrays.items():
      number, *kind, name = key.split(".")
      if kind:
        measured.setdefault(int(number), {})[name] = float(x)
      else:
        layers.setdefault(int(number), {})[name] = x
    threshold = float(metadata.get("threshold", "nan"))
    return cls(metadata.get("model", ""), threshold, layers, measured)

  def check(self, model: str, threshold: float) -> None:
    """Refuses another model, by its digest, and another threshold.

    Raises:
      CheckpointMismatchError: If the model or the threshold differs.
    """
    for name, stored, wanted in (
      ("model", self.model, model),
      ("threshold", self.threshold, float(threshold)),
    ):
      if stored != wanted:
        raise CheckpointMismatchError(
          "predictors", f"those of {name} {stored}", f"{wanted}", _REMEDY
        )

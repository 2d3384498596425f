"""Files of calibrations: safetensors next to the model that was measured.

Guarantees: a file is written completely or not at all. A file is refused unless
it is of this model, complete and of finite numbers; no code is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import Shaped
from safetensors.numpy import save

from ringjax.errors import CheckpointFormatError, OptionError, StorageError
from ringjax.kv.bits.allocation import Allocation
from ringjax.kv.codecs import page_outliers
from ringjax.kv.codecs.calibration import (
  CALIBRATION_FILE,
  KEYS,
  WEIGHTS,
  Calibration,
)
from ringjax.models.fingerprint import fingerprint
from ringjax.models.grouping import kind_rows
from ringjax.paths import AnyPath, ObjectPath, as_path, replacing

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

FILE = CALIBRATION_FILE
_REMEDY = (
  "calibrate again: python -m ringjax.launch.calibrate --model=DIR --text=FILE"
)


def model_digest(model: Transformer) -> str:
  """Digest of a model that does not depend on the dtype of its weights.

  Raises:
    OptionError: If the model has shapes only.
  """
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model)):
    raise OptionError(
      "model",
      "one of shapes alone, for what was measured of one with weights",
      "weights, by which it is known of which model that is",
      "load the model, or leave calibration= and table= out",
    )
  return fingerprint(model, jnp.bfloat16)


def make(
  model: str,
  arrays: Mapping[str, np.ndarray],
  weights: str = WEIGHTS[0],
  outliers: int | float | str | None = None,
  first: int | None = None,
  keys: str = KEYS[0],
  rotated: bool = False,
) -> Calibration:
  """Makes a calibration of these arrays, for the model of a digest."""
  hasher = hashlib.sha256(model.encode())
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name], np.float32)
    hasher.update(f"{name} {array.shape}".encode() + array.tobytes())
  if keys != KEYS[0] or rotated:
    # Others have the digest that they had before there were such keys.
    hasher.update(f"{keys} {rotated}".encode())
  return Calibration(
    model,
    hasher.hexdigest()[:16],
    dict(arrays),
    weights,
    outliers,
    first,
    keys,
    rotated,
  )


def write_tensors(
  path: str | os.PathLike[str],
  arrays: Mapping[str, np.ndarray],
  metadata: Mapping[str, str],
) -> None:
  """Writes a safetensors file, which replaces an older one in one step.

  Its folder is created if it does not exist. The path may be an address.
  """
  as_path(path).parent.mkdir(parents=True, exist_ok=True)
  data = save(dict(arrays), dict(metadata))
  with replacing(path) as file:
    file.write(data)


def read_tensors(
  path: str | os.PathLike[str],
) -> tuple[dict[str, Shaped[np.ndarray, " ..."]], dict[str, str]]:
  """The arrays and the metadata of a safetensors file.

  Args:
    path: Path of the file, or its address.

  Raises:
    CheckpointFormatError: If the file is missing or incomplete.
    StorageError: If an object can't be read.
  """
  place = as_path(path)
  try:
    with contextlib.ExitStack() as stack:
      if isinstance(place, ObjectPath):
        # Its metadata can only be read from a file.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        data, place = place.read_bytes(), pathlib.Path(folder) / "object"
        place.write_bytes(data)
      file = stack.enter_context(safetensors.safe_open(place, "np"))
      metadata = file.metadata() or {}
      names = list(file.keys())
      return {name: file.get_tensor(name) for name in names}, metadata
  except StorageError:
    raise
  except (OSError, safetensors.SafetensorError) as error:
    raise CheckpointFormatError(
      f"{path}", f"{error}", "a whole safetensors file", _REMEDY
    ) from None


def save_calibration(
  calibration: Calibration, folder: str | os.PathLike[str]
) -> AnyPath:
  """Writes a calibration into a folder, or at its address; returns its path."""
  path = as_path(folder) / FILE
  metadata = {
    "model": calibration.model,
    "digest": calibration.digest,
    "weights": calibration.weights,
    "keys": calibration.keys,
    "rotated": f"{calibration.rotated}",
  }
  for name in ("outliers", "first"):
    value = getattr(calibration, name)
    if value is not None:
      metadata[name] = f"{value}"
  write_tensors(path, calibration.arrays, metadata)
  return path


def load_measured(
  source: str | Calibration, model: Transformer
) -> Calibration | Allocation:
  """Loads measurements of a model: a calibration, or from JSON an allocation.

  Args:
    source: The file or its folder, or a calibration, which is compared with the
      model; except within jit, where the weights are not known.
    model: The `Transformer` that must have been measured.

  Raises:
    CheckpointFormatError: If the file is missing or bad.
    OptionError: If it is of another model.
  """
  if isinstance(source, Calibration):
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model)):
      _check_model(source, model, repr(source))
    return for_kinds(source, model)
  if pathlib.Path(source).suffix == ".json":
    return Allocation.load(source, model)
  return load_calibration(source, model)


def for_kinds(calibration: Calibration, model: Transformer) -> Calibration:
  """A calibration whose parts are those of a model's kinds of layers."""
  rows = kind_rows(model.stack.runs)
  return dataclasses.replace(calibration, rows=rows)


def in_file_order(
  arrays: Mapping[str, np.ndarray], model: Transformer
) -> dict[str, Shaped[np.ndarray, " ..."]]:
  """Arrays of a calibration, by the kinds of layers that its files have.

  Args:
    arrays: Arrays by name, "N.keys.scale" [L, ...], of the model's kinds.
    model: Model that was measured.
  """
  layers: dict[str, dict[int, np.ndarray]] = {}
  for name, x in arrays.items():
    number, array_name = name.split(".", 1)
    rows = kind_rows(model.stack.runs)[int(number)]
    for layer, (kind, index) in zip(x, rows, strict=True):
      layers.setdefault(f"{kind}.{array_name}", {})[index] = layer
  return {
    name: np.stack([x[n] for n in sorted(x)]) for name, x in layers.items()
  }


def load_calibration(
  path: str | os.PathLike[str], model: Transformer
) -> Calibration:
  """Reads the calibration of a model.

  Args:
    path: The file, or the folder that has it, or its address.
    model: The `Transformer` that must have been measured.

  Raises:
    CheckpointFormatError: If the file is missing, broken, or has numbers that
      are not finite.
    OptionError: If it is of another model.
  """
  file = as_path(path)
  if file.is_dir():
    file = file / FILE
  arrays, metadata = read_tensors(file)
  weights = metadata.get("weights", WEIGHTS[0])
  outliers, first = metadata.get("outliers"), metadata.get("first")
  try:
    part = None
    if outliers is not None:
      text = outliers.endswith("%")
      part = page_outliers.checked(outliers if text else float(outliers))
    skipped = None if first is None else int(first)
  except ValueError:
    raise CheckpointFormatError(
      f"{file}",
      f"outliers={outliers}, first={first}",
      "a share of a vector or of a page, as 1%, and a number",
      _REMEDY,
    ) from None
  keys = metadata.get("keys", KEYS[0])
  rotated = metadata.get("rotated", "False")
  if keys not in KEYS or rotated not in ("False", "True"):
    raise CheckpointFormatError(
      f"{file}",
      f"keys={keys}, rotated={rotated}",
      f"keys one of {', '.join(KEYS)}, rotated True or False",
      _REMEDY,
    )
  calibration = make(
    metadata.get("model", ""),
    arrays,
    weights,
    part,
    skipped,
    keys,
    rotated == "True",
  )
  not_finite = [name for name, x in arrays.items() if not np.isfinite(x).all()]
  if not_finite:
    raise CheckpointFormatError(
      f"{file}",
      f"numbers in {not_finite[0]} that are not finite",
      "finite",
      _REMEDY,
    )
  if calibration.digest != metadata.get("digest"):
    raise CheckpointFormatError(
      f"{file}", "arrays of another digest than it states", "its own", _REMEDY
    )
  _check_model(calibration, model, f"{file}")
  return for_kinds(calibration, model)


def _check_model(
  calibration: Calibration, model: Transformer, name: str
) -> None:
  """Refuses the calibration of another model."""
  digest = model_digest(model)
  if calibration.model != digest:
    raise OptionError(
      "calibration",
      f"{name}, of a model of digest {calibration.model or 'unknown'}",
      f"that of this model, {digest}",
      "calibrate this model with python -m ringjax.launch.calibrate",
    )

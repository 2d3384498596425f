"""Loads models for inference, with fast defaults on one CPU device."""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax import fetched_models
from ringjax.checks import is_address
from ringjax.data.gguf.gguf_file import is_gguf
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.models.transformer import Transformer

from .common import DEVICES

# Drafters by a head that is stored in a folder of its own.
HEADS = (speculate.Eagle3, speculate.DFlash)


def _head_drafter(values: flags.FlagValues) -> speculate.PredictDraft | None:
  """Drafter of --speculate by a layer of the model, which is then read.

  Raises:
    OptionError: If it is a head without its folder.
  """
  if getattr(values, "speculate", None) is None:
    return None
  drafter = speculate.drafter_of(values.speculate, "--speculate")
  if isinstance(drafter, HEADS) and not drafter.model:
    raise OptionError(
      "--speculate",
      f"{drafter.name} without the folder of a head",
      "the folder of a head of this model",
      f"pass --speculate={drafter.name}:model=FOLDER",
    )
  return drafter if isinstance(drafter, speculate.PredictDraft) else None


def store(place: str, nbytes: int) -> rj.store.Store:
  """Opens a store in a folder, or at an address of an object storage.

  Args:
    place: Value of --store.
    nbytes: Maximum bytes of all blocks.

  Raises:
    OptionError: If the folder is refused.
    StorageError: If objects can't be written.
  """
  if is_address(place):
    return rj.store.Store(objects=(place, nbytes))
  return rj.store.Store(disk=(place, nbytes))


def load(
  values: flags.FlagValues,
  folder: str | os.PathLike[str],
  mesh: Mesh | None,
  *,
  codes: bool = False,
  **options: Any,
) -> tuple[Transformer, str | None]:
  """Loads a model for inference, with fast defaults on one CPU device.

  Args:
    values: Flags of the script, --model, --dtype and --rope_scaling among
      them.
    folder: Folder of the model.
    mesh: Devices of the weights; None for the first one.
    codes: Whether weights may become 8-bit codes, if they don't fit in float32
      and --dtype is not passed.
    **options: Arguments of `rj.models.load`.

  Returns:
    The model, and a line on the chosen defaults and the flags that change them;
    None if none was chosen.
  """
  first = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  chosen = values.model is not None and first.platform == "cpu"
  chosen = chosen and (mesh is None or mesh.size == 1)
  drafter = _head_drafter(values)
  with warnings.catch_warnings():
    if chosen:
      # The returned line reports it.
      warnings.filterwarnings("ignore", "weights stay in", RuntimeWarning)
    model = rj.models.load(
      folder,
      mesh=mesh,
      dtype=values.dtype,
      strict=values.strict,
      rope_scaling=values.rope_scaling,
      predict_layers=isinstance(drafter, speculate.PredictDraft)
      and not isinstance(drafter, HEADS),
      **options,
    )
  if isinstance(drafter, speculate.Eagle3):
    model = rj.models.eagle3.load(drafter.model, model)
  elif isinstance(drafter, speculate.DFlash):
    model = rj.models.dflash.load(drafter.model, model)
  if not chosen:
    return model, None
  parts, dtype = [], jax.numpy.dtype(model.dtype)
  in_file = is_gguf(fetched_models.resolve(folder))
  if values.mesh is None and values.devices is None:
    parts.append(f"one device (a mesh: --devices={DEVICES})")
  if model.saved_dtype not in (None, dtype.name):
    saved_dtype = model.saved_dtype
    parts.append(
      f"weights of the file held in {dtype} (in half the memory, but slower: "
      f"--dtype={saved_dtype})"
      if in_file
      else f"weights of {saved_dtype} held in {dtype} (as in the folder, but "
      f"slower: --dtype={saved_dtype})"
    )
  elif dtype.itemsize == 2 and codes and values.dtype is None:
    model = rj.models.with_coded_weights(model, bits=8)
    parts.append(
      f"weights of {dtype} as codes of 8 bits, as there is no room for float32 "
      f"({'as floats' if in_file else 'as in the folder'}, but slower: "
      f"--dtype={dtype})"
    )
  elif dtype.itemsize == 2:
    parts.append(
      f"weights in {dtype}, which XLA converts anew for every token: "
      "--dtype=float32 is faster"
    )
  return model, f"CPU: {'; '.join(parts)}" if parts else None

"""Loads models for inference, with fast defaults on one CPU device."""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from launch.shared.common import DEVICES
from ringjax import fetched_models
from ringjax.data.gguf.gguf_file import is_gguf
from ringjax.models.transformer import Transformer


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
      **options,
    )
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

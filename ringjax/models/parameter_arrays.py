"""Arrays of a module by their paths: taken out, put in, digested."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

from ringjax.models.hf.tensors import parameters

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer


def arrays_of(module: nnx.Module) -> dict[str, Any]:
  """The array of each parameter, by its path."""
  return {k: p.get_value() for k, p in parameters(module).items()}


def filled(
  empty: nnx.Module,
  arrays: Mapping[str, Any],
  like: Transformer | None = None,
) -> Any:
  """A module of shapes with arrays in their place, by their paths.

  `like`: a model of whose folder it is; None for parts of one.
  """
  flat, form = jax.tree.flatten(
    empty, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  values = [
    p.replace(arrays[k]) for k, p in zip(parameters(empty), flat, strict=True)
  ]
  made = jax.tree.unflatten(form, values)
  if like is not None:
    made.source, made.origin = like.source, like.origin
  return made


def on_host(x: Shaped[Array, " ..."]) -> np.ndarray:
  """All of an array, in all processes."""
  if not x.is_fully_addressable and not x.is_fully_replicated:
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))


def tensors_digest(arrays: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of names, dtypes, shapes and bytes."""
  found = hashlib.sha256()
  for name in sorted(arrays):
    x = np.ascontiguousarray(arrays[name])
    found.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
  return found.hexdigest()

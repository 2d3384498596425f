"""Arrays of a module by their paths: read, filled in, digested."""

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
  """Fills a module of shapes with arrays, by their paths.

  `like` is a model whose folder the result belongs to; None for a part of one.
  """
  flat, form = jax.tree.flatten(
    empty, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  values = [
    p.replace(arrays[k]) for k, p in zip(parameters(empty), flat, strict=True)
  ]
  module = jax.tree.unflatten(form, values)
  if like is not None:
    module.source, module.origin = like.source, like.origin
  return module


def on_host(x: Shaped[Array, " ..."]) -> Shaped[np.ndarray, " ..."]:
  """Copies all of an array to the host, in all processes."""
  if not x.is_fully_addressable and not x.is_fully_replicated:
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))


def tensors_digest(arrays: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of names, dtypes, shapes and bytes."""
  hasher = hashlib.sha256()
  for name in sorted(arrays):
    x = np.ascontiguousarray(arrays[name])
    hasher.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
  return hasher.hexdigest()

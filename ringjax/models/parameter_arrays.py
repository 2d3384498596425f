"""Arrays of a module by their paths: read, filled in, digested."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

from ringjax.errors import CheckpointMismatchError
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


def weights_as(model: Transformer, like: Transformer) -> Any:
  """The model `like` with the weights of another one of the same shapes.

  Arrays with the sharding and dtype of those in `like` are taken as they are,
  not copied; others are cast and moved.

  Raises:
    CheckpointMismatchError: If a parameter is missing or has another shape.
  """
  new, old = arrays_of(model), arrays_of(like)
  differ = sorted(set(new) ^ set(old))
  if differ:
    raise CheckpointMismatchError(
      "model",
      f"a {model.config.family} with other parameters, such as {differ[0]}",
      f"those of this {like.config.family}",
      "pass a model of the same config",
    )
  for name, x in new.items():
    if x.shape != old[name].shape:
      raise CheckpointMismatchError(
        name,
        f"shape {x.shape}",
        f"{old[name].shape}, that of the weights it replaces",
        "pass a model of the same config and vocabulary",
      )

  def placed(x: jax.Array, place: jax.Array) -> jax.Array:
    if x.dtype != place.dtype:
      x = x.astype(place.dtype)
    in_place = x.sharding.is_equivalent_to(place.sharding, x.ndim)
    return x if in_place else jax.device_put(x, place.sharding)

  arrays = [placed(new[name], old[name]) for name in old]
  return jax.tree.unflatten(jax.tree.structure(like), arrays)


def on_host(x: Shaped[Array, " ..."]) -> Shaped[np.ndarray, " ..."]:
  """Copies all of an array to the host, in all processes."""
  if not x.is_fully_addressable and not x.is_fully_replicated:
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))


def checksums(module: nnx.Module) -> list[int]:
  """A uint32 checksum of each array, computed where it is, on every mesh."""

  def weighted_sum(x: jax.Array) -> jax.Array:
    bits = _bits(x).astype(jnp.uint32)
    # Weighted by position; sums of integers do not depend on their order.
    index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    odd = index * jnp.uint32(2) + jnp.uint32(1)
    return jnp.sum(bits * odd, dtype=jnp.uint32)

  sums = jax.jit(
    lambda module: [weighted_sum(x) for x in jax.tree.leaves(module)]
  )(module)
  return [int(x) for x in jax.device_get(sums)]


def _bits(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """The bits of numbers as unsigned integers, of codes of 8 bits, too."""
  if x.dtype == jnp.bool or jnp.issubdtype(x.dtype, jnp.unsignedinteger):
    return x
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
  return jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize])


def tensors_digest(arrays: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of names, dtypes, shapes and bytes."""
  hasher = hashlib.sha256()
  for name in sorted(arrays):
    x = np.ascontiguousarray(arrays[name])
    hasher.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
  return hasher.hexdigest()

"""Digests that tell models apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer


def digest(data: bytes) -> str:
  """The first 64 bits of a SHA-256, in hexadecimal digits."""
  return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(model: Transformer, dtype: DTypeLike | None = None) -> str:
  """A digest of a corner of each of a model's weights.

  Args:
    model: a `Transformer`.
    dtype: to which weights are rounded first; None: as they are.
  """
  found = hashlib.sha256()
  for leaf in jax.tree.leaves(model):
    on_host = all(d.platform == "cpu" for d in leaf.devices())
    weight = np.asarray(leaf) if on_host else leaf
    corner = np.asarray(weight[tuple(slice(0, 4) for _ in weight.shape)])
    if dtype is not None and jnp.issubdtype(corner.dtype, jnp.floating):
      corner = corner.astype(dtype)
    found.update(corner.tobytes())
  return found.hexdigest()[:16]

"""Loaded models, each once for all tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from ringjax import models
from tests import checkpoints
from tests.helpers import make_mesh


@pytest.fixture(scope="package")
def loaded(tmp_path_factory) -> Callable[..., tuple[Any, Mesh | None]]:
  """(model, mesh) of a fixture, by its name, on so many devices."""
  root = tmp_path_factory.mktemp("models")

  @functools.cache
  def load(name: str, devices: int = 1) -> tuple[Any, Mesh | None]:
    folder = root / name
    if not folder.exists():
      checkpoints.write(name, folder)
    mesh = make_mesh(devices, "auto") if devices > 1 else None
    return jax.block_until_ready(models.load(folder, mesh=mesh)), mesh

  return load

"""Loaded models, each once for all tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ringjax import infer, models
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


@pytest.fixture(scope="module")
def alone(request, loaded) -> Callable[[str], tuple]:
  """One device's prompt, logits, cache and greedy tokens, by model.

  The module says how many TOKENS the prompt has, and how many are NEW.
  """
  tokens, new = request.module.TOKENS, request.module.NEW

  @functools.cache
  def read(name: str) -> tuple:
    model, _ = loaded(name)
    draw = np.random.default_rng(11)
    ids = draw.integers(0, model.config.vocab, tokens).astype(np.int32)
    session = infer.Session(model, tokens + new)
    (answer,) = infer.generate(
      model, [ids], max_new_tokens=new, prefill="dense", cache=session
    )
    rows = np.array([[tokens - 1]], np.int32)
    logits = np.asarray(model(ids[None], rows=rows)[:, 0])
    return ids, logits, session.cache, answer.tolist()

  return read

"""Layers in host memory and on disk give the numbers of a resident model."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  MemoryEstimateError,
  MeshError,
  OptionError,
)
from ringjax.models import weight_placement
from ringjax.models.fingerprint import fingerprint
from ringjax.models.first_layers import first_layers
from ringjax.models.hf import layer_reader
from ringjax.models.hf.folder import Folder
from tests import checkpoints

LAYERS, MIXED = 5, "device=.4,host=.2,disk=.4"
TOKENS = np.arange(2 * 9).reshape(2, 9) % 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  config = checkpoints.config("llama3") | {"num_hidden_layers": LAYERS}
  path = tmp_path_factory.mktemp("placement") / "model"
  rj.models.save(rj.models.create(config, seed=3), path)
  return path


@pytest.fixture(scope="module")
def resident(folder):
  model = rj.models.load(folder)
  return model, np.asarray(model(TOKENS))


def tokens_of(model, **options):
  new = rj.infer.generate(
    model, [[5, 6, 7, 8, 9], [3, 4, 1]], max_new_tokens=4, **options
  )
  return np.asarray(new)


@pytest.mark.parametrize(
  "placement",
  [MIXED, *(pytest.param(x, marks=pytest.mark.long) for x in ("disk", "host"))],
)
def test_equals_resident(placement, folder, resident):
  model = rj.models.load(folder, placement=placement)
  whole, want = resident
  np.testing.assert_array_equal(np.asarray(model(TOKENS)), want)
  np.testing.assert_array_equal(tokens_of(model), tokens_of(whole))
  found = model.placement_report()
  on_disk = [n for n, tier in enumerate(found.tiers) if tier == "disk"]
  assert found.tiers == {
    MIXED: ("device", "disk", "host", "disk", "device"),
    "disk": ("disk",) * 5,
    "host": ("host",) * 5,
  }[placement]
  assert set(found.reads) == set(on_disk)
  assert found.peak_buffer_bytes <= found.buffer_bytes
  each = found.streamed_parameters * 4
  assert found.host_bytes + found.disk_bytes == each
  assert model.digest == whole.digest
  assert fingerprint(model) == fingerprint(whole)

"""The checks of launch.doctor on a TPU and on a GPU; skipped without one.

pytest -m tpu tests/launch/test_doctor_on_chips.py
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from ringjax.bench.doctor import checkup, inventory
from ringjax.bench.doctor.kernel_checks import LOOPS
from ringjax.ops import kernel_choice
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.parallel import gpu_processes
from tests.launch.conftest import ROOT

# Platforms as JAX_PLATFORMS names them; float64 is computed on the CPU.
PLATFORMS = {"tpu": "tpu,cpu", "gpu": "cuda,cpu"}


def absent(platform: str) -> str | None:
  """Why the checks of a platform can't run here, or None."""
  if platform == "tpu":
    if not inventory.tpu_files():
      return "no TPU here"
    return None if importlib.util.find_spec("libtpu") else "no libtpu here"
  if not gpu_processes.visible_gpus({}):
    return "no NVIDIA GPU here"
  plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
  if not any(map(importlib.util.find_spec, plugins)):
    return "JAX here has no CUDA"
  return None


@pytest.fixture(scope="module")
def findings_of(tmp_path_factory):
  """Findings of a platform, in a process of its own: this one uses the CPU."""

  @functools.cache
  def run(platform: str) -> list[dict]:
    path = tmp_path_factory.mktemp(platform) / "doctor.json"
    # Of this run of tests alone: a user's environment has none.
    own = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS", "RINGJAX_OFF")
    variables = {k: v for k, v in os.environ.items() if k not in own}
    done = subprocess.run(
      [sys.executable, "-m", "launch.doctor", f"--json={path}"],
      cwd=ROOT,
      env=variables | {"JAX_PLATFORMS": PLATFORMS[platform]},
      capture_output=True,
      text=True,
      check=False,
    )
    assert path.is_file(), done.stdout + done.stderr[-2000:]
    return json.loads(path.read_text())["findings"]

  def findings(platform: str) -> list[dict]:
    reason = absent(platform)
    if reason is not None:
      pytest.skip(reason)
    return run(platform)

  return findings


def cases(values_of):
  """(platform, value) of each value of a platform, with the platform's mark."""
  return [
    pytest.param(platform, value, marks=getattr(pytest.mark, platform))
    for platform in PLATFORMS
    for value in values_of(platform)
  ]


def kernels(platform: str) -> list[str]:
  kinds = (*auto_kernel.KERNELS[platform], *auto_kernel.DECODERS[platform])
  return [*map(kernel_choice.kernel_name, kinds), LOOPS]


@pytest.mark.parametrize(("platform", "name"), cases(kernels))
def test_a_kernel_is_right_on_the_chip(findings_of, platform, name):
  rows = [
    row
    for row in findings_of(platform)
    if row["part"] == "kernels" and row["name"].partition(":")[0] == name
  ]
  assert {"OK"} <= {row["status"] for row in rows}, rows
  assert not [row for row in rows if row["status"] == "WRONG"]


@pytest.mark.parametrize(("platform", "part"), cases(lambda _: checkup.PARTS))
def test_a_part_finds_nothing_wrong_on_the_chip(findings_of, platform, part):
  rows = [row for row in findings_of(platform) if row["part"] == part]
  assert rows
  assert not [row for row in rows if row["status"] == "WRONG"]

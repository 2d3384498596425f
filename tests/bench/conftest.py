"""What tests of benchmarks share."""

from __future__ import annotations

import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import bench


@pytest.fixture
def command(monkeypatch):
  """Runs `python -m launch.bench` with these arguments, in this process."""

  def run(*args):
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    with flagsaver.flagsaver():
      return bench.main(flags.FLAGS(sys.argv))

  return run

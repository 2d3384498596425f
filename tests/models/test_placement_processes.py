"""Streamed models in two processes: each reads the shards of its devices."""

from __future__ import annotations

import pathlib
import shutil

import pytest

import ringjax as rj
from tests import checkpoints
from tests.helpers import two_processes


@pytest.mark.slow
def test_two_processes(tmp_path):
  config = checkpoints.config("llama3") | {"num_hidden_layers": 3}
  rj.models.save(rj.models.create(config, seed=3), tmp_path / "0")
  shutil.copytree(tmp_path / "0", tmp_path / "1")
  script = pathlib.Path(__file__).with_name("placement_process.py")
  found = two_processes([str(script)], tmp_path)
  for mine in found:
    for name in ("logits", "tokens", "step", "buffers", "after"):
      assert mine[name] is True, (name, mine)
    assert sorted(mine["tiers"]) == ["device", "disk", "host"]
    # Of what is sharded each process reads a half; norms are whole. Two
    # devices of a process have a shard each of what is in host memory.
    assert 0.5 <= mine["share"] < 0.6
    assert 1 <= mine["host_share"] < 1.1
  # The process that fails, and the one that would wait for it.
  for mine, other in zip(
    [*found[1]["read"], *found[1]["load"]],
    [*found[0]["read"], *found[0]["load"]],
    strict=True,
  ):
    assert mine.startswith("CheckpointFormatError"), mine
    assert other.startswith("CheckpointFormatError process 1: "), other
    assert mine.removeprefix("CheckpointFormatError ")[:100] in other
  assert found[1]["other"] == "OutOfMemoryError none is left"
  assert found[0]["other"].startswith("PeerError process 1: none is left")

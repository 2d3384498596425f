"""KV-Runahead in three processes: the cache of one device, and faults.

All of it is one run of three processes, see ranks.py; the tests look at what
they noted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests import checkpoints

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
SIZE = 3
MODELS = ("llama3", "falcon_7b", "mistral")
CASES = [("llama3", "2 17"), *itertools.product(MODELS, ("3 9", "3 1"))]
# Of a machine that does other things too.
PATIENCE_S = 900


@pytest.fixture(scope="module")
def noted(tmp_path_factory) -> list[dict]:
  """What each rank found."""
  folder = tmp_path_factory.mktemp("ranks")
  for name in MODELS:
    checkpoints.write(name, folder / name)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
  with contextlib.ExitStack() as stack:
    running = []
    for rank in range(SIZE):
      log = stack.enter_context(open(folder / f"{rank}.log", "w"))
      argv = [str(folder), str(port), str(SIZE), str(rank)]
      one = subprocess.Popen(
        [sys.executable, str(HERE / "ranks.py"), *argv],
        env=env,
        stdout=log,
        stderr=log,
      )
      stack.callback(one.wait)
      stack.callback(one.kill)
      running.append(one)
    for one in running:
      one.wait(PATIENCE_S)
  found = []
  for rank in range(SIZE):
    path = folder / f"{rank}.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    said["log"] = (folder / f"{rank}.log").read_text()[-2000:]
    found.append(said)
  return found


def owner(noted: list[dict], name: str) -> dict:
  """What the rank that has the cache noted."""
  (found,) = [n[name] for n in noted if "logits" in n.get(name, {})]
  return found


@pytest.mark.slow
def test_all_ranks_came_to_the_end(noted):
  for rank in (0, 1):
    assert noted[rank].get("done"), noted[rank]["log"]


@pytest.mark.long_cases(5)
@pytest.mark.parametrize(("model", "part"), CASES)
def test_logits_and_cache_are_right(noted, model, part):
  found = owner(noted, f"{model} {part}")
  assert found["logits"] < 5e-6
  assert max(found["keys"]) < 5e-6


@pytest.mark.long_cases(7)
@pytest.mark.parametrize(("model", "part"), CASES)
def test_greedy_tokens_are_those_of_one_device(noted, model, part):
  found = owner(noted, f"{model} {part}")
  got, want = found["tokens"]
  assert len(got) == 32
  assert got == want
  assert len(found["more"][0]) == 2


@pytest.mark.long_cases(7)
@pytest.mark.parametrize(("model", "part"), CASES)
def test_bytes_are_counted(noted, model, part):
  for found in (n[f"{model} {part}"] for n in noted):
    assert list(found["link_bytes"].values()) == found["formula"]
  # Keys and values, float32, of two layers: by hand, heads and head dim.
  row = {"llama3": 2 * 16, "falcon_7b": 1 * 12, "mistral": 2 * 12}[model]
  ends = {"2 17": [25], "3 9": [20, 33], "3 1": [33, 41]}[part]
  if model == "mistral":
    ends = [8] * len(ends)  # A window of 9 sees 8 tokens back.
  layers = 2
  want = [layers * 2 * row * 4 * n for n in ends]
  assert noted[0][f"{model} {part}"]["formula"] == want


@pytest.mark.parametrize("model", MODELS)
def test_a_new_partition_compiles_little(noted, model):
  for found in noted:
    parts = [part for name, part in CASES if name == model]
    counts = [found[f"{model} {part}"]["programs"] for part in parts]
    # A rank that has been idle learns what only the last one does.
    assert counts[0] <= counts[-1] <= counts[0] + 2
    # One a piece: both layers share them.
    assert counts[-1] <= 10


def test_work_is_counted(noted):
  for n in noted:
    assert n["llama3 2 17"]["tiles"][2] == 0
    assert all(x > 0 for x in n["llama3 3 9"]["tiles"])


def test_ranks_that_do_not_agree(noted):
  for n in noted:
    kind, rank, text = n["odd partition"]
    assert (kind, rank) == ("PeerError", 1)
    assert "partition" in text and "19, 14, 9" in text and "20, 13, 9" in text
    kind, rank, text = n["odd tokens"]
    assert (kind, rank) == ("PeerError", 2) and "tokens" in text
    kind, rank, text = n["odd cache"]
    assert (kind, rank) == ("PeerError", 0) and "cache dtype" in text


@pytest.mark.long_cases(4)
@pytest.mark.parametrize("number", range(4))
def test_wrong_partitions(noted, number):
  for n in noted:
    kind, _, text = n[f"wrong {number}"]
    assert kind == "OptionError" and "partition" in text


def test_one_that_refuses_ends_it_for_all(noted):
  assert noted[1]["one refuses"][0] == "OptionError"
  for n in (noted[0], noted[2]):
    kind, rank, text = n["one refuses"]
    assert (kind, rank) == ("PeerError", 1)
    assert text.startswith("rank 1 refused: partition: got (20, 23)")


def when(spans: list, name: str) -> tuple[float, float]:
  ((_, start, end),) = [s for s in spans if s[0] == name]
  return start, end


def test_early_ranks_run_ahead(noted):
  spans = noted[0]["late kvr"]
  start, _ = when(spans, "project 2.0")
  for rank in (0, 1):
    assert when(spans, f"attend {rank}.0")[1] < start


def test_ranks_together_wait_for_the_last(noted):
  spans = noted[0]["tsp"]["spans"]
  start, _ = when(spans, "attend 2.0")
  for rank in (0, 1):
    assert when(spans, f"attend {rank}.0")[1] > start


@pytest.mark.long_cases(4)
@pytest.mark.parametrize("method", ["tsp", "flash_tsp", "ring", "striped"])
def test_baselines_compute_the_same(noted, method):
  for n in noted:
    assert n[method]["logits"] < 5e-6


def test_a_rank_that_is_stuck(noted):
  for n in (noted[0], noted[2]):
    kind, rank, text = n["stuck"]
    assert (kind, rank) == ("PeerError", 1)
    assert "rank 1" in text
  assert "given up" in noted[1]["stuck"][2]


def test_a_rank_that_dies(noted):
  for n in (noted[0], noted[1]):
    kind, rank, text = n["dead"]
    assert (kind, rank) == ("PeerError", 2)
    assert "rank 2 is gone" in text
  assert "dead" not in noted[2]

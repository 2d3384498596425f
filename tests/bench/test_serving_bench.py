"""launch.bench serve: traces replayed, and what they are compared with."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.serving.serving import (
  ServeBenchmark,
  ServeSettings,
  requests_of,
)
from ringjax.errors import OptionError
from tests.helpers import refused

COST = "answers=0.01,prompts=0.02,row=1e-4,token=1e-4,key=1e-7,pair=1e-7"


def run(settings, **files):
  said = []
  found = ServeBenchmark.run(settings, say=said.append, **files)
  return found, "\n".join(said)


def test_a_file_is_simulated(tmp_path):
  rows = [
    dict(
      timestamp=1000 * n,
      input_length=1024,
      output_length=20,
      hash_ids=[0, n + 1],
    )
    for n in range(9)
  ]
  trace = tmp_path / "t.jsonl"
  trace.write_text("\n".join(map(json.dumps, rows)))
  settings = ServeSettings(trace=str(trace), cost=COST, shrink=2, speed="4")
  out = tmp_path / "out.json"
  found, said = run(settings, json=str(out))
  assert json.loads(out.read_text())["hit_rate"] == found["hit_rate"]
  assert found["requests"] == 9 and found["new_tokens"] == 90
  # All but the first find the first half of their prompts.
  assert found["cached_tokens"] == 8 * 256
  assert found["seconds"] > 8 / 4
  assert "p50" in said and "hit rate            44.4%" in said
  fewer, _ = run(ServeSettings(trace=str(trace), cost=COST, requests=3))
  assert fewer["prompt_tokens"] == 3 * 1024
  # Half the rows: requests that come at once wait for each other.
  slow = [
    run(ServeSettings(rate="inf", cost=COST, rows=rows, requests=32))[0]
    for rows in (16, 2)
  ]
  p90 = [found["first_s"]["p90"] for found in slow]
  assert p90[1] > 2 * p90[0]


def test_a_picture(tmp_path):
  pytest.importorskip("matplotlib")
  path = tmp_path / "plot.png"
  run(ServeSettings(requests=20, cost=COST), plot=str(path))
  assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
  ("options", "word"),
  [
    (dict(rate="fast"), "rate"),
    (dict(rate="0"), "rate"),
    (dict(speed="inf"), "speed"),
    (dict(cost="x"), "cost"),
    (dict(cost=COST, engine="live"), "cost"),
    (dict(engine="paper"), "engine"),
    (dict(trace="no.csv", compare="sequential"), "compare"),
    (dict(cost=COST, compare="simulated"), "compare=simulated"),
    (dict(requests=3, compare="generate"), "several requests"),
    (dict(new_tokens=1, compare="simulated"), "new_tokens=2"),
    (dict(rows=0), "rows"),
    (dict(spread="-1"), "spread"),
    (dict(layers="stacked"), "layers"),
    (dict(compare="vllm"), "compare"),
    (dict(speculate="lookup"), "live"),
  ],
)
def test_options_are_refused(options, word):
  refused(OptionError, lambda: ServeSettings(**options), word)


def test_missing_files_are_refused():
  settings = ServeSettings(trace="/nowhere.csv")
  refused(OptionError, lambda: requests_of(settings), "trace")


def test_missing_packages_are_refused(monkeypatch, command, capsys):
  # What is None there cannot be imported.
  monkeypatch.setitem(sys.modules, "torch", None)
  settings = ServeSettings(compare="transformers", model="llama-100m")
  refused(OptionError, lambda: run(settings), "torch", "[oracle]")
  assert command("serve", "--compare=transformers") == 2
  assert "pip install" in capsys.readouterr().err


def test_equal_lengths_by_chance():
  of = lambda spread: {
    (one.prompt_tokens, one.new_tokens)
    for one in requests_of(ServeSettings(requests=9, spread=spread))
  }
  assert of("0") == {(256, 64)} and len(of("0.5")) > 4


@pytest.mark.slow
@pytest.mark.long
def test_live_and_compared():
  small = dict(
    requests=6, prompt_tokens=30, new_tokens=6, longest=256, rows=4, page=16
  )
  found, said = run(ServeSettings(engine="live", rate="50", **small))
  assert found["requests"] == 6 and "live: 6 requests" in said
  found, _ = run(ServeSettings(**small))
  assert max(found["cost"].values()) > 0 and found["requests"] == 6
  found, said = run(ServeSettings(compare="sequential", rounds=2, **small))
  assert found["ratio"] > 0 and "of medians" in said
  assert found["equal"]
  alone = {name: x for name, x in small.items() if name != "requests"}
  lone, said = run(ServeSettings(compare="generate", rounds=1, **alone))
  assert len(lone["lone"]) == 4 and "lone answer" in said
  small |= dict(compare="plain", rounds=1)
  small |= dict(speculate="lookup:count=3,adapt=false")
  small |= dict(prompt_tokens=400, longest=512, spread="0")
  found, said = run(ServeSettings(**small))
  assert set(found["compared"]) == {"engine", "plain"}
  assert found["equal"] and "drafted tokens were right" in said


@pytest.mark.long
def test_compared_with_transformers():
  pytest.importorskip("transformers")
  pytest.importorskip("torch")
  found, said = run(
    ServeSettings(
      compare="transformers",
      layers="unrolled",
      requests=5,
      prompt_tokens=20,
      new_tokens=5,
      rows=3,
      page=16,
      rounds=1,
    )
  )
  assert {"engine", "transformers_1"} <= set(found["compared"])
  assert "tokens/s" in said and found["ratio"] > 0
  # On the same weights the same tokens, but for logits within rounding.
  assert found["agreed"] > 0.9

"""launch.bench kvr: what it counts, and that its processes are real."""

from __future__ import annotations

import json

import pytest

from launch.planning import runahead
from ringjax.errors import OptionError


def test_the_paper_s_example(tmp_path):
  lines = []
  found = runahead.run(
    runahead.Settings(parts=("example",)),
    json=str(tmp_path / "kvr.json"),
    say=lines.append,
  )
  assert found["example"] == {
    "kvr": {"products": [16, 21, 18], "rows": 22},
    "tsp": {"products": [27, 27, 27], "rows": 36},
  }
  assert "16/21/18" in lines[1] and "27 each" in lines[2]
  assert json.loads((tmp_path / "kvr.json").read_text()) == found


@pytest.mark.parametrize(
  ("wrong", "words"),
  [
    ({"parts": ("walls",)}, "parts: got walls"),
    ({"methods": ("kvr", "tps")}, "methods: got tps"),
    ({"methods": ()}, "methods: got none"),
    ({"processes": 1}, "processes"),
    ({"rounds": 0}, "rounds"),
    ({"tokens": (0,)}, "tokens"),
  ],
)
def test_wrong_settings(wrong, words):
  with pytest.raises(OptionError, match=words):
    runahead.Settings(**wrong)


@pytest.mark.slow
def test_two_processes_with_a_core_each(tmp_path):
  pytest.importorskip("matplotlib")
  lines = []
  found = runahead.run(
    runahead.Settings(
      parts=("wall", "delayed"),
      tokens=(192,),
      methods=("kvr", "tsp"),
      preset="",
      rounds=1,
    ),
    plot=str(tmp_path / "kvr.png"),
    say=lines.append,
  )
  (wall,) = found["wall"]
  rows = {row["method"]: row for row in wall["methods"]}
  assert list(rows) == ["kvr", "tsp"]
  assert sum(rows["kvr"]["partition"]) == 192
  assert (tmp_path / "kvr.png").read_bytes()[:4] == b"\x89PNG"
  # Under TSP the first rank waits in every layer for the last one.
  done = {
    row["method"]: row["computed_s_by_rank"]
    for row in found["delayed"]["delayed"]["methods"]
  }
  layers = wall["layers"]
  assert min(done["tsp"]) > 0.2 * layers
  assert done["kvr"][0] < done["kvr"][1]
  assert any("of kvr's" in line for line in lines)


@pytest.mark.slow
def test_a_process_that_fails_says_why():
  settings = runahead.Settings(
    parts=("wall",), tokens=(64,), preset="no-such-model", rounds=1
  )
  with pytest.raises(OptionError, match="process 0: got status 2"):
    runahead.run(settings, say=lambda line: None)

"""The page of systems, and the commands that make it."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from benchmarks import pages, real, systems, table


def test_the_page_is_that_of_the_stored_results():
  results = real.Results(real.RESULTS).read()
  page = real.RESULTS.with_suffix(".md").read_text("utf-8")
  assert page == pages.page(results)


def test_rows_have_names_and_show_something_or_say_why_not():
  names = [row.name for row in systems.ROWS]
  assert len(set(names)) == len(names)
  for row in systems.ROWS:
    assert re.fullmatch(r"\d{4}\.\d{5}|[A-Z]\S* \d{4}", row.paper), row.name
    assert bool(row.runs) != bool(row.unless), row.name
    for run in row.runs:
      for command in (*(step.command for step in run.before), run.command):
        script = command.split()[2].replace(".", "/")
        assert (real.ROOT / f"{script}.py").is_file(), command


def test_results_of_commands_are_kept_one_by_one(tmp_path):
  results = real.Results(tmp_path / "results.json")
  assert results.read() == {}
  run = table.Run(
    """python -c 'print("said before"); print("{\\"x\\": [3, 4]}")'""",
    lambda found: {"last": found["x"][-1]},
  )
  result = real.measured(run)
  assert result["figures"] == {"last": 4}
  assert result["peak_bytes"] > 1e6 and result["seconds"] >= 0
  results.add(run.command, result)
  results.add("another", {"figures": {}})
  assert results.read()[run.command] == json.loads(json.dumps(result))
  assert [x.name for x in pathlib.Path(tmp_path).iterdir()] == ["results.json"]


@pytest.mark.parametrize(
  ("command", "words"),
  [
    ("python -c 'raise SystemExit(3)'", "exit status 3"),
    ("python -c 'print(1)'", "in what it printed"),
    ("python -c 'print([)'", "exit status 1"),
  ],
)
def test_a_command_that_fails_says_so(command, words):
  run = table.Run(command, lambda found: {"x": found["x"]})
  with pytest.raises(real.CommandError, match=words):
    real.measured(run)


def test_what_a_command_reads_is_made_once(tmp_path):
  made, maker = tmp_path / "made", tmp_path / "maker.py"
  maker.write_text(f"open({str(made)!r}, 'a').write('x')")
  teller = tmp_path / "teller.py"
  teller.write_text(f"print(len(open({str(made)!r}).read()))")
  step = table.Step(f"python {maker}", str(made))
  run = table.Run(f"python {teller}", lambda length: {"x": length}, (step,))
  for _ in range(2):
    assert real.measured(run)["figures"] == {"x": 1}
  nothing = table.Step(f"python {teller}", str(tmp_path / "other"))
  with pytest.raises(real.CommandError, match="made no"):
    real.prepare(nothing)

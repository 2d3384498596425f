"""launch.instances: prompts in, answers of a group of processes out."""

from __future__ import annotations

import functools
import json

import pytest

from launch import instances
from tests.helpers import script

run = functools.partial(script, instances)

TEXTS = ("the passkey is 1234 and the grass is green", "import os", "a")


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "prompts.txt"
  path.write_text("\n\n".join(TEXTS))
  return str(path)


@pytest.mark.slow
def test_one_leaves_and_one_is_killed(file):
  status, out, err = run(
    "--workers=3", "--slots=40", "--max_new_tokens=8", "--steps=2", "--leave=0",
    "--kill=1", "--check", file,
  )  # fmt: skip
  assert status == 0, err
  record = json.loads(out)
  assert record["equal"] == [True] * 3 and record["lost"] == 1
  assert [x["error"] for x in record["answers"]] == [""] * 3
  assert {"read", "step", "lost", "release"} <= {
    x["event"] for x in record["groups"]
  }


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--workers=2", "--kill=2", "FILE"), "below 2"),
    (("--leave=7", "FILE"), "--leave"),
    ((), "no prompt"),
    (("/none.txt",), "/none.txt"),
  ],
)
def test_refusals(file, argv, words):
  status, out, err = run(*(file if x == "FILE" else x for x in argv))
  assert status == 2 and out == "" and words in err, err

"""generate, sessions and drafts on a mesh of several processes.

The program of each process is answer_process.py. Scripts in several processes
are in tests/launch, engines in tests/serve/test_engine_processes.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.infer import answer_process
from tests.infer.answer_process import CASES

ROOT = pathlib.Path(__file__).parents[2]
# Processes that hang fail a test.
PATIENCE_S = 900


def answers(folder: pathlib.Path, size: int, cases: Sequence[int]) -> list[Any]:
  """Answers of process 0 of a group, once all have ended."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    # Threads of XLA's CPU client, which collectives block.
    "NPROC": "8",
  }
  numbers = ",".join(map(str, cases))
  script = pathlib.Path(answer_process.__file__)
  argv = [sys.executable, str(script), str(folder), str(port), str(size)]
  processes = []
  try:
    for rank in range(size):
      with (folder / f"log{size}{rank}").open("w") as log:
        processes.append(
          subprocess.Popen(
            [*argv, str(rank), numbers],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
          )
        )
    for rank, process in enumerate(processes):
      process.wait(timeout=PATIENCE_S)
      log_text = (folder / f"log{size}{rank}").read_text()
      assert not process.returncode, log_text
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return json.loads((folder / f"{size}.json").read_text())


@pytest.mark.long
def test_two_processes_answer_as_one_device(tmp_path):
  """With a session, unequal rows, a second turn, codes and drafts."""
  (result,) = answers(tmp_path, 2, [0])
  assert result == answer_process.answers(CASES[0], None)


@pytest.mark.slow
def test_processes_answer_as_one(tmp_path):
  """On the same mesh in each case, which caches that evict need."""
  numbers = range(len(CASES))
  expected = answers(tmp_path, 1, numbers)
  assert answers(tmp_path, 2, numbers) == expected
  assert answers(tmp_path, 4, numbers) == expected

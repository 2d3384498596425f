"""An engine on a mesh of two processes, and processes that fail.

A quicker test of both is tests/launch/test_serve_hosts.py.
The program of each process is engine_process.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.serve import engine_process

ROOT = pathlib.Path(__file__).parents[2]
# Processes that hang fail a test.
PATIENCE_S = 400
# Exit status of a process that lost another one.
LOST = 3


def free_port() -> int:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return free.getsockname()[1]


@contextlib.contextmanager
def started(
  work: str, folder: pathlib.Path, size: int
) -> Iterator[list[subprocess.Popen]]:
  """The processes of a group, which do not outlive the block."""
  script = pathlib.Path(engine_process.__file__)
  paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    # Threads of XLA's CPU client, which collectives block.
    "NPROC": "8",
  }
  port, files = str(free_port()), contextlib.ExitStack()
  processes = [
    subprocess.Popen(
      [sys.executable, script, work, folder, port, str(size), str(rank)],
      cwd=ROOT,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=files.enter_context((folder / f"err{size}{rank}").open("w")),
      text=True,
    )
    for rank in range(size)
  ]
  files.close()
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def answers(work: str, folder: pathlib.Path, size: int) -> list:
  with started(work, folder, size) as processes:
    for rank, process in enumerate(processes):
      # Each of many compiles all programs, on the same cores.
      process.communicate(timeout=PATIENCE_S * max(1, size // 2))
      assert not process.returncode, (folder / f"err{size}{rank}").read_text()
  return json.loads((folder / f"{size}.json").read_text())


def check_answers(work: str, folder: pathlib.Path, size: int = 2) -> None:
  expected, results = answers(work, folder, 1), answers(work, folder, size)
  assert results == expected
  for number, engine in zip(work.split(","), results, strict=True):
    counts = engine[-1]
    options = engine_process.ENGINES[int(number)][1]
    assert counts["cancelled"] == 1
    assert counts["shared"]
    assert counts["drafted"] == ("speculate" in options)
    assert counts["swapped"] or options.get("preempt") != "swap"


@pytest.mark.slow
def test_two_processes_answer_as_one(tmp_path):
  """With common prefixes, drafts, codes, a mask, beams, seeds, preemption."""
  check_answers("0,1,2,3,4", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_many_processes_answer_as_one(tmp_path, size):
  """With two devices or one each; the sequence is over all of them."""
  check_answers("5", tmp_path, size)


@pytest.mark.slow
def test_processes_that_start_again_find_stored_prefixes(tmp_path):
  """With each process's parts of the pages; the second time all are there."""
  expected = answers("6,7", tmp_path, 1)
  first, again = (answers("6,7", tmp_path, 2) for _ in range(2))
  for right, engine, later in zip(expected, first, again, strict=True):
    assert engine[:-1] == later[:-1] == right[:-1]
    assert later[-1]["stored"] > engine[-1]["stored"]


class Served:
  """Two processes that answer requests until one fails."""

  def __init__(self, folder: pathlib.Path, processes: list[subprocess.Popen]):
    self.folder, self.processes = folder, processes
    self.path = folder / "stream.json"

  def rounds(self) -> list:
    return json.loads(self.path.read_text()) if self.path.exists() else []

  def wait_for_rounds(self, count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while len(self.rounds()) < count:
      assert time.monotonic() < end and self.processes[0].poll() is None
      time.sleep(0.05)

  def check_failure(self, name: str, expected: list, at: float) -> None:
    """Process 0 has named a process, ended, and given no wrong token."""
    out, _ = self.processes[0].communicate(timeout=PATIENCE_S)
    assert self.processes[0].returncode == LOST, out
    last = self.rounds()[-1]
    assert name in last["error"] and "start them again" in last["error"]
    for tokens, ends, right in zip(
      last["tokens"], last["ends"], expected, strict=False
    ):
      for answer, end, answer_alone in zip(tokens, ends, right, strict=True):
        assert end in ("stop", "length", "error")
        assert answer == answer_alone[: len(answer)]
        assert end == "error" or answer == answer_alone
    # The machine of the tests is busy; heartbeats are not late by much more.
    assert last["ended"] - at < 4 * engine_process.TIMEOUT_S


def check_kill(
  folder: pathlib.Path, rank: int, number: signal.Signals, delay_s: float
) -> None:
  """A process gets a signal while requests are answered."""
  folder.mkdir(exist_ok=True)
  with started("stream", folder, 2) as processes:
    served = Served(folder, processes)
    served.wait_for_rounds(1)
    time.sleep(delay_s)
    expected = served.rounds()[0]["tokens"]
    at = time.time()
    processes[rank].send_signal(number)
    if rank:
      served.check_failure("rank 1", expected, at)
    else:
      out, _ = processes[1].communicate(timeout=PATIENCE_S)
      assert processes[1].returncode == LOST, out
      assert "rank 0" in out and "start them again" in out
      for finished in served.rounds():
        assert finished["tokens"] == expected and not finished["error"]


@pytest.mark.slow
def test_a_follower_that_is_stopped(tmp_path):
  check_kill(tmp_path, 1, signal.SIGSTOP, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(10))
def test_a_process_that_is_killed_at_any_moment(tmp_path, rank, number):
  delay_s = random.Random(f"{rank} {number}").uniform(0, 3)
  check_kill(tmp_path, rank, signal.SIGKILL, delay_s)

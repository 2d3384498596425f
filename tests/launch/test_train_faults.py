"""launch.train in several processes, of which one dies, hangs or is stopped."""

from __future__ import annotations

import json
import pathlib
import signal
import socket
import subprocess
import time

import pytest

from launch.shared.group import FAILED
from ringjax.train.loop import STUCK
from tests.launch.test_train import SMALL

# Of machines that do other things too.
PATIENCE_S = 600
STEPS = 12
ENDLESS = "--config.stages=({'steps': 100000, 'length': 160, 'batch': 2},)"
SHORT = f"--config.stages=({{'steps': {STEPS}, 'length': 160, 'batch': 2}},)"


@pytest.fixture
def argv(tmp_path) -> list[str]:
  """A training on two devices in each of two processes."""
  config = tmp_path / "small.py"
  config.write_text(SMALL)
  return [
    "-m",
    "launch.train",
    f"--config={config}",
    f"--out={tmp_path / 'out'}",
    "--mesh=seq:4",
    "--devices=2",
    "--config.log_every=1",
  ]


def rows(out: pathlib.Path) -> list[dict]:
  log = out / "log.jsonl"
  if not log.exists():
    return []
  # The last line may be half there.
  return [json.loads(x) for x in log.read_text().split("\n")[:-1]]


def wait_for(out: pathlib.Path, steps: int, *running: subprocess.Popen) -> None:
  end = time.monotonic() + PATIENCE_S
  while len(rows(out)) < steps:
    assert time.monotonic() < end, "the steps do not come"
    for one in running:
      assert one.poll() is None, one.communicate()[1]
    time.sleep(0.05)


def losses(out: pathlib.Path) -> dict[int, float]:
  return {row["step"]: row["loss"] for row in rows(out)}


def saved(out: pathlib.Path) -> list[int]:
  return sorted(
    int(x.name) for x in (out / "checkpoints").iterdir() if x.name.isdecimal()
  )


def slow(*values: object) -> object:
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.long
# Saving after each step it mostly dies in a save, else in a step.
@pytest.mark.parametrize(
  ("dying", "save_every"), [(0, 1000), slow(1, 1), slow(0, 1), slow(1, 1000)]
)
def test_a_dead_process_ends_the_others(
  argv, tmp_path, start_together, dying, save_every
):
  more = (ENDLESS, f"--config.save_every={save_every}")
  with start_together(*argv, *more, processes=2) as running:
    wait_for(tmp_path / "out", 2, *running)
    running[dying].kill()
    other = running[1 - dying]
    _, err = other.communicate(timeout=PATIENCE_S)
  lines = [x for x in err.splitlines() if x.startswith("train: ")]
  assert f"rank {dying} is gone" in lines[0] and "while training" in lines[0]
  if dying == 0 and other.returncode == -signal.SIGABRT:
    # Where the coordinator died JAX may end it, once that has been said.
    return
  assert other.returncode == FAILED
  assert len(lines) == 1 and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [1, 5])
@pytest.mark.parametrize("dying", [0, 1])
def test_what_is_left_goes_on_bit_for_bit(
  argv, tmp_path, start_together, dying, save_every
):
  """Killed in a step or in a save, and started again."""
  argv = [*argv, SHORT, f"--config.save_every={save_every}"]
  out, whole = tmp_path / "out", tmp_path / "whole"
  with start_together(*argv, f"--out={whole}", processes=2) as running:
    for one in running:
      _, err = one.communicate(timeout=PATIENCE_S)
      assert one.returncode == 0, err
  with start_together(*argv, processes=2) as running:
    wait_for(out, 7, *running)
    running[dying].kill()
    _, err = running[1 - dying].communicate(timeout=PATIENCE_S)
  assert running[1 - dying].returncode in (FAILED, -signal.SIGABRT)
  assert f"rank {dying} is gone" in err
  for step in saved(out):
    assert step <= 7 + 2
  with start_together(*argv, processes=2) as running:
    for one in running:
      _, err = one.communicate(timeout=PATIENCE_S)
      assert one.returncode == 0, err
  assert losses(out) == losses(whole)
  a, b = (folder / "model" / "model.safetensors" for folder in (out, whole))
  assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_frozen_process_is_given_up(argv, tmp_path, start_together, frozen):
  argv = [*argv, ENDLESS, "--config.timeout_s=5.0"]
  with start_together(*argv, processes=2) as running:
    wait_for(tmp_path / "out", 3, *running)
    running[frozen].send_signal(signal.SIGSTOP)
    other = running[1 - frozen]
    _, err = other.communicate(timeout=PATIENCE_S)
  # In a step the watch sees it, in a save that the other one is silent.
  if other.returncode == STUCK:
    assert "wanted one within 5 s" in err and "most recent call first" in err
    assert "loop.py" in err
  else:
    assert other.returncode in (FAILED, -signal.SIGABRT)
    assert f"rank {frozen} has said nothing for 5 s" in err


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
  ("processes", "told", "number", "status"),
  [
    slow(2, 0, signal.SIGTERM, 143),
    (2, 1, signal.SIGTERM, 143),
    slow(2, 0, signal.SIGINT, 130),
    slow(2, 1, signal.SIGINT, 130),
    slow(4, 2, signal.SIGTERM, 143),
  ],
)
def test_a_signal_to_one_process_stops_all(
  argv, tmp_path, start_together, processes, told, number, status
):
  """They save one step together, and say so."""
  out = tmp_path / "out"
  more = (ENDLESS, f"--mesh=seq:{2 * processes}")
  with start_together(*argv, *more, processes=processes) as running:
    wait_for(out, 3, *running)
    running[told].send_signal(number)
    said = [one.communicate(timeout=PATIENCE_S) for one in running]
  statuses = [one.returncode for one in running]
  # The others were told to end, and not by Ctrl-C.
  assert statuses.pop(told) == status, said
  assert set(statuses) == {143}, said
  assert saved(out)[-1] == rows(out)[-1]["step"]


@pytest.mark.slow
def test_each_process_brings_its_own_rows(argv, tmp_path, start_together):
  """As one process that brings them all."""
  whole = tmp_path / "whole"
  argv = [
    *argv,
    "--mesh=data:2,seq:2",
    "--config.stages=({'steps': 4, 'length': 160, 'batch': 4, "
    "'accumulate': 2},)",
  ]
  first = ("--json", f"--profile={tmp_path / 'trace'}")
  with start_together(*argv, processes=2, first=first) as running:
    for one in running:
      _, err = one.communicate(timeout=PATIENCE_S)
      assert one.returncode == 0, err
  assert any((tmp_path / "trace").iterdir())
  alone = [*argv, f"--out={whole}", "--devices=4"]
  with start_together(*alone, processes=1) as (one,):
    _, err = one.communicate(timeout=PATIENCE_S)
    assert one.returncode == 0, err
  assert losses(tmp_path / "out") == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
  ("rank", "words"),
  [
    pytest.param(0, "1 of 2 within 1 s; missing: 1", marks=pytest.mark.slow),
    (1, "where process 0 did not answer within 1 s"),
  ],
)
def test_who_is_not_there_is_named(argv, start, rank, words):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  more = (
    "--init_timeout=1",
    f"--coordinator=localhost:{port}",
    "--num_processes=2",
    f"--process_id={rank}",
  )
  with start(*argv, *more) as one:
    _, err = one.communicate(timeout=PATIENCE_S)
  assert one.returncode == 2
  assert words in err and "Traceback" not in err

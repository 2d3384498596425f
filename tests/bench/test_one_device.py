"""The process with one device: what it runs, says and survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from ringjax.bench import one_device, timing
from ringjax.bench.one_device import OneDeviceProcess, ProcessorTime
from ringjax.bench.timing import Skipped

# ---------------------------------------------------------------------------
# What the process is asked to build
# ---------------------------------------------------------------------------


def counter(start):
  count = [start]

  def run():
    count[0] += 1
    with open(os.environ["COUNT"], "w") as file:
      file.write(str(count[0]))
    # Processor time that cannot be missed.
    end = time.process_time() + 0.05
    while time.process_time() < end:
      pass

  return run, (len(jax.devices()), os.getpid(), np.arange(start))


def fails(error):
  raise error


def dies():
  return lambda: os.kill(os.getpid(), signal.SIGKILL), None


def dies_at_once():
  os.kill(os.getpid(), signal.SIGKILL)


def raises_later():
  return lambda: fails(MemoryError("all gone")), None


# ---------------------------------------------------------------------------


@pytest.fixture
def process():
  process = OneDeviceProcess()
  yield process
  process.close()


def test_it_has_one_device_and_runs_what_it_is_told(
  process, tmp_path, monkeypatch
):
  assert len(jax.devices()) > 1 and one_device.useful()
  path = tmp_path / "count"
  monkeypatch.setenv("COUNT", str(path))
  count = "--xla_force_host_platform_device_count=8"
  monkeypatch.setenv("XLA_FLAGS", count)
  first, (devices, one, found) = process.build(counter, 3)
  second, (_, other, _) = process.build(counter, 10)
  assert devices == 1 and one == other != os.getpid()
  np.testing.assert_array_equal(found, np.arange(3))
  spent = [run() for run in (first, second, first)]
  assert path.read_text() == "5"
  assert all(isinstance(x, ProcessorTime) and x.seconds >= 0.05 for x in spent)
  process.clear()
  with pytest.raises(Skipped, match="ended"):
    first()


@pytest.mark.long
@pytest.mark.parametrize(
  ("error", "reason"),
  [
    (ModuleNotFoundError("No module named 'x'", name="x"), "x is not install"),
    (Skipped("too long"), "^too long$"),
    (MemoryError("all gone"), "MemoryError: out of memory: all gone"),
  ],
  ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_what_fails_there_has_the_reason_that_it_has_here(
  process, error, reason
):
  with pytest.raises(Skipped, match=reason):
    process.build(fails, error)
  run, _ = process.build(raises_later)
  found = timing.interleave({"late": run}, 1, warmup=0)
  assert found["late"].reason == "MemoryError: out of memory: all gone"


@pytest.mark.long
def test_another_takes_the_place_of_a_process_that_died(process):
  lost, _ = process.build(raises_later)
  with pytest.raises(Skipped, match="its process ended with -9"):
    process.build(dies_at_once)
  run, _ = process.build(dies)
  # What was made in the old process is not what the new one made.
  with pytest.raises(Skipped, match="in which it was built ended"):
    lost()
  with pytest.raises(Skipped, match="its process ended with -9"):
    run()
  run, _ = process.build(raises_later)
  with pytest.raises(Skipped, match="all gone"):
    run()


def test_one_that_dies_unasked_ends_nothing(process):
  process.build(raises_later)
  assert process._process is not None
  process._process.kill()
  process.clear()


def test_it_ends_with_whoever_started_it():
  source = """if True:
    import time
    from ringjax.bench.one_device import OneDeviceProcess
    process = OneDeviceProcess()
    process.clear()
    process._start()
    print(process._process.pid, flush=True)
    time.sleep(1000)
  """
  with subprocess.Popen(
    [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True
  ) as one:
    assert one.stdout is not None
    pid = int(one.stdout.readline())
    one.kill()
  while _runs(pid):
    time.sleep(0.1)


def _runs(pid):
  # Its new parent may take a while to ask for its status.
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rsplit(")", 1)[1].split()[0] != "Z"
  except FileNotFoundError:
    return False

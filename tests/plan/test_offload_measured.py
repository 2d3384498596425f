"""Costs of streamed layers by the log of a run."""

from __future__ import annotations

import dataclasses

import pytest

from ringjax.errors import OptionError
from ringjax.kv.offload.cache_files import TransferEvent
from ringjax.plan.flexgen import offload_measured
from tests.helpers import refused


def log(passes, compute, read):
  """Events of layers whose next one is read while one computes."""
  now, found = 0.0, []
  wait = read[0]
  for _ in range(passes):
    for n, seconds in enumerate(compute):
      found.append(TransferEvent("wait", "weights", n, 100, now, wait))
      now += wait
      after = (n + 1) % len(compute)
      found.append(
        TransferEvent("read", "weights", after, 100, now, read[after])
      )
      now += seconds
      wait = max(0.0, read[after] - seconds)
  return found


def test_a_layer_takes_the_larger_of_computing_and_reading():
  compute, read = [1.0, 4.0, 2.0], [3.0, 2.0, 5.0]
  found = offload_measured.streamed_costs(log(5, compute, read))
  # 1 beside 2, 4 beside 5, 2 beside 3.
  assert found.pass_s == pytest.approx(2 + 5 + 3)
  assert found.predicted_s == pytest.approx(found.pass_s)
  assert found.wait_s == pytest.approx(1 + 1 + 1)
  assert found.layers == 3 and found.passes == 3
  assert found.read_bytes_s == pytest.approx(100 / (10 / 3), rel=0.1)
  assert found.compute_s == pytest.approx(dict(enumerate(compute)))
  assert abs(found.record()["error"]) < 1e-9


def run(rows, prompt, new, read=(0.4, 0.1), begin=0.25):
  """A call whose layers take .2 s and a millisecond a token; the head .05 s."""
  now, found, wait = begin, [], 0.0
  for tokens in (rows * prompt, *[rows] * (new - 1)):
    for n in range(2):
      found.append(TransferEvent("wait", "weights", n, 100, now, wait))
      now += wait
      after = 1 - n
      found.append(
        TransferEvent("read", "weights", after, 100, now, read[after])
      )
      spent = 0.2 + 0.001 * tokens + 0.05 * n
      now += spent
      wait = max(0.0, read[after] - spent)
  return offload_measured.StreamedRun(
    rows=rows, prompt=prompt, new=new, start=0.0, end=now, events=found
  )


def test_a_run_of_another_size_is_forecast():
  runs = [run(1, 16, 4), run(32, 16, 4)]
  for size in ((8, 40, 6), (3, 8, 2), (40, 24, 12)):
    want = run(*size)
    rows, prompt, new = size
    got = offload_measured.forecast(runs, rows=rows, prompt=prompt, new=new)
    assert got == pytest.approx(want.end)
  alone = offload_measured.forecast(runs[:1], rows=1, prompt=16, new=4)
  assert alone == pytest.approx(runs[0].end)
  refused(
    OptionError,
    lambda: offload_measured.forecast([], rows=1, prompt=1, new=1),
    "none",
  )
  early = dataclasses.replace(runs[0], new=5)
  refused(
    OptionError,
    lambda: offload_measured.forecast([early], rows=1, prompt=1, new=1),
    "4 passes for 5",
  )
  # All layers are on the devices.
  still = dataclasses.replace(runs[0], events=[])
  refused(
    OptionError,
    lambda: offload_measured.forecast([still], rows=1, prompt=1, new=1),
    "no waits",
  )


def test_too_few_passes():
  few = log(2, [1.0], [1.0])
  refused(OptionError, lambda: offload_measured.streamed_costs(few), "passes")
  refused(OptionError, lambda: offload_measured.streamed_costs([]), "passes")

"""Costs of streamed layers by the log of a run."""

from __future__ import annotations

import pytest

from ringjax.errors import OptionError
from ringjax.kv.cache_files import TransferEvent
from ringjax.plan import offload_measured
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


def test_too_few_passes():
  few = log(2, [1.0], [1.0])
  refused(OptionError, lambda: offload_measured.streamed_costs(few), "passes")
  refused(OptionError, lambda: offload_measured.streamed_costs([]), "passes")

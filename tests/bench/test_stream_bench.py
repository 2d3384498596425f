"""What is left to move at a prompt's end is measured, of the same answers."""

from __future__ import annotations

import pytest

from benchmarks.serving.page_streams import StreamBenchmark, StreamSettings
from ringjax.errors import OptionError


@pytest.mark.slow
def test_all_ways_have_the_same_answers():
  said = []
  found = StreamBenchmark.run(StreamBenchmark.quick, say=said.append)
  (row,) = found["rows"]
  assert row["same"]
  end, layers = row["ways"]["end"], row["ways"]["layers:2"]
  assert end["left"] == end["total"] == layers["total"] > 0
  # What leaves earlier depends on the time that a step takes.
  assert 0 <= layers["left"] <= end["left"]
  assert any("the same answers" in line for line in said)


@pytest.mark.parametrize("way", ["layers", "layers:1", "chunks"])
def test_ways(way):
  with pytest.raises(OptionError, match="layers:N"):
    StreamBenchmark(StreamSettings(contestants=(way,)))

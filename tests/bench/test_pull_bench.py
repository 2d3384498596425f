"""The benchmark of pages that come as bytes and as arrays."""

from __future__ import annotations

import pytest

from benchmarks.serving.page_transfers import PullBenchmark, PullSettings
from ringjax.errors import OptionError


@pytest.mark.long
def test_both_ways_bring_the_pages():
  said = []
  found = PullBenchmark.run(PullBenchmark.quick, say=said.append)
  (row,) = found["rows"]
  assert row["same"] and row["bytes"] == 4 * 2**19
  assert set(row["ways"]) == {"bytes", "arrays"}
  text = "\n".join(map(str, said))
  assert "4 pages; the same bytes" in text and "GB/s" in text


def test_other_ways_are_refused():
  with pytest.raises(OptionError, match="contestants"):
    PullSettings(contestants=("sockets",))

"""The memory of rows by layout is measured, of the same answers."""

from __future__ import annotations

import pytest

from benchmarks.serving.row_memory import RowMemoryBenchmark


@pytest.mark.slow
@pytest.mark.long
def test_layouts_have_the_same_answers():
  said = []
  quick = RowMemoryBenchmark.quick
  found = RowMemoryBenchmark.run(quick, say=said.append)
  rows = {row["kind"]: row for row in found["rows"]}
  assert all(rows[x]["same"] for x in ("pages", "contiguous", "doubling"))
  assert rows["contiguous"]["waste"] < quick.page
  assert rows["contiguous"]["resident"] < rows["contiguous"]["reserved"]
  assert rows["pages"]["resident"] == rows["pages"]["reserved"]
  address = rows["address"]
  assert address["before"] < address["released"] < address["after"]
  assert address["written"] <= address["after"] < 2 * address["written"]
  assert any("the same answers" in line for line in said)

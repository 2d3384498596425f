"""All that reads the table of strategies knows each of them."""

from __future__ import annotations

import pytest

import ringjax as rj
from benchmarks.attention import strategies
from launch.planning import aot
from ringjax.bench import ways
from ringjax.errors import OptionError
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.attention.strategies.registry import STRATEGIES
from ringjax.plan import pictures

pytestmark = pytest.mark.smoke


def test_commands_and_pictures_know_all_of_them():
  names = {name.partition(":")[0] for name in ways.NAMES}
  assert names == {*STRATEGIES, "striped", "zigzag", "plain"}
  assert set(aot.STRATEGIES) == set(ways.NAMES)
  # Pictures of documents are of placed documents, benchmarks of whole texts.
  assert {*pictures.STRATEGIES, "documents"} == set(STRATEGIES)
  assert {*strategies.NAMES, "documents"} == set(STRATEGIES)


@pytest.mark.parametrize("name", [*STRATEGIES, "striped", "zigzag"])
def test_a_name_is_one_strategy_everywhere(name):
  if name not in STRATEGIES:
    made = ways.way(name, 16, 32)
    assert made.strategy == ways.way("ring", 16, 32).strategy
    assert made.layout != ways.way("ring").layout
    with pytest.raises(OptionError, match="strategy"):
      nesting.named(name)
    return
  grouped = STRATEGIES[name].grouped
  full = f"{name}:4" if grouped else name
  made = ways.way(full, 16, 32)
  options = {"q_block": 16, "kv_block": 32} | ({"inner": 4} if grouped else {})
  assert made.strategy == nesting.built(name, options, levels=1)
  with pytest.raises(OptionError, match="strategy"):
    ways.way(name if grouped else f"{name}:4")


def test_each_is_priced_or_declined():
  seen = rj.Causal() & rj.SameSegment()
  found = rj.explain(
    (1, 8192, 16, 64), (1, 8192, 4, 64), shards=8, mask=seen, wire="int8",
    longest_document=512, machine="cpu", show=False,
  )  # fmt: skip
  priced = {one.strategy for one in found.predictions}
  assert priced == set(STRATEGIES) - {"halo"}
  assert {one.strategy for one in found.refusals} >= {"halo"}
  coded = {one.strategy for one in found.predictions if "wire" in one.options}
  assert coded == {n for n, one in STRATEGIES.items() if one.wired}

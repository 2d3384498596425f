"""All that reads the table of strategies knows each of them."""

from __future__ import annotations

import pytest

import ringjax as rj
from benchmarks.attention import strategies
from launch.planning import aot
from ringjax.bench import ways
from ringjax.errors import OptionError
from ringjax.infer import prefill
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.attention.strategies.registry import PREFILLS, STRATEGIES
from ringjax.parallel.layout import LAYOUTS
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


@pytest.mark.parametrize("layout", [*LAYOUTS, "uneven"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_layout_is_served_or_refused_as_the_table_says(name, layout):
  entry = STRATEGIES[name]
  order = LAYOUTS.get(layout, rj.Uneven((4096,) * 2))
  # A window that sees nothing ahead suits all strategies.
  seen = rj.Window(256) & rj.Causal() & rj.SameSegment()
  if isinstance(order, entry.strategy.layouts):
    nesting.fitted(entry.strategy, seen, order, derived=True)
  else:
    with pytest.raises(OptionError, match="consecutive tokens"):
      nesting.fitted(entry.strategy, seen, order, derived=True)
  # Contiguous shards are served by all.
  assert isinstance(rj.Contiguous(), entry.served_layouts)
  report = rj.explain(
    (1, 8192, 16, 64), (1, 8192, 4, 64), shards=2, mask=seen, layout=order,
    longest_document=512, machine="cpu", show=False,
  )  # fmt: skip
  declined = {x.strategy: x.reason for x in report.refusals}.get(name, "")
  served = isinstance(order, entry.served_layouts)
  assert served or declined.startswith(f"in {order} ")


def test_methods_of_prefill_are_strategies_of_the_table():
  assert set(PREFILLS) < set(prefill.METHODS)
  for name in PREFILLS:
    method = prefill.strategy_of(name)
    if name in STRATEGIES:
      assert method.strategy == STRATEGIES[name].strategy
    else:
      assert method == (LAYOUTS[name], rj.Ring(), True, True)
  for name in ("chunked", "auto", "two_level"):
    with pytest.raises(OptionError, match="prefill"):
      prefill.strategy_of(name)

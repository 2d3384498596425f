"""Parts of a prefill on two processors: every order is one that may be."""

from __future__ import annotations

import random

import pytest

from ringjax.errors import OptionError
from ringjax.plan.systems import subgraphs
from ringjax.plan.systems.subgraphs import RULES, Dispatcher, Subgraph
from tests.helpers import refused


def check_order(order, chunks, layers):
  """Each part once, behind all that it needs."""
  at = {part: n for n, part in enumerate(order)}
  assert len(at) == len(order) == 6 * chunks * layers
  for chunk, layer, step in ((x.chunk, x.layer, x.step) for x in order):
    mine = at[Subgraph(chunk, layer, step)]
    if step or layer:
      before = (layer, step - 1) if step else (layer - 1, 5)
      assert at[Subgraph(chunk, *before)] < mine
    if step == 2:
      assert all(at[Subgraph(n, layer, 1)] < mine for n in range(chunk))


@pytest.mark.parametrize("rule", RULES)
def test_any_moment_of_being_done(rule):
  draw = random.Random(rule)
  for _ in range(40):
    chunks, layers = draw.randint(1, 6), draw.randint(1, 4)
    plan = Dispatcher(
      chunks, layers, rule=rule, in_order=draw.random() < 0.5,
      seconds={"attend": draw.uniform(0.1, 5)},
    )  # fmt: skip
    running, order = {}, []
    while not plan.finished:
      for where in draw.sample(["integer", "float"], 2):
        if where not in running and (part := plan.take(where)) is not None:
          assert part.processor == where
          running[where] = part
          order.append(part)
      assert running, "nothing runs and something is left"
      plan.finish(running.pop(draw.choice(sorted(running))))
    check_order(order, chunks, layers)


def test_out_of_order_waits_less():
  seconds = {
    "norm": 0.1, "project": 1.0, "attend": 1.8,
    "output": 0.5, "second_norm": 0.1, "feedforward": 2.0,
  }  # fmt: skip
  found = subgraphs.compared((1, 2, 4), 5, seconds, growing=0.1)
  for chunks, rules in found.items():
    for rule, schedule in rules.items():
      check_order(schedule.order, chunks, 5)
      work = chunks * 5 * 3.5
      busy = schedule.timeline.busy_s("integer")
      assert busy == pytest.approx(work), rule
      assert schedule.waiting == pytest.approx(1 - work / schedule.seconds)
  # One chunk has nothing to overlap with.
  assert len({x.seconds for x in found[1].values()}) == 1
  for chunks in (2, 4):
    serial, others = found[chunks]["serial"], ("fifo", "waits")
    for rule in others:
      assert found[chunks][rule].seconds < 0.9 * serial.seconds
  # No schedule is shorter than what either processor has to do.
  floats = sum(5 * (0.2 + 1.8 * (1 + 0.1 * n)) for n in range(4))
  least = max(4 * 5 * 3.5, floats)
  assert found[4]["waits"].seconds >= least


def test_the_default_is_the_better_rule():
  assert RULES[0] == "fifo"
  for attend, wide in ((0.5, 2.2), (1.0, 1.0), (2.2, 2.2)):
    seconds = {
      "norm": 0.1, "project": 1.0, "attend": attend,
      "output": 0.4, "second_norm": 0.1, "feedforward": wide,
    }  # fmt: skip
    found = subgraphs.compared((2, 3), 3, seconds, in_order=True)
    for chunks, rules in found.items():
      least = min(x.seconds for x in rules.values())
      assert rules["fifo"].seconds <= 1.001 * least, (chunks, seconds)
      # The first chunk is not left behind the others.
      assert rules["fifo"].order[0] == Subgraph(0, 0, 0)
  assert Dispatcher(2, 2).rule == "fifo"


def test_bad_input():
  refused(OptionError, lambda: Dispatcher(2, 2, rule="lifo"), "fifo")
  refused(OptionError, lambda: Dispatcher(0, 2), "chunks")
  refused(OptionError, lambda: Dispatcher(1, 1, seconds={"mix": 1}), "project")
  refused(
    OptionError, lambda: Dispatcher(1, 1, seconds={"attend": 0}), "attend"
  )
  plan = Dispatcher(1, 1)
  part = plan.take("float")
  plan.finish(part)
  refused(OptionError, lambda: plan.finish(part), "once")

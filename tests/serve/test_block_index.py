"""The router's index of blocks, against a dict that gets every event."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.serve import Engine, Request
from ringjax.serve.cluster import (
  BlockEvent,
  BlockIndex,
  BlockLog,
  block_keys,
  tree_keys,
)
from tests.helpers import SMALL, refused


def longest(have, keys):
  """How many of the first keys are there."""
  return next((n for n, key in enumerate(keys) if key not in have), len(keys))


@pytest.mark.parametrize("seed", range(3))
def test_events_in_any_order_and_twice(seed):
  rng = np.random.default_rng(seed)
  events, truth = [], {name: set() for name in "abc"}
  logs = {name: BlockLog(name, send=events.append) for name in truth}
  for _ in range(60):
    name = "abc"[rng.integers(3)]
    keys = [int(k) for k in rng.integers(0, 12, 4)]
    if rng.random() < 0.6:
      logs[name].add(keys)
      truth[name] |= set(keys)
    else:
      logs[name].remove(keys)
      truth[name] -= set(keys)
  index = BlockIndex()
  sent = [events[n] for n in rng.permutation(len(events))]
  for event in [*sent, *sent[:20]]:
    index.apply(event)
  assert not index.behind()
  for first in range(12):
    keys = [(first + n) % 12 for n in range(6)]
    want = {name: longest(have, keys) for name, have in truth.items()}
    assert index.match(keys) == {k: n for k, n in want.items() if n}
    cached = index.cached_tokens(keys, 16)
    assert [cached(name) for name in "abc"] == [16 * want[k] for k in "abc"]
    have = sorted(name for name, keys in truth.items() if first in keys)
    assert index.owners(first) == tuple(have)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_gap_is_replayed(most):
  events = []
  log = BlockLog("a", most=most, send=events.append)
  for key in range(7):
    log.add([key, key + 1])
  log.remove([2])
  index = BlockIndex()
  assert index.apply(events[0])
  assert not index.apply(events[3])
  # What came too early does not count yet.
  assert index.match([0]) == {} and index.behind() == {"a": 1}
  index.catch_up(log)
  assert index.behind() == {}
  assert index.match([0, 1, 2, 3]) == {"a": 2}
  assert index.match([3, 4, 5, 6, 7]) == {"a": 5}
  # What was on its way meanwhile changes nothing.
  assert all(index.apply(event) for event in events)
  assert index.match([0, 1, 2, 3]) == {"a": 2}


def test_an_instance_goes_and_begins_anew():
  index, old = BlockIndex(), BlockLog("a", epoch=4)
  old.add("xyz")
  index.catch_up(old)
  other = BlockLog("b", send=index.apply)
  other.update("xy")
  assert index.match("xyz") == {"a": 3, "b": 2}
  index.forget("a")
  assert index.match("xyz") == {"b": 2} and index.instances() == ("b",)
  new = BlockLog("a", epoch=5, send=index.apply)
  new.add("x")
  late = BlockEvent(instance="a", epoch=4, number=9, kind="add", keys=("y",))
  assert index.apply(late)
  assert index.match("xyz") == {"a": 1, "b": 2}
  other.update("yz")
  assert index.match("xyz") == {"a": 1}
  assert index.owners("z") == ("b",)


def test_wrong_events():
  refused(
    OptionError,
    lambda: BlockEvent(instance="a", epoch=0, number=0, kind="new", keys=()),
    "kind",
    "remove",
  )


@pytest.mark.long
def test_the_index_knows_what_engines_have():
  model = rj.models.create(SMALL, seed=0)
  options = dict(rows=2, capacity=128, longest=96, page=16, piece=16, pieces=1)
  index = BlockIndex()
  engines = {name: Engine(model, **options) for name in ("one", "two")}
  logs = {name: BlockLog(name, send=index.apply) for name in engines}

  def ask(name, prompt, salt=""):
    engine = engines[name]
    engine.submit(Request(prompt=prompt, max_new_tokens=1, salt=salt)).result()
    with engine.between_steps():
      logs[name].update(tree_keys(engine.scheduler.tree))

  rng = np.random.default_rng(0)
  shared, own, last = (
    rng.integers(0, 64, n).astype(np.int32) for n in (32, 21, 35)
  )
  prompt = np.concatenate([shared, own])
  ask("one", prompt)
  ask("two", np.concatenate([shared, last]))
  cached = index.cached_tokens(block_keys(prompt, 16), 16)
  assert (cached("one"), cached("two")) == (48, 32)
  assert index.match(block_keys(prompt, 16, salt="tenant")) == {}
  # Other prompts push the blocks out, and the index hears of it.
  for seed in range(4):
    draw = np.random.default_rng(seed + 7)
    ask("one", draw.integers(0, 64, 90).astype(np.int32))
  assert "one" not in index.match(block_keys(prompt, 16))
  assert index.match(block_keys(prompt, 16)) == {"two": 2}

"""Policies of tiers, by replays small enough to be done by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ringjax as rj
from ringjax import store
from ringjax.errors import DataError, InputTypeError, OptionError
from tests.helpers import refused


def sessions(rng, count, *, goes_on=0.4, gap=6):
  """Prompts of conversations, each the last one and some blocks more.

  Some end early, some go on for long; whoever had many turns has more.
  """
  found, later, fresh = [], [], iter(range(10**9))
  for now in range(count):
    due = [x for x in later if x[0] <= now]
    if due:
      later.remove(due[0])
      _, turn, keys = due[0]
    else:
      turn, keys = 0, [-1]
    keys = [*keys, *(next(fresh) for _ in range(int(rng.integers(2, 9))))]
    found.append(keys)
    if rng.random() < (goes_on if turn == 0 else 0.85):
      later.append((now + int(rng.integers(gap, 3 * gap)), turn + 1, keys))
  return found


def hits(requests, capacity, policy):
  return store.replay(requests, capacity, policy).hits


def best(requests, capacity):
  """The most hits of all sets of blocks that could stay, for one-block
  prompts, by trying all of them."""
  states = {frozenset(): 0}
  for (key,) in requests:
    after = {}
    for kept, count in states.items():
      count += key in kept
      have = kept | {key}
      stays = [have] if len(have) <= capacity else [have - {x} for x in have]
      for one in stays:
        after[one] = max(after.get(one, -1), count)
    states = after
  return max(states.values())


def test_lru_by_hand():
  requests = [[1, 2], [3], [1, 2], [4], [1, 2], [3]]
  # Of 1 and 2 the deeper one goes first: room for 3 blocks keeps both of them.
  assert hits(requests, 3, store.LRU()) == 4
  # With room for 2, [3] pushes 2 out and keeps 1.
  assert hits(requests, 2, store.LRU()) == 2


def test_lfu_keeps_what_many_had():
  requests = [[1], [1], [1], [2], [3], [4], [1]]
  assert hits(requests, 2, store.LFU()) == 3
  assert hits(requests, 2, store.LRU()) == 2


def test_second_hit_admits_late():
  requests = [[1], [2], [1], [3], [1]]
  result = store.replay(requests, 4, store.SecondHit())
  assert (result.hits, result.admitted) == (1, 1)
  result = store.replay(requests, 4, store.SecondHit(uses=3))
  assert (result.hits, result.admitted) == (0, 1)


def test_belady_keeps_the_beginning_of_a_prefix():
  # 1 and 2 are used again by the same prompt, where 2 is nothing without 1.
  requests = [[1, 2], [1, 2]]
  assert hits(requests, 1, store.Belady(requests)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_belady_is_the_best(seed):
  rng = np.random.default_rng(seed)
  requests = [[int(x)] for x in rng.integers(0, 7, 24)]
  want = best(requests, 3)
  assert hits(requests, 3, store.Belady(requests)) == want
  for policy in (store.LRU(), store.LFU(), store.OnceUsedFirst()):
    assert hits(requests, 3, policy) <= want


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_predicted_reuse_beats_what_does_not_learn(seed):
  requests = sessions(np.random.default_rng(seed), 600)
  count = lambda policy: hits(requests, 100, policy)
  found = count(store.PredictedReuse())
  for policy in (store.LRU(), store.LFU(), store.OnceUsedFirst()):
    assert found > 1.1 * count(policy)
  assert found < store.most_hits(requests)


def test_predicted_reuse_keeps_prefixes_whole():
  requests = sessions(np.random.default_rng(2), 300)
  policy = store.PredictedReuse()
  parent = {}
  present = set()
  for keys in requests:
    parent |= dict(zip(keys[1:], keys, strict=False))
    policy.request(keys)
    for one in reversed(keys):
      if one not in present:
        present.add(one)
        policy.added(one)
    while len(present) > 60:
      (victim,) = policy.victims()
      present.remove(victim)
      policy.removed(victim)
    # What the last prompt left is a prefix of it.
    kept = [key in present for key in keys]
    assert kept == sorted(kept, reverse=True)


def test_a_gap_ends_a_prefix():
  # 2 is there, 1 is not: nothing of it is of use.
  class Odd(store.TierPolicy):
    def admit(self, key):
      return key != 1

  assert hits([[1, 2, 3]] * 3, 9, Odd()) == 0


def test_ghosts_are_bounded():
  policy = store.SecondHit(ghosts=2)
  for n in range(5000):
    policy.request([n])
    if n % 100 == 0:
      policy.added(n)
      policy.removed(n)
  assert len(policy._uses) <= 2 * policy._largest + 1024
  predicted = store.PredictedReuse(ghosts=2)
  store.replay([[n, n + 1] for n in range(0, 8000, 2)], 100, predicted)
  # It forgets whenever it learns, which is at least every 1,408 blocks.
  assert predicted.known <= 2 * 102 + 1024 + 4 * 102 + 1002


def test_traces(tmp_path):
  path = tmp_path / "trace.jsonl"
  lines = [{"hash_ids": [0, 1], "timestamp": 3}, {"hash_ids": [0, 1, 2]}]
  path.write_text("\n".join(map(json.dumps, lines)) + "\n")
  requests = store.read_trace(path)
  assert requests == [[0, 1], [0, 1, 2]]
  assert hits(requests, 4, store.LRU()) == 2
  for text in ("", "nonsense", "[1]", '{"hash_ids": [1.5]}'):
    path.write_text(text)
    refused(DataError, lambda: store.read_trace(path), "trace")
  refused(DataError, lambda: store.read_trace(tmp_path / "none"), "trace")


def test_names(unchecked):
  for name in ("lru", "lfu", "once_used_first", "second_hit"):
    assert store.Store(host=1, policy=name).host.policy.name == name
  refused(OptionError, lambda: store.Store(host=1, policy="mru"), "lru", "mru")
  refused(InputTypeError, lambda: store.Store(host=1, policy=3), "policy")
  assert rj.store.Store is store.Store

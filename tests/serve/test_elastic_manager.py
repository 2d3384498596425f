"""What the manager of live instances decides, without instances.

`Cluster` does what it says with sets of positions in place of keys: a token is
right only if its call's members had all keys of its text, each once.
"""

from __future__ import annotations

import numpy as np
import pytest

from ringjax.serve.cluster import (
  ElasticManager,
  ElasticOptions,
  ElasticScheduler,
  QuadraticTimes,
)
from ringjax.serve.cluster.loongserve.elastic_manager import (
  Abandon,
  DropKeys,
  LiveCall,
  Release,
)

SLOTS = 40


def token(request: int, position: int) -> int:
  return 7 * request + 3 * position + 1


def policy(instances: int, **options) -> ElasticScheduler:
  times = [
    QuadraticTimes(prefill_token_s=4e-3 / n, decode_fixed_s=0.03)
    for n in range(1, instances + 1)
  ]
  options = {"slots": SLOTS, "steps": 3} | options
  return ElasticScheduler(times, ElasticOptions(**options))


class Cluster:
  """Instances that hold positions, and do calls in a random order."""

  def __init__(self, instances: int, seed: int = 0, **how):
    self.chance = np.random.default_rng(seed)
    self.events = []
    options = how.pop("options", {})
    self.manager = ElasticManager(
      policy(instances, **options),
      range(instances),
      note=self.events.append,
      **how,
    )
    # Of each instance the positions of each request.
    self.holds = {n: {} for n in range(instances)}
    self.calls = {}
    self.released = set()
    self.now = 0.0

  def submit(self, number, prompt, new):
    self.manager.submit(number, prompt, new, self.now)

  def act(self):
    self.now += 0.01
    for action in self.manager.decide(self.now):
      if isinstance(action, DropKeys):
        mine = self.holds[action.instance].get(action.request, set())
        mine -= {p for p in mine if p >= action.first}
      elif isinstance(action, LiveCall):
        assert {*action.members} <= {*self.holds}
        self.calls[action.number] = (action, [*action.members])
      elif isinstance(action, Abandon):
        for n in action.members:
          self.fail(action.call, n, "given up")
      else:
        assert isinstance(action, Release)
        assert not any(self.holds.pop(action.instance).values())
        self.released.add(action.instance)

  def fail(self, number, instance, why):
    call, left = self.calls[number]
    if instance not in left:
      return
    left.remove(instance)
    # Some of it was done.
    for row in call.rows:
      if call.kind == "step" and row.master == instance:
        self.put(instance, row.request, {row.tokens - 1})
    self.manager.answered(number, instance, failure=why)

  def put(self, instance, request, positions):
    self.holds[instance].setdefault(request, set()).update(positions)
    held = sum(map(len, self.holds[instance].values()))
    assert held <= SLOTS

  def end(self, number):
    """One more member of a call has done its part."""
    call, left = self.calls[number]
    if len(left) == len(call.members):
      self.check(call)
    n = left.pop(int(self.chance.integers(len(left))))
    tokens = []
    if call.kind == "read":
      at = 0
      for row in call.rows:
        size, first = len(call.members), 0
        for m, count in row.tokens_by_instance:
          kept = range(first, first + count)
          first += count
          if m == n and not call.striped:
            self.put(n, row.request, kept)
        if call.striped:
          me = call.members.index(n)
          self.put(
            n, row.request,
            [p for p in range(row.tokens) if (at + p) % size == me],
          )  # fmt: skip
        at += row.tokens
        if n == call.members[(at - 1) % size]:
          tokens.append((row.request, [token(row.request, row.tokens)]))
    elif call.kind == "step":
      for row in call.rows:
        if row.master == n:
          texts = range(row.tokens, row.tokens + call.steps)
          self.put(n, row.request, [p - 1 for p in texts])
          tokens.append((row.request, [token(row.request, p) for p in texts]))
    elif n == call.members[0]:
      for target, request, count in call.parts:
        mine = self.holds[n][request]
        part = sorted(mine)[:count]
        assert len(part) == count
        mine.difference_update(part)
        if target in self.holds:
          self.put(target, request, part)
    self.manager.answered(number, n, tokens)

  def check(self, call):
    """All keys of the rows are there, each once, with the members."""
    if call.kind != "step":
      return
    for row in call.rows:
      each = {n: self.holds[n].get(row.request, set()) for n in call.members}
      there = sorted(p for held in each.values() for p in held)
      assert there == [*range(row.tokens - 1)]
      assert dict(row.tokens_by_instance) == {
        n: len(x) for n, x in each.items() if x
      }

  def kill(self, instance):
    if instance in self.holds:
      del self.holds[instance]
      for _, left in self.calls.values():
        if instance in left:
          left.remove(instance)
      self.manager.lost(instance, "killed")

  def run(self, disturb=lambda cluster, turn: None, turns=2000):
    for turn in range(turns):
      self.act()
      if self.manager.idle:
        return
      disturb(self, turn)
      open_calls = [n for n, (_, left) in self.calls.items() if left]
      if open_calls:
        self.end(open_calls[int(self.chance.integers(len(open_calls)))])
    raise AssertionError("it does not end")

  def answers(self):
    """Of each request its tokens, which are right as far as they go."""
    for answer in self.manager.answers.values():
      want = [
        token(answer.number, answer.prompt_tokens + n)
        for n in range(answer.new_tokens)
      ]
      assert answer.ended
      assert answer.tokens == want[: len(answer.tokens)]
      assert bool(answer.error) == (answer.tokens != want)
    return self.manager.answers

  def events_of(self, kind):
    return [event for event in self.events if event["event"] == kind]


def test_four_read_two_answer_and_nothing_moves():
  cluster = Cluster(4)
  cluster.submit(0, 60, 9)
  cluster.run()
  (read,) = cluster.events_of("read")
  assert read["group"] == [0, 1, 2, 3] and len(read["answers"]) == 2
  counts = cluster.manager.counts
  assert (counts.kept_tokens, counts.moved_tokens, counts.shrinks) == (60, 0, 1)
  assert not cluster.answers()[0].error


def test_without_a_plan_of_what_is_kept_keys_move():
  cluster = Cluster(4, proactive=False)
  cluster.submit(0, 60, 9)
  cluster.run()
  counts = cluster.manager.counts
  # A quarter each was read by those that then left.
  assert (counts.kept_tokens, counts.moved_tokens) == (0, 30)
  assert not cluster.answers()[0].error


def test_instances_join_as_keys_grow():
  cluster = Cluster(3, reserve=4)
  cluster.submit(0, 30, 60)
  cluster.run()
  assert cluster.manager.counts.grows == 2
  assert [e["group"] for e in cluster.events_of("grow")] == [[0, 1], [0, 1, 2]]
  # A read of all at first: the last token is of the text, and has no slot.
  assert not cluster.answers()[0].error
  assert cluster.manager.counts.reread == 0


def test_rows_of_a_group_have_several_masters():
  cluster = Cluster(1, options={"wide_rows": 2})
  for n in range(4):
    cluster.submit(n, 5, 5)
  cluster.act()
  cluster.holds[1] = {}
  cluster.manager.join(1)
  cluster.run()
  assert cluster.events_of("read")[0]["group"] == [0]
  assert cluster.manager.counts.grows == 1
  assert all(e["masters"] == [0, 1] for e in cluster.events_of("step"))
  assert not any(x.error for x in cluster.answers().values())


def test_one_that_leaves_moves_its_keys_first():
  cluster = Cluster(3)
  cluster.submit(0, 70, 9)
  steps = []

  def leave(cluster, turn):
    if cluster.events_of("step") and not steps:
      steps.append(turn)
      cluster.manager.leave(0)

  cluster.run(leave)
  assert cluster.released == {0}
  (move,) = cluster.events_of("move")
  assert move["source"] == 0 and move["tokens"] > 0
  assert cluster.manager.counts.reread == 0
  assert not cluster.answers()[0].error
  # Others go on: one comes in its place.
  cluster.manager.join(3)
  cluster.holds[3] = {}
  cluster.submit(1, 100, 3)
  cluster.run()
  assert not cluster.answers()[1].error


def test_too_few_are_left_for_a_text():
  cluster = Cluster(3)
  cluster.submit(0, 70, 30)
  cluster.submit(1, 9, 3)

  def kill(cluster, turn):
    if cluster.events_of("step"):
      for n in sorted(cluster.holds)[1:]:
        cluster.kill(n)

  cluster.run(kill)
  answers = cluster.answers()
  assert "40 slots" in answers[0].error and "lost" in answers[0].error
  assert not answers[1].error


def test_none_is_left():
  cluster = Cluster(2)
  cluster.submit(0, 9, 30)

  def kill(cluster, turn):
    if turn == 3:
      cluster.kill(0)
      cluster.kill(1)

  cluster.run(kill)
  assert "no instance is left" in cluster.answers()[0].error


def test_what_fails_by_itself_is_tried_three_times():
  cluster = Cluster(1)
  cluster.submit(0, 9, 30)

  def fail(cluster, turn):
    for number, (call, left) in [*cluster.calls.items()]:
      if left and call.kind == "step":
        cluster.fail(number, 0, "out of memory")

  cluster.run(fail)
  (answer,) = cluster.answers().values()
  assert "3 times" in answer.error and "out of memory" in answer.error
  assert answer.reads == 3


def test_stops_and_logits_that_are_no_numbers():
  cluster = Cluster(2, stop_ids=[token(0, 12)])
  cluster.submit(0, 9, 30)
  cluster.run()
  assert cluster.manager.answers[0].tokens == [
    token(0, n) for n in range(9, 13)
  ]
  cluster = Cluster(1)
  cluster.submit(0, 9, 30)
  cluster.act()
  cluster.manager.answered(0, 0, [(0, [-1])])
  assert "not finite" in cluster.manager.answers[0].error


@pytest.mark.parametrize(
  "seeds",
  [
    (0, 3),
    pytest.param((3, 30), marks=pytest.mark.long),
  ],
)
@pytest.mark.parametrize("how", [
  {},
  {"reserve": 3},
  {"proactive": False},
  {"options": {"wide_rows": 1}},
  {"options": {"most_moved_tokens": 0, "window": 3}},
])  # fmt: skip
def test_any_loss_at_any_time(how, seeds):
  """Text is never wrong, and ends early only where instances were lost."""
  moves = reread = 0
  for seed in range(*seeds):
    cluster = Cluster(4, seed, **how)
    chance = np.random.default_rng(1000 + seed)
    todo = [
      (int(chance.integers(1, 70)), int(chance.integers(1, 25)))
      for _ in range(7)
    ]

    def disturb(cluster, turn, chance=chance, todo=todo):
      if todo and chance.random() < 0.3:
        cluster.submit(len(cluster.manager.answers), *todo.pop())
      if len(cluster.holds) > 2 and chance.random() < 0.03:
        victim = int(chance.choice([*cluster.holds]))
        if chance.random() < 0.5:
          cluster.manager.leave(victim)
        else:
          cluster.kill(victim)
      if chance.random() < 0.01:
        instance = len(cluster.manager.used)
        cluster.holds[instance] = {}
        cluster.manager.join(instance)

    cluster.submit(0, 60, 20)
    cluster.run(disturb)
    while todo:
      cluster.submit(len(cluster.manager.answers), *todo.pop())
      cluster.run(disturb)
    for answer in cluster.answers().values():
      if answer.error:
        assert "slots" in answer.error or "left" in answer.error
    # What is done is forgotten.
    assert not any(x for mine in cluster.holds.values() for x in mine.values())
    live = cluster.manager.live
    assert all(cluster.manager.used[n] == 0 for n in live)
    moves += cluster.manager.counts.moved_tokens
    reread += cluster.manager.counts.reread
  assert reread and (moves or seeds[0] == 0)

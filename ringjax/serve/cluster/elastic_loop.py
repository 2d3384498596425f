"""Elastic groups on a clock of events: what becomes of a scheduler's plans.

`ElasticLoop` asks an `ElasticScheduler` or `FixedGroups` about requests, does
what it plans and returns the times of each request. Alone it simulates
(`simulate_elastic`); with a `GroupRunner` a model does what was decided
(`ElasticRunner.serve`), by predicted times or by the clock of the wall.

Guarantees: no instance ever holds more tokens than its slots; each request is
served whole or refused when it comes; by predicted times, always the same.
Cost: an event for each batch that is read and for each few tokens of a group's
answers.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 7.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.serve.cluster.cluster_simulator import ClusterResult
from ringjax.serve.cluster.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticPolicy,
  ElasticRequest,
  Emptied,
  PrefillBatch,
)
from ringjax.serve.cluster.served import ServedRequest
from ringjax.serve.traces import TraceRequest


@dataclasses.dataclass(kw_only=True)
class ElasticResult(ClusterResult):
  """What a cluster of elastic groups did.

  Attributes:
    moved_tokens: whose keys moved between instances.
    kept_tokens: whose keys stayed where a plan wanted them while they were
      read by more instances than then answered: that many did not move.
    shrinks: batches that were answered by fewer instances than read them.
    grows: instances that joined a group that answers.
    most_used: tokens that an instance ever held.
  """

  moved_tokens: int = 0
  kept_tokens: int = 0
  shrinks: int = 0
  grows: int = 0
  most_used: int = 0


@runtime_checkable
class GroupRunner(Protocol):
  """Does with a model what a plan says."""

  def read(self, batch: PrefillBatch) -> None:
    """Reads prompts, whose first tokens are known then."""
    ...

  def step(
    self,
    request: ElasticRequest,
    instances: Sequence[int],
    parts: Sequence[tuple[int, int]],
  ) -> None:
    """Makes the next tokens of a request.

    Args:
      request: the request.
      instances: of its group.
      parts: (instance, tokens) in their order: who keeps how many of them.
    """
    ...

  def ended(self, request: ElasticRequest) -> None:
    """Lets go of a request that has all its tokens."""
    ...


class ElasticLoop:
  """Serves a trace with a policy: a cluster's clock, groups and used slots.

  Simulated or with a model, these are the same lines.
  """

  def __init__(
    self,
    trace: Sequence[TraceRequest],
    policy: ElasticPolicy,
    instances: int,
    *,
    runner: GroupRunner | None = None,
    clock: Callable[[], float] | None = None,
  ):
    """By a clock its time begins at once.

    Args:
      trace: requests; their prompts share nothing.
      policy: who reads and answers what.
      instances: of the cluster.
      runner: does it; None only tells when it would be done. It moves no keys:
        the policy's `most_moved_tokens` has to be 0.
      clock: seconds, such as `time.monotonic`: requests come when they did in
        the trace, and calls of the runner take what they take, one after
        another; None lets them take what the policy's times say.

    Raises:
      OptionError: a prompt or an answer without tokens, or no instance; a clock
        without a runner, or one whose keys would move.
    """
    positive_int("instances", instances)
    if runner is None and clock is not None:
      raise OptionError(
        "clock", "one without a runner", "a runner", "pass runner=, or no clock"
      )
    if runner is not None and policy.options.most_moved_tokens:
      raise OptionError(
        "most_moved_tokens",
        f"{policy.options.most_moved_tokens:,} with a runner",
        "0: keys stay where they were read",
        "pass ElasticOptions(most_moved_tokens=0)",
      )
    for one in trace:
      if one.prompt_tokens < 1 or one.new_tokens < 1:
        raise OptionError(
          "trace",
          f"a prompt of {one.prompt_tokens} tokens, an answer of "
          f"{one.new_tokens}",
          "at least one token of each",
          "leave such requests out",
        )
    self.policy, self.runner, self.clock = policy, runner, clock
    self.start = 0.0 if clock is None else clock()
    self.now = 0.0
    self.used = [0] * instances
    self.waiting: list[ElasticRequest] = []
    self.groups: list[DecodeGroup] = []
    # By id: batches that use a group's instances, and whether it takes a step.
    self.blocked: dict[int, int] = {}
    self.stepping: set[int] = set()
    self.group_of: dict[int, DecodeGroup] = {}
    self.reading: list[tuple[PrefillBatch, list[DecodeGroup]]] = []
    self.served = [
      ServedRequest(
        number=n,
        arrival_s=one.arrival,
        prompt_tokens=one.prompt_tokens,
        new_tokens=one.new_tokens,
      )
      for n, one in enumerate(trace)
    ]
    self.moved = self.kept = self.shrinks = self.grows = self.most = 0
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._order = itertools.count()

  def at(self, when: float, what: Callable[[], None]) -> None:
    """Calls something at a time."""
    heapq.heappush(self._events, (when, next(self._order), what))

  def run(self) -> ElasticResult:
    """Serves all requests; once."""
    for one in self.served:
      self.at(one.arrival_s, lambda one=one: self.arrive(one))
    while self._events:
      self.now = self.until(self._events[0][0])
      while self._events and self._events[0][0] <= self.now:
        heapq.heappop(self._events)[2]()
      self.decide()
      for group in [*self.groups]:
        self.advance(group)
    assert not self.waiting and not self.groups, "a request was never served"
    return ElasticResult(
      served=self.served,
      seconds=self.now,
      moved_tokens=self.moved,
      kept_tokens=self.kept,
      shrinks=self.shrinks,
      grows=self.grows,
      most_used=self.most,
    )

  def until(self, when: float) -> float:
    """The time when something is due, or later."""
    if self.clock is None:
      return when
    passed = self.clock() - self.start
    if passed < when:
      time.sleep(when - passed)
    return max(when, passed)

  def ran(self) -> None:
    """Calls of the runner have ended: by a clock they took their time."""
    if self.clock is not None:
      self.now = max(self.now, self.clock() - self.start)

  def taking(self, seconds: float) -> float:
    """What a call takes beforehand: by a clock it is known when it ends."""
    return seconds if self.clock is None else 0.0

  def arrive(self, one: ServedRequest) -> None:
    """A request has come."""
    request = ElasticRequest(
      number=one.number,
      arrival_s=one.arrival_s,
      prompt_tokens=one.prompt_tokens,
      new_tokens=one.new_tokens,
    )
    one.rejected = self.policy.refused(request, len(self.used))
    if not one.rejected:
      self.waiting.append(request)

  def view(self) -> ClusterView:
    """What the policy sees now."""
    reading = {n for batch, _ in self.reading for n in batch.instances}
    active = []
    for group in self.groups:
      if self.blocked.get(id(group)):
        reading |= {*group.instances}
      else:
        active.append(group)
    return ClusterView(
      now_s=self.now,
      waiting=self.waiting,
      groups=active,
      reading=frozenset(reading),
      used=self.used,
    )

  # -- reading

  def decide(self) -> None:
    """Asks the policy and does what it says."""
    if not self.waiting:
      return
    plan = self.policy.plan(self.view())
    ready = dict.fromkeys(range(len(self.used)), self.now)
    for group in plan.paused:
      for n in group.instances:
        ready[n] = max(ready[n], group.free_s)
    for one in plan.emptied:
      ready[one.instance] = self.empty(one)
    taken = {r.number for batch in plan.batches for r in batch.requests}
    self.waiting = [r for r in self.waiting if r.number not in taken]
    for batch in plan.batches:
      mine = {*batch.instances}
      held = [group for group in plan.paused if mine & {*group.instances}]
      for group in held:
        self.blocked[id(group)] = self.blocked.get(id(group), 0) + 1
      start = max(ready[n] for n in batch.instances)
      lengths = [(r.prompt_tokens, 0) for r in batch.requests]
      end = start + self.taking(self.policy.times(len(mine)).prefill_s(lengths))
      for request, kept in zip(batch.requests, batch.kept, strict=True):
        own = zip(batch.instances, kept, strict=True)
        request.kept = {n: tokens for n, tokens in own if tokens}
        self.use(request.kept)
        self.served[request.number].prefill_start_s = start
        self.served[request.number].prefill = _names(batch.instances)
      if len(batch.stays) < len(mine):
        self.shrinks += 1
        self.kept += sum(r.prompt_tokens for r in batch.requests)
      entry = (batch, held)
      self.reading.append(entry)
      self.at(end, lambda entry=entry: self.read(*entry))

  def use(self, kept: dict[int, int]) -> None:
    """Counts tokens that instances take."""
    for n, tokens in kept.items():
      self.used[n] += tokens
      self.most = max(self.most, self.used[n])

  def empty(self, one: Emptied) -> float:
    """Moves keys off an instance; when that is done."""
    group, target = one.group, one.joins or one.group
    into = [list(pair) for pair in one.into]
    moved = 0
    for request in group.requests:
      tokens = request.kept.pop(one.instance, 0)
      moved += tokens
      while tokens:
        n, room = into[0]
        part = min(tokens, room)
        request.kept[n] = request.kept.get(n, 0) + part
        tokens, into[0][1] = tokens - part, room - part
        self.use({n: part})
        if not into[0][1]:
          into.pop(0)
    self.used[one.instance] -= moved
    self.moved += moved
    group.instances.remove(one.instance)
    seconds = self.policy.options.moving_s(moved)
    free = max(self.now, group.free_s, target.free_s) + seconds
    for request in group.requests:
      self.served[request.number].moved_s += seconds
    if target is not group:
      self.join(group, target)
    target.free_s = free
    return free

  def join(self, group: DecodeGroup, target: DecodeGroup) -> None:
    """Makes one group of two."""
    for request in group.requests:
      self.group_of[request.number] = target
    target.requests += group.requests
    target.instances += [n for n in group.instances
                         if n not in target.instances]  # fmt: skip
    target.free_s = max(target.free_s, group.free_s)
    self.groups = [one for one in self.groups if one is not group]

  def read(self, batch: PrefillBatch, held: list[DecodeGroup]) -> None:
    """A batch has been read: its first tokens are there."""
    if self.runner is not None:
      self.runner.read(batch)
      self.ran()
    self.reading = [pair for pair in self.reading if pair[0] is not batch]
    fresh = DecodeGroup(requests=[], instances=[*batch.stays], free_s=self.now)
    for request in batch.requests:
      one = self.served[request.number]
      one.first_token_s, one.decode = self.now, _names(batch.stays)
      request.done, request.started_s = 1, self.now
      self.group_of[request.number] = fresh
      fresh.requests.append(request)
    for group in held:
      self.blocked[id(group)] -= 1
    alive = [group for group in held if any(group is g for g in self.groups)]
    shared = [g for g in alive if {*g.instances} & {*batch.stays}]
    self.groups.append(fresh)
    for group in shared:
      # What blocked it blocks what it becomes.
      count = self.blocked.pop(id(group), 0)
      self.blocked[id(fresh)] = self.blocked.get(id(fresh), 0) + count
      for _, others in self.reading:
        others[:] = [fresh if one is group else one for one in others]
      self.join(group, fresh)
    self.end(fresh)

  # -- answering

  def advance(self, group: DecodeGroup) -> None:
    """Begins a group's next step, unless something is under way."""
    if self.blocked.get(id(group)) or id(group) in self.stepping:
      return
    if not any(group is one for one in self.groups):
      return
    if group.free_s > self.now:
      self.stepping.add(id(group))
      self.at(group.free_s, lambda: self.stepping.discard(id(group)))
      return
    joins = self.policy.grown(group, self.view())
    group.instances += joins
    self.grows += len(joins)
    requests = [*group.requests]
    left = min(r.new_tokens - r.done for r in requests)
    count = min(self.policy.options.steps, left)
    tokens = sum(r.prompt_tokens + r.done for r in requests)
    tokens += len(requests) * (count - 1) / 2
    times = self.policy.times(len(group.instances))
    seconds = times.decode_s(len(requests), tokens)
    if self.clock is None:
      self.policy.stepped(seconds)
    group.free_s = self.now + count * self.taking(seconds)
    self.stepping.add(id(group))
    self.at(group.free_s, lambda: self.step(group, requests, count))

  def step(
    self, group: DecodeGroup, requests: list[ElasticRequest], count: int
  ) -> None:
    """A group has made `count` tokens of each of its requests."""
    self.stepping.discard(id(group))
    slots, began = self.policy.options.slots, self.now
    for place, request in enumerate(requests):
      request.done += count
      # It may be another group's by now.
      masters = self.group_of[request.number].instances
      left, n, parts = count, masters[place % len(masters)], []
      while left:
        part = min(left, slots - self.used[n])
        if part > 0:
          request.kept[n] = request.kept.get(n, 0) + part
          self.use({n: part})
          left -= part
          parts.append((n, part))
        if left:
          n = min(masters, key=lambda m: self.used[m])
          assert self.used[n] < slots, "no slot for a token that has one"
      if self.runner is not None:
        self.runner.step(request, masters, parts)
        self.ran()
    if self.clock is not None:
      self.policy.stepped((self.now - began) / count)
    for one in {id(g): g for g in map(self._group, requests)}.values():
      self.end(one)

  def _group(self, request: ElasticRequest) -> DecodeGroup:
    return self.group_of[request.number]

  def end(self, group: DecodeGroup) -> None:
    """Lets go of requests that are done, and of instances that hold nothing."""
    for request in [r for r in group.requests if r.done >= r.new_tokens]:
      group.requests.remove(request)
      self.policy.ended(request)
      if self.runner is not None:
        self.runner.ended(request)
      self.served[request.number].last_token_s = self.now
      for n, tokens in request.kept.items():
        self.used[n] -= tokens
      del self.group_of[request.number]
    if not group.requests:
      # Its instances are read on until the batches there end.
      self.groups = [one for one in self.groups if one is not group]
      return
    if not self.policy.shrinks or self.blocked.get(id(group)):
      return
    due = sum(r.left_tokens for r in group.requests)
    slots = self.policy.options.slots
    room = sum(slots - self.used[n] for n in group.instances)
    for n in [*group.instances]:
      if not self.used[n] and len(group.instances) > 1 and room - slots >= due:
        group.instances.remove(n)
        room -= slots


def _names(instances: Sequence[int]) -> str:
  return "+".join(map(str, instances))

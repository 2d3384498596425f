"""Event loop that carries out a scheduler's plans for elastic groups.

`ElasticLoop` asks an `ElasticScheduler` or `FixedGroups` about requests,
carries out its plans and returns the times of each request. Alone it simulates
(`simulate_elastic`); with a `GroupRunner` a model computes what was decided
(`ElasticRunner.serve`), on predicted times or on the wall clock.

Guarantees: no instance ever holds more tokens than its slots; each request is
served completely or refused on arrival; with predicted times the result is
deterministic.
Cost: an event for each prefill batch and for each few tokens of a group's
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
from ringjax.serve.cluster.loongserve.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticPolicy,
  ElasticRequest,
  Emptied,
  PrefillBatch,
)
from ringjax.serve.cluster.simulate.cluster_simulator import ClusterResult
from ringjax.serve.cluster.times.request_times import ServedRequest
from ringjax.serve.traces import TraceRequest


@dataclasses.dataclass(kw_only=True)
class ElasticResult(ClusterResult):
  """Times and counters of a cluster of elastic groups.

  Attributes:
    moved_tokens: Tokens whose keys were moved between instances.
    kept_tokens: Tokens that prefill left where decode needs them, in batches
      that fewer instances decode: these tokens did not have to move.
    shrinks: Batches that fewer instances decoded than prefilled.
    grows: Instances that joined a decoding group.
    most_used: Maximum tokens that an instance held.
  """

  moved_tokens: int = 0
  kept_tokens: int = 0
  shrinks: int = 0
  grows: int = 0
  most_used: int = 0


@runtime_checkable
class GroupRunner(Protocol):
  """Executes the calls of a plan with a model."""

  def read(self, batch: PrefillBatch) -> None:
    """Prefill prompts and sample their first tokens."""
    ...

  def step(
    self,
    request: ElasticRequest,
    instances: Sequence[int],
    parts: Sequence[tuple[int, int]],
  ) -> None:
    """Decode the next tokens of a request.

    Args:
      request: Request to continue.
      instances: Numbers of the instances of its group.
      parts: (instance, tokens) in order: number of new tokens that each keeps.
    """
    ...

  def ended(self, request: ElasticRequest) -> None:
    """Release a request that has all its tokens."""
    ...


class ElasticLoop:
  """Serves a trace with a policy: a cluster's clock, groups and used slots.

  Simulation and a real model share this code.
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
    """Make a loop; with a clock its time begins at once.

    Args:
      trace: Requests; their prompts share no prefix.
      policy: Decides which instances prefill and decode what.
      instances: Number of instances of the cluster.
      runner: Executes the calls; None only simulates their times. A runner
        moves
        no keys: the policy's `most_moved_tokens` has to be 0.
      clock: Returns seconds, such as `time.monotonic`: requests arrive at the
        trace's times, and the runner's calls take their real time, one after
        another; None uses the policy's predicted times.

    Raises:
      OptionError: If a prompt or an answer has no tokens, or there is no
        instance; for a clock without a runner, or a runner and a policy that
        moves keys.
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
    for request in trace:
      if request.prompt_tokens < 1 or request.new_tokens < 1:
        raise OptionError(
          "trace",
          f"a prompt of {request.prompt_tokens} tokens, an answer of "
          f"{request.new_tokens}",
          "at least one token of each",
          "leave such requests out",
        )
    self.policy, self.runner, self.clock = policy, runner, clock
    self.start = 0.0 if clock is None else clock()
    self.now = 0.0
    self.used = [0] * instances
    self.waiting: list[ElasticRequest] = []
    self.groups: list[DecodeGroup] = []
    # By id of a group: batches that use its instances, and groups in a step.
    self.blocked: dict[int, int] = {}
    self.stepping: set[int] = set()
    self.group_of: dict[int, DecodeGroup] = {}
    self.reading: list[tuple[PrefillBatch, list[DecodeGroup]]] = []
    self.served = [
      ServedRequest(
        number=n,
        arrival_s=request.arrival,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
      )
      for n, request in enumerate(trace)
    ]
    self.moved = self.kept = self.shrinks = self.grows = self.most = 0
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._order = itertools.count()

  def at(self, when: float, what: Callable[[], None]) -> None:
    """Schedule a call at a time."""
    heapq.heappush(self._events, (when, next(self._order), what))

  def run(self) -> ElasticResult:
    """Serve all requests; can be called once."""
    for request in self.served:
      self.at(request.arrival_s, lambda served=request: self.arrive(served))
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
    """Wait until a time, if there is a clock; return the current time."""
    if self.clock is None:
      return when
    passed = self.clock() - self.start
    if passed < when:
      time.sleep(when - passed)
    return max(when, passed)

  def ran(self) -> None:
    """Advance the time by the runner's calls, if there is a clock."""
    if self.clock is not None:
      self.now = max(self.now, self.clock() - self.start)

  def taking(self, seconds: float) -> float:
    """Duration to schedule for a call: 0 if a clock measures it instead."""
    return seconds if self.clock is None else 0.0

  def arrive(self, one: ServedRequest) -> None:
    """Add a request, or reject it."""
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
    """State of the instances as the policy sees it."""
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

  # -- prefill

  def decide(self) -> None:
    """Ask the policy for a plan and carry it out."""
    if not self.waiting:
      return
    plan = self.policy.plan(self.view())
    ready = dict.fromkeys(range(len(self.used)), self.now)
    for group in plan.paused:
      for n in group.instances:
        ready[n] = max(ready[n], group.free_s)
    for emptied in plan.emptied:
      ready[emptied.instance] = self.empty(emptied)
    batch_numbers = {
      request.number for batch in plan.batches for request in batch.requests
    }
    self.waiting = [
      request for request in self.waiting if request.number not in batch_numbers
    ]
    for batch in plan.batches:
      members = {*batch.instances}
      paused = [group for group in plan.paused if members & {*group.instances}]
      for group in paused:
        self.blocked[id(group)] = self.blocked.get(id(group), 0) + 1
      start = max(ready[n] for n in batch.instances)
      lengths = [(request.prompt_tokens, 0) for request in batch.requests]
      end = start + self.taking(
        self.policy.times(len(members)).prefill_s(lengths)
      )
      for request, counts in zip(batch.requests, batch.kept, strict=True):
        kept_tokens = zip(batch.instances, counts, strict=True)
        request.kept = {n: tokens for n, tokens in kept_tokens if tokens}
        self.use(request.kept)
        self.served[request.number].prefill_start_s = start
        self.served[request.number].prefill = _names(batch.instances)
      if len(batch.stays) < len(members):
        self.shrinks += 1
        self.kept += sum(request.prompt_tokens for request in batch.requests)
      entry = (batch, paused)
      self.reading.append(entry)
      self.at(end, lambda entry=entry: self.read(*entry))

  def use(self, kept: dict[int, int]) -> None:
    """Count tokens that instances take."""
    for n, tokens in kept.items():
      self.used[n] += tokens
      self.most = max(self.most, self.used[n])

  def empty(self, one: Emptied) -> float:
    """Move keys away from an instance; return the time when that is done."""
    group, target = one.group, one.joins or one.group
    targets = [list(pair) for pair in one.into]
    moved = 0
    for request in group.requests:
      tokens = request.kept.pop(one.instance, 0)
      moved += tokens
      while tokens:
        n, room = targets[0]
        part = min(tokens, room)
        request.kept[n] = request.kept.get(n, 0) + part
        tokens, targets[0][1] = tokens - part, room - part
        self.use({n: part})
        if not targets[0][1]:
          targets.pop(0)
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
    """Merge a group into another one."""
    for request in group.requests:
      self.group_of[request.number] = target
    target.requests += group.requests
    target.instances += [n for n in group.instances
                         if n not in target.instances]  # fmt: skip
    target.free_s = max(target.free_s, group.free_s)
    self.groups = [
      other_group for other_group in self.groups if other_group is not group
    ]

  def read(self, batch: PrefillBatch, held: list[DecodeGroup]) -> None:
    """Finish a prefill batch: its first tokens are known."""
    if self.runner is not None:
      self.runner.read(batch)
      self.ran()
    self.reading = [pair for pair in self.reading if pair[0] is not batch]
    new_group = DecodeGroup(
      requests=[], instances=[*batch.stays], free_s=self.now
    )
    for request in batch.requests:
      times = self.served[request.number]
      times.first_token_s, times.decode = self.now, _names(batch.stays)
      request.done, request.started_s = 1, self.now
      self.group_of[request.number] = new_group
      new_group.requests.append(request)
    for group in held:
      self.blocked[id(group)] -= 1
    alive = [
      group
      for group in held
      if any(group is other_group for other_group in self.groups)
    ]
    shared = [group for group in alive if {*group.instances} & {*batch.stays}]
    self.groups.append(new_group)
    for group in shared:
      # Batches that blocked the old group block the merged group.
      count = self.blocked.pop(id(group), 0)
      self.blocked[id(new_group)] = self.blocked.get(id(new_group), 0) + count
      for _, others in self.reading:
        others[:] = [
          new_group if held_group is group else held_group
          for held_group in others
        ]
      self.join(group, new_group)
    self.end(new_group)

  # -- decode

  def advance(self, group: DecodeGroup) -> None:
    """Begin a group's next decode steps, unless a call is in flight."""
    if self.blocked.get(id(group)) or id(group) in self.stepping:
      return
    if not any(group is other_group for other_group in self.groups):
      return
    if group.free_s > self.now:
      self.stepping.add(id(group))
      self.at(group.free_s, lambda: self.stepping.discard(id(group)))
      return
    joins = self.policy.grown(group, self.view())
    group.instances += joins
    self.grows += len(joins)
    requests = [*group.requests]
    steps_left = min(request.new_tokens - request.done for request in requests)
    count = min(self.policy.options.steps, steps_left)
    tokens = sum(request.prompt_tokens + request.done for request in requests)
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
    """Finish `count` decode steps of a group."""
    self.stepping.discard(id(group))
    slots, start_s = self.policy.options.slots, self.now
    for place, request in enumerate(requests):
      request.done += count
      # The request may have moved to another group meanwhile.
      masters = self.group_of[request.number].instances
      tokens_left, n, parts = count, masters[place % len(masters)], []
      while tokens_left:
        part = min(tokens_left, slots - self.used[n])
        if part > 0:
          request.kept[n] = request.kept.get(n, 0) + part
          self.use({n: part})
          tokens_left -= part
          parts.append((n, part))
        if tokens_left:
          n = min(masters, key=lambda m: self.used[m])
          assert self.used[n] < slots, "no slot for a token that has one"
      if self.runner is not None:
        self.runner.step(request, masters, parts)
        self.ran()
    if self.clock is not None:
      self.policy.stepped((self.now - start_s) / count)
    for changed_group in {
      id(group): group for group in map(self._group, requests)
    }.values():
      self.end(changed_group)

  def _group(self, request: ElasticRequest) -> DecodeGroup:
    return self.group_of[request.number]

  def end(self, group: DecodeGroup) -> None:
    """Remove finished requests, and instances that hold nothing."""
    for request in [
      ended for ended in group.requests if ended.done >= ended.new_tokens
    ]:
      group.requests.remove(request)
      self.policy.ended(request)
      if self.runner is not None:
        self.runner.ended(request)
      self.served[request.number].last_token_s = self.now
      for n, tokens in request.kept.items():
        self.used[n] -= tokens
      del self.group_of[request.number]
    if not group.requests:
      # Its instances stay in prefill until their batches end.
      self.groups = [
        other_group for other_group in self.groups if other_group is not group
      ]
      return
    if not self.policy.shrinks or self.blocked.get(id(group)):
      return
    due = sum(request.left_tokens for request in group.requests)
    slots = self.policy.options.slots
    room = sum(slots - self.used[n] for n in group.instances)
    for n in [*group.instances]:
      if not self.used[n] and len(group.instances) > 1 and room - slots >= due:
        group.instances.remove(n)
        room -= slots


def _names(instances: Sequence[int]) -> str:
  return "+".join(map(str, instances))

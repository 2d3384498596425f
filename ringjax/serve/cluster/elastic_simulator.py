"""Elastic groups on a clock of events: what a scheduler makes of a workload.

`simulate_elastic` runs an `ElasticScheduler` or `FixedGroups` on requests and
returns the times of each. Both meet the same instances, clock and model of
times, so that what differs is the policy.

Guarantees: deterministic; no instance ever holds more tokens than its slots;
each request is served whole or refused when it comes.
Cost: an event for each batch that is read and for each few tokens of a group's
answers.
The model of times is a roofline (`GroupMachine`): it counts products, bytes of
weights and keys, and what tensor parallelism and rings send. It is no
measurement; what it assumes are its attributes.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 7.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.serve.cluster.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticPolicy,
  ElasticRequest,
  Emptied,
  PrefillBatch,
)
from ringjax.serve.cluster.phase_times import QuadraticTimes
from ringjax.serve.cluster.served import Limits, ServedRequest

# ---------------------------------------------------------------------------
# The simulation
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticResult:
  """What a simulated cluster did.

  Attributes:
    served: the requests, by their numbers.
    moved_tokens: whose keys moved between instances.
    kept_tokens: whose keys stayed where a plan wanted them while they were
      read by more instances than then answered: that many did not move.
    shrinks: batches that were answered by fewer instances than read them.
    grows: instances that joined a group that answers.
    most_used: tokens that an instance ever held.
  """

  served: list[ServedRequest]
  moved_tokens: int
  kept_tokens: int
  shrinks: int
  grows: int
  most_used: int


def simulate_elastic(
  requests: Sequence[tuple[float, int, int]],
  policy: ElasticPolicy,
  instances: int,
) -> ElasticResult:
  """Serves requests.

  Args:
    requests: (arrival in seconds, tokens of the prompt, of the answer) of each,
      in any order.
    policy: who reads and answers what.
    instances: of the cluster.

  Raises:
    OptionError: a prompt or an answer without tokens, or no instance.
  """
  positive_int("instances", instances)
  for _, prompt, new in requests:
    if prompt < 1 or new < 1:
      raise OptionError(
        "requests",
        f"{prompt} tokens and an answer of {new}",
        "at least one token of each",
        "leave such requests out",
      )
  return _Simulation(requests, policy, instances).run()


class _Simulation:
  """The state of a simulated cluster."""

  def __init__(
    self,
    requests: Sequence[tuple[float, int, int]],
    policy: ElasticPolicy,
    instances: int,
  ):
    self.policy = policy
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
        number=n, arrival_s=at, prompt_tokens=prompt, new_tokens=new
      )
      for n, (at, prompt, new) in enumerate(requests)
    ]
    self.moved = self.kept = self.shrinks = self.grows = self.most = 0
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._order = itertools.count()

  def at(self, when: float, what: Callable[[], None]) -> None:
    heapq.heappush(self._events, (when, next(self._order), what))

  def run(self) -> ElasticResult:
    for one in self.served:
      self.at(one.arrival_s, lambda one=one: self.arrive(one))
    while self._events:
      self.now = self._events[0][0]
      while self._events and self._events[0][0] <= self.now:
        heapq.heappop(self._events)[2]()
      self.decide()
      for group in [*self.groups]:
        self.advance(group)
    assert not self.waiting and not self.groups, "a request was never served"
    return ElasticResult(
      served=self.served,
      moved_tokens=self.moved,
      kept_tokens=self.kept,
      shrinks=self.shrinks,
      grows=self.grows,
      most_used=self.most,
    )

  def arrive(self, one: ServedRequest) -> None:
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
      end = start + self.policy.times(len(mine)).prefill_s(lengths)
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
    self.policy.stepped(seconds)
    group.free_s = self.now + count * seconds
    self.stepping.add(id(group))
    self.at(group.free_s, lambda: self.step(group, requests, count))

  def step(
    self, group: DecodeGroup, requests: list[ElasticRequest], count: int
  ) -> None:
    """A group has made `count` tokens of each of its requests."""
    self.stepping.discard(id(group))
    slots = self.policy.options.slots
    for place, request in enumerate(requests):
      request.done += count
      # It may be another group's by now.
      masters = self.group_of[request.number].instances
      left, n = count, masters[place % len(masters)]
      while left:
        part = min(left, slots - self.used[n])
        if part > 0:
          request.kept[n] = request.kept.get(n, 0) + part
          self.use({n: part})
          left -= part
        if left:
          n = min(masters, key=lambda m: self.used[m])
          assert self.used[n] < slots, "no slot for a token that has one"
    for one in {id(g): g for g in map(self._group, requests)}.values():
      self.end(one)

  def _group(self, request: ElasticRequest) -> DecodeGroup:
    return self.group_of[request.number]

  def end(self, group: DecodeGroup) -> None:
    """Lets go of requests that are done, and of instances that hold nothing."""
    for request in [r for r in group.requests if r.done >= r.new_tokens]:
      group.requests.remove(request)
      self.policy.ended(request)
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


# ---------------------------------------------------------------------------
# The model of times
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMachine:
  """A model on chips, from which times of groups follow.

  The defaults are Llama-2-7B in bfloat16 on A800s with NVLink.

  Attributes:
    parameters: of the model.
    layers: of the model.
    width: of the hidden states, D.
    heads_width: of the queries of a layer, N H.
    kv_width: of the keys of a layer, K H.
    flops: of a chip, a second, as prefill reaches them.
    bytes_s: of a chip's memory, a second, as decoding reaches them.
    link_bytes_s: between chips of an instance, a second, as sums reach them.
    sum_s: the least time of a sum over the chips of an instance.
    hop_s: the least time of an exchange between instances.
    call_s: of a call, beside all that.
  """

  parameters: int | float = 6.74e9
  layers: int = 32
  width: int = 4096
  heads_width: int = 4096
  kv_width: int = 4096
  flops: int | float = 312e12 * 0.5
  bytes_s: int | float = 2.0e12 * 0.8
  link_bytes_s: int | float = 150e9
  sum_s: int | float = 15e-6
  hop_s: int | float = 20e-6
  call_s: int | float = 0.005

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), above=0)

  @property
  def token_bytes(self) -> int:
    """Of a token's keys and values."""
    return self.layers * 2 * self.kv_width * 2

  def times(self, chips: int, instances: int = 1) -> QuadraticTimes:
    """Of a group.

    Reading: products of weights and of half of all pairs, by all chips; two
    sums a layer over an instance's chips. Keys travel while products run, but
    for the least time of each hop. Decoding: the weights once on each
    instance, the keys by all chips, the rows' products by all; two sums and,
    with several instances, an exchange of queries and of partials a layer.

    Args:
      chips: of an instance: its tensor parallelism.
      instances: of the group: its sequence parallelism.
    """
    positive_int("chips", chips)
    positive_int("instances", instances)
    every = chips * instances
    sums = 2 * self.layers * (chips > 1)
    # An all-reduce sends its operand twice, but for a chip's own part.
    share = 2 * (chips - 1) / chips
    summed = sums * self.width * 2 * share / self.link_bytes_s
    hops = self.layers * (instances - 1)
    exchanges = 2 * self.layers * (instances > 1)
    token_flops = 2 * self.parameters
    pair_flops = 4 * self.layers * self.heads_width / 2
    wait = self.call_s + sums * self.sum_s
    return QuadraticTimes(
      prefill_fixed_s=wait + hops * self.hop_s,
      prefill_token_s=token_flops / (self.flops * every) + summed / instances,
      prefill_pair_s=pair_flops / (self.flops * every),
      decode_fixed_s=wait
      + exchanges * self.hop_s
      + 2 * self.parameters / (self.bytes_s * chips),
      decode_row_s=token_flops / (self.flops * every) + summed / instances,
      decode_token_s=self.token_bytes / (self.bytes_s * every),
    )


# ---------------------------------------------------------------------------
# Workloads
# ---------------------------------------------------------------------------


def zipf_lengths(
  count: int,
  exponent: int | float,
  *,
  seed: int = 0,
  offset: int | float = 10.0,
  least: int = 10,
  most: int = 199_999,
) -> Int[np.ndarray, " n"]:
  """Lengths whose probability falls as 1 / (length + offset)^exponent.

  Args:
    count: how many.
    exponent: 1.0 has long texts often, 1.4 seldom.
    seed: of the draw.
    offset: flattens the shortest.
    least: the shortest.
    most: the longest.
  """
  lengths = np.arange(least, most + 1)
  weights = (lengths + float(offset)) ** -float(exponent)
  chance = np.random.default_rng(seed)
  return chance.choice(lengths, size=count, p=weights / weights.sum())


# Of prompts and answers: (share, shortest, longest, median answer). Lengths are
# log-uniform between the two, as the published ranges of these sets of texts
# are all that is known of them here.
MIXED = (
  ("chat, as ShareGPT", 1 / 3, 4, 2_300, 200),
  ("documents, as L-Eval", 1 / 3, 2_700, 210_500, 100),
  ("long documents, as LV-Eval", 1 / 3, 15_100, 497_300, 20),
)


def mixed_lengths(
  count: int, *, seed: int = 0
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
  """(tokens of prompts, of answers): chats and long documents in equal parts.

  See `MIXED`.
  """
  chance = np.random.default_rng(seed)
  which = chance.choice(len(MIXED), size=count, p=[one[1] for one in MIXED])
  shortest, longest, median = (
    np.array([one[n] for one in MIXED], float)[which] for n in (2, 3, 4)
  )
  drawn = chance.uniform(np.log(shortest), np.log(longest))
  answers = np.exp(chance.normal(np.log(median), 0.8))
  return (
    np.exp(drawn).astype(np.int64),
    np.clip(answers, 1, 2048).astype(np.int64),
  )


def poisson_arrivals(
  prompts: Int[np.ndarray, " n"],
  answers: Int[np.ndarray, " n"],
  rate: int | float,
  *,
  seed: int = 0,
) -> list[tuple[float, int, int]]:
  """Requests that come at random, `rate` a second; for `simulate_elastic`.

  Another rate only stretches time: the same gaps in the same order.
  """
  gaps = np.random.default_rng(seed).exponential(size=len(prompts))
  times: Float[np.ndarray, " n"] = np.cumsum(gaps) / float(rate)
  return [
    (float(t), int(p), int(n))
    for t, p, n in zip(times, prompts, answers, strict=True)
  ]


# ---------------------------------------------------------------------------
# Goodput
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledLimits:
  """Limits that grow with a request: so many times what it takes alone.

  Attributes:
    alone: the times of all chips as one group, with nothing else to do.
    scale: how many times that the first token may take.
    ttft_s: seconds that it may always take.
    tpot_s: seconds for each later token.
  """

  alone: QuadraticTimes
  scale: int | float = 25.0
  ttft_s: int | float = 15.0
  tpot_s: int | float = 0.05

  def of(self, one: ServedRequest) -> Limits:
    """The limits of a request."""
    least = self.alone.prefill_s([(one.prompt_tokens, 0)])
    return Limits(
      ttft_s=max(self.ttft_s, self.scale * least), tpot_s=self.tpot_s
    )

  def share(self, served: Sequence[ServedRequest]) -> float:
    """Of the requests, that were served within their limits, 0 to 1."""
    met = sum(one.meets(self.of(one)) for one in served)
    return met / max(1, len(served))


def elastic_goodput(
  share: Callable[[float], float],
  *,
  wanted: int | float = 0.9,
  most: int | float = 64.0,
  error: int | float = 0.02,
) -> float:
  """The largest rate at which a share of the requests is served in time.

  Args:
    share: of a rate, requests a second; falls as it grows, but for noise.
    wanted: the least share.
    most: the largest rate that is tried.
    error: of the rate, relative.

  Returns:
    Requests a second; 0 where no rate above most / 2^20 serves.
  """
  high = float(most)
  if share(high) >= wanted:
    return high
  low = high / 2
  while share(low) < wanted:
    high, low = low, low / 2
    if low < most / 2**20:
      return 0.0
  while high / low > 1 + error:
    middle = (low * high) ** 0.5
    if share(middle) >= wanted:
      low = middle
    else:
      high = middle
  return low

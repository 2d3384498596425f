"""Scheduler of elastic instance groups for prefill and decode.

Each instance has all weights and slots for tokens. A group of instances
prefills a batch of prompts by sequence parallelism; while keys circulate on its
ring, each instance keeps those that a plan assigns to it, so that fewer
instances decode the batch without moving a key (`fewest_instances`). A decoding
group grows by instances that hold nothing of its requests yet.

`ElasticScheduler.plan` decides in four steps:
  dispatch  which waiting requests, and which idle or decoding instances
  allocate  take instances from decode while prompts gain more than answers lose
  batch     cut requests and instances into batches, `best_batches`
  scale     the fewest instances whose slots hold a batch's keys

Guarantees: plain Python and a pure function of its view. A request is
taken when all its tokens, those of its answer too, have slots; none is evicted.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, sections 4 and 5. The
constants are those of its public code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ringjax.checks import instance, integer, number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster.loongserve.elastic_batches import (
  best_batches,
  fewest_instances,
)
from ringjax.serve.cluster.times.phase_times import PhaseTimes

# Two ports of 400 GiB/s between instances, as LoongServe's code counts them.
BETWEEN_INSTANCES = Link(bandwidth=2 * 400 * 2**30, ports=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
  """Constants of the elastic scheduler.

  Attributes:
    slots: Capacity of an instance in tokens.
    longest_prefill_s: Maximum seconds of a batch of several prompts.
    most_moved_tokens: Maximum tokens moved to empty an instance; 0 moves
      nothing.
    step_s: Initial estimate of the seconds of a decode step.
    answer_tokens: Initial estimate of an answer's length in tokens.
    window: Number of waiting requests that are considered, in their order; 1
      lets none overtake.
    wide_rows: Rows of an instance from which decode is compute-bound.
    steps: Number of decode steps between two decisions.
    spare: Number of instances that are kept free of prompts which even with all
      instances take longer than `longest_prefill_s`, where the rest has their
      slots; 0 is LoongServe's rule, by which a short prompt waits for them.
    token_bytes: Bytes of a token's keys and values.
    link: Link between two instances.
  """

  slots: int = 210_000
  longest_prefill_s: int | float = 5.0
  most_moved_tokens: int = 10_000
  step_s: int | float = 0.022
  answer_tokens: int | float = 512
  window: int = 1
  wide_rows: int = 128
  steps: int = 10
  spare: int = 0
  token_bytes: int = 32 * 2 * 32 * 128 * 2
  link: Link = BETWEEN_INSTANCES

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == "link":
        instance(field.name, value, Link)
      elif field.name in ("spare", "most_moved_tokens"):
        integer(field.name, value, least=0)
      elif isinstance(field.default, int):
        positive_int(field.name, value)
      else:
        number(field.name, value, above=0)

  def moving_s(self, tokens: int | float) -> float:
    """Seconds to move the keys of some tokens to another instance."""
    return self.link.send_s(tokens * self.token_bytes)


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class ElasticRequest:
  """A waiting or running request.

  Attributes:
    number: Unique number.
    arrival_s: Time of arrival, in seconds.
    prompt_tokens: Prompt length in tokens.
    new_tokens: Maximum number of tokens to generate.
    done: Number of tokens generated so far.
    started_s: Time at which its answer began.
    kept: Number of its tokens that each instance holds, by instance number.
  """

  number: int
  arrival_s: float
  prompt_tokens: int
  new_tokens: int
  done: int = 0
  started_s: float = math.nan
  kept: dict[int, int] = dataclasses.field(default_factory=dict)

  @property
  def all_tokens(self) -> int:
    """Slots that it needs in all; the last token's keys are never read."""
    return self.prompt_tokens + max(0, self.new_tokens - 1)

  @property
  def left_tokens(self) -> int:
    """Number of these slots that are not yet filled."""
    return self.all_tokens - sum(self.kept.values())


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class DecodeGroup:
  """Requests that are decoded together.

  Attributes:
    requests: Requests of the group.
    instances: Numbers of the instances that hold or will hold their keys; all
      are masters.
    free_s: End time of the current step.
  """

  requests: list[ElasticRequest]
  instances: list[int]
  free_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBatch:
  """Prompts that a group of instances prefills together.

  Attributes:
    requests: Requests of the batch.
    instances: Numbers of the group's instances.
    kept: For each request, the number of tokens that each instance keeps, as
      consecutive ranges in this order.
    stays: Numbers of the instances that decode the batch: their slots hold
      prompts and answers.
  """

  requests: tuple[ElasticRequest, ...]
  instances: tuple[int, ...]
  kept: tuple[tuple[int, ...], ...]
  stays: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emptied:
  """An instance whose keys move to others of a group, which it then leaves.

  Attributes:
    instance: Number of the instance.
    group: Decode group whose keys it holds.
    into: (instance, tokens) of the instances that take the keys.
    joins: Group that these instances belong to, or None for the same group.
  """

  instance: int
  group: DecodeGroup
  into: tuple[tuple[int, int], ...]
  joins: DecodeGroup | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticPlan:
  """Decision of a scheduler for one point in time.

  Attributes:
    batches: Prompts to prefill now.
    emptied: Instances whose keys are moved before that.
    paused: Decode groups whose instances prefill meanwhile.
  """

  batches: tuple[PrefillBatch, ...] = ()
  emptied: tuple[Emptied, ...] = ()
  paused: tuple[DecodeGroup, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterView:
  """State of the instances as a scheduler sees it.

  Attributes:
    now_s: Current time in seconds.
    waiting: Waiting requests in the order of arrival.
    groups: Decode groups; no two have an instance in common.
    reading: Numbers of the instances that prefill.
    used: Tokens that each instance holds or has reserved for a batch in
      prefill.
  """

  now_s: float
  waiting: Sequence[ElasticRequest]
  groups: Sequence[DecodeGroup]
  reading: frozenset[int]
  used: Sequence[int]


@runtime_checkable
class ElasticPolicy(Protocol):
  """Decisions that a simulator asks for: `ElasticScheduler`, `FixedGroups`."""

  @property
  def options(self) -> ElasticOptions: ...

  @property
  def shrinks(self) -> bool:
    """Whether instances that hold nothing leave their group."""
    ...

  def times(self, instances: int) -> PhaseTimes:
    """Call times of a group of `instances` instances."""
    ...

  def refused(self, request: ElasticRequest, instances: int) -> str:
    """Reason why a request can never be served; "" if it can."""
    ...

  def plan(self, view: ClusterView) -> ElasticPlan:
    """Decide what to prefill now."""
    ...

  def grown(self, group: DecodeGroup, view: ClusterView) -> tuple[int, ...]:
    """Instances that join a group before its next step."""
    ...

  def ended(self, request: ElasticRequest) -> None:
    """Record that an answer is complete."""
    ...

  def stepped(self, seconds: float) -> None:
    """Record the seconds of a decode step."""
    ...


# ---------------------------------------------------------------------------
# The scheduler
# ---------------------------------------------------------------------------


class ElasticScheduler:
  """LoongServe's elastic scheduler: dispatch, allocate, batch, scale.

  Attributes:
    options: Constants of the scheduler.
    answer_tokens: Average length of answers so far, in tokens.
    step_s: Average seconds of a decode step so far.
  """

  shrinks = True

  def __init__(
    self, times: Sequence[PhaseTimes], options: ElasticOptions | None = None
  ):
    """Make a scheduler.

    Args:
      times: Call times of groups of 1, 2, ... instances.
      options: Constants; default `ElasticOptions()`.
    """
    if not times:
      raise OptionError(
        "times",
        "none",
        "the times of groups of 1, 2, ... instances",
        "pass a PhaseTimes for each size of a group",
      )
    self._times = tuple(times)
    self.options = options or ElasticOptions()
    self.answer_tokens = float(self.options.answer_tokens)
    self.step_s = float(self.options.step_s)
    self._answers = self._steps = 0

  def times(self, instances: int) -> PhaseTimes:
    """Call times of a group of `instances` instances."""
    return self._times[min(instances, len(self._times)) - 1]

  def ended(self, request: ElasticRequest) -> None:
    """Update the average length of answers."""
    self._answers += 1
    gain = 1 / min(self._answers, 1000)
    self.answer_tokens += gain * (request.done - self.answer_tokens)

  def stepped(self, seconds: float) -> None:
    """Update the average time of a decode step."""
    self._steps += 1
    gain = 1 / min(self._steps, 1000)
    self.step_s += gain * (seconds - self.step_s)

  def refused(self, request: ElasticRequest, instances: int) -> str:
    """Refuse a request of more tokens than all slots together."""
    room = instances * self.options.slots
    if request.all_tokens <= room:
      return ""
    return f"{request.all_tokens} tokens for {room} slots"

  # -- prefill

  def plan(self, view: ClusterView) -> ElasticPlan:
    """Plan prefill batches in the four steps of the module's docstring."""
    if not view.waiting:
      return ElasticPlan()
    free = [self.options.slots - tokens for tokens in view.used]
    busy = {n for group in view.groups for n in group.instances}
    idle = [n for n in range(len(free)) if n not in busy | view.reading]
    # Slots that running answers will still need are not available.
    due = {
      id(group): sum(request.left_tokens for request in group.requests)
      for group in view.groups
    }
    chosen, paused = self._dispatch(view, free, idle, due)
    if not chosen:
      return ElasticPlan()
    lengths = [request.prompt_tokens for request in chosen]
    emptied, idle, free = self._empty_instances(
      view, lengths, free, idle, paused
    )
    changed_groups = {id(entry.group) for entry in emptied}
    changed_groups |= {
      id(entry.joins) for entry in emptied if entry.joins is not None
    }
    for group in view.groups:
      if (
        any(group is paused_group for paused_group in paused)
        or id(group) in changed_groups
      ):
        continue
      if self._gains(lengths, len(idle) + _num_instances(paused), group):
        paused.append(group)
    instances = sorted(
      {*idle, *(n for group in paused for n in group.instances)},
      key=lambda n: (self.options.slots - free[n], n),
    )
    # Slots that paused answers need later are set aside on their instances.
    room = dict(zip(instances, (free[n] for n in instances), strict=True))
    for group in paused:
      tokens_left = due[id(group)]
      for n in sorted(group.instances, key=lambda n: -room[n]):
        take = min(tokens_left, room[n])
        room[n], tokens_left = room[n] - take, tokens_left - take
    slots = [room[n] for n in instances]
    chosen.sort(key=lambda request: (-request.prompt_tokens, request.number))
    cut_batches = []
    while chosen:
      cost, batches = best_batches(
        [request.prompt_tokens for request in chosen],
        slots,
        self.times,
        [request.all_tokens for request in chosen],
        [
          self._max_instances(request, len(instances), view)
          for request in chosen
        ],
      )
      if cost < math.inf:
        cut_batches = batches
        break
      # No cut has room: the latest request waits.
      chosen.remove(max(chosen, key=lambda request: request.number))
    batches = []
    for rows, group in cut_batches:
      requests = [chosen[n] for n in rows]
      group_instances = [instances[n] for n in group]
      batches.append(
        self._scaled_batch(
          requests,
          group_instances,
          [room[n] for n in group_instances],
          view.used,
        )
      )
    reading_instances = {n for batch in batches for n in batch.instances}
    stopped = tuple(
      group for group in paused if reading_instances & {*group.instances}
    )
    return ElasticPlan(
      batches=tuple(batches), emptied=tuple(emptied), paused=stopped
    )

  def _max_instances(
    self, request: ElasticRequest, size: int, view: ClusterView
  ) -> int:
    """Maximum number of `size` instances for a request's batch."""
    num_all, spare = len(view.used), self.options.spare
    short = (
      self._read_s([request.prompt_tokens], num_all)
      <= self.options.longest_prefill_s
    )
    if short or request.all_tokens > (num_all - spare) * self.options.slots:
      return size
    return max(0, min(size, num_all - spare - len(view.reading)))

  def _scaled_batch(
    self,
    requests: Sequence[ElasticRequest],
    instances: Sequence[int],
    room: Sequence[int],
    used: Sequence[int],
  ) -> PrefillBatch:
    """Make a batch that the fewest instances decode."""
    held_tokens = [used[n] for n in instances]
    allocation = fewest_instances(
      [request.all_tokens for request in requests], room, held_tokens
    )
    assert allocation is not None
    counts_per_request = []
    for request, row in zip(requests, allocation, strict=True):
      tokens_left, counts = request.prompt_tokens, []
      for n in row:
        counts.append(min(n, tokens_left))
        tokens_left -= counts[-1]
      counts_per_request.append(tuple(counts))
    stays = [n for n, *column in zip(instances, *allocation, strict=True)
             if any(column)]  # fmt: skip
    return PrefillBatch(
      requests=tuple(requests),
      instances=tuple(instances),
      kept=tuple(counts_per_request),
      stays=tuple(stays),
    )

  def _dispatch(
    self,
    view: ClusterView,
    free: Sequence[int],
    idle: Sequence[int],
    due: dict[int, int],
  ) -> tuple[list[ElasticRequest], list[DecodeGroup]]:
    """Requests to prefill now, in their order, and groups paused for them."""
    chosen: list[ElasticRequest] = []
    waiting = [*view.waiting]
    spare = sum(free[n] for n in idle)
    size = len(idle)

    def take(most: int, size: int) -> list[ElasticRequest]:
      """Waiting requests that fit into `most` slots and the time limit."""
      fitting, num_seen, slots_left = [], 0, most
      lengths = [request.prompt_tokens for request in chosen]
      for request in waiting:
        num_seen += 1
        if num_seen > self.options.window + len(fitting) or not size:
          break
        longer = [*lengths, request.prompt_tokens]
        too_slow = self._read_s(longer, size) > self.options.longest_prefill_s
        if request.all_tokens > slots_left or (too_slow and lengths):
          continue
        if not self._max_instances(request, size, view):
          continue
        fitting.append(request)
        lengths, slots_left = longer, slots_left - request.all_tokens
      return fitting

    first = take(spare, size)
    chosen += first
    waiting = [request for request in waiting if request not in first]
    spare -= sum(request.all_tokens for request in first)
    paused: list[DecodeGroup] = []
    # Groups with the most spare slots first; each is considered once.
    rooms = {
      id(group): sum(free[n] for n in group.instances) - due[id(group)]
      for group in view.groups
    }
    for group in sorted(view.groups, key=lambda group: -rooms[id(group)]):
      fitting = take(spare + rooms[id(group)], size + len(group.instances))
      if not fitting:
        continue
      lengths = [request.prompt_tokens for request in (*chosen, *fitting)]
      seconds = self._read_s(lengths, size + len(group.instances))
      loss = sum(
        seconds / max(1, request.new_tokens) for request in group.requests
      )
      wait = self.answer_tokens * self.step_s
      run_s = min(view.now_s - request.started_s for request in group.requests)
      gain = sum(
        max(0.0, wait - run_s) / max(1, request.prompt_tokens)
        for request in fitting
      )
      # A long-running group ends soon, so it is paused only if all are stuck.
      stuck = not chosen and not view.reading
      if gain > loss or (stuck and wait <= run_s):
        paused.append(group)
        chosen += fitting
        waiting = [request for request in waiting if request not in fitting]
        spare += rooms[id(group)] - sum(
          request.all_tokens for request in fitting
        )
        size += len(group.instances)
    if not chosen and not view.reading and view.groups:
      chosen, paused = self._forced_dispatch(view, free, idle, rooms)
    return chosen, paused

  def _forced_dispatch(
    self,
    view: ClusterView,
    free: Sequence[int],
    idle: Sequence[int],
    rooms: dict[int, int],
  ) -> tuple[list[ElasticRequest], list[DecodeGroup]]:
    """Dispatch the first request to idle instances and paused groups.

    It would otherwise wait for answers to end although there are slots.
    """
    head = view.waiting[0]
    spare, paused = sum(free[n] for n in idle), []
    waited_long = view.now_s - head.arrival_s > self.answer_tokens * self.step_s
    for group in sorted(view.groups, key=lambda group: -rooms[id(group)]):
      if spare >= head.all_tokens:
        break
      paused.append(group)
      spare += rooms[id(group)]
    if waited_long and spare >= head.all_tokens:
      return [head], paused
    return [], []

  def _empty_instances(
    self,
    view: ClusterView,
    lengths: Sequence[int],
    free: Sequence[int],
    idle: Sequence[int],
    paused: Sequence[DecodeGroup],
  ) -> tuple[list[Emptied], list[int], list[int]]:
    """Empty instances whose keys other decoding instances can take.

    Continues while more instances are busy than the keys need, and prefill
    gains more than moving takes.
    """
    free, idle, emptied = [*free], [*idle], []
    group_of = {
      n: group
      for group in view.groups
      if not any(group is paused_group for paused_group in paused)
      for n in group.instances
    }
    held_tokens = {n: self.options.slots - free[n] for n in group_of}
    due = {
      id(group): sum(request.left_tokens for request in group.requests)
      for group in view.groups
    }
    touched: set[int] = set()
    while len(held_tokens) > 1:
      size = len(idle) + _num_instances(paused)
      source = min(held_tokens, key=lambda n: (held_tokens[n], n))
      group, tokens = group_of[source], held_tokens[source]
      if tokens > self.options.most_moved_tokens or id(group) in touched:
        break
      into, tokens_left = [], tokens
      takers = [n for n in held_tokens if group_of[n] is group and n != source]
      target = group
      if not takers:
        # All of its requests join the group with the fullest instance.
        fullest = max(
          (n for n in held_tokens if group_of[n] is not group),
          key=lambda n: (held_tokens[n], -n),
          default=None,
        )
        if fullest is None:
          break
        target = group_of[fullest]
        takers = [n for n in held_tokens if group_of[n] is target]
        if id(target) in touched:
          break
      due_tokens = due[id(target)] + (
        due[id(group)] if target is not group else 0
      )
      if sum(free[n] for n in takers) < tokens + due_tokens:
        break
      for n in sorted(takers, key=lambda n: (-held_tokens[n], n)):
        part = min(tokens_left, free[n])
        if part:
          into.append((n, part))
        tokens_left -= part
      saved = self._read_s(lengths, size) - self._read_s(lengths, size + 1)
      if saved < self.options.moving_s(tokens):
        break
      for n, part in into:
        held_tokens[n], free[n] = held_tokens[n] + part, free[n] - part
      free[source] += tokens
      emptied.append(
        Emptied(
          instance=source,
          group=group,
          into=tuple(into),
          joins=None if target is group else target,
        )
      )
      touched |= {id(group), id(target)}
      idle.append(source)
      del held_tokens[source]
    return emptied, idle, free

  def _gains(
    self, lengths: Sequence[int], size: int, group: DecodeGroup
  ) -> bool:
    """Whether prompts gain more by a group's instances than the group loses."""
    grown_size = size + len(group.instances)
    seconds, grown_seconds = (
      self._read_s(lengths, size),
      self._read_s(lengths, grown_size),
    )
    if seconds == math.inf:
      return False
    rows = len(group.requests)
    answers = sum(request.new_tokens for request in group.requests)
    gain = (seconds - grown_seconds) * sum(1 / max(1, n) for n in lengths)
    return gain >= grown_seconds * rows * rows / max(1, answers)

  def _read_s(self, lengths: Sequence[int], size: int) -> float:
    if not size:
      return math.inf
    return self.times(size).prefill_s((n, 0) for n in lengths)

  # -- decode

  def grown(self, group: DecodeGroup, view: ClusterView) -> tuple[int, ...]:
    """Idle instances that join when a group's rows exceed `wide_rows` each.

    Slots never need growth: those of answers are reserved with the prompts'.
    """
    if view.waiting:
      return ()
    busy = {
      n for other_group in view.groups for n in other_group.instances
    } | view.reading
    idle = [n for n in range(len(view.used)) if n not in busy]
    rows, size = len(group.requests), len(group.instances)
    num_joining = -(-rows // self.options.wide_rows) - size
    return tuple(idle[: max(0, num_joining)])


def _num_instances(groups: Sequence[DecodeGroup]) -> int:
  return sum(len(group.instances) for group in groups)

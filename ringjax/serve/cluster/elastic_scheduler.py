"""Elastic groups of instances: who reads what with how many, and who answers.

Each instance has all weights and slots for tokens. A group of instances reads
a batch of prompts by sequence parallelism; while keys go around its ring, each
instance keeps those that a plan gives it, so that the batch is answered by
fewer instances without moving a key (`fewest_instances`). A group that answers
grows by instances that hold nothing of its requests yet.

`ElasticScheduler.plan` decides in four steps:
  dispatch  which waiting requests, and which idle or answering instances
  allocate  take instances from answers while prompts gain more than they lose
  batch     cut requests and instances into batches, `best_batches`
  scale     the fewest instances whose slots hold a batch's keys

Guarantees: plain Python and a pure function of what it is shown. A request is
taken when all its tokens, those of its answer too, have slots; none is evicted.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, sections 4 and 5. The
constants are those of its public code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError
from ringjax.serve.cluster.elastic_batches import best_batches, fewest_instances
from ringjax.serve.cluster.phase_times import PhaseTimes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
  """Constants of the scheduler.

  Attributes:
    slots: tokens that an instance has room for.
    longest_prefill_s: a batch of several prompts takes no longer.
    most_moved_tokens: from one instance, to empty it; 0 moves nothing.
    step_s: of decoding, on average, before any was measured.
    answer_tokens: of an answer, on average, before any was measured.
    window: of the requests that wait, how many are looked at in their order;
      1 lets none overtake.
    wide_rows: rows of an instance from which decoding is bound by products.
    steps: of decoding, between two decisions.
    spare: instances that prompts leave to others which take all instances
      longer than `longest_prefill_s`, where the rest has their slots; 0 is
      LoongServe's rule, by which a short prompt waits for them.
    token_bytes: of a token's keys and values.
    link_bytes_s: bytes a second between two instances.
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
  link_bytes_s: int | float = 2 * 400 * 2**30

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in ("spare", "most_moved_tokens"):
        integer(field.name, value, least=0)
      elif isinstance(field.default, int):
        positive_int(field.name, value)
      else:
        number(field.name, value, above=0)

  def moving_s(self, tokens: int | float) -> float:
    """Seconds to move the keys of so many tokens to another instance."""
    return float(tokens * self.token_bytes / self.link_bytes_s)


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class ElasticRequest:
  """A request while it waits and while it is served.

  Attributes:
    number: unique.
    arrival_s: when it came.
    prompt_tokens: of its prompt.
    new_tokens: of its answer, at most.
    done: tokens of its answer so far.
    started_s: when its answer began.
    kept: tokens that each instance keeps of it, by the instance's number.
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
    """Slots that it needs until it ends; its last token is not read."""
    return self.prompt_tokens + max(0, self.new_tokens - 1)

  @property
  def left_tokens(self) -> int:
    """Of these, those without a slot yet."""
    return self.all_tokens - sum(self.kept.values())


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class DecodeGroup:
  """Requests that are answered together.

  Attributes:
    requests: some.
    instances: numbers of those that hold their keys or will; all are masters.
    free_s: when the step under way ends.
  """

  requests: list[ElasticRequest]
  instances: list[int]
  free_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBatch:
  """Prompts that a group reads.

  Attributes:
    requests: some.
    instances: numbers of the group's.
    kept: for each request, the tokens that each of these keeps, consecutive
      ranges in this order.
    stays: numbers of those that answer: they have the slots of prompts and
      answers.
  """

  requests: tuple[ElasticRequest, ...]
  instances: tuple[int, ...]
  kept: tuple[tuple[int, ...], ...]
  stays: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emptied:
  """An instance whose keys move to others of a group, which it then leaves.

  Attributes:
    instance: which.
    group: whose keys they are.
    into: (instance, tokens) of those that take them.
    joins: the group that these belong to, or None for its own.
  """

  instance: int
  group: DecodeGroup
  into: tuple[tuple[int, int], ...]
  joins: DecodeGroup | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticPlan:
  """What a scheduler decided.

  Attributes:
    batches: prompts to read now.
    emptied: instances whose keys move before that.
    paused: groups whose instances read meanwhile.
  """

  batches: tuple[PrefillBatch, ...] = ()
  emptied: tuple[Emptied, ...] = ()
  paused: tuple[DecodeGroup, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterView:
  """What a scheduler sees.

  Attributes:
    now_s: the time.
    waiting: requests in the order in which they came.
    groups: that answer; no two have an instance in common.
    reading: numbers of instances that read prompts.
    used: tokens that each instance holds or has promised to a batch that is
      being read.
  """

  now_s: float
  waiting: Sequence[ElasticRequest]
  groups: Sequence[DecodeGroup]
  reading: frozenset[int]
  used: Sequence[int]


@runtime_checkable
class ElasticPolicy(Protocol):
  """What a simulator asks: `ElasticScheduler`, or `FixedGroups`."""

  @property
  def options(self) -> ElasticOptions: ...

  @property
  def shrinks(self) -> bool:
    """Whether instances that hold nothing leave their group."""
    ...

  def times(self, instances: int) -> PhaseTimes:
    """Of a group of so many instances."""
    ...

  def refused(self, request: ElasticRequest, instances: int) -> str:
    """Why a request can never be served; "" if it can."""
    ...

  def plan(self, view: ClusterView) -> ElasticPlan:
    """What to do now."""
    ...

  def grown(self, group: DecodeGroup, view: ClusterView) -> tuple[int, ...]:
    """Instances that join a group before its next step."""
    ...

  def ended(self, request: ElasticRequest) -> None:
    """Notes that an answer is whole."""
    ...

  def stepped(self, seconds: float) -> None:
    """Notes how long a step of decoding takes."""
    ...


# ---------------------------------------------------------------------------
# The scheduler
# ---------------------------------------------------------------------------


class ElasticScheduler:
  """LoongServe's four steps.

  Attributes:
    options: constants.
    answer_tokens: of an answer, on average so far.
    step_s: of decoding, on average so far.
  """

  shrinks = True

  def __init__(
    self, times: Sequence[PhaseTimes], options: ElasticOptions | None = None
  ):
    """Makes one.

    Args:
      times: of groups of 1, 2, ... instances.
      options: constants.
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
    """As `ElasticPolicy`."""
    return self._times[min(instances, len(self._times)) - 1]

  def ended(self, request: ElasticRequest) -> None:
    """Notes how long an answer was."""
    self._answers += 1
    gain = 1 / min(self._answers, 1000)
    self.answer_tokens += gain * (request.done - self.answer_tokens)

  def stepped(self, seconds: float) -> None:
    """Notes how long a step of decoding took."""
    self._steps += 1
    gain = 1 / min(self._steps, 1000)
    self.step_s += gain * (seconds - self.step_s)

  def refused(self, request: ElasticRequest, instances: int) -> str:
    """As `ElasticPolicy`: more tokens than all slots together."""
    room = instances * self.options.slots
    if request.all_tokens <= room:
      return ""
    return f"{request.all_tokens} tokens for {room} slots"

  # -- reading

  def plan(self, view: ClusterView) -> ElasticPlan:
    """As `ElasticPolicy`."""
    if not view.waiting:
      return ElasticPlan()
    free = [self.options.slots - n for n in view.used]
    busy = {n for group in view.groups for n in group.instances}
    idle = [n for n in range(len(free)) if n not in busy | view.reading]
    # Slots that answers under way will still take are no one else's.
    due = {id(g): sum(r.left_tokens for r in g.requests) for g in view.groups}
    chosen, paused = self._dispatched(view, free, idle, due)
    if not chosen:
      return ElasticPlan()
    lengths = [r.prompt_tokens for r in chosen]
    emptied, idle, free = self._emptied(view, lengths, free, idle, paused)
    gone = {id(one.group) for one in emptied}
    gone |= {id(one.joins) for one in emptied if one.joins is not None}
    for group in view.groups:
      if any(group is one for one in paused) or id(group) in gone:
        continue
      if self._pays(lengths, len(idle) + _size(paused), group):
        paused.append(group)
    instances = sorted(
      {*idle, *(n for group in paused for n in group.instances)},
      key=lambda n: (self.options.slots - free[n], n),
    )
    # What paused answers need later is kept from their instances.
    room = dict(zip(instances, (free[n] for n in instances), strict=True))
    for group in paused:
      left = due[id(group)]
      for n in sorted(group.instances, key=lambda n: -room[n]):
        take = min(left, room[n])
        room[n], left = room[n] - take, left - take
    slots = [room[n] for n in instances]
    chosen.sort(key=lambda r: (-r.prompt_tokens, r.number))
    cut = []
    while chosen:
      cost, batches = best_batches(
        [r.prompt_tokens for r in chosen],
        slots,
        self.times,
        [r.all_tokens for r in chosen],
        [self._most(r, len(instances), view) for r in chosen],
      )
      if cost < math.inf:
        cut = batches
        break
      # The last that came waits.
      chosen.remove(max(chosen, key=lambda r: r.number))
    batches = []
    for rows, group in cut:
      requests = [chosen[n] for n in rows]
      mine = [instances[n] for n in group]
      batches.append(
        self._scaled(requests, mine, [room[n] for n in mine], view.used)
      )
    within = {n for batch in batches for n in batch.instances}
    stopped = tuple(g for g in paused if within & {*g.instances})
    return ElasticPlan(
      batches=tuple(batches), emptied=tuple(emptied), paused=stopped
    )

  def _most(self, request: ElasticRequest, size: int, view: ClusterView) -> int:
    """Of so many instances, how many a request's batch may have."""
    every, spare = len(view.used), self.options.spare
    short = (
      self._read_s([request.prompt_tokens], every)
      <= self.options.longest_prefill_s
    )
    if short or request.all_tokens > (every - spare) * self.options.slots:
      return size
    return max(0, min(size, every - spare - len(view.reading)))

  def _scaled(
    self,
    requests: Sequence[ElasticRequest],
    instances: Sequence[int],
    room: Sequence[int],
    used: Sequence[int],
  ) -> PrefillBatch:
    """A batch that the fewest instances answer."""
    held = [used[n] for n in instances]
    whole = fewest_instances([r.all_tokens for r in requests], room, held)
    assert whole is not None
    kept = []
    for request, row in zip(requests, whole, strict=True):
      left, mine = request.prompt_tokens, []
      for n in row:
        mine.append(min(n, left))
        left -= mine[-1]
      kept.append(tuple(mine))
    stays = [n for n, *column in zip(instances, *whole, strict=True)
             if any(column)]  # fmt: skip
    return PrefillBatch(
      requests=tuple(requests),
      instances=tuple(instances),
      kept=tuple(kept),
      stays=tuple(stays),
    )

  def _dispatched(
    self,
    view: ClusterView,
    free: Sequence[int],
    idle: Sequence[int],
    due: dict[int, int],
  ) -> tuple[list[ElasticRequest], list[DecodeGroup]]:
    """Requests to read now, in their order, and groups that wait for them."""
    chosen: list[ElasticRequest] = []
    waiting = [*view.waiting]
    spare = sum(free[n] for n in idle)
    size = len(idle)

    def take(most: int, size: int) -> list[ElasticRequest]:
      """Of those that wait as many as fit into `most` slots and the time."""
      found, seen, left = [], 0, most
      lengths = [r.prompt_tokens for r in chosen]
      for request in waiting:
        seen += 1
        if seen > self.options.window + len(found) or not size:
          break
        longer = [*lengths, request.prompt_tokens]
        late = self._read_s(longer, size) > self.options.longest_prefill_s
        if request.all_tokens > left or (late and lengths):
          continue
        if not self._most(request, size, view):
          continue
        found.append(request)
        lengths, left = longer, left - request.all_tokens
      return found

    first = take(spare, size)
    chosen += first
    waiting = [r for r in waiting if r not in first]
    spare -= sum(r.all_tokens for r in first)
    paused: list[DecodeGroup] = []
    # Groups with the most spare slots first; each is asked once.
    rooms = {
      id(g): sum(free[n] for n in g.instances) - due[id(g)] for g in view.groups
    }
    for group in sorted(view.groups, key=lambda g: -rooms[id(g)]):
      more = take(spare + rooms[id(group)], size + len(group.instances))
      if not more:
        continue
      lengths = [r.prompt_tokens for r in (*chosen, *more)]
      seconds = self._read_s(lengths, size + len(group.instances))
      lost = sum(seconds / max(1, r.new_tokens) for r in group.requests)
      wait = self.answer_tokens * self.step_s
      ran = min(view.now_s - r.started_s for r in group.requests)
      gain = sum(max(0.0, wait - ran) / max(1, r.prompt_tokens) for r in more)
      # An old group leaves soon by itself, unless nothing else would.
      stuck = not chosen and not view.reading
      if gain > lost or (stuck and wait <= ran):
        paused.append(group)
        chosen += more
        waiting = [r for r in waiting if r not in more]
        spare += rooms[id(group)] - sum(r.all_tokens for r in more)
        size += len(group.instances)
    if not chosen and not view.reading and view.groups:
      chosen, paused = self._forced(view, free, idle, rooms)
    return chosen, paused

  def _forced(
    self,
    view: ClusterView,
    free: Sequence[int],
    idle: Sequence[int],
    rooms: dict[int, int],
  ) -> tuple[list[ElasticRequest], list[DecodeGroup]]:
    """The first request, where idle instances and all groups have its slots.

    It would otherwise wait for the end of answers although there is room.
    """
    head = view.waiting[0]
    spare, paused = sum(free[n] for n in idle), []
    late = view.now_s - head.arrival_s > self.answer_tokens * self.step_s
    for group in sorted(view.groups, key=lambda g: -rooms[id(g)]):
      if spare >= head.all_tokens:
        break
      paused.append(group)
      spare += rooms[id(group)]
    if late and spare >= head.all_tokens:
      return [head], paused
    return [], []

  def _emptied(
    self,
    view: ClusterView,
    lengths: Sequence[int],
    free: Sequence[int],
    idle: Sequence[int],
    paused: Sequence[DecodeGroup],
  ) -> tuple[list[Emptied], list[int], list[int]]:
    """Instances taken from answers, whose keys others of them take.

    As long as more instances are busy than the keys need, and reading gains
    more than moving takes.
    """
    free, idle, found = [*free], [*idle], []
    group_of = {
      n: group
      for group in view.groups
      if not any(group is one for one in paused)
      for n in group.instances
    }
    held = {n: self.options.slots - free[n] for n in group_of}
    due = {id(g): sum(r.left_tokens for r in g.requests) for g in view.groups}
    touched: set[int] = set()
    while len(held) > 1:
      size = len(idle) + _size(paused)
      source = min(held, key=lambda n: (held[n], n))
      group, tokens = group_of[source], held[source]
      if tokens > self.options.most_moved_tokens or id(group) in touched:
        break
      into, left = [], tokens
      own = [n for n in held if group_of[n] is group and n != source]
      target = group
      if not own:
        # All of its requests join the group with the fullest instance.
        other = max(
          (n for n in held if group_of[n] is not group),
          key=lambda n: (held[n], -n),
          default=None,
        )
        if other is None:
          break
        target = group_of[other]
        own = [n for n in held if group_of[n] is target]
        if id(target) in touched:
          break
      later = due[id(target)] + (due[id(group)] if target is not group else 0)
      if sum(free[n] for n in own) < tokens + later:
        break
      for n in sorted(own, key=lambda n: (-held[n], n)):
        part = min(left, free[n])
        if part:
          into.append((n, part))
        left -= part
      saved = self._read_s(lengths, size) - self._read_s(lengths, size + 1)
      if saved < self.options.moving_s(tokens):
        break
      for n, part in into:
        held[n], free[n] = held[n] + part, free[n] - part
      free[source] += tokens
      found.append(
        Emptied(
          instance=source,
          group=group,
          into=tuple(into),
          joins=None if target is group else target,
        )
      )
      touched |= {id(group), id(target)}
      idle.append(source)
      del held[source]
    return found, idle, free

  def _pays(
    self, lengths: Sequence[int], size: int, group: DecodeGroup
  ) -> bool:
    """Whether prompts gain more by a group's instances than it loses."""
    more = size + len(group.instances)
    before, after = self._read_s(lengths, size), self._read_s(lengths, more)
    if before == math.inf:
      return False
    rows = len(group.requests)
    answers = sum(r.new_tokens for r in group.requests)
    gain = (before - after) * sum(1 / max(1, n) for n in lengths)
    return gain >= after * rows * rows / max(1, answers)

  def _read_s(self, lengths: Sequence[int], size: int) -> float:
    if not size:
      return math.inf
    return self.times(size).prefill_s((n, 0) for n in lengths)

  # -- answering

  def grown(self, group: DecodeGroup, view: ClusterView) -> tuple[int, ...]:
    """As `ElasticPolicy`: idle instances, where rows are too many for it.

    Slots need none: those of whole answers are set aside with the prompts'.
    """
    if view.waiting:
      return ()
    busy = {n for one in view.groups for n in one.instances} | view.reading
    idle = [n for n in range(len(view.used)) if n not in busy]
    rows, size = len(group.requests), len(group.instances)
    wanted = -(-rows // self.options.wide_rows) - size
    return tuple(idle[: max(0, wanted)])


def _size(groups: Sequence[DecodeGroup]) -> int:
  return sum(len(group.instances) for group in groups)

"""A cluster of engines without a model: queues, batches, links and a clock.

Guarantees: the same trace, instances and policy give the same times, on every
machine; nothing is random and no clock is read. Every request ends or has the
reason why it was rejected. Tokens of an instance never exceed its capacity.
Cost: a few events a request, whatever its length: between two events of an
instance its decode steps are advanced at once, by the sum of an arithmetic
series. 100,000 requests take well below a minute.

  prefill   FCFS; a batch takes prompts up to `max_prefill_tokens` in all, a
            longer prompt runs alone; with s stages a stage takes the s-th part
  decode    continuous batching, one token of every row a step; rows join and
            leave between steps; with s stages s groups of rows take turns
  turns     another way to decode, of DistServe's simulator: rows that ran go to
            the end of a queue, of which a call takes what fits; each stage has
            a queue and begins when it is free
  both      prompts before answers ("first"); pieces of prompts beside the
            answers of a step ("mixed"); or these in two calls that are planned
            while the step before is computed, as an `Engine` does ("ahead")
  pull      a finished prompt stays where it was read until an instance that
            answers has room and the link is free, which then pulls it
  push      the room is reserved when reading begins
  stream    with push, a prompt's cache leaves in equal parts while it is read,
            layer by layer or piece by piece: a part when its share of the
            reading is done

A `RolePlanner` may change what instances do, at the end of each window: a role
says what is sent to an instance, and what it has begun it finishes. As long as
one with a single role has both prompts and answers it does as with "mixed", so
that answers wait for no more than the call that runs.

Events and links are those of `plan.events`. Decode times have to be affine in
the cached tokens as long as the number of rows is the same.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670; Chen et al. 2025,
KVDirect, arXiv 2501.14743; Qin et al. 2025, Mooncake, arXiv 2407.00079.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan.events import Channel, Simulator, Span, Timeline
from ringjax.serve.cluster.phase_times import (
  PhaseTimes,
  QueuedPrompts,
  reading_s,
)
from ringjax.serve.cluster.role_planner import (
  RoleChange,
  RolePlanner,
  TrafficSummary,
)
from ringjax.serve.cluster.routing import (
  ROLES,
  InstanceView,
  PrefixCopy,
  Rejected,
  Route,
  RoutedRequest,
  RoutingPolicy,
  check_roles,
)
from ringjax.serve.cluster.served import ServedRequest
from ringjax.serve.traces import TraceRequest

SHARES = ("first", "mixed", "ahead")
DECODES = ("kept", "turns")
TRANSFERS = ("pull", "push")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedInstance:
  """One engine of a cluster.

  Attributes:
    name: unique in the cluster.
    role: of `ROLES`.
    times: seconds of its calls, without its pipeline.
    capacity_tokens: that its cache holds.
    max_rows: answers at once.
    max_prefill_tokens: of the prompts of a batch, L_m; with "mixed" and
      "ahead", of a step, answers counted.
    max_prefill_rows: prompts of a batch.
    max_decode_tokens: cached tokens of the rows of a step; with "kept" counted
      when a row joins; None for no other limit than the capacity.
    decode: of `DECODES`: a row joins the steps and is kept in them until it
      ends, or goes to the end of a queue behind each step.
    stages: of its pipeline.
    stage_s: seconds that each stage adds to a call.
    decode_stage_s: seconds that each stage adds to a step of answers; None: as
      to any call.
    entry_s: seconds that the first stage adds to a call.
    entry_token_s: the same, for each new token of prompts or cached one of
      answers.
    share: of `SHARES`, for an instance that does both.
    prefix_cache_tokens: room for blocks of prompts that have been read, beside
      the capacity; the least recently used ones go.
    prefix_blocks: those of them that are there at the beginning, the least
      recently used ones first: tokens of each by its id.
  """

  name: str
  times: PhaseTimes
  role: str = "both"
  capacity_tokens: int = 2**20
  max_rows: int = 256
  max_prefill_tokens: int = 2048
  max_prefill_rows: int = 256
  max_decode_tokens: int | None = None
  decode: str = "kept"
  stages: int = 1
  stage_s: int | float = 0.0
  decode_stage_s: int | float | None = None
  entry_s: int | float = 0.0
  entry_token_s: int | float = 0.0
  share: str = "first"
  prefix_cache_tokens: int = 0
  prefix_blocks: Mapping[int, int] = dataclasses.field(
    default_factory=dict, hash=False
  )

  def __post_init__(self) -> None:
    one_of("role", self.role, ROLES)
    one_of("share", self.share, SHARES)
    one_of("decode", self.decode, DECODES)
    if self.decode == "turns" and self.share != "first":
      raise OptionError(
        "share",
        f"{self.share!r} with decode='turns'",
        "'first': a stage reads prompts before its rows' turn",
        "pass share='first', or decode='kept'",
      )
    for name in (
      "capacity_tokens", "max_rows", "max_prefill_tokens", "max_prefill_rows",
      "stages",
    ):  # fmt: skip
      positive_int(name, getattr(self, name))
    if self.max_decode_tokens is not None:
      positive_int("max_decode_tokens", self.max_decode_tokens)
    for name in ("stage_s", "entry_s", "entry_token_s", "prefix_cache_tokens"):
      number(name, getattr(self, name), least=0)
    if self.decode_stage_s is not None:
      number("decode_stage_s", self.decode_stage_s, least=0)

  @property
  def step_stage_s(self) -> float:
    """Seconds that each stage adds to a step of answers."""
    each = self.decode_stage_s
    return float(self.stage_s if each is None else each)


@dataclasses.dataclass(kw_only=True)
class InstanceCounters:
  """What an instance has done.

  Attributes:
    prefill_calls: batches of prompts.
    prefill_tokens: that were computed.
    cached_tokens: of prompts, that were not.
    decode_steps: that made tokens.
    decode_tokens: that were made in these.
    prefill_busy_s: seconds of its first stage.
    decode_busy_s: seconds of steps; with "turns" of its first stage.
    peak_tokens: most tokens that its cache held or had reserved.
    peak_rows: most answers at once.
  """

  prefill_calls: int = 0
  prefill_tokens: int = 0
  cached_tokens: int = 0
  decode_steps: int = 0
  decode_tokens: int = 0
  prefill_busy_s: float = 0.0
  decode_busy_s: float = 0.0
  peak_tokens: int = 0
  peak_rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadPoint:
  """The load of an instance from one time on.

  Attributes:
    time_s: when it changed.
    queued_requests: prompts that wait or are being read.
    running_requests: answers under way.
    used_tokens: that its cache holds or has reserved.
  """

  time_s: float
  queued_requests: int
  running_requests: int
  used_tokens: int


@dataclasses.dataclass(kw_only=True)
class ClusterResult:
  """What a cluster did with a trace.

  Attributes:
    served: one for each request, in the order of the trace.
    seconds: when the last token was there.
    timeline: calls and transfers, if they were asked for.
    loads: by instance, if they were asked for.
    counters: by instance.
    moved_bytes: by link.
    reserved_peak_tokens: most tokens that instances had reserved for answers
      whose first step was yet to come.
    reserved_token_s: the same, summed over time.
    role_changes: in their order.
  """

  served: list[ServedRequest]
  seconds: float = 0.0
  timeline: Timeline = Timeline(())
  loads: dict[str, list[LoadPoint]] = dataclasses.field(default_factory=dict)
  counters: dict[str, InstanceCounters] = dataclasses.field(
    default_factory=dict
  )
  moved_bytes: dict[str, int | float] = dataclasses.field(default_factory=dict)
  reserved_peak_tokens: int = 0
  reserved_token_s: float = 0.0
  role_changes: list[RoleChange] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class _RoutedWork:
  """A request on its way."""

  served: ServedRequest
  asked: RoutedRequest
  blocks: tuple[int, ...]
  block: int
  # When its prompt could be read.
  ready_s: float = 0.0
  prefill: _Running | None = None
  decode: _Running | None = None
  # Whether its route said who answers.
  bound: bool = False
  cached: int = 0
  fetched: int = 0
  # Tokens of the prompt that are left to read.
  left: int = 0
  # Seconds of reading what is left, alone, as it counts in a queue.
  alone_s: float = 0.0
  # Tokens that each side holds for it.
  held: int = 0
  reserved: int = 0
  end_step: int = 0
  # Parts of its cache that are on their way or to be sent while it is read.
  streamed: bool = False
  parts: int = 0
  come: Callable[[], None] | None = None

  @property
  def need(self) -> int:
    return self.asked.prompt_tokens + self.asked.new_tokens


class _PrefixBlocks:
  """The blocks of prompts that an instance remembers, least recent first."""

  def __init__(self, tokens: int, blocks: Mapping[int, int]):
    self._left = tokens - sum(blocks.values())
    self._blocks = collections.OrderedDict(blocks)
    self._shrink()

  def match(self, blocks: Sequence[int], block: int) -> int:
    """Tokens of the longest prefix that is here."""
    found = 0
    for one in blocks:
      if one not in self._blocks:
        break
      found += block
    return found

  def keep(self, blocks: Sequence[int], block: int) -> None:
    """Takes the whole blocks of a prompt, its end first."""
    for one in reversed(blocks):
      if one in self._blocks:
        self._blocks.move_to_end(one)
      else:
        self._blocks[one] = block
        self._left -= block
    self._shrink()

  def _shrink(self) -> None:
    while self._left < 0:
      self._left += self._blocks.popitem(last=False)[1]


class _Running:
  """An instance while time passes."""

  def __init__(self, spec: SimulatedInstance, cluster: _Run):
    self.spec, self.cluster = spec, cluster
    self.name, self.role = spec.name, spec.role
    self.counters = InstanceCounters()
    self.prefixes = _PrefixBlocks(
      int(spec.prefix_cache_tokens), spec.prefix_blocks
    )
    # Prompts: those that wait, those that are fetched or read.
    self.queue: collections.deque[_RoutedWork] = collections.deque()
    self.queued = self.queued_tokens = 0
    self.queued_s = 0.0
    self.stage_free = [0.0] * spec.stages
    self.used = 0
    # Answers: a heap of (step after which it ends, number, work).
    self.rows: list[tuple[int, int, _RoutedWork]] = []
    self.joining: collections.deque[_RoutedWork] = collections.deque()
    self.joining_tokens = 0
    self.step = 0
    self.cached = 0
    # The steps under way: since when, how many, how long the first one takes,
    # by how much the next ones grow.
    self.since, self.steps, self.first_s, self.more_s = 0.0, 0, 0.0, 0.0
    self.decoding = False
    self.round = 0
    self.woken = False
    # The last step with answers, or with pieces of prompts.
    self.step_start_s = self.step_end_s = -math.inf

  @property
  def longest(self) -> int:
    """Tokens of a prompt and its answer that it can make."""
    return self.spec.capacity_tokens

  # What routers see.

  def view(self) -> InstanceView:
    now = self.cluster.now
    rows = len(self.rows)
    cached = self.cached
    if self.decoding:
      cached += rows * min(self.steps, self._steps_until(now, up=False))
    return InstanceView(
      name=self.name,
      role=self.role,
      queued_requests=self.queued,
      queued_tokens=self.queued_tokens,
      queued_s=self.queued_s + max(0.0, self.stage_free[0] - now),
      running_requests=rows + len(self.joining),
      running_tokens=cached + self.joining_tokens,
      free_tokens=self.spec.capacity_tokens - self.used,
      capacity_tokens=self.spec.capacity_tokens,
      max_rows=self.spec.max_rows,
      sending_tokens=self.cluster.sending_tokens(self.name),
    )

  def take(self, tokens: int) -> None:
    self.used += tokens
    self.counters.peak_tokens = max(self.counters.peak_tokens, self.used)

  def free(self, tokens: int) -> None:
    self.used -= tokens

  # Steps of answers.

  def _steps_until(self, time: float, up: bool) -> int:
    """How many of the steps under way end by a time, or the next one after."""
    spent = time - self.since
    a, b = self.more_s / 2, self.first_s - self.more_s / 2
    # n first + more n (n - 1) / 2 = spent
    n = spent / b if a <= 0 else (math.sqrt(b * b + 4 * a * spent) - b) / 2 / a
    found = max(0, math.floor(n))
    # Floating point is not trusted beside a whole number.
    while self._after(found + 1) <= time:
      found += 1
    while found and self._after(found) > time:
      found -= 1
    if up and self._after(found) < time:
      found += 1
    return found

  def _after(self, steps: int) -> float:
    """When so many of the steps under way have ended."""
    growth = self.more_s * (steps * (steps - 1) / 2)
    return self.since + self.first_s * steps + growth

  def _decode(self, now: float) -> None:
    """Begins as many steps as nothing is known to interrupt."""
    rows, stages = len(self.rows), self.spec.stages
    group = -(-rows // stages)
    first = self._step_s(group, self.cached / stages)
    self.more_s = self._step_s(group, (self.cached + rows) / stages) - first
    self.first_s, self.since = first, now
    self.steps = self.rows[0][0] - self.step
    self.decoding = True
    self._post_round(self._after(self.steps))

  def _step_s(self, rows: int, cached: float) -> float:
    """Seconds of a token for a group of rows, through all stages."""
    spec = self.spec
    seconds = (
      spec.times.decode_s(rows, cached) + spec.step_stage_s * spec.stages
    )
    # The tokens that the rows make now enter no cache before they are made.
    return seconds + spec.entry_s + spec.entry_token_s * (cached - rows)

  def _post_round(self, time: float) -> None:
    self.round += 1
    self.cluster.at(time, functools.partial(self._stepped, self.round))

  def interrupt(self) -> None:
    """Lets the steps under way end with the one that runs now."""
    if self.decoding:
      steps = max(1, self._steps_until(self.cluster.now, up=True))
      if steps < self.steps:
        self.steps = steps
        self._post_round(self._after(steps))

  def _stepped(self, number: int) -> None:
    if number != self.round:
      return
    now, rows = self.cluster.now, len(self.rows)
    self.decoding = False
    self.step_start_s, self.step_end_s = self._after(self.steps - 1), now
    self.counters.decode_busy_s += now - self.since
    self._advance(self.steps)
    self.cluster.record(
      f"decode {rows} x {self.steps}", "decode", self.name, self.since, now
    )
    self.wake()

  def _advance(self, steps: int) -> None:
    """Counts steps and lets go of the answers that have ended."""
    rows = len(self.rows)
    self.step += steps
    self.cached += rows * steps
    self.counters.decode_steps += steps
    self.counters.decode_tokens += rows * steps
    while self.rows and self.rows[0][0] <= self.step:
      work = heapq.heappop(self.rows)[2]
      self.cached -= work.need
      self.free(work.reserved)
      work.served.last_token_s = self.cluster.now
      self.cluster.freed()

  def answer(self, work: _RoutedWork) -> None:
    """Takes an answer whose cache is here."""
    if work.asked.new_tokens == 1:
      work.served.last_token_s = max(
        work.served.first_token_s, self.cluster.now
      )
      self.cluster.reserve(-work.reserved)
      self.free(work.reserved)
      self.cluster.freed()
      return
    self.joining.append(work)
    self.joining_tokens += work.asked.prompt_tokens
    self.interrupt()
    self.wake()

  def _join(self) -> None:
    most = self.spec.max_decode_tokens
    while self.joining and len(self.rows) < self.spec.max_rows:
      work = self.joining[0]
      cached = work.asked.prompt_tokens + 1
      if most is not None and self.rows and self.cached + cached > most:
        break
      self.joining.popleft()
      self.joining_tokens -= work.asked.prompt_tokens
      self.cluster.reserve(-work.reserved)
      # The first token came with the prompt.
      work.end_step = self.step + work.asked.new_tokens - 1
      self.cached += cached
      heapq.heappush(self.rows, (work.end_step, work.asked.number, work))
    self.counters.peak_rows = max(self.counters.peak_rows, len(self.rows))

  # Prompts.

  def enqueue(self, work: _RoutedWork) -> None:
    """Takes a prompt whose prefix is here."""
    work.ready_s = self.cluster.now
    self.queue.append(work)
    self.interrupt()
    self.wake()

  def wake(self) -> None:
    """Looks for something to do, after all that happens at this time."""
    if not self.woken:
      self.woken = True
      self.cluster.at(self.cluster.now, self._begin)

  def _begin(self) -> None:
    self.woken = False
    now = self.cluster.now
    if not self.decoding and self.stage_free[0] <= now:
      self._join()
      if self.role == "both":
        mixed = self.spec.share != "first"
      else:
        # Both at once only after a change of its role.
        mixed = bool(self.rows)
      drained = self.stage_free[-1] <= now
      if self.queue and (drained or not mixed):
        batch = self._batch(mixed)
        if batch:
          (self._mix if mixed else self._read)(batch)
      if self.stage_free[0] <= now and self.rows:
        # A pipeline that still reads is drained first.
        if self.stage_free[-1] > now:
          self.cluster.at(self.stage_free[-1], self.wake)
        else:
          self._decode(now)
          if self.queue and self.spec.share == "ahead":
            # It may be planned for the step behind this one.
            self.interrupt()
    self.cluster.load(self)

  def _admit(self, work: _RoutedWork) -> bool:
    """Whether a prompt has room; takes it."""
    if work.held:
      return True
    if self.cluster.push and work.decode is None:
      target = self.cluster.choose(work)
      if target is None:
        self.cluster.wait_for_room(self)
        return False
    own = work.decode is self
    need = work.need if own else work.asked.prompt_tokens
    if self.used + need > self.spec.capacity_tokens:
      return False
    if self.cluster.push and not own and work.decode is not None:
      other = work.decode
      if other.used + work.need > other.spec.capacity_tokens:
        self.cluster.wait_for_room(self)
        return False
      other.take(work.need)
      work.reserved = work.need
      self.cluster.reserve(work.need)
    self.take(need)
    work.held = need
    return True

  def wait_for(self, work: _RoutedWork, have: int) -> None:
    """Counts the seconds of a prompt of which some tokens are there."""
    alone = QueuedPrompts.of(work.asked.prompt_tokens, have)
    work.alone_s = reading_s(self.spec.times, [alone])
    self.queued_s += work.alone_s

  def _drop(self, work: _RoutedWork) -> None:
    """Forgets a prompt that was rejected while it waited."""
    self.queue.remove(work)
    self.queued -= 1
    self.queued_tokens -= work.asked.prompt_tokens
    self.queued_s -= work.alone_s

  def _start(self, work: _RoutedWork) -> None:
    """Looks what of a prompt is here already."""
    now = self.cluster.now
    if math.isnan(work.served.prefill_start_s):
      work.served.prefill_start_s = now
      found = max(work.fetched, self.prefixes.match(work.blocks, work.block))
      # The last token is always computed: its output is needed.
      work.cached = min(found, work.asked.prompt_tokens - 1)
      work.left = work.asked.prompt_tokens - work.cached
      work.served.cached_tokens = work.cached
      self.counters.cached_tokens += work.cached

  def _batch(self, mixed: bool) -> list[tuple[_RoutedWork, int]]:
    """The prompts that are read next, and how many tokens of each."""
    room = self.spec.max_prefill_tokens
    rows = self.spec.max_prefill_rows
    if mixed:
      room -= len(self.rows)
    last_s = self._planned_s()
    found: list[tuple[_RoutedWork, int]] = []
    for work in tuple(itertools.islice(self.queue, rows + 1)):
      if len(found) >= rows or room <= 0 or work.ready_s > last_s:
        break
      answers = len(self.rows) + len(self.joining) + len(found)
      if work.decode is self and answers >= self.spec.max_rows:
        break
      if not work.held:
        left = work.asked.prompt_tokens - self.prefixes.match(
          work.blocks, work.block
        )
        if found and not mixed and left > room:
          break
        if not self._admit(work):
          if work.served.rejected:
            self._drop(work)
            continue
          break
      self._start(work)
      count = min(work.left, room) if mixed else work.left
      found.append((work, count))
      room -= count
    return found

  def _planned_s(self) -> float:
    """Until when prompts had to come for the step that begins now."""
    if self.spec.share != "ahead" or self.step_end_s < self.cluster.now:
      return math.inf
    # Without anything to do, what has come meanwhile is planned now.
    if not self.rows and self.queue[0].ready_s > self.step_start_s:
      return math.inf
    return self.step_start_s

  def _pieces(
    self, batch: Sequence[tuple[_RoutedWork, int]]
  ) -> list[tuple[int, int]]:
    return [
      (count, work.asked.prompt_tokens - work.left) for work, count in batch
    ]

  def _read(self, batch: list[tuple[_RoutedWork, int]]) -> None:
    """Reads whole prompts, through all stages."""
    now, stages = self.cluster.now, self.spec.stages
    seconds = self.spec.times.prefill_s(self._pieces(batch)) / stages
    seconds += self.spec.stage_s
    entry = self._entry_s(batch)
    self._count_batch(batch, seconds + entry)
    time, ends = now + entry, []
    for n in range(stages):
      time = max(time, self.stage_free[n]) + seconds
      self.stage_free[n] = time
      ends.append(time)
    self.cluster.stream(batch, seconds, ends)
    self.cluster.at(self.stage_free[0], functools.partial(self._passed, batch))
    self.cluster.at(time, functools.partial(self._was_read, batch))
    self.cluster.record(
      f"prefill {len(batch)}", "prefill", self.name, now, self.stage_free[0]
    )

  def _entry_s(self, batch: Sequence[tuple[_RoutedWork, int]]) -> float:
    tokens = sum(count for _, count in batch)
    return self.spec.entry_s + self.spec.entry_token_s * tokens

  def _count_batch(
    self, batch: Sequence[tuple[_RoutedWork, int]], seconds: float
  ) -> None:
    self.counters.prefill_calls += 1
    self.counters.prefill_busy_s += seconds
    for work, count in batch:
      work.left -= count
      self.counters.prefill_tokens += count
      self.queued_s -= work.alone_s
      if work.left:
        self.wait_for(work, work.asked.prompt_tokens - work.left)
      else:
        # Prompts are read in the order of the queue.
        self.queue.popleft()

  def _passed(self, batch: Iterable[tuple[_RoutedWork, int]]) -> None:
    """Counts tokens that others do not wait for any more."""
    for work, count in batch:
      self.queued_tokens -= count + (0 if work.left else work.cached)
    self.wake()

  def _was_read(self, batch: Iterable[tuple[_RoutedWork, int]]) -> None:
    for work, _ in batch:
      if not work.left:
        self._read_whole(work)
    self.wake()

  def _read_whole(self, work: _RoutedWork) -> None:
    self.queued -= 1
    work.served.first_token_s = self.cluster.now
    if work.blocks:
      self.prefixes.keep(work.blocks, work.block)
    if work.decode is self:
      work.reserved = work.held
      self.cluster.reserve(work.reserved)
      self.answer(work)
    else:
      self.cluster.read(work)

  def _mix(self, batch: list[tuple[_RoutedWork, int]]) -> None:
    """One step of pieces of prompts beside all answers."""
    now, rows = self.cluster.now, len(self.rows)
    times, stages = self.spec.times, self.spec.stages
    seconds = times.prefill_s(self._pieces(batch)) + self.spec.stage_s * stages
    seconds += self._entry_s(batch)
    if rows:
      seconds += times.decode_s(rows, self.cached)
      if self.spec.share == "mixed":
        # The weights are read once, for both.
        seconds -= times.decode_s(0, 0)
    self.step_start_s, self.step_end_s = now, now + seconds
    self._count_batch(batch, seconds)
    self.stage_free = [now + seconds] * stages

    def done() -> None:
      if rows:
        self._advance(1)
      self._passed(batch)
      self._was_read(batch)

    self.cluster.at(now + seconds, done)
    self.cluster.record(
      f"mixed {len(batch)} + {rows}", "mixed", self.name, now, now + seconds
    )


@dataclasses.dataclass(eq=False, slots=True)
class _TurningRow:
  """An answer that waits for its turn, and how many steps it had."""

  work: _RoutedWork
  steps: int = 0

  @property
  def tokens(self) -> int:
    """Tokens that its next step looks at."""
    return self.work.asked.prompt_tokens + self.steps + 1


@dataclasses.dataclass(eq=False, slots=True)
class _TurningStage:
  """A stage of a pipeline and what waits in front of it."""

  # Batches of prompts with their seconds in a stage, and rows.
  prompts: collections.deque[tuple[list[tuple[_RoutedWork, int]], float]] = (
    dataclasses.field(default_factory=collections.deque)
  )
  rows: collections.deque[_TurningRow] = dataclasses.field(
    default_factory=collections.deque
  )
  busy: bool = False


class _TakingTurns(_Running):
  """An instance whose rows go to the end of a queue behind each step.

  Ref: the simulator of DistServe (github.com/LLMServe/DistServe): a stage reads
  what waits, else it takes rows from the front of its queue as long as their
  tokens fit; they go on to the next stage's queue, from the last to the first.
  """

  def __init__(self, spec: SimulatedInstance, cluster: _Run):
    super().__init__(spec, cluster)
    self.pipeline = [_TurningStage() for _ in range(spec.stages)]

  @property
  def longest(self) -> int:
    """As `_Running`; a row that no step takes would wait for ever."""
    most = self.spec.max_decode_tokens
    # The last token is in no step.
    return min(super().longest, super().longest if most is None else most + 1)

  def answer(self, work: _RoutedWork) -> None:
    """Takes an answer whose cache is here."""
    if work.asked.new_tokens == 1:
      super().answer(work)
      return
    self.cluster.reserve(-work.reserved)
    self.pipeline[0].rows.append(_TurningRow(work))
    self.rows.append((0, work.asked.number, work))
    self.cached += work.asked.prompt_tokens + 1
    self.counters.peak_rows = max(self.counters.peak_rows, len(self.rows))
    self.wake()

  def _begin(self) -> None:
    self.woken = False
    for index, stage in enumerate(self.pipeline):
      if stage.busy:
        continue
      prompts: list[tuple[_RoutedWork, int]] = []
      seconds = 0.0
      if stage.prompts:
        prompts, seconds = stage.prompts.popleft()
      elif index == 0 and self.queue:
        prompts = self._batch(False)
        seconds = self.spec.times.prefill_s(self._pieces(prompts))
        seconds = seconds / self.spec.stages + self.spec.stage_s
      if prompts:
        self._read_in(index, prompts, seconds)
      elif stage.rows and (rows := self._turn(stage)):
        self._decode_in(index, rows)
    self.cluster.load(self)

  def _turn(self, stage: _TurningStage) -> list[_TurningRow]:
    """Rows from the front of a queue, as many as a step takes."""
    most, rows, tokens = self.spec.max_decode_tokens, [], 0
    while stage.rows and len(rows) < self.spec.max_rows:
      tokens += stage.rows[0].tokens
      if most is not None and tokens > most:
        break
      rows.append(stage.rows.popleft())
    return rows

  def _read_in(
    self,
    index: int,
    batch: list[tuple[_RoutedWork, int]],
    seconds: float,
  ) -> None:
    """Reads prompts in a stage."""
    spent = seconds
    if not index:
      spent += self._entry_s(batch)
      self._count_batch(batch, spent)

    def done() -> None:
      if not index:
        self._passed(batch)
      if index + 1 < len(self.pipeline):
        self.pipeline[index + 1].prompts.append((batch, seconds))
      else:
        self._was_read(batch)

    self._occupy(index, spent, f"prefill {len(batch)}", "prefill", done)

  def _decode_in(self, index: int, rows: list[_TurningRow]) -> None:
    """A stage's part of a step."""
    spec, count = self.spec, len(rows)
    tokens = sum(row.tokens for row in rows)
    spent = spec.times.decode_s(count, tokens) / spec.stages
    spent += spec.step_stage_s
    if not index:
      spent += spec.entry_s + spec.entry_token_s * (tokens - count)
      self.counters.decode_busy_s += spent

    def done() -> None:
      last = index + 1 == len(self.pipeline)
      following = self.pipeline[0 if last else index + 1].rows
      if last:
        self._count_step(rows)
      following.extend(
        row for row in rows if row.steps + 1 < row.work.asked.new_tokens
      )

    self._occupy(index, spent, f"decode {count} x 1", "decode", done)

  def _count_step(self, rows: Sequence[_TurningRow]) -> None:
    """Counts a token of each row and lets go of those that have all."""
    self.counters.decode_steps += 1
    self.counters.decode_tokens += len(rows)
    self.cached += len(rows)
    for row in rows:
      work = row.work
      row.steps += 1
      if row.steps + 1 == work.asked.new_tokens:
        self.rows.remove((0, work.asked.number, work))
        self.cached -= work.need
        self.free(work.reserved)
        work.served.last_token_s = self.cluster.now
        self.cluster.freed()

  def _occupy(
    self,
    index: int,
    seconds: float,
    name: str,
    kind: str,
    done: Callable[[], None],
  ) -> None:
    """Lets a stage do something for a while."""
    stage, now = self.pipeline[index], self.cluster.now
    stage.busy, self.stage_free[index] = True, now + seconds

    def ended() -> None:
      stage.busy = False
      done()
      self.wake()

    self.cluster.at(now + seconds, ended)
    if not index:
      self.cluster.record(name, kind, self.name, now, now + seconds)


class _Run:
  """One run of a cluster: its clock, what waits between instances."""

  def __init__(self, spec: ClusterSimulator, trace: Sequence[TraceRequest]):
    self.spec, self.policy = spec, spec.policy
    self.push = spec.transfer == "push"
    self.events = Simulator()
    self.at = self.events.at
    self.all = {
      one.name: (_TakingTurns if one.decode == "turns" else _Running)(one, self)
      for one in spec.instances
    }
    self.in_order = [self.all[name] for name in sorted(self.all)]
    self.spans: list[Span] = []
    self.loads: dict[str, list[LoadPoint]] = {name: [] for name in self.all}
    # Prompts that were read and that no instance had room for.
    self.finished: collections.deque[_RoutedWork] = collections.deque()
    self.waiting: list[_Running] = []
    self.retrying = False
    self.channels: dict[tuple[str, str], Channel] = {}
    # When each link has sent what it was given.
    self.link_free: dict[str, float] = {}
    self.reserved, self.reserved_at = 0, 0.0
    self.result = ClusterResult(served=[])
    self.trace = trace
    # Requests of the window under way, and those that roles are planned for.
    self.came: list[TraceRequest] = []
    # Prefixes on their way for later requests: (target, last block).
    self.copying: set[tuple[Any, ...]] = set()
    self.planned: TrafficSummary | None = None

  @property
  def now(self) -> float:
    return float(self.events.now_s)

  def run(self) -> ClusterResult:
    result = self.result
    for one in self.trace:
      served = ServedRequest(
        number=one.number,
        arrival_s=float(one.arrival),
        prompt_tokens=one.prompt_tokens,
        new_tokens=one.new_tokens,
      )
      result.served.append(served)
    self._next = 0
    if self.trace:
      self.at(self.trace[0].arrival, self._arrive)
      if self.spec.roles is not None:
        end = self.trace[0].arrival + float(self.spec.roles.window_s)
        self.at(end, self._plan_roles)
    timeline = self.events.run()
    lost = [s for s in result.served if s.last_token_s != s.last_token_s]
    lost = [one for one in lost if not one.rejected]
    if lost:
      raise OptionError(
        "policy",
        f"{len(lost)} requests never placed, first number {lost[0].number}",
        "a route for each request, or a rejection",
        "make instances larger, or let the policy reject",
      )
    result.seconds = max(
      (s.last_token_s for s in result.served if not s.rejected), default=0.0
    )
    if self.spec.timeline:
      sent = (s for s in timeline.spans if s.nbytes)
      spans = sorted(
        (*self.spans, *sent), key=lambda s: (s.start_s, s.where, s.name)
      )
      result.timeline = Timeline(tuple(spans))
      result.loads = self.loads
    result.moved_bytes = timeline.sent_bytes()
    result.counters = {one.name: one.counters for one in self.in_order}
    return result

  # Arrivals and routes.

  def _arrive(self) -> None:
    """Routes all requests of this time, and comes back for the next ones."""
    trace, now = self.trace, self.now
    while self._next < len(trace) and trace[self._next].arrival <= now:
      n, self._next = self._next, self._next + 1
      self._route(trace[n], self.result.served[n])
    if self._next < len(trace):
      self.at(trace[self._next].arrival, self._arrive)

  def views(self) -> list[InstanceView]:
    """What the policy sees, in the order of names."""
    return [one.view() for one in self.in_order]

  def _plan_roles(self) -> None:
    """Asks the planner at the end of a window."""
    planner = self.spec.roles
    assert planner is not None
    found = planner.decide(self.came, self.views(), self.planned)
    self.came, self.planned = [], found.planned
    check_roles({one.name: one.role for one in self.in_order}, found.roles)
    for name, role in sorted(found.roles.items()):
      one = self.all[name]
      if one.role != role:
        one.role = role
        self.result.role_changes.append(
          RoleChange(time_s=self.now, name=name, role=role, why=found.why)
        )
    # Answers may have room elsewhere now.
    self.freed()
    if self._next < len(self.trace):
      self.at(self.now + float(planner.window_s), self._plan_roles)

  def _route(self, one: TraceRequest, served: ServedRequest) -> None:
    # An id names a whole prefix; the last block may be a part of one.
    whole = one.blocks[: one.prompt_tokens // one.block]
    if self.spec.roles is not None:
      had = (
        (x.name, x.prefixes.match(whole, one.block)) for x in self.in_order
      )
      self.came.append(
        dataclasses.replace(one, cached=tuple(x for x in had if x[1]))
      )

    def cached(name: str) -> int:
      found = self._instance(name).prefixes.match(whole, one.block)
      return min(found, one.prompt_tokens - 1)

    asked = RoutedRequest(
      number=one.number,
      arrival_s=float(one.arrival),
      prompt_tokens=one.prompt_tokens,
      new_tokens=one.new_tokens,
      cached_tokens=cached,
    )
    work = _RoutedWork(served, asked, whole, one.block)
    route = self.policy.route(asked, self.views(), self.now)
    if isinstance(route, Rejected):
      served.rejected = route.reason or "rejected"
      return
    target = self._instance(route.prefill)
    if target.role == "decode":
      raise _misrouted(target.name, "reads prompts")
    work.prefill, served.prefill = target, target.name
    if route.decode is not None:
      self._set_decode(work, route.decode)
      work.bound = True
    why = self._too_long(work)
    if why:
      served.rejected = why
      return
    here = cached(target.name)
    work.left = one.prompt_tokens
    have = max(here, route.fetch_tokens if route.fetch_from else 0)
    target.queued += 1
    target.queued_tokens += one.prompt_tokens
    target.wait_for(work, have)
    if route.fetch_from is not None and route.fetch_tokens > here:
      self._fetch(work, route, here)
    else:
      target.enqueue(work)
    if route.copy is not None:
      self._copy(work, route.copy, cached(route.copy.target))

  def _fetch(self, work: _RoutedWork, route: Route, here: int) -> None:
    target = work.prefill
    assert target is not None
    source = self._instance(str(route.fetch_from))
    began = self.now

    def come() -> None:
      work.fetched = route.fetch_tokens
      work.served.moved_s += self.now - began
      target.enqueue(work)

    self.send("fetch", work, source, target, route.fetch_tokens - here, come)

  def _copy(self, work: _RoutedWork, copy: PrefixCopy, here: int) -> None:
    """Moves a prefix for later requests, if it is not on its way already."""
    count = copy.tokens // max(1, work.block)
    blocks = work.blocks[:count]
    key = (copy.target, *blocks[-1:])
    if not blocks or key in self.copying:
      return
    source, target = (self._instance(n) for n in (copy.source, copy.target))
    self.copying.add(key)

    def come() -> None:
      self.copying.discard(key)
      target.prefixes.keep(blocks, work.block)

    moved = max(0, copy.tokens - here)
    self.send("copy", work, source, target, moved, come)

  def _set_decode(self, work: _RoutedWork, name: str) -> None:
    found = self._instance(name)
    if found.role == "prefill":
      raise _misrouted(name, "answers")
    work.decode, work.served.decode = found, name

  def _too_long(self, work: _RoutedWork) -> str:
    """Why a request fits nowhere, or nothing."""
    one, prefill = work.asked, work.prefill
    assert prefill is not None
    if one.prompt_tokens > prefill.spec.capacity_tokens:
      return f"{one.prompt_tokens} tokens, more than {prefill.name} holds"
    able = [work.decode] if work.decode is not None else [
      other for other in self.in_order if other.role != "prefill"
    ]  # fmt: skip
    most = max((x.longest for x in able), default=0)
    if work.need > most:
      return f"{work.need} tokens, more than the {most} of an instance"
    return ""

  def _instance(self, name: str) -> _Running:
    found = self.all.get(name)
    if found is None:
      raise OptionError(
        "policy",
        f"an instance {name!r}",
        f"one of {', '.join(sorted(self.all))}",
        "return the name of a view",
      )
    return found

  # From prompts to answers.

  def choose(self, work: _RoutedWork) -> _Running | None:
    """Asks the policy who answers."""
    found = self.policy.decode_instance(work.asked, self.views(), self.now)
    if isinstance(found, Rejected):
      work.served.rejected = found.reason or "rejected"
      return None
    if found is not None:
      self._set_decode(work, found)
    return work.decode

  def stream(
    self,
    batch: Sequence[tuple[_RoutedWork, int]],
    seconds: float,
    ends: Sequence[float],
  ) -> None:
    """Lets the caches of prompts leave while they are read.

    Args:
      batch: of a call that reads them whole.
      seconds: of each of its stages.
      ends: of these.
    """
    parts = self.spec.stream
    for work, _ in batch:
      source, target = work.prefill, work.decode
      if not parts or source is None or target in (None, source):
        continue
      assert target is not None
      work.streamed, work.parts = True, parts

      def come(work: _RoutedWork = work) -> None:
        work.parts -= 1
        if not work.parts and work.come is not None:
          work.come()

      tokens = work.asked.prompt_tokens / parts
      send = functools.partial(
        self.send, "stream", work, source, target, tokens, come
      )
      for n in range(1, parts + 1):
        stage = math.ceil(n * len(ends) / parts) - 1
        left = stage + 1 - n * len(ends) / parts
        self.at(ends[stage] - left * seconds, send)

  def read(self, work: _RoutedWork) -> None:
    """Takes a prompt that has been read and is answered elsewhere."""
    if work.reserved:
      self._move(work)
      return
    self.finished.append(work)
    self._hand_on()

  def _hand_on(self) -> None:
    """Gives finished prompts to those who have room, in their order.

    Room is reserved when the link is free to pull, and not before: prompts
    that wait for another link let others pass, those that wait for room do not.
    """
    passed: list[_RoutedWork] = []
    while self.finished:
      work = self.finished[0]
      target, prefill = work.decode, work.prefill
      assert prefill is not None
      if target is None:
        target = self.choose(work)
      if work.served.rejected:
        self.finished.popleft()
        self._release(work)
        continue
      if target is None:
        break
      if target is not prefill and self._busy(prefill.name, target.name):
        passed.append(self.finished.popleft())
        if not work.bound:
          # The policy is asked again when the link is free.
          work.decode = None
        continue
      # One that read the prompt itself has it already.
      need = work.need - (work.held if target is prefill else 0)
      if target.used + need > target.spec.capacity_tokens:
        break
      self.finished.popleft()
      target.take(need)
      work.reserved = work.need
      self.reserve(work.need)
      if target is prefill:
        work.held = 0
        target.answer(work)
      else:
        self._move(work)
    self.finished.extendleft(reversed(passed))

  def _move(self, work: _RoutedWork) -> None:
    """Brings the cache of a prompt to who answers."""
    source, target, began = work.prefill, work.decode, self.now
    assert source is not None
    assert target is not None

    def come() -> None:
      work.served.moved_s += self.now - began
      self._release(work)
      target.answer(work)

    if work.parts:
      work.come = come
    elif work.streamed:
      come()
    else:
      self.send("move", work, source, target, work.asked.prompt_tokens, come)

  def _release(self, work: _RoutedWork) -> None:
    """Frees what the reader held."""
    assert work.prefill is not None
    work.prefill.free(work.held)
    work.held = 0
    work.prefill.wake()
    self.freed()

  def freed(self) -> None:
    """Tells those who wait for room, once for all that happens now."""
    if (self.finished or self.waiting) and not self.retrying:
      self.retrying = True
      self.at(self.now, self._retry)

  def _retry(self) -> None:
    self.retrying = False
    self._hand_on()
    waiting, self.waiting = self.waiting, []
    for one in waiting:
      one.wake()

  def wait_for_room(self, one: _Running) -> None:
    """Remembers an instance whose next prompt waits for another's room."""
    if one not in self.waiting:
      self.waiting.append(one)

  def reserve(self, tokens: int) -> None:
    """Counts tokens that are reserved for answers that have yet to begin."""
    now = self.now
    self.result.reserved_token_s += self.reserved * (now - self.reserved_at)
    self.reserved += tokens
    self.reserved_at = now
    self.result.reserved_peak_tokens = max(
      self.result.reserved_peak_tokens, self.reserved
    )

  # Links.

  def send(
    self,
    kind: str,
    work: _RoutedWork,
    source: _Running,
    target: _Running,
    tokens: int | float,
    come: Callable[[], None],
  ) -> None:
    """Moves the cache of some tokens and calls `come` when it is there."""
    channel = self._channel(source.name, target.name)
    if channel is None:
      come()
      return
    nbytes = tokens * self.spec.kv_token_bytes
    begin = max(self.now, self.link_free.get(channel.name, 0.0))
    free = begin + nbytes / channel.link.bandwidth
    self.link_free[channel.name] = free
    self.at(free, self.freed)
    self.events.send(
      f"{kind} {work.asked.number}",
      channel,
      nbytes,
      kind=kind,
      release_s=self.now,
      then=lambda span: come(),
    )

  def sending_tokens(self, name: str) -> int:
    """Tokens that an instance's way out has yet to carry."""
    links, width = self.spec.links, self.spec.kv_token_bytes
    if not isinstance(links, Link) or not width:
      return 0
    left = self.link_free.get(f"{name} out", 0.0) - self.now
    return max(0, round(left * links.bandwidth / width))

  def _busy(self, source: str, target: str) -> bool:
    """Whether a link carries something."""
    channel = self._channel(source, target)
    if channel is None:
      return False
    return self.link_free.get(channel.name, 0.0) > self.now

  def _channel(self, source: str, target: str) -> Channel | None:
    links = self.spec.links
    if links is None:
      return None
    if isinstance(links, Link):
      key, link, name = (source, ""), links, f"{source} out"
    else:
      key, name = (source, target), f"{source} to {target}"
      link = links.get(key)
      if link is None:
        raise OptionError(
          "links",
          f"none from {source} to {target}",
          "a link for every pair that the policy uses",
          "add it, or pass one Link for all",
        )
    if key not in self.channels:
      self.channels[key] = self.events.link(
        name, link.bandwidth, link.latency_s
      )
    return self.channels[key]

  # Records.

  def record(
    self, name: str, kind: str, where: str, start: float, end: float
  ) -> None:
    """Notes a call for the timeline."""
    if self.spec.timeline:
      self.spans.append(Span(name, kind, where, start, start, end, end))

  def load(self, one: _Running) -> None:
    """Notes the load of an instance."""
    if self.spec.timeline:
      self.loads[one.name].append(
        LoadPoint(
          time_s=self.now,
          queued_requests=one.queued,
          running_requests=len(one.rows) + len(one.joining),
          used_tokens=one.used,
        )
      )


def _misrouted(name: str, does: str) -> OptionError:
  return OptionError(
    "policy", f"{name} for it", f"an instance that {does}", "look at its role"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSimulator:
  """Instances, the links between them and the policy that routes requests.

  Attributes:
    instances: at least one; names are unique.
    policy: asked at each arrival, and when a prompt has been read.
    links: one link for the way out of each instance, which its messages share;
      or one for each (source, target); None moves caches in no time.
    kv_token_bytes: of a token's keys and values in all layers.
    transfer: of `TRANSFERS`.
    stream: into how many parts the cache of a prompt is cut that leave while it
      is read, with "push": the model's layers, or the pieces of a prompt; 0: it
      leaves when the prompt has been read. Each costs an event.
    timeline: whether the result has spans and loads.
    roles: changes what instances do, at the end of each of its windows; None
      leaves them as they are.
  """

  instances: Sequence[SimulatedInstance]
  policy: RoutingPolicy
  links: Link | Mapping[tuple[str, str], Link] | None = None
  kv_token_bytes: int | float = 0
  transfer: str = "pull"
  stream: int = 0
  timeline: bool = False
  roles: RolePlanner | None = None

  def __post_init__(self) -> None:
    one_of("transfer", self.transfer, TRANSFERS)
    number("kv_token_bytes", self.kv_token_bytes, least=0)
    if integer("stream", self.stream, least=0) and self.transfer != "push":
      raise OptionError(
        "transfer",
        f"{self.transfer!r} with stream={self.stream}",
        "'push': the room has to be there when reading begins",
        "pass transfer='push', or stream=0",
      )
    turning = [one.name for one in self.instances if one.decode == "turns"]
    if self.stream and turning:
      raise OptionError(
        "stream",
        f"{self.stream} with decode='turns' of {turning[0]}",
        "0: when a stage reads is not known before it does",
        "pass stream=0, or decode='kept'",
      )
    names = [one.name for one in self.instances]
    if not names or len(set(names)) != len(names):
      raise OptionError(
        "instances",
        ", ".join(names) or "none",
        "one or more with unique names",
        "name them prefill0, prefill1, decode0",
      )

  def run(self, trace: Sequence[TraceRequest]) -> ClusterResult:
    """Lets the cluster serve a trace.

    Args:
      trace: in the order of arrivals.

    Raises:
      OptionError: the policy names an instance that is none, or leaves
        requests without an instance for ever; or the planner gives roles with
        which nobody reads, or answers.
    """
    return _Run(self, trace).run()

"""Discrete-event simulator of a serving cluster: queues, batches, links, clock.

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
  both      prompts before answers ("first"); chunks of prompts in the same call
            as a decode step ("mixed"); or these in two calls that are planned
            while the step before is computed, as an `Engine` does ("ahead")
  pull      a finished prompt stays where it was prefilled until a decode
            instance has room and the link is free, which then pulls it
  push      the room is reserved when prefill begins
  stream    with push, a prompt's cache is sent in equal parts during prefill,
            layer by layer or chunk by chunk: a part when its share of the
            prefill is done

A `RolePlanner` may change the instances' roles at the end of each window: a
role decides what is sent to an instance, and work already begun is finished. As
long as an instance with a single role has both prompts and answers it works as
with "mixed", so that answers wait for no more than the current call.

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
from ringjax.serve.cluster.times.phase_times import (
  PhaseTimes,
  QueuedPrompts,
  reading_s,
)
from ringjax.serve.cluster.times.request_times import ServedRequest
from ringjax.serve.traces import TraceRequest

SHARES = ("first", "mixed", "ahead")
DECODES = ("kept", "turns")
TRANSFERS = ("pull", "push")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedInstance:
  """Description of one engine of a simulated cluster.

  Attributes:
    name: Name, unique in the cluster.
    role: Kind of work that is sent to it, one of `ROLES`.
    times: Durations of its calls in seconds, without pipeline overheads.
    capacity_tokens: Cache capacity in tokens.
    max_rows: Maximum number of answers that decode at once.
    max_prefill_tokens: Maximum prompt tokens of a batch, L_m; with "mixed" and
      "ahead", of a step, including one token per answer.
    max_prefill_rows: Maximum number of prompts of a batch.
    max_decode_tokens: Maximum cached tokens of a step's rows; with "kept"
      checked when a row joins; None for no other limit than the capacity.
    decode: One of `DECODES`: a row takes part in every step until it ends
      ("kept"), or goes to the end of a queue after each step ("turns").
    stages: Number of pipeline stages.
    stage_s: Seconds that each stage adds to a call.
    decode_stage_s: Seconds that each stage adds to a decode step; None for
      `stage_s`.
    entry_s: Seconds that the first stage adds to a call.
    entry_token_s: Seconds that the first stage adds for each new token of
      prompts or cached token of answers.
    share: One of `SHARES`, for an instance with both roles.
    prefix_cache_tokens: Room for blocks of prefilled prompts, in addition to
      the capacity; the least recently used blocks are evicted.
    prefix_blocks: Blocks that are cached at the beginning, least recently used
      first: number of tokens by block id.
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
    """Seconds that each stage adds to a decode step."""
    seconds = self.decode_stage_s
    return float(self.stage_s if seconds is None else seconds)


@dataclasses.dataclass(kw_only=True)
class InstanceCounters:
  """Counters of an instance's work.

  Attributes:
    prefill_calls: Number of prompt batches.
    prefill_tokens: Prompt tokens that were computed.
    cached_tokens: Prompt tokens that were found in the prefix cache.
    decode_steps: Number of decode steps.
    decode_tokens: Tokens generated in decode steps.
    prefill_busy_s: Seconds in which the first stage computed prompts.
    decode_busy_s: Seconds of decode steps; with "turns" of the first stage.
    peak_tokens: Maximum of cached plus reserved tokens.
    peak_rows: Maximum number of answers that decoded at once.
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
    time_s: Time of the change, in seconds.
    queued_requests: Number of prompts that wait or are in prefill.
    running_requests: Number of answers in decode.
    used_tokens: Cached plus reserved tokens.
  """

  time_s: float
  queued_requests: int
  running_requests: int
  used_tokens: int


@dataclasses.dataclass(kw_only=True)
class ClusterResult:
  """Times, loads and counters of a simulated trace.

  Attributes:
    served: Record of each request, in the order of the trace.
    seconds: Time of the last token.
    timeline: Calls and transfers, if they were asked for.
    loads: Load over time by instance, if it was asked for.
    counters: Counters by instance.
    moved_bytes: Transferred bytes by link.
    reserved_peak_tokens: Maximum of tokens reserved for answers whose first
      decode step had not begun.
    reserved_token_s: Sum of these reserved tokens over time, in token-seconds.
    role_changes: Role changes in the order of time.
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
  """A request in flight."""

  served: ServedRequest
  request: RoutedRequest
  blocks: tuple[int, ...]
  block: int
  # Time at which prefill could begin.
  ready_s: float = 0.0
  prefill: _Running | None = None
  decode: _Running | None = None
  # Whether its route named the decode instance.
  bound: bool = False
  cached: int = 0
  fetched: int = 0
  # Prompt tokens left to prefill.
  tokens_left: int = 0
  # Seconds to prefill the remaining tokens alone, as counted in a queue.
  alone_s: float = 0.0
  # Tokens that the prefill and the decode instance hold for it.
  prefill_tokens: int = 0
  reserved: int = 0
  end_step: int = 0
  # Parts of its cache that are in flight or will be sent during prefill.
  streamed: bool = False
  parts: int = 0
  come: Callable[[], None] | None = None

  @property
  def need(self) -> int:
    return self.request.prompt_tokens + self.request.new_tokens


class _PrefixBlocks:
  """LRU prefix cache of an instance, least recently used block first."""

  def __init__(self, tokens: int, blocks: Mapping[int, int]):
    self._left = tokens - sum(blocks.values())
    self._blocks = collections.OrderedDict(blocks)
    self._shrink()

  def match(self, blocks: Sequence[int], block: int) -> int:
    """Number of tokens of the longest cached prefix."""
    tokens = 0
    for block_id in blocks:
      if block_id not in self._blocks:
        break
      tokens += block
    return tokens

  def keep(self, blocks: Sequence[int], block: int) -> None:
    """Cache the full blocks of a prompt, its end first."""
    for block_id in reversed(blocks):
      if block_id in self._blocks:
        self._blocks.move_to_end(block_id)
      else:
        self._blocks[block_id] = block
        self._left -= block
    self._shrink()

  def _shrink(self) -> None:
    while self._left < 0:
      self._left += self._blocks.popitem(last=False)[1]


class _Running:
  """Simulated state of an instance with decode="kept"."""

  def __init__(self, spec: SimulatedInstance, cluster: _ClusterRun):
    self.spec, self.cluster = spec, cluster
    self.name, self.role = spec.name, spec.role
    self.counters = InstanceCounters()
    self.prefixes = _PrefixBlocks(
      int(spec.prefix_cache_tokens), spec.prefix_blocks
    )
    # Prompts that wait for prefill or are in prefill.
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
    # The current run of decode steps: its start, the number of steps, seconds
    # of the first step, and growth from step to step.
    self.since, self.steps, self.first_s, self.more_s = 0.0, 0, 0.0, 0.0
    self.decoding = False
    self.round = 0
    self.woken = False
    # Times of the last step with answers, or with chunks of prompts.
    self.step_start_s = self.step_end_s = -math.inf

  @property
  def longest(self) -> int:
    """Maximum total of prompt and generated tokens that it can serve."""
    return self.spec.capacity_tokens

  # Load as routers see it.

  def view(self) -> InstanceView:
    now_s = self.cluster.now_s
    rows = len(self.rows)
    cached = self.cached
    if self.decoding:
      cached += rows * min(self.steps, self._steps_until(now_s, up=False))
    return InstanceView(
      name=self.name,
      role=self.role,
      queued_requests=self.queued,
      queued_tokens=self.queued_tokens,
      queued_s=self.queued_s + max(0.0, self.stage_free[0] - now_s),
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

  # Decode steps.

  def _steps_until(self, time: float, up: bool) -> int:
    """Number of current steps that end by a time; `up` rounds up."""
    spent = time - self.since
    a, b = self.more_s / 2, self.first_s - self.more_s / 2
    # Closed form of the sum, solved for the number of steps n:
    # n first_s + more_s n (n - 1) / 2 = spent
    n = spent / b if a <= 0 else (math.sqrt(b * b + 4 * a * spent) - b) / 2 / a
    steps_done = max(0, math.floor(n))
    # Rounding may be off by one near a whole number.
    while self._steps_end_s(steps_done + 1) <= time:
      steps_done += 1
    while steps_done and self._steps_end_s(steps_done) > time:
      steps_done -= 1
    if up and self._steps_end_s(steps_done) < time:
      steps_done += 1
    return steps_done

  def _steps_end_s(self, steps: int) -> float:
    """Time at which a number of the current steps have ended."""
    growth = self.more_s * (steps * (steps - 1) / 2)
    return self.since + self.first_s * steps + growth

  def _decode(self, now: float) -> None:
    """Begin as many steps as run until the next known event."""
    rows, stages = len(self.rows), self.spec.stages
    group = -(-rows // stages)
    first = self._step_s(group, self.cached / stages)
    self.more_s = self._step_s(group, (self.cached + rows) / stages) - first
    self.first_s, self.since = first, now
    self.steps = self.rows[0][0] - self.step
    self.decoding = True
    self._post_round(self._steps_end_s(self.steps))

  def _step_s(self, rows: int, cached: float) -> float:
    """Seconds of a token for a group of rows, through all stages."""
    spec = self.spec
    seconds = (
      spec.times.decode_s(rows, cached) + spec.step_stage_s * spec.stages
    )
    # Tokens of the current step are cached only after it.
    return seconds + spec.entry_s + spec.entry_token_s * (cached - rows)

  def _post_round(self, time: float) -> None:
    self.round += 1
    self.cluster.at(time, functools.partial(self._stepped, self.round))

  def interrupt(self) -> None:
    """Let the run of decode steps end with the current step."""
    if self.decoding:
      steps = max(1, self._steps_until(self.cluster.now_s, up=True))
      if steps < self.steps:
        self.steps = steps
        self._post_round(self._steps_end_s(steps))

  def _stepped(self, number: int) -> None:
    if number != self.round:
      return
    now_s, rows = self.cluster.now_s, len(self.rows)
    self.decoding = False
    self.step_start_s, self.step_end_s = (
      self._steps_end_s(self.steps - 1),
      now_s,
    )
    self.counters.decode_busy_s += now_s - self.since
    self._advance(self.steps)
    self.cluster.record(
      f"decode {rows} x {self.steps}", "decode", self.name, self.since, now_s
    )
    self.wake()

  def _advance(self, steps: int) -> None:
    """Count steps and remove the answers that have ended."""
    rows = len(self.rows)
    self.step += steps
    self.cached += rows * steps
    self.counters.decode_steps += steps
    self.counters.decode_tokens += rows * steps
    while self.rows and self.rows[0][0] <= self.step:
      work = heapq.heappop(self.rows)[2]
      self.cached -= work.need
      self.free(work.reserved)
      work.served.last_token_s = self.cluster.now_s
      self.cluster.freed()

  def answer(self, work: _RoutedWork) -> None:
    """Add an answer whose prompt cache is on this instance."""
    if work.request.new_tokens == 1:
      work.served.last_token_s = max(
        work.served.first_token_s, self.cluster.now_s
      )
      self.cluster.reserve(-work.reserved)
      self.free(work.reserved)
      self.cluster.freed()
      return
    self.joining.append(work)
    self.joining_tokens += work.request.prompt_tokens
    self.interrupt()
    self.wake()

  def _join(self) -> None:
    max_cached = self.spec.max_decode_tokens
    while self.joining and len(self.rows) < self.spec.max_rows:
      work = self.joining[0]
      cached = work.request.prompt_tokens + 1
      if (
        max_cached is not None
        and self.rows
        and self.cached + cached > max_cached
      ):
        break
      self.joining.popleft()
      self.joining_tokens -= work.request.prompt_tokens
      self.cluster.reserve(-work.reserved)
      # The first token came with the prompt.
      work.end_step = self.step + work.request.new_tokens - 1
      self.cached += cached
      heapq.heappush(self.rows, (work.end_step, work.request.number, work))
    self.counters.peak_rows = max(self.counters.peak_rows, len(self.rows))

  # Prefill.

  def enqueue(self, work: _RoutedWork) -> None:
    """Add a prompt whose prefix has arrived."""
    work.ready_s = self.cluster.now_s
    self.queue.append(work)
    self.interrupt()
    self.wake()

  def wake(self) -> None:
    """Schedule a search for work after all events of this time."""
    if not self.woken:
      self.woken = True
      self.cluster.at(self.cluster.now_s, self._start_work)

  def _start_work(self) -> None:
    self.woken = False
    now_s = self.cluster.now_s
    if not self.decoding and self.stage_free[0] <= now_s:
      self._join()
      if self.role == "both":
        mixed = self.spec.share != "first"
      else:
        # Prompts and answers together occur only after a change of role.
        mixed = bool(self.rows)
      drained = self.stage_free[-1] <= now_s
      if self.queue and (drained or not mixed):
        batch = self._batch(mixed)
        if batch:
          (self._mix if mixed else self._read)(batch)
      if self.stage_free[0] <= now_s and self.rows:
        # A pipeline with prompts in flight is drained first.
        if self.stage_free[-1] > now_s:
          self.cluster.at(self.stage_free[-1], self.wake)
        else:
          self._decode(now_s)
          if self.queue and self.spec.share == "ahead":
            # A new prompt may be planned for the step after this one.
            self.interrupt()
    self.cluster.load(self)

  def _admit(self, work: _RoutedWork) -> bool:
    """Reserve room for a prompt; return whether there was enough."""
    if work.prefill_tokens:
      return True
    if self.cluster.push and work.decode is None:
      target = self.cluster.choose(work)
      if target is None:
        self.cluster.wait_for_room(self)
        return False
    decodes_here = work.decode is self
    need = work.need if decodes_here else work.request.prompt_tokens
    if self.used + need > self.spec.capacity_tokens:
      return False
    if self.cluster.push and not decodes_here and work.decode is not None:
      decoder = work.decode
      if decoder.used + work.need > decoder.spec.capacity_tokens:
        self.cluster.wait_for_room(self)
        return False
      decoder.take(work.need)
      work.reserved = work.need
      self.cluster.reserve(work.need)
    self.take(need)
    work.prefill_tokens = need
    return True

  def wait_for(self, work: _RoutedWork, num_cached: int) -> None:
    """Add to the queue the seconds of a prompt with some cached tokens."""
    prompt_alone = QueuedPrompts.of(work.request.prompt_tokens, num_cached)
    work.alone_s = reading_s(self.spec.times, [prompt_alone])
    self.queued_s += work.alone_s

  def _drop_rejected(self, work: _RoutedWork) -> None:
    """Remove a waiting prompt that was rejected."""
    self.queue.remove(work)
    self.queued -= 1
    self.queued_tokens -= work.request.prompt_tokens
    self.queued_s -= work.alone_s

  def _start(self, work: _RoutedWork) -> None:
    """Look up the cached prefix of a prompt when its prefill begins."""
    now_s = self.cluster.now_s
    if math.isnan(work.served.prefill_start_s):
      work.served.prefill_start_s = now_s
      cached_tokens = max(
        work.fetched, self.prefixes.match(work.blocks, work.block)
      )
      # The last token is always computed: its output is needed.
      work.cached = min(cached_tokens, work.request.prompt_tokens - 1)
      work.tokens_left = work.request.prompt_tokens - work.cached
      work.served.cached_tokens = work.cached
      self.counters.cached_tokens += work.cached

  def _batch(self, mixed: bool) -> list[tuple[_RoutedWork, int]]:
    """Select the prompts to prefill next, and the token count of each."""
    room = self.spec.max_prefill_tokens
    rows = self.spec.max_prefill_rows
    if mixed:
      room -= len(self.rows)
    last_s = self._planned_s()
    batch: list[tuple[_RoutedWork, int]] = []
    for work in tuple(itertools.islice(self.queue, rows + 1)):
      if len(batch) >= rows or room <= 0 or work.ready_s > last_s:
        break
      answers = len(self.rows) + len(self.joining) + len(batch)
      if work.decode is self and answers >= self.spec.max_rows:
        break
      if not work.prefill_tokens:
        tokens_left = work.request.prompt_tokens - self.prefixes.match(
          work.blocks, work.block
        )
        if batch and not mixed and tokens_left > room:
          break
        if not self._admit(work):
          if work.served.rejected:
            self._drop_rejected(work)
            continue
          break
      self._start(work)
      count = min(work.tokens_left, room) if mixed else work.tokens_left
      batch.append((work, count))
      room -= count
    return batch

  def _planned_s(self) -> float:
    """Latest arrival of a prompt that the current step can include."""
    if self.spec.share != "ahead" or self.step_end_s < self.cluster.now_s:
      return math.inf
    # An idle instance plans with all prompts that have arrived.
    if not self.rows and self.queue[0].ready_s > self.step_start_s:
      return math.inf
    return self.step_start_s

  def _pieces(
    self, batch: Sequence[tuple[_RoutedWork, int]]
  ) -> list[tuple[int, int]]:
    return [
      (count, work.request.prompt_tokens - work.tokens_left)
      for work, count in batch
    ]

  def _read(self, batch: list[tuple[_RoutedWork, int]]) -> None:
    """Prefill whole prompts through all stages."""
    now_s, stages = self.cluster.now_s, self.spec.stages
    seconds = self.spec.times.prefill_s(self._pieces(batch)) / stages
    seconds += self.spec.stage_s
    entry = self._entry_s(batch)
    self._count_batch(batch, seconds + entry)
    time, ends = now_s + entry, []
    for n in range(stages):
      time = max(time, self.stage_free[n]) + seconds
      self.stage_free[n] = time
      ends.append(time)
    self.cluster.stream(batch, seconds, ends)
    self.cluster.at(
      self.stage_free[0], functools.partial(self._count_passed, batch)
    )
    self.cluster.at(time, functools.partial(self._on_prefilled, batch))
    self.cluster.record(
      f"prefill {len(batch)}", "prefill", self.name, now_s, self.stage_free[0]
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
      work.tokens_left -= count
      self.counters.prefill_tokens += count
      self.queued_s -= work.alone_s
      if work.tokens_left:
        self.wait_for(work, work.request.prompt_tokens - work.tokens_left)
      else:
        # Prompts are prefilled in the order of the queue.
        self.queue.popleft()

  def _count_passed(self, batch: Iterable[tuple[_RoutedWork, int]]) -> None:
    """Remove tokens from the queue that others no longer wait for."""
    for work, count in batch:
      self.queued_tokens -= count + (0 if work.tokens_left else work.cached)
    self.wake()

  def _on_prefilled(self, batch: Iterable[tuple[_RoutedWork, int]]) -> None:
    for work, _ in batch:
      if not work.tokens_left:
        self._finish_prompt(work)
    self.wake()

  def _finish_prompt(self, work: _RoutedWork) -> None:
    self.queued -= 1
    work.served.first_token_s = self.cluster.now_s
    if work.blocks:
      self.prefixes.keep(work.blocks, work.block)
    if work.decode is self:
      work.reserved = work.prefill_tokens
      self.cluster.reserve(work.reserved)
      self.answer(work)
    else:
      self.cluster.read(work)

  def _mix(self, batch: list[tuple[_RoutedWork, int]]) -> None:
    """Run one step with chunks of prompts and all decoding answers."""
    now_s, rows = self.cluster.now_s, len(self.rows)
    times, stages = self.spec.times, self.spec.stages
    seconds = times.prefill_s(self._pieces(batch)) + self.spec.stage_s * stages
    seconds += self._entry_s(batch)
    if rows:
      seconds += times.decode_s(rows, self.cached)
      if self.spec.share == "mixed":
        # The weights are read once, for both.
        seconds -= times.decode_s(0, 0)
    self.step_start_s, self.step_end_s = now_s, now_s + seconds
    self._count_batch(batch, seconds)
    self.stage_free = [now_s + seconds] * stages

    def finish_step() -> None:
      if rows:
        self._advance(1)
      self._count_passed(batch)
      self._on_prefilled(batch)

    self.cluster.at(now_s + seconds, finish_step)
    self.cluster.record(
      f"mixed {len(batch)} + {rows}", "mixed", self.name, now_s, now_s + seconds
    )


@dataclasses.dataclass(eq=False, slots=True)
class _TurningRow:
  """An answer that waits for its turn, and its number of finished steps."""

  work: _RoutedWork
  steps: int = 0

  @property
  def tokens(self) -> int:
    """Number of cached tokens that its next step reads."""
    return self.work.request.prompt_tokens + self.steps + 1


@dataclasses.dataclass(eq=False, slots=True)
class _TurningStage:
  """A pipeline stage and its queues."""

  # Batches of prompts with their seconds in a stage; rows that wait.
  prompts: collections.deque[tuple[list[tuple[_RoutedWork, int]], float]] = (
    dataclasses.field(default_factory=collections.deque)
  )
  rows: collections.deque[_TurningRow] = dataclasses.field(
    default_factory=collections.deque
  )
  busy: bool = False


class _TakingTurns(_Running):
  """An instance whose rows go to the end of a queue after each step.

  Ref: the simulator of DistServe (github.com/LLMServe/DistServe): a stage takes
  waiting prompts, else rows from the front of its queue as long as their tokens
  fit; rows continue in the next stage's queue, after the last in the first.
  """

  def __init__(self, spec: SimulatedInstance, cluster: _ClusterRun):
    super().__init__(spec, cluster)
    self.pipeline = [_TurningStage() for _ in range(spec.stages)]

  @property
  def longest(self) -> int:
    """Maximum request length; a row that no step takes would wait for ever."""
    max_step_tokens = self.spec.max_decode_tokens
    # The last token takes part in no step.
    return min(
      super().longest,
      super().longest if max_step_tokens is None else max_step_tokens + 1,
    )

  def answer(self, work: _RoutedWork) -> None:
    """Add an answer whose prompt cache is on this instance."""
    if work.request.new_tokens == 1:
      super().answer(work)
      return
    self.cluster.reserve(-work.reserved)
    self.pipeline[0].rows.append(_TurningRow(work))
    self.rows.append((0, work.request.number, work))
    self.cached += work.request.prompt_tokens + 1
    self.counters.peak_rows = max(self.counters.peak_rows, len(self.rows))
    self.wake()

  def _start_work(self) -> None:
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
    """Take rows from the front of a queue, as many as a step takes."""
    max_step_tokens, rows, tokens = self.spec.max_decode_tokens, [], 0
    while stage.rows and len(rows) < self.spec.max_rows:
      tokens += stage.rows[0].tokens
      if max_step_tokens is not None and tokens > max_step_tokens:
        break
      rows.append(stage.rows.popleft())
    return rows

  def _read_in(
    self,
    index: int,
    batch: list[tuple[_RoutedWork, int]],
    seconds: float,
  ) -> None:
    """Run a prefill batch in a stage."""
    spent = seconds
    if not index:
      spent += self._entry_s(batch)
      self._count_batch(batch, spent)

    def finish_stage() -> None:
      if not index:
        self._count_passed(batch)
      if index + 1 < len(self.pipeline):
        self.pipeline[index + 1].prompts.append((batch, seconds))
      else:
        self._on_prefilled(batch)

    self._occupy(index, spent, f"prefill {len(batch)}", "prefill", finish_stage)

  def _decode_in(self, index: int, rows: list[_TurningRow]) -> None:
    """Run a decode step of rows in a stage."""
    spec, count = self.spec, len(rows)
    tokens = sum(row.tokens for row in rows)
    spent = spec.times.decode_s(count, tokens) / spec.stages
    spent += spec.step_stage_s
    if not index:
      spent += spec.entry_s + spec.entry_token_s * (tokens - count)
      self.counters.decode_busy_s += spent

    def finish_stage() -> None:
      last = index + 1 == len(self.pipeline)
      following = self.pipeline[0 if last else index + 1].rows
      if last:
        self._count_step(rows)
      following.extend(
        row for row in rows if row.steps + 1 < row.work.request.new_tokens
      )

    self._occupy(index, spent, f"decode {count} x 1", "decode", finish_stage)

  def _count_step(self, rows: Sequence[_TurningRow]) -> None:
    """Count a token of each row and remove finished rows."""
    self.counters.decode_steps += 1
    self.counters.decode_tokens += len(rows)
    self.cached += len(rows)
    for row in rows:
      work = row.work
      row.steps += 1
      if row.steps + 1 == work.request.new_tokens:
        self.rows.remove((0, work.request.number, work))
        self.cached -= work.need
        self.free(work.reserved)
        work.served.last_token_s = self.cluster.now_s
        self.cluster.freed()

  def _occupy(
    self,
    index: int,
    seconds: float,
    name: str,
    kind: str,
    finish: Callable[[], None],
  ) -> None:
    """Occupy a stage for some seconds, then call `finish`."""
    stage, now_s = self.pipeline[index], self.cluster.now_s
    stage.busy, self.stage_free[index] = True, now_s + seconds

    def release_stage() -> None:
      stage.busy = False
      finish()
      self.wake()

    self.cluster.at(now_s + seconds, release_stage)
    if not index:
      self.cluster.record(name, kind, self.name, now_s, now_s + seconds)


class _ClusterRun:
  """State of one simulation: clock, links and prompts between instances."""

  def __init__(self, spec: ClusterSimulator, trace: Sequence[TraceRequest]):
    self.spec, self.policy = spec, spec.policy
    self.push = spec.transfer == "push"
    self.events = Simulator()
    self.at = self.events.at
    self.all = {
      instance.name: (_TakingTurns if instance.decode == "turns" else _Running)(
        instance, self
      )
      for instance in spec.instances
    }
    self.in_order = [self.all[name] for name in sorted(self.all)]
    self.spans: list[Span] = []
    self.loads: dict[str, list[LoadPoint]] = {name: [] for name in self.all}
    # Prefilled prompts for which no decode instance had room yet.
    self.finished: collections.deque[_RoutedWork] = collections.deque()
    self.waiting: list[_Running] = []
    self.retrying = False
    self.channels: dict[tuple[str, str], Channel] = {}
    # Time at which each link has sent everything that it was given.
    self.link_free: dict[str, float] = {}
    self.reserved, self.reserved_at = 0, 0.0
    self.result = ClusterResult(served=[])
    self.trace = trace
    # Requests of the current window, and those that roles are planned for.
    self.came: list[TraceRequest] = []
    # Prefixes in flight for later requests: (target, last block).
    self.copying: set[tuple[Any, ...]] = set()
    self.planned: TrafficSummary | None = None

  @property
  def now_s(self) -> float:
    return float(self.events.now_s)

  def run(self) -> ClusterResult:
    result = self.result
    for request in self.trace:
      served = ServedRequest(
        number=request.number,
        arrival_s=float(request.arrival),
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
      )
      result.served.append(served)
    self._next = 0
    if self.trace:
      self.at(self.trace[0].arrival, self._arrive)
      if self.spec.roles is not None:
        end = self.trace[0].arrival + float(self.spec.roles.window_s)
        self.at(end, self._plan_roles)
    timeline = self.events.run()
    lost = [
      request
      for request in result.served
      if request.last_token_s != request.last_token_s
    ]
    lost = [request for request in lost if not request.rejected]
    if lost:
      raise OptionError(
        "policy",
        f"{len(lost)} requests never placed, first number {lost[0].number}",
        "a route for each request, or a rejection",
        "make instances larger, or let the policy reject",
      )
    result.seconds = max(
      (
        request.last_token_s
        for request in result.served
        if not request.rejected
      ),
      default=0.0,
    )
    if self.spec.timeline:
      transfers = (span for span in timeline.spans if span.nbytes)
      spans = sorted(
        (*self.spans, *transfers), key=lambda s: (s.start_s, s.resource, s.name)
      )
      result.timeline = Timeline(tuple(spans))
      result.loads = self.loads
    result.moved_bytes = timeline.sent_bytes()
    result.counters = {
      instance.name: instance.counters for instance in self.in_order
    }
    return result

  # Arrivals and routes.

  def _arrive(self) -> None:
    """Route all requests of this time, and schedule the next arrival."""
    trace, now_s = self.trace, self.now_s
    while self._next < len(trace) and trace[self._next].arrival <= now_s:
      n, self._next = self._next, self._next + 1
      self._route(trace[n], self.result.served[n])
    if self._next < len(trace):
      self.at(trace[self._next].arrival, self._arrive)

  def views(self) -> list[InstanceView]:
    """Views of the instances as the policy sees them, sorted by name."""
    return [instance.view() for instance in self.in_order]

  def _plan_roles(self) -> None:
    """Ask the planner for roles at the end of a window."""
    planner = self.spec.roles
    assert planner is not None
    decision = planner.decide(self.came, self.views(), self.planned)
    self.came, self.planned = [], decision.planned
    check_roles(
      {instance.name: instance.role for instance in self.in_order},
      decision.roles,
    )
    for name, role in sorted(decision.roles.items()):
      instance = self.all[name]
      if instance.role != role:
        instance.role = role
        self.result.role_changes.append(
          RoleChange(time_s=self.now_s, name=name, role=role, why=decision.why)
        )
    # With new roles, waiting prompts may have room elsewhere.
    self.freed()
    if self._next < len(self.trace):
      self.at(self.now_s + float(planner.window_s), self._plan_roles)

  def _route(self, request: TraceRequest, served: ServedRequest) -> None:
    # An id names a whole prefix; the last block may be incomplete.
    full_blocks = request.blocks[: request.prompt_tokens // request.block]
    if self.spec.roles is not None:
      cached_counts = (
        (instance.name, instance.prefixes.match(full_blocks, request.block))
        for instance in self.in_order
      )
      self.came.append(
        dataclasses.replace(
          request, cached=tuple(entry for entry in cached_counts if entry[1])
        )
      )

    def cached(name: str) -> int:
      cached_tokens = self._instance(name).prefixes.match(
        full_blocks, request.block
      )
      return min(cached_tokens, request.prompt_tokens - 1)

    routed_request = RoutedRequest(
      number=request.number,
      arrival_s=float(request.arrival),
      prompt_tokens=request.prompt_tokens,
      new_tokens=request.new_tokens,
      cached_tokens=cached,
    )
    work = _RoutedWork(served, routed_request, full_blocks, request.block)
    route = self.policy.route(routed_request, self.views(), self.now_s)
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
    cached_here = cached(target.name)
    work.tokens_left = request.prompt_tokens
    tokens_after_fetch = max(
      cached_here, route.fetch_tokens if route.fetch_from else 0
    )
    target.queued += 1
    target.queued_tokens += request.prompt_tokens
    target.wait_for(work, tokens_after_fetch)
    if route.fetch_from is not None and route.fetch_tokens > cached_here:
      self._fetch(work, route, cached_here)
    else:
      target.enqueue(work)
    if route.copy is not None:
      self._copy(work, route.copy, cached(route.copy.target))

  def _fetch(self, work: _RoutedWork, route: Route, cached_here: int) -> None:
    target = work.prefill
    assert target is not None
    source = self._instance(str(route.fetch_from))
    start_s = self.now_s

    def on_fetched() -> None:
      work.fetched = route.fetch_tokens
      work.served.moved_s += self.now_s - start_s
      target.enqueue(work)

    self.send(
      "fetch",
      work,
      source,
      target,
      route.fetch_tokens - cached_here,
      on_fetched,
    )

  def _copy(
    self, work: _RoutedWork, copy: PrefixCopy, cached_at_target: int
  ) -> None:
    """Copy a prefix for later requests, unless that is in flight."""
    count = copy.tokens // max(1, work.block)
    blocks = work.blocks[:count]
    key = (copy.target, *blocks[-1:])
    if not blocks or key in self.copying:
      return
    source, target = (
      self._instance(name) for name in (copy.source, copy.target)
    )
    self.copying.add(key)

    def on_copied() -> None:
      self.copying.discard(key)
      target.prefixes.keep(blocks, work.block)

    moved = max(0, copy.tokens - cached_at_target)
    self.send("copy", work, source, target, moved, on_copied)

  def _set_decode(self, work: _RoutedWork, name: str) -> None:
    instance = self._instance(name)
    if instance.role == "prefill":
      raise _misrouted(name, "answers")
    work.decode, work.served.decode = instance, name

  def _too_long(self, work: _RoutedWork) -> str:
    """Reason why no instance can hold a request, or ""."""
    request, prefill = work.request, work.prefill
    assert prefill is not None
    if request.prompt_tokens > prefill.spec.capacity_tokens:
      return f"{request.prompt_tokens} tokens, more than {prefill.name} holds"
    candidates = [work.decode] if work.decode is not None else [
      instance for instance in self.in_order if instance.role != "prefill"
    ]  # fmt: skip
    longest = max((instance.longest for instance in candidates), default=0)
    if work.need > longest:
      return f"{work.need} tokens, more than the {longest} of an instance"
    return ""

  def _instance(self, name: str) -> _Running:
    instance = self.all.get(name)
    if instance is None:
      raise OptionError(
        "policy",
        f"an instance {name!r}",
        f"one of {', '.join(sorted(self.all))}",
        "return the name of a view",
      )
    return instance

  # From prefill to decode.

  def choose(self, work: _RoutedWork) -> _Running | None:
    """Ask the policy for a decode instance."""
    choice = self.policy.decode_instance(work.request, self.views(), self.now_s)
    if isinstance(choice, Rejected):
      work.served.rejected = choice.reason or "rejected"
      return None
    if choice is not None:
      self._set_decode(work, choice)
    return work.decode

  def stream(
    self,
    batch: Sequence[tuple[_RoutedWork, int]],
    seconds: float,
    ends: Sequence[float],
  ) -> None:
    """Send the caches of prompts in parts during prefill.

    Args:
      batch: Prompts of a call that prefills them whole.
      seconds: Duration of each stage of the call.
      ends: End time of each stage.
    """
    parts = self.spec.stream
    for work, _ in batch:
      source, target = work.prefill, work.decode
      if not parts or source is None or target in (None, source):
        continue
      assert target is not None
      work.streamed, work.parts = True, parts

      def on_part_sent(work: _RoutedWork = work) -> None:
        work.parts -= 1
        if not work.parts and work.come is not None:
          work.come()

      tokens = work.request.prompt_tokens / parts
      send = functools.partial(
        self.send, "stream", work, source, target, tokens, on_part_sent
      )
      for n in range(1, parts + 1):
        stage = math.ceil(n * len(ends) / parts) - 1
        remaining_stages = stage + 1 - n * len(ends) / parts
        self.at(ends[stage] - remaining_stages * seconds, send)

  def read(self, work: _RoutedWork) -> None:
    """Take a prefilled prompt that another instance decodes."""
    if work.reserved:
      self._move(work)
      return
    self.finished.append(work)
    self._assign_decoders()

  def _assign_decoders(self) -> None:
    """Assign finished prompts to decode instances with room, in order.

    Room is reserved when the link is free to pull, and not before: prompts
    that wait for a link let others pass, those that wait for room do not.
    """
    skipped: list[_RoutedWork] = []
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
        skipped.append(self.finished.popleft())
        if not work.bound:
          # The policy is asked again when the link is free.
          work.decode = None
        continue
      # An instance that prefilled the prompt itself has its cache already.
      need = work.need - (work.prefill_tokens if target is prefill else 0)
      if target.used + need > target.spec.capacity_tokens:
        break
      self.finished.popleft()
      target.take(need)
      work.reserved = work.need
      self.reserve(work.need)
      if target is prefill:
        work.prefill_tokens = 0
        target.answer(work)
      else:
        self._move(work)
    self.finished.extendleft(reversed(skipped))

  def _move(self, work: _RoutedWork) -> None:
    """Send the cache of a prompt to its decode instance."""
    source, target, start_s = work.prefill, work.decode, self.now_s
    assert source is not None
    assert target is not None

    def on_moved() -> None:
      work.served.moved_s += self.now_s - start_s
      self._release(work)
      target.answer(work)

    if work.parts:
      work.come = on_moved
    elif work.streamed:
      on_moved()
    else:
      self.send(
        "move", work, source, target, work.request.prompt_tokens, on_moved
      )

  def _release(self, work: _RoutedWork) -> None:
    """Free the tokens that the prefill instance held."""
    assert work.prefill is not None
    work.prefill.free(work.prefill_tokens)
    work.prefill_tokens = 0
    work.prefill.wake()
    self.freed()

  def freed(self) -> None:
    """Wake the work that waits for room, once for all events of this time."""
    if (self.finished or self.waiting) and not self.retrying:
      self.retrying = True
      self.at(self.now_s, self._retry)

  def _retry(self) -> None:
    self.retrying = False
    self._assign_decoders()
    waiting, self.waiting = self.waiting, []
    for instance in waiting:
      instance.wake()

  def wait_for_room(self, instance: _Running) -> None:
    """Remember an instance whose next prompt waits for another's room."""
    if instance not in self.waiting:
      self.waiting.append(instance)

  def reserve(self, tokens: int) -> None:
    """Count tokens reserved for answers that have not begun."""
    now_s = self.now_s
    self.result.reserved_token_s += self.reserved * (now_s - self.reserved_at)
    self.reserved += tokens
    self.reserved_at = now_s
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
    on_arrival: Callable[[], None],
  ) -> None:
    """Send the cache of some tokens; calls `on_arrival` then."""
    channel = self._channel(source.name, target.name)
    if channel is None:
      on_arrival()
      return
    nbytes = tokens * self.spec.kv_token_bytes
    start_s = max(self.now_s, self.link_free.get(channel.name, 0.0))
    sent_s = start_s + nbytes / channel.link.bandwidth
    self.link_free[channel.name] = sent_s
    self.at(sent_s, self.freed)
    self.events.send(
      f"{kind} {work.request.number}",
      channel,
      nbytes,
      kind=kind,
      release_s=self.now_s,
      then=lambda span: on_arrival(),
    )

  def sending_tokens(self, name: str) -> int:
    """Number of tokens that an instance's outgoing link has yet to carry."""
    links, width = self.spec.links, self.spec.kv_token_bytes
    if not isinstance(links, Link) or not width:
      return 0
    busy_s = self.link_free.get(f"{name} out", 0.0) - self.now_s
    return max(0, round(busy_s * links.bandwidth / width))

  def _busy(self, source: str, target: str) -> bool:
    """Whether a link is carrying a transfer."""
    channel = self._channel(source, target)
    if channel is None:
      return False
    return self.link_free.get(channel.name, 0.0) > self.now_s

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
    """Record a call for the timeline."""
    if self.spec.timeline:
      self.spans.append(Span(name, kind, where, start, start, end, end))

  def load(self, instance: _Running) -> None:
    """Record the load of an instance."""
    if self.spec.timeline:
      self.loads[instance.name].append(
        LoadPoint(
          time_s=self.now_s,
          queued_requests=instance.queued,
          running_requests=len(instance.rows) + len(instance.joining),
          used_tokens=instance.used,
        )
      )


def _misrouted(name: str, does: str) -> OptionError:
  return OptionError(
    "policy", f"{name} for it", f"an instance that {does}", "look at its role"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSimulator:
  """Simulates instances, their links and the policy that routes requests.

  Attributes:
    instances: At least one instance; names are unique.
    policy: Routing policy, asked at each arrival and after each prefill.
    links: One link for each instance's outgoing traffic; or a link for each
      (source, target); None moves caches in no time.
    kv_token_bytes: Bytes of a token's keys and values in all layers.
    transfer: Side that begins a transfer, one of `TRANSFERS`.
    stream: Number of parts of a prompt's cache that are sent during prefill,
      with "push": the model's layers, or the chunks of a prompt; 0 sends the
      cache after prefill. Each part costs an event.
    timeline: Whether the result has spans and loads.
    roles: Planner that changes the instances' roles at the end of each of its
      windows; None leaves them as they are.
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
    with_turns = [
      instance.name for instance in self.instances if instance.decode == "turns"
    ]
    if self.stream and with_turns:
      raise OptionError(
        "stream",
        f"{self.stream} with decode='turns' of {with_turns[0]}",
        "0: when a stage reads is not known before it does",
        "pass stream=0, or decode='kept'",
      )
    names = [instance.name for instance in self.instances]
    if not names or len(set(names)) != len(names):
      raise OptionError(
        "instances",
        ", ".join(names) or "none",
        "one or more with unique names",
        "name them prefill0, prefill1, decode0",
      )

  def run(self, trace: Sequence[TraceRequest]) -> ClusterResult:
    """Simulate the cluster on a trace.

    Args:
      trace: Requests in the order of arrivals.

    Raises:
      OptionError: If the policy names an unknown instance or leaves requests
        without an instance for ever; or if the planner gives roles with which
        no instance prefills, or decodes.
    """
    return _ClusterRun(self, trace).run()

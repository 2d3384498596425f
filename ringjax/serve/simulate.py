"""Simulated engine: a real scheduler and pages, a clock, and a step cost.

Guarantees: for the same requests, submitted before the same steps, the plans
are those of an engine: it is the same scheduler over the same tree, and rows
end when the engine's do, one step after their last token was planned.
Cost: some hundred microseconds of Python a step, so an hour of a service takes
minutes.

The duration of a step comes from a `StepCost`, which is measured on an engine
or given; `VaryingCost` adds the variation of measured steps. Answers end by
their length alone.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, PromptError
from ringjax.serve.engine import Engine
from ringjax.serve.prefix.prefix_tree import GroupSpec, PrefixTree
from ringjax.serve.request import Answer, Request
from ringjax.serve.scheduler import (
  Scheduler,
  ServedRow,
  StepLimits,
  StepPlan,
)
from ringjax.serve.traces import TraceRequest

_T = TypeVar("_T")
# Steps without a token after which a trace is considered stuck.
_IDLE = 1000

# Factors of a step's time, in the order of the attributes of `StepCost`.
StepFeatures = tuple[float, float, float, float, float, float, float]


def features(plan: StepPlan) -> StepFeatures:
  """Factors of a step's time: the multipliers of each cost in `StepCost`."""
  rows = sum(turn.end - turn.at for turn in plan.turns)
  pairs = sum(
    piece.count * piece.start + piece.count * (piece.count + 1) // 2
    for piece in plan.pieces
  )
  return (
    float(bool(plan.turns)),
    float(bool(plan.pieces)),
    float(rows),
    float(plan.tokens - rows),
    float(sum(turn.at + 1 for turn in plan.turns)),
    float(pairs),
    float(bool(plan.turns or plan.pieces)),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
  """Cost model of a step in seconds: its two calls, their tokens and keys.

  Answers and prompts have separate constants: the former are bound by reads of
  keys and weights, the latter by matrix products.

  Attributes:
    answers: Seconds of a step with a call for answers.
    prompts: Seconds of a step with a call for prompts.
    row: Seconds for each token of answers, one per row except with drafts.
    token: Seconds for each token of prompts.
    key: Seconds for each key that an answer attends to.
    pair: Seconds for each pair of a prompt's token and a key that it attends
      to.
    step: Seconds of any step, which both calls share, such as the host's work.
  """

  answers: int | float = 0.0
  prompts: int | float = 0.0
  row: int | float = 0.0
  token: int | float = 0.0
  key: int | float = 0.0
  pair: int | float = 0.0
  step: int | float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), least=0)
    if not any(dataclasses.astuple(self)):
      raise OptionError(
        "cost", "nothing", "a step that takes time", "pass answers=0.01"
      )

  def seconds(self, plan: StepPlan) -> float:
    """Seconds of a planned step."""
    return self.of(features(plan))

  def of(self, step: StepFeatures) -> float:
    """Seconds of a step with these `features`."""
    return sum(
      x * y for x, y in zip(dataclasses.astuple(self), step, strict=True)
    )

  @classmethod
  def fit(
    cls,
    steps: Float[np.ndarray, "n 7"] | Sequence[Any],
    seconds: Float[np.ndarray, " n"] | Sequence[float],
  ) -> StepCost:
    """The cost that explains measured steps best, relative to their times.

    Steps with calls of the same kinds are weighted by their mean time, not each
    by its own time: on a shared machine short times are not more accurate. The
    sum of all times is explained exactly.

    Args:
      steps: The `features` of n steps, [n, 7].
      seconds: Seconds of each step, [n].

    Raises:
      OptionError: If there are fewer than 8 steps.
    """
    times, rows = np.asarray(seconds, np.float64), np.asarray(steps)
    if times.size < 8:
      raise OptionError(
        "steps", f"{times.size} of them", "at least 8", "measure more"
      )
    rows = rows.astype(np.float64)
    weights = np.empty_like(times)
    kinds = rows[:, 0] + 2 * rows[:, 1]
    for kind in np.unique(kinds):
      weights[kinds == kind] = 1 / times[kinds == kind].mean()
    scaled, use = rows * weights[:, None], [*range(rows.shape[1])]
    best = np.zeros(rows.shape[1])
    # No cost may be negative: drop the most negative one and fit again.
    while use:
      coefficients = np.linalg.lstsq(
        scaled[:, use], times * weights, rcond=None
      )[0]
      if coefficients.min() >= 0:
        best[use] = coefficients
        break
      use.pop(int(coefficients.argmin()))
    best *= times.sum() / (rows @ best).sum()
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**dict(zip(names, best.tolist(), strict=True)))

  @classmethod
  def parse(cls, text: str) -> StepCost:
    """Parse a cost from a text like answers=0.01,prompts=0.02,token=1e-5.

    Raises:
      OptionError: If the text does not have this form.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    try:
      pairs = [part.split("=") for part in text.split(",")]
      costs = {name.strip(): float(value) for name, value in pairs}
      if len(costs) == len(pairs) and set(costs) <= set(names):
        return cls(**costs)
    except ValueError:
      pass
    raise OptionError(
      "cost",
      text,
      f"NAME=SECONDS of {', '.join(names)}, with commas between",
      "write it like answers=0.01,prompts=0.02,token=1e-5",
    )


@runtime_checkable
class StepSeconds(Protocol):
  """Duration model of a simulated engine's steps, such as `StepCost`."""

  def seconds(self, plan: StepPlan) -> float:
    """Seconds of a planned step."""
    ...


class VaryingCost:
  """Step cost that varies as the measured steps did.

  Other processes, the system's clock and its memory make steps of one kind
  unequal for stretches of time, which causes the tail of latencies. The ratios
  of measured to fitted times are replayed in the order of measurement, for each
  kind of step (answers, prompts or both), and then from the beginning. Make one
  for each run.

  Attributes:
    cost: Cost of a step on average.
  """

  def __init__(self, cost: StepCost, record: StepRecord):
    """Start at the first measured steps.

    Args:
      cost: Cost that was fitted to the record.
      record: Record of measured steps.
    """
    self.cost = cost
    ratios: dict[tuple[float, ...], list[float]] = collections.defaultdict(list)
    for step, seconds in zip(record.steps, record.seconds, strict=True):
      ratios[step[:2]].append(seconds / cost.of(step))
    self._ratios = {kind: itertools.cycle(x) for kind, x in ratios.items()}

  def seconds(self, plan: StepPlan) -> float:
    """Seconds of a planned step; kinds that were not measured do not vary."""
    step = features(plan)
    ratios = self._ratios.get(step[:2])
    return self.cost.of(step) * (1.0 if ratios is None else next(ratios))


@dataclasses.dataclass(kw_only=True)
class StepRecord:
  """Measured steps of an engine and their durations.

  Attributes:
    steps: The `features` of each step.
    seconds: Time of each step from when the host could plan it until it knew
      its tokens, without the step before.
  """

  steps: list[StepFeatures] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)

  def fit(self) -> StepCost:
    """Fit a cost to the steps, see `StepCost.fit`."""
    return StepCost.fit(self.steps, self.seconds)


@contextlib.contextmanager
def watch_steps(
  engine: Engine,
  summary: Callable[[StepPlan], _T],
  told: Callable[[_T, float], None],
  *,
  clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
  """Context in which each step of an engine and its duration are reported.

  A step's seconds are from when the host could plan it until it knew its
  tokens, without the step before; a step in flight when the block ends is left
  out.

  Args:
    engine: Engine whose programs are compiled.
    summary: Function that summarizes a plan that is not empty, before the
      plan's rows change.
    told: Called with the summary and the seconds, by the thread that steps.
    clock: Clock in seconds, see `replay_live`.
  """
  scheduler = engine.scheduler
  plan_of, step_of = scheduler.plan, engine.step
  # The step in flight and its start: it ends when the next call has read it.
  flying: tuple[_T, float] | None = None
  planned: list[_T] = []

  def plan() -> StepPlan:
    step_plan = plan_of()
    if not step_plan.empty:
      planned.append(summary(step_plan))
    return step_plan

  def step() -> bool:
    nonlocal flying
    planned.clear()
    start = clock()
    is_busy = step_of()
    end, previous = clock(), flying
    flying = None
    if planned:
      flying = planned[-1], start if previous is None else end
    if previous is not None:
      told(previous[0], end - previous[1])
    return is_busy

  scheduler.plan, engine.step = plan, step
  try:
    yield
  finally:
    scheduler.plan, engine.step = plan_of, step_of


@contextlib.contextmanager
def record_steps(
  engine: Engine,
  record: StepRecord,
  *,
  clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
  """Context in which an engine's steps are added to a record.

  Args:
    engine: Engine whose programs are compiled.
    record: Record to which steps are added.
    clock: Clock in seconds, see `replay_live`.
  """

  def told(step: StepFeatures, seconds: float) -> None:
    record.steps.append(step)
    record.seconds.append(seconds)

  with watch_steps(engine, features, told, clock=clock):
    yield


@dataclasses.dataclass(eq=False, kw_only=True)
class SimulatedHandle:
  """A request to a simulated engine.

  Attributes:
    tokens: Number of tokens of the answer so far.
    cached_tokens: Number of prompt tokens whose keys were cached.
    preemptions: Number of times that it had to make room.
    done: Whether it has ended.
    on_token: Called with the time of each token, and whether it is the last.
  """

  on_token: Callable[[float, bool], None] | None = None
  tokens: int = 0
  cached_tokens: int = 0
  preemptions: int = 0
  done: bool = False


class SimulatedEngine:
  """Engine without a model whose steps take simulated time.

  Attributes:
    now: Simulated time of the host in seconds.
    scheduler: Scheduler of rows and pages.
    steps: Number of steps that computed tokens.
    prompt_tokens: Number of prompt tokens computed.
  """

  def __init__(
    self,
    cost: StepSeconds,
    *,
    rows: int = 16,
    capacity: int = 65536,
    longest: int = 16384,
    page: int = 32,
    piece: int = 64,
    pieces: int = 4,
    budget: int | None = None,
    share: str = "prompts",
    shards: int = 1,
    victim: Callable[[Sequence[ServedRow]], ServedRow] | None = None,
  ):
    """Makes an empty pool; pages may have any size.

    Args:
      cost: Cost of a step.
      rows, capacity, longest, page, piece, pieces, budget, share: Options of
        `Engine`.
      shards: Number of shards of the pages.
      victim: Chooses the row that is preempted first; see `Scheduler`.

    Raises:
      OptionError: If a value is out of range.
    """
    page, shards = positive_int("page", page), positive_int("shards", shards)
    up = lambda n, k: -(-n // k) * k
    pages = up(-(-positive_int("capacity", capacity) // page), shards)
    if budget is None:
      budget = rows + piece * pieces
    limits = StepLimits(
      rows=positive_int("rows", rows),
      pieces=positive_int("pieces", pieces),
      piece=positive_int("piece", piece),
      budget=positive_int("budget", budget),
      blocks=up(-(-positive_int("longest", longest) // page), shards),
    )
    tree = PrefixTree([GroupSpec(pages=pages // shards)], page, shards=shards)
    self._begin(cost, longest, tree, limits, share == "answers", share, victim)

  def _begin(
    self,
    cost: StepSeconds,
    longest: int,
    tree: PrefixTree,
    limits: StepLimits,
    share_answers: bool,
    share: str,
    victim: Any,
  ) -> None:
    self.cost, self.longest = cost, longest
    self.scheduler = Scheduler(
      tree,
      limits,
      share_answers=share_answers,
      reuse=share != "nothing",
      victim=victim,
    )
    self.now = 0.0
    self.steps = self.prompt_tokens = self._arrivals = 0
    self._device = 0.0
    self._flying: tuple[StepPlan, float] | None = None

  @classmethod
  def like(cls, engine: Engine, cost: StepSeconds) -> SimulatedEngine:
    """Empty simulated engine with the pages and calls of an engine.

    Rows that are preempted are computed again, as an engine does with
    preempt="recompute".

    Args:
      engine: Engine whose pages and limits are copied.
      cost: Cost of a step.
    """
    scheduler = engine.scheduler
    tree = PrefixTree(
      scheduler.tree.groups, scheduler.tree.page, shards=scheduler.tree.shards
    )
    simulated = object.__new__(cls)
    share = "prompts" if scheduler.reuse else "nothing"
    simulated._begin(
      cost,
      engine.longest,
      tree,
      scheduler.limits,
      scheduler.share_answers,
      share,
      None,
    )
    return simulated

  @property
  def busy(self) -> bool:
    """Whether requests are running, waiting or in flight."""
    return self._flying is not None or self.scheduler.busy

  def submit(
    self,
    prompt: np.ndarray,
    new_tokens: int,
    *,
    priority: int = 0,
    salt: str = "",
    on_token: Callable[[float, bool], None] | None = None,
  ) -> SimulatedHandle:
    """Queues a request.

    Args:
      prompt: Token ids of the prompt, int32 [n].
      new_tokens: Number of tokens of its answer.
      priority: Priority; requests with a smaller one come first.
      salt: Salt of its prefixes, as in `Request`.
      on_token: Callback of each token, see `SimulatedHandle`.

    Raises:
      PromptError: If it is longer than the engine serves.
    """
    handle = SimulatedHandle(on_token=on_token)
    row = ServedRow(
      prompt=prompt,
      most=new_tokens,
      priority=priority,
      arrival=float(self._arrivals),
      salt=salt,
      owner=handle,
    )
    why = self.scheduler.fits(row)
    if row.longest > self.longest:
      why = f"{self.longest:,} tokens of a row at most"
    if why is not None:
      raise PromptError(
        "prompt",
        f"{prompt.size:,} tokens and {new_tokens:,} new ones",
        why,
        "ask for fewer, or pass a larger longest=, capacity=",
      )
    self._arrivals += 1
    self.scheduler.add(row)
    return handle

  def step(self) -> bool:
    """Simulates a step and returns whether there is more to do."""
    plan = self.scheduler.plan()
    for row in plan.admitted:
      if not row.preemptions:
        row.owner.cached_tokens += row.hit
    for row in plan.preempted:
      row.owner.preemptions += 1
    previous, self._flying = self._flying, None
    if not plan.empty:
      self.steps += 1
      self.prompt_tokens += sum(piece.count for piece in plan.pieces)
      # The device starts a step once it is dispatched and the last one is done.
      self._device = max(self.now, self._device) + self.cost.seconds(plan)
      self._flying = plan, self._device
    if previous is not None:
      self.now = max(self.now, previous[1])
      for turn in previous[0].turns:
        if turn.chooses:
          self._append_token(turn.row)
      for piece in previous[0].pieces:
        if piece.chooses:
          self._append_token(piece.row)
    return self.busy

  def _append_token(self, row: ServedRow) -> None:
    """Append one token (its id does not matter) to a row."""
    if row.ended:
      return
    handle: SimulatedHandle = row.owner
    row.answer.append(0)
    handle.tokens += 1
    handle.done = handle.tokens >= row.most
    if handle.done:
      self.scheduler.drop(row)
    if handle.on_token is not None:
      handle.on_token(self.now, handle.done)


# ---------------------------------------------------------------------------
# Traces
# ---------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class ReplayResult:
  """Counts and latencies of a replayed trace.

  Attributes:
    requests: Number of requests that were answered.
    refused: Number of requests that were longer than the engine serves.
    prompt_tokens: Number of prompt tokens.
    cached_tokens: Number of prompt tokens whose keys were cached.
    new_tokens: Number of tokens of the answers.
    preemptions: Number of times that a row had to make room.
    steps: Number of steps of the engine.
    seconds: Seconds from the first arrival to the last token.
    first_s: Seconds from arrivals to first tokens (TTFT).
    between_s: Seconds between tokens of an answer.
    whole_s: Seconds from arrivals to last tokens.
    token_s: Mean seconds between two tokens, for each answer of several tokens
      (TPOT).
  """

  requests: int = 0
  refused: int = 0
  prompt_tokens: int = 0
  cached_tokens: int = 0
  new_tokens: int = 0
  preemptions: int = 0
  steps: int = 0
  seconds: float = 0.0
  first_s: array.array[float] = dataclasses.field(
    default_factory=lambda: array.array("d")
  )
  between_s: array.array[float] = dataclasses.field(
    default_factory=lambda: array.array("d")
  )
  whole_s: array.array[float] = dataclasses.field(
    default_factory=lambda: array.array("d")
  )
  token_s: array.array[float] = dataclasses.field(
    default_factory=lambda: array.array("d")
  )

  def watch(self, arrival: float) -> Callable[[float, bool], None]:
    """Callback for each token of a request that came at `arrival`."""
    first = last = -1.0
    count = 0

    def token(now: float, ended: bool) -> None:
      nonlocal first, last, count
      if last < 0:
        self.first_s.append(now - arrival)
        first = now
      else:
        self.between_s.append(now - last)
      last, count = now, count + 1
      self.new_tokens += 1
      if ended:
        self.whole_s.append(now - arrival)
        if count > 1:
          self.token_s.append((now - first) / (count - 1))
        self.seconds = max(self.seconds, now)

    return token

  def summary(self) -> dict[str, Any]:
    """Counts, rates, and the percentiles 50, 90 and 99 of latencies."""
    figures: dict[str, Any] = {
      name: getattr(self, name)
      for name in (
        "requests",
        "refused",
        "prompt_tokens",
        "cached_tokens",
        "new_tokens",
        "preemptions",
        "steps",
        "seconds",
      )
    }
    figures["hit_rate"] = self.cached_tokens / max(1, self.prompt_tokens)
    figures["new_tokens_per_s"] = self.new_tokens / max(1e-9, self.seconds)
    figures["requests_per_s"] = self.requests / max(1e-9, self.seconds)
    for name in ("first_s", "between_s", "whole_s"):
      values = np.asarray(getattr(self, name))
      points = (
        np.percentile(values, (50, 90, 99)) if values.size else [None] * 3
      )
      figures[name] = {
        f"p{p}": None if x is None else float(x)
        for p, x in zip((50, 90, 99), points, strict=True)
      }
    return figures


def replay_simulated(
  engine: SimulatedEngine,
  trace: Sequence[TraceRequest],
  *,
  progress: Callable[[int], None] | None = None,
) -> ReplayResult:
  """Replays a trace on a simulated engine.

  Args:
    engine: Unused engine.
    trace: Requests in the order of arrivals.
    progress: Called with the number of requests that have come.
  """
  result, handles, n, idle = ReplayResult(), [], 0, 0
  while n < len(trace) or engine.busy:
    if not engine.busy:
      engine.now = max(engine.now, trace[n].arrival)
    while n < len(trace) and trace[n].arrival <= engine.now:
      request, n = trace[n], n + 1
      try:
        handle = engine.submit(
          request.prompt(),
          request.new_tokens,
          on_token=result.watch(request.arrival),
        )
      except PromptError:
        result.refused += 1
        continue
      handles.append(handle)
      result.prompt_tokens += request.prompt_tokens
      if progress is not None:
        progress(n)
    steps_before = engine.steps
    engine.step()
    idle = 0 if engine.steps > steps_before else idle + 1
    if idle > _IDLE:
      raise RuntimeError(f"{idle} steps without anything to compute")
  result.requests, result.steps = len(handles), engine.steps
  result.cached_tokens = sum(h.cached_tokens for h in handles)
  result.preemptions = sum(h.preemptions for h in handles)
  return result


def replay_live(
  engine: Engine,
  trace: Sequence[TraceRequest],
  *,
  progress: Callable[[int], None] | None = None,
  idle: Callable[[int], None] | None = None,
  clock: Callable[[], float] = time.monotonic,
) -> ReplayResult:
  """Replays a trace on an engine in real time, open loop.

  Args:
    engine: Engine that was not started, whose programs are compiled.
    trace: Requests in the order of arrivals.
    progress: Called with the number of requests that have come.
    idle: Called with the number of requests that have come, whenever all of
      them are answered and the next one has not come; its time does not
      count.
    clock: Clock in seconds. With `time.process_time`, CPU seconds of this
      process, arrivals are times of that clock and no call sleeps until them:
      time that other processes take does not count.
  """
  result, handles, n = ReplayResult(), [], 0
  steps, start = engine.counters.steps, clock()
  spent = lambda: clock() - start
  # Draw the prompts before: this is not part of an engine's work.
  prompts = [item.prompt(engine.vocab) for item in trace]

  def watched(arrival: float) -> Callable[[Answer], None]:
    token, seen = result.watch(arrival), 0

    def changed(answer: Answer) -> None:
      nonlocal seen
      if len(answer.tokens) > seen:
        seen += 1
        token(spent(), answer.finish is not None)

    return changed

  while n < len(trace) or engine.busy:
    while n < len(trace) and trace[n].arrival <= spent():
      item, n = trace[n], n + 1
      request = Request(prompt=prompts[n - 1], max_new_tokens=item.new_tokens)
      try:
        handles.append(engine.submit(request, watched(item.arrival)))
      except PromptError:
        result.refused += 1
        continue
      result.prompt_tokens += item.prompt_tokens
      if progress is not None:
        progress(n)
    if engine.busy:
      engine.step()
    elif n < len(trace):
      if idle is not None:
        since, steps_before = clock(), engine.counters.steps
        idle(n)
        start += clock() - since
        steps += engine.counters.steps - steps_before
      wait_s = max(0.0, trace[n].arrival - spent())
      if clock is time.monotonic:
        time.sleep(min(0.01, wait_s))
      else:
        # At least by a step that float rounding does not swallow.
        start -= max(wait_s, 1e-12)
  result.requests = len(handles)
  result.steps = engine.counters.steps - steps
  result.cached_tokens = sum(h.cached_tokens for h in handles)
  result.preemptions = sum(h.preemptions for h in handles)
  return result


def measure_cost(
  engine: Engine, *, requests: int = 0, seed: int = 0
) -> StepCost:
  """Measure and fit the cost of an engine's steps.

  Args:
    engine: Engine that was not started and has no requests.
    requests: Number of requests to send, twice (the first time to compile); 0
      means two for each row.
    seed: Random seed of prompts.

  Raises:
    OptionError: If the engine is busy.
  """
  if engine.busy:
    raise OptionError(
      "engine", "one that is busy", "one with nothing to do", "run it first"
    )
  rng = np.random.default_rng(seed)
  count = requests or 2 * engine.scheduler.limits.rows
  tree = engine.scheduler.tree
  room = tree.groups[0].pages * tree.shards
  max_tokens = min(engine.longest, room * tree.page)

  def send() -> None:
    for n in range(count):
      # Prompts of many lengths, and answers that end at different steps.
      size = int(max(1, max_tokens * (n + 1) / count * 0.75))
      new = max(1, min(max_tokens - size, 8 + 2 * n))
      prompt = rng.integers(0, engine.vocab, size).astype(np.int32)
      engine.submit(Request(prompt=prompt, max_new_tokens=new, share=False))

  send()
  engine.run()
  send()
  record = StepRecord()
  with record_steps(engine, record):
    engine.run()
  return record.fit()

"""An engine without a model: its scheduler and its pages, a clock, and a cost.

Guarantees: for the same requests, submitted before the same steps, the plans
are those of an engine: it is the same scheduler over the same tree, and rows
end when the engine's do, one step after their last token was planned.
Cost: some hundred microseconds of Python a step, so an hour of a service takes
minutes.

A step takes so long as `StepCost` says, which is measured on an engine or
given; or, with `VaryingCost`, as much longer or shorter as measured steps did.
Answers end by their length alone.
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
from ringjax.serve.prefix_tree import GroupSpec, PrefixTree
from ringjax.serve.request import Answer, Request
from ringjax.serve.scheduler import (
  Scheduler,
  ServedRow,
  StepLimits,
  StepPlan,
)
from ringjax.serve.traces import TraceRequest

_T = TypeVar("_T")
# Steps that a trace may take without a token, before it is taken for stuck.
_IDLE = 1000

# What a step's time is made of, by the attributes of `StepCost`.
StepFeatures = tuple[float, float, float, float, float, float, float]


def features(plan: StepPlan) -> StepFeatures:
  """What a step's time is made of, see `StepCost`."""
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
  """Seconds of a step: of its two calls, their tokens, the keys they look at.

  Answers and prompts have constants of their own: reading keys and weights
  bounds the one, products the other.

  Attributes:
    answers: of a step with a call for answers.
    prompts: of a step with a call for prompts.
    row: for each token of answers, one each but for drafts.
    token: for each token of prompts.
    key: for each key that an answer looks at.
    pair: for each token of prompts and key that it looks at.
    step: of any step: what both calls share, the host's work for example.
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
    """Of a step."""
    return self.of(features(plan))

  def of(self, step: StepFeatures) -> float:
    """Of a step, by its `features`."""
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

    Of steps with calls of the same kinds it is their mean time that counts, not
    each one's own: on a machine that others use the short ones are not truer.
    The sum of all times is explained exactly.

    Args:
      steps: the `features` of n steps, [n, 7].
      seconds: of each, [n].

    Raises:
      OptionError: fewer than 8 steps.
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
    # None may be negative: the most negative one is left out.
    while use:
      found = np.linalg.lstsq(scaled[:, use], times * weights, rcond=None)[0]
      if found.min() >= 0:
        best[use] = found
        break
      use.pop(int(found.argmin()))
    best *= times.sum() / (rows @ best).sum()
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**dict(zip(names, best.tolist(), strict=True)))

  @classmethod
  def parse(cls, text: str) -> StepCost:
    """The cost of a text like answers=0.01,prompts=0.02,token=1e-5.

    Raises:
      OptionError: it is none.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    try:
      pairs = [part.split("=") for part in text.split(",")]
      given = {name.strip(): float(value) for name, value in pairs}
      if len(given) == len(pairs) and set(given) <= set(names):
        return cls(**given)
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
  """What a simulated engine asks of a step: a `StepCost`, for example."""

  def seconds(self, plan: StepPlan) -> float:
    """Of a step."""
    ...


class VaryingCost:
  """A cost whose steps vary as those did that it was fitted to.

  Other processes, the system's clock and its memory make steps of one kind
  unequal, in stretches; late requests are late for their sake. The ratios of
  measured times to fitted ones come in the order in which they were measured,
  for each kind of step (answers, prompts or both), and then from the beginning.
  Make one for each run.

  Attributes:
    cost: of a step on average.
  """

  def __init__(self, cost: StepCost, record: StepRecord):
    """Without steps.

    Args:
      cost: that was fitted to the record.
      record: of measured steps.
    """
    self.cost = cost
    ratios: dict[tuple[float, ...], list[float]] = collections.defaultdict(list)
    for step, seconds in zip(record.steps, record.seconds, strict=True):
      ratios[step[:2]].append(seconds / cost.of(step))
    self._ratios = {kind: itertools.cycle(x) for kind, x in ratios.items()}

  def seconds(self, plan: StepPlan) -> float:
    """Of a step; kinds that were not measured do not vary."""
    step = features(plan)
    ratios = self._ratios.get(step[:2])
    return self.cost.of(step) * (1.0 if ratios is None else next(ratios))


@dataclasses.dataclass(kw_only=True)
class StepRecord:
  """Steps of an engine and how long they took.

  Attributes:
    steps: the `features` of each.
    seconds: from when the host could plan it until it knew its tokens, less
      the step before.
  """

  steps: list[StepFeatures] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)

  def fit(self) -> StepCost:
    """The cost that explains them, see `StepCost.fit`."""
    return StepCost.fit(self.steps, self.seconds)


@contextlib.contextmanager
def watch_steps(
  engine: Engine,
  summary: Callable[[StepPlan], _T],
  told: Callable[[_T, float], None],
  *,
  clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
  """Tells of an engine's steps and how long they took, in a block.

  A step's seconds are from when the host could plan it until it knew its
  tokens, less the step before; one on its way when the block ends is left out.

  Args:
    engine: one whose programs are compiled.
    summary: of a plan that is not empty, which changes later.
    told: is called with it and the seconds, by the thread that steps.
    clock: seconds, see `replay_live`.
  """
  scheduler = engine.scheduler
  plan_of, step_of = scheduler.plan, engine.step
  # The step on its way and since when: it ends when the next call has read it.
  flying: tuple[_T, float] | None = None
  planned: list[_T] = []

  def plan() -> StepPlan:
    found = plan_of()
    if not found.empty:
      planned.append(summary(found))
    return found

  def step() -> bool:
    nonlocal flying
    planned.clear()
    start = clock()
    more = step_of()
    end, before = clock(), flying
    flying = None
    if planned:
      flying = planned[-1], start if before is None else end
    if before is not None:
      told(before[0], end - before[1])
    return more

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
  """Adds an engine's steps to a record, in a block.

  Args:
    engine: one whose programs are compiled.
    record: to which they are added.
    clock: seconds, see `replay_live`.
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
    tokens: that were made.
    cached_tokens: of its prompt, that were found.
    preemptions: how often it had to make room.
    done: whether it has ended.
    on_token: called with the time of each token, and whether it is the last.
  """

  on_token: Callable[[float, bool], None] | None = None
  tokens: int = 0
  cached_tokens: int = 0
  preemptions: int = 0
  done: bool = False


class SimulatedEngine:
  """An engine whose steps take the time that they would.

  Attributes:
    now: seconds, as the host knows them.
    scheduler: rows and pages.
    steps: that computed something.
    prompt_tokens: that were computed.
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
      cost: of a step.
      rows, capacity, longest, page, piece, pieces, budget, share: as `Engine`.
      shards: of the pages.
      victim: which row is preempted first; see `Scheduler`.

    Raises:
      OptionError: a value is out of its range.
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
    """One whose pages and calls are those of an engine, empty.

    Rows that are preempted are computed again, as an engine does with
    preempt="recompute".

    Args:
      engine: the engine.
      cost: of a step.
    """
    own = engine.scheduler
    tree = PrefixTree(own.tree.groups, own.tree.page, shards=own.tree.shards)
    made = object.__new__(cls)
    share = "prompts" if own.reuse else "nothing"
    made._begin(
      cost, engine.longest, tree, own.limits, own.share_answers, share, None
    )
    return made

  @property
  def busy(self) -> bool:
    """Whether there is something to do."""
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
    """Takes a request.

    Args:
      prompt: int32 [n].
      new_tokens: of its answer.
      priority: requests with a smaller one come first.
      salt: as of `Request`.
      on_token: see `SimulatedHandle`.

    Raises:
      PromptError: it is longer than the engine serves.
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
    """Does what a step of an engine does; whether there is more to do."""
    plan = self.scheduler.plan()
    for row in plan.admitted:
      if not row.preemptions:
        row.owner.cached_tokens += row.hit
    for row in plan.preempted:
      row.owner.preemptions += 1
    before, self._flying = self._flying, None
    if not plan.empty:
      self.steps += 1
      self.prompt_tokens += sum(piece.count for piece in plan.pieces)
      # The device begins when it is told to, or has done what was before.
      self._device = max(self.now, self._device) + self.cost.seconds(plan)
      self._flying = plan, self._device
    if before is not None:
      self.now = max(self.now, before[1])
      for turn in before[0].turns:
        if turn.chooses:
          self._append_token(turn.row)
      for piece in before[0].pieces:
        if piece.chooses:
          self._append_token(piece.row)
    return self.busy

  def _append_token(self, row: ServedRow) -> None:
    """One token of a row, whichever."""
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
  """What became of a trace.

  Attributes:
    requests: that were answered.
    refused: that were longer than the engine serves.
    prompt_tokens: of the prompts.
    cached_tokens: of these, that were found.
    new_tokens: of the answers.
    preemptions: rows that had to make room.
    steps: of the engine.
    seconds: from the first arrival to the last token.
    first_s: from arrivals to first tokens.
    between_s: between tokens of an answer.
    whole_s: from arrivals to last tokens.
    token_s: of each answer of several tokens the time between two, on average
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
    """What to call at each token of a request that came at `arrival`."""
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
    """Figures: counts, rates, and 50, 90 and 99 of 100 times."""
    found: dict[str, Any] = {
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
    found["hit_rate"] = self.cached_tokens / max(1, self.prompt_tokens)
    found["new_tokens_per_s"] = self.new_tokens / max(1e-9, self.seconds)
    found["requests_per_s"] = self.requests / max(1e-9, self.seconds)
    for name in ("first_s", "between_s", "whole_s"):
      values = np.asarray(getattr(self, name))
      points = (
        np.percentile(values, (50, 90, 99)) if values.size else [None] * 3
      )
      found[name] = {
        f"p{p}": None if x is None else float(x)
        for p, x in zip((50, 90, 99), points, strict=True)
      }
    return found


def replay_simulated(
  engine: SimulatedEngine,
  trace: Sequence[TraceRequest],
  *,
  progress: Callable[[int], None] | None = None,
) -> ReplayResult:
  """Lets a simulated engine answer a trace.

  Args:
    engine: an unused one.
    trace: in the order of arrivals.
    progress: called with how many requests have come.
  """
  result, handles, n, idle = ReplayResult(), [], 0, 0
  while n < len(trace) or engine.busy:
    if not engine.busy:
      engine.now = max(engine.now, trace[n].arrival)
    while n < len(trace) and trace[n].arrival <= engine.now:
      one, n = trace[n], n + 1
      try:
        handle = engine.submit(
          one.prompt(), one.new_tokens, on_token=result.watch(one.arrival)
        )
      except PromptError:
        result.refused += 1
        continue
      handles.append(handle)
      result.prompt_tokens += one.prompt_tokens
      if progress is not None:
        progress(n)
    before = engine.steps
    engine.step()
    idle = 0 if engine.steps > before else idle + 1
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
  """Lets an engine answer a trace in real time, open loop.

  Args:
    engine: one without a thread of its own, whose programs are compiled.
    trace: in the order of arrivals.
    progress: as `replay_simulated`.
    idle: called with how many requests have come, whenever all of them are
      answered and the next one is yet to come; the clock stands meanwhile.
    clock: seconds. With `time.process_time`, those in which this process had a
      core, requests come at such times, and nothing waits for them: what other
      processes take away does not count.
  """
  result, handles, n = ReplayResult(), [], 0
  steps, start = engine.counters.steps, clock()
  spent = lambda: clock() - start
  # They are drawn ahead: that is no work of an engine.
  prompts = [one.prompt(engine.vocab) for one in trace]

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
      one, n = trace[n], n + 1
      request = Request(prompt=prompts[n - 1], max_new_tokens=one.new_tokens)
      try:
        handles.append(engine.submit(request, watched(one.arrival)))
      except PromptError:
        result.refused += 1
        continue
      result.prompt_tokens += one.prompt_tokens
      if progress is not None:
        progress(n)
    if engine.busy:
      engine.step()
    elif n < len(trace):
      if idle is not None:
        since, before = clock(), engine.counters.steps
        idle(n)
        start += clock() - since
        steps += engine.counters.steps - before
      left = max(0.0, trace[n].arrival - spent())
      if clock is time.monotonic:
        time.sleep(min(0.01, left))
      else:
        # By no less than what rounding hides.
        start -= max(left, 1e-12)
  result.requests = len(handles)
  result.steps = engine.counters.steps - steps
  result.cached_tokens = sum(h.cached_tokens for h in handles)
  result.preemptions = sum(h.preemptions for h in handles)
  return result


def measure_cost(
  engine: Engine, *, requests: int = 0, seed: int = 0
) -> StepCost:
  """The cost of an engine's steps, measured: about as many as rows, twice.

  Args:
    engine: one without a thread, and with nothing to do.
    requests: how many are sent; 0 for two for each row.
    seed: random seed of prompts.

  Raises:
    OptionError: the engine is busy.
  """
  if engine.busy:
    raise OptionError(
      "engine", "one that is busy", "one with nothing to do", "run it first"
    )
  rng = np.random.default_rng(seed)
  count = requests or 2 * engine.scheduler.limits.rows
  tree = engine.scheduler.tree
  room = tree.groups[0].pages * tree.shards
  most = min(engine.longest, room * tree.page)

  def send() -> None:
    for n in range(count):
      # Prompts of many lengths; answers that end one after another.
      size = int(max(1, most * (n + 1) / count * 0.75))
      new = max(1, min(most - size, 8 + 2 * n))
      prompt = rng.integers(0, engine.vocab, size).astype(np.int32)
      engine.submit(Request(prompt=prompt, max_new_tokens=new, share=False))

  send()
  engine.run()
  send()
  record = StepRecord()
  with record_steps(engine, record):
    engine.run()
  return record.fit()

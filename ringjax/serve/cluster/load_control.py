"""When sequences start that attend beside their caches, and on how many CPUs.

Guarantees: a schedule is a pure function of the starts before it; the tokens
that all sequences have cached never exceed the limit that was set when the
last of them started.
Cost: O(n log S) for a start among n groups under way.

A group of m sequences with P tokens of prompts in all that starts at step t and
takes S steps has P + m (u - t + 1) tokens cached at step u. The sum over all
groups falls only behind their ends, so its peaks are at the ends E[j]; W[j] is
the sum there. A start at step t adds P + m (E[j] - t + 1) to W[j], so that the
earliest one is

  max_j ( E[j] + 1 - floor((W_lim - W[j] - P) / m) ),

or behind E[j] where that is later. B sequences without prompts that start
together reach B S. In groups of B F / S, one each F steps, they never exceed
B (S + F) / 2; prompts of p tokens each add B p. The paper counts none.

The products of a step (the weights' part, T(B) seconds a layer for B rows) and
attention (R seconds a cached token and layer, on P CPUs) take turns at two
mini-batches. They are level where T(B) = B S R / (2 P), hence
P = S R E(B) / 2 with E(B) = B / T(B) rows a second; and an answer takes
2 N S T(B) seconds on N layers.
Ref: He and Zhai 2024, FastDecode, arXiv 2403.11421.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError
from ringjax.plan.events import Op, Simulator, Timeline

WEIGHTS, WORKERS = "weights", "workers"


# ---------------------------------------------------------------------------
# Starts
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLimit:
  """The tokens that all sequences together may have cached.

  A limit that is the same from step 0 on lets groups start at once until it is
  reached; these then end at once too. `level` is one that rises as fast as
  groups come that start one each F steps.

  Attributes:
    tokens: the limit in the end, W_lim.
    first: the limit at step 0; None: `tokens`.
    rising: (S, F) of the groups by which it rises, or None.
    prompts: how much of the rise is prompts', which come evenly.
  """

  tokens: int
  first: int | None = None
  rising: tuple[int, int] | None = None
  prompts: int = 0

  def __post_init__(self) -> None:
    positive_int("tokens", self.tokens)
    if self.first is not None:
      integer("first", self.first, least=1, most=self.tokens)
    rise = self.tokens - (self.tokens if self.first is None else self.first)
    integer("prompts", self.prompts, least=0, most=rise)

  @classmethod
  def level(
    cls, rows: int, steps: int, every: int, *, prompt: int = 0
  ) -> TokenLimit:
    """B (S + F) / 2 + B p, risen to in S - F steps from the first group's need.

    Args:
      rows: B, sequences under way.
      steps: S, tokens of an answer.
      every: F, steps from a start to the next.
      prompt: p, tokens of the longest prompt.
    """
    integer("prompt", prompt, least=0)
    group = group_rows(rows, steps, every)
    return cls(
      tokens=level_peak(rows, steps, every) + rows * prompt,
      first=group * (steps + prompt),
      rising=(steps, every),
      prompts=(rows - group) * prompt,
    )

  @property
  def rise_steps(self) -> int:
    """Steps in which the limit rises."""
    return 0 if self.rising is None else self.rising[0] - self.rising[1]

  def at(self, step: int) -> int:
    """The limit for a start at a step."""
    if self.first is None or self.rising is None or step >= self.rise_steps:
      return self.tokens
    # What the first group will see at its end, of groups that started by now.
    steps, every = self.rising
    part = step * (2 * steps - every - step)
    made = self.tokens - self.first - self.prompts
    return (
      self.first
      + made * part // (steps * (steps - every))
      + self.prompts * step // (steps - every)
    )


def group_rows(rows: int, steps: int, every: int) -> int:
  """B F / S, the sequences of a group of which one starts each F steps.

  Raises:
    OptionError: they are no whole number, or F is more than S.
  """
  positive_int("rows", rows)
  positive_int("steps", steps)
  integer("every", every, least=1, most=steps)
  if rows * every % steps:
    raise OptionError(
      "every",
      f"{every} of {steps} steps, for {rows} rows",
      "rows x every divisible by steps, so that groups are equal",
      f"pass every={steps // math.gcd(rows, steps)} or a multiple of it",
    )
  return rows * every // steps


def level_peak(rows: int, steps: int, every: int) -> int:
  """B (S + F) / 2, the most tokens that are cached with a start each F steps.

  The arguments are those of `TokenLimit.level`; S is a multiple of F.
  """
  group = group_rows(rows, steps, every)
  if steps % every:
    raise OptionError(
      "every", every, f"a divisor of the {steps} steps", "pass one"
    )
  return group * sum(range(every, steps + 1, every))


@dataclasses.dataclass(frozen=True)
class SequenceGroup:
  """Sequences that start and end together.

  Attributes:
    rows: how many.
    start: the step of their first token.
    steps: tokens that are generated for each.
    prompts: tokens of the prompts of all of them together.
  """

  rows: int
  start: int
  steps: int
  prompts: int = 0

  @property
  def end(self) -> int:
    """The step of their last token."""
    return self.start + self.steps - 1

  def tokens(self, step: int) -> int:
    """That they have cached at a step."""
    if not self.start <= step <= self.end:
      return 0
    return self.prompts + self.rows * (step - self.start + 1)


class LoadControl:
  """Says when the next sequences may start, and remembers those that did.

  Attributes:
    limit: of the tokens.
    groups: those under way at the last start, as they started.
  """

  def __init__(self, limit: TokenLimit | int):
    """Begins with no sequence.

    Args:
      limit: of all tokens that are cached, those of prompts too; an int is the
        same at all steps.
    """
    if not isinstance(limit, TokenLimit):
      limit = TokenLimit(tokens=limit)
    self.limit = limit
    self.groups: list[SequenceGroup] = []
    # The tokens cached at the end of each group.
    self._at_end: list[int] = []

  def tokens(self, step: int) -> int:
    """That all groups have cached at a step."""
    return sum(group.tokens(step) for group in self.groups)

  def check(self, rows: int, steps: int, *, prompts: int = 0) -> None:
    """Refuses sequences that could never start.

    The arguments are those of `earliest`.

    Raises:
      OptionError: they exceed the limit by themselves.
    """
    positive_int("rows", rows)
    positive_int("steps", steps)
    integer("prompts", prompts, least=0)
    if prompts + rows * steps > self.limit.tokens:
      beside = f" and {prompts} of prompts" if prompts else ""
      raise OptionError(
        "rows",
        f"{rows} x {steps} tokens{beside}",
        f"at most the limit of {self.limit.tokens}",
        "start fewer sequences at once, or raise the limit",
      )

  def earliest(
    self, rows: int, steps: int, now: int = 0, *, prompts: int = 0
  ) -> int:
    """The first step from `now` on at which sequences may start.

    Args:
      rows: how many, m.
      steps: tokens that are generated for each, S.
      now: the step that comes next.
      prompts: tokens of all their prompts together, P.

    Raises:
      OptionError: they exceed the limit by themselves.
    """
    self.check(rows, steps, prompts=prompts)
    integer("now", now, least=0)
    need = lambda start: SequenceGroup(rows, start, steps, prompts)
    first = now
    while True:
      later = first
      for one, held in zip(self.groups, self._at_end, strict=True):
        # Others have not begun at this end, or are over.
        if first <= one.end < first + steps:
          later = max(later, self._from(one.end, held, need(first)))
      if later == first:
        later = self._own(need(first))
      if later == first:
        return first
      first = later

  def start(
    self, rows: int, steps: int, now: int = 0, *, prompts: int = 0
  ) -> int:
    """Starts sequences as early as they may; returns the step.

    The arguments are those of `earliest`.
    """
    at = self.earliest(rows, steps, now, prompts=prompts)
    self.add(SequenceGroup(rows, at, steps, prompts))
    return at

  def add(self, group: SequenceGroup) -> None:
    """Notes sequences that start, whether the limit allows it or not.

    Groups that have ended before this start are forgotten.
    """
    kept = [
      (one, held + group.tokens(one.end))
      for one, held in zip(self.groups, self._at_end, strict=True)
      if one.end >= group.start
    ]
    own = group.tokens(group.end) + sum(
      one.tokens(group.end) for one, _ in kept
    )
    self.groups = [one for one, _ in kept] + [group]
    self._at_end = [held for _, held in kept] + [own]

  def _from(self, end: int, held: int, group: SequenceGroup) -> int:
    """The first step from which a start fits at the end of another group."""
    # Later starts add less, and the limit does not fall.
    room = lambda t: self.limit.at(t) - held - group.prompts
    enough = lambda t: t >= end + 1 - room(t) // group.rows
    steps = range(group.start, end + 1)
    return group.start + bisect.bisect_left(steps, True, key=enough)

  def _own(self, group: SequenceGroup) -> int:
    """The group's start if it fits at its own end, else a later step."""
    first, end = group.start, group.end
    if group.tokens(end) + self.tokens(end) <= self.limit.at(first):
      return first
    if first < self.limit.rise_steps:
      return first + 1
    # Behind the end of a group that is in the way.
    return min(g.end + 2 - group.steps for g in self.groups if g.end >= end)


def staggered_starts(
  rows: int, steps: int, every: int, count: int
) -> list[SequenceGroup]:
  """`count` groups of B F / S sequences, one each F steps."""
  group = group_rows(rows, steps, every)
  positive_int("count", count)
  return [SequenceGroup(group, n * every, steps) for n in range(count)]


def joint_starts(rows: int, steps: int, count: int) -> list[SequenceGroup]:
  """`count` batches of B sequences that start together, one behind another."""
  positive_int("count", count)
  return [SequenceGroup(rows, n * steps, steps) for n in range(count)]


def loads(groups: Sequence[SequenceGroup]) -> Iterator[tuple[int, int]]:
  """Of each step the rows under way and the tokens that they have cached."""
  for step in range(max((g.end for g in groups), default=-1) + 1):
    now = [g for g in groups if g.start <= step <= g.end]
    yield sum(g.rows for g in now), sum(g.tokens(step) for g in now)


# ---------------------------------------------------------------------------
# Two stages
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes:
  """Seconds of the two parts of a layer.

  Attributes:
    fixed_s: of the weights' part, whatever the rows: the weights are read.
    row_s: of the weights' part, for each row.
    token_s: R, of a cached token on one CPU.
    layers: N.
  """

  fixed_s: int | float
  row_s: int | float
  token_s: int | float
  layers: int = 1

  def __post_init__(self) -> None:
    number("fixed_s", self.fixed_s, least=0)
    number("row_s", self.row_s, above=0)
    number("token_s", self.token_s, above=0)
    positive_int("layers", self.layers)

  def weights_s(self, rows: int) -> float:
    """T(B), the weights' part of a layer for a mini-batch; 0 for no row."""
    return float(self.fixed_s + self.row_s * rows) if rows else 0.0

  def rate(self, rows: int) -> float:
    """E(B) = B / T(B), rows a second."""
    return rows / self.weights_s(rows)

  def attention_s(self, tokens: int | float, cpus: int) -> float:
    """Attention of a layer over the cached tokens of a mini-batch."""
    return float(self.token_s * tokens / cpus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlan:
  """How many rows and CPUs a machine with weights is given.

  Attributes:
    rows: B, of one of the two mini-batches.
    cpus: P.
    balanced_cpus: S R E(B) / 2, before it is rounded up and memory is asked.
    answer_s: 2 N S T(B), seconds of an answer.
    tokens_s: tokens a second of both mini-batches together.
    tokens: cached at most by both, B (S + F) for 2 B rows.
    bound: "latency" or "rate", what limits the rows; and "memory" where it
      asks for more CPUs than attention does.
  """

  rows: int
  cpus: int
  balanced_cpus: float
  answer_s: float
  tokens_s: float
  tokens: int
  bound: str


def choose_workers(
  times: StageTimes,
  steps: int,
  *,
  answer_s: int | float,
  cpu_tokens: int | None = None,
  every: int = 1,
  gain: int | float = 0.1,
  most_rows: int = 65_536,
) -> WorkerPlan:
  """Rows of a mini-batch and CPUs, for answers of `steps` tokens.

  Rows double until that gains less than `gain` of the rate E(B), or an answer
  would take too long; then the most rows that the limit allows are taken, at
  most as many as the last doubling.

  Args:
    times: of the two parts.
    steps: S, tokens of a sequence.
    answer_s: the longest time of an answer.
    cpu_tokens: that the memory of a CPU holds in all layers; None: any number.
      Both mini-batches count.
    every: F, steps from a start to the next.
    gain: what a doubling of the rows has to gain of the rate, above 0.
    most_rows: of a mini-batch.

  Raises:
    OptionError: one row takes longer than that.
  """
  positive_int("steps", steps)
  number("gain", gain, above=0)
  number("answer_s", answer_s, above=0)
  takes = lambda rows: 2 * times.layers * steps * times.weights_s(rows)
  if takes(1) > answer_s:
    raise OptionError(
      "answer_s",
      f"{answer_s:g} s, where one row takes {takes(1):g} s",
      "at least as long",
      "allow more time, or ask for shorter answers",
    )
  rows, bound = 1, "rate"
  while rows < most_rows:
    more = min(2 * rows, most_rows)
    if takes(more) > answer_s:
      rows += bisect.bisect_left(
        range(rows + 1, more + 1), True, key=lambda n: takes(n) > answer_s
      )
      bound = "latency"
      break
    if times.rate(more) < (1 + gain) * times.rate(rows):
      break
    rows = more
  balanced = steps * times.token_s * times.rate(rows) / 2
  cpus = max(1, math.ceil(balanced - 1e-9))
  tokens = rows * (steps + every)
  if cpu_tokens is not None:
    positive_int("cpu_tokens", cpu_tokens)
    need = -(-tokens // cpu_tokens)
    if need > cpus:
      cpus, bound = need, f"{bound} and memory"
  slower = max(times.weights_s(rows), times.attention_s(tokens / 2, cpus))
  return WorkerPlan(
    rows=rows,
    cpus=cpus,
    balanced_cpus=float(balanced),
    answer_s=float(takes(rows)),
    tokens_s=rows / (slower * times.layers),
    tokens=tokens,
    bound=bound,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOutcome:
  """Two mini-batches, simulated.

  Attributes:
    seconds: of all steps.
    tokens: that were made.
    peak_tokens: cached at most, by both mini-batches.
    weights_busy: part of the time in which the weights' part ran.
    workers_busy: part of the time in which attention ran.
    timeline: of the operations.
  """

  seconds: float
  tokens: int
  peak_tokens: int
  weights_busy: float
  workers_busy: float
  timeline: Timeline

  @property
  def tokens_s(self) -> float:
    """Tokens a second."""
    return self.tokens / self.seconds


def simulate_stages(
  times: StageTimes,
  cpus: int,
  halves: tuple[Sequence[SequenceGroup], Sequence[SequenceGroup]],
  *,
  first_step: int = 0,
) -> StageOutcome:
  """Runs two mini-batches through the two stages, layer by layer.

  Each mini-batch takes its own steps: products of a layer, attention, the next
  layer. A stage does one thing at a time.

  Args:
    times: of the two parts.
    cpus: P.
    halves: the groups of each mini-batch; their steps are its own.
    first_step: what runs before is not counted, for instance while the first
      groups fill the caches.

  Raises:
    OptionError: no step is left to count.
  """
  positive_int("cpus", cpus)
  run = Simulator()
  weights, workers = run.device(WEIGHTS), run.device(WORKERS)
  made = peak = 0
  by_half = [list(loads(groups)) for groups in halves]
  counted: list[Op] = []
  begin: list[Op] = []
  last: list[list[Op]] = [[], []]
  count = max(map(len, by_half))
  if count <= first_step:
    raise OptionError(
      "first_step", first_step, f"fewer than the {count} steps", "pass less"
    )
  for step in range(count):
    at = [half[step] if step < len(half) else (0, 0) for half in by_half]
    if step >= first_step:
      made += sum(rows for rows, _ in at)
    peak = max(peak, sum(tokens for _, tokens in at))
    for layer in range(times.layers):
      for half, (rows, tokens) in enumerate(at):
        if not rows:
          continue
        name = f"{step}.{layer}.{half}"
        one = run.op(
          name, weights, times.weights_s(rows), after=last[half], kind=WEIGHTS
        )
        two = run.op(
          name,
          workers,
          times.attention_s(tokens, cpus),
          after=[one],
          kind=WORKERS,
        )
        last[half] = [two]
        if step >= first_step:
          counted += [one, two]
          begin.append(one)
  timeline = run.run()
  start = min(timeline[op].start_s for op in begin)
  end = max(timeline[op].end_s for op in counted)
  spent = float(end - start)
  busy = dict.fromkeys((WEIGHTS, WORKERS), 0.0)
  for op in counted:
    span = timeline[op]
    busy[span.where] += span.end_s - span.start_s
  return StageOutcome(
    seconds=spent,
    tokens=made,
    peak_tokens=peak,
    weights_busy=busy[WEIGHTS] / spent,
    workers_busy=busy[WORKERS] / spent,
    timeline=timeline,
  )


def swept_cpus(
  times: StageTimes,
  rows: int,
  steps: int,
  every: int,
  candidates: Iterable[int],
) -> int:
  """The fewest CPUs with which the weights' stage never waits, by simulation.

  Args:
    times: of the two parts.
    rows: B, of a mini-batch.
    steps: S.
    every: F.
    candidates: numbers of CPUs.

  Returns:
    the smallest of them with a rate within 0.1 % of the largest one's.
  """
  # Two turns of all groups: the first fills the caches.
  groups = staggered_starts(rows, steps, every, 2 * steps // every)
  alone = dataclasses.replace(times, layers=1)

  def rate(cpus: int) -> float:
    found = simulate_stages(
      alone, cpus, (groups, groups), first_step=steps - every
    )
    return found.tokens_s

  found = {n: rate(n) for n in sorted(set(candidates))}
  best = max(found.values())
  return next(n for n, x in found.items() if x >= 0.999 * best)

"""Start times of sequences under a token limit, and a choice of CPUs.

For engines whose attention runs on CPUs next to the caches (FastDecode).
Guarantees: a schedule is a pure function of the starts before it; the total of
cached tokens never exceeds the limit that was set when the last sequence
started.
Cost: O(n log S) for a start with n groups running.

A group of m sequences with P prompt tokens in all that starts at step t and
takes S steps has P + m (u - t + 1) tokens cached at step u. The sum over all
groups falls only after their ends, so its peaks are at the ends E[j]; W[j] is
the sum there. A start at step t adds P + m (E[j] - t + 1) to W[j], so that the
earliest one is

  max_j ( E[j] + 1 - floor((W_lim - W[j] - P) / m) ),

or after E[j] where that is later. B sequences without prompts that start
together reach B S tokens. In groups of B F / S, one every F steps, they never
exceed B (S + F) / 2; prompts of p tokens each add B p. The paper counts none.

The products of a step (with the weights, T(B) seconds a layer for B rows) and
attention (R seconds per cached token and layer, on P CPUs) alternate between
two mini-batches. They are balanced where T(B) = B S R / (2 P), hence
P = S R E(B) / 2 with E(B) = B / T(B) rows a second; and an answer takes
2 N S T(B) seconds on N layers. With prompts of p tokens a row has S / 2 + p
tokens cached on average, so that P = (S / 2 + p) R E(B).
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
# Start times
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLimit:
  """Limit of the tokens that all sequences together may have cached.

  A limit that is constant from step 0 on lets groups start at once until it is
  reached; these then end at once, too. `level` makes a limit that rises at the
  pace of groups that start one every F steps.

  Attributes:
    tokens: Final limit, W_lim.
    first: Limit at step 0; None for `tokens`.
    rising: (S, F) of the groups by which it rises, or None.
    prompts: Part of the rise for prompts, which come evenly.
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
    """Limit of B (S + F) / 2 + B p that rises from the first group's need.

    Args:
      rows: B, number of running sequences.
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
    """Number of steps in which the limit rises."""
    return 0 if self.rising is None else self.rising[0] - self.rising[1]

  def at(self, step: int) -> int:
    """Limit for a start at a step."""
    if self.first is None or self.rising is None or step >= self.rise_steps:
      return self.tokens
    # Tokens at the first group's end of all groups that have started by now.
    steps, every = self.rising
    part = step * (2 * steps - every - step)
    risen_tokens = self.tokens - self.first - self.prompts
    return (
      self.first
      + risen_tokens * part // (steps * (steps - every))
      + self.prompts * step // (steps - every)
    )


def group_rows(rows: int, steps: int, every: int) -> int:
  """B F / S, the sequences of a group if one group starts every F steps.

  Raises:
    OptionError: If that is not a whole number, or F is more than S.
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
  """B (S + F) / 2, the peak of cached tokens with a start every F steps.

  The arguments are those of `TokenLimit.level`; S must be a multiple of F.
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
    rows: Number of sequences.
    start: Step of their first token.
    steps: Number of tokens generated for each.
    prompts: Total prompt tokens of all sequences.
  """

  rows: int
  start: int
  steps: int
  prompts: int = 0

  @property
  def end(self) -> int:
    """Step of their last token."""
    return self.start + self.steps - 1

  def tokens(self, step: int) -> int:
    """Number of tokens that they have cached at a step."""
    if not self.start <= step <= self.end:
      return 0
    return self.prompts + self.rows * (step - self.start + 1)


class LoadControl:
  """Computes when the next sequences may start, from those that have started.

  Attributes:
    limit: Limit of the cached tokens.
    groups: Groups that ran at the last start, in the order of their starts.
  """

  def __init__(self, limit: TokenLimit | int):
    """Begin without sequences.

    Args:
      limit: Limit of all cached tokens, including prompts; an int is a constant
        limit.
    """
    if not isinstance(limit, TokenLimit):
      limit = TokenLimit(tokens=limit)
    self.limit = limit
    self.groups: list[SequenceGroup] = []
    # Total of cached tokens at the end of each group.
    self._end_tokens: list[int] = []

  def tokens(self, step: int) -> int:
    """Total number of tokens cached at a step."""
    return sum(group.tokens(step) for group in self.groups)

  def check(self, rows: int, steps: int, *, prompts: int = 0) -> None:
    """Check that sequences can ever start.

    The arguments are those of `earliest`.

    Raises:
      OptionError: If they exceed the limit by themselves.
    """
    positive_int("rows", rows)
    positive_int("steps", steps)
    integer("prompts", prompts, least=0)
    if prompts + rows * steps > self.limit.tokens:
      prompts_text = f" and {prompts} of prompts" if prompts else ""
      raise OptionError(
        "rows",
        f"{rows} x {steps} tokens{prompts_text}",
        f"at most the limit of {self.limit.tokens}",
        "start fewer sequences at once, or raise the limit",
      )

  def earliest(
    self, rows: int, steps: int, now: int = 0, *, prompts: int = 0
  ) -> int:
    """First step from `now` on at which sequences may start.

    Args:
      rows: Number of sequences, m.
      steps: Number of tokens generated for each, S.
      now: Next step.
      prompts: Total tokens of their prompts, P.

    Raises:
      OptionError: If they exceed the limit by themselves.
    """
    self.check(rows, steps, prompts=prompts)
    integer("now", now, least=0)
    need = lambda start: SequenceGroup(rows, start, steps, prompts)
    first = now
    while True:
      next_start = first
      for running, cached in zip(self.groups, self._end_tokens, strict=True):
        # Otherwise the start is after this end, or the sequences end before it.
        if first <= running.end < first + steps:
          next_start = max(
            next_start, self._first_fit(running.end, cached, need(first))
          )
      if next_start == first:
        next_start = self._own_start(need(first))
      if next_start == first:
        return first
      first = next_start

  def start(
    self, rows: int, steps: int, now: int = 0, *, prompts: int = 0
  ) -> int:
    """Start sequences as early as possible; return the step.

    The arguments are those of `earliest`.
    """
    step = self.earliest(rows, steps, now, prompts=prompts)
    self.add(SequenceGroup(rows, step, steps, prompts))
    return step

  def add(self, group: SequenceGroup) -> None:
    """Record sequences that start, whether the limit allows it or not.

    Groups that have ended before this start are forgotten.
    """
    running = [
      (earlier, cached + group.tokens(earlier.end))
      for earlier, cached in zip(self.groups, self._end_tokens, strict=True)
      if earlier.end >= group.start
    ]
    end_tokens = group.tokens(group.end) + sum(
      earlier.tokens(group.end) for earlier, _ in running
    )
    self.groups = [earlier for earlier, _ in running] + [group]
    self._end_tokens = [cached for _, cached in running] + [end_tokens]

  def _first_fit(self, end: int, cached: int, group: SequenceGroup) -> int:
    """First step from which a start fits at the end of another group."""
    # Later starts add fewer tokens, and the limit never falls.
    room = lambda start: self.limit.at(start) - cached - group.prompts
    enough = lambda start: start >= end + 1 - room(start) // group.rows
    steps = range(group.start, end + 1)
    return group.start + bisect.bisect_left(steps, True, key=enough)

  def _own_start(self, group: SequenceGroup) -> int:
    """The group's start if it fits at its own end, else a later step."""
    first, end = group.start, group.end
    if group.tokens(end) + self.tokens(end) <= self.limit.at(first):
      return first
    if first < self.limit.rise_steps:
      return first + 1
    # After the end of a group that is in the way.
    return min(
      running.end + 2 - group.steps
      for running in self.groups
      if running.end >= end
    )


def staggered_starts(
  rows: int, steps: int, every: int, count: int, *, prompt: int = 0
) -> list[SequenceGroup]:
  """Make `count` groups of B F / S sequences, one every F steps.

  Each sequence has a prompt of `prompt` tokens.
  """
  group = group_rows(rows, steps, every)
  positive_int("count", count)
  prompts = group * integer("prompt", prompt, least=0)
  return [SequenceGroup(group, n * every, steps, prompts) for n in range(count)]


def joint_starts(
  rows: int, steps: int, count: int, *, prompt: int = 0
) -> list[SequenceGroup]:
  """Make `count` batches of B sequences, each after the end of the last.

  Each sequence has a prompt of `prompt` tokens.
  """
  positive_int("count", count)
  prompts = rows * integer("prompt", prompt, least=0)
  return [SequenceGroup(rows, n * steps, steps, prompts) for n in range(count)]


def loads(groups: Sequence[SequenceGroup]) -> Iterator[tuple[int, int]]:
  """Yield each step's number of rows and of their cached tokens."""
  for step in range(max((group.end for group in groups), default=-1) + 1):
    current = [group for group in groups if group.start <= step <= group.end]
    yield (
      sum(group.rows for group in current),
      sum(group.tokens(step) for group in current),
    )


# ---------------------------------------------------------------------------
# Two-stage pipeline
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes:
  """Seconds of the two parts of a layer.

  Attributes:
    fixed_s: Seconds of the products for any number of rows: the weights are
      read.
    row_s: Seconds of the products for each row.
    token_s: R, seconds of attention for a cached token on one CPU.
    layers: N, number of layers.
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
    """T(B), seconds of a layer's products for a mini-batch; 0 without rows."""
    return float(self.fixed_s + self.row_s * rows) if rows else 0.0

  def rate(self, rows: int) -> float:
    """E(B) = B / T(B), rows a second."""
    return rows / self.weights_s(rows)

  def attention_s(self, tokens: int | float, cpus: int) -> float:
    """Seconds of a layer's attention over a mini-batch's cached tokens."""
    return float(self.token_s * tokens / cpus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlan:
  """Number of rows and of CPUs for a machine with weights.

  Attributes:
    rows: B, rows of one of the two mini-batches.
    cpus: P, number of CPUs.
    balanced_cpus: (S / 2 + p) R E(B), before rounding up and the memory's need.
    answer_s: 2 N S T(B), seconds of an answer.
    tokens_s: Tokens a second of both mini-batches together.
    tokens: Maximum tokens that both have cached, B (S + F + 2 p) for 2 B rows.
    bound: "latency" or "rate", what limits the rows; and "memory" where it
      needs more CPUs than attention does.
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
  prompt: int = 0,
  gain: int | float = 0.1,
  most_rows: int = 65_536,
) -> WorkerPlan:
  """Choose the rows of a mini-batch and the CPUs for answers of `steps` tokens.

  Rows double until that gains less than `gain` of the rate E(B), or an answer
  would take too long; then the most rows that the time limit allows are taken,
  at most as many as the last doubling.

  Args:
    times: Times of products and attention.
    steps: S, tokens of an answer.
    answer_s: Maximum seconds of an answer.
    cpu_tokens: Number of tokens that the memory of a CPU holds in all layers;
      None: any number. Both mini-batches count.
    every: F, steps from a start to the next.
    prompt: p, tokens of a prompt, which are cached beside those of its answer.
    gain: Relative gain of the rate that a doubling of the rows must reach,
      above 0.
    most_rows: Maximum rows of a mini-batch.

  Raises:
    OptionError: If one row already takes longer than `answer_s`.
  """
  positive_int("steps", steps)
  integer("prompt", prompt, least=0)
  number("gain", gain, above=0)
  number("answer_s", answer_s, above=0)
  answer_time = lambda rows: 2 * times.layers * steps * times.weights_s(rows)
  if answer_time(1) > answer_s:
    raise OptionError(
      "answer_s",
      f"{answer_s:g} s, where one row takes {answer_time(1):g} s",
      "at least as long",
      "allow more time, or ask for shorter answers",
    )
  rows, bound = 1, "rate"
  while rows < most_rows:
    doubled = min(2 * rows, most_rows)
    if answer_time(doubled) > answer_s:
      rows += bisect.bisect_left(
        range(rows + 1, doubled + 1),
        True,
        key=lambda n: answer_time(n) > answer_s,
      )
      bound = "latency"
      break
    if times.rate(doubled) < (1 + gain) * times.rate(rows):
      break
    rows = doubled
  balanced = (steps / 2 + prompt) * times.token_s * times.rate(rows)
  cpus = max(1, math.ceil(balanced - 1e-9))
  tokens = rows * (steps + every + 2 * prompt)
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
    answer_s=float(answer_time(rows)),
    tokens_s=rows / (slower * times.layers),
    tokens=tokens,
    bound=bound,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOutcome:
  """Result of a simulation of two mini-batches.

  Attributes:
    seconds: Duration of all steps.
    tokens: Number of generated tokens.
    peak_tokens: Maximum tokens that both mini-batches had cached.
    weights_busy: Share of the time in which products ran.
    workers_busy: Share of the time in which attention ran.
    timeline: Timeline of the operations.
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
  """Simulate two mini-batches in the two stages, layer by layer.

  Each mini-batch takes its own steps: products of a layer, attention, the next
  layer. A stage does one operation at a time.

  Args:
    times: Times of products and attention.
    cpus: P, number of CPUs.
    halves: Groups of each mini-batch; their steps are the mini-batch's own.
    first_step: First step that counts: earlier steps, in which the first
      groups fill the caches, for instance, are left out.

  Raises:
    OptionError: If no step is left to count.
  """
  positive_int("cpus", cpus)
  run = Simulator()
  weights, workers = run.device(WEIGHTS), run.device(WORKERS)
  num_tokens = peak = 0
  by_half = [list(loads(groups)) for groups in halves]
  counted: list[Op] = []
  first_ops: list[Op] = []
  last: list[list[Op]] = [[], []]
  count = max(map(len, by_half))
  if count <= first_step:
    raise OptionError(
      "first_step", first_step, f"fewer than the {count} steps", "pass less"
    )
  for step in range(count):
    step_loads = [
      half[step] if step < len(half) else (0, 0) for half in by_half
    ]
    if step >= first_step:
      num_tokens += sum(rows for rows, _ in step_loads)
    peak = max(peak, sum(tokens for _, tokens in step_loads))
    for layer in range(times.layers):
      for half, (rows, tokens) in enumerate(step_loads):
        if not rows:
          continue
        name = f"{step}.{layer}.{half}"
        products = run.op(
          name, weights, times.weights_s(rows), after=last[half], kind=WEIGHTS
        )
        attention = run.op(
          name,
          workers,
          times.attention_s(tokens, cpus),
          after=[products],
          kind=WORKERS,
        )
        last[half] = [attention]
        if step >= first_step:
          counted += [products, attention]
          first_ops.append(products)
  timeline = run.run()
  start = min(timeline[op].start_s for op in first_ops)
  end = max(timeline[op].end_s for op in counted)
  spent = float(end - start)
  busy = dict.fromkeys((WEIGHTS, WORKERS), 0.0)
  for op in counted:
    span = timeline[op]
    busy[span.resource] += span.end_s - span.start_s
  return StageOutcome(
    seconds=spent,
    tokens=num_tokens,
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
  *,
  prompt: int = 0,
) -> int:
  """Fewest CPUs with which the products never wait, found by simulation.

  Args:
    times: Times of products and attention.
    rows: B, rows of a mini-batch.
    steps: S, tokens of a sequence.
    every: F, steps from a start to the next.
    candidates: Numbers of CPUs.
    prompt: p, tokens of a prompt.

  Returns:
    The smallest of them with a rate within 0.1 % of the largest one's.
  """
  # Each group runs twice: the first time fills the caches.
  groups = staggered_starts(
    rows, steps, every, 2 * steps // every, prompt=prompt
  )
  one_layer_times = dataclasses.replace(times, layers=1)

  def rate(cpus: int) -> float:
    outcome = simulate_stages(
      one_layer_times, cpus, (groups, groups), first_step=steps - every
    )
    return outcome.tokens_s

  rates = {n: rate(n) for n in sorted(set(candidates))}
  best = max(rates.values())
  return next(n for n, value in rates.items() if value >= 0.999 * best)

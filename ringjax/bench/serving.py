"""Serving: a trace against an engine or its simulator, and two comparisons.

  replay   requests come when they came in a trace's file (--trace), or by
           chance (--rate); --engine=live answers them with a model in real
           time, --engine=simulated lets only the clock run.
  --compare=sequential  as many requests as there are rows, at once by an engine
           and one after the other by rj.infer.generate, in turn; the ratio of
           the medians.

A simulated step costs what --cost says, or else what steps of the live engine
cost on this machine, which is measured first.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import ringjax as rj
from ringjax.bench import harness, timing
from ringjax.bench.harness import BenchmarkSettings, option
from ringjax.errors import OptionError

# What `rj.serve` needs is imported when something runs: it takes a second.
if TYPE_CHECKING:
  from ringjax.serve import Engine, ReplayResult, TraceRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(BenchmarkSettings):
  """The trace, the engine, and what is compared.

  Attributes:
    engine: live or simulated.
    trace: a file; None for arrivals by chance.
    rate: requests a second by chance, or inf.
    speed: how many times faster than in the file requests come.
    shrink: by what the lengths of the file are divided.
    requests: how many, of the file the first ones; None for all.
    prompt_tokens: on average, by chance.
    new_tokens: the same of answers.
    shared_tokens: that all prompts begin with, by chance.
    model: a folder; None for a small one that ships.
    rows, capacity, longest, page, piece, pieces, budget, share: of the engine.
    cost: of a simulated step, see `rj.serve.StepCost`; None to measure it.
    compare: what with.
    rounds: of a comparison.
  """

  engine: str = option("simulated", ("live", "simulated"))
  trace: str | None = option(None, ())
  rate: str = option("4", ())
  speed: str = option("1", ())
  shrink: int = option(1)
  requests: int | None = option(None)
  prompt_tokens: int = option(256)
  new_tokens: int = option(64)
  shared_tokens: int | None = option(None)
  model: str | None = option(None, ())
  rows: int = option(16)
  capacity: int | None = option(None)
  longest: int | None = option(None)
  page: int = option(32)
  piece: int = option(64)
  pieces: int = option(4)
  budget: int | None = option(None)
  share: str = option("prompts", ("prompts", "answers", "nothing"))
  cost: str | None = option(None, ())
  compare: str | None = option(None, ("sequential",))
  rounds: int = option(5)

  def __post_init__(self) -> None:
    super().__post_init__()
    _positive("rate", self.rate)
    _positive("speed", self.speed)
    if self.cost is not None:
      rj.serve.StepCost.parse(self.cost)
    for got, want, wrong in (
      ("compare and trace", "one of them", self.compare and self.trace),
      ("cost and engine=live", "engine=simulated",
       self.cost and self.engine == "live"),
    ):  # fmt: skip
      if wrong:
        raise OptionError("flags", got, want, "leave one out")


def _positive(name: str, text: str) -> float:
  try:
    found = float(text)
  except ValueError:
    found = math.nan
  if not found > 0 or (name != "rate" and found == math.inf):
    raise OptionError(
      name, repr(text), "a number above 0", f"pass --{name}=2.5"
    )
  return found


class ServeBenchmark:
  """Replays a trace, or compares an engine with what one would do without."""

  name = "serve"
  options = ServeSettings
  quick = ServeSettings(
    requests=8, prompt_tokens=48, new_tokens=8, longest=256, rate="inf"
  )
  files = ("json", "plot")

  @staticmethod
  def run(
    settings: ServeSettings,
    *,
    command: str = "",
    json: str | None = None,
    plot: str | None = None,
    say: Callable[[str], Any] = print,
  ) -> dict[str, Any]:
    """All figures, which are also written and drawn.

    Args:
      settings: what to do.
      command: the command line, for the record.
      json: file for the result.
      plot: PNG of how many requests waited how long.
      say: prints a line.

    Raises:
      OptionError: a value is out of its range, or a file cannot be read.
    """
    result = timing.environment(command)
    result["settings"] = dataclasses.asdict(settings)
    if settings.compare is not None:
      if plot is not None:
        raise OptionError(
          "plot", "--compare", "a replay", "leave --plot or --compare out"
        )
      result |= _compared(settings, say)
    else:
      found, more = _replayed(settings, say)
      result |= more | found.summary()
      for line in table(result):
        say(line)
      if plot is not None:
        draw(found, plot)
    if json is not None:
      timing.write_json(json, result)
    return result


def requests_of(settings: ServeSettings) -> list[TraceRequest]:
  """The requests of a file, or by chance."""
  count = settings.requests
  if settings.trace is None:
    return rj.serve.poisson_trace(
      rate=_positive("rate", settings.rate),
      requests=64 if count is None else count,
      prompt_tokens=settings.prompt_tokens,
      new_tokens=settings.new_tokens,
      shared_tokens=settings.shared_tokens or 0,
    )
  speed = _positive("speed", settings.speed)
  found = rj.serve.read_trace(settings.trace)[:count]
  return [
    dataclasses.replace(
      one.shrunk(settings.shrink), arrival=one.arrival / speed
    )
    for one in found
  ]


def _sizes(
  settings: ServeSettings, trace: Sequence[TraceRequest]
) -> dict[str, Any]:
  """Options of an engine that are left out: as large as the trace needs."""
  longest = settings.longest
  if longest is None:
    longest = max(r.prompt_tokens + r.new_tokens for r in trace)
  capacity = settings.capacity
  if capacity is None:
    capacity = min(max(65536, longest), settings.rows * longest)
  names = ("rows", "page", "piece", "pieces", "budget", "share")
  found = {name: getattr(settings, name) for name in names}
  return found | {
    "longest": longest,
    "capacity": max(capacity, settings.page),
  }


def _engine(settings: ServeSettings, sizes: dict[str, Any]) -> Engine:
  from ringjax.models import small

  folder = small.path() if settings.model is None else settings.model
  return rj.serve.Engine(rj.models.load(folder), **sizes)


def _replayed(
  settings: ServeSettings, say: Callable[[str], Any]
) -> tuple[ReplayResult, dict[str, Any]]:
  """Replays: the result, and entries of the record."""
  trace = requests_of(settings)
  sizes = _sizes(settings, trace)
  progress = timing.Progress(len(trace), sys.stderr)
  shown = lambda n: progress.at(n, "requests")
  start, more = time.perf_counter(), {"engine": sizes}
  live = settings.engine == "live"
  if live:
    engine = _engine(settings, sizes)
    _warm(engine)
    found = rj.serve.replay_live(engine, trace, progress=shown)
  else:
    if settings.cost is not None:
      cost = rj.serve.StepCost.parse(settings.cost)
    else:
      # Of a step, not of a trace: a smaller pool has the same calls.
      most = min(sizes["longest"], 2048)
      less = {"longest": most, "capacity": most * settings.rows}
      cost = rj.serve.measure_cost(_engine(settings, sizes | less))
    more["cost"] = dataclasses.asdict(cost)
    shown_cost = ",".join(f"{k}={v:.3g}" for k, v in more["cost"].items())
    say(f"cost of a step: {shown_cost}")
    simulated = rj.serve.SimulatedEngine(cost, **sizes)
    start = time.perf_counter()
    found = rj.serve.replay_simulated(simulated, trace, progress=shown)
  progress.clear()
  return found, more | {"took_s": time.perf_counter() - start}


def _warm(engine: Engine) -> None:
  engine.submit(rj.serve.Request(prompt=[0], max_new_tokens=2, share=False))
  engine.run()


def table(result: dict[str, Any]) -> list[str]:
  """Lines for people, of a replay."""
  times = lambda name: "  ".join(
    f"{p} {1000 * x:,.1f}" if x is not None else f"{p} -"
    for p, x in result[name].items()
  )
  return [
    f"{result['settings']['engine']}: {result['requests']:,} requests, "
    f"{result['refused']:,} refused; {result['seconds']:,.1f} s"
    + (f", simulated in {result['took_s']:,.1f} s"
       if "cost" in result else ""),
    f"new tokens/s        {result['new_tokens_per_s']:,.1f}",
    f"first token, ms     {times('first_s')}",
    f"between tokens, ms  {times('between_s')}",
    f"whole answer, ms    {times('whole_s')}",
    f"hit rate            {result['hit_rate']:.1%} of "
    f"{result['prompt_tokens']:,} tokens",
    f"preemptions         {result['preemptions']:,} in "
    f"{result['steps']:,} steps",
  ]  # fmt: skip


def draw(found: ReplayResult, path: str) -> None:
  """Draws which part of the requests waited at most so long."""
  drawn = harness.figure(8, 3.2)
  for at, (name, title) in enumerate(
    (("first_s", "first token"), ("between_s", "between tokens")), 1
  ):
    ax = drawn.add_subplot(1, 2, at)
    values = np.sort(np.asarray(getattr(found, name)))
    if values.size > 1000:
      values = np.quantile(values, np.linspace(0, 1, 1001))
    ax.step(values, np.linspace(0, 1, values.size), where="post")
    ax.set_xscale("log")
    ax.set_xlabel("seconds")
    ax.set_ylabel("part of all")
    harness.tidy(ax, title)
  harness.save(drawn, path)


def _compared(
  settings: ServeSettings, say: Callable[[str], Any]
) -> dict[str, Any]:
  """All requests at once, and one after the other."""
  count = settings.rows if settings.requests is None else settings.requests
  # All at once: nobody waits for an arrival.
  now = dataclasses.replace(settings, rate="inf", requests=count)
  trace = requests_of(now)
  engine = _engine(settings, _sizes(settings, trace) | {"share": "nothing"})
  prompts = [one.prompt(engine.vocab) for one in trace]
  answers: dict[str, list[list[int]]] = {}

  def at_once() -> None:
    handles = [
      engine.submit(
        rj.serve.Request(prompt=prompt, max_new_tokens=one.new_tokens)
      )
      for prompt, one in zip(prompts, trace, strict=True)
    ]
    engine.run()
    answers["engine"] = [h.result().tokens.tolist() for h in handles]

  def sequential() -> None:
    answers["sequential"] = [
      rj.infer.generate(engine.model, [prompt], max_new_tokens=one.new_tokens)[
        0
      ].tolist()
      for prompt, one in zip(prompts, trace, strict=True)
    ]

  found = timing.timed(
    {"engine": at_once, "sequential": sequential}, settings.rounds
  )
  if answers["engine"] != answers["sequential"]:
    # Argmaxes may differ where two logits are within rounding.
    same = [a == b for a, b in zip(*answers.values(), strict=True)]
    say(f"{sum(same)} of {count} answers are equal")
  rows = {name: harness.timing_row(one) for name, one in found.items()}
  times = {name: float(row["median_s"]) for name, row in rows.items()}
  tokens = sum(one.new_tokens for one in trace)
  ratio = times["sequential"] / times["engine"]
  say(
    f"{count} requests, {tokens:,} new tokens, {settings.rounds} rounds on "
    f"{jax.devices()[0].device_kind}"
  )
  for name, seconds in times.items():
    say(f"{name:12} {seconds:8.3f} s  {tokens / seconds:10,.1f} tokens/s")
  say(f"sequential / engine, of medians: {ratio:.2f}")
  return {
    "compared": rows,
    "ratio": ratio,
    "equal": answers["engine"] == answers["sequential"],
    "new_tokens": tokens,
    "spread": {
      name: statistics.pstdev(one.seconds) for name, one in found.items()
    },
  }

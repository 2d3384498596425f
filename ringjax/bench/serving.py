"""Serving: a trace against an engine or its simulator, and comparisons.

  replay   requests come when they came in a trace's file (--trace), or by
           chance (--rate); --engine=live answers them with a model in real
           time, --engine=simulated lets only the clock run.
  --compare=sequential  as many requests as there are rows, at once by an engine
           and one after the other by rj.infer.generate, in turn; the ratio of
           the medians.
  --compare=transformers  the same beside transformers' continuous batching:
           one folder, float32, the same cores. PyTorch has a thread for each
           core, and as "transformers_1" one: where others take a core away its
           threads wait for each other. The better of the two counts.
  --compare=simulated  a trace, live and in the simulators of an engine and of a
           cluster, whose costs are measured beside it on other requests;
           --rounds times, medians of TTFT and TPOT. See `agreement`.
  --compare=plain  an engine with --speculate beside one without, on prompts of
           the six kinds of `launch.bench speculate`.

A simulated step costs what --cost says, or else what steps of the live engine
cost on this machine, which is measured first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import ringjax as rj
from ringjax.bench import harness, speculation_tasks, timing
from ringjax.bench.agreement import SIDES, compare_simulators
from ringjax.bench.continuous_batching import (
  TransformersServer,
  import_transformers,
)
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
    spread: standard deviation of the logs of lengths by chance; 0 for equal
      lengths.
    model: a folder, or a preset, which has random weights; None for a small
      model that ships.
    layers: whether equal layers are a loop or unrolled, see `rj.models.load`.
    rows, capacity, longest, page, piece, pieces, budget, share, speculate: of
      the engine.
    cost: of a simulated step, see `rj.serve.StepCost`; None to measure it.
    compare: what with; "plain" is an engine without drafts, for prompts whose
      answers repeat what is there, see `speculation_tasks`.
    clock: of --compare=simulated: "wall", or "cpu", the time in which the
      process had a core, where others use the machine.
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
  spread: str = option("0.5", ())
  model: str | None = option(None, ())
  layers: str = option("loop", ("loop", "unrolled"))
  rows: int = option(16)
  capacity: int | None = option(None)
  longest: int | None = option(None)
  page: int = option(32)
  piece: int = option(64)
  pieces: int = option(4)
  budget: int | None = option(None)
  share: str = option("prompts", ("prompts", "answers", "nothing"))
  speculate: str | None = option(None, ())
  cost: str | None = option(None, ())
  compare: str | None = option(
    None, ("sequential", "transformers", "plain", "simulated")
  )
  clock: str = option("wall", ("wall", "cpu"))
  rounds: int = option(5)

  def __post_init__(self) -> None:
    super().__post_init__()
    _number("rate", self.rate)
    _number("speed", self.speed)
    _number("spread", self.spread)
    if self.cost is not None:
      rj.serve.StepCost.parse(self.cost)
    for got, want, wrong in (
      ("compare and trace", "one of them",
       self.compare not in (None, "simulated") and self.trace),
      ("cost and engine=live", "engine=simulated",
       self.cost and self.engine == "live"),
      ("cost and compare=simulated", "one of them",
       self.cost and self.compare == "simulated"),
      ("new_tokens=1 and compare=simulated", "new_tokens=2 or more",
       self.new_tokens == 1 and self.compare == "simulated"
       and not self.trace),
      ("clock", "--compare=simulated with it",
       self.clock != "wall" and self.compare != "simulated"),
      ("speculate and a simulated engine", "engine=live, or a comparison",
       self.speculate and self.engine != "live"
       and self.compare in (None, "simulated")),
    ):  # fmt: skip
      if wrong:
        raise OptionError("flags", got, want, "leave one out")


def _number(name: str, text: str) -> float:
  """A rate, which may be endless; a spread, which may be 0; or a speed."""
  try:
    found = float(text)
  except ValueError:
    found = math.nan
  least = found >= 0 if name == "spread" else found > 0
  if not least or (name != "rate" and found == math.inf):
    wanted = "0 or more" if name == "spread" else "a number above 0"
    raise OptionError(name, repr(text), wanted, f"pass --{name}=2.5")
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
      work = _agreed_with if settings.compare == "simulated" else _compared
      result |= work(settings, say)
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


def requests_of(settings: ServeSettings, seed: int = 0) -> list[TraceRequest]:
  """The requests of a file, or by chance with a seed."""
  count = settings.requests
  if settings.trace is None:
    return rj.serve.poisson_trace(
      rate=_number("rate", settings.rate),
      requests=64 if count is None else count,
      prompt_tokens=settings.prompt_tokens,
      new_tokens=settings.new_tokens,
      shared_tokens=settings.shared_tokens or 0,
      spread=_number("spread", settings.spread),
      seed=seed,
    )
  speed = _number("speed", settings.speed)
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

  sizes = dict[str, Any]({"speculate": settings.speculate}) | sizes
  name, scan = settings.model, settings.layers == "loop"
  if name in rj.models.PRESETS:
    model = rj.models.create(name, scan=scan)
  else:
    model = rj.models.load(small.path() if name is None else name, scan=scan)
  return rj.serve.Engine(model, **sizes)


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


def _agreed_with(
  settings: ServeSettings, say: Callable[[str], Any]
) -> dict[str, Any]:
  """A trace live, beside what the simulators say of it."""
  if settings.trace is None:
    trace, other = requests_of(settings), requests_of(settings, seed=1)
  else:
    # Every second request is measured, the others are replayed.
    both = requests_of(settings)
    trace, other = both[::2], both[1::2]
    if not other:
      raise OptionError(
        "requests", "one", "two at least", "leave --requests out"
      )
  engine = _engine(settings, _sizes(settings, [*trace, *other]))
  total = settings.rounds * len(trace)
  progress = timing.Progress(total, sys.stderr)
  found = compare_simulators(
    engine,
    trace,
    other,
    rounds=settings.rounds,
    clock=time.process_time if settings.clock == "cpu" else time.monotonic,
    progress=lambda n, done: progress.at(n * len(trace) + done, "requests"),
  )
  progress.clear()
  say(
    f"{len(trace)} requests, {trace[-1].arrival:.0f} s, {settings.rounds} "
    f"rounds, {settings.clock} clock; costs of {len(other)} "
    "other requests, measured by turns"
  )
  for line in found.lines():
    say(line)
  return {
    "agreement": [dataclasses.asdict(one) for one in found.rounds],
    "worst": {side: found.worst(side) for side in SIDES[1:]},
    "load": found.load,
  }


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
  """All requests at once, beside what one would do without an engine."""
  assert settings.compare is not None
  if settings.compare == "transformers":
    import_transformers()
  count = settings.rows if settings.requests is None else settings.requests
  # All at once: nobody waits for an arrival.
  now = dataclasses.replace(settings, rate="inf", requests=count)
  trace = requests_of(now)
  sizes: dict[str, Any] = _sizes(settings, trace) | {"share": "nothing"}
  engine = _engine(settings, sizes)
  prompts = [one.prompt(engine.vocab) for one in trace]
  new = [one.new_tokens for one in trace]
  if settings.compare == "plain":
    kinds = itertools.cycle(speculation_tasks.KINDS)
    tokenizer: Any = rj.data.Bytes()
    if settings.model not in (None, *rj.models.PRESETS):
      tokenizer = rj.data.Tokenizer.load(settings.model)
    prompts = [
      speculation_tasks.prompt(next(kinds), tokenizer, one.size, seed)
      for seed, one in enumerate(prompts)
    ]
  answers: dict[str, list[list[int]]] = {}

  def at_once(engine: Engine = engine) -> list[list[int]]:
    handles = [
      engine.submit(rj.serve.Request(prompt=prompt, max_new_tokens=most))
      for prompt, most in zip(prompts, new, strict=True)
    ]
    engine.run()
    return [h.result().tokens.tolist() for h in handles]

  def sequential() -> list[list[int]]:
    one = functools.partial(rj.infer.generate, engine.model)
    return [
      one([prompt], max_new_tokens=most)[0].tolist()
      for prompt, most in zip(prompts, new, strict=True)
    ]

  cpu: dict[str, list[float]] = {}

  def run(name: str, call: Callable[[], list[list[int]]]) -> None:
    start = time.process_time()
    answers[name] = call()
    cpu.setdefault(name, []).append(time.process_time() - start)

  with contextlib.ExitStack() as stack:
    calls = {"engine": at_once, "sequential": sequential}
    if settings.compare == "plain":
      calls["plain"] = functools.partial(
        at_once, _engine(settings, sizes | {"speculate": None})
      )
      del calls["sequential"]
    if settings.compare == "transformers":
      del calls["sequential"]
      for name, server in stack.enter_context(
        _servers(engine, settings, prompts, new)
      ).items():
        calls[name] = functools.partial(server.answers, prompts, new)
    found = timing.timed(
      {name: functools.partial(run, name, x) for name, x in calls.items()},
      settings.rounds,
    )
  # All threads of the process; the first round is not timed.
  rows = {
    name: harness.timing_row(one)
    | {"cpu_s": statistics.median(cpu[name][-settings.rounds :])}
    for name, one in found.items()
  }
  times = {name: float(row["median_s"]) for name, row in rows.items()}
  mine = times.pop("engine")
  best = min(times, key=lambda name: times[name])
  agreed = [
    _agreed(a, b) for a, b in zip(answers["engine"], answers[best], strict=True)
  ]
  tokens, dtype = sum(new), str(engine.model.dtype)
  say(
    f"{count} requests, {tokens:,} new tokens, {settings.rounds} rounds on "
    f"{jax.devices()[0].device_kind}, {dtype}, {os.cpu_count()} cores"
  )
  for name, seconds in {"engine": mine, **times}.items():
    say(
      f"{name:14} {seconds:8.3f} s  {tokens / seconds:10,.1f} tokens/s  "
      f"{rows[name]['cpu_s']:8.3f} s of processor time"
    )
  say(f"{best} / engine, of medians: {times[best] / mine:.2f}")
  # Argmaxes may differ where two logits are within rounding.
  say(
    f"{sum(n == m for n, m in zip(agreed, new, strict=True))} of {count} "
    f"answers are equal, {sum(agreed) / tokens:.1%} of the tokens before the "
    "first that differs"
  )
  drafts = engine.counters
  if drafts.drafted:
    say(
      f"{drafts.accepted:,} of {drafts.drafted:,} drafted tokens were right; "
      f"{drafts.drafted_steps:,} steps with drafts, {drafts.plain_steps:,} "
      f"without: {engine.drafting}"
    )
  return {
    "compared": rows,
    "ratio": times[best] / mine,
    "dtype": dtype,
    "equal": agreed == new,
    "agreed": sum(agreed) / tokens,
    "new_tokens": tokens,
    "spread": {
      name: statistics.pstdev(one.seconds) for name, one in found.items()
    },
  }


@contextlib.contextmanager
def _servers(
  engine: Engine,
  settings: ServeSettings,
  prompts: Sequence[np.ndarray],
  new: Sequence[int],
) -> Iterator[dict[str, TransformersServer]]:
  """transformers with the engine's weights, with all threads and with one."""
  with contextlib.ExitStack() as stack:
    path = stack.enter_context(
      tempfile.TemporaryDirectory(prefix="ringjax-bench-")
    )
    folder = pathlib.Path(path) / "model"
    rj.models.save(engine.model, folder)
    lengths = [(p.size, n) for p, n in zip(prompts, new, strict=True)]
    found = {}
    for threads in {os.cpu_count() or 1, 1}:
      name = "transformers_1" if threads == 1 else "transformers"
      found[name] = TransformersServer(
        folder,
        lengths,
        rows=settings.rows,
        page=settings.page,
        threads=threads,
      )
      stack.callback(found[name].close)
    yield found


def _agreed(a: Sequence[int], b: Sequence[int]) -> int:
  """How many tokens two answers begin with alike."""
  differ = (n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
  return next(differ, len(a))

"""Serving: a trace against an engine or its simulator, and comparisons.

  replay   requests arrive at the times of a trace's file (--trace), or at
           random (--rate); --engine=live answers them with a model in real
           time, --engine=simulated simulates the time alone.
  --compare=sequential  as many requests as there are rows, at once by an engine
           and one after the other by rj.infer.generate, in turn; the ratio of
           the medians.
  --compare=transformers  the same requests with transformers' continuous
           batching: one folder, float32, the same cores. PyTorch has a thread
           for each core, and as "transformers_1" one: if another process takes
           a core, PyTorch's threads wait for each other. The better counts.
  --compare=simulated  a trace, live and in the simulators of an engine and of a
           cluster, whose costs are measured in turn with it on other requests;
           --rounds times, medians of TTFT and TPOT. See `agreement`.
  --compare=plain  an engine with --speculate and one without, on prompts of the
           six kinds of `launch.bench speculate`.
  --compare=generate  lone requests to an engine with room for --rows, next to
           rj.infer.generate: a prompt of 12 tokens, alone and next to other
           prompts, its answer of --new_tokens, and a prompt of --prompt_tokens.

A simulated step has the cost of --cost, or else that of the live engine's steps
on this machine, which is measured first.
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
from benchmarks.serving.agreement import SIDES, compare_simulators
from benchmarks.serving.continuous_batching import (
  TransformersServer,
  import_transformers,
)
from benchmarks.shared import harness
from benchmarks.shared.harness import BenchmarkSettings, option
from ringjax.bench import speculation_tasks, timing
from ringjax.errors import OptionError

# `rj.serve` is imported in a run: the import takes a second.
if TYPE_CHECKING:
  from ringjax.serve import Engine, ReplayResult, TraceRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(BenchmarkSettings):
  """Settings of the benchmark: trace, engine and comparison.

  Attributes:
    engine: "live" or "simulated".
    trace: File of a trace; None for random arrivals.
    rate: Random requests a second, or "inf".
    speed: Factor by which the arrivals of the file are sped up.
    shrink: Divisor of the lengths of the file.
    requests: Number of requests, the first ones of a file; None for all.
    prompt_tokens: Mean tokens of random prompts.
    new_tokens: Mean tokens of random answers.
    shared_tokens: Tokens that all random prompts begin with.
    spread: Standard deviation of the logs of random lengths; 0 for equal
      lengths.
    model: Folder, or preset with random weights; None for a small model that
      ships.
    layers: Whether equal layers are a loop or unrolled, see `rj.models.load`.
    rows, capacity, longest, page, piece, pieces, budget, share, speculate:
      Options of the engine.
    cost: Cost of a simulated step, see `rj.serve.StepCost`; None to measure it.
    compare: Alternative to compare with; "plain" is an engine without drafts,
      for prompts whose answers repeat their text, see `speculation_tasks`.
    clock: Clock of --compare=simulated: "wall", or "cpu", the time in which the
      process had a core, if others use the machine.
    rounds: Rounds of a comparison.
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
    None, ("sequential", "transformers", "plain", "simulated", "generate")
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
      ("compare=generate", "no flags of several requests with it",
       self.compare == "generate" and any(
         getattr(self, name) != getattr(ServeSettings, name)
         for name in ("requests", "rate", "share", "spread")
       )),
      ("speculate and compare=generate", "one of them",
       self.speculate and self.compare == "generate"),
      ("speculate and a simulated engine", "engine=live, or a comparison",
       self.speculate and self.engine != "live"
       and self.compare in (None, "simulated")),
    ):  # fmt: skip
      if wrong:
        raise OptionError("flags", got, want, "leave one out")


def _number(name: str, text: str) -> float:
  """Parses a rate, which may be inf, a spread, which may be 0, or a speed."""
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  in_range = value >= 0 if name == "spread" else value > 0
  if not in_range or (name != "rate" and value == math.inf):
    expected = "0 or more" if name == "spread" else "a number above 0"
    raise OptionError(name, repr(text), expected, f"pass --{name}=2.5")
  return value


class ServeBenchmark:
  """Replays a trace, or compares an engine with its alternatives."""

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
    """Runs the benchmark; returns, writes and draws all figures.

    Args:
      settings: Settings of the run.
      command: Command line, for the record.
      json: File for the result.
      plot: PNG of the distribution of waiting times.
      say: Function that prints a line.

    Raises:
      OptionError: If a value is out of range or a file cannot be read.
    """
    result = timing.environment(command)
    result["settings"] = dataclasses.asdict(settings)
    if settings.compare is not None:
      if plot is not None:
        raise OptionError(
          "plot", "--compare", "a replay", "leave --plot or --compare out"
        )
      work = {
        "simulated": _compare_with_simulators,
        "generate": _compare_lone_requests,
      }.get(settings.compare, _compare)
      result |= work(settings, say)
    else:
      replayed, extra = _replay(settings, say)
      result |= extra | replayed.summary()
      for line in table(result):
        say(line)
      if plot is not None:
        draw(replayed, plot)
    if json is not None:
      timing.write_json(json, result)
    return result


def requests_of(settings: ServeSettings, seed: int = 0) -> list[TraceRequest]:
  """Requests of a file, or random ones with a seed."""
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
  requests = rj.serve.read_trace(settings.trace)[:count]
  return [
    dataclasses.replace(
      request.shrunk(settings.shrink), arrival=request.arrival / speed
    )
    for request in requests
  ]


def _sizes(
  settings: ServeSettings, trace: Sequence[TraceRequest]
) -> dict[str, Any]:
  """Options of an engine; unset sizes are as large as the trace needs."""
  longest = settings.longest
  if longest is None:
    longest = max(r.prompt_tokens + r.new_tokens for r in trace)
  capacity = settings.capacity
  if capacity is None:
    capacity = min(max(65536, longest), settings.rows * longest)
  names = ("rows", "page", "piece", "pieces", "budget", "share")
  options = {name: getattr(settings, name) for name in names}
  return options | {
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


def _replay(
  settings: ServeSettings, say: Callable[[str], Any]
) -> tuple[ReplayResult, dict[str, Any]]:
  """Replays a trace; returns the result and entries of the record."""
  trace = requests_of(settings)
  sizes = _sizes(settings, trace)
  progress = timing.Progress(len(trace), sys.stderr)
  on_request = lambda n: progress.at(n, "requests")
  start, extra = time.perf_counter(), {"engine": sizes}
  live = settings.engine == "live"
  if live:
    engine = _engine(settings, sizes)
    _warm(engine)
    result = rj.serve.replay_live(engine, trace, progress=on_request)
  else:
    if settings.cost is not None:
      cost = rj.serve.StepCost.parse(settings.cost)
    else:
      # The cost of a step does not depend on the pool's size: use a small one.
      longest = min(sizes["longest"], 2048)
      smaller_sizes = {"longest": longest, "capacity": longest * settings.rows}
      cost = rj.serve.measure_cost(_engine(settings, sizes | smaller_sizes))
    extra["cost"] = dataclasses.asdict(cost)
    shown_cost = ",".join(f"{k}={v:.3g}" for k, v in extra["cost"].items())
    say(f"cost of a step: {shown_cost}")
    simulated = rj.serve.SimulatedEngine(cost, **sizes)
    start = time.perf_counter()
    result = rj.serve.replay_simulated(simulated, trace, progress=on_request)
  progress.clear()
  return result, extra | {"took_s": time.perf_counter() - start}


def _compare_with_simulators(
  settings: ServeSettings, say: Callable[[str], Any]
) -> dict[str, Any]:
  """Compares a live trace with the predictions of the simulators."""
  if settings.trace is None:
    trace, calibration = requests_of(settings), requests_of(settings, seed=1)
  else:
    # Every second request is measured, the others are replayed.
    requests = requests_of(settings)
    trace, calibration = requests[::2], requests[1::2]
    if not calibration:
      raise OptionError(
        "requests", "one", "two at least", "leave --requests out"
      )
  engine = _engine(settings, _sizes(settings, [*trace, *calibration]))
  total = settings.rounds * len(trace)
  progress = timing.Progress(total, sys.stderr)
  agreement = compare_simulators(
    engine,
    trace,
    calibration,
    rounds=settings.rounds,
    clock=time.process_time if settings.clock == "cpu" else time.monotonic,
    progress=lambda n, done: progress.at(n * len(trace) + done, "requests"),
  )
  progress.clear()
  say(
    f"{len(trace)} requests, {trace[-1].arrival:.0f} s, {settings.rounds} "
    f"rounds, {settings.clock} clock; costs of {len(calibration)} "
    "other requests, measured by turns"
  )
  for line in agreement.lines():
    say(line)
  return {
    "agreement": [dataclasses.asdict(figures) for figures in agreement.rounds],
    "worst": {side: agreement.worst(side) for side in SIDES[1:]},
    "load": agreement.load,
  }


def _compare_lone_requests(
  settings: ServeSettings, say: Callable[[str], Any]
) -> dict[str, Any]:
  """Compares lone requests to an engine with `generate`."""
  from benchmarks.serving.lone_requests import compare_with_generate

  # A trace of one request of the longest prompt.
  longest = dataclasses.replace(settings, compare=None, spread="0", requests=1)
  sizes = _sizes(settings, requests_of(longest)) | {"share": "nothing"}
  lone = compare_with_generate(
    _engine(settings, sizes),
    prompt_tokens=settings.prompt_tokens,
    new_tokens=settings.new_tokens,
    rounds=settings.rounds,
    say=say,
  )
  return {"lone": lone}


def _warm(engine: Engine) -> None:
  engine.submit(rj.serve.Request(prompt=[0], max_new_tokens=2, share=False))
  engine.run()


def table(result: dict[str, Any]) -> list[str]:
  """Lines of text that show the figures of a replay."""
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
  """Draws the cumulative distribution of waiting times."""
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


def _compare(
  settings: ServeSettings, say: Callable[[str], Any]
) -> dict[str, Any]:
  """Compares an engine that answers all requests with an alternative."""
  assert settings.compare is not None
  if settings.compare == "transformers":
    import_transformers()
  count = settings.rows if settings.requests is None else settings.requests
  # All requests arrive at once, so that no row waits for one.
  burst = dataclasses.replace(settings, rate="inf", requests=count)
  trace = requests_of(burst)
  sizes: dict[str, Any] = _sizes(settings, trace) | {"share": "nothing"}
  engine = _engine(settings, sizes)
  prompts = [request.prompt(engine.vocab) for request in trace]
  new = [request.new_tokens for request in trace]
  if settings.compare == "plain":
    kinds = itertools.cycle(speculation_tasks.KINDS)
    tokenizer = rj.data.Bytes()
    if settings.model is not None and settings.model not in rj.models.PRESETS:
      tokenizer = rj.data.Tokenizer.load(settings.model)
    prompts = [
      speculation_tasks.prompt(next(kinds), tokenizer, prompt.size, seed)
      for seed, prompt in enumerate(prompts)
    ]
  answers: dict[str, list[list[int]]] = {}

  def at_once(engine: Engine = engine) -> list[list[int]]:
    handles = [
      engine.submit(rj.serve.Request(prompt=prompt, max_new_tokens=max_tokens))
      for prompt, max_tokens in zip(prompts, new, strict=True)
    ]
    engine.run()
    return [h.result().tokens.tolist() for h in handles]

  def sequential() -> list[list[int]]:
    generate = functools.partial(rj.infer.generate, engine.model)
    return [
      generate([prompt], max_new_tokens=max_tokens)[0].tolist()
      for prompt, max_tokens in zip(prompts, new, strict=True)
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
    timings = timing.timed(
      {name: functools.partial(run, name, x) for name, x in calls.items()},
      settings.rounds,
    )
  # CPU time of all threads; the first round is not timed.
  rows = {
    name: harness.timing_row(timed)
    | {"cpu_s": statistics.median(cpu[name][-settings.rounds :])}
    for name, timed in timings.items()
  }
  times = {name: float(row["median_s"]) for name, row in rows.items()}
  engine_s = times.pop("engine")
  best = min(times, key=lambda name: times[name])
  agreed = [
    _common_prefix(a, b)
    for a, b in zip(answers["engine"], answers[best], strict=True)
  ]
  tokens, dtype = sum(new), str(engine.model.dtype)
  say(
    f"{count} requests, {tokens:,} new tokens, {settings.rounds} rounds on "
    f"{jax.devices()[0].device_kind}, {dtype}, {os.cpu_count()} cores"
  )
  for name, seconds in {"engine": engine_s, **times}.items():
    say(
      f"{name:14} {seconds:8.3f} s  {tokens / seconds:10,.1f} tokens/s  "
      f"{rows[name]['cpu_s']:8.3f} s of processor time"
    )
  say(f"{best} / engine, of medians: {times[best] / engine_s:.2f}")
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
    "ratio": times[best] / engine_s,
    "dtype": dtype,
    "equal": agreed == new,
    "agreed": sum(agreed) / tokens,
    "new_tokens": tokens,
    "spread": {
      name: statistics.pstdev(timed.seconds) for name, timed in timings.items()
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
    servers = {}
    for threads in {os.cpu_count() or 1, 1}:
      name = "transformers_1" if threads == 1 else "transformers"
      servers[name] = TransformersServer(
        folder,
        lengths,
        rows=settings.rows,
        page=settings.page,
        threads=threads,
      )
      stack.callback(servers[name].close)
    yield servers


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
  """Length of the longest common prefix of two answers."""
  differ = (n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
  return next(differ, len(a))

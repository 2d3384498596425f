"""Benchmark `launch.bench kvr`: KV-Runahead counted, simulated and measured.

  example    the paper's nine tokens: products and rows sent, by the formulas
             of `ringjax.plan.cost`
  published  the paper's tables next to simulated times
  wall       launch.prefill in processes that each have separate cores,
             all methods in turn; medians, and their ratios
  delayed    as wall with the last rank pausing before every layer: when the
             others had computed theirs

Only separate processes show which ranks wait for others: devices of one program
on one CPU take turns on its cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from ringjax.bench import timing
from ringjax.errors import OptionError
from ringjax.plan import cost, draw
from ringjax.plan.cost import Prompt
from ringjax.plan.kv_runahead import published

from ..shared.entry_points import PACKAGE, script_environment

PARTS = ("example", "published", "wall", "delayed")
METHODS = ("kvr", "kvr_even", "tsp", "flash_tsp", "ring", "striped")
# Program that runs the script `prefill` pinned to the given cores.
_PINNED = f"""
import os, runpy, sys
cores = [int(core) for core in sys.argv.pop(1).split(",")]
if hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, cores)
runpy.run_module("{PACKAGE}.prefill", run_name="__main__", alter_sys=True)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings of the benchmark.

  Attributes:
    parts: Parts to run, of `PARTS`; see the module's docstring.
    tokens: Lengths of the measured prompts.
    methods: Methods of prefill to compare, of `METHODS`.
    processes: Number of ranks, each a process.
    preset: Shapes of the model; empty for the model that ships with ringjax.
    model: Folder or fetched name, in place of the preset; empty for the preset.
    rounds: Timed runs of each method.
    delay_s: Seconds that the last rank pauses before each layer.
  """

  parts: tuple[str, ...] = PARTS
  tokens: tuple[int, ...] = (2048,)
  methods: tuple[str, ...] = METHODS
  processes: int = 2
  preset: str = "llama-100m"
  model: str = ""
  rounds: int = 5
  delay_s: float = 0.2

  def __post_init__(self) -> None:
    for name, choices in (("parts", PARTS), ("methods", METHODS)):
      wrong = [w for w in getattr(self, name) if w not in choices]
      if wrong or not getattr(self, name):
        raise OptionError(
          name,
          ",".join(wrong) or "none",
          f"some of {', '.join(choices)}",
          "pass names with commas between",
        )
    for count in (*self.tokens, self.rounds):
      cost.check_count("tokens, rounds", count)
    cost.check_count("processes", self.processes, least=2)
    cost.check_number("delay_s", self.delay_s)


QUICK = Settings(parts=("example", "wall"), tokens=(512,), rounds=2)


def run(
  settings: Settings,
  *,
  command: str = "",
  json: str | None = None,
  plot: str | None = None,
  say: Callable[[str], Any] = print,
) -> dict[str, Any]:
  """Runs the parts and returns all figures; writes them after each part.

  Args:
    settings: Parts to run, and their options.
    command: Command line, for the record.
    json: Path of a JSON file for the result.
    plot: Path of a PNG with the timeline of the ranks, for the first length.
    say: Function that prints a line.

  Raises:
    OptionError: If a process fails; the text is the end of its log.
  """
  if plot is not None:
    draw.figures()
  results: dict[str, Any] = {"command": command}
  functions = {
    "example": lambda: _example(say),
    "published": lambda: _published(say),
    "wall": lambda: [
      _wall(settings, n, plot if n == settings.tokens[0] else None, say)
      for n in settings.tokens
    ],
    "delayed": lambda: _delayed(settings, say),
  }
  for part in PARTS:
    if part in settings.parts:
      results[part] = functions[part]()
      say("")
      if json is not None:
        timing.write_json(json, results)
  return results


# ---------------------------------------------------------------------------
# Counted and simulated
# ---------------------------------------------------------------------------


def _example(say: Callable[[str], Any]) -> dict[str, Any]:
  prompt, lengths = Prompt(tokens=9), (4, 3, 2)
  chain = [int(n) for n in cost.pairs(prompt, lengths)]
  rows = 2 * int(cost.chain_tokens(prompt, lengths).sum())
  per_rank = prompt.tokens // len(lengths) * prompt.tokens
  gathered = 2 * cost.gathered_tokens(prompt, len(lengths))
  products = "/".join(map(str, chain))
  say(f"9 tokens on 3 ranks, a layer    {'products':>12}{'rows sent':>11}")
  say(f"  KVR, parts of 4, 3, 2         {products:>12}{rows:>11}")
  say(f"  TSP, parts of 3, 3, 3         {f'{per_rank} each':>12}{gathered:>11}")
  return {
    "kvr": {"products": chain, "rows": rows},
    "tsp": {"products": [per_rank] * 3, "rows": gathered},
  }


def _published(say: Callable[[str], Any]) -> dict[str, Any]:
  rows = [row for _, make in published.rows() for row in make()]
  say("published, simulated (all rows: python -m launch.plan kvr --paper)")
  for row in rows:
    fitted = row.profile == "llama7b-a100" and row.table == "300 GB/s"
    if row.table == "partitions" or (fitted and row.tokens >= 8192):
      say(
        f"  {row.tokens:>6} tokens, {row.ranks} GPUs, {row.what:<16}"
        f"paper {row.paper:>9.3f}, ours {row.ours:>9.3f}"
        f"{100 * row.difference:>+7.1f} %"
      )
  worst = published.summary(rows)
  return {"rows": [row.record() for row in rows], "worst": worst}


# ---------------------------------------------------------------------------
# Measured
# ---------------------------------------------------------------------------


def _wall(
  settings: Settings, tokens: int, plot: str | None, say: Callable[[str], Any]
) -> dict[str, Any]:
  flags = [f"--method={','.join(settings.methods)}"]
  if plot is not None:
    flags.append(f"--plot={os.path.abspath(plot)}")
  figures = _processes(settings, tokens, settings.rounds, flags)
  rows = {row["method"]: row for row in figures["methods"]}
  say(
    f"{tokens} tokens, {settings.model or settings.preset or 'own model'}, "
    f"{figures['dtype']}, "
    f"{settings.processes} processes on cores {figures['cores']}: median of "
    f"{settings.rounds}"
  )
  base = rows.get("kvr")
  for name, row in rows.items():
    ratio = row["seconds"] / base["seconds"] if base else 1.0
    sent = sum(row["bytes_by_link"].values()) / 1e6
    low, high = min(row["rounds_s"]), max(row["rounds_s"])
    say(
      f"  {name:<10}{row['seconds']:>9.3f} s ({low:.3f} to {high:.3f})"
      f"{ratio:>7.2f} of kvr's{sent:>9.1f} MB sent"
    )
  return figures


def _delayed(settings: Settings, say: Callable[[str], Any]) -> dict[str, Any]:
  tokens = min(settings.tokens)
  methods = [m for m in settings.methods if m in ("kvr", "tsp", "flash_tsp")]
  if not methods:
    raise OptionError(
      "contestants",
      ",".join(settings.methods),
      "kvr, tsp or flash_tsp among them, for what is delayed",
      "pass one of them too, or leave the part out",
    )
  last = settings.processes - 1
  flags = [f"--method={','.join(methods)}"]
  slow = [*flags, f"--delay={last}:{settings.delay_s}"]
  runs = {
    name: _processes(settings, tokens, min(settings.rounds, 3), run_flags)
    for name, run_flags in (("free", flags), ("delayed", slow))
  }
  say(
    f"rank {last} pauses {settings.delay_s:g} s before each layer, "
    f"{tokens} tokens: seconds until a rank had computed its last layer"
  )
  for name in methods:
    for title, figures in runs.items():
      (row,) = [r for r in figures["methods"] if r["method"] == name]
      seconds = " ".join(f"{s:8.3f}" for s in row["computed_s_by_rank"])
      say(f"  {name:<10}{title:<9}{seconds}")
  return runs


def _processes(
  settings: Settings, tokens: int, rounds: int, flags: Sequence[str]
) -> dict[str, Any]:
  """Runs launch.prefill in several processes; returns its figures."""
  cores = sorted(_cores())
  count = settings.processes
  # With fewer cores than processes some share a core.
  rank_cores = [
    cores[rank::count] or [cores[rank % len(cores)]] for rank in range(count)
  ]
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  flags = [
    *flags,
    "--json",
    *_model(settings),
    f"--context={tokens}",
    f"--rounds={rounds}",
    f"--coordinator=localhost:{port}",
    f"--num_processes={count}",
  ]
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    running = []
    for rank in range(count):
      pinned = ",".join(map(str, rank_cores[rank]))
      out = stack.enter_context(open(folder / f"{rank}.json", "w"))
      log = stack.enter_context(open(folder / f"{rank}.log", "w"))
      process = subprocess.Popen(
        [sys.executable, "-c", _PINNED, pinned, *flags, f"--process_id={rank}"],
        stdin=subprocess.DEVNULL,
        stdout=out,
        # The first process shows progress.
        stderr=log if rank else None,
        env=script_environment(),
      )
      # The stack runs these in reverse: first kill, then wait.
      stack.callback(process.wait)
      stack.callback(process.kill)
      running.append(process)
    statuses = [process.wait() for process in running]
    if any(statuses):
      rank = next(r for r, status in enumerate(statuses) if status)
      log_text = (folder / f"{rank}.log").read_text()[-250:].strip()
      raise OptionError(
        f"process {rank}",
        f"status {statuses[rank]}: {log_text or 'see above'}",
        "a run of launch.prefill that ends well",
        "run launch.prefill with these flags to see why",
      )
    figures = json.loads((folder / "0.json").read_text())
  return figures | {
    "cores": "; ".join(",".join(map(str, m)) for m in rank_cores)
  }


def _model(settings: Settings) -> list[str]:
  if settings.model:
    return [f"--model={settings.model}"]
  return [f"--preset={settings.preset}"] if settings.preset else []


def _cores() -> set[int]:
  if hasattr(os, "sched_getaffinity"):
    return os.sched_getaffinity(0)
  return set(range(os.cpu_count() or 1))

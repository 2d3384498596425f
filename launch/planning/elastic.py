"""The sub-command elastic of launch.plan: groups of instances that change.

Simulates eight chips as elastic groups (LoongServe) and as three fixed systems,
on randomly drawn lengths, and prints the goodput of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from absl import flags

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.serve.cluster.simulate.elastic_workloads import (
  GroupMachine,
  ScaledLimits,
  answer_lengths,
  compared_systems,
  mixed_lengths,
  random_trace,
  zipf_lengths,
)
from ringjax.serve.cluster.simulate.goodput import at_rate, goodput
from ringjax.serve.cluster.times.request_times import percentiles
from ringjax.serve.traces import TraceRequest

from ..shared import console
from . import strategies

NAME = "plan"
WORKLOADS = ("zipf:1.0", "zipf:1.2", "zipf:1.4", "mixed:199999", "mixed")
# Published goodput of each system, requests a second at 90 percent, from the
# paper's figures for zipf with exponents 1.0, 1.2 and 1.4.
PAPER = {
  "zipf:1.0": (1.122, 0.405, 0.481, 0.360),
  "zipf:1.2": (2.925, 1.355, 1.478, 1.289),
  "zipf:1.4": (8.757, 5.723, 5.447, 5.000),
}
NOTE = (
  "simulated with a roofline of Llama-2-7B on eight A800s; the slots of whole "
  "answers are set aside when a request is taken"
)


def compared(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints the goodput of elastic groups and of fixed systems."""
  screen = console.Screen(NAME, stderr)
  count = positive_int("--requests", values.requests)
  names = values.workloads or [*WORKLOADS]
  traces = {name: _trace(name, count, values.seed) for name in names}
  machine = GroupMachine()
  limits = ScaledLimits(alone=machine.times(2, 4), share=values.share)
  systems = compared_systems(machine)
  rows: list[dict[str, Any]] = []
  screen.begin("searching goodput", unit="searches")
  try:
    for name, trace in traces.items():
      for n, system in enumerate(systems):
        serve = lambda trace, system=system: system.run(trace).served
        optimum = goodput(serve, trace, limits)
        row: dict[str, Any] = {
          "workload": name,
          "system": system.name,
          "goodput": optimum.rate,
          "published": dict(enumerate(PAPER.get(name, ()))).get(n),
        }
        if optimum.rate:
          ran = system.run(at_rate(trace, optimum.rate))
          times = percentiles(ran.served, (90,))
          row |= {
            "ttft_p90_s": times["ttft_s"]["p90"],
            "tpot_p90_s": times["tpot_s"]["p90"],
            "refused": sum(bool(request.rejected) for request in ran.served)
            / count,
            "moved_tokens": ran.moved_tokens,
            "kept_tokens": ran.kept_tokens,
            "shrinks": ran.shrinks,
            "grows": ran.grows,
          }
        rows.append(row)
        screen.at(len(rows))
  finally:
    screen.end()
  record = {
    "requests": count,
    "seed": values.seed,
    "limits": {
      "ttft_s": limits.ttft_s,
      "scale": limits.scale,
      "tpot_s": limits.tpot_s,
      "share": limits.share,
    },
    "machine": dataclasses.asdict(machine),
    "rows": rows,
    "note": NOTE,
  }
  strategies.put(values, stdout, record, list(_lines(record, rows)))


def _trace(name: str, count: int, seed: int) -> list[TraceRequest]:
  """Draws requests of a workload, at one a second."""
  kind, _, option = name.partition(":")
  try:
    if kind == "mixed":
      max_tokens = int(option) if option else None
      lengths = mixed_lengths(count, seed=seed, most=max_tokens)
    elif kind == "zipf":
      lengths = (
        zipf_lengths(count, float(option), seed=seed),
        answer_lengths(count, seed=seed + 1),
      )
    else:
      raise ValueError(kind)
  except ValueError:
    raise OptionError(
      "--workloads",
      name,
      "zipf:EXPONENT, mixed or mixed:TOKENS",
      "pass e.g. --workloads=zipf:1.2,mixed",
    ) from None
  return random_trace(*lengths, 1.0, seed=seed + 2)


def _lines(record: dict[str, Any], rows: Sequence[Any]) -> Iterator[str]:
  limits = record["limits"]
  yield (
    f"goodput of {record['requests']} requests: {limits['share']:.0%} of the "
    f"first tokens within {limits['ttft_s']:g} s or {limits['scale']:g} times "
    f"what they take alone, {limits['tpot_s'] * 1e3:g} ms for each later one"
  )
  yield ""
  yield from strategies.markdown(
    ("lengths", "system"),
    (
      "requests/s", "elastic is", "paper, requests/s", "refused",
      "TTFT P90 (s)", "TPOT P90 (ms)", "tokens moved", "tokens kept in a ring",
    ),
    [_cells(row, rows) for row in rows],
  )  # fmt: skip
  yield ""
  yield record["note"]


def _cells(row: dict[str, Any], rows: Sequence[Any]) -> tuple[str, ...]:
  first = next(
    candidate for candidate in rows if candidate["workload"] == row["workload"]
  )
  rate = row["goodput"]
  ratio = f"{first['goodput'] / rate:.2f} x" if rate else "-"
  published = row["published"]
  cells = (
    (
      f"{row['refused']:.1%}",
      f"{row['ttft_p90_s']:.2f}",
      f"{row['tpot_p90_s'] * 1e3:.1f}",
      f"{row['moved_tokens']:,}",
      f"{row['kept_tokens']:,}",
    )
    if rate
    else ("-",) * 5
  )
  return (
    row["workload"],
    row["system"],
    f"{rate:.3f}",
    "" if row is first else ratio,
    "-" if published is None else f"{published:.3f}",
    *cells,
  )

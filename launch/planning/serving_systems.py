"""The sub-command which of launch.plan: systems of serving on the same chips.

Simulates one load on eight chips as one engine, replicas, separate prefill and
decode instances, elastic groups, and with the conductor's routing to the
instance that has a prefix, and prints the goodput of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np
from absl import flags

from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster import (
  ClusterSimulator,
  RoutingCosts,
  ServedRequest,
  SimulatedInstance,
  percentiles,
  routing_policy,
)
from ringjax.serve.cluster.simulate.elastic_workloads import (
  SLOTS,
  GroupMachine,
  compared_systems,
)
from ringjax.serve.cluster.simulate.goodput import at_rate, goodput
from ringjax.serve.traces import TraceRequest, poisson_trace

from ..shared import console, machines
from . import strategies
from .serving_plan import (
  limits_of,
  limits_record,
  words_of_limits,
)

NAME = "plan"
CHIPS = 8
# Tokens of prompts in a step of an instance that also decodes.
_CHUNK = 512
# Requests a second at which no two requests overlap.
_ALONE = 1e-6
NOTE = (
  "simulated with a roofline of Llama-2-7B on eight A800s; instances keep "
  "prefixes of half of their tokens, elastic groups none"
)
Serve = Callable[[Sequence[TraceRequest]], Sequence[ServedRequest]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedSystem:
  """A serving system on the chips.

  Attributes:
    name: Name in the table.
    kind: Group of systems that differ by a split; only the best is shown.
    serve: Function that simulates the system on a trace.
  """

  name: str
  kind: str
  serve: Serve


def compared(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints the goodput of each system."""
  screen = console.Screen(NAME, stderr)
  limits = limits_of(values.slo)
  shared = integer("--shared", values.shared, least=0)
  trace = documents_trace(
    requests=positive_int("--requests", values.requests),
    prompt_tokens=values.prompt,
    new_tokens=values.new,
    spread=values.spread,
    shared_tokens=shared,
    documents=values.documents,
    seed=values.seed,
  )
  link = machines.link(values, latency_s=1e-3)
  rows: list[dict[str, Any]] = []
  screen.begin("searching goodput", unit="searches")
  try:
    for n, system in enumerate(systems(link, values.prefill_tokens)):
      screen.at(n)
      if shared and system.kind == "elastic":
        continue
      optimum = goodput(system.serve, trace, limits, near=0.03)
      row = {
        "system": system.name, "kind": system.kind, "goodput": optimum.rate
      }  # fmt: skip
      # If no rate meets the limits, show the times of requests that run alone.
      row |= _figures(system.serve(at_rate(trace, optimum.rate or _ALONE)))
      rows.append(row)
  finally:
    screen.end()
  best: dict[str, dict[str, Any]] = {}
  for row in rows:
    if row["goodput"] >= best.get(row["kind"], row)["goodput"]:
      best[row["kind"]] = row
  best_rows = sorted(best.values(), key=lambda row: -row["goodput"])
  record = {
    "limits": limits_record(limits),
    "prompt": values.prompt,
    "new": values.new,
    "shared": shared,
    "documents": values.documents,
    "bandwidth": values.bandwidth,
    "requests": len(trace),
    "rows": best_rows,
    "note": NOTE,
  }
  strategies.put(values, stdout, record, list(_lines(record)))


def documents_trace(
  *,
  requests: int,
  prompt_tokens: int,
  new_tokens: int,
  spread: float,
  shared_tokens: int,
  documents: int,
  seed: int,
  rate: int | float = 1.0,
) -> list[TraceRequest]:
  """Draws requests that each begin with a random one of several documents.

  Args:
    requests, prompt_tokens, new_tokens, spread, shared_tokens, seed, rate:
      Arguments of `poisson_trace`; every document has `shared_tokens` tokens.
    documents: Number of documents.

  Raises:
    OptionError: If several documents have no tokens, or values are out of
      range.
  """
  positive_int("--documents", documents)
  if documents > 1 and not shared_tokens:
    raise OptionError(
      "--documents",
      f"{documents} with --shared=0",
      "how many tokens each of them has",
      "pass --shared=8192, for instance, or leave --documents out",
    )
  trace = poisson_trace(
    rate=rate,
    requests=requests,
    prompt_tokens=prompt_tokens,
    new_tokens=new_tokens,
    shared_tokens=shared_tokens,
    spread=spread,
    seed=seed,
  )
  drawn = np.random.default_rng(seed + 1).integers(0, documents, requests)
  # The first block is the document: `poisson_trace` uses no negative numbers.
  return [
    dataclasses.replace(request, blocks=(-1 - int(at), *request.blocks[1:]))
    if request.blocks
    else request
    for request, at in zip(trace, drawn, strict=True)
  ]


def systems(link: Link, prefill_tokens: int) -> list[SimulatedSystem]:
  """All simulated systems, on eight chips.

  Args:
    link: Link from each instance to the others.
    prefill_tokens: Largest number of tokens in a call of a prefill instance.
  """
  machine = GroupMachine()
  two = machine.times(2)
  costs = RoutingCosts(times=two, kv_token_bytes=machine.token_bytes, link=link)

  def instances(
    role: str, count: int, tensor: int = 2, first: int = 0
  ) -> list[SimulatedInstance]:
    return [
      SimulatedInstance(
        name=f"{role}{n}",
        role=role,
        times=machine.times(tensor),
        capacity_tokens=SLOTS[tensor] // 2,
        prefix_cache_tokens=SLOTS[tensor] // 2,
        max_prefill_tokens=_CHUNK if role == "both" else prefill_tokens,
        share="mixed",
      )
      for n in range(first, first + count)
    ]

  def cluster(pool: list[SimulatedInstance], policy: str) -> Serve:
    simulator = ClusterSimulator(
      instances=pool,
      policy=routing_policy(policy, costs),
      links=link,
      kv_token_bytes=machine.token_bytes,
    )
    return lambda trace: simulator.run(trace).served

  simulated = [
    SimulatedSystem(
      name="one engine, TP8",
      kind="engine",
      serve=cluster(instances("both", 1, 8), "shortest"),
    )
  ]
  for policy, words in (
    ("shortest", ""),
    ("conductor:threshold=2", ", conductor"),
  ):
    simulated.append(
      SimulatedSystem(
        name=f"4 replicas of TP2{words}",
        kind=f"replicas{words}",
        serve=cluster(instances("both", 4), policy),
      )
    )
    for read in (1, 2, 3):
      pool = instances("prefill", read) + instances("decode", 4 - read)
      simulated.append(
        SimulatedSystem(
          name=f"{read} x TP2 read, {4 - read} x TP2 answer{words}",
          kind=f"apart{words}",
          serve=cluster(pool, policy),
        )
      )
  for system in compared_systems(machine):
    if "elastic" in system.name:
      simulated.append(
        SimulatedSystem(
          name=system.name,
          kind="elastic",
          serve=lambda trace, system=system: system.run(trace).served,
        )
      )
  return simulated


def _figures(served: Sequence[ServedRequest]) -> dict[str, float | None]:
  """Latencies at the goodput, and shares of cached tokens and refusals."""
  if all(request.rejected for request in served):
    return {
      "ttft_p90_s": None,
      "tpot_p90_s": None,
      "cached": 0.0,
      "refused": 1.0,
    }
  times = percentiles(served, (90,))
  total = sum(request.prompt_tokens for request in served)
  return {
    "ttft_p90_s": times["ttft_s"]["p90"],
    "tpot_p90_s": times["tpot_s"]["p90"],
    "cached": sum(request.cached_tokens for request in served) / total,
    "refused": sum(bool(request.rejected) for request in served) / len(served),
  }


def _seconds(
  row: dict[str, Any], name: str, times: int | float, digits: int
) -> str:
  """A row's time as text, marked "alone" for a system without goodput."""
  if row[name] is None:
    return "-"
  return f"{row[name] * times:.{digits}f}" + " alone" * (not row["goodput"])


def _lines(record: dict[str, Any]) -> Iterator[str]:
  shared = record["shared"]
  shared_text = (
    f"{shared} of {record['documents']} documents and " if shared else ""
  )
  yield (
    f"{record['requests']} requests, prompts of "
    f"{shared_text}{record['prompt']} tokens, answers of {record['new']}; "
    f"links of {record['bandwidth'] / 1e9:g} GB/s; "
    f"{words_of_limits(record['limits'])}"
  )
  yield ""
  best_goodput = max(row["goodput"] for row in record["rows"])
  yield from strategies.markdown(
    ("system",),
    (
      "requests/s", "of the best", "TTFT P90 (s)", "TPOT P90 (ms)",
      "found in caches", "refused",
    ),
    [
      (
        row["system"],
        f"{row['goodput']:.3g}",
        f"{row['goodput'] / best_goodput:.0%}" if best_goodput else "-",
        _seconds(row, "ttft_p90_s", 1, 2),
        _seconds(row, "tpot_p90_s", 1e3, 1),
        f"{row['cached']:.0%}",
        f"{row['refused']:.0%}",
      )
      for row in record["rows"]
    ],
  )  # fmt: skip
  yield ""
  if not best_goodput:
    yield (
      "no system keeps the limits, not even with requests that do not meet "
      "each other (alone); pass a larger --slo, or shorter requests"
    )
  yield record["note"]

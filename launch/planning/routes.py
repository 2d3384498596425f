"""The sub-command routes of launch.plan: compares routing policies.

It simulates one trace on separate prefill and decode instances, with each
policy of `rj.serve.cluster`, and prints the times to first tokens and the cache
hits (Mooncake).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
from absl import flags

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.parallel.chips import number_bytes
from ringjax.plan import machines
from ringjax.serve.cluster import (
  ROUTING_POLICIES,
  ClusterSimulator,
  PhaseTimes,
  RoutingCosts,
  SimulatedInstance,
  TensorTimes,
  needs_costs,
  percentiles,
  read_calls,
  routing_policy,
)
from ringjax.serve.traces import TraceRequest, read_trace

from ..shared import console
from ..shared import machines as flag_machines
from . import offload, strategies
from .serving_systems import documents_trace

NAME = "plan"
_POLICIES = tuple(filter(needs_costs, ROUTING_POLICIES))
_MODEL, _CHIP = "llama-3.1-70b", "a100"
# Default bandwidth between instances in bytes per second.
_BANDWIDTH = 50e9
# Decode instances have room for all requests: only prefill is compared.
_CAPACITY_TOKENS = 2**40
_SYNTHETIC_FLAGS = (
  "prompt",
  "new",
  "spread",
  "shared",
  "documents",
  "seed",
  "rate",
)


def compared(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints latencies and cache hits of a trace for each policy."""
  screen = console.Screen(NAME, stderr)
  readers, answerers = strategies.pair(
    "--instances", values.instances, "READERSxANSWERERS"
  )
  trace = _trace(values)
  costs, source = _costs(values)
  policies = {
    text: routing_policy(text, costs) for text in values.policies or _POLICIES
  }
  assert isinstance(costs.times, PhaseTimes)
  instances = [
    SimulatedInstance(
      name=f"{role}{n:02}",
      role=role,
      times=costs.times,
      capacity_tokens=_CAPACITY_TOKENS,
      max_rows=2**20,
      prefix_cache_tokens=values.prefix_tokens if role == "prefill" else 0,
    )
    for role, count in (("prefill", readers), ("decode", answerers))
    for n in range(count)
  ]
  rows: list[dict[str, Any]] = []
  screen.begin("simulating", len(policies), "policies")
  try:
    for n, (text, policy) in enumerate(policies.items()):
      result = ClusterSimulator(
        instances=instances,
        policy=policy,
        links=costs.link,
        kv_token_bytes=costs.kv_token_bytes,
      ).run(trace)
      served = [request for request in result.served if not request.rejected]
      rows.append(
        {
          "policy": text,
          "refused": len(trace) - len(served),
          "ttft_mean_s": float(np.mean([x.ttft_s for x in served]))
          if served
          else None,
          "ttft_p90_s": percentiles(served)["ttft_s"]["p90"]
          if served
          else None,
          "cached": sum(x.cached_tokens for x in served)
          / max(1, sum(x.prompt_tokens for x in served)),
          "moved_bytes": float(sum(result.moved_bytes.values())),
        }
      )
      screen.at(n + 1)
  finally:
    screen.end()
  record = {
    "source": source,
    "readers": readers,
    "answerers": answerers,
    "prefix_tokens": values.prefix_tokens,
    "bandwidth": None if costs.link is None else costs.link.bandwidth,
    "requests": len(trace),
    "could_be_found": _shareable_part(trace),
    "rows": rows,
  }
  strategies.put(values, stdout, record, list(_lines(record)))


def _trace(values: flags.FlagValues) -> list[TraceRequest]:
  if values.trace is not None:
    strategies.refuse(values, "--trace", _SYNTHETIC_FLAGS)
    count = values.requests if values["requests"].present else None
    return read_trace(values.trace)[:count]
  return documents_trace(
    requests=values.requests,
    prompt_tokens=values.prompt,
    new_tokens=values.new,
    spread=values.spread,
    shared_tokens=values.shared,
    documents=values.documents,
    seed=values.seed,
    rate=1.0 if values.rate is None else number("--rate", values.rate, above=0),
  )


def _costs(values: flags.FlagValues) -> tuple[RoutingCosts, str]:
  names = values.model or [_MODEL]
  if len(names) > 1:
    raise OptionError(
      "--model", ",".join(names), "one model", "pass one name or folder"
    )
  dtype = values.dtype or "bfloat16"
  shape = offload.shape_of(names[0])
  if shape.heads % values.tensor:
    raise OptionError(
      "--tensor",
      f"{values.tensor} devices for {shape.heads} heads",
      "a number that divides them",
      "pass --tensor=8, for instance",
    )
  if values.times is None:
    machine = machines.load(values.chip or _CHIP)
    weights = (shape.layers * shape.weights + shape.tables) * number_bytes(
      dtype
    )
    if weights > values.tensor * machine.chip.hbm_bytes:
      raise OptionError(
        "--tensor",
        f"{values.tensor} of {machine.name} for {shape.name}, "
        f"{weights / 1e9:.0f} GB of weights",
        "devices that hold them",
        "pass more, or another --chip",
      )
    times = TensorTimes.on(machine, shape, dtype=dtype)
    source = f"times predicted from figures of {machine.name}"
  else:
    strategies.refuse(values, "--times", ("chip",))
    calls = read_calls(values.times)
    times, source = (
      TensorTimes.fit(calls),
      f"times fitted to {len(calls)} calls",
    )
  return RoutingCosts(
    times=times.at(values.tensor),
    kv_token_bytes=shape.layers * shape.kv * number_bytes(dtype),
    link=flag_machines.link(values, bandwidth=_BANDWIDTH, latency_s=1e-3),
  ), f"{shape.name}, TP {values.tensor}, {source}"


def _shareable_part(trace: list[TraceRequest]) -> float:
  """Part of all prompt tokens that one unlimited cache would find."""
  seen: set[int] = set()
  found_tokens = 0
  for request in trace:
    full_blocks = request.blocks[: request.prompt_tokens // request.block]
    for n, block in enumerate(full_blocks):
      if block not in seen:
        break
      found_tokens += min(
        request.block, request.prompt_tokens - 1 - n * request.block
      )
    seen.update(full_blocks)
  return found_tokens / max(1, sum(request.prompt_tokens for request in trace))


def _lines(record: dict[str, Any]) -> Iterator[str]:
  yield (
    f"{record['requests']} requests; {record['readers']} instances read, "
    f"{record['answerers']} answer; {record['source']}"
  )
  yield (
    f"prefixes of {record['prefix_tokens']:,} tokens each, links of "
    f"{record['bandwidth'] / 1e9:g} GB/s"
  )
  yield ""
  yield from strategies.markdown(
    ("policy",),
    ("TTFT mean (s)", "TTFT P90 (s)", "found in caches", "moved", "refused"),
    [
      (
        f"`{row['policy']}`",
        *(
          "-" if row[name] is None else f"{row[name]:.3g}"
          for name in ("ttft_mean_s", "ttft_p90_s")
        ),
        f"{row['cached']:.1%}",
        console.nbytes(row["moved_bytes"]),
        f"{row['refused']}",
      )
      for row in record["rows"]
    ],
  )
  yield ""
  yield (
    f"{record['could_be_found']:.1%} of all tokens would be found in one cache "
    "without limits"
  )

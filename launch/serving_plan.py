"""The sub-command serve of launch.plan: how many instances of which kind.

It searches placements of prefill and decode on a cluster by simulation, beside
instances that do both, and prints what each is good for (DistServe).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from absl import flags

from launch import aot, common, console, offload, strategies
from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link, number_bytes
from ringjax.plan import draw, machines, offload_tiers
from ringjax.serve.cluster import (
  ClusterResult,
  DistServeModel,
  DriftingRoles,
  GpuCluster,
  Limits,
  PlacementSearch,
  ServingPlacement,
  SizedModel,
  TensorTimes,
  TrafficSummary,
  as_distserve_counts,
  at_rate,
  percentiles,
  read_calls,
  read_capacities,
  read_profile,
  replan,
  share_met,
  trace_rate,
)
from ringjax.serve.traces import TraceRequest, poisson_trace, read_trace

NAME = "plan"
_OPT_CONTEXT = 2048
_MODEL, _CHIP = "llama-3.1-8b", "a100"
# Part of a device's memory that weights and cache fill.
_USABLE = 0.9
# How often a placement for a rate is made a tenth larger.
_GROWTHS = 4
# Rates of the curves, as parts of the best goodput.
_CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Service:
  """What is asked for."""

  model: SizedModel | DistServeModel
  cluster: GpuCluster
  trace: list[TraceRequest]
  limits: Limits
  each: bool
  transfer: bool
  source: str
  context: int


def served(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints how many instances of which kind serve a trace."""
  common.check_files(values, "plot", "timeline")
  for name in ("rate", "replan"):
    if values[name].value is not None:
      number(f"--{name}", values[name].value, above=0)
  if values.plot is not None or values.timeline is not None:
    draw.figures()
  screen = console.Screen(NAME, stderr)
  asked = _asked(values)
  screen.begin("simulating", unit="runs")
  try:
    search = PlacementSearch(
      asked.model,
      asked.cluster,
      asked.trace,
      asked.limits,
      each=asked.each,
      stream=values.stream,
      progress=screen.at,
    )
    if values.rate is None:
      found = search.fill()
    else:
      made = (
        search.high_affinity(values.rate),
        search.low_affinity(values.rate),
        search.colocated(values.rate),
      )
      found = [one for one in made if one is not None]
    if not found:
      raise OptionError(
        "--slo",
        f"{values.slo}, which no shape meets even for single requests",
        "limits above the times of an idle instance",
        "pass larger ones, or a faster --chip",
      )
    if values.rate is not None:
      found = [_grown(search, one, values.rate, asked) for one in found]
    both = [(one, _row(search, one, asked)) for one in found]
    if values.rate is None:
      both.sort(key=lambda x: (-x[1]["simulated_goodput"], x[0].devices))
    else:
      size = asked.cluster.size
      # What the cluster has room for first.
      both.sort(key=lambda x: (x[0].devices > size, x[0].devices))
    found, rows = [one for one, _ in both], [row for _, row in both]
    later = _later(values, asked)
    roles = _roles(values, search, found, asked)
    best = search.simulate(
      found[0],
      values.rate or rows[0]["simulated_goodput"] or found[0].goodput,
      transfer=asked.transfer,
      timeline=values.timeline is not None,
    )
    if values.plot is not None:
      _curves(values.plot, search, found, rows, asked)
  finally:
    screen.end()
  if values.timeline is not None:
    _timeline(values.timeline, best)
    screen.say(f"wrote {values.timeline}")
  if values.plot is not None:
    screen.say(f"wrote {values.plot}")
  record = {
    "model": asked.model.name,
    "cluster": [asked.cluster.nodes, asked.cluster.devices],
    "limits": limits_record(asked.limits),
    "requests": len(asked.trace),
    "trace_rate": trace_rate(asked.trace),
    "context": asked.context,
    "beyond_context": _beyond(asked),
    "refused": [one.rejected for one in best.served if one.rejected],
    "rate": values.rate,
    "source": asked.source,
    "placements": rows,
    "percentiles": percentiles(best.served),
    "replanned": later,
    "roles": roles,
    "simulations": search.simulations,
  }
  strategies.put(values, stdout, record, list(_words(record, values)))


# ---------------------------------------------------------------------------
# What is asked for
# ---------------------------------------------------------------------------


def _asked(values: flags.FlagValues) -> _Service:
  names = values.model or [_MODEL]
  if len(names) > 1:
    raise OptionError(
      "--model", ",".join(names), "one model", "pass one name or folder"
    )
  nodes, devices = _cluster(values.cluster)
  own = values.rules == "distserve"
  if own and values.stream:
    raise OptionError(
      "--stream",
      f"{values.stream} with --rules=distserve, where caches move in no time",
      "rules by which moving takes time",
      "leave one of them out",
    )
  machine = machines.load(values.chip or _CHIP)
  inside = machine.links
  if not isinstance(inside, Link):
    inside = next(iter(dict(inside).values()))
  between = machine.between or inside
  if values["bandwidth"].present:
    between = Link(bandwidth=values.bandwidth, ports=1)
  model, source = _model(values, names[0], machine)
  trace = _trace(values)
  if own:
    trace = as_distserve_counts(trace)
  return _Service(
    model=model,
    cluster=GpuCluster(
      nodes=nodes, devices=devices, inside=inside, between=between
    ),
    trace=trace,
    limits=limits_of(values.slo),
    each=own,
    transfer=not own,
    source=source,
    context=_context(names[0]),
  )


def _context(name: str) -> int:
  """Tokens of a prompt and its answer that a model was made for."""
  if name in offload_tiers.OPT:
    return _OPT_CONTEXT
  from ringjax.models.checkpoint import abstract

  return abstract(aot.config_of(name)).config.longest or 0


def _cluster(text: str) -> tuple[int, int]:
  try:
    nodes, devices = (positive_int("", int(n)) for n in text.split("x"))
  except ValueError:
    raise OptionError(
      "--cluster", text, "NODESxDEVICES", "write it like 4x8"
    ) from None
  return nodes, devices


def limits_of(text: str) -> Limits:
  """The limits of --slo."""
  names = {"ttft": "ttft_s", "tpot": "tpot_s", "share": "share"}
  given: dict[str, float] = {}
  try:
    for part in text.split(","):
      name, value = part.split("=")
      if given.setdefault(names[name.strip()], float(value)) != float(value):
        raise ValueError("twice")
  except (KeyError, ValueError):
    raise OptionError(
      "--slo",
      text,
      "ttft=SECONDS, tpot=SECONDS, share=PART with commas between",
      "write it like ttft=0.2,tpot=0.1,share=0.9",
    ) from None
  for name in ("ttft_s", "tpot_s"):
    if name in given:
      number(f"--slo {name}", given[name], above=0)
  return Limits(**given)


def _trace(values: flags.FlagValues) -> list[TraceRequest]:
  if values.trace is None:
    return poisson_trace(
      rate=1.0,
      requests=values.requests,
      prompt_tokens=values.prompt,
      new_tokens=values.new,
      spread=values.spread,
      seed=values.seed,
    )
  strategies.refuse(values, "--trace", ("prompt", "new", "spread"))
  return read_trace(values.trace)[: values.requests]


def _model(
  values: flags.FlagValues, name: str, machine: Any
) -> tuple[SizedModel | DistServeModel, str]:
  dtype = values.dtype or "bfloat16"
  shape = offload.shape_of(name)
  kv = shape.layers * shape.kv * number_bytes(dtype)
  title = pathlib.Path(name).name
  profile = values.times is not None and values.times.endswith(".json")
  if profile != (values.capacities is not None) or (
    values.rules == "distserve" and not profile
  ):
    raise OptionError(
      "--times, --capacities, --rules",
      f"{values.times}, {values.capacities}, {values.rules}",
      "a profile and capacities of DistServe together, and its rules with them",
      "pass --times=FILE.json --capacities=FILE.csv, or neither",
    )
  if profile:
    made = DistServeModel(
      name=title,
      times=read_profile(values.times, name),
      capacity_tokens=read_capacities(values.capacities, name),
      kv_token_bytes=kv,
      own_rules=values.rules == "distserve",
      max_prefill_tokens=values.prefill_tokens,
    )
    return made, f"times of {pathlib.Path(values.times).name}"
  if values.times is not None:
    calls = read_calls(values.times)
    times = TensorTimes.fit(calls)
    errors = sorted(abs(x) for x in times.errors(calls))
    source = (
      f"times fitted to {len(calls)} calls, off by "
      f"{100 * errors[len(errors) // 2]:.1f} % in the median"
    )
  else:
    times = TensorTimes.on(machine, shape, dtype=dtype)
    source = f"times predicted from figures of {machine.name}"
  return SizedModel(
    name=title,
    times=times,
    weight_bytes=(shape.layers * shape.weights + shape.tables)
    * number_bytes(dtype),
    kv_token_bytes=kv,
    device_bytes=_USABLE * machine.chip.hbm_bytes,
    tensors=[t for t in (1, 2, 4, 8) if not shape.heads % t],
    pipelines=[p for p in (1, 2, 4, 8) if not shape.layers % p],
    options={"max_prefill_tokens": values.prefill_tokens},
  ), source


# ---------------------------------------------------------------------------
# What is found
# ---------------------------------------------------------------------------


def _grown(
  search: PlacementSearch,
  found: ServingPlacement,
  rate: float,
  asked: _Service,
) -> ServingPlacement:
  """A placement with so many more instances that all keep the limits.

  Its groups were rated one by one; together, and with caches that move, they
  may be good for less.
  """
  for _ in range(_GROWTHS):
    (met,) = search.shares(found, [rate], transfer=asked.transfer)
    if met >= asked.limits.share:
      break
    groups = tuple(
      dataclasses.replace(one, count=one.count + math.ceil(one.count / 10))
      for one in found.groups
    )
    found = dataclasses.replace(
      found,
      groups=groups,
      goodput=min(one.goodput * one.count for one in groups),
    )
  return found


def _row(
  search: PlacementSearch, found: ServingPlacement, asked: _Service
) -> dict[str, Any]:
  """A placement, and what it does with and without transfers."""
  without = search.whole_goodput(found, transfer=False)
  moves = len(found.groups) > 1
  with_ = search.whole_goodput(found) if moves else without
  rate = with_ or without or found.goodput
  moved = search.simulate(found, rate) if moves else None
  return {
    "kind": found.kind,
    "groups": [dataclasses.asdict(one) for one in found.groups],
    "devices": found.devices,
    "goodput": found.goodput,
    "simulated_goodput": with_ if asked.transfer else without,
    "without_transfer": without,
    "with_transfer": with_,
    "moved_share": 0.0 if moved is None else _moved(moved),
  }


def _beyond(asked: _Service) -> int:
  """Requests that are longer than the model's context."""
  total = (one.prompt_tokens + one.new_tokens for one in asked.trace)
  return sum(n > asked.context > 0 for n in total)


def _moved(found: ClusterResult) -> float:
  """Part of all latency in which caches moved."""
  done = [one for one in found.served if not one.rejected]
  spent = sum(one.last_token_s - one.arrival_s for one in done)
  return sum(one.moved_s for one in done) / spent if spent else 0.0


def _later(values: flags.FlagValues, asked: _Service) -> list[dict[str, Any]]:
  """Placements after drifts of the trace."""
  if values.replan is None:
    return []

  def plan(
    requests: Sequence[TraceRequest], now: TrafficSummary
  ) -> ServingPlacement | None:
    search = PlacementSearch(
      asked.model, asked.cluster, requests, asked.limits, each=asked.each,
      near=0.05, stream=values.stream,
    )  # fmt: skip
    found = [
      search.high_affinity(now.rate[0]),
      search.colocated(now.rate[0]),
    ]
    able = [one for one in found if one is not None]
    return min(able, key=lambda one: one.devices, default=None)

  return [
    {
      "time_s": one.time_s,
      "why": one.why,
      "placement": None
      if one.placement is None
      else dataclasses.asdict(one.placement)
      | {"devices": one.placement.devices},
    }
    for one in replan(_came(values, asked), plan, window_s=values.replan)
  ]


def _came(values: flags.FlagValues, asked: _Service) -> Sequence[TraceRequest]:
  """The trace as it came, or at --rate."""
  if values.rate is None:
    return asked.trace
  return at_rate(asked.trace, values.rate)


def _roles(
  values: flags.FlagValues,
  search: PlacementSearch,
  found: Sequence[ServingPlacement],
  asked: _Service,
) -> dict[str, Any] | None:
  """The best placement that reads apart, with roles that stay and change."""
  apart = [one for one in found if len(one.groups) > 1]
  if values.replan is None or not apart:
    return None
  still = search.simulator(apart[0], transfer=asked.transfer)
  planner = DriftingRoles(
    instances={one.name: one for one in still.instances},
    limits=asked.limits,
    window_s=values.replan,
    policy=still.policy,
    links=still.links,
    kv_token_bytes=still.kv_token_bytes,
    transfer=still.transfer,
    stream=still.stream,
  )
  moving = dataclasses.replace(still, roles=planner)
  trace = _came(values, asked)
  both = [one.run(trace) for one in (still, moving)]
  met = [share_met(x.served, asked.limits, each=asked.each) for x in both]
  return {
    "groups": [dataclasses.asdict(one) for one in apart[0].groups],
    "rate": trace_rate(trace),
    "share_as_placed": met[0],
    "share_with_changes": met[1],
    "changes": [dataclasses.asdict(one) for one in both[1].role_changes],
  }


def _curves(
  path: str,
  search: PlacementSearch,
  found: Sequence[ServingPlacement],
  rows: Sequence[dict[str, Any]],
  asked: _Service,
) -> None:
  top = max(row["simulated_goodput"] / row["devices"] for row in rows)
  series = {}
  for one in found:
    met = search.shares(
      one,
      [top * part * one.devices for part in _CURVE],
      transfer=asked.transfer,
    )
    points = [
      (top * part, 100 * share) for part, share in zip(_CURVE, met, strict=True)
    ]
    series[f"{one.kind}, {one.devices} devices"] = points
  draw.curves(
    series,
    path,
    across="requests a second of a device",
    up="requests within both limits, %",
    level=100 * asked.limits.share,
    title=f"{asked.model.name}: {words_of_limits(limits_record(asked.limits))}",
  )


def _timeline(path: str, found: ClusterResult) -> None:
  loads: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
  for what in ("queued_requests", "running_requests", "used_tokens"):
    loads[what.replace("_", " ")] = {
      name: (
        [one.time_s for one in points],
        [float(getattr(one, what)) for one in points],
      )
      for name, points in found.loads.items()
    }
  draw.cluster(found.timeline, loads, path)


def limits_record(limits: Limits) -> dict[str, float | None]:
  """Limits as JSON has them; None is no limit."""
  return {
    name: None if math.isinf(value) else value
    for name, value in dataclasses.asdict(limits).items()
  }


def words_of_limits(limits: dict[str, float | None]) -> str:
  """Limits for people, of `limits_record`."""
  times = " and ".join(
    f"{name.removesuffix('_s').upper()} of any length"
    if limits[name] is None
    else f"{name.removesuffix('_s').upper()} {limits[name]:g} s"
    for name in ("ttft_s", "tpot_s")
  )
  return f"{times} for {100 * (limits['share'] or 0):g} %"


def _instances(groups: Sequence[dict[str, Any]]) -> str:
  words = []
  for one in groups:
    stages = f" x {one['stages']} stages" if one["stages"] > 1 else ""
    words.append(f"{one['count']} {one['role']} of TP {one['tensor']}{stages}")
  return " + ".join(words)


def _words(record: dict[str, Any], values: flags.FlagValues) -> Iterator[str]:
  nodes, devices = record["cluster"]
  yield (
    f"{record['model']} on {nodes} x {devices} devices: "
    f"{words_of_limits(record['limits'])}; {record['requests']} requests"
  )
  yield f"{record['source']}; {record['simulations']} simulations"
  if record["beyond_context"]:
    yield (
      f"{record['beyond_context']} requests are longer than the model's "
      f"context of {record['context']:,} tokens, which has to be extended"
    )
  yield ""
  yield from strategies.markdown(
    ("placement", "instances"),
    ("devices", "requests/s", "a device", "no transfer", "transfer", "moving"),
    [
      (
        row["kind"],
        _instances(row["groups"]),
        f"{row['devices']}",
        f"{row['simulated_goodput']:.3g}",
        f"{row['simulated_goodput'] / row['devices']:.3g}",
        f"{row['without_transfer']:.3g}",
        f"{row['with_transfer']:.3g}",
        f"{100 * row['moved_share']:.2g} %",
      )
      for row in record["placements"]
    ],
  )
  best = record["placements"][0]
  yield "moving: part of all latency in which caches move"
  if values.stream:
    yield f"  beside reading they move in {values.stream} parts, uncounted"
  yield ""
  yield f"best: {_instances(best['groups'])}"
  if record["rate"] is not None:
    yield f"  for {record['rate']:g} requests/s"
    good = best["simulated_goodput"]
    if best["devices"] > nodes * devices:
      yield (
        f"  on {best['devices']} devices: the cluster has {nodes * devices}, "
        "on which no placement serves this rate"
      )
    if good < record["rate"]:
      yield f"  of which all together are good for {good:.3g}"
  if record["refused"]:
    yield (
      f"  {len(record['refused'])} of {record['requests']} requests are "
      f"refused and count as late: {record['refused'][0]}"
    )
  for name, at in record["percentiles"].items():
    times = ", ".join(f"{p} {1e3 * x:.4g}" for p, x in at.items())
    at_rate = "this rate" if record["rate"] is not None else "its goodput"
    yield f"  {name.removesuffix('_s').upper()} (ms) at {at_rate}: {times}"
  for one in record["replanned"]:
    made = one["placement"]
    kind = "no placement" if made is None else _instances(made["groups"])
    why = f" ({one['why']})" if one["why"] else ""
    yield f"  from {one['time_s']:.0f} s: {kind}{why}"
  roles = record["roles"]
  if roles is not None:
    yield (
      f"  {_instances(roles['groups'])}, at {roles['rate']:.3g} requests/s: "
      f"{100 * roles['share_as_placed']:.3g} % within the limits as placed, "
      f"{100 * roles['share_with_changes']:.3g} % with roles that change"
    )
    for one in roles["changes"]:
      yield (
        f"    from {one['time_s']:.0f} s {one['name']} is {one['role']} "
        f"({one['why']})"
      )
  elif values.replan is not None:
    yield "  no placement reads apart, whose roles could change"
  if values.rules == "distserve":
    yield "rules of DistServe's simulator: caches move in no time"

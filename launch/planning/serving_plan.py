"""The sub-command serve of launch.plan: number and kind of instances.

It searches placements of prefill and decode on a cluster by simulation, and of
instances that do both, and prints the goodput of each (DistServe).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from absl import flags

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link, number_bytes
from ringjax.plan import draw, machines
from ringjax.plan.flexgen import offload_tiers
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

from ..shared import common, console
from ..shared import machines as flag_machines
from . import aot, offload, strategies

NAME = "plan"
_OPT_CONTEXT = 2048
_MODEL, _CHIP = "llama-3.1-8b", "a100"
# Part of a device's memory that weights and cache fill.
_USABLE = 0.9
# Largest number of times that a placement for a rate grows by a tenth.
_GROWTHS = 4
# Request rates of the curves, as fractions of the best goodput.
_CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Service:
  """Model, cluster, trace and limits that a placement is searched for."""

  model: SizedModel | DistServeModel
  cluster: GpuCluster
  trace: list[TraceRequest]
  limits: Limits
  separate_limits: bool
  transfer: bool
  source: str
  context: int


def served(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints how many instances of which kind serve a trace."""
  common.check_plot(values)
  for name in ("rate", "replan"):
    if values[name].value is not None:
      number(f"--{name}", values[name].value, above=0)
  if values.plot is not None or values.timeline is not None:
    draw.figures()
  screen = console.Screen(NAME, stderr)
  service = _parse_service(values)
  screen.begin("simulating", unit="runs")
  try:
    search = PlacementSearch(
      service.model,
      service.cluster,
      service.trace,
      service.limits,
      each=service.separate_limits,
      stream=values.stream,
      progress=screen.at,
    )
    if values.rate is None:
      placements = search.fill()
    else:
      candidates = (
        search.high_affinity(values.rate),
        search.low_affinity(values.rate),
        search.colocated(values.rate),
      )
      placements = [
        placement for placement in candidates if placement is not None
      ]
    if not placements:
      raise OptionError(
        "--slo",
        f"{values.slo}, which no shape meets even for single requests",
        "limits above the times of an idle instance",
        "pass larger ones, or a faster --chip",
      )
    if values.rate is not None:
      placements = [
        _grow(search, placement, values.rate, service)
        for placement in placements
      ]
    pairs = [
      (placement, _row(search, placement, service)) for placement in placements
    ]
    if values.rate is None:
      pairs.sort(key=lambda x: (-x[1]["simulated_goodput"], x[0].devices))
    else:
      size = service.cluster.size
      # Placements that fit the cluster come first.
      pairs.sort(key=lambda x: (x[0].devices > size, x[0].devices))
    placements, rows = (
      [placement for placement, _ in pairs],
      [row for _, row in pairs],
    )
    replanned = _replanned(values, service)
    roles = _roles(values, search, placements, service)
    best = search.simulate(
      placements[0],
      values.rate or rows[0]["simulated_goodput"] or placements[0].goodput,
      transfer=service.transfer,
      timeline=values.timeline is not None,
    )
    if values.plot is not None:
      _curves(values.plot, search, placements, rows, service)
  finally:
    screen.end()
  if values.timeline is not None:
    _timeline(values.timeline, best)
    screen.say(f"wrote {values.timeline}")
  if values.plot is not None:
    screen.say(f"wrote {values.plot}")
  record = {
    "model": service.model.name,
    "cluster": [service.cluster.nodes, service.cluster.devices],
    "limits": limits_record(service.limits),
    "requests": len(service.trace),
    "trace_rate": trace_rate(service.trace),
    "context": service.context,
    "beyond_context": _beyond(service),
    "refused": [
      request.rejected for request in best.served if request.rejected
    ],
    "rate": values.rate,
    "source": service.source,
    "placements": rows,
    "percentiles": percentiles(best.served),
    "replanned": replanned,
    "roles": roles,
    "simulations": search.simulations,
  }
  strategies.put(values, stdout, record, list(_lines(record, values)))


# ---------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------


def _parse_service(values: flags.FlagValues) -> _Service:
  names = values.model or [_MODEL]
  if len(names) > 1:
    raise OptionError(
      "--model", ",".join(names), "one model", "pass one name or folder"
    )
  nodes, devices = strategies.pair("--cluster", values.cluster, "NODESxDEVICES")
  distserve_rules = values.rules == "distserve"
  if distserve_rules and values.stream:
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
  link_between = machine.between or inside
  if values["bandwidth"].present:
    link_between = flag_machines.link(values, latency_s=0.0, ports=1)
  model, source = _model(values, names[0], machine)
  trace = _trace(values)
  if distserve_rules:
    trace = as_distserve_counts(trace)
  return _Service(
    model=model,
    cluster=GpuCluster(
      nodes=nodes, devices=devices, inside=inside, between=link_between
    ),
    trace=trace,
    limits=limits_of(values.slo),
    separate_limits=distserve_rules,
    transfer=not distserve_rules,
    source=source,
    context=_context(names[0]),
  )


def _context(name: str) -> int:
  """The longest context, prompt and answer, that a model supports."""
  if name in offload_tiers.OPT:
    return _OPT_CONTEXT
  from ringjax.models.checkpoint import abstract

  return abstract(aot.config_of(name)).config.longest or 0


def limits_of(text: str) -> Limits:
  """Parses the limits of --slo."""
  names = {"ttft": "ttft_s", "tpot": "tpot_s", "share": "share"}
  limits: dict[str, float] = {}
  try:
    for part in text.split(","):
      name, value = part.split("=")
      if limits.setdefault(names[name.strip()], float(value)) != float(value):
        raise ValueError("twice")
  except (KeyError, ValueError):
    raise OptionError(
      "--slo",
      text,
      "ttft=SECONDS, tpot=SECONDS, share=PART with commas between",
      "write it like ttft=0.2,tpot=0.1,share=0.9",
    ) from None
  for name in ("ttft_s", "tpot_s"):
    if name in limits:
      number(f"--slo {name}", limits[name], above=0)
  return Limits(**limits)


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
    model = DistServeModel(
      name=title,
      times=read_profile(values.times, name),
      capacity_tokens=read_capacities(values.capacities, name),
      kv_token_bytes=kv,
      own_rules=values.rules == "distserve",
      max_prefill_tokens=values.prefill_tokens,
    )
    return model, f"times of {pathlib.Path(values.times).name}"
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
# Placements
# ---------------------------------------------------------------------------


def _grow(
  search: PlacementSearch,
  placement: ServingPlacement,
  rate: float,
  service: _Service,
) -> ServingPlacement:
  """Adds instances to a placement until it meets the limits at `rate`.

  The search rates its groups one by one; together, and with caches that move,
  they may serve less.
  """
  for _ in range(_GROWTHS):
    (met,) = search.shares(placement, [rate], transfer=service.transfer)
    if met >= service.limits.share:
      break
    groups = tuple(
      dataclasses.replace(
        group, count=group.count + math.ceil(group.count / 10)
      )
      for group in placement.groups
    )
    placement = dataclasses.replace(
      placement,
      groups=groups,
      goodput=min(group.goodput * group.count for group in groups),
    )
  return placement


def _row(
  search: PlacementSearch, placement: ServingPlacement, service: _Service
) -> dict[str, Any]:
  """A row of the table: a placement, its goodput with and without transfers."""
  without = search.whole_goodput(placement, transfer=False)
  moves = len(placement.groups) > 1
  with_ = search.whole_goodput(placement) if moves else without
  rate = with_ or without or placement.goodput
  moved = search.simulate(placement, rate) if moves else None
  return {
    "kind": placement.kind,
    "groups": [dataclasses.asdict(group) for group in placement.groups],
    "devices": placement.devices,
    "goodput": placement.goodput,
    "simulated_goodput": with_ if service.transfer else without,
    "without_transfer": without,
    "with_transfer": with_,
    "moved_share": 0.0 if moved is None else _moved_share(moved),
  }


def _beyond(service: _Service) -> int:
  """Requests that are longer than the model's context."""
  total = (
    request.prompt_tokens + request.new_tokens for request in service.trace
  )
  return sum(n > service.context > 0 for n in total)


def _moved_share(result: ClusterResult) -> float:
  """Fraction of the total latency that is spent moving caches."""
  finished = [request for request in result.served if not request.rejected]
  spent = sum(request.last_token_s - request.arrival_s for request in finished)
  return sum(request.moved_s for request in finished) / spent if spent else 0.0


def _replanned(
  values: flags.FlagValues, service: _Service
) -> list[dict[str, Any]]:
  """Placements that are planned again after drifts of the trace."""
  if values.replan is None:
    return []

  def plan(
    requests: Sequence[TraceRequest], summary: TrafficSummary
  ) -> ServingPlacement | None:
    search = PlacementSearch(
      service.model, service.cluster, requests, service.limits,
      each=service.separate_limits, near=0.05, stream=values.stream,
    )  # fmt: skip
    candidates = [
      search.high_affinity(summary.rate[0]),
      search.colocated(summary.rate[0]),
    ]
    placements = [
      placement for placement in candidates if placement is not None
    ]
    return min(
      placements, key=lambda placement: placement.devices, default=None
    )

  return [
    {
      "time_s": change.time_s,
      "why": change.why,
      "placement": None
      if change.placement is None
      else dataclasses.asdict(change.placement)
      | {"devices": change.placement.devices},
    }
    for change in replan(
      _arrivals(values, service), plan, window_s=values.replan
    )
  ]


def _arrivals(
  values: flags.FlagValues, service: _Service
) -> Sequence[TraceRequest]:
  """The trace at its recorded rate, or at --rate."""
  if values.rate is None:
    return service.trace
  return at_rate(service.trace, values.rate)


def _roles(
  values: flags.FlagValues,
  search: PlacementSearch,
  placements: Sequence[ServingPlacement],
  service: _Service,
) -> dict[str, Any] | None:
  """Compares fixed and changing roles of the best disaggregated placement."""
  disaggregated = [
    placement for placement in placements if len(placement.groups) > 1
  ]
  if values.replan is None or not disaggregated:
    return None
  fixed = search.simulator(disaggregated[0], transfer=service.transfer)
  planner = DriftingRoles(
    instances={instance.name: instance for instance in fixed.instances},
    limits=service.limits,
    window_s=values.replan,
    policy=fixed.policy,
    links=fixed.links,
    kv_token_bytes=fixed.kv_token_bytes,
    transfer=fixed.transfer,
    stream=fixed.stream,
  )
  drifting = dataclasses.replace(fixed, roles=planner)
  trace = _arrivals(values, service)
  results = [simulator.run(trace) for simulator in (fixed, drifting)]
  met = [
    share_met(result.served, service.limits, each=service.separate_limits)
    for result in results
  ]
  return {
    "groups": [dataclasses.asdict(group) for group in disaggregated[0].groups],
    "rate": trace_rate(trace),
    "share_as_placed": met[0],
    "share_with_changes": met[1],
    "changes": [
      dataclasses.asdict(change) for change in results[1].role_changes
    ],
  }


def _curves(
  path: str,
  search: PlacementSearch,
  placements: Sequence[ServingPlacement],
  rows: Sequence[dict[str, Any]],
  service: _Service,
) -> None:
  top = max(row["simulated_goodput"] / row["devices"] for row in rows)
  series = {}
  for placement in placements:
    met = search.shares(
      placement,
      [top * part * placement.devices for part in _CURVE],
      transfer=service.transfer,
    )
    points = [
      (top * part, 100 * share) for part, share in zip(_CURVE, met, strict=True)
    ]
    series[f"{placement.kind}, {placement.devices} devices"] = points
  draw.curves(
    series,
    path,
    across="requests a second of a device",
    up="requests within both limits, %",
    level=100 * service.limits.share,
    title=f"{service.model.name}: "
    f"{words_of_limits(limits_record(service.limits))}",
  )


def _timeline(path: str, result: ClusterResult) -> None:
  loads: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
  for quantity in ("queued_requests", "running_requests", "used_tokens"):
    loads[quantity.replace("_", " ")] = {
      name: (
        [point.time_s for point in points],
        [float(getattr(point, quantity)) for point in points],
      )
      for name, points in result.loads.items()
    }
  draw.cluster(result.timeline, loads, path)


def limits_record(limits: Limits) -> dict[str, float | None]:
  """Limits as JSON, with None for no limit."""
  return {
    name: None if math.isinf(value) else value
    for name, value in dataclasses.asdict(limits).items()
  }


def words_of_limits(limits: dict[str, float | None]) -> str:
  """Limits in words, from `limits_record`."""
  times = " and ".join(
    f"{name.removesuffix('_s').upper()} of any length"
    if limits[name] is None
    else f"{name.removesuffix('_s').upper()} {limits[name]:g} s"
    for name in ("ttft_s", "tpot_s")
  )
  return f"{times} for {100 * (limits['share'] or 0):g} %"


def _instances(groups: Sequence[dict[str, Any]]) -> str:
  parts = []
  for group in groups:
    stages = f" x {group['stages']} stages" if group["stages"] > 1 else ""
    parts.append(
      f"{group['count']} {group['role']} of TP {group['tensor']}{stages}"
    )
  return " + ".join(parts)


def _lines(record: dict[str, Any], values: flags.FlagValues) -> Iterator[str]:
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
    goodput = best["simulated_goodput"]
    if best["devices"] > nodes * devices:
      yield (
        f"  on {best['devices']} devices: the cluster has {nodes * devices}, "
        "on which no placement serves this rate"
      )
    if goodput < record["rate"]:
      yield f"  of which all together are good for {goodput:.3g}"
  if record["refused"]:
    yield (
      f"  {len(record['refused'])} of {record['requests']} requests are "
      f"refused and count as late: {record['refused'][0]}"
    )
  for name, at in record["percentiles"].items():
    times = ", ".join(f"{p} {1e3 * x:.4g}" for p, x in at.items())
    at_rate = "this rate" if record["rate"] is not None else "its goodput"
    yield f"  {name.removesuffix('_s').upper()} (ms) at {at_rate}: {times}"
  for change in record["replanned"]:
    placement = change["placement"]
    kind = (
      "no placement" if placement is None else _instances(placement["groups"])
    )
    why = f" ({change['why']})" if change["why"] else ""
    yield f"  from {change['time_s']:.0f} s: {kind}{why}"
  roles = record["roles"]
  if roles is not None:
    yield (
      f"  {_instances(roles['groups'])}, at {roles['rate']:.3g} requests/s: "
      f"{100 * roles['share_as_placed']:.3g} % within the limits as placed, "
      f"{100 * roles['share_with_changes']:.3g} % with roles that change"
    )
    for change in roles["changes"]:
      yield (
        f"    from {change['time_s']:.0f} s {change['name']} is "
        f"{change['role']} ({change['why']})"
      )
  elif values.replan is not None:
    yield "  no placement reads apart, whose roles could change"
  if values.rules == "distserve":
    yield "rules of DistServe's simulator: caches move in no time"

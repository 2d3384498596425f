"""How many instances of which kind a cluster runs: DistServe's placements.

Guarantees: a search is exhaustive over the shapes of a model and repeatable;
what it returns was simulated. Of equal goodput a device the fewer devices win.
Cost: some ten simulations for each shape and phase; pairs are simulated from
the most promising one on, until no other can be better.

  high affinity  links between nodes are fast: prefill and decode are placed one
                 by one, each in the shape of the best goodput a device, and
                 replicated (Algorithm 1); for a rate in the shape of which the
                 fewest devices serve it
  low affinity   a stage of prefill and the same stage of decode share a node:
                 pairs are simulated together and replicated (Algorithm 2)
  colocated      instances that do both, to compare with

A shape is (tensor, stages): devices that share every layer, times the stages of
a pipeline. Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster.cluster_simulator import (
  ClusterResult,
  ClusterSimulator,
  SimulatedInstance,
)
from ringjax.serve.cluster.fitted_times import TensorTimes
from ringjax.serve.cluster.goodput import (
  Goodput,
  GoodputSearch,
  at_rate,
  goodput,
)
from ringjax.serve.cluster.phase_times import QuadraticTimes
from ringjax.serve.cluster.routing import RoutingPolicy, ShortestQueue
from ringjax.serve.cluster.served import Limits, ServedRequest
from ringjax.serve.traces import TraceRequest

# What a phase alone promises of a pair: queues of prefill spread arrivals, so
# that decode may do a little better behind them than on its own.
_BOUND = 1.15
_ENDLESS = 2**62


@runtime_checkable
class InstanceFamily(Protocol):
  """A model that runs in several shapes."""

  @property
  def kv_token_bytes(self) -> int | float:
    """Of a token in all layers."""
    ...

  def shapes(self) -> list[tuple[int, int]]:
    """The (tensor, stages) on which it fits."""
    ...

  def instance(
    self, name: str, role: str, tensor: int, stages: int
  ) -> SimulatedInstance:
    """An instance in one of the shapes."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedModel:
  """A model by its sizes and the seven constants of its times.

  Attributes:
    name: of the model.
    times: for any number of devices.
    weight_bytes: of all weights.
    kv_token_bytes: of a token in all layers.
    device_bytes: memory of a device that weights and cache may fill.
    tensors: numbers of devices that may share every layer.
    pipelines: numbers of stages of a pipeline.
    options: of `SimulatedInstance`, e.g. {"max_prefill_tokens": 4096}.
  """

  name: str
  times: TensorTimes
  weight_bytes: int | float
  kv_token_bytes: int | float
  device_bytes: int | float
  tensors: Sequence[int] = (1, 2, 4, 8)
  pipelines: Sequence[int] = (1, 2, 4)
  options: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    for name in ("weight_bytes", "kv_token_bytes", "device_bytes"):
      number(name, getattr(self, name), above=0)

  def capacity_tokens(self, devices: int) -> int:
    """Tokens of the cache of an instance; 0 where weights do not fit."""
    room = devices * self.device_bytes - self.weight_bytes
    return max(0, int(room // self.kv_token_bytes))

  def shapes(self) -> list[tuple[int, int]]:
    """As `InstanceFamily`."""
    return [
      (t, p)
      for t in self.tensors
      for p in self.pipelines
      if self.capacity_tokens(t * p)
    ]

  def instance(
    self, name: str, role: str, tensor: int, stages: int
  ) -> SimulatedInstance:
    """As `InstanceFamily`."""
    return SimulatedInstance(
      name=name,
      role=role,
      times=self.times.at(tensor),
      stages=stages,
      capacity_tokens=self.capacity_tokens(tensor * stages),
      **self.options,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCluster:
  """Devices to place instances on.

  Attributes:
    nodes: how many, N.
    devices: of a node, M.
    inside: link of a device to another of its node; None is no time.
    between: link of a device to another node; None is no time.
  """

  nodes: int
  devices: int
  inside: Link | None = None
  between: Link | None = None

  def __post_init__(self) -> None:
    positive_int("nodes", self.nodes)
    positive_int("devices", self.devices)

  @property
  def size(self) -> int:
    """Devices in all."""
    return self.nodes * self.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceGroup:
  """Equal instances of a placement.

  Attributes:
    role: of `routing.ROLES`.
    tensor: devices that share every layer.
    stages: of the pipeline.
    count: of instances.
    goodput: requests a second of one of them.
  """

  role: str
  tensor: int
  stages: int
  count: int
  goodput: float

  @property
  def devices(self) -> int:
    """Of all instances."""
    return self.tensor * self.stages * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlacement:
  """What a search found.

  Attributes:
    kind: "high affinity", "low affinity" or "colocated".
    groups: the instances.
    goodput: requests a second that the groups are good for.
  """

  kind: str
  groups: tuple[InstanceGroup, ...]
  goodput: float

  @property
  def devices(self) -> int:
    """That it takes."""
    return sum(one.devices for one in self.groups)

  @property
  def per_device(self) -> float:
    """Goodput of a device."""
    return self.goodput / self.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rated:
  """Something that can be replicated: its shapes, devices and goodput."""

  shapes: tuple[tuple[int, int], ...]
  devices: int
  rate: float

  @property
  def order(self) -> tuple[float, int]:
    """The best is the largest: goodput of a device, then fewer devices."""
    return self.rate / self.devices, -self.devices

  def count(self, rate: int | float) -> int:
    """How many serve a rate."""
    return math.ceil(rate / self.rate - 1e-9)

  def order_at(self, rate: int | float | None) -> tuple[int | float, ...]:
    """As `order`; for a rate the fewest devices that serve it."""
    if rate is None:
      return self.order
    count = self.count(rate)
    return -count * self.devices, count * self.rate, *self.order


class PlacementSearch:
  """Searches placements of a model for a workload.

  Attributes:
    simulations: how often a trace was simulated.
  """

  def __init__(
    self,
    model: InstanceFamily,
    cluster: GpuCluster,
    trace: Sequence[TraceRequest],
    limits: Limits,
    *,
    near: int | float = 0.02,
    each: bool = False,
    policy: RoutingPolicy | None = None,
    stream: int = 0,
    progress: Callable[[int], None] | None = None,
  ) -> None:
    """Checks what can be searched.

    Args:
      model: in its shapes.
      cluster: the devices.
      trace: requests; their gaps are scaled to search the goodput.
      limits: what they are promised.
      near: of `goodput`.
      each: of `goodput.share_met`.
      policy: of routing; None for `ShortestQueue`.
      stream: of `ClusterSimulator`.
      progress: called with the number of simulations so far.

    Raises:
      OptionError: no shape of the model fits on the cluster.
    """
    self.model, self.cluster, self.limits = model, cluster, limits
    self.trace, self.near, self.each = list(trace), near, each
    self.policy = ShortestQueue() if policy is None else policy
    self.moving: Any = dict(
      stream=stream, transfer="push" if stream else "pull"
    )
    self.progress = progress
    self.simulations = 0
    # Without any second token there is nothing to split.
    self._answers = any(one.new_tokens > 1 for one in self.trace)
    self._phases: dict[tuple[str, int, int], float] = {}
    self.shapes = [
      (t, p)
      for t, p in model.shapes()
      if t <= cluster.devices and t * p <= cluster.size
    ]
    if not self.shapes:
      raise OptionError(
        "cluster",
        f"{cluster.nodes} nodes of {cluster.devices} devices",
        f"room for {getattr(model, 'name', 'the model')} in one of its shapes",
        "pass more devices, or shapes with more stages",
      )

  # One phase, or both.

  def phase_goodput(self, role: str, tensor: int, stages: int) -> float:
    """Requests a second of one instance that has nothing else to wait for.

    Args:
      role: "prefill" meets the TTFT alone, "decode" the TPOT alone, "both"
        both.
      tensor, stages: its shape.
    """
    key = (role, tensor, stages)
    if key not in self._phases:
      one = self.model.instance("served", role, tensor, stages)
      limits, trace, others = self.limits, self.trace, []
      if role == "prefill":
        one = dataclasses.replace(one, role="both")
        limits = dataclasses.replace(limits, tpot_s=math.inf)
        trace = [dataclasses.replace(x, new_tokens=1) for x in trace]
      elif role == "decode":
        # Prompts are read at once and without a queue.
        limits = dataclasses.replace(limits, ttft_s=math.inf)
        others = [
          SimulatedInstance(
            name="reader",
            role="prefill",
            times=QuadraticTimes(),
            capacity_tokens=_ENDLESS,
            max_prefill_tokens=_ENDLESS,
          )
        ]
      self._phases[key] = self._search([one, *others], limits, trace).rate
    return self._phases[key]

  def pair_goodput(
    self, prefill: tuple[int, int], decode: tuple[int, int], link: Link | None
  ) -> float:
    """Requests a second of one instance of each phase, together.

    Args:
      prefill, decode: shapes.
      link: of a device; each device of the smaller instance uses its own.
    """
    instances = [
      self.model.instance("prefill", "prefill", *prefill),
      self.model.instance("decode", "decode", *decode),
    ]
    both = min(math.prod(prefill), math.prod(decode))
    return self._search(
      instances, self.limits, self.trace, _wider(link, both)
    ).rate

  def _search(
    self,
    instances: Sequence[SimulatedInstance],
    limits: Limits,
    trace: Sequence[TraceRequest],
    links: Link | Mapping[tuple[str, str], Link] | None = None,
    first: float | None = None,
  ) -> Goodput:
    simulator = ClusterSimulator(
      instances=instances,
      policy=self.policy,
      links=links,
      kv_token_bytes=self.model.kv_token_bytes,
      **self.moving,
    )

    return goodput(
      self._server(simulator),
      trace,
      limits,
      first=first,
      near=self.near,
      each=self.each,
    )

  def _server(
    self, simulator: ClusterSimulator
  ) -> Callable[[list[TraceRequest]], list[ServedRequest]]:
    def serve(given: list[TraceRequest]) -> list[ServedRequest]:
      self._count()
      return simulator.run(given).served

    return serve

  def _count(self) -> None:
    self.simulations += 1
    if self.progress is not None:
      self.progress(self.simulations)

  def _rated(self, role: str) -> list[_Rated]:
    return [
      _Rated(
        shapes=((t, p),), devices=t * p, rate=self.phase_goodput(role, t, p)
      )
      for t, p in self.shapes
    ]

  def _best(self, role: str, rate: int | float | None) -> _Rated | None:
    """The best shape for a phase, if any meets its limit."""
    able = [one for one in self._rated(role) if one.rate]
    return max(able, key=lambda one: one.order_at(rate), default=None)

  # Searches.

  def high_affinity(
    self, rate: int | float | None = None
  ) -> ServingPlacement | None:
    """Algorithm 1.

    Args:
      rate: requests a second to place for; None for one instance of the phase
        that limits, and as many of the other one as it needs.

    Returns:
      The placement; None if a phase meets its limit in no shape, or answers
      have one token, which comes with the prompt.
    """
    if not self._answers:
      return None
    best = [self._best(role, rate) for role in ("prefill", "decode")]
    found = [one for one in best if one is not None]
    if len(found) < 2:
      return None
    wanted = max(one.rate for one in found) if rate is None else rate
    groups = tuple(
      _group(role, one, one.count(wanted))
      for role, one in zip(("prefill", "decode"), found, strict=True)
    )
    return _placed("high affinity", groups)

  def low_affinity(
    self, rate: int | float | None = None
  ) -> ServingPlacement | None:
    """Algorithm 2.

    Args:
      rate: requests a second to place for; None for one pair.

    Returns:
      The placement; None if no pair meets the limits, or as above.
    """
    if not self._answers:
      return None
    best: _Rated | None = None
    bounds = [
      (_Rated(shapes=pair, devices=devices, rate=bound * _BOUND), pair)
      for bound, devices, pair in self._pairs()
    ]
    # What a pair can't be better than; the most promising one first.
    for bound, pair in sorted(bounds, key=lambda x: x[0].order_at(rate))[::-1]:
      top = None if best is None else best.order_at(rate)
      if top is not None and bound.order_at(rate)[0] < top[0]:
        break
      found = dataclasses.replace(
        bound, rate=self.pair_goodput(*pair, self.cluster.inside)
      )
      if found.rate and (top is None or found.order_at(rate) > top):
        best = found
    if best is None:
      return None
    count = 1 if rate is None else best.count(rate)
    groups = tuple(
      InstanceGroup(
        role=role, tensor=t, stages=p, count=count, goodput=best.rate
      )
      for role, (t, p) in zip(("prefill", "decode"), best.shapes, strict=True)
    )
    return _placed("low affinity", groups)

  def _pairs(
    self,
  ) -> list[tuple[float, int, tuple[tuple[int, int], tuple[int, int]]]]:
    """(bound of the goodput, devices, shapes) of pairs, the best first."""
    found = {}
    cluster, known = self.cluster, set(self.shapes)
    for inter in range(1, cluster.nodes + 1):
      # The part of each pipeline that is in one node.
      parts = [(t, p // inter) for t, p in self.shapes if not p % inter]
      for tp, pp in parts:
        for td, pd in parts:
          inside = tp * pp + td * pd
          pair = (tp, pp * inter), (td, pd * inter)
          if inside > cluster.devices or not known.issuperset(pair):
            continue
          devices = inside * inter
          if devices <= cluster.size:
            bound = min(
              self.phase_goodput("prefill", *pair[0]),
              self.phase_goodput("decode", *pair[1]),
            )
            found[pair] = bound, devices, pair
    return sorted(
      (one for one in found.values() if one[0]),
      key=lambda one: (-one[0] / one[1], one[1], one[2]),
    )

  def colocated(
    self, rate: int | float | None = None
  ) -> ServingPlacement | None:
    """The best shape of instances that do both.

    Args:
      rate: requests a second to place for; None for one instance.
    """
    best = self._best("both", rate)
    if best is None:
      return None
    count = 1 if rate is None else best.count(rate)
    return _placed("colocated", (_group("both", best, count),))

  def fill(self) -> list[ServingPlacement]:
    """The best that the whole cluster can do, of each kind, best first.

    High affinity tries all pairs of shapes and counts that fit, so that it is
    the best split of the devices; the others replicate their best unit that
    fits.
    """
    found = []
    size = self.cluster.size
    reading: list[_Rated] = []
    making: list[_Rated] = []
    if self._answers:
      reading = [one for one in self._rated("prefill") if one.rate]
      making = [one for one in self._rated("decode") if one.rate]
    best: tuple[float, int, tuple[InstanceGroup, ...]] | None = None
    for one in reading:
      for n in range(1, size // one.devices + 1):
        for other in making:
          m = (size - n * one.devices) // other.devices
          if m < 1:
            continue
          # No more of either than the other one can follow.
          rate = min(n * one.rate, m * other.rate)
          m = math.ceil(rate / other.rate - 1e-9)
          used = n * one.devices + m * other.devices
          if best is None or (rate, -used) > (best[0], -best[1]):
            groups = _group("prefill", one, n), _group("decode", other, m)
            best = rate, used, groups
    if best is not None:
      found.append(_placed("high affinity", best[2]))
    pair, both = self.low_affinity(), self.colocated()
    for unit in (pair, both):
      if unit is not None:
        times = size // unit.devices
        groups = tuple(
          dataclasses.replace(one, count=one.count * times)
          for one in unit.groups
        )
        found.append(_placed(unit.kind, groups))
    return sorted(found, key=lambda x: (-x.goodput, x.devices))

  # What a placement does.

  def simulator(
    self,
    found: ServingPlacement,
    *,
    transfer: bool = True,
    timeline: bool = False,
  ) -> ClusterSimulator:
    """A cluster of a placement's instances.

    Args:
      found: the placement.
      transfer: whether caches take time to move.
      timeline: as of `ClusterSimulator`.
    """
    instances = [
      self.model.instance(
        f"{one.role}{n:02d}", one.role, one.tensor, one.stages
      )
      for one in found.groups
      for n in range(one.count)
    ]
    pair = found.kind == "low affinity"
    link = self.cluster.inside if pair else self.cluster.between
    if self.cluster.nodes == 1:
      link = self.cluster.inside
    lanes = min(one.tensor * one.stages for one in found.groups)
    return ClusterSimulator(
      instances=instances,
      policy=self.policy,
      links=_wider(link, lanes) if transfer else None,
      kv_token_bytes=self.model.kv_token_bytes,
      timeline=timeline,
      **self.moving,
    )

  def simulate(
    self,
    found: ServingPlacement,
    rate: int | float,
    *,
    transfer: bool = True,
    timeline: bool = False,
  ) -> ClusterResult:
    """What a placement does at a rate; options as of `simulator`."""
    self._count()
    made = self.simulator(found, transfer=transfer, timeline=timeline)
    return made.run(at_rate(self.trace, rate))

  def shares(
    self,
    found: ServingPlacement,
    rates: Sequence[float],
    *,
    transfer: bool = True,
  ) -> list[float]:
    """The share of requests within the limits at some rates."""
    made = self.simulator(found, transfer=transfer)
    search = GoodputSearch(
      self._server(made), self.trace, self.limits, each=self.each
    )
    return [search.share(rate) for rate in rates]

  def whole_goodput(
    self, found: ServingPlacement, *, transfer: bool = True
  ) -> float:
    """Requests a second of all instances of a placement together."""
    made = self.simulator(found, transfer=transfer)
    return self._search(
      made.instances, self.limits, self.trace, made.links, found.goodput
    ).rate


def _wider(link: Link | None, lanes: int) -> Link | None:
  if link is None:
    return None
  return dataclasses.replace(link, bandwidth=link.bandwidth * lanes)


def _group(role: str, one: _Rated, count: int) -> InstanceGroup:
  (t, p), *_ = one.shapes
  return InstanceGroup(
    role=role, tensor=t, stages=p, count=count, goodput=one.rate
  )


def _placed(kind: str, groups: tuple[InstanceGroup, ...]) -> ServingPlacement:
  return ServingPlacement(
    kind=kind,
    groups=groups,
    goodput=min(one.goodput * one.count for one in groups),
  )

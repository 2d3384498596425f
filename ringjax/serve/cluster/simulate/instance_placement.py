"""Search for the instances that a cluster should run: DistServe's placements.

Guarantees: a search is exhaustive over the shapes of a model and repeatable;
the placements that it returns were simulated. Of equal goodput per device the
fewer devices win.
Cost: some ten simulations for each shape and phase; pairs are simulated from
the most promising one on, until no other can be better.

  high affinity  links between nodes are fast: prefill and decode are placed
                 separately, each in the shape of the best goodput per device,
                 and replicated (Algorithm 1); given a rate, in the shape in
                 which the fewest devices serve it
  low affinity   a stage of prefill and the same stage of decode share a node:
                 pairs are simulated together and replicated (Algorithm 2)
  colocated      instances of both phases, as a baseline

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
from ringjax.serve.cluster.routing import RoutingPolicy, ShortestQueue
from ringjax.serve.cluster.simulate.cluster_simulator import (
  ClusterResult,
  ClusterSimulator,
  SimulatedInstance,
)
from ringjax.serve.cluster.simulate.goodput import (
  Goodput,
  GoodputSearch,
  at_rate,
  goodput,
)
from ringjax.serve.cluster.times.fitted_times import TensorTimes
from ringjax.serve.cluster.times.phase_times import QuadraticTimes
from ringjax.serve.cluster.times.request_times import Limits, ServedRequest
from ringjax.serve.traces import TraceRequest

# Factor by which a pair may exceed the goodput of its phases alone: a prefill
# queue spreads arrivals, which helps decode a little.
_BOUND = 1.15
_ENDLESS = 2**62


@runtime_checkable
class InstanceFamily(Protocol):
  """A model that can run in several shapes (tensor, stages)."""

  @property
  def kv_token_bytes(self) -> int | float:
    """Bytes of a token's keys and values in all layers."""
    ...

  def shapes(self) -> list[tuple[int, int]]:
    """Shapes (tensor, stages) in which the model fits."""
    ...

  def instance(
    self, name: str, role: str, tensor: int, stages: int
  ) -> SimulatedInstance:
    """Make an instance in one of the shapes."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedModel:
  """A model given by its sizes and the seven constants of its times.

  Attributes:
    name: Name of the model.
    times: Call times for any number of devices.
    weight_bytes: Bytes of all weights.
    kv_token_bytes: Bytes of a token's keys and values in all layers.
    device_bytes: Memory of a device for weights and cache, in bytes.
    tensors: Numbers of devices that may share every layer.
    pipelines: Numbers of pipeline stages.
    options: Options of `SimulatedInstance`, e.g. {"max_prefill_tokens": 4096}.
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
    """Cache capacity of an instance in tokens; 0 if weights do not fit."""
    room = devices * self.device_bytes - self.weight_bytes
    return max(0, int(room // self.kv_token_bytes))

  def shapes(self) -> list[tuple[int, int]]:
    """Shapes (tensor, stages) in which weights and some cache fit."""
    return [
      (t, p)
      for t in self.tensors
      for p in self.pipelines
      if self.capacity_tokens(t * p)
    ]

  def instance(
    self, name: str, role: str, tensor: int, stages: int
  ) -> SimulatedInstance:
    """Make an instance in one of the shapes."""
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
  """Nodes and devices on which instances are placed.

  Attributes:
    nodes: Number of nodes, N.
    devices: Number of devices per node, M.
    inside: Link between two devices of a node; None takes no time.
    between: Link between devices of two nodes; None takes no time.
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
    """Total number of devices."""
    return self.nodes * self.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceGroup:
  """Equal instances of a placement.

  Attributes:
    role: Role of the instances, one of `routing.ROLES`.
    tensor: Number of devices that share every layer.
    stages: Number of pipeline stages.
    count: Number of instances.
    goodput: Goodput of one instance in requests per second.
  """

  role: str
  tensor: int
  stages: int
  count: int
  goodput: float

  @property
  def devices(self) -> int:
    """Number of devices of all instances."""
    return self.tensor * self.stages * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlacement:
  """Instance groups that a search chose, with their goodput.

  Attributes:
    kind: "high affinity", "low affinity" or "colocated".
    groups: Groups of equal instances.
    goodput: Goodput of the whole placement in requests per second.
  """

  kind: str
  groups: tuple[InstanceGroup, ...]
  goodput: float

  @property
  def devices(self) -> int:
    """Number of devices of all groups."""
    return sum(group.devices for group in self.groups)

  @property
  def per_device(self) -> float:
    """Goodput per device."""
    return self.goodput / self.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rated:
  """A unit of instances to replicate: its shapes, devices and goodput."""

  shapes: tuple[tuple[int, int], ...]
  devices: int
  rate: float

  @property
  def order(self) -> tuple[float, int]:
    """Sort key, larger is better: goodput per device, then fewer devices."""
    return self.rate / self.devices, -self.devices

  def count(self, rate: int | float) -> int:
    """Number of copies of the unit that serve a rate."""
    return math.ceil(rate / self.rate - 1e-9)

  def order_at(self, rate: int | float | None) -> tuple[int | float, ...]:
    """Sort key at a rate: fewest devices first; None ranks as `order`."""
    if rate is None:
      return self.order
    count = self.count(rate)
    return -count * self.devices, count * self.rate, *self.order


class PlacementSearch:
  """Searches the best placements of a model for a workload.

  Attributes:
    simulations: Number of simulated traces so far.
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
    """Check the inputs and list the shapes that fit.

    Args:
      model: Model with its shapes.
      cluster: Nodes and devices.
      trace: Requests; their gaps are scaled to search the goodput.
      limits: Latency limits that requests should meet.
      near: Relative accuracy of the rate, as in `goodput`.
      each: Whether limits are met one by one, as in `goodput.share_met`.
      policy: Routing policy; None for `ShortestQueue`.
      stream: Number of streamed cache parts, as in `ClusterSimulator`.
      progress: Function called with the number of simulations so far.

    Raises:
      OptionError: If no shape of the model fits on the cluster.
    """
    self.model, self.cluster, self.limits = model, cluster, limits
    self.trace, self.near, self.each = list(trace), near, each
    self.policy = ShortestQueue() if policy is None else policy
    self.moving = dict(stream=stream, transfer="push" if stream else "pull")
    self.progress = progress
    self.simulations = 0
    # If all answers have one token, there is no decode to place.
    self._answers = any(request.new_tokens > 1 for request in self.trace)
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

  # Goodput of one phase, or of both.

  def phase_goodput(self, role: str, tensor: int, stages: int) -> float:
    """Goodput of one instance that never waits for the other phase.

    Args:
      role: "prefill" must meet the TTFT only, "decode" the TPOT only, "both"
        both.
      tensor, stages: Shape of the instance.
    """
    key = (role, tensor, stages)
    if key not in self._phases:
      instance = self.model.instance("served", role, tensor, stages)
      limits, trace, others = self.limits, self.trace, []
      if role == "prefill":
        instance = dataclasses.replace(instance, role="both")
        limits = dataclasses.replace(limits, tpot_s=math.inf)
        trace = [
          dataclasses.replace(request, new_tokens=1) for request in trace
        ]
      elif role == "decode":
        # The helper instance prefills in no time and without a queue.
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
      self._phases[key] = self._search([instance, *others], limits, trace).rate
    return self._phases[key]

  def pair_goodput(
    self, prefill: tuple[int, int], decode: tuple[int, int], link: Link | None
  ) -> float:
    """Goodput of one prefill and one decode instance together.

    Args:
      prefill, decode: Shapes of the two instances.
      link: Link of a device; each device of the smaller instance uses its own.
    """
    instances = [
      self.model.instance("prefill", "prefill", *prefill),
      self.model.instance("decode", "decode", *decode),
    ]
    num_lanes = min(math.prod(prefill), math.prod(decode))
    return self._search(
      instances, self.limits, self.trace, _aggregated_link(link, num_lanes)
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
    def serve(requests: list[TraceRequest]) -> list[ServedRequest]:
      self._count()
      return simulator.run(requests).served

    return serve

  def _count(self) -> None:
    self.simulations += 1
    if self.progress is not None:
      self.progress(self.simulations)

  def _rated_shapes(self, role: str) -> list[_Rated]:
    return [
      _Rated(
        shapes=((t, p),), devices=t * p, rate=self.phase_goodput(role, t, p)
      )
      for t, p in self.shapes
    ]

  def _best(self, role: str, rate: int | float | None) -> _Rated | None:
    """Best shape for a phase, or None if no shape meets its limit."""
    rated = [unit for unit in self._rated_shapes(role) if unit.rate]
    return max(rated, key=lambda unit: unit.order_at(rate), default=None)

  # Searches.

  def high_affinity(
    self, rate: int | float | None = None
  ) -> ServingPlacement | None:
    """Place prefill and decode instances separately: Algorithm 1.

    Args:
      rate: Requests per second to place for; None for one instance of the
        bottleneck phase, and as many of the other phase as it needs.

    Returns:
      The placement; None if a phase meets its limit in no shape, or answers
      have one token, which prefill computes.
    """
    if not self._answers:
      return None
    best = [self._best(role, rate) for role in ("prefill", "decode")]
    chosen = [unit for unit in best if unit is not None]
    if len(chosen) < 2:
      return None
    target_rate = max(unit.rate for unit in chosen) if rate is None else rate
    groups = tuple(
      _instance_group(role, unit, unit.count(target_rate))
      for role, unit in zip(("prefill", "decode"), chosen, strict=True)
    )
    return _placement("high affinity", groups)

  def low_affinity(
    self, rate: int | float | None = None
  ) -> ServingPlacement | None:
    """Place pairs of prefill and decode instances: Algorithm 2.

    Args:
      rate: Requests per second to place for; None for one pair.

    Returns:
      The placement; None if no pair meets the limits, or answers have one
      token.
    """
    if not self._answers:
      return None
    best: _Rated | None = None
    bounds = [
      (_Rated(shapes=pair, devices=devices, rate=bound * _BOUND), pair)
      for bound, devices, pair in self._pairs()
    ]
    # Upper bounds of the pairs, the most promising pair first.
    for bound, pair in sorted(
      bounds, key=lambda entry: entry[0].order_at(rate)
    )[::-1]:
      top = None if best is None else best.order_at(rate)
      if top is not None and bound.order_at(rate)[0] < top[0]:
        break
      rated_pair = dataclasses.replace(
        bound, rate=self.pair_goodput(*pair, self.cluster.inside)
      )
      if rated_pair.rate and (top is None or rated_pair.order_at(rate) > top):
        best = rated_pair
    if best is None:
      return None
    count = 1 if rate is None else best.count(rate)
    groups = tuple(
      InstanceGroup(
        role=role, tensor=t, stages=p, count=count, goodput=best.rate
      )
      for role, (t, p) in zip(("prefill", "decode"), best.shapes, strict=True)
    )
    return _placement("low affinity", groups)

  def _pairs(
    self,
  ) -> list[tuple[float, int, tuple[tuple[int, int], tuple[int, int]]]]:
    """(goodput bound, devices, shapes) of pairs, best per device first."""
    pairs = {}
    cluster, known_shapes = self.cluster, set(self.shapes)
    for inter in range(1, cluster.nodes + 1):
      # The stages of each pipeline that are in one node.
      parts = [(t, p // inter) for t, p in self.shapes if not p % inter]
      for tp, pp in parts:
        for td, pd in parts:
          inside = tp * pp + td * pd
          pair = (tp, pp * inter), (td, pd * inter)
          if inside > cluster.devices or not known_shapes.issuperset(pair):
            continue
          devices = inside * inter
          if devices <= cluster.size:
            bound = min(
              self.phase_goodput("prefill", *pair[0]),
              self.phase_goodput("decode", *pair[1]),
            )
            pairs[pair] = bound, devices, pair
    return sorted(
      (entry for entry in pairs.values() if entry[0]),
      key=lambda entry: (-entry[0] / entry[1], entry[1], entry[2]),
    )

  def colocated(
    self, rate: int | float | None = None
  ) -> ServingPlacement | None:
    """Place instances that do both phases, in their best shape.

    Args:
      rate: Requests per second to place for; None for one instance.
    """
    best = self._best("both", rate)
    if best is None:
      return None
    count = 1 if rate is None else best.count(rate)
    return _placement("colocated", (_instance_group("both", best, count),))

  def fill(self) -> list[ServingPlacement]:
    """Best placements of each kind on the whole cluster, best first.

    High affinity tries all pairs of shapes and counts that fit, so it is
    the best split of the devices; the others replicate their best unit that
    fits.
    """
    placements = []
    size = self.cluster.size
    prefill_units: list[_Rated] = []
    decode_units: list[_Rated] = []
    if self._answers:
      prefill_units = [
        unit for unit in self._rated_shapes("prefill") if unit.rate
      ]
      decode_units = [
        unit for unit in self._rated_shapes("decode") if unit.rate
      ]
    best: tuple[float, int, tuple[InstanceGroup, ...]] | None = None
    for prefill in prefill_units:
      for n in range(1, size // prefill.devices + 1):
        for decode in decode_units:
          m = (size - n * prefill.devices) // decode.devices
          if m < 1:
            continue
          # No more of either phase than the other can keep up with.
          rate = min(n * prefill.rate, m * decode.rate)
          m = math.ceil(rate / decode.rate - 1e-9)
          used = n * prefill.devices + m * decode.devices
          if best is None or (rate, -used) > (best[0], -best[1]):
            groups = (
              _instance_group("prefill", prefill, n),
              _instance_group("decode", decode, m),
            )
            best = rate, used, groups
    if best is not None:
      placements.append(_placement("high affinity", best[2]))
    pair, colocated = self.low_affinity(), self.colocated()
    for unit in (pair, colocated):
      if unit is not None:
        copies = size // unit.devices
        groups = tuple(
          dataclasses.replace(group, count=group.count * copies)
          for group in unit.groups
        )
        placements.append(_placement(unit.kind, groups))
    return sorted(
      placements, key=lambda placement: (-placement.goodput, placement.devices)
    )

  # Simulations of a placement.

  def simulator(
    self,
    found: ServingPlacement,
    *,
    transfer: bool = True,
    timeline: bool = False,
  ) -> ClusterSimulator:
    """Make a simulator of a placement's instances.

    Args:
      found: The placement.
      transfer: Whether cache transfers take time.
      timeline: Whether results have a timeline, as in `ClusterSimulator`.
    """
    instances = [
      self.model.instance(
        f"{group.role}{n:02d}", group.role, group.tensor, group.stages
      )
      for group in found.groups
      for n in range(group.count)
    ]
    pair = found.kind == "low affinity"
    link = self.cluster.inside if pair else self.cluster.between
    if self.cluster.nodes == 1:
      link = self.cluster.inside
    lanes = min(group.tensor * group.stages for group in found.groups)
    return ClusterSimulator(
      instances=instances,
      policy=self.policy,
      links=_aggregated_link(link, lanes) if transfer else None,
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
    """Simulate a placement at a rate; options as in `simulator`."""
    self._count()
    simulator = self.simulator(found, transfer=transfer, timeline=timeline)
    return simulator.run(at_rate(self.trace, rate))

  def shares(
    self,
    found: ServingPlacement,
    rates: Sequence[float],
    *,
    transfer: bool = True,
  ) -> list[float]:
    """Share of requests within the limits at each rate."""
    simulator = self.simulator(found, transfer=transfer)
    search = GoodputSearch(
      self._server(simulator), self.trace, self.limits, each=self.each
    )
    return [search.share(rate) for rate in rates]

  def whole_goodput(
    self, found: ServingPlacement, *, transfer: bool = True
  ) -> float:
    """Goodput of all instances of a placement together."""
    simulator = self.simulator(found, transfer=transfer)
    return self._search(
      simulator.instances,
      self.limits,
      self.trace,
      simulator.links,
      found.goodput,
    ).rate


def _aggregated_link(link: Link | None, lanes: int) -> Link | None:
  if link is None:
    return None
  return dataclasses.replace(link, bandwidth=link.bandwidth * lanes)


def _instance_group(role: str, unit: _Rated, count: int) -> InstanceGroup:
  (t, p), *_ = unit.shapes
  return InstanceGroup(
    role=role, tensor=t, stages=p, count=count, goodput=unit.rate
  )


def _placement(
  kind: str, groups: tuple[InstanceGroup, ...]
) -> ServingPlacement:
  return ServingPlacement(
    kind=kind,
    groups=groups,
    goodput=min(group.goodput * group.count for group in groups),
  )

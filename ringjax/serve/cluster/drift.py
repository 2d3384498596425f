"""New placements and roles when the load of a service has drifted.

`replan` finds placements over time; `DriftingRoles` changes the instances'
roles while they serve, in a simulator or with a live router. Prompt prefixes
that instances had cached at arrival are in their caches when roles are
simulated.

Guarantees: a change counts only if it is both large, beyond a fraction of the
planned load, and certain, beyond some standard errors of a window's mean, so
that a steady load is not placed again and again.
Cost: for roles, some ten simulations of a window's last requests for each
number of prefill instances, from the current one on as long as it improves.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster.role_planner import (
  FEWEST_REQUESTS,
  RoleDecision,
  TrafficSummary,
  why_again,
)
from ringjax.serve.cluster.routing import (
  InstanceView,
  RoutingPolicy,
  ShortestQueue,
  lacking,
)
from ringjax.serve.cluster.simulate.cluster_simulator import (
  ClusterSimulator,
  SimulatedInstance,
)
from ringjax.serve.cluster.simulate.goodput import goodput
from ringjax.serve.cluster.simulate.instance_placement import ServingPlacement
from ringjax.serve.cluster.times.request_times import Limits
from ringjax.serve.traces import TraceRequest, first_prefixes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replanned:
  """A placement and the time from which it is used.

  Attributes:
    time_s: End of the window that it was planned for, in seconds.
    why: Change of the load, or that it is the first window.
    placement: Placement; None if no placement meets the limits.
  """

  time_s: float
  why: str
  placement: ServingPlacement | None


def replan(
  trace: Sequence[TraceRequest],
  plan: Callable[
    [Sequence[TraceRequest], TrafficSummary], ServingPlacement | None
  ],
  *,
  window_s: int | float,
  by: int | float = 0.2,
  errors: int | float = 4.0,
) -> Iterator[Replanned]:
  """Yield placements over time, for the windows that `why_again` selects.

  Args:
    trace: Requests in the order of arrivals.
    plan: Function that returns the placement for a window's requests.
    window_s: Length of a window in seconds.
    by, errors: Thresholds of `TrafficSummary.drifted`.
  """
  number("window_s", window_s, above=0)
  planned_traffic: TrafficSummary | None = None
  for end, requests in _windows(trace, float(window_s)):
    if len(requests) < FEWEST_REQUESTS:
      continue
    traffic = TrafficSummary.of(requests, window_s)
    why, traffic = why_again(planned_traffic, traffic, by=by, errors=errors)
    if why:
      planned_traffic = traffic
      yield Replanned(time_s=end, why=why, placement=plan(requests, traffic))


def _windows(
  trace: Sequence[TraceRequest], seconds: float
) -> Iterator[tuple[float, list[TraceRequest]]]:
  """Yield (end, requests) of complete windows from the first arrival on.

  Windows end at multiples of `seconds`, also where times are those of a clock.
  """
  first = trace[0].arrival if trace else 0.0
  end, window = (first // seconds + 1) * seconds, []
  for request in trace:
    while request.arrival >= end:
      yield end, window
      end, window = end + seconds, []
    window.append(request)


# ---------------------------------------------------------------------------
# Roles
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftingRoles:
  """Plans roles for the first window of requests, and again after each drift.

  The goodput of the current roles is simulated on the window's requests, then
  that with one more prefill instance, and with one fewer, and so on as long
  as it grows by `gain`. Instances with both roles stay. A `RolePlanner`.

  Attributes:
    instances: Simulated instances by name; or one for all, with the capacity
      and rows that each instance has reported. Prefixes that an instance had
      cached are added (`first_prefixes`).
    limits: Latency limits that requests should meet.
    window_s: Length of a window in seconds.
    policy: Routing policy; None for `ShortestQueue`.
    links, kv_token_bytes, transfer, stream: Options of `ClusterSimulator`.
    by, errors: Thresholds of `TrafficSummary.drifted`.
    gain: Relative gain of goodput below which an instance keeps its role.
    requests: Maximum number of a window's requests to simulate: the last ones.
  """

  instances: SimulatedInstance | Mapping[str, SimulatedInstance]
  limits: Limits
  window_s: int | float
  policy: RoutingPolicy | None = None
  links: Link | Mapping[tuple[str, str], Link] | None = None
  kv_token_bytes: int | float = 0
  transfer: str = "pull"
  stream: int = 0
  by: int | float = 0.2
  errors: int | float = 4.0
  gain: int | float = 0.1
  requests: int = 300

  def __post_init__(self) -> None:
    number("window_s", self.window_s, above=0)
    for name in ("kv_token_bytes", "by", "errors", "gain"):
      number(name, getattr(self, name), least=0)
    positive_int("requests", self.requests)

  def decide(
    self,
    requests: Sequence[TraceRequest],
    instances: Sequence[InstanceView],
    planned: TrafficSummary | None,
  ) -> RoleDecision:
    """Decide roles at the end of a window if its load has drifted."""
    if len(requests) < FEWEST_REQUESTS:
      return RoleDecision(planned=planned)
    why, traffic = why_again(
      planned, TrafficSummary.of(requests, self.window_s), by=self.by,
      errors=self.errors,
    )  # fmt: skip
    latest = requests[-self.requests :]
    if not why or latest[0].arrival == latest[-1].arrival:
      return RoleDecision(planned=planned)
    roles = self.best_roles(latest, instances, traffic.rate[0])
    return RoleDecision(planned=traffic, roles=roles, why=why)

  def best_roles(
    self,
    requests: Sequence[TraceRequest],
    instances: Sequence[InstanceView],
    rate: int | float,
  ) -> dict[str, str]:
    """Find role changes that improve the goodput, by name.

    Args:
      requests: Requests on which goodput is simulated.
      instances: Instances with their current roles.
      rate: Rate at which the goodput search begins, in requests per second.
    """
    current_roles = {view.name: view.role for view in instances}
    prefix_blocks = first_prefixes(requests)
    simulated = {
      view.name: dataclasses.replace(
        self._simulated(view), prefix_blocks=prefix_blocks.get(view.name, {})
      )
      for view in instances
    }
    # The instance with the least unfinished work changes first.
    order = sorted(
      (view for view in instances if view.role != "both"),
      key=lambda view: (
        view.queued_requests + view.running_requests,
        view.name,
      ),
    )

    def simulated_goodput(roles: Mapping[str, str]) -> float:
      simulator = ClusterSimulator(
        instances=[
          dataclasses.replace(simulated[name], role=role)
          for name, role in roles.items()
        ],
        policy=self.policy or ShortestQueue(),
        links=self.links,
        kv_token_bytes=self.kv_token_bytes,
        transfer=self.transfer,
        stream=self.stream,
      )
      serve = lambda trace: simulator.run(trace).served
      return goodput(
        serve, requests, self.limits, first=rate, near=self.gain / 2 or 0.02
      ).rate

    best: dict[str, str] = {}
    best_rate, target_roles = (
      simulated_goodput(current_roles),
      ("prefill", "decode"),
    )
    while target_roles:
      candidates = [
        (simulated_goodput({**current_roles, **best, **change}), change)
        for role in target_roles
        for change in self._changed(
          {**current_roles, **best}, role, order, simulated
        )
      ]
      rate, change = max(
        candidates, key=lambda candidate: candidate[0], default=(0.0, {})
      )
      if rate <= best_rate * (1 + self.gain):
        break
      best_rate, best = rate, {**best, **change}
      # Later changes go in the same direction.
      target_roles = tuple({*change.values()})
    return best

  def _changed(
    self,
    roles: Mapping[str, str],
    role: str,
    order: Sequence[InstanceView],
    simulated: Mapping[str, SimulatedInstance],
  ) -> Iterator[dict[str, str]]:
    """Yield changes of one instance to a role.

    Instances that differ only in name and cached blocks count once.
    """
    kinds_tried: list[SimulatedInstance] = []
    for view in order:
      kind = dataclasses.replace(
        simulated[view.name], name="one", role="both", prefix_blocks={}
      )
      if roles[view.name] == role or kind in kinds_tried:
        continue
      kinds_tried.append(kind)
      if not lacking({**roles, view.name: role}.values()):
        yield {view.name: role}

  def _simulated(self, view: InstanceView) -> SimulatedInstance:
    """Simulated instance for the view of a live one."""
    if isinstance(self.instances, SimulatedInstance):
      capacity = view.capacity_tokens or self.instances.capacity_tokens
      return dataclasses.replace(
        self.instances,
        name=view.name,
        role=view.role,
        capacity_tokens=capacity,
        prefix_cache_tokens=min(self.instances.prefix_cache_tokens, capacity),
        max_rows=view.max_rows or self.instances.max_rows,
      )
    if view.name not in self.instances:
      raise OptionError(
        "instances",
        f"none of {view.name!r}",
        f"all instances; there are {', '.join(sorted(self.instances))}",
        "add it, or pass one SimulatedInstance for all",
      )
    return self.instances[view.name]

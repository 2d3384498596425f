"""When the load of a service has drifted so far that it is placed anew.

`replan` finds placements over time; `DriftingRoles` changes what instances do
while they serve, in a simulator or behind a live router. What instances had of
the prompts when these came is in their caches when roles are simulated.

Guarantees: a change counts if it is both large, beyond a part of what was
planned for, and certain, beyond some standard errors of the mean of a window,
so that a steady load is not placed again and again.
Cost: of roles some ten simulations of a window's last requests for each number
of instances that read, from the present one on as long as it is better.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster.cluster_simulator import (
  ClusterSimulator,
  SimulatedInstance,
)
from ringjax.serve.cluster.goodput import goodput
from ringjax.serve.cluster.instance_placement import ServingPlacement
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
from ringjax.serve.cluster.served import Limits
from ringjax.serve.traces import TraceRequest, first_prefixes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replanned:
  """A placement and from when on it is used.

  Attributes:
    time_s: end of the window that it was planned for.
    why: what had changed, or that it is the first one.
    placement: None if no placement meets the limits.
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
  """Placements over time: of the windows of `why_again`.

  Args:
    trace: in the order of arrivals.
    plan: the placement for the requests of a window.
    window_s: seconds of a window.
    by, errors: as of `TrafficSummary.drifted`.
  """
  number("window_s", window_s, above=0)
  known: TrafficSummary | None = None
  for end, requests in _windows(trace, float(window_s)):
    if len(requests) < FEWEST_REQUESTS:
      continue
    now = TrafficSummary.of(requests, window_s)
    why, now = why_again(known, now, by=by, errors=errors)
    if why:
      known = now
      yield Replanned(time_s=end, why=why, placement=plan(requests, now))


def _windows(
  trace: Sequence[TraceRequest], seconds: float
) -> Iterator[tuple[float, list[TraceRequest]]]:
  """(end, requests) of the whole windows of a trace."""
  end, found = seconds, []
  for one in trace:
    while one.arrival >= end:
      yield end, found
      end, found = end + seconds, []
    found.append(one)


# ---------------------------------------------------------------------------
# Roles
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftingRoles:
  """Plans roles for the first window of requests, and anew after each drift.

  The goodput of the present roles is simulated on the window's requests, then
  that with one more instance that reads, and with one fewer, and so on as long
  as it grows by `gain`. Instances that do both are left alone. A `RolePlanner`.

  Attributes:
    instances: what is simulated: of each by its name; or one for all, with the
      capacity and the rows that each has said. Prefixes that an instance had
      are added (`first_prefixes`).
    limits: what requests are promised.
    window_s: seconds of a window.
    policy: that routes; None for `ShortestQueue`.
    links, kv_token_bytes, transfer, stream: of `ClusterSimulator`.
    by, errors: as of `TrafficSummary.drifted`.
    gain: of goodput, relative, below which an instance keeps its role.
    requests: of a window, that are simulated: the last ones.
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
    """As `RolePlanner`."""
    if len(requests) < FEWEST_REQUESTS:
      return RoleDecision(planned=planned)
    why, now = why_again(
      planned, TrafficSummary.of(requests, self.window_s), by=self.by,
      errors=self.errors,
    )  # fmt: skip
    last = requests[-self.requests :]
    if not why or last[0].arrival == last[-1].arrival:
      return RoleDecision(planned=planned)
    roles = self.best_roles(last, instances, now.rate[0])
    return RoleDecision(planned=now, roles=roles, why=why)

  def best_roles(
    self,
    requests: Sequence[TraceRequest],
    instances: Sequence[InstanceView],
    rate: int | float,
  ) -> dict[str, str]:
    """The roles that change.

    Args:
      requests: whose goodput is compared.
      instances: with their present roles.
      rate: at which the search of goodput begins.
    """
    now = {one.name: one.role for one in instances}
    had = first_prefixes(requests)
    made = {
      one.name: dataclasses.replace(
        self._simulated(one), prefix_blocks=had.get(one.name, {})
      )
      for one in instances
    }
    # What has least to finish changes first.
    order = sorted(
      (one for one in instances if one.role != "both"),
      key=lambda x: (x.queued_requests + x.running_requests, x.name),
    )

    def found(roles: Mapping[str, str]) -> float:
      simulator = ClusterSimulator(
        instances=[
          dataclasses.replace(made[name], role=role)
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
    most, to = found(now), ("prefill", "decode")
    while to:
      tried = [
        (found({**now, **best, **one}), one)
        for role in to
        for one in self._changed({**now, **best}, role, order, made)
      ]
      rate, change = max(tried, key=lambda x: x[0], default=(0.0, {}))
      if rate <= most * (1 + self.gain):
        break
      most, best = rate, {**best, **change}
      # Who has just begun to read does not answer again.
      to = tuple({*change.values()})
    return best

  def _changed(
    self,
    roles: Mapping[str, str],
    role: str,
    order: Sequence[InstanceView],
    made: Mapping[str, SimulatedInstance],
  ) -> Iterator[dict[str, str]]:
    """Changes of one instance to a role; of equal ones, whatever they have
    cached, that of the first."""
    seen: list[SimulatedInstance] = []
    for one in order:
      kind = dataclasses.replace(
        made[one.name], name="one", role="both", prefix_blocks={}
      )
      if roles[one.name] == role or kind in seen:
        continue
      seen.append(kind)
      if not lacking({**roles, one.name: role}.values()):
        yield {one.name: role}

  def _simulated(self, view: InstanceView) -> SimulatedInstance:
    """An instance as it is simulated."""
    if isinstance(self.instances, SimulatedInstance):
      most = view.capacity_tokens or self.instances.capacity_tokens
      return dataclasses.replace(
        self.instances,
        name=view.name,
        role=view.role,
        capacity_tokens=most,
        prefix_cache_tokens=min(self.instances.prefix_cache_tokens, most),
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

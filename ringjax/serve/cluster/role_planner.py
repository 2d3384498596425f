"""Interface of planners that change the instances' roles over time.

Guarantees: a planner is a pure function of the requests of a window, of the
router's views of its instances and of the traffic that was planned for before;
the live router and the simulator call the same object at the end of each
window, so that a decision can be replayed. An instance finishes the work that
it has begun, whatever its new role: a role only decides what is sent to it.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.3:
replanning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ringjax.serve.cluster.routing import InstanceView
from ringjax.serve.traces import TraceRequest

# Minimum requests of a window for meaningful statistics.
FEWEST_REQUESTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficSummary:
  """Means and standard errors of a traffic window.

  Attributes:
    requests: Number of requests.
    rate: Requests per second, and its standard error.
    prompt_tokens: Mean prompt length in tokens, and its standard error.
    computed_tokens: Mean prompt tokens that no instance had cached at arrival,
      and its standard error.
    new_tokens: Mean answer length in tokens, and its standard error.
    mixed: Whether the load changed in this window, so that it has requests
      from before and after the change.
  """

  requests: int
  rate: tuple[float, float]
  prompt_tokens: tuple[float, float]
  new_tokens: tuple[float, float]
  computed_tokens: tuple[float, float] = (0.0, math.inf)
  mixed: bool = False

  @classmethod
  def of(
    cls, requests: Sequence[TraceRequest], seconds: int | float
  ) -> TrafficSummary:
    """Summarise the requests of a window of `seconds` seconds."""
    n = len(requests)

    def mean(values: list[int]) -> tuple[float, float]:
      if n < 2:
        return (float(sum(values)), math.inf)
      return float(np.mean(values)), float(np.std(values, ddof=1)) / n**0.5

    # Arrivals come in bursts: take the error of counts in ten parts.
    start = requests[0].arrival if requests else 0.0
    parts = np.zeros(10)
    for request in requests:
      parts[min(9, int(10 * (request.arrival - start) / seconds))] += 1
    spread = float(np.std(parts, ddof=1)) * 10**0.5
    return cls(
      requests=n,
      rate=(n / seconds, max(spread, n**0.5) / seconds),
      prompt_tokens=mean([request.prompt_tokens for request in requests]),
      new_tokens=mean([request.new_tokens for request in requests]),
      computed_tokens=mean(
        [
          request.prompt_tokens - max((n for _, n in request.cached), default=0)
          for request in requests
        ]
      ),
    )

  def drifted(
    self,
    now: TrafficSummary,
    *,
    by: int | float = 0.2,
    errors: int | float = 4.0,
  ) -> str:
    """Describe the first mean that has changed; "" if none has.

    Args:
      now: Summary of a later window.
      by: Minimum change, relative to this summary.
      errors: Minimum change in standard errors of both windows.
    """
    if now.requests < FEWEST_REQUESTS or self.requests < FEWEST_REQUESTS:
      return ""
    for name in ("rate", "prompt_tokens", "new_tokens", "computed_tokens"):
      (old, error), (current, error_now) = (
        getattr(self, name),
        getattr(now, name),
      )
      change = abs(current - old)
      if change > by * old and change > errors * math.hypot(error, error_now):
        return f"{name.replace('_', ' ')}: {old:.3g} to {current:.3g}"
    return ""


def why_again(
  planned: TrafficSummary | None,
  now: TrafficSummary,
  *,
  by: int | float,
  errors: int | float,
) -> tuple[str, TrafficSummary]:
  """Reason to plan for a window or "", and the summary to compare with next.

  Planned are the first window, each window that has drifted, and the window
  after that, as the load changed somewhere in the middle.

  Args:
    planned: Summary that was planned for last; None before the first window.
    now: Summary of the current window.
    by, errors: Thresholds of `TrafficSummary.drifted`.
  """
  if planned is None:
    return "the first window", now
  why = planned.drifted(now, by=by, errors=errors)
  if why:
    return why, dataclasses.replace(now, mixed=True)
  return "the window after a change" if planned.mixed else "", now


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleDecision:
  """Decision of a planner at the end of a window.

  Attributes:
    planned: Traffic that the roles are planned for from now on.
    roles: New roles by instance name; other instances keep theirs.
    why: Change that was planned for; "" if nothing was planned.
  """

  planned: TrafficSummary | None = None
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleChange:
  """Record of a role change.

  Attributes:
    time_s: Time of the cluster's clock, in seconds.
    name: Name of the instance.
    role: New role.
    why: Reason of the change.
  """

  time_s: float
  name: str
  role: str
  why: str


@runtime_checkable
class RolePlanner(Protocol):
  """Decides the roles of instances at the end of each window."""

  @property
  def window_s(self) -> int | float:
    """Length of a window in seconds."""
    ...

  def decide(
    self,
    requests: Sequence[TraceRequest],
    instances: Sequence[InstanceView],
    planned: TrafficSummary | None,
  ) -> RoleDecision:
    """Decide the roles from now on.

    Args:
      requests: Requests that arrived in the window that ends now, in order,
        with their cached tokens by instance (`TraceRequest.cached`).
      instances: Views of all live instances, sorted by name.
      planned: Traffic of the last decision; None before the first one.
    """
    ...

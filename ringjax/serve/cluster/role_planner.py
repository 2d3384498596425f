"""What decides which instance reads prompts and which one answers, over time.

Guarantees: a planner is a pure function of the requests of a window, of what
the router knows of its instances and of what was planned for before; the live
router and the simulator call the same object at the end of each window, so that
a decision can be replayed. What an instance has begun it finishes, whatever it
is to do from then on: a role says what is sent to it.
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

# Requests of a window that say something about it.
FEWEST_REQUESTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficSummary:
  """What a placement depends on, of some requests: means, standard errors.

  Attributes:
    requests: how many.
    rate: requests a second, and its error.
    prompt_tokens: of a prompt, and its error.
    computed_tokens: of a prompt, without what an instance had of it when it
      came, and its error.
    new_tokens: of an answer, and its error.
    mixed: whether the load changed in this window, so that it is of requests
      before and after.
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
    """Of the requests of a window that was so many seconds long."""
    n = len(requests)

    def mean(values: list[int]) -> tuple[float, float]:
      if n < 2:
        return (float(sum(values)), math.inf)
      return float(np.mean(values)), float(np.std(values, ddof=1)) / n**0.5

    # Arrivals come in bursts: their error is that of counts in ten parts.
    start = requests[0].arrival if requests else 0.0
    parts = np.zeros(10)
    for one in requests:
      parts[min(9, int(10 * (one.arrival - start) / seconds))] += 1
    spread = float(np.std(parts, ddof=1)) * 10**0.5
    return cls(
      requests=n,
      rate=(n / seconds, max(spread, n**0.5) / seconds),
      prompt_tokens=mean([one.prompt_tokens for one in requests]),
      new_tokens=mean([one.new_tokens for one in requests]),
      computed_tokens=mean(
        [
          one.prompt_tokens - max((n for _, n in one.cached), default=0)
          for one in requests
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
    """Which of the means has changed, or nothing.

    Args:
      now: of a later window.
      by: change that matters, relative to this one.
      errors: standard errors of both that it has to exceed.
    """
    if now.requests < FEWEST_REQUESTS or self.requests < FEWEST_REQUESTS:
      return ""
    for name in ("rate", "prompt_tokens", "new_tokens", "computed_tokens"):
      (was, error), (new, error_now) = getattr(self, name), getattr(now, name)
      change = abs(new - was)
      if change > by * was and change > errors * math.hypot(error, error_now):
        return f"{name.replace('_', ' ')}: {was:.3g} to {new:.3g}"
    return ""


def why_again(
  planned: TrafficSummary | None,
  now: TrafficSummary,
  *,
  by: int | float,
  errors: int | float,
) -> tuple[str, TrafficSummary]:
  """Why a window is planned for, or nothing; and its summary from then on.

  The first window is, each one that has drifted, and the one behind that, as
  the load changed somewhere in the middle of it.

  Args:
    planned: what was planned for the last time; None before the first one.
    now: of the window.
    by, errors: as of `TrafficSummary.drifted`.
  """
  if planned is None:
    return "the first window", now
  why = planned.drifted(now, by=by, errors=errors)
  if why:
    return why, dataclasses.replace(now, mixed=True)
  return "the window behind a change" if planned.mixed else "", now


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleDecision:
  """What a planner decided at the end of a window.

  Attributes:
    planned: the requests that roles are planned for from now on.
    roles: new ones, by the names of instances; others keep theirs.
    why: what had changed; "" if nothing was planned.
  """

  planned: TrafficSummary | None = None
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleChange:
  """An instance got another role.

  Attributes:
    time_s: of the cluster's clock.
    name: of the instance.
    role: from then on.
    why: it was planned.
  """

  time_s: float
  name: str
  role: str
  why: str


@runtime_checkable
class RolePlanner(Protocol):
  """Decides what instances do."""

  @property
  def window_s(self) -> int | float:
    """Seconds between two decisions."""
    ...

  def decide(
    self,
    requests: Sequence[TraceRequest],
    instances: Sequence[InstanceView],
    planned: TrafficSummary | None,
  ) -> RoleDecision:
    """The roles from now on.

    Args:
      requests: that came in the window that ends now, in their order, with
        what instances had of them (`TraceRequest.cached`).
      instances: all that are alive, in the order of their names.
      planned: of the last decision; None before the first one.
    """
    ...

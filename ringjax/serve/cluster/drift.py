"""When the load of a service has drifted so far that it is placed anew.

Guarantees: a change counts if it is both large, beyond a part of what was
planned for, and certain, beyond some standard errors of the mean of a window,
so that a steady load is not placed again and again.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringjax.checks import number
from ringjax.serve.cluster.instance_placement import ServingPlacement
from ringjax.serve.traces import TraceRequest

# Requests of a window that say something about it.
_FEWEST = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficSummary:
  """What a placement depends on, of some requests: means, standard errors.

  Attributes:
    requests: how many.
    rate: requests a second, and its error.
    prompt_tokens: of a prompt, and its error.
    new_tokens: of an answer, and its error.
  """

  requests: int
  rate: tuple[float, float]
  prompt_tokens: tuple[float, float]
  new_tokens: tuple[float, float]

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
    )

  def drifted(
    self,
    now: TrafficSummary,
    *,
    by: int | float = 0.2,
    errors: int | float = 3.0,
  ) -> str:
    """Which of the means has changed, or nothing.

    Args:
      now: of a later window.
      by: change that matters, relative to this one.
      errors: standard errors of both that it has to exceed.
    """
    if now.requests < _FEWEST or self.requests < _FEWEST:
      return ""
    for name in ("rate", "prompt_tokens", "new_tokens"):
      (was, error), (new, error_now) = getattr(self, name), getattr(now, name)
      change = abs(new - was)
      if change > by * was and change > errors * math.hypot(error, error_now):
        return f"{name.replace('_', ' ')}: {was:.3g} to {new:.3g}"
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replanned:
  """A placement and from when on it is used.

  Attributes:
    time_s: end of the window that it was planned for.
    why: what had changed; "" of the first one.
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
  errors: int | float = 3.0,
) -> Iterator[Replanned]:
  """Placements over time: the first window's, then one after each drift.

  Args:
    trace: in the order of arrivals.
    plan: the placement for the requests of a window.
    window_s: seconds of a window.
    by, errors: as of `TrafficSummary.drifted`.
  """
  number("window_s", window_s, above=0)
  known: TrafficSummary | None = None
  for end, requests in _windows(trace, float(window_s)):
    if len(requests) < _FEWEST:
      continue
    now = TrafficSummary.of(requests, window_s)
    why = "" if known is None else known.drifted(now, by=by, errors=errors)
    if known is None or why:
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

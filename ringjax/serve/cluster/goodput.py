"""Goodput: the largest rate at which a cluster keeps what it promises.

Guarantees: all rates serve the same requests with the same gaps, only closer
together, so that rates are comparable and a search is repeatable. The result
was simulated and met the limits; a rate that is `near` higher did not. A rate
whose answers take as long again as its arrivals does not count as kept up
with: a trace that is short beside its answers would hide every queue.
Cost: some ten simulations of the trace.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.serve.cluster.served import Limits, ServedRequest, attainment
from ringjax.serve.traces import TraceRequest

# Part of a rate at which requests do not meet each other.
_ALONE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
  """The result of a search.

  Attributes:
    rate: requests a second, 0 if no rate meets the limits.
    tried: (rate, share of requests that met the limits), by rate.
  """

  rate: float
  tried: tuple[tuple[float, float], ...]


def trace_rate(trace: Sequence[TraceRequest]) -> float:
  """Requests a second of a trace, from its first arrival to its last.

  Raises:
    OptionError: all requests come at once.
  """
  spent = trace[-1].arrival - trace[0].arrival if trace else 0.0
  if spent <= 0:
    raise OptionError(
      "trace",
      f"{len(trace)} requests that come at once",
      "requests over some time",
      "pass a trace with arrivals",
    )
  return (len(trace) - 1) / spent


def at_rate(
  trace: Sequence[TraceRequest], rate: int | float
) -> list[TraceRequest]:
  """A trace with its gaps scaled so that requests come at a rate."""
  factor = trace_rate(trace) / number("rate", rate, above=0)
  return [
    dataclasses.replace(one, arrival=one.arrival * factor) for one in trace
  ]


def share_met(
  served: Sequence[ServedRequest], limits: Limits, *, each: bool = False
) -> float:
  """The share of requests within the limits.

  Args:
    served: the requests.
    limits: for both times.
    each: whether the two limits are counted one by one and the smaller share
      is returned, as DistServe's simulator does.
  """
  if not each:
    return attainment(served, limits)
  return min(
    attainment(served, dataclasses.replace(limits, ttft_s=float("inf"))),
    attainment(served, dataclasses.replace(limits, tpot_s=float("inf"))),
  )


def goodput(
  serve: Callable[[list[TraceRequest]], Sequence[ServedRequest]],
  trace: Sequence[TraceRequest],
  limits: Limits,
  *,
  first: int | float | None = None,
  near: int | float = 0.02,
  each: bool = False,
) -> Goodput:
  """Searches the goodput by bisection.

  Args:
    serve: what serves a trace, e.g. `lambda t: simulator.run(t).served`.
    trace: requests whose gaps are scaled.
    limits: what has to be met.
    first: the rate that is tried first; None for the trace's own.
    near: relative distance at which the search ends.
    each: as of `share_met`.

  Raises:
    OptionError: requests come at once.
  """
  number("near", near, above=0)
  tried: dict[float, float] = {}

  def met(rate: float) -> bool:
    asked = at_rate(trace, rate)
    served = serve(asked)
    tried[rate] = share_met(served, limits, each=each)
    first, last = asked[0].arrival, asked[-1].arrival
    done = max((x.last_token_s for x in served if not x.rejected), default=0.0)
    return tried[rate] >= limits.share and done - last <= last - first

  low, high = 0.0, float(trace_rate(trace) if first is None else first)
  while met(high):
    low, high = high, 2 * high
  # Requests that come one by one: if these are too slow, all rates are.
  if not low and not met(high * _ALONE):
    return Goodput(rate=0.0, tried=tuple(sorted(tried.items())))
  while not low:
    if met(high / 2):
      low = high / 2
    else:
      high /= 2
  while low and high - low > near * low:
    middle = (low + high) / 2
    low, high = (middle, high) if met(middle) else (low, middle)
  return Goodput(rate=low, tried=tuple(sorted(tried.items())))

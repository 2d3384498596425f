"""Goodput: the largest rate at which a cluster meets its latency limits.

Guarantees: all rates serve the same requests with the same gaps, only closer
together, so that rates are comparable and a search is repeatable. The result
was simulated and met the limits; a rate that is `near` higher did not. A trace
that is short compared to its answers would hide every queue: it is repeated
until its last answer comes at most a quarter of its time after its last
arrival, so that no more than that is overload.
Cost: some ten simulations of the trace.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.serve.cluster.times.request_times import (
  Limits,
  ServedRequest,
  attainment,
)
from ringjax.serve.traces import TraceRequest, first_prefixes

# Factor of a rate at which requests do not overlap.
_ALONE = 1e-6
# Limit of the search, as a multiple of the first rate.
_ENDLESS = 2**40
# Fraction of the arrivals' time in which the last answers have to end.
_LATE = 0.25
# Maximum repeats of a trace; if it is still too short, the rate is too high.
_REPEATS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
  """The result of a search.

  Attributes:
    rate: Requests per second, 0 if no rate meets the limits.
    tried: (rate, share of requests that met the limits), by rate.
  """

  rate: float
  tried: tuple[tuple[float, float], ...]


def trace_rate(trace: Sequence[TraceRequest]) -> float:
  """Requests per second of a trace, from its first arrival to its last.

  Raises:
    OptionError: If there are fewer than two requests, or all come at once.
  """
  if len(trace) < 2:
    raise OptionError(
      "trace",
      f"{len(trace)} of the requests that a rate needs",
      "two at least",
      "pass more requests",
    )
  spent = trace[-1].arrival - trace[0].arrival
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
  """Scale the gaps of a trace so that requests come at a rate."""
  factor = trace_rate(trace) / number("rate", rate, above=0)
  return [
    dataclasses.replace(request, arrival=request.arrival * factor)
    for request in trace
  ]


def share_met(
  served: Sequence[ServedRequest], limits: Limits, *, each: bool = False
) -> float:
  """Share of requests within the limits.

  Args:
    served: Served requests.
    limits: Limits of both times.
    each: Whether the two limits are counted separately and the smaller share
      is returned, as in DistServe's simulator.
  """
  if not each:
    return attainment(served, limits)
  return min(
    attainment(served, dataclasses.replace(limits, ttft_s=float("inf"))),
    attainment(served, dataclasses.replace(limits, tpot_s=float("inf"))),
  )


def repeated(trace: Sequence[TraceRequest], times: int) -> list[TraceRequest]:
  """Repeat a trace several times.

  Repeats share no prefix, except those that instances had cached initially.
  """
  initial_blocks = {
    block_id for blocks in first_prefixes(trace).values() for block_id in blocks
  }
  period = trace[-1].arrival - trace[0].arrival + 1 / trace_rate(trace)
  return [
    dataclasses.replace(
      request,
      arrival=request.arrival + n * period,
      number=request.number + n * len(trace),
      blocks=tuple(
        block_id if block_id in initial_blocks else block_id + (n << 48)
        for block_id in request.blocks
      ),
    )
    for n in range(times)
    for request in trace
  ]


class GoodputSearch:
  """Serves a trace at many rates and records the shares.

  Attributes:
    tried: Share of requests that met the limits, by rate.
  """

  def __init__(
    self,
    serve: Callable[[list[TraceRequest]], Sequence[ServedRequest]],
    trace: Sequence[TraceRequest],
    limits: Limits,
    *,
    each: bool = False,
  ):
    """Prepare a search; the arguments are those of `goodput`."""
    self.serve, self.trace, self.limits = serve, trace, limits
    self.each = each
    self.tried: dict[float, float] = {}
    self._times = 1

  def share(self, rate: int | float) -> float:
    """Serve at a rate; return the share of requests within the limits."""
    limits = self.limits
    while True:
      scaled = at_rate(self.trace, rate)
      if self._times > 1:
        scaled = repeated(scaled, self._times)
      served = self.serve(scaled)
      share = share_met(served, limits, each=self.each)
      spent = scaled[-1].arrival - scaled[0].arrival
      ends = (
        request.last_token_s for request in served if not request.rejected
      )
      overrun_s = max(ends, default=0.0) - scaled[-1].arrival
      if (
        share < limits.share
        or overrun_s <= _LATE * spent
        or self._times >= _REPEATS
      ):
        break
      self._times *= 2
    if overrun_s > _LATE * spent and share >= limits.share:
      share = 0.0
    self.tried[float(rate)] = share
    return share


def goodput(
  serve: Callable[[list[TraceRequest]], Sequence[ServedRequest]],
  trace: Sequence[TraceRequest],
  limits: Limits,
  *,
  first: int | float | None = None,
  near: int | float = 0.02,
  each: bool = False,
) -> Goodput:
  """Search the goodput by bisection.

  Args:
    serve: Function that serves a trace, e.g. `lambda t:
      simulator.run(t).served`.
    trace: Requests whose gaps are scaled.
    limits: Limits that have to be met.
    first: Rate to try first; None for the trace's own.
    near: Relative distance at which the search ends.
    each: Whether limits count separately, as in `share_met`.

  Raises:
    OptionError: If requests come at once, or no rate breaks the limits.
  """
  number("near", near, above=0)
  search = GoodputSearch(serve, trace, limits, each=each)
  met = lambda rate: search.share(rate) >= limits.share
  low, high = 0.0, float(trace_rate(trace) if first is None else first)
  endless = high * _ENDLESS
  while met(high):
    low, high = high, 2 * high
    if high > endless:
      raise OptionError(
        "limits",
        f"all met at {high:.3g} requests a second",
        "limits that some rate breaks",
        "pass times of calls above 0, or answers of several tokens",
      )
  # Requests that do not overlap: if these are too slow, all rates are.
  if not low and not met(high * _ALONE):
    return Goodput(rate=0.0, tried=tuple(sorted(search.tried.items())))
  while not low:
    if met(high / 2):
      low = high / 2
    else:
      high /= 2
  while low and high - low > near * low:
    middle = (low + high) / 2
    low, high = (middle, high) if met(middle) else (low, middle)
  return Goodput(rate=low, tried=tuple(sorted(search.tried.items())))

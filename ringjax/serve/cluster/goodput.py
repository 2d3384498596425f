"""Goodput: the largest rate at which a cluster keeps what it promises.

Guarantees: all rates serve the same requests with the same gaps, only closer
together, so that rates are comparable and a search is repeatable. The result
was simulated and met the limits; a rate that is `near` higher did not. A trace
that is short beside its answers would hide every queue: it is repeated until
its last answer comes at most a quarter of its time after its last arrival, so
that no more than that is overload.
Cost: some ten simulations of the trace.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, section 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.serve.cluster.served import Limits, ServedRequest, attainment
from ringjax.serve.traces import TraceRequest, first_prefixes

# Part of a rate at which requests do not meet each other.
_ALONE = 1e-6
# Times the first rate that is tried: what keeps up then always does.
_ENDLESS = 2**40
# Part of the time of arrivals in which what is left has to end.
_LATE = 0.25
# Repeats of a trace at most; what is too short even then is not kept up with.
_REPEATS = 64


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
    OptionError: fewer than two requests, or all come at once.
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


def repeated(trace: Sequence[TraceRequest], times: int) -> list[TraceRequest]:
  """A trace several times, one after another.

  Repeats share no prefix, but those that instances had before the first one.
  """
  had = {x for blocks in first_prefixes(trace).values() for x in blocks}
  period = trace[-1].arrival - trace[0].arrival + 1 / trace_rate(trace)
  return [
    dataclasses.replace(
      one,
      arrival=one.arrival + n * period,
      number=one.number + n * len(trace),
      blocks=tuple(x if x in had else x + (n << 48) for x in one.blocks),
    )
    for n in range(times)
    for one in trace
  ]


class GoodputSearch:
  """Serves a trace at many rates.

  Attributes:
    tried: share of requests that met the limits, by rate.
  """

  def __init__(
    self,
    serve: Callable[[list[TraceRequest]], Sequence[ServedRequest]],
    trace: Sequence[TraceRequest],
    limits: Limits,
    *,
    each: bool = False,
  ):
    """As of `goodput`."""
    self.serve, self.trace, self.limits = serve, trace, limits
    self.each = each
    self.tried: dict[float, float] = {}
    self._times = 1

  def share(self, rate: int | float) -> float:
    """The share of requests within the limits at a rate."""
    limits = self.limits
    while True:
      asked = at_rate(self.trace, rate)
      if self._times > 1:
        asked = repeated(asked, self._times)
      served = self.serve(asked)
      found = share_met(served, limits, each=self.each)
      spent = asked[-1].arrival - asked[0].arrival
      ends = (one.last_token_s for one in served if not one.rejected)
      late = max(ends, default=0.0) - asked[-1].arrival
      if (
        found < limits.share or late <= _LATE * spent or self._times >= _REPEATS
      ):
        break
      self._times *= 2
    if late > _LATE * spent and found >= limits.share:
      found = 0.0
    self.tried[float(rate)] = found
    return found


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
    OptionError: requests come at once; or no rate breaks the limits.
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
  # Requests that come one by one: if these are too slow, all rates are.
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

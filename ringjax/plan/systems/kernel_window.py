"""Schedules of several requests' kernels: products overlapped with collectives.

Guarantees: the same requests give the same order of kernels, on every device;
else collectives of two requests could deadlock. With slowdowns of 1 the primary
request takes as long as alone.
Cost: O(kernels log kernels).

Under tensor parallelism a layer's products take c seconds and its collectives
m, one after the other, so that one resource is always idle. Three schedules:

In turn: one request after the other, L (c + m) each.

Alternating: two requests in opposite phases, as in a step compiled for both,
2 L max(c, m) + min(c, m) together.

Windows: the oldest request, the primary, runs as if alone. While consecutive
kernels of one kind run (a window), younger requests launch kernels of the other
kind whose seconds fit into a fraction of it (`factor`, as kernels that run at
the same time slow each other). Products that do not fit are cut: n of f pieces
run now, the others later. A younger request's collective takes the rest of a
window.

Ref: Du et al. 2024, Liger (PPoPP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ringjax.checks import number, one_of, positive_int
from ringjax.plan.events import Simulator

# Kinds of kernels: products that can be cut, other computation, collectives.
PRODUCT, OTHER, SEND = "product", "other", "send"
KINDS = (PRODUCT, OTHER, SEND)


@dataclasses.dataclass(frozen=True)
class TimedKernel:
  """One kernel of a request.

  Attributes:
    kind: Kind, one of `KINDS`.
    seconds: Duration alone, in seconds.
  """

  kind: str
  seconds: int | float

  def __post_init__(self) -> None:
    one_of("kind", self.kind, KINDS)
    number("seconds", self.seconds, above=0)

  @property
  def sends(self) -> bool:
    """Whether it uses the links."""
    return self.kind == SEND


class _Rest(NamedTuple):
  """Remaining pieces of a kernel."""

  kernel: TimedKernel
  pieces: int


@dataclasses.dataclass(frozen=True)
class KernelQueue:
  """Kernels of a request, in order.

  Attributes:
    kernels: Kernels of all layers.
    arrival_s: Time of arrival, in seconds.
  """

  kernels: tuple[TimedKernel, ...]
  arrival_s: int | float = 0.0

  @classmethod
  def of_layers(
    cls,
    layers: int,
    product_s: int | float,
    send_s: int | float,
    arrival_s: int | float = 0.0,
  ) -> KernelQueue:
    """Make a queue of layers with one product and one collective each."""
    positive_int("layers", layers)
    layer = (TimedKernel(PRODUCT, product_s), TimedKernel(SEND, send_s))
    return cls(layer * layers, arrival_s)

  @property
  def alone_s(self) -> float:
    """Duration without other requests, in seconds."""
    return float(sum(kernel.seconds for kernel in self.kernels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowRules:
  """Parameters of how windows are filled.

  Attributes:
    factor: Fraction of a window that is planned for.
    pieces: f, number of pieces into which products are cut; 1 cuts none.
    requests: Maximum number of requests considered, including the primary.
    product_slowdown: Factor on computation that overlaps a collective.
    send_slowdown: Factor on a collective that overlaps computation.
  """

  factor: int | float = 0.8
  pieces: int = 8
  requests: int = 6
  product_slowdown: int | float = 1.0
  send_slowdown: int | float = 1.0

  def __post_init__(self) -> None:
    number("factor", self.factor, above=0, most=1)
    positive_int("pieces", self.pieces)
    positive_int("requests", self.requests)
    number("product_slowdown", self.product_slowdown, least=1)
    number("send_slowdown", self.send_slowdown, least=1)

  def slowdown(self, sends: bool) -> float:
    """Slowdown of kernels of one kind that overlap the other."""
    return float(self.send_slowdown if sends else self.product_slowdown)


@dataclasses.dataclass(frozen=True)
class LaunchedKernel:
  """A kernel, or some pieces of one, as it was launched.

  Attributes:
    request: Number of the request.
    kind: Kind, one of `KINDS`.
    seconds: Duration alone, in seconds.
  """

  request: int
  kind: str
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWindow:
  """Consecutive kernels of the primary, and the kernels that overlap them.

  Attributes:
    start_s: Start time in seconds.
    primary: Number of the primary request.
    sends: Whether its kernels are collectives.
    seconds: Duration of the primary's kernels alone.
    beside: Kernels that younger requests launched.
    primary_end_s: End time of the primary's kernels.
    end_s: End time of all kernels, when the next window begins.
  """

  start_s: float
  primary: int
  sends: bool
  seconds: float
  beside: tuple[LaunchedKernel, ...]
  primary_end_s: float
  end_s: float

  @property
  def overrun_s(self) -> float:
    """Seconds that the primary waited for overlapping kernels."""
    return self.end_s - self.primary_end_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOutcome:
  """Finish times of requests.

  Attributes:
    finish_s: Finish time of each request, in seconds.
    latency_s: Seconds of each request from arrival to finish.
    windows: Windows in order; only set by `windows`.
  """

  finish_s: tuple[float, ...]
  latency_s: tuple[float, ...]
  windows: tuple[KernelWindow, ...] = ()

  @property
  def makespan_s(self) -> float:
    """Time at which all requests are finished."""
    return max(self.finish_s, default=0.0)

  @classmethod
  def of(
    cls,
    requests: Sequence[KernelQueue],
    finish_s: Sequence[float],
    windows: Sequence[KernelWindow] = (),
  ) -> KernelOutcome:
    """Make an outcome, with latencies from the requests' arrivals."""
    latency = (
      end - request.arrival_s
      for request, end in zip(requests, finish_s, strict=True)
    )
    return cls(
      finish_s=tuple(map(float, finish_s)),
      latency_s=tuple(map(float, latency)),
      windows=tuple(windows),
    )


def in_turn(requests: Sequence[KernelQueue]) -> KernelOutcome:
  """Run one request after the other, in the order of arrival."""
  now_s, finish = 0.0, [0.0] * len(requests)
  for n in _by_arrival(requests):
    now_s = max(now_s, requests[n].arrival_s) + requests[n].alone_s
    finish[n] = now_s
  return KernelOutcome.of(requests, finish)


def alternating(first: KernelQueue, second: KernelQueue) -> KernelOutcome:
  """Run two requests kernel by kernel in turn, as one compiled step does.

  Products and links go to the request that has waited longer.
  """
  run = Simulator()
  places = {name: run.device(name) for name in ("products", "links")}
  last: list[list] = [[], []]
  pair = (first, second)
  for n in range(max(len(request.kernels) for request in pair)):
    for m, request in enumerate(pair):
      if n < len(request.kernels):
        kernel = request.kernels[n]
        device = places["links" if kernel.sends else "products"]
        last[m] = [
          run.op(
            f"{m}.{n}",
            device,
            kernel.seconds,
            after=last[m],
            kind=kernel.kind,
            release_s=request.arrival_s,
          )
        ]
  timeline = run.run()
  finish = [
    float(timeline[ops[0]].done_s) if ops else float(request.arrival_s)
    for ops, request in zip(last, pair, strict=True)
  ]
  return KernelOutcome.of(pair, finish)


def windows(
  requests: Sequence[KernelQueue], rules: WindowRules | None = None
) -> KernelOutcome:
  """Run the primary request as if alone, and overlap others with it.

  Args:
    requests: Requests in any order; the first to arrive is the primary, and
      the next one when it has finished.
    rules: Parameters of how windows are filled; default `WindowRules()`.
  """
  rules = WindowRules() if rules is None else rules
  queues = [
    [_Rest(kernel, rules.pieces) for kernel in request.kernels]
    for request in requests
  ]
  waiting = _by_arrival(requests)
  finish = [float(request.arrival_s) for request in requests]
  kernel_windows: list[KernelWindow] = []
  now_s = 0.0
  while waiting := [n for n in waiting if queues[n]]:
    now_s = max(now_s, float(requests[waiting[0]].arrival_s))
    arrived = [n for n in waiting if requests[n].arrival_s <= now_s]
    primary, *younger = arrived[: rules.requests]
    primary_queue, sends, seconds = (
      queues[primary],
      queues[primary][0].kernel.sends,
      0.0,
    )
    while primary_queue and primary_queue[0].kernel.sends == sends:
      unfinished = primary_queue.pop(0)
      seconds += unfinished.kernel.seconds * unfinished.pieces / rules.pieces
    overlapped = _fill(seconds * rules.factor, sends, younger, queues, rules)
    window = _run_window(now_s, primary, sends, seconds, overlapped, rules)
    kernel_windows.append(window)
    finish[primary] = window.primary_end_s
    for kernel in overlapped:
      finish[kernel.request] = window.end_s
    now_s = window.end_s
  return KernelOutcome.of(requests, finish, kernel_windows)


def _by_arrival(requests: Sequence[KernelQueue]) -> list[int]:
  return sorted(range(len(requests)), key=lambda n: requests[n].arrival_s)


def _fill(
  planned: float,
  sends: bool,
  others: Sequence[int],
  left: list[list[_Rest]],
  rules: WindowRules,
) -> tuple[LaunchedKernel, ...]:
  """Kernels that younger requests launch in a window of `planned` seconds."""
  launched: list[LaunchedKernel] = []
  for n in others:
    queue = left[n]
    while planned > 0 and queue and queue[0].kernel.sends != sends:
      unfinished = queue[0]
      kernel, piece = (
        unfinished.kernel,
        unfinished.kernel.seconds / rules.pieces,
      )
      remaining_s = piece * unfinished.pieces
      if remaining_s <= planned:
        queue.pop(0)
        launched.append(LaunchedKernel(n, kernel.kind, remaining_s))
        planned = 0.0 if kernel.sends else planned - remaining_s
        continue
      count = int(planned / piece) if kernel.kind == PRODUCT else 0
      if count:
        queue[0] = _Rest(kernel, unfinished.pieces - count)
        launched.append(LaunchedKernel(n, PRODUCT, count * piece))
      return tuple(launched)
  return tuple(launched)


def _run_window(
  now: float,
  primary: int,
  sends: bool,
  seconds: float,
  beside: tuple[LaunchedKernel, ...],
  rules: WindowRules,
) -> KernelWindow:
  """Compute the end of a window: overlapping kernels are slower."""
  beside_s = sum(launched.seconds for launched in beside)
  primary_slowdown, beside_slowdown = (
    rules.slowdown(sends),
    rules.slowdown(not sends),
  )
  shared_s = min(seconds * primary_slowdown, beside_s * beside_slowdown)
  primary_end_s = now + shared_s + (seconds - shared_s / primary_slowdown)
  beside_end_s = (
    now + shared_s + (beside_s - shared_s / beside_slowdown) if beside else now
  )
  return KernelWindow(
    start_s=now,
    primary=primary,
    sends=sends,
    seconds=seconds,
    beside=beside,
    primary_end_s=primary_end_s,
    end_s=max(primary_end_s, beside_end_s),
  )

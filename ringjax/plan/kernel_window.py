"""Kernels of several requests on the same devices: products beside sends.

Guarantees: the same requests give the same order of kernels, on every device;
else collectives of two requests would wait for each other. With slowdowns of 1
the primary request takes as long as alone.
Cost: O(kernels log kernels).

Under tensor parallelism a layer's products take c seconds and its collectives
m, one after the other, and one of the two is idle. Three ways to run requests:

In turn: one request behind the other, L (c + m) each.

Alternating: two requests in opposite phases, as in a step compiled for both,
2 L max(c, m) + min(c, m) together.

Windows: the oldest request, the primary, runs as alone. While a run of kernels
of one kind lasts (a window), younger requests launch kernels of the other kind
whose seconds fit into a share of it (`factor`, for kernels side by side slow
each other). Products that do not fit are cut: n of f pieces run now, the others
stay. A younger request's collective takes the rest of a window.

Ref: Du et al. 2024, Liger (PPoPP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ringjax.checks import number, one_of, positive_int
from ringjax.plan.events import Simulator

# What a kernel is: products that can be cut, other computation, a collective.
PRODUCT, OTHER, SEND = "product", "other", "send"
KINDS = (PRODUCT, OTHER, SEND)


@dataclasses.dataclass(frozen=True)
class TimedKernel:
  """One kernel of a request.

  Attributes:
    kind: of `KINDS`.
    seconds: that it takes alone.
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
  """Pieces of a kernel that have not run."""

  kernel: TimedKernel
  pieces: int


@dataclasses.dataclass(frozen=True)
class KernelQueue:
  """The kernels of a request, in order.

  Attributes:
    kernels: of all layers.
    arrival_s: when it came.
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
    """Layers of one product and one collective each."""
    positive_int("layers", layers)
    layer = (TimedKernel(PRODUCT, product_s), TimedKernel(SEND, send_s))
    return cls(layer * layers, arrival_s)

  @property
  def alone_s(self) -> float:
    """Seconds without other requests."""
    return float(sum(one.seconds for one in self.kernels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowRules:
  """How windows are filled.

  Attributes:
    factor: share of a window that is planned for.
    pieces: f, into which products are cut; 1: they are not.
    requests: that are looked at, the primary included.
    product_slowdown: how much longer computation takes beside a collective.
    send_slowdown: the same of a collective beside computation.
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
    """Of kernels of a kind beside those of the other."""
    return float(self.send_slowdown if sends else self.product_slowdown)


@dataclasses.dataclass(frozen=True)
class LaunchedKernel:
  """A kernel, or some pieces of one, as it was launched.

  Attributes:
    request: its number.
    kind: of `KINDS`.
    seconds: that it takes alone.
  """

  request: int
  kind: str
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWindow:
  """A run of the primary's kernels, and what ran beside.

  Attributes:
    start_s: when it began.
    primary: number of the request.
    sends: whether its kernels are collectives.
    seconds: of the primary's kernels, alone.
    beside: what younger requests launched.
    primary_end_s: when the primary's kernels were done.
    end_s: when all were done; the next window begins.
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
    """Seconds that the primary waited for what ran beside."""
    return self.end_s - self.primary_end_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOutcome:
  """When requests were done.

  Attributes:
    finish_s: of each request.
    latency_s: the same from its arrival.
    windows: in order; of `windows` alone.
  """

  finish_s: tuple[float, ...]
  latency_s: tuple[float, ...]
  windows: tuple[KernelWindow, ...] = ()

  @property
  def makespan_s(self) -> float:
    """When all were done."""
    return max(self.finish_s, default=0.0)

  @classmethod
  def of(
    cls,
    requests: Sequence[KernelQueue],
    finish_s: Sequence[float],
    windows: Sequence[KernelWindow] = (),
  ) -> KernelOutcome:
    """Latencies by the requests' arrivals."""
    latency = (
      end - one.arrival_s for one, end in zip(requests, finish_s, strict=True)
    )
    return cls(
      finish_s=tuple(map(float, finish_s)),
      latency_s=tuple(map(float, latency)),
      windows=tuple(windows),
    )


def in_turn(requests: Sequence[KernelQueue]) -> KernelOutcome:
  """One request behind the other, by their arrival."""
  now, finish = 0.0, [0.0] * len(requests)
  for n in _by_arrival(requests):
    now = max(now, requests[n].arrival_s) + requests[n].alone_s
    finish[n] = now
  return KernelOutcome.of(requests, finish)


def alternating(first: KernelQueue, second: KernelQueue) -> KernelOutcome:
  """Two requests kernel by kernel in turn, as one compiled step runs them.

  Whichever has waited longer for the products or the links gets them.
  """
  run = Simulator()
  places = {name: run.device(name) for name in ("products", "links")}
  last: list[list] = [[], []]
  pair = (first, second)
  for n in range(max(len(one.kernels) for one in pair)):
    for m, one in enumerate(pair):
      if n < len(one.kernels):
        kernel = one.kernels[n]
        where = places["links" if kernel.sends else "products"]
        last[m] = [
          run.op(
            f"{m}.{n}",
            where,
            kernel.seconds,
            after=last[m],
            kind=kernel.kind,
            release_s=one.arrival_s,
          )
        ]
  timeline = run.run()
  finish = [
    float(timeline[ops[0]].done_s) if ops else float(one.arrival_s)
    for ops, one in zip(last, pair, strict=True)
  ]
  return KernelOutcome.of(pair, finish)


def windows(
  requests: Sequence[KernelQueue], rules: WindowRules | None = None
) -> KernelOutcome:
  """The primary request as alone, others beside it.

  Args:
    requests: in any order; the one that came first is the primary, and when it
      is done the next one.
    rules: how windows are filled.
  """
  rules = WindowRules() if rules is None else rules
  left = [[_Rest(x, rules.pieces) for x in one.kernels] for one in requests]
  waiting = _by_arrival(requests)
  finish = [float(one.arrival_s) for one in requests]
  found: list[KernelWindow] = []
  now = 0.0
  while waiting := [n for n in waiting if left[n]]:
    now = max(now, float(requests[waiting[0]].arrival_s))
    there = [n for n in waiting if requests[n].arrival_s <= now]
    primary, *others = there[: rules.requests]
    mine, sends, seconds = left[primary], left[primary][0].kernel.sends, 0.0
    while mine and mine[0].kernel.sends == sends:
      rest = mine.pop(0)
      seconds += rest.kernel.seconds * rest.pieces / rules.pieces
    beside = _fill(seconds * rules.factor, sends, others, left, rules)
    one = _run_window(now, primary, sends, seconds, beside, rules)
    found.append(one)
    finish[primary] = one.primary_end_s
    for kernel in beside:
      finish[kernel.request] = one.end_s
    now = one.end_s
  return KernelOutcome.of(requests, finish, found)


def _by_arrival(requests: Sequence[KernelQueue]) -> list[int]:
  return sorted(range(len(requests)), key=lambda n: requests[n].arrival_s)


def _fill(
  planned: float,
  sends: bool,
  others: Sequence[int],
  left: list[list[_Rest]],
  rules: WindowRules,
) -> tuple[LaunchedKernel, ...]:
  """What younger requests launch in a window of so many seconds."""
  found: list[LaunchedKernel] = []
  for n in others:
    queue = left[n]
    while planned > 0 and queue and queue[0].kernel.sends != sends:
      rest = queue[0]
      kernel, piece = rest.kernel, rest.kernel.seconds / rules.pieces
      whole = piece * rest.pieces
      if whole <= planned:
        queue.pop(0)
        found.append(LaunchedKernel(n, kernel.kind, whole))
        planned = 0.0 if kernel.sends else planned - whole
        continue
      count = int(planned / piece) if kernel.kind == PRODUCT else 0
      if count:
        queue[0] = _Rest(kernel, rest.pieces - count)
        found.append(LaunchedKernel(n, PRODUCT, count * piece))
      return tuple(found)
  return tuple(found)


def _run_window(
  now: float,
  primary: int,
  sends: bool,
  seconds: float,
  beside: tuple[LaunchedKernel, ...],
  rules: WindowRules,
) -> KernelWindow:
  """When the kernels of a window end: side by side they are slower."""
  more = sum(one.seconds for one in beside)
  mine, theirs = rules.slowdown(sends), rules.slowdown(not sends)
  both = min(seconds * mine, more * theirs)
  primary_end = now + both + (seconds - both / mine)
  other_end = now + both + (more - both / theirs) if beside else now
  return KernelWindow(
    start_s=now,
    primary=primary,
    sends=sends,
    seconds=seconds,
    beside=beside,
    primary_end_s=primary_end,
    end_s=max(primary_end, other_end),
  )

"""Kernels of several requests side by side, in the simulator."""

from __future__ import annotations

import pytest

from ringjax.errors import OptionError
from ringjax.plan.systems.kernel_window import (
  PRODUCT,
  SEND,
  KernelQueue,
  TimedKernel,
  WindowRules,
  alternating,
  in_turn,
  windows,
)
from tests.helpers import refused


def pair(c, m, layers=10):
  return (KernelQueue.of_layers(layers, c, m),) * 2


@pytest.mark.parametrize(
  ("c", "m", "apart", "beside"),
  [(3, 2, 100, 62), (2, 3, 100, 62), (5, 1, 120, 101), (4, 4, 160, 84)],
)
def test_two_requests_in_opposite_phases(c, m, apart, beside):
  assert in_turn(pair(c, m)).makespan_s == apart == 20 * (c + m)
  found = alternating(*pair(c, m))
  assert found.makespan_s == beside == 20 * max(c, m) + min(c, m)


def test_requests_of_different_length_alternate():
  """A long one goes on alone; what is slower sets the pace before."""
  short, long = (KernelQueue.of_layers(n, 3, 2) for n in (4, 10))
  found = alternating(short, long)
  assert found.makespan_s < in_turn((short, long)).makespan_s
  assert found.finish_s[0] < found.finish_s[1]
  assert found.makespan_s >= max(long.alone_s, 3 * 14)


@pytest.mark.parametrize("requests", [2, 4, 6])
@pytest.mark.parametrize(("c", "m"), [(3, 2), (5, 1), (2, 3)])
def test_the_primary_takes_as_long_as_alone(requests, c, m):
  queues = [KernelQueue.of_layers(10, c, m)] * requests
  found = windows(queues)
  assert found.latency_s[0] == queues[0].alone_s
  assert found.makespan_s <= in_turn(queues).makespan_s
  # Nothing is lost, and nothing runs twice.
  spent = sum(w.seconds + sum(k.seconds for k in w.beside)
              for w in found.windows)  # fmt: skip
  assert spent == pytest.approx(requests * queues[0].alone_s)
  assert found == windows(queues)


def test_cut_products_fill_windows():
  queues = [KernelQueue.of_layers(10, 3, 2)] * 2
  times = {
    n: windows(queues, WindowRules(pieces=n)).makespan_s for n in (1, 3, 8)
  }
  # A product of 3 s does not fit into 0.8 of a collective of 2 s.
  assert times[1] == in_turn(queues).makespan_s == 100
  assert times[8] < times[3] < times[1]
  assert times[8] > alternating(*queues).makespan_s


@pytest.mark.parametrize("factor", [0.5, 0.8])
def test_a_share_of_a_window_keeps_slow_kernels_inside(factor):
  queues = [KernelQueue.of_layers(10, 3, 3)] * 4
  slow = dict(product_slowdown=1.0, send_slowdown=1 / factor)
  kept = windows(queues, WindowRules(factor=factor, **slow))
  assert max(w.overrun_s for w in kept.windows) <= 1e-9
  # Without a margin a collective runs over, alone from there on.
  full = windows(queues, WindowRules(factor=1, **slow))
  over = max(w.overrun_s for w in full.windows)
  assert over == pytest.approx(3 - 3 * factor)
  for window in full.windows:
    planned = sum(k.seconds for k in window.beside)
    assert planned <= window.seconds
    assert window.end_s >= window.primary_end_s


def test_what_goes_into_a_window():
  """Of the other kind only, in order; a collective takes all of the rest."""
  send, product = TimedKernel(SEND, 1), TimedKernel(PRODUCT, 1)
  primary = KernelQueue((TimedKernel(PRODUCT, 10), TimedKernel(SEND, 5)))
  sends = KernelQueue((send, send, product))
  found = windows([primary, sends, sends], WindowRules(requests=3))
  first, second, *_ = found.windows
  assert [(k.request, k.kind) for k in first.beside] == [(1, SEND)]
  # Of the window of 5 s 4 are planned: request 1 waits with a collective.
  assert [(k.request, k.kind) for k in second.beside] == []
  # Two pieces of five of a product of 5 s fit into 0.8 x 3 s.
  primary = KernelQueue((TimedKernel(SEND, 3), product))
  other = KernelQueue((TimedKernel(PRODUCT, 5),))
  found = windows([primary, other], WindowRules(pieces=5))
  assert [k.seconds for w in found.windows for k in w.beside] == [2.0]
  assert found.finish_s == (4.0, 7.0)
  alone = windows([primary, other, sends], WindowRules(requests=1))
  assert not any(w.beside for w in alone.windows)


def test_requests_that_come_later_wait_for_their_turn():
  early = KernelQueue.of_layers(4, 3, 2)
  late = KernelQueue.of_layers(4, 3, 2, arrival_s=7)
  found = windows([late, early])
  assert found.windows[0].primary == 1
  assert found.latency_s[1] == early.alone_s
  assert not found.windows[0].beside and not found.windows[1].beside
  later = KernelQueue.of_layers(1, 1, 1, arrival_s=100)
  assert windows([early, later]).finish_s[1] == 102


def test_bad_input():
  refused(OptionError, lambda: WindowRules(factor=1.1), "factor")
  refused(OptionError, lambda: WindowRules(send_slowdown=0.5), "slowdown")
  refused(OptionError, lambda: TimedKernel("copy", 1), "product")
  refused(OptionError, lambda: TimedKernel(SEND, 0), "seconds")

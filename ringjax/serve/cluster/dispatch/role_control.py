"""Changes of instances' roles by a planner, at the end of each window."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable

from ringjax.errors import OptionError
from ringjax.serve.cluster.dispatch.counters import RouterCounters
from ringjax.serve.cluster.dispatch.instances import InstanceTable
from ringjax.serve.cluster.dispatch.request_state import RoutedState
from ringjax.serve.cluster.dispatch.request_table import RequestTable
from ringjax.serve.cluster.role_planner import (
  RoleChange,
  RolePlanner,
  TrafficSummary,
)
from ringjax.serve.cluster.routing import InstanceView
from ringjax.serve.traces import TraceRequest

# Requests of a window whose prompts are kept until the window ends.
_MOST_CAME = 1024


class RoleControl:
  """Plans roles from the requests of a window, and changes them.

  Attributes:
    changes: The last planned role changes, at most 1,024.
    error: Error of the last planning of roles, or "".
  """

  def __init__(
    self,
    planner: RolePlanner | None,
    work: threading.Condition,
    instances: InstanceTable,
    requests: RequestTable,
    counters: RouterCounters,
    *,
    dispatch: Callable[[], object],
    clock: Callable[[], float],
  ):
    """Begin the first window.

    Args:
      planner: Decides roles; None leaves them as they are.
      work: Lock of the router.
      instances: Instances of the cluster.
      requests: Requests in flight.
      counters: Counters of the router.
      dispatch: Function called after a change, with the lock held.
      clock: Returns seconds.
    """
    self._planner, self._work = planner, work
    self._instances, self._requests = instances, requests
    self._counters, self._dispatch, self._clock = counters, dispatch, clock
    # Requests of the current window, and those that roles are planned for.
    self._window_requests: collections.deque[RoutedState] = collections.deque()
    self._window_overflow: list[tuple[TraceRequest, int]] = []
    self._planned: TrafficSummary | None = None
    self._planning = threading.Lock()
    self.changes: collections.deque[RoleChange] = collections.deque(maxlen=1024)
    self.error = ""

  def count(self, state: RoutedState) -> None:
    """Count a new request in the current window; the lock is held."""
    if self._planner is None:
      return
    cached = self._requests.cached(state)
    had = ((name, cached(name)) for name in sorted(self._instances.alive))
    state.had = tuple(entry for entry in had if entry[1])
    self._window_requests.append(state)
    if len(self._window_requests) > _MOST_CAME:
      self._window_overflow.append(_as_traced(self._window_requests.popleft()))

  def plan(self) -> dict[str, str]:
    """Plan roles from the requests since the last planning.

    Returns:
      The roles that have changed, by instance name.

    Raises:
      OptionError: If there is no planner, or the planner raises.
    """
    if self._planner is None:
      raise OptionError(
        "roles", "no planner", "a RolePlanner", "pass roles=DriftingRoles(...)"
      )
    with self._planning:
      # Planning may simulate for a while: requests are served meanwhile.
      decision = self._planner.decide(
        self._recent_requests(), self._views(), self._planned
      )
      self._planned = decision.planned
      with self._work:
        current_roles = {
          view.name: view.role for view in self._instances.views()
        }
        changed = {
          name: role
          for name, role in sorted(decision.roles.items())
          if current_roles.get(name, role) != role
          # A planner does not know that stages only read prompts.
          and role in self._instances.alive[name].roles
        }
        self._instances.change_roles(changed)
        self._dispatch()
        self._counters.roles += len(changed)
        self.changes += [
          RoleChange(
            time_s=self._clock(), name=name, role=role, why=decision.why
          )
          for name, role in changed.items()
        ]
    return changed

  def run(self, closed: Callable[[], bool]) -> None:
    """Plan roles at the end of each window, until the router is closed."""
    assert self._planner is not None
    while True:
      with self._work:
        self._work.wait_for(closed, timeout=float(self._planner.window_s))
        if closed():
          return
      try:
        self.plan()
        self.error = ""
      except Exception as error:
        # Requests are served with the current roles.
        self._counters.unplanned += 1
        self.error = str(error) or type(error).__name__

  def _views(self) -> list[InstanceView]:
    with self._work:
      return self._instances.views()

  def _recent_requests(self) -> list[TraceRequest]:
    """Requests since the last planning, as a trace.

    An unfinished answer is assumed to be as long as finished answers were on
    average, as its limit is only an upper bound.
    """
    with self._work:
      states, self._window_requests = self._window_requests, collections.deque()
      traced, self._window_overflow = self._window_overflow, []
      page = min(
        (instance.page for instance in self._instances.alive.values()),
        default=0,
      )
    traced += [_as_traced(state) for state in states]
    for n, state in enumerate(states, len(traced) - len(states)):
      if page and state.handle.request.share:
        keys = [int(key[:12], 16) for key in state.block_keys(page)]
        with_blocks = dataclasses.replace(
          traced[n][0], blocks=tuple(keys), block=page
        )
        traced[n] = with_blocks, traced[n][1]
    finished_lengths = [
      request.new_tokens for request, remaining in traced if not remaining
    ]
    mean_length = (
      sum(finished_lengths) // len(finished_lengths)
      if finished_lengths
      else math.inf
    )
    return [
      dataclasses.replace(
        request,
        new_tokens=int(
          min(
            max(1, mean_length, request.new_tokens),
            request.new_tokens + remaining,
          )
        ),
      )
      if remaining
      else request
      for request, remaining in traced
    ]


def _as_traced(state: RoutedState) -> tuple[TraceRequest, int]:
  """A request as a trace entry, and the tokens that may still follow."""
  handle, routed = state.handle, state.routed
  num_tokens = sum(len(answer.tokens) for answer in handle.answers)
  return TraceRequest(
    arrival=float(routed.arrival_s),
    prompt_tokens=routed.prompt_tokens,
    new_tokens=max(1, num_tokens),
    number=routed.number,
    cached=state.had,
  ), 0 if handle.done else max(0, routed.new_tokens - num_tokens)

"""Agreement of an engine's replicas on their steps.

An engine of several processes has a replica in each of them: the same
scheduler, the same prefixes, the same pages. A replica's steps depend on its
requests and on nothing else, but for what it asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from ringjax.serve.scheduler import Scheduler, StepPlan

Value = TypeVar("Value")


class StepAgreement(Protocol):
  """Agreement of an engine with its replicas in other processes."""

  def check_caller(self, what: str) -> None:
    """Refuses a call that would change this replica alone.

    Raises:
      OptionError: If the replicas are driven by a group, not by this thread.
    """
    ...

  def choose(self, value: Value) -> Value:
    """Choice of all replicas, for one that depends on measured times.

    Args:
      value: Choice of this replica, a JSON value.
    """
    ...

  def together(self, value: int | None) -> list[int | None]:
    """Numbers of all replicas, in an order that is the same in all.

    Args:
      value: Number of this replica, or None.

    Raises:
      PeerError: If the process of a replica has failed.
    """
    ...

  def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
    """Notes a plan whose calls are about to be dispatched."""
    ...

  def read(self, chosen: Sequence[np.ndarray]) -> None:
    """Waits until all replicas have the same plans and chosen tokens.

    Args:
      chosen: Arrays of the chosen tokens and of their numbers, int32.

    Raises:
      PeerError: If a replica differs, or its process has failed.
    """
    ...

  def failed(self, error: Exception) -> Exception:
    """Error of a failed step, of the process that caused it."""
    ...


class LocalAgreement:
  """Agreement of an engine that has no replicas."""

  def check_caller(self, what: str) -> None:
    """Allows all calls."""

  def choose(self, value: Value) -> Value:
    """Returns the value."""
    return value

  def together(self, value: int | None) -> list[int | None]:
    """Returns the number alone."""
    return [value]

  def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
    """Does nothing."""

  def read(self, chosen: Sequence[np.ndarray]) -> None:
    """Returns at once."""

  def failed(self, error: Exception) -> Exception:
    """Returns the error."""
    return error


def plan_bytes(plan: StepPlan) -> bytes:
  """Numbers of a plan, by slots: they mean the same in every replica."""
  numbers = (
    [
      (t.slot, t.at, t.chooses, t.draft.tokens, t.draft.parents)
      for t in plan.turns
    ],
    [(p.row.slot, p.start, p.count, p.chooses) for p in plan.pieces],
    [(row.slot, row.hit) for row in plan.admitted],
    len(plan.preempted),
    [row.slot for row in plan.restored],
    len(plan.refused),
    [(f.row.slot, f.source, f.number, f.pages) for f in plan.forks],
  )
  return repr(numbers).encode()

"""Counters of a router and the metrics that a server exports of them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from ringjax.serve.api.server_metrics import Figure
from ringjax.serve.cluster.dispatch.request_state import RequestStage
from ringjax.serve.cluster.routing import ROLES


@dataclasses.dataclass(kw_only=True)
class RouterCounters:
  """Counters of a router's work since it started.

  Attributes:
    requests: Number of submitted requests.
    finished: Requests that ended, for whatever reason.
    cancelled: Requests that were cancelled.
    failed: Requests that ended with an error.
    rejected: Failed requests that the policy had rejected.
    new_tokens: Generated tokens that were received.
    moved: Requests whose pages were pulled by a decode instance.
    moved_bytes: Bytes of these pages.
    fetched: Prefixes pulled before the rest of a prompt was prefilled.
    fetched_bytes: Bytes of these prefixes.
    copied: Prefixes that an instance pulled for later requests, while the
      instance that has them was busy.
    copied_bytes: Bytes of these copies.
    again: Number of restarts of requests on other instances.
    lost: Instances that disconnected without leaving.
    roles: Role changes made by the planner.
    unplanned: Windows whose roles could not be planned, see `role_error`.
  """

  requests: int = 0
  finished: int = 0
  cancelled: int = 0
  failed: int = 0
  rejected: int = 0
  new_tokens: int = 0
  moved: int = 0
  moved_bytes: int = 0
  fetched: int = 0
  fetched_bytes: int = 0
  copied: int = 0
  copied_bytes: int = 0
  again: int = 0
  lost: int = 0
  roles: int = 0
  unplanned: int = 0


def router_figures(
  counters: RouterCounters, stages: Iterable[RequestStage], roles: Iterable[str]
) -> list[Figure]:
  """Metrics of a router.

  Args:
    counters: Counters of its work.
    stages: RequestStage of each request in flight.
    roles: Role of each instance that is alive.
  """
  figures = [
    Figure("counter", name, getattr(counters, field), text)
    for name, field, text in (
      ("requests_total", "requests", "Requests to the router."),
      ("requests_finished_total", "finished", "Requests that ended."),
      ("requests_cancelled_total", "cancelled", "Requests given up."),
      ("requests_failed_total", "failed", "Requests that raised an error."),
      ("requests_rejected_total", "rejected", "Requests not taken."),
      ("requests_again_total", "again", "Requests that began again."),
      ("requests_moved_total", "moved", "Requests whose pages moved."),
      ("moved_bytes_total", "moved_bytes", "Bytes of pages that moved."),
      ("prefixes_fetched_total", "fetched", "Prefixes that were fetched."),
      ("fetched_bytes_total", "fetched_bytes", "Bytes of prefixes."),
      ("prefixes_copied_total", "copied", "Hot prefixes that were copied."),
      ("copied_bytes_total", "copied_bytes", "Bytes of copied prefixes."),
      ("new_tokens_total", "new_tokens", "Tokens of answers."),
      ("instances_lost_total", "lost", "Instances that were lost."),
      ("roles_changed_total", "roles", "Roles that the planner changed."),
      ("roles_unplanned_total", "unplanned", "Windows without a plan."),
    )
  ]
  requests_by_stage = collections.Counter(stages)
  for stage in RequestStage:
    text = f"Requests in the stage {stage.value!r}."
    figures.append(
      Figure("gauge", f"requests_{stage}", requests_by_stage[stage], text)
    )
  instances_by_role = collections.Counter(roles)
  for role in ROLES:
    text = f"Instances of the role {role!r}."
    figures.append(
      Figure("gauge", f"instances_{role}", instances_by_role[role], text)
    )
  return figures

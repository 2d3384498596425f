"""Routing policies: which instance prefills a prompt and which one decodes it.

Guarantees: a policy is a pure function of a request and of the router's views
of its instances; the live router and the simulator call the same object with
the same kind of view, so that a decision can be replayed.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670: the shortest queue
for prefill, the least loaded instance for decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.serve.cluster.times.phase_times import QueuedPrompts

# Work of an instance: prefill, decode, or both.
ROLES = ("prefill", "decode", "both")
# Maximum number of prompts whose lengths an instance reports one by one.
MOST_QUEUED = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceView:
  """State of one instance as a router knows it when it decides.

  Attributes:
    name: Name, unique in the cluster.
    role: Role of the instance, one of `ROLES`.
    queued_requests: Number of prompts that wait or are in prefill.
    queued_tokens: Uncomputed tokens of these prompts; in a pipeline, by its
      first stage.
    queued_s: Predicted seconds until these are prefilled; None: a policy
      predicts them from `queue` (`RoutingCosts.queue_s`).
    queue: Prompts that wait or are in prefill; empty if only their sums are
      known.
    running_requests: Number of answers in decode.
    running_tokens: Cached tokens of these answers.
    free_tokens: Number of tokens that fit into its cache now.
    capacity_tokens: Total capacity of its cache in tokens; 0 if unknown.
    max_rows: Maximum number of answers that decode at once; 0 if unknown.
    sending_tokens: Tokens whose caches it is sending, or will send next, to
      other instances.
  """

  name: str
  role: str
  queued_requests: int = 0
  queued_tokens: int = 0
  queued_s: int | float | None = None
  queue: tuple[QueuedPrompts, ...] = ()
  running_requests: int = 0
  running_tokens: int = 0
  free_tokens: int = 0
  capacity_tokens: int = 0
  max_rows: int = 0
  sending_tokens: int = 0

  @property
  def prompts(self) -> tuple[QueuedPrompts, ...]:
    """`queue`; if only the sums are known, prompts of equal lengths."""
    if self.queue or not self.queued_tokens:
      return self.queue
    count = max(1, self.queued_requests)
    return (QueuedPrompts(-(-self.queued_tokens // count), count=count),)

  @property
  def prefills(self) -> bool:
    """Whether it takes prompts for prefill."""
    return self.role in ("prefill", "both")

  @property
  def decodes(self) -> bool:
    """Whether it takes requests for decode."""
    return self.role in ("decode", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedRequest:
  """A request as a policy sees it.

  Attributes:
    number: Unique number, in the order of arrivals.
    arrival_s: Time of arrival, in seconds.
    prompt_tokens: Prompt length in tokens.
    new_tokens: Maximum number of tokens to generate.
    cached_tokens: Function from an instance's name to the tokens of the
      prompt's prefix in its cache (a function, as few are needed).
  """

  number: int
  arrival_s: int | float
  prompt_tokens: int
  new_tokens: int
  cached_tokens: Callable[[str], int] = lambda name: 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCopy:
  """A prefix that an instance should pull, independent of the request.

  Attributes:
    source: Name of an instance that has the prefix.
    target: Name of the instance that pulls it.
    tokens: Prompt tokens that the target has afterwards.
  """

  source: str
  target: str
  tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
  """Instances that serve a request.

  Attributes:
    prefill: Name of the prefill instance.
    decode: Name of the decode instance; the same name for both phases on one
      instance. None to choose it after prefill.
    fetch_from: Name of an instance from which the prefill instance first
      pulls the prefix that it lacks, or None.
    fetch_tokens: Prompt tokens that it has after the fetch.
    copy: Prefix that another instance should get for later requests, or None.
  """

  prefill: str
  decode: str | None
  fetch_from: str | None = None
  fetch_tokens: int = 0
  copy: PrefixCopy | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejected:
  """Rejection of a request; over HTTP, status 429.

  Attributes:
    reason: Text for users.
  """

  reason: str


@runtime_checkable
class RoutingPolicy(Protocol):
  """Decides where requests go."""

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """Choose the instances for a request that has arrived.

    Args:
      request: Request to route.
      instances: Views of all live instances, sorted by name.
      now_s: Time of the cluster's clock, in seconds.
    """
    ...

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """Choose the decode instance for a prefilled request.

    Returns:
      Its name; None to wait until an instance has room; or a late rejection.
    """
    ...


def lacking(roles: Iterable[str]) -> str:
  """Name the work that no instance with these roles does; "" if none."""
  roles_present = {*roles}
  for role, words in (("prefill", "reads prompts"), ("decode", "answers")):
    if not roles_present & {role, "both"}:
      return words
  return ""


def check_roles(roles: Mapping[str, str], changed: Mapping[str, str]) -> None:
  """Check that some instance prefills and some instance decodes.

  Args:
    roles: Current roles of all instances that take new work, by name.
    changed: New roles of some of them.

  Raises:
    OptionError: If a role or name is unknown, or no instance would prefill or
      decode.
  """
  for name, role in changed.items():
    one_of("role", role, ROLES)
    if name not in roles:
      raise OptionError(
        "name", name, f"one of {sorted(roles)}", "pass its name"
      )
  words = lacking({**roles, **changed}.values()) if changed else ""
  if words:
    raise OptionError(
      "role",
      ", ".join(f"{x} for {name}" for name, x in [*changed.items()][:3]),
      f"an instance that {words}",
      "let another one join, or change its role, before",
    )


class ChosenReader:
  """Base of policies that choose a prefill instance among all of them."""

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """Choose the prefill instance among `able`, which is not empty."""
    raise NotImplementedError

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """Route to the chosen reader, which also decodes if it has both roles."""
    readers = [view for view in instances if view.prefills]
    if not readers:
      return Rejected(reason="no instance reads prompts")
    best = self.reader(request, readers)
    decoder = best.name if best.role == "both" else None
    return Route(prefill=best.name, decode=decoder)


@dataclasses.dataclass(frozen=True)
class ShortestQueue(ChosenReader):
  """DistServe's rule: prefill on the shortest queue, decode on the least load.

  The decode instance is chosen after prefill, among those with room for the
  prompt and its answer. Of equal queues the instance with fewer running tokens
  prefills, then the first name.
  """

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """Choose the instance with the fewest queued tokens."""
    return min(
      able,
      key=lambda view: (view.queued_tokens, view.running_tokens, view.name),
    )

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """Choose the instance with room and the fewest running tokens."""
    need = request.prompt_tokens + request.new_tokens
    decoding = [view for view in instances if view.decodes]
    if not decoding:
      return Rejected(reason="no instance answers")
    with_room = [view for view in decoding if view.free_tokens >= need]
    if not with_room:
      return None
    return min(
      with_room, key=lambda view: (view.running_tokens, view.name)
    ).name

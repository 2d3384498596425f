"""Which instance of a cluster reads a prompt and which one answers it.

Guarantees: a policy is a pure function of a request and of what the router
knows of its instances; the live router and the simulator call the same object
with the same kind of view, so that a decision can be replayed.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670: the shortest queue
for prefill, the least loaded instance for decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.serve.cluster.phase_times import QueuedPrompts

# What an instance does: read prompts, answer them, or both.
ROLES = ("prefill", "decode", "both")
# Prompts of which an instance reports the lengths; of others it has the sums.
MOST_QUEUED = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceView:
  """What a router knows of one instance when it decides.

  Attributes:
    name: unique in the cluster.
    role: of `ROLES`.
    queued_requests: prompts that wait or are being read.
    queued_tokens: of these, tokens that are not yet computed; in a pipeline by
      its first stage.
    queued_s: predicted seconds until these are read; None: a policy predicts
      them from `queue` (`RoutingCosts.queue_s`).
    queue: the prompts that wait or are being read; empty if only their sums
      are known.
    running_requests: answers under way.
    running_tokens: cached tokens of these.
    free_tokens: tokens that its cache has room for.
    capacity_tokens: tokens that its cache holds, of all; 0 if nobody said.
    max_rows: answers that it makes at the same time; 0 if nobody said.
    sending_tokens: tokens whose caches it has begun to send, or is to send
      next, to others.
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
    """Whether it may read prompts."""
    return self.role in ("prefill", "both")

  @property
  def decodes(self) -> bool:
    """Whether it may answer."""
    return self.role in ("decode", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedRequest:
  """A request as a policy sees it.

  Attributes:
    number: unique, in the order of arrivals.
    arrival_s: when it came.
    prompt_tokens: of its prompt.
    new_tokens: of its answer, at most.
    cached_tokens: by an instance's name, the tokens of the prompt's prefix
      that this instance has in its cache (a function, as few are asked for).
  """

  number: int
  arrival_s: int | float
  prompt_tokens: int
  new_tokens: int
  cached_tokens: Callable[[str], int] = lambda name: 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCopy:
  """A prefix of a prompt that an instance is to pull beside the request.

  Attributes:
    source: name of an instance that has it.
    target: name of the one that gets it.
    tokens: of the prompt, that the target then has.
  """

  source: str
  target: str
  tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
  """Where a request goes.

  Attributes:
    prefill: name of the instance that reads the prompt.
    decode: name of the instance that answers; the same one if it does both.
      None if it is chosen when the prompt has been read.
    fetch_from: name of an instance from which the prefill instance first
      pulls the prefix that it lacks, or None.
    fetch_tokens: of the prompt, that it then has.
    copy: a prefix that another instance is to get for later requests, or None.
  """

  prefill: str
  decode: str | None
  fetch_from: str | None = None
  fetch_tokens: int = 0
  copy: PrefixCopy | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejected:
  """A request that is not taken; over HTTP, status 429.

  Attributes:
    reason: for people.
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
    """The route of a request that has come.

    Args:
      request: the request.
      instances: all that are alive, in the order of their names.
      now_s: the time of the cluster's clock.
    """
    ...

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """The instance that answers a request whose prompt has been read.

    Returns:
      Its name; None to wait until one has room; or a late rejection.
    """
    ...


def lacking(roles: Iterable[str]) -> str:
  """What no instance with one of these roles does; "" if all is done."""
  there = {*roles}
  for role, words in (("prefill", "reads prompts"), ("decode", "answers")):
    if not there & {role, "both"}:
      return words
  return ""


def check_roles(roles: Mapping[str, str], changed: Mapping[str, str]) -> None:
  """Refuses roles with which nobody would read prompts, or answer.

  Args:
    roles: of all instances that take something new, by their names.
    changed: those of them that are to be others now.

  Raises:
    OptionError: no such role or instance, or nobody would do one of both.
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
  """Part of policies that choose who reads among all that read prompts."""

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """The instance of `able`, which are not empty, that reads a request."""
    raise NotImplementedError

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """As `RoutingPolicy`; an instance that does both keeps the request."""
    able = [one for one in instances if one.prefills]
    if not able:
      return Rejected(reason="no instance reads prompts")
    best = self.reader(request, able)
    own = best.name if best.role == "both" else None
    return Route(prefill=best.name, decode=own)


@dataclasses.dataclass(frozen=True)
class ShortestQueue(ChosenReader):
  """DistServe's rule: the shortest queue reads, the least loaded one answers.

  The decode instance is chosen when the prompt has been read, among those with
  room for the prompt and its answer. Of equal queues the instance with fewer
  running tokens reads, then the first name.
  """

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """As `ChosenReader`."""
    return min(
      able, key=lambda one: (one.queued_tokens, one.running_tokens, one.name)
    )

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """As `RoutingPolicy`."""
    need = request.prompt_tokens + request.new_tokens
    able = [one for one in instances if one.decodes]
    if not able:
      return Rejected(reason="no instance answers")
    room = [one for one in able if one.free_tokens >= need]
    if not room:
      return None
    return min(room, key=lambda one: (one.running_tokens, one.name)).name

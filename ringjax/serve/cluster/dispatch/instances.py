"""Instances of a cluster as its router sees them: load, queue and roles."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster.block_index import BlockEvent, BlockIndex
from ringjax.serve.cluster.routing import (
  MOST_QUEUED,
  ROLES,
  InstanceView,
  check_roles,
)
from ringjax.serve.cluster.times.phase_times import QueuedPrompts

# Descriptions, in messages, of what an instance can do.
DOES = {"prefills": "reads prompts", "decodes": "answers"}
_MOST_NUMBER = 1 << 53
_REPORTED = (
  "queued_requests",
  "queued_tokens",
  "running_requests",
  "running_tokens",
  "free_tokens",
)


class SentTask(NamedTuple):
  """A task that an instance was sent and that its report does not count yet.

  Fields:
    number: Sequence number among the tasks that were sent to this instance.
    queued: The prompt to prefill; None if the task is decoding.
    prompt: Prompt length in tokens.
    new: Maximum number of tokens to generate.
  """

  number: int
  queued: QueuedPrompts | None
  prompt: int
  new: int


@dataclasses.dataclass(eq=False)
class ClusterInstance:
  """An instance that has joined the cluster.

  Attributes:
    name: Name, unique among the instances that are alive.
    role: Kind of work that is sent to it, one of `ROLES`.
    link: Control connection to it.
    address: Host and port where other instances pull its pages.
    page: Page size of its engine, in tokens.
    capacity: Size of its page pool, in tokens.
    rows: Number of answers that it decodes at the same time.
    leaving: Whether it takes no new work.
    report: Load that it reported last.
    queue: Prompts waiting for prefill, as reported last.
    heard: Number of messages received from it.
    sent: Number of tasks that were sent to it.
    since: Sent tasks that its last report does not count yet.
    roles: Roles that it can have.
    reads_texts: Whether it scores and embeds texts.
    moves_pages: Whether it sends pages to others and pulls theirs; one that
      does not answers what it reads.
  """

  name: str
  role: str
  link: LiveLink
  address: tuple[str, int]
  page: int
  capacity: int
  rows: int
  leaving: bool = False
  report: dict[str, int] = dataclasses.field(default_factory=dict)
  queue: tuple[QueuedPrompts, ...] = ()
  heard: int = 0
  sent: int = 0
  since: collections.deque[SentTask] = dataclasses.field(
    default_factory=collections.deque
  )
  roles: tuple[str, ...] = ROLES
  reads_texts: bool = False
  moves_pages: bool = True

  def view(self) -> InstanceView:
    """Load as policies see it: the report plus the tasks sent since."""
    load = {name: self.report.get(name, 0) for name in _REPORTED}
    queue = [*self.queue]
    for task in self.since:
      kind = "running" if task.queued is None else "queued"
      load[f"{kind}_requests"] += 1
      load[f"{kind}_tokens"] += task.prompt
      if task.queued is not None:
        queue.append(task.queued)
      need = task.prompt + task.new
      load["free_tokens"] = max(0, load["free_tokens"] - need)
    return InstanceView(
      name=self.name,
      role=self.role,
      capacity_tokens=self.capacity,
      max_rows=self.rows,
      queue=(*queue,),
      **load,
    )

  def hear_load(
    self, fields: Mapping[str, Any], expected: Callable[[int], int]
  ) -> None:
    """Update the load from a report of the instance.

    Args:
      fields: The message; `queue` holds (task, tokens left, tokens whose keys
        are cached) for the first prompts of the queue.
      expected: Function from a task's number to the prompt tokens that should
        be cached at the instance.

    Raises:
      OptionError: If a number is out of range.
      KeyError, TypeError, ValueError: If the message is malformed.
    """
    count = lambda name, x: integer(name, x, least=0, most=_MOST_NUMBER)
    report = {name: count(name, fields[name]) for name in _REPORTED}
    tasks_taken = count("taken", fields["taken"])
    queue_entries = fields["queue"]
    if not isinstance(queue_entries, list) or len(queue_entries) > MOST_QUEUED:
      raise ValueError(f"a queue of no list, or more than {MOST_QUEUED}")
    queue: list[QueuedPrompts] = []
    requests, tokens = report["queued_requests"], report["queued_tokens"]
    for task, tokens_left, computed in queue_entries:
      integer("task", task, least=-1, most=_MOST_NUMBER)
      integer("left", tokens_left, least=1, most=_MOST_NUMBER)
      # An engine looks up cached tokens only when it begins with a prompt.
      cached = count("computed", computed) or expected(task)
      queue.append(QueuedPrompts.of(tokens_left + computed, cached))
      requests, tokens = requests - 1, tokens - tokens_left
    if requests < 0 or tokens < requests or (tokens and not requests):
      raise ValueError("a queue with other sums than are said")
    if requests:
      # Prompts after the listed ones, as if they were equally long.
      queue.append(QueuedPrompts(-(-tokens // requests), count=requests))
    self.report, self.queue = report, (*queue,)
    while self.since and self.since[0].number <= tasks_taken:
      self.since.popleft()


class InstanceTable:
  """Instances that are alive; its user holds the router's lock.

  Attributes:
    alive: Instances by name.
    blocks: Index of the prompt blocks that each instance has, by `short_key`.
  """

  def __init__(self) -> None:
    self.alive: dict[str, ClusterInstance] = {}
    self.blocks = BlockIndex()

  def __contains__(self, instance: ClusterInstance | None) -> bool:
    """Whether this very instance is alive, not another one of its name."""
    return instance is not None and self.alive.get(instance.name) is instance

  def remove(self, instance: ClusterInstance) -> None:
    """Forget an instance and its blocks."""
    del self.alive[instance.name]
    self.blocks.forget(instance.name)

  def able(self, ability: str) -> list[ClusterInstance]:
    """Instances that take new work of a kind ("prefills", "decodes")."""
    return [
      instance
      for instance in self.alive.values()
      if not instance.leaving and getattr(instance.view(), ability)
    ]

  def views(self) -> list[InstanceView]:
    """Views of the instances that take new work, sorted by name."""
    return [
      self.alive[name].view()
      for name in sorted(self.alive)
      if not self.alive[name].leaving
    ]

  def named(self, name: str) -> ClusterInstance:
    """The instance that a policy names.

    Raises:
      OptionError: If it is not alive, or is leaving.
    """
    instance = self.alive.get(name)
    if instance is None or instance.leaving:
      raise OptionError(
        "policy",
        f"the instance {name!r}",
        f"one of {[x.name for x in self.views()]}",
        "choose among those that it is shown",
      )
    return instance

  def change_roles(self, changed: Mapping[str, str]) -> None:
    """Change roles of instances, and tell them.

    Raises:
      OptionError: If an instance can't have its role, or no instance would be
        left that prefills or decodes.
    """
    for name, role in changed.items():
      roles = self.alive[name].roles if name in self.alive else ROLES
      if role not in roles:
        raise OptionError(
          "role",
          f"{role} for {name}",
          f"{', '.join(roles)}: stages only read prompts, and an engine of "
          "several processes answers what it reads",
          "leave its role, or let another instance join",
        )
    check_roles({view.name: view.role for view in self.views()}, changed)
    for name, role in changed.items():
      instance = self.alive[name]
      instance.role = role
      instance.link.tell("role", role=role)

  def hear_blocks(
    self, instance: ClusterInstance, fields: Mapping[str, Any]
  ) -> None:
    """Update the index from an instance's report of changed blocks."""
    self.blocks.apply(
      BlockEvent(
        instance=instance.name,
        epoch=fields["epoch"],
        number=fields["number"],
        kind=fields["kind"],
        keys=tuple(map(str, fields["keys"])),
      )
    )

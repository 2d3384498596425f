"""Copies of prefixes that instances pull for later requests."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ringjax.serve.cluster.dispatch.counters import RouterCounters
from ringjax.serve.cluster.dispatch.instances import (
  ClusterInstance,
  InstanceTable,
  SentTask,
)
from ringjax.serve.cluster.dispatch.request_state import RoutedState
from ringjax.serve.cluster.dispatch.request_table import (
  RequestTable,
  ticket_list,
)
from ringjax.serve.cluster.routing import PrefixCopy
from ringjax.serve.cluster.times.phase_times import QueuedPrompts
from ringjax.serve.request import Request
from ringjax.serve.request_fields import request_fields

# Seconds from a copy's end until the same copy may be requested again: the
# target needs this time to report its new blocks.
_COPIED_S = 5.0


@dataclasses.dataclass(eq=False)
class CopyTask:
  """A prefix that an instance pulls for later requests.

  Attributes:
    source: Instance that has the prefix.
    target: Instance that pulls the prefix.
    request: Request of the prefix and one token after it, which the target
      prefills, so that it keeps the blocks as of any prefilled prompt.
    prompt: Token ids, int32 [n].
    key: Key of the prefix's last block.
    offer: Task number at the source.
    task: Task number at the target; -1 until the source has published.
    pulled: Whether the target has the pages.
  """

  source: ClusterInstance
  target: ClusterInstance
  request: Request
  prompt: np.ndarray
  key: str
  offer: int = -1
  task: int = -1
  pulled: bool = False


class PrefixCopies:
  """Copies in flight, and those that have just ended.

  Attributes:
    tasks: Copies by their task numbers at the sources and at the targets.
  """

  def __init__(
    self,
    instances: InstanceTable,
    requests: RequestTable,
    counters: RouterCounters,
    clock: Callable[[], float],
  ):
    """Begin without copies.

    Args:
      instances: Instances of the cluster.
      requests: Requests, which share the copies' task numbers.
      counters: Counters of the router.
      clock: Returns seconds.
    """
    self._instances, self._requests = instances, requests
    self._counters, self._clock = counters, clock
    self.tasks: dict[int, CopyTask] = {}
    # When copies ended, by (target, key of the last block).
    self._ended: dict[tuple[str, str], float] = {}

  def in_flight(self) -> list[CopyTask]:
    """The copies, each once."""
    return list({id(copy): copy for copy in self.tasks.values()}.values())

  def sending(self) -> collections.Counter[str]:
    """Tokens that targets will pull, by the name of the source."""
    tokens_by_source = collections.Counter[str]()
    for copy in self.in_flight():
      if not copy.pulled:
        tokens_by_source[copy.source.name] += copy.prompt.size - 1
    return tokens_by_source

  def end_at(self, instance: ClusterInstance) -> None:
    """End the copies from or to an instance that is gone."""
    for copy in self.in_flight():
      if instance in (copy.source, copy.target):
        self.end(copy)

  def begin(self, state: RoutedState, wanted: PrefixCopy) -> None:
    """Let an instance pull a request's prefix, unless a copy is in flight."""
    source, target = (
      self._instances.named(name) for name in (wanted.source, wanted.target)
    )
    keys, request = state.block_keys(source.page), state.handle.request
    count = min(int(wanted.tokens) // source.page, len(keys))
    moves = source.moves_pages and target.moves_pages
    if source is target or not moves or not count or not request.share:
      return
    size = count * source.page
    wanted_by, now_s = (target.name, keys[count - 1]), self._clock()
    ended = self._ended.get(wanted_by, -math.inf)
    under_way = any(
      (copy.target.name, copy.key) == wanted_by for copy in self.tasks.values()
    )
    room = target.view().free_tokens >= size + 2
    if under_way or now_s - ended < _COPIED_S or not room:
      return
    # Any token may follow the prefix: a prompt's last token is always computed.
    prompt = np.append(state.prompt[:size], np.int32(0)).astype(np.int32)
    copy = CopyTask(
      source=source,
      target=target,
      request=Request(
        prompt=prompt,
        max_new_tokens=1,
        salt=request.salt,
        adapter=request.adapter,
        priority=request.priority,
      ),
      prompt=prompt,
      key=keys[count - 1],
      offer=self._requests.new_task(),
    )
    self.tasks[copy.offer] = copy
    source.link.tell(
      "offer", id=copy.offer, request=request_fields(copy.request, prompt)
    )

  def hear(self, copy: CopyTask, kind: str, fields: dict[str, Any]) -> None:
    """Handle a message from the source or the target of a copy."""
    if kind == "read" and fields["id"] == copy.offer:
      tickets = ticket_list(fields["ticket"])
      if not tickets or copy.target.leaving:
        self.end(copy)
        return
      target, size = copy.target, copy.prompt.size
      copy.task = self._requests.new_task()
      self.tasks[copy.task] = copy
      target.sent += 1
      queued = QueuedPrompts.of(size, size - 1)
      target.since.append(SentTask(target.sent, queued, size, 1))
      target.link.tell(
        "read",
        id=copy.task,
        request=request_fields(copy.request, copy.prompt),
        tickets=tickets,
        stream=0,
        address=copy.source.address,
      )
    elif kind == "pulled":
      nbytes = int(fields["nbytes"])
      self._counters.copied += nbytes > 0
      self._counters.copied_bytes += nbytes
      copy.pulled = True
      copy.source.link.tell("cancel", id=copy.offer)
      if not nbytes:
        # The target would compute a prefix that no request needs.
        self.end(copy)
    elif kind in ("read", "lost", "failed"):
      self.end(copy)
    else:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def end(self, copy: CopyTask) -> None:
    """Cancel a copy's tasks and record when it ended."""
    time_s = self._clock()
    self._ended = {
      ended_copy: ended
      for ended_copy, ended in self._ended.items()
      if time_s - ended < _COPIED_S
    }
    self._ended[copy.target.name, copy.key] = time_s
    for task, instance in ((copy.offer, copy.source), (copy.task, copy.target)):
      if self.tasks.pop(task, None) is not None:
        instance.link.tell("cancel", id=task)

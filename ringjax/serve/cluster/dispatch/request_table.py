"""Requests in flight, and the tasks that instances do for them.

Guarantees: a task's number is used once; a request that ends, or lets go of an
instance, cancels its tasks there, and later messages about them are ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringjax.checks import integer
from ringjax.serve.cluster.dispatch.counters import RouterCounters
from ringjax.serve.cluster.dispatch.instances import (
  ClusterInstance,
  InstanceTable,
  SentTask,
)
from ringjax.serve.cluster.dispatch.request_state import RoutedState
from ringjax.serve.cluster.routing import Rejected, RoutedRequest
from ringjax.serve.cluster.times.phase_times import QueuedPrompts
from ringjax.serve.request import Answer, Handle, RejectedError, TokenLogprobs
from ringjax.serve.request_fields import request_fields


class RequestTable:
  """Requests in flight; its user holds the router's lock.

  Attributes:
    states: State of each request, oldest first.
    tasks: Requests by the numbers of their tasks.
  """

  def __init__(
    self,
    work: threading.Condition,
    instances: InstanceTable,
    counters: RouterCounters,
    *,
    stream_tokens: int,
    clock: Callable[[], float],
  ):
    """Begin without requests.

    Args:
      work: Lock of the router, notified when a request changes.
      instances: Instances of the cluster.
      counters: Counters of the router.
      stream_tokens: Number of prefilled tokens after which pages are published.
      clock: Returns seconds.
    """
    self._work, self._instances = work, instances
    self._counters, self._clock = counters, clock
    self._stream = stream_tokens
    self.states: dict[Handle, RoutedState] = {}
    self.tasks: dict[int, RoutedState] = {}
    self._numbers, self._task_numbers = itertools.count(), itertools.count()

  def add(self, handle: Handle, prompt: np.ndarray) -> RoutedState:
    """Add a request.

    Args:
      handle: Handle that the client gets.
      prompt: Token ids, int32 [n].
    """
    request = handle.request
    for answer, begun in zip(handle.answers, request.begun, strict=False):
      answer.tokens.extend(begun)
    state = RoutedState(
      RoutedRequest(
        number=next(self._numbers),
        arrival_s=handle.arrival,
        prompt_tokens=prompt.size,
        new_tokens=request.max_new_tokens * request.rows,
      ),
      handle,
      prompt,
    )
    self._counters.requests += 1
    self.states[handle] = state
    return state

  def new_task(self) -> int:
    """The next task number."""
    return next(self._task_numbers)

  def cached(self, state: RoutedState) -> Callable[[str], int]:
    """Function from an instance's name to its cached tokens of a prompt."""
    request, blocks_by_page = state.handle.request, dict[int, dict[str, int]]()

    def tokens(name: str) -> int:
      instance = self._instances.alive.get(name)
      if instance is None or not request.share:
        return 0
      page = instance.page
      if page not in blocks_by_page:
        blocks_by_page[page] = self._instances.blocks.match(
          state.block_keys(page)
        )
      # The last token is always computed.
      return min(
        page * blocks_by_page[page].get(name, 0), state.prompt.size - 1
      )

    return tokens

  def offer(self, instance: ClusterInstance, state: RoutedState) -> int:
    """Let an instance publish its pages of a prompt; return the task number."""
    task = self.new_task()
    self.tasks[task] = state
    fields = request_fields(state.handle.request, state.prompt)
    instance.link.tell("offer", id=task, request=fields)
    return task

  def drop_source(self, state: RoutedState) -> None:
    """Cancel the task of the instance that offers a prefix."""
    self.tasks.pop(state.fetch_task, None)
    if state.source is not None:
      state.source.link.tell("cancel", id=state.fetch_task)
    state.source, state.fetch_task = None, -1

  def send(
    self, instance: ClusterInstance, state: RoutedState, *, reads: bool
  ) -> int:
    """Send a task to an instance; return the task number."""
    task = self.new_task()
    request = state.handle.request
    if not reads:
      if request.beams is None and request.best_of is None:
        begun = tuple(_begun(state.handle))
        request = dataclasses.replace(request, begun=begun)
        state.totals = [x.total_logprob for x in state.handle.answers]
      else:
        for answer in state.handle.answers:
          # A search begins again from the prompt.
          answer.tokens.clear()
          answer.logprobs.clear()
          answer.text, answer.finish, answer.total_logprob = "", None, 0.0
        state.totals = [0.0] * len(state.handle.answers)
    fields: dict[str, Any] = {
      "t": "read" if reads else "answer",
      "id": task,
      "request": request_fields(request, state.prompt),
    }
    owner = state.source if reads else state.reader
    # A copy: it is sent later, and tickets may be added meanwhile.
    fields["tickets"] = list(state.tickets)
    if reads:
      fields["stream"] = self._stream if request.share else 0
    else:
      fields["more"] = state.prefill_continues
    fields["address"] = owner and owner.address
    self.tasks[task] = state
    instance.sent += 1
    new = 1 if reads else state.routed.new_tokens
    size, queued = state.routed.prompt_tokens, None
    reads = reads or state.decoder_prefills
    state.expected = self.cached(state)(instance.name)
    if state.tickets:
      moved = state.fetch_tokens if reads else size
      state.expected = max(state.expected, moved)
    if reads:
      queued = QueuedPrompts.of(size, state.expected)
    instance.since.append(SentTask(instance.sent, queued, size, new))
    instance.link.tell(fields.pop("t"), **fields)
    return task

  def release_reader(self, state: RoutedState) -> None:
    """Cancel the tasks of the prefill instance and of the prefix source."""
    self.drop_source(state)
    self.tasks.pop(state.read_task, None)
    if state.reader is not None and state.read_task >= 0:
      state.reader.link.tell("cancel", id=state.read_task)
    state.reader, state.tickets, state.prefill_continues = None, [], False
    state.read_task = -1

  def release_decoder(self, state: RoutedState) -> None:
    """Cancel the task of the decode instance."""
    if state.decoder is not None and state.task >= 0:
      state.decoder.link.tell("cancel", id=state.task)
    self.tasks.pop(state.task, None)
    state.task, state.decoder = -1, None

  def reject(self, state: RoutedState, why: Rejected) -> None:
    """End a request that the policy rejects."""
    self._counters.rejected += 1
    self.finish(state, "error", RejectedError(why.reason))

  def finish(
    self, state: RoutedState, why: str, error: Exception | None = None
  ) -> None:
    """End a request before its answers are complete."""
    if state.decoder is not None and state.task >= 0:
      state.decoder.link.tell("cancel", id=state.task)
    for answer in state.handle.answers:
      if answer.finish is None:
        answer.finish, answer.error = why, error
        self._changed(state, answer)
    self._counters.failed += error is not None
    self._end(state)

  def _end(self, state: RoutedState) -> None:
    """Remove a finished request."""
    self.release_reader(state)
    self.tasks.pop(state.task, None)
    state.handle.seconds = self._clock() - state.handle.arrival
    if self.states.pop(state.handle, None) is not None:
      self._counters.finished += 1
    self._work.notify_all()

  def _changed(self, state: RoutedState, answer: Answer) -> None:
    if state.handle.on_change is not None:
      state.handle.on_change(answer)

  def add_tokens(self, state: RoutedState, fields: dict[str, Any]) -> None:
    """Append newly decoded tokens to an answer; the last ones end it."""
    handle = state.handle
    answer = handle.answers[integer("n", fields["n"], least=0)]
    if answer.finish is not None:
      return  # Its last token was decoded again only for the other answers.
    at, tokens = int(fields["at"]), [int(x) for x in fields["tokens"]]
    if at != len(answer.tokens):
      raise ValueError(f"tokens from {at} after {len(answer.tokens)}")
    if tokens and handle.first_token is None:
      handle.first_token = self._clock() - handle.arrival
    self._counters.new_tokens += len(tokens)
    # The decode instance reports what it found cached.
    cached_tokens = fields["cached"] if state.cached is None else state.cached
    handle.cached_tokens = int(cached_tokens)
    if handle.request.logprobs is not None:
      for token, logprob, top in fields["logprobs"]:
        logprob = _logprob(logprob)
        answer.total_logprob += logprob
        pairs = tuple((int(i), _logprob(x)) for i, x in top)
        answer.logprobs.append(
          TokenLogprobs(token=int(token), logprob=logprob, top=pairs)
        )
    else:
      n = handle.answers.index(answer)
      answer.total_logprob = state.totals[n] + _logprob(fields["total"])
    # Other threads read an answer while it grows: `finish` comes last.
    answer.tokens.extend(tokens)
    answer.text = answer.text[: int(fields["text_at"])] + str(fields["text"])
    answer.stopped = fields["stopped"]
    answer.finish = fields["finish"]
    self._changed(state, answer)
    if handle.done:
      state.decoder = None
      self._end(state)
    else:
      self._work.notify_all()


def ticket_list(ticket: str | None) -> list[str]:
  """The tickets of a message, which has one or none."""
  return [] if ticket is None else [str(ticket)]


def _begun(handle: Handle) -> Iterator[tuple[int, ...]]:
  """Yield the known tokens of each answer to continue from.

  A finished answer omits its last token, which is decoded again.
  """
  for answer in handle.answers:
    tokens = answer.tokens[:-1] if answer.finish else answer.tokens
    yield tuple(tokens)


def _logprob(stated: int | float | None) -> float:
  """Log-probability from a message; None means -inf, which JSON lacks."""
  return -math.inf if stated is None else float(stated)

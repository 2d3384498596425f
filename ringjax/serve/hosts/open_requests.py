"""Requests of a group's clients, whose answers grow with the engine's.

Guarantees: an answer that has ended does not change; once the group has failed,
all that are open end with its failure, also while the engine hangs in a call.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from ringjax.serve.request import Answer, Answers, Handle, Request


@dataclasses.dataclass(eq=False, kw_only=True)
class OpenRequest:
  """A request of a client.

  Attributes:
    number: Number of the request in the group.
    handle: Handle of the client.
    engine_handle: Handle of the engine's request, once it has one.
  """

  number: int
  handle: Handle
  engine_handle: Handle | None = None


class OpenRequests:
  """Requests that have not ended, and their answers.

  Attributes:
    failure: Error with which all requests have ended, or None.
    changed: Condition that is notified of each change.
  """

  def __init__(self) -> None:
    self.failure: Exception | None = None
    self.changed = threading.Condition(threading.RLock())
    self._open: dict[Handle, OpenRequest] = {}
    self._count = 0

  def __len__(self) -> int:
    return len(self._open)

  def add(
    self,
    source: Answers,
    request: Request,
    arrival: float,
    on_change: Callable[[Answer], None] | None,
  ) -> OpenRequest:
    """Adds a request of a client.

    Args:
      source: Source of the answers, which the handle advances and cancels.
      request: Request of the client.
      arrival: Time of its arrival in seconds.
      on_change: Called with an answer when it has changed.
    """
    with self.changed:
      self._count += 1
      handle = Handle(source, request, arrival, on_change)
      entry = OpenRequest(number=self._count, handle=handle)
      self._open[handle] = entry
      return entry

  def entry(self, handle: Handle) -> OpenRequest | None:
    """Open request of a handle, or None if it has ended."""
    return self._open.get(handle)

  def overdue(self, current_time: float) -> list[OpenRequest]:
    """Requests whose deadline has passed."""
    with self.changed:
      return [
        entry
        for entry in self._open.values()
        if (deadline := entry.handle.request.deadline) is not None
        and current_time - entry.handle.arrival > deadline
      ]

  def drop(self, entry: OpenRequest) -> None:
    """Removes a request that the engine has refused."""
    with self.changed:
      self._open.pop(entry.handle, None)

  def accept(self, entry: OpenRequest, engine_handle: Handle) -> None:
    """Links a request to that of the engine."""
    with self.changed:
      entry.engine_handle = engine_handle
      for answer, source in zip(
        entry.handle.answers, engine_handle.answers, strict=True
      ):
        _extend(answer, source)

  def update(self, entry: OpenRequest, source: Answer) -> None:
    """Copies what is new in an answer of the engine to the client's."""
    with self.changed:
      handle, engine_handle = entry.handle, entry.engine_handle
      if engine_handle is None or entry.handle not in self._open:
        return
      at = [answer is source for answer in engine_handle.answers].index(True)
      answer = handle.answers[at]
      _extend(answer, source)
      for name in ("cached_tokens", "kept_tokens", "preemptions"):
        setattr(handle, name, getattr(engine_handle, name))
      handle.first_token = engine_handle.first_token
      handle.seconds = engine_handle.seconds
      if handle.done:
        del self._open[handle]
      if handle.on_change is not None:
        handle.on_change(answer)
      self.changed.notify_all()

  def fail(self, error: Exception) -> bool:
    """Ends all open requests with an error; whether it is the first one."""
    with self.changed:
      if self.failure is not None:
        return False
      self.failure = error
      for handle in self._open:
        for answer in handle.answers:
          if answer.finish is None:
            answer.error, answer.finish = error, "error"
            if handle.on_change is not None:
              handle.on_change(answer)
      self._open.clear()
      self.changed.notify_all()
    return True


def _extend(answer: Answer, source: Answer) -> None:
  """Copies what is new in an answer to another one."""
  answer.tokens.extend(source.tokens[len(answer.tokens) :])
  answer.logprobs.extend(source.logprobs[len(answer.logprobs) :])
  answer.text = source.text
  answer.total_logprob, answer.stopped = source.total_logprob, source.stopped
  answer.error = source.error
  # Last: an answer that has ended is complete.
  answer.finish = source.finish

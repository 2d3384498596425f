"""Texts that instances of a cluster score or embed for its router.

Guarantees: a pass of texts is computed by one instance that has a whole model;
if that one is lost, by another, at most `attempts` times; the wait ends with an
error once there was no such instance for `patience_s`.
Cost: the thread that asks waits; no thread of the router's.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np
from jaxtyping import Shaped

from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.parallel.links.array_messages import ArrayMessage
from ringjax.serve.cluster.dispatch.instances import (
  ClusterInstance,
  InstanceTable,
)
from ringjax.serve.text_requests import TextPass

# Seconds between two looks at the clock and at the instances.
_LOOK_S = 0.2


@dataclasses.dataclass(eq=False, kw_only=True)
class TextTask:
  """A pass of texts that a thread waits for.

  Attributes:
    text_pass: Texts to read.
    instance: Instance that reads them, or None.
    attempts: Number of instances that were lost with it.
    values: Numbers of each text, once they have come.
    error: Error of the instance, or None.
  """

  text_pass: TextPass
  instance: ClusterInstance | None = None
  attempts: int = 0
  values: list[np.ndarray] | None = None
  error: Exception | None = None


class TextTasks:
  """Passes of texts at instances.

  Attributes:
    tasks: Passes by the numbers of their tasks.
  """

  def __init__(
    self,
    work: threading.Condition,
    instances: InstanceTable,
    *,
    new_task: Callable[[], int],
    attempts: int,
    patience_s: float,
    closed: Callable[[], bool],
    clock: Callable[[], float],
  ):
    """Begin without texts.

    Args:
      work: Lock of the router, notified when something changes.
      instances: Instances of the cluster.
      new_task: Returns the next task number.
      attempts: Number of instances that may be lost with a pass.
      patience_s: Seconds for which a pass waits for an instance that can read.
      closed: Returns whether the router was closed.
      clock: Returns seconds.
    """
    self._work, self._instances = work, instances
    self._new_task, self._attempts = new_task, attempts
    self._patience_s, self._closed = patience_s, closed
    self._clock = clock
    self.tasks: dict[int, TextTask] = {}

  def read(self, text_pass: TextPass) -> list[Shaped[np.ndarray, ...]]:
    """Have an instance compute a pass, and wait for its numbers.

    Raises:
      OptionError: If the instance refuses the texts, or the router is closed.
      PeerError: If no instance reads them.
      RingjaxError: If the instance failed to read them.
    """
    with self._work:
      number, task = self._new_task(), TextTask(text_pass=text_pass)
      self.tasks[number] = task
      try:
        return self._await(number, task)
      finally:
        del self.tasks[number]

  def _await(
    self, number: int, task: TextTask
  ) -> list[Shaped[np.ndarray, ...]]:
    alone_since: float | None = None
    while True:
      if task.values is not None:
        return task.values
      if task.error is not None:
        raise task.error
      if self._closed():
        raise OptionError(
          "router", "a closed one", "one that is open", "make another one"
        )
      if task.instance not in self._instances:
        self._send(number, task)
        if task.instance is not None:
          alone_since = None
        elif alone_since is None:
          alone_since = self._clock()
        elif self._clock() - alone_since > self._patience_s:
          raise PeerError(
            "no instance that scores or embeds texts for "
            f"{self._patience_s:g} s"
          )
      self._work.wait(_LOOK_S)

  def _send(self, number: int, task: TextTask) -> None:
    """Send a pass to the instance with the fewest tokens to compute."""
    if task.instance is not None:
      task.attempts += 1
      if task.attempts >= self._attempts:
        raise PeerError(
          f"{task.attempts} instances were lost with a text, the last one "
          f"{task.instance.name}"
        )
    task.instance = None
    able = [
      instance
      for instance in self._instances.alive.values()
      if instance.reads_texts and not instance.leaving
    ]
    if not able:
      return
    task.instance = min(able, key=lambda x: (self._tokens(x), x.name))
    fields = task.text_pass.fields()
    task.instance.link.tell("texts", id=number, texts=fields)

  def _tokens(self, instance: ClusterInstance) -> int:
    """Tokens that an instance has to compute before another text."""
    view = instance.view()
    texts = sum(
      task.text_pass.tokens
      for task in self.tasks.values()
      if task.instance is instance
    )
    return view.queued_tokens + view.running_requests + texts

  def hear(self, instance: ClusterInstance, message: ArrayMessage) -> None:
    """Handle a message of an instance about a pass; others are ignored.

    Raises:
      KeyError, TypeError, ValueError: If it is malformed.
    """
    task = self.tasks.get(message.fields["id"])
    if task is None or task.instance is not instance:
      return
    if message.kind == "failed":
      error = OptionError if message.fields["refused"] else RingjaxError
      task.error = error(str(message.fields["error"])[:400])
    else:
      (values,) = message.arrays
      task.values = task.text_pass.split(values)
    self._work.notify_all()

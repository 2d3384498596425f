"""Agreement between the processes of a training about its checkpoints.

Guarantees: a failure of one process is known to all, and all raise for the
same reason. No collective is used: a checkpoint is written beside training,
whose collectives have an order of their own. A single process sends nothing.
Cost: a few small messages through the coordinator of `jax.distributed`, whose
own timeout ends the wait for a process that does not answer.

Written by hand: Orbax' processes meet at barriers, where those that are well
wait for one that failed until the timeout, and do not learn its reason.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax._src import distributed  # The key-value store has no public name.

from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  OptionError,
  PeerError,
)
from ringjax.train import manifest as manifests

_GROUPS = itertools.count()
# Errors that all processes raise as the class that one of them raised.
_SHARED = {
  cls.__name__: cls
  for cls in (CheckpointCorruptError, CheckpointFormatError, OptionError)
}

T = TypeVar("T")


class ProcessGroup:
  """The processes of `jax.distributed`, which exchange JSON values.

  Attributes:
    rank: this process's number.
    size: how many there are.
    timeout_s: how long one waits for another.
    numbers: counts, the same in all processes.
  """

  def __init__(self, timeout_s: int):
    self.rank, self.size = jax.process_index(), jax.process_count()
    self.timeout_s = timeout_s
    self.numbers = itertools.count()
    self._group = next(_GROUPS)
    self._calls = itertools.count()
    state: Any = distributed.global_state
    self._client = state.client

  def options(self) -> Any:
    """Orbax' options of several processes."""
    return ocp.options.MultiprocessingOptions(
      primary_host=0,
      # Named, they meet in the key-value store; else in a collective, which
      # would come in between those of training.
      active_processes=set(range(self.size)),
      barrier_sync_key_prefix=f"ringjax{self._group}_{next(self.numbers)}",
    )

  def share(self, items: Sequence[Any]) -> list[Any]:
    """Those of the items that this process works on."""
    return list(items)[self.rank :: self.size]

  def first(self, call: Callable[[], T], step: int | None = None) -> T:
    """Process 0 calls, and all get what it returned; otherwise as `all`."""
    return self.all(call if self.rank == 0 else lambda: None, step)[0]  # pyrefly: ignore

  def all(self, call: Callable[[], T], step: int | None = None) -> list[T]:
    """Calls in every process, and returns what each returned, as JSON.

    Args:
      call: the function.
      step: of the checkpoint, which errors name.

    Raises:
      Exception: what the first process that failed raised; of the same class
        if all can know it.
    """
    if self.size == 1:
      return [call()]
    answer: dict[str, Any] = {}
    own: Exception | None = None
    try:
      answer["value"] = call()
    except Exception as error:
      own = error
      answer["error"] = str(error)[:300]
      answer["kind"] = type(error).__name__
      answer["file"] = getattr(error, "file", None)
    answers = self._gather(manifests.canonical(answer).decode())
    for rank, one in enumerate(answers):
      if "error" not in one:
        continue
      # All raise for the first reason, so that all continue in the same way.
      if rank == self.rank and own is not None:
        raise own
      cls = _SHARED.get(one["kind"])
      if cls is CheckpointCorruptError:
        raise cls(one["error"], file=one["file"], step=step)
      if cls is not None:
        raise cls(one["error"])
      raise PeerError(f"rank {rank}: {one['kind']}: {one['error']}", rank=rank)
    return [one["value"] for one in answers]

  def same(self, what: str, value: object) -> None:
    """Checks that all processes pass the same value.

    Raises:
      PeerError: they do not.
    """
    marks = self.all(lambda: manifests.fingerprint(value))
    for rank, mark in enumerate(marks):
      if mark != marks[0]:
        raise PeerError(
          what,
          f"something else on rank {rank} than on rank 0",
          "the same on all",
          "give all processes the same arguments",
          rank=rank,
        )

  def _gather(self, text: str) -> list[Any]:
    """The JSON values of all processes, in the order of their ranks."""
    call = next(self._calls)
    key = lambda n, r: f"ringjax/checkpoints/{self._group}/{n}/{r}"
    self._client.key_value_set(key(call, self.rank), text)
    found = []
    for rank in range(self.size):
      try:
        found.append(
          json.loads(
            self._client.blocking_key_value_get(
              key(call, rank), 1000 * self.timeout_s
            )
          )
        )
      except jax.errors.JaxRuntimeError as error:
        raise PeerError(
          f"rank {rank}",
          f"no answer about a checkpoint ({str(error)[:120]})",
          f"one within {self.timeout_s} s",
          "look at that process's log, or raise timeout_s",
          rank=rank,
        ) from None
    if call:
      # All have come to this call, so all have read the one before.
      self._client.key_value_delete(key(call - 1, self.rank))
    return found

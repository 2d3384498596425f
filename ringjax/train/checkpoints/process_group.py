"""Agreement between the processes of a training about its checkpoints.

Guarantees: all processes learn of a failure of one, and all raise for the
same reason. No collective is used: a checkpoint is written during training,
whose collectives have their own order. A single process sends nothing.
Cost: a few small messages through the coordinator of `jax.distributed`, whose
timeout ends the wait for a process that does not answer.

Orbax is not used for this: its processes meet at barriers, where those that
are well wait for one that failed until the timeout, and do not learn its
reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  OptionError,
  PeerError,
)
from ringjax.parallel import joint_outcome
from ringjax.train.checkpoints import manifest as manifests

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
    rank: Number of this process.
    size: Number of processes.
    timeout_s: Seconds that a process waits for another.
    numbers: Counter with the same values in all processes.
  """

  def __init__(self, timeout_s: int):
    self.rank, self.size = jax.process_index(), jax.process_count()
    self.timeout_s = timeout_s
    self.numbers = itertools.count()
    self._group = next(_GROUPS)

  def options(self) -> ocp.options.MultiprocessingOptions:
    """Orbax' options for several processes."""
    return ocp.options.MultiprocessingOptions(
      primary_host=0,
      # With a prefix they meet in the key-value store; else in a collective,
      # which would come in between those of training.
      active_processes=set(range(self.size)),
      barrier_sync_key_prefix=f"ringjax{self._group}_{next(self.numbers)}",
    )

  def share(self, items: Sequence[Any]) -> list[Any]:
    """The items that this process works on."""
    return list(items)[self.rank :: self.size]

  def first(self, call: Callable[[], T], step: int | None = None) -> T:
    """Process 0 calls, and all get its result; otherwise as `all`."""
    return self.all(call if self.rank == 0 else lambda: None, step)[0]  # pyrefly: ignore

  def all(self, call: Callable[[], T], step: int | None = None) -> list[T]:
    """Calls in every process, and returns all results, as JSON.

    Args:
      call: Function to call.
      step: Step of the checkpoint, for errors.

    Raises:
      Exception: The error of the first process that failed; of the same class
        if that class is known to all.
    """
    if self.size == 1:
      return [call()]
    answer: dict[str, Any] = {}
    own_error: Exception | None = None
    try:
      answer["value"] = call()
    except Exception as error:
      own_error = error
      answer["error"] = str(error)[:300]
      answer["kind"] = type(error).__name__
      answer["file"] = getattr(error, "file", None)
    answers = self._gather(answer)
    for rank, answer_of_rank in enumerate(answers):
      if "error" not in answer_of_rank:
        continue
      # All raise for the first reason, so that all continue in the same way.
      if rank == self.rank and own_error is not None:
        raise own_error
      cls = _SHARED.get(answer_of_rank["kind"])
      if cls is CheckpointCorruptError:
        raise cls(
          answer_of_rank["error"], file=answer_of_rank["file"], step=step
        )
      if cls is not None:
        raise cls(answer_of_rank["error"])
      raise PeerError(
        f"rank {rank}: {answer_of_rank['kind']}: {answer_of_rank['error']}",
        rank=rank,
      )
    return [answer_of_rank["value"] for answer_of_rank in answers]

  def check_equal(self, what: str, value: object) -> None:
    """Checks that all processes pass the same value.

    Raises:
      PeerError: If they do not.
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

  def _gather(self, value: object) -> list[Any]:
    """JSON values of all processes, in the order of their ranks."""
    try:
      return joint_outcome.exchanged(
        value,
        tuple(range(self.size)),
        channel=f"checkpoints{self._group}",
        timeout_s=self.timeout_s,
      )
    except PeerError as error:
      raise PeerError(f"{error}, or raise timeout_s", rank=error.rank) from None

"""Agreement between the processes of a training about its checkpoints.

Guarantees: what one process could not do, all know, and all raise for the same
reason. Nothing is a collective, since these belong to training's own order
and a checkpoint is written beside it. One process asks nobody.
Cost: a few small messages through the coordinator of `jax.distributed`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
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

T = TypeVar("T")


class ProcessGroup:
  """What the processes of `jax.distributed` tell each other.

  Without collectives, since these belong to training's own order.
  """

  def __init__(self, timeout_s: int):
    self.rank, self.size = jax.process_index(), jax.process_count()
    self.timeout_s = timeout_s
    self.group = next(_GROUPS)
    self.numbers = itertools.count()
    self._calls = itertools.count()
    state: Any = distributed.global_state
    self._client = state.client

  def options(self) -> Any:
    """How Orbax's parts meet."""
    return ocp.options.MultiprocessingOptions(
      primary_host=0,
      # Named, they meet in the key-value store; else in a collective, which
      # would come in between those of training.
      active_processes=set(range(self.size)),
      barrier_sync_key_prefix=f"ringjax{self.group}_{next(self.numbers)}",
    )

  def share(self, items: Any) -> list[Any]:
    """Those that are this process's to do."""
    return list(items)[self.rank :: self.size]

  def all(self, call: Callable[[], T], step: int | None = None) -> list[T]:
    """Has every process call, and returns what they gave; JSON, or one alone.

    Raises:
      Exception: what the first of them raised that failed; of its kind, if it
        is an error of ringjax.
    """
    if self.size == 1:
      return [call()]
    said: dict[str, Any] = {}
    own: Exception | None = None
    try:
      said["value"] = call()
    except Exception as error:
      own = error
      said["error"] = str(error)[:300]
      said["kind"] = type(error).__name__
      said["file"] = getattr(error, "file", None)
    found = self._gather(said)
    for rank, one in enumerate(found):
      if "error" in one:
        # All raise for the same reason, so that all go on in the same way.
        if rank == self.rank and own is not None:
          raise own
        if one["kind"] == "CheckpointCorruptError":
          raise CheckpointCorruptError(
            one["error"], file=one["file"], step=step
          )
        for kind in (CheckpointFormatError, OptionError):
          if one["kind"] == kind.__name__:
            raise kind(one["error"])
        raise PeerError(
          f"rank {rank}: {one['kind']}: {one['error']}", rank=rank
        )
    return [one["value"] for one in found]

  def same(self, what: str, value: Any) -> None:
    """Refuses if the processes do not mean the same.

    Raises:
      PeerError: they do not.
    """
    if self.size == 1:
      return
    marks = self._gather(manifests.fingerprint(value))
    for rank, mark in enumerate(marks):
      if mark != marks[0]:
        raise PeerError(
          what,
          f"something else on rank {rank} than on rank 0",
          "the same on all",
          "give all processes the same arguments",
          rank=rank,
        )

  def _gather(self, value: Any) -> list[Any]:
    call = next(self._calls)
    key = lambda n, r: f"ringjax/checkpoints/{self.group}/{n}/{r}"
    self._client.key_value_set(
      key(call, self.rank), manifests.canonical(value).decode()
    )
    found = []
    for rank in range(self.size):
      try:
        text = self._client.blocking_key_value_get(
          key(call, rank), 1000 * self.timeout_s
        )
      except jax.errors.JaxRuntimeError as error:
        raise PeerError(
          f"rank {rank} did not come to a checkpoint within "
          f"{self.timeout_s} s: {str(error)[:120]}",
          rank,
        ) from None
      found.append(json.loads(text))
    if call:
      # All have come to this call, so all have read the one before.
      self._client.key_value_delete(key(call - 1, self.rank))
    return found

"""The outcome of what several processes do is the same in all of them.

Guarantees: an error of one process is raised in all, which then go on in the
same way; a process that does not answer is named when the wait for it ends.
Cost: a few small messages through the coordinator of `jax.distributed`; no
collective, as one process may fail while others are in a program. Processes
that work alone send nothing.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # The key-value store has no public name.
from jax.sharding import Mesh

from ringjax import errors
from ringjax.errors import PeerError
from ringjax.json_text import json_text

# How long one waits for another: for its program, and what it compiles.
TIMEOUT_S = 600
# Calls of the same processes are told apart by their numbers.
_CALLS: collections.defaultdict[tuple[int, ...], Iterator[int]] = (
  collections.defaultdict(itertools.count)
)
# Errors that all raise as the class that one of them raised.
_CLASSES = {
  cls.__name__: cls
  for cls in (
    errors.CheckpointFormatError,
    errors.CheckpointMismatchError,
    errors.ConfigError,
    errors.MemoryEstimateError,
    errors.OptionError,
  )
}
# The attribute of an error that was raised behind an exchange: the others
# know of it, or have not answered.
_TOLD = "_ringjax_told"


def processes_of(mesh: Mesh | None) -> tuple[int, ...]:
  """The processes whose devices a mesh has; () for this one alone."""
  if mesh is None:
    return ()
  ranks = {device.process_index for device in mesh.devices.flat}
  return () if len(ranks) == 1 else tuple(sorted(ranks))


def exchanged(value: object, ranks: tuple[int, ...]) -> list[Any]:
  """The JSON values of some processes, all of which call this in one order.

  Args:
    value: of this process.
    ranks: the processes, by `processes_of`.

  Raises:
    PeerError: one of them does not answer.
  """
  if not ranks:
    return [value]
  state: Any = distributed.global_state
  client, call = state.client, next(_CALLS[ranks])
  among = "_".join(map(str, ranks))
  key = lambda n, rank: f"ringjax/outcome/{among}/{n}/{rank}"
  me = jax.process_index()
  client.key_value_set(key(call, me), json_text(value))
  found = []
  for rank in ranks:
    try:
      text = client.blocking_key_value_get(key(call, rank), 1000 * TIMEOUT_S)
    except jax.errors.JaxRuntimeError as error:
      raise PeerError(
        f"process {rank}",
        f"no answer ({str(error)[:120]})",
        f"one within {TIMEOUT_S} s",
        "look at that process's log",
        rank=rank,
      ) from None
    found.append(json.loads(text))
  if call:
    # All have come to this call, so all have read the one before.
    client.key_value_delete(key(call - 1, me))
  return found


def raise_first(error: Exception | None, ranks: tuple[int, ...]) -> None:
  """Raises the error of this process, or else that of the first that has one.

  Args:
    error: of this process, or None.
    ranks: see `exchanged`.

  Raises:
    RingjaxError: of the class of the other process's error, if that is one of
      a file, an option or a memory; else a `PeerError`. One that does not
      answer is one only where this process has no error of its own.
  """
  if not ranks:
    if error is not None:
      raise error
    return
  mine = None
  if error is not None:
    mine = {"kind": type(error).__name__, "text": str(error)[:300]}
  try:
    told = exchanged(mine, ranks)
  except PeerError as silence:
    if error is None:
      raise _told(silence) from None
    raise _told(error) from error.__cause__ or silence
  if error is not None:
    raise _told(error)
  for rank, other in zip(ranks, told, strict=True):
    if other is None:
      continue
    text = f"process {rank}: {other['text']}"
    if other["kind"] in _CLASSES:
      raise _told(_CLASSES[other["kind"]](text))
    raise _told(PeerError(f"{text} ({other['kind']})", rank=rank))


def _told(error: Exception) -> Exception:
  setattr(error, _TOLD, True)
  return error


def is_told(error: Exception) -> bool:
  """Whether `raise_first` raised it: it is not to be exchanged once more."""
  return getattr(error, _TOLD, False)


@contextlib.contextmanager
def failing_together(ranks: tuple[int, ...]) -> Iterator[None]:
  """Around what each process does by itself: fails in all if it does in one."""
  failure: Exception | None = None
  try:
    yield
  except Exception as error:
    if is_told(error):
      raise
    failure = error
  raise_first(failure, ranks)

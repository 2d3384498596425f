"""Agreement of several processes on the outcome of their work.

Guarantees: an error of one process is raised in all, which then continue in the
same way; a process that does not answer is named when the wait for it ends.
Cost: a few small messages through the coordinator of `jax.distributed`; no
collective, as one process may fail while others are in a program. Processes
that work alone send nothing. There are no heartbeats: the coordinator has its
own.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed  # The key-value store has no public name.
from jax.sharding import Mesh

from ringjax import errors
from ringjax.errors import PeerError
from ringjax.json_text import json_text

# Longest wait for another process, which may run and compile programs.
TIMEOUT_S = 600
# Calls of the same processes on a channel are distinguished by their numbers.
_CALLS: collections.defaultdict[tuple[str, tuple[int, ...]], Iterator[int]] = (
  collections.defaultdict(itertools.count)
)
# Classes of errors that all processes raise if one of them did.
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
# Attribute of an error that was raised after an exchange: the other processes
# know of it, or have not answered.
_TOLD = "_ringjax_told"


def processes_of(mesh: Mesh | None) -> tuple[int, ...]:
  """Ranks of the processes whose devices a mesh has; () for only this one."""
  if mesh is None:
    return ()
  ranks = {device.process_index for device in mesh.devices.flat}
  return () if len(ranks) == 1 else tuple(sorted(ranks))


def exchanged(
  value: object,
  ranks: tuple[int, ...],
  *,
  channel: str = "outcome",
  timeout_s: int | float = TIMEOUT_S,
) -> list[Any]:
  """Exchange JSON values between processes, which all call it in one order.

  Args:
    value: Value of this process.
    ranks: Ranks of the processes, from `processes_of`.
    channel: Name of a sequence of calls, separate from those of other names.
    timeout_s: Seconds to wait for another process.

  Raises:
    PeerError: If one of them does not answer.
  """
  if not ranks:
    return [value]
  state: Any = distributed.global_state
  client, call = state.client, next(_CALLS[channel, ranks])
  group = "_".join(map(str, ranks))
  key = lambda n, rank: f"ringjax/{channel}/{group}/{n}/{rank}"
  timeout_ms = int(1000 * timeout_s)
  rank_here = jax.process_index()
  client.key_value_set(key(call, rank_here), json_text(value))
  values = []
  for rank in ranks:
    try:
      text = client.blocking_key_value_get(key(call, rank), timeout_ms)
    except jax.errors.JaxRuntimeError as error:
      raise PeerError(
        f"process {rank}",
        f"no answer ({str(error)[:120]})",
        f"one within {timeout_s:g} s",
        "look at that process's log",
        rank=rank,
      ) from None
    values.append(json.loads(text))
  if call:
    # All have come to this call, so all have read the values of the last one.
    client.key_value_delete(key(call - 1, rank_here))
  return values


def check_equal(facts: Sequence[Mapping[str, str]]) -> None:
  """Refuses processes with other facts than process 0.

  Args:
    facts: Facts of each process by their names, in the order of ranks.

  Raises:
    OptionError: If a fact differs; the error names it and the process.
  """
  for rank, facts_of_rank in enumerate(facts):
    for name in {**facts[0], **facts_of_rank}:
      first_text, text = facts[0].get(name), facts_of_rank.get(name)
      if text != first_text:
        raise errors.OptionError(
          name,
          f"{text or 'nothing'} in process {rank}",
          f"{first_text or 'nothing'}, as in process 0",
          "start all processes with the same model, options and versions",
        )


def raise_first(error: Exception | None, ranks: tuple[int, ...]) -> None:
  """Raise the error of this process, or else that of the first that has one.

  Args:
    error: Error of this process, or None.
    ranks: Ranks of the processes, as in `exchanged`.

  Raises:
    RingjaxError: Of the class of the other process's error, if that is one of
      a file, an option or a memory; else a `PeerError`. A process that does not
      answer raises one only if this process has no error.
  """
  if not ranks:
    if error is not None:
      raise error
    return
  own_report = None
  if error is not None:
    own_report = {"kind": type(error).__name__, "text": str(error)[:300]}
  try:
    reports = exchanged(own_report, ranks)
  except PeerError as no_answer:
    if error is None:
      raise _mark_told(no_answer) from None
    raise _mark_told(error) from error.__cause__ or no_answer
  if error is not None:
    raise _mark_told(error)
  for rank, report in zip(ranks, reports, strict=True):
    if report is None:
      continue
    text = f"process {rank}: {report['text']}"
    if report["kind"] in _CLASSES:
      raise _mark_told(_CLASSES[report["kind"]](text))
    raise _mark_told(PeerError(f"{text} ({report['kind']})", rank=rank))


def _mark_told(error: Exception) -> Exception:
  setattr(error, _TOLD, True)
  return error


def is_told(error: Exception) -> bool:
  """Whether `raise_first` raised it, so that it is not exchanged again."""
  return getattr(error, _TOLD, False)


@contextlib.contextmanager
def failing_together(ranks: tuple[int, ...]) -> Iterator[None]:
  """Run a block in each process; fail in all if it fails in one."""
  failure: Exception | None = None
  try:
    yield
  except Exception as error:
    if is_told(error):
      raise
    failure = error
  raise_first(failure, ranks)

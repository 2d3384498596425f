"""Rewards of answers by Python functions, computed in parallel.

Guarantees: every answer gets a finite number, or the first function that does
not give one is named by an error, before anything is learned from its batch.
Cost: `workers` calls at a time. Threads share one interpreter: functions that
compute for long in Python need processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import numbers
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, RewardError

RewardFunction = Callable[[str, str, Any], float]
# Seconds between two looks at results of other processes.
_POLL_S = 0.01
# Seconds in which the first process of several starts.
_START_S = 600.0
_LARGEST = float(np.finfo(np.float32).max)


class Judged(NamedTuple):
  """Rewards of some answers.

  Fields:
    rewards: Weighted sums, float32 [n].
    parts: Rewards of each function by its name, float32 [n] each.
  """

  rewards: Float32[np.ndarray, " n"]
  parts: dict[str, Float32[np.ndarray, " n"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
  """Functions that reward answers, and how they are called.

  Attributes:
    functions: Functions (prompt, answer, example) -> float by their names, or
      one function; prompt and answer are texts, the answer the last one of a
      conversation.
    weights: Factor of each function's rewards by its name; default 1 each.
    workers: Number of calls at a time.
    processes: Whether they are in processes, each of which imports the
      functions' modules, and not in threads.
    timeout_s: Seconds without any result after which the running calls are
      given up. Threads can't be ended: they go on until their function
      returns, or the program ends.
  """

  functions: Mapping[str, RewardFunction] | RewardFunction
  weights: Mapping[str, int | float] | None = None
  workers: int = 4
  processes: bool = False
  timeout_s: int | float = 60.0

  def __post_init__(self) -> None:
    functions = self.functions
    if callable(functions):
      functions = {getattr(functions, "__name__", "reward"): functions}
      object.__setattr__(self, "functions", functions)
    if not functions or not all(map(callable, functions.values())):
      raise OptionError(
        "functions",
        f"{dict(functions)}",
        "one or more functions (prompt, answer, example) -> float, by name",
        "pass functions={'exact': exact}, for instance",
      )
    if self.processes:
      for name, function in functions.items():
        _check_importable(name, function)
    positive_int("workers", self.workers)
    number("timeout_s", self.timeout_s, above=0)
    weights = dict(self.weights or {})
    unknown = sorted(set(weights) - set(functions))
    if unknown:
      raise OptionError(
        "weights",
        ", ".join(unknown),
        f"names of functions, {', '.join(functions)}",
        "leave the others out",
      )
    for name, weight in weights.items():
      number(f"weights[{name!r}]", weight)

  @property
  def by_name(self) -> Mapping[str, RewardFunction]:
    """Functions by their names."""
    functions: Any = self.functions
    return functions


class Judge:
  """Calls reward functions; a context that ends its threads or processes."""

  def __init__(self, config: RewardConfig):
    self.config = config
    self._threads: _Threads | None = None
    self._processes: Any = None

  def __enter__(self) -> Judge:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self.close()

  def close(self) -> None:
    """Ends processes; threads end with the calls that they are in."""
    if self._threads is not None:
      self._threads.close()
    if self._processes is not None:
      self._processes.terminate()
      self._processes.join()
    self._threads = self._processes = None

  def rewards(self, answers: Sequence[tuple[str, str, Any]]) -> Judged:
    """Rewards of answers, each a (prompt, answer, example).

    Raises:
      RewardError: If a function raises an error, returns no finite number, or
        takes too long.
    """
    functions = self.config.by_name
    names = [name for _ in answers for name in functions]
    calls = [
      (function, *answer)
      for answer in answers
      for function in functions.values()
    ]
    run = self._in_processes if self.config.processes else self._in_threads
    values = [
      _checked(name, outcome)
      for name, outcome in zip(names, run(names, calls), strict=True)
    ]
    table = np.asarray(values, np.float32).reshape(-1, len(functions))
    weights = self.config.weights or {}
    parts = {name: table[:, n] for n, name in enumerate(functions)}
    total = np.zeros(len(answers), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
      for name, part in parts.items():
        total += np.float32(weights.get(name, 1.0)) * part
    for value in total[~np.isfinite(total)]:
      _checked(", ".join(parts), float(value))
    return Judged(total, parts)

  def _in_threads(
    self, names: Sequence[str], calls: Sequence[tuple[Any, ...]]
  ) -> list[Any]:
    if self._threads is None:
      self._threads = _Threads(self.config.workers)
    futures = [self._threads.submit(call) for call in calls]
    pending = set(futures)
    while pending:
      finished, pending = concurrent.futures.wait(
        pending, self.config.timeout_s, concurrent.futures.FIRST_COMPLETED
      )
      if not finished:
        running = [n for n, f in enumerate(futures) if f.running()]
        # Later calls get new threads.
        self._threads.close()
        self._threads = None
        raise self._late([names[n] for n in running])
    return [future.result() for future in futures]

  def _in_processes(
    self, names: Sequence[str], calls: Sequence[tuple[Any, ...]]
  ) -> list[Any]:
    if self._processes is None:
      # A fork of a process with JAX's threads may hang.
      context = multiprocessing.get_context("spawn")
      functions = pickle.dumps([*self.config.by_name.values()])
      self._processes = context.Pool(self.config.workers, _import, (functions,))
      # Imports of a new process are not of the functions' time, and a process
      # takes calls when it has made them.
      started = self._processes.apply_async(_called, ((float, 0),))
      started.wait(_START_S)
    results = [self._processes.apply_async(_called, (call,)) for call in calls]
    pending, last = set(range(len(results))), time.monotonic()
    while pending:
      ready = {n for n in pending if results[n].ready()}
      pending -= ready
      if ready:
        last = time.monotonic()
      elif time.monotonic() - last > self.config.timeout_s:
        running = sorted(pending)[: self.config.workers]
        self.close()
        raise self._late([names[n] for n in running])
      else:
        results[min(pending)].wait(_POLL_S)
    return [_result(result) for result in results]

  def _late(self, names: Sequence[str]) -> RewardError:
    return RewardError(
      "reward",
      f"no result of {', '.join(dict.fromkeys(names))} for "
      f"{self.config.timeout_s:g} s",
      "a number within timeout_s",
      "pass a larger timeout_s, or give the function a limit of its own",
    )


class _Threads:
  """Threads that call functions, and that a program does not wait for.

  Those of `concurrent.futures` are joined when a program ends: one with a
  function that never returns would not end.
  """

  def __init__(self, count: int):
    self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._count = count
    for _ in range(count):
      thread = threading.Thread(
        target=_work, args=(self._calls,), name="ringjax rewards", daemon=True
      )
      thread.start()

  def submit(self, call: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
    """Result of a call of `_called`."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    self._calls.put((future, call))
    return future

  def close(self) -> None:
    """Ends threads after the calls that they are in, without further ones."""
    while not self._calls.empty():
      with contextlib.suppress(queue.Empty):
        entry = self._calls.get_nowait()
        if entry is not None:
          entry[0].cancel()
    for _ in range(self._count):
      self._calls.put(None)


def _work(calls: queue.SimpleQueue[Any]) -> None:
  """Calls functions until there is None."""
  while (entry := calls.get()) is not None:
    future, call = entry
    if future.set_running_or_notify_cancel():
      future.set_result(_called(call))


def _import(functions: bytes) -> None:
  """Imports the modules of pickled functions."""
  # A module that can't be imported is an error of the first call.
  with contextlib.suppress(Exception):
    pickle.loads(functions)


def _called(call: tuple[Any, ...]) -> Any:
  """Result of a function, or the text of its error."""
  function, *arguments = call
  try:
    value = function(*arguments)
  except (Exception, SystemExit) as error:
    return f"{type(error).__name__}: {error}"
  if isinstance(value, np.generic):
    value = value.item()
  # Only plain numbers have to travel between processes.
  is_number = isinstance(value, numbers.Real)
  return float(value) if is_number else f"a {type(value).__name__}"


def _result(result: Any) -> Any:
  """Result of a call in another process, or the text of its error."""
  try:
    return result.get()
  except Exception as error:
    # An example that can't travel.
    return f"{type(error).__name__}: {error}"


def _check_importable(name: str, function: RewardFunction) -> None:
  """Refuses functions that other processes can't import.

  Raises:
    OptionError: If it is a lambda, or defined in another function.
  """
  try:
    pickle.dumps(function)
  except Exception as error:
    raise OptionError(
      "processes",
      f"them with the function {name!r} ({type(error).__name__})",
      "functions at the level of a module, which each process imports",
      "define it in a module, or leave processes out",
    ) from None


def _checked(name: str, outcome: object) -> float:
  # Rewards are float32.
  if isinstance(outcome, float) and abs(outcome) <= _LARGEST:
    return outcome
  raise RewardError(
    f"reward {name!r}",
    str(outcome)[:200],
    "a finite number",
    "return 0.0 for answers that can't be judged",
  )

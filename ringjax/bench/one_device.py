"""A process with one device, for contestants that compute on one device.

XLA runs a CPU operation on as many threads as there are devices, if these are
more than the cores. In a process with eight devices on two cores, a program for
one device has its products cut for eight threads and waits for all of them.
Contestants on one device therefore run in a process that has one.

Guarantees: a call there runs alone in the process, while this process waits;
that process ends when this one ends, even by a signal. An accelerator has no
such threads and can seldom be opened twice: `useful` is false there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import jax

from ringjax.bench import timing
from ringjax.bench.timing import Skipped

# The function to time, and the result of its first run.
Trial = tuple[Callable[[], Any], Any]

_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S+")


@dataclasses.dataclass(frozen=True)
class ProcessorTime:
  """Processor time of all threads of a process during a call, in seconds."""

  seconds: float


def useful() -> bool:
  """Whether one device here is slower than in a process with one device."""
  return jax.default_backend() == "cpu" and jax.device_count() > 1


class OneDeviceProcess:
  """Child process with one CPU device, which starts when first used."""

  def __init__(self) -> None:
    self._process: BaseProcess | None = None
    self._connection: Connection | None = None
    # Keys are never reused: a contestant of a process that died must not be
    # mistaken for one of the next process.
    self._keys = itertools.count()

  def build(self, build: Callable[..., Trial], *args: Any) -> Trial:
    """Builds a contestant in the child process.

    Args:
      build: Function of a module, which the process imports.
      args: Arguments of `build`.

    Returns:
      A function that runs the contestant and returns its `ProcessorTime`, and
      the result of the first run.

    Raises:
      Skipped: If `build` fails or the process dies; the text is the reason.
    """
    key = next(self._keys)
    result = self._ask("build", key, build, args)
    return functools.partial(self._ask, "run", key), result

  def clear(self) -> None:
    """Drops all contestants and their memory."""
    if self._process is not None:
      # A process that died holds no memory.
      with contextlib.suppress(Skipped):
        self._ask("clear")

  def close(self) -> None:
    """Ends the process."""
    if self._connection is not None:
      self._connection.close()
    if self._process is not None:
      self._process.kill()
      self._process.join()
    self._process = self._connection = None

  def _ask(self, *question: object) -> Any:
    if self._connection is None:
      self._start()
    assert self._connection is not None and self._process is not None
    try:
      self._connection.send(question)
      fine, answer = self._connection.recv()
    except (EOFError, OSError):
      self._process.join()
      code = self._process.exitcode
      self.close()
      raise Skipped(f"its process ended with {code}: out of memory?") from None
    except BaseException:
      # A later question must not receive this one's answer.
      self.close()
      raise
    if not fine:
      raise Skipped(answer)
    return answer

  def _start(self) -> None:
    context = multiprocessing.get_context("spawn")
    self._connection, end = context.Pipe()
    self._process = context.Process(target=serve, args=(end,), daemon=True)
    self._process.start()
    # Only the child's copy stays open, so that its death ends the connection.
    end.close()


def serve(connection: Connection) -> None:
  """Answers questions with one device until the other end is closed."""
  # Stdout is for the tables of the parent process: print to stderr here.
  os.dup2(2, 1)
  os.environ["XLA_FLAGS"] = _COUNT.sub("", os.environ.get("XLA_FLAGS", ""))
  jax.config.update("jax_num_cpu_devices", 1)
  runs: dict[int, Callable[[], Any]] = {}
  while True:
    try:
      command, *args = connection.recv()
    except EOFError:
      return
    try:
      data = pickle.dumps((True, _answer(runs, command, *args)))
    except Exception as error:
      data = pickle.dumps((False, timing.reason(error)))
    connection.send_bytes(data)


def _answer(
  runs: dict[int, Callable[[], Any]], command: str, key: int = -1, *args: Any
) -> Any:
  if command == "clear":
    runs.clear()
    gc.collect()
    return None
  if command == "build":
    build, build_args = args
    runs[key], result = build(*build_args)
    return result
  if key not in runs:
    raise Skipped("the process in which it was built ended: out of memory?")
  start = time.process_time()
  jax.block_until_ready(runs[key]())
  return ProcessorTime(time.process_time() - start)

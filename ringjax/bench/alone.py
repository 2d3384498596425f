"""A process with one device, for contestants that have use for no more.

On a CPU the threads on which XLA runs operations are as many as the devices
are made, if these are more than the cores. Where eight devices are made on two
cores, a program for one of them has its products cut for eight threads and
waits for all of them. Whoever computes on one device has one device, and is
timed so.

Law: what runs there runs as it would in a process of its own, one call at a
time, while this process waits; it ends when this process ends, however that
ends. An accelerator has no such threads and can seldom be had twice: there
`Alone` is of no use, see `serves`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from types import TracebackType
from typing import Any

import jax

from ringjax.bench import timing
from ringjax.bench.contest import Made
from ringjax.bench.timing import Skipped

_CHILD = "from ringjax.bench import alone; alone.serve({})"
_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S+")


@dataclasses.dataclass(frozen=True)
class Spent:
  """What a run there took, in seconds.

  Attributes:
    processor_s: of all threads of that process.
  """

  processor_s: float


def serves() -> bool:
  """Whether one device in this process is not what it is alone."""
  return jax.default_backend() == "cpu" and jax.device_count() > 1


class Alone:
  """The process; it starts when it is first needed."""

  def __init__(self) -> None:
    self._process: subprocess.Popen[bytes] | None = None
    self._line: connection.Connection | None = None
    # Of contestants, never given again: what was made in a process that died
    # must not be taken for what the next one made.
    self._keys = itertools.count()

  def __enter__(self) -> Alone:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self.close()

  def make(self, make: str, *args: Any) -> Made:
    """Gets a contestant ready there.

    Args:
      make: "module:function" that gives `Made`.
      args: of the function.

    Returns:
      A call that runs it and gives what was `Spent`, and what came out first.

    Raises:
      Skipped: with the reason why there is none.
    """
    key = next(self._keys)
    found = self._ask("make", key, make, args)
    return functools.partial(self._ask, "run", key), found

  def clear(self) -> None:
    """Drops all contestants, and what they hold."""
    if self._process is not None:
      # One that has died holds nothing.
      with contextlib.suppress(Skipped):
        self._ask("clear")

  def close(self) -> None:
    if self._line is not None:
      self._line.close()
    if self._process is not None:
      self._process.kill()
      self._process.wait()
    self._process = self._line = None

  def _ask(self, *question: Any) -> Any:
    if self._line is None:
      self._start()
    assert self._line is not None
    try:
      self._line.send(question)
      fine, answer = self._line.recv()
    except (EOFError, OSError):
      assert self._process is not None
      code = self._process.wait()
      self.close()
      raise Skipped(f"its process ended with {code}: out of memory?") from None
    except BaseException:
      # An answer that nobody waits for is not to be taken for the next one.
      self.close()
      raise
    if not fine:
      raise Skipped(answer)
    return answer

  def _start(self) -> None:
    mine, its = socket.socketpair()
    environment = dict(os.environ)
    # It must find the modules that this process finds.
    paths = [p or os.getcwd() for p in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["XLA_FLAGS"] = _COUNT.sub("", os.environ.get("XLA_FLAGS", ""))
    environment["JAX_NUM_CPU_DEVICES"] = "1"
    with its:
      self._process = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(its.fileno())],
        env=environment,
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        # Tables and their readers have this process's output for themselves.
        stdout=sys.__stderr__,
      )
    self._line = connection.Connection(mine.detach())


def serve(descriptor: int) -> None:
  """Answers questions until the other end is gone."""
  line = connection.Connection(descriptor)
  runs: dict[int, Callable[[], Any]] = {}
  while True:
    try:
      what, *args = line.recv()
    except EOFError:
      return
    try:
      answer = True, _answer(runs, what, *args)
      data = pickle.dumps(answer)
    except Exception as error:
      data = pickle.dumps((False, timing.reason(error)))
    line.send_bytes(data)


def _answer(
  runs: dict[int, Callable[[], Any]], what: str, key: int = -1, *args: Any
) -> Any:
  if what == "clear":
    runs.clear()
    gc.collect()
    return None
  if what == "run":
    if key not in runs:
      raise Skipped("the process in which it was made ended: out of memory?")
    start = time.process_time()
    jax.block_until_ready(runs[key]())
    return Spent(time.process_time() - start)
  make, given = args
  module, function = make.split(":")
  run, found = getattr(importlib.import_module(module), function)(*given)
  runs[key] = run
  return found

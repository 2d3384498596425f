"""Subprocesses for input with which a hostile file could exhaust or crash one.

Guarantees: `run` and `Workers.ask` return a script's answer, or raise with
the reason, within the limits of time and memory, whatever the script's
libraries do with their input. If the subprocess is killed, this process is not
affected. A worker ends with the process that started it.
Cost: `run` starts a Python, 50 to 500 ms. `Workers.ask` starts one at its first
call and after a limit was exceeded; else it costs a round trip through pipes,
about 0.2 ms.

Workers have no heartbeats: each request has its own limits, and the pipe ends
with the process.

Limits of processor time and memory are those of POSIX; elsewhere only the
limit of wall time holds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO, Any

# Run by a script before it reads its input.
_LIMITS = """\
import json, sys
try:
  import resource
except ImportError:
  resource = None
def limit(memory_bytes, cpu_s):
  if resource is not None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
"""


# Run by a worker: `answer` is defined before it. Each request has a header with
# its length, its limit of memory and that of processor time; each answer one
# with its length and whether the worker ends after it, as it does when it holds
# much memory, which would count for the next request.
_SERVE = """\
import os, signal, struct
def size():
  try:
    with open("/proc/self/statm") as file:
      return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
  except (OSError, ValueError):
    return 0
def serve():
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  if resource is not None:
    # Neither ignored nor blocked, as a process inherits it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
  source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)
  if resource is not None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
  first = size()
  while True:
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
      return
    length, memory, cpu = HEADER.unpack(header)
    if resource is not None:
      # The kernel ends this process when the timer of its processor time runs
      # out, for SIGPROF has no handler here.
      signal.setitimer(signal.ITIMER_PROF, cpu)
      if most != resource.RLIM_INFINITY:
        memory = min(memory, most)
      resource.setrlimit(resource.RLIMIT_AS, (memory, most))
    last = False
    try:
      text = source.read(length)
      if len(text) < length:
        return
      said = json.dumps({"answer": answer(json.loads(text))}).encode("ascii")
    except MemoryError:
      said, last = b'{"error": "MemoryError"}', True
    except BaseException as error:
      name = f"{type(error).__name__}: {error}"[:200]
      said, last = json.dumps({"error": name}).encode("ascii"), True
    if resource is not None:
      signal.setitimer(signal.ITIMER_PROF, 0)
    last = last or size() - first > KEEP
    sink.write(ANSWER.pack(len(said), last))
    sink.write(said)
    sink.flush()
    if last:
      return
serve()
"""
_HEADER, _ANSWER = ">QQd", ">Q?"
# Address space that a worker may have gained when it takes another request.
_KEEP_BYTES = 64 << 20
# Bytes of memory, seconds of processor and wall time, bytes of the answer.
_Limits = tuple[int, int | float, int | float, int]


class ChildError(Exception):
  """The subprocess did not answer, for the reason in the text.

  Raised and caught only inside of this package.
  """


def run(
  script: str,
  request: bytes,
  *,
  memory_bytes: int,
  cpu_s: int,
  wall_s: float,
  answer_bytes: int,
) -> Any:
  """Runs a script and returns its standard output, parsed as JSON.

  Args:
    script: Python code; `limit` is defined before it, and called with the
      limits.
    request: Bytes that the script reads from `sys.stdin.buffer`.
    memory_bytes: Largest address space of the process.
    cpu_s: Most processor time in seconds, including imports.
    wall_s: Most wall time in seconds, which counts on a busy machine.
    answer_bytes: Length of the longest answer that is parsed.

  Raises:
    ChildError: If it was killed, failed, or answered too much or not in JSON.
  """
  code = f"{_LIMITS}limit({memory_bytes}, {cpu_s})\n{script}"
  try:
    finished = subprocess.run(
      [sys.executable, "-P", "-c", code],
      input=request,
      capture_output=True,
      timeout=wall_s,
      env=_environment(),
      check=False,
    )
  except subprocess.TimeoutExpired:
    raise ChildError(f"no answer within {wall_s:g} s") from None
  except OSError as error:
    raise ChildError(f"no process could be started: {error}") from error
  if finished.returncode:
    raise ChildError(
      _why(finished.returncode, finished.stderr, memory_bytes, cpu_s)
    )
  if len(finished.stdout) > answer_bytes:
    raise ChildError(f"more than {answer_bytes} bytes of output")
  try:
    return json.loads(finished.stdout)
  except ValueError:
    raise ChildError("an answer that is not JSON") from None


def _environment() -> dict[str, str]:
  """Environment variables of a subprocess."""
  # The subprocess has the same search path of modules.
  env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
  env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
  env["PYTHONIOENCODING"] = "utf-8"
  # One thread each: stacks of threads count as memory here.
  env["TOKENIZERS_PARALLELISM"] = "false"
  return env


class Workers:
  """Subprocesses that answer requests one after another with one script.

  A process is started when a request finds no idle one, `most` of them at
  most; further requests wait. One that exceeds a limit is killed, and a later
  request starts another. Safe with threads. After a fork the child process
  starts its own; the parent's end with the parent.

  Attributes:
    started: Number of processes that were started.
  """

  def __init__(self, script: Callable[[], str], most: int = 4):
    """Starts nothing yet.

    Args:
      script: Returns Python code that defines `answer`, a function of one JSON
        value that returns one.
      most: Largest number of processes at the same time.
    """
    self.started = 0
    self._script, self._most = script, most
    self._reset()
    _pools.add(self)

  def ask(
    self,
    request: bytes,
    *,
    memory_bytes: int,
    cpu_s: int | float,
    wall_s: int | float,
    answer_bytes: int,
  ) -> Any:
    """Returns the script's answer to one request.

    Args:
      request: The JSON value that the script's `answer` is called with.
      memory_bytes: Largest address space of the process.
      cpu_s: Most processor time of the request in seconds.
      wall_s: Most wall time of the request in seconds, which counts on a busy
        machine.
      answer_bytes: Length of the longest answer that is parsed.

    Raises:
      ChildError: If the worker was killed, failed, or answered too much.
    """
    limits = memory_bytes, cpu_s, wall_s, answer_bytes
    if not hasattr(select, "poll"):
      return self._run(request, limits)
    with self._room:
      worker = self._idle_worker()
      text = None
      if worker is not None:
        # An idle process may be killed from outside: then a new one is asked.
        with contextlib.suppress(_DiedError):
          text = self._ask(worker, request, limits)
      if text is None:
        text = self._ask(self._new_worker(), request, limits)
    value = json.loads(text)
    if "error" not in value:
      return value["answer"]
    why = value["error"]
    if why == "MemoryError":
      why = f"more than {memory_bytes >> 20} MB of memory"
    raise ChildError(why)

  def close(self) -> None:
    """Ends idle processes; a later request starts another."""
    with self._lock:
      workers, self._idle = self._idle, []
    for worker in workers:
      self._end(worker)

  def _ask(
    self, worker: _WorkerProcess, request: bytes, limits: _Limits
  ) -> bytes:
    """One worker's answer; the worker is idle again, or ended."""
    text = None
    try:
      text = worker.ask(request, *limits)
    finally:
      # Whatever happened, an interrupt included, no process is left over.
      if text is None or worker.last:
        self._end(worker)
      else:
        with self._lock:
          self._idle.append(worker)
    return text

  def _run(self, request: bytes, limits: _Limits) -> Any:
    """Returns the answer of a new process, where pipes can't be waited for."""
    call = "print(json.dumps(answer(json.load(sys.stdin.buffer))))"
    memory, cpu_s, wall_s, longest = limits
    with self._lock:
      self.started += 1
    return run(
      f"{self._script()}\n{call}",
      request,
      memory_bytes=memory,
      cpu_s=math.ceil(cpu_s),
      wall_s=wall_s,
      answer_bytes=longest,
    )

  def _idle_worker(self) -> _WorkerProcess | None:
    while True:
      with self._lock:
        if not self._idle:
          return None
        worker = self._idle.pop()
      if worker.alive:
        return worker
      self._end(worker)

  def _new_worker(self) -> _WorkerProcess:
    header = (
      "import struct\n"
      f"HEADER, ANSWER = struct.Struct({_HEADER!r}), struct.Struct({_ANSWER!r})"
      f"\nKEEP = {_KEEP_BYTES}\n"
    )
    worker = _WorkerProcess(f"{_LIMITS}{header}{self._script()}\n{_SERVE}")
    with self._lock:
      self.started += 1
      self._all.add(worker)
    return worker

  def _end(self, worker: _WorkerProcess) -> None:
    with self._lock:
      self._all.discard(worker)
    worker.kill()

  def _reset(self) -> None:
    self._lock = threading.Lock()
    self._room = threading.BoundedSemaphore(self._most)
    self._idle: list[_WorkerProcess] = []
    self._all: set[_WorkerProcess] = set()

  def _forked(self) -> None:
    """Forgets the parent's workers in the child process of a fork."""
    for worker in list(self._all):
      worker.release()
    self._reset()


class _DiedError(ChildError):
  """A worker ended without an answer, for no limit of this package."""


class _WorkerProcess:
  """One process of `Workers`.

  Attributes:
    last: Whether the process ends after the answer that it gave.
  """

  def __init__(self, code: str):
    self.last = False
    try:
      # Without buffers: they would have locks, which a fork may leave taken.
      self._process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
      )
    except OSError as error:
      raise ChildError(f"no process could be started: {error}") from error
    sink, source = self._process.stdin, self._process.stdout
    if sink is None or source is None:
      raise ChildError("a process without pipes")
    # A write does not wait for the reader: as much as fits is written.
    os.set_blocking(sink.fileno(), False)
    self._sink, self._source = sink, source

  @property
  def alive(self) -> bool:
    """Whether the process runs."""
    return self._process.poll() is None

  def ask(
    self,
    request: bytes,
    memory_bytes: int,
    cpu_s: int | float,
    wall_s: int | float,
    answer_bytes: int,
  ) -> bytes:
    """The text of the script's answer; see `Workers.ask`."""
    until = time.monotonic() + wall_s
    header = struct.pack(_HEADER, len(request), memory_bytes, cpu_s)
    try:
      with contextlib.suppress(BrokenPipeError):
        self._write(header + request, until)
      start = self._read(struct.calcsize(_ANSWER), until)
      if start is not None:
        length, self.last = struct.unpack(_ANSWER, start)
        if length > answer_bytes:
          raise ChildError(f"more than {answer_bytes} bytes of output")
        text = self._read(length, until)
        if text is not None:
          return text
    except TimeoutError:
      raise ChildError(f"no answer within {wall_s:g} s") from None
    # The pipe ended, so the process did or is about to.
    self._process.wait()
    code = self._process.returncode
    if code == -getattr(signal, "SIGPROF", 0):
      raise ChildError(f"more than {cpu_s:g} s of processor time")
    raise _DiedError(
      f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    )

  def kill(self) -> None:
    """Ends the process and waits for its end."""
    with contextlib.suppress(OSError):
      self._process.kill()
    self._process.wait()
    self.release()

  def release(self) -> None:
    """Closes the pipes of a process that another process must end."""
    self._sink.close()
    self._source.close()
    # Marks the process as ended, so that deleting this object does not wait.
    if self._process.returncode is None:
      self._process.returncode = 0

  def _write(self, data: bytes, until: float) -> None:
    unsent = memoryview(data)
    while unsent:
      _wait(self._sink, select.POLLOUT, until)
      unsent = unsent[os.write(self._sink.fileno(), unsent) :]

  def _read(self, count: int, until: float) -> bytes | None:
    """Reads `count` bytes of the answer; None if the pipe ends before."""
    pieces = []
    while count:
      _wait(self._source, select.POLLIN, until)
      piece = os.read(self._source.fileno(), min(count, 1 << 20))
      if not piece:
        return None
      pieces.append(piece)
      count -= len(piece)
    return b"".join(pieces)


def _wait(pipe: IO[bytes], event: int, until: float) -> None:
  """Waits until a pipe can be read or written.

  Raises:
    TimeoutError: If the pipe is not ready by `until`, of `time.monotonic`.
  """
  poll = select.poll()
  poll.register(pipe, event)
  if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
    raise TimeoutError


_pools: weakref.WeakSet[Workers] = weakref.WeakSet()


def _close_all() -> None:
  for pool in list(_pools):
    pool.close()


def _after_fork() -> None:
  for pool in list(_pools):
    pool._forked()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_after_fork)


def _why(code: int, stderr: bytes, memory_bytes: int, cpu_s: int) -> str:
  text = stderr.decode("utf-8", "replace")
  if code < 0 and -code in (9, 24):  # SIGKILL, SIGXCPU
    return f"more than {cpu_s} s of processor time"
  if "MemoryError" in text or "memory allocation" in text:
    return f"more than {memory_bytes >> 20} MB of memory"
  if code < 0:
    return f"killed by signal {-code}"
  lines = text.strip().splitlines() or [f"exit status {code}"]
  return lines[-1][:200]

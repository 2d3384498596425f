"""Console of the launch scripts: progress, errors, Ctrl-C and exit statuses.

Guarantees: stdout is for the result alone; all else goes to stderr, without
control characters unless that is a terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TextIO

from absl import app, flags

from ringjax.errors import OutOfMemoryError, RingjaxError
from ringjax.parallel import memory
from ringjax.parallel.compile_times import Compiling as Compiling

# What a shell reports of a command that Ctrl-C ended.
INTERRUPTED = 130
# As by SIGPIPE.
UNREAD = 141


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


class Screen:
  """The progress and the messages of a script, on stderr.

  On a terminal a bar with rate and remaining time; elsewhere plain lines, at
  least one in twice `every_s` seconds. In all processes but the first: nothing.
  """

  def __init__(
    self, name: str, stream: TextIO | None = None, every_s: float = 5.0
  ):
    self.name = name
    self.quiet = False
    self._stream = sys.stderr if stream is None else stream
    self._every_s = every_s
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    self._fancy = self._stream.isatty() and not dumb
    self._bar: Any = None
    self._task: Any = None
    self._label, self._unit, self._total = "", "", 0
    self._start = self._last = self._said = 0.0
    self._first = 0
    # Set when what is under way ends, which ends the thread of reminders.
    self._ended = threading.Event()

  def say(self, text: str) -> None:
    """A line."""
    if self.quiet:
      return
    if self._bar is not None:
      self._bar.console.print(text, markup=False, highlight=False)
    else:
      self._said = time.monotonic()
      print(text, file=self._stream, flush=True)

  def error(self, text: str) -> None:
    """A line that says what is wrong, from any process."""
    self.end()
    complain(self.name, text, self._stream)

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Says what is wrong; the exit status. For the `except` that has it.

    A fault of the code is raised again. For the arguments see `reason`.
    """
    text = reason(error, doing, knobs)
    if text is None:
      self.end()
      raise error
    self.error(text)
    return 2

  def begin(
    self, label: str, total: int = 0, unit: str = "", done: int = 0
  ) -> None:
    """Something begins that takes a while.

    Args:
      label: what it is.
      total: how much there is of it; 0 if it isn't known.
      unit: in which that is counted.
      done: how much was done before.
    """
    self.end()
    self._label, self._unit, self._total = label, unit, total
    self._first = done
    self._start = self._last = time.monotonic()
    if self.quiet:
      return
    if not self._fancy:
      self.say(f"{label} ...")
      self._ended = threading.Event()
      threading.Thread(
        target=_remind,
        # A screen that is dropped has nothing under way.
        args=(weakref.ref(self), self._ended, 2 * self._every_s),
        daemon=True,
      ).start()
      return
    from rich import console, progress

    self._bar = progress.Progress(
      progress.SpinnerColumn(),
      progress.TextColumn("{task.description}", markup=False),
      progress.BarColumn(bar_width=30),
      progress.TextColumn("{task.fields[rate]}", markup=False),
      progress.TimeElapsedColumn(),
      progress.TimeRemainingColumn(),
      console=console.Console(file=self._stream),
      transient=True,
    )
    self._task = self._bar.add_task(
      label, total=total or None, completed=done, rate=""
    )
    self._bar.start()

  def remind(self, silent_s: float) -> float:
    """Says what is under way if nothing was said for `silent_s` seconds.

    Returns:
      Seconds after which to look again.
    """
    now = time.monotonic()
    if now - self._said >= silent_s:
      self.say(f"  {self._label}: {clock(now - self._start)} so far")
    return silent_s - (now - self._said)

  def at(self, done: int) -> None:
    """So much of the total is done."""
    if self.quiet:
      return
    now = time.monotonic()
    rate = (done - self._first) / max(now - self._start, 1e-9)
    if self._bar is not None:
      self._bar.update(
        self._task, completed=done, rate=f"{per_second(rate)} {self._unit}/s"
      )
    elif now - self._last >= self._every_s and rate and done < self._total:
      self._last = now
      left = (self._total - done) / rate
      self.say(
        f"  {done:,} of {self._total:,} {self._unit}, {per_second(rate)} a "
        f"second, {clock(left)} left"
      )

  def end(self) -> None:
    """Nothing is under way any more."""
    self._ended.set()
    if self._bar is not None:
      self._bar.stop()
      self._bar = None


def _remind(
  screen: weakref.ref[Screen], ended: threading.Event, silent_s: float
) -> None:
  wait_s = silent_s
  while not ended.wait(max(wait_s, 0.01)):
    found = screen()
    if found is None:
      return
    wait_s = found.remind(silent_s)
    del found


def clock(seconds: float) -> str:
  """1:05 or 2:00:00."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"


def per_second(rate: float) -> str:
  """1,234, 56.7 or 0.0123: three digits, or all in front of the point."""
  return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def nbytes(n: float) -> str:
  """12.3 MB."""
  units = ["bytes", "kB", "MB", "GB", "TB"]
  while n >= 1000 and len(units) > 1:
    n /= 1000
    units.pop(0)
  return f"{n:.3g} {units[0]}"


def reason(error: BaseException, doing: str, knobs: str) -> str | None:
  """The message of an error for the user; None if it is a bug.

  Args:
    error: what was raised.
    doing: what was done then.
    knobs: what to change if memory ran out.
  """
  if isinstance(error, OutOfMemoryError):
    # The flags to change, and not the arguments behind them.
    return memory.told(error, doing, knobs)
  if isinstance(error, RingjaxError | app.UsageError | flags.Error):
    return f"{error}"
  text = f"{error}"
  if memory.ran_out(error):
    return memory.told(error, doing, knobs)
  if isinstance(error, OSError):
    name = error.filename
    return f"{name}: {error.strerror}" if name else text
  return None


# ---------------------------------------------------------------------------
# Ctrl-C
# ---------------------------------------------------------------------------


class Job:
  """Work in a thread, so that Ctrl-C is heard while a device computes.

  Attributes:
    gentle: whether the work looks at `stop`, and ends by itself.
    stop: whether it should.
  """

  def __init__(self) -> None:
    self.gentle = False
    self.stop = False

  def run(self, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises.

    Raises:
      KeyboardInterrupt: and the work goes on; the process has to end now.
    """
    outcome: list[tuple[Any, BaseException | None]] = []
    # Not the thread's end: a join that is interrupted takes it for ended.
    done = threading.Event()

    def target() -> None:
      try:
        outcome.append((work(), None))
      except BaseException as error:
        outcome.append((None, error))
      done.set()

    threading.Thread(target=target, daemon=True).start()
    while not outcome:
      try:
        done.wait(0.5)
      except KeyboardInterrupt:
        if self.stop or not self.gentle:
          raise
        self.stop = True
    value, error = outcome[0]
    if error is not None:
      raise error
    return value


def leave(status: int) -> None:
  """Ends the process now, whatever its threads do."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):
      stream.flush()
  os._exit(status)


def own_stdout() -> TextIO:
  """The stdout of this process, for us alone.

  What libraries write to theirs (Gloo does) goes to stderr from now on.
  """
  sys.stdout.flush()
  mine = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
  os.dup2(2, 1)
  return mine


def complain(name: str, error: object, stream: TextIO | None = None) -> None:
  """One line on stderr."""
  line = " ".join(f"{error}".split())
  print(f"{name}: {line}", file=stream or sys.stderr, flush=True)

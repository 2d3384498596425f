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
from typing import Any, Protocol, TextIO

from absl import app, flags

from ringjax.errors import OutOfMemoryError, RingjaxError
from ringjax.parallel import memory
from ringjax.parallel.compile_times import Compiling as Compiling

from .entry_points import command_text

# Exit status that a shell reports for a command that Ctrl-C ended.
INTERRUPTED = 130
# Exit status of a process that SIGPIPE ended.
UNREAD = 141


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


class Screen:
  """The progress and the messages of a script, on stderr.

  On a terminal a bar with rate and remaining time; elsewhere plain lines, at
  least one in twice `every_s` seconds. With `quiet`, as in all processes but
  the first, nothing.
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
    self._bar = None
    self._task = None
    self._label, self._unit, self._total = "", "", 0
    self._start = self._last = self._said = 0.0
    self._first = 0
    # Set when the current activity ends: stops the thread of reminders.
    self._ended = threading.Event()

  def say(self, text: str) -> None:
    """Prints a line."""
    if self.quiet:
      return
    text = command_text(text)
    if self._bar is not None:
      self._bar.console.print(text, markup=False, highlight=False)
    else:
      self._said = time.monotonic()
      print(text, file=self._stream, flush=True)

  def error(self, text: str) -> None:
    """Prints an error message, from any process."""
    self.end()
    complain(self.name, text, self._stream)

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Prints an error in an `except` block; returns the exit status.

    A bug is raised again. For the arguments see `reason`.
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
    """Begins to show the progress of an activity.

    Args:
      label: Name of the activity.
      total: Amount of work in `unit`; 0 if unknown.
      unit: Unit of `total` and `done`, in the plural.
      done: Amount that an earlier run has done.
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
        # A weak reference: the thread ends when the screen is dropped.
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
    """Prints the current activity if nothing was printed for `silent_s`.

    Returns:
      Seconds after which to look again.
    """
    now_s = time.monotonic()
    if now_s - self._said >= silent_s:
      self.say(f"  {self._label}: {clock(now_s - self._start)} so far")
    return silent_s - (now_s - self._said)

  def at(self, done: int) -> None:
    """Shows that `done` of the total is done."""
    if self.quiet:
      return
    now_s = time.monotonic()
    rate = (done - self._first) / max(now_s - self._start, 1e-9)
    if self._bar is not None:
      self._bar.update(
        self._task, completed=done, rate=f"{per_second(rate)} {self._unit}/s"
      )
    elif now_s - self._last >= self._every_s and rate and done < self._total:
      self._last = now_s
      remaining_s = (self._total - done) / rate
      self.say(
        f"  {done:,} of {self._total:,} {self._unit}, {per_second(rate)} a "
        f"second, {clock(remaining_s)} left"
      )

  def end(self) -> None:
    """Ends the progress of the current activity."""
    self._ended.set()
    if self._bar is not None:
      self._bar.stop()
      self._bar = None


def _remind(
  screen: weakref.ref[Screen], ended: threading.Event, silent_s: float
) -> None:
  wait_s = silent_s
  while not ended.wait(max(wait_s, 0.01)):
    live_screen = screen()
    if live_screen is None:
      return
    wait_s = live_screen.remind(silent_s)
    del live_screen


def clock(seconds: float) -> str:
  """Formats seconds as 1:05 or 2:00:00."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"


def per_second(rate: float) -> str:
  """Formats a rate as 1,234, 56.7 or 0.0123: at least three digits."""
  return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def nbytes(n: float) -> str:
  """Formats bytes as 12.3 MB."""
  units = ["bytes", "kB", "MB", "GB", "TB"]
  while n >= 1000 and len(units) > 1:
    n /= 1000
    units.pop(0)
  return f"{n:.3g} {units[0]}"


def reason(error: BaseException, doing: str, knobs: str) -> str | None:
  """The message of an error for the user; None if it is a bug.

  Args:
    error: Exception that was raised.
    doing: Activity that raised it.
    knobs: Advice on flags to change if memory ran out.
  """
  if isinstance(error, OutOfMemoryError):
    # Name the flags to change, not the arguments of the library.
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


class _Failing(Protocol):
  """Reports errors: a screen, or a group of processes."""

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Reports an error; returns the exit status, or raises a bug again."""
    ...


class Run:
  """Block of a script whose errors become messages and an exit status.

  Attributes:
    doing: Current activity, for error messages, or a function that returns it.
    status: Exit status; 0 while nothing has failed.
  """

  def __init__(
    self,
    screen: Screen,
    knobs: str,
    *,
    doing: str | Callable[[], str] = "starting",
    interrupted: str | Callable[[], str] | None = None,
    reports: _Failing | None = None,
    leaving: Callable[[BaseException, int], object] = lambda *_: None,
    tidy: Callable[[], object] = lambda: None,
    pipe_ends: bool = False,
  ):
    """Prepares the block.

    Args:
      screen: Console of this process.
      knobs: Options that the caller can change if memory runs out.
      doing: First activity, or a function that returns the current one.
      interrupted: Message after Ctrl-C; default: the current activity.
      reports: Group of processes that reports errors; default: the screen.
      leaving: Called after the message of an interruption, with the interrupt
        and the exit status, e.g. `Group.leave` or `leave_at_once`.
      tidy: Called before the message of an interruption.
      pipe_ends: Whether a broken pipe can only be that of stdout, whose reader
        has ended: the process then leaves with status 0.
    """
    self.doing, self.status = doing, 0
    self._screen, self._knobs = screen, knobs
    self._interrupted = interrupted
    self._reports = screen if reports is None else reports
    self._leaving, self._tidy = leaving, tidy
    self._pipe_ends = pipe_ends

  def __enter__(self) -> Run:
    return self

  def __exit__(
    self, kind: object, error: BaseException | None, trace: object
  ) -> bool:
    doing = self.doing if isinstance(self.doing, str) else self.doing()
    if isinstance(error, KeyboardInterrupt):
      self._screen.end()
      self._tidy()
      text = self._interrupted or f"interrupted while {doing}"
      self._screen.error(text if isinstance(text, str) else text())
      self.status = INTERRUPTED
      self._leaving(error, self.status)
      return True
    if isinstance(error, BrokenPipeError) and self._pipe_ends:
      # The program that reads stdout has ended, as in `| head`.
      self._screen.end()
      leave(0)
    if isinstance(error, Exception):
      self.status = self._reports.failed(error, doing, self._knobs)
      return True
    return False


class Job:
  """Work in a thread, so that Ctrl-C is handled while a device computes.

  Attributes:
    gentle: Whether the work checks `stop` and ends itself.
    stop: Whether the work should end.
  """

  def __init__(self) -> None:
    self.gentle = False
    self.stop = False

  def run(self, work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread and returns its result, or raises its error.

    Raises:
      KeyboardInterrupt: On Ctrl-C if not `gentle`, or a second time; the thread
        still runs, and the process has to end now.
    """
    outcome: list[tuple[Any, BaseException | None]] = []
    # An event in place of `join`, which an interrupt may mark as complete.
    finished = threading.Event()

    def target() -> None:
      try:
        outcome.append((work(), None))
      except BaseException as error:
        outcome.append((None, error))
      finished.set()

    threading.Thread(target=target, daemon=True).start()
    while not outcome:
      try:
        finished.wait(0.5)
      except KeyboardInterrupt:
        if self.stop or not self.gentle:
          raise
        self.stop = True
    value, error = outcome[0]
    if error is not None:
      raise error
    return value


def leave(status: int) -> None:
  """Ends the process at once, without waiting for its threads."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):
      stream.flush()
  os._exit(status)


def leave_at_once(error: BaseException, status: int) -> None:
  """Ends the process at once after an interruption, see `Run`."""
  del error
  leave(status)


def own_stdout() -> TextIO:
  """Returns a private stdout, and redirects file descriptor 1 to stderr.

  Output that libraries such as Gloo write to stdout goes to stderr from now on.
  """
  sys.stdout.flush()
  stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
  os.dup2(2, 1)
  return stdout


def complain(name: str, error: object, stream: TextIO | None = None) -> None:
  """Prints an error as one line on stderr."""
  line = command_text(" ".join(f"{error}".split()))
  print(f"{name}: {line}", file=stream or sys.stderr, flush=True)

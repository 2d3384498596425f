"""Errors and Ctrl-C in the block of a script: messages and exit statuses."""

from __future__ import annotations

import io

import pytest

from launch.shared import console
from ringjax.errors import OptionError

KNOBS = "pass fewer --rows, or shorter ones"


def screen():
  return console.Screen("script", io.StringIO())


def test_a_block_without_an_error_has_status_0():
  with console.Run(screen(), KNOBS) as run:
    run.doing = "answering"
  assert run.status == 0


@pytest.mark.parametrize(
  ("error", "status", "text"),
  [
    (KeyboardInterrupt(), 130, "script: interrupted while answering"),
    (OptionError("--rows", 0, "1 or more", "pass 1"), 2, "--rows"),
    (MemoryError(), 2, KNOBS),
  ],
)
def test_an_error_is_one_line_and_a_status(error, status, text):
  out = screen()
  with console.Run(out, KNOBS) as run:
    run.doing = "answering"
    raise error
  assert run.status == status
  (line,) = out._stream.getvalue().splitlines()
  assert text in line


def test_a_bug_is_raised_again():
  with pytest.raises(ZeroDivisionError), console.Run(screen(), KNOBS):
    raise ZeroDivisionError
  with pytest.raises(SystemExit), console.Run(screen(), KNOBS):
    raise SystemExit(3)


def test_a_group_is_left_after_the_message():
  calls = []
  out = screen()
  with console.Run(
    out,
    KNOBS,
    doing=lambda: "training",
    interrupted=lambda: "interrupted; 3 figures were written",
    leaving=lambda error, status: calls.append((type(error), status)),
    tidy=lambda: calls.append("tidy"),
  ) as run:
    raise KeyboardInterrupt
  assert run.status == console.INTERRUPTED
  assert calls == ["tidy", (KeyboardInterrupt, console.INTERRUPTED)]
  assert "interrupted; 3 figures" in out._stream.getvalue()


@pytest.mark.parametrize(
  ("error", "status"), [(BrokenPipeError(), 0), (KeyboardInterrupt(), 130)]
)
def test_a_process_with_threads_ends_at_once(monkeypatch, error, status):
  statuses = []

  def leave(status):
    statuses.append(status)
    raise SystemExit(status)

  monkeypatch.setattr(console, "leave", leave)
  with (
    pytest.raises(SystemExit),
    console.Run(screen(), KNOBS, leaving=console.leave_at_once, pipe_ends=True),
  ):
    raise error
  assert statuses == [status]


def test_a_pipe_to_another_process_that_breaks_is_a_failure(monkeypatch):
  """Where sockets lead to other ranks, it is not the reader of stdout."""
  monkeypatch.setattr(console, "leave", pytest.fail)
  out = screen()
  with console.Run(out, KNOBS, leaving=console.leave_at_once) as run:
    raise BrokenPipeError("the other rank is gone")
  assert run.status not in (0, console.INTERRUPTED)
  assert "the other rank is gone" in out._stream.getvalue()

"""Processes of this package's modules that end with this process.

Such a module reads its options, a line of JSON, from the standard input, writes
its address, a line of JSON, and ends when the standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from ringjax.errors import PeerError
from ringjax.json_text import json_text

# Seconds to the end of a process that has closed its output.
_END_S = 1.0


def start_child(
  module: str, options: Mapping[str, Any], variables: Mapping[str, str]
) -> subprocess.Popen[str]:
  """Starts a process of a module.

  Args:
    module: Dotted name of the module.
    options: Options of the process, which no other process can read.
    variables: Further environment variables.
  """
  path = os.pathsep.join(path or os.getcwd() for path in sys.path)
  process = subprocess.Popen(
    [sys.executable, "-m", module],
    env={**os.environ, **variables, "PYTHONPATH": path},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdin is not None
  # A process that has ended already is noticed when its first line is read.
  with contextlib.suppress(BrokenPipeError):
    process.stdin.write(json_text(options) + "\n")
    process.stdin.flush()
  return process


def end_children(processes: Iterable[subprocess.Popen[str]]) -> None:
  """Kills processes, and waits for their end."""
  for process in processes:
    # Killed before the pipes are closed: a thread that reads holds their lock.
    process.kill()
    for pipe in (process.stdin, process.stdout):
      if pipe is not None:
        with contextlib.suppress(OSError):
          pipe.close()
    process.wait()


def first_line(
  name: str, number: int, process: subprocess.Popen[str], patience_s: float
) -> list[Any]:
  """Reads the JSON list that a process writes as its first line.

  Args:
    name: Name of the kind of process, for the error.
    number: Number of the process, for the error.
    process: The process, whose standard output is a pipe.
    patience_s: Maximum seconds to wait.

  Raises:
    PeerError: If the process ended, or wrote no such line in time.
  """
  lines: list[str] = []

  def read() -> None:
    assert process.stdout is not None
    lines.append(process.stdout.readline())

  reader = threading.Thread(target=read, daemon=True)
  reader.start()
  reader.join(patience_s)
  try:
    return list(json.loads(lines[0]))
  except (IndexError, TypeError, ValueError):
    # A pipe that has ended may be noticed before the process has.
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_END_S if lines else 0)
    code = process.poll()
    raise PeerError(
      f"{name} {number} did not start: "
      + ("it says nothing" if code is None else f"it ended with {code}"),
      rank=number,
    ) from None

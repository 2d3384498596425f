"""What a process that was started says first: a line of JSON."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

from ringjax.errors import PeerError


def first_line(
  name: str, number: int, process: subprocess.Popen[str], patience_s: float
) -> list[Any]:
  """Return the list that a process writes as its first line.

  Args:
    name: What the process is, for the error.
    number: Its number.
    process: The process, whose standard output is a pipe.
    patience_s: Seconds to wait.

  Raises:
    PeerError: The process ended, or says nothing of this form.
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
    code = process.poll()
    raise PeerError(
      f"{name} {number} did not start: "
      + ("it says nothing" if code is None else f"it ended with {code}"),
      number,
    ) from None

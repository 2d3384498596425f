"""First line of a started process: JSON with its address."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

from ringjax.errors import PeerError


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
    code = process.poll()
    raise PeerError(
      f"{name} {number} did not start: "
      + ("it says nothing" if code is None else f"it ended with {code}"),
      number,
    ) from None

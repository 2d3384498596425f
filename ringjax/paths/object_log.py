"""A log of lines in an object, which cannot be appended to."""

from __future__ import annotations

import io
import time

from ringjax.paths.object_path import ObjectPath

# Seconds between two writes of a log.
PERIOD_S = 30.0


class ObjectLog(io.StringIO):
  """A text to append lines to, which is written to an object now and then.

  Guarantees: the object has whole lines. It is written when `PERIOD_S` seconds
  have passed since the last time, by `save` and when the log is closed, so that
  a killed process loses the lines since then.
  Cost: each write is of the whole text.

  Args:
    path: Address of the object; lines that it has stay, but for one that a kill
      has cut off.

  Raises:
    StorageError: If the object cannot be read.
  """

  def __init__(self, path: ObjectPath):
    super().__init__()
    self._path = path
    try:
      text = path.read_text()
    except FileNotFoundError:
      text = ""
    super().write(text[: text.rfind("\n") + 1])
    self._written_at = time.monotonic()
    self._changed = False

  def write(self, text: str) -> int:
    """Appends a text; returns its number of characters."""
    self._changed = True
    return super().write(text)

  def flush(self) -> None:
    """Writes the object if that is due.

    Raises:
      StorageError: If it cannot be written.
    """
    if not self.closed and time.monotonic() - self._written_at >= PERIOD_S:
      self.save()

  def close(self) -> None:
    """Writes the object.

    Raises:
      StorageError: If it cannot be written.
    """
    if not self.closed:
      self.save()
    super().close()

  def save(self) -> None:
    """Writes the object at once, if lines were added.

    Raises:
      StorageError: If it cannot be written.
    """
    if self._changed:
      text = self.getvalue()
      self._path.write_text(text[: text.rfind("\n") + 1])
      self._changed = False
    self._written_at = time.monotonic()

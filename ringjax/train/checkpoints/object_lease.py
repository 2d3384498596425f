"""The right to write to a folder of objects, for one process at a time.

An object storage has no locks. The process that writes creates the object
`writer`, which at most one process can, and writes it again every `REFRESH_S`
seconds. If the object is older than `LEASE_S`, by the clock of the storage, its
process is dead or unreachable, and another takes its place. A process that was
taken for dead finds a foreign token when it checks before and after a commit.
Where the storage compares versions (S3), of several that take the place of a
dead process one succeeds, and a refreshment that was delayed replaces nothing;
elsewhere the last one of them has the lease.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import secrets
import threading
import time

from ringjax.paths import ObjectFacts, ObjectPath

# Seconds between two refreshments, and after which the lease has ended.
REFRESH_S = 15.0
LEASE_S = 60.0
_POLL_S = 2.0


class ObjectLease:
  """A lease on a folder of objects.

  Args:
    place: Address of the object that stands for the lease.
  """

  def __init__(self, place: ObjectPath):
    self._place = place
    self._token = secrets.token_hex(8).encode()
    self._ended: threading.Event | None = None
    self._refreshes: threading.Thread | None = None

  @property
  def active(self) -> bool:
    """Whether this process has taken the lease and not released it."""
    return self._ended is not None

  def acquire(self, patience_s: int | float | None = None) -> None:
    """Takes the lease.

    Args:
      patience_s: Seconds to wait for another process; default: until its lease
        has ended. One that refreshes its lease is not waited for.

    Raises:
      BlockingIOError: If another process has the lease.
      StorageError: If the storage cannot be written.
    """
    if self.active:
      return
    patience_s = LEASE_S + _POLL_S if patience_s is None else patience_s
    end = time.monotonic() + patience_s
    first_seen: datetime.datetime | None = None
    while not self._try():
      with contextlib.suppress(FileNotFoundError):
        modified = self._place.store.modified(str(self._place))
        first_seen = first_seen or modified
        if modified != first_seen or time.monotonic() >= end:
          raise self.refusal()
      time.sleep(min(_POLL_S, max(0, end - time.monotonic())) + 0.01)
    self._ended = threading.Event()
    self._refreshes = threading.Thread(
      target=self._refresh, args=(self._ended,), name="lease", daemon=True
    )
    self._refreshes.start()

  def check(self) -> None:
    """Checks that no other process has taken the lease.

    Raises:
      BlockingIOError: If another process has.
      StorageError: If the storage does not answer.
    """
    if not self.active or not self._is_own():
      raise self.refusal()

  def release(self) -> None:
    """Gives the lease back, if this process still has it."""
    if self._ended is None or self._refreshes is None:
      return
    self._ended.set()
    # A refreshment that is under way would create the object again, or take
    # the place of the next process.
    self._refreshes.join()
    self._ended = self._refreshes = None
    # Without an answer the lease ends by itself.
    with contextlib.suppress(OSError):
      if self._is_own():
        self._place.unlink(missing_ok=True)

  def _try(self) -> bool:
    """Creates the object, or takes the place of a process that is dead."""
    with contextlib.suppress(FileExistsError):
      self._place.store.write(str(self._place), self._token, new=True)
      # Some servers do not refuse a second creation.
      return self._is_own()
    # An attempt whose answer was lost may have created it.
    if self._is_own():
      return True
    facts = self._place.facts()
    if facts is None:
      return False
    probe = self._place.with_name(f"{self._place.name}.{secrets.token_hex(4)}")
    try:
      probe.write_bytes(b"the time")
      store = probe.store
      age = store.modified(str(probe)) - store.modified(str(self._place))
    except FileNotFoundError:
      return False
    finally:
      probe.unlink(missing_ok=True)
    if age.total_seconds() <= LEASE_S:
      return False
    return self._replace(facts) and self._is_own()

  def _replace(self, facts: ObjectFacts) -> bool:
    """Writes the object unless it has other facts; whether it was written."""
    store = self._place.store
    try:
      store.write(str(self._place), self._token, replaces=facts)
    except FileExistsError:
      return False
    return True

  def _is_own(self) -> bool:
    try:
      return self._place.read_bytes() == self._token
    except FileNotFoundError:
      return False

  def refusal(self) -> BlockingIOError:
    """Error of a process that has not got the lease, or has lost it."""
    return BlockingIOError(
      errno.EAGAIN,
      "another process writes here until it closes",
      str(self._place),
    )

  def _refresh(self, ended: threading.Event) -> None:
    """Writes the object again until the lease is released or lost."""
    while not ended.wait(REFRESH_S):
      # A refreshment may fail; `check` counts.
      with contextlib.suppress(OSError):
        # Read first: an object of this version has this process' token.
        facts = self._place.facts()
        if facts is None or not self._is_own():
          return
        if not ended.is_set():
          # Refused if another process has written, or an attempt of this one
          # with a lost answer: the next look at the object tells.
          self._replace(facts)

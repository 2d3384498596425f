"""Store of blocks in two tiers: host memory, and a folder on disk.

Guarantees: `get` returns the bytes that were put under a key, or None. Failures
of a disk, a policy or another process do not raise: they are counted, and the
first of each kind is logged as a warning. Several threads may call.
Cost: `put` and `request` return at once; files are written by one thread and
read by another.
Memory: the budget of the host tier, and the blocks that wait to be written, at
most `queue` bytes; a block beyond that is not written.

A store treats keys and blocks as plain bytes. A block that is put is
offered to both tiers, whose policies admit it or not; one that is read from
the disk is offered to host memory again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ringjax.checks import boolean, integer, positive_int
from ringjax.errors import InputTypeError, OptionError
from ringjax.store.disk_tier import DiskTier
from ringjax.store.host_tier import HostTier
from ringjax.store.tier_policies import TierPolicy, tier_policy


@dataclasses.dataclass(kw_only=True)
class StoreCounters:
  """Counters of a store's reads and writes.

  Attributes:
    host_hits: Number of blocks found in host memory.
    disk_hits: Number of blocks read from the disk.
    misses: Number of requested blocks that the store did not have.
    host_bytes: Bytes of blocks found in host memory.
    disk_bytes: Bytes of blocks read from the disk.
    put: Number of blocks offered.
    put_bytes: Bytes of blocks offered.
    written: Number of blocks written to the disk.
    written_bytes: Bytes of blocks written to the disk.
    dropped: Number of blocks not written because too many were waiting.
    errors: Number of calls that raised an error not caused by the disk.
  """

  host_hits: int = 0
  disk_hits: int = 0
  misses: int = 0
  host_bytes: int = 0
  disk_bytes: int = 0
  put: int = 0
  put_bytes: int = 0
  written: int = 0
  written_bytes: int = 0
  dropped: int = 0
  errors: int = 0


class StoreFetch:
  """Read of some blocks in flight.

  Attributes:
    found: Payloads by key, so far.
  """

  def __init__(self) -> None:
    self.found: dict[bytes, Any] = {}
    self._done = threading.Event()

  @property
  def done(self) -> bool:
    """Whether all available payloads are in `found`."""
    return self._done.is_set()

  def wait(self, timeout: int | float | None = None) -> bool:
    """Waits until it is done and returns whether it is."""
    return self._done.wait(timeout)


class Store:
  """Store of blocks by their keys.

  Attributes:
    host: The tier in host memory, or None.
    disk: The tier on the disk, or None.
    counters: Counts of reads and writes.
  """

  def __init__(
    self,
    *,
    host: int = 0,
    disk: tuple[str | os.PathLike[str], int] | None = None,
    policy: TierPolicy
    | str
    | tuple[TierPolicy | str, TierPolicy | str] = "lru",
    sync: bool = False,
    queue: int = 1 << 28,
  ):
    """Opens a store.

    Args:
      host: Bytes in host memory; 0 for no such tier.
      disk: A folder and its bytes; None for no such tier.
      policy: "lru", "lfu", "once_used_first", "second_hit",
        "predicted_reuse", or a `TierPolicy`; or a pair of these, for host
        memory and for the disk.
      sync: Whether files are synced to the disk, see `disk_tier`.
      queue: Maximum bytes that wait to be written.

    Raises:
      OptionError: If there is no tier, an unknown policy, one object for two
        tiers, or a folder that is refused.
      InputTypeError: If arguments have other types.
    """
    integer("host", host, least=0)
    boolean("sync", sync)
    self._queue = positive_int("queue", queue)
    if not host and disk is None:
      raise OptionError(
        "host",
        "0 bytes, and no disk",
        "a tier",
        "pass host=1 << 30, or disk=(folder, bytes)",
      )
    if disk is not None and not (isinstance(disk, tuple) and len(disk) == 2):
      raise InputTypeError(
        "disk",
        type(disk).__name__,
        "a folder and its bytes",
        "pass disk=(folder, 1 << 33)",
      )
    pair = policy if isinstance(policy, tuple) else (policy, policy)
    if len(pair) != 2:
      raise OptionError(
        "policy",
        f"{len(pair)} policies",
        "one, or one for each of the two tiers",
        "pass policy=('lru', 'second_hit')",
      )
    first, second = map(tier_policy, pair)
    if first is second and host and disk is not None:
      raise OptionError(
        "policy",
        "one policy object for both tiers",
        "one for each: it remembers what is in its tier",
        "pass policy=(LRU(), LRU())",
      )
    self.host = HostTier(host, first) if host else None
    self.disk: DiskTier | None = None
    if disk is not None:
      self.disk = DiskTier(disk[0], disk[1], second, sync=sync)
    self.counters = StoreCounters()
    self._lock = threading.Lock()
    self._waiting: dict[bytes, bytes] = {}
    self._waiting_bytes = 0
    self._warned: set[str] = set()
    pool = concurrent.futures.ThreadPoolExecutor
    self._reader = pool(1, "ringjax store reads")
    self._writer = pool(1, "ringjax store writes")
    self._tell()

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def request(self, keys: Sequence[bytes]) -> None:
    """Notify the policies of a prompt's blocks, from the first one on."""
    keys = list(keys)
    for tier in (self.host, self.disk):
      if tier is not None:
        self._guarded(lambda tier=tier: tier.request(keys))

  def __contains__(self, key: bytes) -> bool:
    has_key = self._guarded(lambda: self._has(key))
    return bool(has_key)

  def _has(self, key: bytes) -> bool:
    tiers = (self.host, self._waiting, self.disk)
    return any(tier is not None and key in tier for tier in tiers)

  def put(self, key: bytes, payload: bytes) -> None:
    """Offers a block to the tiers.

    Args:
      key: Key, 32 bytes.
      payload: Bytes of the block.
    """
    with self._lock:
      self.counters.put += 1
      self.counters.put_bytes += len(payload)
    self._guarded(lambda: self._put(key, payload))

  def _put(self, key: bytes, payload: bytes) -> None:
    if self.host is not None:
      self.host.put(key, payload)
    if self.disk is None or key in self.disk:
      return
    with self._lock:
      if key in self._waiting:
        return
      if self._waiting_bytes + len(payload) > self._queue:
        self.counters.dropped += 1
        return
      self._waiting[key] = payload
      self._waiting_bytes += len(payload)
    self._writer.submit(self._guarded, lambda: self._write(key, payload))

  def _write(self, key: bytes, payload: bytes) -> None:
    assert self.disk is not None
    try:
      # It may have been written since it was looked up.
      if key not in self.disk and self.disk.put(key, payload):
        with self._lock:
          self.counters.written += 1
          self.counters.written_bytes += len(payload)
    finally:
      with self._lock:
        self._waiting_bytes -= len(self._waiting.pop(key, b""))
    self._tell()

  def remove(self, keys: Sequence[bytes]) -> None:
    """Removes blocks; returns when no tier has them.

    Args:
      keys: Keys of blocks that are no longer needed; missing ones are ignored.
    """
    for key in keys:
      if self.host is not None:
        self._guarded(lambda key=key: self.host.remove(key))
    disk = self.disk
    if disk is None:
      return

    def remove() -> None:
      for key in keys:
        disk.remove(key)

    # Queue it after the writes that were put before.
    self._guarded(lambda: self._writer.submit(remove).result())

  def get(self, key: bytes) -> Any:
    """Get the payload of a block, or None; reads the disk if needed."""
    payload = self._from_host(key)
    return self._from_disk(key) if payload is None else payload

  def _from_host(self, key: bytes) -> Any:
    payload = None if self.host is None else self.host.get(key)
    if payload is None:
      payload = self._waiting.get(key)
    if payload is not None:
      with self._lock:
        self.counters.host_hits += 1
        self.counters.host_bytes += len(payload)
    return payload

  def _from_disk(self, key: bytes) -> Any:
    stored = None
    disk = self.disk
    if disk is not None:
      stored = self._guarded(lambda: disk.get(key))
      self._tell()
    with self._lock:
      if stored is None:
        self.counters.misses += 1
      else:
        self.counters.disk_hits += 1
        self.counters.disk_bytes += len(stored)
    if stored is not None and self.host is not None:
      host, payload = self.host, bytes(stored)
      self._guarded(lambda: host.put(key, payload))
    return stored

  def fetch(self, keys: Sequence[bytes]) -> StoreFetch:
    """Start reading some blocks; those on the disk are read by a thread.

    Args:
      keys: Keys of the blocks. Reading stops at the first missing block.
    """
    fetch = StoreFetch()
    remaining = list(keys)
    while remaining:
      payload = self._from_host(remaining[0])
      if payload is None:
        break
      fetch.found[remaining.pop(0)] = payload
    if not remaining or self.disk is None:
      self.counters.misses += bool(remaining)
      fetch._done.set()
      return fetch

    def read() -> None:
      try:
        for key in remaining:
          payload = self.get(key)
          if payload is None:
            return
          fetch.found[key] = payload
      finally:
        fetch._done.set()

    try:
      self._reader.submit(read)
    except RuntimeError:
      # The store is closed.
      fetch._done.set()
    return fetch

  # -------------------------------------------------------------------------
  # The end, and what goes wrong
  # -------------------------------------------------------------------------

  def flush(self) -> None:
    """Waits until all blocks put before are written or refused."""
    self._guarded(lambda: self._writer.submit(lambda: None).result())

  def close(self) -> None:
    """Writes the waiting blocks and ends the threads; frees host memory."""
    self._writer.shutdown()
    self._reader.shutdown()

  def __enter__(self) -> Store:
    return self

  def __exit__(
    self, *_: BaseException | type[BaseException] | TracebackType | None
  ) -> None:
    self.close()

  def _guarded(self, call: Callable[[], Any]) -> Any:
    """Run a call; returns its result, or None if it raises."""
    try:
      return call()
    except Exception as error:
      with self._lock:
        self.counters.errors += 1
      self._warn("errors", f"raised {error!r}")
      return None

  def _tell(self) -> None:
    """Warn of failures of the disk, once for each kind."""
    disk = self.disk
    if disk is None:
      return
    for kind, words in (
      ("write_errors", "cannot be written"),
      ("read_errors", "cannot be read"),
      ("corrupt", "held a file that is not what was written"),
    ):
      if getattr(disk, kind):
        self._warn(kind, f"{disk.root} {words}: {disk.last_error}")

  def _warn(self, kind: str, words: str) -> None:
    with self._lock:
      if kind in self._warned:
        return
      self._warned.add(kind)
    text = f"the block store {words}; it goes on, and counts (store.{kind})"
    try:
      warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
      # Warnings are errors here, and nothing may raise into an engine.
      logging.getLogger(__name__).warning(text)

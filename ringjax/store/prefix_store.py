"""A store of blocks in two tiers: host memory, and a folder on disk.

Guarantees: `get` returns the bytes that were put under a key, or None. Nothing
that a disk, a policy or another process does raises here: it is counted, and
the first of each is a warning. Several threads may call.
Cost: `put` and `request` return at once; files are written by one thread and
read by another.
Memory: the budget of the host tier, and what is on its way to the disk, at
most `queue` bytes; a block beyond that is not written.

A store knows keys and bytes, nothing of what they mean. A block that is put is
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
from typing import Any

from ringjax.checks import boolean, integer, positive_int
from ringjax.errors import InputTypeError, OptionError
from ringjax.store.disk_tier import DiskTier
from ringjax.store.host_tier import HostTier
from ringjax.store.tier_policies import TierPolicy, tier_policy


@dataclasses.dataclass(kw_only=True)
class StoreCounters:
  """What a store has done.

  Attributes:
    host_hits: blocks that were found in host memory.
    disk_hits: blocks that were read from the disk.
    misses: blocks that were asked for and not there.
    host_bytes: of blocks that were found in host memory.
    disk_bytes: of blocks that were read from the disk.
    put: blocks that were offered.
    put_bytes: their bytes.
    written: blocks that were written to the disk.
    written_bytes: their bytes.
    dropped: blocks that were not written because too many were waiting.
    errors: calls in which something raised that is none of the disk's.
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
  """Blocks on their way out of a store.

  Attributes:
    found: payloads by key, so far.
  """

  def __init__(self) -> None:
    self.found: dict[bytes, Any] = {}
    self._done = threading.Event()

  @property
  def done(self) -> bool:
    """Whether all that is there is in `found`."""
    return self._done.is_set()

  def wait(self, timeout: int | float | None = None) -> bool:
    """Waits until it is done; whether it is."""
    return self._done.wait(timeout)


class Store:
  """Blocks by their keys.

  Attributes:
    host: the tier in host memory, or None.
    disk: the tier on the disk, or None.
    counters: what was done.
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
      host: bytes in host memory; 0 is none.
      disk: a folder and its bytes; None is none.
      policy: "lru", "lfu", "once_used_first", "second_hit",
        "predicted_reuse", or a `TierPolicy`; a pair of these is for host
        memory and for the disk.
      sync: whether files are synced to the disk, see `disk_tier`.
      queue: bytes that may wait to be written.

    Raises:
      OptionError: no tier at all, a policy that there is not, one object for
        two tiers, or a folder that is refused.
      InputTypeError: arguments of other types.
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
    self.disk = None
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
    """Tells the policies of a prompt: its blocks, from the first one on."""
    keys = list(keys)
    for tier in (self.host, self.disk):
      if tier is not None:
        self._guarded(lambda tier=tier: tier.request(keys))

  def __contains__(self, key: bytes) -> bool:
    found = self._guarded(lambda: self._has(key))
    return bool(found)

  def _has(self, key: bytes) -> bool:
    tiers = (self.host, self._waiting, self.disk)
    return any(tier is not None and key in tier for tier in tiers)

  def put(self, key: bytes, payload: bytes) -> None:
    """Offers a block to the tiers.

    Args:
      key: 32 bytes.
      payload: its bytes.
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
      # It may have been written since it was looked for.
      if key not in self.disk and self.disk.put(key, payload):
        with self._lock:
          self.counters.written += 1
          self.counters.written_bytes += len(payload)
    finally:
      with self._lock:
        self._waiting_bytes -= len(self._waiting.pop(key, b""))
    self._tell()

  def remove(self, keys: Sequence[bytes]) -> None:
    """Lets blocks go; returns when no tier has them.

    Args:
      keys: of blocks that nobody will ask for; those that are not there are
        left out.
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

    # Behind writes that were put before.
    self._guarded(lambda: self._writer.submit(remove).result())

  def get(self, key: bytes) -> Any:
    """The payload of a block, or None; reads the disk if it must."""
    found = self._from_host(key)
    return self._from_disk(key) if found is None else found

  def _from_host(self, key: bytes) -> Any:
    found = None if self.host is None else self.host.get(key)
    if found is None:
      found = self._waiting.get(key)
    if found is not None:
      with self._lock:
        self.counters.host_hits += 1
        self.counters.host_bytes += len(found)
    return found

  def _from_disk(self, key: bytes) -> Any:
    found = None
    disk = self.disk
    if disk is not None:
      found = self._guarded(lambda: disk.get(key))
      self._tell()
    with self._lock:
      if found is None:
        self.counters.misses += 1
      else:
        self.counters.disk_hits += 1
        self.counters.disk_bytes += len(found)
    if found is not None and self.host is not None:
      host, payload = self.host, bytes(found)
      self._guarded(lambda: host.put(key, payload))
    return found

  def fetch(self, keys: Sequence[bytes]) -> StoreFetch:
    """Begins to get some blocks; those on the disk are read by a thread.

    Args:
      keys: of the blocks. None is read behind one that is not there.
    """
    fetch = StoreFetch()
    rest = list(keys)
    while rest:
      found = self._from_host(rest[0])
      if found is None:
        break
      fetch.found[rest.pop(0)] = found
    if not rest or self.disk is None:
      self.counters.misses += bool(rest)
      fetch._done.set()
      return fetch

    def read() -> None:
      try:
        for key in rest:
          found = self.get(key)
          if found is None:
            return
          fetch.found[key] = found
      finally:
        fetch._done.set()

    try:
      self._reader.submit(read)
    except RuntimeError:
      # It is closed.
      fetch._done.set()
    return fetch

  # -------------------------------------------------------------------------
  # The end, and what goes wrong
  # -------------------------------------------------------------------------

  def flush(self) -> None:
    """Waits until all that was put before is written or refused."""
    self._guarded(lambda: self._writer.submit(lambda: None).result())

  def close(self) -> None:
    """Writes what waits and ends the threads; host memory is given up."""
    self._writer.shutdown()
    self._reader.shutdown()

  def __enter__(self) -> Store:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _guarded(self, call: Callable[[], Any]) -> Any:
    """What a call returns, or None if it raises."""
    try:
      return call()
    except Exception as error:
      with self._lock:
        self.counters.errors += 1
      self._warn("errors", f"raised {error!r}")
      return None

  def _tell(self) -> None:
    """Warns of what the disk refused, once of each kind."""
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

"""Store of blocks in tiers: host memory, a folder on disk, object storage.

Guarantees: `get` returns the bytes that were put under a key, or None. Failures
of a disk, a storage, a policy or another process do not raise: they are
counted, and the first of each kind is logged as a warning. Several threads may
call.
Cost: `put` and `request` return at once; files are written by one thread and
read by another, objects by `OBJECT_THREADS`.
Memory: the budget of the host tier, and the blocks that wait to be written, at
most `queue` bytes; a block beyond that is not written.

A store treats keys and blocks as plain bytes. A block that is put is offered to
all tiers, whose policies admit it or not; one that is read from a tier is
offered to those before it again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
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
from ringjax.store.indexed_tier import IndexedTier
from ringjax.store.object_tier import ObjectTier
from ringjax.store.tier_policies import TierPolicy, tier_policy

# Requests to an object storage at a time, of reads and of writes.
OBJECT_THREADS = 8


@dataclasses.dataclass(kw_only=True)
class StoreCounters:
  """Counters of a store's reads and writes.

  Attributes:
    host_hits: Number of blocks found in host memory.
    disk_hits: Number of blocks read from the disk.
    object_hits: Number of blocks read from objects.
    misses: Number of requested blocks that the store did not have.
    host_bytes: Bytes of blocks found in host memory.
    disk_bytes: Bytes of blocks read from the disk.
    object_bytes: Bytes of blocks read from objects.
    put: Number of blocks offered.
    put_bytes: Bytes of blocks offered.
    written: Number of blocks written to the disk.
    written_bytes: Bytes of blocks written to the disk.
    objects_written: Number of blocks written as objects.
    objects_written_bytes: Bytes of blocks written as objects.
    dropped: Number of blocks not written because too many were waiting.
    errors: Number of calls that raised an error not caused by a disk or a
      storage.
  """

  host_hits: int = 0
  disk_hits: int = 0
  object_hits: int = 0
  misses: int = 0
  host_bytes: int = 0
  disk_bytes: int = 0
  object_bytes: int = 0
  put: int = 0
  put_bytes: int = 0
  written: int = 0
  written_bytes: int = 0
  objects_written: int = 0
  objects_written_bytes: int = 0
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
    objects: The tier in an object storage, or None.
    counters: Counts of reads and writes.
  """

  def __init__(
    self,
    *,
    host: int = 0,
    disk: tuple[str | os.PathLike[str], int] | None = None,
    objects: tuple[str, int] | None = None,
    policy: TierPolicy | str | tuple[TierPolicy | str, ...] = "lru",
    sync: bool = False,
    queue: int = 1 << 28,
  ):
    """Opens a store.

    Args:
      host: Bytes in host memory; 0 for no such tier.
      disk: A folder and its bytes; None for no such tier.
      objects: An address, gs://bucket/name for example, and its bytes; None
        for no such tier.
      policy: "lru", "lfu", "once_used_first", "second_hit",
        "predicted_reuse", or a `TierPolicy`; or some of these, for host memory,
        for the disk and for objects. The last may be left out where there are
        no objects.
      sync: Whether files are synced to the disk, see `disk_tier`.
      queue: Maximum bytes that wait to be written.

    Raises:
      OptionError: If there is no tier, an unknown policy, one object for two
        tiers, or a folder or an address that is refused.
      InputTypeError: If arguments have other types.
      StorageError: If objects can't be written.
    """
    integer("host", host, least=0)
    boolean("sync", sync)
    self._queue = positive_int("queue", queue)
    if not host and disk is None and objects is None:
      raise OptionError(
        "host",
        "0 bytes, and no disk or objects",
        "a tier",
        "pass host=1 << 30, or disk=(folder, bytes)",
      )
    for name, value, example in (
      ("disk", disk, "folder"),
      ("objects", objects, "'gs://bucket/name'"),
    ):
      if value is not None and not (
        isinstance(value, tuple) and len(value) == 2
      ):
        raise InputTypeError(
          name,
          type(value).__name__,
          "a place and its bytes",
          f"pass {name}=({example}, 1 << 33)",
        )
    policies = _policies(policy, (bool(host), disk is not None, bool(objects)))
    self.host = HostTier(host, policies[0]) if host else None
    self.disk: DiskTier | None = None
    if disk is not None:
      self.disk = DiskTier(disk[0], disk[1], policies[1], sync=sync)
    self.objects: ObjectTier | None = None
    if objects is not None:
      self.objects = ObjectTier(objects[0], objects[1], policies[2])
    # Tiers that are read and written by threads, in the order of reads.
    self._outside: list[IndexedTier] = [
      tier for tier in (self.disk, self.objects) if tier is not None
    ]
    self.counters = StoreCounters()
    self._lock = threading.Lock()
    self._waiting: dict[bytes, bytes] = {}
    # Tiers to which a waiting block is still to be written.
    self._unwritten: dict[bytes, int] = {}
    self._waiting_bytes = 0
    self._warned: set[str] = set()
    pool = concurrent.futures.ThreadPoolExecutor
    self._reader = pool(1, "ringjax store reads")
    self._writer = pool(1, "ringjax store writes")
    threads = OBJECT_THREADS if self.objects is not None else 1
    self._object_reader = pool(threads, "ringjax store reads of objects")
    self._object_writer = pool(threads, "ringjax store writes of objects")
    self._object_writes: set[concurrent.futures.Future[None]] = set()
    self._tell()

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def request(self, keys: Sequence[bytes]) -> None:
    """Notify the policies of a prompt's blocks, from the first one on."""
    keys = list(keys)
    for tier in (self.host, *self._outside):
      if tier is not None:
        self._guarded(lambda tier=tier: tier.request(keys))

  def __contains__(self, key: bytes) -> bool:
    has_key = self._guarded(lambda: self._has(key))
    return bool(has_key)

  def _has(self, key: bytes) -> bool:
    tiers = (self.host, self._waiting, *self._outside)
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
    tiers = [tier for tier in self._outside if key not in tier]
    if not tiers:
      return
    with self._lock:
      if key in self._waiting:
        return
      if self._waiting_bytes + len(payload) > self._queue:
        self.counters.dropped += 1
        return
      self._waiting[key] = payload
      self._unwritten[key] = len(tiers)
      self._waiting_bytes += len(payload)
    for tier in tiers:
      write = functools.partial(self._write, tier, key, payload)
      if tier is self.disk:
        self._writer.submit(self._guarded, write)
        continue
      written = self._object_writer.submit(self._guarded, write)
      with self._lock:
        self._object_writes.add(written)
      written.add_done_callback(self._forget)

  def _forget(self, written: concurrent.futures.Future[None]) -> None:
    with self._lock:
      self._object_writes.discard(written)

  def _write(self, tier: IndexedTier, key: bytes, payload: bytes) -> None:
    try:
      # It may have been written since it was looked up.
      if key not in tier and tier.put(key, payload):
        with self._lock:
          if tier is self.disk:
            self.counters.written += 1
            self.counters.written_bytes += len(payload)
          else:
            self.counters.objects_written += 1
            self.counters.objects_written_bytes += len(payload)
    finally:
      with self._lock:
        self._unwritten[key] -= 1
        if not self._unwritten[key]:
          del self._unwritten[key]
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
    # After the writes that were put before.
    for tier in self._outside:
      remove = functools.partial(_remove_all, tier, keys)
      if tier is self.disk:
        self._guarded(lambda call=remove: self._writer.submit(call).result())
      else:
        self._await_objects()
        self._guarded(remove)

  def get(self, key: bytes) -> Any:
    """Get the payload of a block, or None; reads disk and objects if needed."""
    payload = self._from_host(key)
    return self._from_outside(key) if payload is None else payload

  def _from_host(self, key: bytes) -> Any:
    payload = None if self.host is None else self.host.get(key)
    if payload is None:
      payload = self._waiting.get(key)
    if payload is not None:
      with self._lock:
        self.counters.host_hits += 1
        self.counters.host_bytes += len(payload)
    return payload

  def _from_outside(self, key: bytes) -> Any:
    for tier in self._outside:
      stored = self._guarded(lambda tier=tier: tier.get(key))
      if stored is None:
        continue
      with self._lock:
        if tier is self.disk:
          self.counters.disk_hits += 1
          self.counters.disk_bytes += len(stored)
        else:
          self.counters.object_hits += 1
          self.counters.object_bytes += len(stored)
      if self.host is not None or tier is not self._outside[0]:
        payload = bytes(stored)
        self._guarded(functools.partial(self._put, key, payload))
      self._tell()
      return stored
    with self._lock:
      self.counters.misses += 1
    self._tell()
    return None

  def fetch(self, keys: Sequence[bytes]) -> StoreFetch:
    """Start reading some blocks; threads read those outside of memory.

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
    if not remaining or not self._outside:
      self.counters.misses += bool(remaining)
      fetch._done.set()
      return fetch

    def read() -> None:
      try:
        # Of objects several at a time: each request takes long.
        step = 1 if self.objects is None else OBJECT_THREADS
        for start in range(0, len(remaining), step):
          batch = remaining[start : start + step]
          payloads = (
            map(self.get, batch)
            if step == 1
            else self._object_reader.map(self.get, batch)
          )
          for key, payload in zip(batch, payloads, strict=True):
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
    self._await_objects()

  def _await_objects(self) -> None:
    """Waits until objects put before are written or refused."""
    with self._lock:
      writes = list(self._object_writes)
    concurrent.futures.wait(writes)

  def close(self) -> None:
    """Writes the waiting blocks and ends the threads; frees host memory."""
    for pool in (self._reader, self._object_reader):
      pool.shutdown()
    for pool in (self._writer, self._object_writer):
      pool.shutdown()

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
    """Warn of failures of disk and objects, once for each kind."""
    for tier in self._outside:
      name = "disk" if tier is self.disk else "objects"
      for kind, words in (
        ("write_errors", "cannot be written"),
        ("read_errors", "cannot be read"),
        ("corrupt", "held a block that is not what was written"),
      ):
        if getattr(tier, kind):
          text = f"{tier.place} {words}: {tier.last_error}"
          self._warn(f"{name}.{kind}", text)

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


def _policies(
  policy: TierPolicy | str | tuple[TierPolicy | str, ...],
  present: tuple[bool, bool, bool],
) -> list[TierPolicy]:
  """Policies of host memory, disk and objects.

  Args:
    policy: Policy of all tiers, or of each.
    present: Whether there is such a tier, of each.

  Raises:
    OptionError: If their number is another one, or tiers share an object.
  """
  count = 2 + present[2]
  given = policy if isinstance(policy, tuple) else (policy,) * count
  if len(given) != count:
    raise OptionError(
      "policy",
      f"{len(given)} policies",
      "one, or one for each of host memory, disk and objects"
      if present[2]
      else "one, or one for each of the two tiers",
      "pass policy=('lru', 'second_hit', 'lru')"
      if present[2]
      else "pass policy=('lru', 'second_hit')",
    )
  # Without objects the third one is not used.
  policies = [tier_policy(x) for x in (*given, "lru")[:3]]
  used = [x for x, in_use in zip(policies, present, strict=True) if in_use]
  if len({id(x) for x in used}) < len(used):
    raise OptionError(
      "policy",
      "one policy object for several tiers",
      "one for each: it remembers what is in its tier",
      "pass policy=(LRU(), LRU())",
    )
  return policies


def _remove_all(tier: IndexedTier, keys: Sequence[bytes]) -> None:
  for key in keys:
    tier.remove(key)

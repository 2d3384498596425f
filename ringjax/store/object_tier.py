"""Blocks as objects of an object storage, which several machines may share.

Guarantees: those of an `IndexedTier`. An object is written in one request,
whole or not at all. While the storage does not answer, nothing waits for it:
after an error no request is sent for `FIRST_PAUSE_S`, then twice as long, at
most `MOST_PAUSE_S`.
Cost: a read or a write is one request; opening lists the address once.

Blocks that another process writes are found once the address is listed again,
as are those that could not be deleted.
Blocks of earlier processes count as older than all new ones, in the order of
their keys. A digest is no defence against those who can write to the address:
access to it is the bucket's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ringjax.errors import InputTypeError, OptionError
from ringjax.paths import ObjectPath, as_path, check_writable
from ringjax.store.block_file import KEY_BYTES
from ringjax.store.indexed_tier import IndexedTier
from ringjax.store.tier_policies import TierPolicy

SUFFIX = ".kv"
# Seconds without requests after an error; they double with each error.
FIRST_PAUSE_S, MOST_PAUSE_S = 10.0, 600.0


class ObjectTier(IndexedTier):
  """Objects below an address that a policy keeps within a budget.

  Attributes:
    root: Address of the folder of objects.
  """

  def __init__(self, root: str, budget: int, policy: TierPolicy):
    """Opens an address.

    Args:
      root: Address, gs://bucket/name for example.
      budget: Maximum bytes of all objects.
      policy: Policy that chooses the objects to keep.

    Raises:
      InputTypeError: If `root` is no text.
      OptionError: If `root` is no address, or its client is not installed.
      StorageError: If objects can't be written there.
    """
    if not isinstance(root, str | ObjectPath):
      raise InputTypeError(
        "objects",
        type(root).__name__,
        "an address",
        "pass objects=('gs://bucket/name', bytes)",
      )
    place = as_path(root, "objects")
    if not isinstance(place, ObjectPath):
      raise OptionError(
        "objects",
        str(root),
        "an address that begins gs:// or s3://",
        "pass a folder as disk=(folder, bytes)",
      )
    self.root = place
    super().__init__("objects", str(place), budget, policy)
    self._quiet_until, self._pause_s = 0.0, 0.0
    check_writable(place / "blocks")
    self._list()

  def __contains__(self, key: bytes) -> bool:
    return key in self._sizes and not self._paused

  @property
  def _paused(self) -> bool:
    return time.monotonic() < self._quiet_until

  def _address(self, key: bytes) -> str:
    name = key.hex()
    return str(self.root / name[:2] / (name + SUFFIX))

  def _blocks(self) -> Iterator[tuple[int, bytes, int]]:
    for address, facts in self.root.store.find(str(self.root)).items():
      name = address.rpartition("/")[2]
      try:
        key = bytes.fromhex(name.removesuffix(SUFFIX))
      except ValueError:
        continue
      if name.endswith(SUFFIX) and len(key) == KEY_BYTES:
        yield 0, key, facts.size

  def _read(self, key: bytes) -> bytes:
    data = self.root.store.read(self._address(key))
    self._pause_s = 0.0
    return data

  def _write(self, key: bytes, number: int, parts: tuple[bytes, bytes]) -> None:
    self.root.store.write(self._address(key), b"".join(parts))
    self._pause_s = 0.0

  def _delete(self, key: bytes) -> None:
    try:
      self.root.store.delete(self._address(key))
    except OSError as error:
      self._failed(error)
      raise

  def get(self, key: bytes) -> memoryview | None:
    if self._paused:
      return None
    return super().get(key)

  def put(self, key: bytes, payload: bytes) -> bool:
    if self._paused:
      self.skipped += 1
      return False
    return super().put(key, payload)

  def remove(self, key: bytes) -> None:
    if self._paused:
      self._gone(key)
      return
    super().remove(key)

  def _failed(self, error: OSError, *, reading: bool = False) -> None:
    super()._failed(error, reading=reading)
    # Writes wait by the clock, as reads do, and not by their number.
    with self._lock:
      self._wait = 0
      if self._paused:
        # Threads that sent requests together have one failure.
        return
      self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
      self._quiet_until = time.monotonic() + self._pause_s

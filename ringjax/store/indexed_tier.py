"""Blocks in a place outside of memory, under a budget of bytes.

Guarantees: an error of the place is counted and never raised; a block that is
not what was written is removed, counted and never served. No lock is held while
a block is read or written.
Memory: about 200 bytes for each block, in the index, which is rebuilt from the
place whenever a tier is opened.

Each process on a place evicts when the blocks that it knows exceed the budget,
and lists the place again after it has written a sixteenth of the budget;
together they may exceed the budget by that much each.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterable

from ringjax.checks import integer
from ringjax.store.block_file import HEADER_BYTES, pack, unpack
from ringjax.store.tier_policies import TierPolicy

# Maximum number of writes skipped after an error; it doubles with each error.
_MOST_PAUSE = 1024


class IndexedTier(abc.ABC):
  """Blocks that a policy keeps within a budget; subclasses say where.

  Attributes:
    place: Folder or address of the blocks, for messages.
    budget: Maximum bytes of all blocks with their headers.
    nbytes: Bytes of the blocks that are known.
    evicted: Number of blocks removed to make room.
    refused: Number of blocks that were too large or not admitted.
    corrupt: Number of blocks whose contents did not match their digest.
    read_errors: Number of failed reads.
    write_errors: Number of failed writes.
    skipped: Number of writes skipped after an error.
    last_error: Text of the last error, or None.
  """

  def __init__(self, name: str, place: str, budget: int, policy: TierPolicy):
    """Makes an empty index; `_list` fills it.

    Args:
      name: Name of the argument of the budget, for errors.
      place: Folder or address of the blocks.
      budget: Maximum bytes of all blocks.
      policy: Policy that chooses the blocks to keep.
    """
    self.place = place
    self.budget = integer(name, budget, least=0)
    self.policy = policy
    self.nbytes = self.evicted = self.refused = self.corrupt = 0
    self.read_errors = self.write_errors = self.skipped = 0
    self.last_error: str | None = None
    self._sizes: dict[bytes, int] = {}
    self._lock = threading.Lock()
    self._pause = self._wait = 0
    # Bytes of blocks that threads are writing, which have their room already.
    self._writing = 0
    # Bytes and blocks that were written since the last listing began.
    self._unlisted = 0
    self._written_since: dict[bytes, int] = {}
    self._count = 0

  def __len__(self) -> int:
    return len(self._sizes)

  @abc.abstractmethod
  def __contains__(self, key: bytes) -> bool: ...

  # -------------------------------------------------------------------------
  # The place
  # -------------------------------------------------------------------------

  @abc.abstractmethod
  def _blocks(self) -> Iterable[tuple[int, bytes, int]]:
    """Order, key and bytes of each block that is there.

    Raises:
      OSError: If they can't be listed.
    """

  @abc.abstractmethod
  def _read(self, key: bytes) -> bytes:
    """Bytes of a block with its header.

    Raises:
      FileNotFoundError: If there is no such block.
      ValueError: If something else has its name.
      OSError: If it can't be read.
    """

  @abc.abstractmethod
  def _write(self, key: bytes, number: int, parts: tuple[bytes, bytes]) -> None:
    """Writes a block, whole or not at all.

    Args:
      key: Key of the block.
      number: Number of this write, which no other one of the tier has.
      parts: Header and payload of the block.

    Raises:
      OSError: If it can't be written.
    """

  @abc.abstractmethod
  def _delete(self, key: bytes) -> None:
    """Deletes a block, if it is there.

    Raises:
      OSError: If it can't be deleted.
    """

  def _list(self) -> None:
    """Rebuilds the index from the place."""
    with self._lock:
      self._unlisted = 0
      self._written_since = {}
    try:
      blocks = sorted(self._blocks())
    except OSError as error:
      self._failed(error, reading=True)
      return
    with self._lock:
      sizes = {key: size for _, key, size in blocks} | self._written_since
      for key in self._sizes.keys() - sizes.keys():
        self.policy.removed(key)
      new_keys = [key for key in sizes if key not in self._sizes]
      self._sizes, self.nbytes = sizes, sum(sizes.values())
      for key in new_keys:
        self.policy.added(key)

  # -------------------------------------------------------------------------
  # Blocks
  # -------------------------------------------------------------------------

  def request(self, keys: list[bytes]) -> None:
    """Records the blocks of a prompt."""
    with self._lock:
      self.policy.request(keys)

  def get(self, key: bytes) -> memoryview | None:
    """Reads the payload of a block; None if it is missing or damaged."""
    try:
      return unpack(key, self._read(key))
    except FileNotFoundError:
      self._gone(key)
    except ValueError as error:
      self.corrupt += 1
      self.last_error = f"{key.hex()}: {error}"
      self.remove(key)
    except OSError as error:
      self._failed(error, reading=True)
    return None

  def put(self, key: bytes, payload: bytes) -> bool:
    """Writes a block: returns whether it is there afterwards."""
    size = HEADER_BYTES + len(payload)
    with self._lock:
      if key in self._sizes:
        return True
      if size > self.budget or not self.policy.admit(key):
        self.refused += 1
        return False
      if self._wait:
        self._wait -= 1
        self.skipped += 1
        return False
      self._count += 1
      number = self._count
    if self._unlisted > self.budget // 16:
      self._list()
    # Before the write: the budget holds at every moment.
    if not self._reserve(size):
      return False
    try:
      self._write(key, number, pack(key, payload))
    except OSError as error:
      self._failed(error)
      return False
    finally:
      with self._lock:
        self._writing -= size
    with self._lock:
      self._pause = 0
      self._unlisted += size
      self.nbytes += size - self._sizes.get(key, 0)
      self._sizes[key] = self._written_since[key] = size
      self.policy.added(key)
    return True

  def _reserve(self, size: int) -> bool:
    """Evicts blocks until one fits, and reserves its bytes if it does."""
    while True:
      with self._lock:
        if self.nbytes + self._writing + size <= self.budget:
          self._writing += size
          return True
        victims = self.policy.victims()
        if not victims:
          self.refused += 1
          return False
      for victim in victims:
        self.evicted += 1
        self.remove(victim)

  def remove(self, key: bytes) -> None:
    """Removes a block, if it is there."""
    with contextlib.suppress(OSError):
      self._delete(key)
    self._gone(key)

  def _gone(self, key: bytes) -> None:
    with self._lock:
      self.nbytes -= self._sizes.pop(key, 0)
      self._written_since.pop(key, None)
      self.policy.removed(key)

  def _failed(self, error: OSError, *, reading: bool = False) -> None:
    self.last_error = str(error)
    if reading:
      self.read_errors += 1
      return
    with self._lock:
      self.write_errors += 1
      self._pause = min(_MOST_PAUSE, 2 * self._pause + 1)
      self._wait = self._pause

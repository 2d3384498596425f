"""Blocks in host memory, under a budget of bytes.

Guarantees: their bytes never exceed the budget.
Cost: a dict look-up, and the policy's.
"""

from __future__ import annotations

import threading

from ringjax.checks import integer
from ringjax.store.tier_policies import TierPolicy


class HostTier:
  """A dict of payloads that a policy keeps within a budget.

  Attributes:
    budget: Maximum bytes of all payloads.
    nbytes: Bytes of the payloads in the tier.
    evicted: Number of blocks removed to make room.
    refused: Number of blocks that were too large or not admitted.
  """

  def __init__(self, budget: int, policy: TierPolicy):
    self.budget = integer("host", budget, least=0)
    self.policy = policy
    self.nbytes = self.evicted = self.refused = 0
    self._blocks: dict[bytes, bytes] = {}
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return len(self._blocks)

  def __contains__(self, key: bytes) -> bool:
    return key in self._blocks

  def request(self, keys: list[bytes]) -> None:
    """Records the blocks of a prompt."""
    with self._lock:
      self.policy.request(keys)

  def get(self, key: bytes) -> bytes | None:
    """The payload of a block, or None."""
    return self._blocks.get(key)

  def remove(self, key: bytes) -> None:
    """Removes a block, if it is in the tier."""
    with self._lock:
      payload = self._blocks.pop(key, None)
      if payload is not None:
        self.nbytes -= len(payload)
        self.policy.removed(key)

  def put(self, key: bytes, payload: bytes) -> bool:
    """Adds a block: returns whether it is in the tier afterwards."""
    with self._lock:
      if key in self._blocks:
        return True
      size = len(payload)
      if size > self.budget or not self.policy.admit(key):
        self.refused += 1
        return False
      self._blocks[key] = payload
      self.nbytes += size
      self.policy.added(key)
      while self.nbytes > self.budget:
        # If the policy names no victim, the newest block is removed.
        for victim in self.policy.victims() or [key]:
          self.nbytes -= len(self._blocks.pop(victim))
          self.policy.removed(victim)
          self.evicted += 1
      return key in self._blocks

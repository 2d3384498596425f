"""Hit rates of tier policies, by replaying a trace of prompts.

Guarantees: counts, by the policy objects that also serve; no clock is read.
Cost: some microseconds a block.

A block is hit if it is in the tier and so are all before it: a prefix is of
use up to its first gap. All missing blocks of a prompt are offered to the tier,
from the last to the first; then blocks are evicted down to its capacity.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Hashable, Sequence

from ringjax.checks import positive_int
from ringjax.errors import DataError
from ringjax.store.tier_policies import TierPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyReplay:
  """Counts of a policy's hits in a replay.

  Attributes:
    policy: Name of the policy.
    blocks: Number of requested blocks.
    hits: Number of these that were in the tier, with all before them.
    admitted: Number of blocks that the tier added.
    evicted: Number of blocks that the tier evicted.
  """

  policy: str
  blocks: int
  hits: int
  admitted: int
  evicted: int

  @property
  def rate(self) -> float:
    """Hit rate, in percent of the requested blocks."""
    return 100 * self.hits / max(1, self.blocks)


def replay(
  requests: Sequence[Sequence[Hashable]], capacity: int, policy: TierPolicy
) -> PolicyReplay:
  """Replays prompts over one tier.

  Args:
    requests: Keys of each prompt's blocks, first to last.
    capacity: Number of blocks that the tier holds.
    policy: New policy.
  """
  positive_int("capacity", capacity)
  present: set[Hashable] = set()
  blocks = hits = admitted = evicted = 0
  for keys in requests:
    blocks += len(keys)
    for key in keys:
      if key not in present:
        break
      hits += 1
    policy.request(keys)
    for key in reversed(keys):
      if key not in present and policy.admit(key):
        present.add(key)
        policy.added(key)
        admitted += 1
    while len(present) > capacity:
      for victim in policy.victims(len(present) - capacity):
        present.remove(victim)
        policy.removed(victim)
        evicted += 1
  return PolicyReplay(
    policy=policy.name,
    blocks=blocks,
    hits=hits,
    admitted=admitted,
    evicted=evicted,
  )


def most_hits(requests: Sequence[Sequence[Hashable]]) -> int:
  """Count the hits of a tier of unlimited capacity."""
  seen: set[Hashable] = set()
  hits = 0
  for keys in requests:
    for key in keys:
      if key not in seen:
        break
      hits += 1
    seen.update(keys)
  return hits


def read_trace(path: str | os.PathLike[str]) -> list[list[int]]:
  """Read the blocks of each prompt from a trace in Mooncake's format.

  Args:
    path: File of JSON objects, one a line, whose `hash_ids` are the ids of a
      prompt's blocks; an id stands for its whole prefix.

  Raises:
    DataError: If the file is missing, or a line has another form.
  """
  prompts: list[list[int]] = []
  try:
    with open(path, encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          prompts.append(_ids(line, f"{path}, line {number}"))
  except (OSError, UnicodeError) as error:
    raise DataError(
      "trace", f"{path}: {error}", "a file of JSON lines", "pass another file"
    ) from None
  if not prompts:
    raise DataError(
      "trace", f"{path}: no line", "a prompt a line", "pass another file"
    )
  return prompts


def _ids(line: str, where: str) -> list[int]:
  try:
    value = json.loads(line)
  except ValueError:
    value = None
  ids = value.get("hash_ids") if isinstance(value, dict) else None
  if not isinstance(ids, list) or not all(type(block) is int for block in ids):
    raise DataError(
      "trace",
      f"{where[-120:]} without hash_ids",
      '{"hash_ids": [1, 2], ...}',
      "pass a trace in Mooncake's format",
    )
  return ids

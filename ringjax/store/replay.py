"""What policies would have hit, by replaying a trace of prompts.

Guarantees: counts, by the very objects that serve; no clock is involved.
Cost: some microseconds a block.

A block is hit if it is in the tier and so are all before it: a prefix is of
use up to its first gap. All blocks of a prompt that are not there are offered
to the tier, from the last to the first; then the tier goes back to its size.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Hashable, Sequence
from typing import Any

from ringjax.checks import positive_int
from ringjax.errors import DataError
from ringjax.store.tier_policies import TierPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyReplay:
  """What a policy hit.

  Attributes:
    policy: its name.
    blocks: that were asked for.
    hits: of these, blocks that were there, with all before them.
    admitted: blocks that came in.
    evicted: blocks that went.
  """

  policy: str
  blocks: int
  hits: int
  admitted: int
  evicted: int

  @property
  def rate(self) -> float:
    """Hits of all blocks, in percent."""
    return 100 * self.hits / max(1, self.blocks)


def replay(
  requests: Sequence[Sequence[Hashable]], capacity: int, policy: TierPolicy
) -> PolicyReplay:
  """Replays prompts over one tier.

  Args:
    requests: of each prompt its blocks' keys, first to last.
    capacity: blocks that the tier holds.
    policy: a new one.
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
  """What a tier without limits hits."""
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
  """The blocks of each prompt of a trace as Mooncake publishes them.

  Args:
    path: a file of JSON objects, one a line, whose `hash_ids` are the ids of
      a prompt's blocks; an id stands for its whole prefix.

  Raises:
    DataError: no such file, or a line that is none of these.
  """
  found: list[list[int]] = []
  try:
    with open(path, encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          found.append(_ids(line, f"{path}, line {number}"))
  except (OSError, UnicodeError) as error:
    raise DataError(
      "trace", f"{path}: {error}", "a file of JSON lines", "pass another file"
    ) from None
  if not found:
    raise DataError(
      "trace", f"{path}: no line", "a prompt a line", "pass another file"
    )
  return found


def _ids(line: str, where: str) -> list[int]:
  try:
    value: Any = json.loads(line)
  except ValueError:
    value = None
  ids = value.get("hash_ids") if isinstance(value, dict) else None
  if not isinstance(ids, list) or not all(type(x) is int for x in ids):
    raise DataError(
      "trace",
      f"{where[-120:]} without hash_ids",
      '{"hash_ids": [1, 2], ...}',
      "pass a trace in Mooncake's format",
    )
  return ids

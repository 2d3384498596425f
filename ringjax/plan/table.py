"""Partitions that were found, by length of the prompt, to interpolate between.

Guarantees: a table says for which model, devices and links it holds, and is
refused for any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.plan import files
from ringjax.plan.balance import round_to_tiles
from ringjax.plan.cost import Network, Profile

FORMAT = "ringjax.kvr-table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableKey:
  """The model, devices and links for which a table's partitions hold."""

  model: str
  hardware: str
  ranks: int
  bandwidth: int | float

  def __post_init__(self) -> None:
    positive_int("ranks", self.ranks)
    number("bandwidth", self.bandwidth, least=0)

  @classmethod
  def of(cls, profile: Profile, network: Network, ranks: int) -> TableKey:
    """The key of a model on ranks with these links."""
    return cls(
      model=profile.model,
      hardware=profile.hardware,
      ranks=ranks,
      bandwidth=network.bandwidth,
    )

  def check(self, other: TableKey) -> None:
    """Refuses a table of another key.

    Raises:
      OptionError: it names what differs.
    """
    for field in dataclasses.fields(self):
      mine, its = getattr(self, field.name), getattr(other, field.name)
      same = mine == its
      if field.name == "bandwidth":
        same = math.isclose(mine, its, rel_tol=1e-6)
      if not same:
        raise OptionError(
          "table",
          f"one for {field.name} {its}",
          f"{field.name} {mine}",
          "search again or pass another table",
        )


@dataclasses.dataclass(frozen=True)
class PartitionTable:
  """Partitions that were found, by prompt length.

  Attributes:
    key: the model, devices and links for which they hold.
    entries: shares of the ranks, by tokens of the prompt.
  """

  key: TableKey
  entries: Mapping[int, tuple[float, ...]]

  def __post_init__(self) -> None:
    if not self.entries:
      raise OptionError(
        "table", "no entries", "one or more", "search some first"
      )
    for tokens, shares in self.entries.items():
      positive_int("table", tokens)
      for share in shares:
        number("share", share, least=0, most=1)
      total = math.fsum(shares)
      right = len(shares) == self.key.ranks and min(shares) > 0
      if not right or not math.isclose(total, 1.0, abs_tol=1e-6):
        raise OptionError(
          "table",
          f"shares {shares}, {total} in all, at {tokens} tokens",
          f"{self.key.ranks} numbers above 0 that add up to 1",
          "search the entry again",
        )

  def shares(self, tokens: int) -> tuple[float, ...]:
    """Shares for a prompt: between the two nearest lengths, linearly.

    Below the first and above the last entry that entry's.
    """
    positive_int("tokens", tokens)
    known = sorted(self.entries)
    columns = zip(*(self.entries[n] for n in known), strict=True)
    return tuple(float(np.interp(tokens, known, x)) for x in columns)

  def lengths(self, tokens: int, tile: int = 1) -> tuple[int, ...]:
    """The partition of a prompt, in whole tiles.

    Raises:
      OptionError: fewer tiles than ranks.
    """
    return round_to_tiles(self.shares(tokens), tokens, tile)

  def joined(self, other: PartitionTable) -> PartitionTable:
    """Both tables' entries; where both have one, the other's.

    Raises:
      OptionError: their keys differ.
    """
    self.key.check(other.key)
    return PartitionTable(self.key, {**self.entries, **other.entries})

  def save(self, path: str) -> None:
    """Writes it as JSON, whole or not at all.

    Raises:
      OptionError: the path cannot be written to.
    """
    entries = [
      {"tokens": tokens, "shares": list(self.entries[tokens])}
      for tokens in sorted(self.entries)
    ]
    body = {"key": dataclasses.asdict(self.key), "entries": entries}
    files.write(path, FORMAT, body)

  @classmethod
  def load(cls, path: str, key: TableKey | None = None) -> PartitionTable:
    """Reads a table; with `key` it must be one for it.

    Raises:
      OptionError: the file cannot be read, or the key differs.
      CheckpointFormatError: it does not hold a table.
    """
    make = lambda body: cls(
      files.as_dataclass(TableKey, body["key"]), _entries(body["entries"])
    )
    table = files.load(path, FORMAT, make, "a table of partitions")
    if key is not None:
      key.check(table.key)
    return table


def _entries(value: Any) -> dict[int, tuple[float, ...]]:
  found: dict[int, tuple[float, ...]] = {}
  for entry in value:
    tokens = positive_int("tokens", entry["tokens"])
    if tokens in found:
      raise TypeError(f"two entries for {tokens} tokens")
    found[tokens] = tuple(number("share", s) for s in entry["shares"])
  return found

"""Tables of searched partitions by prompt length, with interpolation.

Guarantees: a table states the model, devices and links for which it holds, and
is refused for any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import files
from ringjax.plan.cost import Profile
from ringjax.plan.kv_runahead.balance import round_to_tiles

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
  def of(cls, profile: Profile, network: Link, ranks: int) -> TableKey:
    """Make the key of a model on ranks with these links."""
    return cls(
      model=profile.model,
      hardware=profile.hardware,
      ranks=ranks,
      bandwidth=network.bandwidth,
    )

  def check(self, other: TableKey) -> None:
    """Check that a table has this key.

    Raises:
      OptionError: If not; it names the field that differs.
    """
    for field in dataclasses.fields(self):
      value, other_value = getattr(self, field.name), getattr(other, field.name)
      equal = value == other_value
      if field.name == "bandwidth":
        equal = math.isclose(value, other_value, rel_tol=1e-6)
      if not equal:
        raise OptionError(
          "table",
          f"one for {field.name} {other_value}",
          f"{field.name} {value}",
          "search again or pass another table",
        )


@dataclasses.dataclass(frozen=True)
class PartitionTable:
  """Searched partitions, by prompt length.

  Attributes:
    key: Model, devices and links for which they hold.
    entries: Shares of the ranks, by tokens of the prompt.
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
      valid = len(shares) == self.key.ranks and min(shares) > 0
      if not valid or not math.isclose(total, 1.0, abs_tol=1e-6):
        raise OptionError(
          "table",
          f"shares {shares}, {total} in all, at {tokens} tokens",
          f"{self.key.ranks} numbers above 0 that add up to 1",
          "search the entry again",
        )

  def shares(self, tokens: int) -> tuple[float, ...]:
    """Shares for a prompt, interpolated between the two nearest lengths.

    Below the first and above the last entry, that entry's shares.
    """
    positive_int("tokens", tokens)
    lengths = sorted(self.entries)
    columns = zip(*(self.entries[n] for n in lengths), strict=True)
    return tuple(float(np.interp(tokens, lengths, x)) for x in columns)

  def lengths(self, tokens: int, tile: int = 1) -> tuple[int, ...]:
    """Partition of a prompt, in whole tiles.

    Raises:
      OptionError: If there are fewer tiles than ranks.
    """
    return round_to_tiles(self.shares(tokens), tokens, tile)

  def joined(self, other: PartitionTable) -> PartitionTable:
    """Merge the entries of two tables; for equal lengths the other's.

    Raises:
      OptionError: If their keys differ.
    """
    self.key.check(other.key)
    return PartitionTable(self.key, {**self.entries, **other.entries})

  def save(self, path: str) -> None:
    """Write the table as JSON, whole or not at all.

    Raises:
      OptionError: If the path cannot be written to.
    """
    entries = [
      {"tokens": tokens, "shares": list(self.entries[tokens])}
      for tokens in sorted(self.entries)
    ]
    body = {"key": dataclasses.asdict(self.key), "entries": entries}
    files.write(path, FORMAT, body)

  @classmethod
  def load(cls, path: str, key: TableKey | None = None) -> PartitionTable:
    """Read a table; with `key` it must be the table's key.

    Raises:
      OptionError: If the file cannot be read, or the key differs.
      CheckpointFormatError: If it does not hold a table.
    """
    make = lambda body: cls(
      files.as_dataclass(TableKey, body["key"]), _entries(body["entries"])
    )
    table = files.load(path, FORMAT, make, "a table of partitions")
    if key is not None:
      key.check(table.key)
    return table


def _entries(value: Any) -> dict[int, tuple[float, ...]]:
  shares_by_tokens: dict[int, tuple[float, ...]] = {}
  for entry in value:
    tokens = positive_int("tokens", entry["tokens"])
    if tokens in shares_by_tokens:
      raise TypeError(f"two entries for {tokens} tokens")
    shares_by_tokens[tokens] = tuple(
      number("share", s) for s in entry["shares"]
    )
  return shares_by_tokens

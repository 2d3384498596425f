"""Partitions that were found, by length of the prompt, to interpolate between.

Law: a table says what it holds for, and is refused for anything else.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ringjax.errors import OptionError, RingjaxError
from ringjax.plan import cost, files
from ringjax.plan.balance import round_to_tiles
from ringjax.plan.cost import Network, Profile

FORMAT = "ringjax.kvr-table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """What a table's partitions hold for."""

  model: str
  hardware: str
  ranks: int
  bandwidth: int | float

  @classmethod
  def of(cls, profile: Profile, network: Network, ranks: int) -> Key:
    return cls(
      model=profile.model,
      hardware=profile.hardware,
      ranks=ranks,
      bandwidth=network.bandwidth,
    )

  def check(self, other: Key) -> None:
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
class Table:
  """Partitions that were found, by prompt length.

  Attributes:
    key: what they hold for.
    entries: shares of the ranks, by tokens of the prompt.
  """

  key: Key
  entries: Mapping[int, tuple[float, ...]]

  def __post_init__(self) -> None:
    if not self.entries:
      raise OptionError(
        "table", "no entries", "one or more", "search some first"
      )
    for tokens, shares in self.entries.items():
      cost.check_count("table", tokens)
      for share in shares:
        cost.check_number("share", share, most=1.0)
      if len(shares) != self.key.ranks or min(shares) <= 0:
        raise OptionError(
          "table",
          f"shares {shares} at {tokens} tokens",
          f"{self.key.ranks} numbers above 0",
          "search the entry again",
        )
      if not math.isclose(math.fsum(shares), 1.0, abs_tol=1e-6):
        raise OptionError(
          "table",
          f"shares that add up to {math.fsum(shares)} at {tokens} tokens",
          "1 in all",
          "search the entry again",
        )

  def shares(self, tokens: int) -> tuple[float, ...]:
    """Shares for a prompt: between the two nearest lengths, linearly.

    Below the first and above the last entry that entry's.
    """
    cost.check_count("tokens", tokens)
    known = sorted(self.entries)
    at = bisect.bisect_left(known, tokens)
    if at == len(known) or (at == 0 and tokens <= known[0]):
      return self.entries[known[min(at, len(known) - 1)]]
    low, high = known[at - 1], known[at]
    part = (tokens - low) / (high - low)
    return tuple(
      (1 - part) * a + part * b
      for a, b in zip(self.entries[low], self.entries[high], strict=True)
    )

  def lengths(self, tokens: int, tile: int = 1) -> tuple[int, ...]:
    """The partition of a prompt, in whole tiles.

    Raises:
      OptionError: fewer tiles than ranks.
    """
    return round_to_tiles(self.shares(tokens), tokens, tile)

  def joined(self, other: Table) -> Table:
    """Both tables' entries; where both have one, the other's.

    Raises:
      OptionError: their keys differ.
    """
    self.key.check(other.key)
    return Table(self.key, {**self.entries, **other.entries})

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
  def load(cls, path: str, key: Key | None = None) -> Table:
    """Reads a table; with `key` it must be one for it.

    Raises:
      OptionError: the file cannot be read, or the key differs.
      CheckpointFormatError: it is no table.
    """
    body = files.read(path, FORMAT)
    try:
      table = cls(_read_key(body["key"]), _read_entries(body["entries"]))
    except (KeyError, TypeError, AttributeError, RingjaxError) as error:
      raise files.fault(path, f"{error!r}", "a table of partitions") from None
    if key is not None:
      key.check(table.key)
    return table


def _read_key(value: Mapping[str, Any]) -> Key:
  wanted = {"model": str, "hardware": str, "ranks": int, "bandwidth": None}
  if set(value) != set(wanted):
    raise TypeError(f"a key of {sorted(value)}")
  for name in ("model", "hardware"):
    if not isinstance(value[name], str):
      raise TypeError(f"{name} {value[name]!r}")
  cost.check_count("ranks", value["ranks"])
  cost.check_number("bandwidth", value["bandwidth"])
  return Key(**value)


def _read_entries(value: Any) -> dict[int, tuple[float, ...]]:
  found: dict[int, tuple[float, ...]] = {}
  for entry in value:
    tokens = cost.check_count("tokens", entry["tokens"])
    if tokens in found:
      raise TypeError(f"two entries for {tokens} tokens")
    shares = [cost.check_number("share", s) for s in entry["shares"]]
    found[tokens] = tuple(shares)
  return found

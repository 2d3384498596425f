"""Published times to first token of KV-Runahead, and ours for the same rows.

The rows are in `published.toml`: the measurements of Cho et al. 2024 (arXiv
2405.05329), Tables 1 to 3: 8 A100 in one node, links of 300 GB/s, float16.
Values that are only bars of a figure are left out. The profile llama7b-a100 is
fitted to the column of one GPU and to the times of short prompts: these rows
are marked (`Row.fitted`) and are no comparison.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringjax.parallel.chips import Link
from ringjax.plan import files, profiles
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.kv_runahead import partition, schedules

_K = 1024
_MAIN = "llama7b-a100"
_Row = tuple[float, float, float]
_GIVEN = tomllib.loads(
  pathlib.Path(__file__).with_name("published.toml").read_text("utf-8")
)


NETWORK = Link(bandwidth=_GIVEN["bandwidth"])
# profile: tokens: (TSP, KVR-S, speed-up) on 4 GPUs and on 8, seconds.
TABLE: dict[str, dict[int, tuple[_Row, _Row]]] = {
  name: {
    int(n): (tuple(four), tuple(eight)) for n, (four, eight) in rows.items()
  }
  for name, rows in _GIVEN["table"].items()
}
# llama7b-a100, tokens: seconds on one GPU; KVR on 2 and 4 at 10 and 1 GB/s.
SLOW: dict[int, tuple[float, float, float, float, float]] = {
  int(tokens): tuple(row) for tokens, row in _GIVEN["slow"].items()
}
# Partitions, as shares; and the best boundary of 16384 tokens on two GPUs.
SHARES_10K_4 = tuple(_GIVEN["shares_10k_4"])
BOUNDARY_16K_2 = _GIVEN["boundary_16k_2"]


@dataclasses.dataclass(frozen=True)
class Row:
  """A published value and ours: seconds, or the quantity in `what`.

  Attributes:
    table: Name of the table.
    profile: Name of the profile.
    tokens: Tokens of the prompt.
    ranks: Number of GPUs.
    what: Quantity, "TSP", "KVR-S", "speed-up" and so on.
    paper: Published number.
    ours: Simulated number.
    fitted: Whether the profile was fitted to the published number: then ours is
      no prediction, and the difference is that of the fit.
  """

  table: str
  profile: str
  tokens: int
  ranks: int
  what: str
  paper: float
  ours: float
  fitted: bool = False

  @property
  def difference(self) -> float:
    """Relative difference of ours to the paper's number."""
    return self.ours / self.paper - 1

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "difference")


def _speeds(
  name: str, tokens: int, ranks: int, published_row: _Row
) -> list[Row]:
  profile, prompt = profiles.load(name), Prompt(tokens=tokens)
  tsp = schedules.tsp(profile, prompt, ranks, NETWORK).seconds
  kvr = partition.find(profile, prompt, ranks, NETWORK).seconds
  whats, ours = ("TSP", "KVR-S", "speed-up"), (tsp, kvr, tsp / kvr)
  fitted = _floored(profile, tokens, ranks)
  return [
    Row(
      "300 GB/s", name, tokens, ranks, quantity, paper, float(our_value), fitted
    )
    for quantity, paper, our_value in zip(
      whats, published_row, ours, strict=True
    )
  ]


def _floored(profile: Profile, tokens: int, ranks: int) -> bool:
  """Whether ours is the profile's floor, fitted to short prompts."""
  one_gpu_s = profile.token_s * tokens + profile.pair_s * tokens**2
  return profile.name == _MAIN and one_gpu_s / ranks <= profile.floor_s


def _slow(tokens: int, column: int) -> list[Row]:
  ranks = (1, 2, 4, 2, 4)[column]
  bandwidth = (300e9, 10e9, 10e9, 1e9, 1e9)[column]
  table, quantity = f"{bandwidth / 1e9:g} GB/s", "KVR-S"
  if ranks == 1:
    table, quantity = "one GPU", "alone"
  prompt, network = Prompt(tokens=tokens), Link(bandwidth=bandwidth)
  profile = profiles.load(_MAIN)
  result = partition.find(profile, prompt, ranks, network)
  paper = SLOW[tokens][column]
  # The profile's constants are fitted to the column of one GPU.
  fitted = ranks == 1 or _floored(profile, tokens, ranks)
  return [
    Row(table, _MAIN, tokens, ranks, quantity, paper, result.seconds, fitted)
  ]


def _partitions() -> list[Row]:
  find = lambda tokens, ranks: partition.find(
    profiles.load(_MAIN), Prompt(tokens=tokens), ranks, NETWORK
  )
  row = lambda *values: Row("partitions", _MAIN, *values)
  shares = zip(SHARES_10K_4, find(10 * _K, 4).shares, strict=True)
  first, paper = float(find(16 * _K, 2).lengths[0]), float(BOUNDARY_16K_2)
  return [
    *(row(10 * _K, 4, f"share of rank {i}", *x) for i, x in enumerate(shares)),
    row(16 * _K, 2, "boundary", paper, first),
  ]


def rows() -> Iterator[tuple[str, Callable[[], list[Row]]]]:
  """Yield a label and the function that makes the rows, per published value."""
  for name, table in TABLE.items():
    for tokens, rows_by_ranks in table.items():
      for ranks, published_row in zip((4, 8), rows_by_ranks, strict=True):
        yield (
          f"{name}, {tokens} tokens, {ranks} GPUs",
          lambda args=(name, tokens, ranks, published_row): _speeds(*args),
        )
  for tokens in SLOW:
    for column in range(5):
      yield (
        f"slow links, {tokens} tokens",
        lambda args=(tokens, column): _slow(*args),
      )
  yield "partitions", _partitions


def summary(found: list[Row]) -> dict[str, float]:
  """Largest differences of the fitted profile: 4 GPUs, 8k to 16k tokens."""
  main_rows = [
    row
    for row in found
    if row.profile == _MAIN and row.ranks == 4 and row.tokens >= 8 * _K
    and row.table == "300 GB/s"
  ]  # fmt: skip
  worst = lambda quantity: float(
    np.abs([row.difference for row in main_rows if row.what == quantity]).max()
  )
  differences = [
    abs(row.ours - row.paper) for row in main_rows if row.what == "speed-up"
  ]
  return {
    "TSP": worst("TSP"),
    "KVR-S": worst("KVR-S"),
    "speed-up apart": max(differences),
  }

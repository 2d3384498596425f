"""Published times to first token of KV-Runahead, and ours for the same rows.

The rows are in `published.toml`: the measurements of Cho et al. 2024 (arXiv
2405.05329), Tables 1 to 3: 8 A100 in one node, links of 300 GB/s, float16.
Where a row is not given there (values that are bars of a figure only) there is
none here.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringjax.parallel.chips import Link
from ringjax.plan import partition, profiles, schedules
from ringjax.plan.cost import Prompt

_K = 1024
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A published row and ours: seconds, or what `what` says.

  Attributes:
    table: which of the tables.
    profile: name.
    tokens: of the prompt.
    ranks: GPUs.
    what: "TSP", "KVR-S", "speed-up" and so on.
    paper: the published number.
    ours: the simulated one.
  """

  table: str
  profile: str
  tokens: int
  ranks: int
  what: str
  paper: float
  ours: float

  @property
  def difference(self) -> float:
    """Ours against the paper's, as a part of it."""
    return self.ours / self.paper - 1

  def record(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "difference": self.difference}


def _speeds(name: str, tokens: int, ranks: int, given: _Row) -> list[Row]:
  profile, prompt = profiles.load(name), Prompt(tokens=tokens)
  tsp = schedules.tsp(profile, prompt, ranks, NETWORK).seconds
  kvr = partition.find(profile, prompt, ranks, NETWORK).seconds
  ours = (tsp, kvr, tsp / kvr)
  return [
    Row(
      table="300 GB/s",
      profile=name,
      tokens=tokens,
      ranks=ranks,
      what=what,
      paper=paper,
      ours=float(mine),
    )
    for what, paper, mine in zip(
      ("TSP", "KVR-S", "speed-up"), given, ours, strict=True
    )
  ]


def _slow(tokens: int, column: int) -> list[Row]:
  ranks = (1, 2, 4, 2, 4)[column]
  bandwidth = (300e9, 10e9, 10e9, 1e9, 1e9)[column]
  profile, prompt = profiles.load("llama7b-a100"), Prompt(tokens=tokens)
  network = Link(bandwidth=bandwidth)
  found = partition.find(profile, prompt, ranks, network)
  table = f"{bandwidth / 1e9:g} GB/s" if ranks > 1 else "one GPU"
  row = Row(
    table=table,
    profile=profile.name,
    tokens=tokens,
    ranks=ranks,
    what="KVR-S" if ranks > 1 else "alone",
    paper=SLOW[tokens][column],
    ours=found.seconds,
  )
  return [row]


def _partitions() -> list[Row]:
  profile = profiles.load("llama7b-a100")
  row = lambda tokens, ranks, what, paper, ours: Row(
    table="partitions",
    profile=profile.name,
    tokens=tokens,
    ranks=ranks,
    what=what,
    paper=paper,
    ours=ours,
  )
  prompt = Prompt(tokens=10 * _K)
  shares = partition.find(profile, prompt, 4, NETWORK).shares
  two = partition.find(profile, Prompt(tokens=16 * _K), 2, NETWORK)
  rows = [
    row(10 * _K, 4, f"share of rank {i}", paper, ours)
    for i, (paper, ours) in enumerate(zip(SHARES_10K_4, shares, strict=True))
  ]
  first = float(two.lengths[0])
  return [*rows, row(16 * _K, 2, "boundary", float(BOUNDARY_16K_2), first)]


def rows() -> Iterator[tuple[str, Callable[[], list[Row]]]]:
  """All that was published: a label and what gives its rows, for progress."""
  for name, table in TABLE.items():
    for tokens, both in table.items():
      for ranks, given in zip((4, 8), both, strict=True):
        yield (
          f"{name}, {tokens} tokens, {ranks} GPUs",
          lambda args=(name, tokens, ranks, given): _speeds(*args),
        )
  for tokens in SLOW:
    for column in range(5):
      yield (
        f"slow links, {tokens} tokens",
        lambda args=(tokens, column): _slow(*args),
      )
  yield "partitions", _partitions


def summary(found: list[Row]) -> dict[str, float]:
  """The largest differences in the rows that are fits, 4 GPUs, 8k to 16k."""
  mine = [
    r
    for r in found
    if r.profile == "llama7b-a100" and r.ranks == 4 and r.tokens >= 8 * _K
    and r.table == "300 GB/s"
  ]  # fmt: skip
  worst = lambda what: float(
    np.abs([r.difference for r in mine if r.what == what]).max()
  )
  apart = [abs(r.ours - r.paper) for r in mine if r.what == "speed-up"]
  return {
    "TSP": worst("TSP"),
    "KVR-S": worst("KVR-S"),
    "speed-up apart": max(apart),
  }

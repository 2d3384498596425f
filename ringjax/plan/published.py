"""Published times to first token of KV-Runahead, and ours for the same rows.

The rows are the measurements of Cho et al. 2024 (arXiv 2405.05329), Tables 1
to 3: 8 A100 in one node, links of 300 GB/s, float16. Where a row is not given
there (values that are bars of a figure only) there is none here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringjax.plan import partition, profiles, schedules
from ringjax.plan.cost import Network, Prompt

NETWORK = Network(bandwidth=300e9)

# profile: tokens: (TSP, KVR-S, speed-up) on 4 GPUs and on 8, seconds.
_K = 1024
_Row = tuple[float, float, float]
TABLE: dict[str, dict[int, tuple[_Row, _Row]]] = {
  "llama7b-a100": {
    1 * _K: ((0.107, 0.097, 1.11), (0.117, 0.098, 1.19)),
    2 * _K: ((0.111, 0.100, 1.11), (0.117, 0.103, 1.14)),
    4 * _K: ((0.20, 0.17, 1.17), (0.12, 0.11, 1.14)),
    8 * _K: ((0.54, 0.41, 1.30), (0.30, 0.22, 1.36)),
    12 * _K: ((1.06, 0.76, 1.39), (0.57, 0.41, 1.37)),
    16 * _K: ((1.76, 1.24, 1.42), (0.92, 0.65, 1.41)),
  },
  "llama7b-gqa8-a100": {
    1 * _K: ((0.112, 0.102, 1.10), (0.119, 0.101, 1.18)),
    2 * _K: ((0.113, 0.102, 1.12), (0.118, 0.103, 1.15)),
    4 * _K: ((0.18, 0.15, 1.20), (0.12, 0.11, 1.15)),
    8 * _K: ((0.50, 0.38, 1.32), (0.27, 0.19, 1.42)),
    12 * _K: ((1.00, 0.72, 1.39), (0.52, 0.36, 1.42)),
    16 * _K: ((1.67, 1.16, 1.44), (0.86, 0.59, 1.46)),
  },
  "llama7b-mqa-a100": {
    1 * _K: ((0.109, 0.102, 1.07), (0.117, 0.101, 1.17)),
    2 * _K: ((0.107, 0.102, 1.05), (0.120, 0.101, 1.18)),
    4 * _K: ((0.18, 0.14, 1.23), (0.12, 0.10, 1.18)),
    8 * _K: ((0.49, 0.37, 1.33), (0.26, 0.18, 1.44)),
    12 * _K: ((0.98, 0.70, 1.41), (0.51, 0.35, 1.45)),
    16 * _K: ((1.65, 1.16, 1.43), (0.84, 0.57, 1.48)),
  },
  "llama13b-a100": {
    1 * _K: ((0.140, 0.126, 1.12), (0.150, 0.129, 1.16)),
    2 * _K: ((0.143, 0.131, 1.09), (0.153, 0.131, 1.17)),
    4 * _K: ((0.32, 0.29, 1.12), (0.19, 0.16, 1.17)),
    8 * _K: ((0.87, 0.68, 1.27), (0.49, 0.36, 1.35)),
    12 * _K: ((1.71, 1.25, 1.36), (0.91, 0.66, 1.37)),
    16 * _K: ((2.89, 2.05, 1.41), (1.46, 1.05, 1.39)),
  },
  "llama30b-a100": {
    1 * _K: ((0.21, 0.20, 1.08), (0.23, 0.19, 1.19)),
    2 * _K: ((0.28, 0.26, 1.06), (0.24, 0.20, 1.19)),
  },
  "falcon1b-a100": {
    1 * _K: ((0.073, 0.061, 1.18), (0.081, 0.066, 1.23)),
    2 * _K: ((0.067, 0.060, 1.12), (0.079, 0.065, 1.23)),
    4 * _K: ((0.09, 0.07, 1.26), (0.08, 0.06, 1.21)),
    8 * _K: ((0.25, 0.19, 1.28), (0.15, 0.10, 1.58)),
  },
  "falcon7b-a100": {
    1 * _K: ((0.107, 0.095, 1.12), (0.119, 0.096, 1.24)),
    2 * _K: ((0.117, 0.103, 1.13), (0.118, 0.099, 1.20)),
    4 * _K: ((0.28, 0.21, 1.30), (0.18, 0.12, 1.47)),
    8 * _K: ((0.78, 0.54, 1.46), (0.47, 0.29, 1.63)),
  },
}

# llama7b-a100, tokens: seconds on one GPU; KVR on 2 and 4 at 10 and 1 GB/s.
SLOW: dict[int, tuple[float, float, float, float, float]] = {
  1 * _K: (0.10, 0.10, 0.10, 0.11, 0.19),
  2 * _K: (0.24, 0.16, 0.19, 0.21, 0.35),
  4 * _K: (0.65, 0.38, 0.36, 0.84, 0.93),
  8 * _K: (1.95, 0.99, 0.72, 1.31, 2.06),
  12 * _K: (3.95, 1.82, 1.15, 2.28, 2.30),
}

# Partitions, as shares; and the best boundary of 16384 tokens on two GPUs.
SHARES_10K_4 = (0.350, 0.255, 0.210, 0.185)
BOUNDARY_16K_2 = 9728


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
  network = Network(bandwidth=bandwidth)
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

"""Grid search for the partition with the least time to first token.

The time is a maximum over ranks: where several are equally late, moving one
boundary makes one of them faster and another slower, and a search along axes
stops. So all boundaries move at once, on a grid that gets finer (Cho et al.
2024, arXiv 2405.05329, section 4.2).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import cost
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.kv_runahead import schedules

# Maximum number of partitions of one level of a grid.
_LEVEL = 4096

# Function from K partitions to their seconds.
Objective = Callable[[Int[np.ndarray, "K p"]], Float[np.ndarray, " K"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchLevel:
  """A level of a search: its stride in tokens and the best so far."""

  stride: int
  tried: int
  lengths: tuple[int, ...]
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
  """Best partition of a search, and its levels.

  Attributes:
    lengths: Best partition that was tried, in tokens.
    seconds: Value of the objective for it.
    tried: Number of different partitions that were tried.
    levels: Levels of the search, coarse to fine.
  """

  lengths: tuple[int, ...]
  seconds: float
  tried: int
  levels: tuple[SearchLevel, ...]

  @property
  def shares(self) -> tuple[float, ...]:
    """Fraction of the tokens of each rank."""
    total = sum(self.lengths)
    return tuple(n / total for n in self.lengths)


def simulated(
  profile: Profile, prompt: Prompt, network: Link, **options: Any
) -> Objective:
  """Make an objective that simulates; `options` are those of `kvr_seconds`."""
  return lambda partitions: schedules.kvr_seconds(
    profile, prompt, partitions, network, **options
  )


def measured(
  measure: Callable[[tuple[int, ...]], float],
  *,
  repeats: int = 5,
  warmup: int = 1,
) -> Objective:
  """Make an objective that measures: the median of repeated runs.

  `measure` prefills the prompt once with a partition and returns its seconds;
  its first `warmup` runs with each partition are not counted.
  """
  positive_int("repeats", repeats)
  integer("warmup", warmup, least=0)

  def objective(partitions: np.ndarray) -> np.ndarray:
    medians = []
    for row in partitions:
      lengths = tuple(int(n) for n in row)
      for _ in range(warmup):
        measure(lengths)
      runs = [float(measure(lengths)) for _ in range(repeats)]
      medians.append(statistics.median(runs))
    return np.asarray(medians)

  return objective


def search(
  objective: Objective,
  starts: Iterable[Sequence[int]],
  *,
  tile: int = 1,
  stride: int | None = None,
  smallest: int | None = None,
  least_gain: float = 0.0,
  on_level: Callable[[SearchLevel], None] = lambda level: None,
) -> SearchResult:
  """Hierarchical grid search over the boundaries between ranks.

  Around the best partition so far all combinations of -2..2 strides on every
  boundary are tried; the grid moves as long as its best point is on its border,
  then the stride is halved. With more than six ranks that would be too many:
  then the grid is -1..1; with more than eight ranks there is no grid, and ranks
  trade tokens with runs of neighbours.

  Args:
    objective: Seconds [K] of partitions [K, p]; see `simulated`, `measured`.
    starts: Partitions to begin with, of one total and rank count; the search
      continues from the best.
    tile: Tile size in tokens; boundaries are multiples of it.
    stride: Stride of the first level in tokens; default a power of two near an
      eighth of an even part.
    smallest: Stride of the last level; default the tile.
    least_gain: Relative gain below which the search ends after a level: the
      noise of a measurement.
    on_level: Function called after each level.

  Returns:
    The best partition; the objective is evaluated once for each partition.

  Raises:
    OptionError: If the starts are not partitions of one prompt in whole tiles.
  """
  first = _check_starts(starts, tile)
  tokens, ranks = sum(first[0]), len(first[0])
  smallest = positive_int("smallest", smallest or tile)
  smallest = -(-smallest // tile) * tile
  if stride is None:
    stride = tile
    while stride * 2 <= tokens // (4 * ranks):
      stride *= 2
  stride = max(-(-positive_int("stride", stride) // tile) * tile, smallest)
  seconds_of: dict[tuple[int, ...], float] = {}

  def best_of(points: Int[np.ndarray, "K inner"]) -> tuple[int, ...]:
    """Best of K partitions, given by their inner boundaries."""
    ends = np.pad(points, ((0, 0), (1, 1)), constant_values=0)
    ends[:, -1] = tokens
    lengths = np.diff(ends, axis=1)
    rows = [tuple(row) for row in lengths[(lengths > 0).all(1)].tolist()]
    new_rows = [row for row in dict.fromkeys(rows) if row not in seconds_of]
    if new_rows:
      seconds = np.asarray(
        objective(np.asarray(new_rows, np.int64)), np.float64
      )
      if seconds.shape != (len(new_rows),) or np.isnan(seconds).any():
        raise OptionError(
          "objective",
          f"shape {seconds.shape}, NaN or not",
          f"{len(new_rows)} seconds",
          "return one number for each partition",
        )
      seconds_of.update(zip(new_rows, seconds.tolist(), strict=True))
    # Of equals the first: if all are equal, the first start stays.
    return min(rows, key=seconds_of.__getitem__)

  best = best_of(np.cumsum(np.asarray(first), axis=1)[:, :-1])
  moves, reach = _moves(ranks - 1)
  levels = []
  while ranks > 1:
    seconds_before, tried = seconds_of[best], len(seconds_of)
    while True:
      centre = np.cumsum(best)[:-1]
      candidate = best_of(centre + moves * stride)
      step = np.abs(np.cumsum(candidate)[:-1] - centre).max() // stride
      # Stay on ties, so that the search ends.
      if seconds_of[candidate] >= seconds_of[best]:
        break
      best = candidate
      if step < reach:
        break
    level = SearchLevel(
      stride=stride,
      tried=len(seconds_of) - tried,
      lengths=best,
      seconds=seconds_of[best],
    )
    levels.append(level)
    on_level(level)
    gain = seconds_before - seconds_of[best]
    if stride <= smallest or gain < least_gain * seconds_before:
      break
    stride = max(stride // 2 // tile * tile, smallest)
  return SearchResult(
    lengths=best,
    seconds=seconds_of[best],
    tried=len(seconds_of),
    levels=tuple(levels),
  )


def _moves(count: int) -> tuple[Int[np.ndarray, "K count"], int]:
  """Steps of a level, including its centre; and the largest step."""
  if not count:
    return np.zeros((1, 0), np.int64), 0
  if 5**count <= _LEVEL:
    grid = list(itertools.product(range(-2, 3), repeat=count))
    return np.asarray(grid, np.int64), 2
  return _trades(count + 1), 1


def _trades(ranks: int) -> Int[np.ndarray, "K inner"]:
  """Steps of boundaries: tokens move from some ranks to another.

  One rank takes a stride from each of a run of neighbours, or gives it; where
  several ranks are equally late, only this makes all of them faster at once.
  With few enough ranks all combinations of -1..1 are tried, too.
  """
  changes = [np.zeros(ranks, np.int64)]
  for first, last in itertools.combinations(range(ranks + 1), 2):
    run = np.zeros(ranks, np.int64)
    run[first:last] = 1
    for receiver in range(ranks):
      if not first <= receiver < last:
        trade = run.copy()
        trade[receiver] = first - last
        changes += [trade, -trade]
  steps = np.cumsum(np.stack(changes), axis=1)[:, :-1]
  if 3 ** (ranks - 1) <= _LEVEL:
    grid = np.asarray(list(itertools.product((-1, 0, 1), repeat=ranks - 1)))
    steps = np.concatenate([grid, steps])
  return steps


def _check_starts(
  starts: Iterable[Sequence[int]], tile: int
) -> list[tuple[int, ...]]:
  positive_int("tile", tile)
  partitions = [tuple(start) for start in starts]
  if not partitions:
    raise OptionError(
      "starts", "none", "one partition or more", "pass an even one"
    )
  tokens = sum(partitions[0])
  for start in partitions:
    cost.check_lengths(start, tokens)
    if len(start) != len(partitions[0]) or any(n % tile for n in start[:-1]):
      raise OptionError(
        "starts",
        start,
        f"{len(partitions[0])} lengths in tiles of {tile}",
        "round it with round_to_tiles",
      )
  return partitions

"""Search for the partition with the least time to first token.

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
from ringjax.plan import cost, schedules
from ringjax.plan.cost import Network, Profile, Prompt

# Partitions of one level of a grid.
_LEVEL = 4096

# Seconds of K partitions.
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
  """The result of a search.

  Attributes:
    lengths: the best partition that was tried.
    seconds: what the objective said of it.
    tried: different partitions that were tried.
    levels: of the search, coarse to fine.
  """

  lengths: tuple[int, ...]
  seconds: float
  tried: int
  levels: tuple[SearchLevel, ...]

  @property
  def shares(self) -> tuple[float, ...]:
    """Parts of the tokens, by rank."""
    total = sum(self.lengths)
    return tuple(n / total for n in self.lengths)


def simulated(
  profile: Profile, prompt: Prompt, network: Network, **options: Any
) -> Objective:
  """The objective that simulates; `options` are those of `kvr_seconds`."""
  return lambda partitions: schedules.kvr_seconds(
    profile, prompt, partitions, network, **options
  )


def measured(
  measure: Callable[[tuple[int, ...]], float],
  *,
  repeats: int = 5,
  warmup: int = 1,
) -> Objective:
  """The objective that measures: the median of repeated runs.

  `measure` reads the prompt once with a partition and gives its seconds; its
  first `warmup` runs with each partition are not counted.
  """
  positive_int("repeats", repeats)
  integer("warmup", warmup, least=0)

  def objective(partitions: np.ndarray) -> np.ndarray:
    found = []
    for row in partitions:
      lengths = tuple(int(n) for n in row)
      for _ in range(warmup):
        measure(lengths)
      runs = [float(measure(lengths)) for _ in range(repeats)]
      found.append(statistics.median(runs))
    return np.asarray(found)

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
  boundary are tried; the grid moves as long as its best point lies on its
  border, then the stride is halved. With more than six ranks that would be too
  many: then the grid is -1..1, with more than eight there is none, and ranks
  trade tokens with runs of neighbours.

  Args:
    objective: seconds [K] of partitions [K, p]; see `simulated`, `measured`.
    starts: partitions to begin with, of one length and rank count; the search
      goes on from the best.
    tile: boundaries are multiples of it.
    stride: of the first level, tokens; default a power of two near an eighth
      of an even part.
    smallest: stride of the last level; default the tile.
    least_gain: the search ends after a level that gained less than this part:
      the noise of a measurement.
    on_level: called after each level.

  Returns:
    The best partition; the objective is asked about none twice.

  Raises:
    OptionError: starts that are not partitions of one prompt in whole tiles.
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
  known: dict[tuple[int, ...], float] = {}

  def best_of(points: Int[np.ndarray, "K inner"]) -> tuple[int, ...]:
    """The best of K partitions, by their inner boundaries."""
    ends = np.pad(points, ((0, 0), (1, 1)), constant_values=0)
    ends[:, -1] = tokens
    lengths = np.diff(ends, axis=1)
    rows = [tuple(row) for row in lengths[(lengths > 0).all(1)].tolist()]
    new = [row for row in dict.fromkeys(rows) if row not in known]
    if new:
      seconds = np.asarray(objective(np.asarray(new, np.int64)), np.float64)
      if seconds.shape != (len(new),) or np.isnan(seconds).any():
        raise OptionError(
          "objective",
          f"shape {seconds.shape}, NaN or not",
          f"{len(new)} seconds",
          "return one number for each partition",
        )
      known.update(zip(new, seconds.tolist(), strict=True))
    # Of equals the first: where nothing matters, the first start stays.
    return min(rows, key=known.__getitem__)

  best = best_of(np.cumsum(np.asarray(first), axis=1)[:, :-1])
  moves, reach = _moves(ranks - 1)
  levels = []
  while ranks > 1:
    before, tried = known[best], len(known)
    while True:
      centre = np.cumsum(best)[:-1]
      then = best_of(centre + moves * stride)
      step = np.abs(np.cumsum(then)[:-1] - centre).max() // stride
      # On equal terms stay, so that the search ends.
      if known[then] >= known[best]:
        break
      best = then
      if step < reach:
        break
    level = SearchLevel(
      stride=stride,
      tried=len(known) - tried,
      lengths=best,
      seconds=known[best],
    )
    levels.append(level)
    on_level(level)
    gained = before - known[best]
    if stride <= smallest or gained < least_gain * before:
      break
    stride = max(stride // 2 // tile * tile, smallest)
  return SearchResult(
    lengths=best,
    seconds=known[best],
    tried=len(known),
    levels=tuple(levels),
  )


def _moves(count: int) -> tuple[Int[np.ndarray, "K count"], int]:
  """Steps of a level, its centre included; and the largest."""
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
  With few enough ranks all combinations of -1..1 are tried too.
  """
  changes = [np.zeros(ranks, np.int64)]
  for first, last in itertools.combinations(range(ranks + 1), 2):
    run = np.zeros(ranks, np.int64)
    run[first:last] = 1
    for one in range(ranks):
      if not first <= one < last:
        trade = run.copy()
        trade[one] = first - last
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
  found = [tuple(start) for start in starts]
  if not found:
    raise OptionError(
      "starts", "none", "one partition or more", "pass an even one"
    )
  tokens = sum(found[0])
  for start in found:
    cost.check_lengths(start, tokens)
    if len(start) != len(found[0]) or any(n % tile for n in start[:-1]):
      raise OptionError(
        "starts",
        start,
        f"{len(found[0])} lengths in tiles of {tile}",
        "round it with round_to_tiles",
      )
  return found

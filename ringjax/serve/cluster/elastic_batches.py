"""Cuts requests and instances into batches; says which instance keeps what.

Guarantees: `fewest_instances` takes as few instances as any plan;
`best_batches` finds the least cost of all ways to cut both orders.
Cost: `best_batches` n^2 m^2 / 4 steps for n requests and m instances.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, sections 4.1 and 5.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from ringjax.serve.cluster.phase_times import PhaseTimes

# ---------------------------------------------------------------------------
# Retention
# ---------------------------------------------------------------------------


def fewest_instances(
  lengths: Sequence[int], free: Sequence[int], used: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...] | None:
  """Keeps texts on the fewest instances: each one's tokens of each text.

  The instances with the most slots in use are filled first, each to its last
  slot, unless that takes more instances than the largest ones do.

  Args:
    lengths: tokens of each text.
    free: slots that are free on each instance.
    used: slots in use; default: none.

  Returns:
    for each text the tokens of each instance; None where they do not fit.
  """
  total, have = sum(lengths), [*free]
  numbers = range(len(have))
  largest = sorted(numbers, key=lambda n: (-have[n], n))
  least = next(
    (k for k in numbers if sum(have[n] for n in largest[: k + 1]) >= total),
    None,
  )
  if least is None:
    return None
  most_used = sorted(
    numbers, key=lambda n: (-(used[n] if used else 0), have[n], n)
  )
  order = most_used
  if sum(have[n] for n in most_used[: least + 1]) < total:
    order = largest
  kept = []
  for length in lengths:
    row = [0] * len(have)
    for n in order:
      row[n] = min(length, have[n])
      have[n] -= row[n]
      length -= row[n]
    kept.append(tuple(row))
  return tuple(kept)


def even_parts(
  lengths: Sequence[int], free: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
  """As `fewest_instances`, where all that read keep equal parts.

  That is where keys are that stay where they are computed: what reads first
  and moves afterwards needs room for them (reactive migration).
  """
  total = sum(lengths)
  by_room = sorted(range(len(free)), key=lambda n: (-free[n], n))
  for size in range(1, len(free) + 1):
    chosen = by_room[:size]
    part = -(-total // size)
    if min(free[n] for n in chosen) >= part:
      kept = []
      for length in lengths:
        row = [0] * len(free)
        for place, n in enumerate(sorted(chosen)):
          row[n] = (length * (place + 1)) // size - (length * place) // size
        kept.append(tuple(row))
      fits = all(
        sum(row[n] for row in kept) <= free[n] for n in range(len(free))
      )
      if fits:
        return tuple(kept)
  return None


# ---------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------


@runtime_checkable
class GroupTimes(Protocol):
  """Times of groups, by their number of instances."""

  def __call__(self, instances: int) -> PhaseTimes: ...


def batch_cost(
  lengths: Sequence[int], instances: int, times: GroupTimes
) -> float:
  """Seconds of reading prompts, once for each, over its length."""
  seconds = times(instances).prefill_s((n, 0) for n in lengths)
  return seconds * sum(1 / max(1, n) for n in lengths)


def best_batches(
  lengths: Sequence[int],
  free: Sequence[int],
  times: GroupTimes,
  needs: Sequence[int] | None = None,
  most: Sequence[int] | None = None,
) -> tuple[float, list[tuple[range, range]]]:
  """Cuts requests and instances, in their order, into batches and groups.

  f[i][k] is the least, over j < i and l < k, of
  f[j][l] + batch_cost(lengths[j:i], k - l), where the needs of j..i-1 fit into
  the free slots of l..k-1; the answer is the least f[n][k].

  Args:
    lengths: of the prompts, descending.
    free: slots of each instance.
    times: of a group of so many instances; a constant and a sum over prompts,
      as those of `QuadraticTimes` are.
    needs: slots of each request; default: `lengths`.
    most: for each request how many of the instances, from the first on, its
      batch may have; none that is longer may have more. Default: all.

  Returns:
    (cost, batches): each batch (requests, instances) by their indices; infinite
    and none where even all together do not fit.
  """
  n, m = len(lengths), len(free)
  needs = lengths if needs is None else needs
  slots, taken = _sums(free), _sums(needs)
  # A batch's time is read off sums: a constant and a part of each prompt.
  over = _sums(1 / max(1, x) for x in lengths)
  fixed, parts = [0.0], [[0.0]]
  for size in range(1, m + 1):
    read = times(size).prefill_s
    fixed.append(read(()))
    parts.append(_sums(read([(x, 0)]) - fixed[-1] for x in lengths))

  best = [[math.inf] * (m + 1) for _ in range(n + 1)]
  came: list[list[tuple[int, int]]] = [[(0, 0)] * (m + 1) for _ in range(n + 1)]
  best[0] = [0.0] * (m + 1)
  for i in range(1, n + 1):
    for k in range(1, m + 1):
      for low in range(k):
        room = slots[k] - slots[low]
        for j in range(i - 1, -1, -1):
          if taken[i] - taken[j] > room or (most and k > most[j]):
            break
          if best[j][low] == math.inf:
            continue
          seconds = fixed[k - low] + parts[k - low][i] - parts[k - low][j]
          value = best[j][low] + seconds * (over[i] - over[j])
          if value < best[i][k]:
            best[i][k], came[i][k] = value, (j, low)
  k = min(range(m + 1), key=lambda k: best[n][k])
  found, i, value = [], n, best[n][k]
  if value == math.inf:
    return value, []
  while i:
    j, low = came[i][k]
    found.append((range(j, i), range(low, k)))
    i, k = j, low
  return value, found[::-1]


def _sums(values: Iterable[int | float]) -> list[Any]:
  """0 and the sums of the first values."""
  return [*itertools.accumulate(values, initial=0)]

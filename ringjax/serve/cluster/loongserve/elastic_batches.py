"""Cuts requests and instances into batches, and assigns tokens to instances.

Guarantees: `fewest_instances` uses the minimum number of instances;
`best_batches` finds the least cost of all ways to cut both orders.
Cost: `best_batches` n^2 m^2 / 4 steps for n requests and m instances.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, sections 4.1 and 5.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from ringjax.serve.cluster.times.phase_times import PhaseTimes

# ---------------------------------------------------------------------------
# Retention
# ---------------------------------------------------------------------------


def fewest_instances(
  lengths: Sequence[int], free: Sequence[int], used: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...] | None:
  """Assign the tokens of texts to the fewest instances that can hold them.

  The instances with the most slots in use are filled first, each to its last
  slot, unless that takes more instances than the largest ones do.

  Args:
    lengths: Number of tokens of each text.
    free: Number of free slots on each instance.
    used: Number of used slots on each instance; default: none.

  Returns:
    For each text the tokens on each instance; None if they do not fit.
  """
  total, free_left = sum(lengths), [*free]
  numbers = range(len(free_left))
  largest = sorted(numbers, key=lambda n: (-free_left[n], n))
  num_needed = next(
    (
      k for k in numbers if sum(free_left[n] for n in largest[: k + 1]) >= total
    ),
    None,
  )
  if num_needed is None:
    return None
  most_used = sorted(
    numbers, key=lambda n: (-(used[n] if used else 0), free_left[n], n)
  )
  order = most_used
  if sum(free_left[n] for n in most_used[: num_needed + 1]) < total:
    order = largest
  allocation = []
  for length in lengths:
    row = [0] * len(free_left)
    for n in order:
      row[n] = min(length, free_left[n])
      free_left[n] -= row[n]
      length -= row[n]
    allocation.append(tuple(row))
  return tuple(allocation)


def even_parts(
  lengths: Sequence[int], free: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
  """Assign equal parts to the fewest instances, as reactive migration does.

  There keys stay where they are computed until prefill has ended and are moved
  afterwards, so that equal parts need room.
  """
  total = sum(lengths)
  by_room = sorted(range(len(free)), key=lambda n: (-free[n], n))
  for size in range(1, len(free) + 1):
    chosen = by_room[:size]
    part = -(-total // size)
    if min(free[n] for n in chosen) >= part:
      allocation = []
      for length in lengths:
        row = [0] * len(free)
        for place, n in enumerate(sorted(chosen)):
          row[n] = (length * (place + 1)) // size - (length * place) // size
        allocation.append(tuple(row))
      all_fit = all(
        sum(row[n] for row in allocation) <= free[n] for n in range(len(free))
      )
      if all_fit:
        return tuple(allocation)
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
  """Seconds of prefill, summed over the prompts, each per its own tokens."""
  seconds = times(instances).prefill_s((n, 0) for n in lengths)
  return seconds * sum(1 / max(1, n) for n in lengths)


def best_batches(
  lengths: Sequence[int],
  free: Sequence[int],
  times: GroupTimes,
  needs: Sequence[int] | None = None,
  most: Sequence[int] | None = None,
) -> tuple[float, list[tuple[range, range]]]:
  """Cut requests and instances, in their order, into batches and groups.

  f[i][k] is the least, over j < i and l < k, of
  f[j][l] + batch_cost(lengths[j:i], k - l), where the needs of j..i-1 fit into
  the free slots of l..k-1; the result is the least f[n][k].

  Args:
    lengths: Prompt lengths in tokens, descending.
    free: Number of free slots on each instance.
    times: Call times by group size; a constant and a sum over prompts, as
      those of `QuadraticTimes` are.
    needs: Number of slots of each request; default: `lengths`.
    most: For each request the maximum number of instances, from the first on,
      of its batch; a longer request may not have more. Default: all.

  Returns:
    (cost, batches): each batch (requests, instances) by their indices;
    (inf, []) if even all together do not fit.
  """
  n, m = len(lengths), len(free)
  needs = lengths if needs is None else needs
  slots, need_sums = _sums(free), _sums(needs)
  # A batch's time follows from sums: a constant and a part for each prompt.
  weight_sums = _sums(1 / max(1, x) for x in lengths)
  fixed, parts = [0.0], [[0.0]]
  for size in range(1, m + 1):
    prefill_s = times(size).prefill_s
    fixed.append(prefill_s(()))
    parts.append(_sums(prefill_s([(x, 0)]) - fixed[-1] for x in lengths))

  best = [[math.inf] * (m + 1) for _ in range(n + 1)]
  previous: list[list[tuple[int, int]]] = [
    [(0, 0)] * (m + 1) for _ in range(n + 1)
  ]
  best[0] = [0.0] * (m + 1)
  for i in range(1, n + 1):
    for k in range(1, m + 1):
      for low in range(k):
        room = slots[k] - slots[low]
        for j in range(i - 1, -1, -1):
          if need_sums[i] - need_sums[j] > room or (most and k > most[j]):
            break
          if best[j][low] == math.inf:
            continue
          seconds = fixed[k - low] + parts[k - low][i] - parts[k - low][j]
          value = best[j][low] + seconds * (weight_sums[i] - weight_sums[j])
          if value < best[i][k]:
            best[i][k], previous[i][k] = value, (j, low)
  k = min(range(m + 1), key=lambda k: best[n][k])
  batches, i, value = [], n, best[n][k]
  if value == math.inf:
    return value, []
  while i:
    j, low = previous[i][k]
    batches.append((range(j, i), range(low, k)))
    i, k = j, low
  return value, batches[::-1]


def _sums(values: Iterable[int | float]) -> list[Any]:
  """Prefix sums, starting with 0."""
  return [*itertools.accumulate(values, initial=0)]

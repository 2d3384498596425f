"""Sizes of the open cache and of pages after an eviction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.storage.pages import Pages, few_sizes

# Number of tokens for which a cache that grows by evictions preallocates pages.
_AHEAD = 64


def open_slots(kind: CacheConfig, stays: int, shards: int) -> int:
  """Return the slots of a shard of the open cache after an eviction.

  They do not depend on how much of a group is left open, so that programs do
  not recompile at each eviction.

  Args:
    kind: Kind of cache.
    stays: Tokens that stay open, the most of a shard.
    shards: Shards of the sequence.
  """
  least_open = kind.exact.first + kind.exact.recent
  if kind.grouped:
    least_open += kind.layout.page - 1
  stays = max(stays, math.ceil(least_open / shards))
  return few_sizes(stays + math.ceil(kind.exact.room / shards))


def first_sizes(count: int, most: int, heads: int) -> tuple[int, int]:
  """Return pages of memory, and of a table, after a first eviction.

  Args:
    count: Pages that all heads need.
    most: Pages that one head needs, the most of them.
    heads: Heads of all rows and layers on a device.
  """
  # At most 1.6 % too many; none if all heads need as many, up to 64. The table
  # of a head is small.
  pages = min(few_sizes(count, 64), heads * few_sizes(most, 64))
  return pages, few_sizes(most, 2)


def page_sizes(
  pages: Sequence[Pages | None],
  needs: Mapping[int, tuple[int, ...]],
  length: int | None,
) -> tuple[tuple[int, int], ...]:
  """Return for how many pages a device has memory, and a head a table.

  A cache that grows keeps what it has while that suffices; then it gets pages
  for `_AHEAD` tokens more, so that few programs are compiled while it grows.

  Args:
    pages: Pages of each kind of layers before the eviction.
    needs: Pages that all heads of a device need and that one needs, by kind.
    length: Tokens of the longest row; None at the first eviction, which leaves
      no memory for more than is there.
  """
  exact, grown_sizes = [(0, 0)] * len(pages), [(0, 0)] * len(pages)
  current, suffices = [(0, 0)] * len(pages), length is not None
  for n, (count, largest) in needs.items():
    old_pages = pages[n]
    assert old_pages is not None
    places, (*lead, table) = old_pages.places, old_pages.table.shape
    devices = 1 if places.mesh is None else places.size(places.axes)
    current[n] = old_pages.k.shape[0] // devices, table // places.shards
    heads = math.ceil(math.prod(lead) * places.shards / devices)
    exact[n] = first_sizes(count, largest, heads)
    if length is None:
      continue
    growth = 1 + _AHEAD / max(1, length)
    # Rounded down: a page that has just begun has room, too.
    grown_count, grown_largest = (int(x * growth) for x in (count, largest))
    grown_sizes[n] = (
      min(few_sizes(grown_count), heads * few_sizes(grown_largest, 64)),
      few_sizes(grown_largest, 2),
    )
    pages_per_head = math.ceil(_AHEAD / old_pages.slots)
    # Memory is released if much was evicted.
    limits = 2 * grown_sizes[n][0] - count, 2 * grown_sizes[n][1] - largest
    limits = (
      max(limits[0], count + 2 * heads * pages_per_head),
      limits[1] + pages_per_head,
    )
    suffices &= (
      count <= current[n][0] <= limits[0]
      and largest <= current[n][1] <= limits[1]
    )
  if length is None:
    return tuple(exact)
  return tuple(current if suffices else grown_sizes)

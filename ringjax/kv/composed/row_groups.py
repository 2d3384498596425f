"""A batch whose rows are in several caches, a group of rows in each.

Guarantees: rows are the same as in one cache of the whole batch.
Cost: a call runs a layer for one group after another, so that a layer's
intermediate results take memory for one group's rows only; a layer's weights
are fetched once for all groups. The program has a body for each group.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865, the zig-zag block schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool

from ringjax import tree
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.model_cache import ModelCache
from ringjax.kv.storage import changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroups(ModelCache):
  """Caches of one kind and capacity, whose rows are concatenated.

  Attributes:
    caches: Cache of each group.
    hosted: Whether each group's hidden states are in host memory while other
      groups run; () for none.
  """

  caches: tuple[Any, ...]
  hosted: tuple[bool, ...] = ()
  part_field: ClassVar[str] = "caches"
  described: ClassVar[str] = "a cache of row groups"
  instead: ClassVar[str] = "a cache of one group"
  refuses: ClassVar[Mapping[type, tuple[str, str]]] = {
    changes.TakeRows: ("take", "leave rows_at_once out"),
    changes.InsertRows: ("insert", "leave rows_at_once out"),
    changes.ResetRows: ("reset", "leave rows_at_once out"),
  }

  @classmethod
  def of(
    cls,
    batch: int,
    rows: int,
    make: Callable[[int], Any],
    hidden: int | float = 0.0,
  ) -> RowGroups:
    """Split a batch into groups of `rows` rows; the last may have fewer.

    Args:
      batch: Number of rows in all.
      rows: Number of rows of a group.
      make: Function that makes an empty cache for a number of rows.
      hidden: Fraction of the groups that are `hosted`, the last ones.
    """
    sizes = [min(rows, batch - n) for n in range(0, batch, rows)]
    first_hosted = len(sizes) - round(hidden * len(sizes))
    hosted = tuple(n >= first_hosted for n in range(len(sizes)))
    return cls(
      caches=tuple(make(size) for size in sizes),
      hosted=hosted if any(hosted) else (),
    )

  def regrouped(self, caches: Iterable[Any]) -> RowGroups:
    """Cache with other caches of the groups."""
    return dataclasses.replace(self, caches=tuple(caches))

  @property
  def kind(self) -> CacheConfig:
    return self.caches[0].kind

  @property
  def slots(self) -> tuple[Any, ...]:
    return tuple(cache.slots for cache in self.caches)

  def choose(
    self,
    rows: Bool[np.ndarray, " B"] | None = None,
    ended: Bool[np.ndarray, " B"] | None = None,
  ) -> tuple[RowGroups, tuple[Any, ...]]:
    """Choose what each group keeps; see `EvictingCache.choose`."""
    parts = zip(self.caches, self.split(rows), self.split(ended), strict=True)
    caches, evictions = zip(
      *(cache.choose(*of_rows) for cache, *of_rows in parts), strict=True
    )
    return self.regrouped(caches), evictions

  def apply(self, evictions: tuple[Any, ...]) -> RowGroups:
    """Drop other tokens than those chosen; see `EvictingCache.apply`."""
    pairs = zip(self.caches, evictions, strict=True)
    return self.regrouped(cache.apply(chosen) for cache, chosen in pairs)

  def limited(self, limit: int) -> RowGroups:
    return self.each_part(lambda cache: cache.limited(limit))

  # A call runs on each of its `caches` instead, and rows do not go from group
  # to group.
  lacks: ClassVar[Mapping[str, str]] = dict.fromkeys(
    (
      "allocate", "layer", "updated", "export", "load", "snapshot", "restore",
      "call_state", "undo_call", "explain", "gathered", "with_states",
    ),
    "leave rows_at_once out",
  )  # fmt: skip


tree.register(RowGroups, ("caches",), ("hosted",))

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

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from ringjax import tree
from ringjax.kv.base import CallCoords
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.model_cache import ModelCache, refused
from ringjax.kv.storage.changes import InsertRows, ResetRows, TakeRows


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
  described: ClassVar[str] = "a cache of row groups"
  instead: ClassVar[str] = "a cache of one group"
  refuses: ClassVar[Mapping[type, tuple[str, str]]] = {
    TakeRows: ("take", "leave rows_at_once out"),
    InsertRows: ("insert", "leave rows_at_once out"),
    ResetRows: ("reset", "leave rows_at_once out"),
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

  @property
  def parts(self) -> tuple[Any, ...]:
    return self.caches

  @property
  def row_groups(self) -> RowGroups:
    return self

  def regrouped(self, caches: Iterable[Any]) -> RowGroups:
    """Cache with other caches of the groups."""
    return dataclasses.replace(self, caches=tuple(caches))

  def split(
    self, x: Shaped[Array | np.ndarray, " ..."] | np.integer | int | None
  ) -> list[Any]:
    """Split an array of all rows by group; repeat one that is for all rows."""
    if isinstance(x, int | np.integer | None) or x.shape[:1] != (self.batch,):
      return [x] * len(self.caches)
    ends = np.cumsum([cache.batch for cache in self.caches])
    starts = [0, *ends[:-1]]
    return [x[a:b] for a, b in zip(starts, ends, strict=True)]

  def each_part(self, f: Callable[..., Any], *rows: Any) -> RowGroups:
    parts = zip(self.caches, *map(self.split, rows), strict=True)
    return self.regrouped(f(*part) for part in parts)

  @property
  def batch(self) -> int:
    return sum(cache.batch for cache in self.caches)

  @property
  def kind(self) -> CacheConfig:
    return self.caches[0].kind

  @property
  def slots(self) -> tuple[Any, ...]:
    return tuple(cache.slots for cache in self.caches)

  @property
  def length(self) -> Int[Array, " B"]:
    return jnp.concatenate([cache.length for cache in self.caches])

  def free(self) -> Int[np.ndarray, "B R"] | None:
    per_cache = [cache.free() for cache in self.caches]
    concrete = [x for x in per_cache if x is not None]
    return np.concatenate(concrete) if len(concrete) == len(per_cache) else None

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    for cache in self.caches:
      rows = cache.batch if batch == self.batch else batch
      cache.check(rows, tokens, replicated=replicated, sees=sees)

  def check_coords(self, coords: CallCoords) -> None:
    arrays = map(self.split, coords[:3])
    for cache, pos, seg, parents in zip(self.caches, *arrays, strict=True):
      cache.check_coords(CallCoords(pos, seg, parents, coords.segments))

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

  # A call runs on each of its `caches` instead.
  allocate = refused("allocate", "leave rows_at_once out")
  layer = refused("layer", "leave rows_at_once out")
  updated = refused("updated", "leave rows_at_once out")

  # Rows do not go from group to group.
  export = refused("export", "leave rows_at_once out")
  load = refused("load", "leave rows_at_once out")
  snapshot = refused("snapshot", "leave rows_at_once out")
  restore = refused("restore", "leave rows_at_once out")
  call_state = refused("call_state", "leave rows_at_once out")
  undo_call = refused("undo_call", "leave rows_at_once out")
  explain = refused("explain", "leave rows_at_once out")
  gathered = refused("gathered", "leave rows_at_once out")
  with_states = refused("with_states", "leave rows_at_once out")


tree.register(RowGroups, ("caches",), ("hosted",))

"""A batch whose rows are in several caches, a group of rows in each.

Guarantees: rows are the same as in one cache of the whole batch.
Cost: a call runs a layer for one group after another, so that a layer's
intermediate results take memory for one group's rows only; a layer's weights
are fetched once for all groups. The program has a body for each group.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865, the zig-zag block schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import Ends
from ringjax.kv.cache_kind import CacheConfig
from ringjax.ops.mask import Coords
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroups:
  """Caches of one kind and capacity, whose rows are concatenated.

  Attributes:
    caches: Cache of each group.
    hosted: Whether each group's hidden states are in host memory while other
      groups run; () for none.
  """

  caches: tuple[Any, ...]
  hosted: tuple[bool, ...] = ()

  @classmethod
  def create(
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
  def recurrent(self) -> bool:
    return self.caches[0].recurrent

  @property
  def irreversible(self) -> bool:
    return self.caches[0].irreversible

  def with_slack(self, tokens: int) -> RowGroups:
    """Make room to record more queries; see `EvictingCache.with_slack`."""
    return self._map_caches(lambda cache: cache.with_slack(tokens))

  def split(self, x: Shaped[Array | np.ndarray, " ..."] | None) -> list[Any]:
    """Split an array of all rows by group; repeat one that is for all rows."""
    if x is None or x.shape[0] != self.batch:
      return [x] * len(self.caches)
    ends = np.cumsum([cache.batch for cache in self.caches])
    starts = [0, *ends[:-1]]
    return [x[a:b] for a, b in zip(starts, ends, strict=True)]

  def _map_caches(self, f: Callable[..., Any], *rows: Any) -> RowGroups:
    """Replace each cache by f(cache, *its rows of each array)."""
    parts = zip(self.caches, *map(self.split, rows), strict=True)
    caches = tuple(f(*part) for part in parts)
    return dataclasses.replace(self, caches=caches)

  @property
  def batch(self) -> int:
    """Rows, B."""
    return sum(cache.batch for cache in self.caches)

  @property
  def mesh(self) -> Mesh | None:
    return self.caches[0].mesh

  @property
  def axis(self) -> str | None:
    return self.caches[0].axis

  @property
  def shards(self) -> int:
    return self.caches[0].shards

  @property
  def capacity(self) -> int:
    return self.caches[0].capacity

  @property
  def kind(self) -> CacheConfig:
    return self.caches[0].kind

  @property
  def dtype(self) -> Any:
    return self.caches[0].dtype

  @property
  def shapes(self) -> tuple[Any, ...]:
    return self.caches[0].shapes

  @property
  def states(self) -> None:
    """None: rows have no contexts of an encoder."""
    return

  @property
  def slots(self) -> tuple[Any, ...]:
    return tuple(cache.slots for cache in self.caches)

  @property
  def length(self) -> jax.Array:
    """int32 [B], the position after each row's last token; 0 if empty."""
    return jnp.concatenate([cache.length for cache in self.caches])

  @property
  def lost(self) -> bool:
    """Whether some of its arrays were donated to a program."""
    return any(cache.lost for cache in self.caches)

  def free(self) -> np.ndarray | None:
    """Number of tokens that still fit, int [B, R]; None if it is traced."""
    per_cache = [cache.free() for cache in self.caches]
    concrete = [x for x in per_cache if x is not None]
    return np.concatenate(concrete) if len(concrete) == len(per_cache) else None

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens that do not fit; see `KVCache.check`.

    Raises:
      PromptError: If the tokens do not fit.
      OptionError: If a cache's arrays were donated.
    """
    for cache in self.caches:
      rows = cache.batch if batch == self.batch else batch
      cache.check(rows, tokens, replicated=replicated, sees=sees)

  def steps(self) -> int:
    """Number of single tokens that fit before `flush` must be called."""
    return min(cache.steps() for cache in self.caches)

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> RowGroups:
    """Make room for more tokens; see `EvictingCache.flush`."""
    return self._map_caches(lambda cache, x: cache.flush(x), rows)

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
    return dataclasses.replace(self, caches=caches), evictions

  def apply(self, evictions: tuple[Any, ...]) -> RowGroups:
    """Drop other tokens than those chosen; see `EvictingCache.apply`."""
    pairs = zip(self.caches, evictions, strict=True)
    caches = tuple(cache.apply(eviction) for cache, eviction in pairs)
    return dataclasses.replace(self, caches=caches)

  def limited(self, limit: int) -> RowGroups:
    return self._map_caches(lambda cache: cache.limited(limit))

  def with_room(self, taken: Int[np.ndarray, "B R"] | int) -> RowGroups:
    """Make room for a call's tokens; see `EvictingCache.with_room`."""
    if not np.ndim(taken):
      return self._map_caches(lambda cache: cache.with_room(taken))
    return self._map_caches(lambda cache, x: cache.with_room(x), taken)

  def truncate(self, length: Ends, most: int | None = None) -> RowGroups:
    """Remove the tokens at positions from `length` on."""
    ends = jnp.broadcast_to(jnp.asarray(length, jnp.int32), (self.batch,))
    return self._map_caches(lambda cache, x: cache.truncate(x, most), ends)

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> RowGroups:
    """Keep only the tokens in `kept` of the last call's T tokens."""
    return self._map_caches(lambda cache, x: cache.keep(x), kept)

  # `models.transformer.forward` calls these on each group's cache instead.

  def allocate(self, at: Coords, *, replicated: bool, sees: bool) -> RowGroups:
    return self._refused("allocate")

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> RowGroups:
    return self._refused("mark")

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    return self._refused("layer")

  def updated(self, slots: tuple[Any, ...]) -> RowGroups:
    return self._refused("updated")

  def _refused(self, name: str) -> Any:
    raise OptionError(
      "cache",
      f"{name} of a cache of row groups, for a call that knows none",
      "a cache of one group",
      "leave rows_at_once out",
    )


tree.register(RowGroups, ("caches",), ("hosted",))

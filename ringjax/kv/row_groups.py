"""A batch whose rows are in several caches, a group of rows in each.

Guarantees: a row is what it would be in one cache of the whole batch.
Cost: a call runs a layer for one group after another, so that it holds what a
layer computes on its way for the rows of one group; a layer's weights are
fetched once for all of them. Its program has a body for each group.
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
from ringjax.kv.cache_kind import CacheKind
from ringjax.ops.mask import Coords
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroups:
  """Caches of one kind and capacity, the rows of each behind one another.

  Attributes:
    caches: of the groups.
    hosted: of each whether its hidden states are in the host's memory while
      others run; () for none.
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
    """Groups of `rows` rows, the last of what is left.

    Args:
      batch: rows in all.
      rows: of a group.
      make: an empty cache for a number of rows.
      hidden: the fraction of the groups that are `hosted`, the last ones.
    """
    sizes = [min(rows, batch - n) for n in range(0, batch, rows)]
    many = len(sizes) - round(hidden * len(sizes))
    hosted = tuple(n >= many for n in range(len(sizes)))
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
    """With notes of more queries; see `EvictingCache.with_slack`."""
    return self._each(lambda cache: cache.with_slack(tokens))

  def split(self, x: Shaped[Array | np.ndarray, " ..."] | None) -> list[Any]:
    """What each group has of an array of all rows, or of one for all."""
    if x is None or x.shape[0] != self.batch:
      return [x] * len(self.caches)
    ends = np.cumsum([cache.batch for cache in self.caches])
    starts = [0, *ends[:-1]]
    return [x[a:b] for a, b in zip(starts, ends, strict=True)]

  def _each(self, f: Callable[..., Any], *rows: Any) -> RowGroups:
    """With f(cache, *its rows of each array) in place of each cache."""
    parts = zip(self.caches, *map(self.split, rows), strict=True)
    made = tuple(f(*part) for part in parts)
    return dataclasses.replace(self, caches=made)

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
  def kind(self) -> CacheKind:
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
    """int32 [B], the position behind each row's last token; 0 if empty."""
    return jnp.concatenate([cache.length for cache in self.caches])

  @property
  def lost(self) -> bool:
    """Whether some of its arrays were donated to a program."""
    return any(cache.lost for cache in self.caches)

  def free(self) -> np.ndarray | None:
    """Tokens that may still come, int [B, R]; None where they are traced."""
    found = [cache.free() for cache in self.caches]
    known = [x for x in found if x is not None]
    return np.concatenate(known) if len(known) == len(found) else None

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens that do not fit; see `KVCache.check`.

    Raises:
      PromptError: tokens that do not fit.
      OptionError: a cache that cannot be used any more.
    """
    for cache in self.caches:
      rows = cache.batch if batch == self.batch else batch
      cache.check(rows, tokens, replicated=replicated, sees=sees)

  def steps(self) -> int:
    """How many single tokens may come before `flush` is called."""
    return min(cache.steps() for cache in self.caches)

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> RowGroups:
    """With room for more tokens; see `EvictingCache.flush`."""
    return self._each(lambda cache, x: cache.flush(x), rows)

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
    return self._each(lambda cache: cache.limited(limit))

  def with_room(self, taken: Int[np.ndarray, "B R"] | int) -> RowGroups:
    """With room for a call's tokens; see `EvictingCache.with_room`."""
    if not np.ndim(taken):
      return self._each(lambda cache: cache.with_room(taken))
    return self._each(lambda cache, x: cache.with_room(x), taken)

  def truncate(self, length: Ends, most: int | None = None) -> RowGroups:
    """Without the tokens at positions from `length` on."""
    ends = jnp.broadcast_to(jnp.asarray(length, jnp.int32), (self.batch,))
    return self._each(lambda cache, x: cache.truncate(x, most), ends)

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> RowGroups:
    """Of the last call's T tokens those in `kept`."""
    return self._each(lambda cache, x: cache.keep(x), kept)

  # A layer is a group's own: see `models.transformer.forward`.

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

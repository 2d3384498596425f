"""Base class of caches that hold other caches, or tables: each is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Array, Shaped

from ringjax.kv.base import CallCache

CacheT = TypeVar("CacheT", bound="CacheOfParts")


class CacheOfParts(CallCache):
  """A cache with caches in one of its fields, and tables in others."""

  # Field with the caches that it holds, to which calls append; "" for none.
  part_field: ClassVar[str] = ""
  # Fields with tables that have more state during a call.
  tables: ClassVar[tuple[str, ...]] = ()

  @property
  def parts(self) -> tuple[Any, ...]:
    """Caches that it holds, to which calls append."""
    caches = getattr(self, self.part_field) if self.part_field else ()
    return caches if isinstance(caches, tuple) else (caches,)

  def with_parts(self: CacheT, parts: Iterable[Any]) -> CacheT:
    """Replace the parts by others."""
    if not self.part_field:
      return self
    cache: Any = self
    is_tuple = isinstance(getattr(self, self.part_field), tuple)
    new = tuple(parts) if is_tuple else next(iter(parts))
    return dataclasses.replace(cache, **{self.part_field: new})

  def split(
    self, x: Shaped[Array | np.ndarray, " ..."] | np.integer | int | None
  ) -> list[Any]:
    """Split an array of all rows by part; repeat one that is for all rows."""
    sizes = [part.batch for part in self.parts]
    if isinstance(x, int | np.integer | None) or x.shape[:1] != (sum(sizes),):
      return [x] * len(sizes)
    ends = np.cumsum(sizes).tolist()
    return [x[a:b] for a, b in zip([0, *ends], ends, strict=False)]

  def by_part(self, *rows: Any) -> Iterable[tuple[Any, ...]]:
    """Each part, with its rows of each array."""
    if len(self.parts) == 1:
      return [(self.parts[0], *rows)]
    return zip(self.parts, *map(self.split, rows), strict=True)

  def each_part(self: CacheT, f: Callable[..., Any], *rows: Any) -> CacheT:
    """Replace each part by f(part, *its rows of each array)."""
    return self.with_parts(f(*part) for part in self.by_part(*rows))

  def each_table(self: CacheT, f: Callable[[Any], Any]) -> CacheT:
    """Replace each of the own tables by f(table)."""
    fields = {}
    for name in self.tables:
      table = getattr(self, name)
      is_tuple = isinstance(table, tuple)
      fields[name] = tuple(map(f, table)) if is_tuple else f(table)
    cache: Any = self
    return dataclasses.replace(cache, **fields)

"""Kinds of caches: how the keys and values of a model are stored."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringjax.errors import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKind:
  """How a cache stores keys and values.

  Attributes:
    unrotated: keys are stored before their rotation and rotated where they
      are read, so that `load` can move them to other positions at no copy of
      the stored numbers. Reading costs a rotation of each key.
  """

  unrotated: bool = False

  def __str__(self) -> str:
    return next(name for name, kind in KINDS.items() if kind == self)


DENSE = CacheKind()
KINDS: dict[str, CacheKind] = {
  "dense": DENSE,
  "unrotated": CacheKind(unrotated=True),
}


def cache_kind(kind: Any) -> CacheKind:
  """A kind by its name or as it is.

  Raises:
    OptionError: neither.
  """
  if isinstance(kind, CacheKind):
    return kind
  if isinstance(kind, str) and kind in KINDS:
    return KINDS[kind]
  raise OptionError(
    "cache kind",
    repr(kind),
    f"one of {', '.join(KINDS)}, or an rj.kv.CacheKind",
    "pass one of these names, or leave it out for the dense cache",
  )

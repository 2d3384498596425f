"""Kinds of caches: how the keys and values of a model are stored."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringjax.checks import boolean, positive_int
from ringjax.errors import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKind:
  """How a cache stores keys and values.

  Attributes:
    unrotated: keys are stored before their rotation and rotated where they
      are read, so that `load` can move them to other positions at no copy of
      the stored numbers. Reading costs a rotation of each key.
    windowed: layers that look back w tokens keep w + `slack` of each row in a
      ring buffer; other layers keep all.
    slack: tokens of a call that may be taken back from a ring buffer, by
      `keep` or `truncate`; at least 1.
  """

  unrotated: bool = False
  windowed: bool = False
  slack: int = 128

  def __post_init__(self) -> None:
    boolean("unrotated", self.unrotated)
    boolean("windowed", self.windowed)
    positive_int("slack", self.slack)

  def __str__(self) -> str:
    for name, kind in KINDS.items():
      if dataclasses.replace(self, slack=kind.slack) == kind:
        same = self.slack == kind.slack
        return name if same else f"{name}:slack={self.slack}"
    return f"windowed:unrotated=True,slack={self.slack}"


DENSE = CacheKind()
WINDOWED = CacheKind(windowed=True)
KINDS: dict[str, CacheKind] = {
  "dense": DENSE,
  "unrotated": CacheKind(unrotated=True),
  "windowed": WINDOWED,
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

"""Kinds of caches: how the keys and values of a model are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ringjax.checks import boolean, positive_int
from ringjax.errors import OptionError
from ringjax.kv.codecs import (
  Calibrated,
  Calibration,
  CodeBook,
  Codec,
  Floats,
  Hadamard,
  Integers,
  VectorCodec,
)


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
    codec: stores keys and values in fewer bytes; None stores the numbers.
      States of recurrent layers are left as they are.
  """

  unrotated: bool = False
  windowed: bool = False
  slack: int = 128
  codec: Codec | None = None

  def __post_init__(self) -> None:
    boolean("unrotated", self.unrotated)
    boolean("windowed", self.windowed)
    positive_int("slack", self.slack)
    if not isinstance(self.codec, Codec | None):
      raise OptionError(
        "codec",
        repr(self.codec),
        "an rj.kv.Codec, or None",
        "pass rj.kv.Codec(keys=rj.kv.Integers(bits=4), values=...)",
      )
    if self.codec is not None and self.codec.unrotated and not self.unrotated:
      raise OptionError(
        "unrotated",
        "False, with a codec of keys before their rotation",
        "True",
        "pass rj.kv.CacheKind(codec=..., unrotated=True)",
      )

  def for_model(self, load: Callable[[str], Calibration]) -> CacheKind:
    """For a model; `load` reads the calibration that a folder has of it."""
    if self.codec is None:
      return self
    return dataclasses.replace(self, codec=self.codec.for_model(load))

  def options(self) -> dict[str, Any]:
    """What can be set, by name: its own fields, and the codec's options."""
    found = {name: getattr(self, name) for name in self._own()}
    return found | ({} if self.codec is None else self.codec.options())

  def with_options(self, options: dict[str, Any]) -> CacheKind:
    """With other values of what `options` names."""
    own = {n: value for n, value in options.items() if n in self._own()}
    if self.codec is not None:
      own["codec"] = self.codec.with_options(options)
    return dataclasses.replace(self, **own)

  def _own(self) -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(self))
    return tuple(name for name in names if name != "codec")

  def __str__(self) -> str:
    """As `launch.generate --cache=` takes it: a name and what differs."""
    mine = self.options()
    best: tuple[int, str] | None = None
    for name, kind in KINDS.items():
      like = kind.options()
      if like.keys() != mine.keys() or _classes(kind) != _classes(self):
        continue
      other = [f"{n}={x}" for n, x in mine.items() if like[n] != x]
      text = f"{name}:{','.join(other)}" if other else name
      if best is None or len(other) < best[0]:
        best = len(other), text
    return repr(self) if best is None else best[1]


def _classes(kind: CacheKind) -> tuple[type, ...]:
  codec = kind.codec
  return () if codec is None else (type(codec.keys), type(codec.values))


def _both(vectors: VectorCodec) -> CacheKind:
  codec = Codec(keys=vectors, values=vectors)
  return CacheKind(windowed=True, codec=codec)


def _calibrated(bits: int) -> CacheKind:
  codec = Calibrated(
    keys=CodeBook(bits=bits, by="channel"),
    values=CodeBook(bits=bits, by="token"),
  )
  return CacheKind(windowed=True, unrotated=True, codec=codec)


DENSE = CacheKind()
WINDOWED = CacheKind(windowed=True)
KINDS: dict[str, CacheKind] = {
  "dense": DENSE,
  "unrotated": CacheKind(unrotated=True),
  "windowed": WINDOWED,
  "bfloat16": _both(Floats(format="bfloat16")),
  "int8": _both(Integers(bits=8)),
  "float8": _both(Floats(format="e4m3")),
  "int4": _both(Integers(bits=4)),
  "int2": _both(Integers(bits=2, group=32)),
  "hadamard4": _both(Hadamard(bits=4)),
  "hadamard3": _both(Hadamard(bits=3)),
  "hadamard2": _both(Hadamard(bits=2)),
  "nuq4": _calibrated(4),
  "nuq3": _calibrated(3),
  "nuq2": _calibrated(2),
}


def cache_kind(kind: Any) -> CacheKind:
  """A kind by its name, or as it is.

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
    "pass one of these names, or leave it out",
  )

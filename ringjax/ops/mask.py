"""Attention masks: predicates over the coordinates of a query and a key.

Guarantees: `allows(q, k)` gives, elementwise and by broadcasting, whether a
query may see a key; `bound(q, k)` gives for two ranges of tokens whether *some*
pair may be allowed and whether *all* pairs are: it never denies a pair that
`allows` grants, nor promises one that it refuses. No function here makes a
T x S array at the edge. A token whose `seg` is 0 is padding: it sees no token
and no token sees it, whatever the mask. Positions are any int32: none of a
mask's numbers wraps around.

  causal 4x4    Window(2) & Causal()   Causal() | Prefix(2)   Chunked(2)
  1 0 0 0       1 0 0 0                1 1 0 0                1 1 0 0
  1 1 0 0       1 1 0 0                1 1 0 0                1 1 0 0
  1 1 1 0       0 1 1 0                1 1 1 0                0 0 1 1
  1 1 1 1       0 0 1 1                1 1 1 1                0 0 1 1
"""

from __future__ import annotations

import abc
import dataclasses
import numbers
import types
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError

M = TypeVar("M")

# Replaces padding in an extent, which is merely wider than necessary where
# positions are beyond it.
_FAR = 2**30
_MOST = 2**31 - 1  # The largest int32.


class Coords(NamedTuple):
  """Coordinates of tokens: position and document, int32 [B or 1, T] each.

  `seg` is 0 for padding and for empty cache slots, and at least 1 elsewhere.
  """

  pos: jax.Array
  seg: jax.Array

  def __getitem__(self, index: Any) -> Coords:  # pyrefly: ignore
    return Coords(self.pos[index], self.seg[index])


class Extent(NamedTuple):
  """Smallest and largest coordinates of the real tokens of a tile."""

  first: jax.Array
  last: jax.Array
  first_seg: jax.Array
  last_seg: jax.Array
  some: jax.Array  # any real token
  all: jax.Array  # no padding


def extent(at: Coords, axis: int = -1) -> Extent:
  """Smallest and largest coordinates of `at` along `axis`."""
  real = at.seg != 0
  low = lambda x: jnp.min(jnp.where(real, x, _FAR), axis)
  high = lambda x: jnp.max(jnp.where(real, x, -_FAR), axis)
  return Extent(
    low(at.pos),
    high(at.pos),
    low(at.seg),
    high(at.seg),
    jnp.any(real, axis),
    jnp.all(real, axis),
  )


def _library(x: Array | np.ndarray) -> types.ModuleType:
  """NumPy for its arrays, else jax.numpy."""
  return jnp if isinstance(x, jax.Array) else np


def moved(pos: Int[Array, "*N"], by: int) -> Int[Array, "*N"]:
  """Shift positions by `by`, clipped to the range of int32."""
  lib = _library(pos)
  by = max(-(2**32), min(by, 2**32))
  while by:
    step = max(-_MOST, min(by, _MOST))
    if step > 0:
      pos = lib.minimum(pos, _MOST - step) + step
    else:
      pos = lib.maximum(pos, -_MOST - 1 - step) + step
    by -= step
  return pos


def distance(
  q: Int[Array, "*N"], k: Int[Array, "*M"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "*L"]:
  """Distance |q - k| of positions in floating point, as int32 may overflow."""
  difference = jnp.where(q > k, q - k, k - q)  # Modulo 2**32.
  magnitude = difference.astype(dtype)
  return jnp.where(difference < 0, magnitude + 2.0**32, magnitude)


class Mask(abc.ABC):
  """Base class of the masks. Combine them with `&` and `|`.

  Custom masks are frozen dataclasses, made pytrees by `ringjax.tree.register`,
  whose docstring says why JAX's own function does not do.
  """

  @abc.abstractmethod
  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    """Whether query `q` may see key `k`; the fields broadcast."""

  @abc.abstractmethod
  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    """Return (some pair may be allowed, all pairs are); fields broadcast."""

  @property
  def reach(self) -> tuple[int | None, int | None]:
    """Largest distances (back, forward) that a query sees; None: no limit."""
    return None, None

  @property
  def relates_segments(self) -> bool:
    """Whether the mask decides which segments see each other.

    Masks that do not are combined with `SameSegment` if tokens have segments.
    """
    return False

  def __and__(self, other: Mask) -> Mask:
    return And(_operand(self, "&"), _operand(other, "&"))

  def __or__(self, other: Mask) -> Mask:
    return Or(_operand(self, "|"), _operand(other, "|"))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def _mask(cls: type[M]) -> type[M]:
  """Make a frozen dataclass whose array fields are pytree leaves."""
  data_class: Any = dataclasses.dataclass(frozen=True)(cls)
  fields = dataclasses.fields(data_class)
  data = [f.name for f in fields if f.metadata.get("data")]
  meta = [f.name for f in fields if f.name not in data]
  return tree.register(data_class, data, meta)


def _operand(mask: object, operator: str) -> Mask:
  if not isinstance(mask, Mask):
    raise OptionError(
      f"operand of {operator}",
      type(mask).__name__,
      "a ringjax mask such as Causal() or Window(4096)",
      "pass a boolean array as mask= and objects as Causal() & ...",
    )
  return mask


def _true(q: jax.Array | np.ndarray, k: jax.Array | np.ndarray) -> jax.Array:
  return jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)


@_mask
class Everything(Mask):
  """Every query sees every key."""

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return _true(q.pos, k.pos)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    always = _true(q.first, k.first)
    return always, always


@_mask
class Causal(Mask):
  """A query sees the keys at and before its position."""

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return k.pos <= q.pos

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    return k.first <= q.last, k.last <= q.first

  @property
  def reach(self) -> tuple[int | None, int | None]:
    return None, 0


@_mask
class Window(Mask):
  """A query sees keys less than `size` positions away, itself included.

  `ahead` limits how far forward it looks (default size - 1: a symmetric
  window). `Causal() & Window(4096)` sees the last 4096 tokens.
  """

  size: int
  ahead: int | None = None

  def __post_init__(self) -> None:
    positive_int("Window size", self.size)
    is_int = isinstance(self.ahead, numbers.Integral)
    is_int = is_int and not isinstance(self.ahead, bool)
    if self.ahead is not None and (not is_int or self.ahead < 0):
      raise OptionError(
        "Window ahead",
        repr(self.ahead),
        "None or an int of at least 0",
        "use Causal() & Window(size) to look back only",
      )

  @property
  def _limits(self) -> tuple[int, int]:
    return self.size - 1, self.size - 1 if self.ahead is None else self.ahead

  @property
  def reach(self) -> tuple[int, int]:
    keys_before, keys_after = self._limits
    return min(keys_before, _MOST), min(keys_after, _MOST)

  # Positions are shifted and compared: their difference may overflow int32.

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    keys_before, keys_after = self._limits
    return (k.pos >= moved(q.pos, -keys_before)) & (
      k.pos <= moved(q.pos, keys_after)
    )

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    keys_before, keys_after = self._limits
    any_allowed = k.last >= moved(q.first, -keys_before)
    any_allowed &= k.first <= moved(q.last, keys_after)
    all_allowed = k.first >= moved(q.last, -keys_before)
    return any_allowed, all_allowed & (k.last <= moved(q.first, keys_after))


@_mask
class SameSegment(Mask):
  """A query sees the keys of the same document (equal `seg`)."""

  @property
  def relates_segments(self) -> bool:
    return True

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return q.seg == k.seg

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    any_allowed = (k.first_seg <= q.last_seg) & (q.first_seg <= k.last_seg)
    single_segments = (q.first_seg == q.last_seg) & (k.first_seg == k.last_seg)
    return any_allowed, single_segments & (q.first_seg == k.first_seg)


# Special segments of `SeparateDocuments`; larger ones are its documents.
READER, SHARED_PREFIX = 1, 2


@_mask
class SeparateDocuments(Mask):
  """Documents that do not see each other, and tokens that see them all.

  Queries of segment 1 see every segment: questions, answers, link tokens. Keys
  of segment 2, a shared prefix, are seen by all queries. Every other segment,
  a document, sees itself and segment 2. A model's layers add the order:
  `Causal() & SeparateDocuments()` is the mask of KVLink (Yang et al. 2025,
  arXiv 2502.16002).

  segments 3 3 1 4 4 1, causal
  1 0 0 0 0 0
  1 1 0 0 0 0
  1 1 1 0 0 0
  0 0 0 1 0 0
  0 0 0 1 1 0
  1 1 1 1 1 1
  """

  @property
  def relates_segments(self) -> bool:
    return True

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return (q.seg == READER) | (k.seg == SHARED_PREFIX) | (q.seg == k.seg)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    any_allowed, same_segment = SameSegment().bound(q, k)
    any_allowed |= q.first_seg <= READER
    any_allowed |= (k.first_seg <= SHARED_PREFIX) & (
      k.last_seg >= SHARED_PREFIX
    )
    all_allowed = same_segment | (
      (q.first_seg == READER) & (q.last_seg == READER)
    )
    prefix = (k.first_seg == SHARED_PREFIX) & (k.last_seg == SHARED_PREFIX)
    return any_allowed, all_allowed | prefix


@_mask
class Prefix(Mask):
  """Every query sees the keys at positions below `length`.

  `length` is an int, or int32 [B] for a different prefix in each example.
  A prefix language model is `Causal() | Prefix(length)`.
  """

  length: Int[Array, "*B"] | int = dataclasses.field(metadata={"data": True})

  def _length(self, like: jax.Array) -> jax.Array:
    length = jnp.asarray(self.length, jnp.int32)
    if length.ndim == 0:
      return length
    return length.reshape(length.shape + (1,) * (like.ndim - 1))

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return (k.pos < self._length(k.pos)) & _true(q.pos, k.pos)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    length = self._length(k.first)
    always = _true(q.first, k.first)
    return (k.first < length) & always, (k.last < length) & always


def _chunk(pos: Int[Array, "*N"], size: int) -> Int[Array, "*N"]:
  """Index of the chunk of `size` positions that each position is in."""
  if size <= _MOST:
    return pos // size
  return _library(pos).where(pos < 0, -1, 0)


@_mask
class Chunked(Mask):
  """A query sees the keys of the same chunk of `size` positions (Llama 4)."""

  size: int

  def __post_init__(self) -> None:
    positive_int("Chunked size", self.size)

  @property
  def reach(self) -> tuple[int | None, int | None]:
    return min(self.size - 1, _MOST), min(self.size - 1, _MOST)

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return _chunk(q.pos, self.size) == _chunk(k.pos, self.size)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    q0, q1 = (_chunk(x, self.size) for x in (q.first, q.last))
    k0, k1 = (_chunk(x, self.size) for x in (k.first, k.last))
    return (k0 <= q1) & (q0 <= k1), (q0 == k1) & (q1 == k0)


@_mask
class BlockCausal(Mask):
  """Causal between blocks of `size` positions, full inside a block."""

  size: int

  def __post_init__(self) -> None:
    positive_int("BlockCausal size", self.size)

  @property
  def reach(self) -> tuple[int | None, int | None]:
    return None, min(self.size - 1, _MOST)

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return _chunk(k.pos, self.size) <= _chunk(q.pos, self.size)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    q0, q1 = (_chunk(x, self.size) for x in (q.first, q.last))
    k0, k1 = (_chunk(x, self.size) for x in (k.first, k.last))
    return k0 <= q1, k1 <= q0


@_mask
class ChunksBack(Mask):
  """A query sees the keys of chunks that are `first` to `last` chunks earlier.

  `last` is None for all earlier ones. `ChunksBack(4, 1, 1)` sees the chunk of 4
  positions before its own.
  """

  size: int
  first: int = 0
  last: int | None = None

  def __post_init__(self) -> None:
    integer("ChunksBack size", self.size, least=2)
    for name in ("first", "last"):
      value = getattr(self, name)
      if value is not None or name == "first":
        integer(f"ChunksBack {name}", value, least=0)

  @property
  def reach(self) -> tuple[int | None, int | None]:
    back = None
    if self.last is not None:
      back = min((self.last + 1) * self.size - 1, _MOST)
    return back, 0 if self.first else min(self.size - 1, _MOST)

  def _within(self, nearest: jax.Array, farthest: jax.Array) -> jax.Array:
    allowed = farthest >= self.first
    return allowed if self.last is None else allowed & (nearest <= self.last)

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    back = _chunk(q.pos, self.size) - _chunk(k.pos, self.size)
    return self._within(back, back)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    q0, q1 = (_chunk(x, self.size) for x in (q.first, q.last))
    k0, k1 = (_chunk(x, self.size) for x in (k.first, k.last))
    nearest, farthest = q0 - k1, q1 - k0
    any_allowed = self._within(nearest, farthest)
    return any_allowed, self._within(farthest, nearest)


@_mask
class Beyond(Mask):
  """A query sees the keys `size` or more positions before it."""

  size: int

  def __post_init__(self) -> None:
    positive_int("Beyond size", self.size)

  @property
  def reach(self) -> tuple[int | None, int | None]:
    return None, 0

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    # Shifted positions are clipped: no key is before the first one of int32.
    return k.pos < moved(q.pos, 1 - self.size)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    return (
      k.first < moved(q.last, 1 - self.size),
      k.last < moved(q.first, 1 - self.size),
    )


@_mask
class Behind(Mask):
  """A query sees the key `by` positions before it, and no other."""

  by: int = 1

  def __post_init__(self) -> None:
    positive_int("Behind by", self.by)

  @property
  def reach(self) -> tuple[int | None, int | None]:
    return min(self.by, _MOST), 0

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    # A shifted position may be clipped: never both of them.
    return (k.pos == moved(q.pos, -self.by)) & (moved(k.pos, self.by) == q.pos)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    first, last = moved(q.first, -self.by), moved(q.last, -self.by)
    any_allowed = (k.first <= last) & (first <= k.last)
    single = (q.first == q.last) & (k.first == k.last)
    is_behind = (k.first == first) & (moved(k.first, self.by) == q.first)
    return any_allowed, single & is_behind


@_mask
class Since(Mask):
  """Every query sees the keys at position `first` and later ones."""

  first: int

  def __post_init__(self) -> None:
    integer("Since first", self.first, least=0, most=_MOST)

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return (k.pos >= self.first) & _true(q.pos, k.pos)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    always = _true(q.first, k.first)
    return (k.last >= self.first) & always, (k.first >= self.first) & always


@dataclasses.dataclass(frozen=True)
class _MaskPair(Mask):
  # Any: transformations put placeholders here while they rebuild the tree.
  left: Mask = dataclasses.field(metadata={"data": True})
  right: Mask = dataclasses.field(metadata={"data": True})


@_mask
class And(_MaskPair):
  """Both masks allow the pair."""

  @property
  def reach(self) -> tuple[int | None, int | None]:
    pairs = zip(self.left.reach, self.right.reach, strict=True)
    keys_before, keys_after = (
      min((r for r in pair if r is not None), default=None) for pair in pairs
    )
    return keys_before, keys_after

  @property
  def relates_segments(self) -> bool:
    return self.left.relates_segments or self.right.relates_segments

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return self.left.allows(q, k) & self.right.allows(q, k)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    a, b = self.left.bound(q, k), self.right.bound(q, k)
    return a[0] & b[0], a[1] & b[1]


@_mask
class Or(_MaskPair):
  """One of the masks allows the pair."""

  @property
  def reach(self) -> tuple[int | None, int | None]:
    pairs = zip(self.left.reach, self.right.reach, strict=True)
    keys_before, keys_after = (
      None if None in pair else max(r for r in pair if r is not None)
      for pair in pairs
    )
    return keys_before, keys_after

  @property
  def relates_segments(self) -> bool:
    return self.left.relates_segments and self.right.relates_segments

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return self.left.allows(q, k) | self.right.allows(q, k)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    a, b = self.left.bound(q, k), self.right.bound(q, k)
    return a[0] | b[0], a[1] | b[1]


def visible(mask: Mask, q: Coords, k: Coords) -> Bool[Array, " ..."]:
  """Evaluate `mask.allows` between real tokens; the fields broadcast."""
  return mask.allows(q, k) & (q.seg != 0) & (k.seg != 0)

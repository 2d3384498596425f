"""Code books: numbers as the nearest of a few levels that fit a model's keys.

Guarantees: the numbers that are farthest out, a fixed number a vector, are
kept as float16, and their codes are 0; others are the nearest level. With
`outliers` such as "1%" these are the farthest of a page of vectors, any number
in one, as the paper has them; then pages are encoded whole. Decoding needs the
levels (and for keys the scale of each channel), which come from a
calibration. A key that is closer to the sink than to the channels' zeros, as
that of a text's first token is, has codes of what it has more than the sink,
finer by the sink's factor: at no more bytes, wherever the key is stored.
Memory: `bits` bits a number; an outlier takes three bytes (four in heads of
more than 256 numbers), and the scale and zero of a vector four.
Ref: Hooper et al. 2024, KVQuant, arXiv 2401.18079: keys by channel, before
their rotation; values by token; dense codes and sparse outliers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.kv.codecs import code_bytes, page_outliers
from ringjax.kv.codecs.levels import lookup, nearest
from ringjax.kv.codecs.page_outliers import PageOutliers
from ringjax.ops.attention.cached.code_format import CodeFormat, packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeBook:
  """Levels of a layer's heads, and exact outliers.

  Attributes:
    bits: 2, 3 or 4.
    outliers: Part of a vector that is kept exactly, at least one number if it
      is above 0; or a text, "1%": the part of a page of `group` tokens, with
      room for a quarter more, see `PageOutliers`.
    by: "channel": constants are (scale, zero, sink, factor, levels), [K, D]
      three times, [K, 1] and [K, 2**bits], or without outliers (scale, zero,
      levels); "token": each vector has a scale and a zero, and the constants
      are the levels alone.
    group: Number of tokens of a page, where outliers are a part of it.
  """

  needs_constants: ClassVar[bool] = True

  bits: int = 3
  outliers: int | float | str = 0.01
  by: str = "channel"
  group: int = 32

  def __post_init__(self) -> None:
    one_of("bits", self.bits, code_bytes.LEVEL_BITS)
    outliers = page_outliers.checked(self.outliers)
    object.__setattr__(self, "outliers", outliers)
    one_of("by", self.by, ("channel", "token"))
    positive_int("group", self.group)
    if self.paged is None and self.group != CodeBook.group:
      raise OptionError(
        "group",
        f"{self.group}, with outliers={self.outliers} of each vector",
        "outliers as a part of a page of so many tokens",
        "write outliers=1%, or leave group out",
      )

  @property
  def share(self) -> float:
    """Part of the numbers that is kept exactly."""
    return page_outliers.share_of(self.outliers)

  @property
  def paged(self) -> PageOutliers | None:
    """The outliers of a page of vectors; None: each vector has some."""
    if not isinstance(self.outliers, str):
      return None
    return PageOutliers(share=self.share, group=self.group, marks=self.sinks)

  @property
  def page(self) -> int | None:
    """Tokens that are encoded together; None: each is encoded alone."""
    return self.group if isinstance(self.outliers, str) else None

  def sparse(self, dim: int) -> int:
    """Numbers of a vector that are kept exactly, where all keep as many."""
    return max(1, round(self.share * dim)) if self.share > 0 else 0

  @property
  def sinks(self) -> bool:
    """Whether a vector says if it is coded by its distance from the sink.

    The lowest bit of its first outlier says so, or its bit in a page.
    """
    return self.by == "channel" and self.share > 0

  def width(self, dim: int) -> int:
    return sum(self.byte_parts(dim).values())

  def byte_parts(self, dim: int) -> dict[str, int]:
    """Bytes of a vector: codes, scales, outliers."""
    outliers = (2 + np.dtype(_index_dtype(dim)).itemsize) * self.sparse(dim)
    if self.paged is not None:
      outliers = self.paged.width(dim)
    return {
      "codes": packed_bytes(dim, self.bits),
      "scales": 4 if self.by == "token" else 0,
      "outliers": outliers,
    }

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    dim, x = x.shape[-1], x.astype(jnp.float32)
    near_sink = None
    if self.by == "channel":
      scale, zero = (_per_channel(c) for c in constants[:2])
      if self.sinks:
        near_sink, scale, zero = self._bases(x, constants)
      index, is_outlier = self._outliers((x - zero) / scale)
      scale_bytes = []
    else:
      index, is_outlier, scale, zero = self.by_token(x)
      scale_bytes = [code_bytes.half_bytes(jnp.concatenate([scale, zero], -1))]
      scale = jnp.where(scale > 0, scale, 1)
    codes = nearest((x - zero) / scale, constants[-1])
    # A kernel adds an outlier's difference from code 0.
    codes = jnp.where(is_outlier, jnp.zeros_like(codes), codes)
    parts = [code_bytes.pack(codes, self.bits), *scale_bytes]
    if self.paged is not None:
      parts.append(self.paged.encode(x, index, near_sink))
    elif self.sparse(dim):
      outlier_values = jnp.take_along_axis(x, index, -1)
      index = index.astype(_index_dtype(dim))
      numbers = code_bytes.half_bytes(outlier_values)
      if near_sink is not None:
        mark = jnp.zeros_like(numbers[..., :1]) + near_sink.astype(jnp.uint8)
        low = (numbers[..., :1] & np.uint8(0xFE)) | mark
        numbers = jnp.concatenate([low, numbers[..., 1:]], -1)
      parts += [code_bytes.to_bytes(index), numbers]
    return jnp.concatenate(parts, -1)

  def _bases(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any]
  ) -> tuple[Bool[Array, "B K T 1"], jax.Array, jax.Array]:
    """Whether vectors are coded from the sink; the scale and zero of each.

    The choice is that of less squared error, in scales of the channels.
    """
    scale, zero, sink, factor = (_per_channel(c) for c in constants[:4])
    count = self.sparse(x.shape[-1])

    def error(zero: jax.Array, factor: jax.Array | float) -> jax.Array:
      y = (x - zero) / (scale * factor)
      off = y - lookup(nearest(y, constants[-1]), constants[-1])
      off = jnp.where(marked(_farthest(y, count), x.shape[-1]), 0, off)
      return jnp.sum(jnp.square(off * factor), -1, keepdims=True)

    # In 8 bits: last bits depend on the program.
    less = lambda x: lax.reduce_precision(x, 8, 7)
    near_sink = less(error(sink, factor)) < less(error(zero, 1.0))
    return (
      near_sink,
      scale * jnp.where(near_sink, factor, 1),
      jnp.where(near_sink, sink, zero),
    )

  def by_token(
    self, x: Float[Array, "B K T D"]
  ) -> tuple[
    Int[Array, "B K _ n"],
    Bool[Array, "B K T D"],
    Float[Array, "B K T 1"],
    Float[Array, "B K T 1"],
  ]:
    """Scales of vectors that have their own.

    Returns:
      Indices of outliers, in vectors or in pages; whether a number is one;
      scale and zero of the other numbers of each vector.
    """
    mean = jnp.mean(x, -1, keepdims=True)
    distances = x - mean
    if self.paged is not None:
      # Pages have vectors of different size.
      spread = jnp.sqrt(jnp.mean(jnp.square(distances), -1, keepdims=True))
      distances = distances / jnp.where(spread > 0, spread, 1)
    index, is_outlier = self._outliers(distances)
    inside = jnp.where(is_outlier, mean, x)
    largest = jnp.max(inside, -1, keepdims=True)
    smallest = jnp.min(inside, -1, keepdims=True)
    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    scale, zero = half((largest - smallest) / 2), half((largest + smallest) / 2)
    return index, is_outlier, scale, zero

  def _outliers(
    self, distances: Float[Array, "B K T D"]
  ) -> tuple[Int[Array, "B K _ n"], Bool[Array, "B K T D"]]:
    """Places of the farthest numbers, and whether a number is one of them."""
    dim = distances.shape[-1]
    if self.paged is not None:
      index = self.paged.farthest(distances)
      return index, self.paged.marked(index, dim)
    index = _farthest(distances, self.sparse(dim))
    return index, marked(index, dim)

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    x = lookup(code_bytes.unpack(data, self.bits, dim), constants[-1])
    start = packed_bytes(dim, self.bits)
    if self.by == "channel":
      scale, zero = (_per_channel(c) for c in constants[:2])
      if self.sinks:
        if self.paged is not None:
          near_sink = self.paged.marks_of(data[..., start:], dim)
        else:
          index_bytes = np.dtype(_index_dtype(dim)).itemsize
          place = start + self.sparse(dim) * index_bytes
          near_sink = (data[..., place : place + 1] & np.uint8(1)) != 0
        sink, factor = (_per_channel(c) for c in constants[2:4])
        scale = scale * jnp.where(near_sink, factor, 1)
        zero = jnp.where(near_sink, sink, zero)
    else:
      scale, zero = jnp.split(code_bytes.halves(data, start, 2), 2, -1)
      start += 4
    x = x * scale + zero
    if self.paged is not None:
      return self.paged.replace(x, data[..., start:]).astype(dtype)
    count, index_dtype = self.sparse(dim), _index_dtype(dim)
    if count:
      index = code_bytes.from_bytes(data, start, count, index_dtype)
      start += count * np.dtype(index_dtype).itemsize
      outlier_values = code_bytes.halves(data, start, count)
      place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
      for n in range(count):
        is_outlier = place == index[..., n : n + 1].astype(jnp.int32)
        x = jnp.where(is_outlier, outlier_values[..., n : n + 1], x)
    return x.astype(dtype)

  def code_format(self, dim: int) -> CodeFormat | None:
    """Layout of a vector's bytes; None: vectors of a page share some."""
    if self.paged is not None:
      return None
    channels = self.by == "channel"
    return CodeFormat(
      dim=dim,
      bits=self.bits,
      halves=0 if channels else 2,
      by_constants=True,
      by_channel=channels,
      outliers=self.sparse(dim),
      sinks=self.sinks,
    )


def _index_dtype(dim: int) -> type:
  return np.uint8 if dim <= 256 else np.uint16


def _per_channel(x: jax.Array | np.ndarray) -> jax.Array:
  """[K, D] or [K, 1] in a shape that goes with [B, K, T, D]."""
  return jnp.asarray(x, jnp.float32)[None, :, None]


def _farthest(x: jax.Array, count: int) -> jax.Array:
  """Indices of the `count` largest magnitudes, int32 [..., count].

  Of equal ones the first. Magnitudes are compared in 13 bits: calibration may
  give a token the extremes of two channels, whose last bits depend on the
  program that divides by them.
  """
  magnitudes, indices = lax.reduce_precision(jnp.abs(x), 8, 12), []
  for _ in range(count):
    index = jnp.argmax(magnitudes, -1, keepdims=True).astype(jnp.int32)
    indices.append(index)
    magnitudes = jnp.where(marked(index, x.shape[-1]), -1, magnitudes)
  if not indices:
    return jnp.zeros((*x.shape[:-1], 0), jnp.int32)
  return jnp.concatenate(indices, -1)


def marked(index: Int[Array, "*batch n"], dim: int) -> Bool[Array, "*batch D"]:
  """True at the places of `index`."""
  shape = (*index.shape[:-1], dim)
  place = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
  marked = jnp.zeros(shape, bool)
  for n in range(index.shape[-1]):
    marked |= place == index[..., n : n + 1]
  return marked

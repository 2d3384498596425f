"""Code books: numbers as the nearest of a few levels that fit a model's keys.

Guarantees: the numbers that are farthest out, a fixed number a vector, are
kept as float16, and their codes are 0; others are the nearest level. Decoding
needs the levels (and for keys the scale of each channel), which come from a
calibration. A key that is closer to the sink than to the channels' zeros, as
that of a text's first token is, has codes of what it has more than the sink,
finer by the sink's factor: at no more bytes, wherever the key is stored.
Memory: `bits` bits a number; an outlier takes three bytes (four in heads of
more than 256 numbers), and a vector with a scale of its own four.
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

from ringjax.checks import number, one_of
from ringjax.kv.codecs import code_bytes
from ringjax.kv.codecs.levels import lookup, nearest
from ringjax.ops.attention.code_format import CodeFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeBook:
  """Levels of a layer's heads, and exact outliers.

  Attributes:
    bits: 2, 3 or 4.
    outliers: the part of a vector that is kept exactly, at least one number if
      it is above 0.
    by: "channel": constants are (scale, zero, sink, factor, levels), [K, D]
      three times, [K, 1] and [K, 2**bits], or without outliers (scale, zero,
      levels); "token": a vector has a scale and a zero of its own, and the
      constants are the levels alone.
  """

  needs_constants: ClassVar[bool] = True

  bits: int = 3
  outliers: int | float = 0.01
  by: str = "channel"

  def __post_init__(self) -> None:
    one_of("bits", self.bits, (2, 3, 4))
    number("outliers", self.outliers, least=0, most=0.5)
    one_of("by", self.by, ("channel", "token"))

  def sparse(self, dim: int) -> int:
    """Numbers of a vector that are kept exactly."""
    return max(1, round(self.outliers * dim)) if self.outliers > 0 else 0

  @property
  def sinks(self) -> bool:
    """Whether a vector says if it is coded by its distance from the sink.

    The lowest bit of its first outlier says so.
    """
    return self.by == "channel" and self.outliers > 0

  def width(self, dim: int) -> int:
    own = 4 if self.by == "token" else 0
    index = np.dtype(_index_dtype(dim)).itemsize
    codes = code_bytes.packed_bytes(dim, self.bits)
    return codes + own + (2 + index) * self.sparse(dim)

  def encode(
    self, x: Float[Array, "B K T D"], constants: Sequence[Any] = ()
  ) -> UInt8[Array, "B K T X"]:
    dim, x = x.shape[-1], x.astype(jnp.float32)
    count = self.sparse(dim)
    near_sink = None
    if self.by == "channel":
      scale, zero = (_per_channel(c) for c in constants[:2])
      if self.sinks:
        near_sink, scale, zero = self._bases(x, constants)
      index = _farthest((x - zero) / scale, count)
      own = []
    else:
      index, scale, zero = self.by_token(x)
      own = [code_bytes.half_bytes(jnp.concatenate([scale, zero], -1))]
      scale = jnp.where(scale > 0, scale, 1)
    codes = nearest((x - zero) / scale, constants[-1])
    if count:
      # So that a kernel can add what they have more.
      codes = jnp.where(marked(index, dim), jnp.zeros_like(codes), codes)
    parts = [code_bytes.pack(codes, self.bits), *own]
    if count:
      kept = jnp.take_along_axis(x, index, -1)
      index = index.astype(_index_dtype(dim))
      numbers = code_bytes.half_bytes(kept)
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
    near = less(error(sink, factor)) < less(error(zero, 1.0))
    return (
      near,
      scale * jnp.where(near, factor, 1),
      jnp.where(near, sink, zero),
    )

  def by_token(
    self, x: Float[Array, "*batch D"]
  ) -> tuple[Int[Array, "*batch n"], Float[Array, "*batch 1"], jax.Array]:
    """Of vectors the places of the outliers; scale and zero of the others."""
    mean = jnp.mean(x, -1, keepdims=True)
    index = _farthest(x - mean, self.sparse(x.shape[-1]))
    inside = jnp.where(marked(index, x.shape[-1]), mean, x)
    largest = jnp.max(inside, -1, keepdims=True)
    least = jnp.min(inside, -1, keepdims=True)
    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    return index, half((largest - least) / 2), half((largest + least) / 2)

  def decode(
    self,
    data: UInt8[Array, "B K T X"],
    dim: int,
    dtype: DTypeLike,
    constants: Sequence[Any] = (),
  ) -> Float[Array, "B K T D"]:
    x = lookup(code_bytes.unpack(data, self.bits, dim), constants[-1])
    start = code_bytes.packed_bytes(dim, self.bits)
    if self.by == "channel":
      scale, zero = (_per_channel(c) for c in constants[:2])
      if self.sinks:
        place = start + self.sparse(dim) * np.dtype(_index_dtype(dim)).itemsize
        near = (data[..., place : place + 1] & np.uint8(1)) != 0
        sink, factor = (_per_channel(c) for c in constants[2:4])
        scale = scale * jnp.where(near, factor, 1)
        zero = jnp.where(near, sink, zero)
    else:
      scale, zero = jnp.split(code_bytes.halves(data, start, 2), 2, -1)
      start += 4
    x = x * scale + zero
    count, which = self.sparse(dim), _index_dtype(dim)
    if count:
      index = code_bytes.from_bytes(data, start, count, which)
      start += count * np.dtype(which).itemsize
      kept = code_bytes.halves(data, start, count)
      place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
      for n in range(count):
        here = place == index[..., n : n + 1].astype(jnp.int32)
        x = jnp.where(here, kept[..., n : n + 1], x)
    return x.astype(dtype)

  def code_format(self, dim: int) -> CodeFormat:
    """How its bytes hold the numbers."""
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
  """Where the `count` largest magnitudes are, int32 [..., count].

  Of equal ones the first. Magnitudes are compared in 13 bits: calibration may
  give a token the extremes of two channels, whose last bits depend on the
  program that divides by them.
  """
  far, found = lax.reduce_precision(jnp.abs(x), 8, 12), []
  for _ in range(count):
    index = jnp.argmax(far, -1, keepdims=True).astype(jnp.int32)
    found.append(index)
    far = jnp.where(marked(index, x.shape[-1]), -1, far)
  if not found:
    return jnp.zeros((*x.shape[:-1], 0), jnp.int32)
  return jnp.concatenate(found, -1)


def marked(index: Int[Array, "*batch n"], dim: int) -> Bool[Array, "*batch D"]:
  """True at the places of `index`."""
  shape = (*index.shape[:-1], dim)
  place = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
  marked = jnp.zeros(shape, bool)
  for n in range(index.shape[-1]):
    marked |= place == index[..., n : n + 1]
  return marked

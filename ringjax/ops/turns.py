"""Angles of tokens as fractions of a turn, so that whole turns cost no digits.

Guarantees: the angle of a pair of dims at any int32 position is off by less
than 8e-7 radians, where a product of float32 is off by up to half of its last
digit: 4e-3 radians at position 131,072 and 32 at 2**30.
Cost: a product of int32 and two of float32 an angle, and three conversions.

A turn is 2**32 units. A frequency is the units of one position: an integer, and
a fraction of at most half a unit in float32. The product of a position and the
integer wraps around, which drops whole turns; together with the fraction it is
at most 2**30 units, of which float32 rounds away less than 200, 3e-7 radians.
The angle in radians, at most half a turn, is rounded by another 4e-7.

A frequency that depends on a value on the device, the base of a context's
length, is computed in integers of 64 bits, pairs of uint32, with an error of
2**-57 turns: 9e-8 radians at position 2**31.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt32

_TURN = 2**32
_RADIANS = np.float32(2 * math.pi / _TURN)
# float64 where a platform has no wider type: an error of 2e-7 radians at 2**31.
WIDE = np.longdouble
TAU = 2 * WIDE("3.14159265358979323846264338327950288")
# Fractional bits of a logarithm in 64 bits.
_LOG_BITS = 56
# Bits of an exponent that select factors of a table; the others use a series.
_TABLE_BITS = 28


class Frequencies(NamedTuple):
  """Angles of one position for pairs of dims, in units of 2**-32 turns.

  Fields:
    units: Whole units, modulo a turn, int32 [*N, pairs].
    fractions: Fractions of a unit, at most a half, float32 [*N, pairs].
  """

  units: Int[Array, "*N pairs"]
  fractions: Float[Array, "*N pairs"]

  @classmethod
  def of(cls, radians: Shaped[np.ndarray, " pairs"]) -> Frequencies:
    """Round radians that are known in advance, in the host's precision."""
    fixed = _fixed_point(np.asarray(radians, WIDE) / TAU, 64)
    whole_units = [(x + _TURN // 2) // _TURN for x in fixed]
    fractions = [x - n * _TURN for x, n in zip(fixed, whole_units, strict=True)]
    return cls(
      jnp.asarray(
        np.array([n % _TURN for n in whole_units], np.uint32).view("i4")
      ),
      jnp.asarray(np.array(fractions, np.float64) / _TURN, jnp.float32),
    )

  def rearranged(self, change: Callable[[Array], Array]) -> Frequencies:
    """Rearrange both fields alike."""
    return Frequencies(change(self.units), change(self.fractions))

  def with_axes(self, axes: int) -> Frequencies:
    """Insert `axes` leading axes of length 1."""
    return self.rearranged(lambda x: _with_axes(x, axes))

  def reversed(self) -> Frequencies:
    """Frequencies that rotate the other way."""
    return Frequencies(-self.units, -self.fractions)

  def phase(
    self, positions: Int[Array, "*M"]
  ) -> tuple[Int[Array, "*L"], Float[Array, "*L"]]:
    """Units from minus half a turn to half a turn, and fractions of a unit.

    Positions and frequencies broadcast.
    """
    fraction = positions.astype(jnp.float32) * self.fractions
    whole_units = jnp.floor(fraction)
    units = positions.astype(jnp.int32) * self.units + whole_units.astype(
      jnp.int32
    )
    return units, fraction - whole_units

  def angles(self, positions: Int[Array, "*M"]) -> Float[Array, "*L"]:
    """Radians from -pi to pi; positions and frequencies broadcast."""
    units, part = self.phase(positions)
    return (units.astype(jnp.float32) + part) * _RADIANS


class _TwoWords(NamedTuple):
  """An integer of 64 bits, uint32 [*N] each."""

  high: UInt32[Array, "*N"]
  low: UInt32[Array, "*N"]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def stretched(
  length: Int[Array, "*N"],
  theta: float,
  pairs: int,
  factor: float,
  original: int,
) -> Frequencies:
  """Frequencies [*N, pairs] of a base that grows with a context's length.

  theta**(-i / pairs) grown**(-i / (pairs - 1)) with grown = 1 + factor (length
  - original) / original, for lengths above `original`.
  """
  excess = jnp.maximum(jnp.asarray(length, jnp.int32), original) - original
  grown = _log2_grown(excess, WIDE(original) / WIDE(factor))
  places = np.arange(pairs, dtype=WIDE)
  exponents = _constants(places / max(pairs - 1, 1), 64)
  base = places / pairs * np.log2(WIDE(theta)) + np.log2(TAU)
  expand = lambda words: _TwoWords(*(_with_axes(x, excess.ndim) for x in words))
  exponent = _times(
    _TwoWords(*(x[..., None] for x in grown)), expand(exponents)
  )
  exponent = _plus(exponent, expand(_constants(base, _LOG_BITS)))
  return _frequencies(_power_of_half(exponent))


@functools.partial(jax.jit, static_argnums=(0,))
def multiplied(
  radians: tuple[float, ...], log_factors: Float[Array, " pairs"]
) -> Frequencies:
  """Frequencies [pairs] that are multiplied by exp(log_factors).

  The exponential is that of float32; the product is exact to 2**-57 turns for
  factors up to 32.

  Args:
    radians: Radians of one position, from 0 to below a turn.
    log_factors: Logarithms of the factors.
  """
  base = _constants(np.asarray(radians, WIDE) / TAU, 64)
  factors = jnp.exp(log_factors.astype(jnp.float32))
  mantissas, exponents = jnp.frexp(factors)
  # Of 24 bits, so that a word holds them.
  words = (mantissas * np.float32(2.0**24)).astype(jnp.uint32) << 8
  product = _times(base, _TwoWords(words, jnp.zeros_like(words)))
  larger = _shift_left(product, jnp.clip(exponents, 0, 63))
  smaller = _shift_right(product, jnp.maximum(-exponents, 0))
  is_larger = exponents > 0
  return _frequencies(
    _TwoWords(
      *(
        jnp.where(is_larger, a, b) for a, b in zip(larger, smaller, strict=True)
      )
    )
  )


def _frequencies(fraction: _TwoWords) -> Frequencies:
  """Frequencies of fractions of a turn in 64 bits."""
  carry = fraction.low >> 31
  remainder = lax.bitcast_convert_type(fraction.low, jnp.int32)
  return Frequencies(
    lax.bitcast_convert_type(fraction.high + carry, jnp.int32),
    remainder.astype(jnp.float32) * np.float32(1 / _TURN),
  )


def _with_axes(x: Array, axes: int) -> Array:
  return x.reshape((1,) * axes + x.shape)


def _fixed_point(x: np.ndarray, bits: int) -> list[int]:
  """Round x 2**bits to the nearest integers, exactly."""
  ratios = (WIDE(n).as_integer_ratio() for n in x)
  return [((a << (bits + 1)) // b + 1) >> 1 for a, b in ratios]


def _constants(x: np.ndarray, bits: int) -> _TwoWords:
  """Nonnegative numbers [n] in 64 bits, `bits` of them fractional."""
  fixed = [min(n, 2**64 - 1) for n in _fixed_point(x, bits)]
  word = lambda shift: jnp.asarray(
    np.array([n >> shift & (_TURN - 1) for n in fixed], np.uint32)
  )
  return _TwoWords(word(32), word(0))


def _full_words(n: int, like: Array) -> _TwoWords:
  """Fill an array with a number modulo 2**64."""
  word = lambda n: jnp.full(like.shape, n & (_TURN - 1), jnp.uint32)
  return _TwoWords(word(n >> 32), word(n))


def _plus(a: _TwoWords, b: _TwoWords) -> _TwoWords:
  low = a.low + b.low
  return _TwoWords(a.high + b.high + (low < b.low).astype(jnp.uint32), low)


def _minus(a: _TwoWords, b: _TwoWords) -> _TwoWords:
  less = (a.low < b.low).astype(jnp.uint32)
  return _TwoWords(a.high - b.high - less, a.low - b.low)


def _shift_left(x: _TwoWords, n: Array) -> _TwoWords:
  """Compute x 2**n for 0 <= n < 64: a shift by 32 or more is 0."""
  n = jnp.asarray(n, jnp.uint32)
  high = _shl(x.high, n) | _shr(x.low, 32 - n) | _shl(x.low, n - 32)
  return _TwoWords(high, _shl(x.low, n))


def _shift_right(x: _TwoWords, n: Array) -> _TwoWords:
  """Compute x 2**-n, truncated, for 0 <= n < 2**31."""
  n = jnp.asarray(n, jnp.uint32)
  low = _shr(x.low, n) | _shl(x.high, 32 - n) | _shr(x.high, n - 32)
  return _TwoWords(_shr(x.high, n), low)


def _shl(x: Array, n: Array) -> Array:
  return lax.shift_left(*jnp.broadcast_arrays(x, n))


def _shr(x: Array, n: Array) -> Array:
  return lax.shift_right_logical(*jnp.broadcast_arrays(x, n))


def _upper_product(a: Array, b: Array) -> Array:
  """Upper word of a product of words."""
  a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
  middle = a1 * b0 + (a0 * b0 >> 16)
  cross = a0 * b1 + (middle & 0xFFFF)
  return a1 * b1 + (middle >> 16) + (cross >> 16)


def _times(a: _TwoWords, b: _TwoWords) -> _TwoWords:
  """Upper 64 bits of a product, at most 3 too small."""
  upper = _TwoWords(_upper_product(a.high, b.high), a.high * b.high)
  for x in (_upper_product(a.high, b.low), _upper_product(a.low, b.high)):
    upper = _plus(upper, _TwoWords(jnp.zeros_like(x), x))
  return upper


def _log2_grown(beyond: Int[Array, "*N"], start: np.longdouble) -> _TwoWords:
  """Compute log2(1 + beyond / start) with `_LOG_BITS` fractional bits."""
  start_units = int(start)
  if not start_units < _TURN // 2:
    raise ValueError(f"a context of {start} tokens before it is stretched")
  (part,) = _fixed_point(np.array([start - start_units]), 64)
  start_units, part = start_units + (part >> 64), part & (2**64 - 1)
  # beyond + start: 32 bits, and 64 fractional bits.
  top = beyond.astype(jnp.uint32) + np.uint32(start_units)
  low_words = _full_words(part, top)
  # Shifted to its first set bit: a number from 1 to 2 in 64 bits.
  below_one = top == 0
  shift = jnp.where(below_one, lax.clz(low_words.high), lax.clz(top))
  number = _TwoWords(
    jnp.where(below_one, low_words.high, top),
    jnp.where(below_one, low_words.low, low_words.high),
  )
  dropped = jnp.where(below_one, jnp.uint32(0), low_words.low)
  number = _shift_left(number, shift)
  number = _TwoWords(number.high, number.low | _shr(dropped, 32 - shift))
  power = 31 - shift.astype(jnp.int32) - jnp.where(below_one, 32, 0)

  def log_digit(
    _: Array, state: tuple[_TwoWords, _TwoWords]
  ) -> tuple[_TwoWords, _TwoWords]:
    """Compute a digit of the logarithm: whether the square reaches 2."""
    number, digits = state
    square = _times(number, number)  # From 1 to 4, two bits before the point.
    overflow = square.high >> 31
    number = _shift_left(square, 1 - overflow)
    digits = _shift_left(digits, jnp.uint32(1))
    return number, _TwoWords(digits.high, digits.low | overflow)

  zero = top & 0  # Not a constant: a loop's state varies as its input does.
  state = number, _TwoWords(zero, zero)
  digits = lax.fori_loop(0, _LOG_BITS, log_digit, state)[1]
  integer_part = lax.bitcast_convert_type(power, jnp.uint32) << (_LOG_BITS - 32)
  digits = _plus(digits, _TwoWords(integer_part, zero))
  (log_start,) = _fixed_point(np.array([np.log2(start)]), _LOG_BITS)
  digits = _minus(digits, _full_words(log_start, top))
  stretched_rows = beyond > 0
  return _TwoWords(*(jnp.where(stretched_rows, x, 0) for x in digits))


def _power_of_half(exponent: _TwoWords) -> _TwoWords:
  """Compute 2**-x in 64 fractional bits, for x in `_LOG_BITS`, at least 1."""
  # The fractional part in 64 bits.
  part = _shift_left(exponent, jnp.uint32(64 - _LOG_BITS))
  steps = 2.0 ** -np.arange(1, _TABLE_BITS + 1, dtype=WIDE)
  table = jnp.stack(_constants(2**-steps, 64), -1)
  ones = part.high | np.uint32(_TURN - 1)

  def apply_bit(n: Array, y: _TwoWords) -> _TwoWords:
    factor = table[n]
    smaller = _times(y, _TwoWords(factor[0], factor[1]))
    bit_index = jnp.uint32(31) - n.astype(jnp.uint32)
    is_set = _shr(part.high, bit_index) & 1 > 0
    return _TwoWords(*map(lambda a, b: jnp.where(is_set, a, b), smaller, y))

  y = lax.fori_loop(0, _TABLE_BITS, apply_bit, _TwoWords(ones, ones))
  # 2**-r = 1 - z + z z / 2 with z = r ln 2 below 2**-28.
  low = _TwoWords(part.high & (2 ** (32 - _TABLE_BITS) - 1), part.low)
  (ln2,) = _fixed_point(np.log([WIDE(2)]), 64)
  z = _times(low, _full_words(ln2, low.low))
  z = _minus(z, _shift_right(_times(z, z), jnp.uint32(1)))
  y = _minus(y, _times(y, z))
  return _shift_right(y, exponent.high >> (_LOG_BITS - 32))

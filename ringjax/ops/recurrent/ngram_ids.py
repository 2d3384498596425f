"""Ids of n-grams by a hash of 63 bits, in numbers of 32 bits.

Guarantees: with ids x and odd factors m the hash of an n-gram is the exclusive
or of the products x_j m_j, each below 2^63, and its id the rest of a division
by a prime, all as in 64-bit arithmetic.
Cost: about 20 operations on 32-bit numbers for each token of an n-gram, and as
many for each prime.
Ref:  Qwen Team 2026, Qwen4-Exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

# Products are sums of digits of so many bits.
_BITS = 7
_DIGITS = 9
# Largest sizes for which no sum exceeds 32 bits.
MOST_IDS = 1 << (32 - _BITS)
MOST_ROWS = 1 << (32 - _BITS)

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SEED_STEP = 10007


def _splitmix(value: int) -> int:
  """A number of 64 bits of a random sequence (SplitMix64)."""
  value = (value + _GAMMA) & _MASK
  value = ((value ^ (value >> 30)) * _FACTORS[0]) & _MASK
  value = ((value ^ (value >> 27)) * _FACTORS[1]) & _MASK
  return value ^ (value >> 31)


def hash_factors(
  vocab: int, count: int, table: int, seed: int
) -> tuple[int, ...]:
  """Odd factors of the last `count` tokens, the latest first.

  Args:
    vocab: Number of token ids.
    count: Number of tokens of the longest n-gram.
    table: Number of the table among those of a model.
    seed: Seed of the random sequence.
  """
  half = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
  start = seed + _SEED_STEP * table
  numbers = ((start + _GAMMA * (n + 1)) & _MASK for n in range(count))
  return tuple(2 * (_splitmix(x) % half) + 1 for x in numbers)


def primes_from(least: int, first: int, count: int) -> tuple[int, ...]:
  """Primes number `first` and the next ones of those that are at least `least`.

  Args:
    least: Lower bound of all primes.
    first: Number of primes from `least` on that are left out.
    count: Number of primes.
  """
  primes: list[int] = []
  number = max(least, 2)
  while len(primes) < first + count:
    divisors = range(2, math.isqrt(number) + 1)
    if all(number % n for n in divisors):
      primes.append(number)
    number += 1
  return tuple(primes[first:])


def ngram_ids(
  tokens: Sequence[Int[Array, "*b"]],
  factors: Sequence[int],
  primes: Sequence[int],
) -> Int[Array, "*b n"]:
  """Ids of one n-gram in tables with prime numbers of rows, int32.

  Args:
    tokens: Ids of the tokens, each below `MOST_IDS`, the latest first.
    factors: Factor of each token.
    primes: Number of rows of each table, below `MOST_ROWS`.
  """
  digits = [jnp.zeros(tokens[0].shape, jnp.uint32)] * _DIGITS
  for ids, factor in zip(tokens, factors, strict=False):
    digits = [a ^ b for a, b in zip(digits, _product(ids, factor), strict=True)]
  sizes = jnp.asarray(np.asarray(primes, np.uint32))
  sizes = sizes[(None,) * digits[0].ndim]
  remainder = jnp.zeros((*digits[0].shape, len(primes)), jnp.uint32)
  for digit in reversed(digits):
    remainder = ((remainder << _BITS) + digit[..., None]) % sizes
  return remainder.astype(jnp.int32)


def _product(ids: Int[Array, "*b"], factor: int) -> list[UInt[Array, "*b"]]:
  """Digits of ids times a factor, the lowest first."""
  x = ids.astype(jnp.uint32)
  carry = jnp.zeros(x.shape, jnp.uint32)
  digits = []
  mask = (1 << _BITS) - 1
  for n in range(_DIGITS):
    total = x * jnp.uint32((factor >> (n * _BITS)) & mask) + carry
    digits.append(total & jnp.uint32(mask))
    carry = total >> _BITS
  return digits

"""Rotations against complex numbers, scalings against their definitions."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops import rope, turns
from ringjax.ops.rope import Rope

DIMS = 16
TURN = 2 * Decimal("3.14159265358979323846264338327950288419716939937511")


def draw(*shape):
  return np.random.default_rng(len(shape)).normal(size=shape)


def turned(x, angles, interleaved):
  """Pairs of dims as complex numbers, float64; x [B, T, N, H]."""
  n = 2 * angles.shape[-1]
  part, rest = x[..., :n], x[..., n:]
  if interleaved:
    z = part[..., 0::2] + 1j * part[..., 1::2]
  else:
    z = part[..., : n // 2] + 1j * part[..., n // 2 :]
  z = z * np.exp(1j * angles)[:, :, None]
  pairs = (
    np.stack([z.real, z.imag], -1).reshape(part.shape)
    if interleaved
    else np.concatenate([z.real, z.imag], -1)
  )
  return np.concatenate([pairs, rest], -1)


def frequencies(scaling, theta=1e4, length=0, dims=DIMS):
  """What one token at position 1 turns by."""
  cos, sin = Rope(theta=theta, dims=dims, scaling=scaling).tables(
    jnp.ones((1, 1), jnp.int32), length
  )
  size = scaling.magnitude
  np.testing.assert_allclose(np.hypot(cos, sin), size, rtol=1e-6)
  return np.arctan2(sin, cos)[0, 0].astype(np.float64)


def plain(theta=1e4, dims=DIMS):
  return np.array([theta ** (-2 * i / dims) for i in range(dims // 2)])


@pytest.mark.smoke
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [16, 8])
def test_rotation(dims, interleaved):
  """Also of some dims only; the others stay."""
  r = Rope(theta=500.0, dims=dims, interleaved=interleaved)
  pos = np.array([[0, 1, 7, 3000], [5, 5, 2, 40_000]])
  x = draw(2, 4, 3, 16)
  tables = r.tables(jnp.asarray(pos, jnp.int32), 40_001)
  got = r.rotate(jnp.asarray(x, jnp.float32), tables)
  angles = pos[..., None] * plain(500.0, dims)
  np.testing.assert_allclose(
    got, turned(x, angles, interleaved), rtol=0, atol=3e-6
  )
  np.testing.assert_array_equal(got[..., dims:], x[..., dims:].astype("f4"))


def test_scores_depend_on_distances():
  r = Rope(theta=1e4, dims=DIMS)
  q, k = (jnp.asarray(draw(1, 1, 1, DIMS) + s, jnp.float32) for s in (0, 1))

  def score(i, j):
    at = lambda x, p: r.rotate(x, r.tables(jnp.full((1, 1), p, jnp.int32), 99))
    return float(jnp.sum(at(q, i) * at(k, j)))

  assert score(9, 4) == pytest.approx(score(55, 50), abs=1e-4)
  assert abs(score(9, 4) - score(9, 5)) > 0.1


def test_half_precision_is_turned_in_float32():
  r = Rope(theta=1e4, dims=DIMS)
  x = jnp.asarray(draw(1, 4, 2, DIMS), jnp.bfloat16)
  tables = r.tables(jnp.arange(4, dtype=jnp.int32)[None], 4)
  got = r.rotate(x, tables)
  assert got.dtype == jnp.bfloat16
  want = r.rotate(x.astype(jnp.float32), tables).astype(jnp.bfloat16)
  np.testing.assert_array_equal(got, want)


def test_linear():
  np.testing.assert_allclose(
    frequencies(rope.Linear(factor=4.0)), plain() / 4, rtol=1e-5
  )


@pytest.mark.parametrize("length", [10, 32, 33, 100])
def test_dynamic(length):
  base = 1e4
  if length > 32:
    base *= (3.0 * length / 32 - 2.0) ** (DIMS / (DIMS - 2))
  got = frequencies(rope.Dynamic(factor=3.0, original=32), length=length)
  np.testing.assert_allclose(got, plain(base), rtol=1e-5)


def test_llama3():
  scaling = rope.Llama3(factor=8.0, low=1.0, high=4.0, original=1024)
  want = []
  for f in plain(5e5):
    wavelength = 2 * math.pi / f
    if wavelength < 1024 / 4.0:
      want.append(f)
    elif wavelength > 1024 / 1.0:
      want.append(f / 8)
    else:
      smooth = (1024 / wavelength - 1.0) / (4.0 - 1.0)
      want.append((1 - smooth) * f / 8 + smooth * f)
  kept = sum(a == b for a, b in zip(want, plain(5e5), strict=True))
  assert 0 < kept < len(want)
  np.testing.assert_allclose(frequencies(scaling, 5e5), want, rtol=1e-5)


def test_llama3_without_a_ramp():
  """Llama 4 Scout: a step from what is kept to what is divided."""
  scaling = rope.Llama3(factor=16.0, low=1.0, high=1.0, original=1024)
  want = [f / 16 if 2 * math.pi / f > 1024 else f for f in plain(5e5)]
  assert any(a == b for a, b in zip(want, plain(5e5), strict=True))
  assert any(a < b for a, b in zip(want, plain(5e5), strict=True))
  np.testing.assert_allclose(frequencies(scaling, 5e5), want, rtol=1e-5)


def test_yarn():
  """Fast dims as they are, slow ones divided, an even ramp between."""
  scaling = rope.Yarn(factor=16.0, original=4096)
  ratio = frequencies(scaling, dims=64) / plain(dims=64)
  turns = 4096 * plain(dims=64) / (2 * math.pi)
  np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-4)
  np.testing.assert_allclose(ratio[turns < 0.7], 1 / 16, rtol=1e-4)
  middle = ratio[(turns < 25) & (turns > 1.4)]
  assert (np.diff(middle) < 0).all()
  np.testing.assert_allclose(np.diff(middle, 2), 0, atol=1e-3)
  assert scaling.magnitude == pytest.approx(0.1 * math.log(16) + 1)
  assert rope.Yarn(factor=0.5, original=9).magnitude == 1
  assert rope.Yarn(factor=4.0, original=9, attention=1.5).magnitude == 1.5


def test_longrope():
  short = tuple(1.0 + i / 10 for i in range(8))
  long = tuple(2.0 + i for i in range(8))
  scaling = rope.LongRope(short=short, long=long, original=64, factor=4.0)
  for length, divisors in ((64, short), (65, long)):
    got = frequencies(scaling, length=length)
    np.testing.assert_allclose(got, plain() / np.array(divisors), rtol=1e-5)
  size = math.sqrt(1 + math.log(4.0) / math.log(64))
  assert scaling.magnitude == pytest.approx(size)


def ramp(turns, low, high):
  return min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))


def llama3(f, i):
  keep = ramp(1024 * f / TURN, 1, 4)
  return keep * f + (1 - keep) * f / 8


def yarn(f, i):
  # Fast and slow dims by a float64 that is floored and ceiled.
  down = ramp(Decimal(i), Decimal(20), Decimal(46))
  return f * (1 - down) + f / 16 * down


LENGTH = 10**6
EXACT = {
  "plain": (rope.Unscaled(), lambda f, i: f),
  "linear": (rope.Linear(factor=2.75), lambda f, i: f / Decimal('2.75')),
  "some": (
    rope.Proportional(turning=9, factor=3.0), lambda f, i: (i < 9) * f / 3
  ),
  "llama3": (
    rope.Llama3(factor=8.0, low=1.0, high=4.0, original=1024), llama3
  ),
  "yarn": (rope.Yarn(factor=16.0, original=4096), yarn),
  "dynamic": (
    rope.Dynamic(factor=2.75, original=4096),
    lambda f, i: f * (
      1 + Decimal('2.75') * (LENGTH - 4096) / 4096
    ) ** (-Decimal(i) / 63),
  ),
  "longrope": (
    rope.LongRope(
      short=(1.0,) * 64,
      long=tuple(1 + i / 7 for i in range(64)),
      original=4096,
      factor=4.0,
    ),
    lambda f, i: f / Decimal(1 + i / 7),
  ),
}  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_angles_against_decimals(name, reverse):
  """Of positions anywhere in int32: the bound at the head of `ops.turns`."""
  scaling, frequency = EXACT[name]
  r = Rope(theta=1e4, dims=128, scaling=scaling, reverse=reverse)
  draw = np.random.default_rng(0).integers(-(2**31), 2**31, 40).tolist()
  pos = [0, 1, 131_072, 2**20, 10**7, 2**30, 2**31 - 1, -(2**31), *draw]
  with localcontext() as context:
    context.prec = 50
    each = [
      frequency(Decimal(10_000) ** (-Decimal(i) / 64), i) for i in range(64)
    ]
    exact = [[float(p * (f / TURN) % 1) for f in each] for p in pos]
  want = 2 * np.pi * np.array(exact) * (-1 if reverse else 1)
  each = r.frequencies(jnp.int32(LENGTH))
  each = each.rearranged(lambda x: x[None])
  angles = each.angles(jnp.asarray(pos, jnp.int32)[:, None])
  apart = np.asarray(angles, np.float64) - want
  apart = np.abs((apart + np.pi) % (2 * np.pi) - np.pi)
  assert apart.max() < 8e-7
  cos, sin = r.tables(jnp.asarray([pos], jnp.int32), LENGTH)
  size = scaling.magnitude
  np.testing.assert_allclose(cos[0] / size, np.cos(want), atol=1e-6, rtol=0)
  np.testing.assert_allclose(sin[0] / size, np.sin(want), atol=1e-6, rtol=0)


def test_a_base_of_the_length_is_exact_for_any_length():
  """Of lengths up to the last of int32, and contexts of few tokens and many."""
  lengths = np.array([8, 9, 4096, 4097, 10**6, 2**31 - 1], np.int32)
  for factor, original in ((1.0, 1), (16.0, 8), (1.1, 4096), (40.0, 10**6)):
    each = turns.stretched(jnp.asarray(lengths), 5e5, 16, factor, original)
    for row, length in enumerate(lengths.tolist()):
      with localcontext() as context:
        context.prec = 50
        longer = Decimal(max(length, original) - original)
        grown = 1 + Decimal(factor) * longer / original
        want = [
          Decimal(500_000) ** (-Decimal(i) / 16)
          * grown ** (-Decimal(i) / 15)
          / TURN
          * 2**32
          for i in range(16)
        ]
        units, rest = (np.asarray(x[row]).tolist() for x in each)
        got = [a + Decimal(b) for a, b in zip(units, rest, strict=True)]
        far = max(abs(a - b) for a, b in zip(got, want, strict=True))
      # 2**31 positions on: 3e-7 of 2**32 units a turn, 2 pi radians.
      assert far * 2**31 < 3e-7 / 6.28 * 2**32


def test_the_length_may_be_traced():
  r = Rope(theta=1e4, dims=DIMS, scaling=rope.Dynamic(factor=2.0, original=8))
  pos = jnp.arange(4, dtype=jnp.int32)[None]
  traced = jax.jit(lambda n: r.tables(pos, n))
  for n in (4, 50):
    for x, y in zip(traced(jnp.int32(n)), r.tables(pos, n), strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)

"""Products of 8-bit integers, and of what is beyond them in floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops.integer_product import (
  codes_of,
  integer_product,
  outlier_product,
)


def drawn(channels=0, size=60.0, shape=(2, 13, 96), out=40, seed=0):
  """Activations of deviation 1, of which some channels are larger."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape).astype(np.float32)
  x[..., rng.permutation(shape[-1])[:channels]] *= np.float32(size)
  weight = rng.normal(size=(shape[-1], out)).astype(np.float32)
  return x, weight


def shadowed(weight, scale, hot=None):
  """The product of floats by integers, and of outliers beside."""
  hot = np.arange(len(weight)) if hot is None else np.asarray(hot, int)
  slots = np.full(len(weight), len(hot), np.int32)
  slots[hot] = np.arange(len(hot))
  coded = (*codes_of(jnp.asarray(weight)), jnp.float32(scale))
  rows = jnp.asarray(weight[hot])
  return jax.jit(
    lambda x: (
      integer_product(x, *coded)
      + outlier_product(x, *coded, rows, jnp.asarray(slots))
    )
  )


@pytest.mark.parametrize("channels", [0, 3])
def test_it_is_the_sum_of_whole_numbers(channels):
  x, weight = drawn(channels)
  codes, scales = codes_of(jnp.asarray(weight), channels=channels != 3)
  scale = np.float32(4 / 127)
  got = integer_product(jnp.asarray(x), codes, scales, jnp.asarray(scale))
  units = np.clip(np.round(x / scale), -127, 127)
  # Of Python's own integers.
  sums = units.astype(np.int64) @ np.asarray(codes, np.int64)
  want = sums * np.asarray(scales, np.float64) * np.float64(scale)
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5 * want.std())


@pytest.mark.parametrize("channels", [0, 3, 9])
def test_what_is_beyond_meets_floats_where_they_are_kept(channels):
  x, weight = drawn(channels)
  codes, scales = codes_of(jnp.asarray(weight))
  hot = np.arange(0, 96, 2)
  slots = np.full(96, len(hot), np.int32)
  slots[hot] = np.arange(len(hot))
  beside = lambda **how: outlier_product(
    jnp.asarray(x), codes, scales, jnp.float32(0.01),
    jnp.asarray(weight[hot]), jnp.asarray(slots), **how,
  )  # fmt: skip
  beyond = x - np.clip(x, -1.27, 1.27)
  whole = np.asarray(codes, np.float64) * np.asarray(scales)[None]
  whole[hot] = weight[hot]
  np.testing.assert_allclose(beside(), beyond @ whole, rtol=1e-4, atol=2e-3)
  assert not beside(active=jnp.asarray(False)).any()


def test_errors_are_the_paper_s():
  x, weight = drawn(4, shape=(512, 256), out=64)
  want = x.astype(np.float64) @ weight.astype(np.float64)
  sizes = np.abs(x).max(0)
  tight, largest = np.sort(sizes)[-5] / 127, sizes.max() / 127

  def error(got):
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))

  coded = codes_of(jnp.asarray(weight))
  plain = lambda scale: error(
    integer_product(jnp.asarray(x), *coded, jnp.float32(scale))
  )
  beside = error(shadowed(weight, tight, np.argsort(sizes)[-4:])(x))
  # Outliers have as many bits as floats: products of integers alone, of any
  # number of bits of the activations, are as far off as weights are rounded.
  assert beside < 0.002
  assert 3 * beside < error(shadowed(weight, tight, [])(x))
  assert error(shadowed(weight, tight, [])(x)) < plain(largest)
  assert plain(largest) < plain(tight) / 3


@pytest.mark.parametrize("hot", [None, range(0, 96, 2), []])
def test_a_row_does_not_depend_on_its_neighbours(hot):
  x, weight = drawn(6, shape=(29, 96))
  run = shadowed(weight, 0.03, hot)
  whole = run(x)
  # Beside the first row other channels are beyond 8 bits.
  calm = x.copy()
  calm[1:] = np.clip(calm[1:], -3, 3)
  np.testing.assert_array_equal(run(calm)[:1], whole[:1])
  for rows in (slice(0, 1), slice(3, 10), slice(5, 29)):
    np.testing.assert_array_equal(run(x[rows]), whole[rows])


def test_any_axis_may_be_sharded():
  x, weight = drawn(3, shape=(4, 16, 96))
  codes, scales = codes_of(jnp.asarray(weight))
  rows, slots = jnp.asarray(weight[::2]), np.full(96, 48, np.int32)
  slots[::2] = np.arange(48)

  @jax.jit
  def run(x, codes, scales, rows):
    coded = codes, scales, jnp.float32(0.03)
    beside = outlier_product(x, *coded, rows, jnp.asarray(slots))
    return integer_product(x, *coded) + beside

  want = run(x, codes, scales, rows)
  P = jax.sharding.PartitionSpec
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "seq", "model"),
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
  )  # fmt: skip
  put = lambda x, *spec: jax.device_put(
    x, jax.sharding.NamedSharding(mesh, P(*spec))
  )
  for inner, outer in (("model", None), (None, "model")):
    got = run(
      put(x, "data", "seq", inner),
      put(codes, inner, outer),
      put(scales, outer),
      put(rows, None, outer),
    )
    np.testing.assert_array_equal(got, want)

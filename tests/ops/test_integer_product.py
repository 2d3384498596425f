"""Products of 8-bit integers against whole numbers of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops.integer_product import REACH, codes_of, integer_product


def drawn(channels=0, size=60.0, shape=(2, 13, 96), out=40, seed=0):
  """Activations of deviation 1, of which some channels are larger."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape).astype(np.float32)
  x[..., rng.permutation(shape[-1])[:channels]] *= np.float32(size)
  weight = rng.normal(size=(shape[-1], out)).astype(np.float32)
  return x, weight


def exact(x, codes, scales, scale, most):
  """The same of Python's own integers."""
  units = np.clip(np.round(x / np.float32(scale)), -most, most)
  sums = units.astype(np.int64) @ np.asarray(codes, np.int64)
  return sums * np.asarray(scales, np.float64) * np.float64(scale)


@pytest.mark.parametrize("channels", [0, 3, 9])
def test_it_is_the_sum_of_whole_numbers(channels):
  x, weight = drawn(channels)
  codes, scales = codes_of(jnp.asarray(weight), channels=channels != 3)
  scale = jnp.float32(4 / 127)
  for shadow, most in ((0, 127), (4, REACH), (200, REACH)):
    got = integer_product(jnp.asarray(x), codes, scales, scale, shadow=shadow)
    want = exact(x, codes, scales, 4 / 127, most)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5 * want.std())
  off = integer_product(
    jnp.asarray(x), codes, scales, scale, shadow=4, active=jnp.asarray(False)
  )
  want = exact(x, codes, scales, 4 / 127, 127)
  np.testing.assert_allclose(off, want, rtol=2e-6, atol=1e-5 * want.std())


def test_errors_are_in_the_paper_s_order():
  x, weight = drawn(4, shape=(512, 256), out=64)
  want = x.astype(np.float64) @ weight.astype(np.float64)
  codes, scales = codes_of(jnp.asarray(weight))

  def error(scale, shadow):
    got = integer_product(
      jnp.asarray(x), codes, scales, jnp.float32(scale), shadow=shadow
    )
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))

  largest = np.abs(x).max() / 127
  tight = np.sort(np.abs(x).max(0))[-5] / 127
  assert 3 * error(tight, 8) < error(largest, 0) < error(tight, 0) / 3


def test_a_row_does_not_depend_on_its_neighbours():
  x, weight = drawn(6, shape=(29, 96))
  codes, scales = codes_of(jnp.asarray(weight))
  run = jax.jit(
    lambda x: integer_product(x, codes, scales, jnp.float32(0.03), shadow=4)
  )
  whole = run(x)
  # Of the first rows no more than `shadow` channels may be beyond 8 bits.
  calm = x.copy()
  calm[1:] = np.clip(calm[1:], -3, 3)
  np.testing.assert_array_equal(run(calm)[:1], whole[:1])
  for rows in (slice(0, 1), slice(3, 10), slice(5, 29)):
    np.testing.assert_array_equal(run(x[rows]), whole[rows])


def test_any_axis_may_be_sharded():
  x, weight = drawn(3, shape=(4, 16, 96))
  codes, scales = codes_of(jnp.asarray(weight))
  run = jax.jit(
    lambda x, codes, scales: integer_product(
      x, codes, scales, jnp.float32(0.03), shadow=4
    )
  )
  want = run(x, codes, scales)
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
    )
    np.testing.assert_array_equal(got, want)

"""Training by products of 8-bit numbers: near floats, and right on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.narrow_product import narrow_product, narrowed
from ringjax.train import Objective, Optimizer, step
from ringjax.train import batch as batches

CONFIG = {
  "model_type": "llama",
  "vocab_size": 48,
  "hidden_size": 32,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
  ("kind", "tolerance"), [("int8", 0.02), ("float8", 0.06)]
)
def test_products_and_gradients_are_near(kind, tolerance):
  """Rows of unequal sizes, one of zeros, and a column of zeros."""
  draw = np.random.default_rng(0)
  x = draw.normal(size=(37, 19)).astype(np.float32)
  x *= np.geomspace(1e-6, 1e3, 37)[:, None].astype(np.float32)
  x[3] = 0
  weight = draw.normal(size=(19, 11)).astype(np.float32)
  weight[:, 2] = 0
  slope = draw.normal(size=(37, 11)).astype(np.float32)
  y, back = jax.vjp(
    lambda x, w: narrow_product(kind, x, w), jnp.asarray(x), jnp.asarray(weight)
  )
  far = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
  for n in (0, 20, 36):
    assert far(y[n], x[n] @ weight) < tolerance
  assert not np.any(y[3]) and not np.any(y[:, 2])
  of_x, of_weight = back(jnp.asarray(slope))
  assert far(of_x, slope @ weight.T) < 2 * tolerance
  assert far(of_weight, x.T @ slope) < 2 * tolerance
  # Computed again, the random numbers are the same.
  np.testing.assert_array_equal(back(jnp.asarray(slope))[1], of_weight)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e5m2])
def test_random_rounding_is_right_on_average(dtype):
  x = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
  sums = np.zeros_like(x)
  for n in range(100):
    numbers, scale = narrowed(jnp.asarray(x), 1, dtype, jax.random.key(n))
    sums += np.asarray(numbers.astype(jnp.float32) * scale[:, None])
  largest = np.abs(x).max(1, keepdims=True)
  assert np.all(np.abs(sums / 100 - x) < 0.03 * largest)


def losses(products, steps, dtype=None):
  """Losses of a model that learns rows by heart."""
  draw = np.random.default_rng(0)
  tokens = draw.integers(0, 48, (4, 65)).astype(np.int32)
  attend = ContextParallel()
  optimizer = Optimizer(learning_rate=3e-3).build(steps)
  objective = Objective(products=products, dtype=dtype)
  run = step.make_step(optimizer, attend, objective)
  state = step.start(optimizer, rj.models.create(CONFIG, seed=1))
  rows = batches.place(batches.whole_rows(tokens), attend)
  values = []
  for _ in range(steps):
    state, metrics = run(state, None, rows)
    values.append(float(metrics.loss))
  return np.array(values)


@pytest.mark.slow
@pytest.mark.parametrize("products", ["int8", "float8"])
def test_some_hundred_steps_end_near_floats(products):
  got, want = losses(products, 200), losses("float", 200)
  assert want[-1] < 0.8 * want[0]
  np.testing.assert_allclose(got[150:].mean(), want[150:].mean(), rtol=0.01)


def test_other_products_are_refused():
  with pytest.raises(OptionError, match="products: .*int8, float8"):
    Objective(products="int4")

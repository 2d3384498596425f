"""Products of a single row, which have a way of their own on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.nn.linear import Embedding, Head, Linear


def made(inputs, outputs, dtype):
  axes = (None,) * (len(inputs) + len(outputs))
  linear = Linear(nnx.Rngs(0), inputs, outputs, axes, bias=True)
  return jax.tree.map(lambda x: (x + 0.1).astype(dtype), linear)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
  ("inputs", "outputs"), [((16,), (3, 4)), ((3, 4), (16,)), ((16,), (8,))]
)
@pytest.mark.parametrize("lead", [(1, 1), (1,), (3, 1), (2, 2)])
def test_one_row_is_as_a_row_among_others(dtype, inputs, outputs, lead):
  linear = made(inputs, outputs, dtype)
  draw = np.random.default_rng(0)
  x = draw.standard_normal((*lead, *inputs))
  got = jax.jit(lambda m, x: m(x))(linear, jnp.asarray(x, dtype))
  assert got.shape == (*lead, *outputs) and got.dtype == dtype
  x64 = np.asarray(jnp.asarray(x, dtype), np.float64)
  w = np.asarray(linear.weight[...], np.float64)
  b = np.asarray(linear.bias[...], np.float64)
  want = np.tensordot(x64, w, len(inputs)) + b
  eps = float(jnp.finfo(dtype).eps)
  apart = np.abs(np.asarray(got, np.float64) - want)
  assert apart.max() <= 4 * eps * np.abs(want).max()


@pytest.mark.parametrize("head", [Embedding, Head])
def test_logits_of_one_row_are_float32(head):
  size = (24, 16) if head is Embedding else (16, 24)
  module = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16), head(nnx.Rngs(0), *size)
  )
  h = jax.random.normal(jax.random.key(1), (1, 1, 16), jnp.bfloat16)
  one = jax.jit(lambda m, h: m.logits(h))(module, h)
  two = jax.jit(lambda m, h: m.logits(h))(module, jnp.tile(h, (1, 2, 1)))
  assert one.shape == (1, 1, 24) and one.dtype == jnp.float32
  np.testing.assert_allclose(one[0, 0], two[0, 0], rtol=1e-5, atol=1e-6)


def test_gradients_go_through_one_row():
  linear = made((16,), (4,), "bfloat16")
  x = jax.random.normal(jax.random.key(2), (1, 16), jnp.bfloat16)
  loss = lambda m, x: jnp.sum(m(x).astype(jnp.float32))
  one = jax.grad(loss)(linear, x)
  two = jax.grad(loss)(linear, jnp.concatenate([x, jnp.zeros_like(x)]))
  np.testing.assert_array_equal(one.weight[...], two.weight[...])


def test_the_row_beside_it_is_not_there_elsewhere():
  """Only a single narrow row is padded, and its program shows it."""
  pads = lambda dtype, rows: (
    "pad"
    in str(
      jax.make_jaxpr(lambda m, x: m(x))(
        made((16,), (4,), dtype), jnp.ones((rows, 16), dtype)
      )
    )
  )
  assert pads("bfloat16", 1)
  assert not pads("bfloat16", 2)
  assert not pads("float32", 1)


@pytest.mark.parametrize("outputs", [(1,), (2,), (3,)])
def test_a_row_is_the_same_wherever_it_is(outputs):
  linear = Linear(nnx.Rngs(0), (64,), outputs, ("embed", None))
  x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
  for rows in (9, 15, 23):
    for one in x:
      y = np.asarray(jax.jit(linear)(jnp.tile(one, (rows, 1, 1))))
      assert (y == y[:1]).all()

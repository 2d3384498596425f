"""A mixture of experts against a sum over experts, token by token."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.ops.experts.moe import mix, mix_in_tiles
from ringjax.ops.experts.row_blocks import block_rows
from ringjax.ops.flat_product_tpu import LiveTiles

DIM, HIDDEN = 8, 16


def problem(tokens, count, chosen, seed=0, skew=None):
  r = np.random.default_rng(seed)
  x = r.normal(size=(tokens, DIM))
  w = r.normal(size=(count, DIM, HIDDEN)) / 3
  v = r.normal(size=(count, HIDDEN, DIM)) / 4
  order = np.argsort(r.random((tokens, count)), axis=1)
  experts = order[:, :chosen] if skew is None else np.full((tokens, 1), skew)
  weights = r.random((tokens, experts.shape[1]))
  return x, w, v, experts, weights


def truth(x, w, v, experts, weights, scale_input=False):
  out = np.zeros_like(x)
  for t in range(len(x)):
    for e, weight in zip(experts[t], weights[t], strict=True):
      row = x[t] * (weight if scale_input else 1)
      y = np.tanh(row @ w[e]) @ v[e]
      out[t] += y * (1 if scale_input else weight)
  return out


@functools.partial(jax.jit, static_argnames="scale_input")
def run(x, w, v, experts, weights, **options):
  f = lambda e, rows: jnp.tanh(rows @ w[e]) @ v[e]
  return mix(f, x, experts, weights, w.shape[0], **options)


def arrays(x, w, v, experts, weights):
  wide = [jnp.asarray(a, jnp.float32) for a in (x, w, v, weights)]
  return (*wide[:3], jnp.asarray(experts, jnp.int32), wide[3])


@settings(max_examples=6)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_equals_a_sum_over_experts(tokens, count, chosen, scale_input):
  given_ = problem(tokens, count, min(chosen, count))
  got = run(*arrays(*given_), scale_input=scale_input)
  want = truth(*given_, scale_input=scale_input)
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_no_token_is_dropped_where_all_want_one_expert():
  given_ = problem(300, 8, 1, skew=5)
  np.testing.assert_allclose(
    run(*arrays(*given_)), truth(*given_), rtol=0, atol=2e-5
  )


def test_gradients():
  x, w, v, experts, weights = arrays(*problem(30, 5, 2))
  dense = lambda x, w, v, weights: jnp.einsum(
    "tkd,tk->td",
    jnp.einsum(
      "tkf,tkfd->tkd", jnp.tanh(jnp.einsum("td,tkdf->tkf", x, w[experts])),
      v[experts],
    ),
    weights,
  )  # fmt: skip
  sparse = lambda x, w, v, weights: run(x, w, v, experts, weights)
  loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))
  got, want = (
    jax.jit(jax.grad(loss(f), (0, 1, 2, 3)))(x, w, v, weights)
    for f in (sparse, dense)
  )
  for a, b in zip(got, want, strict=True):
    assert float(jnp.linalg.norm(b)) > 0.1
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_a_backward_pass_keeps_no_copies_of_the_experts():
  """Neither of all of them for each block of rows, which are many."""
  shapes = [(8, 32, 64), (8, 64, 32), (2048, 32)]
  up, down, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
  experts = jax.ShapeDtypeStruct((2048, 2), jnp.int32)
  weights = jax.ShapeDtypeStruct((2048, 2), jnp.float32)

  def loss(up, down, x, experts, weights):
    f = lambda e, rows: jnp.tanh(rows @ up[e]) @ down[e]
    return jnp.sum(mix(f, x, experts, weights, 8))

  grad = jax.jit(jax.grad(loss, (0, 1, 2)))
  text = grad.lower(up, down, x, experts, weights).compile().as_text()
  assert "f32[8,32,64]" in text
  assert not re.search(r"f32\[(?!1,)\d+,8,(32,64|64,32)\]", text)


def test_experts_without_tokens_cost_nothing():
  """The work is that of the rows, padded to less than a block an expert."""
  ran = []

  def f(e, rows):
    jax.debug.callback(lambda e: ran.append(int(e)), e)
    return rows

  x = jnp.ones((64, DIM))
  experts = jnp.full((64, 1), 3, jnp.int32)
  got = mix(f, x, experts, jnp.full((64, 1), 2.0), 16)
  np.testing.assert_array_equal(got, 2 * np.ones((64, DIM)))
  assert set(ran) == {3} and len(ran) == 64 // block_rows(64, 16)


@pytest.mark.parametrize(
  ("rows", "experts", "want"), [(1, 8, 8), (64, 4, 16), (10**6, 8, 256)]
)
def test_block_rows(rows, experts, want):
  assert block_rows(rows, experts) == want


@pytest.mark.one_case
@pytest.mark.parametrize("scale_input", [False, True])
def test_tiles_have_the_sums_of_their_tokens(scale_input):
  """Neighbours change no bit, and tiles without tokens are not computed."""
  x, w, v, experts, weights = arrays(*problem(5 * 8, 6, 2))
  ran = []

  def f(e, rows):
    jax.debug.callback(lambda e: ran.append(int(e)), e)
    return jnp.tanh(rows @ w[e]) @ v[e]

  @jax.jit
  def in_tiles(x, experts, weights, holds):
    tiled = lambda a: a.reshape(5, 8, -1)
    chosen = jnp.where(holds[..., None], tiled(experts), 6)
    live = LiveTiles.of(jnp.any(holds, 1))
    return mix_in_tiles(
      f, tiled(x), chosen, tiled(weights), 6, live, scale_input=scale_input
    )

  crowd = np.ones((5, 8), bool)
  crowd[1] = crowd[4, 3:] = False
  got = in_tiles(x, experts, weights, crowd)
  want = truth(*problem(5 * 8, 6, 2), scale_input).reshape(5, 8, -1)
  np.testing.assert_allclose(got[crowd], want[crowd], rtol=0, atol=2e-5)
  jax.effects_barrier()
  ran.clear()
  # Another place, and numbers of no token beside it.
  alone = np.zeros((5, 8), bool)
  alone[3, 6] = True
  moved = lambda a: jnp.full_like(a, jnp.nan).at[30].set(a[2])
  chosen = jnp.zeros_like(experts).at[30].set(experts[2])
  lone = in_tiles(moved(x), chosen, moved(weights), alone)
  np.testing.assert_array_equal(lone[3, 6], got[0, 2])
  jax.effects_barrier()
  assert sorted(ran) == sorted(np.asarray(experts[2]).tolist())

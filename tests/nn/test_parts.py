"""The small parts of a layer against formulas in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.nn.attention_layers.attention import Temperature, alibi_slopes
from ringjax.nn.feedforward import (
  ACTIVATIONS,
  Clamped,
  Grouped,
  Sigmoid,
  Softmax,
)
from ringjax.nn.linear import Embedding, Head, Linear
from ringjax.ops.norm import layer_norm, rms_norm


def close(got, want, atol=1e-6):
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=atol)


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------------------
# Routers
# ---------------------------------------------------------------------------


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def by_expert(chosen, weights, experts):
  """[T, E], what each expert weighs; 0 where it is not chosen."""
  found = np.zeros((chosen.shape[0], experts))
  for t, (c, w) in enumerate(zip(chosen, weights, strict=True)):
    assert len(set(c.tolist())) == len(c)
    found[t, c] = w
  return found


@pytest.mark.parametrize("renormalise", [False, True])
def test_softmax_router(renormalise):
  logits = draw(0, 20, 6)
  weights, chosen = Softmax(renormalise=renormalise)(
    jnp.asarray(logits), None, 2
  )
  want = np.zeros((20, 6))
  for t, row in enumerate(logits.astype(np.float64)):
    p = softmax(row)
    best = np.argsort(-p)[:2]
    want[t, best] = p[best] / (p[best].sum() if renormalise else 1)
  close(by_expert(np.asarray(chosen), np.asarray(weights), 6), want)


def test_sigmoid_router():
  logits = draw(1, 20, 6)
  weights, chosen = Sigmoid()(jnp.asarray(logits), None, 1)
  want = np.zeros((20, 6))
  for t, row in enumerate(logits.astype(np.float64)):
    want[t, row.argmax()] = sigmoid(row.max())
  close(by_expert(np.asarray(chosen), np.asarray(weights), 6), want)


@pytest.mark.parametrize("renormalise", [False, True])
def test_grouped_router(renormalise):
  """DeepSeek-V3, arXiv 2412.19437, section 2.1.2, and its groups."""
  experts, groups, best, k, scale = 12, 4, 2, 3, 2.5
  logits, offset = draw(2, 50, experts), draw(3, experts)
  router = Grouped(
    groups=groups, best=best, renormalise=renormalise, scale=scale
  )
  weights, chosen = router(jnp.asarray(logits), jnp.asarray(offset), k)
  want = np.zeros((50, experts))
  moved = 0
  for t, row in enumerate(logits.astype(np.float64)):
    likely = sigmoid(row)
    ranked = likely + offset
    merit = [sum(sorted(ranked[3 * g : 3 * g + 3])[-2:]) for g in range(groups)]
    kept = np.argsort(merit)[-best:]
    open_ = np.isin(np.arange(experts) // 3, kept)
    take = np.argsort(np.where(open_, ranked, -np.inf))[-k:]
    moved += set(take) != set(np.argsort(likely)[-k:])
    total = likely[take].sum() if renormalise else 1
    want[t, take] = scale * likely[take] / total
  assert moved > 10  # groups and offsets have a say
  close(by_expert(np.asarray(chosen), np.asarray(weights), experts), want)


def test_clamped_gate():
  """GPT-OSS: (up + 1) gate sigmoid(alpha gate); `up` is cut on both sides."""
  gate, up = 4 * draw(4, 50), 4 * draw(5, 50)
  got = Clamped(alpha=1.702, limit=3.0)(jnp.asarray(gate), jnp.asarray(up))
  g = np.minimum(gate.astype(np.float64), 3)
  u = np.clip(up.astype(np.float64), -3, 3)
  close(got, (u + 1) * g * sigmoid(1.702 * g), 1e-5)


@pytest.mark.parametrize(
  ("name", "at_one"),
  [
    ("gelu", 0.8413447460685429),
    ("gelu_tanh", 0.8411919906082768),
    ("relu", 1.0),
    ("silu", 0.7310585786300049),
  ],
)
def test_activations(name, at_one):
  f = ACTIVATIONS[name]
  close(f(jnp.float32(1)), at_one)
  close(f(jnp.float32(-1)), at_one - 1 if name != "relu" else 0.0)


# ---------------------------------------------------------------------------
# Positions
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 12, 3, 71])
def test_alibi_slopes(heads):
  """Press et al. 2021: get_slopes of their code, by its recursion."""

  def published(n):
    two = 2 ** int(np.log2(n))
    if two == n:
      return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return published(two) + published(2 * two)[0::2][: n - two]

  close(alibi_slopes(heads), published(heads))


def test_eight_slopes():
  assert alibi_slopes(8) == tuple(2.0 ** -(i + 1) for i in range(8))


def test_temperature():
  """Llama 4: queries grow with the logarithm of their position's chunk."""
  pos = np.array([[0, 6, 7, 8, 100, 4000]])
  q = draw(6, 1, 6, 2, 3)
  got = Temperature(scale=0.1, floor=8.0)(
    jnp.asarray(q), jnp.asarray(pos, jnp.int32)
  )
  factor = 1 + 0.1 * np.log(1 + np.floor((pos + 1) / 8))
  close(got, q * factor[..., None, None])
  assert factor[0, 1] == 1 and factor[0, 2] > 1


# ---------------------------------------------------------------------------
# Linear maps and norms
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
  """Between groups of axes: (D,) to (N, H) and back."""
  up = Linear(nnx.Rngs(0), (4,), (2, 3), ("embed", "heads", None), bias=bias)
  down = Linear(nnx.Rngs(1), (2, 3), (4,), ("heads", None, "embed"), bias=bias)
  if bias:
    up.bias = nnx.Param(jnp.asarray(draw(7, 2, 3)))
    down.bias = nnx.Param(jnp.asarray(draw(8, 4)))
  x = draw(9, 2, 5, 4)
  y = up(jnp.asarray(x))
  want = np.einsum("btd,dnh->btnh", x, up.weight[...])
  want = want + np.asarray(up.bias[...]) if bias else want
  close(y, want)
  want = np.einsum("btnh,nhd->btd", np.asarray(y), down.weight[...])
  want = want + np.asarray(down.bias[...]) if bias else want
  close(down(y), want)


def test_embedding_and_head():
  embed = Embedding(nnx.Rngs(0), 7, 4)
  weight = np.asarray(embed.weight[...])
  ids = np.array([[0, 6, 3]], np.int32)
  np.testing.assert_array_equal(embed(jnp.asarray(ids)), weight[ids])
  h = draw(10, 2, 4)
  close(embed.logits(jnp.asarray(h)), h @ weight.T)
  head = Head(nnx.Rngs(1), 4, 7, bias=True)
  head.bias = nnx.Param(jnp.asarray(draw(11, 7)))
  want = h @ np.asarray(head.weight[...]) + np.asarray(head.bias[...])
  close(head.logits(jnp.asarray(h)), want)


def test_logits_are_float32_of_half_weights():
  """The product's sums are float32, not rounded to the weights' dtype."""
  embed = Embedding(nnx.Rngs(0), 50, 256)
  weight = embed.weight.get_value().astype(jnp.bfloat16)
  embed.weight = nnx.Param(weight)
  h = jnp.asarray(draw(12, 3, 256), jnp.bfloat16)
  got = embed.logits(h)
  assert got.dtype == jnp.float32
  wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
  close(got, wide(h) @ wide(weight).T, 1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype, offset):
  x = jnp.asarray(30 * draw(13, 2, 3, 8), dtype)
  weight = jnp.asarray(draw(14, 8), dtype)
  got = rms_norm(x, weight, 1e-3, offset=offset)
  assert got.dtype == dtype
  wide = np.asarray(x.astype(jnp.float32), np.float64)
  want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
  want = want * (offset + np.asarray(weight.astype(jnp.float32), np.float64))
  loose = (
    dict(rtol=2**-8, atol=1e-6) if dtype == jnp.bfloat16 else dict(rtol=2e-6)
  )
  np.testing.assert_allclose(got.astype(jnp.float32), want, **loose)


def test_rms_norm_over_two_axes_and_without_weight():
  x, weight = draw(15, 2, 3, 4, 5), draw(16, 4, 5)
  got = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6, axes=2)
  size = np.sqrt((x**2).mean((-1, -2), keepdims=True) + 1e-6)
  close(got, x / size * weight)
  close(rms_norm(jnp.asarray(x), None, 1e-6, axes=2), x / size)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias):
  x, weight, b = 5 + draw(17, 2, 3, 8), draw(18, 8), draw(19, 8)
  got = layer_norm(
    jnp.asarray(x), jnp.asarray(weight), jnp.asarray(b) if bias else None, 1e-5
  )
  wide = x.astype(np.float64)
  centred = wide - wide.mean(-1, keepdims=True)
  want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight
  close(got, want + b if bias else want, 1e-5)


@pytest.mark.long
def test_norms_of_zeros_are_zeros():
  x = jnp.zeros((1, 4))
  for f in (
    lambda x: rms_norm(x, None, 1e-6),
    lambda x: layer_norm(x, jnp.ones(4), None, 1e-6),
  ):
    np.testing.assert_array_equal(f(x), x)
    assert np.isfinite(jax.grad(lambda x, f=f: f(x).sum())(x)).all()

"""The short convolution, its tails, and where documents begin."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringjax.ops.recurrent.conv import Tail, begins, causal_conv, tails
from tests.helpers import make_mesh

TAPS = 4
PACKED = [
  [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
  [1, 1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4, 0, 0],
  [0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 0, 0, 0, 0],
  [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
  [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
]


def data(seg):
  r = np.random.default_rng(0)
  seg = np.asarray(seg, np.int32)
  x = r.normal(size=(*seg.shape, 2, 3)).astype(np.float32)
  return x, r.normal(size=(2, 3, TAPS)).astype(np.float32), seg


def reference(x, weight, seg):
  """Document by document, tokens in a list."""
  out = np.zeros_like(x)
  for b, row in enumerate(seg):
    for document in set(row) - {0}:
      at = np.flatnonzero(row == document)
      for i, t in enumerate(at):
        for back in range(min(TAPS, i + 1)):
          out[b, t] += weight[..., TAPS - 1 - back] * x[b, at[i - back]]
  return out


def nothing(x, seg):
  """The tail before the first token."""
  return Tail.of(jnp.asarray(x[:, :3] * 0), jnp.asarray(seg[:, :3] * 0), 3)


def run(x, weight, seg, before, axis=None):
  seg = jnp.asarray(seg)
  here, after = tails(before, x, seg, axis)
  return causal_conv(x, weight, seg, here), begins(seg, here), after


def starts(seg):
  found = np.zeros(seg.shape, bool)
  for b, row in enumerate(seg):
    for document in set(row) - {0}:
      found[b, np.flatnonzero(row == document)[0]] = True
  return found


def check(out, began, after, x, weight, seg):
  np.testing.assert_allclose(out, reference(x, weight, seg), atol=1e-6)
  np.testing.assert_array_equal(began, starts(seg))
  for b, row in enumerate(seg):
    at = np.flatnonzero(row)[-3:]
    fill = 3 - len(at)
    assert not np.any(after.seg[b, :fill]) and not np.any(after.x[b, :fill])
    np.testing.assert_array_equal(after.seg[b, fill:], row[at])
    np.testing.assert_array_equal(after.x[b, fill:], x[b, at])


def test_equals_the_reference():
  x, weight, seg = data(PACKED)
  before = nothing(x, seg)
  check(*jax.jit(run)(x, weight, seg, before), x, weight, seg)


@pytest.mark.parametrize("cut", [1, 2, 5, 8, 15])
def test_calls_go_on(cut):
  x, weight, seg = data(PACKED)
  f, tail, parts = jax.jit(run), nothing(x, seg), []
  for part in (slice(0, cut), slice(cut, None)):
    *out, tail = f(x[:, part], weight, seg[:, part], tail)
    parts.append(out)
  out, began = (np.concatenate(p, 1) for p in zip(*parts, strict=True))
  check(out, began, tail, x, weight, seg)


@pytest.mark.one_case
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shards(shards):
  x, weight, seg = data(PACKED)
  tokens = P(None, "seq")
  f = jax.shard_map(
    functools.partial(run, axis="seq"),
    mesh=make_mesh(shards, "auto"),
    in_specs=(tokens, P(), tokens, P()),
    out_specs=(tokens, tokens, P()),
    axis_names={"seq"},
  )
  check(*jax.jit(f)(x, weight, seg, nothing(x, seg)), x, weight, seg)


def test_gradients():
  x, weight, seg = data(PACKED)

  @jax.jit
  def loss(x, weight):
    return jnp.sum(jnp.sin(run(x, weight, seg, nothing(x, seg))[0]))

  dx, dweight = jax.jit(jax.grad(loss, (0, 1)))(x, weight)
  way = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
  step = 1e-2
  slope = (loss(x + step * way, weight) - loss(x - step * way, weight)) / 2
  np.testing.assert_allclose(slope / step, np.sum(dx * way), rtol=1e-3)
  assert not np.any(dx[seg == 0])
  assert np.abs(dweight).min() > 0

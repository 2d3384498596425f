"""The selective scan, and the delta rule whose rows decay apart, against a few
lines that go token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringjax.ops.recurrent.delta import delta_rule
from ringjax.ops.recurrent.selective import selective_scan
from tests.helpers import make_mesh

# The length whose derivatives are left to longer runs: they compile for long.
QUICK = 24


def loss(f, *args):
  out, state = f(*args)
  weigh = lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
  return jnp.sum(out * weigh(out)) + jnp.sum(state * weigh(state))


def gradients(f, *args):
  floats = tuple(i for i, x in enumerate(args) if x.dtype != np.bool_)
  return jax.jit(jax.grad(functools.partial(loss, f), floats))(*args)


def close(got, want, tolerance=1e-11):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    scale = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def over(f, shards, specs, **options):
  """`f` over the axis "seq" of a mesh, or on one device."""
  f = functools.partial(f, **options)
  if shards is None:
    return f
  return jax.shard_map(
    functools.partial(f, axis="seq"),
    mesh=make_mesh(shards, "auto"),
    in_specs=specs,
    out_specs=(P(None, "seq"), P()),
    axis_names={"seq"},
  )


def scanned(x, step, rate, into, out_of, state, fresh):
  """One token after another."""

  def one(h, token):
    x, step, into, out_of, fresh = token
    left = jnp.where(fresh[:, None, None], 0, jnp.exp(rate * step[..., None]))
    h = left * h + (step * x)[..., None] * into[:, None]
    return h, jnp.einsum("bch,bh->bc", h, out_of)

  tokens = (x, step, into, out_of, fresh)
  state, out = jax.lax.scan(
    one, state, tuple(jnp.moveaxis(a, 1, 0) for a in tokens)
  )
  return jnp.moveaxis(out, 0, 1), state


@pytest.mark.parametrize(
  ("t", "chunk", "shards"),
  [
    pytest.param(1, 64, None, marks=pytest.mark.long),
    pytest.param(23, 4, None, marks=pytest.mark.long),
    (24, 2, 4),
    pytest.param(200, 64, 8, marks=pytest.mark.slow),
  ],
)
def test_selective_scan(x64, t, chunk, shards):
  """Outputs and gradients, also where documents begin within a shard."""
  r = np.random.default_rng(t)
  b, c, h = 2, 5, 3
  fresh = np.zeros((b, t), bool)
  fresh[1, t // 2], fresh[0, 0] = True, True
  args = (
    r.normal(size=(b, t, c)),
    np.exp(r.normal(size=(b, t, c))),
    -np.exp(r.normal(size=(c, h))),
    r.normal(size=(b, t, h)),
    r.normal(size=(b, t, h)),
    r.normal(size=(b, c, h)),
    fresh,
  )
  tokens = P(None, "seq")
  specs = (tokens, tokens, P(), tokens, tokens, P(), tokens)
  f = over(selective_scan, shards, specs, chunk=chunk)
  reference = jax.jit(lambda *a: scanned(a[0], a[1], a[2][None], *a[3:]))
  close(jax.jit(f)(*args), reference(*args))
  if t != QUICK:
    close(gradients(f, *args), gradients(reference, *args))


def rows(q, k, v, decay, beta, state, correct=True):
  """One token after another, each row of the state with its own decay."""
  heads = v.shape[2] // k.shape[2]
  q, k = (jnp.repeat(x, heads, 2) for x in (q, k))

  def one(s, token):
    q, k, v, g, beta = token
    s = s * jnp.exp(g)[..., None]
    told = jnp.einsum("bnhj,bnh->bnj", s, k) if correct else 0
    s = s + jnp.einsum("bnh,bnj->bnhj", k, beta[..., None] * (v - told))
    return s, jnp.einsum("bnhj,bnh->bnj", s, q)

  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta))
  state, out = jax.lax.scan(one, state, tokens)
  return jnp.moveaxis(out, 0, 1), state


@pytest.mark.parametrize(
  ("t", "correct", "shards"),
  [
    pytest.param(1, True, None, marks=pytest.mark.slow),
    pytest.param(70, True, None, marks=pytest.mark.long),
    (24, True, 4),
    pytest.param(264, True, 8, marks=pytest.mark.slow),
    pytest.param(70, False, None, marks=pytest.mark.slow),
    pytest.param(132, False, 4, marks=pytest.mark.slow),
  ],
)
def test_rows_that_decay_apart(x64, t, correct, shards):
  """Weak and strong decays, and a document that begins within a shard."""
  r = np.random.default_rng(t)
  b, heads, n, h, j = 2, 2, 4, 6, 5
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  decay = -np.exp(r.normal(size=(b, t, n, h)) * 3 - 1)
  decay[:, t // 3] = -1e6
  decay[1, t // 2] = -np.inf
  args = (
    unit(r.normal(size=(b, t, heads, h))),
    unit(r.normal(size=(b, t, heads, h))),
    r.normal(size=(b, t, n, j)),
    decay,
    1 / (1 + np.exp(-2 * r.normal(size=(b, t, n)))),
    r.normal(size=(b, n, h, j)),
  )
  specs = (P(None, "seq"),) * 5 + (P(),)
  f = over(delta_rule, shards, specs, correct=correct)
  reference = jax.jit(functools.partial(rows, correct=correct))
  close(jax.jit(f)(*args), reference(*args))
  if t != QUICK:
    close(gradients(f, *args), gradients(reference, *args))


@pytest.mark.long
def test_rows_that_decay_alike_are_one_decay():
  r = np.random.default_rng(0)
  x = lambda *shape: r.normal(size=shape).astype(np.float32)
  q, k, v = x(1, 90, 2, 4), x(1, 90, 2, 4) / 2, x(1, 90, 2, 3)
  decay, beta = -np.exp(x(1, 90, 2)), x(1, 90, 2) ** 2 / 4
  apart = np.broadcast_to(decay[..., None], (1, 90, 2, 4))
  run = jax.jit(delta_rule)
  close(run(q, k, v, apart, beta), run(q, k, v, decay, beta), 1e-5)

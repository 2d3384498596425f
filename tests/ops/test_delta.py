"""The gated delta rule against fifteen lines that go token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringjax.errors import ShapeError
from ringjax.ops.recurrent.delta import delta_rule
from tests.helpers import make_mesh

rule = jax.jit(delta_rule, static_argnames=("chunk", "correct"))

_slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@jax.jit
def reference(q, k, v, decay, beta, state):
  """One token after another, each value head with its own copy of its key."""
  heads = v.shape[2] // k.shape[2]
  q, k = (jnp.repeat(x, heads, 2) for x in (q, k))

  def step(s, x):
    q, k, v, g, beta = x
    s = s * jnp.exp(g).reshape(*g.shape[:2], -1, 1)
    delta = beta[..., None] * (v - jnp.einsum("bnhj,bnh->bnj", s, k))
    s = s + jnp.einsum("bnh,bnj->bnhj", k, delta)
    return s, jnp.einsum("bnhj,bnh->bnj", s, q)

  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta))
  state, out = jax.lax.scan(step, state, tokens)
  return jnp.moveaxis(out, 0, 1), state


@jax.jit
def plain(q, k, v, decay, beta, state):
  """The reference without its correction: a state space."""
  heads = v.shape[2] // k.shape[2]
  q, k = (jnp.repeat(x, heads, 2) for x in (q, k))

  def step(s, x):
    q, k, v, g, beta = x
    s = s * jnp.exp(g)[..., None, None]
    s = s + jnp.einsum("bnh,bnj->bnhj", k, beta[..., None] * v)
    return s, jnp.einsum("bnhj,bnh->bnj", s, q)

  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta))
  state, out = jax.lax.scan(step, state, tokens)
  return jnp.moveaxis(out, 0, 1), state


def operands(seed, t, *, b=2, heads=2, groups=2, h=8, j=12, dtype=np.float32):
  r = np.random.default_rng(seed)
  n = heads * groups
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  return tuple(
    x.astype(dtype)
    for x in (
      unit(r.normal(size=(b, t, heads, h))),
      unit(r.normal(size=(b, t, heads, h))),
      r.normal(size=(b, t, n, j)),
      -np.exp(r.normal(size=(b, t, n)) * 2 - 2),
      1 / (1 + np.exp(-2 * r.normal(size=(b, t, n)))),
      r.normal(size=(b, n, h, j)),
    )
  )


def loss(f, *args):
  out, state = f(*args)
  weigh = lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
  return jnp.sum(out * weigh(out)) + jnp.sum(state * weigh(state))


def close(got, want, tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    scale = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def over(mesh, *args, **options):
  """`delta_rule` over the axis "seq" of a mesh."""
  tokens = P(None, "seq")
  return jax.shard_map(
    functools.partial(delta_rule, axis="seq", **options),
    mesh=mesh,
    in_specs=(tokens,) * 5 + (P(),),
    out_specs=(tokens, P()),
    axis_names={"seq"},
  )(*args)


@pytest.mark.parametrize("t", [1, _slow(3), 64, 65, _slow(1100)])
def test_equals_the_reference(t):
  x = operands(t, t)
  close(rule(*x), reference(*x), 3e-6)


@pytest.mark.parametrize(
  ("t", "chunk"), [_slow(1, 64), (5, 1), _slow(130, 4), (130, 64)]
)
def test_gradients_in_float64(x64, t, chunk):
  x = operands(t, t, dtype=np.float64)
  f = functools.partial(rule, chunk=chunk)
  every = tuple(range(6))
  got = jax.jit(jax.grad(functools.partial(loss, f), every))(*x)
  want = jax.jit(jax.grad(functools.partial(loss, reference), every))(*x)
  close(got, want, 1e-12)
  close(f(*x), reference(*x), 1e-13)


def test_gradients_over_several_blocks():
  x = operands(7, 2100, b=1, groups=1)
  every = tuple(range(6))
  got = jax.jit(jax.grad(functools.partial(loss, rule), every))(*x)
  want = jax.jit(jax.grad(functools.partial(loss, reference), every))(*x)
  close(got, want, 2e-5)


def test_rows_of_a_state_fade_each_by_itself():
  """Over chunks: what is left of the state that a chunk begins with."""
  q, k, v, _, beta, state = operands(7, 6, b=1, heads=1)
  decay = -np.random.default_rng(7).random((1, 6, 2, 8), np.float32)
  x = (q, k, v, decay, beta, state)
  close(rule(*x, chunk=2), reference(*x), 3e-6)


def test_starts_from_zeros():
  *x, state = operands(1, 70)
  close(rule(*x), rule(*x, jnp.zeros_like(state)), 0)


def test_a_call_goes_on_where_another_ended():
  *x, state = operands(2, 150)
  out, end = rule(*x, state)
  first, middle = rule(*(a[:, :67] for a in x), state)
  second, last = rule(*(a[:, 67:] for a in x), middle)
  close((jnp.concatenate([first, second], 1), last), (out, end), 3e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("gone", [-np.inf, -3e38, -1e4])
def test_strong_decay_forgets_exactly(gone):
  q, k, v, decay, beta, state = operands(3, 200)
  for at in (0, 1, 70, 128):
    decay[:, at] = gone
  x = (q, k, v, decay, beta, state)
  out, end = rule(*x)
  close((out, end), reference(*x), 3e-6)
  late = lambda a: a[:, 128:]
  alone = rule(*(late(a) for a in x[:5]), np.zeros_like(state))
  np.testing.assert_array_equal(late(out), alone[0])
  np.testing.assert_array_equal(end, alone[1])
  every = tuple(range(6))
  grads = jax.jit(jax.grad(functools.partial(loss, rule), every))(*x)
  assert all(np.isfinite(g).all() for g in grads)
  for g in grads[:5]:
    assert np.abs(g[:, 100:128]).max() > 0 or gone == -np.inf
  assert np.abs(grads[5]).max() == 0


def test_decays_lose_no_digits_behind_a_strong_one():
  q, k, v, decay, beta, state = operands(4, 64)
  decay[:, 10] = -1e6
  close(
    rule(q, k, v, decay, beta, state),
    reference(q, k, v, decay, beta, state),
    3e-6,
  )


def test_equal_keys():
  q, k, v, decay, _, state = operands(5, 256)
  k[:] = k[:, :1]
  x = (q, k, v, decay * 0, np.ones_like(decay), state)
  close(rule(*x), reference(*x), 3e-6)


def test_tokens_without_weight_change_nothing():
  q, k, v, decay, beta, state = operands(6, 90)
  decay[:, 50:], beta[:, 50:] = 0, 0
  _, end = rule(q, k, v, decay, beta, state)
  short = (a[:, :50] for a in (q, k, v, decay, beta))
  close(end, rule(*short, state)[1], 1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("t", "shards"),
  [(8, 8), _slow(160, 1), _slow(160, 2), _slow(160, 4), (160, 8), (2128, 2)],
)
def test_shards_equal_one_device(t, shards):
  x = operands(t, t)
  mesh = make_mesh(shards, "auto")
  close(jax.jit(functools.partial(over, mesh))(*x), rule(*x), 3e-6)


def test_shards_forget():
  q, k, v, decay, beta, state = operands(8, 64)
  decay[:, ::23] = -np.inf
  x = (q, k, v, decay, beta, state)
  mesh = make_mesh(8, "auto")
  close(jax.jit(functools.partial(over, mesh))(*x), reference(*x), 3e-6)


@pytest.mark.parametrize("shards", [_slow(2), 8])
def test_gradients_over_shards(shards):
  x = operands(9, 160)
  f = functools.partial(over, make_mesh(shards, "auto"))
  every = tuple(range(6))
  got = jax.jit(jax.grad(functools.partial(loss, f), every))(*x)
  want = jax.jit(jax.grad(functools.partial(loss, reference), every))(*x)
  close(got, want, 1e-5)


def test_shards_under_vmap():
  x = operands(10, 64)
  cut = lambda a: np.moveaxis(a.reshape(2, 4, 16, *a.shape[2:]), 1, 0)
  per_shard = functools.partial(delta_rule, axis="seq")
  axes = (0,) * 5 + (None,)
  out, end = jax.jit(jax.vmap(per_shard, in_axes=axes, axis_name="seq"))(
    *(cut(a) for a in x[:5]), x[5]
  )
  want = rule(*x)
  close(jnp.moveaxis(out, 0, 1).reshape(want[0].shape), want[0], 3e-6)
  close(end[1], want[1], 3e-6)


def test_bfloat16_keeps_a_float32_state():
  x = [a.astype(jnp.bfloat16) for a in operands(11, 300)[:3]]
  decay, beta, state = operands(11, 300)[3:]
  out, end = rule(*x, decay, beta, state)
  assert out.dtype == jnp.bfloat16 and end.dtype == jnp.float32
  wide = [np.asarray(a, np.float32) for a in x]
  want = reference(*wide, decay, beta, state)
  close(end, want[1], 1e-5)
  close(out.astype(jnp.float32), want[0], 2**-8)


def test_heads_must_fit():
  q, k, v, decay, beta, _ = operands(12, 4)
  with pytest.raises(ShapeError, match="heads"):
    rule(q, k, v[:, :, :3], decay[:, :, :3], beta[:, :, :3])


@pytest.mark.parametrize("shards", [None, _slow(2), 4])
def test_without_correction_it_is_a_state_space(x64, shards):
  """Outputs and gradients, also where a document begins within a shard."""
  *x, state = operands(5, 132, dtype=np.float64)
  x[3][:, 70] = -np.inf
  x = (*x, state)
  every = tuple(range(6))
  f = functools.partial(rule, correct=False)
  if shards is not None:
    mesh = make_mesh(shards, "auto")
    f = functools.partial(over, mesh, correct=False)
  close(jax.jit(f)(*x), plain(*x), 1e-12)
  got = jax.jit(jax.grad(functools.partial(loss, f), every))(*x)
  want = jax.jit(jax.grad(functools.partial(loss, plain), every))(*x)
  close(got, want, 1e-11)

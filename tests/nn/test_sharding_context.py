"""How a call's tokens lie on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench.program import Program
from ringjax.nn.feedforward import Gated
from ringjax.nn.sharding_context import (
  CachedAttention,
  ChainParallel,
  ContextParallel,
  ShardingContext,
)
from ringjax.parallel import collectives
from ringjax.parallel.layout import Striped, Uneven
from tests.helpers import make_mesh, mesh_of


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh(
    (2, 2, 2), ("data", "seq", "model"), axis_types=(AxisType.Auto,) * 3
  )


def test_values():
  """Spreads are static arguments of jit: equal ones are one program."""
  assert ContextParallel() == ContextParallel() and hash(
    ContextParallel()
  ) == hash(ContextParallel())
  assert CachedAttention() != CachedAttention(replicated=False)
  assert ContextParallel(layout=Striped()) != ContextParallel()
  assert ContextParallel().size == 1 and not ContextParallel().sharded


def test_where_activations_lie(mesh):
  x = lambda b, t: jax.ShapeDtypeStruct((b, t, 8), jnp.float32)
  travel = ContextParallel(mesh=mesh, axis="seq")
  assert travel.size == 2 and travel.sharded
  assert travel.spec(x(4, 6)) == P(("data",), "seq")
  assert travel.spec(x(3, 6)) == P(None, "seq")  # 2 does not divide 3
  assert travel.spec(x(4, 5)) == P(("data",), None)
  visit = CachedAttention(mesh=mesh, axis="seq")
  assert not visit.sharded and visit.spec(x(4, 6)) == P(("data",))
  chunk = CachedAttention(mesh=mesh, axis="seq", replicated=False)
  assert chunk.sharded and chunk.spec(x(4, 6)) == P(("data",), "seq")
  assert ShardingContext().batch_axes(4) == ()
  for batch, heads, kv_heads, want in (
    (4, 4, 2, {"batch_axis": ("data",), "head_axis": ("model",)}),
    (3, 4, 1, {"batch_axis": (), "head_axis": ("model",)}),
    (4, 3, 1, {}),  # 2 does not divide 3
    (4, 6, 3, {}),
  ):
    assert travel.shares(batch, heads, kv_heads) == want
  assert ShardingContext().shares(4, 4, 4) == {}


def test_axes_of_one_device_are_not_left_to_the_compiler():
  """Otherwise no kernel could serve next to them."""
  mesh = mesh_of(replica=1, seq=2, model=1)
  travel = ContextParallel(mesh=mesh, axis="seq")
  partitioned = []

  def f(w, rows, *shards):
    del shards
    partitioned.append(collectives.partitioned())
    return rows * w[0, 0]

  x, w = jnp.ones((1, 4, 8)), jnp.full((2, 1), 3.0)
  run = jax.jit(travel.per_shard, static_argnums=0)
  np.testing.assert_array_equal(run(f, w, x), 3 * x)
  of_experts = lambda x: travel.per_expert_shard(
    lambda _, w, rows, shards: f(w, rows, shards), (), w, x, ("seq",)
  )
  np.testing.assert_array_equal(jax.jit(of_experts)(x), 3 * x)
  assert partitioned and set(partitioned) == {None}


@pytest.mark.parametrize(("batch", "tokens"), [(4, 8), (3, 8), (2, 5), (1, 1)])
def test_per_shard_is_row_by_row(mesh, batch, tokens):
  """On each shard's own tokens, whatever can be sharded of them."""
  r = np.random.default_rng(0)
  x = jnp.asarray(r.normal(size=(batch, tokens, 8)), jnp.float32)
  w = jnp.asarray(r.normal(size=(8, 8)), jnp.float32)
  f = lambda w, rows: jnp.tanh(rows @ w)
  for attend in (
    ShardingContext(),
    ContextParallel(mesh=mesh, axis="seq"),
    ContextParallel(mesh=mesh),
  ):
    g = jax.jit(lambda w, x, s=attend: s.per_shard(f, w, x))
    np.testing.assert_allclose(g(w, x), jnp.tanh(x @ w), rtol=0, atol=1e-6)


@pytest.mark.parametrize("counts", [(16, 16), (16, 5), (3, 16), (16, 0)])
def test_a_chain_walks_over_tokens_and_no_empty_slots(counts):
  mesh = make_mesh(2, "auto")
  r = np.random.default_rng(0)
  x = jnp.asarray(r.normal(size=(2, 32, 8)), jnp.float32)
  w = jnp.asarray(r.normal(size=(8, 6)), jnp.float32)
  tile, steps = 4, []
  chain = ChainParallel(mesh=mesh, axis="seq", layout=Uneven(counts), tile=tile)
  real = np.concatenate([np.arange(16) < n for n in counts])

  def f(x):
    jax.debug.callback(lambda: steps.append(1))
    return jnp.tanh(x @ w), x[..., 0] + 1

  def g(w, rows):
    jax.debug.callback(lambda: steps.append(1))
    return jnp.tanh(rows @ w) @ w.T

  want = sum(-(-n // tile) for n in counts)
  both = jax.jit(lambda x: chain.rows(f, x))(x)
  for got, exact in zip(both, (jnp.tanh(x @ w), x[..., 0] + 1), strict=True):
    np.testing.assert_allclose(got[:, real], exact[:, real], rtol=0, atol=1e-6)
  jax.effects_barrier()
  assert len(steps) == want
  got = jax.jit(lambda w, x: chain.per_shard(g, w, x))(w, x)
  exact = jnp.tanh(x @ w) @ w.T
  np.testing.assert_allclose(got[:, real], exact[:, real], rtol=0, atol=1e-6)


def test_a_chain_leaves_other_axes_alone(mesh):
  """Weights over "model" stay there, the batch over "data"."""
  r = np.random.default_rng(0)
  x = jnp.asarray(r.normal(size=(2, 32, 8)), jnp.float32)
  w = jnp.asarray(r.normal(size=(8, 8)), jnp.float32)
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  chain = ChainParallel(mesh=mesh, axis="seq", layout=Uneven((16, 9)), tile=4)
  g = jax.jit(lambda w, x: chain.rowwise(lambda x: jnp.tanh(x @ w) @ w.T, x))
  args = put(w, None, "model"), put(x, "data", "seq")
  got, exact = g(*args), jnp.tanh(x @ w) @ w.T
  real = np.arange(32) < 25
  np.testing.assert_allclose(got[:, real], exact[:, real], rtol=0, atol=1e-5)
  text = g.lower(*args).compile().as_text()
  assert "all-gather" not in text


def test_per_shard_sends_nothing(mesh):
  attend = ContextParallel(mesh=mesh, axis="seq")
  put = lambda shape, spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, spec)
  )
  f = jax.jit(lambda w, x: attend.per_shard(lambda w, x: x @ w, w, x))
  args = put((8, 8), P()), put((4, 16, 8), P("data", "seq"))
  ops = Program(f.lower(*args).compile().as_text()).ops()
  assert not any(op.startswith(("all-", "collective-")) for op in ops)


def eqns(jaxpr, branch=False):
  """All equations, and whether each is in a branch of a condition."""
  for eqn in jaxpr.eqns:
    yield eqn, branch
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from eqns(inner, branch or eqn.primitive.name == "cond")


def test_no_shard_waits_in_a_branch(mesh):
  """Where only some shards take it, they would wait for ever."""
  attend = ContextParallel(mesh=mesh, axis="seq")

  def f(w, rows):
    return jax.lax.cond(rows[0, 0] > 0, lambda: rows @ w, lambda: rows)

  x = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)
  x[:, 0, 0], x[:, 4, 0] = 1, -1
  grad = jax.grad(lambda w: attend.per_shard(f, w, jnp.asarray(x)).sum())
  w = jnp.ones((3, 3))
  found = list(eqns(jax.make_jaxpr(grad)(w).jaxpr))
  assert any("psum" in eqn.primitive.name for eqn, _ in found)
  assert not any("psum" in eqn.primitive.name for eqn, inner in found if inner)
  # The first half of each row is multiplied, on the shards that have it.
  want = np.broadcast_to(x[:, :4].sum((0, 1))[:, None], (3, 3))
  np.testing.assert_allclose(jax.jit(grad)(w), want, rtol=1e-5)


def test_everywhere(mesh):
  x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("seq")))
  for attend in (
    CachedAttention(mesh=mesh, axis="seq"),
    ContextParallel(mesh=mesh),
  ):
    y = jax.jit(attend.everywhere)((x, None))[0]
    assert y.sharding.is_fully_replicated
  assert ShardingContext().everywhere((x,))[0] is x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_steps_of_a_feedforward_have_the_gradients_of_one_device(dtype, mesh):
  """Weights are gathered once and their gradients summed once."""
  layer = Gated(hidden=48, act="silu").build(nnx.Rngs(0), 32)
  layer = jax.tree.map(lambda x: x.astype(dtype), layer)
  x = jax.random.normal(jax.random.key(1), (2, 64, 32), dtype)

  def loss(layer, x, context):
    return jnp.sum(jnp.sin(layer(x, context).astype(jnp.float32)))

  gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
  expected = gradients(layer, x, ContextParallel())
  # The last step of a shard is shorter.
  context = ContextParallel(mesh=mesh, axis="seq", block=5)
  actual = gradients(layer, x, context)
  tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert a.dtype == dtype
    error = jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))
    assert error < tolerance

"""Blocks of tokens give what the whole gives, in less room, in their place."""

from __future__ import annotations

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench.program import Program
from ringjax.errors import (
  DtypeError,
  InputTypeError,
  OptionError,
  RingjaxError,
  ShapeError,
)
from ringjax.ops.feedforward import Steps, blockwise_feedforward

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SENDS = {"all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


def swiglu(x, weights):
  gate, up, down = weights
  return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def blocks(x, weights, block, axis=1):
  return blockwise_feedforward(
    lambda x: swiglu(x, weights), x, block, axis=axis
  )


def operands(t, d=8, f=32, b=2, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  make = lambda *shape: jnp.asarray(
    rng.normal(size=shape) / math.sqrt(shape[-2]), dtype
  )
  x = make(b, t, d) * jnp.asarray(math.sqrt(t), dtype)
  return x, (make(d, f), make(d, f), make(f, d))


def value_and_grads(f):
  total = lambda x, w: jnp.sum(jnp.sin(f(x, w).astype(jnp.float32)))
  return jax.jit(lambda x, w: (f(x, w), jax.grad(total, (0, 1))(x, w)))


def close(got, want, tolerance=1e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    scale = np.max(np.abs(b), initial=1e-30)
    assert np.max(np.abs(a - b), initial=0) <= tolerance * scale


@pytest.mark.smoke
@pytest.mark.parametrize(
  ("t", "block"), [(64, 16), (61, 16), (60, 16), (16, 64), (16, 16), (5, 1)]
)
def test_equals_the_whole(t, block):
  x, w = operands(t)
  got = value_and_grads(functools.partial(blocks, block=block))(x, w)
  close(got, value_and_grads(swiglu)(x, w))


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64]
)
def test_dtypes(dtype, x64):
  x, w = operands(48, dtype=dtype)
  y, (dx, dw) = value_and_grads(functools.partial(blocks, block=7))(x, w)
  assert {a.dtype for a in (y, dx, *dw)} == {jnp.dtype(dtype)}
  wide = jax.tree.map(lambda a: a.astype(jnp.float64), (x, w))
  close(
    (y, dx, dw),
    value_and_grads(swiglu)(*wide),
    max(20 * float(jnp.finfo(dtype).eps), 1e-6),
  )


def test_sums_over_many_steps_do_not_stop_growing():
  """A bfloat16 sum of 2048 equal terms would end at 256."""
  x, w = jnp.ones((1, 4096, 2), jnp.bfloat16), jnp.ones((), jnp.bfloat16)
  total = lambda w: jnp.sum(
    blockwise_feedforward(lambda x: x * w, x, 2), dtype=jnp.float32
  )
  assert float(jax.jit(jax.grad(total))(w)) == 8192


def test_outputs_of_any_structure():
  x, (gate, _, down) = operands(40)

  def f(x):
    hidden = x @ gate
    return {"y": hidden @ down, "n": (jnp.argmax(hidden, -1), jnp.sum(x, -1))}

  got, want = blockwise_feedforward(f, x, 16), f(x)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  assert got["n"][0].dtype == want["n"][0].dtype
  close(got, want)


@pytest.mark.parametrize("axis", [0, -2])
def test_without_a_batch(axis):
  x, w = operands(50)
  close(blocks(x[0], w, 16, axis), swiglu(x[0], w))


def test_ids_and_other_axes():
  table = jnp.arange(30.0).reshape(10, 3)
  ids = jnp.arange(2 * 3 * 20).reshape(2, 3, 20) % 10
  got = blockwise_feedforward(lambda i: table[i], ids, 8, axis=2)
  close(got, table[ids])


@pytest.mark.parametrize("shape", [(0, 40, 8), (2, 0, 8), (0, 0, 8)])
def test_empty(shape):
  x, w = jnp.ones(shape), operands(1)[1]
  got = value_and_grads(functools.partial(blocks, block=16))(x, w)
  close(got, value_and_grads(swiglu)(x, w))


def test_transforms():
  x, w = operands(19)

  def many(f):
    layers = lambda x, w: jax.lax.scan(
      lambda x, w: (x + f(x, w), None), x, jax.tree.map(lambda a: a[None], w)
    )[0]
    bend = lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x, w) ** 2))(x) ** 2)
    return jax.jit(
      lambda x, w: (
        jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w),
        jax.grad(lambda w: jnp.sum(jax.checkpoint(layers)(x, w) ** 2))(w),
        # Forward mode and second derivatives go through.
        jax.jvp(lambda x: f(x, w), (x,), (x,)),
        jax.grad(bend)(x),
      )
    )

  close(many(functools.partial(blocks, block=8))(x, w), many(swiglu)(x, w))


def test_policy_keeps_what_it_names():
  x, w = operands(64, f=64)

  def f(x, policy):
    named = lambda x: jax.ad_checkpoint.checkpoint_name(x @ w[0], "hidden")
    g = lambda x: jnp.sin(named(x)) @ w[2]
    return jnp.sum(blockwise_feedforward(g, x, 16, policy=policy))

  keep = jax.checkpoint_policies.save_only_these_names("hidden")
  counts = [
    str(jax.make_jaxpr(jax.grad(lambda x, p=p: f(x, p)))(x)).count("dot_gen")
    for p in (keep, None)
  ]
  assert counts[0] < counts[1]


# ---------------------------------------------------------------------------
# Sharded
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("kind", "entered", "t"),
  [
    ("auto", False, 256),
    ("auto", True, 4 * 61),
    ("explicit", True, 256),
    ("explicit", False, 4 * 61),
  ],
)
def test_a_sharded_sequence_stays_where_it_is(kind, entered, t):
  mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(KINDS[kind],) * 2)
  x, w = operands(t)
  want = value_and_grads(swiglu)(x, w)
  xs = jax.device_put(x, NamedSharding(mesh, P("data", "seq")))
  ws = jax.device_put(w, NamedSharding(mesh, P()))
  f = functools.partial(blocks, block=64)
  with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
    forward = jax.jit(f).lower(xs, ws).compile()
    ops = Program(forward.as_text()).ops()
    assert "while" in ops
    assert not ops & (SENDS | {"all-reduce"})
    both = value_and_grads(f).lower(xs, ws).compile()
    assert not Program(both.as_text()).ops() & SENDS
    y, (dx, dw) = both(xs, ws)
  for a in (forward(xs, ws), y, dx):
    assert a.sharding.is_equivalent_to(xs.sharding, 3)
  close((y, (dx, dw)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_and_not_compiled(kind):
  mesh = jax.make_mesh((4,), ("seq",), axis_types=(KINDS[kind],))
  x, w = operands(4 * 61)
  xs = jax.device_put(x, NamedSharding(mesh, P(None, "seq")))
  ws = jax.device_put(w, NamedSharding(mesh, P()))
  got = blocks(xs, ws, 64)
  assert got.sharding.is_equivalent_to(xs.sharding, 3)
  close(got, swiglu(x, w))


def test_consecutive_blocks_would_gather():
  """What the walk is for: the same loop over blocks in order."""
  mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
  x, w = operands(256)
  x = jax.device_put(x, NamedSharding(mesh, P(None, "seq")))

  def f(x, w):
    cut = jnp.moveaxis(x.reshape(2, 4, 64, 8), 1, 0)
    done = jax.lax.map(lambda x: swiglu(x, w), cut)
    return jnp.moveaxis(done, 0, 1).reshape(x.shape)

  assert Program(jax.jit(f).lower(x, w).compile().as_text()).ops() & SENDS


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_shard_map(kind):
  """Sequence over one axis, hidden units over the other, psum inside f."""
  mesh = jax.make_mesh((4, 2), ("seq", "model"), axis_types=(KINDS[kind],) * 2)
  x, w = operands(4 * 21)
  specs = P(None, "seq"), (P(None, "model"), P(None, "model"), P("model"))
  put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
  xs, ws = put(x, specs[0]), jax.tree.map(put, w, specs[1])

  def inner(x, w):
    return blockwise_feedforward(
      lambda x: jax.lax.psum(swiglu(x, w), "model"), x, 5
    )

  f = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=specs[0])
  close(value_and_grads(f)(xs, ws), value_and_grads(swiglu)(x, w))


def test_replicated_weights_inside_a_shard_map():
  mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
  x, w = operands(8 * 24)
  inner = functools.partial(blocks, block=8)
  total = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
  grads = jax.shard_map(
    jax.grad(total(inner), (0, 1)),
    mesh=mesh,
    in_specs=(P(None, "seq"), P()),
    out_specs=(P(None, "seq"), P()),
  )
  close(jax.jit(grads)(x, w), jax.grad(total(swiglu), (0, 1))(x, w))


# ---------------------------------------------------------------------------
# Room
# ---------------------------------------------------------------------------


def test_no_array_of_all_hidden_units():
  t, d, f, block = 2048, 8, 256, 64
  x, w = operands(t, d, f, b=1)
  sizes = {}
  for name, g in (
    ("whole", swiglu),
    ("blocks", functools.partial(blocks, block=block)),
  ):
    compiled = value_and_grads(g).lower(x, w).compile()
    sizes[name] = Program(compiled.as_text()).largest()
  assert sizes["whole"] >= t * f * 4
  assert sizes["blocks"] <= max(t * d * 4, block * f * 4)


def test_room_does_not_grow_with_the_length():
  d, f = 4, 256

  def temp(g, t):
    x, w = operands(t, d, f, b=1)
    memory = value_and_grads(g).lower(x, w).compile().memory_analysis()
    return memory.temp_size_in_bytes

  growth = {
    name: temp(g, 4096) - temp(g, 1024)
    for name, g in (
      ("whole", swiglu),
      ("blocks", functools.partial(blocks, block=64)),
    )
  }
  tokens = 4096 - 1024
  # A few copies of x and f(x), against the hidden units.
  assert growth["blocks"] <= tokens * d * 4 * 8
  assert growth["whole"] >= tokens * f * 4


# ---------------------------------------------------------------------------
# The walk
# ---------------------------------------------------------------------------


@given(
  length=st.integers(1, 400),
  block=st.integers(1, 80),
  devices=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
  certain=st.booleans(),
)
def test_steps(length, block, devices, certain):
  steps = Steps.of(length, block, (devices, certain))
  assert steps.rows * steps.inner == length
  # Every shard of every axis that divides the length is whole rows.
  assert steps.rows % math.gcd(length, devices) == 0
  assert steps.rows * steps.width <= max(block, math.gcd(length, devices))
  assert 1 <= steps.width <= steps.inner
  least = -(-steps.inner // max(1, block // steps.rows))
  assert steps.count <= 2 * least
  x = np.arange(length)[None]
  if length <= 20:
    cut, rest = steps.cut(jnp.asarray(x), 1)
    assert np.array_equal(steps.join(cut, rest, 1), x)


# ---------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------

X = jnp.ones((2, 8, 4))
SAME = lambda x: x
CASES = {
  "no function": (dict(f=X), InputTypeError, "f"),
  "no array": (dict(x=[1.0]), InputTypeError, "x list"),
  "none": (dict(x=None), InputTypeError, "x NoneType"),
  "float64": (dict(x=np.ones((2, 8, 4))), DtypeError, "x float64"),
  "block 0": (dict(block=0), OptionError, "block 0"),
  "block -1": (dict(block=-1), OptionError, "block -1"),
  "block float": (dict(block=4.0), OptionError, "block 4.0"),
  "block bool": (dict(block=True), OptionError, "block True"),
  "axis 3": (dict(axis=3), ShapeError, "axis 3"),
  "axis -4": (dict(axis=-4), ShapeError, "axis -4"),
  "axis text": (dict(axis="T"), OptionError, "axis 'T'"),
  "policy": (dict(policy="all"), OptionError, "policy 'all'"),
  "rows": (dict(f=lambda x: x[:, :1]), ShapeError, "f (2, 1, 4) (2, 4, 4)"),
  "rows, one block": (
    dict(f=lambda x: jnp.sum(x, 1), block=8), ShapeError, "f (2, 4) (2, 8, 4)",
  ),
  "scalar": (dict(f=jnp.sum), ShapeError, "f ()"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case):
  changes, error, words = CASES[case]
  arguments = dict(f=SAME, x=X, block=4) | changes
  with pytest.raises(RingjaxError) as caught:
    blockwise_feedforward(**arguments)
  assert type(caught.value) is error
  assert len(str(caught.value)) < 400
  for word in words.split():
    assert word in str(caught.value)

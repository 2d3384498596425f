"""The loss of blocks equals the loss of all logits, which never exist."""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench.program import Program
from ringjax.errors import (
  DtypeError,
  InputTypeError,
  MeshError,
  OptionError,
  RingjaxError,
  ShapeError,
)
from ringjax.ops.loss import blockwise_cross_entropy

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SENDS = {"all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


def reference(h, w, y, cotangent, cap=None, z=0.0):
  """Loss [B, T] and gradients of its product with `cotangent`, float64."""
  h, w = np.asarray(h, np.float64), np.asarray(w, np.float64)
  raw = h @ w
  logits = raw if cap is None else cap * np.tanh(raw / cap)
  top = logits.max(-1, keepdims=True)
  lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
  hot = np.asarray(y)[..., None] == np.arange(w.shape[1])
  loss = (lse - (logits * hot).sum(-1, keepdims=True) + z * lse**2)[..., 0]
  dl = np.exp(logits - lse) * (1 + 2 * z * lse) - hot
  dl = dl * np.asarray(cotangent, np.float64)[..., None]
  if cap is not None:
    dl = dl * (1 - np.tanh(raw / cap) ** 2)
  dw = np.einsum("btd,btv->dv", h, dl)
  return loss, dl @ w.T, dw


def operands(t, d=8, v=50, b=2, dtype=jnp.float32):
  rng = np.random.default_rng(1)
  h = jnp.asarray(rng.normal(size=(b, t, d)), dtype)
  w = jnp.asarray(rng.normal(size=(d, v)), dtype)
  y = jnp.asarray(rng.integers(0, v, (b, t)), jnp.int32)
  weights = jnp.asarray(rng.uniform(0.5, 2, (b, t)), jnp.float32)
  return h, w, y, weights


def results(f):
  """Jitted: f(h, w, y, weights) and its gradients for h, w and weights."""

  def run(h, w, y, weights):
    total = lambda h, w, a: (lambda x: (jnp.sum(x), x))(f(h, w, y, a))
    grads, loss = jax.grad(total, (0, 1, 2), has_aux=True)(h, w, weights)
    return loss, *grads

  return jax.jit(run)


def wanted(h, w, y, weights, **options):
  loss, dh, dw = reference(h, w, y, weights, **options)
  return loss * np.asarray(weights), dh, dw, loss


def close(got, want, tolerance=2e-6):
  for a, b in zip(got, want, strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    scale = np.max(np.abs(b), initial=1e-30)
    assert np.max(np.abs(a - b), initial=0) <= tolerance * scale


def gathered(program):
  """Shapes of what is sent by anything but a sum."""
  return [
    shape
    for computation in program.computations.values()
    for i in computation.values()
    if i.op.removesuffix("-start") in SENDS
    for _, shape in i.shapes
  ]


@pytest.mark.smoke
@pytest.mark.parametrize(("t", "block"), [(64, 16), (61, 16), (16, 16), (5, 1)])
def test_equals_the_whole(t, block):
  x = operands(t)
  f = functools.partial(blockwise_cross_entropy, block=block)
  close(results(f)(*x), wanted(*x))


@pytest.mark.parametrize(
  "options",
  [
    dict(logits_soft_cap=3.0),
    dict(z_loss=0.25),
    dict(logits_soft_cap=2, z_loss=1),
  ],
)
def test_cap_and_z_loss(options):
  x = operands(40)
  f = functools.partial(blockwise_cross_entropy, block=16, **options)
  cap, z = options.get("logits_soft_cap"), options.get("z_loss", 0.0)
  close(results(f)(*x), wanted(*x, cap=cap, z=z))


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64]
)
def test_dtypes(dtype, x64):
  h, w, y, weights = operands(48, dtype=dtype)
  f = functools.partial(blockwise_cross_entropy, block=7)
  loss, dh, dw, da = results(f)(h, w, y, weights)
  double = dtype == jnp.float64
  assert loss.dtype == (jnp.float64 if double else jnp.float32)
  assert dh.dtype == dw.dtype == dtype and da.dtype == weights.dtype
  want = wanted(h, w, y, weights)
  # The logits are as exact as their inputs, whatever these are.
  close((loss,), want[:1], 1e-12 if double else 2e-6)
  eps = float(jnp.finfo(dtype).eps)
  close((dh, dw, da), want[1:], max(4 * eps, 1e-6))


def test_float16_gradients_of_a_mean_over_many_tokens():
  """1 / 2^20 times a probability is nothing in float16."""
  h, w, y, _ = operands(40, dtype=jnp.float16)
  tiny = jnp.full(y.shape, 2.0**-20)
  f = functools.partial(blockwise_cross_entropy, block=16)
  dw = results(f)(h, w, y, tiny)[2]
  want = wanted(h, w, y, tiny)[2]
  # What is left is the spacing of float16 at the size of the result.
  assert np.max(np.abs(np.asarray(dw, np.float64) - want)) < 2.0**-24


def test_large_logits():
  h, w, y, weights = operands(20)
  close(
    results(blockwise_cross_entropy)(h * 1e4, w, y, weights),
    wanted(h * 1e4, w, y, weights),
  )


def test_without_a_batch():
  h, w, y, weights = operands(30)
  got = results(functools.partial(blockwise_cross_entropy, block=8))(
    h[0], w, y[0], weights[0]
  )
  want = wanted(h[:1], w, y[:1], weights[:1])
  close(got, (want[0][0], want[1][0], want[2], want[3][0]))


@pytest.mark.parametrize("shape", [(0, 12), (2, 0)])
def test_empty(shape):
  h, w = jnp.ones((*shape, 8)), operands(1)[1]
  y, weights = jnp.zeros(shape, jnp.int32), jnp.ones(shape)
  loss, dh, dw, da = results(
    functools.partial(blockwise_cross_entropy, block=4)
  )(h, w, y, weights)
  assert loss.shape == shape and dh.shape == h.shape and da.shape == shape
  assert not np.any(dw)


@pytest.mark.parametrize("kind", [bool, jnp.int32, jnp.bfloat16, None])
def test_kinds_of_weights(kind):
  h, w, y, _ = operands(30)
  mask = (
    None if kind is None else (jnp.arange(60).reshape(2, 30) % 3).astype(kind)
  )
  got = jax.jit(functools.partial(blockwise_cross_entropy, block=8))(
    h, w, y, mask
  )
  scale = 1.0 if mask is None else np.asarray(mask, np.float64)
  assert got.dtype == jnp.float32
  close((got,), (reference(h, w, y, 1.0 + 0 * np.asarray(y))[0] * scale,))


@pytest.mark.parametrize(
  "dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32, jnp.int64]
)
def test_kinds_of_labels(dtype, x64):
  h, w, y, _ = operands(20, v=300)
  y = y % 100
  got = blockwise_cross_entropy(h, w, y.astype(dtype), block=8)
  close((got,), (reference(h, w, y, 1.0 + 0 * np.asarray(y))[0],))


# ---------------------------------------------------------------------------
# Labels that are none
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("ignore", [-100, 7])
def test_ignored_tokens_count_for_nothing(ignore):
  h, w, y, weights = operands(30)
  y = jnp.where(y == 7, 8, y)
  skip = np.asarray(jnp.arange(60).reshape(2, 30) % 4 == 0)
  # Not even a NaN comes through.
  h = jnp.where(skip[..., None], jnp.nan, h)
  y = jnp.where(skip, ignore, y)
  f = functools.partial(blockwise_cross_entropy, block=8, ignore_index=ignore)
  got = results(f)(h, w, y, weights)
  h, y = jnp.where(skip[..., None], 0, h), jnp.where(skip, 0, y)
  want = wanted(h, w, y, jnp.where(skip, 0, weights))
  close(got, (*want[:3], np.where(skip, 0, want[3])))
  assert not np.any(np.asarray(got[1])[skip])


def test_all_tokens_ignored():
  h, w, y, weights = operands(30)
  f = functools.partial(blockwise_cross_entropy, block=8, ignore_index=-1)
  for a in results(f)(h, w, jnp.full_like(y, -1), weights):
    assert not np.any(a)


@pytest.mark.parametrize("wrong", [-1, 50, 2**31 - 1, -(2**31)])
def test_traced_wrong_labels_give_nan(wrong):
  h, w, y, weights = operands(30)
  y = y.at[1, 17].set(wrong)
  f = functools.partial(blockwise_cross_entropy, block=8, ignore_index=-100)
  loss, dh, _, _ = results(f)(h, w, y, weights)
  bad = np.zeros((2, 30), bool)
  bad[1, 17] = True
  assert np.array_equal(np.isnan(loss), bad)
  assert np.array_equal(np.isnan(dh).any(-1), bad)


def test_wide_labels_do_not_wrap_into_range(x64):
  h, w, y, _ = operands(8)
  y = y.astype(jnp.int64).at[0, 3].set(2**32 + 5)
  loss = jax.jit(blockwise_cross_entropy)(h, w, y)
  assert np.isnan(loss[0, 3]) and np.isnan(loss).sum() == 1


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_concrete_wrong_labels_are_named(kind):
  h, w, y, _ = operands(30)
  y = kind(np.asarray(y.at[1, 17].set(50304)))
  for f in (
    blockwise_cross_entropy,
    lambda h, w, y: jax.jit(lambda h: blockwise_cross_entropy(h, w, y))(h),
  ):
    with pytest.raises(OptionError, match=r"labels: got 50304 at \[1, 17\]"):
      f(h, w, y)


# ---------------------------------------------------------------------------
# Transforms
# ---------------------------------------------------------------------------


def test_transforms():
  h, w, y, weights = operands(20)
  f = functools.partial(blockwise_cross_entropy, block=8)
  want = wanted(h, w, y, weights)
  # One example at a time, with gradients of each.
  got = jax.vmap(results(f), (0, None, 0, 0))(h, w, y, weights)
  close((got[0], got[1], np.sum(got[2], 0), got[3]), want)
  close(results(jax.checkpoint(f))(h, w, y, weights), want)
  losses = jax.lax.map(lambda a: f(a[0], w, a[1], a[2]), (h, y, weights))
  close((losses,), want[:1])


def test_forward_mode_is_refused():
  h, w, y, _ = operands(8)
  with pytest.raises(TypeError, match="custom_vjp"):
    jax.jvp(lambda h: blockwise_cross_entropy(h, w, y), (h,), (h,))


# ---------------------------------------------------------------------------
# Sharded
# ---------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("kind", "entered", "t"),
  [
    ("auto", False, 128),
    ("auto", True, 4 * 31),
    ("explicit", True, 128),
    ("explicit", False, 4 * 31),
  ],
)
def test_sharded_sequence_and_vocabulary(kind, entered, t):
  mesh = jax.make_mesh((4, 2), ("seq", "model"), axis_types=(KINDS[kind],) * 2)
  x = operands(t, v=96)
  specs = P(None, "seq"), P(None, "model"), P(None, "seq"), P(None, "seq")
  put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
  xs = [put(a, spec) for a, spec in zip(x, specs, strict=True)]
  f = functools.partial(blockwise_cross_entropy, block=32)
  with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
    forward = jax.jit(f).lower(*xs).compile()
    both = results(f).lower(*xs).compile()
    for compiled in (forward, both):
      program = Program(compiled.as_text())
      assert "while" in program.ops()
      assert gathered(program) == []
    got = both(*xs)
    eager = f(*xs) if t == 128 else got[0]
  want = wanted(*x)
  close(got, want)
  close((forward(*xs), eager), (want[0], want[0]))
  for a, like in zip(got, (xs[3], *xs[:2], xs[3]), strict=True):
    assert a.sharding.is_equivalent_to(like.sharding, a.ndim)


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_an_operand_that_was_made_before_the_mesh(alone):
  mesh = jax.make_mesh(
    (4, 2), ("seq", "model"), axis_types=(KINDS["explicit"],) * 2
  )
  x = operands(64, v=96)
  specs = P(None, "seq"), P(None, "model"), P(None, "seq"), P(None, "seq")
  with jax.set_mesh(mesh):
    xs = [
      a if i == alone else jax.device_put(a, NamedSharding(mesh, spec))
      for i, (a, spec) in enumerate(zip(x, specs, strict=True))
    ]
    f = functools.partial(blockwise_cross_entropy, block=16)
    close(results(f)(*xs), wanted(*x))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_sharded_over_the_data_axis(kind):
  """W over D, as fully sharded training keeps it: one gather, of W."""
  mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(KINDS[kind],) * 2)
  x = operands(64, v=96)
  tokens = P("data", "seq")
  put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
  specs = tokens, P("data"), tokens, tokens
  xs = [put(a, spec) for a, spec in zip(x, specs, strict=True)]
  f = results(functools.partial(blockwise_cross_entropy, block=16))
  compiled = f.lower(*xs).compile()
  assert set(gathered(Program(compiled.as_text()))) <= {(8, 96), (4, 96)}
  close(compiled(*xs), wanted(*x))


def test_in_a_shard_map_low_precision_shards_are_summed_in_float32():
  mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
  h, w, y, _ = operands(8 * 5, dtype=jnp.bfloat16)
  tokens = P(None, "seq")
  f = jax.shard_map(
    functools.partial(blockwise_cross_entropy, block=2),
    mesh=mesh,
    in_specs=(tokens, P(), tokens),
    out_specs=tokens,
  )
  jaxpr = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(f(h, w, y))))(w))
  sums = re.findall(r"(\w+)\[8,50\]\S* = psum", jaxpr)
  assert sums == ["f32"]


@pytest.mark.parametrize("gradients", ["inside", "outside"])
def test_in_a_shard_map_weights_are_replicated(gradients):
  mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
  h, w, y, weights = x = operands(8 * 9)
  tokens = P(None, "seq")
  specs = tokens, P(), tokens, tokens
  f = functools.partial(blockwise_cross_entropy, block=4, z_loss=0.5)
  smap = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs)
  if gradients == "inside":
    run = jax.jit(smap(results(f), out_specs=(tokens, tokens, P(), tokens)))
  else:
    run = results(smap(f, out_specs=tokens))
  close(run(h, w, y, weights), wanted(*x, z=0.5))
  # One sum over shards, after the loop.
  program = Program(run.lower(*x).compile().as_text())
  sums = [
    program.times[name]
    for name, computation in program.computations.items()
    for i in computation.values()
    if i.op == "all-reduce" and w.shape in [s for _, s in i.shapes]
  ]
  assert sums == [1]


def test_vmap_over_a_named_axis():
  h, w, y, _ = operands(16)
  shards = lambda a: jnp.moveaxis(a.reshape(2, 4, 4, *a.shape[2:]), 1, 0)
  f = jax.vmap(
    lambda h, y: blockwise_cross_entropy(h, w, y, block=2), axis_name="seq"
  )
  got = jnp.moveaxis(f(shards(h), shards(y)), 0, 1).reshape(2, 16)
  close((got,), (reference(h, w, y, 1.0 + 0 * np.asarray(y))[0],))


def test_one_mesh_axis_for_tokens_and_vocabulary_is_refused():
  mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Explicit,))
  h, w, y, _ = operands(16, v=48)
  put = lambda a: jax.device_put(a, NamedSharding(mesh, P(None, "seq")))
  with pytest.raises(MeshError, match="w_vocab"):
    blockwise_cross_entropy(put(h), put(w), put(y), block=8)


# ---------------------------------------------------------------------------
# Room
# ---------------------------------------------------------------------------


def whole(h, w, y, weights):
  logits = jnp.einsum("btd,dv->btv", h, w)
  label = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
  return (jax.nn.logsumexp(logits, -1) - label) * weights


def test_no_array_of_all_logits():
  t, d, v, block = 2048, 8, 256, 64
  x = operands(t, d, v, b=1)
  blocks = functools.partial(blockwise_cross_entropy, block=block)
  sizes = [
    Program(results(f).lower(*x).compile().as_text()).largest()
    for f in (whole, blocks)
  ]
  assert sizes[0] >= t * v * 4
  assert sizes[1] <= max(t * d * 4, block * v * 4, d * v * 4)


def test_room_does_not_grow_with_the_length():
  d, v = 4, 256

  def temp(f, t):
    compiled = results(f).lower(*operands(t, d, v, b=1)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  blocks = functools.partial(blockwise_cross_entropy, block=64)
  growth = [temp(f, 4096) - temp(f, 1024) for f in (whole, blocks)]
  tokens = 4096 - 1024
  assert growth[0] >= tokens * v * 4
  # A few copies of h and of numbers a token.
  assert growth[1] <= tokens * d * 4 * 8


# ---------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------

H, W, Y = jnp.ones((2, 8, 4)), jnp.ones((4, 9)), jnp.zeros((2, 8), jnp.int32)
CASES = {
  "h none": (dict(h=None), InputTypeError, "h NoneType"),
  "h list": (dict(h=[1.0]), InputTypeError, "h list"),
  "h float64": (dict(h=np.ones((2, 8, 4))), DtypeError, "h float64"),
  "h int": (dict(h=jnp.ones((2, 8, 4), int)), DtypeError, "h int32"),
  "h rank 1": (dict(h=jnp.ones(4)), ShapeError, "h (4,)"),
  "h rank 4": (dict(h=jnp.ones((1, 2, 8, 4))), ShapeError, "h (1, 2, 8, 4)"),
  "w transposed": (dict(w_vocab=W.T), ShapeError, "w_vocab (9, 4) (2, 8, 4)"),
  "w rank 3": (dict(w_vocab=W[None]), ShapeError, "w_vocab (1, 4, 9)"),
  "no vocabulary": (dict(w_vocab=W[:, :0]), ShapeError, "w_vocab (4, 0)"),
  "mixed": (
    dict(w_vocab=W.astype(jnp.bfloat16)), DtypeError, "w_vocab bfloat16",
  ),
  "labels list": (dict(labels=[1]), InputTypeError, "labels list"),
  "labels float": (dict(labels=H[..., 0]), DtypeError, "labels float32"),
  "labels bool": (dict(labels=Y == 0), DtypeError, "labels bool"),
  "labels short": (dict(labels=Y[:, 1:]), ShapeError, "labels (2, 7) (2, 8)"),
  "labels one-hot": (dict(labels=Y[..., None]), ShapeError, "labels (2, 8, 1)"),
  "labels flat": (dict(labels=Y[0]), ShapeError, "labels (8,) (2, 8)"),
  "label": (dict(labels=Y.at[1, 3].set(9)), OptionError, "labels 9 [1, 3] 8"),
  "label -1": (dict(labels=Y - 1), OptionError, "labels -1 ignore_index"),
  "weights text": (dict(weights="x"), InputTypeError, "weights str"),
  "weights number": (dict(weights=2.0), InputTypeError, "weights float"),
  "weights row": (dict(weights=jnp.ones(8)), ShapeError, "weights (8,) (2, 8)"),
  "weights complex": (
    dict(weights=jnp.ones((2, 8), complex)), DtypeError, "weights complex64",
  ),
  "block": (dict(block=0), OptionError, "block 0"),
  "cap 0": (dict(logits_soft_cap=0.0), OptionError, "logits_soft_cap 0.0"),
  "cap array": (
    dict(logits_soft_cap=jnp.ones(())), OptionError, "logits_soft_cap",
  ),
  "z_loss": (dict(z_loss=-0.1), OptionError, "z_loss -0.1"),
  "z_loss nan": (dict(z_loss=float("nan")), OptionError, "z_loss nan"),
  "ignore": (dict(ignore_index=1.5), OptionError, "ignore_index 1.5"),
  "ignore unsigned": (
    dict(labels=Y.astype(jnp.uint32), ignore_index=-5), OptionError,
    "ignore_index -5 uint32",
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case):
  changes, error, words = CASES[case]
  arguments = dict(h=H, w_vocab=W, labels=Y, block=4) | changes
  with pytest.raises(RingjaxError) as caught:
    blockwise_cross_entropy(**arguments)
  assert type(caught.value) is error
  assert len(str(caught.value)) < 400
  for word in words.split():
    assert word in str(caught.value)


@pytest.mark.parametrize("jit", [False, True])
def test_minus_100_is_no_label_by_default(jit):
  labels = jnp.asarray(Y).at[0].set(-100)
  weights = jnp.ones(labels.shape).at[0].set(0)
  f = lambda h, w: jnp.sum(
    blockwise_cross_entropy(h, w, labels, weights, block=4)
  )
  plain = lambda h, w: jnp.sum(
    blockwise_cross_entropy(h, w, Y, weights, block=4)
  )
  both = jax.value_and_grad(f, (0, 1)), jax.value_and_grad(plain, (0, 1))
  got, want = (jax.jit(g)(H, W) if jit else g(H, W) for g in both)
  assert jnp.isfinite(got[0])
  jax.tree.map(np.testing.assert_array_equal, got, want)

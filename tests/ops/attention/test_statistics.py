"""Entropy, log-sum-exp and masses against the direct formula in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import Contiguous, Striped, Zigzag
from ringjax.errors import DtypeError, OptionError, ShapeError
from tests import oracle
from tests.helpers import make_mesh, refused
from tests.ops.attention.test_exact import FEATURES, causal, everything


def direct(case, keep=None):
  """The statistics of whole arrays, whose weights are there."""
  x = {k: np.asarray(a, np.float64) for k, a in case.arrays.items()}
  q, k = x["query"], x["key"]
  n, h, kv = *q.shape[2:], k.shape[2]
  scale = case.options.get("scale") or h**-0.5
  s = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, n // kv, 2)) * scale
  cap = case.options.get("logits_soft_cap")
  if cap is not None:
    s = cap * np.tanh(s / cap)
  if "alibi_slopes" in x:
    s = s - x["alibi_slopes"][:, None, None] * case.distance
  s = np.where(case.visible, s + x.get("bias", 0.0), -np.inf)
  if "sinks" in x:
    sink = np.broadcast_to(x["sinks"][:, None, None], (*s.shape[:3], 1))
    s = np.concatenate([s, sink], -1)
  top = np.maximum(s.max(-1, keepdims=True), -1e30)
  total = np.exp(s - top).sum(-1, keepdims=True)
  with np.errstate(divide="ignore"):
    lse = np.where(total > 0, top + np.log(total), -np.inf)
  p = np.exp(s - top) / np.maximum(total, 1e-300)
  entropy = -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0).sum(-1)
  p = p[..., : k.shape[1]]
  found = {
    "entropy": entropy.transpose(0, 2, 1),
    "lse": lse[..., 0].transpose(0, 2, 1),
    "column_mass": p.sum(2).transpose(0, 2, 1),
  }
  if keep is not None:
    keep = keep[..., None] if keep.ndim == 2 else keep
    keep = np.repeat(keep, n // keep.shape[2], 2)
    found["kept_mass"] = np.einsum("bnts,bsn->btn", p, keep)
  return found


def find(case, keep=None, *, layout=None, shards=1, **options):
  """What ringjax finds, in natural order."""
  layout = layout or Contiguous()
  order = functools.partial(oracle.reorder, layout=layout, shards=shards)
  arrays = {k: x for k, x in case.arrays.items() if k != "value"} | case.fixed
  arrays = {name: order(name, x) for name, x in arrays.items()}
  length = case.arrays["key"].shape[1]
  keys = layout.order(length, shards)
  if keep is not None:
    arrays["keep"] = keep[:, keys]
  call = lambda arrays: rj.attention_statistics(
    **arrays, **case.options, layout=layout, columns=True, **options
  )
  found = jax.tree.map(np.asarray, jax.jit(call)(arrays)._asdict())
  rows = lambda x: order("lse", x, back=True)
  found = {
    name: x[:, np.argsort(keys)] if name == "column_mass" else rows(x)
    for name, x in found.items()
    if x is not None
  }
  return found


def check(got, want, atol=1e-5):
  assert got.keys() == want.keys()
  for name, x in want.items():
    assert got[name].dtype == np.float32, name
    np.testing.assert_allclose(got[name], x, rtol=1e-6, atol=atol, err_msg=name)


def sets(case, heads=None, seed=5):
  b, s = case.arrays["key"].shape[:2]
  shape = (b, s) if heads is None else (b, s, heads)
  return np.random.default_rng(seed).random(shape) < 0.3


OFTEN = ("everything",)


def features():
  """All on a search, and every fourth in the longer run."""
  for n, feature in enumerate(FEATURES):
    mark = pytest.mark.slow if n % 4 else pytest.mark.long
    yield pytest.param(feature, marks=() if feature in OFTEN else mark)


@pytest.mark.parametrize("feature", [*features()])
def test_every_feature(feature):
  case = oracle.build(**FEATURES[feature])
  keep = sets(case, case.arrays["key"].shape[2])
  check(find(case, keep), direct(case, keep))


@pytest.mark.long
@pytest.mark.parametrize("t", [1, 37, 391])
def test_odd_lengths_and_several_tiles(t):
  case = oracle.build(b=1, t=t, s=391, n=2, kv=1, sees=causal, is_causal=True,
                      q_pos=391 - t + np.arange(t))  # fmt: skip
  check(find(case), direct(case))


@pytest.mark.long
@pytest.mark.parametrize(
  ("shards", "layout", "feature"),
  [
    (4, Zigzag(), "everything"),
    pytest.param(2, Striped(), "separate", marks=pytest.mark.long),
    pytest.param(8, Striped(4), "positions", marks=pytest.mark.long),
    pytest.param(8, Contiguous(), "prefill", marks=pytest.mark.long),
    pytest.param(8, Zigzag(), "mask-full", marks=pytest.mark.long),
    pytest.param(4, Striped(), "sinks", marks=pytest.mark.long),
    pytest.param(2, Contiguous(), "window-wide", marks=pytest.mark.long),
    pytest.param(8, Contiguous(), "bias-queries", marks=pytest.mark.long),
    pytest.param(4, Contiguous(), "lengths", marks=pytest.mark.long),
  ],
  ids=str,
)
def test_shards_change_nothing(shards, layout, feature):
  case = oracle.build(**FEATURES[feature])
  keep = sets(case)
  mesh = make_mesh(shards, "auto")
  got = find(case, keep, layout=layout, shards=shards, mesh=mesh)
  check(got, direct(case, keep))


@pytest.mark.long
@pytest.mark.parametrize("shards", [3, 5, 8])
def test_lengths_that_do_not_divide(shards):
  case = oracle.build(**everything(t=71))
  mesh = make_mesh(shards, "auto")
  check(find(case, shards=shards, mesh=mesh), direct(case))


@pytest.mark.long
def test_explicit_axes_and_heads():
  case = oracle.build(is_causal=True, sees=causal, sinks=True)
  mesh = jax.make_mesh(
    (2, 2),
    ("seq", "model"),
    axis_types=(jax.sharding.AxisType.Explicit,) * 2,
    devices=jax.devices()[:4],
  )
  put = lambda x: jax.device_put(
    x, NamedSharding(mesh, P(None, "seq", "model"))
  )
  got = rj.attention_statistics(
    put(case.arrays["query"]),
    put(case.arrays["key"]),
    sinks=case.arrays["sinks"],
    columns=True,
    is_causal=True,
  )
  got = {k: np.asarray(x) for k, x in got._asdict().items() if x is not None}
  check(got, direct(case))


@pytest.mark.long
def test_per_shard():
  case = oracle.build(is_causal=True, sees=causal)
  mesh, keep = make_mesh(4, "auto"), sets(case)
  call = lambda q, k, keep: rj.attention_statistics(
    q, k, keep=keep, columns=True, is_causal=True, axis="seq"
  )
  spec = P(None, "seq")
  over = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
  got = jax.jit(over)(case.arrays["query"], case.arrays["key"], keep)
  got = {k: np.asarray(x) for k, x in got._asdict().items()}
  check(got, direct(case, keep))


@pytest.mark.long
def test_large_scores_lose_their_rounding_alone():
  case = oracle.build(is_causal=True, sees=causal, spread=100.0)
  got, want = find(case), direct(case)
  largest = np.abs(want["lse"]).max()
  assert largest > 200
  check(got, want, atol=3e-7 * largest)
  assert got["entropy"].min() >= 0


@pytest.mark.long
def test_without_a_batch_and_of_half_precision():
  case = oracle.build(b=1, is_causal=True, sees=causal, dtype=jnp.bfloat16)
  keep = sets(case)
  want = direct(case, keep)
  q, k = (case.arrays[name][0] for name in ("query", "key"))
  got = rj.attention_statistics(
    q, k, keep=keep[0], columns=True, is_causal=True
  )
  check({k: np.asarray(x)[None] for k, x in got._asdict().items()}, want)
  alone = rj.attention_statistics(q, k, is_causal=True)
  assert alone.kept_mass is None and alone.column_mass is None
  np.testing.assert_allclose(alone.entropy, got.entropy, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_float64():
  case = oracle.build(dtype=np.float64, is_causal=True, sees=causal)
  got = rj.attention_statistics(
    case.arrays["query"], case.arrays["key"], is_causal=True
  )
  assert got.entropy.dtype == np.float64
  np.testing.assert_allclose(got.entropy, direct(case)["entropy"], atol=1e-12)


@pytest.mark.long
def test_a_key_that_is_not_finite_reaches_those_who_see_it():
  case = oracle.build(is_causal=True, sees=causal)
  key = case.arrays["key"].copy()
  key[0, 50, 1] = np.nan
  case = dataclasses.replace(case, arrays=case.arrays | {"key": key})
  got = find(case)
  bad = np.isnan(got["entropy"])
  assert bad[0, 50:, 2:].all()
  bad[0, 50:, 2:] = False
  assert not bad.any()


def test_nothing_is_as_large_as_the_scores():
  length = 8192
  x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
  call = jax.jit(
    lambda q, k: rj.attention_statistics(q, k, columns=True, is_causal=True)
  )
  used = call.lower(x, x).compile().memory_analysis().temp_size_in_bytes
  assert used < 2 * length * length


def test_no_derivative():
  case = oracle.build(b=1, t=8, is_causal=True, sees=causal)
  q, k = case.arrays["query"], case.arrays["key"]

  def loss(q, used):
    found = rj.attention_statistics(q, k, is_causal=True).entropy
    return jnp.sum(q * q) + used * jnp.sum(found), found

  call = lambda: jax.grad(loss, has_aux=True)(q, 1.0)
  refused(OptionError, call, "derivative", "stop_gradient")
  # As an auxiliary value it is a constant.
  watched = lambda q: (jnp.sum(q * q), loss(q, 0.0)[1])
  gradient, found = jax.grad(watched, has_aux=True)(q)
  np.testing.assert_array_equal(gradient, 2 * q)
  np.testing.assert_allclose(found, direct(case)["entropy"], atol=1e-5)


@pytest.mark.parametrize(
  ("kind", "options", "words"),
  [
    (ShapeError, dict(keep=np.ones((2, 71), bool)), ("keep", "[B, S]")),
    (ShapeError, dict(keep=np.ones(72, bool)), ("keep",)),
    (DtypeError, dict(keep=np.ones((2, 72), np.int32)), ("keep", "bool")),
    (OptionError, dict(dropout_rate=0.5, dropout_seed=0), ("dropout_rate",)),
    (OptionError, dict(strategy="ring"), ("strategy", "unknown")),
  ],
)
def test_what_is_refused(kind, options, words):
  case = oracle.build()
  q, k = case.arrays["query"], case.arrays["key"]
  refused(kind, lambda: rj.attention_statistics(q, k, **options), *words)

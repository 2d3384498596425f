"""The TPU kernel against the truth, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import Contiguous, Gather, Ring, Striped, Zigzag
from ringjax.errors import OptionError
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.kernels.tile_ops import TileSteps
from tests import oracle
from tests.ops.attention import test_exact as exact
from tests.ops.attention.test_exact import FEATURES, ring_mesh

# Tiles that no chip has, so that a small problem has many of them; three
# columns of keys a backward kernel, so that there are several.
SMALL = FlashTPU(16, 8, key_span=24, interpret=True)

# An array of pairs makes it decline.
PAIRS = {name for name, case in FEATURES.items() if {"bias", "allow"} & {*case}}
PAIRS |= {"everything", "mask-pairs"}
SERVED = [name for name in FEATURES if name not in PAIRS]
# One of each part of the kernel; the others differ in their coordinates.
QUICK = ("segments", "value-dim", "soft-cap", "alibi", "prefix-each", "lengths")


def pick(names, quick):
  return [
    name if name in quick else pytest.param(name, marks=pytest.mark.slow)
    for name in names
  ]


def verify(name, strategy, layout=None, shards=1):
  case, want = exact.problem(name)
  layout = layout or Contiguous()
  mesh = ring_mesh(shards)
  got = oracle.run(
    case, layout=layout, strategy=strategy, shards=shards, mesh=mesh
  )
  oracle.check(got, want)


@pytest.mark.one_case
@pytest.mark.parametrize("feature", pick(SERVED, QUICK))
def test_one_device(feature):
  verify(feature, Gather(SMALL))


@pytest.mark.long
@pytest.mark.parametrize(
  "layout", [Striped(), pytest.param(Zigzag(), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("feature", pick(SERVED, ("sinks",)))
def test_ring(feature, layout):
  """What earlier hops found goes through the kernel."""
  verify(feature, Ring(SMALL, unroll=1), layout, 4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_q", "two_level", "ulysses", "halo"])
def test_other_strategies(strategy):
  made = {
    "ring_q": rj.RingQ(SMALL),
    "two_level": Ring(Ring(SMALL), inner=2),
    "ulysses": rj.Ulysses(SMALL),
    "halo": rj.Halo(SMALL),
  }[strategy]
  name = "window-narrow" if strategy == "halo" else "segments"
  verify(name, made, Contiguous(), 2 if strategy == "ulysses" else 4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bfloat16", "dropout"])
def test_blockwise_is_met(kind):
  """What the truth has other roundings or no numbers for."""
  options = dict(is_causal=True)
  dtype = jnp.float32
  if kind == "dropout":
    options |= dict(dropout_rate=0.3, dropout_seed=jnp.array([5, 6]))
  else:
    dtype = jnp.bfloat16
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, do = (
    jax.random.normal(key, (2, 56, heads, 16), jnp.float32).astype(dtype)
    for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
  )

  def results(local):
    call = lambda *x: rj.dot_product_attention(
      *x, strategy=Gather(local), **options
    )
    out, pull = jax.vjp(call, q, k, v)
    return out, *pull(do)

  ours, theirs = results(SMALL), results(rj.Blockwise(16, 8))
  limit = 2e-6 if dtype == jnp.float32 else 1e-2
  for a, b in zip(ours, theirs, strict=True):
    assert a.dtype == b.dtype
    assert oracle.error(a, b) < limit


@pytest.mark.long
def test_a_nan_reaches_those_who_see_it_only():
  keys = jax.random.split(jax.random.key(1), 3)
  q, k, v = (jax.random.normal(key, (1, 40, 1, 8)) for key in keys)
  v = v.at[0, 20, 0, 3].set(jnp.nan)
  k = k.at[0, 30, 0, 0].set(jnp.inf)

  def odd(local):
    call = lambda q, k, v: rj.dot_product_attention(
      q, k, v, mask=rj.Causal() & rj.Window(7), strategy=Gather(local)
    )
    out, pull = jax.vjp(call, q, k, v)
    rows = lambda x: ~np.isfinite(np.asarray(x)).all((0, 2, 3))
    return [rows(x) for x in (out, *pull(jnp.ones_like(out)))]

  found = odd(SMALL)
  assert found[0][20:27].all() and not found[0][:20].any()
  assert all(x.any() and not x.all() for x in found)
  for ours, theirs in zip(found, odd(rj.Blockwise(16, 8)), strict=True):
    assert np.array_equal(ours, theirs)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "kinds",
  [
    [[2, 1, 0], [0, 0, 0], [1, 2, 2]],
    [[0, 0]],
    [[2]],
    [[1] * 5] * 4,
  ],
)
def test_steps(kinds):
  kinds = np.array(kinds, np.int8)
  steps = TileSteps.of(jnp.asarray(kinds))
  count = int(steps.count)
  words = np.asarray(steps.words)[:count]
  row, column = words >> 18, words >> 4 & (1 << 14) - 1
  if not kinds.any():
    assert count == 1 and words[0] & 3 == 3 and not words[0] & 12
    return
  assert np.array_equal(np.stack([row, column]), np.nonzero(kinds))
  found = kinds[row, column]
  assert np.array_equal(words & 4 != 0, found == 1)
  assert np.array_equal(words & 8 != 0, found == 2)
  assert np.array_equal(words & 1 != 0, np.r_[True, row[1:] != row[:-1]])
  assert np.array_equal(words & 2 != 0, np.r_[row[1:] != row[:-1], True])


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(bias=jnp.zeros((1, 1, 8, 8))), "bias or mask array"),
    (dict(mask=jnp.ones((1, 1, 8, 8), bool)), "bias or mask array"),
    (dict(dtype=jnp.float16), "float16"),
    (dict(heads=512), "heads of 512"),
    (dict(kernel=FlashTPU()), "8 queries"),
    (dict(kernel=FlashTPU(100, 128)), "multiples of 128"),
    (
      dict(kernel=FlashTPU(4096, 4096, interpret=True)),
      "too large for tpu-v5p",
    ),
  ],
)
def test_what_it_does_not_serve_it_says(options, words):
  options = dict(options)
  kernel = options.pop("kernel", SMALL)
  width = options.pop("heads", 16)
  x = jnp.zeros((1, 8, 1, width), options.pop("dtype", jnp.float32))
  with pytest.raises(OptionError, match=words):
    rj.dot_product_attention(x, x, x, strategy=Gather(kernel), **options)

"""The gated delta net as a layer, and Qwen3-Next as a model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import models
from ringjax.errors import ConfigError, OptionError
from ringjax.nn.recurrent_layers.delta import Delta
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.parallel.layout import Contiguous, Striped, Uneven, Zigzag
from tests import checkpoints
from tests.helpers import make_mesh

NAME = "qwen3_next"
_slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return checkpoints.write(NAME, tmp_path_factory.mktemp("next") / "model")


@pytest.fixture(scope="module")
def model(folder):
  return models.load(folder)


@pytest.fixture(scope="module")
def expected():
  return checkpoints.expected(NAME)


def close(got, want, atol=1e-4):
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def on(model, attend):
  """The model on all devices of a mesh."""
  return jax.device_put(model, NamedSharding(attend.mesh, P()))


def ring(shards, **options):
  return ContextParallel(mesh=make_mesh(shards, "auto"), axis="seq", **options)


def test_equals_transformers(model, expected):
  close(model(expected.tokens), expected.logits)


@pytest.mark.long
def test_older_spelling(model, expected, tmp_path):
  old = models.load(
    checkpoints.write(NAME, tmp_path / "old", spelling="v4"), scan=False
  )
  assert old.config == model.config
  close(old(expected.tokens), expected.logits)


def test_what_a_config_may_not_ask_for():
  for key, value in dict(
    attention_bias=True,
    hidden_act="gelu",
    linear_num_value_heads=3,
    layer_types=["linear_attention", "sliding_attention", "full_attention"],
  ).items():
    with pytest.raises(ConfigError, match=key):
      models.create({**checkpoints.config(NAME), key: value})


def read(model, tokens, sizes, cache, attend, **options):
  """Logits of calls of these sizes, one after another."""
  found, at = [], 0
  for n in sizes:
    more = {k: v[:, at : at + n] for k, v in options.items()}
    logits, cache = model(
      tokens[:, at : at + n],
      positions=np.arange(at, at + n, dtype=np.int32)[None],
      cache=cache,
      attend=attend,
      **more,
    )
    found.append(np.asarray(logits))
    at += n
  return np.concatenate(found, 1), cache


@pytest.mark.long
def test_prompt_then_tokens(model, expected):
  b, t = expected.tokens.shape
  cache = model.init_cache(b, t)
  head, tail = expected.tokens[:, : t - 9], expected.tokens[:, t - 9 :]
  first, cache = model(head, cache=cache, attend=ContextParallel())
  close(first, expected.logits[:, : t - 9])
  for i in range(9):
    at = np.full((1, 1), t - 9 + i, np.int32)
    logits, cache = model(tail[:, i : i + 1], positions=at, cache=cache)
    close(logits[:, 0], expected.logits[:, t - 9 + i])


@pytest.mark.long
@pytest.mark.parametrize("size", [_slow(1), 7])
def test_chunks(model, expected, size):
  b, t = expected.tokens.shape
  sizes = [size] * (t // size) + [t % size] * (t % size > 0)
  cache = model.init_cache(b, t)
  got, _ = read(model, expected.tokens, sizes, cache, CachedAttention())
  close(got, expected.logits)


@pytest.mark.long
def test_greedy(model, expected):
  b, length = expected.prompt.shape
  steps = expected.greedy.shape[1]
  cache = model.init_cache(b, length + steps)
  logits, cache = model(expected.prompt, cache=cache, attend=ContextParallel())
  for i in range(steps):
    token = jnp.argmax(logits[:, -1:], -1)
    np.testing.assert_array_equal(token[:, 0], expected.greedy[:, i])
    at = np.full((1, 1), length + i, np.int32)
    logits, cache = model(token, positions=at, cache=cache)


@pytest.mark.parametrize("shards", [_slow(1), _slow(2), _slow(4), 8])
def test_shards_equal_one_device(model, expected, shards):
  n = expected.tokens.shape[1] // 8 * 8
  attend = ring(shards)
  got = on(model, attend)(expected.tokens[:, :n], attend=attend)
  close(got, expected.logits[:, :n])


@pytest.mark.long
def test_a_length_that_shards_do_not_divide(model, expected):
  n = expected.tokens.shape[1] // 8 * 8 - 3
  attend = ring(4, strategy=Gather())
  got = on(model, attend)(expected.tokens[:, :n], attend=attend)
  close(got, expected.logits[:, :n])


@pytest.mark.long
@pytest.mark.parametrize("layout", [Striped(3), Zigzag()])
def test_layouts_that_mix_the_tokens_equal_one_device(model, expected, layout):
  n = expected.tokens.shape[1] - 3
  attend = ring(4, layout=layout)
  put = lambda x: layout.permute(x, shards=4)
  got = on(model, attend)(
    put(expected.tokens[:, :n]),
    positions=put(np.arange(n, dtype=np.int32)[None]),
    attend=attend,
  )
  close(layout.restore(np.asarray(got), shards=4), expected.logits[:, :n])


def test_shards_of_unequal_lengths_are_refused(model):
  tokens = np.ones((1, 16), np.int32)
  with pytest.raises(OptionError, match=r"Contiguous\(\)"):
    model(tokens, attend=ring(4, layout=Uneven((4,) * 4)))


@pytest.mark.long
def test_shards_read_chunks_and_decode(model, expected):
  mesh = make_mesh(4, "auto")
  chunk = CachedAttention(mesh=mesh, axis="seq", replicated=False)
  decode = CachedAttention(mesh=mesh, axis="seq")
  model = on(model, decode)
  b = expected.tokens.shape[0]
  cache = model.init_cache(b, 24, sharding=decode)
  got, cache = read(model, expected.tokens[:, :16], [8, 8], cache, chunk)
  close(got, expected.logits[:, :16])
  for i in range(16, 20):
    at = np.full((1, 1), i, np.int32)
    token = expected.tokens[:, i : i + 1]
    logits, cache = model(token, positions=at, cache=cache, attend=decode)
    close(logits[:, 0], expected.logits[:, i])


@pytest.mark.long
def test_documents_and_padding(model, expected):
  """Two documents and padding in a row are what they are alone."""
  one, two = expected.tokens[:1, :9], expected.tokens[1:2, :12]
  pad = np.full((1, 3), 5, np.int32)
  packed = np.concatenate([one, two, pad], 1)
  seg = np.repeat(np.int32([[1, 2, 0]]), [9, 12, 3], 1)
  pos = np.concatenate([np.arange(9), np.arange(12), np.zeros(3)])
  pos = pos.astype(np.int32)[None]
  for attend in (ring(1), ring(8)):
    here = on(model, attend)
    got = here(packed, positions=pos, segment_ids=seg, attend=attend)
    close(got[:, :9], expected.logits[:1, :9])
    close(got[:, 9:21], expected.logits[1:2, :12])


@pytest.mark.long
@pytest.mark.parametrize("shards", [_slow(1), 8])
def test_padded_prompts_go_on(model, expected, shards):
  """Rows of different lengths; the last shards hold nothing but padding."""
  attend = ring(shards)
  model = on(model, attend)
  lengths, size = np.array([3, 10]), 16
  seg = (np.arange(size)[None] < lengths[:, None]).astype(np.int32)
  tokens = np.where(seg > 0, expected.tokens[:2, :size], 0)
  cache = model.init_cache(2, 32, sharding=attend)
  got, cache = model(tokens, segment_ids=seg, cache=cache, attend=attend)
  decode = CachedAttention(mesh=attend.mesh, axis="seq")
  rows = np.arange(2)
  close(got[rows, lengths - 1], expected.logits[rows, lengths - 1])
  for i in range(6):
    at = lengths + i
    # The second row rests in every other step.
    real = np.array([1, i % 2], np.int32)
    at = np.array([at[0], lengths[1] + i // 2])
    logits, cache = model(
      expected.tokens[rows, at][:, None],
      positions=at[:, None].astype(np.int32),
      segment_ids=real[:, None],
      cache=cache,
      attend=decode,
    )
    for row in np.flatnonzero(real):
      close(logits[row, 0], expected.logits[row, at[row]])


@pytest.mark.slow
def test_a_left_padded_call_goes_on(model, expected):
  tokens = expected.tokens[:1, :12]
  cache = model.init_cache(1, 32)
  _, cache = model(tokens[:, :6], cache=cache, attend=CachedAttention())
  padded = np.concatenate([np.zeros((1, 4), np.int32), tokens[:, 6:]], 1)
  pos = np.maximum(np.arange(10) + 2, 0).astype(np.int32)[None]
  seg = (np.arange(10) >= 4).astype(np.int32)[None]
  got, _ = model(padded, positions=pos, segment_ids=seg, cache=cache)
  close(got[:, 4:], expected.logits[:1, 6:12])


@pytest.mark.slow
def test_data_and_model_axes(folder, expected):
  kinds = (AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"), axis_types=kinds)
  sharded = models.load(folder, mesh=mesh)
  n = expected.tokens.shape[1] // 2 * 2
  attend = ContextParallel(mesh=mesh, axis="seq")
  b = expected.tokens.shape[0] // 2 * 2
  tokens = expected.tokens[:b, :n]
  close(sharded(tokens, attend=attend), expected.logits[:b, :n])
  cache = sharded.init_cache(b, n, sharding=attend)
  decode = CachedAttention(mesh=mesh, axis="seq")
  _, cache = sharded(tokens[:, :8], cache=cache, attend=attend)
  got, _ = sharded(
    tokens[:, 8:9],
    positions=np.full((1, 1), 8, np.int32),
    cache=cache,
    attend=decode,
  )
  close(got[:, 0], expected.logits[:b, 8])


def gradients(model, tokens, attend):
  def loss(model):
    logits = model(tokens, attend=attend)
    return jnp.mean(jnp.square(logits - jnp.roll(logits, 1, -1)))

  return jax.tree.leaves(jax.jit(jax.grad(loss))(on(model, attend)))


@pytest.mark.slow
def test_gradients_over_shards(model, expected):
  tokens = expected.tokens[:, :16]
  got = gradients(model, tokens, ring(4))
  want = gradients(model, tokens, ring(1))
  for a, b in zip(got, want, strict=True):
    assert np.isfinite(a).all() and np.abs(b).max() > 0
    close(a, b, 1e-5 * max(1, np.abs(b).max()))


def test_nbytes_count_states(model):
  cache, longer = model.init_cache(1, 8), model.init_cache(1, 16)
  state = 2 * 4 * 8 * 12 + 2 * 3 * (2 * 2 * 8 + 4 * 12) + 2 * 3
  # Keys and values of one layer, and coordinates.
  each = 2 * 2 * 16 + 2
  assert cache.nbytes() == 4 * (state + 8 * each + 2)
  assert longer.nbytes() - cache.nbytes() == 4 * 8 * each


@pytest.mark.slow
def test_bfloat16(folder, expected):
  attend = CachedAttention(
    mesh=make_mesh(2, "auto"), axis="seq", replicated=False
  )
  model = models.load(folder, dtype=jnp.bfloat16, mesh=attend.mesh)
  t = expected.tokens.shape[1]
  cache = model.init_cache(
    expected.tokens.shape[0], t // 2 * 2, sharding=attend
  )
  got, cache = model(
    expected.tokens[:, : t // 2 * 2], cache=cache, attend=attend
  )
  assert all(
    s.memory.dtype == jnp.float32 for s in cache.slots if hasattr(s, "memory")
  )
  off = np.abs(got - expected.logits[:, : t // 2 * 2])
  assert np.median(off) < 0.05


@pytest.mark.long
def test_no_sequence_is_gathered():
  """What crosses shards does not depend on the number of tokens."""
  spec = Delta(key_heads=2, heads=4, key=8, value=8, taps=4, eps=1e-6)
  layer = spec.build(nnx.Rngs(0), 16)
  attend = ring(4)

  def sizes(t):
    from ringjax.kv.base import NoCache
    from ringjax.nn.tokens import Tokens

    @functools.partial(jax.jit, static_argnums=(2,))
    def f(layer, x, attend):
      seg = jnp.ones((1, t), jnp.int32)
      tokens = Tokens(
        seg, seg, derived=True, segmented=False, ropes=(), length=t
      )
      return layer(x, tokens, NoCache(1).layer(0, (), 0), attend)[0]

    text = f.lower(layer, jnp.zeros((1, t, 16)), attend).as_text()
    return sorted(
      line.split("->")[-1]
      for line in text.splitlines()
      if "all_gather" in line or "all_reduce" in line
    )

  assert sizes(64) == sizes(256)
  assert sizes(64)


@pytest.mark.long
def test_spread_knows_whether_tokens_are_sharded():
  mesh = make_mesh(2, "auto")
  assert not ShardingContext().sharded and not CachedAttention().sharded
  assert ContextParallel(mesh=mesh, axis="seq", layout=Contiguous()).sharded
  assert not CachedAttention(mesh=mesh, axis="seq").sharded
  assert CachedAttention(mesh=mesh, axis="seq", replicated=False).sharded

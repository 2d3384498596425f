"""One pass == chunks == token by token, on any number of devices.

All are held against what transformers computes in float64, so that they
cannot agree on something wrong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.infer import prefill
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.summaries.summary_spec import SummarySlots
from ringjax.nn.sharding_context import (
  CachedAttention,
  ChainParallel,
  ContextParallel,
)
from tests import checkpoints

# What layers can be made of; the other fixtures are other sums of these.
KINDS = (
  "llama3",  # grouped queries
  "gemma2",  # soft caps, every other layer a window
  "gemma3_text",  # two rotations
  "gpt_oss",  # sinks, windows, experts
  "deepseek_v3",  # latent keys, absorbed when decoding
  "deepseek_v32",  # keys that an index chooses
  "llama4_text",  # chunked layers, layers without rotation
  "falcon_rw",  # ALiBi
  "mixtral",  # experts
  "gpt2",  # learned positions
  "gemma3n",  # keys of other layers, streams
  "qwen3_next",  # a recurrent state beside keys
  "mamba2",  # states alone
  "granitemoehybrid",  # states beside keys and experts
  "nemotron_h",  # experts without a gate, in latents
  "lfm2",  # tails of convolutions beside keys
  "jamba",  # a state for each channel
  "kimi_linear",  # decays of channels, latent keys without a rotation
  "falcon_h1",  # two caches of a layer
  "deepseek_v4",  # compressed keys, an index of them, mixed streams
  "glm5_next",  # blocks of latents by an index's pooled keys, decays, streams
  "mistral_large4",  # a learned rotation, an index that layers share
  "hy_v4",  # an index that layers share, beside several streams
  "minimax_m3_vl",  # blocks that an index chooses for each kv head
  "qwen4_exp",  # blocks by mean keys of an index, n-grams, gated streams
)
# A layer of these hands its state from shard to shard.
STATES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "mamba2", "granitemoehybrid",
          "granitemoehybrid_dense", "bamba", "nemotron_h", "lfm2", "jamba",
          "mamba", "falcon_mamba",
          "bailing_hybrid", "deepseek_v4", "kimi_linear", "falcon_h1",
          "glm5_next", "minimax",
          "olmo_hybrid", "qwen4_exp", "recurrent_gemma", "zamba2")  # fmt: skip
# These four have no layer in common.
QUICK = ("llama3", "gpt_oss", "deepseek_v3", "qwen3_next")
OTHERS = tuple(n for n in checkpoints.names() if n not in KINDS)
WAYS = tuple(m for m in prefill.METHODS if m not in ("auto", "chunked"))
SHARDED = tuple(m for m in WAYS if m not in ("dense", "blockwise"))
# A recurrent layer hands its state from shard to shard, which are even.
RECURRENT = tuple(m for m in SHARDED if m != "kvr")
TOLERANCE = 5e-5
CAPACITY, CHUNK, STEPS = 64, 8, 8
# Of 40 tokens.
PARTS = {2: (24, 16), 4: (15, 11, 8, 6), 8: (8, 7, 6, 5, 4, 4, 3, 3)}


def way(method, mesh):
  """The attend of a way to read a whole prompt."""
  if method == "kvr":
    layout = rj.Uneven(PARTS[mesh.size])
    return ChainParallel(mesh=mesh, axis="seq", layout=layout, tile=3)
  layout, strategy, sharded, _ = prefill.strategy_of(method)
  assert sharded == (mesh is not None)
  axis = None if mesh is None else "seq"
  return ContextParallel(mesh=mesh, axis=axis, layout=layout, strategy=strategy)


def whole(model, mesh, method, tokens):
  """Logits of every token, and the cache that one pass leaves."""
  attend = way(method, mesh)
  batch, length = tokens.shape
  cache = model.init_cache(batch, CAPACITY, sharding=attend)
  # Zigzag wants a multiple of twice the shards.
  unit = 1 if method == "kvr" else 2 * attend.size
  total = -(-length // unit) * unit
  order = attend.layout.padded_order(total, attend.size)
  real = (order >= 0) & (order < length)
  logits, cache = model(
    np.where(real, tokens[:, np.where(real, order, 0)], 0),
    cache=cache,
    attend=attend,
    segment_ids=jnp.asarray(real.astype(np.int32)),
    length=length,
  )
  back = np.argsort(np.where(real, order, total))[:length]
  return np.asarray(logits)[:, back], cache


def parts(model, mesh, tokens):
  """The same by chunks, and the last tokens one by one."""
  axis = None if mesh is None else "seq"
  chunks = CachedAttention(mesh=mesh, axis=axis, replicated=False)
  singles = CachedAttention(mesh=mesh, axis=axis)
  batch, total = tokens.shape
  cache = model.init_cache(batch, CAPACITY, sharding=singles)
  found, at = [], 0
  while at < total:
    size = CHUNK if at < total - STEPS else 1
    pos = np.tile(np.arange(at, at + size, dtype=np.int32), (batch, 1))
    logits, cache = model(
      tokens[:, at : at + size],
      positions=jnp.asarray(pos),
      cache=cache,
      attend=chunks if size > 1 else singles,
      length=total,
    )
    found.append(np.asarray(logits))
    at += size
  return np.concatenate(found, 1), cache


def contents(cache):
  """What a cache holds, in the order of positions: one array a kind."""
  found = []
  pos, seg = np.asarray(cache.at.pos), np.asarray(cache.at.seg)
  for slots in cache.slots:
    if isinstance(slots, SummarySlots):
      # Summaries are in the order of their windows' positions.
      found.extend(np.asarray(x) for x in slots)
      continue
    if not isinstance(slots, LayerKV):
      # Slots of compressed keys are in the order of their windows.
      found.extend(np.asarray(x) for x in jax.tree.leaves(slots.memory))
      continue
    for x in (np.asarray(slots.k), np.asarray(slots.v)):
      rows = []
      for b in range(pos.shape[0]):
        used = np.flatnonzero(seg[b])
        used = used[np.argsort(pos[b, used])]
        assert pos[b, used].tolist() == list(range(used.size))
        rows.append(x[:, b][:, :, used])
      found.append(np.stack(rows))
  return found


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def same_contents(got, want):
  for x, y in zip(contents(got), contents(want), strict=True):
    assert x.shape == y.shape
    norm = np.linalg.norm(y)
    assert np.linalg.norm(x - y) <= 1e-5 * norm
    # An empty cache would agree with another.
    assert norm > 0 or y.size == 0


def slow(names, quick):
  return [
    n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names
  ]


@pytest.mark.long
@pytest.mark.parametrize("name", slow((*KINDS, *OTHERS), QUICK[::2]))
def test_one_pass_chunks_and_single_tokens(loaded, name):
  """On eight devices against the reference, and the caches alike."""
  model, mesh = loaded(name, 8)
  expected = checkpoints.expected(name)
  logits, once = whole(model, mesh, "striped", expected.tokens)
  close(logits, expected.logits)
  logits, pieces = parts(model, mesh, expected.tokens)
  close(logits, expected.logits)
  same_contents(pieces, once)


@pytest.mark.parametrize(
  ("name", "devices"),
  [
    pytest.param(
      n, d, marks=() if (n, d) == ("llama3", 2) else pytest.mark.slow
    )
    for n in KINDS
    for d in (1, 2, 4)
  ],
)
def test_fewer_devices(loaded, name, devices):
  model, mesh = loaded(name, devices)
  expected = checkpoints.expected(name)
  method = "striped" if devices > 1 else "blockwise"
  logits, once = whole(model, mesh, method, expected.tokens)
  close(logits, expected.logits)
  logits, pieces = parts(model, mesh, expected.tokens)
  close(logits, expected.logits)
  same_contents(pieces, once)


@pytest.mark.long
@pytest.mark.parametrize("name", slow(KINDS, ("llama3",)))
def test_every_way_leaves_the_same_cache(loaded, name):
  expected = checkpoints.expected(name)
  model, _ = loaded(name)
  logits, want = whole(model, None, "dense", expected.tokens)
  close(logits, expected.logits)
  for method in RECURRENT if name in STATES else WAYS[1:]:
    model, mesh = loaded(name, 8 if method in SHARDED else 1)
    logits, cache = whole(model, mesh, method, expected.tokens)
    close(logits, expected.logits)
    same_contents(cache, want)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("name", "method", "devices"),
  [
    ("llama3", "dense", 1),
    ("llama3", "chunked", 4),
    pytest.param("llama3", "kvr", 4, marks=pytest.mark.slow),
    pytest.param("llama3", "striped", 4, marks=pytest.mark.slow),
    ("qwen3_next", "auto", 8),
    *(
      pytest.param(n, "auto", 8, marks=pytest.mark.slow)
      for n in checkpoints.names()
    ),
    *(
      pytest.param(n, m, 4, marks=pytest.mark.slow)
      for n in KINDS
      for m in (*SHARDED, "chunked")
      if n not in STATES or m in (*RECURRENT, "chunked")
    ),
  ],
)
def test_every_way_is_continued_by_the_same_tokens(
  loaded, name, method, devices
):
  model, mesh = loaded(name, devices)
  expected = checkpoints.expected(name)
  new = rj.infer.generate(
    model,
    expected.prompt,
    max_new_tokens=16,
    prefill=method,
    mesh=mesh,
    chunk=8 if method == "chunked" else None,
  )
  assert new.tokens.dtype == np.int32
  np.testing.assert_array_equal(new, expected.greedy)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("method", "devices"),
  [
    ("auto", 1),
    ("chunked", 8),
    pytest.param("auto", 8, marks=pytest.mark.slow),
    pytest.param("chunked", 1, marks=pytest.mark.slow),
  ],
)
def test_prompts_of_unequal_lengths(loaded, method, devices):
  """Each example continues as if it were alone."""
  model, mesh = loaded("llama3", devices)
  expected = checkpoints.expected("llama3")
  prompts = [expected.prompt[0], expected.prompt[1][:7], expected.prompt[0][:1]]
  together = rj.infer.generate(
    model, prompts, max_new_tokens=5, prefill=method, mesh=mesh
  )
  np.testing.assert_array_equal(together[0], expected.greedy[0, :5])
  full = jax.jit(lambda m, x: jnp.argmax(m(x)[0, -1]))
  for prompt, new in zip(prompts[1:], together[1:], strict=True):
    # By whole passes over all that was said so far, without a cache.
    one, _ = loaded("llama3")
    said = list(prompt)
    for token in new[:3]:
      assert token == int(full(one, jnp.asarray([said], jnp.int32)))
      said.append(token)

"""Dual chunk attention and Self-Extend, against a model written in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.models.hf.tensors import parameters
from ringjax.models.rope_scaling import context_extension, extended_config

LONG = pytest.mark.long
CONFIG = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "vocab_size": 40,
  "hidden_size": 32,
  "intermediate_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 16,
  "rope_theta": 100.0,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
}
DUAL = "dual_chunk:factor=4,chunk_size=10,local_size=3"
EXTEND = "self_extend:factor=4,window=6"
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 40)).astype(np.int32)


def dual_chunk(i, j, chunk_size=10, local_size=3):
  """Distance at which a query at i sees a key at j."""
  length = chunk_size - local_size
  back = i // length - j // length
  if back == 0:
    return i % length - j % length
  if back == 1:
    return min(i % length + length, chunk_size) - j % length
  return min(2 * length - 1, chunk_size) - j % length


def self_extend(i, j, group=6, window=6):
  """Distance at which a query at i sees a key at j."""
  if i - j < window:
    return i - j
  return i // group + window - window // group - j // group


def rotated(x, distance):
  """Vectors [..., H] rotated by distances [...]."""
  half = x.shape[-1] // 2
  angles = distance[..., None] * 100.0 ** -(np.arange(half) / half)
  cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def reference(model, tokens, distance, key_scale=1.0):
  """Logits [B, T, V] of a Qwen2 model, by the distance of each pair."""
  w = {
    path.removeprefix("stack.blocks.0.0."): np.asarray(p.get_value(), float)
    for path, p in parameters(model).items()
  }
  spec, t = model.config.layers[0].attention, tokens.shape[1]
  groups, h = spec.heads // spec.kv_heads, spec.head_dim
  norm = lambda x, weight: (
    weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
  )
  distances = np.array(
    [[distance(i, min(i, j)) for j in range(t)] for i in range(t)]
  )
  hidden = w["embed.weight"][tokens]
  for n in range(len(model.config.layers)):
    x = norm(hidden, w["pre_attention.weight"][n])
    q, k, v = (
      np.einsum("btd,dnh->btnh", x, w[f"attention.{name}.weight"][n])
      + w[f"attention.{name}.bias"][n]
      for name in "qkv"
    )
    k, v = (np.repeat(y, groups, 2) for y in (k * key_scale, v))
    q = rotated(q[:, :, None], distances[None, :, :, None])
    scores = np.einsum("bijnh,bjnh->bnij", q, k) / np.sqrt(h)
    scores = np.where(np.tri(t, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bnij,bjnh->binh", p, v)
    hidden = hidden + np.einsum(
      "btnh,nhd->btd", out, w["attention.o.weight"][n]
    )
    x = norm(hidden, w["pre_feedforward.weight"][n])
    gate = x @ w["feedforward.gate.weight"][n]
    up = x @ w["feedforward.up.weight"][n]
    down = w["feedforward.down.weight"][n]
    hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ down
  return norm(hidden, w["norm.weight"]) @ w["head.weight"]


@functools.cache
def model_of(text=None):
  """A model that attends sharply, with folded positions or without."""
  config = CONFIG
  if text is not None:
    config = extended_config(CONFIG, context_extension(text))
  leaves, tree = jax.tree.flatten(rj.models.create(config, seed=3))
  keys = jax.random.split(jax.random.key(1), len(leaves))
  sharper = [
    x + 0.3 * jax.random.normal(key, x.shape, x.dtype)
    for key, x in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(tree, sharper)


def dual_scale(length):
  """Factor of the keys of a text of this length."""
  return 1 + 0.1 * np.log(np.maximum(length / 16, 1))


KINDS = {
  DUAL: (dual_chunk, dual_scale),
  EXTEND: (self_extend, np.ones_like),
}
EACH = pytest.mark.parametrize("text", KINDS, ids=["dual", "extend"])


def expected(text, tokens, prompt=None):
  """Logits [B, T, V]; tokens after a prompt have keys by their own length."""
  distance, scale = KINDS[text]
  prompt = tokens.shape[1] if prompt is None else prompt
  lengths = np.maximum(prompt, 1.0 + np.arange(tokens.shape[1]))
  scales = scale(lengths)[None, :, None, None]
  return reference(model_of(text), tokens, distance, scales)


def close(got, want, atol=2e-4):
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@EACH
def test_logits_are_those_of_the_paper(text):
  got = model_of(text)(TOKENS)
  close(got, expected(text, TOKENS))
  # Plain attention at these distances is something else.
  plain = reference(model_of(text), TOKENS, lambda i, j: i - j)
  assert np.abs(got - plain).max() > 0.1


@EACH
@pytest.mark.parametrize("length", [6, 8, 15])
def test_logits_at_the_borders_of_chunks(text, length):
  tokens = TOKENS[:, :length]
  close(model_of(text)(tokens), expected(text, tokens))
  if length == 6:
    close(model_of(text)(tokens), model_of()(tokens))


def test_chunks_without_a_local_part_and_without_a_scale():
  config = {
    **CONFIG,
    "max_position_embeddings": 64,
    "dual_chunk_attention_config": {"chunk_size": 12, "local_size": 0},
  }
  config = extended_config(config, context_extension("dual_chunk"))
  tree = jax.tree.structure(rj.models.create(config))
  model = jax.tree.unflatten(tree, jax.tree.leaves(model_of()))
  distance = functools.partial(dual_chunk, chunk_size=12, local_size=0)
  close(model(TOKENS), reference(model, TOKENS, distance))
  assert not any(rope.scaling.by_length for rope in model.config.ropes)


@EACH
@pytest.mark.parametrize(
  ("strategy", "layout"),
  [
    ("ring", rj.Striped()),
    pytest.param("ring", rj.Contiguous(), marks=LONG),
    pytest.param("gather", rj.Contiguous(), marks=LONG),
    pytest.param("ulysses", rj.Contiguous(), marks=LONG),
    pytest.param("bidirectional", rj.Contiguous(), marks=LONG),
  ],
  ids=str,
)
def test_sharded_sequences_compute_the_same(text, strategy, layout):
  mesh = rj.make_mesh((2,), ("seq",))
  attend = rj.models.ContextParallel(
    mesh=mesh, axis="seq", layout=layout, strategy=strategy
  )
  order = np.asarray(layout.permute(np.arange(40), 2, axis=0))
  got = model_of(text)(TOKENS[:, order], attend=attend)
  close(got, expected(text, TOKENS)[:, order])


def gradients(text, **options):
  """Gradients of a loss by a model's weights."""
  loss = lambda model: jnp.mean(model(TOKENS, **options) ** 2)
  return jax.tree.leaves(jax.grad(loss, allow_int=True)(model_of(text)))


@LONG
@EACH
def test_gradients_on_shards_are_those_of_one_device(text):
  mesh = rj.make_mesh((2,), ("seq",))
  attend = rj.models.ContextParallel(mesh=mesh, axis="seq")
  for a, b in zip(gradients(text), gradients(text, attend=attend), strict=True):
    assert np.isfinite(a).all() and np.abs(a).max() > 0
    close(b, a, 1e-3 * float(np.abs(a).max()) + 1e-6)


def check_answer(text, prompt, answer):
  """Each token of an answer is the most likely one of a whole pass."""
  tokens = np.append(prompt, answer)[None]
  logits = expected(text, tokens, len(prompt))[0]
  np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1), answer)


@EACH
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"prefill": "chunked", "chunk": 8},
    pytest.param({"cache_kind": "paged"}, marks=LONG),
    pytest.param({"speculate": "lookup"}, marks=LONG),
  ],
  ids=str,
)
def test_answers_of_unequal_rows_are_those_of_whole_passes(text, options):
  prompts = [TOKENS[0, :21], TOKENS[1, :9]]
  if "speculate" in options:
    prompts = [TOKENS[0, :21]]
  got = rj.infer.generate(model_of(text), prompts, max_new_tokens=12, **options)
  for prompt, answer in zip(prompts, got.tokens, strict=True):
    check_answer(text, prompt, answer)

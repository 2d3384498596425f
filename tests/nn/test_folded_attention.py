"""Dual chunk attention and Self-Extend, against a model written in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PromptError
from ringjax.infer import layerwise
from ringjax.models.hf.tensors import parameters
from ringjax.models.rope_scaling import context_extension, extended_config
from tests import checkpoints

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


@pytest.mark.one_case
@EACH
def test_logits_are_those_of_the_paper(text):
  got = model_of(text)(TOKENS)
  close(got, expected(text, TOKENS))
  # Plain attention at these distances is something else.
  plain = reference(model_of(text), TOKENS, lambda i, j: i - j)
  assert np.abs(got - plain).max() > 0.1


@LONG
@pytest.mark.long_cases(2)
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


@pytest.mark.long_cases(2)
@EACH
@pytest.mark.parametrize(
  ("strategy", "layout"),
  [
    pytest.param("ring", rj.Striped(), marks=LONG),
    pytest.param("chain", rj.Contiguous(), marks=LONG),
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
  order = np.asarray(layout.permute(np.arange(40), shards=2, axis=0))
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


@pytest.mark.long_cases(3)
@EACH
@pytest.mark.parametrize(
  "options",
  [
    pytest.param({}, marks=LONG),
    pytest.param({"prefill": "chunked", "chunk": 8}, marks=LONG),
    pytest.param({"cache_kind": "windowed"}, marks=LONG),
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


@LONG
@EACH
def test_a_second_turn_continues_the_first(text):
  session = rj.infer.Session(model_of(text), 64)
  model, say = model_of(text), {"max_new_tokens": 4, "cache": session}
  first = rj.infer.generate(model, TOKENS[:1, :19], **say).tokens
  second = rj.infer.generate(model, TOKENS[:1, 19:30], **say).tokens
  so_far = np.concatenate([TOKENS[0, :19], first[0], TOKENS[0, 19:30]])
  assert second.shape == (1, 4)
  if text == EXTEND:
    check_answer(text, so_far, second[0])


@LONG
@EACH
def test_answers_of_a_sharded_cache_are_those_of_whole_passes(text):
  mesh = rj.make_mesh((2,), ("seq",))
  model = rj.models.place(model_of(text), mesh)
  got = rj.infer.generate(model, TOKENS[:, :21], max_new_tokens=8, mesh=mesh)
  for prompt, answer in zip(TOKENS[:, :21], got.tokens, strict=True):
    check_answer(text, prompt, answer)


@LONG
@EACH
def test_answers_of_an_engine_are_those_of_whole_passes(text):
  prompts = [TOKENS[0, :21], TOKENS[1, :9]]
  with rj.serve.Engine(model_of(text), rows=2, capacity=128) as engine:
    handles = [
      engine.submit(rj.serve.Request(prompt=p.tolist(), max_new_tokens=6))
      for p in prompts
    ]
    for prompt, handle in zip(prompts, handles, strict=True):
      check_answer(text, prompt, np.asarray(handle.result().tokens))


@EACH
@pytest.mark.parametrize("kind", ["unrotated", "sinks:budget=16"])
def test_caches_that_score_or_rotate_keys_are_refused(text, kind):
  with pytest.raises(OptionError, match="folded positions.*dense, int8"):
    model_of(text).init_cache(1, 32, kind=kind)


@LONG
@EACH
def test_codes_of_keys_stay_close(text):
  model, prompt = model_of(text), TOKENS[:, :21]
  logits = {}
  for kind in ("dense", "int8"):
    _, cache = model(prompt, cache=model.init_cache(2, 32, kind=kind))
    logits[kind] = np.asarray(model(TOKENS[:, 21:22], cache=cache)[0])
  close(logits["int8"], logits["dense"], 0.2)
  assert np.abs(logits["int8"] - logits["dense"]).max() > 0


@LONG
@EACH
def test_trees_of_drafted_tokens_are_refused(text):
  model = model_of(text)
  _, cache = model(TOKENS[:, :8], cache=model.init_cache(2, 32))
  with pytest.raises(OptionError, match="a tree of drafted tokens"):
    model(TOKENS[:, 8:11], cache=cache, parents=np.array([-1, 0, 0], np.int32))


@LONG
def test_a_published_config_folds_by_its_own_sizes(tmp_path):
  config = {
    **CONFIG,
    "max_position_embeddings": 64,
    "dual_chunk_attention_config": {
      "chunk_size": 10,
      "local_size": 3,
      "original_max_position_embeddings": 16,
    },
  }
  plain = rj.models.create(config)
  with pytest.raises(PromptError, match="--rope_scaling=dual_chunk"):
    rj.infer.generate(plain, TOKENS[:1, :20], max_new_tokens=1)
  rj.models.save(plain, tmp_path / "plain")
  model = rj.models.load(tmp_path / "plain", rope_scaling="dual_chunk")
  assert plain.config.longest == 10 and model.config.longest == 64
  rj.models.save(model, tmp_path / "folded")
  again = rj.models.load(tmp_path / "folded")
  assert again.config == model.config
  np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
  with pytest.raises(ConfigError, match="made for dual chunk attention"):
    rj.models.load(tmp_path / "plain", rope_scaling="yarn:factor=2")
  with pytest.raises(ConfigError, match="folded already"):
    rj.models.load(tmp_path / "folded", rope_scaling="yarn:factor=2")


def test_sizes_that_are_not_passed_follow_from_the_context():
  config = {**CONFIG, "max_position_embeddings": 1024}
  folded = lambda text: rj.models.read_config(
    extended_config(config, context_extension(text))
  )[0]
  dual = folded("dual_chunk:factor=4")
  positions = dual.layers[0].attention.positions
  assert (positions.chunk_size, positions.local_size) == (768, 64)
  assert dual.longest == 4096
  extend = folded("self_extend:factor=4")
  positions = extend.layers[0].attention.positions
  # (4095 // 5) + 256 - 51 is the largest distance; 4 would exceed 1,023.
  assert (positions.window, positions.group) == (256, 6)
  farthest = 4095 // 6 + 256 - 256 // 6
  assert farthest < 1024 <= 4095 // 5 + 256 - 256 // 5


@pytest.mark.parametrize(
  ("text", "match"),
  [
    ("dual_chunk", "dual_chunk without a factor"),
    ("dual_chunk:factor=4,chunk_size=10,local_size=9", "local_size"),
    ("self_extend:factor=4,window=16", "a smaller window"),
    ("self_extend:factor=4,group=2,window=6", "a larger group or none"),
    ("self_extend:factor=4,window=0", "window"),
    ("self_extend", "without a factor"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(text, match):
  with pytest.raises((OptionError, ConfigError), match=match):
    extended_config(CONFIG, context_extension(text))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2", "bloom", "mistral"])
def test_layers_that_cannot_be_folded_are_refused(name):
  config = checkpoints.config(name)
  if name == "deepseek_v3":
    config["rope_parameters"] = {"rope_theta": 1e4}
  with pytest.raises((OptionError, ConfigError)):
    extended_config(config, context_extension("self_extend:factor=2"))


def test_windows_keep_their_layers_and_their_rotation():
  config = checkpoints.config("gemma3_text")
  config["rope_parameters"]["full_attention"] = {"rope_theta": 1e6}
  plain, _ = rj.models.read_config(config)
  folded, _ = rj.models.read_config(
    extended_config(config, context_extension("self_extend:factor=2"))
  )
  for old, new in zip(plain.layers, folded.layers, strict=True):
    assert (old == new) == (old.attention.reach is not None)


def test_contexts_that_are_encoded_apart_are_refused():
  with pytest.raises(OptionError, match="encoded apart.*folded positions"):
    rj.infer.contexts.ContextLibrary(model_of(EXTEND))


def test_layers_in_parts_are_refused():
  with pytest.raises(ConfigError, match="layer 0 is FoldedAttention"):
    layerwise.check_layers(model_of(DUAL).config)


def test_other_ways_to_run_a_model_are_refused():
  with pytest.raises(OptionError, match="FoldedAttention"):
    rj.infer.generate(
      model_of(DUAL), TOKENS[:1, :9], max_new_tokens=1,
      attention_fn=jax.nn.dot_product_attention,
    )  # fmt: skip

"""DeepSeek-V3.2: what its index chooses, on shards, in rows, out of a cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError
from ringjax.eval.entropy import attention_statistics
from ringjax.infer.contexts.combine import APE
from ringjax.nn import sharding_context
from ringjax.nn.attention_layers.key_index import KeyIndex
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.sparse import top_tokens
from ringjax.parallel.layout import Striped, Zigzag
from ringjax.serve import Engine, Request
from tests import checkpoints
from tests.helpers import make_mesh, refused

NAME = "deepseek_v32"
EXPECTED = checkpoints.expected(NAME)
# Of the fixture.
COUNT = checkpoints.config(NAME)["index_topk"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return checkpoints.write(NAME, tmp_path_factory.mktemp(NAME) / "model")


@pytest.fixture(scope="module")
def load(folder):
  @functools.cache
  def one(shards=1):
    mesh = make_mesh(shards, "auto") if shards > 1 else None
    return rj.models.load(folder, mesh=mesh, dtype=jnp.float32), mesh

  return one


def close(got, want, atol=5e-5):
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.long
def test_with_room_for_all_keys_it_is_v3(tmp_path):
  """And with less room it is not."""
  config = checkpoints.config(NAME)
  arrays = checkpoints.tensors(NAME)
  every = config | {"index_topk": 40}
  plain = {
    k: v
    for k, v in config.items()
    if not k.startswith("index_")
    and k not in ("layer_types", "mlp_layer_types", "mlp_bias")
  } | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
  kept = {k: x for k, x in arrays.items() if ".indexer." not in k}
  write = checkpoints.write_folder
  wide = rj.models.load(write(arrays, every, tmp_path / "wide"))
  v3 = rj.models.load(write(kept, plain, tmp_path / "v3"))
  tokens = jnp.asarray(EXPECTED.tokens)
  want = np.asarray(v3(tokens))
  close(wide(tokens), want, 1e-6)
  off = np.abs(want - EXPECTED.logits).max((0, 2))
  assert off[:COUNT].max() < 5e-5 and off[COUNT:].max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize(
  ("shards", "layout"),
  [(1, None), (4, Striped()),
   pytest.param(2, Zigzag(), marks=pytest.mark.slow)],
)  # fmt: skip
def test_some_queries_at_a_time(load, shards, layout, monkeypatch):
  """Contexts of which not all queries are projected to rows at once."""
  monkeypatch.setattr(sharding_context, "_ROW_QUERIES", 3000)
  monkeypatch.setattr(top_tokens, "_HEAD_SCORES", 6 * 40 * 2)
  model, mesh = load(shards)
  tokens, order = EXPECTED.tokens, np.arange(40)
  attend = ContextParallel()
  if mesh is not None:
    attend = ContextParallel(mesh=mesh, axis="seq", layout=layout)
    order = layout.padded_order(40, shards)
  logits = model(tokens[:, order], attend=attend)
  close(np.asarray(logits)[:, np.argsort(order)], EXPECTED.logits)


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.slow
def test_rows_of_other_lengths(load, shards):
  """One has fewer tokens than a query may read, one more, one grows so."""
  model, mesh = load(shards)
  prompts = [EXPECTED.prompt[0], EXPECTED.prompt[1][:5], EXPECTED.prompt[1][:2]]
  new = rj.infer.generate(model, prompts, max_new_tokens=8, mesh=mesh)
  np.testing.assert_array_equal(new[0], EXPECTED.greedy[0, :8])
  alone, _ = load()
  full = jax.jit(lambda m, x: jnp.argmax(m(x), -1))
  for prompt, row in zip(prompts[1:], new[1:], strict=True):
    # By one pass over all that was said, without a cache.
    said = np.concatenate([prompt, row])
    chosen = np.asarray(full(alone, said[None].astype(np.int32)))[0]
    np.testing.assert_array_equal(chosen[prompt.size - 1 : -1], row)


@pytest.mark.slow
def test_a_session_goes_on(load):
  model, mesh = load(4)
  session = rj.infer.Session(model, 64, batch=2, mesh=mesh)
  rj.infer.read_context(model, EXPECTED.prompt[:, :11], cache=session)
  new = rj.infer.generate(
    model, EXPECTED.prompt[:, 11:], max_new_tokens=12, cache=session
  )
  np.testing.assert_array_equal(new, EXPECTED.greedy[:, :12])


@pytest.mark.slow
def test_gradients_on_shards(load):
  """Those of one device; the index learns nothing from a choice."""
  tokens = jnp.asarray(EXPECTED.tokens)

  def gradient(shards):
    model, mesh = load(shards)
    attend = ContextParallel(mesh=mesh, axis=None if mesh is None else "seq")

    def loss(model):
      logits = jax.nn.log_softmax(model(tokens, attend=attend))
      labels = jnp.roll(tokens, -1, 1)[..., None]
      return -jnp.mean(jnp.take_along_axis(logits, labels, -1))

    found = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(model))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}

  one, four = gradient(1), gradient(4)
  assert one.keys() == four.keys()
  for name, want in one.items():
    close(four[name], want, 2e-5 * max(1.0, float(np.abs(want).max())))
    learns = "index" not in name and "correction" not in name
    assert bool(np.abs(want).max() > 1e-6) == learns, name


@pytest.mark.long
def test_what_is_refused(load):
  model, _ = load()
  tokens = np.asarray(EXPECTED.tokens)
  refused(
    OptionError,
    lambda: attention_statistics(model, tokens),
    "an index chooses",
  )
  found = attention_statistics(model, tokens[:, :COUNT])
  close(found.logits, EXPECTED.logits[:, :COUNT])
  contexts = [tokens[0, :12], tokens[1, :12]]
  session = rj.infer.context_session(
    model, contexts, APE(temperature=0.9, scale=0.9), capacity=32
  )
  refused(
    OptionError,
    lambda: model(tokens[:1, 20:26], cache=session.cache),
    "weighed by all of their keys",
  )
  config = checkpoints.config(NAME)
  for change, word in (
    ({"q_lora_rank": None}, "q_lora_rank"),
    ({"index_head_dim": 4}, "index_head_dim"),
    ({"index_topk": 0}, "index_topk"),
    ({"rope_interleave": False}, "rope_interleave"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
  ):
    refused(
      ConfigError,
      lambda change=change: rj.models.create(config | change, seed=0),
      word,
    )


@pytest.mark.slow
def test_positions_that_a_cache_rotates_later(load):
  """Keys of the index turn as those of the layer, wherever they are read."""
  model, _ = load()
  attend = CachedAttention()
  logits = {}
  for kind in ("dense", "unrotated"):
    cache = model.init_cache(2, 48, kind=kind)
    found, cache = model(EXPECTED.tokens[:, :32], cache=cache, attend=attend)
    more, _ = model(EXPECTED.tokens[:, 32:], cache=cache, attend=attend)
    logits[kind] = np.concatenate([found, more], 1)
  for found in logits.values():
    close(found, EXPECTED.logits)


@pytest.mark.parametrize(
  ("change", "key"),
  [
    ({"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
    ({"indexer_types": ["full", "other", "full"]}, "indexer_types"),
    ({"indexer_types": ["full"]}, "indexer_types"),
    ({"indexer_types": None, "index_topk_pattern": "SFF"}, "pattern"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ({"index_head_dim": 6}, "index_head_dim"),
  ],
)
def test_indexes_that_do_not_fit_are_refused(change, key):
  config = checkpoints.config("glm_moe_dsa")
  with pytest.raises(ConfigError, match=key):
    rj.models.read_config(config | change)


@pytest.mark.parametrize(
  "change",
  [
    {"indexer_types": None},
    {"indexer_types": None, "index_topk_pattern": "FFF"},
    {"indexer_types": None, "index_topk_freq": 0},
    # The first three layers have an index of their own.
    {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 4},
    {"n_routed_experts": None, "num_experts": 8},
  ],
)
def test_spellings_of_an_index_in_each_layer(change):
  config = checkpoints.config("glm_moe_dsa")
  assert rj.models.read_config(config | change) == rj.models.read_config(config)


SHARED = "glm_moe_dsa_shared"


@pytest.mark.parametrize(
  "change",
  [
    {"indexer_types": None, "index_topk_pattern": "FSFS"},
    {"indexer_types": None, "index_topk_pattern": ["full", "shared"] * 2},
    {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1},
  ],
)
def test_spellings_of_layers_that_share_an_index(change):
  config = checkpoints.config(SHARED)
  model = rj.models.read_config(config)[0]
  reads = [layer.attention.index.reads for layer in model.layers]
  assert reads == [False, True, False, True]
  assert rj.models.read_config(config | change)[0] == model


def test_a_layer_reads_what_the_last_index_before_it_handed_on():
  """To the bit, although weights are wider than the stream."""
  dtype = jnp.bfloat16
  index = KeyIndex(heads=3, dim=4, count=2, shared=True)
  size = (2, 5, index.handed)
  draw = lambda n, shape, dtype: jax.random.normal(
    jax.random.key(n), (2, 5, *shape), dtype
  )
  parts = (
    draw(0, (3, 4), dtype),
    draw(1, (3,), jnp.float32),
    draw(2, (4,), dtype),
  )
  place = jnp.arange(5)[None]
  tokens = Tokens(
    place, place, derived=True, segmented=False, ropes=(), length=5
  )
  writer = tokens.handing(jnp.zeros(size, dtype))
  written = index.exchange(parts, writer, dtype)
  reader = tokens.handing(writer.handed)
  read = dataclasses.replace(index, reads=True).exchange((), reader, dtype)
  for a, b, c in zip(written, read, parts, strict=True):
    np.testing.assert_array_equal(a, b)
    close(a, c, 0 if dtype == c.dtype else 0.02)
  np.testing.assert_array_equal(reader.handed, writer.handed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SHARED, "mistral_large4"])
@pytest.mark.parametrize("layout", [Striped(), Zigzag()])
def test_a_shared_choice_on_shards(layout, name, tmp_path):
  expected = checkpoints.expected(name)
  mesh = make_mesh(4, "auto")
  path = checkpoints.write(name, tmp_path / "model")
  model = rj.models.load(path, mesh=mesh, dtype=jnp.float32)
  order = layout.padded_order(40, 4)
  attend = ContextParallel(mesh=mesh, axis="seq", layout=layout)
  logits = model(expected.tokens[:, order], attend=attend)
  close(np.asarray(logits)[:, np.argsort(order)], expected.logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SHARED, "mistral_large4"])
def test_a_shared_choice_in_sessions_rows_and_an_engine(name, tmp_path):
  expected = checkpoints.expected(name)
  model = rj.models.load(checkpoints.write(name, tmp_path / "model"))
  session = rj.infer.Session(model, 64, batch=2)
  rj.infer.read_context(model, expected.prompt[:, :11], cache=session)
  new = rj.infer.generate(
    model, expected.prompt[:, 11:], max_new_tokens=12, cache=session
  )
  np.testing.assert_array_equal(new, expected.greedy[:, :12])
  prompts = [expected.prompt[0], expected.prompt[1][:5]]
  new = rj.infer.generate(model, prompts, max_new_tokens=8)
  np.testing.assert_array_equal(new[0], expected.greedy[0, :8])
  (alone,) = rj.infer.generate(model, prompts[1:], max_new_tokens=8)
  np.testing.assert_array_equal(new[1], alone)
  engine = Engine(model, rows=2, capacity=256, longest=64, page=16)
  answers = [
    engine.submit(Request(prompt=prompt, max_new_tokens=8))
    for prompt in expected.prompt
  ]
  for answer, want in zip(answers, expected.greedy, strict=True):
    np.testing.assert_array_equal(list(answer), want[:8])


@pytest.mark.long
def test_layers_that_share_an_index_are_not_split_into_stages(tmp_path):
  path = checkpoints.write(SHARED, tmp_path / "model")
  refused(
    OptionError,
    lambda: rj.models.load_layers(path, 0, 2),
    "share further weights or streams",
  )

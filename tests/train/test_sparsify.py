"""Dense models that are made sparse: what they compute, learn and refuse."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, InputTypeError, OptionError
from ringjax.eval.entropy import attention_statistics
from ringjax.models.contents import read_config
from ringjax.models.hf.tensors import parameters
from ringjax.models.weights.linear_maps import INDEX_PATH
from ringjax.nn.sharding_context import ContextParallel
from ringjax.parallel.layout import Striped
from ringjax.serve import Engine, Request
from ringjax.train import batch as batches
from ringjax.train import recipe
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.methods.lora import Lora
from ringjax.train.objective import Objective
from ringjax.train.sparsify import (
  sparse_config,
  sparse_kind,
  with_sparse_attention,
)
from tests import checkpoints
from tests.helpers import make_mesh, refused
from tests.train.test_recipe import text
from tests.train.test_step import CONFIG, documents

INDEX = "index:heads=2,dim=4,count=5"
BLOCKS = "moba:block=4,count=2"
NATIVE = "nsa:length=4,stride=2,block=4,count=3,initial=1,local=1,window=3"
KINDS = (INDEX, BLOCKS, NATIVE)
# Families whose indexes choose compressed keys, or blocks.
OTHER_INDEXES = ("deepseek_v4", "minimax_m3_vl", "qwen4_exp", "glm5_next")


@functools.cache
def dense():
  # Copies of weights would hide that a layer's are those of another.
  return rj.models.create(CONFIG | {"num_hidden_layers": 3}, seed=1)


@functools.cache
def sparse(kind):
  return with_sparse_attention(dense(), kind)


@functools.cache
def trained_native():
  """Native sparse attention with random gates and compressed keys."""
  model, rng = sparse(NATIVE), np.random.default_rng(3)

  def noisy(path, p):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if ".native." not in name:
      return p
    noise = 0.3 * rng.standard_normal(p.shape).astype(np.float32)
    return p + noise

  return jax.tree_util.tree_map_with_path(noisy, model)


def tokens(rows=2, length=21):
  return np.random.default_rng(0).integers(0, 48, (rows, length), np.int32)


def gradient(model, batch, attend=None, **options):
  """Objective and gradients, as NumPy arrays by path."""
  attend = attend or ContextParallel(mesh=None, axis=None)
  batch = batches.place(batch, attend)
  batch = jax.tree.map(lambda x: x[0], batch)

  def loss(model):
    sums = Objective(**options).sums(model, batch, attend)
    return sums.loss / sums.weight, sums.choice.statistics()

  grads, statistics = jax.jit(jax.grad(loss, has_aux=True))(model)
  arrays = {k: np.asarray(p.get_value()) for k, p in parameters(grads).items()}
  return arrays, jax.tree.map(float, statistics)


# ---------------------------------------------------------------------------
# A model in a few lines, with all pairs
# ---------------------------------------------------------------------------


@jax.numpy_rank_promotion("allow")
def reference(model, ids, labels, count, *, warm_up):
  """Mean loss of the labels plus that of the indexes, of whole rows."""
  length = ids.shape[1]
  causal = jnp.tril(jnp.ones((length, length), bool))
  detached = jax.lax.stop_gradient
  x, of_indexes = model.embed.weight[...][ids], 0.0
  rope = model.config.layers[0].attention.rope
  tables = rope.tables(jnp.arange(length)[None], length)
  rotate = lambda y: rope.rotate(y, tables)
  for n in range(len(model.config.layers)):
    block = model.stack.layer(0, 0, n)
    attention = block.attention
    h = block.pre_attention(x)
    q, k = rotate(attention.q(h)), rotate(attention.k(h))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, k.shape[3])
    s = jnp.einsum("btkgh,bskh->bkgts", q, k) * k.shape[3] ** -0.5
    s = jnp.where(causal, s, -jnp.inf)
    index = attention.index
    index_q, weights = index.queries(h, h)
    index_k = rotate(index.keys(h)[:, :, None])[:, :, 0]
    dots = jnp.einsum("btie,bse->btis", rotate(index_q), index_k)
    scores = jnp.einsum("btis,bti->bts", jnp.maximum(dots, 0), weights)
    scores = jnp.where(causal, scores, -jnp.inf)
    reads = causal[None]
    if not warm_up:
      best = jax.lax.top_k(detached(scores), count)[1]
      reads = causal & jnp.any(jax.nn.one_hot(best, length) > 0, 2)
      s = jnp.where(reads[:, None, None], s, -jnp.inf)
    p = jax.nn.softmax(s, -1)
    out = jnp.einsum("bkgts,bskh->btkgh", p, attention.v(h))
    x = x + attention.o(out.reshape(*x.shape[:2], -1, k.shape[3]))
    target = detached(jnp.mean(p, (1, 2)))
    log_index = jax.nn.log_softmax(jnp.where(reads, scores, -jnp.inf), -1)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - log_index
    divergence = jnp.where(target > 0, target * log_ratio, 0)
    of_indexes += jnp.mean(jnp.sum(divergence, -1))
    x = x + block.feedforward(block.pre_feedforward(x), ContextParallel())
  logits = jax.nn.log_softmax(model.logits(model.norm(x)), -1)
  nll = -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))
  return (detached(nll) if warm_up else nll) + of_indexes


@pytest.mark.parametrize(
  "warm_up", [pytest.param(True, marks=pytest.mark.long), False]
)
def test_gradients_are_those_of_all_pairs(warm_up):
  """Both losses, of the model and of its indexes, in both stages."""
  model, ids = sparse(INDEX), tokens(length=14)
  got, _ = gradient(model, batches.whole_rows(ids), index_warm_up=warm_up)
  form = lambda model: reference(
    model, ids[:, :-1], ids[:, 1:], count=5, warm_up=warm_up
  )
  want = {
    name: np.asarray(p.get_value())
    for name, p in parameters(jax.jit(jax.grad(form))(model)).items()
  }
  assert got.keys() == want.keys()
  for name, expected in want.items():
    np.testing.assert_allclose(
      got[name], expected, atol=1e-6, rtol=1e-5, err_msg=name
    )
    learns = ".index." in name or not warm_up
    assert bool(np.abs(expected).max() > 1e-6) == learns, name


@jax.numpy_rank_promotion("allow")
def native_output(attention, h, rotate):
  """Attention of a layer of native sparse attention, with all pairs."""
  sizes, native = attention.spec.sizes, attention.native
  length = h.shape[1]
  q, k, v = rotate(attention.q(h)), rotate(attention.k(h)), attention.v(h)
  q = q.reshape(*q.shape[:2], k.shape[2], -1, k.shape[3])
  at = jnp.arange(length)
  first = jnp.arange(0, length, sizes.stride)
  token = first[:, None] + jnp.arange(sizes.length)
  padding = [(0, 0), (0, sizes.length), (0, 0), (0, 0)]
  pool = lambda x, w: jnp.einsum(
    "bcnkh,nkh->bckh", jnp.pad(x, padding)[:, token], w[...]
  )

  def branch(keys, values, allowed):
    s = jnp.einsum("btkgh,bskh->bkgts", q, keys) * k.shape[3] ** -0.5
    sees = allowed.any(-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(allowed | ~sees, s, -jnp.inf), -1)
    p = jnp.where(sees, p, 0)
    return jnp.einsum("bkgts,bskh->btkgh", p, values), p

  keys, values = pool(k, native.keys), pool(v, native.values)
  of_windows, p = branch(keys, values, token[:, -1] <= at[:, None])
  number = jnp.arange(-(-length // sizes.block))
  inside = token[..., None] // sizes.block == number
  overlap = inside.sum(1) / sizes.stride
  scores = jax.lax.stop_gradient(p.sum(2) @ overlap)
  query_block = at[:, None] // sizes.block
  fixed = (number < sizes.initial) | (number > query_block - sizes.local)
  scores = jnp.where(fixed, jnp.inf, scores)
  scores = jnp.where(number <= query_block, scores, -jnp.inf)
  best, chosen = jax.lax.top_k(scores, min(sizes.count, number.size))
  reads = (jax.nn.one_hot(chosen, number.size) > 0) & (best > -jnp.inf)[
    ..., None
  ]
  reads = jnp.any(reads, -2)[..., at // sizes.block]
  causal = at <= at[:, None]
  of_blocks, _ = branch(k, v, (reads & causal)[:, :, None])
  in_window = causal & (at > at[:, None] - sizes.window)
  of_window, _ = branch(k, v, in_window)
  first_gates = jnp.asarray([0.1, 0.45, 0.45])
  gates = jax.nn.sigmoid(
    native.gates(h) + jnp.log(first_gates / (1 - first_gates))
  )
  branches = jnp.stack([of_windows, of_blocks, of_window], -1)
  gates = gates.reshape(*branches.shape[:4], 1, 3)
  out = jnp.sum(branches * gates, -1)
  return attention.o(out.reshape(*out.shape[:2], -1, out.shape[-1]))


def native_reference(model, ids, labels):
  """Mean loss of the labels, of whole rows."""
  x = model.embed.weight[...][ids]
  rope = model.config.layers[0].attention.rope
  tables = rope.tables(jnp.arange(ids.shape[1])[None], ids.shape[1])
  for n in range(len(model.config.layers)):
    block = model.stack.layer(0, 0, n)
    h = block.pre_attention(x)
    x = x + native_output(block.attention, h, lambda y: rope.rotate(y, tables))
    x = x + block.feedforward(block.pre_feedforward(x), ContextParallel())
  logits = jax.nn.log_softmax(model.logits(model.norm(x)), -1)
  return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))


@pytest.mark.long
def test_gradients_of_native_sparse_attention_are_those_of_all_pairs():
  """The gates and compressed keys of the model are trained already."""
  model, ids = trained_native(), tokens(length=18)
  got, statistics = gradient(model, batches.whole_rows(ids))
  form = lambda model: native_reference(model, ids[:, :-1], ids[:, 1:])
  want = {
    name: np.asarray(p.get_value())
    for name, p in parameters(jax.jit(jax.grad(form))(model)).items()
  }
  assert got.keys() == want.keys()
  for name, expected in want.items():
    np.testing.assert_allclose(
      got[name], expected, atol=1e-6, rtol=1e-5, err_msg=name
    )
    assert np.abs(expected).max() > 1e-6, name
  assert 0 < statistics.recall_worst <= statistics.recall <= 1


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_shards_give_the_gradients_of_one_device(kind):
  """Packed documents on stripes; recall is that of other queries."""
  rows = documents()
  want, on_device = gradient(sparse(kind), rows)
  mesh = make_mesh(4, "auto")
  attend = ContextParallel(mesh=mesh, axis="seq", layout=Striped())
  model = rj.models.place(sparse(kind), mesh)
  got, sharded = gradient(model, rows, attend)
  for name, expected in want.items():
    np.testing.assert_allclose(got[name], expected, atol=2e-6, err_msg=name)
  np.testing.assert_allclose(
    sharded.index_loss, on_device.index_loss, atol=1e-6
  )
  assert 0 < sharded.recall_worst <= sharded.recall <= 1


@pytest.mark.long
@pytest.mark.parametrize(
  "name",
  [
    "deepseek_v32",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("hy_v4", "mistral_large4", *OTHER_INDEXES)
    ),
  ],
)
def test_an_index_of_a_family_learns_beside_its_mixture(name, tmp_path):
  """Nothing else learns from its loss, of whatever units it chooses."""
  folder = checkpoints.write(name, tmp_path / "model")
  model = rj.models.load(folder, dtype="float32")
  rows = batches.whole_rows(checkpoints.expected(name).tokens[:, :18])
  got, statistics = gradient(model, rows)
  without, _ = gradient(model, rows, index_loss=0.0)
  assert statistics.index_loss > 0 and 0 < statistics.recall < 1
  for path, value in got.items():
    if INDEX_PATH in path:
      assert np.abs(value).max() > 1e-6 and not without[path].any(), path
    else:
      np.testing.assert_allclose(value, without[path], atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_INDEXES)
def test_an_index_of_a_family_learns_on_shards_as_on_a_device(name, tmp_path):
  """Packed documents on stripes; in a warm-up it alone learns."""
  model = rj.models.load(checkpoints.write(name, tmp_path), dtype="float32")
  mesh = make_mesh(4, "auto")
  attend = ContextParallel(mesh=mesh, axis="seq", layout=Striped())
  placed = rj.models.place(model, mesh)
  for warm_up in (False, True):
    options = {"index_warm_up": warm_up}
    want, on_device = gradient(model, documents(), **options)
    got, sharded = gradient(placed, documents(), attend, **options)
    for path, expected in want.items():
      np.testing.assert_allclose(got[path], expected, atol=2e-6, err_msg=path)
      learns = not warm_up or INDEX_PATH in path
      assert learns or not expected.any(), path
    np.testing.assert_allclose(
      sharded.index_loss, on_device.index_loss, atol=1e-6
    )
    assert 0 < sharded.recall_worst <= sharded.recall <= 1


# ---------------------------------------------------------------------------
# The same weights
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  "kind", ["index:heads=2,dim=4,count=21", "moba:block=4,count=6"]
)
def test_with_room_for_all_keys_it_is_dense(kind):
  model, ids = sparse(kind), tokens()
  np.testing.assert_array_equal(model(ids), dense()(ids))
  assert model.embed.weight.get_value() is dense().embed.weight.get_value()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_a_model_whose_last_layer_is_full(kind, tmp_path):
  model = with_sparse_attention(dense(), f"{kind},full_last=1")
  ids = tokens()
  kinds = [type(x.attention).__name__ for x in model.config.layers]
  assert kinds[2] == "Attention" and "Attention" not in kinds[:2]
  rj.models.save(model, tmp_path / "model")
  config = json.loads((tmp_path / "model" / "config.json").read_text())
  assert (
    config["sparse_attention"] == sparse_kind(f"{kind},full_last=1").entry()
  )
  loaded = rj.models.load(tmp_path / "model")
  np.testing.assert_array_equal(loaded(ids), model(ids))
  if kind == NATIVE:
    # Its three branches are never plain attention.
    return
  # Each layer has its own weights: with room for all keys it is dense again.
  all_keys = kind.replace("count=5", "count=21").replace("count=2", "count=6")
  reads_all = with_sparse_attention(dense(), f"{all_keys},full_last=1")
  np.testing.assert_allclose(reads_all(ids), dense()(ids), atol=1e-6)


# ---------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------


def greedy(model, prompt, count):
  """Likeliest tokens, by a pass over the whole text for each."""
  ids = [*map(int, prompt)]
  for _ in range(count):
    row = np.zeros((1, 32), np.int32)
    row[0, : len(ids)] = ids
    ids.append(int(jnp.argmax(model(row)[0, len(ids) - 1])))
  return ids[len(prompt) :]


@pytest.mark.parametrize(
  "kind", [INDEX, BLOCKS, pytest.param(NATIVE, marks=pytest.mark.long)]
)
def test_a_cache_gives_what_training_computes(kind):
  """In a chunk of a prompt and token by token."""
  model, ids = sparse(kind), tokens()
  cache = model.init_cache(2, 24)
  first, cache = model(ids[:, :13], cache=cache)
  parts = [first]
  for n in range(13, ids.shape[1]):
    logits, cache = model(ids[:, n : n + 1], cache=cache)
    parts.append(logits)
  np.testing.assert_allclose(
    np.concatenate(parts, 1), model(ids), atol=1e-5, rtol=0
  )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  "options",
  [
    {"cache_kind": "unrotated"},
    {"cache_kind": "windowed"},
    {"prefill": "chunked", "chunk": 4},
    {"speculate": "lookup"},
    {"rows_at_once": 1},
    {"mesh": {"seq": 2, "model": 2}},
    {"mesh": {"seq": 4}},
  ],
  ids=str,
)
def test_answers(kind, options):
  """Rows of unequal lengths, by all ways to compute them."""
  prompts = [tokens()[0, :13], tokens()[1, :5]]
  want = [greedy(sparse(kind), prompt, 8) for prompt in prompts]
  model, options = sparse(kind), dict(options)
  if "mesh" in options:
    sizes = options["mesh"]
    mesh = jax.make_mesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
      devices=jax.devices()[:4],
    )
    options["mesh"] = mesh
    model = rj.models.place(model, mesh)
  got = rj.infer.generate(model, prompts, max_new_tokens=8, **options)
  np.testing.assert_array_equal(got.tokens, want)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_and_an_engine(kind):
  """A second turn, and several requests whose prompts share a prefix."""
  model, ids = sparse(kind), tokens()
  want = greedy(model, ids[0, :17], 6)
  session = rj.infer.Session(model, 32, batch=1)
  rj.infer.read_context(model, ids[:1, :9], cache=session)
  answer = rj.infer.generate(
    model, ids[:1, 9:17], max_new_tokens=6, cache=session
  )
  np.testing.assert_array_equal(answer.tokens[0], want)
  prompts = [ids[0, :17], ids[0, :11], ids[1, :6]]
  with Engine(
    model, rows=2, capacity=64, longest=48, page=16, piece=16, pieces=1
  ) as engine:
    handles = [
      engine.submit(Request(prompt=prompt, max_new_tokens=6))
      for prompt in prompts
    ]
    engine.run()
    answers = [handle.result().tokens for handle in handles]
  np.testing.assert_array_equal(answers[0], want)
  for prompt, tokens_of in zip(prompts[1:], answers[1:], strict=True):
    np.testing.assert_array_equal(tokens_of, greedy(model, prompt, 6))


# ---------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------


def two_stages(**options):
  stage = recipe.Stage(steps=2, length=16, batch=2)
  return recipe.Recipe(
    stages=(dataclasses.replace(stage, index_warm_up=True), stage),
    optimizer=recipe.Optimizer(learning_rate=1e-2, weight_decay=0.1),
    loop_config=rj.train.recipe.loop.LoopConfig(log_every=1, save_every=1),
    **options,
  )


@pytest.mark.long
def test_an_index_without_a_loss_stays_as_it_is():
  """Weight decay does not move it, either."""
  fresh = lambda: with_sparse_attention(rj.models.create(CONFIG), INDEX, seed=3)
  weights = lambda model: {
    k: np.asarray(p.get_value()) for k, p in parameters(model).items()
  }
  before = weights(fresh())
  stages = (recipe.Stage(steps=2, length=16, batch=2),)
  how = dataclasses.replace(
    two_stages(objective=Objective(index_loss=0.0)), stages=stages
  )
  after = weights(recipe.train(how, fresh(), text()).model)
  for name, value in before.items():
    assert bool((after[name] != value).any()) == (".index." not in name), name


@pytest.mark.long
def test_only_the_index_learns_in_a_warm_up_and_a_run_resumes(tmp_path):
  """With the same losses and weights, whatever is recomputed."""
  fresh = lambda: with_sparse_attention(rj.models.create(CONFIG), INDEX, seed=3)
  reports = []
  train = functools.partial(
    recipe.train, report=lambda stage, report: reports.append(report)
  )
  first_weights = {
    k: np.asarray(p.get_value()) for k, p in parameters(fresh()).items()
  }
  warm = dataclasses.replace(two_stages(), stages=two_stages().stages[:1])
  warmed_up = parameters(train(warm, fresh(), text()).model)
  for name, value in first_weights.items():
    moved = bool((np.asarray(warmed_up[name].get_value()) != value).any())
    assert moved == (INDEX_PATH in name), name
  reports.clear()
  want = train(two_stages(remat="nothing"), fresh(), text())
  losses = [(x.loss, x.choice) for x in reports]
  assert len(losses) == 4

  class Killed(Exception):
    pass

  def kill(step):
    if step == 3:
      raise Killed

  reports.clear()
  plan = two_stages(remat="all")
  steps = tmp_path / "steps"
  with Checkpoints(steps) as saved, pytest.raises(Killed):
    train(plan, fresh(), text(), checkpoints=saved, on_step=kill)
  with Checkpoints(steps) as saved:
    got = train(plan, fresh(), text(), checkpoints=saved)
  resumed = [(x.loss, x.choice) for x in reports]
  np.testing.assert_allclose(
    jax.tree.leaves(resumed), jax.tree.leaves(losses), rtol=1e-5
  )
  for name, p in parameters(got.model).items():
    np.testing.assert_allclose(
      p.get_value(), parameters(want.model)[name].get_value(), atol=1e-5
    )


# ---------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------


def test_what_cannot_be_made_sparse():
  model = sparse(INDEX)
  refused(ConfigError, lambda: with_sparse_attention(model, BLOCKS), "already")
  refused(OptionError, lambda: sparse_kind("index:size=3"), "size=3")
  refused(OptionError, lambda: sparse_kind("moba:block=0"), "block")
  refused(
    OptionError,
    lambda: with_sparse_attention(dense(), "index:heads=2,dim=2,count=5"),
    "dim",
    "at least 4",
  )
  refused(
    ConfigError,
    lambda: with_sparse_attention(dense(), f"{INDEX},full_last=3"),
    "full_last",
    "at most 2",
  )
  windowed = CONFIG | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 8,
    "sparse_attention": sparse_kind(BLOCKS).entry(),
  }
  refused(ConfigError, lambda: read_config(windowed), "sees all keys")
  for family, kind in (
    ("longcat_flash", "Latent"),
    ("deepseek_v4", "CompressedAttention"),
  ):
    config = checkpoints.config(family)
    refused(
      ConfigError,
      lambda config=config: sparse_config(config, BLOCKS),
      f"layers of {kind}",
      "take another model",
    )
  wrong = CONFIG | {"sparse_attention": {"type": "index", "heads": 2}}
  refused(ConfigError, lambda: read_config(wrong), "dim")
  refused(
    ConfigError,
    lambda: read_config(CONFIG | {"sparse_attention": {"type": "else"}}),
    "index, moba",
  )
  assert read_config(CONFIG | {"sparse_attention": None})
  draft = rj.models.longspec.with_draft(
    rj.models.create(CONFIG), rj.models.longspec.LongSpecConfig(window=8)
  )
  refused(
    InputTypeError, lambda: with_sparse_attention(draft, INDEX), "a draft"
  )


@pytest.mark.parametrize("kind", KINDS)
def test_caches_and_contexts_that_are_refused(kind):
  model = sparse(kind)
  for cache in ("snapkv", "dense:device=16", "dense:first=4,recent=8", "nuq4"):
    refused(
      OptionError,
      lambda cache=cache: model.init_cache(1, 32, kind=cache),
      "choose keys",
    )
  refused(
    OptionError,
    lambda: model.init_cache(1, 32, placement="host"),
    "choose keys",
  )
  refused(
    OptionError,
    lambda: rj.infer.calibrate(model, tokens(length=8)),
    "choose keys",
  )
  if kind != BLOCKS:
    refused(
      OptionError,
      lambda: attention_statistics(model, tokens()[:, :4]),
      "sets of keys" if kind == INDEX else "add up several attentions",
    )
  refused(
    OptionError,
    lambda: rj.infer.ContextLibrary(model),
    "encoded apart",
  )
  refused(
    OptionError,
    lambda: rj.infer.generate(
      model, [[1, 2, 3]], max_new_tokens=1, prefill="sparse:xattention"
    ),
    {INDEX: "an index", BLOCKS: "mean keys", NATIVE: "compressed keys"}[kind],
  )


def test_recipes_that_are_refused():
  attend = ContextParallel(mesh=None, axis=None)
  check = lambda plan, model: recipe.check(plan, model, attend)
  refused(OptionError, lambda: check(two_stages(), sparse(BLOCKS)), "no index")
  refused(
    OptionError,
    lambda: check(two_stages(lora=Lora(rank=2)), sparse(INDEX)),
    "freezes the index",
  )
  refused(
    OptionError,
    lambda: check(two_stages(layout="documents"), sparse(INDEX)),
    "documents",
  )
  refused(
    OptionError,
    lambda: check(two_stages(strategy="gather"), sparse(INDEX)),
    "strategy",
  )
  stage = recipe.Stage(steps=1, length=16, batch=2, segments="separate")
  refused(
    OptionError,
    lambda: check(recipe.Recipe(stages=(stage,)), sparse(BLOCKS)),
    "separate",
  )
  refused(
    OptionError,
    lambda: Objective(index_loss=0.0, index_warm_up=True),
    "index_loss",
  )


def test_adapters_leave_the_index_as_it_is():
  """Its maps are named as those of attention are."""
  model = sparse(INDEX)
  paths = [path.rpartition(".attention.") for path in Lora().start(model)]
  assert sorted(name for _, _, name in paths) == ["k", "o", "q", "v"]
  refused(
    OptionError, lambda: Lora(targets=("weights",)).start(model), "weights"
  )

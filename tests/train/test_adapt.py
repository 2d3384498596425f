"""Adapters, and contexts that grow."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError
from ringjax.models import checkpoint, tiny
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train import step
from ringjax.train.extend import RopeScaling, extend_context, scaled_config
from ringjax.train.methods.lora import TARGETS, Lora, with_adapters
from tests import checkpoints
from tests.train.test_step import CONFIG, far

LONG = pytest.mark.long
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 17)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
  return checkpoint.create(CONFIG, seed=1)


# ---------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------


def filled(params, scale=0.1):
  """Adapters that do something."""
  draw = np.random.default_rng(2)
  return jax.tree.map(
    lambda x: jnp.asarray(scale * draw.standard_normal(x.shape), x.dtype),
    params,
  )


def test_new_adapters_change_nothing(model):
  lora = Lora(rank=2, targets=TARGETS)
  params = lora.start(model)
  # Seven maps, of which both layers share the arrays.
  assert len(params) == 7
  same = lora.model(params, model)(TOKENS)
  np.testing.assert_array_equal(same, model(TOKENS))


@pytest.mark.parametrize("targets", [("q",), ("o", "down"), TARGETS])
def test_adapters_add_their_product(model, targets):
  lora = Lora(rank=3, alpha=6.0, targets=targets)
  params = filled(lora.start(model))
  got = lora.model(params, model)
  weights = lambda m, part, name: np.asarray(
    getattr(getattr(m.stack.blocks[0][0], part), name).weight[...]
  )
  for part, names in (
    ("attention", ("q", "k", "v", "o")),
    ("feedforward", ("gate", "up", "down")),
  ):
    for name in names:
      old, new = weights(model, part, name), weights(got, part, name)
      if name not in targets:
        np.testing.assert_array_equal(new, old)
        continue
      ab = params[f"stack.blocks.0.0.{part}.{name}"]
      a, b = np.asarray(ab["a"]), np.asarray(ab["b"])
      inner = int(np.prod(a.shape[1:-1]))
      want = 2.0 * a.reshape(2, inner, 3) @ b.reshape(2, 3, -1)
      np.testing.assert_allclose(new - old, want.reshape(old.shape), atol=1e-5)


@pytest.mark.long
def test_only_adapters_are_trained(model):
  lora, attend = Lora(rank=4, targets=TARGETS), ContextParallel()
  rows = batches.place(batches.whole_rows(TOKENS), attend)
  optimizer = optax.adam(1e-2)
  run = step.make_step(optimizer, attend, step.Objective(), lora)
  state = step.start(optimizer, lora.start(model))
  before = jax.device_get(model)
  losses = []
  for _ in range(40):
    state, figures = run(state, model, rows)
    losses.append(float(figures.loss))
  assert losses[-1] < 0.8 * losses[0]
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, model)))
  merged = lora.merged(state.params, model)
  found = step.Objective().sums(
    merged, jax.tree.map(lambda x: x[0], rows), attend
  )
  mean = float(found.nll / found.weight)
  _, figures = run(state, model, rows)
  assert mean == pytest.approx(float(figures.loss), rel=1e-5)


@pytest.mark.long
def test_gradients_of_adapters(model):
  """Those of A and B follow from that of W = W0 + s A B."""
  lora, attend = Lora(rank=2, alpha=8.0, targets=("q",)), ContextParallel()
  params = filled(lora.start(model))
  rows = jax.tree.map(
    lambda x: x[0], batches.place(batches.whole_rows(TOKENS), attend)
  )
  loss = lambda m: step.Objective().sums(m, rows, attend).loss
  whole = jax.grad(loss)(lora.model(params, model))
  mine = jax.grad(lambda p: loss(lora.model(p, model)))(params)
  (path,) = params
  g = np.asarray(whole.stack.blocks[0][0].attention.q.weight[...])
  g = g.reshape(2, 16, 16)
  a = np.asarray(params[path]["a"])
  b = np.asarray(params[path]["b"]).reshape(2, 2, 16)
  want = {
    "a": 4.0 * g @ b.swapaxes(1, 2),
    "b": (4.0 * a.swapaxes(1, 2) @ g).reshape(params[path]["b"].shape),
  }
  assert far(mine[path], want) < 1e-4


def test_merged_models_are_saved(model, tmp_path):
  lora = Lora(rank=2)
  merged = lora.merged(filled(lora.start(model)), model)
  rj.models.save(merged, tmp_path / "merged")
  read = rj.models.load(tmp_path / "merged")
  np.testing.assert_array_equal(read(TOKENS), merged(TOKENS))


@pytest.mark.long
@pytest.mark.parametrize(
  "tied", [pytest.param(False, marks=pytest.mark.long), True]
)
def test_new_tokens_are_trained_beside_adapters(tied):
  known = checkpoint.create(CONFIG | {"tie_word_embeddings": tied}, seed=1)
  model = rj.models.with_more_tokens(known, 4)
  lora, attend = Lora(rank=2, new_tokens=4), ContextParallel()
  params = lora.start(model)
  np.testing.assert_array_equal(
    lora.model(params, model)(TOKENS), model(TOKENS)
  )
  tokens = np.concatenate([TOKENS, np.full((2, 4), 50, np.int32)], 1)
  rows = batches.place(batches.whole_rows(tokens), attend)
  optimizer = optax.adam(1e-2)
  run = step.make_step(optimizer, attend, step.Objective(), lora)
  state = step.start(optimizer, params)
  for _ in range(3):
    state, _ = run(state, model, rows)
  made = lora.merged(state.params, model)
  vocab = model.config.vocab
  pairs = [(made.embed.weight[...], model.embed.weight[...])]
  if not tied:
    pairs.append((made.head.weight[...].T, model.head.weight[...].T))
  for new, old in pairs:
    new, old = np.asarray(new), np.asarray(old)
    np.testing.assert_array_equal(new[: vocab - 4], old[: vocab - 4])
    assert np.any(new[vocab - 4 :] != old[vocab - 4 :])
  with pytest.raises(OptionError, match="new_tokens"):
    Lora(new_tokens=vocab).start(model)


def test_wrong_adapters(model):
  with pytest.raises(OptionError, match="some of down, gate, k, o, q, up, v"):
    Lora(targets=("q", "query")).start(model)
  with pytest.raises(OptionError, match="targets"):
    Lora(targets=())
  with pytest.raises(OptionError, match="rank"):
    Lora(rank=0)


@pytest.mark.parametrize(
  ("name", "arrays", "called"),
  [
    ("jamba", ("step", "low", "router"), ("q", "out")),
    pytest.param("deepseek_v3", ("kv", "router"), ("o",), marks=LONG),
    pytest.param("nemotron_h", ("into", "out_of"), ("step",), marks=LONG),
  ],
)
def test_maps_that_layers_take_as_arrays(name, arrays, called):
  """They are merged, and refused where a module would take their place."""
  model = checkpoint.abstract(checkpoints.config(name))
  placed = checkpoint.abstract(checkpoints.config(name))
  # Enough of a model whose layers are elsewhere to be refused.
  placed.stack.placed = ()
  for target in arrays:
    lora = Lora(rank=2, targets=(target,))
    params = lora.start(model)
    merged = jax.eval_shape(lora.model, params, model)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    for call in (
      lambda: with_adapters(model, [(lora, params)]),  # noqa: B023
      lambda: lora.start(placed),  # noqa: B023
      lambda: lora.model(params, placed),  # noqa: B023
    ):
      with pytest.raises(OptionError, match=f"targets: .*{target}"):
        call()
  lora = Lora(rank=2, targets=called)
  params = lora.start(model)
  tokens = np.ones((2, 5), np.int32)
  made = with_adapters(model, [(lora, params)])
  assert jax.eval_shape(made, tokens).shape == (2, 5, model.config.vocab)


# ---------------------------------------------------------------------------
# Contexts
# ---------------------------------------------------------------------------


def frequencies(model) -> np.ndarray:
  """Angles of position 1."""
  (rope,) = model.config.ropes
  cos, sin = rope.tables(jnp.ones((1, 1), jnp.int32), jnp.int32(1))[:2]
  return np.arctan2(np.ravel(sin), np.ravel(cos))[: rope.dims // 2]


SPELLINGS = {
  "old": CONFIG,
  "new": {
    **{k: v for k, v in CONFIG.items() if k != "rope_theta"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
  },
}


@pytest.mark.long
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
  ("method", "slowest"),
  [("linear", 1 / 8), ("ntk", 1 / 8), ("yarn", 1 / 8), ("theta", 0.1)],
)
def test_rotations_are_stretched(spelling, method, slowest):
  model = checkpoint.create(SPELLINGS[spelling], seed=1)
  theta = 1e4 * 10.0**2 if method == "theta" else None
  made = extend_context(
    model, RopeScaling(context=2048, method=method, theta=theta)
  )
  assert made.config.max_positions == made.config.longest == 2048
  old, new = frequencies(model), frequencies(made)
  if method == "theta":
    # Two frequencies: 1 and the square root of 1 / theta.
    assert new[-1] / old[-1] == pytest.approx(slowest, rel=1e-5)
  else:
    assert new[-1] / old[-1] == pytest.approx(slowest, rel=1e-4)
  fastest = 1 / 8 if method == "linear" else 1.0
  assert new[0] / old[0] == pytest.approx(fastest, rel=1e-4)
  pairs = zip(jax.tree.leaves(model), jax.tree.leaves(made), strict=True)
  assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
def test_stages_end_where_one_would(model, method):
  once = extend_context(model, RopeScaling(context=4096, method=method))
  half = extend_context(model, RopeScaling(context=1024, method=method))
  twice = extend_context(half, RopeScaling(context=4096, method=method))
  np.testing.assert_allclose(frequencies(twice), frequencies(once), rtol=1e-5)


def test_a_stretched_model_is_saved_and_read(model, tmp_path):
  made = extend_context(model, RopeScaling(context=2048, method="yarn"))
  rj.models.save(made, tmp_path / "long")
  read = rj.models.load(tmp_path / "long")
  assert read.config == made.config
  np.testing.assert_array_equal(read(TOKENS), made(TOKENS))
  assert np.abs(made(TOKENS) - model(TOKENS)).max() > 1e-4


def test_only_the_number_of_the_context(model):
  made = extend_context(model, RopeScaling(context=999))
  assert made.config.max_positions == 999
  np.testing.assert_array_equal(made(TOKENS), model(TOKENS))


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_a_number_that_is_more_than_a_number(name):
  """Rotations that follow from the context are not changed unasked."""
  config = checkpoints.config(name)
  with pytest.raises(ConfigError, match="scaling follows from that number"):
    scaled_config(config, RopeScaling(context=512))
  made = scaled_config(
    config, RopeScaling(context=512, method="theta", theta=1e4)
  )
  assert rj.models.read_config(made)[0].max_positions == 512


def test_a_linear_scaling_has_the_keys_that_transformers_reads():
  """It warns of others, and the original context follows from the factor."""
  config = checkpoints.config("llama2")
  before, _ = rj.models.read_config(config)
  made, factor = config, 1
  for factor in (2, 8):
    scaling = RopeScaling(
      context=factor * before.max_positions, method="linear"
    )
    made = scaled_config(made, scaling)
  entry = made.get("rope_parameters") or made["rope_scaling"]
  assert set(entry) <= {"rope_type", "factor", "rope_theta"}
  assert entry["factor"] == factor


@pytest.mark.parametrize("method", ["ntk", "linear", "yarn"])
@pytest.mark.parametrize("name", ["tiny", "cohere2", "llama4_text"])
def test_layers_without_rotations_have_nothing_to_stretch(name, method):
  """Those that see all have none, and those with a window keep theirs."""
  path = tiny.path() / "config.json"
  config = json.loads(path.read_text())
  if name != "tiny":
    config = checkpoints.config(name)
  before, _ = rj.models.read_config(config)
  context = 2 * before.max_positions
  with pytest.raises(ConfigError, match="nothing has to be stretched"):
    scaled_config(config, RopeScaling(context=context, method=method))
  after, _ = rj.models.read_config(
    scaled_config(config, RopeScaling(context=context))
  )
  assert (after.max_positions, after.layers) == (context, before.layers)


def test_chunks_of_the_old_context_do_not_bound_the_new_one():
  config = rj.models.PRESETS["qwen2.5-7b-1m"]
  before, _ = rj.models.read_config(config)
  made = scaled_config(config, RopeScaling(context=4 * before.max_positions))
  after, _ = rj.models.read_config(made)
  assert after.max_positions == 4 * before.max_positions
  assert "dual_chunk_attention_config" in config


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "llama3"])
def test_layers_with_a_window_keep_their_rotation(name):
  config = checkpoints.config(name)
  before, _ = rj.models.read_config(config)
  for method in ("theta", "ntk"):
    theta = 5e6 if method == "theta" else None
    made = scaled_config(
      config,
      RopeScaling(context=8 * before.max_positions, method=method, theta=theta),
    )
    after, _ = rj.models.read_config(json.loads(json.dumps(made)))
    for old, new in zip(before.layers, after.layers, strict=True):
      local = old.attention.reach is not None
      turns = bool(old.attention.ropes)
      same = old.attention.ropes == new.attention.ropes
      assert same == (local or not turns)


@pytest.mark.parametrize(
  ("made", "error", "words"),
  [
    (dict(context=2048, method="rope"), OptionError, "theta, ntk, linear"),
    (dict(context=2048, method="theta"), OptionError, "theta"),
    (dict(context=2048, theta=1e6), OptionError, "method='theta'"),
    (dict(context=0), OptionError, "context"),
    (dict(context=128, method="linear"), ConfigError, "at least the 256"),
  ],
)
def test_wrong_stretches(model, made, error, words):
  with pytest.raises(error, match=words):
    extend_context(model, RopeScaling(**made))


def test_another_scaling_is_not_mixed(model):
  once = extend_context(model, RopeScaling(context=1024, method="linear"))
  with pytest.raises(ConfigError, match="Linear scaling"):
    extend_context(once, RopeScaling(context=4096, method="yarn"))

"""A step's loss, gradients and updates, against the plain model's."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.errors import DataError, OptionError, ShapeError
from ringjax.models import checkpoint
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.train import batch as batches
from ringjax.train import remat, step
from ringjax.train.expert_balance import ExpertBalance, warn_unbalanced
from tests.helpers import refused

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 48,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "rope_theta": 10000.0,
}
BATCH, LENGTH = 4, 32


def documents(seed: int = 0) -> batches.Batch:
  """Rows of two documents each and a few tokens of padding."""
  draw = np.random.default_rng(seed)
  tokens = draw.integers(0, 48, (BATCH, LENGTH)).astype(np.int32)
  labels = np.roll(tokens, -1, 1)
  cut = draw.integers(8, 20, BATCH)[:, None]
  end = draw.integers(25, LENGTH + 1, BATCH)[:, None]
  at = np.arange(LENGTH)[None]
  segments = np.where(at < cut, 1, np.where(at < end, 2, 0)).astype(np.int32)
  positions = np.where(at < cut, at, at - cut).astype(np.int32)
  last = (at == cut - 1) | (at >= end - 1)
  weights = np.where(last, 0.0, draw.random((BATCH, LENGTH)) + 0.5)
  return batches.Batch(
    tokens, labels, weights.astype(np.float32), positions, segments
  )


def plain(model, rows, z_loss=0.0):
  """The mean loss, from the full logits of each document alone."""
  each = [
    np.flatnonzero(row == n) + i * LENGTH
    for i, row in enumerate(rows.segments)
    for n in (1, 2)
  ]
  # A row each, and zeros behind it, which no token before them sees.
  alone = lambda x: np.stack(
    [np.pad(x.ravel()[i], (0, LENGTH - i.size)) for i in each]
  )
  tokens, labels = alone(rows.tokens), alone(rows.labels)
  weights = alone(rows.weights)
  logits = model(tokens)
  lse = jax.nn.logsumexp(logits, -1)
  picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  losses = lse - picked + z_loss * lse**2
  return jnp.sum(losses * weights) / weights.sum()


def far(got, want) -> float:
  a, b = (jax.tree.leaves(jax.device_get(x)) for x in (got, want))
  return max(
    np.abs(x - y).max() / np.abs(y).max() for x, y in zip(a, b, strict=True)
  )


@pytest.fixture(scope="module")
def wanted():
  model = checkpoint.create(CONFIG, seed=1)
  rows = documents()
  loss, grads = jax.jit(
    jax.value_and_grad(lambda model: plain(model, rows, 0.01))
  )(model)
  return model, rows, float(loss), grads


def taken(model, rows, attend, accumulate=1, **more):
  """The figures and gradients of one step."""
  mesh = attend.mesh
  if mesh is not None:
    rules = more.pop("rules", None)
    model = checkpoint.place(model, mesh, rules)
  else:
    model = jax.tree.map(jnp.copy, model)
  optimizer = optax.sgd(1.0)
  before = jax.device_get(model)
  run = step.make_step(optimizer, attend, step.Objective(**more))
  state = step.start(optimizer, model, mesh)
  after, figures = run(state, None, batches.place(rows, attend, accumulate))
  grads = jax.tree.map(lambda a, b: a - b, before, jax.device_get(after.params))
  return figures, grads, after


WAYS = {
  "one device": (None, rj.Contiguous()),
  "contiguous": ({"seq": 4}, rj.Contiguous()),
  "striped": ({"seq": 8}, rj.Striped()),
  "zigzag": ({"seq": 4}, rj.Zigzag()),
  "all axes": ({"data": 2, "seq": 2, "model": 2}, rj.Striped()),
}


def spread_of(way: str, **more) -> ContextParallel:
  axes, layout = WAYS[way]
  if axes is None:
    return ContextParallel(**more)
  count = int(np.prod(list(axes.values())))
  mesh = rj.make_mesh(
    tuple(axes.values()), tuple(axes), devices=jax.devices()[:count]
  )
  return ContextParallel(
    mesh=mesh, axis="seq", layout=layout, strategy=Ring(), **more
  )


@pytest.mark.one_case
@pytest.mark.parametrize(
  "way",
  # What contiguous shards do, all axes do too, in stripes.
  [
    pytest.param(way, marks=pytest.mark.slow) if way == "contiguous" else way
    for way in WAYS
  ],
)
def test_loss_and_gradients_are_the_plain_model_s(wanted, way):
  model, rows, loss, grads = wanted
  more = {}
  if way == "all axes":
    more["rules"] = rj.models.Rules(embed=("data", "seq"))
  figures, got, _ = taken(model, rows, spread_of(way), z_loss=0.01, **more)
  assert float(figures.objective) == pytest.approx(loss, rel=1e-5)
  assert far(got, grads) < 1e-5
  want = float(plain(model, rows))
  assert float(figures.loss) == pytest.approx(want, rel=1e-5)
  assert float(figures.weight) == pytest.approx(rows.weights.sum(), rel=1e-6)
  norm = float(optax.tree.norm(grads))
  assert float(figures.gradient_norm) == pytest.approx(norm, rel=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["one device", "all axes"])
def test_micro_batches_add_up(wanted, way):
  model, rows, loss, grads = wanted
  figures, got, _ = taken(
    model, rows, spread_of(way), accumulate=2, z_loss=0.01
  )
  assert float(figures.objective) == pytest.approx(loss, rel=1e-5)
  assert far(got, grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in remat.POLICIES if n != "all"])
def test_what_is_computed_again_is_the_same(wanted, name):
  model, rows, _, grads = wanted
  attend = spread_of("striped", remat=remat.policy(name))
  _, got, _ = taken(model, rows, attend, z_loss=0.01)
  assert far(got, grads) < 1e-5


@pytest.mark.long
def test_a_bfloat16_step_keeps_float32_parameters(wanted):
  model, rows, loss, grads = wanted
  figures, got, after = taken(
    model, rows, spread_of("striped"), z_loss=0.01, dtype="bfloat16"
  )
  assert float(figures.objective) == pytest.approx(loss, rel=2e-2)
  for x in jax.tree.leaves(after.params):
    assert x.dtype == jnp.float32
  norm = lambda tree: float(optax.tree.norm(tree))
  apart = jax.tree.map(lambda a, b: a - b, got, jax.device_get(grads))
  assert norm(apart) < 0.05 * norm(grads)


def test_moments_lie_as_their_parameters(wanted):
  model, *_ = wanted
  attend = spread_of("all axes")
  model = checkpoint.place(model, attend.mesh, rj.models.Rules(embed="data"))
  state = step.start(optax.adamw(1e-3), model, attend.mesh)
  moments = state.optimizer[0].mu
  pairs = zip(jax.tree.leaves(moments), jax.tree.leaves(model), strict=True)
  sharded = 0
  for moment, param in pairs:
    assert moment.sharding == param.sharding
    sharded += not param.sharding.is_fully_replicated
  assert sharded > 3


def test_sums_of_rows_and_columns_lie_as_what_is_left_of_a_parameter():
  """Of matrices that are large enough Adafactor keeps no moment as large."""
  attend = spread_of("all axes")
  model = checkpoint.create(
    CONFIG | {"hidden_size": 128, "intermediate_size": 256},
    mesh=attend.mesh,
    rules=rj.models.Rules(embed="data"),
  )
  optimizer = optax.scale_by_factored_rms()
  form = step.form(optimizer, model, attend.mesh)
  state = step.start(optimizer, model, attend.mesh)
  up = model.stack.blocks[0][0].feedforward.up.weight
  assert up.get_value().shape == (2, 128, 256)
  found = {
    name: getattr(state.optimizer, name).stack.blocks[0][0].feedforward.up
    for name in ("v_row", "v_col")
  }
  specs = {x.weight.get_value().sharding.spec for x in found.values()}
  assert specs == {P(None, "data"), P(None, "model")}
  for x, y in zip(
    jax.tree.leaves(form.optimizer), jax.tree.leaves(state.optimizer),
    strict=True,
  ):  # fmt: skip
    assert x.shape == y.shape
    assert x.sharding.is_equivalent_to(y.sharding, y.ndim)


def test_a_step_that_is_not_finite_changes_nothing(wanted):
  model, rows, *_ = wanted
  attend = spread_of("one device")
  optimizer = optax.adamw(1e-2)
  run = step.make_step(optimizer, attend, step.Objective())
  state = step.start(optimizer, jax.tree.map(jnp.copy, model))
  good = batches.place(rows, attend)
  bad = batches.place(
    rows._replace(weights=np.full_like(rows.weights, np.inf)), attend
  )
  state, _ = run(state, None, good)
  before = jax.device_get((state.params, state.optimizer))
  for n in (1, 2):
    state, figures = run(state, None, bad)
    assert not float(figures.finite) and int(figures.skipped) == n
  same = jax.tree.map(
    np.array_equal, before, jax.device_get((state.params, state.optimizer))
  )
  assert all(jax.tree.leaves(same))
  assert int(state.step) == 3
  state, figures = run(state, None, good)
  assert float(figures.finite) and int(state.skipped) == 0
  assert far(state.params, before[0]) > 0


@pytest.mark.slow
def test_padding_alone_has_no_gradient(wanted):
  model, rows, *_ = wanted
  empty = rows._replace(weights=np.zeros_like(rows.weights))
  figures, got, _ = taken(model, empty, spread_of("striped"))
  assert float(figures.loss) == 0 and float(figures.finite)
  assert not any(np.any(x) for x in jax.tree.leaves(got))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
  "config",
  [
    pytest.param(
      CONFIG | {"tie_word_embeddings": True}, marks=pytest.mark.slow
    ),
    pytest.param(
      {
        **CONFIG,
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "num_key_value_heads": 4,
        "rotary_pct": 0.5,
        "use_parallel_residual": True,
        "layer_norm_eps": 1e-5,
      },
      marks=pytest.mark.slow,
    ),
    {
      **CONFIG,
      "architectures": ["Gemma2ForCausalLM"],
      "model_type": "gemma2",
      "head_dim": 4,
      "hidden_activation": "gelu_pytorch_tanh",
      "query_pre_attn_scalar": 4,
      "sliding_window": 8,
      "final_logit_softcapping": 30.0,
      "attn_logit_softcapping": 50.0,
      "rms_norm_eps": 1e-6,
    },
    pytest.param(
      {
        **CONFIG,
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
      },
      marks=pytest.mark.slow,
    ),
  ],
  ids=lambda config: config["model_type"],
)
def test_heads_of_all_kinds(config):
  """Tied, with windows and a soft cap, with a scale."""
  model = checkpoint.create(config, seed=2)
  rows = documents(5)
  loss, grads = jax.jit(jax.value_and_grad(lambda m: plain(m, rows)))(model)
  figures, got, _ = taken(model, rows, spread_of("striped"))
  assert float(figures.loss) == pytest.approx(float(loss), rel=1e-5)
  assert far(got, grads) < 2e-5


@pytest.mark.usefixtures("unchecked")
def test_rows_that_do_not_fit(wanted):
  _, rows, *_ = wanted
  with pytest.raises(ShapeError, match="a number that 3 divides"):
    batches.place(rows, spread_of("one device"), 3)
  short = jax.tree.map(lambda x: x[:, :30], rows)
  with pytest.raises(ShapeError, match="a length that 16 divides"):
    batches.place(short, spread_of("striped"))
  with pytest.raises(ShapeError, match="2 devices of the batch's axes"):
    batches.place(rows, spread_of("all axes"), 4)
  with pytest.raises(ShapeError, match="T \\+ 1"):
    batches.whole_rows([1, 2, 3])
  with pytest.raises(OptionError, match="all, attention, nothing, offload"):
    remat.policy("some")


@pytest.mark.slow
def test_whole_rows_need_no_coordinates(wanted):
  model, *_ = wanted
  draw = np.random.default_rng(3)
  tokens = draw.integers(0, 48, (BATCH, LENGTH + 1))
  rows = batches.whole_rows(tokens)
  logits = model(tokens[:, :-1].astype(np.int32))
  each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  figures, _, _ = taken(model, rows, spread_of("zigzag"))
  assert float(figures.loss) == pytest.approx(float(each.mean()), rel=1e-5)


@pytest.mark.long
def test_a_step_learns():
  """A text that repeats is soon known by heart."""
  model = checkpoint.create(CONFIG, seed=4)
  attend = spread_of("striped")
  model = checkpoint.place(model, attend.mesh)
  optimizer = optax.adamw(1e-2)
  run = step.make_step(optimizer, attend, step.Objective())
  state = step.start(optimizer, model, attend.mesh)
  tokens = np.tile(np.arange(11), 6)[None, : LENGTH + 1]
  batch = batches.place(batches.whole_rows(tokens), attend)
  losses = []
  for _ in range(30):
    state, figures = run(state, None, batch)
    losses.append(float(figures.loss))
  assert losses[0] > 2 and losses[-1] < 0.3


def test_labels_of_minus_100_weigh_nothing(wanted):
  model, rows, *_ = wanted
  last = np.arange(LENGTH) >= LENGTH - 3
  attend = ContextParallel()
  weightless = rows._replace(weights=np.where(last, 0, rows.weights))
  want, grads, _ = taken(model, weightless, attend)
  # With the weight that others have, too.
  for weights in (weightless.weights, rows.weights):
    ignored = np.where(last, -100, rows.labels).astype(np.int32)
    marked = rows._replace(labels=ignored, weights=weights)
    figures, mine, _ = taken(model, marked, attend)
    assert figures.finite == 1 and figures.wrong == 0
    assert figures.weight == want.weight
    assert figures.loss == want.loss
    assert far(mine, grads) == 0


def test_labels_outside_of_the_vocabulary_are_placed(wanted):
  model, rows, *_ = wanted
  vocab = model.config.vocab
  for wrong, known in ((-7, None), (vocab, vocab)):
    labels = rows.labels.copy()
    labels[1, 2] = wrong
    bad = rows._replace(labels=labels)
    refused(
      DataError,
      lambda bad=bad, known=known: batches.place(
        bad, ContextParallel(), vocab=known
      ),
      f"labels: got {wrong} at [1, 2]",
      "-100",
    )
  # Where nobody has told how many ids there are, the step counts them.
  figures, *_ = taken(model, bad, ContextParallel())
  assert figures.finite == 0 and figures.wrong == 1


@pytest.mark.long
def test_a_mixture_whose_config_asks_for_balance():
  """Without output_router_logits no loss is computed; a warning says so."""
  config = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
  }
  model = checkpoint.create({**config, "router_aux_loss_coef": 0.02})
  with pytest.warns(UserWarning, match="router_aux_loss_coef is 0.02"):
    taken(model, documents(), ContextParallel())
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for coefficient in (0.0, None):
      other = {**config, "router_aux_loss_coef": coefficient}
      model = jax.eval_shape(lambda c=other: checkpoint.create(c))
      warn_unbalanced(model, ExpertBalance())

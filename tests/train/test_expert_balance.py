"""Losses and biases that balance experts, against transformers and by hand."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax as rj
from ringjax import models
from ringjax.data import Documents
from ringjax.errors import OptionError
from ringjax.train import (
  Checkpoints,
  ExpertBalance,
  Lora,
  Mixture,
  Optimizer,
  Recipe,
  Stage,
  remat,
  step,
  train,
)
from ringjax.train import batch as batches
from ringjax.train.expert_balance import warn_unbalanced
from ringjax.train.loop import LoopConfig
from tests import checkpoints
from tests.helpers import mesh_of, refused

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures/expert_balance.json"
# As in the program that made the fixture.
COEFFICIENT, LENGTHS, WIDTH = 0.5, (24, 17, 9), 24
ALL = ExpertBalance(
  loss=0.1, layer_loss=0.1, sequence_loss=0.1, z_loss=0.01, bias_rate=0.01
)
# Mesh and mesh axes of the experts.
MESHES = {
  "seq": (dict(seq=4), None),
  "data": (dict(data=2, seq=2), None),
  "expert": (dict(seq=2, expert=2), "expert"),
  "all axes": (dict(data=2, seq=2, expert=2), ("expert", "seq")),
}


def padded() -> batches.Batch:
  tokens = np.random.default_rng(0).integers(3, 60, (len(LENGTHS), WIDTH))
  mask = np.arange(WIDTH)[None] < np.asarray(LENGTHS)[:, None]
  tokens = np.where(mask, tokens, 0).astype(np.int32)
  labels = np.where(mask, tokens, -100).astype(np.int32)
  labels = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], 1)
  positions = np.broadcast_to(np.arange(WIDTH), tokens.shape)
  return batches.Batch(
    tokens,
    labels,
    np.ones(tokens.shape, np.float32),
    positions.astype(np.int32),
    mask.astype(np.int32),
  )


def packed(rows: int = 4, length: int = 32) -> batches.Batch:
  """Rows of two documents each and some padding."""
  draw = np.random.default_rng(0)
  tokens = draw.integers(3, 60, (rows, length)).astype(np.int32)
  at = np.arange(length)[None]
  cut = draw.integers(8, 20, rows)[:, None]
  end = draw.integers(24, length, rows)[:, None]
  segments = np.where(at < cut, 1, np.where(at < end, 2, 0))
  positions = np.where(at < cut, at, at - cut)
  weights = (segments > 0).astype(np.float32)
  return batches.Batch(
    tokens,
    np.roll(tokens, -1, 1),
    weights,
    positions.astype(np.int32),
    segments.astype(np.int32),
  )


@functools.cache
def mixture(name: str = "deepseek_v3", layers: int = 2, **entries):
  content = checkpoints.config(name)
  content |= {"num_hidden_layers": layers, **entries}
  if name == "deepseek_v3":
    content |= {"n_routed_experts": 8, "first_k_dense_replace": 0}
  return models.create(content, seed=1)


def stepped(
  model, rows, balance, *, mesh=None, rules=None, accumulate=1, **more
):
  """Metrics, gradients and the new model of one step of plain descent."""
  options = {} if mesh is None else dict(mesh=mesh, axis="seq", **more)
  attend = models.ContextParallel(remat=remat.policy("nothing"), **options)
  model = jax.tree.map(jnp.copy, model)
  if mesh is not None:
    model = models.place(model, mesh, rules)
  before = jax.device_get(model)
  objective = step.Objective(expert_balance=balance)
  run = step.make_step(optax.sgd(1.0), attend, objective)
  state = step.start(optax.sgd(1.0), model, mesh)
  state, metrics = run(state, None, batches.place(rows, attend, accumulate))
  after = jax.device_get(state.params)
  return metrics, jax.tree.map(lambda a, b: a - b, before, after), after


def routers(model) -> list[np.ndarray]:
  """Weights [D, E] of the routers, layer by layer."""
  return [
    weight
    for run in model.stack.blocks
    for block in run
    if hasattr(block.feedforward, "router")
    for weight in np.asarray(block.feedforward.router.weight.get_value())
  ]


def close(got, want, tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    scale = max(float(np.abs(b).max()), 1e-3)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.long_cases(3)
@pytest.mark.parametrize(
  "name",
  [
    "mixtral",
    *(
      pytest.param(name, marks=pytest.mark.long)
      for name in ("qwen3_moe", "olmoe", "gpt_oss")
    ),
  ],
)
def test_loss_and_gradients_are_those_of_transformers(name, tmp_path):
  """Loss and gradients without padding, pooled over layers, for k experts."""
  want = json.loads(FIXTURE.read_text())[name]
  model = models.load(checkpoints.write(name, tmp_path / name))
  balance = ExpertBalance(loss=COEFFICIENT)
  metrics, grads, _ = stepped(model, padded(), balance)
  assert float(metrics.objective) == pytest.approx(want["objective"], abs=2e-6)
  added = float(metrics.objective - metrics.loss)
  assert added == pytest.approx(COEFFICIENT * want["balance"], abs=2e-6)
  for got, flat in zip(routers(grads), want["routers"], strict=True):
    np.testing.assert_allclose(got.T.ravel(), flat, rtol=0, atol=2e-6)
  assert float(metrics.gradient_norm) == pytest.approx(want["norm"], rel=1e-5)


@functools.cache
def one_device(accumulate=1):
  return stepped(mixture(), packed(), ALL, accumulate=accumulate)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_has_the_loss_of_one_device(name, accumulate):
  sizes, over = MESHES[name]
  metrics, grads, _ = stepped(
    mixture(),
    packed(),
    ALL,
    mesh=mesh_of(**sizes),
    rules=models.Rules(experts=over),
    layout=rj.Striped(),
    accumulate=accumulate,
  )
  want, want_grads, _ = one_device(accumulate)
  assert float(metrics.objective) == pytest.approx(
    float(want.objective), rel=1e-6
  )
  close(metrics.experts, want.experts, 1e-6)
  close(grads, want_grads, 1e-5)


def routing_of(model, rows):
  """Logits, offsets and choices of each layer's router, in NumPy."""
  seen = []
  spec = model.config.layers[0].feedforward
  router = type(spec.router)
  call = router.__call__

  def spy(self, logits, correction, k):
    weights, chosen = call(self, logits, correction, k)
    jax.debug.callback(lambda *x: seen.append(x), logits, correction, chosen)
    return weights, chosen

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(router, "__call__", spy)
    model(rows.tokens, positions=rows.positions, segment_ids=rows.segments)
    jax.effects_barrier()
  return [tuple(np.asarray(x, np.float64) for x in y) for y in seen]


def sums_of(model, rows, balance):
  objective = step.Objective(expert_balance=balance)
  attend = models.ContextParallel()
  return jax.jit(lambda model, rows: objective.sums(model, rows, attend))(
    model, rows
  )


@pytest.mark.long
def test_each_loss_is_its_formula():
  """A layer of grouped experts with an offset, which the losses ignore."""
  model = mixture(layers=1)
  rng = np.random.default_rng(0)
  bias = model.stack.blocks[0][0].feedforward.correction
  bias.set_value(jnp.asarray(rng.normal(size=bias.get_value().shape) * 0.1))
  rows = packed()
  ((logits, _, chosen),) = routing_of(model, rows)
  k, experts = chosen.shape[-1], logits.shape[-1]
  logits = logits.reshape(*rows.tokens.shape, experts)
  real = rows.segments > 0
  scores = 1 / (1 + np.exp(-logits))
  likelihoods = scores / scores.sum(-1, keepdims=True)
  best = np.argsort(-scores, -1)[..., :k]
  is_best = (best[..., None] == np.arange(experts)).any(-2)
  f, p = is_best[real].mean(0), likelihoods[real].mean(0)
  by_row = [
    (is_best[i, on].mean(0) * likelihoods[i, on].mean(0)).sum()
    for i, on in enumerate(real)
  ]
  lse = np.log(np.exp(logits).sum(-1))
  want = {
    "loss": experts * (f * p).sum(),
    "layer_loss": experts / k * (f * p).sum(),
    "sequence_loss": experts / k * np.mean(by_row),
    "z_loss": (lse[real] ** 2).mean(),
  }
  for name, value in want.items():
    sums = sums_of(model, rows, ExpertBalance(**{name: 1.0}))
    added = float((sums.loss - sums.nll) / sums.weight)
    assert added == pytest.approx(value, rel=1e-5), name
  loads = (chosen.reshape(*rows.tokens.shape, k)[real]).astype(int)
  load = np.bincount(loads.ravel(), minlength=experts)
  np.testing.assert_array_equal(np.asarray(sums.routing.load[0])[0], load)
  statistics = sums.routing.statistics()
  peak = load.max() / load.mean()
  assert float(statistics.load_worst) == pytest.approx(peak, rel=1e-6)
  entropy = -(p * np.log(p)).sum()
  assert float(statistics.entropy_mean) == pytest.approx(entropy, rel=1e-5)
  assert float(statistics.dropped) == 0


@pytest.mark.long
def test_a_bias_moves_by_the_rate_towards_the_mean_load():
  """The loads are those of all micro-batches; an expert at the mean stays."""
  model = mixture()
  before = model.stack.blocks[0][0].feedforward.correction.get_value()
  moved = []
  for accumulate in (1, 2):
    balance = ExpertBalance(bias_rate=0.25)
    _, _, after = stepped(model, packed(), balance, accumulate=accumulate)
    new = after.stack.blocks[0][0].feedforward.correction.get_value()
    moved.append(new - np.asarray(before))
  sums = sums_of(model, packed(), ExpertBalance())
  load = np.asarray(sums.routing.load[0])
  want = 0.25 * np.sign(load.mean(-1, keepdims=True) - load)
  assert (want != 0).any()
  for change in moved:
    np.testing.assert_allclose(change, want, rtol=0, atol=1e-7)


def text() -> Mixture:
  draw = np.random.default_rng(0)
  return Mixture(
    [Documents([draw.integers(3, 60, n) for n in draw.integers(5, 40, 60)])]
  )


@pytest.mark.slow
def test_a_run_that_stops_resumes_on_its_curve(tmp_path):
  """Biases are parameters, and losses and statistics keep their values."""

  def run(steps, folder=None):
    reports = {}
    with contextlib.ExitStack() as stack:
      saved = folder and stack.enter_context(Checkpoints(folder))
      recipe = Recipe(
        stages=(Stage(steps=steps, length=16, batch=4, accumulate=2),),
        optimizer=Optimizer(schedule="constant"),
        objective=step.Objective(expert_balance=ALL),
        loop_config=LoopConfig(log_every=1),
      )
      train(
        recipe,
        jax.tree.map(jnp.copy, mixture()),
        text(),
        checkpoints=saved,
        report=lambda stage, x: reports.update(
          {x.step: (x.objective, *x.experts)}
        ),
      )
    return reports

  whole = run(4)
  parts = run(2, tmp_path) | run(4, tmp_path)
  assert sorted(whole) == [1, 2, 3, 4]
  assert parts == whole


@pytest.mark.long
def test_biases_even_the_loads():
  """Without any loss; the other parameters stay as they are."""
  model = jax.tree.map(jnp.copy, mixture())
  optimizer = optax.sgd(0.0)
  objective = step.Objective(expert_balance=ExpertBalance(bias_rate=0.02))
  attend = models.ContextParallel()
  run = step.make_step(optimizer, attend, objective)
  state, batch = step.start(optimizer, model), batches.place(packed(), attend)
  peaks = []
  for _ in range(30):
    state, metrics = run(state, None, batch)
    peaks.append(float(metrics.experts.load_worst))
  assert np.mean(peaks[-5:]) < 0.9 * peaks[0], peaks


def test_options_that_a_model_has_no_router_for_are_refused():
  llama = models.abstract(checkpoints.config("llama3"))
  for name in ("loss", "layer_loss", "sequence_loss", "z_loss", "bias_rate"):
    options = ExpertBalance(**{name: 0.1})
    refused(
      OptionError,
      lambda options=options: options.of_model(llama),
      f"expert_balance.{name}",
      "llama",
    )
  mixtral = models.abstract(checkpoints.config("mixtral"))
  bias = ExpertBalance(bias_rate=0.1)
  refused(OptionError, lambda: bias.of_model(mixtral), "bias_rate", "mixtral")
  stages = (Stage(steps=1, length=8, batch=1),)
  objective = step.Objective(expert_balance=bias)
  refused(
    OptionError,
    lambda: Recipe(stages=stages, objective=objective, lora=Lora(rank=2)),
    "bias_rate",
    "Lora",
  )
  refused(
    OptionError,
    lambda: Recipe(stages=stages, objective=objective, cepe=True),
    "bias_rate",
  )
  refused(OptionError, lambda: ExpertBalance(z_loss=-1.0), "z_loss")


@pytest.mark.parametrize(
  ("entries", "loss"),
  [
    (dict(router_aux_loss_coef=0.02, output_router_logits=True), 0.02),
    (dict(router_aux_loss_coef=0.02, output_router_logits=False), 0),
    (dict(router_aux_loss_coef=0.02, output_router_logits=None), 0),
    (dict(router_aux_loss_coef=0.02), 0),
    (dict(router_aux_loss_coef=None, output_router_logits=True), 0),
    (dict(router_aux_loss_coef=0.0, output_router_logits=True), 0),
    (dict(output_router_logits=True), 0),
  ],
)
def test_a_config_gives_the_factor_that_transformers_would_use(entries, loss):
  """A warning names a factor of the config that is not used."""
  content = checkpoints.config("mixtral")
  for key in ("router_aux_loss_coef", "output_router_logits"):
    content.pop(key, None)
  model = models.abstract(content | entries)
  assert ExpertBalance().of_model(model).loss == loss
  assert ExpertBalance(loss=0.5).of_model(model).loss == 0.5
  assert ExpertBalance(loss=0.0).of_model(model).loss == 0
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    warn_unbalanced(model, ExpertBalance())
    warn_unbalanced(model, ExpertBalance(loss=0.0))
    warn_unbalanced(model, ExpertBalance(layer_loss=0.1))
  unused = bool(entries.get("router_aux_loss_coef")) and not loss
  assert len(caught) == unused
  assert all("ExpertBalance(loss=0.02)" in str(w.message) for w in caught)

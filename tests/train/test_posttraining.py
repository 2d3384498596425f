"""Losses of pairs: the papers' formulas, any mesh, runs that resume."""

from __future__ import annotations

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.data.batches.packing import BestFit, Cut, fill
from ringjax.data.chats.chat_documents import ChatEncoding, PairDocuments
from ringjax.data.chats.chat_lines import read_pairs
from ringjax.errors import (
  CheckpointMismatchError,
  NotFiniteError,
  OptionError,
)
from ringjax.models import checkpoint
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train import step
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.loop import LoopConfig
from ringjax.train.posttraining.posttraining_loss import PosttrainingLoss
from ringjax.train.posttraining.preferences import LOSSES, Dpo, Ipo, Orpo
from ringjax.train.posttraining.reference_logprobs import (
  ReferenceLogprobs,
  fill_table,
)
from tests.helpers import refused

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 262,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "rope_theta": 10000.0,
  "bos_token_id": 256,
  "eos_token_id": 257,
}
LENGTH = 64
ANSWERS = (
  ("one", " is 1", " is not two"),
  ("b", "cd", "c"),
  ("what", " yes and more", "?"),
  ("p", "q", "rstu"),
  ("xyz", "uvw", "u"),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> PairDocuments:
  path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
  names = ("prompt", "chosen", "rejected")
  path.write_text(
    "\n".join(json.dumps(dict(zip(names, x, strict=True))) for x in ANSWERS)
  )
  encoding = ChatEncoding(tokenizer=Bytes(chat_template=None), length=LENGTH)
  return PairDocuments(read_pairs([path]), encoding)


def packed(pairs: PairDocuments, rows: int = 4) -> batches.PackedBatch:
  """All pairs in rows, some of them of padding alone."""
  plan = BestFit().plan(pairs.lengths, LENGTH)
  assert 1 < len(plan) < len(pairs)
  pieces = [*plan] + [[]] * (rows - len(plan))
  return fill(pieces, LENGTH, pairs.read)


def log_sigmoid(x):
  return -np.logaddexp(0.0, -x)


def expected(loss, logprobs, reference, weights):
  """Losses of pairs by the papers, float64; arguments are [pairs][2] arrays."""
  values = []
  for (p, q), (p0, q0), (w, v) in zip(
    logprobs, reference, weights, strict=True
  ):
    p, q, p0, q0 = (
      np.sum(x.astype(np.float64) * m)
      for x, m in ((p, w), (q, v), (p0, w), (q0, v))
    )
    delta = (p - p0) - (q - q0)
    if isinstance(loss, Dpo):
      right = log_sigmoid(loss.beta * delta)
      wrong = log_sigmoid(-loss.beta * delta)
      e = loss.label_smoothing
      if loss.robust:
        values.append((-(1 - e) * right + e * wrong) / (1 - 2 * e))
      else:
        values.append(-(1 - e) * right - e * wrong)
    elif isinstance(loss, Ipo):
      delta = (p - p0) / w.sum() - (q - q0) / v.sum()
      values.append((delta - 1 / (2 * loss.beta)) ** 2)
    else:
      odds = lambda x: np.exp(x) / (1 - np.exp(x))
      a, b = p / w.sum(), q / v.sum()
      ratio = np.log(odds(a) / odds(b))
      values.append(-a - loss.beta * log_sigmoid(ratio))
  return np.array(values)


def by_pair(rows, values):
  """[pairs][2] arrays of a [B, T] array."""
  answers = []
  for row, segments in enumerate(rows.segments):
    for segment in range(1, segments.max() + 1):
      answers.append(values[row, segments == segment])
  return [*zip(answers[::2], answers[1::2], strict=True)]


LOSS_VALUES = {
  "dpo": Dpo(beta=0.3),
  "smoothed": Dpo(beta=0.3, label_smoothing=0.1),
  "robust": Dpo(beta=0.3, label_smoothing=0.1, robust=True),
  "ipo": Ipo(beta=0.4),
  "orpo": Orpo(beta=0.5),
}


@pytest.mark.parametrize("name", LOSS_VALUES)
def test_sums_are_those_of_the_papers(pairs, name):
  loss = LOSS_VALUES[name]
  assert isinstance(loss, PosttrainingLoss)
  rows = packed(pairs)
  draw = np.random.default_rng(0)
  logprobs, reference = -draw.exponential(1.5, (2, *rows.tokens.shape))
  counted = rows.weights != 0
  logprobs = np.where(counted, logprobs, 0).astype(np.float32)
  reference = np.where(counted, reference, 0).astype(np.float32)
  batch = batches.Batch(*rows, inputs={"reference": jnp.asarray(reference)})
  terms = loss.terms(jnp.asarray(logprobs), batch)
  want = expected(
    loss, *(by_pair(rows, x) for x in (logprobs, reference, rows.weights))
  )
  assert float(terms.weight) == len(want) == len(pairs)
  assert float(terms.loss) == pytest.approx(want.sum(), rel=1e-6)
  means = {k: float(m.total / m.count) for k, m in terms.metrics.items()}
  assert means["reward_margin"] == pytest.approx(
    means["reward_chosen"] - means["reward_rejected"], rel=1e-5
  )
  assert 0 <= means["reward_accuracy"] <= 1
  # A gradient of padding and of the prompts' tokens is 0, not NaN.
  gradient = jax.grad(lambda x: loss.terms(x, batch).loss)(
    jnp.asarray(logprobs)
  )
  gradient = np.asarray(gradient)
  assert np.isfinite(gradient).all()
  assert not gradient[~counted].any()
  assert gradient[counted].all()


def spread(shards: int, layout) -> ContextParallel:
  if shards == 1:
    return ContextParallel()
  mesh = rj.make_mesh((shards,), ("seq",), devices=jax.devices()[:shards])
  return ContextParallel(mesh=mesh, axis="seq", layout=layout, strategy="ring")


def gradients(model, loss, rows, attend, accumulate=1):
  """Metrics and gradients of one step."""
  optimizer = optax.sgd(1.0)
  params = (
    checkpoint.place(model, attend.mesh)
    if attend.mesh
    else jax.tree.map(jnp.copy, model)
  )
  start_params = jax.device_get(params)
  run = step.make_step(optimizer, attend, step.Objective(posttraining=loss))
  state = step.start(optimizer, params, attend.mesh)
  end, metrics = run(state, None, batches.place(rows, attend, accumulate))
  grads = jax.tree.map(
    lambda a, b: a - b, start_params, jax.device_get(end.params)
  )
  return metrics, grads


@pytest.mark.long
@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
  ("name", "shards", "layout", "accumulate"),
  [
    ("ipo", 2, rj.Contiguous(), 1),
    ("robust", 4, rj.Zigzag(), 4),
    ("orpo", 4, rj.Striped(), 2),
    ("dpo", 4, rj.Striped(), 2),
  ],
)
def test_packed_rows_on_any_mesh_are_answers_alone(
  pairs, name, shards, layout, accumulate
):
  loss = LOSS_VALUES[name]
  model = checkpoint.create(CONFIG, seed=1)
  initial = checkpoint.create(CONFIG, seed=2)
  rows = packed(pairs)
  # All rows alone: each pair in a row of its own, on one device.
  alone = fill(
    [[rj_piece] for rj_piece in pieces_of(pairs)], LENGTH, pairs.read
  )

  def plain(model):
    """Mean over pairs, from the logits of each answer alone."""
    values = []
    for number in range(len(pairs)):
      ids, weights, segments = pairs.read(number, 0, LENGTH)
      sums = []
      for segment in (1, 2):
        x, w = ids[segments == segment], weights[segments == segment][1:]
        picked = [
          jnp.take_along_axis(
            jax.nn.log_softmax(m(x[None])[0, :-1]), x[1:, None], -1
          )[:, 0]
          for m in (model, initial)
        ]
        sums.append((jnp.sum(picked[0] * w), jnp.sum(picked[1] * w), w.sum()))
      (p, p0, w), (q, q0, v) = sums
      if isinstance(loss, Ipo):
        delta = (p - p0) / w - (q - q0) / v
        values.append((delta - 1 / (2 * loss.beta)) ** 2)
      elif isinstance(loss, Orpo):
        a, b = p / w, q / v
        odds = a - b - jnp.log1p(-jnp.exp(a)) + jnp.log1p(-jnp.exp(b))
        values.append(-a - loss.beta * jax.nn.log_sigmoid(odds))
      else:
        delta = loss.beta * ((p - p0) - (q - q0))
        e = loss.label_smoothing
        right, wrong = jax.nn.log_sigmoid(delta), jax.nn.log_sigmoid(-delta)
        sign = -1 if loss.robust else 1
        unbiased = 1 - 2 * e if loss.robust else 1
        values.append((-(1 - e) * right - sign * e * wrong) / unbiased)
    return jnp.mean(jnp.stack(values))

  want, want_grads = jax.jit(jax.value_and_grad(plain))(model)
  table = ReferenceLogprobs("")
  placed = lambda rows: rows
  fill_table(
    table, initial, [(alone, 1)], ContextParallel(), placed=placed,
    dtype=None, block=7,
  )  # fmt: skip
  assert not table.lacks(rows)
  attend = spread(shards, layout)
  metrics, grads = gradients(
    model, loss, table.attached(rows), attend, accumulate
  )
  assert float(metrics.loss) == pytest.approx(float(want), rel=1e-5)
  assert float(metrics.objective) == pytest.approx(float(want), rel=1e-5)
  assert float(metrics.weight) == len(pairs)
  for a, b in zip(
    jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True
  ):
    scale = np.abs(b).max()
    np.testing.assert_allclose(a, b, atol=2e-5 * scale)


def pieces_of(pairs):
  plan = BestFit().plan(pairs.lengths, int(pairs.lengths.max()))
  return [piece for row in plan for piece in row]


def run_of(pairs, loss, tmp_path=None, model=None, **options):
  """Trains for a few steps; returns the result and the reports."""
  recipe = rj.train.Recipe(
    stages=(
      rj.train.Stage(steps=options.pop("steps", 3), length=LENGTH, batch=2),
    ),
    optimizer=rj.train.Optimizer(
      learning_rate=1e-2, schedule="constant", weight_decay=0.0
    ),
    objective=rj.train.Objective(posttraining=loss),
    loop_config=LoopConfig(log_every=1, save_every=1),
    **options,
  )
  model = checkpoint.create(CONFIG, seed=1) if model is None else model
  reports = []
  with contextlib.ExitStack() as stack:
    checkpoints = None
    if tmp_path is not None:
      checkpoints = stack.enter_context(Checkpoints(tmp_path / "steps"))
    result = rj.train.train(
      recipe,
      model,
      rj.train.Mixture([pairs]),
      checkpoints=checkpoints,
      report=lambda stage, report: reports.append(report),
    )
  return result, reports


@pytest.mark.long
def test_preferences_are_learned_and_a_run_resumes(pairs, tmp_path):
  result, reports = run_of(pairs, Dpo(beta=0.5), steps=4)
  # The initial model is its own reference.
  assert reports[0].loss == pytest.approx(np.log(2), abs=1e-6)
  assert reports[0].means["reward_margin"] == pytest.approx(0, abs=1e-6)
  assert reports[-1].means["reward_margin"] > 0.1
  assert reports[-1].loss < reports[0].loss
  assert sum(report.labels for report in reports) >= len(pairs)
  _, first = run_of(pairs, Dpo(beta=0.5), tmp_path, steps=2)
  # The initial weights are gone, their log-probabilities are not.
  shapes = rj.models.abstract(CONFIG, dtype="float32")
  resumed, later_reports = run_of(
    pairs, Dpo(beta=0.5), tmp_path, shapes, steps=4
  )
  assert [x.loss for x in (*first, *later_reports)] == [x.loss for x in reports]
  for a, b in zip(
    jax.tree.leaves(result.model), jax.tree.leaves(resumed.model), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  other_model = checkpoint.create(CONFIG, seed=3)
  refused(
    CheckpointMismatchError,
    lambda: run_of(pairs, Dpo(beta=0.5), tmp_path, other_model, steps=5),
    "other weights",
  )
  (tmp_path / "steps" / "reference.npz").unlink()
  refused(
    CheckpointMismatchError,
    lambda: run_of(pairs, Dpo(beta=0.5), tmp_path, shapes, steps=5),
    "reference.npz",
  )


@pytest.mark.long
@pytest.mark.parametrize("codes", [None, {"bits": 4, "levels": "nf4"}])
def test_adapters_learn_against_the_model_without_them(pairs, tmp_path, codes):
  model = checkpoint.create(CONFIG, seed=1)
  if codes is not None:
    model = rj.models.with_coded_weights(model, **codes)
  lora = rj.train.Lora(rank=4, targets=("q", "v", "down"))
  options = {"model": model, "lora": lora}
  result, reports = run_of(pairs, Ipo(beta=0.5), tmp_path, **options)
  assert reports[0].loss == pytest.approx(1.0, abs=1e-6)
  assert reports[-1].loss < reports[0].loss
  assert result.adapter is not None
  assert not model.embed.weight[...].is_deleted()
  longer, _ = run_of(pairs, Ipo(beta=0.5), tmp_path, steps=4, **options)
  assert longer.step == 4


@pytest.mark.slow
def test_documents_on_shards_have_the_same_pairs(pairs):
  model = checkpoint.create(CONFIG, seed=1)
  losses = []
  for axes in (None, 2):
    mesh = axes and rj.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    recipe = rj.train.Recipe(
      stages=(rj.train.Stage(steps=2, length=LENGTH, batch=2),),
      optimizer=rj.train.Optimizer(learning_rate=1e-2),
      objective=rj.train.Objective(posttraining=Dpo()),
      layout="documents",
      loop_config=LoopConfig(log_every=1),
    )
    start = jax.tree.map(jnp.copy, model)
    if mesh is not None:
      start = checkpoint.place(start, mesh)
    reports = []
    rj.train.train(
      recipe,
      start,
      rj.train.Mixture([pairs]),
      mesh=mesh,
      axis="seq" if mesh else None,
      report=lambda stage, report, reports=reports: reports.append(report),
    )
    losses.append([report.loss for report in reports])
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)
  assert losses[0][0] == pytest.approx(np.log(2), abs=1e-6)


def test_bad_losses_are_refused():
  for name, loss in LOSSES.items():
    for beta in (0, -1.0, float("nan")):
      refused(OptionError, lambda beta=beta, loss=loss: loss(beta=beta), "beta")
    assert name == loss.__name__.lower()
  refused(OptionError, lambda: Dpo(label_smoothing=0.5), "label_smoothing")
  refused(
    OptionError,
    lambda: rj.train.Objective(posttraining=Dpo(), z_loss=0.1),
    "z_loss",
    "Dpo",
  )


def test_what_pairs_are_not_trained_with_is_refused(pairs):
  plain = rj.data.Documents([np.arange(40)])
  model = checkpoint.create(CONFIG, seed=1)
  recipe = lambda loss=Dpo(), stage=None, **options: rj.train.Recipe(  # noqa: B008
    stages=(
      rj.train.Stage(**{"steps": 1, "length": LENGTH, "batch": 2}
                     | (stage or {})),
    ),
    objective=rj.train.Objective(posttraining=loss),
    **options,
  )  # fmt: skip
  train = lambda recipe, source=pairs: rj.train.train(
    recipe, model, rj.train.Mixture([source])
  )
  refused(OptionError, lambda: train(recipe(), plain), "Documents for Dpo")
  refused(OptionError, lambda: train(recipe(None)), "rejected ones")
  refused(OptionError, lambda: train(recipe(packer=Cut())), "packer")
  refused(OptionError, lambda: train(recipe(stage={"length": 16})), "length")
  refused(OptionError, lambda: recipe(cepe=True), "cepe")
  refused(
    OptionError, lambda: recipe(stage={"segments": "separate"}), "segments"
  )
  scaling = rj.train.RopeScaling(context=512)
  refused(
    OptionError, lambda: recipe(stage={"rope_scaling": scaling}), "rope_scaling"
  )
  refused(
    OptionError, lambda: recipe(stage={"index_warm_up": True}), "index_warm_up"
  )


def test_a_damaged_table_and_numbers_that_are_not_finite(pairs, tmp_path):
  table = ReferenceLogprobs("key")
  rows = packed(pairs)
  nans = np.full(rows.tokens.shape, np.nan, np.float32)
  refused(NotFiniteError, lambda: table.add(rows, nans), "reference")
  table.add(rows, -np.arange(nans.size, dtype=np.float32).reshape(nans.shape))
  table.save(tmp_path)
  loaded = ReferenceLogprobs.load(tmp_path)
  assert loaded is not None
  assert loaded.key == "key"
  assert len(loaded) == len(table)
  for a, b in zip(loaded.attached(rows), table.attached(rows), strict=True):
    jax.tree.map(np.testing.assert_array_equal, a, b)
  path = tmp_path / "reference.npz"
  path.write_bytes(path.read_bytes()[:-9])
  refused(
    CheckpointMismatchError,
    lambda: ReferenceLogprobs.load(tmp_path),
    "reference.npz",
  )


def test_a_batch_without_the_initial_model_is_refused(pairs):
  rows = packed(pairs)
  refused(
    OptionError,
    lambda: Dpo().terms(jnp.zeros(rows.tokens.shape), batches.Batch(*rows)),
    "reference",
  )

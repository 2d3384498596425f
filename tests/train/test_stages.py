"""Layers in stages: results and gradients of the plain model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, ShapeError
from ringjax.nn.call_parts.stages import StageSchedule, Turn
from ringjax.train.batch import Batch, place
from ringjax.train.objective import Objective
from tests import checkpoints

ROWS, LENGTH = 8, 32


def packed_rows() -> Batch:
  """Rows of two documents, the second of which ends in padding."""
  tokens = np.random.default_rng(0).integers(1, 60, (ROWS, LENGTH + 1))
  at = np.concatenate([np.arange(19), np.arange(13)])
  documents = np.repeat([1, 2, 0], [19, 9, 4])
  shape = (ROWS, LENGTH)
  return Batch(
    tokens[:, :-1].astype(np.int32),
    tokens[:, 1:].astype(np.int32),
    np.broadcast_to(documents > 0, shape).astype(np.float32),
    np.broadcast_to(at, shape).astype(np.int32),
    np.broadcast_to(documents, shape).astype(np.int32),
  )


def loss_and_gradients(model, attend, **options):
  """Loss sums, and gradients by the layers' numbers."""

  @jax.jit
  def compute(model, batch):
    def loss(model):
      sums = Objective(**options).sums(model, batch, attend)
      return sums.loss, (sums.nll, sums.routing)

    return jax.value_and_grad(loss, has_aux=True)(model)

  batch = jax.tree.map(lambda x: x[0], place(packed_rows(), attend))
  return compute(model, batch)


def assert_same_training(family, shape, axes, rounds=1, layers=4, **options):
  config = checkpoints.config(family) | {"num_hidden_layers": layers}
  if (types := config.get("layer_types")) is not None:
    config["layer_types"] = (types * layers)[:layers]
  model = rj.models.create(config, seed=3)
  mesh = rj.make_mesh(shape, axes, devices=jax.devices()[: np.prod(shape)])
  staged = rj.models.place(model, mesh)
  weights = jax.tree.leaves(staged.stack.blocks)
  assert any("stage" in x.sharding.spec for x in weights)
  if rounds > 1:
    staged = rj.train.with_stage_rounds(staged, rounds)
  attend = rj.models.ContextParallel(
    mesh=mesh, axis="seq" if "seq" in axes else None, layout=rj.Striped()
  )
  want = loss_and_gradients(model, rj.models.ContextParallel(), **options)
  got = loss_and_gradients(staged, attend, **options)
  for x, y in zip(
    jax.tree.leaves(want[0]), jax.tree.leaves(got[0]), strict=True
  ):
    np.testing.assert_allclose(y, x, rtol=2e-5, atol=1e-5)
  trees = [want[1], got[1]]
  if rounds > 1:
    join = lambda *arrays: jnp.concatenate(arrays)
    joined = jax.tree.map(join, *got[1].stack.blocks)
    trees = [want[1].stack.blocks[0], joined]
  for x, y in zip(*map(jax.tree.leaves, trees), strict=True):
    bound = 4e-5 * max(1.0, float(jnp.abs(x).max()))
    np.testing.assert_allclose(y, x, rtol=0, atol=bound)


@pytest.mark.parametrize(
  ("stages", "groups", "rounds"), [(2, 2, 1), (4, 8, 1), (2, 2, 3), (3, 6, 2)]
)
def test_groups_pass_all_stages(stages, groups, rounds):
  """Each group is multiplied by the number of each stage, round by round."""
  schedule = StageSchedule(stages=stages, groups=groups, rounds=rounds)
  store = jnp.arange(1.0, groups + 1).reshape(stages, -1, 1, 1)

  def compute(x, turn: Turn):
    number = turn.round * stages + turn.stage + 2
    sums = jnp.where(turn.is_real, 1.0, jnp.nan)
    return x * 0.5 + number.astype(x.dtype)[:, None, None], sums

  results, sums = jax.jit(lambda x: schedule.run(compute, x))(store)
  want = store
  for number in range(2, rounds * stages + 2):
    want = want * 0.5 + number
  np.testing.assert_allclose(results, want)
  np.testing.assert_array_equal(sums, np.ones((stages, rounds, groups)))


@pytest.mark.long
def test_packed_rows_on_three_axes():
  assert_same_training("llama3", (2, 2, 2), ("data", "stage", "seq"))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "shape", "axes", "rounds", "layers"),
  [
    ("llama3", (2, 2), ("stage", "seq"), 2, 4),
    ("llama3", (2, 2, 2), ("stage", "seq", "model"), 1, 4),
    ("mixtral", (2, 2), ("stage", "seq"), 1, 4),
    ("qwen3_next", (2, 2), ("stage", "seq"), 1, 6),
    ("gemma2", (2, 2), ("stage", "seq"), 1, 12),
    # The first layer has no experts: it is a run of its own.
    ("deepseek_v3", (2, 2), ("stage", "seq"), 1, 5),
  ],
)
def test_families_meshes_and_rounds(family, shape, axes, rounds, layers):
  assert_same_training(family, shape, axes, rounds, layers)


def test_what_stages_do_not_pass_is_refused():
  config = checkpoints.config("llama3") | {"num_hidden_layers": 4}
  mesh = rj.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
  model = rj.models.create(config, mesh=mesh)
  with pytest.raises(OptionError, match="a call with a cache"):
    rj.infer.generate(model, [[5, 6, 7], [8, 9, 10]], max_new_tokens=2)
  head = rj.models.eagle3.with_head(model, taps=(1, 2))
  with pytest.raises(OptionError, match="a draft head"):
    head(np.ones((2, 8), np.int32))
  with pytest.raises(OptionError, match="3 over 2 stages for runs of 4 equal"):
    rj.train.with_stage_rounds(model, 3)
  with pytest.raises(OptionError, match="on a mesh without stages"):
    rj.train.with_stage_rounds(rj.models.create(config), 2)
  with pytest.raises(ShapeError, match="a multiple of 2"):
    model(np.ones((3, 8), np.int32))


@pytest.mark.long
def test_trainings_that_stages_do_not_pass_are_refused_before_they_begin():
  """Keys, ids and streams of another stage have a name in the error."""
  config = checkpoints.config("llama3") | {"num_hidden_layers": 4}
  mesh = rj.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
  model = rj.models.create(config, mesh=mesh)
  stage = rj.train.Stage(steps=1, length=32, batch=4)
  head, draft = rj.train.Objective(predict_loss=1.0), rj.train.DraftTraining()
  trainings = {
    "a draft head": (
      rj.models.eagle3.with_head(model),
      {"objective": head, "predict_only": True},
    ),
    "the draft of a target": (
      rj.models.longspec.with_draft(model),
      {"draft": draft},
    ),
    "layers that read tokens' ids": (
      rj.models.abstract(checkpoints.config("gemma3n"), mesh=mesh),
      {},
    ),
  }
  for reason, (trained, options) in trainings.items():
    recipe = rj.train.Recipe(stages=(stage,), **options)
    with pytest.raises(OptionError, match=reason):
      rj.train.recipe.check(recipe, trained, recipe.attend(mesh, None))


@pytest.mark.long
def test_a_training_resumes_on_fewer_stages_and_on_none(tmp_path):
  """Two steps on four stages, one on two, one on a device: as all on one."""
  config = checkpoints.config("llama3") | {"num_hidden_layers": 4}
  draw = np.random.default_rng(0)
  documents = [draw.integers(1, 60, n) for n in draw.integers(9, 40, 40)]
  mixture = rj.train.Mixture([rj.data.Documents(documents)])

  def trained(steps, stages=1, checkpoints=None):
    recipe = rj.train.Recipe(
      stages=(rj.train.Stage(steps=steps, length=32, batch=4),),
      optimizer=rj.train.Optimizer(learning_rate=1e-3, schedule="constant"),
    )
    mesh = None
    if stages > 1:
      devices = jax.devices()[:stages]
      mesh = rj.make_mesh((stages,), ("stage",), devices=devices)
    model = rj.models.create(config, seed=3, mesh=mesh)
    return rj.train.train(
      recipe, model, mixture, mesh=mesh, checkpoints=checkpoints
    )

  want = trained(4)
  for steps, stages in ((2, 4), (3, 2), (4, 1)):
    with rj.train.Checkpoints(tmp_path) as saved:
      got = trained(steps, stages, saved)
    assert got.step == steps
    axes = [x.sharding for x in jax.tree.leaves(got.model.stack.blocks)]
    assert stages == 1 or any("stage" in x.spec for x in axes)
  for x, y in zip(*map(jax.tree.leaves, (got.model, want.model)), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)

"""Recipes: what weight decay leaves alone, what is refused before a step, how
a run goes on, and who brings which rows."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import types

import jax
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax.data.batches.loader import Loader
from ringjax.data.batches.packing import Documents
from ringjax.data.batches.placement import place_rows
from ringjax.errors import (
  CheckpointMismatchError,
  ConfigError,
  MemoryEstimateError,
  OptionError,
  ShapeError,
)
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train import loop, memory_needs, recipe
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.extend import RopeScaling
from ringjax.train.methods.lora import Lora
from tests.helpers import make_mesh
from tests.train.test_step import CONFIG

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"
STAGE = recipe.Stage(steps=2, length=16, batch=2)
BIASED = CONFIG | {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
}


def text() -> recipe.Mixture:
  draw = np.random.default_rng(0)
  return recipe.Mixture(
    [Documents([draw.integers(0, 48, n) for n in draw.integers(5, 40, 60)])]
  )


def names(tree) -> dict[str, bool]:
  """Whether each parameter is decayed, by the ends of its path."""
  found = jax.tree_util.tree_flatten_with_path(
    tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )[0]
  return {
    ".".join(str(getattr(k, "name", getattr(k, "idx", k))) for k in path[-2:]):
      all(jax.tree.leaves(x)) for path, x in found
  }  # fmt: skip


def test_only_matrices_decay():
  model = rj.models.create(BIASED)
  # Equal layers share an array: their vectors have two axes.
  bias = model.stack.blocks[0][0].attention.q.bias
  assert bias[...].ndim == 3
  found = names(recipe.decayed(model))
  decayed = {name for name, yes in found.items() if yes}
  assert decayed == {
    "embed.weight", "head.weight", "q.weight", "k.weight", "v.weight",
    "o.weight", "gate.weight", "up.weight", "down.weight",
  }  # fmt: skip
  assert {"norm.weight", "pre_attention.weight", "q.bias"} <= set(found)


@pytest.mark.long
def test_decay_moves_no_norm():
  model = rj.models.create(BIASED)
  optimizer = recipe.Optimizer(
    name="sgd", learning_rate=1.0, weight_decay=0.1
  ).build(1)
  none = jax.tree.map(np.zeros_like, model)
  with jax.numpy_dtype_promotion("standard"):
    updates, _ = optimizer.update(none, optimizer.init(model), model)
  moved = jax.tree.map(lambda x: bool(np.any(np.asarray(x) != 0)), updates)
  assert names(moved) == names(recipe.decayed(model)) | {
    # Biases of zero would not have moved either way.
    name: False
    for name in names(moved)
    if name.endswith("bias")
  }


def test_adapters_decay():
  adapters = Lora(rank=2).start(rj.models.create(CONFIG))
  assert all(jax.tree.leaves(recipe.decayed(adapters)))


@pytest.mark.parametrize(
  "unused",
  [
    {"decay": 0.1},
    {"name": "sgd", "b2": 0.9},
    {"name": "adafactor", "b1": 0.9},
    {"name": "adafactor", "b2": 0.9},
    {"name": "lion", "eps": 1e-6},
  ],
)
def test_numbers_that_nothing_uses(unused):
  with pytest.raises(OptionError, match="leave it out"):
    recipe.Optimizer(**unused)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 9])
def test_the_last_step_has_the_last_learning_rate(schedule, warmup):
  optimizer = recipe.Optimizer(
    learning_rate=1e-3,
    end_learning_rate=1e-4,
    schedule=schedule,
    warmup=warmup,
  )
  rates = [optimizer.learning_rate_at(step, 10) for step in range(10)]
  assert rates[-1] == pytest.approx(1e-4)
  assert max(rates) == pytest.approx(1e-3)
  top = max(warmup - 1, 0)
  assert rates[top] == pytest.approx(1e-3)
  # It falls once it has begun to, and in the last steps alone with "wsd".
  assert all(a >= b for a, b in itertools.pairwise(rates[top:]))
  if schedule == "wsd" and warmup < 8:
    assert rates[-3:-1] == pytest.approx([1e-3, 5.5e-4])


def test_a_constant_rate_and_a_single_step():
  fixed = recipe.Optimizer(
    learning_rate=1e-3, end_learning_rate=1e-4, schedule="constant", warmup=2
  )
  rates = [fixed.learning_rate_at(step, 4) for step in range(4)]
  assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
  alone = recipe.Optimizer(learning_rate=1e-3)
  assert alone.learning_rate_at(0, 1) == pytest.approx(1e-3)
  # Stopped in the warm-up: no step has the highest rate.
  assert recipe.Optimizer(learning_rate=1e-3, warmup=4).learning_rate_at(
    1, 2
  ) == pytest.approx(5e-4)


def test_eps_is_that_of_adamw():
  """A gradient far below eps moves a weight by its share of eps."""
  params = {"w": np.ones((2, 2), np.float32)}
  grads = {"w": np.full((2, 2), 1e-6, np.float32)}
  moved = []
  for eps in (None, 1e-2):
    built = recipe.Optimizer(
      learning_rate=1.0, weight_decay=0.0, clip=None, eps=eps
    ).build(1)
    with jax.numpy_dtype_promotion("standard"):
      updates, _ = built.update(grads, built.init(params), params)
    moved.append(-float(np.asarray(updates["w"])[0, 0]))
  assert moved == pytest.approx([1 / 1.01, 1e-6 / (1e-2 + 1e-6)], rel=1e-3)


@pytest.mark.long
def test_sharded_parameters_give_the_same_losses():
  """The width over the axis of the sequence, and back from its checkpoint."""
  mesh = rj.make_mesh((4,), ("seq",))
  losses, ends = [], []
  for rules in (rj.models.Rules(), rj.models.Rules(embed="seq")):
    reports = []
    done = recipe.train(
      recipe.Recipe(stages=(STAGE,), loop_config=loop.LoopConfig(log_every=1)),
      rj.models.create(CONFIG, seed=0, mesh=mesh, rules=rules),
      text(),
      mesh=mesh,
      axis="seq",
      report=lambda stage, x, reports=reports: reports.append(x.loss),
    )
    losses.append(reports)
    ends.append(done.model)
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
  weight = ends[1].embed.weight[...]
  assert weight.addressable_shards[0].data.size == weight.size // 4
  assert len(losses[0]) == 2


@pytest.mark.long
def test_a_held_out_loss_changes_no_step(tmp_path):
  """Its losses are those of the states, also of a run that is resumed."""

  def run(steps, folder=None, evaluate=None, every=2):
    reports = []
    with contextlib.ExitStack() as stack:
      saved = folder and stack.enter_context(Checkpoints(folder))
      done = recipe.train(
        recipe.Recipe(
          stages=(recipe.Stage(steps=steps, length=16, batch=2),),
          optimizer=recipe.Optimizer(schedule="constant"),
          loop_config=loop.LoopConfig(evaluate_every=every),
        ),
        rj.models.create(CONFIG, seed=0),
        text(),
        checkpoints=saved,
        report=lambda stage, x: reports.append((x.step, x.held_out)),
        evaluate=evaluate,
      )
    return jax.device_get(jax.tree.leaves(done.model)), reports

  total = lambda model: float(
    sum(np.abs(np.asarray(x)).sum() for x in jax.tree.leaves(model))
  )
  plain, none = run(3, every=None)
  assert none == [(3, None)]
  # One without the other would do nothing.
  for half in (dict(evaluate=total, every=None), dict(evaluate=None)):
    with pytest.raises(OptionError, match="evaluate_every"):
      run(3, **half)
  whole, losses = run(3, evaluate=total)
  assert [step for step, _ in losses] == [2, 3]
  assert losses[-1][1] == total(whole) != losses[0][1]
  run(2, tmp_path, total)
  parts, rest = run(3, tmp_path, total)
  assert rest == losses[1:]
  for a, b, c in zip(plain, whole, parts, strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)


def test_what_does_not_fit_is_said_before_the_first_step(monkeypatch):
  model = rj.models.create(CONFIG, seed=0)
  size = 4 * sum(x.size for x in jax.tree.leaves(model))
  run = lambda: recipe.train(recipe.Recipe(stages=(STAGE,)), model, text())
  # Two moments and the gradients; the parameters are there.
  monkeypatch.setattr(
    memory_needs, "device_free_bytes", lambda *_: 3 * size - 1000
  )
  with pytest.raises(MemoryEstimateError) as caught:
    run()
  message = str(caught.value)
  for word in (
    *memory_needs.TrainingMemory._fields, "embed=", "--mesh", "lora=",
    "--config.lora.rank",
  ):  # fmt: skip
    assert word in message
  assert "..." not in message
  monkeypatch.setattr(
    memory_needs, "device_free_bytes", lambda *_: 3 * size + 1000
  )
  with pytest.warns(RuntimeWarning, match=r"may not fit.*activations.*--c"):
    run()


def test_no_number_is_cut_off_from_what_does_not_fit(monkeypatch):
  needs = memory_needs.TrainingMemory(*[999_900_000_000_000] * 5)
  monkeypatch.setattr(memory_needs, "device_free_bytes", lambda *_: 998 * 10**9)
  mesh = jax.make_mesh((8,), ("seq",))
  with pytest.raises(MemoryEstimateError) as caught:
    memory_needs.check_memory(needs, mesh, resident=False)
  text = str(caught.value)
  assert text.count("999900.0 GB") == 5 and "which share the host's" in text
  assert text.endswith("--config.lora.rank=16).")


def test_frozen_weights_need_less():
  model = rj.models.abstract(CONFIG)
  whole, adapters = (recipe.flops(model, 64, adapters=x) for x in (False, True))
  assert 2 / 3 * whole < adapters < whole
  # Attention has no weights, and the longer the row the less is saved.
  far = [recipe.flops(model, 1 << 20, adapters=x) for x in (False, True)]
  assert far[1] / far[0] > 0.99


@pytest.mark.parametrize(
  ("later", "fault", "words"),
  [
    ({"length": 18}, ShapeError, "18 tokens"),
    ({"batch": 3}, ShapeError, "3 in a micro-batch"),
    (
      {"rope_scaling": RopeScaling(context=16, method="linear")},
      ConfigError,
      "context",
    ),
  ],
)
def test_what_a_later_stage_cannot_do_is_said_first(later, fault, words):
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  second = recipe.Stage(**{"steps": 1, "length": 32, "batch": 2} | later)
  model = rj.models.create(CONFIG | {"max_position_embeddings": 64}, mesh=mesh)
  with pytest.raises(fault, match=words):
    recipe.train(
      recipe.Recipe(stages=(STAGE, second)),
      model,
      text(),
      mesh=mesh,
      axis="seq",
      on_step=lambda step: pytest.fail("a step was taken"),
    )
  # It can be mended and used.
  assert not any(x.is_deleted() for x in jax.tree.leaves(model))


def test_documents_are_dealt_out_where_there_are_shards():
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  with Loader(text().sources, length=16, batch=2, seed=0) as loader:
    rows = next(loader)
  made = recipe.Recipe(stages=(STAGE,), layout="documents")
  dealt = made.placed(rows, made.attend(mesh, "seq"))
  assert not np.array_equal(dealt.tokens, rows.tokens)
  for x, y in zip(dealt, place_rows(rows, shards=4), strict=True):
    np.testing.assert_array_equal(x, y)
  assert made.placed(rows, made.attend(None, None)) is rows
  other = recipe.Recipe(stages=(STAGE,), layout="striped")
  assert other.placed(rows, other.attend(mesh, "seq")) is rows


@pytest.mark.slow
def test_documents_that_are_dealt_out_train_the_same():
  """Rows whose documents lie on one shard or on several, against one device.

  Their mesh has explicit axes, and is the current one.
  """
  mesh = make_mesh(4, "explicit")
  found = {}
  for layout, where in (
    ("striped", {}),
    ("documents", {"mesh": mesh, "axis": "seq"}),
  ):
    made = recipe.Recipe(
      stages=(STAGE,),
      optimizer=recipe.Optimizer(name="sgd", learning_rate=1.0, clip=None),
      layout=layout,
    )
    model = rj.models.create(CONFIG, seed=3, mesh=where.get("mesh"))
    inside = jax.set_mesh(mesh) if where else contextlib.nullcontext()
    with inside:
      trained = recipe.train(made, model, text(), **where)
    found[layout] = jax.device_get(jax.tree.leaves(trained.model))
  for a, b in zip(found["striped"], found["documents"], strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max())


class Prompts:
  """Documents, a link token behind each, and a question about them."""

  def example(self, rng):
    made = rj.data.arranged(
      [rng.integers(1, 40, rng.integers(3, 12)) for _ in range(2)],
      rng.integers(1, 40, 4),
      rj.data.LinkTokens(44, 2, 2),
    )
    weights = np.zeros(len(made.tokens), np.float32)
    weights[-3:] = 1
    return made.tokens, weights, made.segments


def trained(segments, **where):
  made = recipe.Recipe(
    stages=(recipe.Stage(steps=2, length=32, batch=2, segments=segments),),
    optimizer=recipe.Optimizer(name="sgd", learning_rate=1.0, clip=None),
  )
  model = rj.models.create(CONFIG, seed=3, mesh=where.get("mesh"))
  mixture = recipe.Mixture([Prompts()])
  found = recipe.train(made, model, mixture, **where).model
  return jax.device_get(jax.tree.leaves(found))


@pytest.mark.long
def test_separate_documents_train_the_same_on_a_ring():
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  one = trained("separate")
  for a, b in zip(one, trained("separate", mesh=mesh, axis="seq"), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max())
  others = zip(one, trained("same"), strict=True)
  assert any(np.abs(a - b).max() > 1e-4 for a, b in others)


def test_what_separate_documents_do_not_go_with():
  stage = recipe.Stage(steps=1, length=16, batch=2, segments="separate")
  with pytest.raises(OptionError, match="layout: got 'documents'"):
    recipe.Recipe(stages=(stage,), layout="documents")
  with pytest.raises(OptionError, match="segments"):
    recipe.Stage(steps=1, length=16, batch=2, segments="apart")
  path = FIXTURES / "qwen3_next" / "config.json"
  model = rj.models.abstract(json.loads(path.read_text()))
  made = recipe.Recipe(stages=(stage,))
  with pytest.raises(OptionError, match="segments: got 'separate'.*recurrent"):
    recipe.check(made, model, made.attend(None, None))


def test_documents_are_not_dealt_out_under_recurrent_layers():
  path = FIXTURES / "qwen3_next" / "config.json"
  model = rj.models.abstract(json.loads(path.read_text()))
  mesh = rj.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
  made = recipe.Recipe(stages=(STAGE,), layout="documents")
  with pytest.raises(OptionError, match="layout: got 'documents'.*recurrent"):
    recipe.check(made, model, made.attend(mesh, "seq"))
  recipe.check(made, model, made.attend(None, None))


def test_going_on_needs_one_state(tmp_path):
  """No second one beside what is restored; shapes are enough."""
  first = recipe.Recipe(stages=(STAGE,))
  with Checkpoints(tmp_path) as saved:
    begun = recipe.train(
      first, rj.models.create(CONFIG), text(), checkpoints=saved
    )
  again = rj.models.create(CONFIG)
  with Checkpoints(tmp_path) as saved:
    done = recipe.train(first, again, text(), checkpoints=saved)
  assert all(x.is_deleted() for x in jax.tree.leaves(again))
  with Checkpoints(tmp_path) as saved:
    form = rj.models.abstract(CONFIG, dtype="float32")
    by_shape = recipe.train(first, form, text(), checkpoints=saved)
  for other in (done, by_shape):
    assert other.step == begun.step == 2
    for a, b in zip(
      jax.tree.leaves(begun.model), jax.tree.leaves(other.model), strict=True
    ):
      np.testing.assert_array_equal(a, b)


def test_a_step_that_does_not_fit_costs_no_model(tmp_path):
  first = recipe.Recipe(stages=(STAGE,))
  with Checkpoints(tmp_path) as saved:
    recipe.train(first, rj.models.create(CONFIG), text(), checkpoints=saved)
  other = rj.models.create(CONFIG | {"hidden_size": 32})
  with (
    Checkpoints(tmp_path) as saved,
    pytest.raises(CheckpointMismatchError),
  ):
    recipe.train(first, other, text(), checkpoints=saved)
  assert not any(x.is_deleted() for x in jax.tree.leaves(other))


def test_shapes_alone_begin_nothing(tmp_path):
  with (
    Checkpoints(tmp_path) as saved,
    pytest.raises(OptionError, match="shapes alone"),
  ):
    recipe.train(
      recipe.Recipe(stages=(STAGE,)),
      rj.models.abstract(CONFIG, dtype="float32"),
      text(),
      checkpoints=saved,
    )


def spread_of(shape, axes, process_of) -> ContextParallel:
  """Over devices of several processes, which this machine does not have."""
  devices = np.empty(shape, object)
  for place in np.ndindex(*shape):
    devices[place] = types.SimpleNamespace(process_index=process_of(*place))
  mesh = types.SimpleNamespace(
    axis_names=axes, devices=devices, shape=dict(zip(axes, shape, strict=True))
  )
  return ContextParallel(mesh=mesh, axis="seq")


@pytest.mark.parametrize(
  ("shape", "axes", "process_of", "parts"),
  [
    # A share each; a row over two processes; two shares each.
    ((2, 4), ("data", "seq"), lambda d, s: d, [(0, 2), (1, 2)]),
    ((2, 4), ("data", "seq"), lambda d, s: s // 2, [(0, 1), (0, 1)]),
    ((4, 2), ("data", "seq"), lambda d, s: d // 2, [(0, 2), (1, 2)]),
    ((4, 2), ("seq", "data"), lambda s, d: d, [(0, 2), (1, 2)]),
    # Shares that do not follow each other cannot be told by two numbers.
    ((4, 2), ("data", "seq"), lambda d, s: d % 2, [(0, 1), (0, 1)]),
    ((2, 2), ("data", "seq"), lambda d, s: 2 * d + s, [(0, 2), (0, 2), (1, 2)]),
  ],
)
def test_whose_rows(unchecked, shape, axes, process_of, parts):
  attend = spread_of(shape, axes, process_of)
  found = [batches.share_of(attend, n) for n in range(len(parts))]
  assert found == parts


def test_micro_batches_are_dealt_alike():
  """Each process's rows go to all micro-batches."""
  draw = np.random.default_rng(0)
  rows = batches.whole_rows(draw.integers(0, 48, (8, 17)))
  placed = batches.place(rows, ContextParallel(), accumulate=2)
  assert placed.tokens.shape == (2, 4, 16)
  for n in range(8):
    np.testing.assert_array_equal(placed.tokens[n % 2, n // 2], rows.tokens[n])

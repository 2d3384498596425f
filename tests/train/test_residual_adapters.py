"""Adapters that begin as the error of codes, against plain decompositions."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, ShapeError
from ringjax.nn.param import Rules
from ringjax.train import Lora, Mixture, Recipe, Stage, residual_adapters, train
from ringjax.train.loop import LoopConfig
from ringjax.train.methods.lora import with_adapters
from tests.train.test_coded_training import ALL, CODES, CONFIG

QUERIES = "stack.blocks.0.0.attention.q"
DOWN = "stack.blocks.0.0.feedforward.down"


def model_and_codes(kind="nf4"):
  model = rj.models.create(CONFIG, seed=1)
  return model, rj.models.with_coded_weights(model, **CODES[kind])


def texts(rows=3, length=17):
  return np.random.default_rng(0).integers(0, 48, (rows, length))


def weights_of(model, path):
  """Weights of a map, float64 [L, I, O]."""
  owner = model
  for name in path.split("."):
    owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
  weight = np.asarray(owner.weight.get_value(), np.float64)
  inner = int(np.prod(weight.shape[1 : 1 + owner.contracted]))
  return weight.reshape(len(weight), inner, -1)


def first_inputs(model, tokens):
  """Inputs of the first layer's attention, by the formula of its norm."""
  x = np.asarray(model.embed.weight[...], np.float64)[tokens]
  gain = np.asarray(model.stack.blocks[0][0].pre_attention.weight.get_value())[
    0
  ]
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * gain


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "int4", "int8"])
def test_they_are_the_nearest_of_their_rank(kind):
  """Also for maps with more inputs than outputs, and with fewer."""
  model, coded = model_and_codes(kind)
  lora, params = residual_adapters(
    Lora(rank=5, alpha=15.0, targets=ALL), model, coded
  )
  decoded = rj.models.with_float_weights(coded)
  merged = rj.models.with_float_weights(lora.merged(params, coded))
  for path in (QUERIES, DOWN, DOWN.replace("down", "up")):
    exact, codes, sums = (weights_of(x, path) for x in (model, decoded, merged))
    for layer in range(len(exact)):
      sizes = np.linalg.svd(exact[layer] - codes[layer], compute_uv=False)
      distance = np.linalg.norm(exact[layer] - sums[layer])
      assert distance == pytest.approx(np.linalg.norm(sizes[5:]), rel=1e-3)
      assert distance < np.linalg.norm(sizes)


@pytest.mark.long
def test_texts_weigh_the_channels_by_their_mean_square():
  model, coded = model_and_codes()
  tokens = texts()
  lora, params = residual_adapters(
    Lora(rank=4, targets=("q",)), model, coded, tokens
  )
  decoded = rj.models.with_float_weights(coded)
  merged = rj.models.with_float_weights(lora.merged(params, coded))
  exact, codes, sums = (
    weights_of(x, QUERIES)[0] for x in (model, decoded, merged)
  )
  channels = np.sqrt(np.mean(first_inputs(model, tokens) ** 2, (0, 1)))
  sizes = np.linalg.svd(channels[:, None] * (exact - codes), compute_uv=False)
  distance = np.linalg.norm(channels[:, None] * (exact - sums))
  assert distance == pytest.approx(np.linalg.norm(sizes[4:]), rel=1e-3)
  # Without texts another matrix is the nearest.
  _, plain = residual_adapters(Lora(rank=4, targets=("q",)), model, coded)
  others = rj.models.with_float_weights(lora.merged(plain, coded))
  error = exact - weights_of(others, QUERIES)[0]
  assert np.linalg.norm(channels[:, None] * error) > distance * 1.001


@pytest.mark.long
def test_adapters_of_full_rank_are_the_whole_error():
  """A rank above the smaller side of a map has factors of zeros."""
  model, coded = model_and_codes()
  tokens = texts()
  largest_error = lambda x: float(jnp.max(jnp.abs(x(tokens) - model(tokens))))
  of_codes = largest_error(coded)
  lora, params = residual_adapters(
    Lora(rank=40, targets=ALL), model, coded, tokens
  )
  assert largest_error(lora.merged(params, coded)) < 1e-4 < of_codes / 100


@pytest.mark.long
def test_a_mesh_makes_the_same_adapters():
  model, coded = model_and_codes()
  lora = Lora(rank=4, targets=ALL)
  wanted = residual_adapters(lora, model, coded, texts())
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  placed = rj.models.place(model, mesh, Rules(embed="seq"))
  codes = rj.models.with_coded_weights(placed, **CODES["nf4"])
  on_mesh = residual_adapters(lora, placed, codes, texts())
  assert on_mesh[0] == wanted[0]
  product = lambda part: np.einsum(
    "lir,lro->lio",
    np.reshape(part["a"], (2, -1, 4)),
    np.reshape(part["b"], (2, 4, -1)),
  )
  for path, part in wanted[1].items():
    np.testing.assert_allclose(
      product(on_mesh[1][path]), product(part), atol=1e-5
    )


def trained(lora, adapters, coded, **options):
  """Result, and reports, of two steps."""
  draw = np.random.default_rng(0)
  source = options.pop(
    "source",
    rj.data.Documents([draw.integers(0, 48, 30) for _ in range(20)]),
  )
  recipe = Recipe(
    stages=(Stage(steps=2, length=32, batch=2),),
    lora=lora,
    loop_config=LoopConfig(log_every=1),
    **options,
  )
  reports = []
  result = train(
    recipe,
    coded,
    Mixture([source]),
    adapters=adapters,
    report=lambda stage, report: reports.append(report),
  )
  return result, reports


@pytest.mark.long
def test_a_training_begins_with_them_and_its_folder_knows_the_codes(tmp_path):
  model, coded = model_and_codes()
  lora, adapters = residual_adapters(
    Lora(rank=32, targets=ALL), model, coded, texts()
  )
  result, reports = trained(lora, adapters, coded)
  # Of full rank they are the model of floats.
  _, floats = trained(Lora(rank=32, targets=ALL), None, model)
  assert reports[0].loss == pytest.approx(floats[0].loss, abs=1e-4)
  assert result.adapter[0] == lora
  assert not any(x.is_deleted() for x in jax.tree.leaves(adapters))
  rj.train.save_adapter(tmp_path, coded, *result.adapter)
  # PEFT reads the config, in which nothing is unusual.
  config = json.loads((tmp_path / "adapter_config.json").read_text())
  assert "over" not in config
  again, arrays = rj.train.load_adapter(tmp_path, coded)
  assert again.over == "nf4/16"
  assert jax.tree.all(
    jax.tree.map(np.array_equal, arrays, dict(result.adapter[1]))
  )
  int8 = rj.models.with_coded_weights(model, bits=8)
  for other_model, name in ((model, "floats"), (int8, "int8")):
    with pytest.raises(OptionError, match=f"nf4/16, for a model of {name}"):
      rj.train.load_adapter(tmp_path, other_model)
    with pytest.raises(OptionError, match="for a model of"):
      with_adapters(other_model, [(again, arrays)])
    with pytest.raises(OptionError, match="for a model of"):
      again.merged(arrays, other_model)
    with pytest.raises(OptionError, match="for a model of"):
      trained(again, arrays, other_model)


@pytest.mark.long
def test_preferences_are_learned_against_the_model_with_them(tmp_path):
  path = tmp_path / "pairs.jsonl"
  path.write_text(
    json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "five"})
  )
  config = CONFIG | {"vocab_size": 262}
  model = rj.models.create(config, seed=1)
  coded = rj.models.with_coded_weights(model, **CODES["nf4"])
  encoding = rj.data.ChatEncoding(tokenizer=rj.data.Bytes(), length=32)
  pairs = rj.data.PairDocuments(rj.data.read_pairs([path]), encoding)
  lora, adapters = residual_adapters(Lora(rank=8), model, coded)
  _, reports = trained(
    lora,
    adapters,
    coded,
    source=pairs,
    objective=rj.train.Objective(posttraining=rj.train.Dpo()),
  )
  assert reports[0].loss == pytest.approx(np.log(2), abs=1e-5)
  assert reports[0].means["reward_margin"] == pytest.approx(0, abs=1e-5)


def test_what_has_no_error_to_correct_is_refused():
  model, coded = model_and_codes()
  lora = Lora(rank=2)
  for arguments, error in (
    ((lora, model, model), "not coded from a map of floats"),
    ((lora, coded, coded), "not coded from a map of floats"),
    ((Lora(rank=2, new_tokens=1), model, coded), "new_tokens"),
    ((Lora(rank=2, alpha=0.0), model, coded), "alpha"),
  ):
    with pytest.raises(OptionError, match=error):
      residual_adapters(*arguments)
  with pytest.raises(ShapeError, match="tokens"):
    residual_adapters(lora, model, coded, np.zeros((0, 5), np.int32))
  over, adapters = residual_adapters(lora, model, coded)
  for settings, first, error in (
    (over, None, "None for adapters that correct codes"),
    (None, adapters, "some without lora"),
    (Lora(rank=3), adapters, "of rank 3"),
  ):
    with pytest.raises(OptionError, match=error):
      trained(settings, first, coded if settings else model)
  with pytest.raises(OptionError, match="begin at zero"):
    rj.rl.RewardRecipe(
      steps=1,
      rewards=rj.rl.RewardConfig(functions=lambda prompt, answer, example: 1.0),
      lora=over,
    )

"""Adapters as folders of PEFT: what is written, read and refused."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ringjax as rj
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  ConfigError,
  OptionError,
)
from ringjax.train import Lora, load_adapter, save_adapter
from tests import checkpoints

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def drawn(model, how, seed=0):
  """Adapters with numbers in B, too."""
  params = how.start(model, seed=seed)
  draw = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: draw.normal(size=x.shape).astype(np.float32), params
  )


def same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "targets"),
  [
    ("llama2", ("q", "k", "v", "o", "gate", "up", "down")),
    ("gemma3_text", ("q", "v")),
    # Its tensors have their axes the other way round.
    ("gpt2", ("o",)),
  ],
)
def test_what_is_written_is_what_peft_adds(name, targets, tmp_path):
  """W + lora_alpha / r B A is the merged model's, and all is read again."""
  model = rj.models.create(checkpoints.config(name), seed=1)
  how = Lora(rank=3, alpha=5.0, targets=targets)
  params = drawn(model, how)
  save_adapter(tmp_path / "a", model, how, params)
  config = json.loads((tmp_path / "a" / CONFIG).read_text())
  pairs = load_file(tmp_path / "a" / TENSORS)
  rj.models.save(model, tmp_path / "before")
  rj.models.save(how.merged(params, model), tmp_path / "after")
  before = load_file(tmp_path / "before" / "model.safetensors")
  after = load_file(tmp_path / "after" / "model.safetensors")
  changed = {k for k in before if not np.array_equal(before[k], after[k])}
  # PEFT takes the modules that end with one of these, and no others.
  ends = tuple(f".{x}" for x in config["target_modules"])
  linear = {k for k, x in before.items() if x.ndim == 2 and ".weight" in k}
  assert changed == {
    k for k in linear if k.removesuffix(".weight").endswith(ends)
  }
  scale = config["lora_alpha"] / config["r"]
  start = "base_model.model."
  assert {k.rpartition(".lora_")[0] for k in pairs} == {
    start + k.removesuffix(".weight") for k in changed
  }
  for name in changed:
    module = name.removesuffix(".weight")
    a = pairs[f"{start}{module}.lora_A.weight"]
    b = pairs[f"{start}{module}.lora_B.weight"]
    assert a.shape[0] == b.shape[1] == 3
    delta = scale * (b @ a)
    delta = delta.T if config["fan_in_fan_out"] else delta
    np.testing.assert_allclose(after[name], before[name] + delta, atol=1e-4)
  again, arrays = load_adapter(tmp_path / "a", model)
  assert again == Lora(rank=3, alpha=5.0, targets=tuple(sorted(targets)))
  same(arrays, params)


def test_maps_of_one_tensor_share_an_adapter(tmp_path):
  """Phi 3's qkv_proj: A for all three, of B some rows each."""
  model = rj.models.create(checkpoints.config("phi3"), seed=1)
  how = Lora(rank=2, targets=("o",))
  save_adapter(tmp_path, model, how, drawn(model, how))
  with pytest.raises(OptionError, match=r"attention\.q, which is a part of"):
    save_adapter(
      tmp_path / "q", model, Lora(), drawn(model, Lora(targets=("q",)))
    )
  rj.models.save(model, tmp_path / "before")
  before = load_file(tmp_path / "before" / "model.safetensors")
  name = "model.layers.1.self_attn.qkv_proj"
  rows, columns = before[f"{name}.weight"].shape
  draw = np.random.default_rng(3)
  a = draw.normal(size=(2, columns)).astype(np.float32)
  b = draw.normal(size=(rows, 2)).astype(np.float32)
  start = f"base_model.model.{name}.lora_"
  save_file({f"{start}A.weight": a, f"{start}B.weight": b}, tmp_path / TENSORS)
  how, params = load_adapter(tmp_path, model)
  assert how.targets == ("k", "q", "v")
  rj.models.save(how.merged(params, model), tmp_path / "after")
  after = load_file(tmp_path / "after" / "model.safetensors")
  for key, x in before.items():
    wanted = x + how.alpha / 2 * (b @ a) if key == f"{name}.weight" else x
    np.testing.assert_allclose(after[key], wanted, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ernie4_5_moe", "glm4_moe"])
def test_adapters_of_a_layer_that_is_not_loaded_are_left_out(name, tmp_path):
  config = checkpoints.config(name)
  predicting = rj.models.create(config, seed=1, predict_layers=True)
  how = Lora(rank=3, targets=("q", "v"))
  params = drawn(predicting, how)
  save_adapter(tmp_path / "a", predicting, how, params)
  same(load_adapter(tmp_path / "a", predicting)[1], params)
  model = rj.models.abstract(config)
  _, without = load_adapter(tmp_path / "a", model)
  assert set(without) == set(how.start(rj.models.create(config)))
  same(without, {path: params[path] for path in without})


@pytest.fixture
def folder(tmp_path):
  model = rj.models.create(checkpoints.config("llama2"), seed=1)
  how = Lora(rank=4, alpha=8.0, targets=("q", "v"))
  save_adapter(tmp_path, model, how, drawn(model, how))
  return tmp_path, model


def edited(folder, **entries):
  config = json.loads((folder / CONFIG).read_text()) | entries
  (folder / CONFIG).write_text(json.dumps(config))


def test_a_scale_by_the_root_of_the_rank(folder):
  place, model = folder
  edited(place, use_rslora=True)
  how, _ = load_adapter(place, model)
  assert how.alpha / how.rank == pytest.approx(8 / math.sqrt(4))


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("use_dora", True),
    ("rank_pattern", {"q_proj": 8}),
    ("alpha_pattern", {"q_proj": 8}),
    ("modules_to_save", ["lm_head"]),
    ("bias", "all"),
    ("lora_bias", True),
    ("peft_type", "LOHA"),
    ("init_lora_weights", "pissa"),
    ("layer_replication", [[0, 2]]),
    ("r", 0),
  ],
)
def test_what_is_no_sum_is_refused(name, value, folder):
  place, model = folder
  # What is not asked for is written as null.
  edited(place, use_dora=False, rank_pattern={}, modules_to_save=None)
  load_adapter(place, model)
  edited(place, **{name: value})
  with pytest.raises(ConfigError, match=f"adapter_config.json: {name}"):
    load_adapter(place, model)


def test_an_adapter_of_another_model(folder):
  place, model = folder
  config = checkpoints.config("llama2")
  wide = rj.models.create(config | {"hidden_size": 2 * config["hidden_size"]})
  with pytest.raises(CheckpointMismatchError, match=r"q_proj: got \{'A'"):
    load_adapter(place, wide)
  short = rj.models.create(config | {"num_hidden_layers": 1})
  with pytest.raises(CheckpointMismatchError, match=r"layers\.1"):
    load_adapter(place, short)
  edited(place, r=2)
  with pytest.raises(CheckpointMismatchError, match="q_proj"):
    load_adapter(place, model)
  (place / TENSORS).unlink()
  with pytest.raises(CheckpointFormatError, match="run code"):
    load_adapter(place, model)
  with pytest.raises(CheckpointFormatError, match=CONFIG):
    load_adapter(place / "none", model)


def test_an_adapter_is_not_replaced_unasked(folder):
  place, model = folder
  how = Lora(rank=4, targets=("q",))
  with pytest.raises(OptionError, match="which has an adapter"):
    save_adapter(place, model, how, drawn(model, how))
  save_adapter(place, model, how, drawn(model, how), overwrite=True)
  assert load_adapter(place, model)[0].targets == ("q",)
  more = Lora(rank=4, new_tokens=2)
  with pytest.raises(OptionError, match="new tokens"):
    save_adapter(place / "b", model, more, more.start(model))


@pytest.mark.long
def test_a_trained_adapter_is_in_the_result_and_an_engine_takes_it(tmp_path):
  model = rj.models.create(checkpoints.config("llama2"), seed=1)
  documents = rj.data.Documents([np.arange(1, 40, dtype=np.int32)] * 4)
  recipe = rj.train.Recipe(
    stages=(rj.train.Stage(steps=2, length=16, batch=2),),
    optimizer=rj.train.Optimizer(learning_rate=0.1),
    lora=Lora(rank=2),
  )
  done = rj.train.train(recipe, model, rj.train.Mixture([documents]))
  how, params = done.adapter
  save_adapter(tmp_path, model, how, params)
  pair = load_adapter(tmp_path, model)
  same(pair[1], jax.device_get(params))
  engine = rj.serve.Engine(
    model, adapters={"tuned": pair}, capacity=128, page=16, piece=16
  )
  prompt = [5, 6, 7]
  handle = engine.submit(
    rj.serve.Request(prompt=prompt, max_new_tokens=4, adapter="tuned")
  )
  engine.run()
  merged = rj.infer.generate(done.model, [prompt], max_new_tokens=4)
  answer = handle.result().tokens
  np.testing.assert_array_equal(answer, np.asarray(merged.tokens)[0])

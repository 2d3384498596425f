"""Gemma 3n and 4, Mistral Large 4: layers that read others' keys, and ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax.errors import ConfigError, OptionError
from ringjax.infer.layerwise import LayerPrograms
from ringjax.models import cepe
from ringjax.models.longspec import check_target
from ringjax.models.partition.tensor_shares import SharedModel
from ringjax.nn.layer_inputs import LayerInputs
from ringjax.nn.linear import Norm
from ringjax.ops.rope import Proportional, Rope
from tests import checkpoints
from tests.helpers import check_unequal_rows

NAMES = ("gemma3n", "gemma4")
OTHERS = {
  "gemma3n": {"vision_config": {}, "audio_config": {}},
  "gemma4": {"vision_config": {}, "audio_config": None},
}


def edited(name, **changes):
  return checkpoints.config(name) | changes


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_keeps_nothing_for_layers_that_read(name):
  model = rj.models.abstract(checkpoints.config(name))
  layers = [layer.attention for layer in model.config.layers]
  assert [a.reads for a in layers] == [False] * 3 + [True] * 2
  # The last of each kind before is read.
  groups = [None, "sliding_attention", "full_attention"]
  assert [a.group for a in layers] == [*groups, *groups[1:]]
  assert sum(kind.layers for kind in model.kinds) == 3
  spec = model.init_cache_spec(1, 8)
  assert len(spec.slots) == len(model.kinds)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_published_folders(name, tmp_path):
  """Have maps that nothing reads, and a text model inside of another one."""
  config, arrays = checkpoints.config(name), checkpoints.tensors(name)
  for key in list(arrays):
    if ".layers.0.self_attn.k_" in key or ".layers.0.self_attn.v_" in key:
      # Of other numbers, which nobody may read.
      unread = key.replace(".layers.0.", ".layers.3.")
      arrays[unread] = np.zeros_like(arrays[key])
  text = {k: v for k, v in config.items() if k != "architectures"}
  outer = {"model_type": name, "text_config": text, **OTHERS[name]}
  where = lambda key: key.replace("model.", "model.language_model.", 1)
  inside = {where(key): x for key, x in arrays.items()}
  inside["model.vision_tower.x"] = np.zeros((2, 2), np.float32)
  want = rj.models.load(checkpoints.write(name, tmp_path / "plain"))
  for number, (tensors, said) in enumerate([(arrays, config), (inside, outer)]):
    folder = tmp_path / str(number)
    found = rj.models.load(checkpoints.write_folder(tensors, said, folder))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
    for x, y in pairs:
      np.testing.assert_array_equal(x, y)


def test_a_file_that_leaves_out_what_is_the_default():
  config = edited("gemma4", rope_parameters=None)
  layers = rj.models.read_config(config)[0].layers
  slides, full = layers[0].attention, layers[-1].attention
  assert slides.rope == Rope(theta=10000.0, dims=16)
  # A quarter of 24 numbers, 3 pairs of 12.
  turning = Proportional(turning=3)
  assert full.rope == Rope(theta=1000000.0, dims=24, scaling=turning)
  # The form of published files, without a list of layers.
  given = config.pop("per_layer_config")
  wide = given["2"]
  said = config | {
    "global_head_dim": wide["head_dim"],
    "num_global_key_value_heads": wide["num_key_value_heads"],
  }
  assert rj.models.read_config(said)[0].layers == layers


def test_ids_that_the_second_embedding_does_not_have():
  """Count as the first."""
  norm = Norm(eps=1e-3)
  spec = LayerInputs(vocab=5, layers=2, width=3, act="gelu", norm=norm)
  table = spec.build(nnx.Rngs(0), 4)
  x = jnp.ones((1, 3, 4), jnp.float32)
  found = table(jnp.asarray([[0, 5, 4]], jnp.int32), x, 1)
  np.testing.assert_array_equal(found[0, 0], found[0, 1])
  assert np.abs(np.asarray(found[0, 0] - found[0, 2])).max() > 0.1
  other = table(jnp.asarray([[0, 5, 4]], jnp.int32), x, 0)
  assert np.abs(np.asarray(found - other)).max() > 0.1


@pytest.mark.parametrize("name", [*NAMES, "mistral_large4"])
def test_what_cannot_share_says_so(name, tmp_path):
  model = rj.models.abstract(checkpoints.config(name))
  with pytest.raises(ConfigError, match=f"{name}.*read"):
    LayerPrograms(model)
  with pytest.raises(OptionError, match="reads another's keys|is Latent"):
    check_target(model)
  with pytest.raises(OptionError, match=f"{name}.*(read|of Latent)"):
    cepe.with_encoder(model)
  with pytest.raises(OptionError, match=f"placement.*{name}"):
    model.init_cache(1, 8, placement="host")
  with pytest.raises(ConfigError, match=f"{name}.*layer"):
    SharedModel(checkpoints.write(name, tmp_path), (1, 1))


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("gemma4", "num_kv_shared_layers", 5),
    ("gemma4", "num_kv_shared_layers", 4),
    ("gemma4", "per_layer_config", {"2": {"head_dim": 24}}),
    ("gemma4", "per_layer_config", {"2": {"heads": 3}}),
    ("gemma4", "per_layer_config", {"9": {}}),
    ("gemma4", "use_bidirectional_attention", "all"),
    ("gemma4", "layer_types", ["linear_attention"] * 5),
    ("gemma4_moe", "num_experts", None),
    ("gemma4_moe", "top_k_experts", 6),
    ("gemma4", "hidden_size_per_layer_input", -1),
    ("gemma3n", "intermediate_size", [90, 80]),
    ("gemma3n", "activation_sparsity_pattern", [0.5] * 4 + [1.0]),
    ("gemma3n", "activation_sparsity_pattern", 0.5),
    ("gemma3n", "altup_active_idx", 3),
    ("gemma3n", "altup_num_inputs", 1),
    ("gemma3n", "hidden_size_per_layer_input", 0),
    ("gemma3n", "laurel_rank", 0),
  ],
)
def test_a_value_that_cannot_be(name, key, value):
  with pytest.raises(ConfigError, match=key):
    rj.models.read_config(edited(name, **{key: value}))


@pytest.mark.slow
def test_layers_that_read_in_a_loop(tmp_path):
  """The numbers of layers and the keys are those of layers one by one."""
  types = ["sliding_attention", "full_attention"]
  config = edited(
    "gemma4",
    num_hidden_layers=8,
    layer_types=[*types, *["sliding_attention"] * 3, *types, types[1]],
    num_kv_shared_layers=6,
    per_layer_config=None,
    global_head_dim=24,
    num_global_key_value_heads=1,
  )
  model = rj.models.create(config)
  assert any(run.repeats > 2 for run in model.stack.runs)
  rj.models.save(model, tmp_path)
  flat = rj.models.load(tmp_path, scan=False)
  tokens = checkpoints.expected("gemma4").tokens
  np.testing.assert_allclose(model(tokens), flat(tokens), atol=2e-5)


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("gemma4", "dense"),
    pytest.param("gemma3n", "int8", marks=pytest.mark.slow),
    pytest.param("gemma4", "windowed", marks=pytest.mark.slow),
    pytest.param("mistral_large4", "int8", marks=pytest.mark.slow),
  ],
)
def test_rows_of_unequal_lengths_over_shards(tmp_path, name, kind):
  check_unequal_rows(tmp_path, name, cache_kind=kind, prefill="ring")


@pytest.mark.slow
def test_gradients_do_not_ask_what_is_kept(tmp_path):
  model = rj.models.load(checkpoints.write("gemma4", tmp_path))
  tokens = jnp.asarray(checkpoints.expected("gemma4").tokens[:, :12])
  nothing = jax.checkpoint_policies.nothing_saveable

  grads = [
    jax.jit(
      jax.grad(
        lambda m, attend=attend: jnp.mean(jnp.square(m(tokens, attend=attend)))
      )
    )(model)
    for attend in (
      rj.models.ContextParallel(),
      rj.models.ContextParallel(remat=nothing),
    )
  ]
  for x, y in zip(*map(jax.tree.leaves, grads), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6 + 1e-5 * np.abs(y).max())

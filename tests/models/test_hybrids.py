"""Hybrids of attention with state spaces, convolutions and delta rules: what
their configs say, and rows of several documents on many devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import ringjax as rj
from ringjax import models
from ringjax.errors import ConfigError, OptionError
from ringjax.infer.prefill import PrefillConfig
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.parallel.layout import Striped, Uneven, Zigzag
from tests import checkpoints
from tests.helpers import make_mesh

HYBRIDS = (
  "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "jamba",
  "kimi_linear", "lfm2",
  "minimax", "nemotron_h", "olmo_hybrid", "recurrent_gemma", "zamba2",
)  # fmt: skip


def read(config, **changes):
  return models.read_config({**config, **changes})[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  root = tmp_path_factory.mktemp("hybrids")
  return {n: checkpoints.write(n, root / n) for n in HYBRIDS}


# ---------------------------------------------------------------------------
# Configs
# ---------------------------------------------------------------------------


def test_letters_of_nemotron_h():
  config = checkpoints.config("nemotron_h")
  kinds = config.pop("layers_block_type")
  letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-",
             "moe": "E"}  # fmt: skip
  said = "".join(letters[kind] for kind in kinds)
  want = read(config, layers_block_type=kinds)
  assert read(config, hybrid_override_pattern=said) == want
  older = [k.replace("linear_", "").replace("full_", "") for k in kinds]
  older[0] = older[2] = "mamba"
  assert read(config, layers_block_type=older) == want
  # A mixer and the feedforward behind it are one layer.
  assert len(want.layers) == 3 < len(kinds)


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("nemotron_h", "layers_block_type", ["mlp", "linear_attention"]),
    ("nemotron_h", "layers_block_type", ["linear_attention", "mlp", "moe"]),
    ("nemotron_h", "layers_block_type", ["linear_attention", "conv"]),
    ("nemotron_h", "num_hidden_layers", 4),
    ("nemotron_h", "time_step_limit", [0.0, 0.5]),
    ("nemotron_h", "sliding_window", 9),
    ("nemotron_h", "mlp_bias", True),
    ("nemotron_h", "mamba_num_heads", 5),
    ("bamba", "mamba_n_heads", 7),
    ("bamba", "hidden_act", "gelu"),
    ("falcon_h1", "ssm_multipliers", [1.0, 1.0]),
    ("falcon_h1", "mlp_multipliers", [1.0, -1.0]),
    ("falcon_h1", "projectors_bias", True),
    ("falcon_h1", "mamba_use_mlp", False),
    ("jamba", "attn_layer_offset", 3),
    ("jamba", "mamba_dt_rank", "large"),
    ("kimi_linear", "layer_types", ["linear_attention", "conv", "conv"]),
    ("kimi_linear", "mlp_layer_types", ["dense"]),
    ("kimi_linear", "q_lora_rank", 8),
    ("kimi_linear", "num_key_value_heads", 2),
    ("lfm2", "layer_types", ["conv", "full_attention"]),
    ("lfm2", "conv_L_cache", 1),
    ("lfm2", "conv_dim", 7),
    ("minimax", "layer_types", ["full_attention", "conv"]),
    ("minimax", "layer_types", ["sliding_attention"] * 3),
    ("minimax", "mlp_beta_factor", "large"),
    ("recurrent_gemma", "block_types", ["recurrent", "conv"]),
    ("recurrent_gemma", "block_types", []),
    ("recurrent_gemma", "lru_width", 42),
    ("recurrent_gemma", "head_dim", 16),
    ("bailing_hybrid", "layer_types", ["linear_attention", "conv", "conv"]),
    ("bailing_hybrid", "kda_lower_bound", 0.5),
    ("bailing_hybrid", "q_lora_rank", 8),
    ("bailing_hybrid", "num_expert_group", 4),
    ("zamba2", "layers_block_type", ["mamba"] * 3),
    ("zamba2", "layers_block_type", ["mamba", "attention", "hybrid"]),
    ("zamba2", "hybrid_layer_ids", [1]),
    ("zamba2", "tie_word_embeddings", False),
    ("zamba2", "use_long_context", True),
    ("zamba2", "num_key_value_heads", 2),
    ("olmo_hybrid", "layer_types", ["linear_attention"] * 3),
    ("olmo_hybrid", "layer_types", ["sliding_attention"] * 3),
    ("olmo_hybrid", "linear_num_value_heads", 3),
    ("olmo_hybrid", "hidden_act", "gelu"),
  ],
)
def test_what_a_config_may_not_say(name, key, value):
  with pytest.raises(ConfigError, match=key):
    read(checkpoints.config(name), **{key: value})


def test_older_words_for_the_same():
  config = checkpoints.config("kimi_linear")
  want = read(config)
  del config["layer_types"], config["mlp_layer_types"]
  sizes = {"num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 4}
  part = {"full_attn_layers": [2], "kda_layers": [1, 3], **sizes}
  for key in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
    del config[key]
  more = {"first_k_dense_replace": 1, "linear_attn_config": part}
  assert read(config, **more) == want
  with pytest.raises(ConfigError, match="full_attn_layers"):
    read(config, linear_attn_config={**part, "kda_layers": [1, 2]})
  config = checkpoints.config("lfm2")
  want = read(config)
  del config["layer_types"]
  said = {"full_attn_idxs": [1], "block_ff_dim": 90, "num_heads": 4}
  config["intermediate_size"] = 1
  assert read(config, **said) == want


@pytest.mark.parametrize(
  ("preset", "beside"),
  [
    (
      "nemotron-3-nano-30b",
      {"attention_head_dim": 128, "num_query_groups": 2, "rope_theta": 1e4,
       "expand": 2, "num_hidden_layers": 52, "partial_rotary_factor": 1.0,
       "num_logits_to_keep": 1, "mamba_proj_bias": False},
    ),
    (
      "lfm2-1.2b",
      {"intermediate_size": 8192, "block_dim": 2048, "conv_dim": 2048,
       "conv_dim_out": 2048, "head_dim": 64, "num_heads": 32,
       "block_norm_eps": 1e-5, "block_mlp_init_scale": 1.0,
       "block_out_init_scale": 1.0, "block_use_swiglu": True,
       "block_use_xavier_init": True, "conv_use_xavier_init": True,
       "use_pos_enc": True, "conv_bias": False},
    ),
    (
      "kimi-linear-48b",
      {"first_k_dense_replace": 1, "head_dim": 72, "mla_use_nope": True,
       "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
       "rope_scaling": None, "rope_theta": 1e4, "use_grouped_topk": True,
       "num_nextn_predict_layers": 0},
    ),
    (
      "jamba-mini",
      {"expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4,
       "attn_layer_offset": 4, "attn_layer_period": 8, "mamba_expand": 2,
       "num_logits_to_keep": 1, "sliding_window": None,
       "use_mamba_kernels": True, "tie_word_embeddings": False},
    ),
    (
      "mamba-2.8b",
      {"d_inner": 5120, "d_model": 2560, "intermediate_size": 5120,
       "n_layer": 64, "fused_add_norm": True, "rms_norm": True, "ssm_cfg": {},
       "pad_vocab_size_multiple": 8, "hidden_act": "silu", "use_bias": False,
       "initializer_range": 0.1, "rescale_prenorm_residual": False,
       "residual_in_fp32": True, "time_step_floor": 1e-4, "use_cache": True,
       "time_step_init_scheme": "random", "time_step_max": 0.1,
       "time_step_min": 0.001, "time_step_scale": 1.0, "use_conv_bias": True},
    ),
    (
      "falcon-mamba-7b",
      # A factor that is not that of its channels.
      {"expand": 16, "use_mambapy": False, "use_bias": False,
       "use_falcon_mambapy": False, "use_associative_scan": True,
       "use_conv_bias": True, "hidden_act": "silu", "residual_in_fp32": True},
    ),
    (
      "falcon-h1-0.5b",
      {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "mamba_expand": 2,
       "mamba_rms_norm": False, "projectors_bias": False,
       "mamba_chunk_size": 128, "attn_layer_indices": None},
    ),
  ],
)  # fmt: skip
def test_what_published_files_say_beside(preset, beside):
  config = models.PRESETS[preset]
  assert read(config, **beside) == read(config)


def test_a_base_of_null_is_no_rotation():
  """OLMo Hybrid's published files say so, in either place."""
  config = checkpoints.config("olmo_hybrid")
  ropes = lambda config: {x for y in config.layers for x in y.attention.ropes}
  assert len(ropes(read(config))) == 1
  none = {"rope_type": "default", "rope_theta": None}
  without = read(config, rope_parameters=none)
  assert ropes(without) == set()
  assert read(config, rope_parameters=None, rope_theta=None) == without
  assert read(config, rope_parameters=None) == read(config)


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


def close(got, want, atol=5e-5):
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_sharded_prompt_is_read_in_stripes_once_it_is_long(name):
  """ "auto" counts bytes of recurrent layers, of which all have some."""
  model = models.abstract(checkpoints.config(name))
  mesh = make_mesh(2, "auto")
  of = lambda tokens: (
    PrefillConfig().plan(tokens, model, mesh, "seq", room=tokens).name
  )
  assert of(64) == "ring"
  # RecurrentGemma's attention has a window, so that there is little to level.
  assert of(1 << 24) == ("ring" if name == "recurrent_gemma" else "striped")


@pytest.mark.long
@pytest.mark.parametrize(
  "name",
  [
    pytest.param("deepseek_v4", marks=pytest.mark.slow),
    "falcon_h1",
    "kimi_linear",
    pytest.param("jamba", marks=pytest.mark.slow),
    pytest.param("lfm2", marks=pytest.mark.slow),
  ],
)
def test_documents_and_padding(folders, name):
  """Two documents and padding in a row on shards are what they are alone."""
  expected, attend = checkpoints.expected(name), ContextParallel(
    mesh=make_mesh(8, "auto"), axis="seq"
  )  # fmt: skip
  model = models.load(folders[name], mesh=attend.mesh)
  one, two = expected.tokens[:1, :9], expected.tokens[1:2, :12]
  packed = np.concatenate([one, two, np.full((1, 3), 5, np.int32)], 1)
  seg = np.repeat(np.int32([[1, 2, 0]]), [9, 12, 3], 1)
  pos = np.concatenate([np.arange(9), np.arange(12), np.zeros(3)])
  pos = pos.astype(np.int32)[None]
  got = model(packed, positions=pos, segment_ids=seg, attend=attend)
  close(got[:, :9], expected.logits[:1, :9])
  close(got[:, 9:21], expected.logits[1:2, :12])
  for layout in (Striped(), Zigzag()):
    put = lambda x, layout=layout: layout.permute(x, shards=8)
    striped = model(
      put(packed),
      positions=put(pos),
      segment_ids=put(seg),
      attend=ContextParallel(mesh=attend.mesh, axis="seq", layout=layout),
    )
    close(layout.restore(np.asarray(striped), shards=8)[:, :21], got[:, :21])
  with pytest.raises(OptionError, match=r"Contiguous\(\)"):
    model(packed, attend=ContextParallel(
      mesh=attend.mesh, axis="seq", layout=Uneven((3,) * 8)
    ))  # fmt: skip


@pytest.mark.long
@pytest.mark.long_cases(1)
@pytest.mark.parametrize("name", HYBRIDS[::-1])
def test_rows_of_two_lengths_and_a_second_turn(folders, name):
  """A row is what it is alone, and a turn what it is in one text."""
  model, prompt = models.load(folders[name]), checkpoints.expected(name).prompt
  rows = [prompt[0], prompt[1, :17]]
  options = {"max_new_tokens": 6}
  together = np.asarray(rj.infer.generate(model, rows, **options))
  for row, answer in zip(rows, together, strict=True):
    alone = rj.infer.generate(model, row[None], **options)
    np.testing.assert_array_equal(np.asarray(alone)[0], answer)
  session = rj.infer.Session(model, 64)
  first, second = rows[0][None, :9], rows[0][None, 9:]
  answer = rj.infer.generate(model, first, cache=session, **options)
  got = rj.infer.generate(model, second, cache=session, **options)
  text = np.concatenate([first, np.asarray(answer), second], 1)
  want = rj.infer.generate(model, text, **options)
  np.testing.assert_array_equal(got, want)
  drafted = rj.infer.generate(model, text, speculate="lookup", **options)
  np.testing.assert_array_equal(drafted, want)


@pytest.mark.long
def test_two_mixers_are_one_layer(folders):
  """A pyramid of budgets is over layers, however many mixers each has."""
  model = models.load(folders["falcon_h1"])
  layers = len(model.config.layers)
  cache = model.init_cache(1, 64, kind="pyramidkv")
  assert len(cache.positions(0)) == layers
  assert sorted(n for kept in model.kinds for n in kept.which) == [
    n for layer in range(layers) for n in (layer, layer)
  ]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_data_and_model_axes(folders, name):
  kinds = (AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"), axis_types=kinds)
  model = models.load(folders[name], mesh=mesh)
  expected = checkpoints.expected(name)
  attend = ContextParallel(mesh=mesh, axis="seq")
  close(model(expected.tokens, attend=attend), expected.logits)
  cache = model.init_cache(2, 40, sharding=attend)
  _, cache = model(expected.tokens[:, :8], cache=cache, attend=attend)
  got, _ = model(
    expected.tokens[:, 8:9],
    positions=np.full((1, 1), 8, np.int32),
    cache=cache,
    attend=CachedAttention(mesh=mesh, axis="seq"),
  )
  close(got[:, 0], expected.logits[:, 8])


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_over_shards(folders, name):
  attend = ContextParallel(mesh=make_mesh(4, "auto"), axis="seq")
  tokens = checkpoints.expected(name).tokens

  def gradients(model, attend):
    def loss(model):
      logits = model(tokens, attend=attend)
      return jnp.mean(jnp.square(logits - jnp.roll(logits, 1, -1)))

    return jax.tree.leaves(jax.jit(jax.grad(loss))(model))

  model = models.load(folders[name])
  want = gradients(model, ContextParallel())
  sharded = jax.device_put(model, NamedSharding(attend.mesh, P()))
  for a, b in zip(gradients(sharded, attend), want, strict=True):
    scale = max(1e-3, float(jnp.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_caches_of_other_kinds(folders, name):
  """Windows, bytes, tiers: what they do to keys is nothing to states."""
  model, expected = models.load(folders[name]), checkpoints.expected(name)
  for kind in ("windowed", "int8"):
    made = rj.infer.generate(
      model, expected.prompt, max_new_tokens=8, cache_kind=kind
    )
    exact = np.mean(np.asarray(made) == expected.greedy[:, :8])
    assert exact == 1 if kind == "windowed" else exact > 0.5


@pytest.mark.long
@pytest.mark.parametrize("bare", ["input_layernorm", "feedforward_layer_norm"])
def test_other_names_of_late_and_early_norms(folders, tmp_path, bare):
  """transformers reads and writes OLMo Hybrid's norms under several names."""
  name = "olmo_hybrid"
  others = {
    "input_layernorm": ("0.attention_layer_norm", "0.input_layernorm"),
    "feedforward_layer_norm": (
      "1.post_attention_layernorm",
      "1.feedforward_layer_norm",
    ),
  }
  arrays = checkpoints.tensors(name)
  renamed = {key.replace(*others[bare]): x for key, x in arrays.items()}
  assert set(renamed) != set(arrays)
  checkpoints.write_folder(renamed, checkpoints.config(name), tmp_path)
  models_read = [models.load(folder) for folder in (tmp_path, folders[name])]
  for a, b in zip(*map(jax.tree.leaves, models_read), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_layers_use_shared_blocks_in_turn(folders, tmp_path):
  """A block is in the first layer that uses it, with maps for each use."""
  config = checkpoints.config("zamba2") | {
    "num_hidden_layers": 3,
    "layers_block_type": ["hybrid"] * 3,
    "num_mem_blocks": 2,
  }
  del config["hybrid_layer_ids"]
  model = models.create(config, dtype=jnp.float32)
  models.save(model, tmp_path)
  part = ".shared_transformer.feed_forward.gate_up_proj_adapter_list."
  names = sorted(x for x in load_file(tmp_path / "model.safetensors"))
  assert [x for x in names if part in x and x.endswith("0.weight")] == [
    f"model.layers.{layer}{part}{use}.0.weight"
    for layer, use in ((0, 0), (0, 2), (1, 1))
  ]
  tokens = np.arange(20)[None]
  np.testing.assert_array_equal(models.load(tmp_path)(tokens), model(tokens))
  with pytest.raises(OptionError, match="share further weights"):
    models.load_layers(tmp_path, 0, 2)


@pytest.mark.long
def test_decays_of_a_new_model_depend_on_the_layer(tmp_path):
  """MiniMax-01's follow from the config, and tables of them are not saved."""
  config = checkpoints.config("minimax")
  models.save(models.create(config), tmp_path)
  tensors = load_file(tmp_path / "model.safetensors")
  names = [x for x in tensors if x.endswith(checkpoints.DECAYS)]
  assert names == [f"model.layers.{n}.self_attn.slope_rate" for n in range(2)]
  for name in names:
    want = checkpoints.decay(name, config)
    np.testing.assert_allclose(tensors[name], want, rtol=1e-6)


@pytest.mark.long
def test_published_names_of_a_plain_feedforward(tmp_path):
  """transformers saves Kimi's under a name that its authors do not use."""
  name = "kimi_linear"
  arrays = checkpoints.tensors(name)
  plain = (
    ".block_sparse_moe.gate_proj",
    ".block_sparse_moe.up_proj",
    (".block_sparse_moe.down_proj"),
  )
  renamed = {
    key.replace(".block_sparse_moe.", ".mlp.")
    if any(part in key for part in plain)
    else key: x
    for key, x in arrays.items()
  }
  assert set(renamed) != set(arrays)
  folder = tmp_path / "published"
  checkpoints.write_folder(renamed, checkpoints.config(name), folder)
  made = models.load(folder)
  same = models.load(checkpoints.write(name, tmp_path / "saved"))
  for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(same), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("minimax", "rotary_dim", 4),
    (
      "recurrent_gemma",
      "rope_parameters",
      {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    ),
  ],
)
def test_rotations_that_transformers_does_not_have_are_refused(
  name, key, value
):
  with pytest.raises(ConfigError, match=key):
    models.abstract(checkpoints.config(name) | {key: value})

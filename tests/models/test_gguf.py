"""GGUF files: their models are those of Hugging Face folders, or errors."""

import dataclasses
import struct
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import ringjax as rj
from launch import serve, train
from launch.serving import cluster_roles
from launch.shared import common
from ringjax.data.gguf.gguf_file import GgufTensor, open_gguf
from ringjax.data.gguf.gguf_tokenizer import tokenizer_files
from ringjax.models.gguf.architectures import config_of
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.paths import as_path, upload_folder
from ringjax.serve.prefix.stage_pages import weight_sums, whole_digest
from ringjax.serve.prefix.store_link import weights_digest
from tests import object_servers

_SIZES = dict(
  vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
_RMS = dict(rms_norm_eps=1e-5)
_GEMMA = _RMS | dict(
  head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
  hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
)  # fmt: skip
_GEMMA4 = _RMS | dict(
  hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
  rope_parameters=dict(
    full_attention=dict(
      rope_type="proportional", rope_theta=300.0, partial_rotary_factor=0.25,
    ),
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
  ),
)  # fmt: skip
# By GGUF's name: the config of a small model.
CASES = {
  "llama": dict(model_type="llama", head_dim=8, **_RMS),
  "qwen2": dict(model_type="qwen2", **_RMS),
  "qwen3": dict(model_type="qwen3", head_dim=16, **_RMS),
  "qwen3moe": dict(
    model_type="qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, norm_topk_prob=True, **_RMS,
  ),
  "gemma2": dict(
    model_type="gemma2", attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0, **_GEMMA,
  ),
  "gemma3": dict(
    model_type="gemma3_text", sliding_window_pattern=6,
    rope_local_base_freq=10_000.0, **_GEMMA,
  ),
  "gemma4": dict(
    model_type="gemma4_text", num_hidden_layers=4, head_dim=8,
    global_head_dim=16, sliding_window=8, num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_global_key_value_heads=1, attention_k_eq_v=True,
    use_double_wide_mlp=True, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=64, final_logit_softcapping=30.0, **_GEMMA4,
  ),
  "gemma4-mixture": dict(
    model_type="gemma4_text", head_dim=8, global_head_dim=16,
    sliding_window=8, num_kv_shared_layers=0,
    layer_types=["sliding_attention", "full_attention"],
    hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4,
    top_k_experts=2, moe_intermediate_size=32, **_GEMMA4,
  ),
  "phi3": dict(model_type="phi3", pad_token_id=0, **_RMS),
  "starcoder2": dict(
    model_type="starcoder2", norm_epsilon=1e-5, use_bias=True,
    hidden_act="gelu_pytorch_tanh",
  ),
  "bloom": dict(
    model_type="bloom", n_layer=2, n_head=4, seq_length=128,
    layer_norm_epsilon=1e-5, intermediate_size=128, tie_word_embeddings=True,
  ),
  "falcon": dict(
    model_type="falcon", layer_norm_epsilon=1e-5, num_kv_heads=2,
    ffn_hidden_size=64, new_decoder_architecture=True,
    tie_word_embeddings=True,
  ),
  "gpt2": dict(
    model_type="gpt2", n_layer=2, n_head=4, n_embd=32, n_positions=128,
    n_inner=64, layer_norm_epsilon=1e-5, tie_word_embeddings=True,
  ),
  "gpt-oss": dict(
    model_type="gpt_oss", rope_theta=10_000.0,
    head_dim=16, num_local_experts=4,
    num_experts_per_tok=2, sliding_window=8, **_RMS,
    rope_scaling=dict(
      rope_type="yarn", factor=4.0, original_max_position_embeddings=32,
      truncate=False,
    ),
  ),
  "lfm2": dict(
    model_type="lfm2", rope_theta=10_000.0,
    norm_eps=1e-5, conv_L_cache=3,
    layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
    tie_word_embeddings=True,
  ),
  "mamba": dict(
    model_type="mamba", layer_norm_epsilon=1e-5, state_size=8, conv_kernel=4,
    time_step_rank=3, tie_word_embeddings=True,
  ),
  "falcon-mamba": dict(
    model_type="falcon_mamba", layer_norm_epsilon=1e-5, state_size=8,
    conv_kernel=3, time_step_rank=3, use_bias=True, use_conv_bias=False,
    tie_word_embeddings=False,
  ),
  "minimax-m2": dict(
    model_type="minimax_m2", rope_theta=10_000.0,
    head_dim=16, rotary_dim=8, num_local_experts=4,
    num_experts_per_tok=2, **_RMS,
  ),
  "nemotron": dict(
    model_type="nemotron", norm_eps=1e-5, partial_rotary_factor=0.5,
  ),
  "qwen2moe": dict(
    model_type="qwen2_moe", num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=64, **_RMS,
  ),
  "stablelm": dict(
    model_type="stablelm", layer_norm_eps=1e-5, qk_layernorm=True,
    use_qkv_bias=True, partial_rotary_factor=0.5,
  ),
  "mixtral": dict(
    model_type="mixtral", rope_theta=10_000.0,
    num_local_experts=4, num_experts_per_tok=2, **_RMS,
  ),
}  # fmt: skip
# What the config of a family does not have.
_HEADS = ("num_attention_heads", "num_key_value_heads",
          "max_position_embeddings")  # fmt: skip
_WITHOUT = {
  "bloom": ("num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "intermediate_size"),
  "falcon": ("num_key_value_heads", "intermediate_size"),
  "gpt2": ("num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "max_position_embeddings", "intermediate_size", "hidden_size"),
  "mamba": _HEADS,
  "falcon-mamba": _HEADS,
}  # fmt: skip
_ARCHS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
# Cases of another name than the file's.
_NAMED = {
  "mixtral": "llama", "gemma4-mixture": "gemma4", "falcon-mamba": "mamba",
}  # fmt: skip


def _writer(path, name, config):
  """A writer with the metadata of a config, as llama.cpp's converter has it."""
  w = gguf.GGUFWriter(path, _NAMED.get(name, name))
  if "state_size" in config:
    w.add_ssm_inner_size(config["intermediate_size"])
    w.add_ssm_conv_kernel(config["conv_kernel"])
    w.add_ssm_state_size(config["state_size"])
    w.add_ssm_time_step_rank(config["time_step_rank"])
    w.add_ssm_dt_b_c_rms(name == "falcon-mamba")
    config = config | dict.fromkeys(_HEADS, 0) | {"intermediate_size": 0}
    config["max_position_embeddings"] = 1 << 20
  w.add_context_length(config["max_position_embeddings"])
  w.add_block_count(config["num_hidden_layers"])
  w.add_embedding_length(config["hidden_size"])
  width, layers = config["intermediate_size"], config["num_hidden_layers"]
  if config.get("use_double_wide_mlp"):
    width = [width * (1 + (i >= layers - 2)) for i in range(layers)]
  w.add_feed_forward_length(width)
  w.add_head_count(config["num_attention_heads"])
  kv_heads = config["num_key_value_heads"]
  if name == "lfm2":
    kv_heads = [kv_heads * (x != "conv") for x in config["layer_types"]]
  if name.startswith("gemma4"):
    slides = [x == "sliding_attention" for x in config["layer_types"]]
    w.add_sliding_window_pattern(slides)
    w.add_shared_kv_layers(config["num_kv_shared_layers"])
    w.add_key_length_swa(config["head_dim"])
    w.add_rope_freq_base_swa(50.0)
    config = config | {"head_dim": config["global_head_dim"]}
    config |= {"rope_theta": 300.0}
    if (full := config.get("num_global_key_value_heads")) is not None:
      kv_heads = [kv_heads if x else full for x in slides]
  w.add_head_count_kv(
    config["num_attention_heads"] if name == "bloom" else kv_heads
  )
  w.add_rope_freq_base(config.get("rope_theta", 10_000.0))
  eps = next(x for key, x in config.items() if "eps" in key)
  if name in ("starcoder2", "bloom", "falcon", "gpt2", "nemotron", "stablelm"):
    w.add_layer_norm_eps(eps)
  else:
    w.add_layer_norm_rms_eps(eps)
  if (part := config.get("partial_rotary_factor")) is not None:
    w.add_rope_dimension_count(int(part * 8))
  if "rope_scaling" in config and name == "gpt-oss":
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    w.add_rope_scaling_orig_ctx_len(32)
  for key, add in (
    ("head_dim", w.add_key_length),
    ("sliding_window", w.add_sliding_window),
    ("num_experts", w.add_expert_count),
    ("num_local_experts", w.add_expert_count),
    ("num_experts_per_tok", w.add_expert_used_count),
    (
      "shared_expert_intermediate_size",
      w.add_expert_shared_feed_forward_length,
    ),
    ("conv_L_cache", w.add_shortconv_l_cache),
    ("rotary_dim", w.add_rope_dimension_count),
    ("top_k_experts", w.add_expert_used_count),
    ("hidden_size_per_layer_input", w.add_embedding_length_per_layer_input),
    ("moe_intermediate_size", w.add_expert_feed_forward_length),
    ("attn_logit_softcapping", w.add_attn_logit_softcapping),
    ("final_logit_softcapping", w.add_final_logit_softcapping),
  ):
    if key in config:
      add(config[key])
  return w


def _rows(x, groups, queries):
  """All queries before keys and values, of which each group has its own."""
  x = x.reshape(groups, queries + 2, 8, *x.shape[1:])
  parts = x[:, :queries], x[:, queries], x[:, queries + 1]
  return np.concatenate([p.reshape(-1, *x.shape[3:]) for p in parts])


def _tensors(name, config, tensors):
  """Tensors under gguf's own names, changed as llama.cpp's converter does."""
  names = gguf.get_tensor_name_map(
    _ARCHS[_NAMED.get(name, name)], config["num_hidden_layers"]
  )
  stacks = {}
  if name.startswith("gemma4"):
    yield "rope_freqs.weight", np.array([1, 1, *[1e30] * 6], np.float32)
  for key, x in sorted(tensors.items()):
    if name == "bloom":
      key = key.removeprefix("transformer.")
    for where in (".experts.", ".norms."):
      start, _, rest = key.partition(where)
      number, _, part = rest.partition(".")
      if number.isdigit():
        whole = f"{start}{where}{part}" if "exp" in where else f"{start}.{part}"
        stacks.setdefault(whole, {})[int(number)] = x
        break
    else:
      if name in ("llama", "mixtral") and key.endswith(
        ("q_proj.weight", "k_proj.weight")
      ):
        heads = config["num_attention_heads"]
        heads = heads if "q_proj" in key else config["num_key_value_heads"]
        x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
      if name in ("gemma2", "gemma3") and key.endswith("norm.weight"):
        x = x + 1
      if name == "nemotron" and "norm" in key and key.endswith("weight"):
        x = x + 1
      if "query_key_value" in key:
        x = _rows(x, *((4, 1) if name == "bloom" else (2, 2)))
      if name == "gpt2" and ".c_" in key and x.ndim == 2:
        x = x.T
      if key.endswith(("conv.conv.weight", "conv1d.weight")):
        x = x[:, 0]
      if key.endswith("A_log"):
        x = -np.exp(x)
      if key.endswith("e_score_correction_bias"):
        key = key.replace("_bias", ".bias")
      if key.endswith((".router.scale", ".per_expert_scale")):
        layer, router = key.split(".")[2], key.endswith(".router.scale")
        part = "ffn_gate_inp" if router else "ffn_down_exps"
        yield f"blk.{layer}.{part}.scale", x
        continue
      if name.startswith("gemma4") and not key.endswith(".weight"):
        key += ".weight"
      if key.endswith("sinks"):
        key += ".weight"
      if name == "gpt-oss" and "experts." in key:
        bias = key.endswith("_bias")
        key = key.removesuffix("_bias") + (".bias" if bias else ".weight")
        x = x if bias else x.swapaxes(1, 2)
        if "gate_up" in key:
          axis = 1
          for i, part in enumerate(("gate", "up")):
            half = np.take(x, range(i, x.shape[axis], 2), axis)
            part = key.replace("gate_up", part)
            yield names.get_name(part, (".weight", ".bias")), half
          continue
      yield names.get_name(key, (".weight", ".bias")), x
  for key, parts in stacks.items():
    x = np.stack([parts[i] for i in range(len(parts))])
    yield names.get_name(key, (".weight",)), x


def _write(path, name, config, tensors, kind=None, tokens=()):
  w = _writer(path, name, config)
  if tokens:
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * len(tokens))
    w.add_token_types([2, *[1] * (len(tokens) - 1)])
    w.add_eos_token_id(0)
    w.add_chat_template("{{ messages[0].content }}")
  for key, x in tensors:
    if kind is not None and x.ndim > 1:
      w.add_tensor(key, gguf.quantize(x, kind), raw_dtype=kind)
    else:
      w.add_tensor(key, np.ascontiguousarray(x, np.float32))
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()


def _small(tmp_path, name, **more):
  config = _SIZES | CASES[name] | more
  without = _WITHOUT.get(name, ())
  model = rj.models.create(
    {key: x for key, x in config.items() if key not in without}, seed=3
  )
  # Norms of ones and biases of zeros would hide a change of theirs.
  keys = iter(jax.random.split(jax.random.key(1), 1000))
  noisy = lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype)
  model = jax.tree.map(noisy, model)
  rj.models.save(model, tmp_path / "hf")
  tensors = load_file(tmp_path / "hf" / "model.safetensors")
  named = []
  for key, x in _tensors(name, config, tensors):
    assert key is not None
    named.append((key, x))
  return config, named


def _same(path, folder, atol=0.0):
  """A file's model has the config and the numbers of a folder's."""
  one = rj.models.load(path, dtype=jnp.float32)
  two = rj.models.load(folder, dtype=jnp.float32)
  assert one.config == two.config
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=atol)


_LONG = (
  "gemma2", "gemma4", "gemma4-mixture", "qwen3moe", "qwen3", "qwen2", "bloom",
  "mixtral", "gpt-oss", "lfm2", "minimax-m2", "nemotron", "qwen2moe",
  "stablelm", "gpt2", "falcon-mamba", "mamba",
)  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=[pytest.mark.long] * (x in _LONG)) for x in CASES],
)
def test_a_file_is_its_folder(tmp_path, name):
  config, tensors = _small(tmp_path, name)
  _write(tmp_path / "m.gguf", name, config, tensors)
  # Norms of Gemma go to one more and back.
  _same(tmp_path / "m.gguf", tmp_path / "hf", 3e-7)


def test_a_state_space_has_the_tensors_of_its_folder(tmp_path):
  """Rates are logarithms there, and some names have no ending."""
  rng, config = np.random.default_rng(0), _SIZES | CASES["mamba"]
  layer = "backbone.layers.1.mixer."
  shapes = {
    "backbone.embeddings.weight": (64, 32), f"{layer}A_log": (64, 8),
    f"{layer}D": (64,), f"{layer}conv1d.weight": (64, 1, 4),
    f"{layer}conv1d.bias": (64,), f"{layer}dt_proj.bias": (64,),
  }  # fmt: skip
  tensors = {
    key: rng.normal(size=shape).astype(np.float32)
    for key, shape in shapes.items()
  }
  _write(
    tmp_path / "m.gguf", "mamba", config, _tensors("mamba", config, tensors)
  )
  folder = open_model(tmp_path / "m.gguf")
  assert folder.tensors.keys() == tensors.keys()
  for key, x in tensors.items():
    np.testing.assert_allclose(folder.raw(key), x, rtol=0, atol=4e-7)


def test_a_saved_model_has_the_tokenizer_of_its_file(tmp_path):
  config, tensors = _small(tmp_path, "llama")
  file, folder = tmp_path / "m.gguf", tmp_path / "again"
  letters = ["<unk>", "\u2581", *"abcdefgh"]
  more = [f"<{n}>" for n in range(config["vocab_size"] - len(letters))]
  _write(file, "llama", config, tensors, tokens=[*letters, *more])
  rj.models.save(rj.models.load(file), folder)
  one, two = (rj.data.Tokenizer.load(x) for x in (file, folder))
  assert one.encode("a bag").tolist() == two.encode("a bag").tolist()
  assert two.chat_template == "{{ messages[0].content }}"
  _same(file, folder)
  # A training that resumes has no origin of its model.
  (tmp_path / "trained").mkdir()
  train.copy_companions(file, tmp_path / "trained")
  three = rj.data.Tokenizer.load(tmp_path / "trained")
  assert three.encode("a bag").tolist() == one.encode("a bag").tolist()
  # Without one the weights are saved all the same.
  _write(file, "llama", config, tensors)
  with pytest.warns(RuntimeWarning, match="no tokenizer is written"):
    rj.models.save(rj.models.load(file), tmp_path / "bare")
  _same(file, tmp_path / "bare")


def test_a_router_serves_a_file(tmp_path):
  config, tensors = _small(tmp_path, "llama")
  file, key = tmp_path / "m.gguf", tmp_path / "key"
  key.write_bytes(bytes(32))
  _write(file, "llama", config, tensors)
  for policy in ("shortest", "conductor"):
    values = common.parse(
      "serve",
      serve.define,
      ["--role=router", f"--model={file}", f"--cluster_key={key}",
       "--cluster_port=0", f"--policy={policy}"],
    )  # fmt: skip
    tokenizer: Any = rj.data.Bytes()
    router = cluster_roles.router(values, file, tokenizer)
    router.close()
    assert router.vocab == config["vocab_size"]


_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "MXFP4")


@pytest.mark.parametrize("kind", _KINDS)
def test_numbers_are_those_of_the_package(tmp_path, kind):
  kind = gguf.GGMLQuantizationType[kind]
  x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
  packed = gguf.quantize(x, kind)
  w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
  w.add_tensor("x", packed, raw_dtype=kind)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  got = open_gguf(tmp_path / "m.gguf").floats("x")
  np.testing.assert_array_equal(got, gguf.dequantize(packed, kind))
  np.testing.assert_allclose(got, x, atol=0.6)


# Where a block has float16 scales, by ggml's names of the types.
_HALVES = {
  "Q2_K": (80, 82), "Q3_K": (108,), "Q4_1": (0, 2), "Q4_K": (0, 2),
  "Q5_1": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,),
  "TQ2_0": (64,), "BF16": (), "F32": (), "IQ1_M": (), "MXFP4": (),
  "NVFP4": (), "I8": (),
}  # fmt: skip


@pytest.mark.parametrize(
  "kind", gguf.GGMLQuantizationType, ids=lambda x: x.name
)
def test_a_type_is_dequantised_as_the_package_does_or_refused(tmp_path, kind):
  """Random bytes of each type that the package lists."""
  size, nbytes = gguf.GGML_QUANT_SIZES[kind]
  rng = np.random.default_rng(int(kind))
  raw = rng.integers(0, 256, (3, 2, nbytes), np.uint8)
  for at in _HALVES.get(kind.name, (0,)):
    scale = rng.uniform(0.01, 2, (3, 2)).astype(np.float16)
    raw[..., at : at + 2] = scale[..., None].view(np.uint8)
  if kind.name == "IQ1_M":
    # A float16 in the highest four bits of four numbers: 0x3000 to 0x3fff.
    raw[..., 49:56:2] &= 15
    raw[..., 55] |= 0x30
  elif kind.name in ("BF16", "F32"):
    raw[..., -1] = 0x3F
  path = tmp_path / "m.gguf"
  info = _info(b"x", [2 * size, 3], int(kind), 0)
  path.write_bytes(_file([info], data=raw.tobytes()))
  try:
    want = gguf.dequantize(raw.reshape(3, -1), kind)
  except NotImplementedError:
    with pytest.raises(
      rj.errors.CheckpointFormatError, match=f"{kind.name}.*Q8_0"
    ):
      open_gguf(path)
    return
  assert np.isfinite(want).all() and want.shape == (3, 2 * size)
  assert len(np.unique(want)) > 3
  files = open_gguf(path)
  np.testing.assert_array_equal(files.floats("x"), want)
  np.testing.assert_array_equal(files.floats("x", 1), want[1])


@pytest.mark.long
def test_layers_are_read_without_the_others(tmp_path):
  config, tensors = _small(tmp_path, "llama")
  path = tmp_path / "m.gguf"
  _write(path, "llama", config, tensors)
  first, last = (rj.models.load_layers(path, n, n + 1) for n in range(2))
  numbers = [{p[0] for p in x.weights() if p[0].isdigit()}
             for x in (first, last)]  # fmt: skip
  assert numbers == [{"0"}, {"1"}]
  digest = whole_digest(
    first.whole, [weight_sums(x.weights()) for x in (first, last)]
  )
  assert digest == weights_digest(rj.models.load(path))


def test_a_rope_of_llama_3_comes_from_its_factors(tmp_path):
  scaling = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
  )  # fmt: skip
  config, tensors = _small(
    tmp_path, "llama", rope_theta=500_000.0, rope_scaling=scaling
  )
  waves = 2 * np.pi * 500_000.0 ** (np.arange(4) / 4)
  part = np.clip((8192 / waves - 1) / 3, 0, 1)
  factors = 1 / ((1 - part) / 8 + part)
  tensors.append(("rope_freqs.weight", factors.astype(np.float32)))
  _write(tmp_path / "m.gguf", "llama", config, tensors)
  _same(tmp_path / "m.gguf", tmp_path / "hf")
  tensors[-1] = ("rope_freqs.weight", np.array([1, 2, 3, 8], np.float32))
  _write(tmp_path / "n.gguf", "llama", config, tensors)
  with pytest.raises(rj.errors.ConfigError, match="rope_freqs"):
    rj.models.load(tmp_path / "n.gguf")


def _pairs(*pairs):
  """The bytes of metadata of strings."""
  text = lambda x: struct.pack("<Q", len(x)) + x
  return b"".join(text(k) + struct.pack("<I", 8) + text(v) for k, v in pairs)


def _number(key, x):
  """The bytes of metadata of an uint32."""
  return struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, x)


def _info(name, sizes, kind, offset):
  head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(sizes))
  return head + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)


def _file(infos=(), meta=b"", keys=0, data=b"", version=3, tensors=None):
  count = len(infos) if tensors is None else tensors
  head = b"GGUF" + struct.pack("<IQQ", version, count, keys) + meta
  head += b"".join(infos)
  return head + bytes(-len(head) % 32) + data


_HUGE = struct.pack("<Q", 1 << 60)
BAD = {
  "short": (_file()[:10], "bytes"),
  "magic": (b"GGML" + _file()[4:], "begins with"),
  "version": (_file(version=1), "version 1"),
  "big endian": (_file(version=3 << 24), "big-endian"),
  "tensors": (_file(tensors=1 << 60), "tensors in"),
  "keys": (_file(keys=1 << 60), "keys in"),
  "string": (_file(meta=_HUGE + bytes(64), keys=1), "bytes of a key"),
  "array": (
    _file(
      meta=struct.pack("<Q", 1) + b"k" + struct.pack("<II", 9, 8) + _HUGE
      + bytes(32),
      keys=1,
    ),
    "strings",
  ),
  "key twice": (_file(meta=_pairs((b"a", b"b")) * 2, keys=2), "twice"),
  "tensor twice": (
    _file([_info(b"x", [8], 0, 0)] * 2, data=bytes(64)), "twice",
  ),
  "beyond": (_file([_info(b"x", [8], 0, 32)], data=bytes(32)), "aligned"),
  "huge": (_file([_info(b"x", [1 << 60], 0, 0)], data=bytes(32)), "can be"),
  "overlap": (
    _file([_info(b"x", [16], 0, 0), _info(b"y", [8], 0, 32)], data=bytes(96)),
    "over",
  ),
  "type": (_file([_info(b"x", [8], 99, 0)], data=bytes(32)), "type 99"),
  "no type": (_file([_info(b"x", [8], 5, 0)], data=bytes(32)), "type 5"),
  "cut": (_file([_info(b"x", [8], 0, 0)], data=bytes(31)), "in a file of"),
  "alignment of 0": (
    _file(meta=_number(b"general.alignment", 0), keys=1), "multiple of 8",
  ),
  "alignment of text": (
    _file(meta=_pairs((b"general.alignment", b"32")), keys=1), "multiple of 8",
  ),
  "type of a key": (
    _file(meta=struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 13, 0), keys=1),
    "type 13",
  ),
  "block": (_file([_info(b"x", [8], 8, 0)], data=bytes(64)), "blocks of 32"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_refused(tmp_path, fault):
  data, words = BAD[fault]
  (tmp_path / "m.gguf").write_bytes(data)
  with pytest.raises(rj.errors.CheckpointFormatError, match=words):
    rj.models.load(tmp_path / "m.gguf")


def _header_only(path, name, values):
  w = _writer(path, name, _SIZES | CASES[name])
  for key, value in values.items():
    if value is None:
      w.kv_data[0].pop(key, None)
      continue
    kind = gguf.GGUFValueType.get_type(value)
    w.kv_data[0][key] = gguf.GGUFValue(value=value, type=kind)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()


@pytest.mark.parametrize(
  ("key", "value"),
  [("rope.freq_base", "ten"), ("block_count", "2"), ("block_count", -1),
   ("attention.layer_norm_rms_epsilon", [1e-5]), ("context_length", 0),
   ("attention.head_count_kv", ["2"]), ("attention.key_length", True),
   ("expert_count", "4")],
)  # fmt: skip
def test_a_key_of_another_type_is_refused_by_its_name(tmp_path, key, value):
  _header_only(tmp_path / "m.gguf", "llama", {f"llama.{key}": value})
  with pytest.raises(rj.errors.ConfigError, match=f"llama.{key}"):
    rj.models.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
  ("key", "value"),
  [("rope.scaling.alpha", 2.0), ("rope.scaling.attn_factor", 0.5),
   ("rope.scaling.yarn_log_multiplier", 0.1), ("expert_gating_func", 2),
   ("rope.scaling.yarn_ext_factor", 0.0), ("made_up", "x"),
   ("rope.scaling.yarn_attn_factor", 0.5), ("attention.sliding_window", 8),
   ("attention.value_length", 4), ("logit_scale", 0.25)],
)  # fmt: skip
def test_a_key_that_nothing_reads_is_refused_by_its_name(tmp_path, key, value):
  _header_only(tmp_path / "m.gguf", "llama", {f"llama.{key}": value})
  files = _with_embedding(tmp_path / "m.gguf")
  config = config_of(files)
  with pytest.raises(rj.errors.ConfigError, match=rf"llama\.{key}.*strict"):
    rj.models.read_config(config)
  with pytest.warns(UserWarning, match="gguf_keys"):
    rj.models.read_config(config, strict=False)


# What changes a computation and no tensor shows, by architecture: a key that
# is missing (None) or has a value that the model does not compute.
FACTS = [
  ("gemma2", "attention.sliding_window_pattern", 3),
  ("gemma2", "attention.scale", 0.5),
  ("gemma3", "attention.sliding_window", None),
  ("gemma3", "final_logit_softcapping", 30.0),
  ("gemma4", "attention.sliding_window", None),
  ("gemma4-mixture", "expert_used_count", None),
  ("gpt-oss", "attention.sliding_window", None),
  ("gpt-oss", "expert_used_count", None),
  ("qwen3moe", "expert_used_count", None),
  ("qwen3moe", "expert_weights_norm", False),
  ("qwen3moe", "expert_weights_scale", 2.5),
  ("qwen3moe", "expert_gating_func", 2),
  ("qwen2moe", "expert_weights_norm", True),
  ("qwen2moe", "expert_used_count", None),
  ("minimax-m2", "expert_used_count", None),
  ("minimax-m2", "rope.dimension_count", None),
  ("minimax-m2", "expert_gating_func", 1),
  ("qwen2", "rope.dimension_count", 4),
  ("qwen2", "rope.scaling.type", "longrope"),
  ("qwen3", "attention.scale", 0.5),
  ("starcoder2", "attention.sliding_window", 8),
  ("falcon", "attention.max_alibi_bias", 8.0),
  ("bloom", "attention.max_alibi_bias", 4.0),
  ("bloom", "attention.layer_norm_epsilon", None),
  ("lfm2", "attention.layer_norm_rms_epsilon", None),
  ("nemotron", "attention.clamp_kqv", 8.0),
  ("stablelm", "logit_scale", 0.5),
  ("gpt2", "attention.layer_norm_epsilon", None),
  ("mamba", "residual_scale", 0.5),
  ("phi3", "rope.scaling.alpha", 2.0),
]


@pytest.mark.parametrize(("name", "key", "value"), FACTS)
def test_a_fact_that_no_tensor_shows_is_stated_or_refused(
  tmp_path, name, key, value
):
  prefix = name.partition("-mixture")[0]
  path = tmp_path / "m.gguf"
  _header_only(path, name, {f"{prefix}.{key}": value})
  words = "layer_norm_rms_epsilon" if key.endswith("epsilon") else key
  with pytest.raises(rj.errors.ConfigError, match=words):
    rj.models.read_config(config_of(_with_embedding(path)))


@pytest.mark.parametrize(
  ("key", "value"),
  [("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0)],
)
def test_a_scaling_beside_factors_is_refused(tmp_path, key, value):
  config, tensors = _small(tmp_path, "llama", rope_theta=500_000.0)
  tensors.append(("rope_freqs.weight", np.ones(4, np.float32)))
  _write(tmp_path / "m.gguf", "llama", config, tensors)
  files = open_gguf(tmp_path / "m.gguf")
  assert "rope_scaling" in config_of(files)
  metadata = files.metadata | {f"llama.{key}": value}
  files = dataclasses.replace(files, metadata=metadata)
  with pytest.raises(rj.errors.ConfigError, match=rf"{key}.*factors"):
    config_of(files)


def test_keys_without_an_effect_are_accepted(tmp_path):
  values = {
    "vocab_size": 64, "rope.dimension_count": 8, "attention.key_length": 8,
    "attention.value_length": 8, "attention.causal": True, "expert_count": 0,
    "attention.sliding_window": 4096, "rope.scaling.attn_factor": 1.0,
    "expert_gating_func": 1, "rope.scaling.finetuned": True,
  }  # fmt: skip
  values = {f"llama.{key}": x for key, x in values.items()}
  _header_only(tmp_path / "m.gguf", "llama", values)
  config = config_of(_with_embedding(tmp_path / "m.gguf"))
  assert "gguf_keys" not in config
  rj.models.read_config(config)


def test_the_magnitude_of_a_scaled_rope_is_read(tmp_path):
  values = {
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.attn_factor": 0.5,
    "llama.rope.scaling.original_context_length": 32,
  }  # fmt: skip
  _header_only(tmp_path / "m.gguf", "llama", values)
  config = config_of(_with_embedding(tmp_path / "m.gguf"))
  magnitude = config["rope_scaling"]["attention_factor"]
  assert magnitude == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
  rj.models.read_config(config)


def _with_embedding(path):
  """The headers of a file, with an embedding that it lacks."""
  tensor = GgufTensor(
    file=path.name, type=0, shape=(64, 32), offset=0, nbytes=8192
  )
  tensors = {"token_embd.weight": tensor}
  return dataclasses.replace(open_gguf(path), tensors=tensors)


@pytest.mark.parametrize(
  ("key", "value"),
  [("ssm.state_size", 0), ("ssm.inner_size", "64"), ("ssm.conv_kernel", 4.0)],
)
def test_a_size_of_a_state_space_is_refused_by_its_name(tmp_path, key, value):
  _header_only(tmp_path / "m.gguf", "mamba", {f"mamba.{key}": value})
  with pytest.raises(rj.errors.ConfigError, match=f"mamba.{key}"):
    rj.models.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
  ("key", "value"),
  [("token_type", 1), ("token_type", ["1", "1"]), ("scores", ["a", "b"]),
   ("add_bos_token", "no"), ("bos_token_id", 7)],
)  # fmt: skip
def test_a_tokenizer_of_another_type_is_refused_by_name(tmp_path, key, value):
  path = tmp_path / "t.gguf"
  _tokenizer_file(path, "llama", ["<s>", "a"], [3, 1], scores=[0.0, 0.0])
  metadata = open_gguf(path).metadata | {f"tokenizer.ggml.{key}": value}
  with pytest.raises(rj.errors.TokenizerError, match=key):
    tokenizer_files(metadata)


def test_parts_that_disagree_are_refused(tmp_path):
  for i, name in enumerate(("llama", "qwen2")):
    path = tmp_path / f"m-0000{i + 1}-of-00002.gguf"
    _header_only(path, name, {"split.no": i, "split.count": 2})
  with pytest.raises(
    rj.errors.CheckpointFormatError, match=r"general\.architecture qwen2"
  ):
    rj.models.load(path)


def test_scales_that_are_nan_are_refused(tmp_path):
  config, tensors = _small(tmp_path, "llama")
  tensors = dict(tensors)
  tensors["blk.1.ffn_up.weight"] = np.full((64, 32), np.nan)
  _write(tmp_path / "m.gguf", "llama", config, tensors.items())
  with pytest.raises(rj.errors.CheckpointMismatchError, match="finite"):
    rj.models.load(tmp_path / "m.gguf")


def test_a_folder_may_have_a_config_beside_a_file(tmp_path):
  config, tensors = _small(tmp_path, "llama")
  folder = tmp_path / "both"
  folder.mkdir()
  _write(folder / "M.GGUF", "llama", config, tensors)
  (folder / "config.json").write_bytes(
    (tmp_path / "hf" / "config.json").read_bytes()
  )
  _same(folder, tmp_path / "hf")
  # Safetensors go before.
  (tmp_path / "hf" / "m.gguf").write_bytes(b"GGUF")
  rj.models.load(tmp_path / "hf")


def test_a_file_is_read_where_a_link_points(tmp_path):
  """By its first bytes, out of the folder, and in the hub's cache."""
  config, tensors = _small(tmp_path, "llama")
  cache = tmp_path / "cache"
  blob, snapshot = cache / "blobs" / "1f", cache / "snapshots" / "9c" / "Q4"
  blob.parent.mkdir(parents=True)
  snapshot.mkdir(parents=True)
  _write(blob, "llama", config, tensors)
  (snapshot / "m.gguf").symlink_to("../../../blobs/1f")
  (tmp_path / "link.gguf").symlink_to(blob)
  (tmp_path / "model").symlink_to(tmp_path / "link.gguf")
  for path in (
    blob, snapshot / "m.gguf", snapshot, tmp_path / "link.gguf",
    tmp_path / "model",
  ):  # fmt: skip
    _same(path, tmp_path / "hf")
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "m.gguf").symlink_to(blob)
  with pytest.raises(rj.errors.CheckpointFormatError, match="a link out"):
    rj.models.load(tmp_path / "folder")


def test_a_file_that_is_not_there_is_said_so(tmp_path):
  with pytest.raises(rj.errors.CheckpointFormatError) as caught:
    rj.models.load(tmp_path / "m.gguf")
  assert "no such file" in str(caught.value)
  assert "part" not in str(caught.value).replace(str(tmp_path), "")


def test_parts_are_one_model(tmp_path):
  config, tensors = _small(tmp_path, "llama")
  (tmp_path / "parts").mkdir()
  half = len(tensors) // 2
  first = tmp_path / "parts" / "m-00001-of-00002.gguf"
  second = tmp_path / "parts" / "m-00002-of-00002.gguf"
  for i, (path, part) in enumerate(
    ((first, tensors[:half]), (second, tensors[half:]))
  ):
    w = _writer(path, "llama", config)
    w.add_uint16("split.no", i)
    w.add_uint16("split.count", 2)
    w.add_int32("split.tensors.count", len(tensors))
    for key, x in part:
      w.add_tensor(key, np.ascontiguousarray(x, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
  for path in (first.parent, second):
    _same(path, tmp_path / "hf")
  with object_servers.served("memory") as bucket:
    upload_folder(first.parent, as_path(f"{bucket}/parts"))
    with object_servers.with_faults() as storage:
      for path in (f"{bucket}/parts", f"{bucket}/parts/{second.name}"):
        _same(path, tmp_path / "hf")
      # Only ranges are read.
      whole = [x for x, *_ in storage.requests if x == "cat_file"]
      assert len(storage.ranges) == len(whole)
    as_path(f"{bucket}/parts/{second.name}").unlink()
    with pytest.raises(rj.errors.CheckpointFormatError, match="no such file"):
      rj.models.load(f"{bucket}/parts")
  # The second one under the name of the first.
  kept = first.read_bytes()
  first.write_bytes(second.read_bytes())
  with pytest.raises(rj.errors.CheckpointFormatError, match="part"):
    rj.models.load(second)
  first.write_bytes(kept)
  second.unlink()
  with pytest.raises(rj.errors.CheckpointFormatError, match="no such file"):
    rj.models.load(first)


def test_an_architecture_that_is_not_known_is_named(tmp_path):
  (tmp_path / "m.gguf").write_bytes(
    _file(meta=_pairs((b"general.architecture", b"rwkv6")), keys=1)
  )
  with pytest.raises(rj.errors.ConfigError, match="rwkv6"):
    rj.models.load(tmp_path / "m.gguf")


def _tokenizer_file(path, model, tokens, kinds, **more):
  w = gguf.GGUFWriter(path, "llama")
  w.add_tokenizer_model(model)
  w.add_token_list(tokens)
  w.add_token_types(kinds)
  if "scores" in more:
    w.add_token_scores(more["scores"])
  if "merges" in more:
    w.add_token_merges(more["merges"])
    w.add_tokenizer_pre(more["pre"])
  w.add_eos_token_id(0)
  w.add_chat_template("{{ messages[0].content }}")
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()


def test_a_byte_level_tokenizer_comes_from_the_file(tmp_path):
  path, chars = tmp_path / "t.gguf", "abcdefghij12"
  tokens = ["<end>", *chars, "Ġ", "ab", "Ġab", "12"]
  merges = ["a b", "Ġ ab", "1 2"]
  kinds = [3] + [1] * (len(tokens) - 1)
  _tokenizer_file(path, "gpt2", tokens, kinds, merges=merges, pre="llama-bpe")
  t = rj.data.Tokenizer.load(path)
  words = lambda text: [tokens[i] for i in t.encode(text)]
  assert words("ab ab12") == ["ab", "Ġab", "12"]
  assert t.decode(t.encode("ab ab12")) == "ab ab12"
  assert t.eos_ids == (0,) and not t.adds_bos
  assert t.chat_template == "{{ messages[0].content }}"
  # Digits stand alone.
  _tokenizer_file(path, "gpt2", tokens, kinds, merges=merges, pre="qwen2")
  t = rj.data.Tokenizer.load(path)
  assert words("ab ab12") == ["ab", "Ġab", "1", "2"]
  _tokenizer_file(path, "gpt2", tokens, kinds, merges=merges, pre="new")
  with pytest.raises(rj.errors.TokenizerError, match="new"):
    rj.data.Tokenizer.load(path)


def test_a_sentencepiece_tokenizer_merges_by_scores(tmp_path):
  path = tmp_path / "t.gguf"
  space = "\u2581"
  tokens = ["</s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
  kinds = [3, 2] + [6] * 256
  # "bc" is better than "ab": of "abc" it is the one that is made.
  pieces = {space: -9, "a": -10, "b": -11, "c": -12, "ab": -2, "bc": -1,
            space + "a": -3}  # fmt: skip
  scores = [0.0] * len(tokens) + [float(x) for x in pieces.values()]
  tokens += list(pieces)
  kinds += [1] * len(pieces)
  _tokenizer_file(path, "llama", tokens, kinds, scores=scores)
  t = rj.data.Tokenizer.load(path)
  ids = t.encode("abc é")
  words = [tokens[i] for i in ids]
  assert words == [space + "a", "bc", space, "<0xC3>", "<0xA9>"]
  assert t.decode(ids) == "abc é"

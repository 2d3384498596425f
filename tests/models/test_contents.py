"""Folders as they are published: packed weights, images, guesses beyond."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors import safe_open

from ringjax import models
from ringjax.errors import (
  CheckpointMismatchError,
  ConfigError,
  MeshError,
  OptionError,
)
from ringjax.models.checkpoint import check_unpacked
from ringjax.models.contents import contents, text_config
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.names import Reshape
from ringjax.models.hf.packed import Float4, Float8
from ringjax.models.hf.tensors import (
  CheckpointTensor,
  checkpoint_tensors,
  parameters,
)
from ringjax.nn.param import Rules
from tests import checkpoints
from tests.helpers import refused

FLOAT8 = ml_dtypes.float8_e4m3fn


def arrays_of(model):
  """The tensors of a model as its own folder has them."""
  params = {k: p.get_value() for k, p in parameters(model).items()}
  _, family = models.read_config(json.loads(model.source))
  return {
    tensor.name: tensor.form.join(
      tuple(np.asarray(params[path])[index] for path, index in tensor.targets)
    )
    for tensor in checkpoint_tensors(model, family.names(model.config))
  }


def equal(model, want):
  got = arrays_of(model)
  assert got.keys() == want.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(got[name], x, name)


def found(folder):
  """What a folder holds, without its numbers."""
  opened = Folder.open(folder)
  source, family = text_config(opened.config)
  return contents(opened, family, models.abstract(source), source)


def mesh_of(*, count=8, **sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
    devices=jax.devices()[:count],
  )


def names_in(folder):
  with safe_open(folder / "model.safetensors", framework="numpy") as file:
    return set(file.keys())


# ---------------------------------------------------------------------------
# The text model of a model of text and images
# ---------------------------------------------------------------------------

OUTER = {
  "gemma3_text": {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 5,
    "image_token_index": 7,
    "mm_tokens_per_image": 4,
    "model_type": "gemma3",
    "torch_dtype": "float32",
    "vision_config": {"hidden_size": 8, "anything": [1]},
  },
  "llama4_text": {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vision_config": {"hidden_size": 8},
  },
}
SIGHT = {"gemma3_text": "vision_tower.", "llama4_text": "vision_model."}
PROJECTOR = "multi_modal_projector."


def renamed(name, form):
  if form == "older":
    return f"language_model.{name}"
  if name.startswith("model."):
    return f"model.language_model.{name.removeprefix('model.')}"
  return name


def wrapped(name, folder, form="older", **more):
  arrays = {
    renamed(key, form): x for key, x in checkpoints.tensors(name).items()
  }
  before = "" if form == "older" else "model."
  for part in (SIGHT[name], PROJECTOR):
    arrays[f"{before}{part}some.weight"] = np.ones((3, 5), np.float32)
  inner = {**checkpoints.config(name), "model_type": name}
  inner.pop("dtype", None)
  config = {**OUTER[name], "text_config": inner, **more}
  return checkpoints.write_folder(arrays, config, folder)


@pytest.mark.parametrize("form", ["older", "newer"])
@pytest.mark.parametrize("name", sorted(OUTER))
def test_where_the_text_model_is(name, form, tmp_path):
  folder = wrapped(name, tmp_path / "wrapped", form)
  held = found(folder)
  places = {t.name: t.stored_name for t in held.tensors}
  assert places == {n: renamed(n, form) for n in checkpoints.shapes(name)}
  assert len(held.unused) == 2
  opened = Folder.open(folder).config
  want = models.read_config(checkpoints.config(name))[0]
  assert models.read_config(opened)[0] == want


def test_the_text_model_is_read_and_saved_as_itself(tmp_path):
  name = "gemma3_text"
  model = models.load(wrapped(name, tmp_path / "wrapped"))
  equal(model, checkpoints.tensors(name))
  models.save(model, tmp_path / "saved")
  assert names_in(tmp_path / "saved") == set(checkpoints.shapes(name))
  config = json.loads((tmp_path / "saved" / "config.json").read_text())
  assert config["model_type"] == name
  assert config["architectures"] == checkpoints.config(name)["architectures"]
  assert "vision_config" not in config and "text_config" not in config
  assert models.read_config(config)[0] == model.config


def test_what_a_text_config_leaves_out():
  config = {**OUTER["gemma3_text"], "text_config": {"num_hidden_layers": 6}}
  meaning, _ = models.read_config(config)
  full = meaning.layers[5].attention
  assert (full.heads, full.kv_heads, full.head_dim) == (8, 4, 256)
  assert (meaning.vocab, meaning.embed) == (262208, 2304)
  assert meaning.max_positions == 131072 and meaning.tied


def test_only_what_sees_is_ignored(tmp_path):
  folder = wrapped("gemma3_text", tmp_path / "a")
  arrays = checkpoints.tensors("gemma3_text")
  more = {renamed(key, "older"): x for key, x in arrays.items()}
  config = json.loads((folder / "config.json").read_text())
  more["sound_tower.weight"] = np.ones(3, np.float32)
  odd = checkpoints.write_folder(more, config, tmp_path / "b")
  refused(CheckpointMismatchError, lambda: found(odd), "sound_tower.weight")
  # A text model alone has nothing that sees.
  arrays["vision_tower.weight"] = np.ones(3, np.float32)
  odd = checkpoints.write_folder(
    arrays, checkpoints.config("gemma3_text"), tmp_path / "c"
  )
  refused(CheckpointMismatchError, lambda: found(odd), "vision_tower")


def test_a_text_model_of_another_kind(tmp_path):
  folder = wrapped("gemma3_text", tmp_path / "a")
  config = json.loads((folder / "config.json").read_text())
  config["text_config"]["model_type"] = "gemma2"
  refused(ConfigError, lambda: models.read_config(config), "gemma2")


def test_a_missing_tensor_has_its_name_in_the_folder(tmp_path):
  folder = wrapped("llama4_text", tmp_path / "a")
  arrays = {
    renamed(key, "older"): x
    for key, x in checkpoints.tensors("llama4_text").items()
    if key != "model.norm.weight"
  }
  config = json.loads((folder / "config.json").read_text())
  odd = checkpoints.write_folder(arrays, config, tmp_path / "b")
  refused(
    CheckpointMismatchError,
    lambda: found(odd),
    "missing language_model.model.norm.weight",
  )


# ---------------------------------------------------------------------------
# Layers that guess further tokens; code
# ---------------------------------------------------------------------------

GUESSES = {
  "bailing_hybrid": "model.layers.3.eh_proj.weight",
  "deepseek_v3": "model.layers.3.eh_proj.weight",
  "qwen3_next": "mtp.layers.0.mlp.gate.weight",
}


@pytest.mark.parametrize("name", sorted(GUESSES))
def test_layers_that_guess_are_left(name, tmp_path):
  arrays = checkpoints.tensors(name)
  more = {**arrays, GUESSES[name]: np.ones((4, 4), np.float32)}
  config = checkpoints.config(name)
  folder = checkpoints.write_folder(more, config, tmp_path / "more")
  assert found(folder).unused == (GUESSES[name],)


def test_no_other_layer_is_left(tmp_path):
  config = checkpoints.config("deepseek_v3")
  assert config["num_hidden_layers"] == 3
  arrays = checkpoints.tensors("deepseek_v3")

  def load(name, layers, folder):
    more = {**arrays, name: np.ones(4, np.float32)}
    settings = {**config, "num_nextn_predict_layers": layers}
    return found(checkpoints.write_folder(more, settings, tmp_path / folder))

  for name, layers in (
    ("model.layers.3.norm.weight", 0),
    ("model.layers.4.norm.weight", 1),
    ("mtp.norm.weight", 1),
  ):
    refused(
      CheckpointMismatchError,
      lambda name=name, layers=layers: load(name, layers, name),
      name,
    )


def test_a_saved_folder_names_no_code():
  config = checkpoints.config("llama3")
  config["auto_map"] = {"AutoModelForCausalLM": "modeling_odd.Odd"}
  model = models.abstract(config)
  assert "auto_map" not in json.loads(model.source)


# ---------------------------------------------------------------------------
# Packed weights
# ---------------------------------------------------------------------------


def floats_of_8(codes, scales, block):
  """One value after the other, as the format says."""
  rows, columns = block
  out = np.empty(codes.shape, np.float32)
  for i in range(codes.shape[0]):
    for j in range(codes.shape[1]):
      scale = scales[i // rows, j // columns]
      out[i, j] = np.float32(codes[i, j]) * scale
  return out


BLOCK = (16, 20)


@pytest.fixture(scope="module")
def float8(tmp_path_factory):
  """(a folder in 8 bits, its tensors, the same weights as floats)."""
  config = checkpoints.config("llama3")
  random = np.random.default_rng(3)
  packed, plain = {}, {}
  for name, x in checkpoints.tensors("llama3").items():
    packed[name] = plain[name] = x
    if "proj" not in name:
      continue
    blocks = tuple(-(-n // b) for n, b in zip(x.shape, BLOCK, strict=True))
    scales = random.uniform(0.5, 2, blocks).astype(np.float32)
    codes = x.astype(FLOAT8)
    packed[name], packed[f"{name}_scale_inv"] = codes, scales
    plain[name] = floats_of_8(codes, scales, BLOCK)
  config["quantization_config"] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
  }
  folder = tmp_path_factory.mktemp("float8") / "packed"
  return checkpoints.write_folder(packed, config, folder), packed, plain


FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
FLOAT4 += [-x for x in FLOAT4]


def floats_of_4(codes, scales):
  """[E, O, I/32, 16] and [E, O, I/32] -> [E, I, O], a code after the other."""
  e, o, blocks, _ = codes.shape
  out = np.empty((e, 32 * blocks, o), np.float32)
  for at in np.ndindex(codes.shape):
    i, j, b, k = at
    for half in range(2):
      code = (int(codes[at]) >> (4 * half)) & 15
      value = np.ldexp(FLOAT4[code], int(scales[i, j, b]) - 127)
      out[i, 32 * b + 2 * k + half, j] = value
  return out


@pytest.fixture(scope="module")
def float4(tmp_path_factory):
  """(a GPT-OSS in 4 bits, its tensors, the same weights as floats)."""
  config = checkpoints.config("gpt_oss")
  config.update(hidden_size=64, intermediate_size=64, num_local_experts=2)
  config.pop("dtype", None)
  _, family = models.read_config(config)
  random = np.random.default_rng(4)
  packed, plain = {}, {}
  for tensor in checkpoint_tensors(models.abstract(config), family.names(
    models.read_config(config)[0]
  )):  # fmt: skip
    name, shape = tensor.name, tensor.form.stored
    if not name.endswith(("gate_up_proj", "down_proj")):
      x = random.standard_normal(shape).astype(np.float32)
      packed[name] = plain[name] = x
      continue
    e, i, o = shape
    codes = random.integers(0, 256, (e, o, i // 32, 16), np.uint8)
    scales = random.integers(120, 128, (e, o, i // 32), np.uint8)
    packed[f"{name}_blocks"], packed[f"{name}_scales"] = codes, scales
    plain[name] = floats_of_4(codes, scales)
  config["quantization_config"] = {
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "mxfp4",
  }
  folder = tmp_path_factory.mktemp("float4") / "packed"
  return checkpoints.write_folder(packed, config, folder), packed, plain


@pytest.fixture(params=["float8", "float4"])
def pair(request):
  return request.getfixturevalue(request.param)


def test_packed_weights_become_floats(pair, tmp_path):
  """Of the dtype of the others, where no file says it, and saved plain."""
  folder, _, plain = pair
  model = models.load(folder)
  assert str(model.dtype) == "float32"
  equal(model, plain)
  assert "quantization_config" not in json.loads(model.source)


@pytest.mark.long
def test_devices_read_their_own_codes(pair, monkeypatch):
  """Each of two devices has half of them, and the floats are the same."""
  folder, packed, plain = pair
  seen = {}
  read = Folder.read

  def spy(self, targets, **options):
    seen.update(targets)
    return read(self, targets, **options)

  monkeypatch.setattr(Folder, "read", spy)
  model = models.load(folder, mesh=mesh_of(model=2, count=2))
  equal(model, plain)
  codes = [t for t in seen.values() if t.dtype == FLOAT8 or len(t.shape) == 4]
  assert len(codes) == sum(x.dtype == FLOAT8 or x.ndim == 4
                           for x in packed.values()) > 0  # fmt: skip
  for t in codes:
    part = t.sharding.shard_shape(t.shape)
    assert 2 * np.prod(part) == np.prod(t.shape)


PACKED8 = "model.layers.1.mlp.up_proj.weight"
PACKED4 = "model.layers.0.mlp.experts.down_proj"


def test_codes_without_scales(pair, tmp_path):
  folder, packed, _ = pair
  name = next(n for n in packed if n.endswith(("_scale_inv", "_scales")))
  arrays = {k: x for k, x in packed.items() if k != name}
  config = Folder.open(folder).config
  odd = checkpoints.write_folder(arrays, config, tmp_path / "a")
  refused(CheckpointMismatchError, lambda: found(odd), "1 missing", name)
  arrays[name] = packed[name][..., :1]
  odd = checkpoints.write_folder(arrays, config, tmp_path / "b")
  refused(CheckpointMismatchError, lambda: found(odd), "1 misshapen", name)


def test_a_code_that_is_no_number(float8, tmp_path):
  folder, packed, _ = float8
  codes = packed[PACKED8].copy()
  codes[3, 2] = np.nan
  odd = checkpoints.write_folder(
    {**packed, PACKED8: codes}, Folder.open(folder).config, tmp_path / "a"
  )
  refused(CheckpointMismatchError, lambda: models.load(odd), PACKED8, "[3, 2]")


def test_products_that_are_no_numbers():
  same = lambda *shape: Reshape(shape, shape)
  eight = CheckpointTensor("eight", Float8(same(2, 3), (2, 2)), ())
  codes = jnp.full((2, 3), 100, FLOAT8)
  scales = jnp.full((1, 2), 1e4, jnp.float32)
  check_unpacked(eight, (codes, scales), "float32")
  refused(
    CheckpointMismatchError,
    lambda: check_unpacked(eight, (codes, scales), "float16"),
    "eight",
    "float16",
  )
  four = CheckpointTensor("four", Float4(same(1, 32, 1)), ())
  codes = jnp.full((1, 1, 1, 16), 0x77, jnp.uint8)
  for scale, sound in ((0, True), (250, True), (254, False), (255, False)):
    x = codes, jnp.full((1, 1, 1), scale, jnp.uint8)
    call = lambda x=x: check_unpacked(four, x, "bfloat16")
    if sound:
      call()
    else:
      refused(CheckpointMismatchError, call, "four", "finite")


def test_codes_that_no_config_speaks_of(float8, tmp_path):
  _, packed, _ = float8
  arrays = {k: x for k, x in packed.items() if not k.endswith("_scale_inv")}
  odd = checkpoints.write_folder(
    arrays, checkpoints.config("llama3"), tmp_path / "a"
  )
  refused(
    CheckpointMismatchError, lambda: models.load(odd), "quantization_config"
  )


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ({"quant_method": "aqlm", "bits": 4}, ("aqlm", "dequantize")),
    ({"bits": 4}, ("dequantize",)),
    (
      {"quant_method": "fp8", "weight_block_size": [128, 0]},
      ("weight_block_size",),
    ),
    (
      {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "random",
      },
      ("activation_scheme", "random"),
    ),
    (
      {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
      ("fmt", "e5m2"),
    ),
    ({"quant_method": "mxfp4", "new_trick": 1}, ("new_trick",)),
    ("fp8", ("quantization_config",)),
  ],
)
def test_weights_packed_in_other_ways(given, words):
  config = {**checkpoints.config("llama3"), "quantization_config": given}
  refused(
    ConfigError, lambda: models.read_config(config), "quantization", *words
  )


# ---------------------------------------------------------------------------
# Rules that would not be followed
# ---------------------------------------------------------------------------


def test_rules_without_a_mesh(float8):
  config = checkpoints.config("llama3")
  for call in (
    lambda: models.create(config, rules=Rules()),
    lambda: models.load(float8[0], rules=Rules(embed="data")),
  ):
    refused(OptionError, call, "rules", "mesh=")


def test_rules_for_an_axis_that_is_not_there(float8):
  config = checkpoints.config("llama3")
  mesh = mesh_of(seq=4, model=2)
  rules = Rules(ffn="modle")
  for call in (
    lambda: models.create(config, mesh=mesh, rules=rules),
    lambda: models.load(float8[0], mesh=mesh, rules=rules),
    lambda: models.place(models.abstract(config), mesh, rules),
  ):
    refused(MeshError, call, "ffn='modle'", "'seq'", "'model'")
  # What nobody chose is for any mesh.
  Rules(embed="seq").check(mesh_of(seq=8))


@pytest.mark.long
def test_packed_layers_are_streamed(pair):
  """Codes and scales are read from disk, and unpacked by the same code."""
  path, *_ = pair
  whole, streamed = models.load(path), models.load(path, placement="disk")
  tokens = np.arange(6)[None]
  np.testing.assert_array_equal(whole(tokens), streamed(tokens))

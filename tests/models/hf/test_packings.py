"""Folders that are quantised already: each format by an encoder of its own.

The encoders write one code after another, by the formats' own words; what a
model reads is compared with the numbers that the codes stand for.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType

from ringjax import models
from ringjax.errors import CheckpointMismatchError, ConfigError
from ringjax.models.contents import contents, text_config
from ringjax.models.hf.codes import PackedRows
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.names import Reshape
from ringjax.models.hf.packings import packing
from ringjax.models.hf.tensors import checkpoint_tensors, parameters
from tests import checkpoints
from tests.helpers import refused

GROUP = 16


def put(words: np.ndarray, at: tuple[int, int], shift: int, code: int) -> None:
  """Sets bits of one word of int32, by its bits."""
  bits = words.view(np.uint32)
  bits[at] |= np.uint32(code) << np.uint32(shift)


def grouped(random, m: int, n: int, bits: int, group: int | None, symmetric):
  """(codes [M, N], zeros and scales [M, G], the numbers [M, N])."""
  size = group or n
  groups = -(-n // size)
  codes = random.integers(0, 2**bits, (m, n))
  zeros = random.integers(0, 2**bits, (m, groups))
  if symmetric:
    zeros[:] = 2 ** (bits - 1)
  scales = random.uniform(0.01, 0.05, (m, groups)).astype(np.float16)
  at = np.arange(n) // size
  return codes, zeros, scales, at


def numbers(codes, zeros, scales, at):
  """What codes stand for, one after the other."""
  found = np.empty(codes.shape, np.float32)
  for i, j in np.ndindex(codes.shape):
    g = at[j]
    difference = np.float32(int(codes[i, j]) - int(zeros[i, g]))
    found[i, j] = difference * np.float32(scales[i, g])
  return found


class Pack:
  """compressed-tensors, pack-quantized: along rows, the first lowest."""

  def __init__(self, bits=4, group=GROUP, symmetric=True, order=False):
    self.bits, self.group = bits, group
    self.symmetric, self.order = symmetric, order
    how = "channel" if group is None else "group"
    self.config = {
      "quant_method": "compressed-tensors",
      "format": "pack-quantized",
      "quantization_status": "compressed",
      "global_compression_ratio": 1.5,
      "ignore": ["lm_head"],
      "kv_cache_scheme": None,
      "config_groups": {
        "group_0": {
          "targets": ["Linear"],
          "input_activations": None,
          "output_activations": None,
          "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": how,
            "group_size": group,
            "actorder": "group" if order else None,
            "block_structure": None,
            "dynamic": False,
            "observer": "minmax",
            "observer_kwargs": {},
          },
        }
      },
    }

  def encode(self, random, name, m, n):
    found = grouped(random, m, n, self.bits, self.group, self.symmetric)
    codes, zeros, scales, at = found
    if self.order:
      at = random.permutation(at)
    each = 32 // self.bits
    words = np.zeros((m, -(-n // each)), np.int32)
    for i, j in np.ndindex(m, n):
      put(words, (i, j // each), self.bits * (j % each), codes[i, j])
    made = {
      f"{name}_packed": words,
      f"{name}_scale": scales,
      f"{name}_shape": np.array([m, n], np.int64),
    }
    if not self.symmetric:
      packed = np.zeros((-(-m // each), zeros.shape[1]), np.int32)
      for i, g in np.ndindex(zeros.shape):
        put(packed, (i // each, g), self.bits * (i % each), zeros[i, g])
      made[f"{name}_zero_point"] = packed
    if self.order:
      made[f"{name}_g_idx"] = at.astype(np.int32)
    return made, numbers(codes, zeros, scales, at)


class Plain:
  """compressed-tensors, int-quantized or float-quantized."""

  def __init__(self, kind="int", strategy="channel", symmetric=True):
    self.kind, self.strategy, self.symmetric = kind, strategy, symmetric
    weights = {
      "num_bits": 8,
      "type": kind,
      "symmetric": symmetric,
      "strategy": strategy,
      "group_size": GROUP if strategy == "group" else None,
      "block_structure": [24, 16] if strategy == "block" else None,
    }
    group = {
      "targets": ["Linear"],
      "weights": weights,
      # W8A8: how inputs are rounded, which is not done here.
      "input_activations": {"num_bits": 8, "dynamic": True, "type": kind},
    }
    self.config = {
      "quant_method": "compressed-tensors",
      "format": f"{kind}-quantized",
      "config_groups": {"group_0": group},
    }

  def encode(self, random, name, m, n):
    rows, columns = {
      "tensor": (m, n),
      "channel": (1, n),
      "group": (1, GROUP),
      "block": (24, 16),
    }[self.strategy]
    shape = (-(-m // rows), -(-n // columns))
    scales = random.uniform(0.01, 0.05, shape).astype(ml_dtypes.bfloat16)
    zeros = np.zeros(shape, np.int8)
    if self.kind == "int":
      codes = random.integers(-128, 128, (m, n)).astype(np.int8)
      if not self.symmetric:
        zeros = random.integers(-9, 9, shape).astype(np.int8)
    else:
      codes = random.standard_normal((m, n)).astype(ml_dtypes.float8_e4m3fn)
    found = np.empty((m, n), np.float32)
    for i, j in np.ndindex(m, n):
      at = (i // rows, j // columns)
      code = np.float32(codes[i, j]) - np.float32(zeros[at])
      found[i, j] = code * np.float32(scales[at])
    made = {name: codes, f"{name}_scale": scales}
    if self.strategy == "tensor":
      made[f"{name}_scale"] = scales.reshape(1)
      zeros = zeros.reshape(1)
    if not self.symmetric:
      made[f"{name}_zero_point"] = zeros
    return made, found


class Gptq:
  """AutoGPTQ and GPTQModel: [in, out], codes along the inputs."""

  def __init__(
    self, bits=4, group=GROUP, symmetric=True, order=False, v2=False
  ):
    self.bits, self.group, self.symmetric = bits, group, symmetric
    self.order, self.v2 = order, v2
    self.config = {
      "quant_method": "gptq",
      "bits": bits,
      "group_size": -1 if group is None else group,
      "desc_act": order,
      "sym": symmetric,
      "checkpoint_format": "gptq_v2" if v2 else "gptq",
      "damp_percent": 0.1,
      "meta": {"quantizer": ["gptqmodel:2.0"]},
    }

  def encode(self, random, name, m, n):
    found = grouped(random, m, n, self.bits, self.group, self.symmetric)
    codes, zeros, scales, at = found
    if self.order:
      at = random.permutation(at)
    each, base = 32 // self.bits, name.removesuffix("weight")
    words = np.zeros((n // each, m), np.int32)
    for i, j in np.ndindex(m, n):
      put(words, (j // each, i), self.bits * (j % each), codes[i, j])
    packed = np.zeros((zeros.shape[1], m // each), np.int32)
    for i, g in np.ndindex(zeros.shape):
      # Version 1 stores a zero less one, of so many bits.
      code = zeros[i, g] if self.v2 else (zeros[i, g] - 1) % 2**self.bits
      put(packed, (g, i // each), self.bits * (i % each), code)
    made = {
      f"{base}qweight": words,
      f"{base}qzeros": packed,
      f"{base}scales": scales.T,
      f"{base}g_idx": at.astype(np.int32),
      # AutoGPTQ's layers all have one.
      f"{base}bias": np.zeros(m, np.float16),
    }
    return made, numbers(codes, zeros, scales, at)


class Awq:
  """AutoAWQ's gemm: [in, out], codes along the outputs, in its order."""

  order = (0, 2, 4, 6, 1, 3, 5, 7)

  def __init__(self, group=GROUP):
    self.group = group
    self.config = {
      "quant_method": "awq",
      "bits": 4,
      "group_size": -1 if group is None else group,
      "zero_point": True,
      "version": "gemm",
      "modules_to_not_convert": None,
    }

  def pack(self, codes):
    """[A, M] -> int32 [A, M / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int32)
    for a, w in np.ndindex(words.shape):
      for place, column in enumerate(self.order):
        put(words, (a, w), 4 * place, codes[a, 8 * w + column])
    return words

  def encode(self, random, name, m, n):
    found = grouped(random, m, n, 4, self.group, False)
    codes, zeros, scales, at = found
    base = name.removesuffix("weight")
    made = {
      f"{base}qweight": self.pack(codes.T),
      f"{base}qzeros": self.pack(zeros.T),
      f"{base}scales": scales.T,
    }
    return made, numbers(codes, zeros, scales, at)


class BitsAndBytes:
  """LLM.int8(): the largest magnitude of a row is 127."""

  def __init__(self):
    self.config = {
      "quant_method": "bitsandbytes",
      "_load_in_8bit": True,
      "_load_in_4bit": False,
      "load_in_8bit": True,
      "load_in_4bit": False,
      "llm_int8_threshold": 6.0,
      "llm_int8_skip_modules": None,
      "bnb_4bit_compute_dtype": "float32",
    }

  def encode(self, random, name, m, n):
    codes = random.integers(-127, 128, (m, n)).astype(np.int8)
    most = random.uniform(1, 4, m).astype(np.float32)
    base = name.removesuffix("weight")
    made = {
      name: codes,
      f"{base}SCB": most,
      f"{base}weight_format": np.array(0, np.uint8),
    }
    return made, (codes * most[:, None].astype(np.float64)) / 127


class OneScale:
  """Float8 with a scale for a tensor, or for a row."""

  def __init__(self, ending="weight_scale", rows=False, **config):
    self.ending, self.rows, self.config = ending, rows, config

  def encode(self, random, name, m, n):
    codes = random.standard_normal((m, n)).astype(ml_dtypes.float8_e4m3fn)
    shape = (m, 1) if self.rows else ()
    scales = random.uniform(0.5, 2, shape).astype(np.float32)
    base = name.removesuffix("weight")
    made = {name: codes, base + self.ending: np.asarray(scales)}
    if not self.rows:
      made[f"{base}input_scale"] = np.array(0.5, np.float32)
    return made, codes.astype(np.float32) * scales


class DeepSeek4:
  """Blocks of float8, and experts of four bits with exponents for 32."""

  def __init__(self, ending="scale"):
    self.ending = ending
    self.config = {
      "quant_method": "fp8",
      "activation_scheme": "dynamic",
      "fmt": "e4m3",
      "scale_fmt": "ue8m0",
      "weight_block_size": [32, 48],
      "expert_dtype": "fp4",
    }

  def encode(self, random, name, m, n):
    scale = name.removesuffix("weight") + self.ending
    if ".experts." in name and n % 32 == 0:
      codes = random.integers(0, 16, (m, n))
      exponents = random.integers(118, 124, (m, n // 32)).astype(np.uint8)
      packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
      values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
      values = np.where(codes & 8, -values, values)
      tensors = {name: packed.view(np.int8), scale: exponents}
      return tensors, values * np.exp2(np.repeat(exponents, 32, 1) - 127.0)
    codes = random.standard_normal((m, n)).astype(ml_dtypes.float8_e4m3fn)
    shape = -(-m // 32), -(-n // 48)
    exponents = random.integers(118, 126, shape).astype(np.uint8)
    powers = np.exp2(exponents - 127.0)
    powers = np.repeat(np.repeat(powers, 32, 0), 48, 1)[:m, :n]
    return {name: codes, scale: exponents}, codes.astype(np.float64) * powers


FORMATS = {
  "pack": Pack(),
  "gptq": Gptq(),
  "awq": Awq(),
  "bitsandbytes": BitsAndBytes(),
  "w8a8": Plain(),
  "pack_zeros": Pack(symmetric=False),
  "pack_order": Pack(order=True),
  "pack_8": Pack(8, None),
  "pack_8_zeros": Pack(8, GROUP, symmetric=False),
  "int_group": Plain(strategy="group", symmetric=False),
  "int_tensor": Plain(strategy="tensor"),
  "float8_channel": Plain("float"),
  "float8_tensor": Plain("float", "tensor"),
  "float8_block": Plain("float", "block"),
  "gptq_zeros": Gptq(symmetric=False),
  "gptq_v2_zeros": Gptq(symmetric=False, v2=True),
  "gptq_order": Gptq(order=True),
  "gptq_8": Gptq(8, None),
  "gptq_8_zeros": Gptq(8, symmetric=False),
  "awq_all": Awq(None),
  "fp8": OneScale(quant_method="fp8", activation_scheme="static"),
  "fp8_inv": OneScale(
    "weight_scale_inv", quant_method="fp8", weight_block_size=None
  ),
  "fbgemm": OneScale(
    rows=True, quant_method="fbgemm_fp8", activation_scale_ub=1200.0
  ),
  "deepseek_v4": DeepSeek4(),
  "modelopt": OneScale(
    quant_method="modelopt", quant_algo="FP8", producer={"name": "modelopt"}
  ),
}  # fmt: skip
QUICK = ("pack", "gptq", "awq", "bitsandbytes")


def some(*quick: str):
  """All formats, of which only some run on every commit."""
  return [
    name if name in quick else pytest.param(name, marks=pytest.mark.long)
    for name in FORMATS
  ]


def folder_of(path, kind, family="llama3", **sizes):
  """(the folder, its tensors, the numbers they stand for)."""
  config = checkpoints.config(family) | dict(num_hidden_layers=1) | sizes
  if family == "llama3":
    config["intermediate_size"] = 96
  random = np.random.default_rng(7)
  packed, plain = {}, {}
  read, names = models.read_config(config)
  for tensor in checkpoint_tensors(models.abstract(config), names.names(read)):
    name, shape = tensor.name, tensor.form.stored
    if "proj" in name and name.endswith("weight") and len(shape) == 2:
      made, plain[name] = kind.encode(random, name, *shape)
      packed |= made
    else:
      x = random.standard_normal(shape).astype(np.float32)
      packed[name] = plain[name] = x
  config["quantization_config"] = kind.config
  return checkpoints.write_folder(packed, config, path), packed, plain


def arrays_of(model):
  """The tensors of a model as a plain folder has them."""
  params = {k: p.get_value() for k, p in parameters(model).items()}
  _, family = models.read_config(json.loads(model.source))
  return {
    tensor.name: tensor.form.join(
      tuple(np.asarray(params[path])[index] for path, index in tensor.targets)
    )
    for tensor in checkpoint_tensors(model, family.names(model.config))
  }


def close(model, want, rtol=1e-6):
  got = arrays_of(model)
  assert got.keys() == want.keys()
  for name, x in want.items():
    np.testing.assert_allclose(got[name], x, rtol, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("name", some(*QUICK))
def test_codes_become_the_numbers_they_stand_for(name, tmp_path):
  folder, _, plain = folder_of(tmp_path / "a", FORMATS[name])
  model = models.load(folder)
  assert str(model.dtype) == "float32"
  close(model, plain)
  assert "quantization_config" not in json.loads(model.source)


def test_codes_without_zeros_are_around_half_of_them():
  """Eight codes of a word, of which the row has four."""
  form = PackedRows(form=Reshape((1, 4), (1, 4)), bits=4, groups=1, size=4)
  words = np.array([[7 | 8 << 4 | 9 << 8 | 0 << 12]], np.int32)
  found = form.unpack(jnp.asarray(words), jnp.array([[0.5]], jnp.float32))
  np.testing.assert_array_equal(found, [[-0.5, 0, 0.5, -4]])


@pytest.mark.long
@pytest.mark.parametrize("name", some("gptq_zeros"))
def test_layers_on_disk_stand_for_the_same(name, tmp_path):
  folder, _, _ = folder_of(tmp_path / "a", FORMATS[name], num_hidden_layers=3)
  tokens = np.arange(6, dtype=np.int32)[None]
  want = models.load(folder)(tokens)
  placed = models.load(folder, placement="disk")
  np.testing.assert_array_equal(placed(tokens), want)


def test_two_names_of_one_field():
  config = checkpoints.config("llama3")
  packed = lambda **given: packing(
    {**config, "quantization_config": changed("gptq", **given)}
  )
  base = FORMATS["gptq"].config
  assert "format" not in base
  assert packed(checkpoint_format="gptq").less == 1
  assert packed(checkpoint_format="gptq_v2").less == 0
  both = dict(format="gptq_v2", checkpoint_format="gptq")
  refused(ConfigError, lambda: packed(**both), "checkpoint_format")
  alone = {k: v for k, v in base.items() if k != "checkpoint_format"}
  alone["format"] = "gptq_v2"
  assert packing({**config, "quantization_config": alone}).less == 0
  awq = {k: v for k, v in FORMATS["awq"].config.items() if k != "group_size"}
  awq |= {"q_group_size": GROUP}
  assert packing({**config, "quantization_config": awq}).size == GROUP


@pytest.mark.parametrize("name", some("gptq"))
def test_devices_read_their_own_codes(name, tmp_path, monkeypatch):
  """Two devices have half of the codes each, and the numbers are the same."""
  folder, packed, plain = folder_of(tmp_path / "a", FORMATS[name])
  seen = {}
  read = Folder.read

  def spy(self, targets, **options):
    seen.update(targets)
    return read(self, targets, **options)

  monkeypatch.setattr(Folder, "read", spy)
  mesh = jax.make_mesh(
    (2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
  )
  close(models.load(folder, mesh=mesh), plain)
  halves = 0
  for key, x in packed.items():
    eight = x.dtype.itemsize == 1 and key in plain
    if eight or key.endswith(("packed", "qweight")):
      part = seen[key].sharding.shard_shape(x.shape)
      halves += 2 * np.prod(part) == x.size
  assert halves == 7


@pytest.mark.parametrize(
  ("family", "name"),
  [
    *(
      pytest.param(family, name, marks=pytest.mark.long)
      for family, name in (
        ("phi3", "pack"),
        ("qwen3_moe", "pack"),
        ("phi3", "bitsandbytes"),
        ("deepseek_v3_noq", "w8a8"),
        ("gemma2", "float8_tensor"),
      )
    ),
  ],
)
def test_families(family, name, tmp_path):
  """Fused maps, experts and latents, as bfloat16."""
  layers = checkpoints.config(family)["num_hidden_layers"]
  sizes = dict(num_hidden_layers=layers)
  folder, _, plain = folder_of(tmp_path / "a", FORMATS[name], family, **sizes)
  model = models.load(folder, dtype="bfloat16")
  got = arrays_of(model)
  assert got.keys() == plain.keys()
  for key, x in got.items():
    want = np.asarray(plain[key], np.float32)
    np.testing.assert_allclose(x.astype(np.float32), want, 2**-8, err_msg=key)


@pytest.mark.parametrize("name", [
  pytest.param("gptq", marks=pytest.mark.long),
  pytest.param("deepseek_v4", marks=pytest.mark.long),
  *(pytest.param(x, marks=pytest.mark.slow) for x in ("awq", "fp8", "pack_8")),
])  # fmt: skip
def test_experts(name, tmp_path):
  """Each expert's maps are packed by themselves."""
  sizes = dict(num_hidden_layers=1, moe_intermediate_size=32)
  sizes |= dict(num_local_experts=2)
  sizes |= dict(num_experts_per_tok=1)
  kind = FORMATS[name]
  folder, packed, plain = folder_of(tmp_path / "a", kind, "qwen3_moe", **sizes)
  assert sum(".experts.1." in key for key in packed) > 3
  model = models.load(folder)
  close(model, plain)
  # On disk they stay packed, and are unpacked when the layer runs.
  streamed = models.load(folder, placement="disk")
  tokens = np.arange(6)[None] % 60
  np.testing.assert_array_equal(streamed(tokens), model(tokens))


def test_saved_and_loaded_again(tmp_path):
  """What was quantised is written as floats."""
  folder, _, plain = folder_of(tmp_path / "a", FORMATS["awq"])
  models.save(models.load(folder), tmp_path / "b")
  assert "quantization_config" not in Folder.open(tmp_path / "b").config
  close(models.load(tmp_path / "b"), plain)


def test_a_tensor_that_is_missing(tmp_path):
  folder, packed, _ = folder_of(tmp_path / "a", FORMATS["gptq"])
  config = Folder.open(folder).config
  base = "model.layers.0.mlp.up_proj."
  for n, ending in enumerate(("scales", "qzeros", "qweight")):
    arrays = {k: x for k, x in packed.items() if k != base + ending}
    odd = checkpoints.write_folder(arrays, config, tmp_path / str(n))
    refused(CheckpointMismatchError, lambda o=odd: models.load(o), base)
  arrays = {**packed, f"{base}bias": np.ones(96, np.float16)}
  odd = checkpoints.write_folder(arrays, config, tmp_path / "bias")
  refused(ConfigError, lambda: models.load(odd), f"{base}bias")


def test_an_order_of_codes_that_is_not_known(tmp_path):
  folder, packed, _ = folder_of(tmp_path / "a", FORMATS["bitsandbytes"])
  key = "model.layers.0.mlp.up_proj.weight_format"
  arrays = {**packed, key: np.array(2, np.uint8)}
  config = Folder.open(folder).config
  odd = checkpoints.write_folder(arrays, config, tmp_path / "b")
  refused(ConfigError, lambda: models.load(odd), key, "rows")


def changed(name, **values):
  return FORMATS[name].config | values


def weights_of(**values):
  config = json.loads(json.dumps(FORMATS["pack"].config))
  config["config_groups"]["group_0"]["weights"].update(values)
  return config


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (changed("gptq", bits=3), ("bits", "3")),
    (changed("gptq", checkpoint_format="marlin"), ("marlin",)),
    (changed("gptq", is_marlin_format=True), ("is_marlin_format",)),
    (changed("gptq", dynamic={"a": {"bits": 8}}), ("dynamic",)),
    (changed("gptq", new_trick=1), ("new_trick",)),
    (changed("awq", version="gemv"), ("gemv",)),
    (changed("awq", bits=8), ("bits", "8")),
    (changed("bitsandbytes", load_in_4bit=True), ("load_in_4bit",)),
    (changed("pack", format="marlin-24"), ("marlin-24",)),
    (changed("pack", format="nvfp4-pack-quantized"), ("nvfp4",)),
    (changed("pack", sparsity_config={"format": "a"}), ("sparsity_config",)),
    (changed("pack", config_groups={}), ("config_groups",)),
    (changed("modelopt", quant_algo="NVFP4"), ("quant_algo",)),
    (weights_of(num_bits=3), ("num_bits", "3")),
    (weights_of(strategy="attn_head"), ("strategy",)),
    (weights_of(dynamic=True), ("dynamic",)),
    (weights_of(new_trick=1), ("new_trick",)),
  ],
)
def test_what_is_not_known(given, words):
  config = {**checkpoints.config("llama3"), "quantization_config": given}
  refused(
    ConfigError, lambda: models.read_config(config), "quantization", *words
  )


# ---------------------------------------------------------------------------
# What a config says, and the tensors contradict
# ---------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj."


def seen(folder):
  """What is found in a folder without reading its weights."""
  opened = Folder.open(folder)
  source, family = text_config(opened.config)
  return contents(opened, family, models.abstract(source), source)


@functools.cache
def encoded(name, directory):
  folder, packed, _ = folder_of(directory / name, FORMATS[name])
  return Folder.open(folder).config, packed


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return tmp_path_factory.mktemp("formats")


def scheme(**values):
  return {
    "config_groups": {
      "group_0": {
        **FORMATS["pack"].config["config_groups"]["group_0"],
        "weights": weights_of(**values)["config_groups"]["group_0"]["weights"],
      }
    }
  }


SHUFFLED = np.random.default_rng(0).permutation(np.arange(64) // GROUP)
CONTRADICTIONS = [
  ("gptq_zeros", {"sym": True}, {}, ("sym", "qzeros", "false")),
  ("gptq", {"checkpoint_format": "gptq_v2"}, {}, ("sym", "checkpoint_format")),
  ("gptq", {"bits": 8}, {}, ("k_proj.qweight",)),
  ("gptq", {"group_size": 32}, {}, ("k_proj.scales",)),
  ("gptq", {}, {UP + "g_idx": SHUFFLED}, ("desc_act", UP + "g_idx")),
  ("gptq", {}, {UP + "g_idx": SHUFFLED + 1}, ("group_size", UP + "g_idx")),
  ("gptq", {"desc_act": True}, {UP + "g_idx": None}, (UP + "g_idx",)),
  ("awq", {"sym": True}, {}, ("sym", "qzeros")),
  ("awq", {"zero_point": False}, {}, ("qzeros",)),
  ("awq", {"desc_act": True}, {}, ("desc_act",)),
  ("awq", {"group_size": 32}, {}, ("scales",)),
  ("pack_zeros", scheme(), {}, ("symmetric", "zero_point")),
  ("pack", scheme(symmetric=False), {}, ("zero_point",)),
  ("pack_order", scheme(), {}, ("actorder", "g_idx")),
  ("pack", scheme(actorder="group"), {}, ("g_idx",)),
  ("pack", scheme(num_bits=8), {}, ("weight_packed",)),
  ("pack", scheme(group_size=32), {}, ("weight_scale",)),
  ("pack", {}, {UP + "weight_shape": np.array([48, 96])}, ("weight_shape",)),
  ("w8a8", scheme(type="float", num_bits=8), {}, ("int8", "float8_e4m3fn")),
  ("int_group", scheme(num_bits=8), {}, ("symmetric", "zero_point")),
  ("int_tensor", scheme(num_bits=8, strategy="channel"), {}, ("weight_scale",)),
  ("w8a8", {"quant_method": "fp8"}, {}, ("int8", "float8_e4m3fn")),
  ("float8_block", {"quant_method": "fp8", "weight_block_size": [32, 32]}, {},
   ("scale",)),
  ("bitsandbytes", {"_load_in_8bit": False}, {}, ("_load_in_8bit",)),
  ("fbgemm", {"quant_method": "bitsandbytes", "load_in_8bit": True}, {},
   ("float8_e4m3fn", "int8")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "said", "tensors", "words"), CONTRADICTIONS)
def test_tensors_that_contradict_the_config(
  name, said, tensors, words, directory, tmp_path
):
  config, packed = encoded(name, directory)
  packed = {k: x for k, x in (packed | tensors).items() if x is not None}
  how = {**config["quantization_config"], **said}
  if "quant_method" in said:
    how = said
  config = {**config, "quantization_config": how}
  odd = checkpoints.write_folder(packed, config, tmp_path)
  errors = (ConfigError, CheckpointMismatchError)
  refused(errors, lambda: seen(odd), *words)


def test_zeros_in_the_middle_may_be_there(directory, tmp_path):
  """Some writers store them for codes that are symmetric."""
  config, packed = encoded("pack", directory)
  shape = (96 // 8, 64 // GROUP)
  middle = np.full(shape, 0x88888888, np.uint32).view(np.int32)
  more = {**packed, UP + "weight_zero_point": middle}
  seen(checkpoints.write_folder(more, config, tmp_path))

"""GGUF files as they are stored: codes that stay codes, layers on disk."""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax.data.gguf.gguf_file import open_gguf
from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.models.gguf.blocks import BLOCKS
from ringjax.nn.weights.block_codes import BlockCodesLinear
from tests.helpers import refused
from tests.models import test_gguf as files

# Where blocks have float16 scales, by ggml's numbers of their types.
_SCALES = {
  2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 10: (80, 82), 11: (108,),
  12: (0, 2), 13: (0, 2), 14: (208,), 20: (0,), 23: (0,),
}  # fmt: skip
_TOKENS = np.arange(12)[None] * 5 % 64


def _random_blocks(number, rows, columns, rng):
  """Rows of random bytes, whose scales are small numbers."""
  block = BLOCKS[number]
  shape = rows, columns // block.size
  raw = rng.integers(0, 256, (*shape, block.nbytes), np.uint8)
  if block.name == "MXFP4":
    raw[..., 0] = rng.integers(110, 120, shape)
  for at in _SCALES.get(number, ()):
    scale = rng.uniform(-2e-3, 2e-3, shape).astype(np.float16)
    raw[..., at : at + 2] = scale[..., None].view(np.uint8)
  return raw.reshape(rows, -1)


@pytest.mark.parametrize("number", BLOCKS)
def test_blocks_are_taken_apart_to_the_bit(number):
  kind, block = gguf.GGMLQuantizationType(number), BLOCKS[number]
  assert block.name == kind.name
  assert gguf.GGML_QUANT_SIZES[kind] == (block.size, block.nbytes)
  raw = _random_blocks(number, 3, 2 * block.size, np.random.default_rng(number))
  want = gguf.dequantize(raw, kind)
  assert np.isfinite(want).all() and want.std() > 0
  np.testing.assert_array_equal(block.floats(jnp.asarray(raw)), want)


def file_of_kinds(tmp_path, name, kinds, **sizes):
  """A file whose maps have the types that `kinds` says by their names."""
  tmp_path.mkdir(exist_ok=True)
  config, tensors = files._small(tmp_path, name, **sizes)
  w = files._writer(tmp_path / "m.gguf", name, config)
  rng = np.random.default_rng(2)
  for key, x in tensors:
    kind = next((k for part, k in kinds.items() if part in key), None)
    x = np.ascontiguousarray(x, np.float32)
    if kind is None or x.ndim < 2 or "conv" in key:
      w.add_tensor(key, x)
      continue
    kind = gguf.GGMLQuantizationType[kind]
    if kind.name.endswith("_K"):
      raw = _random_blocks(kind, int(np.prod(x.shape[:-1])), x.shape[-1], rng)
      raw = raw.reshape(*x.shape[:-1], -1)
    else:
      raw = gguf.quantize(x, kind)
    w.add_tensor(key, raw, raw_dtype=kind)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return tmp_path / "m.gguf"


def _maps(model):
  """Weights by their paths, of codes decoded, and how many are codes."""
  leaves = jax.tree_util.tree_leaves_with_path(
    model, is_leaf=lambda x: isinstance(x, BlockCodesLinear | nnx.Variable)
  )
  weights, count = {}, 0
  for path, leaf in leaves:
    key = jax.tree_util.keystr(path, simple=True, separator=".")
    if isinstance(leaf, BlockCodesLinear):
      weights[key] = leaf.weight()
      count += 1
      if leaf.bias is not None:
        weights[f"{key}.bias"] = leaf.bias.get_value()
    else:
      weights[key.removesuffix(".weight")] = leaf.get_value()
  return weights, count


def _stay(path, count, repeats=(1, 6)):
  """A file's codes have its numbers to the bit, and nearly its answers."""
  floats = rj.models.load(path, dtype=jnp.float32)
  codes = rj.models.load(path, dtype=jnp.float32, weights="stored")
  want, _ = _maps(floats)
  got, kept = _maps(codes)
  assert kept == count
  assert got.keys() == want.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(got[key], x, err_msg=key)
  # Few tokens are multiplied group by group, many by decoded weights.
  for tokens in (np.tile(_TOKENS, n) for n in repeats):
    np.testing.assert_allclose(
      codes(tokens), floats(tokens), rtol=2e-4, atol=2e-4
    )
  return floats, codes


def _nbytes(model):
  return sum(x.nbytes for x in jax.tree.leaves(model.stack))


@pytest.mark.long
def test_codes_stay_codes(tmp_path, caplog):
  path = file_of_kinds(tmp_path, "llama", {"attn": "Q4_1", "ffn": "Q8_0"})
  with caplog.at_level("INFO", "ringjax.models.gguf.stored"):
    floats, codes = _stay(path, 7, repeats=(1,))
  assert "stay codes: 8 Q4_1, 6 Q8_0; become floats: 7 F32" in caplog.text
  # 5 bits of 32 for attention's weights, 8.5 for the others.
  maps = _nbytes(floats) - 4 * 2 * 2 * 32
  attention, width = 2 * (2 * 32 * 32 + 2 * 16 * 32), 2 * 3 * 32 * 64
  assert maps == 4 * (attention + width)
  assert (
    _nbytes(codes) - 4 * 2 * 2 * 32 == attention * 5 // 8 + width * 17 // 16
  )
  refused(OptionError, lambda: rj.models.save(codes, tmp_path / "x"), "codes")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "MXFP4"])
def test_codes_of_a_type_stay_codes(tmp_path, kind):
  _stay(file_of_kinds(tmp_path, "llama", {"blk": kind}), 7)


@pytest.mark.slow
def test_layers_of_several_types_share_a_layout(tmp_path):
  """As llama.cpp's Q4_K_M: better types for the values of some layers."""
  kinds = {
    "blk.0.attn_v": "Q6_K", "blk.1.attn_v": "Q4_K", "blk.0.ffn_down": "Q5_K",
    "blk.1.ffn_down": "Q4_0", "blk.0.attn_q": "Q2_K", "blk.1.attn_q": "Q3_K",
    "blk": "Q4_K",
  }  # fmt: skip
  path = file_of_kinds(
    tmp_path, "llama", kinds, hidden_size=256, intermediate_size=256,
    head_dim=64,
  )  # fmt: skip
  _stay(path, 7)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "count"),
  [("phi3", 7), ("gpt2", 4), ("bloom", 6), ("falcon", 6), ("mixtral", 7),
   ("gpt-oss", 7), ("qwen2moe", 10), ("gemma3", 7), ("mamba", 3),
   pytest.param("gemma4-mixture", 20, marks=pytest.mark.slow)],
)  # fmt: skip
def test_maps_of_an_architecture_stay_codes(tmp_path, name, count):
  kinds = {
    "attn": "Q4_1",
    "exps": "MXFP4",
    "shexp": "Q4_0",
    "ffn_gate_inp": None,
  }
  kinds |= {"ffn": "Q4_0", "ssm_in": "Q4_0", "ssm_out": "Q4_0"}
  _stay(file_of_kinds(tmp_path, name, kinds), count)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_codes_are_shared_out_over_a_mesh(tmp_path, name):
  path = file_of_kinds(
    tmp_path, name, {"attn": "Q4_1", "exps": "MXFP4", "ffn_d": "Q8_0"}
  )
  load = functools.partial(
    rj.models.load, path, dtype=jnp.float32, weights="stored"
  )
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  whole, cut = load(), load(mesh=mesh)
  for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
    np.testing.assert_array_equal(x, y)
  np.testing.assert_allclose(cut(_TOKENS), whole(_TOKENS), rtol=2e-4, atol=2e-4)


@pytest.mark.long
def test_a_map_of_floats_among_codes_stays_floats(tmp_path):
  kinds = {"blk.1.ffn_up": None, "ffn": "Q4_0"}
  path = file_of_kinds(tmp_path, "llama", kinds)
  codes = rj.models.load(path, dtype=jnp.float32, weights="stored")
  assert _maps(codes)[1] == 2
  with pytest.raises(OptionError, match="blocks of Q4_0"):
    rj.models.load(file_of_kinds(tmp_path / "b", "llama", {}), weights="stored")
  with pytest.raises(OptionError, match="a GGUF file"):
    rj.models.load(tmp_path / "hf", weights="stored")
  with pytest.raises(OptionError, match="stored"):
    rj.models.load(path, weights="int8")


def test_codes_whose_scales_are_nan_are_refused(tmp_path):
  path = file_of_kinds(
    tmp_path, "llama", {"blk.1.ffn_up": "Q4_0", "ffn": "Q4_0"}
  )
  at = open_gguf(path).tensors["blk.1.ffn_up.weight"].offset
  data = bytearray(path.read_bytes())
  data[at : at + 2] = b"\x00\x7e"
  path.write_bytes(data)
  with pytest.raises(CheckpointMismatchError, match="not finite"):
    rj.models.load(path, weights="stored")


@pytest.mark.long
@pytest.mark.parametrize("weights", [None, "stored"])
def test_layers_on_disk_have_the_numbers_of_the_file(tmp_path, weights):
  path = file_of_kinds(tmp_path, "llama", {"attn": "Q4_1", "blk.1.ffn": "Q8_0"})
  want = rj.models.load(path, dtype=jnp.float32, weights=weights)
  got = rj.models.load(
    path, dtype=jnp.float32, placement="device=.5,disk=.5", weights=weights
  )
  assert got.placement_report().disk_bytes
  np.testing.assert_array_equal(got(_TOKENS), want(_TOKENS))


@pytest.mark.long
@pytest.mark.parametrize(
  "name", ["gpt-oss", "gemma3", "gpt2", "lfm2", "falcon", "mamba"]
)
def test_layers_of_an_architecture_are_read_from_disk(tmp_path, name):
  path = file_of_kinds(tmp_path, name, {"ffn": "Q4_0"})
  want = rj.models.load(path, dtype=jnp.float32)
  got = rj.models.load(path, dtype=jnp.float32, placement="disk")
  # Mamba's logarithms are taken on the device.
  atol = 1e-5 if name == "mamba" else 1e-6
  np.testing.assert_allclose(got(_TOKENS), want(_TOKENS), rtol=atol, atol=atol)

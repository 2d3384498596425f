"""The fixtures of the model zoo hold together, and write what they promise."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open

from tests import checkpoints

NAMES = checkpoints.names()
FOLDER_BYTES, TOTAL_BYTES = 60 * 2**10, 5 * 2**20


def read(path):
  with safe_open(path, framework="numpy") as file:
    assert file.metadata() == {"format": "pt"}
    return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def test_there_are_models():
  assert {"llama2", "llama3", "gemma2", "phi3"} <= set(NAMES)
  folders = {path.name for path in checkpoints.MODELS.iterdir()}
  assert folders == set(NAMES)
  assert set(checkpoints.names_v4()) <= set(NAMES)


def test_what_is_committed_is_small():
  total = 0
  for name in NAMES:
    files = (checkpoints.MODELS / name).iterdir()
    size = sum(path.stat().st_size for path in files)
    assert size < FOLDER_BYTES, name
    total += size
  assert total < TOTAL_BYTES


def test_normal_numbers_are_these_for_ever():
  x = checkpoints.normal("model.norm.weight", (2, 3), 7)
  steps = x * np.sqrt((2**32 - 1) / 3)  # whole numbers, up to rounding
  wanted = [[-25280, 15346, 48965], [-31965, -34789, -9351]]
  np.testing.assert_allclose(steps, wanted, rtol=0, atol=1e-6)


def test_normal_numbers_are_about_normal():
  x = checkpoints.normal("x", (64, 512), 0)
  assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
  other = checkpoints.normal("y", (64, 512), 0)
  again = checkpoints.normal("x", (64, 512), 1)
  assert abs((x * other).mean()) < 0.02 and abs((x * again).mean()) < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_transformers_was_given(name):
  arrays = checkpoints.tensors(name)  # compares a checksum
  assert {k: v.shape for k, v in arrays.items()} == checkpoints.shapes(name)
  for array in arrays.values():
    # DeepSeek-V4 has a table of whole numbers.
    assert array.dtype in (np.float32, np.int64) and np.isfinite(array).all()


@pytest.mark.parametrize("name", NAMES)
def test_expected(name):
  expected = checkpoints.expected(name)
  b, t = expected.tokens.shape
  vocab = checkpoints.config(name)["vocab_size"]
  assert expected.logits.shape == (b, t, vocab)
  assert expected.prompt.shape[0] == b and expected.greedy.shape == (b, 16)
  assert expected.logits.dtype == np.float32
  for ids in (expected.tokens, expected.prompt, expected.greedy):
    assert ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < vocab
  # The first new token continues a prefix of `tokens`.
  p = expected.prompt.shape[1]
  np.testing.assert_array_equal(expected.prompt, expected.tokens[:, :p])
  np.testing.assert_array_equal(
    expected.greedy[:, 0], expected.logits[:, p - 1].argmax(-1)
  )


def test_one_file(tmp_path):
  folder = checkpoints.write("llama2", tmp_path / "a" / "b")
  assert folder == tmp_path / "a" / "b"
  assert {path.name for path in folder.iterdir()} == {
    "config.json",
    "model.safetensors",
  }
  config = json.loads((folder / "config.json").read_text())
  assert config == checkpoints.config("llama2")
  stored = read(folder / "model.safetensors")
  wanted = checkpoints.tensors("llama2")
  assert stored.keys() == wanted.keys()
  for key, array in wanted.items():
    np.testing.assert_array_equal(stored[key], array)


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_and_index(tmp_path, shards):
  folder = checkpoints.write("llama2", tmp_path, shards=shards)
  wanted = checkpoints.tensors("llama2")
  index = json.loads((folder / "model.safetensors.index.json").read_text())
  assert index["metadata"] == {
    "total_parameters": sum(x.size for x in wanted.values()),
    "total_size": sum(x.nbytes for x in wanted.values()),
  }
  files = [
    f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)
  ]
  assert {path.name for path in folder.glob("*.safetensors")} == set(files)
  assert set(index["weight_map"].values()) == set(files)
  stored = {}
  for file in files:
    part = read(folder / file)
    assert {index["weight_map"][key] for key in part} == {file}
    assert not part.keys() & stored.keys()
    stored |= part
  assert stored.keys() == wanted.keys() == index["weight_map"].keys()
  for key, array in wanted.items():
    np.testing.assert_array_equal(stored[key], array)


@pytest.mark.parametrize(
  ("dtype", "code"), [("bfloat16", "BF16"), ("float16", "F16")]
)
def test_dtypes(tmp_path, dtype, code):
  folder = checkpoints.write("llama2", tmp_path, dtype=dtype)
  config = json.loads((folder / "config.json").read_text())
  assert config["dtype"] == dtype
  with safe_open(folder / "model.safetensors", framework="numpy") as file:
    keys = list(file.keys())
    assert {file.get_slice(key).get_dtype() for key in keys} == {code}


def test_a_buffer_keeps_float32(tmp_path):
  folder = checkpoints.write("deepseek_v3", tmp_path, dtype="bfloat16")
  with safe_open(folder / "model.safetensors", framework="numpy") as file:
    for key in file.keys():  # noqa: SIM118
      code = "F32" if key.endswith(checkpoints.BUFFER) else "BF16"
      assert file.get_slice(key).get_dtype() == code, key


@pytest.mark.parametrize("name", checkpoints.names_v4())
def test_spelling_of_transformers_4(tmp_path, name):
  folder = checkpoints.write(name, tmp_path, dtype="bfloat16", spelling="v4")
  config = json.loads((folder / "config.json").read_text())
  assert config["torch_dtype"] == "bfloat16" and "dtype" not in config
  assert "rope_parameters" not in config
  assert config["model_type"] == checkpoints.config(name)["model_type"]


@pytest.mark.parametrize("shards", [0, 10_000])
def test_shards_that_cannot_be(tmp_path, shards):
  with pytest.raises(ValueError, match="shards"):
    checkpoints.write("llama2", tmp_path, shards=shards)

"""launch.convert: the same model in other files, or an error and no files."""

from __future__ import annotations

import json
import pathlib
import shutil
import types
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ringjax as rj
from launch import convert
from launch.shared import answering, console
from ringjax.data import Bytes
from ringjax.data.gguf.gguf_file import open_gguf
from ringjax.models import contents
from tests import checkpoints, predicting
from tests.models import test_gguf as gguf_files

TOKENS = np.arange(12, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("llama") / "model"
  checkpoints.write("llama3", folder, shards=2, spelling="v5")
  Bytes().save(folder)
  (folder / "generation_config.json").write_text('{"temperature": 0.6}')
  (folder / "LICENSE").write_text("Yours.")
  (folder / "modeling_evil.py").write_text("raise SystemExit")
  (folder / "pytorch_model.bin").write_bytes(b"\x80")
  return folder


def logits(folder: pathlib.Path) -> np.ndarray:
  return np.asarray(rj.models.load(folder)(TOKENS))


def same(a, b) -> None:
  """The same model with the same weights, bit for bit, in the same dtypes."""
  assert a.config == b.config
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def files(folder: pathlib.Path) -> set[str]:
  return {path.name for path in folder.iterdir()}


def test_a_check_writes_nothing_and_says_what_is_there(turn, llama):
  before = files(llama)
  ran = turn(f"--model={llama}", "--check")
  assert ran.status == 0, ran.err
  lines = dict(line.split(None, 1) for line in ran.out.splitlines())
  numbers = sum(x.size for x in checkpoints.tensors("llama3").values())
  assert lines["family"] == f"llama, {numbers:,} parameters"
  assert "float32, all finite" in lines["tensors"]
  assert "in 2 files" in lines["weights"]
  assert lines["tokenizer"] == "262 ids, a chat template"
  assert "modeling_evil" not in ran.out
  assert files(llama) == before and "\x1b" not in ran.err


def test_the_same_model_in_one_file(turn, llama, tmp_path):
  out = tmp_path / "deep" / "out"
  ran = turn(f"--model={llama}", f"--out={out}")
  assert ran.status == 0, ran.err
  assert files(out) == {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "LICENSE",
  }
  have = load_file(out / "model.safetensors")
  want = checkpoints.tensors("llama3")
  assert have.keys() == want.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(have[name], x)
  assert (out / "config.json").read_text() == (
    llama / "config.json"
  ).read_text()
  np.testing.assert_array_equal(logits(out), logits(llama))
  assert files(out.parent) == {"out"}


def test_a_longer_context_is_in_the_new_config(turn, llama, tmp_path):
  out = tmp_path / "long"
  ran = turn(f"--model={llama}", f"--out={out}", "--rope_scaling=ntk:factor=2")
  assert ran.status == 0, ran.err
  longer, plain = rj.models.load(out), rj.models.load(llama)
  assert longer.config.longest == 2 * plain.config.longest
  same(longer, rj.models.load(llama, rope_scaling="ntk:factor=2"))


def test_another_dtype_and_small_files(turn, llama, tmp_path):
  out = tmp_path / "out"
  out.mkdir()
  flags = ("--dtype=bfloat16", "--max_shard_bytes=20000")
  ran = turn(f"--model={llama}", f"--out={out}", *flags)
  assert ran.status == 0, ran.err
  assert "bfloat16, all finite" in ran.out
  shards = sorted(out.glob("model-*.safetensors"))
  assert len(shards) > 2
  assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
  assert rj.models.load(out).saved_dtype == "bfloat16"
  same(
    rj.models.load(out, dtype="bfloat16"),
    rj.models.load(llama, dtype="bfloat16"),
  )
  back = tmp_path / "back"
  ran = turn(f"--model={out}", f"--out={back}", "--dtype=float32")
  assert ran.status == 0, ran.err
  have = load_file(back / "model.safetensors")
  for name, x in checkpoints.tensors("llama3").items():
    half = x.astype(checkpoints.DTYPES["bfloat16"]).astype(np.float32)
    np.testing.assert_array_equal(have[name], half)


@pytest.mark.long
def test_what_needs_float32_keeps_it(turn, tmp_path):
  folder = checkpoints.write("deepseek_v3", tmp_path / "model")
  out = tmp_path / "out"
  ran = turn(f"--model={folder}", f"--out={out}", "--dtype=bfloat16")
  assert ran.status == 0, ran.err
  assert "bfloat16" in ran.out and "float32" in ran.out
  same(
    rj.models.load(out, dtype="bfloat16"),
    rj.models.load(folder, dtype="bfloat16"),
  )


@pytest.fixture(scope="module")
def codes_file(tmp_path_factory) -> pathlib.Path:
  """A GGUF file of 4-bit codes."""
  place = tmp_path_factory.mktemp("gguf")
  config, named = gguf_files._small(place, "llama")
  kind = gguf.GGMLQuantizationType.Q4_1
  tokens = ["<unk>", *(f"<{n}>" for n in range(1, config["vocab_size"]))]
  gguf_files._write(place / "m.gguf", "llama", config, named, kind, tokens)
  return place / "m.gguf"


@pytest.mark.long
def test_a_file_of_codes_becomes_the_floats_that_it_says(
  turn, codes_file, tmp_path
):
  out = tmp_path / "out"
  ran = turn(f"--model={codes_file}", f"--out={out}")
  assert ran.status == 0, ran.err
  assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
  have = load_file(out / "model.safetensors")
  assert {x.dtype for x in have.values()} == {np.dtype(np.float32)}
  name = "mlp.up_proj.weight"
  np.testing.assert_array_equal(
    have[f"model.layers.1.{name}"],
    open_gguf(codes_file).floats("blk.1.ffn_up.weight"),
  )
  half = tmp_path / "half"
  ran = turn(f"--model={codes_file}", f"--out={half}", "--dtype=bfloat16")
  assert ran.status == 0, ran.err
  assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_line_on_a_file_of_codes_claims_no_dtype_of_it(codes_file):
  values: Any = types.SimpleNamespace(
    model=str(codes_file),
    dtype=None,
    strict=True,
    mesh=None,
    devices=None,
    rope_scaling=None,
  )
  _, line = answering.load(values, codes_file, None)
  assert line is not None and "as in the folder" not in line
  assert "weights of the file held in float32" in line


def test_codes_of_8_bits_become_floats(turn, tmp_path):
  arrays = checkpoints.tensors("llama3")
  config = {
    **checkpoints.config("llama3"),
    "auto_map": {"AutoModel": "modeling_evil.Evil"},
    "dtype": "bfloat16",
    "quantization_config": {
      "activation_scheme": "dynamic",
      "fmt": "e4m3",
      "quant_method": "fp8",
      "weight_block_size": [128, 128],
    },
  }
  name = "model.layers.1.mlp.up_proj.weight"
  codes = arrays[name].astype(ml_dtypes.float8_e4m3fn)
  packed = {
    **arrays,
    name: codes,
    f"{name}_scale_inv": np.full((1, 1), 0.75, np.float32),
  }
  folder = checkpoints.write_folder(packed, config, tmp_path / "model")
  ran = turn(f"--model={folder}", "--check")
  assert ran.status == 0, ran.err
  assert "1 float8_e4m3fn" in ran.out
  out = tmp_path / "out"
  ran = turn(f"--model={folder}", f"--out={out}")
  assert ran.status == 0, ran.err
  have = load_file(out / "model.safetensors")
  assert have.keys() == arrays.keys()
  assert have[name].dtype == checkpoints.DTYPES["bfloat16"]
  want = codes.astype(np.float32) * np.float32(0.75)
  np.testing.assert_array_equal(have[name], want.astype(have[name].dtype))
  # What was no code stays as it was.
  other = "model.layers.0.mlp.up_proj.weight"
  np.testing.assert_array_equal(have[other], arrays[other])
  made = json.loads((out / "config.json").read_text())
  assert "quantization_config" not in made and "auto_map" not in made


def test_a_quantised_layer_that_predicts_becomes_floats(turn, tmp_path):
  """With the copies of embedding and head that its folder has."""
  tensors = checkpoints.tensors("glm4_moe") | predicting.layer_tensors(
    "glm4_moe"
  )
  count = checkpoints.config("glm4_moe")["num_hidden_layers"]
  config = predicting.settings("glm4_moe") | {
    "dtype": "float32",
    "quantization_config": {
      "activation_scheme": "dynamic",
      "fmt": "e4m3",
      "quant_method": "fp8",
      "weight_block_size": [128, 128],
    },
  }
  name = f"model.layers.{count}.self_attn.o_proj.weight"
  codes = tensors[name].astype(ml_dtypes.float8_e4m3fn)
  blocks = tuple(-(-n // 128) for n in codes.shape)
  scales = {f"{name}_scale_inv": np.full(blocks, 0.5, np.float32)}
  packed = tensors | scales | {name: codes}
  folder = checkpoints.write_folder(packed, config, tmp_path / "a")
  ran = turn(f"--model={folder}", f"--out={tmp_path / 'b'}")
  assert ran.status == 0, ran.err
  got = load_file(tmp_path / "b" / "model.safetensors")
  assert got.keys() == tensors.keys()
  want = codes.astype(np.float32) * 0.5
  np.testing.assert_array_equal(got[name], want)
  for other in tensors.keys() - {name}:
    np.testing.assert_array_equal(got[other], tensors[other])
  said = json.loads((tmp_path / "b" / "config.json").read_text())
  assert said["num_nextn_predict_layers"] == 1
  model = rj.models.load(tmp_path / "b", predict_layers=True)
  assert model.config.predicts is not None


def test_layers_that_guess_are_copied(turn, tmp_path):
  config = {**checkpoints.config("youtu"), "num_nextn_predict_layers": 1}
  guess = {"model.layers.2.enorm.weight": np.full(4, 0.1, np.float32)}
  tensors = {**checkpoints.tensors("youtu"), **guess}
  folder = checkpoints.write_folder(tensors, config, tmp_path / "a")
  ran = turn(f"--model={folder}", f"--out={tmp_path / 'b'}", "--dtype=bfloat16")
  assert ran.status == 0, ran.err
  assert "kept unread" in ran.out
  got = load_file(tmp_path / "b" / "model.safetensors")
  assert got.keys() == tensors.keys()
  np.testing.assert_array_equal(got[next(iter(guess))], guess.popitem()[1])
  said = json.loads((tmp_path / "b" / "config.json").read_text())
  assert said == {**config, "dtype": "bfloat16"}


def test_the_text_model_of_one_of_text_and_images(turn, tmp_path):
  arrays = checkpoints.tensors("gemma3_text")
  config = {
    "model_type": "gemma3",
    "text_config": checkpoints.config("gemma3_text"),
    "vision_config": {},
  }
  more = {f"language_model.{name}": x for name, x in arrays.items()}
  more["vision_tower.weight"] = np.ones((2, 2), np.float32)
  folder = checkpoints.write_folder(more, config, tmp_path / "model")
  out = tmp_path / "out"
  ran = turn(f"--model={folder}", f"--out={out}")
  assert ran.status == 0, ran.err
  assert "1, vision_tower.weight" in ran.out
  have = load_file(out / "model.safetensors")
  assert have.keys() == arrays.keys()
  for name, x in arrays.items():
    np.testing.assert_array_equal(have[name], x)
  made = json.loads((out / "config.json").read_text())
  assert made["model_type"] == "gemma3_text"


def _break(folder: pathlib.Path, how: str) -> None:
  weights = folder / "model.safetensors"
  tensors = load_file(weights)
  name = "model.layers.1.mlp.up_proj.weight"
  if how == "nan":
    tensors[name][3, 2] = np.nan
  elif how == "large":
    tensors[name][3, 2] = 1e20
  elif how == "missing":
    del tensors[name]
  elif how == "extra":
    tensors["model.more.weight"] = tensors[name]
  elif how == "shape":
    tensors[name] = tensors[name][:-1]
  elif how == "head":
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
  save_file(tensors, weights)
  if how == "short":
    weights.write_bytes(weights.read_bytes()[:-1])
  if how == "link":
    (folder / "tokenizer.json").unlink()
    secret = folder.parent / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)


@pytest.mark.parametrize(
  ("how", "says"),
  [
    ("nan", "1 of"),
    ("large", "not finite as float16"),
    ("missing", "missing model.layers.1.mlp.up_proj.weight"),
    ("extra", "extra model.more.weight"),
    ("shape", "misshapen model.layers.1.mlp.up_proj.weight"),
    ("short", "model.safetensors"),
    ("head", "lm_head.weight: got other numbers"),
    ("link", "a link out of the folder"),
  ],
)
def test_what_is_wrong_leaves_nothing_behind(turn, tmp_path, how, says):
  folder = checkpoints.write("llama3", tmp_path / "model")
  Bytes().save(folder)
  _break(folder, how)
  before = files(tmp_path)
  flags = [f"--model={folder}", f"--out={tmp_path / 'out'}"]
  ran = turn(*flags, "--dtype=float16")
  assert ran.status == 2 and ran.out == ""
  last = ran.err.splitlines()[-1]
  assert last.startswith("convert: ") and says in last
  assert files(tmp_path) == before
  if how not in ("large", "link"):
    ran = turn(f"--model={folder}", "--check")
    assert ran.status == 2 and says in ran.err


def test_a_place_that_is_taken(turn, llama, tmp_path):
  (tmp_path / "mine").write_text("x")
  for out in (tmp_path, tmp_path / "mine", llama):
    ran = turn(f"--model={llama}", f"--out={out}")
    assert ran.status == 2 and "a new or an empty folder" in ran.err
  assert files(tmp_path) == {"mine"}


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    ([], "--model is required"),
    (["--model=x"], "neither --out nor --check"),
    (["--model=x", "--out=y", "--check"], "--check and --out"),
    (
      ["--model=/none/such", "--check"],
      "path: got /none/such; wanted a folder",
    ),
  ],
)
def test_wrong_flags(turn, flags, says):
  ran = turn(*flags)
  assert ran.status == 2 and ran.out == ""
  assert ran.err.startswith("convert: ") and says in ran.err
  assert ran.err.count("\n") == 1


def test_memory_is_that_of_a_file_and_a_tensor(llama, monkeypatch):
  """Only a batch of tensors is read at a time."""
  held = []
  read = convert.Folder.read

  def spy(self, targets, **options):
    held.append(sum(self.tensors[name].nbytes for name in targets))
    return read(self, targets, **options)

  monkeypatch.setattr(convert.Folder, "read", spy)
  monkeypatch.setattr(contents, "_BATCH_BYTES", 20_000)
  values: Any = types.SimpleNamespace(
    model=str(llama), dtype=None, strict=True, rope_scaling=None
  )
  found = convert._conversion(values)
  screen = console.Screen("convert")
  screen.quiet = True
  names = [name for name, _ in convert._tensors(found, screen)]
  assert sorted(names) == sorted(checkpoints.shapes("llama3"))
  largest = max(info.nbytes for info in found.contents.folder.tensors.values())
  assert max(held) <= max(20_000, largest)
  assert len(held) > 2


@pytest.mark.long
def test_the_command(start, llama, tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(llama, copy)
  flags = (f"--model={copy}", f"--out={tmp_path / 'out'}")
  with start("-m", "launch.convert", *flags) as process:
    out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  assert "all finite" in out and "\x1b" not in err

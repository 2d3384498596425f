"""Checkpoints: what is saved is what was loaded, and what cannot be is said."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

from ringjax import models
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  ConfigError,
  InputTypeError,
  MemoryEstimateError,
  MeshError,
  OptionError,
  UnsafeFormatError,
)
from ringjax.models import checkpoint
from ringjax.models.hf.tensors import checkpoint_tensors, parameters
from ringjax.nn.param import Rules
from ringjax.parallel import memory
from tests import checkpoints

ROOT = pathlib.Path(__file__).parents[2]
NAMES = checkpoints.names()
LIMIT = 400
JAX_WORDS = re.compile(r"\bjax\b(?!\.)|xla|tracer|pytree|nnx|beartype", re.I)

# Every form in which tensors lie: plain, fused with and without groups, in
# columns, one an expert, of a convolution; tied and with a head of its own.
FORMS = (
  "falcon_40b",
  "gemma2",
  "gpt_oss",
  "mixtral",
  "phi3",
  "qwen3_next",
)


def stored(folder):
  """Every tensor of a folder, by its name."""
  found = {}
  for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
    with safe_open(path, framework="numpy") as file:
      part = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert not found.keys() & part.keys()
    found |= part
  return found


def same_bits(got, want):
  assert got.keys() == want.keys()
  for name, x in want.items():
    assert got[name].dtype == x.dtype and got[name].shape == x.shape, name
    assert got[name].tobytes() == x.tobytes(), name


def refused(kind, call, *words):
  with pytest.raises(kind) as caught:
    call()
  text = str(caught.value)
  assert len(text) < LIMIT and not JAX_WORDS.search(text), text
  for word in words:
    assert word in text, text
  return text


def make_mesh(shape, names, count=8):
  return jax.make_mesh(
    shape,
    names,
    axis_types=(AxisType.Auto,) * len(names),
    devices=jax.devices()[:count],
  )


# ---------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.long_cases(100)
@pytest.mark.parametrize("name", NAMES)
def test_forms_turn_back_into_the_same_bits(name):
  """What `load` and `save` do to each tensor, in NumPy."""
  config = checkpoints.config(name)
  model = models.abstract(config)
  _, family = models.read_config(config)
  params = parameters(model)
  arrays = checkpoints.tensors(name)
  seen = {path: np.zeros(p.shape, bool) for path, p in params.items()}
  for tensor in checkpoint_tensors(model, family.names(model.config)):
    x = arrays.pop(tensor.name)
    assert x.shape == tensor.form.stored
    pieces = tensor.form.split(x)
    assert len(pieces) == len(tensor.targets)
    for piece, (path, index) in zip(pieces, tensor.targets, strict=True):
      assert piece.shape == params[path].shape[len(index) :]
      assert not seen[path][index].any(), path
      seen[path][index] = True
    again = tensor.form.join(pieces)
    assert np.ascontiguousarray(again).tobytes() == x.tobytes(), tensor.name
  # Every number of every tensor has its place, and every place its number.
  assert all(key.endswith(checkpoints.TABLES) for key in arrays)
  assert all(x.all() for x in seen.values())


@pytest.mark.one_case
@pytest.mark.parametrize(
  "name",
  [n if n in FORMS else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_saved_is_what_was_loaded(name, tmp_path):
  first = checkpoints.write(name, tmp_path / "first")
  model = models.load(first)
  models.save(model, tmp_path / "second")
  want = stored(first)
  for key in [key for key in want if key.endswith(checkpoints.TABLES)]:
    del want[key]
  same_bits(stored(tmp_path / "second"), want)
  config = json.loads((tmp_path / "second" / "config.json").read_text())
  assert config == checkpoints.config(name)


@pytest.mark.long
def test_half_the_bits(tmp_path):
  """bfloat16 stays what it is, and what is wide stays wide."""
  first = checkpoints.write("deepseek_v3", tmp_path / "a", dtype="bfloat16")
  model = models.load(first, dtype=jnp.bfloat16)
  assert model.dtype == jnp.bfloat16
  models.save(model, tmp_path / "b")
  same_bits(stored(tmp_path / "b"), stored(first))
  config = json.loads((tmp_path / "b" / "config.json").read_text())
  assert config["dtype"] == "bfloat16"


def test_half_the_bits_are_float32_on_a_cpu(tmp_path):
  """Held wide, saved as they were; a dtype that is asked for is obeyed."""
  first = checkpoints.write("deepseek_v3", tmp_path / "a", dtype="bfloat16")
  model = models.load(first)
  assert model.dtype == jnp.float32 and model.saved_dtype == "bfloat16"
  models.save(model, tmp_path / "b")
  same_bits(stored(tmp_path / "b"), stored(first))
  config = json.loads((tmp_path / "b" / "config.json").read_text())
  assert config["dtype"] == "bfloat16"
  asked = models.load(first, dtype="float32")
  assert asked.saved_dtype is None
  for have, want in zip(
    jax.tree.leaves(model), jax.tree.leaves(asked), strict=True
  ):
    np.testing.assert_array_equal(have, want)
  assert checkpoint.cast(model, "float32").saved_dtype is None


@pytest.mark.long
def test_half_the_bits_stay_on_a_mesh_and_without_memory(tmp_path, monkeypatch):
  first = checkpoints.write("deepseek_v3", tmp_path / "a", dtype="bfloat16")
  mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,))
  assert models.load(first, mesh=mesh).dtype == jnp.bfloat16
  size = sum(x.nbytes for x in stored(first).values())
  monkeypatch.setattr(checkpoint, "host_free_bytes", lambda: 3 * size)
  with pytest.warns(RuntimeWarning, match="slow on a CPU: in float32 they"):
    model = models.load(first)
  assert model.dtype == jnp.bfloat16 and model.saved_dtype is None


def test_older_spelling_is_written_as_it_came(tmp_path):
  first = checkpoints.write("llama3", tmp_path / "a", spelling="v4")
  models.save(models.load(first, dtype=jnp.bfloat16), tmp_path / "b")
  config = json.loads((tmp_path / "b" / "config.json").read_text())
  assert "torch_dtype" not in config and config["dtype"] == "bfloat16"
  wanted = checkpoints.config("llama3", "v4")
  meaning = lambda c: models.read_config(c)[0]
  assert meaning(config) == meaning(wanted)


def test_sharded_folders(tmp_path):
  """In several files read, in several files written."""
  one = models.load(checkpoints.write("llama3", tmp_path / "one"))
  many = models.load(checkpoints.write("llama3", tmp_path / "many", shards=4))
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_array_equal(a, b)
  models.save(one, tmp_path / "again", max_shard_bytes=50_000)
  files = {p.name for p in (tmp_path / "again").iterdir()}
  assert "model.safetensors.index.json" in files
  assert len(files) > 4
  same_bits(stored(tmp_path / "again"), stored(tmp_path / "one"))


@pytest.mark.long
def test_a_random_model_is_saved_too(tmp_path):
  model = models.create(checkpoints.config("llama3"), seed=3)
  models.save(model, tmp_path / "a")
  again = models.load(tmp_path / "a")
  assert again.config == model.config
  for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(a, b)
  other = models.create(checkpoints.config("llama3"), seed=4)
  weight = lambda m: np.asarray(m.embed.weight.get_value())
  assert not np.array_equal(weight(model), weight(other))


def test_nothing_is_overwritten_by_mistake(tmp_path):
  model = models.create(checkpoints.config("llama3"))
  (tmp_path / "notes.txt").write_text("mine")
  refused(
    OptionError, lambda: models.save(model, tmp_path), "overwrite", "folder"
  )
  models.save(model, tmp_path, overwrite=True)
  assert (tmp_path / "notes.txt").read_text() == "mine"
  assert stored(tmp_path)


# ---------------------------------------------------------------------------
# Onto a mesh
# ---------------------------------------------------------------------------

SPECS = {
  "embed.weight": P("model"),
  "head.weight": P(None, "model"),
  "norm.weight": P(),
  "attention.q.weight": P(None, None, "model"),
  "attention.k.weight": P(None, None, "model"),
  "attention.v.weight": P(None, None, "model"),
  "attention.o.weight": P(None, "model"),
  "feedforward.gate.weight": P(None, None, "model"),
  "feedforward.up.weight": P(None, None, "model"),
  "feedforward.down.weight": P(None, "model"),
  "pre_attention.weight": P(),
  "pre_feedforward.weight": P(),
}


def shardings(model):
  return {
    re.sub(r"stack\.blocks\.\d+\.\d+\.", "", path): p.get_value().sharding
    for path, p in parameters(model).items()
  }


@pytest.fixture(scope="module")
def even(tmp_path_factory):
  """A Llama whose every axis can be halved, its vocabulary too."""
  folder = tmp_path_factory.mktemp("even") / "model"
  config = {**checkpoints.config("llama2"), "vocab_size": 104}
  models.save(models.create(config, seed=1), folder)
  return folder


@pytest.mark.long
def test_onto_a_mesh(even):
  mesh = make_mesh((2, 2, 2), ("data", "seq", "model"))
  one, many = models.load(even), models.load(even, mesh=mesh)
  found = shardings(many)
  assert {path: s.spec for path, s in found.items()} == SPECS
  assert {s.mesh for s in found.values()} == {mesh}
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_array_equal(a, b)
  tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
  np.testing.assert_allclose(many(tokens), one(tokens), rtol=0, atol=2e-5)


def test_moved_to_another_mesh(even):
  one = models.load(even)
  mesh = make_mesh((4, 2), ("seq", "model"))
  moved = models.place(one, mesh)
  assert {p: s.spec for p, s in shardings(moved).items()} == SPECS
  again = models.place(moved, make_mesh((8,), ("seq",)))
  assert {s.spec for s in shardings(again).values()} == {P()}
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(a, b)


# Eight experts on four devices; five, which stay on each; none.
@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "experts"),
  [
    ("deepseek_v3", "model"),
    ("mixtral", None),
    pytest.param("phi3", None, marks=pytest.mark.slow),
  ],
)
def test_other_rules(name, experts, tmp_path):
  """Experts over "model"; what a mesh axis does not divide stays whole."""
  folder = checkpoints.write(name, tmp_path / "model")
  mesh = make_mesh((2, 4), ("seq", "model"))
  rules = Rules(ffn=None, experts="model", embed="seq")
  model = models.load(folder, mesh=mesh, rules=rules)
  found = {path: s.spec for path, s in shardings(model).items()}
  if name != "phi3":
    assert found["feedforward.gate"] == P(None, experts, "seq")
    assert found["feedforward.down"] == P(None, experts, None, "seq")
  # V = 101 is prime.
  assert found["embed.weight"] == P(None, "seq")
  expected = checkpoints.expected(name)
  np.testing.assert_allclose(
    model(expected.tokens), expected.logits, rtol=0, atol=5e-5
  )


def test_random_weights_do_not_depend_on_the_mesh():
  config = checkpoints.config("llama3")
  mesh = make_mesh((2, 4), ("seq", "model"))
  one, many = models.create(config), models.create(config, mesh=mesh)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    assert b.sharding.mesh == mesh
    np.testing.assert_array_equal(a, b)


def test_one_mesh_axis_for_two_axes_of_a_weight(even):
  mesh = make_mesh((8,), ("model",))
  refused(
    MeshError,
    lambda: models.load(even, mesh=mesh, rules=Rules(embed="model")),
    "rules",
    "'model'",
  )


MANUAL = (AxisType.Manual,)


@pytest.mark.parametrize("bad", ["seq", 8, "manual"])
def test_a_mesh_that_cannot_be(even, bad, unchecked):
  if bad == "manual":
    bad = jax.sharding.Mesh(jax.devices(), ("model",), axis_types=MANUAL)
  refused(MeshError, lambda: models.load(even, mesh=bad), "mesh")
  config = checkpoints.config("llama3")
  refused(MeshError, lambda: models.create(config, mesh=bad), "mesh")
  model = models.create(config)
  refused(MeshError, lambda: models.place(model, bad), "mesh")


MEMORY = """
import os, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from ringjax import models
from ringjax.models import contents

def rss(key):
  for line in open("/proc/self/status"):
    if line.startswith(key):
      return int(line.split()[1]) * 1024

contents._BATCH_BYTES = 16 << 20
small, large, axis = sys.argv[1:]
mesh = jax.make_mesh(
  (8,), (axis,), axis_types=(jax.sharding.AxisType.Auto,)
)
# Imports, threads and pools of memory are there before it counts.
models.load(small, mesh=mesh)
with open("/proc/self/clear_refs", "w") as file:
  file.write("5")
before = rss("VmRSS")
model = models.load(large, mesh=mesh)
arrays = jax.tree.leaves(model)
held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
print(rss("VmHWM") - before, held)
"""


@pytest.mark.long
@pytest.mark.skipif(
  not os.access("/proc/self/clear_refs", os.W_OK),
  reason="needs Linux' count of resident pages",
)
@pytest.mark.parametrize(
  ("axis", "layers", "vocab"), [("model", 5, 2048), ("seq", 1, 8192)]
)
def test_peak_memory_is_the_model_and_little_more(
  axis, layers, vocab, tmp_path
):
  """Devices of a CPU are host memory: the model itself is counted as well.

  Over "seq" each of them holds all of it; the embedding, its largest array, is
  there once on each.
  """
  config = {
    **checkpoints.config("llama3"),
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "tie_word_embeddings": axis == "seq",
  }
  folders = []
  for name, count, size in (("small", 1, 256), ("large", layers, vocab)):
    settings = {**config, "num_hidden_layers": count, "vocab_size": size}
    _, family = models.read_config(settings)
    model = models.abstract(settings)
    arrays = {
      t.name: np.full(t.form.stored, 0.5, np.float32)
      for t in checkpoint_tensors(model, family.names(model.config))
    }
    folder = checkpoints.write_folder(arrays, settings, tmp_path / name)
    folders.append(str(folder))
  env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(MEMORY), *folders, axis],
    capture_output=True,
    text=True,
    # Else malloc keeps what is freed, by a rule that changes as it goes.
    env={
      **env,
      "PYTHONPATH": str(ROOT),
      "MALLOC_MMAP_THRESHOLD_": "1000000",
    },
    check=False,
  )
  assert done.returncode == 0, done.stderr
  peak, size = map(int, done.stdout.split())
  assert size > 200 << 20
  # A batch of 16 MiB on its way to the devices, some pieces of it twice; and a
  # tensor of a layer, of which each device of "seq" has a copy.
  assert peak < size + ((64 if axis == "model" else 160) << 20), (peak, size)


# ---------------------------------------------------------------------------
# What cannot be loaded
# ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
  return checkpoints.tensors("llama3")


def broken(folder, arrays, name="llama3", **more):
  config = {**checkpoints.config(name), **more}
  path = checkpoints.write_folder(arrays, config, folder / "model")
  return lambda: models.load(path)


def test_a_missing_tensor(llama, tmp_path):
  name = "model.layers.1.mlp.up_proj.weight"
  arrays = {k: v for k, v in llama.items() if k != name}
  refused(CheckpointMismatchError, broken(tmp_path, arrays), "1 missing", name)


def test_tensors_of_a_whole_layer_missing(llama, tmp_path):
  arrays = {k: v for k, v in llama.items() if ".layers.1." not in k}
  text = refused(CheckpointMismatchError, broken(tmp_path, arrays))
  assert "9 missing" in text and "layers.1." in text


def test_an_extra_tensor(llama, tmp_path):
  name = "model.layers.0.self_attn.q_proj.bias"
  arrays = {**llama, name: np.zeros(64, np.float32)}
  refused(CheckpointMismatchError, broken(tmp_path, arrays), "1 extra", name)


def test_a_buffer_that_is_computed_again(llama, tmp_path):
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  broken(tmp_path, {**llama, name: np.zeros(8, np.float32)})()


def test_a_tensor_of_another_shape(llama, tmp_path):
  name = "model.layers.0.self_attn.o_proj.weight"
  arrays = {**llama, name: llama[name][:-1]}
  shape = json.dumps(list(llama[name].shape))
  refused(
    CheckpointMismatchError,
    broken(tmp_path, arrays),
    "1 misshapen",
    name,
    shape,
  )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none(llama, tmp_path, bad):
  name = "model.layers.1.input_layernorm.weight"
  x = llama[name].copy()
  x[5] = bad
  refused(
    CheckpointMismatchError,
    broken(tmp_path, {**llama, name: x}),
    name,
    "[5]",
    "finite",
  )


def test_a_config_of_another_model(llama, tmp_path):
  call = broken(tmp_path, llama, num_hidden_layers=3)
  refused(CheckpointMismatchError, call, "missing", "layers.2.")


def test_a_config_that_asks_for_the_impossible(llama, tmp_path):
  """Before a byte of a tensor is read, and before anything is allocated."""
  call = broken(tmp_path, llama, hidden_size=2**30, head_dim=16)
  refused(CheckpointMismatchError, call, "misshapen")


@pytest.mark.parametrize(
  ("more", "words"),
  [
    (dict(model_type="mamba3"), ("model_type", "mamba3")),
    (
      dict(auto_map={"AutoModel": "evil.Evil"}, model_type="evil"),
      ("auto_map", "code"),
    ),
    (dict(quantization_config={"bits": 4}), ("quantization_config",)),
    (dict(dtype="int4"), ("dtype", "int4")),
    (dict(dtype=3), ("dtype", "3")),
    (dict(dtype={"text": "bfloat16"}), ("dtype",)),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configs_that_are_refused(llama, tmp_path, more, words):
  refused(ConfigError, broken(tmp_path, llama, **more), *words)


def test_only_a_pickle(tmp_path):
  config = checkpoints.config("llama3")
  (tmp_path / "config.json").write_text(json.dumps(config))

  class Evil:
    def __reduce__(self):
      return pathlib.Path.touch, (tmp_path / "touched",)

  (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
  refused(
    UnsafeFormatError,
    lambda: models.load(tmp_path),
    "pytorch_model.bin",
    "safetensors",
  )
  assert not (tmp_path / "touched").exists()


def test_no_such_folder(tmp_path, unchecked):
  refused(
    CheckpointFormatError,
    lambda: models.load(tmp_path / "absent"),
    "absent",
    "download",
  )
  refused(InputTypeError, lambda: models.load(3), "path", "int")
  refused(ConfigError, lambda: models.load(tmp_path), "config.json")


def test_a_file_cut_short(llama, tmp_path):
  call = broken(tmp_path, llama)
  path = tmp_path / "model" / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-1])
  refused(CheckpointFormatError, call, "model.safetensors")


@pytest.mark.parametrize("dtype", ["int8", "fast", jnp.int32, 3, "float64"])
def test_a_dtype_that_cannot_be(llama, tmp_path, dtype, unchecked):
  path = checkpoints.write("llama3", tmp_path / "model")
  refused(OptionError, lambda: models.load(path, dtype=dtype), "dtype")
  config = checkpoints.config("llama3")
  refused(OptionError, lambda: models.create(config, dtype=dtype), "dtype")


def test_weights_that_do_not_fit(tmp_path, monkeypatch):
  path = checkpoints.write("llama3", tmp_path / "model")
  monkeypatch.setattr(checkpoint, "device_free_bytes", lambda *_: 10_000)
  text = refused(MemoryEstimateError, lambda: models.load(path))
  assert "10,000" in text and "bfloat16" in text and "model" in text
  # Eight devices need an eighth of what is sharded; the rest is whole.
  monkeypatch.setattr(checkpoint, "device_free_bytes", lambda *_: 150_000)
  refused(MemoryEstimateError, lambda: models.load(path), "weights")
  models.load(path, mesh=make_mesh((2,), ("model",), 2))


def test_random_weights_that_do_not_fit(monkeypatch):
  config = checkpoints.config("llama3")
  monkeypatch.setattr(checkpoint, "device_free_bytes", lambda *_: 150_000)
  refused(MemoryEstimateError, lambda: models.create(config), "150,000")
  models.create(config, mesh=make_mesh((2,), ("model",), 2))
  # Shapes take no room.
  jax.eval_shape(lambda: models.create(config))
  models.abstract(config)


def test_free_memory_is_shared_by_the_devices_of_a_host():
  device = jax.devices()[0]
  one, eight = (memory.device_free_bytes(device, n) for n in (1, 8))
  if one is None:
    pytest.skip("unknown here")
  assert 0 < eight < one


# ---------------------------------------------------------------------------
# Tied embeddings
# ---------------------------------------------------------------------------


def test_a_tied_checkpoint_may_hold_its_head(tmp_path):
  """Some writers store the embedding twice; it is read once."""
  config, arrays = checkpoints.config("gemma2"), checkpoints.tensors("gemma2")
  assert "lm_head.weight" not in arrays
  head = {"lm_head.weight": arrays["model.embed_tokens.weight"]}
  folder = checkpoints.write_folder(
    {**arrays, **head}, config, tmp_path / "twice"
  )
  model = models.load(folder)
  assert model.head is None
  models.save(model, tmp_path / "once")
  same_bits(stored(tmp_path / "once"), arrays)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_tied_checkpoint_may_not_hold_another_head(tmp_path, devices):
  """It would be left out without a word, and the logits be others."""
  arrays = checkpoints.tensors("gemma2")
  head = np.copy(arrays["model.embed_tokens.weight"])
  head[-1, -1] += 1
  folder = checkpoints.write_folder(
    {**arrays, "lm_head.weight": head}, checkpoints.config("gemma2"), tmp_path
  )
  mesh = make_mesh((8,), ("model",)) if devices > 1 else None
  refused(
    CheckpointMismatchError,
    lambda: models.load(folder, mesh=mesh),
    "lm_head.weight",
    "tie_word_embeddings",
  )


def test_a_tied_head_of_another_shape(tmp_path):
  arrays = checkpoints.tensors("gemma2")
  head = {"lm_head.weight": arrays["model.embed_tokens.weight"][1:]}
  call = broken(tmp_path, {**arrays, **head}, "gemma2")
  refused(CheckpointMismatchError, call, "lm_head.weight")


def test_a_head_of_its_own_must_be_there(tmp_path):
  arrays = checkpoints.tensors("llama2")
  del arrays["lm_head.weight"]
  refused(
    CheckpointMismatchError,
    broken(tmp_path, arrays, "llama2"),
    "lm_head.weight",
  )


@pytest.mark.long
def test_parameters_are_named_by_their_axes():
  """Of every parameter of every family the rules know all axes."""
  known = {*Rules.__dataclass_fields__, None}
  for name in NAMES:
    model = models.abstract(checkpoints.config(name))
    for path, p in parameters(model).items():
      assert isinstance(p, nnx.Param)
      axes = p.get_metadata()["axes"]
      assert set(axes) <= known, path
      assert len(axes) <= len(p.shape), path

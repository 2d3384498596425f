"""Layers in host memory and on disk give the numbers of a resident model."""

from __future__ import annotations

import gc
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  MemoryEstimateError,
  MeshError,
  OptionError,
)
from ringjax.kv import kind_text
from ringjax.models.fingerprint import fingerprint
from ringjax.models.first_layers import first_layers
from ringjax.models.hf import layer_reader
from ringjax.models.hf.folder import Folder
from ringjax.models.weights import weight_placement
from tests import checkpoints
from tests.helpers import refused

LAYERS, MIXED = 5, "device=.4,host=.2,disk=.4"
TOKENS = np.arange(2 * 9).reshape(2, 9) % 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  config = checkpoints.config("llama3") | {"num_hidden_layers": LAYERS}
  path = tmp_path_factory.mktemp("placement") / "model"
  rj.models.save(rj.models.create(config, seed=3), path)
  return path


@pytest.fixture(scope="module")
def resident(folder):
  model = rj.models.load(folder)
  return model, np.asarray(model(TOKENS))


def kind_of(text):
  return kind_text.parse(text, "cache_kind")


def tokens_of(model, **options):
  new = rj.infer.generate(
    model, [[5, 6, 7, 8, 9], [3, 4, 1]], max_new_tokens=4, **options
  )
  return np.asarray(new)


@pytest.mark.long
@pytest.mark.parametrize(
  "placement",
  [MIXED, *(pytest.param(x, marks=pytest.mark.long) for x in ("disk", "host"))],
)
def test_equals_resident(placement, folder, resident):
  model = rj.models.load(folder, placement=placement)
  whole, want = resident
  np.testing.assert_array_equal(np.asarray(model(TOKENS)), want)
  np.testing.assert_array_equal(tokens_of(model), tokens_of(whole))
  found = model.placement_report()
  on_disk = [n for n, tier in enumerate(found.tiers) if tier == "disk"]
  assert (
    found.tiers
    == {
      MIXED: ("device", "disk", "host", "device", "disk"),
      "disk": ("disk",) * 5,
      "host": ("host",) * 5,
    }[placement]
  )
  assert set(found.reads) == set(on_disk)
  assert found.peak_buffer_bytes <= found.buffer_bytes
  each = found.streamed_parameters * 4
  assert found.host_bytes + found.disk_bytes == each
  assert model.digest == whole.digest
  assert fingerprint(model) == fingerprint(whole)


def test_a_config_places_weights_and_a_call_refuses_others(folder, resident):
  config = rj.infer.PlacementConfig(weights=MIXED, memory="1MiB")
  placed = rj.models.load(folder, placement=config)
  want = rj.models.load(folder, placement=MIXED, memory="1MiB")
  assert placed.placement_report().tiers == want.placement_report().tiers
  config.check_weights(placed)
  whole, _ = resident
  for options, says in (
    ({"placement": MIXED}, "with 0 layers of 5 in the memory 'disk'"),
    ({"placement": "host"}, "with 5 layers of 5 in the memory 'device'"),
    ({"memory": "1kB"}, "memory: got 1kB, of a model with"),
  ):
    refused(OptionError, lambda o=options: tokens_of(whole, **o), says)
  rj.infer.PlacementConfig(weights="device", memory="1GiB").check_weights(whole)
  refused(
    OptionError,
    lambda: rj.models.load(folder, placement=config, memory="2MiB"),
    "memory",
    "PlacementConfig",
  )
  refused(OptionError, lambda: rj.infer.PlacementConfig(weights="dsik"), "dsik")
  halves = rj.models.Placement(host=0.5, disk=0.5)
  text = rj.infer.PlacementConfig(weights=halves, cache=halves).to_dict()
  assert text == dict.fromkeys(("weights", "cache"), "host=0.5,disk=0.5")
  assert rj.models.Placement.of(text["cache"]) == halves


FAMILIES = (
  "deepseek_v3", "qwen3_next", "mixtral", "gpt_oss", "falcon_40b", "gemma2",
  "llama4_text", "phi3",
)  # fmt: skip


@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
)
def test_families(name, tmp_path):
  """Experts, recurrent layers, latent attention, fused maps."""
  path = checkpoints.write(name, tmp_path / "model")
  whole = rj.models.load(path)
  tokens = checkpoints.expected(name).tokens
  want = np.asarray(whole(tokens))
  for placement in ("disk", "host"):
    model = rj.models.load(path, placement=placement)
    np.testing.assert_array_equal(np.asarray(model(tokens)), want)
    assert model.digest == whole.digest


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param(x, marks=pytest.mark.slow)
    for x in ("int8", "windowed:device=8", "unrotated")
  ],
)
def test_cache_kinds(kind, folder, resident):
  model, kind = rj.models.load(folder, placement=MIXED), kind_of(kind)
  want = tokens_of(resident[0], cache_kind=kind)
  np.testing.assert_array_equal(tokens_of(model, cache_kind=kind), want)


@pytest.mark.long
def test_mesh(folder):
  """Each device reads its shard of a layer, on explicit meshes too."""
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  whole = rj.models.load(folder, mesh=mesh)
  explicit = jax.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  model = rj.models.load(folder, mesh=explicit, placement=MIXED)
  tokens = TOKENS[:, :8]
  want = np.asarray(whole(tokens))
  np.testing.assert_array_equal(np.asarray(model(tokens)), want)
  found = model.placement_report()
  reads = found.reads
  # Two shards of a layer; what is cut is read in parts.
  assert all(n >= 2 for n in reads.values())
  assert found.bytes_read < sum(reads.values()) * found.disk_bytes / 2
  assert found.peak_buffer_bytes <= found.buffer_bytes
  with pytest.raises(MeshError, match="shard_map"):
    jax.shard_map(
      lambda x: model(x, attend=rj.models.ContextParallel(axis=None)),
      mesh=mesh,
      in_specs=jax.P(),
      out_specs=jax.P(),
      check_vma=False,
    )(tokens)


def test_reads_are_counted_and_weights_are_no_constants(folder):
  model = rj.models.load(folder, placement="disk")
  calls = 3
  for _ in range(calls):
    model(TOKENS)
  model.stack.placed[0][0].disk[0].reader.release()
  reads = model.placement_report().reads
  # A layer may be read ahead for a call that does not come.
  assert all(calls <= reads[n] <= calls + 1 for n in range(LAYERS)), reads
  traced = jax.make_jaxpr(lambda m, x: m(x))(model, TOKENS)
  assert sum(np.size(x) for x in traced.consts) < 1000


@pytest.mark.long
def test_gradient_fetches_again(folder, resident):
  """Adapters of streamed layers have the gradients of resident ones."""
  how = rj.train.Lora(rank=2)
  model = rj.models.load(folder, placement=MIXED)

  def loss(params, frozen):
    logits = how.model(params, frozen)(TOKENS)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

  start = how.start(model)
  start = jax.tree.map(lambda x: x + jnp.asarray(0.01, x.dtype), start)
  assert jax.tree.map(jnp.shape, start) == jax.tree.map(
    jnp.shape, how.start(resident[0])
  )
  made = jax.jit(jax.value_and_grad(loss))
  for x, y in zip(
    jax.tree.leaves(made(start, model)),
    jax.tree.leaves(made(start, resident[0])),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
  merged = how.merged(start, model)
  want = how.merged(start, resident[0])(TOKENS)
  np.testing.assert_allclose(merged(TOKENS), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_engine(folder, resident):
  """Concurrent rows with adapters of their own."""
  how = rj.train.Lora(rank=2)
  params = how.start(resident[0])
  params = jax.tree.map(lambda x: x + jnp.asarray(0.02, x.dtype), params)
  answers = []
  for model in (resident[0], rj.models.load(folder, placement=MIXED)):
    engine = rj.serve.Engine(
      model, capacity=64, rows=3, adapters={"a": (how, params)}
    )
    handles = [
      engine.submit(
        rj.serve.Request(prompt=[3, 4, n], max_new_tokens=3, adapter=adapter)
      )
      for n, adapter in enumerate(("", "a", ""))
    ]
    engine.run()
    answers.append([list(handle.result().tokens) for handle in handles])
  assert answers[0] == answers[1]


@pytest.mark.long
def test_first_layers(folder, resident):
  model = rj.models.load(folder, placement="disk")
  got, want = (first_layers(m, 3)(TOKENS) for m in (model, resident[0]))
  np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_refusals(folder, tmp_path, monkeypatch):
  model = rj.models.load(folder, placement="disk")
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  for call in (
    lambda: rj.models.save(model, tmp_path / "copy"),
    lambda: rj.models.place(model, mesh),
    lambda: rj.models.checkpoint.cast(model, jnp.bfloat16),
    lambda: rj.infer.generate(
      model, [[1]], max_new_tokens=1, keep="last", mesh=mesh
    ),
  ):
    with pytest.raises(OptionError, match="host memory or on disk"):
      call()
  for placement in ("ram", "device=2", "device=.5,disk=.2,host=.1", "a=1"):
    with pytest.raises(OptionError):
      rj.models.load(folder, placement=placement)
  for memory in ("6 apples", 0, "-1", "iB"):
    with pytest.raises(OptionError, match="memory"):
      rj.models.load(folder, memory=memory)
  with pytest.raises(MemoryEstimateError, match="memory"):
    rj.models.load(folder, memory=1000)
  monkeypatch.setattr(
    "ringjax.models.weights.streaming.host_memory.host_free_bytes",
    # Room for what is resident, not for the layers.
    lambda: 30_000,
  )
  with pytest.raises(MemoryEstimateError, match="placement"):
    rj.models.load(folder, placement="host")


@pytest.mark.long
def test_memory(folder, resident):
  """As many layers as fit, with two that pass through."""
  each = sum(x.nbytes for x in jax.tree.leaves(resident[0].stack)) // LAYERS
  outer = sum(x.nbytes for x in jax.tree.leaves(resident[0])) - each * LAYERS
  tiers = lambda memory, **o: (
    rj.models.load(folder, memory=memory, **o).placement_report().tiers
  )
  assert tiers(outer + 4 * each).count("device") == 2
  assert tiers(outer + 4 * each).count("host") == 3
  assert tiers(outer + 4 * each, placement="disk").count("disk") == 3
  assert tiers("1GB") == ("device",) * LAYERS
  some = tiers(outer + 4 * each, placement="disk=.4")
  assert sorted(some) == ["device"] * 2 + ["disk"] * 2 + ["host"]


def test_deal():
  deal = weight_placement.deal
  for layers in (7, 24, 61):
    nbytes = [100] * layers
    for device, host in ((0.2, 0.5), (0.0, 0.0), (0.33, 0.33), (0.9, 0.0)):
      total = 100 * layers
      room = dict(
        device=device * total,
        host=host * total,
        disk=(1 - device - host) * total,
      )
      found = deal(nbytes, room)
      for tier in ("device", "host"):
        assert found.count(tier) * 100 <= room[tier] + 1
      assert abs(found.count("disk") * 100 - room["disk"]) <= 200
  assert deal([1] * 8, dict(device=4, host=0, disk=4)) == ("device", "disk") * 4
  # Neighbours come from the host while the one before runs.
  found = deal([2, 1, 2, 1, 2], dict(device=3, host=5, disk=0))
  assert found == ("device", "device", "host", "host", "host")


# ---------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------


@pytest.fixture
def copied(folder, tmp_path):
  return pathlib.Path(shutil.copytree(folder, tmp_path / "copied"))


def parts_of(folder, **options):
  """A reader of a folder's layers, each of two tensors, and the tensors."""
  found = Folder.open(folder)
  names = lambda n: [
    f"model.layers.{n}.mlp.{x}_proj.weight" for x in ("up", "down")
  ]
  cuts = options.pop("cuts", ((), ()))
  layers = {
    n: [
      layer_reader.StoredPart(
        names=(name,),
        stacked=False,
        shape=found.tensors[name].shape,
        dtype=found.tensors[name].dtype,
        cuts=cut,
      )
      for name, cut in zip(names(n), cuts, strict=True)
    ]
    for n in range(LAYERS)
  }
  with layer_reader_file(folder) as tensors:
    arrays = {n: [tensors.get_tensor(x) for x in names(n)] for n in layers}
  return layer_reader.LayerReader(found, layers, **options), arrays


def layer_reader_file(folder):
  import safetensors

  return safetensors.safe_open(folder / "model.safetensors", "np")


def test_reader_in_threads(folder):
  """Several callers at their own pace; memory stays in its bounds."""
  reader, arrays = parts_of(folder)
  errors = []

  def compare(n):
    for x, y in zip(reader.get(n), arrays[n], strict=True):
      np.testing.assert_array_equal(x, y)

  def call(order):
    try:
      for n in order:
        # Who asks for a layer has let go of the one before.
        compare(n)
    except BaseException as error:
      errors.append(error)

  threads = [
    threading.Thread(target=call, args=([*range(LAYERS)] * 6,))
    for _ in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not errors
  assert reader.peak_bytes <= reader.limit_bytes
  reader.release()
  assert (
    sum(reader.reads.values()) * sum(x.nbytes for x in arrays[0])
    == reader.bytes_read
  )


def test_reader_of_shards(folder):
  cuts = ((None, "a"), ("b", None))
  reader, arrays = parts_of(folder, cuts=cuts, sizes={"a": 2, "b": 4}, shards=8)
  for a in range(2):
    for b in range(4):
      up, down = reader.get(2, (a, b))
      np.testing.assert_array_equal(up, np.split(arrays[2][0], 2, 1)[a])
      np.testing.assert_array_equal(down, np.split(arrays[2][1], 4, 0)[b])


def test_reader_of_scalars(tmp_path):
  """A scale for each expert, of which shards have some."""
  scales = {f"e{n}": np.array(n + 0.5, np.float32) for n in range(4)}
  folder = checkpoints.write_folder(scales, {}, tmp_path / "scales")
  part = layer_reader.StoredPart(
    names=tuple(scales),
    stacked=True,
    shape=(),
    dtype=np.dtype(np.float32),
    cuts=("model",),
  )
  reader = layer_reader.LayerReader(
    Folder.open(folder), {7: [part]}, sizes={"model": 2}, shards=2
  )
  for shard, want in enumerate(([0.5, 1.5], [2.5, 3.5])):
    (found,) = reader.get(7, (shard,))
    np.testing.assert_array_equal(found, np.float32(want))


def test_faults_of_files(copied, monkeypatch):
  model = rj.models.load(copied, placement="disk")
  want = np.asarray(model(TOKENS))
  file = copied / "model.safetensors"
  data, times = file.read_bytes(), os.stat(file)
  preadv = os.preadv

  def broken(*args):
    raise OSError(5, "Input/output error")

  monkeypatch.setattr(os, "preadv", broken)
  model.stack.placed[0][0].disk[0].reader.release()
  with pytest.raises(CheckpointFormatError, match="Input/output error"):
    model(TOKENS)
  with pytest.raises(CheckpointFormatError, match="Input/output error"):
    tokens_of(model)
  monkeypatch.setattr(os, "preadv", preadv)
  # An error is of the call that it came up in, and of no other.
  np.testing.assert_array_equal(np.asarray(model(TOKENS)), want)
  os.truncate(file, len(data) // 2)
  model.stack.placed[0][0].disk[0].reader.release()
  with pytest.raises(CheckpointFormatError, match="changed"):
    model(TOKENS)
  file.write_bytes(data)
  os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
  np.testing.assert_array_equal(np.asarray(model(TOKENS)), want)
  file.unlink()
  with pytest.raises(CheckpointFormatError, match="No such file"):
    model(TOKENS)


def test_a_failed_read_ahead_is_read_again(copied, monkeypatch):
  """What fails between calls is no call's error: the next reads it again."""
  model = rj.models.load(copied, placement="disk")
  want = np.asarray(model(TOKENS))
  preadv, failed = os.preadv, threading.Event()

  def broken(*args):
    if threading.current_thread().name != layer_reader.READ_AHEAD:
      return preadv(*args)
    failed.set()
    raise OSError(5, "Input/output error")

  monkeypatch.setattr(os, "preadv", broken)
  model.stack.placed[0][0].disk[0].reader.release()
  for _ in range(3):
    np.testing.assert_array_equal(np.asarray(model(TOKENS)), want)
  assert failed.wait(60)


@pytest.mark.long
def test_faults_on_a_mesh(copied):
  """No device waits for one whose read failed."""
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  model = rj.models.load(copied, mesh=mesh, placement="disk")
  os.truncate(copied / "model.safetensors", 1000)
  with pytest.raises(CheckpointFormatError, match="changed"):
    model(TOKENS[:, :8])


@pytest.mark.long
def test_not_finite(copied):
  model = rj.models.load(copied, placement="disk")
  name = "model.layers.3.mlp.up_proj.weight"
  info = Folder.open(copied).tensors[name]
  with open(copied / "model.safetensors", "r+b") as file:
    file.seek(info.offset + 4 * 17)
    file.write(np.float32(np.inf).tobytes())
  model = rj.models.load(copied, placement="disk")
  with pytest.raises(CheckpointMismatchError, match=r"layers\.3"):
    model(TOKENS)


_MEASURE = """
import resource, sys
import jax, numpy as np
import ringjax as rj

def now():
  with open("/proc/self/status") as file:
    (line,) = [x for x in file if x.startswith("VmHWM")]
  return int(line.split()[1]) * 1024

before = now()
model = rj.models.load(sys.argv[1], placement=sys.argv[2] or None)
rj.infer.generate(model, [[1, 2, 3]], max_new_tokens=3)
print(now() - before)
"""


@pytest.mark.slow
def test_resident_bytes(tmp_path):
  """The process of a streamed model stays far below the model's size."""
  config = checkpoints.config("llama3") | {
    "num_hidden_layers": 24,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
  }
  rj.models.save(rj.models.create(config), tmp_path / "model")
  size = (tmp_path / "model" / "model.safetensors").stat().st_size
  assert size > 300e6
  grown = {}
  for placement in ("disk", ""):
    done = subprocess.run(
      [sys.executable, "-c", _MEASURE, tmp_path / "model", placement],
      capture_output=True,
      text=True,
      check=True,
      env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )
    grown[placement] = int(done.stdout)
  assert grown[""] > size
  # The compiler and its programs are in both.
  assert grown["disk"] < 0.5 * grown[""], (grown, size)


# ---------------------------------------------------------------------------
# Rows in groups
# ---------------------------------------------------------------------------

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 1], [2, 2, 7, 1], [9], [8, 1, 3]]


@pytest.mark.long
def test_a_layer_is_read_once_for_all_rows(folder, resident):
  """n l reads for the whole batch, where row by row they are n l rows."""
  model = rj.models.load(folder, placement="disk")
  reader = model.stack.placed[0][0].disk[0].reader
  answers, reads = [], []
  options = dict(max_new_tokens=4, rows_at_once=2)
  for groups in ([PROMPTS], [[prompt] for prompt in PROMPTS[:2]]):
    for prompts in groups:
      # Compiles: what was read ahead may be let go of meanwhile.
      rj.infer.generate(model, prompts, **options)
    reader.release()
    before = sum(reader.reads.values())
    for prompts in groups:
      answers.append(rj.infer.generate(model, prompts, **options))
    reader.release()
    reads.append(sum(reader.reads.values()) - before)
  whole = rj.infer.generate(resident[0], PROMPTS, max_new_tokens=4)
  np.testing.assert_array_equal(answers[0].tokens, whole.tokens)
  calls, slack = 4, 3
  assert calls * LAYERS <= reads[0] <= calls * LAYERS + slack
  assert 2 * calls * LAYERS <= reads[1] <= 2 * (calls * LAYERS + slack)


@pytest.mark.parametrize(
  "options",
  [
    pytest.param(x, marks=pytest.mark.slow)
    for x in (
      dict(cache_kind="int8"),
      dict(cache_kind="windowed:device=8"),
      dict(temperature=1.0, seed=3),
      dict(prefill="chunked", chunk=2),
      dict(mesh=True),
    )
  ],
)
def test_groups_equal_the_whole(options, resident):
  model = resident[0]
  if "mesh" in options:
    mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
    model, options = rj.models.place(model, mesh), {}
  if "cache_kind" in options:
    options = {"cache_kind": kind_of(options["cache_kind"])}
  run = lambda **more: rj.infer.generate(
    model, PROMPTS, max_new_tokens=5, **options, **more
  )
  np.testing.assert_array_equal(run().tokens, run(rows_at_once=2).tokens)


def test_groups_are_refused(resident):
  for options in (
    dict(speculate="lookup"),
    dict(contexts=[[1, 2]]),
    dict(keep="last"),
  ):
    with pytest.raises(OptionError, match="rows_at_once"):
      rj.infer.generate(
        resident[0], PROMPTS, max_new_tokens=2, rows_at_once=2, **options
      )


@pytest.mark.slow
def test_a_single_layer_on_disk_is_let_go_of(folder, monkeypatch):
  monkeypatch.setattr(layer_reader, "_IDLE_S", 0.2)
  model = rj.models.load(folder, placement="device=.8,disk=.2")
  reader = model.stack.placed[0][0].disk[0].reader
  assert len(reader.layers) == 1
  model(TOKENS)
  deadline = time.monotonic() + 60
  while reader.held_bytes and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not reader.held_bytes
  gone = weakref.ref(reader)
  del model, reader
  jax.clear_caches()
  while gone() is not None and time.monotonic() < deadline:
    gc.collect()
    time.sleep(0.05)
  assert gone() is None


def test_an_error_is_of_its_own_call(copied):
  model = rj.models.load(copied, placement="disk")
  want = np.asarray(model(TOKENS))
  (file,) = copied.glob("*.safetensors")
  known = file.stat()
  reader = model.stack.placed[0][0].disk[0].reader
  reader.release()
  os.utime(file, ns=(1, 1))
  with pytest.raises(Exception, match="has changed"):
    jax.block_until_ready(jax.jit(lambda m, x: m(x))(model, TOKENS))
  os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
  np.testing.assert_array_equal(model(TOKENS), want)


def test_fractions_hold_beside_memory(folder):
  placed = lambda text: rj.models.load(
    folder, placement=text, memory="1GiB"
  ).placement_report()
  assert set(placed("device=.2,host=.4,disk=.4").tiers) == {
    "device", "host", "disk"
  }  # fmt: skip
  assert placed("device=.2").tiers.count("device") == 1
  assert placed("disk").tiers.count("device") == LAYERS


def test_every_device_s_part_of_the_host_is_counted(folder):
  mesh = jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
  alone = rj.models.load(folder, placement="host").placement_report()
  four = rj.models.load(folder, mesh=mesh, placement="host")
  assert four.placement_report().host_bytes == 4 * alone.host_bytes


def test_sessions_of_rows_in_groups_refuse_what_generate_does(folder):
  model = rj.models.load(folder, placement="disk")
  session = rj.infer.Session(model, 64, batch=2, rows_at_once=1)
  ask = lambda **how: rj.infer.generate(
    model, [[1, 2], [3, 4]], max_new_tokens=2, cache=session, **how
  )
  refused(OptionError, lambda: ask(speculate="lookup"), "speculate")
  refused(
    OptionError,
    lambda: rj.infer.Session(
      model, 64, batch=2, rows_at_once=1, cache_kind="kvzip"
    ),
    "rows_at_once",
  )
  refused(
    OptionError,
    lambda: rj.infer.read_on_two(model, [[1, 2]], devices=jax.devices()[:2]),
    "two devices",
  )

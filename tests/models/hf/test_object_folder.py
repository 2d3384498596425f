"""Model folders at addresses: read in ranges, written whole or not at all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import paths
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  ConfigError,
  OptionError,
  RingjaxError,
  StorageError,
)
from ringjax.models import tiny
from ringjax.models.hf import folder, save
from tests import object_servers


@pytest.fixture
def bucket():
  with object_servers.served("memory") as address:
    yield paths.as_path(address)


@pytest.fixture(scope="module")
def model():
  return rj.models.load(tiny.path())


def assert_equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype and np.array_equal(x, y)


def names(place):
  return sorted(entry.name for entry in place.iterdir())


def tensors(seed, count=3):
  rng = np.random.default_rng(seed)
  return {
    f"layers.{i}.w": rng.standard_normal((96, 40), np.float32)
    for i in range(count)
  }


def write(place, seed, **options):
  values = tensors(seed)
  save.write(place, {"model_type": "x"}, list(values.items()), **options)
  return values


def read(place):
  opened = folder.Folder.open(place)
  shape = lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype)
  arrays = opened.read({k: shape(x) for k, x in opened.tensors.items()})
  return {name: np.asarray(x) for name, x in arrays.items()}


def equal(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


def test_a_model_is_saved_and_loaded_with_its_tokenizer(bucket, model):
  place = bucket / "models" / "tiny"
  rj.models.save(model, place)
  got = rj.models.load(str(place))
  assert_equal(got, model)
  tokenizer = rj.data.Tokenizer.load(str(place))
  text = "def read(path):"
  want = rj.data.Tokenizer.load(tiny.path())
  assert np.array_equal(tokenizer.encode(text), want.encode(text))
  assert tokenizer.name == "tiny"
  # And copied from there, its side files too.
  rj.models.save(got, bucket / "copy", max_shard_bytes=100_000)
  assert equal(read(bucket / "copy"), read(place))
  assert "tokenizer.json" in names(bucket / "copy")
  with pytest.raises(OptionError, match="overwrite=True"):
    rj.models.save(model, place)


def test_a_mesh_reads_each_shard_by_its_range(bucket):
  place = bucket / "ranges"
  values = write(place, 0)
  opened = folder.Folder.open(place)
  mesh = jax.make_mesh(
    (4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:8],
  )  # fmt: skip
  target = lambda spec: jax.ShapeDtypeStruct(
    (96, 40), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
  )
  targets = {
    "layers.0.w": target(P("a")),
    "layers.1.w": target(P(None, "b")),
    "layers.2.w": target(P("b", "a")),
  }
  with object_servers.with_faults() as faulty:
    arrays = opened.read(targets)
  for name, x in arrays.items():
    assert x.sharding == targets[name].sharding and x.dtype == jnp.bfloat16
    assert np.array_equal(x, values[name].astype(jnp.bfloat16))
  ranges = sorted((begin, end) for _, begin, end in faulty.ranges)
  # Each byte once: rows go to the devices that want them, or part of them.
  starts = sorted(info.offset for info in opened.tensors.values())
  row_bytes, parts = 160, (4, 2, 8)
  assert ranges == [
    (start + i * 96 // n * row_bytes, start + (i + 1) * 96 // n * row_bytes)
    for start, n in zip(starts, parts, strict=True)
    for i in range(n)
  ]


def test_stacked_and_raw_tensors(bucket):
  place = bucket / "stacked"
  values = write(place, 1)
  opened = folder.Folder.open(place)
  assert np.array_equal(opened.raw("layers.1.w"), values["layers.1.w"])
  mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
  stacked = opened.read_stacked(
    sorted(values)[:2],
    jax.ShapeDtypeStruct((96, 40), jnp.float32),
    NamedSharding(mesh, P("a")),
  )
  assert np.array_equal(stacked, [values[k] for k in sorted(values)[:2]])


def test_values_that_are_not_finite_are_found(bucket):
  values = tensors(0, 1)
  values["layers.0.w"][3, 5] = np.nan
  save.write(bucket / "nan", {}, list(values.items()))
  with pytest.raises(CheckpointMismatchError, match=r"first at \[3, 5\]"):
    read(bucket / "nan")


# ---------------------------------------------------------------------------
# Whole or not at all
# ---------------------------------------------------------------------------


class Killed(BaseException):
  """Ends a process: no request comes after it."""


def write_until(n, place, seed, **options):
  """Writes a folder and dies at the n-th request; True: it lived."""

  def fault(number, name, address):
    if number >= n:
      raise Killed

  try:
    with object_servers.with_faults(fault):
      write(place, seed, **options)
    return True
  except Killed:
    return False


@pytest.mark.one_case
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_killed_save_leaves_no_model_or_the_old_one(bucket, shard_bytes):
  options = {"max_shard_bytes": shard_bytes, "overwrite": True}
  lived, n, outcomes = False, 0, []
  while not lived:
    place = bucket / f"new{n}"
    lived = write_until(n, place, 1, **options)
    try:
      assert equal(read(place), tensors(1))
      outcomes.append(True)
    except RingjaxError as error:
      assert isinstance(error, ConfigError | CheckpointFormatError)
      outcomes.append(False)
    # The next save needs no clean-up by hand.
    write(place, 2, **options)
    assert equal(read(place), tensors(2))
    n += 1
  assert outcomes == sorted(outcomes) and n > 4
  lived, n, outcomes = False, 0, []
  while not lived:
    place = bucket / f"old{n}"
    write(place, 1, max_shard_bytes=shard_bytes)
    lived = write_until(n, place, 2, **options)
    got = read(place)
    assert equal(got, tensors(1)) or equal(got, tensors(2))
    outcomes.append(equal(got, tensors(2)))
    write(place, 3, **options)
    assert equal(read(place), tensors(3))
    weights = [name for name in names(place) if name.startswith("model")]
    assert len(weights) == 2 + 2 * (shard_bytes < 10**6)
    n += 1
  assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[0]


def test_files_that_belong_to_the_weights_are_replaced_with_them(bucket):
  place = bucket / "beside"
  for number in (1, 2):
    text = f"encoder of decoder {number}"
    beside = lambda folder, text=text: (folder / "e.txt").write_text(text)
    arrays = list(tensors(number).items())
    save.write(place, {}, arrays, overwrite=True, beside=beside)
    assert (place / "e.txt").read_text() == text


def test_another_model_is_not_replaced(bucket):
  write(bucket / "taken", 0)
  with pytest.raises(OptionError, match=r"of another config\.json"):
    save.write(bucket / "taken", {"a": 1}, [], overwrite=True)
  denied = lambda number, name, address: _deny(name)
  with (
    object_servers.with_faults(denied) as faulty,
    pytest.raises(StorageError, match="credentials"),
  ):
    write(bucket / "new", 0)
  assert not [x for x in faulty.requests if x[1].endswith("safetensors")]


def _deny(name):
  if name in ("pipe_file", "put_file"):
    raise PermissionError("denied")


# ---------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------


def test_folders_that_are_no_models(bucket):
  with pytest.raises(CheckpointFormatError, match="wanted a folder"):
    rj.models.load(bucket / "none")
  write(bucket / "cut", 0)
  file = bucket / "cut" / "model.safetensors"
  data = file.read_bytes()
  file.write_bytes(data[:-4])
  with pytest.raises(CheckpointFormatError, match="safetensors refuses"):
    read(bucket / "cut")
  file.write_bytes(data[:4])
  with pytest.raises(CheckpointFormatError, match="4 bytes"):
    read(bucket / "cut")
  (bucket / "gguf" / "x.gguf").write_bytes(b"GGUF")
  for place in (bucket / "gguf", bucket / "gguf" / "x.gguf"):
    with pytest.raises(CheckpointFormatError, match="at least 24 bytes"):
      rj.models.load(place)


@pytest.mark.parametrize("change", ["other", "gone"])
def test_an_object_that_changes_is_refused(bucket, change):
  place = bucket / "changes"
  write(place, 0)
  opened = folder.Folder.open(place)
  file = place / "model.safetensors"
  if change == "gone":
    file.unlink()
  else:
    file.write_bytes(file.read_bytes())
  target = jax.ShapeDtypeStruct((96, 40), jnp.float32)
  for call in (
    lambda: opened.read({"layers.0.w": target}),
    lambda: opened.raw("layers.0.w"),
  ):
    with pytest.raises(CheckpointFormatError, match="it has changed"):
      call()


def test_layers_on_disk_and_encoders_are_refused(bucket, model):
  rj.models.save(model, bucket / "m")
  with pytest.raises(OptionError, match="placement with layers on disk"):
    rj.models.load(bucket / "m", placement="disk")
  with pytest.raises(OptionError, match=r"memory://.*copy the files"):
    rj.models.load("xy://bucket/m")


@pytest.mark.long
@pytest.mark.long_cases(2)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_model_of_a_server(scheme, model):
  with object_servers.served(scheme) as address:
    rj.models.save(model, f"{address}/m", max_shard_bytes=200_000)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    assert_equal(rj.models.load(f"{address}/m", mesh=mesh), model)
    rj.models.save(model, f"{address}/m", overwrite=True)
    assert_equal(rj.models.load(f"{address}/m"), model)
    assert rj.data.Tokenizer.load(f"{address}/m", untrusted=True).vocab_size

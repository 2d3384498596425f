"""Writing model folders: the same bits, the form of the hub, all or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from ringjax.errors import (
  CheckpointFormatError,
  CheckpointWriteError,
  ConfigError,
  DtypeError,
  InputTypeError,
  OptionError,
)
from ringjax.models.hf import save
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.header import DTYPES
from ringjax.models.hf.save import write
from tests import checkpoints
from tests.helpers import two_processes

ROOT = pathlib.Path(__file__).resolve().parents[3]
INDEX = "model.safetensors.index.json"
BF16 = np.dtype(jnp.bfloat16)


def values(shape, dtype=np.float32, seed=0):
  x = np.random.default_rng(seed).standard_normal(shape)
  return np.asarray(x * 10).astype(dtype)


TENSORS = {
  "model.a": values((8, 16), BF16),
  "model.b": values((32,), np.float32),
  "model.c": values((4, 8, 16), np.float16),
  "model.scalar": values((), np.float32),
  "model.none": values((0, 3), np.float32),
}


def read(path):
  opened = Folder.open(path)
  targets = {
    name: jax.ShapeDtypeStruct(info.shape, info.dtype)
    for name, info in opened.tensors.items()
  }
  return {name: np.asarray(x) for name, x in opened.read(targets).items()}


def same_bits(got, want):
  assert got.keys() == want.keys()
  for name, x in want.items():
    y = np.asarray(got[name])
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert y.tobytes() == x.tobytes()


def listing(path):
  return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("shard", [1, 300, 1000, 10**9])
def test_round_trip(tmp_path, shard):
  path = tmp_path / "new" / "m"
  write(path, {"b": 1, "a": [0.5]}, TENSORS.items(), max_shard_bytes=shard)
  same_bits(read(path), TENSORS)
  assert Folder.open(path).config == {"a": [0.5], "b": 1}
  assert (INDEX in listing(path)) == (shard < 10**9)
  assert listing(path.parent) == ["m"]


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_round_trip_of_every_dtype(tmp_path, dtype):
  x = {"a": np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)}
  write(tmp_path, {}, x.items())
  found = Folder.open(tmp_path).tensors["a"]
  assert (found.dtype, found.shape) == (dtype, (2, 3))
  data = (tmp_path / "model.safetensors").read_bytes()
  assert data[found.offset :] == x["a"].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_one_file_has_the_bytes_that_safetensors_writes(tmp_path, name, dtype):
  want = checkpoints.write(name, tmp_path / "want", dtype=dtype)
  config = json.loads((want / "config.json").read_text())
  write(tmp_path / "got", config, load_file(want / "model.safetensors").items())
  for file in ("model.safetensors", "config.json"):
    got = (tmp_path / "got" / file).read_bytes()
    assert got == (want / file).read_bytes()


def test_index_is_as_on_the_hub(tmp_path):
  tensors = {f"w{i}": values((4, 8)) for i in range(5)}
  write(tmp_path, {}, tensors.items(), max_shard_bytes=300)
  files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
  assert listing(tmp_path) == ["config.json", *files, INDEX]
  where = [0, 0, 1, 1, 2]
  want = {
    "metadata": {"total_parameters": 160, "total_size": 640},
    "weight_map": {f"w{i}": files[n] for i, n in enumerate(where)},
  }
  text = json.dumps(want, indent=2, sort_keys=True) + "\n"
  assert (tmp_path / INDEX).read_text() == text
  for i, file in enumerate(files):
    assert load_file(tmp_path / file).keys() == {
      f"w{k}" for k, n in enumerate(where) if n == i
    }


def test_arrays_of_every_kind(tmp_path):
  mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  x = values((8, 16), BF16)
  put = lambda *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  arrays = {
    "device": jnp.asarray(x),
    "rows": put("x"),
    "columns": put(None, ("y", "x")),
    "both": put("y", "x"),
    "everywhere": put(),
    "turned": np.asfortranarray(x),
    "strided": np.repeat(x, 2, axis=1)[:, ::2],
  }
  write(tmp_path, {}, arrays.items())
  same_bits(read(tmp_path), dict.fromkeys(arrays, x))


def test_an_array_does_not_keep_its_host_copy(tmp_path):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  x = jax.device_put(values((8, 16)), NamedSharding(mesh, P("x")))
  write(tmp_path, {}, [("a", x)])
  assert x._npy_value is None


def test_one_shard_is_in_memory(tmp_path):
  alive, most = weakref.WeakSet(), 0

  class Counted(np.ndarray):
    # WeakSet needs a hash.
    __hash__ = object.__hash__

  def tensors():
    nonlocal most
    for i in range(40):
      x = values((16, 16)).view(Counted)
      alive.add(x)
      most = max(most, sum(len(y.data) * 64 for y in alive))
      yield f"w{i}", x
      del x

  write(tmp_path, {}, tensors(), max_shard_bytes=5000)
  # Four of 1024 bytes, and the one that comes.
  assert most <= 5 * 1024
  assert len(Folder.open(tmp_path).files) == 10


def test_nothing_to_write(tmp_path):
  write(tmp_path, {}, [])
  assert Folder.open(tmp_path).tensors == {}


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------

ONE = [("a", values((2, 2)))]
BAD = {
  "name empty": ([("", ONE[0][1])], CheckpointFormatError, "empty"),
  "name climbs": ([("../a", ONE[0][1])], CheckpointFormatError, "../a"),
  "name twice": (ONE * 2, CheckpointFormatError, "a twice"),
  "complex": ([("a", np.ones(2, np.complex64))], DtypeError, "complex64"),
  "objects": ([("a", np.array([None]))], DtypeError, "object"),
  "text": ([("a", np.array(["x"]))], DtypeError, "<U1"),
  "other end first": ([("a", np.ones(2, ">f4"))], DtypeError, ">f4"),
  "keys": ([("a", jax.eval_shape)], InputTypeError, "array"),
  "list": ([("a", [1.0])], InputTypeError, "list"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", BAD)
def test_bad_tensors(tmp_path, name):
  tensors, kind, words = BAD[name]
  with pytest.raises(kind, match=words) as caught:
    write(tmp_path / "m", {}, tensors)
  assert len(str(caught.value)) <= 400
  assert listing(tmp_path) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  "config", [{"a": float("nan")}, {"a": float("inf")}, {"a": b"x"}, {(1,): 2}]
)
def test_bad_config(tmp_path, config):
  with pytest.raises(ConfigError, match="config: got "):
    write(tmp_path / "m", config, ONE)
  assert listing(tmp_path) == []


def test_bad_shard_size(tmp_path):
  with pytest.raises(OptionError, match="max_shard_bytes: got 0;.*at least 1"):
    write(tmp_path / "m", {}, ONE, max_shard_bytes=0)


@pytest.mark.usefixtures("unchecked")
def test_no_path():
  with pytest.raises(InputTypeError, match="path: got NoneType"):
    write(None, {}, ONE)


def test_a_folder_that_is_not_empty_stays(tmp_path):
  (tmp_path / "m").mkdir()
  (tmp_path / "m" / "notes.txt").write_text("mine")
  with pytest.raises(OptionError, match="overwrite=True"):
    write(tmp_path / "m", {}, ONE)
  assert listing(tmp_path) == ["m"]
  assert listing(tmp_path / "m") == ["notes.txt"]


def test_a_file_in_the_way(tmp_path):
  (tmp_path / "m").write_text("mine")
  with pytest.raises(OptionError, match="m, a file; .* give a folder"):
    write(tmp_path / "m", {}, ONE, overwrite=True)
  assert (tmp_path / "m").read_text() == "mine"


def test_folders_inside_are_not_overwritten(tmp_path):
  (tmp_path / "m" / "mine").mkdir(parents=True)
  with pytest.raises(OptionError, match="with a folder mine"):
    write(tmp_path / "m", {}, ONE, overwrite=True)
  assert listing(tmp_path / "m") == ["mine"]


# ---------------------------------------------------------------------------
# Overwriting
# ---------------------------------------------------------------------------


def old_folder(path):
  path.mkdir()
  for i in (1, 2):
    save_file(
      {f"old{i}": values((4,))}, path / f"model-0000{i}-of-00002.safetensors"
    )
  (path / INDEX).write_text(
    json.dumps(
      {
        "weight_map": {
          f"old{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
        }
      }
    )
  )
  (path / "config.json").write_text('{"old": 1}')
  (path / "tokenizer.json").write_text("words")
  (path / "link").symlink_to("tokenizer.json")
  path.chmod(0o750)
  return path


@pytest.mark.parametrize("swap", [True, False])
def test_overwrite_replaces_the_model_and_keeps_the_rest(
  tmp_path, monkeypatch, swap
):
  if not swap:
    monkeypatch.setattr(save, "_exchange", lambda a, b: False)
  path = old_folder(tmp_path / "m")
  write(path, {"new": 1}, TENSORS.items(), overwrite=True)
  assert listing(path) == [
    *("config.json", "link", "model.safetensors", "tokenizer.json")
  ]
  same_bits(read(path), TENSORS)
  assert (path / "link").read_text() == "words"
  assert (path / "link").is_symlink()
  assert path.stat().st_mode & 0o777 == 0o750
  assert listing(tmp_path) == ["m"]


def test_overwrite_through_a_link_leaves_the_link(tmp_path):
  path = old_folder(tmp_path / "m")
  (tmp_path / "l").symlink_to("m")
  write(tmp_path / "l", {}, TENSORS.items(), overwrite=True)
  assert (tmp_path / "l").is_symlink()
  same_bits(read(path), TENSORS)


def test_a_model_is_written_over_itself(tmp_path):
  path = old_folder(tmp_path / "m")
  before = read(path)
  opened = Folder.open(path)

  def tensors():
    for name, info in opened.tensors.items():
      target = {name: jax.ShapeDtypeStruct(info.shape, info.dtype)}
      yield name, opened.read(target)[name]

  write(path, opened.config, tensors(), overwrite=True)
  same_bits(read(path), before)


class Boom(Exception):
  pass


def failing():
  yield "a", values((4, 4))
  raise Boom


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, overwrite):
  if overwrite:
    old = read(old_folder(tmp_path / "m"))
  with pytest.raises(Boom):
    write(tmp_path / "m", {}, failing(), max_shard_bytes=1, overwrite=overwrite)
  assert listing(tmp_path) == ["m"] * overwrite
  if overwrite:
    same_bits(read(tmp_path / "m"), old)


def test_no_space(tmp_path, monkeypatch):
  def full(path, tensors):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(save, "write_file", full)
  with pytest.raises(CheckpointWriteError) as caught:
    write(tmp_path / "m", {}, TENSORS.items())
  for words in (str(tmp_path / "m"), "No space", "free space"):
    assert words in str(caught.value)
  assert isinstance(caught.value, OSError)
  assert listing(tmp_path) == []


def test_places_that_cannot_be_written_to(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  # A folder below a file, and one that the system refuses to make.
  places = [tmp_path / "file" / "m"]
  if sys.platform.startswith("linux"):
    places.append(pathlib.Path("/proc/ringjax/m"))
  for place in places:
    with pytest.raises(
      CheckpointWriteError, match="check that its parent"
    ) as e:
      write(place, {}, TENSORS.items())
    assert str(place) in str(e.value)

  def forbidden(path, *args, **kwargs):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(pathlib.Path, "mkdir", forbidden)
  with pytest.raises(CheckpointWriteError, match="Permission denied") as e:
    write(tmp_path / "m", {}, TENSORS.items())
  assert str(tmp_path / "m") in str(e.value)


def test_an_error_of_the_source_is_not_one_of_the_place(tmp_path):
  def lost():
    yield "a", values((4, 4))
    raise FileNotFoundError(2, "No such file", "source")

  with pytest.raises(FileNotFoundError) as caught:
    write(tmp_path / "m", {}, lost())
  assert not isinstance(caught.value, CheckpointWriteError)


def test_what_a_killed_writer_left_is_swept_and_no_other(tmp_path):
  dead, live = tmp_path / ".m.tmp-dead", tmp_path / ".m.tmp-live"
  other = tmp_path / ".n.tmp-dead"
  for left in (dead, live, other):
    left.mkdir()
    (left / "part0").write_text("x")
  descriptor = os.open(live, os.O_RDONLY)
  fcntl.flock(descriptor, fcntl.LOCK_EX)
  write(tmp_path / "m", {}, ONE)
  os.close(descriptor)
  assert listing(tmp_path) == [live.name, other.name, "m"]


# The script overwrites a folder in child after child and kills the n-th before
# its n-th step, until one comes to its end.
KILL = """
import os, shutil, signal, sys, warnings
import numpy as np
from safetensors.numpy import load_file
import jax
jax.config.update("jax_platforms", "cpu")
from ringjax.models.hf import save
from ringjax.models.hf.folder import Folder

root, swap = sys.argv[1], sys.argv[2] == "swap"
path = os.path.join(root, "m")

def tensors(seed):
  rng = np.random.default_rng(seed)
  return {f"w{i}": rng.standard_normal((16, 16)) for i in range(6)}

def child(n, late):
  count = 0
  def step(f):
    def wrapped(*args, **kwargs):
      nonlocal count
      count += 1
      if count == n and not late:
        os.kill(os.getpid(), signal.SIGKILL)
      try:
        return f(*args, **kwargs)
      finally:
        if count == n and late:
          os.kill(os.getpid(), signal.SIGKILL)
    return wrapped
  for name in ("rename", "fsync", "mkdir", "link", "unlink", "rmdir"):
    setattr(os, name, step(getattr(os, name)))
  save._exchange = step(save._exchange if swap else lambda a, b: False)
  save.write(
    path, {"seed": 2}, tensors(2).items(), max_shard_bytes=5000, overwrite=True
  )
  os._exit(0)

seen, n, done = set(), 0, False
while not done:
  n += 1
  for late in (False, True):
    shutil.rmtree(root)
    os.mkdir(root)
    # Without JAX in this process, which forks.
    os.mkdir(path)
    save.write_file(f"{path}/model.safetensors", tensors(1))
    open(f"{path}/config.json", "w").write('{"seed": 1}')
    open(f"{path}/tokenizer.json", "w").write("words")
    pid = os.fork()
    if pid == 0:
      child(n, late)
    status = os.waitpid(pid, 0)[1]
    done = status == 0
    assert done or os.WTERMSIG(status) == signal.SIGKILL, status
    place = path
    if not os.path.exists(path):
      assert not swap, n
      (aside,) = [x for x in os.listdir(root) if x.startswith("m.old-")]
      place = os.path.join(root, aside)
    opened = Folder.open(place)
    found = {}
    for file in opened.files:
      found |= load_file(os.path.join(place, file))
    seed = opened.config["seed"]
    want = tensors(seed)
    assert found.keys() == want.keys(), n
    assert all(np.array_equal(found[k], want[k]) for k in want), n
    assert open(os.path.join(place, "tokenizer.json")).read() == "words", n
    seen.add(seed)
assert seen == {1, 2}
print(n)
"""


@pytest.mark.long
@pytest.mark.parametrize(
  "how", [pytest.param("swap", marks=pytest.mark.slow), "rename"]
)
def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path, how):
  (tmp_path / "r").mkdir()
  done = subprocess.run(
    [sys.executable, "-c", KILL, str(tmp_path / "r"), how],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    check=False,
  )
  assert done.returncode == 0, done.stderr
  # As many steps as there are.
  assert int(done.stdout) > 15


# ---------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------

PROCESS = """
import json, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
port, me, root, fail = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.save import write

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
read_bytes = []
jax.monitoring.register_scalar_listener(
  lambda name, value, **_: read_bytes.append(value)
  if name.endswith("safetensors/bytes_read")
  else None
)
opened = Folder.open(root + "/in")
specs = {"a": P("x"), "b": P(None, "x"), "c": P(), "d": None}
targets = {
  name: jax.ShapeDtypeStruct(
    opened.tensors[name].shape,
    opened.tensors[name].dtype,
    sharding=None if spec is None else NamedSharding(mesh, spec),
  )
  for name, spec in specs.items()
}
rows = opened.read({"a": targets["a"]})
share = sum(read_bytes) / opened.tensors["a"].nbytes
turned = opened.read({"b": targets["b"]})
share_b = sum(read_bytes) / opened.tensors["b"].nbytes - share
got = rows | turned | opened.read({k: targets[k] for k in ("c", "d")})
error = ""
if fail == "taken" and me == 0:
  open(root + "/out", "w").close()
if fail == "full" and me == 0:
  from ringjax.models.hf import save
  def full(*args):
    raise OSError(28, "No space left on device")
  save.write_file = full
try:
  write(root + "/out", {"x": 1}, got.items(), max_shard_bytes=40_000)
except (OptionError, CheckpointFormatError, OSError) as e:
  error = type(e).__name__
try:
  opened.read({"bad": jax.ShapeDtypeStruct(
    (64, 64), "float32", sharding=NamedSharding(mesh, P("x"))
  )})
  bad = ""
except Exception as e:
  bad = str(e)
print("RESULT", json.dumps([share, share_b, error, bad]))
jax.distributed.shutdown()
"""


@pytest.mark.long
@pytest.mark.parametrize(
  "fail", ["", "taken", pytest.param("full", marks=pytest.mark.slow)]
)
def test_two_processes(tmp_path, fail):
  tensors = {
    "a": values((64, 512)),
    "b": values((512, 64)),
    "c": values((16, 16), BF16),
    "d": values((8,)),
  }
  bad = values((64, 64))
  bad[40, 3] = np.nan
  write(tmp_path / "in", {}, (tensors | {"bad": bad}).items())
  found = two_processes(["-c", PROCESS], tmp_path, fail)
  # Each process read half of what is cut, rows or columns.
  assert [x[:2] for x in found] == [[0.5, 0.5]] * 2
  words = "bad: got 1 of 4096 values not finite as float32, first at [40, 3]"
  for x in found:
    assert words in x[3]
  errors = {
    "": ["", ""],
    "taken": ["OptionError", "CheckpointFormatError"],
    "full": ["CheckpointWriteError", "CheckpointFormatError"],
  }
  assert [x[2] for x in found] == errors[fail]
  if fail:
    assert listing(tmp_path) == ["in", "out"][: 1 + (fail == "taken")]
  else:
    same_bits(read(tmp_path / "out"), tensors)
    assert len(Folder.open(tmp_path / "out").files) == 3

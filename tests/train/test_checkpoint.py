"""Checkpoints of training: what is restored was saved, or it is said."""

from __future__ import annotations

import concurrent.futures
import errno
import itertools
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import models
from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  InputTypeError,
  MeshError,
  OptionError,
)
from ringjax.train import Checkpoints
from ringjax.train.checkpoints import checkpoint_directory, leaves, manifest
from tests import checkpoints
from tests.helpers import MESSAGE_LIMIT, refused
from tests.train import saver

ROOT = pathlib.Path(__file__).parents[2]
SLOW = pytest.mark.slow


def bits(x):
  if isinstance(x, jax.Array) and jax.dtypes.issubdtype(
    x.dtype, jax.dtypes.prng_key
  ):
    return str(x.dtype), bits(jax.random.key_data(x))
  dtype = getattr(x, "dtype", type(x))
  return type(x), dtype, np.shape(x), np.asarray(x).tobytes()


def same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert bits(a) == bits(b)


def make_mesh(shape, names):
  return jax.make_mesh(
    shape,
    names,
    axis_types=(AxisType.Auto,) * len(names),
    devices=jax.devices()[: np.prod(shape)],
  )


def like(tree, sharding=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )


def tree_of(step):
  """Arrays of a step; those of no two steps are alike."""
  rng = np.random.default_rng(step)
  return {
    "w": jnp.asarray(rng.standard_normal((16, 32), np.float32)),
    "b": jnp.asarray(rng.standard_normal(24), jnp.bfloat16),
    "n": jnp.int32(step),
  }


LIKE = like(tree_of(0))


def fill(root, *steps, **options):
  with Checkpoints(root, **options) as c:
    for step in steps:
      c.save(step, tree_of(step), {"at": step})
  return root


def whole(root, step):
  """The newest step of a root is this one, to the bit."""
  c = Checkpoints(root)
  try:
    found = c.restore(like=LIKE)
    assert c.restored_step == c.latest() == step
  finally:
    c.close()
  same(found[0], tree_of(step))
  assert found[1] == {"at": step}


def rests(root):
  """What is left of saves and deletes."""
  ours = pathlib.Path(root) / ".ringjax"
  left = [p for f in ("new", "old") for p in (ours / f).iterdir()]
  return left + list(ours.glob("*.tmp"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
  return fill(tmp_path_factory.mktemp("three") / "root", 10, 20, 30)


@pytest.fixture
def root(three, tmp_path):
  """A root with the steps 10, 20 and 30, to be broken."""
  return pathlib.Path(shutil.copytree(three, tmp_path / "root"))


# ---------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------


class Pair(typing.NamedTuple):
  first: object
  second: object


@jax.tree_util.register_pytree_with_keys_class
class SameNames:
  """Two leaves that the tree cannot tell apart."""

  def __init__(self, *values):
    self.values = values

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.GetAttrKey("x"), v) for v in self.values], None

  @classmethod
  def tree_unflatten(cls, _, values):
    return cls(*values)


def gone():
  x = jnp.ones(3)
  x.delete()
  return x


def everything():
  mesh = make_mesh((8,), ("x",))
  params = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4) / 3}
  nan = np.array([0x7FC1, 0xFFC2, 0x8000, 1], np.uint16)
  return {
    "params": params,
    "opt": optax.adamw(1e-3).init(params),
    "pair": Pair((jnp.bool_(True), [jnp.uint8(200)]), None),
    "dtypes": [
      jnp.asarray([1, -2, 3], dtype)
      for dtype in ("int8", "int4", "float16", "float8_e4m3fn", "complex64")
    ],
    "bits": jax.lax.bitcast_convert_type(jnp.asarray(nan), jnp.bfloat16),
    "empty": jnp.zeros((0, 3)),
    "key": jax.random.key(7),
    "no keys": jax.random.split(jax.random.key(7, impl="rbg"), 0),
    "keys": jax.random.split(jax.random.key(7, impl="rbg"), 5),
    "sharded": jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P("x"))),
    "numpy": np.arange(3, dtype=np.int64) << 40,
    "number": np.float64(0.1),
    "python": [1 << 60, 0.1, False],
    # Names that could be taken for paths, or for each other.
    "a/b": jnp.int32(1),
    "a": {"b": jnp.int32(2), "": jnp.int32(3), "..": jnp.int32(4)},
    "a.b": jnp.int32(5),
    "%": jnp.int32(6),
    "é ": jnp.int32(7),
  }


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saved_is_restored_to_the_bit(asynchronous, tmp_path):
  tree = everything()
  extra = {"epoch": 1, "files": ["a", {"at": [1, 2.5, None, True]}]}
  with Checkpoints(tmp_path, asynchronous=asynchronous) as c:
    c.save(0, tree, extra)
  c = Checkpoints(tmp_path)
  for verify in ("crc32", "full", "none"):
    got, more = c.restore(like=tree, verify=verify)
    same(got, tree)
    assert more == extra and c.restored_step == 0
  got, _ = c.restore(0, like=tree)
  assert got["sharded"].sharding == tree["sharded"].sharding


def test_a_model_and_its_optimizer(tmp_path):
  """Restored from shapes alone, onto a mesh."""
  config = checkpoints.config("llama3")
  optimizer = optax.adamw(1e-3)

  def make():
    model = models.create(config, seed=3)
    return {"model": model, "optimizer": optimizer.init(model)}

  state = make()
  with Checkpoints(tmp_path) as c:
    c.save(1, state)
  where = NamedSharding(make_mesh((8,), ("data",)), P())
  shapes = like(jax.eval_shape(make), where)
  got, _ = Checkpoints(tmp_path).restore(like=shapes)
  same(got, state)
  assert isinstance(got["model"], type(state["model"]))
  tokens = np.arange(12, dtype=np.int32)[None]
  want = state["model"](tokens)
  np.testing.assert_allclose(got["model"](tokens), want, rtol=0, atol=1e-6)


def test_a_tree_of_one_leaf_and_of_none(tmp_path):
  with Checkpoints(tmp_path) as c:
    for tree in (jnp.arange(3), {}, jnp.zeros((2, 0), jnp.bfloat16)):
      c.save(1, tree)
      c.wait()
      got, extra = c.restore(like=tree)
      same(got, tree)
      assert extra == {}


@pytest.mark.parametrize(
  ("shape", "names", "spec"),
  [
    ((2, 4), ("x", "y"), P("y", "x")),
    ((2,), ("x",), P(None, "x")),
    ((1,), ("x",), P()),
  ],
)
def test_onto_another_mesh(shape, names, spec, tmp_path):
  x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 8)))
  tree = {"f": x, "h": x.astype(jnp.bfloat16)}
  mesh = make_mesh((8,), ("x",))
  with Checkpoints(tmp_path) as c:
    c.save(1, jax.device_put(tree, NamedSharding(mesh, P("x"))))
  where = NamedSharding(make_mesh(shape, names), spec)
  got, _ = Checkpoints(tmp_path).restore(like=like(tree, where))
  assert {x.sharding for x in jax.tree.leaves(got)} == {where}
  same(got, tree)


def test_the_caller_may_donate_at_once(tmp_path):
  mesh = make_mesh((8,), ("x",))
  whats = [jax.devices()[1], NamedSharding(mesh, P("x"))]
  overwrite = jax.jit(lambda t: [x * 0 - 1 for x in t], donate_argnums=0)
  with Checkpoints(tmp_path) as c:
    for step, where in itertools.product(range(3), whats):
      tree, copy = (
        [
          jax.device_put(jnp.arange(n, dtype=jnp.float32) + step, where)
          for n in (1 << 20, 1 << 10)
        ]
        for _ in range(2)
      )
      c.save(step, tree)
      jax.block_until_ready(overwrite(tree))
      # What is still held by the save would not have been given away.
      assert all(x.is_deleted() for x in tree)
      got, _ = c.restore(like=copy)
      same(got, copy)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P(("y", "x"))])
def test_a_save_copies_each_part_once(spec, several, tmp_path, monkeypatch):
  """By the buffers that Orbax gets, whose bytes are those of one replica."""
  mesh = make_mesh((2, 4), ("x", "y"))
  value = jax.device_put(
    jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32),
    NamedSharding(mesh, spec),
  )
  if several:
    # Each process keeps the global sharding, and one buffer for each part.
    monkeypatch.setattr(leaves.jax, "process_count", lambda: 2)
  copy = leaves.copied(value)
  monkeypatch.undo()
  buffers = {
    x.data.unsafe_buffer_pointer(): x.data.nbytes
    for x in copy.addressable_shards
  }
  assert sum(buffers.values()) == value.nbytes
  before = {x.data.unsafe_buffer_pointer() for x in value.addressable_shards}
  assert not before & set(buffers)
  assert not several or copy.sharding == value.sharding
  with Checkpoints(tmp_path) as c:
    c.save(1, {"x": copy if several else value})
    c.wait()
    # To another layout than that of the save.
    other = NamedSharding(mesh, P("y", "x"))
    form = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=other)
    got, _ = c.restore(like={"x": form})
  np.testing.assert_array_equal(got["x"], value)


def test_a_save_is_replaced(root):
  with Checkpoints(root) as c:
    c.save(30, tree_of(31), {"at": 31})
    c.wait()
    got, extra = c.restore(30, like=LIKE)
    same(got, tree_of(31))
    assert extra == {"at": 31} and c.steps() == [10, 20, 30]
  assert not rests(root)


# ---------------------------------------------------------------------------
# In the background
# ---------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
  """Saves stop where their files are read, until it is set."""
  opened, reached = threading.Event(), threading.Event()
  original = manifest.digest

  def digest(*args, sync=False, **kwargs):
    # Who restores is let through.
    if sync:
      reached.set()
      assert opened.wait(60)
    return original(*args, sync=sync, **kwargs)

  monkeypatch.setattr(manifest, "digest", digest)
  yield types.SimpleNamespace(set=opened.set, reached=reached)
  opened.set()


def test_training_goes_on_while_a_step_is_saved(gate, tmp_path):
  with Checkpoints(tmp_path) as c:
    c.save(1, tree_of(1), {"at": 1})
    for _ in range(100):
      c.poll()
    # Orbax may be done; for ringjax there is no step yet.
    assert c.steps() == [] and c.latest() is None
    gate.set()
    c.wait()
    assert c.steps() == [1]


def test_the_next_save_waits_for_the_one_before(gate, tmp_path):
  with Checkpoints(tmp_path) as c:
    c.save(1, tree_of(1), {"at": 1})
    threading.Timer(0.2, gate.set).start()
    c.save(2, tree_of(2), {"at": 2})
    assert c.steps()[0] == 1
  whole(tmp_path, 2)


def child(source, *args, **options):
  env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
  return subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(source), *map(str, args)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**env, "PYTHONPATH": str(ROOT)},
    **options,
  )


FORGOTTEN = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from ringjax.train import Checkpoints
from ringjax.train.checkpoints import manifest

c = Checkpoints(sys.argv[1])
if sys.argv[2:]:
  manifest.sync_folders = lambda folder: 1 / 0
c.save(7, jnp.arange(1 << 20))
"""


@pytest.mark.long
def test_a_program_that_ends_without_waiting(tmp_path):
  """Its last step is there, or somebody says that it is not."""
  with (
    child(FORGOTTEN, tmp_path / "good") as good,
    child(FORGOTTEN, tmp_path / "bad", "bad") as bad,
  ):
    _, said = good.communicate(timeout=60)
    _, failed = bad.communicate(timeout=60)
  assert "ringjax: step 7: got " in failed
  c = Checkpoints(tmp_path / "good")
  if c.latest() is None:
    assert "ringjax: step 7: got RuntimeError: can't create new thread" in said
    # Before that, Python lets Orbax finish.
    assert sys.version_info >= (3, 12)
  else:
    x = jnp.arange(1 << 20)
    assert np.array_equal(c.restore(like=x)[0], x) and said == ""


def poll_until_error(c, seconds=30):
  """Trains on until the failure is said."""
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    try:
      c.poll()
    except CheckpointWriteError as error:
      assert len(str(error)) < MESSAGE_LIMIT
      return error
    time.sleep(0.001)
  raise AssertionError("the failure was not said")


# ---------------------------------------------------------------------------
# A disk that refuses
# ---------------------------------------------------------------------------


def failing(monkeypatch, name, n, code):
  """The n-th call of a function of `os` fails; counts the calls."""
  original = getattr(os, name)
  count = [0]
  lock = threading.Lock()

  def instead(*args, **kwargs):
    with lock:
      count[0] += 1
      mine = count[0]
    if mine == n:
      raise OSError(code, os.strerror(code))
    return original(*args, **kwargs)

  monkeypatch.setattr(os, name, instead)
  return count


# How often a save that also deletes a step calls them, or more: how many files
# Orbax writes is a matter of when its threads run.
CALLS = {"fsync": 32, "rename": 3, "replace": 1, "unlink": 1}
EVERY = [(name, n) for name, most in CALLS.items() for n in range(1, most + 1)]
SOME = {("fsync", n) for n in (1, 12, 17, 19, 20, 21, 22)}
SOME |= {(name, 1) for name in CALLS} | {("rename", 2)}


@pytest.mark.parametrize(
  ("name", "n"),
  [x if x in SOME else pytest.param(*x, marks=SLOW) for x in EVERY],
)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_call_that_fails(name, n, code, root, monkeypatch):
  with Checkpoints(root) as c:
    with monkeypatch.context() as patch:
      count = failing(patch, name, n, code)
      c.save(40, tree_of(40), {"at": 40})
      concurrent.futures.wait([c._pending])
      if count[0] < n:
        pytest.skip(f"a save calls {name} {count[0]} times")
      error = poll_until_error(c)
    assert error.step == 40 and os.strerror(code) in str(error)
    assert error.file is not None and error.file[-20:] in str(error)
    # It failed, and is not said again; the step is there whole or not at all.
    c.poll()
    before = c.latest()
    assert before in (30, 40) and not list((root / ".ringjax/new").iterdir())
    for step in c.steps():
      same(c.restore(step, like=LIKE)[0], tree_of(step))
    # Training goes on, and so do its checkpoints.
    c.save(50, tree_of(50), {"at": 50})
  whole(root, 50)
  assert not rests(root)


def test_every_call_was_made_to_fail(root, monkeypatch):
  """A save calls as often as the test above thinks, or less."""
  with Checkpoints(root) as c:
    found = {name: failing(monkeypatch, name, 0, 0) for name in CALLS}
    c.save(40, tree_of(40))
    c.wait()
  assert c.steps() == [20, 30, 40]
  for name in ("fsync", "rename", "replace"):
    assert 0 < found[name][0] <= CALLS[name], name
  # The folder's own files are deleted by the same function, after ours.
  assert found["unlink"][0] > 1


def test_all_is_on_the_disk_before_a_step_exists(root, monkeypatch):
  """Power may fail at any moment: what a name says must lie behind it."""
  done = []
  sync, rename, replace = os.fsync, os.rename, os.replace

  def record(what, call):
    def instead(*args):
      call(*args)
      if what == "sync":
        args = [os.readlink(f"/proc/self/fd/{args[0]}")]
      done.append((what, *(os.path.relpath(x, root) for x in args)))

    return instead

  with Checkpoints(root) as c:
    monkeypatch.setattr(os, "fsync", record("sync", sync))
    monkeypatch.setattr(os, "rename", record("rename", rename))
    monkeypatch.setattr(os, "replace", record("replace", replace))
    c.save(40, tree_of(40))
    c.wait()
  new = ".ringjax/new/40.0"
  named = done.index(("rename", new, "40"))
  before, after = done[:named], done[named + 1 :]
  for path in manifest.files_of(str(root / "40")):
    assert ("sync", f"{new}/{path}") in before
  for path in (root / "40").rglob("*/"):
    if path.is_dir():
      inside = path.relative_to(root / "40")
      assert ("sync", f"{new}/{inside}") in before
  assert ("sync", new) in before
  # The manifest in three steps; then the names in the root; then a step goes.
  path = ".ringjax/40.json"
  assert before[-3:] == [
    ("sync", f"{path}.tmp"),
    ("replace", f"{path}.tmp", path),
    ("sync", ".ringjax"),
  ]
  gone = [x[:2] for x in after].index(("rename", "10"))
  assert after[:gone] == [("sync", "."), ("sync", ".ringjax/new")]
  # Its name is gone for good before its manifest is, and only then its files.
  assert after[gone + 1 :] == [("sync", "."), ("sync", ".ringjax")]


ORBAX = """
import json, os, resource, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import numpy as np
from ringjax.errors import CheckpointWriteError
from ringjax.train import Checkpoints

root = sys.argv[1]
tree = lambda step: {"w": jnp.asarray(
  np.random.default_rng(step).standard_normal(1 << 18, np.float32)
)}
same = lambda x, step: np.array_equal(x["w"], tree(step)["w"])
found = {}
for asynchronous in (True, False):
  with Checkpoints(root, asynchronous=asynchronous) as c:
    first = 10 if asynchronous else 20
    c.save(first, tree(first))
    c.wait()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    error = ""
    try:
      c.save(first + 1, tree(first + 1))
      end = time.monotonic() + 60
      while time.monotonic() < end:
        time.sleep(0.01)
        c.poll()
    except CheckpointWriteError as e:
      error = str(e)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    latest = c.latest()
    left = os.listdir(os.path.join(root, ".ringjax", "new"))
    old = same(c.restore(like=tree(0))[0], first)
    c.save(first + 2, tree(first + 2))
    c.wait()
    new = same(c.restore(like=tree(0))[0], first + 2)
    found[first] = [error, latest - first, left, bool(old), bool(new)]
print("FOUND" + json.dumps(found))
"""


@pytest.mark.long
def test_files_that_cannot_grow(tmp_path):
  """Orbax' own part, which writes from C++."""
  with child(ORBAX, tmp_path / "root") as made:
    out, err = made.communicate(timeout=300)
  assert made.returncode == 0, err
  found = json.loads(out.partition("FOUND")[2])
  for error, latest, left, old, new in found.values():
    assert "step" in error and len(error) < MESSAGE_LIMIT
    assert latest == 0 and left == [] and old and new


@pytest.mark.parametrize("where", ["orbax", "digest", "write", "rename"])
def test_a_failed_save_is_no_step(where, root, monkeypatch):
  def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

  with Checkpoints(root) as c:
    with monkeypatch.context() as patch:
      if where == "orbax":
        import orbax.checkpoint as ocp

        saver = ocp.AsyncCheckpointer
        wait = saver.wait_until_finished
        main = threading.current_thread()

        def instead(x):
          # Orbax really ends first: else its threads go on without files.
          wait(x)
          if threading.current_thread() is not main:
            fail()

        patch.setattr(saver, "wait_until_finished", instead)
      elif where == "rename":
        rename = os.rename
        patch.setattr(
          os,
          "rename",
          lambda a, b: fail() if str(b) == f"{root}/40" else rename(a, b),
        )
      else:
        owner = manifest if where == "digest" else manifest.Manifest
        patch.setattr(owner, where, fail)
      c.save(40, tree_of(40))
      # Before anybody asked how it went.
      concurrent.futures.wait([c._pending])
      assert c.latest() == 30 and c.steps() == [10, 20, 30]
      poll_until_error(c)
    assert c.latest() == 30
  whole(root, 30)


def test_a_failure_is_said_by_whoever_asks_first(root, monkeypatch):
  monkeypatch.setattr(manifest, "sync_folders", lambda _: 1 / 0)
  for ask in (
    lambda c: c.wait(),
    lambda c: c.save(50, tree_of(50)),
    lambda c: c.close(),
  ):
    c = Checkpoints(root)
    c.save(40, tree_of(40))
    error = refused(CheckpointWriteError, lambda c=c, ask=ask: ask(c), "40")
    assert isinstance(error, OSError) and error.step == 40
    c.close()
  c = Checkpoints(root, asynchronous=False)
  refused(CheckpointWriteError, lambda: c.save(40, tree_of(40)), "step 40")


# ---------------------------------------------------------------------------
# Bits that rot
# ---------------------------------------------------------------------------


def flip(path, at):
  data = bytearray(path.read_bytes())
  data[at % len(data)] ^= 1 << at % 8
  path.write_bytes(data)


def faults(path, other, rng, flips):
  """What can happen to a file, by name."""
  size = path.stat().st_size
  for _ in range(flips):
    at = rng.randrange(size)
    yield f"bit {at}", lambda at=at: flip(path, at)
  cut = rng.randrange(size)
  yield f"cut at {cut}", lambda: os.truncate(path, cut)
  yield "emptied", lambda: path.write_bytes(b"")
  yield "zeros", lambda: path.write_bytes(bytes(size))
  yield "longer", lambda: path.write_bytes(path.read_bytes() + b"\0")
  yield "deleted", path.unlink
  yield "a folder", lambda: (path.unlink(), path.mkdir())
  yield "a link", lambda: (path.unlink(), path.symlink_to(other))
  yield "swapped", lambda: swap(path, other)


def swap(a, b):
  x, y = a.read_bytes(), b.read_bytes()
  a.write_bytes(y)
  b.write_bytes(x)


def damage(root, flips, seed):
  """Breaks each file of step 30 in each way; whether that is found."""
  rng = random.Random(seed)
  c = Checkpoints(root)
  files = [root / "30" / f for f in manifest.files_of(str(root / "30"))]
  files.append(root / ".ringjax" / "30.json")
  keep = {f: f.read_bytes() for f in files}
  keep[root / ".ringjax/20.json"] = (root / ".ringjax/20.json").read_bytes()
  tried = 0
  for i, file in enumerate(files):
    other = files[(i + 1) % (len(files) - 1)]
    if file.suffix == ".json":
      other = root / ".ringjax/20.json"
    for j, (what, fault) in enumerate(faults(file, other, rng, flips)):
      fault()
      tried += 1
      where = f"{file.relative_to(root)}: {what}"
      error = None
      try:
        c.restore(30, like=LIKE)
      except CheckpointCorruptError as e:
        error = e
      assert error is not None, f"{where} was not found"
      assert len(str(error)) < MESSAGE_LIMIT, where
      assert error.step == 30 and "step 30" in str(error), where
      named = {str(file)} | ({str(other)} if what == "swapped" else set())
      assert error.file in named, where
      # Falling back costs a read of another step; a few will do.
      if j in (0, flips + 4):
        left = 10 if file.suffix == ".json" and what == "swapped" else 20
        with pytest.warns(RuntimeWarning, match="step 30"):
          got, extra = c.restore(like=LIKE)
        assert c.restored_step == left and extra == {"at": left}, where
        same(got, tree_of(left))
      for path, data in keep.items():
        if path.is_symlink():
          path.unlink()
        elif path.is_dir():
          path.rmdir()
        path.write_bytes(data)
  # What was wrong were the faults and not the test.
  same(c.restore(30, like=LIKE)[0], tree_of(30))
  return tried


@pytest.mark.long
def test_what_was_altered_is_found(root):
  assert damage(root, 10, seed=0) >= 200


@SLOW
def test_what_was_altered_is_found_at_length(root):
  assert damage(root, 400, seed=1) >= 5000


def test_every_bit_of_a_manifest_is_guarded(root):
  path = root / ".ringjax" / "30.json"
  data = path.read_bytes()
  for at in range(len(data)):
    altered = bytearray(data)
    altered[at] ^= 1 << at % 8
    with pytest.raises((CheckpointCorruptError, CheckpointFormatError)):
      manifest.Manifest.from_bytes(bytes(altered), str(path), 30)
  assert manifest.Manifest.from_bytes(data, str(path), 30).step == 30


@pytest.mark.parametrize("path", ["../20/_METADATA", "/etc/passwd", "a/../b"])
def test_a_manifest_that_points_outside(path, root):
  name = root / ".ringjax" / "30.json"
  made = manifest.Manifest.read(str(name), 30)
  file = manifest.File(path=path, size=0, crc32=0, sha256="")
  manifest.Manifest(
    step=30, files=(file,), leaves=made.leaves, extra={}, config=made.config
  ).write(str(name))
  c = Checkpoints(root)
  refused(CheckpointCorruptError, lambda: c.restore(30, like=LIKE), "inside")


def test_a_link_of_a_files_size_is_no_file(root):
  """What a link says is as long as the file was."""
  path = root / "30" / "commit_success.txt"
  size = path.stat().st_size
  path.unlink()
  path.symlink_to("x" * size)
  assert path.lstat().st_size == size
  assert Checkpoints(root).steps() == [10, 20]


def test_sha256_finds_what_crc32_cannot(root):
  """Four bytes chosen so that the CRC stays: by somebody, not by accident."""
  files = [p for p in (root / "30").rglob("*") if p.is_file()]
  target = max(files, key=lambda p: p.stat().st_size)
  data = bytearray(target.read_bytes())
  # Patterns with the CRC's own polynomial change no CRC.
  poly = 0x104C11DB7
  for bit in range(33):
    if poly >> (32 - bit) & 1:
      at = 800 + bit
      data[at // 8] ^= 1 << at % 8
  assert bytes(data) != target.read_bytes()
  target.write_bytes(data)
  c = Checkpoints(root)
  made = manifest.Manifest.read(str(root / ".ringjax/30.json"), 30)
  crc = {f.path: f.crc32 for f in made.files}
  path = target.relative_to(root / "30").as_posix()
  assert manifest.digest(str(root / "30"), path).crc32 == crc[path]
  refused(
    CheckpointCorruptError,
    lambda: c.restore(30, like=LIKE, verify="full"),
    "SHA-256",
  )


def test_without_verifying_what_orbax_finds_is_said_too(root):
  target = root / "30" / "manifest.ocdbt"
  target.write_bytes(bytes(target.stat().st_size))
  c = Checkpoints(root)
  read = lambda: c.restore(30, like=LIKE, verify="none")
  refused(CheckpointCorruptError, read, "step 30")
  with pytest.warns(RuntimeWarning, match="step 30"):
    same(c.restore(like=LIKE, verify="none")[0], tree_of(20))


def test_back_by_more_than_one_step(root):
  for step in (20, 30):
    flip(root / str(step) / "_METADATA", 9)
  with pytest.warns(RuntimeWarning) as caught:
    got, _ = Checkpoints(root).restore(like=LIKE)
  same(got, tree_of(10))
  assert [w for x in ("20", "30") for w in caught if f"step {x}:" in str(w)]


def test_nothing_left_is_not_a_new_beginning(root):
  for step in (10, 20, 30):
    flip(root / str(step) / "_METADATA", 9)
  c = Checkpoints(root)
  error = refused(
    CheckpointCorruptError, lambda: c.restore(like=LIKE), "3 step(s)"
  )
  assert error.step is None and error.file == str(root / "30" / "_METADATA")


def test_a_damaged_step_is_saved_anew(root):
  flip(root / "30" / "_METADATA", 9)
  with Checkpoints(root) as c:
    with pytest.warns(RuntimeWarning, match="step 30"):
      c.restore(like=LIKE)
    # It counts as none: neither does it warn, nor is it kept for a whole one.
    c.save(25, tree_of(25), {"at": 25})
    c.wait()
    assert c.steps() == [10, 20, 25, 30]
    c.save(30, tree_of(30), {"at": 30})
  whole(root, 30)
  assert Checkpoints(root).steps() == [20, 25, 30]


# ---------------------------------------------------------------------------
# What lies in the root
# ---------------------------------------------------------------------------


def litter(root):
  """Twelve things that are no steps."""
  (root / "90").mkdir(parents=True)
  (root / "91").symlink_to(root / "nowhere")
  (root / "92").write_bytes(b"")
  (root / "93").mkdir()
  (root / "93" / "notes.txt").write_text("mine")
  (root / "94.orbax-checkpoint-tmp").mkdir()
  (root / "95.json").write_text("{}")
  (root / "-96").mkdir()
  (root / "097").mkdir()
  (root / "٩٨").mkdir()
  (root / "tensorboard").mkdir()
  (root / "tensorboard" / "events").write_bytes(b"\0" * 99)
  (root / "99").mkdir()
  (root / "99" / "d").mkdir()
  ours = root / ".ringjax"
  ours.mkdir(exist_ok=True)
  (ours / "097.json").write_text("{}")


def listing(root):
  """All that is not a checkpoint's, folders aside."""
  ours = {".ringjax", "10", "20", "30", "40"}
  return {
    p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() else p.lstat()
    for p in sorted(root.rglob("*"))
    if p.relative_to(root).parts[0] not in ours and not p.is_dir()
  }


def test_litter_is_no_step_and_is_not_touched(root):
  litter(root)
  before = listing(root)
  with Checkpoints(root) as c:
    assert c.steps() == [10, 20, 30] and c.latest() == 30
    same(c.restore(like=LIKE)[0], tree_of(30))
    for step in (90, 93, 99):
      refused(OptionError, lambda s=step: c.restore(s, like=LIKE), "10, 20")
    c.save(40, tree_of(40), {"at": 40})
  whole(root, 40)
  assert listing(root) == before
  assert all((root / x).is_dir() for x in ("90", "-96", "097", "٩٨", "99"))
  assert (root / "91").is_symlink()


def test_only_litter_is_an_empty_root(tmp_path):
  litter(tmp_path)
  c = Checkpoints(tmp_path)
  assert c.restore(like=LIKE) is None and c.restored_step is None
  assert c.steps() == [] and c.latest() is None
  refused(OptionError, lambda: c.restore(3, like=LIKE), "none")


@pytest.mark.parametrize("name", [91, 92, 93])
def test_what_is_not_ours_is_not_replaced(name, tmp_path):
  litter(tmp_path)
  before = listing(tmp_path)
  with Checkpoints(tmp_path) as c:
    refused(CheckpointWriteError, lambda: c.save(name, tree_of(0)), "ours")
    # An empty folder is nobody's work.
    c.save(90, tree_of(90), {"at": 90})
    c.wait()
    assert c.steps() == [90]
    shutil.rmtree(tmp_path / "90")
  assert listing(tmp_path) == before


@pytest.mark.parametrize("lost", ["manifests", "folders", "half", "all"])
def test_steps_that_lost_something_are_no_new_beginning(lost, root):
  for step in (10, 20, 30):
    if lost == "manifests":
      (root / ".ringjax" / f"{step}.json").unlink()
    elif lost == "folders":
      shutil.rmtree(root / str(step))
    elif lost == "half":
      shutil.rmtree(root / str(step) / "ocdbt.process_0")
  if lost == "all":
    shutil.rmtree(root / ".ringjax")
  c = Checkpoints(root)
  assert c.steps() == [] and c.latest() is None
  refused(CheckpointCorruptError, lambda: c.restore(like=LIKE))


def test_a_step_without_its_manifest_is_put_aside_and_saved_again(root):
  for lost in range(2):
    (root / ".ringjax" / "30.json").unlink()
    with Checkpoints(root) as c:
      with pytest.warns(RuntimeWarning, match="step 30"):
        assert c.restore(like=LIKE)[1] == {"at": 20}
      with pytest.warns(RuntimeWarning, match=f"without-manifest-{lost}"):
        c.save(30, tree_of(30), {"at": 30})
      c.wait()
    whole(root, 30)
    assert (root / f"30.without-manifest-{lost}").is_dir()
  assert Checkpoints(root).steps() == [10, 20, 30]


def test_half_of_a_step_is_passed_over(root):
  shutil.rmtree(root / "30" / "d")
  c = Checkpoints(root)
  assert c.latest() == 20
  with pytest.warns(RuntimeWarning, match="step 30"):
    same(c.restore(like=LIKE)[0], tree_of(20))


def test_what_a_killed_process_left_is_swept(root):
  ours = root / ".ringjax"
  # Killed while it wrote, while it deleted, and between manifest and name.
  (ours / "new" / "40.0.orbax-checkpoint-tmp-17").mkdir()
  (ours / "new" / "40.0.orbax-checkpoint-tmp-17" / "x").write_text("x")
  (ours / "41.json.tmp").write_text("{")
  os.rename(root / "10", ours / "old" / "10.123")
  shutil.copy(ours / "30.json", ours / "50.json")
  shutil.copytree(root / "30", ours / "new" / "50.3")
  held = Checkpoints(root)
  assert not rests(root)
  assert {p.name for p in ours.glob("*.json")} == {"20.json", "30.json"}
  assert held.steps() == [20, 30]


def test_who_only_reads_sweeps_nothing(gate, root, monkeypatch):
  """Else an evaluation would take away what training is saving."""
  monkeypatch.setattr(checkpoint_directory, "PATIENCE_S", 0.05)
  with Checkpoints(root) as c:
    c.save(40, tree_of(40), {"at": 40})
    # Its files are there, and wait to be read.
    assert gate.reached.wait(60)
    reader = Checkpoints(root)
    assert list((root / ".ringjax/new").iterdir())
    same(reader.restore(like=LIKE)[0], tree_of(30))
    refused(CheckpointWriteError, lambda: reader.save(50, tree_of(50)), "lock")
    refused(CheckpointWriteError, lambda: reader.delete(10), "lock")
    gate.set()
  # One that reads for long does not keep others from saving.
  idle = Checkpoints(root)
  assert idle.latest() == 40
  reader.save(50, tree_of(50), {"at": 50})
  reader.close()
  whole(root, 50)
  assert Checkpoints(root).steps() == [30, 40, 50]


def test_one_writes_from_the_moment_it_says_so(root, monkeypatch):
  monkeypatch.setattr(checkpoint_directory, "PATIENCE_S", 0.05)
  with Checkpoints(root) as first:
    first.claim()
    other = Checkpoints(root)
    refused(CheckpointWriteError, other.claim, "no other process writes")
    refused(CheckpointWriteError, lambda: other.save(50, tree_of(50)), "lock")
    same(other.restore(like=LIKE)[0], tree_of(30))
    # Its own claim does not keep it from saving.
    first.claim()
    first.save(40, tree_of(40), {"at": 40})
  other.claim()
  other.close()
  assert other.steps() == [20, 30, 40]


def test_a_root_that_is_a_file(tmp_path):
  (tmp_path / "file").write_text("")
  refused(OptionError, lambda: Checkpoints(tmp_path / "file"), "root")


# ---------------------------------------------------------------------------
# What is kept
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("keep", "every", "left"),
  [
    (1, None, [7]),
    (3, None, [5, 6, 7]),
    (2, 3, [0, 3, 6, 7]),
    (9, 1, range(8)),
  ],
)
def test_what_is_kept(keep, every, left, tmp_path):
  fill(tmp_path, *range(8), keep=keep, every_keep=every)
  assert Checkpoints(tmp_path).steps() == list(left)
  folders = {p.name for p in tmp_path.iterdir()}
  assert folders == {".ringjax", *map(str, left)} and not rests(tmp_path)


def test_a_step_is_deleted(root):
  with Checkpoints(root) as c:
    c.delete(20)
    assert c.steps() == [10, 30] and not (root / "20").exists()
    refused(OptionError, lambda: c.delete(20), "10, 30")
  assert not rests(root)


def test_going_on_from_an_older_step(root):
  with Checkpoints(root, keep=2) as c:
    c.restore(10, like=LIKE)
    with pytest.warns(RuntimeWarning, match="30 exists"):
      c.save(11, tree_of(11), {"at": 11})
    c.wait()
    # What was just saved is not what is in excess.
    assert c.steps() == [11, 20, 30]
    c.delete(20)
    c.delete(30)
    c.save(12, tree_of(12), {"at": 12})
  whole(root, 12)


# ---------------------------------------------------------------------------
# What does not fit
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"w": jax.ShapeDtypeStruct((16, 31), jnp.float32)}, ["w", "[16, 31]"]),
    ({"w": jax.ShapeDtypeStruct((32, 16), jnp.float32)}, ["w", "[32, 16]"]),
    ({"w": jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)}, ["w", "bfloat16"]),
    ({"b": jax.ShapeDtypeStruct((24,), jnp.float16)}, ["b", "float16"]),
    ({"n": jax.ShapeDtypeStruct((), jnp.uint32)}, ["n", "uint32"]),
    ({"n": 3}, ["n", "int64"]),
    ({"n": jax.random.key(0)}, ["n", "key<threefry2x32>"]),
    ({"more": LIKE["n"]}, ["more", "missing"]),
    ({"w": {"w": LIKE["w"]}}, ["w/w", "missing"]),
    ({"w": None}, ["w", "not in"]),
  ],
)
def test_a_tree_that_does_not_fit(change, words, three):
  c = Checkpoints(three)
  for step in (None, 20):
    refused(
      CheckpointMismatchError,
      lambda step=step: c.restore(step, like={**LIKE, **change}),
      *words,
    )


def test_a_sharding_that_does_not_fit(three):
  where = NamedSharding(make_mesh((5,), ("x",)), P("x"))
  bad = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=where)
  c = Checkpoints(three)
  refused(MeshError, lambda: c.restore(like={**LIKE, "w": bad}), "w", "16")


def test_another_config(tmp_path):
  fill(tmp_path, 1, config={"layers": 2, "rate": 0.1})
  same(
    Checkpoints(tmp_path, config={"rate": 0.1, "layers": 2}).restore(like=LIKE)[
      0
    ],
    tree_of(1),
  )
  for config in ({"layers": 3, "rate": 0.1}, None):
    c = Checkpoints(tmp_path, config=config)
    refused(CheckpointMismatchError, lambda c=c: c.restore(like=LIKE), "config")


def test_a_newer_format_is_neither_read_nor_deleted(root, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(manifest, "VERSION", 2)
    fill(root, 40)
  with Checkpoints(root, keep=1) as c:
    refused(CheckpointFormatError, lambda: c.restore(like=LIKE), "version 2")
    assert c.steps() == [20, 30]
    same(c.restore(30, like=LIKE)[0], tree_of(30))
    for step in (50, 60):
      c.save(step, tree_of(step))
  monkeypatch.setattr(manifest, "VERSION", 2)
  assert Checkpoints(root).steps() == [40, 60]


@pytest.mark.parametrize(
  "options", [{"keep": 0}, {"every_keep": 0}, {"keep": 1.5}, {"timeout_s": 0}]
)
def test_options_that_cannot_be(options, tmp_path, unchecked):
  (name,) = options
  refused(OptionError, lambda: Checkpoints(tmp_path, **options), name)


@pytest.mark.parametrize(
  ("arguments", "kind", "word"),
  [
    ((-1, {}), OptionError, "step"),
    ((1.0, {}), OptionError, "step"),
    ((True, {}), OptionError, "step"),
    ((1, {"a": "text"}), InputTypeError, "leaf a"),
    ((1, {"a": object()}), InputTypeError, "leaf a"),
    ((1, {"a": gone()}), InputTypeError, "deleted"),
    ((1, {"a": np.array([object()])}), InputTypeError, "leaf a"),
    ((1, {0: 1, "0": 2}), OptionError, "one type"),
    ((1, {"a": {0: 1}, "b": 2, "c": [SameNames(1, 2)]}), OptionError, "c/0/x"),
    ((1, {}, {"a": np.ones(3)}), OptionError, "extra"),
    ((1, {}, {"a": float("nan")}), OptionError, "extra"),
    ((1, {}, {1: 2}), OptionError, "extra"),
    ((1, {}, {"a": (1, 2)}), OptionError, "extra"),
  ],
)
def test_what_cannot_be_saved(arguments, kind, word, tmp_path, unchecked):
  with Checkpoints(tmp_path) as c:
    refused(kind, lambda: c.save(*arguments), word)
    assert not rests(tmp_path)


def test_a_way_to_verify_that_there_is_not(three):
  c = Checkpoints(three)
  refused(OptionError, lambda: c.restore(like=LIKE, verify="md5"), "crc32")


# ---------------------------------------------------------------------------
# Killed
# ---------------------------------------------------------------------------


class Saver:
  """Processes that save and are killed; see tests/train/saver.py."""

  def __init__(self, folder):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    self.root, self.log = folder / "root", folder / "log"
    self.log.touch()
    self._process = subprocess.Popen(
      [sys.executable, ROOT / "tests/train/saver.py"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**env, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )

  def start(self, **job):
    job = {"root": str(self.root), "log": str(self.log), **job}
    self._process.stdin.write(json.dumps(job) + "\n")
    self._process.stdin.flush()
    return int(self._process.stdout.readline())

  def end(self):
    return int(self._process.stdout.readline())

  def said(self):
    return [line.split() for line in self.log.read_text().splitlines()]

  def close(self):
    self._process.stdin.close()
    self._process.wait(60)
    self._process.stdout.close()

  def check(self):
    """What was said to be saved is there, to the bit, and nothing else is."""
    acked = [int(n) for _, n in self.said() if n != "-1"]
    # A warning would be of a step that exists and is damaged.
    with warnings.catch_warnings(), Checkpoints(self.root) as c:
      warnings.simplefilter("error")
      found = c.restore(like=like(saver.state(0)))
      step = c.restored_step
      assert (step is None) == (found is None) == (not c.steps())
      if acked:
        # The step after it may have been finished when the kill came.
        assert step in (acked[-1], acked[-1] + 1)
      if found is not None:
        same(found[0], saver.state(step))
        assert found[1] == {"at": step}
      assert not rests(self.root)
      folders = {p.name for p in self.root.iterdir()} - {".ringjax"}
      assert folders == {str(s) for s in c.steps()} and len(folders) <= 3
      named = {p.stem for p in (self.root / ".ringjax").glob("*.json")}
      assert named == folders


@pytest.fixture
def victim(tmp_path):
  made = Saver(tmp_path)
  yield made
  made.close()


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=SLOW)])
def test_killed_at_any_moment(kills, victim):
  rng = random.Random(kills)
  for _ in range(kills):
    before = len(victim.said())
    pid = victim.start(count=1000)
    while len(victim.said()) == before:
      time.sleep(0.002)
    time.sleep(rng.random() * 0.4)
    os.kill(pid, signal.SIGKILL)
    assert victim.end() == -signal.SIGKILL
    victim.check()


# Each call of `os` in three saves, of which the last deletes a step.
POINTS = {
  "fsync": (1, 2, 14, 15, 17, 18, 19, 20, 45, 58),
  "rename": (1, 2, 3, 5, 6, 7),
  "replace": (1, 2),
  "unlink": (1,),
}
FEW = (("fsync", 17), ("fsync", 19), ("rename", 2), ("rename", 7))


@pytest.mark.long
@pytest.mark.parametrize(
  "points",
  [
    FEW,
    pytest.param([(x, n) for x in POINTS for n in POINTS[x]], marks=SLOW),
  ],
)
def test_killed_at_a_call_of_ours(points, victim):
  ended = []
  for call, n in points:
    victim.start(count=3, call=call, n=n)
    ended.append(victim.end())
    victim.check()
  # A point that is never reached shows nothing.
  assert ended.count(-signal.SIGKILL) >= 0.75 * len(points), ended


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
  "points",
  [
    [("fsync,fdatasync", 2), ("rename,renameat,renameat2", 1)],
    pytest.param(
      [
        (call, n)
        for call in ("fsync,fdatasync", "rename,renameat,renameat2", "unlink")
        for n in (1, 2, 3, 5, 8, 13)
      ],
      marks=SLOW,
    ),
  ],
)
def test_killed_at_a_call_of_the_system(points, victim):
  """Also those that Orbax makes from C++."""
  ended = []
  for calls, n in points:
    # strace counts the calls of each thread, so several N hit the same save.
    job = {"root": str(victim.root), "log": str(victim.log), "count": 3}
    inject = f"inject={calls}:signal=SIGKILL:when={n}"
    command = [
      *("strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}"),
      *("-e", inject, sys.executable, str(ROOT / "tests/train/saver.py")),
    ]
    done = subprocess.run(
      [*command, json.dumps(job)],
      capture_output=True,
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      check=False,
    )
    if b"PTRACE" in done.stderr or b"Operation not permitted" in done.stderr:
      pytest.skip("strace may not trace here")
    ended.append(done.returncode)
    victim.check()
  assert ended.count(-signal.SIGKILL) >= len(points) / 2, ended


# ---------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------

TWO = """
import concurrent.futures
import errno, json, os, sys, time, warnings
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
root, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, rank)
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from ringjax.errors import CheckpointCorruptError, CheckpointWriteError
from ringjax.errors import PeerError
from ringjax.train import Checkpoints, loop
from ringjax.train.checkpoints import manifest

mesh = jax.make_mesh(
  (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
)
rows, columns, all = (
  NamedSharding(mesh, s) for s in (P("x"), P(None, "x"), P())
)

def numbers(step):
  return np.random.default_rng(step).standard_normal((64, 32), np.float32)

def tree(step):
  x = numbers(step)
  make = lambda s: jax.make_array_from_callback(x.shape, s, lambda i: x[i])
  return {"rows": make(rows), "all": make(all), "n": step}

def is_step(found, step):
  x = numbers(step)
  good = found["n"] == step
  for name in ("rows", "all"):
    for piece in found[name].addressable_shards:
      good = good and np.array_equal(piece.data, x[piece.index])
  return bool(good)

shape = lambda s: jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=s)
like = {"rows": shape(columns), "all": shape(rows), "n": 0}
found = {}
c = Checkpoints(root, keep=3, timeout_s=60)
found["empty"] = c.restore(like=like) is None
for step in (10, 20, 30, 40):
  c.save(step, tree(step), {"at": step})
  # Training goes on with its own collectives meanwhile.
  total = jax.jit(jnp.sum, out_shardings=all)(tree(step)["rows"])
  total.block_until_ready()
  c.poll()
c.wait()
found["steps"] = c.steps()
out, extra = c.restore(like=like)
found["other mesh"] = is_step(out, 40) and extra == {"at": 40}
found["sharding"] = out["rows"].sharding == columns

# One process's disk refuses: both learn it, and both go on.
digest = manifest.digest
def fail(*args, **kwargs):
  raise OSError(errno.EIO, "Input/output error")
if rank == 1:
  manifest.digest = fail
c.save(50, tree(50))
try:
  for _ in range(3000):
    c.poll()
    time.sleep(0.01)
  found["refused"] = "no error"
except CheckpointWriteError as error:
  found["refused"] = str(error)
manifest.digest = digest
found["after"] = c.latest()
found["left"] = os.listdir(os.path.join(root, ".ringjax", "new"))

# A run that bears it: one process learns of it by a poll, the other when both
# save the next time.
saves = loop._Saves(c, loop.LoopConfig(most_unsaved=1))
if rank == 1:
  manifest.digest = fail
with warnings.catch_warnings(record=True) as said:
  warnings.simplefilter("always", RuntimeWarning)
  saves.save(55, tree(55), {}, last=False)
  concurrent.futures.wait([c._pending])
  manifest.digest = digest
  if rank == 0:
    saves.poll()
  saves.save(60, tree(60), {"at": 60}, last=True)
  c.wait()
found["borne"] = [len(said), c.steps()]

# A damaged step: both go back to the same one.
files = manifest.files_of(os.path.join(root, "60"))
c._group.all(lambda: None)
if rank == 0:
  path = os.path.join(root, "60", files[-1])
  data = bytearray(open(path, "rb").read())
  data[-1] ^= 1
  open(path, "wb").write(data)
c._group.all(lambda: None)
with warnings.catch_warnings(record=True) as said:
  warnings.simplefilter("always", RuntimeWarning)
  out, _ = c.restore(like=like)
found["back"] = [c.restored_step, is_step(out, 40)]
found["warned"] = [str(w.message) for w in said]
try:
  c.restore(60, like=like)
except CheckpointCorruptError as error:
  path = os.path.join(root, "60", files[-1])
  found["named"] = [error.step, error.file == path]

# Two that do not save the same are told so.
try:
  c.save(70 + rank, tree(70))
except PeerError as error:
  found["apart"] = str(error)
c.close()
print("FOUND" + json.dumps(found), flush=True)

# One dies while a step is written; see what is left.
if sys.argv[4:]:
  c = Checkpoints(root, timeout_s=60)
  if rank == 1:
    manifest.digest = lambda *args, **kwargs: os.kill(os.getpid(), 9)
  c.save(80, tree(80))
  print("SAVING", flush=True)
  time.sleep(60)
"""


def pair(root, *more):
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  return [child(TWO, root, port, rank, *more) for rank in range(2)]


@SLOW
def test_two_processes(tmp_path):
  made = pair(tmp_path / "root")
  outs = [p.communicate(timeout=240) for p in made]
  for p, (_, err) in zip(made, outs, strict=True):
    assert p.returncode == 0, err
  for rank, (out, _) in enumerate(outs):
    found = json.loads(out.partition("FOUND")[2])
    assert found["empty"] and found["steps"] == [20, 30, 40]
    assert found["other mesh"] and found["sharding"]
    assert "Input/output error" in found["refused"], found
    assert rank == 1 or "rank 1" in found["refused"], found
    assert found["after"] == 40
    # Rank 0 sweeps, and rank 1 may look before.
    assert rank == 1 or found["left"] == []
    # Process 0 alone speaks.
    assert found["borne"] == [1 - rank, [30, 40, 60]]
    assert found["back"] == [40, True] and found["named"] == [60, True]
    assert any("step 60" in w for w in found["warned"])
    assert "rank 1" in found["apart"]


@SLOW
def test_one_of_two_dies_in_a_save(tmp_path):
  root = tmp_path / "root"
  made = pair(root, "die")
  assert made[1].wait(120) == -signal.SIGKILL, made[1].stderr.read()
  # That the other one ends too is for whoever trains to see to.
  made[0].kill()
  for p in made:
    p.communicate()
  c = Checkpoints(root)
  assert c.steps() == [30, 40, 60] and not (root / "80").exists()
  assert not rests(root)


def test_orbax_is_quiet_and_its_warnings_are_heard(root, caplog):
  caplog.set_level(logging.INFO)
  with Checkpoints(root) as c:
    c.save(40, tree_of(40))
    c.wait()
    c.restore(like=LIKE)
  assert not [x for x in caplog.records if "orbax" in x.pathname]
  other = logging.getLogger("absl")
  for level, count in ((logging.INFO, 0), (logging.WARNING, 1)):
    caplog.clear()
    other.handle(
      other.makeRecord("absl", level, ocp.__file__, 1, "words", (), None)
    )
    assert len(caplog.records) == count
  other.handle(
    other.makeRecord("absl", logging.INFO, __file__, 1, "words", (), None)
  )
  assert len(caplog.records) == 2

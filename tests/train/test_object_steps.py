"""Checkpoints in an object storage: all or nothing without a rename."""

from __future__ import annotations

import collections
import gc
import json
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import paths
from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointMismatchError,
  CheckpointWriteError,
  OptionError,
)
from ringjax.train import Checkpoints
from ringjax.train.checkpoints import object_lease, object_steps
from tests import object_servers
from tests.train import saver
from tests.train.test_checkpoint import bits, child, like, make_mesh, same


@pytest.fixture
def root():
  with object_servers.served("memory") as bucket:
    yield f"{bucket}/run"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  """Arrays of these tests are cut into several pieces and objects."""
  monkeypatch.setattr(object_steps, "PIECE_BYTES", 40_000)
  monkeypatch.setattr(object_steps, "OBJECT_BYTES", 100_000)
  monkeypatch.setattr(object_steps, "FLIGHT_BYTES", 300_000)


def names(root):
  """Objects of a root."""
  objects = paths.as_path(root).rglob("*")
  return [str(place).removeprefix(f"{root}/") for place in objects]


def data_folders(root):
  """Folders of data in a root."""
  return {x.split("/")[2] for x in names(root) if x.startswith(".ringjax/data")}


def tree(step):
  rng = np.random.default_rng(step)
  mesh = make_mesh((2, 4), ("a", "b"))
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  normal = lambda *shape: rng.standard_normal(shape, np.float32)
  params = {
    "rows": put(normal(64, 129), "a"),
    "both": put(normal(24, 40), "b", "a"),
    "columns": put(
      jnp.asarray(normal(33, 512), jnp.bfloat16), None, ("b", "a")
    ),
    "replicated": put(normal(7, 3)),
    "scalar": put(jnp.float32(step)),
    "empty": jnp.zeros((3, 0, 2)),
    "key": jax.random.key(step),
    "int4": jnp.asarray(rng.integers(-8, 8, (5, 3)), jnp.int4),
  }
  return {
    "params": params,
    "adam": optax.adam(0.1).init({"rows": params["rows"]}),
    "numpy": normal(300, 65),
    "number": 3.5,
    "flag": True,
    "count": step,
  }


# ---------------------------------------------------------------------------
# Round trips
# ---------------------------------------------------------------------------


def test_a_step_returns_bit_for_bit(root):
  want = tree(3)
  with Checkpoints(root, config={"a": 1}) as c:
    assert c.root == root and c.latest() is None and not c.holds()
    assert c.restore(like=want) is None
    c.save(3, want, {"at": [1, 2]})
    c.wait()
    assert c.steps() == [3] and c.holds(want)
  with Checkpoints(root, config={"a": 1}) as c:
    for verify in ("crc32", "full", "none"):
      got, extra = c.restore(like=want, verify=verify)
      same(got, want)
      assert extra == {"at": [1, 2]} and c.restored_step == 3
  with pytest.raises(CheckpointMismatchError, match="config"):
    Checkpoints(root, config={"a": 2}).restore(like=want)


def test_the_order_of_bytes_does_not_count(root):
  values = np.arange(4)
  with Checkpoints(root) as c:
    for step, order in enumerate("<>"):
      c.save(step, {"w": values.astype(f"{order}f4")})
      c.wait()
      for other in "<>":
        got, _ = c.restore(like={"w": np.zeros(4, f"{other}f4")})
        np.testing.assert_array_equal(got["w"], values)


def test_only_shapes_that_differ_are_refused(root):
  with Checkpoints(root) as c:
    c.save(1, {"w": jnp.ones((4, 4))})
    c.wait()
    with pytest.raises(CheckpointMismatchError):
      c.restore(like={"w": jnp.ones((4, 5))})


@pytest.mark.parametrize(
  "spec",
  [P(), P("a"), P("b", "a"), P(None, "b"), P(("a", "b")), P(None, None, "a")],
)
def test_another_sharding_reads_only_pieces_that_overlap(root, spec):
  x = jnp.arange(64 * 24 * 32, dtype=jnp.float32).reshape(64, 24, 32)
  at = NamedSharding(make_mesh((2, 2), ("a", "b")), P("a", "b"))
  with Checkpoints(root) as c:
    c.save(0, {"x": jax.device_put(x, at)})
    c.wait()
    target = NamedSharding(make_mesh((2, 4), ("a", "b")), spec)
    with object_servers.with_faults() as faulty:
      (got, _) = c.restore(like=like({"x": x}, target))
    assert got["x"].sharding == target and bits(got["x"]) == bits(x)
    reads = [name for name, _ in faulty.requests if name == "cat_file"]
    # The manifest, and each piece at most once for each part of the array.
    pieces = 2 * 2 * -(-x.nbytes // 4 // 40_000)
    parts = len({str(s.index) for s in got["x"].addressable_shards})
    assert len(reads) <= 1 + pieces * parts


def test_newest_steps_stay_and_a_step_can_be_deleted(root):
  state = saver.state(0)
  with Checkpoints(root, keep=2, every_keep=4, asynchronous=False) as c:
    for step in (0, 3, 4, 5, 6):
      c.save(step, saver.state(step))
    assert c.steps() == [0, 4, 5, 6]
    c.delete(4)
    with pytest.raises(OptionError, match="one of those saved: 0, 5, 6"):
      c.restore(4, like=state)
    c.save(6, saver.state(60), {"again": True})
    got, extra = c.restore(like=state)
    same(got, saver.state(60))
    assert extra == {"again": True}
    same(c.restore(5, like=state)[0], saver.state(5))
  data = {
    name.split("/")[2].split(".")[0] for name in names(root) if "/data/" in name
  }
  assert data == {"0", "5", "6"}
  assert ".ringjax/writer" not in names(root)


def test_donated_arrays_are_saved(root):
  with Checkpoints(root) as c:
    x = jnp.arange(100_000.0)
    c.save(1, {"x": x})
    want = np.asarray(x).tobytes()
    y = jax.jit(lambda x: x * 0, donate_argnums=0)(x)
    y.block_until_ready()
    c.wait()
    got = c.restore(like={"x": jax.ShapeDtypeStruct(y.shape, y.dtype)})[0]
    assert np.asarray(got["x"]).tobytes() == want
  gc.collect()


# ---------------------------------------------------------------------------
# Killed processes
# ---------------------------------------------------------------------------


class Killed(BaseException):
  """Ends a process: no request comes after it."""


def save_until(root, n, step, state):
  """Saves a step in a process that dies at the n-th request; True: it lived."""

  def fault(number, name, address):
    if number >= n:
      raise Killed

  c = Checkpoints(root, keep=2)
  try:
    with object_servers.with_faults(fault):
      c.save(step, state)
      c.wait()
      c.close()
      return True
  except Killed:
    # Nor does a thread of the dead process send one.
    if c._steps._lease._ended is not None:
      c._steps._lease._ended.set()
    return False


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_each_request_leaves_the_old_step_or_the_new(
  root, again, monkeypatch
):
  monkeypatch.setattr(object_lease, "LEASE_S", -1.0)
  monkeypatch.setattr(object_steps, "OBJECT_BYTES", 140_000)
  old, state = saver.state(1), saver.state(2)
  number = 1 if again else 2
  lived, n = False, 0
  committed = []
  while not lived:
    for place in paths.as_path(root).rglob("*"):
      place.unlink()
    with Checkpoints(root) as c:
      c.save(1, old)
    lived = save_until(root, n, number, state)
    with Checkpoints(root, keep=2) as c:
      got, _ = c.restore(like=old)
      is_new = bits(got["w"]) == bits(state["w"])
      same(got, state if is_new else old)
      assert c.restored_step == (number if is_new else 1)
      committed.append(is_new)
      # The next process saves, and nothing of the dead one stays.
      c.save(7, saver.state(7))
      c.wait()
      steps = c.steps()
    assert len({x.split("/")[2] for x in names(root) if "/data/" in x}) == len(
      steps
    )
    n += 1
  assert committed == sorted(committed) and n > 8
  assert committed[-1] and not committed[0]


def test_a_save_that_fails_leaves_nothing(root):
  def fault(number, name, address):
    if "/data/" in address and name == "pipe_file":
      raise ConnectionResetError("reset by peer")

  with Checkpoints(root) as c:
    c.save(1, saver.state(1))
    c.wait()
    with object_servers.with_faults(fault):
      c.save(2, saver.state(2))
      with pytest.raises(CheckpointWriteError, match="on 6 attempts") as error:
        c.wait()
    assert error.value.step == 2 and "/data/" in error.value.file
    assert c.steps() == [1]
    c.save(3, saver.state(3))
  assert {x.split(".")[0] for x in data_folders(root)} == {"1", "3"}


def test_a_busy_storage_delays_a_save_and_a_restore(root):
  refused = collections.Counter()

  def fault(number, name, address):
    # Threads read pieces of one object, each of which is refused twice.
    request = threading.get_ident(), name, address
    refused[request] += 1
    if refused[request] % 3:
      raise OSError(16, "SlowDown")

  with Checkpoints(root) as c, object_servers.with_faults(fault) as faulty:
    c.save(1, saver.state(1))
    c.wait()
    same(c.restore(like=saver.state(0))[0], saver.state(1))
  assert len(faulty.requests) > 20


# ---------------------------------------------------------------------------
# One process that writes
# ---------------------------------------------------------------------------


def test_two_processes_do_not_write_at_once(root, monkeypatch):
  monkeypatch.setattr(object_lease, "REFRESH_S", 0.05)
  monkeypatch.setattr(object_lease, "_POLL_S", 0.1)
  with Checkpoints(root) as first:
    first.claim()
    second = Checkpoints(root)
    with pytest.raises(CheckpointWriteError, match="no other process writes"):
      second.claim()
    # A process that only reads is not kept from it.
    assert second.steps() == []
    first.save(1, saver.state(1))
  second.claim()
  second.close()


def test_a_dead_process_is_replaced_and_cannot_commit(root, monkeypatch):
  monkeypatch.setattr(object_lease, "LEASE_S", 0.2)
  monkeypatch.setattr(object_lease, "_POLL_S", 0.05)
  state = saver.state(1)
  dead = Checkpoints(root)
  dead.save(1, state)
  dead.wait()
  # It does not refresh its lease in time.
  time.sleep(0.3)
  with Checkpoints(root) as c:
    c.save(2, saver.state(2))
    c.wait()
    dead.save(3, saver.state(3))
    with pytest.raises(CheckpointWriteError, match="another process writes"):
      dead.wait()
    assert c.steps() == [1, 2]
    dead.close()
    # Its end does not release what it no longer has.
    assert ".ringjax/writer" in names(root)
  assert threading.active_count() < 200


def test_a_dead_process_removes_nothing_of_the_next_one(root, monkeypatch):
  monkeypatch.setattr(object_lease, "LEASE_S", 0.2)
  monkeypatch.setattr(object_lease, "_POLL_S", 0.05)
  dead = Checkpoints(root)
  dead.save(1, saver.state(1))
  dead.wait()
  time.sleep(0.3)
  with Checkpoints(root) as c:
    c.claim()
    check_sizes, tried = c._steps._check_sizes, []

    def check(manifest):
      check_sizes(manifest)
      if manifest.step == 2 and not tried:
        tried.append(manifest)
        # All objects of step 2 are written, its manifest is not.
        for change in (
          lambda: (dead.save(3, saver.state(3)), dead.wait()),
          lambda: dead.delete(1),
          dead._steps.clean_up,
        ):
          with pytest.raises(OSError, match="another process writes"):
            change()

    monkeypatch.setattr(c._steps, "_check_sizes", check)
    c.save(2, saver.state(2))
    c.wait()
    assert tried and c.steps() == [1, 2]
    same(c.restore(like=saver.state(0))[0], saver.state(2))
  dead.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_process_that_sleeps_before_its_last_request(
  root, monkeypatch, again
):
  """Another one has taken its lease, and has written the step or not."""
  monkeypatch.setattr(object_lease, "LEASE_S", 0.2)
  monkeypatch.setattr(object_lease, "_POLL_S", 0.05)
  slow, taken = Checkpoints(root), []

  def fault(number, name, address):
    if name == "pipe_file" and address.endswith("/5.json") and not taken:
      taken.append(Checkpoints(root))
      time.sleep(0.3)
      taken[0].claim()
      if again:
        taken[0].save(5, saver.state(6))
        taken[0].wait()

  with object_servers.with_faults(fault):
    slow.save(5, saver.state(5))
    with pytest.raises(CheckpointWriteError, match="another process writes"):
      slow.wait()
    slow.close()
    assert taken[0].steps() == [5] * again
    if again:
      same(taken[0].restore(like=saver.state(0))[0], saver.state(6))
    taken[0].close()


def test_a_manifest_that_is_deleted_while_it_is_compared_is_written(root):
  """As by hand: this process still has the lease."""
  moments = []

  def fault(number, name, address):
    if not address.endswith("/5.json"):
      return
    if name == "pipe_file" and not moments:
      moments.append(name)
      paths.as_path(address).write_bytes(b"{}")
    elif name == "cat_file" and len(moments) == 1:
      moments.append(name)
      paths.as_path(address).unlink()

  with Checkpoints(root) as c:
    with object_servers.with_faults(fault):
      c.save(5, saver.state(5))
      c.wait()
    assert moments == ["pipe_file", "cat_file"]
    same(c.restore(like=saver.state(0))[0], saver.state(5))


def test_a_refreshment_under_way_does_not_outlive_the_lease(root, monkeypatch):
  monkeypatch.setattr(object_lease, "REFRESH_S", 0.01)
  refreshes = threading.Event()

  def fault(number, name, address):
    if name == "pipe_file" and threading.current_thread().name == "lease":
      refreshes.set()
      time.sleep(0.2)

  lease = object_lease.ObjectLease(paths.as_path(root) / "writer")
  lease.acquire()
  with object_servers.with_faults(fault):
    assert refreshes.wait(10)
    lease.release()
    time.sleep(0.3)
  assert names(root) == []


def test_refreshments_go_on_after_one_whose_answer_was_lost(root, monkeypatch):
  """Its second attempt is refused, as the first has changed the object."""
  monkeypatch.setattr(object_lease, "REFRESH_S", 0.01)
  writes, again = [], threading.Event()

  def fault(number, name, address):
    if name == "pipe_file" and threading.current_thread().name == "lease":
      writes.append(address)
      if len(writes) == 1:
        raise FileExistsError(address)
      again.set()

  lease = object_lease.ObjectLease(paths.as_path(root) / "writer")
  lease.acquire()
  with object_servers.with_faults(fault):
    assert again.wait(10)
  lease.check()
  lease.release()


# ---------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------


def damaged(root, kind):
  """Damages the newest step of a root."""
  place = next(
    p for p in paths.as_path(root).rglob("*") if "/data/2." in str(p)
  )
  data = bytearray(place.read_bytes())
  if kind == "flipped":
    data[len(data) // 2] ^= 1
    place.write_bytes(bytes(data))
  elif kind == "short":
    place.write_bytes(bytes(data[:-1]))
  elif kind == "missing":
    place.unlink()
  else:
    manifest = paths.as_path(root) / ".ringjax" / "2.json"
    text = manifest.read_text()
    if kind == "moved":
      body = json.loads(text)
      body["pieces"]["w"][0][3] += 1
      text = json.dumps(body)
    manifest.write_text(text[:-9] if kind == "cut" else text)


@pytest.mark.parametrize(
  "kind", ["flipped", "short", "missing", "cut", "moved"]
)
def test_a_damaged_step_is_passed_over(root, kind):
  state = saver.state(0)
  with Checkpoints(root) as c:
    c.save(1, saver.state(1))
    c.save(2, saver.state(2))
  damaged(root, kind)
  with Checkpoints(root) as c:
    with pytest.raises(CheckpointCorruptError) as error:
      c.restore(2, like=state)
    assert error.value.step == 2 and error.value.file.startswith("memory://")
    with pytest.warns(RuntimeWarning, match="going back to step 1"):
      same(c.restore(like=state)[0], saver.state(1))
    assert c.restored_step == 1
    # Its data stays while it may be repaired.
    c.save(3, saver.state(3))
  assert (paths.as_path(root) / ".ringjax" / "2.json").is_file()


def test_an_object_that_vanishes_during_a_restore(root):
  state = saver.state(0)
  with Checkpoints(root) as c:
    c.save(1, saver.state(1))
    c.save(2, saver.state(2))
    c.wait()

    def fault(number, name, address):
      if "/data/2." in address and name == "cat_file":
        raise FileNotFoundError(address)

    with (
      object_servers.with_faults(fault),
      pytest.warns(RuntimeWarning, match="no such object"),
    ):
      same(c.restore(like=state)[0], saver.state(1))


# ---------------------------------------------------------------------------
# Real clients
# ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.long_cases(2)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_steps_of_a_server(scheme):
  with object_servers.served(scheme) as bucket:
    want = tree(1)
    with Checkpoints(f"{bucket}/run", keep=1) as c:
      c.save(0, tree(0))
      c.save(1, want)
      c.wait()
      same(c.restore(like=want, verify="full")[0], want)
      assert c.steps() == [1]
    with Checkpoints(f"{bucket}/run") as c:
      c.claim()
      same(c.restore(like=want)[0], want)


# ---------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------

TWO = """
import json, os, sys, warnings
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
bucket, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, rank)
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from ringjax import paths
from ringjax.errors import CheckpointWriteError
from ringjax.models.hf import folder, save
from ringjax.paths import object_store
from ringjax.train import Checkpoints

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows, columns, all = (
  NamedSharding(mesh, s) for s in (P("x"), P(None, "x"), P())
)
numbers = lambda step: np.random.default_rng(step).standard_normal(
  (64, 32), np.float32
)

def tree(step):
  x = numbers(step)
  make = lambda s: jax.make_array_from_callback(x.shape, s, lambda i: x[i])
  return {"rows": make(rows), "all": make(all), "n": step}

def is_step(tree, step):
  x = numbers(step)
  good = tree["n"] == step
  for name in ("rows", "all"):
    for piece in tree[name].addressable_shards:
      good = good and np.array_equal(piece.data, x[piece.index])
  return bool(good)

shape = lambda s: jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=s)
like = {"rows": shape(columns), "all": shape(rows), "n": 0}
c = Checkpoints(f"{bucket}/run", keep=2, timeout_s=60)
answer = {"empty": c.restore(like=like) is None}
for step in (10, 20, 30):
  c.save(step, tree(step), {"at": step})
c.wait()
answer["steps"] = c.steps()
restored, extra = c.restore(like=like)
answer["restored"] = is_step(restored, 30) and extra == {"at": 30}

# The storage refuses one process: both learn it.
store = paths.as_path(bucket).store
write = store.write
def refuse(*args, **options):
  raise PermissionError("refused")
if rank == 1:
  store.write = refuse
try:
  c.save(40, tree(40))
  c.wait()
except CheckpointWriteError as error:
  answer["refused"] = str(error)
store.write = write
c.save(50, tree(50))
c.wait()
answer["after"] = c.steps()

# A step with a flipped bit: both go back.
if rank == 0:
  for place in paths.as_path(f"{bucket}/run").rglob("*"):
    if "/data/50." in str(place):
      data = bytearray(place.read_bytes())
      data[-1] ^= 1
      place.write_bytes(bytes(data))
c._group.all(lambda: None)
with warnings.catch_warnings():
  warnings.simplefilter("ignore", RuntimeWarning)
  restored, _ = c.restore(like=like)
answer["back"] = [c.restored_step, is_step(restored, 30)]
c.close()

# A model, of which each process reads the bytes of its rows.
x = numbers(0)
save.write(f"{bucket}/model", {}, [("w", x)])
opened = folder.Folder.open(f"{bucket}/model")
read, nbytes = store.read, []
def counted(address, start=0, end=None):
  nbytes.append(end - start)
  return read(address, start, end)
store.read = counted
w = opened.read({"w": shape(rows)})["w"]
store.read = read
answer["bytes"] = sum(nbytes)
answer["w"] = bool(
  np.all([np.array_equal(s.data, x[s.index]) for s in w.addressable_shards])
)
print("ANSWER" + json.dumps(answer), flush=True)
"""


@pytest.mark.slow
def test_two_processes():
  with object_servers.served("s3") as bucket:
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
    processes = [child(TWO, bucket, port, rank) for rank in range(2)]
    outs = [p.communicate(timeout=240) for p in processes]
  for process, (_, err) in zip(processes, outs, strict=True):
    assert process.returncode == 0, err
  for rank, (out, _) in enumerate(outs):
    answer = json.loads(out.partition("ANSWER")[2])
    assert answer["empty"] and answer["steps"] == [20, 30]
    assert answer["restored"]
    assert "refused" in answer["refused"], answer
    assert rank == 1 or "rank 1" in answer["refused"], answer
    assert answer["after"] == [30, 50]
    assert answer["back"] == [30, True]
    assert answer["bytes"] == 64 * 32 * 4 // 2 and answer["w"]

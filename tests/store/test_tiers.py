"""A store returns what was put, or nothing, whatever happens to its files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import InputTypeError, OptionError
from ringjax.store import LRU, DiskTier, Store, TierPolicy
from ringjax.store.block_file import HEADER_BYTES, pack, unpack
from tests.helpers import refused

SIZE = 1000


def key(n: int) -> bytes:
  return hashlib.sha256(b"%d" % n).digest()


def payload(n: int, size: int = SIZE) -> bytes:
  return np.random.default_rng(n).bytes(size)


def on_disk(folder, budget: int = 1 << 30, **options) -> DiskTier:
  return DiskTier(folder, budget, LRU(), **options)


def written(store: Store, n: int) -> None:
  store.put(key(n), payload(n))
  store.flush()


def files(folder) -> list[pathlib.Path]:
  return sorted(x for x in pathlib.Path(folder).rglob("*") if x.is_file())


def test_a_block_is_written_once(tmp_path, monkeypatch):
  """Also if its file appears between looking for it and waiting in line."""
  looked, gate = DiskTier.__contains__, threading.Event()

  def late(tier, key):
    found = looked(tier, key)
    if threading.current_thread() is threading.main_thread():
      assert not found
      gate.set()
      store.flush()
    return found

  with Store(disk=(tmp_path / "blocks", 1 << 20)) as store:
    store._writer.submit(gate.wait)
    store.put(key(1), payload(1))
    monkeypatch.setattr(DiskTier, "__contains__", late)
    store.put(key(1), payload(1))
    store.flush()
    assert store.counters.written == 1 and store.counters.put == 2


def test_what_goes_in_comes_out(tmp_path):
  folder = tmp_path / "a" / "blocks"
  with Store(host=1 << 20, disk=(folder, 1 << 20)) as store:
    for n in range(20):
      store.put(key(n), payload(n))
      store.put(key(n), payload(n))
    assert all(
      key(n) in store and store.get(key(n)) == payload(n) for n in range(20)
    )
    assert key(99) not in store and store.get(key(99)) is None
    store.flush()
    assert store.counters.host_hits == 20 and store.counters.misses == 1
    assert store.counters.host_bytes == 20 * SIZE
    assert store.counters.written == len(files(folder)) == 20
  # Another process, later.
  with Store(host=1 << 20, disk=(folder, 1 << 20)) as store:
    fetch = store.fetch([key(n) for n in (*range(20), 99, 3)])
    assert fetch.wait(60)
    assert fetch.found == {key(n): payload(n) for n in range(20)}
    assert store.counters.disk_hits == 20 and store.counters.misses == 1
    # What was read is in host memory now.
    assert store.get(key(7)) == payload(7) and store.counters.host_hits == 1
    assert store.counters.errors == 0


@pytest.mark.parametrize("size", [0, 1, 255, 4096, (1 << 20) + 1])
def test_every_flipped_bit_and_every_cut(size):
  parts = pack(key(1), payload(1, size))
  data = b"".join(parts)
  assert bytes(unpack(key(1), data)) == payload(1, size)
  rng = np.random.default_rng(size)
  bits = (
    range(8 * HEADER_BYTES) if size == 1 else rng.integers(0, 8 * len(data), 64)
  )
  for bit in bits:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"block|payload|digest"):
      unpack(key(1), bytes(changed))
  for length in {0, 1, 47, HEADER_BYTES - 1, max(0, len(data) - 1)}:
    with pytest.raises(ValueError, match=r"block|payload|digest"):
      unpack(key(1), data[:length])
  with pytest.raises(ValueError, match="another size"):
    unpack(key(1), data + b"x")
  with pytest.raises(ValueError, match="another key"):
    unpack(key(2), data)


def test_changed_files_are_absent_and_removed(tmp_path):
  tier = on_disk(tmp_path / "d")
  for n in range(6):
    assert tier.put(key(n), payload(n))
  path = {n: tier._path(key(n)) for n in range(6)}
  whole = path[0].read_bytes()
  path[0].write_bytes(whole[:500])
  path[1].write_bytes(b"")
  changed = bytearray(path[2].read_bytes())
  changed[700] ^= 4
  path[2].write_bytes(changed)
  # Another key's block, whole.
  path[3].write_bytes(path[4].read_bytes())
  path[5].unlink()
  path[5].symlink_to(path[4])
  found = [tier.get(key(n)) for n in range(6)]
  assert [x and bytes(x) for x in found] == [None] * 4 + [payload(4), None]
  assert tier.corrupt == 5 and tier.read_errors == 0
  assert not any(
    path[n].is_symlink() or path[n].exists() for n in (0, 1, 2, 3, 5)
  )
  assert tier.nbytes == sum(tier._sizes.values())
  # They can be written anew.
  assert tier.put(key(2), payload(2)) and bytes(tier.get(key(2))) == payload(2)
  with Store(disk=(tmp_path / "d", 1 << 20)) as store:
    path[4].write_bytes(whole)
    with pytest.warns(RuntimeWarning, match="not what was written"):
      assert store.get(key(4)) is None
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      path[2].write_bytes(b"again")
      assert store.get(key(2)) is None
    assert store.disk.corrupt == 2 and store.counters.misses == 2


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_pipe_or_a_link_in_place_of_a_block_is_a_miss(kind, tmp_path):
  tier = on_disk(tmp_path / "store")
  assert tier.put(key(1), payload(1))
  (path,) = files(tmp_path / "store")
  path.rename(tmp_path / "aside")
  if kind == "pipe":
    os.mkfifo(path)
  else:
    path.symlink_to(tmp_path / "aside")
  assert tier.get(key(1)) is None
  assert tier.corrupt == 1
  assert tier.put(key(1), payload(1))
  assert tier.get(key(1)) == payload(1)


def test_foreign_files_are_left_alone(tmp_path):
  tier = on_disk(tmp_path)
  tier.put(key(0), payload(0))
  folder = tier._path(key(0)).parent
  others = [tmp_path / "readme", folder / "x.kv", folder / "note.txt"]
  mine = f".{tier._me}.9.tmp"
  dead = subprocess.run(
    [sys.executable, "-c", "import os; print(os.getpid())"],
    capture_output=True,
    check=True,
  )
  host = tier._me.rpartition("-")[0]
  left = folder / f".{host}-{int(dead.stdout)}.1.tmp"
  for path in (*others, folder / mine, left):
    path.write_bytes(b"other")
  again = on_disk(tmp_path)
  assert len(again) == 1 and bytes(again.get(key(0))) == payload(0)
  assert all(path.exists() for path in (*others, folder / mine))
  # Its writer is gone.
  assert not left.exists()


def test_budgets(tmp_path):
  each = SIZE + HEADER_BYTES
  with Store(host=10 * SIZE, disk=(tmp_path, 20 * each)) as store:
    for n in range(50):
      store.request([key(n)])
      store.put(key(n), payload(n))
      assert store.host.nbytes <= 10 * SIZE
    store.flush()
    assert sum(path.stat().st_size for path in files(tmp_path)) == 20 * each
    assert len(store.host) == 10 and len(store.disk) == 20
    assert store.host.evicted == 40 and store.disk.evicted == 30
    assert [n for n in range(50) if key(n) in store] == list(range(30, 50))
    # What is larger than a tier does not push out all the others.
    store.put(key(99), payload(99, 30 * SIZE))
    store.flush()
    assert store.host.refused == store.disk.refused == 1
    assert len(store.host) == 10 and len(store.disk) == 20
  # A smaller budget holds from the first write on.
  tier = on_disk(tmp_path, 5 * each)
  assert tier.put(key(60), payload(60))
  assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 * each


def test_policies_of_tiers(tmp_path):
  pair = ("lru", "second_hit")
  with Store(host=1 << 20, disk=(tmp_path, 1 << 20), policy=pair) as store:
    store.request([key(0), key(1)])
    store.put(key(0), payload(0))
    store.put(key(1), payload(1))
    store.flush()
    assert len(store.host) == 2 and not files(tmp_path)
    store.request([key(0)])
    store.put(key(0), payload(0))
    store.flush()
    assert len(files(tmp_path)) == 1


def test_a_policy_that_raises_does_not_stop_anything():
  class Broken(TierPolicy):
    def request(self, keys):
      raise KeyError("lost")

    def admit(self, key):
      raise ZeroDivisionError

  store = Store(host=1 << 20, policy=Broken())
  with pytest.warns(RuntimeWarning, match="lost"):
    store.request([key(0)])
  store.put(key(0), payload(0))
  assert store.get(key(0)) is None and key(0) not in store
  assert store.counters.errors == 2


def test_what_is_refused(unchecked, tmp_path):
  refused(OptionError, lambda: Store(), "a tier")
  refused(InputTypeError, lambda: Store(disk=tmp_path), "disk")
  refused(InputTypeError, lambda: Store(disk=(3, 100)), "disk")
  refused(OptionError, lambda: Store(host=-1), "host")
  refused(OptionError, lambda: Store(host=1, policy=("lru",) * 3), "two tiers")
  one = LRU()
  refused(
    OptionError,
    lambda: Store(host=1, disk=(tmp_path, 1), policy=(one, one)),
    "several tiers",
  )
  path = tmp_path / "file"
  path.write_bytes(b"")
  refused(OptionError, lambda: Store(disk=(path, 1)), "a file")
  shared = tmp_path / "shared"
  shared.mkdir()
  shared.chmod(0o777)
  refused(OptionError, lambda: Store(disk=(shared, 1)), "other users")


# ---------------------------------------------------------------------------
# Disks that refuse
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def file_limit(size):
  """Writes beyond a size fail, as on a full disk."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk(tmp_path):
  with Store(host=1 << 20, disk=(tmp_path, 1 << 20)) as store:
    store.put(key(0), payload(0))
    store.flush()
    with warnings.catch_warnings(record=True) as seen, file_limit(SIZE // 2):
      warnings.simplefilter("always")
      for n in range(1, 9):
        store.put(key(n), payload(n))
      store.flush()
    assert len([w for w in seen if "written" in str(w.message)]) == 1
    # Of 8 writes those that came behind an error were left out.
    assert store.disk.write_errors + store.disk.skipped == 8
    assert store.disk.write_errors < 8 and store.counters.errors == 0
    assert len(files(tmp_path)) == 1
    # Host memory goes on, and so does the disk once there is room.
    assert all(store.get(key(n)) == payload(n) for n in range(9))
    for n in range(100, 120):
      store.put(key(n), payload(n))
    store.flush()
    assert len(files(tmp_path)) > 1
    assert store.disk.nbytes == sum(x.stat().st_size for x in files(tmp_path))


@contextlib.contextmanager
def without_rights():
  """A folder that is ours and cannot be written to, for root too."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="ringjax-store-"))
  root = os.geteuid() == 0
  try:
    if root:
      os.chown(folder, 65534, 65534)
    yield folder, (lambda: os.seteuid(65534)) if root else lambda: None
  finally:
    if root:
      os.seteuid(0)
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_read_only_folder():
  with without_rights() as (folder, drop):
    drop()
    tier = on_disk(folder)
    tier.put(key(0), payload(0))
    for path in (tier._path(key(0)).parent, folder):
      path.chmod(0o500)
    with Store(disk=(folder, 1 << 20)) as store:
      with pytest.warns(RuntimeWarning, match="cannot be written"):
        written(store, 1)
      assert store.get(key(0)) == payload(0)
      assert store.get(key(1)) is None
      assert store.disk.write_errors == 1 and store.counters.errors == 0
    tier._path(key(0)).parent.chmod(0o700)


def test_the_folder_goes(tmp_path):
  folder = tmp_path / "gone"
  with Store(disk=(folder, 1 << 20)) as store:
    store.put(key(0), payload(0))
    store.flush()
    shutil.rmtree(folder)
    assert store.get(key(0)) is None and key(0) not in store
    with pytest.warns(RuntimeWarning, match="cannot be written"):
      written(store, 1)
    assert store.counters.errors == 0


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
  each = SIZE + HEADER_BYTES
  tier = on_disk(tmp_path, 4 * each)
  for n in range(4):
    tier.put(key(n), payload(n))
    os.utime(tier._path(key(n)), (10**9 - n, 10**9 - n))
  monkeypatch.setattr(time, "time", lambda: 0.0)
  again = on_disk(tmp_path, 4 * each)
  for n in range(10, 13):
    assert again.put(key(n), payload(n))
    os.utime(again._path(key(n)), (1, 1))
  left = [n for n in (*range(4), 10, 11, 12) if again.get(key(n)) is not None]
  # By their times 0 is the newest of the old ones; what is new stays.
  assert left == [0, 10, 11, 12]


# ---------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------

WRITER = """
import sys
from tests.store.test_tiers import key, on_disk, payload
folder, budget, first, count, sync = sys.argv[1:]
tier = on_disk(folder, int(budget), sync=sync == "True")
print("ready", flush=True)
for n in range(int(first), int(first) + int(count)):
  tier.put(key(n), payload(n, 20000))
  print(n, flush=True)
"""


def writer(folder, *, budget=1 << 40, first=0, count=10**9, sync=False):
  return subprocess.Popen(
    [
      sys.executable,
      "-c",
      WRITER,
      *map(str, (folder, budget, first, count, sync)),
    ],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(rj.__file__).parents[1],
  )


def killed(folder, rng, first, *, sync=False):
  """Kills a writer at any moment; what it said was written."""
  process = writer(folder, first=first, sync=sync)
  try:
    said = []
    for _ in range(int(rng.integers(2, 40))):
      said.append(process.stdout.readline().strip())
    time.sleep(float(rng.uniform(0, 0.003)))
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.read().split()
  finally:
    process.kill()
    process.wait()
    process.stdout.close()
  return [int(x) for x in said if x.isdigit()]


def kill_many(folder, times):
  rng = np.random.default_rng(0)
  torn = 0
  for turn in range(times):
    first = turn * 10**6
    done = killed(folder, rng, first, sync=bool(turn % 2))
    torn += sum(path.suffix == ".tmp" for path in files(folder))
    tier = on_disk(folder)
    assert done
    for n in done:
      found = tier.get(key(n))
      assert found is not None and bytes(found) == payload(n, 20000)
    # Of the one that it was at, all or nothing.
    found = tier.get(key(done[-1] + 1))
    assert found is None or bytes(found) == payload(done[-1] + 1, 20000)
    assert tier.corrupt == 0
    # Nothing else is left.
    assert all(path.suffix == ".kv" for path in files(folder))
    shutil.rmtree(folder)
  return torn


@pytest.mark.long
def test_killed_while_writing(tmp_path):
  kill_many(tmp_path / "d", 2)


@pytest.mark.slow
def test_killed_while_writing_100_times(tmp_path):
  # Some of them are hit in the middle of a file.
  assert kill_many(tmp_path / "d", 100) > 0


def test_two_processes_on_one_folder(tmp_path):
  each = 20000 + HEADER_BYTES
  budget = 40 * each
  process = writer(tmp_path, budget=budget, count=150)
  try:
    assert process.stdout.readline().strip() == "ready"
    tier = on_disk(tmp_path, budget)
    for n in range(100, 250):
      # Some of them are the other's too.
      tier.put(key(n), payload(n, 20000))
      found = tier.get(key(n - 50))
      assert found is None or bytes(found) == payload(n - 50, 20000)
    assert process.wait(60) == 0
  finally:
    process.kill()
    process.wait()
    process.stdout.close()
  assert tier.corrupt == tier.write_errors == tier.read_errors == 0
  used = sum(path.stat().st_size for path in files(tmp_path))
  assert used <= 2 * budget
  # One alone brings the folder back to its budget.
  again = on_disk(tmp_path, budget)
  again.put(key(999), payload(999, 20000))
  assert sum(path.stat().st_size for path in files(tmp_path)) <= budget


def test_files_of_dead_writers_go_whatever_the_host_is_called(
  tmp_path, monkeypatch
):
  monkeypatch.setattr("socket.gethostname", lambda: "node-3.rack.example")
  tier = on_disk(tmp_path, 10 * SIZE)
  tier.put(key(1), payload(1))
  (block,) = files(tmp_path)
  ended = subprocess.run(
    ["sh", "-c", "echo $$"], capture_output=True, check=True
  )
  dead, alive = int(ended.stdout), os.getpid()
  names = [f".node-3.rack.example-{pid}.7.tmp" for pid in (dead, alive)]
  for name in names:
    (block.parent / name).write_bytes(b"half")
  on_disk(tmp_path, 10 * SIZE)
  assert [(block.parent / name).exists() for name in names] == [False, True]


def test_two_writes_at_once_stay_within_the_budget(tmp_path, monkeypatch):
  tier = on_disk(tmp_path, SIZE + HEADER_BYTES)
  write, inside, go = DiskTier._write, threading.Event(), threading.Event()

  def slow(*args):
    inside.set()
    go.wait()
    return write(*args)

  monkeypatch.setattr(DiskTier, "_write", slow)
  first = threading.Thread(target=tier.put, args=(key(1), payload(1)))
  first.start()
  inside.wait()
  monkeypatch.setattr(DiskTier, "_write", write)
  assert not tier.put(key(2), payload(2))
  go.set()
  first.join()
  assert key(1) in tier and key(2) not in tier and tier.refused == 1
  # With the first one written there is something to evict.
  assert tier.put(key(2), payload(2)) and key(1) not in tier


def test_many_threads(tmp_path):
  with Store(
    host=50 * SIZE, disk=(tmp_path, 100 * (SIZE + HEADER_BYTES))
  ) as store:
    wrong = []

    def work(seed):
      rng = np.random.default_rng(seed)
      for n in rng.integers(0, 200, 200):
        store.request([key(n)])
        found = store.get(key(n))
        if found is None:
          store.put(key(n), payload(n))
        elif found != payload(n):
          wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    store.flush()
    assert not wrong and store.counters.errors == 0
    assert store.host.nbytes <= 50 * SIZE
    assert store.disk.nbytes <= 100 * (SIZE + HEADER_BYTES)
    assert store.disk.corrupt == 0

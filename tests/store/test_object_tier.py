"""Blocks in an object storage: what was put is found again, or is absent."""

from __future__ import annotations

import hashlib
import threading
import warnings

import numpy as np
import pytest

from ringjax import paths
from ringjax.errors import InputTypeError, OptionError, StorageError
from ringjax.store import LRU, ObjectTier, Store, object_tier
from ringjax.store.block_file import HEADER_BYTES
from tests import object_servers
from tests.helpers import refused

SIZE = 1000
BUDGET = 1 << 20


def key(n: int) -> bytes:
  return hashlib.sha256(b"%d" % n).digest()


def payload(n: int) -> bytes:
  return np.random.default_rng(n).bytes(SIZE)


@pytest.fixture
def root():
  with object_servers.served("memory") as bucket:
    yield f"{bucket}/pages"


def fill(store: Store, count: int) -> None:
  for n in range(count):
    store.put(key(n), payload(n))
  store.flush()


@pytest.mark.parametrize(
  "scheme",
  ["memory", *(pytest.param(x, marks=pytest.mark.slow) for x in ("s3", "gs"))],
)
def test_blocks_are_found_by_another_store(scheme, tmp_path):
  with object_servers.served(scheme) as bucket:
    root = f"{bucket}/a/pages"
    with Store(objects=(root, BUDGET)) as store:
      fill(store, 20)
      fill(store, 20)
      assert store.counters.objects_written == 20
      assert store.get(key(3)) == payload(3) and key(3) in store
      assert store.get(key(99)) is None and key(99) not in store
    folder = tmp_path / "blocks"
    tiers = dict(host=BUDGET, disk=(folder, BUDGET), objects=(root, BUDGET))
    with Store(**tiers) as store:
      # Several requests at a time, in order up to the first missing block.
      fetch = store.fetch([key(n) for n in (*range(19), 99, 19)])
      assert fetch.wait(240)
      assert fetch.found == {key(n): payload(n) for n in range(19)}
      counters = store.counters
      assert counters.object_hits in (19, 20) and not counters.disk_hits
      store.flush()
      assert counters.written == counters.object_hits
      assert not counters.objects_written
      assert store.get(key(0)) == payload(0) and counters.host_hits == 1
    with Store(disk=(folder, BUDGET)) as store:
      assert store.get(key(0)) == payload(0)
    with Store(objects=(root, BUDGET)) as store:
      store.remove([key(0), key(98)])
      assert key(0) not in store and store.get(key(0)) is None
    assert len(ObjectTier(root, BUDGET, LRU())) == 19


def test_the_budget_is_kept(root):
  block_bytes = SIZE + HEADER_BYTES
  with Store(objects=(root, 5 * block_bytes)) as store:
    for n in range(12):
      store.put(key(n), payload(n))
      store.flush()
      store.request([key(0)])
    tier = store.objects
    assert tier is not None and len(tier) == 5 and tier.evicted == 7
    assert tier.nbytes == 5 * block_bytes
    assert all(store.get(key(n)) == payload(n) for n in range(8, 12))
  again = ObjectTier(root, 3 * block_bytes, LRU())
  assert again.nbytes == 5 * block_bytes
  # Room is made for a block that comes.
  assert again.put(key(20), payload(20)) and again.nbytes == 3 * block_bytes
  assert len(paths.as_path(root).store.find(root)) == 3


def test_a_block_that_is_written_while_the_address_is_listed(root):
  block_bytes = SIZE + HEADER_BYTES
  tier = ObjectTier(root, 16 * block_bytes, LRU())
  writes = []

  def fault(number: int, name: str, address: str) -> None:
    if name == "find" and not writes:
      thread = threading.Thread(target=tier.put, args=(key(50), payload(50)))
      writes.append(thread)
      thread.start()
      thread.join(240)

  with object_servers.with_faults() as faulty:
    find = faulty.find

    def listed(*args, **options):
      blocks = find(*args, **options)
      fault(0, "find", "")
      return blocks

    faulty.__dict__["find"] = listed
    for n in range(3):
      assert tier.put(key(n), payload(n))
  assert writes and key(50) in tier
  assert tier.nbytes == 4 * block_bytes and len(tier) == 4


def test_a_damaged_block_is_removed(root):
  with Store(objects=(root, BUDGET)) as store:
    fill(store, 3)
    addresses = sorted(paths.as_path(root).store.find(root))
    place = paths.as_path(addresses[0])
    damaged = bytearray(place.read_bytes())
    damaged[-1] ^= 1
    place.write_bytes(bytes(damaged))
    with pytest.warns(RuntimeWarning, match="not what was written"):
      contents = [store.get(key(n)) for n in range(3)]
    assert contents.count(None) == 1
    assert store.objects is not None and store.objects.corrupt == 1
    assert len(store.objects) == 2 and not place.is_file()
    # What another program has put there is left alone.
    note = paths.as_path(f"{root}/00/note.txt")
    note.write_bytes(b"a note")
    assert len(ObjectTier(root, BUDGET, LRU())) == 2 and note.is_file()


def test_a_storage_that_does_not_answer_is_not_waited_for(root, monkeypatch):
  monkeypatch.setattr(object_tier, "FIRST_PAUSE_S", 1000.0)
  monkeypatch.setattr(object_tier, "MOST_PAUSE_S", 1000.0)
  requests = []

  def fault(number: int, name: str, address: str) -> None:
    requests.append(name)
    raise ConnectionResetError("reset by peer")

  with Store(host=BUDGET, objects=(root, BUDGET)) as store:
    fill(store, 3)
    assert store.host is not None and store.objects is not None
    store.host.remove(key(0))
    with object_servers.with_faults(fault):
      with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert store.get(key(0)) is None
      count = len(requests)
      assert count == 6
      # No more requests, and nothing is raised.
      assert key(0) not in store and store.get(key(0)) is None
      store.put(key(7), payload(7))
      store.flush()
      assert len(requests) == count
    assert store.objects.skipped == 1 and store.objects.read_errors == 1
    assert store.get(key(7)) == payload(7)
    store.objects._quiet_until = 0.0
    assert key(0) in store and store.get(key(0)) == payload(0)
    assert store.counters.errors == 0
  with (
    object_servers.with_faults(fault),
    pytest.raises(StorageError, match="reset by peer"),
  ):
    Store(objects=(root, BUDGET))


def test_requests_that_fail_together_are_one_failure(root, monkeypatch):
  """Each failure after a pause doubles the pause, until a request succeeds."""
  monkeypatch.setattr(object_tier, "MOST_PAUSE_S", 1e6)
  tier = ObjectTier(root, BUDGET, LRU())
  assert all(tier.put(key(n), payload(n)) for n in range(3))
  all_sent = threading.Barrier(4)
  deleted = []

  def fault(number: int, name: str, address: str) -> None:
    if name == "rm_file":
      deleted.append(address)
    elif not tier.write_errors and number < 4:
      all_sent.wait(240)
    raise ConnectionResetError("reset by peer")

  def fail(start: int, count: int) -> None:
    threads = [
      threading.Thread(target=tier.put, args=(key(n), payload(n)))
      for n in range(start, start + count)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(240)

  with object_servers.with_faults(fault):
    fail(10, 4)
    assert tier.write_errors == 4
    assert tier._pause_s == object_tier.FIRST_PAUSE_S
    # Nor is a request sent to remove a block.
    tier.remove(key(0))
    assert not deleted and len(tier) == 2
    tier._quiet_until = 0.0
    tier.remove(key(1))
    assert deleted and tier._paused and len(tier) == 1
    assert tier._pause_s == 2 * object_tier.FIRST_PAUSE_S
  tier._quiet_until = 0.0
  assert tier.put(key(20), payload(20))
  with object_servers.with_faults(fault):
    fail(30, 1)
    assert tier._pause_s == object_tier.FIRST_PAUSE_S
  # They were not deleted.
  assert len(ObjectTier(root, BUDGET, LRU())) == 4


def test_what_is_refused(unchecked, root):
  refused(OptionError, lambda: Store(objects=("blocks", 1)), "gs://", "disk=")
  refused(InputTypeError, lambda: Store(objects=root), "objects")
  refused(InputTypeError, lambda: Store(objects=(3, 1)), "objects")
  refused(OptionError, lambda: Store(objects=("xy://b/c", 1)), "s3://")
  refused(OptionError, lambda: Store(objects=(root, -1)), "objects")
  refused(
    OptionError,
    lambda: Store(host=1, objects=(root, 1), policy=("lru", "lru")),
    "2 policies",
  )
  policy = LRU()
  refused(
    OptionError,
    lambda: Store(host=1, objects=(root, 1), policy=policy),
    "several tiers",
  )
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    Store(host=1, objects=(root, 1), policy=("lru", "lru", "lfu")).close()

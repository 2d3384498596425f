"""Neurons on disk: files that are whole or refused, windows of recent sets."""

from __future__ import annotations

import collections
import os
import threading

import ml_dtypes
import numpy as np
import pytest

from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
)
from ringjax.store.flash.neuron_file import (
  NeuronFile,
  NeuronLayer,
  write_neuron_file,
)
from ringjax.store.flash.neuron_store import NeuronStore
from ringjax.store.flash.neuron_window import NeuronWindow
from tests.helpers import refused

F, D = 37, 5


def make(path, *, bundled=True, dtype=np.float32, gated=True, layers=2):
  """A file, and what is in it: by layer [F, P, D]."""
  parts = ("gate", "up", "down") if gated else ("up", "down")
  rng = np.random.default_rng(0)
  held = {
    n: rng.normal(size=(F, len(parts), D)).astype(dtype)
    for n in range(3, 3 + layers)
  }
  each = [NeuronLayer(number=n, neurons=F, embed=D, parts=parts) for n in held]
  write_neuron_file(
    path,
    each,
    lambda n: list(np.moveaxis(held[n], 1, 0)),
    dtype=np.dtype(dtype),
    model="abc",
    bundled=bundled,
  )
  return held


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("bundled", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_any_neurons_come_back_and_reads_are_runs(
  tmp_path, bundled, dtype, first
):
  held = make(tmp_path / "n.bin", bundled=bundled, dtype=dtype)
  file = NeuronFile(tmp_path / "n.bin", threads=3)
  assert (file.model, file.bundled, sorted(file.layers)) == (
    "abc",
    bundled,
    [3, 4],
  )
  rng = np.random.default_rng(1)
  for count in (0, 1, 9, F):
    ids = np.sort(rng.choice(F, count, replace=False))
    for number in held:
      out = np.zeros((count, 3 - first, D), dtype)
      reads, nbytes = file.reads, file.bytes_read
      file.read(number, ids, out, first=first)
      np.testing.assert_array_equal(out, held[number][ids, first:])
      assert file.bytes_read - nbytes == out.nbytes
      runs = int((np.diff(ids) != 1).sum() + 1) if count else 0
      if not bundled:
        # A part's last neuron is followed by the next part's first one.
        joined = (3 - first - 1) * int(count == F)
        assert file.reads - reads == (3 - first) * runs - joined
      elif first == 0:
        assert file.reads - reads == runs
      else:
        assert file.reads - reads == count
  file.close()


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
  path = tmp_path / "n.bin"
  held = make(path)
  before = path.read_bytes()
  layer = NeuronLayer(number=0, neurons=F, embed=D, parts=("up", "down"))

  def ended(number):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    write_neuron_file(path, [layer], ended, dtype=np.dtype(np.float32))
  bad = [np.full((F, D), np.nan, np.float32)] * 2
  refused(
    CheckpointMismatchError,
    lambda: write_neuron_file(
      path, [layer], lambda _: bad, dtype=np.dtype(np.float32)
    ),
    "layer 0",
    "finite",
  )
  assert path.read_bytes() == before
  assert [x.name for x in tmp_path.iterdir()] == ["n.bin"]
  refused(
    CheckpointWriteError,
    lambda: write_neuron_file(
      tmp_path / "no" / "n.bin", [layer], ended, dtype=np.dtype(np.float32)
    ),
    "folder",
  )
  out = np.zeros((1, 3, D), np.float32)
  NeuronFile(path).read(3, np.array([7]), out)
  np.testing.assert_array_equal(out[0], held[3][7])


def test_what_was_cut_or_altered_is_refused(tmp_path):
  path = tmp_path / "n.bin"
  make(path)
  whole = path.read_bytes()
  opened = lambda data: (path.write_bytes(data), NeuronFile(path))[1]
  for n in (0, 11, len(whole) // 2, len(whole) - 1):
    refused(CheckpointFormatError, lambda n=n: opened(whole[:n]), "n.bin")
  for n in (3, 9, 14, 40, 400):
    altered = bytearray(whole)
    altered[n] ^= 4
    refused(CheckpointFormatError, lambda a=altered: opened(a), "n.bin")
  altered = bytearray(whole)
  altered[-3] ^= 1
  file = opened(altered)
  out = np.zeros((2, 3, D), np.float32)
  file.read(4, np.array([0, 1]), out)
  refused(
    CheckpointFormatError,
    lambda: file.read(4, np.array([2, F - 1]), out),
    "down of neuron 36 in layer 4",
  )
  file = opened(whole)
  os.truncate(path, len(whole) - 1)
  refused(
    CheckpointFormatError,
    lambda: file.read(3, np.array([0, 1]), out),
    "changed",
  )
  refused(CheckpointFormatError, lambda: NeuronFile(tmp_path / "none"), "none")


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("rows", [F, 12])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_is_the_union_of_the_last_sets(window, rows, seed):
  rng = np.random.default_rng(seed)
  value = rng.normal(size=(F, 2, D)).astype(np.float32)
  made = NeuronWindow(F, rows, (2, D), np.dtype(np.float32), window=window)
  fails, read = [False], []

  def reading(ids, out):
    if fails[0]:
      out[: len(ids) // 2] = np.inf
      raise OSError("lost")
    assert (np.diff(ids) > 0).all()
    read.append(ids)
    out[...] = value[ids]

  sets = collections.deque()
  for step in range(120):
    # Runs of similar sets, as texts have, and some that have nothing.
    count = int(rng.integers(0, min(rows, 12) + 1))
    ids = np.sort(rng.choice(F, count, replace=False)).astype(np.int32)
    if step % 3 and sets:
      ids = np.union1d(ids[: len(ids) // 4], sets[-1][::2]).astype(np.int32)
    assert made.fits(ids)
    fails[0] = bool(rng.random() < 0.1)
    before = set(made.pointer[: made.num_used].tolist())
    fresh = sorted(set(ids.tolist()) - before)
    if fails[0] and fresh:
      with pytest.raises(OSError, match="lost"):
        made.step(ids, reading)
      # What went stays gone: the last sets without the one that failed.
      while len(sets) >= window or len(union(sets) | set(ids)) > rows:
        sets.popleft()
    else:
      done = made.step(ids, reading)
      sets.append(ids)
      forgotten = 0
      while len(sets) > window or len(union(sets)) > rows:
        forgotten += len(sets) <= window
        sets.popleft()
      assert done.fresh == len(fresh) and done.needed == len(ids)
      assert done.forgotten == forgotten
      assert not fresh or read[-1].tolist() == fresh
      assert done.deleted == len(before | set(fresh)) - made.num_used
    held = made.pointer[: made.num_used]
    assert len(set(held.tolist())) == made.num_used
    assert set(held.tolist()) == union(sets)
    np.testing.assert_array_equal(made.rows[: made.num_used], value[held])
    assert (made.pointer[made.num_used :] == F).all()
    everything = np.arange(F)
    where = made.rows_of(everything)
    there = where >= 0
    assert there.sum() == made.num_used
    np.testing.assert_array_equal(made.pointer[where[there]], everything[there])
  assert np.isfinite(made.rows[: made.num_used]).all()


def union(sets):
  return {int(n) for ids in sets for n in ids}


def test_calls_that_cross_get_what_they_asked_for(tmp_path):
  """Another call moves the window between a call's two looks at it."""
  held = make(tmp_path / "n.bin")
  store = NeuronStore(NeuronFile(tmp_path / "n.bin"), {3: 16, 4: 16}, window=1)
  wrong = []

  def ask(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
      needed = rng.random(F) < rng.choice([0.1, 0.4, 0.6])
      number = int(rng.integers(3, 5))
      branch, ticket = store.prepare(number, needed)
      sizes = store.sizes(number)
      if branch == len(sizes):
        if needed.sum() <= 16:
          wrong.append("a whole layer for few")
        continue
      rows, ids = store.fetch(number, sizes[branch], ticket, needed)
      if not set(np.flatnonzero(needed)) <= set(ids.tolist()):
        wrong.append("a neuron is missing")
      there = ids < F
      if not (rows[there] == held[number][ids[there]]).all():
        wrong.append("another neuron's numbers")

  threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong
  found = store.report()
  assert found.calls > 100 and found.whole_calls == 0
  assert store.sizes(3) == (8, 16)
  blocks = np.concatenate([store.block(3, 0)])
  np.testing.assert_array_equal(blocks, held[3])
  assert store.report().whole_bytes == held[3].nbytes

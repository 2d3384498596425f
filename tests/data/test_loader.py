"""The loader: a batch is its seed and step, and nothing else."""

from __future__ import annotations

import gc
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.data.batches import corpus
from ringjax.data.batches.corpus import Corpus
from ringjax.data.batches.loader import Loader
from ringjax.data.batches.packing import BestFit, Cut, Documents
from ringjax.errors import DataError, OptionError

pytestmark = pytest.mark.smoke

LENGTH = 16
PACKERS = [Cut(), BestFit(), BestFit(buffer=7)]


def documents(count=40, first=1, seed=0):
  """No two tokens are the same."""
  lengths = np.random.default_rng(seed).integers(1, 40, count)
  edges = first + np.cumsum([0, *lengths])
  return Documents([np.arange(*edges[i : i + 2]) for i in range(count)])


class Numbers:
  """Examples of one number, as often as it says."""

  def __init__(self, number=10**6, most=9):
    self.number, self.most = number, most

  def example(self, rng):
    size = int(rng.integers(1, self.most + 1))
    return np.full(size, self.number + size), np.arange(size, dtype=np.float32)


def loader(sources=None, **more):
  options = dict(length=LENGTH, batch=6, seed=3, packer=Cut()) | more
  return Loader(documents() if sources is None else sources, **options)


def mixture():
  return [documents(), documents(90, 5000, 1), Numbers()]


def same(a, b):
  for x, y in zip(a, b, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def threads():
  return [t for t in threading.enumerate() if t.name.startswith("ringjax-data")]


# ---------------------------------------------------------------------------
# A pure function
# ---------------------------------------------------------------------------


@given(
  order=st.lists(st.integers(0, 60), min_size=1, max_size=6),
  packer=st.sampled_from(PACKERS),
)
@settings(max_examples=10)
def test_a_step_is_the_same_whatever_came_before(order, packer):
  asked = loader(mixture(), packer=packer)
  for step in order:
    same(asked.at(step), loader(mixture(), packer=packer).at(step))


class Prompts:
  """Two documents, a link token behind each and a question."""

  def example(self, rng):
    first = rng.integers(1, 9, rng.integers(1, 4))
    ids = [*first, 80, 5, 6, 81, 7]
    segments = [3] * len(first) + [1, 4, 4, 1, 1]
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = 2
    return np.array(ids), weights, np.array(segments)


def test_separate_documents_have_a_row_each_and_their_own_segments():
  batch = loader([Prompts()], separate=True).at(0)
  for row in range(6):
    segments = batch.segments[row]
    size = int((segments > 0).sum())
    assert segments[:size].tolist()[-5:] == [1, 4, 4, 1, 1]
    assert set(segments[: size - 5]) == {3} and not segments[size:].any()
    np.testing.assert_array_equal(batch.positions[row, :size], np.arange(size))
    tokens, labels = batch.tokens[row], batch.labels[row]
    np.testing.assert_array_equal(labels[: size - 1], tokens[1:size])
    assert batch.weights[row].nonzero()[0].tolist() == [size - 2]


def test_other_rows_beside_them_count_documents_from_three():
  sources = [documents(), Numbers()]
  one, two = loader(sources), loader(sources, separate=True)
  for step in range(3):
    a, b = one.at(step), two.at(step)
    same(a[:4], b[:4])
    np.testing.assert_array_equal(
      b.segments, np.where(a.segments, a.segments + 2, 0)
    )


def test_elsewhere_an_example_is_one_document():
  batch = loader([Prompts()]).at(0)
  size = (batch.tokens[0] == 7).argmax() + 1
  assert (batch.segments[0, :size] == 1).all()
  state = loader([Prompts()]).state()
  with pytest.raises(DataError, match="separate"):
    loader([Prompts()], separate=True).restore(state)


@pytest.mark.parametrize("segments", [[1, 2], [0, 1, 1]])
def test_segments_that_are_none(segments):
  class Wrong:
    def example(self, rng):
      return np.arange(3), None, np.array(segments)

  with pytest.raises(DataError, match=r"Wrong\.example, segments"):
    loader([Wrong()], separate=True).at(0)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_iterating_gives_the_steps(prefetch):
  with loader(mixture(), prefetch=prefetch) as given:
    for step in range(20):
      assert given.step == step
      same(next(given), loader(mixture()).at(step))


@pytest.mark.parametrize("packer", PACKERS, ids=str)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 23])
def test_a_restored_loader_goes_on_bit_for_bit(packer, prefetch, stop):
  make = lambda: loader(mixture(), packer=packer, prefetch=prefetch)
  with make() as first, make() as second, make() as third:
    for _ in range(stop):
      next(first)
    state = json.loads(json.dumps(first.state()))
    next(third)
    for other in (second, third):
      other.restore(state)
      assert other.step == stop
    for _ in range(9):
      want = next(first)
      same(want, next(second))
      same(want, next(third))


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
def test_hosts_have_the_parts_of_one_batch(hosts):
  whole = loader(mixture())
  parts = [loader(mixture(), host=h, hosts=hosts) for h in range(hosts)]
  for step in (0, 1, 50):
    made = [part.at(step) for part in parts]
    assert {m.tokens.shape for m in made} == {(6 // hosts, LENGTH)}
    same(whole.at(step), map(np.concatenate, zip(*made, strict=True)))
  # Another number of hosts goes on where one was.
  parts[-1].restore(whole.state() | {"step": 4})
  same(
    [x[6 - 6 // hosts :] for x in whole.at(4)],
    next(parts[-1]),
  )
  parts[-1].close()


def test_seeds_differ():
  batches = [loader(mixture(), seed=s).at(0).tokens for s in range(4)]
  assert len({b.tobytes() for b in batches}) == 4


# ---------------------------------------------------------------------------
# Epochs
# ---------------------------------------------------------------------------


def row(given, index):
  return [x[0] for x in given.at(index)]


@pytest.mark.parametrize("packer", PACKERS, ids=str)
def test_an_epoch_has_every_document_once(packer):
  source = documents()
  given = loader(source, packer=packer, batch=1)
  total = int(source.lengths.sum())
  at, seen = 0, []
  for epoch in range(4):
    count = given.rows(epoch=epoch)
    rows = [row(given, i) for i in range(at, at + count)]
    tokens = np.concatenate([r[0][r[4] > 0] for r in rows])
    assert sorted(tokens.tolist()) == list(range(1, total + 1))
    seen.append(tokens)
    at += count
  assert len({t.tobytes() for t in seen}) == 4


def test_documents_are_shuffled_before_packing_and_rows_after():
  source = Documents([[i] for i in range(1, 65)])
  given = loader(source, packer=Cut(), batch=1, length=8)
  plans, firsts = [], []
  for epoch in range(3):
    rows = [row(given, epoch * 8 + i)[0] for i in range(8)]
    plans.append({frozenset(r.tolist()) for r in rows})
    firsts.append(rows[0][0])
  # Neighbours are others each time, and none are those of the source.
  assert not plans[0] & plans[1] and not plans[1] & plans[2]
  assert not any(set(range(1, 9)) in plan for plan in plans)


def test_rows_are_shuffled_anew_each_epoch():
  # No two fit into a row, and packing places the longest first.
  source = Documents([[i] * i for i in range(9, 17)])
  given = loader(source, packer=BestFit(), batch=8)
  orders = [given.at(epoch).tokens[:, 0].tolist() for epoch in range(4)]
  assert all(sorted(order) == list(range(9, 17)) for order in orders)
  falling = list(range(16, 8, -1))
  assert len({tuple(order) for order in [*orders, falling]}) == 5


def test_no_more_than_two_epochs_are_kept():
  given = loader()
  for step in (0, 50, 3, 80):
    given.at(step)
  kept = given._batches.streams[0]._packed.cache_info()
  assert kept.maxsize == 2 >= kept.currsize


def test_a_corpus_and_its_documents_in_memory_are_the_same(tmp_path):
  rows = [np.arange(i + 1) for i in range(20)]
  corpus.write(tmp_path / "c", rows, vocab=30, tokenizer_fingerprint="")
  given = [loader(Corpus.open(tmp_path / "c")), loader(Documents(rows))]
  for step in range(5):
    same(*(g.at(step) for g in given))


def test_weights_of_documents_come_along():
  source = Documents([[1, 2, 3]], [[0.0, 0.5, 0.25]])
  batch = loader(source, length=3, batch=1).at(0)
  assert batch.weights.tolist() == [[0.5, 0.25, 0.0]]


# ---------------------------------------------------------------------------
# Mixtures
# ---------------------------------------------------------------------------


def owners(given, steps):
  """The source of each row; documents begin at 1, 5000 and 10^6."""
  firsts = np.concatenate([given.at(s).tokens[:, 0] for s in range(steps)])
  return np.searchsorted([5000, 10**6], firsts, side="right")


@pytest.mark.parametrize("weights", [(1, 2, 5), (0.5, 0.499, 0.001), None])
def test_proportions(weights):
  given = loader(
    mixture(),
    weights=None if weights is None else list(map(float, weights)),
    batch=64,
  )
  want = np.array(weights or (1, 1, 1), float)
  share = np.bincount(owners(given, 32), minlength=3) / 2048
  np.testing.assert_allclose(share, want / want.sum(), atol=1 / 1024)
  # Also early on, and in a random order.
  early = owners(given, 4)
  np.testing.assert_allclose(
    np.bincount(early, minlength=3) / 256, want / want.sum(), atol=0.1
  )
  assert (np.diff(early) != 0).sum() > 50


def test_a_small_weight_is_never_none():
  given = loader(mixture(), weights=[1.0, 1e-9, 1.0], batch=1024)
  assert np.bincount(owners(given, 1)).tolist() == [512, 1, 511]


def test_many_small_weights_are_never_none():
  given = loader(
    [documents()] * 5, weights=[1.0, 1e-9, 1e-9, 1e-9, 1.0], batch=1024
  )
  shares = given.state()["setup"]["shares"]
  assert sorted(shares) == [1, 1, 1, 510, 511] and shares[1:4] == [1] * 3


def test_blocks_are_in_orders_of_their_own():
  given = loader(mixture(), batch=1024)
  first, second = owners(given, 2).reshape(2, -1)
  assert np.bincount(first).tolist() == np.bincount(second).tolist()
  assert (first != second).mean() > 0.5


@pytest.mark.parametrize(
  ("one", "other", "offset"),
  [
    (documents(), documents(first=2001), 2000),
    (Numbers(10**6), Numbers(2 * 10**6), 10**6),
  ],
)
def test_a_source_that_comes_twice_comes_in_two_orders(one, other, offset):
  given = loader([one, other], batch=64)
  tokens = np.concatenate([given.at(s).tokens for s in range(16)])
  low, high = np.array_split(np.argsort(tokens[:, 0]), 2)
  low, high = (tokens[np.sort(half)] for half in (low, high))
  assert low.max() <= high[:, 0].min()
  high = np.where(high > 0, high - offset, 0)
  assert (low == high).all(axis=1).mean() < 0.1
  # Nor are they the same rows in another order.
  rows = [{row.tobytes() for row in half} for half in (low, high)]
  assert len(rows[0] & rows[1]) < 0.5 * len(rows[0])


def test_each_source_of_a_mixture_goes_on_by_itself():
  given = loader(mixture(), batch=64, weights=[1.0, 1.0, 2.0])
  parts = [given.at(s) for s in range(16)]
  tokens, segments = (
    np.concatenate([getattr(p, name) for p in parts])
    for name in ("tokens", "segments")
  )
  mine = tokens[:, 0] < 5000
  alone = documents()
  count = given.rows()
  assert mine.sum() == 256 > 4 * count
  for epoch in range(4):
    rows = slice(epoch * count, (epoch + 1) * count)
    real = tokens[mine][rows][segments[mine][rows] > 0]
    assert sorted(real) == list(range(1, int(alone.lengths.sum()) + 1))


def test_examples_stay_whole():
  given = loader(Numbers(), batch=50)
  batch = given.at(3)
  assert given.rows() is None
  for tokens, labels, weights, segments in zip(
    batch.tokens, batch.labels, batch.weights, batch.segments, strict=True
  ):
    assert segments[0] == 1
    for number in range(1, segments.max() + 1):
      at = segments == number
      size = int(at.sum())
      assert set(tokens[at]) == {10**6 + size}
      assert labels[at].tolist() == [10**6 + size] * (size - 1) + [0]
      assert weights[at].tolist() == [*range(1, size), 0]
  used = (batch.segments > 0).sum(1)
  # What is left has not room for what came next, and rows are not the same.
  assert used.min() > LENGTH - 9
  assert len({t.tobytes() for t in batch.tokens}) > 45


# ---------------------------------------------------------------------------
# The thread
# ---------------------------------------------------------------------------


class Breaks(Documents):
  def __init__(self):
    super().__init__([[1]] * 60)
    self.broken, self.reads = True, 0

  def read(self, document, start, stop):
    self.reads += 1
    if self.broken and self.reads > 12:
      raise OSError("the disk is gone")
    return super().read(document, start, stop)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_the_thread_raises_is_raised_where_the_batch_is_taken(prefetch):
  source = Breaks()
  # Rows of one document; step 2 reads the 13th.
  given = loader(source, length=1, prefetch=prefetch)
  for _ in range(2):
    next(given)
  for _ in range(2):
    with pytest.raises(OSError, match="the disk is gone"):
      next(given)
  assert given.step == 2 and not threads()
  source.broken = False
  same(next(given), loader(Documents([[1]] * 60), length=1).at(2))
  given.close()


def test_closing_and_dropping_end_the_thread():
  given = loader(prefetch=2)
  next(given)
  assert len(threads()) == 1
  given.close()
  given.close()
  assert not threads()
  next(given)
  assert given.step == 2 and len(threads()) == 1
  del given
  gc.collect()
  assert not threads()


def test_no_more_is_prepared_than_asked_for():
  class Counts(Documents):
    reads = 0

    def read(self, document, start, stop):
      self.reads += 1
      return super().read(document, start, stop)

  source = Counts([[1]] * 10)
  with loader(source, length=1, batch=1, prefetch=3) as given:
    next(given)
    deadline = time.monotonic() + 10
    while source.reads < 4 and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(0.05)
    assert source.reads == 4


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("sources", "change", "words"),
  [
    (documents(39), {}, r"got sources \['"),
    (None, {"packer": BestFit()}, r"got packer Cut\(\); wanted packer BestF"),
    (None, {"length": 17}, "got length 16; wanted length 17"),
    (None, {"batch": 12}, "got batch 6; wanted batch 12"),
    (None, {"seed": 4}, "got seed 3, draws .*; wanted seed 4, draws"),
    ([documents(), Numbers()], {}, r"got sources .*shares \[1\]"),
  ],
)
def test_a_state_of_other_batches_is_refused(sources, change, words):
  state = loader().state()
  other = loader(sources, **change)
  with pytest.raises(DataError, match=words) as caught:
    other.restore(state)
  assert len(str(caught.value)) < 400 and "as it was" in str(caught.value)
  assert other.step == 0


def test_examples_of_another_kind_are_refused():
  state = loader(Numbers()).state()
  loader(Numbers()).restore(state)
  with pytest.raises(DataError, match="got sources"):
    loader(Numbers(most=8)).restore(state)


def test_a_state_with_names_of_classes_is_restored():
  """As states were before classes were renamed."""
  given = loader([documents(), Numbers()])
  state = given.state()
  state["setup"]["sources"][1] = f"Was {state['setup']['sources'][1]}"
  given.restore(state | {"step": 3})
  assert given.step == 3


@pytest.mark.parametrize(
  "change",
  [
    {"version": 2},
    {"format": "x"},
    {"step": -1},
    {"step": 1.0},
    {"step": True},
    {"setup": None},
  ],
)
def test_what_is_no_state_is_refused(change, unchecked):
  given = loader()
  with pytest.raises(DataError, match="wanted what state"):
    given.restore(given.state() | change)
  with pytest.raises(DataError, match="wanted what state"):
    given.restore([])


@pytest.mark.parametrize(
  ("sources", "change", "error", "words"),
  [
    (None, {"length": 0}, OptionError, "length: got 0"),
    (None, {"batch": 0}, OptionError, "batch: got 0"),
    (None, {"seed": -1}, OptionError, "seed: got -1"),
    (None, {"hosts": 4}, OptionError, "host 0 of 4, for 6 rows"),
    (None, {"hosts": 2, "host": 2}, OptionError, "host 2 of 2"),
    (None, {"prefetch": -1}, OptionError, "prefetch: got -1"),
    (None, {"weights": [0]}, OptionError, "weights: got"),
    (None, {"weights": [1, 1]}, OptionError, "for 1 sources"),
    (None, {"weights": [float("nan")]}, OptionError, "nan"),
    ([], {}, OptionError, "for 0 sources"),
    ([3], {}, OptionError, r"sources\[0\]: got int"),
    (Documents([[]]), {}, DataError, "documents without a token"),
    (Numbers(most=500), {}, DataError, "Numbers.example: got .*wanted 1 to 16"),
  ],
)
def test_errors(sources, change, error, words, unchecked):
  with pytest.raises(error, match=words):
    loader(sources, **change)
  with pytest.raises(OptionError, match="step: got -1"):
    loader().at(-1)

"""Packing: every token once, no label out of its document, little padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.data.batches import packing
from ringjax.data.batches.packing import BestFit, Cut, DocumentPiece, Documents
from ringjax.errors import DataError, OptionError

pytestmark = pytest.mark.smoke

PACKERS = [Cut(), BestFit(), BestFit(buffer=3)]
LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def documents(lengths, **more):
  """No two tokens of all documents are the same, and none is 0."""
  edges = np.cumsum([1, *lengths])
  rows = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
  return Documents(rows, **more)


def filled(packer, lengths, length, **more):
  plan = packer.plan(lengths, length)
  return plan, packing.fill(plan, length, documents(lengths, **more).read)


@pytest.mark.one_case
@pytest.mark.parametrize("packer", PACKERS, ids=str)
@given(lengths=LENGTHS, length=st.integers(1, 17))
def test_every_token_stands_in_one_row_once(packer, lengths, length):
  plan, batch = filled(packer, lengths, length)
  total = sum(lengths)
  assert batch.tokens.shape == (len(plan), length)
  real = batch.tokens[batch.segments > 0]
  assert sorted(real.tolist()) == list(range(1, total + 1))
  assert not batch.tokens[batch.segments == 0].any()
  assert plan.tokens == total


@pytest.mark.parametrize("packer", PACKERS, ids=str)
@given(lengths=LENGTHS, length=st.integers(1, 17))
def test_labels_follow_in_the_same_document(packer, lengths, length):
  _, batch = filled(packer, lengths, length)
  last = set(np.cumsum(lengths).tolist())
  inner = ~np.isin(batch.tokens, list(last)) & (batch.segments > 0)
  # Ids count up, so that the next token's id is one more.
  np.testing.assert_array_equal(
    batch.labels, np.where(inner, batch.tokens + 1, 0)
  )
  np.testing.assert_array_equal(batch.weights, inner.astype(np.float32))


@pytest.mark.parametrize("packer", PACKERS, ids=str)
@given(lengths=LENGTHS, length=st.integers(1, 17))
def test_segments_and_positions(packer, lengths, length):
  plan, batch = filled(packer, lengths, length)
  owner = np.repeat(np.arange(len(lengths)), lengths)
  for pieces, tokens, positions, segments in zip(
    plan, batch.tokens, batch.positions, batch.segments, strict=True
  ):
    used = int((segments > 0).sum())
    assert used > 0 and not segments[used:].any()
    assert not positions[used:].any()
    assert np.diff(segments[:used], prepend=0).min() >= 0
    assert set(segments[:used]) == set(range(1, len(pieces) + 1))
    for number, piece in enumerate(pieces, 1):
      at = np.flatnonzero(segments == number)
      assert positions[at].tolist() == list(range(piece.stop - piece.start))
      assert set(owner[tokens[at] - 1]) == {piece.document}


@given(lengths=LENGTHS, length=st.integers(1, 17))
def test_cut_pads_nothing_but_the_last_row(lengths, length):
  plan, batch = filled(Cut(), lengths, length)
  assert len(plan) == -(-sum(lengths) // length)
  assert (batch.segments[:-1] > 0).all()
  # In the order of documents.
  flat = batch.tokens.ravel()
  assert flat[flat > 0].tolist() == list(range(1, sum(lengths) + 1))


@pytest.mark.parametrize("packer", PACKERS[1:], ids=str)
@given(lengths=LENGTHS, length=st.integers(1, 17))
def test_best_fit_cuts_only_what_is_longer_than_a_row(packer, lengths, length):
  pieces = [p for row in packer.plan(lengths, length) for p in row]
  for document, size in enumerate(lengths):
    mine = sorted(p for p in pieces if p.document == document)
    assert len(mine) == -(-size // length)
    assert all(p.stop - p.start == length for p in mine[:-1])


@given(lengths=LENGTHS, length=st.integers(1, 17))
def test_best_fit_leaves_no_two_rows_that_are_one(lengths, length):
  plan = BestFit().plan(lengths, length)
  used = sorted(sum(p.stop - p.start for p in row) for row in plan)
  if len(used) > 1:
    assert used[0] + used[1] > length


def next_fit(lengths, length):
  """Rows, if a document that does not fit into the last one opens another."""
  rows, room = 0, 0
  for size in lengths:
    rows += size // length
    rest = size % length
    if rest and rest > room:
      rows, room = rows + 1, length
    room -= rest
  return rows


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_wastes_less_than_next_fit(seed):
  rng = np.random.default_rng(seed)
  lengths = rng.lognormal(5, 1.2, 5000).astype(np.int64) + 1
  length = 1024
  waste = [BestFit(buffer=b).plan(lengths, length).waste for b in (50, 5000)]
  simple = 1 - lengths.sum() / (next_fit(lengths.tolist(), length) * length)
  assert waste[1] < 0.002 < waste[0] < 0.1 * simple + 0.05 < simple


def test_best_fit_takes_the_fullest_row_that_has_room():
  # 7 and 6 leave rooms of 3 and 4; the 3 fits both.
  plan = BestFit().plan([6, 7, 3], 10)
  assert [[p.document for p in row] for row in plan] == [[1, 2], [0]]


def test_a_window_is_placed_on_its_own():
  lengths = [9, 5, 1, 5, 9, 1]
  apart = BestFit(buffer=2).plan(lengths, 10)
  assert [[p.document for p in row] for row in apart] == [
    [0],
    [1],
    [3, 2],
    [4, 5],
  ]
  assert len(BestFit(buffer=6).plan(lengths, 10)) == 3


def test_rows_are_read_at_random():
  lengths = [5, 0, 12, 3]
  plan, batch = filled(Cut(), lengths, 4)
  read = documents(lengths).read
  for i in reversed(range(len(plan))):
    for whole, one in zip(batch, packing.fill([plan[i]], 4, read), strict=True):
      np.testing.assert_array_equal(whole[i], one[0])
  assert plan[-1] == plan[len(plan) - 1] and plan[1:3] == [plan[1], plan[2]]
  with pytest.raises(IndexError):
    plan[len(plan)]


def test_dtypes():
  _, batch = filled(BestFit(), [3, 9], 8)
  assert batch.weights.dtype == np.float32
  for name in ("tokens", "labels", "positions", "segments"):
    assert getattr(batch, name).dtype == np.int32


def test_weights_are_those_of_the_label():
  weights = [[9.0, 1.0, 0.0, 0.5], [9.0, 0.25]]
  _, batch = filled(Cut(), [4, 2], 3, weights=weights)
  # Document 1, 2, 3 | 4 with 5, 6; no label is a document's first token.
  assert batch.tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
  assert batch.labels.tolist() == [[2, 3, 4], [0, 6, 0]]
  assert batch.weights.tolist() == [[1.0, 0.0, 0.5], [0.0, 0.25, 0.0]]


def test_plan_of_nothing():
  for packer in PACKERS:
    plan = packer.plan([0, 0], 4)
    assert len(plan) == 0 and plan.waste == 1.0
    assert packing.fill(plan, 4, documents([]).read).tokens.shape == (0, 4)


def test_fingerprint_tells_documents_apart():
  texts = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]]]
  prints = {Documents(t).fingerprint for t in texts}
  prints.add(Documents(texts[0], [[1, 1], [0]]).fingerprint)
  assert len(prints) == 4
  assert Documents(texts[0]).fingerprint in prints


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    (lambda: Cut().plan([3], 0), OptionError, "length: got 0"),
    (lambda: Cut().plan([3, -1], 4), OptionError, "lengths: .*from -1"),
    (lambda: BestFit().plan([0.5], 4), OptionError, "lengths: got float64"),
    (lambda: BestFit(buffer=0), OptionError, "buffer: got 0"),
    (lambda: Documents([[0.5]]), DataError, r"tokens\[0\]: got float64"),
    (lambda: Documents([[1], [-1]]), DataError, r"tokens\[1\]: got ids from"),
    (lambda: Documents([[1, 2]], [[1.0]]), DataError, "weights: got 1 rows"),
    (
      lambda: packing.fill([[DocumentPiece(0, 0, 5)]], 5, documents([3]).read),
      DataError,
      "read: got 3 tokens of document 0",
    ),
    (
      lambda: packing.fill([[DocumentPiece(0, 0, 5)]], 4, documents([9]).read),
      DataError,
      "rows: got row 0 of 5 tokens; wanted at most 4",
    ),
  ],
)
def test_errors(call, error, words, unchecked):
  with pytest.raises(error, match=words):
    call()

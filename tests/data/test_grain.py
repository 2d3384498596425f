"""Records of other libraries as documents, and a loader as Grain's dataset."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import DataError, OptionError

TEXTS = ["one", "two words", "", "a longer text than these", "e", "six"]


def encode(text: str) -> np.ndarray:
  return Bytes().encode(text)


def loader(source, **options) -> rj.data.Loader:
  options = dict(length=8, batch=2, seed=3) | options
  return rj.data.Loader(source, **options)


def same(batch, expected) -> None:
  for x, y in zip(batch, expected, strict=True):
    np.testing.assert_array_equal(x, y)


def test_records_are_documents():
  records = rj.data.RecordDocuments(TEXTS, encode)
  documents = rj.data.Documents([encode(text) for text in TEXTS])
  np.testing.assert_array_equal(records.lengths, documents.lengths)
  assert len(records) == 6
  for step in range(9):
    same(loader(records).at(step), loader(documents).at(step))
  assert (
    records.fingerprint
    != rj.data.RecordDocuments(TEXTS[::-1], encode).fingerprint
  )
  ids = rj.data.RecordDocuments([[1, 2, 3], np.array([4], np.int64)])
  assert ids.lengths.tolist() == [3, 1]
  with pytest.raises(DataError, match=r"source\[1\]"):
    rj.data.RecordDocuments([[1], [-2]])
  changing = [*TEXTS]
  records = rj.data.RecordDocuments(changing, encode)
  changing[1] = "three"
  with pytest.raises(DataError, match=r"source\[1\].*leave the source alone"):
    records.read(1, 0, 2)


def test_a_loader_is_a_dataset_of_grain():
  grain = pytest.importorskip("grain")
  source = grain.MapDataset.source(TEXTS).map(encode)
  make = lambda **options: loader(rj.data.RecordDocuments(source), **options)
  dataset = rj.data.grain_dataset(make)
  batches = iter(dataset)
  for step in range(3):
    same(next(batches), make().at(step))
  state = json.loads(json.dumps(batches.get_state()))
  expected = [next(batches) for _ in range(4)]
  again = iter(dataset)
  again.set_state(state)
  for batch in expected:
    same(next(again), batch)
  # Transformations of Grain keep the state.
  tokens = iter(dataset.map(lambda batch: batch.tokens))
  first = [next(tokens) for _ in range(2)]
  state = tokens.get_state()
  third = next(tokens)
  tokens.set_state(state)
  np.testing.assert_array_equal(next(tokens), third)
  np.testing.assert_array_equal(first[1], make().at(1).tokens)
  # The rows of a host, at the same position.
  half = iter(rj.data.grain_dataset(lambda: make(host=1, hosts=2)))
  half.set_state(state)
  np.testing.assert_array_equal(next(half).tokens, third[1:])
  with pytest.raises(DataError, match="seed"):
    iter(rj.data.grain_dataset(lambda: make(seed=4))).set_state(state)
  for iterator in (batches, again, half):
    iterator.close()


def test_grain_that_is_not_installed_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "grain", None)
  with pytest.raises(OptionError, match="ringjax\\[grain\\]"):
    rj.data.grain_dataset(lambda: loader(TEXTS))

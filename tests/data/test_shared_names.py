"""Names that two documents of a prompt share."""

from __future__ import annotations

import numpy as np
import pytest

from ringjax.data import Bytes, LinkTokens, Loader, SharedNames
from ringjax.errors import DataError, OptionError
from tests.helpers import refused

LINKS = LinkTokens(262, 2, 3)


def parts(seed=0, **options):
  """The texts of an example's documents, its answer, and what it returns."""
  made = SharedNames(tokenizer=Bytes(), **options)
  ids, weights, segments = made.example(np.random.default_rng(seed))
  # The ids that begin a document and end the answer are no bytes.
  text = lambda at: bytes(ids[at][ids[at] < 256].tolist()).decode()
  count = options.get("documents", 2)
  documents = [text(segments == 3 + n) for n in range(count)]
  answer = text(np.flatnonzero(weights))
  return documents, answer, (ids, weights, segments)


@pytest.mark.parametrize("documents", [2, 3])
def test_the_answer_is_in_two_documents(documents):
  places = set()
  for seed in range(80):
    texts, answer, (ids, weights, _) = parts(seed, documents=documents)
    lists = [x.removeprefix("# ").removesuffix(".\n").split() for x in texts]
    assert all(len(set(names)) == 5 for names in lists)
    everyone = [name for names in lists for name in names]
    assert len(set(everyone)) == len(everyone) - 1
    assert everyone.count(answer) == 2
    places |= {(n, x.index(answer)) for n, x in enumerate(lists) if answer in x}
    assert weights[weights > 0].tolist() == [1] * 3
    assert (np.flatnonzero(weights) >= len(ids) - 3).all() and ids[-1] == 257
  # Anywhere.
  assert len(places) == 5 * documents


def test_links_stand_behind_each_document():
  _, _, (ids, _, segments) = parts(documents=3, links=LINKS)
  found = ids[ids >= 262]
  np.testing.assert_array_equal(found, 262 + np.arange(6))
  assert (segments[ids >= 262] == 1).all()
  for n in range(3):
    end = int(np.flatnonzero(segments == 3 + n)[-1])
    np.testing.assert_array_equal(ids[end + 1 : end + 3], LINKS.ids(n))
  # Each begins as if it were alone.
  assert (segments[ids == 256] == [3, 4, 5]).all()


def test_rows_of_a_loader():
  source = SharedNames(tokenizer=Bytes(), links=LINKS)
  rows = Loader(source, length=64, batch=3, seed=0, separate=True).at(1)
  assert set(np.unique(rows.segments)) == {0, 1, 3, 4}
  assert (rows.weights.sum(1) == 3).all()


def test_what_cannot_be():
  make = lambda **options: SharedNames(tokenizer=Bytes(), **options)
  refused(OptionError, lambda: make(documents=1), "documents")
  refused(OptionError, lambda: make(names=0), "names")
  refused(OptionError, lambda: make(names=40, letters=1), "names", "letters")
  refused(DataError, lambda: make(documents=4, links=LINKS), "document: got 3")

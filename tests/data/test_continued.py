"""Documents that say the same as the one before."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ringjax.data import Bytes, Continued, LinkTokens, Loader
from ringjax.errors import DataError, OptionError
from tests.helpers import refused

LINKS = LinkTokens(262, 2, 3)


def parts(seed=0, **options):
  """The texts of documents and question, the answer, and what was returned."""
  made = Continued(tokenizer=Bytes(), **options)
  ids, weights, segments = made.example(np.random.default_rng(seed))
  text = lambda at: bytes(ids[at].tolist()).decode()
  documents = [text(segments == 3 + n) for n in range(made.documents)]
  labels = np.flatnonzero(weights)
  reads = (segments == 1) & (ids < 256) & (np.arange(len(ids)) < labels[0])
  # The id that ends the answer is no byte.
  return documents, text(reads), text(labels[:-1]), (ids, weights, segments)


@pytest.mark.parametrize("documents", [2, 3, 4])
def test_the_answer_is_the_number_of_the_document_before(documents):
  asked, more = set(), 0
  for seed in range(60):
    texts, question, answer, (ids, weights, _) = parts(
      seed, documents=documents, digits=3
    )
    found = [
      re.fullmatch(r"# ([a-z]{1,4}) is (\d{3}|the same)\.\n", x).groups()
      for x in texts
    ]
    names, numbers = zip(*found, strict=True)
    assert len(set(names)) == documents
    (name,) = re.fullmatch(r"# ([a-z]{1,4}) is ", question).groups()
    at = names.index(name)
    assert numbers[at] == "the same" and numbers[at - 1] == answer
    assert numbers[0] != "the same"
    assert "the same the same" not in " ".join(numbers)
    assert weights[weights > 0].tolist() == [1] * 4 and ids[-1] == 257
    asked.add(at)
    more += numbers.count("the same") > 1
  assert asked == set(range(1, documents))
  assert bool(more) == (documents > 3)


def test_links_stand_behind_each_document():
  _, _, _, (ids, _, segments) = parts(documents=3, links=LINKS)
  found = ids[ids >= 262]
  np.testing.assert_array_equal(found, 262 + np.arange(6))
  assert (segments[ids >= 262] == 1).all()
  for n in range(3):
    end = int(np.flatnonzero(segments == 3 + n)[-1])
    np.testing.assert_array_equal(ids[end + 1 : end + 3], LINKS.ids(n))
  # No document sees what begins the prompt.
  assert ids[0] == 256 and segments[0] == 1


def test_rows_of_a_loader():
  source = Continued(tokenizer=Bytes(), links=LINKS, documents=3)
  rows = Loader(source, length=104, batch=3, seed=0, separate=True).at(1)
  assert set(np.unique(rows.segments)) == {0, 1, 3, 4, 5}
  assert (rows.weights.sum(1) == 3).all()


def test_what_cannot_be():
  make = lambda **options: Continued(tokenizer=Bytes(), **options)
  refused(OptionError, lambda: make(documents=1), "documents")
  refused(OptionError, lambda: make(letters=0), "letters")
  refused(OptionError, lambda: make(documents=40, letters=1), "more letters")
  refused(OptionError, lambda: make(documents=20, digits=1), "more digits")
  refused(DataError, lambda: make(documents=4, links=LINKS), "document: got 3")

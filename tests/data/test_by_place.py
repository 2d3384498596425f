"""Documents that are asked for by their places."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ringjax.data import ByPlace, Bytes, LinkTokens, Loader
from ringjax.errors import DataError, OptionError
from tests.helpers import refused

LINKS = LinkTokens(262, 2, 3)


def parts(seed=0, **options):
  """The texts of documents and of what follows, and what was returned."""
  made = ByPlace(tokenizer=Bytes(), **options)
  ids, weights, segments = made.example(np.random.default_rng(seed))
  text = lambda at: "".join(chr(i) if i < 256 else "|" for i in ids[at])
  documents = [text(segments == 3 + n) for n in range(made.documents)]
  rest = text((segments == 1) & (ids < 262))
  return documents, rest, (ids, weights, segments)


@pytest.mark.parametrize("documents", [2, 5, 9])
@pytest.mark.parametrize("questions", [1, 3])
def test_answers_are_numbers_of_the_documents_asked_for(documents, questions):
  seen, lengths = set(), set()
  for seed in range(60):
    texts, rest, (ids, weights, _) = parts(
      seed, documents=documents, questions=questions
    )
    # Each begins as if it were alone; no document says which it is.
    found = [re.fullmatch(r"\|# [a-z]{1,6} is (\d)\.\n", x) for x in texts]
    numbers = [x.group(1) for x in found]
    assert len(set(numbers)) == documents
    asked = re.findall(r"# (\d), (\d): (\d)(\d)\|", rest)
    assert "".join("# {}, {}: {}{}|".format(*x) for x in asked) == rest
    assert len(asked) == questions
    for a, b, *answer in asked:
      assert a != b
      assert answer == [numbers[int(a) - 1], numbers[int(b) - 1]]
      seen |= {int(a), int(b)}
    assert set(weights) == {0, 1} and weights.sum() == 3 * questions
    assert ids[-1] == 257
    lengths.add(len(texts[0]))
  assert seen == set(range(1, documents + 1)) and len(lengths) == 6


def test_links_stand_behind_each_document():
  _, _, (ids, _, segments) = parts(documents=3, links=LINKS)
  found = ids[ids >= 262]
  np.testing.assert_array_equal(found, 262 + np.arange(6))
  assert (segments[ids >= 262] == 1).all()
  for n in range(3):
    end = int(np.flatnonzero(segments == 3 + n)[-1])
    np.testing.assert_array_equal(ids[end + 1 : end + 3], LINKS.ids(n))


def test_rows_of_a_loader():
  source = ByPlace(tokenizer=Bytes(), links=LINKS, documents=3)
  rows = Loader(source, length=96, batch=3, seed=0, separate=True).at(1)
  assert set(np.unique(rows.segments)) == {0, 1, 3, 4, 5}
  assert (rows.weights.sum(1) == 3).all()


def test_what_cannot_be():
  make = lambda **options: ByPlace(tokenizer=Bytes(), **options)
  for bad in (1, 10):
    refused(OptionError, lambda n=bad: make(documents=n), "documents")
  refused(OptionError, lambda: make(letters=0), "letters")
  refused(OptionError, lambda: make(questions=0), "questions")
  refused(DataError, lambda: make(documents=4, links=LINKS), "document: got 3")

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
  """The texts of documents, what is asked and answered, what was returned."""
  made = Continued(tokenizer=Bytes(), **options)
  ids, weights, segments = made.example(np.random.default_rng(seed))
  text = lambda at: "".join(chr(i) if i < 256 else "|" for i in ids[at])
  documents = [text(segments == 3 + n) for n in range(made.documents)]
  # The id that ends an answer is no byte.
  answers = text(weights > 0).removesuffix("|").split("|")
  reads = (segments == 1) & (ids < 256) & (weights == 0)
  asked = re.findall(r"# ([a-z]+) is ", text(reads))
  return documents, asked, answers, (ids, weights, segments)


@pytest.mark.parametrize("documents", [2, 3, 8])
@pytest.mark.parametrize("questions", [1, 3])
def test_answers_are_numbers_of_the_documents_before(documents, questions):
  seen, counts = set(), set()
  for seed in range(80):
    texts, asked, answers, (ids, weights, _) = parts(
      seed, documents=documents, questions=questions, digits=3
    )
    found = [
      re.fullmatch(r"# ([a-z]{1,3}) is (\d{3}|the same)\.\n", x).groups()
      for x in texts
    ]
    names, numbers = zip(*found, strict=True)
    assert len(set(names)) == documents and numbers[0] != "the same"
    assert "the same the same" not in " ".join(numbers)
    assert len(asked) == len(answers) == len(set(asked))
    for name, answer in zip(asked, answers, strict=True):
      at = names.index(name)
      assert numbers[at] == "the same" and numbers[at - 1] == answer
      seen.add(at)
    assert len(asked) == min(questions, numbers.count("the same"))
    assert set(weights) == {0, 1} and ids[-1] == 257
    counts.add(len(asked))
  assert seen == set(range(1, documents))
  assert max(counts) == min(questions, documents // 2)


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

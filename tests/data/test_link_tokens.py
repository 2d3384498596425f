"""Link tokens and prompts of documents that are encoded apart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ringjax.data import LinkTokens, arranged
from ringjax.errors import CheckpointFormatError, DataError, OptionError
from tests.helpers import refused

LINKS = LinkTokens(262, 3, 4)


def test_each_slot_has_ids_of_its_own():
  assert LINKS.count == 12
  found = np.concatenate([LINKS.ids(i) for i in range(4)])
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, 262 + np.arange(12))


def test_a_prompt_in_its_order():
  made = arranged([[5, 6], [7]], [8, 9], LINKS, prefix=[1])
  want = [1, 5, 6, 262, 263, 264, 7, 265, 266, 267, 8, 9]
  np.testing.assert_array_equal(made.tokens, want)
  np.testing.assert_array_equal(made.positions, np.arange(12))
  segments = [2, 3, 3, 1, 1, 1, 4, 1, 1, 1, 1, 1]
  np.testing.assert_array_equal(made.segments, segments)
  assert all(x.dtype == np.int32 for x in made)


def test_a_prompt_without_links_and_with_a_prefix_of_its_own():
  made = arranged([[5, 6], [7]], [8], prefix=[1, 2], shared=False)
  np.testing.assert_array_equal(made.tokens, [1, 2, 5, 6, 7, 8])
  np.testing.assert_array_equal(made.segments, [1, 1, 3, 3, 4, 1])


def test_links_are_saved_beside_a_model(tmp_path):
  folder = tmp_path / "new"
  LINKS.save(folder)
  assert LinkTokens.load(folder) == LINKS
  assert LinkTokens.load(folder, vocab=274) == LINKS
  assert set(json.loads((folder / "links.json").read_text())) == {
    "first",
    "each",
    "documents",
  }
  refused(
    OptionError,
    lambda: LinkTokens.load(folder, vocab=273),
    "ids to 273",
    "with_more_tokens(model, 12)",
  )


@pytest.mark.parametrize(
  "text",
  [
    None,
    "",
    "[1, 2, 3]",
    '{"first": 1}',
    '{"first": 1, "each": 0, "documents": 2}',
  ],
)
def test_files_that_are_none(tmp_path, text):
  if text is not None:
    (tmp_path / "links.json").write_text(text)
  refused(
    CheckpointFormatError, lambda: LinkTokens.load(tmp_path), "links.json"
  )


def test_prompts_that_are_none():
  many = [[1]] * 5
  refused(DataError, lambda: arranged(many, [2], LINKS), "document", "fewer")
  assert len(arranged(many, [2]).tokens) == 6
  refused(DataError, lambda: arranged([[1], []], [2]), "documents[1]")
  refused(DataError, lambda: arranged([[[1]]], [2]), "documents[0]")
  refused(DataError, lambda: arranged([[1]], [-2]), "question")
  for bad in (dict(first=-1), dict(each=0), dict(documents=0)):
    options = dict(first=9, each=1, documents=1) | bad
    refused(OptionError, lambda o=options: LinkTokens(**o), *bad)

"""Texts that ask about several lines, and texts that repeat passages."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ringjax.data import Loader
from ringjax.data.tasks.needle import NEEDLE, MultiValue, VariableTracking
from ringjax.data.tasks.recall_tasks import (
  KEEPER,
  PASSAGE,
  Chains,
  Links,
  Quotes,
  Records,
  Values,
)
from ringjax.errors import OptionError
from tests.data.test_recall import makers

KINDS = {
  "values": (Values, {"values": 3}),
  "chains": (Chains, {"hops": 3}),
  "links": (Links, {}),
  "quotes": (Quotes, {"longest": 90}),
  "records": (Records, {"preamble": 90}),
}
source, draw = makers(KINDS)


def text_of(ids: np.ndarray) -> str:
  return "".join(chr(i) if i < 256 else "|" for i in ids.tolist())


def recalled(kind: str, seed: int, **options) -> tuple[str, str]:
  """An example's text, and what of it is to be recalled."""
  ids, weights = draw(kind, seed, text=0.0, **options)
  return text_of(ids), text_of(ids[weights > 0])


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [977, 1024, 3000])
def test_an_example_fills_a_row_and_weighs_as_much(kind, length):
  for seed in range(20):
    ids, weights = draw(kind, seed, length=length)
    assert ids.shape == weights.shape == (length,)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert ids[0] == 256 and weights[0] == 0
    assert weights.sum() == pytest.approx(length, rel=1e-5)
    again, _ = draw(kind, seed, length=length)
    np.testing.assert_array_equal(ids, again)
    other, _ = draw(kind, seed + 100, length=length)
    assert np.any(ids != other)


def test_all_values_of_a_name_are_answered_in_order():
  many = set()
  pattern = re.escape(MultiValue.question).replace(r"\{name\}", r"(\w+)")
  for seed in range(30):
    text, sought = recalled("values", seed)
    body = text[: text.index("\n# Question")]
    names = re.findall(pattern, text)
    want = ""
    assert 1 <= len(names) <= 2
    for name in names:
      line = re.escape(NEEDLE.format(name=name, number="?"))
      values = re.findall(line.replace(r"\?", r"(\d+)"), body)
      answer = MultiValue.answer.format(name=name, number=", ".join(values))
      assert MultiValue.question.format(name=name) + answer + "|" in text
      want += ", ".join(values) + ".\n|"
      many.add(len(values))
    assert sought == want
  assert many == {1, 2, 3}


def test_chains_are_followed_from_their_value():
  many = set()
  pattern = re.escape(VariableTracking.question).replace(r"\{number\}", "(.+)")
  for seed in range(30):
    text, sought = recalled("chains", seed)
    lines = re.findall(r"VAR (\w+) = (\w+)\n", text)
    want = ""
    for value in re.findall(pattern, text):
      chain, at = [], value
      for name, of in lines:
        # A variable's line is below that of the one that it is assigned.
        if of == at:
          chain.append(name)
          at = name
      want += ", ".join(chain) + ".\n|"
      many.add(len(chain))
    assert sought == want
  assert many == {2, 3, 4}


def test_links_need_both_documents():
  order = set()
  for seed in range(30):
    text, sought = recalled("links", seed)
    one, two = re.split(r"# ==== Document 2 ====\n", text, maxsplit=1)
    assert one.startswith("|# ==== Document 1 ====\n")
    two = two[: two.index("\n# Question")]
    # All lines of a kind are in one document.
    line = re.escape(KEEPER).replace(r"\{name\}", r"(\w+)")
    line = line.replace(r"\{keeper\}", r"(\w+)")
    keepers = dict(re.findall(line, one) or re.findall(line, two))
    line = re.escape(NEEDLE).replace(r"\{name\}", r"(\w+)")
    line = line.replace(r"\{number\}", r"(\d+)")
    numbers = dict(re.findall(line, two) or re.findall(line, one))
    assert set(keepers.values()) == set(numbers)
    order.add("The keeper" in one)
    asked = re.findall(r"for the keeper of (\w+)\?", text)
    assert sought == "".join(
      f"{keepers[name]}{keepers[name]}{numbers[keepers[name]]}|"
      for name in asked
    )
  assert order == {False, True}


def test_quotes_repeat_a_passage():
  for seed in range(30):
    text, sought = recalled("quotes", seed)
    asked = re.findall(r"What does passage (\w+) say\?", text)
    quoted = sought.split("|")[:-1]
    assert len(asked) == len(quoted)
    for name, passage in zip(asked, quoted, strict=True):
      assert text.count(PASSAGE.format(name=name, text=passage)) == 1
      assert 0 < len(passage) <= 90


def test_records_come_again_with_their_values():
  for seed in range(30):
    text, sought = recalled("records", seed, length=1500)
    found = re.findall(r"\nname: (\w+)\n((?:\w+: \w+\n)+)", text)
    count = len(found) // 2
    assert count > 1 and len(found) == 2 * count
    assert sorted(found[:count]) == sorted(found[count:])
    again = "".join(fields for _, fields in found[count:])
    assert sought == "".join(re.findall(r"\w+: (\w+)\n", again))
    # All have the same preamble before them.
    preamble = text[1 : text.index("\nname: ")]
    assert text.count(f"{preamble}\nname: ") == 2 * count


def test_records_of_short_preambles():
  for preamble in (1, 40):
    ids, _ = draw("records", length=700, preamble=preamble)
    assert len(ids) == 700


def test_a_row_of_the_loader_is_one_example():
  with Loader(source("chains"), length=1024, batch=3, seed=4) as loader:
    batch = next(loader)
  assert np.all(batch.segments == 1)


@pytest.mark.parametrize(
  ("kind", "options", "words"),
  [
    ("values", {"values": 0}, "values: got 0"),
    ("chains", {"hops": 0}, "hops: got 0"),
    ("links", {"facts": 0}, "facts: got 0"),
    ("links", {"questions": 0}, "questions: got 0"),
    ("quotes", {"longest": 0}, "longest: got 0"),
    ("quotes", {"length": 300}, "length: got 300; wanted an int of"),
    ("records", {"fields": 0}, "fields: got 0"),
    ("records", {"preamble": 0}, "preamble: got 0"),
  ],
)
def test_wrong_options(kind, options, words):
  with pytest.raises(OptionError, match=words):
    source(kind, **options)

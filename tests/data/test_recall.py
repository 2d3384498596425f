"""Texts that teach to look back."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ringjax.data import Bytes, Loader
from ringjax.data.tasks.filler import Lines
from ringjax.data.tasks.needle import NEEDLE
from ringjax.data.tasks.recall import Copies, Pairs, Questions
from ringjax.errors import OptionError

FILLER = Lines(
  text="".join(f"def run_{i}(self, value):\n  return {i}\n" for i in range(99))
)
KINDS = {
  "copies": (Copies, {}),
  "few letters": (Copies, {"fewest": 4, "most": 16}),
  "pairs": (Pairs, {}),
  "questions": (Questions, {"facts": 5, "questions": 3}),
}


def makers(kinds):
  """Functions that make a source of a kind, and draw an example of it."""

  def source(kind: str, length: int = 1024, **options):
    cls, own = kinds[kind]
    return cls(tokenizer=Bytes(), filler=FILLER, length=length, **own | options)

  def draw(kind: str, seed: int = 0, **options):
    ids, weights = source(kind, **options).example(np.random.default_rng(seed))
    return np.asarray(ids), weights

  return source, draw


source, draw = makers(KINDS)


def text_of(ids: np.ndarray) -> str:
  return bytes(i for i in ids.tolist() if i < 256).decode("utf-8", "replace")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [513, 1024])
def test_an_example_fills_a_row_and_weighs_as_much(kind, length):
  for seed in range(20):
    if kind == "questions" and length < 1000:
      options = {"facts": 2, "questions": 1}
    else:
      options = {}
    ids, weights = draw(kind, seed, length=length, **options)
    assert ids.shape == weights.shape == (length,)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert ids[0] == 256 and weights[0] == 0
    assert weights.sum() == pytest.approx(length, rel=1e-5)
    again, _ = draw(kind, seed, length=length, **options)
    np.testing.assert_array_equal(ids, again)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_text_weighs_what_it_is_told_to(kind, share):
  _, weights = draw(kind, text=share)
  kinds = sorted({w for w in weights.tolist() if w})
  assert len(kinds) == (2 if share else 1)
  if share:
    # Few tokens are sought, and each of them weighs more.
    parts = [weights[weights == w].sum() for w in kinds]
    part = parts[0] if kinds[0] < kinds[-1] else parts[-1]
    assert part / sum(parts) == pytest.approx(
      share / (1 + share), rel=1e-3
    ) or parts[-1] / sum(parts) == pytest.approx(share / (1 + share), rel=1e-3)


@pytest.mark.parametrize("kind", ["copies", "few letters"])
def test_copies_come_again(kind):
  for seed in range(20):
    ids, weights = draw(kind, seed, text=0.0)
    sought = np.flatnonzero(weights)
    assert sought[-1] == len(ids) - 1 and np.all(np.diff(sought) == 1)
    # What is sought stood at the beginning, behind the same tokens.
    count = len(sought)
    end = max(
      n for n in range(count, len(ids) // 2) if
      np.array_equal(ids[1 : n + 1], ids[-n:])
    )  # fmt: skip
    np.testing.assert_array_equal(ids[end + 1 - count : end + 1], ids[-count:])
    if kind == "few letters":
      assert ids[sought].max() < 16


def test_pairs_are_asked_again():
  for seed in range(20):
    ids, weights = draw("pairs", seed, text=0.0)
    text = text_of(ids)
    found = re.findall(r"(?m)^([a-z]+) is (\d{4,6})\.$", text)
    count = len(found) // 2
    assert count > 5 and set(found[:count]) == set(found[count:])
    assert len(dict(found)) == count
    # The numbers of the second half are sought, and nothing else.
    sought = "".join(chr(i) for i in ids[weights > 0])
    assert sought == "".join(number for _, number in found[count:])


def test_questions_have_their_answers_above():
  asked = set()
  for seed in range(30):
    ids, weights = draw("questions", seed, text=0.0)
    assert ids[-1] == 257
    text = text_of(ids)
    answers = re.findall(r"for (\w+) is (\d{4,6})\.\n", text)
    asked.add(len(answers))
    for name, number in answers:
      line = NEEDLE.format(name=name, number=number)
      assert text.count(line) == 1
      assert text.index(line) < text.index(f"What is the passkey for {name}?")
      # Each fact begins a line.
      assert text.index(line) == 0 or text[text.index(line) - 1] == "\n"
    # Of the first the whole answer is sought, of the others the numbers.
    sought = "".join(chr(i) if i < 256 else "|" for i in ids[weights > 0])
    name, number = answers[0]
    want = f" The passkey for {name} is {number}.\n|"
    want += "".join(f"{n}.\n|" for _, n in answers[1:])
    assert sought == want
  assert asked == {1, 2, 3}


def test_a_row_of_the_loader_is_one_example():
  one = source("pairs", 256)
  with Loader(one, length=256, batch=3, seed=4) as loader:
    batch = next(loader)
  assert np.all(batch.segments == 1)
  assert np.all((batch.weights[:, :-1] > 0).sum(1) > 100)


@pytest.mark.parametrize(
  ("kind", "options", "words"),
  [
    ("copies", {"length": 8}, "length: got 8"),
    ("copies", {"fewest": 1}, "2 <= fewest"),
    ("copies", {"most": 1 << 20}, "the vocabulary"),
    ("pairs", {"text": -1.0}, "text: got -1"),
    ("questions", {"questions": 9}, "9 of 5 facts"),
    (
      "questions",
      {"length": 200},
      "length: got 200; wanted an int of",
    ),
  ],
)
def test_wrong_options(kind, options, words):
  with pytest.raises(OptionError, match=words):
    source(kind, **options)

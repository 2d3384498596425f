"""All tasks of the table: length, facts, scores; and what each adds to that."""

from __future__ import annotations

import collections
import pathlib
import re

import numpy as np
import pytest

from ringjax.data import Bytes, Tokenizer
from ringjax.data.tasks.filler import NOISE, Lines
from ringjax.data.tasks.needle import (
  TASKS,
  CommonWords,
  FrequentWords,
  MultiKey,
  MultiQuery,
  TwoDocuments,
)
from ringjax.errors import OptionError
from tests.data import made

FILLER = Lines(
  text="".join(f"line {i:04} of {'words ' * (i % 9)}\n" for i in range(997))
)
QUESTION = "\n# Question: "
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def task(name, tokenizer=None, **options):
  return TASKS[name](tokenizer=tokenizer or Bytes(), filler=FILLER, **options)


def example(some, seed=0, length=4000, depth=None):
  return some.make(np.random.default_rng(seed), length, depth)


def look_up(prompt):
  """The answer of a reader who has the prompt alone and misses nothing."""
  body, _, question = prompt.rpartition(QUESTION)
  listed = re.search(r"Which (\d+) words appear most often", question)
  if listed:
    counts = collections.Counter(re.findall(r"^[A-Z]{5}$", body, re.M))
    return [word for word, _ in counts.most_common(int(listed[1]))]
  born = re.search(r"in which (\w+) was born", question)
  if born:
    (town,) = re.findall(
      rf"^Document: {born[1]} was born in (\w+),", body, re.M
    )
    return re.findall(rf"^Document: {town} .* has (\d+) inhabit", body, re.M)
  value = re.search(r"the value (\d+),", question)
  if value:
    held = [value[1]]
    for name, source in re.findall(r"^VAR (\w+) = (\w+)$", body, re.M):
      held += [name] if source in held else []
    return held[1:]
  keys = re.search(r"passkeys? for (.+)\?", question)[1].split(", ")
  return [
    value
    for key in keys
    for value in re.findall(rf"^# The passkey of {key} is (.+)\.$", body, re.M)
  ]


@pytest.mark.parametrize("name", TASKS)
def test_a_reader_who_misses_nothing_scores_one(name):
  some = task(name)
  for seed in range(4):
    one = example(some, seed)
    found = look_up(one.prompt)
    assert set(found) == set(one.wanted) and len(found) == len(one.wanted)
    assert some.score(one, ", ".join(found)) == 1.0
    assert some.score(one, one.answer) == 1.0
    assert all(f"{word}" in one.answer for word in one.wanted)
    # Another text's answer, a part of the answer, and no answer.
    assert some.score(one, example(some, seed + 50).answer) == 0.0
    part = list(one.wanted[1:])
    assert some.score(one, " ".join(part)) == len(part) / len(one.wanted)
    assert some.score(one, "") == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_length_and_seeds(name):
  some = task(name)
  for seed, length in enumerate((2500, 3001, 6002)):
    one = example(some, seed, length)
    assert length - 1 <= one.tokens <= length
    assert len(some.training(one)[0]) == one.tokens
    assert one == example(some, seed, length)
    assert one.prompt != example(some, seed + 9, length).prompt


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
  base = tmp_path_factory.mktemp("tokenizers")
  return {
    kind: Tokenizer.load(made.folder(kind, base / kind))
    for kind in ("llama3", "llama2")
  }


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
@pytest.mark.parametrize("name", TASKS)
def test_length_in_tokens_of_several_bytes(tokenizers, name, kind):
  some = task(name, tokenizers[kind])
  one = example(some, length=4001)
  assert 4001 - 3 <= one.tokens <= 4001
  assert set(look_up(one.prompt)) == set(one.wanted)


@pytest.mark.parametrize("name", TASKS)
def test_another_depth_hides_the_same_facts(name):
  some = task(name)
  top, low = (example(some, 3, depth=depth) for depth in (0.0, 0.8))
  assert top.facts == low.facts and top.wanted == low.wanted
  if some.placed:
    assert (top.depth, low.depth) == (0.0, 0.8)
    at = top.prompt.index(top.facts[0][0])
    assert at < 150 < 0.6 * 4000 < low.prompt.index(low.facts[0][0])
  else:
    assert top == low


@pytest.mark.parametrize("name", TASKS)
def test_a_text_that_is_too_short(name):
  some = task(name)
  with pytest.raises(OptionError, match="length: got 40; wanted") as error:
    example(some, length=40)
  least = int(re.search(r"length=(\d+) or more", str(error.value))[1])
  one = example(some, length=least)
  assert one.tokens <= least and set(look_up(one.prompt)) == set(one.wanted)


def test_the_docs_list_all_tasks():
  page = pathlib.Path(__file__).parents[2] / "docs" / "training.md"
  listed = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.M)
  assert listed == list(TASKS)


# ---------------------------------------------------------------------------
# Haystacks
# ---------------------------------------------------------------------------


def lines(one):
  """The whole lines of a text, without its question."""
  return one.prompt.rpartition(QUESTION)[0].split("\n")[:-1]


def test_noise_is_all_there_is_beside_the_needle():
  one = example(task("passkey_noise"), depth=0.5)
  assert len(set(lines(one))) == 2 and NOISE.text[:-1] in lines(one)


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("multikey_needles", "[a-z]{4,8}", r"\d{5}"),
    ("multikey_uuids", UUID, UUID),
  ],
)
def test_a_haystack_of_needles(name, key, value):
  one = example(task(name), length=30_000)
  found = [re.fullmatch(rf"# The passkey of ({key}) is ({value})\.", line)
           for line in lines(one)]  # fmt: skip
  assert all(found) and len(found) > 200
  keys = [match[1] for match in found]
  assert len(set(keys)) == len(keys)
  assert sum(match[2] == one.wanted[0] for match in found) == 1


def test_documents_are_pairs():
  one = example(TwoDocuments(tokenizer=Bytes()), length=40_000)
  text = "\n".join(lines(one))
  towns = re.findall(r" was born in (\w+),", text)
  known = re.findall(r"Document: (\w+) is a town", text)
  assert len(towns) == len(set(towns)) > 150
  # Cut off at its end, where some documents lack the other.
  assert len(set(towns).symmetric_difference(known)) < 64
  at = [text.index(f" {name} ") for name, _ in one.facts]
  assert len(set(at)) == 2


def test_words_are_as_often_there_as_said():
  count = lambda one: collections.Counter(lines(one))
  one = example(CommonWords(tokenizer=Bytes(), words=4, times=9), length=9000)
  found = count(one)
  assert one.facts == tuple((word, "9") for word in one.wanted)
  assert [found.pop(word) for word in one.wanted] == [9] * 4
  assert max(found.values()) == 3 and len(found) > 400
  # In random order: no word's lines are all in one half.
  text = lines(one)
  for word in one.wanted:
    assert 0 < text[: len(text) // 2].count(word) < 9


@pytest.mark.parametrize("length", [600, 3000, 30_000])
@pytest.mark.parametrize("exponent", [1.5, 2.0, 3.0])
def test_frequencies_follow_the_law(length, exponent):
  some = FrequentWords(tokenizer=Bytes(), exponent=exponent, words=2)
  one = example(some, length=length)
  found = collections.Counter(lines(one))
  ranked = [count for _, count in found.most_common()]
  assert [found[word] for word, _ in one.facts] == [
    int(n) for _, n in one.facts
  ]
  assert ranked[0] > ranked[1] > ranked[2]
  share = lambda rank: rank**-exponent / np.sum(np.arange(1, 1e4) ** -exponent)
  for rank, count in enumerate(ranked[:3], 1):
    assert count == pytest.approx(share(rank) * sum(ranked), abs=3, rel=0.1)


def test_several_keys_in_one_question():
  some = MultiQuery(tokenizer=Bytes(), filler=FILLER, keys=6, asked=3)
  orders = set()
  for seed in range(12):
    one = example(some, seed, depth=0.5)
    asked = look_up(one.prompt)
    assert sorted(asked) == sorted(one.wanted) and len(one.facts) == 6
    at = [one.prompt.index(value) for value in one.wanted]
    assert at == sorted(at)
    orders.add(tuple(asked.index(value) for value in one.wanted))
  assert len(orders) > 2


def test_a_key_s_uuid_is_no_value():
  some = task("multikey_uuids")
  one = example(some)
  ((key, value),) = one.facts
  assert some.score(one, f"That of {key} is {value}.") == 1.0
  assert some.score(one, f"That of {key} is {key}.") == 0.0
  assert some.score(one, value[:-1]) == 0.0


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: MultiKey(tokenizer=0, asked=5), "asked: got 5"),
    (lambda: MultiKey(tokenizer=0, form="uuid"), "form: got 'uuid'"),
    (lambda: MultiKey(tokenizer=0, haystack="hay"), "haystack: got 'hay'"),
    (lambda: CommonWords(tokenizer=0, words=0), "words: got 0"),
    (lambda: CommonWords(tokenizer=0, others=0), "others: got 0"),
    (lambda: CommonWords(tokenizer=0, times=3), "times: got 3"),
    (lambda: FrequentWords(tokenizer=0, exponent=0.0), "exponent: got 0.0"),
    (lambda: TwoDocuments(tokenizer=0, digits=0), "of 0 digits"),
  ],
)
def test_options_out_of_range(call, words, unchecked):
  with pytest.raises(OptionError, match=words):
    call()

"""Stops: the same text however it is cut, and nothing shown too early."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.data import Bytes
from ringjax.errors import InputTypeError, PromptError
from ringjax.infer.stopping import Stop, as_stop

BYTES = Bytes()


def until(text: str, strings) -> tuple[str, str | None]:
  """By the law: the first place at which some string is complete."""
  for end in range(1, len(text) + 1):
    done = [s for s in strings if text[:end].endswith(s)]
    if done:
      longest = max(done, key=len)
      return text[: end - len(longest)], longest
  return text, None


def cut(ids, rng):
  at = 0
  while at < len(ids):
    size = rng.randrange(1, 5)
    yield ids[at : at + size]
    at += size


WORDS = st.text("ab\né", max_size=4)


@given(
  text=st.text("ab\né", max_size=30),
  strings=st.lists(WORDS.filter(bool), max_size=3),
  seed=st.integers(0, 99),
)
def test_text_up_to_the_first_stop(text, strings, seed):
  want, by = until(text, strings)
  watch = Stop(strings=tuple(strings)).watch(BYTES)
  shown = ""
  for ids in cut(BYTES.encode(text).tolist(), random.Random(seed)):
    shown += watch.feed(ids)
    # What is shown is never taken back.
    assert want.startswith(shown)
  shown += watch.flush()
  assert shown == want
  assert watch.stopped == by


def test_nothing_more_is_held_than_may_be_a_stop():
  watch = Stop(strings=("END.", "\n\n")).watch(BYTES)
  assert watch.feed(BYTES.encode("The END")) == "The "
  assert watch.feed(BYTES.encode("E")) == "END"
  assert watch.feed(BYTES.encode("N ")) == "EN "
  assert watch.feed(BYTES.encode("a\n")) == "a"
  assert watch.feed(BYTES.encode("b")) == "\nb"
  assert watch.feed(BYTES.encode("EN")) == ""
  assert watch.flush() == "EN"
  assert watch.stopped is None


def test_what_is_taken_for_a_stop():
  assert as_stop(None) == Stop()
  assert as_stop(7) == as_stop([7, 7]) == as_stop(np.int32(7)) == Stop(ids=(7,))
  assert (
    as_stop(np.array([3, 7])) == as_stop(range(3, 8, 4)) == Stop(ids=(3, 7))
  )
  assert as_stop("ab") == as_stop(("ab",)) == Stop(strings=("ab",))
  assert as_stop(["a", 5, "b"]) == Stop(ids=(5,), strings=("a", "b"))
  assert as_stop(Stop(ids=(1,))) == Stop(ids=(1,))


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_stop():
  for wrong in (1.5, [1.5], True, [False], b"ab", object(), [[1]], np.ones(2)):
    with pytest.raises(InputTypeError, match="stop: got"):
      as_stop(wrong)
  with pytest.raises(InputTypeError, match="ids: got float"):
    Stop(ids=1.5)
  with pytest.raises(
    InputTypeError, match="strings: got int|strings: got type"
  ):
    Stop(strings=object)


def test_a_stop_id():
  watch = Stop(ids=BYTES.eos_ids, strings=("zz",)).watch(BYTES)
  ids = [*BYTES.encode("az"), *BYTES.eos_ids, *BYTES.encode("more")]
  assert watch.feed(ids) == "az"
  assert watch.stopped == 257
  assert watch.tokens == 3
  assert watch.feed(BYTES.encode("more")) == watch.flush() == ""
  assert watch.tokens == 3


def test_tokens_up_to_the_stop_are_counted():
  watch = Stop(strings=("bc",)).watch(BYTES)
  assert watch.feed(BYTES.encode("abcd")) == "a"
  assert watch.stopped == "bc"
  assert watch.tokens == 3


def test_an_unfinished_character_before_a_stop():
  watch = Stop(ids=(257,)).watch(BYTES)
  assert watch.feed([97, 0xE2, 0x82, 257]) == "a\ufffd"
  watch = Stop(ids=(257,), strings=("\ufffd",)).watch(BYTES)
  assert watch.feed([97, 0xE2, 0x82, 257]) == "a"
  assert watch.stopped == "\ufffd"
  watch = Stop(strings=("\ufffd",)).watch(BYTES)
  assert watch.feed([97, 0xE2]) + watch.flush() == "a"
  assert watch.stopped == "\ufffd"


@pytest.mark.parametrize("special", [False, True])
def test_texts_of_special_tokens_stop_whether_they_are_shown_or_not(special):
  ids = [*BYTES.encode("a"), 259, *BYTES.encode("b"), 260, *BYTES.encode("c")]
  whole = Stop(special=special).watch(BYTES).feed(ids)
  assert whole == ("a<|system|>b<|user|>c" if special else "abc")
  for string, text in (
    ("<|user|>", "a<|system|>b"),
    ("b<|user|>c", "a<|system|>"),
    ("m|>b", "a<|syste"),
    ("ab", "a<|system|>b<|user|>c"),
  ):
    watch = Stop(strings=(string,), special=special).watch(BYTES)
    shown = watch.feed(ids) + watch.flush()
    assert watch.stopped == (None if string == "ab" else string)
    cleared = text if special else re.sub(r"<\|\w+(\|>)?", "", text)
    assert shown == cleared


@pytest.mark.parametrize("special", [False, True])
def test_what_ended_the_text_may_be_part_of_it(special):
  make = lambda **how: Stop(included=True, special=special, **how).watch(BYTES)
  ids = [*BYTES.encode("az"), 260, *BYTES.encode("more")]
  assert make(ids=(ord("z"),)).feed(ids) == "az"
  assert make(ids=(260,)).feed(ids) == ("az<|user|>" if special else "az")
  assert make(strings=("z<|user|>m",)).feed(ids) == (
    "az<|user|>m" if special else "azm"
  )
  # Of two texts, one of which begins as the other, that which is complete.
  for strings in (("az", "azz"), ("azz", "az")):
    watch = make(strings=strings)
    assert watch.feed(ids) == "az" and watch.stopped == "az"
  watch = make(strings=("zmo", "z<|user|>mo"))
  assert watch.feed(ids[:4]) == "a"
  assert watch.feed(ids[4:]) == ("z<|user|>mo" if special else "zmo")


def test_a_special_token_inside_of_a_character():
  euro = list("\u20ac".encode())
  ids = [97, *euro[:2], 260, euro[2], 98]
  watch = Stop(strings=("<|user|>",)).watch(BYTES)
  assert watch.feed(ids) == "a" and watch.stopped == "<|user|>"
  assert watch.tokens == 4
  # Shown is what `decode` shows.
  watch = Stop(strings=("zz",)).watch(BYTES)
  assert watch.feed(ids) + watch.flush() == BYTES.decode(ids) == "a\u20acb"


def test_a_stop_is_a_value(unchecked):
  assert Stop(ids=3, strings="x") == Stop(ids=[3, 3], strings=["x", "x"])
  assert hash(Stop(ids=(3,))) == hash(Stop(ids=[3]))
  Stop(ids=(3,)).check(4)
  with pytest.raises(PromptError, match="ids below the vocabulary's 3"):
    Stop(ids=(3,)).check(3)


@pytest.mark.parametrize(
  ("ids", "strings", "error", "words"),
  [
    ((-1,), (), PromptError, "id -1 at position 0"),
    ((1, 2**31), (), PromptError, "at position 1"),
    ((1.5,), (), InputTypeError, "one id or a row of ids"),
    ((), ("",), PromptError, "1 to 4096 characters"),
    ((), ("x" * 5000,), PromptError, "1 to 4096 characters"),
    ((), (b"x",), PromptError, "1 to 4096 characters"),
    ((), tuple(map(str, range(129))), PromptError, "at most 128 texts"),
  ],
)
def test_stops_that_are_none(ids, strings, error, words, unchecked):
  with pytest.raises(error, match=words) as caught:
    Stop(ids=ids, strings=strings)
  assert len(str(caught.value)) <= 400

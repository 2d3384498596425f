"""Needles: as long as asked, where asked, told once, and scored exactly."""

from __future__ import annotations

import itertools
import re
import sysconfig

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.data import Bytes, Documents, Loader, Tokenizer
from ringjax.data.tasks import needle
from ringjax.data.tasks.filler import (
  NOISE,
  Decoded,
  Library,
  Lines,
  TextWithout,
)
from ringjax.data.tasks.needle import (
  MultiKey,
  MultiValue,
  Passkey,
  TaskExamples,
  VariableTracking,
)
from ringjax.errors import DataError, OptionError
from ringjax.models import tiny
from tests.data import made

FILLER = Lines(
  text="".join(f"line {i:04} of {'words ' * (i % 9)}\n" for i in range(997))
)
TASKS = {
  "passkey": Passkey,
  "keys": MultiKey,
  "many keys": lambda **more: MultiKey(keys=40, digits=6, **more),
  "values": MultiValue,
  "variables": VariableTracking,
  "chain": lambda **more: VariableTracking(chains=1, hops=9, **more),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
  base = tmp_path_factory.mktemp("tokenizers")
  kinds = ("llama3", "qwen", "gemma", "llama2")
  return {k: Tokenizer.load(made.folder(k, base / k)) for k in kinds} | {
    "bytes": Bytes()
  }


def task(kind, tokenizer=None, **more):
  options = {"tokenizer": tokenizer or Bytes(), "filler": FILLER} | more
  return TASKS[kind](**options)


def example(kind, seed=0, length=5000, depth=None, **more):
  rng = np.random.default_rng(seed)
  return task(kind, **more).make(rng, length, depth)


# ---------------------------------------------------------------------------
# Length, depth, seeds
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASKS)
@given(
  length=st.integers(3000, 6000),
  depth=st.none() | st.floats(0, 1),
  seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_bytes_are_just_as_many_as_asked_for(kind, length, depth, seed):
  made_up = example(kind, seed, length, depth)
  ids, weights = task(kind).training(made_up)
  # A newline that a needle needs below the last line can be one too many.
  assert length - 1 <= len(ids) == len(weights) == made_up.tokens <= length


@pytest.mark.parametrize("name", ["llama3", "qwen", "gemma", "llama2"])
@pytest.mark.parametrize("kind", ["passkey", "variables"])
def test_tokens_are_few_less_than_asked_for(tokenizers, name, kind):
  tokenizer = tokenizers[name]
  for seed, length in enumerate((700, 1501, 4001)):
    made_up = example(kind, seed, length, tokenizer=tokenizer)
    text = made_up.prompt + made_up.answer
    count = len(tokenizer.encode(text, bos=tokenizer.adds_bos)) + len(
      tokenizer.eos_ids[:1]
    )
    assert length - 3 <= count == made_up.tokens <= length


def test_a_length_that_holds_no_filler():
  ((name, number),) = example("passkey").facts
  text = (needle.NEEDLE + needle.QUESTION + needle.ANSWER).format(
    name=name, number=number
  )
  least = len(text) + 2
  made_up = example("passkey", length=least)
  assert made_up.prompt + made_up.answer == text
  assert made_up.tokens == least
  with pytest.raises(OptionError, match=f"wanted {least} tokens at least"):
    example("passkey", length=least - 1)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_the_first_fact_stands_at_its_depth(kind, depth):
  some = task(kind)
  made_up = example(kind, 1, 20_000, depth)
  assert made_up.depth == depth
  hidden = [some.needle.format(name=n, number=v) for n, v in made_up.facts]
  assert all(f"\n{line}" in f"\n{made_up.prompt}" for line in hidden)
  body = made_up.prompt
  above, _, below = body.partition(hidden[0])
  for line in hidden[1:]:
    above, below = above.replace(line, ""), below.replace(line, "")
  below = below[: below.rindex("\n# Question")]
  share = len(above) / len(above + below)
  # The start of the line in which the depth lies.
  assert depth - 80 / len(above + below) <= share <= depth + 1e-3
  if depth in (0.0, 1.0):
    assert not (above if depth == 0 else below)


@pytest.mark.parametrize("kind", ["values", "variables", "chain"])
@pytest.mark.parametrize("depth", [None, 0.7])
def test_what_belongs_together_comes_in_order(kind, depth):
  some = task(kind)
  for seed in range(5):
    made_up = example(kind, seed, 4000, depth)
    wanted = len(made_up.wanted)
    for facts in (made_up.facts[:wanted], made_up.facts[wanted:]):
      at = [
        made_up.prompt.index(some.needle.format(name=n, number=v))
        for n, v in facts
      ]
      assert at == sorted(at)


@pytest.mark.parametrize("kind", TASKS)
def test_seeds(kind):
  assert example(kind, 5) == example(kind, 5)
  prompts = {example(kind, seed).prompt for seed in range(5)}
  assert len(prompts) == 5
  # At whatever depth, the same facts in the same text.
  a, b = (example(kind, 5, depth=d) for d in (0.0, 0.8))
  assert a.facts == b.facts and a.wanted == b.wanted
  assert a.prompt != b.prompt
  assert sorted(a.prompt)[:4000] == sorted(b.prompt)[:4000]


# ---------------------------------------------------------------------------
# Facts and answers
# ---------------------------------------------------------------------------


def look_up(prompt):
  """What a reader who misses nothing answers."""
  asked = re.search(r"passkeys? for (\w+)\?\n# Answer:\Z", prompt)
  if asked:
    line = rf"^# The passkey of {asked[1]} is (\d+)\.$"
    return " ".join(re.findall(line, prompt, re.M))
  value = re.search(r"the value (\d+), .*\n# Answer:\Z", prompt)[1]
  held, names = {value}, []
  for name, source in re.findall(r"^VAR (\w+) = (\w+)$", prompt, re.M):
    if source in held:
      held.add(name)
      names.append(name)
  return ", ".join(names)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("filler", [FILLER, NOISE, Library(characters=90_000)])
def test_who_looks_it_up_scores_one_and_others_nothing(kind, filler):
  some = task(kind, filler=filler)
  for seed in range(4):
    made_up = example(kind, seed, filler=filler)
    assert some.score(made_up, look_up(made_up.prompt)) == 1.0
    assert some.score(made_up, made_up.answer) == 1.0
    other = example(kind, seed + 100, filler=filler)
    assert some.score(made_up, other.answer) == 0.0
    assert some.score(made_up, "") == 0.0
    values = [v for _, v in made_up.facts if v.isdigit()]
    wrong = [v for v in values if v not in made_up.wanted]
    assert some.score(made_up, f"It is {' '.join(wrong)} 7") == 0.0


def test_scores_are_exact():
  one = example("passkey")
  (number,) = one.wanted
  some = task("passkey")
  assert some.score(one, f"It's {number}!") == 1.0
  for wrong in (f"1{number}", f"{number}0", number[:-1], f"12345 {number}"):
    assert some.score(one, wrong) == 0.0
  for kind, values in (("values", 4), ("variables", 5)):
    made_up = example(kind)
    some = task(kind)
    assert len(made_up.wanted) == values
    part = " ".join(made_up.wanted[:3])
    assert some.score(made_up, part) == 3 / values
    # Naming all that there might be is no answer.
    many = "11111 22222 33333 44444 55555 AAAAA BBBBB CCCCC DDDDD EEEEE "
    assert some.score(made_up, many + " ".join(made_up.wanted)) == 0.0
    # Saying one thing twice takes nothing away.
    assert some.score(made_up, " ".join(made_up.wanted[:1] * 9) + part) < 1
    again = " ".join([*made_up.wanted[:1] * 9, *made_up.wanted])
    assert some.score(made_up, again) == 1.0


@pytest.mark.parametrize("kind", TASKS)
def test_no_key_or_value_comes_twice(kind):
  for seed in range(20):
    facts = example(kind, seed).facts
    keys, values = zip(*facts, strict=True)
    assert len(set(values)) == len(values)
    assert len(set(keys)) == (1 if kind == "values" else len(keys))


class Tells:
  """A filler that knows all facts of a seed, and says them."""

  def __init__(self, facts):
    self.facts = facts

  def lines(self, rng):
    while True:
      for name, number in self.facts:
        yield f"as I said, {name}\n"
        yield f"it was {number}?\n"
        yield "# The passkey of nobody is 7.\n"
        yield "VAR X = 3\n"
        yield "nothing\n"


@pytest.mark.parametrize("kind", TASKS)
def test_the_filler_never_tells(kind):
  facts = example(kind).facts
  told = example(kind, filler=Tells(facts))
  assert told.facts == facts
  some = task(kind)
  rest = told.prompt[: told.prompt.rindex("\n# Question")]
  for name, number in facts:
    line = some.needle.format(name=name, number=number)
    assert rest.count(line) == 1
    rest = rest.replace(line, "")
  # What is left is cut off somewhere.
  other = (
    {"VAR X = 3"}
    if "VAR" not in some.needle
    else {"# The passkey of nobody is 7."}
  )
  *whole, last = rest.split("\n")
  assert set(whole) - {""} == {"nothing", *other}
  assert any(line.startswith(last) for line in ("nothing", *other))


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASKS)
def test_what_is_learned_is_the_answer(kind):
  some, made_up = task(kind), example(kind)
  ids, weights = some.training(made_up)
  assert ids.dtype == np.int32 and weights.dtype == np.float32
  prompt = Bytes().encode(made_up.prompt, bos=True)
  assert ids[: len(prompt)].tolist() == prompt.tolist()
  assert not weights[: len(prompt)].any()
  assert (weights[len(prompt) :] == 1).all()
  assert ids[len(prompt) :].tolist() == [*made_up.answer.encode(), 257]


@pytest.mark.parametrize("name", ["llama3", "qwen", "gemma", "llama2"])
def test_what_is_learned_follows_the_prompt(tokenizers, name):
  tokenizer = tokenizers[name]
  some = task("keys", tokenizer)
  made_up = example("keys", length=900, tokenizer=tokenizer)
  ids, weights = some.training(made_up)
  start = int(np.argmax(weights))
  assert weights[start:].all() and not weights[:start].any()
  said = tokenizer.decode(ids[start:])
  assert said.strip() == made_up.answer.strip()
  assert (ids[-1] in tokenizer.eos_ids) == bool(tokenizer.eos_ids)


class Joins(Bytes):
  """Bytes, of which a colon and a space are one; it counts what it reads."""

  def __init__(self):
    super().__init__()
    self.texts = 0

  def encode(self, text, **more):
    self.texts += 1
    ids = super().encode(text, **more)
    colon = np.flatnonzero((ids[:-1] == ord(":")) & (ids[1:] == ord(" ")))
    ids[colon] = 300
    return np.delete(ids, colon + 1)


def test_a_token_of_prompt_and_answer_is_learned():
  tokenizer = Joins()
  made_up = example("passkey", tokenizer=tokenizer, length=900)
  ids, weights = task("passkey", tokenizer).training(made_up)
  start = int(np.argmax(weights))
  assert len(ids) == 900 and ids[start] == 300 and weights[start:].all()
  assert ids[start + 1 :].tolist() == [*made_up.answer[1:].encode(), 257]


def test_few_encodings_find_the_length():
  tokenizer = Joins()
  example("passkey", tokenizer=tokenizer, length=50_000)
  assert tokenizer.texts <= 3


@pytest.mark.parametrize("keys", [1, 3])
def test_the_small_model_was_trained_on_this(keys):
  """The same words in the same order as in ringjax.data.tasks.recall."""
  some = MultiKey(tokenizer=Bytes(), filler=FILLER, keys=keys)
  made_up = some.make(np.random.default_rng(2), 3000, 0.4)
  ids, _ = some.training(made_up)
  assert ids[0] == 256 and ids[-1] == 257 and len(ids) == 3000
  text = bytes(ids[1:-1].astype(np.uint8)).decode()
  (name, number), *_ = made_up.facts
  end = tiny.QUESTION.format(name=name) + tiny.ANSWER.format(
    name=name, number=number
  )
  assert text.endswith(end)
  body = text.removesuffix(end)
  for n, v in made_up.facts:
    line = tiny.NEEDLE.format(name=n, number=v)
    assert line in body.splitlines(keepends=True)
    body = body.replace(line, "")
    assert re.fullmatch("[a-z]{3,10}", n) and re.fullmatch(r"\d{4,6}", v)
  assert body in FILLER.text * 2


def test_practice_is_a_source_of_the_loader():
  practice = TaskExamples(task=task("passkey"), length=600, shortest=250)
  loader = Loader(practice, length=600, batch=8, seed=1)
  with loader:
    batch = next(loader)
  lengths = (batch.segments > 0).sum(1)
  assert len(set(lengths.tolist())) > 1
  for row in range(8):
    for number in range(1, batch.segments[row].max() + 1):
      at = batch.segments[row] == number
      text = Bytes().decode(batch.tokens[row][at])
      learned = batch.labels[row][at][batch.weights[row][at] > 0]
      assert learned[-1] == 257
      prompt, _, answer = text.rpartition("# Answer:")
      assert Bytes().decode(learned) == answer
      assert look_up(prompt + "# Answer:") in answer


# ---------------------------------------------------------------------------
# Fillers
# ---------------------------------------------------------------------------


def take(filler, count, seed=0):
  lines = filler.lines(np.random.default_rng(seed))
  return list(itertools.islice(lines, count))


def test_lines_go_round():
  text = "a\n\nb\x0cc\u2028d\r\ne"
  lines = ["a\n", "\n", "b\x0cc\u2028d\r\n", "e\n"]
  starts = set()
  for seed in range(20):
    found = take(Lines(text=text), 12, seed)
    at = lines.index(found[0])
    starts.add(at)
    assert found == (lines * 4)[at : at + 12]
  assert starts == {0, 1, 2, 3}


def test_the_library_is_what_python_brings():
  filler = Library(characters=60_000)
  found = take(filler, 3000)
  assert len(set(found)) > 500 and found == take(filler, 3000)
  assert sysconfig.get_paths()["stdlib"] not in "".join(found)
  assert take(filler, 9, 1) != found[:9]


def test_documents_of_ids():
  texts = ["one\ntwo", "", "three\n"]
  source = Documents([[*t.encode(), 257] for t in texts])
  found = take(Decoded(source=source, tokenizer=Bytes()), 200)
  assert set(found) == {"one\n", "two\n", "three\n"}
  for i, line in enumerate(found[:-1]):
    assert line != "one\n" or found[i + 1] == "two\n"
  empty = Decoded(source=Documents([[257]]), tokenizer=Bytes())
  with pytest.raises(DataError, match="documents without text"):
    take(empty, 1)


def test_a_text_grows_and_does_not_change():
  text = TextWithout(iter(["ab\n", "x1\n", "cd\n", "1\n", "ef\n"]), ["1"])
  assert [text.first(n) for n in (0, 2, 5, 1, 9)] == [
    "",
    "ab",
    "ab\ncd",
    "a",
    "ab\ncd\nef\n",
  ]
  with pytest.raises(DataError, match="no more than 9 characters without"):
    text.first(10)
  with pytest.raises(DataError, match="filler: got no more than 0"):
    TextWithout(itertools.repeat("1\n"), ["1"]).first(1)


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    (lambda: example("passkey", depth=1.5), OptionError, "depth: got 1.5"),
    (lambda: example("passkey", depth=float("nan")), OptionError, "depth"),
    (lambda: example("passkey", length=0), OptionError, "length: got 0"),
    (lambda: MultiKey(tokenizer=0, keys=0), OptionError, "got 0 values"),
    (lambda: MultiKey(tokenizer=0, keys=9, digits=1), OptionError, "digits"),
    (lambda: Passkey(tokenizer=0, digits=0), OptionError, "of 0 digits"),
    (lambda: MultiValue(tokenizer=0, values=0), OptionError, "got 0 values"),
    (lambda: VariableTracking(tokenizer=0, hops=-1), OptionError, "hops"),
    (lambda: Lines(text=""), DataError, "text: got no text"),
  ],
)
def test_errors(call, error, words, unchecked):
  with pytest.raises(error, match=words):
    call()

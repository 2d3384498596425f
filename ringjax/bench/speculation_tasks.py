"""Prompts of six kinds in the shape of Spec-Bench, made from seeds.

Guarantees: a prompt is a function of its kind, length and seed, and exactly
`length` tokens long. Its text is Python's standard library and what
`ringjax.data` hides in it; nothing is downloaded.

| kind | a perfect answer |
|---|---|
| `chat` | fills in a template that earlier turns of the text filled in |
| `translation` | copies lines with some of their words replaced |
| `summary` | quotes the first lines of a passage |
| `questions` | names the number that a line of the text gives |
| `math` | says sums that the text has, in another order |
| `retrieval` | quotes one of several passages by its name |
| `document` | goes on with a passage that a long text has near its end |

Ref: Xia et al. 2024 (Spec-Bench, arXiv 2401.07851), whose six kinds of tasks
these are modelled on; their texts are other ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringjax.data.filler import Library
from ringjax.data.recall import Questions
from ringjax.data.recall_tasks import PASSAGE, PASSAGE_QUESTION, Records

KINDS = ("chat", "translation", "summary", "questions", "math", "retrieval")
# Characters of a passage, between it and the question, and of an answer that
# a prompt has already.
_PASSAGE, _BETWEEN, _BEGUN = 240, 200, 12


class _Words:
  """The library's lines that have words, without their indentation.

  A small model that has read spaces writes spaces, and nothing else.
  """

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    for line in Library().lines(rng):
      line = line.strip()[:60].rstrip()
      if len(re.findall(r"[a-z]{3,}", line)) > 2:
        yield line + "\n"


_FILLER = _Words()


def prompt(kind: str, tokenizer: Any, length: int, seed: int = 0) -> np.ndarray:
  """A prompt of a kind, int32 [length].

  Args:
    kind: one of `KINDS`, or "document".
    tokenizer: a `Tokenizer` or `Bytes`.
    length: its tokens.
    seed: of what is drawn.
  """
  rng = np.random.default_rng([seed, length])
  ids = _KINDS[kind](tokenizer, rng, length)
  return ids[-length:]


def _filled(
  tokenizer: Any, rng: np.random.Generator, length: int, text: str
) -> np.ndarray:
  """Lines of the library, `length` tokens of them at least, before a text."""
  end = tokenizer.encode(text, bos=False)
  before, lines = "", _FILLER.lines(rng)
  parts: list[str] = []
  while True:
    # A token is a character at least.
    while sum(map(len, parts)) < length:
      parts.append(next(lines))
    before = "".join(parts) + before
    ids = tokenizer.encode(before, bos=False)
    if len(ids) + len(end) >= length:
      return np.concatenate([ids, end])
    parts = []


def _text(rng: np.random.Generator, characters: int) -> str:
  """Different lines, about so many characters."""
  found: dict[str, None] = {}
  for line in _FILLER.lines(rng):
    found[line] = None
    if sum(map(len, found)) >= characters:
      break
  return "".join(found)


def _chat(tokenizer: Any, rng: np.random.Generator, length: int) -> np.ndarray:
  source = Records(
    tokenizer=tokenizer,
    filler=_FILLER,
    length=max(length, 700) * 5 // 4,
    preamble=120,
    fields=3,
  )
  ids, _ = source.example(rng)
  # What is left out at the end is an answer.
  return ids[: max(length, len(ids) * 4 // 5)]


def _translation(
  tokenizer: Any, rng: np.random.Generator, length: int
) -> np.ndarray:
  """Pairs of a line and its translation; the last one is missing."""
  text = _text(rng, 2 * _PASSAGE)
  words = sorted(set(re.findall(r"[a-z]{4,}", text)))
  chosen = rng.permutation(len(words))[: max(1, len(words) // 6)]
  other = {words[i]: words[i][::-1].capitalize() for i in chosen}
  said = lambda line: re.sub(
    r"[a-z]{4,}", lambda m: other.get(m[0], m[0]), line
  )
  shown = "".join(
    f"# Source:\n{line}\n# Target:\n{said(line)}\n"
    for line in text.splitlines()
  )
  last = "".join(text.splitlines(True)[:4])
  asked = f"# Source:\n{last}# Target:\n{said(last)[:_BEGUN]}"
  return _filled(tokenizer, rng, length, shown + asked)


def _summary(
  tokenizer: Any, rng: np.random.Generator, length: int
) -> np.ndarray:
  """Texts, each with its first lines as a summary; the last one is missing."""
  shown = ""
  for n in range(3):
    text = _text(rng, _PASSAGE)
    first = "".join(text.splitlines(True)[:3])
    first = first if n < 2 else first[:_BEGUN]
    shown += f"# Text:\n{text}# Summary:\n{first}"
  return _filled(tokenizer, rng, length, shown)


def _questions(
  tokenizer: Any, rng: np.random.Generator, length: int
) -> np.ndarray:
  source = Questions(
    tokenizer=tokenizer,
    filler=_FILLER,
    length=max(length + 200, 600),
    facts=4,
    questions=1,
    text=0.0,
  )
  ids, weights = source.example(rng)
  # Nothing but the answer has a weight.
  return ids[: int(np.flatnonzero(weights)[0])]


def _math(tokenizer: Any, rng: np.random.Generator, length: int) -> np.ndarray:
  pairs = {tuple(pair) for pair in rng.integers(10, 1000, (12, 2)).tolist()}
  sums = [f"# {a} + {b} = {a + b}\n" for a, b in sorted(pairs)]
  order = rng.permutation(len(sums)).tolist()
  again = "".join(sums[n] for n in order[:4])
  first = sums[order[4]].split("=")[0]
  text = "".join(sums) + _text(rng, _BETWEEN) + f"{again}{first}="
  return _filled(tokenizer, rng, length, text)


def _retrieval(
  tokenizer: Any, rng: np.random.Generator, length: int
) -> np.ndarray:
  names = [f"{letter}{rng.integers(10, 100)}" for letter in "KMR"]
  texts = [_text(rng, _PASSAGE) for _ in names]
  at = int(rng.integers(len(names)))
  passages = "".join(
    PASSAGE.format(name=name, text=text)
    for name, text in zip(names, texts, strict=True)
  )
  begun = texts[at][:_BEGUN]
  question = PASSAGE_QUESTION.format(name=names[at]) + begun
  return _filled(tokenizer, rng, length, passages + question)


def _document(
  tokenizer: Any, rng: np.random.Generator, length: int
) -> np.ndarray:
  passage = _text(rng, 1000)
  between = _text(rng, _BETWEEN)
  text = f"{passage}{between}{passage[: len(passage) // 4]}"
  return _filled(tokenizer, rng, length, text)


_KINDS: dict[str, Callable[[Any, np.random.Generator, int], np.ndarray]] = {
  "chat": _chat,
  "translation": _translation,
  "summary": _summary,
  "questions": _questions,
  "math": _math,
  "retrieval": _retrieval,
  "document": _document,
}

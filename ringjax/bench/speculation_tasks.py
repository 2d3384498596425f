"""Prompts of kinds in the shape of Spec-Bench, made from seeds.

Guarantees: a prompt is a function of its kind, length and seed, and exactly
`length` tokens long. Its text is Python's standard library with facts that
`ringjax.data` hides in it; nothing is downloaded.

| kind | a perfect answer |
|---|---|
| `chat` | fills in a template that earlier turns of the text filled in |
| `translation` | copies lines with some of their words replaced |
| `summary` | quotes the first lines of a passage |
| `questions` | names the number that a line of the text gives |
| `math` | repeats sums of the text, in another order |
| `retrieval` | quotes one of several passages by its name |
| `prose` | continues a text that repeats nothing |
| `document` | continues a passage that a long text has near its end |

Ref: Xia et al. 2024 (Spec-Bench, arXiv 2401.07851), on whose six kinds of
tasks the first six are modelled; the texts differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from ringjax.data.tasks.filler import Library
from ringjax.data.tasks.recall import Questions
from ringjax.data.tasks.recall_tasks import PASSAGE, PASSAGE_QUESTION, Records
from ringjax.data.text.bytelevel import Bytes
from ringjax.data.text.tokenizer import Tokenizer

KINDS = ("chat", "translation", "summary", "questions", "math", "retrieval")
# Text in which drafts find nothing to copy.
PROSE = "prose"
# Characters of a passage, of the text between it and the question, and of the
# answer's beginning that is part of the prompt.
_PASSAGE, _BETWEEN, _BEGUN = 240, 200, 12


class _Words:
  """Lines of the library that have words, without their indentation.

  After indented lines a small model generates only spaces.
  """

  def lines(self, rng: np.random.Generator) -> Iterator[str]:
    for line in Library().lines(rng):
      line = line.strip()[:60].rstrip()
      if len(re.findall(r"[a-z]{3,}", line)) > 2:
        yield line + "\n"


_FILLER = _Words()


def prompt(
  kind: str, tokenizer: Tokenizer | Bytes, length: int, seed: int = 0
) -> Int[np.ndarray, " T"]:
  """Creates a prompt of a kind, int32 [length].

  Args:
    kind: Kind of task, of `KINDS`, `PROSE` or "document".
    tokenizer: A `Tokenizer` or `Bytes`.
    length: Number of tokens of the prompt.
    seed: Random seed.
  """
  rng = np.random.default_rng([seed, length])
  ids = _KINDS[kind](tokenizer, rng, length)
  return ids[-length:]


def _filled(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int, text: str
) -> np.ndarray:
  """Puts lines of the library before a text, for `length` tokens or more."""
  end = tokenizer.encode(text, bos=False)
  prefix, lines = "", _FILLER.lines(rng)
  parts: list[str] = []
  while True:
    # A token has at least one character.
    while sum(map(len, parts)) < length:
      parts.append(next(lines))
    prefix = "".join(parts) + prefix
    ids = tokenizer.encode(prefix, bos=False)
    if len(ids) + len(end) >= length:
      return np.concatenate([ids, end])
    parts = []


def _text(rng: np.random.Generator, characters: int) -> str:
  """Draws different lines of at least `characters` in all."""
  unique_lines: dict[str, None] = {}
  for line in _FILLER.lines(rng):
    unique_lines[line] = None
    if sum(map(len, unique_lines)) >= characters:
      break
  return "".join(unique_lines)


def _chat(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
) -> np.ndarray:
  source = Records(
    tokenizer=tokenizer,
    filler=_FILLER,
    length=max(length, 700) * 5 // 4,
    preamble=120,
    fields=3,
  )
  ids, _ = source.example(rng)
  # The part that is cut off at the end is the answer.
  return ids[: max(length, len(ids) * 4 // 5)]


def _translation(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
) -> np.ndarray:
  """Pairs of a line and its translation; the last translation is missing."""
  text = _text(rng, 2 * _PASSAGE)
  words = sorted(set(re.findall(r"[a-z]{4,}", text)))
  chosen = rng.permutation(len(words))[: max(1, len(words) // 6)]
  translations = {words[i]: words[i][::-1].capitalize() for i in chosen}
  translate = lambda line: re.sub(
    r"[a-z]{4,}", lambda m: translations.get(m[0], m[0]), line
  )
  examples = "".join(
    f"# Source:\n{line}\n# Target:\n{translate(line)}\n"
    for line in text.splitlines()
  )
  last = "".join(text.splitlines(True)[:4])
  unfinished = f"# Source:\n{last}# Target:\n{translate(last)[:_BEGUN]}"
  return _filled(tokenizer, rng, length, examples + unfinished)


def _summary(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
) -> np.ndarray:
  """Texts and their first lines as summaries; the last summary is missing."""
  examples = ""
  for n in range(3):
    text = _text(rng, _PASSAGE)
    first = "".join(text.splitlines(True)[:3])
    first = first if n < 2 else first[:_BEGUN]
    examples += f"# Text:\n{text}# Summary:\n{first}"
  return _filled(tokenizer, rng, length, examples)


def _questions(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
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
  # Only tokens of the answer have a weight.
  return ids[: int(np.flatnonzero(weights)[0])]


def _math(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
) -> np.ndarray:
  pairs = {tuple(pair) for pair in rng.integers(10, 1000, (12, 2)).tolist()}
  sums = [f"# {a} + {b} = {a + b}\n" for a, b in sorted(pairs)]
  order = rng.permutation(len(sums)).tolist()
  repeated = "".join(sums[n] for n in order[:4])
  first = sums[order[4]].split("=")[0]
  text = "".join(sums) + _text(rng, _BETWEEN) + f"{repeated}{first}="
  return _filled(tokenizer, rng, length, text)


def _retrieval(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
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


def _prose(tokenizer: Any, rng: np.random.Generator, length: int) -> np.ndarray:
  return _filled(tokenizer, rng, length, _text(rng, _BETWEEN)[:_BETWEEN])


def _document(
  tokenizer: Tokenizer | Bytes, rng: np.random.Generator, length: int
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
  PROSE: _prose,
  "document": _document,
}

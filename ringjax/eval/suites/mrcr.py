"""OpenAI's MRCR (Vodrahalli et al. 2024, arXiv 2409.12640): the n-th request.

A chat has several requests that are equal but for their order; the last message
asks for the answer to one of them, after a random text. A score is the ratio
of `difflib.SequenceMatcher` of both texts without that text, 0 where it is
missing.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator

from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError
from ringjax.eval.suites.question import (
  LongQuestion,
  Suite,
  field,
  files_of,
  json_value,
  length_bin,
  rows_of,
)
from ringjax.paths import as_path

# Tokens of an answer beyond those of the correct one.
_MORE_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mrcr(Suite):
  """MRCR's .parquet files, or the same rows as .jsonl.

  A length is the power of two that tokens of messages and answer fit into, by
  the model's tokenizer; the benchmark counts those of o200k_base.
  """

  def questions(self, tokenizer: AnyTokenizer) -> Iterator[LongQuestion]:
    root = as_path(self.path)
    pattern = "*.parquet"
    if root.is_dir() and not any(root.rglob(pattern)):
      pattern = "*.jsonl"
    for path in files_of(root, pattern):
      for n, (place, row) in enumerate(rows_of(path)):
        prompt = field(row, "prompt", (str, list), place)
        if isinstance(prompt, str):
          prompt = json_value(prompt, f"{place}: prompt")
        messages = _messages(prompt, place)
        answer = field(row, "answer", str, place)
        start = field(row, "random_string_to_prepend", str, place)
        needles = field(row, "n_needles", int, place)
        answer_tokens = len(tokenizer.encode(answer))
        tokens = answer_tokens + sum(
          len(tokenizer.encode(x["content"])) for x in messages
        )
        yield LongQuestion(
          id=f"{path.stem}/{n}",
          task=f"{needles} needles",
          history=tuple(messages[:-1]),
          context="",
          closing=messages[-1]["content"],
          answers=(answer,),
          max_new_tokens=answer_tokens + _MORE_TOKENS,
          length=length_bin(tokens),
          details={"start": start},
        )

  def score(self, question: LongQuestion, completion: str) -> float:
    start = question.details["start"]
    if not completion.startswith(start):
      return 0.0
    answer = question.answers[0].removeprefix(start)
    text = completion.removeprefix(start)
    return difflib.SequenceMatcher(None, text, answer).ratio()


def _messages(prompt: object, place: str) -> list[dict[str, str]]:
  """Messages with text, of which the last is the user's."""
  messages = prompt if isinstance(prompt, list) else []
  has_texts = all(
    isinstance(message, dict)
    and isinstance(message.get("role"), str)
    and isinstance(message.get("content"), str)
    for message in messages
  )
  if not messages or not has_texts or messages[-1]["role"] != "user":
    raise DataError(
      f"{place}: prompt",
      f"{prompt!r}"[:60],
      'messages with "role" and "content", the last one the user\'s',
      "pass a file of OpenAI's MRCR, as it is published",
    )
  return [{"role": x["role"], "content": x["content"]} for x in messages]

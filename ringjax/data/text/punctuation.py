"""Punctuation tokens of a tokenizer, for `rj.kv.FastGen`."""

from __future__ import annotations

import unicodedata

from ringjax.data.text.bytelevel import Bytes
from ringjax.data.text.tokenizer import Tokenizer


def punctuation_ids(tokenizer: Tokenizer | Bytes) -> tuple[int, ...]:
  """Ids of the tokens that are punctuation and nothing else, in order.

  Spaces around it do not count, so ". " and " ?" are punctuation. Symbols
  ("+", "$", "<") and special tokens are not punctuation.

  Args:
    tokenizer: Tokenizer of the model.
  """
  return tuple(
    n
    for n in range(tokenizer.vocab_size)
    if not tokenizer.is_special(n) and _is_punctuation(tokenizer.window([n]))
  )


def _is_punctuation(text: str) -> bool:
  marks = text.strip()
  return bool(marks) and all(unicodedata.category(c)[0] == "P" for c in marks)

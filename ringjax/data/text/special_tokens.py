"""Special tokens, and where they are in a text that is trusted.

Guarantees: `split` cuts a text as the tokenizers library does: at the leftmost
and then longest token; a token that strips includes the white space next to it.
It is only called with text that may contain such tokens (a template, a
caller's own text with `special=True`), never with a user's text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Array, Int

from ringjax.errors import InputTypeError, PromptError

_INT32 = 2**31

# A row of token ids.
TokenIds = Int[Array | np.ndarray, " _"] | Sequence[int | np.integer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialToken:
  """A token that steers a model; plain text is never encoded as it.

  Attributes:
    text: Text of the token.
    id: Id of the token.
    lstrip, rstrip: Whether it includes white space before it, after it.
  """

  text: str
  id: int
  lstrip: bool = False
  rstrip: bool = False


class Specials:
  """The special tokens of one tokenizer."""

  def __init__(self, tokens: Iterable[SpecialToken]):
    # A token of white space only would match plain text: it is never special.
    self.by_text = {t.text: t for t in tokens if t.text.strip()}
    self.ids = frozenset(t.id for t in self.by_text.values())

  @functools.cached_property
  def pattern(self) -> re.Pattern[str]:
    """Matches the leftmost and then longest of the tokens."""
    return any_of(self.by_text)

  def split(self, text: str) -> list[str | int]:
    """The text between special tokens, and their ids; no text is empty."""
    parts: list[str | int] = []
    start, strip = 0, False
    for match in self.pattern.finditer(text):
      token = self.by_text[match.group()]
      text_before = text[start : match.start()]
      text_before = text_before.lstrip() if strip else text_before
      text_before = text_before.rstrip() if token.lstrip else text_before
      parts += [text_before, token.id] if text_before else [token.id]
      start, strip = match.end(), token.rstrip
    text_after = text[start:].lstrip() if strip else text[start:]
    return [*parts, text_after] if text_after else parts


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
  """Matches the leftmost and then longest of some texts; without any, nothing.

  Texts of white space only do not count.
  """
  longest_first = sorted({t for t in texts if t.strip()}, key=lambda t: -len(t))
  return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def as_text(name: str, text: str) -> str:
  """`text` as a str that has a UTF-8 form, or an error that names it."""
  if not isinstance(text, str):
    raise InputTypeError(
      name, type(text).__name__, "a str", "decode bytes first"
    )
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise PromptError(
      name,
      f"a lone surrogate {text[error.start]!r} at character {error.start}",
      "text that has a UTF-8 form",
      "read the text with errors='replace'",
    ) from None
  return text


def as_ids(name: str, ids: object) -> list[int]:
  """`ids` as a list of token ids, or an error that names the first bad one."""
  flat = np.asarray(ids)
  if flat.size == 0:
    return []
  if flat.ndim > 1 or flat.dtype.kind not in "iu":
    raise InputTypeError(
      name,
      f"{flat.dtype} of shape {flat.shape}",
      "one id or a row of ids",
      "decode the rows of a batch one by one",
    )
  flat = flat.reshape(-1)
  out_of_range = (flat < 0) | (flat >= _INT32)
  if out_of_range.any():
    at = int(np.argmax(out_of_range))
    raise PromptError(
      name,
      f"id {int(flat[at])} at position {at}",
      f"ids from 0 to {_INT32 - 1}",
      "cut off the padding",
    )
  return flat.tolist()


def joined(parts: Sequence[Int[np.ndarray, " ..."]]) -> Int[np.ndarray, " T"]:
  """Concatenated rows of ids, int32."""
  return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)

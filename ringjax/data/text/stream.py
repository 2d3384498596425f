"""Incremental decoding: the text of tokens that come one by one.

Guarantees: the texts that `feed` and `flush` return, joined, are `decode` of
all ids, however they are cut into feeds; each text is returned as soon as no
later token can change it. Characters whose bytes are in several tokens are held
until they are complete; bytes that are not UTF-8 become U+FFFD.
Cost: one look-up a token, or two decodes of a few tokens.

In most vocabularies a token *is* a string of bytes, and the text is their UTF-8
(`piece`). In others (WordPiece, Metaspace) the text of a token depends on the
one before: there the stream decodes from that one on again.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ringjax.data.text.special_tokens import TokenIds, as_ids

# An id without a token, or a byte that is not part of a character.
UNKNOWN = "\ufffd"
# The longest character has 4 bytes, so up to 4 tokens may be incomplete.
_WAIT = 4


@runtime_checkable
class Decodes(Protocol):
  """The methods of a tokenizer that a stream needs."""

  # Whether `piece` can be used: a token's bytes do not depend on others.
  by_bytes: bool
  # Removed from the start of a text.
  lead: str

  def piece(self, token_id: int) -> bytes:
    """The bytes of one token."""
    ...

  def is_special(self, token_id: int) -> bool:
    """Whether the token is a control token and not text."""
    ...

  def window(self, ids: Sequence[int]) -> str:
    """The text of a few tokens, special or not."""
    ...


def decode(tokenizer: Decodes, ids: TokenIds, *, special: bool = False) -> str:
  """The text of all ids at once; the reference for `Stream`."""
  row = as_ids("ids", ids)
  if not special:
    row = [i for i in row if not tokenizer.is_special(i)]
  if not tokenizer.by_bytes:
    return tokenizer.window(row)
  data = b"".join(map(tokenizer.piece, row))
  return data.decode("utf-8", "replace").removeprefix(tokenizer.lead)


class Stream:
  """An incremental decoder of tokens.

  Args:
    tokenizer: Tokenizer that made the tokens.
    special: Whether the texts of special tokens appear. By default they are
      left out, as by `tokenizer.decode`.
  """

  def __init__(self, tokenizer: Decodes, *, special: bool = False):
    self._tokenizer = tokenizer
    self._special = special
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    self._at_start = True
    # If tokens depend on others: tokens whose text was returned, and tokens
    # whose text was not.
    self._context: list[int] = []
    self._pending: list[int] = []

  def copy(self) -> Stream:
    """A stream with the same state, which continues independently."""
    stream = copy.copy(self)
    stream._utf8, stream._pending = copy.copy(self._utf8), [*self._pending]
    return stream

  def feed(self, ids: TokenIds | int | np.integer) -> str:
    """The text that these ids complete; may be empty.

    Args:
      ids: One id, or a row of them.

    Raises:
      PromptError, InputTypeError: If they are not token ids.
    """
    row = as_ids("ids", ids)
    if not self._special:
      row = [i for i in row if not self._tokenizer.is_special(i)]
    if self._tokenizer.by_bytes:
      data = b"".join(map(self._tokenizer.piece, row))
      return self._without_lead(self._utf8.decode(data))
    return "".join(self._step(i) for i in row)

  def flush(self) -> str:
    """The rest of the text after the last token; resets the stream."""
    if self._tokenizer.by_bytes:
      text = self._without_lead(self._utf8.decode(b"", final=True))
    else:
      text = self._new_text()
    self._utf8.reset()
    self._at_start, self._context, self._pending = True, [], []
    return text

  def _without_lead(self, text: str) -> str:
    if not self._at_start or not text:
      return text
    self._at_start = False
    return text.removeprefix(self._tokenizer.lead)

  def _step(self, token_id: int) -> str:
    self._pending.append(token_id)
    text = self._new_text()
    if text.endswith(UNKNOWN) and len(self._pending) < _WAIT:
      return ""
    # The next token is decoded after one that has a text: alone it would be
    # decoded as the start of a text.
    if self._tokenizer.window(self._pending):
      self._context = self._pending
    else:
      self._context = self._context + self._pending
    self._pending = []
    return text

  def _new_text(self) -> str:
    context_text = self._tokenizer.window(self._context)
    whole_text = self._tokenizer.window(self._context + self._pending)
    return whole_text[len(context_text) :]

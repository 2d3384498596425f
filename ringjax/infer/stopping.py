"""Stop conditions: the end of an answer, and the part of its text to show.

Guarantees: the text that `Watch.feed` and `Watch.flush` return, joined, is the
text of the tokens up to the first stop: before the stop id, or before the stop
string that is complete first (of those, the longest). It does not depend on how
the text is divided into tokens, nor the tokens into feeds. Stop strings are
searched in all generated text, texts of special tokens included, whether these
are shown or not. Text that may begin a stop string is held back until it is
known not to.
Cost: on the host, a search in the new text and the longest stop string.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.checks import boolean
from ringjax.data.text.special_tokens import TokenIds, as_ids
from ringjax.data.text.stream import Decodes, Stream
from ringjax.errors import InputTypeError, PromptError

_STRINGS = 128
_CHARS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """Stop ids and stop strings that end an answer.

  Attributes:
    ids: Token ids that end it, such as `tokenizer.eos_ids`.
    strings: Texts that end it, wherever tokens begin and end; those of special
      tokens too.
    included: Whether the answer's text includes the string, or the text of the
      id, that ended it.
    special: Whether the answer's text includes the texts of special tokens.

  Raises:
    PromptError: If an id is out of range, a text is empty, or there are too
      many of them.
    InputTypeError: If a value is neither id nor text, or a flag is no bool.
  """

  ids: tuple[int, ...] = ()
  strings: tuple[str, ...] = ()
  included: bool = False
  special: bool = False

  def __post_init__(self) -> None:
    ids = tuple(dict.fromkeys(as_ids("ids", _as_tuple("ids", self.ids))))
    object.__setattr__(self, "ids", ids)
    strings = _as_tuple("strings", self.strings)
    valid = all(
      isinstance(string, str) and 0 < len(string) <= _CHARS
      for string in strings
    )
    if not valid or len(strings) > _STRINGS:
      raise PromptError(
        "strings",
        strings,
        f"at most {_STRINGS} texts of 1 to {_CHARS} characters",
        "leave out empty texts and all beyond that number",
      )
    object.__setattr__(self, "strings", tuple(dict.fromkeys(strings)))
    for name in ("included", "special"):
      object.__setattr__(self, name, boolean(name, getattr(self, name)))

  def check(self, vocab_size: int) -> None:
    """Raises PromptError for an id beyond a vocabulary of this size."""
    wrong = [token for token in self.ids if token >= vocab_size]
    if wrong:
      raise PromptError(
        "stop ids",
        wrong,
        f"ids below the vocabulary's {vocab_size}",
        "take them from this model's tokenizer",
      )

  def watch(self, tokenizer: Decodes) -> Watch:
    """Begins to watch one row.

    Args:
      tokenizer: Tokenizer of the row's tokens.
    """
    return Watch(self, tokenizer)


# Stop conditions of an answer: ids, texts, both, or a `Stop`.
StopLike = (
  Stop | str | int | np.integer | Iterable[int | np.integer | str] | None
)


def as_stop(stop: StopLike) -> Stop:
  """Convert ids, texts, both, or a `Stop` to a `Stop`.

  Raises:
    InputTypeError, PromptError: If a value is not a valid id or text.
  """
  if isinstance(stop, Stop):
    return stop
  conditions = () if stop is None else _as_tuple("stop", stop)
  texts = tuple(text for text in conditions if isinstance(text, str))
  ids = tuple(token for token in conditions if not isinstance(token, str))
  int_types = (numbers.Integral, np.ndarray, jax.Array)
  wrong = [
    token
    for token in ids
    if not isinstance(token, int_types) or isinstance(token, bool)
  ]
  if wrong:
    raise _not_a_stop("stop", wrong[0])
  return Stop(ids=tuple(as_ids("stop", ids)), strings=texts)


def check_tokenizer(tokenizer: Any) -> None:
  """Refuses a tokenizer that cannot turn tokens into text one by one.

  Raises:
    InputTypeError: If it lacks a method that `ringjax.data.Stream` calls.
  """
  if not isinstance(tokenizer, Decodes):
    raise InputTypeError(
      "tokenizer",
      f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
      "a tokenizer of ringjax",
      "pass rj.data.Tokenizer.load(folder), which reads tokenizer.json",
    )


def _as_tuple(name: str, given: Any) -> tuple[Any, ...]:
  """Convert one value or several to a tuple."""
  alone = isinstance(given, numbers.Integral | str)
  # NumPy's and JAX's scalars cannot be iterated over.
  if (alone and type(given) is not bool) or getattr(given, "shape", 0) == ():
    return (given,)
  if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray):
    raise _not_a_stop(name, given)
  return tuple(given)


def _not_a_stop(name: str, given: Any) -> InputTypeError:
  return InputTypeError(
    name,
    f"{type(given).__name__} {given!r}",
    "ids, texts, or an rj.infer.Stop",
    "pass ids as ints and texts as str",
  )


class Watch:
  """Finds the end of one row's text as its tokens come; see `Stop.watch`.

  Attributes:
    stopped: Id or string that ended the answer, or None.
    tokens: Number of tokens so far, the last one included.
  """

  def __init__(self, stop: Stop, tokenizer: Decodes):
    self.stopped: int | str | None = None
    self.tokens = 0
    self._stop = stop
    self._ids = frozenset(stop.ids)
    self._tokenizer = tokenizer
    self._stream = Stream(tokenizer, special=stop.special)
    # Text that is held back, and a flag per character: whether to show it.
    self._held, self._shown = "", b""

  def copy(self) -> Watch:
    """Copy the state, to continue the row independently in another way."""
    clone = copy.copy(self)
    clone._stream = self._stream.copy()
    return clone

  def feed(self, ids: TokenIds | int | np.integer) -> str:
    """Add tokens and return the text that may now be shown, maybe "".

    After a stop, tokens are ignored and the text is "".

    Args:
      ids: One token id, or a row of them.

    Raises:
      PromptError, InputTypeError: If a value is no token id.
    """
    shown = []
    for token in as_ids("ids", ids):
      if self.stopped is not None:
        break
      self.tokens += 1
      if token in self._ids:
        if self._stop.included and not self._hidden(token):
          shown.append(self._append(self._stream.feed(token)))
        # Unfinished characters of the tokens before may complete a stop string.
        shown.append(self.flush())
        self.stopped = token if self.stopped is None else self.stopped
      elif self._hidden(token):
        shown.append(self._append(self._tokenizer.window([token]), False))
      else:
        shown.append(self._append(self._stream.feed(token)))
    return "".join(shown)

  def flush(self) -> str:
    """Return the text that was held back, when no more tokens come."""
    if self.stopped is not None:
      return ""
    text = self._append(self._stream.flush())
    return text + self._release(len(self._held))

  def _hidden(self, token: int) -> bool:
    return not self._stop.special and self._tokenizer.is_special(token)

  def _append(self, text: str, shown: bool = True) -> str:
    """Add text to the text held back, and return the part that may be shown."""
    strings = self._stop.strings
    if not strings:
      return text if shown else ""
    self._held += text
    self._shown += bytes([shown]) * len(text)
    match = _first_match(self._held, strings) if text else None
    if match is None:
      return self._release(
        len(self._held) - _partial_match(self._held, strings)
      )
    begin, self.stopped = match
    end = begin + len(self.stopped) if self._stop.included else begin
    seen = self._release(end)
    self._held, self._shown = "", b""
    return seen

  def _release(self, count: int) -> str:
    """Release the first characters held back: return those to show."""
    seen = "".join(itertools.compress(self._held[:count], self._shown))
    self._held, self._shown = self._held[count:], self._shown[count:]
    return seen


def _first_match(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
  """Begin and text of the string that is complete first, then the longest."""
  positions = [(text.find(string), string) for string in strings]
  ends = [
    (begin + len(string), begin, string)
    for begin, string in positions
    if begin >= 0
  ]
  return min(ends)[1:] if ends else None


def _partial_match(text: str, strings: Sequence[str]) -> int:
  """Length of the longest end of `text` that may begin a stop string."""
  longest = 0
  for string in strings:
    sizes = range(min(len(string) - 1, len(text)), longest, -1)
    longest = next((n for n in sizes if text.endswith(string[:n])), longest)
  return longest

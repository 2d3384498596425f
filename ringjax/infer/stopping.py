"""Stop conditions: when an answer is over, and what of it may be shown.

Guarantees: the text that `Watch.feed` and `Watch.flush` return, joined, is the
text of the tokens up to the first stop: before the stop id, or before the stop
string that is complete first (of those, the longest). It does not depend on how
the text is divided into tokens, nor the tokens into feeds. Stop strings are
looked for in all that was generated, the texts of special tokens among it,
whether these are shown or not. What may be the beginning of a stop string is
held back until it is known not to be one.
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
from ringjax.data.special_tokens import TokenIds, as_ids
from ringjax.data.stream import Decodes, Stream
from ringjax.errors import InputTypeError, PromptError

_STRINGS = 128
_CHARS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """Stop ids and stop strings: what ends an answer.

  Attributes:
    ids: tokens that end it, such as `tokenizer.eos_ids`.
    strings: texts that end it, wherever tokens begin and end; those of special
      tokens too.
    included: whether the text of the answer has the string, or the text of the
      id, that ended it.
    special: whether it has the texts of special tokens.

  Raises:
    PromptError: an id out of range, an empty text, or too many of them.
    InputTypeError: neither ids nor texts, or flags that are no bools.
  """

  ids: tuple[int, ...] = ()
  strings: tuple[str, ...] = ()
  included: bool = False
  special: bool = False

  def __post_init__(self) -> None:
    ids = tuple(dict.fromkeys(as_ids("ids", _several("ids", self.ids))))
    object.__setattr__(self, "ids", ids)
    strings = _several("strings", self.strings)
    sound = all(isinstance(s, str) and 0 < len(s) <= _CHARS for s in strings)
    if not sound or len(strings) > _STRINGS:
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
    """Raises PromptError for an id that no model of this size gives."""
    wrong = [i for i in self.ids if i >= vocab_size]
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
      tokenizer: whose tokens come.
    """
    return Watch(self, tokenizer)


# What an answer ends behind: ids, texts, both, or a `Stop`.
StopLike = (
  Stop | str | int | np.integer | Iterable[int | np.integer | str] | None
)


def as_stop(stop: StopLike) -> Stop:
  """The `Stop` that `generate` is asked for: ids, texts, both, or a `Stop`.

  Raises:
    InputTypeError, PromptError: something else.
  """
  if isinstance(stop, Stop):
    return stop
  found = () if stop is None else _several("stop", stop)
  texts = tuple(s for s in found if isinstance(s, str))
  ids = tuple(i for i in found if not isinstance(i, str))
  whole = (numbers.Integral, np.ndarray, jax.Array)
  wrong = [i for i in ids if not isinstance(i, whole) or isinstance(i, bool)]
  if wrong:
    raise _not_a_stop("stop", wrong[0])
  return Stop(ids=tuple(as_ids("stop", ids)), strings=texts)


def check_tokenizer(tokenizer: Any) -> None:
  """Refuses a tokenizer that cannot turn tokens into text one by one.

  Raises:
    InputTypeError: it lacks what `ringjax.data.Stream` asks of it.
  """
  if not isinstance(tokenizer, Decodes):
    raise InputTypeError(
      "tokenizer",
      f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
      "a tokenizer of ringjax",
      "pass rj.data.Tokenizer.load(folder), which reads tokenizer.json",
    )


def _several(name: str, given: Any) -> tuple[Any, ...]:
  """One value or several, as a tuple."""
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
    stopped: the id or the string that ended the answer, or None.
    tokens: how many tokens came, the last one included.
  """

  def __init__(self, stop: Stop, tokenizer: Decodes):
    self.stopped: int | str | None = None
    self.tokens = 0
    self._stop = stop
    self._ids = frozenset(stop.ids)
    self._tokenizer = tokenizer
    self._stream = Stream(tokenizer, special=stop.special)
    # Text that is held back, and of each of its characters whether it is shown.
    self._held, self._shown = "", b""

  def copy(self) -> Watch:
    """One that goes on from here by itself, for another continuation."""
    made = copy.copy(self)
    made._stream = self._stream.copy()
    return made

  def feed(self, ids: TokenIds | int | np.integer) -> str:
    """The text that these ids allow to show, maybe "".

    After a stop, tokens are no longer looked at, and nothing comes.

    Args:
      ids: one id, or a row of them.

    Raises:
      PromptError, InputTypeError: not token ids.
    """
    shown = []
    for token in as_ids("ids", ids):
      if self.stopped is not None:
        break
      self.tokens += 1
      if token in self._ids:
        if self._stop.included and not self._hidden(token):
          shown.append(self._see(self._stream.feed(token)))
        # What the tokens before it left unfinished may hold a stop string.
        shown.append(self.flush())
        self.stopped = token if self.stopped is None else self.stopped
      elif self._hidden(token):
        shown.append(self._see(self._tokenizer.window([token]), False))
      else:
        shown.append(self._see(self._stream.feed(token)))
    return "".join(shown)

  def flush(self) -> str:
    """The text that was held back, when no more tokens come."""
    if self.stopped is not None:
      return ""
    text = self._see(self._stream.flush())
    return text + self._taken(len(self._held))

  def _hidden(self, token: int) -> bool:
    return not self._stop.special and self._tokenizer.is_special(token)

  def _see(self, text: str, shown: bool = True) -> str:
    """What may be shown of the text held back and the new one."""
    strings = self._stop.strings
    if not strings:
      return text if shown else ""
    self._held += text
    self._shown += bytes([shown]) * len(text)
    found = _first(self._held, strings) if text else None
    if found is None:
      return self._taken(len(self._held) - _unsure(self._held, strings))
    begin, self.stopped = found
    end = begin + len(self.stopped) if self._stop.included else begin
    seen = self._taken(end)
    self._held, self._shown = "", b""
    return seen

  def _taken(self, count: int) -> str:
    """What is shown of the first characters held back, which are no longer."""
    seen = "".join(itertools.compress(self._held[:count], self._shown))
    self._held, self._shown = self._held[count:], self._shown[count:]
    return seen


def _first(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
  """Where the string begins that is complete first, the longest of those."""
  found = [(text.find(s), s) for s in strings]
  ends = [(at + len(s), at, s) for at, s in found if at >= 0]
  return min(ends)[1:] if ends else None


def _unsure(text: str, strings: Sequence[str]) -> int:
  """How many of the last characters may be the beginning of a stop string."""
  longest = 0
  for string in strings:
    sizes = range(min(len(string) - 1, len(text)), longest, -1)
    longest = next((n for n in sizes if text.endswith(string[:n])), longest)
  return longest

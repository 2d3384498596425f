"""A conversation with a model, whose cache stays from turn to turn.

Guarantees: the model answers to the whole conversation as the chat template
renders it now, token by token. The cache keeps the longest common prefix with
its contents; only the rest is read. Where a template renders an older turn
differently (reasoning left out), or a text is encoded differently than it was
generated, the cache drops the tokens from there on and reads them again; a
cache that cannot drop tokens is emptied.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import ringjax as rj
from ringjax.data import ChatTemplate, Tokenizer
from ringjax.errors import OptionError, PromptError
from ringjax.infer import Session, Stop
from ringjax.json_text import json_text
from ringjax.models.transformer import Transformer

_ROLES = ("system", "user", "assistant")


class Interrupted(Exception):
  """The user has ended an answer before it began."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """One answer, and the tokens and seconds that it took.

  Attributes:
    text: The answer as it was shown.
    tokens: Ids of the answer.
    cached: Tokens of the conversation that the cache held before.
    read: Tokens that were read for it.
    read_s: Seconds until the first token of the answer.
    answer_s: Seconds from the first token to the last.
    ended: Reason of its end: a stop id or string, "Ctrl-C", "max_new_tokens"
      or "context".
  """

  text: str
  tokens: tuple[int, ...]
  cached: int
  read: int
  read_s: float
  answer_s: float
  ended: int | str


def read_messages(path: str | os.PathLike[str]) -> list[dict[str, str]]:
  """Read the messages of a file that `Conversation.save` wrote.

  Raises:
    PromptError: If the file does not contain messages.
    OSError: If the file cannot be read.
  """
  want = "a JSON list of objects with role and content, as /save writes it"
  fault = lambda got: PromptError(f"{path}", got, want, "pass another file")
  try:
    messages = json.loads(pathlib.Path(path).read_text("utf-8"))
  except ValueError as error:
    raise fault(str(error)) from None
  if not isinstance(messages, list):
    raise fault(type(messages).__name__)
  for n, message in enumerate(messages):
    sound = (
      isinstance(message, dict)
      and set(message) == {"role", "content"}
      and message["role"] in _ROLES
      and isinstance(message["content"], str)
    )
    if not sound:
      raise fault(f"{str(message)[:60]} as message {n}")
  return messages


class Conversation:
  """Messages, and the session that has read them.

  Attributes:
    messages: Roles and contents, as the template takes them.
    session: Session that holds the cache.
  """

  def __init__(
    self,
    model: Transformer,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    session: Session,
    *,
    system: str | None = None,
    stop: Sequence[str] = (),
    max_new_tokens: int = 1024,
    options: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
  ):
    """Begins a conversation with at most a system message.

    Args:
      model: Model that answers.
      tokenizer: Tokenizer of the model.
      template: Chat template that renders the messages.
      session: Empty session of the model, with one row.
      system: System message, or None.
      stop: Texts that end an answer, in addition to the tokenizer's ids.
      max_new_tokens: Longest answer, in tokens.
      options: Further arguments of `rj.infer.generate`.
      now: Date that templates write; default: the current one.
    """
    self.session = session
    self._model, self._tokenizer, self._template = model, tokenizer, template
    self._system, self._most = system, max_new_tokens
    eos = tuple(i for i in tokenizer.eos_ids if i < model.config.vocab)
    self._stop = Stop(ids=eos, strings=tuple(stop))
    self._options = dict(options or {})
    # Templates write the date: the prefix must not change at midnight.
    self._now = datetime.datetime.now() if now is None else now
    self.messages: list[dict[str, str]] = self._first()

  def _first(self) -> list[dict[str, str]]:
    if self._system is None:
      return []
    return [{"role": "system", "content": self._system}]

  def reset(self) -> None:
    """Drops all messages but the system's, and empties the cache."""
    self.messages = self._first()
    self.session.restart()

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the messages as JSON.

    Raises:
      OSError: If the file cannot be written.
    """
    pathlib.Path(path).write_text(f"{json_text(self.messages)}\n", "utf-8")

  def ask(
    self,
    text: str,
    show: Callable[[str], Any],
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], Any] = lambda done, total: None,
  ) -> Turn:
    """Answers a message and adds both to the conversation.

    Args:
      text: Message of the user.
      show: Function that takes the answer's text as it is generated.
      stopped: Function that returns whether the user has ended the answer.
      progress: Function of the tokens that are read and of their total.

    Raises:
      PromptError: If the conversation no longer fits the context; it does not
        change.
      Interrupted: If the user ended it before the answer began; the
        conversation does not change.
    """
    messages = [*self.messages, {"role": "user", "content": text}]
    ids = self._template.tokens(messages, self._tokenizer, now=self._now)
    room = self.session.capacity - len(ids)
    if room < 1:
      raise PromptError(
        "the conversation",
        f"{len(ids):,} tokens with this message",
        f"fewer than the {self.session.capacity:,} of the context",
        "begin anew with /reset, shorten the message, or start with a larger "
        "--context",
      )
    cached = self._keep_common(ids)
    watch = self._stop.watch(self._tokenizer)
    start, times, new, shown = time.monotonic(), [], [], []

    def put(piece: str) -> None:
      shown.append(piece)
      show(piece)

    def stream(row: np.ndarray) -> bool:
      times.append(time.monotonic())
      new.append(int(row[0]))
      put(watch.feed(new[-1]))
      return watch.stopped is not None or stopped()

    def read(done: int) -> None:
      progress(done, len(ids) - cached)
      if stopped():
        raise Interrupted

    count = min(self._most, room)
    rj.infer.generate(
      self._model,
      [ids[cached:]],
      max_new_tokens=count,
      cache=self.session,
      stop=self._stop.ids,
      stream=stream,
      progress=read,
      **self._options,
    )
    put(watch.flush())
    answer = "".join(shown)
    ended = watch.stopped
    if ended is None and len(new) == count and not stopped():
      ended = "max_new_tokens" if count == self._most else "context"
    reply = {"role": "assistant", "content": answer}
    self.messages = [*messages, reply]
    return Turn(
      text=answer,
      tokens=tuple(new),
      cached=cached,
      read=len(ids) - cached,
      read_s=times[0] - start,
      answer_s=times[-1] - times[0],
      ended="Ctrl-C" if ended is None else ended,
    )

  def _keep_common(self, ids: np.ndarray) -> int:
    """Cuts the cache to its common prefix with `ids`; returns its length."""
    session = self.session
    try:
      session.check()
      length = int(session.lengths[0])
      cached = session.ids[0, :length]
      # At least one token is read, whose logits predict the next one.
      limit = min(length, len(ids) - 1)
      differ = np.flatnonzero(cached[:limit] != ids[:limit])
      common = int(differ[0]) if differ.size else limit
      if common < length:
        session.take_back(np.array([True]), np.array([common]))
        # The drafter has read the dropped tokens.
        session.drafting = None
    except OptionError:
      # An interrupted call has lost the cache, or it cannot drop tokens.
      session.restart()
      common = 0
    # A last token that was generated and not read is in `ids` if it is kept.
    session.pending = np.array([-1])
    session.seen[:] = False
    session.seen[0, ids[:common]] = True
    return common

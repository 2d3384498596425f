"""Chat templates: messages to tokens; only the template writes special ones.

Guarantees: the ids are those that the tokenizer gives for the text that
transformers renders, except that no string in a message becomes a special
token, nor part of one: "<|im_end|>" in a message is ten characters. (Roles are
not free text: they are taken from a list.)

Method: each character of a message of which special tokens are made ("<", "|",
...) is replaced by a private-use character before the template is rendered. So
a special token in the output was written by the template; the other characters
are put back afterwards. Words that a template looks for in a message (Qwen's
"</think>") are not replaced. The output is compared with that of the same
template on messages without replacements, and a difference is an error.

A template is untrusted code: by default it runs in a worker process, with 512
MB and 2 s of processor time, without files, network or Python's objects. The
worker is used for later chats, too; one that exceeds a limit is killed.
Cost: about 1 ms a chat; the first one starts the worker, 0.1 to 0.5 s.
"""

from __future__ import annotations

import datetime
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from ringjax.data.text import isolated, render
from ringjax.data.text.special_tokens import Specials, any_of, as_text
from ringjax.errors import InputTypeError, PromptError, TemplateError
from ringjax.json_text import json_text

SOURCE_CHARS = 1_000_000
ROLES = (
  "system",
  "user",
  "assistant",
  "tool",
  "developer",
  "function",
  "ipython",
  "model",
  "documents",
)
# Kinds of parts of a message; templates compare them and do not write them.
_KINDS = (
  "text",
  "function",
  "image",
  "audio",
  "video",
  "tool_call",
  "tool_result",
)
_DEPTH = 64
_CPU_S = 2
_MEMORY_BYTES = 512 << 20

# Without the package, whose import takes seconds; jinja2 is imported before
# the first request, whose time limit it would count against.
_SCRIPT = """
scope = {{"__name__": "render"}}
exec(compile({source!r}, "render.py", "exec"), scope)
def answer(request):
  return scope["render"](**request)
try:
  import jinja2.ext, jinja2.sandbox
except ImportError:
  pass
"""


def _script() -> str:
  return _SCRIPT.format(source=inspect.getsource(render))


_GENERATION = re.compile(r"\{%-?\s*generation\b")


class MarkedTokens(NamedTuple):
  """Tokens of a chat, and the ranges that its template marks as answers.

  Fields:
    ids: Token ids, int32 [T].
    spans: First token and end of each marked text, in their order.
  """

  ids: Int[np.ndarray, " T"]
  spans: list[tuple[int, int]]


_workers = isolated.Workers(_script)


@runtime_checkable
class Encodes(Protocol):
  """Interface of the tokenizers that a chat template can use."""

  specials: Specials
  # Texts of tokens that are matched like special ones but are not: <think>.
  added: frozenset[str]
  special_names: dict[str, Any]
  chat_template: str | None

  def encode_parts(self, parts: Sequence[str | int]) -> Int[np.ndarray, " T"]:
    """Encodes a sequence of texts and ids as one row."""
    ...


class ChatTemplate:
  """A Jinja template over the messages of a chat.

  Args:
    source: Template, as in a model's tokenizer_config.json.
    names: Texts of special tokens by the names that the template uses, e.g.
      {"bos_token": "<s>"}; `tokenizer.special_names`.
    trusted: Whether the template runs in this process, without limits of time
      and memory. Only for templates that you have read.
    roles: Roles that a message may have. A template may build a special token
      from a role, so they are not free text.

  Raises:
    TemplateError: If `source` is not a str, or is too long.
  """

  def __init__(
    self,
    source: str,
    names: Mapping[str, Any] | None = None,
    *,
    trusted: bool = False,
    roles: Iterable[str] = ROLES,
  ):
    kind = type(source).__name__
    got = f"{len(source)} characters" if isinstance(source, str) else kind
    if not isinstance(source, str) or len(source) > SOURCE_CHARS:
      raise TemplateError(
        "source",
        got,
        f"a template of at most {SOURCE_CHARS} characters",
        "pass the text of a chat_template",
      )
    self.source = source
    self.names = dict(names or {})
    self.trusted = trusted
    self.roles = frozenset(roles)

  @classmethod
  def of(cls, tokenizer: Encodes, *, trusted: bool = False) -> ChatTemplate:
    """The template that came with a tokenizer.

    Raises:
      TemplateError: If the tokenizer has no template.
    """
    if tokenizer.chat_template is None:
      raise TemplateError(
        "tokenizer",
        "one without a chat template",
        "the tokenizer of a chat model",
        "encode a plain prompt, or pass ChatTemplate(source, names)",
      )
    return cls(
      tokenizer.chat_template, tokenizer.special_names, trusted=trusted
    )

  def text(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    **more: Any,
  ) -> str:
    """Renders the text as transformers would, to look at, not to encode.

    Args and errors are those of `tokens`.
    """
    chat = self._chat(messages, add_generation_prompt, tools, more)
    return _text(self._render([chat], now)["texts"][0])

  def tokens(
    self,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Encodes,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    **more: Any,
  ) -> Int[np.ndarray, " T"]:
    """Renders a chat and encodes it.

    Args:
      messages: Tables with a "role" and the keys of the template: "content" as
        text or as parts, "tool_calls", and so on; JSON's types only.
      tokenizer: Tokenizer of the model.
      add_generation_prompt: Whether the opening of an answer comes last.
      tools: JSON schemas of functions, for templates that know them.
      now: Time for templates that write the date; by default this
        machine's. Pass it where several hosts must agree.
      **more: Further variables of the template, e.g. enable_thinking=False.

    Returns:
      Token ids, int32 [T].

    Raises:
      TemplateError: If the template fails, refuses these messages, grows or
        runs too long, or alters messages in ways that cannot be followed.
      PromptError, InputTypeError: If an item of `messages` is not a message.
      TokenizerError: If the tokenizer fails on this text.
    """
    chat = self._chat(messages, add_generation_prompt, tools, more)
    marks = _Marks(chat, self.source, tokenizer)
    return marks.encoded(self._marked(chat, marks, tokenizer, now))

  @property
  def marks_answers(self) -> bool:
    """Whether the template marks answers, by {% generation %}."""
    return _GENERATION.search(self.source) is not None

  def marked_answers(
    self,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Encodes,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    **more: Any,
  ) -> MarkedTokens:
    """Encodes a chat, with the ranges of tokens in {% generation %}.

    Args:
      messages: Messages, as `tokens` takes them.
      tokenizer: Tokenizer of the model.
      tools: JSON schemas of functions, for templates that know them.
      now: Time for templates that write the date.
      **more: Further variables of the template.

    Raises:
      TemplateError: See `tokens`; and if a token crosses the border between an
        answer and other text, or the template alters marked text.
      PromptError, InputTypeError, TokenizerError: See `tokens`.
    """
    chat = self._chat(messages, False, tools, more)
    free = _free_characters(chat, self.source)
    borders = {name: next(free) for name in render.GENERATION_VARIABLES}
    # The strings of the chat are not used as marks, so these are not.
    chat |= borders
    marks = _Marks(chat, self.source, tokenizer)
    text = self._marked(chat, marks, tokenizer, now)
    pieces = re.split(f"([{''.join(borders.values())}])", text)
    ids = self.tokens(
      messages,
      tokenizer,
      add_generation_prompt=False,
      tools=tools,
      now=now,
      **more,
    )
    ends, prefix = [], ""
    for piece, border in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
      prefix += piece
      expected = [*borders.values()][len(ends) % 2]
      encoded = marks.encoded(prefix)
      is_whole = not border and len(encoded) == len(ids)
      if (border != expected and not is_whole) or not np.array_equal(
        encoded, ids[: len(encoded)]
      ):
        raise TemplateError(
          "chat template",
          f"a border of {{% generation %}} after "
          f"{marks.unmark(prefix[-20:])!r} that is "
          "inside of a token or out of order",
          "borders between tokens",
          "let {% generation %} begin and end next to a special token or a "
          "line break, and answers begin with a word",
        )
      ends.append(len(encoded))
    return MarkedTokens(ids, [*zip(ends[:-1:2], ends[1:-1:2], strict=True)])

  def _marked(
    self,
    chat: dict[str, Any],
    marks: _Marks,
    tokenizer: Encodes,
    now: datetime.datetime | None,
  ) -> str:
    """The rendered text, with marks on what could form special tokens."""
    # All renderings have the same time.
    time = now or datetime.datetime.now()
    find = tokenizer.specials.pattern.findall
    # None where the template failed.
    specials = lambda text: find(text) if isinstance(text, str) else None
    rendered = self._render([marks.plain(chat), marks.all(chat)], time)
    plain, text = _text(rendered["texts"][0]), rendered["texts"][1]
    wanted = marks.unmark(plain)
    unmarks_to_wanted = lambda text: (
      isinstance(text, str) and marks.unmark(text) == wanted
    )
    safe = True
    if not unmarks_to_wanted(text):
      # The template looks for words in the messages, which are left unmarked.
      variant = marks.all(chat, keep=rendered["literals"])
      first_specials = specials(text)
      text = self._render([variant], time)["texts"][0]
      safe = unmarks_to_wanted(text) and first_specials in (
        None,
        specials(text),
      )
    words = marks.words(chat)
    if safe and words is not None:
      rendered_words = self._render([words], time)["texts"][0]
      safe = specials(rendered_words) == specials(text)
    if not safe:
      raise TemplateError(
        "messages",
        "text like that of special tokens, which the template alters",
        "messages of which the template leaves such text as it is",
        "take characters like < | > out of them, or change the template",
      )
    return text

  def _chat(
    self,
    messages: Sequence[Any],
    add_generation_prompt: bool,
    tools: Any,
    more: dict[str, Any],
  ) -> dict[str, Any]:
    """All variables of the template, in JSON's types."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
      raise InputTypeError(
        "messages",
        type(messages).__name__,
        "a list of tables with role and content",
        'pass [{"role": "user", "content": text}]',
      )
    if not messages:
      raise PromptError(
        "messages", "none", "at least one", "add a user's message"
      )
    for i, message in enumerate(messages):
      role = message.get("role") if isinstance(message, Mapping) else None
      if not isinstance(role, str) or role not in self.roles:
        raise PromptError(
          f"messages[{i}]",
          f"role {role!r}" if isinstance(message, Mapping) else type(message),
          f"a table with a role of {sorted(self.roles)}",
          "pass roles= to ChatTemplate for other ones",
        )
    return {
      **_plain("more", more),
      "messages": _plain("messages", messages),
      "tools": _plain("tools", tools),
      "add_generation_prompt": bool(add_generation_prompt),
    }

  def _render(
    self, variants: list[dict[str, Any]], now: datetime.datetime | None
  ) -> dict[str, Any]:
    """Result of `render.render`, from a worker process unless trusted."""
    input_chars = max(sum(map(len, _strings(v))) for v in variants)
    request = {
      "source": self.source,
      "variants": [{**self.names, **v} for v in variants],
      "now": (now or datetime.datetime.now()).isoformat(),
      # Documents may be long; the limit is on what the template adds.
      "room": render.OUTPUT_CHARS + 2 * input_chars,
    }
    if self.trusted:
      answer = render.render(**request)
    else:
      try:
        answer = _workers.ask(
          json_text(request).encode("ascii"),
          memory_bytes=_MEMORY_BYTES + 100 * input_chars,
          cpu_s=_CPU_S + input_chars // 2_000_000,
          wall_s=60.0 + input_chars / 100_000,
          answer_bytes=2**31,
        )
      except isolated.ChildError as error:
        raise _fault(error) from None
    if "error" in answer:
      raise _fault(answer["error"])
    return answer


class _Marks:
  """Replaces what could make special tokens by private-use characters.

  There are two alphabets of them: "firm" for messages of users and tools, and
  "own" for those of the model. The model's answers may hold words such as
  <think>, which are tokens without being special; in other messages these are
  replaced, too, if the template writes them.
  """

  def __init__(self, chat: dict[str, Any], source: str, tokenizer: Encodes):
    special = set(tokenizer.specials.by_text)
    self._tokenizer = tokenizer
    self._control = sorted(
      (t for t in tokenizer.added if t in source and _steers(t)), key=len
    )
    self._guarded = {"own": special, "firm": special | set(self._control)}
    free = _free_characters(chat, source)
    letters = {char for text in self._guarded["firm"] for char in text}
    self._tables: dict[str, dict[int, int]] = {}
    for kind, texts in self._guarded.items():
      chars = sorted(set().union(*map(_steering, texts)))
      self._tables[kind] = {ord(c): ord(next(free)) for c in chars}
    self._words = {ord(c): ord(next(free)) for c in sorted(letters)}
    self._back = {
      new: old
      for table in (*self._tables.values(), self._words)
      for old, new in table.items()
    }
    self._firm = {chr(new) for new in self._tables["firm"].values()}

  def plain(self, chat: dict[str, Any]) -> dict[str, Any]:
    """Marks whole special tokens only: gives the expected output."""
    patterns = {kind: any_of(t) for kind, t in self._guarded.items()}

    def mark(text: str, kind: str) -> str:
      table = self._tables[kind]
      return patterns[kind].sub(lambda m: m.group().translate(table), text)

    return _exchanged(chat, mark)

  def all(
    self, chat: dict[str, Any], keep: Sequence[str] = ()
  ) -> dict[str, Any]:
    """Marks each character of special tokens, except in the words of `keep`."""
    kept_patterns = {
      kind: any_of(k for k in keep if not _touches(k.strip(), texts))
      for kind, texts in self._guarded.items()
    }

    def mark(text: str, kind: str) -> str:
      table, pieces, start = self._tables[kind], [], 0
      for match in kept_patterns[kind].finditer(text) if keep else ():
        pieces += [text[start : match.start()].translate(table), match.group()]
        start = match.end()
      return "".join([*pieces, text[start:].translate(table)])

    return _exchanged(chat, mark)

  def words(self, chat: dict[str, Any]) -> dict[str, Any] | None:
    """Also marks values that are the word inside of a special token.

    A template that writes "<|" + name + "|>" would make a token of them. None
    if no value is such a word.
    """
    inner = {w for t in self._guarded["firm"] for w in re.findall(r"\w+", t)}
    marked_any = False

    def mark(text: str, kind: str) -> str:
      nonlocal marked_any
      if text.strip() in inner:
        marked_any = True
        return text.translate(self._words)
      return text.translate(self._tables[kind])

    marked = _exchanged(chat, mark)
    return marked if marked_any else None

  def unmark(self, text: str) -> str:
    return text.translate(self._back)

  def encoded(self, text: str) -> Int[np.ndarray, " T"]:
    """Token ids of a rendered text with marks."""
    parts: list[str | int] = []
    for part in self._tokenizer.specials.split(text):
      parts += self.broken(part) if isinstance(part, str) else [part]
    return self._tokenizer.encode_parts(parts)

  def broken(self, text: str) -> list[str | int]:
    """The unmarked text, cut so that no control token forms from messages."""
    clear = self.unmark(text)
    places, start = [], 0
    for match in any_of(self._control).finditer(clear):
      if self._firm.intersection(text[match.start() : match.end()]):
        places.append(match.start() + 1)
    parts: list[str | int] = []
    for place in [*places, len(clear)]:
      parts.append(clear[start:place])
      start = place
    return parts


def _exchanged(
  chat: dict[str, Any], mark: Callable[[str, str], str]
) -> dict[str, Any]:
  """A chat with all its strings replaced by `mark(text, alphabet)`."""

  def walk(value: object, kind: str, key: str = "") -> Any:
    if isinstance(value, str):
      return value if key == "type" and value in _KINDS else mark(value, kind)
    if isinstance(value, list):
      return [walk(item, kind) for item in value]
    if isinstance(value, dict):
      return {
        k if _NAME.fullmatch(k) else mark(k, kind): walk(v, kind, k)
        for k, v in value.items()
      }
    return value

  def exchange_message(message: dict[str, Any]) -> dict[str, Any]:
    kind = "own" if message["role"] in ("assistant", "model") else "firm"
    # The role keeps its place: a template may go through the keys in order.
    return {**walk({**message, "role": None}, kind), "role": message["role"]}

  return {
    name: [exchange_message(message) for message in value]
    if name == "messages"
    else walk(value, "firm", name)
    for name, value in chat.items()
  }


_NAME = re.compile(r"\w+")


def _steering(text: str) -> set[str]:
  """Characters without which a token cannot be written.

  Its first, its last, and all that are neither of a word nor space. The rest
  are words, which alone do not make a token.
  """
  chars = {text[0], text[-1], *re.findall(r"[^\w\s]", text)}
  return {c for c in chars if not c.isspace()}


def _steers(text: str) -> bool:
  """Whether an added token is there for control, and not for brevity."""
  return len(text) > 2 and re.search(r"[^\w\s]", text) is not None


def _touches(text: str, controls: Iterable[str]) -> bool:
  """Whether a text is in a control token, contains one or overlaps one."""
  tails = {text[-n:] for n in range(1, len(text) + 1)}
  heads = {text[:n] for n in range(1, len(text) + 1)}
  for control in controls:
    sizes = range(1, min(len(control), len(text)) + 1)
    if control in text or text in control:
      return True
    if any(control[:n] in tails or control[-n:] in heads for n in sizes):
      return True
  return False


def _free_characters(chat: dict[str, Any], source: str) -> Iterator[str]:
  """Private-use characters that occur neither in a chat nor in `source`."""
  used = set(source).union(*map(set, _strings(chat)))
  areas = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
  for code in itertools.chain(*areas):
    if chr(code) not in used:
      yield chr(code)
  raise PromptError(
    "messages",
    "every character of private use",
    "some that are left",
    "take them out of the messages",
  )


def _strings(value: object) -> Iterator[str]:
  """All strings of a JSON value, including keys."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, list):
    for item in value:
      yield from _strings(item)
  elif isinstance(value, dict):
    for key, item in value.items():
      yield key
      yield from _strings(item)


def _plain(name: str, value: object, depth: int = 0) -> Any:
  """A copy in JSON's types, or an error that names the place."""
  if depth > _DEPTH:
    raise PromptError(
      name, f"over {_DEPTH} levels", f"at most {_DEPTH}", "nest it less deeply"
    )
  if value is None or isinstance(value, bool | float):
    return value
  if isinstance(value, str):
    # A str enum is converted to a plain str.
    return str.__str__(as_text(name, value))
  if isinstance(value, int) and abs(value) < 2**63:
    return int(value)
  if isinstance(value, Mapping):
    return {
      str.__str__(as_text(f"{name} key", k)): _plain(
        f"{name}[{k!r}]", v, depth + 1
      )
      for k, v in value.items()
    }
  if isinstance(value, list | tuple):
    return [_plain(f"{name}[{i}]", v, depth + 1) for i, v in enumerate(value)]
  raise InputTypeError(
    name,
    type(value).__name__,
    "text, numbers, lists or tables, as in JSON",
    "convert it to one of these",
  )


def _text(rendered: Any) -> str:
  """The text that a template returned; raises if it failed."""
  if isinstance(rendered, str):
    return rendered
  raise _fault(rendered["error"])


def _fault(why: object) -> TemplateError:
  return TemplateError(
    "chat template",
    why,
    "text within the limits of time, memory and length",
    "look at the messages' roles and their order, or at the template",
  )

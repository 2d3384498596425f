"""Tokenizers from the tokenizer.json of a Hugging Face folder.

Guarantees: `encode` gives the ids that the tokenizers library gives for the
whole text, and never, whatever the text contains, the id of a special token:
those come only from `special=True`, `bos=True` and chat templates. (The id for
"unknown" may come: it steers nothing.) `decode` gives the library's text,
except that bytes that are not UTF-8 become U+FFFD one by one. An id without a
token is U+FFFD.

Long texts are encoded in parts, in parallel. A text is cut only where the ids
of both sides, encoded separately, are the ids of the text around the cut,
encoded as one: checked with 256 characters on either side. Where no such place
is found (one word of megabytes) the part grows to 4 million characters; longer
ones are refused.

The files are untrusted: each has a size limit, a file that the library does not
accept is a `TokenizerError`, and with `untrusted=True` another process, with
limits, tries the file first.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from ringjax import fetched_models
from ringjax.data.gguf.gguf_file import is_gguf, open_gguf
from ringjax.data.gguf.gguf_tokenizer import tokenizer_files
from ringjax.data.text import isolated, stream
from ringjax.data.text.bytelevel import BYTE_CHARS, Bytes
from ringjax.data.text.special_tokens import (
  Specials,
  SpecialToken,
  TokenIds,
  as_text,
  joined,
)
from ringjax.data.text.tokenizer_files import (
  TokenizerConfig,
  fault,
  read_file,
  text_of,
)
from ringjax.errors import PromptError, TokenizerError
from ringjax.json_text import Json
from ringjax.paths import as_path

if TYPE_CHECKING:
  import tokenizers

TOKENIZER_BYTES = 64 << 20

_PIECE = 1 << 16
_LONGEST_PIECE = 4_000_000
_MOST_TOKENS = 1 << 24
_LOOK = 256
_TRIES = 32
_BATCH = 16
# Factor by which a tokenizer's steps may lengthen a text.
_GROWTH = 1000

# An untrusted file is first read and used by this, in a process with limits.
_TRIAL = """
import tokenizers
data = sys.stdin.buffer.read()
t = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
t.no_truncation()
t.no_padding()
t.post_processor = None
t.encode_special_tokens = True
ascii = "".join(map(chr, range(32, 127)))
more = "\\n\\n\\tThe quick brown fox. \\u00e9\\u4e2d\\U0001f600"
text = f"{ascii} {more}"
for part in (text, "a" * 1000, " " * 1000, *ascii):
  ids = t.encode(part, add_special_tokens=False).ids
  t.decode(ids[:1000])
print(json.dumps(t.get_vocab_size()))
"""


class Tokenizer:
  """Encodes and decodes text by a tokenizer.json; `load` makes it.

  Attributes:
    name: Name of the folder.
    vocab_size: Highest id plus one.
    bos_id: Id that begins a text, or None.
    eos_ids: Ids at which a model stops, possibly none.
    pad_id: Id of padding, or None.
    adds_bos: Whether the model was trained with `bos_id` before each text.
    specials: Special tokens.
    added: Texts of tokens that are matched in a text as special ones are, but
      are ordinary tokens: runs of spaces, <think>.
    special_names: Texts of special tokens, by names that templates use.
    chat_template: Jinja source of the folder, or None.
    by_bytes: Whether a token has the same bytes whatever its neighbours.
    lead: Text that is removed from the start of a decoded text.
  """

  def __init__(
    self, make: Callable[[], Any], *, name: str, settings: TokenizerConfig
  ):
    self._engine = engine = make()
    self.name = name
    first = _first_token(engine.post_processor)
    _make_plain(engine)
    words = _guard("tokenizer.json", engine.get_vocab, with_added_tokens=False)
    if not words:
      raise fault("tokenizer.json", "no tokens", "a vocabulary")
    self.specials = _specials(engine, settings)
    self.added = frozenset(
      token.content
      for token in engine.get_added_tokens_decoder().values()
      if not token.special
    )
    self.special_names = settings.names()
    self.vocab_size = max(engine.get_vocab().values()) + 1
    if self.vocab_size > _MOST_TOKENS:
      raise fault(
        "tokenizer.json",
        f"an id of {self.vocab_size - 1}",
        f"ids below {_MOST_TOKENS}",
      )
    self.bos_id = settings.id_of(engine, "bos_token")
    self.pad_id = settings.id_of(engine, "pad_token")
    self.eos_ids = settings.eos_ids(engine)
    self.adds_bos = settings.adds_bos(first) and self.bos_id is not None
    self.chat_template = settings.chat_template
    self._unknown = settings.id_of(engine, "unk_token")
    if self._unknown in (self.bos_id, *self.eos_ids):
      self._unknown = None
    self._piece = _piece_reader(engine)
    self.by_bytes = self._piece is not None
    self.lead = "" if self._piece is None else self._piece.lead
    # A token that no text contains: after it the library encodes as after
    # any special token, not as at the start of a text.
    self._marked = engine
    if engine.get_vocab_size() < self.vocab_size:
      # A new token gets the number of tokens as its id, which with gaps may
      # be another token's: that one could not be decoded any more.
      self._marked = make()
      _make_plain(self._marked)
      _specials(self._marked, settings)
    self._mark, self._mark_id = _added_mark(self._marked)
    forbidden = np.zeros(self._mark_id + 1, bool)
    forbidden[sorted({*self.specials.ids, self._mark_id})] = True
    if self._unknown is not None:
      forbidden[self._unknown] = False
    self._forbidden = forbidden

  @classmethod
  def load(
    cls,
    folder: str | os.PathLike[str],
    *,
    untrusted: bool = False,
    revision: str | None = None,
  ) -> Tokenizer:
    """Reads the tokenizer of a model's folder.

    Args:
      folder: Folder that holds tokenizer.json and, if present,
        tokenizer_config.json, special_tokens_map.json,
        generation_config.json, config.json and chat_template.jinja; a GGUF
        file; an address, gs://bucket/model; the name of a model that
        `python -m ringjax.launch.fetch` has downloaded; or a name on the
        Hugging Face Hub, "Qwen/Qwen3-8B".
      untrusted: Whether a separate process, with 2 GB and 20 s, tries the
        file first; for folders that you do not trust.
      revision: Branch, tag or commit of a name on the hub.

    Raises:
      TokenizerError: If a file is missing, too large, or malformed.
    """
    folder = fetched_models.resolve(
      folder, "folder", revision=revision, tokenizer=True
    )
    path = as_path(folder, "folder")
    if is_gguf(path) and not (path / "tokenizer.json").is_file():
      files = tokenizer_files(open_gguf(path).metadata)
      with tempfile.TemporaryDirectory() as place:
        # The tokenizer is named after its folder.
        copy = pathlib.Path(place) / (path.stem or "tokenizer")
        copy.mkdir()
        for file, content in files.items():
          (copy / file).write_bytes(content)
        return cls.load(copy, untrusted=untrusted)
    data = read_file(path / "tokenizer.json", TOKENIZER_BYTES)
    if data is None and not path.is_dir():
      raise TokenizerError(
        "folder",
        f"{path}, which is not there",
        "a folder or a GGUF file",
        "download the model first: hf download NAME --local-dir FOLDER",
      )
    if data is None:
      old = any((path / f).exists() for f in ("tokenizer.model", "vocab.json"))
      raise TokenizerError(
        "folder",
        f"{path}, without a tokenizer.json",
        "a folder with the fast form of its tokenizer",
        "save it once with transformers' AutoTokenizer"
        if old
        else "pass the folder that holds the model's files",
      )
    settings = TokenizerConfig(path)
    if untrusted:
      _try_in_child(data)
    import tokenizers

    name = fetched_models.name_of(path) or "tokenizer"
    return cls(
      lambda: _guard("tokenizer.json", tokenizers.Tokenizer.from_buffer, data),
      name=name,
      settings=settings,
    )

  def encode(
    self,
    text: str,
    *,
    special: bool = False,
    bos: bool = False,
    progress: Callable[[int, int], None] | None = None,
    enough: int | None = None,
  ) -> Int[np.ndarray, " T"]:
    """Encodes a text.

    Args:
      text: Any text that has a UTF-8 form.
      special: Whether texts of special tokens in it become those tokens. Only
        for text that no user wrote; otherwise they are text like any other.
      bos: Whether `bos_id` comes first; `adds_bos` says if the model was
        trained so.
      progress: Function that is called with characters done and characters in
        all; an exception in it ends the encoding.
      enough: Number of ids after which the text need not be encoded further: of
        a longer text the last ids may be missing, but more than `enough` are
        returned. None for all.

    Returns:
      Token ids, int32 [T].

    Raises:
      PromptError, InputTypeError: If it is not a str, has a lone surrogate, or
        a word that is too long.
      TokenizerError: If the tokenizer fails on this text, or has no `bos_id`.
    """
    text = as_text("text", text)
    if bos and self.bos_id is None:
      raise TokenizerError(
        "bos",
        "True",
        "a tokenizer with a bos_token",
        "pass bos=tokenizer.adds_bos",
      )
    if special:
      ids = self.encode_parts(self.specials.split(text), enough=enough)
      if progress is not None:
        progress(len(text), len(text))
    else:
      ids = self._encode(text, self._ids, progress, enough)
    return joined([np.array([self.bos_id]), ids]) if bos else ids

  def encode_parts(
    self, parts: Sequence[str | int], *, enough: int | None = None
  ) -> Int[np.ndarray, " T"]:
    """Encodes a sequence of texts and ids as one row.

    Args:
      parts: Texts, in which nothing is special, and ids, which are taken as
        they are.
      enough: See `encode`.

    Returns:
      Token ids, int32 [T].

    Raises:
      PromptError, TokenizerError: See `encode`.
    """
    rows, ids_left = [], enough
    for i, part in enumerate(parts):
      if isinstance(part, str):
        part = as_text(f"parts[{i}]", part)
        start = self._ids if i == 0 else self._more
        rows.append(self._encode(part, start, enough=ids_left))
      else:
        rows.append(np.array([part], np.int32))
      if ids_left is not None:
        ids_left -= rows[-1].size
        if ids_left < 0:
          break
    return joined(rows)

  def decode(self, ids: TokenIds, *, special: bool = False) -> str:
    """Decodes ids into text.

    Args:
      ids: A row of ids, as a list or an array; any id from 0 to 2^31 - 1.
      special: Whether the texts of special tokens appear.

    Raises:
      PromptError, InputTypeError: If they are not token ids.
    """
    return stream.decode(self, ids, special=special)

  def piece(self, token_id: int) -> bytes:
    """The bytes of one token; only for tokenizers that are `by_bytes`."""
    if self._piece is None:
      raise fault("piece", "tokens that depend on neighbours", "by_bytes")
    return self._piece(token_id)

  def is_special(self, token_id: int) -> bool:
    """Whether the token steers the model and is not text."""
    return token_id in self.specials.ids

  def window(self, ids: Sequence[int]) -> str:
    """The text of a few tokens, special or not."""
    if self._piece is not None:
      data = b"".join(map(self._piece, ids))
      return data.decode("utf-8", "replace").removeprefix(self.lead)
    engine, text = self._engine, ""
    has_token = lambda i: i < self.vocab_size and bool(engine.id_to_token(i))
    for is_known, group in itertools.groupby(ids, has_token):
      row = list(group)
      if is_known:
        text += _guard("ids", engine.decode, row, skip_special_tokens=False)
      else:
        text += stream.UNKNOWN * len(row)
    return text

  def _encode(
    self,
    text: str,
    start: Callable[[str], list[int]],
    progress: Callable[[int, int], None] | None = None,
    enough: int | None = None,
  ) -> np.ndarray:
    """Ids of a text; `start` encodes its beginning."""
    rows, batch, total = [], [], len(text)
    # Not many more parts than `enough` needs.
    batch_size = (
      _BATCH if enough is None else min(_BATCH, 1 + 8 * enough // _PIECE)
    )
    for begin, end in self._cuts(text):
      if begin == 0:
        rows.append(start(text[:end]))
      else:
        batch.append((begin, end))
      if batch and (len(batch) >= batch_size or end == total):
        rows += self._ids_of_pieces(text, batch)
        batch = []
      # Respelling special tokens never shortens the row.
      has_enough = enough is not None and sum(map(len, rows)) > enough
      if progress is not None and not batch:
        progress(end, total)
      if has_enough:
        break
    ids = joined([np.asarray(row, np.int32) for row in rows])
    return self._without_special(ids)

  def _ids(self, text: str) -> list[int]:
    """The library's ids of a text on its own."""
    return _encoded(self._engine, text)

  def _more(self, text: str) -> list[int]:
    """The library's ids of a text after a special token."""
    ids = _encoded(self._marked, self._mark + text)
    if ids[:1] != [self._mark_id]:
      raise fault("tokenizer.json", "one that alters added tokens", "plain")
    return ids[1:]

  def _ids_of_pieces(
    self, text: str, pieces: list[tuple[int, int]]
  ) -> list[list[int]]:
    """Ids of parts that `_cuts` found, which follow others."""
    rows = _guard(
      "text",
      self._engine.encode_batch_fast,
      [text[begin - 1 : end] for begin, end in pieces],
      add_special_tokens=False,
    )
    return [
      row.ids[len(self._ids(text[begin - 1])) :]
      for row, (begin, _) in zip(rows, pieces, strict=True)
    ]

  def _cuts(self, text: str) -> Iterator[tuple[int, int]]:
    """Ranges of a text's parts; one range if it is short."""
    begin, total = 0, len(text)
    while total - begin > 2 * _PIECE:
      end = self._cut(text, begin)
      yield begin, end
      begin = end
    yield begin, total

  def _cut(self, text: str, begin: int) -> int:
    """The next place where the text may be cut; its end, if that is near."""
    low = begin + _PIECE
    while low - begin < _LONGEST_PIECE:
      high = low + _PIECE
      for places in _PLACES:
        matches = places.finditer(text, low, high)
        for _, match in zip(range(_TRIES), matches, strict=False):
          if self._may_cut(text, match.end()):
            return match.end()
      if len(text) <= high:
        return len(text)
      low = high
    raise PromptError(
      "text",
      f"{_LONGEST_PIECE} characters from {begin} on without a place to cut",
      "words with spaces or lines between them",
      "break the text into lines",
    )

  def _may_cut(self, text: str, at: int) -> bool:
    """Whether ids on both sides of a cut are those of the uncut text."""
    head, tail = text[at - _LOOK : at], text[at : at + _LOOK]
    character_ids = self._ids(text[at - 1])
    tail_ids = self._ids(text[at - 1] + tail)
    if tail_ids[: len(character_ids)] != character_ids:
      return False
    return (
      self._ids(head + tail) == self._ids(head) + tail_ids[len(character_ids) :]
    )

  def _without_special(self, ids: np.ndarray) -> np.ndarray:
    """Respells special tokens that the library found in a text."""
    # Ids are looked up in a table, which covers all of them.
    special_at = np.flatnonzero(self._forbidden[ids])
    if not special_at.size:
      return ids
    rows, begin = [], 0
    for at in special_at.tolist():
      rows += [ids[begin:at], self._respelled(int(ids[at]))]
      begin = at + 1
    return joined([*rows, ids[begin:]])

  def _respelled(self, token_id: int) -> np.ndarray:
    """The text of a special token in the fewest tokens that are not special."""
    word = self._engine.id_to_token(token_id)
    best: list[list[int] | None] = [[]] + [None] * len(word)
    for end in range(1, len(word) + 1):
      for begin in range(end):
        head, tail = best[begin], self._spelled(word, begin, end)
        if head is None or tail is None:
          continue
        shortest = best[end]
        if shortest is None or len(head) + len(tail) < len(shortest):
          best[end] = head + tail
    spelled = best[-1]
    if spelled is None:
      raise PromptError(
        "text",
        f"the text of special token {token_id}, which is one word here",
        "text that this tokenizer can spell without special tokens",
        "take it out of the text",
      )
    return np.array(spelled, np.int32)

  def _spelled(self, word: str, begin: int, end: int) -> list[int] | None:
    part = word[begin:end]
    # WordPiece vocabularies write ## before the continuation of a word.
    for text in (part, f"##{part}") if begin else (part,):
      token_id = self._engine.token_to_id(text)
      if token_id is not None and not self._forbidden[token_id]:
        return [token_id]
    if len(part) > 1:
      return None
    names = [f"<0x{byte:02X}>" for byte in part.encode("utf-8")]
    ids = [self._engine.token_to_id(name) for name in names]
    if any(i is None or self._forbidden[i] for i in ids):
      return None
    return ids


# Places to cut a text, the best first: after a line that is followed by a word,
# then before a space between words, then between lines of any kind.
_PLACES = tuple(
  re.compile(p)
  for p in (r"(?<=\S)\n(?=\w)", r"(?<=\w)(?= \w)", r"(?<=\S)\n(?=\S)", r"\n")
)


@dataclasses.dataclass(frozen=True)
class _PieceReader:
  """Bytes of a token, for tokenizers where neighbours don't matter.

  Attributes:
    engine: Tokenizer of the library.
    byte_level: Whether each character of a token stands for a byte.
    replaced: Replacements (old, new) in a token, in order.
    byte_fallback: Whether <0x0A> stands for a byte.
    lead: Text that is removed from the start of a decoded text.
  """

  engine: tokenizers.Tokenizer
  byte_level: bool = False
  replaced: tuple[tuple[str, str], ...] = ()
  byte_fallback: bool = False
  lead: str = ""
  _known: dict[int, bytes] = dataclasses.field(default_factory=dict)

  def __call__(self, token_id: int) -> bytes:
    if token_id not in self._known:
      self._known[token_id] = self._read(token_id)
    return self._known[token_id]

  def _read(self, token_id: int) -> bytes:
    token = self.engine.id_to_token(token_id)
    if token is None:
      return stream.UNKNOWN.encode("utf-8")
    if self.byte_level and all(char in _BYTE_OF for char in token):
      return bytes(_BYTE_OF[char] for char in token)
    for old, new in self.replaced:
      token = token.replace(old, new)
    if self.byte_fallback and _BYTE.fullmatch(token):
      return bytes([int(token[3:5], 16)])
    return token.encode("utf-8")


def _piece_reader(engine: tokenizers.Tokenizer) -> _PieceReader | None:
  """The reader for a tokenizer's decoder; None if it looks at neighbours."""
  steps = _parts(engine.decoder, "decoders")
  kinds = [step.get("type") for step in steps]
  if kinds == ["ByteLevel"]:
    return _PieceReader(engine, byte_level=True)
  if "Fuse" not in kinds:
    return None
  fuse = kinds.index("Fuse")
  replaced: list[tuple[str, str]] = []
  for i, step in enumerate(steps[:fuse]):
    text = step["type"] == "Replace" and step["pattern"].get("String")
    if isinstance(text, str) and "ByteFallback" not in kinds[:i]:
      replaced.append((text, step["content"]))
    elif step["type"] != "ByteFallback":
      return None
  strips = steps[fuse + 1 :]
  valid = all(
    step["type"] == "Strip" and not step["stop"] and step["start"] == 1
    for step in strips
  )
  if not valid or len(strips) > 1:
    return None
  return _PieceReader(
    engine,
    replaced=tuple(replaced),
    byte_fallback="ByteFallback" in kinds[:fuse],
    lead=strips[0]["content"] if strips else "",
  )


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_CHARS)}


def _encoded(engine: tokenizers.Tokenizer, text: str) -> list[int]:
  return _guard("text", engine.encode, text, add_special_tokens=False).ids


def _specials(
  engine: tokenizers.Tokenizer, settings: TokenizerConfig
) -> Specials:
  """The special tokens; adds those of the side files to the library's."""
  for token_id, token in settings.added():
    text = text_of(token)
    if text is None:
      continue
    if engine.token_to_id(text) is None:
      flags = {k: bool(token.get(k)) for k in ("lstrip", "rstrip")}
      _add(engine, text, special=bool(token.get("special")), **flags)
    if engine.token_to_id(text) != token_id:
      raise fault(
        "tokenizer_config.json",
        f"{text!r} with id {token_id}, in tokenizer.json with another",
        "files that agree",
      )
  added = engine.get_added_tokens_decoder()
  special_texts = {token.content for token in added.values() if token.special}
  for text in settings.texts():
    if text not in special_texts and engine.token_to_id(text) is not None:
      _add(engine, text, special=True)
      special_texts.add(text)
  return Specials(
    SpecialToken(
      text=token.content, id=i, lstrip=token.lstrip, rstrip=token.rstrip
    )
    for i, token in engine.get_added_tokens_decoder().items()
    if token.special
  )


def _add(
  engine: tokenizers.Tokenizer, text: str, *, special: bool, **flags: bool
) -> None:
  import tokenizers

  token = tokenizers.AddedToken(
    text, special=special, normalized=False, **flags
  )
  _guard("tokenizer.json", engine.add_tokens, [token])


def _added_mark(engine: tokenizers.Tokenizer) -> tuple[str, int]:
  """A new token that no text contains, and its id, which no other one has."""
  used = set(engine.get_vocab().values())
  # If ids have gaps, the first new ids may be taken.
  for _ in range(1000):
    mark = f"\U0010fffd{secrets.token_hex(8)}\U0010fffd"
    _add(engine, mark, special=False)
    mark_id = engine.token_to_id(mark)
    if mark_id is not None and mark_id > max(used):
      return mark, mark_id
  raise fault("tokenizer.json", "ids with over 1000 gaps", "ids without gaps")


def _make_plain(engine: tokenizers.Tokenizer) -> None:
  """Turns off truncation, padding, added tokens and dropout."""
  _guard("tokenizer.json", engine.no_truncation)
  _guard("tokenizer.json", engine.no_padding)
  engine.post_processor = None
  engine.encode_special_tokens = True
  if getattr(engine.model, "dropout", None):
    engine.model.dropout = None
  growth = 1
  for part in (engine.normalizer, engine.pre_tokenizer, engine.decoder):
    for step in _walk(_state(part)):
      if step.get("type") in ("Replace", "Prepend"):
        content = step.get("content") or step.get("prepend") or ""
        growth *= max(1, len(content))
  if growth > _GROWTH:
    raise fault(
      "tokenizer.json",
      f"steps that make a text up to {growth:.1e} times longer",
      f"at most {_GROWTH} times",
    )


def _state(part: Any) -> dict[str, Any] | None:
  return None if part is None else json.loads(part.__getstate__())


def _parts(part: Any, inner: str) -> list[dict[str, Any]]:
  """The steps of a part, which may be one or a sequence."""
  state = _state(part)
  if state is None:
    return []
  return state[inner] if state.get("type") == "Sequence" else [state]


def _walk(state: Json) -> Iterator[dict[str, Any]]:
  """All tables in a JSON value. It is shallow: the library read it."""
  if isinstance(state, dict):
    yield state
    state = list(state.values())
  for item in state if isinstance(state, list) else ():
    yield from _walk(item)


def _first_token(post_processor: Any) -> str | None:
  """Text of the special token that a post-processor puts before a text."""
  for step in _walk(_state(post_processor)):
    single = step.get("single")
    if isinstance(single, list) and single and isinstance(single[0], dict):
      token = single[0].get("SpecialToken")
      return token.get("id") if isinstance(token, dict) else None
  return None


# Processor time of the process that tries a file, in seconds.
_CPU_S = 20


def _try_in_child(data: bytes) -> None:
  try:
    isolated.run(
      _TRIAL,
      data,
      memory_bytes=2 << 30,
      cpu_s=_CPU_S,
      wall_s=120.0,
      answer_bytes=1000,
    )
  except isolated.ChildError as error:
    raise fault("tokenizer.json", error, "a file that loads") from None


def _guard(what: str, call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
  """Calls the library; converts its errors to a TokenizerError."""
  try:
    return call(*args, **kw)
  except MemoryError:
    raise
  except BaseException as error:
    # A panic of the library is not an Exception; neither is an interrupt.
    is_panic = type(error).__name__ == "PanicException"
    if not is_panic and not isinstance(error, Exception):
      raise
    got = str(error).partition("\n")[0]
    raise fault(what, got, "what this tokenizer can take") from error


# The tokenizers that texts are encoded with.
AnyTokenizer = Tokenizer | Bytes

"""A tokenizer without files: the bytes of UTF-8, and a few special tokens.

Guarantees: token i < 256 is the byte i; special tokens follow from 256 on, in
order. Hence `decode(encode(text)) == text` for every text, no text yields a
special token, and one token is one byte. `save` writes the same tokenizer for
the tokenizers library: a BPE without merges over the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from ringjax.data.text import stream
from ringjax.data.text.special_tokens import (
  Specials,
  SpecialToken,
  TokenIds,
  as_text,
  joined,
)
from ringjax.errors import TokenizerError
from ringjax.json_text import json_text
from ringjax.paths import as_path

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}"
  "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Bytes:
  """Bytes as tokens; the interface is that of `Tokenizer`.

  Args:
    special: Texts of special tokens, with ids from 256 on. The first begins a
      text, the second ends one, the third pads.
    name: Name of the tokenizer in a summary.
    chat_template: Jinja source over these tokens, or None for none.
  """

  by_bytes = True
  lead = ""
  adds_bos = True
  added: frozenset[str] = frozenset()

  def __init__(
    self,
    special: Sequence[str] = (BEGIN, END, PAD, *ROLES),
    *,
    name: str = "bytes",
    chat_template: str | None = CHAT_TEMPLATE,
  ):
    texts = tuple(special)
    valid = all(isinstance(t, str) and t.strip() for t in texts)
    if len(texts) < 3 or not valid or len(set(texts)) < len(texts):
      raise TokenizerError(
        "special",
        texts,
        "at least 3 different texts: begin, end, padding",
        "leave it out for the default ones",
      )
    self.name = name
    self.chat_template = chat_template
    self.specials = Specials(
      SpecialToken(text=t, id=256 + i) for i, t in enumerate(texts)
    )
    self.vocab_size = 256 + len(texts)
    self.bos_id: int | None = 256
    self.eos_ids: tuple[int, ...] = (257,)
    self.pad_id: int | None = 258
    self.special_names: dict[str, Any] = {
      "bos_token": texts[0],
      "eos_token": texts[1],
      "pad_token": texts[2],
    }
    if texts[3:]:
      self.special_names["additional_special_tokens"] = list(texts[3:])
    self._texts = texts

  def encode(
    self,
    text: str,
    *,
    special: bool = False,
    bos: bool = False,
    progress: Callable[[int, int], None] | None = None,
    enough: int | None = None,
  ) -> Int[np.ndarray, " T"]:
    """Encodes a text, int32 [T]; arguments are those of `Tokenizer.encode`.

    Raises:
      PromptError, InputTypeError: If it is not a str, or has a lone surrogate.
    """
    text = as_text("text", text)
    parts = self.specials.split(text) if special else [text]
    ids = self.encode_parts([256, *parts] if bos else parts, enough=enough)
    if progress is not None:
      progress(len(text), len(text))
    return ids

  def encode_parts(
    self, parts: Sequence[str | int], *, enough: int | None = None
  ) -> Int[np.ndarray, " T"]:
    """Encodes texts and ids as one row, int32 [T].

    All of them, whatever `enough` is.
    """
    del enough
    rows = []
    for part in parts:
      if isinstance(part, str):
        data = as_text("text", part).encode("utf-8")
        rows.append(np.frombuffer(data, np.uint8).astype(np.int32))
      else:
        rows.append(np.array([part], np.int32))
    return joined(rows)

  def decode(self, ids: TokenIds, *, special: bool = False) -> str:
    """Decodes ids into text; special tokens appear only if asked for."""
    return stream.decode(self, ids, special=special)

  def piece(self, token_id: int) -> bytes:
    """The bytes of one token."""
    if token_id < 256:
      return bytes([token_id])
    if token_id < self.vocab_size:
      return self._texts[token_id - 256].encode("utf-8")
    return stream.UNKNOWN.encode("utf-8")

  def is_special(self, token_id: int) -> bool:
    """Whether the token steers the model and is not text."""
    return 256 <= token_id < self.vocab_size

  def window(self, ids: Sequence[int]) -> str:
    """The text of a few tokens, special or not."""
    return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Args:
      folder: Folder of the files; it is made if it does not exist.
    """
    path = as_path(folder, "folder")
    path.mkdir(parents=True, exist_ok=True)
    all_false = lambda *names: dict.fromkeys(names, False)
    flags = all_false("single_word", "lstrip", "rstrip", "normalized")
    added = [
      {"id": 256 + i, "content": text, **flags, "special": True}
      for i, text in enumerate(self._texts)
    ]
    level = all_false("add_prefix_space", "trim_offsets", "use_regex")
    as_bytes = {"type": "ByteLevel", **level}
    begin = self._texts[0]
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = {"Sequence": {"id": "B", "type_id": 1}}
    tokenizer = {
      "version": "1.0",
      "truncation": None,
      "padding": None,
      "added_tokens": added,
      "normalizer": None,
      "pre_tokenizer": as_bytes,
      "post_processor": {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": {
          begin: {"id": begin, "ids": [256], "tokens": [begin]}
        },
      },
      "decoder": as_bytes,
      "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **all_false("fuse_unk", "byte_fallback", "ignore_merges"),
        "vocab": {char: byte for byte, char in enumerate(BYTE_CHARS)},
        "merges": [],
      },
    }
    config = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      **self.special_names,
      "clean_up_tokenization_spaces": False,
      "model_max_length": 10**30,
    }
    if self.chat_template is not None:
      config["chat_template"] = self.chat_template
    for file, content in (
      ("tokenizer.json", tokenizer),
      ("tokenizer_config.json", config),
    ):
      written = json_text(content, ensure_ascii=False, indent=1)
      (path / file).write_text(written + "\n", encoding="utf-8")


def _byte_chars() -> tuple[str, ...]:
  """Character by which byte-level vocabularies write each byte.

  Printable bytes of Latin-1 stand for themselves, the others for the
  characters from 256 on. Ref: GPT-2, Radford et al. 2019.
  """
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  chars = {byte: chr(byte) for byte in plain}
  unprintable = [byte for byte in range(256) if byte not in chars]
  chars |= {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
  return tuple(chars[byte] for byte in range(256))


BYTE_CHARS = _byte_chars()

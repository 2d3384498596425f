"""A tokenizer's files from the metadata of a GGUF file.

Guarantees: a vocabulary of byte-level BPE (`gpt2`) with a known way to split
text, of SentencePiece's BPE (`llama`, `gemma4`), unigram (`t5`) or WordPiece
(`bert`); another one is an error. Merges that a SentencePiece file lacks come
from scores, of Gemma from the order of tokens.
"""

from __future__ import annotations

import base64
import math
import string
from collections.abc import Mapping
from typing import Any

from ringjax.data.gguf.gguf_splits import ADDS_BOS, SPLITS, WHOLE_WORDS
from ringjax.data.text.bytelevel import BYTE_CHARS
from ringjax.errors import TokenizerError
from ringjax.json_text import json_text

_LONGEST = 1024
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
  """Converts the tokenizer to files of a Hugging Face folder, by name.

  Raises:
    TokenizerError: If the tokenizer is not known, or contradicts itself.
  """
  entries = {
    key.removeprefix("tokenizer.ggml."): x
    for key, x in metadata.items()
    if key.startswith("tokenizer.ggml.")
  }
  tokens = entries.get("tokens")
  if not isinstance(tokens, list) or not all(type(x) is str for x in tokens):
    raise _error("tokens", "no tokens", "a vocabulary")
  if max(map(len, tokens), default=0) > _LONGEST:
    raise _error("tokens", "a longer one", f"{_LONGEST} characters at most")
  kinds = entries.get("token_type") or [1] * len(tokens)
  if not isinstance(kinds, list) or not all(type(x) is int for x in kinds):
    raise _error("token_type", "no numbers", "a list of numbers")
  if len(kinds) != len(tokens):
    raise _error("token_type", f"{len(kinds)}", f"{len(tokens)}, one each")
  name = entries.get("model")
  gemma = str(metadata.get("general.architecture")).startswith("gemma")
  if name == "gpt2":
    parts = _byte_level(entries, tokens, kinds)
  elif name in ("llama", "gemma4"):
    parts = _sentencepiece(entries, tokens, kinds, gemma)
  elif name == "t5":
    parts = _unigram(entries, tokens, kinds)
  elif name == "bert":
    tokens = [_word(x, kind) for x, kind in zip(tokens, kinds, strict=True)]
    parts = _wordpiece(entries, tokens, kinds)
  else:
    raise _error("model", name, "gpt2, llama, gemma4, t5 or bert")
  added = [
    {"id": i, "content": tokens[i], "single_word": False, "lstrip": False,
     "rstrip": False, "normalized": False, "special": kind == _CONTROL}
    for i, kind in enumerate(kinds)
    # Runs of spaces, which Gemma spells separately, are words of the text.
    if kind in (_CONTROL, _USER)
    and (name == "t5" or tokens[i] in parts["model"]["vocab"])
  ]  # fmt: skip
  config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
  for key, title in (
    ("bos_token_id", "bos_token"), ("eos_token_id", "eos_token"),
    ("unknown_token_id", "unk_token"), ("padding_token_id", "pad_token"),
  ):  # fmt: skip
    if (number := entries.get(key)) is None:
      continue
    if type(number) is not int or not 0 <= number < len(tokens):
      raise _error(key, number, f"an id below {len(tokens)}")
    config[title] = tokens[number]
  adds = name == "llama" or (
    entries.get("pre") in (*ADDS_BOS,) and "bos_token" in config
  )
  config["add_bos_token"] = bool(entries.get("add_bos_token", adds))
  if type(entries.get("add_bos_token", adds)) is not bool:
    raise _error("add_bos_token", entries["add_bos_token"], "true or false")
  if (template := metadata.get("tokenizer.chat_template")) is not None:
    if type(template) is not str:
      raise TokenizerError(
        "tokenizer.chat_template", "no text", "a text",
        "pass the tokenizer.json of the model's original folder",
      )  # fmt: skip
    config["chat_template"] = template
  stops = [
    entries[key]
    for key in ("eos_token_id", "eot_token_id", "eom_token_id")
    if type(entries.get(key)) is int
  ]
  generation: dict[str, Any] = {}
  if stops:
    generation["eos_token_id"] = list(dict.fromkeys(stops))
  if "bos_token_id" in entries:
    generation["bos_token_id"] = entries["bos_token_id"]
  tokenizer = {"version": "1.0", "truncation": None, "padding": None,
           "added_tokens": added, "post_processor": None, **parts}  # fmt: skip
  files = {
    "tokenizer.json": tokenizer,
    "tokenizer_config.json": config,
    "generation_config.json": generation,
  }
  return {
    file: json_text(x, ensure_ascii=False).encode() for file, x in files.items()
  }


def _error(key: str, got: object, want: str) -> TokenizerError:
  remedy = "pass the tokenizer.json of the model's original folder"
  return TokenizerError(f"tokenizer.ggml.{key}", str(got)[:80], want, remedy)


def _pairs(merges: object) -> list[list[str]]:
  texts = isinstance(merges, list) and all(type(x) is str for x in merges)
  pairs = [x.split(" ") for x in merges] if texts else []
  if not pairs or any(len(x) != 2 for x in pairs):
    raise _error("merges", "no pairs of tokens", "merges")
  return pairs


def _bpe(
  vocab: Mapping[str, int], merges: list[list[str]], **more: Any
) -> dict[str, Any]:
  plain = {
    "type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
    "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "byte_fallback": False, "ignore_merges": False,
  }  # fmt: skip
  return {**plain, **more, "vocab": vocab, "merges": merges}


def _byte_level(
  entries: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, Any]:
  pre = entries.get("pre", "gpt-2")
  if not isinstance(pre, str) or pre not in SPLITS:
    raise _error("pre", pre, f"one of {', '.join(sorted(SPLITS))}")
  alphabet = set(BYTE_CHARS)
  vocab = {
    x if set(x) <= alphabet or kind in (_CONTROL, _USER)
    else "".join(BYTE_CHARS[b] for b in x.encode()): i
    for i, (x, kind) in enumerate(zip(tokens, kinds, strict=True))
  }  # fmt: skip
  level = {"type": "ByteLevel", "add_prefix_space": False,
           "trim_offsets": True, "use_regex": False}  # fmt: skip
  splits = [
    {"type": "Split", "pattern": {"Regex": x}, "behavior": "Isolated",
     "invert": False}
    for x in SPLITS[pre]
  ]  # fmt: skip
  return {
    "normalizer": None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
    "decoder": {**level, "use_regex": True},
    "model": _bpe(
      vocab, _pairs(entries.get("merges")), ignore_merges=pre in WHOLE_WORDS
    ),
  }


def _sentencepiece(
  entries: Mapping[str, Any], tokens: list[str], kinds: list[int], gemma: bool
) -> dict[str, Any]:
  if gemma:
    # Runs of spaces are tokens as such.
    tokens = [
      _SPACE * len(x) if len(x) > 1 and not x.strip(" ") else x for x in tokens
    ]
  vocab = {x: i for i, x in enumerate(tokens)}
  if "merges" in entries:
    merges = _pairs(entries["merges"])
  elif gemma:
    ranks = [-float(i) for i in range(len(tokens))]
    merges = _merges(tokens, kinds, vocab, ranks)
  else:
    merges = _merges(tokens, kinds, vocab, _scores(entries, tokens))
  number = _unknown_id(entries, kinds)
  return {
    **_spaces(entries.get("add_space_prefix", not gemma)),
    "model": _bpe(
      vocab, merges, byte_fallback=True, fuse_unk=True,
      unk_token=None if number is None else tokens[number],
    ),
  }  # fmt: skip


def _spaces(prefix: bool, *first_steps: dict[str, Any]) -> dict[str, Any]:
  """Normalizers and decoders that spell spaces as SentencePiece does.

  Args:
    prefix: Whether a text begins with a space.
    *first_steps: Normalizers that run before these.
  """
  change = lambda old, new: {
    "type": "Replace", "pattern": {"String": old}, "content": new,
  }  # fmt: skip
  start = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
  strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
  fuse = [{"type": "ByteFallback"}, {"type": "Fuse"}]
  return {
    "normalizer": {
      "type": "Sequence",
      "normalizers": [*first_steps, *start, change(" ", _SPACE)],
    },
    "pre_tokenizer": None,
    "decoder": {
      "type": "Sequence",
      "decoders": [change(_SPACE, " "), *fuse, *([strip] if prefix else [])],
    },
  }


def _scores(entries: Mapping[str, Any], tokens: list[str]) -> list[float]:
  scores = entries.get("scores")
  numbers = isinstance(scores, list) and all(
    type(x) in (int, float) and math.isfinite(x) for x in scores
  )
  if not numbers or len(scores) != len(tokens):
    raise _error("scores", "no scores", "one for each token, or merges")
  return scores


def _unknown_id(entries: Mapping[str, Any], kinds: list[int]) -> int | None:
  """Id of what the vocabulary does not have, if a token stands for it."""
  number = entries.get("unknown_token_id", next(
    (i for i, kind in enumerate(kinds) if kind == _UNKNOWN), None
  ))  # fmt: skip
  is_valid = type(number) is int and 0 <= number < len(kinds)
  return number if is_valid else None


def _flag(entries: Mapping[str, Any], key: str, default: bool) -> bool:
  if type(x := entries.get(key, default)) is not bool:
    raise _error(key, x, "true or false")
  return x


def _unigram(
  entries: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, Any]:
  unknown = _unknown_id(entries, kinds)
  if unknown is None:
    raise _error("unknown_token_id", "no id", "that of an unknown character")
  scores = _scores(entries, tokens)
  pairs = list(zip(scores, kinds, strict=True))
  lowest = min((x for x, kind in pairs if kind == _NORMAL), default=0.0)
  steps: list[dict[str, Any]] = []
  if charsmap := entries.get("precompiled_charsmap"):
    is_byte = lambda x: type(x) is int and -128 <= x < 256
    if not isinstance(charsmap, list) or not all(map(is_byte, charsmap)):
      raise _error("precompiled_charsmap", "no bytes", "a list of bytes")
    content = base64.b64encode(bytes(x % 256 for x in charsmap)).decode()
    steps.append({"type": "Precompiled", "precompiled_charsmap": content})
  if _flag(entries, "remove_extra_whitespaces", True):
    steps += [
      {"type": "Replace", "pattern": {"Regex": old}, "content": new}
      for old, new in ((r"\A +| +\z", ""), (" {2,}", " "))
    ]
  return {
    **_spaces(_flag(entries, "add_space_prefix", True), *steps),
    "model": {
      "type": "Unigram", "unk_id": unknown, "byte_fallback": _BYTE in kinds,
      # An unknown character costs more than the least likely token, among
      # which those that are no text must not count.
      "vocab": [
        [x, score if kind == _NORMAL else lowest]
        for x, (score, kind) in zip(tokens, pairs, strict=True)
      ],
    },
  }  # fmt: skip


def _bracketed(text: str) -> bool:
  return len(text) > 2 and text[0] == "[" and text[-1] == "]"


def _word(text: str, kind: int) -> str:
  """A token of WordPiece, marked if it continues a word, not if it starts one.

  In older files words in brackets have no mark, whatever their kind.
  """
  if kind == _CONTROL or _bracketed(text):
    return text
  return text[1:] if text.startswith(_SPACE) else f"##{text}"


def _wordpiece(
  entries: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, Any]:
  vocab = {x: i for i, x in enumerate(tokens)}
  unknown = _unknown_id(entries, kinds)
  name = "[UNK]" if unknown is None else tokens[unknown]
  if name not in vocab:
    raise _error("unknown_token_id", "no id", "that of an unknown word")
  # Without the key, a vocabulary without capitals is that of texts without.
  capitals = any(
    set(x) & set(string.ascii_uppercase)
    for x, kind in zip(tokens, kinds, strict=True)
    if kind == _NORMAL and not _bracketed(x)
  )
  accents = "normalizer.strip_accents"
  return {
    "normalizer": {
      "type": "BertNormalizer", "clean_text": True,
      "handle_chinese_chars": True,
      "strip_accents": (
        _flag(entries, accents, False) if accents in entries else None
      ),
      "lowercase": _flag(entries, "normalizer.lowercase", not capitals),
    },
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {
      "type": "WordPiece", "unk_token": name, "vocab": vocab,
      "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
    },
  }  # fmt: skip


def _merges(
  tokens: list[str],
  kinds: list[int],
  vocab: Mapping[str, int],
  scores: list[float],
) -> list[list[str]]:
  """All pairs that form a token, those of the best token first."""
  ranked: list[tuple[float, int, int, str, str]] = []
  for x, kind, score in zip(tokens, kinds, scores, strict=True):
    if kind != 1 and not (kind == _USER and not x.strip(_SPACE)):
      continue
    for at in range(1, len(x)):
      first_id, second_id = vocab.get(x[:at]), vocab.get(x[at:])
      if first_id is not None and second_id is not None:
        ranked.append((-score, first_id, second_id, x[:at], x[at:]))
  ranked.sort()
  return [[first, second] for *_, first, second in ranked]

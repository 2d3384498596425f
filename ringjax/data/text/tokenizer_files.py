"""Side files of a tokenizer.json: special tokens, chat template.

Guarantees: each file is read once, up to a limit of bytes; a file that is not
regular, not JSON or of a wrong type is a `TokenizerError` that names it. A
file may be missing.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from ringjax.errors import StorageError, TokenizerError
from ringjax.json_text import json_text
from ringjax.paths import AnyPath, open_binary
from ringjax.regular_files import inside, open_regular

SIDE_FILE_BYTES = 16 << 20

_CONFIG = "tokenizer_config.json"

_NAMED = (
  "bos_token",
  "eos_token",
  "unk_token",
  "pad_token",
  "sep_token",
  "cls_token",
  "mask_token",
)
_LISTED = ("additional_special_tokens", "extra_special_tokens")


class TokenizerConfig:
  """Settings in the files next to a tokenizer.json.

  Args:
    path: Folder of the files, or its address.

  Raises:
    TokenizerError: If one of them is too large or malformed.
  """

  def __init__(self, path: AnyPath):
    newer = _read_json(path / _CONFIG)
    self._config = _read_json(path / "special_tokens_map.json")
    # The newer file counts, unless a value is null.
    self._config |= {k: v for k, v in newer.items() if v is not None}
    self._eos = None
    for file in ("config.json", "generation_config.json"):
      eos_ids = _read_json(path / file).get("eos_token_id")
      if eos_ids is not None:
        _check_ids(file, eos_ids)
        self._eos = eos_ids
    self.chat_template = _template(path, newer.get("chat_template"))

  def names(self) -> dict[str, Any]:
    """Texts of special tokens, by the names that chat templates use."""
    names: dict[str, Any] = {n: text_of(self._config.get(n)) for n in _NAMED}
    for name in _LISTED:
      tokens = self._config.get(name)
      if isinstance(tokens, dict):
        names |= {k: text_of(v) for k, v in tokens.items() if text_of(v)}
      elif tokens:
        names[name] = self._listed(name)
    return {k: v for k, v in names.items() if v is not None}

  def texts(self) -> list[str]:
    """All texts that are listed as special."""
    named = [text_of(self._config.get(name)) for name in _NAMED]
    for name in _LISTED:
      named += self._listed(name)
    return [text for text in named if text]

  def added(self) -> list[tuple[int, dict[str, Any]]]:
    """Tokens that are listed by id, in order."""
    by_id = self._config.get("added_tokens_decoder") or {}
    try:
      return sorted((int(i), dict(token)) for i, token in by_id.items())
    except (AttributeError, TypeError, ValueError):
      got = "an added_tokens_decoder that is no table by id"
      raise fault(_CONFIG, got, "ids with their tokens") from None

  def id_of(self, engine: tokenizers.Tokenizer, name: str) -> int | None:
    """The id of a named special token, or None.

    Raises:
      TokenizerError: If the token that begins or ends a text has no id.
    """
    text = text_of(self._config.get(name))
    token_id = None if text is None else engine.token_to_id(text)
    if text and token_id is None and name in ("bos_token", "eos_token"):
      got = f"{name} {text!r}, which has no id"
      raise fault(_CONFIG, got, "a token of tokenizer.json")
    return token_id

  def adds_bos(self, first: str | None) -> bool:
    """Whether texts begin with the bos_token.

    Args:
      first: Token that tokenizer.json puts before a text, or None.
    """
    stated = self._config.get("add_bos_token")
    if isinstance(stated, bool):
      return stated
    return first is not None and first == self.names().get("bos_token")

  def eos_ids(self, engine: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The ids at which a model stops."""
    ids = [] if self._eos is None else np.ravel(self._eos).tolist()
    eos_id = self.id_of(engine, "eos_token")
    ids += [] if eos_id is None else [eos_id]
    return tuple(dict.fromkeys(ids))

  def _listed(self, name: str) -> list[str]:
    tokens = self._config.get(name) or []
    tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
    if not isinstance(tokens, list):
      raise fault(_CONFIG, f"{name} {tokens!r}", "a list of tokens")
    return [text for text in map(text_of, tokens) if text]


def write_eos_ids(folder: AnyPath, ids: Sequence[int]) -> None:
  """Set the ids at which a model stops in its generation_config.json.

  Args:
    folder: Folder of the model.
    ids: Ids; those of the tokenizer count besides.
  """
  path = folder / "generation_config.json"
  config = _read_json(path) | {"eos_token_id": list(ids)}
  path.write_text(json_text(config, indent=2) + "\n", "utf-8")


def text_of(token: object) -> str | None:
  """Text of a special token, which is a string or a table; or None."""
  if isinstance(token, dict):
    token = token.get("content")
  if token is None or isinstance(token, str):
    return token or None
  raise fault(_CONFIG, f"a special token {token!r}", "its text")


def _template(path: AnyPath, named: Any) -> str | None:
  """The chat template of a folder, from a newer or an older file."""
  data = read_file(path / "chat_template.jinja", SIDE_FILE_BYTES)
  if data is not None:
    return data.decode("utf-8", "replace")
  if named is None:
    named = _read_json(path / "chat_template.json").get("chat_template")
  if isinstance(named, list):
    tables = [t for t in named if isinstance(t, dict)]
    named = {t.get("name"): t.get("template") for t in tables}.get("default")
  if named is None or isinstance(named, str):
    return named
  raise fault(_CONFIG, type(named).__name__, "a chat_template as text")


def _check_ids(file: str, ids: Any) -> None:
  row = ids if isinstance(ids, list) else [ids]
  if not all(type(i) is int and 0 <= i < 2**31 for i in row):
    raise fault(file, f"eos_token_id {ids!r}", "an id or a list of ids")


def read_file(path: AnyPath, limit: int) -> bytes | None:
  """A file's bytes; None if there is no file.

  Raises:
    TokenizerError: If it is a link out of its folder, cannot be read, or is
      larger than `limit` bytes.
    StorageError: If the storage of an object does not answer.
  """
  local = isinstance(path, pathlib.Path)
  if local and inside(path.parent, path.name) is None:
    raise fault(path.name, "a link out of the folder", "a file in the folder")
  try:
    with open(open_regular(path), "rb") if local else open_binary(path) as file:
      data = file.read(limit + 1)
  except FileNotFoundError:
    return None
  except StorageError:
    raise
  except OSError as error:
    raise fault(path.name, f"{error.strerror}", "a file to read") from error
  if len(data) > limit:
    raise fault(
      path.name, f"over {limit >> 20} MB", f"at most {limit >> 20} MB"
    )
  return data


def _read_json(path: AnyPath) -> dict[str, Any]:
  data = read_file(path, SIDE_FILE_BYTES)
  if data is None:
    return {}
  try:
    table = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise fault(path.name, f"no JSON: {error}", "JSON") from None
  if not isinstance(table, dict):
    raise fault(path.name, type(table).__name__, "a table")
  return table


def fault(argument: str, got: object, want: str) -> TokenizerError:
  """The error for a file of a tokenizer."""
  remedy = "download the model's files again"
  return TokenizerError(argument, got, want, remedy)

"""The small files beside a tokenizer.json, and what they say of it.

Guarantees: each file is read once, up to a limit of bytes; what is no regular
file, no JSON or not of the wanted kind is a `TokenizerError` that names the
file. A file that is not there says nothing.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from typing import Any

import numpy as np

from ringjax.errors import TokenizerError

SIDE_FILE_BYTES = 16 << 20

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
  """What the files beside tokenizer.json say."""

  def __init__(self, config: dict[str, Any], more: dict[str, Any]):
    self._config = config
    self._eos = more.get("eos_token_id")
    self.chat_template: str | None = more.get("chat_template")

  @classmethod
  def read(cls, path: pathlib.Path) -> TokenizerConfig:
    config = _read_json(path / "special_tokens_map.json")
    # The newer file has the last word, where it says anything.
    newer = _read_json(path / "tokenizer_config.json")
    config |= {k: v for k, v in newer.items() if v is not None}
    more: dict[str, Any] = {}
    for file in ("generation_config.json", "config.json"):
      found = _read_json(path / file).get("eos_token_id")
      if found is not None:
        _check_ids(file, found)
        more.setdefault("eos_token_id", found)
    more["chat_template"] = _template(path, newer.get("chat_template"))
    return cls(config, more)

  def names(self) -> dict[str, Any]:
    """Texts of special tokens, by the names that chat templates use."""
    named = {n: text_of(self._config.get(n)) for n in _NAMED}
    names: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    for name in _LISTED:
      found = self._config.get(name)
      if isinstance(found, dict):
        texts = {k: text_of(v) for k, v in found.items()}
        names |= {k: v for k, v in texts.items() if v is not None}
      elif found:
        names[name] = self._listed(name)
    return names

  def texts(self) -> list[str]:
    """All texts that are called special."""
    named = [text_of(self._config.get(name)) for name in _NAMED]
    for name in _LISTED:
      named += self._listed(name)
    return [text for text in named if text]

  def added(self) -> list[tuple[int, dict[str, Any]]]:
    """Tokens that are listed by id, in order."""
    found = self._config.get("added_tokens_decoder") or {}
    try:
      return sorted((int(i), dict(token)) for i, token in found.items())
    except (AttributeError, TypeError, ValueError):
      raise fault(
        "tokenizer_config.json",
        "an added_tokens_decoder that is no table by id",
        "ids with their tokens",
      ) from None

  def id_of(self, engine: Any, name: str) -> int | None:
    text = text_of(self._config.get(name))
    found = None if text is None else engine.token_to_id(text)
    if text and found is None and name in ("bos_token", "eos_token"):
      raise fault(
        "tokenizer_config.json",
        f"{name} {text!r}, which has no id",
        "a token of tokenizer.json",
      )
    return found

  def adds_bos(self, first: str | None) -> bool:
    """Whether texts begin with the bos_token; `first` is what a file puts."""
    said = self._config.get("add_bos_token")
    if isinstance(said, bool):
      return said
    return first is not None and first == self.names().get("bos_token")

  def eos_ids(self, engine: Any) -> tuple[int, ...]:
    ids = [] if self._eos is None else np.ravel(self._eos).tolist()
    own = self.id_of(engine, "eos_token")
    ids += [] if own is None else [own]
    return tuple(dict.fromkeys(ids))

  def _listed(self, name: str) -> list[str]:
    found = self._config.get(name) or []
    found = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(found, list):
      raise fault(
        "tokenizer_config.json", f"{name} {found!r}", "a list of tokens"
      )
    return [text for text in map(text_of, found) if text]


def text_of(token: Any) -> str | None:
  """The text of a special token, which is written as itself or as a table."""
  if isinstance(token, dict):
    token = token.get("content")
  if token is None or isinstance(token, str):
    return token or None
  raise fault("tokenizer_config.json", f"a special token {token!r}", "its text")


def _template(path: pathlib.Path, named: Any) -> str | None:
  """The chat template of a folder, from wherever its age put it."""
  data = read_file(path / "chat_template.jinja", SIDE_FILE_BYTES)
  if data is not None:
    return data.decode("utf-8", "replace")
  if named is None:
    named = _read_json(path / "chat_template.json").get("chat_template")
  if isinstance(named, list):
    table = {
      t.get("name"): t.get("template") for t in named if isinstance(t, dict)
    }
    named = table.get("default")
  if named is None or isinstance(named, str):
    return named
  raise fault(
    "tokenizer_config.json", type(named).__name__, "a chat_template as text"
  )


def _check_ids(file: str, ids: Any) -> None:
  row = ids if isinstance(ids, list) else [ids]
  if not all(type(i) is int and 0 <= i < 2**31 for i in row):
    raise fault(file, f"eos_token_id {ids!r}", "an id or a list of ids")


def read_file(path: pathlib.Path, limit: int) -> bytes | None:
  """A file's bytes; None if there is no file."""
  try:
    with open(path, "rb", opener=_opener) as file:
      if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise fault(path.name, "no regular file", "a file")
      data = file.read(limit + 1)
  except FileNotFoundError:
    return None
  except OSError as error:
    raise fault(path.name, f"{error.strerror}", "a file to read") from error
  if len(data) > limit:
    raise fault(
      path.name, f"over {limit >> 20} MB", f"at most {limit >> 20} MB"
    )
  return data


def _opener(path: str, flags: int) -> int:
  # Opening a pipe would wait for its other end.
  return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  data = read_file(path, SIDE_FILE_BYTES)
  if data is None:
    return {}
  try:
    found = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise fault(path.name, f"no JSON: {error}", "JSON") from None
  if not isinstance(found, dict):
    raise fault(path.name, type(found).__name__, "a table")
  return found


def fault(argument: str, got: object, want: str) -> TokenizerError:
  remedy = "get the model's files again, or mend this one"
  return TokenizerError(argument, got, want, remedy)

"""Texts from text files and JSON lines, and a corpus of them.

Guarantees: texts come in a fixed order, files by name, and one at a time. An
error names the file and line of a bad text; it ends the reading, or is passed
to `on_bad` and the text is left out. Files and lines are not read beyond their
limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from ringjax.data.batches import corpus
from ringjax.data.text.special_tokens import as_text
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError, PromptError
from ringjax.paths import AnyPath, as_path, open_binary

FILE_BYTES = 1 << 30
LINE_BYTES = 64 << 20

Path = str | os.PathLike[str]
OnBad = Callable[[str], None]
T = TypeVar("T")


def find(folder: Path, pattern: str = "**/*.txt") -> list[AnyPath]:
  """Finds the files of a folder, sorted by name.

  Args:
    folder: Folder to look in, or its address.
    pattern: Pattern of `pathlib.Path.glob`; ** stands for any folders.

  Raises:
    DataError: If no file matches.
  """
  place = as_path(folder, "folder")
  paths: list[AnyPath]
  if isinstance(place, pathlib.Path):
    paths = [*sorted(p for p in place.glob(pattern) if p.is_file())]
  else:
    # Each is an object.
    paths = [*place.glob(pattern)]
  if not paths:
    raise DataError(
      "folder",
      f"{folder}, without a file {pattern}",
      "files of text",
      "pass another folder or pattern",
    )
  return paths


def from_files(
  paths: Iterable[Path], *, on_bad: OnBad | None = None
) -> Iterator[str]:
  """Reads the text of each file, in UTF-8.

  Args:
    paths: Paths or addresses of the files, each of at most `FILE_BYTES`.
    on_bad: Called with the error of a bad file, which is then left out.

  Raises:
    DataError: If a file is bad, and there is no `on_bad`.
    OSError: If a file cannot be read.
  """
  for path in paths:
    with open_binary(path) as file:
      data = file.read(FILE_BYTES + 1)
    with _reported(on_bad) as texts:
      if len(data) > FILE_BYTES:
        raise _fault(str(path), f"over {FILE_BYTES} bytes", "a smaller file")
      texts.append(_decoded(str(path), data))
    yield from texts


def from_jsonl(
  paths: Iterable[Path], *, field: str = "text", on_bad: OnBad | None = None
) -> Iterator[str]:
  """Reads the text of each line of JSON-lines files; blank lines are skipped.

  Args:
    paths: Paths or addresses of the files; a line has at most `LINE_BYTES`.
    field: Name of the text in its object.
    on_bad: Called with the error of a bad line, which is then left out.

  Raises:
    DataError: If a line is bad, and there is no `on_bad`.
    OSError: If a file cannot be read.
  """

  def text_of(place: str, content: object) -> str:
    if not isinstance(content, dict) or not isinstance(content.get(field), str):
      kind = type(content).__name__
      if isinstance(content, dict):
        kind = (
          f"an object with {field!r} of {type(content.get(field)).__name__}"
        )
      raise _fault(place, kind, f"an object with a text {field!r}")
    try:
      return as_text(field, content[field])
    except PromptError as error:
      raise _fault(place, str(error), "text that has a UTF-8 form") from None

  yield from from_lines(paths, text_of, on_bad=on_bad)


def from_lines(
  paths: Iterable[Path],
  read: Callable[[str, object], T],
  *,
  on_bad: OnBad | None = None,
) -> Iterator[T]:
  """Reads each line of JSON-lines files; blank lines are skipped.

  Args:
    paths: Paths or addresses of the files; a line has at most `LINE_BYTES`.
    read: Function of a line's place, FILE:NUMBER, and its JSON.
    on_bad: Called with the error of a bad line, which is then left out.

  Raises:
    DataError: If a line is bad, and there is no `on_bad`.
    OSError: If a file cannot be read.
  """
  for path in paths:
    with open_binary(path) as file:
      number = 0
      while line := file.readline(LINE_BYTES + 1):
        number += 1
        place = f"{path}:{number}"
        with _reported(on_bad) as values:
          if len(line) > LINE_BYTES:
            # Skips the rest of the line.
            while line and not line.endswith(b"\n"):
              line = file.readline(LINE_BYTES)
            raise _fault(place, f"over {LINE_BYTES} bytes", "a shorter line")
          if line.strip():
            values.append(read(place, _json(place, line)))
        yield from values


def build(
  path: Path,
  texts: Iterable[str],
  tokenizer: AnyTokenizer,
  *,
  progress: Callable[[int, int], None] | None = None,
) -> None:
  """Writes a corpus of texts, each followed by the id that ends a text.

  Args:
    path: Path of the file to write.
    texts: Documents. They never become special tokens.
    tokenizer: A `Tokenizer` or `Bytes`; if its model was trained with an id
      that begins a text, that comes first.
    progress: Called with documents and tokens so far, after each document.

  Raises:
    DataError: If the tokenizer has no id that ends a text, or there is no text.
  """
  if not tokenizer.eos_ids:
    raise DataError(
      "tokenizer",
      f"{tokenizer.name}, without an eos_token",
      "an id that ends a text",
      "set eos_token in its tokenizer_config.json",
    )
  end = np.array(tokenizer.eos_ids[:1], np.int32)
  corpus.write(
    path,
    (
      np.concatenate([tokenizer.encode(text, bos=tokenizer.adds_bos), end])
      for text in texts
    ),
    vocab=tokenizer.vocab_size,
    tokenizer_fingerprint=corpus.fingerprint(tokenizer),
    progress=progress,
  )


def _json(where: str, line: bytes) -> object:
  try:
    return json.loads(_decoded(where, line))
  except (json.JSONDecodeError, RecursionError) as error:
    raise _fault(where, f"no JSON: {error}", "an object a line") from None


def _decoded(where: str, data: bytes) -> str:
  try:
    # utf-8-sig drops the byte order mark of some editors.
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise _fault(where, f"no UTF-8 at byte {error.start}", "UTF-8") from None


@contextlib.contextmanager
def _reported(on_bad: OnBad | None) -> Iterator[list[Any]]:
  """Passes an error of the block to `on_bad`; yields a list for its value."""
  try:
    yield []
  except DataError as error:
    if on_bad is None:
      raise
    on_bad(str(error))


def _fault(where: str, got: str, want: str) -> DataError:
  return DataError(where, got, want, "repair it, or pass on_bad")

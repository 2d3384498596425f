"""Texts from files of lines and folders, and a corpus of them.

Guarantees: texts come in a fixed order, files by name, and one at a time. A
text that is wrong is told with its file and line; it ends the reading, or is
left out if `on_bad` takes the report. No file and no line is read beyond its
limit.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ringjax.data import corpus
from ringjax.data.special_tokens import as_text
from ringjax.errors import DataError, PromptError

FILE_BYTES = 1 << 30
LINE_BYTES = 64 << 20

Path = str | os.PathLike[str]
OnBad = Callable[[str], None]


def find(folder: Path, pattern: str = "**/*.txt") -> list[pathlib.Path]:
  """The files of a folder, by name.

  Args:
    folder: where to look.
    pattern: as `pathlib.Path.glob` has it; ** is any folders.

  Raises:
    DataError: there are none.
  """
  found = sorted(p for p in pathlib.Path(folder).glob(pattern) if p.is_file())
  if not found:
    raise DataError(
      "folder",
      f"{folder}, without a file {pattern}",
      "files of text",
      "pass another folder or pattern",
    )
  return found


def from_files(
  paths: Iterable[Path], *, on_bad: OnBad | None = None
) -> Iterator[str]:
  """The text of each file, in UTF-8.

  Args:
    paths: the files, each of at most `FILE_BYTES`.
    on_bad: called with what is wrong with a file, which is then left out.

  Raises:
    DataError: a file is wrong, and there is no `on_bad`.
    OSError: a file cannot be read.
  """
  for path in paths:
    with open(path, "rb") as file:
      data = file.read(FILE_BYTES + 1)
    try:
      if len(data) > FILE_BYTES:
        raise _fault(str(path), f"over {FILE_BYTES} bytes", "a smaller file")
      text = _decoded(str(path), data)
    except DataError as error:
      _report(error, on_bad)
      continue
    yield text


def from_jsonl(
  paths: Iterable[Path], *, field: str = "text", on_bad: OnBad | None = None
) -> Iterator[str]:
  """A text from each line of files of JSON objects; blank lines have none.

  Args:
    paths: the files; a line has at most `LINE_BYTES`.
    field: the name of the text in its object.
    on_bad: called with what is wrong with a line, which is then left out.

  Raises:
    DataError: a line is wrong, and there is no `on_bad`.
    OSError: a file cannot be read.
  """
  for path in paths:
    with open(path, "rb") as file:
      number = 0
      while line := file.readline(LINE_BYTES + 1):
        number += 1
        where = f"{path}:{number}"
        try:
          if len(line) > LINE_BYTES:
            # The rest of it is no line of its own.
            while line and not line.endswith(b"\n"):
              line = file.readline(LINE_BYTES)
            raise _fault(where, f"over {LINE_BYTES} bytes", "a shorter line")
          if not line.strip():
            continue
          text = _text_of(where, line, field)
        except DataError as error:
          _report(error, on_bad)
          continue
        yield text


def build(
  path: Path,
  texts: Iterable[str],
  tokenizer: Any,
  *,
  progress: Callable[[int, int], None] | None = None,
) -> None:
  """Writes the corpus of texts, each with the id that ends one behind it.

  Args:
    path: the file to write.
    texts: the documents. What they say never becomes a special token.
    tokenizer: a `Tokenizer` or `Bytes`; where it knows an id that begins a
      text and its model was trained so, that comes first.
    progress: called with documents and tokens so far, after each document.

  Raises:
    DataError: the tokenizer has no id that ends a text, or there is no text.
  """
  if not tokenizer.eos_ids:
    raise DataError(
      "tokenizer",
      f"{tokenizer.name}, without an eos_token",
      "an id that ends a text",
      "name one in its tokenizer_config.json",
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


def _text_of(where: str, line: bytes, field: str) -> str:
  try:
    found = json.loads(_decoded(where, line))
  except (json.JSONDecodeError, RecursionError) as error:
    raise _fault(where, f"no JSON: {error}", "an object a line") from None
  if not isinstance(found, dict) or not isinstance(found.get(field), str):
    what = type(found).__name__
    if isinstance(found, dict):
      what = f"an object with {field!r} of {type(found.get(field)).__name__}"
    raise _fault(where, what, f"an object with a text {field!r}")
  try:
    return as_text(field, found[field])
  except PromptError as error:
    raise _fault(where, str(error), "text that has a UTF-8 form") from None


def _decoded(where: str, data: bytes) -> str:
  try:
    # Without the mark with which some editors begin a file.
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise _fault(where, f"no UTF-8 at byte {error.start}", "UTF-8") from None


def _report(error: DataError, on_bad: OnBad | None) -> None:
  if on_bad is None:
    raise error
  on_bad(str(error))


def _fault(where: str, got: str, want: str) -> DataError:
  return DataError(where, got, want, "mend it, or pass on_bad")

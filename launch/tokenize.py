"""Makes a file of tokens out of text, for launch.train.

  python -m launch.tokenize --tokenizer=DIR --out=book.tokens texts/*.txt
      Each file is a document.
  python -m launch.tokenize --tokenizer=bytes --out=web.tokens web.jsonl
      Each line of a .jsonl file is one: its --field.
  python -m launch.tokenize --tokenizer=DIR --out=all.tokens FOLDER
      All .txt and .jsonl files below a folder.
  python -m launch.tokenize --tokenizer=DIR --out=gs://B/all.tokens gs://B/texts
      Of an object storage.

A config then has {"kind": "corpus", "path": "book.tokens"} among its sources.
The file is written completely or not at all. Text never becomes a special
token.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from absl import flags

from ringjax.data import Corpus
from ringjax.data.batches import texts
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.paths import AnyPath, as_path

from .shared import common, console, sources
from .shared.flag_helpers import FlagHelper

NAME = "tokenize"
_MEMORY = "split the longest file into several"


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.model(
    "tokenizer",
    None,
    "Folder with a tokenizer.json, a name as of launch.fetch, or bytes.",
  )
  new.output("out", None, "File to write.")
  new.text("field", "text", "Of a line's object, in .jsonl files.")
  new.boolean("skip_bad", False, "Leaves out what is wrong, and says so.")
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Encodes the files and folders in `words`; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  with console.Run(
    screen,
    _MEMORY,
    doing="encoding",
    interrupted="interrupted; nothing was written",
  ) as run:
    for name in ("tokenizer", "out"):
      if values[name].value is None:
        raise OptionError(
          f"--{name}", "no value", "a value", "see --help for examples"
        )
    files = list(_files(words))
    screen.begin(
      "encoding", sum(file.stat().st_size for file in files), "bytes"
    )
    _write(values, files, screen)
    corpus = Corpus.open(values.out)
  if run.status:
    return run.status
  screen.end()
  tokens = int(corpus.lengths.sum())
  record = {
    "out": str(values.out),
    "documents": len(corpus),
    "tokens": tokens,
    "longest": int(corpus.lengths.max()),
    "bytes": as_path(values.out).stat().st_size,
  }
  summary = (
    f"{values.out}: {record['documents']:,} documents, {tokens:,} tokens, the "
    f"longest {record['longest']:,}, {console.nbytes(record['bytes'])}"
  )
  print(json_text(record) if values.json else summary, file=stdout, flush=True)
  return 0


def _write(
  values: flags.FlagValues, files: list[AnyPath], screen: console.Screen
) -> None:
  """Encodes all texts, file by file."""
  on_bad = screen.say if values.skip_bad else None
  encoded_bytes = 0

  def documents() -> Iterator[str]:
    nonlocal encoded_bytes
    previous_bytes = 0
    for file in files:
      if file.suffix == ".jsonl":
        file_texts = texts.from_jsonl([file], field=values.field, on_bad=on_bad)
      else:
        file_texts = texts.from_files([file], on_bad=on_bad)
      size = file.stat().st_size
      for text in file_texts:
        # The text of a JSON line is shorter than the line: the rest counts at
        # the end of the file.
        encoded_bytes = min(
          encoded_bytes + len(text.encode()), previous_bytes + size
        )
        yield text
      previous_bytes += size
      encoded_bytes = previous_bytes

  texts.build(
    values.out,
    documents(),
    sources.tokenizer(values.tokenizer),
    progress=lambda documents, tokens: screen.at(encoded_bytes),
  )


def _files(words: Sequence[str]) -> Iterator[AnyPath]:
  """Yields the named files, and the text files below folders, sorted.

  Raises:
    OptionError: If a path does not exist, is not readable or has no text files.
  """
  if not words:
    raise OptionError("files", "none", "files or folders of text", "name some")
  for word in words:
    path = as_path(word, "files")
    local = isinstance(path, pathlib.Path)
    if not (os.access(path, os.R_OK) if local else path.exists()):
      problem = "may not be read" if path.exists() else "is not there"
      raise OptionError(
        "files",
        f"{path}, which {problem}",
        "files or folders of text",
        "pass a path that exists and may be read",
      )
    if not path.is_dir():
      yield path
      continue
    text_files = [
      p
      for p in sorted(path.rglob("*"))
      if p.suffix in (".txt", ".jsonl") and p.is_file()
    ]
    if not text_files:
      raise OptionError(
        "files",
        f"{word}, without a .txt or .jsonl file",
        "a folder of text",
        "name its files",
      )
    yield from text_files


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)

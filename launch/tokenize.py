"""Makes a file of tokens out of text, for launch.train.

  python -m launch.tokenize --tokenizer=DIR --out=book.tokens texts/*.txt
      Each file is a document.
  python -m launch.tokenize --tokenizer=bytes --out=web.tokens web.jsonl
      Each line of a .jsonl file is one: its --field.
  python -m launch.tokenize --tokenizer=DIR --out=all.tokens FOLDER
      All .txt and .jsonl files below a folder.

A config then has {"kind": "corpus", "path": "book.tokens"} among its sources.
The file is there whole or not at all. What text says never becomes a special
token.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from absl import flags

from launch import common, console, sources
from launch.flag_helpers import FlagHelper
from ringjax.data import Corpus, texts
from ringjax.errors import OptionError
from ringjax.json_text import json_text

NAME = "tokenize"
_MEMORY = "split the longest file into several"


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  new = FlagHelper(values)
  new.model(
    "tokenizer",
    None,
    "Folder with a tokenizer.json, a name as of launch.fetch, or bytes.",
  )
  new.path("out", None, "File to write.")
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
  """Does what the flags and `words`, files and folders, say; the status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  try:
    for name in ("tokenizer", "out"):
      if values[name].value is None:
        raise OptionError(
          f"--{name}", "no value", "a value", "see --help for examples"
        )
    common.check_files(values, "out")
    files = list(_files(words))
    screen.begin(
      "encoding", sum(file.stat().st_size for file in files), "bytes"
    )
    _write(values, files, screen)
    made = Corpus.open(values.out)
  except KeyboardInterrupt:
    screen.error("interrupted; nothing was written")
    return console.INTERRUPTED
  except Exception as error:
    return screen.failed(error, "encoding", _MEMORY)
  screen.end()
  tokens = int(made.lengths.sum())
  record = {
    "out": str(values.out),
    "documents": len(made),
    "tokens": tokens,
    "longest": int(made.lengths.max()),
    "bytes": pathlib.Path(values.out).stat().st_size,
  }
  said = (
    f"{values.out}: {record['documents']:,} documents, {tokens:,} tokens, the "
    f"longest {record['longest']:,}, {console.nbytes(record['bytes'])}"
  )
  print(json_text(record) if values.json else said, file=stdout, flush=True)
  return 0


def _write(
  values: flags.FlagValues, files: list[pathlib.Path], screen: console.Screen
) -> None:
  """Encodes all texts, file by file."""
  on_bad = screen.say if values.skip_bad else None
  done = 0

  def documents() -> Iterator[str]:
    nonlocal done
    before = 0
    for file in files:
      if file.suffix == ".jsonl":
        found = texts.from_jsonl([file], field=values.field, on_bad=on_bad)
      else:
        found = texts.from_files([file], on_bad=on_bad)
      size = file.stat().st_size
      for text in found:
        # Of a line of JSON its text counts; at the end, all of the file.
        done = min(done + len(text.encode()), before + size)
        yield text
      before += size
      done = before

  texts.build(
    values.out,
    documents(),
    sources.tokenizer(values.tokenizer),
    progress=lambda documents, tokens: screen.at(done),
  )


def _files(words: Sequence[str]) -> Iterator[pathlib.Path]:
  """What is named, and what lies below a folder, in order of names.

  Raises:
    OptionError: something that is not there, or that may not be read.
  """
  if not words:
    raise OptionError("files", "none", "files or folders of text", "name some")
  for word in words:
    path = pathlib.Path(word)
    if not os.access(path, os.R_OK):
      there = "may not be read" if path.exists() else "is not there"
      raise OptionError(
        "files",
        f"{path}, which {there}",
        "files or folders of text",
        "pass a path that exists and may be read",
      )
    if not path.is_dir():
      yield path
      continue
    found = [
      p
      for p in sorted(path.rglob("*"))
      if p.suffix in (".txt", ".jsonl") and p.is_file()
    ]
    if not found:
      raise OptionError(
        "files",
        f"{word}, without a .txt or .jsonl file",
        "a folder of text",
        "name its files",
      )
    yield from found


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)

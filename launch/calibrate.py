"""Measures a model's keys and values, for a cache of code books (KVQuant).

  python -m launch.calibrate --model=DIR --text=FILE
      Writes DIR/kv_calibration.safetensors. Then:
  python -m launch.generate --model=DIR --cache=nuq3:calibration=DIR ...
      A cache of 3 bits a number and its outliers.

--text is a file, or a folder of .txt and .jsonl files; without it Python's own
sources are read. Without --model it is the model that ships with ringjax, and
--out has to be given. A run that was killed resumes where it was.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from launch import common, console
from launch.flag_helpers import FlagHelper
from launch.group import Group
from ringjax.data import Tokenizer, documents, texts
from ringjax.errors import OptionError, PromptError
from ringjax.infer.calibrate import calibrate
from ringjax.models import tiny
from ringjax.models.calibration import FILE

NAME = "calibrate"
_MEMORY = "shorten the texts (--length), or use more devices"


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  new = FlagHelper(values)
  new.text("model", None, "Hugging Face folder; default: the one in ringjax.")
  new.text(
    "dtype", None, "bfloat16, float16 or float32; default: the folder's."
  )
  new.text("text", None, "File or folder of text; default: Python's sources.")
  new.text("out", None, "Folder for the calibration; default: the model's.")
  new.whole("rows", 16, "Texts that are measured.")
  new.whole("length", 2048, "Tokens of each.", 16)
  new.number("outliers", 0.01, "Part of a channel beyond its scale.", 0)
  new.whole("first", 1, "Tokens at the beginning of a text to leave out.", 0)
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Does what the flags say; the exit status."""
  common.quiet_logging()
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  group = Group(screen, lambda: "calibrating")
  try:
    if words:
      raise OptionError(
        "arguments", " ".join(words), "flags only", "see --help for examples"
      )
    record = _calibrate(values, screen, group)
  except KeyboardInterrupt as error:
    screen.error("interrupted; run the same command again to resume")
    group.leave(error, console.INTERRUPTED)
    return console.INTERRUPTED
  except Exception as error:
    return group.failed(error, "calibrating", _MEMORY)
  group.close()
  screen.end()
  if screen.quiet:
    return 0
  said = f"{record['out']}: measured on {record['tokens']:,} tokens"
  print(json.dumps(record) if values.json else said, file=stdout, flush=True)
  return 0


def _calibrate(
  values: flags.FlagValues, screen: console.Screen, group: Group
) -> dict[str, object]:
  """Measures, and writes the file."""
  if values.out is None and values.model is None:
    raise OptionError(
      "--out",
      "no value, without --model",
      "a folder for the calibration",
      "pass --out=DIR",
    )
  out = pathlib.Path(values.out or values.model)
  out.mkdir(parents=True, exist_ok=True)
  found = _texts(values.text)
  common.start(values)
  group.meet()
  screen.quiet = jax.process_index() > 0
  screen.begin("loading the model")
  folder = values.model or tiny.path()
  mesh = common.mesh(values.mesh)
  model = rj.models.load(folder, mesh=mesh, dtype=values.dtype)
  tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
  rows = _rows(tokenizer, found, values.rows, values.length)
  screen.begin("measuring", 2 * len(rows), "passes")
  made = calibrate(
    model,
    rows,
    outliers=values.outliers,
    first=values.first,
    folder=out,
    progress=lambda done, total: screen.at(done),
  )
  return {
    "out": str(out / FILE),
    "model": made.model,
    "digest": made.digest,
    "tokens": int(rows.size),
  }


def _texts(path: str | None) -> list[str]:
  if path is None:
    return documents.library(held_out=False)
  file = pathlib.Path(path)
  files = texts.find(file) if file.is_dir() else [file]
  return list(texts.from_files(files))


def _rows(
  tokenizer: Tokenizer, found: Sequence[str], rows: int, length: int
) -> np.ndarray:
  """int32 [rows, length]: texts one behind another, cut into rows."""
  ids: list[int] = []
  for text in found:
    ids.extend(tokenizer.encode(text))
    if len(ids) >= rows * length:
      return np.asarray(ids[: rows * length], np.int32).reshape(rows, length)
  raise PromptError(
    "--text",
    f"{len(ids):,} tokens",
    f"{rows * length:,}, for {rows} texts of {length}",
    "pass more text, or fewer --rows or a smaller --length",
  )


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)

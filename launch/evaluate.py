"""Measures what a model does with a long context.

  python -m launch.evaluate needle --lengths=4096,16384 --plot=needle.png
      Facts hidden in a long text, by its length and their depth. The text is
      Python's own sources, or those of --folder.
  python -m launch.evaluate perplexity --lengths=2048,8192 --plot=nll.png
      How well it foretells such a text, by position; and the same tokens, with
      more and more before them.
  python -m launch.evaluate curves --log=DIR/log.jsonl --plot=run.png
      A training by its log.

Without --model it is the model that ships with ringjax. Of Python's sources it
is the one file in ten that training keeps out (`documents.library`). Prompts
are read over all devices; see --mesh and --prefill. --out is written after each
length and depth, or each curve; "complete" in it says whether it has all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from launch import common, console
from launch.flag_helpers import Definer
from launch.group import Group
from ringjax.bench import timing
from ringjax.data import Tokenizer, documents, texts
from ringjax.data.filler import Lines
from ringjax.data.needle import TASKS
from ringjax.errors import OptionError
from ringjax.eval import Cell, Curve, charts, find, reader
from ringjax.infer import METHODS
from ringjax.models import tiny

NAME = "evaluate"
# Characters by which tokens of a text are guessed.
_SAMPLE = 1 << 16
_MEMORY = "shorten the text (--lengths), or use more devices"


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  new = Definer(values)
  new.text("model", None, "Hugging Face folder; default: the one in ringjax.")
  new.text(
    "dtype", None, "bfloat16, float16 or float32; default: the folder's."
  )
  new.texts("lengths", ["4096", "16384"], "Tokens of the texts.")
  flags.DEFINE_enum(
    "task", "passkey", list(TASKS), "needle: what is asked.", flag_values=values
  )
  new.texts("depths", None, "needle: where facts stand; default 0,0.25,..,1.")
  new.whole("trials", 4, "needle: texts of each length and depth.")
  flags.DEFINE_enum(
    "prefill", "auto", METHODS, "How to read.", flag_values=values
  )
  new.whole("chunk", None, "Tokens of a chunk, with --prefill=chunked.")
  flags.DEFINE_enum(
    "cache_dtype",
    None,
    ["bfloat16", "float16", "float32"],
    "Of the cache; default: the model's.",
    flag_values=values,
  )
  new.whole("rows", 8, "perplexity: texts of each length.")
  new.text(
    "folder",
    None,
    "Folder of .txt files in which facts are hidden, or that are predicted; "
    "default: held-out files of Python's library.",
  )
  new.whole("seed", 0, "needle: random seed of the texts.", 0)
  new.text("log", None, "curves: the log.jsonl of a training.")
  new.text("plot", None, "PNG to draw (needs matplotlib).")
  new.text("out", None, "File for all figures, JSON.")
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answer:
  """Figures, and how they are said and drawn."""

  record: dict[str, Any]
  lines: list[str]
  draw: Callable[[str], None]


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Does what the flags and `words`, a sub-command, say; the exit status."""
  common.calm()
  screen = console.Screen(NAME, stderr)
  doing = f"evaluating {' '.join(words)}"
  group = Group(screen, lambda: doing)
  if len(words) != 1 or words[0] not in _COMMANDS:
    given = " ".join(words) or "nothing"
    screen.error(f"got {given}; wanted {' or '.join(_COMMANDS)}; see --help")
    return 2
  kept = _Kept(screen, values.out)
  try:
    _refuse_unused(values, words[0])
    common.check_files(values, "plot", "out")
    answer = _COMMANDS[words[0]](values, screen, group, kept)
  except KeyboardInterrupt as error:
    screen.error(f"interrupted; {kept.said}")
    group.leave(error, console.INTERRUPTED)
    return console.INTERRUPTED
  except Exception as error:
    if kept.done:
      screen.say(kept.said)
    return group.failed(error, doing, _MEMORY)
  group.close()
  screen.end()
  # One process writes. Not by JAX's number of it, which would start JAX.
  if screen.quiet:
    return 0
  try:
    if values.out is not None:
      timing.write_json(values.out, answer.record)
    if values.plot is not None:
      answer.draw(values.plot)
      screen.say(f"wrote {values.plot}")
  except Exception as error:
    return screen.failed(error, "writing", _MEMORY)
  stdout = sys.stdout if stdout is None else stdout
  text = json.dumps(answer.record) if values.json else "\n".join(answer.lines)
  print(text, file=stdout, flush=True)
  return 0


class _Kept:
  """The figures so far, in --out: whoever is stopped has what was found.

  Attributes:
    done: how many of them are written.
    said: what there is, in words.
  """

  def __init__(self, screen: console.Screen, path: str | None):
    self._screen, self._path = screen, path
    self.done, self.said = 0, "nothing was written"

  def write(
    self, record: dict[str, Any], done: int, total: int, unit: str
  ) -> None:
    """So many of the figures are in `record`."""
    if self._path is None or self._screen.quiet:
      return
    timing.write_json(self._path, {**record, "complete": False})
    self.done = done
    self.said = f"{self._path} has {done} of {total} {unit}"


def _refuse_unused(values: flags.FlagValues, word: str) -> None:
  """No flag that was set is without effect."""
  mine = flags.FlagValues()
  define(mine)
  unused = [
    f"--{name}"
    for name in sorted(mine)
    if values[name].present and not _uses(word, name)
  ]
  if unused:
    raise OptionError(
      "flags",
      f"{', '.join(unused)} with {word}",
      "those that it uses",
      "leave them out; see --help",
    )


def _uses(word: str, name: str) -> bool:
  """Whether a sub-command looks at a flag."""
  if word == "curves":
    return name in ("log", "plot", "out", "json")
  only = {"task": "needle", "depths": "needle", "trials": "needle",
          "seed": "needle", "rows": "perplexity", "log": "curves"}  # fmt: skip
  return only.get(name, word) == word


def _begin(
  values: flags.FlagValues, screen: console.Screen, group: Group
) -> Any:
  """The model, its tokenizer and the mesh."""
  common.start(values)
  group.meet()
  screen.quiet = jax.process_index() > 0
  screen.begin("loading the model")
  mesh = common.mesh(values.mesh)
  folder = values.model or tiny.path()
  model = rj.models.load(folder, mesh=mesh, dtype=values.dtype)
  tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
  return model, tokenizer, mesh


def _numbers(
  name: str, given: Sequence[str], kind: Any, least: float, most: float
) -> list[Any]:
  """What a list of numbers says, each from `least` to `most`."""
  try:
    found = [kind(text) for text in given]
  except ValueError:
    found = []
  # Not `x < least`: NaN is none of them.
  if not found or not all(least <= x <= most for x in found):
    want = (
      f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
    )
    raise OptionError(
      f"--{name}",
      ",".join(given) or "none",
      f"numbers of {want}",
      "correct them",
    )
  return found


def _lengths(values: flags.FlagValues) -> list[int]:
  return _numbers("lengths", values.lengths, int, 1, math.inf)


# ---------------------------------------------------------------------------
# Sub-commands
# ---------------------------------------------------------------------------


def _needle(
  values: flags.FlagValues,
  screen: console.Screen,
  group: Group,
  kept: _Kept,
) -> _Answer:
  lengths = _lengths(values)
  given = ["0", "0.25", "0.5", "0.75", "1"]
  if values.depths is not None:
    given = values.depths
  depths = _numbers("depths", given, float, 0, 1)
  filler = Lines(text="\n".join(_texts(values)))
  model, tokenizer, mesh = _begin(values, screen, group)
  _say_if_short(filler.text, tokenizer, max(lengths), screen)
  count = len(lengths) * len(depths)
  record = {
    "task": values.task,
    "model": str(values.model or "ringjax-tiny"),
    "trials": values.trials,
    "seed": values.seed,
    "text": _source(values),
    "characters": len(filler.text),
  }
  cells: list[Cell] = []

  def note(cell: Cell) -> None:
    cells.append(cell)
    found = [cell.record() for cell in cells]
    kept.write(record | {"cells": found}, len(cells), count, "cells")

  screen.begin("asking", count * values.trials, "texts")
  find(
    model,
    TASKS[values.task](tokenizer=tokenizer, filler=filler),
    lengths=lengths,
    depths=depths,
    trials=values.trials,
    seed=values.seed,
    on_trial=screen.at,
    on_cell=note,
    mesh=mesh,
    prefill=values.prefill,
    chunk=values.chunk,
    cache_dtype=values.cache_dtype,
  )
  lines = [
    f"{values.task}: per cent found, {values.trials} texts of each length and "
    "depth",
    f"{'tokens':>9}" + "".join(f"{100 * d:>8.0f} %" for d in depths),
  ]
  for length in lengths:
    row = [cell for cell in cells if cell.length == length]
    shown = "".join(f"{100 * cell.score:>10.0f}" for cell in row)
    lines.append(f"{length:>9,}{shown}")
  return _Answer(
    record=record
    | {"cells": [cell.record() for cell in cells], "complete": True},
    lines=lines,
    draw=lambda path: charts.heat_map(cells, path, _title(values, cells)),
  )


def _title(values: flags.FlagValues, cells: Sequence[Cell]) -> str:
  mean = sum(cell.score for cell in cells) / len(cells)
  return f"{values.task}: {100 * mean:.0f} % found"


def _perplexity(
  values: flags.FlagValues,
  screen: console.Screen,
  group: Group,
  kept: _Kept,
) -> _Answer:
  lengths = _lengths(values)
  texts = _texts(values)
  model, tokenizer, mesh = _begin(values, screen, group)
  _say_if_far(model, max(lengths), screen)
  bos = tokenizer.bos_id if tokenizer.adds_bos else None
  # One text behind another: files are short. What begins a text begins each
  # row, wherever it was cut. Rows of all lengths end alike: what is foretold
  # there is the same, with more or less before it.
  ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in texts])
  span = max(lengths) + (bos is None)
  whole = [ids[n * span : (n + 1) * span] for n in range(values.rows)]
  readers = {
    length: reader(
      model,
      [row[len(row) - length - (bos is None) :] for row in whole],
      length=length,
      rows=values.rows,
      last=max(1, min(lengths) // 2),
      bos=bos,
      mesh=mesh,
      prefill=values.prefill,
      chunk=values.chunk,
      cache_dtype=values.cache_dtype,
    )
    # The longest first: it is the one that texts may be too short for.
    for length in sorted(set(lengths), reverse=True)
  }
  record = {
    "model": str(values.model or "ringjax-tiny"),
    "text": _source(values),
    "bos": bos is not None,
  }
  curves: list[Curve] = []
  screen.begin("reading", len(lengths) * values.rows, "texts")
  for n, length in enumerate(lengths):
    before = n * values.rows
    read = readers[length]
    curves.append(read(lambda row, before=before: screen.at(before + row)))
    found = [curve.record() for curve in curves]
    kept.write(record | {"curves": found}, len(curves), len(lengths), "curves")
  ends = sorted({end for curve in curves for end in curve.ends})
  lines = [
    "negative log-likelihood by position, nats a token",
    f"{'up to':>9}" + "".join(f"{c.length:>10,}" for c in curves),
  ]
  for end in ends:
    row = [dict(zip(c.ends, c.nll, strict=True)).get(end) for c in curves]
    shown = "".join(f"{'-' if x is None else f'{x:.4f}':>10}" for x in row)
    lines.append(f"{end:>9,}{shown}")
  lines.append(
    f"{'all':>9}" + "".join(f"{curve.mean:>10.4f}" for curve in curves)
  )
  lines.append(
    f"the same last {curves[0].last:,} tokens of each text, by its length"
  )
  lines.append(
    " " * 9 + "".join(f"{curve.last_nll:>10.4f}" for curve in curves)
  )
  return _Answer(
    record=record
    | {"curves": [curve.record() for curve in curves], "complete": True},
    lines=lines,
    draw=lambda path: charts.curves(curves, path),
  )


def _say_if_far(model: Any, longest: int, screen: console.Screen) -> None:
  """What a model was not made for may be what is to be found out."""
  made_for = model.config.longest
  if made_for is not None and longest > made_for:
    screen.say(
      f"note: {longest:,} tokens, and the model was made for {made_for:,}"
    )


def _texts(values: flags.FlagValues) -> list[str]:
  if values.folder is None:
    return documents.library(held_out=True)
  return list(texts.from_files(texts.find(values.folder)))


def _source(values: flags.FlagValues) -> str:
  """Whose text it is, in words."""
  return values.folder or "held-out files of Python's library"


def _say_if_short(
  text: str, tokenizer: Tokenizer, longest: int, screen: console.Screen
) -> None:
  """A filler goes round and round: whoever reads the figures should know."""
  sample = text[:_SAMPLE]
  tokens = len(text) * len(tokenizer.encode(sample)) // len(sample)
  if tokens < longest:
    screen.say(
      f"note: the text in which facts are hidden has about {tokens:,} tokens; "
      "what is longer has it more than once"
    )


def _curves(
  values: flags.FlagValues,
  screen: console.Screen,
  group: Group,
  kept: _Kept,
) -> _Answer:
  # Without JAX: the training that is drawn may hold the accelerator.
  del screen, group, kept
  if values.log is None:
    raise OptionError(
      "--log",
      "no value",
      "the log.jsonl of a training",
      "pass --log=DIR/log.jsonl",
    )
  # A run that went on from an earlier step has written some twice.
  latest = {row["step"]: row for row in _logged(values.log)}
  rows = [latest[step] for step in sorted(latest)]
  if not rows:
    raise OptionError(
      "--log", values.log, "a line or more", "train some steps first"
    )
  lines = [f"{'step':>8}{'stage':>7}{'loss':>10}{'tokens/s':>12}"]
  shown = rows[:: max(1, len(rows) // 20)]
  if shown[-1] is not rows[-1]:
    shown.append(rows[-1])
  for row in shown:
    loss, rate = row["loss"], row["tokens_per_s"]
    lines.append(
      f"{row['step']:>8}{row['stage']:>7}"
      f"{'-' if loss is None else f'{loss:.4f}':>10}"
      f"{'-' if rate is None else f'{rate:,.0f}':>12}"
    )
  return _Answer(
    record={"rows": rows},
    lines=lines,
    draw=lambda path: charts.run_of(rows, path),
  )


def _logged(path: str) -> Iterator[dict[str, Any]]:
  """The lines of a log; numbers that are not finite become None."""
  number = 0
  try:
    with open(path, encoding="utf-8") as file:
      for line in file:
        number += 1
        # The last line of a run that was killed may be cut off.
        if line.endswith("\n"):
          yield _figures(json.loads(line))
  except OSError as error:
    raise OptionError(
      "--log", f"{path}: {error.strerror}", "a file", "correct it"
    ) from None
  except (ValueError, RecursionError) as error:
    raise OptionError(
      "--log",
      f"{path}:{number}: {error}",
      "a line of a training's log.jsonl",
      "correct the path",
    ) from None


def _figures(row: Any) -> dict[str, Any]:
  """A line as `charts.run_of` takes it.

  Raises:
    ValueError: it is of something else.
  """
  if not isinstance(row, dict):
    raise ValueError(f"{type(row).__name__}")
  for name in ("step", "stage"):
    if type(row.get(name)) is not int:
      raise ValueError(f"{name} {row.get(name)!r}"[:80])
  for name in charts.FIGURES:
    if name not in row or type(row[name]) not in (int, float, type(None)):
      raise ValueError(f"{name} {row.get(name, 'not there')!r}"[:80])
  return {
    name: None if isinstance(x, float) and not math.isfinite(x) else x
    for name, x in row.items()
  }


_COMMANDS: dict[str, Callable[..., _Answer]] = {
  "needle": _needle,
  "perplexity": _perplexity,
  "curves": _curves,
}


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)

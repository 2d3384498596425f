"""Measures what a model does with a long context.

  python -m launch.evaluate needle --lengths=4096,16384 --plot=needle.png
      Facts hidden in a long text, by its length and their depth. The text is
      Python's own sources, or those of --folder.
  python -m launch.evaluate perplexity --lengths=2048,8192 --plot=nll.png
      How well it foretells such a text, by position.
  python -m launch.evaluate curves --log=DIR/log.jsonl --plot=run.png
      A training by its log.

Without --model it is the model that ships with ringjax. Of Python's sources it
is the one file in ten that training keeps out (`documents.library`). Prompts
are read over all devices; see --mesh and --prefill.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from launch import common, screens
from launch.definer import Definer
from launch.group import Group
from ringjax.bench import timing
from ringjax.data import Tokenizer, documents
from ringjax.data import texts as files
from ringjax.data.filler import Lines
from ringjax.data.needle import TASKS
from ringjax.errors import OptionError, message
from ringjax.eval import Cell, draw, find, perplexity
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
    "Folder of .txt files in which facts are hidden, or that are foretold; "
    "default: held-out files of Python's library.",
  )
  new.whole("seed", 0, "Of the texts.", 0)
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
  screen = screens.Screen(NAME, stderr)
  doing = f"evaluating {' '.join(words)}"
  group = Group(screen, lambda: doing)
  if len(words) != 1 or words[0] not in _COMMANDS:
    given = " ".join(words) or "nothing"
    screen.error(f"got {given}; wanted {' or '.join(_COMMANDS)}; see --help")
    return 2
  try:
    common.check_files(values, "plot", "out")
    answer = _COMMANDS[words[0]](values, screen, group)
  except KeyboardInterrupt as error:
    screen.error("interrupted; nothing was written")
    group.leave(error, screens.INTERRUPTED)
    return screens.INTERRUPTED
  except Exception as error:
    return group.failed(error, doing, _MEMORY)
  group.close()
  screen.end()
  if jax.process_index():
    return 0
  if values.out is not None:
    timing.write_json(values.out, answer.record)
  if values.plot is not None:
    answer.draw(values.plot)
    screen.say(f"wrote {values.plot}")
  stdout = sys.stdout if stdout is None else stdout
  text = json.dumps(answer.record) if values.json else "\n".join(answer.lines)
  print(text, file=stdout, flush=True)
  return 0


def _begin(
  values: flags.FlagValues, screen: screens.Screen, group: Group
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
      message(
        f"--{name}",
        ",".join(given) or "none",
        f"numbers of {want}",
        "correct them",
      )
    )
  return found


def _lengths(values: flags.FlagValues) -> list[int]:
  return _numbers("lengths", values.lengths, int, 1, math.inf)


# ---------------------------------------------------------------------------
# Sub-commands
# ---------------------------------------------------------------------------


def _needle(
  values: flags.FlagValues, screen: screens.Screen, group: Group
) -> _Answer:
  lengths = _lengths(values)
  given = ["0", "0.25", "0.5", "0.75", "1"]
  if values.depths is not None:
    given = values.depths
  depths = _numbers("depths", given, float, 0, 1)
  filler = Lines(text="\n".join(_texts(values)))
  model, tokenizer, mesh = _begin(values, screen, group)
  _say_if_short(filler.text, tokenizer, max(lengths), screen)
  total = len(lengths) * len(depths) * values.trials
  screen.begin("asking", total, "texts")
  cells = find(
    model,
    TASKS[values.task](tokenizer=tokenizer, filler=filler),
    lengths=lengths,
    depths=depths,
    trials=values.trials,
    seed=values.seed,
    on_trial=screen.at,
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
    record={
      "task": values.task,
      "model": str(values.model or "ringjax-tiny"),
      "trials": values.trials,
      "seed": values.seed,
      "text": _source(values),
      "characters": len(filler.text),
      "cells": [cell.record() for cell in cells],
    },
    lines=lines,
    draw=lambda path: draw.heat_map(cells, path, _title(values, cells)),
  )


def _title(values: flags.FlagValues, cells: Sequence[Cell]) -> str:
  mean = sum(cell.score for cell in cells) / len(cells)
  return f"{values.task}: {100 * mean:.0f} % found"


def _perplexity(
  values: flags.FlagValues, screen: screens.Screen, group: Group
) -> _Answer:
  lengths = _lengths(values)
  model, tokenizer, mesh = _begin(values, screen, group)
  texts = _texts(values)
  # One text behind another: files are short.
  ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in texts])
  curves, done = [], 0
  screen.begin("reading", len(lengths) * values.rows, "texts")
  for length in lengths:
    pieces = [
      ids[n * (length + 1) : (n + 1) * (length + 1)] for n in range(values.rows)
    ]
    curve = perplexity(
      model,
      pieces,
      length=length,
      rows=values.rows,
      mesh=mesh,
      prefill=values.prefill,
      chunk=values.chunk,
      cache_dtype=values.cache_dtype,
      on_row=lambda n, done=done: screen.at(done + n),
    )
    done += values.rows
    curves.append(curve)
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
  return _Answer(
    record={
      "model": str(values.model or "ringjax-tiny"),
      "curves": [curve.record() for curve in curves],
    },
    lines=lines,
    draw=lambda path: draw.curves(curves, path),
  )


def _texts(values: flags.FlagValues) -> list[str]:
  if values.folder is None:
    return documents.library(held_out=True)
  return list(files.from_files(files.find(values.folder)))


def _source(values: flags.FlagValues) -> str:
  """Whose text it is, in words."""
  return values.folder or "held-out files of Python's library"


def _say_if_short(
  text: str, tokenizer: Tokenizer, longest: int, screen: screens.Screen
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
  values: flags.FlagValues, screen: screens.Screen, group: Group
) -> _Answer:
  del screen, group
  if values.log is None:
    raise OptionError(
      message("--log", "nothing", "the log.jsonl of a training", "pass it")
    )
  rows = []
  try:
    with open(values.log, encoding="utf-8") as file:
      for line in file:
        # The last line of a run that was killed may be cut off.
        if line.endswith("\n"):
          rows.append(json.loads(line))
  except OSError as error:
    raise OptionError(
      message(
        "--log", f"{values.log}: {error.strerror}", "a file", "correct it"
      )
    ) from None
  except ValueError as error:
    raise OptionError(
      message("--log", f"{values.log}: {error}", "lines of JSON", "correct it")
    ) from None
  # A run that went on from an earlier step has written some twice.
  latest = {row["step"]: row for row in rows}
  rows = [latest[step] for step in sorted(latest)]
  if not rows:
    raise OptionError(
      message("--log", values.log, "a line or more", "train some steps first")
    )
  lines = [f"{'step':>8}{'stage':>7}{'loss':>10}{'tokens/s':>12}"]
  shown = rows[:: max(1, len(rows) // 20)]
  if shown[-1] is not rows[-1]:
    shown.append(rows[-1])
  for row in shown:
    lines.append(
      f"{row['step']:>8}{row['stage']:>7}{row['loss']:>10.4f}"
      f"{row['tokens_per_s']:>12,.0f}"
    )
  return _Answer(
    record={"rows": rows},
    lines=lines,
    draw=lambda path: draw.run_of(rows, path),
  )


_COMMANDS: dict[str, Callable[..., _Answer]] = {
  "needle": _needle,
  "perplexity": _perplexity,
  "curves": _curves,
}


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=screens.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)

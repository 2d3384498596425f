"""Measures what a model does with a long context.

  python -m launch.evaluate needle --lengths=4096,16384 --plot=needle.png
      Facts hidden in a long text, by its length and their depth. The text is
      Python's own sources, or those of --folder.
      With --cache=int4 answers come out of a cache of 4 bits a number.
  python -m launch.evaluate perplexity --lengths=2048,8192 --plot=nll.png
      The perplexity of such a text, by position; and of the same tokens with
      more and more text before them.
  python -m launch.evaluate caches --cache=int8 --cache=int4 --plot=caches.png
      What kinds of caches cost on such a text: bits, bytes, loss, divergence.
      Without --cache all kinds that need no calibration.
  python -m launch.evaluate curves --log=DIR/log.jsonl --plot=run.png
      The curves of a training, from its log.

Without --model the model that ships with ringjax is measured. Of Python's
sources the one file in ten that training keeps out (`documents.library`) is
read, over all devices; see --mesh and --prefill. --out is written after each
length and depth, or each curve; "complete" in it says whether it has all.
"""

from __future__ import annotations

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
from launch.flag_helpers import FlagHelper
from launch.group import Group
from ringjax.bench import timing
from ringjax.data import Tokenizer, documents, texts
from ringjax.data.filler import Lines
from ringjax.data.needle import TASKS
from ringjax.errors import OptionError
from ringjax.eval import Curve, charts, compare_caches, find, reader
from ringjax.infer import METHODS
from ringjax.kv import KINDS, kind_text
from ringjax.models import tiny

NAME = "evaluate"
# Characters by which tokens of a text are guessed.
_SAMPLE = 1 << 16
_MEMORY = "shorten the text (--lengths), or use more devices"
# Kinds of caches that need no calibration.
_UNCALIBRATED = [
  name
  for name, kind in KINDS.items()
  if not isinstance(kind.codec, rj.kv.Calibrated)
]
# Lines for people, and what draws a picture into a file.
_Shown = tuple[list[str], Callable[[str], None]]


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  new = FlagHelper(values)
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
  new.whole("rows", 8, "perplexity, caches: texts of each length.")
  flags.DEFINE_multi_string(
    "cache",
    None,
    "caches, needle: a kind of cache, as launch.generate --cache takes it.",
    flag_values=values,
  )
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


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Does what the flags and `words`, a sub-command, say; the exit status."""
  common.quiet_logging()
  screen = console.Screen(NAME, stderr)
  doing = f"evaluating {' '.join(words)}"
  group = Group(screen, lambda: doing)
  if len(words) != 1 or words[0] not in _COMMANDS:
    given = " ".join(words) or "nothing"
    screen.error(f"got {given}; wanted {' or '.join(_COMMANDS)}; see --help")
    return 2
  work = _Evaluation(values, screen, group)
  try:
    _refuse_unused(values, words[0])
    common.check_files(values, "plot", "out")
    lines, draw = _COMMANDS[words[0]](work)
  except KeyboardInterrupt as error:
    screen.error(f"interrupted; {work.said}")
    group.leave(error, console.INTERRUPTED)
    return console.INTERRUPTED
  except Exception as error:
    if work.done:
      screen.say(work.said)
    return group.failed(error, doing, _MEMORY)
  group.close()
  screen.end()
  # One process writes. Not by JAX's number of it, which would start JAX.
  if screen.quiet:
    return 0
  try:
    if values.out is not None:
      timing.write_json(values.out, work.record)
    if values.plot is not None:
      draw(values.plot)
      screen.say(f"wrote {values.plot}")
  except Exception as error:
    return screen.failed(error, "writing", _MEMORY)
  stdout = sys.stdout if stdout is None else stdout
  text = json.dumps(work.record) if values.json else "\n".join(lines)
  print(text, file=stdout, flush=True)
  return 0


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
  only = {"task": ("needle",), "depths": ("needle",), "trials": ("needle",),
          "seed": ("needle",), "rows": ("perplexity", "caches"),
          "cache": ("caches", "needle"), "prefill": ("needle", "perplexity"),
          "chunk": ("needle", "perplexity"), "log": ("curves",),
          "cache_dtype": ("needle", "perplexity")}  # fmt: skip
  return word in only.get(name, (word,))


def _numbers(
  name: str, given: Sequence[str], kind: Any, least: float, most: float
) -> list[Any]:
  """The numbers of a list, each from `least` to `most`."""
  try:
    found = [kind(text) for text in given]
  except ValueError:
    found = []
  # Not `x < least`, which is false of NaN too.
  if not found or not all(least <= x <= most for x in found):
    want = (
      f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
    )
    raise OptionError(
      f"--{name}",
      ",".join(given) or "none",
      f"numbers of {want}",
      f"pass --{name}=A,B,... with such numbers",
    )
  return found


# ---------------------------------------------------------------------------
# Sub-commands
# ---------------------------------------------------------------------------


class _Evaluation:
  """One sub-command: its figures, kept in --out as they are found.

  Attributes:
    record: all figures, as JSON.
    done: how many of them are in --out.
    said: what is there, in words.
  """

  def __init__(
    self, values: flags.FlagValues, screen: console.Screen, group: Group
  ):
    self._values, self._screen, self._group = values, screen, group
    self.done, self.said = 0, "nothing was written"
    self.record: dict[str, Any] = {}

  def _begin(self, unit: str, total: int, **about: Any) -> None:
    """Before the first of `total` figures, which are a list named `unit`."""
    values = self._values
    about |= {
      "model": str(values.model or "ringjax-tiny"),
      "text": values.folder or "held-out files of Python's library",
    }
    self._unit, self._total = unit, total
    self.record = about | {unit: [], "complete": False}

  def _add(self, figure: dict[str, Any]) -> None:
    """Keeps one of the figures: an interrupted run leaves what it found."""
    path, unit = self._values.out, self._unit
    self.record[unit].append(figure)
    done = len(self.record[unit])
    self.record["complete"] = done == self._total
    if path is not None and not self._screen.quiet:
      timing.write_json(path, self.record)
      self.done = done
      self.said = f"{path} has {done} of {self._total} {unit}"

  def _load(self) -> tuple[Any, Tokenizer, dict[str, Any]]:
    """The model, its tokenizer, and how prompts are read."""
    values, screen = self._values, self._screen
    common.start(values)
    self._group.meet()
    screen.quiet = jax.process_index() > 0
    screen.begin("loading the model")
    mesh = common.mesh(values.mesh)
    folder = values.model or tiny.path()
    model = rj.models.load(folder, mesh=mesh, dtype=values.dtype)
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    reading = dict(
      mesh=mesh,
      prefill=values.prefill,
      chunk=values.chunk,
      cache_dtype=values.cache_dtype,
    )
    return model, tokenizer, reading

  def _lengths(self) -> list[int]:
    return _numbers("lengths", self._values.lengths, int, 1, math.inf)

  def _texts(self) -> list[str]:
    if self._values.folder is None:
      return documents.library(held_out=True)
    return list(texts.from_files(texts.find(self._values.folder)))

  def needle(self) -> _Shown:
    """Asks for facts in texts of each length, at each depth."""
    values, screen, lengths = self._values, self._screen, self._lengths()
    given = ["0", "0.25", "0.5", "0.75", "1"]
    if values.depths is not None:
      given = values.depths
    depths = _numbers("depths", given, float, 0, 1)
    asked = values.cache or []
    if len(asked) > 1:
      raise OptionError(
        "--cache", " ".join(asked), "one kind", "pass the option once"
      )
    kinds = [kind_text.parse(kind, "--cache") for kind in asked]
    text = "\n".join(self._texts())
    filler = Lines(text=text)
    model, tokenizer, reading = self._load()
    if kinds:
      reading["cache_kind"] = kinds[0]
    # A note where a text is shorter than a prompt, which repeats it then.
    sample = text[:_SAMPLE]
    tokens = len(text) * len(tokenizer.encode(sample)) // len(sample)
    if tokens < max(lengths):
      screen.say(
        f"note: the text in which facts are hidden has about {tokens:,} tokens;"
        " what is longer has it more than once"
      )
    count = len(lengths) * len(depths)
    self._begin(
      "cells",
      count,
      task=values.task,
      trials=values.trials,
      seed=values.seed,
      characters=len(text),
      **({"cache": asked[0]} if asked else {}),
    )
    screen.begin("asking", count * values.trials, "texts")
    cells = find(
      model,
      TASKS[values.task](tokenizer=tokenizer, filler=filler),
      lengths=lengths,
      depths=depths,
      trials=values.trials,
      seed=values.seed,
      on_trial=screen.at,
      on_cell=lambda cell: self._add(cell.record()),
      **reading,
    )
    lines = [
      f"{values.task}: per cent found, {values.trials} texts of each length "
      "and depth",
      f"{'tokens':>9}" + "".join(f"{100 * d:>8.0f} %" for d in depths),
    ]
    for length in lengths:
      row = [cell for cell in cells if cell.length == length]
      shown = "".join(f"{100 * cell.score:>10.0f}" for cell in row)
      lines.append(f"{length:>9,}{shown}")
    mean = sum(cell.score for cell in cells) / len(cells)
    title = f"{values.task}: {100 * mean:.0f} % found"
    return lines, lambda path: charts.heat_map(cells, path, title)

  def perplexity(self) -> _Shown:
    """Reads texts of each length, which end alike."""
    values, screen, lengths = self._values, self._screen, self._lengths()
    found = self._texts()
    model, tokenizer, reading = self._load()
    # A longer text than the model's context may be the question.
    context = model.config.longest
    if context is not None and max(lengths) > context:
      screen.say(
        f"note: {max(lengths):,} tokens, and the model was made for {context:,}"
      )
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    # Texts are joined, as files are short, and each row begins with the id that
    # begins a text. Rows of all lengths end alike: the same tokens are
    # predicted there, with more or less before them.
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in found])
    more = bos is None
    span = max(lengths) + more
    whole = [ids[n * span : (n + 1) * span] for n in range(values.rows)]
    readers = {
      length: reader(
        model,
        [row[len(row) - length - more :] for row in whole],
        length=length,
        rows=values.rows,
        last=max(1, min(lengths) // 2),
        bos=bos,
        **reading,
      )
      # The longest first: texts may be too short for it.
      for length in sorted(set(lengths), reverse=True)
    }
    self._begin("curves", len(lengths), bos=bos is not None)
    curves: list[Curve] = []
    screen.begin("reading", len(lengths) * values.rows, "texts")
    for n, length in enumerate(lengths):
      before = n * values.rows
      read = readers[length]
      curves.append(read(lambda row, before=before: screen.at(before + row)))
      self._add(curves[-1].record())
    line = lambda name, cells: f"{name:>9}" + "".join(f"{x:>10}" for x in cells)
    ends = sorted({end for curve in curves for end in curve.ends})
    known = [dict(zip(c.ends, c.nll, strict=True)) for c in curves]
    lines = [
      "negative log-likelihood by position, nats a token",
      line("up to", [f"{curve.length:,}" for curve in curves]),
      *(
        line(f"{end:,}", [f"{c[end]:.4f}" if end in c else "-" for c in known])
        for end in ends
      ),
      line("all", [f"{curve.mean:.4f}" for curve in curves]),
      f"the same last {curves[0].last:,} tokens of each text, by its length",
      line("", [f"{curve.last_nll:.4f}" for curve in curves]),
    ]
    return lines, lambda path: charts.curves(curves, path)

  def caches(self) -> _Shown:
    """Reads texts as caches of several kinds would give them back."""
    values, screen, lengths = self._values, self._screen, self._lengths()
    if len(lengths) != 1 and values["lengths"].present:
      raise OptionError(
        "--lengths", ",".join(values.lengths), "one length", "pass one number"
      )
    kinds = {
      text: kind_text.parse(text, "--cache")
      for text in values.cache or _UNCALIBRATED
    }
    found = self._texts()
    model, tokenizer, _ = self._load()
    length = min(lengths)
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in found])
    rows = min(values.rows, ids.size // length)
    if not rows:
      raise OptionError(
        "--lengths",
        length,
        f"at most the {ids.size:,} tokens of the text",
        "pass a smaller length, or more text",
      )
    self._begin("kinds", len(kinds), length=length, rows=rows)
    screen.begin("reading", len(kinds) * rows, "texts")
    costs = compare_caches(
      model,
      ids[: rows * length].reshape(rows, length),
      kinds,
      on_read=screen.at,
      on_kind=lambda cost: self._add(cost.record()),
    )
    wide = max(len(cost.name) for cost in costs)
    lines = [
      f"{rows} texts of {length:,} tokens; nats a token without a cache: "
      f"{costs[0].nll - costs[0].loss:.4f}",
      f"{'kind':<{wide}}{'bits':>8}{'bytes':>12}{'loss':>10}{'KL':>10}"
      f"{'logits':>10}",
      *(
        f"{cost.name:<{wide}}{cost.bits:>8.2f}{cost.nbytes:>12,}"
        f"{cost.loss:>+10.4f}{cost.kl:>10.5f}{cost.far:>10.2%}"
        for cost in costs
      ),
    ]
    return lines, lambda path: charts.cache_costs(costs, path)

  def curves(self) -> _Shown:
    """Reads the log of a training.

    Without JAX: that training may hold the accelerator.
    """
    log = self._values.log
    if log is None:
      raise OptionError(
        "--log",
        "no value",
        "the log.jsonl of a training",
        "pass --log=DIR/log.jsonl",
      )
    # A run that resumed from an earlier step has written some twice.
    latest = {row["step"]: row for row in _logged(log)}
    rows = [latest[step] for step in sorted(latest)]
    if not rows:
      raise OptionError(
        "--log", log, "a line or more", "train some steps first"
      )
    self.record = {"rows": rows}
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
    return lines, lambda path: charts.training_curves(rows, path)


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
      "--log", f"{path}: {error.strerror}", "a file", "pass its path"
    ) from None
  except (ValueError, RecursionError) as error:
    raise OptionError(
      "--log",
      f"{path}:{number}: {error}",
      "a line of a training's log.jsonl",
      "pass the log.jsonl that launch.train wrote",
    ) from None


def _figures(row: Any) -> dict[str, Any]:
  """A line as `charts.training_curves` takes it.

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


_COMMANDS: dict[str, Callable[[_Evaluation], _Shown]] = {
  "needle": _Evaluation.needle,
  "perplexity": _Evaluation.perplexity,
  "caches": _Evaluation.caches,
  "curves": _Evaluation.curves,
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

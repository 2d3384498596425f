"""Measures what a model does with a long context.

  python -m launch.evaluate needle --lengths=4096,16384 --plot=needle.png
      Facts hidden in a long text, by its length and their depth. The text is
      Python's own sources, or those of --folder.
  python -m launch.evaluate needle --task=all --cache=dense --cache=int4
      Every task (ringjax.data.needle.TASKS) by the kind of cache out of which
      the answers come.
  python -m launch.evaluate perplexity --lengths=2048,8192 --plot=nll.png
      The perplexity of such a text, by position; and of the same tokens with
      more and more text before them.
  python -m launch.evaluate caches --cache=int8 --cache=int4 --plot=caches.png
      What kinds of caches cost on such a text: bits, bytes, loss, divergence.
      Without --cache all kinds that need no calibration. With --task=passkey
      also what is found with each kind.
  python -m launch.evaluate contexts --contexts=2,8,16 --search --plot=c.png
      What it costs to read a text in parts that do not see each other, by the
      way in which they are combined (ringjax.infer.contexts) and their number:
      loss of what follows, tokens computed, bytes moved. With --task=passkey
      also what is found. --search tunes temperature and scale on texts of
      their own.
  python -m launch.evaluate chunks --model=DIR --contexts=0,4,8,16,32
      The loss behind more and more chunks that a model's encoder reads
      (ringjax.models.cepe), on files that are long enough for the most.
  python -m launch.evaluate drafts --draft=DIR --offsets=0,4096,16384,65536
      How many tokens of a draft block (ringjax.models.longspec) its target
      accepts, where all but the first four tokens are moved on.
  python -m launch.evaluate families --cache=int4 --cache=nuq3
      What kinds of caches do to small models of every family with random
      weights; without --cache all codecs.
  python -m launch.evaluate entropy --splits=1,2,4,8,16 --plot=entropy.png
      The entropy of each layer's and head's attention, and the loss, behind
      contexts that are cut into chunks which are encoded apart: each with a
      prefix of its own, or all with one. The prefix is the id that begins a
      text, else a newline. Without --model of ringjax's second model.
  python -m launch.evaluate curves --log=DIR/log.jsonl --plot=run.png
      The curves of a training, from its log.

Without --model the model that ships with ringjax is measured, and for contexts
the second one, ringjax-small. Of Python's
sources the one file in ten that training keeps out (`documents.library`) is
read, over all devices; see --mesh and --prefill. --out is written after each
cell of a table, or each curve; "complete" in it says whether it has all. Called
again with the same --out and settings, needle asks for missing cells only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from launch import answering, common, console
from launch.flag_helpers import FlagHelper
from launch.group import Group
from ringjax.bench import timing
from ringjax.checks import one_of
from ringjax.data import LinkTokens, Tokenizer, documents, texts
from ringjax.data.filler import Lines
from ringjax.data.link_tokens import LINKS
from ringjax.data.needle import TASKS, Task
from ringjax.errors import OptionError
from ringjax.eval import (
  RANDOM_FAMILIES,
  Cell,
  ContextCost,
  ContextTrial,
  Curve,
  FamilyError,
  KindCost,
  SplitEntropy,
  charts,
  compare_caches,
  context_answers,
  context_curve,
  context_ways,
  correlation,
  draft_acceptance,
  family_errors,
  find,
  reader,
  split_entropy,
)
from ringjax.eval.entropy import settings
from ringjax.eval.needle import grid, mean, table
from ringjax.infer import METHODS
from ringjax.infer.contexts import APE, combine_of
from ringjax.json_text import json_text
from ringjax.kv import KINDS
from ringjax.models import small, tiny
from ringjax.models.cepe import CepeTransformer
from ringjax.models.fingerprint import fingerprint

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
# All kinds that are a codec and nothing else.
_CODECS = [
  name
  for name, kind in KINDS.items()
  if kind.codec is not None and kind.policy is None
]
# Lines for people, and what draws a picture into a file.
_Shown = tuple[list[str], Callable[[str], None]]


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  new = FlagHelper(values)
  new.checkpoint()
  new.text(
    "dtype",
    None,
    "bfloat16, float16 or float32; default: the folder's, on one CPU device "
    "float32 where that fits.",
  )
  new.texts("lengths", ["4096", "16384"], "Tokens of the texts.")
  new.texts(
    "task",
    None,
    f"needle, caches: what is asked: all, or some of {', '.join(TASKS)}; "
    "default of needle: passkey.",
  )
  new.texts("depths", None, "--task: where facts stand; default 0,0.25,..,1.")
  new.whole("trials", 4, "--task: texts of each length and depth.")
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
  new.whole(
    "rows",
    8,
    "perplexity, caches, entropy, chunks, drafts: texts of each length.",
  )
  new.texts("splits", ["1", "2", "4", "8", "16"], "entropy: numbers of chunks.")
  new.whole(
    "context",
    1024,
    "entropy: tokens that are cut into chunks; drafts: of a prompt.",
  )
  new.whole("query", 128, "entropy: tokens behind them that are looked at.")
  new.text(
    "combine",
    "parallel",
    "entropy: how they read the chunks: parallel, ape or select, with options "
    "as in select:keep=2.",
  )
  flags.DEFINE_multi_string(
    "cache",
    None,
    "caches, needle: a kind of cache, as launch.generate --cache takes it; may "
    "be given several times.",
    flag_values=values,
  )
  new.path(
    "folder",
    None,
    "Folder of .txt files in which facts are hidden, or that are predicted; "
    "default: held-out files of Python's library.",
  )
  new.whole("seed", 0, "--task, families: random seed.", 0)
  new.texts(
    "families",
    None,
    f"families: which, of {', '.join(RANDOM_FAMILIES)}; default: all.",
  )
  new.texts(
    "contexts",
    ["1", "2", "4", "8", "16"],
    "contexts, chunks: parts of a text; default of chunks: 0,4,8,16,32.",
  )
  new.texts(
    "ways",
    [],
    f"contexts: some of {', '.join(context_ways([0]))}; default: all.",
  )
  new.whole(
    "question",
    128,
    "contexts, chunks, drafts: tokens behind a text that count.",
  )
  new.text(
    "prefix", "\n\n", "contexts: text before all parts, where they share one."
  )
  new.boolean("search", False, "contexts: tune APE on texts of their own.")
  new.texts("draft", None, "drafts: folders of drafts of one target.")
  new.texts(
    "offsets",
    ["0", "4096", "16384", "65536"],
    "drafts: by how much tokens are moved on.",
  )
  new.path("log", None, "curves: the log.jsonl of a training.")
  new.path("plot", None, "PNG to draw (needs matplotlib).")
  new.path("out", None, "File for all figures, JSON.")
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
  text = json_text(work.record) if values.json else "\n".join(lines)
  print(text, file=stdout, flush=True)
  return 0


def _refuse_unused(values: flags.FlagValues, word: str) -> None:
  """No flag that was set is without effect."""
  mine = flags.FlagValues()
  define(mine)
  unused = [
    f"--{name}"
    for name in sorted(mine)
    if values[name].present and not _uses(word, name, values.task is not None)
  ]
  if unused:
    raise OptionError(
      "flags",
      f"{', '.join(unused)} with {word}",
      "those that it uses",
      "leave them out; see --help",
    )


def _uses(word: str, name: str, asks: bool) -> bool:
  """Whether a sub-command looks at a flag; `asks`: whether --task was set."""
  if word == "curves":
    return name in ("log", "plot", "out", "json")
  if word == "families":
    return name in ("families", "cache", "lengths", "seed", "out", "json")
  if word == "drafts":
    return name in ("model", "dtype", "draft", "offsets", "context", "question",
                    "rows", "folder", "mesh", "out", "json")  # fmt: skip
  if word == "chunks":
    return name in ("model", "dtype", "contexts", "question", "rows", "folder",
                    "mesh", "out", "json")  # fmt: skip
  asking = ("needle", "caches") if asks else ("needle",)
  answers = (*asking, "contexts") if asks else asking
  of_contexts = dict.fromkeys(
    ("contexts", "ways", "question", "prefix", "search"), ("contexts",)
  )
  only = {"task": ("needle", "caches", "contexts"), "depths": asking,
          "trials": answers, "seed": answers, **of_contexts,
          "rows": ("perplexity", "caches", "contexts", "entropy"),
          "cache": ("caches", "needle", "contexts"),
          "prefill": ("needle", "perplexity"),
          "chunk": ("needle", "perplexity"), "log": ("curves",), "families": (),
          "cache_dtype": ("needle", "perplexity"), "splits": ("entropy",),
          "context": ("entropy",), "query": ("entropy",), "draft": (),
          "combine": ("entropy",),
          "offsets": (), "lengths":
          ("needle", "perplexity", "caches", "contexts")}  # fmt: skip
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

  def _begin(
    self,
    unit: str,
    total: int,
    known: Sequence[dict[str, Any]] = (),
    **about: Any,
  ) -> None:
    """Before the first of `total` figures, which are a list named `unit`.

    Those that are known already are kept as they are.
    """
    self._unit, self._total = unit, total
    self.record = self._about() | about
    self.record |= {unit: [*known], "complete": len(known) == total}

  def _about(self, own: str = "ringjax-tiny") -> dict[str, Any]:
    """What the figures are about."""
    values = self._values
    return {
      "model": str(values.model or own),
      "text": values.folder or "held-out files of Python's library",
    }

  def _known(self, settings: dict[str, Any], keys: Sequence[Any]) -> list[Cell]:
    """The cells that --out has of a run with the same settings.

    Several processes, which need not share files, begin anew.
    """
    path = self._values.out
    if path is None or not os.path.isfile(path) or jax.process_count() > 1:
      return []
    try:
      with open(path, encoding="utf-8") as file:
        before = json.load(file)
      if any(before[name] != x for name, x in settings.items()):
        return []
      cells = [Cell.from_record(one) for one in before["cells"]]
      return [cell for cell in cells if cell.key in keys]
    # A file of something else, which is replaced.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
      return []

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

  def _start(self) -> None:
    """Meets the other processes, of which the first one speaks."""
    common.start(self._values, single=self._values.model is not None)
    self._group.meet()
    self._screen.quiet = jax.process_index() > 0

  def _load(self, own: Any = tiny) -> tuple[Any, Tokenizer, dict[str, Any]]:
    """The model, its tokenizer, and how prompts are read.

    `own`: the model that ships with ringjax and is measured without --model.
    """
    values, screen = self._values, self._screen
    self._start()
    screen.begin("loading the model")
    mesh = common.mesh(values.mesh)
    folder = values.model or own.path()
    model, note = answering.load(values, folder, mesh)
    if note is not None:
      screen.say(note)
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

  def _tasks(self) -> list[str]:
    given = self._values.task
    given = ["passkey"] if given is None else given
    for name in given or ["none"]:
      one_of("--task", name, ("all", *TASKS))
    return list(TASKS) if "all" in given else list(dict.fromkeys(given))

  def _depths(self) -> list[float]:
    given = self._values.depths
    if given is None:
      given = ["0", "0.25", "0.5", "0.75", "1"]
    return _numbers("depths", given, float, 0, 1)

  def _asked(
    self, names: Sequence[str], text: str, tokenizer: Tokenizer, longest: int
  ) -> dict[str, Task]:
    """Tasks by their names, whose facts are hidden in a text."""
    # A note where a text is shorter than a prompt, which repeats it then.
    sample = text[:_SAMPLE]
    tokens = len(text) * len(tokenizer.encode(sample)) // len(sample)
    if tokens < longest:
      self._screen.say(
        f"note: the text in which facts are hidden has about {tokens:,} tokens;"
        " what is longer has it more than once"
      )
    filler = Lines(text=text)
    return {n: TASKS[n](tokenizer=tokenizer, filler=filler) for n in names}

  def needle(self) -> _Shown:
    """Asks for facts in texts of each length, at each depth."""
    values, screen, lengths = self._values, self._screen, self._lengths()
    depths, names = self._depths(), self._tasks()
    given = list(dict.fromkeys(values.cache or ()))
    kinds = {kind: common.cache_kind(kind) for kind in given}
    text = "\n".join(self._texts())
    model, tokenizer, reading = self._load()
    tasks = self._asked(names, text, tokenizer, max(lengths))
    keys = grid(tasks, kinds or [""], lengths, depths)
    settings = self._about() | {
      name: values[name].value
      for name in ("dtype", "prefill", "chunk", "cache_dtype", "trials", "seed")
    }
    settings |= {"characters": len(text)}
    if jax.process_count() == 1:
      settings["weights"] = fingerprint(model)
    known = self._known(settings, keys)
    if known:
      screen.say(f"{values.out} has {len(known)} of {len(keys)} cells already")
    self._begin(
      "cells",
      len(keys),
      [cell.record() for cell in known],
      tasks=names,
      caches=given,
      **settings,
    )
    trials = values.trials
    screen.begin("asking", len(keys) * trials, "texts", len(known) * trials)
    cells = find(
      model,
      tasks,
      lengths=lengths,
      depths=depths,
      kinds=kinds or None,
      trials=trials,
      seed=values.seed,
      known=known,
      on_trial=screen.at,
      on_cell=lambda cell: self._add(cell.record()),
      **reading,
    )
    found = table(cells)
    if len(names) > 1:
      for kind in dict.fromkeys(label[1:] for label in found):
        of_kind = [row for label, row in found.items() if label[1:] == kind]
        found["mean", *kind] = {
          length: sum(row[length] for row in of_kind) / len(of_kind)
          for length in of_kind[0]
        }
    what = names[0] if len(names) == 1 else f"{len(names)} tasks"
    wide = [max(map(len, column)) for column in zip(*found, strict=True)]
    shown = lambda label: "  ".join(
      f"{part:<{w}}" for part, w in zip(label, wide, strict=True)
    )
    lines = [
      f"{what}: per cent found, {trials} texts of each length and depth",
      " " * len(shown(next(iter(found))))
      + "".join(f"{length:>10,}" for length in dict.fromkeys(lengths)),
      *(
        shown(label) + "".join(f"{100 * x:>10.0f}" for x in row.values())
        for label, row in found.items()
      ),
    ]
    title = f"{what}: {100 * mean(cells):.0f} % found"
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
    """Reads texts as caches of several kinds would give them back.

    With --task also asks for facts, out of caches of these kinds.
    """
    values, screen, lengths = self._values, self._screen, self._lengths()
    if len(lengths) != 1 and values["lengths"].present:
      raise OptionError(
        "--lengths", ",".join(values.lengths), "one length", "pass one number"
      )
    kinds = {
      text: common.cache_kind(text) for text in values.cache or _UNCALIBRATED
    }
    asks = values.task is not None
    names, depths = self._tasks() if asks else [], self._depths()
    found = self._texts()
    model, tokenizer, reading = self._load()
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
    tasks: dict[str, Task] = {}
    about: dict[str, Any] = {"length": length, "rows": rows}
    if asks:
      tasks = self._asked(names, "\n".join(found), tokenizer, length)
      about |= {"tasks": names, "trials": values.trials, "seed": values.seed}
    self._begin("kinds", len(kinds), **about)
    # Of each kind; the texts of the tasks are asked for first.
    count = len(grid(tasks, [""], [length], depths)) * values.trials
    screen.begin("reading", len(kinds) * (count + rows), "texts")
    kinds = {name: model.cache_kind(kind) for name, kind in kinds.items()}
    costs: list[KindCost] = []
    scores: list[float] = []
    for n, (name, kind) in enumerate(kinds.items()):
      before = n * (count + rows)
      if asks:
        cells = find(
          model,
          tasks,
          lengths=[length],
          depths=depths,
          kinds={name: kind},
          trials=values.trials,
          seed=values.seed,
          on_trial=lambda done, before=before: screen.at(before + done),
          **reading,
        )
        scores.append(mean(cells))
      costs += compare_caches(
        model,
        ids[: rows * length].reshape(rows, length),
        {name: kind},
        on_read=lambda done, before=before: screen.at(before + count + done),
      )
      self._add(costs[-1].record() | ({"score": scores[-1]} if asks else {}))
    wide = max(len(cost.name) for cost in costs)
    lines = [
      f"{rows} texts of {length:,} tokens; nats a token without a cache: "
      f"{costs[0].nll - costs[0].loss:.4f}",
      f"{'kind':<{wide}}{'bits':>8}{'bytes':>12}{'loss':>10}{'KL':>10}"
      f"{'logits':>10}" + (f"{'found':>9}" if asks else ""),
      *(
        f"{cost.name:<{wide}}{cost.bits:>8.2f}{cost.nbytes:>12,}"
        f"{cost.loss:>+10.4f}{cost.kl:>10.5f}{cost.far:>10.2%}"
        + "".join(f"{x:>9.0%}" for x in scores[n : n + 1])
        for n, cost in enumerate(costs)
      ),
      *(line for cost in costs for line in _choice_lines(cost, rows)),
    ]
    return lines, lambda path: charts.cache_costs(costs, path)

  def contexts(self) -> _Shown:
    """Reads texts in parts that do not see each other.

    With --task also asks for facts that are hidden in them.
    """
    values, screen = self._values, self._screen
    length = 512
    if values["lengths"].present:
      if len(self._lengths()) != 1:
        raise OptionError(
          "--lengths", ",".join(values.lengths), "one length", "pass one number"
        )
      (length,) = self._lengths()
    counts = _numbers("contexts", values.contexts, int, 1, length)
    asks, given = values.task is not None, list(values.cache or ())
    names = self._tasks() if asks else []
    if len(given) > 1:
      raise OptionError("--cache", ", ".join(given), "one", "pass one kind")
    kind = common.cache_kind(given[0]) if given else None
    chosen = [] if "all" in values.ways else values.ways
    context_ways([0], kinds=chosen)
    found = self._texts()
    model, tokenizer, reading = self._load(small)
    links, folder = None, values.model or small.path()
    if os.path.exists(os.path.join(folder, LINKS)):
      links = LinkTokens.load(folder, vocab=model.config.vocab)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ways = context_ways(
      [int(n) for n in (*begin, *tokenizer.encode(values.prefix))],
      links,
      chosen,
    )
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in found])
    span, rows = length + values.question, values.rows
    # Texts to tune on are behind those that count.
    need = rows * (2 if values.search else 1)
    if ids.size < need * span:
      raise OptionError(
        "--lengths",
        length,
        f"at most what {need} texts of {ids.size:,} tokens together have",
        "pass fewer --rows, a smaller length, or more text",
      )
    # From all over the text.
    starts = np.linspace(0, ids.size - span, need).astype(int)
    texts = np.stack([ids[start : start + span] for start in starts])
    where = {"mesh": reading["mesh"], "cache_kind": kind}
    trial = ContextTrial(model, texts[::2][:rows] if values.search else texts,
                         values.question, **where)  # fmt: skip
    tuning = ContextTrial(model, texts[1::2], values.question, **where)
    self._begin(
      "costs",
      len(ways) * len(counts),
      length=length,
      question=values.question,
      rows=rows,
      prefix=values.prefix,
      cache=given[0] if given else None,
      tasks=names,
      **({} if values.model else self._about("ringjax-small")),
    )
    scores: dict[tuple[str, int], float] = {}
    if asks:
      tasks = self._asked(names, "\n".join(found), tokenizer, length)
      total = len(ways) * len(counts) * values.trials
      screen.begin("asking", total * len(tasks), "answers")
      for n, task in enumerate(tasks.values()):
        part = context_answers(
          model,
          task,
          ways,
          counts,
          length=length,
          trials=values.trials,
          seed=values.seed,
          on_trial=lambda done, n=n: screen.at(n * total + done),
          **where,
        )
        for key, score in part.items():
          scores[key] = scores.get(key, 0.0) + score / len(tasks)
    costs: list[ContextCost] = []
    screen.begin("reading", len(ways) * len(counts) * rows, "texts")
    for count in counts:
      for name, way in ways.items():
        if values.search and isinstance(way.combine, APE):
          best = tuning.tuned(count, way.combine)
          way = dataclasses.replace(way, combine=best)
        before = len(costs) * rows
        costs.append(
          trial.cost(
            name,
            way,
            count,
            found=scores.get((name, count)),
            on_row=lambda done, before=before: screen.at(before + done),
          )
        )
        self._add(costs[-1].record())
    wide = max(map(len, ways))
    head = f"{'way':<{wide}}" + "".join(f"{n:>9,}" for n in counts)
    of = lambda name: [cost for cost in costs if cost.way == name]
    table = lambda cell: [
      f"{name:<{wide}}" + "".join(f"{cell(x):>9}" for x in of(name))
      for name in ways
    ]
    lines = [
      f"{rows} texts of {length:,} tokens and {values.question} behind them, "
      "by parts; nats a token",
      head,
      *table(lambda x: f"{x.nll:.4f}"),
    ]
    if asks:
      lines += ["per cent found", head, *table(lambda x: f"{x.found:.0%}")]
    lines += ["tokens computed", head, *table(lambda x: f"{x.computed:,.0f}")]
    lines += [
      "kilobytes moved",
      head,
      *table(lambda x: f"{x.nbytes / 1e3:,.0f}"),
    ]
    if values.search and "ape" in ways:
      lines += [f"{x.contexts} parts: {x.combine}" for x in of("ape")]
    return lines, lambda path: charts.context_costs(costs, path)

  def chunks(self) -> _Shown:
    """Reads texts behind chunks of what is before them, by their encoder."""
    values = self._values
    given = values.contexts
    if not values["contexts"].present:
      given = ["0", "4", "8", "16", "32"]
    counts = _numbers("contexts", given, int, 0, math.inf)
    model, tokenizer, _ = self._load(small)
    if not isinstance(model, CepeTransformer):
      raise OptionError(
        "--model",
        f"{values.model or 'ringjax-small'}, without an encoder",
        "a model with an encoder",
        "train one: python -m launch.train --config=configs/train/cepe.py",
      )
    size = model.encoder_config.chunk
    least = max(counts) * size + values.question + 1
    ids = (np.asarray(tokenizer.encode(t)) for t in self._texts())
    # From the beginning of files: their own text comes before.
    long = [x[:least] for x in ids if x.size >= least]
    rows = long[:: max(1, len(long) // values.rows)][: values.rows]
    self._screen.begin("reading", len(rows), "texts")
    found = context_curve(model, rows, chunks=counts, tokens=values.question)
    self.record = self._about() | dataclasses.asdict(found)
    head = f"nats a token of {found.tokens} behind chunks of {size} tokens, "
    return [f"{head}{found.texts} texts:", str(found)], lambda path: None

  def drafts(self) -> _Shown:
    """Lets a model go on behind texts, and each draft guess its tokens."""
    values = self._values
    offsets = _numbers("offsets", values.offsets, int, 0, math.inf)
    if not values.draft:
      raise OptionError(
        "--draft",
        "none",
        "the folder of a draft",
        "train one: python -m launch.train --config=configs/train/longspec.py",
      )
    model, tokenizer, _ = self._load(small)
    drafts = {x: rj.models.longspec.load(x, model) for x in values.draft}
    ids = (np.asarray(tokenizer.encode(t)) for t in self._texts())
    long = [x[: values.context] for x in ids if x.size >= values.context]
    rows = long[:: max(1, len(long) // values.rows)][: values.rows]
    self._screen.begin("drafting", len(rows), "texts")
    found = {
      name: draft_acceptance(
        draft, rows, offsets=offsets, tokens=values.question
      )
      for name, draft in drafts.items()
    }
    self.record = self._about() | {
      "drafts": {
        name: [
          dataclasses.asdict(x) | {"acceptance": x.acceptance} for x in each
        ]
        for name, each in found.items()
      }
    }
    lines = [
      f"{len(rows)} texts of {values.context} tokens and {values.question} "
      "that the model chose:"
    ]
    for name, each in found.items():
      lines += [
        name,
        f"{'offset':>8} {'accepted':>9} {'tokens a call':>14} {'loss':>7}"
        "  by place",
        *(
          f"{x.offset:>8} {x.acceptance:>9.3f} {x.tokens_per_call:>14.2f} "
          f"{x.loss:>7.3f}  {' '.join(f'{r:.3f}' for r in x.rates)}"
          for x in each
        ),
      ]
    return lines, lambda path: None

  def entropy(self) -> _Shown:
    """Reads contexts in more and more chunks that do not see each other."""
    values, screen = self._values, self._screen
    context, query, rows = values.context, values.query, values.rows
    splits = _numbers("splits", values.splits, int, 1, context)
    splits = sorted(set(splits))
    texts = self._texts()
    model, tokenizer, reading = self._load(small)
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in texts])
    span, apart = context + query + 1, ids.size // rows
    if apart < span:
      raise OptionError(
        "--rows",
        f"{rows} of {span:,} tokens",
        f"at most the {ids.size:,} tokens of the text",
        "pass fewer rows, a shorter context, or more text",
      )
    prefix = tokenizer.bos_id
    prefix = tokenizer.encode("\n", bos=False) if prefix is None else [prefix]
    keys, how = settings(splits), combine_of(values.combine, "--combine")
    self._begin(
      "settings",
      len(keys),
      combine=str(values.combine),
      context=context,
      query=query,
      rows=rows,
      **({} if values.model else self._about("ringjax-small")),
    )
    screen.begin("reading", len(keys) * rows, "texts")
    found = split_entropy(
      model,
      # From all over the text.
      [ids[n * apart : n * apart + span] for n in range(rows)],
      splits,
      context=context,
      query=query,
      prefix=prefix,
      rows=rows,
      combine=how,
      mesh=reading["mesh"],
      on_read=screen.at,
      on_setting=lambda one: self._add(one.record()),
    )
    own, shared = (
      [one for one in found if one.shared == yes or one.splits == 1]
      for yes in (False, True)
    )
    self.record["correlation"] = {
      "own": correlation(own),
      "shared": correlation(shared),
    }
    return _entropy_lines(found, own, shared, context, query), (
      lambda path: charts.split_entropies(found, path)
    )

  def families(self) -> _Shown:
    """Tries codecs on a random model of each family."""
    values, screen = self._values, self._screen
    length = 512
    if values["lengths"].present:
      if len(self._lengths()) != 1:
        raise OptionError(
          "--lengths", ",".join(values.lengths), "one length", "pass one number"
        )
      (length,) = self._lengths()
    kinds = {
      text: common.cache_kind(text, calibrated=False)
      for text in values.cache or _CODECS
    }
    names = list(dict.fromkeys(values.families or RANDOM_FAMILIES))
    for name in names:
      one_of("--families", name, RANDOM_FAMILIES)
    self._start()
    about: dict[str, Any] = {"model": "random weights", "text": "random tokens"}
    about |= {"length": length, "seed": values.seed}
    self._begin("results", len(names) * len(kinds), **about)
    screen.begin("trying", len(names) * len(kinds), "caches")

    def found(one: FamilyError) -> None:
      self._add(one.record())
      screen.at(len(self.record["results"]))

    results = family_errors(
      kinds, names, length=length, seed=values.seed, on_kind=found
    )
    errors = {(x.family, x.name): x for x in results}
    wide = max(map(len, names))
    shown = lambda one: "-" if one.cost is None else f"{one.cost.far:.2%}"
    columns = [max(9, len(name) + 2) for name in kinds]
    lines = [
      f"distance of the logits, relative to theirs; random weights, "
      f"{length:,} random tokens",
      " " * wide
      + "".join(f"{x:>{w}}" for x, w in zip(kinds, columns, strict=True)),
      *(
        f"{family:<{wide}}"
        + "".join(
          f"{shown(errors[family, name]):>{w}}"
          for name, w in zip(kinds, columns, strict=True)
        )
        for family in names
      ),
      *(f"{x.family}, {x.name}: {x.refused}" for x in results if x.refused),
    ]
    return lines, lambda path: None

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


def _entropy_lines(
  found: Sequence[SplitEntropy],
  own: Sequence[SplitEntropy],
  shared: Sequence[SplitEntropy],
  context: int,
  query: int,
) -> list[str]:
  """The tables of `entropy`: the means by setting, and each layer and head."""
  shown = lambda x: "-" if x is None else f"{x:.3f}"
  lines = [
    f"{len(found[0].losses)} texts: {context:,} tokens in P chunks, {query:,} "
    "behind them; nats",
    f"{'':>4}{'a prefix each':>30}{'one shared prefix':>30}",
    f"{'P':>4}" + f"{'entropy':>10}{'loss':>10}{'on prefix':>10}" * 2,
  ]
  for a, b in zip(own, shared, strict=True):
    cells = [x for one in (a, b) for x in (one.entropy, one.loss)]
    lines.append(
      f"{a.splits:>4}{cells[0]:>10.4f}{cells[1]:>10.4f}{a.prefix_mass:>10.1%}"
      f"{cells[2]:>10.4f}{cells[3]:>10.4f}{b.prefix_mass:>10.1%}"
    )
  lines.append(
    f"correlation of entropy and loss: {shown(correlation(own))} with a prefix "
    f"each, {shown(correlation(shared))} with one"
  )
  lines.append("entropy by layer and head; s: one shared prefix")
  names = [f"{one.splits}{'s' if one.shared else ''}" for one in found]
  lines.append(f"{'layer':>5}{'head':>6}" + "".join(f"{x:>8}" for x in names))
  for layer, heads in enumerate(found[0].heads):
    if heads is None:
      lines.append(f"{layer:>5}{'':>6}  recurrent: it attends to nothing")
      continue
    each = np.array([one.heads[layer] for one in found])
    for head, row in [*enumerate(each.T), ("all", each.mean(1))]:
      cells = "".join(f"{x:>8.3f}" for x in row)
      lines.append(f"{layer:>5}{head:>6}{cells}")
  return lines


def _choice_lines(cost: KindCost, rows: int) -> list[str]:
  """Which tokens the heads keep, where the policy lets each choose."""
  if not cost.choices:
    return []
  wide = max(map(len, cost.choices))
  each = lambda layers: " | ".join(
    " ".join(f"{n:>{len(str(rows))}}" for n in heads) or "-" for heads in layers
  )
  return [
    f"{cost.name}: choices in {rows} texts, layer | layer, a number a KV head",
    *(f"{name:<{wide}}  {each(x)}" for name, x in cost.choices.items()),
  ]


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
  "contexts": _Evaluation.contexts,
  "chunks": _Evaluation.chunks,
  "drafts": _Evaluation.drafts,
  "families": _Evaluation.families,
  "entropy": _Evaluation.entropy,
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

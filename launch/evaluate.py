"""Measures a model on long contexts: retrieval, perplexity, caches and more.

  python -m launch.evaluate needle --lengths=4096,16384 --plot=needle.png
      Facts hidden in a long text, by its length and their depth. The text is
      Python's own sources, or those of --folder.
  python -m launch.evaluate needle --task=all --cache=dense --cache=int4
      Every task (ringjax.data.tasks.needle.TASKS) by the kind of cache out of
      which the answers come.
  python -m launch.evaluate suite --suite=ruler:path=DIR --cache=int8
      A benchmark (ringjax.eval.suites: RULER, LongBench v2, InfiniteBench,
      NoLiMa, MRCR, HELMET) from its own files and by its own rule, for each
      kind of cache and each way to read prompts: --read=chunked
      --read=8*ape reads contexts in eight parts. Prints the effective length.
  python -m launch.evaluate perplexity --lengths=2048,8192 --plot=nll.png
      The perplexity of such a text, by position; and of the same tokens with
      more and more text before them.
  python -m launch.evaluate caches --cache=int8 --cache=int4 --plot=caches.png
      What kinds of caches cost on such a text: bits, bytes, loss, divergence.
      Without --cache all kinds that need no calibration. With --task=passkey
      also the retrieval with each kind.
  python -m launch.evaluate contexts --contexts=2,8,16 --search --plot=c.png
      The cost of reading a text in parts that do not see each other, by the way
      in which they are combined (ringjax.infer.contexts) and their number: loss
      of the tokens after it, tokens computed, bytes moved. With --task=passkey
      also the retrieval. --search tunes temperature and scale on separate
      texts.
  python -m launch.evaluate chunks --model=DIR --contexts=0,4,8,16,32
      The loss after more and more chunks that a model's encoder reads
      (ringjax.models.cepe), on files that are long enough for the most.
  python -m launch.evaluate drafts --draft=DIR,eagle3:DIR,mtp:DIR \\
      --offsets=0,4096,16384,65536
      How many tokens of a draft block (ringjax.models.longspec), and how
      many first ones of an EAGLE-3 head or of a model's MTP layer, its target
      accepts, where all but the first four tokens are moved on.
  python -m launch.evaluate families --cache=int4 --cache=nuq3
      What kinds of caches do to small models of every family with random
      weights; without --cache all codecs.
  python -m launch.evaluate entropy --splits=1,2,4,8,16 --plot=entropy.png
      The entropy of each layer's and head's attention, and the loss, after
      contexts that are cut into chunks which are encoded separately: each with
      its own prefix, or all with one. The prefix is the id that begins a text,
      else a newline. Without --model of ringjax's second model.
  python -m launch.evaluate curves --log=DIR/log.jsonl --plot=run.png
      The curves of a training, from its log.

Without --model the model that ships with ringjax is measured, and for contexts
the second one, ringjax-small. Of Python's
sources the one file in ten that training keeps out (`documents.library`) is
read, over all devices; see --mesh and --prefill. --out is written after each
cell of a table, or each curve; "complete" in it says whether it has all. Called
again with the same --out and settings, needle and suite ask only what is
missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from ringjax.bench import timing
from ringjax.checks import one_of
from ringjax.data import LinkTokens, Tokenizer
from ringjax.data.batches import texts
from ringjax.data.tasks import documents
from ringjax.data.tasks.filler import Lines
from ringjax.data.tasks.link_tokens import LINKS
from ringjax.data.tasks.needle import TASKS, Task
from ringjax.errors import OptionError, StorageError
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
from ringjax.eval.suites import (
  SUITES,
  AnswerJudge,
  ReadingMode,
  Suite,
  SuiteAnswer,
  asks_chats,
  effective_lengths,
  score_table,
  suite_answers,
  suite_of,
  templates_of,
)
from ringjax.infer import GenerateConfig
from ringjax.infer.contexts import APE, combine_of
from ringjax.json_text import json_text
from ringjax.kv import KINDS, kind_text
from ringjax.models import small, tiny
from ringjax.models.cepe import CepeTransformer
from ringjax.models.fingerprint import fingerprint
from ringjax.models.transformer import Transformer
from ringjax.paths import as_path

from .shared import answering, common, console, model_flags
from .shared.flag_helpers import (
  FlagHelper,
  model_folder,
  option_values,
)
from .shared.group import Group

NAME = "evaluate"
# Characters of a text that are encoded to estimate its number of tokens.
_SAMPLE = 1 << 16
_MEMORY = "shorten the text (--lengths), or use more devices"
# Kinds of caches that need no calibration.
_UNCALIBRATED = [
  name
  for name, kind in KINDS.items()
  if not isinstance(kind.codec, rj.kv.Calibrated)
]
# Kinds of caches that are a codec without a policy.
_CODECS = [
  name
  for name, kind in KINDS.items()
  if kind.codec is not None and kind.policy is None
]
# Lines to print, and a function that draws a plot into the file at a path.
_CommandOutput = tuple[list[str], Callable[[str], None]]


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.checkpoint()
  new.rope_scaling()
  new.path("adapter", None, "Low-rank adapter to add: a folder of PEFT.")
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
  new.options(GenerateConfig, ("prefill", "chunk", "cache_dtype"))
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
  new.whole("query", 128, "entropy: tokens after them that are looked at.")
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
  new.place(
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
    "contexts, chunks, drafts: tokens after a text that count.",
  )
  new.text(
    "prefix", "\n\n", "contexts: text before all parts, where they share one."
  )
  new.boolean("search", False, "contexts: tune APE on texts of their own.")
  new.texts(
    "draft", None, "drafts: DIR of LongSpec, eagle3:DIR, or mtp:DIR of a model."
  )
  new.texts(
    "offsets",
    ["0", "4096", "16384", "65536"],
    "drafts: by how much tokens are moved on.",
  )
  new.text(
    "suite",
    None,
    f"suite: the benchmark, of {', '.join(SUITES)}, with its files and "
    "options, as in nolima:path=DIR,lengths=(1000,4000).",
  )
  new.place(
    "templates",
    None,
    "suite: messages in place of ringjax's own: a text file, or JSON with a "
    "text for each task.",
  )
  flags.DEFINE_multi_string(
    "read",
    None,
    "suite: a method of prefill, or parts and how they are combined, as in "
    "8*ape:temperature=0.8; may be given several times.",
    flag_values=values,
  )
  new.text(
    "judge",
    None,
    "suite: base address of an OpenAI-compatible API, as "
    "http://127.0.0.1:8000/v1, whose --judge_model scores tasks of helmet that "
    "are judged; its key is $OPENAI_API_KEY.",
  )
  new.text("judge_model", None, "suite: name of the judge there.")
  new.whole("limit", None, "suite: most questions of each task and length.")
  new.whole(
    "longest",
    None,
    "suite: most tokens of prompt and answer; default: the model's context.",
  )
  new.boolean(
    "chat",
    None,
    "suite: whether prompts are chats; default: if the model has a template.",
  )
  new.place("log", None, "curves: the log.jsonl of a training, or its address.")
  new.local_output("plot", None, "PNG to draw (needs matplotlib).")
  new.output("out", None, "File for all figures, JSON.")
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Runs the sub-command in `words`; returns the exit status."""
  common.quiet_logging()
  screen = console.Screen(NAME, stderr)
  doing = f"evaluating {' '.join(words)}"
  group = Group(screen, lambda: doing)
  if len(words) != 1 or words[0] not in _COMMANDS:
    command = " ".join(words) or "nothing"
    screen.error(f"got {command}; wanted {' or '.join(_COMMANDS)}; see --help")
    return 2
  work = _Evaluation(values, screen, group, words[0])
  with console.Run(
    screen,
    _MEMORY,
    doing=doing,
    interrupted=lambda: f"interrupted; {work.said}",
    reports=work,
    leaving=group.leave,
  ) as run:
    _refuse_unused(values, words[0])
    common.check_plot(values)
    lines, draw = _COMMANDS[words[0]](work)
  if run.status:
    return run.status
  group.close()
  screen.end()
  # Only the first process writes. `jax.process_index` would start JAX here.
  if screen.quiet:
    return 0
  with console.Run(screen, _MEMORY, doing="writing") as run:
    if values.out is not None:
      timing.write_json(values.out, work.record)
    if values.plot is not None:
      draw(values.plot)
      screen.say(f"wrote {values.plot}")
  if run.status:
    return run.status
  stdout = sys.stdout if stdout is None else stdout
  text = json_text(work.record) if values.json else "\n".join(lines)
  print(text, file=stdout, flush=True)
  return 0


def _refuse_unused(values: flags.FlagValues, word: str) -> None:
  """Raises an OptionError for set flags that the sub-command ignores."""
  script_flags = flags.FlagValues()
  define(script_flags)
  unused = [
    f"--{name}"
    for name in sorted(script_flags)
    if values[name].present and not _uses(word, name, values.task is not None)
  ]
  if unused:
    raise OptionError(
      "flags",
      f"{', '.join(unused)} with {word}",
      "those that it uses",
      "leave them out; see --help",
    )


# Flags of sub-commands that take few, and no others.
_OWN_FLAGS: dict[str, tuple[str, ...]] = {
  "chunks": ("model", "dtype", "contexts", "question", "rows", "folder", "mesh",
             "out", "json"),
  "curves": ("log", "plot", "out", "json"),
  "drafts": ("model", "dtype", "draft", "offsets", "context", "question",
             "rows", "folder", "mesh", "out", "json"),
  "families": ("families", "cache", "lengths", "seed", "out", "json"),
}  # fmt: skip
# Sub-commands that take all flags but those of other sub-commands.
_COMMON = ("needle", "perplexity", "caches", "contexts", "entropy", "suite")


def _uses(word: str, name: str, asks: bool) -> bool:
  """Whether a sub-command uses a flag; `asks`: whether --task was set."""
  if word in _OWN_FLAGS:
    return name in _OWN_FLAGS[word]
  asking = ("needle", "caches") if asks else ("needle",)
  answers = (*asking, "contexts") if asks else asking
  of_contexts = dict.fromkeys(
    ("contexts", "ways", "question", "prefix", "search"), ("contexts",)
  )
  only = {"task": ("needle", "caches", "contexts"), "depths": asking,
          "trials": answers, "seed": answers, **of_contexts,
          "rows": ("perplexity", "caches", "contexts", "entropy"),
          "cache": ("caches", "needle", "contexts", "suite"),
          "prefill": ("needle", "perplexity"),
          "chunk": ("needle", "perplexity", "suite"), "log": (),
          "families": (),
          "cache_dtype": ("needle", "perplexity", "suite"),
          "splits": ("entropy",),
          **dict.fromkeys(
            ("suite", "templates", "read", "limit", "longest", "chat",
             "judge", "judge_model"),
            ("suite",),
          ),
          **dict.fromkeys(
            ("folder", "plot"),
            ("needle", "perplexity", "caches", "contexts", "entropy"),
          ),
          "context": ("entropy",), "query": ("entropy",), "draft": (),
          "combine": ("entropy",),
          "offsets": (), "lengths":
          ("needle", "perplexity", "caches", "contexts")}  # fmt: skip
  return word in only.get(name, _COMMON)


def _numbers(
  name: str, items: Sequence[str], kind: Any, least: float, most: float
) -> list[Any]:
  """Parses a flag's list of numbers, each from `least` to `most`."""
  try:
    numbers = [kind(text) for text in items]
  except ValueError:
    numbers = []
  # `x < least` would be false for NaN, too.
  if not numbers or not all(least <= x <= most for x in numbers):
    want = (
      f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
    )
    raise OptionError(
      f"--{name}",
      ",".join(items) or "none",
      f"numbers of {want}",
      f"pass --{name}=A,B,... with such numbers",
    )
  return numbers


# ---------------------------------------------------------------------------
# Sub-commands
# ---------------------------------------------------------------------------


class _Evaluation:
  """Runs one sub-command and writes each of its figures to --out.

  Attributes:
    record: All figures, as JSON; "loading" says what `load` chose.
    done: Number of figures that are in --out.
    said: Message about the contents of --out.
  """

  def __init__(
    self,
    values: flags.FlagValues,
    screen: console.Screen,
    group: Group,
    word: str,
  ):
    self._values, self._screen, self._group = values, screen, group
    self._word = word
    self.done, self.said = 0, "nothing was written"
    self.record: dict[str, Any] = {}
    self._note: str | None = None

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Reports an error, after the contents of --out."""
    if self.done:
      self._screen.say(self.said)
    return self._group.failed(error, doing, knobs)

  def _begin(
    self,
    unit: str,
    total: int,
    known: Sequence[dict[str, Any]] = (),
    **about: Any,
  ) -> None:
    """Starts the record, whose list `unit` will have `total` figures.

    The list begins with `known`, the figures of an earlier run.
    """
    self._unit, self._total = unit, total
    self.record = self._about() | about
    if self._note is not None:
      self.record["loading"] = self._note
    self.record |= {unit: [*known], "complete": len(known) == total}

  def _about(self, default_model: str = "ringjax-tiny") -> dict[str, Any]:
    """Model and text that the figures are measured on."""
    values = self._values
    return {
      "model": str(values.model or default_model),
      "text": values.folder or "held-out files of Python's library",
      **({} if values.adapter is None else {"adapter": str(values.adapter)}),
      **(
        {}
        if values.rope_scaling is None
        else {"rope_scaling": values.rope_scaling}
      ),
    }

  def _known(
    self,
    unit: str,
    settings: dict[str, Any],
    from_record: Callable[[dict[str, Any]], Any],
  ) -> list[Any]:
    """Reads the figures that --out has from a run with the same settings.

    Several processes need not share a file system, so they compute all.

    Args:
      unit: Name of the list of figures.
      settings: Entries of the record that must be equal.
      from_record: Function that makes a figure of its record.
    """
    path = self._values.out
    if path is None or jax.process_count() > 1:
      return []
    place = as_path(path, "--out")
    if not place.is_file():
      return []
    try:
      previous = json.loads(place.read_text("utf-8"))
      if any(previous[name] != x for name, x in settings.items()):
        return []
      return [from_record(record) for record in previous[unit]]
    except StorageError:
      raise
    # The file has other contents: it is replaced.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
      return []

  def _add(
    self, figure: dict[str, Any], place: int | None = None, unjudged: int = 0
  ) -> None:
    """Adds a figure and writes --out, so that an interrupted run keeps it.

    Args:
      figure: The figure, as JSON.
      place: Index at which it stands, in place of what is there; default: the
        end.
      unjudged: Number of figures that a judge has yet to score.
    """
    path, unit = self._values.out, self._unit
    place = len(self.record[unit]) if place is None else place
    self.record[unit][place : place + 1] = [figure]
    num_figures = len(self.record[unit])
    self.record["complete"] = num_figures == self._total and not unjudged
    if path is not None and not self._screen.quiet:
      timing.write_json(path, self.record)
      self.done = num_figures
      self.said = f"{path} has {num_figures} of {self._total} {unit}"

  def _start(self) -> None:
    """Waits for the other processes, and silences all but the first."""
    common.start(self._values, single=self._values.model is not None)
    self._group.meet(
      self._values, own=("json", "out", "plot"), command=self._word
    )
    self._screen.quiet = jax.process_index() > 0

  def _load(
    self, default_model: Any = tiny, *, codes: bool = True
  ) -> tuple[Any, Tokenizer, dict[str, Any]]:
    """Loads the model, its tokenizer and the options of prefill.

    Args:
      default_model: Module of the shipped model that is measured without
        --model.
      codes: Whether weights may become codes where float32 does not fit.
    """
    values, screen = self._values, self._screen
    kinds = [kind_text.parse(text, "--cache") for text in values.cache or ()]
    codes = codes and not any(map(common.measured, kinds))
    # Low-rank products are added to floats, not to codes.
    codes = codes and values.adapter is None
    options = ("prefill", "chunk", "cache_dtype")
    reading = option_values(values, GenerateConfig, options)
    # Refused here, before the model is loaded.
    model_flags.check_adapter(values.adapter)
    GenerateConfig().replace(**reading)
    self._start()
    screen.begin("loading the model")
    mesh = common.mesh(values.mesh)
    folder = model_folder(values, default_model.path)
    model, note = answering.load(values, folder, mesh, codes=codes)
    self._note = note
    if note is not None:
      screen.say(note)
    if values.adapter is not None:
      model = model_flags.adapted(model, values.adapter)
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    return model, tokenizer, reading | {"mesh": mesh}

  def _one_length(self) -> int:
    """The length of --lengths, which is one; 512 without."""
    if not self._values["lengths"].present:
      return 512
    if len(self._lengths()) != 1:
      raise OptionError(
        "--lengths",
        ",".join(self._values.lengths),
        "one length",
        "pass one number",
      )
    return self._lengths()[0]

  def _lengths(self) -> list[int]:
    return _numbers("lengths", self._values.lengths, int, 1, math.inf)

  def _texts(self) -> list[str]:
    if self._values.folder is None:
      return documents.library(held_out=True)
    return list(texts.from_files(texts.find(self._values.folder)))

  def _tasks(self) -> list[str]:
    names = self._values.task
    names = ["passkey"] if names is None else names
    for name in names or ["none"]:
      one_of("--task", name, ("all", *TASKS))
    return list(TASKS) if "all" in names else list(dict.fromkeys(names))

  def _depths(self) -> list[float]:
    depths = self._values.depths
    if depths is None:
      depths = ["0", "0.25", "0.5", "0.75", "1"]
    return _numbers("depths", depths, float, 0, 1)

  def _needle_tasks(
    self, names: Sequence[str], text: str, tokenizer: Tokenizer, longest: int
  ) -> dict[str, Task]:
    """Creates tasks, by name, whose facts are hidden in `text`."""
    # A prompt that is longer than the text repeats it: note that.
    sample = text[:_SAMPLE]
    tokens = len(text) * len(tokenizer.encode(sample)) // len(sample)
    if tokens < longest:
      self._screen.say(
        f"note: the text in which facts are hidden has about {tokens:,} tokens;"
        " what is longer has it more than once"
      )
    filler = Lines(text=text)
    return {n: TASKS[n](tokenizer=tokenizer, filler=filler) for n in names}

  def needle(self) -> _CommandOutput:
    """Asks for facts in texts of each length, at each depth."""
    values, screen, lengths = self._values, self._screen, self._lengths()
    depths, names = self._depths(), self._tasks()
    kind_names = list(dict.fromkeys(values.cache or ()))
    kinds = {kind: common.cache_kind(kind) for kind in kind_names}
    text = "\n".join(self._texts())
    model, tokenizer, reading = self._load()
    tasks = self._needle_tasks(names, text, tokenizer, max(lengths))
    keys = grid(tasks, kinds or [""], lengths, depths)
    settings = self._about() | {
      name: values[name].value
      for name in ("dtype", "prefill", "chunk", "cache_dtype", "trials", "seed")
    }
    settings |= {"characters": len(text)}
    if jax.process_count() == 1:
      settings["weights"] = fingerprint(model)
    known_cells = [
      cell
      for cell in self._known("cells", settings, Cell.from_record)
      if cell.key in keys
    ]
    if known_cells:
      screen.say(
        f"{values.out} has {len(known_cells)} of {len(keys)} cells already"
      )
    self._begin(
      "cells",
      len(keys),
      [cell.record() for cell in known_cells],
      tasks=names,
      caches=kind_names,
      **settings,
    )
    trials = values.trials
    screen.begin(
      "asking", len(keys) * trials, "texts", len(known_cells) * trials
    )
    cells = find(
      model,
      tasks,
      lengths=lengths,
      depths=depths,
      kinds=kinds or None,
      trials=trials,
      seed=values.seed,
      known=known_cells,
      on_trial=screen.at,
      on_cell=lambda cell: self._add(cell.record()),
      **reading,
    )
    scores = table(cells)
    if len(names) > 1:
      for kind in dict.fromkeys(label[1:] for label in scores):
        kind_rows = [row for label, row in scores.items() if label[1:] == kind]
        scores["mean", *kind] = {
          length: sum(row[length] for row in kind_rows) / len(kind_rows)
          for length in kind_rows[0]
        }
    subject = names[0] if len(names) == 1 else f"{len(names)} tasks"
    widths = [max(map(len, column)) for column in zip(*scores, strict=True)]
    label_text = lambda label: "  ".join(
      f"{part:<{w}}" for part, w in zip(label, widths, strict=True)
    )
    lines = [
      f"{subject}: per cent found, {trials} texts of each length and depth",
      " " * len(label_text(next(iter(scores))))
      + "".join(f"{length:>10,}" for length in dict.fromkeys(lengths)),
      *(
        label_text(label) + "".join(f"{100 * x:>10.0f}" for x in row.values())
        for label, row in scores.items()
      ),
    ]
    title = f"{subject}: {100 * mean(cells):.0f} % found"
    return lines, lambda path: charts.heat_map(cells, path, title)

  def _readings(self) -> dict[str, ReadingMode]:
    """Ways to read prompts, of --read and --cache, by name."""
    values = self._values
    readings: dict[str, ReadingMode] = {}
    for read in values.read or [""]:
      parts = re.fullmatch(r"(\d+)\*(.+)", read)
      for cache in values.cache or [""]:
        options: dict[str, Any] = {}
        if cache:
          options["cache_kind"] = common.cache_kind(cache)
        if read and not parts:
          options["prefill"] = read
          GenerateConfig().replace(prefill=read)
        name = " ".join(filter(None, (read, cache)))
        readings[name] = ReadingMode(
          options=options,
          parts=int(parts[1]) if parts else None,
          combine=parts[2] if parts else "parallel",
        )
    return readings

  def suite(self) -> _CommandOutput:
    """Asks the questions of a benchmark in each way."""
    values, screen = self._values, self._screen
    if values.suite is None:
      raise OptionError(
        "--suite",
        "none",
        f"a benchmark, of {', '.join(SUITES)}",
        "pass --suite=ruler:path=DIR, for instance",
      )
    templates = None
    if values.templates is not None:
      templates = templates_of(as_path(values.templates, "--templates"))
    suite = suite_of(values.suite, templates=templates, name="--suite")
    judge = None
    if values.judge is not None or values.judge_model is not None:
      judge = AnswerJudge(
        address=values.judge or "", model=values.judge_model or ""
      )
    if suite.judged != (judge is not None):
      raise OptionError(
        "--judge",
        values.judge or "none",
        "a judge's address for tasks that are judged, and none for others",
        "pass --judge=http://HOST:PORT/v1 --judge_model=NAME"
        if suite.judged
        else "leave it and --judge_model out",
      )
    readings = self._readings()
    model, tokenizer, options = self._load()
    settings = self._about() | {
      name: values[name].value
      for name in ("dtype", "chunk", "cache_dtype", "limit", "longest", "chat")
    }
    settings |= {"suite": values.suite, "templates": templates, "text": "suite"}
    if jax.process_count() == 1:
      settings["weights"] = fingerprint(model)

    places: dict[tuple[str, str], int] = {}
    unjudged: set[tuple[str, str]] = set()

    def note_judgement(answer: SuiteAnswer) -> None:
      if judge is None or answer.judged_by(judge.model):
        unjudged.discard(answer.key)
      else:
        unjudged.add(answer.key)

    def begin(total: int, known: Sequence[SuiteAnswer]) -> None:
      if known:
        screen.say(f"{values.out} has {len(known)} of {total} answers already")
      about = {} if judge is None else {"judge": judge.model}
      self._begin(
        "answers",
        total,
        [answer.record() for answer in known],
        readings=list(readings),
        **settings,
        **about,
      )
      places.update({answer.key: n for n, answer in enumerate(known)})
      for answer in known:
        note_judgement(answer)
      screen.begin("asking", total, "questions", len(known))

    def add(answer: SuiteAnswer) -> None:
      # An answer that is judged replaces the one before its score.
      place = places.setdefault(answer.key, len(places))
      note_judgement(answer)
      self._add(answer.record(), place, len(unjudged))
      screen.at(len(self.record["answers"]))

    answers = suite_answers(
      model,
      tokenizer,
      suite,
      readings=readings,
      chat=values.chat,
      limit=values.limit,
      longest=values.longest,
      judge=judge,
      known=self._known("answers", settings, SuiteAnswer.from_record),
      on_answer=add,
      on_start=begin,
      **options,
    )
    chats = asks_chats(tokenizer, readings, values.chat)
    self.record["asked"] = "chats" if chats else "plain prompts"
    name = f"{values.suite.partition(':')[0]}, in {self.record['asked']}"
    lines = _suite_lines(answers, suite, name)
    effective = effective_lengths(answers, suite)
    self.record["effective"] = {
      name: x._asdict() for name, x in effective.items()
    }
    for name, x in effective.items():
      length = "none" if x.length is None else f"{x.length:,} tokens"
      lines.append(
        f"effective length{f' of {name}' if name else ''}: {length} (at least "
        f"{100 * x.threshold:.1f} %: {x.rule})"
      )
    return lines, lambda path: None

  def perplexity(self) -> _CommandOutput:
    """Measures perplexity on texts of each length with equal last tokens."""
    values, screen, lengths = self._values, self._screen, self._lengths()
    corpus = self._texts()
    model, tokenizer, reading = self._load()
    # Texts beyond the model's context may be measured on purpose.
    context = model.config.longest
    if context is not None and max(lengths) > context:
      screen.say(
        f"note: {max(lengths):,} tokens, and the model was made for {context:,}"
      )
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    # Texts are joined, as files are short, and each row begins with the id that
    # begins a text. Rows of all lengths end with the same tokens, which are
    # predicted with more or less context.
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in corpus])
    extra_token = bos is None
    span = max(lengths) + extra_token
    token_rows = [ids[n * span : (n + 1) * span] for n in range(values.rows)]
    readers = {
      length: reader(
        model,
        [row[len(row) - length - extra_token :] for row in token_rows],
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
      rows_before = n * values.rows
      read = readers[length]
      curves.append(
        read(lambda row, rows_before=rows_before: screen.at(rows_before + row))
      )
      self._add(curves[-1].record())
    line = lambda name, cells: f"{name:>9}" + "".join(f"{x:>10}" for x in cells)
    ends = sorted({end for curve in curves for end in curve.ends})
    nll_by_end = [dict(zip(c.ends, c.nll, strict=True)) for c in curves]
    lines = [
      "negative log-likelihood by position, nats a token",
      line("up to", [f"{curve.length:,}" for curve in curves]),
      *(
        line(
          f"{end:,}", [f"{c[end]:.4f}" if end in c else "-" for c in nll_by_end]
        )
        for end in ends
      ),
      line("all", [f"{curve.mean:.4f}" for curve in curves]),
      f"the same last {curves[0].last:,} tokens of each text, by its length",
      line("", [f"{curve.last_nll:.4f}" for curve in curves]),
    ]
    return lines, lambda path: charts.curves(curves, path)

  def caches(self) -> _CommandOutput:
    """Measures the loss when keys and values come from each kind of cache.

    With --task also asks for facts, with caches of these kinds.
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
    corpus = self._texts()
    model, tokenizer, reading = self._load()
    length = min(lengths)
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in corpus])
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
      tasks = self._needle_tasks(names, "\n".join(corpus), tokenizer, length)
      about |= {"tasks": names, "trials": values.trials, "seed": values.seed}
    self._begin("kinds", len(kinds), **about)
    # For each kind: first the texts of the tasks, then the rows.
    task_texts = len(grid(tasks, [""], [length], depths)) * values.trials
    screen.begin("reading", len(kinds) * (task_texts + rows), "texts")
    kinds = {name: model.cache_kind(kind) for name, kind in kinds.items()}
    costs: list[KindCost] = []
    scores: list[float] = []
    for n, (name, kind) in enumerate(kinds.items()):
      texts_before = n * (task_texts + rows)
      if asks:
        cells = find(
          model,
          tasks,
          lengths=[length],
          depths=depths,
          kinds={name: kind},
          trials=values.trials,
          seed=values.seed,
          on_trial=lambda done, texts_before=texts_before: screen.at(
            texts_before + done
          ),
          **reading,
        )
        scores.append(mean(cells))
      costs += compare_caches(
        model,
        ids[: rows * length].reshape(rows, length),
        {name: kind},
        on_read=lambda done, texts_before=texts_before: screen.at(
          texts_before + task_texts + done
        ),
      )
      self._add(costs[-1].record() | ({"score": scores[-1]} if asks else {}))
    name_width = max(len(cost.name) for cost in costs)
    lines = [
      f"{rows} texts of {length:,} tokens; nats a token without a cache: "
      f"{costs[0].nll - costs[0].loss:.4f}",
      f"{'kind':<{name_width}}{'bits':>8}{'bytes':>12}{'loss':>10}{'KL':>10}"
      f"{'logits':>10}" + (f"{'found':>9}" if asks else ""),
      *(
        f"{cost.name:<{name_width}}{cost.bits:>8.2f}{cost.nbytes:>12,}"
        f"{cost.loss:>+10.4f}{cost.kl:>10.5f}{cost.far:>10.2%}"
        + "".join(f"{x:>9.0%}" for x in scores[n : n + 1])
        for n, cost in enumerate(costs)
      ),
      *(line for cost in costs for line in _choice_lines(cost, rows)),
    ]
    return lines, lambda path: charts.cache_costs(costs, path)

  def contexts(self) -> _CommandOutput:
    """Measures texts in parts that do not attend to each other.

    With --task also asks for facts that are hidden in them.
    """
    values, screen = self._values, self._screen
    length = self._one_length()
    counts = _numbers("contexts", values.contexts, int, 1, length)
    asks, cache_names = values.task is not None, list(values.cache or ())
    names = self._tasks() if asks else []
    if len(cache_names) > 1:
      raise OptionError(
        "--cache", ", ".join(cache_names), "one", "pass one kind"
      )
    kind = common.cache_kind(cache_names[0]) if cache_names else None
    chosen = [] if "all" in values.ways else values.ways
    context_ways([0], kinds=chosen)
    corpus = self._texts()
    model, tokenizer, reading = self._load(small)
    links, folder = None, model_folder(values, small.path)
    if (folder / LINKS).exists():
      links = LinkTokens.load(folder, vocab=model.config.vocab)
    bos_ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ways = context_ways(
      [int(n) for n in (*bos_ids, *tokenizer.encode(values.prefix))],
      links,
      chosen,
    )
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in corpus])
    span, rows = length + values.question, values.rows
    # With --search every second text is for tuning and isn't measured.
    num_texts = rows * (2 if values.search else 1)
    if ids.size < num_texts * span:
      raise OptionError(
        "--lengths",
        length,
        f"at most what {num_texts} texts of {ids.size:,} tokens together have",
        "pass fewer --rows, a smaller length, or more text",
      )
    # Spread over the whole text.
    starts = np.linspace(0, ids.size - span, num_texts).astype(int)
    texts = np.stack([ids[start : start + span] for start in starts])
    call_options = {"mesh": reading["mesh"], "cache_kind": kind}
    trial = ContextTrial(model, texts[::2][:rows] if values.search else texts,
                         values.question, **call_options)  # fmt: skip
    tuning = ContextTrial(model, texts[1::2], values.question, **call_options)
    self._begin(
      "costs",
      len(ways) * len(counts),
      length=length,
      question=values.question,
      rows=rows,
      prefix=values.prefix,
      cache=cache_names[0] if cache_names else None,
      tasks=names,
      **({} if values.model else self._about("ringjax-small")),
    )
    scores: dict[tuple[str, int], float] = {}
    if asks:
      tasks = self._needle_tasks(names, "\n".join(corpus), tokenizer, length)
      total = len(ways) * len(counts) * values.trials
      screen.begin("asking", total * len(tasks), "answers")
      for n, task in enumerate(tasks.values()):
        task_scores = context_answers(
          model,
          task,
          ways,
          counts,
          length=length,
          trials=values.trials,
          seed=values.seed,
          on_trial=lambda done, n=n: screen.at(n * total + done),
          **call_options,
        )
        for key, score in task_scores.items():
          scores[key] = scores.get(key, 0.0) + score / len(tasks)
    costs: list[ContextCost] = []
    screen.begin("reading", len(ways) * len(counts) * rows, "texts")
    for count in counts:
      for name, way in ways.items():
        if values.search and isinstance(way.combine, APE):
          best = tuning.tuned(count, way.combine)
          way = dataclasses.replace(way, combine=best)
        rows_before = len(costs) * rows
        costs.append(
          trial.cost(
            name,
            way,
            count,
            found=scores.get((name, count)),
            on_row=lambda done, rows_before=rows_before: screen.at(
              rows_before + done
            ),
          )
        )
        self._add(costs[-1].record())
    name_width = max(map(len, ways))
    head = f"{'way':<{name_width}}" + "".join(f"{n:>9,}" for n in counts)
    costs_of = lambda name: [cost for cost in costs if cost.way == name]
    table_lines = lambda cell: [
      f"{name:<{name_width}}" + "".join(f"{cell(x):>9}" for x in costs_of(name))
      for name in ways
    ]
    lines = [
      f"{rows} texts of {length:,} tokens and {values.question} after them, "
      "by parts; nats a token",
      head,
      *table_lines(lambda x: f"{x.nll:.4f}"),
    ]
    if asks:
      lines += [
        "per cent found",
        head,
        *table_lines(lambda x: f"{x.found:.0%}"),
      ]
    lines += [
      "tokens computed",
      head,
      *table_lines(lambda x: f"{x.computed:,.0f}"),
    ]
    lines += [
      "kilobytes moved",
      head,
      *table_lines(lambda x: f"{x.nbytes / 1e3:,.0f}"),
    ]
    if values.search and "ape" in ways:
      lines += [f"{x.contexts} parts: {x.combine}" for x in costs_of("ape")]
    return lines, lambda path: charts.context_costs(costs, path)

  def chunks(self) -> _CommandOutput:
    """Measures the loss after chunks that the model's encoder reads."""
    values = self._values
    count_texts = values.contexts
    if not values["contexts"].present:
      count_texts = ["0", "4", "8", "16", "32"]
    counts = _numbers("contexts", count_texts, int, 0, math.inf)
    model, tokenizer, _ = self._load(small, codes=False)
    if not isinstance(model, CepeTransformer):
      raise OptionError(
        "--model",
        f"{values.model or 'ringjax-small'}, without an encoder",
        "a model with an encoder",
        "train one: python -m launch.train --config=configs/train/cepe.py",
      )
    size = model.encoder_config.chunk
    min_tokens = max(counts) * size + values.question + 1
    ids = (np.asarray(tokenizer.encode(t)) for t in self._texts())
    # From the beginning of files, so that the chunks are of the same file.
    long_rows = [x[:min_tokens] for x in ids if x.size >= min_tokens]
    rows = long_rows[:: max(1, len(long_rows) // values.rows)][: values.rows]
    self._screen.begin("reading", len(rows), "texts")
    curve = context_curve(model, rows, chunks=counts, tokens=values.question)
    self.record = self._about() | dataclasses.asdict(curve)
    head = f"nats a token of {curve.tokens} after chunks of {size} tokens, "
    return [f"{head}{curve.texts} texts:", str(curve)], lambda path: None

  def drafts(self) -> _CommandOutput:
    """Measures how many tokens of each draft the model accepts after texts."""
    values = self._values
    offsets = _numbers("offsets", values.offsets, int, 0, math.inf)
    if not values.draft:
      raise OptionError(
        "--draft",
        "none",
        "the folder of a draft",
        "train one: python -m launch.train --config=configs/drafts/longspec.py",
      )
    model, tokenizer, _ = self._load(small, codes=False)
    drafts = {x: _drafting(x, model) for x in values.draft}
    ids = (np.asarray(tokenizer.encode(t)) for t in self._texts())
    long_rows = [x[: values.context] for x in ids if x.size >= values.context]
    rows = long_rows[:: max(1, len(long_rows) // values.rows)][: values.rows]
    self._screen.begin("drafting", len(rows), "texts")
    results = {
      name: draft_acceptance(
        draft,
        rows,
        offsets=offsets,
        tokens=values.question,
        # Of layers and heads the first drafted token alone.
        count=4 if draft.config.predicts is None else 1,
      )
      for name, draft in drafts.items()
    }
    self.record = self._about() | {
      "drafts": {
        name: [
          dataclasses.asdict(x) | {"acceptance": x.acceptance}
          for x in by_offset
        ]
        for name, by_offset in results.items()
      }
    }
    lines = [
      f"{len(rows)} texts of {values.context} tokens and {values.question} "
      "that the model chose:"
    ]
    for name, by_offset in results.items():
      lines += [
        name,
        f"{'offset':>8} {'accepted':>9} {'tokens a call':>14} {'loss':>7}"
        "  by place",
        *(
          f"{x.offset:>8} {x.acceptance:>9.3f} {x.tokens_per_call:>14.2f} "
          f"{x.loss:>7.3f}  {' '.join(f'{r:.3f}' for r in x.rates)}"
          for x in by_offset
        ),
      ]
    return lines, lambda path: None

  def entropy(self) -> _CommandOutput:
    """Measures attention entropy over contexts in more and more chunks."""
    values, screen = self._values, self._screen
    context, query, rows = values.context, values.query, values.rows
    splits = _numbers("splits", values.splits, int, 1, context)
    splits = sorted(set(splits))
    texts = self._texts()
    model, tokenizer, reading = self._load(small)
    ids = np.concatenate([np.asarray(tokenizer.encode(t)) for t in texts])
    span, stride = context + query + 1, ids.size // rows
    if stride < span:
      raise OptionError(
        "--rows",
        f"{rows} of {span:,} tokens",
        f"at most the {ids.size:,} tokens of the text",
        "pass fewer rows, a shorter context, or more text",
      )
    prefix = tokenizer.bos_id
    prefix = tokenizer.encode("\n", bos=False) if prefix is None else [prefix]
    keys, combine = settings(splits), combine_of(values.combine, "--combine")
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
    entropies = split_entropy(
      model,
      # Spread over the whole text.
      [ids[n * stride : n * stride + span] for n in range(rows)],
      splits,
      context=context,
      query=query,
      prefix=prefix,
      rows=rows,
      combine=combine,
      mesh=reading["mesh"],
      on_read=screen.at,
      on_setting=lambda entropy: self._add(entropy.record()),
    )
    own_prefix, shared_prefix = (
      [
        entropy
        for entropy in entropies
        if entropy.shared == is_shared or entropy.splits == 1
      ]
      for is_shared in (False, True)
    )
    self.record["correlation"] = {
      "own": correlation(own_prefix),
      "shared": correlation(shared_prefix),
    }
    return _entropy_lines(
      entropies, own_prefix, shared_prefix, context, query
    ), (lambda path: charts.split_entropies(entropies, path))

  def families(self) -> _CommandOutput:
    """Measures the error of codecs on a random model of each family."""
    values, screen = self._values, self._screen
    length = self._one_length()
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

    def add_result(family_error: FamilyError) -> None:
      self._add(family_error.record())
      screen.at(len(self.record["results"]))

    results = family_errors(
      kinds, names, length=length, seed=values.seed, on_kind=add_result
    )
    errors = {(x.family, x.name): x for x in results}
    name_width = max(map(len, names))
    error_text = lambda result: (
      "-" if result.cost is None else f"{result.cost.far:.2%}"
    )
    columns = [max(9, len(name) + 2) for name in kinds]
    lines = [
      f"distance of the logits, relative to theirs; random weights, "
      f"{length:,} random tokens",
      " " * name_width
      + "".join(f"{x:>{w}}" for x, w in zip(kinds, columns, strict=True)),
      *(
        f"{family:<{name_width}}"
        + "".join(
          f"{error_text(errors[family, name]):>{w}}"
          for name, w in zip(kinds, columns, strict=True)
        )
        for family in names
      ),
      *(f"{x.family}, {x.name}: {x.refused}" for x in results if x.refused),
    ]
    return lines, lambda path: None

  def curves(self) -> _CommandOutput:
    """Reads the log of a training and plots its curves.

    Does not start JAX: the training may hold the accelerator.
    """
    log = self._values.log
    if log is None:
      raise OptionError(
        "--log",
        "no value",
        "the log.jsonl of a training",
        "pass --log=DIR/log.jsonl",
      )
    # A run that resumed from an earlier step has logged some steps twice.
    latest = {row["step"]: row for row in _log_rows(log)}
    rows = [latest[step] for step in sorted(latest)]
    if not rows:
      raise OptionError(
        "--log", log, "a line or more", "train some steps first"
      )
    self.record = {"rows": rows}
    figures = [
      name
      for of_kind in charts.FIGURES_OF_KIND
      for name in of_kind
      if name not in charts.FIGURES
      and any(row.get(name) is not None for row in rows)
    ]
    lines = [
      f"{'step':>8}{'stage':>7}{'loss':>10}{'tokens/s':>12}"
      + "".join(f"{name:>20}" for name in figures)
    ]
    printed_rows = rows[:: max(1, len(rows) // 20)]
    if printed_rows[-1] is not rows[-1]:
      printed_rows.append(rows[-1])
    for row in printed_rows:
      loss, rate = row["loss"], row["tokens_per_s"]
      lines.append(
        f"{row['step']:>8}{row['stage']:>7}"
        f"{'-' if loss is None else f'{loss:.4f}':>10}"
        f"{'-' if rate is None else f'{rate:,.0f}':>12}"
        + "".join(
          f"{'-' if row.get(x) is None else f'{row[x]:.4g}':>20}"
          for x in figures
        )
      )
    return lines, lambda path: charts.training_curves(rows, path)


def _entropy_lines(
  entropies: Sequence[SplitEntropy],
  own_prefix: Sequence[SplitEntropy],
  shared_prefix: Sequence[SplitEntropy],
  context: int,
  query: int,
) -> list[str]:
  """Tables of `entropy`: means by setting, then each layer and head."""
  number_text = lambda x: "-" if x is None else f"{x:.3f}"
  lines = [
    f"{len(entropies[0].losses)} texts: {context:,} tokens in P chunks, "
    f"{query:,} after them; nats",
    f"{'':>4}{'a prefix each':>30}{'one shared prefix':>30}",
    f"{'P':>4}" + f"{'entropy':>10}{'loss':>10}{'on prefix':>10}" * 2,
  ]
  for a, b in zip(own_prefix, shared_prefix, strict=True):
    cells = [x for row in (a, b) for x in (row.entropy, row.loss)]
    lines.append(
      f"{a.splits:>4}{cells[0]:>10.4f}{cells[1]:>10.4f}{a.prefix_mass:>10.1%}"
      f"{cells[2]:>10.4f}{cells[3]:>10.4f}{b.prefix_mass:>10.1%}"
    )
  lines.append(
    f"correlation of entropy and loss: {number_text(correlation(own_prefix))} "
    f"with a prefix each, {number_text(correlation(shared_prefix))} with one"
  )
  lines.append("entropy by layer and head; s: one shared prefix")
  names = [
    f"{entropy.splits}{'s' if entropy.shared else ''}" for entropy in entropies
  ]
  lines.append(f"{'layer':>5}{'head':>6}" + "".join(f"{x:>8}" for x in names))
  for layer, heads in enumerate(entropies[0].heads):
    if heads is None:
      lines.append(f"{layer:>5}{'':>6}  recurrent: it attends to nothing")
      continue
    head_entropies = np.array([entropy.heads[layer] for entropy in entropies])
    for head, row in [
      *enumerate(head_entropies.T),
      ("all", head_entropies.mean(1)),
    ]:
      cells = "".join(f"{x:>8.3f}" for x in row)
      lines.append(f"{layer:>5}{head:>6}{cells}")
  return lines


def _choice_lines(cost: KindCost, rows: int) -> list[str]:
  """Lines with the choices of each KV head, if the cache's policy has any."""
  if not cost.choices:
    return []
  name_width = max(map(len, cost.choices))
  counts_text = lambda layers: " | ".join(
    " ".join(f"{n:>{len(str(rows))}}" for n in heads) or "-" for heads in layers
  )
  return [
    f"{cost.name}: choices in {rows} texts, layer | layer, a number a KV head",
    *(
      f"{name:<{name_width}}  {counts_text(x)}"
      for name, x in cost.choices.items()
    ),
  ]


def _log_rows(path: str) -> Iterator[dict[str, Any]]:
  """Yields the rows of a log, with None for numbers that are not finite."""
  number = 0
  try:
    # The last line of a run that was killed may be cut off.
    for line in as_path(path, "--log").read_text("utf-8").split("\n")[:-1]:
      number += 1
      yield _chart_row(json.loads(line))
  except OSError as error:
    raise OptionError(
      "--log",
      f"{path}: {error.strerror}",
      "a file or an object",
      "pass its path or address",
    ) from None
  except (ValueError, RecursionError) as error:
    raise OptionError(
      "--log",
      f"{path}:{number}: {error}",
      "a line of a training's log.jsonl",
      "pass the log.jsonl that launch.train wrote",
    ) from None


def _chart_row(row: Any) -> dict[str, Any]:
  """Checks a log line and returns it as `charts.training_curves` takes it.

  Raises:
    ValueError: If it is not a line of a training's log.
  """
  if not isinstance(row, dict):
    raise ValueError(f"{type(row).__name__}")
  for name in ("step", "stage"):
    if type(row.get(name)) is not int:
      raise ValueError(f"{name} {row.get(name)!r}"[:80])
  for name in charts.FIGURES:
    if name not in row or type(row[name]) not in (int, float, type(None)):
      raise ValueError(f"{name} {row.get(name, 'not there')!r}"[:80])
  for of_kind in charts.FIGURES_OF_KIND:
    for name in of_kind:
      if type(row.get(name)) not in (int, float, type(None)):
        raise ValueError(f"{name} {row[name]!r}"[:80])
  return {
    name: None if isinstance(x, float) and not math.isfinite(x) else x
    for name, x in row.items()
  }


def _suite_lines(
  answers: Sequence[SuiteAnswer], suite: Suite, name: str
) -> list[str]:
  """Table of scores in per cent, by way and task, and length."""
  table = score_table(answers, suite)
  lengths = dict.fromkeys(length for row in table.values() for length in row)
  columns = sorted(lengths, key=lambda x: -1 if x is None else x)
  labels = ["  ".join(filter(None, key)) for key in table]
  width = max(map(len, labels))
  shortened = sum(answer.shortened for answer in answers)
  lines = [
    f"{name}: scores in per cent of {len(answers):,} answers"
    + (f", {shortened:,} of shortened prompts" if shortened else ""),
    " " * width
    + "".join(f"{'all' if x is None else f'{x:,}':>10}" for x in columns),
  ]
  for label, row in zip(labels, table.values(), strict=True):
    cells = (
      f"{100 * row[x]:>10.1f}" if x in row else " " * 10 for x in columns
    )
    lines.append(f"{label:<{width}}{''.join(cells)}")
  return lines


def _drafting(name: str, model: Transformer) -> Transformer:
  """Load a draft, or a model that drafts, from a folder of some kind."""
  kind, _, folder = name.rpartition(":")
  if kind == "eagle3":
    return rj.models.eagle3.load(folder, model)
  if kind == "mtp":
    return rj.models.load(
      folder, mesh=model.mesh, dtype=model.dtype, predict_layers=True
    )
  return rj.models.longspec.load(name, model)


_COMMANDS: dict[str, Callable[[_Evaluation], _CommandOutput]] = {
  "needle": _Evaluation.needle,
  "suite": _Evaluation.suite,
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

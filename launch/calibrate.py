"""Measures a model's keys and values, for a cache of code books (KVQuant).

  python -m launch.calibrate --model=DIR --text=FILE
      Writes DIR/kv_calibration.safetensors. Then:
  python -m launch.generate --model=DIR --cache=nuq3:calibration=DIR ...
      A cache of 3 bits a number and its outliers.
  python -m launch.calibrate --model=DIR --text=FILE --bits=3.2
      Chooses a codec for each KV head of each layer, so that all take 3.2 bits
      a number, by the loss that each costs; writes DIR/kv_bits.json. Then:
  python -m launch.generate --model=DIR --cache=allocated:table=DIR ...
  python -m launch.calibrate --model=DIR --text=FILE --ranges
      Measures how large the inputs of the linear maps are; writes
      DIR/activation_ranges.safetensors. Then:
  python -m launch.generate --model=DIR --integer=DIR ...
      Multiplies 8-bit integers in the model.
  python -m launch.calibrate --model=DIR --text=FILE --neurons
      Of a ReLU model: writes DIR/neurons.bin, and trains predictors of the
      neurons that a token needs, DIR/neuron_predictors.safetensors. Then:
  python -m launch.generate --model=DIR --flash=DIR:predictors=true ...
      Reads these neurons from disk, and no others.

--text is a file, or a folder of .txt and .jsonl files; without it Python's own
sources are read. Without --model it is the model that ships with ringjax, and
--out has to be given: a folder or, of a calibration or --ranges, an address. A
run that was killed resumes where it was.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from ringjax import hub, option_text
from ringjax.checks import is_address
from ringjax.data import Tokenizer
from ringjax.data.batches import texts
from ringjax.data.tasks import documents
from ringjax.errors import OptionError, PromptError
from ringjax.infer.calibrate import calibrate
from ringjax.infer.llm_npu.integer_model import activation_ranges
from ringjax.json_text import json_text
from ringjax.kv import CacheConfig, allocate_bits, kind_text
from ringjax.kv.bits.allocation import BY, CANDIDATES, MEASURES
from ringjax.kv.codecs.calibration import KEYS, WEIGHTS
from ringjax.kv.codecs.head_codecs import BITS_FILE
from ringjax.models import tiny
from ringjax.models.transformer import Transformer
from ringjax.models.weights.calibration import FILE
from ringjax.paths import AnyPath, as_path, check_writable

from .shared import answering, common, console
from .shared.flag_helpers import FlagHelper, model_folder
from .shared.group import Group

NAME = "calibrate"
# Minimum number of tokens of a text that shows how numbers are distributed.
_LEAST = 64
_MEMORY = "shorten the texts (--length), or use more devices"


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.checkpoint()
  new.rope_scaling()
  new.text(
    "dtype",
    None,
    "bfloat16, float16 or float32; default: the folder's, on one CPU device "
    "float32 where that fits.",
  )
  new.place("text", None, "File or folder of text; default: Python's sources.")
  new.place(
    "out",
    None,
    "Folder or address for the calibration; default: the model's folder.",
  )
  new.whole("rows", 16, "Texts that are measured, or as many as there are.")
  new.whole("length", 2048, "Tokens of each.", 16)
  new.text(
    "outliers",
    "0.01",
    "Part of a channel beyond its scale; 1%: of kinds with outliers=1%.",
  )
  new.whole("first", 1, "Tokens at the beginning of a text to leave out.", 0)
  new.texts(
    "normalized",
    ["2"],
    "Bits of codes whose levels have the numbers' mean and deviation (Q-Norm): "
    "some of 2, 3, 4, or none.",
  )
  flags.DEFINE_enum(
    "weights",
    WEIGHTS[0],
    WEIGHTS,
    "What an error counts: fisher, the squared gradient of the loss by the "
    "number; none: the same for all numbers.",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "keys",
    KEYS[0],
    KEYS,
    "What a scale of keys is of: channel, or token, of kinds with "
    "keys.by=token, to compare with.",
    flag_values=values,
  )
  new.boolean(
    "rotated",
    False,
    "Keys are measured after their rotation, of kinds with unrotated=False.",
  )
  new.number(
    "bits", None, "Budget of bits a number: allocates codecs to heads.", 0
  )
  flags.DEFINE_multi_string(
    "cache",
    None,
    "--bits: a kind of cache whose codec may be chosen, as launch.generate "
    "--cache takes it; given several times; default: "
    f"{', '.join(CANDIDATES)}.",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "by",
    None,
    BY,
    "--bits: what has a codec of its own; default: head; part: "
    "the keys and the values of each head.",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "measure",
    None,
    MEASURES,
    "--bits: what is compared: loss, or kl, how far "
    "predictions move; default: loss.",
    flag_values=values,
  )
  new.boolean(
    "ranges", False, "Measures activations, for products of integers."
  )
  new.boolean(
    "neurons", False, "Writes neurons, and trains predictors of active ones."
  )
  new.whole("rank", 64, "--neurons: numbers that a predictor goes through.")
  new.number(
    "missed", 0.04, "--neurons: part of active ones that may be missed.", 0
  )
  new.number(
    "threshold", 0.0, "--neurons: activations up to it count as zero.", 0
  )
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Calibrates as the flags say; returns the exit status."""
  common.quiet_logging()
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  group = Group(screen, lambda: "calibrating")
  with console.Run(
    screen,
    _MEMORY,
    doing="calibrating",
    interrupted="interrupted; run the same command again to resume",
    reports=group,
    leaving=group.leave,
  ) as run:
    if words:
      raise OptionError(
        "arguments", " ".join(words), "flags only", "see --help for examples"
      )
    record = _calibrate(values, screen, group)
  if run.status:
    return run.status
  group.close()
  screen.end()
  if screen.quiet:
    return 0
  summary = record.pop("table", "")
  summary += f"{record['out']}: measured on {record['tokens']:,} tokens"
  print(json_text(record) if values.json else summary, file=stdout, flush=True)
  return 0


def _calibrate(
  values: flags.FlagValues, screen: console.Screen, group: Group
) -> dict[str, Any]:
  """Measures the model and writes the file that the flags ask for."""
  _refuse_unused(values)
  if values.out is None and (
    values.model is None
    or is_address(values.model)
    or hub.hub_name(values.model) is not None
  ):
    got = "no value, without --model"
    if values.model is not None:
      place = "an object storage" if is_address(values.model) else "the hub"
      got = f"no value, with {values.model} of {place}"
    raise OptionError(
      "--out",
      got,
      "a folder for the calibration",
      "pass --out=DIR",
    )
  _normalized(values.normalized)
  out = as_path(values.out or values.model, "--out")
  for refused, flag, reason in (
    (values.neurons, "--neurons", "neurons are read from it in each call"),
    (values.bits is not None, "--bits", "tables of codecs are files"),
  ):
    if refused and not isinstance(out, pathlib.Path):
      raise OptionError(
        "--out",
        f"{out} with {flag}",
        f"a folder: {reason}",
        "pass --out=DIR",
      )
  if isinstance(out, pathlib.Path) and out.is_file():
    # A GGUF file: next to it.
    out = out.parent
  # Before anything is measured.
  check_writable(out / FILE)
  corpus = _texts(values.text)
  common.start(values, single=values.model is not None)
  group.meet(values, own=("json",))
  screen.quiet = jax.process_index() > 0
  screen.begin("loading the model")
  folder = model_folder(values, tiny.path)
  mesh = common.mesh(values.mesh)
  model, note = answering.load(values, folder, mesh)
  if note is not None:
    screen.say(note)
  tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
  rows = _rows(tokenizer, corpus, values.rows, values.length, screen.say)
  if values.bits is not None:
    assert isinstance(out, pathlib.Path)
    return _allocate(values, screen, model, rows, out)
  if values.ranges:
    screen.begin("measuring", len(rows), "texts")
    ranges = activation_ranges(
      model, rows, progress=lambda done, total: screen.at(done)
    )
    path = ranges.save(out)
    return {"out": str(path), "model": ranges.model, "tokens": int(rows.size)}
  if values.neurons:
    assert isinstance(out, pathlib.Path)
    return _neurons(values, screen, model, rows, out)
  screen.begin("measuring", 2 * len(rows), "passes")
  calibration = calibrate(
    model,
    rows,
    outliers=option_text.value(values.outliers),
    first=values.first,
    weights=values.weights,
    normalized=_normalized(values.normalized),
    keys=values.keys,
    rotated=values.rotated,
    folder=out,
    progress=lambda done, total: screen.at(done),
  )
  return {
    "out": str(out / FILE),
    "model": calibration.model,
    "digest": calibration.digest,
    "weights": calibration.weights,
    "outliers": calibration.outliers,
    "first": calibration.first,
    "keys": calibration.keys,
    "rotated": calibration.rotated,
    "tokens": int(rows.size),
  }


def _allocate(
  values: flags.FlagValues,
  screen: console.Screen,
  model: Transformer,
  rows: np.ndarray,
  out: pathlib.Path,
) -> dict[str, Any]:
  """Chooses a codec for each head and writes the file."""
  begun = False

  def progress(done: int, total: int) -> None:
    nonlocal begun
    if not begun:
      screen.begin("measuring", total, "calls", done - 1)
    begun = True
    screen.at(done)

  allocation = allocate_bits(
    model,
    rows,
    bits=values.bits,
    candidates=[_kind(text, out) for text in values.cache or CANDIDATES],
    by=values.by or BY[1],
    measure=values.measure or MEASURES[0],
    folder=out,
    progress=progress,
  )
  return {
    "out": str(out / BITS_FILE),
    "table": f"{allocation}\n",
    **allocation.record(),
  }


def _neurons(
  values: flags.FlagValues,
  screen: console.Screen,
  model: Transformer,
  rows: np.ndarray,
  out: pathlib.Path,
) -> dict[str, Any]:
  """Writes neurons and trains predictors of the active ones."""
  screen.begin("training predictors", len(rows) + len(model.config.layers))
  predictors = rj.train.train_predictors(
    model,
    rows,
    rank=values.rank,
    false_negatives=values.missed,
    threshold=values.threshold,
    progress=lambda done, total: screen.at(done),
  )
  rj.models.write_neurons(model, out)
  table = "".join(
    f"layer {n}: {x['active']:.1%} active, {x['predicted']:.1%} predicted, "
    f"{x['false_negatives']:.1%} of the active ones missed\n"
    for n, x in sorted(predictors.measured.items())
  )
  return {
    "out": str(predictors.save(out)),
    "table": table,
    "model": predictors.model,
    "measured": {str(n): dict(x) for n, x in predictors.measured.items()},
    "tokens": int(rows.size),
  }


def _kind(text: str, folder: AnyPath) -> CacheConfig | str:
  """Parses a candidate kind of cache; its calibration is in `folder`."""
  kind = kind_text.parse(text, "--cache")
  if not isinstance(kind.codec, rj.kv.Calibrated):
    return text
  if kind.codec.calibration is not None:
    raise OptionError(
      "--cache",
      text,
      "no calibration: it is the one in --out",
      f"write {text.partition(':')[0]}, and calibrate into --out before",
    )
  return kind.with_options({"calibration": str(folder)})


def _refuse_unused(values: flags.FlagValues) -> None:
  """Raises an OptionError for set flags that have no effect."""
  others = ("outliers", "first", "weights", "normalized", "keys", "rotated")
  neuron_flags = ("rank", "missed", "threshold")
  if values.neurons:
    others += ("cache", "by", "measure", "bits", "ranges")
  elif values.ranges:
    others += ("cache", "by", "measure", "bits")
  elif values.bits is None:
    others = ("cache", "by", "measure")
  if not values.neurons:
    others += neuron_flags
  unused = [f"--{name}" for name in others if values[name].present]
  context = "with" + "out" * (values.bits is None) + " --bits"
  if values.neurons or values.ranges:
    context = f"with --{'neurons' if values.neurons else 'ranges'}"
  elif set(unused) <= {f"--{name}" for name in neuron_flags}:
    context = "without --neurons"
  if unused:
    raise OptionError(
      "flags",
      f"{', '.join(unused)} {context}",
      "flags that have an effect",
      "leave them out; see --help",
    )


def _normalized(names: Sequence[str]) -> list[int]:
  """Parses the bits of --normalized."""
  if list(names) == ["none"]:
    return []
  if not names or not all(text.isdecimal() for text in names):
    raise OptionError(
      "--normalized",
      ",".join(names) or "nothing",
      "bits of codes, or none",
      "pass --normalized=2, for instance",
    )
  return [int(text) for text in names]


def _texts(path: str | None) -> list[str]:
  if path is None:
    return documents.library(held_out=False)
  file = as_path(path)
  files = texts.find(file) if file.is_dir() else [file]
  return list(texts.from_files(files))


def _rows(
  tokenizer: Tokenizer,
  corpus: Sequence[str],
  rows: int,
  length: int,
  say: Callable[[str], Any],
) -> np.ndarray:
  """Encodes and concatenates texts, cut into rows, int32 [N, length].

  Args:
    tokenizer: Tokenizer of the model.
    corpus: Texts to encode.
    rows: Largest number of rows N; fewer if the texts are too short.
    length: Tokens of each row.
    say: Function that prints a note if there are fewer than `rows`.
  """
  ids: list[int] = []
  for text in corpus:
    ids.extend(tokenizer.encode(text))
    if len(ids) >= rows * length:
      break
  if len(ids) < _LEAST:
    raise PromptError(
      "--text", f"{len(ids):,} tokens", f"{_LEAST} or more", "pass more text"
    )
  length = min(length, len(ids))
  num_rows = min(rows, len(ids) // length)
  if num_rows < rows:
    say(
      f"note: the text has {len(ids):,} tokens: {num_rows} of {rows} rows of "
      f"{length:,}, {len(ids) - num_rows * length:,} tokens left out; what few "
      "tokens do not show is not in the calibration"
    )
  return np.asarray(ids[: num_rows * length], np.int32).reshape(
    num_rows, length
  )


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)

"""The sub-command capacity of launch.plan: the largest contexts that fit."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from ringjax.errors import OptionError, RingjaxError
from ringjax.kv import kind_text
from ringjax.parallel import chips
from ringjax.plan import draw, files
from ringjax.plan.compiler import aot as compiler
from ringjax.plan.compiler import capacity
from ringjax.plan.compiler.time_range import NOTE

from ..shared import common, console
from . import aot, strategies

# Slices whose capacity is searched, by their usual names.
SLICES = {
  "v5e-256": "v5e:16x16",
  "v5p-128": "v5p:4x4x8",
  "v5p-512": "v5p:8x8x8",
  "v6e-256": "v6e:16x16",
  "tpu7x-128": "tpu7x:4x4x8",
}
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b-1m")
FORMAT = "ringjax-capacity"
_PROGRAMS = ("train", "prefill")
_COMPARED = ("striped", "gather", "plain")
_LEAST, _MOST = 1 << 13, 1 << 28
# More tokens have more pairwise scores than the compiler can count.
_MOST_PAIRS = 1 << 22
_TRAINING_OPTIONS = ("remat", "optimizer", "moments", "moments_in",
                     "loss_block")  # fmt: skip
_WITH_CACHE = ("prefill",)
_PICTURE = "the longest contexts of each model, slice and strategy"
# Fields that identify a row.
_KEY_FIELDS = ("model", "slice", "what", "strategy", "options")


def search(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Searches the requested contexts that are not yet in the file."""
  common.check_plot(values)
  programs = strategies.chosen_names("what", values.what, _PROGRAMS)
  slices = strategies.chosen_names("slices", values.slices, SLICES)
  compared = [aot.named(strategy) for strategy in values.strategy or _COMPARED]
  screen = console.Screen(aot.NAME, stderr)
  cells = [
    {
      "model": model,
      "slice": name,
      "what": program,
      "strategy": strategy,
      "options": _options(values, program),
    }
    for model, name, program, strategy in itertools.product(
      values.model or MODELS, slices, programs, compared
    )
  ]
  order = [_key(cell) for cell in cells]
  versions = compiler.versions()
  other_rows, rows, older = _load_rows(values.out, versions, order)
  if rows:
    screen.say(f"{len(rows)} of {len(cells)} are in {values.out}.json")
  missing = [cell for cell in cells if _key(cell) not in rows]
  if missing:
    compiler.require()

  def search_cell(number: int) -> dict[str, Any]:
    cell = missing[number]
    words = " ".join(str(value) for value in cell.values() if value)
    label = f"{number + 1} of {len(missing)}, {words}"
    screen.say(label)
    say = lambda text: screen.say(f"{label}: {text}")
    row = find(cell, SLICES[cell["slice"]], values.timeout, say)
    return {**row, "versions": versions}

  def all_rows() -> list[dict[str, Any]]:
    accepted = {k: v for k, v in rows.items() if "refused" not in v}
    return other_rows + _in_order(rows | older | accepted, order)

  searched = common.map_unordered(
    search_cell, len(missing), values.jobs, compiler.stop
  )
  for number, row in searched:
    rows[_key(missing[number])] = row
    if values.out is not None:
      # Write after each row, so that an interrupted search keeps its results.
      _write_rows(values.out, all_rows())
  ordered = _in_order(rows, order)
  if values.plot is not None:
    plot(all_rows(), values.plot)
    screen.say(f"wrote {values.plot}")
    if values.out is not None:
      # The page links the picture if it exists: write the page again.
      _write_rows(values.out, all_rows())
  strategies.put(
    values, stdout, {"rows": ordered, "note": NOTE}, table(ordered)
  )
  if values.out is not None:
    screen.say(f"wrote {values.out}.md and {values.out}.json")


def _options(values: flags.FlagValues, program: str) -> dict[str, Any]:
  """Options of the builder that were passed as flags.

  Raises:
    OptionError: If the program has no cache, or the kind of cache is unknown.
  """
  options: dict[str, Any] = {
    flag: values[flag].value
    for flag in (*_TRAINING_OPTIONS, "shard", "block", "dtype")
    if values[flag].value is not None
    and (program == "train" or flag not in _TRAINING_OPTIONS)
  }
  if values.cache is not None:
    if program not in _WITH_CACHE:
      raise OptionError(
        "--cache",
        f"{values.cache} with --what={program}, which has no cache",
        f"it with --what={' or '.join(_WITH_CACHE)}",
        f"pass --what={_WITH_CACHE[0]}, or leave --cache out",
      )
    options["cache"] = str(kind_text.parse(values.cache, "--cache"))
  return options


def find(
  cell: Mapping[str, Any],
  topology: str,
  timeout_s: float,
  say: Callable[[str], None],
) -> dict[str, Any]:
  """Searches the largest context of a cell that fits on a slice.

  Args:
    cell: Model, slice (its usual name), what (the program), strategy and
      options.
    topology: Name of the slice for the compiler.
    timeout_s: Seconds to compile a program.
    say: Function that prints a line of progress.

  Returns:
    The cell with its largest context, or with the reason of a refusal.
  """
  devices = chips.devices(topology)
  options = {
    "model": cell["model"], "strategy": cell["strategy"], **cell["options"],
  }  # fmt: skip

  def try_tokens(tokens: int) -> tuple[bool, int, int]:
    compiled = compiler.compile(
      f"{aot.BUILDERS}:{cell['what']}",
      topology,
      options | {"tokens": tokens},
      timeout_s=timeout_s,
      memory_only=True,
    )
    verdict = "fits" if compiled.fits else "does not fit"
    say(
      f"{tokens:,} tokens: {console.nbytes(compiled.needed_bytes)} of "
      f"{console.nbytes(compiled.limit_bytes)}, {verdict} "
      f"({compiled.trace_s + compiled.compile_s:.0f} s)"
    )
    return compiled.fits, compiled.needed_bytes, compiled.limit_bytes

  row = {
    **cell,
    "topology": topology,
    "devices": devices,
    "limit_bytes": chips.core(topology).hbm_bytes,
  }
  max_tokens = _MOST_PAIRS if cell["strategy"] == "plain" else _MOST
  try:
    largest = capacity.largest(
      try_tokens, unit=devices * 128, least=_LEAST, most=max_tokens
    )
  except RingjaxError as error:
    say(f"refused: {error}")
    return {**row, "refused": str(error)}
  return {**row, **files.record(largest)}


def plot(rows: Sequence[Mapping[str, Any]], path: str) -> None:
  """Draws the largest contexts, a panel for each program.

  Raises:
    OptionError: If matplotlib is missing or the path cannot be written.
  """
  panels: dict[str, dict[str, dict[str, int]]] = {}
  for row in rows:
    if row.get("tokens"):
      options = " ".join(str(v) for v in row["options"].values())
      name = f"{row['model']}, {row['slice']} {options}".rstrip()
      panel = panels.setdefault(row["what"], {})
      panel.setdefault(name, {})[row["strategy"]] = row["tokens"]
  draw.contexts(panels, path)


def page(
  rows: Sequence[Mapping[str, Any]], picture: str | None = None
) -> list[str]:
  """The page of the documentation: title, `picture` and table."""
  picture_lines = [] if picture is None else [f"![{_PICTURE}]({picture})", ""]
  return [
    "# The longest contexts that fit",
    "",
    "Tokens of the longest row whose compiled step fits, by the compiler's",
    "count of memory; an eighth, or 128 tokens a device, more did not fit.",
    "Options follow the program, such as the kind of its cache (dense",
    "unless said). Nothing of it was measured on hardware.",
    "",
    *picture_lines,
    *table(rows),
  ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """The largest contexts as Markdown, a column for each strategy."""
  compared = list(dict.fromkeys(row["strategy"] for row in rows))
  cells: dict[tuple[str, ...], dict[str, str]] = {}
  for row in rows:
    program = " ".join(
      (row["what"], *(str(v) for v in row["options"].values()))
    )
    key = (row["model"], f"{row['slice']} ({row['topology']})", program)
    if "refused" in row:
      text = "refused"
    elif not row["tokens"]:
      text = "none"
    else:
      text = f"{row['tokens']:,}"
      if row["too_many"] is None:
        text = f"{text} or more"
    cells.setdefault(key, {})[row["strategy"]] = text
  body = [
    (*key, *(by_strategy.get(name, "") for name in compared))
    for key, by_strategy in cells.items()
  ]
  return strategies.markdown(("model", "slice", ""), compared, body)


# ---------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------


def _key(row: Mapping[str, Any]) -> str:
  return repr([row[name] for name in _KEY_FIELDS])


def _in_order(
  rows: Mapping[str, Any], order: Sequence[str]
) -> list[dict[str, Any]]:
  return [rows[key] for key in order if key in rows]


def _load_rows(
  out: str | None, versions: Mapping[str, str], order: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
  """Loads the rows of a file: unrequested ones, current and older results.

  A row of another compiler version is an older result, which stays until there
  is a new one. Refused cells are searched again.
  """
  if out is None:
    return [], {}, {}
  if not pathlib.Path(out).absolute().parent.is_dir():
    raise OptionError("--out", out, "a path in a folder", "make the folder")
  path = f"{out}.json"
  if not pathlib.Path(path).exists():
    return [], {}, {}
  others, answers, older = [], {}, {}
  rows = files.read(path, FORMAT).get("rows")
  if not isinstance(rows, list) or not all(
    isinstance(row, dict) and {*_KEY_FIELDS, "versions", "topology"} <= set(row)
    for row in rows
  ):
    raise files.fault(path, "no rows", "what capacity wrote")
  for row in rows:
    if _key(row) not in order:
      others.append(row)
    elif "refused" not in row:
      target = answers if row["versions"] == versions else older
      target[_key(row)] = row
  return others, answers, older


def _write_rows(out: str, rows: Sequence[dict[str, Any]]) -> None:
  files.write(f"{out}.json", FORMAT, {"rows": list(rows), "note": NOTE})
  picture = pathlib.Path(f"{out}.png")
  shown = picture.name if picture.exists() else None
  files.write_text(f"{out}.md", "\n".join(page(rows, shown)) + "\n")

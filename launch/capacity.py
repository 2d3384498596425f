"""The sub-command capacity of launch.plan: the largest contexts that fit."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from launch import aot, common, console, strategies
from ringjax.errors import OptionError, RingjaxError
from ringjax.kv import kind_text
from ringjax.parallel import chips
from ringjax.plan import aot as compiler
from ringjax.plan import capacity, draw, files
from ringjax.plan.roofline import NOTE

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
# Scores of all pairs of more tokens are too many for the compiler to count.
_MOST_PAIRS = 1 << 22
_OF_TRAINING = ("remat", "optimizer", "loss_block")
_WITH_CACHE = ("prefill",)
_PICTURE = "the longest contexts of each model, slice and strategy"
# What identifies a row.
_ASKED = ("model", "slice", "what", "strategy", "options")


def search(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Searches the contexts that were asked for and are not yet in the file."""
  common.check_files(values, "plot")
  whats = strategies.known("what", values.what, _PROGRAMS)
  slices = strategies.known("slices", values.slices, SLICES)
  compared = [aot.named(one) for one in values.strategy or _COMPARED]
  screen = console.Screen(aot.NAME, stderr)
  cells = [
    {
      "model": model,
      "slice": name,
      "what": what,
      "strategy": strategy,
      "options": _options(values, what),
    }
    for model, name, what, strategy in itertools.product(
      values.model or MODELS, slices, whats, compared
    )
  ]
  order = [_key(cell) for cell in cells]
  versions = compiler.versions()
  before, rows, older = _kept(values.out, versions, order)
  if rows:
    screen.say(f"{len(rows)} of {len(cells)} are in {values.out}.json")
  missing = [cell for cell in cells if _key(cell) not in rows]
  if missing:
    compiler.require()

  def found_row(number: int) -> dict[str, Any]:
    cell = missing[number]
    words = " ".join(str(value) for value in cell.values() if value)
    label = f"{number + 1} of {len(missing)}, {words}"
    screen.say(label)
    say = lambda text: screen.say(f"{label}: {text}")
    row = find(cell, SLICES[cell["slice"]], values.timeout, say)
    return {**row, "versions": versions}

  def known() -> list[dict[str, Any]]:
    good = {k: v for k, v in rows.items() if "refused" not in v}
    return before + _in_order(rows | older | good, order)

  each = common.several(found_row, len(missing), values.jobs, compiler.stop)
  for number, row in each:
    rows[_key(missing[number])] = row
    if values.out is not None:
      # What is known is kept, also when it is stopped or refused.
      _keep(values.out, known())
  found = _in_order(rows, order)
  if values.plot is not None:
    plot(known(), values.plot)
    screen.say(f"wrote {values.plot}")
    if values.out is not None:
      # Its page shows a picture that is beside it.
      _keep(values.out, known())
  strategies.put(values, stdout, {"rows": found, "note": NOTE}, table(found))
  if values.out is not None:
    screen.say(f"wrote {values.out}.md and {values.out}.json")


def _options(values: flags.FlagValues, what: str) -> dict[str, Any]:
  """The builder's options that were given.

  Raises:
    OptionError: a kind of cache of a program without one, or none that is.
  """
  options: dict[str, Any] = {
    flag: values[flag].value
    for flag in (*_OF_TRAINING, "shard", "block", "dtype")
    if values[flag].value is not None
    and (what == "train" or flag not in _OF_TRAINING)
  }
  if values.cache is not None:
    if what not in _WITH_CACHE:
      raise OptionError(
        "--cache",
        f"{values.cache} with --what={what}, which has no cache",
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
  """A cell with the largest context that fits on a slice, or why none does.

  Args:
    cell: model, slice (its usual name), what, strategy and options.
    topology: the slice as the compiler calls it.
    timeout_s: seconds for a program.
    say: called with lines of progress.
  """
  devices = chips.devices(topology)
  options = {
    "model": cell["model"], "strategy": cell["strategy"], **cell["options"],
  }  # fmt: skip

  def fits(tokens: int) -> tuple[bool, int, int]:
    found = compiler.compile(
      f"{aot.BUILDERS}:{cell['what']}",
      topology,
      options | {"tokens": tokens},
      timeout_s=timeout_s,
      memory_only=True,
    )
    says = "fits" if found.fits else "does not fit"
    say(
      f"{tokens:,} tokens: {console.nbytes(found.needed_bytes)} of "
      f"{console.nbytes(found.limit_bytes)}, {says} "
      f"({found.trace_s + found.compile_s:.0f} s)"
    )
    return found.fits, found.needed_bytes, found.limit_bytes

  row = {
    **cell,
    "topology": topology,
    "devices": devices,
    "limit_bytes": chips.core(topology).hbm_bytes,
  }
  most = _MOST_PAIRS if cell["strategy"] == "plain" else _MOST
  try:
    found = capacity.largest(fits, unit=devices * 128, least=_LEAST, most=most)
  except RingjaxError as error:
    say(f"refused: {error}")
    return {**row, "refused": str(error)}
  return {**row, **files.record(found)}


def plot(rows: Sequence[Mapping[str, Any]], path: str) -> None:
  """Draws the largest contexts, a panel for each program.

  Raises:
    OptionError: no matplotlib, or a path that cannot be written.
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
  """The table with a title, as the site has it, behind its `picture`."""
  shown = [] if picture is None else [f"![{_PICTURE}]({picture})", ""]
  return [
    "# The longest contexts that fit",
    "",
    "Tokens of the longest row whose compiled step fits, by the compiler's",
    "count of memory; an eighth, or 128 tokens a device, more did not fit.",
    "Options stand behind the program, such as the kind of its cache (dense",
    "unless said). Nothing of it was measured on hardware.",
    "",
    *shown,
    *table(rows),
  ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """The largest contexts as Markdown, a column for each strategy."""
  compared = list(dict.fromkeys(row["strategy"] for row in rows))
  cells: dict[tuple[str, ...], dict[str, str]] = {}
  for row in rows:
    what = " ".join((row["what"], *(str(v) for v in row["options"].values())))
    key = (row["model"], f"{row['slice']} ({row['topology']})", what)
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
    (*key, *(found.get(name, "") for name in compared))
    for key, found in cells.items()
  ]
  return strategies.markdown(("model", "slice", ""), compared, body)


# ---------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------


def _key(row: Mapping[str, Any]) -> str:
  return repr([row[name] for name in _ASKED])


def _in_order(
  rows: Mapping[str, Any], order: Sequence[str]
) -> list[dict[str, Any]]:
  return [rows[key] for key in order if key in rows]


def _kept(
  out: str | None, versions: Mapping[str, str], order: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
  """Of a file, the rows not asked for now, the answers, and older answers.

  A row of another compiler is an older answer, which stays until there is a
  new one. A refusal is no answer.
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
    isinstance(row, dict) and {*_ASKED, "versions", "topology"} <= set(row)
    for row in rows
  ):
    raise files.fault(path, "no rows", "what capacity wrote")
  for row in rows:
    if _key(row) not in order:
      others.append(row)
    elif "refused" not in row:
      known = answers if row["versions"] == versions else older
      known[_key(row)] = row
  return others, answers, older


def _keep(out: str, rows: Sequence[dict[str, Any]]) -> None:
  files.write(f"{out}.json", FORMAT, {"rows": list(rows), "note": NOTE})
  picture = pathlib.Path(f"{out}.png")
  shown = picture.name if picture.exists() else None
  files.write_text(f"{out}.md", "\n".join(page(rows, shown)) + "\n")

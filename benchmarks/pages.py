"""The pages of systems: results of commands, and where each system is."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.systems import CONTEXTS, KINDS, ROWS
from benchmarks.systems_alone import BITS
from benchmarks.table import Row, Run
from launch.shared.systems_table import SYSTEMS

_HEAD = """# The systems, shown on real models

Each row is a paper, what it claims, what a command of this package printed on a
model that anyone can install, and what the paper printed, of its own models and
machines. The models are SmolLM2-135M-Instruct and Gemma 3 270M
(`python -m launch.fetch smollm2-135m`, `gemma3-270m`), the texts held-out files
of Python's library. `python -m benchmarks.real` makes the page again, row by
row; what a row trains or calibrates first, it keeps in `runs/`. Times are of
two shared CPU cores: they say what works, not how fast a chip is.
[Each system by its paper's name](systems_map.md) has modules, public names,
tests and what is not here.

| system | the paper's claim | here | published |
|---|---|---|---|
"""

_MAP_HEAD = """# Each system by its paper's name

What is here of a paper, where it is, how to run it, and what is not here. The
same in a terminal: `python -m launch systems`, or for one of them
`python -m launch systems kivi`. What each printed on a real model, next to the
paper's figures, is in [The systems, shown on real models](systems.md). Commands
run in a checkout, on a CPU, with models that ship with the package. `rj` is the
package `ringjax`; names that begin with `ringjax` are in a package that has to
be imported.

| system | what is here | what is not | how to |
|---|---|---|---|
"""


def printed(row: Row, results: dict[str, Any]) -> str:
  """Text of a row's result, or the reason why it is missing."""
  if row.unless:
    return f"none: {row.unless}"
  parts = [results.get(run.command) for run in row.runs]
  if not all(parts):
    return "not run yet"
  parts += [results.get(run.command) for run in row.more]
  return row.says(*(part and part["figures"] for part in parts))


def page(results: dict[str, Any]) -> str:
  """The page, as Markdown."""
  lines = [_HEAD]
  for row in ROWS:
    source = row.paper
    if source[0].isdigit():
      source = f"[{source}](https://arxiv.org/abs/{source})"
    cells = (
      f"**{row.system}** ({source})",
      row.claim,
      printed(row, results),
      row.published,
    )
    lines.append(f"| {' | '.join(cells)} |\n")
  for name, picture in _PICTURES.items():
    if picture.run.command in results:
      lines.append(f"\n![{picture.title}](systems_{name}.png)\n")
  lines.append("\n## Commands\n")
  seen: set[str] = set()
  for row in ROWS:
    for run in (*row.runs, *row.more):
      result = results.get(run.command)
      if run.command in seen or result is None:
        continue
      seen.add(run.command)
      names = [r.system for r in ROWS if run in r.runs + r.more]
      commands = "\n".join((*(x.command for x in run.before), run.command))
      lines.append(
        f"\n{', '.join(names)} ({result['seconds']:,.0f} s, at most "
        f"{result['peak_bytes'] / 1e9:.1f} GB, {result['date']}):\n\n"
        f"```sh\n{commands}\n```\n"
      )
  return "".join(lines)


def map_page() -> str:
  """The page that has each system by its paper's name, as Markdown."""
  index, sections = [], []
  for system in SYSTEMS:
    anchor = re.sub(r"[^a-z0-9 -]", "", system.name.lower()).replace(" ", "-")
    page = system.page.removeprefix("docs/")
    title = page.removeprefix("how/").removesuffix(".md")
    index.append(
      f"| [{system.name}](#{anchor}) | {system.does} | {system.absent} | "
      f"[{title}]({page}) |\n"
    )
    code = lambda entries: ", ".join(f"`{entry}`" for entry in entries)
    aliases = f"; also: {', '.join(system.also)}" if system.also else ""
    commands = "\n".join(system.commands)
    sections.append(
      f"\n## {system.name}\n\n[{system.paper}]({system.link}){aliases}. "
      f"{system.does}\n\n"
      f"* Modules: {code(system.modules)}\n"
      f"* Public names: {code(system.names)}\n"
      f"* How to: [{title}]({page})\n"
      f"* Tests: {code(system.tests)}\n"
      f"* Not here: {system.absent}\n\n"
      f"```sh\n{commands}\n```\n"
    )
  return "".join([_MAP_HEAD, *index, *sections])


def write(folder: pathlib.Path, results: dict[str, Any], *, plot: bool) -> None:
  """Writes the pages and, with `plot`, the pictures."""
  (folder / "systems.md").write_text(page(results), "utf-8")
  (folder / "systems_map.md").write_text(map_page(), "utf-8")
  if not plot:
    return
  from matplotlib.figure import Figure

  for name, picture in _PICTURES.items():
    if (result := results.get(picture.run.command)) is not None:
      figure = Figure(figsize=(6, 4), layout="constrained")
      picture.draw(figure.subplots(), result["figures"])
      figure.savefig(folder / f"systems_{name}.png", dpi=150)


def _caches(axes: Any, figures: dict[str, Any]) -> None:
  for name, x in figures.items():
    axes.plot(x["bytes"], x["loss"], "o")
    axes.annotate(name, (x["bytes"], x["loss"]), fontsize=7)
  axes.set_yscale("symlog", linthresh=0.05)
  axes.set_xlabel("bytes, of a dense cache's")
  axes.set_ylabel("loss above dense, nat")


def _contexts(axes: Any, figures: dict[str, Any]) -> None:
  ways = sorted(figures.items(), key=lambda x: x[1])
  axes.barh([name for name, _ in ways], [nll for _, nll in ways])
  axes.set_xlabel("loss, nat")


def _bits(axes: Any, figures: dict[str, Any]) -> None:
  """A line for each codec, named by its letters, a point for each width."""
  codecs: dict[str, list[tuple[float, float]]] = {}
  for name, x in figures.items():
    if name != "dense":
      codec = name.rstrip("0123456789")
      codecs.setdefault(codec, []).append((x["bits"], x["loss"]))
  for codec, points in codecs.items():
    axes.plot(*zip(*sorted(points), strict=True), "o-", label=codec)
  axes.set_yscale("symlog", linthresh=0.01)
  axes.set_xlabel("bits a number, scales and outliers included")
  axes.set_ylabel("loss above dense, nat")
  axes.legend(frameon=False)


class _Picture(NamedTuple):
  """A picture of one command's figures.

  Fields:
    title: Title of the picture.
    run: Command whose figures are drawn.
    draw: Function that draws the figures on axes.
  """

  title: str
  run: Run
  draw: Callable[[Any, dict[str, Any]], None]


_PICTURES = {
  "caches": _Picture(
    "Loss above a dense cache by its share of a dense cache's bytes (1,024 "
    "tokens, of which policies evict from the first half)",
    KINDS,
    _caches,
  ),
  "bits": _Picture("Loss above a dense cache by bits a number", BITS, _bits),
  "contexts": _Picture(
    "Loss after 16 contexts by how they are combined", CONTEXTS, _contexts
  ),
}

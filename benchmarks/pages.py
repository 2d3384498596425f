"""The page of systems and its pictures, made of what commands printed."""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks.systems import CONTEXTS, KINDS, ROWS, Row

_HEAD = """# The systems, shown on real models

Each row is a paper, what it claims, what a command of this package printed on a
model that anyone can install, and what the paper printed, of its own models and
machines. The models are SmolLM2-135M-Instruct and Gemma 3 270M
(`python -m launch.fetch smollm2-135m`, `gemma3-270m`), the texts held-out files
of Python's library. `python -m benchmarks.real` makes the page again, row by
row. Times are of two shared CPU cores: they say what works, not how fast a chip
is.

| system | the paper's claim | here | published |
|---|---|---|---|
"""


def printed(row: Row, results: dict[str, Any]) -> str:
  """What was found for a row, or why there is nothing."""
  if row.unless:
    return f"none: {row.unless}"
  parts = [results.get(run.command) for run in row.runs]
  if not all(parts):
    return "not run yet"
  return row.says(*(part["figures"] for part in parts))


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
  pictures = [p for p in (_caches, _contexts) if p.__doc__ and p(results, None)]
  for picture in pictures:
    title = (picture.__doc__ or "").strip().rstrip(".")
    lines.append(f"\n![{title}](systems{picture.__name__}.png)\n")
  lines.append("\n## Commands\n")
  seen: set[str] = set()
  for row in ROWS:
    for run in row.runs:
      result = results.get(run.command)
      if run.command in seen or result is None:
        continue
      seen.add(run.command)
      names = [r.system for r in ROWS if run in r.runs]
      lines.append(
        f"\n{', '.join(names)} ({result['seconds']:,.0f} s, at most "
        f"{result['peak_bytes'] / 1e9:.1f} GB, {result['date']}):\n\n"
        f"```sh\n{run.command}\n```\n"
      )
  return "".join(lines)


def write(folder: pathlib.Path, results: dict[str, Any], *, plot: bool) -> None:
  """Writes the page and, with `plot`, its pictures."""
  (folder / "systems.md").write_text(page(results), "utf-8")
  if not plot:
    return
  for picture in (_caches, _contexts):
    picture(results, folder / f"systems{picture.__name__}.png")


def _caches(results: dict[str, Any], path: pathlib.Path | None) -> bool:
  """Loss above a dense cache by its share of a dense cache's bytes."""
  result = results.get(KINDS.command)
  if result is None:
    return False
  if path is not None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, x in result["figures"].items():
      axes.plot(x["bytes"], x["loss"], "o")
      axes.annotate(name, (x["bytes"], x["loss"]), fontsize=7)
    axes.set_yscale("symlog", linthresh=0.05)
    axes.set_xlabel("bytes, of a dense cache's")
    axes.set_ylabel("loss above dense, nat")
    figure.savefig(path, dpi=150)
  return True


def _contexts(results: dict[str, Any], path: pathlib.Path | None) -> bool:
  """Loss behind 16 contexts by how they are combined."""
  result = results.get(CONTEXTS.command)
  if result is None:
    return False
  if path is not None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    ways = sorted(result["figures"].items(), key=lambda x: x[1])
    axes.barh([name for name, _ in ways], [nll for _, nll in ways])
    axes.set_xlabel("loss, nat")
    figure.savefig(path, dpi=150)
  return True

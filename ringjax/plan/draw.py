"""Draws timelines and times as PNGs.

Guarantees: an OptionError is raised if matplotlib is not installed, or a path
cannot be written.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from ringjax.errors import OptionError
from ringjax.plan.compiler.overlap import OverlapReport
from ringjax.plan.events import Timeline
from ringjax.plan.kv_runahead.schedules import Outcome

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

# Colour and label of each kind of span: of a prompt's outcome, of a schedule.
_OUTCOME = {
  "project": ("#8fb8de", "queries, keys, values"),
  "attend": ("#2b5c8a", "attention and the rest"),
  "send": ("#e08b3e", "keys and values travel"),
}
_SCHEDULE = {
  "work": ("#2b5c8a", "work"),
  "send": ("#e08b3e", "on its way"),
  "wait": ("#b3312c", "the device waits"),
}
_CLUSTER = {
  "prefill": ("#2b5c8a", "prompts are read"),
  "decode": ("#8fb8de", "answers"),
  "mixed": ("#4f9d5b", "both"),
  "move": ("#e08b3e", "caches move"),
  "fetch": ("#c44e63", "prefixes move"),
}
# Maximum number of sends that a picture of a schedule shows.
_SENDS = 12


# ---------------------------------------------------------------------------
# Parts of all pictures
# ---------------------------------------------------------------------------


def figures() -> types.ModuleType:
  """Import `matplotlib.figure`, which needs no display.

  Raises:
    OptionError: If matplotlib is not installed.
  """
  try:
    return importlib.import_module("matplotlib.figure")
  except ModuleNotFoundError:
    raise OptionError(
      "plot",
      "a picture, but matplotlib is not installed",
      "matplotlib, or no plot",
      "pip install matplotlib",
    ) from None


def figure(
  width: int | float, height: int | float, *grid: int, **options: Any
) -> tuple[Figure, Any]:
  """Make a white figure, sizes in inches, and its axes: one, or an array.

  Raises:
    OptionError: If matplotlib is not installed.
  """
  new_figure = figures().Figure(
    figsize=(width, height), layout="constrained", facecolor="white"
  )
  return new_figure, new_figure.subplots(*grid, **options)


def legend(made: Figure, handles: Sequence[Any], **options: Any) -> None:
  """Add a legend below all axes of a figure."""
  made.legend(
    handles=handles, loc="outside lower center", frameon=False, **options
  )


def patch(color: str | Float[np.ndarray, " c"], label: str) -> Patch:
  """Make an entry of a legend."""
  patches = importlib.import_module("matplotlib.patches")
  return patches.Patch(color=color, label=label)


def _lanes(
  ax: Axes,
  lanes: Sequence[str],
  bars: Iterable[tuple[str, str, float, float]],
  kinds: Mapping[str, tuple[str, str]],
  **style: Any,
) -> None:
  """Draw bars of (lane, kind, start, length); the first lane on top."""
  spans_of_bar: dict[tuple[str, str], list[tuple[float, float]]] = {}
  for lane, kind, start, length in bars:
    spans_of_bar.setdefault((lane, kind), []).append((start, length))
  for row, lane in enumerate(lanes):
    for kind, (color, _) in kinds.items():
      if (lane, kind) in spans_of_bar:
        ax.broken_barh(
          spans_of_bar[lane, kind], (row - 0.4, 0.8), facecolors=color, **style
        )
  ax.set_ylim(len(lanes) - 0.4, -0.6)
  ax.set_yticks(range(len(lanes)), lanes)
  _plain(ax)


def _plain(ax: Axes) -> None:
  ax.tick_params(labelsize=8)
  ax.spines[["top", "right"]].set_visible(False)


def _save(
  image: Figure, path: str, kinds: Mapping[str, tuple[str, str]] | None = None
) -> None:
  """Write a figure, with a legend of the kinds of bars."""
  if kinds is not None:
    handles = [patch(color, words) for color, words in kinds.values()]
    legend(image, handles, ncols=3, fontsize=9)
  try:
    image.savefig(path, dpi=130)
  except (OSError, ValueError) as error:
    raise OptionError(
      "plot", f"{path}: {error}", "a PNG to write", "pass a writable path"
    ) from None


# ---------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------


def timeline(ax: Axes, found: Timeline, lanes: Sequence[str]) -> None:
  """Draw spans into matplotlib axes, a lane for each device or link."""
  spans = [span for span in found.spans if span.end_s > span.start_s]
  bars = [
    (span.resource, span.kind, span.start_s, span.end_s - span.start_s)
    for span in spans
  ]
  # Edges would cover short bars.
  _lanes(ax, lanes, bars, _OUTCOME, linewidth=0)


def outcomes(found: Sequence[Outcome], path: str, title: str = "") -> None:
  """Draw one panel per method on a shared time axis: ranks and links."""
  lanes = []
  for outcome in found:
    names, links = [], list(outcome.link_bytes)
    # The lengths of a pipeline are those of chunks.
    ranks = len(links) + 1 if outcome.method == "cpp" else len(outcome.lengths)
    for i in range(ranks):
      names += [f"rank {i}", *links[i : i + 1]]
    lanes.append(names)
  heights = [len(names) for names in lanes]
  height = 1.2 + 0.22 * sum(heights) + 0.5 * len(found)
  image, grid = figure(
    10, height, len(found), 1, sharex=True, squeeze=False,
    height_ratios=heights,
  )  # fmt: skip
  axes = grid[:, 0]
  longest = max(outcome.seconds for outcome in found)
  for ax, outcome, names in zip(axes, found, lanes, strict=True):
    timeline(ax, outcome.timeline, names)
    ax.axvline(outcome.seconds, color="0.2", linewidth=1)
    split = " / ".join(f"{n:,}" for n in outcome.lengths)
    words = (
      f"{outcome.method}: first token at {outcome.seconds:.3f} s   ({split})"
    )
    ax.set_title(words, fontsize=10, loc="left")
    ax.set_xlim(0, longest * 1.02)
  axes[-1].set_xlabel("seconds", fontsize=9)
  if title:
    image.suptitle(title, fontsize=11)
  _save(image, path, _OUTCOME)


def schedule(found: OverlapReport, path: str, title: str = "") -> None:
  """Draw the first sends of a schedule: the device's work and the links.

  Raises:
    OptionError: If there is nothing to draw.
  """
  figures()
  if not found.spans:
    raise OptionError(
      "plot", "a program without work", "some work", "leave plot out"
    )
  sends = [span for span in found.spans if span.kind == "send"]
  # Small sends overlap large ones: choose the range by the large ones.
  longest = max((span.end - span.start for span in sends), default=0.0)
  large = [span for span in sends if span.end - span.start > longest / 4]
  first = min((span.start for span in large), default=0.0)
  last = max(span.end for span in (large[:_SENDS] or found.spans))
  # Include some of the time before, and the work after the last send.
  width = max(last - first, 1.0)
  start, end = max(0.0, first - width / 50), last + width / 20
  spans = [
    span for span in found.spans if span.end > start and span.start < end
  ]
  lanes = sorted(
    {span.lane for span in spans}, key=lambda name: name != "device"
  )
  scale = 1e3 / found.core.clock_hz
  bars = [
    (span.lane, span.kind, scale * a, scale * (min(span.end, end) - a))
    for span, a in ((s, max(s.start, start)) for s in spans)
  ]
  image, ax = figure(10, 1.4 + 0.5 * len(lanes))
  _lanes(ax, lanes, bars, _SCHEDULE, edgecolor="white", linewidth=0.2)
  ax.set_xlim(scale * start, scale * end)
  ax.set_xlabel("ms of the compiler's schedule", fontsize=9)
  if title:
    ax.set_title(title, fontsize=9, loc="left")
  _save(image, path, _SCHEDULE)


def strategies(
  rows: Sequence[tuple[str, float, float]], path: str, title: str = ""
) -> None:
  """Draw a bar of predicted times for each strategy, the first on top.

  Args:
    rows: (name, forward seconds, backward seconds).
    path: Path of the PNG.
    title: Title of the picture.
  """
  image, ax = figure(8, 1.2 + 0.3 * len(rows))
  names = [name for name, *_ in rows]
  forward = [1e3 * seconds for _, seconds, _ in rows]
  backward = [1e3 * seconds for *_, seconds in rows]
  ax.barh(names, forward, color=_OUTCOME["attend"][0], label="forward")
  ax.barh(
    names, backward, left=forward, color=_OUTCOME["project"][0],
    label="backward",
  )  # fmt: skip
  ax.invert_yaxis()
  ax.set_xlabel("milliseconds", fontsize=9)
  ax.legend(frameon=False, fontsize=9)
  _plain(ax)
  if title:
    ax.set_title(title, fontsize=9, loc="left")
  _save(image, path)


def cluster(
  found: Timeline,
  loads: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
  path: str,
  title: str = "",
) -> None:
  """Draw calls and transfers of a cluster, and below them loads over time.

  Args:
    found: Timeline of calls and transfers.
    loads: (times, values from then on) by quantity and by instance.
    path: Path of the PNG.
    title: Title of the picture.
  """
  names = sorted({span.resource for span in found.spans})
  heights = [0.6 + 0.25 * len(names), *([1.6] * len(loads))]
  image, grid = figure(
    10, 1.2 + sum(heights), len(heights), 1, sharex=True, squeeze=False,
    height_ratios=heights,
  )  # fmt: skip
  first, *load_axes = grid[:, 0]
  spans = [span for span in found.spans if span.end_s > span.start_s]
  bars = [
    (span.resource, span.kind, span.start_s, span.end_s - span.start_s)
    for span in spans
  ]
  _lanes(first, names, bars, _CLUSTER, linewidth=0)
  for ax, (quantity, by_name) in zip(load_axes, loads.items(), strict=True):
    for name, (times, values) in by_name.items():
      ax.step(times, values, where="post", linewidth=0.8, label=name)
    ax.set_ylabel(quantity, fontsize=9)
    ax.legend(frameon=False, fontsize=7, ncols=4)
    _plain(ax)
  grid[-1, 0].set_xlabel("seconds", fontsize=9)
  if title:
    image.suptitle(title, fontsize=10)
  _save(image, path, _CLUSTER)


def curves(
  series: Mapping[str, Sequence[tuple[float, float]]],
  path: str,
  *,
  across: str,
  up: str,
  level: float | None = None,
  title: str = "",
) -> None:
  """Draw lines through points, one for each name.

  Args:
    series: (x, y) by name, in the order of x.
    path: Path of the PNG.
    across, up: Labels of the axes.
    level: Height of a horizontal line, or None.
    title: Title of the picture.
  """
  image, ax = figure(7, 4)
  for name, points in series.items():
    ax.plot(*zip(*points, strict=True), marker=".", label=name)
  if level is not None:
    ax.axhline(level, color="0.4", linestyle=":", linewidth=1)
  ax.set_xlabel(across, fontsize=9)
  ax.set_ylabel(up, fontsize=9)
  ax.legend(frameon=False, fontsize=8)
  _plain(ax)
  if title:
    ax.set_title(title, fontsize=9, loc="left")
  _save(image, path)


def contexts(
  panels: Mapping[str, Mapping[str, Mapping[str, int]]], path: str
) -> None:
  """Draw bars of tokens on a logarithmic axis, a panel for each program.

  Args:
    panels: Tokens by program, by the label of a group of bars, and by
      strategy.
    path: Path of the PNG.
  """
  rows = [row for panel in panels.values() for row in panel.values()]
  names = list(dict.fromkeys(name for row in rows for name in row))
  colors = [color for color, _ in (*_OUTCOME.values(), *_SCHEDULE.values())]
  heights = [max(1, len(panel)) for panel in panels.values()]
  image, axes = figure(
    8, 1.5 + 0.3 * sum(heights), max(1, len(panels)), 1, squeeze=False,
    sharex=True, height_ratios=heights or [1],
  )  # fmt: skip
  for ax, (program, panel) in zip(axes[:, 0], panels.items(), strict=False):
    for n, name in enumerate(names):
      place = 0.8 * ((n + 0.5) / len(names) - 0.5)
      bars = [(y, row[name]) for y, row in enumerate(panel.values())
               if name in row]  # fmt: skip
      ax.barh(
        [y + place for y, _ in bars],
        [tokens for _, tokens in bars],
        height=0.8 / len(names),
        color=colors[n % len(colors)],
      )
    ax.set_yticks(range(len(panel)), list(panel))
    ax.set_ylim(len(panel) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.set_title(program, fontsize=9, loc="left")
    _plain(ax)
  axes[-1, 0].set_xlabel("tokens of the longest row that fits", fontsize=9)
  _save(
    image,
    path,
    {name: (colors[n % len(colors)], name) for n, name in enumerate(names)},
  )


def tiers(
  held: Mapping[str, Mapping[str, float]],
  peak: Mapping[str, float],
  limit: Mapping[str, float],
  times: Mapping[str, Mapping[str, float]],
  path: str,
  title: str = "",
) -> None:
  """Draw bytes in each tier of memory, and the time of each part.

  Args:
    held: Bytes by tier and kind.
    peak: Largest bytes by tier.
    limit: Bytes that may be filled, by tier.
    times: Seconds of a layer, by phase and part.
    path: Path of the PNG.
    title: Title of the picture.
  """
  image, axes = figure(10, 3.6, 1, 1 + len(times))
  colors = [color for color, _ in (*_OUTCOME.values(), *_SCHEDULE.values())]
  bytes_axes, names = axes[0], list(held)
  places = np.arange(len(names))
  for n, kind in enumerate(next(iter(held.values()))):
    sizes = np.array([held[tier][kind] / 1e9 for tier in names])
    bytes_axes.bar(
      places + (n - 1) / 4, sizes, 0.25, color=colors[n], label=kind
    )  # fmt: skip
  for style, marks in (("k_", limit), ("r_", peak)):
    label = "may be filled" if marks is limit else "peak"
    bytes_axes.plot(
      places, [marks[tier] / 1e9 for tier in names], style, markersize=24,
      label=label,
    )  # fmt: skip
  bytes_axes.set_xticks(places, names)
  bytes_axes.set_ylabel("GB", fontsize=9)
  bytes_axes.set_yscale("symlog")
  bytes_axes.legend(frameon=False, fontsize=7)
  _plain(bytes_axes)
  for ax, (phase, parts) in zip(axes[1:], times.items(), strict=True):
    words = [part.replace("_", " ") for part in parts]
    ax.barh(words, [1e3 * s for s in parts.values()], color=colors[1])
    ax.invert_yaxis()
    ax.set_title(phase, fontsize=9, loc="left")
    ax.set_xlabel("milliseconds of a layer", fontsize=9)
    _plain(ax)
  if title:
    image.suptitle(title, fontsize=10)
  _save(image, path)


def against(
  points: Sequence[tuple[str, str, float, float]], path: str, title: str = ""
) -> None:
  """Draw predicted against measured times, on logarithmic axes.

  Args:
    points: (strategy, run, predicted seconds, measured seconds).
    path: Path of the PNG.
    title: Title of the picture.
  """
  image, ax = figure(6.4, 5.6)
  markers = "osD^v<>Ph*X"
  runs = ", ".join(dict.fromkeys(run for _, run, _, _ in points))
  for n, name in enumerate(dict.fromkeys(name for name, *_ in points)):
    strategy_points = [point for point in points if point[0] == name]
    ax.scatter(
      [1e3 * point[3] for point in strategy_points],
      [1e3 * point[2] for point in strategy_points],
      marker=markers[n % len(markers)],
      label=name,
      s=36,
    )
  times = [1e3 * t for point in points for t in point[2:]] or [1.0]
  ends = [min(times) / 1.5, max(times) * 1.5]
  ax.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
  ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
  ax.set_xlabel("measured, milliseconds", fontsize=9)
  ax.set_ylabel("predicted, milliseconds", fontsize=9)
  ax.legend(frameon=False, fontsize=8)
  ax.tick_params(labelsize=8)
  ax.set_title(f"{title}\n{runs}" if title else runs, fontsize=9, loc="left")
  _save(image, path)

"""Pictures of timelines: who works, who sends, who waits. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.plan.events import Timeline
from ringjax.plan.overlap import Report
from ringjax.plan.schedules import Outcome

_COLORS = {
  "project": "#8fb8de",
  "attend": "#2b5c8a",
  "send": "#e08b3e",
}
_WORDS = {
  "project": "queries, keys, values",
  "attend": "attention and the rest",
  "send": "keys and values travel",
}


def figures() -> Any:
  """matplotlib's figures, without a display.

  Raises:
    OptionError: it is not installed.
  """
  try:
    return importlib.import_module("matplotlib.figure")
  except ModuleNotFoundError:
    raise OptionError(
      "plot",
      "one, but matplotlib is not installed",
      "matplotlib, or no plot",
      "pip install matplotlib",
    ) from None


def timeline(ax: Any, found: Timeline, lanes: Sequence[str]) -> None:
  """Draws spans into matplotlib axes, a lane for each place, top to bottom."""
  for row, where in enumerate(lanes):
    spans = [s for s in found.of(where) if s.end_s > s.start_s]
    for kind in dict.fromkeys(s.kind for s in spans):
      mine = [(s.start_s, s.end_s - s.start_s) for s in spans if s.kind == kind]
      ax.broken_barh(
        mine,
        (row - 0.4, 0.8),
        facecolors=_COLORS.get(kind, "#777777"),
        # An edge would cover what is short.
        linewidth=0,
      )
  ax.set_ylim(len(lanes) - 0.4, -0.6)
  ax.set_yticks(range(len(lanes)), lanes)
  ax.tick_params(labelsize=8)
  ax.spines[["top", "right"]].set_visible(False)


def outcomes(found: Sequence[Outcome], path: str, title: str = "") -> None:
  """One panel a method, on one axis of time: ranks and the links between.

  Raises:
    OptionError: matplotlib is not installed, or the path cannot be written.
  """
  made = figures()
  patches = importlib.import_module("matplotlib.patches")
  lanes = []
  for one in found:
    names = []
    links = list(one.link_bytes)
    for i in range(len(one.lengths)):
      names += [f"rank {i}", *links[i : i + 1]]
    lanes.append(names)
  heights = [len(names) for names in lanes]
  figure = made.Figure(
    figsize=(10, 1.2 + 0.22 * sum(heights) + 0.5 * len(found)),
    layout="constrained",
    facecolor="white",
  )
  axes = figure.subplots(
    len(found), 1, sharex=True, squeeze=False, height_ratios=heights
  )[:, 0]
  longest = max(one.seconds for one in found)
  for ax, one, names in zip(axes, found, lanes, strict=True):
    timeline(ax, one.timeline, names)
    ax.axvline(one.seconds, color="0.2", linewidth=1)
    split = " / ".join(f"{n:,}" for n in one.lengths)
    words = f"{one.method}: first token at {one.seconds:.3f} s   ({split})"
    ax.set_title(words, fontsize=10, loc="left")
    ax.set_xlim(0, longest * 1.02)
  axes[-1].set_xlabel("seconds", fontsize=9)
  if title:
    figure.suptitle(title, fontsize=11)
  figure.legend(
    handles=[
      patches.Patch(color=_COLORS[kind], label=_WORDS[kind]) for kind in _COLORS
    ],
    loc="outside lower center",
    ncols=3,
    frameon=False,
    fontsize=9,
  )
  _save(figure, path)


_KINDS = {
  "work": ("#2b5c8a", "work"),
  "send": ("#e08b3e", "on its way"),
  "wait": ("#b3312c", "the device waits"),
}
# Sends that a picture of a schedule shows.
_SENDS = 12


def schedule(found: Report, path: str, title: str = "") -> None:
  """The first sends of a schedule: what the device does, what links carry.

  Raises:
    OptionError: matplotlib is not installed, the path cannot be written, or
      there is nothing to draw.
  """
  made = figures()
  patches = importlib.import_module("matplotlib.patches")
  if not found.spans:
    raise OptionError(
      "plot", "a program that does nothing", "some work", "leave it"
    )
  sent = [s for s in found.spans if s.kind == "send"]
  # Small ones ride along with large ones.
  longest = max((s.end - s.start for s in sent), default=0.0)
  large = [s for s in sent if s.end - s.start > longest / 4]
  first = min((s.start for s in large), default=0.0)
  last = max(s.end for s in (large[:_SENDS] or found.spans))
  # Some of what comes before, and the work behind the last of them.
  wide = max(last - first, 1.0)
  start, end = max(0.0, first - wide / 50), last + wide / 20
  spans = [s for s in found.spans if s.end > start and s.start < end]
  lanes = sorted({s.lane for s in spans}, key=lambda name: name != "device")
  figure = made.Figure(
    figsize=(10, 1.4 + 0.5 * len(lanes)), layout="constrained",
    facecolor="white",
  )  # fmt: skip
  ax = figure.subplots()
  scale = 1e3 / found.core.clock_hz
  for row, lane in enumerate(lanes):
    for kind, (color, _) in _KINDS.items():
      mine = [s for s in spans if s.lane == lane and s.kind == kind]
      bars = [
        (scale * a, scale * (b - a))
        for a, b in ((max(s.start, start), min(s.end, end)) for s in mine)
      ]
      ax.broken_barh(
        bars, (row - 0.4, 0.8), facecolors=color, edgecolor="white",
        linewidth=0.2,
      )  # fmt: skip
  ax.set_xlim(scale * start, scale * end)
  ax.set_ylim(len(lanes) - 0.4, -0.6)
  ax.set_yticks(range(len(lanes)), lanes)
  ax.tick_params(labelsize=8)
  ax.spines[["top", "right"]].set_visible(False)
  ax.set_xlabel("ms of the compiler's schedule", fontsize=9)
  if title:
    ax.set_title(title, fontsize=9, loc="left")
  figure.legend(
    handles=[patches.Patch(color=c, label=w) for c, w in _KINDS.values()],
    loc="outside lower center",
    ncols=3,
    frameon=False,
    fontsize=9,
  )
  _save(figure, path)


def strategies(
  rows: Sequence[tuple[str, float, float]], path: str, title: str = ""
) -> None:
  """A bar for each way to move attention, the fastest on top.

  Args:
    rows: (name, forward seconds, backward seconds).
    path: of the PNG.
    title: above it.

  Raises:
    OptionError: matplotlib is not installed, or the path cannot be written.
  """
  made = figures()
  figure = made.Figure(
    figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained", facecolor="white"
  )
  ax = figure.subplots()
  names = [name for name, *_ in rows]
  forward = [1e3 * seconds for _, seconds, _ in rows]
  backward = [1e3 * seconds for *_, seconds in rows]
  ax.barh(names, forward, color=_COLORS["attend"], label="forward")
  ax.barh(
    names, backward, left=forward, color=_COLORS["project"], label="backward"
  )
  ax.invert_yaxis()
  ax.set_xlabel("milliseconds", fontsize=9)
  ax.tick_params(labelsize=8)
  ax.spines[["top", "right"]].set_visible(False)
  ax.legend(frameon=False, fontsize=9)
  if title:
    ax.set_title(title, fontsize=9, loc="left")
  _save(figure, path)


def against(
  points: Sequence[tuple[str, str, float, float]], path: str, title: str = ""
) -> None:
  """Predicted against measured times, on logarithmic axes.

  Args:
    points: (strategy, what was run, predicted seconds, measured seconds).
    path: of the PNG.
    title: above it.

  Raises:
    OptionError: matplotlib is not installed, or the path cannot be written.
  """
  figure = figures().Figure(
    figsize=(6.4, 5.6), layout="constrained", facecolor="white"
  )
  ax = figure.subplots()
  markers = "osD^v<>Ph*X"
  runs = list(dict.fromkeys(run for _, run, _, _ in points))
  for n, name in enumerate(dict.fromkeys(name for name, *_ in points)):
    mine = [p for p in points if p[0] == name]
    ax.scatter(
      [1e3 * p[3] for p in mine],
      [1e3 * p[2] for p in mine],
      marker=markers[n % len(markers)],
      label=name,
      s=36,
    )
  times = [1e3 * t for p in points for t in p[2:]] or [1.0]
  ends = [min(times) / 1.5, max(times) * 1.5]
  ax.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
  ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
  ax.set_xlabel("measured, milliseconds", fontsize=9)
  ax.set_ylabel("predicted, milliseconds", fontsize=9)
  ax.tick_params(labelsize=8)
  ax.legend(frameon=False, fontsize=8)
  ax.set_title(
    f"{title}\n{', '.join(runs)}" if title else ", ".join(runs),
    fontsize=9,
    loc="left",
  )
  _save(figure, path)


def _save(figure: Any, path: str) -> None:
  try:
    figure.savefig(path, dpi=130)
  except (OSError, ValueError) as error:
    raise OptionError(
      "plot", f"{path}: {error}", "a PNG to write", "choose a path"
    ) from None

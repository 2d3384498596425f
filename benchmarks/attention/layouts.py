"""Counts how evenly layouts balance a causal ring: a table and a picture.

Guarantees: all figures count the tiles that the attention loops run
(`schedule.tile_schedule`), without timing. Devices meet at the end of a hop, so
that it lasts as long as its slowest device.

  busy   fraction of the devices' time that is spent on tiles
  used   fraction of the pairs in those tiles that the mask allows
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, option
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.cost import schedule
from ringjax.ops.mask import Causal
from ringjax.parallel.layout import LAYOUTS, Layout

if TYPE_CHECKING:
  from matplotlib.axes import Axes


_IDLE = "#e4e4e4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSettings(harness.BenchmarkSettings):
  """Settings: a causal ring of `shards` devices over `tokens`."""

  shards: int = option(8)
  tokens: int = option(32768)
  q_block: int | None = option(None)
  kv_block: int | None = option(None)

  def kinds(self, layout: Layout) -> Int[np.ndarray, "hops R rows columns"]:
    """Kind of each tile: skipped, masked or full."""
    return schedule.tile_schedule(
      layout, Causal(), self.shards, self.tokens, self.q_block, self.kv_block
    )


class LayoutBenchmark(harness.Benchmark):
  """Benchmark of a causal ring's tiles; a row is a layout."""

  name = "layouts"
  options = LayoutSettings
  columns = ("kind",)
  parts = tuple(LAYOUTS)
  files = ("json", "plot")
  summary_name = "layouts"

  @property
  def cases(self) -> list[str]:
    return list(LAYOUTS)

  def row(self, case: str, report: Report) -> Row:
    del report
    s, layout = self.settings, LAYOUTS[case]
    kinds = s.kinds(layout)
    local = layout.local_length(s.tokens, s.shards)
    blocks = Blockwise(s.q_block, s.kv_block).blocks(local, local)
    counts = np.count_nonzero(kinds, axis=(2, 3))
    pairs = s.tokens * (s.tokens + 1) // 2
    used = pairs / (int(counts.sum()) * blocks[0] * blocks[1])
    return {
      "kind": case,
      "q_block": blocks[0],
      "kv_block": blocks[1],
      "tiles": int(counts.sum()),
      "tiles_with_mask": int((kinds == 1).sum()),
      "steps": int(counts.max(axis=1).sum()),
      "busy_percent": 100 * schedule.busy(counts),
      "used_percent": 100 * used,
      "tiles_by_hop_and_device": counts.tolist(),
    }

  def summary(self, rows: Sequence[Row]) -> Row:
    return {row["kind"]: row for row in rows}

  def closing(self, result: Row) -> str:
    settings, rows = result["settings"], result["rows"]
    lines = [
      f"Causal ring, {settings['shards']} devices, {settings['tokens']} "
      f"tokens, tiles of {rows[0]['q_block']} x {rows[0]['kv_block']}",
      f"  {'':12}{'busy':>8}{'used':>8}{'time':>9}{'tiles':>9}"
      f"{'with mask':>11}",
    ]
    for x in rows:
      lines.append(
        f"  {x['kind']:12}{x['busy_percent']:6.1f} %{x['used_percent']:6.1f} %"
        f"{x['steps']:9}{x['tiles']:9}{x['tiles_with_mask']:11}"
      )
    lines += [
      "  busy: of the devices' time; used: of the pairs in the tiles computed;",
      "  time: in tiles, each hop as long as its slowest device",
    ]
    return "\n".join(lines) + "\n"

  def draw(self, result: Row, path: str) -> None:
    settings = LayoutSettings(**result["settings"])
    draw({name: settings.kinds(x) for name, x in LAYOUTS.items()}, path)


def draw(kinds: dict[str, np.ndarray], path: str) -> None:
  """Draws the busy time of devices (top) and the hop of each tile (bottom)."""
  patches = importlib.import_module("matplotlib.patches")
  colormaps = importlib.import_module("matplotlib").colormaps
  shards = next(iter(kinds.values())).shape[0]
  spread = np.linspace(0.0, 0.92, max(shards, 2))[:shards]
  colors = colormaps["viridis"](spread)[:, :3]
  figure = harness.figure(3.4 * len(kinds), 6.4)
  top, bottom = figure.subplots(
    2, len(kinds), squeeze=False, height_ratios=[1, 1.35]
  )
  counts = {n: np.count_nonzero(k, axis=(2, 3)) for n, k in kinds.items()}
  longest = max(int(c.max(axis=1).sum()) for c in counts.values())
  for i, (name, kind) in enumerate(kinds.items()):
    _draw_time(top[i], counts[name], colors, longest)
    title = f"{name}: {100 * schedule.busy(counts[name]):.0f} % busy"
    top[i].set_title(title, fontsize=12, weight="bold")
    _draw_scores(bottom[i], kind, colors)
    if i == 0:
      top[i].set_ylabel("device", fontsize=10)
      bottom[i].set_ylabel("queries, by device", fontsize=10)
    bottom[i].set_xlabel("keys, by device", fontsize=10)
  handles = [
    patches.Patch(color=colors[h], label=f"hop {h}") for h in _some(shards, 8)
  ]
  handles.append(patches.Patch(color=_lighter(colors[0]), label="with mask"))
  idle = dict(facecolor=_IDLE, edgecolor="0.6", hatch="////")
  handles.append(patches.Patch(label="idle", **idle))
  figure.legend(
    handles=handles,
    loc="outside lower center",
    ncols=len(handles),
    frameon=False,
    fontsize=10,
    handlelength=1.0,
    handleheight=1.0,
    columnspacing=1.0,
    handletextpad=0.5,
  )
  harness.save(figure, path, dpi=160)


def _lighter(color: np.ndarray) -> np.ndarray:
  """The lighter color of a masked tile."""
  return 0.45 * color + 0.55


def _some(count: int, most: int) -> list[int]:
  """Up to `most` numbers below `count`, with the first and the last."""
  return sorted({round(x) for x in np.linspace(0, count - 1, min(count, most))})


def _draw_time(
  ax: Axes, counts: np.ndarray, colors: np.ndarray, longest: int
) -> None:
  shards = counts.shape[1]
  devices = np.arange(shards)
  lasts = counts.max(axis=1)
  starts = np.cumsum(lasts) - lasts
  for hop, (start, last) in enumerate(zip(starts, lasts, strict=True)):
    work = counts[hop]
    ax.barh(
        devices, work, 0.82, start, color=colors[hop], edgecolor="white",
        linewidth=0.6,
    )  # fmt: skip
    idle = work < last
    ax.barh(
        devices[idle], (last - work)[idle], 0.82, (start + work)[idle],
        color=_IDLE, edgecolor="0.68", hatch="////", linewidth=0,
    )  # fmt: skip
  ax.set_xlim(0, longest)
  ax.set_ylim(shards - 0.4, -0.6)
  ax.set_yticks(_some(shards, 8))
  ax.locator_params(axis="x", nbins=5)
  ax.tick_params(labelsize=9)
  ax.set_xlabel("time, in tiles", fontsize=10)
  ax.spines[["top", "right"]].set_visible(False)


def _draw_scores(ax: Axes, kinds: np.ndarray, colors: np.ndarray) -> None:
  hops, shards, rows, columns = kinds.shape
  image = np.ones((shards * rows, shards * columns, 3))
  for hop in range(hops):
    for q in range(shards):
      k = (q - hop) % shards
      kind = kinds[hop, q][..., None]
      part = np.where(kind == 1, _lighter(colors[hop]), 1.0)
      tile = np.where(kind == 2, colors[hop], part)
      image[q * rows :, k * columns :][:rows, :columns] = tile
  ax.imshow(
      image, interpolation="nearest", aspect="auto",
      extent=(0, shards, shards, 0),
  )  # fmt: skip
  ax.set_box_aspect(1)
  for line in range(1, shards):
    ax.axhline(line, color="0.55", linewidth=0.5)
    ax.axvline(line, color="0.55", linewidth=0.5)
  ticks = _some(shards, 8)
  for axis in (ax.xaxis, ax.yaxis):
    axis.set_ticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
  ax.tick_params(length=0, labelsize=9)

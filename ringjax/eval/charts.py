"""Plots of evaluations and of trainings. Needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.eval.cache_kinds import KindCost
from ringjax.eval.context_costs import ContextCost
from ringjax.eval.entropy import SplitEntropy
from ringjax.eval.needle import Cell, table
from ringjax.eval.perplexity import Curve
from ringjax.plan.draw import figures

# Numbers of a line of a training's log that are drawn, with their titles.
FIGURES = {
  "loss": "loss, nats a token",
  "gradient_norm": "gradient norm",
  "learning_rate": "learning rate",
  "tokens_per_s": "tokens a second",
}


def heat_map(cells: Sequence[Cell], path: str, title: str = "") -> None:
  """Draws retrieval by length (across) and task, kind or depth (down).

  Raises:
    OptionError: matplotlib is not installed.
  """
  lengths = sorted({cell.length for cell in cells})
  found = table(cells)
  grid = np.array(
    [[row.get(n, np.nan) for n in lengths] for row in found.values()]
  )
  labels = [", ".join(label) for label in found]
  wide = 0.08 * max(map(len, labels))
  size = (2.2 + wide + 0.9 * len(lengths), 1.6 + 0.5 * len(labels))
  figure = figures().Figure(figsize=size, layout="constrained")
  axes = figure.add_subplot()
  image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
  for i, j in np.ndindex(grid.shape):
    axes.text(j, i, f"{100 * grid[i, j]:.0f}", ha="center", va="center")
  axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
  axes.set_yticks(range(len(labels)), labels)
  axes.set_xlabel("tokens")
  if len({(cell.task, cell.cache) for cell in cells}) == 1:
    axes.set_ylabel("depth of the fact")
  axes.set_title(title or "found, per cent")
  figure.colorbar(image, ax=axes)
  figure.savefig(path, dpi=130)


def curves(found: Sequence[Curve], path: str) -> None:
  """Draws losses by position, and those of the last tokens by length."""
  figure = figures().Figure(figsize=(10, 4), layout="constrained")
  axes, beside = figure.subplots(1, 2, width_ratios=(3, 2))
  for curve in found:
    label = f"{curve.length:,} tokens"
    axes.plot(curve.ends, curve.nll, marker="o", label=label)
  axes.set_xscale("log", base=2)
  axes.set_xlabel("position, tokens")
  axes.set_ylabel("negative log-likelihood, nats a token")
  axes.grid(alpha=0.3)
  axes.legend()
  beside.plot(
    [curve.length for curve in found],
    [curve.last_nll for curve in found],
    marker="o",
  )
  beside.set_xscale("log", base=2)
  beside.set_xlabel("tokens of the text")
  beside.set_title(f"its last {found[0].last:,} tokens", fontsize="medium")
  beside.grid(alpha=0.3)
  figure.savefig(path, dpi=130)


def cache_costs(found: Sequence[KindCost], path: str) -> None:
  """Draws the loss of kinds of caches by their bytes, and the Pareto line.

  Raises:
    OptionError: matplotlib is not installed.
  """
  figure = figures().Figure(figsize=(8, 5), layout="constrained")
  axes = figure.add_subplot()
  # Of a logarithm; what is below is as good as without a cache.
  least = 1e-6
  for cost in found:
    kl = max(cost.kl, least)
    axes.plot(cost.nbytes, kl, "o")
    axes.annotate(
      cost.name,
      (cost.nbytes, kl),
      textcoords="offset points",
      xytext=(5, 4),
      fontsize=8,
    )
  best: list[KindCost] = []
  for cost in sorted(found, key=lambda cost: (cost.nbytes, cost.kl)):
    if not best or cost.kl < best[-1].kl:
      best.append(cost)
  axes.plot(
    [cost.nbytes for cost in best],
    [max(cost.kl, least) for cost in best],
    "-",
    color="grey",
    linewidth=1,
    label="fewest bytes for a divergence",
  )
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  axes.set_xlabel("bytes of the cache of a text")
  axes.set_ylabel("KL divergence of the predictions, nats a token")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=130)


def split_entropies(found: Sequence[SplitEntropy], path: str) -> None:
  """Draws the entropy of each layer and head, and the loss by the mean.

  Raises:
    OptionError: matplotlib is not installed.
  """
  grids = []
  for one in found:
    heads = [h for h in one.heads if h is not None]
    grid = np.full((len(heads), max(map(len, heads))), np.nan)
    for row, values in zip(grid, heads, strict=True):
      row[: len(values)] = values
    grids.append(grid)
  # One column for each number of chunks, one row for each kind of prefix.
  splits = list(dict.fromkeys(one.splits for one in found))
  size = (1.2 + 1.9 * len(splits) + 4.5, 4.6)
  figure = figures().Figure(figsize=size, layout="constrained")
  maps, beside = figure.subfigures(1, 2, width_ratios=(size[0] - 4.5, 4.5))
  axes = maps.subplots(2, len(splits), squeeze=False)
  low, high = (f([f(grid) for grid in grids]) for f in (np.nanmin, np.nanmax))
  for one in axes.flat:
    one.set_axis_off()
  images = []
  for one, grid in zip(found, grids, strict=True):
    here = axes[int(one.shared), splits.index(one.splits)]
    here.set_axis_on()
    images.append(here.imshow(grid, vmin=low, vmax=high, aspect="auto"))
    prefix = "shared prefix" if one.shared else "own prefixes"
    here.set_title(
      "whole" if one.splits == 1 else f"P = {one.splits}, {prefix}", fontsize=8
    )
    here.set_xlabel("head", fontsize=8)
    here.set_ylabel("layer", fontsize=8)
    here.set_xticks(range(0, grid.shape[1], -(-grid.shape[1] // 8)))
    here.set_yticks(range(0, grid.shape[0], -(-grid.shape[0] // 8)))
    here.tick_params(labelsize=7)
  maps.colorbar(images[0], ax=axes, label="entropy, nats")
  axes = beside.add_subplot()
  for shared in (False, True):
    line = [one for one in found if one.shared == shared or one.splits == 1]
    x, y = [one.entropy for one in line], [one.loss for one in line]
    axes.plot(x, y, "o-", label="shared prefix" if shared else "own prefixes")
    for one in line[int(shared) :]:
      axes.annotate(
        f"P = {one.splits}",
        (one.entropy, one.loss),
        textcoords="offset points",
        xytext=(6, -7) if shared else (-6, 5),
        ha="left" if shared else "right",
        fontsize=8,
      )
  axes.set_xlabel("entropy of the queries' attention, nats")
  axes.set_ylabel("negative log-likelihood, nats a token")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=130)


def context_costs(found: Sequence[ContextCost], path: str) -> None:
  """Draws the loss of ways to combine contexts by their number, and by tokens.

  Raises:
    OptionError: matplotlib is not installed.
  """
  figure = figures().Figure(figsize=(11, 4.5), layout="constrained")
  axes, beside = figure.subplots(1, 2)
  most = max(cost.contexts for cost in found)
  for way in dict.fromkeys(cost.way for cost in found):
    mine = [cost for cost in found if cost.way == way]
    counts = [cost.contexts for cost in mine]
    (line,) = axes.plot(
      counts, [cost.nll for cost in mine], marker="o", label=way
    )
    last = [cost for cost in mine if cost.contexts == most]
    for cost in last:
      beside.plot(cost.computed, cost.nll, "o", color=line.get_color())
      beside.annotate(
        way,
        (cost.computed, cost.nll),
        textcoords="offset points",
        xytext=(5, 4),
        fontsize=8,
      )
  axes.set_xscale("log", base=2)
  axes.set_xlabel("contexts")
  axes.set_ylabel("negative log-likelihood, nats a token")
  axes.legend(fontsize=8)
  beside.set_xlabel(f"tokens computed for an answer, {most} contexts")
  for each in (axes, beside):
    each.grid(alpha=0.3)
  figure.savefig(path, dpi=130)


def training_curves(rows: Sequence[dict[str, Any]], path: str) -> None:
  """Draws a training from its log: loss, gradient norm, rate, speed.

  Held-out losses are points beside the loss.

  Args:
    rows: step, stage and `FIGURES` of each; None, of a step that was not
      finite, is a gap.
    path: the PNG.
  """
  steps = [row["step"] for row in rows]
  figure = figures().Figure(figsize=(9, 6), layout="constrained")
  for n, (name, title) in enumerate(FIGURES.items()):
    axes = figure.add_subplot(2, 2, n + 1)
    values = [np.nan if row[name] is None else row[name] for row in rows]
    axes.plot(steps, values, color="#2b5c8a")
    apart = [row for row in rows if row.get("held_out") is not None]
    if name == "loss" and apart:
      axes.plot(
        [row["step"] for row in apart],
        [row["held_out"] for row in apart],
        "o",
        color="#a23b72",
        label="held out",
      )
      axes.legend()
    starts = [
      row["step"]
      for before, row in itertools.pairwise(rows)
      if row["stage"] != before["stage"]
    ]
    for start in starts:
      axes.axvline(start, color="#e08b3e", linewidth=0.8)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
  figure.savefig(path, dpi=130)

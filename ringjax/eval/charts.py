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

# Fields of a training's log that are drawn, with their titles.
FIGURES = {
  "loss": "loss, nats a token",
  "gradient_norm": "gradient norm",
  "learning_rate": "learning rate",
  "tokens_per_s": "tokens a second",
}
# Further figures and titles of a training's kind, where a row has the first.
FIGURES_OF_KIND = (
  {
    "rollouts_reward": "mean reward of a batch",
    "rollouts_tokens": "tokens of an answer",
    "rollouts_truncated": "share of truncated answers",
    "mismatch_max": "largest |log p(training) - log p(engine)|",
    "loss": "loss of the policy",
  },
  {
    "reward_margin": "margin of rewards",
    "reward_accuracy": "share of pairs in the right order",
    "loss": "loss of a pair",
  },
  {"predicted": "loss of the predicting layer, nats a token"},
)


def heat_map(cells: Sequence[Cell], path: str, title: str = "") -> None:
  """Draws retrieval by length (across) and task, kind or depth (down).

  Raises:
    OptionError: If matplotlib is not installed.
  """
  lengths = sorted({cell.length for cell in cells})
  scores = table(cells)
  grid = np.array(
    [[row.get(n, np.nan) for n in lengths] for row in scores.values()]
  )
  labels = [", ".join(label) for label in scores]
  label_width = 0.08 * max(map(len, labels))
  size = (2.2 + label_width + 0.9 * len(lengths), 1.6 + 0.5 * len(labels))
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
  axes, right_axes = figure.subplots(1, 2, width_ratios=(3, 2))
  for curve in found:
    label = f"{curve.length:,} tokens"
    axes.plot(curve.ends, curve.nll, marker="o", label=label)
  axes.set_xscale("log", base=2)
  axes.set_xlabel("position, tokens")
  axes.set_ylabel("negative log-likelihood, nats a token")
  axes.grid(alpha=0.3)
  axes.legend()
  right_axes.plot(
    [curve.length for curve in found],
    [curve.last_nll for curve in found],
    marker="o",
  )
  right_axes.set_xscale("log", base=2)
  right_axes.set_xlabel("tokens of the text")
  right_axes.set_title(f"its last {found[0].last:,} tokens", fontsize="medium")
  right_axes.grid(alpha=0.3)
  figure.savefig(path, dpi=130)


def cache_costs(found: Sequence[KindCost], path: str) -> None:
  """Draws the loss of kinds of caches by their bytes, and the Pareto line.

  Raises:
    OptionError: If matplotlib is not installed.
  """
  figure = figures().Figure(figsize=(8, 5), layout="constrained")
  axes = figure.add_subplot()
  # Lower limit of the logarithmic axis: below it a cache is as good as none.
  min_kl = 1e-6
  for cost in found:
    kl = max(cost.kl, min_kl)
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
    [max(cost.kl, min_kl) for cost in best],
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
    OptionError: If matplotlib is not installed.
  """
  grids = []
  for entropy in found:
    heads = [h for h in entropy.heads if h is not None]
    grid = np.full((len(heads), max(map(len, heads))), np.nan)
    for row, values in zip(grid, heads, strict=True):
      row[: len(values)] = values
    grids.append(grid)
  # A column for each number of chunks, a row for each kind of prefix.
  splits = list(dict.fromkeys(entropy.splits for entropy in found))
  size = (1.2 + 1.9 * len(splits) + 4.5, 4.6)
  figure = figures().Figure(figsize=size, layout="constrained")
  maps, right_figure = figure.subfigures(
    1, 2, width_ratios=(size[0] - 4.5, 4.5)
  )
  axes = maps.subplots(2, len(splits), squeeze=False)
  low, high = (f([f(grid) for grid in grids]) for f in (np.nanmin, np.nanmax))
  for panel in axes.flat:
    panel.set_axis_off()
  images = []
  for entropy, grid in zip(found, grids, strict=True):
    panel_axes = axes[int(entropy.shared), splits.index(entropy.splits)]
    panel_axes.set_axis_on()
    images.append(panel_axes.imshow(grid, vmin=low, vmax=high, aspect="auto"))
    prefix = "shared prefix" if entropy.shared else "own prefixes"
    panel_axes.set_title(
      "whole" if entropy.splits == 1 else f"P = {entropy.splits}, {prefix}",
      fontsize=8,
    )
    panel_axes.set_xlabel("head", fontsize=8)
    panel_axes.set_ylabel("layer", fontsize=8)
    panel_axes.set_xticks(range(0, grid.shape[1], -(-grid.shape[1] // 8)))
    panel_axes.set_yticks(range(0, grid.shape[0], -(-grid.shape[0] // 8)))
    panel_axes.tick_params(labelsize=7)
  maps.colorbar(images[0], ax=axes, label="entropy, nats")
  axes = right_figure.add_subplot()
  for shared in (False, True):
    line = [
      entropy
      for entropy in found
      if entropy.shared == shared or entropy.splits == 1
    ]
    x, y = (
      [entropy.entropy for entropy in line],
      [entropy.loss for entropy in line],
    )
    axes.plot(x, y, "o-", label="shared prefix" if shared else "own prefixes")
    for entropy in line[int(shared) :]:
      axes.annotate(
        f"P = {entropy.splits}",
        (entropy.entropy, entropy.loss),
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
    OptionError: If matplotlib is not installed.
  """
  figure = figures().Figure(figsize=(11, 4.5), layout="constrained")
  axes, right_axes = figure.subplots(1, 2)
  max_contexts = max(cost.contexts for cost in found)
  for way in dict.fromkeys(cost.way for cost in found):
    way_costs = [cost for cost in found if cost.way == way]
    counts = [cost.contexts for cost in way_costs]
    (line,) = axes.plot(
      counts, [cost.nll for cost in way_costs], marker="o", label=way
    )
    last = [cost for cost in way_costs if cost.contexts == max_contexts]
    for cost in last:
      right_axes.plot(cost.computed, cost.nll, "o", color=line.get_color())
      right_axes.annotate(
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
  right_axes.set_xlabel(
    f"tokens computed for an answer, {max_contexts} contexts"
  )
  for panel in (axes, right_axes):
    panel.grid(alpha=0.3)
  figure.savefig(path, dpi=130)


def training_curves(rows: Sequence[dict[str, Any]], path: str) -> None:
  """Draws a training from its log, a panel for each figure.

  Figures are `FIGURES` and those of `FIGURES_OF_KIND` that the log has.
  Held-out losses are points in the panel of the loss.

  Args:
    rows: Rows with step, stage and `FIGURES`; None, for a step that was not
      finite, is a gap.
    path: Path of the PNG.
  """
  steps = [row["step"] for row in rows]
  names = dict(FIGURES)
  for of_kind in FIGURES_OF_KIND:
    if any(row.get(next(iter(of_kind))) is not None for row in rows):
      names |= of_kind
  columns = 2 if len(names) == len(FIGURES) else 3
  lines = -(-len(names) // columns)
  figure = figures().Figure(
    figsize=(4.5 * columns, 3 * lines), layout="constrained"
  )
  for n, (name, title) in enumerate(names.items()):
    axes = figure.add_subplot(lines, columns, n + 1)
    values = [
      np.nan if row.get(name) is None else float(row[name]) for row in rows
    ]
    axes.plot(steps, values, color="#2b5c8a")
    held_out_rows = [row for row in rows if row.get("held_out") is not None]
    if name == "loss" and held_out_rows:
      axes.plot(
        [row["step"] for row in held_out_rows],
        [row["held_out"] for row in held_out_rows],
        "o",
        color="#a23b72",
        label="held out",
      )
      axes.legend()
    starts = [
      row["step"]
      for previous, row in itertools.pairwise(rows)
      if row["stage"] != previous["stage"]
    ]
    for start in starts:
      axes.axvline(start, color="#e08b3e", linewidth=0.8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
  figure.savefig(path, dpi=130)

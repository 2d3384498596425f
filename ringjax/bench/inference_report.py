"""What the benchmark of a model says: ratios, lines, tables and a picture.

Law: everything here is made of the rows of a result, which a file holds, so
that rows of several runs are told as one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringjax.bench import contest
from ringjax.bench.contest import best
from ringjax.bench.model_contestants import CONTESTANTS, DTYPES, PARTS, Case

# Tokens: how many times transformers' speed ours shall be.
AIMS = {4096: 1.0, 32768: 2.0}

_PEERS = ("transformers", "transformers_1")

_COLORS = {
  "ringjax": "#08519c",
  "unrolled": "#3182bd",
  "striped": "#9ecae1",
  "transformers": "#d95f0e",
  "transformers_1": "#fdae6b",
}


def order(row: dict[str, Any]) -> tuple[Any, ...]:
  """What tells rows apart, in the order of the tables."""
  dtypes = ("", *DTYPES)
  return (
    PARTS.index(row["part"]), dtypes.index(row["dtype"]), row["tokens"]
  )  # fmt: skip


def fit(tokens: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
  """The line through times of a step, in ms and ms for 1024 tokens."""
  x, y = np.asarray(tokens) / 1024, np.asarray(seconds) * 1e3
  slope, start = np.polyfit(x, y, 1)
  spread = float(np.sum((y - y.mean()) ** 2))
  rest = float(np.sum((y - start - slope * x) ** 2))
  return {
    "ms": float(start),
    "ms_per_1024": float(slope),
    "r2": 1 - rest / spread if spread else 1.0,
  }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Speed over transformers', fitted lines, loading over safetensors, aims.

  A "speed" is their best median time over our best: above 1 we are faster; a
  "cpu_speed" is that in processor time. The bound of a line is the slope of
  reading the cache once. Loading is compared by time: below 1 we are faster.
  """
  ours = [name for name, one in CONTESTANTS.items() if one.ours]
  speeds, aims = [], []
  for row in rows:
    if row["part"] not in ("forward", "decode"):
      continue
    mine, speed = _speed(row, ours, "median_s")
    facts = {name: row[name] for name in ("part", "dtype", "tokens")}
    _, cpu = _speed(row, ours, "cpu_s")
    speeds.append(
      {**facts, "best_of_ours": mine, "speed": speed, "cpu_speed": cpu}
    )
    if row["tokens"] in AIMS:
      aim = AIMS[row["tokens"]]
      met = None if speed is None else speed >= aim
      aims.append({**facts, "aim": aim, "speed": speed, "met": met})
  return {
    "speeds": speeds,
    "lines": _lines(rows),
    "load": [
      {
        "dtype": row["dtype"],
        "contestant": name,
        "time_over_safetensors": _over(row, name, "safetensors"),
      }
      for row in rows
      if row["part"] == "load"
      for name in row["results"]
      if name != "safetensors"
    ],
    "tiles": [
      {
        "tokens": row["tokens"],
        "devices": row["devices"],
        "striped_time_over_contiguous": row["results"]["striped"]["time"]
        / row["results"]["contiguous"]["time"],
      }
      for row in rows
      if row["part"] == "tiles"
    ],
    "aims": aims,
  }


def _speed(
  row: dict[str, Any], ours: Sequence[str], key: str
) -> tuple[str | None, float | None]:
  """(our fastest, the peer's best time over its)."""
  mine, theirs = best(row, ours, key), best(row, _PEERS, key)
  speed = theirs[1] / mine[1] if mine and theirs else None
  return mine and mine[0], speed


def _over(row: dict[str, Any], a: str, b: str) -> float | None:
  mine, theirs = best(row, [a]), best(row, [b])
  return mine[1] / theirs[1] if mine and theirs else None


def _read_rate(rows: Sequence[dict[str, Any]]) -> float:
  """The best rate of reading in any row, bytes per second."""
  return max(
    (r["machine"]["bytes_per_s"] for r in rows if r["part"] == "decode"),
    default=0.0,
  )


def _lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  found = []
  for dtype in DTYPES:
    members = [r for r in rows if r["part"] == "decode" and r["dtype"] == dtype]
    rate = _read_rate(rows)
    for name in CONTESTANTS:
      points = [(r, least[1]) for r in members if (least := best(r, [name]))]
      if len(points) < 2:
        continue
      tokens = [r["tokens"] for r, _ in points]
      line = fit(tokens, [s for _, s in points])
      cpu = [r["results"][name].get("cpu_s") for r, _ in points]
      found.append(
        {
          "dtype": dtype,
          "contestant": name,
          **line,
          "cpu": fit(tokens, cpu) if all(cpu) else None,
          "bound_ms_per_1024": 1024e3 * members[0]["token_bytes"] / rate,
        }
      )
  return found


def _title(row: dict[str, Any]) -> str:
  case = Case(part=row["part"], dtype=row["dtype"], tokens=row["tokens"])
  return str(case)


def table(row: dict[str, Any]) -> str:
  """The text of one row."""
  if row["part"] == "tiles":
    return _tiles_table(row)
  lines = [_title(row)]
  if row["part"] == "forward":
    rate = row["machine"]["flops_per_s"] / 1e9
    lines.append(f"  {'matrix product':31}{rate:8.0f} GFLOP/s")
  elif row["part"] == "decode":
    rate, ms = row["machine"]["bytes_per_s"] / 1e9, row["bound_s"] * 1e3
    lines.append(
      f"  {'reading once':26}{ms:11.1f} ms   100 %   {rate:.1f} GB/s"
    )

  def more(one: Mapping[str, Any]) -> str:
    rest = f"best {one['min_s'] * 1e3:.1f} ms"
    if row["part"] == "load":
      share = f"{one['s_per_gigabyte']:5.2f} s/GB"
    else:
      percent = one.get("gemm_percent") or one["bound_percent"]
      share = f"{percent:5.1f} %"
      rest += f", off by {one['max_abs_difference']:.0e}"
    return f"{share}   cpu {one['cpu_s'] * 1e3:.1f} ms, {rest}"

  return "\n".join(lines + contest.lines(row, more)) + "\n"


def _tiles_table(row: dict[str, Any]) -> str:
  lines = [
    f"tiles of a causal ring, {row['devices']} devices T={row['tokens']}; "
    "by hop: largest : mean"
  ]
  for name, one in row["results"].items():
    hops = " ".join(f"{x:.2f}" for x in one["largest_over_mean_by_hop"])
    lines.append(
      f"  {name:12}{one['tiles']:8} tiles, time {one['time']:6}, busy "
      f"{one['busy_percent']:5.1f} %   {hops}"
    )
  return "\n".join(lines) + "\n"


def _line(one: Mapping[str, Any]) -> str:
  start, slope = one["ms"], one["ms_per_1024"]
  return f"{start:8.1f} + {slope:5.2f}, R2 {one['r2']:.2f}"


def summary_table(found: dict[str, Any]) -> str:
  """The text of what `summary` found."""
  lines = []
  number = lambda x: "-" if x is None else format(x, ".2f")
  if found["speeds"]:
    lines.append("Our best speed over transformers' best: time, processor time")
    for one in found["speeds"]:
      name = one["best_of_ours"] or "no number of ours"
      lines.append(
        f"  {_title(one):32}{number(one['speed']):>6}"
        f"{number(one['cpu_speed']):>6}  {name}"
      )
  if found["lines"]:
    lines.append("A step as the cache grows: ms and ms for 1024 tokens more")
    for one in found["lines"]:
      head = f"  {one['contestant']:15}{one['dtype']:9}"
      lines.append(
        f"{head}{_line(one)} (reading {one['bound_ms_per_1024']:.2f})"
      )
      if one["cpu"] is not None:
        lines.append(f"{'    processor time':26}{_line(one['cpu'])}")
  if found["load"]:
    lines.append("Time to load over safetensors'")
    for one in found["load"]:
      ratio = number(one["time_over_safetensors"])
      lines.append(f"  {one['contestant']:15}{one['dtype']:17}{ratio:>6}")
  if found["tiles"]:
    lines.append("Time of striped over contiguous, in tiles")
    for one in found["tiles"]:
      ratio = number(one["striped_time_over_contiguous"])
      lines.append(f"  {'T=' + str(one['tokens']):32}{ratio:>6}")
  if found["aims"]:
    lines.append("Aims: times transformers' speed")
    words = {True: "met", False: "not met", None: "no number"}
    for one in found["aims"]:
      lines.append(
        f"  {_title(one):32}{number(one['speed']):>6}  of {one['aim']:.0f}: "
        f"{words[one['met']]}"
      )
  return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: str) -> None:
  """A panel a dtype: the step as the cache grows; below, the forward pass."""
  figures = importlib.import_module("matplotlib.figure")
  rows = result["rows"]
  dtypes = [d for d in DTYPES if any(r["dtype"] == d for r in rows)]
  figure = figures.Figure(
    figsize=(4.2 * max(2, len(dtypes)), 6.2), layout="constrained"
  )
  axes = figure.subplots(2, max(1, len(dtypes)), squeeze=False)
  lines = result["summary"]["lines"]
  for column, dtype in enumerate(dtypes):
    of = lambda part, dtype=dtype: [
      r for r in rows if r["part"] == part and r["dtype"] == dtype
    ]
    mine = {x["contestant"]: x for x in lines if x["dtype"] == dtype}
    _draw_decode(axes[0, column], of("decode"), mine, _read_rate(rows))
    _draw_forward(axes[1, column], of("forward"))
    axes[0, column].set_title(f"{dtype}: a step", loc="left", fontsize=10)
    axes[1, column].set_title(
      f"{dtype}: a whole prompt", loc="left", fontsize=10
    )
  for ax in axes.flat:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)
    if ax.get_legend_handles_labels()[0]:
      ax.legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=100)
  print(f"wrote {path}", file=sys.stderr)


def _draw_decode(
  ax: Any,
  rows: Sequence[dict[str, Any]],
  lines: Mapping[str, Any],
  rate: float,
) -> None:
  for name, color in _COLORS.items():
    points = [(r["tokens"], b[1] * 1e3) for r in rows if (b := best(r, [name]))]
    if not points:
      continue
    x = np.array([p[0] for p in points])
    ax.plot(x, [p[1] for p in points], "o", color=color, label=name)
    if name in lines:
      line = lines[name]
      y = line["ms"] + line["ms_per_1024"] * x / 1024
      ax.plot(x, y, color=color, linewidth=1)
  if rows:
    x = np.array([r["tokens"] for r in rows])
    bound = rows[0]["weight_bytes"] + x * rows[0]["token_bytes"]
    ax.plot(x, 1e3 * bound / rate, "--", color="0.5", label="reading once")
  ax.set_ylim(bottom=0)
  ax.set_xlabel("tokens in the cache", fontsize=9)
  ax.set_ylabel("ms", fontsize=9)


def _draw_forward(ax: Any, rows: Sequence[dict[str, Any]]) -> None:
  names = [n for n in _COLORS if any(best(r, [n]) for r in rows)]
  width = 0.8 / max(len(names), 1)
  for i, name in enumerate(names):
    rates = [
      r["tokens"] / b[1] if (b := best(r, [name])) else 0.0 for r in rows
    ]
    x = np.arange(len(rows)) + (i - (len(names) - 1) / 2) * width
    ax.bar(x, rates, width * 0.92, color=_COLORS[name], label=name)
  ax.set_xticks(range(len(rows)), [f"T={r['tokens']}" for r in rows])
  ax.set_ylabel("tokens per second", fontsize=9)

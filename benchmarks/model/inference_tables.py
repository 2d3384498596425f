"""Tables of the benchmark of a model: ratios, lines through steps, a picture.

Everything is computed from the rows of a result, which a file holds, so that
rows of several runs can be shown together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.model.model_contestants import CONTESTANTS, DTYPES, ModelCase
from benchmarks.shared import harness
from benchmarks.shared.harness import Row, best, ratio

if TYPE_CHECKING:
  from matplotlib.axes import Axes

# Goals by tokens: our speed as a multiple of transformers'.
AIMS = {4096: 1.0, 32768: 2.0}

_PEERS = ("transformers", "transformers_1")

_COLORS = {
  "ringjax": "#08519c",
  "unrolled": "#3182bd",
  "striped": "#9ecae1",
  "transformers": "#d95f0e",
  "transformers_1": "#fdae6b",
}


def fit(tokens: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
  """Fits a line to times of a step, in ms and ms for 1024 tokens."""
  x, y = np.asarray(tokens) / 1024, np.asarray(seconds) * 1e3
  slope, start = np.polyfit(x, y, 1)
  # Equal times are explained completely, though their variance is 0.
  r2 = np.corrcoef(x, y)[0, 1] ** 2 if np.ptp(y) else 1.0
  return {"ms": float(start), "ms_per_1024": float(slope), "r2": float(r2)}


def summary(rows: Sequence[Row]) -> Row:
  """Speed over transformers', fitted lines, loading over safetensors, aims.

  A "speed" is their best median time over ours: above 1 we are faster; a
  "cpu_speed" is the same ratio of processor times. The bound of a line is the
  slope of reading the cache once. Loading is compared by time: below 1 we are
  faster.
  """
  ours = [name for name, contestant in CONTESTANTS.items() if contestant.ours]
  rows_of = lambda *parts: [row for row in rows if row["part"] in parts]
  speeds, aims = [], []
  for row in rows_of("forward", "decode"):
    facts = {name: row[name] for name in ("part", "dtype", "tokens")}
    our_best, speed = best(row, ours), ratio(row, _PEERS, ours)
    cpu = ratio(row, _PEERS, ours, "cpu_s")
    speeds.append(
      {
        **facts,
        "best_of_ours": our_best and our_best[0],
        "speed": speed,
        "cpu_speed": cpu,
      }
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
        "time_over_safetensors": ratio(row, [name], ["safetensors"]),
      }
      for row in rows_of("load")
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
      for row in rows_of("tiles")
    ],
    "aims": aims,
  }


def _read_rate(rows: Sequence[Row]) -> float:
  """Best rate of reading in any row, in bytes per second."""
  return max(
    (r["machine"]["bytes_per_s"] for r in rows if r["part"] == "decode"),
    default=0.0,
  )


def _lines(rows: Sequence[Row]) -> list[Row]:
  step_lines = []
  for dtype in DTYPES:
    members = [r for r in rows if r["part"] == "decode" and r["dtype"] == dtype]
    rate = _read_rate(rows)
    for name in CONTESTANTS:
      points = [
        (r, fastest[1]) for r in members if (fastest := best(r, [name]))
      ]
      if len(points) < 2:
        continue
      tokens = [r["tokens"] for r, _ in points]
      line = fit(tokens, [s for _, s in points])
      cpu = [r["results"][name].get("cpu_s") for r, _ in points]
      step_lines.append(
        {
          "dtype": dtype,
          "contestant": name,
          **line,
          "cpu": fit(tokens, cpu) if all(cpu) else None,
          "bound_ms_per_1024": 1024e3 * members[0]["token_bytes"] / rate,
        }
      )
  return step_lines


def _title(row: Row) -> str:
  facts = {name: row[name] for name in ("part", "dtype", "tokens")}
  return str(ModelCase(**facts))


def table(case: ModelCase, row: Row) -> str:
  """The text of one row."""
  if row["part"] == "tiles":
    return _tiles_table(row)
  lines = [str(case)]
  if row["part"] == "forward":
    rate = row["machine"]["flops_per_s"] / 1e9
    lines.append(f"  {'matrix product':31}{rate:8.0f} GFLOP/s")
  elif row["part"] == "decode":
    rate, ms = row["machine"]["bytes_per_s"] / 1e9, row["bound_s"] * 1e3
    lines.append(
      f"  {'reading once':26}{ms:11.1f} ms   100 %   {rate:.1f} GB/s"
    )

  def result_text(result: Mapping[str, Any]) -> str:
    details = f"best {result['min_s'] * 1e3:.1f} ms"
    if row["part"] == "load":
      share = f"{result['s_per_gigabyte']:5.2f} s/GB"
    else:
      percent = result.get("gemm_percent") or result["bound_percent"]
      share = f"{percent:5.1f} %"
      details += f", off by {result['max_abs_difference']:.0e}"
    return f"{share}   cpu {result['cpu_s'] * 1e3:.1f} ms, {details}"

  return "\n".join(lines + harness.lines(row, result_text)) + "\n"


def _tiles_table(row: Row) -> str:
  lines = [
    f"tiles of a causal ring, {row['devices']} devices T={row['tokens']}; "
    "by hop: largest : mean"
  ]
  for name, result in row["results"].items():
    hops = " ".join(f"{x:.2f}" for x in result["largest_over_mean_by_hop"])
    lines.append(
      f"  {name:12}{result['tiles']:8} tiles, time {result['time']:6}, busy "
      f"{result['busy_percent']:5.1f} %   {hops}"
    )
  return "\n".join(lines) + "\n"


def _line(line: Mapping[str, Any]) -> str:
  start, slope = line["ms"], line["ms_per_1024"]
  return f"{start:8.1f} + {slope:5.2f}, R2 {line['r2']:.2f}"


def closing(result: Row) -> str:
  """Text of the figures of `summary`."""
  figures = result["summary"]
  number = lambda x: f"{'-' if x is None else format(x, '.2f'):>6}"
  met = {True: "met", False: "not met", None: "no number"}
  tables = {
    "speeds": (
      "Our best speed over transformers' best: time, processor time",
      lambda x: (
        f"{_title(x):32}{number(x['speed'])}{number(x['cpu_speed'])}  "
        f"{x['best_of_ours'] or 'no number of ours'}"
      ),
    ),
    "lines": (
      "A step as the cache grows: ms and ms for 1024 tokens more",
      lambda x: (
        f"{x['contestant']:15}{x['dtype']:9}{_line(x)} (reading "
        f"{x['bound_ms_per_1024']:.2f})"
        + (f"\n{'    processor time':26}{_line(x['cpu'])}" if x["cpu"] else "")
      ),
    ),
    "load": (
      "Time to load over safetensors'",
      lambda x: (
        f"{x['contestant']:15}{x['dtype']:17}"
        f"{number(x['time_over_safetensors'])}"
      ),
    ),
    "tiles": (
      "Time of striped over contiguous, in tiles",
      lambda x: (
        f"{'T=' + str(x['tokens']):32}"
        f"{number(x['striped_time_over_contiguous'])}"
      ),
    ),
    "aims": (
      "Aims: times transformers' speed",
      lambda x: (
        f"{_title(x):32}{number(x['speed'])}  of {x['aim']:.0f}: "
        f"{met[x['met']]}"
      ),
    ),
  }
  lines = []
  for key, (title, line) in tables.items():
    if figures[key]:
      lines += [title, *(f"  {line(x)}" for x in figures[key])]
  return "\n".join(lines) + "\n"


def draw(result: Row, path: str) -> None:
  """Draws a decode step by cache length and the forward pass, per dtype."""
  rows = result["rows"]
  dtypes = [d for d in DTYPES if any(r["dtype"] == d for r in rows)]
  figure = harness.figure(4.2 * max(2, len(dtypes)), 6.2)
  axes = figure.subplots(2, max(1, len(dtypes)), squeeze=False)
  for column, dtype in enumerate(dtypes):
    of = lambda part, dtype=dtype: [
      r for r in rows if r["part"] == part and r["dtype"] == dtype
    ]
    lines = result["summary"]["lines"]
    lines_by_name = {x["contestant"]: x for x in lines if x["dtype"] == dtype}
    _draw_decode(axes[0, column], of("decode"), lines_by_name, _read_rate(rows))
    _draw_forward(axes[1, column], of("forward"))
    for ax, subject in zip(
      axes[:, column], ("a step", "a whole prompt"), strict=True
    ):
      harness.tidy(ax, f"{dtype}: {subject}")
      if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)
  harness.save(figure, path, dpi=100)


def _draw_decode(
  ax: Axes,
  rows: Sequence[Row],
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


def _draw_forward(ax: Axes, rows: Sequence[Row]) -> None:
  speed = lambda row, name: (
    row["tokens"] / fastest[1] if (fastest := best(row, [name])) else 0.0
  )
  colors = {
    name: color
    for name, color in _COLORS.items()
    if any(best(row, [name]) for row in rows)
  }
  harness.bars(ax, rows, colors, speed, lambda row: f"T={row['tokens']}")
  ax.set_ylabel("tokens per second", fontsize=9)

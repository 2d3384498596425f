"""The sub-command of launch.plan that counts cycles of kernels' tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from launch import aot, screens, ways
from launch.definer import Definer
from ringjax.errors import OptionError, RingjaxError, message
from ringjax.plan import cycles

NAME = "plan"
# The smallest slices.
_SLICES = {
  "v5e": "v5e:1x1",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:1x1",
  "tpu7x": "tpu7x:2x2x1",
}
_KERNELS = ("ours", "splash")
_BLOCK = 1024
NOTE = (
  "bundles: instructions of a whole tile, one a cycle; matrix: cycles in which "
  "the busiest matrix unit takes rows; waits for memory are not counted"
)


def define(values: flags.FlagValues) -> None:
  """The flags of this sub-command."""
  new = Definer(values)
  new.texts("chips", None, f"cycles: of {','.join(_SLICES)}; default all.")


OF_CYCLES = ("chips",)


def count(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Compiles each kernel for each chip and says what a tile takes."""
  taken = ("q_block", "kv_block", "dtype", "timeout", "head_dim", "backward")
  others = (n for n in (*aot.OF_OTHERS, *aot.OF_AOT) if n not in taken)
  ways.refuse(
    values,
    "cycles",
    (
      *others,
      "heads",
      "kv_heads",
      "causal",
      "window",
      "packed",
      "mesh",
      "tokens",
      "plot",
      "out",
    ),
  )
  names = values.chips or list(_SLICES)
  for name in names:
    if name not in _SLICES:
      raise OptionError(
        message(
          "--chips", repr(name), f"some of {', '.join(_SLICES)}", "choose"
        )
      )
  options: dict[str, Any] = {
    "q_block": values.q_block or _BLOCK,
    "kv_block": values.kv_block or _BLOCK,
    "head_dim": values.head_dim,
    "dtype": values.dtype or "bfloat16",
  }
  screen = screens.Screen(NAME, stderr)
  rows: list[dict[str, Any]] = []
  passes = ("forward", "backward") if values.backward else ("forward",)
  for name in names:
    for what in passes:
      for kernel in _KERNELS:
        screen.say(f"{kernel}, {what}, for {name}")
        row = {"chip": name, "what": what, "kernel": kernel}
        try:
          found = cycles.count(
            f"ringjax.bench.tiles:{kernel}",
            _SLICES[name],
            options | {"what": what},
            timeout_s=values.timeout,
          )
        except RingjaxError as error:
          rows.append({**row, "refused": str(error)})
          continue
        # Of both passes the backward one is the larger.
        tile = max(found, key=lambda tile: tile.work.matrix_cycles)
        rows.append({**row, **tile.record()})
  record = {**options, "rows": rows, "note": NOTE}
  ways.put(values, stdout, record, table(rows, options))


def table(
  rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[str]:
  """The counts, ours beside splash's, as Markdown."""
  lines = [
    f"a tile of {options['q_block']} x {options['kv_block']}, head dim "
    f"{options['head_dim']}, {options['dtype']}",
    "",
    "| chip | pass | ours: bundles | matrix | splash: bundles | matrix "
    "| ours / splash |",
    "|---|---|---:|---:|---:|---:|---:|",
  ]
  cells: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
  for row in rows:
    cells.setdefault((row["chip"], row["what"]), {})[row["kernel"]] = row
  for key, found in cells.items():
    texts, known = [], []
    for kernel in _KERNELS:
      row = found[kernel]
      if "refused" in row:
        texts += ["refused", ""]
      else:
        texts += [f"{row['bundles']:,}", f"{row['matrix_cycles']:,}"]
        known.append(row["cycles"])
    ratio = f"{known[0] / known[1]:.2f}" if len(known) == 2 else ""
    lines.append("| " + " | ".join((*key, *texts, ratio)) + " |")
  lines += [
    f"refused: {row['chip']} {row['what']} {row['kernel']}: {row['refused']}"
    for row in rows
    if "refused" in row
  ]
  return [*lines, "", NOTE]

"""The sub-command ring of launch.plan: the tables of the Ring Attention paper.

With --compile also the longest context that our compiled training step fits, on
the slices that the TPU compiler knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from absl import flags

from launch import aot, capacity, console, strategies
from ringjax.plan import aot as compiler
from ringjax.plan import ring_tables
from ringjax.plan.ring_tables import WAYS, ContextRow

# Of the paper's models the one that has a preset.
_PRESETS = {"7B": "llama-2-7b"}
NOTE = (
  "Table 3 ours: weights, gradients and moments sharded over all devices, the "
  "kept inputs of layers and one layer's working set, all of 4 bytes; logits "
  "and what a compiler keeps besides are left out"
)


def tables(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints the smallest blocks that hide a hop, and the longest contexts."""
  if not values.compile:
    strategies.refuse(values, "ring without --compile", ("timeout",))
  hiding = list(ring_tables.hiding_rows())
  contexts = list(ring_tables.context_rows())
  compiled: dict[tuple[str, str], dict[str, Any]] = {}
  if values.compile:
    compiled = _compile(values, contexts, console.Screen(aot.NAME, stderr))
  record = {
    "hides": [row.record() for row in hiding],
    "contexts": [
      row.record() | {"compiled": compiled.get((row.machine, row.model))}
      for row in contexts
    ],
    "note": NOTE,
  }
  apart = lambda ours, paper: f"{100 * (ours / paper - 1):+.1f} %"
  lines = [
    "smallest block whose work hides a hop, F / B, and six of them, in tokens "
    "(Table 2)",
    "",
    *strategies.markdown(
      ("machine",),
      ("TFLOP/s", "GB/s", "block: paper", "ours", "sequence: paper", "ours",
       ""),
      [
        (row.machine, f"{row.flops / 1e12:g}", f"{row.bandwidth / 1e9:g}",
         f"{row.block:,.0f}", f"{row.our_block:,.0f}",
         f"{row.sequence:,.0f}", f"{row.our_sequence:,.0f}",
         apart(row.our_sequence, row.sequence))
        for row in hiding
      ],
    ),
    "",
    "longest context of training, in thousands of tokens: paper / ours by "
    "formula (Table 3)",
    "",
    *strategies.markdown(
      ("machine", "model"),
      ("ring of", *WAYS, *(["compiled"] if compiled else ())),
      [
        (row.machine, row.model, f"{row.ring}",
         *(f"{paper / 1e3:,.0f} / {ours / 1e3:,.0f}"
           for paper, ours in zip(row.published, row.ours, strict=True)),
         *([_compiled(compiled.get((row.machine, row.model)))]
           if compiled else ()))
        for row in contexts
      ],
    ),
    "",
    NOTE,
  ]  # fmt: skip
  strategies.put(values, stdout, record, lines)


def _compile(
  values: flags.FlagValues,
  contexts: Sequence[ContextRow],
  screen: console.Screen,
) -> dict[tuple[str, str], dict[str, Any]]:
  """Our longest contexts by the compiler's count, in float32 as the paper's."""
  compiler.require()
  found = {}
  for row in contexts:
    if row.slice and row.model in _PRESETS:
      cell = {
        "model": _PRESETS[row.model],
        "slice": row.machine,
        "what": "train",
        "strategy": "striped",
        "options": {"dtype": "float32"},
      }
      found[row.machine, row.model] = capacity.find(
        cell, row.slice, values.timeout, screen.say
      )
  return found


def _compiled(row: dict[str, Any] | None) -> str:
  if row is None:
    return ""
  if "refused" in row:
    return "refused"
  return f"{row['tokens'] / 1e3:,.0f}"

"""The sub-command ring of launch.plan: the tables of the Ring Attention paper.

With --compile also the longest context that our compiled training step fits, on
the slices that the TPU compiler knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from absl import flags

from ringjax.plan.compiler import aot as compiler
from ringjax.plan.kv_runahead import ring_tables
from ringjax.plan.kv_runahead.ring_tables import WAYS, ContextRow

from ..shared import console
from . import aot, capacity, strategies

# The paper's model that has a preset.
_PRESETS = {"7B": "llama-2-7b"}
NOTE = (
  "Table 3 ours: states cut over all devices, a gathered layer, the kept "
  "inputs of layers, a layer's working set, plain attention's scores, logits "
  "of the whole vocabulary, all of 4 bytes; without what a compiler keeps "
  "besides. "
  "Not reproduced: the paper's figures are of programs that ran, and no count "
  "of bytes a token and bytes a weight gives them all (7B in blocks on 32 "
  "devices has 4 times the context of 8; see "
  "ringjax.plan.kv_runahead.ring_tables)"
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
  ratios = [
    ours / paper
    for row in contexts
    for paper, ours in zip(row.published, row.ours, strict=True)
  ]
  equal = sum(ratio == 1 for ratio in ratios)
  close = sum(0.5 <= ratio <= 2 for ratio in ratios)
  record = {
    "hides": [row.record() for row in hiding],
    "contexts": [
      row.record() | {"compiled": compiled.get((row.machine, row.model))}
      for row in contexts
    ],
    "equal": equal,
    "within_two": close,
    "note": NOTE,
  }
  difference = lambda ours, paper: f"{100 * (ours / paper - 1):+.1f} %"
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
         difference(row.our_sequence, row.sequence))
        for row in hiding
      ],
    ),
    "",
    "longest context of training, in powers of two of 1,024 tokens: paper / "
    "ours by count (Table 3)",
    "",
    *strategies.markdown(
      ("machine", "model"),
      ("devices", *WAYS, *(["compiled"] if compiled else ())),
      [
        (row.machine, row.model, f"{row.devices}",
         *(f"{paper // 1024:,} / {ours // 1024:,}"
           for paper, ours in zip(row.published, row.ours, strict=True)),
         *([_compiled(compiled.get((row.machine, row.model)))]
           if compiled else ()))
        for row in contexts
      ],
    ),
    "",
    f"{equal} of {len(ratios)} are the paper's, {close} within a factor of two",
    "",
    NOTE,
  ]  # fmt: skip
  strategies.put(values, stdout, record, lines)


def _compile(
  values: flags.FlagValues,
  contexts: Sequence[ContextRow],
  screen: console.Screen,
) -> dict[tuple[str, str], dict[str, Any]]:
  """Longest contexts by the compiler, in float32 as in the paper."""
  compiler.require()
  rows = {}
  for row in contexts:
    if row.slice and row.model in _PRESETS:
      cell = {
        "model": _PRESETS[row.model],
        "slice": row.machine,
        "what": "train",
        "strategy": "striped",
        "options": {"dtype": "float32"},
      }
      rows[row.machine, row.model] = capacity.find(
        cell, row.slice, values.timeout, screen.say
      )
  return rows


def _compiled(row: dict[str, Any] | None) -> str:
  if row is None:
    return ""
  if "refused" in row:
    return "refused"
  return f"{row['tokens'] / 1024:,.0f}"

"""The sub-command cycles of launch.plan: cycles of a kernel's tile.

Compares attention with JAX's splash kernel, decoding with reading the keys and
with XLA's loops, pages that rows share with reading them row by row, by our
kernel and by JAX's ragged paged attention, and products with weights of codes
with reading the codes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from ringjax.bench import tiles
from ringjax.errors import OptionError, RingjaxError
from ringjax.parallel import chips
from ringjax.plan.compiler import aot as compiler
from ringjax.plan.compiler import cycles

from ..shared import console
from . import strategies

NAME = "plan"
# The smallest slice of each chip.
SLICES = {
  "v5e": "v5e:1x1",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:1x1",
  "tpu7x": "tpu7x:2x2x1",
}
_BUILDER = "ringjax.bench.tiles:decode"
_KERNELS = ("ours", "splash")
_BLOCK = 1024
NOTE = (
  "bundles: instructions of a whole tile, one a cycle; matrix: cycles in which "
  "the busiest matrix unit takes rows; waits for memory are not counted"
)

DECODE_NOTE = (
  "reading: by the memory's stated rate; kernel: instructions of a tile in the "
  "machine code; XLA's loops: what the compiler writes beside them, of as "
  "many keys, the mean with and without a mask; nothing was measured"
)


POOL_NOTE = (
  "a step of a kernel takes the larger of all its instructions and of reading "
  "its pages at the memory's stated rate; nothing was measured"
)

_DECODE_FLAGS = ("heads", "kv_heads", "cache", "queries")
_ATTENTION_FLAGS = ("q_block", "kv_block", "backward")


def count(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Compiles each kernel for each chip and reports the cycles of a tile."""
  kernels = values.what or ["attention"]
  if len(kernels) > 1 or kernels[0] not in _REPORTS:
    raise OptionError(
      "--what",
      ",".join(kernels),
      f"one of {', '.join(_REPORTS)}",
      "leave it out for attention",
    )
  report, others = _REPORTS[kernels[0]]
  strategies.refuse(values, f"cycles --what={kernels[0]}", others)
  names = strategies.chosen_names("chips", values.chips, SLICES)
  compiler.require()
  report(values, names, console.Screen(NAME, stderr), stdout)


def _attention(
  values: flags.FlagValues,
  names: Sequence[str],
  screen: console.Screen,
  stdout: TextIO,
) -> None:
  """Reports cycles of a tile of attention, of our kernel and of JAX's."""
  options: dict[str, Any] = {
    "q_block": values.q_block or _BLOCK,
    "kv_block": values.kv_block or _BLOCK,
    "head_dim": values.head_dim,
    "dtype": values.dtype or "bfloat16",
  }
  rows: list[dict[str, Any]] = []
  passes = ("forward", "backward") if values.backward else ("forward",)
  for name, direction, kernel in itertools.product(names, passes, _KERNELS):
    screen.say(f"{kernel}, {direction}, for {name}")
    row = {"chip": name, "what": direction, "kernel": kernel}
    try:
      tile_cycles = cycles.count(
        f"ringjax.bench.tiles:{kernel}",
        SLICES[name],
        options | {"what": direction},
        timeout_s=values.timeout,
      )
    except RingjaxError as error:
      rows.append({**row, "refused": str(error)})
      continue
    # The backward builder also compiles a forward kernel, which is smaller.
    tile = max(tile_cycles, key=lambda tile: tile.work.matrix_cycles)
    rows.append({**row, **tile.record()})
  record = {**options, "rows": rows, "note": NOTE}
  strategies.put(values, stdout, record, table(rows, options))


def _attention_options(values: flags.FlagValues) -> dict[str, Any]:
  """Options of attention: heads, head dim and dtype."""
  return {
    "heads": values.heads,
    "kv_heads": values.kv_heads,
    "head_dim": values.head_dim,
    "dtype": values.dtype or "bfloat16",
  }


def _decode(
  values: flags.FlagValues,
  names: Sequence[str],
  screen: console.Screen,
  stdout: TextIO,
) -> None:
  """Reports cycles of a cache's tile: reading, kernel and XLA's loops."""
  options = _attention_options(values) | {"queries": values.queries or 1}
  cache = "dense" if values.cache is None else values.cache
  rows = []
  for name in names:
    core = chips.core(name)
    bandwidth = chips.MACHINES[core.name].chip.hbm_bandwidth
    # Bytes that a core reads in a cycle.
    rate = float(bandwidth) / core.clock_hz / core.cores
    screen.say(f"kernel, decode, for {name}")
    coded = options | {"cache": cache}
    (tile,) = cycles.count(
      _BUILDER, SLICES[name], coded, timeout_s=values.timeout
    )
    screen.say(f"loops, decode, for {name}")
    nbytes = {
      local: tiles.decode_tile(core.name, local=local, **coded)
      for local in ("kernel", "loops")
    }
    work = [run.cycles for run in tile.blocks if run.matrix_cycles]
    # Cycles to read as many keys and values without a codec.
    plain = tiles.plain_bytes(core.name, **coded) / rate
    row = {
      "chip": name,
      "bytes": nbytes["kernel"],
      "reading": nbytes["kernel"] / rate,
      "whole": min(work),
      "masked": max(work),
      "plain": plain,
      # Scaled to the kernel's bytes and to one core.
      "loops": _loops(name, coded, values.timeout)
      * nbytes["kernel"]
      / nbytes["loops"]
      * core.cores,
    }
    row["taken"] = max(row["reading"], row["whole"])
    row["slower"] = row["loops"] / row["taken"]
    row["share"] = row["taken"] / plain
    rows.append(row)
  record = {**options, "cache": cache, "rows": rows, "note": DECODE_NOTE}
  coded_cache = cache != "dense"
  lines = [
    f"{options['queries']} quer{'y' if options['queries'] == 1 else 'ies'} of "
    f"{options['heads']} heads behind keys of {options['kv_heads']}, head dim "
    f"{options['head_dim']}, "
    f"{options['dtype']}{f', cache {cache}' if coded_cache else ''}: cycles of "
    "a tile of a core",
    "",
    *strategies.markdown(
      ("chip",),
      (
        "keys and values",
        "reading them",
        "kernel: whole",
        "masked",
        "XLA's loops",
        "loops / kernel",
        *(("reading them uncoded", "kernel / that") if coded_cache else ()),
      ),
      [
        (
          row["chip"],
          console.nbytes(row["bytes"]),
          f"{row['reading']:,.0f}",
          f"{row['whole']:,}",
          f"{row['masked']:,}",
          f"{row['loops']:,.0f}",
          f"{row['slower']:.1f}",
          *(
            (f"{row['plain']:,.0f}", f"{row['share']:.2f}")
            if coded_cache
            else ()
          ),
        )
        for row in rows
      ],
    ),
    "",
    DECODE_NOTE,
  ]
  strategies.put(values, stdout, record, lines)


def _pool(
  values: flags.FlagValues,
  names: Sequence[str],
  screen: console.Screen,
  stdout: TextIO,
) -> None:
  """Reports cycles of a decode step over pages that rows share or don't."""
  options = _attention_options(values)
  shape = tiles.PoolShape(**options)
  rows: list[dict[str, Any]] = []
  for name in names:
    kernels: list[cycles.KernelTile] = []
    for builder, extra in (("pool", {}), ("ragged", {"queries_per_block": 1})):
      screen.say(f"{builder}, for {name}")
      kernels += cycles.count(
        f"ringjax.bench.tiles:{builder}",
        SLICES[name],
        options | extra,
        timeout_s=values.timeout,
      )
    rows.append({"chip": name, **tiles.pool_cycles(name, shape, kernels)})
  record = {**dataclasses.asdict(shape), "rows": rows, "note": POOL_NOTE}
  lines = [
    f"{shape.rows} rows, {shape.shared:,} shared keys and {shape.own} own, "
    f"{shape.heads} heads over {shape.kv_heads} of {shape.head_dim}, "
    f"{shape.dtype}, pages of {shape.page}: cycles of a core",
    "",
    *strategies.markdown(
      ("chip",),
      (
        "shared",
        "not shared",
        "JAX's ragged paged attention",
        "not shared / shared",
        "JAX's / shared",
      ),
      [
        (
          row["chip"],
          *(f"{row[n]:,.0f}" for n in ("together", "apart", "ragged")),
          *(f"{row[n] / row['together']:.1f}" for n in ("apart", "ragged")),
        )
        for row in rows
      ],
    ),
    "",
    POOL_NOTE,
  ]
  strategies.put(values, stdout, record, lines)


PRODUCT_NOTE = (
  "reading: codes, steps and least numbers of a block by the memory's stated "
  "rate; kernel: all its instructions and the cycles of the matrix units, of "
  "which the larger counts; nothing was measured"
)


def _product(
  values: flags.FlagValues,
  names: Sequence[str],
  screen: console.Screen,
  stdout: TextIO,
) -> None:
  """Reports cycles of a block of a weight of codes: reading and kernel."""
  rows: list[dict[str, Any]] = []
  count = values.queries or 1
  for name, codes in itertools.product(names, tiles.CODES):
    core = chips.core(name)
    bandwidth = chips.MACHINES[core.name].chip.hbm_bandwidth
    screen.say(f"product with {codes}, for {name}")
    options = {"codes": codes, "rows": count}
    (tile,) = cycles.count(
      "ringjax.bench.tiles:product",
      SLICES[name],
      options,
      timeout_s=values.timeout,
    )
    nbytes = tiles.ProductShape(**options).block_bytes(core.name)
    row = {
      "chip": name,
      "codes": codes,
      "bytes": nbytes,
      "reading": nbytes / (float(bandwidth) / core.clock_hz / core.cores),
      "bundles": sum(block.bundles for block in tile.blocks),
      "matrix": sum(block.matrix_cycles for block in tile.blocks),
    }
    row["taken"] = max(row["reading"], row["bundles"], row["matrix"])
    row["share"] = row["taken"] / row["reading"]
    rows.append(row)
  lines = [
    f"{count} row{'' if count == 1 else 's'} of bfloat16 and a weight of codes:"
    " cycles of a block of a core",
    "",
    *strategies.markdown(
      ("chip", "codes"),
      ("a block", "reading it", "kernel", "matrix units", "largest / reading"),
      [
        (
          row["chip"],
          row["codes"],
          console.nbytes(row["bytes"]),
          f"{row['reading']:,.0f}",
          f"{row['bundles']:,}",
          f"{row['matrix']:,}",
          f"{row['share']:.2f}",
        )
        for row in rows
      ],
    ),
    "",
    PRODUCT_NOTE,
  ]
  record = {"rows_of_x": count, "rows": rows, "note": PRODUCT_NOTE}
  strategies.put(values, stdout, record, lines)


# By --what: the function that reports, and the flags that it refuses.
_REPORTS: dict[str, tuple[Any, tuple[str, ...]]] = {
  "attention": (_attention, _DECODE_FLAGS),
  "decode": (_decode, _ATTENTION_FLAGS),
  "shared": (_pool, (*_ATTENTION_FLAGS, "cache", "queries")),
  "product": (
    _product,
    (*_ATTENTION_FLAGS, "heads", "kv_heads", "head_dim", "cache", "dtype"),
  ),
}


def _loops(name: str, options: Mapping[str, Any], timeout_s: float) -> float:
  """The compiler's estimate of a tile of XLA's loops, in cycles.

  The mean of a tile with a mask and a tile without.
  """
  cycles_of = []
  for trips in (0.0, 1.0):
    compiled = compiler.compile(
      _BUILDER,
      SLICES[name],
      {**options, "local": "loops", "trips": trips},
      timeout_s=timeout_s,
    )
    assert compiled.report is not None
    cycles_of.append(compiled.report.compute_cycles)
  return (cycles_of[1] - cycles_of[0]) / 2


def table(
  rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[str]:
  """Markdown table of the counts, ours next to splash's."""
  cells: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
  for row in rows:
    cells.setdefault((row["chip"], row["what"]), {})[row["kernel"]] = row
  body = []
  for key, by_kernel in cells.items():
    texts, cycle_counts = [], []
    for kernel in _KERNELS:
      row = by_kernel[kernel]
      if "refused" in row:
        texts += ["refused", ""]
      else:
        texts += [f"{row['bundles']:,}", f"{row['matrix_cycles']:,}"]
        cycle_counts.append(row["cycles"])
    ratio = (
      f"{cycle_counts[0] / cycle_counts[1]:.2f}"
      if len(cycle_counts) == 2
      else ""
    )
    body.append((*key, *texts, ratio))
  headings = (
    "ours: bundles",
    "matrix",
    "splash: bundles",
    "matrix",
    "ours / splash",
  )
  return [
    f"a tile of {options['q_block']} x {options['kv_block']}, head dim "
    f"{options['head_dim']}, {options['dtype']}",
    "",
    *strategies.markdown(("chip", "pass"), headings, body),
    *(
      f"refused: {row['chip']} {row['what']} {row['kernel']}: {row['refused']}"
      for row in rows
      if "refused" in row
    ),
    "",
    NOTE,
  ]

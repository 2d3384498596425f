"""The sub-commands explain and fit of launch.plan: strategies of attention.

`explain` ranks them on a stated or a measured machine; `fit` measures one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

from absl import app, flags

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.ops.attention.cost import select
from ringjax.ops.mask import SameSegment, Window
from ringjax.parallel import chips
from ringjax.parallel.layout import LAYOUTS
from ringjax.plan import draw, machines

from ..shared import common, console

# Default tokens of attention, bytes of a send, sides of a product; dtype.
_SIZES_CPU = ((256, 512, 1024), (1 << 16, 1 << 20, 1 << 22), (256, 512, 1024),
                "float32")  # fmt: skip
_SIZES = ((2048, 4096, 8192), (1 << 20, 1 << 24, 1 << 27),
            (2048, 4096, 8192), "bfloat16")  # fmt: skip


def refuse(
  values: flags.FlagValues, command: str, names: Sequence[str]
) -> None:
  """Refuses flags of other sub-commands.

  Raises:
    OptionError: If one of `names` was passed.
  """
  for name in names:
    if values[name].present:
      raise OptionError(
        f"--{name}",
        f"it with {command}",
        "a flag of this sub-command",
        "leave it out; see --help",
      )


def explain(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Ranks the strategies of attention on a machine."""
  common.check_plot(values)
  shards = ints("shards", values.shards)
  tokens = ints("tokens", values.tokens)
  for name, counts, max_count in (("shards", shards, 2), ("tokens", tokens, 1)):
    if counts is None or not 0 < len(counts) <= max_count:
      raise OptionError(
        f"--{name}",
        counts,
        "an int" + ", or groups,devices" * (max_count - 1),
        f"pass e.g. --{name}={8 if max_count == 2 else 65536}",
      )
  assert shards is not None and tokens is not None
  if values.chip is None:
    raise OptionError(
      "--chip", None, f"one of {', '.join(chips.MACHINES)}", "pass --chip=cpu"
    )
  parts = [Window(values.window)] if values.window is not None else []
  parts += [SameSegment()] if values.packed else []
  mask = functools.reduce(operator.and_, parts) if parts else None
  machine = machines.load(values.chip)
  # A measured machine has a link for each mesh axis, by name.
  names = ["seq"] if isinstance(machine.links, chips.Link) else [
    axis for axis, _ in machine.links
  ]  # fmt: skip
  if len(shards) == 2 and len(names) != 2:
    names = ["groups", "seq"]
  batch, keys = values.batch, values.keys or tokens[0]
  kv_heads, head_dim = values.kv_heads, values.head_dim
  ranking = select.explain(
    (batch, tokens[0], values.heads, head_dim),
    (batch, keys, kv_heads, head_dim),
    (batch, keys, kv_heads, values.value_dim or head_dim),
    shards=dict(zip(names[-len(shards):], shards, strict=True)),
    layout=None if values.layout is None else LAYOUTS[values.layout],
    is_causal=values.causal,
    mask=mask,
    dtype=values.dtype,
    machine=machine,
    backward=values.backward,
    offset=values.offset,
    wire=values.wire,
    longest_document=values.longest_document,
    local=values.local,
    show=False,
  )  # fmt: skip
  sources = dict.fromkeys((machine.chip.source, machine.source))
  text = [str(ranking), "", f"{machine.name}: {'; '.join(sources)}"]
  put(values, stdout, ranking.record(), text)
  if values.plot is not None:
    rows = [
      (name, way.forward_s, way.backward_s)
      for name, way in ranking.ways.items()
    ]
    draw.strategies(rows, values.plot, ranking.title)
    console.Screen("plan", stderr).say(f"wrote {values.plot}")


def measure(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Measures the devices and links and writes the machine to --out."""
  if values.out is None:
    raise OptionError(
      "--out", None, "a file to write", "pass --out=machine.json"
    )
  common.check_output(values, "out")
  sizes = [
    ints(name, values[name].value) for name in ("tokens", "bytes", "sides")
  ]
  # These start JAX's devices, which other sub-commands don't need.
  common.start(values)
  import jax

  from ringjax.bench import machine

  mesh = common.mesh(values.mesh)
  device = mesh.devices.flat[0]
  default = _SIZES_CPU if device.platform == "cpu" else _SIZES
  tokens, nbytes, sides = (
    size or default_size
    for size, default_size in zip(sizes, default[:3], strict=True)
  )
  measured = machine.measure(
    mesh,
    name=values.name
    or f"measured-{chips.machine_name(device.device_kind) or 'own'}",
    dtype=values.dtype or default[3],
    tokens=tokens,
    nbytes=nbytes,
    sides=sides,
    rounds=values.rounds,
    stream=stderr,
  )
  if jax.process_index() == 0:
    machines.write(values.out, measured)
    record = {"path": values.out, "machine": measured.record()}
    put(values, stdout, record, _lines(measured, values.out))


def _lines(machine: chips.Machine, path: str) -> list[str]:
  chip = machine.chip
  forward, backward = (100 * part for part in machine.part("blockwise"))
  lines = [f"{machine.name}: {machine.source}"]
  for dtype, rate in dict(chip.flops).items():
    lines.append(f"products, {dtype}: {rate / 1e9:,.1f} GFLOP/s")
  lines += [
    f"attention: {forward:.0f} % of it forward, {backward:.0f} % backward",
    f"fixed: {1e6 * machine.hop_s:.1f} us a hop, {1e6 * machine.call_s:.1f} a "
    "call",
    f"memory: {console.nbytes(chip.hbm_bytes)}, "
    f"{chip.hbm_bandwidth / 1e9:.1f} GB/s",
  ]
  links = {} if isinstance(machine.links, chips.Link) else dict(machine.links)
  for axis, link in links.items():
    ways = "a switch" if link.switched else f"{link.ports} ports"
    lines.append(
      f"{axis}: {link.bandwidth / 1e9:.2f} GB/s, "
      f"{1e6 * link.latency_s:.1f} us, {ways}"
    )
  return [*lines, f"wrote {path}; use it with explain --chip={path}"]


def chosen_names(
  flag: str, given: Sequence[str] | None, all_: Collection[str]
) -> list[str]:
  """Names that were passed to a flag; all known names by default.

  Raises:
    OptionError: If a name is unknown.
  """
  return [one_of(f"--{flag}", name, all_) for name in given or all_]


def put(
  values: flags.FlagValues, stdout: TextIO, record: object, lines: list[str]
) -> None:
  """Prints a result: with --json the record, else the lines."""
  text = json_text(record) if values.json else "\n".join(lines)
  print(text, file=stdout, flush=True)


def markdown(
  left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]
) -> list[str]:
  """A Markdown table with left-aligned, then right-aligned columns."""
  heads = (f" {text} " if text else " " for text in (*left, *right))
  return [
    f"|{'|'.join(heads)}|",
    "|" + "---|" * len(left) + "---:|" * len(right),
    *(f"| {' | '.join(row)} |" for row in rows),
  ]


def pair(name: str, text: str, form: str) -> tuple[int, int]:
  """The two positive numbers of a flag such as 8x8."""
  try:
    first, second = (positive_int("", int(n)) for n in text.split("x"))
  except ValueError:
    raise OptionError(name, text, form, "write it like 8x8") from None
  return first, second


def ints(name: str, given: Sequence[str] | None) -> tuple[int, ...] | None:
  """Parses the values of a flag as ints; None if it was not passed."""
  if given is None:
    return None
  try:
    return tuple(int(v) for v in given)
  except ValueError:
    raise app.UsageError(
      f"--{name}: want ints, got {','.join(given)}"
    ) from None

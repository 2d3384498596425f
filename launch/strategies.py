"""The sub-commands of launch.plan about strategies of attention.

`explain` ranks them on a stated or a measured machine; `fit` measures one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

from absl import app, flags

from launch import common, console
from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.ops.attention import select
from ringjax.ops.mask import SameSegment, Window
from ringjax.parallel import chips
from ringjax.parallel.layout import Contiguous, Striped, Zigzag
from ringjax.plan import draw, machines

# Tokens of a call of attention, bytes of a send, sides of a product; dtype.
_SIZES_CPU = ((256, 512, 1024), (1 << 16, 1 << 20, 1 << 22), (256, 512, 1024),
                "float32")  # fmt: skip
_SIZES = ((2048, 4096, 8192), (1 << 20, 1 << 24, 1 << 27),
            (2048, 4096, 8192), "bfloat16")  # fmt: skip
LAYOUTS = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "zigzag": Zigzag(),
}


def refuse(
  values: flags.FlagValues, command: str, names: Sequence[str]
) -> None:
  """Refuses flags of other sub-commands.

  Raises:
    OptionError: one of `names` was given.
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
  common.check_files(values, "plot")
  shards = ints("shards", values.shards)
  tokens = ints("tokens", values.tokens)
  for name, found, most in (("shards", shards, 2), ("tokens", tokens, 1)):
    if found is None or not 0 < len(found) <= most:
      raise OptionError(
        f"--{name}",
        found,
        "an int" + ", or groups,devices" * (most - 1),
        f"pass e.g. --{name}={8 if most == 2 else 65536}",
      )
  assert shards is not None and tokens is not None
  if values.chip is None:
    raise OptionError(
      "--chip", None, f"one of {', '.join(chips.MACHINES)}", "pass --chip=cpu"
    )
  parts = [Window(values.window)] if values.window is not None else []
  parts += [SameSegment()] if values.packed else []
  mask = functools.reduce(operator.and_, parts) if parts else None
  made = machines.load(values.chip)
  # A machine that was measured knows its axes by name.
  names = ["seq"] if isinstance(made.links, chips.Link) else [
    axis for axis, _ in made.links
  ]  # fmt: skip
  if len(shards) == 2 and len(names) != 2:
    names = ["groups", "seq"]
  batch, keys = values.batch, values.keys or tokens[0]
  kv_heads, head_dim = values.kv_heads, values.head_dim
  found = select.explain(
    (batch, tokens[0], values.heads, head_dim),
    (batch, keys, kv_heads, head_dim),
    (batch, keys, kv_heads, values.value_dim or head_dim),
    shards=dict(zip(names[-len(shards):], shards, strict=True)),
    layout=None if values.layout is None else LAYOUTS[values.layout],
    is_causal=values.causal,
    mask=mask,
    dtype=values.dtype,
    machine=made,
    backward=values.backward,
    offset=values.offset,
    wire=values.wire,
    longest_document=values.longest_document,
    local=values.local,
    show=False,
  )  # fmt: skip
  sources = dict.fromkeys((made.chip.source, made.source))
  text = [str(found), "", f"{made.name}: {'; '.join(sources)}"]
  put(values, stdout, found.record(), text)
  if values.plot is not None:
    rows = [
      (name, one.forward_s, one.backward_s) for name, one in found.ways.items()
    ]
    draw.strategies(rows, values.plot, found.title)
    console.Screen("plan", stderr).say(f"wrote {values.plot}")


def measure(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Measures the devices and links and writes the machine to --out."""
  if values.out is None:
    raise OptionError(
      "--out", None, "a file to write", "pass --out=machine.json"
    )
  common.check_files(values, "out")
  given = [
    ints(name, values[name].value) for name in ("tokens", "bytes", "sides")
  ]
  # These start devices; the rest does without.
  common.start(values)
  import jax

  from ringjax.bench import machine

  mesh = common.mesh(values.mesh)
  device = mesh.devices.flat[0]
  default = _SIZES_CPU if device.platform == "cpu" else _SIZES
  tokens, nbytes, sides = (
    one or other for one, other in zip(given, default[:3], strict=True)
  )
  made = machine.measure(
    mesh,
    name=values.name or f"measured-{chips.known(device.device_kind) or 'own'}",
    dtype=values.dtype or default[3],
    tokens=tokens,
    nbytes=nbytes,
    sides=sides,
    rounds=values.rounds,
    stream=stderr,
  )
  if jax.process_index() == 0:
    machines.write(values.out, made)
    record = {"path": values.out, "machine": made.record()}
    put(values, stdout, record, _words(made, values.out))


def _words(made: chips.Machine, path: str) -> list[str]:
  chip = made.chip
  forward, backward = (100 * part for part in made.part("blockwise"))
  lines = [f"{made.name}: {made.source}"]
  for dtype, rate in dict(chip.flops).items():
    lines.append(f"products, {dtype}: {rate / 1e9:,.1f} GFLOP/s")
  lines += [
    f"attention: {forward:.0f} % of it forward, {backward:.0f} % backward",
    f"fixed: {1e6 * made.hop_s:.1f} us a hop, {1e6 * made.call_s:.1f} a call",
    f"memory: {console.nbytes(chip.hbm_bytes)}, "
    f"{chip.hbm_bandwidth / 1e9:.1f} GB/s",
  ]
  links = {} if isinstance(made.links, chips.Link) else dict(made.links)
  for axis, link in links.items():
    ways = "a switch" if link.switched else f"{link.ports} ports"
    lines.append(
      f"{axis}: {link.bandwidth / 1e9:.2f} GB/s, "
      f"{1e6 * link.latency_s:.1f} us, {ways}"
    )
  return [*lines, f"wrote {path}; use it with explain --chip={path}"]


def known(
  flag: str, given: Sequence[str] | None, all_: Collection[str]
) -> list[str]:
  """The names that a flag was given, or all that there are.

  Raises:
    OptionError: a name is not among them.
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
  """A table in Markdown, of columns that are aligned left, then right."""
  heads = (f" {text} " if text else " " for text in (*left, *right))
  return [
    f"|{'|'.join(heads)}|",
    "|" + "---|" * len(left) + "---:|" * len(right),
    *(f"| {' | '.join(row)} |" for row in rows),
  ]


def ints(name: str, given: Sequence[str] | None) -> tuple[int, ...] | None:
  """The values of a flag as ints; None if it was not given."""
  if given is None:
    return None
  try:
    return tuple(int(v) for v in given)
  except ValueError:
    raise app.UsageError(
      f"--{name}: want ints, got {','.join(given)}"
    ) from None

"""The tables of the Ring Attention paper, and ours by its formulas.

A device folds a block of c keys into c queries while the next block of keys and
values is on its way: 4 c^2 d FLOPs against 4 c d bytes. With F FLOP/s and B
bytes/s the hop is hidden from

  c >= F / B                                        (Table 2)

and six blocks live at once (query, key, value, the two that come, output), so
that a device holds 6 c tokens at least.

What a layer holds at most, in 2-byte numbers, of b rows of s tokens and width h
(Table 1):

  plain             2 b h s^2
  memory-efficient  8 b s h      attention in blocks, the feedforward whole
  blockwise         2 b s h      both in blocks
  ring              6 b c h      c tokens on a device

`longest` fills a device's memory (Table 3): weights, gradients and two moments
of 4 bytes each, sharded over all devices; the input of each layer, kept for the
backward pass; and what one layer holds, all in 4-byte numbers. A device has one
row, or its part of a row that a ring shares. Left out: logits, gathered weights
and what a compiler keeps besides. The published figures are of programs that
ran, tried in powers of two.

Ref: Liu, Zaharia, Abbeel 2023 (arXiv 2310.01889), Tables 1 to 3.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

from ringjax.checks import number, one_of, positive_int
from ringjax.plan import files

_GIVEN = tomllib.loads(
  pathlib.Path(__file__).with_name("ring_tables.toml").read_text("utf-8")
)
WAYS = ("plain", "memory-efficient", "blockwise", "ring")
MODELS: dict[str, tuple[int, int, float]] = {
  name: tuple(row) for name, row in _GIVEN["models"].items()
}
# Bytes of a number, and of a weight with its gradient and moments.
_NUMBER, _STATES = 4, 16


def least_block(flops: int | float, bandwidth: int | float) -> float:
  """Tokens of the smallest block whose work hides a hop, F / B.

  Args:
    flops: FLOP/s of a device.
    bandwidth: bytes/s of a link, one way.
  """
  number("flops", flops, above=0)
  number("bandwidth", bandwidth, above=0)
  return flops / bandwidth


def least_sequence(flops: int | float, bandwidth: int | float) -> float:
  """Tokens that a device needs for its smallest block: six of them."""
  return 6 * least_block(flops, bandwidth)


def layer_bytes(way: str, rows: int, tokens: int | float, width: int) -> float:
  """Bytes that a layer holds at most, in 2-byte numbers (Table 1).

  Args:
    way: of `WAYS`.
    rows: b.
    tokens: s; of a ring c, those on a device.
    width: h.
  """
  one_of("way", way, WAYS)
  b, s, h = positive_int("rows", rows), number("tokens", tokens), width
  if way == "plain":
    return 2.0 * b * h * s**2
  return (
    {"memory-efficient": 8.0, "blockwise": 2.0, "ring": 6.0}[way] * b * s * h
  )


def longest(
  way: str,
  *,
  layers: int,
  width: int,
  weights: int | float,
  devices: int,
  memory_bytes: int | float,
  ring: int | None = None,
) -> int:
  """Tokens of the longest row that training fits, 0 where none does.

  Args:
    way: of `WAYS`.
    layers: L.
    width: h.
    weights: of the model.
    devices: over which weights are sharded.
    memory_bytes: of a device.
    ring: devices that share a row, of the way "ring"; default: all.
  """
  one_of("way", way, WAYS)
  positive_int("devices", devices)
  if ring is not None:
    positive_int("ring", ring)
  room = memory_bytes - _STATES * weights / devices
  if room <= 0:
    return 0
  scale = _NUMBER / 2
  kept = _NUMBER * layers * width  # bytes a token
  if way != "plain":
    tokens = room / (kept + scale * layer_bytes(way, 1, 1, width))
    return int(tokens) * (ring or devices if way == "ring" else 1)
  # a s^2 + kept s = room
  a = scale * layer_bytes(way, 1, 1, width)
  return int((math.sqrt(kept**2 + 4 * a * room) - kept) / (2 * a))


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HidingRow:
  """A row of Table 2, in tokens.

  Attributes:
    machine: its name.
    flops: FLOP/s.
    bandwidth: bytes/s of a link.
    block: the published smallest block.
    our_block: F / B.
    sequence: the published tokens of a device.
    our_sequence: six blocks.
  """

  machine: str
  flops: float
  bandwidth: float
  block: float
  our_block: float
  sequence: float
  our_sequence: float

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return files.record(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextRow:
  """A model on a machine of Table 3: tokens by `WAYS`.

  Attributes:
    machine: its name.
    model: its name.
    devices: how many.
    ring: of them that share a row, by the published ring and blockwise.
    published: as in the paper.
    ours: by the formulas.
    slice: what the TPU compiler calls it; "" where it knows none.
  """

  machine: str
  model: str
  devices: int
  ring: int
  published: tuple[int, ...]
  ours: tuple[int, ...]
  slice: str = ""

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return files.record(self)


def hiding_rows() -> Iterator[HidingRow]:
  """Table 2, published beside ours."""
  for row in _GIVEN["hides"]:
    flops, bandwidth = row["flops"], row["bandwidth"]
    yield HidingRow(
      machine=row["machine"],
      flops=flops,
      bandwidth=bandwidth,
      block=1e3 * row["block"],
      our_block=least_block(flops, bandwidth),
      sequence=1e3 * row["sequence"],
      our_sequence=least_sequence(flops, bandwidth),
    )


def context_rows() -> Iterator[ContextRow]:
  """Table 3, published beside ours."""
  for row in _GIVEN["contexts"]:
    for model, published in row["tokens"].items():
      layers, width, weights = MODELS[model]
      ring = published[3] // published[2]
      yield ContextRow(
        machine=row["machine"],
        model=model,
        devices=row["devices"],
        ring=ring,
        published=tuple(1000 * n for n in published),
        ours=tuple(
          longest(
            way,
            layers=layers,
            width=width,
            weights=weights,
            devices=row["devices"],
            memory_bytes=1e9 * row["memory_gb"],
            ring=ring,
          )
          for way in WAYS
        ),
        slice=row.get("slice", ""),
      )

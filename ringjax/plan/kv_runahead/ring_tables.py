"""Tables of the Ring Attention paper, published and computed by its formulas.

A device computes attention of c queries on a block of c keys while the next
block of keys and values is in flight: 4 c^2 d FLOPs against 4 c d bytes. With
F FLOP/s and B bytes/s the hop is hidden from

  c >= F / B                                        (Table 2)

and six blocks are live at once (query, key, value, the two that arrive,
output), so that a device needs at least 6 c tokens.

Maximum memory of a layer, in 2-byte numbers, for b rows of s tokens and width h
(Table 1):

  plain             2 b h s^2
  memory-efficient  8 b s h      attention in blocks, the feedforward whole
  blockwise         2 b s h      both in blocks
  ring              6 b c h      c tokens on a device

`longest` counts the memory of a training step on a device (Table 3), all in
4-byte numbers, for a row of s tokens, or for the part of a row that a device of
a ring has::

  states     weights, gradients and two moments, sharded over all devices
  gathered   a layer's weights and their gradient
  kept       the input of each layer, L h a token: all else is recomputed
  layer      memory of the backward pass of a layer, a token: 8 h for inputs of
             matrices (of both norms, of queries, keys, values and the output),
             h for the gradient, and the larger of 4 h of gradients and 3 f of
             those in the feedforward, which keeps another 3 f; in blocks that
             does not grow with s; a ring adds 4 h for keys and values that
             arrive, and their gradients
  scores     plain alone: their softmax and its gradient, 2 n s^2
  logits     of the whole vocabulary and their gradient, 2 V a token

A compiler's further buffers are left out. `tried` is the largest power of two
of 1,024 tokens that fits, as in the published figures. A ring has all devices.

Those come from programs that ran, and no count of this form explains all of
them: for 7B in blocks 64 Ki tokens do not fit on 8 A100s and 128 Ki fit on 32.
If a token takes m bytes and a weight w bytes over all devices, then
64 Ki m + 6.74e9 w / 8 > 80e9 >= 128 Ki m + 6.74e9 w / 32, so that w > 54 bytes;
but 13B, which trains on 8, would then have 88e9 bytes on each for its states
alone. The paper does not state the other settings of a row.

Ref: Liu, Zaharia, Abbeel 2023 (arXiv 2310.01889), Tables 1 to 3.
"""

from __future__ import annotations

import dataclasses
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
# Bytes of a number, and of a weight with its gradient and moments.
_NUMBER, _STATES = 4, 16
# Tokens that are tried are powers of two times this.
_KIBI = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
  """Sizes of a decoder with gated feedforwards.

  Attributes:
    layers: L, number of layers.
    width: h, width of the hidden states.
    hidden: f, width of the feedforward.
    heads: n, number of heads.
    weights: Total number of weights.
    vocab: V, size of the vocabulary.
  """

  layers: int
  width: int
  hidden: int
  heads: int
  weights: int | float
  vocab: int = 32_000

  def __post_init__(self) -> None:
    for name in ("layers", "width", "hidden", "heads", "vocab"):
      positive_int(name, getattr(self, name))
    number("weights", self.weights, above=0)


MODELS = {name: TrainedModel(**row) for name, row in _GIVEN["models"].items()}


def least_block(flops: int | float, bandwidth: int | float) -> float:
  """Tokens of the smallest block whose work hides a hop, F / B.

  Args:
    flops: FLOP/s of a device.
    bandwidth: Bandwidth of a link one way, in bytes/s.
  """
  number("flops", flops, above=0)
  number("bandwidth", bandwidth, above=0)
  return flops / bandwidth


def least_sequence(flops: int | float, bandwidth: int | float) -> float:
  """Tokens that a device needs for its smallest block: six of them."""
  return 6 * least_block(flops, bandwidth)


def layer_bytes(way: str, rows: int, tokens: int | float, width: int) -> float:
  """Maximum bytes of a layer, in 2-byte numbers (Table 1).

  Args:
    way: Method, one of `WAYS`.
    rows: b, number of rows.
    tokens: s, tokens of a row; for a ring c, those on a device.
    width: h, width of the hidden states.
  """
  one_of("way", way, WAYS)
  b, s, h = positive_int("rows", rows), number("tokens", tokens), width
  if way == "plain":
    return 2.0 * b * h * s**2
  return (
    {"memory-efficient": 8.0, "blockwise": 2.0, "ring": 6.0}[way] * b * s * h
  )


def step_bytes(
  way: str,
  model: TrainedModel,
  tokens: int | float,
  devices: int,
  ring: int | None = None,
) -> float:
  """Bytes of a training step on a device, counted as in the module's docstring.

  Args:
    way: Method, one of `WAYS`.
    model: Sizes of the model.
    tokens: Tokens of a row.
    devices: Number of devices over which weights are sharded.
    ring: Number of devices that share a row, for "ring"; default: all.
  """
  one_of("way", way, WAYS)
  positive_int("devices", devices)
  shared = devices if ring is None else positive_int("ring", ring)
  h, f = model.width, model.hidden
  s = tokens / shared if way == "ring" else tokens
  whole_feedforward = way in ("plain", "memory-efficient")
  layer = (
    8 * h + h + (3 * f + max(3 * f, 4 * h) if whole_feedforward else 4 * h)
  )
  if way == "ring":
    layer += 4 * h
  token_numbers = model.layers * h + layer + 2 * model.vocab
  scores = 2 * model.heads * s**2 if way == "plain" else 0
  gathered = 2 * model.weights / model.layers
  return _STATES * model.weights / devices + _NUMBER * (
    gathered + token_numbers * s + scores
  )


def longest(
  way: str,
  model: TrainedModel,
  *,
  devices: int,
  memory_bytes: int | float,
  ring: int | None = None,
) -> int:
  """Tokens of the longest row that fits a training step; 0 if none does.

  Args:
    way: Method, one of `WAYS`.
    model: Sizes of the model.
    devices: Number of devices over which weights are sharded.
    memory_bytes: Memory of a device, in bytes.
    ring: Number of devices that share a row, for "ring"; default: all.
  """
  enough_memory = lambda n: (
    step_bytes(way, model, n, devices, ring) <= memory_bytes
  )
  if not enough_memory(1):
    return 0
  low = 1
  while enough_memory(2 * low):
    low *= 2
  high = 2 * low
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if enough_memory(middle) else (low, middle)
  return low


def tried(tokens: int) -> int:
  """Largest power of two times 1,024 tokens that is not larger, or 0.

  Args:
    tokens: Tokens that fit, see `longest`.
  """
  count = tokens // _KIBI
  return _KIBI << count.bit_length() - 1 if count else 0


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HidingRow:
  """A row of Table 2, in tokens.

  Attributes:
    machine: Name of the machine.
    flops: FLOP/s of a device.
    bandwidth: Bandwidth of a link, in bytes/s.
    block: Published smallest block.
    our_block: F / B.
    sequence: Published tokens of a device.
    our_sequence: Six blocks.
  """

  machine: str
  flops: float
  bandwidth: float
  block: float
  our_block: float
  sequence: float
  our_sequence: float

  def record(self) -> dict[str, Any]:
    """Fields as a dict for JSON."""
    return files.record(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextRow:
  """A model on a machine of Table 3: tokens by `WAYS`.

  Attributes:
    machine: Name of the machine.
    model: Name of the model.
    devices: Number of devices; a ring has all of them.
    published: Tokens as in the paper.
    longest: Tokens that fit by the count.
    ours: Powers of two of these, which the paper tried.
    slice: Name of the slice for the TPU compiler, or "".
  """

  machine: str
  model: str
  devices: int
  published: tuple[int, ...]
  longest: tuple[int, ...]
  ours: tuple[int, ...]
  slice: str = ""

  def record(self) -> dict[str, Any]:
    """Fields as a dict for JSON."""
    return files.record(self)


def hiding_rows() -> Iterator[HidingRow]:
  """Yield the rows of Table 2, published and computed."""
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
  """Yield the rows of Table 3; ours use no published figure."""
  for row in _GIVEN["contexts"]:
    for model, published in row["tokens"].items():
      longest_tokens = tuple(
        longest(
          way,
          MODELS[model],
          devices=row["devices"],
          memory_bytes=1e9 * row["memory_gb"],
        )
        for way in WAYS
      )
      yield ContextRow(
        machine=row["machine"],
        model=model,
        devices=row["devices"],
        published=tuple(_KIBI * n for n in published),
        longest=longest_tokens,
        ours=tuple(tried(n) for n in longest_tokens),
        slice=row.get("slice", ""),
      )

"""Sizes, bytes and seconds of the parts of which strategies are made.

Law: see `predict`, whose terms these are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ringjax.ops.attention import pair_counts
from ringjax.ops.attention.blockwise import Blockwise, joined
from ringjax.ops.attention.call_shape import WIRES, CallShape, Prediction
from ringjax.ops.attention.ring import cut_hops
from ringjax.ops.mask import (
  Everything,
  Mask,
)
from ringjax.parallel.chips import Link, Machine, number_bytes
from ringjax.parallel.layout import Layout

# Bytes of a number that is summed.
WIDE = 4


# ---------------------------------------------------------------------------
# Roads
# ---------------------------------------------------------------------------


class Interconnect:
  """`size` devices, `stride` places apart, and the links that join them."""

  def __init__(
    self,
    size: int,
    stride: int,
    fast: tuple[str, Link],
    slow: tuple[str, Link] | None,
    island: int | None,
    *,
    far: float = 1.0,
    wraps: bool = True,
  ):
    self.size, self.far, self.wraps = size, far, wraps
    self.crosses = (
      slow is not None and island is not None and size * stride > island
    )
    self.island = max(1, island // stride) if island is not None else size
    inside = not self.crosses or self.island > 1
    self.fast = fast if inside else None
    self.slow = slow if self.crosses else None

  @property
  def links(self) -> list[tuple[str, Link]]:
    return [link for link in (self.fast, self.slow) if link is not None]

  def names(self) -> list[str]:
    return [name for name, _ in self.links]

  def send_s(self, nbytes: float, messages: int = 1, shift: int = 1) -> float:
    """Of sends to the device `shift` on; a border makes all wait."""
    if self.size == 1:
      return 0.0
    times = []
    for _, link in self.links:
      far = 1.0 if link.switched else self.far * link.far(shift, self.size)
      times.append(link.send_s(nbytes, messages, far=far))
    return max(times)

  def both_s(self, one: float, other: float) -> float:
    """Of sends to both neighbours."""
    return max(link.both_s(one, other) for _, link in self.links)

  def gather_s(self, nbytes: float) -> float:
    """Islands bring each other's in by all their links at once."""
    others = self.size - 1
    if self.slow is None:
      return self.links[0][1].gather_s(nbytes, self.size, self.wraps)
    outside = nbytes * (self.size - self.island) / others / self.island
    islands = -(-self.size // self.island)
    times = [self.slow[1].gather_s(outside, islands)]
    if self.fast is not None:
      times.append(self.fast[1].gather_s(nbytes, self.island, False))
    return max(times)

  def exchange_s(self, nbytes: float) -> float:
    """Each device trades with those outside of its island by its own link."""
    others = self.size - 1
    if self.slow is None:
      return self.links[0][1].exchange_s(nbytes, self.size, self.wraps)
    outside = nbytes * (self.size - self.island) / others
    islands = -(-self.size // self.island)
    times = [self.slow[1].exchange_s(outside, islands)]
    if self.fast is not None:
      inside = nbytes * (self.island - 1) / others
      times.append(self.fast[1].exchange_s(inside, self.island, False))
    return max(times)


def roads(
  call: CallShape, machine: Machine, inner: int
) -> tuple[Interconnect, Interconnect]:
  """Among `inner` consecutive devices, and from group to group."""
  size = call.shards
  fast, last = call.axes[-1]
  near = fast, machine.link(fast)
  # Groups lie along the same walk of neighbours, `inner` places apart.
  far = near[1].far(inner, size)
  if len(call.axes) == 2 and not isinstance(machine.links, Link):
    slow = call.axes[0][0]
    wide, island, far = (slow, machine.link(slow)), last, 1.0
  else:
    island = machine.island
    wide = None if machine.between is None else ("between", machine.between)
    far = 1.0 if len(call.axes) == 2 else far
  return (
    Interconnect(inner, 1, near, wide, island, wraps=inner == size),
    Interconnect(size // inner, inner, near, wide, island, far=far),
  )


# ---------------------------------------------------------------------------
# What all strategies share
# ---------------------------------------------------------------------------


def tile_blocks(call: CallShape, t: int, s: int) -> tuple[int, int]:
  """The tile for t queries over s keys, (q_block, kv_block).

  As `Blockwise().blocks`, and where a mask can leave part of a hop at most an
  eighth of either side, though not below 128: of a hop that is half masked
  the tiles on the diagonal then cost an eighth on top at most.
  """
  blocks = Blockwise().blocks(t, s)
  if isinstance(call.seen, Everything):
    return blocks
  q, k = (min(b, max(128, n // 8)) for b, n in zip(blocks, (t, s), strict=True))
  return Blockwise(q, k).blocks(t, s)


@dataclasses.dataclass
class Traffic:
  """What a strategy's sends add up to, of one device."""

  by_link: dict[str, float] = dataclasses.field(default_factory=dict)
  sends: int = 0

  def add(self, road: Interconnect, nbytes: float, messages: int) -> None:
    if not messages:
      return
    for name in road.names():
      self.by_link[name] = self.by_link.get(name, 0.0) + nbytes
    self.sends += messages


class CostTerms:
  """A call on a machine in a layout: sizes, bytes and seconds of the parts."""

  def __init__(
    self, call: CallShape, machine: Machine, layout: Layout, wire: str | None
  ):
    self.call, self.machine = call, machine
    self.layout, self.wire = layout, wire
    self.size = call.shards
    self.t = layout.local_length(call.queries, self.size)
    self.s = layout.local_length(call.keys, self.size)
    self.blocks = tile_blocks(call, self.t, self.s)
    self.number = number_bytes(call.dtype)
    h, j = call.head_dim, call.value_dim or call.head_dim
    self.h, self.j = h, j
    self.flops = (2 * (h + j), 2 * (3 * h + 2 * j))
    self.bill = Traffic()
    self.all, self.none = roads(call, machine, self.size)
    # Of one shard: numbers of queries, outputs, keys with values.
    self.q = float(call.batch * self.t * call.heads * h)
    self.o = float(call.batch * self.t * call.heads * j)
    self.rows = float(call.batch * self.t * call.heads)
    self.kv = float(call.batch * self.s * call.kv_heads * (h + j))
    self.kv_bytes = self.kv * self.number
    self.sum_bytes = self.kv * WIDE
    self.wire_bytes = self.kv * WIRES[wire] if wire else self.kv_bytes
    # Reading codes and writing numbers, of each block that arrives.
    self.decode_s = (
      (self.wire_bytes + self.kv_bytes) / machine.chip.hbm_bandwidth
      if wire
      else 0.0
    )

  @functools.cached_property
  def pairs(self) -> np.ndarray:
    """[R, R], by shards of queries and of keys."""
    c = self.call
    return pair_counts.pairs(
      self.layout, c.seen, self.size, (c.queries, c.keys), self.blocks, c.offset
    )

  def by_hop(self, hops: Any) -> np.ndarray:
    """Pairs of each shard with the keys so many places behind: [hops, R]."""
    i = np.arange(self.size)
    return self.pairs[i, (i - np.asarray(hops)[:, None]) % self.size]

  @property
  def directions(self) -> tuple[int, int]:
    """(from behind, from ahead): hops of a ring, cut to the mask's reach."""
    return self.cut(self.call.mask)

  def cut(self, mask: Mask) -> tuple[int, int]:
    behind, ahead = mask.reach
    if behind is None or ahead is None or self.call.offset:
      return self.size - 1, 0
    needed = pair_counts.reached(
      self.layout, self.size, (self.t, self.s), (behind, ahead)
    )
    return cut_hops(needed)

  def seconds(
    self,
    pairs: Any,
    backward: bool,
    *,
    heads: float | None = None,
    taken: float,
    put: float,
    calls: int = 1,
  ) -> Any:
    """Seconds of calls of the local algorithm that compute `pairs` in all.

    Args:
      pairs: of one example and head, any shape.
      backward: which pass.
      heads: query heads; default all of a device.
      taken: bytes of operands that are read at least.
      put: bytes of sums that are read and written back.
      calls: how many there are.
    """
    c, chip = self.call, self.machine.chip
    part = self.machine.part(c.local)[backward]
    heads = c.heads if heads is None else heads
    work_s = (
      np.asarray(pairs, float) * c.batch * heads * self.flops[backward]
      / (chip.rate(c.dtype) * part)
    )  # fmt: skip
    read_s = np.where(np.asarray(pairs) > 0, taken / chip.hbm_bandwidth, 0.0)
    return (
      np.maximum(work_s, read_s)
      + calls * (put / chip.hbm_bandwidth + self.machine.hop_s)
    )  # fmt: skip

  def hop_s(self, pairs: Any, backward: bool, calls: int = 1) -> Any:
    """As `seconds`, of hops in which keys visit queries."""
    q = (self.q + (self.o + self.q) * backward) * self.number
    taken = q + self.kv_bytes
    return self.seconds(
      pairs, backward, taken=taken, put=self.sums(backward), calls=calls
    )

  def sums(self, backward: bool) -> float:
    """Bytes of sums that a hop takes from memory and puts back."""
    if not backward:
      return 2 * (self.o + 2 * self.rows) * WIDE
    return 2 * self.q * WIDE + 3 * self.sum_bytes

  def resident(self, backward: bool) -> float:
    """Bytes of operands, results, sums and score tiles of a call."""
    q_block, kv_block = self.blocks
    c = self.call
    rows = q_block * joined(-(-self.t // q_block), q_block)
    tiles = 2 * c.batch * c.heads * rows * kv_block * WIDE
    held = (self.q + self.o) * self.number + self.kv_bytes + self.rows * WIDE
    if not backward:
      return held + (self.o + 2 * self.rows) * WIDE + tiles
    # The cotangent and a transposed copy of it and of the queries; dq, dk, dv.
    more = (2 * self.o + self.q) * self.number + self.rows * WIDE
    return held + more + self.q * WIDE + self.sum_bytes + 2 * tiles

  def passes(self) -> tuple[bool, ...]:
    return (False, True) if self.call.backward else (False,)

  def prediction(
    self,
    strategy: str,
    times: list[float],
    computing: float,
    extra_bytes: tuple[float, float],
    notes: tuple[str, ...] = (),
    **options: Any,
  ) -> Prediction:
    """From seconds of the passes and what the shards compute in them."""
    times = [t + self.machine.call_s for t in times]
    backward = self.call.backward
    q_block, kv_block = self.blocks
    if self.wire:
      options["wire"] = self.wire
      notes = (*notes, "codes lose digits")
    return Prediction(
      strategy=strategy,
      options={**options, "q_block": q_block, "kv_block": kv_block},
      layout=self.layout,
      forward_s=times[0],
      backward_s=times[1] if backward else 0.0,
      bytes_by_link=dict(self.bill.by_link),
      sends=self.bill.sends,
      memory_bytes=self.resident(backward) + extra_bytes[backward],
      busy=min(1.0, computing / (self.size * sum(times))),
      notes=notes,
    )


def turn(
  compute: np.ndarray, sends: Any, *, ways: tuple[int, ...] = (1,)
) -> np.ndarray:
  """When each shard is done with a ring: seconds [..., R].

  Args:
    compute: seconds of each hop on each shard, [n, ..., R]; axes between are
      of rings that have nothing to do with each other.
    sends: seconds of the sends of each hop, [n]; 0 where there are none.
    ways: by how many places they go, 1 or -1 or both at once.
  """
  at = np.zeros(compute.shape[1:])
  for busy, send in zip(compute, sends, strict=True):
    done = at + busy
    if send:
      for way in ways:
        there = np.maximum(at, np.roll(at, -way, -1)) + send
        done = np.maximum(done, np.maximum(there, np.roll(there, way, -1)))
    at = done
  return at

"""Cost terms of attention strategies: sizes, bytes and seconds of their parts.

Ref: `predict` documents the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ringjax.ops.attention.blockwise import Blockwise, joined
from ringjax.ops.attention.cost import pair_counts
from ringjax.ops.attention.cost.call_shape import CallShape, Prediction
from ringjax.ops.attention.strategies.ring import cut_hops
from ringjax.ops.attention.strategies.wire_format import WireLike, wire_of
from ringjax.ops.mask import (
  Everything,
  Mask,
)
from ringjax.parallel.chips import Link, Machine, number_bytes
from ringjax.parallel.layout import Layout

# Bytes of a float32 number of a sum.
WIDE = 4


class Interconnect:
  """Devices of a group, the links that join them, and what they send.

  Its `send`, `gather` and `exchange` give seconds and count bytes and messages
  of one device in `traffic`.
  """

  def __init__(
    self,
    traffic: Traffic,
    size: int,
    stride: int,
    fast: tuple[str, Link],
    slow: tuple[str, Link] | None,
    island: int | None,
    *,
    far: float = 1.0,
    wraps: bool = True,
  ):
    """Join `size` devices, `stride` places apart; `slow` joins islands."""
    self.traffic, self.size, self.far, self.wraps = traffic, size, far, wraps
    crosses = slow is not None and island is not None and size * stride > island
    self.island = max(1, island // stride) if island is not None else size
    self.fast = fast if not crosses or self.island > 1 else None
    self.slow = slow if crosses else None

  @property
  def links(self) -> list[tuple[str, Link]]:
    """The links with their names, the fast one first."""
    return [link for link in (self.fast, self.slow) if link is not None]

  def send(self, *parts: float, shift: int = 1) -> float:
    """Seconds to send parts to the device `shift` places on.

    All parts leave at once, those of 0 bytes are left out; a border between
    islands makes all wait.
    """
    parts = tuple(nbytes for nbytes in parts if nbytes)
    self._count(sum(parts, 0.0), len(parts))
    if not parts or self.size == 1:
      return 0.0
    return max(
      link.send_s(
        sum(parts),
        far=1.0 if link.switched else self.far * link.far(shift, self.size),
      )
      for _, link in self.links
    )

  def both_s(self, one: float, other: float) -> float:
    """Seconds to send to both neighbours, given the seconds of each alone."""
    return max(link.both_s(one, other) for _, link in self.links)

  def gather(self, nbytes: float) -> float:
    """Seconds of an all-gather; islands receive over all links at once."""
    self._count(nbytes, 1)
    if self.slow is None:
      return self.links[0][1].gather_s(nbytes, self.size, self.wraps)
    outside = self._outside(nbytes) / self.island
    times = [self.slow[1].gather_s(outside, -(-self.size // self.island))]
    if self.fast is not None:
      times.append(self.fast[1].gather_s(nbytes, self.island, False))
    return max(times)

  def exchange(self, nbytes: float) -> float:
    """Seconds of an all-to-all; each device has a link to other islands."""
    self._count(nbytes, 1)
    if self.slow is None:
      return self.links[0][1].exchange_s(nbytes, self.size, self.wraps)
    outside = self._outside(nbytes)
    times = [self.slow[1].exchange_s(outside, -(-self.size // self.island))]
    if self.fast is not None:
      inside = nbytes * (self.island - 1) / (self.size - 1)
      times.append(self.fast[1].exchange_s(inside, self.island, False))
    return max(times)

  def _outside(self, nbytes: float) -> float:
    """Bytes from other islands, of `nbytes` from all other devices."""
    return nbytes * (self.size - self.island) / (self.size - 1)

  def _count(self, nbytes: float, messages: int) -> None:
    if messages:
      self.traffic.sends += messages
      for name, _ in self.links:
        sent = self.traffic.by_link.get(name, 0.0)
        self.traffic.by_link[name] = sent + nbytes


@dataclasses.dataclass
class Traffic:
  """Bytes and messages that one device sends in a call.

  Attributes:
    by_link: Bytes by name of the link.
    sends: Number of messages.
  """

  by_link: dict[str, float] = dataclasses.field(default_factory=dict)
  sends: int = 0


def tile_blocks(call: CallShape, t: int, s: int) -> tuple[int, int]:
  """Tile for t queries over s keys, (q_block, kv_block).

  As `Blockwise().blocks`; where a mask can leave part of a hop, at most an
  eighth of either side, but at least 128: in a hop that is half masked the
  tiles on the diagonal then cost at most an eighth more.
  """
  blocks = Blockwise().blocks(t, s)
  if isinstance(call.seen, Everything):
    return blocks
  q, k = (min(b, max(128, n // 8)) for b, n in zip(blocks, (t, s), strict=True))
  return Blockwise(q, k).blocks(t, s)


class CostTerms:
  """Sizes, bytes and seconds of the parts of one strategy's call.

  Attributes:
    strategy: Name of the strategy.
    call: Shapes, mask and mesh axes of the call.
    machine: Machine that runs it.
    layout: Order of the tokens on the shards.
    served: Whether the strategy is meant for this layout.
    wire: Format of K and V on the wire, of `WIRES` or a `Wire`; None: as is.
    wire_number: Bytes of a number on the wire.
    t: Queries of a shard; `s` are its keys.
    q: Numbers of a shard's queries; `o` of its outputs, `kv` of its keys with
      values, `rows` of its softmax rows.
    kv_bytes: Bytes of a shard's keys and values; `sum_bytes` of their float32
      gradients.
    sent: Numbers that stand for a shard's keys on the wire, `wire_bytes` of
      them; `sent_sum_bytes` of their float32 gradients.
    form: Form in which a token is sent, of `FORMS`.
    decode_s: Seconds to read a block's codes and write its numbers.
    traffic: Bytes and messages sent so far.
    ring: Interconnect of all shards.
  """

  def __init__(
    self,
    strategy: str,
    call: CallShape,
    machine: Machine,
    layout: Layout,
    wire: WireLike | None,
    layouts: tuple[type[Layout], ...] = (Layout,),
    form: str = "heads",
  ):
    """Prepare the terms; the strategy is meant for `layouts`."""
    self.served = isinstance(layout, layouts)
    self.strategy, self.form = strategy, form
    rows = call.rows
    # Of a device's projections of the shard's tokens.
    self.project_flops = 0.0
    if rows is not None:
      head_numbers = (
        call.head_dim - rows.shared + (call.value_dim or call.head_dim)
      )
      self.project_flops = 2.0 * rows.latent * call.heads * head_numbers
      if form == "absorbed":
        call = dataclasses.replace(
          call, kv_heads=1, head_dim=rows.size, value_dim=rows.size
        )
    self.call, self.machine = call, machine
    self.layout, self.wire = layout, wire
    self.size = call.shards
    self.t = layout.local_length(call.queries, self.size)
    self.s = layout.local_length(call.keys, self.size)
    self.blocks = tile_blocks(call, self.t, self.s)
    self.number = number_bytes(call.dtype)
    h, j = call.head_dim, call.value_dim or call.head_dim
    self.flops = (2 * (h + j), 2 * (3 * h + 2 * j))
    self.traffic = Traffic()
    self.ring, _ = self.levels(self.size)
    # Numbers of one shard: queries, outputs, keys with values.
    self.q = float(call.batch * self.t * call.heads * h)
    self.o = float(call.batch * self.t * call.heads * j)
    self.rows = float(call.batch * self.t * call.heads)
    self.kv = float(call.batch * self.s * call.kv_heads * (h + j))
    self.kv_bytes = self.kv * self.number
    self.sum_bytes = self.kv * WIDE
    dims, self.sent = (h, j), self.kv
    if rows is not None and form != "heads":
      dims, self.sent = (rows.size, 0), float(call.batch * self.s * rows.size)
    self.wire_number = (
      wire_of(wire).token_bytes(*dims) / sum(dims) if wire else self.number
    )
    self.wire_bytes = self.sent * self.wire_number
    self.sent_sum_bytes = self.sent * WIDE
    self.decode_s = (
      (self.wire_bytes + self.kv_bytes) / machine.chip.hbm_bandwidth
      if wire
      else 0.0
    )

  def levels(self, inner: int) -> tuple[Interconnect, Interconnect]:
    """Interconnects inside groups of `inner` devices and between the groups."""
    size, axes, machine = self.size, self.call.axes, self.machine
    fast, last = axes[-1]
    inner_link = fast, machine.link(fast)
    # Groups follow the same walk of neighbours, `inner` places apart.
    distance = inner_link[1].far(inner, size) if len(axes) == 1 else 1.0
    if len(axes) == 2 and not isinstance(machine.links, Link):
      slow = axes[0][0]
      outer_link, island = (slow, machine.link(slow)), last
    else:
      island = machine.island
      outer_link = (
        None if machine.between is None else ("between", machine.between)
      )
    links = inner_link, outer_link, island
    return (
      Interconnect(self.traffic, inner, 1, *links, wraps=inner == size),
      Interconnect(self.traffic, size // inner, inner, *links, far=distance),
    )

  @functools.cached_property
  def pairs(self) -> Float[np.ndarray, "R R"]:
    """Pair counts by shards of queries and of keys, [R, R]."""
    c = self.call
    return pair_counts.pairs(
      self.layout, c.seen, self.size, (c.queries, c.keys), self.blocks, c.offset
    )

  def by_hop(self, hops: Sequence[int]) -> Float[np.ndarray, "_ R"]:
    """Pairs of each shard with the keys `hops` places before it, [hops, R]."""
    i = np.arange(self.size)
    return self.pairs[i, (i - np.asarray(hops)[:, None]) % self.size]

  @property
  def directions(self) -> tuple[int, int]:
    """Numbers of hops of a ring, (back, forward), within the mask's reach."""
    return self.cut(self.call.mask)

  def cut(self, mask: Mask) -> tuple[int, int]:
    keys_before, keys_after = mask.reach
    if keys_before is None or keys_after is None or self.call.offset:
      return self.size - 1, 0
    return cut_hops(
      self.layout.reachable(
        self.size,
        self.size * self.t,
        self.size * self.s,
        keys_before,
        keys_after,
      )
    )

  def seconds(
    self,
    pairs: Float[np.ndarray, " ..."],
    backward: bool,
    *,
    heads: float | None = None,
    taken: float,
    put: float,
  ) -> Float[np.ndarray, " ..."]:
    """Seconds of a call of the local algorithm that computes `pairs`.

    Args:
      pairs: Pairs of one example and head, any shape.
      backward: Whether it is the backward pass.
      heads: Number of query heads; default all of a device.
      taken: Bytes of operands that are read at least.
      put: Bytes of sums that are read and written back.
    """
    c, chip = self.call, self.machine.chip
    part = self.machine.part(c.local)[backward]
    heads = c.heads if heads is None else heads
    work_s = (
      np.asarray(pairs, float) * c.batch * heads * self.flops[backward]
      / (chip.rate(c.dtype) * part)
    )  # fmt: skip
    read_s = np.where(np.asarray(pairs) > 0, taken / chip.hbm_bandwidth, 0.0)
    put_s = put / chip.hbm_bandwidth + self.machine.hop_s
    return np.maximum(work_s, read_s) + put_s

  def query_bytes(self, backward: bool) -> float:
    """Bytes of queries that a hop reads; backward also output gradients."""
    return (self.q + (self.o + self.q) * backward) * self.number

  def project_s(self, backward: bool) -> float:
    """Seconds to project a block of rows to keys and values, and back."""
    if self.form != "rows":
      return 0.0
    return self._project_s(3 if backward else 1)

  def _project_s(self, products: int) -> float:
    """Seconds of products of a shard's tokens with the up-projection.

    A product takes two FLOPs a token and number of the projection, which it
    reads at least.
    """
    chip = self.machine.chip
    flops = self.project_flops * self.call.batch * self.s
    read_s = self.project_flops / 2 * self.number / chip.hbm_bandwidth
    return products * max(flops / chip.rate(self.call.dtype), read_s)

  def hop_s(
    self, pairs: Float[np.ndarray, " ..."], backward: bool
  ) -> Float[np.ndarray, " ..."]:
    """Seconds of hops in which keys move and queries stay."""
    read_bytes = self.query_bytes(backward) + self.kv_bytes
    compute = self.seconds(
      pairs, backward, taken=read_bytes, put=self.sums(backward)
    )
    return compute + self.project_s(backward)

  def sums(self, backward: bool) -> float:
    """Bytes of sums that a hop reads from memory and writes back."""
    if not backward:
      return 2 * (self.o + 2 * self.rows) * WIDE
    return 2 * self.q * WIDE + 3 * self.sum_bytes

  def resident(self, backward: bool) -> float:
    """Bytes of operands, results, sums and score tiles of a call."""
    q_block, kv_block = self.blocks
    c = self.call
    rows = q_block * joined(-(-self.t // q_block), q_block)
    tiles = 2 * c.batch * c.heads * rows * kv_block * WIDE
    operand_bytes = (
      (self.q + self.o) * self.number + self.kv_bytes + self.rows * WIDE
    )
    if not backward:
      return operand_bytes + (self.o + 2 * self.rows) * WIDE + tiles
    # The cotangent, a transposed copy of it and of the queries; dq, dk, dv.
    gradient_bytes = (2 * self.o + self.q) * self.number + self.rows * WIDE
    return (
      operand_bytes
      + gradient_bytes
      + self.q * WIDE
      + self.sum_bytes
      + 2 * tiles
    )

  def rotation(
    self,
    ring: Interconnect,
    compute: np.ndarray,
    hops: tuple[int, int],
    kv: float,
    sums: float,
  ) -> float:
    """Seconds of a ring: blocks of earlier keys first, then of later ones.

    Args:
      ring: Interconnect over which they rotate.
      compute: Seconds of each hop on each shard, [hops, ..., R].
      hops: (back, forward) numbers of hops.
      kv: Bytes of a block.
      sums: Bytes of the gradients that move with it, 0 in the forward pass.
    """
    hops_back, hops_forward = hops
    sends = []
    for hop in range(hops_back + hops_forward + 1):
      first, last = (
        (0, hops_back)
        if hop <= hops_back
        else (hops_back + 1, hops_back + hops_forward)
      )
      send_s = ring.send(kv * (hop < last), sums * (hop > first))
      # The first block of the later keys is sent at the start.
      early_send_s = ring.send(kv) if hop == 0 and hops_forward else 0.0
      sends.append(
        ring.both_s(send_s, early_send_s) if early_send_s else send_s
      )
    seconds = float(turn(compute, sends).max())
    for distance in hops:
      if distance:
        seconds += ring.send(sums, shift=distance)
    return seconds

  def prediction(
    self,
    one_pass: Callable[[bool], tuple[float, float]],
    extra_bytes: tuple[float, float],
    notes: tuple[str, ...] = (),
    **options: Any,
  ) -> Prediction:
    """Predict the strategy's cost.

    Args:
      one_pass: Function of whether it is the backward pass, returning (seconds,
        compute seconds summed over the shards).
      extra_bytes: Memory in addition to `resident`, without and with gradients.
      notes: Remarks for the user.
      options: Options to build the strategy with.
    """
    backward = self.call.backward
    passes = [
      one_pass(backward_pass) for backward_pass in (False, True)[: 1 + backward]
    ]
    times = [seconds + self.machine.call_s for seconds, _ in passes]
    if self.form != "rows":
      # Keys or queries of the shard's own tokens, before anything is sent.
      projecting = [self._project_s(products) for products in (1, 2)]
      times = [x + y for x, y in zip(times, projecting, strict=False)]
    computing = sum(busy for _, busy in passes)
    q_block, kv_block = self.blocks
    if self.wire:
      options["wire"] = self.wire
      notes = (*notes, "codes lose digits")
    return Prediction(
      strategy=self.strategy,
      options={**options, "q_block": q_block, "kv_block": kv_block},
      layout=self.layout,
      forward_s=times[0],
      backward_s=times[1] if backward else 0.0,
      bytes_by_link=dict(self.traffic.by_link),
      sends=self.traffic.sends,
      memory_bytes=self.resident(backward) + extra_bytes[backward],
      busy=min(1.0, computing / (self.size * sum(times))),
      notes=notes,
    )


def turn(
  compute: np.ndarray, sends: Sequence[float], *, ways: tuple[int, ...] = (1,)
) -> Float[np.ndarray, "... R"]:
  """Time at which each shard has finished a ring: seconds [..., R].

  Args:
    compute: Seconds of each hop on each shard, [n, ..., R]; axes in between
      are independent rings.
    sends: Seconds of the sends of each hop, [n]; 0 without a send.
    ways: Numbers of places by which they go: 1, -1 or both at once.
  """
  start = np.zeros(compute.shape[1:])
  for busy, send in zip(compute, sends, strict=True):
    end = start + busy
    if send:
      for step in ways:
        arrival = np.maximum(start, np.roll(start, -step, -1)) + send
        end = np.maximum(end, np.maximum(arrival, np.roll(arrival, step, -1)))
    start = end
  return start

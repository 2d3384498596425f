"""What each way to move attention across devices costs, by a model.

Law: a prediction follows from the call's shapes, mask and layout and the
machine's stated figures alone: no device is asked, so all processes agree.
What is modelled, of R shards:

  a tile      2 (H + J) FLOPs a pair and query head forward, 2 (3 H + 2 J)
              backward, at the local algorithm's part of the product rate; the
              tiles are those that the mask leaves (`work.pairs`)
  a call of   at least the time to read its operands; on top, the float32
  the local   sums that it takes from memory and puts back (output and
  algorithm   statistics, gradients), and a fixed `hop_s`
  a hop       a send leaves when both ends have begun the hop; the next hop
              begins when the tiles, the own send and the arrival are done, so
              a hop takes the longer of the two, and a shard waits for its
              neighbours' slowest
  a gather,   is waited for: nothing runs beside it
  exchange

What is not: contention with other traffic, congestion inside a switch, the
coordinates that ride along (8 bytes a token), projections before and after.
Ref: Liu et al. 2023, arXiv 2310.01889, section 3 (a hop hides its send once a
block has FLOPs / bandwidth tokens); Jacobs et al. 2023, arXiv 2309.14509; Fang
and Zhao 2024, arXiv 2405.07719 (hybrid); Yang et al. 2024, arXiv 2411.01783
(rotating queries).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringjax.errors import OptionError, message
from ringjax.ops.attention import work
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.ring import cut_hops
from ringjax.ops.inputs import positive_int
from ringjax.ops.mask import (
  And,
  Everything,
  Mask,
  SameSegment,
  Window,
)
from ringjax.parallel.chips import LOCALS, Link, Machine, number_bytes
from ringjax.parallel.layout import Contiguous, Layout, Uneven

# Bytes a number of keys and values on the wire: codes of one byte with a
# float32 scale for each 64 of them.
WIRES = {"int8": 1 + 4 / 64, "float8_e4m3fn": 1 + 4 / 64, "bfloat16": 2.0}
_WIDE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """What is to be computed, by one device's share of batch and heads.

  Attributes:
    batch: B, examples on a device.
    queries: T, tokens of the whole sequence of queries.
    keys: S, tokens of the whole sequence of keys.
    heads: N, query heads on a device before any exchange.
    kv_heads: K.
    head_dim: H, of queries and keys.
    value_dim: J, of values; default H.
    dtype: name of the dtype of queries, keys and values.
    mask: over positions.
    layout: how tokens lie on the shards; None leaves the choice open.
    axes: (name, size) of the mesh axes that shard the sequence, slow ones
      first: one, or two (groups of devices, devices of a group).
    backward: whether gradients are wanted too.
    offset: position of the first query.
    wire: of `WIRES`, also show K and V sent as such codes; None: do not.
    longest_document: tokens of the longest document of packed data, if known.
    local: the local algorithm, of `chips.LOCALS`.
  """

  batch: int
  queries: int
  keys: int
  heads: int
  kv_heads: int
  head_dim: int
  value_dim: int | None = None
  dtype: str = "bfloat16"
  mask: Mask = Everything()
  layout: Layout | None = None
  axes: tuple[tuple[str, int], ...] = (("seq", 1),)
  backward: bool = True
  offset: int = 0
  wire: str | None = None
  longest_document: int | None = None
  local: str = "blockwise"

  def __post_init__(self) -> None:
    if self.value_dim is None:
      object.__setattr__(self, "value_dim", self.head_dim)
    for name in ("batch", "queries", "keys", "heads", "kv_heads", "head_dim",
                 "value_dim"):  # fmt: skip
      positive_int(name, getattr(self, name))
    if self.heads % self.kv_heads:
      raise OptionError(
        message(
          "heads",
          f"{self.heads} query heads over {self.kv_heads} kv heads",
          "a multiple",
          "correct one of them",
        )
      )
    axes = tuple((str(name), size) for name, size in self.axes)
    object.__setattr__(self, "axes", axes)
    if not 1 <= len(axes) <= 2 or len({name for name, _ in axes}) < len(axes):
      raise OptionError(
        message(
          "axes",
          repr(self.axes),
          "one mesh axis, or two: groups, then devices of a group",
          "name the axes that shard the sequence",
        )
      )
    for name, size in axes:
      positive_int(f"size of axis {name!r}", size)
    if not isinstance(self.mask, Mask):
      raise OptionError(
        message(
          "mask",
          type(self.mask).__name__,
          "a ringjax mask such as Causal()",
          "leave an array out: it bounds no tile",
        )
      )
    if self.layout is not None and not isinstance(self.layout, Layout):
      raise OptionError(
        message(
          "layout", repr(self.layout), "a Layout or None", "use Contiguous()"
        )
      )
    whole = isinstance(self.offset, int) and not isinstance(self.offset, bool)
    if not whole or self.offset < 0:
      raise OptionError(
        message(
          "offset", repr(self.offset), "a position, 0 or more", "correct it"
        )
      )
    if self.wire is not None and self.wire not in WIRES:
      raise OptionError(
        message(
          "wire",
          repr(self.wire),
          f"None or one of {', '.join(WIRES)}",
          "leave it out to send K and V as they are",
        )
      )
    if self.longest_document is not None:
      positive_int("longest_document", self.longest_document)
    if self.local not in LOCALS:
      raise OptionError(
        message(
          "local",
          repr(self.local),
          f"one of {', '.join(LOCALS)}",
          "choose one",
        )
      )
    number_bytes(self.dtype)

  @property
  def shards(self) -> int:
    """R."""
    return math.prod(size for _, size in self.axes)

  @property
  def packed(self) -> bool:
    """Whether a query sees its own document only."""
    return _has_documents(self.mask)

  @property
  def seen(self) -> Mask:
    """The mask, as far as it is known without the documents."""
    if self.packed and self.longest_document is not None:
      return self.mask & Window(self.longest_document)
    return self.mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """What a strategy would cost.

  Attributes:
    strategy: its name.
    options: what to build it with: q_block, kv_block and what is its own.
    layout: how the tokens lie.
    forward_s: seconds of the forward pass.
    backward_s: seconds of the backward pass, 0 where none is wanted.
    bytes_by_link: bytes that a device sends in all, by the link they take.
    sends: messages of a device in all.
    memory_bytes: of a device at most, operands and results included.
    busy: part of the time that the devices compute tiles and sums.
    notes: what to know.
  """

  strategy: str
  options: Mapping[str, Any]
  layout: Layout
  forward_s: float
  backward_s: float
  bytes_by_link: Mapping[str, float]
  sends: int
  memory_bytes: float
  busy: float
  notes: tuple[str, ...] = ()

  @property
  def seconds(self) -> float:
    """Of both passes."""
    return self.forward_s + self.backward_s

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return {
      "strategy": self.strategy,
      "options": dict(self.options),
      "layout": repr(self.layout),
      "forward_s": self.forward_s,
      "backward_s": self.backward_s,
      "seconds": self.seconds,
      "bytes_by_link": dict(self.bytes_by_link),
      "sends": self.sends,
      "memory_bytes": self.memory_bytes,
      "busy": self.busy,
      "notes": list(self.notes),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
  """Why a strategy is not for this call.

  Attributes:
    strategy: its name.
    options: as far as they tell it from another of the name.
    reason: one sentence.
  """

  strategy: str
  reason: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return {
      "strategy": self.strategy,
      "options": dict(self.options),
      "reason": self.reason,
    }


def predict(
  strategy: str,
  call: Call,
  machine: Machine,
  layout: Layout,
  *,
  inner: int | None = None,
  wire: str | None = None,
) -> Prediction | Refusal:
  """What one strategy costs, or why it is not for this call.

  Args:
    strategy: of `STRATEGIES`.
    call: what is to be computed.
    machine: on what.
    layout: how tokens lie on the shards.
    inner: devices of a group, for hybrid and two_level.
    wire: of `WIRES`, or None to send K and V as they are.

  Raises:
    OptionError: there is no such strategy, or it takes no such option.
  """
  if strategy not in STRATEGIES:
    raise OptionError(
      message(
        "strategy",
        repr(strategy),
        f"one of {', '.join(STRATEGIES)}",
        "choose one",
      )
    )
  if (strategy in GROUPED) != (inner is not None):
    raise OptionError(
      message(
        "inner",
        f"{inner!r} for {strategy}",
        f"an int for {' and '.join(GROUPED)} alone",
        "add it or leave it out",
      )
    )
  if wire is not None and strategy not in WIRED:
    raise OptionError(
      message(
        "wire",
        f"{wire!r} for {strategy}",
        f"it for {', '.join(WIRED)} alone",
        "leave it out",
      )
    )
  at = _Setting(call, machine, layout, wire)
  if inner is None:
    return STRATEGIES[strategy](at)
  if call.shards % inner or not 1 < inner < call.shards:
    return Refusal(
      strategy=strategy,
      reason=f"groups of {inner} do not divide {call.shards} shards",
      options={"inner": inner},
    )
  return STRATEGIES[strategy](at, inner)


# ---------------------------------------------------------------------------
# Roads
# ---------------------------------------------------------------------------


class _Road:
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


def _roads(call: Call, machine: Machine, inner: int) -> tuple[_Road, _Road]:
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
    _Road(inner, 1, near, wide, island, wraps=inner == size),
    _Road(size // inner, inner, near, wide, island, far=far),
  )


# ---------------------------------------------------------------------------
# What all strategies share
# ---------------------------------------------------------------------------


def tile_blocks(call: Call, t: int, s: int) -> tuple[int, int]:
  """The tile for t queries over s keys, (q_block, kv_block).

  As `Blockwise().blocks`, and where a mask can leave part of a hop at most an
  eighth of either side, though not below 128: of a hop that is half masked
  the tiles on the diagonal then cost an eighth on top at most.
  """
  blocks = Blockwise().blocks(t, s)
  if isinstance(call.seen, Everything):
    return blocks
  small = (
    min(b, max(128, n // 8)) for b, n in zip(blocks, (t, s), strict=True)
  )
  return Blockwise(*small).blocks(t, s)


@dataclasses.dataclass
class _Bill:
  """What a strategy's sends add up to, of one device."""

  by_link: dict[str, float] = dataclasses.field(default_factory=dict)
  sends: int = 0

  def add(self, road: _Road, nbytes: float, messages: int) -> None:
    if not messages:
      return
    for name in road.names():
      self.by_link[name] = self.by_link.get(name, 0.0) + nbytes
    self.sends += messages


class _Setting:
  """A call on a machine in a layout: sizes, bytes and seconds of the parts."""

  def __init__(
    self, call: Call, machine: Machine, layout: Layout, wire: str | None
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
    self.bill = _Bill()
    self.all, self.none = _roads(call, machine, self.size)
    # Of one shard: numbers of queries, outputs, keys with values.
    self.q = float(call.batch * self.t * call.heads * h)
    self.o = float(call.batch * self.t * call.heads * j)
    self.rows = float(call.batch * self.t * call.heads)
    self.kv = float(call.batch * self.s * call.kv_heads * (h + j))
    self.kv_bytes = self.kv * self.number
    self.sum_bytes = self.kv * _WIDE
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
    return work.pairs(
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
    needed = work.reached(
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
      return 2 * (self.o + 2 * self.rows) * _WIDE
    return 2 * self.q * _WIDE + 3 * self.sum_bytes

  def resident(self, backward: bool) -> float:
    """Bytes of operands, results, sums and score tiles of a call."""
    q_block, kv_block = self.blocks
    c = self.call
    tiles = 2 * c.batch * c.heads * q_block * kv_block * _WIDE
    held = (self.q + self.o) * self.number + self.kv_bytes + self.rows * _WIDE
    if not backward:
      return held + (self.o + 2 * self.rows) * _WIDE + tiles
    # The cotangent and a transposed copy of it and of the queries; dq, dk, dv.
    more = (2 * self.o + self.q) * self.number + self.rows * _WIDE
    return held + more + self.q * _WIDE + self.sum_bytes + 2 * tiles

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


# ---------------------------------------------------------------------------
# Strategies
# ---------------------------------------------------------------------------


def _ring(at: _Setting) -> Prediction | Refusal:
  """Keys visit; one direction, or as far as a window sees from either side."""
  return _rotation(at, "ring", *at.directions)


def _documents(at: _Setting) -> Prediction | Refusal:
  """A ring that stops where the longest document ends, at run time."""
  call = at.call
  if not call.packed:
    return Refusal(strategy="documents", reason="the mask knows no documents")
  if not isinstance(at.layout, Contiguous):
    return Refusal(
      strategy="documents",
      reason=f"in {at.layout} every document lies on all shards",
    )
  if call.longest_document is None:
    found = _rotation(at, "documents", *at.directions)
    return dataclasses.replace(
      found, notes=("a whole ring: longest_document is not known",)
    )
  reach = call.longest_document - 1
  behind, ahead = call.mask.reach
  near = Window(
    min(reach, reach if behind is None else behind) + 1,
    min(reach, reach if ahead is None else ahead),
  )
  return _rotation(at, "documents", *at.cut(near))


def _rotation(at: _Setting, name: str, behind: int, ahead: int) -> Prediction:
  road, hops = at.all, [*range(behind + 1), *range(-1, -ahead - 1, -1)]
  pairs = at.by_hop(hops)
  times, computing = [], 0.0
  for backward in at.passes():
    compute = at.hop_s(pairs, backward) + at.decode_s
    sends = []
    for h in range(len(hops)):
      first, last = (0, behind) if h <= behind else (behind + 1, len(hops) - 1)
      kv = at.wire_bytes * (h < last)
      sums = at.sum_bytes * (backward and h > first)
      one = road.send_s(kv + sums) if kv + sums else 0.0
      # The first block from ahead leaves at once.
      early = road.send_s(at.wire_bytes) if h == 0 and ahead else 0.0
      sends.append(road.both_s(one, early) if early else one)
      at.bill.add(road, kv, bool(kv))
      at.bill.add(road, sums, bool(sums))
      at.bill.add(road, at.wire_bytes, bool(early))
    seconds = float(turn(compute, sends).max())
    if backward:
      for far in (behind, ahead):
        if far:
          seconds += road.send_s(at.sum_bytes, shift=far)
          at.bill.add(road, at.sum_bytes, 1)
    times.append(seconds)
    computing += float(compute.sum())
  visiting = 2 * at.kv_bytes * (len(hops) > 1)
  notes = () if len(hops) == at.size else (_hops(len(hops) - 1),)
  extra = (visiting, visiting + 2 * at.sum_bytes * (len(hops) > 1))
  return at.prediction(name, times, computing, extra, notes)


def _bidirectional(at: _Setting) -> Prediction | Refusal:
  """Keys from both neighbours at once; half the steps."""
  if at.size < 3:
    return Refusal(
      strategy="bidirectional", reason=f"{at.size} shards have one neighbour"
    )
  road = at.all
  behind, ahead = at.directions
  if behind + ahead == at.size - 1:
    behind, ahead = at.size // 2, (at.size - 1) // 2
  steps = max(behind, ahead)
  times, computing = [], 0.0
  for backward in at.passes():
    compute = [at.hop_s(at.by_hop([0])[0], backward)]
    for step in range(1, steps + 1):
      hops = [h for h, n in ((step, behind), (-step, ahead)) if step <= n]
      compute.append((at.hop_s(at.by_hop(hops), backward) + at.decode_s).sum(0))
    sends = []
    for step in range(steps + 1):
      each = []
      for n, first in ((behind, 0), (ahead, 1)):
        kv = at.wire_bytes * (step < n)
        sums = at.sum_bytes * (backward and first <= step <= n and step > first)
        # The own keys' sums leave to one side.
        each.append(road.send_s(kv + sums) if kv + sums else 0.0)
        at.bill.add(road, kv, bool(kv))
        at.bill.add(road, sums, bool(sums))
      sends.append(road.both_s(*each) if any(each) else 0.0)
    seconds = float(turn(np.stack(compute), sends, ways=(1, -1)).max())
    if backward:
      home = [road.send_s(at.sum_bytes, shift=n) * bool(n)
              for n in (behind, ahead)]  # fmt: skip
      seconds += road.both_s(*home)
      at.bill.add(road, at.sum_bytes * bool(behind), bool(behind))
      at.bill.add(road, at.sum_bytes * bool(ahead), bool(ahead))
    times.append(seconds)
    computing += float(np.sum(compute))
  extra = (4 * at.kv_bytes, 4 * at.kv_bytes + 4 * at.sum_bytes)
  notes = ()
  if any(link.switched for _, link in road.links):
    notes = ("both directions share a device's one way into the switch",)
  return at.prediction("bidirectional", times, computing, extra, notes)


def _ring_q(at: _Setting) -> Prediction | Refusal:
  """Queries and what they have gathered so far visit; keys stay."""
  road, n = at.all, at.size
  i = np.arange(n)
  pairs = at.pairs[(i - i[:, None]) % n, i]
  times, computing = [], 0.0
  for backward in at.passes():
    if backward:
      moving = (at.q + at.o) * at.number + 2 * at.rows * _WIDE
      sums = at.q * _WIDE
      put = 2 * at.q * _WIDE + 2 * at.sum_bytes
    else:
      moving, sums = at.q * at.number, (at.o + 2 * at.rows) * _WIDE
      # The partial that arrives is added to the one that was made.
      put = 3 * sums
    taken = (at.q + (at.o + at.q) * backward) * at.number + at.kv_bytes
    compute = at.seconds(pairs, backward, taken=taken, put=put)
    sends = [
      road.send_s(moving * (h < n - 1) + sums * (h > 0)) if n > 1 else 0.0
      for h in range(n)
    ]
    at.bill.add(road, moving * (n - 1), n - 1)
    seconds = float(turn(compute, sends).max())
    if n > 1:
      seconds += road.send_s(sums)
      at.bill.add(road, sums * n, n)
    times.append(seconds)
    computing += float(compute.sum())
  forward = 2 * at.q * at.number + 2 * (at.o + 2 * at.rows) * _WIDE
  backward_bytes = 2 * (at.q + at.o) * at.number + 2 * at.q * _WIDE
  return at.prediction("ring_q", times, computing, (forward, backward_bytes))


def _gather(at: _Setting) -> Prediction | Refusal:
  """All keys come first; then every shard attends alone."""
  road, others = at.all, at.size - 1
  pairs = at.pairs.sum(1)
  times, computing = [], 0.0
  for backward in at.passes():
    q = (at.q + (at.o + at.q) * backward) * at.number
    taken = q + at.size * at.kv_bytes
    put = (
      2 * at.q * _WIDE + 2 * at.size * at.sum_bytes
      if backward
      else at.sums(False)
    )
    compute = at.seconds(pairs, backward, taken=taken, put=put)
    compute = compute + others * at.decode_s
    seconds = float(compute.max())
    if others:
      seconds += road.gather_s(others * at.wire_bytes)
      at.bill.add(road, others * at.wire_bytes, 1)
      if backward:
        seconds += road.gather_s(others * at.sum_bytes)
        at.bill.add(road, others * at.sum_bytes, 1)
    times.append(seconds)
    computing += float(compute.sum())
  whole = at.size * at.kv_bytes
  extra = (whole, whole + at.size * at.sum_bytes)
  return at.prediction("gather", times, computing, extra)


def _ulysses(at: _Setting) -> Prediction | Refusal:
  """Tokens are traded for heads; every device attends to all, alone."""
  return _traded(at, "ulysses", at.size)


def _hybrid(at: _Setting, inner: int) -> Prediction | Refusal:
  """Heads are traded inside groups; keys visit from group to group."""
  return _traded(at, "hybrid", inner)


def _traded(at: _Setting, name: str, inner: int) -> Prediction:
  call, n = at.call, at.size // inner
  near, wide = _roads(call, at.machine, inner)
  kv_heads, group = call.kv_heads, call.heads // call.kv_heads
  # How K kv heads of G query heads become a multiple of `inner` units.
  split = -(-inner // kv_heads)
  part = -(-group // split)
  units = -(-kv_heads * split // inner) * inner
  heads = units * part / inner
  more_q, more_kv = units * part / call.heads, units / kv_heads
  # Pairs between groups: every device has all of its group's tokens.
  blocks = at.pairs.reshape(n, inner, n, inner).sum((1, 3))
  g = np.arange(n)
  behind, ahead = n - 1, 0
  if n > 1:
    needed = (blocks[g, (g - g[:, None]) % n] > 0).any(1)
    needed[0] = True
    reach = call.mask.reach
    if None not in reach and not call.offset:
      behind, ahead = cut_hops(needed)
  hops = [*range(behind + 1), *range(-1, -ahead - 1, -1)]
  by_hop = blocks[g, (g - np.asarray(hops)[:, None]) % n]
  q, o = at.q * more_q, at.o * more_q
  rows, kv = at.rows * more_q, at.kv * more_kv
  kv_bytes, sum_bytes = kv * at.number, kv * _WIDE
  sent_kv = kv * WIRES[at.wire] if at.wire and n > 1 else kv_bytes
  away = (inner - 1) / inner
  times, computing = [], 0.0
  for backward in at.passes():
    if backward:
      put = 2 * q * _WIDE + (3 if n > 1 else 2) * sum_bytes
      # do comes in; dq, dk, dv go back.
      traded = (o + q) * at.number + 2 * rows * _WIDE + kv_bytes
    else:
      put = 2 * (o + 2 * rows) * _WIDE
      traded = (q + o) * at.number + rows * _WIDE + kv_bytes
    taken = (q + (o + q) * backward) * at.number + kv_bytes
    compute = at.seconds(by_hop, backward, heads=heads, taken=taken, put=put)
    compute = compute + at.decode_s * more_kv * (n > 1)
    sends = []
    for h in range(len(hops)):
      first, last = (0, behind) if h <= behind else (behind + 1, len(hops) - 1)
      moved = sent_kv * (h < last) + sum_bytes * (backward and h > first)
      early = sent_kv * (h == 0 and ahead > 0)
      one = wide.send_s(moved) if moved else 0.0
      other = wide.send_s(early) if early else 0.0
      sends.append(wide.both_s(one, other) if other else one)
      at.bill.add(wide, moved + early, (moved > 0) + (early > 0))
    seconds = float(turn(compute, sends).max())
    if backward:
      for far in (behind, ahead):
        if far:
          seconds += wide.send_s(sum_bytes, shift=far)
          at.bill.add(wide, sum_bytes, 1)
    # Four of them: queries, keys, values and outputs, or their gradients.
    seconds += near.exchange_s(traded * away)
    seconds += 3 * near.exchange_s(0.0)
    at.bill.add(near, traded * away, 4)
    times.append(seconds)
    computing += float(compute.sum()) * inner
  copies = (q + o) * at.number + kv_bytes + (o + 2 * rows) * _WIDE
  visiting = 2 * kv_bytes * (n > 1)
  forward = copies + visiting
  gradients = 2 * o * at.number + q * _WIDE + sum_bytes * (3 if n > 1 else 1)
  notes = ()
  if units * part > call.heads:
    notes = (
      f"{call.heads} query heads are padded to {units * part:g} "
      f"({heads:g} a device)",
    )
  options = {} if name == "ulysses" else {"inner": inner}
  return at.prediction(
    name, times, computing, (forward, forward + gradients), notes, **options
  )


def _two_level(at: _Setting, inner: int) -> Prediction | Refusal:
  """A ring inside groups turns while the next group's block is on its way."""
  call, n = at.call, at.size // inner
  near, wide = _roads(call, at.machine, inner)
  i = np.arange(at.size)
  group, place = i // inner, i % inner
  times, computing = [], 0.0
  for backward in at.passes():
    done, total = np.zeros(at.size), 0.0
    for outer in range(n):
      source = (group - outer) % n
      rows = [
        at.pairs[i, source * inner + (place - h) % inner] for h in range(inner)
      ]
      compute = at.hop_s(np.stack(rows), backward)
      compute = compute + at.decode_s * (outer > 0 or inner > 1)
      total += float(compute.sum())
      sends = []
      for h in range(inner):
        kv = at.wire_bytes * (h < inner - 1)
        sums = at.sum_bytes * (backward and h > 0)
        sends.append(near.send_s(kv + sums) if kv + sums else 0.0)
        at.bill.add(near, kv, bool(kv))
        at.bill.add(near, sums, bool(sums))
      turned = turn(compute.reshape(inner, n, inner), sends).reshape(-1)
      if backward:
        # The sums of the turn go on to the device that holds them.
        turned = turned + near.send_s(at.sum_bytes)
        at.bill.add(near, at.sum_bytes, 1)
      kv = at.wire_bytes * (outer < n - 1)
      sums = at.sum_bytes * (backward and outer > 0)
      slow = wide.send_s(kv + sums) if kv + sums else 0.0
      at.bill.add(wide, kv, bool(kv))
      at.bill.add(wide, sums, bool(sums))
      # Both ends begin a turn together, as in a hop of a ring.
      begin = np.maximum(done, np.roll(done, -inner))
      there = begin + slow if slow else done
      after = np.maximum(done + turned, there)
      done = np.maximum(after, np.roll(there, inner)) if slow else after
    seconds = float(done.max())
    if backward:
      seconds += wide.send_s(at.sum_bytes)
      at.bill.add(wide, at.sum_bytes, 1)
    times.append(seconds)
    computing += total
  extra = (4 * at.kv_bytes, 4 * at.kv_bytes + 4 * at.sum_bytes)
  return at.prediction("two_level", times, computing, extra, inner=inner)


def _halo(at: _Setting) -> Prediction | Refusal:
  """Only the neighbours' tokens that a window reaches; then one call."""
  no = functools.partial(Refusal, strategy="halo")
  behind, ahead = at.call.mask.reach
  if behind is None or ahead is None:
    return no(reason="the mask's reach has no limit; it is for a window")
  if not isinstance(at.layout, Contiguous):
    return no(reason=f"in {at.layout} neighbours' tokens are not on neighbours")
  if at.call.queries != at.call.keys or at.call.offset:
    return no(reason="queries and keys are not the same tokens")
  most = (at.size - 1) * at.s
  rows = {1: min(behind, most), -1: min(ahead, most)}
  if rows[1] + at.s + rows[-1] > at.size * at.s:
    return no(reason="the window reaches around the whole sequence")
  road = at.all
  hops = [0]
  for way, count in rows.items():
    hops += [way * d for d in range(1, -(-count // at.s) + 1)]
  pairs = at.by_hop(hops)
  # Keys do not wrap around: a shard at an end has fewer.
  source = np.arange(at.size) - np.asarray(hops)[:, None]
  pairs = np.where((source >= 0) & (source < at.size), pairs, 0.0).sum(0)
  token = at.kv / at.s
  halo = rows[1] + rows[-1]
  times, computing = [], 0.0
  for backward in at.passes():
    kv = (at.s + halo) * token
    taken = (at.q + (at.o + at.q) * backward) * at.number + kv * at.number
    put = (
      2 * at.q * _WIDE + 2 * kv * _WIDE if backward else at.sums(False)
    )  # fmt: skip
    compute = at.seconds(pairs, backward, taken=taken, put=put)
    seconds = float(compute.max())
    for each in (at.number, _WIDE) if backward else (at.number,):
      ways = []
      for count in rows.values():
        sends = 0.0
        for d in range(1, -(-count // at.s) + 1):
          part = min(at.s, count - (d - 1) * at.s) * token * each
          sends += road.send_s(part, shift=d)
          at.bill.add(road, part, 1)
        ways.append(sends)
      if any(ways):
        seconds += road.both_s(*ways)
    times.append(seconds)
    computing += float(compute.sum())
  kept = halo * token
  extra = (kept * at.number, kept * (at.number + _WIDE))
  return at.prediction(
    "halo", times, computing, extra, (f"{halo} tokens of neighbours",)
  )


def _chain(at: _Setting) -> Prediction | Refusal:
  """Keys go to the shards behind them only, never around."""
  no = functools.partial(Refusal, strategy="chain")
  if at.call.mask.reach[1] != 0:
    return no(reason="the mask lets queries see later keys")
  if not isinstance(at.layout, Contiguous | Uneven):
    return no(reason=f"in {at.layout} later shards have earlier tokens")
  if at.call.queries != at.call.keys or at.call.offset:
    return no(reason="queries and keys are not the same tokens")
  road, n = at.all, at.size
  steps = n - 1
  if at.call.mask.reach[0] is not None:
    steps = at.cut(at.call.mask)[0]
  shard = np.arange(n)
  pairs = at.by_hop(range(steps + 1))
  takes_part = shard >= np.arange(steps + 1)[:, None]
  times, computing = [], 0.0
  for backward in at.passes():
    compute = np.where(takes_part, at.hop_s(pairs, backward), 0.0)
    compute += np.where(takes_part, at.decode_s, 0.0)
    done = np.zeros(n)
    for step in range(steps + 1):
      kv = at.wire_bytes * (step < steps)
      sums = at.sum_bytes * (backward and step > 0)
      send = road.send_s(kv + sums) if kv + sums else 0.0
      at.bill.add(road, kv, bool(kv))
      at.bill.add(road, sums, bool(sums))
      begin, done = done, done + compute[step]
      if send:
        # From each shard to the next, of those that have something to pass.
        there = np.maximum(begin[:-1], begin[1:]) + send
        there = np.where(shard[1:] > step, there, 0.0)
        done[:-1] = np.maximum(done[:-1], there)
        done[1:] = np.maximum(done[1:], there)
    seconds = float(done.max())
    if backward and steps:
      # Sums go home at each step but the first, behind the tiles; the last
      # is waited for.
      seconds += road.send_s(at.sum_bytes, shift=steps)
      at.bill.add(road, at.sum_bytes, 1)
    times.append(seconds)
    computing += float(compute.sum())
  extra = (2 * at.kv_bytes, 2 * at.kv_bytes + 2 * at.sum_bytes)
  return at.prediction("chain", times, computing, extra)


# In the order that decides between equals.
STRATEGIES: dict[str, Callable[..., Prediction | Refusal]] = {
  "halo": _halo,
  "documents": _documents,
  "ring": _ring,
  "chain": _chain,
  "gather": _gather,
  "ulysses": _ulysses,
  "bidirectional": _bidirectional,
  "hybrid": _hybrid,
  "two_level": _two_level,
  "ring_q": _ring_q,
}
GROUPED = ("hybrid", "two_level")
WIRED = (
  "documents",
  "ring",
  "chain",
  "gather",
  "bidirectional",
  "hybrid",
  "two_level",
)


def _hops(count: int) -> str:
  return "1 hop" if count == 1 else f"{count} hops"


def _has_documents(mask: Mask) -> bool:
  if isinstance(mask, And):
    return _has_documents(mask.left) or _has_documents(mask.right)
  return isinstance(mask, SameSegment)

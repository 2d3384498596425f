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

import numpy as np

from ringjax.ops.attention.call_shape import WIRES, Prediction, Refusal
from ringjax.ops.attention.cost_terms import (
  WIDE,
  CostTerms,
  roads,
  turn,
)
from ringjax.ops.attention.ring import cut_hops
from ringjax.ops.mask import (
  Window,
)
from ringjax.parallel.layout import Contiguous, Uneven


def ring(at: CostTerms) -> Prediction | Refusal:
  """Keys visit; one direction, or as far as a window sees from either side."""
  return _rotation(at, "ring", *at.directions)


def documents(at: CostTerms) -> Prediction | Refusal:
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


def _rotation(at: CostTerms, name: str, behind: int, ahead: int) -> Prediction:
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


def bidirectional(at: CostTerms) -> Prediction | Refusal:
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


def ring_q(at: CostTerms) -> Prediction | Refusal:
  """Queries and what they have gathered so far visit; keys stay."""
  road, n = at.all, at.size
  i = np.arange(n)
  pairs = at.pairs[(i - i[:, None]) % n, i]
  times, computing = [], 0.0
  for backward in at.passes():
    if backward:
      moving = (at.q + at.o) * at.number + 2 * at.rows * WIDE
      sums = at.q * WIDE
      put = 2 * at.q * WIDE + 2 * at.sum_bytes
    else:
      moving, sums = at.q * at.number, (at.o + 2 * at.rows) * WIDE
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
  forward = 2 * at.q * at.number + 2 * (at.o + 2 * at.rows) * WIDE
  backward_bytes = 2 * (at.q + at.o) * at.number + 2 * at.q * WIDE
  return at.prediction("ring_q", times, computing, (forward, backward_bytes))


def gather(at: CostTerms) -> Prediction | Refusal:
  """All keys come first; then every shard attends alone."""
  road, others = at.all, at.size - 1
  pairs = at.pairs.sum(1)
  times, computing = [], 0.0
  for backward in at.passes():
    q = (at.q + (at.o + at.q) * backward) * at.number
    taken = q + at.size * at.kv_bytes
    put = (
      2 * at.q * WIDE + 2 * at.size * at.sum_bytes
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


def ulysses(at: CostTerms) -> Prediction | Refusal:
  """Tokens are traded for heads; every device attends to all, alone."""
  return _traded(at, "ulysses", at.size)


def hybrid(at: CostTerms, inner: int) -> Prediction | Refusal:
  """Heads are traded inside groups; keys visit from group to group."""
  return _traded(at, "hybrid", inner)


def _traded(at: CostTerms, name: str, inner: int) -> Prediction:
  call, n = at.call, at.size // inner
  near, wide = roads(call, at.machine, inner)
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
  kv_bytes, sum_bytes = kv * at.number, kv * WIDE
  sent_kv = kv * WIRES[at.wire] if at.wire and n > 1 else kv_bytes
  away = (inner - 1) / inner
  times, computing = [], 0.0
  for backward in at.passes():
    if backward:
      put = 2 * q * WIDE + (3 if n > 1 else 2) * sum_bytes
      # do comes in; dq, dk, dv go back.
      traded = (o + q) * at.number + 2 * rows * WIDE + kv_bytes
    else:
      put = 2 * (o + 2 * rows) * WIDE
      traded = (q + o) * at.number + rows * WIDE + kv_bytes
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
  copies = (q + o) * at.number + kv_bytes + (o + 2 * rows) * WIDE
  visiting = 2 * kv_bytes * (n > 1)
  forward = copies + visiting
  gradients = 2 * o * at.number + q * WIDE + sum_bytes * (3 if n > 1 else 1)
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


def two_level(at: CostTerms, inner: int) -> Prediction | Refusal:
  """A ring inside groups turns while the next group's block is on its way."""
  call, n = at.call, at.size // inner
  near, wide = roads(call, at.machine, inner)
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


def halo(at: CostTerms) -> Prediction | Refusal:
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
      2 * at.q * WIDE + 2 * kv * WIDE if backward else at.sums(False)
    )  # fmt: skip
    compute = at.seconds(pairs, backward, taken=taken, put=put)
    seconds = float(compute.max())
    for each in (at.number, WIDE) if backward else (at.number,):
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
  extra = (kept * at.number, kept * (at.number + WIDE))
  return at.prediction(
    "halo", times, computing, extra, (f"{halo} tokens of neighbours",)
  )


def chain(at: CostTerms) -> Prediction | Refusal:
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


def _hops(count: int) -> str:
  return "1 hop" if count == 1 else f"{count} hops"

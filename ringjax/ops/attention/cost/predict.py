"""Cost model of the attention strategies: seconds, bytes, memory.

Guarantees: a prediction follows from the call's shapes, mask and layout and the
machine's stated figures alone: no device is asked, so all processes agree.
The model, for R shards:

  a tile      2 (H + J) FLOPs a pair and query head forward, 2 (3 H + 2 J)
              backward, at the local algorithm's part of the product rate; the
              tiles are those that the mask leaves (`pair_counts`)
  a call of   at least the time to read its operands; on top, the float32
  the local   sums that it reads from memory and writes back (output and
  algorithm   statistics, gradients), and a fixed `hop_s`
  a hop       a send leaves when both ends have begun the hop; the next hop
              begins when the tiles, the shard's send and the arrival are done,
              so a hop takes the longer of the two, and a shard waits for its
              slowest neighbour
  a gather,   is waited for: nothing overlaps with it
  exchange

Not in the model: contention with other traffic, congestion inside a switch, the
coordinates that ride along (8 bytes a token), projections before and after.
Ref: Liu et al. 2023, arXiv 2310.01889, section 3 (a hop hides its send once a
block has FLOPs / bandwidth tokens); Jacobs et al. 2023, arXiv 2309.14509; Fang
and Zhao 2024, arXiv 2405.07719 (hybrid); Yang et al. 2024, arXiv 2411.01783
(rotating queries).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringjax.ops.attention.cost.call_shape import Prediction
from ringjax.ops.attention.cost.cost_terms import WIDE, CostTerms, turn
from ringjax.ops.attention.strategies.ring import cut_hops
from ringjax.ops.attention.strategies.wire_format import WireFormat, wire_of
from ringjax.ops.mask import Window

# Cost of a strategy, or the reason why it does not serve a call.
Found = Prediction | str


def ring(at: CostTerms) -> Found:
  """Ring: keys travel one way, or as far as a window sees from either side."""
  return _rotation(at, *at.directions)


def documents(at: CostTerms) -> Found:
  """Ring that stops at run time where the longest document ends."""
  call = at.call
  if not call.packed:
    return "the mask knows no documents"
  if not at.served:
    return f"in {at.layout} every document lies on all shards"
  if call.longest_document is None:
    prediction = _rotation(at, *at.directions)
    note = "a whole ring: longest_document is not known"
    return dataclasses.replace(prediction, notes=(note,))
  reach = call.longest_document - 1
  keys_before, keys_after = (
    reach if side is None else min(reach, side) for side in call.mask.reach
  )
  return _rotation(at, *at.cut(Window(keys_before + 1, keys_after)))


def _rotation(at: CostTerms, hops_back: int, hops_forward: int) -> Prediction:
  hops = _hops(hops_back, hops_forward)
  pairs = at.by_hop(hops)

  def one_pass(backward: bool) -> tuple[float, float]:
    compute = at.hop_s(pairs, backward) + at.decode_s
    sums = at.sent_sum_bytes * backward
    reach = hops_back, hops_forward
    seconds = at.rotation(at.ring, compute, reach, at.wire_bytes, sums)
    return seconds, float(compute.sum())

  moving = len(hops) > 1
  notes = ()
  if len(hops) != at.size:
    notes = ("1 hop" if len(hops) == 2 else f"{len(hops) - 1} hops",)
  visiting = 2 * at.kv_bytes * moving
  extra = (visiting, visiting + 2 * at.sum_bytes * moving)
  return at.prediction(one_pass, extra, notes)


def bidirectional(at: CostTerms) -> Found:
  """Ring with keys from both neighbours at once, in half the steps."""
  if at.size < 3:
    return f"{at.size} shards have one neighbour"
  hops_back, hops_forward = at.directions
  if hops_back + hops_forward == at.size - 1:
    hops_back, hops_forward = at.size // 2, (at.size - 1) // 2
  steps = max(hops_back, hops_forward)

  def one_pass(backward: bool) -> tuple[float, float]:
    compute = [at.hop_s(at.by_hop([0])[0], backward)]
    for step in range(1, steps + 1):
      hops = [
        h for h, n in ((step, hops_back), (-step, hops_forward)) if step <= n
      ]
      compute.append((at.hop_s(at.by_hop(hops), backward) + at.decode_s).sum(0))
    sums = at.sent_sum_bytes * backward
    sends = []
    for step in range(steps + 1):
      # The sums of a shard's own keys leave to one side.
      send_seconds = [
        at.ring.send(at.wire_bytes * (step < n), sums * (first < step <= n))
        for n, first in ((hops_back, 0), (hops_forward, 1))
      ]
      sends.append(at.ring.both_s(*send_seconds))
    seconds = float(turn(np.stack(compute), sends, ways=(1, -1)).max())
    return_seconds = [
      at.ring.send(sums * bool(n), shift=n) for n in (hops_back, hops_forward)
    ]
    return seconds + at.ring.both_s(*return_seconds), float(np.sum(compute))

  extra = (4 * at.kv_bytes, 4 * at.kv_bytes + 4 * at.sum_bytes)
  notes = ()
  if any(link.switched for _, link in at.ring.links):
    notes = ("both directions share a device's one way into the switch",)
  return at.prediction(one_pass, extra, notes)


def ring_q(at: CostTerms) -> Found:
  """Ring of queries and their sums so far; keys stay."""
  n = at.size
  i = np.arange(n)
  pairs = at.pairs[(i - i[:, None]) % n, i]

  def one_pass(backward: bool) -> tuple[float, float]:
    if backward:
      moving = (at.q + at.o) * at.number + 2 * at.rows * WIDE
      sums = at.q * WIDE
      put_bytes = 2 * at.q * WIDE + 2 * at.sum_bytes
    else:
      moving, sums = at.q * at.number, (at.o + 2 * at.rows) * WIDE
      # The partial that arrives is added to the local one.
      put_bytes = 3 * sums
    read_bytes = at.query_bytes(backward) + at.kv_bytes
    compute = at.seconds(pairs, backward, taken=read_bytes, put=put_bytes)
    sends = [
      at.ring.send(moving * (hop < n - 1), sums * (hop > 0)) for hop in range(n)
    ]
    seconds = float(turn(compute, sends).max()) + at.ring.send(sums * (n > 1))
    return seconds, float(compute.sum())

  forward = 2 * at.q * at.number + 2 * (at.o + 2 * at.rows) * WIDE
  backward_bytes = 2 * (at.q + at.o) * at.number + 2 * at.q * WIDE
  return at.prediction(one_pass, (forward, backward_bytes))


def gather(at: CostTerms) -> Found:
  """All-gather of the keys; then every shard attends alone."""
  others = at.size - 1
  pairs = at.pairs.sum(1)

  def one_pass(backward: bool) -> tuple[float, float]:
    read_bytes = at.query_bytes(backward) + at.size * at.kv_bytes
    put_bytes = at.sums(False)
    if backward:
      put_bytes = 2 * at.q * WIDE + 2 * at.size * at.sum_bytes
    compute = at.seconds(pairs, backward, taken=read_bytes, put=put_bytes)
    compute = compute + others * at.decode_s
    compute = compute + at.size * at.project_s(backward)
    seconds = float(compute.max())
    if others:
      seconds += at.ring.gather(others * at.wire_bytes)
      if backward:
        seconds += at.ring.gather(others * at.sent_sum_bytes)
    return seconds, float(compute.sum())

  all_kv_bytes = at.size * at.kv_bytes
  return at.prediction(
    one_pass, (all_kv_bytes, all_kv_bytes + at.size * at.sum_bytes)
  )


def ulysses(at: CostTerms) -> Found:
  """Exchange of tokens for heads; every device attends to all keys, alone."""
  return _traded(at, at.size)


def hybrid(at: CostTerms, inner: int) -> Found:
  """Exchange of heads inside groups; keys travel from group to group."""
  return _traded(at, inner)


def _traded(at: CostTerms, inner: int) -> Prediction:
  call, n = at.call, at.size // inner
  inner_net, outer_net = at.levels(inner)
  kv_heads, group = call.kv_heads, call.heads // call.kv_heads
  # Number of units, a multiple of `inner`, that K kv heads of G query heads
  # make.
  split = -(-inner // kv_heads)
  part = -(-group // split)
  units = -(-kv_heads * split // inner) * inner
  heads = units * part / inner
  more_q, more_kv = units * part / call.heads, units / kv_heads
  # Pairs between groups: every device has all tokens of its group.
  blocks = at.pairs.reshape(n, inner, n, inner).sum((1, 3))
  g = np.arange(n)
  reach = n - 1, 0
  if n > 1 and None not in call.mask.reach and not call.offset:
    needed = (blocks[g, (g - g[:, None]) % n] > 0).any(1)
    needed[0] = True
    reach = cut_hops(needed)
  by_hop = blocks[g, (g - np.asarray(_hops(*reach))[:, None]) % n]
  q, o = at.q * more_q, at.o * more_q
  rows, kv = at.rows * more_q, at.kv * more_kv
  kv_bytes, sum_bytes = kv * at.number, kv * WIDE
  sent_kv = kv * at.wire_number if n > 1 else kv_bytes

  def one_pass(backward: bool) -> tuple[float, float]:
    if backward:
      put_bytes = 2 * q * WIDE + (3 if n > 1 else 2) * sum_bytes
      # do is received; dq, dk and dv are sent back.
      traded = (o + q) * at.number + 2 * rows * WIDE + kv_bytes
    else:
      put_bytes = 2 * (o + 2 * rows) * WIDE
      traded = (q + o) * at.number + rows * WIDE + kv_bytes
    read_bytes = (q + (o + q) * backward) * at.number + kv_bytes
    compute = at.seconds(
      by_hop, backward, heads=heads, taken=read_bytes, put=put_bytes
    )
    compute = compute + at.decode_s * more_kv * (n > 1)
    seconds = at.rotation(
      outer_net, compute, reach, sent_kv, sum_bytes * backward
    )
    # Four exchanges: queries, keys, values and outputs, or their gradients.
    seconds += inner_net.exchange(traded * ((inner - 1) / inner))
    seconds += sum(inner_net.exchange(0.0) for _ in range(3))
    return seconds, float(compute.sum()) * inner

  copies = (q + o) * at.number + kv_bytes + (o + 2 * rows) * WIDE
  forward = copies + 2 * kv_bytes * (n > 1)
  gradients = 2 * o * at.number + q * WIDE + sum_bytes * (3 if n > 1 else 1)
  options, notes = {"inner": inner} if n > 1 else {}, ()
  if units * part > call.heads:
    notes = (
      f"{call.heads} query heads are padded to {units * part:g} "
      f"({heads:g} a device)",
    )
  return at.prediction(
    one_pass, (forward, forward + gradients), notes, **options
  )


def two_level(at: CostTerms, inner: int) -> Found:
  """Ring inside groups that runs while the next group's block is in flight."""
  if at.wire and not isinstance(wire_of(at.wire), WireFormat):
    return "a codec would encode again what it decoded"
  n = at.size // inner
  inner_net, outer_net = at.levels(inner)
  i = np.arange(at.size)
  group, place = i // inner, i % inner

  def one_pass(backward: bool) -> tuple[float, float]:
    finish, total = np.zeros(at.size), 0.0
    sums = at.sent_sum_bytes * backward
    for outer in range(n):
      source = (group - outer) % n
      rows = [
        at.pairs[i, source * inner + (place - h) % inner] for h in range(inner)
      ]
      compute = at.hop_s(np.stack(rows), backward)
      compute = compute + at.decode_s * (outer > 0 or inner > 1)
      total += float(compute.sum())
      sends = [
        inner_net.send(at.wire_bytes * (h < inner - 1), sums * (h > 0))
        for h in range(inner)
      ]
      inner_end = turn(compute.reshape(inner, n, inner), sends).reshape(-1)
      # The sums of the inner ring are sent on to the device that owns them.
      inner_end = inner_end + inner_net.send(sums)
      slow = outer_net.send(at.wire_bytes * (outer < n - 1), sums * (outer > 0))
      # Both ends begin an inner ring together, as in a hop of a ring.
      begin = np.maximum(finish, np.roll(finish, -inner))
      arrival = begin + slow if slow else finish
      end = np.maximum(finish + inner_end, arrival)
      finish = np.maximum(end, np.roll(arrival, inner)) if slow else end
    return float(finish.max()) + outer_net.send(sums), total

  extra = (4 * at.kv_bytes, 4 * at.kv_bytes + 4 * at.sum_bytes)
  return at.prediction(one_pass, extra, inner=inner)


def halo(at: CostTerms) -> Found:
  """Exchange of the neighbours' tokens in a window's reach; then one call."""
  keys_before, keys_after = at.call.mask.reach
  if keys_before is None or keys_after is None:
    return "the mask's reach has no limit; it is for a window"
  if not at.served:
    return f"in {at.layout} neighbours' tokens are not on neighbours"
  if not at.call.same_tokens:
    return "queries and keys are not the same tokens"
  max_rows = (at.size - 1) * at.s
  rows = {1: min(keys_before, max_rows), -1: min(keys_after, max_rows)}
  if rows[1] + at.s + rows[-1] > at.size * at.s:
    return "the window reaches around the whole sequence"
  hops = [0]
  for way, count in rows.items():
    hops += [way * d for d in range(1, -(-count // at.s) + 1)]
  pairs = at.by_hop(hops)
  # Keys do not wrap around: a shard at an end has fewer.
  source = np.arange(at.size) - np.asarray(hops)[:, None]
  pairs = np.where((source >= 0) & (source < at.size), pairs, 0.0).sum(0)
  token, sent_token = at.kv / at.s, at.sent / at.s
  tokens = rows[1] + rows[-1]

  def one_pass(backward: bool) -> tuple[float, float]:
    kv = (at.s + tokens) * token
    read_bytes = at.query_bytes(backward) + kv * at.number
    put_bytes = 2 * at.q * WIDE + 2 * kv * WIDE if backward else at.sums(False)
    compute = at.seconds(pairs, backward, taken=read_bytes, put=put_bytes)
    compute = compute + at.project_s(backward) * (1 + tokens / at.s)
    seconds = float(compute.max())
    for itemsize in (at.number, WIDE) if backward else (at.number,):
      ways = [0.0, 0.0]
      for way, count in enumerate(rows.values()):
        for d, start in enumerate(range(0, count, at.s), 1):
          part = min(at.s, count - start) * sent_token * itemsize
          ways[way] += at.ring.send(part, shift=d)
      seconds += at.ring.both_s(*ways)
    return seconds, float(compute.sum())

  halo_numbers = tokens * token
  extra = (halo_numbers * at.number, halo_numbers * (at.number + WIDE))
  return at.prediction(one_pass, extra, (f"{tokens} tokens of neighbours",))


def chain(at: CostTerms) -> Found:
  """Chain: keys are sent to later shards only, never around the ring."""
  if at.call.mask.reach[1] != 0:
    return "the mask lets queries see later keys"
  if not at.served:
    return f"in {at.layout} later shards have earlier tokens"
  if not at.call.same_tokens:
    return "queries and keys are not the same tokens"
  steps = at.size - 1
  if at.call.mask.reach[0] is not None:
    steps = at.directions[0]
  shard = np.arange(at.size)
  pairs = at.by_hop(range(steps + 1))
  takes_part = shard >= np.arange(steps + 1)[:, None]

  def one_pass(backward: bool) -> tuple[float, float]:
    compute = np.where(takes_part, at.hop_s(pairs, backward), 0.0)
    compute += np.where(takes_part, at.decode_s, 0.0)
    sums = at.sent_sum_bytes * backward
    finish = np.zeros(at.size)
    for step in range(steps + 1):
      send = at.ring.send(at.wire_bytes * (step < steps), sums * (step > 0))
      begin, finish = finish, finish + compute[step]
      if send:
        # Sent by each shard that has something to pass to the next.
        arrival = np.maximum(begin[:-1], begin[1:]) + send
        arrival = np.where(shard[1:] > step, arrival, 0.0)
        finish[:-1] = np.maximum(finish[:-1], arrival)
        finish[1:] = np.maximum(finish[1:], arrival)
    # Sums go to their owners at each step but the first, overlapped with the
    # tiles; only the last send is waited for.
    return_s = at.ring.send(sums * bool(steps), shift=steps)
    return float(finish.max()) + return_s, float(compute.sum())

  extra = (2 * at.kv_bytes, 2 * at.kv_bytes + 2 * at.sum_bytes)
  return at.prediction(one_pass, extra)


def _hops(hops_back: int, hops_forward: int) -> list[int]:
  """Offsets of the shards that each hop's keys come from, back and forward."""
  return [*range(hops_back + 1), *range(-1, -hops_forward - 1, -1)]

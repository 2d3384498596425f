"""A second opinion on predictions: tasks on devices and links, by events.

A task takes its resource for its time once all that it needs is done; a
resource serves what is ready first, in the order in which it was listed.
Nothing here is shared with the predictor: tiles are counted by looking at
every pair, gathers and exchanges are sent message by message.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np


class Tasks:
  """A graph of tasks; `run` gives the time at which all are done."""

  def __init__(self):
    self._tasks = []

  def add(self, seconds, resource=None, after=()):
    """Number of a new task."""
    self._tasks.append((seconds, resource, tuple(after)))
    return len(self._tasks) - 1

  def run(self):
    left = [len(set(after)) for *_, after in self._tasks]
    followers = [[] for _ in self._tasks]
    for n, (*_, after) in enumerate(self._tasks):
      for before in set(after):
        followers[before].append(n)
    free, waiting = {}, {}
    order = itertools.count()
    events = []
    end = 0.0

    def begin(now, n):
      seconds, resource, _ = self._tasks[n]
      if resource is not None:
        if free.get(resource, 0.0) > now:
          heapq.heappush(waiting.setdefault(resource, []), n)
          return
        free[resource] = now + seconds
      heapq.heappush(events, (now + seconds, next(order), n))

    for n, count in enumerate(left):
      if not count:
        begin(0.0, n)
    finished = 0
    while events:
      now, _, n = heapq.heappop(events)
      end, finished = max(end, now), finished + 1
      for follower in followers[n]:
        left[follower] -= 1
        if not left[follower]:
          begin(now, follower)
      queue = waiting.get(self._tasks[n][1])
      if queue:
        begin(now, heapq.heappop(queue))
    assert finished == len(self._tasks)
    return end


@dataclasses.dataclass(frozen=True)
class World:
  """What is simulated; rates are those of the local algorithm."""

  size: int
  t: int  # queries and keys of a shard
  batch: int
  heads: int
  kv_heads: int
  dim: int
  number: int
  rates: tuple[float, float]  # FLOPs per second forward, backward
  memory: float
  hop_s: float
  call_s: float
  bandwidth: float
  latency: float
  duplex: bool
  switch: bool
  tiles: np.ndarray  # [R, R, q tiles, k tiles] whether some pair is allowed
  blocks: tuple[int, int]

  def out(self, i, way):
    """The resource that a send of device i to a neighbour takes."""
    if self.switch:
      return "out", i
    edge = i if way == 1 else (i - 1) % self.size
    return ("edge", edge, way) if self.duplex else ("edge", edge)

  def send(self, nbytes, far=1):
    far = 1 if self.switch else far
    return far * (self.latency + nbytes / self.bandwidth)

  @property
  def kv(self):
    return 2 * self.batch * self.t * self.kv_heads * self.dim

  @property
  def q(self):
    return self.batch * self.t * self.heads * self.dim

  @property
  def rows(self):
    return self.batch * self.t * self.heads

  def pairs(self, i, j):
    return float(self.tiles[i, j].sum() * self.blocks[0] * self.blocks[1])

  def compute(self, pairs, backward, put, taken, heads=None):
    heads = self.heads if heads is None else heads
    flops = (10 if backward else 4) * self.dim * pairs * self.batch * heads
    seconds = flops / self.rates[backward]
    if pairs:
      seconds = max(seconds, taken / self.memory)
    return seconds + put / self.memory + self.hop_s

  def hop(self, pairs, backward):
    """Keys of a shard visit queries of one."""
    if backward:
      put = 2 * 4 * self.q + 3 * 4 * self.kv
      taken = (3 * self.q + self.kv) * self.number
    else:
      put = 2 * 4 * (self.q + 2 * self.rows)
      taken = (self.q + self.kv) * self.number
    return self.compute(pairs, backward, put, taken)


def ring(w, backward, name):
  """ring, bidirectional, ring_q and chain."""
  n, tasks = w.size, Tasks()
  if name == "bidirectional":
    sides = {1: n // 2, -1: (n - 1) // 2}
  else:
    sides = {1: n - 1}
  steps = max(sides.values())
  if name == "ring_q":
    moving = (2 * w.q * w.number + 8 * w.rows) if backward else w.q * w.number
    sums = 4 * w.q if backward else 4 * (w.q + 2 * w.rows)
  else:
    moving, sums = w.kv * w.number, 4 * w.kv * backward
  needs = [() for _ in range(n)]  # what each device waits for
  for step in range(steps + 1):
    computed, sent = [], []
    for i in range(n):
      ways = [0] if step == 0 else [d for d, m in sides.items() if step <= m]
      seconds = 0.0
      for way in ways:
        j = (i - step * way) % n
        if name == "ring_q":
          pairs = w.pairs(j, i)
          put = 2 * 4 * w.q + 2 * 4 * w.kv if backward else 3 * sums
          taken = ((3 if backward else 1) * w.q + w.kv) * w.number
          seconds += w.compute(pairs, backward, put, taken)
        elif name == "chain" and i < step:
          pass
        else:
          seconds += w.hop(w.pairs(i, j), backward)
      computed.append(tasks.add(seconds, ("device", i), needs[i]))
    for way, last in sides.items():
      first = 0 if way == 1 else 1
      for i in range(n):
        nbytes = moving * (step < last) + sums * (first < step <= last)
        to = (i + way) % n
        if nbytes and not (name == "chain" and to <= step):
          # Begins when both ends have begun the step.
          task = tasks.add(
            w.send(nbytes), w.out(i, way), (*needs[i], *needs[to])
          )
          sent += [(i, task), (to, task)]
    needs = [
      (computed[i], *(task for end, task in sent if end == i)) for i in range(n)
    ]
  if sums and n > 1:
    before = tuple(itertools.chain(*needs))
    for way, last in sides.items():
      far = min(last, n - last)
      for i in range(n if name != "chain" else 1):
        seconds = w.send(sums, far)
        tasks.add(seconds, w.out(i, way), before)
  return tasks.run() + w.call_s


def all_gather(w, tasks, nbytes, after):
  """Adds the messages of a gather of `nbytes` a device; the last ones."""
  n, have = w.size, [tuple(after)] * w.size
  if w.switch:
    done = 1
    while done < n:
      count = min(done, n - done)
      sent = [
        tasks.add(w.send(count * nbytes), ("out", i), have[i]) for i in range(n)
      ]
      have = [(sent[i], sent[(i + done) % n], *have[i]) for i in range(n)]
      done += count
    return tuple(itertools.chain(*have))
  last = []
  for way in (1, -1) if w.duplex else (1,):
    held = list(have)
    steps = (n - 1) / 2 if w.duplex else n - 1
    if n == 2 and way == -1:
      continue
    if n == 2:
      steps = 1
    while steps > 0:
      share = min(1.0, steps)
      sent = [
        tasks.add(w.send(share * nbytes), w.out(i, way), held[i])
        for i in range(n)
      ]
      held = [(sent[(i - way) % n], *held[i][:1]) for i in range(n)]
      last += sent
      steps -= 1
  return tuple(last)


def gather(w, backward, name):
  tasks, n = Tasks(), w.size
  whole = w.compute
  came = all_gather(w, tasks, w.kv * w.number, ())
  computed = []
  for i in range(n):
    pairs = sum(w.pairs(i, j) for j in range(n))
    if backward:
      put = 2 * 4 * w.q + 2 * 4 * n * w.kv
      taken = (3 * w.q + n * w.kv) * w.number
    else:
      put = 2 * 4 * (w.q + 2 * w.rows)
      taken = (w.q + n * w.kv) * w.number
    seconds = whole(pairs, backward, put, taken)
    computed.append(tasks.add(seconds, ("device", i), came))
  if backward:
    all_gather(w, tasks, 4 * w.kv, computed)
  return tasks.run() + w.call_s


def traded(w, backward, inner):
  """Ulysses, or a hybrid: an exchange, a ring of groups, an exchange."""
  n = w.size // inner
  kv_heads, group = w.kv_heads, w.heads // w.kv_heads
  assert kv_heads % inner == 0, "heads that divide need no padding"
  heads = kv_heads // inner * group
  seconds = 0.0
  traded = [w.q, w.q, w.kv / 2, w.kv / 2]
  extra = 8 * w.rows if backward else 4 * w.rows
  for which, numbers in enumerate(traded):
    seconds += exchange(
      w, numbers * w.number + extra * (which == 0), inner, n == 1
    )
  blocks = np.array([[w.pairs(i, j) for j in range(w.size)] for i in
                     range(w.size)])  # fmt: skip
  blocks = blocks.reshape(n, inner, n, inner).sum((1, 3))
  tasks, needs = Tasks(), [() for _ in range(n)]
  for step in range(n):
    computed, sent = [], []
    for g in range(n):
      if backward:
        put = 2 * 4 * w.q + (3 if n > 1 else 2) * 4 * w.kv
        taken = (3 * w.q + w.kv) * w.number
      else:
        put, taken = 2 * 4 * (w.q + 2 * w.rows), (w.q + w.kv) * w.number
      pairs = blocks[g, (g - step) % n]
      computed.append(
        tasks.add(
          w.compute(pairs, backward, put, taken, heads), ("device", g), needs[g]
        )
      )
      nbytes = w.kv * w.number * (step < n - 1)
      nbytes += 4 * w.kv * (backward and step > 0)
      if nbytes and n > 1:
        to = (g + 1) % n
        # A link carries those of all `inner` devices whose way it is on.
        far = min(inner, w.size - inner)
        task = tasks.add(
          w.send(nbytes, far), ("out", g), (*needs[g], *needs[to])
        )
        sent += [(g, task), (to, task)]
    needs = [
      (computed[g], *(task for end, task in sent if end == g)) for g in range(n)
    ]
  if backward and n > 1:
    tasks.add(
      w.send(4 * w.kv, min(inner, w.size - inner)),
      None,
      tuple(itertools.chain(*needs)),
    )
  return seconds + tasks.run() + w.call_s


def exchange(w, nbytes, size, closed):
  """Seconds of an all-to-all, from the load of each link."""
  if size == 1:
    return 0.0
  each = nbytes / size
  if w.switch:
    return w.latency + (size - 1) * each / w.bandwidth
  load, longest = {}, 0
  for i, j in itertools.permutations(range(size), 2):
    ways = [(1, (j - i) % size), (-1, (i - j) % size)] if closed else []
    if not ways:
      ways = [(1, j - i)] if j > i else [(-1, i - j)]
    least = min(d for _, d in ways)
    ways = [way for way in ways if way[1] == least]
    if size == 2:
      ways = [(1, 1) if j > i else (-1, 1)]
    longest = max(longest, least)
    for way, distance in ways:
      at = i
      for _ in range(distance):
        edge = at if way == 1 else (at - 1) % size
        key = (edge, way) if w.duplex else edge
        load[key] = load.get(key, 0.0) + each / len(ways)
        at = (at + way) % size
  busiest = max(load.values()) / w.bandwidth
  return busiest + longest * w.latency * (1 if w.duplex else 2)


def halo(w, backward, behind):
  """A window that looks back only, over contiguous tokens."""
  shards = -(-behind // w.t)
  token = w.kv / w.t
  seconds = 0.0
  for number in (w.number, 4) if backward else (w.number,):
    for d in range(1, shards + 1):
      count = min(w.t, behind - (d - 1) * w.t)
      seconds += w.send(count * token * number, min(d, w.size - d))
  slowest = 0.0
  for i in range(w.size):
    pairs = sum(w.pairs(i, i - d) for d in range(shards + 1) if i >= d)
    kv = (w.t + behind) * token
    put = 8 * w.q + 8 * kv if backward else 8 * (w.q + 2 * w.rows)
    taken = ((3 if backward else 1) * w.q + kv) * w.number
    slowest = max(slowest, w.compute(pairs, backward, put, taken))
  return seconds + slowest + w.call_s

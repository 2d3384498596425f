"""The times of a schedule, from the operations of one of its layers.

A schedule is the operations of a layer, each with those that it waits for, in
this layer or some layers before. Where every device and link runs them in the
order of the description, as in a chain, times follow by a recurrence (`solve`),
of many cases at once:

  ready = max(done of `after`)
  start = max(ready, done of `behind`, end of what its device or link ran last)
  end   = start + seconds
  done  = end + latency of its link

In a ring that passes on what arrives first they do not, and the same
operations are played on `events.Simulator` (`simulate`).

Guarantees: where the order is that of the description both give the same times.
Cost: of `solve` an array operation for each edge, operation and layer.
Ref: Baccelli, Cohen, Olsder and Quadrat 1992, "Synchronization and Linearity",
on timed event graphs.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringjax.parallel.chips import Link
from ringjax.plan.events import Op, Simulator, Span, Timeline

# A number, or float [K]: one for each of K cases.
Numbers = Any


class Edge(NamedTuple):
  """What an operation waits for.

  Fields:
    name: of the other operation.
    back: so many layers before; the first layers do not wait.
  """

  name: str
  back: int = 0


class Operation(NamedTuple):
  """An operation of every layer.

  Fields:
    name: unique; "{}" in it stands for the number of the layer.
    kind: its group, for pictures and sums.
    where: the device or link; "" is neither.
    seconds: how long it takes.
    after: operations whose results it needs.
    behind: operations that leave it a buffer.
    nbytes: what it sends.
    link: over which it sends.
    slowdown: factors of its seconds, by layer; empty is 1.
  """

  name: str
  kind: str
  where: str = ""
  seconds: Numbers = 0.0
  after: tuple[Edge, ...] = ()
  behind: tuple[Edge, ...] = ()
  nbytes: Numbers = 0.0
  link: Link | None = None
  slowdown: Sequence[float] = ()


def solve(
  operations: Sequence[Operation],
  layers: int,
  spans: list[Span] | None = None,
) -> dict[str, Numbers]:
  """When each operation of the last layer is done, by name.

  Args:
    operations: of a layer, each described after those of its own layer that
      it waits for.
    layers: how many.
    spans: gets what every operation did, where there is a single case.
  """
  edges = [edge for one in operations for edge in one.after + one.behind]
  kept = 1 + max((edge.back for edge in edges), default=0)
  # Of the last layers, the newest first.
  done: collections.deque[dict[str, Numbers]] = collections.deque(maxlen=kept)
  free: dict[str, Numbers] = {}
  for layer in range(layers):
    done.appendleft({})
    for one in operations:
      time: Numbers = 0.0
      for name, back in one.after:
        if back <= layer:
          time = np.maximum(time, done[back][name])
      ready = time
      for name, back in one.behind:
        if back <= layer:
          time = np.maximum(time, done[back][name])
      start = np.maximum(time, free.get(one.where, 0.0))
      seconds = one.seconds
      if one.slowdown:
        seconds = seconds * one.slowdown[layer]
      end = start + seconds
      if one.where:
        free[one.where] = end
      latency_s = one.link.latency_s if one.link else 0.0
      done[0][one.name] = end + latency_s if latency_s else end
      if spans is not None:
        times = (ready, start, end, done[0][one.name], one.nbytes)
        name = one.name.format(layer)
        spans.append(Span(name, one.kind, one.where, *map(float, times)))
  return done[0]


def simulate(operations: Sequence[Operation], layers: int) -> Timeline:
  """The timeline of a single case, whatever the order of the operations."""
  sim = Simulator()
  places: dict[str, Any] = {"": None}
  ops: dict[tuple[str, int], Op] = {}
  for layer in range(layers):
    for one in operations:
      name, where = one.name.format(layer), one.where
      edges = [edge for edge in one.after + one.behind if edge.back <= layer]
      after = [ops[edge.name, layer - edge.back] for edge in edges]
      if one.link is None:
        if where not in places:
          places[where] = sim.device(where)
        op = sim.op(
          name, places[where], float(one.seconds), after=after, kind=one.kind
        )
      else:
        if where not in places:
          link = one.link
          places[where] = sim.link(where, link.bandwidth, link.latency_s)
        slowdown = one.slowdown[layer] if one.slowdown else 1.0
        op = sim.send(
          name, places[where], float(one.nbytes), slowdown=slowdown, after=after
        )
      ops[one.name, layer] = op
  return sim.run()

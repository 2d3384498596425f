"""Times of a repeated schedule, from the operations of one of its layers.

A schedule is the operations of a layer, each with those that it waits for, in
this layer or some layers before. If every device and link runs them in the
order of the description, as in a chain, times follow by a recurrence (`solve`),
for many cases at once:

  ready = max(done of `after`)
  start = max(ready, done of `behind`, end of what its device or link ran last)
  end   = start + seconds
  done  = end + latency of its link

In a ring that forwards messages in the order of arrival they do not, and the
same operations run on `events.Simulator` (`simulate`).

Guarantees: if the order is that of the description both give the same times.
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
  """A dependency of an operation.

  Fields:
    name: Name of the other operation.
    back: Number of layers before; the first layers do not wait.
  """

  name: str
  back: int = 0


class Operation(NamedTuple):
  """An operation of every layer.

  Fields:
    name: Unique name; "{}" in it stands for the layer's number.
    kind: Group, for pictures and sums.
    resource: Device or link; "" for neither.
    seconds: Duration.
    after: Operations whose results it needs.
    behind: Operations that free a buffer for it.
    nbytes: Number of bytes that it sends.
    link: Link over which it sends.
    slowdown: Factors on its seconds, by layer; empty means 1.
  """

  name: str
  kind: str
  resource: str = ""
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
  """Completion time of each operation of the last layer, by name.

  Args:
    operations: Operations of a layer, each after those of the same layer that
      it waits for.
    layers: Number of layers.
    spans: List that gets the span of every operation, for a single case.
  """
  edges = [
    edge
    for operation in operations
    for edge in operation.after + operation.behind
  ]
  num_layers_kept = 1 + max((edge.back for edge in edges), default=0)
  # For the last layers, newest first.
  done_by_layer: collections.deque[dict[str, Numbers]] = collections.deque(
    maxlen=num_layers_kept
  )
  free_at: dict[str, Numbers] = {}
  for layer in range(layers):
    done_by_layer.appendleft({})
    for operation in operations:
      time: Numbers = 0.0
      for name, back in operation.after:
        if back <= layer:
          time = np.maximum(time, done_by_layer[back][name])
      ready = time
      for name, back in operation.behind:
        if back <= layer:
          time = np.maximum(time, done_by_layer[back][name])
      start = np.maximum(time, free_at.get(operation.resource, 0.0))
      seconds = operation.seconds
      if operation.slowdown:
        seconds = seconds * operation.slowdown[layer]
      end = start + seconds
      if operation.resource:
        free_at[operation.resource] = end
      latency_s = operation.link.latency_s if operation.link else 0.0
      done_by_layer[0][operation.name] = end + latency_s if latency_s else end
      if spans is not None:
        times = (
          ready,
          start,
          end,
          done_by_layer[0][operation.name],
          operation.nbytes,
        )
        name = operation.name.format(layer)
        spans.append(
          Span(name, operation.kind, operation.resource, *map(float, times))
        )
  return done_by_layer[0]


def simulate(operations: Sequence[Operation], layers: int) -> Timeline:
  """Simulate a single case, for any order of the operations."""
  sim = Simulator()
  places: dict[str, Any] = {"": None}
  ops: dict[tuple[str, int], Op] = {}
  for layer in range(layers):
    for operation in operations:
      name, place = operation.name.format(layer), operation.resource
      edges = [
        edge
        for edge in operation.after + operation.behind
        if edge.back <= layer
      ]
      dependencies = [ops[edge.name, layer - edge.back] for edge in edges]
      if operation.link is None:
        if place not in places:
          places[place] = sim.device(place)
        op = sim.op(
          name,
          places[place],
          float(operation.seconds),
          after=dependencies,
          kind=operation.kind,
        )
      else:
        if place not in places:
          link = operation.link
          places[place] = sim.link(place, link.bandwidth, link.latency_s)
        slowdown = operation.slowdown[layer] if operation.slowdown else 1.0
        op = sim.send(
          name,
          places[place],
          float(operation.nbytes),
          slowdown=slowdown,
          after=dependencies,
        )
      ops[operation.name, layer] = op
  return sim.run()

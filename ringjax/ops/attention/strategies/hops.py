"""Hops of ring strategies as data, and the loop that runs them.

A block travels along a *lane*: one way around the ring, from hop to hop. The
computation, sends and sums of every hop follow from the lanes alone
(`schedule`), and `RingStrategy` runs that schedule forward and backward, for
keys that travel to queries (`Ring`) and for queries that travel to keys
(`RingQ`).

Guarantees: the send of a hop depends on nothing that the hop computes: a block
leaves before the tiles run, and the sums that came with it travel on while
this shard computes its contribution, which is added on arrival. So a compiler
can hide every send but the last one, which takes sums to the owner.
Cost: a lane of n hops sends its block n times and its sums once each hop but
the first, and once to the owner.
Memory: the current block and the block in flight of each lane.

Hops that do the same are a rolled loop: the program does not grow with the
number of shards. The first hop of a loop is its start, so that no state
begins with zeros that would be sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.typing import Index


class Lane(NamedTuple):
  """The path of a shard's block around the ring.

  Fields:
    shift: Number of shards by which it moves in a hop: 1 brings the blocks of
      earlier shards, -1 those of later ones; 0 stays at its owner.
    first: First hop that computes with it; before that it only travels.
    last: Last hop that computes with it; int32 [] if known at run time only.
  """

  shift: int
  first: int
  last: Index


class HopRange(NamedTuple):
  """Consecutive hops that do the same.

  Fields:
    start: Index of the first of them; hop 0 is at the owners.
    count: Number of hops, an int or int32 [].
    compute: Indices of the lanes whose blocks are computed with.
    send: Lanes whose blocks are sent on meanwhile.
    collect: Lanes whose sums of earlier hops are sent on, and are added to.
  """

  start: Index
  count: Index
  compute: tuple[int, ...]
  send: tuple[int, ...]
  collect: tuple[int, ...]


# The lane of a block that stays at its owner.
OWN = Lane(0, 0, 0)


def schedule(lanes: Sequence[Lane], *, sums: bool) -> list[HopRange]:
  """List the hops of `lanes`, in order.

  Args:
    lanes: Paths of the blocks; a lane whose length is known at run time only is
      alone, and has at least 2 hops with sums, else at least 1.
    sums: Whether the results of a hop travel on with the block.
  """
  if not isinstance(lanes[0].last, int):
    # Like the schedule of three hops, with any number of iterations of the
    # loop.
    (lane,) = lanes
    *begin, loop, end = schedule([lane._replace(last=3)], sums=sums)
    loop = loop._replace(count=lane.last - loop.start)
    return [*begin, loop, end._replace(start=lane.last)]

  def of_hop(n: int) -> tuple[tuple[int, ...], ...]:
    lanes_where = lambda condition: tuple(
      i for i, x in enumerate(lanes) if condition(x)
    )
    return (
      lanes_where(lambda x: x.first <= n <= x.last),
      lanes_where(lambda x: n < x.last),
      lanes_where(lambda x: sums and x.first < n <= x.last),
    )

  ranges, hops = [], range(1 + max(x.last for x in lanes))
  for lane_sets, group in itertools.groupby(hops, of_hop):
    numbers = [*group]
    ranges.append(HopRange(numbers[0], len(numbers), *lane_sets))
  return ranges


# Computation of a hop: visit(carry, block, distance) -> (carry, sums). The
# block is from the shard `distance` places before; None stands for the shard's
# own operands, as they are.
HopFunction = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class RingStrategy(Strategy):
  """A strategy that sends blocks around a ring.

  Attributes:
    local: Algorithm of one hop.
    axis: Mesh axis; filled in by the functions that take `axis=`.
    hops: (back, forward) numbers of shards in each direction that are visited;
      None: the whole ring.
    unroll: Number of hops in the loop's body; two save the copy that a rotating
      buffer costs in a rolled loop.
  """

  # Shift by which queries meet the keys before them.
  query_shift: ClassVar[int] = 1

  hops: tuple[int, int] | None = None
  unroll: int = 2

  def __post_init__(self) -> None:
    hops = self.hops
    if hops is not None and not (
      isinstance(hops, tuple | list)
      and len(hops) == 2
      and all(isinstance(n, int | np.integer) and n >= 0 for n in hops)
    ):
      raise _bad_hops(hops, "None or a pair (from behind, from ahead)")
    positive_int("unroll", self.unroll)

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Any:
    """Bind to `axis`, restricted to the distances that are `needed`."""
    hops = self.hops
    if needed is not None and hops is None:
      hops = self._cut(needed)
    return dataclasses.replace(self, axis=axis, hops=hops)

  def _cut(self, needed: np.ndarray) -> tuple[int, int]:
    """Hops that bring the shards at the distances that are `needed`."""
    return cut_hops(needed)

  def _hops(self) -> tuple[int, int]:
    """Numbers of hops, (back, forward)."""
    size = self._place()[0]
    if self.hops is None:
      return self._cut(np.ones(size, bool))
    hops_back, hops_forward = (int(n) for n in self.hops)
    if hops_back + hops_forward >= size:
      # A block that arrived twice would count twice.
      raise _bad_hops(self.hops, f"at most {size - 1} on {size} shards")
    return hops_back, hops_forward

  def _lanes(self) -> list[Lane]:
    """Lane of the shard's own block, and of each direction with hops."""
    lanes = zip(
      (self.query_shift, -self.query_shift), self._hops(), strict=True
    )
    return [OWN, *(Lane(shift, 1, n) for shift, n in lanes if n)]

  def _walk(
    self,
    lanes: Sequence[Lane],
    block: PyTree,
    carry: PyTree,
    visit: HopFunction,
    add: Callable[[Any, Any], Any] | None = None,
  ) -> tuple[Any, Any]:
    """Run the hops of `lanes`.

    Args:
      lanes: Paths of the blocks.
      block: Block that this shard sends, a pair (arrays, their coordinates).
      carry: Initial carry of `visit`.
      visit: Function that computes with a block.
      add: Function that adds the sums of two visits to one block; None: visits
        return results in their carry alone.

    Returns:
      carry: Final carry.
      sums: Sums for this shard's own block, or None.
    """
    sums: dict[int, Any] = {}
    blocks: dict[int, Any] = {}

    def hop(part: HopRange, n: Index, state: tuple) -> tuple:
      carry, blocks, sums = state
      incoming = {
        i: self._send(blocks.get(i, block), lanes[i].shift) for i in part.send
      }
      moved_sums = {
        i: self._send_sums(sums[i], lanes[i].shift, incoming.get(i))
        for i in part.collect
      }
      results = {}
      for i in part.compute:
        carry, visit_sums = visit(carry, blocks.get(i), n * lanes[i].shift)
        if add is not None:
          results[i] = (
            add(moved_sums[i], visit_sums) if i in moved_sums else visit_sums
          )
      return carry, incoming, results

    for part in schedule(lanes, sums=add is not None):
      state = carry, blocks, {i: sums[i] for i in part.collect}
      body = functools.partial(hop, part)
      # A loop's state has the same lanes before and after.
      if part.send == part.compute and part.collect == (
        part.compute if add is not None else ()
      ):
        begin = {i: blocks.get(i, block) for i in part.compute}
        state = (carry, begin, state[2])
        state = self._repeat(part.start, part.count, body, state)
      else:
        state = body(part.start, state)
      carry, blocks, results = state
      sums |= results
    if add is None:
      return carry, None
    returned = [self._to_owner(sums[i], lane) for i, lane in enumerate(lanes)]
    return carry, functools.reduce(add, returned)

  def _repeat(
    self, first: Index, times: Index, body: Callable[..., Any], state: PyTree
  ) -> PyTree:
    """Apply `body` `times` times, state = body(n, state), from n = first on."""
    if not isinstance(times, int):
      return lax.fori_loop(
        jnp.int32(first), jnp.int32(first) + times, body, state
      )
    numbers = jnp.arange(first, first + times, dtype=jnp.int32)
    # A loop of one iteration is no loop to the compiler, which then sends all
    # blocks before the first computation: each hop would wait for the last.
    rolled = times >= 2 * self.unroll

    def step(state: PyTree, n: Index) -> tuple[Any, None]:
      state = state if rolled else lax.optimization_barrier(state)
      return body(n, state), None

    return lax.scan(step, state, numbers, unroll=min(self.unroll, times))[0]

  def _send(self, block: PyTree, shift: int) -> PyTree:
    """Send a block to the next shard, its coordinates first.

    A hop begins with coordinates: sent after keys and values, or after
      gradients,
    on the same link, they would arrive as late as those.
    """
    assert self.axis is not None
    arrays, at = block
    at = collectives.rotate(at, self.axis, shift)
    arrays, at = lax.optimization_barrier((arrays, at))
    return block._make((collectives.rotate(arrays, self.axis, shift), at))

  def _send_sums(self, sums: PyTree, shift: int, coming: PyTree) -> PyTree:
    """Send sums to the next shard, after the incoming block's coordinates."""
    assert self.axis is not None
    if coming is not None:
      sums, _ = lax.optimization_barrier((sums, coming[1]))
    return collectives.rotate(sums, self.axis, shift)

  def _to_owner(self, sums: PyTree, lane: Lane) -> PyTree:
    """Send the sums of a lane's last hop to the owner of its block."""
    if isinstance(lane.last, int) and not lane.last:
      return sums
    assert self.axis is not None
    return_sums = lambda sums, n: collectives.rotate(
      sums, self.axis, -n * lane.shift
    )
    if isinstance(lane.last, int):
      return return_sums(sums, lane.last)
    distances = range(1, self._place()[0])
    branches = [functools.partial(return_sums, n=n) for n in distances]
    return lax.switch(lane.last - 1, branches, sums)


def cut_hops(needed: np.ndarray, *, two_way: bool = False) -> tuple[int, int]:
  """Fewest (back, forward) hops that bring the `needed` shards.

  Args:
    needed: Whether the keys of the shard d places before are needed, bool
      [shards], by d.
    two_way: Whether hops in both directions count as one.
  """
  size = needed.size
  distances = [d for d in range(1, size) if needed[d]]
  cost = lambda hops: (max(hops) if two_way else 0, sum(hops))
  best = (size // 2, (size - 1) // 2) if two_way else (size - 1, 0)
  for hops_forward in range(size):
    hops_back = max(
      (d for d in distances if size - d > hops_forward), default=0
    )
    if cost((hops_back, hops_forward)) < cost(best):
      best = (hops_back, hops_forward)
  return best


def _bad_hops(hops: object, want: str) -> OptionError:
  return OptionError("hops", repr(hops), want, "leave it out: a mask cuts them")

"""The hops of a ring as data, and the one loop that walks them.

A block travels along a *lane*: one way around the ring, from one hop to
another. What every hop computes, sends and adds follows from the lanes alone
(`schedule`), and `RingStrategy` walks that schedule forward and backward, for
keys that travel to queries (`Ring`) and for queries that travel to keys
(`RingQ`).

Guarantees: the send of a hop depends on nothing that the hop computes: a block
leaves before the tiles run, and the sums that came with it travel on while
this shard computes its own contribution, which is added on arrival. So a
compiler can hide every send but the last one, which takes sums to the owner.
Cost: a lane of n hops sends its block n times and its sums once each hop but
the first, and once to the owner.
Memory: of each lane the block at hand and the block in flight.

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
from ringjax.ops.attention.strategy import Strategy
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.typing import Index


class Lane(NamedTuple):
  """The path of a shard's block around the ring.

  Fields:
    shift: how many shards on it goes in a hop: 1 brings the blocks of shards
      behind, -1 those of shards ahead; 0 stays at its owner.
    first: the hop that first computes with it; before that it only travels.
    last: the hop that last does; int32 [] where it is known at run time only.
  """

  shift: int
  first: int
  last: Index


class HopRange(NamedTuple):
  """Hops in a row that do the same.

  Fields:
    start: the number of the first of them; hop 0 is at the owners.
    count: how many, an int or int32 [].
    compute: the lanes (by number) whose blocks are computed with.
    send: the lanes whose blocks travel on meanwhile.
    collect: the lanes whose sums of earlier hops travel, and are added to.
  """

  start: Index
  count: Index
  compute: tuple[int, ...]
  send: tuple[int, ...]
  collect: tuple[int, ...]


# The lane of a block that stays at its owner.
OWN = Lane(0, 0, 0)


def schedule(lanes: Sequence[Lane], *, sums: bool) -> list[HopRange]:
  """The hops of `lanes`, in order.

  Args:
    lanes: where blocks go; one whose length is known at run time only is
      alone, and has at least 2 hops with sums, else at least 1.
    sums: whether the results of a hop travel on with the block.
  """
  if not isinstance(lanes[0].last, int):
    # As of three hops, except that the loop has any number of iterations.
    (lane,) = lanes
    *begin, loop, end = schedule([lane._replace(last=3)], sums=sums)
    loop = loop._replace(count=lane.last - loop.start)
    return [*begin, loop, end._replace(start=lane.last)]

  def of_hop(n: int) -> tuple[tuple[int, ...], ...]:
    which = lambda yes: tuple(i for i, x in enumerate(lanes) if yes(x))
    return (
      which(lambda x: x.first <= n <= x.last),
      which(lambda x: n < x.last),
      which(lambda x: sums and x.first < n <= x.last),
    )

  found, hops = [], range(1 + max(x.last for x in lanes))
  for same, group in itertools.groupby(hops, of_hop):
    numbers = [*group]
    found.append(HopRange(numbers[0], len(numbers), *same))
  return found


# What a hop computes: visit(carry, block, distance) -> (carry, sums). The block
# is that of the shard `distance` places behind; None stands for a shard's own
# operands, as they are.
HopFunction = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class RingStrategy(Strategy):
  """A strategy that sends blocks around a ring.

  Attributes:
    local: the algorithm of one hop.
    axis: the axis; filled in by the functions that take `axis=`.
    hops: (from behind, from ahead), how many shards in either direction are
      visited; None is the whole ring.
    unroll: how many hops the loop's body holds; two save the copy that a
      rotating buffer costs in a rolled loop.
  """

  # Where a block goes so that queries meet the keys behind them.
  behind: ClassVar[int] = 1

  hops: tuple[int, int] | None = None
  unroll: int = 2

  def __post_init__(self) -> None:
    hops: Any = self.hops
    if hops is not None and not (
      isinstance(hops, tuple | list)
      and len(hops) == 2
      and all(isinstance(n, int | np.integer) and n >= 0 for n in hops)
    ):
      raise _bad_hops(hops, "None or a pair (from behind, from ahead)")
    positive_int("unroll", self.unroll)

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Any:
    """This ring on `axis`, cut to the distances that are `needed`."""
    hops = self.hops
    if needed is not None and hops is None:
      hops = self._cut(needed)
    return dataclasses.replace(self, axis=axis, hops=hops)

  def _cut(self, needed: np.ndarray) -> tuple[int, int]:
    """The hops that bring the shards at the distances that are `needed`."""
    return cut_hops(needed)

  def _hops(self) -> tuple[int, int]:
    """(from behind, from ahead)."""
    size = self._place()[0]
    if self.hops is None:
      return self._cut(np.ones(size, bool))
    behind, ahead = (int(n) for n in self.hops)
    if behind + ahead >= size:
      # A block that came twice would count twice.
      raise _bad_hops(self.hops, f"at most {size - 1} on {size} shards")
    return behind, ahead

  def _lanes(self) -> list[Lane]:
    """A shard's own block, and one for each direction that brings others."""
    lanes = zip((self.behind, -self.behind), self._hops(), strict=True)
    return [OWN, *(Lane(shift, 1, n) for shift, n in lanes if n)]

  def _walk(
    self,
    lanes: Sequence[Lane],
    block: PyTree,
    carry: PyTree,
    visit: HopFunction,
    add: Callable[[Any, Any], Any] | None = None,
  ) -> tuple[Any, Any]:
    """Walks the hops of `lanes`.

    Args:
      lanes: where blocks go.
      block: what this shard sends, a pair (arrays, their coordinates).
      carry: what the first visit gets.
      visit: computes with a block.
      add: joins what two visits found about one block; None: what visits find
        is in their carry alone.

    Returns:
      (carry, the sums about this shard's own block or None).
    """
    sums: dict[int, Any] = {}
    blocks: dict[int, Any] = {}

    def hop(part: HopRange, n: Index, state: tuple) -> tuple:
      carry, blocks, sums = state
      coming = {
        i: self._send(blocks.get(i, block), lanes[i].shift) for i in part.send
      }
      moved = {
        i: self._send_sums(sums[i], lanes[i].shift, coming.get(i))
        for i in part.collect
      }
      found = {}
      for i in part.compute:
        carry, more = visit(carry, blocks.get(i), n * lanes[i].shift)
        if add is not None:
          found[i] = add(moved[i], more) if i in moved else more
      return carry, coming, found

    for part in schedule(lanes, sums=add is not None):
      state = carry, blocks, {i: sums[i] for i in part.collect}
      body = functools.partial(hop, part)
      # What a loop leaves is what it began with.
      if part.send == part.compute and part.collect == (
        part.compute if add is not None else ()
      ):
        begin = {i: blocks.get(i, block) for i in part.compute}
        state = (carry, begin, state[2])
        state = self._repeat(part.start, part.count, body, state)
      else:
        state = body(part.start, state)
      carry, blocks, found = state
      sums |= found
    if add is None:
      return carry, None
    owned = [self._to_owner(sums[i], lane) for i, lane in enumerate(lanes)]
    return carry, functools.reduce(add, owned)

  def _repeat(
    self, first: Index, times: Index, body: Callable[..., Any], state: PyTree
  ) -> PyTree:
    """state of body(n, state) for n = first, ..., `times` of them."""
    if not isinstance(times, int):
      return lax.fori_loop(
        jnp.int32(first), jnp.int32(first) + times, body, state
      )
    numbers = jnp.arange(first, first + times, dtype=jnp.int32)
    # A loop of one iteration is no loop to the compiler, which then sends all
    # blocks before the first is computed with: each hop waits for the last.
    rolled = times >= 2 * self.unroll

    def step(state: PyTree, n: Index) -> tuple[Any, None]:
      state = state if rolled else lax.optimization_barrier(state)
      return body(n, state), None

    return lax.scan(step, state, numbers, unroll=min(self.unroll, times))[0]

  def _send(self, block: PyTree, shift: int) -> PyTree:
    """Sends a block to the next shard, its coordinates first.

    A hop begins with coordinates: behind keys and values, or behind gradients,
    on the same link they would come as late as those.
    """
    assert self.axis is not None
    arrays, at = block
    at = collectives.rotate(at, self.axis, shift)
    arrays, at = lax.optimization_barrier((arrays, at))
    return block._make((collectives.rotate(arrays, self.axis, shift), at))

  def _send_sums(self, sums: PyTree, shift: int, coming: PyTree) -> PyTree:
    """Sends sums to the next shard, behind the coordinates that are coming."""
    assert self.axis is not None
    if coming is not None:
      sums, _ = lax.optimization_barrier((sums, coming[1]))
    return collectives.rotate(sums, self.axis, shift)

  def _to_owner(self, sums: PyTree, lane: Lane) -> PyTree:
    """Sends the sums of a lane's last hop to the shard whose block it was."""
    if isinstance(lane.last, int) and not lane.last:
      return sums
    assert self.axis is not None
    back = lambda sums, n: collectives.rotate(sums, self.axis, -n * lane.shift)
    if isinstance(lane.last, int):
      return back(sums, lane.last)
    distances = range(1, self._place()[0])
    branches = [functools.partial(back, n=n) for n in distances]
    return lax.switch(lane.last - 1, branches, sums)


def cut_hops(needed: np.ndarray, *, two_way: bool = False) -> tuple[int, int]:
  """The fewest (from behind, from ahead) hops that bring `needed` shards.

  Args:
    needed: bool [shards]; `needed[d]` says whether the keys of the shard d
      places behind are wanted.
    two_way: hops in both directions count as one.
  """
  size = needed.size
  wanted = [d for d in range(1, size) if needed[d]]
  cost = lambda hops: (max(hops) if two_way else 0, sum(hops))
  best = (size // 2, (size - 1) // 2) if two_way else (size - 1, 0)
  for ahead in range(size):
    behind = max((d for d in wanted if size - d > ahead), default=0)
    if cost((behind, ahead)) < cost(best):
      best = (behind, ahead)
  return best


def _bad_hops(hops: object, want: str) -> OptionError:
  return OptionError("hops", repr(hops), want, "leave it out: a mask cuts them")

"""Ring attention: queries stay, keys and values travel around the axis.

Guarantees: equals `reference` on the gathered sequence, for every layout and
every mask over coordinates; forward and backward.
Cost: a full ring of R shards sends K and V R-1 times forward; backward K and
V R-1 times and the float32 sums dK, dV R times, the last one to the owner.
Nothing sent is zero or unused. A window sends only as far as it sees. In both
directions at once (`two_way`) these are ceil((R-1)/2) steps, in each of which
a link carries a block in either direction.
Memory: the current block and the block in flight (two each with `two_way`);
the backward pass rotates the blocks again instead of keeping R of them.
Ref: Liu et al. 2023, arXiv 2310.01889. With a striped layout this is striped
attention (Brandon et al. 2023, arXiv 2311.09431).

`hops.py` has the schedule and the loop. K and V are one array where their head
dims agree, as are dK and dV; the coordinates travel with them.

A ring's local algorithm may be a ring: `Ring(Ring())` rotates each block that
comes around the ring of groups around a ring of neighbours, while the next such
block is in flight. Links between groups then carry a block once and not once
for each neighbour.

With `by_document` the shards exchange, in each call, which of the packed
documents they hold, and there are only as many hops as the farthest document
reaches: their number is data, the program the same for every batch. Both passes
send K and V, and the backward pass the sums, once for each hop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import Context, ScoreArgs
from ringjax.ops.attention.strategies.hops import (
  OWN,
  HopFunction,
  Lane,
  RingStrategy,
  cut_hops,
)
from ringjax.ops.attention.strategies.kv_block import KVBlock, KVStrategy
from ringjax.ops.attention.strategies.strategy import tie_coords_to_queries
from ringjax.ops.attention.strategies.wire_format import WireLike, pack, unpack
from ringjax.ops.mask import Coords, Extent, Mask, extent
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.typing import Index

# Pieces of a shard whose documents are exchanged.
_PIECES = 16


@dataclasses.dataclass(frozen=True)
class Ring(RingStrategy, KVStrategy):
  """Pass-KV ring over a local algorithm.

  Attributes:
    local: Algorithm of one hop: `Blockwise()`, `Dense()`, or for two levels
      another `Ring` or a `Gather`.
    axis: Mesh axis; filled in by the functions that take `axis=`.
    hops: (back, forward) numbers of shards whose keys arrive from either
      direction of the ring; None: the whole ring.
    unroll: Number of hops in the loop's body; two save the copy that a rotating
      buffer costs in a rolled loop.
    two_way: Whether blocks of a whole ring travel in both directions at once.
    wire: Wire format of keys and values: None as they are, "bfloat16", "int8",
      "float8_e4m3fn", "float8_e5m2", a `WireFormat`, or the codec of a cache,
      an `rj.kv.Codec`. A shard's own keys stay exact.
    by_document: Whether packed documents cut the hops, see above.
    inner: Number of neighbours that the second level spans, if both levels are
      on one mesh axis.
  """

  inside = ("Ring", "Gather")

  two_way: bool = False
  wire: WireLike | None = None
  by_document: bool = False
  inner: int | None = None

  def __post_init__(self) -> None:
    RingStrategy.__post_init__(self)
    KVStrategy.__post_init__(self)
    nested = hasattr(self.local, "attend")
    if self.by_document and (self.two_way or nested):
      raise OptionError(
        "by_document",
        f"True in {self!r}",
        "one level and one direction at a time",
        "leave two_way and the second level out",
      )
    if self.by_document and self.differentiable:
      raise OptionError(
        "by_document",
        f"True around {self.local!r}",
        "a blockwise algorithm: a loop whose length is data has no gradient",
        "pass local=Blockwise()",
      )

  def _cut(self, needed: np.ndarray) -> tuple[int, int]:
    return cut_hops(needed, two_way=self.two_way)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys of all shards into `carry`."""
    x, args = tie_coords_to_queries(x, args)

    def visit(
      carry: Partial, block: KVBlock | None, distance: Index
    ) -> tuple[Partial, None]:
      operands = self._operands(x, args, block, distance)
      return self.local.forward(*operands, carry), None

    return self._visit_all(x, args.context, carry, visit)[0]

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of a shard's own keys to `carry`, (dq, dterms)."""
    x, args = tie_coords_to_queries(x, args)

    def visit(
      carry: QGradients, block: KVBlock | None, distance: Index
    ) -> PyTree:
      operands = self._operands(x, args, block, distance)
      grads = self.local.backward(*operands, residuals, carry)
      return (grads.q, grads.terms), pack(grads.k, grads.v)

    add_trees = lambda a, b: jax.tree.map(jnp.add, a, b)
    (dq, dterms), sums = self._visit_all(
      x, args.context, carry, visit, add_trees
    )
    dk, dv = unpack(sums)
    return Gradients(dq, dk, dv, dterms)

  def _visit_all(
    self,
    x: Local,
    context: Context,
    carry: PyTree,
    visit: HopFunction,
    add: Callable[[Any, Any], Any] | None = None,
  ) -> tuple[Any, Any]:
    """Visit the keys of all shards in reach, as `_walk` does."""
    block = KVBlock.of(x, context, self._wire)
    if self.by_document and self._place()[0] > 1:
      return self._visit_documents(block, context, carry, visit, add)
    lanes, (hops_back, hops_forward) = self._lanes(), self._hops()
    if (
      hops_back and not hops_forward and (add is not None or self.wire is None)
    ):
      # The shard's own block is the first of the loop; its sums travel with it.
      lanes = [Lane(1, 0, hops_back)]
    return self._walk(lanes, block, carry, visit, add)

  def _visit_documents(
    self,
    block: KVBlock,
    context: Context,
    carry: PyTree,
    visit: HopFunction,
    add: Callable[[Any, Any], Any] | None,
  ) -> tuple[Any, Any]:
    """Visit as many shards as this batch's documents reach, as `_walk` does."""
    state = self._walk([OWN], block, carry, visit, add)

    def visit_lane(state: tuple, lane: Lane) -> tuple:
      carry, sums = state
      carry, lane_sums = self._walk([lane], block, carry, visit, add)
      return carry, lane_sums if add is None else add(sums, lane_sums)

    for shift, hops in zip((1, -1), self._reach(context), strict=True):
      # The sums of a lane with one hop differ from those of several hops.
      lasts = (hops,) if add is None else (1, hops)
      lanes = [Lane(shift, 1, last) for last in lasts]
      branches = [functools.partial(visit_lane, lane=lane) for lane in lanes]
      branch = jnp.minimum(hops, len(lanes))
      state = lax.switch(branch, [lambda state: state, *branches], state)
    return state

  def _reach(self, context: Context) -> tuple[jax.Array, jax.Array]:
    """Numbers of shards, (back, forward), that the batch's documents reach."""
    assert self.axis is not None
    size, shard = self._place()
    names = tuple(sorted(collectives.manual_axes() | {*self.axes}))
    keys = collectives.gather(_piece_extents(context.k), self.axis, 1)
    key_pieces = _visible_pieces(context.mask, _piece_extents(context.q), keys)
    source = jnp.any(key_pieces.reshape(size, -1), 1)
    # Entry d: whether keys of the shard d places before are needed here.
    distances_needed = source[
      (shard - jnp.arange(size, dtype=jnp.int32)) % size
    ]
    distances_needed = collectives.vary(
      distances_needed.astype(jnp.int32), names
    )
    # All devices of the mesh run the same loops, or they wait for each other.
    distances_needed = collectives.largest(distances_needed, names)
    distance = np.arange(size, dtype=np.int32)
    # As `cut_hops`: row n has what is left to go back if n hops go forward.
    missing = (size - distance[None]) > distance[:, None]
    hops_back = jnp.max(jnp.where(missing, distances_needed * distance, 0), 1)
    hops_forward = jnp.argmin(hops_back + distance).astype(jnp.int32)
    return hops_back[hops_forward], hops_forward


def _piece_extents(at: Coords) -> Extent:
  """Extents of the pieces [B, n] of a shard's tokens."""
  pieces = min(_PIECES, at.pos.shape[1])
  padding = -at.pos.shape[1] % pieces
  split = lambda x: jnp.pad(x, ((0, 0), (0, padding))).reshape(
    x.shape[0], pieces, -1
  )
  return extent(Coords(split(at.pos), split(at.seg)))


def _visible_pieces(mask: Mask, q: Extent, k: Extent) -> jax.Array:
  """Mark the pieces of k in which a query of any example sees a key."""
  rows = jax.tree.map(lambda x: x[:, :, None], q)
  columns = jax.tree.map(lambda x: x[:, None, :], k)
  any_allowed = mask.bound(rows, columns)[0] & rows.some & columns.some
  return jnp.any(any_allowed, (0, 1))

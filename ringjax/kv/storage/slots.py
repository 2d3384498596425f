"""Slot tables of a group of layers: the token in each slot, row by row.

Guarantees: coordinates identify the token in each slot, so tokens may be in
any order: a prompt stays in the layout in which it was read. Rows are
independent: each has a separate write cursor on every shard. Padding after a
row's last token takes no slot.
Cost: an append writes the new tokens; nothing else moves.
Memory: two int32 per slot, one per row and shard.

A row's tokens fill a shard's slots from the first one. Tokens that all shards
see (decoding) go one by one to the shard that has the fewest, so that the
memory of the shards stays level.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.kv.base import CacheSpec, RowIndices, scattered_layer
from ringjax.ops.attention.cached.code_format import row_major, token_axis
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.parallel.local_arrays import move
from ringjax.typing import ArrayLeaf, Index

# Layouts of a call's tokens: sharded, into empty rows; sharded; replicated.
FILL, SHARDED, REPLICATED = "fill", "sharded", "replicated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotGroup:
  """Slot table of a group of layers: the token in each slot.

  Attributes:
    at: Coordinates of the slots, [B, S].
    mode: Layout of the current call's tokens: `FILL`, `SHARDED`, `REPLICATED`.
    mesh: Device mesh whose `axis` shards S; None for one device.
    axis: Mesh axis of the sequence.
    batch_axes: Mesh axes that shard the rows if they divide them.
    head_axis: Mesh axis that shards the KV heads if it divides them.
  """

  # Fields with the write cursors.
  cursors: ClassVar[tuple[str, ...]] = ("used", "before")

  at: Coords
  mode: str = FILL
  mesh: Mesh | None = None
  axis: str | None = None
  batch_axes: tuple[str, ...] = ()
  head_axis: str | None = None

  @staticmethod
  def places(room: CacheSpec) -> dict[str, Any]:
    """Fields with the mesh and the axes of a cache."""
    return dict(
      mesh=room.mesh,
      axis=room.axes.get("tokens"),
      batch_axes=tuple(room.axes.get("batch") or ()),
      head_axis=room.axes.get("heads"),
    )

  @property
  def rows_whole(self) -> bool:
    """Whether no mesh axis except the sequence's may shard rows."""
    shape = {} if self.mesh is None else dict(self.mesh.shape)
    shape.pop(self.axis, None)
    return math.prod(shape.values()) == 1

  @property
  def shards(self) -> int:
    if self.axis is None:
      return 1
    assert self.mesh is not None
    return self.mesh.shape[self.axis]

  @property
  def batch(self) -> int:
    """Number of rows, B."""
    return self.at.pos.shape[0]

  @property
  def capacity(self) -> int:
    """Number of slots of all shards together, S."""
    return self.at.pos.shape[1]

  @property
  def length(self) -> Int[Array, " B"]:
    """The position after each row's last token, int32 [B]; 0 if empty."""
    return jnp.max(jnp.where(self.at.seg > 0, self.at.pos + 1, 0), 1)

  def emptied(self, rows: RowIndices | slice) -> Any:
    """Return the table with these rows empty, int [n] or a slice."""
    empty = lambda x: x.at[rows].set(0)
    cursors = {name: empty(getattr(self, name)) for name in self.cursors}
    at = Coords(self.at.pos, empty(self.at.seg))
    return dataclasses.replace(self, at=at, **cursors)

  def _everywhere(self, x: jax.Array) -> jax.Array:
    if self.mesh is None:
      return x
    return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P()))

  def _shard(self) -> jax.Array:
    """Index of this shard of the sequence; inside of `_per_shard`."""
    if self.axis is None:
      return jnp.int32(0)
    return collectives.axis_index(self.axis)

  def _spec(self, x: Shaped[Array, " ..."], *, whole: bool = False) -> P:
    """Spec of slots [B, S], [L, B, K, *slots] or of tokens [B, K, *tokens].

    Args:
      x: Array, also of a number for each row, [B].
      whole: Whether each shard of the sequence has all of it.
    """
    if self.mesh is None:
      return P()
    shape: Any = self.mesh.shape
    spec: list[Any] = [None] * x.ndim
    row = 1 if x.ndim == 5 else 0
    if x.shape[row] % math.prod(shape[a] for a in self.batch_axes) == 0:
      spec[row] = self.batch_axes or None
    head_axis = self.head_axis if x.ndim > 2 else None
    if head_axis is not None and x.shape[row + 1] % shape[head_axis] == 0:
      spec[row + 1] = head_axis
    if not whole:
      spec[token_axis(x)] = self.axis
    return P(*spec)

  def _per_shard(
    self, f: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
  ) -> Callable[..., Any]:
    """Apply `f` on each device to its part.

    All mesh axes are manual: over an automatic one XLA would replicate what has
    a layout constraint, which is the slots of all layers.
    """
    if self.mesh is None:
      return f
    return jax.shard_map(
      f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContiguousSlots(SlotGroup):
  """The slots of layers that keep every token.

  Attributes:
    used: Slots in use on each of R shards (write cursors), int32 [B, R].
    before: Slots in use before the last call, int32 [B, R].
  """

  # No call replaces tokens of earlier ones.
  apart: ClassVar[bool] = False
  previous: ClassVar[Any] = None

  used: Int[ArrayLeaf, "B R"]
  before: Int[ArrayLeaf, "B R"]

  @classmethod
  def spec(cls, room: CacheSpec) -> ContiguousSlots:
    """Specs (shapes, dtypes, shardings) of the arrays; allocates nothing."""
    tokens = room.like(
      (room.batch, room.capacity), jnp.int32, ("batch", "tokens")
    )
    cursors = room.like((room.batch, room.shards), jnp.int32, (None, None))
    return cls(
      at=Coords(tokens, tokens),
      used=cursors,
      before=cursors,
      **cls.places(room),
    )

  @property
  def local(self) -> int:
    """Number of slots of a shard."""
    return self.capacity // self.shards

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of free slots, int [B, R]; None under a trace.

    Blocks until the program that computes them is done.
    """
    if isinstance(self.used, jax.core.Tracer):
      return None
    return self.local - np.asarray(self.used)

  # -------------------------------------------------------------------------
  # A call's tokens
  # -------------------------------------------------------------------------

  def allocate(self, at: Coords, mode: str) -> ContiguousSlots:
    """Allocate slots for tokens with these coordinates, [B or 1, T]."""
    batch, count = self.at.pos.shape[0], at.pos.shape[1]
    to_batch = lambda x: jnp.broadcast_to(x, (batch, count))
    at = Coords(to_batch(at.pos), to_batch(at.seg))
    index = jnp.arange(1, count + 1, dtype=jnp.int32)
    real = jnp.where(at.seg > 0, index[None], 0)
    if mode == REPLICATED:
      cursors_before = self.used
      used = _levelled(cursors_before, jnp.max(real, 1))
    else:
      local = count // self.shards
      by_shard = real.reshape(batch, self.shards, local)
      first = local * jnp.arange(self.shards, dtype=jnp.int32)
      num_new = jnp.maximum(jnp.max(by_shard, 2) - first[None], 0)
      cursors_before = jnp.zeros_like(self.used) if mode == FILL else self.used
      used = cursors_before + num_new
    old = self.at
    if mode == FILL:
      old = Coords(old.pos, jnp.zeros_like(old.seg))
    allocated = dataclasses.replace(
      self,
      before=self._everywhere(cursors_before),
      used=self._everywhere(used),
      mode=mode,
    )
    return dataclasses.replace(
      allocated,
      at=Coords(
        allocated.write(old.pos, at.pos), allocated.write(old.seg, at.seg)
      ),
    )

  def write(
    self,
    old: Shaped[Array, "B S"] | Shaped[Array, "L B K *slots"],
    new: Shaped[Array, "B T"] | Shaped[Array, "B K *tokens"],
    layer: Index | None = None,
  ) -> Shaped[Array, "B S"] | Shaped[Array, "L B K *slots"]:
    """Write the call's tokens to their slots.

    Args:
      old: Slots, [B, S], or with `layer` [L, B, K, S, H]; codes have their
        tokens last, [L, B, K, X, S].
      new: Tokens of the call, [B, T], or [B, K, T, H], or codes [B, K, X, T].
      layer: Index of the layer in `old`, int32 [].
    """
    lead = 0 if layer is None else 1
    axis = token_axis(old)
    layer = jnp.int32(0) if layer is None else jnp.asarray(layer, jnp.int32)
    mode = self.mode

    def local(
      old: jax.Array,
      new: jax.Array,
      layer: Index,
      before: jax.Array,
      used: jax.Array,
    ) -> jax.Array:
      new, me = new.astype(old.dtype), self._shard()
      if mode == FILL:
        start = [jnp.int32(0)] * old.ndim
        start[:lead] = [layer] * lead
        return lax.dynamic_update_slice(old, new[(None,) * lead], tuple(start))
      take = lambda x: lax.dynamic_index_in_dim(x, me, 1, keepdims=False)
      first, end = take(before), take(used)
      # Every shard gets a single token; only one has `end` > `first` for it.
      if mode == REPLICATED and new.shape[axis - lead] > 1:
        size = min(new.shape[axis - lead], old.shape[axis])
        levels = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        rank = _rank(before, levels, me)
        new = _along(new, jnp.minimum(rank, new.shape[axis - lead] - 1))
      return self._put(old, new, layer, first, end - first)

    cursors = self._spec(self.used, whole=True)
    specs = (
      self._spec(old),
      self._spec(new, whole=mode == REPLICATED),
      P(),
      cursors,
      cursors,
    )
    return self._per_shard(local, specs, specs[0])(
      old, new, layer, self.before, self.used
    )

  def _put(
    self,
    old: jax.Array,
    new: jax.Array,
    layer: Index,
    start: jax.Array,
    count: jax.Array,
  ) -> jax.Array:
    """Write the first `count` [B] of n tokens from slot `start` [B] on."""
    rows = lambda old: written_rows(old, new, layer, start, count)
    if new.shape[0] == 1:
      return rows(old)
    if old.ndim == new.ndim:
      return _scattered(old, new, layer, start, count)
    put = lambda old, layer: _scattered(old, new, layer, start, count)
    scattered = lambda old: scattered_layer(old, layer, put)
    if not self.rows_whole:
      return scattered(old)
    # On a TPU a scatter over rows would first copy the array to another layout.
    return lax.platform_dependent(old, tpu=rows, default=scattered)

  def committed(self) -> ContiguousSlots:
    """Drop the state that exists only during a call."""
    return dataclasses.replace(self, mode=FILL)

  def only(self, real: Bool[Array, ""]) -> ContiguousSlots:
    """Make `write` conditional: it writes only if `real`, bool []."""
    return dataclasses.replace(
      self,
      # FILL mode would write unconditionally.
      mode=SHARDED if self.mode == FILL else self.mode,
      used=jnp.where(real, self.used, self.before),
    )

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def earlier(self) -> Coords:
    """Coordinates of the slots without the tokens of the current call."""
    index = jnp.arange(self.capacity, dtype=jnp.int32)
    shard, slot = jnp.divmod(index, jnp.int32(self.local))
    is_earlier = slot[None] < jnp.take(self.before, shard, axis=1)
    return Coords(self.at.pos, jnp.where(is_earlier, self.at.seg, 0))

  def tokens(self) -> Int[Array, " B"]:
    """Number of tokens that each row holds, int32 [B]."""
    return jnp.sum(self.at.seg > 0, 1, dtype=jnp.int32)

  def truncate(self, end: Int[Array, " B"]) -> ContiguousSlots:
    """Drop the tokens at positions from `end` [B] on.

    Slots after the last remaining token become free.
    """
    gone = self.at.pos >= end[:, None]
    return self._recovered(jnp.where(gone, 0, self.at.seg))

  def _recovered(self, seg: jax.Array) -> ContiguousSlots:
    """Set segments, and cursors after the last token of each shard."""
    batch = seg.shape[0]
    index = jnp.arange(1, self.local + 1, dtype=jnp.int32)
    by_shard = seg.reshape(batch, self.shards, self.local)
    used = jnp.max(jnp.where(by_shard > 0, index[None, None], 0), 2)
    used = self._everywhere(used)
    return dataclasses.replace(
      self, at=Coords(self.at.pos, seg), used=used, before=used + 0
    )

  def kept_first(self, count: Int[Array, " B"]) -> ContiguousSlots:
    """Keep only the first `count` [B] tokens of the last call; none moves.

    The call's tokens must have been the same on all shards.
    """
    num_new = jnp.sum(self.used - self.before, 1, dtype=jnp.int32)
    return self._ending(_levelled(self.before, jnp.minimum(count, num_new)))

  def _ending(self, used: Int[Array, "B R"]) -> ContiguousSlots:
    """Set the cursors to `used` and empty the slots after them."""
    used = self._everywhere(used)
    index = jnp.arange(self.capacity, dtype=jnp.int32)
    shard, slot = jnp.divmod(index, jnp.int32(self.local))
    in_use = slot[None] < jnp.take(used, shard, axis=1)
    return dataclasses.replace(
      self,
      at=Coords(self.at.pos, jnp.where(in_use, self.at.seg, 0)),
      used=used,
      before=used + 0,
    )

  def keep_tokens(
    self, keep: Bool[Array, "B T"]
  ) -> tuple[ContiguousSlots, Any]:
    """Keep only the tokens in `keep`, bool [B, T], of the last call.

    The call's tokens must have been the same on all shards.

    Returns:
      The slots, and a function that moves the tokens of an array [L, B, K, S,
      H] likewise, in place.
    """
    count = keep.shape[1]

    def moves(
      before: jax.Array, used: jax.Array, keep: jax.Array
    ) -> tuple[TokenMoves, jax.Array]:
      """Moves of tokens on this shard, and the number that stay, [B]."""
      me = self._shard()
      take = lambda x: lax.dynamic_index_in_dim(x, me, 1, keepdims=False)
      first, end = take(before), take(used)
      size = min(count, self.local)
      step = jnp.arange(size, dtype=jnp.int32)
      rank = _rank(before, first[:, None] + step[None], me)
      rank = jnp.broadcast_to(rank, (keep.shape[0], size))
      stays = jnp.take_along_axis(keep, jnp.minimum(rank, count - 1), 1)
      stays &= (step[None] < (end - first)[:, None]) & (rank < count)
      sort = jnp.argsort(1 - stays.astype(jnp.int32), axis=1, stable=True)
      num_stays = jnp.sum(stays, 1, dtype=jnp.int32)
      source = jnp.minimum(first[:, None] + sort, self.local - 1)
      target = first[:, None] + step[None]
      real = step[None] < num_stays[:, None]
      return TokenMoves.of(source, target, real), num_stays

    def move_tokens(old: jax.Array) -> jax.Array:
      if not old.size:
        return old

      def local(
        old: jax.Array, before: jax.Array, used: jax.Array, keep: jax.Array
      ) -> jax.Array:
        return moves(before, used, keep)[0].moved(old)

      return self._per_shard(local, (self._spec(old), *specs), self._spec(old))(
        old, *arguments
      )

    def counts(*arguments: jax.Array) -> jax.Array:
      return moves(*arguments)[1][:, None]

    arguments = self.before, self.used, keep
    specs = tuple(self._spec(x, whole=True) for x in arguments)
    stays = self._per_shard(counts, specs, self._spec(self.used))(*arguments)
    pos, seg = map(move_tokens, self.at)
    slots = dataclasses.replace(self, at=Coords(pos, seg))
    return slots._ending(self.before + stays), move_tokens

  def gathered(self, device: jax.Device) -> tuple[ContiguousSlots, Any]:
    """Copy to one device, with rows filled from their first slot.

    Returns:
      The slots, and a function that copies an array [L, B, K, S, H] likewise.
    """
    pos, seg = (move(x, device) for x in self.at)
    order = jnp.argsort((seg == 0).astype(jnp.int32), axis=1, stable=True)
    put = lambda x: jnp.take_along_axis(x, order, 1)
    count = jnp.sum(seg > 0, 1, dtype=jnp.int32)[:, None]
    slots = ContiguousSlots(
      at=Coords(put(pos), put(seg)), used=count, before=count + 0
    )

    def copy_array(x: jax.Array) -> jax.Array:
      x = move(x, device)
      if not x.size:
        return x
      return jnp.take_along_axis(x, by_token(order, x), token_axis(x))

    return slots, copy_array


class TokenMoves(NamedTuple):
  """Tokens of rows that move to other slots, one after another.

  Fields:
    row: Row of each token, int32 [n].
    source: Slot of each token, int32 [n].
    target: New slot of each token, int32 [n].
    count: Number of tokens that move, int32 []; later entries are not used.
  """

  row: Int[Array, " n"]
  source: Int[Array, " n"]
  target: Int[Array, " n"]
  count: Int[Array, ""]

  @classmethod
  def of(
    cls,
    source: Int[Array, "B n"],
    target: Int[Array, "B n"],
    real: Bool[Array, "B n"],
  ) -> TokenMoves:
    """Moves of the `real` tokens of all rows whose slots differ.

    Args:
      source: Slots of the tokens.
      target: New slots, of which none holds a later token of the same row.
      real: Whether a token is one.
    """
    row = jnp.arange(source.shape[0], dtype=jnp.int32)[:, None]
    row = jnp.broadcast_to(row, source.shape)
    need = (real & (source != target)).reshape(-1)
    order = jnp.argsort(1 - need.astype(jnp.int32), stable=True)
    flat = lambda x: x.reshape(-1)[order].astype(jnp.int32)
    return cls(
      flat(row), flat(source), flat(target), jnp.sum(need, dtype=jnp.int32)
    )

  def moved(self, x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
    """Move the tokens in slots [B, S] or [L, B, K, *slots], in place.

    A gather of all tokens at once would copy the slots on a TPU.
    """

    def move(n: Index, x: jax.Array) -> jax.Array:
      token = token_of(x, self.row[n], self.source[n])
      return with_token(x, token, self.row[n], self.target[n])

    return lax.fori_loop(jnp.int32(0), self.count, move, x)


def token_of(
  x: Shaped[Array, " ..."], row: Index, slot: Index
) -> Shaped[Array, " ..."]:
  """Token in a slot of [B, S] or [L, B, K, *slots], in all layers."""
  start, shape = _corner(x, row, slot)
  return lax.dynamic_slice(row_major(x), start, shape)


def with_token(
  x: Shaped[Array, " ..."],
  token: Shaped[Array, " ..."],
  row: Index,
  slot: Index,
) -> Shaped[Array, " ..."]:
  """Slots with another token in a slot, in all layers, see `token_of`."""
  start, _ = _corner(x, row, slot)
  return lax.dynamic_update_slice(row_major(x), token, start)


def _corner(
  x: jax.Array, row: Index, slot: Index
) -> tuple[list[Any], list[int]]:
  """Start and shape of a token in an array of slots."""
  start: list[Any] = [jnp.int32(0)] * x.ndim
  shape = [*x.shape]
  for axis, index in ((x.ndim == 5, row), (token_axis(x), slot)):
    start[axis], shape[axis] = index, 1
  return start, shape


tree.register(
  ContiguousSlots,
  ("at", "used", "before"),
  ("mode", "mesh", "axis", "batch_axes", "head_axis"),
)


def by_token(
  x: Shaped[Array, "B n"], like: Shaped[Array, " ..."]
) -> Shaped[Array, " ..."]:
  """Reshape a number per token so that it broadcasts against `like`.

  Args:
    x: Number of each token, [B, n].
    like: Coordinates [B, n], or vectors or codes [L, B, K, ..] or [B, K, ..].
  """
  shape = [1] * like.ndim
  shape[1 if like.ndim == 5 else 0], shape[token_axis(like)] = x.shape
  return x.reshape(shape)


def _rank(used: jax.Array, levels: jax.Array, shard: Index) -> jax.Array:
  """Indices of the call's tokens that go to a shard's slots, int32 [B, n].

  Free slots are filled level by level, on each level shard by shard.

  Args:
    used: Write cursors, int32 [B, R].
    levels: Slots of the shard, from its first free one on, int32 [B, n].
    shard: Index of the shard, int32 [].
  """
  others = jnp.arange(used.shape[1], dtype=jnp.int32)
  upto = levels[:, :, None] + (others < shard).astype(jnp.int32)[None, None]
  return jnp.sum(jnp.maximum(upto - used[:, None], 0), 2, dtype=jnp.int32)


def _levelled(used: jax.Array, count: jax.Array) -> jax.Array:
  """Cursors [B, R] after `count` [B] tokens, each put on the emptiest shard."""
  shards = used.shape[1]
  if shards == 1:
    return used + count[:, None]
  # Highest level to which the tokens fill the emptiest shards.
  levels = jnp.sort(used, axis=1)
  number = jnp.arange(1, shards + 1, dtype=jnp.int32)
  room = levels * number[None] - jnp.cumsum(levels, 1)
  num_filled = jnp.sum(room <= count[:, None], 1, dtype=jnp.int32)
  total = jnp.take_along_axis(jnp.cumsum(levels, 1), num_filled[:, None] - 1, 1)
  level = (total + count[:, None]) // num_filled[:, None]
  filled = jnp.maximum(used, level)
  leftover = count[:, None] - jnp.sum(filled - used, 1, keepdims=True)
  open_ = (used <= level).astype(jnp.int32)
  fill_order = jnp.cumsum(open_, 1)
  return filled + open_ * (fill_order <= leftover).astype(jnp.int32)


def _along(new: jax.Array, index: jax.Array) -> jax.Array:
  """Gather tokens by `index` [B, n] from [B, T], [B, K, T, H] or codes."""
  axis = token_axis(new)
  if not new.size:
    return lax.slice_in_dim(new, 0, index.shape[1], axis=axis)
  return jnp.take_along_axis(new, by_token(index, new), axis)


def _window(
  old: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """First slot [B] of a window of n slots, its tokens, and a write mask.

  Args:
    old: Array of slots.
    new: The n tokens of each row.
    start: Slot of the first token, [B].
    count: Number of tokens to write, [B].
  """
  axis, lead = token_axis(old), old.ndim - new.ndim
  size, slots = new.shape[axis - lead], old.shape[axis]
  first = jnp.minimum(start, slots - size)
  step = jnp.arange(size, dtype=jnp.int32)
  if size > 1:
    # Near the end of the array the window starts earlier: shift the tokens.
    new = _along(new, jnp.maximum(step[None] - (start - first)[:, None], 0))
  window_index = step[None] - (start - first)[:, None]
  real = (window_index >= 0) & (window_index < count[:, None])
  return first, new, jnp.broadcast_to(by_token(real, new), new.shape)


def written_rows(
  old: Shaped[Array, " ..."],
  new: Shaped[Array, " ..."],
  layer: Index,
  start: Int[Array, " B"],
  count: Int[Array, " B"],
) -> Shaped[Array, " ..."]:
  """Write tokens row after row, see `ContiguousSlots._put`."""
  first, new, real = _window(old, new, start, count)
  lead = old.ndim - new.ndim

  def put(n: Index, old: jax.Array) -> jax.Array:
    corner = [jnp.int32(0)] * old.ndim
    corner[:lead], corner[lead] = [layer] * lead, n
    corner[token_axis(old)] = first[n]
    row = lambda x: lax.dynamic_slice_in_dim(x, n, 1, 0)[(None,) * lead]
    old_window = lax.dynamic_slice(old, tuple(corner), row(new).shape)
    merged = jnp.where(row(real), row(new), old_window)
    return lax.dynamic_update_slice(row_major(old), merged, tuple(corner))

  if new.shape[0] == 1:
    return put(jnp.int32(0), old)
  return lax.fori_loop(jnp.int32(0), jnp.int32(new.shape[0]), put, old)


def _scattered(
  old: jax.Array,
  new: jax.Array,
  layer: Index,
  start: jax.Array,
  count: jax.Array,
) -> jax.Array:
  """Write tokens of all rows by one scatter, for `ContiguousSlots._put`."""
  first, new, real = _window(old, new, start, count)
  lead, axis, batch = old.ndim - new.ndim, token_axis(old), new.shape[0]
  size = new.shape[axis - lead]
  window = (*old.shape[lead + 1 : axis], size, *old.shape[axis + 1 :])
  dims = tuple(range(1, 1 + len(window)))
  offsets = first[:, None]
  mapped: tuple[int, ...] = (axis,)
  if lead:
    layers = jnp.broadcast_to(layer, (batch, 1)).astype(jnp.int32)
    offsets, mapped = jnp.concatenate([layers, offsets], 1), (0, axis)
  gathering = lax.GatherDimensionNumbers(
    offset_dims=dims,
    collapsed_slice_dims=tuple(range(lead)),
    start_index_map=mapped,
    operand_batching_dims=(lead,),
    start_indices_batching_dims=(0,),
  )
  old_window = lax.gather(
    old,
    offsets,
    gathering,
    (*(1,) * (lead + 1), *window),
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  scattering = lax.ScatterDimensionNumbers(
    update_window_dims=dims,
    inserted_window_dims=tuple(range(lead)),
    scatter_dims_to_operand_dims=mapped,
    operand_batching_dims=(lead,),
    scatter_indices_batching_dims=(0,),
  )
  return lax.scatter(
    row_major(old),
    offsets,
    jnp.where(real, new, old_window),
    scattering,
    unique_indices=True,
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )

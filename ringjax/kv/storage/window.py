"""Slots of sliding-window layers: a ring buffer for each row.

Guarantees: after any call a row's last `reach` tokens are stored, and up to
`slack` of the last call may be taken back (`kept`, `truncate`). Rows are
independent. Tokens may come in any layout; later ones of a row replace
earlier ones by their order, document and position, not by their slot.
Cost: a call of at most `slack` tokens that all shards see writes these tokens;
another one brings the last W of its tokens to their shards by one
reduce-scatter a layer.
Memory: W = reach + slack tokens, over all shards together, however long the
context.

Token n of a row, counted from 0 in the order of appending, is in slot n mod W;
slot s is on shard s mod R, so that the shards stay level.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Shaped

from ringjax import tree
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.storage.slots import (
  FILL,
  REPLICATED,
  SlotGroup,
  TokenMoves,
  by_token,
  token_of,
  with_token,
)
from ringjax.ops.attention.cached.code_format import row_major, token_axis
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.parallel.local_arrays import move
from ringjax.typing import ArrayLeaf, Index


def window_slots(reach: int, slack: int, shards: int) -> int:
  """Slots of a ring, W: a multiple of the shards."""
  return math.ceil((reach + slack) / shards) * shards


def ring_size(
  reach: int | None, kind: CacheConfig, room: CacheSpec
) -> tuple[int, int] | None:
  """Slots and reach of a ring; None for layers that keep all tokens.

  Args:
    reach: Number of earlier tokens that a query attends to; None for all.
    kind: Kind of cache.
    room: Cache allocation.
  """
  if not kind.layout.windowed or reach is None:
    return None
  reach = max(1, reach)
  size = window_slots(reach, kind.layout.slack, room.shards)
  return (size, reach) if size < room.capacity else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSlots(SlotGroup):
  """Ring-buffer slots of layers with an attention window of `reach` tokens.

  Attributes:
    count: Number of tokens appended so far, int32 [B].
    before: Number of tokens before the last call, int32 [B].
    source: During a call, index of its token for each slot or -1, int32 [B, W].
    previous: During a call, the coordinates before it.
    tokens: Number of tokens of the call, T.
    reach: Number of earlier tokens that a query attends to.
    slack: Number of tokens of a call that may be taken back.
  """

  cursors: ClassVar[tuple[str, ...]] = ("count", "before")

  count: Int[ArrayLeaf, " B"]
  before: Int[ArrayLeaf, " B"]
  source: Int[Array, "B W"] | None = None
  previous: Coords | None = None
  tokens: int = 0
  reach: int = 0
  slack: int = 0

  @classmethod
  def spec(cls, room: CacheSpec, reach: int, slack: int) -> WindowSlots:
    """Shapes, dtypes and shardings of a ring of `room.capacity` slots."""
    shape = (room.batch, room.capacity)
    slots = room.like(shape, jnp.int32, ("batch", "tokens"))
    cursors = room.like((room.batch,), jnp.int32, (None,))
    return cls(
      at=Coords(slots, slots),
      count=cursors,
      before=cursors,
      reach=reach,
      slack=slack,
      **cls.places(room),
    )

  @property
  def few(self) -> bool:
    """Whether the call's tokens are written one by one into their slots."""
    return self.mode == REPLICATED and self.tokens <= self.slack

  @property
  def apart(self) -> bool:
    """Whether the call overwrites tokens that its first queries attend to.

    Then its queries read the ring as it was before, and the call's own keys.
    """
    return self.mode != FILL and self.tokens > self.slack

  # -------------------------------------------------------------------------
  # A call's tokens
  # -------------------------------------------------------------------------

  def allocate(self, at: Coords, mode: str) -> WindowSlots:
    """Allocate slots for tokens with these coordinates, [B or 1, T]."""
    batch, count = self.at.pos.shape[0], at.pos.shape[1]
    to_batch = lambda x: self._everywhere(jnp.broadcast_to(x, (batch, count)))
    at = Coords(to_batch(at.pos), to_batch(at.seg))
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), at.seg.shape)
    if mode == REPLICATED:
      num_new = jnp.max(jnp.where(at.seg > 0, index + 1, 0), 1)
    else:
      num_new = jnp.sum(at.seg > 0, 1, dtype=jnp.int32)
      empty = (at.seg == 0).astype(jnp.int32)
      keys = (empty, at.seg, at.pos, index)
      index = lax.sort(keys, dimension=1, num_keys=3)[3]
    earlier_count = jnp.zeros_like(self.count) if mode == FILL else self.count
    new_count = earlier_count + num_new
    token_number = self._newest(new_count) - earlier_count[:, None]
    source = jnp.take_along_axis(index, jnp.clip(token_number, 0, count - 1), 1)
    allocated = dataclasses.replace(
      self,
      count=self._everywhere(new_count),
      before=self._everywhere(earlier_count),
      source=self._everywhere(jnp.where(token_number >= 0, source, -1)),
      previous=self.at,
      mode=mode,
      tokens=count,
    )
    seg = jnp.zeros_like(self.at.seg) if mode == FILL else self.at.seg
    coords = Coords(
      allocated._replaced(self.at.pos, at.pos, None, whole=True),
      allocated._replaced(seg, at.seg, None, whole=True),
    )
    return dataclasses.replace(allocated, at=coords)

  def write(
    self,
    old: Shaped[Array, "L B K *slots"],
    new: Shaped[Array, "B K *tokens"],
    layer: Index,
  ) -> Shaped[Array, "L B K *slots"]:
    """Write the call's keys or values to their slots of `layer`.

    Args:
      old: Slots [L, B, K, W, D], or codes [L, B, K, X, W].
      new: Keys or values [B, K, T, D], or codes [B, K, X, T].
      layer: Index of the layer in `old`, int32 [].
    """
    return self._replaced(old, new, layer, whole=False)

  def only(self, real: Bool[Array, ""]) -> WindowSlots:
    """Make `write` conditional: it writes only if `real`, bool []."""
    assert self.source is not None
    return dataclasses.replace(
      self,
      count=jnp.where(real, self.count, self.before),
      source=jnp.where(real, self.source, -1),
    )

  def committed(self) -> WindowSlots:
    """Drop the state that exists only during a call."""
    return dataclasses.replace(
      self, source=None, previous=None, mode=FILL, tokens=0
    )

  def _replaced(
    self, old: jax.Array, new: jax.Array, layer: Index | None, *, whole: bool
  ) -> jax.Array:
    """Write tokens into `old`; `whole` for replicated coordinates."""
    axis = token_axis(old)
    of_new = axis - (0 if layer is None else 1)
    layer = jnp.int32(0) if layer is None else jnp.asarray(layer, jnp.int32)
    sent = not whole and self.mode != REPLICATED and self.axis is not None

    def local(
      old: jax.Array,
      new: jax.Array,
      layer: Index,
      source: jax.Array,
      before: jax.Array,
      count: jax.Array,
    ) -> jax.Array:
      new, me = new.astype(old.dtype), self._shard()
      size = old.shape[axis]
      local_source = lax.dynamic_slice_in_dim(source, me * size, size, 1)
      if self.few and not whole:
        num_new = count - before
        token, slot = self._shard_tokens(
          before, num_new, new.shape[of_new], size, me
        )
        tokens = _tokens(new, token)
        single = lambda old: _put_one_by_one(old, tokens, layer, slot)
        if slot.size == 1:
          return single(old)
        put = lambda old: _put(old, tokens, layer, slot)
        if not self.rows_whole:
          return put(old)
        # See `ContiguousSlots._put`.
        return lax.platform_dependent(old, tpu=single, default=put)
      if sent:
        assert self.axis is not None
        length = new.shape[of_new]
        local_token = source - me * length
        on_shard = (local_token >= 0) & (local_token < length) & (source >= 0)
        values = _tokens(new, jnp.clip(local_token, 0, length - 1))
        values = jnp.where(_wide(on_shard, values), values, 0)
        values = collectives.scatter_sum(values, self.axis, of_new)
      else:
        values = _tokens(new, jnp.maximum(local_source, 0))
      if whole:
        return jnp.where(local_source >= 0, values, old)
      old_values = lax.dynamic_index_in_dim(old, layer, 0, keepdims=False)
      values = jnp.where(_wide(local_source >= 0, values), values, old_values)
      corner = (layer, *(jnp.int32(0),) * 4)
      return lax.dynamic_update_slice(row_major(old), values[None], corner)

    assert self.source is not None
    of_rows = self.source, self.before, self.count
    rows = [self._spec(x, whole=True) for x in of_rows]
    specs = self._spec(old), self._spec(new, whole=not sent), P(), *rows
    return self._per_shard(local, specs, specs[0])(old, new, layer, *of_rows)

  def _shard_tokens(
    self,
    before: jax.Array,
    num_new: jax.Array,
    count: int,
    size: int,
    me: Index,
  ) -> tuple[jax.Array, jax.Array]:
    """Tokens of this shard among `count`, and their slots, int32 [B, n] each.

    Slots of tokens after the last one are out of range.
    """
    shards = self.shards
    first = jnp.mod(me - before, shards)[:, None]
    offsets = shards * jnp.arange(-(-count // shards), dtype=jnp.int32)
    token = first + offsets[None]
    slot = (before[:, None] + token) // shards % size
    real = token < num_new[:, None]
    return jnp.minimum(token, count - 1), jnp.where(real, slot, size)

  def _newest(self, count: jax.Array) -> jax.Array:
    """Number of each slot's newest token, int32 [B, W]; negative if empty."""
    size = self.capacity
    column = np.arange(size) % (size // self.shards) * self.shards
    slot = jnp.asarray(
      column + np.arange(size) // (size // self.shards), jnp.int32
    )
    last = count[:, None] - 1
    return last - jnp.mod(last - slot[None], size)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def earlier(self) -> Coords:
    """Coordinates of the slots without the tokens of the current call.

    For a call of few tokens, which are already in the slots of the oldest.
    """
    old = self.previous
    assert old is not None and self.source is not None
    return Coords(old.pos, jnp.where(self.source >= 0, 0, old.seg))

  def truncate(self, end: Int[Array, " B"]) -> WindowSlots:
    """Drop the tokens at positions from `end` on."""
    gone = (self.at.pos >= end[:, None]) & (self.at.seg > 0)
    count = self.count - jnp.sum(gone, 1, dtype=jnp.int32)
    return dataclasses.replace(
      self,
      at=Coords(self.at.pos, jnp.where(gone, 0, self.at.seg)),
      count=self._everywhere(count),
      before=self._everywhere(count + 0),
    )

  def kept_first(self, count: Int[Array, " B"]) -> WindowSlots:
    """Keep only the first `count` [B] of the last call's tokens; none moves.

    The call's tokens must have been at most `slack`.
    """
    return self._ending(jnp.minimum(self.before + count, self.count))

  def _ending(self, count: Int[Array, " B"]) -> WindowSlots:
    """Set the number of tokens to `count` and empty the slots of later ones."""
    newest = self._newest(self.count)
    seg = jnp.where(newest >= count[:, None], 0, self.at.seg)
    count = self._everywhere(count)
    return dataclasses.replace(
      self, at=Coords(self.at.pos, seg), count=count, before=count + 0
    )

  def keep_tokens(
    self, keep: Bool[Array, "B T"]
  ) -> tuple[WindowSlots, Callable[[jax.Array], jax.Array]]:
    """Keep only the tokens in `keep` of the last call's T <= `slack` tokens.

    Returns:
      The slots, and a function that moves the tokens of an array [L, B, K, W,
      D] likewise, in place.
    """
    step = jnp.arange(keep.shape[1], dtype=jnp.int32)[None]
    keep = keep & (step < (self.count - self.before)[:, None])
    stays = self._everywhere(jnp.sum(keep, 1, dtype=jnp.int32))
    sort = jnp.argsort(1 - keep.astype(jnp.int32), axis=1, stable=True)
    rows = self.before, stays, self._everywhere(sort.astype(jnp.int32))

    def move_tokens(old: jax.Array) -> jax.Array:
      if not old.size:
        return old
      size = self.capacity // self.shards

      def local(
        old: jax.Array, before: jax.Array, stays: jax.Array, sort: jax.Array
      ) -> jax.Array:
        source = before[:, None] + sort
        target = jnp.broadcast_to(before[:, None] + step, source.shape)
        real = step < stays[:, None]
        if self.axis is None or self.shards == 1:
          return TokenMoves.of(source % size, target % size, real).moved(old)
        moves = TokenMoves.of(source, target, real)
        return _moved_over(moves, old, self.axis, self.shards)

      specs = self._spec(old), *(self._spec(x, whole=True) for x in rows)
      return self._per_shard(local, specs, specs[0])(old, *rows)

    pos, seg = map(move_tokens, self.at)
    slots = dataclasses.replace(self, at=Coords(pos, seg))
    return slots._ending(self.before + stays), move_tokens

  def gathered(
    self, device: jax.Device
  ) -> tuple[WindowSlots, Callable[[jax.Array], jax.Array]]:
    """Copy to one device; also return a function that copies arrays so."""
    slot = np.arange(self.capacity)
    order = slot % self.shards * (self.capacity // self.shards)
    order = jnp.asarray(order + slot // self.shards, jnp.int32)
    put = lambda x: jnp.take(move(x, device), order, token_axis(x))
    slots = WindowSlots(
      at=Coords(*map(put, self.at)),
      count=move(self.count, device),
      before=move(self.before, device),
      reach=self.reach,
      slack=self.slack,
    )
    return slots, lambda x: put(x) if x.size else move(x, device)


tree.register(
  WindowSlots,
  ("at", "count", "before", "source", "previous"),
  (
    "mode",
    "tokens",
    "reach",
    "slack",
    "mesh",
    "axis",
    "batch_axes",
    "head_axis",
  ),
)


def _moved_over(
  moves: TokenMoves, x: jax.Array, axis: str, shards: int
) -> jax.Array:
  """Move tokens between the shards of a ring, for `WindowSlots.kept`.

  Args:
    moves: Moves of tokens by their numbers, of which neighbours are on
      different shards.
    x: Slots of this shard, [B, W] or [L, B, K, *slots].
    axis: Mesh axis of the sequence.
    shards: Number of shards, R.
  """
  me, size = collectives.axis_index(axis), x.shape[token_axis(x)]
  shape = token_of(x, 0, 0).shape

  def read(n: Index, tokens: jax.Array) -> jax.Array:
    number = moves.source[n]
    token = token_of(x, moves.row[n], number // shards % size)
    token = jnp.where(number % shards == me, token, 0)
    return lax.dynamic_update_index_in_dim(tokens, token, n, 0)

  def write(n: Index, x: jax.Array) -> jax.Array:
    number, row = moves.target[n], moves.row[n]
    slot = number // shards % size
    token = jnp.where(number % shards == me, tokens[n], token_of(x, row, slot))
    return with_token(x, token, row, slot)

  tokens = collectives.zeros((moves.row.size, *shape), x.dtype, x)
  tokens = lax.fori_loop(jnp.int32(0), moves.count, read, tokens)
  tokens = collectives.total(tokens, axis)
  return lax.fori_loop(jnp.int32(0), moves.count, write, x)


def _tokens(x: jax.Array, index: jax.Array) -> jax.Array:
  """Gather tokens by `index` [B, n] from [B, T], [B, K, T, D] or with L.

  The token axis of codes [..., X, T] is last.
  """
  return jnp.take_along_axis(x, by_token(index, x), token_axis(x))


def _wide(mask: jax.Array, like: jax.Array) -> jax.Array:
  """Broadcast [B, n] to the shape of [B, n], [B, K, n, D] or with L."""
  return jnp.broadcast_to(by_token(mask, like), like.shape)


def _put_one_by_one(
  old: jax.Array, new: jax.Array, layer: Index, slot: jax.Array
) -> jax.Array:
  """Write tokens to slots of a layer one after another; else like `_put`."""
  axis, count = token_axis(old), slot.shape[1]

  def put(n: Index, old: jax.Array) -> jax.Array:
    row, token = jnp.divmod(jnp.int32(n), jnp.int32(count))
    place, size = slot[row, token], old.shape[axis]
    start, corner = [row, *(jnp.int32(0),) * 3], [layer, row]
    corner += [jnp.int32(0)] * 3
    start[axis - 1], corner[axis] = token, jnp.minimum(place, size - 1)
    shape = [1, *new.shape[1:]]
    shape[axis - 1] = 1
    vector = lax.dynamic_slice(new, start, shape)[None]
    old_vector = lax.dynamic_slice(old, corner, vector.shape)
    vector = jnp.where(place < size, vector, old_vector)
    return lax.dynamic_update_slice(row_major(old), vector, corner)

  if slot.size == 1:
    return put(0, old)
  return lax.fori_loop(jnp.int32(0), jnp.int32(slot.size), put, old)


def _put(
  old: jax.Array, new: jax.Array, layer: Index, slot: jax.Array
) -> jax.Array:
  """Write tokens to slots [B, n]; slots out of range are skipped.

  Args:
    old: Array [L, B, K, W, D]; the token axis of codes is last.
    new: Tokens [B, K, n, D].
    layer: Index of the layer, int32 [].
    slot: Slots, int32 [B, n].
  """
  row = jnp.broadcast_to(
    jnp.arange(slot.shape[0], dtype=jnp.int32)[:, None], slot.shape
  )
  axis = token_axis(old)
  # Axis of the head dim or code bytes; codes have it before the tokens.
  numbers = () if axis == 3 else (slice(None),)
  layers = jnp.broadcast_to(layer, slot.shape)
  tokens = jnp.transpose(jnp.moveaxis(new, axis - 1, 2), (0, 2, 1, 3))
  at = (layers, row, slice(None), *numbers, slot)
  return row_major(old).at[at].set(tokens, mode="drop")

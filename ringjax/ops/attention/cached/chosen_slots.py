"""Attention of a few queries over chosen slots of a cache, which are gathered.

Guarantees: equals attention over all slots of which the others are masked.
Cost: each query reads its own slots, whatever others read; see `reads_fewer`.
Memory: the chosen keys of one piece, see `gathered`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.pooled import PooledView
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  EncodedView,
  KVView,
  UnrotatedView,
)
from ringjax.ops.attention.scores import Context, ScoreArgs
from ringjax.ops.attention.sparse.gathered import (
  ChosenColumns,
  Take,
  by_head,
  by_list,
  fold_chosen,
  piece_keys,
)
from ringjax.ops.mask import Coords, visible
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.parallel import collectives

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit


def gathers(view: KVView) -> bool:
  """Whether single slots of a view can be read."""
  if view.mask is not None or view.queries is not None:
    return False
  if isinstance(view, UnrotatedView):
    rotation = view.rotation
    return (
      gathers(view.stored) and rotation.after is None and not rotation.by_row
    )
  if isinstance(view, EncodedView | PooledView):
    return not jax.tree.leaves(view.constants)
  return isinstance(view, ContiguousView)


def reads_fewer(views: Sequence[KVView], queries: int, keys: int) -> bool:
  """Whether gathering is worth it: it reads at most half of the slots.

  Args:
    views: Views of the slots.
    queries: Number of queries that each read their own keys.
    keys: Most keys that a query reads.
  """
  slots = sum(view.shape[2] for view in views)
  return all(map(gathers, views)) and 2 * queries * keys <= slots


def taking(view: KVView, dtype: DTypeLike) -> Take:
  """Function (row, kv head, slot) -> rotated keys and values, in `dtype`."""

  def take(row: Array, head: Array, slot: Array) -> tuple[Array, Array | None]:
    k, v = _stored(view, row, head, slot)
    return k.astype(dtype), None if v is None else v.astype(dtype)

  return take


def _stored(
  view: KVView, row: Array, head: Array, slot: Array
) -> tuple[Array, Array | None]:
  """Keys and values [B, q, M, p, ...]; None for values that are their keys."""
  if isinstance(view, UnrotatedView):
    k, v = _stored(view.stored, row, head, slot)
    pos = jnp.broadcast_to(view.at.pos, (view.shape[0], view.shape[2]))
    flat = lambda x: x.reshape(1, 1, -1, *x.shape[4:])
    pos = jnp.broadcast_to(pos[row, slot], k.shape[:4]).reshape(1, -1)
    return view.rotation.anywhere(flat(k), pos).reshape(k.shape), v
  stored: Any = view
  decoders = getattr(view, "decoders", None)
  index = (jnp.asarray(stored.layer, jnp.int32), row, head)
  if isinstance(view, PooledView):
    page = jnp.maximum(view.table[row, slot // view.page], 0)
    index, slot = (index[0], page, head), slot % view.page

  def read(x: Array, n: int) -> Array:
    if token_axis(x) == x.ndim - 1:
      data = lax.bitcast_convert_type(x[*index, :, slot], jnp.uint8)
    else:
      data = x[*index, slot]
    if decoders is not None:
      heads = data.reshape(-1, *data.shape[2:])
      data = decoders[n](heads, ()).reshape(*data.shape[:-1], -1)
    return data[..., : view.shape[3 + n]]

  k = read(stored.k, 0)
  return k, None if stored.v is stored.k else read(stored.v, 1)


def read_slots(
  view: KVView,
  q: Float[Array, "B M G t H"],
  slot: Int[Array, "B L t c"],
  most: int,
  args: ScoreArgs,
  axis: str | None,
) -> Partial:
  """Partial of queries over the slots that they read, [B, M, G, t].

  Args:
    view: View that `gathers`.
    q: Queries, by heads that choose together, each of one kv head.
    slot: Slots that they read, first ones first; the number of slots for none.
      L is 1 or M.
    most: Most keys that a query reads on all shards.
    args: Score function; its mask has been applied to the slots.
    axis: Manual axis that shards the keys, or None.
  """
  lists, slots = slot.shape[1], view.shape[2]
  shards = 1 if axis is None else collectives.axis_size(axis)
  queries = by_list(q, lists)
  b, t = queries.shape[:2]
  columns = ChosenColumns.of(
    slot.reshape(b, t, 1, -1),
    slots,
    view.shape[1],
    piece_keys(most, shards),
    lists,
  )
  empty = Partial.empty(
    queries.shape[:4], view.shape[4], wide_dtype(q.dtype), (q, view)
  )
  take = taking(view, q.dtype)
  partial = fold_chosen(queries, columns, take, args, empty)
  return jax.tree.map(lambda x: by_head(x, lists), partial)


def slots_by_position(view: KVView, length: int) -> Int[Array, "B n"]:
  """Slot of the token at each position of a row; the number of slots for none.

  Args:
    view: View of the keys.
    length: Number of positions. Tokens of a row have positions below its number
      of slots in all views, on all shards.
  """
  b, slots = view.shape[0], view.shape[2]
  at = Coords(*(jnp.broadcast_to(x, (b, slots)) for x in view.at))
  place = jnp.where(at.seg != 0, at.pos, length)
  table = collectives.full((b, length), slots, jnp.int32, view)
  put = lambda table, place: table.at[place].set(
    jnp.arange(slots, dtype=jnp.int32), mode="drop"
  )
  return jax.vmap(put)(table, place)


def slots_of_blocks(
  view: KVView,
  blocks: Int[Array, "B L t n"],
  block: int,
  total: int,
  q_at: Coords,
  visit: CacheVisit,
) -> Int[Array, "B L t c"]:
  """Slots of the visible keys of blocks of positions, first ones first.

  The number of slots stands for none.

  Args:
    view: View of the keys.
    blocks: Distinct numbers of blocks; -1 for none.
    block: Number of positions of a block.
    total: Number of blocks of all keys of the layer.
    q_at: Coordinates of the queries, [B, t].
    visit: Call to which the queries belong.
  """
  b, slots = blocks.shape[0], view.shape[2]
  at = Coords(*(jnp.broadcast_to(x, (b, slots)) for x in view.at))
  length = total * block
  table = slots_by_position(view, length)
  offset = jnp.arange(block, dtype=jnp.int32).reshape(1, 1, 1, 1, block)
  pos = blocks[..., None] * block + offset
  pos = pos.reshape(*blocks.shape[:3], -1)
  inside = (pos >= 0) & (pos < length)
  row = jnp.arange(b, dtype=jnp.int32)[:, None, None, None]
  slot = jnp.where(inside, table[row, jnp.clip(pos, 0, length - 1)], slots)
  seg = jnp.where(slot < slots, at.seg[row, jnp.minimum(slot, slots - 1)], 0)
  expand = lambda x: x[:, None, :, None]
  seen = visible(visit.mask, Coords(*map(expand, q_at)), Coords(pos, seg))
  return jnp.sort(jnp.where(seen, slot, slots), -1)


def read_chosen_blocks(
  view: KVView,
  q: Float[Array, "B K G t H"],
  q_at: Coords,
  best: Int[Array, "B K #G t n"],
  block: int,
  total: int,
  visit: CacheVisit,
) -> Partial:
  """Partial of the keys of a view in the blocks that each query reads.

  Args:
    view: View that `gathers`.
    q: Queries.
    q_at: Coordinates of the queries, [B, t].
    best: Distinct blocks of each query head, or of those of a kv head; -1 for
      none.
    block: Number of positions of a block.
    total: Number of blocks of all keys of the layer.
    visit: Call to which the queries belong.
  """
  b, heads, groups, t, h = q.shape
  lists = heads * best.shape[2]
  blocks = best.reshape(b, lists, t, -1)
  slot = slots_of_blocks(view, blocks, block, total, q_at, visit)
  by_choice = q.reshape(b, lists, -1, t, h)
  context = Context(q_at, view.at, visit.mask)
  args = ScoreArgs(visit.scores, visit.terms, context)
  key_limit = block * blocks.shape[3]
  partial = read_slots(view, by_choice, slot, key_limit, args, visit.axis)
  split = lambda x: x.reshape(b, heads, groups, *x.shape[3:])
  return jax.tree.map(split, partial)

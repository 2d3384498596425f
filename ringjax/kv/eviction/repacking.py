"""Repack the tokens that stay after an eviction into pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, PyTree

from ringjax import tree
from ringjax.kv.eviction import kivi_residual
from ringjax.kv.eviction.eviction import (
  PagedPart,
  page_view,
  paged_parts,
  part_specs,
  staying,
)
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.storage.pages import Pages, Stored, packed, page_bounds
from ringjax.kv.storage.slots import FILL
from ringjax.ops.attention.blockwise import loop, pad_axis
from ringjax.ops.attention.cached.code_format import as_bytes, token_axis
from ringjax.ops.mask import Coords
from ringjax.parallel.programs import bounded
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.eviction.evicting import EvictingCache


@bounded
@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def repacked(
  cache: EvictingCache,
  keep: Mapping[int, Array],
  masses: Mapping[int, Array | None],
  rows: Bool[Array, " B"],
  sizes: tuple[tuple[int, int], ...],
  room: int,
  segments: bool,
) -> EvictingCache:
  """Copy the tokens that stay into new pages and a new open cache.

  Args:
    cache: Cache before the eviction.
    keep: Tokens that stay, by `chosen`.
    masses: Sums of column masses, by `chosen`.
    rows: Rows to evict from, bool [B].
    sizes: Pages on a device, and of the largest head, for each kind.
    room: Slots per shard of the open cache.
    segments: Whether tokens may have other segments than 1.
  """
  parts, places, kind = paged_parts(cache), cache.places, cache.kind
  kinds = tuple(parts)

  def local(
    parts: PyTree,
    at: Coords,
    keep: PyTree,
    masses: PyTree,
    rows: jax.Array,
    ends: tuple[jax.Array, jax.Array],
  ) -> PyTree:
    at = Coords(*at)
    stays = staying(at, kind, places, rows)
    if kind.exact.residual is not None:
      newly_coded = kivi_residual.newly_coded(
        kind, at, stays & rows[:, None], *ends
      )
      parts = {
        n: part._replace(
          **kivi_residual.with_codes(
            kind, part.k, part.v, part.constants, at, newly_coded
          )
        )
        for n, part in parts.items()
      }
    order = jnp.argsort(1 - stays.astype(jnp.int32), axis=1, stable=True)
    order = _filled(order.astype(jnp.int32), room)
    count = jnp.sum(stays, 1, dtype=jnp.int32)
    real = jnp.arange(room, dtype=jnp.int32)[None] < count[:, None]
    pick = lambda x: jnp.take_along_axis(x, order, 1)
    open_at = Coords(pick(at.pos), jnp.where(real, pick(at.seg), 0))
    new_pages, slots, scores = {}, {}, {}
    for n in kinds:
      part, (pages, largest) = parts[n], sizes[n]
      lead = part.k.shape[:3]
      old = part.pages.read()
      keep_slots, open_coords, leaving = keep[n], at, part
      if kind.grouped:
        leaving, open_coords, keep_slots = _in_groups(
          part, at, stays, keep_slots, kind.layout.page
        )
      over_heads = lambda x, lead=lead: jnp.broadcast_to(
        x[None, :, None], (*lead, x.shape[1])
      )
      k, v = _encoded(cache, leaving)
      tokens = Stored(
        jnp.concatenate([old.k, k], 3),
        jnp.concatenate([old.v, v], 3),
        Coords(
          *(
            jnp.concatenate([x, over_heads(y)], 3)
            for x, y in zip(old.at, open_coords, strict=True)
          )
        ),
        masses[n],
      )
      new_pages[n] = packed(
        tokens, keep_slots, part.pages, pages, largest, segments
      )
      if kind.policy is not None and kind.policy.selects:
        new_pages[n] = _bounded(cache, n, new_pages[n], part.constants)

      def permute(x: jax.Array) -> jax.Array:
        axis = token_axis(x)
        index = jnp.expand_dims(order[None, :, None], 7 - axis)
        return jnp.take_along_axis(x, index, axis)

      slots[n] = LayerKV(permute(part.k), permute(part.v))
      scores[n] = None
      if masses[n] is not None:
        mass = masses[n][..., -at.pos.shape[1] :]
        mass = jnp.take_along_axis(mass, order[None, :, None], 3)
        scores[n] = jnp.where(real[None, :, None], mass, 0)
    return new_pages, slots, scores, open_at, count[:, None]

  selects = kind.policy is not None and kind.policy.selects
  by_head = dict.fromkeys(kinds, places.by_head)
  mass_specs = {n: None if masses[n] is None else places.by_head for n in kinds}
  specs = {n: part.pages.specs() for n, part in parts.items()}
  specs = {
    n: tree.with_leaves(
      x,
      bounds=places.pool if selects else None,
      seg=x.pos if segments else None,
    )
    for n, x in specs.items()
  }
  new_pages, slots, scores, at, used = places.local(
    local,
    (
      {n: part_specs(part) for n, part in parts.items()},
      places.by_example,
      by_head,
      mass_specs,
      P(places.batch or None),
      (P(places.batch or None),) * 2,
    ),
    (
      specs,
      {n: LayerKV(*part_specs(part)[:2]) for n, part in parts.items()},
      mass_specs,
      places.by_example,
      places.by_example,
    ),
  )(parts, cache.open.at, keep, masses, rows, (cache.ends, cache.length))
  return _with(cache, new_pages, slots, scores, at, used, rows)


def _in_groups(
  part: PagedPart, at: Coords, stays: jax.Array, keep: jax.Array, group: int
) -> tuple[PagedPart, Coords, jax.Array]:
  """Move the leaving open tokens to the front, so that they fill groups.

  Args:
    part: Arrays of the layers.
    at: Coordinates of the open tokens, [B, s].
    stays: Whether an open token stays open, bool [B, s]; the others are whole
      groups.
    keep: Whether a token of the pages, or an open one, is kept, bool
      [L, B, K, S + s].
    group: Tokens per group.

  Returns:
    `part`, coordinates [B, s'] and `keep`, padded to a multiple of the group.
  """
  slots = at.seg.shape[1]
  leaves = (at.seg > 0) & ~stays
  order = jnp.argsort(1 - leaves.astype(jnp.int32), axis=1, stable=True)
  order = _filled(order.astype(jnp.int32), -(-slots // group) * group)
  count = jnp.sum(leaves, 1, dtype=jnp.int32)
  real = jnp.arange(order.shape[1], dtype=jnp.int32)[None] < count[:, None]
  permute = lambda x: jnp.take_along_axis(x, order[None, :, None, :, None], 3)
  pick = lambda x: jnp.take_along_axis(x, order, 1)
  open_coords = Coords(pick(at.pos), jnp.where(real, pick(at.seg), 0))
  lead = keep.shape[:3]
  paged, opened = keep[..., : keep.shape[3] - slots], keep[..., -slots:]
  index = jnp.broadcast_to(order[None, :, None], (*lead, order.shape[1]))
  front = jnp.take_along_axis(opened, index, 3) & real[None, :, None]
  keep = jnp.concatenate([paged, front], 3)
  return part._replace(k=permute(part.k), v=permute(part.v)), open_coords, keep


def _filled(order: jax.Array, room: int) -> jax.Array:
  """Cut the columns of [B, s] to `room`, or repeat the last one up to it."""
  size = order.shape[1]
  if room <= size:
    return order[:, :room]
  return jnp.pad(order, ((0, 0), (0, room - size)), mode="edge")


@bounded
@functools.partial(jax.jit, static_argnums=1)
def grown(cache: EvictingCache, room: int) -> EvictingCache:
  """Grow the open cache to `room` slots per shard."""
  places, parts = cache.places, paged_parts(cache)
  added_slots = room - cache.open.capacity // cache.shards

  def pad_slots(x: jax.Array, axis: int, spec: P) -> jax.Array:
    pad = [(0, added_slots * (n == axis)) for n in range(x.ndim)]
    return places.local(lambda x: jnp.pad(x, pad), (spec,), spec)(x)

  slots = {
    n: LayerKV(
      *(
        pad_slots(x, token_axis(x), places.of_slots(x))
        for x in (part.k, part.v)
      )
    )
    for n, part in parts.items()
  }
  slot_table = cache.open.held
  at = Coords(*(pad_slots(x, 1, places.by_example) for x in slot_table.at))
  open_cache = dataclasses.replace(
    cache.open,
    slots=tuple(slots.get(n, x) for n, x in enumerate(cache.open.slots)),
    held=dataclasses.replace(slot_table, at=at),
  )
  noted = cache.with_scores(lambda x: pad_slots(x, 3, places.by_head))
  return dataclasses.replace(cache, open=open_cache, noted=noted)


def _encoded(
  cache: EvictingCache, part: PagedPart
) -> tuple[jax.Array, jax.Array]:
  """Encode open keys and values in the format of the pages."""
  codec: Any = cache.kind.codec
  if codec is None or cache.open.kind.codec is not None:
    return as_bytes(part.k), as_bytes(part.v)

  def encode(
    vectors: Any, x: jax.Array, constants: Any, pages: jax.Array
  ) -> jax.Array:
    data = jax.vmap(vectors.encode)(x, constants)
    return pad_axis(data, 4, pages.shape[-1])

  of_k, of_v = part.constants
  into, v = part.pages, part.v
  if v.shape[-1]:
    v = encode(codec.values, v, of_v, into.v)
  return encode(codec.keys, part.k, of_k, into.k), v


def _bounded(
  cache: EvictingCache, kind: int, pages: Pages, constants: PyTree
) -> Pages:
  """Compute the key bounds of pages; call inside of `Places.local`."""
  shape = cache.shapes[kind]
  rotation = shape.reading.rotation(cache.limit)
  dtype = cache.open.dtype
  bounds = jnp.zeros((pages.k.shape[0], 2, shape.key), dtype)

  def step(layer: Index, bounds: jax.Array) -> jax.Array:
    view = page_view(cache, kind, layer, rotation, pages, constants)
    return page_bounds(view, pages, layer, bounds)

  bounds = loop(shape.layers, step, bounds)
  return dataclasses.replace(pages, bounds=bounds)


def _with(
  cache: EvictingCache,
  pages: PyTree,
  slots: PyTree,
  scores: PyTree,
  at: Coords,
  used: jax.Array,
  rows: jax.Array,
) -> EvictingCache:
  """Assemble the cache after an eviction of `rows`, bool [B]."""
  everywhere = cache.open.held._everywhere
  count = everywhere(used)
  slot_table = dataclasses.replace(
    cache.open.held, at=at, used=count, before=count + 0, mode=FILL
  )
  open_cache = dataclasses.replace(
    cache.open,
    slots=tuple(slots.get(n, x) for n, x in enumerate(cache.open.slots)),
    held=slot_table,
  )
  noted = [
    x._replace(score=scores[n], paged=None) if n in scores else x
    for n, x in enumerate(cache.noted)
  ]
  watch, policy = cache.watch, cache.kind.policy
  if watch.at is not None and policy is not None and policy.queries is None:
    # Drop the counted queries, so that none counts twice.
    size = at.pos.shape[1]
    num_queries = max(size, watch.at.pos.shape[1])
    watch = watch.widened(num_queries)
    noted = [x.widened(num_queries) for x in noted]
    order = watch.order(size)
    watch = watch.ordered(order).without(rows)
    noted = [x.ordered(order).without(rows) for x in noted]
  return dataclasses.replace(
    cache,
    open=open_cache,
    pages=tuple(pages.get(n, x) for n, x in enumerate(cache.pages)),
    noted=tuple(noted),
    watch=watch,
    ends=everywhere(jnp.where(rows, cache.length, cache.ends)),
    stayed=everywhere(jnp.where(rows, slot_table.tokens(), cache.stayed)),
  )

"""Landmarks: what stays on the devices of keys in host memory, to choose by.

What the choice makes of a page's keys, see `page_choice`, or the keys of the
layer's index; with `rank` also coefficients from which the keys are rebuilt.
Some choices look at recorded queries of prompts, see `clustered_keys`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.eviction.evictable_layers import check_layers
from ringjax.kv.kv_layer import KVLayer
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.offload.choices import choice_of
from ringjax.kv.offload.low_rank_keys import LowRankKeys, low_rank_specs
from ringjax.kv.state import StateShape
from ringjax.kv.storage.pages import Places
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.parallel import collectives
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf, Index


def check_choosing_layers(
  shapes: Sequence[LayerCacheSpec | StateShape],
  kind: CacheConfig,
  room: CacheSpec,
  resident: tuple[bool, ...],
) -> None:
  """Refuse layers that can't choose pages of host memory."""
  check_layers(shapes, kind, room)
  for shape, stays in zip(shapes, resident, strict=True):
    if stays or not isinstance(shape, LayerCacheSpec):
      continue
    reading = shape.reading
    indexed = reading is not None and reading.most is not None
    if indexed == (kind.policy is None):
      rope = None if reading is None else reading.rope
      by_length = rope is not None and rope.scaling.by_length
      if indexed and kind.layout.unrotated and by_length:
        raise OptionError(
          "unrotated",
          "True, with hot, for an index whose rotation depends on the length",
          "keys that are stored rotated",
          "leave unrotated out",
        )
      continue
    got, remedy = "", "leave hot out"
    if indexed:
      got, remedy = (
        "and a policy, for a layer whose index chooses",
        (
          f"leave the policy out, as dense:device={kind.tier.device},"
          f"hot={kind.tier.hot}"
        ),
      )
    else:
      got, remedy = (
        "without a policy, for a layer without an index",
        (f"write select:device={kind.tier.device},hot={kind.tier.hot}"),
      )
    raise OptionError(
      "hot",
      f"{kind.tier.hot}, {got}",
      "one that chooses: a policy, or the index of each layer",
      remedy,
    )


def landmarks_spec(
  shape: LayerCacheSpec, room: CacheSpec, kind: CacheConfig
) -> PyTree[Shaped[ArrayLeaf, "L B K M ..."]]:
  """Shapes, dtypes and shardings of the landmarks of a kind of layer."""
  pages = room.capacity // kind.tier.block
  lead = (shape.layers, room.batch, shape.heads, pages)
  names = (None, "batch", "heads", "tokens")
  if kind.policy is None:
    dims = kind.tier.block, shape.key - _index_of(shape)
    return room.like((*lead, *dims), room.dtype, (*names, None, None))

  def like(x: ArrayLeaf) -> ArrayLeaf:
    unsharded = (None,) * len(x.shape)
    return room.like((*lead, *x.shape), x.dtype, (*names, *unsharded))

  arrays = choice_of(kind).arrays(kind.tier.block, shape.key, room.dtype)
  return jax.tree.map(like, arrays)


def num_pages(landmarks: PyTree[Shaped[ArrayLeaf, "L B K M ..."]]) -> int:
  """Number of pages of a row that landmarks of a kind of layer are of."""
  return jax.tree.leaves(landmarks)[0].shape[3]


def centres_spec(
  shape: LayerCacheSpec, room: CacheSpec, kind: CacheConfig
) -> ArrayLeaf | None:
  """Shape, dtype and sharding of a choice's vectors of heads, or None."""
  count = 0 if kind.policy is None else choice_of(kind).centres
  if not count:
    return None
  lead = (shape.layers, room.batch, shape.heads)
  names = (None, "batch", "heads", None, None)
  return room.like((*lead, count, shape.key), room.dtype, names)


def moments_spec(
  shape: LayerCacheSpec, room: CacheSpec, kind: CacheConfig
) -> ArrayLeaf | None:
  """Shape, dtype and sharding of moments of queries; None without them."""
  if kind.policy is None or not choice_of(kind).observes:
    return None
  dims = shape.layers, room.batch, shape.heads, shape.key, shape.key
  names = (None, "batch", "heads", None, None)
  return room.like(dims, jnp.float32, names)


def head_placement(
  arrays: Shaped[ArrayLeaf, " ..."] | None, places: Places
) -> P | None:
  """PartitionSpec of arrays of heads, [L, B, K, ...]; None without them."""
  if arrays is None:
    return None
  return P(None, places.batch or None, places.heads or None)


def _index_of(shape: LayerCacheSpec) -> int:
  """First dim of a key that belongs to the key of the layer's index."""
  assert shape.reading is not None and shape.reading.index is not None
  return shape.reading.index


class PageKeys(NamedTuple):
  """Landmarks and coefficients of the pages of one kind of layer.

  Fields:
    landmarks: Landmarks of the pages.
    centres: Vectors of the heads, see `PageChoice.new_centres`; None: none.
    low_rank: Coefficients of the keys; None: their keys are copied.
  """

  landmarks: PyTree[Shaped[Array, "L B K M ..."]]
  centres: Float[Array, "L B K C H"] | None
  low_rank: LowRankKeys | None


@bounded
@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8), donate_argnums=0)
def with_landmarks(
  page_keys: PageKeys,
  open_cache: KVCache,
  older: Int[Array, "B R"],
  count: Int[Array, "B R"],
  moments: Float[Array, "L B K H H"] | None,
  kind: int,
  config: CacheConfig,
  limit: int,
  places: Places,
) -> PageKeys:
  """Landmarks with those of the first `count` pages of the open tokens.

  Args:
    page_keys: Landmarks of a kind of layer, and coefficients of its keys.
    open_cache: Open cache.
    older: Slots of the older part in use, int32 [B, R].
    count: Number of pages, int32 [B, R].
    moments: Moments of the queries of the heads, or None.
    kind: Index of the kind of layer.
    config: Cache kind.
    limit: Maximum number of tokens of a row, for rotations that depend on it.
    places: Mesh axes that shard the landmarks.
  """
  shape = open_cache.shapes[kind]
  assert isinstance(shape, LayerCacheSpec) and shape.reading is not None
  rotation = shape.reading.rotation(limit)
  page = config.tier.block
  k, v = open_cache.slots[kind]

  def local(
    page_keys: PageKeys,
    k: jax.Array,
    v: jax.Array,
    constants: PyTree,
    at: Coords,
    older: jax.Array,
    count: jax.Array,
    moments: jax.Array | None,
  ) -> PageKeys:
    landmarks = page_keys.landmarks
    inside = dataclasses.replace(
      open_cache,
      constants=tuple(
        constants if n == kind else ((), ())
        for n, _ in enumerate(open_cache.constants)
      ),
    )
    table = dataclasses.replace(open_cache.held, at=Coords(*at))
    slots = k.shape[token_axis(k)]
    open_pages = slots // page
    real = at.seg[:, : open_pages * page] > 0
    real = real.reshape(real.shape[0], 1, open_pages, page, 1)
    nth = jnp.arange(open_pages, dtype=jnp.int32)[None]
    target = jnp.where(nth < count, older // page + nth, num_pages(landmarks))
    rows, heads = jax.tree.leaves(landmarks)[0].shape[1:3]
    row = jnp.arange(rows)[:, None, None]
    head = jnp.arange(heads)[None, :, None]

    def pages_of(layer: Index, rotation: Rotation) -> jax.Array:
      stored = LayerKV(k, v)
      view = KVLayer(inside, table, stored, layer, kind).view(rotation)
      if not shape.value:
        view = view.keys_alone()
      keys, _ = view.tile(jnp.int32(0), view.shape[2])
      keys = keys[:, :, : open_pages * page]
      keys = keys.reshape(rows, heads, open_pages, page, -1)
      return keys.astype(open_cache.dtype)

    moves = (nth < count)[:, None, :, None, None]

    def centres_of(
      layer: Index, centres: Float[Array, "L B K C H"], keys: jax.Array
    ) -> Float[Array, "B K C H"]:
      new = choice_of(config).new_centres(keys, real & moves, places.axis)
      old = lax.dynamic_index_in_dim(centres, layer, 0, keepdims=False)
      num_older = older[:, 0]
      if places.axis is not None:
        num_older = collectives.total(num_older, places.axis)
      return jnp.where((num_older > 0)[:, None, None, None], old, new)

    def step(layer: Index, page_keys: PageKeys) -> PageKeys:
      keys, centres = pages_of(layer, rotation), page_keys.centres
      if config.policy is None:
        new = keys[..., _index_of(shape) :]
      elif centres is None:
        of_layer = moments
        if moments is not None:
          of_layer = lax.dynamic_index_in_dim(moments, layer, 0, keepdims=False)
        new = choice_of(config).landmarks(keys, real, moments=of_layer)
      else:
        of_layer = centres_of(layer, centres, keys)
        new = choice_of(config).landmarks(keys, real, of_layer)
        centres = lax.dynamic_update_index_in_dim(centres, of_layer, layer, 0)
      at = layer, row, head, target[:, None]
      low_rank = page_keys.low_rank
      if low_rank is not None:
        plain = pages_of(layer, Rotation())
        low_rank = low_rank.with_pages(
          layer, plain, real & moves, older[:, 0], target
        )
      set_pages = lambda old, new: old.at[at].set(new, mode="drop")
      landmarks = jax.tree.map(set_pages, page_keys.landmarks, new)
      return PageKeys(landmarks, centres, low_rank)

    if not open_pages:
      return page_keys
    return loop(shape.layers, step, page_keys)

  by_row = places.by_example
  heads = places.heads or None
  constants = open_cache.constants[kind]
  by_head: PyTree = places.by_head
  by_centre: PyTree = head_placement(page_keys.centres, places)
  by_moments: PyTree = head_placement(moments, places)
  by_page: PyTree = PageKeys(
    by_head,
    by_centre,
    low_rank_specs(page_keys.low_rank, places),
  )
  return places.local(
    local,
    (
      by_page,
      places.of_slots(k),
      places.of_slots(v) if v.size else P(),
      jax.tree.map(lambda _: P(None, heads), constants),
      by_row,
      by_row,
      by_row,
      by_moments,
    ),
    by_page,
  )(page_keys, k, v, constants, open_cache.held.at, older, count, moments)

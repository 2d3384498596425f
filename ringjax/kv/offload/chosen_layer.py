"""One layer of a `ChosenTieredCache` during a call: it copies chosen pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.offload.choices import choice_of, pages_read
from ringjax.kv.offload.hot_pages import (
  ChosenPages,
  HotPages,
  fetch_chosen,
  is_wider,
)
from ringjax.kv.offload.low_rank_keys import LowRankKeys, low_rank_specs
from ringjax.kv.offload.moved_blocks import with_heads
from ringjax.kv.offload.tiered import TieredLayer
from ringjax.kv.storage.pages import Places
from ringjax.kv.storage.slots import REPLICATED
from ringjax.ops.attention.cached.paged import PagedView
from ringjax.ops.attention.cached.views import KVView, UnrotatedView
from ringjax.ops.attention.sparse.top_tokens import ranked
from ringjax.ops.mask import Coords, SameSegment, visible

if TYPE_CHECKING:
  from ringjax.kv.offload.chosen_tiered import ChosenTieredCache
  from ringjax.ops.attention.cached.selection import KeySelection


@dataclasses.dataclass(frozen=True)
class ChosenTieredLayer(TieredLayer):
  """One layer's part of a `ChosenTieredCache` during one call.

  Attributes:
    cache: Cache of the call.
    hot: Hot pages of the kind of layer; None if all stays on the devices.
    chosen: Pages that the call's queries read; None: they read all.
  """

  cache: ChosenTieredCache
  hot: HotPages | None
  chosen: ChosenPages | None = None

  @property
  def slots(self) -> tuple[PyTree, HotPages | None]:
    return self.inner.slots, self.hot

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> ChosenTieredLayer:
    del plain
    cache = self.cache
    policy = cache.kind.policy
    if policy is None or not self._chooses:
      # An index chooses by `chosen_by`.
      return self
    bounds, heads = cache.landmarks[self.kind], self._places
    assert bounds is not None
    count = bounds.shape[3] // cache.shards
    num_read = tuple(pages_read(cache.kind, n) for n in range(count + 1))
    choice = choice_of(cache.kind)

    def choose(
      q: jax.Array, bounds: jax.Array, at: Coords
    ) -> tuple[jax.Array, jax.Array]:
      b, t, n, h = q.shape
      num_heads, num_pages = bounds.shape[1:3]
      q = q.reshape(b, t, num_heads, n // num_heads, h)
      q = jnp.transpose(q, (0, 2, 3, 1, 4))
      is_slot = (at.seg > 0).reshape(at.seg.shape[0], 1, num_pages, -1)
      has_page = jnp.broadcast_to(jnp.any(is_slot, 3), bounds.shape[:3])
      pages, reads = choice.ranked(q, bounds, has_page, num_read)
      # Of an empty row a query would read a page, too.
      return pages, reads & jnp.take_along_axis(has_page[:, :, None], pages, 3)

    q = rotated()
    spec = P(heads.batch or None, None, heads.heads or None)
    return self._fetched(choose, q, spec, q.shape[1], max(num_read))

  def chosen_by(self, selection: KeySelection) -> ChosenTieredLayer:
    """Copy the pages with keys that the layer's index may choose.

    Each shard copies those of its best keys of the older part: the keys that
    queries read are among them and those of the open cache.
    """
    if not self._chooses:
      return self
    cache = self.cache
    assert self.fresh is not None
    mask = cache.shapes[self.kind].reading.mask & SameSegment()
    batch = self._places.batch or None

    def choose(
      queries: PyTree, index_keys: jax.Array, at: Coords
    ) -> tuple[jax.Array, jax.Array]:
      selection, q_at = queries
      keys = index_keys[:, 0].reshape(
        index_keys.shape[0], -1, index_keys.shape[-1]
      )
      expand = lambda at, axis: Coords(*(jnp.expand_dims(x, axis) for x in at))
      allowed = visible(mask, expand(q_at, 2), expand(at, 1))
      scores = ranked(selection.scores(keys), allowed)
      count = min(selection.count, scores.shape[2])
      score, slot = lax.top_k(scores, count)
      pages = slot.astype(jnp.int32) // cache.kind.tier.block
      return pages[:, None], (score > -jnp.inf)[:, None]

    selection = selection.without_keys()
    tokens = selection.q.shape[1]
    coords = self.fresh.at
    row: PyTree = lambda x: P(batch if x.shape[0] > 1 else None)
    specs = selection.specs(batch, None), Coords(*map(row, coords))
    fetched = self._fetched(
      choose, (selection, coords), specs, tokens, selection.count
    )
    # The index chooses among the keys of all hot pages.
    chosen = fetched.chosen
    assert chosen is not None
    return dataclasses.replace(fetched, chosen=chosen._replace(places=None))

  @property
  def _places(self) -> Places:
    shape = self.cache.shapes[self.kind]
    return with_heads(self.cache.places, shape.heads)

  @property
  def _chooses(self) -> bool:
    """Whether the call's tokens choose pages: not those of a prompt."""
    cache = self.cache
    hosted = cache.blocks[self.kind] is not None
    return hosted and cache.open.held.mode == REPLICATED

  def _fetched(
    self,
    choose: Callable[..., tuple[jax.Array, jax.Array]],
    queries: PyTree,
    specs: PyTree,
    tokens: int,
    most: int,
  ) -> ChosenTieredLayer:
    """Copy the pages that the queries choose.

    Args:
      choose: Function of a device's queries, the landmarks of the layer and
        the coordinates of the older slots, to the pages that each query
        chooses, int32 [B, K, T, n], and whether it reads them.
      queries: Arrays that it gets.
      specs: PartitionSpecs of the queries.
      tokens: Number of tokens of the call, T.
      most: Pages that a query reads, n.
    """
    cache = self.cache
    places, hot = self._places, self.hot
    assert hot is not None
    blocks, landmarks = cache.blocks[self.kind], cache.landmarks[self.kind]
    low_rank = cache.low_rank[self.kind]
    assert blocks is not None and landmarks is not None
    batch, heads, axis = (
      x or None for x in (places.batch, places.heads, places.tokens)
    )

    def local(
      queries: PyTree,
      blocks: LayerKV,
      hot: HotPages,
      landmarks: jax.Array,
      low_rank: LowRankKeys | None,
      at: Coords,
      layer: jax.Array,
    ) -> tuple[HotPages, ChosenPages]:
      of_layer = lax.dynamic_index_in_dim(landmarks, layer, 0, keepdims=False)
      at = Coords(*at)
      pages, reads = choose(queries, of_layer, at)
      return fetch_chosen(
        LayerKV(*blocks), hot, at, layer, pages, reads, low_rank
      )

    block_spec: PyTree = P(axis, batch, heads)
    value_spec: PyTree = block_spec if blocks.v.size else P()
    by_head: PyTree = P(batch, heads, axis)
    by_query: PyTree = P(batch, heads, None, axis)
    wider = is_wider(hot, cache.shards, tokens * most, landmarks.shape[3])
    pool: PyTree = places.pool if wider else None
    value_pool: PyTree = pool if hot.v.size or pool is None else P()
    specs_of_hot = hot.specs(places)
    new_hot, chosen = places.local(
      local,
      (
        specs,
        LayerKV(block_spec, value_spec),
        specs_of_hot,
        places.by_head,
        low_rank_specs(low_rank, places),
        places.by_example,
        P(),
      ),
      (
        specs_of_hot,
        ChosenPages(
          pool,
          value_pool,
          by_head,
          by_query,
          Coords(by_head, by_head),
        ),
      ),
    )(
      queries,
      blocks,
      hot,
      landmarks,
      low_rank,
      cache.held.at,
      jnp.asarray(self.index, jnp.int32),
    )
    return dataclasses.replace(self, hot=new_hot, chosen=chosen)

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    cache = self.cache
    if cache.blocks[self.kind] is None:
      return self.inner.views(apart=apart)
    if self.chosen is None:
      return super().views(apart=apart)
    codec, chosen = cache.kind.codec, self.chosen
    constants, decoders = ((), ()), None
    if codec is not None:
      constants = self.inner._constants()
      decoders = cache.shapes[self.kind].decoders(codec, cache.dtype)
    assert self.hot is not None
    k = self.hot.k if chosen.k is None else chosen.k
    v = self.hot.v if chosen.v is None else chosen.v
    view: KVView = PagedView(
      k,
      v if v.size else k[..., :0],
      chosen.at.pos,
      chosen.at.seg,
      chosen.table,
      constants,
      decoders,
      self._places.axes,
      places=chosen.places,
    )
    rotation = self.inner.rotation
    if cache.kind.layout.unrotated and not rotation.trivial:
      view = UnrotatedView(view, rotation)
    return (view, *self.inner.views(apart=apart))

  def recall(self, empty: PyTree) -> PyTree:
    return self.inner.recall(empty)

  def keep(self, state: PyTree) -> ChosenTieredLayer:
    return dataclasses.replace(self, inner=self.inner.keep(state))

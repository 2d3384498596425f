"""One layer of a `ChosenTieredCache` during a call: it copies chosen pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, Shaped

from ringjax.errors import OptionError
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.offload.choices import choice_of, units_read
from ringjax.kv.offload.clustered_keys import noted_queries
from ringjax.kv.offload.hot_pages import (
  ChosenPages,
  EarlyPages,
  HotPages,
  begin_pages,
  fetch_chosen,
  is_wider,
)
from ringjax.kv.offload.landmarks import head_placement, num_pages
from ringjax.kv.offload.low_rank_keys import LowRankKeys, low_rank_specs
from ringjax.kv.offload.moved_blocks import with_heads
from ringjax.kv.offload.page_choice import ChosenUnits, PageChoice
from ringjax.kv.offload.tiered import TieredLayer
from ringjax.kv.storage.pages import Places
from ringjax.kv.storage.slots import REPLICATED
from ringjax.ops.attention.cached.paged import PagedView, selecting
from ringjax.ops.attention.cached.views import KVView, UnrotatedView
from ringjax.ops.attention.sparse.top_tokens import ranked
from ringjax.ops.mask import Coords, SameSegment, visible
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.offload.chosen_tiered import ChosenTieredCache
  from ringjax.ops.attention.cached.selection import KeySelection


@dataclasses.dataclass(frozen=True)
class ChosenTieredLayer(TieredLayer):
  """One layer's part of a `ChosenTieredCache` during one call.

  Attributes:
    cache: Cache of the call.
    hot: Hot pages of the kind of layer; None if all stays on the devices.
    moments: Moments of queries of the kind of layer; None: none are recorded.
    chosen: Pages that the call's queries read; None: they read all.
    early_pages: Pages of the layer that were copied ahead; None: none were.
  """

  cache: ChosenTieredCache
  hot: HotPages | None
  moments: Float[Array, "L B K H H"] | None = None
  chosen: ChosenPages | None = None
  early_pages: EarlyPages | None = None

  @property
  def slots(self) -> tuple[PyTree, HotPages | None, jax.Array | None]:
    return self.inner.slots, self.hot, self.moments

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> ChosenTieredLayer:
    del plain
    cache = self.cache
    if self.moments is not None and cache.open.held.mode != REPLICATED:
      return self._noting(rotated)
    policy = cache.kind.policy
    if policy is None or not self._chooses:
      # An index chooses by `chosen_by`.
      return self
    if cache.kind.tier.ahead is not None and self.early_pages is None:
      raise _no_guess(cache.kind.tier.ahead)
    q = rotated()
    choose, max_units = self._choosing()
    return self._fetched(choose, q, self._query_spec, q.shape[1], max_units)

  def _choosing(self) -> tuple[Callable[..., ChosenUnits], int]:
    """Function with which queries choose units, and units that one reads."""
    cache = self.cache
    landmarks = cache.landmarks[self.kind]
    assert landmarks is not None
    count = num_pages(landmarks) // cache.shards
    num_read = tuple(units_read(cache.kind, n) for n in range(count + 1))
    choice = choice_of(cache.kind)

    def choose(
      q: jax.Array,
      landmarks: PyTree,
      centres: jax.Array | None,
      at: Coords,
    ) -> ChosenUnits:
      q = _by_head(q, _num_heads(landmarks))
      return choice.chosen(q, landmarks, centres, at, num_read)

    return choose, max(num_read)

  @property
  def _query_spec(self) -> P:
    places = self._places
    return P(places.batch or None, None, places.heads or None)

  def begun(
    self, queries: Callable[[], Array | None]
  ) -> EarlyPages | tuple[()]:
    """Copy pages that the layer will probably choose, see `begin_pages`.

    Args:
      queries: Function that guesses the rotated queries of the layer,
        [B, T, N, H], or returns None if they can't be guessed.

    Returns:
      The pages; () if none are copied ahead.

    Raises:
      OptionError: If they can't be guessed.
    """
    cache, count = self.cache, self.cache.kind.tier.ahead
    if count is None or not self._chooses:
      return ()
    q = queries()
    if q is None:
      raise _no_guess(count)
    places, hot = self._places, self.hot
    blocks, landmarks = cache.blocks[self.kind], cache.landmarks[self.kind]
    centres = cache.centres[self.kind]
    assert hot is not None and blocks is not None and landmarks is not None
    choose, _ = self._choosing()
    copies_keys = cache.low_rank[self.kind] is None

    def local(
      queries: jax.Array,
      blocks: LayerKV,
      hot: HotPages,
      landmarks: PyTree,
      centres: jax.Array | None,
      at: Coords,
      layer: jax.Array,
    ) -> EarlyPages:
      of_pages, head_vectors = _of_layer(layer, landmarks, centres)
      units = choose(queries, of_pages, head_vectors, Coords(*at))
      return begin_pages(
        LayerKV(*blocks),
        hot,
        layer,
        units.units,
        units.reads,
        count,
        keys=copies_keys,
      )

    layers = cache.shapes[self.kind].layers
    return places.local(
      local,
      (
        self._query_spec,
        self._block_specs(blocks),
        hot.specs(places),
        places.by_head,
        head_placement(centres, places),
        places.by_example,
        P(),
      ),
      EarlyPages.specs(hot, places, keys=copies_keys),
    )(
      q,
      blocks,
      hot,
      landmarks,
      centres,
      cache.held.at,
      # One beyond the last layer is none.
      jnp.minimum(jnp.asarray(self.index, jnp.int32), layers - 1),
    )

  def having(self, early_pages: EarlyPages) -> ChosenTieredLayer:
    """The layer with pages that `begun` has copied."""
    return dataclasses.replace(self, early_pages=early_pages)

  def _block_specs(self, blocks: LayerKV) -> LayerKV:
    """PartitionSpecs of the blocks in host memory."""
    places = self._places
    spec: PyTree = P(
      places.tokens or None, places.batch or None, places.heads or None
    )
    value_spec: PyTree = spec if blocks.v.size else P()
    return LayerKV(spec, value_spec)

  def _noting(self, rotated: Callable[[], Array]) -> ChosenTieredLayer:
    """Record the queries of a prompt's tokens."""
    if self.fresh is None:
      return self
    assert self.moments is not None
    cache = self.cache
    # Tokens that a shard has before its first page moves.
    stop = -(-(cache.kind.tier.device or 0) // cache.shards)
    stop += cache.kind.tier.block
    moments = noted_queries(
      self.moments, self.index, rotated, self.fresh.at, stop
    )
    return dataclasses.replace(self, moments=moments)

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
      queries: PyTree,
      index_keys: jax.Array,
      centres: jax.Array | None,
      at: Coords,
    ) -> ChosenUnits:
      del centres
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
      return ChosenUnits(pages[:, None], (score > -jnp.inf)[:, None])

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
    choose: Callable[..., ChosenUnits],
    queries: PyTree,
    specs: PyTree,
    tokens: int,
    most: int,
  ) -> ChosenTieredLayer:
    """Copy the pages that the queries choose.

    Args:
      choose: Function of a device's queries, the landmarks of the layer, the
        vectors of its heads or None, and the coordinates of the older slots.
      queries: Arrays that it gets.
      specs: PartitionSpecs of the queries.
      tokens: Number of tokens of the call, T.
      most: Pages that a query reads, n.
    """
    cache = self.cache
    places, hot = self._places, self.hot
    assert hot is not None
    blocks, landmarks = cache.blocks[self.kind], cache.landmarks[self.kind]
    low_rank, centres = cache.low_rank[self.kind], cache.centres[self.kind]
    assert blocks is not None and landmarks is not None
    choice = choice_of(cache.kind)
    batch, heads, axis = (
      x or None for x in (places.batch, places.heads, places.tokens)
    )
    early_pages, keys = self.early_pages, low_rank is None

    def local(
      queries: PyTree,
      blocks: LayerKV,
      hot: HotPages,
      landmarks: PyTree,
      centres: jax.Array | None,
      low_rank: LowRankKeys | None,
      at: Coords,
      layer: jax.Array,
      stored: _Stored,
      early_pages: EarlyPages | None,
    ) -> tuple[HotPages, ChosenPages]:
      at = Coords(*at)
      of_pages, head_vectors = _of_layer(layer, landmarks, centres)
      units = choose(queries, of_pages, head_vectors, at)
      new_hot, chosen = fetch_chosen(
        LayerKV(*blocks),
        hot,
        at,
        layer,
        units.units,
        units.reads,
        low_rank,
        early_pages,
      )
      if not choice.samples:
        return new_hot, chosen
      assert head_vectors is not None
      q = _by_head(queries, _num_heads(of_pages))
      view = self._view(new_hot, chosen, stored)
      bias = _sampling_bias(choice, q, view, head_vectors, units)
      return new_hot, chosen._replace(bias=bias)

    by_head: PyTree = P(batch, heads, axis)
    by_query: PyTree = P(batch, heads, None, axis)
    total = num_pages(landmarks) * (cache.kind.tier.block // hot.k.shape[1])
    of_bias = P(batch, heads, None, None, axis)
    bias_spec: PyTree = of_bias if choice.samples else None
    wider = is_wider(hot, cache.shards, tokens * most, total)
    pool: PyTree = places.pool if wider else None
    value_pool: PyTree = pool if hot.v.size or pool is None else P()
    specs_of_hot = hot.specs(places)
    new_hot, chosen = places.local(
      local,
      (
        specs,
        self._block_specs(blocks),
        specs_of_hot,
        places.by_head,
        head_placement(centres, places),
        low_rank_specs(low_rank, places),
        places.by_example,
        P(),
        self._stored_specs,
        None
        if early_pages is None
        else EarlyPages.specs(hot, places, keys=keys),
      ),
      (
        specs_of_hot,
        ChosenPages(
          pool,
          value_pool,
          by_head,
          by_query,
          Coords(by_head, by_head),
          bias_spec,
        ),
      ),
    )(
      queries,
      blocks,
      hot,
      landmarks,
      centres,
      low_rank,
      cache.held.at,
      jnp.asarray(self.index, jnp.int32),
      self._stored,
      early_pages,
    )
    return dataclasses.replace(self, hot=new_hot, chosen=chosen)

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    cache = self.cache
    if cache.blocks[self.kind] is None:
      return self.inner.views(apart=apart)
    if self.chosen is None:
      return super().views(apart=apart)
    assert self.hot is not None
    view = self._view(self.hot, self.chosen, self._stored)
    return (view, *self.inner.views(apart=apart))

  @property
  def _stored(self) -> _Stored:
    """Constants of codecs and rotation with which keys are read."""
    rotation, layout = self.inner.rotation, self.cache.kind.layout
    rotates = layout.unrotated and not rotation.trivial
    constants = ((), ())
    if self.cache.kind.codec is not None:
      constants = self.inner._constants()
    return _Stored(constants, rotation if rotates else None)

  @property
  def _stored_specs(self) -> _Stored:
    """PartitionSpecs of `_stored`."""
    places, stored = self._places, self._stored
    by_head: PyTree = jax.tree.map(
      lambda _: P(places.heads or None), stored.constants
    )
    rotation: PyTree = stored.rotation and stored.rotation.specs(places.batch)
    return _Stored(by_head, rotation)

  def _view(
    self, hot: HotPages, chosen: ChosenPages, stored: _Stored
  ) -> KVView:
    """View of the chosen pages, of all devices or of one."""
    cache, decoders = self.cache, None
    codec = cache.kind.codec
    if codec is not None:
      decoders = cache.shapes[self.kind].decoders(codec, cache.dtype)
    k = hot.k if chosen.k is None else chosen.k
    v = hot.v if chosen.v is None else chosen.v
    view = PagedView(
      k,
      v if v.size else k[..., :0],
      chosen.at.pos,
      chosen.at.seg,
      chosen.table,
      stored.constants,
      decoders,
      self._places.axes,
      places=chosen.places,
      bias=chosen.bias,
    )
    if stored.rotation is None:
      return view
    return UnrotatedView(view, stored.rotation)

  def recall(self, empty: PyTree) -> PyTree:
    return self.inner.recall(empty)

  def keep(self, state: PyTree) -> ChosenTieredLayer:
    return dataclasses.replace(self, inner=self.inner.keep(state))


class _Stored(NamedTuple):
  """Arrays with which stored keys of a layer are read.

  Fields:
    constants: Arrays [K, n] of the layer's codecs, for keys and for values.
    rotation: Rotation of the keys; None if they are stored rotated.
  """

  constants: tuple[tuple[Any, ...], tuple[Any, ...]]
  rotation: Rotation | None


def _no_guess(count: int) -> OptionError:
  """Error of an option that a layer can't follow."""
  return OptionError(
    "ahead",
    f"{count}, for a layer whose queries can't be guessed",
    "layers of plain attention of a model, with their weights on the devices",
    "leave ahead out",
  )


def _of_layer(
  layer: Index,
  landmarks: PyTree[Shaped[Array, "L B K M ..."]],
  centres: Float[Array, "L B K C H"] | None,
) -> tuple[PyTree, jax.Array | None]:
  """A layer's landmarks, and the vectors of its heads."""
  pick = lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
  return jax.tree.map(pick, landmarks), None if centres is None else pick(
    centres
  )


def _num_heads(landmarks: PyTree[Shaped[Array, "B K M ..."]]) -> int:
  """Number of KV heads of a layer's landmarks."""
  return jax.tree.leaves(landmarks)[0].shape[1]


def _by_head(
  q: Float[Array, "B T N H"], heads: int
) -> Float[Array, "B K G T H"]:
  b, t, n, h = q.shape
  q = q.reshape(b, t, heads, n // heads, h)
  return jnp.transpose(q, (0, 2, 3, 1, 4))


def _sampling_bias(
  choice: PageChoice,
  q: Float[Array, "B K G T H"],
  view: KVView,
  centres: Float[Array, "B K C H"],
  units: ChosenUnits,
) -> Float[Array, "B K G T n"]:
  """Negative logarithm of the probability that a query reads each key."""
  assert units.log_share is not None and units.sampled is not None
  pages = selecting(view)
  assert pages is not None
  by_query: KVView = pages.by_query(q)
  if isinstance(view, UnrotatedView):
    by_query = view._replace(stored=by_query)
  keys, _ = by_query.tile(jnp.int32(0), by_query.shape[2])
  keys = keys.reshape(*units.units.shape, keys.shape[-1])
  log_probability = choice.log_probability(q, keys, centres)
  bias = jnp.where(units.sampled[:, :, None], -log_probability, 0)
  # Not -inf - -inf, where a query did not sample what others of its group did.
  read = units.log_share > -jnp.inf
  return jnp.where(read, bias - jnp.where(read, units.log_share, 0), -jnp.inf)

"""A cache after contexts that were encoded independently and are read-only.

Guarantees: contexts keep the bytes with which they were encoded, whatever
codec stores them; their order only affects the rounding of sums.
Cost: a call reads the contexts as it reads any keys; nothing is appended to
them. Placing them is one copy to the devices.
Memory: the contexts of all rows, and an open cache for what is read and
generated after them.

The contexts of a row are in one `KVCache` at arbitrary coordinates, each spread
evenly over the shards; prefix, question and answer are in another, the open
cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.cache import KVCache
from ringjax.kv.composed.open_cache import WithOpenCache, WithOpenLayer
from ringjax.kv.layer_spec import filled_constants
from ringjax.kv.storage import changes
from ringjax.kv.storage.exported_blocks import Blocks
from ringjax.kv.storage.pages import few_sizes
from ringjax.kv.storage.refusals import refused
from ringjax.kv.storage.slots import REPLICATED
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.separate_contexts import (
  SelectedView,
  WeighedView,
)
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.parallel.local_arrays import whole_on_host
from ringjax.typing import ArrayLeaf, Index


class PlacedContext(NamedTuple):
  """An exported context with the positions at which its tokens are read.

  Fields:
    blocks: Tokens of the context, by `export`.
    pos: Position of each token, int [n].
  """

  blocks: Blocks
  pos: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCache(WithOpenCache):
  """Contexts, and an open cache of the tokens after them.

  Attributes:
    open: Open cache of prefix, question and answer.
    kind: Cache kind of contexts and open cache.
    limit: Maximum number of positions in a row.
    contexts: Cache of the contexts of each row.
    weigh: Weighting of the contexts' keys: a view of
      `ops.attention.cached.separate_contexts` without its `stored`; None to
      treat them as other keys.
  """

  contexts: KVCache
  weigh: WeighedView | SelectedView | None = None
  older: ClassVar[str] = "contexts"
  described: ClassVar[str] = "a cache after contexts"
  instead: ClassVar[str] = "a cache that holds its own tokens alone"
  remake: ClassVar[str] = "place the contexts again"
  # Contexts differ in size from row to row, and stay on their shards.
  refuses: ClassVar[Mapping[type, tuple[str, str]]] = {
    changes.InsertRows: ("insert", "place the contexts of all rows together")
  }
  # To ask the contexts another question.
  changing: ClassVar[tuple[str, ...]] = ("open",)

  def allocate(self, at: Coords, *, sees: bool, **call: Any) -> ContextCache:
    """Allocate slots for a call's tokens; see `CallCache.allocate`.

    Raises:
      OptionError: If the call would not see the contexts.
    """
    if not sees:
      raise OptionError(
        "attend",
        "ContextParallel() after contexts in the cache",
        "CachedAttention(), which sees them",
        "pass attend=CachedAttention(), or leave it out",
      )
    return super().allocate(at, sees=sees, **call)

  def layer(self, kind: int, slots: PyTree, index: Index) -> ContextLayer:
    return ContextLayer(self, self.open.layer(kind, slots, index), kind, index)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def changed(self, change: changes.CacheChange) -> ContextCache:
    cache, weigh = super().changed(change), cast(Any, self.weigh)
    if not isinstance(change, changes.ResetRows | changes.TakeRows):
      return cache
    owner = getattr(weigh, "owner", None)
    if isinstance(change, changes.TakeRows) and owner is not None:
      owner = jnp.take(owner, jnp.asarray(change.rows), 0)
      weigh = dataclasses.replace(weigh, owner=owner)
    contexts = self.contexts.changed(change)
    return dataclasses.replace(cache, contexts=contexts, weigh=weigh)

  gathered = refused("keep='last'", "leave keep= out")


tree.register(ContextCache, ("open", "contexts", "weigh"), ("kind", "limit"))


@dataclasses.dataclass(frozen=True)
class ContextLayer(WithOpenLayer):
  """One layer's part of a `ContextCache` during one call.

  Attributes:
    cache: Cache during the call.
    inner: Layer of the open cache.
    kind: Index of the kind of layer.
    index: Index of the layer within its kind.
  """

  kind: int
  index: Any

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    cache: Any = self.cache
    contexts, weigh = cache.contexts, cache.weigh
    part = contexts.layer(self.kind, contexts.slots[self.kind], self.index)
    view = part.view(self.inner.rotation)
    if isinstance(weigh, SelectedView) and cache.open.held.mode == REPLICATED:
      # Only the tokens of a question select together. Draft tokens select one
      # by one, as they would without drafting.
      weigh = weigh.each_alone()
    if weigh is not None:
      view = dataclasses.replace(weigh, stored=view)
    return view, *self.inner.views(apart=apart)


# ---------------------------------------------------------------------------
# Placing contexts
# ---------------------------------------------------------------------------


def slots_for(
  lengths: Sequence[Sequence[int]], shards: int, tile: int = 1
) -> int:
  """Number of slots per shard for contexts of these lengths, per row.

  Each context begins at a multiple of `tile` slots.
  """
  tiles = lambda n: math.ceil(math.ceil(n / shards) / tile)
  max_tiles = max(sum(map(tiles, row)) for row in lengths)
  return few_sizes(max(1, max_tiles)) * tile


def placed(
  spec: KVCache, rows: Sequence[Sequence[PlacedContext]], tile: int = 1
) -> tuple[KVCache, Int[Array, "B _"]]:
  """Create a cache that holds contexts, with the context of each tile.

  Args:
    spec: Specs of the cache (`init_cache_spec`), with `slots_for` slots on each
      shard.
    rows: Contexts of each row.
    tile: Alignment of contexts, in slots of a shard.

  Returns:
    The cache, and the index of each tile's context in its row or -1, int32
    [B, n].
  """
  shards, local = spec.shards, spec.held.local
  host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.slots)
  parts = tuple(spec.unfilled(kind, x) for kind, x in enumerate(host))
  pos: Any = np.zeros(spec.at.pos.shape, np.int32)
  seg = np.zeros_like(pos)
  used = np.zeros(spec.held.used.shape, np.int32)
  owner = np.full((spec.batch, spec.capacity // tile), -1, np.int32)
  for row, contexts in enumerate(rows):
    first = 0
    for number, context in enumerate(contexts):
      count = context.pos.size
      per_shard = -(-count // shards)
      # Slot of each token: every shard gets a part of the context.
      shard, slot = np.divmod(np.arange(count), per_shard)
      target_slots = shard * local + first + slot
      pos[row, target_slots], seg[row, target_slots] = context.pos, 1
      owner[row, target_slots // tile] = number
      jax.tree.map(
        lambda x, new, into=target_slots, row=row: _put(
          x, np.asarray(new), row, into
        ),
        parts,
        context.blocks.parts,
      )
      first += -(-per_shard // tile) * tile
    used[row] = first
  empty_table: Any = spec.held
  slot_table = dataclasses.replace(
    empty_table, at=Coords(pos, seg), used=used, before=used.copy()
  )
  cache = dataclasses.replace(spec, slots=host, held=slot_table, constants=())
  like = dataclasses.replace(spec, constants=())
  cache = jax.tree.map(_on_devices, cache, like)
  constants = filled_constants(spec.shapes, spec.kind, spec.constants)
  tiles = jax.ShapeDtypeStruct(owner.shape, owner.dtype)
  if spec.mesh is not None:
    # Shard tiles like their slots.
    sharding = spec.at.pos.sharding
    tiles = jax.ShapeDtypeStruct(owner.shape, owner.dtype, sharding=sharding)
  return (
    dataclasses.replace(cache, constants=constants),
    _on_devices(owner, tiles),
  )


def exported(
  cache: KVCache, spans: Sequence[tuple[int, int, int]]
) -> list[Blocks]:
  """Copy tokens of rows to arrays of the host; see `ModelCache.export`.

  Of a cache that is spread over several processes each of them gets all tokens;
  all make the same call.

  Args:
    cache: Cache of tokens on devices.
    spans: Row, first position, and position after the last, of each export.
  """
  at, slots = whole_on_host((cache.at, cache.slots))
  slots = tuple(cache.unfilled(kind, x) for kind, x in enumerate(slots))
  exports = []
  for row, start, stop in spans:
    index, _ = cache.located(at, row, start, stop)

    def take_tokens(
      x: ArrayLeaf,
      index: jax.Array | np.ndarray = index,
      row: int = row,
    ) -> np.ndarray:
      return np.take(x[:, row], index, token_axis(x) - 1)

    coords = Coords(*(np.asarray(x)[row][index] for x in at))
    exports.append(Blocks(coords, jax.tree.map(take_tokens, slots), cache.kind))
  return exports


def _put(x: Any, new: np.ndarray, row: int, into: np.ndarray) -> None:
  """Write a context [L, K, n, X] (or [.., X, n]) to slots of a row."""
  if not x.size:
    return
  axis = token_axis(x) - 1
  np.moveaxis(x[:, row], axis, 0)[into] = np.moveaxis(new, axis, 0)


def _on_devices(x: np.ndarray, like: Any) -> jax.Array:
  """Copy a host array to devices, with the sharding of `like`."""
  if like.sharding is None:
    return jnp.asarray(x)
  return jax.make_array_from_callback(
    x.shape, like.sharding, lambda index: x[index]
  )

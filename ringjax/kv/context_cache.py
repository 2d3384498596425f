"""A cache behind contexts that were encoded apart, which calls only read.

Guarantees: contexts keep the bytes with which they were encoded, whatever
codec stores them; the order in which they are placed changes nothing but sums.
Cost: a call reads the contexts as it reads any keys; nothing is appended to
them. Placing them is one copy to the devices.
Memory: the contexts of all rows, and an open cache for what is read and
generated behind them.

The contexts of a row are in one `KVCache` at coordinates of their own choice,
each context level over the shards; prefix, question and answer are in another,
the open one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import Ends, RowIndices, donated
from ringjax.kv.cache import Blocks, KVCache, filled_constants
from ringjax.kv.open_cache import WithOpenCache, WithOpenLayer
from ringjax.kv.pages import few_sizes
from ringjax.kv.slots import REPLICATED
from ringjax.ops.attention.apart import SelectedView, WeighedView
from ringjax.ops.attention.code_format import token_axis
from ringjax.ops.attention.views import KVView
from ringjax.ops.mask import Coords
from ringjax.typing import Index


class PlacedContext(NamedTuple):
  """A context and where its tokens are read.

  Fields:
    blocks: from `export`.
    pos: int [n], the position of each token.
  """

  blocks: Blocks
  pos: np.ndarray


class ContextSnapshot(NamedTuple):
  """What `ContextCache.restore` needs: the open cache, copied."""

  open: KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCache(WithOpenCache):
  """Contexts, and an open cache of what comes behind them.

  Attributes:
    open: prefix, question and answer.
    kind: of both.
    limit: positions of a row that there is room for.
    contexts: the contexts of each row.
    weigh: how their keys are weighed, a view of `ops.attention.apart` without
      what is `stored`; None: as all keys are.
  """

  contexts: KVCache
  weigh: WeighedView | SelectedView | None = None

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.open.slots

  @property
  def at(self) -> Coords:
    """Coordinates of all slots, [B, S]: of the contexts, then the open ones."""
    both = zip(self.contexts.at, self.open.at, strict=True)
    return Coords(*(jnp.concatenate(pair, 1) for pair in both))

  @property
  def length(self) -> jax.Array:
    """int32 [B], the position behind each row's last token."""
    return jnp.maximum(self.contexts.length, self.open.length)

  @property
  def asks_whole(self) -> bool:
    """Whether the tokens of a question select contexts together: one call."""
    return isinstance(self.weigh, SelectedView) and self.weigh.together

  def free(self) -> np.ndarray | None:
    """Tokens that may still come, int [B, R]; None where they are traced."""
    return self.open.free()

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens that do not fit; see `KVCache.check`.

    Raises:
      OptionError: also for a call that would not see the contexts.
    """
    if not sees:
      raise OptionError(
        "attend",
        "ContextParallel() behind contexts in the cache",
        "CachedAttention(), which sees them",
        "pass attend=CachedAttention(), or leave it out",
      )
    if donated(self.contexts):
      raise OptionError(
        "cache",
        "one whose buffers were donated to an earlier call",
        "the cache that the last call returned",
        "pass that one, or place the contexts again",
      )
    self.open.check(batch, tokens, replicated=replicated, sees=sees)

  def allocate(
    self, at: Coords, *, replicated: bool, sees: bool
  ) -> ContextCache:
    made = self.open.allocate(at, replicated=replicated, sees=sees)
    return dataclasses.replace(self, open=made)

  def layer(self, kind: int, slots: PyTree, index: Index) -> ContextLayer:
    return ContextLayer(self, self.open.layer(kind, slots, index), kind, index)

  def updated(self, slots: tuple[Any, ...]) -> ContextCache:
    return dataclasses.replace(self, open=self.open.updated(slots))

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def with_room(self, taken: np.ndarray | int) -> ContextCache:
    """Itself: the size of its open cache is fixed."""
    del taken
    return self

  def evict(self) -> ContextCache:
    """Itself: it keeps all tokens."""
    return self

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> ContextCache:
    """Itself."""
    del rows
    return self

  def steps(self) -> int:
    """How many single tokens may come before `flush` is called."""
    return self.open.steps()

  def truncate(self, length: Ends, most: int | None = None) -> ContextCache:
    """Without the open cache's tokens at positions from `length` on.

    Contexts stay as they are; see `KVCache.truncate`.
    """
    return dataclasses.replace(self, open=self.open.truncate(length, most))

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> ContextCache:
    """Of the last call's T tokens those in `kept`; see `KVCache.keep`."""
    return dataclasses.replace(self, open=self.open.keep(kept))

  def snapshot(self) -> ContextSnapshot:
    """What `restore` goes back to: for another question to the contexts."""
    return ContextSnapshot(jax.tree.map(jnp.copy, self.open))

  def restore(self, snapshot: ContextSnapshot) -> ContextCache:
    """As it was at a snapshot of the same cache, before later appends."""
    made = jax.tree.map(jnp.copy, snapshot.open)
    return dataclasses.replace(self, open=made)

  def reset(self, rows: RowIndices) -> ContextCache:
    """With these rows, int [n], empty, without contexts too."""
    return dataclasses.replace(
      self, open=self.open.reset(rows), contexts=self.contexts.reset(rows)
    )

  def take(self, examples: RowIndices) -> ContextCache:
    """Of these rows, int [B'], each as often as it is named."""
    weigh: Any = self.weigh
    if getattr(weigh, "owner", None) is not None:
      owner = jnp.take(weigh.owner, jnp.asarray(examples), 0)
      weigh = dataclasses.replace(weigh, owner=owner)
    return dataclasses.replace(
      self,
      open=self.open.take(examples),
      contexts=self.contexts.take(examples),
      weigh=weigh,
    )

  def insert(self, rows: RowIndices, other: object) -> Any:
    """Refused: rows have contexts of their own sizes.

    Raises:
      OptionError: always.
    """
    del rows, other
    raise self._refused("insert", "place the contexts of all rows together")

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """Tokens of the open cache; see `KVCache.export`."""
    return self.open.export(row, start, stop)

  def load(
    self, row: int, blocks: Blocks, at: Coords | None = None
  ) -> ContextCache:
    """With exported tokens in the open cache; see `KVCache.load`."""
    return dataclasses.replace(self, open=self.open.load(row, blocks, at))

  def gathered(self, device: jax.Device) -> Any:
    """Refused: the contexts stay on their shards.

    Raises:
      OptionError: always.
    """
    del device
    raise self._refused("keep='last'", "leave keep= out")

  def _refused(self, what: str, remedy: str) -> OptionError:
    return OptionError(
      "cache",
      f"{what} of a cache behind contexts",
      "a cache that holds its own tokens alone",
      remedy,
    )


tree.register(ContextCache, ("open", "contexts", "weigh"), ("kind", "limit"))


@dataclasses.dataclass(frozen=True)
class ContextLayer(WithOpenLayer):
  """One layer's part of a `ContextCache` during one call.

  Attributes:
    cache: during the call.
    inner: the layer's part of the open cache.
    kind: of the layer.
    index: which layer of its kind.
  """

  kind: int
  index: Any

  @property
  def slots(self) -> Any:
    return self.inner.slots

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> ContextLayer:
    del rotated, plain
    return self

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    cache: Any = self.cache
    held, weigh = cache.contexts, cache.weigh
    part = held.layer(self.kind, held.slots[self.kind], self.index)
    view = part.view(self.inner.rotation)
    if isinstance(weigh, SelectedView) and cache.open.held.mode == REPLICATED:
      # Only the tokens of a question select together: a draft's are accepted
      # or not, and alone they would select as each does here.
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
  """Slots of each shard for contexts of these lengths, of each row.

  `tile`: each context begins at a multiple of so many slots.
  """
  tiles = lambda n: math.ceil(math.ceil(n / shards) / tile)
  most = max(sum(map(tiles, row)) for row in lengths)
  return few_sizes(max(1, most)) * tile


def placed(
  spec: KVCache, rows: Sequence[Sequence[PlacedContext]], tile: int = 1
) -> tuple[KVCache, jax.Array]:
  """A cache that holds contexts, and the context of each tile of its slots.

  Args:
    spec: shapes, dtypes and shardings of the cache (`init_cache_spec`), with
      `slots_for` slots on each shard.
    rows: the contexts of each row.
    tile: each context begins at a multiple of so many slots of a shard.

  Returns:
    the cache, and int32 [B, n], the number of a tile's context in its row, or
    -1.
  """
  shards, local = spec.shards, spec.held.local
  host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.slots)
  parts = tuple(spec.unfilled(kind, x) for kind, x in enumerate(host))
  pos: Any = np.zeros(spec.at.pos.shape, np.int32)
  seg: Any = np.zeros_like(pos)
  used = np.zeros(spec.held.used.shape, np.int32)
  owner = np.full((spec.batch, spec.capacity // tile), -1, np.int32)
  for row, contexts in enumerate(rows):
    first = 0
    for number, context in enumerate(contexts):
      count = context.pos.size
      each = -(-count // shards)
      # Which slot each token gets: a part of the context on each shard.
      shard, slot = np.divmod(np.arange(count), each)
      into = shard * local + first + slot
      pos[row, into], seg[row, into] = context.pos, 1
      owner[row, into // tile] = number
      jax.tree.map(
        lambda x, new, into=into, row=row: _put(x, np.asarray(new), row, into),
        parts,
        context.blocks.parts,
      )
      first += -(-each // tile) * tile
    used[row] = first
  blank: Any = spec.held
  held = dataclasses.replace(
    blank, at=Coords(pos, seg), used=used, before=used.copy()
  )
  made = dataclasses.replace(spec, slots=host, held=held, constants=())
  like = dataclasses.replace(spec, constants=())
  made = jax.tree.map(_on_devices, made, like)
  constants = filled_constants(spec.shapes, spec.kind, spec.constants)
  tiles = jax.ShapeDtypeStruct(owner.shape, owner.dtype)
  if spec.mesh is not None:
    # As the slots, each tile where its slots are.
    lies = spec.at.pos.sharding
    tiles = jax.ShapeDtypeStruct(owner.shape, owner.dtype, sharding=lies)
  return (
    dataclasses.replace(made, constants=constants),
    _on_devices(owner, tiles),
  )


def exported(
  cache: KVCache, spans: Sequence[tuple[int, int, int]]
) -> list[Blocks]:
  """Tokens of rows of a cache, in arrays of the host; see `KVCache.export`.

  Args:
    cache: of one process.
    spans: row, first position and the position behind the last.

  Raises:
    OptionError: a cache that is spread over several processes.
  """
  leaves = jax.tree.leaves(cache.slots)
  if not all(x.is_fully_addressable for x in leaves):
    raise OptionError(
      "contexts",
      "a cache that is spread over several processes",
      "the devices of one process",
      "encode contexts in each process, or pass combine='full'",
    )
  at, slots = jax.device_get((cache.at, cache.slots))
  slots = tuple(cache.unfilled(kind, x) for kind, x in enumerate(slots))
  found = []
  for row, start, stop in spans:
    index, _ = cache.located(at, row, start, stop)

    def one(x: Any, index: Any = index, row: int = row) -> np.ndarray:
      return np.take(x[:, row], index, token_axis(x) - 1)

    coords = Coords(*(np.asarray(x)[row][index] for x in at))
    found.append(Blocks(coords, jax.tree.map(one, slots), cache.kind))
  return found


def _put(x: Any, new: np.ndarray, row: int, into: np.ndarray) -> None:
  """Writes a context [L, K, n, X] (or [.., X, n]) into slots of a row."""
  if not x.size:
    return
  axis = token_axis(x) - 1
  np.moveaxis(x[:, row], axis, 0)[into] = np.moveaxis(new, axis, 0)


def _on_devices(x: np.ndarray, like: Any) -> jax.Array:
  """An array of the host where `like` says."""
  if like.sharding is None:
    return jnp.asarray(x)
  return jax.make_array_from_callback(
    x.shape, like.sharding, lambda index: x[index]
  )

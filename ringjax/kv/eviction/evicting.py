"""A cache that evicts tokens by a policy, separately for each KV head.

Guarantees: between two evictions it is a cache like any other. An eviction
moves tokens into pages, separate for each row, layer and KV head, and drops
the others; their memory is free at once. Kept tokens are stored bit for bit,
on the same device. Rows are independent.
Cost: an eviction rewrites the pages; the host waits for their number.
Memory: the tokens since the last eviction, as the open cache stores them; the
pages; for policies that score by queries, the newest queries; for those that
look at token ids, a byte for each position.

The newest tokens are in an ordinary cache, the open one, to which calls append.
`evict` is called between calls of the model, outside of jit: `generate` calls
it after each chunk of a prompt and whenever the open cache is full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from ringjax import tree
from ringjax.errors import NotFiniteError, OptionError
from ringjax.kv.base import CacheSpec, zeros
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_rows import placed_as, row_indices
from ringjax.kv.composed.open_cache import ResizableCache
from ringjax.kv.eviction import evicting_changes, row_state
from ringjax.kv.eviction.evictable_layers import (
  check_layers,
  kv_heads,
  pages_spec,
)
from ringjax.kv.eviction.evicting_layer import EvictingLayer, with_paged_sums
from ringjax.kv.eviction.eviction import chosen
from ringjax.kv.eviction.page_sizes import open_slots, page_sizes
from ringjax.kv.eviction.peak_attention import Repeated
from ringjax.kv.eviction.recorded_queries import Noted, QueryWatch
from ringjax.kv.eviction.repacking import grown, repacked
from ringjax.kv.layer_spec import (
  LayerCacheSpec,
  by_model_layer,
  constants_spec,
  filled_constants,
  model_layers,
)
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.policies import Policy
from ringjax.kv.storage import changes
from ringjax.kv.storage.pages import Pages, Places, host
from ringjax.ops.mask import Coords
from ringjax.parallel.local_arrays import move
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.kv.storage.exported_blocks import Blocks


class Eviction(NamedTuple):
  """Choice of the tokens that stay, for `EvictingCache.apply`.

  Fields:
    policy: Policy that chose them, as the static argument of programs.
    rows: Rows to evict from, bool [B].
    keep: Tokens that stay, see `chosen`.
    masses: Sums of column masses, see `chosen`.
    sizes: Pages of memory, and of a table, for each kind of layer.
    local: Slots of a shard of the open cache.
    segments: Whether tokens may have other segments than 1.
  """

  policy: Policy | None
  rows: jax.Array
  keep: dict[int, Any]
  masses: dict[int, Any]
  sizes: tuple[tuple[int, int], ...]
  local: int
  segments: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictingCache(ResizableCache):
  """Pages of kept tokens, and an open cache of the newest.

  Attributes:
    open: Open cache of the newest tokens and of those that stay exact.
    pages: For each kind of layer its pages; None for recurrent layers and for
      ring buffers, which never evict.
    noted: For each kind of layer the statistics recorded of its queries.
    watch: Coordinates of the recorded queries.
    ends: The position after each row's last token at its last eviction,
      int32 [B].
    stayed: Number of tokens that a row's last eviction left open, int32 [B].
    constants: For each kind of layer its codec constants, [L, K, n].
    marks: Whether the token at a position has an id of `Policy.marks`, bool
      [B, `limit`]; None if the policy uses no ids.
    kind: Cache kind, including the policy.
    limit: Maximum number of tokens in a row.
    places: Mesh axes that shard the cache.
  """

  pages: tuple[Pages | None, ...]
  noted: tuple[Noted, ...]
  watch: QueryWatch
  ends: Int[ArrayLeaf, " B"]
  stayed: Int[ArrayLeaf, " B"]
  constants: tuple[Any, ...]
  marks: Bool[ArrayLeaf, "B P"] | None
  places: Places
  older: ClassVar[str] = "ends"
  layer_fields: ClassVar[tuple[str, ...]] = ("noted",)
  tables: ClassVar[tuple[str, ...]] = ("watch",)
  call_fields: ClassVar[tuple[str, ...]] = ("noted", "watch", "marks")
  # Pages aside, which rows share.
  row_axes: ClassVar[Mapping[str, int]] = {
    "noted": 1,
    "watch": 0,
    "ends": 0,
    "stayed": 0,
    "marks": 0,
  }

  # -------------------------------------------------------------------------
  # Making one
  # -------------------------------------------------------------------------

  @classmethod
  def spec(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheConfig,
    **where: Any,
  ) -> EvictingCache:
    """Specs of an empty cache, as `KVCache.spec`.

    Raises:
      OptionError: If the policy does not support a layer, or as `KVCache.spec`.
    """
    open_cache = KVCache.spec(
      shapes, batch, capacity, dtype, kind=kind.opened(), **where
    )
    room = CacheSpec.of(batch, capacity, dtype, kind.codec, **where)
    check_layers(shapes, kind, room)
    window, moments = kind.noted(capacity)
    watch = QueryWatch.spec(room, window, moments)
    noted = []
    for n, shape in enumerate(shapes):
      ring = open_cache._ring(n) is not None
      if ring or not isinstance(shape, LayerCacheSpec) or not shape.reading:
        noted.append(Noted())
        continue
      heads = shape.heads * shape.reading.groups
      sums = kind.policy is not None and kind.policy.sums
      chooses = kind.policy is not None and kind.policy.choices
      noted.append(
        watch.noted_spec(
          room,
          shape.layers,
          heads,
          shape.key,
          shape.heads if sums else 0,
          shape.heads if chooses else 0,
        )
      )
    return cls(
      open=open_cache,
      pages=tuple(
        pages_spec(shape, room, kind) if open_cache._ring(n) is None else None
        for n, shape in enumerate(shapes)
      ),
      noted=tuple(noted),
      watch=watch,
      ends=room.like((batch,), jnp.int32, (None,)),
      stayed=room.like((batch,), jnp.int32, (None,)),
      constants=tuple(constants_spec(s, kind, room) for s in shapes),
      marks=room.like((batch, capacity), jnp.bool_, (None, None))
      if kind.policy is not None and kind.policy.marks
      else None,
      kind=kind,
      limit=capacity,
      places=Places.of(room, kv_heads(shapes)),
    )

  def allocated(self, files: CacheFiles | None = None) -> EvictingCache:
    fields = {name: zeros(getattr(self, name)) for name in self.row_axes}
    return dataclasses.replace(
      self,
      open=self.open.allocated(files),
      pages=tuple(x and x.emptied() for x in self.pages),
      constants=filled_constants(self.shapes, self.kind, self.constants),
      **fields,
    )

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  def positions(self, row: int) -> list[list[Int[np.ndarray, " _"]] | None]:
    """Positions of a row's tokens that each head of each layer holds.

    Returns:
      For each layer of the model, sorted positions int [n] of each KV head;
      None for recurrent layers and ring buffers.
    """
    row = int(row_indices([row], self.batch)[0])
    pos, seg = (host(x)[row] for x in self.open.at)
    newest = pos[seg > 0]

    def of_kind(pages: Pages | None) -> list[list[np.ndarray]] | None:
      if pages is None:
        return None
      pos, seg = (host(x)[:, row] for x in pages.read_coords())
      return [
        [
          np.sort(np.concatenate([head_pos[head_seg > 0], newest]))
          for head_pos, head_seg in zip(*layer, strict=True)
        ]
        for layer in zip(pos, seg, strict=True)
      ]

    return by_model_layer(self.shapes, list(map(of_kind, self.pages)))

  def tokens(self) -> list[Int[np.ndarray, "_ B K"] | None]:
    """Number of tokens per KV head, int [L, B, K] for each kind of layer.

    None for recurrent layers and ring buffers.
    """
    newest = host(jnp.sum(self.open.at.seg > 0, 1))

    def count_tokens(pages: Pages | None) -> np.ndarray | None:
      if pages is None:
        return None
      paged_tokens = host(pages.counts()).sum(3)
      return paged_tokens + newest[None, :, None]

    return [count_tokens(pages) for pages in self.pages]

  def choices(self, row: int) -> list[list[str] | None]:
    """Names of the policy's choices for the heads of a row, see `FastGen`.

    Returns:
      For each layer of the model, the choice of each KV head at the last
      eviction; None for layers without.
    """
    names = () if self.kind.policy is None else self.kind.policy.choices
    row = int(row_indices([row], self.batch)[0])

    def of_kind(noted: Noted) -> list[list[str] | None] | None:
      if noted.choice is None:
        return None
      by_layer = host(noted.choice)[:, row].tolist()
      return [
        [names[n - 1] for n in numbers] if all(numbers) else None
        for numbers in by_layer
      ]

    return by_model_layer(self.shapes, list(map(of_kind, self.noted)))

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of tokens that still fit, int [B, R]; None under a trace."""
    if isinstance(self.ends, jax.core.Tracer):
      return None
    remaining = self.limit - host(row_state.lengths(self))
    return np.repeat(remaining[:, None] // self.shards, self.shards, 1)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self,
    at: Coords,
    *,
    replicated: bool,
    sees: bool,
    tokens: Int[Array, "B T"] | None = None,
  ) -> EvictingCache:
    open_cache = self.open.allocate(at, replicated=replicated, sees=sees)
    sums = self._sums_prompts and not replicated
    cache = self
    if self._notes_all and not sums:
      cache = self._noting_at_least(open_cache.capacity)
    if not sees:
      cache = cache._noting_at_least(self._whole_window or 0)
    watch = cache.watch.started(
      at, sharded=not replicated, from_empty=not sees, notes=not sums
    )
    pages, ends, stayed = self.pages, self.ends, self.stayed
    noted = cache.noted
    if not sees:
      noted = tuple(x.started() for x in noted)
      empty = lambda x: x and dataclasses.replace(x, table=x.table * 0 - 1)
      pages, ends, stayed = tuple(map(empty, pages)), ends * 0, stayed * 0
    if sums:
      noted = tuple(map(with_paged_sums, noted, pages))
    return dataclasses.replace(
      self,
      open=open_cache,
      noted=noted,
      watch=watch,
      pages=pages,
      ends=ends,
      stayed=stayed,
      marks=self._marked(tokens, at),
    )

  def _marked(
    self, tokens: Int[Array, "B T"] | None, at: Coords
  ) -> Bool[Array, "B P"] | None:
    """Mark the positions of a call's tokens whose ids the policy uses.

    A position has one token: packed documents in a row and drafted trees are
    refused (`Transformer.__call__`), positions from `limit` on count as
    unmarked.
    """
    if self.marks is None:
      return None
    if tokens is None:
      raise OptionError(
        "cache",
        f"a call without token ids, with the policy {self.kind.policy}",
        "a policy that looks at no ids",
        "leave punctuation= out",
      )
    assert self.kind.policy is not None
    ids = self.kind.policy.marks
    marked_ids = np.zeros(max(ids) + 2, bool)
    marked_ids[list(ids)] = True
    marked = jnp.asarray(marked_ids)[jnp.clip(tokens, 0, marked_ids.size - 1)]
    pos, seg = (jnp.broadcast_to(x, tokens.shape) for x in at)
    # Overwrites marks of rejected tokens at these positions.
    into = jnp.where(seg > 0, pos, self.limit)
    rows = jnp.arange(self.batch, dtype=jnp.int32)[:, None]
    marks = self.marks.at[rows, into].set(marked, mode="drop")
    return self.open.held._everywhere(marks)

  def layer(self, kind: int, slots: PyTree, index: Index) -> EvictingLayer:
    inner, noted = slots
    return EvictingLayer(
      self, self.open.layer(kind, inner, index), noted, index, kind
    )

  # -------------------------------------------------------------------------
  # Evicting
  # -------------------------------------------------------------------------

  def limited(self, limit: int) -> EvictingCache:
    """Return the cache with another maximum length of rows, `limit`."""
    cache = dataclasses.replace(self, limit=limit)
    if self.marks is None:
      return cache
    added = max(0, limit - self.limit)
    marks = jnp.pad(self.marks[:, :limit], ((0, 0), (0, added)))
    return self._placed(dataclasses.replace(cache, marks=marks))

  def _evicted(
    self,
    repeated: Repeated | None,
    rows: Bool[np.ndarray, " B"] | None,
    ended: Bool[np.ndarray, " B"] | None,
  ) -> EvictingCache:
    """Drop the tokens that the policy does not keep; see `ModelCache.evict`."""
    if self.kind.repeats and repeated is None:
      raise OptionError(
        "repeated",
        f"None, for the policy {self.kind.policy}",
        "what a repetition of the context by the model has found",
        "call rj.infer.evict_by_repetition(model, cache, tokens); "
        "rj.infer.generate does so by itself",
      )
    cache, eviction = self._choose(self.kind.policy, repeated, rows, ended)
    return cache.apply(eviction)

  def choose(
    self,
    rows: Bool[np.ndarray, " B"] | None = None,
    ended: Bool[np.ndarray, " B"] | None = None,
  ) -> tuple[EvictingCache, Eviction | None]:
    """Choose what `flush` keeps, without dropping other tokens yet.

    `cache, eviction = cache.choose(rows, ended)`, then `cache.apply(eviction)`
    releases queries that are not needed any more before pages are allocated.
    The arguments are those of `evict`.

    Returns:
      The cache, and the choice; None if there is nothing to evict.
    """
    policy = None if self.kind.repeats else self.kind.policy
    return self._choose(policy, None, rows, ended)

  def _choose(
    self,
    policy: Policy | None,
    repeated: Repeated | None,
    rows: Bool[np.ndarray, " B"] | None,
    ended: Bool[np.ndarray, " B"] | None,
  ) -> tuple[EvictingCache, Eviction | None]:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
      raise OptionError(
        "cache",
        "evict inside of jit",
        "a call between calls of the model: how much stays decides shapes",
        "evict outside of jit; rj.infer.generate does so by itself",
      )
    cache = self._settled()
    lengths, fresh, num_queries = map(host, row_state.state_of_rows(cache))
    evicted_rows = fresh if repeated is None else np.asarray(repeated.rows)
    if rows is not None:
      evicted_rows = evicted_rows & rows
    if not evicted_rows.any():
      return cache, None
    evicts = jnp.asarray(evicted_rows)
    heads, counts = self._competing(), []
    for shape, pages in zip(self.shapes, self.pages, strict=True):
      if pages is None or policy is None:
        counts.append(jnp.zeros((shape.layers, self.batch), jnp.int32))
        continue
      counts_by_row = np.asarray(
        [self.kind.counts(int(n), heads) for n in lengths]
      )
      by_layer = counts_by_row.astype(np.int32)[:, list(shape.which)].T
      counts.append(jnp.asarray(by_layer))
    # The budget is traced, so that another one does not recompile.
    policy = None if policy is None else policy.traced()
    scores = {} if repeated is None else repeated.scores
    choices = chosen(cache._by(policy), tuple(counts), scores, evicts)
    keep, masses, sizes, stays, wrong, segments, choice = choices
    self._check_scores(host(wrong))
    local = open_slots(self.kind, int(host(stays).max(initial=0)), self.shards)
    needs: dict[int, tuple[int, ...]] = {
      n: tuple(map(int, host(x).max(0))) for n, x in sizes.items()
    }
    # After a repetition no spare pages: it evicts only once per prompt.
    continues = repeated is None and host(self.ends).any()
    grows = int(lengths.max()) if continues else None
    shape = page_sizes(self.pages, needs, grows)
    has_segments = bool(host(segments))
    noted = list(cache.noted)
    for n, numbers in choice.items():
      noted[n] = noted[n]._replace(choice=numbers)
    cache = dataclasses.replace(cache, noted=tuple(noted))
    if ended is not None and choice:
      enough = num_queries >= (self._whole_window or 0)
      cache = cache._fixing(evicted_rows & ended & enough)
    eviction = Eviction(
      policy, evicts, keep, masses, shape, local, has_segments
    )
    return cache, eviction

  def apply(self, eviction: Eviction | None) -> EvictingCache:
    """Drop the tokens that `choose` has not chosen; move others into pages."""
    if eviction is None:
      return self.with_room(self.kind.exact.room)
    policy, rows, *parts = eviction
    keep, masses, *sizes = parts
    cache_after = repacked(self._by(policy), keep, masses, rows, *sizes)
    return dataclasses.replace(cache_after, kind=self.kind)

  def _by(self, policy: Policy | None) -> EvictingCache:
    """Return the cache with another policy."""
    kind = dataclasses.replace(self.kind, policy=policy)
    return dataclasses.replace(self, kind=kind)

  def _fixing(self, rows: Bool[np.ndarray, " B"]) -> EvictingCache:
    """Fix the choices of rows; release queries that no row needs any more."""
    if not rows.any():
      return self
    noted = row_state.with_fixed(self.noted, rows)
    return self._placed(dataclasses.replace(self, noted=noted))._settled()

  def _check_scores(self, wrong: np.ndarray) -> None:
    """Refuse scores that are NaN or -inf for all tokens.

    Args:
      wrong: Error flags of each row, bool [B, 2], see `chosen`.
    """
    for got, rows in zip(
      ("scores of NaN", "-inf for all tokens of a head"), wrong.T, strict=True
    ):
      if rows.any():
        raise NotFiniteError(
          f"policy {self.kind.policy}",
          f"{got}, in row {int(rows.argmax())}",
          "a score that is a number for some token of each head, NaN for none",
          "mend scores() of the policy; no token was dropped from the cache",
        )

  def _competing(self) -> list[int]:
    """Number of KV heads under the policy, for each layer of the model."""
    heads_by_layer = [0] * model_layers(self.shapes)
    for n, shape_spec in enumerate(self.shapes):
      if self.pages[n] is not None and not self.windowed(n):
        for layer in shape_spec.which:
          heads_by_layer[layer] = shape_spec.heads
    return heads_by_layer

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def changed(self, change: changes.CacheChange) -> EvictingCache:
    """Return the cache after a change between calls; see `ModelCache.changed`.

    Evicted tokens do not come back. Queries of dropped tokens are dropped;
    those that they displaced are lost, too, see `with_slack`. Sums over all
    queries still include them, see `irreversible`. Rows that are taken twice
    share pages; open caches are brought to one size to insert rows.

    Raises:
      OptionError: If rows of a sharded batch are taken: pages stay on the
        devices of their rows.
    """
    if isinstance(change, changes.InsertRows):
      this, that = evicting_changes.of_one_size(self, change.source)
      changed = super(EvictingCache, this).changed(
        changes.InsertRows(change.rows, that)
      )
      return evicting_changes.inserted(this, changed, change.rows, that)
    match change:
      case changes.Evict(repeated, rows, ended):
        return self._evicted(repeated, rows, ended)
      case changes.Flush(rows):
        cache, eviction = self.choose(rows)
        return cache.apply(eviction)
      case changes.RecordMore(queries):
        window = self._window
        if window is None or self._noted_now == window + queries:
          return self
        return row_state.noting(self, window + queries)
      case changes.LoadBlocks(_, blocks, _):
        self._refuse_unmarked()
        roomy = self.with_room(blocks.at.pos.shape[0])
        return super(EvictingCache, roomy).changed(change)
    cache = super().changed(change)
    match change:
      case changes.Truncate(end, _):
        return evicting_changes.truncated(self, cache.open, end)
      case changes.KeepTokens() | changes.KeepFirst():
        watch = self.watch.keep_queries(change.keep_mask)
        return dataclasses.replace(cache, watch=watch)
      case changes.ResetRows(rows):
        return evicting_changes.emptied(self, cache.open, rows)
      case changes.TakeRows(rows):
        pages = evicting_changes.taken_pages(self, rows)
        return dataclasses.replace(cache, pages=pages)
    return cache

  def _settled(self) -> EvictingCache:
    """Sort the recorded queries into the order in which they came."""
    if self.watch.at is None:
      return self
    return row_state.noting(self, self._window or self._noted_now)

  @property
  def _notes_all(self) -> bool:
    """Whether all queries since the last eviction are recorded."""
    policy = self.kind.policy
    return policy is not None and policy.queries is None

  @property
  def _sums_prompts(self) -> bool:
    policy = self.kind.policy
    return policy is not None and policy.sums_prompts

  @property
  def _noted_now(self) -> int:
    return 0 if self.watch.at is None else self.watch.at.pos.shape[1]

  @property
  def _whole_window(self) -> int | None:
    """Number of queries by which heads choose; None for all, or for none."""
    policy = self.kind.policy
    if self.watch.at is None or policy is None or policy.queries is None:
      return None
    return self.kind.noted(self.limit)[0]

  @property
  def _window(self) -> int | None:
    """Number of queries that the policy uses now; None for all, or for none.

    Fewer once the choices of all rows are fixed.
    """
    window, policy = self._whole_window, self.kind.policy
    few = None if policy is None else policy.fixed_queries
    if window is None or few is None or few >= window:
      return window
    if isinstance(self.ends, jax.core.Tracer):
      return window
    fixed = row_state.fixed_everywhere(self)
    return few if fixed is not None and host(fixed).all() else window

  def with_few_queries(self) -> EvictingCache:
    """Return a cache for as many queries as are used with fixed choices."""
    assert self.kind.policy is not None
    return row_state.noting(self, self.kind.policy.fixed_queries)

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """Copy out a row's tokens; refused after an eviction.

    Raises:
      OptionError: If tokens were evicted: heads then hold different ones.
    """
    if host(self.ends).any():
      raise OptionError(
        "cache",
        f"export from one with the policy {self.kind.policy}",
        "a cache that holds all tokens of a row",
        "export before the first eviction, or make one without a policy",
      )
    return super().export(row, start, stop)

  def gathered(self, device: jax.Device) -> EvictingCache:
    """Copy the cache to one device."""
    to_device = lambda x: jax.tree.map(lambda y: move(y, device), x)
    _, slots = self.open.held.gathered(device)
    noted = self.with_scores(lambda x: slots(x[..., None])[..., 0])
    return dataclasses.replace(
      self,
      open=self.open.gathered(device),
      pages=tuple(x and x.gathered(device) for x in self.pages),
      noted=to_device(noted),
      watch=dataclasses.replace(to_device(self.watch), mesh=None, axis=None),
      ends=to_device(self.ends),
      stayed=to_device(self.stayed),
      constants=to_device(self.constants),
      marks=to_device(self.marks),
      places=Places(),
    )

  def _refuse_unmarked(self) -> None:
    """Refuse exported tokens, which have no ids, if the policy uses ids."""
    if self.marks is not None:
      raise OptionError(
        "cache",
        f"load into one with the policy {self.kind.policy}",
        "a policy that looks at no ids: exported tokens have none",
        "read the tokens by a call of the model, or leave punctuation= out",
      )

  def _placed(self, made: EvictingCache) -> EvictingCache:
    """Put coordinates and recorded queries on the shardings of the old ones."""
    pages = tuple(
      None
      if new is None or old is None
      else new.with_table(placed_as(new.table, old.table))
      for new, old in zip(made.pages, self.pages, strict=True)
    )
    fields = {
      name: placed_as(getattr(made, name), getattr(self, name))
      for name in self.row_axes
    }
    return dataclasses.replace(made, pages=pages, **fields)

  def with_scores(self, f: Callable[[Any], Any]) -> tuple[Noted, ...]:
    """Apply `f` to the recorded sums of the open slots, [L, B, K, S]."""
    return tuple(
      x if x.score is None else x._replace(score=f(x.score)) for x in self.noted
    )

  def _noting_at_least(self, window: int) -> EvictingCache:
    """Make room to record at least `window` queries."""
    return row_state.noting(self, window) if window > self._noted_now else self

  def _sized(self, local: int) -> EvictingCache:
    if local == self.open.held.local:
      return self
    return grown(self, local)

  def windowed(self, kind: int) -> bool:
    """Whether layers of a kind have an attention window, which they keep."""
    return self.shapes[kind].reach is not None


tree.register(
  EvictingCache,
  ("open", "pages", "noted", "watch", "ends", "stayed", "constants", "marks"),
  ("kind", "limit", "places"),
)

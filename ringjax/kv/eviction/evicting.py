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
import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
from ringjax.kv.composed.open_cache import ResizableCache, WithOpenLayer
from ringjax.kv.eviction.eviction import (
  chosen,
  fixed_rows,
  grown,
  page_view,
  repacked,
  summed,
)
from ringjax.kv.eviction.peak_attention import Repeated
from ringjax.kv.eviction.recorded_queries import Noted, QueryWatch
from ringjax.kv.layer_spec import (
  LayerCacheSpec,
  by_model_layer,
  constants_spec,
  filled_constants,
  model_layers,
)
from ringjax.kv.model_cache import ModelCache, refuse_unseen
from ringjax.kv.offload.cache_files import CacheFiles
from ringjax.kv.policies import Policy
from ringjax.kv.state import StateShape
from ringjax.kv.storage.changes import (
  CacheChange,
  InsertRows,
  KeepFirst,
  KeepTokens,
  ResetRows,
  TakeRows,
  Truncate,
)
from ringjax.kv.storage.pages import (
  Pages,
  Places,
  few_sizes,
  host,
  joined,
)
from ringjax.kv.storage.slots import FILL, REPLICATED
from ringjax.ops.attention.cached.views import (
  KVView,
)
from ringjax.ops.mask import Causal, Coords
from ringjax.parallel.local_arrays import move
from ringjax.parallel.programs import bounded
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
    _check(shapes, kind, room)
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
        _pages_spec(shape, room, kind) if open_cache._ring(n) is None else None
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
      places=Places.of(room, _kv_heads(shapes)),
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

  @property
  def slots(self) -> tuple[Any, ...]:
    return tuple(zip(self.open.slots, self.noted, strict=True))

  @property
  def length(self) -> Int[Array, " B"]:
    """int32 [B], the position after each row's last token; 0 if empty."""
    return jnp.maximum(self.open.length, self.ends)

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
    remaining = self.limit - host(_lengths(self))
    return np.repeat(remaining[:, None] // self.shards, self.shards, 1)

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    if not isinstance(self.ends, jax.core.Tracer):
      refuse_unseen(sees, int(host(self.ends).max(initial=0)))
    super().check(batch, tokens, replicated=replicated, sees=sees)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self, at: Coords, *, replicated: bool, sees: bool
  ) -> EvictingCache:
    open_cache = self.open.allocate(at, replicated=replicated, sees=sees)
    sums = self._sums_prompts and not replicated
    cache = self
    if self._notes_all and not sums:
      cache = self._noting_at_least(open_cache.capacity)
    if not sees:
      cache = cache._noting_at_least(self._whole_window or 0)
    watch = cache.watch.started(
      at, sharded=not replicated, anew=not sees, notes=not sums
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
    )

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> EvictingCache:
    """Mark the positions of a call's tokens whose ids the policy uses.

    A position has one token: packed documents in a row and drafted trees are
    refused (`Transformer.__call__`), positions from `limit` on count as
    unmarked.
    """
    if self.marks is None:
      return self
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
    return dataclasses.replace(self, marks=self.open.held._everywhere(marks))

  def layer(self, kind: int, slots: PyTree, index: Index) -> EvictingLayer:
    inner, noted = slots
    return EvictingLayer(
      self, self.open.layer(kind, inner, index), noted, index, kind
    )

  def updated(self, slots: tuple[Any, ...]) -> EvictingCache:
    inner, noted = zip(*slots, strict=True)
    return dataclasses.replace(
      self,
      open=self.open.updated(inner),
      noted=noted,
      watch=self.watch.ended(),
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

  def evict(
    self,
    repeated: Repeated | None = None,
    rows: Bool[np.ndarray, " B"] | None = None,
    ended: Bool[np.ndarray, " B"] | None = None,
  ) -> EvictingCache:
    """Drop the tokens that the policy does not keep; move others into pages.

    Call it between calls of the model, outside of jit. Rows without new tokens
    since their last eviction do not change.

    Args:
      repeated: Scores by a repetition of the context, for policies that need
        it; `rj.infer.evict_by_repetition` computes them and evicts.
      rows: Rows to evict from, bool [B]; the others do not change.
        Default: all.
      ended: Rows whose prompt has been read, bool [B]: of a policy with choices
        (`FastGen`) their heads keep what they choose now, if all queries that
        the policy looks at are recorded. Default: none.

    Raises:
      OptionError: If called under a trace, where memory can't shrink; or if
        the policy needs `repeated` and it is None.
      NotFiniteError: If scores are NaN, or -inf for all tokens of a head; no
        token is dropped.
    """
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

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> EvictingCache:
    """Make room in the open cache by `evict`.

    With a policy that repeats the context, all tokens are kept.
    """
    cache, eviction = self.choose(rows)
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
    lengths, fresh, num_queries = map(host, _state_of_rows(cache))
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
    noted = _with_fixed(self.noted, rows)
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

  def changed(self, change: CacheChange) -> EvictingCache:
    """Return the cache after a change between calls; see `ModelCache.changed`.

    Evicted tokens do not come back. Queries of dropped tokens are dropped;
    those that they displaced are lost, too, see `with_slack`. Sums over all
    queries still include them, see `irreversible`. Rows that are taken twice
    share pages; open caches are brought to one size to insert rows.

    Raises:
      OptionError: If rows of a sharded batch are taken: pages stay on the
        devices of their rows.
    """
    match change:
      case Truncate(end, _):
        return self._truncated(super().changed(change).open, end)
      case KeepTokens() | KeepFirst():
        cache = super().changed(change)
        return dataclasses.replace(
          cache, watch=self.watch.kept(change.keep_mask)
        )
      case ResetRows(rows):
        return self._emptied(super().changed(change).open, rows)
      case TakeRows(rows):
        pages = self._taken_pages(rows)
        return dataclasses.replace(super().changed(change), pages=pages)
      case InsertRows(rows, other):
        return self._inserted(rows, other)

  def _truncated(
    self, open_cache: KVCache, end: Int[Array, " B"]
  ) -> EvictingCache:
    """Drop positions from `end` on of all but the open cache."""
    gone = lambda pos: pos >= end[None, :, None, None, None]
    # New tokens will use the freed slots, so their sums restart at 0.
    real = (open_cache.at.seg > 0)[None, :, None]
    has_tokens = (end > 0)[None, :, None]
    return dataclasses.replace(
      self,
      open=open_cache,
      noted=tuple(
        x if x.fixed is None else x._replace(fixed=x.fixed & has_tokens)
        for x in self.with_scores(lambda x: jnp.where(real, x, 0))
      ),
      pages=tuple(x and x.without(gone) for x in self.pages),
      watch=self.watch.truncated(end),
      ends=jnp.minimum(self.ends, end),
      stayed=jnp.minimum(self.stayed, open_cache.held.tokens()),
    )

  @property
  def irreversible(self) -> bool:
    return self.open.irreversible or self.watch.count is not None

  def with_slack(self, tokens: int) -> EvictingCache:
    """Record `tokens` more queries than the policy looks at.

    Then up to that many tokens of a call can be taken back without a trace;
    `flush` and `evict` drop the additional records.
    """
    window = self._window
    if window is None or self._noted_now == window + tokens:
      return self
    return _noting(self, window + tokens)

  def _settled(self) -> EvictingCache:
    """Sort the recorded queries into the order in which they came."""
    if self.watch.at is None:
      return self
    return _noting(self, self._window or self._noted_now)

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
    fixed = _fixed_everywhere(self)
    return few if fixed is not None and host(fixed).all() else window

  def with_few_queries(self) -> EvictingCache:
    """Return a cache for as many queries as are used with fixed choices."""
    assert self.kind.policy is not None
    return _noting(self, self.kind.policy.fixed_queries)

  def _emptied(
    self, open_cache: KVCache, rows: Int[np.ndarray, " n"]
  ) -> EvictingCache:
    """Empty rows of all but the open cache."""
    index = jnp.asarray(rows)
    gone = jnp.zeros((self.batch,), bool).at[index].set(True)
    empty = lambda x: (
      x and x.with_table(jnp.where(gone[None, :, None, None], -1, x.table))
    )
    # Rows that begin anew may need more queries than those that stay.
    cache = self._noting_at_least(self._whole_window or 0)
    watch = cache.watch.truncated(jnp.where(gone, 0, np.iinfo(np.int32).max))
    if watch.count is not None:
      watch = dataclasses.replace(watch, count=jnp.where(gone, 0, watch.count))
    clear = lambda x: jnp.where(
      gone.reshape(1, -1, *(1,) * (x.ndim - 2)), jnp.zeros((), x.dtype), x
    )
    return self._placed(
      dataclasses.replace(
        self,
        open=open_cache,
        pages=tuple(map(empty, self.pages)),
        noted=jax.tree.map(clear, cache.noted),
        watch=watch,
        ends=jnp.where(gone, 0, self.ends),
        stayed=jnp.where(gone, 0, self.stayed),
        marks=self.marks if self.marks is None else self.marks & ~gone[:, None],
      )
    )

  def _inserted(
    self, rows: Int[np.ndarray, " n"], other: ModelCache
  ) -> EvictingCache:
    """Replace rows, after bringing the open caches to the same size."""
    this, that = self.with_slack(0)._same_size(other.with_slack(0))
    num_queries = max(this._noted_now, that._noted_now)
    this, that = (
      x._without_paged_sums()._noting_at_least(num_queries)
      for x in (this, that)
    )
    changed = super(EvictingCache, this).changed(InsertRows(rows, that))
    pairs = zip(this.pages, that.pages, strict=True)
    pages = tuple(
      None if x is None or y is None else joined(x, y, rows) for x, y in pairs
    )
    return this._placed(dataclasses.replace(changed, pages=pages))

  def _without_paged_sums(self) -> EvictingCache:
    """Drop paged sums; refused if a prompt has read pages since an eviction."""
    if all(x.paged is None for x in self.noted):
      return self
    if host(self.ends).any():
      raise OptionError(
        "cache",
        f"insert with the policy {self.kind.policy}, between a prompt that saw "
        "pages and its eviction",
        "a cache that was evicted behind its prompt",
        "call evict() or flush() before insert",
      )
    noted = tuple(x._replace(paged=None) for x in self.noted)
    return dataclasses.replace(self, noted=noted)

  def _taken_pages(self, rows: Int[Array, " _"]) -> tuple[Pages | None, ...]:
    """Pages of these rows, which share them with the rows of this cache."""
    if any(x is not None and x.places.batch for x in self.pages):
      raise OptionError(
        "cache",
        "take of rows that are sharded over the mesh",
        "a mesh that shards the sequence alone",
        "make the cache with a batch that does not divide over the data axis",
      )
    index = jnp.asarray(rows, jnp.int32)
    return tuple(x and x.take(index) for x in self.pages)

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

  def load(
    self, row: int, blocks: PyTree, at: Coords | None = None
  ) -> EvictingCache:
    """Append exported tokens to a row; see `ModelCache.load`.

    Raises:
      OptionError: If the policy uses token ids, which blocks lack, or as
        `ModelCache.load` does.
    """
    if self.marks is not None:
      raise OptionError(
        "cache",
        f"load into one with the policy {self.kind.policy}",
        "a policy that looks at no ids: exported tokens have none",
        "read the tokens by a call of the model, or leave punctuation= out",
      )
    cache = self.with_room(int(blocks.at.pos.shape[0]))
    return super(EvictingCache, cache).load(row, blocks, at)

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
    return _noting(self, window) if window > self._noted_now else self

  def _sized(self, local: int) -> EvictingCache:
    if local == self.open.held.local:
      return self
    return grown(self, local)

  def with_moved_positions(self, pages: Pages) -> Pages:
    """Pages with the first tokens moved next to the others, see `Policy.moves`.

    Relative attention gives the same result whether all tokens move to their
    cache index or only the first ones move up to the others.
    """
    policy = self.kind.policy
    assert policy is not None
    # All heads of all layers keep the same tokens.
    pos, table = pages.pos[0], pages.table[0, :, 0]
    by_page = pos.reshape(*table.shape, pages.slots) >= 0
    num_kept = jnp.sum(
      by_page & (table >= 0)[..., None], (1, 2), dtype=jnp.int32
    )
    gone = self.ends - num_kept - self.stayed
    first = (pos >= 0) & (pos < policy.moves)
    moved = jnp.where(first, pos + gone[:, None], pos)
    return dataclasses.replace(pages, pos=moved[None])

  def windowed(self, kind: int) -> bool:
    """Whether layers of a kind have an attention window, which they keep."""
    return self.shapes[kind].reach is not None


tree.register(
  EvictingCache,
  ("open", "pages", "noted", "watch", "ends", "stayed", "constants", "marks"),
  ("kind", "limit", "places"),
)


@dataclasses.dataclass(frozen=True)
class EvictingLayer(WithOpenLayer):
  """One layer's part of an `EvictingCache` during one call."""

  cache: EvictingCache
  noted: Noted
  index: Index
  kind: int

  @property
  def slots(self) -> tuple[Any, Noted]:
    return self.inner.slots, self.noted

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> EvictingLayer:
    cache, mode = self.cache, self.cache.open.held.mode
    if self.noted.paged is not None and mode != REPLICATED:
      noted = summed(
        cache, self.kind, self.index, self.inner.slots, self.noted, rotated()
      )
    else:
      noted = cache.watch.note(
        self.noted, self.index, rotated, plain, mode == FILL
      )
    return dataclasses.replace(self, noted=noted)

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    views = self.inner.views(apart=apart)
    pages = self.cache.pages[self.kind]
    if pages is None:
      return views
    constants = self.cache.constants[self.kind]
    if self.cache.kind.policy is not None and self.cache.kind.policy.moves:
      pages = self.cache.with_moved_positions(pages)
    view = page_view(
      self.cache,
      self.kind,
      self.index,
      self.inner.rotation,
      pages,
      constants,
      # Prompt tokens read all pages, so that chunking does not matter.
      selects=self.cache.open.held.mode == REPLICATED,
    )
    return (view, *views)

  def recall(self, empty: PyTree) -> PyTree:
    return self.inner.recall(empty)

  def keep(self, state: PyTree) -> EvictingLayer:
    return dataclasses.replace(self, inner=self.inner.keep(state))


def with_paged_sums(noted: Noted, pages: Pages | None) -> Noted:
  """Add zero sums for the slots of pages, unless present."""
  if noted.score is None or noted.paged is not None or pages is None:
    return noted
  *lead, table = pages.table.shape
  shape = (*lead, table * pages.slots)
  return noted._replace(paged=jnp.zeros(shape, jnp.float32))


@bounded
@functools.partial(jax.jit, static_argnums=1)
def _noting(cache: EvictingCache, window: int) -> EvictingCache:
  """Resize the records to `window` queries, keeping the newest."""
  watch, noted = cache.watch, cache.noted
  assert watch.at is not None
  if window > watch.at.pos.shape[1]:
    watch = watch.widened(window)
    noted = tuple(x.widened(window) for x in noted)
  order = watch.order(window)
  return dataclasses.replace(
    cache,
    watch=watch.ordered(order),
    noted=tuple(x.ordered(order) for x in noted),
  )


@bounded
@jax.jit
def _lengths(cache: EvictingCache) -> jax.Array:
  return cache.open.held._everywhere(cache.length)


@bounded
@jax.jit
def _state_of_rows(
  cache: EvictingCache,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """State of each row before an eviction.

  Returns:
    Its length, whether it got tokens since its eviction, and how many of its
    queries are recorded.
  """
  slot_table, at = cache.open.held, cache.watch.at
  came = slot_table.tokens() > cache.stayed
  num_queries = jnp.zeros((cache.batch,), jnp.int32)
  if at is not None:
    num_queries = jnp.sum(at.seg > 0, 1, dtype=jnp.int32)
  length, came, num_queries = map(
    slot_table._everywhere, (cache.length, came, num_queries)
  )
  return length, came, num_queries


@bounded
@jax.jit
def _with_fixed(
  noted: tuple[Noted, ...], rows: Bool[Array, " B"]
) -> tuple[Noted, ...]:
  """Fix the choices of rows."""
  return tuple(
    x if x.fixed is None else x._replace(fixed=x.fixed | rows[None, :, None])
    for x in noted
  )


@bounded
@jax.jit
def _fixed_everywhere(cache: EvictingCache) -> jax.Array | None:
  """`fixed_rows` on all devices."""
  fixed = fixed_rows(cache)
  return None if fixed is None else cache.open.held._everywhere(fixed)


# Number of tokens for which a cache that grows by evictions preallocates pages.
_AHEAD = 64


def open_slots(kind: CacheConfig, stays: int, shards: int) -> int:
  """Return the slots of a shard of the open cache after an eviction.

  They do not depend on how much of a group is left open, so that programs do
  not recompile at each eviction.

  Args:
    kind: Kind of cache.
    stays: Tokens that stay open, the most of a shard.
    shards: Shards of the sequence.
  """
  least_open = kind.exact.first + kind.exact.recent
  if kind.grouped:
    least_open += kind.layout.page - 1
  stays = max(stays, math.ceil(least_open / shards))
  return few_sizes(stays + math.ceil(kind.exact.room / shards))


def first_sizes(count: int, most: int, heads: int) -> tuple[int, int]:
  """Return pages of memory, and of a table, after a first eviction.

  Args:
    count: Pages that all heads need.
    most: Pages that one head needs, the most of them.
    heads: Heads of all rows and layers on a device.
  """
  # At most 1.6 % too many; none if all heads need as many, up to 64. The table
  # of a head is small.
  pages = min(few_sizes(count, 64), heads * few_sizes(most, 64))
  return pages, few_sizes(most, 2)


def page_sizes(
  pages: Sequence[Pages | None],
  needs: Mapping[int, tuple[int, ...]],
  length: int | None,
) -> tuple[tuple[int, int], ...]:
  """Return for how many pages a device has memory, and a head a table.

  A cache that grows keeps what it has while that suffices; then it gets pages
  for `_AHEAD` tokens more, so that few programs are compiled while it grows.

  Args:
    pages: Pages of each kind of layers before the eviction.
    needs: Pages that all heads of a device need and that one needs, by kind.
    length: Tokens of the longest row; None at the first eviction, which leaves
      no memory for more than is there.
  """
  exact, grown_sizes = [(0, 0)] * len(pages), [(0, 0)] * len(pages)
  current, suffices = [(0, 0)] * len(pages), length is not None
  for n, (count, largest) in needs.items():
    old_pages = pages[n]
    assert old_pages is not None
    places, (*lead, table) = old_pages.places, old_pages.table.shape
    devices = 1 if places.mesh is None else places.size(places.axes)
    current[n] = old_pages.k.shape[0] // devices, table // places.shards
    heads = math.ceil(math.prod(lead) * places.shards / devices)
    exact[n] = first_sizes(count, largest, heads)
    if length is None:
      continue
    growth = 1 + _AHEAD / max(1, length)
    # Rounded down: a page that has just begun has room, too.
    grown_count, most = (int(x * growth) for x in (count, largest))
    grown_sizes[n] = (
      min(few_sizes(grown_count), heads * few_sizes(most, 64)),
      few_sizes(most, 2),
    )
    pages_per_head = math.ceil(_AHEAD / old_pages.slots)
    # Memory is released if much was evicted.
    limits = 2 * grown_sizes[n][0] - count, 2 * grown_sizes[n][1] - largest
    limits = (
      max(limits[0], count + 2 * heads * pages_per_head),
      limits[1] + pages_per_head,
    )
    suffices &= (
      count <= current[n][0] <= limits[0]
      and largest <= current[n][1] <= limits[1]
    )
  if length is None:
    return tuple(exact)
  return tuple(current if suffices else grown_sizes)


# ---------------------------------------------------------------------------
# Supported layers
# ---------------------------------------------------------------------------


def _kv_heads(shapes: Sequence[Any]) -> int:
  """Greatest common divisor of the KV heads of all kinds of layers."""
  return math.gcd(*(s.heads for s in shapes if isinstance(s, LayerCacheSpec)))


def _pages_spec(
  shape: LayerCacheSpec | StateShape, room: CacheSpec, kind: CacheConfig
) -> Pages | None:
  """Specs of empty pages; None for recurrent layers."""
  if not isinstance(shape, LayerCacheSpec):
    return None
  places = Places.of(room, shape.heads)
  return Pages.spec(shape, room, kind.layout.page, places, kind.alike)


def _check(shapes: Sequence[Any], kind: CacheConfig, room: CacheSpec) -> None:
  """Refuse layers and meshes that the policy or pages do not support."""
  policy = kind.policy
  if kind.exact.residual is not None and room.shards > 1:
    raise OptionError(
      "residual",
      f"{kind.exact.residual}, over {room.shards} shards of the sequence",
      "one shard: groups that become codes together are of consecutive tokens",
      "leave residual out, or make the mesh without that axis",
    )
  layers = [s for s in shapes if isinstance(s, LayerCacheSpec)]
  if kind.exact.residual is not None and not all(
    layer.value for layer in layers
  ):
    raise OptionError(
      "residual",
      f"{kind.exact.residual}, for a layer whose values are parts of its keys",
      "layers with values of their own, which leave the residual one by one",
      f"write recent={kind.exact.residual} in its place",
    )
  heads = {Places.of(room, s.heads).heads for s in layers}
  over = room.axes.get("heads")
  uneven = over is not None and heads != {(over,)} and room.axes.get("batch")
  if uneven or len(heads) > 1:
    raise OptionError(
      "mesh",
      f"KV heads {sorted({s.heads for s in layers})} that do not all divide "
      f"over {over!r}, for a cache with pages",
      "heads that divide, or a mesh that shards the sequence alone",
      "make the mesh without that axis, or the cache with kind='dense'",
    )
  if policy is not None and policy.moves:
    _check_moves(layers, policy)
  if policy is None or not policy.reads:
    return
  rotates_late = any(s.reading is not None and s.reading.late for s in layers)
  if kind.layout.unrotated and rotates_late:
    raise OptionError(
      "kind",
      f"{policy} over keys that are stored before a rotation and a norm",
      "keys that are stored rotated",
      "leave unrotated out, or use a policy of positions, rj.kv.Sinks",
    )


def _check_moves(layers: Sequence[LayerCacheSpec], policy: Policy) -> None:
  """Refuse layers whose attention depends on more than token distances."""
  for shape in layers:
    reading = shape.reading
    got = None
    if reading is None or shape.reach is not None:
      got = "a layer that looks back a window"
    elif reading.most is not None:
      got = "a layer whose index chooses keys"
    elif reading.mask != Causal():
      got = f"a layer whose queries see {reading.mask}"
    elif reading.rope is not None and reading.rope.scaling.by_length:
      got = "a rotation that depends on the length of the text"
    if got is not None:
      raise OptionError(
        "kind",
        f"{policy} for {got}",
        "layers whose queries see all tokens before them, by their distance",
        "leave positions='cache' out, or use another kind of cache",
      )

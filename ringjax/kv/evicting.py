"""A cache that keeps some tokens: those that a policy chooses, head by head.

Guarantees: between two evictions it is a cache like any other. An eviction
moves tokens into pages, which each KV head of each layer and row has of its
own, and drops the others; their memory is free at once. What stays is stored
bit for bit, on the device on which it was. Rows are independent.
Cost: an eviction writes the pages anew; it waits for their number.
Memory: the tokens since the last eviction, as the cache inside stores them;
pages; of policies that look at queries, the newest of these; and of those that
look at ids, a byte for each position.

The newest tokens lie in an ordinary cache, the open one, to which calls append.
`evict` is called between calls of the model, outside of jit: `generate` does
so behind each part of a prompt and whenever the open cache is full.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from ringjax import tree
from ringjax.errors import NotFiniteError, OptionError
from ringjax.kv.base import CacheSpec, Ends, RowIndices, zeros
from ringjax.kv.cache import (
  KVCache,
  LayerCacheSpec,
  constants_spec,
  filled_constants,
  model_layers,
)
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.eviction import chosen, grown, page_view, repacked, summed
from ringjax.kv.open_cache import WithOpenCache, WithOpenLayer
from ringjax.kv.pages import (
  Pages,
  Places,
  few_sizes,
  host,
  joined,
)
from ringjax.kv.peaks import Repeated
from ringjax.kv.policies import Policy
from ringjax.kv.slots import FILL, REPLICATED
from ringjax.kv.state import StateShape
from ringjax.kv.watch import Noted, QueryWatch
from ringjax.ops.attention.views import (
  KVView,
)
from ringjax.ops.mask import Causal, Coords
from ringjax.parallel.local import move
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictingCache(WithOpenCache):
  """Pages of kept tokens, and an open cache of the newest.

  Attributes:
    open: the newest tokens, and those that stay exact.
    pages: for each kind of layer its pages; None for recurrent layers and for
      ring buffers, which keep what they need anyway.
    noted: for each kind of layer what was noted of its queries.
    watch: of which tokens these are.
    ends: int32 [B], the position behind the last token of each row that was
      there at its last eviction.
    stayed: int32 [B], how many tokens of each row its last eviction left open.
    constants: for each kind of layer the numbers of its codecs, [L, K, n].
    marks: bool [B, `limit`], the positions of tokens whose ids the policy asks
      for (`Policy.marks`); None: it asks for none.
    kind: with the policy.
    limit: tokens of a row that it was made for.
    places: over which axes it is sharded.
  """

  pages: tuple[Pages | None, ...]
  noted: tuple[Noted, ...]
  watch: QueryWatch
  ends: Int[ArrayLeaf, " B"]
  stayed: Int[ArrayLeaf, " B"]
  constants: tuple[Any, ...]
  marks: Bool[ArrayLeaf, "B P"] | None
  places: Places

  # -------------------------------------------------------------------------
  # Making one
  # -------------------------------------------------------------------------

  @classmethod
  def create(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheKind,
    **where: Any,
  ) -> EvictingCache:
    """An empty cache; the arguments are those of `spec`."""
    empty = cls.spec(shapes, batch, capacity, dtype, kind=kind, **where)
    made = KVCache.create(
      shapes, batch, capacity, dtype, kind=kind.opened(), **where
    )
    return dataclasses.replace(
      empty,
      open=made,
      pages=tuple(x and x.emptied() for x in empty.pages),
      noted=zeros(empty.noted),
      watch=zeros(empty.watch),
      ends=zeros(empty.ends),
      stayed=zeros(empty.stayed),
      constants=filled_constants(shapes, kind, empty.constants),
      marks=zeros(empty.marks),
    )

  @classmethod
  def spec(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    kind: CacheKind,
    **where: Any,
  ) -> EvictingCache:
    """Such a cache of shapes, dtypes and shardings; see `KVCache.spec`.

    Raises:
      OptionError: also for layers that the policy can't serve.
    """
    made = KVCache.spec(
      shapes, batch, capacity, dtype, kind=kind.opened(), **where
    )
    room = CacheSpec(
      batch=batch,
      capacity=capacity,
      dtype=jnp.dtype(dtype),
      mesh=where.get("mesh"),
      axes=dict(
        batch=where.get("batch_axes") or None,
        heads=where.get("head_axis"),
        tokens=where.get("axis"),
      ),
      codec=kind.codec,
      target=where.get("platform"),
    )
    _check(shapes, kind, room)
    window, moments = kind.noted(capacity)
    watch = QueryWatch.spec(room, window, moments)
    noted = []
    for n, shape in enumerate(shapes):
      ring = made._ring(n) is not None
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
      open=made,
      pages=tuple(
        _pages_spec(shape, room, kind) if made._ring(n) is None else None
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

  # -------------------------------------------------------------------------
  # What it is
  # -------------------------------------------------------------------------

  @property
  def slots(self) -> tuple[Any, ...]:
    return tuple(zip(self.open.slots, self.noted, strict=True))

  @property
  def length(self) -> jax.Array:
    """int32 [B], the position behind each row's last token; 0 if empty."""
    return jnp.maximum(self.open.length, self.ends)

  def positions(self, row: int) -> list[list[np.ndarray] | None]:
    """Positions of the tokens of a row that each head of each layer holds.

    Returns:
      by the number of the layer in the model, for each KV head int [n], in
      order; None for recurrent layers and ring buffers.
    """
    row = int(self.open._rows([row])[0])
    pos, seg = (host(x)[row] for x in self.open.at)
    newest = pos[seg > 0]
    found: dict[int, list[np.ndarray]] = {}
    for shape, pages in zip(self.shapes, self.pages, strict=True):
      if pages is None:
        continue
      at = pages.read_coords()
      pos, seg = (host(x)[:, row] for x in at)
      for which, p, s in zip(shape.which, pos, seg, strict=True):
        found[which] = [
          np.sort(np.concatenate([one[here > 0], newest]))
          for one, here in zip(p, s, strict=True)
        ]
    return [found.get(n) for n in range(model_layers(self.shapes))]

  def tokens(self) -> list[np.ndarray | None]:
    """Tokens that each KV head holds, int [L, B, K] for each kind of layer.

    None for recurrent layers and ring buffers.
    """
    newest = host(jnp.sum(self.open.at.seg > 0, 1))

    def one(pages: Pages | None) -> np.ndarray | None:
      if pages is None:
        return None
      held = host(pages.counts()).sum(3)
      return held + newest[None, :, None]

    return [one(pages) for pages in self.pages]

  def choices(self, row: int) -> list[list[str] | None]:
    """Which of the policy's choices the heads of a row took, see `FastGen`.

    Returns:
      by the number of the layer in the model, for each KV head the choice of
      the last eviction; None for layers that had none.
    """
    names = () if self.kind.policy is None else self.kind.policy.choices
    row = int(self.open._rows([row])[0])
    found: list[list[str] | None]
    found = [None] * model_layers(self.shapes)
    for shape, noted in zip(self.shapes, self.noted, strict=True):
      if noted.choice is None:
        continue
      each = host(noted.choice)[:, row]
      for which, numbers in zip(shape.which, each.tolist(), strict=True):
        if all(numbers):
          found[which] = [names[n - 1] for n in numbers]
    return found

  def free(self) -> np.ndarray | None:
    """Tokens that may still come, int [B, R]; None where they are traced."""
    if isinstance(self.ends, jax.core.Tracer):
      return None
    left = self.limit - host(_lengths(self))
    return np.repeat(left[:, None] // self.shards, self.shards, 1)

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Refuses tokens that do not fit; see `KVCache.check`."""
    if not sees and not isinstance(self.ends, jax.core.Tracer):
      held = int(host(self.ends).max(initial=0))
      if held:
        raise OptionError(
          "attend",
          f"ContextParallel() behind {held} tokens in the cache",
          "an empty cache, for the old tokens would not be seen",
          "pass attend=CachedAttention(), or leave it out",
        )
    self.open.check(batch, tokens, replicated=replicated, sees=sees)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self, at: Coords, *, replicated: bool, sees: bool
  ) -> EvictingCache:
    made = self.open.allocate(at, replicated=replicated, sees=sees)
    sums = self._sums_prompts and not replicated
    cache = self
    if self._notes_all and not sums:
      cache = self._noting_at_least(made.capacity)
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
      open=made,
      noted=noted,
      watch=watch,
      pages=pages,
      ends=ends,
      stayed=stayed,
    )

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> EvictingCache:
    """Notes which of a call's tokens the policy asks for, by position.

    A position has one token: documents side by side in a row and drafted trees
    are refused (`Transformer.__call__`), positions from `limit` on count as
    unmarked.
    """
    if self.marks is None:
      return self
    assert self.kind.policy is not None
    ids = self.kind.policy.marks
    known = np.zeros(max(ids) + 2, bool)
    known[list(ids)] = True
    marked = jnp.asarray(known)[jnp.clip(tokens, 0, known.size - 1)]
    pos, seg = (jnp.broadcast_to(x, tokens.shape) for x in at)
    # What was noted there before, of a rejected token, is overwritten.
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

  def steps(self) -> int:
    """How many single tokens may come before `evict` is called."""
    free = self.open.free()
    assert free is not None
    # Not by how many slots there are, which depends on the mesh.
    return min(int(free.sum(1).min()), self.kind.room)

  def limited(self, limit: int) -> EvictingCache:
    """The same, for rows of up to `limit` tokens; it grows as they come."""
    made = dataclasses.replace(self, limit=limit)
    if self.marks is None:
      return made
    more = max(0, limit - self.limit)
    marks = jnp.pad(self.marks[:, :limit], ((0, 0), (0, more)))
    return self._placed(dataclasses.replace(made, marks=marks))

  def evict(
    self,
    repeated: Repeated | None = None,
    rows: Bool[np.ndarray, " B"] | None = None,
  ) -> EvictingCache:
    """With the tokens that the policy keeps, the middle ones in pages.

    Call it between calls of the model, outside of jit. A row to which no token
    came since its last eviction stays as it is.

    Args:
      repeated: of a policy that repeats the context what the repetition has
        found; `rj.infer.evict_by_repetition` does both.
      rows: which rows are evicted, bool [B]; the others stay as they are.
        Default: all.

    Raises:
      OptionError: inside of jit, where the memory can't shrink; or without a
        repetition, for a policy that needs one.
      NotFiniteError: a policy whose scores are NaN, or -inf for all tokens of a
        head; nothing is lost.
    """
    if self.kind.repeats and repeated is None:
      raise OptionError(
        "repeated",
        f"None, for the policy {self.kind.policy}",
        "what a repetition of the context by the model has found",
        "call rj.infer.evict_by_repetition(model, cache, tokens); "
        "rj.infer.generate does so by itself",
      )
    return self._evicted(self.kind.policy, repeated, rows)

  def flush(self, rows: Bool[np.ndarray, " B"] | None = None) -> EvictingCache:
    """With room in the open cache again: as `evict`.

    With a policy that repeats the context all tokens stay.
    """
    policy = None if self.kind.repeats else self.kind.policy
    return self._evicted(policy, None, rows)

  def _evicted(
    self,
    policy: Policy | None,
    repeated: Repeated | None,
    rows: Bool[np.ndarray, " B"] | None,
  ) -> EvictingCache:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
      raise OptionError(
        "cache",
        "evict inside of jit",
        "a call between calls of the model: how much stays decides shapes",
        "evict outside of jit; rj.infer.generate does so by itself",
      )
    cache = self._settled()
    lengths, fresh = map(host, _state_of_rows(self))
    which = fresh if repeated is None else np.asarray(repeated.rows)
    if rows is not None:
      which = which & rows
    if not which.any():
      return cache.with_room(self.kind.room)
    evicts = jnp.asarray(which)
    heads, counts = self._competing(), []
    for shape, pages in zip(self.shapes, self.pages, strict=True):
      if pages is None or policy is None:
        counts.append(jnp.zeros((shape.layers, self.batch), jnp.int32))
        continue
      each = np.asarray([policy.counts(int(n), heads) for n in lengths])
      by_layer = each.astype(np.int32)[:, list(shape.which)].T
      counts.append(jnp.asarray(by_layer))
    # Another budget compiles nothing.
    policy = None if policy is None else policy.traced()
    cache = dataclasses.replace(
      cache, kind=dataclasses.replace(self.kind, policy=policy)
    )
    scores = {} if repeated is None else repeated.scores
    found = chosen(cache, tuple(counts), scores, evicts)
    keep, masses, sizes, stays, wrong, segments, choice = found
    self._check_scores(host(wrong))
    local = open_slots(self.kind, int(host(stays).max(initial=0)), self.shards)
    needs: dict[int, tuple[int, ...]] = {
      n: tuple(map(int, host(x).max(0))) for n, x in sizes.items()
    }
    # A repetition is the one eviction of its prompt: none is kept for more.
    later = repeated is None and host(self.ends).any()
    grows = int(lengths.max()) if later else None
    shape = page_sizes(self.pages, needs, grows)
    some = bool(host(segments))
    made = repacked(cache, keep, masses, evicts, shape, local, some)
    noted = list(made.noted)
    for n, numbers in choice.items():
      noted[n] = noted[n]._replace(choice=numbers)
    return dataclasses.replace(made, kind=self.kind, noted=tuple(noted))

  def _check_scores(self, wrong: np.ndarray) -> None:
    """Refuses a choice by scores that are NaN or -inf for all tokens.

    Args:
      wrong: bool [B, 2], see `chosen`.
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
    """By layer of the model the KV heads of which a policy chooses tokens."""
    found = [0] * model_layers(self.shapes)
    for n, shape in enumerate(self.shapes):
      if self.pages[n] is not None and not self.windowed(n):
        for layer in shape.which:
          found[layer] = shape.heads
    return found

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def truncate(self, length: Ends, most: int | None = None) -> EvictingCache:
    """Without the tokens at positions from `length` on; see `KVCache.truncate`.

    Of those before it the ones that were evicted stay away.
    """
    end = jnp.broadcast_to(
      jnp.asarray(length, jnp.int32).reshape(-1), (self.batch,)
    )
    gone = lambda pos: pos >= end[None, :, None, None, None]
    made = self.open.truncate(end, most)
    # Other tokens will come into these slots.
    real = (made.at.seg > 0)[None, :, None]
    return dataclasses.replace(
      self,
      open=made,
      noted=self.with_scores(lambda x: jnp.where(real, x, 0)),
      pages=tuple(x and x.without(gone) for x in self.pages),
      watch=self.watch.truncated(end),
      ends=jnp.minimum(self.ends, end),
      stayed=jnp.minimum(self.stayed, made.held.tokens()),
    )

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> EvictingCache:
    """Of the last call's T tokens those in `kept`; see `KVCache.keep`.

    Queries of the others are forgotten; those that they displaced are too, see
    `with_slack`. They stay in sums over all queries, see `irreversible`.
    """
    return dataclasses.replace(
      self, open=self.open.keep(kept), watch=self.watch.kept(kept)
    )

  @property
  def irreversible(self) -> bool:
    return self.open.irreversible or self.watch.count is not None

  def with_slack(self, tokens: int) -> EvictingCache:
    """With notes of so many queries more than the policy looks at.

    As many tokens of a call may then be taken back as if they had not been
    read; `flush` and `evict` leave none of these notes.
    """
    window = self._window
    if window is None or self._noted_now == window + tokens:
      return self
    return _noting(self, window + tokens)

  def _settled(self) -> EvictingCache:
    """With the queries that are noted in the order in which they came."""
    if self.watch.at is None:
      return self
    return _noting(self, self._window or self._noted_now)

  @property
  def _notes_all(self) -> bool:
    """Whether all queries since the last eviction are noted, not the newest."""
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
  def _window(self) -> int | None:
    """Queries that the policy looks at; None: all that have slots, or none."""
    policy = self.kind.policy
    if self.watch.at is None or policy is None or policy.queries is None:
      return None
    return self.kind.noted(self.limit)[0]

  def snapshot(self) -> EvictingCache:
    """What `restore` goes back to; pages and open tokens are copied."""
    return jax.tree.map(jnp.copy, self)

  def restore(self, snapshot: EvictingCache) -> EvictingCache:
    """As it was at a snapshot."""
    return jax.tree.map(jnp.copy, snapshot)

  def reset(self, rows: RowIndices) -> EvictingCache:
    """With these rows, int [n], empty; the others are as they were."""
    made = self.open.reset(rows)
    index = jnp.asarray(np.asarray(rows))
    gone = jnp.zeros((self.batch,), bool).at[index].set(True)
    empty = lambda x: (
      x and x.with_table(jnp.where(gone[None, :, None, None], -1, x.table))
    )
    watch = self.watch.truncated(jnp.where(gone, 0, np.iinfo(np.int32).max))
    if watch.count is not None:
      watch = dataclasses.replace(watch, count=jnp.where(gone, 0, watch.count))
    clear = lambda x: jnp.where(gone.reshape(1, -1, *(1,) * (x.ndim - 2)), 0, x)
    return self._placed(
      dataclasses.replace(
        self,
        open=made,
        pages=tuple(map(empty, self.pages)),
        noted=jax.tree.map(clear, self.noted),
        watch=watch,
        ends=jnp.where(gone, 0, self.ends),
        stayed=jnp.where(gone, 0, self.stayed),
        marks=self.marks if self.marks is None else self.marks & ~gone[:, None],
      )
    )

  def insert(self, rows: RowIndices, other: EvictingCache) -> EvictingCache:
    """With the rows of another cache in place of `rows`, int [n].

    Both are first given open caches of one size.

    Raises:
      OptionError: a cache of another model, capacity, kind or mesh.
      ShapeError: not as many rows as the other cache has.
    """
    mine, theirs = self.with_slack(0)._same_size(other.with_slack(0))
    most = max(mine._noted_now, theirs._noted_now)
    mine, theirs = (
      x._without_paged_sums()._noting_at_least(most) for x in (mine, theirs)
    )
    made = mine.open.insert(rows, theirs.open)
    index = jnp.asarray(np.asarray(rows))
    put = lambda axis: (
      lambda x, new: (
        x.at[index].set(new) if axis == 0 else x.at[:, index].set(new)
      )
    )
    pair = zip(mine.pages, theirs.pages, strict=True)
    watch = jax.tree.map(put(0), mine.watch, theirs.watch)
    return self._placed(
      dataclasses.replace(
        mine,
        open=made,
        pages=tuple(
          None if x is None or y is None else joined(x, y, np.asarray(rows))
          for x, y in pair
        ),
        noted=jax.tree.map(put(1), mine.noted, theirs.noted),
        watch=watch,
        ends=put(0)(mine.ends, theirs.ends),
        stayed=put(0)(mine.stayed, theirs.stayed),
        marks=jax.tree.map(put(0), mine.marks, theirs.marks),
      )
    )

  def _without_paged_sums(self) -> EvictingCache:
    """Itself, if no prompt's queries looked at pages since an eviction."""
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

  def take(self, examples: RowIndices) -> EvictingCache:
    """Of these rows, int [B'], each as often as it is named; they share pages.

    Raises:
      ShapeError: not a list of row numbers.
      OptionError: a batch that is sharded: its pages are where its rows are.
    """
    if any(x is not None and x.places.batch for x in self.pages):
      raise OptionError(
        "cache",
        "take of rows that are sharded over the mesh",
        "a mesh that shards the sequence alone",
        "make the cache with a batch that does not divide over the data axis",
      )
    made = self.open.take(examples)
    index = jnp.asarray(examples, jnp.int32)
    pick = lambda axis: lambda x: jnp.take(x, index, axis, mode="clip")
    return dataclasses.replace(
      self,
      open=made,
      pages=tuple(x and x.take(index) for x in self.pages),
      noted=jax.tree.map(pick(1), self.noted),
      watch=jax.tree.map(pick(0), self.watch),
      ends=pick(0)(self.ends),
      stayed=pick(0)(self.stayed),
      marks=jax.tree.map(pick(0), self.marks),
    )

  def export(self, row: int, start: int, stop: int) -> Any:
    """Refused: heads have kept different tokens.

    Raises:
      OptionError: always, if something was evicted.
    """
    if host(self.ends).any():
      raise OptionError(
        "cache",
        f"export from one with the policy {self.kind.policy}",
        "a cache that holds all tokens of a row",
        "export before the first eviction, or make one without a policy",
      )
    return self.open.export(row, start, stop)

  def load(
    self, row: int, blocks: PyTree, at: Coords | None = None
  ) -> EvictingCache:
    """Appends exported tokens to a row; see `KVCache.load`.

    Raises:
      OptionError: also for a policy that asks for ids: blocks have none.
    """
    if self.marks is not None:
      raise OptionError(
        "cache",
        f"load into one with the policy {self.kind.policy}",
        "a policy that looks at no ids: exported tokens have none",
        "read the tokens by a call of the model, or leave punctuation= out",
      )
    cache = self.with_room(int(blocks.at.pos.shape[0]))
    made = cache.open.load(row, blocks, at)
    return dataclasses.replace(cache, open=made)

  def gathered(self, device: jax.Device) -> EvictingCache:
    """The same tokens on one device."""
    along = lambda x: jax.tree.map(lambda y: move(y, device), x)
    _, slots = self.open.held.gathered(device)
    noted = self.with_scores(lambda x: slots(x[..., None])[..., 0])
    return dataclasses.replace(
      self,
      open=self.open.gathered(device),
      pages=tuple(x and x.gathered(device) for x in self.pages),
      noted=along(noted),
      watch=dataclasses.replace(along(self.watch), mesh=None, axis=None),
      ends=along(self.ends),
      stayed=along(self.stayed),
      constants=along(self.constants),
      marks=along(self.marks),
      places=Places(),
    )

  def _placed(self, made: EvictingCache) -> EvictingCache:
    """With coordinates and notes where the old ones were."""
    if self.mesh is None:
      return made

    def same(x: Any, old: Any) -> Any:
      if isinstance(old, jax.core.Tracer):
        return x
      return jax.device_put(x, old.sharding)

    one = lambda new, old: jax.tree.map(same, new, old)
    return dataclasses.replace(
      made,
      noted=one(made.noted, self.noted),
      watch=one(made.watch, self.watch),
      ends=same(made.ends, self.ends),
      stayed=same(made.stayed, self.stayed),
      marks=one(made.marks, self.marks),
      pages=tuple(
        None
        if new is None or old is None
        else new.with_table(same(new.table, old.table))
        for new, old in zip(made.pages, self.pages, strict=True)
      ),
    )

  def with_scores(self, f: Callable[[Any], Any]) -> tuple[Noted, ...]:
    """What was noted, with f of the sums of open slots, [L, B, K, S]."""
    return tuple(
      x if x.score is None else x._replace(score=f(x.score)) for x in self.noted
    )

  def _noting_at_least(self, window: int) -> EvictingCache:
    """With room for so many queries, or more."""
    return _noting(self, window) if window > self._noted_now else self

  def _sized(self, local: int) -> EvictingCache:
    if local == self.open.held.local:
      return self
    return grown(self, local)

  def with_moved_positions(self, pages: Pages) -> Pages:
    """Pages whose first tokens are next to the newest, see `Policy.moves`.

    Attention by a distance is the same whether all tokens move to their index
    or the first ones move up to the others, whose positions stay.
    """
    policy = self.kind.policy
    assert policy is not None
    # All heads of all layers keep the same tokens.
    pos, table = pages.pos[0], pages.table[0, :, 0]
    by_page = pos.reshape(*table.shape, pages.slots) >= 0
    kept = jnp.sum(by_page & (table >= 0)[..., None], (1, 2), dtype=jnp.int32)
    gone = self.ends - kept - self.stayed
    first = (pos >= 0) & (pos < policy.moves)
    moved = jnp.where(first, pos + gone[:, None], pos)
    return dataclasses.replace(pages, pos=moved[None])

  def windowed(self, kind: int) -> bool:
    """Whether layers of a kind look back a window, which they keep."""
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
      # The tokens of a prompt read all pages, in chunks as at once.
      selects=self.cache.open.held.mode == REPLICATED,
    )
    return (view, *views)

  def recall(self, empty: PyTree) -> PyTree:
    return self.inner.recall(empty)

  def keep(self, state: PyTree) -> EvictingLayer:
    return dataclasses.replace(self, inner=self.inner.keep(state))


def with_paged_sums(noted: Noted, pages: Pages | None) -> Noted:
  """With sums for the slots of pages, 0 where there were none."""
  if noted.score is None or noted.paged is not None or pages is None:
    return noted
  *lead, table = pages.table.shape
  shape = (*lead, table * pages.slots)
  return noted._replace(paged=jnp.zeros(shape, jnp.float32))


@bounded
@functools.partial(jax.jit, static_argnums=1)
def _noting(cache: EvictingCache, window: int) -> EvictingCache:
  """With room for `window` queries, and the newest of those that are there."""
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
def _state_of_rows(cache: EvictingCache) -> tuple[jax.Array, jax.Array]:
  """Of each row its length, and whether tokens came since its eviction."""
  held = cache.open.held
  came = held.tokens() > cache.stayed
  return held._everywhere(cache.length), held._everywhere(came)


# Tokens for which pages are allocated ahead, once a cache grows by evictions.
_AHEAD = 64


def open_slots(kind: CacheKind, stays: int, shards: int) -> int:
  """Return the slots of a shard of the open cache after an eviction.

  They do not depend on how much of a group is left open, so that programs are
  not compiled anew at each eviction.

  Args:
    kind: Kind of cache.
    stays: Tokens that stay open, the most of a shard.
    shards: Shards of the sequence.
  """
  most = kind.first + kind.recent
  if kind.grouped:
    most += kind.page - 1
  stays = max(stays, math.ceil(most / shards))
  return few_sizes(stays + math.ceil(kind.room / shards))


def first_sizes(count: int, most: int) -> tuple[int, int]:
  """Return pages of memory, and of a table, after a first eviction.

  Args:
    count: Pages that all heads need.
    most: Pages that one head needs, the most of them.
  """
  # At most 1.6 % too many. The table of a head is small.
  return few_sizes(count, 64), few_sizes(most, 2)


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
  exact, ahead = [(0, 0)] * len(pages), [(0, 0)] * len(pages)
  now, fits = [(0, 0)] * len(pages), length is not None
  for n, (count, most) in needs.items():
    before = pages[n]
    assert before is not None
    places, (*lead, table) = before.places, before.table.shape
    devices = 1 if places.mesh is None else places.size(places.axes)
    now[n] = before.k.shape[0] // devices, table // places.shards
    exact[n] = first_sizes(count, most)
    if length is None:
      continue
    more = 1 + _AHEAD / max(1, length)
    ahead[n] = (
      few_sizes(math.ceil(count * more)),
      few_sizes(math.ceil(most * more), 2),
    )
    each = math.ceil(_AHEAD / before.slots)
    heads = math.ceil(math.prod(lead) * places.shards / devices)
    # Where much has gone, memory is given back.
    limits = 2 * ahead[n][0] - count, 2 * ahead[n][1] - most
    limits = max(limits[0], count + 2 * heads * each), limits[1] + each
    fits &= count <= now[n][0] <= limits[0] and most <= now[n][1] <= limits[1]
  if length is None:
    return tuple(exact)
  return tuple(now if fits else ahead)


# ---------------------------------------------------------------------------
# What can be served
# ---------------------------------------------------------------------------


def _kv_heads(shapes: Sequence[Any]) -> int:
  """KV heads of all kinds of layers: what they have in common."""
  return math.gcd(*(s.heads for s in shapes if isinstance(s, LayerCacheSpec)))


def _pages_spec(
  shape: LayerCacheSpec | StateShape, room: CacheSpec, kind: CacheKind
) -> Pages | None:
  """No pages yet."""
  if not isinstance(shape, LayerCacheSpec):
    return None
  places = Places.of(room, shape.heads)
  return Pages.spec(shape, room, kind.page, places, kind.alike)


def _check(shapes: Sequence[Any], kind: CacheKind, room: CacheSpec) -> None:
  """Refuses what a policy or pages can't serve, by name."""
  policy = kind.policy
  if kind.residual is not None and room.shards > 1:
    raise OptionError(
      "residual",
      f"{kind.residual}, over {room.shards} shards of the sequence",
      "one shard: groups that become codes together are of consecutive tokens",
      "leave residual out, or make the mesh without that axis",
    )
  layers = [s for s in shapes if isinstance(s, LayerCacheSpec)]
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
  late = any(s.reading is not None and s.reading.late for s in layers)
  if kind.unrotated and late:
    raise OptionError(
      "kind",
      f"{policy} over keys that are stored before a rotation and a norm",
      "keys that are stored rotated",
      "leave unrotated out, or use a policy of positions, rj.kv.Sinks",
    )


def _check_moves(layers: Sequence[LayerCacheSpec], policy: Policy) -> None:
  """Refuses layers that see more of a position than a distance."""
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

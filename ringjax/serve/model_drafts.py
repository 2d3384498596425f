"""A model that drafts for the rows of an engine, for all of them at once.

Guarantees: a row's tokens depend on no draft, see `check_drafts`. The compiled
programs depend on neither texts nor their lengths.
Memory: a cache of the draft model's own for all rows, `longest` tokens of each;
of a block that reads the target's keys (LongSpec) a window of each.
Cost: for each step of the engine a step of the draft model for each drafted
token, all rows together; a text that is new to it is read `WIDE` tokens at a
time, beside padding for the rows that wait. A block reads its window at once.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ringjax.infer.finite import NOT_FINITE
from ringjax.infer.session import Session, check_devices
from ringjax.infer.speculate.draft_model import ModelDrafter
from ringjax.infer.speculate.draft_programs import (
  WINDOW,
  Missing,
  TreeShape,
  drafted,
  read_more,
  without,
)
from ringjax.infer.speculate.drafter import TreeDrafter
from ringjax.infer.speculate.longspec import SLACK, LongSpec, filled
from ringjax.kv.cache import KVCache
from ringjax.kv.page_pool import PooledRows
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.serve.calls import RowBoard
from ringjax.serve.row_sampler import RowNumbers, choose, ranked
from ringjax.serve.scheduler import RowDraft

if TYPE_CHECKING:
  from ringjax.serve.scheduler import ServedRow

# Tokens of a new text that are read at once.
WIDE = 256


class _RowChooser(NamedTuple):
  """A sampler that chooses by each row's settings, as `check_drafts` will.

  What was drafted counts for the repetition penalty alone.
  """

  how: RowNumbers
  counts: Int[Array, "B V"]
  allowed: Bool[Array, "B V"]

  def __call__(
    self,
    logits: Float[Array, "B V"],
    pos: Int[Array, " B"],
    seen: Bool[Array, "B V"],
  ) -> Int[Array, " B"]:
    found = choose(logits, self.how, pos, seen, self.counts, self.allowed)
    return found.token

  def ranked(
    self,
    logits: Float[Array, "B V"],
    pos: Int[Array, " B"],
    seen: Bool[Array, "B V"],
  ) -> Float[Array, "B V"]:
    return ranked(logits, self.how, pos, seen, self.counts, self.allowed)


class ModelRowDrafts:
  """A draft model and its cache, where each row has the place of its slot.

  Attributes:
    undrafted: rows for which the draft's logits were not finite: they go on
      without drafts.
  """

  _model: Transformer
  _cache: KVCache
  _attend: CachedAttention
  # Of the context, for rotations that depend on it.
  _length: jax.Array

  def __init__(
    self,
    drafter: TreeDrafter,
    target: Transformer,
    *,
    rows: int,
    longest: int,
    mesh: Mesh | None,
    axis: str | None,
    dtype: DTypeLike,
  ):
    """For no rows yet.

    Args:
      drafter: by a model with the target's vocabulary, with a cache that keeps
        all tokens on the device; or a block that reads the target's keys.
      target: the engine's model.
      rows: slots.
      longest: tokens of a row.
      mesh: the engine's.
      axis: which shards the sequence.
      dtype: of the cache.

    Raises:
      MeshError: weights on other devices than those of the mesh.
      MemoryEstimateError: a cache that does not fit.
    """
    self._drafter, self._target = drafter, target
    self._begin(rows, longest, mesh, axis, dtype)
    if mesh is None:
      # Committed, as what calls return: else each program is compiled twice.
      (device,) = jax.tree.leaves(target)[0].devices()
      self._cache = jax.device_put(self._cache, device)
    self._allowed = jnp.ones((rows, target.config.vocab), bool)
    # Of each slot: whose text is in the cache, how many tokens of it are there
    # for good, what was drafted behind them, and how much of that is there too.
    self._whose: list[Any] = [None] * rows
    self._at = np.zeros(rows, np.int64)
    self._drafted = np.zeros((rows, drafter.nodes), np.int32)
    self._parents: np.ndarray | None = None
    self._tried = np.zeros(rows, np.int64)
    # The rows that have a draft now, and those that get none any more.
    self._ready: weakref.WeakSet[ServedRow] = weakref.WeakSet()
    self._undrafted: weakref.WeakSet[ServedRow] = weakref.WeakSet()
    self.undrafted = 0

  def _begin(
    self,
    rows: int,
    longest: int,
    mesh: Mesh | None,
    axis: str | None,
    dtype: DTypeLike,
  ) -> None:
    """Makes the model and its cache."""
    drafter: Any = self._drafter
    assert isinstance(drafter, ModelDrafter)
    model = drafter.drafts(self._target)
    kind = model.cache_kind(drafter.cache_kind)
    session = Session(
      model,
      longest + 2 * (drafter.drafted + WINDOW),
      batch=rows,
      mesh=mesh,
      axis=axis,
      dtype=dtype,
      # Rows begin anew, further back than a window.
      cache_kind=dataclasses.replace(kind, windowed=False),
    )
    self._model, self._cache = model, session.cache
    self._attend = CachedAttention(mesh=session.mesh, axis=session.axis)
    self._length = jnp.int32(session.capacity)

  def nbytes(self) -> int:
    """Bytes of its cache, of all shards together."""
    return self._cache.nbytes()

  def unread(self, rows: Sequence[ServedRow]) -> int:
    """Counts tokens of a row at most that are read in calls before a draft.

    Args:
      rows: Rows that have slots.
    """
    longest = 0
    for row in rows:
      slot = row.slot
      if slot is None or row.reading or row in self._undrafted:
        continue
      whose = self._whose[slot]
      there = 0
      if whose is not None and whose() is row:
        there = int(self._at[slot] + self._tried[slot])
      longest = max(longest, row.known - there)
    # So few are read by the draft's own call.
    return longest if longest > WINDOW else 0

  def prepare(
    self,
    rows: Sequence[ServedRow],
    how: RowNumbers,
    board: RowBoard,
    held: Callable[[], PooledRows],
  ) -> None:
    """Drafts for rows whose last token is known and not read yet.

    Args:
      rows: that have slots.
      how: settings, by slot.
      board: what rows have read and said, by slot.
      held: what the target has of them, by slot: all tokens but the last one.
    """
    rows = [row for row in rows if row not in self._undrafted]
    self._ready = weakref.WeakSet(rows)
    behind: dict[int, np.ndarray] = {}
    for row in rows:
      slot = row.slot
      assert slot is not None
      if self._whose[slot] is None or self._whose[slot]() is not row:
        self._whose[slot] = weakref.ref(row)
        self._at[slot] = self._tried[slot] = 0
      text = np.concatenate([row.prompt, np.asarray(row.answer, np.int32)])
      new = text[self._at[slot] :]
      if not new.size:
        # It had no turn in the step before, and has its draft still.
        continue
      # What was drafted and is right has been read; the last token is left.
      many = min(new.size - 1, self._tried[slot])
      same = new[:many] == self._drafted[slot, :many]
      right = int(np.argmin(np.append(same, False)))
      self._at[slot] += right
      behind[slot] = new[right:]
    if not behind:
      return
    model = self._drafts(held)
    read = self._read(model, behind)
    tokens, parents = self._drafted_by(model, read, how, board)
    if parents is not None and self._parents is None:
      self._parents = np.zeros_like(self._drafted)
    # The call has dropped what was drafted before, of all rows.
    self._tried[:] = 0
    for row in rows:
      if row.slot in behind and (tokens[row.slot] == NOT_FINITE).any():
        self._ready.discard(row)
        self._undrafted.add(row)
        self.undrafted += 1
    for slot, new in behind.items():
      self._at[slot] += new.size
      self._drafted[slot] = tokens[slot]
      if self._parents is not None and parents is not None:
        # No token of a tree stays.
        self._parents[slot] = parents[slot]
      else:
        # The last token was not read.
        self._tried[slot] = self._drafter.count - 1

  def warm_up(
    self, how: RowNumbers, board: RowBoard, held: Callable[[], PooledRows]
  ) -> None:
    """Compiles each program, by a call of it without rows.

    Args:
      how: Settings, by slot.
      board: What rows have read and said, by slot.
      held: Returns what the target has of them, by slot.
    """
    # The cache of no slot is of use after it.
    self._whose = [None] * len(self._whose)
    self._at[:] = self._tried[:] = 0
    model = self._drafts(held)
    self._warm_up_reading(model)
    for width in (WINDOW,) if self._drafter.tree else (2, WINDOW):
      self._drafted_by(model, self._part({}, width), how, board)

  def _warm_up_reading(self, model: Transformer) -> None:
    for width in (WINDOW, WIDE):
      self._cache = read_more(
        model, self._attend, self._cache, self._part({}, width), self._length
      )

  def _drafted_by(
    self, model: Transformer, read: Missing, how: RowNumbers, board: RowBoard
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens [B, n] that may follow what each row reads, and their parents."""
    drafter = self._drafter
    shape: int | TreeShape = drafter.count
    if drafter.widths is not None:
      shape = TreeShape(drafter.widths, drafter.nodes)
    drafts, self._cache = drafted(
      model,
      self._attend,
      shape,
      False,
      _RowChooser(
        how._replace(logprobs=how.logprobs & False),
        board.counts,
        self._allowed,
      ),
      self._cache,
      read,
      read.pos + read.count,
      board.seen,
      self._length,
    )
    tokens, _, parents = jax.device_get(drafts)
    return tokens, parents

  def draft(self, row: ServedRow, most: int) -> RowDraft:
    """What may follow the last token of a row, if it was prepared.

    Args:
      row: the row.
      most: tokens one behind another.
    """
    if row not in self._ready or row.slot is None:
      return RowDraft()
    tokens = tuple(self._drafted[row.slot].tolist())
    if self._parents is None:
      return RowDraft(tokens[:most])
    found = RowDraft(tokens, tuple(self._parents[row.slot].tolist()))
    # Tokens are in the order of their depths.
    return found.first(sum(depth <= most for depth in found.depths))

  def _drafts(self, held: Callable[[], PooledRows]) -> Transformer:
    """What drafts in this step."""
    del held
    return self._model

  def _read(self, model: Transformer, behind: dict[int, np.ndarray]) -> Missing:
    """What is missing, `WINDOW` tokens at most, after the rest was read."""
    while (most := max(map(len, behind.values()))) > WINDOW:
      width = WIDE if most > 2 * WINDOW else WINDOW
      # The last token is left to the draft.
      part = {slot: new[:-1][:width] for slot, new in behind.items()}
      self._cache = read_more(
        model, self._attend, self._cache, self._part(part, width), self._length
      )
      for slot, new in part.items():
        behind[slot] = behind[slot][new.size :]
        self._at[slot] += new.size
    return self._last(behind)

  def _last(self, behind: dict[int, np.ndarray]) -> Missing:
    """What the draft itself reads."""
    most = max(map(len, behind.values()))
    # A tree's path is read anew: one width is one program.
    few = most <= 2 and not self._drafter.tree
    return self._part(behind, 2 if few else WINDOW)

  def _part(self, new: dict[int, np.ndarray], width: int) -> Missing:
    tokens: Any = np.zeros((self._at.size, width), np.int32)
    counts: Any = np.zeros(self._at.size, np.int32)
    for slot, some in new.items():
      tokens[slot, : some.size], counts[slot] = some, some.size
    at: Any = self._at.astype(np.int32)
    return Missing(tokens, counts, at)


class BlockRowDrafts(ModelRowDrafts):
  """A block that reads the target's keys in the pages of the rows."""

  def _begin(
    self,
    rows: int,
    longest: int,
    mesh: Mesh | None,
    axis: str | None,
    dtype: DTypeLike,
  ) -> None:
    del axis, dtype
    drafter: Any = self._drafter
    assert isinstance(drafter, LongSpec)
    model = drafter.drafts(self._target)
    check_devices(model, mesh)
    self._model, self._length = model, jnp.int32(longest)
    # Its window is the same on all shards.
    self._attend = CachedAttention(mesh=mesh, axis=None)
    self._cache = model.init_ring(rows, drafter.drafted + SLACK, self._attend)
    # Tokens of a text that are of use to it.
    self._width = min(model.draft_config.window, longest)

  def unread(self, rows: Sequence[ServedRow]) -> int:
    return min(super().unread(rows), self._width)

  def _drafts(self, held: Callable[[], PooledRows]) -> Transformer:
    draft: Any = self._model
    return draft.beside(self._target, held())

  def _read(self, model: Transformer, behind: dict[int, np.ndarray]) -> Missing:
    """What is missing, after the window of a new text was read at once."""
    long = {slot: new for slot, new in behind.items() if new.size > WINDOW}
    if long:
      shape = self._at.size, self._width
      tokens, seg = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
      first = np.zeros((self._at.size, 1), np.int64)
      end = np.full(self._at.size, np.iinfo(np.int32).max, np.int32)
      for slot, new in long.items():
        some = new[:-1][-self._width :]
        tokens[slot, : some.size], seg[slot, : some.size] = some, 1
        # What the cache has from here on is of no use, or of another row.
        end[slot] = self._at[slot]
        self._at[slot] += new.size - 1
        first[slot] = self._at[slot] - some.size
        behind[slot] = new[-1:]
      pos = (first + np.arange(self._width)).astype(np.int32)
      self._fill(model, end, tokens, pos, seg)
    return self._last(behind)

  def _warm_up_reading(self, model: Transformer) -> None:
    rows = self._at.size
    nothing = np.zeros((rows, self._width), np.int32)
    self._fill(model, np.zeros(rows, np.int32), nothing, nothing, nothing)

  def _fill(
    self,
    model: Transformer,
    end: np.ndarray,
    tokens: np.ndarray,
    pos: np.ndarray,
    seg: np.ndarray,
  ) -> None:
    """Reads tokens [B, n] in place of what rows have from `end` [B] on."""
    cache = without(self._cache, end, 0)
    self._cache = filled(
      model, self._attend, cache, tokens, pos, seg, self._length
    )

"""Draft model for the rows of an engine, which drafts for all at once.

Guarantees: a row's tokens do not depend on drafts, see `check_drafts`. The
compiled programs depend on neither texts nor their lengths.
Memory: a separate cache of the draft model for all rows, `longest` tokens of
each; for a block that reads the target's keys (LongSpec) a window of each.
Cost: for each step of the engine a step of the draft model for each drafted
token, all rows together; a text that is new to it is read `WIDE` tokens at a
time, with padding for the rows that wait. A block reads its window at once.
"""

from __future__ import annotations

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
  drafted,
  read_more,
  without,
)
from ringjax.infer.speculate.drafter import TreeDrafter
from ringjax.infer.speculate.longspec import SLACK, LongSpec, filled
from ringjax.kv.cache import KVCache
from ringjax.kv.storage.pooled_cache import PooledRows
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.serve.calls import RowBoard
from ringjax.serve.row_sampler import RowNumbers, choose, ranked
from ringjax.serve.scheduler import RowDraft

if TYPE_CHECKING:
  from ringjax.serve.scheduler import ServedRow

# Number of tokens of a new text that are read at once.
WIDE = 256


class _RowChooser(NamedTuple):
  """A sampler that chooses by each row's settings, as `check_drafts` will.

  Drafted tokens count for the repetition penalty alone.
  """

  sampling: RowNumbers
  counts: Int[Array, "B V"]
  allowed: Bool[Array, "B V"]

  def __call__(
    self,
    logits: Float[Array, "B V"],
    pos: Int[Array, " B"],
    seen: Bool[Array, "B V"],
  ) -> Int[Array, " B"]:
    choice = choose(logits, self.sampling, pos, seen, self.counts, self.allowed)
    return choice.token

  def ranked(
    self,
    logits: Float[Array, "B V"],
    pos: Int[Array, " B"],
    seen: Bool[Array, "B V"],
  ) -> Float[Array, "B V"]:
    return ranked(logits, self.sampling, pos, seen, self.counts, self.allowed)


class ModelRowDrafts:
  """Draft model and its cache, in which a row's index is its slot.

  Attributes:
    undrafted: Number of rows for which the draft's logits were not finite: they
      continue without drafts.
  """

  _model: Transformer
  _cache: KVCache
  _attend: CachedAttention
  # Context length, for rotations that depend on it.
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
    """Make the model and its cache, without rows.

    Args:
      drafter: Drafter by a model with the target's vocabulary and a cache that
        keeps all tokens on the device; or a block, or layer of the target, that
        reads the target's keys.
      target: Model of the engine.
      rows: Number of slots.
      longest: Maximum number of tokens of a row.
      mesh: Mesh of the engine.
      axis: Mesh axis that shards the sequence.
      dtype: Dtype of the cache.

    Raises:
      MeshError: If weights are on other devices than those of the mesh.
      MemoryEstimateError: If the cache does not fit.
    """
    self._drafter: Any = drafter
    self._target = target
    self._begin(rows, longest, mesh, axis, dtype)
    if mesh is None:
      # Committed, as what calls return: else each program is compiled twice.
      (device,) = jax.tree.leaves(target)[0].devices()
      self._cache = jax.device_put(self._cache, device)
    self._allowed = jnp.ones((rows, target.config.vocab), bool)
    # For each slot: the row whose text is in the cache, the number of its
    # tokens that stay there, the tokens drafted after them, and the number of
    # drafted tokens that are in the cache, too.
    self._whose: list[Any] = [None] * rows
    self._at = np.zeros(rows, np.int64)
    self._drafted = np.zeros((rows, drafter.nodes), np.int32)
    self._parents: np.ndarray | None = None
    self._tried = np.zeros(rows, np.int64)
    # Rows that have a draft now, and rows that get no more drafts.
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
    """Make the model and its cache."""
    drafter = self._drafter
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
      # A new row restarts a slot at position 0, which a window would not allow.
      cache_kind=kind.replace(windowed=False),
    )
    self._model, self._cache = model, session.cache
    self._attend = CachedAttention(mesh=session.mesh, axis=session.axis)
    self._length = jnp.int32(session.capacity)

  def nbytes(self) -> int:
    """Bytes of its cache, over all shards."""
    return self._cache.nbytes()

  def unread(self, rows: Sequence[ServedRow]) -> int:
    """Maximum number of a row's tokens that are read in calls before a draft.

    Args:
      rows: Rows that have slots.
    """
    longest = 0
    for row in rows:
      slot = row.slot
      if slot is None or row.reading or row in self._undrafted:
        continue
      whose = self._whose[slot]
      num_cached = 0
      if whose is not None and whose() is row:
        num_cached = int(self._at[slot] + self._tried[slot])
      longest = max(longest, row.known - num_cached)
    # Up to `WINDOW` tokens are read by the drafting call itself.
    return longest if longest > WINDOW else 0

  def prepare(
    self,
    rows: Sequence[ServedRow],
    how: RowNumbers,
    board: RowBoard,
    held: Callable[[], PooledRows],
  ) -> None:
    """Draft for rows whose last token is known and not read yet.

    Args:
      rows: Rows that have slots.
      how: Sampling settings by slot.
      board: Device state of the rows, by slot.
      held: Returns the target's pages of the rows, by slot: all tokens but the
        last one.
    """
    rows = [row for row in rows if row not in self._undrafted]
    self._ready = weakref.WeakSet(rows)
    unread: dict[int, np.ndarray] = {}
    for row in rows:
      slot = row.slot
      assert slot is not None
      if self._whose[slot] is None or self._whose[slot]() is not row:
        self._whose[slot] = weakref.ref(row)
        self._at[slot] = self._tried[slot] = 0
      text = np.concatenate([row.prompt, np.asarray(row.answer, np.int32)])
      new = text[self._at[slot] :]
      if not new.size:
        # It did not decode in the previous step and still has its draft.
        continue
      # Accepted drafts have been read; the last token has not.
      num_drafted = min(new.size - 1, self._tried[slot])
      matches = new[:num_drafted] == self._drafted[slot, :num_drafted]
      right = int(np.argmin(np.append(matches, False)))
      self._at[slot] += right
      unread[slot] = new[right:]
    if not unread:
      return
    model = self._drafts(held)
    read = self._read(model, unread)
    tokens, parents = self._drafted_by(model, read, how, board)
    if parents is not None and self._parents is None:
      self._parents = np.zeros_like(self._drafted)
    # The call has dropped the earlier drafts of all rows from the cache.
    self._tried[:] = 0
    for row in rows:
      if row.slot in unread and (tokens[row.slot] == NOT_FINITE).any():
        self._ready.discard(row)
        self._undrafted.add(row)
        self.undrafted += 1
    for slot, new in unread.items():
      self._at[slot] += new.size
      self._drafted[slot] = tokens[slot]
      if self._parents is not None and parents is not None:
        # Tokens of a tree do not stay in the cache.
        self._parents[slot] = parents[slot]
      else:
        # The last drafted token was not read.
        self._tried[slot] = self._drafter.count - 1

  def warm_up(
    self, how: RowNumbers, board: RowBoard, held: Callable[[], PooledRows]
  ) -> None:
    """Compiles each program by a call without rows.

    Args:
      how: Sampling settings by slot.
      board: Device state of the rows, by slot.
      held: Returns the target's pages of the rows, by slot.
    """
    # The calls overwrite the cache of all slots.
    self._whose = [None] * len(self._whose)
    self._at[:] = self._tried[:] = 0
    model = self._drafts(held)
    self._warm_up_reading(model)
    for width in self._widths:
      self._drafted_by(model, self._part({}, width), how, board)

  @property
  def _widths(self) -> tuple[int, ...]:
    """Numbers of tokens that drafting calls read."""
    return (WINDOW,) if self._drafter.tree else (2, WINDOW)

  def _warm_up_reading(self, model: Transformer) -> None:
    for width in (WINDOW, WIDE):
      self._cache = read_more(
        model, self._attend, self._cache, self._part({}, width), self._length
      )

  def _drafted_by(
    self, model: Transformer, read: Missing, how: RowNumbers, board: RowBoard
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Drafted tokens [B, n] after those that each row reads, and parents."""
    drafter = self._drafter
    drafts, self._cache = drafted(
      model,
      self._attend,
      drafter.shape(drafter.count),
      False,
      self._chooser(how, board),
      self._cache,
      read,
      read.pos + read.count,
      board.seen,
      self._length,
    )
    tokens, _, parents = jax.device_get(drafts)
    return tokens, parents

  def _chooser(self, how: RowNumbers, board: RowBoard) -> _RowChooser:
    """Sampler of the rows, by their settings."""
    return _RowChooser(
      how._replace(logprobs=how.logprobs & False), board.counts, self._allowed
    )

  def draft(self, row: ServedRow, most: int) -> RowDraft:
    """Draft of a row, if it was prepared; else an empty one.

    Args:
      row: Row to draft for.
      most: Maximum length of a path.
    """
    if row not in self._ready or row.slot is None:
      return RowDraft()
    tokens = tuple(self._drafted[row.slot].tolist())
    if self._parents is None:
      return RowDraft(tokens[:most])
    draft = RowDraft(tokens, tuple(self._parents[row.slot].tolist()))
    # Tokens are in the order of their depths.
    return draft.first(sum(depth <= most for depth in draft.depths))

  def _drafts(self, held: Callable[[], PooledRows]) -> Transformer:
    """Model that drafts in this step."""
    del held
    return self._model

  def _read(self, model: Transformer, unread: dict[int, np.ndarray]) -> Missing:
    """Read all but the last tokens of rows; returns those left to the draft."""
    while (longest := max(map(len, unread.values()))) > WINDOW:
      width = WIDE if longest > 2 * WINDOW else WINDOW
      # The last token is left to the drafting call.
      part = {slot: new[:-1][:width] for slot, new in unread.items()}
      self._cache = read_more(
        model, self._attend, self._cache, self._part(part, width), self._length
      )
      for slot, new in part.items():
        unread[slot] = unread[slot][new.size :]
        self._at[slot] += new.size
    return self._last(unread)

  def _last(self, unread: dict[int, np.ndarray]) -> Missing:
    """Tokens that the drafting call itself reads."""
    longest = max(map(len, unread.values()))
    # A tree's path is read again, with one width and so one program.
    few = longest <= 2 and not self._drafter.tree
    return self._part(unread, 2 if few else WINDOW)

  def _part(self, new: dict[int, np.ndarray], width: int) -> Missing:
    tokens: Any = np.zeros((self._at.size, width), np.int32)
    counts: Any = np.zeros(self._at.size, np.int32)
    for slot, text in new.items():
      tokens[slot, : text.size], counts[slot] = text, text.size
    at: Any = self._at.astype(np.int32)
    return Missing(tokens, counts, at)


class BlockRowDrafts(ModelRowDrafts):
  """Drafts by a block that reads the target's keys in the rows' pages."""

  def _begin(
    self,
    rows: int,
    longest: int,
    mesh: Mesh | None,
    axis: str | None,
    dtype: DTypeLike,
  ) -> None:
    del axis, dtype
    drafter = self._drafter
    assert isinstance(drafter, LongSpec)
    model = drafter.drafts(self._target)
    check_devices(model, mesh)
    self._model, self._length = model, jnp.int32(longest)
    # Its window is replicated on all shards.
    self._attend = CachedAttention(mesh=mesh, axis=None)
    self._cache = model.init_ring(rows, drafter.drafted + SLACK, self._attend)
    # Number of last tokens of a text that it can use.
    self._width = min(model.draft_config.window, longest)

  def unread(self, rows: Sequence[ServedRow]) -> int:
    return min(super().unread(rows), self._width)

  def _drafts(self, held: Callable[[], PooledRows]) -> Transformer:
    draft: Any = self._model
    return draft.beside(self._target, held())

  def _read(self, model: Transformer, unread: dict[int, np.ndarray]) -> Missing:
    """Read the window of new texts; returns the tokens left to the draft."""
    long = {slot: new for slot, new in unread.items() if new.size > WINDOW}
    if long:
      shape = self._at.size, self._width
      tokens, seg = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
      first = np.zeros((self._at.size, 1), np.int64)
      end = np.full(self._at.size, np.iinfo(np.int32).max, np.int32)
      for slot, new in long.items():
        text = new[:-1][-self._width :]
        tokens[slot, : text.size], seg[slot, : text.size] = text, 1
        # Cache entries from here on are stale, or of another row.
        end[slot] = self._at[slot]
        self._at[slot] += new.size - 1
        first[slot] = self._at[slot] - text.size
        unread[slot] = new[-1:]
      pos = (first + np.arange(self._width)).astype(np.int32)
      self._fill(model, end, tokens, pos, seg)
    return self._last(unread)

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
    """Reads tokens [B, n] in place of the rows' entries from `end` [B] on."""
    cache = without(self._cache, end, 0)
    self._cache = filled(
      model, self._attend, cache, tokens, pos, seg, self._length
    )


class PredictRowDrafts(ModelRowDrafts):
  """Drafts by the target's layer that predicts one token further.

  It reads the rows' pages, which have all tokens but the last one of each, and
  keeps nothing between steps.
  """

  _widths = (1,)

  def _begin(
    self,
    rows: int,
    longest: int,
    mesh: Mesh | None,
    axis: str | None,
    dtype: DTypeLike,
  ) -> None:
    del rows, dtype
    self._model, self._length = self._target, jnp.int32(longest)
    self._attend = CachedAttention(mesh=mesh, axis=axis)
    self._pages: Any = None
    self._cache: Any = ()

  def nbytes(self) -> int:
    return 0

  def unread(self, rows: Sequence[ServedRow]) -> int:
    del rows
    return 0

  def _drafts(self, held: Callable[[], PooledRows]) -> Transformer:
    self._pages = held()
    return self._model

  def _warm_up_reading(self, model: Transformer) -> None:
    del model

  def _read(self, model: Transformer, unread: dict[int, np.ndarray]) -> Missing:
    """Last token of each row."""
    del model
    read = self._part({slot: new[-1:] for slot, new in unread.items()}, 1)
    last: Any = np.array(read.pos)
    for slot, new in unread.items():
      last[slot] += new.size - 1
    return read._replace(pos=last)

  def _drafted_by(
    self, model: Transformer, read: Missing, how: RowNumbers, board: RowBoard
  ) -> tuple[np.ndarray, np.ndarray | None]:
    pages, self._pages = self._pages, None
    drafter = self._drafter
    tokens, _, parents = drafter.program(
      model,
      self._attend,
      drafter.shape(drafter.count),
      False,
      self._chooser(how, board),
      pages,
      np.asarray(read.tokens)[:, 0],
      read.pos,
      np.asarray(read.count) > 0,
      board.seen,
      self._length,
    )
    return jax.device_get((tokens, parents))

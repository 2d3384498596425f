"""Base class of the caches of a model, whatever stores their keys.

A `ModelCache` that holds other caches (`parts`: an open one for the newest
tokens, or one for each group of rows) does as they do; a kind of storage
overrides what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from ringjax.errors import OptionError
from ringjax.kv.base import CallCache, CallCoords, Ends, RowIndices, donated
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_rows import replace_rows, row_indices, take_rows
from ringjax.kv.encoder_states import EncoderStates
from ringjax.ops.mask import Coords, SameSegment

if TYPE_CHECKING:
  from ringjax.kv.offload.cache_files import CacheFiles
  from ringjax.kv.storage.exported_blocks import Blocks


CacheT = TypeVar("CacheT", bound="ModelCache")


class ModelCache(CallCache):
  """A model's keys and values between calls, and during them.

  A kind of storage has `kind`, its `CacheConfig`, a `spec` as `KVCache` has,
  and what `CallCache` names. It holds `parts`, or overrides all that asks them.
  """

  # What an error calls this storage, and storage that does what it refuses.
  described: ClassVar[str] = "a cache"
  instead: ClassVar[str] = "a cache on the devices"
  # Fields whose arrays have rows, and the axis of the rows.
  row_axes: ClassVar[Mapping[str, int]] = {}
  # Fields that calls replace: a snapshot is a copy of them.
  changing: ClassVar[tuple[str, ...]] = ()

  if TYPE_CHECKING:

    @property
    def kind(self) -> CacheConfig: ...

  @classmethod
  def create(
    cls,
    shapes: tuple[Any, ...],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    *,
    files: CacheFiles | None = None,
    **where: Any,
  ) -> Any:
    """Create an empty cache.

    Args:
      files: Files of the layers on disk.
      **where: Other arguments of the kind's `spec`, see `KVCache.spec`.
    """
    storage: Any = cls
    empty = storage.spec(shapes, batch, capacity, dtype, **where)
    return empty.allocated(files)

  def allocated(self: CacheT, files: CacheFiles | None = None) -> CacheT:
    """Create the arrays of an empty cache from its specs.

    Args:
      files: Files of the layers on disk, if there are any.
    """
    raise NotImplementedError

  @property
  def parts(self) -> tuple[Any, ...]:
    """Caches that it holds, to which calls append."""
    return ()

  def each_part(self: CacheT, f: Callable[..., Any], *rows: Any) -> CacheT:
    """Replace each part by f(part, *its rows of each array)."""
    del f, rows
    return self

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  @property
  def mesh(self) -> Mesh | None:
    return self.parts[0].mesh

  @property
  def axis(self) -> str | None:
    return self.parts[0].axis

  @property
  def shards(self) -> int:
    """Number of shards of the sequence."""
    return self.parts[0].shards

  @property
  def batch(self) -> int:
    """Number of rows, B."""
    return self.parts[0].batch

  @property
  def capacity(self) -> int:
    """Number of tokens that fit in a row."""
    return self.parts[0].capacity

  @property
  def dtype(self) -> Any:
    """Dtype of keys and values after decoding."""
    return self.parts[0].dtype

  @property
  def shapes(self) -> tuple[Any, ...]:
    """For each kind of layer, the shape of one token's cached vectors."""
    return self.parts[0].shapes

  @property
  def states(self) -> EncoderStates | None:
    """Encoder states of the rows, which cross-attention reads, or None."""
    return self.parts[0].states

  @property
  def length(self) -> Int[Array, " B"]:
    """int32 [B], the position after each row's last token; 0 if empty.

    This is the number of tokens in a row whose positions start at 0.
    """
    return self.parts[0].length

  @property
  def recurrent(self) -> bool:
    """Whether some layers are recurrent."""
    return self.parts[0].recurrent

  @property
  def irreversible(self) -> bool:
    """Whether calls change state (or sums) that `keep` cannot undo."""
    return self.parts[0].irreversible

  @property
  def offloaded(self) -> bool:
    """Whether layers wait in other memories while others run."""
    return any(part.offloaded for part in self.parts)

  @property
  def asks_whole(self) -> bool:
    """Whether a question must be one call: its tokens select together."""
    return False

  @property
  def lost(self) -> bool:
    """Whether some of the arrays were donated to a program."""
    return donated(self)

  def nbytes(self) -> int:
    """Total bytes of all shards, in all memories."""
    return sum(x.nbytes for x in jax.tree.leaves(self))

  @property
  def disk_bytes(self) -> int:
    """Total bytes of files of layers on disk."""
    return sum(part.disk_bytes for part in self.parts)

  @property
  def passing_bytes(self) -> int:
    """Bytes on a device for keys of layers that are stored elsewhere."""
    return max((part.passing_bytes for part in self.parts), default=0)

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of tokens that still fit, int [B, R]; None under a trace."""
    return self.parts[0].free()

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Check that tokens fit; see `KVCache.check`."""
    for part in self.parts:
      part.check(batch, tokens, replicated=replicated, sees=sees)

  def check_coords(self, coords: CallCoords) -> None:
    refuse_documents(self.kind, self.shapes, coords)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self: CacheT, at: Coords, *, replicated: bool, sees: bool
  ) -> CacheT:
    return self.each_part(
      lambda part: part.allocate(at, replicated=replicated, sees=sees)
    )

  def updated(self: CacheT, slots: tuple[Any, ...]) -> CacheT:
    """Return the cache with the slots that the layers returned."""
    return self.each_part(lambda part: part.updated(slots))

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def steps(self) -> int:
    """Number of tokens that can be appended before `flush` is due."""
    return min(part.steps() for part in self.parts)

  def evict(self: CacheT) -> CacheT:
    """Move or drop tokens by the kind's policy; see `EvictingCache.evict`."""
    return self.each_part(lambda part: part.evict())

  def flush(self: CacheT, rows: Bool[np.ndarray, " B"] | None = None) -> CacheT:
    """Make room for more tokens; see `EvictingCache.flush`."""
    return self.each_part(lambda part, x: part.flush(x), rows)

  def with_room(self: CacheT, taken: Int[np.ndarray, "B R"] | int) -> CacheT:
    """Make room for a call's tokens; see `EvictingCache.with_room`."""
    return self.each_part(lambda part, x: part.with_room(x), taken)

  def with_slack(self: CacheT, tokens: int) -> CacheT:
    """Make room to record more queries; see `EvictingCache.with_slack`."""
    return self.each_part(lambda part: part.with_slack(tokens))

  def with_states(self: CacheT, states: EncoderStates | None) -> CacheT:
    """Attach states for cross-attention; see `KVCache.with_states`."""
    return self.each_part(lambda part: part.with_states(states))

  def truncate(self: CacheT, length: Ends, most: int | None = None) -> CacheT:
    """Drop the tokens at positions from `length` on; see `KVCache.truncate`."""
    ends = self.row_ends(length)
    return self.each_part(lambda part, end: part.truncate(end, most), ends)

  def row_ends(self, length: Ends) -> Int[Array, " B"]:
    """Positions of an int, or of int [B], for all rows."""
    ends = jnp.asarray(length, jnp.int32).reshape(-1)
    return jnp.broadcast_to(ends, (self.batch,))

  def keep(self, kept: Bool[Array | np.ndarray, "B T"]) -> Any:
    """Keep only the tokens in `kept` of the last call; see `KVCache.keep`."""
    return self.each_part(lambda part, x: part.keep(x), kept)

  def keep_first(
    self, count: Int[Array | np.ndarray, " B"], tokens: int
  ) -> Any:
    """Keep the first `count` of the last call's tokens, in each row.

    See `KVCache.keep_first`.
    """
    return self.each_part(lambda part, x: part.keep_first(x, tokens), count)

  def snapshot(self) -> PyTree:
    """Save the state for `restore`; later calls may donate the cache."""
    if not self.changing:
      raise NotImplementedError(f"{type(self).__name__} names nothing to save")
    fields = {name: getattr(self, name) for name in self.changing}
    return jax.tree.map(jnp.copy, fields)

  def restore(self: CacheT, snapshot: PyTree) -> CacheT:
    """Restore the state of a snapshot of this cache."""
    cache: Any = self
    return dataclasses.replace(cache, **jax.tree.map(jnp.copy, snapshot))

  def call_state(self, tokens: int) -> PyTree:
    """Save what a call changes besides new slots, for `undo_call`.

    No key or value is copied.

    Args:
      tokens: Number of tokens of the call, with windowed layers at most their
        `slack`.

    Raises:
      OptionError: If windowed layers could not take so many back.
    """
    return tuple(part.call_state(tokens) for part in self.parts)

  def undo_call(self: CacheT, state: PyTree) -> CacheT:
    """Undo the last call, whose tokens were the same on all shards.

    Args:
      state: Result of `call_state` before the call.
    """
    states = iter(state)
    return self.each_part(lambda part: part.undo_call(next(states)))

  def reset(self: CacheT, rows: RowIndices) -> CacheT:
    """Empty these rows, int [n]; the others stay."""
    return self.each_part(lambda part: part.reset(rows))

  def take(self: CacheT, examples: RowIndices) -> CacheT:
    """Gather these rows, int [B'], with repetition.

    For beam search, or for several continuations of one prefix.

    Raises:
      ShapeError: If `examples` is not a list of row indices.
    """
    rows = row_indices(examples, self.batch, traced=True)
    cache: Any = self.each_part(lambda part: part.take(rows))
    fields = {
      name: take_rows(getattr(self, name), rows, axis)
      for name, axis in self.row_axes.items()
    }
    return dataclasses.replace(cache, **fields)

  def rows_replaced(
    self, rows: Int[np.ndarray, " n"], other: ModelCache
  ) -> dict[str, Any]:
    """Fields with rows replaced by those of another cache, for `insert`."""
    return {
      name: replace_rows(getattr(self, name), rows, getattr(other, name), axis)
      for name, axis in self.row_axes.items()
    }

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """Copy out a row's tokens; see `KVCache.export`."""
    return self.parts[0].export(row, start, stop)

  def load(
    self: CacheT, row: int, blocks: Blocks, at: Coords | None = None
  ) -> CacheT:
    """Append exported tokens to a row; see `KVCache.load`."""
    return self.each_part(lambda part: part.load(row, blocks, at))


def refused(doing: str, remedy: str) -> Callable[..., Any]:
  """A method of storage that cannot do this: it raises an OptionError."""

  def refuse(self: ModelCache, *args: Any, **options: Any) -> Any:
    raise OptionError(
      "cache", f"{doing} of {self.described}", self.instead, remedy
    )

  return refuse


def refuse_unseen(sees: bool, tokens: int) -> None:
  """Refuse a call that does not attend to the tokens in the cache.

  Raises:
    OptionError: If there are `tokens` and the call does not see them.
  """
  if tokens and not sees:
    raise OptionError(
      "attend",
      f"ContextParallel() behind {tokens} tokens in the cache",
      "an empty cache, for the old tokens would not be seen",
      "pass attend=CachedAttention(), or leave it out",
    )


def refuse_documents(
  kind: CacheConfig, shapes: Sequence[Any], coords: CallCoords
) -> None:
  """Refuse documents that see each other where their order decides what stays.

  Raises:
    OptionError: If the cache drops tokens and documents see each other.
  """
  segments = coords.segments
  if coords.seg is None or segments == SameSegment():
    return
  windows = any(getattr(shape, "reach", None) for shape in shapes)
  if kind.evicting or (kind.layout.windowed and windows):
    raise OptionError(
      "cache",
      f"kind {kind} with segments={segments}",
      "a cache that keeps all tokens: what others drop depends on which "
      "documents see each other",
      'pass model.init_cache(..., kind="dense")',
    )

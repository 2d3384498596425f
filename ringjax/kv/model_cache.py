"""Base class of the caches of a model, whatever stores their keys.

A `ModelCache` that holds other caches (`part_field`: an open one for the newest
tokens, or one for each group of rows) does as they do; a kind of storage
overrides what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax.errors import OptionError, ShapeError
from ringjax.kv.base import CallCache, CallCoords, Ends, RowIndices, donated
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_report import CacheReport, report
from ringjax.kv.cache_rows import replace_rows, row_indices, take_rows
from ringjax.kv.encoder_states import EncoderStates, attached
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
from ringjax.kv.storage.refusals import (
  refuse_documents,
  refuse_shared_positions,
  refused,
)
from ringjax.ops.mask import Coords
from ringjax.parallel import chips
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.offload.cache_files import CacheFiles
  from ringjax.kv.storage.exported_blocks import Blocks
  from ringjax.kv.storage.slots import ContiguousSlots


CacheT = TypeVar("CacheT", bound="ModelCache")


class ModelCache(CallCache):
  """A model's keys and values between calls, and during them.

  A kind of storage has `kind`, its `CacheConfig`, and what `CallCache` names.
  It holds parts, or a slot table `held`. Its own six methods are `spec` with
  `allocated`, `allocate` with `updated`, `layer`, `free`, `changed` and
  `export` with `load`; the class variables say what else it is and lacks.
  """

  # Field with the caches that it holds, to which calls append; "" for none.
  part_field: ClassVar[str] = ""

  # What an error calls this storage, and storage that does what it refuses.
  described: ClassVar[str] = "a cache"
  instead: ClassVar[str] = "a cache on the devices"
  # Changes that it refuses: what they would do, and what to do instead.
  refuses: ClassVar[Mapping[type, tuple[str, str]]] = {}
  # Methods that it lacks, and what to do instead.
  lacks: ClassVar[Mapping[str, str]] = {}
  # Fields whose arrays have rows, and the axis of the rows.
  row_axes: ClassVar[Mapping[str, int]] = {}
  # Fields that calls replace: a snapshot is a copy of them; () for all.
  changing: ClassVar[tuple[str, ...]] = ()
  # Own arrays, besides the parts, that a call changes for tokens to come.
  call_fields: ClassVar[tuple[str, ...]] = ()

  if TYPE_CHECKING:

    @property
    def kind(self) -> CacheConfig: ...
    @property
    def held(self) -> ContiguousSlots: ...

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    for name, remedy in cls.__dict__.get("lacks", {}).items():
      setattr(cls, name, refused(name, remedy))

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
    held = getattr(self, self.part_field) if self.part_field else ()
    return held if isinstance(held, tuple) else (held,)

  def with_parts(self: CacheT, parts: Iterable[Any]) -> CacheT:
    """Replace the parts by others."""
    if not self.part_field:
      return self
    cache: Any = self
    several = isinstance(getattr(self, self.part_field), tuple)
    new = tuple(parts) if several else next(iter(parts))
    return dataclasses.replace(cache, **{self.part_field: new})

  def split(
    self, x: Shaped[Array | np.ndarray, " ..."] | np.integer | int | None
  ) -> list[Any]:
    """Split an array of all rows by part; repeat one that is for all rows."""
    sizes = [part.batch for part in self.parts]
    if isinstance(x, int | np.integer | None) or x.shape[:1] != (sum(sizes),):
      return [x] * len(sizes)
    ends = np.cumsum(sizes).tolist()
    return [x[a:b] for a, b in zip([0, *ends], ends, strict=False)]

  def by_part(self, *rows: Any) -> Iterable[tuple[Any, ...]]:
    """Each part, with its rows of each array."""
    if len(self.parts) == 1:
      return [(self.parts[0], *rows)]
    return zip(self.parts, *map(self.split, rows), strict=True)

  def each_part(self: CacheT, f: Callable[..., Any], *rows: Any) -> CacheT:
    """Replace each part by f(part, *its rows of each array)."""
    return self.with_parts(f(*part) for part in self.by_part(*rows))

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  @property
  def front(self) -> ContiguousSlots | ModelCache:
    """Slot table or part whose sizes are those of the cache."""
    return self.parts[0] if self.part_field else self.held

  @property
  def mesh(self) -> Mesh | None:
    return self.parts[0].mesh

  @property
  def axis(self) -> str | None:
    return self.parts[0].axis

  @property
  def shards(self) -> int:
    """Number of shards of the sequence."""
    return self.front.shards

  @property
  def batch(self) -> int:
    """Number of rows, B."""
    return sum(part.batch for part in self.parts or (self.held,))

  @property
  def capacity(self) -> int:
    """Number of tokens that fit in a row."""
    return self.front.capacity

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
    lengths = [part.length for part in self.parts or (self.held,)]
    return lengths[0] if len(lengths) == 1 else jnp.concatenate(lengths)

  @property
  def recurrent(self) -> bool:
    """Whether some layers are recurrent."""
    return any(isinstance(shape, StateShape) for shape in self.shapes)

  @property
  def irreversible(self) -> bool:
    """Whether calls change state (or sums) that `keep` cannot undo."""
    return self.recurrent or any(part.irreversible for part in self.parts)

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

  def explain(
    self,
    machine: chips.Machine | str | None = None,
    *,
    tokens: int | None = None,
    weights: int | float = 0,
    host_bandwidth: int | float = chips.HOST_LINK.bandwidth,
  ) -> CacheReport:
    """Report memory by part, and the decode speed that it allows.

    Args:
      machine: Hardware to assume, from `ringjax.parallel.chips.MACHINES`.
        Default: the current devices.
      tokens: Tokens per row that a decode step reads; default: all that fit.
        Those that the devices have no room for come from the hosts.
      weights: Bytes of weights per device that a step also reads.
      host_bandwidth: Host-to-device bandwidth in bytes/s, for steps that read
        keys from the hosts; the tables of machines do not include it.

    Returns:
      A report that prints as a table.

    Raises:
      OptionError: If the machine is unknown, more tokens than fit, or a step
        reads what the cache holds instead of `tokens` of each row.
    """
    if tokens is not None and self.parts and self.kind.tier.device is None:
      raise OptionError(
        "tokens",
        f"{tokens}, for {self.described} of kind {self.kind}",
        "None: a step reads what this cache holds",
        "leave it out",
      )
    return report(self, machine, tokens, weights, host_bandwidth)

  def free(self) -> Int[np.ndarray, "B R"] | None:
    """Number of tokens that still fit, int [B, R]; None under a trace."""
    per_part = [part.free() for part in self.parts]
    concrete = [x for x in per_part if x is not None]
    return np.concatenate(concrete) if len(concrete) == len(per_part) else None

  def check(
    self, batch: int, tokens: int, *, replicated: bool, sees: bool
  ) -> None:
    """Check that tokens [B, T] fit.

    Under a trace the contents are unknown: only shapes are checked, and the
    caller must ensure that the tokens fit.

    Args:
      batch: Number of rows, B.
      tokens: Number of tokens per row, T.
      replicated: Whether the tokens are the same on all shards.
      sees: Whether the call attends to tokens already in the cache.

    Raises:
      ShapeError: If the batch differs, or the shards do not divide the tokens.
      PromptError: If there are too few free slots.
      OptionError: If the call would not see the tokens in the cache, or the
        buffers were donated.
    """
    for part in self.parts:
      rows = part.batch if batch == self.batch else batch
      part.check(rows, tokens, replicated=replicated, sees=sees)

  def check_coords(self, coords: CallCoords) -> None:
    """Refuse tokens whose coordinates the kind of cache cannot keep apart.

    Traced arrays are not checked.
    """
    for part, pos, seg, parents in self.by_part(*coords[:3]):
      part.check_coords(coords._replace(pos=pos, seg=seg, parents=parents))
    refuse_documents(self.kind, self.shapes, coords)
    if self.kind.policy is not None and self.kind.policy.marks:
      refuse_shared_positions(self.kind, self.capacity, coords)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self: CacheT, at: Coords, *, replicated: bool, sees: bool
  ) -> CacheT:
    return self.each_part(
      lambda part: part.allocate(at, replicated=replicated, sees=sees)
    )

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    return self.parts[0].layer(kind, slots, index)

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
    if not self.part_field:
      return self.with_room(1)
    return self.each_part(lambda part, x: part.flush(x), rows)

  def with_room(self: CacheT, taken: Int[np.ndarray, "B R"] | int) -> CacheT:
    """Make room for a call's tokens; see `EvictingCache.with_room`."""
    return self.each_part(lambda part, x: part.with_room(x), taken)

  def with_slack(self: CacheT, tokens: int) -> CacheT:
    """Make room to record more queries; see `EvictingCache.with_slack`."""
    return self.each_part(lambda part: part.with_slack(tokens))

  def with_states(self: CacheT, states: EncoderStates | None) -> CacheT:
    """Attach copies of encoder states for cross-attention of later calls.

    Tokens already in the cache were computed without them.

    Args:
      states: Encoder states of B rows, by `rj.models.cepe.encode`, or None.

    Raises:
      InputTypeError: If `states` is of another type.
      ShapeError: If its batch differs.
    """
    if self.part_field:
      return self.each_part(lambda part: part.with_states(states))
    cache: Any = self
    if states is not None:
      states = attached(states, self.batch, self.shards, self.held.at.pos)
    return dataclasses.replace(cache, states=states)

  def truncate(self: CacheT, length: Ends, most: int | None = None) -> CacheT:
    """Drop the tokens at positions from `length` on, an int or int [B].

    Slots after the last remaining token become free.

    Args:
      length: Number of tokens to keep; may be traced, with ring buffers only
        if `most` is given.
      most: Upper bound of the tokens dropped per row, known to the caller.

    Raises:
      OptionError: If a layer is recurrent, or if more than the last `slack`
        tokens of a ring buffer would be dropped.
    """
    return self.changed(Truncate(self.row_ends(length), most))

  def row_ends(self, length: Ends) -> Int[Array, " B"]:
    """Positions of an int, or of int [B], for all rows."""
    ends = jnp.asarray(length, jnp.int32).reshape(-1)
    return jnp.broadcast_to(ends, (self.batch,))

  def keep(self: CacheT, kept: Bool[Array | np.ndarray, "B T"]) -> CacheT:
    """Keep only the tokens in `kept`, bool [B, T], of the last call's T tokens.

    The others are dropped as if never appended, for instance rejected draft
    tokens. The call's tokens must have been the same on all shards. Kept tokens
    move to the first slots of the call, in place if the cache is donated.

    Raises:
      OptionError: If a layer is recurrent: use `snapshot` and `restore`.
      ShapeError: If `kept` is not a bool for each token.
    """
    keep_mask = jnp.asarray(kept)
    by_row = keep_mask.ndim == 2 and keep_mask.shape[0] == self.batch
    if keep_mask.dtype != bool or not by_row:
      raise ShapeError(
        "kept",
        f"{keep_mask.dtype} {list(keep_mask.shape)}",
        f"bool [{self.batch}, T], a value for each token of the last call",
        "pass jnp.arange(T)[None] < accepted[:, None], for instance",
      )
    return self.changed(KeepTokens(keep_mask))

  def keep_first(
    self: CacheT, count: Int[Array | np.ndarray, " B"], tokens: int
  ) -> CacheT:
    """Keep only the first `count` of the last call's tokens, in each row.

    As `keep` with these tokens, but no token moves: the cursors go back, and
    the slots after them are empty.

    Args:
      count: Number of tokens to keep, int [B].
      tokens: Number of tokens of the last call, T.

    Raises:
      OptionError: If a layer is recurrent: use `snapshot` and `restore`.
      ShapeError: If `count` is not an integer for each row.
    """
    count = jnp.asarray(count)
    integers = jnp.issubdtype(count.dtype, jnp.integer)
    if not integers or count.shape != (self.batch,):
      raise ShapeError(
        "count",
        f"{count.dtype} {list(count.shape)}",
        f"int [{self.batch}], a number of tokens for each row",
        "pass jnp.sum(accepted, 1), for instance",
      )
    return self.changed(KeepFirst(count, tokens))

  def reset(self: CacheT, rows: RowIndices) -> CacheT:
    """Empty these rows, int [n]; the others stay.

    Raises:
      ShapeError: If `rows` is not a list of row indices.
    """
    return self.changed(ResetRows(row_indices(rows, self.batch)))

  def take(self: CacheT, examples: RowIndices) -> CacheT:
    """Gather these rows, int [B'], with repetition.

    For beam search, or for several continuations of one prefix.

    Raises:
      ShapeError: If `examples` is not a list of row indices.
    """
    rows = row_indices(examples, self.batch, traced=True)
    return self.changed(TakeRows(rows))

  def insert(self: CacheT, rows: RowIndices, other: CacheT) -> CacheT:
    """Replace `rows`, int [n], by the rows of another cache.

    Raises:
      OptionError: If model, capacity, kind or mesh of the caches differ.
      ShapeError: If `rows` are not as many as the other cache has.
    """
    return self.changed(InsertRows(row_indices(rows, self.batch), other))

  def changed(self: CacheT, change: CacheChange) -> CacheT:
    """Return the cache after a change between calls.

    The parts change, and of the own arrays the rows of `row_axes`. A kind that
    keeps more of a token or row than its parts do overrides this.
    """
    if type(change) in self.refuses:
      refused(*self.refuses[type(change)])(self)
    if isinstance(change, InsertRows):
      if type(change.source) is not type(self):
        raise OptionError(
          "other",
          f"a {type(change.source).__name__}, of kind {change.source.kind}",
          f"a {type(self).__name__}, as the rows it replaces are in",
          "make both with model.init_cache and the same kind",
        )
      parts = iter(change.source.parts)
      insert = lambda part: part.changed(InsertRows(change.rows, next(parts)))
      inserted: Any = self.each_part(insert)
      fields = self.rows_replaced(change.rows, change.source)
      return dataclasses.replace(inserted, **fields)
    if isinstance(change, TakeRows):
      gathered: Any = self.each_part(lambda part: part.changed(change))
      fields = {
        name: take_rows(getattr(self, name), change.rows, axis)
        for name, axis in self.row_axes.items()
      }
      return dataclasses.replace(gathered, **fields)
    if isinstance(change, ResetRows):
      return self.each_part(lambda part: part.changed(change))
    # The first field of a change of tokens has an entry for each row.
    by_row, *others = change
    make: Callable[..., CacheChange] = type(change)
    return self.each_part(
      lambda part, x: part.changed(make(x, *others)), by_row
    )

  def rows_replaced(
    self, rows: Int[np.ndarray, " n"], other: ModelCache
  ) -> dict[str, Any]:
    """Own fields with rows replaced by those of another cache."""
    return {
      name: replace_rows(getattr(self, name), rows, getattr(other, name), axis)
      for name, axis in self.row_axes.items()
    }

  def snapshot(self) -> PyTree:
    """Save the state for `restore`; later calls may donate the cache."""
    if not self.changing:
      return jax.tree.map(jnp.copy, self)
    fields = {name: getattr(self, name) for name in self.changing}
    return jax.tree.map(jnp.copy, fields)

  def restore(self: CacheT, snapshot: PyTree) -> CacheT:
    """Restore the state of a snapshot of this cache."""
    copied = jax.tree.map(jnp.copy, snapshot)
    if not self.changing:
      return copied
    cache: Any = self
    return dataclasses.replace(cache, **copied)

  def call_state(self, tokens: int) -> PyTree:
    """Save what a call changes besides new slots, for `undo_call`.

    No key or value is copied.

    Args:
      tokens: Number of tokens of the call, with windowed layers at most their
        `slack`.

    Raises:
      OptionError: If windowed layers could not take so many back.
    """
    fields = {name: getattr(self, name) for name in self.call_fields}
    parts = tuple(part.call_state(tokens) for part in self.parts)
    return parts, jax.tree.map(jnp.copy, fields)

  def undo_call(self: CacheT, state: PyTree) -> CacheT:
    """Undo the last call, whose tokens were the same on all shards.

    Args:
      state: Result of `call_state` before the call.
    """
    parts, fields = iter(state[0]), jax.tree.map(jnp.copy, state[1])
    cache: Any = self.each_part(lambda part: part.undo_call(next(parts)))
    return dataclasses.replace(cache, **fields)

  def export(self, row: int, start: int, stop: int) -> Blocks:
    """Copy out a row's tokens at positions from `start` to `stop` - 1.

    Raises:
      OptionError: If a layer is recurrent: it has no state per token.
      PromptError: If the row lacks some of these positions; ring buffers need
        only the last `reach` of them.
    """
    return self.parts[0].export(row, start, stop)

  def load(
    self: CacheT, row: int, blocks: Blocks, at: Coords | None = None
  ) -> CacheT:
    """Append exported tokens to a row, bit for bit.

    Args:
      row: Index of the row in the cache.
      blocks: Tokens by `export` of a cache of the same model and kind.
      at: New coordinates [n]; rotated keys must keep their positions.

    Raises:
      OptionError: If kind or model differ, or rotated keys would move.
      PromptError: If there are too few free slots.
    """
    return self.each_part(lambda part: part.load(row, blocks, at))

"""Base class of the caches of a model, whatever stores their keys.

A `ModelCache` that holds other caches (`part_field`: an open one for the newest
tokens, or one for each group of rows) does as they do. A kind of storage
overrides at most six methods; the rest follows from them and from values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from ringjax.errors import OptionError, ShapeError
from ringjax.kv.base import (
  CallCoords,
  DistantSlots,
  Ends,
  RowIndices,
  donated,
)
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_report import CacheReport, report
from ringjax.kv.cache_rows import replace_rows, row_indices, take_rows
from ringjax.kv.composed.cache_of_parts import CacheOfParts
from ringjax.kv.encoder_states import EncoderStates, attached
from ringjax.kv.state import StateShape
from ringjax.kv.storage import changes
from ringjax.kv.storage.refusals import (
  check_call,
  refuse_beyond_slack,
  refuse_documents,
  refuse_gaps,
  refuse_shared_positions,
  refused,
)
from ringjax.kv.storage.saved_fields import saved_fields, with_saved
from ringjax.ops.mask import Coords
from ringjax.parallel import chips
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.eviction.peak_attention import Repeated
  from ringjax.kv.offload.cache_files import CacheFiles
  from ringjax.kv.storage.exported_blocks import Blocks
  from ringjax.kv.storage.growth import Growth
  from ringjax.kv.storage.slots import ContiguousSlots
  from ringjax.kv.storage.window import WindowSlots


CacheT = TypeVar("CacheT", bound="ModelCache")


class ModelCache(CacheOfParts):
  """A model's keys and values between calls, and during them.

  A kind of storage has `kind`, its `CacheConfig`, and what `CallCache` names.
  It holds parts, or a slot table `held`. Besides its constructor `spec` it
  overrides no more than six methods:
    `allocated`: create the arrays of its specs.
    `allocate`: allocate slots for a call's tokens.
    `layer`: a layer's part of a call.
    `free`: number of tokens that still fit.
    `changed`: change tokens, rows or room between calls, see `CacheChange`.
    `export`: copy tokens of a row out.
  The class variables say what else it is, has and lacks.
  """

  # Field of tokens that are in no part: a cache, a slot table, or the
  # positions at which they end, int32 [B]; "" for none.
  older: ClassVar[str] = ""
  # Whether its part grows by `with_room` and shrinks by `evict`.
  resizes: ClassVar[bool] = False
  # Own fields with an entry for each kind of layer, which layers return.
  layer_fields: ClassVar[tuple[str, ...]] = ()

  # What an error calls this storage, and storage that does what it refuses.
  described: ClassVar[str] = "a cache"
  instead: ClassVar[str] = "a cache on the devices"
  remake: ClassVar[str] = "make a new one with model.init_cache"
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

  # -------------------------------------------------------------------------
  # Size and contents
  # -------------------------------------------------------------------------

  @property
  def front(self) -> ContiguousSlots | ModelCache:
    """Slot table or part whose sizes are those of the cache."""
    return self.parts[0] if self.part_field else self.held

  @property
  def rings(self) -> tuple[WindowSlots, ...]:
    """Slot tables of own ring buffers."""
    return ()

  @property
  def growth(self) -> Growth | None:
    """Growth step and limit of own slots; None if their number is fixed."""
    return None

  @property
  def row_groups(self) -> Any:
    grouped = self.part_field and getattr(self, self.part_field) is self.parts
    return self if grouped else None

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
    # More fit than the part has slots where older tokens are elsewhere.
    return getattr(self, "limit", None) or self.front.capacity

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
    length = lengths[0] if len(lengths) == 1 else jnp.concatenate(lengths)
    older = self.older_ends
    return length if older is None else jnp.maximum(length, older)

  @property
  def older_ends(self) -> Int[Array, " B"] | None:
    """Position after each row's last token of `older`, int32 [B], or None."""
    older = getattr(self, self.older) if self.older else None
    return getattr(older, "length", older)

  @property
  def recurrent(self) -> bool:
    """Whether some layers are recurrent."""
    return any(isinstance(shape, StateShape) for shape in self.shapes)

  @property
  def irreversible(self) -> bool:
    """Whether calls change state (or sums) that `keep` cannot undo."""
    moments = self.kind.policy is not None and self.kind.policy.moments
    return self.recurrent or moments

  @property
  def distant(self) -> tuple[DistantSlots, ...]:
    """Kinds of layers whose keys calls copy to the devices, layer by layer."""
    if self.parts:
      return tuple(itertools.chain(*(part.distant for part in self.parts)))
    return tuple(x for x in self.slots if isinstance(x, DistantSlots))

  @property
  def offloaded(self) -> bool:
    """Whether layers wait in other memories while others run."""
    return bool(self.distant)

  @property
  def asks_whole(self) -> bool:
    """Whether a question must be one call: its tokens select together."""
    return getattr(getattr(self, "weigh", None), "together", False)

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
    return sum(x.disk_bytes for x in self.distant)

  @property
  def passing_bytes(self) -> int:
    """Bytes on a device for keys of layers that are stored elsewhere."""
    # A layer as it is stored, one as it is read, and the one in flight.
    return 3 * max((x.layer_bytes for x in self.distant), default=0)

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
    check_call(self, batch, tokens, replicated=replicated, sees=sees)

  def check_coords(self, coords: CallCoords) -> None:
    """Refuse tokens whose coordinates the kind of cache cannot keep apart.

    Traced arrays are not checked.
    """
    for part, pos, seg, parents in self.by_part(*coords[:3]):
      part.check_coords(coords._replace(pos=pos, seg=seg, parents=parents))
    refuse_documents(self.kind, self.shapes, coords)
    if not self.parts:
      refuse_gaps(self, coords)
    if self.kind.policy is not None and self.kind.policy.marks:
      refuse_shared_positions(self.kind, self.capacity, coords)

  # -------------------------------------------------------------------------
  # A call
  # -------------------------------------------------------------------------

  def allocate(
    self: CacheT,
    at: Coords,
    *,
    replicated: bool,
    sees: bool,
    tokens: Int[Array, "B T"] | None = None,
  ) -> CacheT:
    call = dict(replicated=replicated, sees=sees, tokens=tokens)
    return self.each_part(lambda part: part.allocate(at, **call))

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    return self.parts[0].layer(kind, slots, index)

  def updated(self: CacheT, slots: tuple[Any, ...]) -> CacheT:
    """Return the cache with the slots that the layers returned."""
    cache: Any = self.each_table(lambda table: table.committed())
    if not self.parts:
      return dataclasses.replace(cache, slots=slots)
    inner, *by_field = (
      zip(*slots, strict=True) if self.layer_fields else (slots,)
    )
    cache = cache.each_part(lambda part: part.updated(inner))
    fields = dict(zip(self.layer_fields, by_field, strict=True))
    return dataclasses.replace(cache, **fields)

  # -------------------------------------------------------------------------
  # Between calls
  # -------------------------------------------------------------------------

  def steps(self) -> int:
    """Number of tokens that can be appended before `flush` is due."""
    if not self.resizes and self.growth is None:
      steps = (part.steps() for part in self.parts)
      return min(steps, default=self.capacity + 1)
    free = self.front.free()
    assert free is not None
    steps, limit = int(free.sum(1).min()), self.kind.most_steps
    # Capped: the number of slots alone depends on the mesh.
    return min(steps, limit) if self.resizes and limit else steps

  def evict(
    self: CacheT,
    repeated: Repeated | None = None,
    rows: Bool[np.ndarray, " B"] | None = None,
    ended: Bool[np.ndarray, " B"] | None = None,
  ) -> CacheT:
    """Drop the tokens that the policy does not keep; move others into pages.

    A cache with a part in host memory moves its older tokens there, of all
    rows, and shrinks the part on the devices. Its blocks are written in place:
    do not use the old cache again, nor others that share its blocks; `take`
    returns a cache with copied blocks.

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
    num_parts = len(self.parts)
    if repeated is not None and (num_parts > 1 or not self.kind.evicting):
      raise OptionError(
        "repeated",
        f"scores, for {self.described} of kind {self.kind}",
        "a cache of one group of rows, whose policy repeats the context",
        "leave it out, or make the cache with kind='kvzip'",
      )
    return self.changed(changes.Evict(repeated, rows, ended))

  def flush(self: CacheT, rows: Bool[np.ndarray, " B"] | None = None) -> CacheT:
    """Make room for more tokens, by `evict` if the kind moves or drops some.

    With a policy that repeats the context, all tokens are kept.

    Args:
      rows: Rows to evict from, bool [B]. Default: all.
    """
    return self.changed(changes.Flush(rows))

  def with_room(self: CacheT, taken: Int[np.ndarray, "B R"] | int) -> CacheT:
    """Grow the arrays so that a call fits; older tokens do not change.

    Blocks until the programs that fill the cache are done. A cache of fixed
    capacity stays as it is.

    Args:
      taken: Number of slots that the call takes on each shard, int [B, R]; an
        int for tokens that are the same on all shards.
    """
    return self.changed(changes.MakeRoom(taken))

  def with_slack(self: CacheT, tokens: int) -> CacheT:
    """Record `tokens` more queries than the policy looks at.

    Then up to that many tokens of a call can be taken back without a trace;
    `flush` and `evict` drop the additional records.
    """
    return self.changed(changes.RecordMore(tokens))

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
    return self.changed(changes.Truncate(self.row_ends(length), most))

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
    return self.changed(changes.KeepTokens(keep_mask))

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
    return self.changed(changes.KeepFirst(count, tokens))

  def reset(self: CacheT, rows: RowIndices) -> CacheT:
    """Empty these rows, int [n]; the others stay.

    Raises:
      ShapeError: If `rows` is not a list of row indices.
    """
    return self.changed(changes.ResetRows(row_indices(rows, self.batch)))

  def take(self: CacheT, examples: RowIndices) -> CacheT:
    """Gather these rows, int [B'], with repetition.

    For beam search, or for several continuations of one prefix.

    Raises:
      ShapeError: If `examples` is not a list of row indices.
    """
    rows = row_indices(examples, self.batch, traced=True)
    return self.changed(changes.TakeRows(rows))

  def insert(self: CacheT, rows: RowIndices, other: CacheT) -> CacheT:
    """Replace `rows`, int [n], by the rows of another cache.

    Raises:
      OptionError: If model, capacity, kind or mesh of the caches differ.
      ShapeError: If `rows` are not as many as the other cache has.
    """
    return self.changed(
      changes.InsertRows(row_indices(rows, self.batch), other)
    )

  def changed(self: CacheT, change: changes.CacheChange) -> CacheT:
    """Return the cache after a change between calls.

    The parts change, and of the own arrays the rows of `row_axes`. A kind that
    keeps more of a token or row than its parts do overrides this.
    """
    if type(change) in self.refuses:
      refused(*self.refuses[type(change)])(self)
    if isinstance(change, changes.InsertRows):
      if type(change.source) is not type(self):
        raise OptionError(
          "other",
          f"a {type(change.source).__name__}, of kind {change.source.kind}",
          f"a {type(self).__name__}, as the rows it replaces are in",
          "make both with model.init_cache and the same kind",
        )
      parts = iter(change.source.parts)
      insert = lambda part: part.changed(
        changes.InsertRows(change.rows, next(parts))
      )
      inserted: Any = self.each_part(insert)
      fields = self.rows_replaced(change.rows, change.source)
      return dataclasses.replace(inserted, **fields)
    if isinstance(change, changes.TakeRows):
      gathered: Any = self.each_part(lambda part: part.changed(change))
      fields = {
        name: take_rows(getattr(self, name), change.rows, axis)
        for name, axis in self.row_axes.items()
      }
      return dataclasses.replace(gathered, **fields)
    make: Callable[..., changes.CacheChange] = type(change)
    return self.each_part(
      lambda part, *fields: part.changed(make(*fields)), *change
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
    return saved_fields(self, self.changing, rings=True)

  def restore(self: CacheT, snapshot: PyTree) -> CacheT:
    """Restore the state of a snapshot of this cache."""
    if not self.changing:
      return jax.tree.map(jnp.copy, snapshot)
    return with_saved(self, snapshot)

  def call_state(self, tokens: int) -> PyTree:
    """Save what a call changes besides new slots, for `undo_call`.

    No key or value is copied.

    Args:
      tokens: Number of tokens of the call, with windowed layers at most their
        `slack`.

    Raises:
      OptionError: If windowed layers could not take so many back.
    """
    refuse_beyond_slack(self, "tokens", tokens)
    parts = tuple(part.call_state(tokens) for part in self.parts)
    return parts, saved_fields(self, self.call_fields, rings=False)

  def undo_call(self: CacheT, state: PyTree) -> CacheT:
    """Undo the last call, whose tokens were the same on all shards.

    Args:
      state: Result of `call_state` before the call.
    """
    parts = iter(state[0])
    cache = self.each_part(lambda part: part.undo_call(next(parts)))
    if not self.parts:
      nothing = jnp.zeros((self.batch,), jnp.int32)
      cache = self.each_table(lambda table: table.kept_first(nothing))
    return with_saved(cache, state[1])

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
    at = blocks.at if at is None else at
    return self.changed(changes.LoadBlocks(row, blocks, at))

"""Changes of a cache between two calls: of its tokens, rows or room.

`ModelCache` has a public method for each change, which checks the arguments.
A kind of storage carries it out in `changed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

if TYPE_CHECKING:
  from ringjax.kv.eviction.peak_attention import Repeated
  from ringjax.kv.model_cache import ModelCache
  from ringjax.kv.storage.exported_blocks import Blocks
  from ringjax.ops.mask import Coords


class Truncate(NamedTuple):
  """Drop the tokens at positions from an end on.

  Fields:
    end: First position to drop of each row, int32 [B].
    most_dropped: Upper bound of the tokens dropped per row, or None.
  """

  end: Int[Array, " B"]
  most_dropped: int | None


class KeepTokens(NamedTuple):
  """Keep only some of the last call's tokens, at its first slots.

  Fields:
    keep_mask: Whether a token stays, bool [B, T].
  """

  keep_mask: Bool[Array, "B T"]


class KeepFirst(NamedTuple):
  """Keep only the first of the last call's tokens; none moves.

  Fields:
    count: Number of tokens to keep in each row, int [B].
    tokens: Number of tokens of the last call, T.
  """

  count: Int[Array, " B"]
  tokens: int

  @property
  def keep_mask(self) -> Bool[Array, "B T"]:
    """Whether a token stays, as in `KeepTokens`."""
    index = jnp.arange(self.tokens, dtype=jnp.int32)[None]
    return index < self.count[:, None]


class ResetRows(NamedTuple):
  """Empty some rows; the others stay.

  Fields:
    rows: Indices of the rows, int [n].
  """

  rows: Int[np.ndarray, " n"]


class TakeRows(NamedTuple):
  """Gather rows, with repetition.

  Fields:
    rows: Indices of the rows, int [B'].
  """

  rows: Int[Array, " _"]


class InsertRows(NamedTuple):
  """Replace rows by all rows of another cache of the same class.

  Fields:
    rows: Indices of the rows, int [n].
    source: Cache of n rows.
  """

  rows: Int[np.ndarray, " n"]
  source: ModelCache


class LoadBlocks(NamedTuple):
  """Append exported tokens to a row; see `ModelCache.load`."""

  row: int
  blocks: Blocks
  at: Coords


class MakeRoom(NamedTuple):
  """Enlarge the arrays so that a call fits; see `ModelCache.with_room`."""

  slots: Int[np.ndarray, "B R"] | int


class Evict(NamedTuple):
  """Move or drop tokens by the kind's policy; see `ModelCache.evict`."""

  repeated: Repeated | None = None
  rows: Bool[np.ndarray, " B"] | None = None
  ended: Bool[np.ndarray, " B"] | None = None


class Flush(NamedTuple):
  """Free slots for the next calls' tokens; see `ModelCache.flush`."""

  rows: Bool[np.ndarray, " B"] | None


class RecordMore(NamedTuple):
  """Record more queries than are used; see `ModelCache.with_slack`."""

  queries: int


TokenChange = Truncate | KeepTokens | KeepFirst | LoadBlocks
RowChange = ResetRows | TakeRows | InsertRows
RoomChange = MakeRoom | Evict | Flush | RecordMore
CacheChange = TokenChange | RowChange | RoomChange

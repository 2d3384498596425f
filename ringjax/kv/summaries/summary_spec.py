"""Arrays of the summaries of layers of one kind.

Guarantees: window n of a row ends with its position (n + 1) stride - 1, and the
summary is written by the call with that token. Tokens that are dropped leave it
as it is, and until the window has ended again no query sees it: a cache that
goes back has nothing to restore.
Memory: L B K (H + J) float32 numbers for every `stride` slots of a row.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Float

from ringjax.kv.base import CacheSpec
from ringjax.ops.attention.cached.summaries.window_sums import WindowSizes
from ringjax.ops.softmax import wide_dtype
from ringjax.typing import ArrayLeaf


class SummarySlots(NamedTuple):
  """Summaries of the layers of one kind.

  Fields:
    k: Sums of keys, [L, B, K, C, H], or [L, N, K, E, H] in N pages of a pool.
    v: Sums of values, [L, B, K, C, J]; of size 0 for sums of keys alone.
  """

  k: Float[ArrayLeaf, "L _ K _ H"]
  v: Float[ArrayLeaf, "L _ K _ J"]


@dataclasses.dataclass(frozen=True)
class SummarySpec:
  """Shape of the summaries of the layers of one kind.

  Attributes:
    layers: Number of layers that share the array, L.
    heads: Number of KV heads, K.
    key: Head dim of the keys, H.
    value: Head dim of the values, J; 0 where values have no summary.
    sizes: Sizes of the windows.
    fixed: Whether the rotation of a stored key never changes, so that keys that
      are stored unrotated have summaries, too.
    which: Indices of the layers in the model.
    of_index: Whether keys are those of an index, one head that no mesh axis
      shards.
  """

  layers: int
  heads: int
  key: int
  value: int
  sizes: WindowSizes
  fixed: bool = True
  which: tuple[int, ...] = ()
  of_index: bool = False

  # Tokens of the whole context have summaries.
  reach = None

  def numbers(self) -> int:
    """Count the scalars that one token takes, rounded up."""
    total = self.layers * self.heads * (self.key + self.value)
    return -(-total // self.sizes.stride)

  def windows(self, capacity: int, shards: int) -> int:
    """Number of windows for rows of so many slots, in equal parts."""
    count = -(-capacity // self.sizes.stride)
    return -(-count // shards) * shards

  def slots(self, room: CacheSpec) -> SummarySlots:
    """Shapes, dtypes and shardings of the arrays; no codec applies."""
    return self._arrays(room, self.windows(room.capacity, room.shards))

  def page_slots(self, room: CacheSpec) -> SummarySlots:
    """Arrays of a pool: those of the windows that end in each page."""
    return self._arrays(room, -(-room.capacity // self.sizes.stride))

  def _arrays(self, room: CacheSpec, count: int) -> SummarySlots:
    heads = None if self.of_index else "heads"
    names = (None, "batch", heads, "tokens", None)

    def array_spec(dim: int) -> ArrayLeaf:
      shape = (self.layers, room.batch, self.heads, count, dim)
      # Compiled programs return arrays of size 0 replicated.
      return room.like(
        shape, wide_dtype(room.dtype), names if dim else (None,) * 5
      )

    return SummarySlots(array_spec(self.key), array_spec(self.value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySummaries:
  """Summaries of a layer's keys, as a mixer that a cache keeps.

  Attributes:
    kv_heads: Number of KV heads of the layer.
    key: Head dim of the keys.
    value: Head dim of the values; 0 where values have no summary.
    sizes: Sizes of the windows.
    fixed: See `SummarySpec`.
    of_index: See `SummarySpec`.
  """

  kv_heads: int
  key: int
  value: int
  sizes: WindowSizes
  fixed: bool
  of_index: bool = False

  # Number of tokens that a query looks back; None: all.
  reach = None

  def cache_shape(self, layers: int) -> SummarySpec:
    """Shape of what `layers` of this kind keep."""
    return SummarySpec(
      layers,
      self.kv_heads,
      self.key,
      self.value,
      self.sizes,
      self.fixed,
      of_index=self.of_index,
    )

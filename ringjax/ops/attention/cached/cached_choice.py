"""The contract of a choice of keys by the queries of a call.

The same object chooses among the keys of a cache, and among those of the call
that go around the shards of a sequence.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float, Int

from ringjax.ops.softmax import Partial
from ringjax.parallel.call_sharding import MeshAxes

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit
  from ringjax.ops.attention.cached.views import KVView
  from ringjax.ops.attention.sparse.block_selection import ScoredBlocks
  from ringjax.ops.attention.sparse.given import GivenBlocks
  from ringjax.ops.attention.sparse.top_tokens import TopTokens

  IndexSelection = TopTokens | ScoredBlocks


class CachedChoice(abc.ABC):
  """Base class of choices of keys by a call's queries: pytrees."""

  @abc.abstractmethod
  def visited(self) -> tuple[Any, ...]:
    """Objects with `specs` that a visit of a cache gets besides its views.

    They are views of other keys, or weights.
    """

  @abc.abstractmethod
  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> Any:
    """Return the same tree of PartitionSpecs for these mesh axes."""

  @abc.abstractmethod
  def without_keys(self) -> CachedChoice:
    """Return the choice with arrays of the call's queries alone."""

  @abc.abstractmethod
  def chooses(self, tokens: int) -> bool:
    """Whether a query may read fewer than `tokens` keys."""

  def index_selection(self, length: int) -> IndexSelection | None:
    """The selection whose scores learn from attention; None without an index.

    Args:
      length: Number of keys that there are.
    """
    del length
    return None

  def queries(
    self, q: Float[Array, "B T N H"], kv_heads: int
  ) -> Float[Array, "B T _ H"]:
    """Queries with which a visit of a cache reads: those of the layer."""
    del kv_heads
    return q

  def output(
    self, out: Float[Array, "B T _ J"], kv_heads: int
  ) -> Float[Array, "B T N J"]:
    """Output of the layer, from that of the visit's queries."""
    del kv_heads
    return out

  @abc.abstractmethod
  def partial(
    self, visit: CacheVisit, views: Sequence[KVView]
  ) -> Partial | None:
    """Partial of this shard's keys of a cache; None where all keys are read.

    Args:
      visit: Queries of a call.
      views: Views of the layer.
    """


class PositionChoice(CachedChoice):
  """Base class of choices of blocks of positions."""

  @abc.abstractmethod
  def over_shards(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    segments: Int[Array, "#B T"] | None,
    **options: Any,
  ) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"], GivenBlocks]:
    """Attention to the call's own keys, which go around their shards.

    Args:
      q: Queries, in the order of the layout.
      k: Keys.
      v: Values.
      segments: Documents of the tokens, or None.
      **options: Options of `sparse_attention`.

    Returns:
      The output, the log-sum-exp over the chosen keys, and the choice.
    """

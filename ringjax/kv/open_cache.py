"""What caches share whose newest tokens are in an ordinary cache, the open one.

`TieredCache` and `EvictingCache` have older tokens elsewhere. Calls append to
the open cache, whose size is theirs to choose between calls.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import KV, donated
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.cache_report import CacheReport, report
from ringjax.kv.encoder_states import EncoderStates
from ringjax.kv.pages import few_sizes
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.parallel import chips


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithOpenCache:
  """A base class of caches.

  Attributes:
    open: the newest tokens.
    kind: of the cache.
    limit: tokens of a row that it was made for.
  """

  open: KVCache
  kind: CacheKind
  limit: int

  @property
  def mesh(self) -> Mesh | None:
    return self.open.mesh

  @property
  def axis(self) -> str | None:
    return self.open.axis

  @property
  def shards(self) -> int:
    return self.open.shards

  @property
  def batch(self) -> int:
    """Rows, B."""
    return self.open.batch

  @property
  def capacity(self) -> int:
    """Tokens of a row that it was made for."""
    return self.limit

  @property
  def recurrent(self) -> bool:
    return self.open.recurrent

  @property
  def irreversible(self) -> bool:
    """Whether a call leaves what `keep` can't take out; see `KVCache`."""
    return self.open.irreversible

  def explain(
    self,
    machine: chips.Machine | str | None = None,
    *,
    weights: int | float = 0,
  ) -> CacheReport:
    """What it takes now, part by part, and how fast tokens come behind it.

    A step reads what the cache holds; for the arguments see `KVCache.explain`.
    """
    return report(self, machine, None, weights)

  @property
  def states(self) -> EncoderStates | None:
    """Of the rows' contexts, which cross-attention reads; None: none."""
    return self.open.states

  def with_states(self, states: EncoderStates | None) -> Any:
    """With contexts for cross-attention; see `KVCache.with_states`."""
    return dataclasses.replace(self, open=self.open.with_states(states))

  @property
  def shapes(self) -> tuple[Any, ...]:
    return self.open.shapes

  @property
  def dtype(self) -> Any:
    return self.open.dtype

  def mark(self, tokens: Int[Array, "B T"], at: Coords) -> Any:
    """Itself; see `EvictingCache.mark`."""
    del tokens, at
    return self

  @property
  def lost(self) -> bool:
    """Whether some of its arrays were donated to a program."""
    return donated(self)

  def nbytes(self) -> int:
    """Bytes of all shards together, in all memories."""
    return sum(x.nbytes for x in jax.tree.leaves(self))

  def with_room(self, taken: Int[np.ndarray, "B R"] | int) -> Any:
    """With an open cache that a call fits into; older tokens stay as they are.

    Args:
      taken: slots of each shard that the call takes: int [B, R]; an int for
        tokens that are the same on all shards.
    """
    free = self.open.free()
    assert free is not None
    if np.ndim(taken):
      over = int((taken - free).max())
    else:
      over = math.ceil(int((taken - free.sum(1)).max()) / self.shards)
    if over <= 0:
      return self
    return self._sized(few_sizes(self.open.held.local + over))

  def _sized(self, local: int) -> Any:
    """With an open cache of so many slots on each shard, no fewer than now."""
    raise NotImplementedError

  def _same_size(self, other: Any) -> tuple[Any, Any]:
    """Both with open caches of one size, for `insert`.

    Raises:
      OptionError: a cache of another model, capacity, kind or mesh.
    """
    same = lambda c: (c.kind, c.limit, c.shards, c.shapes)
    if not isinstance(other, type(self)) or same(other) != same(self):
      raise OptionError(
        "other",
        f"a cache of kind {other.kind}, {other.capacity} tokens, over "
        f"{other.shards} shard(s)",
        f"one of the same model, kind {self.kind}, capacity {self.limit} and "
        f"{self.shards} shard(s)",
        "make both with model.init_cache and the same arguments but batch",
      )
    local = max(self.open.held.local, other.open.held.local)
    return self._sized(local), other._sized(local)


@dataclasses.dataclass(frozen=True)
class WithOpenLayer:
  """A base class of one layer's part of such a cache.

  Attributes:
    cache: during the call.
    inner: the layer's part of the open cache.
  """

  cache: WithOpenCache
  inner: Any

  @property
  def fresh(self) -> KV | None:
    return self.inner.fresh

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> Any:
    inner = self.inner.append(k, v, at, rotation)
    return dataclasses.replace(self, inner=inner)

  def for_reading(self, rotation: Rotation) -> Any:
    """For a call that appends nothing; see `KVLayer.for_reading`."""
    return dataclasses.replace(self, inner=self.inner.for_reading(rotation))

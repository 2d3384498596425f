"""Base classes of caches around an open cache, a `KVCache` of newest tokens.

Other tokens or layers are stored elsewhere. What a subclass does not override,
the open cache does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ringjax.errors import OptionError
from ringjax.kv.base import KV, CallLayer
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.model_cache import ModelCache
from ringjax.kv.storage import changes
from ringjax.kv.storage.pages import few_sizes
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithOpenCache(ModelCache):
  """Base class of caches around an open one, to which calls append.

  Attributes:
    open: Cache of the newest tokens.
    kind: Kind of the whole cache.
    limit: Maximum number of tokens of a row.
  """

  open: KVCache
  kind: CacheConfig
  limit: int
  part_field: ClassVar[str] = "open"

  @property
  def slots(self) -> tuple[Any, ...]:
    by_field = (getattr(self, name) for name in self.layer_fields)
    slots = self.open.slots
    if not self.layer_fields:
      return slots
    return tuple(zip(slots, *by_field, strict=True))

  @property
  def at(self) -> Coords:
    """Coordinates of all slots, [B, S]: of the older tokens, then the open."""
    # Pages, where heads have different tokens, are not among them.
    if not self.older or self.kind.evicting:
      return self.open.at
    pairs = zip(getattr(self, self.older).at, self.open.at, strict=True)
    return Coords(*(jnp.concatenate(pair, 1) for pair in pairs))

  def tile_trips(self, platform: str) -> float:
    """Trip count of each of the two loops over the open cache's tiles.

    Args:
      platform: Platform whose tiles are counted, as JAX names it.
    """
    return self.open.tile_trips(platform)


class ResizableCache(WithOpenCache):
  """Base class of caches whose open cache changes its size between calls."""

  resizes: ClassVar[bool] = True

  def changed(self, change: changes.CacheChange) -> Any:
    if not isinstance(change, changes.MakeRoom):
      return super().changed(change)
    new_slots: Any = change.slots
    free = self.open.free()
    assert free is not None
    if np.ndim(new_slots):
      missing = int((new_slots - free).max())
    else:
      missing = math.ceil(int((new_slots - free.sum(1)).max()) / self.shards)
    if missing <= 0:
      return self
    return self._sized(few_sizes(self.open.held.local + missing))

  def _sized(self, local: int) -> Any:
    """Resize the open cache to `local` slots on each shard, never fewer."""
    raise NotImplementedError

  def _same_size(self, other: Any) -> tuple[Any, Any]:
    """Resize the open caches of two caches to one size, for `insert`.

    Raises:
      OptionError: If the model, capacity, kind or number of shards differs.
    """
    identity = lambda c: (c.kind, c.limit, c.shards, c.shapes)
    if not isinstance(other, type(self)) or identity(other) != identity(self):
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
class WithOpenLayer(CallLayer):
  """Base class of one layer's part of a cache with an open cache.

  Attributes:
    cache: Cache of the call.
    inner: The layer's part of the open cache.
  """

  cache: WithOpenCache
  inner: Any

  @property
  def slots(self) -> Any:
    return self.inner.slots

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
    """Prepare for a call that appends nothing; see `KVLayer.for_reading`."""
    return dataclasses.replace(self, inner=self.inner.for_reading(rotation))

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    return self.inner.views(apart=apart)

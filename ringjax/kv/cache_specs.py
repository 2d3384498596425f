"""The storage of a cache: which class holds keys of a kind and a placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.typing import DTypeLike

from ringjax.errors import OptionError
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.eviction.evicting import EvictingCache
from ringjax.kv.model_cache import ModelCache
from ringjax.kv.offload.chosen_tiered import ChosenTieredCache
from ringjax.kv.offload.layer_offload import OffloadedCache
from ringjax.kv.offload.tiered import TieredCache
from ringjax.kv.state import StateShape

# Classes of storage, each with whether a kind of cache is stored by it: the
# first one that is. A class of your own goes before them.
STORAGES: list[tuple[Callable[[CacheConfig], bool], Any]] = [
  (lambda kind: kind.tier.hot is not None, ChosenTieredCache),
  (lambda kind: kind.tier.device is not None, TieredCache),
  (lambda kind: kind.evicting, EvictingCache),
]


def storage_of(kind: CacheConfig) -> Any:
  """Class that stores caches of a kind, if all layers are on the devices."""
  return next((cls for stores, cls in STORAGES if stores(kind)), KVCache)


def _refuse_growing(shapes: Sequence[Any], kind: CacheConfig) -> None:
  """Refuse compressed keys in caches that move or drop tokens.

  Raises:
    OptionError: If some layers have them.
  """
  if any(isinstance(x, StateShape) and x.grows for x in shapes):
    raise OptionError(
      "kind",
      f"{kind}, or layers in host memory, for layers with compressed keys",
      "a kind that keeps all tokens on the devices",
      "pass kind='dense', 'windowed' or a codec, and no placement",
    )


def cache_spec(
  shapes: tuple[Any, ...],
  batch: int,
  capacity: int,
  dtype: DTypeLike,
  *,
  kind: CacheConfig,
  tiers: Sequence[str] | None = None,
  **where: Any,
) -> ModelCache:
  """Specs (shapes, dtypes, shardings) of an empty cache; allocates nothing.

  Args:
    kind: Storage format of keys and values.
    tiers: Memory of each layer, from `kv.base.TIERS`; None for the devices.
    **where: Other arguments of `KVCache.spec`.
  """
  call = (shapes, batch, capacity, dtype)
  if tiers is not None or storage_of(kind) is not KVCache:
    _refuse_growing(shapes, kind)
  if tiers is not None:
    return OffloadedCache.spec(*call, kind=kind, tiers=tiers, **where)
  storage = storage_of(kind)
  options = dict(filled=True) if storage is KVCache else {}
  return storage.spec(*call, kind=kind, **options, **where)

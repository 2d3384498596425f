"""Memory of a `generate` call by tier: predicted before it and reported after.

Guarantees: prediction and report count weights, keys and hidden states from
shapes by the same rules, so the prediction for a call is at least what the
report has; also for a smaller call, unless a chain ("kvr") splits it over its
shards differently. Weights that are streamed through a device count as two
layers, streamed keys as three layers of one group of rows.

The memory of a running program ("work") is an estimate: the widest part of a
layer, and the logits. Programs compiled for a CPU can need more, where they
convert narrow weights to a wider dtype.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ringjax.checks import positive_int
from ringjax.errors import MemoryEstimateError
from ringjax.infer.prefill import PrefillConfig, padded
from ringjax.infer.session import Session, files_of, place_of
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import DEVICE, DISK, HOST, IN_HOST, TIERS, bytes_each
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import (
  WeightPlacement,
  weight_bytes,
)
from ringjax.nn.sharding_context import ShardingContext
from ringjax.plan.choice import Cluster

# Bytes by tier of `kv.base.TIERS`, then by use ("cache", "hidden", "work").
TierBytes = Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallMemory:
  """The largest call of `generate` for which memory is reserved.

  `rj.models.load(folder, memory="6GiB", beside=CallMemory(...))` places layers
  so that they and this call fit in `memory`. Options are those of `generate`;
  speculation is not counted.

  Attributes:
    prompt: Number of tokens in the longest row.
    new: Number of tokens that are added to it.
    rows: Number of rows in the batch.
    rows_at_once: Number of rows that a layer computes at a time; None: all.
    chunk: Number of prompt tokens that are read at a time; None: all.
    cache_kind: Storage format of keys and values.
    cache_dtype: Dtype of the cache; None: the model's.
    cache_placement: Placement of the keys of layers that are not running.
    hidden_placement: Placement of the hidden states of groups that are not
      running.
    disk: Folder for keys on disk; its free space is checked.
    axis: Mesh axis that shards the sequence; default "seq".
    prefill: Method that reads the prompt.
    partition: Number of tokens of each shard for "kvr".
    machine: Cluster model by which prefill="auto" chooses a method.

  Raises:
    OptionError: If a count is below 1, options of reading contradict each
      other, or the folder is missing or given without keys on disk.
  """

  prompt: int
  new: int
  rows: int = 1
  rows_at_once: int | None = None
  chunk: int | None = None
  cache_kind: CacheConfig | str | None = None
  cache_dtype: DTypeLike | None = None
  cache_placement: WeightPlacement | str | None = None
  hidden_placement: WeightPlacement | str | None = None
  disk: str | os.PathLike[str] | None = None
  axis: str | None = None
  prefill: str = "auto"
  partition: Sequence[int] | None = None
  machine: Cluster | None = None

  def __post_init__(self) -> None:
    for name in ("prompt", "new", "rows"):
      positive_int(name, getattr(self, name))
    for name in ("rows_at_once", "chunk"):
      if getattr(self, name) is not None:
        positive_int(name, getattr(self, name))
    self._reading()
    files_of(self.cache_placement, self.disk)

  def _reading(self) -> PrefillConfig:
    return PrefillConfig(
      method=self.prefill,
      chunk=self.chunk,
      partition=self.partition,
      machine=self.machine,
    )

  def __call__(self, model: Transformer, mesh: Mesh | None = None) -> TierBytes:
    """Predicts the memory of the call in addition to the weights.

    Args:
      model: Model, concrete or abstract.
      mesh: Mesh of the model's weights.

    Returns:
      Bytes by tier, then by "cache", "hidden" and "work": per device for the
      tier "device", in total for the others.

    Raises:
      MemoryEstimateError: If the folder's disk has too little free space.
      OptionError: If a placement or kind of cache is not supported.
    """
    mesh, axis = place_of(mesh, self.axis, model)
    sharding = ShardingContext(mesh=mesh, axis=axis)
    size, group = sharding.size, min(self.rows_at_once or self.rows, self.rows)
    kind = kinds.WINDOWED
    if self.cache_kind is not None:
      kind = kinds.cache_kind(self.cache_kind)
    reading = self._reading().plan(self.prompt, model, mesh, axis, kind=kind)
    slots = max(padded(self.prompt, size), reading.slots * size)
    read = min(slots, padded(self.chunk or 1 << 40, size))
    # The same capacity as in `generate`: a shard's last slot may stay empty.
    capacity = padded(slots + self.new + size, size)
    caches = []
    for start in range(0, self.rows, group):
      rows = min(group, self.rows - start)
      caches.append(
        model.init_cache_spec(
          rows,
          capacity,
          sharding=sharding,
          dtype=self.cache_dtype,
          kind=kind,
          placement=self.cache_placement,
        )
      )
    hidden = 0.0
    if self.hidden_placement is not None:
      hidden = WeightPlacement.of(self.hidden_placement).host or 0.0
    hosted = round(float(hidden) * len(caches))
    tiers = call_bytes(model, caches, hosted, -(-read // size))
    if tiers[DISK]["cache"] and self.disk is not None:
      free = shutil.disk_usage(self.disk).free
      if tiers[DISK]["cache"] > free:
        raise MemoryEstimateError(
          "disk",
          f"{tiers[DISK]['cache']:,} bytes of keys",
          f"at most the {free:,} that are free in {os.fspath(self.disk)!r}",
          "name another folder, or place less of the cache on disk",
        )
    return tiers


def call_bytes(
  model: Transformer, caches: list[Any], hosted: int, read: int
) -> dict[str, dict[str, int]]:
  """Counts the bytes of a call by tier and use, without the weights.

  Args:
    model: Model, concrete or abstract.
    caches: Cache of each group of rows, concrete or abstract.
    hosted: Number of groups whose hidden states are in host memory.
    read: Number of tokens of a row that a device reads at once.
  """
  tiers = {tier: {"cache": 0, "hidden": 0} for tier in TIERS}
  for cache in caches:
    for tier, n in _cache_bytes(cache).items():
      tiers[tier]["cache"] += n
  # Only one group at a time streams keys through the device.
  tiers[DEVICE]["cache"] += max(cache.passing_bytes for cache in caches)
  width = _between_layers(model)
  width *= jax.numpy.dtype(model.dtype).itemsize
  states = [cache.batch * read * width for cache in caches]
  host_states = states[len(states) - hosted :] if hosted else []
  tiers[IN_HOST]["hidden"] = sum(host_states)
  tiers[DEVICE]["hidden"] = (
    sum(states) - sum(host_states) + max(host_states, default=0)
  )
  rows = max(cache.batch for cache in caches)
  logits = sum(cache.batch for cache in caches) * model.config.vocab * 4
  tiers[DEVICE]["work"] = _work(model, rows, read) + 2 * logits
  return tiers


def report_bytes(model: Transformer, session: Session, read: int) -> TierBytes:
  """Counts the bytes of a model and a session by tier and use.

  Args:
    model: Model, whose layers may be in any tier.
    session: Session with the cache to count.
    read: Number of tokens of a row that a device read at once.
  """
  cache = session.cache
  groups = cache.row_groups
  caches = [cache] if groups is None else [*groups.caches]
  hosted = 0 if groups is None else sum(groups.hosted)
  tiers = call_bytes(model, caches, hosted, read)
  weights = weight_bytes(model)
  return {tier: {"weights": weights[tier], **tiers[tier]} for tier in TIERS}


def _cache_bytes(cache: Any) -> dict[str, int]:
  """Bytes of a cache by tier: per device, in total on the host, on disk."""
  leaves = jax.tree.leaves(cache)
  of_host = [
    math.prod(x.shape) * x.dtype.itemsize
    for x in leaves
    if getattr(x.sharding, "memory_kind", None) == HOST
  ]
  return {
    DEVICE: bytes_each(cache),
    IN_HOST: sum(of_host),
    DISK: cache.disk_bytes,
  }


def _work(model: Transformer, rows: int, read: int) -> int:
  """Estimated bytes of a layer's activations, `rows` rows of `read` tokens."""
  layers = model.config.layers
  size = jax.numpy.dtype(model.dtype).itemsize
  queries = max(layer.pair_flops for layer in layers) // 4
  width = max(layer.feedforward.width for layer in layers)
  # Four hidden states, queries, keys and values, and float32 accumulators.
  embed = _between_layers(model)
  token_bytes = size * (4 * embed + 3 * queries) + 8 * queries
  # A feedforward layer is computed in blocks of tokens.
  block_tokens = min(read, ShardingContext().block)
  return rows * int(read * token_bytes + block_tokens * size * 3 * width // 2)


def _between_layers(model: Transformer) -> int:
  """Numbers of a token between layers."""
  streams, embed = model.config.streams, model.config.embed
  return embed if streams is None else streams.numbers(embed)

"""What a call of `generate` keeps in each memory: before it runs, and behind.

Guarantees: weights, keys and hidden states of both are counted off shapes, by
the same rules, so what was declared for a call is at least what it then has;
for a smaller call too, unless a chain ("kvr") deals it to its shards otherwise.
Weights that pass through a device are two layers', keys
that do three layers', of one group of rows.

What a program needs while it computes ("work") is an estimate: the widest part
of a layer, and the logits. Compiled code of a CPU can need more, where it makes
narrow weights wide.
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
from ringjax.infer.prefill import PrefillOptions, padded
from ringjax.infer.session import Session, files_of, place_of
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import DEVICE, DISK, HOST, IN_HOST, TIERS, bytes_each
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.layer_offload import OffloadedCache
from ringjax.kv.row_groups import RowGroups
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import WeightPlacement, weight_bytes
from ringjax.nn.sharding_context import ShardingContext
from ringjax.plan.choice import Machine

# Bytes by `kv.base.TIERS`, and of each by what they are.
TierBytes = Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallMemory:
  """The largest call of `generate` that a model's memory is to have room for.

  `rj.models.load(folder, memory="6GiB", beside=CallMemory(...))` places layers
  so that they and this call are within `memory`. Options are those of
  `generate`; a call that speculates is none that is counted.

  Attributes:
    prompt: tokens of the longest row.
    new: tokens that are added to it.
    rows: of the batch.
    rows_at_once: that a layer computes at a time; None: all.
    chunk: tokens of a prompt that are read at a time; None: all.
    cache_kind: how keys are stored.
    cache_dtype: of the cache; None: the model's.
    cache_placement: where keys of layers are that do not run.
    hidden_placement: the same of hidden states of groups.
    disk: the folder for keys on disk, whose room is looked at.
    axis: the mesh axis that shards the sequence; default "seq".
    prefill: how the prompt is read.
    partition: tokens of each shard for "kvr".
    machine: by which prefill="auto" chooses.

  Raises:
    OptionError: counts below 1, options of reading that do not go together, or
      a folder that is not there, or not where keys are on disk.
  """

  prompt: int
  new: int
  rows: int = 1
  rows_at_once: int | None = None
  chunk: int | None = None
  cache_kind: CacheKind | str | None = None
  cache_dtype: DTypeLike | None = None
  cache_placement: WeightPlacement | str | None = None
  hidden_placement: WeightPlacement | str | None = None
  disk: str | os.PathLike[str] | None = None
  axis: str | None = None
  prefill: str = "auto"
  partition: Sequence[int] | None = None
  machine: Machine | None = None

  def __post_init__(self) -> None:
    for name in ("prompt", "new", "rows"):
      positive_int(name, getattr(self, name))
    for name in ("rows_at_once", "chunk"):
      if getattr(self, name) is not None:
        positive_int(name, getattr(self, name))
    self._reading()
    files_of(self.cache_placement, self.disk)

  def _reading(self) -> PrefillOptions:
    return PrefillOptions(
      method=self.prefill,
      chunk=self.chunk,
      partition=self.partition,
      machine=self.machine,
    )

  def __call__(self, model: Transformer, mesh: Mesh | None = None) -> TierBytes:
    """What the call has beside the weights.

    Args:
      model: with or without numbers.
      mesh: of its weights.

    Returns:
      bytes by memory, and by "cache", "hidden" and "work": of "device" on each
      device, of others in all.

    Raises:
      MemoryEstimateError: the folder's disk has less room.
      OptionError: a placement, or a kind of cache, that does not go.
    """
    mesh, axis = place_of(mesh, self.axis, model)
    sharding = ShardingContext(mesh=mesh, axis=axis)
    size, group = sharding.size, min(self.rows_at_once or self.rows, self.rows)
    kind = kinds.WINDOWED
    if self.cache_kind is not None:
      kind = kinds.cache_kind(self.cache_kind)
    how = self._reading().plan(self.prompt, model, mesh, axis, kind=kind)
    slots = max(padded(self.prompt, size), how.slots * size)
    read = min(slots, padded(self.chunk or 1 << 40, size))
    # As `generate` makes it: a shard's last slot may stay empty.
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
    found = call_bytes(model, caches, hosted, -(-read // size))
    if found[DISK]["cache"] and self.disk is not None:
      free = shutil.disk_usage(self.disk).free
      if found[DISK]["cache"] > free:
        raise MemoryEstimateError(
          "disk",
          f"{found[DISK]['cache']:,} bytes of keys",
          f"at most the {free:,} that are free in {os.fspath(self.disk)!r}",
          "name another folder, or place less of the cache on disk",
        )
    return found


def call_bytes(
  model: Transformer, caches: list[Any], hosted: int, read: int
) -> dict[str, dict[str, int]]:
  """Bytes of a call by memory and by what they are, but for the weights.

  Args:
    model: with or without numbers.
    caches: of each group of rows, with or without numbers.
    hosted: groups whose hidden states are in the host's memory.
    read: tokens of a row that a device reads at once.
  """
  found = {tier: {"cache": 0, "hidden": 0} for tier in TIERS}
  for cache in caches:
    for tier, n in _cache_bytes(cache).items():
      found[tier]["cache"] += n
  # What passes through is of one group at a time.
  found[DEVICE]["cache"] += max(map(_passing, caches))
  width = _streams(model) * model.config.embed
  width *= jax.numpy.dtype(model.dtype).itemsize
  states = [cache.batch * read * width for cache in caches]
  away = states[len(states) - hosted :] if hosted else []
  found[IN_HOST]["hidden"] = sum(away)
  found[DEVICE]["hidden"] = sum(states) - sum(away) + max(away, default=0)
  rows = max(cache.batch for cache in caches)
  logits = sum(cache.batch for cache in caches) * model.config.vocab * 4
  found[DEVICE]["work"] = _work(model, rows, read) + 2 * logits
  return found


def report_bytes(model: Transformer, session: Session, read: int) -> TierBytes:
  """Bytes by memory and by what they are, of a model and a cache as they are.

  Args:
    model: whose layers may be elsewhere.
    session: whose cache it is.
    read: tokens of a row that a device read at once.
  """
  cache = session.cache
  groups = isinstance(cache, RowGroups)
  caches = [*cache.caches] if groups else [cache]
  found = call_bytes(model, caches, sum(cache.hosted) if groups else 0, read)
  weights = weight_bytes(model)
  return {tier: {"weights": weights[tier], **found[tier]} for tier in TIERS}


def _cache_bytes(cache: Any) -> dict[str, int]:
  """Of a device, of the host in all, and of the disk."""
  leaves = jax.tree.leaves(cache)
  of_host = [
    math.prod(x.shape) * x.dtype.itemsize
    for x in leaves
    if getattr(x.sharding, "memory_kind", None) == HOST
  ]
  disk = 0
  if isinstance(cache, OffloadedCache):
    disk = cache.disk_bytes
  return {DEVICE: bytes_each(cache), IN_HOST: sum(of_host), DISK: disk}


def _passing(cache: Any) -> int:
  """Bytes of keys on a device that are of layers elsewhere."""
  if not isinstance(cache, OffloadedCache):
    return 0
  return 3 * max(
    (
      sum(s.size * s.dtype.itemsize for s in x.stored)
      for x in cache.layers
      if x is not None and set(x.layout.tiers) != {DEVICE}
    ),
    default=0,
  )


def _work(model: Transformer, rows: int, read: int) -> int:
  """Bytes of a layer's steps for `rows` rows of `read` tokens, about."""
  layers = model.config.layers
  size = jax.numpy.dtype(model.dtype).itemsize
  queries = max(layer.attention.pair_flops for layer in layers) // 4
  width = max(layer.feedforward.width for layer in layers)
  # Hidden states of some steps, queries, keys and values, sums in float32.
  embed = _streams(model) * model.config.embed
  each = size * (4 * embed + 3 * queries) + 8 * queries
  # A feedforward is computed some tokens after others.
  some = min(read, ShardingContext().block)
  return rows * int(read * each + some * size * 3 * width // 2)


def _streams(model: Transformer) -> int:
  """Hidden states of a token between layers."""
  streams = model.config.streams
  return 1 if streams is None else streams.count

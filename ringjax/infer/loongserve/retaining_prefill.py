"""Ring prefill that leaves a call's keys on the shards that a plan chooses.

`RetainingParallel` takes the place of `ContextParallel`, `RetainedCache` that
of the cache: attention writes into the slots as blocks pass through the ring.

Guarantees: see `ops.attention.strategies.retaining`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from ringjax import tree
from ringjax.kv.base import KV, CallCache, CallLayer
from ringjax.kv.cache import KVCache
from ringjax.kv.layer_spec import LayerKV
from ringjax.nn.sharding_context import ContextParallel, Extras
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.cached.views import coords_specs
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.strategies.retaining import LayerSlots, RetainingRing
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import add_sink, finalize
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import CallSharding, device_of
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class RetainedCache(CallCache):
  """A cache into which attention itself writes, at slots that a plan chose.

  A call allocates nothing.

  Attributes:
    cache: Cache, whose coordinates are those after the call.
    place: Slot of each of the call's tokens, int32 [B, T], -1 for none.
  """

  cache: KVCache
  place: Int[Array, "B T"]
  states: None = None

  @property
  def mesh(self) -> Mesh | None:
    return self.cache.mesh

  @property
  def axis(self) -> str | None:
    return self.cache.axis

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.cache.slots

  @property
  def length(self) -> Int[Array, " B"]:
    return self.cache.length

  def layer(self, kind: int, slots: LayerKV, index: Index) -> RetainedLayer:
    """One layer's part of the cache."""
    del kind
    return RetainedLayer(self.place, slots, index)

  def updated(self, slots: tuple[Any, ...]) -> RetainedCache:
    """The cache after the layers."""
    return dataclasses.replace(self, cache=self.cache.updated(slots))


tree.register(RetainedCache, ("cache", "place", "states"), ())


class RetainedLayer(CallLayer):
  """One layer's part of a `RetainedCache`: its attention leaves `slots` here.

  Attributes:
    place: Slot of each of the call's tokens, see `RetainedCache`.
    slots: Keys and values of all layers of this kind.
    index: Index of the layer among these.
    fresh: Keys and values of the call.
  """

  def __init__(self, place: Int[Array, "B T"], slots: LayerKV, index: Index):
    self.place, self.slots, self.index = place, slots, index
    self.fresh: KV | None = None

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> RetainedLayer:
    self.fresh = KV(rotation.own(k), v, at)
    return self

  def views(self, *, apart: bool = False) -> tuple[Any, ...]:
    del apart
    assert self.fresh is not None
    return (self.fresh.view(),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetainingParallel(ContextParallel):
  """A ring that leaves the keys of a call at slots that a plan chose.

  Attributes:
    local: Algorithm on a shard.
  """

  local: Any = AutoKernel()

  takes_rows = False
  takes_classes = False

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: RetainedLayer,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B T N J"]:
    """Attention of queries [B, T, N, H] to the call's keys, [B, T, N, J]."""
    assert cache.fresh is not None
    axis, (k, v, _) = self.of_mesh, cache.fresh
    # Coordinates without a batch axis stay so: the ring sends fewer bytes.
    at = Coords(tokens.pos, tokens.seg)
    assert axis is not None
    b, t, n, h = q.shape
    heads = k.shape[1]
    device = device_of(CallSharding(axis=axis, mesh=self.mesh), (q, k))
    ring = RetainingRing(local=self.local.on_device(*device), axis=axis)
    grouped = lambda x: None if x is None else x.reshape(heads, -1)
    call_mask = mask & self.segments if tokens.segmented else mask

    def run(
      x: Local,
      at: Coords,
      terms: Terms,
      slots: LayerSlots,
      index: Index,
      place: jax.Array,
    ) -> tuple[jax.Array, LayerSlots]:
      varying = collectives.vary((x, at, terms, slots, index, place), (axis,))
      x, at, terms, slots, index, place = varying
      at = Coords(*at)
      scores = Scores(scale=extras.scale, soft_cap=extras.soft_cap)
      base_terms = terms._replace(sinks=None)
      args = ScoreArgs(scores, base_terms, Context(at, at, call_mask))
      partial, slots = ring.retain(x, args, slots, index, place)
      if terms.sinks is not None:
        partial = add_sink(partial, terms.sinks[None, :, :, None])
      return finalize(partial)[0].astype(x.q.dtype), slots

    q = jnp.transpose(q.reshape(b, t, heads, -1, h), (0, 2, 3, 1, 4))
    # Specs that shard the axis after the given number of leading axes.
    last_axis: Any = lambda axes: P(*(None,) * axes, axis)
    slots_spec = LayerSlots(last_axis(3), last_axis(3))
    out, slots = jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        Local(last_axis(3), last_axis(2), last_axis(2)),
        coords_specs(at, b, (), axis),
        P(),
        slots_spec,
        P(),
        P(),
      ),
      out_specs=(last_axis(3), slots_spec),
      axis_names={axis},
      check_vma=not getattr(ring.local, "interpret", False),
    )(
      Local(q, k, v),
      at,
      Terms(slopes=grouped(extras.slopes), sinks=grouped(extras.sinks)),
      LayerSlots(*cache.slots),
      jnp.asarray(cache.index, jnp.int32),
      cache.place,
    )
    cache.slots = LayerKV(*slots)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)

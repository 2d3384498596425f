"""Resident attention: keys stay on their shards, the few queries visit all.

Law: equals `reference` on all keys; forward only.
Cost: one maximum and one sum over the axis, of B T N (J + 2) float32 numbers;
no key or value moves. Where the queries are sharded they are gathered first,
B T N H numbers, and the sums are scattered.
Memory: the partial of all queries on each shard.

That is the way to decode and to read a chunk of a prompt behind a long cache:
whatever the length of the cache, what is sent depends on the queries alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.kernels.best import Best, Loops
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.stored import Stored
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import Partial, add_sink, finalize, finite_max
from ringjax.parallel import collectives
from ringjax.parallel.place import Place, device_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
  """How queries find the keys of a cache.

  Attributes:
    mesh: whose `axis` shards the keys; None is one device.
    axis: the sequence's axis.
    batch_axes: mesh axes over which the examples lie.
    head_axes: mesh axes over which the heads lie; kv heads that they do not
      divide are one, of which each device has a copy.
    whole: whether no axis beside those shards anything: then nothing is left
      to XLA, which cuts no kernel.
    sharded: whether the queries are sharded over `axis` too.
    few: up to so many queries visit the keys where they lie.
    local: the algorithm on a shard; that of few queries is its `visit`, or
      XLA's loops where it has none.
  """

  mesh: Any = None
  axis: str | None = None
  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  whole: bool = False
  sharded: bool = False
  few: int = 16
  local: Any = Best()

  def __call__(
    self,
    scores: Scores,
    q: jax.Array,
    keys: Stored,
    terms: Terms,
    q_at: Coords,
    mask: Mask,
  ) -> jax.Array:
    """[B, K, G, T, J] in q's dtype from queries [B, K, G, T, H]."""
    manual = {*collectives.names(self.axis)}
    if self.whole and self.mesh is not None:
      manual = {*self.mesh.axis_names}
    local = self._on_device(manual, q, keys)
    if not manual:
      unsunk = terms._replace(sinks=None)
      found = self._partial(local, scores, q, keys, unsunk, q_at, mask)
      return _finish(found, q, terms)
    # One array twice is one array inside too: kernels read it once.
    arrays = (keys.k,) if keys.v is keys.k else (keys.k, keys.v)
    batch = self.batch_axes if self.whole else ()
    heads = self.head_axes if self.whole else ()
    of_heads = (heads, ()) if keys.k.shape[2] > 1 else ((), heads)
    at_q = self.axis if self.sharded else None
    over = frozenset({*collectives.names(self.axis), *batch, *heads})

    def run(
      q: jax.Array,
      arrays: Any,
      at: Any,
      layer: jax.Array,
      terms: Terms,
      mask: Mask,
    ) -> jax.Array:
      sinks = Terms(sinks=terms.sinks)
      q, arrays, (q_at, k_at), layer, slopes, mask = collectives.vary(
        (q, arrays, at, layer, terms.slopes, mask), over
      )
      if self.sharded:
        assert self.axis is not None
        q = collectives.gather(q, self.axis, 3)
        q_at = collectives.gather(q_at, self.axis, 1)
      mine = Stored(arrays[0], arrays[-1], Coords(*k_at), layer)
      unsunk = Terms(slopes=slopes)
      partial = self._partial(
        local, scores, q, mine, unsunk, Coords(*q_at), mask
      )
      if self.axis is not None:
        partial = self._combine(partial)
      return _finish(partial, q, sinks)

    def per_example(x: Any, *rest: Any) -> P:
      each = jnp.ndim(x) > 0 and x.shape[0] == q.shape[0]
      return P(batch if each else None, *rest)

    queries = P(batch, *of_heads, at_q)
    at = ((*q_at,), (*keys.at,))
    return jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        queries,
        P(None, batch, of_heads[0], self.axis),
        tuple(
          tuple(per_example(x, axis) for x in pair)
          for pair, axis in zip(at, (at_q, self.axis), strict=True)
        ),
        P(),
        P(*of_heads),
        jax.tree.map(per_example, mask),
      ),
      out_specs=queries,
      axis_names=manual,
      # The interpreters of Pallas do not know what varies.
      check_vma=not getattr(local, "interpret", False),
    )(q, arrays, at, jnp.asarray(keys.layer, jnp.int32), terms, mask)

  def _on_device(self, manual: set[str], q: jax.Array, keys: Stored) -> Any:
    """What computes the call where it is known what it runs on."""
    opened = self.mesh if manual else None
    platform, kind, alone = device_of(
      Place(axis=self.axis, mesh=opened), (q, keys.k)
    )
    if self.mesh is not None and not manual:
      alone = self.mesh.size == 1
    local = self.local
    if hasattr(local, "on_device"):
      local = local.on_device(platform, kind, alone)
    if q.shape[3] <= self.few and not hasattr(local, "visit"):
      return Loops(platform)
    return local

  def _partial(
    self,
    local: Any,
    scores: Scores,
    q: jax.Array,
    keys: Stored,
    terms: Terms,
    q_at: Coords,
    mask: Mask,
  ) -> Partial:
    context = Context(q_at, keys.at, mask)
    if q.shape[3] <= self.few:
      return local.visit(scores, q, keys, terms, context)
    x = Local(q, *keys.whole())
    return local.forward(scores, x, terms, context, 0, empty_partial(x))

  def _combine(self, partial: Partial) -> Partial:
    assert self.axis is not None
    m = collectives.largest(partial.m, self.axis)
    weight = jnp.exp(partial.m - finite_max(m))
    packed = jnp.concatenate([partial.acc, partial.l[..., None]], -1)
    packed = packed * weight[..., None]
    if self.sharded:
      packed = collectives.scatter_sum(packed, self.axis, 3)
      length = packed.shape[3]
      first = collectives.axis_index(self.axis) * length
      m = lax.dynamic_slice_in_dim(m, first, length, 3)
    else:
      packed = collectives.total(packed, self.axis)
    return Partial(packed[..., :-1], m, packed[..., -1])


def _finish(partial: Partial, q: jax.Array, terms: Terms) -> jax.Array:
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  return finalize(partial)[0].astype(q.dtype)

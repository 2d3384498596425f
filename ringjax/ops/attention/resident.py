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
from ringjax.ops.attention.blockwise import Blockwise, Local
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.stored import Stored, visit
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import Partial, add_sink, finalize, finite_max
from ringjax.parallel import collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
  """How queries find the keys of a cache.

  Attributes:
    mesh: whose `axis` shards the keys; None is one device.
    axis: the sequence's axis.
    sharded: whether the queries are sharded over it too.
    few: up to so many queries visit the keys where they lie.
    local: the algorithm on a shard for more than that.
  """

  mesh: Any = None
  axis: str | None = None
  sharded: bool = False
  few: int = 16
  local: Any = Blockwise()

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
    if self.axis is None:
      return _finish(
        self._partial(scores, q, keys, terms, q_at, mask), q, terms
      )
    at_q = self.axis if self.sharded else None

    def run(
      q: jax.Array, keys: Stored, terms: Terms, q_at: Coords, mask: Mask
    ) -> jax.Array:
      assert self.axis is not None
      if self.sharded:
        q = collectives.gather(q, self.axis, 3)
        q_at = collectives.gather(q_at, self.axis, 1)
      partial = self._partial(scores, q, keys, terms, q_at, mask)
      return _finish(self._combine(partial), q, terms)

    kv = P(None, None, None, self.axis)
    keys_spec: Any = (kv, kv, P(None, self.axis), P())
    return jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        P(None, None, None, at_q),
        Stored(*keys_spec),
        P(),
        P(None, at_q),
        P(),
      ),
      out_specs=P(None, None, None, at_q),
      axis_names={self.axis},
    )(q, keys, terms, q_at, mask)

  def _partial(
    self,
    scores: Scores,
    q: jax.Array,
    keys: Stored,
    terms: Terms,
    q_at: Coords,
    mask: Mask,
  ) -> Partial:
    if self.axis is not None:
      q, keys, terms, q_at, mask = collectives.vary(
        (q, keys, terms, q_at, mask), frozenset({self.axis})
      )
    context = Context(q_at, keys.at, mask)
    terms = terms._replace(sinks=None)
    if q.shape[3] <= self.few:
      return visit(scores, q, keys, terms, context)
    x = Local(q, *keys.whole())
    return self.local.forward(scores, x, terms, context, 0, empty_partial(x))

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

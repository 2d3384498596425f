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
    local: the algorithm on a shard.
  """

  mesh: Any = None
  axis: str | None = None
  sharded: bool = False
  local: Any = Blockwise()

  def __call__(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    q_at: Coords,
    k_at: Coords,
    mask: Mask,
  ) -> jax.Array:
    """[B, K, G, T, J] in q's dtype from operands in the order of `Local`."""
    if self.axis is None:
      return _finish(
        self._partial(scores, x, terms, q_at, k_at, mask), x, terms
      )
    at_q = self.axis if self.sharded else None

    def run(
      x: Local, terms: Terms, q_at: Coords, k_at: Coords, mask: Mask
    ) -> jax.Array:
      assert self.axis is not None
      if self.sharded:
        x = x._replace(q=collectives.gather(x.q, self.axis, 3))
        q_at = collectives.gather(q_at, self.axis, 1)
      partial = self._partial(scores, x, terms, q_at, k_at, mask)
      return _finish(self._combine(partial), x, terms)

    kv = P(None, None, self.axis)
    specs: Any = (P(None, None, None, at_q), kv, kv)
    return jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        Local(*specs),
        P(),
        P(None, at_q),
        P(None, self.axis),
        P(),
      ),
      out_specs=P(None, None, None, at_q),
      axis_names={self.axis},
    )(x, terms, q_at, k_at, mask)

  def _partial(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    q_at: Coords,
    k_at: Coords,
    mask: Mask,
  ) -> Partial:
    if self.axis is not None:
      x, terms, q_at, k_at, mask = collectives.vary(
        (x, terms, q_at, k_at, mask), frozenset({self.axis})
      )
    context = Context(q_at, k_at, mask)
    sinkless = terms._replace(sinks=None)
    return self.local.forward(scores, x, sinkless, context, 0, empty_partial(x))

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


def _finish(partial: Partial, x: Local, terms: Terms) -> jax.Array:
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  return finalize(partial)[0].astype(x.q.dtype)

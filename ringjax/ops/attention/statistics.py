"""Statistics of attention from the fold that attention itself is.

Guarantees: entropy, log-sum-exp, kept mass and column mass are those of the
softmax over all keys, whatever moves them between shards. A learned sink is a
key of its own: it takes part in the entropy and the log-sum-exp, its weight is
in no mass. Computed in float32 or float64, up to its rounding of the scores.
Cost: the forward pass of attention with a value or two for a key; the column
mass also the backward pass.
Memory: tiles of scores, nothing T x S.

The mean score of a query, sum p s, is attention whose values are the scores
themselves, so that the partials of different keys merge as any others. With it
the entropy -sum p log p is lse - sum p s. The column mass is the gradient of
attention by its values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from ringjax.errors import OptionError
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Blockwise, Keys, fold_tile, product
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.ring_q import RingQ
from ringjax.ops.attention.run import run
from ringjax.ops.attention.scores import ScoreTile
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.parallel.place import CallSharding


class AttentionStatistics(NamedTuple):
  """How queries spread their attention over the keys that they see.

  Fields:
    entropy: [B, T, N], -sum p log p of a query's weights, in nats; 0 where it
      sees no key.
    lse: [B, T, N], the log of the sum of the exponentials of its scores; -inf
      where it sees no key.
    kept_mass: [B, T, N], the part of its weights that is on the keys of a set;
      or None.
    column_mass: [B, S, N], what each key gets of all queries together; or None.
  """

  entropy: Float[Array, "B T N"]
  lse: Float[Array, "B T N"]
  kept_mass: Float[Array, "B T N"] | None = None
  column_mass: Float[Array, "B S N"] | None = None


@dataclasses.dataclass(frozen=True)
class ScoreMeans(Blockwise):
  """`Blockwise` whose last value of each pair is the pair's score."""

  def fold(
    self,
    tile: ScoreTile,
    keys: Keys,
    q: Shaped[Array, "B K G q H"],
    carry: Partial,
    masked: bool,
  ) -> Partial:
    dot = product("bkgqh,bkht->bkgqt", q, tile.cut_k(keys.k, 3))
    s, _ = tile.scores_of(dot)
    if masked:
      s = jnp.where(tile.allowed(), s, 0)

    def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
      acc = product("bkgqt,bktj->bkgqj", p, v[..., :-1])
      mean = jnp.sum(p * s, -1, keepdims=True)
      return jnp.concatenate([acc, mean], -1)

    v, flag = tile.cut_k(keys.v, 2), tile.cut_k(keys.flag, 2)
    return fold_tile(tile, dot, v, flag if masked else None, carry, weigh)


def statistics(
  x: AttentionArgs,
  place: CallSharding,
  keep: Bool[Array, "B S _"] | None,
  columns: bool,
) -> AttentionStatistics:
  """The statistics of a checked call, whose values are not looked at.

  Args:
    x: the arguments.
    place: how they are sharded.
    keep: bool [B, S, K or 1], keys whose mass is wanted, or None.
    columns: whether the column mass is wanted.
  """
  wide = wide_dtype(x.q.dtype)
  x = dataclasses.replace(
    x, q=_constant(x.q).astype(wide), k=_constant(x.k).astype(wide)
  )
  (b, s, heads, _), (t, n) = x.k.shape, x.q.shape[1:3]
  group = n // heads if columns else 0
  values = jnp.zeros((b, s, heads, group + 1), wide)
  if keep is not None:
    kept = jnp.broadcast_to(keep[..., None].astype(wide), (b, s, heads, 1))
    values = jnp.concatenate([values[..., :group], kept, values[..., :1]], -1)
  # Few queries go to many keys.
  way = RingQ if t < s else Ring

  def call(values: jax.Array) -> PyTree:
    each = dataclasses.replace(x, v=values, batched=True)
    return run(each, place, way(ScoreMeans()), True)

  column_mass = None
  if columns:
    (out, lse), gradient = jax.vjp(call, values)
    # A query's weights go to the column of its own head of the group.
    own = jnp.arange(n)[:, None] % group == jnp.arange(out.shape[-1])[None]
    own = jnp.zeros_like(out) + own.astype(wide)[None, None]
    (found,) = gradient((own, jnp.zeros_like(lse)))
    column_mass = found[..., :group].reshape(b, s, n)
  else:
    out, lse = call(values)
  seen = lse != -jnp.inf
  entropy = lse - out[..., -1]
  if x.sinks is not None:
    sink = x.sinks.astype(wide)[None, None]
    entropy = entropy - jnp.exp(sink - jnp.where(seen, lse, 0)) * sink
  # Rounding may leave less than nothing; NaN stays.
  entropy = jnp.where(seen, jnp.maximum(entropy, 0), 0)
  found = AttentionStatistics(
    entropy, lse, None if keep is None else out[..., group], column_mass
  )
  return found if x.batched else jax.tree.map(lambda y: y[0], found)


@jax.custom_vjp
def _constant(x: jax.Array) -> jax.Array:
  """`x`, by which no derivative is taken."""
  return x


def _no_gradient(_: None, gradient: Any) -> Any:
  del gradient
  raise OptionError(
    "attention_statistics",
    "a derivative of statistics",
    "statistics as constants",
    "pass jax.lax.stop_gradient(query) and key",
  )


_constant.defvjp(lambda x: (x, None), _no_gradient)

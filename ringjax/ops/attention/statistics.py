"""Statistics of attention, computed by the fold of attention itself.

Guarantees: entropy, log-sum-exp, kept mass and column mass are those of the
softmax over all keys, however they move between shards. A learned sink is an
additional key: it takes part in the entropy and the log-sum-exp, its weight is
in no mass. Computed in float32 or float64, up to its rounding of the scores.
Cost: the forward pass of attention with a value or two for a key; the column
mass also the backward pass.
Memory: tiles of scores, nothing T x S.

The mean score of a query, sum p s, is attention whose values are the scores
themselves, so that the partials of different keys merge like any others. With
it the entropy -sum p log p is lse - sum p s. The column mass is the gradient of
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
from ringjax.ops.attention.execution import run
from ringjax.ops.attention.scores import ScoreTile
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.attention.strategies.ring_q import RingQ
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.parallel.call_sharding import CallSharding


class AttentionStatistics(NamedTuple):
  """Spread of queries' attention over the keys that they see.

  Fields:
    entropy: Entropy of a query's weights, -sum p log p, in nats, [B, T, N]; 0
      where it sees no key.
    lse: Log-sum-exp of its scores, [B, T, N]; -inf where it sees no key.
    kept_mass: Share of its weights on the keys of a set, [B, T, N]; or None.
    column_mass: Sum of the weights of each key, over all queries, [B, S, N]; or
      None.
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
  """Compute the statistics of a checked call, whose values are not read.

  Args:
    x: Arguments of the call.
    place: Sharding of the arguments.
    keep: Keys whose mass is computed, bool [B, S, K or 1], or None.
    columns: Whether to compute the column mass.
  """
  dtype = wide_dtype(x.q.dtype)
  x = dataclasses.replace(
    x, q=_constant(x.q).astype(dtype), k=_constant(x.k).astype(dtype)
  )
  (b, s, heads, _), (t, n) = x.k.shape, x.q.shape[1:3]
  group = n // heads if columns else 0
  values = jnp.zeros((b, s, heads, group + 1), dtype)
  if keep is not None:
    keep_values = jnp.broadcast_to(
      keep[..., None].astype(dtype), (b, s, heads, 1)
    )
    values = jnp.concatenate(
      [values[..., :group], keep_values, values[..., :1]], -1
    )
  # Few queries travel to many keys.
  strategy = RingQ if t < s else Ring

  def call(values: jax.Array) -> PyTree:
    call_args = dataclasses.replace(x, v=values, batched=True)
    return run(call_args, place, strategy(ScoreMeans()), True)

  column_mass = None
  if columns:
    (out, lse), gradient = jax.vjp(call, values)
    # A query's weights are added to the column of its head in the group.
    own_columns = (
      jnp.arange(n)[:, None] % group == jnp.arange(out.shape[-1])[None]
    )
    own_columns = jnp.zeros_like(out) + own_columns.astype(dtype)[None, None]
    (result,) = gradient((own_columns, jnp.zeros_like(lse)))
    column_mass = result[..., :group].reshape(b, s, n)
  else:
    out, lse = call(values)
  sees_key = lse != -jnp.inf
  entropy = lse - out[..., -1]
  if x.sinks is not None:
    sink = x.sinks.astype(dtype)[None, None]
    entropy = entropy - jnp.exp(sink - jnp.where(sees_key, lse, 0)) * sink
  # Rounding may make it slightly negative; NaN stays.
  entropy = jnp.where(sees_key, jnp.maximum(entropy, 0), 0)
  result = AttentionStatistics(
    entropy, lse, None if keep is None else out[..., group], column_mass
  )
  return result if x.batched else jax.tree.map(lambda y: y[0], result)


@jax.custom_vjp
def _constant(x: jax.Array) -> jax.Array:
  """Return `x`, and refuse derivatives by it."""
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

"""Partial attention results and their algebra.

Guarantees: softmax attention over a set of keys is `Partial(acc, m, l)`,

  m = max_j s_j,   l = sum_j exp(s_j - m),   acc = sum_j exp(s_j - m) v_j,

and partials over disjoint sets of keys merge, in any order and grouping, into
the partial of the union. `finalize` divides once, at the end. The statistics
are float32 (float64 for float64 inputs) whatever the inputs are. The partial
of no keys is (0, -inf, 0) and is the neutral element. The maximum cancels in
everything that `finalize` returns, so it carries no gradient.

Ref: Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022,
arXiv 2205.14135.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringjax.parallel import collectives


def wide_dtype(dtype: DTypeLike) -> DTypeLike:
  """Return the dtype of scores, statistics and sums for inputs of `dtype`."""
  return jnp.float64 if dtype == jnp.float64 else jnp.float32


def widened(weights: PyTree, *like: PyTree) -> PyTree:
  """Convert weights to float32 before a loop, and back inside of it.

  Their gradients are then summed over the steps in float32, and over the shards
  once: the types vary over the manual axes of `like`, and the transpose of that
  cast is a sum.
  """

  def widen(x: jax.Array) -> jax.Array:
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(wide_dtype(x.dtype)) if floats else x

  weights = jax.tree.map(widen, weights)
  return collectives.vary(weights, collectives.varying_axes(*like))


class Partial(NamedTuple):
  """Unnormalised attention over some keys.

  Fields:
    acc: Weighted sum of values, [..., J].
    m: Running maximum of the scores, [...], -inf where no key was seen.
    l: Running sum of exp(score - m), [...].
  """

  acc: jax.Array
  m: jax.Array
  l: jax.Array  # noqa: E741 - the letter that the papers use

  @classmethod
  def empty(
    cls, shape: tuple[int, ...], head_dim: int, dtype: DTypeLike, like: PyTree
  ) -> Partial:
    """Make the partial of no keys; `like` gives the varying mesh axes."""
    return cls(
      collectives.zeros((*shape, head_dim), dtype, like),
      collectives.full(shape, -jnp.inf, dtype, like),
      collectives.zeros(shape, dtype, like),
    )

  @classmethod
  def of(
    cls, out: Float[Array, "*rows J"], lse: Float[Array, "*rows"]
  ) -> Partial:
    """Make the partial that `finalize` turned into (out, lse)."""
    dtype = wide_dtype(out.dtype)
    has_keys = (lse != -jnp.inf).astype(dtype)
    return cls(out.astype(dtype), lse.astype(dtype), has_keys)


def finite_max(m: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
  """Replace -inf by 0 in `m`, so that exp(-inf - m) is 0 and not NaN."""
  return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def merge(a: Partial, b: Partial) -> Partial:
  """Merge the partials of two disjoint sets of keys."""
  m = lax.stop_gradient(jnp.maximum(a.m, b.m))
  safe = finite_max(m)
  weight_a, weight_b = jnp.exp(a.m - safe), jnp.exp(b.m - safe)
  return Partial(
    a.acc * weight_a[..., None] + b.acc * weight_b[..., None],
    m,
    a.l * weight_a + b.l * weight_b,
  )


def add_sink(partial: Partial, sink: Float[Array, " ..."]) -> Partial:
  """Add a key of score `sink` whose value is zero (attention sink).

  `sink` broadcasts against `partial.m`. Add it once, after all merges.
  """
  sink = sink.astype(partial.m.dtype)
  m = lax.stop_gradient(jnp.maximum(partial.m, sink))
  weight = jnp.exp(partial.m - finite_max(m))
  return Partial(
    partial.acc * weight[..., None],
    m,
    partial.l * weight + jnp.exp(sink - finite_max(m)),
  )


def finalize(
  partial: Partial,
) -> tuple[Float[Array, "... J"], Float[Array, " ..."]]:
  """Normalise to (attention output [..., J], log-sum-exp [...]).

  Where no key was seen the output is 0 and the log-sum-exp is -inf.
  """
  has_keys = partial.l != 0  # NaN counts as seen: it must not be hidden.
  total = jnp.where(has_keys, partial.l, jnp.ones_like(partial.l))
  out = jnp.where(has_keys[..., None], partial.acc / total[..., None], 0)
  lse = jnp.where(has_keys, finite_max(partial.m) + jnp.log(total), -jnp.inf)
  return out, lse

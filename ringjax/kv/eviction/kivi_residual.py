"""KIVI's residual: keys become codes R at a time, values one by one.

Guarantees: after l tokens the keys of the first l - l mod R and the values of
the first l - R are what their codes give, whether they are in pages or open. A
group goes into pages once its last value has left the newest R; until then the
open cache holds the numbers that its codes stand for. These are encoded again
there: to the same codes, and in float32 to the same scales.
Cost: of open tokens, at each eviction.
Ref: Liu et al. 2024, KIVI, arXiv 2402.02750, algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax.kv.codecs.codec import Codec, VectorCodec, through
from ringjax.ops.mask import Coords

if TYPE_CHECKING:
  from ringjax.kv.cache_kind import CacheConfig


def newly_coded(
  kind: CacheConfig,
  at: Coords,
  stays: Bool[Array, "B S"],
  before: Int[Array, " B"],
  length: Int[Array, " B"],
) -> tuple[Bool[Array, "B S"], Bool[Array, "B S"]]:
  """Return which open keys and which open values become codes now.

  Args:
    kind: Kind of cache, with a residual.
    at: Coordinates [B, S] of the open slots.
    stays: Slots that stay open, of rows that are evicted.
    before: Ends of the rows at the last eviction, which has coded what was due.
    length: Ends of the rows now.
  """
  size, group = kind.exact.residual, kind.layout.page
  assert size is not None
  real = at.seg > 0
  rank = jnp.cumsum(real, 1, dtype=jnp.int32) - 1
  start = (length - jnp.sum(real, 1, dtype=jnp.int32))[:, None]
  # By distance from the row's end.
  number = start + rank

  def keys_until(end: jax.Array) -> jax.Array:
    due = end[:, None] // size * size
    return start + jnp.maximum(due - start, 0) // group * group

  between = lambda low, high: stays & (number >= low) & (number < high)
  keys = between(keys_until(before), keys_until(length))
  values = between(before[:, None] - size, length[:, None] - size)
  return keys, values


def with_codes(
  kind: CacheConfig,
  k: Shaped[Array, "L B K S D"],
  v: Shaped[Array, "L B K S J"],
  constants: PyTree,
  at: Coords,
  coded: tuple[Bool[Array, "B S"], Bool[Array, "B S"]],
) -> dict[str, Shaped[Array, "L B K S _"]]:
  """Return "k" and "v" of open tokens, `coded` ones encoded and decoded."""
  codec = kind.codec
  assert isinstance(codec, Codec)
  of_k, of_v = constants
  keys, values = coded
  decoded = {
    "k": _through(codec.keys, k, of_k, at, keys, kind.layout.page),
    "v": v,
  }
  if v.shape[-1]:
    decoded["v"] = _through(codec.values, v, of_v, at, values, kind.layout.page)
  return decoded


def _through(
  vectors: VectorCodec,
  x: Shaped[Array, "L B K S D"],
  constants: Any,
  at: Coords,
  coded: Bool[Array, "B S"],
  group: int,
) -> jax.Array:
  """Encode and decode the `coded` vectors, in whole groups of tokens."""
  real = at.seg > 0
  order = jnp.argsort(1 - real.astype(jnp.int32), axis=1, stable=True)
  pad = -order.shape[1] % group
  order = jnp.pad(order, ((0, 0), (0, pad)), mode="edge")
  gather_tokens = lambda x, index: jnp.take_along_axis(
    x, index[None, :, None, :, None], 3
  )
  decoded_groups = jax.vmap(lambda x, given: through(vectors, x, given))(
    gather_tokens(x, order), constants
  )
  rank = jnp.maximum(jnp.cumsum(real, 1, dtype=jnp.int32) - 1, 0)
  return jnp.where(
    coded[None, :, None, :, None], gather_tokens(decoded_groups, rank), x
  )

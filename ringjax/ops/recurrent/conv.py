"""Short causal convolution of each channel, over documents and over shards.

Guarantees: y_t = sum_j w_j x_{t - (W - 1) + j} over the tokens of t's own
document, zero before its first. What a call needs from earlier calls, and a
shard from earlier shards, is their tail: the last W - 1 tokens that are not
padding. Padding is only before or after the tokens of a call; between two
tokens of one document it would count as zeros.
Cost: W multiplications an element. A shard of at least W - 1 tokens gets its
neighbour's last W - 1; for shorter shards all tails are gathered, and also if
the tail for the next call is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives


class Tail(NamedTuple):
  """The last tokens of a sequence, the oldest first.

  Fields:
    x: Pytree of the tokens, [B, n, ...].
    seg: Documents of the tokens, int32 [B, n]; 0 where there were fewer.
  """

  x: PyTree
  seg: jax.Array

  @classmethod
  def of(cls, x: PyTree, seg: Int[Array, "B T"], n: int) -> Tail:
    """Take the last n tokens of x [B, T, ...] that are not padding."""
    at = _last_slots(seg, n)

    def pick(x: jax.Array) -> jax.Array:
      index = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
      rows = jnp.take_along_axis(x, jnp.maximum(index, 0), 1)
      return jnp.where(index >= 0, rows, jnp.zeros_like(rows))

    return cls(jax.tree.map(pick, x), pick(seg))

  def append(self, other: Tail) -> Tail:
    """Append the tokens of a later tail and keep the last n."""
    n = self.seg.shape[1]
    joined = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], 1), self, other
    )
    return Tail.of(joined.x, joined.seg, n)


# Most tokens of a tail that are looked for one by one.
_FEW = 8


def _last_slots(seg: Int[Array, "B T"], n: int) -> Int[Array, "B n"]:
  """Indices of the last n tokens that are not padding, -1 for none."""
  count = seg.shape[1]
  index = jnp.arange(count, dtype=jnp.int32)[None]
  if n > _FEW:
    slots = jnp.sort(jnp.where(seg > 0, index, -1), 1)[:, max(0, count - n) :]
    widths = ((0, 0), (max(0, n - count), 0))
    return jnp.pad(slots, widths, constant_values=-1)
  last_slots = [jnp.full((seg.shape[0],), count, jnp.int32)]
  for _ in range(n):
    earlier = (seg > 0) & (index < last_slots[-1][:, None])
    last_slots.append(jnp.max(jnp.where(earlier, index, -1), 1))
  return jnp.stack(last_slots[:0:-1], 1)


def tails(
  before: Tail,
  x: PyTree,
  seg: Int[Array, "B T"],
  axis: str | None,
  least: int | None = None,
) -> tuple[Tail, Tail]:
  """Tails before these tokens and before the next call's.

  Per shard, if `axis` is given: the shards' tokens are consecutive, `before`
  precedes the first and the second result follows the last, the same on all
  shards. `least` is the least number of slots for tokens in all shards that
  others follow; default: all, T.
  """
  n = before.seg.shape[1]
  own_tail = Tail.of(x, seg, n)
  if axis is None:
    return before, before.append(own_tail)
  all_tails = collectives.gather(own_tail, axis, 1)
  shard_index = collectives.axis_index(axis)
  if n <= (seg.shape[1] if least is None else least):
    # If a neighbour has fewer, its first token is the first of all, or this
    # shard has none.
    received = collectives.rotate(own_tail, axis, 1)
    earlier = received._replace(
      seg=jnp.where(shard_index == 0, 0, received.seg)
    )
  else:
    shard = jnp.arange(all_tails.seg.shape[1], dtype=jnp.int32)[None] // n
    earlier = Tail.of(
      all_tails.x, jnp.where(shard < shard_index, all_tails.seg, 0), n
    )
  final_tail = before.append(Tail.of(*all_tails, n))
  first = lambda x: jnp.where(shard_index == 0, x, jnp.zeros_like(x))
  return (
    before.append(earlier),
    collectives.total(jax.tree.map(first, final_tail), axis),
  )


def begins(seg: Int[Array, "B T"], before: Tail) -> Bool[Array, "B T"]:
  """Whether a token is the first of a document."""
  index = jnp.arange(seg.shape[1], dtype=jnp.int32)[None]
  real = lax.cummax(jnp.where(seg > 0, index, -1), axis=1)
  last = jnp.pad(real, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  last_seg = jnp.take_along_axis(seg, jnp.maximum(last, 0), 1)
  previous = jnp.where(last >= 0, last_seg, before.seg[:, -1:])
  return (seg > 0) & (seg != previous)


def after_tail(
  x: Shaped[Array, "B T *d"],
  tail: Shaped[Array, "B n *d"],
  seg: Int[Array, "B T"],
) -> Shaped[Array, "B S *d"]:
  """Tokens after n tokens of a tail, [B, n + T, ...]: token t is at n + t.

  The tail is placed right before the first token that is not padding.
  """
  first = jnp.argmax(seg > 0, 1).astype(jnp.int32)
  n = tail.shape[1]
  x = jnp.pad(x, ((0, 0), (n, 0), *((0, 0),) * (x.ndim - 2)))
  write = lambda x, tail, i: lax.dynamic_update_slice_in_dim(x, tail, i, 0)
  return jax.vmap(write)(x, tail.astype(x.dtype), first)


def causal_conv(
  x: Float[Array, "B T H D"],
  weight: Float[Array, "H D W"],
  seg: Int[Array, "B T"],
  before: Tail,
  *,
  dilation: int = 1,
) -> Float[Array, "B T H D"]:
  """Convolve each channel.

  Args:
    x: Tokens, [B, T, H, D].
    weight: Taps, [H, D, W]; the last one is for the token itself.
    seg: Documents, int32 [B, T]; 0 is padding.
    before: Tail of at least the (W - 1) `dilation` tokens that precede,
      [B, n, H, D].
    dilation: Number of tokens from one tap to the next.

  Returns:
    Outputs [B, T, H, D] in x's dtype; sums are float32. Zero for padding.
  """
  dtype = wide_dtype(x.dtype)
  taps = weight.shape[-1]
  lags = [(taps - 1 - j) * dilation for j in range(taps)]
  y = jnp.zeros((), dtype)[(None,) * x.ndim]
  for j, tap in enumerate(lagged(x, seg, before, lags)):
    y = y + tap.astype(dtype) * weight[None, None, ..., j].astype(dtype)
  return y.astype(x.dtype)


def lagged(
  x: Shaped[Array, "B T H D"],
  seg: Int[Array, "B T"],
  before: Tail,
  lags: Sequence[int],
) -> list[Shaped[Array, "B T H D"]]:
  """The token that is each of `lags` before each one, zeros for none.

  Args:
    x: Tokens, [B, T, H, D].
    seg: Documents, int32 [B, T]; 0 is padding. Others' tokens count as none.
    before: Tail of the tokens that precede, [B, n, H, D].
    lags: Numbers of tokens, from 0 to n.
  """
  n, length = before.seg.shape[1], x.shape[1]
  all_x = after_tail(x, before.x, seg)
  all_seg = after_tail(seg, before.seg, seg)
  outputs = []
  for lag in lags:
    part = slice(n - lag, n - lag + length)
    same_document = (all_seg[:, part] == seg) & (seg > 0)
    outputs.append(jnp.where(same_document[..., None, None], all_x[:, part], 0))
  return outputs

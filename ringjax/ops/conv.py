"""Short causal convolution of each channel, over documents and over shards.

Guarantees: y_t = sum_j w_j x_{t - (W - 1) + j} over the tokens of t's own
document, zero before its first. What a call needs of earlier calls, and a shard
of earlier shards, is their tail: the last W - 1 tokens that are not padding.
Padding stands before or behind the tokens of a call; between two tokens of one
document it would count as zeros.
Cost: W multiplications a number. A shard of at least W - 1 tokens gets its
neighbour's last W - 1; shorter shards gather those of all, and so does who
asks for what the next call has to know.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives


class Tail(NamedTuple):
  """The last tokens of a sequence, the oldest first.

  Fields:
    x: a pytree of [B, n, ...].
    seg: int32 [B, n], their documents; 0 where there were fewer tokens.
  """

  x: PyTree
  seg: jax.Array

  @classmethod
  def of(cls, x: PyTree, seg: Int[Array, "B T"], n: int) -> Tail:
    """The last n tokens of x [B, T, ...] that are not padding."""
    index = jnp.arange(seg.shape[1], dtype=jnp.int32)[None]
    found = [jnp.full((seg.shape[0],), seg.shape[1], jnp.int32)]
    for _ in range(n):
      open_ = (seg > 0) & (index < found[-1][:, None])
      found.append(jnp.max(jnp.where(open_, index, -1), 1))
    at = jnp.stack(found[:0:-1], 1)

    def pick(x: jax.Array) -> jax.Array:
      wide = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
      rows = jnp.take_along_axis(x, jnp.maximum(wide, 0), 1)
      return jnp.where(wide >= 0, rows, jnp.zeros_like(rows))

    return cls(jax.tree.map(pick, x), pick(seg))

  def then(self, other: Tail) -> Tail:
    """The tail of this and what came behind it."""
    n = self.seg.shape[1]
    both = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], 1), self, other
    )
    return Tail.of(both.x, both.seg, n)


def tails(
  before: Tail,
  x: PyTree,
  seg: Int[Array, "B T"],
  axis: str | None,
  least: int | None = None,
) -> tuple[Tail, Tail]:
  """What precedes these tokens, and what the next call has to know.

  Per shard, if `axis` is given: the shards' tokens lie one after another,
  `before` precedes the first and the second result follows the last, the same
  on all shards. `least` is how many slots of every shard that others follow
  are for tokens; default: all, T.
  """
  n = before.seg.shape[1]
  own = Tail.of(x, seg, n)
  if axis is None:
    return before, before.then(own)
  every = collectives.gather(own, axis, 1)
  me = collectives.axis_index(axis)
  if n <= (seg.shape[1] if least is None else least):
    # Where a neighbour has fewer, its first token is the first of all, or this
    # shard has none.
    came = collectives.rotate(own, axis, 1)
    earlier = came._replace(seg=jnp.where(me == 0, 0, came.seg))
  else:
    shard = jnp.arange(every.seg.shape[1], dtype=jnp.int32)[None] // n
    earlier = Tail.of(every.x, jnp.where(shard < me, every.seg, 0), n)
  after = before.then(Tail.of(*every, n))
  first = lambda x: jnp.where(me == 0, x, jnp.zeros_like(x))
  return (
    before.then(earlier),
    collectives.total(jax.tree.map(first, after), axis),
  )


def begins(seg: Int[Array, "B T"], before: Tail) -> Bool[Array, "B T"]:
  """Whether a token is the first of a document."""
  index = jnp.arange(seg.shape[1], dtype=jnp.int32)[None]
  real = lax.cummax(jnp.where(seg > 0, index, -1), axis=1)
  last = jnp.pad(real, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  there = jnp.take_along_axis(seg, jnp.maximum(last, 0), 1)
  previous = jnp.where(last >= 0, there, before.seg[:, -1:])
  return (seg > 0) & (seg != previous)


def causal_conv(
  x: Float[Array, "B T H D"],
  weight: Float[Array, "H D W"],
  seg: Int[Array, "B T"],
  before: Tail,
) -> Float[Array, "B T H D"]:
  """The convolution of each channel.

  Args:
    x: [B, T, H, D].
    weight: [H, D, W], the last number is that of the token itself.
    seg: int32 [B, T], documents; 0 is padding.
    before: the W - 1 tokens that precede, [B, W - 1, H, D].

  Returns:
    [B, T, H, D] in x's dtype; sums are float32. Zero for padding.
  """
  wide, length = wide_dtype(x.dtype), x.shape[1]
  taps = weight.shape[-1]
  # The tail stands right before the first token that is not padding.
  first = jnp.argmax(seg > 0, 1).astype(jnp.int32)

  def put(x: jax.Array, tail: jax.Array) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (taps - 1, 0), *((0, 0),) * (x.ndim - 2)))
    at = lambda x, tail, i: lax.dynamic_update_slice_in_dim(x, tail, i, 0)
    return jax.vmap(at)(x, tail.astype(x.dtype), first)

  all_x, all_seg = put(x, before.x), put(seg, before.seg)
  y = jnp.zeros((), wide)[(None,) * x.ndim]
  for j in range(taps):
    same = (all_seg[:, j : j + length] == seg) & (seg > 0)
    here = jnp.where(same[..., None, None], all_x[:, j : j + length], 0)
    y = y + here.astype(wide) * weight[None, None, ..., j].astype(wide)
  return y.astype(x.dtype)

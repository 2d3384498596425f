"""Sums of the keys of windows of positions, gathered from a cache.

Guarantees: the sum of a window is of its keys as later calls read them, after
their codec and rotation, in the order of positions. It depends neither on the
call that computes it nor on other rows.
Cost: the keys and values of the windows that end in the call, and nothing where
none ends.
Memory: the keys of some windows, see `_TOKENS`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ringjax.ops.attention.blockwise import loop
from ringjax.ops.attention.cached.chosen_slots import slots_by_position, taking
from ringjax.ops.attention.cached.selection import by_chunks
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives

# Most tokens of windows of which keys are in memory at once.
_TOKENS = 1 << 14


class WindowSizes(NamedTuple):
  """Sizes of the windows of positions that summaries stand for.

  Window n ends with position (n + 1) stride - 1.

  Fields:
    stride: Number of positions from one window's end to the next one's.
    length: Number of positions of a window, a multiple of `stride`.
  """

  stride: int
  length: int

  @property
  def incomplete(self) -> int:
    """Number of first windows that would begin before position 0."""
    return self.length // self.stride - 1


class WindowWeights(NamedTuple):
  """Weights of the keys and values of a window in its sums.

  Fields:
    keys: Weight of each number of a key by its place in the window, [n, K, H].
    values: Weights of the values, [n, K, J].
  """

  keys: Float[Array, "n K H"]
  values: Float[Array, "n K J"]


class PoolingGates(NamedTuple):
  """Biases of gates, whose softmax over a window weighs each dim of its keys.

  Fields:
    bias: Bias by the place in a window, [n, E]; keys have E numbers and, after
      them, E gates.
  """

  bias: Float[Array, "n E"]


class EndingWindows(NamedTuple):
  """Windows that end with a token of a call, row by row.

  Fields:
    number: Numbers of consecutive windows, int32 [B, n].
    ends: Whether the window ends in the call, bool [B, n]; the first ones do.
  """

  number: Int[Array, "B n"]
  ends: Bool[Array, "B n"]

  @classmethod
  def of(cls, at: Coords, sizes: WindowSizes) -> EndingWindows:
    """Windows that end with tokens at consecutive positions of a row.

    Args:
      at: Coordinates of the tokens, [B, T] in any order; segment 0 for none.
      sizes: Sizes of the windows.
    """
    real = at.seg > 0
    largest = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(real, at.pos, largest), 1)
    stop = jnp.max(jnp.where(real, at.pos + 1, 0), 1)
    first = jnp.where(stop > 0, first, 0)
    # Ends are `stride` apart, so that T tokens have at most so many.
    count = -(-at.pos.shape[1] // sizes.stride)
    number = (first // sizes.stride)[:, None]
    number = number + jnp.arange(count, dtype=jnp.int32)[None]
    return cls(number, (number + 1) * sizes.stride <= stop[:, None])


def window_sums(
  view: KVView,
  windows: EndingWindows,
  sizes: WindowSizes,
  weights: WindowWeights | PoolingGates | None,
  dtype: DTypeLike,
  axis: str | None,
) -> tuple[Float[Array, "B n K H"], Float[Array, "B n K J"] | None]:
  """Weighted sums of the keys and values of windows, over all shards.

  Those of windows that do not end in the call are 0 or of a part of their keys.

  Args:
    view: View that `gathers`, with the tokens of the call.
    windows: Windows.
    sizes: Sizes of the windows.
    weights: Weights of keys and values, or biases of gates that keys have;
      None for the mean of the keys alone.
    dtype: Dtype of the sums.
    axis: Manual axis that shards the keys, or None.
  """
  b, heads, slots = view.shape[:3]
  shards = 1 if axis is None else collectives.axis_size(axis)
  count = windows.number.shape[1]
  take = taking(view, dtype)
  like = view, windows, weights
  zeros = lambda dim: collectives.zeros((b, count, heads, dim), dtype, like)
  # The trip count is the same on all shards of a row.
  any_ends = jnp.any(windows.ends).astype(jnp.int32)

  def sums(_: Array, empty: tuple[Array, ...]) -> tuple[Array, ...]:
    slot_of = slots_by_position(view, slots * shards)

    def of_windows(chunk: EndingWindows) -> tuple[Array, ...]:
      place = jnp.arange(sizes.length, dtype=jnp.int32)[None, None]
      pos = (chunk.number + 1)[..., None] * sizes.stride - sizes.length + place
      row = jnp.arange(b, dtype=jnp.int32)[:, None, None]
      inside = (pos >= 0) & (pos < slot_of.shape[1])
      slot = slot_of[row, jnp.clip(pos, 0, slot_of.shape[1] - 1)]
      slot = jnp.where(inside & chunk.ends[..., None], slot, slots)
      stored = (slot < slots)[:, :, None, :, None]
      head = jnp.arange(heads, dtype=jnp.int32)[None, None, :, None]
      k, v = take(
        row[..., None], head, jnp.minimum(slot, slots - 1)[:, :, None]
      )
      k = jnp.where(stored, k, 0)
      if weights is None:
        return (jnp.sum(k, 3) / sizes.length,)
      if isinstance(weights, PoolingGates):
        # A softmax is of the keys of all shards.
        return (k.reshape(*k.shape[:3], -1),)
      v = jnp.where(stored, k if v is None else v, 0)
      by_head = lambda w: jnp.swapaxes(w, 0, 1)[None, None].astype(dtype)
      of = lambda x, w: jnp.sum(x * by_head(w), 3)
      return of(k, weights.keys), of(v, weights.values)

    parts = -(-b * count * sizes.length // _TOKENS)
    computed = by_chunks(of_windows, windows, parts)
    return jax.tree.map(lambda x, y: y.astype(x.dtype), empty, computed)

  if isinstance(weights, PoolingGates):
    dims = (sizes.length * view.shape[3],)
  else:
    dims = view.shape[3:4] if weights is None else view.shape[3:5]
  results = loop(any_ends, sums, tuple(map(zeros, dims)))
  if axis is not None:
    results = collectives.total(results, axis)
  if isinstance(weights, PoolingGates):
    k = results[0].reshape(b, count, heads, sizes.length, -1)
    keys, gates = jnp.split(k, 2, -1)
    gates = gates + weights.bias.astype(dtype)[None, None, None]
    return jnp.sum(jax.nn.softmax(gates, 3) * keys, 3), None
  return results[0], results[1] if len(results) > 1 else None

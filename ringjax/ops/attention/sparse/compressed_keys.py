"""Compressed keys: one key for each window of m neighbouring tokens.

Guarantees: entry w of a document is a weighted sum of its tokens from w m on,

  c_w = sum_j softmax_j(gate_j + bias_j) value_j,

a softmax over tokens for each dim, then a norm. With overlap the window has the
m tokens before, too, which have separate values and gates for this. An
entry is made by the last token of its window; a window that has not ended has
none. Equal results for a whole sequence, for consecutive chunks, and token by
token; for one device and for shards.
Cost: linear in the tokens. Between shards the tail of a window is sent.
Memory: the tokens of a window, 2 m with overlap, for each entry of the call.
Ref:  DeepSeek-AI 2026, DeepSeek-V4, sections 2.3.1 and 2.3.2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.ops.mask import Coords
from ringjax.ops.norm import rms_norm
from ringjax.ops.recurrent.conv import Tail, after_tail, tails
from ringjax.ops.softmax import finite_max, wide_dtype


class Projections(NamedTuple):
  """Maps of tokens from which one compressor makes its entries.

  Fields:
    value: Values, [B, T, X]; X is E, or 2 E with overlap: those that a token
      has for the next window, then those for its own.
    gate: Gates, [B, T, X].
  """

  value: Float[Array, "B T X"]
  gate: Float[Array, "B T X"]


class Pooling(NamedTuple):
  """Weights of one compressor.

  Fields:
    bias: Bias of the gates by the place in a window, [m, X].
    norm: Weight of the entries' norm, [E].
  """

  bias: Float[Array, "m X"]
  norm: Float[Array, " E"]


class TokenInputs(NamedTuple):
  """Tokens of a call, for all compressors of a layer.

  Fields:
    projections: Maps of the tokens for each compressor.
    pos: Positions, int32 [B, T].
    seg: Documents, int32 [B, T]; 0 is padding.
  """

  projections: tuple[Projections, ...]
  pos: Int[Array, "B T"]
  seg: Int[Array, "B T"]


class Entries(NamedTuple):
  """Entries of a call, one for each window that a token of it ends.

  Fields:
    keys: Entries of each compressor, [B, n, E], before their rotation.
    at: Coordinates of the tokens that end the windows, [B, n]; segment 0 where
      there is no entry.
  """

  keys: tuple[Float[Array, "B n E"], ...]
  at: Coords


def window_size(rate: int, overlap: bool) -> int:
  """Number of tokens of which an entry is made."""
  return 2 * rate if overlap else rate


def compress(
  weights: tuple[Pooling, ...],
  x: TokenInputs,
  earlier_tail: Tail,
  axis: str | None,
  *,
  rate: int,
  eps: float,
) -> tuple[Entries, Tail]:
  """Make the entries of the windows that a call's tokens end.

  Args:
    weights: Weights of each compressor.
    x: Tokens of the call.
    earlier_tail: Tail of the tokens before them, one token less than a window;
      its x is (projections, positions).
    axis: Manual axis of shards with consecutive tokens; None for one device.
    rate: Number of tokens of a window without overlap, m.
    eps: Epsilon of the norms.

  Returns:
    The entries, ceil(T / m) per shard, and the tail after the tokens.
  """
  earlier_tail, next_tail = tails(
    earlier_tail, (x.projections, x.pos), x.seg, axis
  )
  index, at = _window_ends(x.pos, x.seg, rate)
  earlier_projections, earlier_pos = earlier_tail.x
  # Token t of the call is at t + n after a tail of n tokens.
  all_pos = after_tail(x.pos, earlier_pos, x.seg)
  all_seg = after_tail(x.seg, earlier_tail.seg, x.seg)
  keys = []
  for pooling, new, old in zip(
    weights, x.projections, earlier_projections, strict=True
  ):
    dim = pooling.norm.shape[0]
    overlap = new.value.shape[-1] != dim
    size = window_size(rate, overlap)
    first = earlier_tail.seg.shape[1] + 1 - size
    offsets = jnp.arange(size, dtype=jnp.int32)[None, None]
    # In a row without as many ends the rest of `index` is out of range.
    column = index[:, :, None] + first + offsets
    wanted_pos = at.pos[:, :, None] - (size - 1 - offsets)
    exists = (
      (_taken(all_seg, column) == at.seg[:, :, None])
      & (_taken(all_pos, column) == wanted_pos)
      & (at.seg > 0)[:, :, None]
    )
    value, gate = (
      after_tail(call_part, tail_part, x.seg)
      for call_part, tail_part in zip(new, old, strict=True)
    )
    float_dtype = wide_dtype(value.dtype)
    parts = functools.partial(_window_part, column=column, rate=rate, dim=dim)
    bias = pooling.bias.astype(float_dtype)
    if overlap:
      bias = jnp.concatenate([bias[:, :dim], bias[:, dim:]], 0)
    scores = parts(gate).astype(float_dtype) + bias[None, None]
    weight = _softmax(scores, exists)
    entry = jnp.sum(weight * parts(value).astype(float_dtype), 2)
    entry = rms_norm(entry, pooling.norm, eps)
    entry = jnp.where((at.seg > 0)[..., None], entry, 0)
    keys.append(entry.astype(value.dtype))
  return Entries(tuple(keys), at), next_tail


def _window_ends(
  pos: Int[Array, "B T"], seg: Int[Array, "B T"], rate: int
) -> tuple[Int[Array, "B n"], Coords]:
  """Indices of the tokens that end a window, first ones first; coordinates."""
  count = seg.shape[1]
  ends = (seg > 0) & (pos % rate == rate - 1)
  index = jnp.arange(count, dtype=jnp.int32)[None]
  number = -(-count // rate)
  index = jnp.sort(jnp.where(ends, index, count), 1)[:, :number]
  real, index = index < count, jnp.minimum(index, count - 1)
  take = lambda x: jnp.where(real, _taken(x, index), 0)
  return index, Coords(take(pos), take(seg))


def _taken(x: Int[Array, "B T"], index: Int[Array, "B ..."]) -> jax.Array:
  """Entries of each row by their indices, [B, *n]."""
  flat = index.reshape(index.shape[0], -1)
  return jnp.take_along_axis(x, flat, 1).reshape(index.shape)


def _window_part(
  x: Float[Array, "B S X"], column: Int[Array, "B n s"], rate: int, dim: int
) -> Float[Array, "B n s E"]:
  """Values or gates of the tokens of each window."""
  row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None, None]
  if x.shape[-1] == dim:
    return x[row, column]
  previous, current = x[..., :dim], x[..., dim:]
  return jnp.concatenate(
    [previous[row, column[..., :rate]], current[row, column[..., rate:]]], 2
  )


def _softmax(
  scores: Float[Array, "B n s E"], exists: Bool[Array, "B n s"]
) -> Float[Array, "B n s E"]:
  """Softmax over the tokens of a window that exist; zeros without any."""
  scores = jnp.where(exists[..., None], scores, -jnp.inf)
  largest = finite_max(jnp.max(scores, 2, keepdims=True))
  weight = jnp.exp(scores - jax.lax.stop_gradient(largest))
  total = jnp.sum(weight, 2, keepdims=True)
  return weight / jnp.where(total == 0, jnp.ones_like(total), total)

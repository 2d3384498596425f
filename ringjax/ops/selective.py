"""The selective scan of Mamba: a state of a few numbers for each channel.

Guarantees: of each channel c, with the state h [C, H],

  h_t = e^{A_c dt_tc} h_{t-1} + dt_tc x_tc B_t,   y_tc = C_t . h_tc,

for every length, forward and backward, over one device or shards. A token
with dt = 0 leaves the state as it is; a `fresh` one forgets what came before,
exactly.
Cost: about 9 C H multiplications a token, twice that over shards, which gather
two [C, H] each. The depth is log2 of a chunk for each chunk.
Memory: of a call the operands, the outputs and a state for every chunk; the
states of tokens, H times as large, are there for one chunk alone.
Ref:  Gu and Dao 2023, Mamba, arXiv 2312.00752.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ringjax.ops.delta import faded_before
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives


def selective_scan(
  x: Float[Array, "B T C"],
  step: Float[Array, "B T C"],
  rate: Float[Array, "C H"],
  into: Float[Array, "B T H"],
  out_of: Float[Array, "B T H"],
  state: Float[Array, "B C H"],
  fresh: Bool[Array, "B T"],
  *,
  axis: str | None = None,
  chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """Runs the recurrence over a sequence.

  Args:
    x: [B, T, C].
    step: [B, T, C], dt, not below 0.
    rate: [C, H], A, below 0.
    into: [B, T, H], B of the law above.
    out_of: [B, T, H], C of the law above.
    state: [B, C, H] before the first token.
    fresh: [B, T], whether a token forgets what came before.
    axis: an axis of shards that hold consecutive tokens; `state` is then that
      before the first shard.
    chunk: tokens whose states are there at once.

  Returns:
    [B, T, C] in x's dtype, and the float32 state behind the last token, the
    same on all shards.
  """
  wide = wide_dtype(x.dtype)
  b, length, c = x.shape
  size = max(1, min(chunk, length))

  def cut(a: jax.Array) -> jax.Array:
    more = -length % size
    a = jnp.pad(a, ((0, 0), (0, more), *((0, 0),) * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(b, -1, size, *a.shape[2:]), 1, 0)

  each = (x.astype(wide), step.astype(wide), into.astype(wide),
          out_of.astype(wide), fresh)  # fmt: skip
  chunks = tuple(map(cut, each))
  rate = rate.astype(wide)
  start = state.astype(wide)
  axes = collectives.varying_axes(each, rate, start)
  start, rate = collectives.vary((start, rate), axes)
  walk = functools.partial(_walk, rate, chunks)
  if axis is not None:
    gone = jnp.any(fresh, 1)[:, None, None]
    fade = jnp.exp(rate[None] * jnp.sum(step.astype(wide), 1)[..., None])
    added, _ = walk(jnp.zeros_like(start))
    start = faded_before(start, jnp.where(gone, 0, fade), added, axis)
  end, out = walk(start)
  if axis is not None:
    mine = collectives.axis_index(axis) == collectives.axis_size(axis) - 1
    end = collectives.total(jnp.where(mine, end, jnp.zeros_like(end)), axis)
  out = jnp.moveaxis(out, 0, 1).reshape(b, -1, c)[:, :length]
  return out.astype(x.dtype), end


def _walk(
  rate: jax.Array, chunks: tuple[jax.Array, ...], state: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The state behind the chunks, and their outputs [chunks, B, size, C]."""

  def one(
    state: jax.Array, chunk: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, jax.Array]:
    x, step, into, out_of, fresh = chunk
    left = jnp.exp(rate[None, None] * step[..., None])
    left = jnp.where(fresh[..., None, None], 0, left)
    new = (step * x)[..., None] * into[:, :, None]
    kept, added = lax.associative_scan(_then, (left, new), axis=1)
    states = kept * state[:, None] + added
    out = jnp.sum(states * out_of[:, :, None], -1)
    return states[:, -1], out

  return lax.scan(jax.checkpoint(one, prevent_cse=False), state, chunks)


def _then(
  early: tuple[jax.Array, jax.Array], late: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """h -> a h + b after another one."""
  return late[0] * early[0], late[0] * early[1] + late[1]

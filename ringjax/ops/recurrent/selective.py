"""The selective scan of Mamba: a state of a few numbers for each channel.

Guarantees: for each channel c, with the state h [C, H],

  h_t = e^{A_c dt_tc} h_{t-1} + dt_tc x_tc B_t,   y_tc = C_t . h_tc,

for every length, forward and backward, over one device or shards. A token
with dt = 0 leaves the state as it is; a `fresh` one forgets all earlier tokens,
exactly.
Cost: about 9 C H multiplications a token, twice that over shards, which gather
two [C, H] each. The depth is log2 of a chunk for each chunk.
Memory: the operands, the outputs and a state for every chunk; the states of
tokens, H times as large, exist for one chunk at a time.
Ref:  Gu and Dao 2023, Mamba, arXiv 2312.00752.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ringjax.ops.recurrent.delta import faded_before
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
) -> tuple[Float[Array, "B T C"], Float[Array, "B C H"]]:
  """Run the recurrence over a sequence.

  Args:
    x: Inputs, [B, T, C].
    step: Step sizes dt, [B, T, C], at least 0.
    rate: Rates A, [C, H], below 0.
    into: Input projections B above, [B, T, H].
    out_of: Output projections C above, [B, T, H].
    state: State before the first token, [B, C, H].
    fresh: Whether a token forgets all earlier ones, [B, T].
    axis: Mesh axis of shards that hold consecutive tokens; `state` is then that
      before the first shard.
    chunk: Number of tokens whose states exist at once.

  Returns:
    out: Outputs [B, T, C] in x's dtype.
    state: Float32 state after the last token, the same on all shards.
  """
  dtype = wide_dtype(x.dtype)
  b, length, c = x.shape
  size = max(1, min(chunk, length))

  def split_chunks(a: jax.Array) -> jax.Array:
    padding = -length % size
    a = jnp.pad(a, ((0, 0), (0, padding), *((0, 0),) * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(b, -1, size, *a.shape[2:]), 1, 0)

  operands = (x.astype(dtype), step.astype(dtype), into.astype(dtype),
          out_of.astype(dtype), fresh)  # fmt: skip
  chunks = tuple(map(split_chunks, operands))
  rate = rate.astype(dtype)
  start = state.astype(dtype)
  axes = collectives.varying_axes(operands, rate, start)
  start, rate = collectives.vary((start, rate), axes)
  walk = functools.partial(_scan_chunks, rate, chunks)
  if axis is not None:
    forgets = jnp.any(fresh, 1)[:, None, None]
    fade = jnp.exp(rate[None] * jnp.sum(step.astype(dtype), 1)[..., None])
    added, _ = walk(jnp.zeros_like(start))
    start = faded_before(start, jnp.where(forgets, 0, fade), added, axis)
  end, out = walk(start)
  if axis is not None:
    is_last = collectives.axis_index(axis) == collectives.axis_size(axis) - 1
    end = collectives.total(jnp.where(is_last, end, jnp.zeros_like(end)), axis)
  out = jnp.moveaxis(out, 0, 1).reshape(b, -1, c)[:, :length]
  return out.astype(x.dtype), end


def _scan_chunks(
  rate: jax.Array, chunks: tuple[jax.Array, ...], state: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """State after the chunks, and their outputs [chunks, B, size, C]."""

  def scan_chunk(
    state: jax.Array, chunk: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, jax.Array]:
    x, step, into, out_of, fresh = chunk
    decay = jnp.exp(rate[None, None] * step[..., None])
    decay = jnp.where(fresh[..., None, None], 0, decay)
    update = (step * x)[..., None] * into[:, :, None]
    total_decay, added = lax.associative_scan(_compose, (decay, update), axis=1)
    states = total_decay * state[:, None] + added
    out = jnp.sum(states * out_of[:, :, None], -1)
    return states[:, -1], out

  return lax.scan(jax.checkpoint(scan_chunk, prevent_cse=False), state, chunks)


def _compose(
  first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Compose h -> a h + b after another such map."""
  return second[0] * first[0], second[0] * first[1] + second[1]

"""Gated delta rule (linear attention): a state that decays and is corrected.

Guarantees: for each head, with the state S [H, J],

  u_t = beta_t (v_t - e^{g_t} S_{t-1}^T k_t),
  S_t = e^{g_t} S_{t-1} + k_t u_t^T,   o_t = S_t^T q_t,

for every length, forward and backward; without the correction u_t = beta_t v_t,
which is Mamba 2's state space. g_t is a number, or a vector with one for each
of the H rows of the state (Kimi's delta attention). g_t = -inf forgets the
earlier tokens exactly, and a token with beta_t = 0 and g_t = 0 leaves the state
as it is.
Cost: about 3 H J + C (2 H + J) multiplications a token and head for chunks of
C tokens; a third more over shards, which gather one [H, H + J] each. Without
the correction 2 H J + C (H + J), twice that over shards, which gather [H, J].
Decays by row add 3 H log2 C exponentials and sums.
Memory: q, k, v, the outputs, and a state for every block of chunks; everything
else is for one block at a time.
Ref:  Yang et al. 2024, arXiv 2412.06464; the chunks of arXiv 2406.06484; Dao
and Gu 2024, Mamba 2, arXiv 2405.21060; Kimi Team 2025, Kimi Linear, arXiv
2510.26692.

In a chunk, D_ts = e^{g_{s+1} + ... + g_t} for s <= t. Its u solve the unit
triangular system (1 + L) U = beta (V - D_t,start K S), where
L_ts = beta_t D_ts k_t.k_s for s < t, so with T = (1 + L)^-1 all chunks prepare
T beta V and T beta D K at once, and only two small products a chunk wait for
the state of the chunk before. Logarithms of decays are summed and never
subtracted from each other, hence no overflow, no lost digits and no
inf - inf, however strong a decay is.

With a decay for each row, D_ts k_t.k_s is a sum over rows h of k_th D_tsh k_sh,
which is no product of matrices. It is computed by halves of the chunk: for a
token s in the first half and a token t in the second, D_ts is the decay from s
to the end of the first times the decay from there to t. Each is at most 1, one
multiplies k_s and one k_t, and the tokens inside a half are treated as two
halves again.

The state after some tokens is an affine map of the state before them. A shard
finds its map by computing with an identity as H more columns of a state; the
maps of all shards are gathered and composed everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ringjax.errors import ShapeError
from ringjax.ops.attention.blockwise import product
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives

# Chunks of a block: prepared at once, and recomputed for a gradient.
_BLOCK = 16


def delta_rule(
  q: Float[Array, "B T K H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T N J"],
  decay: Float[Array, "B T N"] | Float[Array, "B T N H"],
  beta: Float[Array, "B T N"],
  state: Float[Array, "B N H J"] | None = None,
  *,
  correct: bool = True,
  axis: str | None = None,
  chunk: int = 64,
) -> tuple[Float[Array, "B T N J"], Float[Array, "B N H J"]]:
  """Run the rule over a sequence.

  Args:
    q: Queries, [B, T, K, H].
    k: Keys, [B, T, K, H]; the rule is stable where beta |k|^2 <= 2.
    v: Values, [B, T, N, J]; value head n belongs to key head n // (N / K).
    decay: Logarithm g of the decay of the state, [B, T, N], or of each of its
      rows, [B, T, N, H].
    beta: Update rates, [B, T, N].
    state: State before the first token, [B, N, H, J]; default zeros.
    correct: Whether the state's prediction for k is subtracted from v first.
    axis: Mesh axis of shards that hold consecutive tokens; `state` is then that
      before the first shard.
    chunk: Tokens of a chunk, C, a power of two.

  Returns:
    out: Outputs [B, T, N, J] in v's dtype.
    state: Float32 state after the last token, the same on all shards.
  """
  b, _, heads, h = k.shape
  n, j = v.shape[2:]
  if n % heads or chunk & (chunk - 1):
    raise ShapeError(
      "v",
      f"{n} heads for {heads} heads of k, and chunks of {chunk}",
      "a multiple of k's heads, and a power of two",
      "repeat or drop heads",
    )
  dtype = wide_dtype(v.dtype)
  by_key_head = lambda x: x.reshape(
    *x.shape[:2], heads, n // heads, *x.shape[3:]
  )
  x = _Tokens(
    q,
    k,
    by_key_head(v),
    by_key_head(decay.astype(dtype)),
    by_key_head(beta.astype(dtype)),
  )
  if state is None:
    state = jnp.zeros((b, n, h, j), dtype)
  start = state.astype(dtype).reshape(b, heads, n // heads, h, j)
  start = collectives.vary(start, collectives.varying_axes(x, start))
  blocks = _split_blocks(x, chunk)
  if axis is not None:
    arriving = _state_before if correct else _faded_state_before
    start = arriving(start, blocks, axis)
  block = functools.partial(_block, correct=correct)
  end, out = _scan_blocks(block, start, blocks)
  if axis is not None:
    last = collectives.axis_size(axis) - 1
    is_last = collectives.axis_index(axis) == last
    end = collectives.total(jnp.where(is_last, end, jnp.zeros_like(end)), axis)
  # [blocks, chunks, B, K, G, C, J]
  out = jnp.transpose(out, (2, 0, 1, 5, 3, 4, 6))
  out = out.reshape(b, -1, n, j)[:, : v.shape[1]]
  return out, end.reshape(b, n, h, j)


class _Tokens(NamedTuple):
  """Operands; in a block, each [B, T, ...] is [chunks, B, C, ...].

  Fields:
    q, k: Queries and keys, [B, T, K, H].
    v: Values, [B, T, K, G, J].
    decay: Log decays, [B, T, K, G], or [B, T, K, G, H].
    beta: Update rates, [B, T, K, G].
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  decay: jax.Array
  beta: jax.Array


class _Chunks(NamedTuple):
  """Products of a block's chunks that do not depend on the state.

  Fields:
    k: Keys, [c, B, C, K, H]; with decays by row, keys times their decay up to
      the end of the chunk, [c, B, K, G, C, H].
    decays: Decays D, [c, B, K, G, C, C]; None with decays by row.
    fade: Decay of the state before the chunk, [c, B, K, G, C], or [c, B, K, G,
      C, H].
    values: T beta V, [c, B, K, G, C, J]; beta V without correction.
    keys: T beta D K, [c, B, K, G, C, H]; None without correction.
  """

  k: jax.Array
  decays: jax.Array | None
  fade: jax.Array
  values: jax.Array
  keys: jax.Array | None


def _split_blocks(x: _Tokens, chunk: int) -> _Tokens:
  """Split tokens into [blocks, chunks, B, C, ...], padded with no-ops."""
  tokens = x.k.shape[1]
  size = min(chunk, 1 << (tokens - 1).bit_length())
  chunks = -(-tokens // size)
  blocks = -(-chunks // _BLOCK)
  block_chunks = -(-chunks // blocks)

  def split(x: jax.Array) -> jax.Array:
    padding = blocks * block_chunks * size - tokens
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(x.shape[0], blocks, block_chunks, size, *x.shape[2:])
    return jnp.moveaxis(x, 0, 2)

  return _Tokens(*(split(a) for a in x))


def _scan_blocks(
  f: Callable[..., Any], state: jax.Array, blocks: _Tokens
) -> tuple[jax.Array, Any]:
  """Scan f(state, block) -> (state, output); gradients recompute blocks."""
  return lax.scan(jax.checkpoint(f, prevent_cse=False), state, blocks)


def _prepare(x: _Tokens, correct: bool = True) -> _Chunks:
  dtype = x.decay.dtype
  size = x.k.shape[2]
  per_head = lambda a: jnp.moveaxis(a, 2, 4)
  decay, beta = per_head(x.decay), per_head(x.beta)
  t = jnp.arange(size, dtype=jnp.int32)
  strictly_lower = (t[:, None] > t[None])[(None,) * 4]
  if decay.ndim > beta.ndim:
    k = _per_head(x.k, dtype)
    fade = jnp.exp(jnp.cumsum(decay, -2))
    decayed_keys = k * jnp.exp(_sums_after(decay))
    if not correct:
      values = jnp.transpose(x.v.astype(dtype), (0, 1, 3, 4, 2, 5))
      return _Chunks(decayed_keys, None, fade, values * beta[..., None], None)
    key_products = _decayed_products(*jnp.broadcast_arrays(k, k, decay))
    inverse = _inverse(
      jnp.where(strictly_lower, key_products * beta[..., None], 0)
    )
    inverse = inverse * beta[..., None, :]
    values = product("cbkgts,cbskgj->cbkgtj", inverse, x.v.astype(dtype))
    keys = product("cbkgts,cbkgsh->cbkgth", inverse, k * fade)
    return _Chunks(decayed_keys, None, fade, values, keys)
  log_decays = jnp.where(strictly_lower, decay[..., None], jnp.zeros((), dtype))
  decay_matrix = jnp.exp(jnp.cumsum(log_decays, -2))
  decay_matrix = jnp.where(
    (t[:, None] >= t[None])[(None,) * 4], decay_matrix, 0
  )
  fade = jnp.exp(jnp.cumsum(decay, -1))
  if not correct:
    values = jnp.transpose(x.v.astype(dtype), (0, 1, 3, 4, 2, 5))
    return _Chunks(x.k, decay_matrix, fade, values * beta[..., None], None)
  key_products = product("cbtkh,cbskh->cbkts", x.k, x.k)[:, :, :, None]
  mixed = jnp.where(
    strictly_lower, key_products * decay_matrix * beta[..., None], 0
  )
  inverse = _inverse(mixed)
  values = product(
    "cbkgts,cbskgj->cbkgtj", inverse * beta[..., None, :], x.v.astype(dtype)
  )
  keys = product(
    "cbkgts,cbskh->cbkgth",
    inverse * (beta * fade)[..., None, :],
    x.k.astype(dtype),
  )
  return _Chunks(x.k, decay_matrix, fade, values, keys)


def _per_head(x: jax.Array, dtype: Any) -> jax.Array:
  """Reshape keys or queries [c, B, C, K, H] to [c, B, K, 1, C, H]."""
  return jnp.moveaxis(x, 2, 3)[:, :, :, None].astype(dtype)


def _sums_after(decay: jax.Array) -> jax.Array:
  """Sum over the tokens after each token, for [..., C, H]."""
  following = jnp.pad(
    decay[..., 1:, :], ((0, 0),) * (decay.ndim - 2) + ((0, 1), (0, 0))
  )
  return lax.cumsum(following, decay.ndim - 2, reverse=True)


def _decayed_products(
  q: jax.Array, k: jax.Array, decay: jax.Array
) -> jax.Array:
  """Sum_h q_th D_tsh k_sh for s <= t, else 0, for [c, ..., C, H], by halves."""
  n = q.shape[-2] // 2
  if n == 0:
    return jnp.sum(q * k, -1, keepdims=True)
  first, last = (lambda x: x[..., :n, :]), (lambda x: x[..., n:, :])
  halves = (jnp.concatenate([first(x), last(x)]) for x in (q, k, decay))
  upper, lower = jnp.split(_decayed_products(*halves), 2)
  from_middle = jnp.exp(jnp.cumsum(last(decay), -2))
  to_middle = jnp.exp(_sums_after(first(decay)))
  corner = product(
    "...th,...sh->...ts", last(q) * from_middle, first(k) * to_middle
  )
  return jnp.concatenate(
    [
      jnp.concatenate([upper, jnp.zeros_like(upper)], -1),
      jnp.concatenate([corner, lower], -1),
    ],
    -2,
  )


def _inverse(x: jax.Array) -> jax.Array:
  """Invert 1 + x, for strictly lower triangular x [c, ..., C, C], by halves.

  Products alone: unlike a triangular solve they can be partitioned, and use
  matrix units. Both halves are one call, joined on the first axis: more axes
  would be too many for XLA on CPUs.
  """
  n = x.shape[-1] // 2
  if n == 0:
    return jnp.ones_like(x)
  halves = jnp.concatenate([x[..., :n, :n], x[..., n:, n:]])
  upper, lower = jnp.split(_inverse(halves), 2)
  into = product("...ts,...sr->...tr", x[..., n:, :n], upper)
  corner = -product("...ts,...sr->...tr", lower, into)
  return jnp.concatenate(
    [
      jnp.concatenate([upper, jnp.zeros_like(upper)], -1),
      jnp.concatenate([corner, lower], -1),
    ],
    -2,
  )


def _advance(
  state: jax.Array, x: _Chunks
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Final state of the chunks; and the state before each of them, with its u.

  A state may have more columns than values: their values are 0.
  """
  extra_columns = state.shape[-1] - x.values.shape[-1]
  if x.decays is None:
    decays, fade = None, x.fade[..., -1, :]
  else:
    decays, fade = x.decays[..., -1, :, None], x.fade[..., -1, None]

  def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, Any]:
    k, chunk_decays, fade, values, keys = chunk
    values = jnp.pad(values, ((0, 0),) * 4 + ((0, extra_columns),))
    u = values
    if keys is not None:
      u = values - product("bkgth,bkghj->bkgtj", keys, state)
    if chunk_decays is None:
      update = product("bkgsh,bkgsj->bkghj", k, u)
    else:
      update = product("bskh,bkgsj->bkghj", k.astype(u.dtype), chunk_decays * u)
    return fade[..., None] * state + update, (state, u)

  chunks = (x.k, decays, fade, x.values, x.keys)
  return lax.scan(step, state, chunks)


def _block(
  state: jax.Array, x: _Tokens, *, correct: bool
) -> tuple[jax.Array, jax.Array]:
  """State after a block, and its outputs [c, B, K, G, C, J]."""
  chunks = _prepare(x, correct)
  state, (states_before, u) = _advance(state, chunks)
  if chunks.decays is None:
    decay = jnp.moveaxis(x.decay, 2, 4)
    q, k = (_per_head(a, decay.dtype) for a in (x.q, x.k))
    weights = _decayed_products(*jnp.broadcast_arrays(q, k, decay))
    within_chunk = product("cbkgts,cbkgsj->cbkgtj", weights, u)
    from_state = product(
      "cbkgth,cbkghj->cbkgtj", q * chunks.fade, states_before
    )
    return state, (within_chunk + from_state).astype(x.v.dtype)
  query_products = product("cbtkh,cbskh->cbkts", x.q, x.k)[:, :, :, None]
  within_chunk = product(
    "cbkgts,cbkgsj->cbkgtj", query_products * chunks.decays, u
  )
  from_state = product(
    "cbtkh,cbkghj->cbkgtj", x.q.astype(states_before.dtype), states_before
  )
  return state, (within_chunk + from_state * chunks.fade[..., None]).astype(
    x.v.dtype
  )


def _state_before(state: jax.Array, blocks: _Tokens, axis: str) -> jax.Array:
  """State before each shard's tokens, given the state before all."""
  h, j = state.shape[-2:]
  identity = jnp.broadcast_to(
    jnp.eye(h, dtype=state.dtype)[None, None, None], (*state.shape[:-1], h)
  )
  map_ = jnp.concatenate([jnp.zeros_like(state), identity], -1)
  map_, _ = _scan_blocks(
    lambda s, x: (_advance(s, _prepare(x))[0], None), map_, blocks
  )
  maps = collectives.gather(map_[None], axis, 0)

  def compose(state: jax.Array, map_: jax.Array) -> tuple[jax.Array, jax.Array]:
    advanced = product("bkghi,bkgij->bkghj", map_[..., j:], state)
    return advanced + map_[..., :j], state

  _, states_before = lax.scan(compose, state, maps)
  shard = collectives.axis_index(axis)
  return lax.dynamic_index_in_dim(states_before, shard, 0, keepdims=False)


def _faded_state_before(
  state: jax.Array, blocks: _Tokens, axis: str
) -> jax.Array:
  """State before each shard's tokens, without the correction."""
  added, _ = _scan_blocks(
    lambda s, x: (_advance(s, _prepare(x, False))[0], None),
    jnp.zeros_like(state),
    blocks,
  )
  # One decay per head, [B, K, G], or per row; -inf stays -inf.
  fade = jnp.exp(jnp.sum(blocks.decay, (0, 1, 3)))
  fade = fade.reshape(*fade.shape, *(1,) * (state.ndim - fade.ndim))
  return faded_before(state, fade, added, axis)


def faded_before(
  state: Float[Array, "*dims"],
  fade: Float[Array, ...],
  added: Float[Array, "*dims"],
  axis: str,
) -> Float[Array, "*dims"]:
  """State before a shard's tokens, where each shard makes f S + a of a state.

  Args:
    state: State before all tokens.
    fade: Factor f of this shard, which broadcasts against the state.
    added: Term a of this shard.
    axis: Mesh axis of the shards.
  """
  all_maps = collectives.gather((fade[None], added[None]), axis, 0)

  def compose(state: jax.Array, shard: tuple) -> tuple[jax.Array, jax.Array]:
    fade, added = shard
    return fade * state + added, state

  _, states_before = lax.scan(compose, state, all_maps)
  own_shard = collectives.axis_index(axis)
  return lax.dynamic_index_in_dim(states_before, own_shard, 0, keepdims=False)

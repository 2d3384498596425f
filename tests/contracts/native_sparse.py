"""Native sparse attention against its equations, in float64.

Blocks are chosen by loops in NumPy; attention is dense, under a mask.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj

B, N, K, H, J = 2, 4, 2, 8, 6
SMALL = rj.NativeSparse(
  length=4, stride=2, block=8, count=4, initial=1, local=2, window=6
)
# Largest errors of a float32 output and of a float32 gradient.
OUTPUT, GRADIENT = 2e-6, 1e-5


def _softmax(s: np.ndarray) -> np.ndarray:
  top = s.max(-1, keepdims=True)
  p = np.exp(s - np.where(np.isfinite(top), top, 0))
  return p / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def chosen_blocks(
  q: np.ndarray, keys: np.ndarray, visible: np.ndarray, config: rj.NativeSparse
) -> np.ndarray:
  """Blocks that each query reads, bool [B, K, T, blocks].

  Args:
    q: Queries, [B, T, N, H].
    keys: Compressed keys, [B, C, K, H].
    visible: Pairs of queries and compressed keys that count, [B, T, C].
    config: Sizes.
  """
  t, c, group = q.shape[1], keys.shape[1], N // K
  blocks = -(-t // config.block)
  marked = np.zeros((B, K, t, blocks), bool)
  for b, k, i in np.ndindex(B, K, t):
    heads = q[b, i, k * group : (k + 1) * group]
    s = heads @ keys[b, :, k].T * H**-0.5
    p = _softmax(np.where(visible[b, i], s, -np.inf)).sum(0)
    own, scores = i // config.block, np.full(blocks, -np.inf)
    for j in range(own + 1):
      inside = {*range(j * config.block, (j + 1) * config.block)}
      begin = np.arange(c) * config.stride
      shared = [len(inside & {*range(x, x + config.length)}) for x in begin]
      scores[j] = p @ np.asarray(shared) / config.stride
      if j < config.initial or j > own - config.local:
        scores[j] = np.inf
    order = np.argsort(-scores, kind="stable")[: config.count]
    marked[b, k, i, order] = scores[order] > -np.inf
  return marked


def dense(q, k, v, allowed):
  """Attention under a mask [B, K, T, S]; 0 for a query without keys."""
  q = q.reshape(*q.shape[:2], K, N // K, H)
  s = jnp.einsum("btkgh,bskh->bkgts", q, k) * H**-0.5
  allowed = allowed[:, :, None]
  some = allowed.any(-1, keepdims=True)
  p = jax.nn.softmax(jnp.where(allowed | ~some, s, -jnp.inf), -1)
  p = jnp.where(some, p, 0)
  out = jnp.einsum("bkgts,bskj->btkgj", p, v)
  return out.reshape(*out.shape[:2], N, -1)


def check(
  layout: rj.Layout,
  shards: int = 1,
  mesh: Any = None,
  *,
  config: rj.NativeSparse = SMALL,
  t: int = 64,
  seg: np.ndarray | None = None,
  own_window_keys: bool = False,
  **axes: Any,
) -> None:
  """Outputs, the choice and all gradients equal those of the equations."""
  r = np.random.default_rng(0)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)
  gates = 1 / (1 + np.exp(-draw(B, t, N, 3)))
  operands = {
    "q": draw(B, t, N, H),
    "k": draw(B, t, K, H),
    "v": draw(B, t, K, J),
    "of_keys": draw(config.length, H, H) / config.length**0.5,
    "of_values": draw(config.length, J, J) / config.length**0.5,
    "gates": gates.astype(np.float32),
  }
  if own_window_keys:
    operands |= {"window_k": draw(B, t, K, H), "window_v": draw(B, t, K, J)}
  weights = draw(B, t, N, J)
  compress = lambda blocks, w: jnp.einsum("bcnkh,nhj->bckj", blocks, w)
  loss = lambda out: jnp.sum(out * jnp.asarray(weights, out.dtype))

  blocks = -(-t // (config.stride * shards)) * shards
  begin = np.arange(blocks) * config.stride
  token = begin[:, None] + np.arange(config.length)
  documents = np.ones((B, t), np.int32) if seg is None else seg
  padded = np.pad(documents, ((0, 0), (0, token.max() + 1)))[:, token]
  whole = (padded == padded[..., :1]).all(-1)
  last, at = token[:, -1], np.arange(t)
  sees = (last <= at[:, None]) & whole[:, None]
  sees &= padded[:, None, :, 0] == documents[..., None]
  sees &= documents[..., None] != 0
  causal = (at <= at[:, None]) & (documents[:, :, None] == documents[:, None])
  causal &= documents[..., None] != 0

  def compressed(x, w):
    padded = jnp.pad(x, ((0, 0), (0, token.max() + 1), (0, 0), (0, 0)))
    return compress(padded[:, token], w)

  wide = {name: x.astype(np.float64) for name, x in operands.items()}
  with jax.enable_x64(True):
    keys = np.asarray(compressed(wide["k"], wide["of_keys"]))
  marked = chosen_blocks(wide["q"], keys, sees, config)
  marked &= documents[:, None, :, None] != 0
  chosen = np.repeat(marked, config.block, -1)[..., :t] & causal[:, None]
  near = causal & (at[:, None] - at < config.window)

  def truth(x):
    keys = compressed(x["k"], x["of_keys"])
    values = compressed(x["v"], x["of_values"])
    branches = (
      dense(x["q"], keys, values, sees[:, None].repeat(K, 1)),
      dense(x["q"], x["k"], x["v"], chosen),
      dense(
        x["q"],
        x.get("window_k", x["k"]),
        x.get("window_v", x["v"]),
        near[:, None].repeat(K, 1),
      ),
    )
    out = sum(x["gates"][..., i, None] * y for i, y in enumerate(branches))
    return loss(out), out

  into = lambda x: layout.permute(jnp.asarray(x), shards=shards)
  back = lambda x: layout.restore(x, shards=shards)

  def native(x):
    tokens = {
      name: x[name] if name.startswith("of_") else into(x[name]) for name in x
    }
    cut = lambda x: rj.strided_blocks(
      x,
      length=config.length,
      stride=config.stride,
      mesh=mesh,
      axis=None if mesh is None else "seq",
      layout=layout,
    )
    out, choice = rj.native_sparse_attention(
      tokens["q"],
      tokens["k"],
      tokens["v"],
      compress(cut(tokens["k"]), x["of_keys"]),
      compress(cut(tokens["v"]), x["of_values"]),
      tokens["gates"],
      config,
      window_key=tokens.get("window_k"),
      window_value=tokens.get("window_v"),
      segment_ids=None if seg is None else into(seg),
      mesh=mesh,
      layout=layout,
      return_selection=True,
      **axes,
    )
    return loss(back(out)), (back(out), back(choice.blocks))

  with jax.enable_x64(True):
    (_, want), want_gradients = jax.value_and_grad(truth, has_aux=True)(wide)
  (_, (out, numbers)), gradients = jax.jit(
    jax.value_and_grad(native, has_aux=True)
  )(operands)
  read = np.zeros((*marked.shape[:3], marked.shape[3] + 1), bool)
  np.put_along_axis(read, np.moveaxis(np.asarray(numbers), 2, 1), True, -1)
  np.testing.assert_array_equal(read[..., :-1], marked)
  np.testing.assert_allclose(out, want, rtol=2e-6, atol=OUTPUT)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(
      gradient, want_gradients[name], rtol=2e-6, atol=GRADIENT, err_msg=name
    )

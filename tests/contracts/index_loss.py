"""The loss of an index against its equation, dense and in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj

B, N, K, H = 2, 4, 2, 8
# Positions of a block, of indexes of blocks.
M = 4
# Largest error of a mean over tokens, and of its gradients.
ERROR = 1e-6


def check(
  layout: rj.Layout,
  shards: int = 1,
  mesh: Any = None,
  *,
  units: str = "tokens",
  sparse: bool = False,
  latents: bool = False,
  t: int = 40,
  seg: np.ndarray | None = None,
  soft_cap: float | None = None,
  window: int | None = None,
  sinks: bool = False,
  **axes: Any,
) -> None:
  """Losses of queries, and gradients of their mean, are those of the equation.

  Attention is that to all keys, or to the index's own choice if `sparse`. The
  index is one of "tokens", of "pooled" blocks, or, for each kv head, of blocks
  by their best "key".
  """
  r = np.random.default_rng(0)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)
  index = {
    "q": draw(B, t, 3, 4),
    "weights": draw(B, t, 3),
    "keys": draw(B, t, 4),
  }
  if units == "pooled":
    index |= {"keys": draw(B, t, 8), "bias": draw(M, 4), "norm": draw(4)}
  if units == "key":
    index = {"q": draw(B, t, K, 4), "keys": draw(B, t, 4)}
  q, k, v = draw(B, t, N, H), draw(B, t, K, H), draw(B, t, K, 5)
  rows, up = draw(B, t, 5 + 2), draw(5, N, (H - 2) + 5)
  sink = jnp.asarray(draw(N)) if sinks else None
  weights = draw(B, t)
  documents = np.ones((B, t), np.int32) if seg is None else seg
  i, j = np.arange(t)[:, None], np.arange(t)
  visible = (j <= i) & (documents[:, :, None] == documents[:, None])
  visible &= (documents != 0)[:, :, None]
  if window is not None:
    visible &= i - j <= window

  into = lambda x: layout.permute(jnp.asarray(x), shards=shards)
  back = lambda x: layout.restore(x, shards=shards)
  options: dict[str, Any] = {
    "is_causal": True,
    "mesh": mesh,
    "layout": layout,
    "q_segment_ids": None if seg is None else into(seg),
    "logits_soft_cap": soft_cap,
    "local_window_size": None if window is None else (window, 0),
    **axes,
  }

  def top(x):
    by_token = ("q", "weights", "keys")
    arrays = {
      name: into(x[name]) if name in by_token else x[name] for name in x
    }
    if units == "pooled":
      arrays = jax.tree.map(jnp.asarray, arrays)
      return rj.TopPooledBlocks(count=2, **arrays)
    if units == "key":
      return rj.TopIndexBlocks(count=3, block=M, local=1, **arrays)
    return rj.TopTokens(count=7, **arrays)

  of_rows = into(q), into(rows), jnp.asarray(up)
  operands = of_rows if latents else (into(q), into(k))
  chosen = None
  if sparse:
    attend = rj.sparse_latent_attention if latents else rj.sparse_attention
    values = () if latents else (into(v),)
    _, lse, chosen = attend(
      *operands, *values, top(index), **options, sinks=sink,
      return_residual=True, return_selection=True,
    )  # fmt: skip
    numbers = np.asarray(back(chosen.blocks))
    size, blocks = chosen.block, -(-t // chosen.block)
    marked = np.zeros((*numbers.shape[:3], blocks + 1), bool)
    np.put_along_axis(marked, numbers, True, -1)
    # Those of each query head.
    marked = np.repeat(marked, N // marked.shape[2], 2)[..., :-1]
    chosen_keys = np.repeat(marked, size, -1)[..., :t]
  else:
    attend = rj.latent_attention if latents else rj.dot_product_attention
    values = () if latents else (into(v),)
    _, lse = attend(
      *operands, *values, **options, sinks=sink, return_residual=True
    )

  def truth(index):
    keys = np.repeat(k, N // K, 2).astype(np.float64)
    if latents:
      shared = np.repeat(rows[:, :, None, 5:], N, 2)
      plain = np.einsum("bsc,cnh->bsnh", rows[..., :5], up[..., : H - 2])
      keys = np.concatenate([plain, shared], -1).astype(np.float64)
    s = np.einsum("btnh,bsnh->bnts", q.astype(np.float64), keys) * H**-0.5
    if soft_cap is not None:
      s = soft_cap * np.tanh(s / soft_cap)
    seen = np.broadcast_to(visible[:, None], s.shape)
    if sparse:
      seen = seen & np.moveaxis(chosen_keys, 2, 1)
    s = np.where(seen, s, -np.inf)
    largest = s.max(-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    p = np.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    if sinks:
      at = np.asarray(sink, np.float64)[None, :, None, None]
      total = total + np.exp(at - largest)
    p = p / np.where(total == 0, 1, total)
    scores, masses, offered = of_units(index, p, seen)
    masses = np.where(offered, masses, 0)
    mass = masses.sum(-1, keepdims=True)
    masses = masses / np.where(mass == 0, 1, mass)
    some = offered.any(-1, keepdims=True)
    scores = jnp.where(offered | ~some, scores, -jnp.inf)
    terms = jnp.where(offered, jax.nn.log_softmax(scores, -1), 0)
    of_p = masses * np.log(np.where(masses > 0, masses, 1))
    losses = jnp.sum(jnp.asarray(of_p) - jnp.asarray(masses) * terms, -1)
    return jnp.mean(losses, 1)

  def of_units(index, p, seen):
    """Scores, masses and offered units of each head that chooses, [B, M, T, U].

    Args:
      index: Arrays of the index.
      p: Probabilities of attention, [B, N, T, S].
      seen: Pairs that count, [B, N, T, S].
    """
    if units == "tokens":
      dots = jnp.einsum("btie,bse->btis", index["q"], index["keys"])
      scores = jnp.einsum("btis,bti->bts", jax.nn.relu(dots), index["weights"])
      return scores[:, None], p.sum(1, keepdims=True), seen[:, :1]
    blocks = -(-t // M)
    padded = lambda x: np.pad(x, [(0, 0)] * 3 + [(0, blocks * M - t)])
    by_block = lambda x: padded(x).reshape(*x.shape[:3], blocks, M)
    number, own_block = np.arange(blocks), i // M
    if units == "key":
      of_kv = lambda x: x.reshape(B, K, N // K, t, t)
      masses = by_block(of_kv(p).sum(2)).sum(-1)
      allowed = by_block(of_kv(seen)[:, :, 0])
      dots = jnp.einsum("btke,bse->bkts", index["q"], index["keys"])
      width = [(0, 0)] * 3 + [(0, blocks * M - t)]
      dots = jnp.pad(dots, width).reshape(B, K, t, blocks, M)
      scores = jnp.max(jnp.where(allowed, dots, -jnp.inf), -1)
      offered = allowed.any(-1) & (number != own_block)
      return jnp.where(offered, scores, 0), masses, offered
    masses = by_block(p.sum(1, keepdims=True)).sum(-1)
    count = t // M
    keys, gates = jnp.split(index["keys"][:, : count * M], 2, -1)
    cut = lambda x: x.reshape(B, count, M, -1)
    weights = jax.nn.softmax(cut(gates) + index["bias"][None, None], 2)
    pooled = jnp.sum(weights * cut(keys), 2)
    square = jnp.mean(pooled**2, -1, keepdims=True)
    pooled = pooled * jax.lax.rsqrt(square + 1e-6) * index["norm"][None, None]
    dots = jnp.einsum("btie,bce->btic", index["q"], pooled)
    scores = jnp.einsum("btic,bti->btc", jax.nn.relu(dots), index["weights"])
    scores = jnp.pad(scores, [(0, 0)] * 2 + [(0, blocks - count)])
    # Whole blocks of the query's document that have ended.
    last, of_block = number * M + M - 1, documents[:, : count * M]
    of_block = of_block.reshape(B, count, M)
    whole = (of_block == of_block[..., :1]).all(-1)
    whole = np.pad(
      np.where(whole, of_block[..., 0], 0), [(0, 0), (0, blocks - count)]
    )
    offered = (last <= i) & (whole[:, None] == documents[..., None])
    offered &= (documents != 0)[..., None]
    if window is not None:
      offered &= i - last <= window
    if sparse:
      offered &= by_block(np.moveaxis(chosen_keys, 2, 1)[:, :1])[:, 0].any(-1)
    return scores[:, None], masses, offered[:, None]

  def loss(index):
    return back(
      rj.index_loss(
        *operands[:2],
        top(index),
        lse,
        chosen=chosen,
        up=jnp.asarray(up) if latents else None,
        **options,
      )
    )

  mean = lambda f: (
    lambda x: (lambda y: (jnp.mean(y * jnp.asarray(weights, y.dtype)), y))(f(x))
  )
  gradient = lambda f: jax.value_and_grad(mean(f), has_aux=True)
  with jax.enable_x64(True):
    wide = {name: x.astype(np.float64) for name, x in index.items()}
    (want, want_losses), want_gradients = gradient(truth)(wide)
  (value, losses), gradients = jax.jit(gradient(loss))(index)
  np.testing.assert_allclose(value, want, rtol=0, atol=ERROR)
  np.testing.assert_allclose(losses, want_losses, rtol=2e-6, atol=2 * ERROR)
  for name, x in gradients.items():
    np.testing.assert_allclose(
      x, want_gradients[name], rtol=0, atol=ERROR, err_msg=name
    )

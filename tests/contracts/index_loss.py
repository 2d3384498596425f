"""The loss of an index against its equation, dense and in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj

B, N, K, H = 2, 4, 2, 8
# Largest error of a mean over tokens, and of its gradients.
ERROR = 1e-6


def check(
  layout: rj.Layout,
  shards: int = 1,
  mesh: Any = None,
  *,
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

  Attention is that to all keys, or to the index's own choice if `sparse`.
  """
  r = np.random.default_rng(0)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)
  index = {
    "q": draw(B, t, 3, 4),
    "weights": draw(B, t, 3),
    "keys": draw(B, t, 4),
  }
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
  top = lambda x: rj.TopTokens(
    count=7, **{name: into(x[name]) for name in index}
  )
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
    numbers = np.asarray(back(chosen.blocks))[:, :, 0]
    marked = np.zeros((B, t, t + 1), bool)
    np.put_along_axis(marked, numbers, True, -1)
    visible &= marked[..., :-1]
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
    s = np.where(visible[:, None], s, -np.inf)
    largest = s.max(-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    p = np.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    if sinks:
      at = np.asarray(sink, np.float64)[None, :, None, None]
      total = total + np.exp(at - largest)
    p = (p / np.where(total == 0, 1, total)).sum(1)
    mass = p.sum(-1, keepdims=True)
    p = p / np.where(mass == 0, 1, mass)
    dots = jnp.einsum("btie,bse->btis", index["q"], index["keys"])
    scores = jnp.einsum("btis,bti->bts", jax.nn.relu(dots), index["weights"])
    some = visible.any(-1, keepdims=True)
    scores = jnp.where(visible | ~some, scores, -jnp.inf)
    logarithm = jax.nn.log_softmax(scores, -1)
    terms = jnp.where(visible, logarithm, 0)
    of_p = p * np.log(np.where(p > 0, p, 1))
    return jnp.sum(jnp.asarray(of_p) - jnp.asarray(p) * terms, -1)

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

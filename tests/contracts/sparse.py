"""Laws of every kind of selection, with a case for each kind.

The truth is dense attention under a mask that NumPy makes by the definition of
the kind, in natural order and in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.ops.rope import Rope

B, N, K, H, J = 2, 4, 2, 8, 6
# Largest errors of a float32 output and of a float32 gradient.
OUTPUT, GRADIENT = 2e-6, 5e-6
LAYOUTS: dict[str, rj.Layout] = {
  "contiguous": rj.Contiguous(),
  "striped": rj.Striped(),
  "striped4": rj.Striped(4),
  "zigzag": rj.Zigzag(),
}
# Two rows of packed documents; 0 is padding.
PACKED = np.stack(
  [np.repeat([1, 2, 3, 0], [9, 14, 12, 5]), np.repeat([4, 5, 6], [3, 20, 17])]
).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
  """A kind of selection with its definition.

  Attributes:
    arrays: Makes the selection's arrays, [B, T, ...], from a generator and T.
    selection: Makes the selection from those arrays.
    allowed: (arrays, q, k, visible [B, T, S], segments [B, T]) to the pairs
      that are read, bool [B, N, T, S].
  """

  arrays: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
  selection: Callable[..., Any]
  allowed: Callable[..., np.ndarray]


def best(scores: np.ndarray, count: int) -> np.ndarray:
  """Mark the `count` best finite scores of each row, the first of equals."""
  order = np.argsort(-scores, -1, kind="stable")[..., :count]
  marked = np.zeros(scores.shape, bool)
  np.put_along_axis(marked, order, True, -1)
  return marked & (scores > -np.inf)


def _of_blocks(marked: np.ndarray, block: int, s: int) -> np.ndarray:
  return np.repeat(marked, block, -1)[..., :s]


def given_blocks(block: int, heads: int, n: int) -> Case:
  """Blocks by hand, among them repeated ones and none."""

  def arrays(r: np.random.Generator, t: int) -> dict[str, np.ndarray]:
    blocks = r.integers(-1, -(-t // block), (B, t, heads, n))
    return {"blocks": blocks.astype(np.int32)}

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    del k, seg
    s = visible.shape[2]
    marked = np.zeros((B, s, heads, -(-s // block) + 1), bool)
    np.put_along_axis(marked, x["blocks"], True, -1)
    marked = _of_blocks(marked[..., :-1], block, s).swapaxes(1, 2)
    return np.repeat(marked, N // heads, 1) & visible[:, None]

  return Case(arrays, lambda **x: rj.GivenBlocks(block=block, **x), allowed)


def top_tokens(count: int, tied: bool = False) -> Case:
  """Tokens by an index, whose scores are often equal if `tied`."""

  def arrays(r: np.random.Generator, t: int) -> dict[str, np.ndarray]:
    draw = lambda *shape: (
      r.integers(-1, 2, shape) if tied else r.normal(size=shape)
    ).astype(np.float32)
    return {
      "q": draw(B, t, 2, 4),
      "weights": np.abs(draw(B, t, 2)),
      "keys": draw(B, t, 4),
    }

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    del q, k, seg
    dots = np.maximum(np.einsum("btie,bse->btis", x["q"], x["keys"]), 0)
    scores = np.einsum("btis,bti->bts", dots, x["weights"])
    marked = best(np.where(visible, scores, -np.inf), count)
    return np.repeat(marked[:, None], N, 1)

  return Case(arrays, lambda **x: rj.TopTokens(count=count, **x), allowed)


def top_tokens_of_blocks(count: int, block: int, blocks: int) -> Case:
  """Tokens by an index, of the best blocks by the means of its keys."""
  case = top_tokens(count)

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    del k
    t = q.shape[1]
    score = lambda b, i, keys: (
      np.maximum(x["q"][b, i].astype(np.float64) @ keys.T, 0).T
      @ x["weights"][b, i]
    )
    of_blocks = np.full((B, t, -(-t // block)), -np.inf)
    of_tokens = np.full(visible.shape, -np.inf)
    for b, i in np.ndindex(B, t):
      of_tokens[b, i] = score(b, i, x["keys"][b])
      for c in range(i // block + 1):
        inside = np.arange(c * block, min(t, (c + 1) * block))
        inside = inside[seg[b, inside] != 0]
        if not len(inside) or seg[b, i] == 0:
          continue
        inside = inside[seg[b, inside] == seg[b, inside[-1]]]
        if c == i // block:
          of_blocks[b, i, c] = np.inf
        elif visible[b, i, inside].any():
          mean = x["keys"][b, inside].astype(np.float64).mean(0)
          of_blocks[b, i, c] = score(b, i, mean)
    kept = _of_blocks(best(of_blocks, blocks), block, t) & visible
    marked = best(np.where(kept, of_tokens, -np.inf), count)
    return np.repeat(marked[:, None], N, 1)

  selection = lambda **x: rj.TopTokensOfBlocks(
    count=count, block=block, blocks=blocks, **x
  )
  return Case(case.arrays, selection, allowed)


def top_blocks(count: int, block: int, heads: str, pooling: str) -> Case:
  """Blocks by pooled keys, in causal calls."""

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    del x
    t = q.shape[1]
    scores = np.full((B, N, t, -(-t // block)), -np.inf)
    for b, i, c in np.ndindex(B, t, scores.shape[3]):
      inside = np.arange(c * block, min(t, (c + 1) * block))
      inside = inside[seg[b, inside] != 0]
      if not len(inside) or seg[b, i] == 0 or c > i // block:
        continue
      inside = inside[seg[b, inside] == seg[b, inside[-1]]]
      if c == i // block:
        scores[b, :, i, c] = np.inf
      elif visible[b, i, inside].any():
        for n in range(N):
          keys = k[b, inside, n // (N // K)].astype(np.float64)
          query = q[b, i, n].astype(np.float64)
          if pooling == "mean":
            scores[b, n, i, c] = query @ keys.mean(0)
          else:
            products = np.stack([query * keys.min(0), query * keys.max(0)])
            scores[b, n, i, c] = products.max(0).sum()
    if heads == "kv":
      scores = scores.reshape(B, K, N // K, *scores.shape[2:]).sum(2)
      scores = np.repeat(scores, N // K, 1)
    return _of_blocks(best(scores, count), block, t) & visible[:, None]

  return Case(
    lambda r, t: {},
    lambda: rj.TopBlocks(
      count=count, block=block, heads=heads, pooling=pooling
    ),
    allowed,
  )


def top_index_blocks(count: int, block: int, local: int) -> Case:
  """Blocks by the best score of an index's keys, one choice per kv head."""

  def arrays(r: np.random.Generator, t: int) -> dict[str, np.ndarray]:
    draw = lambda *shape: r.normal(size=shape).astype(np.float32)
    return {"q": draw(B, t, K, 4), "keys": draw(B, t, 4)}

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    del q, k, seg
    t = visible.shape[1]
    scores = np.einsum("btke,bse->bkts", x["q"].astype(np.float64), x["keys"])
    scores = np.where(visible[:, None], scores, -np.inf)
    scores = np.pad(
      scores, [(0, 0)] * 3 + [(0, -t % block)], constant_values=-np.inf
    )
    scores = scores.reshape(*scores.shape[:3], -1, block).max(-1)
    distance = np.arange(t)[:, None] // block - np.arange(scores.shape[3])
    near = (distance >= 0) & (distance < local) & (scores > -np.inf)
    marked = best(np.where(near, 1e9, scores), count)
    marked = np.repeat(_of_blocks(marked, block, t), N // K, 1)
    return marked & visible[:, None]

  selection = lambda **x: rj.TopIndexBlocks(
    count=count, block=block, local=local, **x
  )
  return Case(arrays, selection, allowed)


def top_pooled_blocks(count: int, block: int) -> Case:
  """Blocks that have ended, by an index's pooled keys, and the query's own."""
  bias = np.random.default_rng(5).normal(size=(block, 4)).astype(np.float32)

  def arrays(r: np.random.Generator, t: int) -> dict[str, np.ndarray]:
    draw = lambda *shape: r.normal(size=shape).astype(np.float32)
    return {
      "q": draw(B, t, 3, 4),
      "weights": draw(B, t, 3),
      "keys": draw(B, t, 8),
    }

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    del q, k
    t = visible.shape[1]
    scores = np.full((B, t, -(-t // block)), -np.inf)
    for b, c in np.ndindex(B, t // block):
      inside = np.arange(c * block, (c + 1) * block)
      if seg[b, inside[0]] == 0 or len(set(seg[b, inside])) > 1:
        continue
      keys, gates = np.split(x["keys"][b, inside].astype(np.float64), 2, -1)
      weights = np.exp(gates + bias)
      pooled = (weights / weights.sum(0) * keys).sum(0)
      for i in np.flatnonzero(visible[b, :, inside[-1]]):
        dots = np.maximum(x["q"][b, i] @ pooled, 0)
        scores[b, i, c] = x["weights"][b, i] @ dots
    marked = best(scores, count)
    for b, i in np.ndindex(B, t):
      marked[b, i, i // block] |= scores[b, i, i // block] == -np.inf
    marked = _of_blocks(marked, block, t) & visible
    return np.repeat(marked[:, None], N, 1)

  selection = lambda **x: rj.TopPooledBlocks(
    count=count, bias=jnp.asarray(bias), **x
  )
  return Case(arrays, selection, allowed)


def top_mean_blocks(count: int, block: int) -> Case:
  """The same with means of the keys, normed and rotated by their position."""
  dims, turned = 4, 2
  gated = top_pooled_blocks(count, block)
  rope = Rope(theta=20.0, dims=turned)
  weight = np.random.default_rng(6).uniform(0.5, 1.5, dims).astype(np.float32)

  def arrays(r: np.random.Generator, t: int) -> dict[str, np.ndarray]:
    with_gates = gated.arrays(r, t)
    return with_gates | {"keys": with_gates["keys"][..., :dims]}

  def allowed(x, q, k, visible, seg) -> np.ndarray:
    keys = x["keys"].astype(np.float64)
    t = keys.shape[1]
    first = np.arange(t) // block * block
    for b in range(B):
      mean = np.stack([keys[b, n : n + block].mean(0) for n in first])
      mean *= weight / np.sqrt((mean**2).mean(-1, keepdims=True) + 1e-6)
      angle = first[:, None] * 20.0 ** (-np.arange(0, turned, 2) / turned)
      halves = mean[:, : turned // 2], mean[:, turned // 2 : turned]
      cos, sin = np.cos(angle), np.sin(angle)
      mean[:, :turned] = np.concatenate(
        [halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin],
        -1,
      )
      keys[b] = mean
    # All keys of a block are equal, so any gates give their mean.
    keys = np.concatenate([keys, np.zeros_like(keys)], -1)
    return gated.allowed(x | {"keys": keys}, q, k, visible, seg)

  selection = lambda **x: rj.TopPooledBlocks(
    count=count,
    bias=jnp.zeros((block, dims)),
    norm=jnp.asarray(weight),
    rope=rope,
    **x,
  )
  return Case(arrays, selection, allowed)


CASES = {
  "given-tokens": given_blocks(1, 1, 6),
  "given-blocks": given_blocks(4, K, 3),
  "given-blocks-per-query-head": given_blocks(8, N, 2),
  "top-tokens": top_tokens(7),
  "top-tokens-tied": top_tokens(7, tied=True),
  "top-tokens-of-blocks": top_tokens_of_blocks(5, 4, 3),
  "top-index-blocks": top_index_blocks(3, 4, 2),
  "top-pooled-blocks": top_pooled_blocks(3, 4),
  "top-mean-blocks": top_mean_blocks(3, 4),
  "top-blocks": top_blocks(3, 4, "query", "mean"),
  "top-blocks-of-kv-heads": top_blocks(2, 8, "kv", "mean"),
  "top-blocks-by-bounds": top_blocks(3, 4, "kv", "bounds"),
}


def dense(allowed, q, k, v, sinks=None, soft_cap=None):
  """(out, lse) of dense attention under a mask [B, N, T, S]."""
  k, v = (jnp.repeat(x, N // K, 2) for x in (k, v))
  s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * H**-0.5
  if soft_cap is not None:
    s = soft_cap * jnp.tanh(s / soft_cap)
  s = jnp.where(allowed, s, -jnp.inf)
  if sinks is not None:
    sink = jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
    s = jnp.concatenate([s, sink], -1)
    v = jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
  sees_key = jnp.any(s > -jnp.inf, -1, keepdims=True)
  s = jnp.where(sees_key, s, 0)
  p = jnp.where(sees_key, jax.nn.softmax(s, -1), 0)
  out = jnp.einsum("bnts,bsnj->btnj", p, v, precision="highest")
  lse = jnp.where(sees_key[..., 0], jax.nn.logsumexp(s, -1), 0)
  return out, lse.swapaxes(1, 2)


def check(
  case: Case,
  layout: rj.Layout = LAYOUTS["contiguous"],
  shards: int = 1,
  *,
  t: int = 40,
  window: int | None = None,
  packed: bool = False,
  sinks: bool = False,
  soft_cap: float | None = None,
  mesh: Any = None,
  seed: int = 0,
) -> None:
  """Outputs, log-sum-exps and all gradients equal those of dense attention."""
  r = np.random.default_rng(seed)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)
  q, k, v = draw(B, t, N, H), draw(B, t, K, H), draw(B, t, K, J)
  arrays = case.arrays(r, t)
  seg = PACKED if packed else np.ones((B, t), np.int32)
  i, j = np.arange(t)[:, None], np.arange(t)
  visible = (j <= i) & (seg[:, :, None] == seg[:, None]) & (seg != 0)[:, None]
  if window is not None:
    visible &= i - j <= window
  allowed = case.allowed(arrays, q, k, visible, seg)
  sink = draw(N) if sinks else None
  weights = draw(B, t, N, J), draw(B, t, N)

  def loss(out, lse):
    finite = jnp.where(lse > -jnp.inf, lse, 0)
    of_out, of_lse = (jnp.asarray(x, out.dtype) for x in weights)
    return jnp.sum(out * of_out) + jnp.sum(finite * of_lse)

  def truth(q, k, v, sink):
    out, lse = dense(allowed, q, k, v, sink, soft_cap)
    return loss(out, lse), out

  into = lambda x: layout.permute(jnp.asarray(x), shards=shards)
  back = lambda x: layout.restore(x, shards=shards)
  selection = case.selection(**{name: into(x) for name, x in arrays.items()})

  def sparse(q, k, v, sink):
    out, lse = rj.sparse_attention(
      into(q),
      into(k),
      into(v),
      selection,
      is_causal=True,
      mesh=mesh,
      layout=layout,
      local_window_size=None if window is None else (window, 0),
      q_segment_ids=into(seg) if packed else None,
      sinks=sink,
      logits_soft_cap=soft_cap,
      return_residual=True,
    )
    return loss(back(out), back(lse)), back(out)

  names = (0, 1, 2, 3) if sinks else (0, 1, 2)
  with jax.enable_x64(True):
    (_, expected), expected_gradients = jax.value_and_grad(
      truth, names, has_aux=True
    )(*(None if x is None else x.astype(np.float64) for x in (q, k, v, sink)))
  (_, out), gradients = jax.jit(
    jax.value_and_grad(sparse, names, has_aux=True)
  )(q, k, v, sink)
  np.testing.assert_allclose(out, expected, rtol=0, atol=OUTPUT)
  for got, want in zip(gradients, expected_gradients, strict=True):
    np.testing.assert_allclose(got, want, rtol=0, atol=GRADIENT)


def check_latents(
  layout: rj.Layout, shards: int = 1, mesh: Any = None, *, t: int = 40
) -> None:
  """Attention to chosen rows equals that to the keys of all heads, chosen.

  Tokens have positions of their own, 3 in the first row on, in any order in the
  second.
  """
  r = np.random.default_rng(0)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)
  latent, shared, plain = 5, 2, 6
  q, rows = draw(B, t, N, plain + shared), draw(B, t, latent + shared)
  up = draw(latent, N, plain + J)
  index = {"q": draw(B, t, 2, 4), "keys": draw(B, t, 4)}
  index["weights"] = draw(B, t, 2)
  pos = np.stack([np.arange(t) + 3, r.permutation(t)]).astype(np.int32)
  weights = draw(B, t, N, J), draw(B, t, N)

  visible = pos[:, None] <= pos[:, :, None]
  dots = np.maximum(np.einsum("btie,bse->btis", index["q"], index["keys"]), 0)
  scores = np.einsum("btis,bti->bts", dots, index["weights"])
  # By position, the lowest of equals first.
  order = np.argsort(pos, -1)[:, None].repeat(t, 1)
  scores = np.where(visible, scores, -np.inf)
  ordered = best(np.take_along_axis(scores, order, -1), 7)
  allowed = np.zeros_like(visible)
  np.put_along_axis(allowed, order, ordered, -1)
  allowed = allowed[:, None]

  def loss(out, lse):
    of_out, of_lse = (jnp.asarray(x, out.dtype) for x in weights)
    return jnp.sum(out * of_out) + jnp.sum(lse * of_lse)

  def truth(q, rows, up):
    kv = jnp.einsum("bsc,cny->bsny", rows[..., :latent], up)
    of_heads = jnp.repeat(rows[:, :, None, latent:], N, 2)
    k = jnp.concatenate([kv[..., :plain], of_heads], -1)
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[3] ** -0.5
    s = jnp.where(allowed, s, -jnp.inf)
    out = jnp.einsum("bnts,bsnj->btnj", jax.nn.softmax(s), kv[..., plain:])
    return loss(out, jax.nn.logsumexp(s, -1).swapaxes(1, 2)), out

  into = lambda x: layout.permute(jnp.asarray(x), shards=shards)
  back = lambda x: layout.restore(x, shards=shards)
  selection = rj.TopTokens(
    count=7, **{name: into(x) for name, x in index.items()}
  )

  def sparse(q, rows, up):
    out, lse = rj.sparse_latent_attention(
      into(q),
      into(rows),
      up,
      selection,
      is_causal=True,
      mesh=mesh,
      axis=None if mesh is None else "seq",
      head_axis="model" if mesh is not None and "model" in mesh.shape else None,
      layout=layout,
      q_positions=into(pos),
      kv_positions=into(pos),
      return_residual=True,
    )
    return loss(back(out), back(lse)), back(out)

  gradient = lambda f: jax.value_and_grad(f, (0, 1, 2), has_aux=True)
  with jax.enable_x64(True):
    wide = (x.astype(np.float64) for x in (q, rows, up))
    (_, expected), expected_gradients = gradient(truth)(*wide)
  (_, out), gradients = jax.jit(gradient(sparse))(q, rows, up)
  np.testing.assert_allclose(out, expected, rtol=0, atol=2 * OUTPUT)
  for got, want in zip(gradients, expected_gradients, strict=True):
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=GRADIENT)

"""Sparse attention per shard: choose, then attend."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  ShardTokens,
)
from ringjax.ops.attention.sparse.gathered import GatherChosen


def attend_chosen(
  selection: BlockSelection,
  tokens: ShardTokens,
  v: Float[Array, "B S K J"],
  scores: Scores,
  sinks: Float[Array, " N"] | None,
) -> tuple[
  Float[Array, "B T N _"], Float[Array, "B T N"], Int[Array, "B T M n"]
]:
  """Return the output, the log-sum-exp and the blocks of each query.

  Values without numbers stand for the keys themselves.
  """
  b, t, n, h = tokens.q.shape
  selection, q, k = lax.stop_gradient((selection, tokens.q, tokens.k))
  chosen = selection.choose(dataclasses.replace(tokens, q=q, k=k))
  chosen = lax.stop_gradient(chosen)
  kv_heads = tokens.k.shape[2]
  heads = n if chosen.shape[2] == n else kv_heads
  local = Local(
    jnp.transpose(
      tokens.q.reshape(b, t, heads, n // heads, h), (0, 2, 3, 1, 4)
    ),
    jnp.swapaxes(tokens.k, 1, 2),
    jnp.swapaxes(v, 1, 2),
  )
  context = Context(
    tokens.q_at,
    tokens.k_at,
    tokens.mask,
    chosen=chosen,
    number=tokens.number,
  )
  terms = Terms(sinks=None if sinks is None else sinks.reshape(heads, -1))
  algorithm = GatherChosen(tokens.length, selection.block_size, tokens.axis)
  out, lse = attend(algorithm, scores, local, terms, context)
  out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
  lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(b, t, n)
  return out, lse, chosen

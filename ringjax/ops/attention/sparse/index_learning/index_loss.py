"""`index_loss`: how far an index's scores are from attention.

Guarantees: the loss of a query is KL(p || softmax(I)), where p are attention's
own probabilities, summed over heads and normalised, and I the index's scores,
over all keys that the query sees or over those that it has chosen. Of an index
of blocks both are of blocks: p is also summed over the keys of a block, over
those blocks among which the index chooses, without those that a query reads in
any case. Its gradient reaches the index alone.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from ringjax.checks import as_array, instance
from ringjax.errors import OptionError, ShapeError
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.execution import run
from ringjax.ops.attention.sparse.block_selection import (
  ScoredBlocks,
  check_shape,
)
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.sparse.index_learning.block_training import (
  BlockIndexTraining,
)
from ringjax.ops.attention.sparse.index_learning.token_training import (
  IndexTraining,
)
from ringjax.ops.attention.sparse.sparse_api import (
  check_head_shards,
  known_options,
  with_selection,
)
from ringjax.ops.attention.sparse.top_tokens import TopTokens
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.parallel.call_sharding import AUTO, locate, shards_of
from ringjax.parallel.layout import Layout


def index_loss(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S ..."],
  index: TopTokens | ScoredBlocks,
  lse: Float[Array, "B T N"],
  *,
  chosen: GivenBlocks | None = None,
  up: Float[Array, "C N Y"] | None = None,
  is_causal: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = AUTO,
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  **options: Any,
) -> Float[Array, "B T"]:
  """Measure how far an index's scores are from attention's probabilities.

  Before attention reads chosen keys alone, an index learns from dense attention
  (`chosen=None`); then from sparse attention, over the keys that it chose. The
  mean over tokens is what to minimise. No gradient reaches query, key, `up` and
  `lse`.

  Args:
    query: Queries of attention, [B, T, N, H].
    key: Keys of attention, [B, S, K, H], or rows of latents [B, S, C + R].
    index: Index, whose count is not used: `TopTokens`, `TopPooledBlocks` or
      `TopIndexBlocks`.
    lse: Log-sum-exp of attention's scores, float32 [B, T, N]: what attention
      returns with `return_residual=True`.
    chosen: Keys that each query has chosen, what sparse attention by this
      index returns with `return_selection=True`; None for all that it sees.
    up: Up-projection, where keys are rows, as in `sparse_latent_attention`.
    is_causal: Whether a query only sees keys at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    **options: Further arguments of `sparse_attention`, those of the attention
      that made `lse`; `sinks` have no key and are not passed.

  Returns:
    Loss of each query, float32 [B, T]; 0 for one that sees no key. Its mean
    over the kv heads where each chooses for itself.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  if not isinstance(index, TopTokens | ScoredBlocks):
    raise OptionError(
      "index",
      f"a {type(index).__name__}",
      "a TopTokens, TopPooledBlocks or TopIndexBlocks",
      "pass a selection by the scores of an index",
    )
  if options.get("sinks") is not None:
    raise OptionError(
      "sinks",
      "sinks of attention",
      "none: a sink has no key, and its share is not part of the loss",
      "leave out sinks; lse may be that of attention with sinks",
    )
  key_shards = shards_of(None if axis == AUTO else axis)
  x = AttentionArgs.of(
    query,
    key,
    key,
    is_causal=is_causal,
    layout=layout,
    key_shards=key_shards,
    up=up,
    **known_options(options),
  )
  if not x.batched:
    raise ShapeError(
      "query",
      f"{jnp.shape(query)}, without a batch axis",
      "[B, T, N, H]",
      "add an axis: query[None]",
    )
  b, s = x.k.shape[:2]
  lse = as_array("lse", lse)
  check_shape("lse", lse, x.q.shape[:3], "attention's log-sum-exp")
  one_index_key = (b, s * key_shards, *x.k.shape[2:])
  index.check(x.q.shape, one_index_key, x.mask)
  lists = index.choice_heads(x.q.shape[2], x.kv_heads)
  of_blocks = isinstance(index, ScoredBlocks)
  if of_blocks and x.k_pos is not None:
    raise OptionError(
      "kv_positions",
      f"positions of keys with a {type(index).__name__}",
      "keys at the positions of the layout: its blocks are of positions",
      "leave out kv_positions, or learn from tokens with TopTokens",
    )
  blocks, size = None, 1
  if chosen is not None:
    instance("chosen", chosen, GivenBlocks)
    chosen.check(x.q.shape, one_index_key, x.mask)
    heads = "one choice for all heads" if lists == 1 else "one for each kv head"
    if chosen.blocks.shape[2] != lists:
      raise OptionError(
        "chosen",
        f"blocks of shape {chosen.blocks.shape}",
        f"{heads}, [B, T, {lists}, n]",
        "pass what sparse attention with this index returns",
      )
    if of_blocks and chosen.block != index.block_size:
      raise OptionError(
        "chosen",
        f"blocks of {chosen.block} keys",
        f"those of the index, of {index.block_size} keys",
        "pass what sparse attention with this index returns",
      )
    blocks, size = chosen.blocks, chosen.block
  if x.up is not None:
    x = x.absorbed()
  place = locate(
    x.operands,
    mesh,
    axis,
    required=False,
    batch_axis=batch_axis,
    head_axis=head_axis,
    by_name=False,
  )
  x = lax.stop_gradient(x)
  if isinstance(index, ScoredBlocks):
    check_head_shards(index, x.kv_heads, place)
    x = with_selection(
      x, BlockIndexTraining(index=index, lse=lse, chosen=blocks)
    )
    losses = run(x, place, Ring(Blockwise()), True)[1]
    # Query heads have the loss of the head that chooses for them.
    losses = losses[:, :, :: x.q.shape[2] // lists]
    return jnp.mean(losses, -1).astype(jnp.float32)
  training = IndexTraining(
    q=index.q,
    weights=index.weights,
    keys=index.keys,
    lse=lse,
    chosen=blocks,
    block=size,
  )
  x = with_selection(x, training)
  # Each head has the loss of all of them.
  return run(x, place, Ring(Blockwise()), True)[1][:, :, 0].astype(jnp.float32)

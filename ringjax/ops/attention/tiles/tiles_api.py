"""Attention of a prompt over chosen tiles, on one device or on a mesh.

Guarantees: the result is that of dense attention under the mask that the choice
stands for. A sequence over a mesh axis is exchanged for heads, so that the
choice is the one of a single device, whatever the mesh.
Cost: the estimate of the pattern, and the products of the chosen tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from ringjax import tree
from ringjax.checks import boolean
from ringjax.errors import OptionError
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.sparse.block_selection import KeyChoice, ShardTokens
from ringjax.ops.attention.sparse.sparse_api import (
  attend_selected,
  known_options,
)
from ringjax.ops.attention.strategies.ulysses import heads_for_tokens
from ringjax.ops.attention.tiles.chosen_tiles import ChosenTiles, check_mask
from ringjax.ops.attention.tiles.patterns import pattern_of
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import add_sink, finalize
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import AUTO
from ringjax.parallel.layout import Contiguous, Layout


class QueryTiles(NamedTuple):
  """Number of tiles of the block of each query, int32 [B, T, N] each.

  Fields:
    chosen: Tiles of keys that the block reads.
    visible: Tiles of keys of which the mask shows a pair.
  """

  chosen: Int[Array, "B T N"]
  visible: Int[Array, "B T N"]


def tile_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K J"],
  pattern: TilePattern | str,
  *,
  is_causal: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = AUTO,
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  return_residual: bool = False,
  return_tiles: bool = False,
  **options: Any,
) -> Any:
  """Attend to the tiles of keys that a pattern chooses for blocks of queries.

  For prompts of models that were trained with dense attention: what is left
  out is a small part of it. Forward only.

  Args:
    query: Queries, [B, T, N, H], T over `axis`, in natural order.
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, J].
    pattern: `XAttention(threshold=0.9)` or another pattern, or its text,
      "xattention,threshold=0.9". Of `threshold=1` the result is that of
      `strategy="ulysses"`, on one device of blockwise attention, to the bit.
    is_causal: Whether a query only sees keys at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S; shards exchange tokens for heads.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards, `Contiguous()`.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N],
      of the keys of chosen tiles.
    return_tiles: Whether to return the numbers of tiles, too, `QueryTiles`.
    **options: `mask` (a ringjax mask without arrays), `scale`,
      `query_seq_lengths`, `key_value_seq_lengths`, `local_window_size`,
      `q_segment_ids`, `kv_segment_ids`, `q_positions`, `kv_positions`, `sinks`
      and `logits_soft_cap` of `dot_product_attention`.

  Returns:
    [B, T, N, J] in the query's dtype; with what is asked for a tuple of it, the
    log-sum-exp and the tiles.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  return_residual = boolean("return_residual", return_residual)
  return_tiles = boolean("return_tiles", return_tiles)
  if layout is not None and not isinstance(layout, Contiguous):
    raise OptionError(
      "layout",
      repr(layout),
      "Contiguous(): tiles are of neighbouring tokens",
      "leave it out",
    )
  pattern = pattern_of(pattern)
  place = {"mesh": mesh, "batch_axis": batch_axis, "head_axis": head_axis}
  options = known_options(options) | {"is_causal": is_causal, "layout": layout}
  select = lambda: attend_selected(
    (query, key, value),
    TileSelection(pattern=pattern),
    place,
    axis,
    **options,
  )
  tiles = None
  if pattern.keeps_all:
    out, lse = dot_product_attention(
      query,
      key,
      value,
      **place,
      axis=axis,
      strategy="ulysses",
      return_residual=True,
      **options,
    )
    if return_tiles:
      tiles = select()[2]
  else:
    out, lse, tiles = select()
  results: list[Any] = [out]
  if return_residual:
    results.append(lse)
  if return_tiles:
    assert tiles is not None
    results.append(QueryTiles(tiles[..., 0], tiles[..., 1]))
  return results[0] if len(results) == 1 else tuple(results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSelection(KeyChoice):
  """KeyChoice of the tiles of a pattern; its record is `QueryTiles`.

  Attributes:
    pattern: Choice of the tiles.
  """

  pattern: TilePattern

  @property
  def by_position(self) -> bool:
    return False

  def choice_heads(self, heads: int, kv_heads: int) -> int:
    del kv_heads
    return heads

  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    del q, k
    check_mask(mask)

  def attend(
    self,
    tokens: ShardTokens,
    v: Float[Array, "B S K J"],
    scores: Scores,
    sinks: Float[Array, " N"] | None,
    head_axes: tuple[str, ...],
  ) -> tuple[
    Float[Array, "B T N _"], Float[Array, "B T N"], Int[Array, "B T N n"]
  ]:
    del head_axes
    b, t, n, h = tokens.q.shape
    kv_heads = tokens.k.shape[2]
    local = Local(
      jnp.transpose(
        tokens.q.reshape(b, t, kv_heads, n // kv_heads, h), (0, 2, 3, 1, 4)
      ),
      jnp.swapaxes(tokens.k, 1, 2),
      jnp.swapaxes(v, 1, 2),
    )
    terms = Terms(sinks=None if sinks is None else sinks.reshape(kv_heads, -1))
    context = Context(tokens.q_at, tokens.k_at, tokens.mask)
    out, lse, tiles = _attend_tiles(
      _TileCall(self.pattern, tokens.axis, scores), local, terms, context
    )
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
    lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(b, t, n)
    tiles = jnp.transpose(tiles, (0, 3, 1, 2, 4)).reshape(b, t, n, 2)
    return out, lse, tiles


tree.register(TileSelection, (), ("pattern",))


@dataclasses.dataclass(frozen=True)
class _TileCall:
  """Static part of a call: the pattern, the sequence's axis and the scores."""

  pattern: TilePattern
  axis: str | tuple[str, ...] | None
  scores: Scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_tiles(
  call: _TileCall, x: Local, terms: Terms, context: Context
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Per shard: output, log-sum-exp and tiles, [B, K, G, T, ...]."""
  back = lambda a: a
  if call.axis is not None:
    axes = collectives.names(call.axis)
    x, terms, context, back = heads_for_tokens(
      call.axis, axes, x, terms, context
    )
  else:
    axes = collectives.varying_axes(x, terms, context)
    x, terms, context = collectives.vary((x, terms, context), axes)
  args = ScoreArgs(call.scores, Terms(), context)
  algorithm = ChosenTiles(call.pattern).on_device(jax.default_backend(), "")
  partial, counts = algorithm.partial(x, args)
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  out, lse = finalize(partial)
  length, block = x.q.shape[3], call.pattern.block
  shape = counts.chosen.shape
  visible = jnp.broadcast_to(counts.visible[:, None, None], shape)
  tiles = jnp.stack([counts.chosen, visible], -1)
  tiles = jnp.repeat(tiles, block, 3)[:, :, :, :length]
  return back(out.astype(x.q.dtype)), back(lse[..., None])[..., 0], back(tiles)


def _refused(*args: Any) -> Any:
  del args
  raise OptionError(
    "pattern",
    "a gradient through chosen tiles",
    "a forward pass",
    "call rj.sparse_attention, or rj.dot_product_attention",
  )


_attend_tiles.defvjp(_refused, _refused)

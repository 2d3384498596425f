"""Attention of a prompt over chosen tiles, on one device or on a mesh.

Guarantees: the result is that of dense attention under the mask that the choice
stands for, and the choice is the one of a single device, whatever the mesh and
the layout: tiles are blocks of neighbouring tokens of the sequence. A sequence
over a mesh axis is exchanged for heads ("ulysses"), or keys go around the ring
and each shard chooses for its queries ("ring").
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
from ringjax.checks import boolean, one_of
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
from ringjax.ops.attention.tiles.chosen_tiles import (
  ChosenTiles,
  ShardTiles,
  check_mask,
)
from ringjax.ops.attention.tiles.patterns import pattern_of
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.ops.attention.tiles.tile_shards import (
  AxisName,
  BlockDeal,
  TileShards,
  check_layout,
  whole_blocks,
)
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import add_sink, finalize
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import AUTO
from ringjax.parallel.layout import Contiguous, Layout

# Strategies for tokens that a mesh axis shards.
STRATEGIES = ("ring", "ulysses")


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
  strategy: str | None = None,
  return_residual: bool = False,
  return_tiles: bool = False,
  **options: Any,
) -> Any:
  """Attend to the tiles of keys that a pattern chooses for blocks of queries.

  For prompts of models that were trained with dense attention: what is left
  out is a small part of it. Forward only.

  Args:
    query: Queries, [B, T, N, H], T over `axis`, in the order of `layout`.
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, J].
    pattern: `XAttention(threshold=0.9)` or another pattern, or its text,
      "xattention,threshold=0.9". Of `threshold=1` the result is that of
      `dot_product_attention` with the same strategy and layout, on one device
      of blockwise attention, to the bit.
    is_causal: Whether a query only sees keys at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards, `Contiguous()`, `Striped()` or
      `Zigzag()`; default `Contiguous()`. Shards that do not hold whole blocks
      of the pattern's tokens, as of `Striped(block)`, exchange tokens first.
    strategy: "ring": each shard chooses for its queries, and keys go around
      the ring; or "ulysses": shards exchange tokens for heads, in
      `Contiguous()` only. Default: "ulysses" for `Contiguous()`, else "ring".
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
  layout = Contiguous() if layout is None else layout
  strategy = _checked_strategy(strategy, layout)
  pattern = pattern_of(pattern)
  place = {"mesh": mesh, "batch_axis": batch_axis, "head_axis": head_axis}
  options = known_options(options) | {"is_causal": is_causal, "layout": layout}
  select = lambda: attend_selected(
    (query, key, value),
    TileSelection(pattern=pattern, strategy=strategy, layout=layout),
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
      strategy=strategy,
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


def _checked_strategy(strategy: str | None, layout: Layout) -> str:
  """Check the strategy for a layout, and return it or the default.

  Raises:
    OptionError: If it is unknown, or does not fit the layout.
  """
  check_layout(layout)
  contiguous = isinstance(layout, Contiguous)
  if strategy is None:
    return STRATEGIES[1] if contiguous else STRATEGIES[0]
  one_of("strategy", strategy, STRATEGIES)
  if strategy == "ulysses" and not contiguous:
    raise OptionError(
      "strategy",
      f"'ulysses' in the layout {layout}",
      "Contiguous(): shards exchange tokens in the sequence's order",
      "pass strategy='ring', or leave layout= out",
    )
  return strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSelection(KeyChoice):
  """KeyChoice of the tiles of a pattern; its record is `QueryTiles`.

  Attributes:
    pattern: Choice of the tiles.
    strategy: "ring" or "ulysses", where a mesh axis shards the tokens.
    layout: Order of the tokens on the shards.
  """

  pattern: TilePattern
  strategy: str = "ulysses"
  layout: Layout = Contiguous()

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
    q, k, q_at, k_at = tokens.q, tokens.k, tokens.q_at, tokens.k_at
    axis, layout, back = tokens.axis, self.layout, lambda a: a
    shards = 1 if axis is None else collectives.axis_size(axis)
    ring = shards > 1 and self.strategy == "ring"
    block = self.pattern.block
    if ring and not whole_blocks(layout, shards, q.shape[1], block):
      assert axis is not None
      deal = BlockDeal(axis, layout, q.shape[1], block)
      (q, *coords), back = deal.to_blocks((q, *q_at)), deal.from_blocks
      q_at, q_layout = Coords(*coords), deal.layout
    else:
      q_layout = layout
    if ring and not whole_blocks(layout, shards, k.shape[1], block):
      assert axis is not None
      deal = BlockDeal(axis, layout, k.shape[1], block)
      k, v, *coords = deal.to_blocks((k, v, *k_at))
      k_at, k_layout = Coords(*coords), deal.layout
    else:
      k_layout = layout
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    local = Local(
      jnp.transpose(
        q.reshape(b, t, kv_heads, n // kv_heads, h), (0, 2, 3, 1, 4)
      ),
      jnp.swapaxes(k, 1, 2),
      jnp.swapaxes(v, 1, 2),
    )
    terms = Terms(sinks=None if sinks is None else sinks.reshape(kv_heads, -1))
    context = Context(q_at, k_at, tokens.mask)
    layouts = (q_layout, k_layout) if ring else None
    out, lse, tiles = _attend_tiles(
      _TileCall(self.pattern, axis, scores, layouts), local, terms, context
    )
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
    lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(b, t, n)
    tiles = jnp.transpose(tiles, (0, 3, 1, 2, 4)).reshape(b, t, n, 2)
    return back((out, lse, tiles))


tree.register(TileSelection, (), ("pattern", "strategy", "layout"))


@dataclasses.dataclass(frozen=True)
class _TileCall:
  """Static part of a call.

  Attributes:
    pattern: Choice of the tiles.
    axis: Manual axis that shards the tokens, or None.
    scores: Static part of the score function.
    layouts: Layouts of queries and keys, of whole blocks, where keys go around
      a ring; None: shards exchange tokens for heads.
  """

  pattern: TilePattern
  axis: AxisName | None
  scores: Scores
  layouts: tuple[Layout, Layout] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_tiles(
  call: _TileCall, x: Local, terms: Terms, context: Context
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Per shard: output, log-sum-exp and tiles, [B, K, G, T, ...]."""
  back = lambda a: a
  place, block = None, call.pattern.block
  axes = collectives.names(call.axis)
  if call.layouts is not None:
    assert call.axis is not None
    varying = collectives.varying_axes(x, terms, context) | {*axes}
    x, terms, context = collectives.vary((x, terms, context), varying)
    shards, index = (
      collectives.axis_size(call.axis),
      collectives.axis_index(call.axis),
    )
    q_layout, k_layout = call.layouts
    place = ShardTiles(
      TileShards.of(call.axis, k_layout, x.k.shape[2], block),
      q_layout.positions(index, shards, x.q.shape[3]),
    )
  elif call.axis is not None:
    x, terms, context, back = heads_for_tokens(
      call.axis, axes, x, terms, context
    )
  else:
    axes = collectives.varying_axes(x, terms, context)
    x, terms, context = collectives.vary((x, terms, context), axes)
  args = ScoreArgs(call.scores, Terms(), context)
  algorithm = ChosenTiles(call.pattern).on_device(jax.default_backend(), "")
  partial, counts = algorithm.partial(x, args, place)
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  out, lse = finalize(partial)
  length = x.q.shape[3]
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

"""Attention over the keys, or the rows of latents, that a selection chooses.

Guarantees: the result is that of dense attention under the mask that the choice
stands for, outputs and gradients, on any mesh and in any layout. Arguments are
those of `ring_attention`, checked by the same code; those that would need a
term for each pair are refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from ringjax.checks import boolean, instance
from ringjax.errors import OptionError, ShapeError
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.execution import run
from ringjax.ops.attention.sparse.block_selection import (
  BlockSelection,
  KeyChoice,
)
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.mask import Mask
from ringjax.parallel.call_sharding import (
  AUTO,
  CallSharding,
  locate,
  shards_of,
)
from ringjax.parallel.layout import Layout

_OPTIONS = (
  "mask",
  "scale",
  "query_seq_lengths",
  "key_value_seq_lengths",
  "local_window_size",
  "q_segment_ids",
  "kv_segment_ids",
  "q_positions",
  "kv_positions",
  "sinks",
  "logits_soft_cap",
)


def sparse_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K J"],
  selection: BlockSelection,
  *,
  is_causal: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = AUTO,
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  return_residual: bool = False,
  return_selection: bool = False,
  **options: Any,
) -> Any:
  """Attend to the keys that each query chooses, over a sharded sequence.

  A query reads the chosen keys that the call's mask shows it, at the cost of
  their number. No gradient flows through the choice.

  Args:
    query: Queries, [B, T, N, H], T over `axis`, in the order of `layout`.
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, J].
    selection: Choice of keys: `GivenBlocks`, `TopTokens` or `TopBlocks`.
    is_causal: Whether a query only sees keys at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N].
    return_selection: Whether to return the choice, too, a `GivenBlocks` with
      which another layer can read the same keys.
    **options: `mask` (a ringjax mask), `scale`, `query_seq_lengths`,
      `key_value_seq_lengths`, `local_window_size`, `q_segment_ids`,
      `kv_segment_ids`, `q_positions`, `kv_positions` (not with `TopBlocks`),
      `sinks` and `logits_soft_cap` of `dot_product_attention`. A window narrows
      what a query may choose.

  Returns:
    [B, T, N, J] in the query's dtype; with what is asked for a tuple of it, the
    log-sum-exp and the choice.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  return _attend(
    (query, key, value),
    selection,
    {"mesh": mesh, "batch_axis": batch_axis, "head_axis": head_axis},
    axis,
    (return_residual, return_selection),
    is_causal=is_causal,
    layout=layout,
    **known_options(options),
  )


def sparse_latent_attention(
  query: Float[Array, "B T N H"],
  rows: Float[Array, "B S X"],
  up: Float[Array, "C N Y"],
  selection: BlockSelection,
  *,
  is_causal: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = AUTO,
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  return_residual: bool = False,
  return_selection: bool = False,
  **options: Any,
) -> Any:
  """Attend to the rows of latents that each query chooses (DeepSeek-V3.2).

  The result is that of `sparse_attention` over the keys and values to which
  `up` projects the rows, see `latent_attention`. Queries are projected to rows
  in their place, so that a chosen row is gathered once for all heads. All heads
  choose together.

  Args:
    query: Queries, [B, T, N, H], whose last R dims meet the shared key dims.
    rows: Latents and then the key dims that the heads share, [B, S, C + R].
    up: Up-projection to the other P = H - R key dims and to the values.
    selection: Choice of rows, the same for all heads.
    is_causal: Whether a query only sees rows at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N; rows are whole on each of its shards.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N].
    return_selection: Whether to return the choice, too, a `GivenBlocks`.
    **options: Further arguments, those of `sparse_attention`.

  Returns:
    [B, T, N, J] in the query's dtype; with what is asked for a tuple of it, the
    log-sum-exp and the choice.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  return _attend(
    (query, rows, rows),
    selection,
    {"mesh": mesh, "batch_axis": batch_axis, "head_axis": head_axis},
    axis,
    (return_residual, return_selection),
    is_causal=is_causal,
    layout=layout,
    up=up,
    **known_options(options),
  )


def known_options(options: dict[str, Any]) -> dict[str, Any]:
  """Options of a call; OptionError for those that sparse attention lacks."""
  for name in options:
    if name not in _OPTIONS:
      raise OptionError(
        name,
        "an argument that sparse attention does not take",
        f"one of {', '.join(_OPTIONS)}",
        "leave it out, or call rj.dot_product_attention",
      )
  mask = options.get("mask")
  if mask is not None and not isinstance(mask, Mask):
    raise OptionError(
      "mask",
      f"a {type(mask).__name__}",
      "a ringjax mask such as Causal()",
      "pass the keys to read as GivenBlocks",
    )
  return options


def _attend(
  operands: tuple[Array, Array, Array],
  selection: BlockSelection,
  place: dict[str, Any],
  axis: str | tuple[str, ...] | None,
  returns: tuple[bool, bool],
  **arguments: Any,
) -> Any:
  """Attend to what a selection chooses, after checks.

  Args:
    operands: Queries, keys and values.
    selection: Choice of keys.
    place: Mesh, and mesh axes of batch and heads, by the names of `locate`.
    axis: Mesh axis that shards the tokens.
    returns: Whether to return the log-sum-exp, and the choice.
    **arguments: Further arguments of `AttentionArgs.of`.
  """
  return_residual = boolean("return_residual", returns[0])
  return_selection = boolean("return_selection", returns[1])
  instance("selection", selection, BlockSelection)
  out, lse, blocks = attend_selected(
    operands, selection, place, axis, **arguments
  )
  results: list[Any] = [out]
  if return_residual:
    results.append(lse)
  if return_selection:
    size = selection.block_size
    results.append(GivenBlocks(blocks=blocks, block=size))
  return results[0] if len(results) == 1 else tuple(results)


def attend_selected(
  operands: tuple[Array, Array, Array],
  selection: KeyChoice,
  place: dict[str, Any],
  axis: str | tuple[str, ...] | None,
  **arguments: Any,
) -> tuple[
  Float[Array, "B T N J"], Float[Array, "B T N"], Int[Array, "B T M n"]
]:
  """Attend to what a selection chooses: output, log-sum-exp and the choice.

  Args:
    operands: Queries, keys and values.
    selection: Choice of keys.
    place: Mesh, and mesh axes of batch and heads, by the names of `locate`.
    axis: Mesh axis that shards the tokens.
    **arguments: Further arguments of `AttentionArgs.of`.
  """
  key_shards = shards_of(None if axis == AUTO else axis)
  x = AttentionArgs.of(*operands, key_shards=key_shards, **arguments)
  if not x.batched:
    raise ShapeError(
      "query",
      f"shape {x.q.shape[1:]}",
      "[B, T, N, H]",
      "add a batch axis to query, key, value and the selection",
    )
  b, s, kv_heads, h = x.k.shape
  selection.check(x.q.shape, (b, s * key_shards, kv_heads, h), x.mask)
  if x.k_pos is not None and selection.by_position:
    raise OptionError(
      "kv_positions",
      f"positions of keys with a {type(selection).__name__}",
      "keys at the positions of the layout: its blocks are of positions",
      "leave out kv_positions, or choose tokens with TopTokens",
    )
  if x.up is not None and selection.choice_heads(x.q.shape[2], 1) != 1:
    raise OptionError(
      "selection",
      f"a {type(selection).__name__} in which each head chooses",
      "one choice for all heads, which share the rows",
      "pass blocks [B, T, 1, n], or call rj.sparse_attention",
    )
  location = locate(
    x.operands, axis=axis, required=False, by_name=False, **place
  )
  check_head_shards(selection, kv_heads, location)
  x = with_selection(x, selection)
  return run(x, location, Ring(Blockwise()), True)


def check_head_shards(
  selection: KeyChoice, kv_heads: int, location: CallSharding
) -> None:
  """Raise OptionError if heads that choose together are on several shards.

  Args:
    selection: Choice of keys.
    kv_heads: Number of kv heads of the call.
    location: Mesh and axes of the call.
  """
  if selection.sums_heads and location.heads and location.mesh is not None:
    head_shards = math.prod(location.mesh.shape[a] for a in location.heads)
    if kv_heads % head_shards:
      raise OptionError(
        "selection",
        f"heads='kv' with {kv_heads} kv heads over {head_shards} shards of "
        f"heads ({', '.join(map(repr, location.heads))})",
        "kv heads that their shards divide: one kv head's query heads choose "
        "together",
        "pass heads='query', or shard no heads",
      )


def with_selection(x: AttentionArgs, selection: KeyChoice) -> AttentionArgs:
  """Add a selection whose arrays are JAX arrays of the call's lengths."""
  lengths = {"B": x.q.shape[0], "T": x.q.shape[1], "S": x.k.shape[1]}

  def convert(array: Any, dimensions: tuple[str, ...]) -> jax.Array:
    for size, name in zip(array.shape, dimensions, strict=False):
      if size != lengths.get(name, size):
        raise ShapeError(
          "selection",
          f"an array of shape {array.shape}",
          f"{lengths[name]} as dimension {name} of {', '.join(dimensions)}",
          "pass arrays of the tokens of query and key, in their order",
        )
    return jnp.asarray(array)

  return dataclasses.replace(x, selection=selection.map_arrays(convert))

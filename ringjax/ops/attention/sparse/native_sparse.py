"""Native sparse attention: compressed, chosen and near keys, with gates.

Guarantees: the result is the sum, weighted by gates, of attention to one
compressed key per block, to the keys of the blocks that attention to compressed
keys weighs most, and to the keys of a window, outputs and gradients, on any
mesh and in any layout. No gradient flows through the choice of blocks. A query
that sees no key of a branch gets 0 from it.
Cost: T C + T (count * block + window) pairs. Compressed keys are gathered twice
and their values once; keys and values go around the ring once for the chosen
blocks, and for the window as the strategy does that is chosen for it.
Memory: that of its parts: no array of all pairs.

Ref: Yuan et al. 2025, Native Sparse Attention, arXiv 2502.11089.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from ringjax.checks import as_array, boolean, instance, positive_int
from ringjax.errors import MeshError, OptionError, ShapeError
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.cost.select import Auto
from ringjax.ops.attention.sparse.block_selection import check_shape
from ringjax.ops.attention.sparse.native_blocks import NativeBlocks
from ringjax.ops.attention.sparse.sparse_api import sparse_attention
from ringjax.ops.attention.sparse.strided_blocks import (
  check_no_padding,
  strided_blocks,
)
from ringjax.ops.attention.strategies.nesting import Strategy
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import AUTO, locate
from ringjax.parallel.layout import Contiguous, Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeSparse:
  """Sizes of native sparse attention; the defaults are those of the paper.

  Attributes:
    length: Number of tokens of a compressed key.
    stride: Number of tokens from one compressed key's first token to the next
      one's; it divides `length` and `block`.
    block: Number of tokens of a block that is chosen.
    count: Most blocks that a query reads.
    initial: Number of first blocks of the sequence among them.
    local: Number of blocks up to the query's own among them.
    window: Number of tokens of the window, the query's own among them.

  Raises:
    OptionError: If they do not fit each other.
  """

  length: int = 32
  stride: int = 16
  block: int = 64
  count: int = 16
  initial: int = 1
  local: int = 2
  window: int = 512

  def __post_init__(self) -> None:
    for name in ("length", "stride", "block", "count", "local", "window"):
      positive_int(name, getattr(self, name))
    if self.initial:
      positive_int("initial", self.initial)
    for name in ("length", "block"):
      if getattr(self, name) % self.stride:
        raise OptionError(
          name,
          f"{getattr(self, name)} with a stride of {self.stride}",
          "a multiple of the stride",
          f"pass {name}={-(-getattr(self, name) // self.stride) * self.stride}",
        )
    if self.initial + self.local > self.count:
      raise OptionError(
        "count",
        f"{self.count} with {self.initial} initial and {self.local} local ones",
        f"at least {self.initial + self.local} blocks",
        f"pass count={self.initial + self.local}",
      )


def native_sparse_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K J"],
  compressed_key: Float[Array, "B C K H"],
  compressed_value: Float[Array, "B C K J"],
  gates: Float[Array, "B T N 3"],
  config: NativeSparse = NativeSparse(),
  *,
  window_key: Float[Array, "B T K H"] | None = None,
  window_value: Float[Array, "B T K J"] | None = None,
  scale: float | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = AUTO,
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  window_strategy: str | Strategy | Auto = "auto",
  return_residual: bool = False,
  return_selection: bool = False,
) -> Any:
  """Attend causally to compressed, chosen and near keys (NSA).

  `strided_blocks` of keys and of values, with the config's `length` and
  `stride`, are what a function with learned parameters compresses.

  Args:
    query: Queries, [B, T, N, H], T over `axis`, in the order of `layout`.
    key: Keys of the blocks, [B, T, K, H].
    value: Values of the blocks, [B, T, K, J].
    compressed_key: One key of each strided block, [B, C, K, H], C over `axis`,
      in natural order.
    compressed_value: One value of each strided block, [B, C, K, J].
    gates: Weights of the compressed, the chosen and the near keys, after their
      sigmoid, [B, T, N, 3].
    config: Sizes of blocks and of the window.
    window_key: Keys of the window, [B, T, K, H]; default `key`.
    window_value: Values of the window, [B, T, K, J]; default `value`.
    scale: Factor on the logits; default H ** -0.5.
    segment_ids: Document of each token, int32 [B, T], 0 is padding. A
      compressed key that holds tokens of several documents is not read, and the
      initial blocks are those of the sequence.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and C, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, which divide the kv heads.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    window_strategy: Strategy that brings the keys of the window, as in
      `dot_product_attention`.
    return_residual: Whether to return the log-sum-exp over the keys of the
      chosen blocks, too, float32 [B, T, N].
    return_selection: Whether to return the chosen blocks, too, a `GivenBlocks`.

  Returns:
    [B, T, N, J] in the query's dtype; with what is asked for a tuple of it, the
    log-sum-exp and the choice.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  instance("config", config, NativeSparse)
  layout = Contiguous() if layout is None else layout
  instance("layout", layout, Layout)
  query, key, value, compressed_key, compressed_value, gates = (
    as_array(name, x)
    for name, x in (
      ("query", query),
      ("key", key),
      ("value", value),
      ("compressed_key", compressed_key),
      ("compressed_value", compressed_value),
      ("gates", gates),
    )
  )
  for name, x in (
    ("query", query), ("key", key), ("value", value),
    ("compressed_key", compressed_key),
  ):  # fmt: skip
    if x.ndim != 4:
      raise ShapeError(
        name, f"{x.shape}", "four axes: batch, tokens, heads, numbers",
        "add the axes that are missing",
      )  # fmt: skip
  b, t, n, h = query.shape
  c = compressed_key.shape[1]
  if window_key is not None:
    window_key = as_array("window_key", window_key)
    check_shape("window_key", window_key, key.shape, "keys of the window")
  if window_value is not None:
    window_value = as_array("window_value", window_value)
    check_shape(
      "window_value", window_value, value.shape, "values of the window"
    )
  check_shape("gates", gates, (b, t, n, 3), "gates of the three branches")
  check_shape(
    "compressed_value",
    compressed_value,
    (b, c, *value.shape[2:]),
    "one value of each compressed key",
  )
  place = locate(
    (query, key, value),
    mesh,
    axis,
    required=False,
    batch_axis=batch_axis,
    head_axis=head_axis,
    by_name=False,
  )
  if isinstance(place.axis, tuple):
    raise MeshError(
      "axis",
      repr(place.axis),
      "one mesh axis",
      "shard the sequence over one axis",
    )
  shards = place.size if place.manual else 1
  check_no_padding("query", t * shards, layout, place.size)
  expected = -(-t * shards // (config.stride * place.size)) * place.size
  check_shape(
    "compressed_key",
    compressed_key,
    (b, expected // shards, *key.shape[2:]),
    f"one key of each block that begins {config.stride} tokens after another",
  )
  scale = 1 / math.sqrt(h) if scale is None else scale
  options: dict[str, Any] = {"mesh": mesh, "axis": axis, "scale": scale}
  options |= {"batch_axis": batch_axis, "head_axis": head_axis}
  local = layout.local_length(t * shards, place.size)
  index = 0
  if place.manual and place.axis is not None:
    index = collectives.axis_index(place.axis)
  tokens = jnp.arange(t, dtype=jnp.int32)
  position = layout.position_of(
    index + tokens // local, tokens % local, place.size, local
  )[None]
  compressed = jnp.arange(c, dtype=jnp.int32) + index * c
  last = (compressed * config.stride + config.length - 1)[None]
  segments = _segments(segment_ids, config, mesh, axis, layout, (b, c))
  documents: dict[str, Any] = {}
  if segment_ids is not None:
    documents = {"q_segment_ids": segment_ids}
  of_compressed = dot_product_attention(
    query,
    compressed_key,
    compressed_value,
    is_causal=True,
    strategy="gather",
    q_positions=position,
    kv_positions=last,
    kv_segment_ids=segments if documents else None,
    **documents,
    **options,
  )
  selection = NativeBlocks(
    keys=compressed_key,
    segments=segments,
    length=config.length,
    stride=config.stride,
    block=config.block,
    count=min(config.count, -(-t * shards // config.block)),
    initial=config.initial,
    local=config.local,
    scale=scale,
  )
  of_chosen, lse, choice = sparse_attention(
    query,
    key,
    value,
    selection,
    is_causal=True,
    layout=layout,
    return_residual=True,
    return_selection=True,
    **documents,
    **options,
  )
  of_window = dot_product_attention(
    query,
    key if window_key is None else window_key,
    value if window_value is None else window_value,
    is_causal=True,
    local_window_size=(config.window - 1, 0),
    layout=layout,
    strategy=window_strategy,
    **documents,
    **options,
  )
  weight = lambda i: gates[..., i : i + 1].astype(query.dtype)
  out = (
    weight(0) * of_compressed + weight(1) * of_chosen + weight(2) * of_window
  )
  results: list[Any] = [out]
  if boolean("return_residual", return_residual):
    results.append(lse)
  if boolean("return_selection", return_selection):
    results.append(choice)
  return results[0] if len(results) == 1 else tuple(results)


def _segments(
  segment_ids: jax.Array | None,
  config: NativeSparse,
  mesh: Mesh | AbstractMesh | None,
  axis: str | None,
  layout: Layout,
  shape: tuple[int, int],
) -> Int[Array, "B C"]:
  """Document of each compressed key; 0 if its tokens are of several."""
  if segment_ids is None:
    return jnp.ones(shape, jnp.int32)
  blocks = strided_blocks(
    segment_ids,
    length=config.length,
    stride=config.stride,
    mesh=mesh,
    axis=None if axis == AUTO else axis,
    layout=layout,
  )
  first = blocks[:, :, 0]
  return jnp.where(jnp.all(blocks == first[..., None], -1), first, 0)

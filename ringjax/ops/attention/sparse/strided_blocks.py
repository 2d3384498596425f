"""Overlapping blocks of a sequence that may be sharded.

Guarantees: block c holds tokens c * stride to c * stride + length - 1 of the
whole sequence, whatever the layout and the number of shards; tokens beyond the
sequence are 0. Shard i of the result holds the i-th part of the blocks.
Linear in x; its gradient is the sum over the blocks that hold a token.
Cost: contiguous shards send length - stride tokens to one neighbour; in other
layouts, and where a block reaches further than a neighbour, all tokens go
around the ring once.
Memory: length / stride times the tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Shaped

from ringjax.checks import positive_int
from ringjax.errors import OptionError, ShapeError
from ringjax.ops.recurrent import sequence
from ringjax.ops.recurrent.sequence import Shards
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout
from ringjax.typing import Index


def strided_blocks(
  x: Shaped[Array, "B T *d"],
  *,
  length: int,
  stride: int,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = None,
  layout: Layout | None = None,
) -> Shaped[Array, "B C n *d"]:
  """Cut a sequence into blocks of `length` tokens that begin `stride` apart.

  A function of a block, such as a small network, then makes one compressed key
  of it for `native_sparse_attention`.

  Args:
    x: Tokens, [B, T, ...], T over `axis`, in the order of `layout`.
    length: Number of tokens of a block.
    stride: Number of tokens from one block's first token to the next one's.
    mesh: Device mesh; default: the operand's, else the current one.
    axis: Mesh axis that shards T. Default: that of x, else the current mesh's
      "seq" axis, else one device.
    layout: Order of the tokens on the shards; default `Contiguous()`.

  Returns:
    [B, C, length, ...] in natural order, C over `axis`: T / stride rounded up
    to a multiple of the shards.

  Raises:
    RingjaxError: If arguments do not fit, or shards hold padding.
  """
  x = sequence.tokens("x", x)
  positive_int("length", length)
  positive_int("stride", stride)
  if stride > length:
    raise OptionError(
      "stride",
      f"{stride} with blocks of {length} tokens",
      f"at most {length}: other tokens would be in no block",
      f"pass stride={length}",
    )
  place, layout = sequence.sharding_and_layout(
    (x,), "x", mesh, axis, layout, False
  )
  tokens = x.shape[1] * (place.size if place.manual else 1)
  check_no_padding("x", tokens, layout, place.size)
  dims = sequence.letters(x.ndim)
  cut = _Cut(length, stride)
  (blocks,) = sequence.run(
    cut, place, layout, (x,), (dims,), (dims[:2] + "Z" + dims[2:],)
  )
  return blocks


def check_no_padding(
  name: str, tokens: int, layout: Layout, shards: int
) -> None:
  """Raise ShapeError if shards of `tokens` tokens in all hold padding."""
  if layout.local_length(tokens, shards) * shards != tokens:
    raise ShapeError(
      name,
      f"{tokens} tokens over {shards} shards in the layout {layout}",
      "shards that hold no padding",
      "pad the sequence",
    )


@dataclasses.dataclass(frozen=True)
class _Cut:
  """`strided_blocks` of one shard's part of the blocks."""

  length: int
  stride: int

  def __call__(
    self, shards: Shards, x: Shaped[Array, "B T *d"]
  ) -> tuple[Shaped[Array, "B C n *d"]]:
    blocks = -(-shards.length // (self.stride * shards.size))
    reach = self.length - self.stride
    span = blocks * self.stride
    neighbours = isinstance(shards.layout, Contiguous) and span == shards.local
    if neighbours and reach <= shards.local:
      following = x[:, :reach]
      if shards.axis is None:
        following = jnp.zeros_like(following)
      elif reach:
        following = collectives.shift(following, shards.axis, -1)
      tokens = jnp.concatenate([x, following], 1)
    else:
      tokens = _collect(shards, x, shards.index * span, span + reach)
    first = jnp.arange(blocks)[:, None] * self.stride
    return (tokens[:, first + jnp.arange(self.length)[None]],)


def _collect(
  shards: Shards, x: Shaped[Array, "B T *d"], first: Index, count: int
) -> Shaped[Array, "B n *d"]:
  """Tokens `first` to first + count - 1 of the whole sequence."""

  def put(tokens: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    at = jnp.where(at < first, count, at - first)
    return tokens.at[:, at].set(x, mode="drop")

  shape = x.shape[0], count, *x.shape[2:]
  at = collectives.vary(shards.positions, collectives.varying_axes(x))
  tokens = put(collectives.zeros(shape, x.dtype, x), x, at)
  axis = shards.axis
  if axis is None:
    return tokens

  def hop(state: tuple, _: None) -> tuple[tuple, None]:
    travelling, tokens = state
    travelling = collectives.rotate(travelling, axis, 1)
    return (travelling, put(tokens, *travelling)), None

  state = (x, at), tokens
  return lax.scan(hop, state, None, shards.size - 1)[0][1]

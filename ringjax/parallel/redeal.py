"""Tokens of a sequence's shards in order, whatever their layout, and back.

Guarantees: afterwards shard i holds tokens i*n to (i+1)*n - 1 of the sequence,
n tokens each; padding that is added is at the end of the sequence.
`from_order(to_order(x)) == x`, bit for bit, and so are its gradients.
Cost: each shard sends its tokens once, but for those that stay; an all-to-all
for stripes, two sends between pairs of shards for a zigzag.

Layers that carry a state from token to token need the order; attention is
balanced by another layout.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ringjax.errors import OptionError
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag

Tree = TypeVar("Tree")

# Layouts whose tokens can be brought into order.
ORDERABLE = (Contiguous, Striped, Zigzag)


def check(layout: Layout) -> None:
  """Refuse a layout whose tokens cannot be brought into order.

  Raises:
    OptionError: If it is not one of `ORDERABLE`.
  """
  if not isinstance(layout, ORDERABLE):
    raise OptionError(
      "layout",
      layout,
      "Contiguous(), Striped() or Zigzag() for a model with recurrent layers, "
      "whose state goes from each token to the next",
      "pass layout=Contiguous()",
    )


def to_order(tree: Tree, layout: Layout, axis: str) -> Tree:
  """Bring the tokens of all shards into the order of the sequence.

  Args:
    tree: Arrays of a shard's tokens, [B, T, ...], all of one length.
    layout: Layout of the tokens, one of `ORDERABLE`.
    axis: Manual mesh axis of the shards.

  Returns:
    The tree with [B, n, ...], where n >= T is the same on all shards.
  """
  if isinstance(layout, Striped):
    return jax.tree.map(lambda x: _from_stripes(x, layout.block, axis), tree)
  if isinstance(layout, Zigzag):
    return jax.tree.map(lambda x: _from_zigzag(x, axis), tree)
  return tree


def from_order(tree: Tree, layout: Layout, axis: str, length: int) -> Tree:
  """Bring tokens in the order of the sequence back into their layout.

  Args:
    tree: Arrays of a shard's tokens in order, [B, n, ...], see `to_order`.
    layout: Layout of the result.
    axis: Manual mesh axis of the shards.
    length: Tokens of a shard in that layout, T.
  """
  if isinstance(layout, Striped):
    back = lambda x: _to_stripes(x, layout.block, axis)[:, :length]
    return jax.tree.map(back, tree)
  if isinstance(layout, Zigzag):
    return jax.tree.map(lambda x: _to_zigzag(x, axis), tree)
  return tree


def _from_stripes(
  x: Shaped[Array, "B T ..."], block: int, axis: str
) -> Shaped[Array, "B n ..."]:
  """Tokens in order; local stripe i of shard s is stripe i * R + s."""
  shards = collectives.axis_size(axis)
  x = jnp.pad(
    x,
    ((0, 0), (0, -x.shape[1] % (shards * block)), *((0, 0),) * (x.ndim - 2)),
  )
  batch, length, *dims = x.shape
  x = x.reshape(batch, length // block, 1, block, *dims)
  x = collectives.exchange(x, axis, 1, 2)
  return x.reshape(batch, length, *dims)


def _to_stripes(
  x: Shaped[Array, "B n ..."], block: int, axis: str
) -> Shaped[Array, "B n ..."]:
  """Inverse of `_from_stripes`, but for the padding that it adds."""
  shards = collectives.axis_size(axis)
  batch, length, *dims = x.shape
  x = x.reshape(batch, -1, shards, block, *dims)
  x = collectives.exchange(x, axis, 2, 1)
  return x.reshape(batch, length, *dims)


def _zigzag_routes(
  shards: int,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
  """(from, to) pairs of the chunks with even numbers, and of the odd ones.

  Shard s has chunks s and 2R - 1 - s, one even and one odd; in order shard d
  has chunks 2d and 2d + 1.
  """
  chunks = [(s, 2 * shards - 1 - s) for s in range(shards)]
  return (
    [(s, (a if a % 2 == 0 else b) // 2) for s, (a, b) in enumerate(chunks)],
    [(s, (a if a % 2 == 1 else b) // 2) for s, (a, b) in enumerate(chunks)],
  )


def _from_zigzag(
  x: Shaped[Array, "B T ..."], axis: str
) -> Shaped[Array, "B T ..."]:
  """Tokens in order, of chunks s and 2R - 1 - s on shard s."""
  even, odd = _zigzag_routes(collectives.axis_size(axis))
  first, second = jnp.split(x, 2, axis=1)
  first_is_even = collectives.axis_index(axis) % 2 == 0
  evens = jnp.where(first_is_even, first, second)
  odds = jnp.where(first_is_even, second, first)
  parts = [
    collectives.send(evens, axis, even),
    collectives.send(odds, axis, odd),
  ]
  return jnp.concatenate(parts, 1)


def _to_zigzag(
  x: Shaped[Array, "B T ..."], axis: str
) -> Shaped[Array, "B T ..."]:
  """Inverse of `_from_zigzag`."""
  even, odd = _zigzag_routes(collectives.axis_size(axis))
  back = lambda routes: [(to, source) for source, to in routes]
  evens, odds = jnp.split(x, 2, axis=1)
  evens = collectives.send(evens, axis, back(even))
  odds = collectives.send(odds, axis, back(odd))
  first_is_even = collectives.axis_index(axis) % 2 == 0
  first = jnp.where(first_is_even, evens, odds)
  second = jnp.where(first_is_even, odds, evens)
  return jnp.concatenate([first, second], 1)

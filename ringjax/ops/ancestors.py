"""Trees of drafted tokens: each sees the cached text and its own ancestors.

Guarantees: with `tree_coords` as coordinates `Ancestors` allows a pair exactly
if the key is the query or one of its ancestors.
Cost: log2(T) products of T x T matrices, once a call.

A token of a tree is a range of places in depth-first order: its own, and those
of all tokens below it. It is an ancestor of each token whose place is in its
range, so two numbers a token say what an ancestor matrix would. Siblings have
one position; these numbers, packed into the segment, tell them apart.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ringjax import tree
from ringjax.ops.mask import Coords, Extent, Mask

# Bits of each of the two numbers in a segment; the most tokens of a tree.
_BITS = 15
MOST_DRAFTED = (1 << _BITS) - 1


@dataclasses.dataclass(frozen=True)
class Ancestors(Mask):
  """A query sees the keys whose range has its place, see `tree_coords`."""

  def allows(self, q: Coords, k: Coords) -> jax.Array:
    place, first, end = q.seg >> _BITS, k.seg >> _BITS, k.seg & MOST_DRAFTED
    return (first <= place) & (place < end)

  def bound(self, q: Extent, k: Extent) -> tuple[jax.Array, jax.Array]:
    some = (q.first == q.first) & (k.first == k.first)
    return some, ~some


tree.register(Ancestors, (), ())


def ancestor_matrix(parents: Int[Array, "B T"]) -> jax.Array:
  """bool [B, T, T]: whether the second token is the first or its ancestor.

  Args:
    parents: the token that each token follows, an earlier one; -1 for those
      that follow the cached text.
  """
  count = parents.shape[1]
  number = jnp.arange(count, dtype=jnp.int32)
  own = jnp.eye(count, dtype=bool)[None]
  known = own | (parents[:, :, None] == number[None, None])
  for _ in range(max(count - 1, 1).bit_length()):
    paths = known.astype(jnp.float32)
    known = jnp.einsum("bij,bjk->bik", paths, paths) > 0
  return known


def tree_coords(parents: Int[Array, "B T"], at: Coords) -> Coords:
  """Coordinates [B, T] of a tree's tokens among themselves, for `Ancestors`.

  Args:
    parents: as of `ancestor_matrix`.
    at: the tokens' own; positions stay, segment 0 stays 0.
  """
  known = ancestor_matrix(parents)
  below = jnp.sum(known, 1, dtype=jnp.int32)
  number = jnp.arange(parents.shape[1], dtype=jnp.int32)
  before = (parents[:, :, None] == parents[:, None]) & (
    number[None] < number[:, None]
  )[None]
  step = jnp.sum(jnp.where(before, below[:, None], 0), 2, dtype=jnp.int32)
  step = step + (parents >= 0).astype(jnp.int32)
  place = jnp.sum(jnp.where(known, step[:, None], 0), 2, dtype=jnp.int32)
  packed = (place << _BITS) | (place + below)
  return Coords(at.pos, jnp.where(at.seg > 0, packed, 0))

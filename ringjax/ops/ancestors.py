"""Trees of drafted tokens: each sees the cached text and its own ancestors.

Guarantees: with `tree_coords` as coordinates `Ancestors` allows a pair exactly
if the key is the query or one of its ancestors.
Cost: log2(T) products of T x T matrices, once a call.

A token of a tree is a range of places in depth-first order: its own, and those
of all its descendants. It is an ancestor of each token whose place is in its
range, so two numbers per token replace an ancestor matrix. Siblings have one
position; these numbers, packed into the segment, distinguish them.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ringjax import tree
from ringjax.ops.mask import Coords, Extent, Mask

# Bits of each of the two numbers in a segment; they limit a tree's tokens.
_BITS = 15
MOST_DRAFTED = (1 << _BITS) - 1


@dataclasses.dataclass(frozen=True)
class Ancestors(Mask):
  """A query sees the keys whose range contains its place, see `tree_coords`."""

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    place, first, end = q.seg >> _BITS, k.seg >> _BITS, k.seg & MOST_DRAFTED
    return (first <= place) & (place < end)

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    always = (q.first == q.first) & (k.first == k.first)
    return always, ~always


tree.register(Ancestors, (), ())


def ancestor_matrix(parents: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
  """Whether the second token is the first or its ancestor, bool [B, T, T].

  Args:
    parents: Index of each token's parent, an earlier token, int32 [B, T]; -1
      for tokens that follow the cached text.
  """
  count = parents.shape[1]
  index = jnp.arange(count, dtype=jnp.int32)
  identity = jnp.eye(count, dtype=bool)[None]
  reachable = identity | (parents[:, :, None] == index[None, None])
  for _ in range(max(count - 1, 1).bit_length()):
    paths = reachable.astype(jnp.float32)
    reachable = jnp.einsum("bij,bjk->bik", paths, paths) > 0
  return reachable


def tree_coords(parents: Int[Array, "B T"], at: Coords) -> Coords:
  """Coordinates [B, T] of a tree's tokens, for the mask `Ancestors`.

  Args:
    parents: Index of each token's parent, as in `ancestor_matrix`.
    at: Coordinates of the tokens; positions stay, segment 0 stays 0.
  """
  ancestors = ancestor_matrix(parents)
  num_descendants = jnp.sum(ancestors, 1, dtype=jnp.int32)
  index = jnp.arange(parents.shape[1], dtype=jnp.int32)
  earlier_siblings = (parents[:, :, None] == parents[:, None]) & (
    index[None] < index[:, None]
  )[None]
  step = jnp.sum(
    jnp.where(earlier_siblings, num_descendants[:, None], 0), 2, dtype=jnp.int32
  )
  step = step + (parents >= 0).astype(jnp.int32)
  place = jnp.sum(jnp.where(ancestors, step[:, None], 0), 2, dtype=jnp.int32)
  packed = (place << _BITS) | (place + num_descendants)
  return Coords(at.pos, jnp.where(at.seg > 0, packed, 0))

"""Caches of several calls of a pool, whose tokens pass products together.

Guarantees: between products a layer computes each call as a program of that
call alone, one call after another; see `nn.row_tiles` for the products.
Cost: a call without tokens is skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree, Shaped

from ringjax.kv.base import CallCache
from ringjax.nn.row_tiles import RowTiles
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointCache(CallCache):
  """Caches of several calls of one pool, for layers that compute all of them.

  Attributes:
    calls: Cache of each call, with slots allocated for its tokens.
    tokens: Coordinates and rotations of each call's tokens.
    rows: Places of the tokens in tiles.
  """

  calls: tuple[CallCache, ...]
  tokens: tuple[Tokens, ...]
  rows: RowTiles
  # The calls' pool has no encoder states.
  states = None

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.calls[0].slots

  @property
  def mesh(self) -> Mesh | None:
    return self.calls[0].mesh

  @property
  def axis(self) -> str | None:
    return self.calls[0].axis

  def layer(self, kind: int, slots: PyTree, index: Index) -> JointLayer:
    parts = tuple(call.layer(kind, slots, index) for call in self.calls)
    return JointLayer(parts=parts, tokens=self.tokens, rows=self.rows)

  def updated(self, slots: tuple[Any, ...]) -> Any:
    """Return the pool with the arrays after the layers."""
    return self.calls[0].updated(slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointLayer:
  """One layer's part of a `JointCache`.

  Attributes:
    parts: Part of each call; all have the same arrays.
    tokens: Coordinates and rotations of each call's tokens.
    rows: Places of the tokens in tiles.
  """

  parts: tuple[Any, ...]
  tokens: tuple[Tokens, ...]
  rows: RowTiles

  @property
  def slots(self) -> PyTree:
    return self.parts[0].slots

  def by_call(
    self,
    mix: Callable[..., tuple[Array, Any]],
    arrays: Sequence[Shaped[Array, "tiles size ..."]],
  ) -> tuple[Shaped[Array, "tiles size ..."], JointLayer]:
    """Result of `mix` for the calls that have tokens, and the layer after it.

    Args:
      mix: Function of a call's arrays [B, T, ...], its tokens and its part that
        returns an array [B, T, ...] and the part with the call's keys.
      arrays: Arrays of tiles.
    """
    rows = self.rows

    def mixed(
      call: int, arrays: Sequence[Array], slots: PyTree
    ) -> tuple[Array, PyTree]:
      part = dataclasses.replace(self.parts[call], slots=slots)
      y, part = mix(*arrays, self.tokens[call], part)
      return y, part.slots

    first = [rows.take(x, 0) for x in arrays]
    like, _ = jax.eval_shape(lambda: mixed(0, first, self.slots))
    shape = *arrays[0].shape[:2], *like.shape[2:]

    def step(call: int, arrays: Sequence[Array], carry: Any) -> Any:
      results, slots = carry
      y, slots = mixed(call, arrays, slots)
      return rows.put(results, call, y), slots

    carry = lax.empty(shape, like.dtype), self.slots
    results, slots = rows.each_call(step, arrays, carry)
    parts = tuple(dataclasses.replace(x, slots=slots) for x in self.parts)
    return results, dataclasses.replace(self, parts=parts)

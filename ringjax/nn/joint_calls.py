"""Several calls of a pool that pass a layer's products together.

Guarantees: queries of a call read the keys of that call's rows, as in a program
of its own. Keys of all calls are written before any are read.
Cost: attention is one kernel for each call; see `nn.row_tiles` for products.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, Shaped

from ringjax.kv.base import CallCache, CallLayer
from ringjax.nn.row_tiles import RowTiles
from ringjax.nn.sharding_context import CachedAttention, Extras
from ringjax.nn.tokens import Tokens
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.rope import Rotation
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
class JointLayer(CallLayer):
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

  def append(
    self,
    k: Shaped[Array, "tiles K size H"],
    v: Shaped[Array, "tiles K size J"],
    at: Coords,
    rotation: Rotation,
  ) -> JointLayer:
    del at
    split = lambda x: self.rows.split(jnp.swapaxes(x, 1, 2))
    slots, parts = self.slots, []
    for part, tokens, *new in zip(
      self.parts, self.tokens, split(k), split(v), strict=True
    ):
      call_rotation = tokens.rotation(
        rotation.rope, first=rotation.first, after=rotation.after
      )
      keys, values = (jnp.swapaxes(x, 1, 2) for x in new)
      part = dataclasses.replace(part, slots=slots)
      part = part.append(keys, values, tokens.at, call_rotation)
      slots = part.slots
      parts.append(part)
    # Reads of the arrays before the last write would keep a copy of them.
    parts = tuple(dataclasses.replace(part, slots=slots) for part in parts)
    return dataclasses.replace(self, parts=parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointAttention(CachedAttention):
  """Attention of each call of a `JointCache` to its own rows' keys."""

  @classmethod
  def of(cls, attend: CachedAttention) -> JointAttention:
    """The same sharding and algorithms for several calls."""
    fields = dataclasses.fields(attend)
    return cls(**{field.name: getattr(attend, field.name) for field in fields})

  def __call__(
    self,
    q: Float[Array, "tiles size N H"],
    tokens: Tokens,
    cache: Any,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "tiles size N J"]:
    """Outputs in tiles, from queries in tiles and a `JointLayer`."""
    del tokens
    assert isinstance(cache, JointLayer) and not extras.residual
    attend = super().__call__
    calls = zip(cache.rows.split(q), cache.tokens, cache.parts, strict=True)
    return cache.rows.joined([attend(*call, mask, extras) for call in calls])

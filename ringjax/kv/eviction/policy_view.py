"""Implementation of a policy's view of a layer, on each device of a mesh.

Guarantees: results are those of all tokens on one device, in order.
Cost: a gather of B K S numbers for each method call; keys and values stay on
their devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax.kv.query_reading import KeyReading
from ringjax.kv.storage.pages import Places
from ringjax.ops.attention.attention_mass import Visit, column_mass, kept_mass
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalLook:
  """Implementation of `policies.Look` inside of `Places.local`.

  Attributes:
    views: Keys and values of the layer on this device.
    at: Coordinates [B, K, s] of the slots of this device, view by view.
    order: Slots of all devices by document and position, int32 [B, K, S].
    whole: Coordinates [B, K, S] in that order.
    places: Mesh axes that shard the cache.
    visit: Newest queries, or None.
    score: Sums of earlier evictions, or scores by a repetition, float32
      [B, K, s], or None.
    marks: Whether the token at a position is marked, bool [B, P]; None if the
      policy uses no marks.
    fixed: Choices of the heads that keep theirs, int32 [B, K], or None.
  """

  views: Sequence[KVView]
  at: Coords
  order: Int[Array, "B K S"]
  whole: Coords
  length: Int[Array, " B"]
  layer: Index
  limit: int
  reading: KeyReading
  places: Places
  visit: Visit | None = None
  score: Float[Array, "B K s"] | None = None
  mean: Float[Array, "B K G H"] | None = None
  covariance: Float[Array, "B K G H H"] | None = None
  marks: Bool[Array, "B P"] | None = None
  fixed: Int[Array, "B K"] | None = None

  @property
  def real(self) -> Bool[Array, "B K S"]:
    return self.whole.seg > 0

  @property
  def pos(self) -> Int[Array, "B K S"]:
    return self.whole.pos

  @property
  def marked(self) -> Bool[Array, "B K S"]:
    if self.marks is None:
      return jnp.zeros_like(self.real)
    pos, size = self.whole.pos, self.marks.shape[1]
    index = jnp.clip(pos, 0, size - 1).reshape(pos.shape[0], -1)
    marks_at_pos = jnp.take_along_axis(self.marks, index, 1).reshape(pos.shape)
    return marks_at_pos & self.real & (pos < size)

  @property
  def first_head(self) -> Index:
    return self.places.first_head(self.at.pos.shape[1])

  def over_heads(self, x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    mean = jnp.mean(x, 1, keepdims=True)
    if self.places.heads:
      total = collectives.total(mean, self.places.heads)
      mean = total / self.places.size(self.places.heads)
    return jnp.broadcast_to(mean, x.shape)

  def by_token(
    self, f: Callable[..., Any], *given: Shaped[Array, "B K S"]
  ) -> Float[Array, "B K S"]:
    return self.ordered(self._each(f, *given))

  def extremes(
    self, f: Callable[..., Any], part: Int[Array, "B K S"], count: int
  ) -> tuple[Float[Array, "B K _ D"], Float[Array, "B K _ D"]]:
    values, local_part = self._each(f), self.local(part)
    b, heads, _, dim = values.shape
    rows, cols = jnp.indices((b, heads, 1), jnp.int32, sparse=True)[:2]
    local_part = jnp.where(
      (local_part < 0) | (self.at.seg == 0), count, local_part
    )
    empty = jnp.full((b, heads, count, dim), jnp.inf, values.dtype)
    at = lambda x: x.at[rows, cols, local_part]
    low = at(empty).min(values, mode="drop")
    high = at(-empty).max(values, mode="drop")
    if axis := self.places.axis:
      low = -collectives.largest(-low, axis)
      high = collectives.largest(high, axis)
    return low, high

  def average(self, f: Callable[..., Any]) -> Float[Array, "B K D"]:
    real = (self.at.seg > 0).astype(jnp.float32)
    total = jnp.einsum("bks,bksd->bkd", real, self._each(f))
    count = jnp.sum(real, -1)
    if axis := self.places.axis:
      total, count = (collectives.total(x, axis) for x in (total, count))
    return total / jnp.maximum(count, 1)[..., None]

  def column_mass(self) -> Float[Array, "B K G S"]:
    return self._column_mass

  @functools.cached_property
  def _column_mass(self) -> jax.Array:
    assert self.visit is not None
    mass = jnp.concatenate(column_mass(self.visit, self.views), 3)
    groups = mass.shape[2]
    by_query_head = [self.ordered(mass[:, :, g]) for g in range(groups)]
    return jnp.stack(by_query_head, 2)

  def kept_mass(self, keep: Bool[Array, "C B K S"]) -> Float[Array, "C B K G"]:
    assert self.visit is not None
    local = jax.vmap(self.local)(keep)
    parts, start = [], 0
    for size in self._sizes():
      parts.append(local[..., start : start + size])
      start += size
    return kept_mass(self.visit, self.views, parts)

  def sums(self) -> Float[Array, "B K S"]:
    mass = jnp.mean(self.column_mass(), 2)
    return mass if self.score is None else mass + self.ordered(self.score)

  def repeated(self) -> Float[Array, "B K S"]:
    assert self.score is not None
    return self.ordered(self.score)

  def ordered(self, x: Shaped[Array, "B K s"]) -> Shaped[Array, "B K _"]:
    """Gather [B, K, s] of this device's slots to [B, K, S] of all, in order."""
    if axis := self.places.axis:
      x = collectives.gather(x, axis, 2)
    return jnp.take_along_axis(x, self.order, 2)

  def local(self, x: Shaped[Array, "B K S"]) -> Shaped[Array, "B K _"]:
    """Convert [B, K, S] in order to [B, K, s] of this device's slots."""
    return unordered(self.order, self.places, self.at.pos.shape[2], x)

  def _sizes(self) -> list[int]:
    return [view.shape[2] for view in self.views]

  def _each(self, f: Callable[..., Any], *given: jax.Array) -> jax.Array:
    """Apply `f` to the tokens of all views, [B, K, s, ...]."""
    heads, results, start = self.at.pos.shape[:2], [], 0
    given = tuple(map(self.local, given))
    for size, view in zip(self._sizes(), self.views, strict=True):
      k, v = view.tile(jnp.int32(0), view.shape[2])
      apart = lambda x: x.reshape(*heads, *x.shape[2:]).astype(jnp.float32)
      end = start + size
      local_given = [lax.slice_in_dim(x, start, end, axis=2) for x in given]
      results.append(f(apart(k), apart(v), *local_given))
      start = end
    return jnp.concatenate(results, 2)


def ordering(at: Coords, places: Places) -> tuple[Int[Array, "B K S"], Coords]:
  """Sort the slots of all devices; return the order and their coordinates.

  Sorted by document and position; empty slots are last.
  """
  if axis := places.axis:
    at = Coords(*(collectives.gather(x, axis, 2) for x in at))
  empty = (at.seg == 0).astype(jnp.int32)
  index = lax.broadcasted_iota(jnp.int32, at.pos.shape, 2)
  order = lax.sort((empty, at.seg, at.pos, index), dimension=2, num_keys=4)[3]
  pick = lambda x: jnp.take_along_axis(x, order, 2)
  return order, Coords(*map(pick, at))


def unordered(
  order: Int[Array, "*rows S"],
  places: Places,
  size: int,
  x: Shaped[Array, "*rows S"],
) -> Shaped[Array, "*rows _"]:
  """Convert [..., S] in order to [..., size] of this device's slots."""
  x = jnp.take_along_axis(x, jnp.argsort(order, axis=-1), -1)
  if places.axis is None:
    return x
  first = collectives.axis_index(places.axis) * size
  return lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1)

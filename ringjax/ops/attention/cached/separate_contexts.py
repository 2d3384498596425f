"""Views of separately encoded contexts, whose weight depends on all keys.

Guarantees: with temperature and scale 1, or with all contexts selected, the
partial is that of the plain views; the order of contexts does not matter.
Cost: one more maximum and one more sum over the shards than plain views;
`SelectedView` reads the keys twice, the second time only those of contexts
that some query selects.
Memory: for `SelectedView` five scores of each query, head and context.

The total weight that queries give to all contexts together is known only after
the partials of all shards are combined, so these views are merged after that.

Ref: Yang et al. 2025, arXiv 2502.05431 (APE: temperature and scale); Zhang et
al. 2025, arXiv 2412.16545 (attention entropy: selection).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.ops.attention.blockwise import (
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  product,
)
from ringjax.ops.attention.cached.cached_attention import CacheVisit
from ringjax.ops.attention.cached.views import Aligned, KVView
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  Scores,
  ScoreTile,
)
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import (
  Partial,
  finalize,
  finite_max,
  merge,
  wide_dtype,
)
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index

# Number of largest probabilities whose sum is a context's weight.
_TOP = 5


class _Wrapped:
  """Base class of views that wrap another one, `stored`."""

  @property
  def _keys(self) -> KVView:
    stored = getattr(self, "stored", None)
    assert stored is not None, "a way to weigh keys that are still to come"
    return stored

  @property
  def at(self) -> Coords:
    return self._keys.at

  @property
  def mask(self) -> Mask | None:
    return self._keys.mask

  @property
  def queries(self) -> Coords | None:
    return self._keys.queries

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    return self._keys.shape

  @property
  def slot_bytes(self) -> int:
    return self._keys.slot_bytes

  def keys_alone(self) -> Any:
    view: Any = self
    return dataclasses.replace(view, stored=self._keys.keys_alone())

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
    return self._keys.tile(start, size)

  def aligned(
    self,
    q: Float[Array, "B K G T H"],
    *,
    keys: bool = True,
  ) -> Aligned:
    return self._keys.aligned(q, keys=keys)


@dataclasses.dataclass(frozen=True)
class WeighedView(_Wrapped):
  """Keys whose scores are divided by a temperature, and their total scaled.

  With logits s_j of these keys, lse = log sum_j exp(s_j / temperature), they
  get exp(scale lse) next to the sum of the other keys' exponentials.

  Fields:
    stored: View of the keys and values, or None for keys that are added later.
    scale: Scale of the log-sum-exp, float32 [].
    temperature: Temperature, above 0.
  """

  stored: KVView | None
  scale: Float[Array, ""]
  temperature: int | float

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> WeighedView:
    inner = self._keys.specs(batch, heads, tokens)
    return tree.with_leaves(self, stored=inner, scale=P())

  def cooled(self, visit: CacheVisit) -> CacheVisit:
    """Divide the scores by the temperature."""
    factor, cap = 1 / self.temperature, visit.scores.soft_cap
    scores = Scores(
      scale=visit.scores.scale * factor,
      soft_cap=None if cap is None else cap * factor,
    )
    slopes = visit.terms.slopes
    if slopes is not None:
      slopes = slopes * jnp.asarray(factor, slopes.dtype)
    return dataclasses.replace(
      visit, scores=scores, terms=visit.terms._replace(slopes=slopes)
    )

  def joined(self, rest: Partial, visit: CacheVisit) -> Partial:
    cooler = self.cooled(visit)
    out, lse = finalize(cooler.combined(cooler.on_shard([self._keys])))
    scale = self.scale
    if visit.axis is not None:
      # Equal on all shards; the maximum makes its type say so.
      scale = collectives.largest(scale, visit.axis)
    return merge(rest, Partial.of(out, lse * scale.astype(lse.dtype)))


tree.register(WeighedView, ("stored", "scale"), ("temperature",))


@dataclasses.dataclass(frozen=True)
class SelectedView(_Wrapped):
  """Contexts of which each query reads those with the largest weight.

  A context's weight for a query and a head is the sum of its five largest
  attention probabilities among all keys of the call.

  Fields:
    stored: View of the keys and values, in which all slots of a tile belong to
      one context; or None, as in `WeighedView`.
    owner: Index of the context of each of n tiles, int32 [B, n]; -1 for none.
    count: Largest number of contexts, P.
    keep: Number of contexts that each query reads.
    by: "query": each query and head selects; "token": each query, its heads
      together; "head": the queries of a call together; "call": heads and
      queries together.
  """

  stored: KVView | None
  owner: Int[Array, "B n"]
  count: int
  keep: int
  by: str

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> SelectedView:
    batch_axes = batch if self.owner.shape[0] == self.shape[0] > 1 else None
    inner = self._keys.specs(batch, heads, tokens)
    return tree.with_leaves(self, stored=inner, owner=P(batch_axes, tokens))

  @property
  def together(self) -> bool:
    """Whether the queries of a call select together."""
    return self.by in ("head", "call")

  def each_alone(self) -> SelectedView:
    """Let each query of a call select by itself."""
    by = {"head": "query", "call": "token"}.get(self.by, self.by)
    return dataclasses.replace(self, by=by)

  def joined(self, rest: Partial, visit: CacheVisit) -> Partial:
    _, other_lse = finalize(rest)
    if visit.scatter:
      assert visit.axis is not None
      other_lse = collectives.gather(other_lse, visit.axis, 3)
    chosen = self.chosen(other_lse, visit)
    return merge(rest, visit.combined(self._read(visit, chosen)))

  def chosen(
    self, other: Float[Array, "B K G T"], visit: CacheVisit
  ) -> Bool[Array, "B P _ _ _"]:
    """Mark the contexts that are read, bool [B, P, K, G, T]; 1 where shared.

    Args:
      other: Log-sum-exp of the scores of the keys of other views.
      visit: Queries of the call.
    """
    tops, own_lse = self._top_scores(visit)
    weight = jnp.exp(tops - jnp.logaddexp(own_lse, other)[:, None, ..., None])
    return self._select_contexts(jnp.sum(weight, -1), visit)

  def slots_chosen(
    self, chosen: Bool[Array, "B P _ _ _"]
  ) -> Bool[Array, "B _ _ _ S"]:
    """Mark the slots of the contexts that are read."""
    slots = self.shape[2] // self.owner.shape[1]
    owner = jnp.repeat(self._owner(slice(None)), slots, 1)
    rows = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    return jnp.moveaxis(chosen[rows[:, None], owner], 1, -1)

  def _top_scores(self, visit: CacheVisit) -> tuple[jax.Array, jax.Array]:
    """Five largest scores [B, P, K, G, T, 5], and lse [B, K, G, T] of all."""
    shape, dtype = visit.q.shape[:4], wide_dtype(visit.q.dtype)
    like = (visit.q, self._keys, self.owner)
    tops_shape = (shape[0], self.count, *shape[1:], _TOP)
    rows = jnp.arange(shape[0], dtype=jnp.int32)

    def fold_scores(
      n: Index, s: jax.Array, v: jax.Array, tile: ScoreTile, carry: PyTree
    ) -> Any:
      del v
      tops, top, total = carry
      s, _ = tile.scores_of(s)
      s = jnp.where(tile.allowed(), s, -jnp.inf)
      new_top = jnp.maximum(top, jnp.max(s, -1))
      safe = finite_max(new_top)
      total = total * jnp.exp(top - safe)
      total = total + jnp.sum(jnp.exp(s - safe[..., None]), -1)
      owner = self._owner(n)
      candidates = jnp.concatenate([tops[rows, owner], _top_k(s)], -1)
      return tops.at[rows, owner].set(_top_k(candidates)), new_top, total

    start = (
      collectives.full(tops_shape, -jnp.inf, dtype, like),
      collectives.full(shape, -jnp.inf, dtype, like),
      collectives.zeros(shape, dtype, like),
    )
    count = self.owner.shape[1]
    tiles = jnp.arange(count, dtype=jnp.int32)
    tops, top, total = self._fold(
      visit, tiles, jnp.int32(count), fold_scores, start
    )
    if visit.axis is not None:
      global_top = collectives.largest(top, visit.axis)
      weight = jnp.exp(top - finite_max(global_top))
      total = collectives.total(total * weight, visit.axis)
      tops, top = _top_k(collectives.gather(tops, visit.axis, 5)), global_top
    _, lse = finalize(Partial(total[..., None], top, total))
    return tops, lse

  def _select_contexts(
    self, weight: Float[Array, "B P K G T"], visit: CacheVisit
  ) -> jax.Array:
    """Select contexts by weight, bool [B, P, K, G, T]; 1 where shared."""
    is_token = visit.at.seg[:, None, None, None] > 0
    weight = jnp.where(is_token, weight, 0)
    if self.together:
      weight = jnp.sum(weight, 4, keepdims=True)
    if self.by in ("token", "call"):
      weight = jnp.sum(weight, (2, 3), keepdims=True)
      if visit.head_axes:
        weight = collectives.total(weight, visit.head_axes)
    _, best = lax.top_k(jnp.moveaxis(weight, 1, -1), self.keep)
    chosen = jnp.any(jax.nn.one_hot(best, self.count, dtype=bool), -2)
    return jnp.moveaxis(chosen, -1, 1)

  def _read(self, visit: CacheVisit, chosen: jax.Array) -> Partial:
    """Partial of the selected keys of this shard."""
    rows = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    # Tiles that no query reads are left out.
    owned = jnp.any(chosen, (2, 3, 4))[rows[:, None], self._owner(slice(None))]
    needed = jnp.any(owned & (self.owner >= 0), 0)
    order = jnp.argsort(1 - needed.astype(jnp.int32), stable=True)

    def read(
      n: Index, s: jax.Array, v: jax.Array, tile: ScoreTile, carry: Partial
    ) -> Partial:
      allowed = chosen[rows, self._owner(n)][..., None]
      flag = finite_flag(v, s.dtype)
      return fold_tile(tile, s, v, flag, carry, allowed=allowed)

    _, _, _, _, value = self.shape
    dtype = wide_dtype(visit.q.dtype)
    like = (visit.q, self._keys, self.owner, chosen)
    start = Partial.empty(visit.q.shape[:4], value, dtype, like)
    count = jnp.sum(needed, dtype=jnp.int32)
    partial = self._fold(visit, order.astype(jnp.int32), count, read, start)
    to_basis = self._keys.aligned(visit.q).back
    return partial._replace(acc=to_basis(partial.acc))

  def _owner(self, n: Index | slice) -> jax.Array:
    return jnp.maximum(self.owner[:, n], 0)

  def _fold(
    self,
    visit: CacheVisit,
    tiles: Int[Array, " n"],
    count: Int[Array, ""],
    step: Callable[..., Any],
    carry: PyTree,
  ) -> Any:
    """Fold `count` of `tiles`: step(n, products, values, tile, carry)."""
    view, q, _, by_head = self._keys.aligned(visit.q)
    assert not by_head
    size = self.shape[2] // self.owner.shape[1]
    context = Context(visit.at, view.at, view.mask or visit.mask)
    args = ScoreArgs(visit.scores, visit.terms, context)

    def fold_tile_of(i: Index, carry: PyTree) -> Any:
      first = tiles[i] * size
      k, v = view.tile(first, size)
      s = product("bkgqh,bkth->bkgqt", q, k.astype(q.dtype))
      k_at = cut_coords(view.at, first, size)
      tile = ScoreTile(args, FORWARD, 0, first, context.q, k_at)
      return step(tiles[i], s, v, tile, carry)

    return loop(count, fold_tile_of, carry)


tree.register(SelectedView, ("stored", "owner"), ("count", "keep", "by"))


def _top_k(x: Float[Array, "*rows n"]) -> jax.Array:
  """The five largest numbers of the last axis, padded with -inf."""
  missing = max(0, _TOP - x.shape[-1])
  if missing:
    padding = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    x = jnp.pad(x, padding, constant_values=-jnp.inf)
  return lax.top_k(x, _TOP)[0]

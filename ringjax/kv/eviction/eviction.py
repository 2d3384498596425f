"""Eviction: views of pages, and the choice of the tokens that stay.

Guarantees: the same tokens stay whatever the sharding; each stays on its
device, bit for bit.
Cost: scores of all tokens, B K S numbers per layer on each device; one copy of
what stays. `chosen` computes its size, which the host needs before `repacked`
is compiled, for one of few sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.eviction.policy_view import LocalLook, ordering, unordered
from ringjax.kv.eviction.recorded_queries import Noted, moments_of
from ringjax.kv.kv_layer import KVLayer
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.storage.pages import Pages, Places, page_counts
from ringjax.ops.attention.attention_mass import Visit, column_mass
from ringjax.ops.attention.cached.views import KVView, UnrotatedView
from ringjax.ops.mask import Coords, SameSegment
from ringjax.ops.rope import Rotation
from ringjax.parallel import collectives
from ringjax.parallel.programs import bounded
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.eviction.evicting import EvictingCache


class PagedPart(NamedTuple):
  """Arrays of a kind of layers on a device, or their specs.

  Fields:
    k: Keys of the open cache, [L, B, K, S, ...].
    v: Values of the open cache, [L, B, K, S, ...].
    pages: Pages of the kind of layers.
    constants: Constants of the key and value codecs.
    noted: Recorded statistics of the queries.
  """

  k: PyTree
  v: PyTree
  pages: PyTree
  constants: PyTree
  noted: PyTree


def paged_parts(cache: EvictingCache) -> dict[int, PagedPart]:
  """Arrays of the kinds of layers that have pages, by kind."""
  parts = {}
  for n, pages in enumerate(cache.pages):
    if pages is not None:
      k, v = cache.open.slots[n]
      parts[n] = PagedPart(k, v, pages, cache.constants[n], cache.noted[n])
  return parts


def part_specs(part: PagedPart) -> PagedPart:
  places = part.pages.places
  batch, heads = places.batch or None, places.heads or None
  noted = part.noted
  spec_or_none = lambda x, spec: None if x is None else spec
  return PagedPart(
    places.of_slots(part.k),
    places.of_slots(part.v),
    part.pages.specs(),
    jax.tree.map(lambda _: P(None, heads), part.constants),
    Noted(
      spec_or_none(noted.newest, P(None, batch, None, heads)),
      spec_or_none(noted.total, P(None, batch, heads)),
      spec_or_none(noted.squares, P(None, batch, heads)),
      spec_or_none(noted.score, places.by_head),
      spec_or_none(noted.choice, P(None, batch, heads)),
      spec_or_none(noted.paged, places.by_head),
      spec_or_none(noted.fixed, P(None, batch, heads)),
    ),
  )


def page_view(
  cache: EvictingCache,
  kind: int,
  layer: Index,
  rotation: Rotation,
  pages: Pages,
  constants: PyTree,
  *,
  selects: bool = False,
) -> KVView:
  """View of a layer's pages; with `selects`, queries select among pages."""
  codec, policy = cache.kind.codec, cache.kind.policy
  num_selected: tuple[int, ...] = ()
  decoders = None
  if codec is not None:
    decoders = cache.shapes[kind].decoders(codec, cache.open.dtype)
  take_layer = lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
  if selects and policy is not None and pages.bounds is not None:
    widest = pages.table.shape[3] // cache.shards
    num_selected = tuple(
      policy.pages(n, pages.slots) for n in range(widest + 1)
    )
  view = pages.view(
    layer, jax.tree.map(take_layer, constants), decoders, num_selected
  )
  if cache.kind.layout.unrotated and not rotation.trivial:
    return UnrotatedView(view, rotation)
  return view


def _open_view(
  cache: EvictingCache,
  kind: int,
  layer: Index,
  rotation: Rotation,
  part: PagedPart,
  at: Coords,
) -> KVView:
  """View of a layer's open tokens on this device."""
  inside = dataclasses.replace(
    cache.open,
    constants=tuple(
      part.constants if n == kind else ((), ())
      for n, _ in enumerate(cache.constants)
    ),
  )
  slot_table = dataclasses.replace(cache.open.held, at=at)
  slots = LayerKV(part.k, part.v)
  return KVLayer(inside, slot_table, slots, layer, kind).view(rotation)


def layer_views(
  cache: EvictingCache, kind: int, layer: Index, part: PagedPart, at: Coords
) -> tuple[tuple[KVView, ...], Coords]:
  """Views of a layer's pages and open tokens on this device.

  Returns:
    The views, and the concatenated coordinates [B, K, s] of their slots.
  """
  shape, lead = cache.shapes[kind], part.k.shape[1:3]
  rotation = shape.reading.rotation(cache.limit)
  views = (
    page_view(cache, kind, layer, rotation, part.pages, part.constants),
    _open_view(cache, kind, layer, rotation, part, at),
  )
  if not shape.value:
    # Values are parts of keys.
    views = tuple(view.keys_alone() for view in views)
  over_heads = lambda x: jnp.broadcast_to(x[:, None], (*lead, x.shape[1]))
  apart = lambda x: x.reshape(*lead, -1)
  pairs = zip(views[0].at, at, strict=True)
  return views, Coords(
    *(jnp.concatenate([apart(x), over_heads(y)], 2) for x, y in pairs)
  )


def visit_of(
  cache: EvictingCache,
  kind: int,
  heads: int,
  q: Float[Array, "B W N H"],
  at: Coords,
) -> Visit:
  """Grouped queries, masks and slopes for attention over `heads` KV heads."""
  reading, places = cache.shapes[kind].reading, cache.places
  b, w, n, h = q.shape
  q = q.reshape(b, w, heads, n // heads, h)
  slopes = None
  if reading.slopes is not None:
    slopes = jnp.asarray(reading.slopes, jnp.float32)
    slopes = slopes.reshape(-1, reading.groups)
    first = places.first_head(heads)
    slopes = lax.dynamic_slice_in_dim(slopes, first, heads, 0)
  return Visit(
    jnp.transpose(q, (0, 2, 3, 1, 4)),
    Coords(*at),
    reading.scores,
    reading.mask & SameSegment(),
    slopes,
    places.axis,
  )


def summed(
  cache: EvictingCache,
  kind: int,
  layer: Index,
  slots: LayerKV,
  noted: Noted,
  q: Float[Array, "B T N H"],
) -> Noted:
  """Add the column masses (attention per key) of a call's queries to the sums.

  Args:
    cache: Cache during the call.
    kind: Index of the kind of layers.
    layer: Index of the layer within the kind, int32 [].
    slots: Open slots of the layers, including the call's tokens.
    noted: Recorded statistics to update.
    q: Rotated queries, [B, T, N, H].
  """
  pages, places = cache.pages[kind], cache.places
  assert pages is not None and cache.watch.call is not None
  part = PagedPart(*slots, pages, cache.constants[kind], noted)
  batch, heads = places.batch or None, places.heads or None

  def local(
    part: PagedPart, at: Coords, call: Coords, q: jax.Array, layer: Index
  ) -> tuple[jax.Array, jax.Array]:
    views, _ = layer_views(cache, kind, layer, part, Coords(*at))
    visit = visit_of(cache, kind, part.k.shape[2], q, call)
    paged_mass, open_mass = (jnp.mean(x, 2) for x in column_mass(visit, views))
    masses = (part.noted.score, open_mass), (part.noted.paged, paged_mass)
    return tuple(x.at[layer].add(y.astype(x.dtype)) for x, y in masses)

  score, paged = places.local(
    local,
    (
      part_specs(part),
      places.by_example,
      P(batch),
      P(batch, None, heads),
      P(),
    ),
    (places.by_head, places.by_head),
  )(part, cache.open.at, cache.watch.call, q, layer)
  return noted._replace(score=score, paged=paged)


# ---------------------------------------------------------------------------
# Choosing tokens
# ---------------------------------------------------------------------------


@bounded
@jax.jit
def chosen(
  cache: EvictingCache,
  counts: tuple[Any, ...],
  repeated: dict[int, Any],
  rows: Bool[Array, " B"],
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
  """Choose the tokens that stay, for each kind of layers.

  Args:
    cache: Cache before the eviction.
    counts: Token budgets by the policy's `counts`, [L, B] per kind of layers.
    repeated: Scores by a repetition of the context for some kinds, see
      `Repeated`.
    rows: Rows to evict from, bool [B]; the others do not change.

  Returns:
    keep, by kind of layers: bool [L, B, K, s] over the slots of pages and of
    the open cache on each device; masses, by kind: sums of column masses of the
    same shape, or None; sizes, by kind: pages of all heads and of the largest
    on each device; the number of tokens that stay open, [B, R]; error flags
    bool [B, 2], whether a score is NaN, and whether a head's scores are all
    -inf or the row would keep nothing; bool [], whether a token has another
    segment than 1; and choices of the heads, by kind, [L, B, K].
  """
  parts = paged_parts(cache)
  kinds = tuple(parts)
  places = cache.places
  watch, policy = cache.watch, cache.kind.policy
  choosing = [
    n for n in kinds if policy and policy.choices and not cache.windowed(n)
  ]

  def local(
    parts: PyTree,
    at: Coords,
    length: jax.Array,
    watch_at: Coords | None,
    seen: PyTree,
    counts: PyTree,
    repeated: PyTree,
    rows: jax.Array,
    marks: jax.Array | None,
  ) -> PyTree:
    stays = staying(Coords(*at), cache.kind, places, rows)
    scored_kinds = []
    for n in kinds:
      scored = _scored(
        cache,
        n,
        parts[n],
        Coords(*at),
        stays,
        length,
        watch_at,
        seen,
        repeated.get(n),
        rows,
        marks,
      )
      scored_kinds.append(scored)
    scores = [scored.scores for scored in scored_kinds]
    if policy is None:
      keep = [x > -jnp.inf for x in scores]
    else:
      keep = _by_policy(cache, kinds, scores, [counts[n] for n in kinds])
    others = ~rows[None, :, None, None]
    keep = [
      head_keep | (others & (head_scores > -jnp.inf))
      for head_keep, head_scores in zip(keep, scores, strict=True)
    ]
    wrong = _wrong([scored.flags for scored in scored_kinds], keep)
    keeps, masses, sizes, choice = {}, {}, {}, {}
    for n, keep_mask, scored in zip(kinds, keep, scored_kinds, strict=True):
      heads = parts[n].k.shape[2]
      first = places.first_head(heads)
      keep_mask = lax.dynamic_slice_in_dim(keep_mask, first, heads, 2)
      to_slots = functools.partial(
        unordered, scored.order, places, keep_mask.shape[3] // places.shards
      )
      keep_slots = to_slots(keep_mask)
      slots = stays.shape[1]
      open_ = ~stays[None, :, None] & keep_slots[..., -slots:]
      paged = keep_slots[..., :-slots]
      if cache.kind.grouped:
        # Tokens that share codec constants are kept or dropped together.
        leaves = (Coords(*at).seg > 0) & ~stays
        open_ = _whole_groups(open_, leaves, parts[n].pages.slots)
        by_group = paged.reshape(*paged.shape[:3], -1, parts[n].pages.slots)
        any_kept = jnp.any(by_group, -1, keepdims=True)
        paged = jnp.broadcast_to(any_kept, by_group.shape).reshape(paged.shape)
      keep_slots = jnp.concatenate([paged, open_], 3)
      keeps[n] = keep_slots
      if n in choosing:
        choice[n] = scored.choice
      masses[n] = None if scored.mass is None else to_slots(scored.mass)
      sizes[n] = page_counts(keep_slots, parts[n].pages.slots)
    num_open = jnp.sum(stays, 1, dtype=jnp.int32)[:, None]
    return keeps, masses, sizes, num_open, wrong, choice

  by_head = dict.fromkeys(kinds, places.by_head)
  heads = P(None, places.batch or None, places.heads or None)
  summed = policy is not None and policy.sums
  everywhere = cache.open.held._everywhere
  keeps, masses, sizes, stays, wrong, choice = places.local(
    local,
    (
      {n: part_specs(part) for n, part in parts.items()},
      places.by_example,
      P(places.batch or None),
      P(places.batch or None),
      P(places.batch or None),
      tuple(P(None, places.batch or None) for _ in counts),
      dict.fromkeys(repeated, places.by_head),
      P(places.batch or None),
      P(places.batch or None),
    ),
    (
      by_head,
      by_head if summed else dict.fromkeys(kinds),
      dict.fromkeys(kinds, places.pool),
      places.by_example,
      P(places.batch or None),
      dict.fromkeys(choosing, heads),
    ),
  )(
    parts,
    cache.open.at,
    cache.length,
    _looked_at(cache),
    watch.count,
    counts,
    repeated,
    rows,
    cache.marks,
  )
  segments = [part.pages.seg for part in parts.values()]
  segments = [x for x in (cache.open.at.seg, *segments) if x is not None]
  others = jnp.stack([jnp.any(x > 1) for x in segments]).any()
  replicated = jax.tree.map(everywhere, (sizes, stays, wrong, others))
  return keeps, masses, *replicated, choice


def _looked_at(cache: EvictingCache) -> Coords | None:
  """Coordinates [B, W] of the recorded queries that the policy looks at.

  The queries are in the order in which they came. Of rows with fixed choices it
  is the newest few, whatever other rows of the batch need.
  """
  at, policy = cache.watch.at, cache.kind.policy
  fixed = fixed_rows(cache)
  if at is None or fixed is None or policy is None:
    return at
  num_queries = at.pos.shape[1]
  few = policy.fixed_queries or num_queries
  is_old = jnp.arange(num_queries, dtype=jnp.int32) < num_queries - few
  hidden = fixed[:, None] & is_old[None]
  return Coords(at.pos, jnp.where(hidden, 0, at.seg))


def fixed_rows(cache: EvictingCache) -> Bool[Array, " B"] | None:
  """Mask of the rows whose choices are fixed; None without choices."""
  flags = [noted.fixed for noted in cache.noted if noted.fixed is not None]
  if not flags:
    return None
  return jnp.stack([jnp.all(x, (0, 2)) for x in flags]).all(0)


def _wrong(flags: list[jax.Array], keep: list[jax.Array]) -> jax.Array:
  """Flag rows with NaN scores, and rows in which a head would lose all.

  Args:
    flags: `_Scored.flags` of each kind of layers.
    keep: Tokens that stay, bool [L, B, K, S] per kind.
  """
  nan, lost, real = (
    jnp.stack([jnp.any(x[..., i], (0, 2)) for x in flags]).any(0)
    for i in range(3)
  )
  keeps_any = jnp.stack([jnp.any(x, (0, 2, 3)) for x in keep]).any(0)
  # Heads may compete, so one may keep nothing, but no row may lose all.
  return jnp.stack([nan, lost | (real & ~keeps_any)], 1)


def _by_policy(
  cache: EvictingCache, kinds: Sequence[int], scores: list[Any], counts: PyTree
) -> list[jax.Array]:
  """Tokens that the policy keeps; windowed layers keep their window."""
  policy = cache.kind.policy
  assert policy is not None
  global_ = [n for n in kinds if not cache.windowed(n)]
  global_indices = [i for i, n in enumerate(kinds) if n in global_]
  keeps_global = policy.chosen(
    [scores[i] for i in global_indices], [counts[i] for i in global_indices]
  )
  keeps = [x > -jnp.inf for x in scores]
  for i, keep in zip(global_indices, keeps_global, strict=True):
    keeps[i] = keep & keeps[i] | (scores[i] == jnp.inf)
  return keeps


def staying(
  at: Coords, kind: CacheConfig, places: Places, rows: Bool[Array, " B"]
) -> Bool[Array, "B s"]:
  """Mask of a device's open tokens that stay open, bool [B, s].

  In rows that are not evicted (`rows` False) all tokens stay open.
  """
  real = at.seg > 0
  if not kind.exact.recent and not kind.exact.first:
    return real & ~rows[:, None]
  size = at.pos.shape[1]
  first = real & (at.pos < kind.exact.first)
  all_at = at
  if places.axis is not None:
    all_at = Coords(*(collectives.gather(x, places.axis, 1) for x in at))
  index = lax.broadcasted_iota(jnp.int32, all_at.pos.shape, 1)
  order = lax.sort(
    ((all_at.seg > 0).astype(jnp.int32), all_at.seg, all_at.pos, index),
    dimension=1,
    num_keys=4,
  )[3]
  rank = jnp.argsort(order, axis=1)
  if places.axis is not None:
    me = collectives.axis_index(places.axis)
    rank = lax.dynamic_slice_in_dim(rank, me * size, size, 1)
  stays = first | (real & (rank >= all_at.pos.shape[1] - kind.exact.recent))
  if kind.grouped:
    # Tokens leave in whole groups only.
    leaves = real & ~stays
    number = jnp.cumsum(leaves, 1, dtype=jnp.int32)
    stays |= leaves & (
      number > number[:, -1:] // kind.layout.page * kind.layout.page
    )
  return jnp.where(rows[:, None], stays, real)


def _whole_groups(
  keep: Bool[Array, "L B K s"], leaves: Bool[Array, "B s"], group: int
) -> jax.Array:
  """Mask of leaving tokens whose group has any kept token."""
  number = jnp.maximum(jnp.cumsum(leaves, 1, dtype=jnp.int32) - 1, 0) // group
  index = jnp.broadcast_to(number[None, :, None], keep.shape)
  empty = jnp.zeros((*keep.shape[:3], -(-keep.shape[3] // group)), bool)
  put = lambda x, index, kept: x.at[index].max(kept)
  for _ in range(3):
    put = jax.vmap(put)
  any_in_group = put(empty, index, keep & leaves[None, :, None])
  return jnp.take_along_axis(any_in_group, index, 3) & leaves[None, :, None]


class _Scored(NamedTuple):
  """Scores of the tokens of a kind of layers, for all heads, in order.

  Fields:
    scores: Scores [L, B, K, S]; inf for tokens that stay open, -inf for empty
      slots.
    order: Permutation of the slots, [L, B, K, S].
    mass: Sums of column masses in order, or None.
    flags: Whether the policy's scores have a NaN, are all -inf, and whether
      there is a token, bool [L, B, K, 3]; False for windowed layers.
    choice: Highest score of a token, int32 [L, B, K] on each device.
  """

  scores: jax.Array
  order: jax.Array
  mass: PyTree
  flags: jax.Array
  choice: jax.Array


def _scored(
  cache: EvictingCache,
  kind: int,
  part: PagedPart,
  at: Coords,
  stays: jax.Array,
  length: jax.Array,
  watch_at: Coords | None,
  seen: PyTree,
  repeated: jax.Array | None,
  rows: jax.Array,
  marks: jax.Array | None,
) -> _Scored:
  """Score all tokens in order, on each device; inf in rows not evicted."""
  shape, policy, places = cache.shapes[kind], cache.kind.policy, cache.places
  reading = shape.reading
  assert reading is not None

  def score_layer(layer: Index) -> _Scored:
    lead = part.k.shape[1:3]
    take = lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
    views, slots = layer_views(cache, kind, layer, part, at)
    order, coords = ordering(slots, places)
    visit = mean = covariance = None
    noted = part.noted
    if noted.newest is not None:
      assert watch_at is not None
      visit = visit_of(cache, kind, lead[1], take(noted.newest), watch_at)
    if noted.total is not None:
      moments = Noted(total=take(noted.total), squares=take(noted.squares))
      mean, covariance = moments_of(moments, seen, reading.groups)
    fixed = None
    if noted.fixed is not None:
      fixed = jnp.where(take(noted.fixed), take(noted.choice), 0)
    earlier = None if repeated is None else take(repeated)
    if noted.score is not None:
      paged_score = part.pages.read_score(layer)
      if noted.paged is not None:
        paged_score = paged_score + take(noted.paged)
      earlier = jnp.concatenate([paged_score, take(noted.score)], 2)
    look: Any = LocalLook(
      views=views,
      at=slots,
      order=order,
      whole=coords,
      length=length,
      layer=jnp.asarray(shape.which, jnp.int32)[layer],
      limit=cache.limit,
      reading=reading,
      places=places,
      visit=visit,
      score=earlier,
      mean=mean,
      covariance=covariance,
      marks=marks,
      fixed=fixed,
    )
    evicts = rows[:, None, None]
    mass, flags = None, jnp.zeros((*lead, 3), bool)
    choice = jnp.zeros(lead, jnp.int32)
    if cache.windowed(kind):
      in_window = look.pos >= (length - shape.reach)[:, None, None]
      scores = jnp.where(in_window, 0.0, -jnp.inf)
    elif policy is None:
      scores = jnp.zeros(look.pos.shape, jnp.float32)
    else:
      scores = policy.scores(look).astype(jnp.float32)
      has_tokens = jnp.any(look.real, 2)
      nan = jnp.any(jnp.isnan(scores) & look.real, 2)
      lost = has_tokens & ~nan & ~jnp.any((scores > -jnp.inf) & look.real, 2)
      flags = jnp.stack([nan, lost, has_tokens], 2) & evicts
      if policy.choices:
        choice = jnp.max(jnp.where(look.real, scores, 0.0), 2).astype(jnp.int32)
        choice = jnp.where(evicts[..., 0], choice, take(noted.choice))
      # inf is reserved for tokens that stay open.
      scores = jnp.minimum(scores, jnp.finfo(jnp.float32).max)
    if policy is not None and policy.sums:
      mass = jnp.where(evicts, look.sums(), look.repeated())
    paged = slots.pos.shape[2] - stays.shape[1]
    stays_by_head = jnp.broadcast_to(stays[:, None], (*lead, stays.shape[1]))
    exact = jnp.pad(stays_by_head, ((0, 0), (0, 0), (paged, 0)))
    scores = jnp.where(look.ordered(exact) | ~evicts, jnp.inf, scores)
    scores = jnp.where(look.real, scores, -jnp.inf)
    all_heads = places.all_heads
    return _Scored(all_heads(scores), order, mass, all_heads(flags), choice)

  return lax.map(score_layer, jnp.arange(shape.layers, dtype=jnp.int32))

"""Attention over a cache: keys stay on their shards and the queries go to all.

Guarantees: equals `reference` on all keys of all views; forward only.
Cost: one maximum and one sum over the axis, of B T N (J + 2) float32 numbers;
no key or value moves. Sharded queries are gathered first, B T N H numbers, and
the sums are scattered.
Memory: the partial of all queries on each shard, and a tile of the keys, or a
segment for more than a few queries.

This serves decoding and reading a chunk of a prompt after a long cache: what is
sent depends on the queries alone, not on the length of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Local, cut_coords
from ringjax.ops.attention.cached.cached_choice import CachedChoice
from ringjax.ops.attention.cached.paged import (
  heads_as_examples,
  read_by_query,
  selecting,
  with_places,
)
from ringjax.ops.attention.cached.per_head import PerHeadView
from ringjax.ops.attention.cached.selection import by_chunks
from ringjax.ops.attention.cached.views import (
  ApartView,
  KVView,
  StreamedView,
  coords_specs,
  fold_tiles,
  in_order,
  in_tiles,
  tiled,
)
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel, Loops
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import Partial, add_sink, finalize, finite_max, merge
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import CallSharding, device_of
from ringjax.typing import Index

# Slots that are read and rearranged at a time, for many queries.
_SEGMENT = 8192
# Queries that read the keys in place.
_FEW = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedDecode:
  """Attention of queries over a cache whose keys may be sharded.

  Attributes:
    mesh: Mesh whose `axis` shards the keys; None: one device. XLA partitions
      over none of its axes: it could not partition a kernel, and over an
      automatic axis it would gather keys that have a layout constraint, or
      copy a part of them.
    axis: Mesh axis of the sequence.
    batch_axes: Mesh axes over which the examples are sharded.
    head_axes: Mesh axes over which the heads are sharded; with a single kv head
      each device has a copy of it.
    query_axes: Mesh axes over which the queries are sharded besides `axis`,
      where no head is sharded over them.
    sharded: Whether the queries are sharded over `axis` too.
    masters: Whether the queries' rows are sharded over it, in equal parts; rows
      after the cache's rows are empty.
    residual: Whether to return the log-sum-exp, too, float32 [B, K, G, T].
    few: Largest number of queries that read the keys tile by tile in place;
      0 where the local algorithm reads another part of the keys.
    local: Local algorithm of a shard; few queries use its `decode`, or XLA's
      loops where it has none.
  """

  mesh: Mesh | AbstractMesh | None = None
  axis: str | None = None
  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  query_axes: tuple[str, ...] = ()
  sharded: bool = False
  masters: bool = False
  residual: bool = False
  few: int = _FEW
  local: Any = AutoKernel()

  def __call__(
    self,
    scores: Scores,
    q: Float[Array, "B K G T H"],
    views: Sequence[KVView],
    terms: Terms,
    q_at: Coords,
    mask: Mask,
    selection: CachedChoice | None = None,
  ) -> Any:
    """Attend: [B, K, G, T, J] in q's dtype from queries [B, K, G, T, H].

    With a `selection` they read the keys that it chooses.
    """
    views = tuple(views)
    number_of_views = len(views)
    if selection is not None:
      views = (*views, *selection.visited())
      selection = selection.without_keys()
    manual = set() if self.mesh is None else {*self.mesh.axis_names}
    # An array that occurs twice stays one array inside: kernels read it once.
    leaves, structure = jax.tree.flatten(views)
    index_of = {id(x): n for n, x in reversed([*enumerate(leaves)])}
    arrays = {n: leaves[n] for n in sorted(index_of.values())}
    rebuild = lambda arrays: jax.tree.unflatten(
      structure, [arrays[index_of[id(x)]] for x in leaves]
    )
    local, decoder, platform = self._on_device(manual, q, leaves[0])
    batch, heads = self.batch_axes, self.head_axes
    visit = functools.partial(
      CacheVisit,
      local=local,
      decoder=decoder,
      few=self.few,
      scores=scores,
      head_axes=heads,
      platform=platform,
    )
    if not manual:
      terms_without_sinks = terms._replace(sinks=None)
      partial = visit(
        q=q,
        at=q_at,
        terms=terms_without_sinks,
        mask=mask,
        selection=selection,
        index_views=views[number_of_views:],
      ).over(views[:number_of_views])
      return _finish(partial, q, terms, self.residual)
    head_specs = (heads, ()) if q.shape[1] > 1 else ((), heads)
    query_axes = self.query_axes
    sharding_axes = collectives.names(self.axis if self.sharded else None)
    at_q = (*sharding_axes, *query_axes) or None
    by_row: Any = (self.axis,) if self.masters else batch
    # The sharded dimension of the queries, and that of their coordinates.
    q_axis, coords_axis = (0, 0) if self.masters else (3, 1)
    rows = views[0].shape[0]
    varying_axes = frozenset(
      {*collectives.names(self.axis), *batch, *heads, *query_axes}
    )
    # An index has one head, which is not sharded; nor are weights.
    sharded_heads = [head_specs[0]] * number_of_views
    sharded_heads += [
      head_specs[0] if getattr(view, "of_kv_heads", False) else ()
      for view in views[number_of_views:]
    ]
    specs = jax.tree.leaves(
      tuple(
        view.specs(batch, view_heads, self.axis)
        for view, view_heads in zip(views, sharded_heads, strict=True)
      ),
      is_leaf=lambda x: isinstance(x, P),
    )

    def run(
      q: jax.Array,
      arrays: PyTree,
      q_at: Coords,
      terms: Terms,
      mask: Mask,
      selection: CachedChoice | None,
    ) -> Any:
      sinks = Terms(sinks=terms.sinks)
      q, arrays, q_at, slopes, mask, selection = collectives.vary(
        (q, arrays, q_at, terms.slopes, mask, selection), varying_axes
      )
      if self.sharded or self.masters:
        assert self.axis is not None
        q = collectives.gather(q, self.axis, q_axis)
        gather = lambda x: collectives.gather(x, self.axis, coords_axis)
        q_at, selection = gather(q_at), _of_queries(gather, selection)
      spare = 0
      if self.masters:
        spare = q.shape[0] - rows
        cut = lambda x: x[:rows]
        q, q_at = jax.tree.map(cut, (q, q_at))
        selection = _of_queries(cut, selection)
      local_views = rebuild(arrays)
      local_visit = visit(
        q=q,
        at=Coords(*q_at),
        terms=Terms(slopes=slopes),
        mask=mask,
        axis=self.axis,
        scatter=q_axis if self.sharded or self.masters else None,
        spare=spare,
        selection=selection,
        index_views=local_views[number_of_views:],
      )
      partial = local_visit.over(local_views[:number_of_views])
      return _finish(partial, q, sinks, self.residual)

    def per_example(x: jax.Array) -> P:
      has_batch = jnp.ndim(x) > 0 and x.shape[0] == q.shape[0]
      return P(batch if has_batch else None)

    queries = P(by_row, *head_specs, at_q)
    return jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        queries,
        {n: specs[n] for n in arrays},
        coords_specs(q_at, q.shape[0], by_row, at_q),
        P(*head_specs),
        jax.tree.map(per_example, mask),
        selection and selection.specs(by_row, at_q),
      ),
      out_specs=queries,
      axis_names=manual,
      # The interpreters of Pallas do not track varying axes.
      check_vma=not getattr(local, "interpret", False),
    )(q, arrays, q_at, terms, mask, selection)

  def _on_device(
    self, manual: set[str], q: jax.Array, k: jax.Array
  ) -> tuple[Any, Any, str]:
    """Local algorithm, decoder of few queries, and platform of the devices."""
    manual_mesh = self.mesh if manual else None
    platform, kind, unpartitioned = device_of(
      CallSharding(axis=self.axis, mesh=manual_mesh), (q, k)
    )
    if self.mesh is not None and not manual:
      unpartitioned = self.mesh.size == 1
    local = self.local
    if hasattr(local, "on_device"):
      local = local.on_device(platform, kind, unpartitioned)
    decoder = local if hasattr(local, "decode") else Loops(platform)
    return local, decoder, platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheVisit:
  """Queries of a call on one device, which read the views of a layer.

  Attributes:
    q: Queries of all shards of the sequence, [B, K, G, T, H].
    at: Coordinates of the queries, [B, T].
    terms: Arrays of the score function; sinks are added after all merges.
    mask: Pairs that are visible.
    scores: Static part of the score function.
    local: Local algorithm for many queries.
    decoder: Decoder for few queries.
    few: Largest number of queries that the decoder reads.
    axis: Manual axis that shards the keys, or None.
    head_axes: Manual axes that shard the heads.
    scatter: Dimension of the queries by which each shard keeps only its part of
      the result; None: it keeps all.
    spare: Number of empty rows to add after the cache's rows.
    selection: Choice of the keys that are read; None: all.
    index_views: `CachedChoice.visited` of the selection.
    platform: Platform of the device.
  """

  q: Float[Array, "B K G T H"]
  at: Coords
  terms: Terms
  mask: Mask
  scores: Scores
  local: Any
  decoder: Any
  few: int
  axis: str | None = None
  head_axes: tuple[str, ...] = ()
  scatter: int | None = None
  spare: int = 0
  selection: CachedChoice | None = None
  index_views: tuple[Any, ...] = ()
  platform: str = "cpu"

  def over(self, views: Sequence[KVView]) -> Partial:
    """Partial of the keys of all views and shards."""
    apart = [view for view in views if isinstance(view, ApartView)]
    ordinary = [view for view in views if not isinstance(view, ApartView)]
    if apart and self.selection is not None:
      raise OptionError(
        "cache",
        "contexts that are weighed by all of their keys",
        "a model whose layers read all keys, not those that they choose",
        "read the contexts as one prompt",
      )
    partial = self.combined(self.on_shard(ordinary))
    for view in apart:
      partial = view.joined(partial, self)
    return partial

  def on_shard(self, views: Sequence[KVView]) -> Partial:
    """Partial of this shard's keys."""
    if self.selection is not None:
      partial = self.selection.partial(self, views)
      if partial is not None:
        return partial
    return functools.reduce(merge, map(self._of_view, views))

  def _of_view(self, view: KVView) -> Partial:
    if isinstance(view, PerHeadView):
      return view.partial(self.q, self.terms, self._read)
    if selecting(view) is not None:
      return self._by_query(view)
    return self._read(view, self.q, self.terms)

  def _by_query(self, view: KVView) -> Partial:
    """Partial of queries that each read different pages, few at a time."""

    def read(view: Any, q: jax.Array, terms: Terms, at: Coords) -> Partial:
      return dataclasses.replace(self, at=at)._read(view, q, terms)

    def read_chunk(chunk: PyTree) -> Partial:
      q, at, places, bias = chunk
      q = jnp.moveaxis(q, 1, 3)
      if places is not None:
        places = jnp.moveaxis(places, 1, 2)
      if bias is not None:
        bias = jnp.moveaxis(bias, 1, 3)
      chunk_view = with_places(view, places, bias)
      partial = read_by_query(chunk_view, q, Coords(*at), self.terms, read)
      return jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), partial)

    rows = self.q.shape[0]
    with_rows = lambda x: jnp.broadcast_to(x, (rows, x.shape[1]))
    pages = selecting(view)
    assert pages is not None
    places, bias = pages.places, pages.bias
    if places is not None:
      places = jnp.moveaxis(places, 2, 1)
    if bias is not None:
      bias = jnp.moveaxis(bias, 3, 1)
    at = Coords(*map(with_rows, self.at))
    operands = jnp.moveaxis(self.q, 3, 1), at, places, bias
    parts = -(-self.q.shape[3] // _FEW)
    partial = by_chunks(read_chunk, operands, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), partial)

  def _read(self, view: KVView, q: jax.Array, terms: Terms) -> Partial:
    queries = self.at if view.queries is None else view.queries
    view, view_q, restore_basis, by_head = view.aligned(q)
    context = Context(queries, view.at, view.mask or self.mask)
    if by_head:
      view_q, context, terms = heads_as_examples(view_q, context, terms)
    if self.few and (q.shape[3] <= self.few or in_order(view)):
      args = ScoreArgs(self.scores, terms, context)
      partial = self.decoder.decode(view_q, view, args)
    else:
      partial = _by_segments(
        self.local, self.scores, view_q, view, terms, context
      )
    if by_head:
      partial = jax.tree.map(
        lambda x: x.reshape(*q.shape[:4], *x.shape[4:]), partial
      )
    return partial._replace(acc=restore_basis(partial.acc))

  def combined(self, partial: Partial) -> Partial:
    """Combine this shard's partial with those of all shards."""
    if self.axis is None:
      return partial
    m = collectives.largest(partial.m, self.axis)
    weight = jnp.exp(partial.m - finite_max(m))
    packed = jnp.concatenate([partial.acc, partial.l[..., None]], -1)
    packed = packed * weight[..., None]
    if self.scatter is not None:
      if self.spare:
        no_padding = lambda x: ((0, 0),) * (x.ndim - 1)
        pad_rows = lambda x: jnp.pad(x, ((0, self.spare), *no_padding(x)))
        packed, m = pad_rows(packed), pad_rows(m)
      packed = collectives.scatter_sum(packed, self.axis, self.scatter)
      length = packed.shape[self.scatter]
      first = collectives.axis_index(self.axis) * length
      m = lax.dynamic_slice_in_dim(m, first, length, self.scatter)
    else:
      packed = collectives.total(packed, self.axis)
    return Partial(packed[..., :-1], m, packed[..., -1])


def _finish(
  partial: Partial, q: jax.Array, terms: Terms, residual: bool
) -> Any:
  """The output, or with `residual` that and the log-sum-exp."""
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  out, lse = finalize(partial)
  out = out.astype(q.dtype)
  return (out, lse) if residual else out


def _by_segments(
  local: Any,
  scores: Scores,
  q: jax.Array,
  view: KVView,
  terms: Terms,
  context: Context,
) -> Partial:
  """Partial of many queries, a segment of the slots at a time."""
  length = view.shape[2]
  size = min(length, _SEGMENT)
  if isinstance(view, StreamedView):
    size = view.block
  at = tiled(view.at, size)
  bias = terms.bias
  if bias is not None:
    bias = in_tiles(bias, size)

  def read(first: Index, k: jax.Array, v: jax.Array, carry: Partial) -> Partial:
    segment_context = context._replace(k=cut_coords(at, first, size))
    segment_terms = terms
    if bias is not None:
      segment_bias = lax.dynamic_slice_in_dim(bias, first, size, 4)
      segment_terms = terms._replace(bias=segment_bias)
    args = ScoreArgs(scores, segment_terms, segment_context)
    return local.forward(Local(q, k, v), args, carry)

  shapes = view.tile(jnp.int32(0), size)
  start = empty_partial(Local(q, *shapes))
  if size == length:
    return read(jnp.int32(0), *shapes, start)
  # Segments in which every slot is empty are not read.
  nonempty = jnp.any(at.seg.reshape(at.seg.shape[0], -1, size) > 0, (0, 2))
  order = jnp.argsort(1 - nonempty.astype(jnp.int32), stable=True).astype(
    jnp.int32
  )
  count = jnp.sum(nonempty, dtype=jnp.int32)
  return fold_tiles(view, size, order, count, read, start)


def _of_queries(
  f: Callable[[Array], Array], selection: CachedChoice | None
) -> Any:
  """Apply a function to arrays that a choice has by query, not to others."""
  if selection is None:
    return None
  arrays, structure = jax.tree.flatten(selection)
  specs = jax.tree.leaves(
    selection.specs(None, "tokens"), is_leaf=lambda x: isinstance(x, P)
  )
  return structure.unflatten(
    f(x) if any(spec) else x for x, spec in zip(arrays, specs, strict=True)
  )

"""Attention over a cache: keys stay on their shards and the queries go to all.

Guarantees: equals `reference` on all keys of all views; forward only.
Cost: one maximum and one sum over the axis, of B T N (J + 2) float32 numbers;
no key or value moves. Where the queries are sharded they are gathered first,
B T N H numbers, and the sums are scattered.
Memory: the partial of all queries on each shard, and of the keys a tile, or
for more than a few queries a segment.

That is the way to decode and to read a chunk of a prompt behind a long cache:
whatever the length of the cache, what is sent depends on the queries alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel, Loops
from ringjax.ops.attention.paged import (
  heads_as_examples,
  read_by_query,
  selecting,
)
from ringjax.ops.attention.per_head import PerHeadView
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.selection import (
  KeySelection,
  SelectiveVisit,
  by_chunks,
)
from ringjax.ops.attention.views import (
  ApartView,
  KVView,
  StreamedView,
  coords_specs,
  fold_tiles,
  in_order,
  tiled,
)
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.softmax import Partial, add_sink, finalize, finite_max, merge
from ringjax.parallel import collectives
from ringjax.parallel.place import CallSharding, device_of
from ringjax.typing import Index

# Slots that are brought into another order at a time, for many queries.
_SEGMENT = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedDecode:
  """How queries find the keys of a cache.

  Attributes:
    mesh: whose `axis` shards the keys; None is one device.
    axis: the sequence's axis.
    batch_axes: mesh axes over which the examples are sharded.
    head_axes: mesh axes over which the heads are sharded; kv heads that they
      do not divide are one, of which each device has a copy.
    whole: whether no axis beside those shards anything: then nothing is left
      to XLA, which cuts no kernel.
    sharded: whether the queries are sharded over `axis` too.
    masters: whether the queries' rows are, in equal parts; those behind the
      cache's rows are empty.
    few: up to so many queries read the keys tile by tile in place.
    local: the algorithm on a shard; that of few queries is its `decode`, or
      XLA's loops where it has none.
  """

  mesh: Mesh | AbstractMesh | None = None
  axis: str | None = None
  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  whole: bool = False
  sharded: bool = False
  masters: bool = False
  few: int = 16
  local: Any = AutoKernel()

  def __call__(
    self,
    scores: Scores,
    q: Float[Array, "B K G T H"],
    views: Sequence[KVView],
    terms: Terms,
    q_at: Coords,
    mask: Mask,
    selection: KeySelection | None = None,
  ) -> jax.Array:
    """[B, K, G, T, J] in q's dtype from queries [B, K, G, T, H].

    With a `selection` they read the keys of one head that it chooses.
    """
    views = tuple(views)
    manual = {*collectives.names(self.axis)}
    if self.whole and self.mesh is not None:
      manual = {*self.mesh.axis_names}
    # One array twice is one array inside too: kernels read it once.
    leaves, structure = jax.tree.flatten(views)
    which = {id(x): n for n, x in reversed([*enumerate(leaves)])}
    arrays = {n: leaves[n] for n in sorted(which.values())}
    rebuilt = lambda arrays: jax.tree.unflatten(
      structure, [arrays[which[id(x)]] for x in leaves]
    )
    local, decoder, platform = self._on_device(manual, q, leaves[0])
    batch = self.batch_axes if self.whole else ()
    heads = self.head_axes if self.whole else ()
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
      unsunk = terms._replace(sinks=None)
      found = visit(
        q=q, at=q_at, terms=unsunk, mask=mask, selection=selection
      ).over(views)
      return _finish(found, q, terms)
    of_heads = (heads, ()) if q.shape[1] > 1 else ((), heads)
    at_q = self.axis if self.sharded else None
    by_row: Any = (self.axis,) if self.masters else batch
    # Which dimension of the queries is sharded, and that of their coordinates.
    cut, cut_at = (0, 0) if self.masters else (3, 1)
    rows = views[0].shape[0]
    over = frozenset({*collectives.names(self.axis), *batch, *heads})
    specs = jax.tree.leaves(
      tuple(view.specs(batch, of_heads[0], self.axis) for view in views),
      is_leaf=lambda x: isinstance(x, P),
    )

    def run(
      q: jax.Array,
      arrays: PyTree,
      q_at: Coords,
      terms: Terms,
      mask: Mask,
      selection: KeySelection | None,
    ) -> jax.Array:
      sinks = Terms(sinks=terms.sinks)
      q, arrays, q_at, slopes, mask, selection = collectives.vary(
        (q, arrays, q_at, terms.slopes, mask, selection), over
      )
      if self.sharded or self.masters:
        assert self.axis is not None
        q = collectives.gather(q, self.axis, cut)
        q_at, selection = collectives.gather(
          (q_at, selection), self.axis, cut_at
        )
      spare = 0
      if self.masters:
        spare = q.shape[0] - rows
        q, q_at, selection = jax.tree.map(
          lambda x: x[:rows], (q, q_at, selection)
        )
      here = visit(
        q=q,
        at=Coords(*q_at),
        terms=Terms(slopes=slopes),
        mask=mask,
        axis=self.axis,
        scatter=cut if self.sharded or self.masters else None,
        spare=spare,
        selection=selection,
      )
      return _finish(here.over(rebuilt(arrays)), q, sinks)

    def per_example(x: jax.Array) -> P:
      each = jnp.ndim(x) > 0 and x.shape[0] == q.shape[0]
      return P(batch if each else None)

    queries = P(by_row, *of_heads, at_q)
    return jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        queries,
        {n: specs[n] for n in arrays},
        coords_specs(q_at, q.shape[0], by_row, at_q),
        P(*of_heads),
        jax.tree.map(per_example, mask),
        selection and selection.specs(by_row, at_q),
      ),
      out_specs=queries,
      axis_names=manual,
      # The interpreters of Pallas do not know what varies.
      check_vma=not getattr(local, "interpret", False),
    )(q, arrays, q_at, terms, mask, selection)

  def _on_device(
    self, manual: set[str], q: jax.Array, k: jax.Array
  ) -> tuple[Any, Any, str]:
    """What computes many queries and few on the call's devices; these."""
    opened = self.mesh if manual else None
    platform, kind, alone = device_of(
      CallSharding(axis=self.axis, mesh=opened), (q, k)
    )
    if self.mesh is not None and not manual:
      alone = self.mesh.size == 1
    local = self.local
    if hasattr(local, "on_device"):
      local = local.on_device(platform, kind, alone)
    decoder = local if hasattr(local, "decode") else Loops(platform)
    return local, decoder, platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheVisit:
  """The queries of a call on one device, which read the views of a layer.

  Attributes:
    q: [B, K, G, T, H], of all shards of the sequence.
    at: their coordinates [B, T].
    terms: of the scores; the sinks come behind all merges.
    mask: who sees whom.
    scores: the static part of the score function.
    local: the algorithm of many queries.
    decoder: that of few.
    few: how many these are.
    axis: the manual axis that shards the keys, or None.
    head_axes: manual axes that shard the heads.
    scatter: the dimension of the queries of which each shard is left with its
      own part; None for none.
    spare: rows of other calls than the cache's, behind these; empty.
    selection: chooses the keys that are read; None: all.
    platform: of the device.
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
  selection: KeySelection | None = None
  platform: str = "cpu"

  def over(self, views: Sequence[KVView]) -> Partial:
    """The partial of the keys of all views and shards."""
    apart = [view for view in views if isinstance(view, ApartView)]
    rest = [view for view in views if not isinstance(view, ApartView)]
    if apart and self.selection is not None:
      raise OptionError(
        "cache",
        "contexts that are weighed by all of their keys",
        "a model whose layers read all keys, not those of an index",
        "read the contexts as one prompt",
      )
    found = self.combined(self.on_shard(rest))
    for view in apart:
      found = view.joined(found, self)
    return found

  def on_shard(self, views: Sequence[KVView]) -> Partial:
    """The partial of the keys of this shard."""
    if self.selection is not None:
      # Of keys in the basis in which the index's are.
      plain = [view.aligned(self.q, keys=False).view for view in views]
      visit = SelectiveVisit(
        selection=self.selection,
        scores=self.scores,
        terms=self.terms,
        at=self.at,
        mask=self.mask,
        axis=self.axis,
        platform=self.platform,
      )
      if visit.chooses(plain):
        return visit.partial(self.q, plain)
    return functools.reduce(merge, map(self._of_view, views))

  def _of_view(self, view: KVView) -> Partial:
    if isinstance(view, PerHeadView):
      return view.partial(self.q, self.terms, self._read)
    if selecting(view) is not None:
      return self._by_query(view)
    return self._read(view, self.q, self.terms)

  def _by_query(self, view: KVView) -> Partial:
    """The partial of queries that each read pages of their own, few at once."""

    def read(view: Any, q: jax.Array, terms: Terms, at: Coords) -> Partial:
      return dataclasses.replace(self, at=at)._read(view, q, terms)

    def some(each: PyTree) -> Partial:
      q, at = each
      q = jnp.moveaxis(q, 1, 3)
      found = read_by_query(view, q, Coords(*at), self.terms, read)
      return jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), found)

    rows = self.q.shape[0]
    wide = lambda x: jnp.broadcast_to(x, (rows, x.shape[1]))
    given = jnp.moveaxis(self.q, 3, 1), Coords(*map(wide, self.at))
    parts = -(-self.q.shape[3] // self.few)
    found = by_chunks(some, given, parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3), found)

  def _read(self, view: KVView, q: jax.Array, terms: Terms) -> Partial:
    queries = self.at if view.queries is None else view.queries
    view, mine, back, by_head = view.aligned(q)
    context = Context(queries, view.at, view.mask or self.mask)
    if by_head:
      mine, context, terms = heads_as_examples(mine, context, terms)
    if q.shape[3] <= self.few or in_order(view):
      args = ScoreArgs(self.scores, terms, context)
      found = self.decoder.decode(mine, view, args)
    else:
      found = _by_segments(self.local, self.scores, mine, view, terms, context)
    if by_head:
      found = jax.tree.map(
        lambda x: x.reshape(*q.shape[:4], *x.shape[4:]), found
      )
    return found._replace(acc=back(found.acc))

  def combined(self, partial: Partial) -> Partial:
    """The partial of all shards, of that of this one."""
    if self.axis is None:
      return partial
    m = collectives.largest(partial.m, self.axis)
    weight = jnp.exp(partial.m - finite_max(m))
    packed = jnp.concatenate([partial.acc, partial.l[..., None]], -1)
    packed = packed * weight[..., None]
    if self.scatter is not None:
      if self.spare:
        rest = lambda x: ((0, 0),) * (x.ndim - 1)
        fill = lambda x: jnp.pad(x, ((0, self.spare), *rest(x)))
        packed, m = fill(packed), fill(m)
      packed = collectives.scatter_sum(packed, self.axis, self.scatter)
      length = packed.shape[self.scatter]
      first = collectives.axis_index(self.axis) * length
      m = lax.dynamic_slice_in_dim(m, first, length, self.scatter)
    else:
      packed = collectives.total(packed, self.axis)
    return Partial(packed[..., :-1], m, packed[..., -1])


def _finish(partial: Partial, q: jax.Array, terms: Terms) -> jax.Array:
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  return finalize(partial)[0].astype(q.dtype)


def _by_segments(
  local: Any,
  scores: Scores,
  q: jax.Array,
  view: KVView,
  terms: Terms,
  context: Context,
) -> Partial:
  """The partial of many queries: a segment of the slots at a time."""
  length = view.shape[2]
  size = min(length, _SEGMENT)
  if isinstance(view, StreamedView):
    size = view.block
  at = tiled(view.at, size)

  def read(first: Index, k: jax.Array, v: jax.Array, carry: Partial) -> Partial:
    here = context._replace(k=cut_coords(at, first, size))
    args = ScoreArgs(scores, terms, here)
    return local.forward(Local(q, k, v), args, carry)

  shapes = view.tile(jnp.int32(0), size)
  start = empty_partial(Local(q, *shapes))
  if size == length:
    return read(jnp.int32(0), *shapes, start)
  # Segments in which every slot is empty are not read.
  some = jnp.any(at.seg.reshape(at.seg.shape[0], -1, size) > 0, (0, 2))
  order = jnp.argsort(1 - some.astype(jnp.int32), stable=True).astype(jnp.int32)
  count = jnp.sum(some, dtype=jnp.int32)
  return fold_tiles(view, size, order, count, read, start)

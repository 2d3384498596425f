"""How a call's tokens lie on devices, and how its queries find their keys.

A model gets one of these objects with the call and asks nothing else: the same
weights serve one device, a ring that reads a prompt, and decoding from a
sharded cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ringjax.errors import MeshError, OptionError
from ringjax.kv.base import KV, LayerCache
from ringjax.nn.tokens import Tokens
from ringjax.ops.ancestors import Ancestors
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.cached import ShardedDecode
from ringjax.ops.attention.chain import Chain
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.attention.select import Auto
from ringjax.ops.attention.selection import (
  KeySelection,
  by_chunks,
  chosen_pairs,
)
from ringjax.ops.attention.strategy import Strategy
from ringjax.ops.attention.views import KVView
from ringjax.ops.feedforward import blockwise_feedforward
from ringjax.ops.mask import Causal, Coords, Everything, Mask, SameSegment
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout, Uneven
from ringjax.parallel.mesh import automatic
from ringjax.parallel.place import AUTO

_BATCH_AXES = ("replica", "data")
_HEADS = "model"
# Pairs of queries and keys of a device of which it is noted at once which are
# read, a byte each.
_PAIRS = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
  """What a layer's attention has beside its mask; None where absent.

  Attributes:
    scale: of the logits.
    soft_cap: of the logits.
    sinks: [N].
    slopes: [N], ALiBi.
    selection: chooses the keys that each query reads; None: it reads all.
  """

  scale: float
  soft_cap: float | None = None
  sinks: Float[Array, " N"] | None = None
  slopes: Float[Array, " N"] | None = None
  selection: KeySelection | None = None


@runtime_checkable
class RowwiseLayer(Protocol):
  """A layer that treats each token alone."""

  def row(self, x: Float[Array, "*batch D"]) -> jax.Array:
    """The layer on some tokens."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingContext:
  """Tokens over the devices of a mesh, in a layout.

  Attributes:
    mesh: the mesh; None for one device, and in the call of a model for where
      that finds itself. Explicit axes are taken for automatic ones.
    axis: the axis that shards the sequence, or None for none. "auto": with a
      mesh none, and in the call of a model the one that it finds. In a
      shard_map, where it finds none, the manual axis that shards the call's
      tokens, without a mesh; None: each device attends alone.
    layout: which token lies where.
    block: tokens of a step of the feedforward, on each shard.
    segments: which of the call's `segment_ids` see each other:
      `SameSegment()`, or `SeparateDocuments()` for documents that only
      questions and link tokens see together. Not used without `segment_ids`.
    remat: what the backward pass keeps of a layer, a policy of
      `jax.checkpoint`; None: all.

  Raises:
    MeshError: an axis that the mesh does not have.
    OptionError: `segments` is no mask over segments.
  """

  mesh: Mesh | AbstractMesh | None = None
  axis: str | None = AUTO
  layout: Layout = Contiguous()
  block: int = 2048
  segments: Mask = SameSegment()
  remat: Callable[..., Any] | None = None

  def __post_init__(self):
    relates = getattr(self.segments, "relates_segments", False)
    if not isinstance(self.segments, Mask) or not relates:
      raise OptionError(
        "segments",
        repr(self.segments),
        "a mask over segments, SameSegment() or SeparateDocuments()",
        "leave out masks over positions: layers have their own",
      )
    if isinstance(self.mesh, Mesh):
      object.__setattr__(self, "mesh", automatic(self.mesh))
    if self.mesh is None:
      return
    if self.axis == AUTO:
      object.__setattr__(self, "axis", None)
    if self.axis is not None and self.axis not in self.mesh.axis_names:
      raise MeshError(
        "axis",
        repr(self.axis),
        f"one of the mesh's axes {self.mesh.axis_names}",
        "rename the axis or pass another mesh",
      )

  @property
  def size(self) -> int:
    """Shards of the sequence."""
    over = self.of_mesh
    if over is None:
      return 1
    assert self.mesh is not None
    return self.mesh.shape[over]

  @property
  def of_mesh(self) -> str | None:
    """The axis of `mesh` that shards the sequence; None without a mesh."""
    return None if self.mesh is None else self.axis

  @property
  def sharded(self) -> bool:
    """Whether the call's tokens are sharded over an axis of the mesh."""
    return self.of_mesh is not None

  @property
  def around(self) -> str | None:
    """The axis of a shard_map around the call, whose tokens are a shard's.

    Raises:
      MeshError: an axis without a mesh, outside of any shard_map.
    """
    if self.mesh is not None or self.axis in (None, AUTO):
      return None
    manual = collectives.manual_axes()
    if not manual:
      raise MeshError(
        "axis",
        f"{self.axis!r} without a mesh, outside of any shard_map",
        "a mesh with that axis",
        f"pass mesh= beside axis={self.axis!r}",
      )
    return self.axis if self.axis in manual else None

  def batch_axes(self, batch: int) -> tuple[str, ...]:
    """The mesh axes over which a batch of this size lies."""
    if self.mesh is None:
      return ()
    names = [a for a in _BATCH_AXES if a in self.mesh.axis_names]
    size = self.data_size
    return tuple(names) if size > 1 and batch % size == 0 else ()

  def shares(self, batch: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """What attention is told of where its batch and heads lie.

    Where all is said XLA has nothing to cut, which it can't do to a kernel;
    heads that do not divide are better left to it than computed twice.
    """
    size = self.model_size
    fits = heads % size == 0 and (kv_heads == 1 or kv_heads % size == 0)
    if self.mesh is None or not fits:
      return {}
    return {
      "batch_axis": self.batch_axes(batch),
      "head_axis": (_HEADS,) if size > 1 else (),
    }

  @property
  def model_size(self) -> int:
    """Devices over which heads may be sharded."""
    return 1 if self.mesh is None else dict(self.mesh.shape).get(_HEADS, 1)

  @property
  def data_size(self) -> int:
    """Devices over which a batch may be sharded."""
    if self.mesh is None:
      return 1
    names = [a for a in _BATCH_AXES if a in self.mesh.axis_names]
    return math.prod(self.mesh.shape[name] for name in names)

  def keeping(self, layer: Callable[..., Any], *, looped: bool) -> Any:
    """A layer that keeps what `remat` says for its backward pass.

    `looped`: it is the body of a loop, which keeps a compiler from computing
    both passes as one.
    """
    if self.remat is None:
      return layer
    return jax.checkpoint(layer, policy=self.remat, prevent_cse=not looped)

  def spec(self, x: Shaped[Array | jax.ShapeDtypeStruct, " ..."]) -> P:
    """The sharding of activations [B, T, ...]."""
    tokens = self.of_mesh if x.shape[1] % self.size == 0 else None
    return P(self.batch_axes(x.shape[0]) or None, tokens)

  def constrain(self, x: Shaped[Array, "B T *d"]) -> Shaped[Array, "B T *d"]:
    """Tells the compiler where activations [B, T, ...] lie."""
    return x if self.mesh is None else self.constrained(x, self.spec(x))

  def constrained(
    self, x: Shaped[Array, " ..."], spec: P
  ) -> Shaped[Array, " ..."]:
    """Tells the compiler that an array lies on the mesh as `spec` says."""
    assert self.mesh is not None
    return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def everywhere(self, tree: PyTree) -> Any:
    """Tells the compiler that each device has all of it.

    So every process of a run of several can read it.
    """
    if self.mesh is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

  def rows(self, f: Callable[[Array], Any], x: Shaped[Array, "B T *d"]) -> Any:
    """f(x), which treats each token of [B, T, ...] alone: small results."""
    return f(x)

  def rowwise(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> jax.Array:
    """As `rows`, where f holds much more on its way: some tokens at a time."""
    return blockwise_feedforward(f, x, self.block * self.size)

  def summed(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> jax.Array:
    """As `rows`, of a map f whose inputs are heads: shards of them add up."""
    return self.rows(f, x)

  def summed_rowwise(
    self, layer: RowwiseLayer, x: Shaped[Array, "B T D"]
  ) -> jax.Array:
    """As `rowwise` of `layer.row`, whose width may be sharded and adds up."""
    return self.rowwise(layer.row, x)

  def per_shard(
    self,
    f: Callable[[Any, Array], Array],
    weights: PyTree,
    x: Shaped[Array, "B T D"],
  ) -> jax.Array:
    """f(weights, tokens [n, D]) on each shard's own tokens of [B, T, D]."""

    def local(weights: PyTree, x: jax.Array) -> jax.Array:
      # Gradients are summed over shards here and not where f uses weights,
      # which may be a branch that only some shards take.
      weights = collectives.vary(weights, collectives.varying_axes(x))
      return f(weights, x.reshape(-1, x.shape[-1])).reshape(x.shape)

    spec = self.spec(x) if self.mesh is not None else P()
    names = {
      a
      for entry in tuple(spec)
      for a in (entry if isinstance(entry, tuple) else (entry,))
      if a is not None
    }
    if not names:
      return local(weights, x)
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P(), spec),
      out_specs=spec,
      axis_names=names,
    )(weights, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextParallel(ShardingContext):
  """The call's own keys travel: training, and reading a prompt.

  What a cache holds from before is not seen.

  Attributes:
    strategy: "ring", "gather", "ulysses" or an object.
  """

  strategy: Strategy | Auto | str = Ring()

  # Whether keys come out of a cache, which other calls have filled.
  resident = False

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    mask: Mask,
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, J] from queries [B, T, N, H]."""
    assert cache.fresh is not None
    k, v, _ = cache.fresh
    if extras.selection is not None:
      shards = 1 if self.around is None else collectives.axis_size(self.around)
      if extras.selection.count < k.shape[2] * shards:
        return self._selective(q, tokens, cache.fresh, mask, extras)
    return dot_product_attention(
      q,
      jnp.swapaxes(k, 1, 2),
      jnp.swapaxes(v, 1, 2),
      mask=mask & self.segments if tokens.segmented else mask,
      scale=extras.scale,
      mesh=self.mesh,
      axis=self.axis,
      **self.shares(q.shape[0], q.shape[2], k.shape[1]),
      layout=self.layout,
      strategy=self.strategy,
      q_positions=None if tokens.derived else tokens.pos,
      kv_positions=None if tokens.derived else tokens.pos,
      q_segment_ids=tokens.seg if tokens.segmented else None,
      logits_soft_cap=extras.soft_cap,
      sinks=extras.sinks,
      alibi_slopes=extras.slopes,
    )

  def _selective(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, J] from queries that read the keys they choose.

    The index's keys go to all shards; then the strategy moves all others, in
    long contexts several times, for some queries each.
    """
    selection, around = extras.selection, self.around
    assert selection is not None and selection.keys is not None
    seen = mask & self.segments if tokens.segmented else mask
    at, shards = tokens.at, self.size
    every = selection.keys, at
    if around is not None:
      every = collectives.gather(every, around, 1)
    elif self.mesh is not None:
      batch = self.batch_axes(q.shape[0]) or None

      def all_here(x: jax.Array) -> jax.Array:
        spec = P(batch if x.shape[0] == q.shape[0] else None)
        return self.constrained(x, spec)

      every = jax.tree.map(all_here, every)
    keys, k_at = every
    k, v = (jnp.swapaxes(x, 1, 2) for x in fresh[:2])
    wide = lambda x: jnp.broadcast_to(x, q.shape[:2])
    given = q, selection.without_keys(), Coords(*map(wide, at))
    pairs = q.shape[0] * (q.shape[1] // shards) * keys.shape[1]
    parts = -(-pairs // _PAIRS)

    def some(each: PyTree) -> jax.Array:
      q, selection, q_at = each
      allow = self.constrain(
        chosen_pairs(selection, q_at, keys, k_at, seen, shards)
      )
      derived = tokens.derived and q.shape[1] == k.shape[1]
      return dot_product_attention(
        q,
        k,
        v,
        mask=allow[:, None],
        # Of pairs, so that tiles are left out beforehand.
        is_causal=isinstance(mask, Causal),
        scale=extras.scale,
        mesh=self.mesh,
        axis=self.axis,
        **self.shares(q.shape[0], q.shape[2], k.shape[2]),
        layout=self.layout,
        strategy=self.strategy,
        q_positions=None if derived else q_at.pos,
        kv_positions=None if derived else at.pos,
        logits_soft_cap=extras.soft_cap,
        sinks=extras.sinks,
        alibi_slopes=extras.slopes,
      )

    # Else the backward pass keeps of all parts which pairs are read.
    run = some if parts == 1 else jax.checkpoint(some)
    return by_chunks(run, given, parts, shards)

  def across(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    seg: Int[Array, "B S"],
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, H]: queries see all keys of segments but 0.

    Neither has positions, so that they may be in any order on the shards.
    """
    return dot_product_attention(
      q,
      k,
      v,
      scale=extras.scale,
      mesh=self.mesh,
      axis=self.axis,
      **self.shares(q.shape[0], q.shape[2], k.shape[2]),
      strategy="ring",
      q_segment_ids=jnp.ones(q.shape[:2], jnp.int32),
      kv_segment_ids=seg,
      logits_soft_cap=extras.soft_cap,
    )

  def between(
    self,
    q: Float[Array, "B T N H"],
    at: Coords,
    keys: KV,
    mask: Mask,
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, J]: queries see keys of other coordinates than their own.

    Args:
      q: queries.
      at: coordinates of the queries, [B or 1, T].
      keys: keys, values and their coordinates, [B or 1, T]. Where a key is in
        the layout is where the query of that number is.
      mask: over both.
      extras: of the layer.
    """
    return dot_product_attention(
      q,
      jnp.swapaxes(keys.k, 1, 2),
      jnp.swapaxes(keys.v, 1, 2),
      mask=mask,
      scale=extras.scale,
      mesh=self.mesh,
      axis=self.axis,
      **self.shares(q.shape[0], q.shape[2], keys.k.shape[1]),
      layout=self.layout,
      strategy="ring",
      q_positions=at.pos,
      kv_positions=keys.at.pos,
      q_segment_ids=at.seg,
      kv_segment_ids=keys.at.seg,
      logits_soft_cap=extras.soft_cap,
      alibi_slopes=extras.slopes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainParallel(ContextParallel):
  """Keys travel down a chain of shards that hold uneven parts of a prompt.

  Each shard walks over its own tokens tile by tile, so slots that are empty
  cost nothing. For reading only: a walk whose length is data has no gradient.

  Attributes:
    layout: `Uneven`, with a count for each shard.
    tile: tokens of a step of the walk.
  """

  strategy: Strategy = Chain()
  tile: int = 256

  def rows(self, f: Callable[[Array], Any], x: Shaped[Array, "B T *d"]) -> Any:
    return self._walk(lambda _, x: f(x), None, x)

  def rowwise(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> jax.Array:
    return self.rows(f, x)

  def per_shard(
    self,
    f: Callable[[Any, Array], Array],
    weights: PyTree,
    x: Shaped[Array, "B T D"],
  ) -> jax.Array:
    def flat(w: PyTree, x: jax.Array) -> jax.Array:
      return f(w, x.reshape(-1, x.shape[-1])).reshape(x.shape)

    return self._walk(flat, weights, x)

  def _walk(
    self, f: Callable[[Any, jax.Array], Any], weights: PyTree, x: jax.Array
  ) -> PyTree:
    """f(weights, tile) of the tiles that each shard's tokens fill."""
    assert isinstance(self.layout, Uneven) and self.axis is not None
    axis, tile = self.axis, min(self.tile, x.shape[1] // self.size)
    tiles = np.asarray([-(-n // tile) for n in self.layout.counts], np.int32)

    def local(weights: PyTree, x: jax.Array) -> PyTree:
      def at(n: jax.Array) -> jax.Array:
        # The last tile begins early rather than end late: rows that are
        # computed twice come out the same.
        return lax.dynamic_slice_in_dim(x, n * tile, tile, 1)

      def step(n: jax.Array, done: PyTree) -> PyTree:
        return jax.tree.map(
          lambda all_, new: lax.dynamic_update_slice_in_dim(
            all_, new, n * tile, 1
          ),
          done,
          f(weights, at(n)),
        )

      empty = jax.tree.map(
        lambda y: collectives.zeros(
          (y.shape[0], x.shape[1], *y.shape[2:]), y.dtype, x
        ),
        jax.eval_shape(f, weights, at(jnp.int32(0))),
      )
      mine = jnp.asarray(tiles)[collectives.axis_index(axis)]
      return lax.fori_loop(jnp.int32(0), mine, step, empty)

    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P(), P(None, axis)),
      out_specs=P(None, axis),
      axis_names={axis},
    )(weights, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedAttention(ShardingContext):
  """The keys stay in the cache and queries visit them: chunks and decoding.

  Attributes:
    local: the algorithm on a shard.
    replicated: whether the call's tokens are the same on all shards (decoding),
      or sharded (a chunk).
  """

  local: Any = AutoKernel()
  replicated: bool = True

  resident = True
  # Whether a call's rows are sharded over `axis`, see `MultiMaster`.
  masters = False

  @property
  def sharded(self) -> bool:
    return self.of_mesh is not None and not self.replicated

  def spec(self, x: Shaped[Array | jax.ShapeDtypeStruct, " ..."]) -> P:
    if self.replicated:
      return P(self.batch_axes(x.shape[0]) or None)
    return super().spec(x)

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    mask: Mask,
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, J] from queries [B, T, N, H]."""
    drafted = tokens.tree
    views = cache.views(apart=drafted is not None)
    seen = mask
    if tokens.segmented:
      seen = mask & self.segments
      views = tuple(self._segmented(view) for view in views)
    if drafted is not None:
      # What the cache held, by the layer's mask; and the call's own tokens.
      *held, last = views
      own: Any = last
      views = (*held, own.of_tree(drafted, mask & Ancestors()))
    return self.visit(q, views, tokens.at, seen, extras)

  def across(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    seg: Int[Array, "B S"],
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, H]: queries see all keys of segments but 0."""
    held = KV(
      jnp.swapaxes(k, 1, 2),
      jnp.swapaxes(v, 1, 2),
      Coords(jnp.zeros_like(seg), seg),
    )
    none = jnp.zeros((1, q.shape[1]), jnp.int32)
    at = Coords(none, none + 1)
    return self.visit(q, (held.view(self.size),), at, Everything(), extras)

  def visit(
    self,
    q: Float[Array, "B T N H"],
    views: tuple[Any, ...],
    at: Coords,
    mask: Mask,
    extras: Extras,
  ) -> jax.Array:
    """[B, T, N, J]: queries see keys of views, merged as partials.

    Args:
      q: queries.
      views: of a cache's layer, sharded as this says.
      at: coordinates of the queries, [B or 1, T].
      mask: of views without one of their own.
      extras: of the layer.
    """
    b, t, n, h = q.shape
    # Other views may have their heads as examples.
    heads = views[-1].shape[1]
    grouped = lambda a: None if a is None else a.reshape(heads, -1)
    shares = self.shares(b, n, heads)
    run = ShardedDecode(
      mesh=self.mesh,
      axis=self.of_mesh,
      batch_axes=shares.get("batch_axis", ()),
      head_axes=shares.get("head_axis", ()),
      whole=bool(shares),
      sharded=self.sharded,
      masters=self.masters,
      local=self.local,
    )
    out = run(
      Scores(scale=extras.scale, soft_cap=extras.soft_cap),
      jnp.transpose(q.reshape(b, t, heads, -1, h), (0, 2, 3, 1, 4)),
      views,
      Terms(slopes=grouped(extras.slopes), sinks=grouped(extras.sinks)),
      at,
      mask,
      extras.selection,
    )
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)

  def _segmented(self, view: KVView) -> Any:
    """A view whose own mask, if it has one, is over segments too."""
    if view.mask is None:
      return view
    found: Any = view
    return dataclasses.replace(found, mask=view.mask & self.segments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiMaster(CachedAttention):
  """Decoding whose rows are dealt to the shards, their masters.

  A master computes its rows' projections and feedforward; their queries go to
  all shards, and the partials of all come back to it. One token of each row,
  of rows that are a multiple of the shards; the cache has `MasterSlots`.
  """

  masters = True

  def spec(self, x: Shaped[Array | jax.ShapeDtypeStruct, " ..."]) -> P:
    return P(self.of_mesh)


# How a model's attention finds its keys; at run time also what stands in front
# of one of these, for instance to note a layer's queries.
if TYPE_CHECKING:
  Attend = ContextParallel | ChainParallel | CachedAttention
else:
  Attend = Callable

"""Sharding of a call's tokens, and how its queries reach their keys.

A model gets one of these objects with the call and needs no other information:
the same weights serve one device, a ring in prefill, and decode from a sharded
cache.
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

from ringjax import tree
from ringjax.errors import MeshError, OptionError
from ringjax.kv.base import KV, LayerCache
from ringjax.nn.sums.choice_sums import ChoiceRecord
from ringjax.nn.sums.score_sums import ScoreRecord
from ringjax.nn.tokens import Tokens
from ringjax.nn.weights.layer_array import LayerArray
from ringjax.ops.ancestors import Ancestors
from ringjax.ops.attention.api import (
  attention_score_maxima,
  dot_product_attention,
  latent_attention,
)
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.cached_choice import (
  CachedChoice,
  PositionChoice,
)
from ringjax.ops.attention.cached.selection import (
  KeySelection,
  by_chunks,
)
from ringjax.ops.attention.cached.views import ApartView, KVView
from ringjax.ops.attention.cost.select import Auto
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.sparse.index_learning.index_loss import index_loss
from ringjax.ops.attention.sparse.sparse_api import (
  sparse_attention,
  sparse_latent_attention,
)
from ringjax.ops.attention.sparse.top_tokens import TopTokens
from ringjax.ops.attention.strategies.chain import Chain
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.experts.expert_shards import ExpertShards
from ringjax.ops.feedforward import blockwise_feedforward
from ringjax.ops.mask import Coords, Everything, Mask, SameSegment
from ringjax.ops.softmax import widened
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import AUTO, STAGE, manual_over
from ringjax.parallel.layout import Contiguous, Layout, Uneven
from ringjax.parallel.mesh import automatic

# Outside of the layers, rows are sharded over stages, too.
_BATCH_AXES = ("replica", "data", STAGE)
_HEADS = "model"
# Most numbers of queries that are projected to rows on a device at once.
_ROW_QUERIES = 1 << 29
# Queries of a shard at which the recall of a choice is measured.
_SAMPLES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
  """Terms of a layer's attention besides its mask; None where absent.

  Attributes:
    scale: Factor on the logits.
    soft_cap: Soft cap of the logits.
    sinks: Sink logits of the heads, [N].
    slopes: ALiBi slopes of the heads, [N].
    selection: Chooses the keys that each query reads; None: it reads all.
    residual: Whether to return the log-sum-exp, too, float32 [B, T, N], of keys
      with a mask of this layer alone; not with sinks.
    up: Up-projection [C, N, P + J], where the keys of a call are rows of
      latent attention: one head of C + R numbers, whose values have none.
  """

  scale: float
  soft_cap: float | None = None
  sinks: Float[Array, " N"] | None = None
  slopes: Float[Array, " N"] | None = None
  selection: CachedChoice | None = None
  up: Float[Array, "C N Y"] | None = None
  residual: bool = False


@runtime_checkable
class RowwiseLayer(Protocol):
  """A layer that acts on each token independently."""

  def row(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Apply the layer to some tokens."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingContext:
  """Sharding of tokens over the devices of a mesh, in a layout.

  Attributes:
    mesh: Device mesh; None for one device, or in a model's call to let the
      model find it. Explicit axes are taken as automatic ones.
    axis: Mesh axis that shards the sequence, or None for none. "auto": none if
      there is a mesh, and in a model's call the axis that the model finds. In
      a shard_map without a mesh: the manual axis that shards the call's
      tokens; None: each device attends alone.
    layout: Placement of the tokens on the shards.
    block: Tokens of a step of the feedforward, on each shard.
    segments: Rule by which the call's `segment_ids` see each other:
      `SameSegment()`, or `SeparateDocuments()` for documents that only
      questions and link tokens see together. Not used without `segment_ids`.
    remat: Policy of `jax.checkpoint`: what the backward pass keeps of a layer;
      None: all.
    stage_rows: Rows of a data shard that pass the stages of a mesh together.
    in_stage: Whether the call is that of a stage, with its rows.

  Raises:
    MeshError: If the mesh does not have the axis.
    OptionError: If `segments` is not a mask over segments.
  """

  mesh: Mesh | AbstractMesh | None = None
  axis: str | None = AUTO
  layout: Layout = Contiguous()
  block: int = 2048
  segments: Mask = SameSegment()
  remat: Callable[..., Any] | None = None
  stage_rows: int = 1
  in_stage: bool = False

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
    """Number of shards of the sequence."""
    axis = self.of_mesh
    if axis is None:
      return 1
    assert self.mesh is not None
    return self.mesh.shape[axis]

  @property
  def of_mesh(self) -> str | None:
    """Axis of `mesh` that shards the sequence; None without a mesh."""
    return None if self.mesh is None else self.axis

  @property
  def sharded(self) -> bool:
    """Whether the call's tokens are sharded over an axis of the mesh."""
    return self.of_mesh is not None

  @property
  def around(self) -> str | None:
    """Manual axis of a surrounding shard_map that shards the call's tokens.

    Raises:
      MeshError: If there is an axis without a mesh, outside of any shard_map.
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
    """Mesh axes over which a batch of this size is sharded."""
    if self.mesh is None:
      return ()
    size = self.data_size
    return self._row_axes if size > 1 and batch % size == 0 else ()

  def shares(self, batch: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Sharding options of attention for its batch and heads.

    With complete information XLA does not have to partition, which it can't do
    to a kernel; heads that do not divide are left to XLA, not computed twice.
    """
    size = self.model_size
    divides = heads % size == 0 and (kv_heads == 1 or kv_heads % size == 0)
    if self.mesh is None or not divides:
      return {}
    return {
      "batch_axis": self.batch_axes(batch),
      "head_axis": (_HEADS,) if size > 1 else (),
    }

  @property
  def model_size(self) -> int:
    """Number of devices over which heads may be sharded."""
    return 1 if self.mesh is None else dict(self.mesh.shape).get(_HEADS, 1)

  @property
  def data_size(self) -> int:
    """Number of devices over which a batch may be sharded."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[name] for name in self._row_axes)

  @property
  def _row_axes(self) -> tuple[str, ...]:
    """Axes of the mesh that shard the rows of this call."""
    assert self.mesh is not None
    axes = {*self.mesh.axis_names} - ({STAGE} if self.in_stage else set())
    return tuple(axis for axis in _BATCH_AXES if axis in axes)

  @property
  def stages(self) -> int:
    """Number of stages that the layers of a call are sharded over."""
    if self.mesh is None or self.in_stage:
      return 1
    return dict(self.mesh.shape).get(STAGE, 1)

  def keeping(self, layer: Callable[..., Any], *, looped: bool) -> Any:
    """Wrap a layer so that its backward pass keeps what `remat` says.

    `looped`: whether it is the body of a loop, which prevents the compiler from
    merging both passes.
    """
    if self.remat is None:
      return layer
    return jax.checkpoint(layer, policy=self.remat, prevent_cse=not looped)

  def spec(self, x: Shaped[Array | jax.ShapeDtypeStruct, " ..."]) -> P:
    """Sharding of activations [B, T, ...]."""
    tokens = self.of_mesh if x.shape[1] % self.size == 0 else None
    return P(self.batch_axes(x.shape[0]) or None, tokens)

  def spec_with_heads(
    self, x: Shaped[Array | jax.ShapeDtypeStruct, "B T *d"]
  ) -> P:
    """Sharding of activations [B, T, ...] with heads, else channels.

    Complete: XLA's partitioner would gather what automatic axes shard before an
    all-to-all over another axis.
    """
    other_axes: list[str | None] = [None] * (x.ndim - 2)
    size = self.model_size
    dims = [n for n, d in enumerate(x.shape[2:]) if d > 1 and d % size == 0]
    if size > 1 and dims:
      other_axes[dims[0]] = _HEADS
    batch, tokens = (*self.spec(x), None, None)[:2]
    return P(batch, tokens, *other_axes)

  def constrain(self, x: Shaped[Array, "B T *d"]) -> Shaped[Array, "B T *d"]:
    """Constrain the sharding of activations [B, T, ...]."""
    return x if self.mesh is None else self.constrained(x, self.spec(x))

  def constrained(
    self, x: Shaped[Array, " ..."], spec: P
  ) -> Shaped[Array, " ..."]:
    """Constrain an array's sharding on the mesh to `spec`."""
    assert self.mesh is not None
    return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def over_vocab(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """Constrain logits to be sharded as the default rules shard the head.

    Otherwise the compiler may gather the head's weights, where all logits are
    used on each device: a check of drafted tokens. A head that other rules
    replicate has its logits gathered, 4 V bytes a token.
    """
    if self.model_size == 1 or logits.shape[2] % self.model_size:
      return logits
    batch, tokens = (*self.spec(logits), None, None)[:2]
    return self.constrained(logits, P(batch, tokens, _HEADS))

  def everywhere(self, tree: PyTree) -> Any:
    """Constrain all arrays of a tree to be replicated on every device.

    So every process of a multi-process run can read them.
    """
    if self.mesh is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

  def rows(self, f: Callable[[Array], Any], x: Shaped[Array, "B T *d"]) -> Any:
    """f(x) for an f that acts on each token of [B, T, ...]: small results."""
    return f(x)

  def head(
    self, f: Callable[[Array], Array], h: Shaped[Array, "B n *d"]
  ) -> Shaped[Array, "B n ..."]:
    """f(h) for the norm before a head, or the head of few tokens."""
    return f(h)

  def rowwise(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> Shaped[Array, "B T ..."]:
    """f(x) for an f with large intermediates: some tokens at a time."""
    return blockwise_feedforward(f, x, self.block * self.size)

  def summed(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> Shaped[Array, "B T ..."]:
    """f(x) for a map f whose inputs are heads: sharded heads are summed."""
    return self.rows(f, x)

  def summed_rowwise(
    self, layer: RowwiseLayer, x: Shaped[Array, "B T D"]
  ) -> Shaped[Array, "B T D"]:
    """`layer.row` with large intermediates, whose width may be sharded.

    In several steps each shard takes those of the tokens it has: weights that
    are sharded over the tokens' axes are gathered once, and their gradients
    summed over these axes once, in float32. A compiler may do either in each
    step.
    """
    if not self._token_axes(x) or x.shape[1] <= self.block * self.size:
      return self.rowwise(layer.row, x)

    def local(layer: Any, x: jax.Array) -> jax.Array:
      float32_layer = widened(layer, x)

      def row(x: jax.Array) -> jax.Array:
        cast_layer = jax.tree.map(
          lambda array, weight: array.astype(weight.dtype), float32_layer, layer
        )
        return cast_layer.row(x)

      return blockwise_feedforward(row, x, self.block)

    return self._on_shards(local, layer, x)

  def _token_axes(self, x: Shaped[Array, "B T *d"]) -> set[str]:
    """Mesh axes that shard rows and tokens of x."""
    return set() if self.mesh is None else _names(self.spec(x))

  def _on_shards(
    self, f: Callable[[Any, Any], Any], weights: PyTree, x: PyTree
  ) -> Any:
    """f(weights, x) on each shard's own tokens of a tree of [B, T, ...]."""
    first = jax.tree.leaves(x)[0]
    names = self._token_axes(first)
    if self.mesh is None or not names:
      return f(weights, x)
    spec = self.spec(first)
    return jax.shard_map(
      f,
      mesh=self.mesh,
      in_specs=(P(), spec),
      out_specs=spec,
      **manual_over(self.mesh, names),
    )(weights, x)

  def per_shard(
    self,
    f: Callable[[Any, Any], Any],
    weights: PyTree,
    x: PyTree,
  ) -> Any:
    """f(weights, tokens [n, ...]) on each shard's own tokens of [B, T, ...].

    Results are [n, ...] on a shard, [B, T, ...] in all; tokens and results are
    trees of such arrays.
    """

    def local(weights: PyTree, x: PyTree) -> Any:
      # Gradients are summed over shards here and not where f uses weights,
      # which may be in a branch that only some shards take.
      weights = collectives.vary(weights, collectives.varying_axes(x))
      return _by_row(f(weights, _flat_tokens(x)), jax.tree.leaves(x)[0])

    return self._on_shards(local, weights, x)

  def per_expert_shard(
    self,
    f: Callable[[Any, Any, Any, ExpertShards], Any],
    weights: PyTree,
    experts: PyTree,
    x: PyTree,
    over: tuple[str, ...],
  ) -> Any:
    """f on each shard's tokens of [B, T, ...] and each shard's experts.

    Args:
      f: Function (weights, experts of the shard, tokens [n, ...], axes of the
        shards) -> [n, ...] or a pytree of such, the same on shards that have
        the same tokens.
      weights: Weights that all shards have.
      experts: Arrays of the experts' weights, [E, ...] each.
      x: Tokens, a tree of arrays [B, T, ...].
      over: Mesh axes that shard the experts, not none.

    Returns:
      [B, T, ...] or a pytree of such.

    Raises:
      MeshError: If the call's mesh does not have these axes.
    """
    mesh = self.mesh
    if mesh is None or not {*over} <= {*mesh.axis_names}:
      raise MeshError(
        "attend",
        "no mesh" if mesh is None else f"a mesh of axes {mesh.axis_names}",
        f"the mesh whose axes {over} shard the model's experts",
        "pass that mesh, or move the model to this one with rj.models.place",
      )
    first = jax.tree.leaves(x)[0]
    spec = self.spec(first)
    shards = ExpertShards(
      over=over, tokens=tuple(a for a in over if a in _names(spec))
    )

    def local(weights: PyTree, experts: PyTree, x: PyTree) -> Any:
      tokens = _flat_tokens(x)
      return _by_row(f(weights, experts, tokens, shards), jax.tree.leaves(x)[0])

    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P(), _expert_specs(experts, over), spec),
      out_specs=spec,
      **manual_over(mesh, _names(spec) | {*over}),
    )(weights, experts, x)


def _attention(
  up: Float[Array, "C N Y"] | None,
  q: Float[Array, "B T N H"],
  k: Float[Array, "B S K _"],
  v: Float[Array, "B S K J"],
  **options: Any,
) -> Any:
  """Attend to keys and values, or with `up` to rows in the place of keys."""
  if up is None:
    return dot_product_attention(q, k, v, **options)
  return latent_attention(q, k[:, :, 0], up, **options)


def _by_row(results: PyTree, x: jax.Array) -> Any:
  """Results [n, ...] of tokens as [B, T, ...], for x [B, T, D]."""
  return jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), results)


def _expert_specs(experts: PyTree, over: tuple[str, ...]) -> PyTree:
  """Specs of arrays of experts' weights, of one layer or of all layers."""

  def spec_of(array: object) -> Any:
    if isinstance(array, LayerArray):
      # Specs in the place of the arrays, as shard_map takes them.
      return tree.with_leaves(array, stacked=P(None, over), layer=P())
    return P(over)

  is_array = lambda x: isinstance(x, LayerArray)
  return jax.tree.map(spec_of, experts, is_leaf=is_array)


def _flat_tokens(x: PyTree) -> Any:
  """Arrays [B, T, ...] as [n, ...]."""
  return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), x)


def _names(spec: P) -> set[str]:
  """Mesh axes in a sharding."""
  return {
    a
    for entry in tuple(spec)
    for a in (entry if isinstance(entry, tuple) else (entry,))
    if a is not None
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextParallel(ShardingContext):
  """Keys of the call travel between shards: training, and prefill.

  Earlier contents of a cache are not seen.

  Attributes:
    strategy: "ring", "gather", "ulysses" or a strategy object.
  """

  strategy: Strategy | Auto | str = Ring()

  # Whether keys come from a cache, which other calls have filled.
  resident = False
  # Whether keys may be rows of latent attention, see `Extras.up`.
  takes_rows = True
  # Whether it supports `Extras.residual`.
  takes_classes = True

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    mask: Mask,
    extras: Extras,
  ) -> Any:
    """[B, T, N, J] from queries [B, T, N, H]; see `Extras.residual`."""
    assert cache.fresh is not None
    fresh = cache.fresh
    scores = tokens.record_of(ScoreRecord)
    if scores is not None:
      scores.add(self._score_maxima(q, tokens, fresh, mask, extras))
    if extras.selection is None:
      return self._dense(q, tokens, fresh, mask, extras)
    record = tokens.record_of(ChoiceRecord)
    if record is not None:
      return self._recorded(q, tokens, fresh, mask, extras, record)
    if self._chooses(extras, fresh):
      return self._selective(q, tokens, fresh, mask, extras)[0]
    return self._dense(q, tokens, fresh, mask, extras)

  def _chooses(self, extras: Extras, fresh: KV) -> bool:
    """Whether there may be more keys than a query reads."""
    shards = 1 if self.around is None else collectives.axis_size(self.around)
    selection = extras.selection
    assert selection is not None
    return selection.chooses(fresh.k.shape[2] * shards)

  def _dense(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
  ) -> Any:
    """Attention to all visible keys; see `Extras.residual`."""
    k, v, _ = fresh
    return _attention(
      extras.up,
      q,
      jnp.swapaxes(k, 1, 2),
      jnp.swapaxes(v, 1, 2),
      **self.call_options(q, k.shape[1], tokens, mask, extras),
      strategy=self.strategy,
      q_positions=None if tokens.derived else tokens.pos,
      kv_positions=None if tokens.derived else tokens.pos,
      q_segment_ids=tokens.seg if tokens.segmented else None,
      alibi_slopes=extras.slopes,
      return_residual=extras.residual,
    )

  def _score_maxima(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B T N"]:
    """Largest product of each query with the keys that it sees, scaled."""
    k = jnp.swapaxes(fresh.k, 1, 2)
    product = dataclasses.replace(extras, soft_cap=None, sinks=None)
    return attention_score_maxima(
      q,
      k,
      up=extras.up,
      **self.call_options(q, k.shape[2], tokens, mask, product),
      **self._coords_of(tokens.at, tokens, True),
    )

  def call_options(
    self,
    q: Float[Array, "B T N H"],
    kv_heads: int,
    tokens: Tokens,
    mask: Mask,
    extras: Extras,
  ) -> dict[str, Any]:
    """Options of a call of attention that do not depend on its coordinates."""
    return dict(
      mask=mask & self.segments if tokens.segmented else mask,
      scale=extras.scale,
      mesh=self.mesh,
      axis=self.axis,
      **self.shares(q.shape[0], q.shape[2], kv_heads),
      layout=self.layout,
      logits_soft_cap=extras.soft_cap,
      sinks=extras.sinks,
    )

  def _selective(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
  ) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"], GivenBlocks]:
    """Attention to the keys, or rows of latents, that an index chooses.

    Keys and the index's keys go around the ring of shards; rows in long
    contexts several times, each time for some queries.

    Returns:
      The output, its log-sum-exp and the choice.
    """
    selection, up = extras.selection, extras.up
    if isinstance(selection, PositionChoice):
      return self._by_position(q, tokens, fresh, mask, extras, selection)
    assert isinstance(selection, KeySelection) and selection.keys is not None
    at = tokens.at
    broadcast = lambda x: jnp.broadcast_to(x, q.shape[:2])
    inputs = q, selection.without_keys(), Coords(*map(broadcast, at))
    parts = 1
    if up is not None:
      numbers = math.prod(q.shape[:3]) * (fresh.k.shape[3] + q.shape[3])
      parts = -(-numbers // (self.size * self.model_size * _ROW_QUERIES))

    def attend_chunk(chunk: PyTree) -> Any:
      q, chunk_selection, q_at = chunk
      return self._chosen(
        q, chunk_selection, selection.keys, q_at, tokens, fresh, mask, extras
      )

    # Otherwise the backward pass would keep the projected queries of all parts.
    run = attend_chunk if parts == 1 else jax.checkpoint(attend_chunk)
    return by_chunks(run, inputs, parts, self.size)

  def _chosen(
    self,
    q: Float[Array, "B t N H"],
    selection: KeySelection,
    index_keys: Float[Array, "B S E"],
    q_at: Coords,
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
  ) -> tuple[Float[Array, "B t N J"], Float[Array, "B t N"], GivenBlocks]:
    """`_selective` of some queries, at coordinates [B, t]."""
    k = jnp.swapaxes(fresh.k, 1, 2)
    chooser = TopTokens(
      q=selection.q,
      weights=selection.weights,
      keys=index_keys.astype(selection.q.dtype),
      count=selection.count,
    )
    options: dict[str, Any] = dict(
      **self.call_options(q, k.shape[2], tokens, mask, extras),
      **self._coords_of(q_at, tokens, q.shape[1] == k.shape[1]),
      return_residual=True,
      return_selection=True,
    )
    if extras.up is not None:
      return sparse_latent_attention(
        q, k[:, :, 0], extras.up, chooser, **options
      )
    v = jnp.swapaxes(fresh.v, 1, 2)
    return sparse_attention(q, k, v, chooser, **options)

  def _by_position(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
    choice: PositionChoice,
  ) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"], GivenBlocks]:
    """`_selective` of blocks, which are of the tokens of a row."""
    if not tokens.derived and not tokens.segmented:
      raise OptionError(
        "positions",
        "positions for layers that choose blocks of them",
        "those of the layout, or segment_ids of packed documents",
        "leave positions out",
      )
    options = self.call_options(q, fresh.k.shape[1], tokens, mask, extras)
    if extras.up is not None:
      options["up"] = extras.up
    return choice.over_shards(
      q,
      jnp.swapaxes(fresh.k, 1, 2),
      jnp.swapaxes(fresh.v, 1, 2),
      tokens.at.seg if tokens.segmented else None,
      **options,
    )

  def _coords_of(
    self, q_at: Coords, tokens: Tokens, every_query: bool
  ) -> dict[str, Any]:
    """Options of a call: coordinates of queries and of all keys."""
    derived = tokens.derived and every_query
    at = tokens.at
    return dict(
      q_positions=None if derived else q_at.pos,
      kv_positions=None if derived else at.pos,
      q_segment_ids=q_at.seg if tokens.segmented else None,
      kv_segment_ids=at.seg if tokens.segmented else None,
    )

  def _recorded(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
    record: ChoiceRecord,
  ) -> Float[Array, "B T N J"]:
    """Attention of a layer that chooses keys: its recall, and an index's loss.

    Queries read all keys while the index warms up, else the chosen ones.
    """
    selection = extras.selection
    assert selection is not None
    k = jnp.swapaxes(fresh.k, 1, 2)
    chosen = None
    chooses = self._chooses(extras, fresh)
    if chooses and not record.warm_up:
      out, lse, chosen = self._selective(q, tokens, fresh, mask, extras)
    else:
      residual = dataclasses.replace(extras, residual=True)
      out, lse = self._dense(q, tokens, fresh, mask, residual)
    at = Coords(*(jnp.broadcast_to(x, q.shape[:2]) for x in tokens.at))
    by_position = isinstance(selection, PositionChoice)
    index = selection.index_selection(k.shape[1])
    loss = None
    if record.index_learns and index is not None:
      options = self.call_options(q, k.shape[2], tokens, mask, extras)
      del options["sinks"]
      if by_position and tokens.segmented:
        options |= dict(q_segment_ids=at.seg, kv_segment_ids=at.seg)
      elif not by_position:
        options |= self._coords_of(at, tokens, True)
      loss = index_loss(
        q,
        k[:, :, 0] if extras.up is not None else k,
        index,
        lse,
        chosen=chosen,
        up=extras.up,
        **options,
      )
    # What follows has no gradient.
    q, fresh, selection, lse, up, sinks = lax.stop_gradient(
      (q, fresh, selection, lse, extras.up, extras.sinks)
    )
    extras = dataclasses.replace(
      extras, selection=selection, up=up, sinks=sinks
    )
    sample = lambda x: self._sampled(x)
    sampled_at = Coords(*map(sample, at))
    sampled_q, sampled_lse = sample(q), sample(lse)
    chosen_lse = all_lse = sampled_lse
    if chosen is not None:
      all_lse = self._dense_lse(
        sampled_q, sampled_at, tokens, fresh, mask, extras
      )
    elif chooses and by_position:
      # In a warm-up, which only an index has. Blocks are of all positions.
      chosen_lse = sample(self._selective(q, tokens, fresh, mask, extras)[1])
    elif chooses:
      assert isinstance(selection, KeySelection) and selection.keys is not None
      _, chosen_lse, _ = self._chosen(
        sampled_q,
        jax.tree.map(sample, selection.without_keys()),
        selection.keys,
        sampled_at,
        tokens,
        fresh,
        mask,
        extras,
      )
    record.add(loss, chosen_lse, all_lse, sampled_at.seg > 0)
    return out

  def _sampled(self, x: Shaped[Array, "B T *d"]) -> Shaped[Array, "B M *d"]:
    """Some tokens of each shard, at equal distances, the last one included."""
    b, t, *dims = x.shape
    length = t // self.size
    stride = max(1, length // _SAMPLES)
    while length % stride:
      stride -= 1
    x = x.reshape(b, self.size, length // stride, stride, *dims)
    return x[:, :, :, -1].reshape(b, t // stride, *dims)

  def _dense_lse(
    self,
    q: Float[Array, "B M N H"],
    q_at: Coords,
    tokens: Tokens,
    fresh: KV,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B M N"]:
    """Log-sum-exp of some queries over all visible keys."""
    k = jnp.swapaxes(fresh.k, 1, 2)
    return _attention(
      extras.up,
      q,
      k,
      jnp.swapaxes(fresh.v, 1, 2),
      **self.call_options(q, k.shape[2], tokens, mask, extras),
      **self._coords_of(q_at, tokens, False),
      strategy=self.strategy,
      return_residual=True,
    )[1]

  def across(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    seg: Int[Array, "B S"],
    extras: Extras,
  ) -> Float[Array, "B T N H"]:
    """[B, T, N, H]: queries see all keys of segments other than 0.

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
  ) -> Any:
    """[B, T, N, J]: queries see keys that have other coordinates.

    Args:
      q: Queries.
      at: Coordinates of the queries, [B or 1, T].
      keys: Keys, values and their coordinates, [B or 1, S], as many on each
        shard. Ordered keys on the shard of the query with the same index keep a
        causal ring balanced.
      mask: Mask over both coordinates.
      extras: Further terms of the layer's attention, see `Extras.residual`.
    """
    out, lse, _ = self._between(q, at, keys, mask, extras)
    return (out, lse) if extras.residual else out

  def recorded_between(
    self,
    q: Float[Array, "B T N H"],
    at: Coords,
    keys: KV,
    mask: Mask,
    extras: Extras,
    record: ChoiceRecord,
  ) -> tuple[Any, Callable[[Float[Array, "B T N"]], None]]:
    """`between` with a residual, and what records the choice of these keys.

    Queries read all keys while the index warms up, else the chosen ones.

    Returns:
      The output and its log-sum-exp; and a function of the log-sum-exp of the
      layer's whole attention, of which these keys may be a part.
    """
    selection = extras.selection
    assert isinstance(selection, KeySelection) and selection.keys is not None
    all_keys = dataclasses.replace(extras, selection=None, residual=True)
    residual = dataclasses.replace(extras, residual=True)
    run = all_keys if record.warm_up else residual
    out, lse, chosen = self._between(q, at, keys, mask, run)
    at = Coords(*(jnp.broadcast_to(x, q.shape[:2]) for x in at))

    def add(attention_lse: Float[Array, "B T N"]) -> None:
      loss = None
      if record.index_learns:
        loss = index_loss(
          q,
          jnp.swapaxes(keys.k, 1, 2),
          selection.index_selection(keys.k.shape[2]),
          attention_lse,
          chosen=chosen,
          **self._between_options(q, at, keys, mask, extras),
        )
      # What follows has no gradient.
      of_queries = selection.without_keys(), q, lse
      of_queries, fixed_keys, index_keys = lax.stop_gradient(
        (of_queries, keys, selection.keys)
      )
      sampled_at = Coords(*map(self._sampled, at))
      sampled, sampled_q, sampled_lse = jax.tree.map(self._sampled, of_queries)
      chosen_lse = all_lse = sampled_lse
      again = lambda extras: self._between(
        sampled_q, sampled_at, fixed_keys, mask, extras
      )[1]
      if chosen is not None:
        all_lse = again(all_keys)
      elif record.warm_up:
        sampled = dataclasses.replace(sampled, keys=index_keys)
        chosen_lse = again(dataclasses.replace(residual, selection=sampled))
      record.add(loss, chosen_lse, all_lse, sampled_at.seg > 0)

    return (out, lse), add

  def _between_options(
    self,
    q: Float[Array, "B T N H"],
    at: Coords,
    keys: KV,
    mask: Mask,
    extras: Extras,
  ) -> dict[str, Any]:
    """Options of attention of `between`."""
    same_length = keys.k.shape[2] == q.shape[1]
    return dict(
      mask=mask,
      scale=extras.scale,
      mesh=self.mesh,
      axis=self.axis,
      **self.shares(q.shape[0], q.shape[2], keys.k.shape[1]),
      layout=self.layout if same_length else Contiguous(),
      q_positions=at.pos,
      kv_positions=keys.at.pos,
      q_segment_ids=at.seg,
      kv_segment_ids=keys.at.seg,
      logits_soft_cap=extras.soft_cap,
    )

  def _between(
    self,
    q: Float[Array, "B T N H"],
    at: Coords,
    keys: KV,
    mask: Mask,
    extras: Extras,
  ) -> tuple[Any, Any, GivenBlocks | None]:
    """`between`: the output, its log-sum-exp and the choice.

    The second is None unless `extras` asks for it, the third where all keys are
    read.
    """
    k, v = (jnp.swapaxes(x, 1, 2) for x in (keys.k, keys.v))
    options = self._between_options(q, at, keys, mask, extras)
    selection = extras.selection
    shards = 1 if self.around is None else collectives.axis_size(self.around)
    # Layers that choose blocks read keys of their own tokens alone.
    assert selection is None or isinstance(selection, KeySelection)
    if selection is not None and selection.count < k.shape[1] * shards:
      assert selection.keys is not None
      choice = TopTokens(
        q=selection.q,
        weights=selection.weights,
        keys=selection.keys.astype(selection.q.dtype),
        count=selection.count,
      )
      return sparse_attention(
        q, k, v, choice, **options, return_residual=True, return_selection=True
      )
    out = dot_product_attention(
      q,
      k,
      v,
      **options,
      strategy="ring",
      alibi_slopes=extras.slopes,
      return_residual=extras.residual,
    )
    out, lse = out if extras.residual else (out, None)
    return out, lse, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainParallel(ContextParallel):
  """Keys travel down a chain of shards that hold uneven parts of a prompt.

  Each shard walks over its own tokens tile by tile, so empty slots cost
  nothing. For prefill only: a loop whose length is data has no gradient.

  Attributes:
    layout: `Uneven`, with a count for each shard.
    tile: Number of tokens of a step of the walk.
  """

  strategy: Strategy = Chain()
  tile: int = 256

  def rows(self, f: Callable[[Array], Any], x: Shaped[Array, "B T *d"]) -> Any:
    return self._walk(lambda _, x: f(x), None, x)

  def rowwise(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> Shaped[Array, "B T ..."]:
    return self.rows(f, x)

  def per_shard(
    self, f: Callable[[Any, Any], Any], weights: PyTree, x: PyTree
  ) -> Any:
    def flat(w: PyTree, x: PyTree) -> Any:
      return _by_row(f(w, _flat_tokens(x)), jax.tree.leaves(x)[0])

    return self._walk(flat, weights, x)

  def _walk(
    self, f: Callable[[Any, Any], Any], weights: PyTree, x: PyTree
  ) -> PyTree:
    """f(weights, tile) for the tiles that each shard's tokens fill.

    Args:
      f: Function of the weights and a tile of the tokens.
      weights: Arrays that all shards have.
      x: Tree of arrays of the tokens, [B, T, ...].
    """
    assert isinstance(self.layout, Uneven) and self.axis is not None
    length = jax.tree.leaves(x)[0].shape[1]
    axis, tile = self.axis, min(self.tile, length // self.size)
    tiles = np.asarray([-(-n // tile) for n in self.layout.counts], np.int32)

    def local(weights: PyTree, x: PyTree) -> PyTree:
      local_length = jax.tree.leaves(x)[0].shape[1]

      def at(n: jax.Array) -> PyTree:
        # The last tile begins early rather than end late: rows that are
        # computed twice get the same values.
        take = lambda x: lax.dynamic_slice_in_dim(x, n * tile, tile, 1)
        return jax.tree.map(take, x)

      def step(n: jax.Array, outputs: PyTree) -> PyTree:
        return jax.tree.map(
          lambda all_, new: lax.dynamic_update_slice_in_dim(
            all_, new, n * tile, 1
          ),
          outputs,
          f(weights, at(n)),
        )

      empty = jax.tree.map(
        lambda y: collectives.zeros(
          (y.shape[0], local_length, *y.shape[2:]), y.dtype, x
        ),
        jax.eval_shape(f, weights, at(jnp.int32(0))),
      )
      num_tiles = jnp.asarray(tiles)[collectives.axis_index(axis)]
      return lax.fori_loop(jnp.int32(0), num_tiles, step, empty)

    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P(), P(None, axis)),
      out_specs=P(None, axis),
      axis_names={axis},
    )(weights, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedAttention(ShardingContext):
  """Keys stay in the cache and queries travel: chunked prefill and decode.

  Attributes:
    local: Attention algorithm on a shard.
    replicated: Whether the call's tokens are the same on all shards (decode),
      or sharded (a chunk).
  """

  local: Any = AutoKernel()
  replicated: bool = True

  resident = True
  # Whether a call's rows are sharded over `axis`, see `MultiMaster`.
  masters = False
  takes_classes = True
  # Most queries that read the keys in place, without `local`.
  few = ShardedDecode.few

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
  ) -> Any:
    """[B, T, N, J] from queries [B, T, N, H]; see `Extras.residual`."""
    draft_coords = tokens.tree
    views = cache.views(apart=draft_coords is not None)
    if extras.residual and any(map(_reads_otherwise, views)):
      raise OptionError(
        "cache",
        "keys with coordinates or a mask of their own, such as contexts that "
        "were encoded apart, for layers with folded positions",
        "keys of one text",
        "read the contexts as one prompt",
      )
    full_mask = mask
    if tokens.segmented:
      full_mask = mask & self.segments
      views = tuple(self._segmented(view) for view in views)
    if draft_coords is not None:
      # Earlier tokens by the layer's mask; drafted tokens by their tree.
      *earlier, own_view = views
      tree_view: Any = own_view
      views = (*earlier, tree_view.of_tree(draft_coords, mask & Ancestors()))
    return self.visit(q, views, tokens.at, full_mask, extras)

  def across(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    seg: Int[Array, "B S"],
    extras: Extras,
  ) -> Float[Array, "B T N H"]:
    """[B, T, N, H]: queries see all keys of segments other than 0."""
    kv = KV(
      jnp.swapaxes(k, 1, 2),
      jnp.swapaxes(v, 1, 2),
      Coords(jnp.zeros_like(seg), seg),
    )
    zeros = jnp.zeros((1, q.shape[1]), jnp.int32)
    at = Coords(zeros, zeros + 1)
    return self.visit(q, (kv.view(self.size),), at, Everything(), extras)

  def visit(
    self,
    q: Float[Array, "B T N H"],
    views: tuple[Any, ...],
    at: Coords,
    mask: Mask,
    extras: Extras,
  ) -> Any:
    """[B, T, N, J]: queries see keys of views, merged as partial results.

    Args:
      q: Queries.
      views: Views of a cache's layer, sharded as in this context.
      at: Coordinates of the queries, [B or 1, T].
      mask: Mask of views that have none themselves.
      extras: Further terms of the layer's attention.
    """
    # Other views may have their heads folded into the batch.
    heads = views[-1].shape[1]
    selection = extras.selection
    if selection is not None:
      q = selection.queries(q, heads)
    b, t, n, h = q.shape
    grouped = lambda a: None if a is None else a.reshape(heads, -1)
    shares = self.shares(b, n, heads)
    query_axes = () if shares else self._query_axes(t, views)
    run = ShardedDecode(
      mesh=self.mesh,
      axis=self.of_mesh,
      batch_axes=self.batch_axes(b),
      head_axes=shares.get("head_axis", ()),
      query_axes=query_axes,
      sharded=self.sharded,
      masters=self.masters,
      residual=extras.residual,
      few=self.few,
      local=self.local,
    )
    out = run(
      Scores(scale=extras.scale, soft_cap=extras.soft_cap),
      jnp.transpose(q.reshape(b, t, heads, -1, h), (0, 2, 3, 1, 4)),
      views,
      Terms(slopes=grouped(extras.slopes), sinks=grouped(extras.sinks)),
      at,
      mask,
      selection,
    )
    lse = None
    if extras.residual:
      out, lse = out
      lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(b, t, n)
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
    if query_axes and n % self.model_size == 0:
      # As the output projection's heads are sharded: the compiler would gather
      # its weights for queries that stay sharded. One exchange, from queries to
      # heads, and not through the heads of keys.
      batch, over_tokens = (*self.spec(out), None, None)[:2]
      by_query = (*collectives.names(over_tokens), *query_axes)
      out = self.constrained(out, P(batch, by_query))
      out = self.constrained(out, P(batch, over_tokens, query_axes))
    if selection is not None:
      out = selection.output(out, heads)
    return out if lse is None else (out, lse)

  def _query_axes(
    self, tokens: int, views: tuple[KVView, ...]
  ) -> tuple[str, ...]:
    """Axes that shard many queries, for heads that are not sharded.

    A few queries are computed on each device: it reads all heads' keys anyway.
    """
    size = self.model_size
    divides = size > 1 and tokens % (size * self.size) == 0
    if not divides or tokens <= ShardedDecode.few:
      return ()
    return () if any(view.queries is not None for view in views) else (_HEADS,)

  def _segmented(self, view: KVView) -> Any:
    """Add the segment rule to a view's own mask, if it has one."""
    if view.mask is None:
      return view
    updated: Any = view
    return dataclasses.replace(updated, mask=view.mask & self.segments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiMaster(CachedAttention):
  """Decode with rows distributed over the shards, their masters.

  A master computes its rows' projections and feedforward; their queries go to
  all shards, and all partial results return to it. One token per row, and a
  number of rows that is a multiple of the shards; the cache has `MasterSlots`.
  """

  masters = True

  def spec(self, x: Shaped[Array | jax.ShapeDtypeStruct, " ..."]) -> P:
    return P(self.of_mesh)


def _reads_otherwise(view: KVView) -> bool:
  """Whether a view's keys are not seen by the call's coordinates and mask."""
  differs = view.mask is not None or view.queries is not None
  return differs or isinstance(view, ApartView)


# Attention of a model; at run time also a wrapper of one of these, for
# instance one that records a layer's queries.
if TYPE_CHECKING:
  Attend = ContextParallel | ChainParallel | CachedAttention
else:
  Attend = Callable

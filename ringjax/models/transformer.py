"""The decoder that all families share: embedding, layers, norm, head.

A family is a `TransformerConfig` and a map of names; nothing here asks which
family it is, nor whether it trains, reads a prompt or decodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ringjax.checks import as_array, float_dtype
from ringjax.errors import (
  DtypeError,
  InputTypeError,
  MeshError,
  OptionError,
  PromptError,
  ShapeError,
)
from ringjax.kv.base import Cache, CallCache, NoCache
from ringjax.kv.cache import KVCache, LayerCacheSpec
from ringjax.kv.cache_files import CacheFiles, TransferEvent
from ringjax.kv.cache_kind import CacheKind, cache_kind
from ringjax.kv.evicting import EvictingCache
from ringjax.kv.layer_offload import OffloadedCache
from ringjax.kv.row_groups import RowGroups
from ringjax.kv.state import StateShape
from ringjax.kv.tiered import TieredCache
from ringjax.models.calibration import load_measured, model_digest
from ringjax.models.origin import Origin
from ringjax.models.summary import describe
from ringjax.models.weight_placement import (
  PlacementReport,
  WeightPlacement,
  cache_tiers,
  placement_report,
  set_waiting,
  transfer_events,
)
from ringjax.nn.block import Layer
from ringjax.nn.layer_inputs import LayerInputs
from ringjax.nn.linear import (
  Embedding,
  Head,
  LearnedPositions,
  Norm,
  part_dtype,
)
from ringjax.nn.placed import naming_faults
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from ringjax.nn.stack import Stack, keeps
from ringjax.nn.streams import Streams
from ringjax.nn.tokens import Tokens
from ringjax.ops.ancestors import MOST_DRAFTED, ancestor_matrix, tree_coords
from ringjax.ops.mask import Coords, Mask, SameSegment
from ringjax.ops.rope import Dynamic, Linear, Rope, Yarn
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous
from ringjax.parallel.mesh import check_current, on_automatic
from ringjax.parallel.place import (
  AUTO,
  SEQ,
  refuse_shards,
  sequence_axis,
  sharding_of,
)
from ringjax.parallel.programs import bounded, make_room
from ringjax.typing import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """What a model computes.

  Attributes:
    family: name of the family, as in `rj.models.list()`.
    vocab: V.
    embed: D.
    layers: each layer's parts.
    norm: the last norm.
    tied: the head is the embedding.
    head_bias: whether a head of its own has a bias.
    embed_scale: what embeddings are multiplied by.
    embed_norm: norm of the embeddings behind that, or None.
    positions: learned vectors that are added to embeddings, or None.
    inputs: a second embedding that all layers read, or None.
    streams: residual streams that layers share, or None for one.
    logit_scale: what logits are multiplied by.
    logit_cap: soft cap of the logits.
    max_positions: the context that the model was made for, in tokens.
    bound: the key of its config that says so; None: the number is a guess.
    scaling_counted: whether `max_positions` already counts linear RoPE scaling.
  """

  family: str
  vocab: int
  embed: int
  layers: tuple[Layer, ...]
  norm: Norm
  tied: bool = False
  head_bias: bool = False
  embed_scale: float = 1.0
  embed_norm: Norm | None = None
  positions: LearnedPositions | None = None
  inputs: LayerInputs | None = None
  streams: Streams | None = None
  logit_scale: float = 1.0
  logit_cap: float | None = None
  max_positions: int = 2048
  bound: str | None = None
  scaling_counted: bool = False

  @functools.cached_property
  def ropes(self) -> tuple[Rope, ...]:
    """The different rotations of its layers."""
    found: dict[Rope, None] = {}
    for layer in self.layers:
      found.update(dict.fromkeys(layer.attention.ropes))
    return tuple(found)

  @functools.cached_property
  def longest(self) -> int | None:
    """The longest context that the model supports, in tokens; None: unknown.

    A config with linear or YaRN scaling may state the context before scaling;
    it is then multiplied by the factor, unless `scaling_counted`.
    """
    if self.positions is not None:
      return self.positions.count
    scalings = [rope.scaling for rope in self.ropes]
    if self.bound is None or any(isinstance(s, Dynamic) for s in scalings):
      return None
    found = self.max_positions
    for scaling in scalings:
      if isinstance(scaling, Yarn):
        found = max(found, int(scaling.original * scaling.factor))
      elif isinstance(scaling, Linear) and not self.scaling_counted:
        stated = scaling.original or self.max_positions
        found = max(found, int(stated * scaling.factor))
    return found


class Transformer(nnx.Module):
  """A decoder-only language model.

  Attributes:
    config: what it computes.
    source: the config.json that said so, as text.
    origin: the folder that it was loaded from, and what `save` keeps of that.
    saved_dtype: the dtype that `save` writes; None: the one it has.
    stored_types: Types of its file that stay codes, and those that became
      floats; None: all are floats.
  """

  def __init__(
    self, config: TransformerConfig, rngs: nnx.Rngs, *, scan: bool = True
  ):
    self.config = config
    self.source = "{}"
    self.origin = Origin()
    self.saved_dtype: str | None = None
    self.stored_types: str | None = None
    self.embed = Embedding(
      rngs,
      config.vocab,
      config.embed,
      scale=config.embed_scale,
      norm=config.embed_norm,
      positions=config.positions,
    )
    self.inputs = (
      None if config.inputs is None else config.inputs.build(rngs, config.embed)
    )
    self.streams = (
      None
      if config.streams is None
      else config.streams.build(rngs, config.embed)
    )
    self.stack = Stack(rngs, config.layers, config.embed, scan=scan)
    self.norm = config.norm.build(rngs, config.embed)
    self.head = (
      None
      if config.tied
      else Head(rngs, config.embed, config.vocab, bias=config.head_bias)
    )

  def __repr__(self) -> str:
    """The model in a few lines; `flax.nnx.display(model)` shows every array."""
    return describe(self)

  __str__ = __repr__

  def __call__(
    self,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    positions: Int[Array | np.ndarray, " ..."] | None = None,
    segment_ids: Int[Array | np.ndarray, " ..."] | None = None,
    cache: Cache | None = None,
    attend: ShardingContext | None = None,
    rows: Int[Array | np.ndarray, "B n"] | None = None,
    length: Lengths | None = None,
    parents: Int[Array | np.ndarray, " ..."] | None = None,
  ) -> Any:
    """Logits of the tokens that follow.

    Args:
      tokens: int32 [B, T], in the order of `attend`'s layout.
      positions: int32 [B, T] or [T]; default: those of the layout, counted
        from 0, or behind what each example has in the cache
        (`cache.length`).
      segment_ids: int32 [B, T] or [T], the document of each token, counted
        from 1; 0 is padding. Default: one document. Which of them see each
        other is `attend.segments`.
      cache: what earlier calls left, or None. A row's tokens up to its last
        real one take a slot each; padding behind it takes none. Inside of a
        caller's own jit, what the cache holds is not known when the call is
        checked: there tokens beyond the last slot are not stored, so count
        them outside.
      attend: how the tokens are sharded and find their keys:
        `ContextParallel`, the default, or with a cache `CachedAttention`.
        One without a mesh takes that of the cache, else the current one
        (`jax.set_mesh`), else the weights', along "seq" if there is such an
        axis, in a caller's own jit too. In a shard_map pass
        `ContextParallel(axis="seq")`, without a mesh, for tokens that are
        sharded over that manual axis, or `ContextParallel(axis=None)` to attend
        on each device alone. `ContextParallel` sees the call's own keys only:
        it fills an empty cache, and under a jit a filled one is not noticed.
      rows: int32 [B, n], which of the T rows to compute logits for, 0 to
        T - 1; default all.
      length: tokens of the whole context, or of each row's prompt, int32 [B],
        for rotations that depend on it; default: the largest position of a
        row and one. See `ops.rope`.
      parents: int32 [B, T] or [T], for drafted tokens that form a tree: which
        earlier token of the call each follows, -1 for those that follow the
        text in the cache. A token sees that text, its ancestors and itself;
        default positions count along its path. `cache.keep` then keeps the
        accepted path. Needs a cache and a replicated `CachedAttention`.

    Returns:
      float32 [B, T, V], or [B, n, V]; with a cache that and the new cache.

    Raises:
      PromptError: ids that the vocabulary does not have, or more tokens than
        the cache has room for.
      CheckpointFormatError: layers on disk whose file has changed, or that
        cannot be read.
      CheckpointMismatchError: such with numbers that are not finite.
      ShapeError: shapes that do not fit, the cache's batch for one.
      MeshError: the current mesh has explicit axes, or is in the middle of a
        shard_map where the call can't be.
      RingjaxError: in Python, before anything is compiled.
    """
    check_current()
    if not isinstance(tokens, jax.core.Tracer):
      make_room()
    tokens = _ids(tokens, self.config.vocab)
    shape = tokens.shape
    pos = _per_token("positions", positions, shape)
    seg = _per_token("segment_ids", segment_ids, shape)
    if rows is not None:
      rows = _rows(rows, shape)
    if cache is not None:
      _check_cache(cache)
    kept = None if isinstance(cache, NoCache) else cache
    attend = self._placed(attend, tokens, kept)
    if cache is not None:
      cache.check(
        *shape,
        replicated=_replicated(attend),
        sees=isinstance(attend, CachedAttention),
      )
      if seg is not None and attend.segments != SameSegment():
        _check_keeps_all(attend.segments, cache)
    if self.config.positions is not None:
      _check_table(self.config, shape, pos, seg, cache, attend)
    if getattr(cache, "marks", None) is not None:
      _check_positions(cache, pos, seg, parents)
    if parents is not None:
      parents = self._tree(parents, shape, attend, cache)
    call = (self, attend, tokens, pos, seg, cache, rows, length, parents)
    if not self.stack.faults or isinstance(tokens, jax.core.Tracer):
      return _call(*call)
    # A read that fails is an error of this call and of no later one.
    with naming_faults(self.stack.faults):
      return jax.block_until_ready(_call(*call))

  def _tree(
    self,
    parents: Any,
    shape: Sequence[int],
    attend: ShardingContext,
    cache: Cache | None,
  ) -> jax.Array:
    """The parents of drafted tokens, checked, int32 [B or 1, T]."""
    parents = _per_token("parents", parents, shape)
    if isinstance(cache, RowGroups):
      raise OptionError(
        "parents",
        "a tree of drafted tokens, for rows in groups",
        "rows in one group",
        "leave rows_at_once out",
      )
    if cache is None or not _replicated(attend):
      raise OptionError(
        "parents",
        "a tree of drafted tokens without a cache, or sharded",
        "a cache, and tokens that are the same on all shards",
        "pass cache=, and leave attend= out",
      )
    if any(isinstance(kind, StateShape) for kind in self.kinds):
      raise OptionError(
        "parents",
        f"a tree for a {self.config.family} with recurrent layers",
        "layers of attention alone, for a state follows one path",
        "draft one path, with cache.snapshot and cache.restore",
      )
    if shape[1] > MOST_DRAFTED:
      raise ShapeError(
        "parents",
        f"{shape[1]} tokens",
        f"at most {MOST_DRAFTED}",
        "draft fewer tokens",
      )
    if not isinstance(parents, jax.core.Tracer):
      host = np.asarray(parents)
      if bool(((host < -1) | (host >= np.arange(shape[1]))).any()):
        raise OptionError(
          "parents",
          "a number below -1, or not before its token",
          "for token n a number from -1 to n - 1",
          "order the tokens so that parents come first",
        )
    return parents

  def _placed(
    self,
    attend: ShardingContext | None,
    tokens: jax.Array,
    cache: CallCache | None,
  ) -> ShardingContext:
    """How the tokens of a call lie, with the mesh that it may not name."""
    if attend is None:
      attend = ContextParallel() if cache is None else CachedAttention()
    if not isinstance(attend, ShardingContext):
      raise InputTypeError(
        "attend",
        repr(attend),
        "an rj.models.ContextParallel or CachedAttention",
        'pass ContextParallel(mesh=mesh, axis="seq"), or leave it out',
      )
    if collectives.manual_axes():
      _check_manual(attend, tokens, cache)
      return attend
    around = jax.sharding.get_abstract_mesh()
    if attend.mesh is None and cache is not None:
      attend = dataclasses.replace(attend, mesh=cache.mesh, axis=cache.axis)
    elif attend.mesh is None:
      # The type of traced weights names the mesh of the jit's arguments.
      weight = self.embed.weight.get_value()
      mesh: Any = around
      if around.empty:
        mesh = self.mesh or sharding_of(weight)[0]
      axis = attend.axis
      if axis == AUTO:
        axis = None if mesh is None else sequence_axis(mesh)
      if axis is not None and mesh is not None and mesh.shape.get(axis) == 1:
        axis = None
      attend = dataclasses.replace(attend, mesh=mesh, axis=axis)
    if attend.mesh is not None and not around.empty:
      mine, theirs = dict(attend.mesh.shape), dict(around.shape)
      if mine != theirs:
        raise MeshError(
          "attend" if cache is None else "cache",
          f"one of a mesh {mine} where the current one is {theirs}",
          "the same mesh",
          "enter the call's with jax.set_mesh, or leave the other",
        )
    return attend

  @property
  def mesh(self) -> Mesh | None:
    """The mesh that the weights lie on; None in a trace and on one device."""
    weight = self.embed.weight.get_value()
    known = isinstance(weight, jax.Array | jax.ShapeDtypeStruct)
    if not known or isinstance(weight, jax.core.Tracer):
      return None
    lies = weight.sharding
    if isinstance(lies, NamedSharding) and isinstance(lies.mesh, Mesh):
      return lies.mesh
    return None

  @property
  def kinds(self) -> tuple[LayerCacheSpec | StateShape, ...]:
    """What each kind of layer keeps, in the order of a cache."""
    found: list[Any] = []
    for run in self.stack.runs:
      for position, layer in enumerate(run.layers):
        for mixer in layer.mixers:
          numbers = tuple(run.number(position, n) for n in range(run.repeats))
          shape = mixer.cache_shape(run.repeats)
          found.append(dataclasses.replace(shape, which=numbers))
    return tuple(found)

  @property
  def digest(self) -> str:
    """A digest of the model that does not depend on its weights' dtype."""
    return model_digest(self)

  def placement_report(self) -> PlacementReport:
    """In which memory the layers are, and what fetching them came to."""
    return placement_report(self)

  def transfers(self) -> tuple[TransferEvent, ...]:
    """Reads of layers from disk, and waits of calls for them, by their start.

    `rj.plan.offload_measured.streamed_costs` makes costs of a layer of them.
    """
    return transfer_events(self)

  def on_wait(self, say: Callable[[str], Any] | None) -> None:
    """Calls `say` with a text each second that a call waits for the disk."""
    set_waiting(self, say)

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the parameters and of the computation."""
    return self.embed.weight.get_value().dtype

  def init_cache(
    self,
    batch: int,
    capacity: int,
    *,
    sharding: ShardingContext | None = None,
    dtype: DTypeLike | None = None,
    kind: CacheKind | str = "dense",
    placement: WeightPlacement | str | None = None,
    disk: CacheFiles | None = None,
  ) -> Any:
    """An empty cache for `capacity` tokens of each example.

    Args:
      batch: B.
      capacity: in tokens, a multiple of the shards.
      sharding: the mesh and the axis that it is sharded over.
      dtype: bfloat16, float16, float32 or float64; default: the model's.
      kind: how keys and values are stored, an `rj.kv.CacheKind` or its name,
        one of `rj.kv.KINDS`.
      placement: where the keys of a layer are that does not run: "device",
        "host", "disk", or fractions of the layers, see `rj.models.Placement`;
        default: on the devices, and read where they are.
      disk: files for layers on disk; keep them as long as the cache.

    Raises:
      OptionError: another dtype or kind, or a capacity that does not divide.
    """
    return self._cache(
      "create", batch, capacity, sharding, dtype, kind, placement, disk
    )

  def init_cache_spec(
    self,
    batch: int,
    capacity: int,
    *,
    sharding: ShardingContext | None = None,
    dtype: DTypeLike | None = None,
    kind: CacheKind | str = "dense",
    placement: WeightPlacement | str | None = None,
  ) -> Any:
    """The cache of `init_cache` with shapes, dtypes and shardings alone.

    Nothing is allocated. The arguments are those of `init_cache`.
    """
    return self._cache(
      "spec", batch, capacity, sharding, dtype, kind, placement
    )

  def cache_kind(self, kind: CacheKind | str) -> CacheKind:
    """A kind of cache by its name or as it is, calibrated for this model.

    Raises:
      OptionError: no such kind, or the calibration of another model.
      CheckpointFormatError: no calibration where the kind says, or a bad one.
    """
    return cache_kind(kind).for_model(lambda at: load_measured(at, self))

  def _cache(
    self,
    make: str,
    batch: int,
    capacity: int,
    sharding: ShardingContext | None,
    dtype: DTypeLike | None,
    kind: CacheKind | str,
    placement: WeightPlacement | str | None,
    disk: CacheFiles | None = None,
  ) -> Any:
    sharding = ShardingContext() if sharding is None else sharding
    mesh = sharding.mesh
    heads = "model" if mesh is not None and "model" in mesh.axis_names else None
    found = self.cache_kind(kind)
    moves = found.policy is not None and found.policy.moves
    if moves and self.config.positions is not None:
      raise OptionError(
        "kind",
        f"{found} for a {self.config.family}, which has learned positions",
        "a model whose attention sees distances",
        "leave positions='cache' out",
      )
    of_kind: Any = EvictingCache if found.evicting else KVCache
    if found.device is not None:
      of_kind = TieredCache
    more: dict[str, Any] = {"filled": True} if of_kind is KVCache else {}
    if placement is not None:
      if not all(map(keeps, self.config.layers)):
        raise OptionError(
          "placement",
          f"a {self.config.family}, whose layers read each other's keys",
          "keys that one layer reads alone",
          "leave it out",
        )
      of_kind = OffloadedCache
      more = {"tiers": cache_tiers(self, placement)}
      if make == "create":
        more["files"] = disk
    return getattr(of_kind, make)(
      self.kinds,
      batch,
      capacity,
      self.dtype if dtype is None else float_dtype("dtype", dtype),
      kind=found,
      mesh=mesh,
      axis=sharding.of_mesh,
      head_axis=heads,
      batch_axes=sharding.batch_axes(batch),
      **more,
    )

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    places: Tokens,
    cache: CallCache,
    attend: ShardingContext,
  ) -> tuple[jax.Array, Any]:
    """What the head reads, [B, T, D], and the cache."""
    x, cache = self.through_layers(tokens, places, cache, attend)
    return self.behind(x), cache

  def through_layers(
    self,
    tokens: Int[Array, "B T"],
    places: Tokens,
    cache: CallCache,
    attend: ShardingContext,
    x: Float[Array, "B T *D"] | None = None,
  ) -> tuple[jax.Array, Any]:
    """What the last layer made, and the cache.

    Args:
      tokens: of the call.
      places: of them.
      cache: of the call.
      attend: how they find their keys.
      x: what the layers before made, for a part of a model; None for its first
        one, or a whole one.
    """
    found: Any = attend
    # What all layers read comes with the embeddings.
    first = self.embedded(tokens, places)
    x = attend.constrain(first if x is None else x)
    return self.stack(x, places, cache, found)

  def embedded(
    self, tokens: Int[Array, "B T"], places: Tokens
  ) -> Float[Array, "B T *D"]:
    """What the first layer reads; and what all read goes to `places`."""
    x = self.embed(tokens, places.pos)
    if self.inputs is not None:
      places.inputs = functools.partial(self.inputs, tokens, x)
    return x if self.streams is None else self.streams.spread(x)

  def behind(self, x: Float[Array, "*batch D"]) -> Float[Array, "*rows D"]:
    """What the head reads, of what the last layer made."""
    h = self.norm(x if self.streams is None else self.streams.merged(x))
    return h.astype(part_dtype(self.embed, h.dtype))

  def logits(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """float32 [..., V] from [..., D]."""
    head = self.embed if self.head is None else self.head
    return logits_of(self.config, head, h)


def logits_of(
  config: TransformerConfig, head: Embedding | Head, h: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
  """float32 [..., V] from [..., D], by a `Head` or a tied `Embedding`."""
  y = head.logits(h)
  if config.logit_scale != 1.0:
    y = y * jnp.float32(config.logit_scale)
  if config.logit_cap is not None:
    cap = jnp.float32(config.logit_cap)
    y = jnp.tanh(y / cap) * cap
  return y


@bounded
@functools.partial(jax.jit, static_argnums=(1,))
def _call(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: jax.Array | None,
  seg: jax.Array | None,
  cache: Any,
  rows: jax.Array | None,
  length: Lengths | None,
  parents: jax.Array | None,
) -> Any:
  return forward(model, attend, tokens, pos, seg, cache, rows, length, parents)


def forward(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "#B T"] | None,
  seg: Int[Array, "#B T"] | None,
  cache: CallCache | None,
  rows: Int[Array, "B n"] | None,
  length: Lengths | None,
  parents: Int[Array, "#B T"] | None = None,
  x: Float[Array, "B T *D"] | None = None,
) -> Any:
  """`Transformer.__call__` without its checks, inside of a jit.

  `x` is what the layers before made, for a model of the last ones, see
  `models.layer_parts`.
  """
  keep = cache if cache is not None else NoCache(len(model.kinds))
  if pos is None and cache is not None and isinstance(attend, CachedAttention):
    steps = _derived(attend, tokens.shape[1])
    if parents is not None:
      steps = jnp.sum(ancestor_matrix(parents), 2, dtype=jnp.int32) - 1
    pos = cache.length[:, None] + steps
  places = tokens_of(model, attend, tokens.shape, pos, seg, length, parents)
  if isinstance(keep, RowGroups):
    return _in_groups(model, attend, tokens, places, keep, rows)
  keep = _begun(keep, attend, tokens, places)
  if x is None:
    h, keep = model.hidden(tokens, places, keep, attend)
  else:
    x, keep = model.through_layers(tokens, places, keep, attend, x)
    h = model.behind(x)
  if rows is not None:
    h = jnp.take_along_axis(h, rows[..., None], 1)
  logits = model.logits(h)
  return logits if cache is None else (logits, keep)


def forward_layers(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "B T"],
  seg: Int[Array, "B T"],
  cache: CallCache,
  length: Lengths | None,
  x: Float[Array, "B T *D"] | None,
) -> tuple[jax.Array, Any]:
  """What the layers of a part of a model make, see `models.layer_parts`.

  Args:
    model: the part.
    attend: see `Transformer.__call__`, and below.
    tokens: of the call.
    pos: of the tokens.
    seg: of the tokens.
    cache: of the whole model.
    length: of the whole context.
    x: what the part before made; None for the first one.

  Returns:
    x for the next part, and the cache.
  """
  places = tokens_of(model, attend, tokens.shape, pos, seg, length)
  keep = _begun(cache, attend, tokens, places)
  return model.through_layers(tokens, places, keep, attend, x)


def _begun(
  cache: CallCache,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  places: Tokens,
) -> CallCache:
  """A cache with slots for the tokens of a call."""
  return cache.allocate(
    places.at,
    replicated=_replicated(attend),
    sees=isinstance(attend, CachedAttention),
  ).mark(tokens, places.at)


def _in_groups(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  places: Tokens,
  cache: RowGroups,
  rows: Int[Array, "B n"] | None,
) -> tuple[jax.Array, RowGroups]:
  """A call whose rows run in groups, layer by layer."""
  calls, found = [], []
  # A length is of each row, or the same for all.
  length = jnp.broadcast_to(jnp.asarray(places.length), (tokens.shape[0],))
  coords = zip(
    *map(cache.split, (tokens, places.pos, places.seg, length)),
    cache.caches,
    strict=True,
  )
  for ids, pos, seg, its_length, one in coords:
    its = Tokens(
      pos,
      seg,
      derived=places.derived,
      segmented=places.segmented,
      ropes=model.config.ropes,
      length=its_length,
    )
    kept = _begun(one, attend, ids, its)
    calls.append((attend.constrain(model.embedded(ids, its)), its, kept))
  within: Any = attend
  done = model.stack.together(calls, within, cache.hosted)
  for (h, _), own in zip(done, cache.split(rows), strict=True):
    h = model.behind(h)
    if own is not None:
      h = jnp.take_along_axis(h, own[..., None], 1)
    found.append(model.logits(h))
  caches = tuple(kept for _, kept in done)
  return jnp.concatenate(found), dataclasses.replace(cache, caches=caches)


def tokens_of(
  model: Transformer,
  attend: ShardingContext,
  shape: Sequence[int],
  pos: Int[Array, "#B T"] | None,
  seg: Int[Array, "#B T"] | None,
  length: Lengths | None,
  parents: Int[Array, "#B T"] | None = None,
) -> Tokens:
  """The coordinates and rotations of a call's tokens, [B, T] by `shape`.

  Positions that are not given are those of the layout; without segments the
  tokens are one document.
  """
  derived = pos is None
  if pos is None:
    pos = _derived(attend, shape[1])
  segmented = seg is not None
  if seg is None:
    seg = jnp.ones((1, shape[1]), jnp.int32)
  if length is None:
    length = jnp.max(jnp.where(seg > 0, pos, 0), 1) + 1
    if attend.around is not None:
      length = jax.lax.pmax(length, attend.around)
  return Tokens(
    pos,
    seg,
    derived=derived,
    segmented=segmented,
    ropes=model.config.ropes,
    length=length,
    tree=None if parents is None else _tree_coords(parents, pos, seg, shape),
  )


def _tree_coords(
  parents: jax.Array, pos: jax.Array, seg: jax.Array, shape: Sequence[int]
) -> Coords:
  wide = lambda x: jnp.broadcast_to(x, tuple(shape))
  return tree_coords(wide(parents), Coords(wide(pos), wide(seg)))


def _derived(attend: ShardingContext, tokens: int) -> jax.Array:
  """The layout's positions, int32 [1, T], counted from 0."""
  if (axis := attend.around) is not None:
    shard, shards = collectives.axis_index(axis), collectives.axis_size(axis)
    return attend.layout.positions(shard, shards, tokens)[None]
  return attend.layout.all_positions(tokens, attend.size)[None]


def _replicated(attend: ShardingContext) -> bool:
  """Whether a call's tokens go around the shards of the cache."""
  return isinstance(attend, CachedAttention) and attend.replicated


def _check_manual(
  attend: ShardingContext, tokens: jax.Array, cache: CallCache | None
) -> None:
  """Refuses a call in a shard_map that would not see what it is to see."""
  manual = collectives.manual_axes()
  spelling = f"attend=rj.models.{type(attend).__name__}(axis={{}})"
  if attend.mesh is None and attend.axis == AUTO:
    refuse_shards("tokens", tokens, spelling, SEQ)
  axis = attend.axis if attend.axis in manual else None
  if attend.mesh is None and axis is None:
    names = jax.sharding.get_abstract_mesh().axis_names
    if attend.axis not in (None, AUTO, *names):
      raise MeshError(
        "axis",
        repr(attend.axis),
        f"one of the mesh axes {names}",
        "rename the axis, or pass None for none",
      )
    if attend.layout != Contiguous():
      raise MeshError(
        "attend",
        f"{attend.layout} in a shard_map over {sorted(manual)}",
        "a manual axis over which the tokens lie in that order",
        f"pass axis= too, one of {sorted(manual)}, or call from outside of "
        "it, with mesh= and axis=",
      )
    return
  over = axis or (SEQ if SEQ in manual else None)
  if over is None:
    return
  if cache is not None or attend.mesh is not None:
    raise MeshError(
      "cache" if cache is not None else "attend",
      f"one of a whole mesh in a shard_map over {over!r}",
      "the tokens of a shard alone",
      "leave it out, or call from outside of the shard_map",
    )
  # Without check_vma nothing is known to vary.
  known = over in collectives.varying_axes(collectives.axis_index(over))
  if known and over not in collectives.varying_axes(tokens):
    raise MeshError(
      "tokens",
      f"the same on all shards of {over!r}, in a shard_map over it",
      "the tokens of each shard",
      f"shard them, in_specs=P(None, {over!r}), or pass "
      f"{spelling.format(None)}",
    )


def _check_cache(cache: Cache) -> None:
  if not hasattr(type(cache), "allocate"):
    raise InputTypeError(
      "cache",
      type(cache).__name__,
      "a cache of keys and values",
      "make one with model.init_cache(batch, capacity), or pass session.cache",
    )


def _check_keeps_all(segments: Mask, cache: Cache) -> None:
  """Refuses a cache that drops tokens by the order of their documents."""
  kind = getattr(cache, "kind", None)
  looks_back = [getattr(x, "reach", None) for x in getattr(cache, "shapes", ())]
  ring = kind is not None and kind.windowed and any(looks_back)
  if ring or (kind is not None and kind.evicting):
    raise OptionError(
      "cache",
      f"kind {kind} with segments={segments}",
      "a cache that keeps all tokens: what others drop depends on which "
      "documents see each other",
      'pass model.init_cache(..., kind="dense")',
    )


def _check_positions(cache: Any, pos: Any, seg: Any, parents: Any) -> None:
  """Refuses tokens that share a position, for a cache that marks positions.

  So far as what is given is not traced.
  """
  known = lambda x: x is not None and not isinstance(x, jax.core.Tracer)
  got = None
  if parents is not None:
    got = "a tree of drafted tokens"
  elif known(seg) and int(jnp.max(seg)) > 1:
    got = f"document {int(jnp.max(seg))} of a row"
  elif known(pos) and int(jnp.max(pos)) >= cache.limit:
    got = f"position {int(jnp.max(pos))} of {cache.limit}"
  if got is not None:
    raise OptionError(
      "cache",
      f"{got}, with a policy that looks at ids: {cache.kind.policy}",
      "one token at each position of the cache",
      "read one document a row, from position 0 on, or use a policy without "
      "punctuation=",
    )


def _check_table(
  config: TransformerConfig,
  shape: Sequence[int],
  pos: Any,
  seg: Any,
  cache: Any,
  attend: ShardingContext,
) -> None:
  """Refuses tokens at positions that a learned table does not have.

  So far as what is given is not traced.
  """
  assert config.positions is not None
  if pos is None:
    start = 0 if cache is None else cache.length
    if isinstance(start, jax.core.Tracer):
      start = 0
    order = np.arange(shape[1])
    if isinstance(attend, ContextParallel) and attend.around is None:
      with jax.ensure_compile_time_eval():
        order = np.asarray(attend.layout.all_positions(shape[1], attend.size))
    pos = np.reshape(np.asarray(start), (-1, 1)) + order
  if isinstance(pos, jax.core.Tracer) or isinstance(seg, jax.core.Tracer):
    return
  host = np.asarray(pos)
  if seg is not None:
    host = np.where(np.asarray(seg) > 0, host, 0)
  found, most = int(host.max()), config.positions.count
  if found >= most:
    raise PromptError(
      "tokens",
      f"a token at position {found:,}",
      f"positions from 0 to {most - 1:,}, as {config.bound} says: the model "
      "has learned no others",
      "read fewer tokens, or use a model of a longer context",
    )


def _ids(tokens: Any, vocab: int) -> jax.Array:
  tokens = on_automatic("tokens", as_array("tokens", tokens))
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise DtypeError(
      "tokens", tokens.dtype, "int32", "pass token ids, not embeddings"
    )
  if tokens.ndim != 2 or tokens.shape[1] == 0:
    raise ShapeError(
      "tokens",
      f"shape {tokens.shape}",
      "[B, T] with at least one token",
      "give a single prompt a batch axis: tokens[None]",
    )
  if not isinstance(tokens, jax.core.Tracer) and tokens.is_fully_addressable:
    host = np.asarray(tokens)
    bad = np.argwhere((host < 0) | (host >= vocab))
    if bad.size:
      b, t = (int(i) for i in bad[0])
      raise PromptError(
        "tokens",
        f"id {int(host[b, t])} at [{b}, {t}]",
        f"ids from 0 to {vocab - 1}",
        "use the tokenizer that belongs to the model",
      )
  return tokens.astype(jnp.int32)


def _rows(rows: Any, shape: Sequence[int]) -> jax.Array:
  rows = on_automatic("rows", as_array("rows", rows))
  if not jnp.issubdtype(rows.dtype, jnp.integer):
    raise DtypeError(
      "rows", rows.dtype, "an integer dtype", "cast rows to int32"
    )
  if rows.ndim != 2 or rows.shape[0] != shape[0]:
    raise ShapeError(
      "rows",
      f"shape {rows.shape}",
      f"[{shape[0]}, n], some rows of each example",
      "give each example its own: rows[:, None], or rows[None]",
    )
  if not isinstance(rows, jax.core.Tracer) and rows.is_fully_addressable:
    host = np.asarray(rows)
    bad = np.argwhere((host < 0) | (host >= shape[1]))
    if bad.size:
      b, n = (int(i) for i in bad[0])
      raise ShapeError(
        "rows",
        f"{int(host[b, n])} at [{b}, {n}]",
        f"0 to {shape[1] - 1}, of {shape[1]} tokens",
        "count from the first token: the last is T - 1",
      )
  return rows.astype(jnp.int32)


def _per_token(name: str, x: Any, shape: Sequence[int]) -> Any:
  if x is None:
    return None
  x = on_automatic(name, as_array(name, x))
  if not jnp.issubdtype(x.dtype, jnp.integer):
    raise DtypeError(name, x.dtype, "an integer dtype", f"cast {name} to int32")
  if x.shape not in (tuple(shape), tuple(shape[1:]), (1, shape[1])):
    raise ShapeError(
      name,
      f"shape {x.shape}",
      f"{tuple(shape)} or {tuple(shape[1:])}, a number for each token",
      "give it the shape of tokens",
    )
  return x.astype(jnp.int32).reshape(-1, shape[1])

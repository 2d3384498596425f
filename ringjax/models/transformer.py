"""The decoder that all families share: embedding, layers, norm, head.

A family is a `TransformerConfig` and a map of names; nothing here asks which
family it is, nor whether it trains, reads a prompt or decodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from ringjax.kv.base import CallCache, CallCoords, NoCache
from ringjax.kv.cache_kind import CacheConfig, cache_kind
from ringjax.kv.cache_specs import cache_spec
from ringjax.kv.codecs import Allocated, PerHead
from ringjax.kv.codecs.calibration import Calibrated
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.offload.cache_files import CacheFiles, TransferEvent
from ringjax.kv.state import StateShape
from ringjax.kv.summaries.summary_spec import SummarySpec
from ringjax.models.origin import Origin
from ringjax.models.summary import describe
from ringjax.models.weights.calibration import load_measured, model_digest
from ringjax.models.weights.weight_placement import (
  PlacementReport,
  WeightPlacement,
  cache_tiers,
  placement_report,
  set_waiting,
  transfer_events,
)
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  refuse_sparse,
)
from ringjax.nn.attention_layers.folded_attention import (
  FoldedAttention,
  refuse_folded,
)
from ringjax.nn.attention_layers.shared_block import SharedBlocks
from ringjax.nn.attention_layers.shared_index import IndexStream
from ringjax.nn.block import Layer
from ringjax.nn.draft_layers.predict_layer import PredictBlock, PredictLayer
from ringjax.nn.joint_calls import JointCache
from ringjax.nn.layer_inputs import LayerInputs
from ringjax.nn.linear import (
  Embedding,
  Head,
  LearnedPositions,
  Norm,
  part_dtype,
)
from ringjax.nn.param import param
from ringjax.nn.row_tiles import RowTiles, in_row_tiles
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from ringjax.nn.stack import Stack, keeps
from ringjax.nn.streams import (
  GatedMeanStreams,
  HyperStreams,
  MeanStreams,
  Streams,
)
from ringjax.nn.sums.tile_sums import PageRecord, TileRecord
from ringjax.nn.tokens import Tokens
from ringjax.nn.weights.adapter_rows import adapter_rows
from ringjax.nn.weights.placed_layers import naming_faults
from ringjax.ops.ancestors import MOST_DRAFTED, ancestor_matrix, tree_coords
from ringjax.ops.mask import Coords
from ringjax.ops.rope import (
  Dynamic,
  Linear,
  Llama3,
  LongRope,
  Rope,
  Unscaled,
  Yarn,
)
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import (
  AUTO,
  SEQ,
  refuse_shards,
  sequence_axis,
  sharding_of,
)
from ringjax.parallel.layout import Contiguous
from ringjax.parallel.mesh import check_current, on_automatic
from ringjax.parallel.programs import bounded, make_room
from ringjax.typing import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Architecture of a model: its sizes, layers, norms and scales.

  Attributes:
    family: Name of the family, as in `rj.models.list()`.
    vocab: Vocabulary size, V.
    embed: Width of the residual stream, D.
    layers: Parts of each layer.
    norm: Norm of the last layer's output.
    tied: Whether the head is the embedding.
    head_bias: Whether an untied head has a bias.
    embed_scale: Factor of the embeddings.
    embed_norm: Norm of the scaled embeddings, or None.
    positions: Learned vectors that are added to embeddings, or None.
    inputs: Second embedding that all layers read, or blocks whose weights
      layers share, or None.
    streams: Residual streams that layers share, or a stream with what layers
      hand on of an index; None for one stream.
    logit_scale: Factor of the logits.
    logit_cap: Soft cap of the logits, cap * tanh(logits / cap), or None.
    max_positions: Context length that the model was made for, in tokens.
    bound: Key of config.json that states `max_positions`; None: it is a guess.
    scaling_counted: Whether `max_positions` includes linear RoPE scaling.
    rope_scalable: Whether config.json has keys for a scaling of its rotations.
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
  inputs: LayerInputs | SharedBlocks | None = None
  streams: (
    Streams | HyperStreams | MeanStreams | GatedMeanStreams | IndexStream | None
  ) = None
  logit_scale: float = 1.0
  logit_cap: float | None = None
  max_positions: int = 2048
  bound: str | None = None
  scaling_counted: bool = False
  rope_scalable: bool = True

  @functools.cached_property
  def ropes(self) -> tuple[Rope, ...]:
    """The distinct rotations of its layers."""
    ropes: dict[Rope, None] = {}
    for layer in self.layers:
      ropes.update(dict.fromkeys(layer.attention.ropes))
    return tuple(ropes)

  @property
  def learned_rope(self) -> Rope | None:
    """The rotation of its layers that has learned factors, or None."""
    return next((rope for rope in self.ropes if rope.learned), None)

  @property
  def predicts(self) -> PredictLayer | None:
    """The layer after the others that predicts one token further, or None."""
    last = self.layers[-1]
    return last if isinstance(last, PredictLayer) else None

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
    longest = self.max_positions
    for scaling in scalings:
      if isinstance(scaling, Yarn):
        longest = max(longest, int(scaling.original * scaling.factor))
      elif isinstance(scaling, Linear) and not self.scaling_counted:
        stated = scaling.original or self.max_positions
        longest = max(longest, int(stated * scaling.factor))
    return longest

  def longer_context_remedy(self, total: int) -> str:
    """Advice for a text of `total` tokens beyond `longest`, for errors."""
    if self.bound == "dual_chunk_attention_config":
      return (
        "the model's dual chunk attention (--rope_scaling=dual_chunk, or "
        "rj.models.load(..., rope_scaling='dual_chunk'))"
      )
    full = [x for x in self.layers if x.attention.reach is None]
    if self.longest is None or not any(x.attention.ropes for x in full):
      return ""
    if any(isinstance(x.attention, FoldedAttention) for x in full):
      return (
        "a larger factor for the folder without position_folding "
        "(--rope_scaling, or rj.models.load(..., rope_scaling=))"
      )
    scalings = {type(rope.scaling) for rope in self.ropes} - {Unscaled}
    full_ropes = {
      dataclasses.replace(rope, copies=1)
      for layer in full
      for rope in layer.attention.ropes
    }
    if scalings - {Linear, Yarn, Llama3, LongRope} or len(full_ropes) > 1:
      return ""
    if scalings:
      return (
        "a larger factor of the model's own scaling (--rope_scaling, or "
        "rj.models.load(..., rope_scaling=))"
      )
    factor = max(2, -(-total // self.longest))
    kind = "yarn" if self.rope_scalable else "self_extend"
    scaling = f"{kind}:factor={factor}"
    return (
      f"a longer context without training (--rope_scaling={scaling}, or "
      f"rj.models.load(..., rope_scaling='{scaling}'))"
    )


class Transformer(nnx.Module):
  """A decoder-only language model.

  Attributes:
    config: Architecture of the model.
    source: Text of the config.json that `config` was read from.
    origin: Folder that it was loaded from, whose extra files `save` keeps.
    saved_dtype: Dtype that `save` writes; None: that of the parameters.
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
    rope = config.learned_rope
    self.rope_factors = (
      None
      if rope is None
      else param(rngs, (rope.dims // 2,), (None,), value=0.0, wide=True)
    )
    self.stack = Stack(rngs, config.layers, config.embed, scan=scan)
    self.norm = config.norm.build(rngs, config.embed)
    self.head = (
      None
      if config.tied
      else Head(rngs, config.embed, config.vocab, bias=config.head_bias)
    )

  def __repr__(self) -> str:
    """Summary in a few lines; `flax.nnx.display(model)` shows every array."""
    return describe(self)

  __str__ = __repr__

  def __call__(
    self,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    positions: Int[Array | np.ndarray, " ..."] | None = None,
    segment_ids: Int[Array | np.ndarray, " ..."] | None = None,
    cache: CallCache | None = None,
    attend: ShardingContext | None = None,
    rows: Int[Array | np.ndarray, "B n"] | None = None,
    length: Lengths | None = None,
    parents: Int[Array | np.ndarray, " ..."] | None = None,
  ) -> Any:
    """Computes the logits of the next token at each position.

    Args:
      tokens: Token ids, int32 [B, T], in the order of `attend`'s layout.
      positions: Positions, int32 [B, T] or [T]; default: those of the layout,
        counted from 0, or from `cache.length` of each row with a cache.
      segment_ids: Document of each token, int32 [B, T] or [T], counted
        from 1; 0 is padding. Default: one document. `attend.segments` decides
        which documents see each other.
      cache: Keys and values of earlier calls, or None. A row's tokens up to its
        last real one take a slot each; padding after it takes none. Within a
        caller's own jit, the filled length is not known when the call is
        checked; tokens beyond the last slot are not stored then, so count
        them outside.
      attend: Sharding of the tokens, and where their keys are:
        `ContextParallel`, the default, or with a cache `CachedAttention`.
        One without a mesh takes that of the cache, else the current one
        (`jax.set_mesh`), else the weights', along "seq" if there is such an
        axis, in a caller's own jit too. In a shard_map pass
        `ContextParallel(axis="seq")`, without a mesh, for tokens that are
        sharded over that manual axis, or `ContextParallel(axis=None)` to attend
        on each device alone. `ContextParallel` sees the call's own keys only:
        it fills an empty cache, and under a jit a filled one is not noticed.
      rows: Indices of the tokens to compute logits for, int32 [B, n], 0 to
        T - 1; default all.
      length: Tokens of the whole context, or of each row's prompt, int32 [B],
        for rotations that depend on it; default: the largest position of a
        row plus one. See `ops.rope`.
      parents: Tree of drafted tokens, int32 [B, T] or [T]: the index of the
        earlier token of the call that each follows, -1 for those that follow
        the text in the cache. A token sees that text, its ancestors and itself;
        default positions count along its path. `cache.keep` then keeps the
        accepted path. Needs a cache and a replicated `CachedAttention`.

    Returns:
      Logits, float32 [B, T, V] or [B, n, V]; with a cache (logits, new cache).

    Raises:
      PromptError: If an id is not in the vocabulary, or the cache has no room
        for the tokens.
      CheckpointFormatError: If the file of a layer on disk has changed or can't
        be read.
      CheckpointMismatchError: If a layer on disk has non-finite numbers.
      ShapeError: If shapes do not fit, e.g. the cache's batch.
      MeshError: If the current mesh has explicit axes, or the call is in a
        shard_map that does not allow it.
      RingjaxError: All of these are raised in Python, before compilation.
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
    kv_cache = cache if cache is not None and cache.stores else None
    attend = self._placed(attend, tokens, kv_cache)
    if cache is not None:
      cache.check(
        *shape,
        replicated=_replicated(attend),
        sees=isinstance(attend, CachedAttention),
      )
    if self.config.positions is not None:
      _check_table(self.config, shape, pos, seg, cache, attend)
    if parents is not None:
      parents = self._tree(parents, shape, attend, cache)
    if cache is not None:
      cache.check_coords(CallCoords(pos, seg, parents, attend.segments))
    call = (self, attend, tokens, pos, seg, cache, rows, length, parents)
    if not self.stack.faults or isinstance(tokens, jax.core.Tracer):
      return _call(*call)
    # A failed read raises in this call and in no later one.
    with naming_faults(self.stack.faults):
      return jax.block_until_ready(_call(*call))

  def predicted_logits(
    self,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    positions: Int[Array | np.ndarray, " ..."] | None = None,
    segment_ids: Int[Array | np.ndarray, " ..."] | None = None,
    attend: ShardingContext | None = None,
  ) -> Float[Array, "B T V"]:
    """Logits of the next token by the layer that predicts one token further.

    At position t they depend on the model's output at t - 1 and the token at t.
    Those of a document's first token are of no use.

    Args:
      tokens: Token ids, int32 [B, T], in the order of `attend`'s layout.
      positions, segment_ids, attend: See `__call__`.

    Returns:
      Logits, float32 [B, T, V]; -inf for ids outside of a draft vocabulary.

    Raises:
      OptionError: If the model has no such layer.
    """
    predicts = self.config.predicts
    if predicts is None or not predicts.by_token:
      raise OptionError(
        "model",
        f"a {self.config.family} without a layer that predicts further tokens",
        "a model with one",
        "load it with rj.models.load(folder, predict_layers=True)",
      )
    check_current()
    tokens = _ids(tokens, self.config.vocab)
    pos = _per_token("positions", positions, tokens.shape)
    seg = _per_token("segment_ids", segment_ids, tokens.shape)
    return _predicted(
      self, self._placed(attend, tokens, None), tokens, pos, seg
    )

  def _tree(
    self,
    parents: Any,
    shape: Sequence[int],
    attend: ShardingContext,
    cache: CallCache | None,
  ) -> jax.Array:
    """Checks the parents of drafted tokens and gives them a batch axis.

    Returns:
      int32 [B or 1, T].
    """
    parents = _per_token("parents", parents, shape)
    if cache is not None and cache.row_groups is not None:
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
    """The call's sharding context, with its mesh and axis filled in."""
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
    current_mesh = jax.sharding.get_abstract_mesh()
    if attend.mesh is None and cache is not None:
      attend = dataclasses.replace(attend, mesh=cache.mesh, axis=cache.axis)
    elif attend.mesh is None:
      # Traced weights name the mesh of the jit's arguments in their type.
      weight = self.embed.weight.get_value()
      mesh = current_mesh
      if current_mesh.empty:
        mesh = self.mesh or sharding_of(weight)[0]
      axis = attend.axis
      if axis == AUTO:
        axis = None if mesh is None else sequence_axis(mesh)
      if axis is not None and mesh is not None and mesh.shape.get(axis) == 1:
        axis = None
      attend = dataclasses.replace(attend, mesh=mesh, axis=axis)
    if attend.mesh is not None and not current_mesh.empty:
      sizes, current_sizes = (
        dict(attend.mesh.shape),
        dict(current_mesh.shape),
      )
      if sizes != current_sizes:
        raise MeshError(
          "attend" if cache is None else "cache",
          f"one of a mesh {sizes} where the current one is {current_sizes}",
          "the same mesh",
          "enter the call's with jax.set_mesh, or leave the other",
        )
    return attend

  @property
  def mesh(self) -> Mesh | None:
    """The mesh of the weights; None in a trace and on one device."""
    weight = self.embed.weight.get_value()
    has_sharding = isinstance(weight, jax.Array | jax.ShapeDtypeStruct)
    if not has_sharding or isinstance(weight, jax.core.Tracer):
      return None
    sharding = weight.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
      return sharding.mesh
    return None

  @property
  def kinds(self) -> tuple[LayerCacheSpec | StateShape | SummarySpec, ...]:
    """Cache specs of each kind of layer, in the order of a cache."""
    specs: list[Any] = []
    for run in self.stack.runs:
      for position, layer in enumerate(run.layers):
        for mixer in layer.mixers:
          numbers = tuple(run.number(position, n) for n in range(run.repeats))
          shape = mixer.cache_shape(run.repeats)
          specs.append(dataclasses.replace(shape, which=numbers))
    return tuple(specs)

  @property
  def digest(self) -> str:
    """A digest of the model that does not depend on its weights' dtype."""
    return model_digest(self)

  def placement_report(self) -> PlacementReport:
    """Memory of each layer, and time and bytes of fetching the placed ones."""
    return placement_report(self)

  def transfers(self) -> tuple[TransferEvent, ...]:
    """Reads of layers from disk and waits of calls for them, by start time.

    `rj.plan.offload_measured.streamed_costs` turns them into costs.
    """
    return transfer_events(self)

  def on_wait(self, say: Callable[[str], Any] | None) -> None:
    """Calls `say` with a text each second that a call waits for the disk."""
    set_waiting(self, say)

  @property
  def log_factors(self) -> Float[Array, " half"] | None:
    """Logarithms of the factors of a learned rotation, or None.

    Training leaves them as they are.
    """
    factors = self.rope_factors
    return None if factors is None else jax.lax.stop_gradient(factors[...])

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
    kind: CacheConfig | str = "dense",
    placement: WeightPlacement | str | None = None,
    disk: CacheFiles | None = None,
  ) -> Any:
    """Makes an empty cache for `capacity` tokens of each example.

    Args:
      batch: Number of rows, B.
      capacity: Slots of a row, in tokens, a multiple of the shards.
      sharding: Mesh and axis that the cache is sharded over.
      dtype: bfloat16, float16, float32 or float64; default: the model's.
      kind: Storage of keys and values, an `rj.kv.CacheConfig` or its name,
        one of `rj.kv.KINDS`.
      placement: Memory of the keys of layers that do not run: "device",
        "host", "disk", or fractions of the layers, see `rj.models.Placement`;
        default: on the devices, and read where they are.
      disk: Files for layers on disk; keep them as long as the cache.

    Raises:
      OptionError: If dtype or kind is unknown, or `capacity` does not divide.
    """
    spec = self.init_cache_spec(
      batch,
      capacity,
      sharding=sharding,
      dtype=dtype,
      kind=kind,
      placement=placement,
    )
    return spec.allocated(disk)

  def init_cache_spec(
    self,
    batch: int,
    capacity: int,
    *,
    sharding: ShardingContext | None = None,
    dtype: DTypeLike | None = None,
    kind: CacheConfig | str = "dense",
    placement: WeightPlacement | str | None = None,
  ) -> Any:
    """Specs of `init_cache`'s cache: shapes, dtypes and shardings alone.

    Nothing is allocated. The arguments are those of `init_cache`.
    """
    sharding = ShardingContext() if sharding is None else sharding
    mesh = sharding.mesh
    head_axis = (
      "model" if mesh is not None and "model" in mesh.axis_names else None
    )
    resolved_kind = self.cache_kind(kind)
    policy = resolved_kind.policy
    if (
      policy is not None and policy.moves and self.config.positions is not None
    ):
      raise OptionError(
        "kind",
        f"{resolved_kind} for a {self.config.family} with learned positions",
        "a model whose attention sees distances",
        "leave positions='cache' out",
      )
    tiers = None
    if placement is not None:
      refuse_sparse(
        self.config.layers,
        "placement",
        f"{placement}",
        "leave it out: all keys are on the devices",
      )
      if not all(map(keeps, self.config.layers)):
        raise OptionError(
          "placement",
          f"a {self.config.family}, whose layers read each other's keys",
          "keys that one layer reads alone",
          "leave it out",
        )
      tiers = cache_tiers(self, placement)
    return cache_spec(
      self.kinds,
      batch,
      capacity,
      self.dtype if dtype is None else float_dtype("dtype", dtype),
      kind=resolved_kind,
      mesh=mesh,
      axis=sharding.of_mesh,
      head_axis=head_axis,
      batch_axes=sharding.batch_axes(batch),
      tiers=tiers,
    )

  def cache_kind(self, kind: CacheConfig | str) -> CacheConfig:
    """A cache kind by its name or as it is, calibrated for this model.

    Raises:
      OptionError: If the kind is unknown, or calibrated for another model; if
        it scores or rotates keys, and the model folds positions.
      CheckpointFormatError: If the kind's calibration file is missing or bad.
    """
    resolved = cache_kind(kind)
    if (
      resolved.policy is not None
      or resolved.layout.unrotated
      or isinstance(resolved.codec, Calibrated)
    ):
      refuse_folded(
        self.config.layers,
        "kind",
        str(resolved),
        "use a kind that keeps all keys, rotated: dense, int8 or int4",
      )
    if (
      resolved.policy is not None
      or resolved.evicting
      or resolved.tier.device is not None
      or isinstance(resolved.codec, Calibrated | PerHead | Allocated)
    ):
      refuse_sparse(
        self.config.layers,
        "kind",
        str(resolved),
        "use a kind that keeps all keys on the devices, in one codec: dense, "
        "bfloat16, int8 or int4",
      )
    return resolved.for_model(lambda path: load_measured(path, self))

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    places: Tokens,
    cache: CallCache,
    attend: ShardingContext,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Runs embedding, layers and last norm: input of the head, [B, T, D].

    Returns:
      (hidden states, new cache).
    """
    x, cache = self.through_layers(tokens, places, cache, attend)
    return attend.head(self.head_input, x), cache

  def hidden_and_predicted(
    self,
    tokens: Int[Array, "B T"],
    places: Tokens,
    cache: CallCache,
    attend: ShardingContext,
  ) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"]]:
    """Inputs of the head, of the model and of the layer that predicts further.

    The arguments are those of `hidden`.
    """
    places.predicting = True
    x, _ = self.through_layers(tokens, places, cache, attend)
    x, g = jnp.split(x, [self.config.embed], -1)
    h = self.predict_block.normed(g, self.norm)
    return self.head_input(x), self.head_dtype(h)

  def predicted_head(
    self, h: Float[Array, "*batch D"]
  ) -> Float[Array, "*batch V"]:
    """Logits of the layer that predicts further, of its normed outputs.

    Ids outside of the layer's vocabulary have -inf.
    """
    return self.predict_block.logits(h, self.logits, self.config.vocab)

  def through_layers(
    self,
    tokens: Int[Array, "B T"],
    places: Tokens,
    cache: CallCache,
    attend: ShardingContext,
    x: Float[Array, "B T *D"] | None = None,
  ) -> tuple[Float[Array, "B T *Y"], Any]:
    """Runs the layers, without the last norm and the head.

    Args:
      tokens: Token ids of the call, int32 [B, T].
      places: Coordinates and rotations of the tokens.
      cache: Cache of the call, with slots allocated for the tokens.
      attend: Sharding of the tokens, and where their keys are.
      x: Output of the layers before, for a part of a model; None for the first
        part, or a whole model.

    Returns:
      (output of the last layer, new cache).
    """
    context: Any = attend
    # `embedded` also sets what all layers read: later parts need the call, too.
    first = self.embedded(tokens, places)
    x = attend.constrain(first if x is None else x)
    return self.stack(x, places, cache, context)

  def embedded(
    self, tokens: Int[Array, "B T"], places: Tokens
  ) -> Float[Array, "B T *D"]:
    """Input of the first layer; sets what all layers read of the ids."""
    x = self.embed(tokens, places.pos)
    places.ids = tokens
    if (predicts := self.config.predicts) is not None:
      places.embedded, places.last_norm = x, self.norm
      if predicts.reads_ids:
        weight = self.embed.weight[...]
        places.embedded = self.predict_block.embedded(tokens, weight)
    if self.inputs is not None:
      places.inputs = functools.partial(self.inputs, tokens, x)
    return x if self.streams is None else self.streams.spread(x)

  @property
  def predict_block(self) -> PredictBlock:
    """Weights of the layer that predicts one token further."""
    assert self.config.predicts is not None
    block: Any = self.stack.layer(len(self.stack.runs) - 1, 0, 0)
    return block

  def head_input(self, x: Float[Array, "*batch W"]) -> Float[Array, "*rows D"]:
    """Input of the head, from the output of the last layer."""
    h = self.norm(x if self.streams is None else self.streams.merged(x))
    return self.head_dtype(h)

  def head_dtype(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """A normed stream in the dtype that the head reads."""
    return h.astype(part_dtype(self.embed, h.dtype))

  def logits(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Logits, float32 [..., V], of hidden states [..., D]."""
    head = self.embed if self.head is None else self.head
    return logits_of(self.config, head, h)


def logits_of(
  config: TransformerConfig, head: Embedding | Head, h: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
  """Logits, float32 [..., V], by a `Head` or a tied `Embedding`."""
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


@bounded
@functools.partial(jax.jit, static_argnums=(1,))
def _predicted(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: jax.Array | None,
  seg: jax.Array | None,
) -> Float[Array, "B T V"]:
  places = tokens_of(model, attend, tokens.shape, pos, seg, None)
  cache = NoCache(len(model.kinds))
  _, h = model.hidden_and_predicted(tokens, places, cache, attend)
  return model.predicted_head(h)


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
  record: tuple[type[TileRecord] | type[PageRecord], list[Any]] | None = None,
) -> Any:
  """`Transformer.__call__` without its checks, within a jit.

  `x` is the output of the layers before, for a model of the last ones, see
  `models.partition.layer_parts`. `record` is a class of records of the layers,
  and a list that receives their sums, see `Tokens.recorded`.
  """
  call_cache = cache if cache is not None else NoCache(len(model.kinds))
  if pos is None and cache is not None and isinstance(attend, CachedAttention):
    offsets = _derived(attend, tokens.shape[1])
    if parents is not None:
      offsets = jnp.sum(ancestor_matrix(parents), 2, dtype=jnp.int32) - 1
    pos = cache.length[:, None] + offsets
  places = tokens_of(model, attend, tokens.shape, pos, seg, length, parents)
  groups = call_cache.row_groups
  if groups is not None:
    return _in_groups(model, attend, tokens, places, groups, rows)
  call_cache = _begun(call_cache, attend, tokens, places)
  if record is not None:
    places.recorder = record[0]
  if call_cache.tiles and rows is not None:
    x, call_cache = model.through_layers(tokens, places, call_cache, attend, x)
    # Norm and head cost the rows that are read, not all that have room.
    index = rows.reshape(*rows.shape, *(1,) * (x.ndim - 2))
    x = jnp.take_along_axis(x, index, 1)
    h, rows = attend.head(model.head_input, x), None
  elif x is None:
    h, call_cache = model.hidden(tokens, places, call_cache, attend)
  else:
    x, call_cache = model.through_layers(tokens, places, call_cache, attend, x)
    h = attend.head(model.head_input, x)
  if record is not None:
    record[1].extend(places.recorded)
  if rows is not None:
    h = jnp.take_along_axis(h, rows[..., None], 1)
  logits = attend.head(model.logits, h)
  return logits if cache is None else (attend.over_vocab(logits), call_cache)


def forward_layers(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "B T"],
  seg: Int[Array, "B T"],
  cache: CallCache,
  length: Lengths | None,
  x: Float[Array, "B T *D"] | None,
) -> tuple[Float[Array, "B T ..."], Any]:
  """Runs the layers of a part of a model, see `models.partition.layer_parts`.

  Args:
    model: Part of the model.
    attend: Sharding of the tokens, see `Transformer.__call__`.
    tokens: Token ids of the call, int32 [B, T].
    pos: Positions of the tokens, int32 [B, T].
    seg: Documents of the tokens, int32 [B, T].
    cache: Cache of the whole model.
    length: Tokens of the whole context.
    x: Output of the part before; None for the first part.

  Returns:
    (x for the next part, new cache).
  """
  places = tokens_of(model, attend, tokens.shape, pos, seg, length)
  call_cache = _begun(cache, attend, tokens, places)
  return model.through_layers(tokens, places, call_cache, attend, x)


class JointCall(NamedTuple):
  """A call of several in one program, see `forward_calls`.

  Fields:
    tokens: Token ids, int32 [B, T].
    pos: Positions of the tokens, int32 [B, T].
    seg: Documents of the tokens, int32 [B, T].
    cache: Cache of the call; that of a later call borrows the arrays of the
      first.
    rows: Index of the token of each row whose output is returned, int32 [B],
      or None for the outputs of all tokens.
    length: Tokens of the context of each row, int32 [B], or None.
    adapters: Adapter of each row, int32 [B], or None.
    parents: Index of the earlier token that each follows in a tree of drafts,
      -1 for the first, int32 [B, T]; or None.
  """

  tokens: Int[Array, "B T"]
  pos: Int[Array, "B T"]
  seg: Int[Array, "B T"]
  cache: CallCache
  rows: Int[Array, " B"] | None
  length: Lengths | None
  adapters: Int[Array, " B"] | None
  parents: Int[Array, "B T"] | None = None


def forward_calls(
  model: Transformer,
  attend: CachedAttention,
  calls: Sequence[JointCall],
  row_tile: int = 0,
) -> tuple[list[Float[Array, "B *_ D"]], Any]:
  """Runs the layers for several calls.

  Args:
    model: The whole model.
    attend: Sharding of the tokens, and where their keys are.
    calls: Calls, each of which passes a layer after the one before it.
    row_tile: Number of rows of a tile in which the tokens of all calls pass a
      layer together, see `nn.row_tiles`; 0: one call after another.

  Returns:
    (output of the last layer for each call, of a token of each row, [B, D], or
    of all tokens, [B, T, D]; new cache).
  """
  inputs = []
  for call in calls:
    shape = call.tokens.shape
    with adapter_rows(call.adapters):
      places = tokens_of(
        model,
        attend,
        shape,
        call.pos,
        call.seg,
        call.length,
        call.parents,
      )
      cache = _begun(call.cache, attend, call.tokens, places)
      x = attend.constrain(model.embedded(call.tokens, places))
    inputs.append((x, places, cache))
  if row_tile:
    xs, cache = _in_row_tiles(model, attend, inputs, row_tile)
  else:
    context: Any = attend
    results = model.stack.together(inputs, context)
    xs, cache = [x for x, _ in results], results[-1][1]
  outputs = []
  for call, x in zip(calls, xs, strict=True):
    if call.rows is None:
      outputs.append(x)
      continue
    index = call.rows.reshape(-1, *(1,) * (x.ndim - 1))
    outputs.append(jnp.take_along_axis(x, index, 1)[:, 0])
  return outputs, cache


def _in_row_tiles(
  model: Transformer,
  attend: CachedAttention,
  inputs: Sequence[tuple[Float[Array, "_ _ D"], Tokens, Any]],
  size: int,
) -> tuple[list[Float[Array, "_ _ D"]], Any]:
  """Runs the layers for the tokens of several calls together.

  Args:
    model: The whole model.
    attend: Attention over cached keys.
    inputs: Input of the first layer, coordinates and cache of each call.
    size: Number of rows of a tile.

  Returns:
    (output of the last layer of each call, new cache).
  """
  xs, tokens, caches = zip(*inputs, strict=True)
  rows = RowTiles.of(
    [places.at.seg for places in tokens],
    size,
    [places.adapters for places in tokens],
  )
  cache = JointCache(calls=caches, tokens=tokens, rows=rows)
  context: Any = attend
  with in_row_tiles(rows):
    # A layer takes the coordinates of each call from the cache.
    x, new_cache = model.stack(rows.joined(xs), tokens[0], cache, context)
  return [rows.take(x, call) for call in range(len(inputs))], new_cache


def _begun(
  cache: CallCache,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  places: Tokens,
) -> CallCache:
  """Allocates slots for the tokens of a call and records their ids."""
  return cache.allocate(
    places.at,
    replicated=_replicated(attend),
    sees=isinstance(attend, CachedAttention),
    tokens=tokens,
  )


def _in_groups(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  places: Tokens,
  groups: Any,
  rows: Int[Array, "B n"] | None,
) -> tuple[jax.Array, Any]:
  """Runs a call whose rows are in groups, layer by layer."""
  calls, logits = [], []
  # A length is per row, or one for all.
  length = jnp.broadcast_to(jnp.asarray(places.length), (tokens.shape[0],))
  coords = zip(
    *map(groups.split, (tokens, places.pos, places.seg, length)),
    groups.caches,
    strict=True,
  )
  for ids, pos, seg, lengths, group_cache in coords:
    group_places = Tokens(
      pos,
      seg,
      derived=places.derived,
      segmented=places.segmented,
      ropes=model.config.ropes,
      length=lengths,
      log_factors=model.log_factors,
    )
    allocated = _begun(group_cache, attend, ids, group_places)
    calls.append(
      (
        attend.constrain(model.embedded(ids, group_places)),
        group_places,
        allocated,
      )
    )
  context: Any = attend
  results = model.stack.together(calls, context, groups.hosted)
  for (h, _), group_rows in zip(results, groups.split(rows), strict=True):
    h = model.head_input(h)
    if group_rows is not None:
      h = jnp.take_along_axis(h, group_rows[..., None], 1)
    logits.append(model.logits(h))
  new_cache = groups.regrouped(group_cache for _, group_cache in results)
  return jnp.concatenate(logits), new_cache


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
    log_factors=model.log_factors,
  )


def _tree_coords(
  parents: jax.Array, pos: jax.Array, seg: jax.Array, shape: Sequence[int]
) -> Coords:
  broadcast = lambda x: jnp.broadcast_to(x, tuple(shape))
  return tree_coords(broadcast(parents), Coords(broadcast(pos), broadcast(seg)))


def _derived(attend: ShardingContext, tokens: int) -> jax.Array:
  """The layout's positions, int32 [1, T], counted from 0."""
  if (axis := attend.around) is not None:
    shard, shards = collectives.axis_index(axis), collectives.axis_size(axis)
    return attend.layout.positions(shard, shards, tokens)[None]
  return attend.layout.all_positions(tokens, attend.size)[None]


def _replicated(attend: ShardingContext) -> bool:
  """Whether all shards of the cache see the same tokens of a call."""
  return isinstance(attend, CachedAttention) and attend.replicated


def _check_manual(
  attend: ShardingContext, tokens: jax.Array, cache: CallCache | None
) -> None:
  """Refuses a call in a shard_map whose tokens would miss keys."""
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
  manual_axis = axis or (SEQ if SEQ in manual else None)
  if manual_axis is None:
    return
  if cache is not None or attend.mesh is not None:
    raise MeshError(
      "cache" if cache is not None else "attend",
      f"one of a whole mesh in a shard_map over {manual_axis!r}",
      "the tokens of a shard alone",
      "leave it out, or call from outside of the shard_map",
    )
  # Without check_vma no value is known to vary.
  vma_checked = manual_axis in collectives.varying_axes(
    collectives.axis_index(manual_axis)
  )
  if vma_checked and manual_axis not in collectives.varying_axes(tokens):
    raise MeshError(
      "tokens",
      f"the same on all shards of {manual_axis!r}, in a shard_map over it",
      "the tokens of each shard",
      f"shard them, in_specs=P(None, {manual_axis!r}), or pass "
      f"{spelling.format(None)}",
    )


def _check_cache(cache: CallCache) -> None:
  if not isinstance(cache, CallCache):
    raise InputTypeError(
      "cache",
      type(cache).__name__,
      "a cache of keys and values",
      "make one with model.init_cache(batch, capacity), or pass session.cache",
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

  Traced arrays are not checked.
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
  largest, count = int(host.max()), config.positions.count
  if largest >= count:
    raise PromptError(
      "tokens",
      f"a token at position {largest:,}",
      f"positions from 0 to {count - 1:,}, as {config.bound} says: the model "
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
    invalid = np.argwhere((host < 0) | (host >= vocab))
    if invalid.size:
      b, t = (int(i) for i in invalid[0])
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
    invalid = np.argwhere((host < 0) | (host >= shape[1]))
    if invalid.size:
      b, n = (int(i) for i in invalid[0])
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

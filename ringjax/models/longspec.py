"""LongSpec: a draft of one block that reads its target's last keys.

Guarantees: embedding, last norm and head are the target's, and its weights get
no gradient. A saved draft is loaded bit for bit, with the target for which it
was made and no other.
Memory: while drafting, the keys and values of a window, however long the
context; keys of the context are those of the target's cache.
Ref: Yang et al. 2025, arXiv 2502.17421; their code has no norm before the head.

The target's cache lags: it has the tokens before the last chosen one. So a
query at position t sees the target's keys up to t - j, where j is 1 for the
first drafted token, 2 for the second and so on. Training draws j.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from ringjax import tree
from ringjax.checks import integer, local_path, one_of, positive_int
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  InputTypeError,
  OptionError,
)
from ringjax.json_text import json_text
from ringjax.kv.base import KV, CallCache, FreshLayer, HeldKeys, NoCache
from ringjax.kv.cache_kind import CacheConfig, LayoutConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.models.heads.added_layer import refuse_predicting
from ringjax.models.hf.tensors import parameters
from ringjax.models.parameter_arrays import (
  arrays_of,
  filled,
  on_host,
  tensors_digest,
)
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.models.weights.calibration import (
  model_digest,
  read_tensors,
  write_tensors,
)
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.draft_block import DraftBlock, ReadTarget
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import (
  DenseAndExperts,
  Experts,
  Gated,
  NoFeedforward,
)
from ringjax.nn.linear import Embedding, Head, part_dtype
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import ShardingContext
from ringjax.nn.stack import Stack
from ringjax.nn.tokens import Tokens
from ringjax.ops.mask import Causal, Coords, SameSegment, Window
from ringjax.ops.rope import Rotation
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf

INITS = ("copy", "random")
CONFIG, TENSORS = "longspec.json", "longspec.safetensors"
_REMEDY = "save the draft again with rj.models.longspec.save"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongSpecConfig:
  """Settings of a draft that do not follow from its target.

  Attributes:
    window: Tokens that its own attention sees, including the query's.
    hidden: Width of the feedforward; None: that of the target's last layer, for
      experts the sum of those that a token activates.
  """

  window: int = 512
  hidden: int | None = None

  def __post_init__(self) -> None:
    positive_int("window", self.window)
    if self.hidden is not None:
      positive_int("hidden", self.hidden)

  def layer(self, target: Transformer) -> Layer:
    """The draft's own attention and feedforward, for a target.

    Raises:
      OptionError: See `check_target`.
    """
    last = check_target(target)
    feedforward: Any = target.config.layers[-1].feedforward
    if isinstance(feedforward, DenseAndExperts):
      dense, sparse = feedforward.dense, feedforward.sparse
      hidden = dense.hidden + sparse.hidden * sparse.chosen
      feedforward = dataclasses.replace(dense, hidden=hidden)
    if isinstance(feedforward, Experts):
      feedforward = Gated(
        hidden=feedforward.hidden * feedforward.chosen, act=feedforward.act
      )
    if self.hidden is not None:
      feedforward = dataclasses.replace(feedforward, hidden=self.hidden)
    rope = last.rope or next(iter(target.config.ropes), None)
    return Layer(
      attention=Attention(
        heads=last.heads,
        kv_heads=last.kv_heads,
        head_dim=last.head_dim,
        mask=Causal() & Window(self.window),
        rope=rope,
        scale=last.scale,
        bias=True,
        soft_cap=last.soft_cap,
        alibi=last.alibi,
      ),
      feedforward=feedforward,
      norm=target.config.layers[-1].norm,
    )


def check_target(target: Transformer) -> Attention:
  """Checks a target, and returns the attention whose keys a draft reads.

  Raises:
    InputTypeError: If it is not a `Transformer`.
    OptionError: If the last layer's cache lacks keys of all tokens: latent
      attention, a recurrent layer, or one that looks back a window; or if its
      values are not as wide as its keys.
  """
  if not isinstance(target, Transformer) or isinstance(
    target, DraftTransformer
  ):
    raise InputTypeError(
      "target",
      type(target).__name__,
      "an rj.models.Transformer",
      "make one with rj.models.load",
    )
  refuse_predicting(target, "make a draft of it")
  last = target.config.layers[-1].attention
  if type(last) is not Attention or last.reach is not None:
    kind = type(last).__name__
    if type(last) is Attention:
      kind = f"attention that looks back {last.reach} tokens"
    raise OptionError(
      "target",
      f"a {target.config.family} whose last layer is {kind}",
      "grouped-query attention that sees the whole text, in the last layer",
      "draft with speculate='lookup', or take another target",
    )
  if isinstance(target.config.layers[-1].feedforward, NoFeedforward):
    raise OptionError(
      "target",
      f"a {target.config.family} whose last layer has no feedforward",
      "a last layer of attention and a feedforward",
      "draft with speculate='lookup', or take another target",
    )
  if last.reads or target.config.streams is not None:
    raise OptionError(
      "target",
      f"a {target.config.family}, whose last layer reads another's keys or "
      "one of several streams",
      "a last layer with keys of its own, and one stream",
      "draft with speculate='lookup', or take another target",
    )
  if last.value != last.head_dim:
    raise OptionError(
      "target",
      f"values of {last.value} numbers a head, and keys of {last.head_dim}",
      "keys and values of one width, in the last layer",
      "draft with speculate='lookup', or take another target",
    )
  return last


@dataclasses.dataclass(frozen=True)
class LaggedCache(NoCache):
  """The cache of a call that reads a whole text as drafts would.

  Attributes:
    lag: Distance of the target's last key from a query, int32 [B or 1, 1].
  """

  lag: Int[ArrayLeaf, "#B 1"]

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),)


tree.register(LaggedCache, ("lag",), ())


class _LastLayer(NoCache):
  """The cache of a call that returns keys and values of the last layer."""

  def __init__(self, kinds: int, k: jax.Array, v: jax.Array):
    super().__init__(kinds)
    self._kept = k, v

  @property
  def slots(self) -> tuple[Any, ...]:
    return (*((),) * (self._kinds - 1), self._kept)

  def layer(self, kind: int, slots: Any, index: Any) -> FreshLayer:
    del slots, index
    if kind < self._kinds - 1:
      return FreshLayer()

    def change(
      k: jax.Array, v: jax.Array, rotation: Rotation
    ) -> tuple[Array, Array, PyTree]:
      k = rotation.own(k)
      return k, v, (k, v)

    return FreshLayer(change=change)

  def updated(self, slots: tuple[Any, ...]) -> Any:
    return slots[-1]


class DraftTransformer(Transformer):
  """A target's draft: a block between its embedding and its last norm.

  Called as a model it reads a whole text, each query as if the target's cache
  lagged by `lag` tokens. It drafts as `speculate.LongSpec(model=draft)`.

  Attributes:
    config: Config of the target, with the draft's own layer only.
    draft_config: Settings of the draft.
    target: Model whose embedding, norm, head and keys it uses; not copied.
    block: Weights of the draft.
    held: Cache of the target, or rows of its pool, whose keys it reads;
      None: the target is called for them.
  """

  def __init__(
    self,
    target: Transformer,
    draft_config: LongSpecConfig,
    block: DraftBlock,
  ):
    layer = draft_config.layer(target)
    self.config = dataclasses.replace(target.config, layers=(layer,))
    self.source = target.source
    self.draft_config = draft_config
    self.target = target
    self.block = block
    self.held: HeldKeys | None = nnx.data(None)

  # The target's modules, which are not parameters of the draft.
  @property
  def embed(self) -> Embedding:  # pyrefly: ignore
    return self.target.embed

  @property
  def head(self) -> Head | None:  # pyrefly: ignore
    return self.target.head

  @property
  def rope_factors(self) -> nnx.Param | None:  # pyrefly: ignore
    return self.target.rope_factors

  @property
  def stack(self) -> Stack:  # pyrefly: ignore
    return self.target.stack

  @property
  def kinds(self) -> tuple[LayerCacheSpec, ...]:
    shape: Any = self.config.layers[0].mixers[0].cache_shape(1)
    return (dataclasses.replace(shape, which=(0,)),)

  def __call__(
    self,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    lag: Int[Array | np.ndarray, "#B 1"] | int = 1,
    **options: Any,
  ) -> Any:
    """Computes logits of the next tokens, with a cache that lags.

    Args:
      tokens: Token ids, int32 [B, T].
      lag: Lag of all rows, or int32 [B or 1, 1]; at least 1.
      **options: Other options of `Transformer.__call__`, without `cache`.
    """
    if isinstance(lag, int):
      lag = np.full((1, 1), integer("lag", lag, least=1), np.int32)
    cache = LaggedCache(jnp.asarray(lag, jnp.int32))
    return super().__call__(tokens, cache=cache, **options)[0]

  def beside(self, target: Transformer, held: HeldKeys) -> DraftTransformer:
    """A copy of the draft that reads `held`, a cache of `target`."""
    draft = copy.copy(self)
    draft.target, draft.held = target, nnx.data(held)
    return draft

  def init_ring(self, batch: int, slack: int, sharding: ShardingContext) -> Any:
    """Makes the draft's cache: a ring buffer per row, on every shard.

    Args:
      batch: Number of rows, B.
      slack: Tokens of a call that may be taken back.
      sharding: Sharding of the batch.
    """
    # It has slots for layers that keep all tokens, too, which are not read.
    return self.init_cache(
      batch,
      self.draft_config.window + slack,
      sharding=dataclasses.replace(sharding, axis=None),
      kind=CacheConfig(layout=LayoutConfig(windowed=True, slack=slack)),
    )

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    places: Tokens,
    cache: CallCache,
    attend: ShardingContext,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Runs embedding, block and last norm: input of the head, [B, T, D].

    Returns:
      (hidden states, new cache).
    """
    context: Any = attend
    x = self.target.embedded(tokens, places)
    if self.held is None:
      read = self._reads_text(tokens, places, cache, context)
    else:
      read = self._reads_cache(places, context)
    layer = cache.layer(0, cache.slots[0], jnp.int32(0))
    x, layer = self.block(x, places, layer, context, read)
    # The target's head expects the output of this norm.
    h = self.target.norm(x)
    h = h.astype(part_dtype(self.target.embed, h.dtype))
    return h, cache.updated((layer.slots,))

  def _reads_cache(self, places: Tokens, attend: Any) -> ReadTarget:
    """Reads the keys and values of the target's cache."""
    target_cache: Any = self.held
    last = check_target(self.target)
    kind = len(self.target.kinds) - 1
    number = self.target.stack.runs[-1].repeats - 1
    late_norm = None
    if last.qk_norm_late and last.qk_norm is not None:
      late_norm = last_block(self.target).attention.k_norm
    layer = target_cache.layer(
      kind, target_cache.slots[kind], jnp.int32(number)
    )
    layer = layer.for_reading(places.rotation(last.rope, after=late_norm))
    context = dataclasses.replace(
      attend, mesh=target_cache.mesh, axis=target_cache.axis
    )
    mask = last.mask & SameSegment()
    return lambda q, extras: context.visit(
      q, layer.views(), places.at, mask, extras
    )

  def _reads_text(
    self, tokens: jax.Array, places: Tokens, cache: Any, attend: Any
  ) -> ReadTarget:
    """Reads the text's own keys that are at least `lag` tokens before."""
    target, last = self.target, check_target(self.target)
    length = places.rotation(None).length
    text_tokens = tokens_of(
      target,
      attend,
      tokens.shape,
      None if places.derived else places.pos,
      places.seg if places.segmented else None,
      length,
    )
    shape = (tokens.shape[0], last.kv_heads, tokens.shape[1], last.head_dim)
    zeros = lambda: collectives.zeros(
      shape, self.dtype, target.embed.weight[...]
    )
    last_keys = _LastLayer(len(target.kinds), zeros(), zeros())
    _, (k, v) = target.hidden(tokens, text_tokens, last_keys, attend)
    k, v = jax.lax.stop_gradient((k, v))
    index = attend.layout.all_positions(tokens.shape[1], attend.size)[None]
    lag = getattr(cache, "lag", jnp.ones((1, 1), jnp.int32))
    keys = KV(k, v, _coords(index + lag, places.seg))
    at = _coords(index, places.seg)
    mask = Causal() & SameSegment()
    return lambda q, extras: attend.between(q, at, keys, mask, extras)


def _coords(pos: jax.Array, seg: jax.Array) -> Coords:
  batch = max(pos.shape[0], seg.shape[0])
  broadcast = lambda x: jnp.broadcast_to(x, (batch, x.shape[1]))
  return Coords(broadcast(pos), broadcast(seg))


def last_block(target: Transformer) -> Any:
  """Module of the target's last layer."""
  stack = target.stack
  last = stack.runs[-1]
  return stack.layer(
    len(stack.runs) - 1, len(last.layers) - 1, last.repeats - 1
  )


# ---------------------------------------------------------------------------
# New drafts
# ---------------------------------------------------------------------------


def with_draft(
  target: Transformer,
  config: LongSpecConfig | None = None,
  *,
  init: str = "copy",
  seed: int = 0,
  rules: Rules | None = None,
) -> DraftTransformer:
  """Makes a new draft of a target.

  Args:
    target: Model of any family whose last layer has grouped-query attention
      that sees the whole text.
    config: Settings of the draft; default `LongSpecConfig()`.
    init: "copy": norms, attention and feedforward begin as those of the
      target's last layer, as far as shapes are the same; "random".
    seed: Seed of its weights.
    rules: Rules that shard them over the target's mesh.

  Raises:
    InputTypeError, OptionError: See `check_target`; or `init` is unknown.
  """
  config = LongSpecConfig() if config is None else config
  one_of("init", init, INITS)
  integer("seed", seed, least=0)
  empty = _block_shapes(target, config)
  form = parameters(empty)
  old = arrays_of(last_block(target)) if init == "copy" else {}
  sources = {k: _source_of(k) for k in form}
  copied = {
    k: old[s]
    for k, s in sources.items()
    if s in old and old[s].shape == form[k].get_value().shape
  }

  def make(copied: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    fresh = arrays_of(_block(target.config, config.layer(target), seed))
    return {
      k: copied.get(k, fresh[k]).astype(p.get_value().dtype)
      for k, p in form.items()
    }

  mesh, rules = target.mesh, rules or Rules()
  if mesh is None:
    weights = jax.jit(make)(copied)
  else:
    shardings = {k: rules.sharding(p, mesh) for k, p in form.items()}
    weights = jax.jit(make, out_shardings=shardings)(copied)
  return DraftTransformer(target, config, filled(empty, weights))


def _block(config: Any, layer: Layer, seed: int) -> DraftBlock:
  last = config.layers[-1].attention
  return DraftBlock(nnx.Rngs(seed), layer, last, config.embed)


def _block_shapes(target: Transformer, config: LongSpecConfig) -> DraftBlock:
  """The block with shapes only, in the target's dtype."""
  from ringjax.models.checkpoint import cast

  layer = config.layer(target)
  build = functools.partial(_block, target.config, layer, 0)
  return jax.eval_shape(lambda: cast(build(), target.dtype))


def _source_of(path: str) -> str:
  """Path in the target's last layer that a new parameter is copied from."""
  path = path.replace("pre_cross.", "pre_attention.")
  return path.replace("cross.", "attention.")


# ---------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------


def save(
  draft: DraftTransformer,
  folder: str | os.PathLike[str],
  *,
  dtype: DTypeLike | None = None,
) -> None:
  """Writes a draft's own weights, and its target's digest.

  Args:
    draft: Draft to write.
    folder: Folder to write to.
    dtype: Dtype of the weights in the folder; default: the draft's.
  """
  place = pathlib.Path(local_path("folder", folder))
  written = jnp.dtype(draft.dtype if dtype is None else dtype)
  arrays = {
    k: on_host(x).astype(written) for k, x in arrays_of(draft.block).items()
  }
  config = {
    "target": model_digest(draft.target),
    "dtype": written.name,
    "draft": dataclasses.asdict(draft.draft_config),
    "tensors": tensors_digest(arrays),
  }
  if jax.process_index():
    return
  place.mkdir(parents=True, exist_ok=True)
  write_tensors(place / TENSORS, arrays, {"format": "pt"})
  text = json_text(config, indent=2, sort_keys=True) + "\n"
  (place / CONFIG).write_text(text, encoding="utf-8")


def load(
  folder: str | os.PathLike[str],
  target: Transformer,
  *,
  rules: Rules | None = None,
) -> DraftTransformer:
  """Loads the draft of a folder for its target, in the target's dtype.

  Raises:
    CheckpointFormatError: If files are missing, broken, or not those that were
      saved.
    CheckpointMismatchError: If the draft is of another target, or its tensors
      differ.
  """
  place = pathlib.Path(local_path("folder", folder))
  config, stated = checked(folder, target)
  arrays, _ = read_tensors(place / TENSORS)
  if tensors_digest(arrays) != stated:
    raise CheckpointFormatError(
      TENSORS, "tensors of another digest than stated", "its own", _REMEDY
    )
  empty = _block_shapes(target, config)
  form = parameters(empty)
  shapes = lambda x: {k: tuple(v.shape) for k, v in x.items()}
  if shapes(arrays) != shapes(arrays_of(empty)):
    raise CheckpointMismatchError(
      TENSORS,
      "other names or shapes than the draft's",
      "a tensor for each of its parameters",
      _REMEDY,
    )
  mesh, rules = target.mesh, rules or Rules()

  def put(path: str) -> jax.Array:
    p = form[path]
    x = arrays[path].astype(p.get_value().dtype)
    return jax.device_put(x, None if mesh is None else rules.sharding(p, mesh))

  return DraftTransformer(
    target, config, filled(empty, {k: put(k) for k in form})
  )


def checked(
  folder: str | os.PathLike[str], target: Transformer
) -> tuple[LongSpecConfig, str]:
  """Reads the config of a folder's draft, and its tensors' digest.

  Raises:
    CheckpointFormatError, CheckpointMismatchError: See `load`.
  """
  path = pathlib.Path(local_path("folder", folder)) / CONFIG
  try:
    config = json.loads(path.read_text("utf-8"))
    draft_config = LongSpecConfig(**config["draft"])
    target_digest, stated = config["target"], config["tensors"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise CheckpointFormatError(
      f"{path}", f"{error}"[:120], "what longspec.save writes", _REMEDY
    ) from None
  check_target(target)
  digest = model_digest(target)
  if digest != target_digest:
    raise CheckpointMismatchError(
      f"{path}",
      f"a draft of another target, of digest {target_digest}",
      f"one of this target, {digest}",
      "train one: configs/drafts/longspec.py",
    )
  return draft_config, stated

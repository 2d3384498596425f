"""Builds the programs of a run from shapes: to compile them, not to run them.

Guarantees: the programs are those of `rj.ring_attention` and its sisters, of
`train.step.make_step`, `infer.prefill.read` and `infer.decode.step`, with their
own shardings and donations. Weights, caches and tokens are shapes.

Builders for `rj.plan.aot`: each is called with the devices of a slice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

from ringjax.bench import step_bytes
from ringjax.bench.ways import NamedStrategy, way
from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError, ShapeError
from ringjax.infer import decode as decoding
from ringjax.infer import prefill as reading
from ringjax.infer.liger import paired
from ringjax.infer.sampling import Greedy
from ringjax.infer.speculate import rounds
from ringjax.infer.speculate.drafter import Draft
from ringjax.kv import kind_text
from ringjax.kv.base import HOST, bytes_each
from ringjax.models import work_profile
from ringjax.models.checkpoint import abstract, abstract_on
from ringjax.models.presets import preset
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import BITS, coded_model
from ringjax.models.weights.streaming import abstract_placed
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import joined
from ringjax.ops.attention.cost.schedule import tile_counts
from ringjax.ops.mask import Causal, Everything, Window
from ringjax.parallel.mesh import make_mesh
from ringjax.plan.compiler.aot import Built
from ringjax.plan.compiler.hlo import Trips
from ringjax.train import batch as batches
from ringjax.train import recipe as recipes
from ringjax.train import remat as remats
from ringjax.train import step as training
from ringjax.train.optimizers.qk_clip import check_qk_clip
from ringjax.typing import ArrayLeaf, leaf

ORDERS = ("ring", "listed")
WHAT = ("forward", "backward")
# Shards and local tokens whose tiles are counted; more of them look the same.
_COUNTED_SHARDS, _COUNTED_TOKENS = 8, 16384
# Strategies whose kernels' calls have all queries and keys of a hop.
_WHOLE_CALLS = ("striped", "ring", "gather")
# Queries and keys of a tile of the TPU kernels, unless options say otherwise.
_KERNEL_TILE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOptions:
  """The options that all programs share.

  Attributes:
    devices: Devices of the slice.
    tokens: Number of tokens of a row, T.
    mesh: (axis, size) pairs; -1 takes the remaining devices.
    batch: Number of rows of a step, B.
    dtype: Dtype of the computation.
    order: "ring": devices as `rj.make_mesh` orders them; "listed": in the
      order of `devices`, to see what the ring order is worth.
    strategy: Name of the strategy of attention, see `ways.NAMES`.
    q_block: Queries of a tile, for local algorithms with tiles.
    kv_block: Keys of a tile.
    local: "best", the kernel of the slice's chips, or "blockwise".

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
  """

  devices: Sequence[Any]
  tokens: int
  mesh: Sequence[Sequence[Any]] = (("seq", -1),)
  batch: int = 1
  dtype: str = "bfloat16"
  order: str = "ring"
  strategy: str = "striped"
  q_block: int | None = None
  kv_block: int | None = None
  local: str = "best"

  @functools.cached_property
  def named(self) -> NamedStrategy:
    """The strategy, its layout and its local algorithm."""
    return way(self.strategy, self.q_block, self.kv_block, self.local)

  def tile_share(
    self, mesh: Mesh, axis: str | None, causal: bool, window: int | None
  ) -> dict[str, float]:
    """Entry of the report: the share of a call's tiles that a kernel computes.

    For the shard that has most, as the others wait for it; none where a window
    decides, or where a call of the kernel has another part of the keys.
    """
    if window is not None or self.strategy not in _WHOLE_CALLS:
      return {}
    shards = 1 if axis is None else mesh.shape[axis]
    tile = (self.q_block or _KERNEL_TILE, self.kv_block or _KERNEL_TILE)
    local = -(-self.tokens // shards)
    share = _busy_share(self.named, shards, local, tile, causal)
    return {"tile_share": share}

  def placed(self, **counts: int) -> tuple[Mesh, str | None]:
    """The mesh and its sequence axis, checked against the tokens."""
    mesh, axis = _mesh(self.devices, self.mesh, self.order)
    _check_counts(mesh, axis, self.tokens, batch=self.batch, **counts)
    return mesh, axis

  def built(
    self,
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    flops: float,
    trips: Trips | float,
    **facts: Any,
  ) -> Built:
    """Wraps a program that takes `flops` FLOPs on all devices."""
    facts = {
      "mesh": dict(mesh.shape),
      "tokens": self.tokens,
      "batch": self.batch,
      "strategy": self.strategy,
      "dtype": self.dtype,
      **facts,
      "model_flops": flops / mesh.size,
    }
    return Built(
      function=function,
      arguments=arguments,
      mesh=mesh,
      facts=facts,
      data_trips=trips,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(ProgramOptions):
  """The options of a program of a model.

  Attributes:
    model: Name of a preset, or contents of a config.json.
    shard: Mesh axis that shards weights and moments along the model's width;
      None for `Rules()`.
    experts: Mesh axis that shards a mixture's experts, whose weights stay
      there; None for none.
    layers: Number of layers, in place of the model's.
    block: Tokens of a step of the feedforward.
    weights: Placement of the layers' weights, "host" or as
      "device=.5,host=.5"; None for the devices.
    coded_bits: Bits of the codes that replace the weights of linear maps, 8
      or 4; None: weights are floats.
  """

  model: str | Mapping[str, Any]
  shard: str | None = "seq"
  experts: str | None = None
  layers: int | None = None
  block: int = 2048
  weights: str | None = None
  coded_bits: int | None = None

  def form(self, mesh: Mesh, dtype: str) -> Transformer:
    """The model's shapes, sharded along its width over the axis `shard`."""
    source = self.model
    config = preset(source) if isinstance(source, str) else dict(source)
    if self.layers is not None:
      config["num_hidden_layers"] = positive_int("layers", self.layers)
    axes = {"embed": self.shard, "experts": self.experts}
    rules = Rules(**{name: axis for name, axis in axes.items() if axis})
    model = abstract(config, dtype=dtype, mesh=mesh, rules=rules)
    if self.coded_bits is not None:
      if self.weights is not None:
        raise OptionError(
          "weights",
          f"{self.weights!r} together with coded_bits={self.coded_bits}",
          "one of both",
          "leave out weights=, or coded_bits=",
        )
      one_of("coded_bits", self.coded_bits, BITS)
      codes = functools.partial(coded_model, bits=self.coded_bits)
      return abstract_on(jax.eval_shape(codes, model), mesh, rules)
    if self.weights is None:
      return model
    return abstract_placed(model, self.weights, mesh)

  def facts(self, form: Transformer) -> dict[str, Any]:
    """Entries of the report about the model."""
    named = isinstance(self.model, str)
    return {
      "model": self.model if named else form.config.family,
      "layers": len(form.config.layers),
      "parameters": sum(int(x.size) for x in jax.tree.leaves(form)),
      "host_bytes": _host_bytes(form),
      "coded_bits": self.coded_bits,
    }

  def context(
    self, remat: Callable[..., bool] | None = None, accumulate: int = 1
  ) -> ContextParallel:
    """Sharding context of the model's tokens, checked against the batch."""
    mesh, axis = self.placed(accumulate=accumulate)
    context = ContextParallel(
      mesh=mesh,
      axis=axis,
      layout=self.named.layout,
      strategy=self.named.strategy,
      block=positive_int("block", self.block),
      remat=remat,
    )
    batches.check(self.batch, self.tokens, context, accumulate)
    return context


def attention(
  devices: Sequence[Any],
  *,
  what: str = "forward",
  heads: int = 8,
  kv_heads: int = 8,
  head_dim: int = 128,
  causal: bool = True,
  window: int | None = None,
  packed: bool = False,
  **options: Any,
) -> Built:
  """Builds one call of attention over the mesh's sequence axis.

  Args:
    devices: Devices of the slice.
    what: "forward", or "backward": the output's sum and its gradients.
    heads: Number of query heads, N.
    kv_heads: Number of heads of keys and values, K.
    head_dim: Head dimension, H.
    causal: Whether queries see no later keys.
    window: Number of keys that a query sees; None for all.
    packed: Whether tokens have document numbers, so that queries see only keys
      of their document.
    options: Options of `ProgramOptions`.

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
  """
  one_of("what", what, WHAT)
  program = ProgramOptions(devices=devices, **options)
  mesh, axis = program.placed()
  batch, tokens = program.batch, program.tokens
  named = program.named
  dtype = recipes.dtype_of(program.dtype) or jnp.dtype(jnp.float32)
  context = ContextParallel(mesh=mesh)
  shares = context.shares(batch, heads, kv_heads)
  over = P(context.batch_axes(batch) or None, axis)
  operand = lambda n: _spec(mesh, (batch, tokens, n, head_dim), over, dtype)
  mask = None if window is None else Window(positive_int("window", window))
  ids = _spec(mesh, (batch, tokens), over)

  def forward(
    q: Shaped[Array, " ..."],
    k: Shaped[Array, " ..."],
    v: Shaped[Array, " ..."],
    segments: Any = None,
  ) -> jax.Array:
    return dot_product_attention(
      q, k, v, mask=mask, mesh=mesh, axis=axis, layout=named.layout,
      strategy=named.strategy, is_causal=causal, q_segment_ids=segments,
      **shares,
    )  # fmt: skip

  def backward(*x: jax.Array) -> Any:
    total = lambda *x: jnp.sum(forward(*x).astype(jnp.float32))
    return jax.value_and_grad(total, (0, 1, 2))(*x)

  pairs = batch * tokens * (tokens + 1) / 2 if causal else batch * tokens**2
  flops = 4.0 * heads * head_dim * pairs
  return program.built(
    mesh,
    jax.jit(forward if what == "forward" else backward),
    (*map(operand, (heads, kv_heads, kv_heads)), *[ids] * packed),
    flops * (1.0 if what == "forward" else 3.5),
    _trips(named, mesh, axis, tokens, causal),
    what=f"attention {what}",
    **({} if packed else program.tile_share(mesh, axis, causal, window)),
  )


def train(
  devices: Sequence[Any],
  *,
  accumulate: int = 1,
  remat: str = "attention",
  optimizer: str = "adamw",
  moments: str = "float32",
  moments_in: str = "device",
  loss_block: int = 1024,
  qk_clip: float | int | None = None,
  **options: Any,
) -> Built:
  """Builds a training step: float32 weights, gradients, moments, update.

  Args:
    devices: Devices of the slice.
    accumulate: Number of micro-batches.
    remat: Rematerialization policy of a layer, of `train.remat.POLICIES`.
    optimizer: Name of an optimizer, of `train.recipe.OPTIMIZERS`.
    moments: Storage of its moments, of `train.recipe.MOMENTS`.
    moments_in: Memory of its moments, of `train.recipe.MEMORIES`.
    loss_block: Tokens of a step of the head.
    qk_clip: Largest attention logit that a head keeps, for which each layer's
      logits are computed once more; None for no bound.
    options: Options of `ModelOptions`.

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
  """
  one_of("remat", remat, remats.POLICIES)
  program = ModelOptions(devices=devices, **options)
  attend = program.context(remats.policy(remat), accumulate)
  mesh = attend.mesh
  assert isinstance(mesh, Mesh)
  model = program.form(mesh, "float32")
  update = recipes.Optimizer(
    name=optimizer, moments=moments, moments_in=moments_in, qk_clip=qk_clip
  )
  check_qk_clip(qk_clip, model)
  objective = training.Objective(
    block=positive_int("loss_block", loss_block),
    dtype=recipes.dtype_of(program.dtype),
  )
  micro_batch = program.batch // accumulate
  over = P(None, attend.batch_axes(micro_batch) or None, attend.axis)
  row = functools.partial(
    _spec, mesh, (accumulate, micro_batch, program.tokens), over
  )
  batch = batches.Batch(row(), row(), row(jnp.float32))
  transform = update.build(1000, mesh)
  state = training.form(transform, model, mesh)
  moments_host_bytes = _host_bytes(state.optimizer)
  if moments_in == "host" and not moments_host_bytes:
    # JAX's CUDA plugin describes GPUs without the host's memory.
    raise OptionError(
      "moments_in",
      f"'host' for {mesh.devices.flat[0].device_kind}, whose compiler knows no "
      "arguments in the host's memory",
      "a TPU slice, or 'device'",
      "leave moments_in out, or pass another topology",
    )
  return program.built(
    mesh,
    training.make_step(transform, attend, objective, qk_clip=qk_clip),
    (state, None, batch),
    recipes.flops(model, program.tokens) * program.batch * program.tokens,
    _trips(program.named, mesh, attend.axis, program.tokens, True),
    what="train",
    remat=remat,
    optimizer=optimizer,
    moments=moments,
    moments_in=moments_in,
    moments_host_bytes=moments_host_bytes,
    qk_clip=qk_clip,
    least_bytes=_train_bytes(program, model, state, mesh.size),
    **program.tile_share(mesh, attend.axis, True, _reach(model)),
    **program.facts(model),
  )


def prefill(
  devices: Sequence[Any],
  *,
  cache: str = "dense",
  cache_placement: str | None = None,
  chunk: int | None = None,
  **options: Any,
) -> Built:
  """Builds the prefill of a prompt of `tokens` into an empty cache.

  Args:
    devices: Devices of the slice.
    cache: Kind of the cache, as `kv.kind_text` parses it.
    cache_placement: Placement of the layers' keys, see
      `Transformer.init_cache`.
    chunk: Number of last tokens that are read after the others; None for all.
    options: Options of `ModelOptions`.

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
  """
  kind = kind_text.parse(cache, "cache")
  program = ModelOptions(devices=devices, **options)
  attend = program.context()
  mesh, batch, tokens = attend.mesh, program.batch, program.tokens
  assert isinstance(mesh, Mesh)
  model = program.form(mesh, program.dtype)
  over = P(attend.batch_axes(batch) or None, attend.axis)
  ids = _spec(mesh, (batch, tokens), over)
  work = work_profile.profile(model, tokens)
  flops = work.token_s * tokens + work.pair_s * tokens * (tokens + 1) / 2
  kind = kind.resident("reading a prompt")
  empty = model.init_cache_spec(
    batch, tokens, sharding=attend, kind=kind, placement=cache_placement
  )
  trips = _trips(program.named, mesh, attend.axis, program.tokens, True)
  share: dict[str, float] = program.tile_share(
    mesh, attend.axis, True, _reach(model)
  )
  pos, context = None, attend
  if chunk is not None:
    share = {}
    chunk = positive_int("chunk", chunk)
    context = CachedAttention(mesh=mesh, axis=attend.axis, replicated=False)
    pos = ids = _spec(mesh, (batch, chunk), over)
    flops = chunk * (work.token_s + work.pair_s * (tokens - chunk / 2))
    trips = empty.tile_trips("tpu")
  rows = (_spec(mesh, (batch,)), _spec(mesh))
  return program.built(
    mesh,
    reading.read,
    (model, context, ids, pos, ids, empty, *rows),
    batch * (flops + _head_flops(model)),
    trips,
    what="prefill",
    cache=str(kind),
    cache_bytes=_cache_bytes(empty),
    # Keys of a chunk's prompt are read, those of a whole prompt written.
    least_bytes=step_bytes.weight_bytes(model, batch * (chunk or tokens))
    + bytes_each(empty),
    **share,
    **program.facts(model),
  )


PAIRS = ("split", "summed", "one")


def pair(
  devices: Sequence[Any], *, how_summed: str = "split", **options: Any
) -> Built:
  """Builds a program that reads two prompts, each into a separate cache.

  Args:
    devices: Devices of the slice.
    how_summed: Sums over the mesh axis "model": "split", by sends, as
      `infer.paired_prefill` does; "summed", as the compiler does; "one" prompt
      alone, as the compiler does.
    options: Options of `ModelOptions`; the mesh has only the axis "model".

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
  """
  one_of("how_summed", how_summed, PAIRS)
  defaults: dict[str, Any] = {"mesh": [["model", -1]], "strategy": "plain"}
  program = ModelOptions(devices=devices, **defaults | options)
  plain = program.context()
  mesh = plain.mesh
  assert isinstance(mesh, Mesh)
  model = program.form(mesh, program.dtype)
  paired.check_pair(model, mesh, plain.axis)
  attend = paired.split_sums(plain) if how_summed == "split" else plain
  row = functools.partial(_spec, mesh)
  shape = (program.batch, program.tokens)
  call = paired.PairedCall(row(shape), row(shape), row(shape[:1]), row())
  empty = model.init_cache_spec(*shape, sharding=attend)
  num_prompts = 1 if how_summed == "one" else 2
  work = work_profile.profile(model, program.tokens)
  flops = work.token_s * program.tokens
  flops += work.pair_s * program.tokens * (program.tokens + 1) / 2
  return program.built(
    mesh,
    paired.read_pair,
    (model, attend, (call,) * num_prompts, (empty,) * num_prompts),
    num_prompts * program.batch * (flops + _head_flops(model)),
    _trips(program.named, mesh, None, program.tokens, True),
    what=f"pair, {how_summed}",
    least_bytes=step_bytes.weight_bytes(model, program.batch * program.tokens)
    + num_prompts * bytes_each(empty),
    **program.facts(model),
  )


def decode(
  devices: Sequence[Any],
  *,
  cache: str = "dense",
  cache_placement: str | None = None,
  **options: Any,
) -> Built:
  """Builds a decode step after a cache of `tokens`, sharded by sequence.

  Args:
    devices: Devices of the slice.
    cache: Kind of the cache, as `kv.kind_text` parses it.
    cache_placement: Placement of the layers' keys, see
      `Transformer.init_cache`.
    options: Options of `ModelOptions`, except those of attention and
      feedforward.

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
    TypeError: If an option is of attention or feedforward, which decoding
      ignores.
  """
  program, call = _with_cache(devices, cache, cache_placement, options)
  mesh = call.mesh
  return program.built(
    mesh,
    decoding.step,
    (*call.model, call.sampler, call.cache, call.state,
     _spec(mesh, (4,)), _spec(mesh)),
    call.flops(1),
    call.cache.tile_trips("tpu"),
    what="decode",
    **call.facts,
    **call.bytes(1),
  )  # fmt: skip


def verify(
  devices: Sequence[Any],
  *,
  cache: str = "dense",
  cache_placement: str | None = None,
  drafted: int = 8,
  tree: bool = False,
  **options: Any,
) -> Built:
  """Builds a check of drafted tokens after a cache of `tokens`.

  Args:
    devices: Devices of the slice.
    cache: Kind of the cache, as `kv.kind_text` parses it.
    cache_placement: Placement of the layers' keys, see
      `Transformer.init_cache`.
    drafted: Number of drafted tokens of a row.
    tree: Whether they are a tree rather than a chain.
    options: Options of `ModelOptions`, except those of attention and
      feedforward.

  Raises:
    RingjaxError: If an option is out of range or conflicts with another.
    TypeError: If an option is of attention or feedforward, which drafts
      ignore.
  """
  positive_int("drafted", drafted)
  program, call = _with_cache(devices, cache, cache_placement, options)
  mesh, batch = call.mesh, program.batch
  ids = _spec(mesh, (batch, drafted))
  draft = Draft(ids, _spec(mesh, (batch,)), ids if tree else None)
  return program.built(
    mesh,
    rounds.verify,
    (*call.model, "match", call.sampler, call.cache, call.state, draft,
     _spec(mesh, (batch,)), _spec(mesh, (4,)), _spec(mesh)),
    call.flops(drafted + 1),
    call.cache.tile_trips("tpu"),
    what="verify",
    drafted=drafted,
    **call.facts,
    **call.bytes(drafted + 1),
  )  # fmt: skip


# ---------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CallWithCache:
  """Arguments of a call of few tokens over a filled cache.

  Attributes:
    mesh: Device mesh.
    model: The model's shapes and its sharding context.
    sampler: Sampler of the tokens.
    cache: Cache of the call.
    state: Decode state of the rows.
    facts: Entries of the report.
    row_flops: FLOPs of a row's single token.
    rows: Number of rows.
  """

  mesh: Mesh
  model: tuple[Transformer, CachedAttention]
  sampler: Any
  cache: Any
  state: decoding.DecodeState
  facts: Mapping[str, Any]
  row_flops: float
  rows: int

  def flops(self, tokens: int) -> float:
    """FLOPs of a call with so many tokens of each row."""
    return self.rows * tokens * self.row_flops

  def bytes(self, tokens: int) -> dict[str, float]:
    """Entries of the report about bytes, with so many tokens of each row."""
    model, count = self.model[0], self.rows * tokens
    weights = step_bytes.weight_bytes(model, count)
    return {
      "least_bytes": weights + bytes_each(self.cache),
      "filled_blocks": step_bytes.filled_blocks(model, count),
      **({} if _reach(model) is not None else {"tile_share": 1.0}),
    }


def _with_cache(
  devices: Sequence[Any],
  cache: str,
  cache_placement: str | None,
  options: Mapping[str, Any],
) -> tuple[ModelOptions, _CallWithCache]:
  """Options and arguments of a call over a cache of `tokens`."""
  kind = kind_text.parse(cache, "cache")
  program = ModelOptions(
    devices=devices, strategy="resident", q_block=None, kv_block=None,
    local="best", block=1, **options,
  )  # fmt: skip
  mesh, axis = program.placed()
  model = program.form(mesh, program.dtype)
  attend = CachedAttention(mesh=mesh, axis=axis)
  sampler = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), Greedy()
  )
  row = functools.partial(_spec, mesh, (program.batch,))
  state = decoding.DecodeState(
    token=row(), pos=row(), done=row(dtype=jnp.bool_), seen=None
  )
  work = work_profile.profile(model, program.tokens)
  kind = kind.keeping_all("a plan")
  cache_spec = model.init_cache_spec(
    program.batch,
    program.tokens,
    sharding=attend,
    kind=kind,
    placement=cache_placement,
  )
  call = _CallWithCache(
    mesh=mesh,
    model=(model, attend),
    sampler=sampler,
    cache=cache_spec,
    state=state,
    facts={
      "cache": str(kind),
      "cache_bytes": _cache_bytes(cache_spec),
      **program.facts(model),
    },
    row_flops=work.token_s + work.pair_s * program.tokens + _head_flops(model),
    rows=program.batch,
  )
  return program, call


def _spec(
  mesh: Mesh,
  shape: Sequence[int] = (),
  over: P | None = None,
  dtype: DTypeLike = jnp.int32,
) -> ArrayLeaf:
  """Shape and sharding of an argument, replicated by default."""
  sharding = NamedSharding(mesh, P() if over is None else over)
  return leaf(jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding))


def _mesh(
  devices: Sequence[Any], pairs: Sequence[Sequence[Any]], order: str
) -> tuple[Mesh, str | None]:
  """The mesh, and its sequence axis if that has several shards."""
  one_of("order", order, ORDERS)
  names = tuple(str(name) for name, _ in pairs)
  sizes = tuple(int(size) for _, size in pairs)
  ring = "seq" if "seq" in names else names[-1]
  mesh = make_mesh(sizes, names, devices=devices, ring=ring)
  if order == "listed":
    listed = np.empty(mesh.devices.size, dtype=object)
    listed[:] = list(devices)[: mesh.devices.size]
    mesh = Mesh(
      listed.reshape(mesh.devices.shape),
      names,
      axis_types=(AxisType.Auto,) * len(names),
    )
  return mesh, "seq" if mesh.shape.get("seq", 1) > 1 else None


def _check_counts(
  mesh: Mesh, axis: str | None, tokens: int, **counts: int
) -> None:
  """Refuses counts below 1, and tokens that shards do not divide."""
  for name, count in (("tokens", tokens), *counts.items()):
    positive_int(name, count)
  shards = 1 if axis is None else mesh.shape[axis]
  if tokens % shards:
    raise ShapeError(
      "tokens",
      tokens,
      f"a multiple of the {shards} shards",
      f"round it up to {-(-tokens // shards) * shards}",
    )


def _head_flops(form: Transformer) -> float:
  """FLOPs of the logits of one token."""
  return 2.0 * form.config.vocab * form.config.embed


def _reach(form: Transformer) -> int | None:
  """Tokens before it that a query of a windowed layer sees; None without."""
  reaches = (layer.attention.reach for layer in form.config.layers)
  return next((reach for reach in reaches if reach is not None), None)


def _train_bytes(
  program: ModelOptions, form: Transformer, state: PyTree, devices: int
) -> float:
  """Bytes of a device that a training step must read or write.

  Weights and moments, without those in the host's memory, are read and written,
  and so is what any rematerialization keeps: the input of each layer.
  """
  config = form.config
  # None stands for float32, which is not NumPy's default.
  dtype = recipes.dtype_of(program.dtype) or np.float32
  width = np.dtype(dtype).itemsize
  inputs = program.batch * program.tokens * config.embed * len(config.layers)
  return 2.0 * (bytes_each(state) + inputs * width / devices)


def _host_bytes(x: PyTree) -> int:
  """Bytes of one device's shards of arrays in host memory."""
  return sum(
    math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    for a in jax.tree.leaves(x)
    if a.sharding is not None and a.sharding.memory_kind == HOST
  )


def _cache_bytes(cache: Any) -> dict[str, int]:
  """Bytes of one device's part of a cache, by memory."""
  return {"device": bytes_each(cache), "host": _host_bytes(cache)}


def _trips(
  named: NamedStrategy, mesh: Mesh, axis: str | None, tokens: int, causal: bool
) -> list[tuple[str, float]]:
  """The trip counts of the loops over a row's tiles, forward and backward.

  Tiles are counted by the layout and the mask, for the shard that has most in
  each hop, as the others wait for it. There are two loops, over tiles with and
  without a mask, which are assumed to have equal trip counts. A turn of the
  second computes several tiles, see `joined`; forward it has as many fewer
  rows, backward both walk down the same column of keys.
  """
  shards = 1 if axis is None else mesh.shape[axis]
  local = -(-tokens // shards)
  rows, columns = named.blocks(local, local)
  busy = _busy_share(named, shards, local, (rows, columns), causal)
  keys = local if named.visits else local * shards
  forward = busy * -(-keys // columns) / 2
  down = -(-local // rows)
  backward = busy * down / (1 + joined(down, rows))
  return [("rematted", forward), ("transpose", backward), ("", forward)]


def _busy_share(
  named: NamedStrategy,
  shards: int,
  local: int,
  tile: tuple[int, int],
  causal: bool,
) -> float:
  """Share of the tiles of a hop that the shard with most of them computes."""
  # Strategies that gather keys make one call with all keys.
  counted_shards = min(shards, _COUNTED_SHARDS)
  counted_tokens = min(local, _COUNTED_TOKENS)
  rows, columns = tile
  mask = Causal() if causal else Everything()
  counts = tile_counts(
    named.layout,
    mask,
    counted_shards,
    counted_shards * counted_tokens,
    min(rows, counted_tokens),
    min(columns, counted_tokens),
  )
  cells = -(-counted_tokens // min(rows, counted_tokens)) * -(
    -counted_tokens // min(columns, counted_tokens)
  )
  if named.visits:
    return float(np.max(counts, axis=1).mean()) / cells
  # All keys at once: the busiest shard in total, not in each hop.
  return float(counts.sum(axis=0).max()) / (cells * counted_shards)

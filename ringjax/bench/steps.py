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

from ringjax.bench.ways import NamedStrategy, way
from ringjax.checks import one_of, positive_int
from ringjax.errors import ShapeError
from ringjax.infer import decode as decoding
from ringjax.infer import paired
from ringjax.infer import prefill as reading
from ringjax.infer.sampling import Greedy
from ringjax.kv import kind_text
from ringjax.kv.base import HOST, bytes_each
from ringjax.kv.cache import KVCache, LayerCacheSpec, LayerKV
from ringjax.kv.layer_offload import OffloadedCache
from ringjax.kv.tiered import TieredCache
from ringjax.models import work_profile
from ringjax.models.checkpoint import abstract
from ringjax.models.presets import preset
from ringjax.models.streaming import abstract_placed
from ringjax.models.transformer import Transformer
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import joined
from ringjax.ops.attention.code_format import token_axis
from ringjax.ops.attention.schedule import tile_counts
from ringjax.ops.attention.views import ContiguousView, tile_slots
from ringjax.ops.mask import Causal, Everything, Window
from ringjax.parallel.mesh import make_mesh
from ringjax.plan.aot import Built
from ringjax.plan.hlo import Trips
from ringjax.train import batch as batches
from ringjax.train import recipe as recipes
from ringjax.train import remat as remats
from ringjax.train import step as training

ORDERS = ("ring", "listed")
WHAT = ("forward", "backward")
# Shards and local tokens whose tiles are counted; more of them look the same.
_COUNTED_SHARDS, _COUNTED_TOKENS = 8, 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOptions:
  """The options that all programs share.

  Attributes:
    devices: of the slice.
    tokens: T, of a row.
    mesh: (axis, size) pairs; -1 takes what is left.
    batch: B, rows of a step.
    dtype: of the computation.
    order: "ring": devices as `rj.make_mesh` orders them; "listed": in their
      own order, to see what the ring's is worth.
    strategy: of attention, by its name, see `ways.NAMES`.
    q_block: queries of a tile, for local algorithms with tiles.
    kv_block: keys of a tile.
    local: "best", the kernel of the slice's chips, or "blockwise".

  Raises:
    RingjaxError: an option may not have its value, or does not fit another.
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

  def placed(self, **counts: int) -> tuple[Mesh, str | None]:
    """The mesh and its axis of the sequence, which fit the tokens."""
    made, axis = _mesh(self.devices, self.mesh, self.order)
    _whole(made, axis, self.tokens, batch=self.batch, **counts)
    return made, axis

  def built(
    self,
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    flops: float,
    trips: Trips | float,
    **facts: Any,
  ) -> Built:
    """A program that takes so many FLOPs in all."""
    facts = {
      "mesh": dict(mesh.shape),
      "tokens": self.tokens,
      "batch": self.batch,
      "strategy": self.strategy,
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
    model: the name of a preset, or what a config.json holds.
    shard: the mesh axis over which weights and moments are cut along the
      model's width; None: as `Rules()` says.
    layers: another number of layers than the model's.
    block: tokens of a step of the feedforward.
    weights: where the layers' weights are, "host" or as "device=.5,host=.5";
      None: on the devices.
  """

  model: str | Mapping[str, Any]
  shard: str | None = "seq"
  layers: int | None = None
  block: int = 2048
  weights: str | None = None

  def form(self, mesh: Mesh, dtype: str) -> Transformer:
    """The model's shapes, cut along its width over the mesh axis `shard`."""
    given = self.model
    config = preset(given) if isinstance(given, str) else dict(given)
    if self.layers is not None:
      config["num_hidden_layers"] = positive_int("layers", self.layers)
    rules = None if self.shard is None else Rules(embed=self.shard)
    made = abstract(config, dtype=dtype, mesh=mesh, rules=rules)
    if self.weights is None:
      return made
    return abstract_placed(made, self.weights, mesh)

  def facts(self, form: Transformer) -> dict[str, Any]:
    """What is reported of the model."""
    named = isinstance(self.model, str)
    return {
      "model": self.model if named else form.config.family,
      "layers": len(form.config.layers),
      "parameters": sum(int(x.size) for x in jax.tree.leaves(form)),
      "host_bytes": _host_bytes(form),
    }

  def context(
    self, remat: Callable[..., bool] | None = None, accumulate: int = 1
  ) -> ContextParallel:
    """How the model's tokens are sharded, checked against the batch."""
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
  """One call of attention over the mesh's sequence axis.

  Args:
    devices: of the slice.
    what: "forward", or "backward": the output's sum and its gradients.
    heads: N.
    kv_heads: K.
    head_dim: H.
    causal: whether queries see no later keys.
    window: how many keys a query sees; None: all.
    packed: whether tokens have document numbers, so that queries see keys of
      their own document only.
    options: of `ProgramOptions`.

  Raises:
    RingjaxError: an option may not have its value, or does not fit another.
  """
  one_of("what", what, WHAT)
  program = ProgramOptions(devices=devices, **options)
  made, axis = program.placed()
  batch, tokens = program.batch, program.tokens
  kind, how = recipes.dtype_of(program.dtype), program.named
  context = ContextParallel(mesh=made)
  shares = context.shares(batch, heads, kv_heads)
  over = P(context.batch_axes(batch) or None, axis)
  like = lambda n: _like(made, (batch, tokens, n, head_dim), over, kind)
  mask = None if window is None else Window(positive_int("window", window))
  ids = _like(made, (batch, tokens), over)

  def forward(q: Any, k: Any, v: Any, segments: Any = None) -> jax.Array:
    return dot_product_attention(
      q, k, v, mask=mask, mesh=made, axis=axis, layout=how.layout,
      strategy=how.strategy, is_causal=causal, q_segment_ids=segments, **shares,
    )  # fmt: skip

  def backward(*x: jax.Array) -> Any:
    total = lambda *x: jnp.sum(forward(*x).astype(jnp.float32))
    return jax.value_and_grad(total, (0, 1, 2))(*x)

  pairs = batch * tokens * (tokens + 1) / 2 if causal else batch * tokens**2
  flops = 4.0 * heads * head_dim * pairs
  return program.built(
    made,
    jax.jit(forward if what == "forward" else backward),
    (*map(like, (heads, kv_heads, kv_heads)), *[ids] * packed),
    flops * (1.0 if what == "forward" else 3.5),
    _trips(how, made, axis, tokens, causal),
    what=f"attention {what}",
  )


def train(
  devices: Sequence[Any],
  *,
  accumulate: int = 1,
  remat: str = "attention",
  optimizer: str = "adamw",
  loss_block: int = 1024,
  **options: Any,
) -> Built:
  """A step of training: float32 weights and moments, gradients, an update.

  Args:
    devices: of the slice.
    accumulate: micro-batches.
    remat: what is kept of a layer, of `train.remat.POLICIES`.
    optimizer: of `train.recipe.OPTIMIZERS`.
    loss_block: tokens of a step of the head.
    options: of `ModelOptions`.

  Raises:
    RingjaxError: an option may not have its value, or does not fit another.
  """
  one_of("remat", remat, remats.POLICIES)
  how = ModelOptions(devices=devices, **options)
  attend = how.context(remats.policy(remat), accumulate)
  made = attend.mesh
  assert isinstance(made, Mesh)
  form = how.form(made, "float32")
  update = recipes.Optimizer(name=optimizer).build(1000)
  objective = training.Objective(
    block=positive_int("loss_block", loss_block),
    dtype=recipes.dtype_of(how.dtype),
  )
  each = how.batch // accumulate
  over = P(None, attend.batch_axes(each) or None, attend.axis)
  row = functools.partial(_like, made, (accumulate, each, how.tokens), over)
  batch = batches.Batch(row(), row(), row(jnp.float32))
  return how.built(
    made,
    training.make_step(update, attend, objective),
    (training.form(update, form, made), None, batch),
    recipes.flops(form, how.tokens) * how.batch * how.tokens,
    _trips(how.named, made, attend.axis, how.tokens, True),
    what="train",
    remat=remat,
    optimizer=optimizer,
    **how.facts(form),
  )


def prefill(
  devices: Sequence[Any],
  *,
  cache: str = "dense",
  cache_placement: str | None = None,
  chunk: int | None = None,
  **options: Any,
) -> Built:
  """Reading a prompt of `tokens` into an empty cache of as many.

  Args:
    devices: of the slice.
    cache: the kind of the cache, as `kv.kind_text` reads it.
    cache_placement: where layers' keys are, see `Transformer.init_cache`.
    chunk: reads the last so many tokens, behind the others; None: all.
    options: of `ModelOptions`.

  Raises:
    RingjaxError: an option may not have its value, or does not fit another.
  """
  kind = kind_text.parse(cache, "cache")
  how = ModelOptions(devices=devices, **options)
  attend = how.context()
  made, batch, tokens = attend.mesh, how.batch, how.tokens
  assert isinstance(made, Mesh)
  form = how.form(made, how.dtype)
  over = P(attend.batch_axes(batch) or None, attend.axis)
  ids = _like(made, (batch, tokens), over)
  work = work_profile.profile(form, tokens)
  flops = work.token_s * tokens + work.pair_s * tokens * (tokens + 1) / 2
  kind = kind.resident("reading a prompt")
  empty = form.init_cache_spec(
    batch, tokens, sharding=attend, kind=kind, placement=cache_placement
  )
  trips: Any = _trips(how.named, made, attend.axis, how.tokens, True)
  pos, context = None, attend
  if chunk is not None:
    chunk = positive_int("chunk", chunk)
    context = CachedAttention(mesh=made, axis=attend.axis, replicated=False)
    pos = ids = _like(made, (batch, chunk), over)
    flops = chunk * (work.token_s + work.pair_s * (tokens - chunk / 2))
    trips = _cache_tiles(empty)
  rows = (_like(made, (batch,)), _like(made))
  return how.built(
    made,
    reading.read,
    (form, context, ids, pos, ids, empty, *rows),
    batch * (flops + _head_flops(form)),
    trips,
    what="prefill",
    cache=str(kind),
    cache_bytes=_cache_bytes(empty),
    **how.facts(form),
  )


PAIRS = ("split", "summed", "one")


def pair(
  devices: Sequence[Any], *, how_summed: str = "split", **options: Any
) -> Built:
  """Two prompts of `tokens` read in one program, each into its own cache.

  Args:
    devices: of the slice.
    how_summed: over the mesh's axis "model": "split", by sends, as
      `infer.paired_prefill` does; "summed", as the compiler does; "one" prompt
      alone, as the compiler does.
    options: of `ModelOptions`; the mesh has the axis "model" alone.

  Raises:
    RingjaxError: an option may not have its value, or does not fit another.
  """
  one_of("how_summed", how_summed, PAIRS)
  given: dict[str, Any] = {"mesh": [["model", -1]], "strategy": "plain"}
  how = ModelOptions(devices=devices, **given | options)
  plain = how.context()
  made = plain.mesh
  assert isinstance(made, Mesh)
  form = how.form(made, how.dtype)
  paired.check_pair(form, made, plain.axis)
  attend = paired.split_sums(plain) if how_summed == "split" else plain
  row = functools.partial(_like, made)
  shape = (how.batch, how.tokens)
  call = paired.PairedCall(row(shape), row(shape), row(shape[:1]), row())
  empty = form.init_cache_spec(*shape, sharding=attend)
  many = 1 if how_summed == "one" else 2
  work = work_profile.profile(form, how.tokens)
  flops = work.token_s * how.tokens
  flops += work.pair_s * how.tokens * (how.tokens + 1) / 2
  return how.built(
    made,
    paired.read_pair,
    (form, attend, (call,) * many, (empty,) * many),
    many * how.batch * (flops + _head_flops(form)),
    _trips(how.named, made, None, how.tokens, True),
    what=f"pair, {how_summed}",
    **how.facts(form),
  )


def decode(
  devices: Sequence[Any],
  *,
  cache: str = "dense",
  cache_placement: str | None = None,
  **options: Any,
) -> Built:
  """One more token behind a cache of `tokens`, sharded over the sequence.

  Args:
    devices: of the slice.
    cache: the kind of the cache, as `kv.kind_text` reads it.
    cache_placement: where layers' keys are, see `Transformer.init_cache`.
    options: of `ModelOptions`, but for those of attention and feedforward.

  Raises:
    RingjaxError: an option may not have its value, or does not fit another.
    TypeError: an option of attention or feedforward, which decoding ignores.
  """
  kind = kind_text.parse(cache, "cache")
  how = ModelOptions(
    devices=devices, strategy="resident", q_block=None, kv_block=None,
    local="best", block=1, **options,
  )  # fmt: skip
  made, axis = how.placed()
  form = how.form(made, how.dtype)
  attend = CachedAttention(mesh=made, axis=axis)
  sampler = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), Greedy()
  )
  row = functools.partial(_like, made, (how.batch,))
  state = decoding.DecodeState(
    token=row(), pos=row(), done=row(dtype=jnp.bool_), seen=None
  )
  work = work_profile.profile(form, how.tokens)
  flops = work.token_s + work.pair_s * how.tokens + _head_flops(form)
  kind = kind.keeping_all("a plan")
  held = form.init_cache_spec(
    how.batch,
    how.tokens,
    sharding=attend,
    kind=kind,
    placement=cache_placement,
  )
  rest = (held, state, _like(made, (4,)), _like(made))
  return how.built(
    made,
    decoding.step,
    (form, attend, sampler, *rest),
    how.batch * flops,
    _cache_tiles(held),
    what="decode",
    cache=str(kind),
    cache_bytes=_cache_bytes(held),
    **how.facts(form),
  )


# ---------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------


def _like(
  mesh: Mesh,
  shape: Sequence[int] = (),
  over: P | None = None,
  dtype: DTypeLike = jnp.int32,
) -> Any:
  """An argument's shape and sharding, replicated by default."""
  sharding = NamedSharding(mesh, P() if over is None else over)
  return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _mesh(
  devices: Sequence[Any], pairs: Sequence[Sequence[Any]], order: str
) -> tuple[Mesh, str | None]:
  """The mesh, and its axis of the sequence where that has several shards."""
  one_of("order", order, ORDERS)
  names = tuple(str(name) for name, _ in pairs)
  sizes = tuple(int(size) for _, size in pairs)
  ring = "seq" if "seq" in names else names[-1]
  made = make_mesh(sizes, names, devices=devices, ring=ring)
  if order == "listed":
    listed = np.empty(made.devices.size, dtype=object)
    listed[:] = list(devices)[: made.devices.size]
    made = Mesh(
      listed.reshape(made.devices.shape),
      names,
      axis_types=(AxisType.Auto,) * len(names),
    )
  return made, "seq" if made.shape.get("seq", 1) > 1 else None


def _whole(mesh: Mesh, axis: str | None, tokens: int, **counts: int) -> None:
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
  """Of the logits of one token."""
  return 2.0 * form.config.vocab * form.config.embed


def _host_bytes(x: Any) -> int:
  """Bytes of arrays in the host's memory, on a device's part of it."""
  return sum(
    math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    for a in jax.tree.leaves(x)
    if a.sharding is not None and a.sharding.memory_kind == HOST
  )


def _cache_bytes(cache: Any) -> dict[str, int]:
  """Bytes of a device's part of a cache, by memory."""
  return {"device": bytes_each(cache), "host": _host_bytes(cache)}


def _cache_tiles(cache: KVCache | TieredCache | OffloadedCache) -> float:
  """Tiles of a full cache that a query reads, in each of two loops.

  Of a part in host memory, turns of the two loops of `fold_tiles`, of two
  blocks and of one; a kernel reads what is on the device.
  """
  if isinstance(cache, TieredCache):
    return (cache.held.capacity / cache.kind.room / cache.shards - 1) / 3
  if isinstance(cache, OffloadedCache):
    # As they are read, on the devices.
    cache = KVCache.spec(
      cache.shapes, cache.batch, cache.capacity, cache.dtype, kind=cache.kind,
      mesh=cache.mesh, axis=cache.axis, platform="tpu",
    )  # fmt: skip
  most = 0
  for slots, of in zip(cache.slots, cache.shapes, strict=True):
    if isinstance(slots, LayerKV):
      assert isinstance(of, LayerCacheSpec)
      length = slots.k.shape[token_axis(slots.k)] // cache.shards
      shape = (*slots.k.shape[:3], length, of.key)
      # As tiles are once they are decoded.
      mine: Any = jax.ShapeDtypeStruct(shape, cache.dtype)
      stored = ContiguousView(mine, mine, cache.at, jnp.int32(0))
      most = max(most, -(-shape[3] // tile_slots(stored, "tpu")))
  return most / 2


def _trips(
  how: NamedStrategy, mesh: Mesh, axis: str | None, tokens: int, causal: bool
) -> list[tuple[str, float]]:
  """The trip counts of the loops over a row's tiles, forward and backward.

  Tiles are counted by the layout and the mask, of the shard that has most in
  each hop, for which the others wait. There are two loops, of tiles with and
  without a mask, and they are taken to turn equally often. A turn of the second
  computes several tiles, see `joined`; forward it has as many fewer rows,
  backward both walk down the same column of keys.
  """
  shards = 1 if axis is None else mesh.shape[axis]
  local = -(-tokens // shards)
  # One call has all keys, and not a shard's, where keys are gathered.
  few = min(shards, _COUNTED_SHARDS)
  short = min(local, _COUNTED_TOKENS)
  rows, columns = how.blocks(local, local)
  mask = Causal() if causal else Everything()
  counts = tile_counts(
    how.layout, mask, few, few * short, min(rows, short), min(columns, short)
  )
  cells = -(-short // min(rows, short)) * -(-short // min(columns, short))
  busy = float(np.max(counts, axis=1).mean()) / cells
  keys = local if how.visits else local * shards
  if not how.visits:
    # All keys at once: the shards' mean, not each hop's slowest.
    busy = float(counts.sum(axis=0).max()) / (cells * few)
  forward = busy * -(-keys // columns) / 2
  down = -(-local // rows)
  backward = busy * down / (1 + joined(down, rows))
  return [("rematted", forward), ("transpose", backward), ("", forward)]

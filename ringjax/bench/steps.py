"""Builds what a run would run, of shapes alone: to compile it, not to run it.

Law: the programs are those of `rj.ring_attention` and its sisters, of
`train.step.make_step`, `infer.prefill.read` and `infer.decode.step`, with
their own shardings and donations; nothing here computes otherwise. Weights,
caches and tokens are shapes.

Builders for `rj.plan.aot`: each is called with the devices of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench.ways import Way, way
from ringjax.checks import positive_int
from ringjax.errors import OptionError, ShapeError
from ringjax.infer import decode as decoding
from ringjax.infer import prefill as reading
from ringjax.infer.sampling import Greedy
from ringjax.kv.cache import KVCache, LayerKV
from ringjax.models import work_profile
from ringjax.models.checkpoint import abstract
from ringjax.models.presets import preset
from ringjax.models.transformer import Transformer
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import joined
from ringjax.ops.attention.schedule import tile_counts
from ringjax.ops.attention.views import ContiguousView, tile_slots
from ringjax.ops.mask import Causal, Everything, Window
from ringjax.parallel.mesh import make_mesh
from ringjax.plan.aot import Built
from ringjax.train import batch as batches
from ringjax.train import recipe as recipes
from ringjax.train import remat as remats
from ringjax.train import step as steps

ORDERS = ("ring", "listed")
# Shards and local tokens whose tiles are counted; more of them look the same.
_COUNTED_SHARDS, _COUNTED_TOKENS = 8, 16384


def attention(
  devices: Sequence[Any],
  *,
  tokens: int,
  mesh: Sequence[Sequence[Any]] = (("seq", -1),),
  strategy: str = "striped",
  what: str = "forward",
  batch: int = 1,
  heads: int = 8,
  kv_heads: int = 8,
  head_dim: int = 128,
  causal: bool = True,
  window: int | None = None,
  packed: bool = False,
  dtype: str = "bfloat16",
  order: str = "ring",
  q_block: int | None = None,
  kv_block: int | None = None,
  local: str = "best",
) -> Built:
  """One call of attention over the mesh's sequence axis.

  Args:
    devices: of the slice.
    tokens: T, of the whole sequence.
    mesh: (axis, size) pairs; -1 takes what is left.
    strategy: by its name, see `ways.NAMES`.
    what: "forward", or "backward": the output's sum and its gradients.
    batch: B.
    heads: N.
    kv_heads: K.
    head_dim: H.
    causal: whether queries see no later keys.
    window: how many keys a query sees; None: all.
    packed: whether documents are given, which see each other not.
    dtype: of the operands.
    order: "ring": devices as `rj.make_mesh` orders them; "listed": as they
      come, which is what such a mesh is for.
    q_block: queries of a tile, for local algorithms with tiles.
    kv_block: keys of a tile.
    local: "best", the kernel of the slice's chips, or "blockwise".

  Raises:
    OptionError: options that are none.
  """
  _choose("what", what, ("forward", "backward"))
  made, axis = _mesh(devices, mesh, order)
  _whole(made, axis, tokens, batch=batch)
  kind = recipes.dtype_of(dtype)
  how = way(strategy, q_block, kv_block, local)
  shares = ContextParallel(mesh=made).shares(batch, heads, kv_heads)
  over = P(_batch_axes(made, batch), axis)
  like = lambda n: jax.ShapeDtypeStruct(
    (batch, tokens, n, head_dim), kind, sharding=NamedSharding(made, over)
  )

  mask = None if window is None else Window(positive_int("window", window))
  ids = jax.ShapeDtypeStruct(
    (batch, tokens), jnp.int32, sharding=NamedSharding(made, over)
  )

  def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Any = None
  ) -> jax.Array:
    return dot_product_attention(
      q, k, v, mask=mask, mesh=made, axis=axis, layout=how.layout,
      strategy=how.strategy, is_causal=causal, q_segment_ids=segments, **shares,
    )  # fmt: skip

  def backward(*x: jax.Array) -> Any:
    total = lambda *x: jnp.sum(forward(*x).astype(jnp.float32))
    return jax.value_and_grad(total, (0, 1, 2))(*x)

  function = forward if what == "forward" else backward
  pairs = batch * tokens * (tokens + 1) / 2 if causal else batch * tokens**2
  flops = 4.0 * heads * head_dim * pairs
  return Built(
    function=jax.jit(function),
    arguments=(
      like(heads),
      like(kv_heads),
      like(kv_heads),
      *[ids] * packed,
    ),
    mesh=made,
    facts={
      **_facts(made, tokens, batch, strategy),
      "what": f"attention {what}",
      "model_flops": flops * (1.0 if what == "forward" else 3.5) / made.size,
    },
    data_trips=_trips(how, made, axis, tokens, causal),
  )


def train(
  devices: Sequence[Any],
  *,
  model: str | Mapping[str, Any],
  tokens: int,
  mesh: Sequence[Sequence[Any]] = (("seq", -1),),
  strategy: str = "striped",
  batch: int = 1,
  accumulate: int = 1,
  remat: str = "attention",
  optimizer: str = "adamw",
  shard: str | None = "seq",
  dtype: str = "bfloat16",
  layers: int | None = None,
  block: int = 2048,
  loss_block: int = 1024,
  q_block: int | None = None,
  kv_block: int | None = None,
  order: str = "ring",
) -> Built:
  """A step of training: float32 weights and moments, gradients, an update.

  Args:
    devices: of the slice.
    model: the name of a preset, or what a config.json holds.
    tokens: T, of a row.
    mesh: (axis, size) pairs; -1 takes what is left.
    strategy: of attention, by its name, see `ways.NAMES`.
    batch: B, rows of a step.
    accumulate: micro-batches.
    remat: what is kept of a layer, of `train.remat.POLICIES`.
    optimizer: of `train.recipe.OPTIMIZERS`.
    shard: the mesh axis over which weights and moments are cut along the
      model's width; None: as `Rules()` says.
    dtype: of the computation.
    layers: another number of layers than the model's.
    block: tokens of a step of the feedforward.
    loss_block: tokens of a step of the head.
    q_block: queries of a tile of attention.
    kv_block: keys of a tile.
    order: see `attention`.

  Raises:
    RingjaxError: options that are none, or do not go together.
  """
  made, axis = _mesh(devices, mesh, order)
  _whole(made, axis, tokens, batch=batch, accumulate=accumulate)
  _choose("remat", remat, remats.POLICIES)
  how = way(strategy, q_block, kv_block)
  form = _model(model, "float32", made, shard, layers)
  attend = ContextParallel(
    mesh=made,
    axis=axis,
    layout=how.layout,
    strategy=how.strategy,
    block=positive_int("block", block),
    remat=remats.policy(remat),
  )
  batches.check(batch, tokens, attend, accumulate)
  update = recipes.Optimizer(name=optimizer).build(1000)
  objective = steps.Objective(
    block=positive_int("loss_block", loss_block),
    dtype=recipes.dtype_of(dtype),
  )
  each = batch // accumulate
  over = NamedSharding(made, P(None, attend.batch_axes(each) or None, axis))
  row = lambda kind: jax.ShapeDtypeStruct(
    (accumulate, each, tokens), kind, sharding=over
  )
  ids = row(jnp.int32)
  flops = recipes.flops(form, tokens) * batch * tokens
  return Built(
    function=steps.make_step(update, attend, objective),
    arguments=(
      steps.form(update, form, made),
      None,
      batches.Batch(ids, ids, row(jnp.float32)),
    ),
    mesh=made,
    facts={
      **_facts(made, tokens, batch, strategy),
      "what": "train",
      "remat": remat,
      "optimizer": optimizer,
      **_of_model(form, model),
      "model_flops": flops / made.size,
    },
    data_trips=_trips(how, made, axis, tokens, True),
  )


def prefill(
  devices: Sequence[Any],
  *,
  model: str | Mapping[str, Any],
  tokens: int,
  mesh: Sequence[Sequence[Any]] = (("seq", -1),),
  strategy: str = "striped",
  batch: int = 1,
  shard: str | None = "seq",
  dtype: str = "bfloat16",
  layers: int | None = None,
  block: int = 2048,
  q_block: int | None = None,
  kv_block: int | None = None,
  order: str = "ring",
) -> Built:
  """Reading a prompt of `tokens` into an empty cache of as many.

  For the arguments see `train`.

  Raises:
    RingjaxError: options that are none, or do not go together.
  """
  made, axis = _mesh(devices, mesh, order)
  _whole(made, axis, tokens, batch=batch)
  how = way(strategy, q_block, kv_block)
  form = _model(model, dtype, made, shard, layers)
  attend = ContextParallel(
    mesh=made,
    axis=axis,
    layout=how.layout,
    strategy=how.strategy,
    block=positive_int("block", block),
  )
  batches.check(batch, tokens, attend)
  over = NamedSharding(made, P(attend.batch_axes(batch) or None, axis))
  ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=over)
  everywhere = _everywhere(made)
  made_of = work_profile.profile(form, tokens)
  flops = made_of.token_s * tokens + made_of.pair_s * tokens * (tokens + 1) / 2
  head = 2.0 * form.config.vocab * form.config.embed
  return Built(
    function=reading.read,
    arguments=(
      form,
      attend,
      ids,
      None,
      ids,
      form.init_cache_spec(batch, tokens, sharding=attend),
      everywhere((batch,)),
      everywhere(()),
    ),
    mesh=made,
    facts={
      **_facts(made, tokens, batch, strategy),
      "what": "prefill",
      **_of_model(form, model),
      "model_flops": batch * (flops + head) / made.size,
    },
    data_trips=_trips(how, made, axis, tokens, True),
  )


def decode(
  devices: Sequence[Any],
  *,
  model: str | Mapping[str, Any],
  tokens: int,
  mesh: Sequence[Sequence[Any]] = (("seq", -1),),
  batch: int = 1,
  shard: str | None = "seq",
  dtype: str = "bfloat16",
  layers: int | None = None,
  order: str = "ring",
) -> Built:
  """One more token behind a cache of `tokens`, sharded over the sequence.

  For the arguments see `train`.

  Raises:
    RingjaxError: options that are none, or do not go together.
  """
  made, axis = _mesh(devices, mesh, order)
  _whole(made, axis, tokens, batch=batch)
  form = _model(model, dtype, made, shard, layers)
  attend = CachedAttention(mesh=made, axis=axis)
  everywhere = _everywhere(made)
  sampler = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), Greedy()
  )
  state = decoding.State(
    token=everywhere((batch,)),
    pos=everywhere((batch,)),
    done=everywhere((batch,), jnp.bool_),
    seen=None,
  )
  made_of = work_profile.profile(form, tokens)
  head = 2.0 * form.config.vocab * form.config.embed
  flops = batch * (made_of.token_s + made_of.pair_s * tokens + head)
  cache = form.init_cache_spec(batch, tokens, sharding=attend)
  return Built(
    function=decoding.step,
    arguments=(
      form,
      attend,
      sampler,
      cache,
      state,
      everywhere((4,)),
      everywhere(()),
    ),
    mesh=made,
    facts={
      **_facts(made, tokens, batch, "resident"),
      "what": "decode",
      **_of_model(form, model),
      "model_flops": flops / made.size,
    },
    data_trips=_visits(cache),
  )


# ---------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------


def _choose(name: str, value: Any, known: Any) -> None:
  if value not in known:
    raise OptionError(
      name, repr(value), f"one of {', '.join(known)}", "pass one of these names"
    )


def _mesh(
  devices: Sequence[Any], pairs: Sequence[Sequence[Any]], order: str
) -> tuple[Mesh, str | None]:
  """The mesh, and its axis of the sequence where that has several shards."""
  _choose("order", order, ORDERS)
  names = tuple(str(name) for name, _ in pairs)
  sizes = tuple(int(size) for _, size in pairs)
  made = make_mesh(sizes, names, devices=devices)
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
  """Refuses numbers that are none, and tokens that shards do not divide."""
  for name, count in (("tokens", tokens), *counts.items()):
    if count < 1:
      raise OptionError(name, count, "a positive int", "count from 1")
  shards = 1 if axis is None else mesh.shape[axis]
  if tokens % shards:
    raise ShapeError(
      "tokens",
      tokens,
      f"a multiple of the {shards} shards",
      f"round it up to {-(-tokens // shards) * shards}",
    )


def _batch_axes(mesh: Mesh, batch: int) -> tuple[str, ...] | None:
  return ContextParallel(mesh=mesh).batch_axes(batch) or None


def _everywhere(mesh: Mesh) -> Callable[..., Any]:
  over = NamedSharding(mesh, P())
  return lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=over
  )


def _model(
  model: str | Mapping[str, Any],
  dtype: str,
  mesh: Mesh,
  shard: str | None,
  layers: int | None,
) -> Transformer:
  """A model of shapes, cut along its width over the mesh axis `shard`."""
  config = preset(model) if isinstance(model, str) else dict(model)
  if layers is not None:
    config["num_hidden_layers"] = positive_int("layers", layers)
  rules = None if shard is None else Rules(embed=shard)
  return abstract(config, dtype=dtype, mesh=mesh, rules=rules)


def _visits(cache: KVCache) -> float:
  """Tiles of a full cache that a query walks over, in each of two loops."""
  most = 0
  for slots in cache.slots:
    if isinstance(slots, LayerKV):
      shape = list(slots.k.shape)
      shape[3] //= cache.shards
      mine: Any = jax.ShapeDtypeStruct(tuple(shape), slots.k.dtype)
      stored = ContiguousView(mine, mine, cache.at, jnp.int32(0))
      most = max(most, -(-shape[3] // tile_slots(stored, "tpu")))
  return most / 2


def _facts(
  mesh: Mesh, tokens: int, batch: int, strategy: str
) -> dict[str, Any]:
  return {
    "mesh": dict(mesh.shape),
    "tokens": tokens,
    "batch": batch,
    "strategy": strategy,
  }


def _of_model(form: Transformer, model: Any) -> dict[str, Any]:
  return {
    "model": model if isinstance(model, str) else form.config.family,
    "layers": len(form.config.layers),
    "parameters": sum(int(x.size) for x in jax.tree.leaves(form)),
  }


def _trips(
  how: Way, mesh: Mesh, axis: str | None, tokens: int, causal: bool
) -> list[tuple[str, float]]:
  """How often the loops over a row's tiles turn, forward and backward.

  Tiles are counted as the layout and the mask have them, of the shard that has
  most in each hop, for the others wait for it. There are two loops, of tiles
  with and without a mask, and they are taken to turn equally often. A turn of
  the second computes several tiles, see `joined`; forward it has as many fewer
  rows, backward both walk down the same column of keys.
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

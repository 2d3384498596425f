"""A builder of an engine's calls."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.kv.base import bytes_each
from ringjax.kv.storage.page_pool import PagePool
from ringjax.models.checkpoint import abstract
from ringjax.models.partition.layer_parts import layer_parts
from ringjax.models.weights.coded_weights import KINDS, coded_model
from ringjax.nn.param import Rules
from ringjax.nn.weights.block_codes import with_shards
from ringjax.ops.attention.cached.pooled import pool_tile
from ringjax.plan.compiler.aot import Built
from ringjax.serve.calls import (
  CallArrays,
  RowBoard,
  check_drafts,
  compute,
  compute_layers,
  compute_step,
)
from ringjax.serve.prefix.shared_rows import shared_tiles
from ringjax.serve.row_sampler import RowNumbers
from ringjax.train.methods.lora import with_adapters

ROWS = 16
# Rows and tokens of each call.
_SIZES = {
  "answers": (ROWS, 1),
  "drafts": (ROWS, 5),
  "trees": (ROWS, 5),
  "prompts": (2, 128),
  "many": (4, 512),
  "layers": (2, 128),
}


def call_arrays(pool, name, page, tokens, devices, vocab):
  """Arguments of an empty call over a pool of so many tokens a shard."""
  shards = pool.shards
  batch, count = _SIZES[name]
  zeros = lambda *shape: np.zeros(shape, np.int32)
  no = np.zeros(batch, bool)
  blocks = 32768 // page // shards
  arrays = CallArrays(
    tokens=zeros(batch, count),
    pos=zeros(batch, count),
    seg=zeros(batch, count),
    tables=tuple(zeros(batch, shards, blocks) for _ in pool.groups),
    ends=zeros(batch),
    slots=zeros(batch),
    fresh=no,
    last=zeros(batch),
    chooses=no,
    sampling=RowNumbers.empty(ROWS, vocab).of(np.zeros(batch, np.int32)),
    prompts=zeros(batch),
  )
  if batch < ROWS:
    return arrays
  tile = pool_tile(page, devices[0].platform)
  most = shards * tokens // tile * ROWS // 2
  shared = tuple(
    shared_tiles(x, np.zeros(ROWS, np.int64), page, tile, most)
    for x in arrays.tables
  )
  return arrays._replace(shared=shared)


def _with_adapters(form, rank, sharding):
  """A model of shapes with two adapters of this rank."""
  lora = rj.train.Lora(rank=rank)

  def adapted(model):
    return with_adapters(model, [(lora, lora.start(model, seed=0))] * 2)

  def placed(x, old=sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=old)

  return jax.tree.map(placed, jax.eval_shape(adapted, form))


def _with_codes(form, kind, mesh):
  """A model of shapes with codes of a kind in the place of weights."""
  make = functools.partial(coded_model, **KINDS[kind])
  is_parameter = lambda x: isinstance(x, nnx.Variable)

  def placed(x):
    sharding = Rules().sharding(x, mesh)
    array = x.get_value()
    shaped = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    return x.replace(shaped)

  coded = jax.eval_shape(make, form)
  coded = jax.tree.map(placed, coded, is_leaf=is_parameter)
  return with_shards(coded, lambda x: x.get_value().sharding.spec)


def call(
  devices,
  *,
  model,
  name,
  kind,
  page,
  tokens,
  prompts=None,
  trips=1.0,
  rank=0,
  codes=None,
  mesh_axis="seq",
):
  """A call for answers or prompts, over a pool of so many tokens a device.

  With `prompts` it is one program of the call for answers `name` and of that
  call for prompts, in tiles of rows, whose loops have `trips` (`Built`). Its
  facts have the pool's bytes on a device. Rows have adapters of this `rank`,
  weights are `codes` of `coded_weights.KINDS`.
  """
  mesh = rj.make_mesh((len(devices),), (mesh_axis,), devices=devices)
  axis = "seq" if mesh_axis == "seq" else None
  shards = 1 if axis is None else len(devices)
  form = abstract(model, mesh=mesh)
  if codes is not None:
    form = _with_codes(form, codes, mesh)
  if rank:
    form = _with_adapters(form, rank, NamedSharding(mesh, P()))
  attend = rj.models.CachedAttention(mesh=mesh, axis=axis)
  pool = PagePool.spec(
    form.kinds,
    rows=ROWS,
    pages=lambda reach: shards * (tokens if reach is None else 8192) // page,
    page=page,
    dtype=jnp.bfloat16,
    kind=form.cache_kind(kind),
    mesh=mesh,
    axis=axis,
    head_axis=None if mesh_axis == "seq" else mesh_axis,
  )
  whole = NamedSharding(mesh, P())
  shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
  batch, count = _SIZES[name]
  vocab = form.config.vocab
  zeros = lambda *shape: np.zeros(shape, np.int32)
  arrays = call_arrays(pool, name, page, tokens, devices, vocab)
  if prompts is not None:
    calls = arrays, call_arrays(pool, prompts, page, tokens, devices, vocab)
    if rank:
      calls = tuple(x._replace(adapter=zeros(len(x.ends))) for x in calls)
    allowed = tuple(np.zeros((len(x.ends), vocab), bool) for x in calls)
    board = RowBoard(
      zeros(ROWS), np.zeros((ROWS, vocab), bool), zeros(ROWS, vocab)
    )
    calls, board, allowed = jax.tree.map(shaped, (calls, board, allowed))
    return Built(
      function=compute_step,
      arguments=(form, attend, pool, board, calls, allowed, 128),
      mesh=mesh,
      facts={"pool": bytes_each(pool.slots)},
      data_trips=trips,
    )
  if rank:
    arrays = arrays._replace(adapter=zeros(batch))
  if name == "trees":
    arrays = arrays._replace(parents=zeros(batch, count))
  board = RowBoard(
    zeros(ROWS), np.zeros((ROWS, vocab), bool), zeros(ROWS, vocab)
  )
  several = 1 if name not in ("drafts", "trees") else count
  arrays, board, allowed = jax.tree.map(
    shaped, (arrays, board, np.zeros((batch * several, vocab), bool))
  )
  nbytes = bytes_each(pool.slots)
  facts = {"pool": nbytes}
  if name == "layers":
    first = layer_parts(form, 2)[0]
    given = (first, attend, pool, arrays, None)
    return Built(
      function=compute_layers, arguments=given, mesh=mesh, facts=facts
    )
  given = (form, attend, pool, board, arrays, allowed)
  work = compute if several == 1 else check_drafts
  return Built(function=work, arguments=given, mesh=mesh, facts=facts)

"""Builders of what a cache with a part in host memory does beside decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.infer import prefill
from ringjax.kv import kind_text
from ringjax.kv.offload import moved_blocks
from ringjax.models.checkpoint import abstract
from ringjax.plan.compiler.aot import Built


def _made(devices, model, cache, tokens, batch=1):
  mesh = rj.make_mesh((len(devices),), ("seq",), devices=devices)
  form = abstract(model, mesh=mesh)
  attend = rj.models.CachedAttention(mesh=mesh, axis="seq", replicated=False)
  kind = kind_text.parse(cache)
  made = form.init_cache_spec(batch, tokens, sharding=attend, kind=kind)

  def ids(shape, *over):
    sharding = NamedSharding(mesh, P(*over))
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

  return mesh, form, attend, made, ids


def evict(devices, *, model, cache, tokens):
  """The move of blocks to the host."""
  mesh, _, _, made, ids = _made(devices, model, cache, tokens, 3)
  cursors = ids((3, len(devices)))
  arguments = (made.blocks, made.slots, cursors, cursors)
  where = (made.memory, made.places)
  return Built(
    function=moved_blocks.moved_blocks,
    arguments=(*arguments, *where),
    mesh=mesh,
  )


def chunk(devices, *, model, cache, tokens):
  """The reading of 1024 tokens behind others."""
  mesh, form, attend, made, ids = _made(devices, model, cache, tokens)
  call = ids((1, 1024), None, "seq")
  return Built(
    function=prefill.read,
    arguments=(form, attend, call, call, call, made, ids((1,)), ids(())),
    mesh=mesh,
  )

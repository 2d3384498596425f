"""A builder of checks of drafted tokens behind a cache of one session."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.infer import Greedy, decode
from ringjax.infer.speculate import rounds
from ringjax.infer.speculate.drafter import Draft
from ringjax.kv import kind_text
from ringjax.kv.base import bytes_each
from ringjax.models.checkpoint import abstract
from ringjax.plan.compiler.aot import Built


def check(devices, *, model, tokens, cache, rows, tree, mesh, drafted=7):
  """A call that reads drafted tokens and keeps the accepted ones.

  Its facts have the cache's bytes on a device, and those of the weights.
  """
  names, sizes = zip(*mesh, strict=True)
  mesh = rj.make_mesh(sizes, names, devices=devices[: np.prod(sizes)])
  form = abstract(model, mesh=mesh)
  attend = rj.models.CachedAttention(mesh=mesh, axis="seq")
  kind = kind_text.parse(cache, "cache")
  spec = form.init_cache_spec(rows, tokens, sharding=attend, kind=kind)
  whole = NamedSharding(mesh, P())
  shaped = lambda shape=(rows,), dtype=jnp.int32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=whole
  )
  sampler = jax.tree.map(lambda x: shaped(np.shape(x), x.dtype), Greedy())
  state = decode.DecodeState(shaped(), shaped(), shaped(dtype=jnp.bool_), None)
  draft = Draft(
    tokens=shaped((rows, drafted)),
    count=shaped(),
    parents=shaped((rows, drafted)) if tree else None,
  )
  given = (form, attend, "match", sampler, spec, state, draft, shaped())
  return Built(
    function=rounds.verify,
    arguments=(*given, shaped((4,)), shaped(())),
    mesh=mesh,
    facts={"cache": bytes_each(spec.slots), "weights": bytes_each(form)},
  )

"""Builders of rings that are slow on purpose, and what a check of them says.

Each is one attention over a mesh's "seq", without a mask, per shard written
out in jnp; they differ in what the send of a hop depends on.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.ops.experts import grouped_product
from ringjax.ops.experts.expert_shards import ExpertShards, mix_sharded
from ringjax.ops.experts.grouped_product_tpu import (
  ExpertMaps,
  GroupedProductTPU,
)
from ringjax.parallel import chips
from ringjax.parallel.mesh import compiler_options
from ringjax.plan.compiler.aot import Built

HEADS, DIM = 4, 128


def _fold(q, kv, state):
  """An online softmax over the keys at hand, in tiles of 512."""
  k, v = kv

  def tile(state, n):
    acc, top, total = state
    cut = lambda x: lax.dynamic_slice_in_dim(x, n * 512, 512, 1)
    s = jnp.einsum("htd,hsd->hts", q, cut(k)).astype(jnp.float32)
    new = jnp.maximum(top, s.max(-1))
    p = jnp.exp(s - new[..., None])
    old = jnp.exp(top - new)
    more = jnp.einsum("hts,hsd->htd", p.astype(q.dtype), cut(v))
    acc = acc * old[..., None] + more.astype(jnp.float32)
    return (acc, new, total * old + p.sum(-1)), None

  return lax.scan(tile, state, jnp.arange(k.shape[1] // 512))[0]


def ring(devices, *, how, tokens=2048):
  """`how` a hop is written: "early", "barrier" or "late"."""
  mesh = rj.make_mesh((len(devices),), ("seq",), devices=devices)
  size = len(devices)
  pairs = [(i, (i + 1) % size) for i in range(size)]
  send = lambda kv: jax.tree.map(lambda x: lax.ppermute(x, "seq", pairs), kv)

  def hop(q, carry, _):
    kv, state = carry
    if how == "late":
      # Receive, then use: the keys of this hop come in this hop.
      kv = send(kv)
      return (kv, _fold(q, kv, state)), None
    if how == "barrier":
      state = _fold(q, kv, state)
      kv, state = lax.optimization_barrier((kv, state))
      return (send(kv), state), None
    return (send(kv), _fold(q, kv, state)), None

  def local(q, k, v):
    vary = lambda x: lax.pcast(x, ("seq",), to="varying")
    zeros = jnp.zeros(q.shape, jnp.float32)
    state = (zeros, zeros[..., 0] - 1e30, zeros[..., 0])
    state = jax.tree.map(vary, state)
    (_, (acc, _, total)), _ = lax.scan(
      functools.partial(hop, q), ((k, v), state), None, length=size
    )
    return (acc / total[..., None]).astype(q.dtype)

  spec = P(None, "seq", None)
  function = jax.shard_map(
    local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
  )
  x = jax.ShapeDtypeStruct(
    (HEADS, tokens * size, DIM),
    jnp.bfloat16,
    sharding=NamedSharding(mesh, spec),
  )
  return Built(function=jax.jit(function), arguments=(x, x, x), mesh=mesh)


def kernel(devices, *, stated):
  """A ring whose hop is a Pallas kernel that says, or not, what it costs."""
  mesh = rj.make_mesh((len(devices),), ("seq",), devices=devices)
  size, n = len(devices), 1024
  pairs = [(i, (i + 1) % size) for i in range(size)]

  def body(x, y, out):
    out[...] = jnp.dot(
      x[...], y[...], preferred_element_type=jnp.float32
    ).astype(out.dtype)

  cost = pl.CostEstimate(
    flops=2 * n**3, bytes_accessed=6 * n * n, transcendentals=0
  )
  multiply = pl.pallas_call(
    body,
    out_shape=jax.ShapeDtypeStruct((n, n), jnp.bfloat16),
    cost_estimate=cost if stated else None,
    name="multiply",
  )

  def local(x, y):
    def hop(carry, _):
      y, out = carry
      return (lax.ppermute(y, "seq", pairs), out + multiply(x, y)), None

    (_, out), _ = lax.scan(hop, (y, jnp.zeros_like(x)), None, length=size)
    return out

  spec = P("seq")
  function = jax.shard_map(
    local, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
  )
  x = jax.ShapeDtypeStruct(
    (n * size, n), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
  )
  return Built(function=jax.jit(function), arguments=(x, x), mesh=mesh)


def experts(devices, *, asynchronous, tokens=16_384):
  """Gradients of a sharded mixture's experts, those of Qwen3-30B-A3B."""
  mesh = rj.make_mesh((-1,), ("seq",), devices=devices)
  count, chosen, width, hidden = 128, 8, 2048, 768
  over = NamedSharding(mesh, P("seq"))
  form = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=over)
  maps = ((width, hidden), (width, hidden), (hidden, width))
  weights = tuple(form(jnp.bfloat16, count, *sizes) for sizes in maps)
  rows = tokens * mesh.size
  kernel = GroupedProductTPU(chip=chips.machine_name(devices[0].device_kind))

  def products(kernel, weights, rows, blocks):
    gate, up, down = (ExpertMaps(stacked=w) for w in weights)
    gated = lambda gate, up: jax.nn.silu(gate) * up
    h = grouped_product.gated(kernel, gated, rows, (gate, up), blocks)
    return grouped_product.products(kernel, h, (down,), blocks)[0]

  def local(weights, x, experts, mixing):
    grouped = grouped_product.GroupedExperts(
      kernel=kernel, f=products, weights=weights
    )
    shards = ExpertShards(over=("seq",), tokens=("seq",))
    return mix_sharded(
      products, weights, x, experts, mixing, count, shards, grouped=grouped
    )

  run = jax.shard_map(
    local, mesh=mesh, in_specs=(P("seq"),) * 4, out_specs=P("seq")
  )
  loss = lambda *args: jnp.sum(run(*args).astype(jnp.float32) ** 2)
  options = compiler_options(mesh) if asynchronous else {}
  return Built(
    function=jax.jit(jax.grad(loss, (0, 1, 3)), compiler_options=options),
    arguments=(
      weights,
      form(jnp.bfloat16, rows, width),
      form(jnp.int32, rows, chosen),
      form(jnp.float32, rows, chosen),
    ),
    mesh=mesh,
  )


def large(devices):
  """A program that fits no chip."""
  mesh = rj.make_mesh((len(devices),), ("seq",), devices=devices)
  sharding = NamedSharding(mesh, P("seq"))
  x = jax.ShapeDtypeStruct((1 << 17, 1 << 16), jnp.float32, sharding=sharding)
  return Built(
    function=jax.jit(lambda x: jnp.sort(x @ x[: 1 << 16], 0)),
    arguments=(x,),
    mesh=mesh,
    facts={"strategy": "none"},
  )


def broken(devices):
  """A builder at fault."""
  raise TypeError(f"no way on {len(devices)} devices")


def refused(devices):
  """A builder that refuses what it was asked."""
  raise rj.OptionError("sides: got none; wanted some; add one")


def matmul(devices, *, rows, size=4096):
  """A product of `rows` rows with square weights."""
  mesh = rj.make_mesh((1,), ("seq",), devices=devices[:1])
  shape = lambda *sizes: jax.ShapeDtypeStruct(
    sizes, jnp.bfloat16, sharding=NamedSharding(mesh, P())
  )
  return Built(
    function=jax.jit(lambda x, weights: jnp.dot(x, weights)),
    arguments=(shape(rows, size), shape(size, size)),
    mesh=mesh,
    facts={"model_flops": 2.0 * rows * size * size},
  )


def hops(devices, *, size=2048):
  """Sends an array to the next device, and nothing else."""
  mesh = rj.make_mesh((len(devices),), ("seq",), devices=devices)
  count = len(devices)
  pairs = [(i, (i + 1) % count) for i in range(count)]
  function = jax.shard_map(
    lambda x: lax.ppermute(x, "seq", pairs),
    mesh=mesh,
    in_specs=P("seq"),
    out_specs=P("seq"),
  )
  x = jax.ShapeDtypeStruct(
    (size * count, size), jnp.bfloat16, sharding=NamedSharding(mesh, P("seq"))
  )
  return Built(function=jax.jit(function), arguments=(x,), mesh=mesh)

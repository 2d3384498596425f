"""In a caller's shard_map keys travel only where an axis is named."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.errors import MeshError
from tests.helpers import refused

SHARDS = 4
Q, K, V = np.random.default_rng(0).normal(size=(3, 4, 32, 4, 8)).astype("f4")
WANT = jax.nn.dot_product_attention(Q, K, V, is_causal=True)
causal = functools.partial(rj.dot_product_attention, is_causal=True)


def close(got):
  np.testing.assert_allclose(got, WANT, atol=2e-6)


def mapped(f, axis, part, check_vma=True):
  mesh = rj.make_mesh((SHARDS,), (axis,), devices=jax.devices()[:SHARDS])
  run = jax.shard_map(
    f, mesh=mesh, in_specs=(part,) * 3, out_specs=part, check_vma=check_vma
  )
  return lambda: jax.jit(run)(Q, K, V)


def ulysses(attend, axis):
  """What users write with `jax.nn`: heads are sharded while they attend."""
  swap = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)

  def f(q, k, v):
    q, k, v = (swap(x, split_axis=2, concat_axis=1) for x in (q, k, v))
    return swap(attend(q, k, v), split_axis=1, concat_axis=2)

  return f


def refused_by_both_names(call, axis):
  refused(MeshError, call, "query, key, value", f"axis={axis!r}", "axis=None")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["seq", "sp"])
def test_an_all_to_all_of_the_caller(axis, check_vma):
  run = lambda attend: mapped(
    ulysses(attend, axis), axis, P(None, axis), check_vma
  )
  theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  close(run(theirs)())
  close(run(functools.partial(causal, axis=None))())
  refused_by_both_names(run(causal), axis)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["seq", "sp"])
def test_shards_of_the_sequence(axis, check_vma):
  run = lambda f: mapped(f, axis, P(None, axis), check_vma)
  close(run(functools.partial(causal, axis=axis))())
  refused_by_both_names(run(causal), axis)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["seq", "data"])
def test_shards_of_the_batch(axis, check_vma):
  run = lambda f: mapped(f, axis, P(axis), check_vma)
  close(run(functools.partial(causal, axis=None))())
  refused_by_both_names(run(causal), axis)


@pytest.mark.parametrize("axis", ["seq", "sp"])
def test_operands_that_all_devices_share_need_no_axis(axis):
  close(mapped(causal, axis, P())())
  # Without check_vma it is not known that they do.
  refused_by_both_names(mapped(causal, axis, P(), check_vma=False), axis)


def test_an_explicit_type_says_the_axis():
  """Over the batch in the caller's shard_map, the sequence explicit."""
  mesh = jax.make_mesh(
    (2, 4), ("data", "sp"), axis_types=(AxisType.Auto, AxisType.Explicit)
  )
  run = lambda f, spec: jax.jit(
    jax.shard_map(
      f,
      in_specs=(P("data"),) * 3,
      out_specs=P("data"),
      axis_names={"data"},
    )
  )(
    *(
      jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
      for x in (Q, K, V)
    )
  )
  with jax.set_mesh(mesh):
    close(run(causal, P(None, "sp")))
    refused_by_both_names(lambda: run(causal, P()), "data")
    close(run(functools.partial(causal, axis=None), P()))


def test_the_automatic_axis_of_a_shard_map_over_the_batch():
  mesh = rj.make_mesh((2, 4), ("data", "seq"))
  run = lambda **axis: jax.jit(
    jax.shard_map(
      functools.partial(causal, strategy="ring", **axis),
      mesh=mesh,
      in_specs=(P("data"),) * 3,
      out_specs=P("data"),
      axis_names={"data"},
    )
  )
  sends = lambda f: "collective-permute" in f.lower(Q, K, V).compile().as_text()
  ring, alone = run(axis="seq"), run(axis=None)
  close(ring(Q, K, V))
  close(alone(Q, K, V))
  assert sends(ring) and not sends(alone)
  refused_by_both_names(lambda: run()(Q, K, V), "data")


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["seq", "i"])
def test_a_vmap_s_axis_is_taken_where_it_is_named(name):
  """As in JAX, an axis that is mapped over is no dimension of the operands."""
  split = lambda x: x.reshape(4, SHARDS, -1, *x.shape[2:])
  ring = jax.vmap(functools.partial(causal, axis=name), 1, 1, axis_name=name)(
    *map(split, (Q, K, V))
  )
  close(ring.reshape(Q.shape))
  each = [x[:, None] for x in (Q, K, V)]
  for axis in ({}, {"axis": None}):
    got = jax.vmap(functools.partial(causal, **axis), axis_name=name)(*each)
    close(got[:, 0])


def test_no_axis_on_a_mesh():
  """The sequence is whole for each device, and no ring turns."""
  mesh = rj.make_mesh((SHARDS,), ("seq",), devices=jax.devices()[:SHARDS])
  f = jax.jit(functools.partial(causal, mesh=mesh, axis=None))
  close(f(Q, K, V))
  text = f.lower(Q, K, V).compile().as_text()
  assert "collective-permute" not in text

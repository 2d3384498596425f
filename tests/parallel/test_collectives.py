"""What collectives know of a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.parallel import collectives


def test_a_kernel_s_result_that_varies_over_nothing_says_so():
  """JAX asks inside a shard_map, also on a mesh of one device."""
  mesh, kinds = rj.make_mesh((1,), ("seq",)), []

  def body(x):
    kinds.append(collectives.out_type(x.shape, x.dtype, x).manual_axis_type)
    return x

  jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())(jnp.ones(2))
  assert kinds[0] is not None and not kinds[0].varying
  assert collectives.out_type((2,), jnp.float32).manual_axis_type is None

"""A shard_map outside of jit runs attention as one program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from tests.helpers import make_mesh

_compiled = [0]
# One by one, the operations of a forward pass are some hundred programs.
MOST = 40


def _heard(event, duration, **_):
  del duration
  _compiled[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_heard)


@pytest.mark.parametrize(
  "attend",
  [
    rj.ring_attention,
    pytest.param(rj.striped_attention, marks=pytest.mark.long),
    pytest.param(
      functools.partial(rj.dot_product_attention, is_causal=True, axis="seq"),
      marks=pytest.mark.long,
    ),
  ],
)
def test_few_programs(attend):
  mesh = make_mesh(4, "auto")
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.standard_normal((1, 16, 2, 4)), jnp.float32)
    for _ in range(3)
  )
  inside = jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=P(None, "seq"),
    out_specs=P(None, "seq"),
  )
  before = _compiled[0]
  out = inside(q, k, v)
  assert _compiled[0] - before <= MOST
  np.testing.assert_allclose(out, jax.jit(inside)(q, k, v), atol=1e-6)

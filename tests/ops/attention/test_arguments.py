"""The arguments of a call as one pytree: specs, padding, programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.parallel.call_sharding import CallSharding
from ringjax.parallel.layout import slots_of

pytestmark = pytest.mark.smoke

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
PLACE = CallSharding(
  axis="seq", size=4, batch=("data",), heads=("model",), fully_manual=True
)


def arguments(kv_heads=K, **options):
  draw = np.random.default_rng(0).normal
  q, k = draw(size=(B, T, N, H)), draw(size=(B, S, kv_heads, H))
  return AttentionArgs.of(*(jnp.float32(x) for x in (q, k, k)), **options)


def whole():
  return arguments(
    bias=jnp.ones((N, 1, S)),
    mask=rj.Prefix(jnp.array([3, 5])),
    sinks=jnp.ones(N),
    q_positions=jnp.arange(T),
    kv_positions=jnp.ones((B, S), jnp.int32),
    key_value_seq_lengths=jnp.array([4, 7], jnp.int32),
    dropout_rate=0.5,
    dropout_seed=3,
  )


def test_each_array_is_sharded_by_its_dimensions():
  data, model = ("data",), ("model",)
  x = whole()
  found = x.specs(PLACE)
  assert found.q == P(data, "seq", model) == found.k == found.v
  # What has one row or one example is the same on all shards.
  assert found.bias == P(None, model, None, None)
  assert found.q_pos == P(None, "seq") and found.k_pos == P(data, "seq")
  assert found.sinks == found.heads == P(model) and found.k_len == P(data)
  assert found.seed == P(None) and found.mask == rj.Prefix(P(data))
  assert found.slopes is None and found.q_seg is None
  assert jax.tree.structure(found) == jax.tree.structure(x)
  alone = arguments(kv_heads=1).specs(PLACE)
  assert alone.k == P(data, "seq", None) and alone.q == found.q
  assert arguments().specs(CallSharding()).q == P(None, None, None)


def test_all_arrays_of_a_length_are_padded_alike():
  layout = rj.Contiguous()
  x = whole()
  found = x.padded(slots_of(layout, T, 4), slots_of(layout, S, 4))
  assert found.q.shape == (B, 8, N, H) and found.k.shape == (B, 8, K, H)
  # What does not depend on the queries keeps its one row.
  assert found.bias.shape == (1, N, 1, 8) and found.sinks.shape == (N,)
  assert found.q_pos.shape == (1, 8) and found.k_pos.shape == (B, 8)
  np.testing.assert_array_equal(found.k[:, :S], x.k)
  np.testing.assert_array_equal(found.k[:, S:], 0)
  same = x.padded(None, None)
  for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(same), strict=True):
    assert a is b


def test_a_program_is_compiled_for_what_is_static_alone():
  traced = []

  @jax.jit
  def f(x):
    traced.append(x.mask)
    return x.q * x.scores.scale

  causal = dict(is_causal=True, q_positions=jnp.arange(T))
  for _ in range(2):
    f(arguments(**causal))
  f(arguments(**causal | {"q_positions": jnp.arange(T) + 2}))
  assert len(traced) == 1
  f(arguments(**causal, scale=0.5))
  f(arguments(**causal, layout=rj.Striped()))
  f(arguments(**causal | {"is_causal": False}))
  assert len(traced) == 4

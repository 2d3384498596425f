"""Flax's multi-head modules with our attention: equal, or refused by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import ringjax as rj
from tests.helpers import make_mesh

X = np.random.default_rng(0).standard_normal((2, 24, 32), np.float32)


def nnx_module(**options):
  return nnx.MultiHeadAttention(
    num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), **options
  )


@pytest.mark.parametrize("mask", ["none", "causal", "float", "is_causal"])
def test_nnx_gives_what_its_own_function_gives(mask):
  masks = {
    "none": {},
    "causal": {"mask": nnx.make_causal_mask(X[..., 0], dtype=jnp.bool_)},
    "float": {"mask": nnx.make_causal_mask(X[..., 0])},
    "is_causal": {"is_causal": True},
  }
  want = nnx_module()(X, **masks[mask])
  got = nnx_module(attention_fn=rj.flax_attention)(X, **masks[mask])
  np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize(
  "module", [linen.MultiHeadDotProductAttention, linen.MultiHeadAttention]
)
def test_linen_gives_what_its_own_function_gives(module):
  mask = linen.make_causal_mask(X[..., 0])
  plain = module(num_heads=4)
  params = plain.init(jax.random.key(0), X)
  want = plain.apply(params, X, mask=mask)
  ours = module(num_heads=4, attention_fn=rj.flax_attention)
  np.testing.assert_allclose(ours.apply(params, X, mask=mask), want, atol=2e-6)


def test_a_ring_of_devices_by_a_partial():
  mesh = make_mesh(4, "auto")
  ring = functools.partial(
    rj.flax_attention, mesh=mesh, axis="seq", strategy="ring", is_causal=True
  )
  module = linen.MultiHeadAttention(num_heads=4, attention_fn=ring)
  params = module.init(jax.random.key(0), X)
  whole = linen.MultiHeadAttention(num_heads=4)
  want = whole.apply(params, X, mask=linen.make_causal_mask(X[..., 0]))
  np.testing.assert_allclose(jax.jit(module.apply)(params, X), want, atol=2e-6)


def test_dropout_follows_its_key():
  module = nnx_module(
    attention_fn=rj.flax_attention, dropout_rate=0.5, broadcast_dropout=False
  )
  keys = [nnx.Rngs(1), nnx.Rngs(1), nnx.Rngs(2)]
  a, b, c = (module(X, deterministic=False, rngs=k) for k in keys)
  off = module(X, deterministic=True)
  np.testing.assert_array_equal(a, b)
  assert abs(a - c).max() > 0.01 < abs(a - off).max()
  np.testing.assert_allclose(off, nnx_module()(X), atol=2e-6)


@pytest.mark.parametrize(
  ("options", "call", "name"),
  [
    ({"dropout_rate": 0.5}, {"deterministic": False}, "broadcast_dropout"),
    ({"precision": jax.lax.Precision.HIGHEST}, {}, "precision"),
    ({}, {"sow_weights": True}, "module"),
  ],
)
def test_what_cannot_be_followed_is_refused_by_name(options, call, name):
  module = nnx_module(attention_fn=rj.flax_attention, **options)
  with pytest.raises(rj.OptionError, match=f"^{name}: got"):
    module(X, rngs=nnx.Rngs(0), **call)

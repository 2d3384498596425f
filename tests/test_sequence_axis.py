"""Which axis of a mesh shards the sequence where the caller names none."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import MeshError
from tests.helpers import SMALL, refused

Q = np.random.default_rng(0).normal(size=(1, 64, 2, 8)).astype(np.float32)


@pytest.mark.parametrize("names", ["seq", "sp"])
def test_the_only_axis_of_a_given_mesh_is_taken(names):
  mesh = rj.make_mesh((8,), (names,))
  call = jax.jit(
    lambda q: rj.dot_product_attention(q, q, q, mesh=mesh, strategy="ring")
  )
  text = call.lower(Q).compile().as_text()
  assert "collective-permute" in text and "all-gather" not in text
  np.testing.assert_allclose(
    call(Q), jax.nn.dot_product_attention(Q, Q, Q), atol=2e-6
  )


def test_several_axes_are_refused():
  mesh = rj.make_mesh((2, 4), ("x", "y"))
  call = lambda **more: rj.dot_product_attention(Q, Q, Q, mesh=mesh, **more)
  refused(MeshError, call, "axis", "'x', 'y'")
  want = jax.nn.dot_product_attention(Q, Q, Q)
  np.testing.assert_allclose(call(axis="y"), want, atol=2e-6)


def test_a_session_takes_it_too():
  mesh = rj.make_mesh((4,), ("sp",), devices=jax.devices()[:4])
  model = rj.models.create(SMALL, mesh=mesh)
  session = rj.infer.Session(model, 32)
  assert session.axis == "sp" and session.shards == 4

"""Which axis of a mesh shards the sequence where the caller names none."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


# ---------------------------------------------------------------------------
# In the caller's jit, without mesh= and without jax.set_mesh
# ---------------------------------------------------------------------------


def ring(q, **options):
  return rj.dot_product_attention(
    q, q, q, is_causal=True, strategy="ring", **options
  )


def project(x, w):
  """Queries, keys and values that only the program knows."""
  return ring((x @ w).reshape(*x.shape[:2], 2, 8))


def in_a_loop(q):
  return jax.lax.scan(lambda x, _: (ring(x), None), q, length=2)[0]


CALLS = {
  "an argument": ring,
  "the model's choice": lambda q: rj.dot_product_attention(q, q, q),
  "by its name": lambda q: rj.ring_attention(q, q, q),
  "a gradient": jax.grad(lambda q: jnp.sum(ring(q) ** 2)),
  "in a loop": in_a_loop,
  "in a jit of its own": lambda q: jax.jit(ring)(2 * q),
}


def compiled(call, *args):
  return call.lower(*args).compile().as_text()


def check_ring(call, *args):
  """The call moves blocks of keys, and the result is the eager one."""
  program = jax.jit(call).lower(*args).compile()
  text = program.as_text()
  assert "collective-permute" in text and "all-gather" not in text
  np.testing.assert_allclose(program(*args), call(*args), atol=2e-6)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("call", "name"),
  [
    *((call, "seq") for call in CALLS),
    ("an argument", "sp"),
    pytest.param("a gradient", "sp", marks=pytest.mark.long),
  ],
)
def test_the_mesh_of_a_traced_operand_is_taken(call, name):
  mesh = rj.make_mesh((8,), (name,))
  q = jax.device_put(Q, NamedSharding(mesh, P(None, name)))
  if call == "the model's choice":
    # Which of them moves keys is for the model of costs to say.
    told = lambda q: rj.dot_product_attention(q, q, q, mesh=mesh)
    names = lambda f: set(re.findall(r"all-[a-z]+|collective-[a-z]+", f))
    found = names(compiled(jax.jit(CALLS[call]), q))
    assert found and found == names(compiled(jax.jit(told), q))
    return
  check_ring(CALLS[call], q)


def test_what_is_computed_from_one_is_on_its_mesh():
  mesh = rj.make_mesh((8,), ("sp",))
  x = jax.device_put(Q.reshape(1, 64, 16), NamedSharding(mesh, P(None, "sp")))
  w = np.eye(16, dtype=np.float32)[::-1]
  check_ring(project, x, jax.device_put(w, NamedSharding(mesh, P())))
  check_ring(project, x, w.copy())


def test_another_dimension_of_the_mesh_is_left_to_the_compiler():
  mesh = rj.make_mesh((2, 4), ("data", "sp"))
  q = np.concatenate([Q, -Q])
  check_ring(ring, jax.device_put(q, NamedSharding(mesh, P("data", "sp"))))
  only = rj.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  q = jax.device_put(q, NamedSharding(only, P("data")))
  text = compiled(jax.jit(ring), q)
  assert "collective-permute" not in text and "all-gather" not in text


def test_several_axes_of_a_traced_operand_are_refused():
  mesh = rj.make_mesh((2, 4), ("x", "y"))
  q = jax.device_put(Q, NamedSharding(mesh, P(None, "y")))
  f = lambda **axis: jax.jit(lambda q: ring(q, **axis))
  refused(MeshError, lambda: f()(q), "'x', 'y'", "axis='x'", "axis=None")
  assert "collective-permute" in compiled(f(axis="y"), q)
  assert "collective-permute" not in compiled(f(axis=None), q)
  refused(
    MeshError, lambda: jax.jit(lambda q: rj.ring_attention(q, q, q))(q), "'y'"
  )


def test_without_any_mesh_a_program_is_one_device_s():
  text = compiled(jax.jit(ring), Q)
  assert "collective-permute" not in text

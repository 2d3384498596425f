"""The specification is JAX's own function: same call, same result."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ringjax as rj

B, T, N, H = 2, 64, 4, 32


def sharded(size):
  """Ours, over `size` devices by the current mesh; 1 is one device."""
  if size == 1:
    return rj.dot_product_attention
  mesh = jax.make_mesh(
    (size,),
    ("seq",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:size],
  )
  return functools.partial(rj.dot_product_attention, mesh=mesh)


def draw(seed, *shapes, dtype):
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return [
    jax.random.normal(k, s, jnp.float32).astype(dtype)
    for k, s in zip(keys, shapes, strict=True)
  ]


def close(ours, theirs, tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_allclose(
      np.asarray(a, np.float32),
      np.asarray(b, np.float32),
      atol=tolerance,
      rtol=tolerance,
    )


@pytest.mark.smoke
def test_signature_is_a_superset():
  theirs = inspect.signature(jax.nn.dot_product_attention).parameters
  ours = inspect.signature(rj.dot_product_attention).parameters
  assert list(ours)[: len(theirs)] == list(theirs) or set(theirs) <= set(ours)
  for name, parameter in theirs.items():
    assert ours[name].default == parameter.default
    assert ours[name].kind == parameter.kind


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("size", "group", "use_vmap", "dtype"),
  [
    pytest.param(1, 1, False, jnp.bfloat16, marks=pytest.mark.slow),
    pytest.param(1, 4, False, jnp.float16, marks=pytest.mark.slow),
    (1, 2, True, jnp.bfloat16),
    pytest.param(8, 1, True, jnp.float16, marks=pytest.mark.slow),
    (8, 2, False, jnp.bfloat16),
    (8, 4, True, jnp.bfloat16),
  ],
)
def test_groups_and_vmap(size, group, use_vmap, dtype):
  kv = (B, T, N // group, H)
  q, k, v, do = draw(0, (B, T, N, H), kv, kv, (B, T, N, H), dtype=dtype)
  ours = sharded(size)
  if use_vmap:
    ours = jax.vmap(ours, in_axes=(0, 0, 0, None, None), out_axes=0)
  repeat = lambda x: jnp.repeat(x, group, axis=2)
  reference = lambda q, k, v: jax.nn.dot_product_attention(
    q, repeat(k), repeat(v)
  )
  out, back = jax.vjp(lambda *x: ours(*x, None, None), q, k, v)
  # JAX's own function promotes 16-bit inputs in silence.
  with jax.numpy_dtype_promotion("standard"):
    want, want_back = jax.vjp(reference, q, k, v)
    close((out, back(do)), (want, want_back(do)), 0.02)


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
  "modes",
  [
    pytest.param(("bias",), marks=pytest.mark.slow),
    pytest.param(("causal",), marks=pytest.mark.slow),
    ("padding",),
    ("custom",),
    pytest.param(("causal", "padding"), marks=pytest.mark.slow),
    pytest.param(("custom", "padding"), marks=pytest.mark.slow),
    ("bias", "causal"),
    ("causal", "window"),
    pytest.param(("window",), marks=pytest.mark.slow),
  ],
  ids="+".join,
)
def test_masks(size, modes):
  q, k, v, do, bias = draw(
    1, *[(B, T, N, H)] * 4, (1, N, T, T), dtype=jnp.float32
  )
  options = {"is_causal": "causal" in modes}
  bias = bias if "bias" in modes else None
  mask = None
  if "padding" in modes:
    options["query_seq_lengths"] = jnp.array([T // 2, T // 4], jnp.int32)
    options["key_value_seq_lengths"] = jnp.array([T // 4, T // 2], jnp.int32)
  if "custom" in modes:
    mask = jnp.tril(jnp.ones((T, T), bool))[None, None]
  if "window" in modes:
    options["local_window_size"] = (3, 2) if "causal" in modes else 5

  def run(f):
    if bias is None:
      return jax.vjp(lambda q, k, v: f(q, k, v, None, mask, **options), q, k, v)
    return jax.vjp(
      lambda q, k, v, b: f(q, k, v, b, mask, **options), q, k, v, bias
    )

  out, back = run(sharded(size))
  want, want_back = run(jax.nn.dot_product_attention)
  close((out, back(do)), (want, want_back(do)), 2e-4)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 4])
def test_bias_gradient_of_each_example(size):
  x, bias = draw(2, (B, T, N, H), (B, N, T, T), dtype=jnp.float32)
  mask = jnp.ones((1, 1, T), bool)

  def grads(f):
    return jax.grad(
      lambda x, b: jnp.sum(f(x, x, x, bias=b, mask=mask) ** 2), (0, 1)
    )(x, bias)

  close(grads(sharded(size)), grads(jax.nn.dot_product_attention), 2e-4)


@pytest.mark.long
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_no_batch_axis_and_unequal_lengths(size):
  q, k, v = draw(3, (T, N, H), (40, 2, H), (40, 2, H), dtype=jnp.float32)
  for causal in (False, True):
    ours = sharded(size)(q, k, v, is_causal=causal, return_residual=True)
    theirs = jax.nn.dot_product_attention(
      q, k, v, is_causal=causal, return_residual=True
    )
    close(ours, theirs, 1e-4)


def test_residual_is_float32_and_differentiable():
  q, k, v = draw(4, *[(B, T, N, H)] * 3, dtype=jnp.bfloat16)
  _, lse = rj.dot_product_attention(q, k, v, return_residual=True)
  assert lse.dtype == jnp.float32 and lse.shape == (B, T, N)
  g = jax.grad(
    lambda q: jnp.sum(
      rj.dot_product_attention(q, k, v, return_residual=True)[1]
    )
  )(q)
  assert float(jnp.max(jnp.abs(g.astype(jnp.float32)))) > 0


def test_cudnn_is_handed_on_or_refused():
  q, k, v = draw(5, *[(B, T, N, H)] * 3, dtype=jnp.bfloat16)
  with pytest.raises(rj.OptionError, match="cudnn"):
    sharded(8)(q, k, v, implementation="cudnn")
  with pytest.raises(rj.OptionError, match="cudnn"):
    rj.dot_product_attention(
      q, k, v, implementation="cudnn", logits_soft_cap=3.0
    )
  if jax.default_backend() == "cpu":
    with pytest.raises(Exception, match=r"(?i)cudnn"):
      jax.block_until_ready(
        rj.dot_product_attention(q, k, v, implementation="cudnn")
      )

"""The loss of an index equals its equation, and trains nothing else."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import RingjaxError
from ringjax.ops.attention.sparse.index_learning import block_training
from tests.contracts import index_loss


def mesh_of(shards: int):
  return jax.make_mesh(
    (shards,),
    ("seq",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:shards],
  )


BLOCKS = ("pooled", "key")
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [9, 14, 12, 5]), np.ones(40)])
OPTIONS = dict(
  seg=SEGMENTS.astype(np.int32), window=17, soft_cap=3.0, sinks=True
)


@pytest.mark.parametrize(
  "sparse", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_loss_and_gradients_are_those_of_the_equation(sparse):
  index_loss.check(rj.Contiguous(), sparse=sparse)


@pytest.mark.long
@pytest.mark.parametrize("units", ["pooled", "key"])
@pytest.mark.parametrize("sparse", [False, True])
def test_an_index_of_blocks_learns_as_its_equation_says(units, sparse):
  """On a device, of a length that ends within a block."""
  index_loss.check(rj.Contiguous(), units=units, sparse=sparse, t=21)


@pytest.mark.long
@pytest.mark.parametrize(
  "units",
  ["tokens", *(pytest.param(x, marks=pytest.mark.slow) for x in BLOCKS)],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_documents_windows_sinks_and_caps_combine_on_shards(sparse, units):
  check = functools.partial(
    index_loss.check, shards=4, mesh=mesh_of(4), sparse=sparse, units=units
  )
  check(rj.Striped())
  check(rj.Contiguous(), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("units", BLOCKS)
@pytest.mark.parametrize("sparse", [False, True])
def test_masses_of_blocks_are_summed_over_sharded_heads(sparse, units):
  """Rows of latents have one choice for all heads."""
  mesh = rj.make_mesh(
    (2, 2, 2), ("data", "seq", "model"), devices=jax.devices()[:8]
  )
  index_loss.check(
    rj.Striped(),
    2,
    mesh,
    units=units,
    latents=units == "pooled",
    sparse=sparse,
    axis="seq",
    batch_axis="data",
    head_axis="model",
  )


@pytest.mark.long
def test_parts_of_the_queries_give_what_all_of_them_give(monkeypatch):
  """As in a text whose masses on all blocks do not fit into memory."""
  monkeypatch.setattr(block_training, "_NUMBERS", 64)
  index_loss.check(rj.Striped(), 4, mesh_of(4), units="pooled")


@pytest.mark.long
@pytest.mark.parametrize("latents", [False, True])
def test_probabilities_are_summed_over_sharded_heads(latents):
  mesh = rj.make_mesh(
    (2, 2, 2), ("data", "seq", "model"), devices=jax.devices()[:8]
  )
  axes = dict(axis="seq", batch_axis="data", head_axis="model")
  for sparse in (False, True):
    index_loss.check(
      rj.Striped(), 2, mesh, latents=latents, sparse=sparse, **axes
    )


@pytest.mark.long
def test_lengths_that_do_not_divide_give_the_same():
  index_loss.check(rj.Contiguous(), 4, mesh_of(4), t=37)


def operands(t: int = 32):
  r = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)
  index = rj.TopTokens(
    q=draw(1, t, 2, 4), weights=draw(1, t, 2), keys=draw(1, t, 4), count=4
  )
  return draw(1, t, 4, 8), draw(1, t, 2, 8), draw(1, t, 2, 8), index


@pytest.mark.long
def test_compressed_keys_beside_others():
  """Fewer keys than queries, which are a part of what attention reads."""
  q, entries, _, _ = operands()
  entries, window_score = entries[:, ::4], jnp.float32([0.3, -1.0, 0.7, 2.0])
  maps = {
    "q": q[..., :2, :4],
    "weights": q[..., :2, 4],
    "keys": q[:, ::4, 2, :4],
  }
  ends, pos = np.arange(3, 32, 4)[None], np.arange(32)
  seen = ends[:, None] <= pos[None, :, None]
  s = jnp.einsum("btkgh,bskh->btkgs", q.reshape(1, 32, 2, 2, 8), entries)
  s = s.reshape(1, 32, 4, 8) * 8**-0.5
  s = jnp.where(seen[:, :, None], s, -jnp.inf)
  # A key of the window, with a score for each head.
  window_score = jnp.broadcast_to(window_score[None, None], s.shape[:3])
  lse = jnp.logaddexp(jax.nn.logsumexp(s, -1), window_score)
  masses = np.asarray(jnp.sum(jnp.exp(s - lse[..., None]), 2))
  total = masses.sum(-1, keepdims=True)
  p = masses / np.where(total > 0, total, 1)

  def equation(maps):
    dots = jnp.einsum("btie,bse->btis", maps["q"], maps["keys"])
    scores = jnp.einsum("btis,bti->bts", jax.nn.relu(dots), maps["weights"])
    scores = jnp.where(seen | (total == 0), scores, -jnp.inf)
    terms = jnp.where(seen, jax.nn.log_softmax(scores, -1), 0)
    entropy = np.sum(p * np.log(np.where(p > 0, p, 1)), -1)
    return jnp.sum(entropy - jnp.sum(p * terms, -1))

  def loss(maps):
    losses = rj.index_loss(
      q, entries, rj.TopTokens(count=2, **maps), lse, mask=rj.Causal(),
      q_positions=pos[None], kv_positions=ends,
    )  # fmt: skip
    return jnp.sum(losses)

  want, want_gradient = jax.value_and_grad(equation)(maps)
  value, gradient = jax.value_and_grad(loss)(maps)
  np.testing.assert_allclose(value, want, rtol=1e-6)
  for name, x in gradient.items():
    np.testing.assert_allclose(x, want_gradient[name], atol=2e-6, err_msg=name)


def test_no_gradient_reaches_attention():
  q, k, v, index = operands()

  def loss(q, k):
    _, lse = rj.dot_product_attention(
      q, k, v, is_causal=True, return_residual=True
    )
    return jnp.mean(rj.index_loss(q, k, index, lse, is_causal=True))

  value, gradients = jax.value_and_grad(loss, (0, 1))(q, k)
  assert value > 0.1
  assert all(not np.any(x) for x in gradients)


@pytest.mark.long
def test_minimising_it_makes_the_index_keep_more_of_attention():
  r = np.random.default_rng(1)
  q = jnp.asarray(r.normal(size=(1, 64, 1, 4)), jnp.float32)
  _, lse = rj.dot_product_attention(
    q, q, q, is_causal=True, return_residual=True
  )
  s = np.einsum("btnh,bsnh->bts", q, q) / 2
  s = np.where(np.tril(np.ones((64, 64), bool)), s, -np.inf)
  p = np.exp(s - np.asarray(lse)[..., :1])

  def index_of(maps):
    of_q = jnp.einsum("btnh,nhie->btie", q, maps["q"])
    return rj.TopTokens(
      q=of_q,
      weights=jnp.broadcast_to(maps["weights"], of_q.shape[:3]),
      keys=jnp.einsum("btnh,nhe->bte", q, maps["k"]),
      count=8,
    )

  def mass(maps):
    """Share of attention's probabilities that the choice keeps."""
    selection = index_of(maps)
    _, choice = rj.sparse_attention(
      q, q, q, selection, is_causal=True, return_selection=True
    )
    marked = np.zeros((1, 64, 65), bool)
    np.put_along_axis(marked, np.asarray(choice.blocks)[:, :, 0], True, -1)
    return (p * marked[..., :-1]).sum(-1).mean()

  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)
  maps = {"q": draw(1, 4, 4, 4), "k": draw(1, 4, 4), "weights": draw(1, 1, 4)}
  before = mass(maps)

  @jax.jit
  def step(maps):
    loss = lambda maps: jnp.mean(
      rj.index_loss(q, q, index_of(maps), lse, is_causal=True)
    )
    return jax.tree.map(lambda x, d: x - 0.1 * d, maps, jax.grad(loss)(maps))

  for _ in range(200):
    maps = step(maps)
  assert before < 0.4 and mass(maps) > 0.55, (before, mass(maps))


def test_the_compiled_program_has_no_array_of_all_pairs():
  t, shape = 4096, lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)

  def loss(q, weights, keys, k, lse):
    index = rj.TopTokens(q=q, weights=weights, keys=keys, count=64)
    blocks = jnp.zeros((1, t, 1, 64), jnp.int32)
    chosen = rj.GivenBlocks(blocks=blocks)
    return jnp.sum(
      rj.index_loss(k, k, index, lse, chosen=chosen, is_causal=True)
    )

  compiled = (
    jax.jit(jax.grad(loss, (0, 1, 2)))
    .lower(
      shape(1, t, 1, 4), shape(1, t, 1), shape(1, t, 4), shape(1, t, 1, 8),
      shape(1, t, 1),
    )
    .compile()
  )  # fmt: skip
  assert compiled.memory_analysis().temp_size_in_bytes < t * t


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused_by_name():
  q, k, _, index = operands()
  lse = jnp.zeros((1, 32, 4))
  at = jnp.arange(32, dtype=jnp.int32)[None]
  pooled = rj.TopPooledBlocks(
    q=index.q,
    weights=index.weights,
    keys=index.keys,
    bias=jnp.zeros((4, 4)),
    count=2,
  )
  cases = (
    ("sinks", (q, k, index, lse), dict(sinks=jnp.zeros(4))),
    ("lse", (q, k, index, lse[..., :1]), {}),
    ("index", (q, k, rj.TopBlocks(count=2, block=4), lse), {}),
    (
      "kv_positions",
      (q, k, pooled, lse),
      dict(kv_positions=at, q_positions=at),
    ),
    (
      "blocks of 1 keys",
      (q, k, pooled, lse),
      dict(chosen=rj.GivenBlocks(blocks=jnp.zeros((1, 32, 1, 1), jnp.int32))),
    ),
    (
      "one choice for all heads",
      (q, k, index, lse),
      dict(chosen=rj.GivenBlocks(blocks=jnp.zeros((1, 32, 2, 1), jnp.int32))),
    ),
    ("dropout_rate", (q, k, index, lse), dict(dropout_rate=0.1)),
    ("without a batch axis", (q[0], k[0], index, lse), {}),
  )
  for words, x, options in cases:
    with pytest.raises(RingjaxError, match=words):
      rj.index_loss(*x, is_causal=True, **options)

"""Sparse attention equals dense attention under the mask of its choice."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ringjax as rj
from ringjax.errors import DtypeError, OptionError, RingjaxError
from ringjax.ops.attention.sparse import gathered, top_tokens
from tests.contracts import sparse


def mesh_of(shards: int, kind: AxisType = AxisType.Auto):
  return jax.make_mesh(
    (shards,), ("seq",), axis_types=(kind,), devices=jax.devices()[:shards]
  )


@pytest.mark.parametrize(
  "kind",
  [
    kind if kind == "top-blocks" else pytest.param(kind, marks=pytest.mark.long)
    for kind in sparse.CASES
  ],
)
def test_each_kind_equals_dense_attention_on_one_device(kind):
  sparse.check(sparse.CASES[kind])


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "shards"),
  [
    ("contiguous", 2),
    ("contiguous", 8),
    ("striped", 1),
    ("striped", 4),
    ("striped4", 8),
    ("zigzag", 2),
    ("zigzag", 4),
  ],
)
@pytest.mark.parametrize("kind", sparse.CASES)
def test_each_kind_equals_dense_attention_in_each_layout(kind, layout, shards):
  t = 64 if layout in ("zigzag", "striped4") else 40
  case, order = sparse.CASES[kind], sparse.LAYOUTS[layout]
  sparse.check(case, order, shards, t=t, mesh=mesh_of(shards))


@pytest.mark.long
def test_a_sharded_call_equals_dense_attention():
  case = sparse.CASES["top-tokens-tied"]
  sparse.check(case, rj.Striped(), 4, mesh=mesh_of(4))


@pytest.mark.long
@pytest.mark.parametrize("kind", sparse.CASES)
def test_packed_documents_windows_sinks_and_caps_combine(kind):
  options = dict(packed=True, window=17, sinks=True, soft_cap=3.0)
  sparse.check(sparse.CASES[kind], **options)
  sparse.check(sparse.CASES[kind], rj.Striped(), 4, mesh=mesh_of(4), **options)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["given-blocks", "top-tokens", "top-blocks"])
def test_uneven_shards_and_explicit_meshes_give_the_same(kind):
  case = sparse.CASES[kind]
  uneven = rj.Uneven((13, 9, 10, 8))
  sparse.check(case, uneven, 4, mesh=mesh_of(4))
  # 37 tokens do not divide over 4 shards.
  sparse.check(case, rj.Contiguous(), 4, t=37, mesh=mesh_of(4))
  sparse.check(case, rj.Contiguous(), 4, mesh=mesh_of(4, AxisType.Explicit))


def test_chosen_rows_of_latents_give_what_keys_of_all_heads_give():
  sparse.check_latents(rj.Contiguous())


@pytest.mark.long
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_chosen_rows_travel_between_shards_and_heads_stay(layout):
  order = sparse.LAYOUTS[layout]
  sparse.check_latents(order, 4, mesh_of(4))
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  sparse.check_latents(order, 2, mesh)


def test_a_choice_can_be_read_by_another_layer():
  q, k, v = operands()
  selection = rj.TopBlocks(count=2, block=4, heads="kv")
  attend = lambda selection, **options: rj.sparse_attention(
    q, k, v, selection, is_causal=True, **options
  )
  out, choice = attend(selection, return_selection=True)
  assert isinstance(choice, rj.GivenBlocks)
  np.testing.assert_array_equal(attend(choice), out)


def test_a_call_inside_of_a_shard_map_equals_the_whole_call():
  q, k, v = operands()
  selection = rj.TopBlocks(count=2, block=4)
  spec = jax.P(None, "seq")
  attend = lambda *x, **options: rj.sparse_attention(
    *x, selection, is_causal=True, **options
  )
  sharded = jax.shard_map(
    lambda *x: attend(*x, axis="seq"),
    mesh=mesh_of(4),
    in_specs=(spec, spec, spec),
    out_specs=spec,
  )
  np.testing.assert_allclose(sharded(q, k, v), attend(q, k, v), atol=1e-6)


def operands(t: int = 32):
  r = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)
  b, n, kv_heads, h = sparse.B, sparse.N, sparse.K, sparse.H
  return (
    draw(b, t, n, h),
    draw(b, t, kv_heads, h),
    draw(b, t, kv_heads, sparse.J),
  )


def test_a_query_that_chooses_no_key_gives_zero_and_no_gradient():
  q, k, v = operands()
  selection = rj.GivenBlocks(blocks=jnp.full((2, 32, 1, 3), -1, jnp.int32))
  loss = lambda *x: jnp.sum(rj.sparse_attention(*x, selection, is_causal=True))
  value, gradients = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
  assert value == 0
  assert all(not np.any(x) for x in gradients)


def test_later_tokens_and_other_documents_change_no_choice():
  q, k, v = operands(40)
  seg = jnp.asarray(sparse.PACKED)
  selection = rj.TopBlocks(count=3, block=4)
  attend = lambda k: rj.sparse_attention(
    q, k, v, selection, is_causal=True, q_segment_ids=seg,
    return_selection=True,
  )[1].blocks  # fmt: skip
  # Token 12 is in the second document of both rows.
  changed = np.asarray(attend(k.at[:, 12].multiply(-100)))
  unchanged = np.asarray(attend(k))
  others = (sparse.PACKED[:, 12:13] != sparse.PACKED) | (np.arange(40) < 12)
  np.testing.assert_array_equal(changed[others], unchanged[others])
  assert not np.array_equal(changed, unchanged)


def test_a_key_that_is_not_finite_reaches_only_queries_that_choose_it():
  q, k, v = operands()
  blocks = jnp.arange(32, dtype=jnp.int32)[None, :, None, None] // 4
  selection = rj.GivenBlocks(blocks=jnp.repeat(blocks, 2, 0), block=4)
  v = v.at[:, 0].set(jnp.nan)
  out = rj.sparse_attention(q, k, v, selection, is_causal=True)
  assert np.isfinite(out[:, 4:]).all()
  assert np.isnan(out[:, :4]).all()


def qkv(t=32, heads=1):
  keys = jax.random.split(jax.random.key(1), 3)
  return [
    jax.random.normal(key, (1, t, n, 8))
    for key, n in zip(keys, (heads, 1, 1), strict=True)
  ]


def test_numbers_out_of_range_are_no_blocks_under_a_trace():
  q, k, v = qkv()
  real = jnp.zeros((1, 32, 1, 1), jnp.int32)
  # Times a block of 8 this overflows to a position before the first one.
  far = jnp.full_like(real, 2**31 - 1)

  @jax.jit
  def attend(blocks):
    selection = rj.GivenBlocks(blocks=blocks, block=8)
    return rj.sparse_attention(q, k, v, selection, is_causal=True)

  np.testing.assert_array_equal(attend(far), 0)
  both = attend(jnp.concatenate([real, far], -1))
  np.testing.assert_allclose(both, attend(real), atol=1e-6)


@pytest.mark.parametrize("tokens", [False, True])
def test_scores_that_are_no_numbers_show_in_the_result(tokens):
  q, k, v = qkv()
  q = q.at[:, 9].set(jnp.nan)
  selection = rj.TopBlocks(count=2, block=4)
  if tokens:
    selection = rj.TopTokens(
      q=q, weights=jnp.ones((1, 32, 1)), keys=k[:, :, 0], count=4
    )
  out = rj.sparse_attention(q, k, v, selection, is_causal=True)
  assert np.isnan(out[:, 9]).all()
  assert np.isfinite(np.delete(out, 9, 1)).all()
  # A block that is not finite is read, and the query's own block beside it.
  k = k.at[:, 0].set(jnp.nan)
  out, choice = rj.sparse_attention(
    q, k, v, rj.TopBlocks(count=2, block=4), is_causal=True,
    return_selection=True,
  )  # fmt: skip
  assert np.isnan(out[:, 4:]).all()
  assert {*np.asarray(choice.blocks[0, 31, 0])} == {0, 7}


def test_heads_that_choose_together_are_on_one_shard():
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  selection = rj.TopBlocks(count=2, block=4, heads="kv")
  q, k, v = qkv(heads=4)
  with pytest.raises(OptionError, match="1 kv heads over 2 shards"):
    rj.sparse_attention(
      q, k, v, selection, is_causal=True, mesh=mesh, axis="seq",
      head_axis="model",
    )  # fmt: skip


def test_index_keys_of_another_dtype_are_refused():
  q, k, v = qkv()
  selection = rj.TopTokens(
    q=q.astype(jnp.float16),
    weights=jnp.ones((1, 32, 1)),
    keys=k[:, :, 0],
    count=4,
  )
  with pytest.raises(DtypeError, match=r"selection\.keys"):
    rj.sparse_attention(q, k, v, selection, is_causal=True)


def test_pairs_that_are_computed_are_few_more_than_those_chosen():
  r = np.random.default_rng(0)
  t, shards, count, block = 131072, 8, 2048, 64
  executed = lambda counts: (
    gathered.executed_pairs(counts, count, 64) / counts.sum()
  )
  # Each of 8,192 queries chooses 2,048 of 131,072 keys at random.
  counts = r.multinomial(count, [1 / shards] * shards, 8192)
  assert 1 <= executed(counts) <= 1.2
  # 32 blocks of 64 of these keys.
  draw = lambda: r.choice(t // block, count // block, replace=False)
  blocks = np.stack([draw() for _ in range(8192)])
  keys = (blocks[..., None] * block + np.arange(block)).reshape(8192, -1)
  by_shard = lambda shard: np.stack(
    [(shard == i).sum(1) for i in range(shards)], 1
  )
  assert 1 <= executed(by_shard(keys // (t // shards))) <= 1.1
  # A striped layout deals each block to all shards.
  assert executed(by_shard(keys % shards)) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["given-blocks", "top-tokens"])
def test_queries_in_the_order_of_their_lists_give_the_same(kind, monkeypatch):
  """Chunks of 7 of 40 queries, in an order of its own for each row and head."""
  monkeypatch.setattr(gathered, "_CHUNK", 7)
  jax.clear_caches()
  sparse.check(sparse.CASES[kind])
  jax.clear_caches()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["given-blocks-per-query-head", "top-tokens"])
def test_chunks_in_the_order_of_lists_combine_on_shards(kind, monkeypatch):
  monkeypatch.setattr(gathered, "_CHUNK", 3)
  jax.clear_caches()
  options = dict(packed=True, window=17, sinks=True, soft_cap=3.0)
  sparse.check(sparse.CASES[kind], rj.Striped(), 4, mesh=mesh_of(4), **options)
  jax.clear_caches()


def test_the_compiled_program_has_no_array_of_all_pairs():
  t = 4096
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  blocks = jax.ShapeDtypeStruct((1, t, 1, 4), jnp.int32)

  def attend(q, k, v, blocks):
    return rj.sparse_attention(
      q, k, v, rj.GivenBlocks(blocks=blocks, block=16), is_causal=True
    )

  def loss(*x):
    return jnp.sum(attend(*x))

  x = shape(1, t, 1, 8)
  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, blocks).compile()
  memory = compiled.memory_analysis()
  assert memory.temp_size_in_bytes < t * t


SELECTIONS = {
  "count of 0": (lambda: rj.TopBlocks(count=0, block=4), {}, "count"),
  "more blocks than there are": (
    lambda: rj.TopBlocks(count=9, block=4), {}, "at most 8",
  ),
  "a number of a block that is not there": (
    lambda: rj.GivenBlocks(blocks=jnp.full((2, 32, 1, 1), 32, jnp.int32)),
    {},
    "from -1",
  ),
  "blocks of another length": (
    lambda: rj.GivenBlocks(blocks=jnp.zeros((2, 31, 1, 1), jnp.int32)),
    {},
    "31",
  ),
  "keys of an index of another length": (
    lambda: rj.TopTokens(
      q=jnp.ones((2, 32, 1, 4)),
      weights=jnp.ones((2, 32, 1)),
      keys=jnp.ones((2, 40, 4)),
      count=3,
    ),
    {},
    "32 as dimension S",
  ),
  "blocks of another number of heads": (
    lambda: rj.GivenBlocks(blocks=jnp.zeros((2, 32, 3, 1), jnp.int32)),
    {},
    "M of 1",
  ),
  "pooled keys that not all may be seen": (
    lambda: rj.TopBlocks(count=2, block=4),
    dict(is_causal=False, mask=rj.Causal() | rj.Prefix(5)),
    "no later keys",
  ),
  "a bias": (
    lambda: rj.TopBlocks(count=2, block=4), dict(bias=jnp.zeros(())), "bias",
  ),
  "positions of keys where blocks are of positions": (
    lambda: rj.TopBlocks(count=2, block=4),
    dict(kv_positions=jnp.arange(32)),
    "kv_positions",
  ),
  "more tokens than the blocks have": (
    lambda: rj.TopTokensOfBlocks(
      q=jnp.ones((2, 32, 1, 4)), weights=jnp.ones((2, 32, 1)),
      keys=jnp.ones((2, 32, 4)), count=9, block=4, blocks=2,
    ),
    {},
    "at most 8",
  ),
  "blocks of a call that is not causal": (
    lambda: rj.TopTokensOfBlocks(
      q=jnp.ones((2, 32, 1, 4)), weights=jnp.ones((2, 32, 1)),
      keys=jnp.ones((2, 32, 4)), count=8, block=4, blocks=2,
    ),
    dict(is_causal=False),
    "no later keys",
  ),
  "positions of pooled keys that are not rotated": (
    lambda: rj.TopPooledBlocks(
      q=jnp.ones((2, 32, 1, 4)), weights=jnp.ones((2, 32, 1)),
      keys=jnp.ones((2, 32, 4)), bias=jnp.zeros((4, 4)), count=2,
      positions=jnp.zeros((2, 32), jnp.int32),
    ),
    {},
    "without a rope",
  ),
  "an option of dense attention": (
    lambda: rj.TopBlocks(count=2, block=4), dict(dropout_rate=0.1), "dropout",
  ),
  "an array of pairs": (
    lambda: rj.TopBlocks(count=2, block=4),
    dict(mask=jnp.ones((32, 32), bool)),
    "GivenBlocks",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_does_not_fit_is_refused_by_name(name):
  make, options, words = SELECTIONS[name]
  with pytest.raises(RingjaxError, match=words):
    rj.sparse_attention(*operands(), make(), **{"is_causal": True, **options})


def test_tokens_of_blocks_are_those_of_the_whole_index_where_blocks_suffice():
  q, k, v = qkv()
  index = {"q": q, "weights": -jnp.ones((1, 32, 1)), "keys": k[:, :, 0]}
  read = lambda selection: np.sort(
    rj.sparse_attention(
      q, k, v, selection, is_causal=True, return_selection=True
    )[1].blocks,
    -1,
  )
  whole = read(rj.TopTokens(count=4, **index))
  of_all = rj.TopTokensOfBlocks(count=4, block=4, blocks=8, **index)
  np.testing.assert_array_equal(read(of_all), whole)
  # Of fewer blocks, each token of the whole choice that is in one of them.
  kept, blocks = read(dataclasses.replace(of_all, blocks=3)), 3
  np.testing.assert_array_equal(kept[:, : 4 * blocks], whole[:, : 4 * blocks])
  for got, want in zip(kept[0, :, 0], whole[0, :, 0], strict=True):
    assert {x for x in want if x // 4 in got // 4} <= {*got}


def products(jaxpr, times=1):
  """Number of multiplications of a program's products; a `while` runs once."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      contracted = equation.params["dimension_numbers"][0][0]
      sizes = [equation.invars[0].aval.shape[i] for i in contracted]
      total += times * math.prod((*equation.outvars[0].aval.shape, *sizes))
    runs = times * equation.params.get("length", 1)
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      total += products(inner, runs)
  return total


def test_an_index_in_two_stages_computes_few_products():
  t, dims = 4096, 8
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)

  def count(kind, **options):
    def attend(q, weights, keys):
      selection = kind(q=q, weights=weights, keys=keys, count=32, **options)
      k = keys[:, :, None]
      return rj.sparse_attention(q, k, k, selection, is_causal=True)

    x = shape(1, t, 4, dims), shape(1, t, 4), shape(1, t, dims)
    return products(jax.make_jaxpr(attend)(*x).jaxpr)

  one_stage = count(rj.TopTokens)
  two_stages = count(rj.TopTokensOfBlocks, block=32, blocks=4)
  assert one_stage > t * t * 4 * dims
  # Of 128 means and of 4 * 32 tokens, with four heads and their weights.
  assert two_stages < 1.2 * t * (128 + 128) * 4 * (dims + 1)


def test_heads_that_choose_rows_for_themselves_are_refused():
  q, k, _ = qkv(heads=2)
  up, selection = jnp.ones((6, 2, 9)), rj.TopBlocks(count=2, block=4)
  with pytest.raises(OptionError, match="one choice for all heads"):
    rj.sparse_latent_attention(q, k[:, :, 0], up, selection, is_causal=True)


def test_a_derivative_of_a_derivative_is_refused():
  selection = rj.TopBlocks(count=2, block=4)
  loss = lambda q, *kv: jnp.sum(
    rj.sparse_attention(q, *kv, selection, is_causal=True)
  )
  q, k, v = operands()
  with pytest.raises(OptionError, match="derivative"):
    jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, k, v)))(q)


def missed_block(monkeypatch):
  choose = rj.TopBlocks.choose
  fault = lambda self, tokens: choose(self, tokens).at[..., -1].set(-1)
  monkeypatch.setattr(rj.TopBlocks, "choose", fault)
  return "top-blocks", {}


def tie_by_shard(monkeypatch):
  # Equal scores are ranked in order of arrival, not by position.
  sort = lambda x, num_keys: jax.lax.sort(x, num_keys=1, is_stable=True)
  fault = type("Faulty", (), {"sort": staticmethod(sort)})
  for name in ("top_k", "fori_loop"):
    setattr(fault, name, staticmethod(getattr(jax.lax, name)))
  monkeypatch.setattr(top_tokens, "lax", fault)
  return "top-tokens-tied", dict(shards=4, mesh=mesh_of(4))


def dropped_gradient_of_lse(monkeypatch):
  backward = gathered.GatherChosen.backward

  def fault(self, x, args, residuals, carry):
    delta = jnp.zeros_like(residuals.delta)
    residuals = residuals._replace(delta=delta)
    return backward(self, x, args, residuals, carry)

  monkeypatch.setattr(gathered.GatherChosen, "backward", fault)
  return "given-tokens", {}


@pytest.mark.long
@pytest.mark.parametrize(
  "plant", [missed_block, tie_by_shard, dropped_gradient_of_lse]
)
def test_the_suite_finds_a_planted_fault(plant, monkeypatch):
  jax.clear_caches()
  kind, options = plant(monkeypatch)
  with pytest.raises(AssertionError):
    sparse.check(sparse.CASES[kind], **options)
  monkeypatch.undo()
  jax.clear_caches()

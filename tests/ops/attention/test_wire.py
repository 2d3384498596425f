"""Keys and values in fewer bytes on the wire: how far off, and where."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import Blockwise, Chain, Dense, Gather, Halo, Ring, Striped
from ringjax.bench.program import Program
from ringjax.errors import OptionError
from ringjax.ops.attention.strategies.wire_format import DTYPES, WireFormat
from tests import oracle
from tests.ops.attention.test_exact import causal, ring_mesh
from tests.ops.attention.test_schedule import compiled

TILES = Blockwise(8, 8)
# Of a number, and of the largest in its block: as the module states.
ERRORS = {
  "bfloat16": (2**-8, 0),
  "float16": (2**-11, 2**-18),
  "int8": (0, 1 / 252),
  "float8_e4m3fn": (2**-4, 2**-18),
  "float8_e5m2": (2**-3, 2**-32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 32), (5, 64)])
def test_what_arrives_is_near_what_left(dtype, dim, block):
  rng = np.random.default_rng(dim)
  x = rng.normal(size=(3, 7, dim)) * 10.0 ** rng.integers(-6, 4, (3, 7, dim))
  x = np.minimum(np.abs(x), 6e4) * np.sign(x)
  x[0, 0] = 0
  x = jnp.asarray(x, jnp.float32)
  wire = WireFormat(dtype, block)
  got = np.asarray(wire.decode(wire.encode(x), x), np.float64)
  each, largest = ERRORS[dtype]
  x = np.asarray(x, np.float64)
  blocks = -(-dim // block)
  size = -(-dim // blocks)
  wide = np.pad(np.abs(x), ((0, 0), (0, 0), (0, blocks * size - dim)))
  amax = wide.reshape(3, 7, blocks, size).max(-1).repeat(size, -1)[..., :dim]
  limit = each * np.abs(x) + largest * amax + 1e-6 * np.abs(x)
  assert (np.abs(got - x) <= limit + 1e-38).all()
  assert not got[0, 0].any()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_code_of_what_arrived_is_the_code_that_left(dtype):
  """So an outer level may code what an inner one codes again."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 64)), jnp.float32)
  wire = WireFormat(dtype)
  once = wire.decode(wire.encode(x), x)
  twice = wire.decode(wire.encode(once), x)
  np.testing.assert_allclose(once, twice, rtol=1e-6)


@functools.cache
def problem(spread=1.0):
  case = oracle.build(
    t=96, is_causal=True, sees=causal, sinks=True, spread=spread, h=32
  )
  return case, oracle.truth(case)


def found(wire, shards=8, kind=Ring):
  case, want = problem()
  strategy = kind(TILES, wire=wire)
  layout = Striped() if kind in (Ring, Gather) else rj.Contiguous()
  got = oracle.run(
    case, layout=layout, shards=shards, mesh=ring_mesh(shards),
    strategy=strategy,
  )  # fmt: skip
  return {n: oracle.error(got[n], want[n]) for n in want}


# Of all results; a quarter of each was measured at least.
LIMITS = {
  "bfloat16": 8e-3,
  "int8": 1.6e-2,
  "float8_e4m3fn": 8e-2,
  "float8_e5m2": 1.6e-1,
}


@pytest.mark.one_case
@pytest.mark.parametrize(
  "dtype",
  [
    "int8",
    "float8_e5m2",
    pytest.param("bfloat16", marks=pytest.mark.slow),
    pytest.param("float8_e4m3fn", marks=pytest.mark.slow),
  ],
)
def test_attention_and_its_gradients_are_near(dtype):
  errors = found(dtype)
  assert max(errors.values()) < LIMITS[dtype], errors
  # It was coded at all.
  assert max(errors.values()) > LIMITS[dtype] / 40, errors


@pytest.mark.long
def test_errors_do_not_grow_with_hops():
  two, eight = found("int8", 2), found("int8", 8)
  for name in two:
    assert eight[name] < 2 * two[name], (two, eight)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Gather, Chain])
def test_others_that_move_keys(kind):
  errors = found("int8", 4, kind)
  assert 1e-4 < max(errors.values()) < LIMITS["int8"], errors


def test_a_halo_is_coded_too():
  case = oracle.build(
    is_causal=True, local_window_size=(9, 0),
    sees=lambda i, j: (j <= i) & (i - j <= 9),
  )  # fmt: skip
  got = oracle.run(
    case, shards=8, mesh=ring_mesh(8), strategy=Halo(TILES, wire="int8")
  )
  want = oracle.truth(case)
  errors = {n: oracle.error(got[n], want[n]) for n in want}
  assert 1e-4 < max(errors.values()) < LIMITS["int8"], errors


def test_the_stated_bound_of_an_output():
  """(e^(2 delta) - 1) max |v| + the error of v, with delta from the codes."""
  case, want = problem()
  x = case.arrays
  got = oracle.run(
    case, layout=Striped(), shards=8, mesh=ring_mesh(8),
    strategy=Ring(TILES, wire="int8"),
  )  # fmt: skip
  each = lambda a: np.repeat(np.abs(a).max(-1), 2, axis=2)  # [B, S, N]
  k_error = each(x["key"]) / 252
  weight = np.abs(x["query"]).sum(-1) * x["query"].shape[-1] ** -0.5
  delta = weight.max() * k_error.max()
  bound = (np.exp(2 * delta) - 1) * np.abs(x["value"]).max()
  bound += np.abs(x["value"]).max() / 252
  off = np.abs(got["out"] - want["out"]).max()
  assert off <= bound
  assert off > bound / 1000  # The bound is of this size and not just any.


@pytest.mark.long
def test_own_keys_stay_exact():
  """With a window inside of shards nothing that is seen has travelled."""
  sees = lambda i, j: (i // 12 == j // 12) & (j <= i)
  case = oracle.build(mask=rj.Chunked(12) & rj.Causal(), sees=sees, t=96)
  got = oracle.run(
    case, shards=8, mesh=ring_mesh(8),
    strategy=Ring(TILES, wire="float8_e5m2", hops=(7, 0)),
  )  # fmt: skip
  oracle.check(got, oracle.truth(case))


def test_a_key_that_is_not_finite_reaches_who_sees_it():
  case, _ = problem()
  x = {n: np.copy(a) for n, a in case.arrays.items()}
  x["value"][0, 40, 1, 3] = np.nan
  out = rj.dot_product_attention(
    **x, is_causal=True, mesh=ring_mesh(8), strategy=Ring(wire="int8")
  )
  bad = np.isnan(np.asarray(out)).any(-1)
  assert bad[0, 40:, 2:].all() and not bad[0, :40].any()
  assert not bad[1].any() and not bad[0, :, :2].any()


@pytest.mark.parametrize("backward", [False, True])
def test_the_program_sends_codes(backward):
  text = compiled(4, 48, backward, strategy=Ring(wire="int8")).as_text()
  bytes_of = {}
  for _, i, times in Program(text).sends():
    kind = i.shapes[0][0]
    bytes_of[kind] = bytes_of.get(kind, 0) + times * i.bytes
  block = 2 * 1 * 2 * 12 * 16  # [2, B, K, S, H]
  assert bytes_of["s8"] == 3 * block
  scales = 3 * block // 16 * 4
  sums = 4 * block * 4 if backward else 0
  assert bytes_of["f32"] == scales + sums


def test_the_program_sends_narrow_numbers():
  """As traced: compilers for CPUs widen bfloat16 wherever it is."""
  x = jnp.zeros((1, 48, 2, 16), jnp.float32)
  loss = lambda *x: rj.dot_product_attention(
    *x, mesh=ring_mesh(4), strategy=Ring(wire="bfloat16")
  ).sum()
  text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
  sent = re.findall(r":(\w+)\[2,1,2,12,16\]\S* = ppermute", text)
  assert {*sent} == {"bf16", "f32"}, sent


@pytest.mark.parametrize("kind", [Ring, Gather, Chain, Halo])
def test_bad_wires(kind):
  with pytest.raises(OptionError, match="wire: got 'int4'"):
    kind(wire="int4")
  with pytest.raises(OptionError, match="a blockwise algorithm"):
    kind(Dense(), wire="int8")
  with pytest.raises(OptionError, match="wire block"):
    kind(wire=WireFormat("int8", 0))

"""The numerics contract: how large errors may be, and what must be exact.

Against float64 on inputs rounded to the dtype, with logits whose standard
deviation is 16, so that most rows are nearly one-hot and some are not.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import (
  Blockwise,
  Contiguous,
  Dense,
  Gather,
  Ring,
  RingQ,
  Striped,
  Ulysses,
  Zigzag,
)
from tests import oracle

DTYPES = {
  "float64": np.float64,
  "float32": np.float32,
  "bfloat16": jnp.bfloat16,
  "float16": np.float16,
}
# Relative L2 errors of the outputs and of the gradients.
FORWARD = dict(float64=2e-14, float32=5e-6, bfloat16=4e-3, float16=6e-4)
BACKWARD = dict(float64=1e-14, float32=1.5e-5, bfloat16=1e-2, float16=1.5e-3)
# On every processor the same.
NARROW, WIDE = (Ring(Blockwise(64, 64, wide=wide)) for wide in (False, True))
LAYOUTS = [Contiguous(), Striped(), Striped(4), Zigzag()]
TILES = Blockwise(8, 8)


@functools.cache
def ring_mesh(shards):
  return rj.make_mesh((shards,), ("seq",))


@functools.cache
def sharp(dtype, spread):
  """A causal problem with sinks, and its truth."""
  case = oracle.build(
    b=1,
    t=512,
    n=2,
    kv=1,
    h=64,
    spread=spread,
    is_causal=True,
    sees=lambda i, j: j <= i,
    sinks=True,
    dtype=DTYPES[dtype],
  )
  return case, oracle.truth(case)


@functools.cache
def errors(dtype, spread, shards, strategy=None):
  """The error of each result, by its name."""
  case, want = sharp(dtype, spread)
  with jax.enable_x64(dtype == "float64"):
    got = oracle.run(
      case,
      layout=Striped(),
      shards=shards,
      mesh=ring_mesh(shards),
      strategy=strategy or NARROW,
      compiler={},
    )
  assert got["lse"].dtype == (np.float64 if dtype == "float64" else np.float32)
  for name, x in got.items():
    assert name == "lse" or x.dtype == DTYPES[dtype]
  return {name: oracle.error(x, want[name]) for name, x in got.items()}


def within(found, dtype):
  limits = dict.fromkeys(found, BACKWARD[dtype])
  # The statistics are wide whatever the inputs are.
  wide = dtype if dtype == "float64" else "float32"
  limits |= {"out": FORWARD[dtype], "lse": FORWARD[wide]}
  wrong = {name: e for name, e in found.items() if not e <= limits[name]}
  assert not wrong, f"relative errors {wrong}"


@pytest.mark.one_case
@pytest.mark.parametrize("spread", [1.0, 16.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_small(dtype, spread):
  found = errors(dtype, spread, 8)
  within(found, dtype)
  if np.dtype(DTYPES[dtype]).itemsize == 2:
    # At most twice what rounding the exact answer would do.
    want = sharp(dtype, spread)[1]["out"]
    rounding = oracle.error(want.astype(DTYPES[dtype]), want)
    assert found["out"] <= 2 * rounding


@pytest.mark.one_case
@pytest.mark.parametrize(
  "strategy",
  [
    WIDE,
    Gather(),
    pytest.param(Ulysses(), marks=pytest.mark.slow),
    pytest.param(Ring(Dense()), marks=pytest.mark.slow),
    pytest.param(RingQ(), marks=pytest.mark.slow),
    pytest.param(Ring(two_way=True), marks=pytest.mark.slow),
    Ring(Ring(), inner=4),
    Ulysses(Ring(), inner=2),
  ],
)
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_errors_of_other_strategies_are_small(dtype, strategy):
  within(errors(dtype, 16.0, 8, strategy), dtype)


def test_products_of_float32_are_no_less_exact():
  narrow, wide = (errors("bfloat16", 16.0, 8, x) for x in (NARROW, WIDE))
  # Below the rounding of float32 the statistics are equally exact.
  limits = {name: max(1.05 * x, 6e-8) for name, x in narrow.items()}
  assert all(wide[name] <= limits[name] for name in narrow)


@pytest.mark.parametrize("wide", [False, True])
def test_wide_operands_stay_on_their_device(wide):
  x = jnp.zeros((1, 64, 2, 8), jnp.bfloat16)
  strategy = Ring(Blockwise(8, 8, wide=wide))

  def call(q, k, v):
    return rj.dot_product_attention(
        q, k, v, is_causal=True, mesh=ring_mesh(2), axis="seq",
        strategy=strategy,
    )  # fmt: skip

  def both(q, k, v, do):
    out, back = jax.vjp(call, q, k, v)
    return out, back(do)

  found = {"dot_general": set(), "ppermute": set()}
  _operands(jax.make_jaxpr(both)(x, x, x, x).jaxpr, found)
  want = jnp.float32 if wide else jnp.bfloat16
  assert found["dot_general"] == {np.dtype(want)}
  # Keys and values travel as they are, their gradients are sums.
  floats = {d for d in found["ppermute"] if jnp.issubdtype(d, jnp.floating)}
  assert floats == {np.dtype(jnp.bfloat16), np.dtype(jnp.float32)}


def _operands(jaxpr, found):
  """Adds the dtypes of the operands of these primitives, at any depth."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in found:
      found[eqn.primitive.name] |= {x.aval.dtype for x in eqn.invars}
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      _operands(inner, found)


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_errors_do_not_grow_with_the_ring(dtype):
  one = errors(dtype, 16.0, 1)
  for shards in (2, 4, 8):
    for name, e in errors(dtype, 16.0, shards).items():
      assert e <= 1.5 * one[name] + 1e-7, (name, shards)


# What must be exact.

SEGMENTS = np.stack(
  [
    np.repeat([1, 2, 3, 0], [20, 1, 44, 7]),
    np.repeat([4, 0, 7, 5], [33, 6, 9, 24]),
  ]
)
K_LEN = np.array([72, 61])
Q_LEN = np.array([63, 72])


@functools.cache
def packed(dtype=np.float32):
  return oracle.build(
    is_causal=True,
    sees=lambda i, j: j <= i,
    q_seg=SEGMENTS,
    k_len=K_LEN,
    q_len=Q_LEN,
    dtype=dtype,
  )


def packed_program(layout, strategy, dtype=np.float32):
  find = oracle.compiled(
    packed(dtype),
    layout=layout,
    shards=8,
    mesh=ring_mesh(8),
    strategy=strategy,
  )
  return find, find(packed(dtype))


PLACES = [(layout, Ring(TILES)) for layout in LAYOUTS]
PLACES += [
  (Zigzag(), Gather(TILES)),
  (Striped(), Ulysses(TILES)),
  (Striped(), RingQ(TILES)),
  (Zigzag(), Ring(TILES, two_way=True)),
  (Striped(), Ring(Ring(TILES), inner=2)),
  (Contiguous(), Ring(TILES, by_document=True)),
]


# Tokens (example, position) that change, as keys or as queries.
PLANTS = {
  "padding": ("keys", [(0, 68), (1, 35), (1, 71)]),
  "beyond the keys' length": ("keys", [(1, 61), (1, 66)]),
  "future of a document": ("keys", [(0, 40), (1, 20)]),
  "first of a document": ("keys", [(0, 21), (1, 39)]),
  "document of one token": ("keys", [(0, 20)]),
  "queries of padding": ("queries", [(0, 67), (1, 33)]),
  "beyond the queries' length": ("queries", [(0, 63), (0, 64)]),
  "a query": ("queries", [(0, 30), (1, 50)]),
}


def planted(case, what, tokens, value):
  """`case` with other numbers at `tokens`; None is a new finite number."""
  arrays = {name: x.copy() for name, x in case.arrays.items()}
  do, dlse = (x.copy() for x in case.cotangents)
  touched = [do, dlse, arrays["query"]]
  if what == "keys":
    touched = [arrays["key"], arrays["value"]]
  for b, token in tokens:
    for x in touched:
      # One bad number of a vector is enough.
      if value is None:
        x[b, token] += np.asarray(1.5, x.dtype)
      elif x.ndim > 3:
        x[b, token, :, 3] = value
      else:
        x[b, token] = value
  return dataclasses.replace(case, arrays=arrays, cotangents=(do, dlse))


def reached(visible, what, tokens):
  """(rows, keys), bool [B, T] each, that a change at `tokens` may reach."""
  rows = np.zeros(visible.shape[:2], bool)
  for b, token in tokens:
    if what == "keys":
      rows[b] |= visible[b, :, token]
    elif visible[b, token].any():
      rows[b, token] = True
  return rows, np.any(visible & rows[:, :, None], axis=1)


def check_blind_rows(got):
  visible = np.broadcast_to(packed().visible, (2, 1, 72, 72))[:, 0]
  blind, unseen = ~visible.any(2), ~visible.any(1)
  assert blind.any() and unseen.any()
  for name in ("out", "query"):
    assert np.all(got[name][blind] == 0)
  assert np.all(got["lse"][blind] == -np.inf)
  for name in ("key", "value"):
    assert np.all(got[name][unseen] == 0)
  for x in got.values():
    assert not np.isnan(x).any()


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "strategy"),
  [
    # On every commit: the ring in stripes, travelling queries, and a ring that
    # documents cut.
    pytest.param(*p, marks=() if n in (1, 6, 9) else pytest.mark.slow)
    for n, p in enumerate(PLACES)
  ],
)
def test_a_token_reaches_those_who_see_it_only(layout, strategy):
  find, clean = packed_program(layout, strategy)
  check_blind_rows(clean)
  for plant, (what, tokens) in PLANTS.items():
    for value in (None, np.nan, np.inf, -np.inf):
      case = planted(packed(), what, tokens, value)
      got = find(case)
      visible = np.broadcast_to(case.visible, (2, 1, 72, 72))[:, 0]
      rows, keys = reached(visible, what, tokens)
      for name, x in got.items():
        far = ~(keys if name in ("key", "value") else rows)
        # Bit for bit: not a zero times it, not another order of summation.
        same = np.array_equal(x[far], clean[name][far])
        assert same, (name, plant, value)
      if value is not None and np.isnan(value) and what == "keys":
        hidden = ~np.isnan(got["out"][rows]).any(-1)
        assert not hidden.any(), plant


@pytest.mark.one_case
@pytest.mark.parametrize("value", [None, np.nan, np.inf])
@pytest.mark.parametrize("plant", ["padding", "beyond the keys' length"])
def test_a_key_that_nobody_sees_changes_nothing_in_plain_attention(
  plant, value
):
  find, clean = packed_program(Zigzag(), Ring(Dense()))
  check_blind_rows(clean)
  got = find(planted(packed(), *PLANTS[plant], value))
  for name, x in got.items():
    assert np.array_equal(x, clean[name]), name

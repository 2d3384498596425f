"""Dropout: what is dropped depends on the tokens, and looks random."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import (
  Blockwise,
  Contiguous,
  Coords,
  Dense,
  Gather,
  Ring,
  Striped,
  Ulysses,
  Zigzag,
)
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  Scores,
  ScoreTile,
  Terms,
)
from tests import oracle

TILES = Blockwise(8, 8)


@functools.cache
def ring_mesh(shards):
  return rj.make_mesh((shards,), ("seq",))


def weights(rate, seed, q_pos, k_pos, heads=1):
  """The weights of all pairs, [B, N, T, S]."""
  at = lambda pos: Coords(
    *(
      jnp.asarray(np.reshape(x, (1, -1)), jnp.int32)
      for x in (pos, np.ones_like(pos))
    )
  )
  q, k = at(np.asarray(q_pos)), at(np.asarray(k_pos))
  seed = jnp.asarray(np.atleast_1d(np.asarray(seed, np.uint32)))
  context = Context(
    q, k, rj.Causal(), None, jnp.arange(heads, dtype=jnp.int32)[:, None], seed
  )
  scores = Scores(scale=1.0, dropout_rate=rate)
  tile = ScoreTile(ScoreArgs(scores, Terms(), context), FORWARD, 0, 0, q, k)
  return np.asarray(tile.dropout_weight(jnp.float32))[:, :, 0]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_is_kept(rate):
  found = weights(rate, [0, 1], np.arange(512), np.arange(512), heads=4)
  kept = found != 0
  assert np.allclose(found[kept], 1 / (1 - rate))
  # Of everything, of each head, of each row and of each column.
  for axis in ((0, 1, 2, 3), (2, 3), (3,), (2,)):
    n = math.prod(found.shape[i] for i in axis)
    deviation = math.sqrt(rate * (1 - rate) / n)
    assert np.all(abs(kept.mean(axis) - (1 - rate)) < 5.5 * deviation)


def test_pairs_are_independent():
  """No correlation between neighbours, rows, columns, heads and seeds."""
  kept = weights(0.5, [0, 1, 2, 2**31], np.arange(256), np.arange(256), heads=4)
  signs = np.where(kept != 0, 1.0, -1.0)
  others = {
    "next key": (signs[..., 1:], signs[..., :-1]),
    "next query": (signs[:, :, 1:], signs[:, :, :-1]),
    "diagonal": (signs[:, :, 1:, 1:], signs[:, :, :-1, :-1]),
    "transposed": (signs, signs.swapaxes(2, 3)),
    "next head": (signs[:, 1:], signs[:, :-1]),
    "next seed": (signs[1:], signs[:-1]),
  }
  for name, (a, b) in others.items():
    assert abs(np.mean(a * b)) < 6 / math.sqrt(a.size), name
  rows = signs[0, 0] @ signs[0, 0].T / 256
  columns = signs[0, 0].T @ signs[0, 0] / 256
  for gram in (rows, columns):
    # The largest of 32640 correlations of 256 signs.
    assert np.abs(gram - np.eye(256)).max() < 6 / math.sqrt(256)
  # Parity of the corners of rectangles: row hash and column hash must mix.
  corners = signs[..., 1:, 1:] * signs[..., :-1, :-1]
  corners = corners * signs[..., 1:, :-1] * signs[..., :-1, 1:]
  assert abs(np.mean(corners)) < 6 / math.sqrt(corners.size)


def test_a_pair_keeps_its_weight_wherever_it_lies():
  whole = weights(0.3, 7, np.arange(64), np.arange(64), heads=2)
  some = np.array([40, 3, 63, 4])
  part = weights(0.3, 7, np.arange(10, 20), some, heads=2)
  assert np.array_equal(part, whole[:, :, 10:20][..., some])


def problem(seed=5, **options):
  n, t = 4, 72
  seeds = np.atleast_1d(seed)
  case = oracle.build(
    is_causal=True,
    sees=lambda i, j: j <= i,
    sinks=True,
    dropout_rate=0.4,
    weights=weights(0.4, seeds, np.arange(t), np.arange(t), heads=n),
    **options,
  )
  fixed = {"dropout_seed": np.asarray(seed)}
  return dataclasses.replace(case, fixed=case.fixed | fixed)


PLACES = [
  pytest.param(1, Contiguous(), Ring(TILES), marks=pytest.mark.slow),
  pytest.param(1, Contiguous(), Ring(Blockwise()), marks=pytest.mark.slow),
  pytest.param(8, Contiguous(), Ring(TILES), marks=pytest.mark.slow),
  (8, Striped(), Ring(TILES)),
  pytest.param(3, Zigzag(), Ring(Blockwise(16, 8)), marks=pytest.mark.slow),
  pytest.param(8, Zigzag(), Ring(Dense()), marks=pytest.mark.slow),
  (8, Striped(4), Gather(TILES)),
  pytest.param(4, Zigzag(), Ulysses(TILES), marks=pytest.mark.slow),
  (8, Striped(), Ulysses(TILES)),
]


@pytest.mark.long
@pytest.mark.parametrize(("shards", "layout", "strategy"), PLACES)
def test_all_drop_the_same_pairs(shards, layout, strategy):
  """The truth's weights, and so one another's; gradients drop them too."""
  case = problem(np.array([5, 6], np.int32))
  got = oracle.run(
    case,
    layout=layout,
    shards=shards,
    strategy=strategy,
    mesh=ring_mesh(shards),
  )
  oracle.check(got, oracle.truth(case))


@pytest.mark.parametrize("seed", [5, -1, 2**40 + 3, np.uint32(7)])
def test_one_seed_serves_all_examples(seed):
  case = problem()
  q, k, v = (case.arrays[n] for n in ("query", "key", "value"))
  function = jax.jit(
    functools.partial(
      rj.dot_product_attention, dropout_rate=0.4, dropout_seed=seed
    )
  )
  same = {n: x.copy() for n, x in zip("qkv", (q, k, v), strict=True)}
  for x in same.values():
    x[1] = x[0]
  out = np.asarray(function(same["q"], same["k"], same["v"]))
  assert np.array_equal(out[0], out[1])
  number = np.uint32(int(seed) % 2**32)
  want = oracle.attend(
      same["q"], same["k"], same["v"], np.ones((1, 1, 72, 72), bool),
      *case.cotangents,
      weights=weights(0.4, number, np.arange(72), np.arange(72), heads=4),
  )["out"]  # fmt: skip
  assert oracle.error(out, want) < 3e-6


def test_seeds_heads_and_positions_differ_and_a_seed_repeats():
  x = np.ones((1, 64, 4, 8), np.float32)
  eye = np.repeat(np.eye(64, dtype=np.float32)[None, :, None], 4, axis=2)
  # With equal scores and one-hot values the output shows what was dropped.
  call = jax.jit(
    lambda seed, q_pos: rj.dot_product_attention(
      x, x, eye, dropout_rate=0.5, dropout_seed=seed, q_positions=q_pos
    )
  )
  here = np.arange(64, dtype=np.int32)
  kept = lambda seed, q_pos: np.asarray(call(seed, q_pos)) != 0
  one = kept(1, here)
  assert np.array_equal(one, kept(1, here))
  for other in (kept(2, here), kept(1, here + 1)):
    assert 0.4 < np.mean(one != other) < 0.6
  for head in range(1, 4):
    assert 0.4 < np.mean(one[:, :, 0] != one[:, :, head]) < 0.6


def test_the_residual_knows_nothing_of_dropout():
  case = problem()
  plain = dataclasses.replace(
    case, options={"is_causal": True}, fixed={}, weights=None
  )
  want = oracle.truth(plain)["lse"]
  got = oracle.run(case)["lse"]
  assert oracle.error(got, want) < 3e-6


def test_the_mean_over_seeds_is_attention_without_dropout():
  case = problem()
  q, k, v = (case.arrays[n][:1] for n in ("query", "key", "value"))
  call = lambda seed: rj.dot_product_attention(
    q, k, v, dropout_rate=0.4, dropout_seed=seed
  )
  outs = np.asarray(jax.jit(jax.vmap(call))(np.arange(256)))
  want = np.asarray(rj.dot_product_attention(q, k, v))
  spread = outs.std(0) / math.sqrt(256)
  assert np.all(abs(outs.mean(0) - want) < 6 * spread + 1e-6)

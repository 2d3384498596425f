"""The kernel that reads pages for many queries, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops.attention.cached.pooled import PooledView
from ringjax.ops.attention.cached.views import decode_attention
from ringjax.ops.attention.kernels.prefill_pool_tpu import PrefillPoolTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, SameSegment, Window
from ringjax.serve.prefix.shared_rows import shared_tiles
from tests.contracts import pool_kernel
from tests.ops.attention.kernels.test_decode import decoded, same

TILE, PAGE, COLUMNS = 128, 32, 3
KERNEL = PrefillPoolTPU(TILE, interpret=True)
# Tokens before each row's queries, and number of its queries.
ROWS = ((0, 70), (200, 70), (120, 33), (383, 1), (0, 0))
QUERIES = 70


def call(rows=ROWS, *, dtype=jnp.float32, mask=None, cap=None, groups=3,
         queries=QUERIES, seed=0):  # fmt: skip
  """The arguments of a call whose rows have these queries, after these keys."""
  r = np.random.default_rng(seed)
  many = (COLUMNS * TILE) // PAGE
  table = r.permutation(len(rows) * many).astype(np.int32)
  table = table.reshape(len(rows), many)
  before, new = (np.array(x)[:, None] for x in zip(*rows, strict=True))
  table[np.arange(many)[None] * PAGE >= before + new] = -1
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), dtype)
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  pos = np.broadcast_to(np.arange(many * PAGE), (len(rows), many * PAGE))
  view = PooledView(
    draw(2, len(rows) * many, 2, PAGE, 16),
    draw(2, len(rows) * many, 2, PAGE, 24),
    coords(pos, pos < before + new),
    jnp.asarray(table),
    jnp.int32(1),
  )
  at = np.arange(queries)[None]
  context = Context(coords(before + at, at < new), view.at, mask or Causal())
  scores = Scores(scale=0.25, soft_cap=cap)
  q = draw(len(rows), 2, groups, queries, 16)
  return q, view, ScoreArgs(scores, Terms(), context)


def check(args, limit=3e-6, kernel=KERNEL):
  got = decoded(kernel.decode, args)
  same(got, decoded(decode_attention, args), limit)
  return got


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("options", "limit"),
  [
    ({}, 3e-6),
    ({"mask": Causal() & SameSegment() & Window(140)}, 3e-6),
    ({"cap": 2.0}, 3e-6),
    ({"dtype": jnp.bfloat16}, 1e-2),
    ({"groups": 1}, 3e-6),
    ({"groups": 7, "queries": 75}, 3e-6),
  ],
  ids=["plain", "window", "cap", "half", "one_head", "tiles_of_queries"],
)
def test_it_equals_the_loops(options, limit):
  check(call(**options), limit)


def test_several_tiles_of_queries(monkeypatch):
  """Also where their number is not a whole number of tiles."""
  module = "ringjax.ops.attention.kernels.prefill_pool_tpu._QUERIES"
  monkeypatch.setattr(module, 48)
  args = call()
  assert KERNEL.tile(*args[:2])[2] == 16
  check(args)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd():
  q, view, args = call()
  crowd = decoded(KERNEL.decode, (q, view, args))
  for row in (0, 1, 2):
    one = lambda x, row=row: x[row : row + 1]
    context = Context(
      Coords(*map(one, args.context.q)),
      Coords(*map(one, args.context.k)),
      args.context.mask,
    )
    lone = dataclasses.replace(view, at=context.k, table=one(view.table))
    alone = decoded(
      KERNEL.decode, (one(q), lone, args._replace(context=context))
    )
    for a, b in zip(alone, crowd, strict=True):
      np.testing.assert_array_equal(a[0], b[row])


def test_values_that_are_keys():
  q, view, args = call()
  check((q, view.keys_alone(), args))


def test_what_is_not_seen_does_not_matter():
  pool_kernel.check_unseen(call, KERNEL)


SHARED = jax.tree.map(
  jnp.asarray,
  shared_tiles(np.zeros((5, 1, 12), np.int32), np.zeros(5), PAGE, TILE, 2),
)
DECLINED = pool_kernel.declined(PrefillPoolTPU) | {
  "a plan of shared tiles": dict(
    view=lambda x: dataclasses.replace(x, shared=SHARED)
  ),
}


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  pool_kernel.check_declines(call, KERNEL, words, DECLINED[words])


def test_a_tpu_takes_it():
  pool_kernel.check_choice(call, PrefillPoolTPU)

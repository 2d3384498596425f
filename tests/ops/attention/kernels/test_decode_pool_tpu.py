"""The kernel that reads pages which rows share, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.kv import Integers
from ringjax.ops.attention.cached.pooled import PooledView, decode_pool
from ringjax.ops.attention.cached.views import Decoder
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, SameSegment, Window
from ringjax.serve.prefix.shared_rows import shared_tiles
from tests.contracts import pool_kernel
from tests.ops.attention.kernels.test_decode import decoded, same

# The loops' tile on a CPU.
TILE, PAGE, COLUMNS = 128, 32, 3
KERNEL = DecodePoolTPU(TILE, interpret=True)
# Tokens of each row, and how many tiles it has in common with which row.
SHARING = {
  "nothing": ((200, 1, 384), ()),
  "all": ((384, 384), ((1, 0, 3),)),
  "some": ((300, 17, 301, 290, 129), ((2, 0, 2), (3, 0, 1))),
  "groups": ((300, 270, 301, 290, 0), ((1, 0, 2), (3, 2, 2))),
}


def call(name="some", *, dtype=jnp.float32, mask=None, cap=None, groups=3,
         alone=False, queries=1):  # fmt: skip
  """The arguments of a decode over pages."""
  lengths, common = SHARING[name]
  r, rows = np.random.default_rng(0), len(lengths)
  each, many = TILE // PAGE, COLUMNS * TILE // PAGE
  table = r.permutation(rows * many).astype(np.int32).reshape(rows, many)
  for b, other, n in common:
    table[b, : n * each] = table[other, : n * each]
  used = np.array(lengths)[:, None]
  table[np.arange(many)[None] * PAGE >= used] = -1
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), dtype)
  pos = np.broadcast_to(np.arange(many * PAGE), (rows, many * PAGE))
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  # A row's queries are after the tiles that it shares.
  ready = np.maximum(0 if alone else used[:, 0] - (queries > 1) * queries, 0)
  ready = np.broadcast_to(ready, used[:, 0].shape)
  plan = shared_tiles(table[:, None], ready, PAGE, TILE, 5)
  view = PooledView(
    draw(2, rows * many, 2, PAGE, 16),
    draw(2, rows * many, 2, PAGE, 24),
    coords(pos, pos < used),
    jnp.asarray(table),
    jnp.int32(1),
    shared=jax.tree.map(jnp.asarray, plan),
  )
  last = used - queries + np.arange(queries)
  context = Context(coords(last, last >= 0), view.at, mask or Causal())
  scores = Scores(scale=0.25, soft_cap=cap)
  q = draw(rows, 2, groups, queries, 16)
  return q, view, ScoreArgs(scores, Terms(), context)


def check(args, limit=3e-6):
  got = decoded(KERNEL.decode, args)
  same(got, decoded(decode_pool, args), limit)
  return got


@pytest.mark.one_case
@pytest.mark.parametrize("name", SHARING)
def test_it_equals_the_loops(name):
  args = call(name)
  assert (int(args[1].shared.count[0]) > 0) == (name != "nothing")
  check(args)


@pytest.mark.one_case
@pytest.mark.parametrize("what", ["window", "cap", "half", "one head"])
def test_masks_and_dtypes(what):
  options = {
    "window": dict(mask=Causal() & SameSegment() & Window(140)),
    "cap": dict(cap=2.0),
    "half": dict(dtype=jnp.bfloat16),
    "one head": dict(groups=1),
  }
  check(call(**options[what]), 1e-2 if what == "half" else 3e-6)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("name", "options", "limit"),
  [
    ("some", {}, 3e-6),
    pytest.param(
      "groups",
      {"mask": Causal() & SameSegment() & Window(140)},
      3e-6,
      marks=pytest.mark.long,
    ),
    pytest.param(
      "some",
      {"dtype": jnp.bfloat16, "groups": 4},
      1e-2,
      marks=pytest.mark.long,
    ),
  ],
  ids=["plain", "window", "half"],
)
def test_several_queries_of_a_row(name, options, limit):
  """As calls that check drafts have them."""
  args = call(name, queries=5, **options)
  assert int(args[1].shared.count[0]) > 0
  check(args, limit)


@pytest.mark.long
def test_a_tree_of_drafts_over_shared_pages():
  """Each drafted token sees the text and its ancestors alone."""
  lengths, _ = SHARING["some"]
  args = call("some", queries=5)
  before = np.maximum(np.array(lengths) - 5, 0)
  args = pool_kernel.with_tree(args, before)
  check(args)
  q, view, rest = args
  context = rest.context._replace(mask=Causal())
  chain = decoded(KERNEL.decode, (q, view, rest._replace(context=context)))
  assert not np.allclose(chain.l, check(args).l)


@pytest.mark.long
def test_several_queries_alone_as_in_a_crowd():
  crowd, alone = (
    check(call("some", queries=4, alone=alone)) for alone in (False, True)
  )
  same(crowd, alone, 3e-7)


def test_alone_as_in_a_crowd():
  """The sums of shared tiles are those of tiles that each row reads."""
  same(check(call("all")), check(call("all", alone=True)), 3e-7)


def test_values_that_are_keys():
  q, view, args = call()
  check((q, view.keys_alone(), args))


def test_what_is_not_seen_does_not_matter():
  pool_kernel.check_unseen(call, KERNEL)


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
  "queries", [1, pytest.param(5, marks=pytest.mark.long)]
)
def test_no_number_after_a_row_s_end_and_in_a_full_tile(queries):
  """The first matters to no row, the second to its own."""
  q, view, args = call("nothing", queries=queries)
  decode = jax.jit(lambda view: KERNEL.decode(q, view, args))
  want = decode(view)
  lengths, _ = SHARING["nothing"]
  page, slot = divmod(lengths[0], PAGE)
  last, first = int(view.table[0, page]), int(view.table[2, 0])
  spoil = lambda x: x.at[:, last, :, slot:].set(jnp.nan)
  spoilt_view = dataclasses.replace(view, k=spoil(view.k), v=spoil(view.v))
  for a, b in zip(decode(spoilt_view), want, strict=True):
    np.testing.assert_array_equal(a, b)
  for value in (jnp.nan, jnp.inf):
    seen = dataclasses.replace(view, v=view.v.at[:, first].set(value))
    results = decode(seen).acc
    assert not np.isfinite(results[2]).any()
    np.testing.assert_array_equal(results[:2], want.acc[:2])


DECLINED = pool_kernel.declined(DecodePoolTPU) | {
  "pages of codes": dict(
    view=lambda x: dataclasses.replace(
      x, decoders=(Decoder(Integers(bits=4), 16, jnp.float32),) * 2
    )
  ),
  "3 x 50 queries": dict(queries=50),
  "without a plan": dict(view=lambda x: dataclasses.replace(x, shared=None)),
}


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  pool_kernel.check_declines(call, KERNEL, words, DECLINED[words])


@pytest.mark.long
def test_a_tpu_takes_it():
  pool_kernel.check_choice(call, DecodePoolTPU)

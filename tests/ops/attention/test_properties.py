"""Properties that hold for all inputs, and a search for calls that differ.

The examples are the same in each run; `-m slow` tries more of them.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringjax as rj
from ringjax import (
  BlockCausal,
  Blockwise,
  Causal,
  Chunked,
  Contiguous,
  Coords,
  Dense,
  Gather,
  Partial,
  Prefix,
  Ring,
  SameSegment,
  SeparateDocuments,
  Striped,
  Ulysses,
  Window,
  Zigzag,
)
from ringjax.ops.attention.blockwise import tile_kinds
from ringjax.ops.attention.strategies.ring import cut_hops
from ringjax.ops.mask import Everything, Extent, extent, visible
from tests import oracle

few = functools.partial(
  settings,
  derandomize=True,
  deadline=None,
  database=None,
  suppress_health_check=list(HealthCheck),
)

layouts = st.one_of(
  st.just(Contiguous()),
  st.integers(1, 6).map(Striped),
  st.just(Zigzag()),
)


# Masks, each with what it means in NumPy.


def _simple_masks():
  positive = st.integers(1, 12)
  return st.one_of(
    st.just((Causal(), lambda i, j, a, b: j <= i)),
    st.just((Everything(), lambda i, j, a, b: (i == i) & (j == j))),
    st.just((SameSegment(), lambda i, j, a, b: a == b)),
    st.just(
      (SeparateDocuments(), lambda i, j, a, b: (a == 1) | (b == 2) | (a == b))
    ),
    positive.map(lambda w: (Window(w), lambda i, j, a, b: abs(i - j) < w)),
    st.tuples(positive, st.integers(0, 12)).map(
      lambda w: (
        Window(*w),
        lambda i, j, a, b: (i - j < w[0]) & (j - i <= w[1]),
      )
    ),
    positive.map(lambda n: (Prefix(n), lambda i, j, a, b: (j < n) & (i == i))),
    positive.map(lambda n: (Chunked(n), lambda i, j, a, b: i // n == j // n)),
    positive.map(
      lambda n: (BlockCausal(n), lambda i, j, a, b: j // n <= i // n)
    ),
  )


def _combined(masks):
  def join(parts):
    (m, f), (n, g), how = parts
    return how(m, n), lambda *x: how(f(*x), g(*x))

  how = st.sampled_from([operator.and_, operator.or_])
  return st.tuples(masks, masks, how).map(join)


masks = st.recursive(_simple_masks(), _combined, max_leaves=3)


def coordinates(batch, length):
  ints = lambda low, high: st.lists(
    st.integers(low, high), min_size=batch * length, max_size=batch * length
  ).map(lambda x: np.array(x, np.int32).reshape(batch, length))
  # Positions of any order and sign; documents 1..4 and padding.
  return st.tuples(ints(-5, 30), ints(0, 4)).map(lambda x: Coords(*x))


def pairs(at_q, at_k):
  row, column = lambda x: x[:, :, None], lambda x: x[:, None, :]
  return Coords(*map(row, at_q)), Coords(*map(column, at_k))


@given(masks, coordinates(2, 5), coordinates(2, 7))
@few(max_examples=60)
def test_masks_mean_what_they_say(mask, q, k):
  mask, means = mask
  rows, columns = pairs(q, k)
  want = means(rows.pos, columns.pos, rows.seg, columns.seg)
  want = want & (rows.seg != 0) & (columns.seg != 0)
  got = np.asarray(visible(mask, rows, columns))
  assert np.array_equal(*np.broadcast_arrays(got, want))


def check_bounds(mask, q, k, q_block, k_block):
  """Bounds of tiles against all pairs of the tile."""
  mask, means = mask
  kinds = np.asarray(tile_kinds(mask, q, k, q_block, k_block))
  rows, columns = pairs(q, k)
  yes = means(rows.pos, columns.pos, rows.seg, columns.seg)
  yes = yes & (rows.seg != 0) & (columns.seg != 0)
  yes = np.broadcast_to(yes, (q.pos.shape[0], q.pos.shape[1], k.pos.shape[1]))
  for a, b in np.ndindex(*kinds.shape):
    tile = yes[:, a * q_block : (a + 1) * q_block]
    tile = tile[:, :, b * k_block : (b + 1) * k_block]
    # None must be none, and all must be all; "some" may be anything.
    assert kinds[a, b] in (0, 1, 2)
    assert kinds[a, b] > 0 or not tile.any()
    assert kinds[a, b] < 2 or tile.all()
  return kinds, yes


@given(masks, coordinates(2, 8), coordinates(2, 12))
@few(max_examples=60)
def test_tile_kinds_never_contradict_the_pairs(mask, q, k):
  check_bounds(mask, q, k, 4, 3)


@pytest.mark.slow
@given(masks, coordinates(2, 8), coordinates(2, 12))
@few(max_examples=2000)
def test_tile_kinds_never_contradict_the_pairs_searched(mask, q, k):
  check_bounds(mask, q, k, 4, 3)


@pytest.mark.parametrize(
  "mask",
  [
    Causal(),
    Causal() & Window(7),
    Window(5),
    Chunked(6),
    BlockCausal(6),
    Causal() & SameSegment(),
    Causal() | Prefix(9),
  ],
)
def test_tile_kinds_are_tight_for_one_mask_in_natural_order(mask):
  """Not only safe: a bound that always says "look" would skip nothing."""
  at = Coords(np.arange(24, dtype=np.int32)[None], np.ones((1, 24), np.int32))
  kinds = np.asarray(tile_kinds(mask, at, at, 4, 3))
  yes = np.asarray(mask.allows(*pairs(at, at)))[0]
  tiles = yes.reshape(6, 4, 8, 3).swapaxes(1, 2)
  want = tiles.any((2, 3)).astype(int) + tiles.all((2, 3))
  assert np.array_equal(kinds, want)


def test_tiles_between_separate_documents_are_skipped():
  """Only questions, links and a shared prefix need tiles of other documents."""
  seg = np.repeat([2, 3, 4, 4, 5, 1], 4).astype(np.int32)[None]
  at = Coords(np.arange(24, dtype=np.int32)[None], seg)
  mask = SeparateDocuments()
  kinds = np.asarray(tile_kinds(Causal() & mask, at, at, 4, 4))
  rows, columns = seg[0, ::4][:, None], seg[0, ::4][None]
  want = (rows == 1) | (columns == 2) | (rows == columns)
  assert np.array_equal(kinds > 0, want & np.tril(np.ones((6, 6), bool)))
  # Which tiles are full is known too.
  assert np.array_equal(np.asarray(tile_kinds(mask, at, at, 4, 4)), 2 * want)


@given(masks, st.data())
@few(max_examples=20)
def test_reach_is_an_upper_bound(mask, data):
  mask, means = mask
  at = Coords(np.arange(-3, 40, dtype=np.int32)[None], np.ones((1, 43), int))
  rows, columns = pairs(at, at)
  yes = means(rows.pos, columns.pos, rows.seg, columns.seg)
  yes = np.broadcast_to(yes, (1, 43, 43))
  distance = (rows.pos - columns.pos)[yes]
  behind, ahead = mask.reach
  if distance.size:
    assert behind is None or distance.max() <= behind
    assert ahead is None or -distance.min() <= ahead


def test_padding_alone_has_an_empty_extent():
  nothing = Coords(np.full((1, 4), 9, np.int32), np.zeros((1, 4), np.int32))
  found = extent(nothing)
  assert isinstance(found, Extent)
  assert not found.some[0] and not found.all[0]


# Partials.


def partial_of(rng, shape=(2, 3), keys=0, spread=3.0):
  """The partial of some random keys, in float64."""
  s = spread * rng.normal(size=(*shape, keys))
  v = rng.normal(size=(*shape, keys, 4))
  m = s.max(-1, initial=-np.inf)
  p = np.exp(s - np.where(np.isinf(m), 0, m)[..., None])
  return Partial(np.einsum("...s,...sj->...j", p, v), m, p.sum(-1))


def same(a, b, tolerance=1e-12):
  for x, y in zip(rj.finalize(a), rj.finalize(b), strict=True):
    assert oracle.error(x, y) <= tolerance
  assert np.array_equal(a.m, b.m)


@given(st.integers(0, 99), st.lists(st.integers(0, 3), min_size=3, max_size=3))
@few(max_examples=15)
def test_partials_merge_in_any_order_and_grouping(seed, sizes):
  rng = np.random.default_rng(seed)
  with jax.enable_x64(True):
    a, b, c = (
      Partial(*map(jnp.asarray, partial_of(rng, keys=n))) for n in sizes
    )
    same(rj.merge(a, b), rj.merge(b, a))
    same(rj.merge(rj.merge(a, b), c), rj.merge(a, rj.merge(b, c)))
    empty = Partial.empty((2, 3), 4, jnp.float64, a.acc)
    for x in (a, empty):
      for merged in (rj.merge(x, empty), rj.merge(empty, x)):
        for got, want in zip(merged, x, strict=True):
          assert np.array_equal(got, want)
    # What `finalize` made of a partial merges like the partial itself.
    finished = Partial.of(*rj.finalize(a))
    pair = rj.finalize(rj.merge(finished, b)), rj.finalize(rj.merge(a, b))
    for x, y in zip(*pair, strict=True):
      assert oracle.error(x, y) <= 1e-12


# Layouts.


@given(layouts, st.integers(1, 60), st.integers(1, 8))
@few(max_examples=100)
def test_a_layout_is_a_permutation(layout, length, shards):
  order = layout.order(length, shards)
  assert np.array_equal(np.sort(order), np.arange(length))
  x = np.random.default_rng(length).normal(size=(2, length))
  for xs in (x, {"a": x, "b": [x[0]]}):
    axis = -1
    there = layout.permute(xs, shards=shards, axis=axis)
    back = layout.restore(there, shards=shards, axis=axis)
    jax.tree.map(np.testing.assert_array_equal, back, xs)
  there = layout.permute(x, shards=shards)
  assert np.array_equal(there, x[:, order])


@pytest.mark.long
@given(layouts, st.integers(1, 60), st.integers(1, 8))
@few(max_examples=60)
def test_positions_agree_with_the_order(layout, length, shards):
  local = layout.local_length(length, shards)
  assert layout.check_local_length(local) is None
  positions = np.concatenate(
    [layout.positions(i, shards, local) for i in range(shards)]
  )
  assert positions.dtype == np.int32
  order = layout.padded_order(length, shards)
  assert np.array_equal(np.where(positions < length, positions, -1), order)
  # Padding is no more than rounding needs, and a shard's order increases.
  chunk = (
    local if isinstance(layout, Zigzag) else layout.chunk_length(length, shards)
  )
  assert local * shards - length < shards * chunk
  assert np.all(np.diff(positions.reshape(shards, local), axis=1) > 0)


@pytest.mark.long
@given(
  layouts,
  st.integers(1, 8),
  st.integers(1, 60),
  st.integers(1, 60),
  st.integers(0, 40),
  st.integers(0, 40),
)
@few(max_examples=150)
def test_reachable_shards_are_those_that_pairs_reach(
  layout, shards, t, s, behind, ahead
):
  lengths = [shards * layout.local_length(n, shards) for n in (t, s)]
  needed = layout.reachable(shards, *lengths, behind, ahead)
  q, k = (
    np.stack([layout.positions(i, shards, n // shards) for i in range(shards)])
    for n in lengths
  )
  far = q[:, None, :, None] - k[None, :, None, :]
  sees = ((far <= behind) & (far >= -ahead)).any((2, 3))
  want = np.zeros(shards, bool)
  for i, j in zip(*np.nonzero(sees), strict=True):
    want[(i - j) % shards] = True
  assert not np.any(want & ~needed), "a shard that is needed would be skipped"
  if t == s and isinstance(layout, Contiguous):
    want[0] = True
    assert np.array_equal(needed, want)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
@few(max_examples=100)
def test_hops_are_cut_to_the_fewest(needed):
  needed = np.array(needed)
  size = needed.size
  behind, ahead = cut_hops(needed)
  brings = lambda b, a: {d % size for d in range(-a, b + 1)}
  wanted = set(np.flatnonzero(needed)) | {0}
  assert wanted <= brings(behind, ahead)
  fewest = min(
    b + a for b in range(size) for a in range(size) if wanted <= brings(b, a)
  )
  assert behind + ahead == fewest


# Calls.

# Each with its tolerances, forward and backward; in bfloat16 they are wider
# than the numerics contract's, as a call may have a single number.
DTYPES = {
  "float32": (np.float32, 3e-6, 2e-5),
  "bfloat16": (jnp.bfloat16, 8e-3, 2e-2),
}


# Made here: the annotations' checks draw numbers, which Hypothesis does not
# want while it draws.
STRATEGIES = [
  Ring(Blockwise(8, 8), unroll=1),
  Gather(Blockwise(8, 8)),
  Ulysses(Blockwise(8, 8)),
  Ring(Dense()),
]


@functools.cache
def ring_mesh(shards):
  return rj.make_mesh((shards,), ("seq",))


@st.composite
def calls(draw):
  """(options of `oracle.build`, options of `oracle.run`, dtype)."""
  whole = lambda low, high: draw(st.integers(low, high))
  kv, group = whole(1, 3), whole(1, 3)
  n, t = kv * group, whole(1, 60)
  s = draw(st.sampled_from([t, t, whole(1, 60)]))
  mask, means = draw(masks)
  b = whole(1, 2)
  dtype = draw(st.sampled_from(["float32", "float32", "bfloat16"]))
  rng = np.random.default_rng(whole(0, 999))
  case = dict(
      b=b, t=t, s=s, n=n, kv=kv, h=whole(1, 9), j=whole(1, 9), mask=mask,
      dtype=DTYPES[dtype][0],
  )  # fmt: skip
  documents = lambda length: np.sort(rng.integers(0, 4, (b, length)))
  q_seg, k_seg = documents(t), documents(s)
  if draw(st.booleans()):
    case |= dict(q_seg=q_seg, k_seg=k_seg)
  a_q = q_seg.reshape(b, 1, t, 1) if "q_seg" in case else np.ones((1, 1, 1, 1))
  a_k = k_seg.reshape(b, 1, 1, s) if "q_seg" in case else np.ones((1, 1, 1, 1))
  case["sees"] = lambda i, j: means(i, j, a_q, a_k)
  if s > t and draw(st.booleans()):
    case["q_pos"] = s - t + np.arange(t)
  if draw(st.booleans()):
    case["k_len"] = rng.integers(0, s + 1, b)
  if draw(st.booleans()):
    full = (b, n, t, s)
    case["bias"] = tuple(draw(st.sampled_from([1, size])) for size in full)
  case["sinks"], case["slopes"] = draw(st.booleans()), draw(st.booleans())
  if draw(st.booleans()):
    case["logits_soft_cap"] = 2.0
  strategy = draw(st.sampled_from(STRATEGIES))
  shards = draw(st.sampled_from([1, 2, 3, 4, 8]))
  where = dict(layout=draw(layouts), shards=shards, strategy=strategy)
  return case, where, dtype


def check_call(call):
  case, where, dtype = call
  case = oracle.build(**case)
  got = oracle.run(case, mesh=ring_mesh(where["shards"]), **where)
  _, forward, backward = DTYPES[dtype]
  oracle.check(got, oracle.truth(case), forward, backward)


@given(calls())
@few(max_examples=5)
def test_calls(call):
  check_call(call)


@pytest.mark.slow
@given(calls())
@few(max_examples=400)
def test_calls_searched(call):
  check_call(call)

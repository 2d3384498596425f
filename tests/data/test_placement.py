"""Placement: every token once, neighbours only, few hops, level work.

What a placement claims of itself is counted anew from its arrays: which shard
has which token of which document, and which pairs of a query and a key there
are.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringjax as rj
from ringjax.data.batches import packing, placement
from ringjax.data.batches.packing import BestFit, Documents
from ringjax.data.batches.placement import SPREADS, Cost, place
from ringjax.errors import DataError, OptionError, ShapeError
from ringjax.ops.attention.strategies.ring import cut_hops

SHARDS = st.integers(1, 6)
LENGTHS = st.lists(st.integers(0, 25), max_size=14)
COSTS = st.builds(
  Cost,
  token=st.sampled_from([0.0, 1.0]),
  pair=st.sampled_from([1e-4, 1.0]),
  hop=st.sampled_from([0.0, 0.08, 2.0]),
)


def counted(index, positions, segments, shards):
  """By brute force over pairs: (work of each shard, hops, shards of each).

  `hops` is bool [R]: whether some query sees a key that lies so many shards
  behind it on the ring.
  """
  local = len(index) // shards
  real = index >= 0
  pos, seg = positions.reshape(shards, local), segments.reshape(shards, local)
  there = real.reshape(shards, local)
  work, hops = np.zeros(shards, np.int64), np.zeros(shards, bool)
  for q, k in np.ndindex(shards, shards):
    sees = (seg[q][:, None] == seg[k]) & (pos[q][:, None] >= pos[k])
    sees &= there[q][:, None] & there[k]
    work[q] += sees.sum()
    hops[(q - k) % shards] |= sees.any()
  lies = {
    int(s): np.flatnonzero(((seg == s) & there).any(1))
    for s in np.unique(segments[real])
  }
  return work, hops, lies


def check(found, lengths, spread):
  """All that a placement promises."""
  lengths = np.asarray(lengths, np.int64)
  total, shards = int(lengths.sum()), found.shards
  # Every token once.
  real = found.index >= 0
  assert sorted(found.index[real].tolist()) == list(range(total))
  np.testing.assert_array_equal(
    found.index[found.slots], np.arange(total, dtype=np.int32)
  )
  owner = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  position = np.concatenate([[], *map(np.arange, lengths)])
  for got, want in ((found.segment_ids, owner), (found.positions, position)):
    assert not got[~real].any()
    np.testing.assert_array_equal(got[real], want[found.index[real]])
  # On a shard, documents and their tokens keep their order, empty slots last.
  for part in found.index.reshape(shards, -1):
    used = part[part >= 0]
    assert (np.diff(used) > 0).all() and (part[: len(used)] >= 0).all()
  work, hops, lies = counted(
    found.index, found.positions, found.segment_ids, shards
  )
  np.testing.assert_array_equal(found.work, work)
  assert found.degree.tolist() == [
    len(lies.get(i + 1, [])) for i in range(len(lengths))
  ]
  # Neighbours, in a row that does not run over the ring's end.
  assert all((np.diff(at) == 1).all() for at in lies.values())
  assert found.reach == max((len(at) - 1 for at in lies.values()), default=0)
  assert found.hops == cut_hops(hops)
  if spread == "run":
    assert found.hops == (found.reach, 0)
  if total:
    assert found.balance == pytest.approx(work.mean() / work.max())
  for got in (found.index, found.positions, found.segment_ids, found.slots):
    assert got.dtype == np.int32


def room_for(lengths, shards, slack):
  """Slots of a shard, with so many to spare in all."""
  return max(1, -(-(sum(lengths) + slack) // shards))


def random_cases(examples):
  def wrap(test):
    test = given(
      LENGTHS, SHARDS, st.integers(0, 12), st.sampled_from(SPREADS), COSTS
    )(test)
    return settings(derandomize=True, deadline=None, max_examples=examples)(
      test
    )

  return wrap


def one_random_case(lengths, shards, slack, spread, cost):
  found = place(
    lengths,
    shards=shards,
    local_length=room_for(lengths, shards, slack),
    spread=spread,
    cost=cost,
  )
  check(found, lengths, spread)


@random_cases(120)
def test_any_documents_that_fit_are_placed(
  lengths, shards, slack, spread, cost
):
  one_random_case(lengths, shards, slack, spread, cost)


@pytest.mark.slow
@random_cases(3000)
def test_any_documents_that_fit_are_placed_searched(
  lengths, shards, slack, spread, cost
):
  one_random_case(lengths, shards, slack, spread, cost)


@given(LENGTHS, SHARDS, st.sampled_from(SPREADS), st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_degrees_that_are_given(lengths, shards, spread, data):
  degree = data.draw(
    st.one_of(
      st.integers(1, shards),
      st.lists(
        st.integers(1, shards), min_size=len(lengths), max_size=len(lengths)
      ),
    )
  )
  found = place(
    lengths,
    shards=shards,
    # Room for whatever is on one shard.
    local_length=max(1, sum(lengths)),
    spread=spread,
    degree=degree,
  )
  check(found, lengths, spread)
  assert found.degree.tolist() == np.minimum(degree, lengths).tolist()
  for i in range(len(lengths)):
    shard = np.flatnonzero(found.segment_ids == i + 1) // found.local_length
    held = np.bincount(shard)
    assert set(held) - {0} <= {held.max(initial=1), held.max(initial=1) - 1}


def by_shard(found):
  """Tokens on each shard."""
  parts = found.index.reshape(found.shards, -1)
  return [part[part >= 0].tolist() for part in parts]


def test_stripes_and_runs():
  at = functools.partial(place, [7], shards=3, local_length=3)
  striped, runs = (at(spread=spread) for spread in SPREADS)
  assert by_shard(striped) == [[0, 3, 6], [1, 4], [2, 5]]
  assert by_shard(runs) == [[0, 1, 2], [3, 4], [5, 6]]
  assert (striped.hops, runs.hops) == ((2, 0), (2, 0))
  # On a longer ring keys of stripes come from either side.
  at = functools.partial(place, [7], shards=6, local_length=7, degree=2)
  assert [at(spread=s).hops for s in SPREADS] == [(1, 1), (1, 0)]


def test_stripes_are_level_in_each_hop_and_runs_are_not():
  n, shards = 64, 4
  pairs = {}
  for spread in SPREADS:
    found = place([n], shards=shards, local_length=n // shards, spread=spread)
    pos = found.positions.reshape(shards, -1)
    sees = pos[:, None, :, None] >= pos[None, :, None, :]
    each = sees.sum((2, 3))
    # By hop, then by device: what the slowest has beyond the mean.
    hop = np.stack(
      [[each[q, (q - h) % shards] for q in range(shards)] for h in range(4)]
    )
    pairs[spread] = hop.max(1).sum() / hop.mean(1).sum()
  assert pairs["stripe"] < 1.1
  assert pairs["run"] > 1.7


def test_a_document_that_no_shard_holds_is_spread():
  found = place([30, 2], shards=4, local_length=8)
  check(found, [30, 2], "stripe")
  # Even parts leave a slot on each of two shards.
  assert found.degree.tolist() == [4, 2]
  full = place([30, 1, 1], shards=4, local_length=8)
  check(full, [30, 1, 1], "stripe")
  assert (full.index >= 0).all()


def test_a_straggler_is_spread_where_hops_are_cheap():
  lengths, at = [64, *[8] * 24], dict(shards=4, local_length=64)
  levels = {}
  for hop in (0.0, 1e3):
    found = place(lengths, **at, cost=Cost(pair=1.0, hop=hop))
    check(found, lengths, "stripe")
    levels[hop] = found.reach, found.balance
  assert levels[0.0][0] > 0 and levels[0.0][1] > 0.95
  assert levels[1e3][0] == 0 and levels[1e3][1] < 0.4


def test_whole_documents_go_where_there_is_least_to_do():
  found = place([6, 5, 4, 3, 3], shards=2, local_length=16, degree=1)
  assert found.segment_ids.reshape(2, -1)[:, :14].tolist() == [
    [1] * 6 + [4] * 3 + [0] * 5,
    [2] * 5 + [3] * 4 + [5] * 3 + [0] * 2,
  ]


@pytest.mark.parametrize("spread", SPREADS)
def test_full_shards(spread):
  # No shard has room for a second document: two are dealt by the room left.
  found = place([4] * 6, shards=4, local_length=6, spread=spread)
  check(found, [4] * 6, spread)
  assert (found.index >= 0).all()
  assert sorted(found.degree.tolist()) == [1, 1, 1, 1, 2, 2]
  # Whole documents that fill shards exactly stay whole.
  whole = place([5, 3, 8, 1, 7, 4, 4], shards=4, local_length=8, spread=spread)
  check(whole, [5, 3, 8, 1, 7, 4, 4], spread)
  assert (whole.index >= 0).all()


def test_nothing_to_place():
  for lengths in ([], [0], [0, 0, 0]):
    found = place(lengths, shards=3, local_length=2)
    check(found, lengths, "stripe")
    assert found.balance == 1.0 and found.reach == 0
    assert found.degree.tolist() == [0] * len(lengths)
  found = place([0, 3, 0, 1], shards=2, local_length=3)
  check(found, [0, 3, 0, 1], "stripe")
  assert set(found.segment_ids.tolist()) == {0, 2, 4}


@pytest.mark.parametrize("spread", SPREADS)
def test_one_huge_document(spread):
  n, shards = 100_003, 8
  found = place([n], shards=shards, local_length=n // shards + 1, spread=spread)
  assert found.degree.tolist() == [shards]
  assert sorted(found.index[found.index >= 0]) == list(range(n))
  # A triangle's largest of 8 runs has 15/8 of the mean.
  assert found.balance == pytest.approx(
    1.0 if spread == "stripe" else 8 / 15, rel=1e-3
  )


def test_the_same_documents_are_placed_the_same():
  rng = np.random.default_rng(0)
  lengths = rng.lognormal(4, 1.5, 400).astype(np.int64)
  room = room_for(lengths.tolist(), 8, 40)
  first, again = (place(lengths, shards=8, local_length=room) for _ in "ab")
  as_list = place(lengths.tolist(), shards=8, local_length=room)
  for other in (again, as_list):
    np.testing.assert_array_equal(first.index, other.index)


def contiguous(lengths, shards, local):
  """One document behind the other, as packing without placement has them."""
  slots = shards * local
  index = np.full(slots, -1)
  index[: sum(lengths)] = np.arange(sum(lengths))
  positions, segments = np.zeros(slots, int), np.zeros(slots, int)
  positions[: sum(lengths)] = np.concatenate([*map(np.arange, lengths)])
  segments[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
  return index, positions, segments


def figures(index, positions, segments, shards):
  """(reach, balance), counted pair by pair."""
  work, _, lies = counted(index, positions, segments, shards)
  reach = max(int(np.ptp(at)) for at in lies.values())
  return reach, work.mean() / work.max()


def mixture(seed, count, least, most):
  """Many short documents and some long ones, in a random order."""
  rng = np.random.default_rng(seed)
  lengths = [*rng.integers(5, 40, 60), *rng.integers(least, most, count)]
  return [int(n) for n in rng.permutation(lengths)]


@pytest.mark.parametrize("seed", range(3))
def test_hops_and_balance_of_a_mixture_beat_plain_packing(seed):
  shards = 8
  at = lambda found: (found.index, found.positions, found.segment_ids, shards)
  # No document needs a second shard, which only packing in order gives it.
  lengths = mixture(seed, 16, 90, 120)
  local = room_for(lengths, shards, 200)
  found = place(lengths, shards=shards, local_length=local)
  reach, balance = figures(*at(found))
  plain_reach, plain_balance = figures(
    *contiguous(lengths, shards, local), shards
  )
  assert (reach, plain_reach) == (0, 1)
  assert balance > 0.9 > 0.8 > plain_balance
  # Some have most of the work: more shards, where hops are cheap.
  lengths = mixture(seed, 4, 150, 300)
  local = room_for(lengths, shards, 200)
  plain_reach, plain_balance = figures(
    *contiguous(lengths, shards, local), shards
  )
  by_cost = {
    hop: figures(
      *at(
        place(
          lengths,
          shards=shards,
          local_length=local,
          cost=Cost(pair=1.0, hop=hop),
        )
      )
    )
    for hop in (1e3, 0.0)
  }
  assert by_cost[1e3][0] == -(-max(lengths) // local) - 1 <= plain_reach
  assert by_cost[0.0][1] > 0.97 > 1.3 * plain_balance


def test_arrays_go_there_and_back():
  lengths = [5, 0, 9, 2]
  found = place(lengths, shards=2, local_length=9)
  x = np.random.default_rng(0).normal(size=(3, 16, 2))
  there = found.apply(x, axis=1, empty=np.nan)
  assert there.shape == (3, 18, 2)
  assert np.isnan(there[:, found.index < 0]).all()
  np.testing.assert_array_equal(there[:, found.slots], x)
  for axis in (1, -2):
    np.testing.assert_array_equal(found.restore(there, axis=axis), x)
  np.testing.assert_array_equal(
    found.restore(jnp.asarray(there), axis=1), x.astype(np.float32)
  )
  ids = np.arange(16, dtype=np.uint8)
  assert found.apply(ids).dtype == np.uint8
  np.testing.assert_array_equal(found.restore(found.apply(ids)), ids)


# Batches.


def texts(lengths):
  """No two tokens of all documents are the same, and none is 0."""
  edges = np.cumsum([1, *lengths])
  return [np.arange(a, b) for a, b in itertools.pairwise(edges)]


@given(LENGTHS, SHARDS, st.sampled_from(SPREADS), st.integers(0, 9))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_batch_of_documents(lengths, shards, spread, slack):
  local = room_for(lengths, shards, slack)
  rng = np.random.default_rng(slack)
  weights = [rng.random(n).astype(np.float32) for n in lengths]
  batch = placement.place_documents(
    texts(lengths), weights, shards=shards, local_length=local, spread=spread
  )
  flat = np.concatenate([[0.0], *weights]).astype(np.float32)
  last = set(np.cumsum(lengths).tolist())
  real = batch.segments > 0
  assert sorted(batch.tokens[real]) == list(range(1, sum(lengths) + 1))
  for x in batch:
    assert x.shape == (1, shards * local) and not x[~real].any()
  inner = real & ~np.isin(batch.tokens, list(last))
  # Ids count up: the next token of the document is one more.
  np.testing.assert_array_equal(
    batch.labels, np.where(inner, batch.tokens + 1, 0)
  )
  np.testing.assert_array_equal(batch.weights[inner], flat[batch.labels[inner]])
  assert not batch.weights[~inner].any()
  starts = np.repeat(np.cumsum([1, *lengths])[:-1], lengths)
  np.testing.assert_array_equal(
    batch.positions[real], batch.tokens[real] - starts[batch.tokens[real] - 1]
  )
  assert [x.dtype for x in batch] == [
    np.dtype(t) for t in (np.int32, np.int32, np.float32, np.int32, np.int32)
  ]


def test_rows_are_placed_each_on_its_own():
  lengths = [20, 9, 3, 3, 7, 1, 12, 4]
  plan = BestFit().plan(lengths, 32)
  rows = packing.fill(plan, 32, Documents(texts(lengths)).read)
  assert len(plan) > 1
  both = placement.place_rows(rows, shards=4)
  for i in range(len(plan)):
    one = placement.place_rows(
      packing.PackedBatch(*(x[i : i + 1] for x in rows)), shards=4
    )
    found = place([p.stop - p.start for p in plan[i]], shards=4, local_length=8)
    np.testing.assert_array_equal(one.segments[0], found.segment_ids)
    np.testing.assert_array_equal(one.positions[0], found.positions)
    for x, y in zip(both, one, strict=True):
      np.testing.assert_array_equal(x[i], y[0])


@pytest.mark.slow
@given(
  st.lists(st.integers(0, 40), max_size=40), st.integers(1, 4), st.booleans()
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_batches_lose_no_document(lengths, rows, cut):
  plan = functools.partial(
    placement.plan_batches, lengths, shards=4, local_length=5, rows=rows
  )
  if not cut and max(lengths, default=0) > 20:
    number = next(i for i, n in enumerate(lengths) if n > 20)
    with pytest.raises(DataError, match=f"in document {number}; .*cut=True"):
      plan()
    return
  seen = [np.zeros(n, int) for n in lengths]
  for batch in plan(cut=cut):
    assert len(batch) == rows
    for row in batch:
      for piece in row:
        seen[piece.document][piece.start : piece.stop] += 1
        assert cut or piece.stop - piece.start == lengths[piece.document]
    filled = packing.fill(batch, 20, Documents(texts(lengths)).read)
    placed = placement.place_rows(filled, shards=4)
    assert sorted(placed.tokens.ravel()) == sorted(filled.tokens.ravel())
  assert all((x == 1).all() for x in seen)


def test_rows_with_long_documents_share_batches():
  rng = np.random.default_rng(0)
  lengths = rng.permutation([*[60] * 4, *[5] * 96]).tolist()
  batches = placement.plan_batches(lengths, shards=4, local_length=20, rows=2)
  long = [any(lengths[p.document] > 20 for r in b for p in r) for b in batches]
  assert sum(long) == 2 and long == sorted(long, reverse=True)


# Attention.


@pytest.fixture(scope="module")
def ring():
  """Attention's values and gradients on 4 devices, and how often traced."""
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  traces = []

  @jax.jit
  def run(q, k, v, do, positions, segments):
    traces.append(q.shape)

    def attend(q, k, v):
      return rj.ring_attention(
        q,
        k,
        v,
        is_causal=True,
        q_positions=positions,
        kv_positions=positions,
        q_segment_ids=segments,
        mesh=mesh,
        layout=rj.Contiguous(),
      )

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(do)

  return run, traces


def plain(q, k, v, do):
  """Causal softmax attention of one document and its gradients, float64."""
  scale = q.shape[-1] ** -0.5
  s = np.einsum("tnh,snh->nts", q, k) * scale
  s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
  p = np.exp(s - s.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  out = np.einsum("nts,snh->tnh", p, v)
  dp = np.einsum("tnh,snh->nts", do, v)
  ds = p * (dp - (do * out).sum(-1).T[..., None]) * scale
  return (
    out,
    np.einsum("nts,snh->tnh", ds, k),
    np.einsum("nts,tnh->snh", ds, q),
    np.einsum("nts,tnh->snh", p, do),
  )


def test_attention_over_placed_documents_is_that_of_each(ring):
  run, traces = ring
  rng = np.random.default_rng(0)
  mixtures = ([21, 3, 0, 9, 5, 1], [8, 8, 7, 8, 8])
  for lengths, spread in itertools.product(mixtures, SPREADS):
    found = place(lengths, shards=4, local_length=12, spread=spread)
    total = sum(lengths)
    arrays = rng.normal(size=(4, 1, total, 2, 4))
    placed = found.apply(arrays.astype(np.float32), axis=2, empty=7.0)
    # What lies in empty slots must not matter, and nothing comes back to it.
    placed[3][:, found.index < 0] = 0.0
    got = run(*placed, found.positions[None], found.segment_ids[None])
    edges = np.cumsum([0, *lengths])
    want = [
      plain(*arrays[:, 0, a:b]) for a, b in itertools.pairwise(edges) if b > a
    ]
    for x, parts in zip(got, zip(*want, strict=True), strict=True):
      x = np.asarray(x)[0]
      np.testing.assert_allclose(
        found.restore(x), np.concatenate(parts), atol=2e-5
      )
      assert not x[found.index < 0].any()
  assert len(traces) == 1


# What is refused.


def placing(lengths, shards, local_length, **options):
  """A call that places documents."""
  return lambda: place(
    lengths, shards=shards, local_length=local_length, **options
  )


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    (placing([3], 0, 4), OptionError, "shards: got"),
    (placing([3], 1, 0), OptionError, "local_length: got 0"),
    (placing([3.0], 1, 4), OptionError, "lengths: got float64"),
    (placing([-1], 1, 4), OptionError, "from -1"),
    (
      placing([9, 4], 2, 6),
      DataError,
      "got 13 tokens in 2 documents; .*1 slots are missing",
    ),
    (
      placing([3], 1, 4, spread="zigzag"),
      OptionError,
      "spread: got 'zigzag'; wanted one of stripe, run",
    ),
    (
      placing([3], 2, 4, degree=3),
      OptionError,
      "degree: got 3; wanted an int from 1 to 2",
    ),
    (placing([3, 3], 2, 4, degree=[1]), OptionError, "or 2 of them"),
    (placing([3], 2, 4, degree=1.0), OptionError, "degree: got 1.0"),
    (
      placing([2, 9], 3, 4, degree=2),
      DataError,
      "got 2 for document 1 of 9 tokens; wanted 3 or more; 1 slots",
    ),
    (placing([4, 4, 4], 2, 6, degree=1), DataError, "no room for 4 tokens"),
    (
      placing([3, 4, 4], 2, 6, degree=[1, 2, 2]),
      DataError,
      "no room for 3 tokens",
    ),
    (lambda: Cost(hop=-1.0), OptionError, "hop: got -1.0"),
    (lambda: Cost(pair=float("nan")), OptionError, "pair: got nan"),
    (lambda: Cost(pair=0.0), OptionError, "cost: got Cost"),
    (
      lambda: placing([3], 1, 4)().apply(np.zeros(4)),
      ShapeError,
      r"0 of shape \(4,\); wanted one of 3",
    ),
    (
      lambda: placing([3], 1, 4)().restore(np.zeros(4), axis=1),
      ShapeError,
      "axis: got 1",
    ),
    (
      lambda: placement.place_documents(
        [[1, 2, 3], [4, 5]], shards=2, local_length=2
      ),
      DataError,
      "tokens: got 5 in 2 documents; .*2 slots are missing",
    ),
    (
      lambda: placement.place_rows(
        packing.fill([[]], 6, Documents([]).read), shards=4
      ),
      ShapeError,
      "rows of 6 tokens on 4 shards",
    ),
    (
      lambda: placement.place_rows(
        placement.place_documents([[1] * 9, [2] * 3], shards=2, local_length=6),
        shards=2,
      ),
      ShapeError,
      "in pieces or out of order",
    ),
    (
      lambda: placement.plan_batches([3], shards=1, local_length=4, rows=0),
      OptionError,
      "rows: got 0",
    ),
  ],
)
def test_errors(call, error, words, unchecked):
  with pytest.raises(error, match=words):
    call()

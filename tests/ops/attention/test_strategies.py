"""Ways to move attention beyond the plain ring: the same contract for each."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import (
  AutoKernel,
  Blockwise,
  Causal,
  Chain,
  Contiguous,
  Dense,
  Gather,
  Halo,
  Ring,
  RingQ,
  Striped,
  Ulysses,
  Zigzag,
)
from ringjax.bench.program import Program
from ringjax.errors import MeshError, OptionError
from ringjax.ops.attention.strategies import hops, nesting
from ringjax.ops.attention.strategies import ring as rings
from tests import oracle
from tests.ops.attention import test_exact as exact
from tests.ops.attention import test_schedule as schedule
from tests.ops.attention.test_exact import FEATURES, LAYOUTS, problem, ring_mesh

TILES = Blockwise(8, 8)
STRATEGIES = {
  "bidirectional": Ring(TILES, unroll=1, two_way=True),
  "ring_q": RingQ(TILES, unroll=1),
  "hybrid": Ulysses(Ring(TILES, unroll=1), inner=2),
  "two_level": Ring(Ring(TILES, unroll=1), unroll=1, inner=4),
  "documents": Ring(TILES, by_document=True),
  "groups": Ring(Gather(TILES), unroll=1, inner=2),
  "hybrid_q": Ulysses(RingQ(TILES, unroll=1), inner=4),
}
# What has a window over tokens that lie in a row.
WINDOWS = (
  "window-narrow",
  "window-wide",
  "window-sides",
  "window-symmetric",
  "window-ahead",
  "chunked",
  "everything",
)


def verify(name, layout, strategy, shards=8, **options):
  case, want = problem(name)
  got = oracle.run(
    case,
    layout=layout,
    strategy=strategy,
    shards=shards,
    **{"mesh": ring_mesh(shards), **options},
  )
  oracle.check(got, want)


def deal():
  """Every sixth feature, each with one strategy in one layout.

  All others are slow.
  """
  chosen = []
  for n, feature in enumerate(FEATURES):
    for m, strategy in enumerate(STRATEGIES):
      for k, layout in enumerate(LAYOUTS):
        mine = n % 6 == 0 and (n // 6 % len(STRATEGIES), n // 6 % 4) == (m, k)
        marks = () if mine else pytest.mark.slow
        chosen.append(pytest.param(feature, strategy, layout, marks=marks))
  return chosen


@pytest.mark.long
@pytest.mark.parametrize(("feature", "strategy", "layout"), deal())
def test_every_feature(feature, strategy, layout):
  verify(feature, LAYOUTS[layout], STRATEGIES[strategy])


@pytest.mark.parametrize(
  "strategy",
  [
    name
    if name in ("bidirectional", "hybrid_q")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in STRATEGIES
  ],
)
def test_all_features_at_once(strategy):
  layout = list(LAYOUTS.values())[list(STRATEGIES).index(strategy) % 4]
  verify("everything", layout, STRATEGIES[strategy])


@pytest.mark.one_case
@pytest.mark.parametrize(
  "feature",
  [
    f if n % 2 == 0 else pytest.param(f, marks=pytest.mark.slow)
    for n, f in enumerate(WINDOWS)
  ],
)
def test_halo(feature):
  verify(feature, Contiguous(), Halo(TILES))


@pytest.mark.parametrize(
  ("feature", "shards"), [("window-wide", 3), ("window-sides", 5)]
)
def test_halo_of_few_shards(feature, shards):
  verify(feature, Contiguous(), Halo(TILES), shards)


@pytest.mark.parametrize("local", [Halo(TILES), Chain(TILES)])
def test_heads_traded_around_ways_for_consecutive_tokens(local):
  verify("window-wide", Contiguous(), Ulysses(local, inner=2))


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(
  ("shards", "feature"),
  [
    pytest.param(1, "gqa", marks=pytest.mark.slow),
    pytest.param(2, "bidirectional", marks=pytest.mark.slow),
    pytest.param(3, "window-sides", marks=pytest.mark.slow),
    (4, "gqa"),
    pytest.param(6, "window-ahead", marks=pytest.mark.slow),
    (7, "bidirectional"),
  ],
)
def test_two_ways_around_any_ring(shards, feature):
  verify(feature, Zigzag(), Ring(TILES, unroll=1, two_way=True), shards)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "shards",
  [
    pytest.param(1, marks=pytest.mark.slow),
    2,
    pytest.param(3, marks=pytest.mark.slow),
    5,
  ],
)
def test_queries_around_any_ring(shards):
  verify("everything", Striped(), RingQ(TILES), shards)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "strategy",
  [
    RingQ(Dense()),
    Halo(Dense()),
    Ring(Ring(Dense()), inner=2),
    pytest.param(Ring(Dense(), two_way=True), marks=pytest.mark.slow),
    pytest.param(Ulysses(Ring(Dense()), inner=2), marks=pytest.mark.slow),
  ],
)
def test_left_to_jax_s_derivatives(strategy):
  verify("window-sides", Contiguous(), strategy, 4)


@pytest.mark.parametrize(
  "strategy",
  [STRATEGIES["two_level"], STRATEGIES["hybrid_q"], Halo(TILES)],
  ids=str,
)
def test_one_device(strategy):
  case, want = problem("window-wide")
  oracle.check(oracle.run(case, strategy=strategy), want)


# Meshes.


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("strategy", "kind"),
  [
    ("hybrid", "Auto"),
    ("two_level", "Explicit"),
    ("ring", "Auto"),
    pytest.param("hybrid", "Explicit", marks=pytest.mark.slow),
    pytest.param("two_level", "Auto", marks=pytest.mark.slow),
    pytest.param("ring", "Explicit", marks=pytest.mark.slow),
  ],
)
def test_two_axes_carry_the_sequence(strategy, kind):
  """Named levels on a mesh that has them; the axes are read off operands."""
  mesh = rj.make_mesh((2, 4), ("slow", "fast"), axis_types=AxisType[kind])
  over = P(None, ("slow", "fast"))
  cut = {"query": over, "key": over, "value": over, "out": over, "lse": over}
  put = lambda name, x: jax.device_put(
    x, NamedSharding(mesh, cut.get(name, P()))
  )
  axis = "auto" if kind == "Explicit" else ("slow", "fast")
  # Two shards would have to share a kv head among 4.
  layout = Striped()
  case, want = problem("gqa")
  got = oracle.run(
    case, layout=layout, strategy=strategy, shards=8, mesh=mesh, axis=axis,
    place=put,
  )  # fmt: skip
  oracle.check(got, want)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "strategy",
  [Ulysses(Ring(TILES), inner=2), Ring(TILES, two_way=True), RingQ(TILES)],
)
def test_batch_and_heads_are_sharded_too(strategy):
  mesh = rj.make_mesh(
    (1, 4, 2), ("data", "seq", "model"), axis_types=AxisType.Explicit
  )
  verify(
    "everything",
    Zigzag(),
    strategy,
    4,
    mesh=mesh,
    place=lambda name, x: exact.on(mesh, name, x),
  )


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize(
  "strategy",
  [
    pytest.param(Ring(TILES, two_way=True), marks=pytest.mark.slow),
    RingQ(TILES),
    pytest.param(Halo(TILES), marks=pytest.mark.slow),
    Ring(Ring(TILES), inner=2),
    pytest.param(Ring(TILES, by_document=True), marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize(
  "how", ["vmap", pytest.param("shard_map", marks=pytest.mark.slow)]
)
def test_per_shard(strategy, how):
  case, want = exact.whole_problem()
  within = {
    "vmap": lambda: exact.in_vmap(4),
    "shard_map": lambda: exact.in_shard_map(
      rj.make_mesh((2, 4), ("data", "seq")), {"seq"}
    ),
  }[how]()
  got = oracle.run(
    case,
    within,
    layout=Contiguous(),
    shards=4,
    strategy=strategy,
    axis="seq",
  )
  oracle.check(got, want)


@pytest.mark.slow
def test_levels_under_vmap_of_two_axes():
  case, want = exact.whole_problem()

  def function(**arguments):
    arrays = {n: x for n, x in arguments.items() if hasattr(x, "shape")}
    rest = {n: x for n, x in arguments.items() if n not in arrays}
    axes = {n: exact.sharded_axis(n, x) for n, x in arrays.items()}

    def split(x, axis):
      if axis is None:
        return x
      return x.reshape(*x.shape[:axis], 2, 2, -1, *x.shape[axis + 1 :])

    inner = jax.vmap(
      lambda arrays: rj.dot_product_attention(**arrays, **rest),
      in_axes=(axes,),
      out_axes=1,
      axis_name="fast",
    )
    out, lse = jax.vmap(inner, in_axes=(axes,), out_axes=1, axis_name="slow")(
      {n: split(x, axes[n]) for n, x in arrays.items()}
    )
    join = lambda x: x.reshape(x.shape[0], -1, *x.shape[4:])
    return join(out), join(lse)

  for strategy in (Ulysses(Ring(TILES)), Ring(Ring(TILES))):
    got = oracle.run(
      case,
      function,
      layout=Contiguous(),
      shards=4,
      strategy=strategy,
      axis=("slow", "fast"),
    )
    oracle.check(got, want)


# Packed documents.


def documents(lengths, slots):
  seg = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  return np.pad(seg, (0, slots - len(seg))).astype(np.int32)


@functools.cache
def reach_of(shards, mask):
  """A jitted function from segments [B, T] to the hops that a ring turns."""
  ring = Ring(axis="seq", by_document=True)

  def per_shard(seg):
    at = jax.lax.axis_index("seq") * seg.shape[1] + jnp.arange(
      seg.shape[1], dtype=jnp.int32
    )
    at = rj.Coords(jnp.broadcast_to(at, seg.shape), seg)
    context = rings.Context(at, at, mask)
    return jnp.stack(ring._reach(context))

  return jax.jit(
    jax.shard_map(
      per_shard,
      mesh=ring_mesh(shards),
      in_specs=P(None, "seq"),
      out_specs=P(),
    )
  )


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("lengths", "causal", "want"),
  [
    ((8, 8, 4, 4, 8), True, (0, 0)),  # Each document on one shard.
    ((8, 9, 7, 8), True, (1, 0)),
    ((8, 9, 7, 8), False, (1, 1)),
    ((4, 20, 8), True, (2, 0)),
    ((32,), True, (3, 0)),
    ((32,), False, (3, 0)),
    ((0,), True, (0, 0)),
  ],
)
def test_hops_reach_as_far_as_documents(lengths, causal, want):
  mask = rj.SameSegment() & Causal() if causal else rj.SameSegment()
  seg = documents(lengths, 32)[None]
  assert tuple(np.asarray(reach_of(4, mask)(seg))) == want


def test_hops_of_a_batch_serve_each_of_its_rows():
  mask = rj.SameSegment() & Causal()
  seg = np.stack([documents(n, 32) for n in ((8, 8, 8, 8), (7, 9, 9, 7))])
  assert tuple(np.asarray(reach_of(4, mask)(seg))) == (1, 0)


@pytest.mark.parametrize("seed", range(3))
def test_hops_never_fall_short(seed):
  """Random documents, also such as lie on shards far apart."""
  rng = np.random.default_rng(seed)
  seg = rng.integers(0, 6, (2, 40)).astype(np.int32)
  seg[0] = np.sort(seg[0])
  behind, ahead = np.asarray(reach_of(5, rj.SameSegment())(seg))
  shards = seg.reshape(2, 5, 8)
  for i, j in itertools.product(range(5), repeat=2):
    for row in shards:
      if {*row[i]} & {*row[j]} - {0}:
        assert (i - j) % 5 <= behind or (j - i) % 5 <= ahead


@pytest.mark.long
def test_one_program_for_every_packing():
  traces = []
  mesh, ring = ring_mesh(8), Ring(TILES, by_document=True)

  @jax.jit
  def step(q, k, v, seg, do):
    traces.append(None)
    call = lambda q, k, v: rj.dot_product_attention(
      q, k, v, is_causal=True, q_segment_ids=seg, mesh=mesh, strategy=ring
    )
    out, pull = jax.vjp(call, q, k, v)
    return {"out": out} | dict(
      zip(("query", "key", "value"), pull(do), strict=True)
    )

  for lengths in ((8, 8, 16, 8, 32), (72,), (9,) * 8, (3, 60)):
    case = oracle.build(
      b=1, is_causal=True, sees=exact.causal, q_seg=documents(lengths, 72)[None]
    )
    x = case.arrays
    want = oracle.attend(
      *x.values(), case.visible, case.cotangents[0],
      np.zeros_like(case.cotangents[1]),
    )  # fmt: skip
    got = step(*x.values(), case.fixed["q_segment_ids"], case.cotangents[0])
    oracle.check({n: np.asarray(a) for n, a in got.items()},
                 {n: want[n] for n in got})  # fmt: skip
  assert len(traces) == 1


# Which hops.


def test_two_ways_take_the_fewest_steps():
  rng = np.random.default_rng(0)
  for size in range(1, 9):
    for _ in range(20):
      needed = rng.random(size) < rng.random()
      behind, ahead = rings.cut_hops(needed, two_way=True)
      serves = lambda b, a, needed=needed, size=size: all(
        d <= b or size - d <= a for d in range(1, size) if needed[d]
      )
      assert serves(behind, ahead) and behind + ahead < max(size, 1)
      fewer = itertools.product(range(max(behind, ahead)), repeat=2)
      assert not any(serves(b, a) for b, a in fewer)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(("behind", "ahead"), [(7, 0), (4, 3), (0, 2), (1, 1)])
def test_a_schedule_says_what_each_hop_does(behind, ahead, sums):
  lanes = [hops.OWN, hops.Lane(1, 1, behind), hops.Lane(-1, 1, ahead)]
  lanes = [lane for lane in lanes if lane.last or lane is hops.OWN]
  found = hops.schedule(lanes, sums=sums)
  done = {}
  for part in found:
    assert part.start == sum(x.count for x in found[: found.index(part)])
    for n in range(part.start, part.start + part.count):
      for what in ("compute", "send", "collect"):
        for i in getattr(part, what):
          done.setdefault((i, what), []).append(n)
  for i, lane in enumerate(lanes):
    numbers = lambda what, i=i: done.get((i, what), [])
    assert numbers("compute") == [*range(lane.first, lane.last + 1)]
    assert numbers("send") == [*range(lane.last)]
    sent = [*range(lane.first + 1, lane.last + 1)] if sums else []
    assert numbers("collect") == sent
  # Hops in the middle are one range: the program does not grow with them.
  assert len(found) <= 6


def test_a_schedule_of_a_traced_length_has_one_loop():
  length = jnp.int32(9)
  parts = hops.schedule([hops.Lane(1, 1, length)], sums=True)
  assert [int(part.start) for part in parts] == [0, 1, 2, 9]
  assert [int(part.count) for part in parts] == [1, 1, 7, 1]


# What `auto` builds.


def test_choices_become_strategies():
  tiles = dict(q_block=16, kv_block=32)
  built = nesting.built(
    "hybrid", {**tiles, "inner": 4, "wire": "int8"}, levels=1
  )
  ring = Ring(AutoKernel(16, 32), wire="int8")
  assert built == Ulysses(ring, inner=4)
  built = nesting.built("two_level", {**tiles, "inner": 4}, levels=2)
  assert built == Ring(Ring(AutoKernel(16, 32)))
  assert nesting.built("halo", tiles, levels=1) == Halo(AutoKernel(16, 32))


@pytest.mark.parametrize(
  ("machine", "options"),
  [
    ("tpu-v5p", dict(local_window_size=(5, 0))),
    ("cpu", dict()),
    (None, dict(q_positions=np.arange(96) + 3, kv_positions=np.arange(96))),
  ],
)
def test_auto_gives_the_truth(machine, options):
  left = options.get("local_window_size", (999, 0))[0]
  case = oracle.build(
    t=96, is_causal=True, q_pos=options.get("q_positions"),
    k_pos=options.get("kv_positions"),
    sees=lambda i, j: (j <= i) & (i - j <= left),
    **{n: x for n, x in options.items() if n == "local_window_size"},
  )  # fmt: skip
  strategy = "auto" if machine is None else rj.Auto(machine=machine)
  got = oracle.run(case, strategy=strategy, shards=8, mesh=ring_mesh(8))
  oracle.check(got, oracle.truth(case))


# Bad input.

X = np.zeros((1, 24, 4, 8), np.float32)


def refused(match, error=OptionError, **options):
  options = {"mesh": ring_mesh(8), "is_causal": True, **options}
  with pytest.raises(error, match=match):
    rj.dot_product_attention(X, X, X, **options)


@pytest.mark.parametrize(
  ("strategy", "match"),
  [
    ("rings", "'two_level'"),
    (Ulysses(Ulysses()), "Ulysses around Ring or RingQ"),
    (Ring(Ulysses()), "Ring around Ring or Gather"),
    (RingQ(Ring()), "RingQ around Blockwise or Dense"),
    ("ring:2", "'hybrid:4' and"),
    ("two_level:x", "'hybrid:4' and"),
    ("two_level:3", "a divisor of the shards"),
    (Ring(Ring(), inner=3), "a divisor of the shards"),
    (Ulysses(Ring(), inner=0), "a divisor of the shards"),
    ("halo", "a mask with a window"),
    (Ring(Ring(Ring())), "a mesh axis for each level"),
    (Ring(inner=2), "leave it out"),
    (Ring(Dense), "a local algorithm"),
    (Ring(hops=(4, 4)), "at most 7 on 8 shards"),
  ],
)
def test_strategies_that_do_not_fit(strategy, match):
  refused(match, strategy=strategy)


def test_an_axis_of_its_own_is_the_size_of_a_group():
  mesh = rj.make_mesh((4, 2), ("slow", "fast"))
  refused(
    "leave it out",
    mesh=mesh,
    axis=("slow", "fast"),
    strategy=Ring(Ring(), inner=4),
  )


def test_hops_that_are_none():
  with pytest.raises(OptionError, match="from behind, from ahead"):
    Ring(hops=(1, -1))


def test_halo_needs_tokens_in_a_row():
  window = dict(strategy="halo", local_window_size=4)
  refused("consecutive tokens", layout=Striped(), **window)
  refused("positions of your own", q_positions=np.arange(24), **window)


@pytest.mark.parametrize(
  ("options", "match"),
  [
    (dict(by_document=True, two_way=True), "one direction"),
    (dict(by_document=True, local=Ring()), "one level"),
    (dict(by_document=True, local=Dense()), "no gradient"),
  ],
)
def test_rings_cut_by_documents_alone(options, match):
  with pytest.raises(OptionError, match=match):
    Ring(**options)


@pytest.mark.parametrize("axis", [("seq", "seq"), (), ("seq", 3), ["seq"]])
def test_axes_that_are_none(axis):
  refused("a tuple of such names", MeshError, axis=axis)


def test_axes_that_the_mesh_lacks():
  refused("one of the mesh axes", MeshError, axis=("seq", "fast"))
  mesh = rj.make_mesh((2, 4), ("slow", "fast"))
  refused(
    "a mesh axis for each level",
    mesh=mesh,
    axis=("slow", "fast"),
    strategy=Ring(Ring(Ring())),
  )


# What the programs send.


def ways(program):
  """{(shape, dtype, ring distance): times} of all but coordinates."""
  found = {}
  for _, i, times in program.sends():
    ((dtype, dims),) = i.shapes
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", i.line_text)[1]
    first, second = map(int, re.findall(r"\d+", pairs)[:2])
    if dtype != "s32":
      key = dims, dtype, (second - first) % 8
      found[key] = found.get(key, 0) + times
  return found


B, N, K, H, LENGTH = schedule.B, schedule.N, schedule.K, schedule.H, 12
BLOCK = (2, B, K, LENGTH, H), "f32"


def program(backward, strategy, **options):
  compiled = schedule.compiled(
    8, 8 * LENGTH, backward, strategy=strategy, **options
  )
  return Program(compiled.as_text())


@pytest.mark.long
def test_two_ways_share_the_sends():
  one = {(*BLOCK, 1): 4, (*BLOCK, 7): 3}
  assert ways(program(False, "bidirectional")) == one
  # The sums of a way start at its first shard: one send fewer, and one home.
  home = {(*BLOCK, 4): 1, (*BLOCK, 3): 1}
  both = {(*BLOCK, 1): 4 + 3, (*BLOCK, 7): 3 + 2}
  assert ways(program(True, "bidirectional")) == both | home


def test_a_two_level_ring_crosses_between_groups_once_each():
  strategy = Ring(Ring(), inner=4)
  # Neighbours turn each of the two groups' blocks; a group sends its own once.
  assert ways(program(False, strategy)) == {(*BLOCK, 1): 6, (*BLOCK, 4): 1}


def test_queries_travel_and_no_key():
  found = ways(program(False, "ring_q"))
  queries = (B, K, N // K, LENGTH, H), "f32"
  rows = queries[0][:-1], "f32"
  # Queries seven times; partials six times with them and once home, which is
  # one more step of the same ring.
  assert found == {(*queries, 7): 7 + 7, (*rows, 7): 2 * 7}
  keys = (B, K, LENGTH, H)
  for dims, *_ in ways(program(True, "ring_q")):
    assert dims[-4:] != keys and dims != BLOCK[0]


def test_a_halo_sends_what_is_seen_and_no_more():
  options = dict(strategy="halo", local_window_size=(5, 2), is_causal=False)
  behind, ahead = (2, B, K, 5, H), (2, B, K, 2, H)
  want = {(behind, "f32", 1): 1, (ahead, "f32", 7): 1}
  assert ways(program(False, **options)) == want
  # The sums of as many tokens go back.
  back = {(behind, "f32", 7): 1, (ahead, "f32", 1): 1}
  assert ways(program(True, **options)) == want | back


def test_documents_tell_each_other_little():
  found = program(False, "documents", q_segment_ids=np.ones(96, np.int32))
  gathered = [
    i.bytes
    for computation in found.computations.values()
    for i in computation.values()
    if i.op.startswith("all-gather")
  ]
  assert gathered and max(gathered) <= 8 * LENGTH * 4
  keys = {dims for dims, *_ in ways(found)}
  assert keys == {BLOCK[0]}

"""What a hop's mask amounts to, and a vendor's kernel behind it."""

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import ringjax as rj
from ringjax import (
  Blockwise,
  Causal,
  Contiguous,
  Gather,
  Ring,
  SameSegment,
  Striped,
  Window,
  Zigzag,
)
from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Gradients, Local, LocalAlgorithm
from ringjax.ops.attention.kernels import hop_kinds as kinds
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.mask import Coords, Everything, visible
from tests import oracle
from tests.ops.attention.test_exact import FEATURES, causal, ring_mesh

LAYOUTS = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "zigzag": Zigzag(),
}


@dataclasses.dataclass(frozen=True)
class Vendor(LocalAlgorithm):
  """A kernel as vendors make them: two masks, and NaN times 0 is NaN.

  Attributes:
    other: what computes the hops that are of no kind.
    local: whether its gradients go by its own statistics, which is wrong.
  """

  other: Any = Blockwise(8, 8)
  local: bool = False
  chip: str | None = None

  def decline(self, *_):
    return None

  def forward(self, *args):
    return kinds.forward(self, self.other, *args)

  def backward(self, *args):
    return kinds.backward(self, self.other, *args)

  def _scores(self, x, scale, causal):
    s = jnp.einsum("bkgth,bksh->bkgts", *f32(x.q, x.k)) * scale
    below = np.tri(*s.shape[3:], dtype=bool)[None, None, None]
    return jnp.where(below, s, -jnp.inf) if causal else s

  def outputs(self, x, scale, causal):
    s = self._scores(x, scale, causal)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.exp(s - lse[..., None])
    out = jnp.einsum("bkgts,bksj->bkgtj", p, *f32(x.v))
    return out.astype(x.q.dtype), lse

  def gradients(self, x, rows, scale, causal):
    do, out, lse = rows
    if self.local:
      out, lse = self.outputs(x, scale, causal)
    s = self._scores(x, scale, causal)
    p = jnp.exp(s - lse[..., None])
    q, k, v, out, do = f32(*x, out, do)
    dp = jnp.einsum("bkgtj,bksj->bkgts", do, v)
    ds = p * (dp - jnp.sum(do * out, -1)[..., None]) * scale
    found = (
      jnp.einsum("bkgts,bksh->bkgth", ds, k),
      jnp.einsum("bkgts,bkgth->bksh", ds, q),
      jnp.einsum("bkgts,bkgtj->bksj", p, do),
    )
    return tuple(a.astype(x.q.dtype) for a in found)


def f32(*arrays):
  return [a.astype(jnp.float32) for a in arrays]


@dataclasses.dataclass(frozen=True)
class Poison:
  """In place of what should not be needed."""

  def forward(self, *args):
    return nan(args[-1])

  def backward(self, x, *args):
    dq, dterms = args[-1]
    return Gradients(nan(dq), *nan(f32(x.k, x.v)), dterms)


def nan(tree):
  return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), tree)


# ---------------------------------------------------------------------------
# Kinds
# ---------------------------------------------------------------------------


def truth_of(yes):
  """The kind of a hop whose pairs [B, T, S] are these."""
  same = lambda other: yes.shape[1] == yes.shape[2] and (yes == other).all()
  if not yes.any():
    return kinds.NONE
  if yes.all():
    return kinds.FULL
  if same(np.tri(*yes.shape[1:], dtype=bool)):
    return kinds.CAUSAL
  if same(np.tri(*yes.shape[1:], -1, dtype=bool)):
    return kinds.STRICT
  return kinds.OTHER


def pairs(mask, q, k):
  at = lambda c, axis: Coords(*(np.expand_dims(x, axis) for x in c))
  return np.broadcast_to(
    visible(mask, at(q, 2), at(k, 1)),
    (max(len(q.seg), len(k.seg)), q.pos.shape[1], k.pos.shape[1]),
  )


def coords(pos, seg):
  return Coords(
    np.asarray(pos, np.int32)[None], np.asarray(seg, np.int32)[None]
  )


found_kinds = jax.jit(kinds.kinds, static_argnums=(3, 4))


@jax.jit
def found_plan(q, k):
  return kinds.HopPlan.of(Context(q, k, Causal()), jnp.bool_(True))


def hops(layout, length, shards, start=0, seg=None):
  """(i, j, coordinates of shard i, of shard j), of all hops."""
  unit = 2 * shards if isinstance(layout, Zigzag) else shards
  whole = -(-length // unit) * unit
  order = np.asarray(layout.order(whole, shards))
  seg = np.ones(length, int) if seg is None else seg
  seg = np.pad(seg, (0, whole - length))[order]
  cut = lambda x: np.split(x, shards)
  at = [coords(*c) for c in zip(cut(order + start), cut(seg), strict=True)]
  for i in range(shards):
    for j in range(shards):
      yield i, j, at[i], at[j]


@pytest.mark.parametrize("mask", [Causal(), Everything()], ids=str)
@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_hops_of_a_layout_are_what_they_are(name, shards, start, mask):
  seen = set()
  for i, j, q, k in hops(LAYOUTS[name], 48, shards, start):
    kind = int(found_kinds(mask, q, k)[0, 0])
    assert kind == truth_of(pairs(mask, q, k)), (i, j)
    seen.add(kind)
    if name == "striped" and mask == Causal():
      assert kind == (kinds.CAUSAL if j <= i else kinds.STRICT)
    if name == "contiguous" and mask == Causal():
      want = kinds.CAUSAL if i == j else kinds.FULL if j < i else kinds.NONE
      assert kind == want
  if mask == Everything():
    assert seen == {kinds.FULL}
  elif name == "zigzag" and shards > 1:
    assert seen == {kinds.CAUSAL, kinds.OTHER}


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces(name, shards):
  """Every piece's kind, and that zigzag's hops are all made of them."""
  for i, j, q, k in hops(LAYOUTS[name], 48, shards):
    grid = np.asarray(found_kinds(Causal(), q, k, 2, 2))
    yes = pairs(Causal(), q, k)
    half = yes.shape[1] // 2
    for a in range(2):
      for b in range(2):
        cut = yes[:, a * half :, b * half :][:, :half, :half]
        assert grid[a, b] == truth_of(cut), (i, j, a, b)
    plan = found_plan(q, k)
    assert int(plan.choice) != kinds.OTHER
    if name != "zigzag":
      assert int(plan.choice) != kinds.PIECES


def test_gathered_keys_are_pieces():
  """Of the last of 4 shards: 7 pieces seen, one by one causal, one not."""
  q = coords(np.arange(36, 48), np.ones(12))
  k = coords(np.arange(48), np.ones(48))
  plan = found_plan(q, k)
  assert int(plan.choice) == kinds.PIECES
  full, below, none = kinds.FULL, kinds.CAUSAL, kinds.NONE
  want = [[full] * 6 + [below, none], [full] * 7 + [below]]
  assert np.array_equal(plan.grid, want)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
  ("length", "seg"),
  [
    (41, None),
    (30, None),
    (48, np.repeat([1, 2], [20, 28])),
    (48, np.repeat([1, 2, 0, 2], [6, 30, 6, 6])),
  ],
)
@pytest.mark.parametrize(
  "mask", [Causal(), Causal() & SameSegment(), SameSegment()], ids=str
)
def test_padding_and_documents(name, length, seg, mask):
  """Never wrong; what is not known may be called other."""
  for i, j, q, k in hops(LAYOUTS[name], length, 4, seg=seg):
    kind = int(found_kinds(mask, q, k)[0, 0])
    yes = pairs(mask, q, k)
    assert kind in (truth_of(yes), kinds.OTHER), (i, j)
    if (q.seg == 1).all() and (k.seg == 1).all():
      assert kind == truth_of(yes), (i, j)
    if not (q.seg.all() and k.seg.all()):
      assert kind in (kinds.NONE, kinds.OTHER)


def test_examples_of_several_kinds_are_other():
  at = lambda *starts: Coords(
    np.stack([np.arange(4) + s for s in starts]).astype(np.int32),
    np.ones((len(starts), 4), np.int32),
  )
  kind = lambda q, k: int(found_kinds(Causal(), q, k)[0, 0])
  assert kind(at(0, 8), at(0, 8)) == kinds.CAUSAL
  assert kind(at(0), at(0, 0)) == kinds.CAUSAL
  assert kind(at(0, 8), at(0, 0)) == kinds.OTHER
  assert kind(at(0, 0), at(8, 4)) == kinds.NONE
  assert kind(at(0, 8), at(4, 4)) == kinds.OTHER
  assert kind(at(8, 4), at(4, 0)) == kinds.FULL


@hypothesis.given(st.data())
def test_kinds_are_never_wrong(data):
  tokens = data.draw(st.sampled_from([(1, 1), (3, 3), (4, 4), (2, 4)]))
  near = data.draw(st.sampled_from([4, 12]))

  def draw(n):
    pos = data.draw(st.lists(st.integers(0, near), min_size=n, max_size=n))
    if data.draw(st.booleans()):
      pos = sorted(pos)
    seg = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    if data.draw(st.booleans()):
      seg = [1] * n
    return coords(pos, seg)

  q, k = map(draw, tokens)
  mask = data.draw(
    st.sampled_from(
      [
        Causal(),
        Everything(),
        Causal() & SameSegment(),
        SameSegment(),
        Causal() & Window(5),
        Causal() | rj.Prefix(2),
      ]
    )
  )
  kind = int(found_kinds(mask, q, k)[0, 0])
  want = truth_of(pairs(mask, q, k))
  assert kind in (want, kinds.OTHER)
  # Of keys in order and one document nothing is left open.
  plain = mask in (Causal(), Everything()) and q.seg.all() and k.seg.all()
  if plain and (np.diff(k.pos) >= 0).all():
    assert kind == want


def test_which_masks_have_kinds():
  assert kinds.has_known_kinds(Causal() & (SameSegment() & Everything()))
  assert not kinds.has_known_kinds(Causal() & Window(4))
  assert not kinds.has_known_kinds(Causal() | SameSegment())


# ---------------------------------------------------------------------------
# The wrapper
# ---------------------------------------------------------------------------

CASES = {
  # 12 tokens a shard of 8, 32 of 3: a multiple of two everywhere.
  "causal": dict(t=96, is_causal=True, sees=causal),
  "full": dict(t=96),
  "far": dict(
    t=96,
    is_causal=True,
    sees=causal,
    q_pos=500 + np.arange(96),
    k_pos=500 + np.arange(96),
  ),
  "sinks": dict(t=96, is_causal=True, sees=causal, sinks=True),
}


@functools.cache
def problem(name):
  case = oracle.build(**(FEATURES | CASES)[name])
  return case, oracle.truth(case)


def verify(name, local, layout, shards, strategy=None, check=True):
  case, want = problem(name)
  got = oracle.run(
    case,
    layout=layout,
    strategy=strategy or Ring(local, unroll=1),
    shards=shards,
    mesh=ring_mesh(shards),
  )
  if check:
    oracle.check(got, want)
  return {key: oracle.error(got[key], want[key]) for key in want}


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("shards", "layout"),
  [
    pytest.param(
      shards,
      layout,
      marks=()
      if (shards, layout) in ((8, "zigzag"), (8, "striped"), (1, "contiguous"))
      else pytest.mark.slow,
    )
    for shards in (1, 3, 8)
    for layout in LAYOUTS
  ],
)
def test_a_ring_of_kernels(layout, shards):
  """Outputs, log-sum-exps and all gradients; no hop is left to Blockwise."""
  verify("causal", Vendor(Poison()), LAYOUTS[layout], shards)


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize(
  ("name", "layout"),
  [
    ("full", "contiguous"),
    pytest.param("far", "zigzag", marks=pytest.mark.slow),
    ("sinks", "striped"),
  ],
)
def test_other_calls_of_kernels_only(name, layout):
  verify(name, Vendor(Poison()), LAYOUTS[layout], 3)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "layout"),
  [
    ("gqa", "zigzag"),  # 72 tokens: padding at the end
    pytest.param("segments", "contiguous", marks=pytest.mark.slow),
    pytest.param("window-wide", "striped", marks=pytest.mark.slow),
    pytest.param("lengths", "contiguous", marks=pytest.mark.slow),
    pytest.param("everything", "striped", marks=pytest.mark.slow),
    pytest.param("positions", "contiguous", marks=pytest.mark.slow),
    pytest.param("prefill", "zigzag", marks=pytest.mark.slow),
    pytest.param("nothing", "contiguous", marks=pytest.mark.slow),
  ],
)
def test_what_is_of_no_kind_blockwise_serves(name, layout):
  verify(name, Vendor(), LAYOUTS[layout], 4)


@pytest.mark.parametrize(
  "strategy",
  [
    Gather(Vendor(Poison())),
    *(
      pytest.param(strategy, marks=pytest.mark.slow)
      for strategy in (
        rj.Ulysses(Vendor(Poison())),
        rj.Ulysses(Ring(Vendor(Poison())), inner=2),
        rj.RingQ(Vendor(Poison())),
        Ring(Ring(Vendor(Poison())), inner=2),
        Ring(Vendor(Poison()), two_way=True),
      )
    ),
  ],
  ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_other_strategies(strategy, layout):
  dealt = isinstance(strategy, rj.Ulysses)
  if dealt and layout == "zigzag":
    # Halves of several shards in one hop: no order that has a name.
    strategy = nesting.around(strategy, Vendor())
  # As many as there are heads of keys, where those are dealt.
  shards = 2 if dealt and strategy.inner is None else 4
  verify("causal", None, LAYOUTS[layout], shards, strategy)


def test_without_a_mesh_and_in_vmap():
  case, want = problem("causal")
  local = Vendor(Poison())
  oracle.check(oracle.run(case, strategy=Gather(local)), want)
  q, k, v = (case.arrays[n][None] for n in ("query", "key", "value"))
  call = lambda *x: rj.dot_product_attention(
    *x, is_causal=True, strategy=Gather(Vendor())
  )
  got = jax.jit(jax.vmap(call))(*(np.repeat(x, 2, 0) for x in (q, k, v)))
  assert oracle.error(got[1], want["out"]) < 3e-6


@pytest.mark.slow
def test_a_planted_fault_is_found(monkeypatch):
  """Causal where it should be strict, and gradients of a hop's own keys."""
  wrong = verify("causal", Vendor(local=True), Striped(), 3, check=False)
  assert wrong["out"] < 3e-6 and wrong["key"] > 1e-2 < wrong["query"]
  right = kinds.kinds
  monkeypatch.setattr(
    kinds,
    "kinds",
    lambda *args: jnp.where(
      right(*args) == kinds.STRICT, kinds.CAUSAL, right(*args)
    ),
  )
  wrong = verify("causal", Vendor(), Striped(), 3, check=False)
  assert wrong["out"] > 1e-2 and wrong["lse"] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
  "where", ["keys", pytest.param("cotangent", marks=pytest.mark.slow)]
)
def test_a_nan_reaches_those_who_see_it_only(where):
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(1, 48, 2, 8)).astype(np.float32) for _ in "qkv")
  do = np.ones_like(q)
  if where == "keys":
    v[0, 20, 0, 3] = np.nan
    k[0, 30, 1, 0] = np.inf
  else:
    do[0, 40] = np.nan
  mesh = ring_mesh(4)

  @functools.partial(jax.jit, static_argnums=0)
  def results(local, *x):
    call = lambda *x: rj.ring_attention(
      *x, mesh=mesh, axis="seq", is_causal=True, local=local
    )
    out, pull = jax.vjp(call, *x)
    return out, *pull(do)

  def odd(local):
    return [~np.isfinite(x).all((0, 2, 3)) for x in results(local, q, k, v)]

  found = odd(Vendor())
  if where == "keys":
    assert found[0][20:].any() and not found[0][:20].any()
  else:
    # Later keys do not know of the query at 40.
    assert not found[0].any() and found[2][:41].all() and found[3][:41].all()
    assert not found[2][41:].any() and not found[3][41:].any()
  for ours, theirs in zip(found, odd(Blockwise(8, 8)), strict=True):
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_stands_for_the_output(dtype):
  rng = np.random.default_rng(0)
  shape = (2, 2, 3, 50)
  do = jnp.asarray(rng.normal(size=(*shape, 64)), jnp.float32)
  # Rows of very different sizes.
  size = 10.0 ** rng.uniform(-3, 1, (*shape, 1))
  do = (do * jnp.asarray(size, jnp.float32)).astype(dtype)
  out = jnp.asarray(rng.normal(size=do.shape), jnp.float32)
  delta = jnp.sum(do.astype(jnp.float32) * out, -1) - 0.5
  lse = jnp.zeros(shape, jnp.float32)
  given, right = kinds.stand_in(do, delta, lse)
  assert right and given.dtype == dtype
  product = jnp.sum(given.astype(jnp.float32) * do.astype(jnp.float32), -1)
  limit = {2: 2e-3, 4: 1e-6}[do.dtype.itemsize]
  assert oracle.error(product, delta) < limit
  # No multiple of nothing is something, but for rows that see no key.
  do = do.at[0, 0, 0, 7].set(0)
  assert not kinds.stand_in(do, delta, lse)[1]
  assert kinds.stand_in(do, delta.at[0, 0, 0, 7].set(0), lse)[1]
  assert kinds.stand_in(do, delta, lse.at[0, 0, 0, 7].set(1e30))[1]


@pytest.mark.long
def test_a_cotangent_of_the_log_sum_exp_alone():
  """No output stands for it: Blockwise has it."""
  case = problem("causal")[0]
  x = [case.arrays[n] for n in ("query", "key", "value")]

  def gradients(local):
    call = lambda *x: rj.dot_product_attention(
      *x, is_causal=True, strategy=Gather(local), return_residual=True
    )[1].sum()
    return jax.grad(call, (0, 1))(*x)

  ours, theirs = gradients(Vendor()), gradients(Blockwise())
  for a, b in zip(ours, theirs, strict=True):
    assert oracle.error(a, b) < 1e-5
  assert np.isnan(gradients(Vendor(Poison()))[0]).all()


@pytest.mark.long
def test_nothing_is_touched_where_nothing_is_seen():
  """Not even counted: a kernel that gives NaN for everything is not asked."""

  class Broken(Vendor):
    def outputs(self, *args):
      return jax.tree.map(lambda a: a * jnp.nan, super().outputs(*args))

  def one(start):
    at = coords(np.arange(8) + start, np.ones(8))
    return Coords(*map(jnp.asarray, at))

  x = Local(
    jnp.ones((1, 1, 1, 8, 4)),
    jnp.full((1, 1, 8, 4), jnp.nan),
    jnp.ones((1, 1, 8, 4)),
  )
  carry = empty_partial(x)
  got = kinds.forward(
    Broken(),
    Poison(),
    x,
    ScoreArgs(Scores(scale=1.0), Terms(), Context(one(0), one(8), Causal())),
    carry,
  )
  for a, b in zip(got, carry, strict=True):
    assert np.array_equal(a, b)

"""Samplers: against a plain reference, and by how often tokens come."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from ringjax.errors import DtypeError, SamplingError, ShapeError
from ringjax.infer import sampling
from ringjax.infer.sampling import Greedy, Sample, traced
from ringjax.parallel.mesh import make_mesh

ZERO = jnp.zeros((), jnp.int32)


def reference(logits, sampler, seen=None):
  """Filtered logits, one row at a time, in float64."""
  out = np.full(logits.shape, -np.inf)
  for row, scores in enumerate(np.asarray(logits, np.float64)):
    scores = scores.copy()
    penalty = sampler.repetition_penalty
    if penalty is not None:
      for i in np.flatnonzero(seen[row]):
        scores[i] = (
          scores[i] * penalty if scores[i] < 0 else scores[i] / penalty
        )
    scores /= sampler.temperature
    if sampler.top_k is not None:
      kth = np.sort(scores)[::-1][min(sampler.top_k, len(scores)) - 1]
      scores[scores < kth] = -np.inf
    p = np.exp(scores - scores.max())
    p /= p.sum()
    if sampler.top_p is not None:
      before = np.array([p[scores > s].sum() for s in scores])
      scores[before >= sampler.top_p] = -np.inf
      p = np.where(before >= sampler.top_p, 0, p)
    if sampler.min_p is not None:
      scores[p < sampler.min_p * p.max() * (1 - 1e-6)] = -np.inf
    out[row] = scores
  return out


def random_logits(seed, shape, ties=False):
  rng = np.random.default_rng(seed)
  logits = rng.normal(0, 3, shape)
  return (np.round(logits) if ties else logits).astype(np.float32)


FILTERS = [
  dict(),
  dict(temperature=0.5),
  dict(temperature=7.0),
  dict(top_k=1),
  dict(top_k=3),
  dict(top_k=1000),
  dict(top_p=0.01),
  dict(top_p=0.5),
  dict(top_p=0.9),
  dict(min_p=0.1),
  dict(min_p=1.0),
  dict(top_k=5, top_p=0.7),
  dict(temperature=1.7, top_k=9, top_p=0.8, min_p=0.2),
  dict(repetition_penalty=1.3),
  dict(repetition_penalty=0.5, temperature=2.0, top_p=0.6),
]


@pytest.mark.one_case
@pytest.mark.long_cases(100)
@pytest.mark.smoke
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 17, 400])
def test_filters_are_the_references(filters, ties, vocab):
  sampler = Sample(**filters)
  logits = random_logits(vocab, (5, vocab), ties)
  seen = np.random.default_rng(1).random((5, vocab)) < 0.4
  x = logits
  if sampler.needs_seen:
    p = np.float32(sampler.repetition_penalty)
    x = np.where(seen, np.where(x < 0, x * p, x / p), x)
  got = np.asarray(jax.jit(sampler.filtered)(jnp.asarray(x)))
  want = reference(logits, sampler, seen)
  np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
  kept = ~np.isinf(want)
  np.testing.assert_allclose(got[kept], want[kept], rtol=1e-5)
  # And what is drawn was kept.
  ids = sampler(jnp.asarray(logits), ZERO, jnp.asarray(seen))
  assert kept[np.arange(5), np.asarray(ids)].all()


@pytest.mark.long
@settings(max_examples=60)
@given(
  logits=st.lists(st.integers(-6, 6), min_size=8, max_size=8),
  top_k=st.none() | st.integers(1, 9),
  top_p=st.none() | st.sampled_from([0.05, 0.3, 0.61, 0.97]),
  min_p=st.none() | st.sampled_from([0.013, 0.2, 0.77]),
)
def test_equal_logits_are_kept_or_dropped_together(logits, top_k, top_p, min_p):
  sampler = Sample(top_k=top_k, top_p=top_p, min_p=min_p)
  x = jnp.asarray([logits], jnp.float32)
  kept = np.isfinite(np.asarray(sampler.filtered(x)))[0]
  want = np.isfinite(reference(np.asarray(x), sampler))[0]
  np.testing.assert_array_equal(kept, want)
  assert kept[np.argmax(logits)]


def test_a_row_keeps_its_own_share():
  """Top-p of a row of small logits beside one of large ones."""
  ratios = np.array([[1, 0.1, 0.1, 0.1], [1, 0.9, 0.8, 0.7]], np.float32)
  both = Sample(top_p=0.7).filtered(jnp.log(jnp.asarray(ratios)))
  kept = np.asarray(both) > -np.inf
  np.testing.assert_array_equal(kept, [[1, 0, 0, 0], [1, 1, 1, 0]])


def test_greedy_is_the_first_of_the_largest():
  logits = jnp.asarray([[0, 3, 3, 1], [-5, -1, -2, -1]], jnp.float32)
  assert Greedy()(logits, ZERO).tolist() == [1, 1]
  assert Greedy()(logits, ZERO).dtype == jnp.int32
  banned = jnp.asarray([False, True, False, False])
  assert Greedy()(logits, ZERO, banned=banned).tolist() == [2, 3]
  rows = jnp.asarray([[False, True, True, False], [False, True, False, False]])
  assert Greedy()(logits, ZERO, banned=rows).tolist() == [3, 3]
  penal = Greedy(repetition_penalty=2.0)
  assert penal.needs_seen and not Greedy().needs_seen
  assert penal(logits, ZERO, rows).tolist() == [1, 3]
  assert Greedy(repetition_penalty=4.0)(logits, ZERO, rows).tolist() == [3, 3]


def test_greedy_is_argmax_whatever_the_numbers():
  inf, nan = np.inf, np.nan
  rows = [[1, nan, inf, nan], [-inf] * 4, [-inf, inf, 0, inf], [-0.0, 0, -1, 0]]
  logits = jnp.asarray(rows, jnp.float32)
  want = np.argmax(np.asarray(logits), -1)
  assert Greedy()(logits, ZERO).tolist() == want.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
  "sampler",
  [Sample(), Sample(temperature=2.0), Sample(top_k=4), Sample(top_p=0.8)],
)
def test_tokens_come_as_often_as_they_should(sampler):
  logits = jnp.asarray([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -4.0, 1.0])
  draws = 40_000
  rows = jnp.broadcast_to(logits, (draws, 8))
  ids = np.asarray(jax.jit(sampler)(rows, ZERO))
  got = np.bincount(ids, minlength=8) / draws
  want = np.asarray(jax.nn.softmax(sampler.filtered(logits[None])[0]))
  # Five standard deviations; seeds are fixed, so this holds or not for good.
  assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / draws)).all()
  assert (got[want == 0] == 0).all()


def test_steps_draw_as_rows_do():
  logits = jnp.asarray([[1.0, 0.0, -1.0]])
  steps = jnp.arange(20_000, dtype=jnp.int32)
  draw = jax.jit(jax.vmap(lambda step: Sample(seed=9)(logits, step)[0]))
  got = np.bincount(np.asarray(draw(steps)), minlength=3) / 20_000
  want = np.asarray(jax.nn.softmax(logits[0]))
  assert np.abs(got - want).max() < 5 * 0.5 / math.sqrt(20_000)


def test_noise_is_gumbels_up_to_the_far_tail():
  count = 1 << 22
  noise = np.asarray(
    sampling._gumbel(
      jnp.asarray(sampling._words(3)),
      jnp.zeros(1, jnp.uint32),
      jnp.zeros(1, jnp.uint32),
      count,
    )
  )
  noise = noise.reshape(-1).astype(np.float64)
  for at in (-2, -1, 0, 1, 2, 5, 8, 10):
    want = -np.expm1(-np.exp(-at))
    got = (noise > at).mean()
    assert abs(got - want) < 5 * math.sqrt(want * (1 - want) / count), at
  # Of 24 bits there would be few different ones.
  far = noise[noise > 9]
  assert far.size > 300 and np.unique(far).size > 0.99 * far.size
  assert np.isfinite(noise).all()


# ---------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------


def test_threefry_is_the_published_one():
  # Known answers of Random123: key, counter, result.
  cases = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    (
      (0x13198A2E, 0x03707344),
      (0x243F6A88, 0x85A308D3),
      (0xC4923A9C, 0x483DF7A0),
    ),
  ]
  for key, counter, want in cases:
    words = [jnp.uint32(w) for w in (*key, *counter)]
    got = sampling._threefry(tuple(words[:2]), tuple(words[2:]))
    assert tuple(map(int, got)) == want


def test_draws_are_pinned():
  # From version to version, of ringjax and of JAX.
  logits = jnp.asarray(random_logits(0, (4, 1000)))
  ids = [
    Sample(seed=s, temperature=3.0)(logits, jnp.int32(t)).tolist()
    for s, t in ((0, 0), (0, 1), (2**63 - 1, 5))
  ]
  assert ids == PINNED


PINNED = [[693, 227, 243, 621], [431, 517, 213, 192], [79, 610, 122, 896]]


def test_draws_hang_on_seed_row_and_step_only():
  logits = jnp.asarray(random_logits(1, (1, 500)))
  rows = jnp.tile(logits, (6, 1))
  sampler = Sample(temperature=5.0, seed=2**40 + 1)
  whole = sampler(rows, jnp.int32(3))
  assert len(set(whole.tolist())) > 1
  for row in range(6):
    one = sampler(logits, jnp.int32(3), rows=jnp.asarray([row], jnp.int32))
    assert int(one[0]) == int(whole[row])
  steps = jnp.asarray([3, 4, 3, 4, 3, 4], jnp.int32)
  mixed = sampler(rows, steps)
  assert mixed[::2].tolist() == whole[::2].tolist()
  assert mixed.tolist() != whole.tolist()
  for seed in (1, 2**40, 2**32):
    other = Sample(temperature=5.0, seed=seed)(rows, jnp.int32(3))
    assert other.tolist() != whole.tolist()


@pytest.mark.parametrize(
  "spec", [("data", None), (None, "seq"), ("data", "seq")]
)
@pytest.mark.parametrize("filters", [dict(), dict(top_k=7), dict(top_p=0.7)])
def test_draws_are_the_same_on_any_mesh(spec, filters):
  mesh = make_mesh((2, 4), ("data", "seq"))
  logits = jnp.asarray(random_logits(2, (4, 512)))
  sampler = Sample(temperature=2.0, seed=5, **filters)
  draw = jax.jit(lambda s, x, t: s(x, t), static_argnums=0)
  want = draw(sampler, logits, jnp.int32(11))
  with jax.set_mesh(mesh):
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(*spec)))
    got = draw(sampler, sharded, jnp.int32(11))
  assert got.tolist() == want.tolist()


def test_settings_of_jax_change_nothing():
  logits = jnp.asarray(random_logits(3, (3, 100)))
  want = Sample()(logits, ZERO).tolist()
  with jax.threefry_partitionable(False):
    assert Sample()(logits, ZERO).tolist() == want
  with jax.default_prng_impl("rbg"):
    assert Sample()(logits, ZERO).tolist() == want


# ---------------------------------------------------------------------------
# As an argument; edges
# ---------------------------------------------------------------------------


def test_samplers_are_static_arguments():
  count = 0

  def draw(sampler, logits, step):
    nonlocal count
    count += 1
    return sampler(logits, step)

  jitted = jax.jit(draw, static_argnums=0)
  logits = jnp.zeros((2, 8))
  for step in range(3):
    jitted(Sample(top_p=0.9), logits, jnp.int32(step))
  # What filters nothing is the same as no filter.
  jitted(Sample(), logits, ZERO)
  jitted(
    Sample(top_p=1.0, min_p=0.0, repetition_penalty=1.0),
    logits,
    ZERO,
  )
  jitted(Greedy(), logits, ZERO)
  assert count == 3


@pytest.mark.parametrize("filters", FILTERS)
def test_nothing_is_sorted(filters):
  sampler = Sample(**filters)
  logits, seen = jnp.zeros((2, 64)), jnp.zeros((2, 64), bool)
  jaxpr = str(jax.make_jaxpr(sampler)(logits, ZERO, seen))
  assert "sort[" not in jaxpr and "top_k[" not in jaxpr
  # What closes in on a cutoff is there only where a filter asks for it.
  passes = (sampler.top_p is not None) + (sampler.top_k is not None)
  assert jaxpr.count("name=_cutoff") == passes


def test_greedy_looks_at_the_vocabulary_twice():
  jaxpr = str(jax.make_jaxpr(traced(Greedy()))(jnp.zeros((2, 64)), ZERO))
  assert jaxpr.count("reduce_") == 2
  assert not any(word in jaxpr for word in ("log", "shift", "sort", "argmax"))


@pytest.mark.parametrize("vocab", [1, 5, 64])
@pytest.mark.parametrize(
  "row", ["normal", "equal", "zeros", "huge", "small", "some"]
)
def test_a_cutoff_is_the_kth_largest(row, vocab):
  rng = np.random.default_rng(vocab)
  x = {
    "normal": rng.normal(0, 5, vocab),
    "equal": np.full(vocab, -7.25),
    "zeros": np.where(rng.random(vocab) < 0.5, 0.0, -0.0),
    "huge": rng.choice([3e38, -3e38, 1.0], vocab),
    "small": rng.normal(0, 1e-30, vocab),
    "some": np.where(rng.random(vocab) < 0.5, -np.inf, 1.0),
  }[row].astype(np.float32)
  ones = jnp.ones((1, vocab), jnp.int32)
  for k in range(1, vocab + 1):
    got = sampling._cutoff(jnp.asarray(x[None]), ones, jnp.int32(k))
    assert float(got[0, 0]) == np.sort(x)[::-1][k - 1], k


def test_the_likeliest_token_is_always_kept():
  # Less than float32 can tell from 0.
  sampler = Sample(top_p=1e-300, temperature=2.0)
  logits = jnp.asarray(random_logits(4, (3, 50)))
  want = jnp.argmax(logits, -1).tolist()
  assert sampler(logits, ZERO).tolist() == want


def test_another_number_compiles_nothing():
  draw = jax.jit(lambda sampler, x, step, seen: sampler(x, step, seen))
  logits = jnp.asarray(random_logits(6, (3, 90)))
  seen = jnp.asarray(np.random.default_rng(0).random((3, 90)) < 0.5)
  numbers = dict(
    temperature=(2.0, 0.5, 100.0),
    top_k=(50, 3, 10**6),
    top_p=(0.9, 0.2, 1e-9),
    min_p=(1e-3, 0.5, 1.0),
    repetition_penalty=(1.3, 0.4, 2.0),
    seed=(0, 5, 2**63 - 1),
  )
  on = [
    ("temperature", "seed"),
    tuple(numbers),
    ("top_p", "seed"),
    ("top_k", "temperature", "repetition_penalty"),
  ]
  for count, names in enumerate(on, 1):
    for pick in range(3):
      sampler = Sample(**{name: numbers[name][pick] for name in names})
      got = draw(traced(sampler), logits, ZERO, seen)
      # And the numbers are those that were asked for.
      assert got.tolist() == sampler(logits, ZERO, seen).tolist()
      assert draw._cache_size() == count, (names, pick)
  for penalty in (1.5, 3.0):
    draw(traced(Greedy(repetition_penalty=penalty)), logits, ZERO, seen)
  assert draw._cache_size() == len(on) + 1


def test_what_is_no_pytree_is_static():
  @dataclasses.dataclass(frozen=True)
  class Always:
    token: int

    def __call__(self, logits, step, seen=None):
      return jnp.full(logits.shape[:1], self.token, jnp.int32)

  draw = jax.jit(lambda sampler, x, step: sampler(x, step))
  for token in (3, 3, 4):
    made = draw(traced(Always(token)), jnp.zeros((2, 8)), ZERO)
    assert made.tolist() == [token] * 2
  assert draw._cache_size() == 2


@pytest.mark.parametrize("filters", FILTERS)
def test_rows_of_minus_infinity(filters):
  sampler = Sample(**filters)
  logits = jnp.full((2, 9), -jnp.inf).at[0, 4].set(-3.0)
  seen = jnp.ones((2, 9), bool)
  ids = sampler(logits, ZERO, seen)
  assert int(ids[0]) == 4
  assert 0 <= int(ids[1]) < 9


def test_large_logits():
  logits = jnp.asarray([[3e38, -3e38, 0.0], [1e30, 1e30, -1e30]])
  for filters in FILTERS:
    sampler = Sample(**filters)
    if sampler.temperature >= 1:
      ids = sampler(logits, ZERO, jnp.zeros((2, 3), bool))
      assert int(ids[0]) == 0 and int(ids[1]) in (0, 1)


@pytest.mark.parametrize(
  ("name", "value", "words"),
  [
    ("temperature", 0, r"0.01 to 100.*Greedy\(\)"),
    ("temperature", -1.0, "from 0.01 to 100"),
    ("temperature", math.nan, "from 0.01 to 100"),
    ("temperature", math.inf, "from 0.01 to 100"),
    ("temperature", None, "from 0.01 to 100"),
    ("temperature", "1", "from 0.01 to 100"),
    ("temperature", True, "from 0.01 to 100"),
    ("top_k", 0, "int from 1 to 2147483647"),
    ("top_k", 1.5, "int from 1 to"),
    ("top_k", True, "int from 1 to"),
    ("top_k", 2**31, "int from 1 to"),
    ("top_p", 0.0, "above 0, at most 1"),
    ("top_p", 1.0001, "above 0, at most 1"),
    ("top_p", math.nan, "above 0, at most 1"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", 2, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 100"),
    ("repetition_penalty", math.nan, "from 0.01 to 100"),
    ("seed", -1, "int from 0 to 9223372036854775807"),
    ("seed", 2**63, "63 bits"),
    ("seed", 1.0, "int from 0"),
  ],
)
def test_parameters_out_of_range(name, value, words, unchecked):
  with pytest.raises(SamplingError, match=words) as caught:
    Sample(**{name: value})
  assert str(caught.value).startswith(f"{name}: got ")
  assert len(str(caught.value)) <= 400
  if name == "repetition_penalty":
    with pytest.raises(SamplingError, match=words):
      Greedy(repetition_penalty=value)


@pytest.mark.parametrize("sampler", [Greedy(repetition_penalty=2.0), Sample()])
def test_operands_that_do_not_fit(sampler, unchecked):
  logits, mask = jnp.zeros((2, 8)), jnp.zeros((2, 8), bool)
  for wrong in (logits[0], logits[None], logits[:, :0], None):
    with pytest.raises(ShapeError, match=r"\[B, V\]"):
      sampler(wrong, ZERO, mask)
  with pytest.raises(DtypeError, match="float32"):
    sampler(logits.astype(jnp.bfloat16), ZERO, mask)
  with pytest.raises(ShapeError, match="banned"):
    sampler(logits, ZERO, mask, banned=mask[:, :3])
  with pytest.raises(DtypeError, match="bool"):
    sampler(logits, ZERO, mask, banned=logits)


def test_operands_of_a_draw_that_do_not_fit(unchecked):
  logits = jnp.zeros((2, 8))
  with pytest.raises(ShapeError, match="step"):
    Sample()(logits, jnp.zeros(3, jnp.int32))
  with pytest.raises(ShapeError, match="rows"):
    Sample()(logits, ZERO, rows=jnp.zeros(3, jnp.int32))
  for sampler in (
    Sample(repetition_penalty=2.0),
    Greedy(repetition_penalty=2.0),
  ):
    with pytest.raises(SamplingError, match=r"sampler\.needs_seen"):
      sampler(logits, ZERO)


def test_the_protocol_is_kept():
  assert isinstance(Greedy(), sampling.Sampler)
  assert isinstance(Sample(), sampling.Sampler)

"""The kernel that visits a cache on TPU, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.ops.attention.kernels import best
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.resident import Resident
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.stored import Stored, visit
from ringjax.ops.mask import Causal, Coords, Prefix, SameSegment
from tests.ops.attention import test_resident as resident
from tests.ops.attention.test_resident import OPTIONS, close, problem, truth

# Tiles that no chip has, so that a small problem has many of them.
SMALL = DecodeTPU(16, interpret=True)


@pytest.mark.parametrize(
  ("name", "shards"), [*((name, 1) for name in OPTIONS), ("all", 4)]
)
def test_one_query(name, shards):
  given = problem(96, 1)
  got = resident.run(*given, 2, shards, local=SMALL, **OPTIONS[name])
  close(got, truth(*given, 2, **OPTIONS[name]))


@pytest.mark.parametrize("slots", [1, 7, 128, 300])
def test_any_number_of_slots(slots):
  """What a last tile has behind the last key counts nothing."""
  given = problem(slots, 1, used=1.0)
  close(resident.run(*given, 1, local=SMALL), truth(*given, 1))


@pytest.mark.parametrize(("shards", "sharded"), [(1, False), (4, True)])
def test_a_few_queries(shards, sharded):
  given = problem(96, 8)
  got = resident.run(
    *given, 1, shards, sharded=sharded, local=SMALL, **OPTIONS["all"]
  )
  close(got, truth(*given, 1, **OPTIONS["all"]))


@pytest.mark.parametrize("heads", [1, 2])
def test_beside_axes_of_batch_and_heads(heads):
  resident.on_axes(
    heads, batch_axes=("data",), head_axes=("model",), whole=True, local=SMALL
  )


def test_nothing_to_see_is_zero():
  q, k, v, q_at, (pos, seg) = problem(32, 1)
  got = resident.run(
    q, k, v, q_at, (pos, np.zeros_like(seg)), 0, 4, local=SMALL
  )
  np.testing.assert_array_equal(got, np.zeros_like(got))


def test_what_is_not_seen_does_not_matter():
  """Bit for bit, even if it is no number."""
  q, k, v, q_at, k_at = problem(96, 1)
  run = lambda k, v: resident.run(q, k, v, q_at, k_at, 0, 4, local=SMALL)
  want = run(k, v)
  hidden = (k_at[1] != 2)[None, :, None, :, None]
  k, v = (np.where(hidden, np.float32(np.nan), x) for x in (k, v))
  np.testing.assert_array_equal(run(k, v), want)


def call(queries=1, slots=80, dtype=jnp.float32, mask=None, cap=None):
  """The arguments of a visit."""
  q, k, v, q_at, k_at = problem(slots, queries, used=0.9)
  at = lambda pair: Coords(*(jnp.asarray(x, jnp.int32) for x in pair))
  half = lambda x: jnp.asarray(x, dtype)
  return (
    Scores(scale=0.25, soft_cap=cap),
    half(q),
    Stored(half(k), half(v), at(k_at), jnp.int32(1)),
    Terms(),
    Context(at(q_at), at(k_at), mask or Causal() & SameSegment()),
  )


def same(ours, theirs, limit):
  for a, b in zip(ours, theirs, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    seen = np.isfinite(b)
    np.testing.assert_array_equal(np.isfinite(a), seen)
    far = np.linalg.norm(a[seen] - b[seen])
    assert far <= limit * np.linalg.norm(b[seen])


def test_the_partial_is_that_of_the_loops():
  args = call(3, dtype=jnp.bfloat16)
  same(SMALL.visit(*args), visit(*args), 1e-2)
  args = call(3)
  same(SMALL.visit(*args), visit(*args), 2e-6)


def test_a_prefix_of_each_example():
  """An array of the mask, of which each example has its own number."""
  args = call(mask=Prefix(jnp.array([3, 60])))
  args = (
    *args[:4],
    args[4]._replace(q=Coords(*(x * 0 + 2 for x in args[4].q))),
  )
  same(SMALL.visit(*args), visit(*args), 2e-6)


def test_keys_of_another_dtype():
  scores, q, keys, terms, context = call()
  keys = keys._replace(k=keys.k.astype("bfloat16"), v=keys.v.astype("bfloat16"))
  args = (scores, q, keys, terms, context)
  # The loops round weights to the values' dtype.
  same(SMALL.visit(*args), visit(*args), 1e-2)


def test_values_that_are_keys_are_one_operand():
  scores, q, keys, terms, context = call(dtype=jnp.bfloat16)
  keys = keys._replace(v=keys.k)
  args = (scores, q, keys, terms, context)
  same(SMALL.visit(*args), visit(*args), 1e-2)

  def operands(v):
    """Blocks of stored keys that the kernel is given."""
    run = lambda k: SMALL.visit(
      scores, q, keys._replace(k=k, v=v(k)), terms, context
    )
    return str(jax.make_jaxpr(run)(keys.k)).count("bf16[3,2,2,80,16]")

  assert operands(lambda k: k) < operands(lambda k: k + 1)


def test_they_stay_one_in_a_shard_map():
  """Keys that are values too, as a latent cache has them."""
  scores, q, keys, terms, context = call()
  keys = keys._replace(v=keys.k)
  seen = []

  @dataclasses.dataclass(frozen=True)
  class Looks(DecodeTPU):
    def visit(self, scores, q, keys, terms, context):
      seen.append(keys.v is keys.k)
      return super().visit(scores, q, keys, terms, context)

  mesh = resident.make_mesh(4, "auto")
  run = Resident(mesh=mesh, axis="seq", local=Looks(16, interpret=True))
  rest = (keys, terms, context.q, context.mask)
  got = jax.jit(lambda q: run(scores, q, *rest))(q)
  want = Resident(local=best.Loops())(
    scores, q, keys, terms, context.q, context.mask
  )
  assert seen == [True]
  close(got, want)


def test_tiles_are_large_and_fit():
  like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def tile(kv, groups, dim, slots=1 << 17, queries=1, chip="tpu-v5e"):
    found = []

    def look(q, k, v, at):
      stored = Stored(k, v, Coords(at, at), 0)
      found.append(DecodeTPU(chip=chip).tile(q, stored))

    stack = like(2, 1, kv, slots, dim)
    jax.eval_shape(
      look, like(1, kv, groups, queries, dim), stack, stack, like(1, slots)
    )
    return found[0]

  assert tile(8, 4, 128) == (8, 512)
  # Two cores: each half of the heads.
  assert tile(8, 4, 128, chip="tpu-v5p") == (4, 1024)
  assert tile(32, 1, 128) == (8, 512)
  assert tile(1, 71, 64) == (1, 2048)
  assert tile(5, 1, 128) == (5, 768)
  assert tile(8, 4, 128, slots=100) == (8, 128)
  # Many queries of many heads: the scores of a tile stay small.
  heads, keys = tile(1, 128, 512, queries=16)
  assert heads == 1 and 2048 * keys <= 1 << 19


DECLINED = {
  "float16": dict(dtype=jnp.float16),
  "multiples of 128": dict(kernel=DecodeTPU(24)),
  "dropout": dict(scores=Scores(scale=1.0, dropout_rate=0.1)),
  "bias": dict(terms=Terms(bias=jnp.zeros((1, 1, 1, 1, 80)))),
  "at most 1024": dict(dim=1025),
  "of vector memory": dict(kernel=DecodeTPU(1 << 18)),
}


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  changes = DECLINED[words]
  scores, q, keys, terms, context = call(dtype=changes.get("dtype", "bfloat16"))
  if "dim" in changes:
    q = jnp.zeros((*q.shape[:4], changes["dim"]), q.dtype)
  scores, terms = changes.get("scores", scores), changes.get("terms", terms)
  kernel = changes.get("kernel", DecodeTPU())
  args = (scores, q, keys, terms, context)
  assert words in kernel.decline(*args)
  with pytest.raises(OptionError, match=words):
    kernel.visit(*args)


def test_who_visits(monkeypatch):
  best._fault.cache_clear()
  args = call(dtype=jnp.bfloat16)
  ours = best.Best(platform="tpu", chip="tpu-v6e")
  assert ours.choose_visit(*args) == best.Choice(DecodeTPU(chip="tpu-v6e"), ())
  found = best.Best(24, 24, platform="tpu").choose_visit(*args)
  assert isinstance(found.algorithm, best.Loops)
  assert "DecodeTPU: tiles of 24 keys" in str(found)
  for platform in ("cpu", "gpu"):
    found = best.Best(platform=platform).choose_visit(*args)
    assert isinstance(found.algorithm, best.Loops) and not found.declined


def test_it_passes_its_own_check():
  assert best._compare_visits(DecodeTPU(128, interpret=True)) < best._ALLOWED


def test_a_broken_one_is_left_with_one_line(monkeypatch, caplog):
  @dataclasses.dataclass(frozen=True)
  class Cracked(DecodeTPU):
    interpret: bool = True

    def visit(self, *args):
      return super().visit(*args)._replace(l=jnp.full(args[1].shape[:4], 2.0))

  best._fault.cache_clear()
  monkeypatch.setitem(best.VISITS, "cpu", (Cracked,))
  args = call(dtype=jnp.bfloat16)
  with caplog.at_level(logging.WARNING):
    results = [best.Best(platform="cpu").visit(*args) for _ in range(2)]
  best._fault.cache_clear()
  (record,) = caplog.records
  assert "Cracked does not work" in record.message
  assert "off by" in record.message
  for found in results:
    same(found, visit(*args), 1e-6)

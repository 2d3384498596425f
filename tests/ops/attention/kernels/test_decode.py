"""The kernels that visit a cache, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.ops import kernel_choice
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.views import ContiguousView, decode_attention
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.attention.kernels.decode_gpu import DecodeGPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Prefix, SameSegment
from tests.ops.attention import test_cached as resident
from tests.ops.attention.test_cached import OPTIONS, close, problem, truth

KINDS = (DecodeTPU, DecodeGPU)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kernel(request):
  """With tiles that no chip has: a small problem has many of them."""
  return request.param(16, interpret=True)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("name", "shards"),
  [
    ("plain", 1),
    # With all of the others.
    ("all", 1),
    ("all", 4),
    *(
      pytest.param(name, 1, marks=pytest.mark.slow)
      for name in OPTIONS
      if name not in ("plain", "all")
    ),
  ],
)
def test_one_query(kernel, name, shards):
  given = problem(96, 1)
  got = resident.run(*given, 2, shards, local=kernel, **OPTIONS[name])
  close(got, truth(*given, 2, **OPTIONS[name]))


@pytest.mark.parametrize(
  "slots", [1, 21, pytest.param(128, marks=pytest.mark.slow), 300]
)
def test_any_number_of_slots(kernel, slots):
  """What a last tile has behind the last key counts nothing."""
  given = problem(slots, 1, used=1.0)
  if slots < 16 and isinstance(kernel, DecodeGPU):
    with pytest.raises(OptionError, match=f"{slots} keys a shard"):
      resident.run(*given, 1, local=kernel)
    return
  close(resident.run(*given, 1, local=kernel), truth(*given, 1))


@pytest.mark.parametrize(("shards", "sharded"), [(1, False), (4, True)])
def test_a_few_queries(kernel, shards, sharded):
  given = problem(96, 8)
  got = resident.run(
    *given, 1, shards, sharded=sharded, local=kernel, **OPTIONS["all"]
  )
  close(got, truth(*given, 1, **OPTIONS["all"]))


@pytest.mark.one_case
@pytest.mark.parametrize("heads", [1, 2])
def test_beside_axes_of_batch_and_heads(kernel, heads):
  resident.on_axes(
    heads,
    batch_axes=("data",),
    head_axes=("model",),
    local=kernel,
  )


def test_nothing_to_see_is_zero(kernel):
  q, k, v, q_at, (pos, seg) = problem(64, 1)
  got = resident.run(
    q, k, v, q_at, (pos, np.zeros_like(seg)), 0, 4, local=kernel
  )
  np.testing.assert_array_equal(got, np.zeros_like(got))


def test_what_is_not_seen_does_not_matter(kernel):
  """Bit for bit, even if it is no number."""
  q, k, v, q_at, k_at = problem(96, 1)
  run = lambda k, v: resident.run(q, k, v, q_at, k_at, 0, 4, local=kernel)
  want = run(k, v)
  hidden = (k_at[1] != 2)[None, :, None, :, None]
  k, v = (np.where(hidden, np.float32(np.nan), x) for x in (k, v))
  np.testing.assert_array_equal(run(k, v), want)


def call(queries=1, slots=80, dtype=jnp.float32, mask=None, cap=None):
  """The arguments of a visit."""
  q, k, v, q_at, k_at = problem(slots, queries, used=0.9)
  at = lambda pair: Coords(*(jnp.asarray(x, jnp.int32) for x in pair))
  half = lambda x: jnp.asarray(x, dtype)
  context = Context(at(q_at), at(k_at), mask or Causal() & SameSegment())
  return (
    half(q),
    ContiguousView(half(k), half(v), at(k_at), jnp.int32(1)),
    ScoreArgs(Scores(scale=0.25, soft_cap=cap), Terms(), context),
  )


def refuses(kernel, words, changes):
  """A call that a kernel declines with these words, and does not compute."""
  q, keys, args = call(dtype=changes.get("dtype", "bfloat16"))
  if "dim" in changes:
    q = jnp.zeros((*q.shape[:4], changes["dim"]), q.dtype)
  for name in {"scores", "terms"} & {*changes}:
    args = args._replace(**{name: changes[name]})
  kernel = changes.get("kernel", kernel)
  assert words in kernel.decline(q, keys, args)
  with pytest.raises(OptionError, match=words):
    kernel.decode(q, keys, args)


def decoded(decode, args):
  """One program of it, not one for each operation."""
  q, view, rest = args
  return jax.jit(lambda q, view: decode(q, view, rest))(q, view)


def same(ours, theirs, limit):
  for a, b in zip(ours, theirs, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    seen = np.isfinite(b)
    np.testing.assert_array_equal(np.isfinite(a), seen)
    far = np.linalg.norm(a[seen] - b[seen])
    assert far <= limit * np.linalg.norm(b[seen])


@pytest.mark.one_case
def test_the_partial_is_that_of_the_loops(kernel):
  args = call(3, dtype=jnp.bfloat16)
  same(decoded(kernel.decode, args), decoded(decode_attention, args), 1e-2)
  args = call(3)
  same(decoded(kernel.decode, args), decoded(decode_attention, args), 2e-6)


def test_zeros_behind_keys_and_values_count_nothing():
  """As caches on a TPU have them; the kernel reads them along."""
  kernel = DecodeTPU(16, interpret=True)
  q, keys, args = call(3)
  _, _, _, key, value = keys.shape
  wide = lambda x: jnp.pad(x, [(0, 0)] * 4 + [(0, 32 - x.shape[4])])
  filled = dataclasses.replace(
    keys, k=wide(keys.k), v=wide(keys.v), widths=(key, value)
  )
  assert filled.shape == keys.shape
  want = decoded(decode_attention, (q, keys, args))
  for decode in (kernel.decode, decode_attention):
    same(decoded(decode, (q, filled, args)), want, 2e-6)
  alone = [x.keys_alone() for x in (keys, filled)]
  want, got = (
    decoded(f, (q, x, args))
    for f, x in zip((decode_attention, kernel.decode), alone, strict=True)
  )
  same(got, want, 2e-6)


def test_a_prefix_of_each_example(kernel):
  """An array of the mask, of which each example has its own number."""
  q, keys, args = call(mask=Prefix(jnp.array([3, 60])))
  at = Coords(*(x * 0 + 2 for x in args.context.q))
  args = args._replace(context=args.context._replace(q=at))
  args = (q, keys, args)
  same(decoded(kernel.decode, args), decoded(decode_attention, args), 2e-6)


def test_keys_of_another_dtype(kernel):
  q, keys, args = call()
  keys = dataclasses.replace(
    keys, k=keys.k.astype("bfloat16"), v=keys.v.astype("bfloat16")
  )
  args = (q, keys, args)
  # The loops round weights to the values' dtype.
  same(decoded(kernel.decode, args), decoded(decode_attention, args), 1e-2)


def test_values_that_are_keys_are_one_operand(kernel):
  q, keys, args = call(dtype=jnp.bfloat16)
  keys = dataclasses.replace(keys, v=keys.k)
  both = (
    decoded(f, (q, keys, args)) for f in (kernel.decode, decode_attention)
  )
  same(*both, 1e-2)

  def operands(v):
    """Blocks of stored keys that the kernel is given."""
    run = lambda k: kernel.decode(
      q, dataclasses.replace(keys, k=k, v=v(k)), args
    )
    return str(jax.make_jaxpr(run)(keys.k)).count("bf16[3,2,2,80,16]")

  assert operands(lambda k: k) < operands(lambda k: k + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_they_stay_one_in_a_shard_map(kind):
  """Keys that are values too, as a latent cache has them."""
  q, keys, (scores, terms, context, _) = call()
  keys = dataclasses.replace(keys, v=keys.k)
  seen = []

  @dataclasses.dataclass(frozen=True)
  class Looks(kind):
    def decode(self, q, keys, args):
      seen.append(keys.v is keys.k)
      return super().decode(q, keys, args)

  mesh = resident.make_mesh(4, "auto")
  run = ShardedDecode(mesh=mesh, axis="seq", local=Looks(16, interpret=True))
  rest = ((keys,), terms, context.q, context.mask)
  got = jax.jit(lambda q: run(scores, q, *rest))(q)
  want = ShardedDecode(local=auto_kernel.Loops())(
    scores, q, (keys,), terms, context.q, context.mask
  )
  assert seen == [True]
  close(got, want)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_its_own_check(kind):
  assert (
    auto_kernel._compare_decodes(kind(128, interpret=True))
    < kernel_choice.ALLOWED_ERROR
  )


def test_a_broken_one_is_left_with_one_line(monkeypatch, caplog):
  @dataclasses.dataclass(frozen=True)
  class Cracked(DecodeTPU):
    interpret: bool = True

    def decode(self, *args):
      return super().decode(*args)._replace(l=jnp.full(args[0].shape[:4], 2.0))

  kernel_choice._fault.cache_clear()
  monkeypatch.setitem(auto_kernel.DECODERS, "cpu", (Cracked,))
  args = call(dtype=jnp.bfloat16)
  with caplog.at_level(logging.WARNING):
    results = [
      auto_kernel.AutoKernel(platform="cpu").decode(*args) for _ in range(2)
    ]
  kernel_choice._fault.cache_clear()
  (record,) = caplog.records
  assert "Cracked does not work" in record.message
  assert "off by" in record.message
  for found in results:
    same(found, decode_attention(*args), 1e-6)

"""A cache in the caller's hands: where calls go on, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  InputTypeError,
  OptionError,
  PromptError,
  RingjaxError,
  ShapeError,
)
from ringjax.kv.base import bytes_each
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from tests.helpers import SMALL, make_mesh

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model():
  return rj.models.create(SMALL, seed=1)


@pytest.fixture(scope="module")
def text(model):
  """Tokens [2, 16] and their logits, by one call without a cache."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, (2, 16)).astype(np.int32)
  return tokens, np.asarray(model(tokens))


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------------------
# Where a call goes on
# ---------------------------------------------------------------------------


def test_calls_go_on_behind_what_the_cache_holds(model, text):
  """By default: after a whole prompt, after a chunk, after a token."""
  tokens, want = text
  cache = model.init_cache(2, 16)
  got, at = [], 0
  for count, attend in ((8, ContextParallel()), (7, None), (1, None)):
    logits, cache = model(
      tokens[:, at : at + count], cache=cache, attend=attend
    )
    got.append(np.asarray(logits))
    at += count
    assert cache.length.tolist() == [at, at]
  close(np.concatenate(got, 1), want)


def test_traced_calls_go_on_too(model, text):
  tokens, want = text

  @jax.jit
  def both(tokens, cache):
    first, cache = model(tokens[:, :8], cache=cache)
    second, cache = model(tokens[:, 8:], cache=cache)
    return jnp.concatenate([first, second], 1), cache.length

  logits, length = both(tokens, model.init_cache(2, 16))
  close(logits, want)
  assert length.tolist() == [16, 16]


def test_each_example_goes_on_behind_its_own_last_token(model, text):
  tokens, want = text
  real = np.arange(8)[None] < np.array([[8], [5]])
  first = np.where(real, tokens[:, :8], 0)
  _, cache = model(
    first, segment_ids=real.astype(np.int32), cache=model.init_cache(2, 16)
  )
  assert cache.length.tolist() == [8, 5]
  after = np.stack([tokens[0, 8:12], tokens[1, 5:9]])
  logits, _ = model(after, cache=cache)
  close(logits[0], want[0, 8:12])
  close(logits[1], want[1, 5:9])


@pytest.mark.long
def test_a_sharded_cache_goes_on(text):
  tokens, want = text
  mesh = make_mesh(2, "auto")
  model = rj.models.create(SMALL, seed=1, mesh=mesh)
  one, chunk = (
    CachedAttention(mesh=mesh, axis="seq", replicated=s) for s in (True, False)
  )
  cache, got, at = model.init_cache(2, 18, sharding=one), [], 0
  for count, attend in ((3, one), (4, chunk), (8, chunk), (1, one)):
    logits, cache = model(
      tokens[:, at : at + count], cache=cache, attend=attend
    )
    got.append(np.asarray(logits))
    at += count
  close(np.concatenate(got, 1), want)
  # No slot stayed empty: there are two more.
  with pytest.raises(PromptError, match="3 more tokens .* 16 are taken"):
    model(tokens[:, :3], cache=cache, attend=one)
  with pytest.raises(PromptError, match="at most 2"):
    model(tokens[:, :4], cache=cache, attend=chunk)
  with pytest.raises(ShapeError, match="multiple of 2"):
    model(tokens[:, :3], cache=cache, attend=chunk)


def test_an_end_that_is_cut_off_can_be_said_anew(model, text):
  """`truncate`: what was wrong is forgotten, its slots are free."""
  tokens, want = text
  _, cache = model(tokens[:, :8], cache=model.init_cache(2, 16))
  wrong = np.full((2, 6), 3, np.int32)
  _, cache = model(wrong, cache=cache)
  cache = cache.truncate(8)
  logits, _ = model(tokens[:, 8:], cache=cache)
  close(logits, want[:, 8:])


def test_several_go_on_from_one_prefix(model, text):
  """`take`: an example, as often as it is named."""
  tokens, want = text
  _, cache = model(tokens[:, :8], cache=model.init_cache(2, 16))
  cache = cache.take(jnp.array([1, 0, 1]))
  assert cache.length.tolist() == [8, 8, 8]
  logits, _ = model(tokens[[1, 0, 1], 8:], cache=cache)
  close(logits, want[[1, 0, 1], 8:])


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------


def refuses(kind, says, f):
  with pytest.raises(kind, match=says) as caught:
    f()
  assert isinstance(caught.value, RingjaxError)
  text = str(caught.value)
  assert len(text) < 400 and "\n" not in text


def test_a_cache_that_is_full(model, text):
  tokens, _ = text
  _, cache = model(tokens[:, :12], cache=model.init_cache(2, 16))
  kept = np.asarray(cache.slots[0].k)
  refuses(
    PromptError,
    "8 more tokens for a cache of 16 slots, of which 12 are taken; wanted at "
    "most 4",
    lambda: model(tokens[:, :8], cache=cache),
  )
  np.testing.assert_array_equal(cache.slots[0].k, kept)
  # The last slot can be filled.
  _, cache = model(tokens[:, 12:], cache=cache)
  assert cache.length.tolist() == [16, 16]
  refuses(PromptError, "at most 0", lambda: model(tokens[:, :1], cache=cache))


def test_shapes_that_no_cache_can_take(model, text):
  """Also where a cache is traced."""
  tokens, _ = text
  small, other = model.init_cache(2, 8), model.init_cache(3, 16)
  traced = jax.jit(lambda cache: model(tokens, cache=cache)[0])
  for call in (lambda cache: model(tokens, cache=cache), traced):
    refuses(PromptError, "16 more tokens", lambda call=call: call(small))
    refuses(ShapeError, "2 example.* of 3", lambda call=call: call(other))


def test_old_keys_that_would_not_be_seen(model, text):
  tokens, _ = text
  _, cache = model(tokens[:, :8], cache=model.init_cache(2, 16))
  refuses(
    OptionError,
    r"ContextParallel\(\) after 8 tokens",
    lambda: model(tokens[:, 8:], cache=cache, attend=ContextParallel()),
  )


def test_a_cache_that_was_given_away(unchecked, model, text):
  tokens, _ = text
  cache = model.init_cache(2, 16)
  for x in jax.tree.leaves(cache):
    x.delete()
  refuses(OptionError, "were donated", lambda: model(tokens, cache=cache))


def test_what_is_no_cache(unchecked, model, text):
  tokens, _ = text
  session = rj.infer.Session(model, 16, batch=2)
  refuses(
    InputTypeError,
    r"got Session.*session\.cache",
    lambda: model(tokens, cache=session),
  )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", ["int8", "foo", jnp.int32, bool, 3])
def test_dtypes_that_no_keys_have(model, dtype):
  says = "bfloat16, float16, float32, float64"
  refuses(OptionError, says, lambda: model.init_cache(1, 8, dtype=dtype))
  refuses(OptionError, says, lambda: rj.infer.Session(model, 8, dtype=dtype))
  ask = lambda: rj.infer.generate(
    model, [[1]], max_new_tokens=1, cache_dtype=dtype
  )
  refuses(OptionError, f"cache_dtype: .*{says}", ask)


@pytest.mark.usefixtures("unchecked")
def test_a_dtype_that_is_switched_off(model):
  refuses(
    OptionError, "64-bit", lambda: model.init_cache(1, 8, dtype=jnp.float64)
  )


# ---------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------


def test_a_spec_is_the_cache_without_its_arrays(model):
  sharding = ShardingContext(mesh=make_mesh(2, "auto"), axis="seq")
  for options in ({}, dict(sharding=sharding), dict(dtype="bfloat16")):
    spec = model.init_cache_spec(2, 16, **options)
    cache = model.init_cache(2, 16, **options)
    made = (cache.slots, cache.held)
    for x, y in zip(jax.tree.leaves(spec), jax.tree.leaves(made), strict=True):
      assert (x.shape, x.dtype) == (y.shape, y.dtype)
      assert x.sharding is None or x.sharding == y.sharding
    assert bytes_each(spec) == bytes_each(made)

"""Codecs: bytes of vectors, and how far the numbers are that they stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, ShapeError
from ringjax.kv import ChannelGroups, CodeBook, Floats, Hadamard, Integers
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache import KVCache
from ringjax.kv.codecs import code_bytes
from ringjax.kv.codecs.hadamard import gaussian_levels, transform
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.ops.attention.cached.code_format import packed_bytes
from ringjax.ops.attention.cached.views import (
  Decoder,
  EncodedView,
  decode_attention,
)
from ringjax.ops.attention.reference import reference
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, SameSegment
from ringjax.ops.softmax import finalize
from tests.contracts import cache as contract

DIMS = (8, 20, 80, 128)
# The root of the mean squared error of normal numbers, at most.
ERRORS = {
  Integers(bits=8): 0.008,
  Integers(bits=4): 0.1,
  Integers(bits=3): 0.21,
  Integers(bits=2, group=32): 0.42,
  Floats(format="e4m3"): 0.028,
  Floats(format="e5m2"): 0.056,
  Floats(format="bfloat16"): 0.002,
  Hadamard(bits=4): 0.1,
  Hadamard(bits=3): 0.19,
  Hadamard(bits=2): 0.35,
}


# One program for each codec and shape, not one for each operation.
encode = jax.jit(lambda codec, x, given=(): codec.encode(x, given),
                 static_argnums=0)  # fmt: skip
decode = jax.jit(
  lambda codec, data, dim, dtype, given=(): codec.decode(
    data, dim, dtype, given
  ),
  static_argnums=(0, 2, 3),
)


def draw(*shape):
  return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def constants(codec, dim, heads=2):
  """As a calibration would find them for normal numbers."""
  levels = np.asarray(gaussian_levels(codec.bits), np.float32)
  scaled = np.tile(levels / 3, (heads, 1))
  if codec.by == "token":
    return (scaled,)
  scale, zero = np.full((heads, dim), 3, np.float32), np.zeros((heads, dim))
  if not codec.sinks:
    return scale, zero, scaled
  sink, factor = np.full((heads, dim), 20.0), np.full((heads, 1), 0.1)
  return scale, zero, sink, factor, scaled


@pytest.mark.parametrize("count", [1, 7, 8, 20, 128])
@pytest.mark.parametrize("bits", code_bytes.BITS)
def test_codes_come_back_from_their_bytes(bits, count):
  codes = np.random.default_rng(0).integers(0, 2**bits, (3, count))
  codes = jnp.asarray(codes, jnp.uint8)
  data = jax.jit(lambda codes: code_bytes.pack(codes, bits))(codes)
  assert data.dtype == jnp.uint8
  assert data.shape == (3, packed_bytes(count, bits))
  back = jax.jit(lambda data: code_bytes.unpack(data, bits, count))(data)
  np.testing.assert_array_equal(back, codes)


@pytest.mark.one_case
@pytest.mark.long_cases(40)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codec", ERRORS, ids=repr)
def test_decoded_numbers_are_near(codec, dim):
  x = draw(2, 2, 40, dim)
  data = encode(codec, x)
  assert data.dtype == jnp.uint8 and data.shape[-1] == codec.width(dim)
  assert sum(codec.byte_parts(dim).values()) == codec.width(dim)
  back = np.asarray(decode(codec, data, dim, jnp.float32))
  assert np.sqrt(np.mean((back - x) ** 2)) < ERRORS[codec]
  half = jax.eval_shape(lambda x: codec.decode(x, dim, jnp.bfloat16), data)
  assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("by", ["channel", "token"])
@pytest.mark.parametrize(("bits", "most"), [(4, 0.15), (3, 0.25), (2, 0.45)])
def test_code_books(bits, most, by):
  codec = CodeBook(bits=bits, by=by)
  x = draw(2, 2, 40, 128)
  x[0, 0, 0, 5] = 1000.0
  given = constants(codec, 128)
  data = encode(codec, x, given)
  assert data.shape[-1] == codec.width(128)
  back = np.asarray(decode(codec, data, 128, jnp.float32, given))
  # The number that is farthest out is exact, and costs others nothing.
  assert back[0, 0, 0, 5] == 1000.0
  assert np.sqrt(np.mean((back - x) ** 2)) < most


@pytest.mark.parametrize(
  "by", [pytest.param("channel", marks=pytest.mark.long), "token"]
)
def test_outliers_of_a_page_are_in_any_of_its_vectors(by):
  """All that are far out of one vector are exact, at no more bytes."""
  codec, x = CodeBook(by=by, outliers="1%"), draw(1, 2, 96, 64)
  x = np.clip(x, -2, 2)
  # In head 1 and page 1; and all of a vector in page 2, more than there is
  # room for: the farthest stay. A vector's own scale is that of most numbers.
  some = np.arange(64) % (3 if by == "channel" else 20) == 0
  x[0, 1, 40, some] += np.where(x[0, 1, 40, some] > 0, 20, -20)
  x[0, 1, 70] += np.linspace(30, 60, 64)
  given = constants(codec, 64)
  data = encode(codec, x, given)
  assert data.shape[-1] == codec.width(64) == CodeBook(by=by).width(64)
  back = np.asarray(decode(codec, data, 64, jnp.float32, given))
  exact = back == x.astype(np.float16)
  count = codec.paged.count(64)
  assert count >= 1.25 * 0.01 * 32 * 64
  pages = exact.reshape(2, 3, -1).sum(-1)
  assert (pages >= count).all() and pages.max() <= count + 4
  assert exact[0, 1, 40, some].all()
  assert np.abs(back - x)[0, 1, 40].max() < 1
  if by == "channel":
    kept = np.flatnonzero(exact[0, 1, 70])
    assert kept.min() > 64 - count - 4 and 63 in kept
  # Bytes of a page are those of its numbers alone.
  x[0, 1, 70] *= 2
  same = np.array(encode(codec, x, given) == data)
  assert not same[0, 1, 64:].all()
  same[0, 1, 64:] = True
  assert same.all()
  with pytest.raises(ShapeError, match="groups of 32"):
    codec.encode(jnp.asarray(x[:, :, :40]), given)


@pytest.mark.parametrize(
  "outliers", [0.01, pytest.param("1%", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_keys_near_the_sink_have_finer_codes(bits, outliers):
  """Without outliers there is no place to say which keys are near it."""
  codec, x = CodeBook(bits=bits, outliers=outliers), draw(2, 2, 64, 128)
  given = constants(codec, 128)
  x[:, :, ::3] = 20 + x[:, :, ::3] / 10
  data = encode(codec, x, given)
  off = np.asarray(decode(codec, data, 128, jnp.float32, given)) - x
  rms = lambda x: np.sqrt(np.mean(np.square(x)))
  near, others = rms(off[:, :, ::3]), rms(off[:, :, 1::3])
  assert near < others / 6
  bare = CodeBook(bits=bits, outliers=0)
  given = constants(bare, 128)
  data = encode(bare, x, given)
  off = np.asarray(decode(bare, data, 128, jnp.float32, given)) - x
  assert rms(off[:, :, ::3]) > 10


@pytest.mark.parametrize("by", ["channel", "token"])
def test_equal_outliers_do_not_depend_on_the_last_bit(by):
  """A token may have the extremes of two channels, up to rounding."""
  codec = CodeBook(by=by)
  x = np.clip(draw(1, 2, 5, 32), -2, 2)
  x[..., 7], x[..., 20] = 3, -3
  scales = constants(codec, 32)
  want = codec.encode(jnp.asarray(x), scales)
  for channel in (7, 20):
    near = x.copy()
    near[..., channel] = np.nextafter(near[..., channel], 0)
    assert jnp.array_equal(codec.encode(jnp.asarray(near), scales), want)


@pytest.mark.parametrize(
  "codec", [*ERRORS, CodeBook(by="token"), CodeBook(by="channel")], ids=repr
)
def test_token_by_token_is_all_at_once(codec):
  x = draw(2, 2, 6, 32)
  given = constants(codec, 32) if isinstance(codec, CodeBook) else ()
  whole = encode(codec, x, given)
  parts = [encode(codec, x[:, :, n : n + 1], given) for n in range(6)]
  np.testing.assert_array_equal(whole, np.concatenate(parts, 2))


@pytest.mark.parametrize("codec", ERRORS, ids=repr)
def test_zeros_and_large_numbers(codec):
  for value in (0.0, 3e4, -1e-6):
    x = np.full((1, 1, 2, 32), value, np.float32)
    back = np.asarray(decode(codec, encode(codec, x), 32, jnp.float32))
    far = float(np.sqrt(np.mean(np.square(back - x))))
    assert far < 0.4 * abs(value) + 1e-6


@pytest.mark.parametrize("bits", [2, 8])
def test_the_least_and_the_largest_number_are_codes(bits):
  """Numbers a step apart, as many as there are codes, come back exactly."""
  codec, count = Integers(bits=bits, group=256), 2**bits
  x = np.arange(count, dtype=np.float32)[None, None, None] - 1
  back = decode(codec, encode(codec, x), count, jnp.float32)
  np.testing.assert_array_equal(back, x)


def test_bytes_are_those_of_the_formula():
  # Codes, and per group or vector their scales; an index and a number each.
  assert Integers(bits=4, group=64).width(128) == 64 + 2 * 4
  assert Hadamard(bits=3).width(128) == 48 + 2
  assert Floats(format="e4m3").width(128) == 128 + 2
  assert CodeBook(bits=3, by="channel").width(128) == 48 + 3
  assert CodeBook(bits=3, by="token").width(128) == 48 + 4 + 3
  assert CodeBook(bits=3, by="token", outliers=0).width(128) == 48 + 4
  assert CodeBook(bits=2, outliers=0.02).width(512) == 128 + 10 * 4
  # 52 outliers of 32 x 128 numbers, 17 blocks of 255 and 32 bits.
  assert CodeBook(bits=3, outliers="1%").width(128) == 48 + 6
  assert CodeBook(bits=3, outliers="1%", by="token").width(128) == 48 + 4 + 6
  assert CodeBook(bits=3, outliers="0.5%", group=128).width(64) == 24 + 2


@pytest.mark.parametrize("dim", [20, 128])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 32), (3, 8)])
def test_groups_of_tokens_have_a_scale_in_each_channel(bits, group, dim):
  """Off by half a step of the channel at most; a large channel costs none."""
  codec = ChannelGroups(bits=bits, group=group)
  x = draw(2, 2, 3 * group, dim) + 5
  x[..., 3] *= 1000
  data = encode(codec, x)
  assert data.dtype == jnp.uint8 and data.shape[-1] == codec.width(dim)
  back = np.asarray(decode(codec, data, dim, jnp.float32))
  cut = lambda x: x.reshape(2, 2, 3, group, dim)
  step = (cut(x).max(-2) - cut(x).min(-2)) / (2**bits - 1)
  rounding = 2.0**-10 * np.abs(cut(x)).max(-2)
  off = np.abs(cut(back - x)).max(-2)
  assert (off <= step / 2 + rounding).all() and (off > step / 8).any()
  # One group after another is all at once, whatever the heads.
  parts = [
    encode(codec, x[:, :1, n * group : (n + 1) * group]) for n in range(3)
  ]
  np.testing.assert_array_equal(data[:, :1], np.concatenate(parts, 2))
  # Of a group: codes, and a scale and a zero of 16 bits in each channel.
  formula = group * (-(-dim // 8) * 8) * bits / 8 + 4 * dim
  assert 0 <= group * codec.width(dim) - formula < group
  if dim == 128:
    assert group * codec.width(dim) == formula


@pytest.mark.usefixtures("unchecked")
def test_a_part_of_a_group_is_not_encoded():
  with pytest.raises(ShapeError, match="40 tokens.*groups of 32"):
    ChannelGroups().encode(jnp.zeros((1, 1, 40, 8)))
  with pytest.raises(ShapeError, match="groups of 32"):
    ChannelGroups().decode(jnp.zeros((1, 1, 8, 9), jnp.uint8), 8, jnp.float32)


@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_keeps_lengths_and_has_an_inverse(dim):
  x = draw(1, 1, 5, dim)
  there, back = jax.jit(
    lambda x: (transform(x), transform(transform(x), back=True))
  )(x)
  np.testing.assert_allclose(
    np.linalg.norm(there, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
  )
  np.testing.assert_allclose(back, x, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("make", "says"),
  [
    (lambda: Integers(bits=5), "bits"),
    (lambda: Integers(group=0), "group"),
    (lambda: Floats(format="e3m4"), "format"),
    (lambda: Hadamard(bits=8), "bits"),
    (lambda: CodeBook(outliers=0.7), "outliers"),
    (lambda: CodeBook(outliers="0%"), "outliers=1%"),
    (lambda: CodeBook(outliers="51%"), "outliers=1%"),
    (lambda: CodeBook(outliers="1"), "outliers=1%"),
    (lambda: CodeBook(group=64), "a page of so many tokens"),
    (lambda: CodeBook(by="head"), "by"),
    (lambda: rj.kv.CacheConfig(codec=rj.kv.Calibrated()), "unrotated=True"),
    (lambda: rj.kv.CacheConfig(codec="int4"), "an rj.kv.Codec, or None"),
  ],
)
def test_wrong_options(make, says):
  with pytest.raises(OptionError, match=says):
    make()


BOOKS = [CodeBook(bits=n, by=by) for n in (4, 3, 2)
         for by in ("token", "channel")]  # fmt: skip
BOOKS.insert(0, CodeBook(bits=3, outliers="1%"))


EVERY = [*ERRORS, *BOOKS, ChannelGroups(bits=4), ChannelGroups(bits=2)]
# One of each class.
QUICK = {type(x): x for x in EVERY}.values()


@pytest.mark.one_case
@pytest.mark.parametrize(
  "codec",
  [pytest.param(x, marks=() if x in QUICK else pytest.mark.long)
   for x in EVERY],
  ids=repr,
)  # fmt: skip
def test_attention_over_codes_is_that_over_their_numbers(codec):
  """Some slots are empty, and the keys' coordinates are in any order."""
  batch, heads, groups, slots, dim = 2, 2, 3, 96, 32
  r = np.random.default_rng(5)
  x = [draw(batch, heads, slots, dim) + n for n in range(2)]
  given = constants(codec, dim) if isinstance(codec, CodeBook) else ()
  given = tuple(jnp.asarray(c, jnp.float32) for c in given)
  data = [encode(codec, one, given) for one in x]
  pos = np.stack([r.permutation(slots) for _ in range(batch)]).astype(np.int32)
  at = Coords(jnp.asarray(pos), jnp.asarray((pos < 80).astype(np.int32)))
  view = EncodedView(
    data[0][None], data[1][None], at, jnp.int32(0), (given, given),
    (Decoder(codec, dim, jnp.float32),) * 2,
  )  # fmt: skip
  q = np.float32(r.normal(size=(batch, heads, groups, 2, dim)))
  q_at = Coords(*(jnp.full((batch, 2), n, jnp.int32) for n in (79, 1)))
  mask = Causal() & SameSegment()
  args = ScoreArgs(Scores(scale=dim**-0.5), Terms(), Context(q_at, at, mask))

  @jax.jit
  def over_codes(q):
    aligned = view.aligned(q)
    out, lse = finalize(decode_attention(aligned.q, aligned.view, args))
    return aligned.back(out), lse

  got, lse = over_codes(q)
  k, v = (
    np.swapaxes(decode(codec, one, dim, jnp.float32, given), 1, 2)
    for one in data
  )
  queries = np.transpose(q, (0, 3, 1, 2, 4)).reshape(batch, 2, -1, dim)
  numbers = jax.jit(lambda q, k, v: reference(q, k, v, mask, q_at, at))
  want, norm = map(np.asarray, numbers(queries, k, v))
  back = lambda x: np.moveaxis(x.reshape(batch, 2, heads, groups, -1), 1, 3)
  np.testing.assert_allclose(got, back(want), atol=1e-5, rtol=1e-5)
  np.testing.assert_allclose(lse, back(norm)[..., 0], atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
  "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)]
)
def test_two_bytes_a_number_are_those_of_a_cache_in_bfloat16(dtype):
  """Bit for bit, while a prompt is read and token by token behind it."""
  model = contract.model(1, "grouped", dtype)
  tokens = contract.text("grouped")[0]
  found = []
  for kind in ("dense", "bfloat16"):
    cache = model.init_cache(tokens.shape[0], 32, dtype="bfloat16", kind=kind)
    calls = [tokens[:, :9], *(tokens[:, n : n + 1] for n in range(9, 12))]
    for call in calls:
      logits, cache = model(call, cache=cache)
      found.append(logits)
  for want, got in zip(found[:4], found[4:], strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_tokens_are_last_on_a_tpu(monkeypatch):
  """TPUs fill up the last axis to 128, and the one before to 8."""
  shape = LayerCacheSpec(layers=2, heads=4, key=128, value=64)
  codec = rj.kv.Codec(keys=Hadamard(bits=3), values=Integers(bits=4))
  kind = rj.kv.CacheConfig(codec=codec, page=8, room=8)
  specs = lambda: KVCache.spec((shape,), 3, 256, jnp.bfloat16, kind=kind).slots
  (slots,) = specs()
  assert slots.k.shape == (2, 3, 4, 256, codec.keys.width(128))
  assert slots.k.dtype == jnp.uint8
  model = contract.model(1, "grouped")
  tokens = contract.text("grouped")[0]
  policy = kind.replace(policy=rj.kv.SnapKV(window=4))
  ask = lambda kind: rj.infer.generate(
    model, tokens, max_new_tokens=12, cache_kind=kind
  ).tokens.tolist()
  want = ask(kind), ask(policy)
  monkeypatch.setattr(CacheSpec, "platform", "tpu")
  (slots,) = specs()
  assert slots.k.shape == (2, 3, 4, 56, 256) and slots.k.dtype == jnp.int8
  assert slots.v.shape == (2, 3, 4, 40, 256)
  assert (ask(kind), ask(policy)) == want

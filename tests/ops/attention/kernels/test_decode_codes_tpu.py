"""The kernel that reads codes of a cache, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.kv import CodeBook, Floats, Hadamard, Integers
from ringjax.ops import kernel_choice
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.code_format import (
  as_stored,
  parts,
  stored_codes,
)
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  UnrotatedView,
  decode_attention,
)
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.attention.kernels.decode_codes_tpu import (
  DecodeCodesTPU,
  arrangement,
)
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.rotated_codes import cos_sin
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, SameSegment, Window
from ringjax.ops.rope import LongRope, Rope, Rotation, Yarn
from ringjax.ops.turns import Frequencies
from tests.helpers import make_mesh
from tests.kv.test_codecs import encode
from tests.ops.attention.kernels.test_decode import decoded, same

B, K, G, H, J = 2, 2, 2, 64, 128
KERNEL = DecodeCodesTPU(128, interpret=True)
CODECS = (
  Integers(bits=4),
  Integers(bits=8),
  Integers(bits=2, group=32),
  Integers(bits=3),
  Integers(bits=4, group=32),
  Hadamard(bits=4),
  Hadamard(bits=3),
  Hadamard(bits=2),
  CodeBook(bits=4, by="token"),
  CodeBook(bits=3, by="token", outliers=0.03),
  CodeBook(bits=2, by="token", outliers=0),
)
# One of each form on every commit; the others are of the longer run.
QUICK = (0, 1, 5, 9)


def constants(codec, seed, dim=H):
  """Each head's levels, all others; those of channels and the sink first."""
  if not isinstance(codec, CodeBook):
    return ()
  r = np.random.default_rng(seed)
  levels = np.sort(r.normal(size=(K, 2**codec.bits)), 1) / 2
  found = [levels]
  if codec.by == "channel":
    scale, zero = r.uniform(0.2, 2, (K, dim)), r.normal(size=(K, dim))
    found = [scale, zero, levels]
    if codec.sinks:
      sink = zero + scale * 4 * r.choice((-1, 1), (K, dim))
      found[2:2] = [sink, r.uniform(0.1, 0.5, (K, 1))]
  return tuple(jnp.asarray(x, jnp.float32) for x in found)


def call(of_k, of_v=None, *, dtype=jnp.float32, slots=300, queries=2, mask=None,
         terms=None, cap=None, spoil=None, rotation=None, start=0):  # fmt: skip
  """The arguments of a decode, in the basis of the codecs."""
  of_v = of_k if of_v is None else of_v
  r = np.random.default_rng(0)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)
  q = jnp.asarray(2 * draw(B, K, G, queries, H), dtype)
  length = np.array([[int(0.8 * slots)], [int(0.7 * slots)]])
  pos = np.stack([r.permutation(slots) for _ in range(B)])
  seg = np.where(pos < length, 1 + (pos > length // 3), 0)

  def encoded(codec, dim, seed):
    x = draw(2, B, K, slots, dim)
    given = constants(codec, seed, dim)
    if len(given) > 1:
      scale, zero = (np.asarray(c)[:, None] for c in given[:2])
      far = x * scale + zero
      if of_k.sinks:
        sink, factor = (np.asarray(c)[:, None] for c in given[2:4])
        far[:, :, :, ::7] = (x * scale * factor + sink)[:, :, :, ::7]
      x = far
    if spoil is not None:
      x = np.where(spoil(pos, seg)[None, :, None, :, None], np.nan, x)
    codes = jnp.stack([encode(codec, one.astype(dtype), given) for one in x])
    lead, width = codes.shape[:3], codes.shape[4]
    like = stored_codes(lead, slots, width, "tpu")
    return as_stored(codes, jnp.zeros(*like)), given

  (k, of_keys), (v, of_values) = encoded(of_k, H, 1), encoded(of_v, J, 2)
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  q_pos = length - queries + np.arange(queries)
  view = EncodedView(
    k,
    v,
    coords(start + pos, seg),
    jnp.int32(1),
    (of_keys, of_values),
    (Decoder(of_k, H, dtype), Decoder(of_v, J, dtype)),
  )
  if rotation is not None:
    view = UnrotatedView(view, rotation)
  view, q, *_ = view.aligned(q)
  context = Context(
    coords(start + q_pos, np.full((B, queries), 2)),
    view.at,
    mask or Causal() & SameSegment(),
  )
  scores = Scores(scale=H**-0.5, soft_cap=cap)
  return q, view, ScoreArgs(scores, terms or Terms(), context)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "codec",
  [
    pytest.param(x, marks=() if n in QUICK else pytest.mark.long)
    for n, x in enumerate(CODECS)
  ],
  ids=repr,
)
def test_it_equals_the_loops(codec):
  args = call(codec)
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 3e-6)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "codec",
  [
    pytest.param(x, marks=() if n in QUICK else pytest.mark.slow)
    for n, x in enumerate(CODECS)
  ],
  ids=repr,
)
def test_half_precision(codec):
  """Weights and levels are rounded elsewhere than in the loops."""
  args = call(codec, dtype=jnp.bfloat16)
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 2e-2)


YARN = Yarn(factor=4.0, original=64)
LONG = LongRope(short=(1.0,) * 8, long=(2.0,) * 8, original=200, factor=4.0)
ROTATIONS = {
  "halves": Rotation(rope=Rope(theta=1e4, dims=H)),
  "pairs": Rotation(rope=Rope(theta=1e4, dims=H, interleaved=True)),
  "some dims": Rotation(rope=Rope(theta=1e4, dims=20, scaling=YARN), first=3),
  "length": Rotation(
    rope=Rope(theta=1e4, dims=16, scaling=LONG), length=jnp.int32(300)
  ),
  "none": None,
}


def by_channel(bits, outliers=0.02, **options):
  return call(
    CodeBook(bits=bits, outliers=outliers),
    CodeBook(bits=bits, outliers=outliers, by="token"),
    **options,
  )


@pytest.mark.long
@pytest.mark.parametrize(
  ("bits", "outliers", "name", "start"),
  [
    (3, 0.02, "halves", 2**31 - 301),
    *(
      pytest.param(*x, marks=pytest.mark.long)
      for x in [
        (4, 0.03, "some dims", 131_072),
        (2, 0, "pairs", 10**7),
        (4, 0, "halves", 0),
        (3, 0.02, "length", 2**30),
        (3, 0.02, "none", 0),
      ]
    ),
  ],
)
def test_keys_are_rotated_where_they_are_read(bits, outliers, name, start):
  """As the loops rotate them, and as they do near to the first token."""
  args = by_channel(bits, outliers, rotation=ROTATIONS[name], start=start)
  near = by_channel(bits, outliers, rotation=ROTATIONS[name])
  got = decoded(KERNEL.decode, args)
  same(got, decoded(decode_attention, args), 3e-6)
  same(got, decoded(decode_attention, near), 1e-5)


@pytest.mark.long
def test_rotated_keys_beside_other_values():
  """Groups of values are copies of the queries; heads are in one tile."""
  kernel = dataclasses.replace(KERNEL, chip="tpu-v5e")
  args = call(
    CodeBook(bits=4), Integers(bits=4, group=32), rotation=ROTATIONS["pairs"],
    slots=700, queries=5, mask=Causal() & Window(150), cap=3.0,
  )  # fmt: skip
  assert kernel.tile(*args[:2])[0] == K
  same(decoded(kernel.decode, args), decoded(decode_attention, args), 3e-6)


@pytest.mark.long
def test_rotated_keys_in_half_precision():
  args = by_channel(3, rotation=ROTATIONS["halves"], dtype=jnp.bfloat16)
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 2e-2)


def test_cosines_at_any_position():
  """Against angles of float64 from fractions of a turn that are exact."""
  r = np.random.default_rng(0)
  pos = r.integers(-(2**31), 2**31, (1, 1000), dtype=np.int64)
  radians = np.array([1.0, 0.7, 1e-3, 2e-9])
  turn = Fraction("3.14159265358979323846264338327950288") * 2
  exact = np.array(
    [[float(Fraction(f) * int(p) % turn) for p in pos[0]] for f in radians]
  )
  frequencies = Frequencies.of(radians).rearranged(lambda x: x[:, None])
  for dtype, far in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-3)):
    both = cos_sin(frequencies, jnp.asarray(pos, jnp.int32), dtype)
    for got, want in zip(both, (np.cos, np.sin), strict=True):
      np.testing.assert_allclose(got, want(exact), atol=far)


SLOPES = jnp.array([[0.3, 0.1], [0.02, 0.5]])
OPTIONS = {
  "window": dict(mask=Causal() & SameSegment() & Window(40)),
  "cap": dict(cap=2.0),
  "alibi": dict(terms=Terms(slopes=SLOPES)),
  "all": dict(
    mask=Causal() & Window(150), cap=3.0, terms=Terms(slopes=SLOPES), queries=5
  ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", OPTIONS)
def test_masks_and_scores(name):
  args = call(Integers(bits=4), **OPTIONS[name])
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 3e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("slots", [1, 21, 128, 700])
def test_any_number_of_slots(slots):
  args = call(Hadamard(bits=3), slots=slots, queries=1)
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 3e-6)


@pytest.mark.long
def test_keys_and_values_have_codecs_of_their_own():
  for pair in (
    (Integers(bits=8), Integers(bits=2, group=32)),
    (Hadamard(bits=4), Integers(bits=4)),
    (Integers(bits=2, group=16), Hadamard(bits=2)),
  ):
    args = call(*pair)
    same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 3e-6)


def test_values_that_are_keys():
  q, view, args = call(Integers(bits=4))
  view = view.keys_alone()
  run = lambda decode: jax.jit(lambda q: decode(q, view, args))(q)
  same(run(KERNEL.decode), run(decode_attention), 3e-6)


@pytest.mark.long
def test_several_heads_a_tile():
  """On chips of one core."""
  kernel = dataclasses.replace(KERNEL, chip="tpu-v5e")
  args = call(CODECS[9])
  assert kernel.tile(*args[:2])[0] == K and KERNEL.tile(*args[:2])[0] == 1
  same(decoded(kernel.decode, args), decoded(decode_attention, args), 3e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("n", [0, 7, 8])
def test_what_is_not_seen_does_not_matter(n):
  """Bit for bit, even if it is no number; what is seen reaches its queries."""
  codec = CODECS[n]
  want = decoded(KERNEL.decode, call(codec))
  got = decoded(KERNEL.decode, call(codec, spoil=lambda pos, seg: seg != 2))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
  got = decoded(KERNEL.decode, call(codec, spoil=lambda pos, seg: pos == 200))
  # Integers between numbers that are none are the largest of float16.
  assert np.isnan(got.acc).all() or n == 0


@pytest.mark.long
def test_small_and_large_scales():
  """float16 below its smallest normal number, and its largest."""
  for size in (1e-4, 3e4):
    q, view, args = call(Integers(bits=8))
    codec = Integers(bits=8)
    x = jnp.asarray(
      size * np.random.default_rng(1).normal(size=(2, B, K, 300, J)),
      jnp.float32,
    )
    codes = jnp.stack([encode(codec, jnp.clip(a, -6e4, 6e4)) for a in x])
    v = as_stored(codes, view.v)
    args = (q, dataclasses.replace(view, v=v), args)
    same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 3e-6)


def test_shards_merge():
  q, view, args = call(Integers(bits=4), slots=512)
  scores, terms, (q_at, _, mask, *_), _ = args
  run = lambda **how: jax.jit(
    lambda q: ShardedDecode(**how)(scores, q, (view,), terms, q_at, mask)
  )(q)
  got = run(mesh=make_mesh(4, "auto"), axis="seq", local=KERNEL)
  np.testing.assert_allclose(got, run(local=auto_kernel.Loops()), atol=1e-5)


def test_rows_of_a_tile_are_the_numbers():
  for form in (
    Integers(bits=3).code_format(64),
    Hadamard(bits=3).code_format(128),
  ):
    dims = arrangement(form).dims
    many = arrangement(form).rows_per_element
    assert sorted(dims) == sorted([*range(form.dim)] * many)
  assert [part.width for part in parts(128, 3)] == [32, 16]


DECLINED = {
  "it reads EncodedView": dict(contiguous=True),
  "keys before their rotation": dict(rotation=ROTATIONS["halves"]),
  "a norm after their rotation": dict(
    keys=CodeBook(),
    rotation=dataclasses.replace(ROTATIONS["halves"], after=jax.nn.standardize),
  ),
  "it decodes integers and levels": dict(codec=Floats()),
  "scales of channels": dict(codec=CodeBook(by="channel")),
  "no multiples of 64": dict(dim=48),
  "float16": dict(dtype=jnp.float16),
  "dropout": dict(scores=Scores(scale=1.0, dropout_rate=0.1)),
  "a bias": dict(terms=Terms(bias=jnp.zeros((1, 1, 1, 1, 300)))),
  "multiples of 128": dict(kernel=DecodeCodesTPU(24)),
}


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  changes = DECLINED[words]
  q, view, args = call(Integers(bits=4))
  kernel = changes.get("kernel", KERNEL)
  if "contiguous" in changes:
    view = ContiguousView(view.k, view.k, view.at, view.layer)
  if "keys" in changes:
    decoder = view.decoders[0]._replace(codec=changes["keys"])
    view = dataclasses.replace(view, decoders=(decoder, view.decoders[1]))
  if "rotation" in changes:
    view = UnrotatedView(view, changes["rotation"])
  if "codec" in changes:
    decoder = view.decoders[0]._replace(codec=changes["codec"])
    view = dataclasses.replace(view, decoders=(decoder, decoder))
  if "dim" in changes:
    decoder = view.decoders[0]._replace(dim=changes["dim"])
    view = dataclasses.replace(view, decoders=(decoder, decoder))
  if "dtype" in changes:
    q = q.astype(changes["dtype"])
  for name in {"scores", "terms"} & {*changes}:
    args = args._replace(**{name: changes[name]})
  assert words in kernel.decline(q, view, args)
  with pytest.raises(OptionError, match=words):
    kernel.decode(q, view, args)


def test_who_reads_codes():
  kernel_choice._fault.cache_clear()
  args = call(Integers(bits=4), dtype=jnp.bfloat16)
  ours = auto_kernel.AutoKernel(platform="tpu", chip="tpu-v5e")
  found = ours.choose_decode(*args)
  assert found.algorithm == DecodeCodesTPU(chip="tpu-v5e")
  assert [name for name, _ in found.declined] == [DecodeTPU.__name__]


def test_it_passes_its_own_check():
  assert auto_kernel._compare_decodes(KERNEL) < kernel_choice.ALLOWED_ERROR

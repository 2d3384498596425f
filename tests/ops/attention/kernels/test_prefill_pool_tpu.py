"""The kernel that reads pages for many queries, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.kv import CodeBook, Hadamard, Integers
from ringjax.kv.codecs import ChannelGroups
from ringjax.ops.attention.cached.code_format import as_stored, stored_codes
from ringjax.ops.attention.cached.pooled import PooledView, decode_pool
from ringjax.ops.attention.cached.views import Decoder, decode_attention
from ringjax.ops.attention.kernels import code_tiles, prefill_pool_tpu
from ringjax.ops.attention.kernels.prefill_pool_tpu import PrefillPoolTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, SameSegment, Window, visible
from ringjax.ops.softmax import finalize
from ringjax.serve.prefix.shared_rows import shared_tiles
from tests.contracts import pool_kernel
from tests.kv.test_codecs import encode
from tests.ops.attention.kernels.test_decode import decoded, same

TILE, PAGE, COLUMNS = 128, 32, 3
KERNEL = PrefillPoolTPU(TILE, interpret=True)
# Tokens before each row's queries, and number of its queries.
ROWS = ((0, 70), (200, 70), (120, 33), (383, 1), (0, 0))
QUERIES = 70
# Rows of a few queries, as of drafts that are checked.
SHORT = ((0, 3), (200, 3), (120, 2), (381, 3), (0, 0))


def call(rows=ROWS, *, dtype=jnp.float32, mask=None, cap=None, groups=3,
         queries=QUERIES, seed=0):  # fmt: skip
  """The arguments of a call whose rows have these queries, after these keys."""
  r = np.random.default_rng(seed)
  many = (COLUMNS * TILE) // PAGE
  table = r.permutation(len(rows) * many).astype(np.int32)
  table = table.reshape(len(rows), many)
  before, new = (np.array(x)[:, None] for x in zip(*rows, strict=True))
  table[np.arange(many)[None] * PAGE >= before + new] = -1
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), dtype)
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  pos = np.broadcast_to(np.arange(many * PAGE), (len(rows), many * PAGE))
  view = PooledView(
    draw(2, len(rows) * many, 2, PAGE, 16),
    draw(2, len(rows) * many, 2, PAGE, 24),
    coords(pos, pos < before + new),
    jnp.asarray(table),
    jnp.int32(1),
  )
  at = np.arange(queries)[None]
  context = Context(coords(before + at, at < new), view.at, mask or Causal())
  scores = Scores(scale=0.25, soft_cap=cap)
  q = draw(len(rows), 2, groups, queries, 16)
  return q, view, ScoreArgs(scores, Terms(), context)


def coded(codec, codec_v=None, *, dim=64, widths=None, **options):
  """Arguments as of `call`, whose pages are codes of random vectors."""
  dtype = options.get("dtype", jnp.float32)
  q, view, args = call(**options)
  r = np.random.default_rng(1)
  q = jnp.asarray(r.normal(size=(*q.shape[:4], dim)), dtype)

  def encoded(codec, width):
    shape = (*view.k.shape[:4], width)
    x = jnp.asarray(r.normal(size=shape), dtype)
    constants = ()
    if isinstance(codec, CodeBook):
      levels = np.sort(r.normal(size=(2, 2**codec.bits)), 1) / 2
      constants = (jnp.asarray(levels, jnp.float32),)
    codes = jnp.stack([encode(codec, layer, constants) for layer in x])
    like = stored_codes(codes.shape[:3], PAGE, codes.shape[4], "tpu")
    return as_stored(codes, jnp.zeros(*like)), constants

  codec_v = codec_v or codec
  k_width, v_width = widths or (dim, 2 * dim)
  (k, k_constants), (v, v_constants) = (
    encoded(codec, k_width),
    encoded(codec_v, v_width),
  )
  view = dataclasses.replace(
    view,
    k=k,
    v=v,
    constants=(k_constants, v_constants),
    decoders=(Decoder(codec, k_width, dtype), Decoder(codec_v, v_width, dtype)),
  )
  aligned = view.aligned(q)
  return aligned.q, aligned.view, args


def exact(args):
  """Normalised sums of a call in float64, from its decoded numbers."""
  q, view, rest = args
  context = rest.context
  k, v = (np.asarray(x, np.float64) for x in view.tile(0, view.shape[2]))
  q = np.asarray(q, np.float64)
  s = np.einsum("bkgth,bksh->bkgts", q, k) * rest.scores.scale
  if rest.scores.soft_cap is not None:
    s = np.tanh(s / rest.scores.soft_cap) * rest.scores.soft_cap
  q_at = Coords(*(x[:, :, None] for x in context.q))
  k_at = Coords(*(x[:, None] for x in context.k))
  mask = view.mask or context.mask
  seen = np.asarray(visible(mask, q_at, k_at))[:, None, None]
  p = np.where(seen, np.exp(s), 0.0)
  acc = np.einsum("bkgts,bksj->bkgtj", p, v)
  total = p.sum(-1, keepdims=True)
  return np.divide(acc, total, out=np.zeros_like(acc), where=total > 0)


def check_exactly(args, limit=3e-6, kernel=KERNEL):
  """The kernel's normalised sums are those of float64."""
  q, view, rest = args
  # Not an argument of the program, in which values were no longer the keys.
  partial = jax.jit(lambda q: kernel.decode(q, view, rest))(q)
  out, want = np.asarray(finalize(partial)[0], np.float64), exact(args)
  assert out.shape == want.shape
  assert np.linalg.norm(out - want) <= limit * np.linalg.norm(want)
  return partial


def check(args, limit=3e-6, kernel=KERNEL):
  got = decoded(kernel.decode, args)
  same(got, decoded(decode_attention, args), limit)
  return got


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("options", "limit"),
  [
    ({}, 3e-6),
    ({"mask": Causal() & SameSegment() & Window(140)}, 3e-6),
    ({"cap": 2.0}, 3e-6),
    ({"dtype": jnp.bfloat16}, 1e-2),
    ({"groups": 1}, 3e-6),
    ({"groups": 7, "queries": 75}, 3e-6),
  ],
  ids=["plain", "window", "cap", "half", "one_head", "tiles_of_queries"],
)
def test_it_equals_the_loops(options, limit):
  check(call(**options), limit)


def test_several_tiles_of_queries(monkeypatch):
  """Also where their number is not a whole number of tiles."""
  module = "ringjax.ops.attention.kernels.prefill_pool_tpu._QUERIES"
  monkeypatch.setattr(module, 48)
  args = call()
  assert KERNEL.tile(*args[:2])[2] == 16
  check(args)


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(
  "codec",
  [
    Integers(bits=8),
    Integers(bits=4),
    *(
      pytest.param(x, marks=pytest.mark.long)
      for x in (
        Integers(bits=4, group=32),
        Integers(bits=3),
        Integers(bits=2),
        Hadamard(bits=4),
        Hadamard(bits=3),
        CodeBook(bits=4, by="token"),
        CodeBook(bits=3, by="token", outliers=0.03),
        CodeBook(bits=2, by="token", outliers=0),
      )
    ),
  ],
  ids=repr,
)
def test_pages_of_codes(codec):
  """As the loops decode them, and as float64 attends to these numbers."""
  args = coded(codec)
  check(args)
  check_exactly(args)


@pytest.mark.long
@pytest.mark.parametrize(
  ("options", "limit"),
  [
    ({"mask": Causal() & SameSegment() & Window(140)}, 3e-6),
    ({"cap": 2.0}, 3e-6),
    ({"dtype": jnp.bfloat16}, 1e-2),
    ({"groups": 1, "queries": 3, "rows": SHORT}, 3e-6),
  ],
  ids=["window", "cap", "half", "few_queries"],
)
def test_masks_and_dtypes_over_codes(options, limit):
  args = coded(Integers(bits=8), Integers(bits=4), **options)
  check(args, limit)
  check_exactly(args, limit)


@pytest.mark.long
def test_latents_of_codes_are_decoded_once():
  """Values that are keys, as latents have them."""
  q, view, args = coded(Integers(bits=8), groups=5)
  view = view.keys_alone()
  assert len(code_tiles.formats(view)) == 1
  check_exactly((q, view, args))


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize("pages", ["codes", "numbers"])
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(pages):
  q, view, args = call() if pages == "numbers" else coded(Integers(bits=4))
  crowd = decoded(KERNEL.decode, (q, view, args))
  for row in (0, 1, 2, 3):
    one = lambda x, row=row: x[row : row + 1]
    context = Context(
      Coords(*map(one, args.context.q)),
      Coords(*map(one, args.context.k)),
      args.context.mask,
    )
    lone = dataclasses.replace(view, at=context.k, table=one(view.table))
    alone = decoded(
      KERNEL.decode, (one(q), lone, args._replace(context=context))
    )
    for a, b in zip(alone, crowd, strict=True):
      np.testing.assert_array_equal(a[0], b[row])


def test_values_that_are_keys():
  q, view, args = call()
  check((q, view.keys_alone(), args))


def test_what_is_not_seen_does_not_matter():
  pool_kernel.check_unseen(call, KERNEL)


@pytest.mark.long
def test_scales_that_are_no_numbers_reach_their_row_alone():
  """A float16 of ones only is NaN: codes of 128 elements are before it."""
  q, view, args = coded(Integers(bits=8))
  page = int(view.table[1, 0])
  spoilt = view.v.at[:, page, :, 128:132].set(np.int8(-1))
  decode = jax.jit(lambda view: KERNEL.decode(q, view, args))
  want = decode(view)
  got = decode(dataclasses.replace(view, v=spoilt))
  assert np.isnan(got.acc[1]).all()
  others = np.array([0, 2, 3, 4])
  np.testing.assert_array_equal(got.acc[others], want.acc[others])


# ---------------------------------------------------------------------------
# Drafts
# ---------------------------------------------------------------------------


def with_plan(args, alone=False):
  """The call with a plan of the tiles that its first rows share."""
  q, view, rest = args
  table = np.array(view.table)
  each = TILE // PAGE
  table[1, :each] = table[3, :each]
  before = np.array([0, 200, 120, 381, 0]) * (not alone)
  plan = shared_tiles(table[:, None], before, PAGE, TILE, 4)
  view = dataclasses.replace(
    view,
    table=jnp.asarray(table),
    shared=jax.tree.map(jnp.asarray, plan),
  )
  return q, view, rest


def drafts(pages, **options):
  options = dict(rows=SHORT, queries=3) | options
  return call(**options) if pages == "numbers" else coded(
    Integers(bits=4), **options
  )  # fmt: skip


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize(
  ("pages", "lanes"), [("numbers", 512), ("codes", 512), ("numbers", 24)]
)
def test_drafts_with_a_plan_of_shared_tiles(pages, lanes, monkeypatch):
  """Rows read shared pages together, with the same bits as without a plan."""
  # Of 24 lanes a tile holds eight queries of three heads: two tiles of all.
  monkeypatch.setattr(prefill_pool_tpu, "_QUERIES", lanes)
  args = with_plan(drafts(pages))
  assert int(args[1].shared.count[0]) > 0
  got = check_exactly(args)
  same(got, decoded(decode_pool, args), 3e-6)
  alone = decoded(KERNEL.decode, with_plan(drafts(pages), alone=True))
  for a, b in zip(got, alone, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_a_shared_tile_is_read_through_one_row():
  q, view, rest = with_plan(drafts("numbers"))
  plan, each = view.shared, TILE // PAGE
  row, covered = int(plan.row[0, 0]), np.flatnonzero(plan.cover[0, 0])
  assert covered.tolist() == [1, 3]
  other_row = next(n for n in covered if n != row)
  unused = np.setdiff1d(np.arange(view.k.shape[1]), np.asarray(view.table))
  # The other row's numbers of these pages are not looked at.
  table = view.table.at[other_row, :each].set(int(unused[0]))
  results = [
    KERNEL.decode(q, dataclasses.replace(view, table=x), rest).acc
    for x in (view.table, table)
  ]
  np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
  "pages", ["numbers", pytest.param("codes", marks=pytest.mark.long)]
)
def test_drafts_that_are_a_tree(pages):
  """A drafted token sees the text before it and its ancestors alone."""
  rows = ((0, 5), (200, 5), (120, 5), (379, 5), (3, 5))
  q, view, args = pool_kernel.with_tree(
    drafts(pages, rows=rows, queries=5), [x for x, _ in rows]
  )
  check_exactly((q, view, args))
  chain = exact((q, dataclasses.replace(view, own_mask=Causal()), args))
  assert not np.allclose(exact((q, view, args)), chain)


@pytest.mark.long
def test_a_latent_head_of_many_queries():
  """One head of 576 elements for all queries, whose values are its keys."""
  r = np.random.default_rng(0)
  q, view, args = drafts("numbers")
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)
  k = draw(2, view.k.shape[1], 1, PAGE, 576)
  q = draw(5, 1, 32, 3, 576) / 8
  check_exactly((q, dataclasses.replace(view, k=k, v=k), args))


DECLINED = pool_kernel.declined(PrefillPoolTPU)
DECLINED_CODES = {
  "codes that are uint8": dict(
    view=lambda x: dataclasses.replace(
      x,
      k=jnp.swapaxes(x.k, 3, 4).astype(jnp.uint8),
      v=jnp.swapaxes(x.v, 3, 4).astype(jnp.uint8),
    )
  ),
  "it decodes integers and levels": dict(codec=ChannelGroups(group=PAGE)),
  "scales of channels": dict(codec=CodeBook(outliers=0)),
  "groups of 4 elements": dict(codec=Integers(group=4)),
  "heads of 16": dict(dim=16),
  "pages of 32 slots": dict(kernel=PrefillPoolTPU(TILE)),
}


@pytest.mark.parametrize("words", DECLINED_CODES)
def test_codes_that_it_does_not_serve(words):
  changes = DECLINED_CODES[words]
  q, view, args = coded(Integers(), rows=SHORT, queries=3)
  codec, dim = changes.get("codec"), changes.get("dim", 64)
  if codec is not None or "dim" in changes:
    decoder = Decoder(codec or Integers(), dim, jnp.float32)
    view = dataclasses.replace(view, decoders=(decoder,) * 2)
  view = changes.get("view", lambda x: x)(view)
  kernel = changes.get("kernel", KERNEL)
  assert words in kernel.decline(q, view, args)
  with pytest.raises(OptionError, match=words):
    kernel.decode(q, view, args)


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  pool_kernel.check_declines(call, KERNEL, words, DECLINED[words])


def test_a_tpu_takes_it():
  pool_kernel.check_choice(call, PrefillPoolTPU)

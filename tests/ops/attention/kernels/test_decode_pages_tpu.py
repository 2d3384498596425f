"""The kernel that reads pages of single heads, in Pallas' interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.kv import Integers
from ringjax.ops.attention.cached.paged import (
  PagedView,
  heads_as_examples,
  read_by_query,
)
from ringjax.ops.attention.cached.views import Decoder, decode_attention
from ringjax.ops.attention.kernels.decode_pages_tpu import DecodePagesTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Window
from tests.ops.attention.kernels.test_decode import decoded, same

PAGE, PLACES = 32, 9
KERNEL = DecodePagesTPU(128, interpret=True)


def pages(rows=2, heads=2, dtype=jnp.float32, seed=0, **fields):
  """View of heads with different tokens, and numbers of pages."""
  r = np.random.default_rng(seed)
  count = rows * heads * PLACES
  table = r.permutation(count).astype(np.int32).reshape(rows, heads, PLACES)
  # A head has 9 pages, the next 4, the last none; one lacks a page between.
  for n, head in enumerate(table.reshape(-1, PLACES)):
    head[max(0, PLACES - 5 * n) :] = -1
  table[0, 0, 2] = -1
  pos = np.stack([r.permutation(PLACES * PAGE)] * (rows * heads))
  pos = pos.reshape(count, PAGE)
  pos[r.random(pos.shape) < 0.1] = -1
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), dtype)
  return PagedView(
    draw(count, PAGE, 16),
    draw(count, PAGE, 24),
    jnp.asarray(pos, jnp.int32),
    None,
    jnp.asarray(table),
    **fields,
  )


def call(view, *, queries=1, groups=3, mask=None, cap=None, seed=1):
  """The arguments of a decode over pages, of queries near the end."""
  r = np.random.default_rng(seed)
  rows, heads = view.table.shape[:2]
  q = r.normal(size=(rows, heads, groups, queries, 16))
  q = jnp.asarray(q, view.k.dtype)
  last = PLACES * PAGE - np.arange(1, rows + 1)[:, None] - queries
  last = jnp.asarray(last + np.arange(queries), jnp.int32)
  at = Coords(last, jnp.ones_like(last))
  context = Context(at, view.at, mask or Causal())
  q, context, terms = heads_as_examples(q, context, Terms())
  return q, view, ScoreArgs(Scores(scale=0.25, soft_cap=cap), terms, context)


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("queries", [1, 3])
def test_it_equals_the_loops(queries, dtype):
  args = call(pages(dtype=dtype), queries=queries)
  limit = 3e-6 if dtype == jnp.float32 else 2e-2
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), limit)


@pytest.mark.one_case
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 3), (3, 1)])
def test_windows_and_soft_caps_equal_the_loops(rows, heads):
  args = call(pages(rows, heads), mask=Causal() & Window(100), cap=5.0)
  same(decoded(KERNEL.decode, args), decoded(decode_attention, args), 3e-6)


def test_queries_read_the_pages_that_they_choose():
  r = np.random.default_rng(2)
  low = r.normal(size=(2 * 2 * PLACES, 1, 16)) - 1
  bounds = jnp.asarray(np.concatenate([low, low + 2], 1), jnp.float32)
  view = pages(bounds=bounds, pages_read=(0, *(min(n, 4) for n in range(9))))
  args = call(view, queries=2)
  assert "yet to choose" in str(KERNEL.decline(*args))
  q = args[0].reshape(2, 2, *args[0].shape[2:])

  def partial(decode):
    def read(chosen, q, terms, at):
      context = Context(at, chosen.at, Causal())
      q, context, terms = heads_as_examples(q, context, terms)
      out = decode(q, chosen, ScoreArgs(args[2].scores, terms, context))
      assert KERNEL.decline(q, chosen, args[2].of_keys(chosen.at, 0)) is None
      return out

    at = Coords(*(x[::2] for x in args[2].context.q))
    return read_by_query(view, q, at, Terms(), read)

  got, expected = (
    jax.jit(partial, static_argnums=0)(f)
    for f in (KERNEL.decode, decode_attention)
  )
  same(got, expected, 3e-6)
  everything = decoded(decode_attention, args)
  assert not np.allclose(everything.l.reshape(-1), got.l.reshape(-1))


def test_values_that_no_query_sees_may_be_no_numbers():
  view = pages()
  args = call(view)
  hidden = np.asarray(view.pos) < 0
  v = jnp.where(jnp.asarray(hidden)[..., None], jnp.nan, view.v)
  bad = PagedView(view.k, v, view.pos, view.seg, view.table)
  got = decoded(KERNEL.decode, (args[0], bad, args[2]))
  same(got, decoded(KERNEL.decode, args), 0)


def test_it_names_what_it_leaves_to_the_loops():
  codec = Integers(bits=8)
  decoder = Decoder(codec, 16, jnp.float32)
  codes = pages(decoders=(decoder, decoder))
  assert "codes" in str(KERNEL.decline(*call(codes)))
  q, view, args = call(pages())
  masked = args.context._replace(allow=jnp.ones((4, 1, 1, 1, 288), bool))
  masked_args = ScoreArgs(args.scores, args.terms, masked)
  assert "mask array" in str(KERNEL.decline(q, view, masked_args))
  with pytest.raises(OptionError, match="a bias or mask array"):
    KERNEL.decode(q, view, masked_args)
  strict = DecodePagesTPU(96)
  assert "multiples of 128" in str(strict.decline(q, view, args))

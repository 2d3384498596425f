"""Documents of a call that do not see each other, and tokens that see all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import models
from ringjax.data import LinkTokens, arranged
from ringjax.errors import OptionError
from ringjax.parallel.layout import Contiguous, Striped, Zigzag
from tests import checkpoints
from tests.helpers import SMALL, make_mesh, refused

APART = rj.SeparateDocuments()
LINKS = LinkTokens(60, 2, 2)
DOCUMENTS = [np.arange(1, 12), np.arange(20, 29)]
QUESTION = np.arange(40, 46)
# 30 tokens, and padding to a length that 8 shards divide.
PROMPT = arranged(DOCUMENTS, QUESTION, LINKS)
T = 32
ids, segments = (
  np.pad(x, (0, T - len(x)))[None] for x in (PROMPT.tokens, PROMPT.segments)
)
REAL = len(PROMPT.tokens)


@pytest.fixture(scope="module")
def model():
  return models.create(SMALL | {"num_hidden_layers": 2}, seed=0)


def logits(model, tokens=ids, attend=None, **options):
  attend = models.ContextParallel(segments=APART) if attend is None else attend
  options = {"segment_ids": segments} | options
  return np.asarray(model(tokens, attend=attend, **options))[:, :REAL]


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_a_document_is_as_alone_and_a_question_sees_all(model):
  got = logits(model)
  first = len(DOCUMENTS[0])
  start = first + LINKS.each
  alone = model(
    DOCUMENTS[1][None].astype(np.int32),
    positions=start + np.arange(len(DOCUMENTS[1])),
  )
  end = start + len(DOCUMENTS[1])
  close(got[:, start:end], alone)
  changed = ids.copy()
  changed[0, 0] = 33
  other = logits(model, changed)
  close(other[:, start:end], got[:, start:end])
  # The link tokens of both documents and the question see the first one.
  for at in (first, end, REAL - 1):
    assert np.abs(other[0, at] - got[0, at]).max() > 1e-4


def test_order_and_segments_without_ids(model):
  """Without segment ids all tokens are one document, as elsewhere."""
  apart = models.ContextParallel(segments=APART)
  close(
    logits(model, attend=apart, segment_ids=None),
    logits(model, attend=models.ContextParallel(), segment_ids=None),
  )


@pytest.mark.parametrize(
  ("shards", "layout", "strategy"),
  [
    (2, Striped(), "ring"),
    pytest.param(4, Contiguous(), "ring", marks=pytest.mark.long),
    (8, Striped(), "ring"),
    pytest.param(4, Zigzag(), "gather", marks=pytest.mark.slow),
    pytest.param(2, Contiguous(), "ulysses", marks=pytest.mark.slow),
    pytest.param(4, Contiguous(), "documents", marks=pytest.mark.long),
    pytest.param(4, Contiguous(), "chain", marks=pytest.mark.slow),
  ],
)
def test_shards_change_nothing(model, shards, layout, strategy):
  attend = models.ContextParallel(
    mesh=make_mesh(shards, "auto"),
    axis="seq",
    layout=layout,
    strategy=strategy,
    segments=APART,
  )
  put = lambda x: layout.permute(x, shards=shards, axis=1)
  got = model(put(ids), segment_ids=put(segments), attend=attend)
  back = layout.restore(np.asarray(got), shards=shards, axis=1)[:, :REAL]
  close(back, logits(model))


@pytest.mark.long
def test_gradients_are_those_of_one_device(model):
  label = jnp.asarray(np.roll(ids, -1, 1))

  def loss(model, attend, order):
    put = lambda x: jnp.take(x, order, axis=1)
    found = model(put(ids), segment_ids=put(segments), attend=attend)
    score = jax.nn.log_softmax(found)
    each = jnp.take_along_axis(score, put(label)[..., None], 2)[..., 0]
    return jnp.sum(jnp.where(put(segments) > 0, each, 0))

  striped = models.ContextParallel(
    mesh=make_mesh(4, "auto"), axis="seq", layout=Striped(), segments=APART
  )
  one = models.ContextParallel(segments=APART)
  f = jax.jit(jax.grad(loss), static_argnums=1)
  want = f(model, one, jnp.arange(T))
  got = f(model, striped, jnp.asarray(Striped().order(T, 4)))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    scale = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(scale, 1))


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_cache_of_documents_answers_like_one_call(model, shards):
  """Read together, or chunk by chunk: the question finds the same keys."""
  mesh = make_mesh(shards, "auto") if shards > 1 else None
  axis = None if mesh is None else "seq"
  sharding = models.ContextParallel(mesh=mesh, axis=axis, segments=APART)
  want = logits(model)[:, -len(QUESTION) :]
  start = REAL - len(QUESTION)
  cache = model.init_cache(1, 64, sharding=sharding)
  question = ids[:, start:REAL]
  _, read = model(
    ids[:, : start // 4 * 4],
    segment_ids=segments[:, : start // 4 * 4],
    attend=sharding,
    cache=cache,
  )
  rest = slice(start // 4 * 4, REAL)
  chunk = models.CachedAttention(mesh=mesh, axis=axis, segments=APART)
  got, _ = model(
    ids[:, rest], segment_ids=segments[:, rest], attend=chunk, cache=read
  )
  close(np.asarray(got)[:, -len(QUESTION) :], want)
  visiting = read
  if rest.start < start:
    _, visiting = model(
      ids[:, rest.start : start],
      segment_ids=segments[:, rest.start : start],
      attend=chunk,
      cache=read,
    )
  # A question by itself is a reader already.
  got, _ = model(question, cache=visiting)
  close(np.asarray(got), want)


def test_documents_in_chunks_do_not_see_each_other(model):
  chunk = models.CachedAttention(segments=APART)
  cache, found = model.init_cache(1, 64), []
  for start in range(0, REAL, 6):
    part = slice(start, min(start + 6, REAL))
    got, cache = model(
      ids[:, part], segment_ids=segments[:, part], attend=chunk, cache=cache
    )
    found.append(np.asarray(got))
  close(np.concatenate(found, 1), logits(model))


@pytest.mark.usefixtures("unchecked")
def test_what_relates_no_segments():
  for bad in (rj.Causal(), "documents", None):
    refused(
      OptionError,
      lambda bad=bad: models.ContextParallel(segments=bad),
      "segments",
      "SeparateDocuments()",
    )


def test_caches_that_drop_tokens_are_refused():
  windowed = models.create(SMALL | {"sliding_window": 8}, seed=0)
  cache = windowed.init_cache(1, 512, kind="windowed")
  chunk = models.CachedAttention(segments=APART)
  call = lambda: windowed(ids, segment_ids=segments, attend=chunk, cache=cache)
  refused(OptionError, call, "cache", 'kind="dense"')
  full = models.create(SMALL, seed=0)
  evicting = full.init_cache(1, 512, kind="snapkv")
  call = lambda: full(ids, segment_ids=segments, attend=chunk, cache=evicting)
  refused(OptionError, call, "cache", 'kind="dense"')


@pytest.mark.long
def test_a_state_skips_no_document(tmp_path):
  folder = checkpoints.write("qwen3_next", tmp_path / "model")
  model = models.load(folder)
  apart = models.ContextParallel(segments=APART)
  call = lambda: model(ids, segment_ids=segments, attend=apart)
  refused(OptionError, call, "segments", "recurrent")

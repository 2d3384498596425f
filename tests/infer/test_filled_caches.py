"""Caches as a TPU has them, with zeros behind the numbers of a token."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.kv.layer_spec import LayerKV
from ringjax.ops.attention.cached.code_format import token_axis
from tests.helpers import as_tpu, swept


def widths(session):
  """The numbers of a token in the arrays of a session's cache."""
  parts = [x for x in session.cache.slots if isinstance(x, LayerKV)]
  return {x.shape[-1] for x in jax.tree.leaves(parts) if token_axis(x) == 3}


def conversation(model, mesh, turns, count, **options):
  """A session's answers, and all that its cache holds of the first row."""
  speculate = options.pop("speculate", None)
  session = rj.infer.Session(model, 128, batch=2, mesh=mesh, **options)
  answers = [
    rj.infer.generate(
      model,
      turn,
      max_new_tokens=count,
      prefill="chunked",
      chunk=16,
      cache=session,
      speculate=speculate,
    ).tokens
    for turn in turns
  ]
  end = int(session.lengths[0])
  return np.concatenate(answers, 1), session, session.cache.export(0, 0, end)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices", "option", "value"),
  swept(
    [
      ("llama3", 1, "cache_kind", "dense"),
      ("llama3", 4, "cache_kind", "unrotated"),
      ("llama3", 1, "dtype", "bfloat16"),
      ("deepseek_v3", 1, "cache_kind", "dense"),
      ("deepseek_v3", 4, "speculate", "lookup:count=3"),
      ("deepseek_v32", 1, "cache_kind", "dense"),
      ("deepseek_v32", 4, "cache_kind", "dense"),
      ("gemma3", 4, "cache_kind", "windowed"),
      ("gpt_oss", 1, "cache_kind", "windowed"),
      ("falcon_rw", 1, "cache_kind", "dense"),
      ("llama3", 1, "speculate", "early:widths=(2,2),best=3"),
    ],
    [
      ("llama3", 4, "cache_kind", "unrotated"),
      ("gpt_oss", 1, "cache_kind", "windowed"),
    ],
  ),
)
def test_answers_are_the_same(
  loaded, monkeypatch, family, devices, option, value
):
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(0)
  text = lambda n: rng.integers(0, model.config.vocab, n).astype(np.int32)
  turns = [[text(40), text(23)], [text(6), text(9)]]
  given = (model, mesh, turns, 5)
  want, plain, held = conversation(*given, **{option: value})
  assert max(widths(plain)) < 128
  as_tpu(monkeypatch)
  got, filled, found = conversation(*given, **{option: value})
  assert widths(filled) <= {0, 128, 256}
  np.testing.assert_array_equal(got, want)
  # What is exported has no zeros: keys and values as they were, to the bit.
  jax.tree.map(np.testing.assert_array_equal, found, held)


@pytest.mark.long
def test_tokens_move_between_caches(loaded, monkeypatch):
  """Those of a CPU are loaded into a cache of a TPU, and back."""
  model, _ = loaded("llama3")
  ids = np.arange(24, dtype=np.int32)
  turns = [[ids, ids[:7]]]
  answer, plain, held = conversation(model, None, turns, 3)
  as_tpu(monkeypatch)
  filled = model.init_cache(2, 64).load(1, held)
  back = filled.export(1, 0, held.at.pos.size)
  jax.tree.map(np.testing.assert_array_equal, back, held)
  last = np.repeat(answer[:1, -1:], 2, 0)
  got, _ = model(last, cache=filled)
  want, _ = model(last, cache=plain.cache)
  # Tiles of another row and capacity are added up in another order.
  np.testing.assert_allclose(got[1], want[0], atol=1e-4)


@pytest.mark.slow
def test_contexts_that_are_read_apart(loaded, monkeypatch):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(0)
  text = lambda n: rng.integers(0, model.config.vocab, n).astype(np.int32)
  documents, question = [text(20), text(13)], [text(5)]
  answer = lambda how: (
    rj.infer.generate(
      model, question, max_new_tokens=4, contexts=documents, combine=how
    ).tokens
  )
  ways = ("parallel", "ape:temperature=0.8", "select", "recompute")
  want = [answer(how) for how in ways]
  as_tpu(monkeypatch)
  np.testing.assert_array_equal([answer(how) for how in ways], want)


@pytest.mark.slow
def test_an_elastic_session(loaded, monkeypatch):
  model, mesh = loaded("llama3", 4)
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, model.config.vocab, 24).astype(np.int32)

  def answer():
    session = rj.infer.ElasticSession(model, 24, mesh=mesh)
    session.read([prompt], [rj.infer.owners_of([12, 0, 12, 0])])
    first = session.decode(3).tokens
    session.regroup([0, 1, 2])
    return np.concatenate([first, session.decode(3).tokens], 1)

  want = answer()
  as_tpu(monkeypatch)
  np.testing.assert_array_equal(answer(), want)

"""Sessions behind the important part of stored prefixes."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PromptError
from ringjax.infer import contexts
from ringjax.infer.contexts import important_prefix
from tests import checkpoints
from tests.helpers import refused

SIZES, NEW = (50, 37, 64), 6


@functools.cache
def model(family="llama3"):
  # Heads that look at few tokens: a wrong one is seen in the logits.
  config = checkpoints.config(family) | {"initializer_range": 0.2}
  return rj.models.create(config, seed=1)


@functools.cache
def texts():
  draw = np.random.default_rng(3)
  make = lambda n: draw.integers(1, 64, n).astype(np.int32)
  return [make(n) for n in SIZES], [make(n) for n in (5, 9, 7)]


def prefixes(shelf, **options):
  options = dict(chunk=8, probes=1, alpha=9) | options
  return contexts.ImportantPrefixes(model(), shelf, **options)


def answers(work, rows=(0, 1, 2), **options):
  """Tokens of some rows, each behind its own prefix."""
  documents, questions = texts()
  asked = [questions[n] for n in rows]
  session = work.session([documents[n] for n in rows], asked, capacity=32)
  lengths = [SIZES[n] for n in rows]
  assert session.lengths.tolist() == lengths
  new = rj.infer.generate(
    work.model, asked, max_new_tokens=NEW, cache=session, **options
  )
  return [row.tolist() for row in new]


@functools.cache
def whole():
  """The answers behind whole prefixes."""
  both = [np.concatenate(x) for x in zip(*texts(), strict=True)]
  new = rj.infer.generate(model(), both, max_new_tokens=NEW)
  return [row.tolist() for row in new]


def logits(work, document, question):
  session = work.session([document], [question], capacity=32)
  found, _ = work.model(question[None], cache=session.cache)
  return np.asarray(found[0]), session


@pytest.mark.long
@pytest.mark.parametrize("probes", [1, 3])
def test_all_of_a_prefix_answers_as_one_that_was_read(probes):
  with rj.store.Store(host=1 << 26) as shelf:
    work = prefixes(shelf, important=1, probes=probes)
    document, question = texts()[0][0], texts()[1][0]
    found, _ = logits(work, document, question)
    want = model()(np.concatenate([document, question])[None])
    np.testing.assert_allclose(
      found, np.asarray(want[0])[SIZES[0] :], atol=2e-4
    )
    assert answers(work) == whole()


@pytest.mark.slow
def test_a_row_alone_as_in_a_crowd_and_found_as_computed(tmp_path):
  options = dict(disk=(tmp_path, 1 << 26))
  with rj.store.Store(**options) as shelf:
    work = prefixes(shelf)
    together = answers(work)
    assert (work.computed, work.reused) == (sum(SIZES), 0)
  assert together != whole()
  with rj.store.Store(**options) as shelf:
    again = prefixes(shelf)
    each = [row for n in (2, 0, 1) for row in answers(again, (n,))]
    assert (again.computed, again.reused) == (0, sum(SIZES))
    assert [each[1], each[2], each[0]] == together
    assert answers(again, speculate="lookup:count=3,adapt=false") == together


@pytest.mark.long
def test_what_is_loaded_is_the_important_part():
  with rj.store.Store(host=1 << 26) as shelf:
    few, every = prefixes(shelf, important=0.1), prefixes(shelf, important=1)
    document, question = texts()[0][2], texts()[1][2]
    for work in (few, every):
      _, session = logits(work, document, question)
      kept = int(np.ceil(work.important * SIZES[2]))
      assert int((session.cache.contexts.at.seg > 0).sum()) == kept
    assert few.counters.fallbacks == 0
    assert (few.reused, every.reused) == (0, SIZES[2])
    assert few.counters.vectors < 0.7 * every.counters.vectors
    assert few.counters.chunks < every.counters.chunks


@pytest.mark.long
def test_the_answer_is_of_the_kept_tokens_of_each_layer_and_head():
  # Others may hold anything: they are not read.
  document, question = texts()[0][0], texts()[1][0]
  with rj.store.Store(host=1 << 26) as shelf:
    work = prefixes(shelf, important=0.3, alpha=0)
    found, _ = logits(work, document, question)
    kept = work.keep(document, question)
    assert not any(x.shared for x in kept)
    assert len({x.tokens.tobytes() for x in kept}) == len(kept)
    keys, values = work.read(document)
    for part, of in (("keys", keys), ("values", values)):
      for layer, x in enumerate(kept):
        want = np.take_along_axis(of[layer], x.tokens[..., None], 1)
        np.testing.assert_array_equal(getattr(x, part), want)
    # The pass that chooses made the same states as the one that reads.
    hidden = []

    def attend(number, q, k, v, scale):
      out, _ = rj.store.Impress(node, keep=0.3, alpha=0).attend(
        number, q, k, v, scale=scale
      )
      hidden.append(out)
      return out

    node = rj.store.StoredNode(shelf, b"again", keys, values, probes=1)
    last = important_prefix.through_layers(
      work._programs, question, document.size, work._dtype, attend
    )
    programs = work._programs
    want = programs.head(last, question.size - 1)
    np.testing.assert_allclose(found[-1], np.asarray(want[0]), atol=2e-4)


@pytest.mark.long
def test_probe_heads_are_those_most_like_the_others():
  documents, questions = texts()
  heads = contexts.probe_heads(model(), documents[:2], questions[:2], count=1)
  layers, count = heads.shape
  assert count == 1 and layers == len(model().config.layers)
  with rj.store.Store(host=1 << 26) as shelf:
    work = prefixes(shelf, probes=heads, important=1)
    assert answers(work) == whole()
  refused(
    PromptError,
    lambda: contexts.probe_heads(model(), [], [], count=1),
    "prefixes",
  )


def test_a_store_without_room_and_one_that_lost_a_chunk():
  document, question = texts()[0][0], texts()[1][0]
  with rj.store.Store(host=4000) as small:
    work = prefixes(small)
    refused(
      OptionError,
      lambda: work.session([document], [question], capacity=9),
      "room for at least one prefix",
    )
  with rj.store.Store(host=1 << 26) as shelf:
    work = prefixes(shelf)
    before, _ = logits(work, document, question)
    assert shelf.host is not None
    shelf.remove(list(shelf.host._blocks)[3:5])
    after, _ = logits(work, document, question)
    np.testing.assert_array_equal(before, after)
    assert work.computed == 2 * document.size


def test_what_is_refused():
  shelf = rj.store.Store(host=1 << 20)
  refused(OptionError, lambda: prefixes(shelf, important=0), "important")
  refused(OptionError, lambda: prefixes(shelf, important=2), "important")
  refused(
    OptionError, lambda: prefixes(shelf, probes=np.array([[0]])), "probes"
  )
  make = lambda family: contexts.ImportantPrefixes(model(family), shelf)
  refused(ConfigError, lambda: make("gemma3"), "mask")
  work = prefixes(shelf)
  refused(
    PromptError,
    lambda: work.session(texts()[0], texts()[1][:2], capacity=9),
    "questions",
  )


@pytest.mark.long
def test_reordering_reads_fewer_chunks_and_answers_the_same():
  document, question = texts()[0][2], texts()[1][2]
  with rj.store.Store(host=1 << 26) as shelf:
    work = prefixes(shelf, important=0.2)
    want, _ = logits(work, document, question)
    before = work.counters.chunks
    work.reorder(document)
    found, _ = logits(work, document, question)
    assert work.counters.chunks - before < before
    assert work.computed == document.size
    np.testing.assert_array_equal(found, want)
    refused(PromptError, lambda: work.reorder(document[1:]), "ask about it")

"""Engines that read the important part of prefixes in a store."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError
from ringjax.infer import speculate
from ringjax.infer.contexts import ImportantPrefixes
from ringjax.serve import Engine, ImportantShare, Request, RowSampling
from ringjax.serve.cluster import ClusterWorker
from ringjax.serve.engine_config import EngineConfig
from tests import checkpoints
from tests.helpers import refused

PAGE, SEGMENT, NEW = 16, 32, 5
# Heads of a layer agree on nothing here: each keeps its own.
HOW = dict(chunk=8, probes=1, alpha=0)


@functools.cache
def model(family="llama3"):
  # Heads that look at few tokens: a wrong one is seen in the logits.
  config = checkpoints.config(family) | {"initializer_range": 0.2}
  return rj.models.create(config, seed=1)


def drawn(seed, size):
  return np.random.default_rng(seed).integers(1, 64, size).astype(np.int32)


# Two segments, and what is asked about them.
DOCUMENT = drawn(0, 2 * SEGMENT)
QUESTIONS = [drawn(1, 9), drawn(2, 20)]
PROMPTS = [np.concatenate([DOCUMENT, x]) for x in QUESTIONS]


def engine(store=None, part=None, **options):
  sizes = dict(rows=2, capacity=256, longest=128, page=PAGE, piece=16, pieces=2)
  if part is not None:
    options["important"] = ImportantShare(share=part, segment=SEGMENT, **HOW)
  return Engine(model(), store=store, **sizes | options)


def ask(at, prompt, **options):
  request = Request(
    prompt=prompt, max_new_tokens=NEW, **dict(logprobs=2) | options
  )
  return at.submit(request).result()


def said(result):
  return [(a.tokens, a.logprobs) for a in result.answers]


@functools.cache
def whole(number=0, **options):
  with engine() as at:
    return said(ask(at, PROMPTS[number], **options))


@pytest.fixture
def shelf():
  """A store that has the document, from a prompt with another question."""
  with rj.store.Store(host=1 << 26) as store:
    with engine(store, 0.25) as at:
      ask(at, np.concatenate([DOCUMENT, drawn(9, 3)]))
    assert at.counters.important_rows == 0 and at.counters.pages_out == 4
    yield store


def test_all_of_a_prefix_has_the_bits_that_it_had(shelf):
  with engine(shelf, 1) as at:
    for number, prompt in enumerate(PROMPTS):
      result = ask(at, prompt)
      assert said(result) == whole(number)
      assert result.kept_tokens == result.cached_tokens == DOCUMENT.size
    at.scheduler.tree.check()
  did = at.counters
  assert did.important_failed == 0
  assert did.prompt_tokens == sum(x.size for x in QUESTIONS)
  assert did.important_rows == 2 and did.important_bytes_left == 0


@pytest.mark.long
def test_a_part_answers_as_a_session_behind_it(shelf):
  alone = ImportantPrefixes(model(), shelf, important=0.25, **HOW)
  with engine(shelf, 0.25) as at:
    for question, prompt in zip(QUESTIONS, PROMPTS, strict=True):
      session = alone.session([DOCUMENT], [question], capacity=40)
      want = rj.infer.generate(
        model(), [question], max_new_tokens=NEW, cache=session
      )
      result = ask(at, prompt)
      assert result.tokens.tolist() == want[0].tolist()
      assert (result.kept_tokens, result.cached_tokens) == (16, DOCUMENT.size)
      # Something was left out that matters.
      assert said(result) != whole(0 if question is QUESTIONS[0] else 1)
  did = at.counters
  assert (did.important_rows, did.important_tokens) == (2, 32)
  assert did.important_prefix == 2 * DOCUMENT.size == did.stored_tokens
  assert 0 < did.important_probe_bytes < did.important_bytes


def test_the_chosen_tokens_are_those_of_a_session(shelf):
  # In each layer and head those that one node of the whole prefix gives.
  kept = ImportantPrefixes(model(), shelf, important=0.25, **HOW).keep(
    DOCUMENT, QUESTIONS[0]
  )
  assert len({x.tokens.tobytes() for x in kept}) == len(kept)
  with engine(shelf, 0.25) as at:
    handle = at.submit(Request(prompt=PROMPTS[0], max_new_tokens=NEW))
    while at.prompt_progress(handle) <= DOCUMENT.size:
      at.step()
    (page,) = {n for n in at.pages_of_rows()[0, :4].tolist() if n >= 0}
    with at.between_steps() as pool:
      held = pool.slots[0]
      for layer, tokens in enumerate(kept):
        for mine, want in zip(held, (tokens.keys, tokens.values), strict=True):
          np.testing.assert_allclose(
            np.asarray(mine[layer, page]), want, atol=1e-5
          )


def test_in_a_crowd_as_alone_and_exact_rows_stay_exact(shelf):
  with engine(shelf, 0.25) as at:
    alone = [said(ask(at, prompt)) for prompt in PROMPTS]
  with engine(shelf, 0.25, rows=4) as at:
    ask_for = dict(max_new_tokens=NEW, logprobs=2)
    handles = [
      at.submit(Request(prompt=p, share=share, **ask_for))
      for p in PROMPTS
      for share in (True, False)
    ]
    results = [said(handle.result()) for handle in handles]
    assert results[::2] == alone
    assert results[1::2] == [whole(0), whole(1)]
    # What was computed behind a part is found by nobody.
    assert not list(at.scheduler.tree.blocks())
    at.scheduler.tree.check()


def test_a_prefix_on_the_device_is_read_whole(shelf):
  with engine(shelf, 0.25, share="answers") as at:
    approximate = said(ask(at, PROMPTS[0]))
    other = np.concatenate([DOCUMENT[::-1], QUESTIONS[0]])
    first = ask(at, other)
    again = ask(at, other)
    assert said(first) == said(again) and again.kept_tokens is None
    assert again.cached_tokens == DOCUMENT.size
    # It stays approximate where the device has not computed it.
    assert said(ask(at, PROMPTS[0])) == approximate != whole()


@pytest.mark.long
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_rows_that_make_room(shelf, preempt):
  with engine(shelf, 0.25) as at:
    alone = [said(ask(at, prompt)) for prompt in PROMPTS]
  many = dict(max_new_tokens=44, logprobs=2)
  with engine(shelf, 0.25, capacity=128, preempt=preempt) as at:
    handles = [at.submit(Request(prompt=p, **many)) for p in PROMPTS]
    results = [said(handle.result()) for handle in handles]
    assert at.counters.preemptions > 0 and at.counters.important_rows == 2
    assert (at.counters.swapped > 0) == (preempt == "swap")
    at.scheduler.tree.check()
  for result, want in zip(results, alone, strict=True):
    assert result[0][0][:NEW] == want[0][0]
    assert result[0][1][:NEW] == want[0][1]


@pytest.mark.long
def test_several_answers_and_searches(shelf):
  how = RowSampling(temperature=1.0, seed=3)
  with engine(shelf, 0.25, rows=4) as at:
    greedy = ask(at, PROMPTS[0])
    several = ask(at, PROMPTS[0], n=3, sampling=how)
    assert said(ask(at, PROMPTS[0], sampling=how))[0] == said(several)[0]
    assert len({tuple(a.tokens) for a in several.answers}) > 1
    one = ask(at, PROMPTS[0], beams=1, logprobs=None)
    assert one.tokens.tolist() == greedy.tokens.tolist()
    wide = ask(at, PROMPTS[0], beams=3, logprobs=None)
    best = wide.answers[0].total_logprob
    assert best >= greedy.answers[0].total_logprob - 1e-4
    at.scheduler.tree.check()
  with engine(shelf, 1, rows=4) as at:
    for options in (dict(n=3, sampling=how), dict(beams=3, logprobs=None)):
      with engine(rows=4) as plain:
        want = said(ask(plain, PROMPTS[0], **options))
      assert said(ask(at, PROMPTS[0], **options)) == want


def drafters():
  """Drafters by name; they never pause."""
  longspec = rj.models.longspec
  block = longspec.with_draft(model(), longspec.LongSpecConfig(window=16))
  never = dict(adapt=False)
  return {
    "lookup": speculate.PromptLookup(count=3, **never),
    "early": speculate.EarlyExit(layers=1, count=2, **never),
    "self": speculate.SelfDraft(cache_kind="int8", count=2, **never),
    "model": speculate.DraftModel(model=model(), count=2, **never),
    "block": speculate.LongSpec(model=block, count=2, **never),
  }


@pytest.mark.long
@pytest.mark.parametrize("name", ["lookup", "early", "self", "model", "block"])
def test_drafts_change_no_token(shelf, name):
  with engine(shelf, 0.25) as at:
    want = ask(at, PROMPTS[0]).tokens.tolist()
  with engine(shelf, 0.25, speculate=drafters()[name]) as at:
    result = ask(at, PROMPTS[0])
    assert result.tokens.tolist() == want and result.kept_tokens == 16
    assert at.counters.drafted_steps > 0


@pytest.mark.long
def test_parts_of_the_layers_give_the_same(shelf):
  with engine(shelf, 0.25) as at:
    want = said(ask(at, PROMPTS[0]))
  with rj.store.Store(host=1 << 26) as store:
    for prompt in (np.concatenate([DOCUMENT, drawn(9, 3)]), PROMPTS[0]):
      with engine(store, 0.25, layer_parts=2) as at:
        result = ask(at, prompt)
    assert result.kept_tokens == 16 and said(result) == want


@pytest.mark.long
def test_a_store_on_disk_that_lost_a_chunk(tmp_path):
  options = dict(disk=(tmp_path, 1 << 26))
  with rj.store.Store(**options) as store, engine(store, 0.25) as at:
    ask(at, PROMPTS[0])
  with rj.store.Store(**options) as store, engine(store, 0.25) as at:
    before = said(ask(at, PROMPTS[0]))
    assert at.counters.important_rows == 1 and store.counters.disk_bytes > 0
  # Of some segment a chunk of keys or values.
  chunks = [x for x in tmp_path.rglob("*") if x.is_file()]
  sizes = [x.stat().st_size for x in chunks]
  chunks[int(np.argmax(sizes))].unlink()
  with rj.store.Store(**options) as store, engine(store, 1) as at:
    assert said(ask(at, PROMPTS[0])) == whole()
    assert at.counters.important_rows == 0 < at.counters.important_failed
  with rj.store.Store(**options) as store, engine(store, 0.25) as at:
    # It was written anew.
    assert said(ask(at, PROMPTS[0])) == before
    assert at.counters.important_rows == 1


@pytest.mark.long
def test_heads_that_are_named_choose_the_part(shelf):
  def answer(probes):
    how = ImportantShare(
      share=0.25, segment=SEGMENT, **HOW | {"probes": probes}
    )
    with engine(shelf, important=how) as at:
      ask(at, PROMPTS[0])
    with engine(shelf, important=how) as at:
      result = ask(at, PROMPTS[0])
    assert result.kept_tokens == 16
    return said(result)

  layers = len(model().config.layers)
  first = answer(1)
  assert answer(np.array([0])) == first
  assert answer(np.zeros((layers, 1), np.int32)) == first


def test_a_share_is_written_as_a_number_unless_heads_are_named():
  config = lambda **how: EngineConfig(
    important=ImportantShare(share=0.25, **how)
  )
  assert config().to_dict() == {"important": 0.25}
  for probes in (np.array([0, 1]), np.array([[0]]), 2):
    refused(OptionError, config(probes=probes).to_dict, "important")


def test_heads_that_the_model_does_not_have_are_refused_at_once():
  shelf = rj.store.Store(host=1 << 20)
  for probes in (np.array([2]), np.array([0, 0]), np.array([[0]])):
    how = ImportantShare(segment=SEGMENT, probes=probes)
    refused(OptionError, lambda how=how: engine(shelf, important=how), "probes")


@pytest.mark.long
def test_packed_chunks_are_fewer_and_answer_the_same(shelf):
  read = []
  how = ImportantShare(segment=SEGMENT, chunk=8, probes=1, alpha=9)
  for _ in range(2):
    with engine(shelf, important=how) as at:
      results = [said(ask(at, PROMPTS[1])) for _ in range(2)]
      assert results[0] == results[1]
    read.append(at.counters.important_bytes)
  # The first request of all found the chunks as they were computed.
  assert read[1] < read[0]
  assert at.counters.important_bytes_left > 0


@pytest.mark.long
def test_tenants_and_other_models_find_nothing(shelf):
  with engine(shelf, 0.25) as at:
    assert said(ask(at, PROMPTS[0], salt="b")) == whole()
    assert at.counters.important_rows == 0
  # Calls of other shapes compute other bits.
  with engine(shelf, 0.25, piece=32) as at:
    assert ask(at, PROMPTS[0]).kept_tokens is None
  # So much behind a prefix is computed with it.
  with engine(shelf, 0.25, longest=192) as at:
    ask(at, np.concatenate([DOCUMENT, drawn(4, 70)]))
    assert at.counters.important_rows == 0


def test_figures_and_usage(shelf):
  with engine(shelf, 0.25) as at:
    ask(at, PROMPTS[0])
    shown = {x.name: x.value for x in at.figures()}
    assert shown["important_rows_total"] == 1
    assert shown["important_tokens_total"] == 16
    assert shown["important_bytes_total"] == at.counters.important_bytes > 0
  with engine() as at:
    assert not [x for x in at.figures() if x.name.startswith("important")]


@pytest.mark.long
def test_what_is_refused(tmp_path):
  store = rj.store.Store(host=1 << 20)
  part = ImportantShare(segment=SEGMENT)
  make = lambda **options: lambda: engine(store, **options)
  refused(OptionError, lambda: engine(important=0.25), "store")
  for wrong in (0, 1.5):
    refused(OptionError, make(important=wrong), "important")
  refused(OptionError, lambda: ImportantShare(share=2), "share")
  refused(OptionError, make(important=part, page=64), "whole pages")
  refused(
    OptionError, make(important=part, cache_kind="int8"), "cache_kind", "int8"
  )
  refused(OptionError, make(important=part, cache_kind="unrotated"), "unrot")
  refused(OptionError, make(important=part, share="nothing"), "share")
  refused(OptionError, make(important=part, layout="contiguous"), "layout")
  how = rj.train.Lora(rank=2)
  adapters = {"a": (how, how.start(model()))}
  refused(OptionError, make(important=part, adapters=adapters), "adapters")
  other = functools.partial(
    Engine, store=store, important=part, page=PAGE, capacity=256
  )
  for family, word in (("gemma3", "mask"), ("gpt_oss", "mask")):
    refused(ConfigError, lambda family=family: other(model(family)), word)
  with engine(store, 0.25) as at:
    work = lambda: ClusterWorker(at, router=("127.0.0.1", 1), key=b"k" * 16)
    refused(OptionError, work, "important")

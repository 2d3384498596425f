"""An engine whose prompts are read by the tiles that a pattern chooses."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.serve import Engine, Request
from ringjax.serve.cluster.worker import check_engine
from ringjax.serve.engine_config import EngineConfig
from tests.helpers import SMALL, refused

HALF = "sparse:xattention,threshold=0.5,block=64"
ALL = "sparse:xattention,threshold=1,block=64"


@functools.cache
def small():
  return rj.models.create(SMALL | {"num_hidden_layers": 2}, seed=1)


@functools.cache
def prompts():
  """Three prompts, of which the first two begin alike for 140 tokens."""
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(0, 64, n).tolist()
  start = draw(140)
  return start + draw(63), start + draw(31), draw(97)


def answers(prefill, requests, tokens=4, **options):
  """Tokens and log-probabilities of requests, and the engine's counters."""
  sizes = {"rows": 3, "piece": 64, "pieces": 2, "longest": 288}
  options = sizes | {"capacity": 1024, "prefill": prefill} | options
  with Engine(small(), **options) as engine:
    handles = [
      engine.submit(Request(prompt=x, max_new_tokens=tokens, logprobs=0))
      for x in requests
    ]
    engine.run()
    results = [handle.result() for handle in handles]
    counters = engine.counters
  return [
    (list(x.tokens), [token.logprob for token in x.answers[0].logprobs])
    for x in results
  ], counters


@functools.cache
def alone():
  return [answers(HALF, [x])[0][0] for x in prompts()]


def test_a_row_has_the_same_bits_alone_and_in_a_crowd():
  """Also after a prefix of another prompt, of which whole chunks are reused."""
  crowd, counters = answers(HALF, prompts())
  assert crowd == alone()
  assert counters.cached_tokens == 128


@pytest.mark.slow
def test_it_reads_what_a_session_reads_in_chunks():
  dense, _ = answers(None, prompts()[:1])
  assert dense[0][1] != alone()[0][1]
  for prompt, (tokens, _) in zip(prompts(), alone(), strict=True):
    want = rj.infer.generate(
      small(), [prompt], max_new_tokens=4, prefill=HALF, chunk=64
    )
    assert want.tokens[0].tolist() == tokens


@pytest.mark.long
def test_a_pattern_that_keeps_all_tiles_gives_the_bits_of_dense_attention():
  dense, _ = answers(None, prompts()[:1])
  assert answers(ALL, prompts()[:1])[0] == dense


@pytest.mark.long
@pytest.mark.parametrize(
  "options", [{"speculate": "lookup"}, {"layer_parts": 2}], ids=str
)
def test_drafts_and_parts_of_the_layers_change_no_token(options):
  got, _ = answers(HALF, prompts(), **options)
  assert [tokens for tokens, _ in got] == [tokens for tokens, _ in alone()]


@pytest.mark.long
def test_rows_that_make_room_come_back_with_their_keys():
  got, counters = answers(HALF, prompts(), capacity=320, tokens=60)
  lonely = [answers(HALF, [x], tokens=60)[0][0] for x in prompts()]
  assert got == lonely and counters.preemptions


@pytest.mark.long
def test_codes_are_read_by_tiles_as_alone():
  got, _ = answers(HALF, prompts(), cache_kind="int8")
  assert got[1] == answers(HALF, prompts()[1:2], cache_kind="int8")[0][0]


def test_what_an_engine_does_not_read_is_refused_by_name():
  config = functools.partial(EngineConfig, prefill=HALF, piece=64)
  for options, word in (
    ({"prompt_tile": 16}, "prompt_tile"),
    ({"row_tile": 8}, "row_tile"),
    ({"budget": 100}, "budget"),
    ({"share": "answers"}, "share"),
    ({"layout": "contiguous"}, "layout"),
    ({"preempt": "recompute"}, "preempt"),
    ({"piece": 96}, "piece"),
    ({"prefill": "ring"}, "in chunks"),
    ({"prefill": "sparse:xattention,size=3"}, "size=3"),
    ({"prefill": f"{HALF},max_left_out=0.1"}, "max_left_out"),
  ):
    refused(OptionError, lambda options=options: config(**options), word)
  engine = functools.partial(
    Engine, small(), rows=2, capacity=512, piece=64, prefill=HALF
  )
  refused(OptionError, lambda: engine(page=128), "page")
  chooses = rj.train.with_sparse_attention(small(), "moba:block=4,count=2")
  refused(
    OptionError, lambda: Engine(chooses, prefill=HALF, piece=64), "mean keys"
  )
  with engine() as instance:
    refused(OptionError, lambda: check_engine(instance), HALF)

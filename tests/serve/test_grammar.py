"""An answer by a grammar ends where the grammar does."""

from __future__ import annotations

import re

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.serve import Engine, Request, RowSampling
from ringjax.serve.api.grammar import GrammarCompiler

pytest.importorskip("llguidance")
END = Bytes().eos_ids[0]
# Of one length, of several, and one that only the end can end.
REGEXES = ("[ab]{3}", "x?", "(ab|c){1,4}")


@pytest.fixture(
  scope="module",
  params=[
    "lookup:count=2,adapt=false",
    pytest.param(None, marks=pytest.mark.long),
  ],
)
def engine(request):
  config = dict(
    model_type="llama",
    vocab_size=262,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
  )
  with Engine(
    rj.models.create(config, seed=0),
    rows=4,
    capacity=256,
    longest=48,
    page=16,
    piece=16,
    pieces=2,
    tokenizer=Bytes(),
    speculate=request.param,
  ) as made:
    yield made


def ask(engine, regex, **options):
  settings = dict(n=1, sampling=RowSampling(temperature=1.0)) | options
  rows = settings.get("beams") or settings["n"]
  mask = GrammarCompiler(Bytes(), engine.vocab).mask(None, regex, rows)
  prompt = np.frombuffer(b"abab", np.uint8).astype(np.int32)
  return engine.submit(
    Request(prompt=prompt, max_new_tokens=20, mask=mask, **settings)
  )


def check(answer, regex):
  assert (answer.finish, answer.stopped) == ("stop", END), answer
  assert re.fullmatch(regex, answer.text), answer.text
  assert bytes(answer.tokens[:-1]).decode() == answer.text
  assert answer.tokens[-1] == END


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize(
  "options",
  [
    {},
    dict(n=3),
    # Stops of the request's own are not taken away.
    dict(stop=["zz", 255]),
    dict(beams=2, sampling=RowSampling()),
    dict(logprobs=2, sampling=RowSampling(logit_bias={END: -50.0})),
  ],
)
def test_an_answer_without_stops_ends_with_its_grammar(engine, regex, options):
  handle = ask(engine, regex, **options)
  for answer in handle.result().answers:
    check(answer, regex)


def test_tokens_that_come_one_by_one_end(engine):
  handle = ask(engine, "[ab]{3}")
  assert list(handle) == handle.answers[0].tokens
  check(handle.answers[0], "[ab]{3}")


def test_a_shorter_request_ends_before_its_grammar(engine):
  mask = GrammarCompiler(Bytes(), engine.vocab).mask(None, "[ab]{9}", 1)
  handle = engine.submit(Request(prompt=[1], max_new_tokens=4, mask=mask))
  assert handle.result().finish == "length"


def test_a_mask_s_ends_are_stops_of_its_request():
  mask = GrammarCompiler(Bytes(), 262).mask(None, "a", 1)
  assert mask.ends == (END,)
  request = Request(prompt=[1], max_new_tokens=4, stop=[3, "x"], mask=mask)
  assert request.stops.ids == (3, END) and request.stops.strings == ("x",)
  plain = Request(prompt=[1], max_new_tokens=4, mask=lambda tokens: None)
  assert plain.stops.ids == ()

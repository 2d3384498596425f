"""A prompt that one engine read and another answers, over TCP."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from ringjax.serve import Engine, Request
from tests.helpers import swept

KEY = bytes(range(32))


def engine(model, **options):
  settings = dict(rows=2, capacity=256, longest=128, piece=16, pieces=2)
  return Engine(model, **settings | options)


def answer(at, prompt):
  return at.submit(
    Request(prompt=prompt, max_new_tokens=6, logprobs=0)
  ).result()


def move(source, publisher, target, prompt, **more):
  """The prefix of one engine to another; how many tokens came."""
  sent = rj.serve.export_prefix(source, prompt, **more)
  numbers = publisher.new_numbers(len(sent.pages))
  pages = dict(zip(numbers, sent.pages, strict=True))
  ticket = publisher.publish(pages, sent.layout)
  pulled = transfer.pull(ticket, publisher.address, KEY)
  assert pulled.reads == 1
  return rj.serve.import_prefix(target, prompt, ticket, pulled, **more)


def line(at, prompt):
  """The bytes of each array that an engine has of a prompt, by token."""
  pages = rj.serve.export_prefix(at, prompt).pages
  return [
    np.moveaxis(np.concatenate(x, axis=2), 2, 0).view(np.uint8)
    for x in zip(*pages, strict=True)
  ]


@pytest.mark.parametrize(
  ("family", "devices", "pages", "kind"),
  swept(
    [
      ("llama3", 1, (16, 32), "dense"),
      ("llama3", 1, (32, 16), "int8"),
      ("llama3", 4, (16, 64), "dense"),
      ("deepseek_v3", 1, (64, 16), "dense"),
    ],
    [("llama3", 1, (16, 32), "dense")],
  ),
)
def test_one_engine_reads_and_another_answers(
  loaded, family, devices, pages, kind
):
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, model.config.vocab, 101).astype(np.int32)
  options = dict(cache_kind=kind, mesh=mesh)
  store = rj.store.Store(host=1 << 24)
  with (
    engine(model, page=pages[0], **options) as source,
    engine(model, page=pages[1], store=store, **options) as target,
    transfer.Publisher(KEY) as publisher,
  ):
    want = answer(source, prompt)
    came = move(source, publisher, target, prompt)
    got = answer(target, prompt)
    # Attention does not see the order of the keys before a query; this does.
    for mine, theirs in zip(
      line(source, prompt), line(target, prompt), strict=True
    ):
      np.testing.assert_array_equal(mine[:came], theirs[:came])
    assert publisher.offered == 0
  # All pages of the coarser of the two.
  assert came == 101 // max(pages) * max(pages)
  assert got.cached_tokens == came and want.cached_tokens == 0
  assert got.tokens.tolist() == want.tokens.tolist()
  logprobs = [
    [x.logprob for x in result.answers[0].logprobs] for result in (got, want)
  ]
  np.testing.assert_allclose(*logprobs, atol=1e-4)
  assert target.counters.prompt_tokens == 101 - came


def test_what_does_not_fit_is_refused(loaded):
  model, _ = loaded("llama3")
  prompt = np.arange(70, dtype=np.int32)
  store = rj.store.Store(host=1 << 24)
  with (
    engine(model, page=16) as source,
    engine(model, page=16, store=store, cache_kind="int8") as coded,
    transfer.Publisher(KEY) as publisher,
  ):
    with pytest.raises(rj.OptionError, match="no page of 16 is known"):
      rj.serve.export_prefix(source, prompt)
    answer(source, prompt)
    with pytest.raises(rj.OptionError, match="no page of 16 is known"):
      rj.serve.export_prefix(source, prompt, salt="another tenant")
    with pytest.raises(rj.OptionError, match="without a store"):
      move(source, publisher, source, prompt)
    with pytest.raises(rj.OptionError, match="cache_kind"):
      move(source, publisher, coded, prompt)

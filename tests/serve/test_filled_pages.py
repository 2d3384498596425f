"""Pages as a TPU has them, with zeros behind the numbers of a token."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from ringjax.serve import Engine, Request
from tests.helpers import as_tpu, swept


def answers(model, asked, **options):
  settings = dict(rows=3, capacity=512, longest=128, piece=16, pieces=2)
  with Engine(model, **settings | options) as one:
    handles = [
      one.submit(Request(prompt=x, max_new_tokens=8, logprobs=0)) for x in asked
    ]
    one.run()
    found = [x.result().answers[0] for x in handles]
    widths = {
      shape[-1] for shape, _ in one._pool.page_shapes(0) if len(shape) == 4
    }
  return found, widths


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices", "option", "value"),
  swept(
    [
      ("llama3", 1, "page", 16),
      ("llama3", 4, "cache_kind", "unrotated"),
      ("llama3", 1, "dtype", "bfloat16"),
      ("deepseek_v3", 4, "page", 32),
      ("deepseek_v32", 1, "page", 16),
      ("gemma3", 1, "page", 16),
      ("gpt_oss", 1, "share", "answers"),
      ("falcon_rw", 1, "page", 16),
      ("llama3", 1, "speculate", "early:widths=(2,2),best=3,adapt=false"),
      ("deepseek_v3", 4, "speculate", "lookup:count=3,adapt=false"),
    ],
    [
      ("llama3", 4, "cache_kind", "unrotated"),
      ("deepseek_v3", 4, "speculate", "lookup:count=3,adapt=false"),
    ],
  ),
)
def test_answers_are_the_same(
  loaded, monkeypatch, family, devices, option, value
):
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(0)
  asked = [
    rng.integers(0, model.config.vocab, n).astype(np.int32)
    for n in (70, 33, 12, 5)
  ]
  # Two begin alike.
  asked[1][:20] = asked[0][:20]
  options = {"mesh": mesh, option: value}
  want, widths = answers(model, asked, **options)
  assert max(widths) < 128
  as_tpu(monkeypatch)
  got, widths = answers(model, asked, **options)
  assert widths <= {0, 128, 256}
  for one, other in zip(want, got, strict=True):
    assert one.tokens == other.tokens
    logprobs = [[x.logprob for x in two.logprobs] for two in (one, other)]
    np.testing.assert_allclose(*logprobs, atol=1e-4)


@pytest.mark.long
def test_filled_up_pages_move(loaded, monkeypatch):
  as_tpu(monkeypatch)
  model, _ = loaded("llama3")
  prompt = np.arange(70, dtype=np.int32)
  options = dict(rows=2, capacity=256, longest=128)
  store = rj.store.Store(host=1 << 24)
  with (
    Engine(model, page=16, **options) as source,
    Engine(model, page=32, store=store, **options) as target,
    rj.transfer.Publisher(bytes(32)) as publisher,
  ):
    ask = Request(prompt=prompt, max_new_tokens=6)
    want = source.submit(ask).result()
    sent = rj.serve.export_prefix(source, prompt)
    pages = dict(enumerate(sent.pages))
    ticket = publisher.publish(pages, sent.layout, labels=sent.labels)
    pulled = rj.transfer.pull(ticket, publisher.address, bytes(32))
    assert rj.serve.import_prefix(target, prompt, ticket, pulled) == 64
    got = target.submit(ask).result()
    assert got.cached_tokens == 64
    assert got.tokens.tolist() == want.tokens.tolist()

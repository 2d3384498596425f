"""Prompts that are read layers by layers, and pages that leave meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from ringjax.errors import CheckpointFormatError
from ringjax.kv.storage.page_pool import PagePool
from ringjax.serve import Engine, Request
from tests.helpers import SMALL, swept

KEY = bytes(range(32))
DEEP = SMALL | dict(num_hidden_layers=5, max_position_embeddings=256)


def engine(model, **options):
  settings = dict(rows=2, capacity=256, longest=128, piece=16, pieces=2)
  return Engine(model, **settings | options)


def prompts(vocab, *sizes):
  rng = np.random.default_rng(0)
  return [rng.integers(0, vocab, n).astype(np.int32) for n in sizes]


def answers(at, asked, **more):
  handles = [
    at.submit(Request(prompt=x, max_new_tokens=6, logprobs=0, **more))
    for x in asked
  ]
  at.run()
  return [x.result().answers[0] for x in handles]


def check_same(model, parts, *, rounded=False, **options):
  """An engine by parts answers as one of whole programs."""
  asked = prompts(model.config.vocab, 75, 40, 17)
  found = []
  for count in (1, parts):
    with engine(model, layer_parts=count, **options) as one:
      assert len(one.layer_parts) == count
      found.append(answers(one, asked))
  for want, got in zip(*found, strict=True):
    assert got.tokens == want.tokens
    logprobs = [[x.logprob for x in one.logprobs] for one in (got, want)]
    np.testing.assert_allclose(*logprobs, atol=1e-4 if rounded else 1e-5)


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("family", "devices", "option", "value"),
  swept(
    [
      ("llama3", 1, "page", 16),
      ("llama3", 4, "cache_kind", "int8"),
      ("deepseek_v3", 1, "page", 16),
      ("gemma3n", 1, "page", 16),
      ("gemma3", 1, "page", 16),
      ("gpt_oss", 1, "cache_kind", "dense"),
      ("llama_dynamic", 1, "page", 16),
      ("llama3", 1, "speculate", "lookup:count=3,adapt=false"),
      ("llama3", 1, "layout", "contiguous"),
    ],
    [("llama3", 4, "cache_kind", "int8"), ("gemma3n", 1, "page", 16)],
  ),
)
def test_parts_are_the_layers(loaded, family, devices, option, value):
  model, mesh = loaded(family, devices)
  check_same(model, 2, rounded=devices > 1, mesh=mesh, **{option: value})


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["host", "device=.4,host=.2,disk=.4"])
def test_parts_of_layers_in_several_memories(tmp_path, placement):
  rj.models.save(rj.models.create(DEEP, seed=0), tmp_path / "model")
  model = rj.models.load(tmp_path / "model", placement=placement)
  check_same(model, 3)


@pytest.mark.slow
def test_parts_with_adapters():
  model = rj.models.create(DEEP, seed=0)
  how = rj.train.Lora(rank=2)
  params = how.start(model, seed=1)
  params = jax.tree.map(lambda x: x + 0.1, params)
  asked, found = prompts(64, 50), []
  for count in (1, 5):
    with engine(model, adapters={"a": (how, params)}, layer_parts=count) as one:
      found.append(
        [answers(one, asked, adapter=name)[0].tokens for name in ("a", "")]
      )
  assert found[0] == found[1] and found[0][0] != found[0][1]


@pytest.mark.long
def test_where_layers_are_cut(loaded):
  model = rj.models.create(DEEP, seed=0)
  parts = lambda model, count: engine(model, layer_parts=count).layer_parts
  assert parts(model, 1) == ((0, 5),)
  assert parts(model, 2) == ((0, 2), (2, 5))
  assert parts(model, 4) == ((0, 1), (1, 2), (2, 4), (4, 5))
  with pytest.raises(rj.OptionError, match="at most 5 for this mistral of 5"):
    engine(model, layer_parts=6)
  with pytest.raises(rj.OptionError, match="layer_parts"):
    engine(model, layer_parts=0)
  # Its last four layers share keys.
  shares, _ = loaded("gemma3n")
  assert parts(shares, 2) == ((0, 1), (1, 5))
  with pytest.raises(rj.OptionError, match="at most 2"):
    engine(shares, layer_parts=3)
  recurrent, _ = loaded("mamba2")
  with pytest.raises(rj.OptionError, match="recurrent layers"):
    engine(recurrent, layer_parts=2)


class Leaving:
  """Takes the pages of a prompt from an engine, layers by layers."""

  def __init__(self, source, prompt, **more):
    self.source, self.prompt, self.more = source, prompt, more
    self.hashes, self.pages = rj.serve.PrefixHashes(), 0
    self.begun, self.sent, self.early = [], [], []
    source.on_layers, source.on_step = self.layers, self.step

  def layers(self, part, pieces, pool):
    assert isinstance(pool, PagePool)
    assert any(piece.row.prompt.size == self.prompt.size for piece in pieces)
    copies = rj.serve.begin_layers(
      self.source,
      pool,
      self.prompt,
      part,
      first=self.pages,
      most=100,
      hashes=self.hashes,
      **self.more,
    )
    if copies is not None:
      self.begun.append(copies)

  def step(self):
    if not self.begun:
      return
    # Before the step's tokens are known.
    early = [copies.result() for copies in self.begun]
    self.early += early
    last = rj.serve.export_prefix(
      self.source,
      self.prompt,
      first=self.pages,
      layers=self.source.layer_parts[-1],
      hashes=self.hashes,
      **self.more,
    )
    self.sent.append([*early, last])
    self.begun, self.pages = [], self.pages + len(last.pages)


def published(publisher, sent):
  """(ticket, pulled) of an export."""
  numbers = publisher.new_numbers(len(sent.pages))
  pages = dict(zip(numbers, sent.pages, strict=True))
  ticket = publisher.publish(pages, sent.layout, labels=sent.labels)
  return ticket, transfer.pull(ticket, publisher.address, KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "parts", "devices", "pages", "kind"),
  swept(
    [
      ("llama3", 2, 1, (16, 32), "dense"),
      ("llama3", 2, 4, (32, 16), "int8"),
      ("deepseek_v3", 2, 1, (16, 16), "dense"),
      ("gemma3n", 2, 1, (16, 16), "dense"),
      ("gemma3", 2, 4, (16, 16), "dense"),
    ],
    [("gemma3", 2, 4, (16, 16), "dense")],
  ),
)
def test_pages_leave_layers_by_layers(
  loaded, family, parts, devices, pages, kind
):
  model, mesh = loaded(family, devices)
  (prompt,) = prompts(model.config.vocab, 101)
  options = dict(cache_kind=kind, mesh=mesh)
  store = rj.store.Store(host=1 << 24)
  with (
    engine(model, page=pages[0], layer_parts=parts, **options) as source,
    engine(model, page=pages[1], store=store, **options) as target,
    transfer.Publisher(KEY) as publisher,
  ):
    leaving = Leaving(source, prompt)
    (want,) = answers(source, [prompt])
    source.on_layers = source.on_step = None
    whole = rj.serve.export_prefix(source, prompt)
    # Each step of 32 tokens.
    assert [len(x) for x in leaving.sent] == [parts] * 3
    sizes = [x.layout.nbytes for x in leaving.sent[0]]
    assert sum(sizes) == whole.layout.nbytes and min(sizes) > 0
    join, first, came = rj.serve.LayerParts(target), 0, 0
    for some in leaving.sent:
      found = [join.add(*published(publisher, x)) for x in some]
      assert found[:-1] == [None] * (parts - 1)
      ticket, pulled = found[-1]
      assert ticket.layout == whole.layout
      for n, page in enumerate(whole.pages[first:][: len(pulled.labels)]):
        for leaf, x in zip(ticket.layout.leaves, page, strict=True):
          np.testing.assert_array_equal(pulled.arrays[leaf.name][n], x)
      came = rj.serve.import_prefix(target, prompt, ticket, pulled, first=first)
      first += len(pulled.labels)
    assert came == 96 and publisher.offered == 0
    (got,) = answers(target, [prompt])
    assert target.counters.prompt_tokens == 5
    assert got.tokens == want.tokens


@pytest.mark.long
def test_layers_without_those_behind_them_are_forgotten():
  model = rj.models.create(DEEP, seed=0)
  (prompt,) = prompts(64, 70)
  store = rj.store.Store(host=1 << 24)
  with (
    engine(model, page=16, layer_parts=3) as source,
    engine(model, page=16, store=store) as target,
    transfer.Publisher(KEY) as publisher,
  ):
    leaving = Leaving(source, prompt)
    answers(source, [prompt])
    source.on_layers = source.on_step = None
    one, two = (
      [published(publisher, x) for x in some] for some in leaving.sent
    )
    whole = published(publisher, rj.serve.export_prefix(source, prompt))
    add = rj.serve.LayerParts(target).add
    assert add(*one[0]) is None and add(*one[1]) is None
    # Others come: of the first ones the last layers alone are of no use.
    assert add(*two[0]) is None and add(*one[2]) is None
    assert add(*whole)[0].layout == whole[0].layout
    for order in ((0, 2, 1), (1, 0, 2), (2,), (1, 2)):
      assert [add(*one[n]) for n in order] == [None] * len(order)
    some = [(x, dataclasses.replace(y, array_reads=1)) for x, y in two]
    found = [add(*x) for x in some]
    assert found[:2] == [None, None]
    assert (found[2][1].reads, found[2][1].array_reads) == (3, 3)


@pytest.mark.long
def test_of_a_failed_step_no_last_layers_leave(tmp_path, monkeypatch):
  rj.models.save(rj.models.create(DEEP, seed=0), tmp_path / "model")
  # On a mesh a program goes on where a read failed.
  mesh = rj.make_mesh((1,), ("model",), devices=jax.devices()[:1])
  model = rj.models.load(tmp_path / "model", mesh=mesh, placement="disk")
  (prompt,) = prompts(64, 40)
  with engine(model, page=16, longest=64, mesh=mesh, layer_parts=2) as source:
    leaving = Leaving(source, prompt)
    source.submit(Request(prompt=prompt, max_new_tokens=4))
    os.truncate(tmp_path / "model" / "model.safetensors", 1000)
    known = "ringjax.serve.engine.naming_faults"
    monkeypatch.setattr(known, lambda _: contextlib.nullcontext())
    with pytest.raises(CheckpointFormatError, match="changed"):
      source.step()
    # Some layers had left, which are of no use alone.
    assert leaving.early and not leaving.sent

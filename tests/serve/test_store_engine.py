"""An engine with a store answers as it does without, with fewer tokens read."""

from __future__ import annotations

import itertools
import json
import types

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import InputTypeError, OptionError
from ringjax.serve import Engine, Request, RowSampling
from ringjax.serve.prefix.store_link import StoreLink
from tests import object_servers
from tests.helpers import refused, swept

PAGE = 16


def engine(model, mesh=None, **options):
  settings = dict(
    rows=2, capacity=96, longest=96, page=PAGE, piece=16, pieces=2, mesh=mesh
  )
  return Engine(model, **settings | options)


def conversations(rng, vocab, *, turns=3, several=3, new=4):
  """Prompts in turns, each with the last one before it; more than fit."""
  texts = [rng.integers(0, vocab, 24).astype(np.int32) for _ in range(several)]
  found = []
  for _ in range(turns):
    for n, text in enumerate(texts):
      texts[n] = np.concatenate([text, rng.integers(0, vocab, 18)])
      texts[n] = texts[n].astype(np.int32)
      how = RowSampling(temperature=1.0, seed=n) if n % 2 else RowSampling()
      found.append(
        Request(prompt=texts[n], max_new_tokens=new, sampling=how, logprobs=2)
      )
  return found


def answers(at, requests):
  """What is answered, one request after another."""
  found = []
  for request in requests:
    result = at.submit(request).result()
    at.scheduler.tree.check()
    found.append([(a.tokens, a.logprobs) for a in result.answers])
  return found


def check(model, mesh, seed, store, **options):
  requests = conversations(np.random.default_rng(seed), model.config.vocab)
  with engine(model, mesh, share="nothing", **options) as plain:
    want = answers(plain, requests)
  with engine(model, mesh, store=store, **options) as at:
    assert answers(at, requests) == want
  # To close it again does nothing.
  at.close()
  assert at.counters.stored_tokens > 0
  assert at.counters.pages_out > 0 and at.counters.pages_in > 0
  # A new one begins with what the first one left.
  with engine(model, mesh, store=store, **options) as again:
    assert answers(again, requests) == want
  total = sum(r.prompt.size for r in requests)
  assert again.counters.prompt_tokens < at.counters.prompt_tokens < total
  assert store.counters.errors == 0
  return at


@pytest.mark.long
def test_same_bits_as_without(loaded):
  # Layers that look back a window have pages of their own.
  model, _ = loaded("gpt_oss")
  store = rj.store.Store(host=1 << 24)
  check(model, None, 0, store)
  assert store.counters.host_hits > 0 and store.counters.disk_hits == 0


@pytest.mark.long
def test_from_the_disk_on_a_mesh(loaded, tmp_path):
  model, mesh = loaded("llama3", 4)
  with rj.store.Store(disk=(tmp_path / "blocks", 1 << 24)) as store:
    check(model, mesh, 1, store, cache_kind="int4", capacity=128)
  assert store.counters.disk_hits > 0 and store.counters.written > 0


@pytest.mark.long
def test_pages_are_stored_by_parts_as_in_several_processes(loaded, monkeypatch):
  """Each device's heads of its pages; here one process has all of them."""
  from ringjax.serve.prefix import page_copies, store_link

  model, mesh = loaded("gpt_oss", 4)
  monkeypatch.setattr(store_link, "page_copies", page_copies.SpreadPages)
  check(model, mesh, 4, rj.store.Store(host=1 << 24), capacity=128)


def test_from_an_object_storage_after_a_restart(loaded):
  """The second engine has another store, as another machine."""
  model, _ = loaded("llama3")
  requests = conversations(np.random.default_rng(2), model.config.vocab)[:3]
  results, counters = [], []
  with object_servers.served("memory") as bucket:
    for _ in range(2):
      with (
        rj.store.Store(objects=(f"{bucket}/pages", 1 << 24)) as store,
        engine(model, None, store=store) as at,
      ):
        results.append(answers(at, requests))
      counters.append((at.counters.stored_tokens, store.counters))
  assert results[0] == results[1]
  (first_tokens, first), (again_tokens, again) = counters
  assert again_tokens > first_tokens and again.object_hits > 0
  assert first.objects_written > 0 and first.errors == again.errors == 0


EVERY = itertools.product(
  ("llama3", "gpt_oss", "deepseek_v3", "gemma2", "gemma3_text"),
  ("windowed", "int8", "unrotated", "hadamard3"),
  (1, 4),
)


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("family", "kind", "devices"),
  swept(
    EVERY,
    [
      ("llama3", "windowed", 4),
      ("llama3", "unrotated", 1),
      ("gpt_oss", "int8", 4),
      ("gpt_oss", "unrotated", 1),
      ("deepseek_v3", "hadamard3", 1),
      ("deepseek_v3", "windowed", 4),
      ("gemma2", "int8", 1),
      ("gemma3_text", "hadamard3", 4),
    ],
  ),
)
def test_more_kinds(loaded, tmp_path, family, kind, devices):
  model, mesh = loaded(family, devices)
  options = dict(cache_kind=kind, capacity=128)
  check(model, mesh, 2, rj.store.Store(host=1 << 24), **options)
  with rj.store.Store(disk=(tmp_path, 1 << 24), host=20000) as store:
    check(model, mesh, 3, store, **options)


def ask(at, prompt, **options):
  request = Request(prompt=prompt, max_new_tokens=2, **options)
  result = at.submit(request).result()
  return result.tokens.tolist(), result.cached_tokens


@pytest.mark.parametrize(
  ("reach", "first"), [(None, 0), (4, 9), (5, 8), (8, 8), (60, 0)]
)
def test_a_window_begins_in_the_page_of_its_first_token(reach, first):
  """Behind ten pages of four tokens."""
  link = types.SimpleNamespace(_tree=types.SimpleNamespace(page=4))
  assert StoreLink._first(link, reach, 10) == first


@pytest.mark.long
def test_who_finds_what(loaded, tmp_path):
  model, _ = loaded("llama3")
  prompt = np.arange(40, dtype=np.int32)
  with rj.store.Store(host=1 << 24, disk=(tmp_path, 1 << 24)) as store:
    with engine(model, store=store) as at:
      want, _ = ask(at, prompt, salt="a")
    with engine(model, store=store) as at:
      # Another tenant, and one that shares nothing.
      assert ask(at, prompt) == (want, 0)
      assert ask(at, prompt, salt="b") == (want, 0)
      assert ask(at, prompt, salt="a", share=False) == (want, 0)
      assert ask(at, prompt, salt="a") == (want, 32)
      assert at.counters.stored_tokens == 32
    # Other weights of the same shapes.
    other = rj.models.create(json.loads(model.source), seed=5)
    with engine(other, store=store) as at:
      assert ask(at, prompt, salt="a")[1] == 0
    # Corrupt files are computed again.
    store.flush()
    blocks = list(tmp_path.rglob("*.kv"))
    assert blocks
    for path in blocks:
      data = bytearray(path.read_bytes())
      data[-7] ^= 1
      path.write_bytes(data)
  store = rj.store.Store(disk=(tmp_path, 1 << 24))
  with store, engine(model, store=store) as at:
    with pytest.warns(RuntimeWarning, match="not what was written"):
      assert ask(at, prompt, salt="a") == (want, 0)
    assert store.disk.corrupt and store.counters.errors == 0


@pytest.mark.long
def test_crowds_that_are_cancelled_and_preempted(loaded, tmp_path):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(5)
  requests = conversations(rng, model.config.vocab, several=4, new=16)
  with engine(model, share="nothing") as plain:
    want = answers(plain, requests)
  with rj.store.Store(disk=(tmp_path, 1 << 24), host=30000) as store:
    with engine(model, store=store, rows=4, capacity=112) as at:
      handles = []
      for request in requests:
        handles.append(at.submit(request))
        doomed = at.submit(requests[rng.integers(len(requests))])
        for _ in range(rng.integers(0, 5)):
          at.step()
        doomed.cancel()
        at.scheduler.tree.check()
      at.run()
      at.scheduler.tree.check()
      assert [
        [(a.tokens, a.logprobs) for a in h.result().answers] for h in handles
      ] == want
      assert at.counters.stored_tokens > 0 and at.counters.preemptions > 0
    assert store.counters.errors == 0


@pytest.mark.long
def test_stores_that_are_refused(unchecked, loaded):
  model, _ = loaded("llama3")
  store = rj.store.Store(host=1 << 20)
  refused(InputTypeError, lambda: engine(model, store=1 << 20), "store", "int")
  refused(
    OptionError,
    lambda: engine(model, store=store, share="nothing"),
    "store",
    "nothing",
  )
  model, _ = loaded("qwen3_next")
  refused(OptionError, lambda: engine(model, store=store), "recurrent")


@pytest.mark.long
def test_copies_that_do_not_get_on(loaded, monkeypatch):
  from ringjax.serve.prefix import store_link

  model, _ = loaded("llama3")
  requests = conversations(np.random.default_rng(6), model.config.vocab)
  store = rj.store.Store(host=1 << 24)
  with engine(model, share="nothing") as plain:
    want = answers(plain, requests)
  monkeypatch.setattr(store_link, "_MOST_COPIES", 0)
  with engine(model, store=store) as at:
    assert answers(at, requests) == want
    assert at.counters.pages_lost > 0 and at.counters.pages_out == 0
  # What is left at the end is not given up.
  assert at.counters.pages_out > 0

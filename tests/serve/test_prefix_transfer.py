"""A prompt that one engine read and another answers, over TCP."""

from __future__ import annotations

import contextlib
import os
import types

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from ringjax.errors import CheckpointFormatError
from ringjax.serve import Engine, Request
from ringjax.serve.prefix import prefix_transfer
from ringjax.serve.prefix.prefix_tree import PrefixTree
from tests.helpers import SMALL, swept

KEY = bytes(range(32))


def engine(model, **options):
  settings = dict(rows=2, capacity=256, longest=128, piece=16, pieces=2)
  return Engine(model, **settings | options)


def answer(at, prompt):
  return at.submit(
    Request(prompt=prompt, max_new_tokens=6, logprobs=0)
  ).result()


def move(
  source, publisher, target, prompt, *, tokens=None, pages=None, devices=None
):
  """The prefix of one engine to another; how many tokens came."""
  which, tokens = pages, prompt if tokens is None else tokens
  on_devices = devices is not None
  before = publisher.device_bytes
  sent = rj.serve.export_prefix(source, prompt, on_devices=on_devices)
  numbers = publisher.new_numbers(len(sent.pages))
  pages = dict(zip(numbers, sent.pages, strict=True))
  ticket = publisher.publish(pages, sent.layout, labels=sent.labels)
  copied = prefix_transfer.copied_pages(source, len(pages)) * on_devices
  least = copied * sent.layout.nbytes
  # Where pages are over several devices some have copies.
  assert least <= publisher.device_bytes - before <= 8 * least
  pulled = transfer.pull(
    ticket, publisher.address, KEY, pages=which, devices=devices
  )
  assert which or (pulled.reads, pulled.array_reads) == (1, on_devices)
  return rj.serve.import_prefix(target, tokens, ticket, pulled)


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
@pytest.mark.parametrize("on_devices", [False, True])
def test_one_engine_reads_and_another_answers(
  loaded, family, devices, pages, kind, on_devices
):
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, model.config.vocab, 101).astype(np.int32)
  options = dict(cache_kind=kind, mesh=mesh)
  store = rj.store.Store(host=1 << 24)
  devices = transfer.DeviceServer() if on_devices else None
  with (
    engine(model, page=pages[0], **options) as source,
    engine(model, page=pages[1], store=store, **options) as target,
    transfer.Publisher(KEY, devices=devices) as publisher,
  ):
    want = answer(source, prompt)
    came = move(source, publisher, target, prompt, devices=devices)
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


@pytest.mark.long
def test_parts_are_looked_up_from_where_the_one_before_ended(monkeypatch):
  model = rj.models.create(SMALL, seed=0)
  prompt = np.random.default_rng(1).integers(0, 64, 400).astype(np.int32)
  looked = []

  with engine(model, page=16, capacity=512, longest=450) as source:
    tree = source.scheduler.tree
    plain = tree.chain

    def chain(root, pieces):
      found = plain(root, pieces)
      looked.append(len(found))
      return found

    answer(source, prompt)
    monkeypatch.setattr(tree, "chain", chain)
    whole = rj.serve.export_prefix(source, prompt)
    assert looked == [25]
    hashes, looked[:] = prefix_transfer.PrefixHashes(), []

    def part(first):
      return rj.serve.export_prefix(source, prompt, first=first, hashes=hashes)

    parts = [part(first) for first in (0, 7, 20)]
    assert looked == [25, 18, 5]
    for first, found in zip((0, 7, 20), parts, strict=True):
      assert found.labels == whole.labels[first:]
      for mine, theirs in zip(found.pages, whole.pages[first:], strict=True):
        for a, b in zip(mine, theirs, strict=True):
          np.testing.assert_array_equal(a, b)
    # Other prompts need the room; then it is read again.
    for seed in range(2, 5):
      other = np.random.default_rng(seed).integers(0, 64, 430)
      answer(source, other.astype(np.int32))
    with pytest.raises(rj.OptionError, match="no page of 16 is known"):
      part(20)
    answer(source, prompt)
    looked.clear()
    assert part(20).labels == whole.labels[20:] and looked == [25]


@pytest.mark.long
def test_pages_of_an_adapter_are_its_own():
  """By all of its numbers, whatever its place among those of an engine."""
  model = rj.models.create(SMALL, seed=1)
  how = rj.train.Lora(rank=2, alpha=8.0)
  random = np.random.default_rng(3)
  params = {
    path: {
      "a": np.asarray(part["a"]),
      "b": random.standard_normal(part["b"].shape).astype(np.float32),
    }
    for path, part in how.start(model).items()
  }
  path = next(x for x in params if x.endswith("attention.k"))
  a = params[path]["a"].copy()
  a.reshape(-1)[-1] += 0.5
  other = {**params, path: {**params[path], "a": a}}
  first, second = (how, params), (how, other)
  prompt = np.arange(40, dtype=np.int32)
  ask = lambda name: Request(prompt=prompt, max_new_tokens=3, adapter=name)
  sizes = dict(page=16)
  with (
    rj.store.Store(host=1 << 24) as store,
    engine(model, adapters={"a": first, "b": second}, **sizes) as source,
    engine(
      model, adapters={"b": second, "a": first}, store=store, **sizes
    ) as swapped,
    engine(model, adapters={"a": second}, store=store, **sizes) as changed,
    transfer.Publisher(KEY) as publisher,
  ):
    source.submit(ask("a")).result()
    sent = rj.serve.export_prefix(source, prompt, adapter="a")
    pages = dict(zip(publisher.new_numbers(2), sent.pages, strict=True))
    ticket = publisher.publish(
      pages, sent.layout, labels=sent.labels, readers=9
    )
    pulled = transfer.pull(ticket, publisher.address, KEY)
    take = lambda at, name: rj.serve.import_prefix(
      at, prompt, ticket, pulled, adapter=name
    )
    for at, name in ((changed, "a"), (swapped, "b"), (swapped, "")):
      with pytest.raises(rj.OptionError, match="another adapter"):
        take(at, name)
    assert take(swapped, "a") == 32
    assert swapped.submit(ask("a")).result().cached_tokens == 32
    # The store has these pages now, and another engine's "a" finds none.
    store.flush()
    assert changed.submit(ask("a")).result().cached_tokens == 0
    with engine(
      model, adapters={"a": first, "b": second}, store=store, **sizes
    ) as again:
      assert again.submit(ask("a")).result().cached_tokens == 32


@pytest.mark.long
def test_what_does_not_fit_is_refused(loaded):
  model, _ = loaded("llama3")
  prompt = np.arange(70, dtype=np.int32)
  store = rj.store.Store(host=1 << 24)
  with (
    engine(model, page=16) as source,
    engine(model, page=16, store=store, cache_kind="int8") as coded,
    engine(model, page=32, store=store, shared_reads="never") as target,
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
    with pytest.raises(rj.OptionError, match="adapter: got 'x'"):
      rj.serve.export_prefix(source, prompt, adapter="x")
    other = np.where(np.arange(70) == 3, 9, prompt).astype(np.int32)
    for tokens, more in ((other, {}), (prompt, dict(pages=[1, 0]))):
      with pytest.raises(rj.OptionError, match="page 0 of the ticket"):
        move(source, publisher, target, prompt, tokens=tokens, **more)
    with pytest.raises(rj.PromptError, match="id 99999"):
      rj.serve.export_prefix(source, np.asarray([1, 99999]))


@pytest.mark.long
def test_no_page_of_a_failed_step_leaves(tmp_path, monkeypatch):
  rj.models.save(rj.models.create(SMALL, seed=0), tmp_path / "model")
  # On a mesh a program goes on where a read failed.
  mesh = rj.make_mesh((1,), ("model",), devices=jax.devices()[:1])
  model = rj.models.load(tmp_path / "model", mesh=mesh, placement="disk")
  prompt = np.arange(40, dtype=np.int32)
  with engine(model, page=16, longest=64, mesh=mesh) as source:
    handle = source.submit(Request(prompt=prompt, max_new_tokens=4))
    os.truncate(tmp_path / "model" / "model.safetensors", 1000)
    # As of a slow device, whose read fails when the step has been sent to it;
    # the engine raises that when it reads the step's tokens, in the next one.
    known = "ringjax.serve.engine.naming_faults"
    monkeypatch.setattr(known, lambda _: contextlib.nullcontext())
    assert source.step() and source.open
    assert source.prompt_progress(handle) == 32
    with pytest.raises(CheckpointFormatError, match="changed"):
      rj.serve.export_prefix(source, prompt)
    with pytest.raises(CheckpointFormatError, match="changed"):
      source.run()
    with pytest.raises(rj.OptionError, match="step failed"):
      rj.serve.export_prefix(source, prompt)


@pytest.mark.usefixtures("unchecked")
def test_a_part_begins_behind_the_one_before():
  """Of a prompt of six pages, of which each is a block of a tree."""
  chain = [Block(None, b"", -1)]
  for n in range(6):
    chain.append(Block(chain[-1], np.int32([n, n]).tobytes(), n))
    chain[-2].children[chain[-1].data] = chain[-1]
  tree = types.SimpleNamespace(page=2)
  tree.chain = lambda root, pieces: PrefixTree.chain(tree, root, pieces)
  tokens = np.repeat(np.arange(6, dtype=np.int32), 2)
  hashes = rj.serve.PrefixHashes()
  for first in (0, 2, 5):
    assert hashes.chain(tree, chain[0], tokens, first) == chain[1 + first :]


class Block:
  """A block of a tree, as far as a chain looks at it."""

  def __init__(self, parent, data, depth):
    self.parent, self.data, self.depth = parent, data, depth
    self.children = {}


def test_pages_are_hashed_once(monkeypatch):
  made = []
  hashed = prefix_transfer.next_digest
  monkeypatch.setattr(
    prefix_transfer,
    "next_digest",
    lambda before, data: made.append(data) or hashed(before, data),
  )
  tokens = np.arange(70, dtype=np.int32)
  alone = lambda tokens, page, start, count: rj.serve.PrefixHashes().of(
    tokens, page, start, count
  )
  want = alone(tokens, 16, b"a", 9)
  assert len(want) == len(set(want)) == 4
  hashes = rj.serve.PrefixHashes()
  made.clear()
  for count in (1, 3, 2, 9):
    assert hashes.of(tokens, 16, b"a", count) == want[:count]
  assert len(made) == 4
  # Of other pages, of another start and of other tokens.
  for args in ((tokens, 32, b"a"), (tokens, 16, b"b"), (tokens + 1, 16, b"a")):
    assert hashes.of(*args, 9) == alone(*args, 9) != want


@pytest.mark.long
def test_pages_are_of_their_tokens_and_in_their_order():
  model = rj.models.create(SMALL | {"max_position_embeddings": 256}, seed=0)
  other = rj.models.create(SMALL | {"max_position_embeddings": 256}, seed=1)
  prompt = np.random.default_rng(0).integers(0, 64, 90).astype(np.int32)
  changed = prompt.copy()
  changed[20] += 1
  with (
    engine(model, page=16) as source,
    engine(model, page=16, store=rj.store.Store(host=1 << 24)) as target,
    engine(other, page=16, store=rj.store.Store(host=1 << 24)) as stranger,
    transfer.Publisher(KEY) as publisher,
  ):
    answer(source, prompt)
    sent = rj.serve.export_prefix(source, prompt)
    assert sent.tokens == 80 and len(set(sent.labels)) == 5
    pages = dict(enumerate(sent.pages))
    ticket = publisher.publish(
      pages, sent.layout, labels=sent.labels, readers=9
    )
    again = {n + 50: x for n, x in pages.items()}
    bare = publisher.publish(again, sent.layout)
    pull = lambda ticket, **more: transfer.pull(
      ticket, publisher.address, KEY, **more
    )
    take = lambda tokens, pulled, at=target, **more: rj.serve.import_prefix(
      at, tokens, ticket, pulled, **more
    )
    swapped = pull(ticket, pages=[1, 0, 2, 3, 4])
    for tokens, pulled, number in (
      (changed, pull(ticket), 1),
      (prompt, swapped, 0),
      (prompt, pull(ticket, pages=[0, 2, 3]), 1),
      (prompt, pull(bare), 0),
      (prompt, pull(ticket, places=[0, 1, 3, 4, 5]), 2),
    ):
      with pytest.raises(rj.OptionError, match=f"page {number} of the ticket"):
        take(tokens, pulled)
    with pytest.raises(rj.OptionError, match="adapter: got 'x'"):
      take(prompt, pull(ticket), adapter="x")
    with pytest.raises(rj.OptionError, match="whole pages"):
      take(prompt, pull(ticket, want={"token": (0, 8)}))
    with pytest.raises(rj.OptionError, match="the same weights"):
      take(prompt, pull(ticket), stranger)
    assert not target.store_link.store.counters.put
    # Of a text that goes on otherwise it is what is alike.
    assert take(prompt[:70], pull(ticket)) == 64
    assert take(prompt, pull(ticket)) == 80
    got = answer(target, prompt)
    assert got.cached_tokens == 80
    assert got.tokens.tolist() == answer(source, prompt).tokens.tolist()


@pytest.mark.long
def test_only_what_the_store_keeps_is_counted():
  model = rj.models.create(SMALL | {"max_position_embeddings": 256}, seed=0)
  prompt = np.arange(64, dtype=np.int32)
  with (
    engine(model, page=16) as source,
    transfer.Publisher(KEY) as publisher,
  ):
    answer(source, prompt)
    # Room for less than the four pages, which drive one another out.
    store = rj.store.Store(host=int(2.5 * source.page_bytes))
    with engine(model, page=16, store=store) as target:
      came = move(source, publisher, target, prompt)
      assert came == answer(target, prompt).cached_tokens < 64


@pytest.mark.parametrize(
  "family",
  swept([("llama_dynamic",), ("phi3_longrope",)], [("llama_dynamic",)]),
)
def test_rotations_by_the_length_of_the_prompt(loaded, family):
  model, _ = loaded(family)
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, model.config.vocab, 90).astype(np.int32)
  store = rj.store.Store(host=1 << 24)
  options = dict(longest=100, cache_kind="dense")
  with (
    engine(model, page=16, **options) as source,
    engine(model, page=32, store=store, **options) as target,
    transfer.Publisher(KEY) as publisher,
  ):
    assert source.rotations(90) != source.rotations(10)
    want = answer(source, prompt)
    assert move(source, publisher, target, prompt) == 64
    got = answer(target, prompt)
    assert got.cached_tokens == 64
    assert got.tokens.tolist() == want.tokens.tolist()
    # Part of a prompt rotates otherwise: nothing is known of it.
    with pytest.raises(rj.OptionError, match="no page"):
      rj.serve.export_prefix(source, prompt[:20])


@pytest.mark.long
def test_codes_whose_tokens_are_last(monkeypatch):
  # As TPUs store them; 16 tokens of 16 bytes: sizes alone tell nothing.
  platform = property(lambda _: "tpu")
  monkeypatch.setattr("ringjax.kv.base.CacheSpec.platform", platform)
  config = SMALL | {"max_position_embeddings": 256, "head_dim": 32}
  model = rj.models.create(config, seed=0)
  prompt = np.random.default_rng(0).integers(0, 64, 70).astype(np.int32)
  store = rj.store.Store(host=1 << 24)
  with (
    engine(model, page=16, cache_kind="int4") as source,
    engine(model, page=32, cache_kind="int4", store=store) as target,
    transfer.Publisher(KEY) as publisher,
  ):
    leaves = rj.serve.prefix_layout(source).leaves
    assert {x.axes[-1] for x in leaves} == {"token"}
    want = answer(source, prompt)
    assert move(source, publisher, target, prompt) == 64
    got = answer(target, prompt)
    assert got.cached_tokens == 64
    assert got.tokens.tolist() == want.tokens.tolist()

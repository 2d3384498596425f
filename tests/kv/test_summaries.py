"""Summaries of keys in a cache: what calls write, and what changes leave."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import models
from ringjax.bench.program import Program
from ringjax.errors import OptionError
from ringjax.infer import Greedy, decode
from ringjax.kv.summaries.summary_layers import SummaryLayer
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.ops.attention.cached.block_reading import BlockReading
from ringjax.ops.attention.cached.native_reading import NativeReading
from ringjax.serve import Engine, Request
from ringjax.train.sparsify import sparse_config, with_sparse_attention
from tests import checkpoints
from tests.helpers import make_mesh, refused
from tests.train.test_step import CONFIG

BLOCKS = "moba:block=4,count=2"
NATIVE = "nsa:length=4,stride=2,block=4,count=3,initial=1,local=1,window=3"
KINDS = [BLOCKS, pytest.param(NATIVE, marks=pytest.mark.long)]


@functools.cache
def model_of(kind):
  """One layer, with random gates and compressed keys."""
  dense = rj.models.create(CONFIG | {"num_hidden_layers": 1}, seed=1)
  rng = np.random.default_rng(3)

  def noisy(path, p):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if "native" not in name:
      return p
    return p + jnp.asarray(rng.normal(0, 0.3, p.shape), p.dtype)

  return jax.tree_util.tree_map_with_path(
    noisy, with_sparse_attention(dense, kind)
  )


def tokens(rows=2, length=23, seed=0):
  return np.random.default_rng(seed).integers(
    1, CONFIG["vocab_size"], (rows, length), np.int32
  )


def read(model, cache, ids, chunk=1):
  """Logits of chunks of tokens, and the cache after them."""
  logits = []
  for first in range(0, ids.shape[1], chunk):
    out, cache = model(ids[:, first : first + chunk], cache=cache)
    logits.append(out)
  return np.concatenate(logits, 1), cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  "cache_kind",
  ["dense", *(pytest.param(x, marks=pytest.mark.long) for x in ("int8",))],
)
def test_reading_summaries_is_reading_all_keys(kind, cache_kind, monkeypatch):
  model, ids = model_of(kind), tokens()

  def answers():
    cache = model.init_cache(2, 24, kind=cache_kind)
    _, cache = model(ids[:, :14], cache=cache)
    return read(model, cache, ids[:, 14:])[0]

  kept = answers()
  monkeypatch.setattr(SummaryLayer, "_kept", lambda self, views: False)
  jax.clear_caches()
  want = answers()
  jax.clear_caches()
  np.testing.assert_allclose(kept, want, atol=1e-5, rtol=0)


def changed(model, how):
  """A cache of the first 14 tokens, after other tokens came and went."""
  ids, other = tokens(), tokens(seed=1)
  cache = model.init_cache(2, 24)
  if how == "load":
    _, source = model(ids[:, :14], cache=cache)
    cache = model.init_cache(2, 24)
    for row in range(2):
      for first, stop in ((0, 5), (5, 14)):
        cache = cache.load(row, source.export(row, first, stop))
    return cache
  if how == "rows":
    swapped = np.stack([ids[1], ids[0]])
    _, cache = model(swapped[:, :14], cache=cache)
    _, cache = model(other[:, :4], cache=cache)
    cache = cache.reset([0])
    _, source = model(ids[:, :14], cache=model.init_cache(2, 24))
    return cache.insert([1, 0], source.take([1, 0]))
  _, cache = model(ids[:, :14], cache=cache)
  if how == "snapshot":
    saved = cache.snapshot()
    _, cache = model(other[:, :6], cache=cache)
    return cache.restore(saved)
  _, cache = model(other[:, :6], cache=cache)
  if how == "keep_first":
    return cache.keep_first(jnp.zeros((2,), jnp.int32), 6)
  if how == "keep":
    return cache.keep(np.zeros((2, 6), bool))
  return cache.truncate(14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  "how",
  [
    "keep_first",
    *(
      pytest.param(x, marks=pytest.mark.long)
      for x in ("keep", "truncate", "snapshot", "rows", "load")
    ),
  ],
)
def test_tokens_that_went_leave_nothing(kind, how):
  model, ids = model_of(kind), tokens()
  got, _ = read(model, changed(model, how), ids[:, 14:])
  np.testing.assert_allclose(got, model(ids)[:, 14:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_grows(kind):
  model, ids = model_of(kind), tokens()
  cache = model.init_cache(2, 8).growing(4, 24)
  _, cache = model(ids[:, :6], cache=cache)
  logits = []
  for first in range(6, ids.shape[1]):
    cache = cache.with_room(1)
    out, cache = model(ids[:, first : first + 1], cache=cache)
    logits.append(out)
  assert cache.capacity == 24
  got = np.concatenate(logits, 1)
  np.testing.assert_allclose(got, model(ids)[:, 6:], atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("kind", [BLOCKS, NATIVE])
def test_shards_store_their_summaries(kind):
  """Of a prompt that goes around a ring, of chunks and of single tokens."""
  mesh, model, ids = make_mesh(4, "auto"), model_of(kind), tokens(length=28)
  placed = rj.models.place(model, mesh)
  cache = placed.init_cache(
    2, 32, sharding=CachedAttention(mesh=mesh, axis="seq")
  )
  attend = ContextParallel(mesh=mesh, axis="seq")
  _, cache = placed(ids[:, :12], cache=cache, attend=attend)
  logits = []
  calls = [(12, 20, False), *((n, n + 1, True) for n in range(20, 28))]
  for first, stop, replicated in calls:
    attend = CachedAttention(mesh=mesh, axis="seq", replicated=replicated)
    out, cache = placed(ids[:, first:stop], cache=cache, attend=attend)
    logits.append(np.asarray(out))
  want = model(ids)[:, 12:]
  np.testing.assert_allclose(np.concatenate(logits, 1), want, atol=1e-5, rtol=0)


def largest_read(jaxpr, shape):
  """Most numbers that an operation reads of an array, but those in place."""
  most = 0
  for eqn in jaxpr.eqns:
    inner = [
      x.jaxpr if hasattr(x, "jaxpr") else x
      for value in eqn.params.values()
      for x in (value if isinstance(value, tuple | list) else (value,))
      if hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ]
    for part in inner:
      most = max(most, largest_read(part, shape))
    if not inner and any(x.aval.shape == shape for x in eqn.invars):
      sizes = [x.aval.size for x in eqn.outvars if x.aval.shape != shape]
      most = max([most, *sizes])
  return most


def test_a_step_reads_means_and_chosen_keys():
  """However many slots there are."""
  model, ids = model_of(BLOCKS), tokens(length=1)
  step = lambda cache: model(ids, cache=cache)

  def reads(capacity):
    cache = jax.eval_shape(lambda: model.init_cache(2, capacity))
    (shape,) = {x.shape for x in jax.tree.leaves(cache.slots[0])}
    return largest_read(jax.make_jaxpr(step)(cache).jaxpr, shape)

  # Two blocks of 4 keys of 4 numbers for each of 4 heads of 2 rows.
  assert reads(512) == reads(4096) == 2 * 4 * 2 * 4 * 4


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_reads_no_keys_for_their_summaries(kind, monkeypatch):
  """Pages that two requests share have summaries, too."""
  model, ids = model_of(kind), tokens(length=40)

  def read_all(*arguments):
    raise AssertionError("all keys are read")

  monkeypatch.setattr(BlockReading, "_means", read_all)
  monkeypatch.setattr(NativeReading, "_compressed", read_all)
  jax.clear_caches()
  shared = ids[0, :36]
  prompts = [shared, np.append(shared[:33], ids[1, :2])]
  answers = []
  with Engine(
    model, rows=2, capacity=96, longest=48, page=16, piece=16
  ) as engine:
    for prompt in prompts:
      handle = engine.submit(Request(prompt=prompt, max_new_tokens=5))
      engine.run()
      answers.append(handle.result())
  for prompt, answer in zip(prompts, answers, strict=True):
    text = np.append(prompt, answer.tokens)[None, :-1]
    want = np.argmax(model(text)[0, len(prompt) - 1 :], -1)
    np.testing.assert_array_equal(answer.tokens, want)


@pytest.mark.long
def test_what_is_refused():
  model, ids = model_of(BLOCKS), tokens()
  _, cache = model(ids[:, :8], cache=model.init_cache(2, 24, kind="unrotated"))
  blocks = cache.export(0, 0, 8)
  later = type(blocks.at)(blocks.at.pos + 4, blocks.at.seg)
  refused(OptionError, lambda: cache.load(1, blocks, later), "summaries")
  refused(
    OptionError,
    lambda: model(ids[:, 8:10], cache=cache, positions=np.asarray([9, 10])),
    "successive positions from 8",
  )
  refused(
    OptionError,
    lambda: cache.keep(np.arange(8)[None].repeat(2, 0) % 2 == 0),
    "keep_first",
  )


@pytest.mark.long
@pytest.mark.parametrize(
  "kind",
  [
    "moba:block=16,count=4",
    "nsa:length=16,stride=8,block=16,count=4,window=16",
  ],
)
def test_a_step_copies_neither_keys_nor_summaries(kind):
  """It writes them in place in each layer."""
  config = {**checkpoints.config("llama3"), "num_hidden_layers": 8}
  model = models.abstract(sparse_config(config, kind), dtype=jnp.float32)
  cache = jax.eval_shape(lambda: model.init_cache(1, 4096, dtype=jnp.float32))
  one = lambda dtype=jnp.int32, shape=(1,): jax.ShapeDtypeStruct(shape, dtype)
  compiled = decode.step.lower(
    model,
    CachedAttention(),
    Greedy(),
    cache,
    decode.DecodeState(one(), one(), one(jnp.bool_), None),
    one(),
    one(shape=()),
  ).compile()
  summaries = [x for x in jax.tree.leaves(cache.slots[1]) if x.size]
  least = min(x.size * x.dtype.itemsize for x in summaries)
  program = Program(compiled.as_text())
  copies = [
    (i.shapes, program.times[name])
    for name, lines in program.computations.items()
    for i in lines.values()
    if i.op == "copy" and i.bytes >= least and program.times[name] > 1
  ]
  assert not copies

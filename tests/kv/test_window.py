"""Ring buffers of windowed layers: as if all tokens had been kept."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, PromptError
from ringjax.kv import CacheConfig
from ringjax.kv.storage.slots import REPLICATED
from ringjax.kv.storage.window import WindowSlots
from ringjax.ops.mask import Coords
from tests.contracts import cache as contract
from tests.helpers import make_mesh

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"
KIND = CacheConfig(windowed=True, slack=4)


def config(family):
  return json.loads((FIXTURES / family / "config.json").read_text())


def model(shards):
  return contract.model(shards)


def cache_of(shards, kind, batch=2, capacity=64):
  sharding = None
  if shards > 1:
    sharding = rj.models.CachedAttention(mesh=model(shards).mesh, axis="seq")
  return model(shards).init_cache(batch, capacity, sharding=sharding, kind=kind)


def texts(tokens, batch=2):
  rng = np.random.default_rng(3)
  return rng.integers(0, 64, (batch, tokens)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 4])
def test_any_split_of_a_text(shards):
  """Prompts, chunks beyond the slack and single tokens, around the ring."""
  tokens = texts(48)
  want = np.asarray(model(1)(tokens))
  cache, got, at = cache_of(shards, KIND), [], 0
  mesh = model(shards).mesh
  whole = rj.models.CachedAttention(mesh=mesh, axis=mesh and "seq")
  parts = rj.models.CachedAttention(
    mesh=mesh, axis=mesh and "seq", replicated=False
  )
  for count, attend in (
    (12, parts), (1, whole), (7, whole), (4, parts), (3, whole), (1, whole),
    (8, parts), (9, whole), (1, whole), (2, whole),
  ):  # fmt: skip
    logits, cache = model(shards)(
      tokens[:, at : at + count], cache=cache, attend=attend
    )
    got.append(np.asarray(logits))
    at += count
  assert at == 48
  contract.close(np.concatenate(got, 1), want)
  # 4 tokens to look back and a slack of 4, whatever the context.
  assert cache.slots[1].k.shape[3] == 8 and cache.slots[0].k.shape[3] == 64


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_striped_prompt_then_single_tokens(shards):
  tokens = texts(24)
  want = np.asarray(model(1)(tokens))
  mesh = model(shards).mesh
  prompt = rj.models.ContextParallel(
    mesh=mesh, axis=mesh and "seq", layout=rj.Striped()
  )
  order = rj.Striped().order(16, shards)
  seg = np.stack([order < 16, order < 11]).astype(np.int32)
  cache = cache_of(shards, CacheConfig(windowed=True, unrotated=True, slack=2))
  _, cache = model(shards)(
    tokens[:, order], segment_ids=seg, cache=cache, attend=prompt
  )
  assert cache.length.tolist() == [16, 11]
  rows = np.stack([tokens[0, 16:], tokens[1, 11:19]])
  for n in range(8):
    logits, cache = model(shards)(rows[:, n : n + 1], cache=cache)
    contract.close(np.asarray(logits)[0, 0], want[0, 16 + n])
    contract.close(np.asarray(logits)[1, 0], want[1, 11 + n])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
  "family", ["gemma3_text", "gpt_oss", "llama4_text", "mistral"]
)
def test_families_answer_as_with_all_tokens(family):
  mesh = make_mesh(2, "auto")
  loaded = rj.models.create(config(family), seed=2, mesh=mesh)
  vocab = loaded.config.vocab
  rng = np.random.default_rng(0)
  prompts = [rng.integers(3, vocab, n).astype(np.int32) for n in (70, 33)]
  ask = lambda **options: rj.infer.generate(
    loaded, prompts, max_new_tokens=12, **options
  )
  kind = CacheConfig(windowed=True, slack=8)
  np.testing.assert_array_equal(
    ask(cache_kind=kind).tokens, ask(cache_kind="dense").tokens
  )
  cache = loaded.init_cache_spec(1, 1 << 14, kind=kind)
  assert any(n is not None for n in cache.ring_of)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_what_a_ring_can_not_take_back():
  tokens = texts(20)
  _, cache = model(1)(tokens, cache=cache_of(1, KIND))
  with pytest.raises(OptionError, match="at most the last 4"):
    cache.truncate(15)
  with pytest.raises(OptionError, match="traced"):
    jax.jit(lambda cache: cache.truncate(19))(cache)
  with pytest.raises(OptionError, match="20 tokens, with windowed"):
    cache.keep(np.ones((2, 20), bool))
  with pytest.raises(PromptError, match="a position among the last 4"):
    cache.export(0, 0, 10)
  want = np.asarray(model(1)(tokens))
  back = cache.truncate([16, 18])
  logits, _ = model(1)(
    np.stack([tokens[0, 16:18], tokens[1, 18:20]]), cache=back
  )
  contract.close(np.asarray(logits)[0], want[0, 16:18])
  contract.close(np.asarray(logits)[1], want[1, 18:20])
  assert cache.truncate(0).length.tolist() == [0, 0]


@pytest.mark.long
def test_blocks_go_from_ring_to_ring():
  """Over shards and capacities: the last tokens of windowed layers alone."""
  tokens = texts(22)
  want = np.asarray(model(1)(tokens))
  _, cache = model(1)(tokens[:, :20], cache=cache_of(1, KIND))
  blocks = cache.export(1, 0, 18)
  assert [part.k.shape[2] for part in blocks.parts] == [18, 4]
  into = cache_of(4, KIND, capacity=32).load(0, blocks)
  seg = np.array([[1, 1], [0, 0]], np.int32)
  logits, _ = model(4)(
    np.stack([tokens[1, 18:20]] * 2), segment_ids=seg, cache=into
  )
  contract.close(np.asarray(logits)[0], want[1, 18:20])
  gathered = into.gathered(jax.devices()[0])
  again = gathered.export(0, 0, 18)
  for x, y in zip(jax.tree.leaves(blocks), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_token_takes_a_slot_and_padding_none():
  """Of rows of 3, 1 and no tokens that all shards have."""
  zeros = jnp.zeros((3, 8), jnp.int32)
  none = jnp.zeros(3, jnp.int32)
  slots = WindowSlots(
    at=Coords(zeros, zeros), count=none, before=none, reach=4, slack=4
  )
  pos = jnp.tile(jnp.arange(3, dtype=jnp.int32), (3, 1))
  seg = (pos < jnp.array([[3], [1], [0]])).astype(jnp.int32)
  after = slots.allocate(Coords(pos, seg), REPLICATED)
  assert after.count.tolist() == [3, 1, 0]
  assert jnp.sum(after.at.seg, 1).tolist() == [3, 1, 0]


def test_bfloat16_and_bytes():
  loaded = rj.models.create(config("gemma3_text"), dtype=jnp.bfloat16)
  make = lambda kind: loaded.init_cache_spec(1, 1 << 17, kind=kind)
  full, ring = (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(make(kind)))
    for kind in ("dense", "windowed")
  )
  kept = [n for n in make("windowed").ring_of if n is None]
  assert kept and ring < 0.7 * full


@pytest.mark.long
@pytest.mark.parametrize("prefill", ["kvr", "zigzag", "chunked"])
def test_every_way_to_read_a_prompt(prefill):
  options = {"chunk": 8} if prefill == "chunked" else {}
  prompts = [texts(40)[0], texts(19)[1][:19]]
  ask = lambda kind: (
    rj.infer.generate(
      model(4),
      prompts,
      max_new_tokens=6,
      prefill=prefill,
      cache_kind=kind,
      **options,
    ).tokens
  )
  np.testing.assert_array_equal(ask(KIND), ask("dense"))

"""Caches of which only chosen pages come from host memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.eval import compare_caches
from ringjax.kv import kind_text
from tests.contracts import cache as contract
from tests.helpers import SMALL

B, CAPACITY = 2, 96


def tokens_of(count, batch=B):
  draw = np.random.default_rng(0)
  # The first tokens of a row are the same whatever the count is.
  return draw.integers(1, 64, (B, CAPACITY)).astype(np.int32)[:batch, :count]


def run(kind, family="grouped", ends=(40, 41, 42, 46), flushes=2):
  """Logits of calls that end there, and the cache; the first is a prompt."""
  model = contract.model(1, family)
  cache = model.init_cache(B, CAPACITY, kind=kind)
  tokens, logits, start = tokens_of(ends[-1]), [], 0
  for n, end in enumerate(ends):
    if n < flushes:
      cache = cache.evict()
    prompt = rj.models.CachedAttention(replicated=False)
    call_logits, cache = model(
      tokens[:, start:end],
      cache=cache.with_room(end - start),
      attend=prompt if n == 0 else None,
    )
    logits.append(np.asarray(call_logits))
    start = end
  return np.concatenate(logits, 1), cache


@pytest.mark.long
@pytest.mark.parametrize("budget", [8, 16])
def test_the_pages_are_those_that_quest_reads_on_the_devices(budget):
  """Both have the oldest 32 tokens in pages, and the newest open."""
  here = f"select:budget={budget},page=8"
  got, cache = run(f"{here},device=8,hot=16")
  want, _ = run(f"{here},recent=8,room=64")
  every, _ = run("dense")
  contract.close(got, want, 2e-5)
  assert np.abs(got[:, 40:] - every[:, 40:]).max() > 0.1
  assert isinstance(cache, rj.kv.ChosenTieredCache)
  assert np.asarray(cache.held.used).tolist() == [[32]] * B


@pytest.mark.long
@pytest.mark.parametrize(
  ("kind", "plain", "family"),
  [
    ("select:budget=1.0,hot=16", "dense", "grouped"),
    ("int8+select:budget=1.0,hot=16", "int8", "sinks"),
    ("unrotated:hot=16", "dense", "selected"),
    ("int8:hot=16", "int8", "selected"),
  ],
)
def test_a_choice_of_all_that_matters_changes_nothing(kind, plain, family):
  """All pages, or those with the keys that the index of a layer reads."""
  comma = "," if ":" in kind else ":"
  ends = (40, 41, 45, 46, 47, 48)
  got, cache = run(f"{kind}{comma}device=8,page=8", family, ends, len(ends))
  want, _ = run(plain, family, ends, len(ends))
  contract.close(got, want, 1e-5 * max(1, np.abs(want).max()))
  fetches = cache.fetches()
  assert fetches.misses and fetches.hits


@pytest.mark.long
def test_only_pages_that_are_not_hot_are_copied():
  """The same query again copies nothing; the bytes are those of the misses."""
  kind = kind_text.parse("select:budget=16,page=8,device=8,hot=64")
  config = {**SMALL, "model_type": "qwen3", "head_dim": 8}
  model = rj.models.create(config, seed=0)
  cache = model.init_cache(1, CAPACITY, kind=kind).with_room(40)
  prompt = rj.models.CachedAttention(replicated=False)
  _, cache = model(tokens_of(40, 1), cache=cache, attend=prompt)
  cache = cache.evict()
  assert not any(cache.fetches())
  token = tokens_of(1, 1)
  first, cache = model(token, cache=cache)
  heads, page_bytes = 2, 2 * 8 * 8 * 4
  assert cache.fetches()[:3] == (0, 2 * heads, 2 * heads * page_bytes)
  cache = cache.keep(np.zeros((1, 1), bool))
  again, cache = model(token, cache=cache)
  np.testing.assert_array_equal(first, again)
  assert cache.fetches()[:3] == (2 * heads, 2 * heads, 2 * heads * page_bytes)


def test_device_bytes_are_those_of_hot_pages_and_bounds():
  kind = kind_text.parse("select:budget=64,page=32,device=32,hot=128")
  config = {**SMALL, "model_type": "qwen3", "head_dim": 64}
  model = rj.models.create(config, seed=0, dtype=np.float32)
  caches = {n: model.init_cache_spec(2, n, kind=kind) for n in (1024, 8192)}
  sizes = {n: rj.kv.base.bytes_each(x) for n, x in caches.items()}
  key_bytes = 2 * 64 * 4
  # For each row: positions and segments, and two vectors of each page.
  grown = 2 * (8192 - 1024) * (2 * 4 + 2 * key_bytes // 32)
  assert sizes[8192] - sizes[1024] == grown
  dense = rj.kv.base.bytes_each(model.init_cache_spec(2, 8192))
  assert sizes[8192] < dense / 12


@pytest.mark.long
def test_rows_chunks_and_turns_are_independent():
  """Rows of unequal length, as each is alone, in two turns."""
  kind = kind_text.parse("select:budget=16,page=8,device=8,hot=16")
  model, text = contract.model(1, "grouped"), tokens_of(60)
  turns = [[text[0, :50], text[1, :21]], [text[1, 21:30], text[0, 50:55]]]
  reports = []

  def talk(rows, **options):
    session = rj.infer.Session(model, 160, batch=len(rows), cache_kind=kind)
    return [
      [
        row.tolist()
        for row in rj.infer.generate(
          model,
          [turn[n] for n in rows],
          max_new_tokens=20,
          cache=session,
          report=reports.append,
          **options,
        )
      ]
      for turn in turns
    ]

  both = talk([0, 1])
  assert reports[-1].fetches.misses > 0
  assert [[first] for first, _ in both] == talk([0])
  assert [[second] for _, second in both] == talk([1])
  assert talk([0, 1], prefill="chunked", chunk=16) == both


@pytest.mark.slow
def test_a_mesh_of_three_axes():
  """Batch, sequence and heads are sharded, also where heads do not divide."""
  config = {**SMALL, "model_type": "qwen3", "head_dim": 16}
  config |= {"num_attention_heads": 8, "initializer_range": 0.2}
  draw = np.random.default_rng(5)
  prompts = [draw.integers(1, 64, n).astype(np.int32) for n in (70, 17, 60, 33)]
  every = kind_text.parse("select:budget=1.0,page=8,device=16,hot=16")
  some = every.with_options({"policy.budget": 8})
  cube = rj.make_mesh((2, 2, 2), ("data", "seq", "model"))
  models = rj.make_mesh((2,), ("model",), devices=jax.devices()[:2])
  for heads in (4, 2):
    config |= {"num_key_value_heads": heads}
    ask = lambda model, kind: rj.infer.generate(
      model, prompts, max_new_tokens=20, cache_kind=kind
    ).tokens.tolist()
    alone = rj.models.create(config, seed=1)
    sharded = rj.models.create(config, seed=1, mesh=cube)
    assert ask(sharded, every) == ask(alone, "dense")
    # Heads and rows choose alone, so that their shards change no choice.
    by_heads = rj.models.create(config, seed=1, mesh=models)
    assert ask(by_heads, some) == ask(alone, some)


@pytest.mark.long
@pytest.mark.parametrize("landmarks", ["bounds", "clusters"])
def test_rows_are_taken_inserted_and_cut(landmarks):
  kind = kind_text.parse(
    f"select:budget=1.0,page=8,device=8,hot=16,landmarks={landmarks}"
  )
  model, tokens = contract.model(1, "grouped"), tokens_of(60)
  _, cache = run(kind, ends=(40, 41, 42), flushes=3)
  cache = cache.truncate(np.array([42, 20]))
  # Row 1 gets other tokens into the pages that it had.
  more = np.where(np.arange(B)[:, None] == 1, tokens[:, 22:42], 0)
  seg = np.tile((np.arange(B) == 1).astype(np.int32)[:, None], (1, 20))
  prompt = rj.models.CachedAttention(replicated=False)
  _, cache = model(
    more, segment_ids=seg, cache=cache.evict().with_room(20), attend=prompt
  )
  cache = cache.evict()
  cache = cache.take([1, 0, 1]).insert([2], cache.take([0]))
  after = np.stack([tokens[1, 42:44], tokens[0, 42:44], tokens[0, 42:44]])
  logits, _ = model(after, cache=cache.with_room(2))
  cut = np.concatenate([tokens[1, :20], tokens[1, 22:44]])[None]
  want = [np.asarray(model(x))[0, -2:] for x in (cut, tokens[:1, :44])]
  for row, text in enumerate((0, 1, 1)):
    contract.close(np.asarray(logits)[row], want[text], 1e-4)


@pytest.mark.slow
def test_the_loss_of_a_choice_is_measured():
  """Few pages cost something; all cost nothing."""
  model = contract.model(1, "grouped")
  kinds = {
    str(budget): f"select:budget={budget},page=8,device=8,hot=16"
    for budget in (8, 1.0)
  }
  few, every = compare_caches(model, tokens_of(CAPACITY, 1), kinds)
  assert few.kl > 1e-3 and abs(every.kl) < 1e-5


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
  for text, words in (
    ("select:device=8", "pass hot="),
    ("dense:hot=64", "pass device="),
    ("select:device=8,hot=8", "hot=32"),
    ("select:device=8,hot=64,room=16", "block=32"),
    ("select:device=8,hot=64,recent=4", "keeps all tokens"),
    ("snapkv:device=8,hot=64", "keeps all tokens"),
  ):
    with pytest.raises(OptionError, match=words):
      kind_text.parse(text)
  with pytest.raises(OptionError, match="one codec"):
    kind_text.parse("allocated:table=DIR,device=8,hot=64")
  model = rj.models.create(SMALL, seed=0)
  with pytest.raises(OptionError, match="select:device=8,hot=64"):
    model.init_cache_spec(1, 64, kind="dense:device=8,hot=64")
  with pytest.raises(OptionError, match="without a policy"):
    rj.kv.SimulatedCache.create(model, "int8+select:device=8,hot=64")
  with pytest.raises(OptionError, match="device"):
    rj.serve.Engine(model, cache_kind="select:device=8,hot=64")


@pytest.mark.long
def test_an_index_and_a_policy_do_not_choose_together():
  indexed = contract.model(1, "selected")
  with pytest.raises(OptionError, match="leave the policy out"):
    indexed.init_cache_spec(1, 64, kind="select:device=8,hot=64")


def test_kinds_have_a_text():
  kind = kind_text.parse("int8+select:budget=4096,device=512,hot=8192")
  assert kind.tier.block == kind.layout.page == 32
  assert kind_text.parse(str(kind)) == kind
  assert not kind.evicting

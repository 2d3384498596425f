"""Caches with a part in host memory: equal to resident ones, and bounded."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, PromptError
from ringjax.kv import kind_text
from tests.contracts import cache as contract
from tests.helpers import SMALL

# On one shard 10 slots of the open cache, and blocks of 3.
TIERED = "dense:device=4,room=3"
B, T, CAPACITY = 2, 12, 64


def empty(shards, kind, family="grouped", memory="pinned_host", batch=B):
  model = contract.model(shards, family)
  where = {} if shards == 1 else {"mesh": model.mesh, "axis": "seq"}
  return rj.kv.TieredCache.create(
    model.kinds, batch, CAPACITY, np.float32, kind=kind, memory=memory, **where
  )


def ready(cache, tokens):
  each = -(-tokens // cache.shards)
  return cache.evict().with_room(np.full((cache.batch, cache.shards), each))


def run(shards, cache, family="grouped", ends=(T, 20, 21)):
  """Logits of calls that end there, behind an eviction each, and the cache."""
  tokens = contract.text(family)[0][: cache.batch]
  got, start = [], 0
  for end in ends:
    logits, cache = contract.model(shards, family)(
      tokens[:, start:end], cache=ready(cache, end - start)
    )
    got.append(np.asarray(logits))
    start = end
  return np.concatenate(got, 1), cache


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "shards", "family"),
  [
    (TIERED, 1, "grouped"),
    *(
      pytest.param(name, shards, family, marks=pytest.mark.long)
      for name, shards, family in [
        (TIERED, 4, "windows"),
        ("int4:device=4,room=3", 1, "latent"),
        ("unrotated:device=4,room=3", 4, "sinks"),
        ("windowed:device=4,room=3", 1, "recurrent"),
      ]
    ),
  ],
)
def test_the_memory_changes_no_bit(name, shards, family):
  kind = kind_text.parse(name)
  got, cache = run(shards, empty(shards, kind, family), family)
  want, resident = run(shards, empty(shards, kind, family, "device"), family)
  np.testing.assert_array_equal(got, want)
  by_memory = cache.bytes_by_memory()
  assert by_memory["pinned_host"] > 0
  assert sum(by_memory.values()) == cache.nbytes() == resident.nbytes()
  assert resident.bytes_by_memory() == {"device": cache.nbytes()}
  assert np.asarray(cache.held.used).min() > 0
  if kind.codec is None:
    contract.close(got, contract.text(family)[1][:B, :21], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.long)])
def test_generate_moves_blocks_by_itself(shards):
  """As the dense cache, at device bytes that do not grow with the row."""
  model = contract.model(shards, "grouped")
  tokens = contract.text("grouped")[0]
  prompts = [tokens[0, :20], tokens[1, :9]]
  ask = functools.partial(rj.infer.generate, model, prompts, max_new_tokens=14)
  kind = kind_text.parse(TIERED)
  session = rj.infer.Session(model, CAPACITY, batch=2, cache_kind=kind)
  resident = rj.infer.Session(model, CAPACITY, batch=2)
  start, held = session.cache.bytes_by_memory(), []
  note = lambda _: held.append(session.cache.bytes_by_memory()["device"])
  new = ask(cache=session, stream=note)
  np.testing.assert_array_equal(new.tokens, ask(cache=resident).tokens)
  assert session.last.prefill.name == "chunked"
  assert "4 tokens of a row stay" in session.last.prefill.why
  assert set(held) == {start["device"]}
  assert session.last.cache_bytes < resident.last.cache_bytes
  # The shorter row has moved blocks of its own.
  moved = np.asarray(session.cache.held.used).sum(1)
  assert moved[0] > moved[1]
  assert moved[1] > 0 or shards == 4
  # Another turn, and one that begins on one device.
  more = lambda session: rj.infer.generate(
    model, tokens[:2, :5], max_new_tokens=6, cache=session, keep="last"
  )
  np.testing.assert_array_equal(more(session).tokens, more(resident).tokens)
  again = lambda session: rj.infer.generate(
    model, tokens[:2, 5:8], max_new_tokens=3, cache=session
  )
  np.testing.assert_array_equal(again(session).tokens, again(resident).tokens)
  assert session.lengths.tolist() == resident.lengths.tolist()
  np.testing.assert_array_equal(
    ask(cache_kind=kind).tokens, ask(prefill="blockwise").tokens
    if shards == 1 else ask().tokens,
  )  # fmt: skip


def test_device_bytes_are_those_of_the_newest_tokens():
  """Eight times the capacity, and only coordinates more on the device."""
  kind = kind_text.parse("dense:device=32,room=16")
  config = {**SMALL, "model_type": "qwen3", "head_dim": 64}
  model = rj.models.create(config, seed=0)
  made = {n: model.init_cache(2, n, kind=kind) for n in (256, 2048)}
  dense = {n: model.init_cache(2, n) for n in made}
  device = {n: x.bytes_by_memory()["device"] for n, x in made.items()}
  # Positions and segments of two rows.
  assert device[2048] - device[256] == 2 * 2 * 4 * (2048 - 256)
  host = made[2048].bytes_by_memory()["pinned_host"]
  assert host == sum(x.nbytes for x in jax.tree.leaves(dense[2048].slots))
  assert device[2048] < dense[2048].nbytes() / 8


@pytest.mark.long
def test_blocks_go_to_caches_of_one_memory_and_back():
  kind = kind_text.parse(TIERED)
  model, (tokens, want) = contract.model(1, "grouped"), contract.text("grouped")
  _, cache = run(1, empty(1, kind), ends=(T, 20))
  cache = cache.evict()
  _, dense = model(tokens[:B, :20], cache=model.init_cache(B, CAPACITY))
  blocks = cache.export(1, 3, 20)
  other = dense.export(1, 3, 20)
  assert blocks.kind == other.kind == rj.kv.KINDS["dense"]
  for x, y in zip(blocks.parts[0], other.parts[0], strict=True):
    contract.close(x, y, 1e-5)
  whole = cache.export(1, 0, 20)
  into = model.init_cache(1, CAPACITY).load(0, whole)
  back = empty(1, kind, batch=1).load(0, into.export(0, 0, 20))
  assert back.open.capacity == 10 and int(back.held.used[0, 0]) == 15
  again = back.export(0, 0, 20)
  for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(x, y)
  logits, _ = model(tokens[1:2, 20:22], cache=back)
  contract.close(logits[0], want[1, 20:22], 1e-4)
  with pytest.raises(PromptError, match="at most 44"):
    back.load(0, longer(whole, 45))


def longer(blocks, count):
  """Blocks of so many tokens."""
  index = np.arange(count) % blocks.at.pos.shape[0]
  part = lambda x: np.asarray(x)[:, :, index]
  return blocks._replace(
    at=type(blocks.at)(*(x[index] for x in blocks.at)),
    parts=jax.tree.map(part, blocks.parts),
  )


@pytest.mark.long
def test_rows_go_back_into_their_blocks():
  """Tokens are taken back from the blocks, and others appended."""
  kind = kind_text.parse(TIERED)
  tokens, want = contract.text("grouped")
  model = contract.model(1, "grouped")
  _, cache = run(1, empty(1, kind), ends=(T, 20))
  cache = cache.evict()
  older = np.asarray(cache.held.used)
  cache = cache.truncate(np.array([20, 8]))
  assert cache.length.tolist() == [20, 8]
  assert older.tolist() == [[15], [15]]
  # The third block of row 1 holds two tokens of three, for good.
  assert np.asarray(cache.held.used).tolist() == [[15], [9]]
  assert cache.free().tolist() == [[CAPACITY - 20], [CAPACITY - 9]]
  seg = np.array([[0] * 6, [1] * 6], np.int32)
  _, cache = model(
    tokens[:B, 8:14] * seg, segment_ids=seg, cache=ready(cache, 6)
  )
  both = cache.take([1, 0, 1])
  after = np.stack([tokens[1, 14:16], tokens[0, 20:22], tokens[1, 14:16]])
  logits, both = model(after, cache=ready(both, 2))
  for row, (text, first) in enumerate([(1, 14), (0, 20), (1, 14)]):
    contract.close(logits[row], want[text, first : first + 2], 1e-4)


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
  for device in (0, -1, 1.5, True, "all"):
    with pytest.raises(OptionError, match="device"):
      rj.kv.CacheConfig(device=device)
  for more in ({"policy": rj.kv.SnapKV()}, {"recent": 4}, {"first": 1}):
    with pytest.raises(OptionError, match="keeps all tokens"):
      rj.kv.CacheConfig(device=8, **more)
  kind = kind_text.parse(TIERED)
  model, tokens = contract.model(1, "grouped"), contract.text("grouped")[0]
  with pytest.raises(OptionError, match="pinned_host"):
    empty(1, kind, memory="disk")
  cache = empty(1, kind)
  for name, call in (
    ("evict", lambda cache: cache.evict()),
    ("take", lambda cache: cache.take([0])),
  ):
    with pytest.raises(OptionError, match=f"{name} inside of jit"):
      jax.jit(call)(cache)
  with pytest.raises(PromptError, match=r"with_room\(12\)"):
    model(tokens[:B, :T], cache=cache)
  with pytest.raises(PromptError, match="at most 64"):
    model(np.ones((B, 65), np.int32), cache=cache)
  _, cache = model(tokens[:B, :T], cache=cache.with_room(T))
  moved = cache.evict()
  with pytest.raises(OptionError, match="call keep first"):
    moved.keep(np.ones((B, T), bool))
  with pytest.raises(OptionError, match="donated"):
    model(tokens[:B, :1], cache=cache)
  with pytest.raises(OptionError, match="an empty cache"):
    model(tokens[:B, :1], cache=moved, attend=rj.models.ContextParallel())
  with pytest.raises(OptionError, match="one of the same model"):
    moved.insert([0], model.init_cache(1, CAPACITY))
  with pytest.raises(OptionError, match="without device="):
    kind.resident("a chain")


def test_kinds_have_a_text():
  kind = kind_text.parse("int4:device=4096,group=32")
  assert kind.tier.device == 4096 and kind_text.parse(str(kind)) == kind
  assert str(kind) == "int4:device=4096,keys.group=32,values.group=32"
  assert kind_text.parse("dense:device=none").tier.device is None
  both = kind + rj.kv.CacheConfig(unrotated=True, device=8192)
  assert both.tier.device == 8192 and both.layout.unrotated


@pytest.mark.slow
@pytest.mark.long
def test_a_mesh_of_three_axes():
  """Batch, sequence and heads are sharded, also where heads do not divide."""
  config = {**SMALL, "model_type": "qwen3", "head_dim": 16}
  config |= {"num_attention_heads": 8, "initializer_range": 0.2}
  draw = np.random.default_rng(5)
  prompts = [draw.integers(1, 64, n).astype(np.int32) for n in (45, 17, 60, 33)]
  kind = kind_text.parse("dense:device=16,room=4")
  cube = rj.make_mesh((2, 2, 2), ("data", "seq", "model"))
  for heads in (4, 1):
    config |= {"num_key_value_heads": heads}
    ask = lambda model, kind, **options: rj.infer.generate(
      model, prompts, max_new_tokens=20, cache_kind=kind, **options
    ).tokens.tolist()
    want = ask(rj.models.create(config, seed=1), "dense")
    assert ask(rj.models.create(config, seed=1, mesh=cube), kind) == want
    assert ask(rj.models.create(config, seed=1), kind) == want


@pytest.mark.long
def test_shards_that_differ_are_levelled():
  """A shard that holds more of a row gets fewer of its next tokens."""
  kind = kind_text.parse(TIERED).replace(device=12)
  model, tokens = contract.model(4, "grouped"), contract.text("grouped")[0]
  cache = empty(4, kind)
  # All tokens of row 0 are on the first shard.
  seg = np.zeros((B, 32), np.int32)
  seg[:, :8] = 1
  text = np.pad(tokens[:B, :8], ((0, 0), (0, 24)))
  attend = rj.models.CachedAttention(
    mesh=model.mesh, axis="seq", replicated=False
  )
  _, cache = model(text, segment_ids=seg, attend=attend, cache=ready(cache, 32))
  assert np.asarray(cache.open.held.used)[0].tolist() == [8, 0, 0, 0]
  for n in range(8, 24):
    cache = cache.evict()
    _, cache = model(tokens[:B, n : n + 1], cache=cache)
  total = np.asarray(cache.open.held.used) + np.asarray(cache.held.used)
  assert total[:, 0].tolist() == [8] * B and total.min() >= 4

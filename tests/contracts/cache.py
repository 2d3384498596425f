"""The laws of a cache: each kind of cache inherits them by one line.

A law is called with a kind's name and a number of shards. It makes a model of
its own and compares with the model's call without a cache.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.kv.cache_kind import KINDS
from tests.helpers import SMALL, make_mesh

# One layer that looks back over all and two that look back 5 tokens.
CONFIG = {
  **SMALL,
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "num_hidden_layers": 3,
  "use_sliding_window": True,
  "sliding_window": 5,
  "max_window_layers": 1,
}
# Of windowed layers: tokens of a call that may be taken back.
SLACK = 6

B, T, CAPACITY = 3, 12, 32
TOLERANCE = 1e-5


@functools.cache
def model(shards):
  mesh = make_mesh(shards, "auto") if shards > 1 else None
  return rj.models.create(CONFIG, seed=1, mesh=mesh)


@functools.cache
def text():
  """Tokens [B, 2 T] and their logits, by a call without a cache."""
  tokens = np.random.default_rng(0).integers(0, 64, (B, 2 * T))
  tokens = tokens.astype(np.int32)
  return tokens, np.asarray(model(1)(tokens))


def empty(kind, shards, batch=B, capacity=CAPACITY):
  attend = None
  if shards > 1:
    attend = rj.models.CachedAttention(mesh=model(shards).mesh, axis="seq")
  kind = dataclasses.replace(KINDS[kind], slack=SLACK)
  return model(shards).init_cache(batch, capacity, sharding=attend, kind=kind)


def read(shards, tokens, cache, **options):
  logits, cache = model(shards)(jnp.asarray(tokens), cache=cache, **options)
  return np.asarray(logits), cache


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def state(cache):
  """What a cache holds: coordinates, and keys and values of real slots.

  Of ring buffers only what a later query may see, by position.
  """
  seg = np.asarray(cache.at.seg)
  found = [np.where(seg > 0, np.asarray(cache.at.pos), 0), seg, cache.free()]
  for ring, slots in zip(cache.ring_of, cache.slots, strict=True):
    if ring is None:
      real = (seg > 0)[None, :, None, :, None]
      found.extend(np.where(real, x, 0) for x in slots)
      continue
    pos, here = (np.asarray(x) for x in cache.rings[ring].at)
    for row, end in enumerate(cache.length.tolist()):
      first = max(0, end - cache.rings[ring].reach)
      seen = np.flatnonzero((here[row] > 0) & (pos[row] >= first))
      seen = seen[np.argsort(pos[row, seen])]
      assert pos[row, seen].tolist() == list(range(first, end))
      found.extend(np.asarray(x)[:, row, :, seen] for x in slots)
  return found


def same(a, b):
  for x, y in zip(state(a), state(b), strict=True):
    np.testing.assert_array_equal(x, y)


def as_without_a_cache(kind, shards):
  """A prompt, then tokens one by one."""
  tokens, want = text()
  first, cache = read(shards, tokens[:, :T], empty(kind, shards))
  got = [first]
  for n in range(T, T + 3):
    logits, cache = read(shards, tokens[:, n : n + 1], cache)
    got.append(logits)
  close(np.concatenate(got, 1), want[:, : T + 3])


def rejected_tokens_leave_no_trace(kind, shards):
  """Append n, keep fewer: as if the others had never been appended."""
  tokens, want = text()
  kept = np.array([3, 0, 5])
  _, cache = read(shards, tokens[:, :T], empty(kind, shards))
  draft = tokens[:, T : T + 5].copy()
  draft[np.arange(5)[None] >= kept[:, None]] = 1
  _, cache = read(shards, draft, cache)
  cache = cache.keep(np.arange(5)[None] < kept[:, None])
  assert cache.length.tolist() == (T + kept).tolist()

  _, never = read(shards, tokens[:, :T], empty(kind, shards))
  seg = (np.arange(5)[None] < kept[:, None]).astype(np.int32)
  _, never = read(shards, tokens[:, T : T + 5] * seg, never, segment_ids=seg)
  same(cache, never)
  after = np.stack(
    [row[T + n : T + n + 4] for row, n in zip(tokens, kept, strict=True)]
  )
  logits, _ = read(shards, after, cache)
  for row, n in enumerate(kept):
    close(logits[row], want[row, T + n : T + n + 4])


def siblings_are_kept_by_their_number(kind, shards):
  """Of a tree's tokens some path, whose tokens are not neighbours."""
  tokens, _ = text()
  _, cache = read(shards, tokens[:, :T], empty(kind, shards))
  draft = np.ones((B, 6), np.int32)
  path = np.array([0, 2, 5])
  draft[:, path] = tokens[:, T : T + 3]
  pos = np.array([0, 1, 1, 2, 2, 2]) + T
  _, cache = read(shards, draft, cache, positions=np.tile(pos, (B, 1)))
  cache = cache.keep(np.tile(np.isin(np.arange(6), path), (B, 1)))
  assert cache.length.tolist() == [T + 3] * B
  assert (CAPACITY - cache.free().sum(1)).tolist() == [T + 3] * B
  assert sorted(np.asarray(cache.at.pos)[0][np.asarray(cache.at.seg)[0] > 0])[
    -3:
  ] == [T, T + 1, T + 2]


def blocks_are_loaded_bit_for_bit(kind, shards):
  tokens, want = text()
  _, cache = read(shards, tokens[:, :T], empty(kind, shards))
  blocks = cache.export(1, 0, T)
  into = empty(kind, shards).load(2, blocks)
  again = into.export(2, 0, T)
  for x, y in zip(jax.tree.leaves(blocks), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(x, y)
  assert into.length.tolist() == [0, 0, T]
  after = np.where(np.arange(B)[:, None] == 2, tokens[1, T : T + 3], 0)
  seg = np.tile((np.arange(B) == 2).astype(np.int32)[:, None], (1, 3))
  logits, _ = read(shards, after.astype(np.int32), into, segment_ids=seg)
  close(logits[2], want[1, T : T + 3])


def rows_are_independent(kind, shards):
  """Reset one, insert another: the others stay as they are."""
  tokens, want = text()
  _, cache = read(shards, tokens[:, :T], empty(kind, shards))
  _, other = read(shards, tokens[[0], T:], empty(kind, shards, batch=1))
  cleared = cache.reset([1])
  assert cleared.length.tolist() == [T, 0, T]
  same(cleared.take([0, 2]), cache.take([0, 2]))
  filled = cleared.insert([1], other)
  same(filled.take([0, 2]), cache.take([0, 2]))
  same(filled.take([1]), other)
  logits, _ = read(shards, tokens[:, T : T + 2], filled)
  close(logits[[0, 2]], want[[0, 2], T : T + 2])


def a_snapshot_comes_back(kind, shards):
  tokens, want = text()
  _, cache = read(shards, tokens[:, :T], empty(kind, shards))
  before = cache.snapshot()
  _, cache = read(shards, np.full((B, 4), 5, np.int32), cache)
  cache = cache.restore(before)
  assert cache.length.tolist() == [T] * B
  logits, _ = read(shards, tokens[:, T:], cache)
  close(logits, want[:, T:])


def short_rows_cost_no_slots(kind, shards):
  """Padding takes none, so that rows of unequal turns fit."""
  tokens, want = text()
  lengths = np.array([T, 3, 7])
  seg = (np.arange(T)[None] < lengths[:, None]).astype(np.int32)
  cache = empty(kind, shards)
  _, cache = read(shards, tokens[:, :T] * seg, cache, segment_ids=seg)
  assert (CAPACITY - cache.free().sum(1)).tolist() == lengths.tolist()
  after = np.stack(
    [row[n : n + T] for row, n in zip(tokens, lengths, strict=True)]
  )
  logits, _ = read(shards, after, cache)
  for row, n in enumerate(lengths):
    close(logits[row], want[row, n : n + T])


def a_full_row_is_filled_to_its_last_slot(kind, shards):
  """A call whose padding would reach beyond the last slot."""
  tokens, want = text()
  cache = empty(kind, shards, batch=2, capacity=16)
  _, cache = read(shards, tokens[:2, :8], cache)
  seg = np.array([[1] * 8, [1] * 2 + [0] * 6], np.int32)
  _, cache = read(shards, tokens[:2, 8:16] * seg, cache, segment_ids=seg)
  assert cache.free().sum(1).tolist() == [0, 6]
  more = np.stack([np.zeros(4, np.int32), tokens[1, 10:14]])
  seg = np.array([[0] * 4, [1] * 4], np.int32)
  cache_call = jax.jit(
    lambda cache: model(shards)(more, segment_ids=seg, cache=cache)
  )
  logits, cache = cache_call(cache)
  close(np.asarray(logits)[1], want[1, 10:14])
  assert cache.free().sum(1).tolist() == [0, 2]
  assert cache.length.tolist() == [16, 14]


LAWS = (
  as_without_a_cache,
  rejected_tokens_leave_no_trace,
  siblings_are_kept_by_their_number,
  blocks_are_loaded_bit_for_bit,
  rows_are_independent,
  a_snapshot_comes_back,
  short_rows_cost_no_slots,
  a_full_row_is_filled_to_its_last_slot,
)

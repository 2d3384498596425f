"""IMPRESS: what is loaded, what is kept, and what comes out."""

from __future__ import annotations

import numpy as np
import pytest

from ringjax import store
from ringjax.errors import OptionError, ShapeError
from tests.helpers import refused

L, K, M, H = 2, 4, 64, 16


def dense(q, keys, values, k, v, tokens):
  """Attention by hand in float64, over some tokens of each head."""
  t, n, h = q.shape
  heads, out = keys.shape[0], np.zeros((t, n, values.shape[-1]))
  for one in range(n):
    head = one // (n // heads)
    all_k = np.concatenate([keys[head][tokens[head]], k[:, head]])
    all_v = np.concatenate([values[head][tokens[head]], v[:, head]])
    for i in range(t):
      seen = all_k.shape[0] - t + i + 1
      score = all_k[:seen].astype(np.float64) @ q[i, one] * h**-0.5
      weight = np.exp(score - score.max())
      out[i, one] = weight / weight.sum() @ all_v[:seen]
  return out


def arrays(seed, *, heads=K, tokens=M, new=3, groups=2, layers=L):
  rng = np.random.default_rng(seed)
  make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  prefix = make(layers, heads, tokens, H), make(layers, heads, tokens, H - 4)
  call = (
    make(new, heads * groups, H),
    make(new, heads, H),
    make(new, heads, H - 4),
  )
  return prefix, call


def node(prefix, **options):
  shelf = store.Store(host=1 << 26)
  return store.StoredNode(shelf, b"a prefix", *prefix, **options)


EVERY = np.tile(np.arange(M), (K, 1))


def test_all_tokens_are_dense_attention():
  prefix, call = arrays(0)
  work = store.Impress(node(prefix, chunk=10), keep=1)
  for layer in range(L):
    found, kept = work.attend(layer, *call)
    assert (kept.tokens == EVERY).all()
    want = dense(call[0], prefix[0][layer], prefix[1][layer], *call[1:], EVERY)
    np.testing.assert_allclose(found, want, atol=2e-6)
  assert work.counters.fallbacks == 0


def test_what_is_kept_is_what_is_attended_to():
  prefix, call = arrays(1)
  for alpha in (0.1, 9.0):
    work = store.Impress(node(prefix), keep=0.25, alpha=alpha)
    found, kept = work.attend(1, *call)
    # Random heads agree by chance: alpha decides.
    assert kept.shared == (alpha == 9.0)
    assert kept.tokens.shape == (K, M // 4)
    want = dense(call[0], prefix[0][1], prefix[1][1], *call[1:], kept.tokens)
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_the_kept_ones_have_most_attention():
  prefix, call = arrays(2)
  work = store.Impress(node(prefix), keep=0.25, alpha=0)
  _, kept = work.attend(0, *call)
  for head in range(K):
    mass = np.zeros(M)
    for one in (2 * head, 2 * head + 1):
      for i in range(3):
        keys = np.concatenate([prefix[0][0, head], call[1][: i + 1, head]])
        weight = np.exp(keys.astype(np.float64) @ call[0][i, one] * H**-0.5)
        mass += (weight / weight.sum())[:M]
    assert set(kept.tokens[head]) == set(np.argsort(-mass)[: M // 4])


@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_counters_are_the_formulas(keep):
  prefix, call = arrays(3)
  bound = node(prefix, probes=3)
  kept = int(-(-M * keep // 1))
  of_key, of_value = 4 * H, 4 * (H - 4)
  near = store.Impress(bound, keep=keep, alpha=20)
  near.attend(0, *call)
  assert near.counters.vectors == store.vectors_of_probes(K, M, kept, 3)
  assert near.counters.vector_bytes == (
    (3 * M + K * kept) * of_key + K * kept * of_value
  )
  far = store.Impress(bound, keep=keep, alpha=0)
  far.attend(0, *call)
  assert far.counters.fallbacks == 1
  assert far.counters.vectors == store.vectors_of_all(K, M, kept)
  assert far.counters.vector_bytes == K * M * of_key + K * kept * of_value
  # The example of the paper.
  assert store.vectors_of_all(32, 4, 1) == 160
  assert store.vectors_of_probes(32, 4, 1, 3) == 76


def test_probes_that_agree_less_and_less():
  kept, new = 16, 1
  threshold = store.overlap_threshold(kept / M, 0.6)
  assert threshold == pytest.approx((0.25 / 1.75) ** 0.6)
  flips = []
  for common in range(kept, -1, -1):
    keys = np.zeros((1, K, M, H), np.float32)
    for head in range(K):
      # `common` tokens are those of all heads, the rest a head's own.
      own = kept + head * kept + np.arange(kept - common)
      keys[0, head, [*range(common), *(own % M)], 0] = 40
      keys[0, head, :, 1] = -0.01 * np.arange(M)
    q = np.zeros((new, K, H), np.float32)
    q[:, :, :2] = 1
    values = np.ones((1, K, M, H), np.float32)
    work = store.Impress(node((keys, values)), keep=0.25)
    own = np.zeros((new, K, H), np.float32)
    _, found = work.attend(0, q, own, own)
    # Of three probes, which are disjoint but for the common ones.
    assert found.similarity == pytest.approx(common / (2 * kept - common))
    assert found.threshold == threshold
    assert found.shared == (found.similarity > threshold)
    if found.shared:
      assert set(range(common)) <= set(found.tokens[0].tolist())
    flips.append(found.shared)
  assert flips == sorted(flips, reverse=True) and len(set(flips)) == 2


def zipf(seed, tokens=256, requests=12):
  """A prefix whose tokens differ in importance, as Zipf's law has it."""
  rng = np.random.default_rng(seed)
  prefix, _ = arrays(seed, tokens=tokens, layers=1)
  weight = np.log(1 / (1 + rng.permutation(tokens)))
  prefix[0][..., 0] = weight * H**0.5
  calls = []
  for n in range(requests):
    _, call = arrays(100 + n)
    call[0][..., 0] = 1
    calls.append((0.3 * call[0] + [0.7, *[0] * (H - 1)], *call[1:]))
  calls = [tuple(np.float32(x) for x in call) for call in calls]
  return prefix, calls


def test_reordering_changes_chunks_and_nothing_else():
  prefix, calls = zipf(4)
  bound = node(prefix, chunk=16)
  before = store.Impress(bound, keep=0.125, alpha=3)
  want = [before.attend(0, *call) for call in calls]
  bound.reorder(before.importance)
  assert sorted(bound.order[0]) == list(range(256))
  assert (bound.order[0] != np.arange(256)).any()
  after = store.Impress(bound, keep=0.125, alpha=3)
  for call, (out, kept) in zip(calls, want, strict=True):
    found, now = after.attend(0, *call)
    assert (now.tokens == kept.tokens).all()
    np.testing.assert_array_equal(found, out)
  assert after.counters.vectors == before.counters.vectors
  assert after.counters.chunks < 0.5 * before.counters.chunks


def whole(bound, prefix, call):
  """Whether a node answers with all of its tokens as attention does."""
  work = store.Impress(bound, keep=1)
  for layer in range(L):
    got, _ = work.attend(layer, *call)
    want = dense(call[0], prefix[0][layer], prefix[1][layer], *call[1:], EVERY)
    np.testing.assert_allclose(got, want, atol=2e-6)


def shelf_of(folder, nbytes):
  """A store of so many bytes: a folder, or host memory if that is None."""
  if folder is None:
    return store.Store(host=nbytes)
  return store.Store(disk=(folder, nbytes), queue=1 << 15)


@pytest.mark.parametrize("room", [1.05, 1.4, 2.2])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_reordering_in_a_small_store(tmp_path, tier, room):
  prefix, call = arrays(7)
  rng = np.random.default_rng(8)
  with store.Store(host=1 << 26) as large:
    nbytes = store.StoredNode(large, b"x", *prefix, chunk=8).nbytes
    blocks = len(large.host)
    assert large.host.nbytes == nbytes
  # Files have headers, and folders of other stores are not in them.
  size = int(room * nbytes) + (80 * blocks if tier == "disk" else 0)
  with shelf_of(tmp_path / "s" if tier == "disk" else None, size) as shelf:
    bound = store.StoredNode(shelf, b"x", *prefix, chunk=8)
    for _ in range(6):
      bound.reorder(rng.random((L, M)))
      # Some chunks are asked for, the others are not.
      store.Impress(bound, keep=0.1, alpha=9).attend(0, *call)
      shelf.flush()
      assert len(getattr(shelf, tier)) == blocks
    assert getattr(shelf, tier).evicted == 0
    whole(bound, prefix, call)


class Ended(BaseException):
  """The process has ended."""


@pytest.mark.parametrize("after", [0, 1, 2, 9, 17, 18, 19, 20, 35])
def test_a_process_that_ends_while_it_reorders(tmp_path, after):
  prefix, call = arrays(9)
  rng = np.random.default_rng(after)
  with store.Store(host=1 << 26) as large:
    nbytes = store.StoredNode(large, b"x", *prefix, chunk=8).nbytes
    nbytes += 80 * len(large.host)
  size = int(1.05 * nbytes)
  # Of a reordering the calls that change the store.
  left = after
  with shelf_of(tmp_path, size) as shelf:
    bound = store.StoredNode(shelf, b"x", *prefix, chunk=8)
    bound.reorder(rng.random((L, M)))
    known = [bound.order.copy()]
    importance = rng.random((L, M))
    known.append(np.argsort(-importance, 1))
    if after % 18 == 1:
      # Just when the note of the layer's order is written anew.
      known.append(EVERY[:L])

    def until(call):
      def counted(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
          raise Ended
        return call(*arguments)

      return counted

    shelf.put, shelf.remove = until(shelf.put), until(shelf.remove)
    with pytest.raises(Ended):
      bound.reorder(importance)
  with shelf_of(tmp_path, size) as shelf:
    again = store.StoredNode(shelf, b"x", *prefix, chunk=8)
    for layer in range(L):
      assert any((again.order[layer] == x[layer]).all() for x in known)
    whole(again, prefix, call)
    again.reorder(rng.random((L, M)))
    whole(again, prefix, call)
    shelf.flush()
    assert shelf.disk.nbytes <= size
  # All of it is there for one who looks into the folder alone.
  with shelf_of(tmp_path, size) as shelf:
    last = store.StoredNode(shelf, b"x", *prefix, chunk=8)
    assert (last.order == again.order).all()
    assert shelf.counters.written == 0


def test_another_order_of_an_earlier_process_is_not_taken_for_this_one(
  tmp_path,
):
  prefix, call = arrays(10)
  rng = np.random.default_rng(11)
  for _ in range(3):
    with shelf_of(tmp_path, 1 << 24) as shelf:
      bound = store.StoredNode(shelf, b"x", *prefix, chunk=8)
      bound.reorder(rng.random((L, M)))
      whole(bound, prefix, call)
  refused(ShapeError, lambda: bound.reorder(np.zeros((L, 3))), "importance")


def test_chunks_of_probes_are_counted():
  prefix, call = arrays(12)
  bound = node(prefix, chunk=16, probes=2)
  work = store.Impress(bound, keep=0.25, alpha=9)
  work.attend(0, *call)
  found = bound.store.counters
  assert work.counters.chunks == found.host_hits
  assert work.counters.chunk_bytes == found.host_bytes


def shared_of(trace, size, access):
  """The part of the important tokens that `access` finds in fast memory."""
  found = total = 0.0
  for chunk, part in trace:
    total += part
    found += part * access(chunk, part)
  return found / total


def test_score_beats_hotness_alone():
  # How often a chunk is used says nothing of how much of it matters.
  rng = np.random.default_rng(5)
  chunks, size = 200, 20
  hot = 1 / (1 + rng.permutation(chunks)) ** 0.6
  part = rng.beta(0.5, 1.5, chunks)
  assert abs(np.corrcoef(hot, part)[0, 1]) < 0.1
  names = rng.choice(chunks, 3000, p=hot / hot.sum())
  trace = [
    (int(n), float(np.clip(part[n] + rng.normal(0, 0.05), 0, 1))) for n in names
  ]

  def by(policy):
    present = set()

    def access(chunk, _):
      hit = chunk in present
      policy.request([chunk])
      if not hit:
        present.add(chunk)
        policy.added(chunk)
        for victim in policy.victims(max(0, len(present) - size)):
          present.remove(victim)
          policy.removed(victim)
      return hit

    return shared_of(trace, size, access)

  tiers = store.ScoredTiers(size, 2 * size)
  scored = shared_of(trace, size, lambda c, p: tiers.access(c, p) == "fast")
  assert scored > 1.15 * by(store.LFU())
  assert scored > 1.5 * by(store.LRU())


def test_tiers_by_hand():
  tiers = store.ScoredTiers(1, 1)
  assert tiers.where("a") == "disk"
  assert tiers.access("a", 0.5) == "disk" and tiers.where("a") == "fast"
  # b matters less: it goes below.
  assert tiers.access("b", 0.1) == "disk" and tiers.where("b") == "slow"
  assert tiers.access("c", 0.05) == "disk" and tiers.where("c") == "disk"
  for _ in range(4):
    assert tiers.access("b", 0.1) == "slow"
  # 0.1 six times is more than 0.5 once.
  assert tiers.access("b", 0.1) == "slow"
  assert (tiers.where("b"), tiers.where("a")) == ("fast", "slow")
  assert tiers.access("b", 0.1) == "fast"


def test_what_is_refused():
  prefix, call = arrays(6)
  bound = node(prefix)
  refused(OptionError, lambda: store.Impress(bound, keep=0), "keep")
  refused(OptionError, lambda: store.Impress(bound, keep=1.5), "keep=1")
  work = store.Impress(bound)
  few = call[1][:, :3]
  refused(
    ShapeError, lambda: work.attend(0, call[0], few, call[2][:, :3]), "3 heads"
  )
  small = store.Store(host=3000)
  gone = store.StoredNode(small, b"x", *prefix)
  with pytest.raises(store.MissingChunk, match="layer 0"):
    store.Impress(gone).attend(0, *call)


@pytest.mark.parametrize("important", [0.0, 0.25])
def test_hits_alone_take_no_more_memory(important):
  tiers = store.ScoredTiers(4, 4)
  for n in range(3000):
    tiers.access(n % 4, important)
  assert sum(map(len, tiers._heaps)) <= 200
  assert [tiers.where(n) for n in range(4)] == ["fast"] * 4

"""Choices of pages of host memory, and keys that are rebuilt on the devices."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.eval import page_recall
from ringjax.kv import kind_text
from ringjax.kv.offload.clustered_keys import Clusters
from ringjax.kv.offload.hashed_keys import Hashes, log_sampled
from ringjax.kv.offload.mean_pages import Means
from ringjax.ops.mask import Coords
from tests.contracts import cache as contract
from tests.helpers import SMALL, make_mesh
from tests.kv.test_chosen_tiered import CAPACITY, B, run, tokens_of

MEANS = "landmarks=means,outlier_pages=1"
# So many that each key is sampled.
HASHES = "landmarks=hashes,hash_bits=1,hash_tables=400"
CLUSTERS = "landmarks=clusters,cluster_tokens=3"
# As many vectors as the keys of the tests' models have numbers.
WHOLE = "unrotated=True,rank=16"


def defined(q, keys, pages, outliers):
  """Pages of each head by definition: q [K, G, H], keys [K, M, P, H]."""
  chosen = []
  for queries, head in zip(q, keys, strict=True):
    mean = head.mean(1)
    s = queries @ mean.T / np.sqrt(q.shape[-1])
    weights = np.exp(s - s.max(1, keepdims=True))
    best = (weights / weights.sum(1, keepdims=True)).max(0)
    dots = (head * mean[:, None]).sum(-1)
    norms = (
      np.linalg.norm(head, axis=-1) * np.linalg.norm(mean, axis=-1)[:, None]
    )
    unlike = np.argsort((dots / norms).min(1))[:outliers].tolist()
    others = [m for m in np.argsort(-best) if m not in unlike]
    chosen.append({*unlike, *others[: pages - outliers]})
  return chosen


@pytest.mark.parametrize("outliers", [0, 2])
def test_pages_are_those_of_the_definition(outliers):
  rng = np.random.default_rng(0)
  q = rng.normal(size=(2, 3, 16)).astype(np.float32)
  keys = rng.normal(size=(2, 9, 4, 16)).astype(np.float32)
  choice, real = Means(outliers), jnp.ones((1, 1, 9, 4, 1), bool)
  landmarks = choice.landmarks(jnp.asarray(keys[None]), real)
  places, reads = choice.ranked(
    jnp.asarray(q[None, :, :, None]),
    landmarks,
    jnp.ones((1, 2, 9), bool),
    (0, *(min(n, 4) for n in range(1, 10))),
  )
  assert reads.sum() == 2 * 4
  got = [{*np.asarray(x[: reads[0, n, 0].sum()])} for n, x in
         enumerate(np.asarray(places[0, :, 0]))]  # fmt: skip
  assert got == defined(q, keys, 4, outliers)


def clusters_of(keys, count, metric):
  """Clusters of a page's keys [P, H], after eight rounds of k-means."""
  root = np.linalg.cholesky(metric)
  x = keys.astype(np.float64) @ root
  means = x[np.arange(count) * len(x) // count]
  nearest = lambda: ((x[:, None] - means[None]) ** 2).sum(-1).argmin(1)
  for _ in range(8):
    cluster = nearest()
    means = [
      x[cluster == n].mean(0) if (cluster == n).any() else means[n]
      for n in range(count)
    ]
    means = np.stack(means)
  return nearest()


@pytest.mark.parametrize("has_queries", [False, True])
def test_clusters_are_those_of_the_definition(has_queries):
  """k-means in the metric of the queries; best clusters, the last in part."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  heads, pages, page, dim, most = 2, 5, 8, 4, 13
  # Keys differ most where queries do not look.
  spread = np.array([1, 1, 3, 3], np.float32)
  q, keys = normal(heads, 3, dim) / spread, normal(heads, pages, page, dim)
  keys, queries = keys * spread, normal(heads, 50, dim) / spread
  moments = np.einsum("kth,ktj->khj", queries, queries)
  metrics = moments if has_queries else np.tile(np.eye(dim), (heads, 1, 1))
  choice = Clusters(3)
  landmarks = choice.landmarks(
    jnp.asarray(keys[None]),
    jnp.ones((1, 1, pages, page, 1), bool),
    # Without queries they are 0.
    moments=jnp.asarray(moments[None] * has_queries),
  )
  ends = jnp.arange(pages * page)[None]
  at = Coords(ends, jnp.ones_like(ends))
  num_read = tuple(min(n * page, most) for n in range(pages + 1))
  units, reads, *_ = choice.chosen(
    jnp.asarray(q[None, :, :, None]), landmarks, None, at, num_read
  )
  assert np.asarray(reads).all() and units.shape[3] == most
  for head in range(heads):
    members, means = [], []
    for n in range(pages):
      cluster = clusters_of(keys[head, n], page // 3, metrics[head])
      for number in range(page // 3):
        tokens = np.flatnonzero(cluster == number)
        if tokens.size:
          members.append(tokens + n * page)
          means.append(keys[head, n, tokens].mean(0))
    sizes = np.array([len(x) for x in members])
    weight = np.exp(q[head] @ np.stack(means).T / np.sqrt(dim))
    share = weight / (weight * sizes).sum(1, keepdims=True)
    order = np.argsort(-share.sum(0))
    want = np.concatenate([members[n] for n in order])[:most]
    assert np.asarray(units)[0, head, 0].tolist() == want.tolist()


def estimate(bits, tables, pages, copies=256):
  """Exact sums of weights and of values, estimates of them, and keys read.

  Each row has the same query and keys, in another basis and at other positions:
  hashes of them, and the parts that are read, are independent.
  """
  rng = np.random.default_rng(0)
  dim, num_pages, page = 8, 8, 8
  slots = num_pages * page
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  bases, upper = np.linalg.qr(normal(copies, dim, dim))
  # With these signs all bases are as likely.
  bases = bases * np.sign(np.diagonal(upper, 0, 1, 2))[:, None]
  turned = lambda x: jnp.asarray(np.einsum("...h,bhj->b...j", x, bases))[
    :, None
  ]
  query, key = normal(2, dim), normal(slots, dim) + 1
  values = normal(slots, 3)
  q, keys = turned(query[:, None]), turned(key)
  pages_of_keys = keys.reshape(copies, 1, num_pages, page, dim)
  real = jnp.ones((copies, 1, num_pages, page, 1), bool)
  pos = np.tile(np.arange(slots, dtype=np.int32), (copies, 1))
  pos[:, 2:] += slots * np.arange(copies, dtype=np.int32)[:, None]
  choice = Hashes(bits, tables, sinks=2, seed=3)
  centres = choice.new_centres(pages_of_keys, real, None)
  landmarks = choice.landmarks(pages_of_keys, real, centres)
  num_read = tuple(min(n, pages) * page for n in range(num_pages + 1))
  at = Coords(jnp.asarray(pos), jnp.ones(pos.shape, jnp.int32))
  chosen = choice.chosen(q, landmarks, centres, at, num_read)
  units = chosen.units
  read_keys = jnp.take_along_axis(keys[:, :, None], units[..., None], 3)
  log_p = choice.log_probability(q, read_keys, centres)
  log_p = np.where(chosen.sampled[:, :, None], log_p, 0) + chosen.log_share
  scores = np.exp(query @ key.T / np.sqrt(dim))
  exact = np.concatenate([scores.sum(-1)[:, None], scores @ values], -1)
  weights = np.take_along_axis(
    np.broadcast_to(scores[None, None, :, None], (copies, 1, 2, 1, slots)),
    np.broadcast_to(np.asarray(units)[:, :, None], log_p.shape),
    4,
  )
  reads = np.asarray(chosen.reads)[:, :, None] & (log_p > -np.inf)
  weights = np.where(reads, weights * np.exp(-np.where(reads, log_p, 0)), 0)
  numerator = np.einsum(
    "bkgtn,bktnj->bkgtj", weights, values[np.asarray(units)]
  )
  estimates = np.concatenate([weights.sum(-1)[..., None], numerator], -1)
  return exact, estimates[:, 0, :, 0], np.asarray(chosen.reads).sum(-1)


@pytest.mark.parametrize("pages", [8, 3])
def test_samples_have_no_bias(pages):
  """Also where a group samples more keys than are read."""
  exact, estimates, count = estimate(1, 3, pages)
  deviation = estimates.std(0) / np.sqrt(len(estimates))
  assert (np.abs(estimates.mean(0) - exact) < 4 * deviation).all()
  # Less than a tenth of the sum of weights, so that a bias would be seen.
  assert (deviation[:, 0] < 0.03 * exact[:, 0]).all()
  assert count.max() == 24 if pages == 3 else 24 < count.mean() < 60


def test_the_probability_of_a_sample_is_exact_where_it_is_small():
  equal = np.array([1e-7, 1e-4, 0.01, 0.3, 0.9])
  for tables in (2, 150):
    rest = np.log1p(-equal)
    # Terms of the binomial distribution, of which none is subtracted.
    want = sum(
      math.comb(tables, n) * equal**n * np.exp((tables - n) * rest)
      for n in range(2, tables + 1)
    )
    got = log_sampled(jnp.asarray(equal, jnp.float32), tables)
    np.testing.assert_allclose(np.asarray(got), np.log(want), atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize(
  "kind",
  [
    f"select:budget=1.0,{MEANS}",
    f"select:budget=1.0,{HASHES}",
    f"select:budget=1.0,{WHOLE}",
    f"select:budget=1.0,{MEANS},{WHOLE}",
    f"select:budget=1.0,{CLUSTERS}",
    f"select:budget=1.0,{CLUSTERS},{WHOLE}",
  ],
)
def test_all_pages_and_vectors_change_nothing(kind):
  ends = (40, 41, 45, 46, 47, 48)
  got, cache = run(f"{kind},device=8,page=8,hot=16", ends=ends, flushes=6)
  want, _ = run("dense", ends=ends, flushes=6)
  contract.close(got, want, 1e-5 * max(1, np.abs(want).max()))
  fetches = cache.fetches()
  # Tokens are copied one by one where hashes or clusters choose them.
  by_token = "hashes" in kind or "clusters" in kind
  key_bytes = (1 if by_token else 8) * 16 * 4
  copied = key_bytes if "rank" in kind else 2 * key_bytes
  assert fetches.misses and fetches.bytes == fetches.misses * copied


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param("select:budget=16", marks=pytest.mark.long),
    pytest.param(f"int8+select:budget=16,{CLUSTERS}", marks=pytest.mark.slow),
    pytest.param(f"select:budget=16,{MEANS},{WHOLE}", marks=pytest.mark.slow),
  ],
)
def test_copies_ahead_change_no_bit(kind):
  """Some of them are misses, which are not copied again."""
  kind, ends = f"{kind},device=8,page=8,hot=16", (40, 41, 42, 44, 45)
  want, plain = run(kind, ends=ends)
  got, cache = run(f"{kind},ahead=3", ends=ends)
  np.testing.assert_array_equal(got, want)
  before, fetches = plain.fetches(), cache.fetches()
  assert fetches[:2] == before[:2]
  assert 0 < fetches.early < fetches.misses
  # Three copies of each layer and call, whatever they hold.
  assert fetches.copied_ahead == 3 * cache.hot[0].page.shape[0] * 4
  page_bytes = before.bytes // before.misses
  copies = fetches.misses - fetches.early + fetches.copied_ahead
  assert fetches.bytes == page_bytes * copies


def test_queries_that_nobody_guesses_are_refused(tmp_path):
  kind = kind_text.parse("select:device=8,hot=64,page=8,ahead=2")
  rj.models.save(contract.model(1, "grouped"), tmp_path)
  placed = rj.models.load(tmp_path, placement="host")
  cache = placed.init_cache(B, CAPACITY, kind=kind).with_room(40)
  with pytest.raises(OptionError, match="ahead.*weights on the devices"):
    placed(tokens_of(1), cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [HASHES, CLUSTERS])
def test_chosen_codes_are_those_without_host_memory(choice):
  """Hashes, probabilities, clusters are of the keys that codes stand for."""
  kind = f"int8+select:budget=1.0,{choice},device=8,page=8,hot=16"
  got, cache = run(kind, ends=(40, 41))
  want, _ = run("int8:page=8", ends=(40, 41))
  contract.close(got, want, 1e-5 * max(1, np.abs(want).max()))
  assert cache.fetches().misses


@pytest.mark.slow
def test_fewer_vectors_are_an_approximation_of_the_first_keys():
  """The error falls with the rank, and is less than that of no keys."""
  errors = []
  want, _ = run("dense")
  for rank in (4, 8, 16):
    kind = (
      f"select:budget=1.0,unrotated=True,rank={rank},device=8,page=8,hot=16"
    )
    got, _ = run(kind)
    errors.append(np.abs(got[:, 40:] - want[:, 40:]).mean())
  assert errors[0] > errors[1] > errors[2]


@pytest.mark.long
@pytest.mark.parametrize(
  "options",
  [
    MEANS,
    f"{MEANS},unrotated=True,rank=4",
    "landmarks=hashes,hash_bits=2,hash_tables=8,unrotated=True",
    pytest.param("ahead=3", marks=pytest.mark.slow),
    pytest.param(f"{CLUSTERS},unrotated=True,rank=4", marks=pytest.mark.slow),
  ],
)
def test_rows_turns_and_drafts_are_independent(options):
  kind = kind_text.parse(f"select:budget=16,page=8,device=8,hot=16,{options}")
  model, text = contract.model(1, "grouped"), tokens_of(60)
  dialogue = [[text[0, :50], text[1, :21]], [text[1, 21:30], text[0, 50:55]]]

  def talk(rows, **more):
    session = rj.infer.Session(model, 160, batch=len(rows), cache_kind=kind)
    return [
      rj.infer.generate(
        model, [turn[n] for n in rows], max_new_tokens=20, cache=session, **more
      ).tokens.tolist()
      for turn in dialogue
    ]

  two_rows = talk([0, 1])
  assert [[first] for first, _ in two_rows] == talk([0])
  assert [[second] for _, second in two_rows] == talk([1])
  assert talk([0, 1], speculate="lookup") == two_rows


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    f"{MEANS},unrotated=True,rank=8",
    "landmarks=hashes,hash_bits=2,hash_tables=8",
    CLUSTERS,
    "ahead=2",
  ],
)
def test_heads_may_be_sharded(options):
  config = {**SMALL, "model_type": "qwen3", "head_dim": 16}
  kind = kind_text.parse(f"select:budget=8,page=8,device=8,hot=16,{options}")
  text = [x.tolist() for x in tokens_of(50)]

  def ask(mesh):
    model = rj.models.create(config, seed=0, mesh=mesh)
    return rj.infer.generate(
      model, text, max_new_tokens=10, cache_kind=kind
    ).tokens.tolist()

  assert ask(rj.make_mesh((2,), ("model",))) == ask(None)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [HASHES, CLUSTERS, "ahead=2"])
def test_shards_of_a_sequence_choose_their_keys(choice):
  """With a mean of keys, or queries, of all shards; all keys are chosen."""
  config = {**SMALL, "model_type": "qwen3", "head_dim": 16}
  text = [x.tolist() for x in tokens_of(50)]

  def ask(mesh, kind):
    model = rj.models.create(config, seed=0, mesh=mesh)
    return rj.infer.generate(
      model, text, max_new_tokens=10, cache_kind=kind
    ).tokens.tolist()

  kind = kind_text.parse(f"select:budget=1.0,page=8,device=8,hot=16,{choice}")
  mesh = rj.make_mesh((2, 2), ("seq", "model"))
  assert ask(mesh, kind) == ask(None, "dense")


@pytest.mark.parametrize(
  ("text", "name"),
  [
    ("dense:device=8,landmarks=means", "landmarks"),
    ("select:landmarks=means", "landmarks"),
    ("select:device=8,hot=64,page=8,landmarks=median", "landmarks"),
    ("select:device=8,hot=64,page=8,outlier_pages=2", "outlier_pages"),
    ("dense:device=8,hot=64,page=8,unrotated=True,rank=4", "rank"),
    ("select:device=8,hot=64,page=8,rank=4", "rank"),
    ("int8+select:device=8,hot=64,page=8,unrotated=True,rank=4", "rank"),
    ("select:device=8,hot=64,page=8,hash_tables=50", "hash_tables"),
    ("select:device=8,hot=64,page=8,landmarks=hashes,hash_bits=20", "hash_b"),
    ("select:device=8,hot=64,page=8,landmarks=hashes,sink_tokens=8", "sink_t"),
    ("select:device=8,hot=64,page=8,cluster_tokens=4", "cluster_tokens"),
    ("dense:device=8,hot=64,page=8,ahead=2", "ahead"),
    ("select:device=8,hot=64,page=8,ahead=0", "ahead"),
    (
      "select:device=8,hot=64,page=8,landmarks=clusters,cluster_tokens=9",
      "got 9",
    ),
  ],
)
def test_options_that_make_no_sense_are_refused_by_name(text, name):
  with pytest.raises(OptionError, match=name):
    kind_text.parse(text)


def test_ranks_that_do_not_fit_are_refused():
  kind = kind_text.parse("select:device=8,hot=64,page=8,unrotated=True,rank=17")
  model = contract.model(1, "grouped")
  with pytest.raises(OptionError, match="rank.*at most 16"):
    model.init_cache(B, CAPACITY, kind=kind)
  kind = kind_text.parse("select:device=8,hot=64,page=8,unrotated=True,rank=4")
  sharded = rj.models.create(SMALL, seed=0, mesh=make_mesh(2, "auto"))
  with pytest.raises(OptionError, match="rank.*2 shards"):
    rj.infer.Session(sharded, 96, batch=1, cache_kind=kind)


@pytest.mark.long
def test_recall_is_what_is_read():
  """All of it with all pages; with one page the sums of a definition."""
  model, text = contract.model(1, "grouped"), tokens_of(60)
  options = dict(prompt=48, every=4, top=8)
  base = "page=8,device=8,hot=32"
  every = page_recall(model, text, f"select:budget=1.0,{base}", **options)
  assert every.recall == 1 and every.attention == pytest.approx(1, abs=1e-6)
  few = page_recall(model, text, f"select:budget=8,{base}", **options)
  assert few.queries == 3 * B and len(few.layers) == len(every.layers)
  for layer in few.layers:
    assert 0 < layer.worst_head <= layer.recall < 1
    assert 0 < layer.attention < 1
  assert few.fetches.misses > 0 and few.record()["top"] == 8
  assert every.error == pytest.approx(0, abs=1e-5) and few.error > 0.01
  # The same tokens are predicted with all pages as by the model itself.
  logits = np.asarray(model(text), np.float64)
  scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nll = -np.take_along_axis(scores[:, 48:59], text[:, 49:, None], 2).mean()
  assert every.nll == pytest.approx(nll, abs=1e-5) and few.nll != every.nll


def test_kinds_without_a_choice_have_no_recall():
  model, text = contract.model(1, "grouped"), tokens_of(60)
  with pytest.raises(OptionError, match="kind"):
    page_recall(model, text, "dense:device=8", prompt=40)
  with pytest.raises(OptionError, match="prompt"):
    page_recall(model, text, "select:device=8,hot=64,page=8", prompt=60)

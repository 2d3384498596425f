"""Policies of eviction: what stays, in which memory, and what it changes."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import tree
from ringjax.errors import NotFiniteError, OptionError
from ringjax.kv import kind_text
from ringjax.kv.cache_kind import KINDS
from ringjax.kv.eviction.eviction import staying
from ringjax.kv.eviction.page_sizes import open_slots, page_sizes
from ringjax.kv.storage.pages import Places, few_sizes
from ringjax.ops.mask import Coords
from tests.contracts import cache as contract
from tests.contracts.cache import holds
from tests.helpers import SMALL, swept

POLICIES = {
  "sinks": rj.kv.Sinks(),
  "keydiff": rj.kv.KeyDiff(),
  "snapkv": rj.kv.SnapKV(window=4),
  "pyramidkv": rj.kv.PyramidKV(window=4, beta=2),
  "adakv": rj.kv.AdaKV(window=4),
  "tova": rj.kv.Tova(),
  "h2o": rj.kv.HeavyHitters(),
  "expected": rj.kv.ExpectedAttention(positions=8),
  "knorm": rj.kv.KeyNorm(),
  "lagkv": rj.kv.LagKV(sinks=1, lag=3),
  "adakv by lagkv": rj.kv.AdaKV(by=rj.kv.LagKV(sinks=1, lag=3, across=True)),
  "fastgen": rj.kv.FastGen(recovered=0.9, window=8),
  "duo": rj.kv.Duo(streaming=((0, 0), (1, 1)), sinks=2, newest=6),
}
B, T, CAPACITY = 2, 12, 32


def all_of(policy):
  """The same policy, with a budget that keeps everything."""
  if isinstance(policy, rj.kv.FastGen):
    return rj.kv.FastGen(recovered=1.0, window=8)
  if isinstance(policy, rj.kv.Duo):
    return rj.kv.Duo()
  return type(policy)(**{**vars(policy), "budget": 1.0})


def kind_of(policy, codec="dense", family="windows", **options):
  kind = contract.kind_of(codec, family)
  options = {"page": 8, "room": 4, "slack": contract.SLACK} | options
  return kind.replace(policy=policy, **options)


def empty(shards, kind, family="windows", batch=B, capacity=CAPACITY):
  model = contract.model(shards, family)
  attend = None
  if shards > 1:
    attend = rj.models.CachedAttention(mesh=model.mesh, axis="seq")
  return model.init_cache(batch, capacity, sharding=attend, kind=kind)


def read(shards, tokens, cache, family="windows", **options):
  logits, cache = contract.model(shards, family)(
    np.asarray(tokens), cache=cache, **options
  )
  return np.asarray(logits), cache


def run(shards, kind, family="windows", splits=(T, T + 1, T + 3, T + 4)):
  """Logits of calls with an eviction behind each, and the cache."""
  tokens = contract.text(family)[0][:B]
  cache, got, start = empty(shards, kind, family), [], 0
  for end in splits:
    call = tokens[:, start:end]
    replicated = end - start < T
    each = np.full((B, shards), -(-call.shape[1] // shards))
    cache = cache.with_room(call.shape[1] if replicated else each)
    logits, cache = read(shards, call, cache, family)
    cache = cache.evict()
    got.append(logits)
    start = end
  return np.concatenate(got, 1), cache


EXACT = [
  *((name, 4, "grouped") for name in POLICIES),
  *(("h2o", 1, family) for family in contract.FAMILIES),
  *(("adakv", 4, family) for family in contract.FAMILIES),
]
# What each kind of cache keeps, with a policy or exact tokens too.
LAWS = (
  contract.evicting_twice_is_evicting_once,
  contract.rows_without_new_tokens_stay,
)
KEPT = {
  **POLICIES,
  "exact": None,
  "snapkv, exact": rj.kv.SnapKV(window=4),
  "kvzip": rj.kv.KVzip(),
  "sinks in the cache": rj.kv.Sinks(budget=6, sinks=2, positions="cache"),
  "kivi, residual": "kivi2:residual=8,group=8,page=8,room=4",
}
# Each policy, in families that take turns.
OFTEN = [
  (name, (4, 1)[n % 2], list(contract.FAMILIES)[n % len(contract.FAMILIES)])
  for n, name in enumerate(POLICIES)
]


def laws():
  for law in LAWS:
    for n, name in enumerate(KEPT):
      for shards in (1, 4):
        quick = shards == 1 and name == ("fastgen", "h2o")[law is LAWS[1]]
        marks = () if quick else pytest.mark.slow
        if not quick and n % 2 == (shards == 1):
          marks = pytest.mark.long
        yield pytest.param(
          law, name, shards, marks=marks, id=f"{law.__name__}-{name}-{shards}"
        )


@pytest.mark.parametrize(("law", "name", "shards"), [*laws()])
def test_law(law, name, shards):
  policy, exact = KEPT[name], "exact" in name
  if isinstance(policy, rj.kv.FastGen):
    # Heads take different choices.
    policy = dataclasses.replace(policy, recovered=0.8)
  codec, recent = ("int4", 4) if exact else ("dense", 0)
  if isinstance(policy, str):
    setup = contract.Setup(kind_text.parse(policy), shards, "grouped")
    if shards > 1:
      with pytest.raises(OptionError, match="residual"):
        setup.empty()
      return
  else:
    kind = kind_of(policy, codec, "grouped", recent=recent)
    setup = contract.Setup(kind, shards, "grouped")
  law(setup)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "shards", "family"),
  swept(EXACT, [*OFTEN, ("snapkv", 4, "windows")]),
)
def test_what_keeps_everything_changes_nothing(name, shards, family):
  got, cache = run(shards, kind_of(all_of(POLICIES[name])), family)
  want = contract.text(family)[1][:B, : T + 4]
  contract.close(got, want, 1e-5 * max(1.0, float(np.abs(want).max())))
  assert cache.length.tolist() == [T + 4] * B


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "codec", "family"),
  [
    ("keydiff", "dense", "grouped"),
    *(
      pytest.param(name, codec, family, marks=pytest.mark.long)
      for name, codec, family in [
        *((name, "dense", "grouped") for name in POLICIES if name != "keydiff"),
        ("snapkv", "int4", "grouped"),
        ("snapkv", "nuq3", "grouped"),
        ("h2o", "int8", "latent"),
        ("tova", "unrotated", "alibi"),
        ("keydiff", "windowed", "windows"),
        ("expected", "hadamard4", "sinks"),
        ("fastgen", "windowed", "recurrent"),
      ]
    ),
  ],
)
def test_shards_keep_the_same_tokens(name, codec, family):
  kind = kind_of(POLICIES[name], codec, family)
  one, whole = run(1, kind, family)
  four, sharded = run(4, kind, family)
  bound = 1e-4 if codec in ("dense", "unrotated", "windowed") else 0.05
  assert np.median(np.abs(one - four)) < bound * np.abs(one).max()
  for row in range(B):
    for a, b in zip(whole.positions(row), sharded.positions(row), strict=True):
      if a is None:
        assert b is None
        continue
      for x, y in zip(a, b, strict=True):
        assert set(x.tolist()) == set(y.tolist()) or codec != "dense"


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "shards", "codec"),
  [
    ("adakv", 1, "dense"),
    pytest.param("h2o", 4, "dense", marks=pytest.mark.long),
    pytest.param("snapkv", 4, "int4", marks=pytest.mark.long),
  ],
)
@pytest.mark.parametrize("change", [contract.renamed, contract.split])
def test_pages_are_names_and_views_merge(name, shards, codec, change):
  """Of pages with other numbers, and of views that are read as two."""
  kind = kind_of(POLICIES[name], codec, "grouped")
  _, cache = run(shards, kind, "grouped", splits=(T,))
  cache = cache.with_room(2)
  args = () if change is contract.split else (np.random.default_rng(3),)
  other = change(cache, *args)
  if change is contract.renamed:
    assert any(
      np.any(np.asarray(a.table) != np.asarray(b.table))
      for a, b in zip(cache.pages, other.pages, strict=True)
    )
  more = contract.text("grouped")[0][:B, T : T + 2]
  want, _ = read(shards, more, cache, "grouped")
  got, _ = read(shards, more, other, "grouped")
  contract.close(got, want, 1e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.long
def test_memory_is_returned_for_each_head():
  """A head that keeps fewer tokens has fewer pages, and bytes say so."""
  config = {**SMALL, "model_type": "llama", "num_hidden_layers": 2}
  model = rj.models.create(config | {"num_key_value_heads": 2}, seed=0)
  tokens = np.random.default_rng(0).integers(1, 64, (1, 512)).astype(np.int32)

  def bytes_of(streaming):
    policy = rj.kv.Duo(streaming=streaming, sinks=4, newest=28)
    kind = rj.kv.CacheConfig(policy=policy, room=32)
    _, cache = model(tokens, cache=model.init_cache(1, 512, kind=kind))
    cache = cache.evict()
    held = cache.tokens()[0][:, 0]
    for layer in range(2):
      for head in range(2):
        few = (layer, head) in streaming
        assert held[layer, head] == (32 if few else 512)
    return cache.nbytes()

  every = bytes_of(())
  one = bytes_of(((0, 1),))
  two = bytes_of(((0, 1), (1, 0)))
  all_ = bytes_of(((0, 0), (0, 1), (1, 0), (1, 1)))
  # 480 tokens of a head: keys, values and coordinates.
  token = 4 * (model.kinds[0].key + model.kinds[0].value) + 8
  assert abs((every - one) - 480 * token) < 0.07 * every
  assert every > one > two > all_
  assert all_ < every / 6


@pytest.mark.parametrize(
  ("policy", "each"),
  [
    (None, "layers"),
    pytest.param(rj.kv.Sinks(), "layers", marks=pytest.mark.long),
    pytest.param(rj.kv.Select(), "layers", marks=pytest.mark.long),
    pytest.param(rj.kv.Tova(), "heads", marks=pytest.mark.long),
    pytest.param(rj.kv.SnapKV(window=4), None, marks=pytest.mark.long),
  ],
)
def test_positions_are_stored_once_where_heads_keep_the_same(policy, each):
  """Four bytes a slot: of all layers, of a layer, or of each head."""
  exact = {"first": 1, "recent": 2} if policy is None else {}
  kind = kind_of(policy, family="grouped", **exact)
  _, cache = run(1, kind, "grouped", splits=(T,))
  (pages,), shape = cache.pages, cache.shapes[0]
  slots = B * pages.table.shape[3] * pages.slots
  slots *= {"layers": 1, "heads": shape.layers}.get(each, 0)
  count = slots or pages.k.shape[0] * pages.slots
  parts = cache.explain("tpu-v5e").parts
  assert parts["pages: coordinates"] == 4 * count
  positions = cache.positions(0)
  for heads in positions:
    for head in heads if each else ():
      np.testing.assert_array_equal(head, heads[0])
  if each == "layers":
    np.testing.assert_array_equal(positions[0][0], positions[1][0])


@pytest.mark.long
@pytest.mark.parametrize(
  "policy",
  [
    None,
    pytest.param(rj.kv.Sinks(budget=99), marks=pytest.mark.long),
    pytest.param(rj.kv.SnapKV(budget=99, window=4), marks=pytest.mark.long),
  ],
)
def test_documents_stay_apart_behind_an_eviction(policy):
  """A row of two documents, beside one that comes from another cache."""
  exact = {"first": 1, "recent": 2} if policy is None else {}
  kind = kind_of(policy, family="grouped", **exact)
  tokens = contract.text("grouped")[0][:B]
  # The first row goes on with its second document.
  seg = np.ones((B, T), np.int32)
  seg[0, 5:] = 2
  pos = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  pos[0, 5:] -= 5
  more = dict(
    segment_ids=np.array([[2, 2], [1, 1]], np.int32),
    positions=pos[:, -1:] + np.array([[1, 2]], np.int32),
  )

  def answers(kind, evicts):
    both = empty(1, kind, "grouped")
    _, both = read(
      1, tokens[:, :T], both, "grouped", segment_ids=seg, positions=pos
    )
    alone = empty(1, kind, "grouped", 1)
    _, alone = read(1, tokens[1:, :T], alone, "grouped")
    if evicts:
      both, alone = both.evict(), alone.evict()
      both = both.reset([1]).insert([1], alone).with_room(2)
    return read(1, tokens[:, T : T + 2], both, "grouped", **more)[0]

  want = answers(contract.kind_of("dense", "grouped"), evicts=False)
  contract.close(answers(kind, evicts=True), want)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shards", "codec"),
  [
    (1, "dense"),
    pytest.param(1, "int8", marks=pytest.mark.long),
    pytest.param(4, "dense", marks=pytest.mark.long),
  ],
)
def test_sums_of_a_prompt_need_none_of_its_queries(shards, codec):
  """Those of calls that may not be taken back are those of noted queries."""
  policy = rj.kv.HeavyHitters(budget=6)
  kind = kind_of(policy, codec, "grouped", room=4)
  model = contract.model(shards, "grouped")
  where = dict(mesh=model.mesh, axis="seq") if shards > 1 else {}
  tokens = contract.text("grouped")[0][:B]
  noting = rj.models.CachedAttention(**where)
  prompts = (
    rj.models.ContextParallel(**where),
    rj.models.CachedAttention(**where, replicated=False),
  )

  def read_all(attends):
    """Two prompts, an eviction behind the first alone; a token; another."""
    cache = empty(shards, kind, "grouped", capacity=4)
    cache, noted = cache.limited(2 * T), 0
    calls = (0, 8), (8, T), (T, T + 4)
    for (start, end), attend in zip(calls, attends, strict=True):
      width = end - start
      taken = np.full((B, shards), width // shards)
      cache = cache.with_room(width if attend is noting else taken)
      _, cache = read(
        shards, tokens[:, start:end], cache, "grouped", attend=attend
      )
      noted = max(noted, cache.noted[0].newest.shape[2])
      if end == T:
        cache = cache.evict()
    _, cache = read(shards, tokens[:, -1:], cache.with_room(1), "grouped")
    return cache.evict(), noted

  want, many = read_all((noting, noting, noting))
  got, few = read_all((*prompts, prompts[1]))
  assert few == 4 and many == T
  for a, b in zip(got.positions(1), want.positions(1), strict=True):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)
  sums = [
    np.sort(np.asarray(x.pages[0].score).reshape(-1)) for x in (got, want)
  ]
  assert sums[0].any()
  np.testing.assert_allclose(*sums, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_rows_are_independent():
  kind = kind_of(POLICIES["snapkv"], family="grouped")
  tokens = contract.text("grouped")[0]
  lengths = np.array([T, 5])
  seg = (np.arange(T)[None] < lengths[:, None]).astype(np.int32)
  cache = empty(1, kind, "grouped")
  _, cache = read(1, tokens[:B, :T] * seg, cache, "grouped", segment_ids=seg)
  cache = cache.evict()
  _, alone = read(1, tokens[:1, :T], empty(1, kind, "grouped", 1), "grouped")
  alone = alone.evict()
  for a, b in zip(cache.positions(0), alone.positions(0), strict=True):
    np.testing.assert_array_equal(np.stack(a), np.stack(b))
  assert cache.tokens()[0][0].tolist() == [[6, 6], [2, 2]]
  assert cache.length.tolist() == lengths.tolist()
  # Its row in place of the other one.
  both = cache.reset([1]).insert([1], alone)
  assert both.length.tolist() == [T, T]
  more = np.tile(tokens[:1, T : T + 2], (2, 1))
  logits, after = read(1, more, both, "grouped")
  contract.close(logits[1], logits[0])
  want, _ = read(1, more[:1], alone, "grouped")
  contract.close(logits[0], want[0])
  # Rejected tokens leave no trace; two rows share pages.
  after = after.keep(np.array([[True, False], [False, False]]))
  assert after.length.tolist() == [T + 1, T]
  again, _ = read(1, more[:1, :1], after.take([1]), "grouped")
  contract.close(again[0], want[0, :1])
  assert after.truncate(4).length.tolist() == [4, 4]


@pytest.mark.long
def test_evicting_one_of_three_rows_that_share_pages_harms_no_other():
  tokens = contract.text("grouped")[0]
  kind = kind_of(POLICIES["snapkv"], family="grouped")
  _, cache = read(1, tokens[:1, :T], empty(1, kind, "grouped", 1), "grouped")
  source = cache.evict()
  before = jax.tree.map(np.asarray, source)
  more = np.tile(tokens[:1, T : T + 4], (3, 1))
  want, _ = read(1, more[:1], source.with_room(4), "grouped")
  three = source.take([0, 0, 0])
  assert three.pages[0].k.nbytes == source.pages[0].k.nbytes
  # The second goes on, and is evicted.
  seg = np.zeros((3, 4), np.int32)
  seg[1] = 1
  _, three = read(
    1, more, three.with_room(4), "grouped", segment_ids=seg,
    positions=np.tile(np.arange(T, T + 4, dtype=np.int32), (3, 1)),
  )  # fmt: skip
  three = three.evict()
  assert three.length.tolist() == [T, T + 4, T]
  assert three.tokens()[0][0].tolist() == [[6, 6], [8, 8], [6, 6]]
  jax.tree.map(np.testing.assert_array_equal, before, source)
  kept = lambda cache, row: [np.stack(x).tolist() for x in cache.positions(row)]
  assert kept(three, 0) == kept(three, 2) == kept(source, 0)
  assert kept(three, 1) != kept(source, 0)
  for row in (0, 2):
    got, _ = read(1, more[:1], three.take([row]).with_room(4), "grouped")
    contract.close(got, want)


def test_the_first_and_the_newest_tokens_stay_open():
  """Of rows that are evicted; of the others all that are there."""
  pos = jnp.array([[2, 4, 0, 1, 3, 0]] * 2, jnp.int32)
  seg = jnp.array([[1, 1, 1, 1, 1, 0]] * 2, jnp.int32)
  kind = rj.kv.CacheConfig(policy=rj.kv.SnapKV(), first=1, recent=2, page=8)
  stays = staying(Coords(pos, seg), kind, Places(), jnp.array([True, False]))
  want = [[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0]]
  np.testing.assert_array_equal(stays, np.array(want, bool))


@pytest.mark.long
def test_exact_tokens_stay_as_they_are():
  """With a codec the first and the newest tokens are not encoded."""
  kind = kind_of(None, "int2", "grouped", first=2, recent=5)
  tokens, want = contract.text("grouped")[0], contract.text("grouped")[1]
  got, cache = run(1, kind, "grouped")
  assert cache.tokens()[0].min() == T + 4
  pos, seg = (np.asarray(x) for x in cache.open.at)
  stays = sorted(pos[0][seg[0] > 0].tolist())
  assert stays == [0, 1, *range(T - 1, T + 4)]
  assert cache.open.slots[0].k.dtype == np.float32
  assert cache.pages[0].k.dtype == np.uint8
  # Before the first eviction nothing was encoded.
  contract.close(got[:, :T], want[:B, :T], 1e-4)
  assert np.abs(got - want[:B, : T + 4]).max() > 1e-3
  del tokens


@pytest.mark.long
@pytest.mark.parametrize(
  ("shards", "options"),
  [
    (1, {}),
    pytest.param(1, {"prefill": "chunked", "chunk": 8}, marks=pytest.mark.long),
    pytest.param(4, {}, marks=pytest.mark.long),
  ],
)
def test_generate_evicts_by_itself(shards, options):
  model = contract.model(shards, "grouped")
  tokens = contract.text("grouped")[0]
  prompts = [tokens[0, :20], tokens[1, :9]]
  ask = functools.partial(rj.infer.generate, model, prompts, max_new_tokens=9)
  all_ = kind_of(all_of(POLICIES["snapkv"]), family="grouped")
  few = kind_of(POLICIES["snapkv"], family="grouped")
  np.testing.assert_array_equal(
    ask(cache_kind=all_).tokens, ask(cache_kind="dense").tokens
  )
  session = rj.infer.Session(model, 64, batch=2, cache_kind=few)
  new = ask(cache=session, **options)
  assert new.lengths.tolist() == [9, 9]
  held = session.cache.tokens()[0]
  assert held.max() <= 10 + 2 + few.room + 4
  # Another turn, behind what was kept.
  rj.infer.generate(model, tokens[:2, :5], max_new_tokens=3, cache=session)
  assert session.lengths.tolist() == [20 + 9 + 5 + 2, 9 + 9 + 5 + 2]


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
  for budget in (0, 1, 0.0, 1.5, -1, True, "half"):
    with pytest.raises(OptionError, match="budget"):
      rj.kv.SnapKV(budget=budget)
  with pytest.raises(OptionError, match="odd"):
    rj.kv.SnapKV(kernel=4)
  with pytest.raises(OptionError, match=r"rj.kv.Policy"):
    rj.kv.CacheConfig(policy="snapkv")
  with pytest.raises(OptionError, match="two of a policy"):
    contract.model(1).init_cache(1, 32, kind="snapkv+tova")
  stream = "sinks:budget=8,positions=cache"
  with pytest.raises(OptionError, match="looks back a window"):
    contract.model(1).init_cache(1, 32, kind=stream)
  kind = kind_of(POLICIES["snapkv"], family="grouped")
  cache = empty(1, kind, "grouped")
  tokens = contract.text("grouped")[0][:B, :T]
  with pytest.raises(OptionError, match="inside of jit"):
    jax.jit(lambda cache: cache.evict())(cache)
  _, cache = read(1, tokens, cache, "grouped")
  cache = cache.evict()
  with pytest.raises(OptionError, match="policy"):
    cache.export(0, 0, 4)
  with pytest.raises(OptionError, match="an empty cache"):
    read(1, tokens, cache, "grouped", attend=rj.models.ContextParallel())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faulty(rj.kv.Policy):
  """Scores of which those of the last head of the last row are wrong."""

  score: float

  def scores(self, look):
    fine = -look.pos.astype(np.float32)
    row, head = jnp.indices(fine.shape[:2], sparse=True)
    last = (row == fine.shape[0] - 1) & (head == fine.shape[1] - 1)
    return jnp.where(last[..., None], self.score, fine)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing(rj.kv.Policy):
  """Keeps no token, whatever the scores are."""

  def scores(self, look):
    return jnp.zeros(look.pos.shape, np.float32)

  def kept(self, scores, counts):
    return scores > 0


@pytest.mark.long
@pytest.mark.parametrize(
  ("policy", "says"),
  [
    (Faulty(score=float("nan")), "NaN, in row 1"),
    (Faulty(score=-float("inf")), "of a head, in row 1"),
    pytest.param(Nothing(), "of a head, in row 0", marks=pytest.mark.long),
  ],
)
def test_scores_that_lose_a_head_are_refused(policy, says):
  """By the policy's name; the cache goes on with all of its tokens."""
  tokens = contract.text("grouped")[0][:B]
  cache = empty(1, kind_of(policy, family="grouped"), "grouped")
  _, cache = read(1, tokens[:, :T], cache.with_room(T), "grouped")
  with pytest.raises(NotFiniteError, match=f"{type(policy).__name__}.*{says}"):
    cache.evict()
  assert all((x == T).all() for x in cache.tokens())
  got, _ = read(1, tokens[:, T : T + 1], cache.with_room(1), "grouped")
  contract.close(got, contract.text("grouped")[1][:B, T : T + 1])


@pytest.mark.long
@pytest.mark.parametrize(
  ("recovered", "shards"),
  [(0.5, 1), *(pytest.param(*x, marks=pytest.mark.long)
               for x in ((0.01, 1), (0.9, 4), (1.0, 1)))],
)  # fmt: skip
def test_heads_say_what_they_chose(recovered, shards):
  """FastGen's sets hold each other; which one is seen in what is kept."""
  policy = rj.kv.FastGen(recovered=recovered, budget=3, local=3, window=T)
  family = "grouped"
  names = policy.choices
  tokens = contract.text(family)[0][:B]
  cache = empty(shards, kind_of(policy, family=family), family)
  each = T if shards == 1 else np.full((B, shards), T // shards)
  _, cache = read(shards, tokens[:, :T], cache.with_room(each), family)
  assert set(cache.choices(0)) == {None}
  cache = cache.evict()
  for row in range(B):
    pairs = zip(cache.choices(row), cache.positions(row), strict=True)
    for heads, kept in pairs:
      for name, mine in zip(heads, kept, strict=True):
        least, most = {
          names[0]: (2, 2), names[1]: (4, 5), names[2]: (4, 7), names[3]: (T, T)
        }[name]  # fmt: skip
        assert {0, T - 1} <= set(mine.tolist())
        assert least <= mine.size <= most
        assert name in {0.01: names[:1], 1.0: names[3:]}.get(recovered, names)
  assert cache.take([1]).choices(0) == cache.choices(1)
  assert set(cache.reset([0]).choices(0)) == {None}


def fixing(**options):
  """FastGen that looks at 72 queries, and at 64 once choices are fixed."""
  options = dict(recovered=0.3, budget=0.1, local=0.1, window=72) | options
  return kind_of(rj.kv.FastGen(**options), family="grouped", room=8)


PROMPT = np.random.default_rng(5).integers(1, 64, (2, 96)).astype(np.int32)


@pytest.mark.long
def test_heads_keep_what_they_chose_for_a_prompt():
  """An eviction behind a prompt fixes choices; fewer queries stay noted."""
  cache = empty(1, fixing(), "grouped", 1, 128).with_room(80)
  _, cache = read(1, PROMPT[:1, :80], cache, "grouped")
  plain, fixed = cache.evict(), cache.evict(ended=np.ones(1, bool))
  assert holds(fixed) == holds(plain) and fixed.choices(0) == plain.choices(0)
  shape = fixed.shapes[0]
  noted = [x.noted[0].newest.shape[2] for x in (plain, fixed)]
  assert noted == [72, 64]
  fewer = plain.nbytes() - fixed.nbytes()
  query = shape.layers * shape.heads * shape.reading.groups * shape.key * 4
  assert fewer == 8 * (query + 3 * 4)
  # Heads that choose would now take everything.
  whole = fixing(recovered=1.0)
  later = [dataclasses.replace(x, kind=whole) for x in (plain, fixed)]
  for n, after in enumerate(later):
    _, after = read(1, PROMPT[:1, 80:88], after.with_room(8), "grouped")
    later[n] = after.evict()
  assert {x for heads in later[0].choices(0) for x in heads} == {"full"}
  assert later[1].choices(0) == fixed.choices(0) != later[0].choices(0)
  assert later[1].tokens()[0].sum() < later[0].tokens()[0].sum()
  # A row that begins anew chooses, by as many queries as before.
  for anew in (fixed.reset([0]), fixed.truncate(0).with_slack(0)):
    assert anew.noted[0].newest.shape[2] == 72
    assert not np.asarray(anew.noted[0].fixed).any()
  pair = plain.take([0, 0]).insert([1], fixed)
  assert np.asarray(pair.noted[0].fixed)[0, :, 0].tolist() == [False, True]


@pytest.mark.slow
def test_rows_fix_their_choices_apart():
  """Beside a short row, whose heads choose on, a long one is as it is alone."""
  model, rows = contract.model(1, "grouped"), [PROMPT[0], PROMPT[1, :20]]

  def answers(which, **options):
    session = rj.infer.Session(
      model, 256, batch=len(which), cache_kind=fixing(), **options
    )
    new = rj.infer.generate(
      model, [rows[n] for n in which], max_new_tokens=12, cache=session
    )
    return session.cache, new.tokens.tolist()

  width = lambda cache: cache.noted[0].newest.shape[2]
  (both, told), (long, of_long) = answers([0, 1]), answers([0])
  assert told[:1] == of_long
  assert holds(both)[:1] == holds(long)
  assert both.choices(0) == long.choices(0)
  assert (width(both), width(long)) == (72, 64)
  # In groups each row has a cache, and queries, of its own.
  groups, of_groups = answers([0, 1], rows_at_once=1)
  assert of_groups == told
  assert list(map(width, groups.caches)) == [64, 72]


def test_a_share_of_no_attention_is_refused():
  for recovered in (0, 0.0, -0.5, 1.5):
    with pytest.raises(OptionError, match=r"recovered.* above 0, at most 1"):
      rj.kv.FastGen(recovered=recovered)
  with pytest.raises(OptionError, match="recovered: got 0"):
    kind_text.parse("fastgen:recovered=0")


def test_kinds_have_a_text():
  for text in ("snapkv", "int4+snapkv:budget=0.2", "nuq3+h2o:recent=32"):
    kind = kind_text.parse(text)
    assert kind_text.parse(str(kind)) == kind
  kind = kind_text.parse("int4+snapkv:budget=1024,group=32,window=16")
  assert kind.policy == rj.kv.SnapKV(budget=1024, window=16)
  assert kind.codec.keys.group == 32
  assert KINDS["snapkv"].policy == rj.kv.SnapKV()


def test_sizes_are_few():
  sizes = {few_sizes(n) for n in range(1, 5000)}
  assert all(few_sizes(n) >= n for n in range(1, 5000))
  assert all(few_sizes(n) <= 1.07 * n + 1 for n in range(1, 5000))
  assert len(sizes) < 160


@pytest.mark.usefixtures("unchecked")
def test_what_keeps_all_tokens_refuses_policies():
  model = contract.model(1)
  for call in (
    lambda: rj.kv.SimulatedCache.create(model, "int4+snapkv"),
    lambda: kind_of(None, "int4", recent=8).keeping_all("a plan"),
  ):
    with pytest.raises(OptionError, match="without a policy"):
      call()


@pytest.mark.long
@pytest.mark.parametrize("codec", ["dense", "int8"])
def test_selected_pages_hold_what_matters(codec):
  """Reading all pages is exact; reading some comes near, in less work."""
  model, tokens = contract.model(1, "grouped"), contract.text("grouped")[0]

  def read(budget):
    kind = kind_of(rj.kv.Select(budget=budget), codec, "grouped", room=8)
    cache = model.init_cache(B, 64, kind=kind)
    text = np.tile(tokens[:B], (1, 2))
    _, cache = model(text, cache=cache)
    cache = cache.evict()
    assert cache.tokens()[0].min() == 48
    logits, _ = model(tokens[:B, :2], cache=cache)
    return np.asarray(logits), cache

  every, cache = read(1.0)
  half, _ = read(0.5)
  least, _ = read(2)
  text = np.concatenate([np.tile(tokens[:B], (1, 2)), tokens[:B, :2]], 1)
  want = np.asarray(model(text))[:, 48:]
  size = np.abs(want).max()
  assert np.abs(every - want).max() < (1e-4 if codec == "dense" else 0.1) * size
  far = [np.abs(x - every).mean() for x in (half, least)]
  assert 0 < far[0] < far[1]
  if codec == "dense":
    # The bounds hold for each key of a page.
    pages = cache.pages[0]
    table = np.asarray(pages.table)
    k, bounds = np.asarray(pages.k)[table], np.asarray(pages.bounds)[table]
    real = np.asarray(pages.read_coords().seg).reshape(k.shape[:-1])
    real = real[..., None] > 0
    low, high = np.moveaxis(bounds, -2, 0)[..., None, :]
    assert real.any()
    assert (np.where(real, k, np.inf) >= low).all()
    assert (np.where(real, k, -np.inf) <= high).all()


@pytest.mark.slow
@pytest.mark.long
def test_a_mesh_of_three_axes_and_one_device_of_it():
  """Batch, sequence and heads are sharded; and a cache that goes elsewhere.

  Tokens that stay exact have sums too, which go along.
  """
  kind = rj.kv.CacheConfig(
    policy=rj.kv.HeavyHitters(budget=0.4), page=8, room=8, first=2, recent=8
  )
  contract.answers_as_one_device(kind)


_compiled = [0]


def _heard(event, duration, **_):
  del duration
  _compiled[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_heard)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kivi2:room=4,recent=16", "h2o:room=4"])
def test_a_small_room_compiles_no_program_at_each_eviction(kind):
  """Eight evictions more have arrays of one other size at most."""
  config = {**SMALL, "model_type": "llama", "num_hidden_layers": 2}
  model = rj.models.create(config, seed=0)
  tokens = np.random.default_rng(0).integers(1, 64, (1, 100)).astype(np.int32)

  def compiled(count):
    before = _compiled[0]
    rj.infer.generate(model, tokens, max_new_tokens=count, cache_kind=kind)
    return _compiled[0] - before

  assert compiled(9) > 0
  # Four programs of each eviction would be 32.
  assert compiled(41) <= 20


@pytest.mark.parametrize(
  ("text", "length", "counts"),
  [
    # 1,638 without the 15 that come, in whole pages of 32.
    ("h2o:budget=.2", 8192, 1600),
    ("snapkv:budget=1024", 8192, 1024 - 15),
    ("tova:budget=.2,room=1", 1000, 200),
    # At most a sixteenth of a small budget.
    ("sinks:budget=.2", 512, 102 - 6),
    ("h2o:budget=.2,recent=30,page=8,room=3", 5000, 998),
    ("h2o:budget=.3,recent=30,page=8,room=3", 5000, 30 + 1464),
    ("knorm:budget=1.0", 8192, 8192),
    ("snapkv:budget=1024", 700, 1024),
    # Its budget is that of all heads and layers, once.
    ("kvzip:budget=.5", 4096, 4 * 4096),
  ],
)
def test_a_budget_includes_the_tokens_until_the_next_eviction(
  text, length, counts
):
  kind = kind_text.parse(text)
  assert kind.counts(length, [4, 4]) == [counts] * 2


def test_kinds_of_layers_have_sizes_of_their_own_when_they_grow():
  """Pages for the heads of two kinds of layers, of which one needs more."""
  kind = kind_text.parse("h2o:room=4,page=8")
  cache = contract.model(1, "grouped").init_cache_spec(1, 256, kind=kind)
  (pages,) = cache.pages
  heads = math.prod(pages.table.shape[:3])
  needs = {0: (heads * 13, 13), 1: (heads * 25, 25)}
  few, many = page_sizes((pages, pages), needs, 200)
  assert heads * 13 <= few[0] < heads * 25 <= many[0]
  assert few[1] >= 13 and many[1] >= 25


@pytest.mark.long
def test_a_cache_stays_within_its_budget_while_an_answer_grows():
  """No head holds more than the budget, or one token more, as in the paper."""
  model = contract.model(1, "grouped")
  kind = kind_text.parse("h2o:budget=64,room=4,page=8")
  tokens = np.tile(contract.text("grouped")[0][:1], (1, 8))[:, :96]
  session = rj.infer.Session(model, 256, batch=1, cache_kind=kind)
  held = []
  rj.infer.generate(
    model, tokens, max_new_tokens=20, cache=session,
    stream=lambda *_: held.append(int(session.cache.tokens()[0].max())),
  )  # fmt: skip
  assert len(held) == 20
  # The next step is dispatched before a token is shown.
  assert 61 <= min(held[1:]) <= 63 and 64 <= max(held[1:]) <= 65


@pytest.mark.parametrize(
  "text", ["kivi2:room=4,recent=16", "h2o:room=4,page=8"]
)
def test_a_cache_that_grows_has_few_sizes(text):
  """Two in 64 tokens, the first as small as the pages that are there."""
  kind = kind_text.parse(text)
  cache = contract.model(1, "grouped").init_cache_spec(1, 256, kind=kind)
  (pages,) = cache.pages
  lead, like = pages.table.shape[:3], jax.ShapeDtypeStruct
  sizes = []
  for count in range(100, 164, 4):
    need = count if kind.grouped else count // 2
    each = -(-need // kind.layout.page)
    needs = {0: (math.prod(lead) * each, each)}
    ((total, table),) = page_sizes((pages,), needs, count if sizes else None)
    assert total >= needs[0][0] and table >= each
    sizes.append((total, table))
    pages = tree.with_leaves(
      pages,
      k=like((total, *pages.k.shape[1:]), pages.k.dtype),
      table=like((*lead, table), pages.table.dtype),
    )
  assert len(set(sizes)) == 2
  left = range(16, 48) if kind.grouped else (0,)
  assert len({open_slots(kind, n, 1) for n in left}) == 1

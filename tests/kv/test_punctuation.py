"""Policies that look at ids: FastGen's punctuation, and the marks behind it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv import kind_text
from tests import checkpoints
from tests.contracts import cache as contract
from tests.helpers import SMALL, make_mesh

FAMILY = "mistral"
CONFIG = checkpoints.config(FAMILY) | {"sliding_window": None}
IDS = tuple(range(0, 101, 4))
PAGES = {"page": 8, "room": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """The model on so many shards."""
  folder = tmp_path_factory.mktemp("model")
  checkpoints.write_folder(checkpoints.tensors(FAMILY), CONFIG, folder)

  @functools.cache
  def of(shards):
    mesh = make_mesh(shards, "auto") if shards > 1 else None
    return rj.models.load(folder, dtype=np.float32, mesh=mesh)

  return of


def empty(model, policy, batch=2, capacity=64):
  attend = None
  if model.mesh is not None:
    attend = rj.models.CachedAttention(mesh=model.mesh, axis="seq")
  kind = rj.kv.CacheConfig(policy=policy, **PAGES)
  return model.init_cache(batch, capacity, sharding=attend, kind=kind)


def read(model, cache, tokens, lengths):
  """Logits and cache behind the first `lengths` of each row's tokens."""
  seg = np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]
  seg = seg.astype(np.int32)
  cache = cache.with_room(np.full((len(tokens), cache.shards), seg.shape[1]))
  logits, cache = model(tokens * seg, cache=cache, segment_ids=seg)
  return np.asarray(logits), cache


# ---------------------------------------------------------------------------
# FastGen, by brute force
# ---------------------------------------------------------------------------


class Reference:
  """One row of a Llama in float64, each KV head with its own kept tokens."""

  def __init__(self, policy):
    self.policy, self.ids = policy, []
    self.weights = checkpoints.tensors(FAMILY)
    layers, heads = CONFIG["num_hidden_layers"], CONFIG["num_key_value_heads"]
    self.heads, self.groups = heads, CONFIG["num_attention_heads"] // heads
    self.dim = CONFIG["head_dim"]
    self.seen = [dict(q=[], k=[], v=[]) for _ in range(layers)]
    self.kept = [[[] for _ in range(heads)] for _ in range(layers)]
    self.choices = [[None] * heads for _ in range(layers)]

  def read(self, tokens):
    """The logits behind tokens, one by one."""
    return np.stack([self._step(int(token)) for token in tokens])

  def _w(self, name):
    return self.weights[name].astype(np.float64)

  def _norm(self, x, name):
    scale = np.sqrt(np.mean(x * x) + CONFIG["rms_norm_eps"])
    return x / scale * self._w(f"{name}.weight")

  def _rotated(self, x, pos):
    half = self.dim // 2
    angle = pos / 10000.0 ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  def _step(self, token):
    pos = len(self.ids)
    self.ids.append(token)
    x = self._w("model.embed_tokens.weight")[token]
    for n, seen in enumerate(self.seen):
      name = f"model.layers.{n}."
      h = self._norm(x, f"{name}input_layernorm")
      q, k, v = (
        (self._w(f"{name}self_attn.{one}_proj.weight") @ h).reshape(
          -1, self.dim
        )
        for one in "qkv"
      )
      seen["q"].append(self._rotated(q, pos).reshape(-1, self.groups, self.dim))
      seen["k"].append(self._rotated(k, pos))
      seen["v"].append(v)
      out = []
      for head in range(self.heads):
        self.kept[n][head].append(pos)
        kept = self.kept[n][head]
        values = np.stack([seen["v"][j][head] for j in kept])
        out += [self._row(n, head, g, pos) @ values for g in range(self.groups)]
      x = x + self._w(f"{name}self_attn.o_proj.weight") @ np.concatenate(out)
      h = self._norm(x, f"{name}post_attention_layernorm")
      gate, up = (
        self._w(f"{name}mlp.{one}_proj.weight") @ h for one in ("gate", "up")
      )
      h = gate / (1 + np.exp(-gate)) * up
      x = x + self._w(f"{name}mlp.down_proj.weight") @ h
    return self._w("lm_head.weight") @ self._norm(x, "model.norm")

  def _row(self, n, head, g, pos):
    """The weights of a query over the kept keys, 0 of later ones."""
    seen, kept = self.seen[n], self.kept[n][head]
    keys = np.stack([seen["k"][j][head] for j in kept])
    s = keys @ seen["q"][pos][head, g] / np.sqrt(self.dim)
    s = np.where(np.asarray(kept) <= pos, s, -np.inf)
    e = np.exp(s - s.max())
    return e / e.sum()

  def evict(self):
    for n in range(len(self.seen)):
      for head in range(self.heads):
        self._evict(n, head)

  def _evict(self, n, head):
    p, length, kept = self.policy, len(self.ids), self.kept[n][head]
    queries = range(max(0, length - p.window), length)
    weights = np.array(
      [
        [self._row(n, head, g, pos) for pos in queries]
        for g in range(self.groups)
      ]
    )
    # Column sums, over the queries that could see the key.
    column = weights.sum(1).mean(0)
    could = [min(length - j, p.window) for j in kept]
    rate = dict(zip(kept, column / np.asarray(could), strict=True))
    many = lambda x: x if isinstance(x, int) else max(1, int(length * x))
    special = {j for j in kept if j < p.special}
    marks = {j for j in kept if self.ids[j] in p.punctuation}
    rest = [j for j in kept if j not in special | marks]
    rest.sort(key=lambda j: -rate[j])
    frequent = set(rest[: many(p.budget)])
    local = {j for j in kept if j >= length - many(p.local)}
    sets = {
      "special": special,
      "special + punctuation": special | marks,
      "special + punctuation + frequent": special | marks | frequent,
      "special + punctuation + frequent + local":
        special | marks | frequent | local,
    }  # fmt: skip
    chosen, stays = "full", set(kept)
    for name, some in sets.items():
      some = some | {length - 1}
      inside = [j in some for j in kept]
      if (weights[..., inside].sum(-1).mean(1) >= p.recovered).all() and (
        p.recovered < 1
      ):
        chosen, stays = name, some
        break
    self.choices[n][head] = chosen
    self.kept[n][head] = sorted(stays)


# A prompt in parts of odd lengths, then tokens that come one by one.
CALLS = ((21, 13), (5, 2), (1, 1), (1, 1))


def compare(model, recovered, calls=CALLS):
  """Runs both; the choices that were taken, and the cache."""
  policy = rj.kv.FastGen(
    punctuation=IDS, recovered=recovered, budget=0.1, local=3, window=8
  )
  draw = np.random.default_rng(7).integers(1, 101, (2, 48)).astype(np.int32)
  rows, starts = [Reference(policy), Reference(policy)], [0, 0]
  cache, taken = empty(model, policy), set()
  for lengths in calls:
    width = 24 if not any(starts) else max(lengths)
    tokens = np.zeros((2, width), np.int32)
    for row, n in enumerate(lengths):
      tokens[row, :n] = draw[row, starts[row] : starts[row] + n]
      starts[row] += n
    got, cache = read(model, cache, tokens, lengths)
    cache = cache.evict()
    for row, n in enumerate(lengths):
      want = rows[row].read(tokens[row, :n])
      rows[row].evict()
      np.testing.assert_allclose(got[row, :n], want, rtol=0, atol=2e-3)
      assert cache.choices(row) == rows[row].choices
      kept = [[x.tolist() for x in heads] for heads in cache.positions(row)]
      assert kept == rows[row].kept
      taken.update(name for heads in rows[row].choices for name in heads)
  return taken, cache


NAMES = rj.kv.FastGen(punctuation=IDS).choices


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  ("recovered", "shards", "some"),
  [
    (0.5, 1, NAMES[1:]),
    (0.2, 1, NAMES[:3]),
    (0.9, 1, NAMES[4:]),
    (1.0, 1, NAMES[4:]),
    (0.5, 4, NAMES[1:]),
    (0.2, 4, NAMES[:3]),
  ],
)
def test_heads_keep_what_brute_force_keeps(models, recovered, shards, some):
  """Tokens, choices and logits; between the cases each choice is taken."""
  taken, cache = compare(models(shards), recovered)
  assert taken >= set(some)
  if recovered == 1:
    assert taken == {"full"}
    assert all((x == [[28], [17]]).all() for x in cache.tokens())


def test_without_punctuation_there_are_four_choices():
  policy = rj.kv.FastGen()
  assert policy.choices == (
    "special", "special + frequent", "special + frequent + local", "full",
  )  # fmt: skip
  assert policy.marks == ()
  assert len(NAMES) == 5 and NAMES[1] == "special + punctuation"


# ---------------------------------------------------------------------------
# Marks
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlyMarked(rj.kv.Policy):
  """Keeps the first token and the marked ones."""

  @property
  def marks(self):
    return IDS

  def scores(self, look):
    return (look.marked | (look.pos == 0)).astype(jnp.float32)

  def kept(self, scores, counts):
    return scores > 0


def kept_of(cache, row):
  """The positions that all heads of a row keep, behind an eviction."""
  (first, *rest) = (x.tolist() for heads in cache.positions(row) for x in heads)
  assert all(x == first for x in rest)
  return first


def marked_in(ids):
  return [n for n, one in enumerate(ids) if n == 0 or int(one) in IDS]


DRAW = np.random.default_rng(3).integers(1, 101, (3, 40)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.long)])
def test_marks_go_with_their_rows(models, shards):
  model = models(shards)
  _, cache = read(model, empty(model, OnlyMarked()), DRAW[:2, :24], (24, 15))
  _, other = read(model, empty(model, OnlyMarked(), 1), DRAW[2:, :24], (20,))
  texts = [DRAW[0, :24], DRAW[1, :15], DRAW[2, :20]]
  kept = cache.snapshot()
  # Ids of a row that is emptied are not those of the next one.
  emptied = cache.reset([1])
  assert not np.asarray(emptied.marks)[1].any()
  cache = emptied.insert([1], other).take([1, 0, 1])
  evicted = cache.evict()
  for row, text in enumerate((texts[2], texts[0], texts[2])):
    assert kept_of(evicted, row) == marked_in(text)
  # Rejected tokens, and those cut off, leave no mark to what comes instead.
  more = np.stack([np.full(4, IDS[1]), np.full(4, IDS[2]), np.full(4, IDS[3])])
  _, cache = read(model, cache, more.astype(np.int32), (4, 4, 4))
  cache = cache.keep(np.arange(4)[None] < np.array([[1], [0], [4]]))
  cache = cache.truncate(np.array([21, 20, 23]))
  plain = np.full((3, 4), 1, np.int32)
  _, cache = read(model, cache, plain, (4, 3, 2))
  cache = cache.evict()
  ends = ([*texts[2].tolist(), IDS[1]], texts[0][:20].tolist(),
          texts[2].tolist() + [IDS[3]] * 3)  # fmt: skip
  for row, text in enumerate(ends):
    assert kept_of(cache, row) == marked_in([*text, 1, 1, 1, 1])
  kept = cache.limited(128).restore(kept).evict()
  for row in range(2):
    assert kept_of(kept, row) == marked_in(texts[row])
  wide = cache.limited(128)
  assert wide.marks.shape == (3, 128)
  np.testing.assert_array_equal(wide.marks[:, :64], cache.marks)
  if shards > 1:
    there = cache.gathered(jax.devices()[0])
    np.testing.assert_array_equal(there.marks, cache.marks)


@pytest.mark.long
@pytest.mark.parametrize(
  ("shards", "options"),
  [
    (1, {"prefill": "chunked", "chunk": 8}),
    pytest.param(1, {}, marks=pytest.mark.long),
    pytest.param(4, {}, marks=pytest.mark.long),
    pytest.param(4, {"prefill": "zigzag"}, marks=pytest.mark.long),
  ],
)
def test_generated_tokens_are_marked_too(models, shards, options):
  """Two turns, rows of unequal lengths, evictions while decoding."""
  kind = rj.kv.CacheConfig(policy=OnlyMarked(), **PAGES)
  session = rj.infer.Session(models(shards), 96, batch=2, cache_kind=kind)
  for prompts in ([DRAW[0, :21], DRAW[1, :9]], [DRAW[0, 21:26], DRAW[2, :3]]):
    rj.infer.generate(
      models(shards), prompts, max_new_tokens=7, cache=session, **options
    )
    options = {}
  cache = session.cache.evict()
  for row, text in enumerate(session.texts()):
    assert len(text) == session.lengths[row] >= 21
    assert kept_of(cache, row) == marked_in(text)


@pytest.mark.slow
@pytest.mark.long
def test_a_mesh_of_three_axes_marks_the_same_tokens():
  policy = rj.kv.FastGen(
    punctuation=IDS[:8], recovered=0.6, budget=0.1, local=4, window=16
  )
  kind = rj.kv.CacheConfig(policy=policy, page=8, room=8, first=2, recent=8)
  contract.answers_as_one_device(kind)


# ---------------------------------------------------------------------------
# What is refused, and how it is written
# ---------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_what_shares_a_position_is_refused(models):
  model, tokens = models(1), DRAW[:2, :4]
  cache = empty(model, OnlyMarked()).with_room(8)
  for options, words in (
    ({"segment_ids": np.array([1, 1, 2, 2])}, "document 2 of a row"),
    ({"positions": np.arange(4) + 61}, "position 64 of 64"),
    ({"parents": np.array([-1, 0, 0, 1])}, "tree of drafted tokens"),
  ):
    with pytest.raises(OptionError, match=words):
      model(tokens, cache=cache, **options)
  blocks = model(tokens, cache=model.init_cache(2, 8))[1].export(0, 0, 4)
  with pytest.raises(OptionError, match="exported tokens have none"):
    cache.load(0, blocks)
  for ids in ((-1,), (True,), (1.5,)):
    with pytest.raises(OptionError, match=r"punctuation.*punctuation_ids"):
      rj.kv.FastGen(punctuation=ids)


def test_ids_have_a_text():
  kind = kind_text.parse("int4+fastgen:punctuation=(46,33, 46),recovered=0.9")
  assert kind.policy.punctuation == (33, 46) and kind.policy.recovered == 0.9
  assert kind_text.parse(str(kind)) == kind
  assert kind_text.parse("fastgen:punctuation=46").policy.marks == (46,)
  for text in ("fastgen:punctuation=(46,33", "fastgen:punctuation=."):
    with pytest.raises(OptionError, match="punctuation"):
      kind_text.parse(text)


def test_marks_are_counted():
  model = rj.models.create({**SMALL, "model_type": "llama"}, seed=0)
  cache = model.init_cache(
    2, 32, kind=kind_text.parse("fastgen:punctuation=46")
  )
  assert cache.explain().parts["marked tokens"] == 64
  assert cache.explain().nbytes == cache.nbytes()
  assert model.init_cache(2, 32, kind="fastgen").marks is None

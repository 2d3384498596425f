"""Caches whose keys are encoded by channel, a page of tokens at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer.kv_runahead import kvr
from ringjax.kv import ChannelGroups, Integers, kind_text
from ringjax.parallel.peers import Peers
from tests.contracts import cache as contract
from tests.helpers import refused, swept

P, RECENT, B, CAPACITY = 8, 5, 2, 64
# Levels by a calibration, and outliers that a page of vectors shares.
BOOK = "nuq4:outliers=2%,group=8,recent=5,room=4,slack=12"


def kind_of(bits=8, **options):
  codec = rj.kv.Codec(
    keys=ChannelGroups(bits=bits, group=P), values=Integers(bits=bits, group=P)
  )
  made = dict(codec=codec, recent=RECENT, page=P, room=4, slack=12)
  return rj.kv.CacheConfig(**{**made, **options})


@functools.cache
def text(family):
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 64, (B, 40)).astype(np.int32)
  return tokens, np.asarray(contract.model(1, family)(tokens))


def empty(shards, family, kind, batch=B):
  model = contract.model(shards, family)
  attend = None
  if shards > 1:
    attend = rj.models.CachedAttention(mesh=model.mesh, axis="seq")
  return model.init_cache(batch, CAPACITY, sharding=attend, kind=kind)


def run(shards, family, kind, ends=(24, 33), rows=slice(None)):
  """Logits of calls with an eviction behind each, and the cache."""
  model, tokens = contract.model(shards, family), text(family)[0][rows]
  cache, got, start = empty(shards, family, kind, len(tokens)), [], 0
  for end in ends:
    call, count = tokens[:, start:end], end - start
    each = np.full((len(tokens), shards), -(-count // shards))
    cache = cache.with_room(each if count % shards == 0 else count)
    logits, cache = model(call, cache=cache)
    cache = cache.evict()
    got.append(np.asarray(logits))
    start = end
  return np.concatenate(got, 1), cache


def paged(cache, row=0, layer=0):
  """Coordinates and bytes of the pages of the first head."""
  pages = cache.pages[0]
  table = np.asarray(pages.table)[layer, row, 0]
  at = pages.read_coords()
  by_page = [np.asarray(x)[layer, row, 0].reshape(-1, pages.slots) for x in at]
  return [
    (
      *(x[n] for x in by_page),
      *(np.asarray(x)[page] for x in (pages.k, pages.v)),
    )
    for n, page in enumerate(table)
    if page >= 0
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shards", "family"),
  [
    (2, "grouped"),
    *swept(
      [
        *((1, family) for family in contract.FAMILIES),
        *((4, family) for family in ("grouped", "latent", "sinks", "alibi")),
      ],
      [
        *zip((1, 4) * 5, contract.FAMILIES, strict=False),
        (8, "grouped"),
        (4, "windows"),
      ],
    ),
  ],
)
def test_eight_bits_are_near_the_model(shards, family):
  kind = kind_of()
  got, cache = run(shards, family, kind)
  want = text(family)[1][:, :33]
  # An expert may be another one where two are near.
  far = np.abs(got - want) / np.abs(want).max()
  assert np.quantile(far, 0.95) < 0.02, np.quantile(far, [0.5, 0.95, 1])
  assert cache.length.tolist() == [33] * B
  # Before anything was encoded nothing is lost.
  contract.close(got[:, :24], want[:, :24], 1e-4 * np.abs(want).max())
  exact = [x for x in cache.tokens() if x is not None]
  # Layers with a window drop groups that no query will see.
  assert max(x.max() for x in exact) == 33
  open_ = np.asarray(jnp.sum(cache.open.at.seg > 0, 1))
  assert (open_ >= RECENT).all() and (open_ < RECENT + shards * P).all()
  for page in cache.pages:
    if page is not None:
      counts = np.asarray(page.counts())[np.asarray(page.table) >= 0]
      assert (counts == P).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("unrotated", "ends"),
  [
    (False, (33,)),
    pytest.param(True, (33,), marks=pytest.mark.long),
    pytest.param(False, (8, *range(9, 34)), marks=pytest.mark.long),
    pytest.param(BOOK, (33,), marks=pytest.mark.long),
    pytest.param(BOOK, (8, *range(9, 34)), marks=pytest.mark.long),
  ],
)
def test_a_group_is_encoded_once(unrotated, ends):
  """One by one, in parts and at once there are the same groups and bytes."""
  kind = kind_of(4, unrotated=unrotated is True)
  if unrotated is BOOK:
    kind = contract.kind_of(BOOK, "grouped")
  _, first = run(1, "grouped", kind, (24,))
  _, more = run(1, "grouped", kind, (24, 33))
  before, after = paged(first), paged(more)
  # 24 - 5 tokens have left the newest, two groups of them; of 33 three.
  assert len(before) == 2 and len(after) == 3
  for a, b in zip(before, after, strict=False):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)
  _, other = run(1, "grouped", kind, ends)
  found = paged(other)
  assert len(found) == 3
  for n, (a, b) in enumerate(zip(after, found, strict=True)):
    np.testing.assert_array_equal(a[0], n * P + np.arange(P))
    np.testing.assert_array_equal(a[0], b[0])
    # Keys of the first layer are those of the tokens alone.
    assert np.mean(a[2] == b[2]) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "bits", "options"),
  [
    ("grouped", 4, {}),
    pytest.param("latent", 8, {}, marks=pytest.mark.long),
    pytest.param("windows", 4, {"windowed": True}, marks=pytest.mark.long),
    pytest.param("grouped", 4, {"first": 3}, marks=pytest.mark.long),
    pytest.param("grouped", BOOK, {"first": 1}, marks=pytest.mark.long),
  ],
)
def test_a_simulated_cache_reads_as_tokens_go_in_one_by_one(
  family, bits, options
):
  """Nothing is encoded before the first group and the newest are there."""
  options = dict(room=1, slack=2, **options)
  if bits is BOOK:
    kind = contract.kind_of(BOOK, family).with_options(options)
  else:
    kind = kind_of(bits, **options)
  start = P + RECENT + options.get("first", 0)
  count = start + (3 if family == "grouped" and "first" not in options else 10)
  want, _ = run(1, family, kind, range(start, count + 1))
  model = contract.model(1, family)
  cache = rj.kv.SimulatedCache.create(model, kind)
  attend = rj.models.CachedAttention()
  got, _ = jax.jit(lambda m, c, x: m(x, cache=c, attend=attend))(
    model, cache, text(family)[0][:, :count]
  )
  got, top = np.asarray(got), np.abs(want).max()
  # Codes of numbers that lie on the edge of two may be either.
  assert np.quantile(np.abs(got - want), 0.9) < 1e-3 * top
  exact = text(family)[1][:, :count]
  assert (
    np.abs(want - exact)[:, start:].max() > (1e-3 if bits == 8 else 1e-2) * top
  )
  contract.close(want[:, :start], exact[:, :start], 1e-4 * top)


@pytest.mark.slow
def test_rows_of_other_lengths_and_their_ends():
  kind = kind_of()
  model, (tokens, want) = contract.model(1, "grouped"), text("grouped")
  lengths = np.array([31, 9])
  seg = (np.arange(32)[None] < lengths[:, None]).astype(np.int32)
  cache = empty(1, "grouped", kind)
  _, cache = model(tokens[:, :32] * seg, cache=cache, segment_ids=seg)
  cache = cache.evict()
  assert [len(paged(cache, row)) for row in range(B)] == [3, 0]
  # Another row moves with its pages; each goes on behind its own end.
  both = cache.take([1, 0, 0])
  assert both.length.tolist() == [9, 31, 31]
  step = tokens[[1, 0, 0], lengths[[1, 0, 0]]][:, None]
  got, _ = model(step, cache=both.with_room(1))
  for row, n in enumerate((1, 0, 0)):
    contract.close(got[row, 0], want[n, lengths[n]], 0.03 * np.abs(want).max())
  one = cache.reset([1]).insert([1], cache.take([0]))
  assert [len(paged(one, row)) for row in range(B)] == [3, 3]
  # A page that lost its end stays as it is, and its other tokens are read.
  short = cache.truncate(20)
  again = short.with_room(1)
  got, again = model(tokens[:, 20:21], cache=again)
  contract.close(got[0, 0], want[0, 20], 0.03 * np.abs(want).max())
  kept = paged(again.evict())
  assert [int((seg > 0).sum()) for _, seg, *_ in kept] == [8, 8, 4]
  for a, b in zip(paged(cache), kept, strict=True):
    np.testing.assert_array_equal(a[2], b[2])
    np.testing.assert_array_equal(a[3], b[3])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shards", "options"),
  [
    (1, {}),
    pytest.param(4, {}, marks=pytest.mark.long),
    pytest.param(1, {"prefill": "chunked", "chunk": 8}, marks=pytest.mark.long),
    pytest.param(4, {"prefill": "chunked", "chunk": 8}, marks=pytest.mark.long),
  ],
)
def test_generate_encodes_by_itself(shards, options):
  model = contract.model(shards, "grouped")
  tokens = text("grouped")[0]
  prompts = [tokens[0, :33], tokens[1, :19]]
  ask = functools.partial(rj.infer.generate, model, prompts, max_new_tokens=10)
  want = ask(cache_kind="dense").tokens
  session = rj.infer.Session(model, 64, batch=2, cache_kind=kind_of())
  got = ask(cache=session, **options)
  assert session.cache.pages[0].k.dtype == jnp.uint8
  assert session.lengths.tolist() == [33 + 9, 19 + 9]
  assert np.mean(got.tokens[:, :4] == want[:, :4]) > 0.7


@pytest.mark.long
def test_bytes_are_those_of_the_formula():
  """Without the open tokens: pages, and their coordinates."""
  kind = rj.kv.KINDS["kivi2"]
  sizes = (kind.exact.recent, kind.layout.page, kind.codec.keys.group)
  assert sizes == (128, 32, 32)
  config = dict(
    model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=64,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=4096,
  )  # fmt: skip
  model = rj.models.create(config, seed=0)
  tokens = np.random.default_rng(0).integers(1, 64, (1, 1152))
  cache = model.init_cache(1, 2048, kind=kind)
  _, cache = model(tokens.astype(np.int32), cache=cache.with_room(1152))
  cache = cache.evict()
  pages = cache.pages[0]
  assert int((np.asarray(pages.table) >= 0).sum()) == 2 * 1024 // 32
  assert np.asarray(cache.open.at.seg > 0).sum() == 128
  of_keys = 32 * 128 * 2 // 8 + 4 * 128
  of_values = 32 * (128 * 2 // 8 + 4 * 4)
  stored = (pages.k.nbytes + pages.v.nbytes) / pages.k.shape[0]
  assert stored == pytest.approx(of_keys + of_values, rel=0.02)


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
  make = rj.kv.CacheConfig
  codec = rj.kv.KINDS["kivi4"].codec
  for options, says in (
    ({"recent": 0}, "1 or more: tokens stay exact until a group is full"),
    ({"recent": 8, "policy": rj.kv.SnapKV()}, "no groups in common"),
    ({"recent": 8, "page": 64}, "page=32 and group=32"),
  ):
    refused(OptionError, lambda o=options: make(codec=codec, **o), says)
  model = contract.model(1, "grouped")
  refused(
    OptionError, lambda: model.init_cache(1, 64, kind="kivi2+snapkv"), "policy"
  )
  cache = rj.kv.SimulatedCache.create(model, "kivi2")
  refused(
    OptionError,
    lambda: model(np.ones((1, 8), np.int32), cache=cache),
    "each query has other exact tokens",
  )  # fmt: skip
  refused(OptionError, lambda: rj.Ring(wire=codec), "a codec of single tokens")
  (group,) = Peers.in_threads(1, timeout_s=60.0)
  refused(
    OptionError, lambda: kvr.Runahead(model, group, kind="kivi2"), "Runahead"
  )
  group.close()
  wide = kind_text.parse("kivi2:group=64,page=64")
  assert (wide.page, wide.codec.keys.group) == (64, 64)
  assert kind_text.parse(str(wide)) == wide


@pytest.mark.usefixtures("unchecked")
def test_outliers_of_pages_are_a_kind_of_cache_by_their_text():
  kind = kind_text.parse("nuq3:outliers=1.0%")
  assert (kind.exact.recent, kind.layout.page, kind.exact.room) == (1, 32, 32)
  assert kind == kind_text.parse("nuq3:outliers=1%")
  assert kind_text.parse(str(kind)) == kind
  wide = kind_text.parse("nuq2:outliers=.5%,group=64,recent=100")
  assert (wide.recent, wide.page, wide.codec.keys.group) == (100, 64, 64)
  assert kind_text.parse(str(wide)) == wide
  # As KIVI has it: keys by pages, values one by one.
  keys = kind_text.parse("nuq3:keys.outliers=1%,residual=64")
  assert keys.grouped and keys.codec.values == rj.kv.KINDS["nuq3"].codec.values
  for text, says in (
    ("nuq3:outliers=all", "write outliers=0.01, or outliers=1%"),
    ("nuq3:outliers=60%", "above 0% up to 50%"),
    ("nuq3:group=64", "a page of so many tokens"),
    ("nuq3:outliers=1%,recent=0", "stay exact until a group is full"),
    ("nuq3:outliers=1%,page=64", "page=32 and group=32"),
    ("nuq3:outliers=1%,residual=32", "values by token"),
    ("nuq3:outliers=1%,device=64", "keeps all tokens"),
    ("nuq3+snapkv:outliers=1%", "no groups in common"),
    ("h2o:budget=20%", "a value of type float"),
  ):
    refused(OptionError, lambda t=text: kind_text.parse(t), says)


R = 16
RESIDUAL = "kivi4:residual=16,group=8,page=8"


def paper(kv, length, codec):
  """Keys and values [T, D] as KIVI's algorithm 1 has them behind `length`."""
  k, v = kv
  for start in range(0, length // R * R, P):
    group = slice(start, start + P)
    data = codec.keys.encode(k[None, None, group])
    part = codec.keys.decode(data, k.shape[-1], jnp.float32)[0, 0]
    k = k.at[group].set(part)
  for token in range(max(0, length - R)):
    data = codec.values.encode(v[None, None, token : token + 1])
    part = codec.values.decode(data, v.shape[-1], jnp.float32)[0, 0]
    v = v.at[token].set(part[0])
  return k, v


def read_back(cache, count):
  """Keys and values of the first layer's first head, by position."""
  (pages, *_), held = cache.pages, cache.open
  shape, codec = cache.shapes[0], cache.kind.codec
  found = [
    np.full((count, d), np.nan, np.float32) for d in (shape.key, shape.value)
  ]
  for pos, seg, *data in paged(cache):
    for out, vectors, x in zip(
      found, (codec.keys, codec.values), data, strict=True
    ):
      x = vectors.decode(jnp.asarray(x)[None, None], out.shape[1], jnp.float32)
      out[pos[seg > 0]] = np.asarray(x)[0, 0][seg > 0]
  pos, seg = (np.asarray(x)[0] for x in held.at)
  for out, x in zip(found, held.slots[0], strict=True):
    out[pos[seg > 0]] = np.asarray(x)[0, 0, 0][seg > 0]
  assert pages.k.dtype == np.uint8
  return found


@pytest.mark.long
@pytest.mark.parametrize(
  ("room", "ends"),
  [
    (4, (39,)),
    pytest.param(1, (21, *range(22, 40)), marks=pytest.mark.slow),
    (4, (18, 30, 39)),
  ],
)
def test_a_residual_is_that_of_the_paper(room, ends):
  """Behind each eviction keys and values are exact or coded as KIVI's are."""
  kind = kind_text.parse(f"{RESIDUAL},room={room}")
  assert (kind.exact.residual, kind.exact.recent) == (R, R)
  assert kind_text.parse(str(kind)) == kind
  model, (tokens, _) = contract.model(1, "grouped"), text("grouped")
  # Keys and values of the first layer are those of the tokens alone.
  exact = model.init_cache(1, CAPACITY)
  _, exact = model(tokens[:1, :39], cache=exact)
  kv = [x[0, 0, 0, :39] for x in exact.slots[0]]
  cache, start = empty(1, "grouped", kind, 1), 0
  for end in ends:
    cache = cache.with_room(end - start)
    _, cache = model(tokens[:1, start:end], cache=cache)
    cache, start = cache.evict(), end
    for got, want, whole in zip(
      read_back(cache, end), paper(kv, end, kind.codec), kv, strict=True
    ):
      np.testing.assert_allclose(got, want[:end], atol=2e-5)
      coded = np.abs(got - whole[:end]).max(1) > 1e-4
      border = end // R * R if whole is kv[0] else max(0, end - R)
      assert not coded[border:].any() and coded[:border].mean() > 0.9
  assert [x[0].tolist() for x in paged(cache)] == [
    [*range(8)], [*range(8, 16)]
  ]  # fmt: skip


@pytest.mark.slow
def test_a_simulated_residual_reads_as_tokens_go_in_one_by_one():
  kind = kind_text.parse(f"{RESIDUAL},room=1,slack=2")
  want, _ = run(1, "grouped", kind, range(15, 39))
  model = contract.model(1, "grouped")
  cache = rj.kv.SimulatedCache.create(model, kind)
  attend = rj.models.CachedAttention()
  got, _ = model(text("grouped")[0][:, :38], cache=cache, attend=attend)
  top = np.abs(want).max()
  assert np.quantile(np.abs(np.asarray(got) - want), 0.9) < 1e-3 * top
  exact = text("grouped")[1][:, :38]
  contract.close(want[:, :16], exact[:, :16], 1e-4 * top)
  assert np.abs(want - exact)[:, 17:].max() > 1e-2 * top


@pytest.mark.usefixtures("unchecked")
def test_a_residual_is_refused_where_it_can_not_be():
  for name, says in (
    ("int4:residual=64,recent=64", "without a codec of groups"),
    ("kivi2:residual=48", "whole groups"),
    ("kivi2:residual=64,recent=128", "recent the same"),
    ("kivi2:residual=64,first=1", "first 0"),
  ):
    refused(OptionError, lambda n=name: kind_text.parse(n), says)
  refused(
    OptionError,
    lambda: empty(2, "grouped", kind_text.parse(RESIDUAL)),
    "one shard",
  )
  refused(
    OptionError,
    lambda: empty(1, "latent", kind_text.parse(RESIDUAL)),
    "parts of its keys",
  )

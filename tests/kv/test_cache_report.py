"""What a cache says of itself: bytes by part, and what a token waits for."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax import infer, kv
from ringjax.errors import OptionError
from ringjax.kv import kind_text
from ringjax.kv.base import bytes_each
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import KINDS
from ringjax.kv.cache_report import report
from ringjax.kv.composed.context_cache import ContextCache
from ringjax.kv.eviction.prompt_spec import prompt_spec
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.offload.tiered import TieredCache
from ringjax.models.checkpoint import abstract
from ringjax.parallel import chips
from tests.contracts import cache as contract
from tests.helpers import SMALL, refused

KINDS_OF_PARTS = {
  "dense": {"numbers"},
  "windowed": {"numbers"},
  "int4": {"codes", "scales"},
  "float8": {"codes", "scales"},
  "hadamard3": {"codes", "scales"},
  "nuq3": {"codes", "scales", "outliers", "constants of codecs"},
  # Keys in groups have scales too.
  "kivi2:recent=16,page=8,group=8": {
    "open (first, recent, newest): numbers", "pages: codes", "pages: scales",
    "pages: coordinates", "pages: tables",
  },
  "int8+snapkv": {
    "open: codes", "open: scales", "pages: codes", "pages: scales",
    "pages: coordinates", "pages: tables", "queries noted",
  },
  "select:budget=8,page=8,device=8,hot=16,landmarks=hashes": {
    "open: numbers", "landmarks", "hot pages", "host: numbers",
  },
  "select:budget=8,page=8,device=8,hot=16,landmarks=clusters": {
    "open: numbers", "landmarks", "queries noted", "hot pages",
    "host: numbers",
  },
  "int2:first=4,recent=4,page=8": {
    "open (first, recent, newest): numbers", "pages: codes", "pages: scales",
    "pages: coordinates", "pages: tables",
  },
}  # fmt: skip


def kind_of(text):
  return contract.kind_of(text) if text in KINDS else kind_text.parse(text)


@pytest.mark.one_case
@pytest.mark.parametrize("text", KINDS_OF_PARTS)
def test_parts_add_up_to_all_bytes(text):
  """Before and, where something is evicted, behind an eviction."""
  model = contract.model(1)
  cache = model.init_cache(2, 32, kind=kind_of(text))
  found = [cache]
  if cache.kind.evicting:
    _, cache = model(contract.text()[0][:2], cache=cache)
    found.append(cache.evict())
  for one in found:
    said = one.explain("tpu-v5e")
    assert said.nbytes == one.nbytes() == sum(said.parts.values())
    assert said.bytes_per_token == one.nbytes() / 2 / 32
    assert f"{said.nbytes:,}" in f"{said}"
  assert KINDS_OF_PARTS[text] <= said.parts.keys()
  assert said.parts.keys() <= KINDS_OF_PARTS[text] | {
    "coordinates", "cursors", "open: filling up", "pages: filling up",
  }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
  ("family", "text"),
  [
    ("windows", "kivi2:recent=16"),
    pytest.param("grouped", "h2o:budget=.2", marks=pytest.mark.long),
    pytest.param("grouped", "int8+snapkv:window=8", marks=pytest.mark.long),
    pytest.param("windows", "sinks:first=4", marks=pytest.mark.long),
    pytest.param(
      "grouped", "fastgen:window=128,recovered=1", marks=pytest.mark.long
    ),
  ],
)
def test_a_plan_has_the_bytes_of_a_session_behind_its_prompt(family, text):
  """Shapes alone, before and behind the eviction, and bits of all bytes."""
  model, tokens = contract.model(1, family), 160
  kind = kind_text.parse(text)
  prompt = np.random.default_rng(0).integers(0, 64, (2, tokens))
  session = infer.Session(model, 256, batch=2, cache_kind=kind)
  infer.read_context(model, prompt.astype(np.int32), cache=session)
  plan = prompt_spec(model.kinds, 2, tokens, model.dtype, kind=kind)
  assert bytes_each(plan.cache) == session.cache.nbytes()
  assert plan.reading.open.held.local >= tokens
  said = session.cache.explain("tpu-v5e")
  planned = report(plan.cache, "tpu-v5e", held=plan.held)
  assert planned.parts == said.parts
  assert planned.bits == pytest.approx(said.bits, rel=0.01)
  if family == "grouped":
    (held,), (shape,) = session.cache.tokens(), model.kinds
    numbers = held.sum() * (shape.key + shape.value)
    assert said.bits == pytest.approx(8 * said.nbytes / numbers)


def test_heads_that_keep_everything_take_few_bytes_more():
  """FastGen keeps few queries behind a prompt, and none twice."""
  config = {**SMALL, "model_type": "llama", "head_dim": 64}
  config |= {"num_attention_heads": 9, "num_key_value_heads": 3}
  model, tokens = rj.models.abstract(config), 8192
  args = model.kinds, 1, tokens, model.dtype
  dense = bytes_each(KVCache.spec(*args, kind=KINDS["dense"]))
  plan = prompt_spec(*args, kind=KINDS["fastgen"])
  assert bytes_each(plan.cache) < 1.04 * dense
  assert bytes_each(plan.reading) + bytes_each(plan.cache) < 2.05 * dense


def test_what_a_plan_takes_policies_to_keep():
  """Of `Duo` and `KVzip` by heads; where a text decides, everything."""
  kept = lambda policy: policy.expected(100, [2, 0, 2])
  assert kept(kv.SnapKV(budget=0.25)) == [25] * 3
  assert kept(kv.KVzip(budget=0.25)) == [25] * 3
  assert kept(kv.KVzip(budget=0.25, by_layer=True)) == [25, 0, 25]
  assert kept(kv.FastGen()) == kept(kv.Select()) == [100] * 3
  duo = kv.Duo(streaming=((0, 1), (2, 0), (2, 1)), sinks=4, newest=16)
  assert kept(duo)[0] == 60 and kept(duo)[2] == 20


def test_a_codec_for_each_head_and_a_spec():
  kind = contract.kind_of("per-head")
  spec = contract.model(1).init_cache_spec(2, 32, kind=kind)
  cache = contract.model(1).init_cache(2, 32, kind=kind)
  assert spec.explain() == cache.explain()
  assert cache.explain().nbytes == cache.nbytes()
  assert cache.explain().machine.startswith("cpu")


def test_a_part_in_host_memory_waits_for_its_link():
  """Parts by memory; a row's older tokens pass the link at each step."""
  kind = kind_text.parse("int4:device=8,room=4")
  cache = contract.model(1, "grouped").init_cache(2, 64, kind=kind)
  said = cache.explain("tpu-v5e")
  by_memory = cache.bytes_by_memory()
  hosted = [n for part, n in said.parts.items() if part.startswith("host: ")]
  assert sum(hosted) == by_memory["pinned_host"] > 0
  assert said.nbytes == cache.nbytes() == sum(by_memory.values())
  older = (64 - 8) / 64 * by_memory["pinned_host"]
  assert said.seconds["host link"] == pytest.approx(older / 16e9)
  assert said.binds == "host link"
  fast = cache.explain("tpu-v5e", host_bandwidth=64e9)
  assert fast.seconds["host link"] == pytest.approx(older / 64e9)
  # All of a short row is on the device.
  few = cache.explain("tpu-v5e", tokens=8)
  assert "host link" not in few.seconds and few.parts == said.parts
  near = TieredCache.create(
    cache.shapes, 2, 64, "float32", kind=kind, memory="device"
  ).explain("tpu-v5e")
  assert "host link" not in near.seconds and near.nbytes == said.nbytes
  assert any(name.startswith("blocks: ") for name in near.parts)
  # A device's memory is compared with what is on the device.
  shape = LayerCacheSpec(layers=80, heads=8, key=128, value=128)
  large = TieredCache.spec(
    (shape,), 1, 2**20, "bfloat16", kind=kind_text.parse("dense:device=4096")
  ).explain("tpu-v5e")
  assert large.nbytes > 16e9 and "more than a device has" not in f"{large}"


@pytest.mark.long
@pytest.mark.parametrize("family", ["grouped", "latent"])
def test_contexts_are_told_apart(family):
  model = contract.model(1, family)
  made = lambda slots: model.init_cache(2, slots, kind="int4")
  cache = ContextCache(
    open=made(16), kind=made(16).kind, limit=48, contexts=made(32)
  )
  said = cache.explain("tpu-v5e")
  assert said.nbytes == cache.nbytes()
  part = lambda name: sum(
    n for x, n in said.parts.items() if x.startswith(name) and "coord" not in x
  )
  assert part("contexts: ") == 2 * part("open: ") > 0
  alone = cache.open.explain("tpu-v5e")
  assert said.seconds["memory"] == pytest.approx(3 * alone.seconds["memory"])


@pytest.mark.long
def test_states_of_recurrent_layers():
  model = contract.model(1, "recurrent")
  cache = model.init_cache(2, 32)
  said = cache.explain()
  assert said.nbytes == cache.nbytes() and said.parts["states"]


def test_what_is_expected_to_be_lost():
  model = contract.model(1)
  said = lambda kind: model.init_cache(1, 16, kind=kind).explain()
  assert said("dense").loss == 0
  for kind in ("int4", "sinks"):
    assert said(kind).loss is None
    assert f"launch.evaluate caches --cache={kind}" in f"{said(kind)}"


def test_seconds_are_bytes_by_the_memorys_rate():
  model = contract.model(1)
  chip = chips.MACHINES["tpu-v5e"].chip
  cache = model.init_cache(2, 32)
  numbers = sum(x.nbytes for x in jax.tree.leaves(cache.slots))
  layers = sum(shape.layers for shape in model.kinds)
  for tokens in (32, 8):
    said = cache.explain("tpu-v5e", tokens=tokens)
    read = (numbers + 8 * layers * 2 * 32) * tokens / 32
    assert said.seconds["memory"] == pytest.approx(read / chip.hbm_bandwidth)
    assert said.binds == "memory" and said.seconds["unpack"] == 0
    rate = 2 / said.seconds["memory"]
    assert said.tokens_per_s == pytest.approx(rate)
  heavy = cache.explain("tpu-v5e", weights=1e12)
  more = 1e12 / chip.hbm_bandwidth
  assert heavy.seconds["memory"] == pytest.approx(more, rel=1e-3)
  assert "more than a device has" in f"{heavy}"


def test_a_window_is_read_and_no_more():
  model = contract.model(1)
  kind = kind_text.parse("windowed:slack=6")
  small = model.init_cache(2, 1024, kind=kind).explain("h100")
  large = model.init_cache(2, 1024).explain("h100")
  # One layer of three looks back over all.
  assert large.seconds["memory"] > 2.8 * small.seconds["memory"]


def test_sharded_caches_send_sums():
  setup = contract.Setup("int4", 4)
  said = setup.empty().explain("tpu-v5e")
  one = contract.Setup("int4", 1).empty().explain("tpu-v5e")
  assert said.seconds["links"] > 0 and "links" not in one.seconds
  # Ring buffers are rounded up to as many slots on each shard.
  whole = 4 * said.seconds["memory"]
  assert whole == pytest.approx(one.seconds["memory"], rel=0.1)


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
  cache = contract.model(1).init_cache(1, 16)
  with pytest.raises(OptionError, match="tokens: got 17"):
    cache.explain(tokens=17)
  with pytest.raises(OptionError, match="one of tpu-v4"):
    cache.explain("tpu-v1")
  with pytest.raises(OptionError, match="or a Machine"):
    cache.explain(3)
  with pytest.raises(OptionError, match="weights: got nan"):
    cache.explain(weights=float("nan"))
  evicting = contract.model(1).init_cache(1, 16, kind="sinks")
  with pytest.raises(OptionError, match="reads what this cache holds"):
    evicting.explain(tokens=8)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("int4", "a kernel in registers"),
    ("nuq3", "a kernel in registers"),
    ("int4:unrotated=true", "XLA's loops"),
    ("float8", "XLA's loops"),
  ],
)
def test_what_decodes_on_a_tpu(text, words):
  """Of keys before their rotation a kernel knows code books of channels."""
  shape = LayerCacheSpec(layers=2, heads=8, key=128, value=128)
  kind = kind_text.parse(text)
  cache = KVCache.spec((shape,), 1, 4096, "bfloat16", kind=kind, platform="tpu")
  (note,) = (x for x in cache.explain("tpu-v5e").notes if "unpack" in x)
  assert words in note


# A model of 30 layers with 3 KV heads of 64, in bfloat16.
_SHAPE = dict(
  model_type="llama", vocab_size=64, hidden_size=576, intermediate_size=64,
  num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
  max_position_embeddings=32768,
)  # fmt: skip


@pytest.mark.parametrize(
  ("text", "most"),
  [
    ("int4", {8192: 0.282, 32768: 0.282}),
    ("int4:recent=128", {8192: 0.298}),
    ("int4:first=4", {8192: 0.287}),
    ("kivi2", {8192: 0.210, 32768: 0.195}),
    pytest.param(
      "h2o:budget=.2", {8192: 0.208, 32768: 0.208}, marks=pytest.mark.long
    ),
    pytest.param(
      "snapkv:budget=.2", {8192: 0.208, 32768: 0.206}, marks=pytest.mark.long
    ),
  ],
)
def test_shares_of_a_dense_caches_bytes_do_not_grow(text, most):
  """All bytes behind a prompt, by shapes alone; see docs/how/cache.md."""
  model = abstract(_SHAPE, dtype="bfloat16")
  kind = kind_text.parse(text)
  for tokens, share in most.items():
    cache = model.init_cache_spec(1, tokens, kind=kind)
    if kind.evicting:
      cache = prompt_spec(model.kinds, 1, tokens, model.dtype, kind=kind).cache
    dense = bytes_each(model.init_cache_spec(1, tokens))
    assert share - 0.003 < bytes_each(cache) / dense <= share


@pytest.mark.parametrize(
  "text", ["dense", "int4", "snapkv:room=256", "dense:device=512"]
)
def test_loops_over_tiles_grow_with_the_cache(text):
  """Also those of the open part of a cache that evicts."""
  model = contract.model(1)
  kind = kind_text.parse(text)
  trips = [
    model.init_cache_spec(2, tokens, kind=kind).tile_trips("tpu")
    for tokens in (8192, 16384)
  ]
  assert trips[1] >= trips[0] > 0


def test_bits_by_head_are_refused_without_weights():
  assert kind_text.parse("nuq3").without_weights() == kind_text.parse("nuq3")
  assert kind_text.parse("dense").without_weights() == kind_text.parse("dense")
  allocated = kind_text.parse("allocated:table=kv_bits.json")
  refused(OptionError, allocated.without_weights, "bits by head", "explain")

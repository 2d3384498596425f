"""KV-Runahead's process form with a thread for each rank, one to eight.

The code is that of processes, links of TCP included; only the ranks share a
device, and so their compiled programs. What needs processes (a rank that dies,
that runs ahead) is in test_kvr_processes.py.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from ringjax import infer
from ringjax.errors import OptionError, PeerError
from ringjax.infer.kv_runahead import kvr
from ringjax.kv import KINDS, CacheConfig
from ringjax.parallel.peers import Peers
from ringjax.plan import cost
from tests.infer.ranks import far
from tests.infer.ranks import in_threads as ranks_in_threads

TOKENS, NEW, TILE = 41, 32, 8
# Heads that all have keys of their own, groups, one for all, a window.
MODELS = ("llama2", "llama3", "falcon_7b", "mistral")
# Even, odd, of one tile first or last, of one token; fewer parts than ranks.
PARTS = {
  2: [(21, 20), (8, 33), (40, 1)],
  3: [(14, 14, 13), (20, 13, 8)],
  4: [(11, 10, 10, 10), (17, 11, 8, 5), (1, 1, 1, 38), (23, 18)],
  8: [(6, 5, 5, 5, 5, 5, 5, 5), (9, 7, 6, 5, 5, 4, 3, 2)],
}
QUICK = [("mistral", 2)]
CASES = [
  *QUICK,
  *(
    pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(MODELS, PARTS)
    if case not in QUICK
  ),
]


def in_threads(model, ids, partition, ranks: int, **options) -> list:
  """Each rank's reading."""

  def run(_: int, peers: Peers) -> object:
    try:
      chain = kvr.Runahead(model, peers, tile=TILE, **options)
      return chain.read(ids, partition, new_tokens=NEW)
    except PeerError as error:
      return error

  found = ranks_in_threads(ranks, run)
  assert not [x for x in found if isinstance(x, PeerError)]
  return found


def assert_same_keys(layers, got, want) -> None:
  # A later query sees no more; what is before may be another's.
  seen = max(layer.first_needed(TOKENS) for layer in layers)
  got, want = (x.export(0, seen, TOKENS) for x in (got, want))
  assert got.kind == want.kind
  np.testing.assert_array_equal(got.at.pos, want.at.pos)
  for a, b in zip(*map(jax.tree.leaves, (got.parts, want.parts)), strict=True):
    assert far(a, b) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_last_rank_has_what_one_device_has(loaded, alone, name, ranks):
  model, _ = loaded(name)
  ids, logits, cache, new = alone(name)
  for partition in PARTS[ranks]:
    readings = in_threads(model, ids, partition, ranks)
    last = len(partition) - 1
    owners = [r for r, x in enumerate(readings) if x.session is not None]
    assert owners == [last]
    reading = readings[last]
    assert far(reading.logits, logits) < 5e-6
    layers = kvr.LayerPrograms(model).layers
    assert_same_keys(layers, reading.session.cache, cache)
    assert kvr.follow(reading, NEW).tolist() == new
    sent = tuple(reading.outcome.link_bytes.values())
    assert sent == kvr.link_bytes(layers, partition, model.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind",
  [
    "unrotated",
    CacheConfig(windowed=True, slack=TILE),
    CacheConfig(windowed=True, unrotated=True, slack=4),
  ],
  ids=str,
)
def test_other_kinds_of_caches(loaded, alone, kind):
  name, ranks = CASES[0]
  model, _ = loaded(name)
  ids, logits, _, new = alone(name)
  session = infer.Session(model, TOKENS + NEW, cache_kind=kind)
  infer.generate(model, [ids], max_new_tokens=1, cache=session)
  (*_, reading) = in_threads(model, ids, PARTS[ranks][0], ranks, kind=kind)
  layers = kvr.LayerPrograms(model).layers
  assert_same_keys(layers, reading.session.cache, session.cache)
  assert far(reading.logits, logits) < 5e-6
  assert kvr.follow(reading, NEW).tolist() == new


@pytest.mark.slow
def test_the_last_rank_encodes_what_came(loaded, alone):
  """Ranks before it pass keys on exactly; its own cache is of 8 bits."""
  name, ranks = CASES[0]
  model, _ = loaded(name)
  ids, logits, _, new = alone(name)
  (*_, reading) = in_threads(model, ids, PARTS[ranks][0], ranks, kind="int8")
  assert reading.session.cache.slots[0].k.dtype == np.uint8
  assert 0 < far(reading.logits, logits) < 0.02
  assert kvr.follow(reading, NEW).tolist()[:4] == new[:4]


CODES = ("hadamard4", "nuq3")


@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_codes_travel_that_the_cache_stores(loaded, alone, name):
  """Each is made once: the last rank stores what the first one sent."""
  family, _ = CASES[0]
  model, _ = loaded(family)
  ids, logits, *_ = alone(family)
  kind = KINDS[name]
  if name == "nuq3":
    kind = kind.with_options({"calibration": infer.calibrate(model, ids[None])})
  parts, ranks = PARTS[3][1], 3
  options = {"kind": kind, "wire": "cache"}
  (*_, reading) = in_threads(model, ids, parts, ranks, **options)
  layers = kvr.LayerPrograms(model).layers
  sent = tuple(reading.outcome.link_bytes.values())
  assert sent == kvr.link_bytes(layers, parts, model.dtype, kind.codec)
  plain = kvr.link_bytes(layers, parts, model.dtype)
  dim = layers[0].spec.attention.head_dim
  width = kind.codec.keys.width(dim) + kind.codec.values.width(dim)
  for a, b in zip(sent, plain, strict=True):
    assert a / b == pytest.approx(width / (2 * dim * 4))
  assert 0 < far(reading.logits, logits) < (0.1 if name == CODES[0] else 0.3)
  assert len(kvr.follow(reading, 4)) == 4
  # The first layer's keys are those of one device: so are the codes of them.
  session = infer.Session(model, TOKENS + NEW, cache_kind=kind)
  infer.generate(model, [ids], max_new_tokens=1, cache=session)
  first = layers[0]
  seen = first.first_needed(TOKENS)
  got, want = (
    x.cache.export(0, seen, TOKENS).parts[first.kind]
    for x in (reading.session, session)
  )
  for a, b in zip(got, want, strict=True):
    same = np.asarray(a[first.index]) == np.asarray(b[first.index])
    assert same.mean() > 0.99


@pytest.mark.usefixtures("unchecked")
def test_codes_of_a_cache_without_a_codec(loaded):
  model, _ = loaded(CASES[0][0])
  (group,) = Peers.in_threads(1, timeout_s=60.0)
  for options, says in (
    ({"wire": "cache"}, "a kind with a codec"),
    ({"wire": "int8", "kind": "int8"}, "wire"),
  ):
    with pytest.raises(OptionError, match=says):
      kvr.Runahead(model, group, **options)
  group.close()


@pytest.mark.long
def test_a_chains_session_knows_what_was_seen(loaded, alone):
  name, ranks = CASES[0]
  model, _ = loaded(name)
  ids, *_ = alone(name)
  sampler = infer.Greedy(repetition_penalty=2.0)
  want = infer.generate(model, [ids], max_new_tokens=NEW, sampler=sampler)
  (*_, reading) = in_threads(model, ids, PARTS[ranks][0], ranks)
  new = kvr.follow(reading, NEW, sampler=sampler)
  assert new.tolist() == want[0].tolist()
  seen = set(np.flatnonzero(reading.session.seen[0]).tolist())
  assert seen == {*ids.tolist(), *new.tolist()}


@pytest.mark.long
def test_the_worked_example(loaded):
  """Nine tokens in parts of 4, 3 and 2: what is sent, and what is computed."""
  model, _ = loaded("llama2")
  ids = np.arange(3, 12, dtype=np.int32)
  (*_, reading) = in_threads(model, ids, (4, 3, 2), 3)
  row = kvr.row_bytes(kvr.LayerPrograms(model).layers, model.dtype)
  sent = reading.outcome.link_bytes
  # A row is a key or a value: 22 of them a layer.
  assert 2 * sum(sent.values()) / row == 22
  prompt = cost.Prompt(tokens=9)
  assert cost.pairs(prompt, (4, 3, 2)).tolist() == [16, 21, 18]
  assert 2 * cost.gathered_tokens(prompt, 3) == 36

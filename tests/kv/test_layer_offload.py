"""Layers of a cache in host memory and on disk change no number."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv import kind_text
from ringjax.kv.offload.cache_files import read_blocks
from ringjax.nn.sharding_context import ShardingContext
from tests import checkpoints
from tests.helpers import SMALL, refused

PROMPTS = [list(range(5, 18)), [3, 4, 1], [9, 8, 7, 6, 5]]
MIXED = "device=.25,host=.25,disk=.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  config = SMALL | {"num_hidden_layers": 4}
  path = tmp_path_factory.mktemp("offload") / "model"
  rj.models.save(rj.models.create(config, seed=3), path)
  return path


@pytest.fixture(scope="module")
def resident(folder):
  return rj.models.load(folder)


def tokens_of(model, prompts=PROMPTS, new=3, **options):
  found = rj.infer.generate(model, prompts, max_new_tokens=new, **options)
  return np.asarray(found)


def fractions(rng):
  """A placement by chance, in which some memories may have nothing."""
  x = rng.random(3) * (rng.random(3) < 0.7) + [1e-3, 0, 0]
  x = [float(one) for one in x / x.sum()]
  return rj.models.Placement(device=x[0], host=x[1], disk=None)


@pytest.mark.long
@pytest.mark.parametrize(
  "seed",
  [
    pytest.param(n, marks=() if n < 1 else
                 pytest.mark.long if n < 2 else pytest.mark.slow)
    for n in range(30)
  ],
)  # fmt: skip
def test_random_placements(seed, folder, resident, tmp_path):
  """Weights, keys and hidden states anywhere, rows in groups of any size."""
  rng = np.random.default_rng(seed)
  kind = ["dense", "int8"][seed % 2] if seed < 4 else str(
    rng.choice(["dense", "int8", "unrotated", "float8", "windowed"])
  )  # fmt: skip
  model = resident
  if rng.random() < 0.5:
    model = rj.models.load(folder, placement=fractions(rng))
  options = {"cache_placement": fractions(rng), "disk": tmp_path}
  if not options["cache_placement"].disk:
    del options["disk"]
  if rng.random() < 0.5:
    options["rows_at_once"] = int(rng.integers(1, 3))
    host = float(rng.random())
    options["hidden_placement"] = rj.models.Placement(device=1 - host)
  if rng.random() < 0.3:
    options |= {"prefill": "chunked", "chunk": int(rng.integers(3, 9))}
  want = tokens_of(resident, cache_kind=kind)
  found = tokens_of(model, cache_kind=kind, **options)
  np.testing.assert_array_equal(found, want)
  assert not os.listdir(tmp_path)


@pytest.mark.long
def test_a_conversation_over_several_blocks(resident, tmp_path):
  """Rows cross the ends of blocks apart, and the last block is a short one."""
  make = lambda **more: rj.infer.Session(resident, 300, batch=2, **more)
  mine = make(cache_placement=MIXED, disk=tmp_path)
  plain, rng = make(), np.random.default_rng(0)
  prompts = [rng.integers(0, 64, (2, n)) for n in (120, 9, 130)]
  for tokens in prompts:
    one = [tokens[0], tokens[1, :7]]
    want = tokens_of(resident, one, cache=plain)
    np.testing.assert_array_equal(tokens_of(resident, one, cache=mine), want)
  # No name of a file is ever there, so that none is left after a crash.
  assert not os.listdir(tmp_path)
  held = mine.cache.bytes_by_memory()
  arrays = mine.cache.offloaded_layers[0].stored
  layer = sum(x.size * x.dtype.itemsize for x in arrays)
  assert held["host"] == layer and held["disk"] == 2 * layer
  assert mine.files.nbytes == held["disk"]
  # A call reads each layer once, keys and values; of 9 tokens it writes back
  # those blocks alone in which one is.
  events = mine.transfers()
  reads = [e for e in events if e.what == "read"]
  assert {e.layer for e in reads} == {0, 1} and len(reads) % 4 == 0
  assert all(2 * e.nbytes == layer for e in reads)
  assert mine.files.bytes_written < mine.files.bytes_read
  mine.cache, plain.cache = (s.cache.truncate(100) for s in (mine, plain))
  want = tokens_of(resident, [[1, 2], [3]], cache=plain)
  found = tokens_of(resident, [[1, 2], [3]], cache=mine)
  np.testing.assert_array_equal(found, want)
  mine.restart()
  plain.restart()
  found = tokens_of(resident, [[7, 2], [3]], cache=mine)
  want = tokens_of(resident, [[7, 2], [3]], cache=plain)
  np.testing.assert_array_equal(found, want)


@pytest.mark.long
def test_files_that_fail(resident, tmp_path):
  session = rj.infer.Session(
    resident, 40, batch=3, cache_placement="disk", disk=tmp_path
  )
  want = tokens_of(resident, cache=session)
  number = int(session.cache.offloaded_layers[0].filed[1])
  session.files.clear()
  refused(OptionError, lambda: read_blocks(number, 0, 1), "CacheFiles")
  with pytest.raises(Exception, match="CacheFiles"):
    tokens_of(resident, [[1], [1], [1]], cache=session)
  session.restart()
  np.testing.assert_array_equal(tokens_of(resident, cache=session), want)


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=pytest.mark.slow)
   for x in ("gemma2", "deepseek_v3", "qwen3_next", "mixtral")],
)  # fmt: skip
def test_families(name, tmp_path):
  """Ring buffers and states stay; latent keys have no values."""
  path = checkpoints.write(name, tmp_path / "model")
  model = rj.models.load(path)
  want = tokens_of(model)
  for placement in ("host", MIXED):
    found = tokens_of(model, cache_placement=placement, disk=tmp_path
                      if placement == MIXED else None)  # fmt: skip
    np.testing.assert_array_equal(found, want)


@pytest.mark.long
def test_mesh(folder):
  """Each device has its heads and tokens of the layers in host memory."""
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  model = rj.models.load(folder, mesh=mesh)
  want = tokens_of(model)
  found = tokens_of(model, cache_placement="device=.5,host=.5")
  np.testing.assert_array_equal(found, want)
  refused(
    OptionError,
    lambda: tokens_of(model, cache_placement="disk", disk=folder),
    "cache_placement", "one device",
  )  # fmt: skip


def test_refused(resident, tmp_path):
  call = lambda **more: lambda: tokens_of(resident, **more)
  placed = {"cache_placement": "host"}
  for options, *words in (
    (placed | {"cache_kind": "snapkv"}, "policy"),
    (placed | {"cache_kind": kind_text.parse("dense:device=8", "x")}, "device"),
    (placed | {"speculate": "lookup"}, "speculate"),
    (placed | {"contexts": [[1, 2]]}, "contexts"),
    ({"cache_placement": "disk"}, "disk", "folder"),
    ({"cache_placement": "disk", "disk": tmp_path / "none"}, "none"),
    ({"disk": tmp_path}, "disk", "cache_placement"),
    ({"cache_placement": "tape"}, "cache_placement", "tape"),
    ({"hidden_placement": "host"}, "hidden_placement", "rows_at_once"),
    ({"hidden_placement": "disk", "rows_at_once": 1}, "hidden states on disk"),
  ):
    refused(OptionError, call(**options), *words)
  cache = resident.init_cache(1, 8, placement="host")
  for do in (lambda: cache.take([0]), lambda: cache.keep(np.ones((1, 1), bool)),
             lambda: cache.keep_first(np.ones(1, int), 1),
             lambda: cache.gathered(jax.devices()[0])):  # fmt: skip
    refused(OptionError, do, "host memory or on disk")
  spec = resident.init_cache_spec(1, 8, placement="host")
  shapes = lambda x: [(a.shape, a.dtype) for a in jax.tree.leaves(x)]
  assert shapes(spec) == shapes(cache)
  assert ShardingContext().size == cache.shards

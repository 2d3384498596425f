"""KV-Runahead's arithmetic, its refusals, and a chain of one rank."""

from __future__ import annotations

import numpy as np
import pytest

from ringjax import infer
from ringjax.errors import ConfigError, OptionError, PeerError, PromptError
from ringjax.infer.kv_runahead import kvr
from ringjax.parallel.peers import Peers


@pytest.fixture
def alone():
  peers = Peers(0, 1, {}, {})
  yield peers
  peers.close()


@pytest.mark.parametrize("count", [1, 7, 128, 129, 640, 1000])
@pytest.mark.parametrize("sizes", [(512, 128), (128,), (8,)])
def test_tiles_cover_a_part_once(count, sizes):
  tiles = kvr._cut(100, count, sizes)
  at = 100
  for tile in tiles:
    assert tile.first == at and 0 < tile.real <= tile.size
    assert tile.size in sizes
    at += tile.real
  assert at == 100 + count
  # Padding is less than the smallest tile, and fits where it is written.
  assert sum(t.size for t in tiles) - count < sizes[-1]
  assert tiles[-1].first + tiles[-1].size <= kvr._capacity(100 + count, sizes)


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_models_with_other_layers_are_refused(loaded, alone, name):
  model, _ = loaded(name)
  with pytest.raises(ConfigError, match="keys and values in every layer"):
    kvr.Runahead(model, alone)


@pytest.mark.slow
def test_one_rank_reads_alone(loaded, alone):
  model, _ = loaded("llama3")
  ids = np.arange(5, 26, dtype=np.int32)
  chain = kvr.Runahead(model, alone, tile=8)
  reading = chain.read(ids, (21,), new_tokens=4)
  want = infer.generate(model, [ids], max_new_tokens=4)
  assert kvr.follow(reading, 4).tolist() == want[0].tolist()
  assert reading.outcome.link_bytes == {}
  kinds = {s.kind for s in reading.outcome.timeline.spans}
  assert kinds == {"project", "attend"}
  with pytest.raises(OptionError, match="max_new_tokens"):
    kvr.follow(reading, 10_000)


@pytest.mark.parametrize(
  ("tokens", "error"),
  [
    ([[1, 2], [3, 4]], PromptError),
    ([1, 1_000_000], PromptError),
    ([0.5, 1.0], PromptError),
    (np.zeros(0, np.int32), PromptError),
    ([1, 2, 3], OptionError),
  ],
)
def test_wrong_calls(unchecked, loaded, alone, tokens, error):
  model, _ = loaded("llama3")
  chain = kvr.Runahead(model, alone, tile=8)
  with pytest.raises(error):
    chain.read(tokens, (2,))


@pytest.mark.parametrize("number", [{"credits": 0}, {"tile": -1}])
def test_wrong_numbers(loaded, alone, number):
  model, _ = loaded("llama3")
  with pytest.raises(OptionError, match=next(iter(number))):
    kvr.Runahead(model, alone, **number)


@pytest.mark.parametrize("kind", ["paged", None])
def test_other_kinds_of_caches_are_refused(unchecked, loaded, alone, kind):
  model, _ = loaded("llama3")
  with pytest.raises(OptionError, match="kind.*dense"):
    kvr.Runahead(model, alone, kind=kind)


def test_a_failed_group_reads_nothing(loaded, alone):
  model, _ = loaded("llama3")
  alone.failure = PeerError("rank 1 is gone", rank=1)
  with pytest.raises(PeerError, match="rank 1 is gone"):
    kvr.Runahead(model, alone, tile=8).read([1, 2], (2,))


def test_a_balanced_partition(loaded):
  model, _ = loaded("llama3")
  found = kvr.balanced(model, 4096, 4, 128)
  assert sum(found) == 4096
  assert list(found) == sorted(found, reverse=True)
  assert all(n % 128 == 0 for n in found)

"""A pipeline of stages as a prefill instance: tokens are those of one engine.

Each rank is a thread; the processes are tested in launch/test_serve_cluster.py.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PeerError
from ringjax.infer import ChunkPipeline
from ringjax.kv.cache_kind import cache_kind
from ringjax.parallel.peers import Peers
from ringjax.serve import Request, cluster
from ringjax.serve.prefix.prefix_transfer import export_prefix, prefix_layout
from ringjax.serve.prefix.stage_pages import (
  StagePages,
  check_pages,
  whole_digest,
)
from ringjax.serve.prefix.store_link import weights_digest
from tests import checkpoints
from tests.helpers import refused, until
from tests.serve.test_cluster_live import (
  KEY,
  MODEL,
  WAIT_S,
  Live,
  engine,
  found,
)

LONGEST, PAGE = 160, 16
DENSE = cache_kind("dense")


@pytest.fixture(scope="module")
def model():
  return rj.models.create(MODEL | {"num_hidden_layers": 3}, seed=0)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
  path = tmp_path_factory.mktemp("stages") / "model"
  rj.models.save(model, path)
  return path


class Stages:
  """A pipeline whose ranks are threads, and its worker."""

  def __init__(self, folder, router, size=2, **options):
    self.group = Peers.in_threads(size, timeout_s=300.0)
    self.worker = None
    self.results: list = [None] * size
    self._router, self._options = router, options
    self.threads = [
      threading.Thread(target=self._run, args=(folder, rank), daemon=True)
      for rank in range(size)
    ]
    for thread in self.threads:
      thread.start()
    until(lambda: self.worker is not None or any(self.results))
    assert self.worker is not None, self.results
    assert self.worker.joined.wait(WAIT_S), self.worker.refused

  def _run(self, folder, rank):
    try:
      stage = ChunkPipeline.load(folder, self.group[rank], tile=16)
      pages = cluster.gather_pages(
        stage, longest=LONGEST, page=PAGE, kind=DENSE
      )
      if rank < len(self.group) - 1:
        self.results[rank] = cluster.serve_stage(stage)
        return
      self.worker = cluster.PipelineWorker(
        stage,
        pages,
        key=KEY,
        router=self._router,
        longest=LONGEST,
        name="stages",
        lease_s=60,
        silence_s=60,
        beat_s=0.05,
        **self._options,
      ).start()
    except Exception as error:
      self.results[rank] = error

  def close(self):
    if self.worker is not None:
      self.worker.close()
    for thread in self.threads:
      thread.join(WAIT_S)
      assert not thread.is_alive()
    for peers in self.group:
      peers.close()


@pytest.fixture
def service(model, folder):
  with contextlib.ExitStack() as stack:
    live = stack.enter_context(Live(model, "decode", cache_kind="dense"))
    stages = Stages(folder, live.router.address)
    stack.callback(stages.close)
    yield live, stages


def prompts(count):
  rng = np.random.default_rng(5)
  sizes = rng.integers(PAGE + 1, 90, count)
  return [rng.integers(0, 256, n).astype(np.int32) for n in sizes]


@pytest.mark.long
def test_tokens_of_a_service_are_those_of_one_engine(model, service):
  live, stages = service
  asked = [
    Request(prompt=prompt, max_new_tokens=12, priority=n % 2)
    for n, prompt in enumerate(prompts(5))
  ]
  # The same prompt once more is read once more: nothing is kept.
  asked.append(asked[0])
  handles = [live.submit(request) for request in asked]
  answers = [found(handle) for handle in handles]
  with engine(model, cache_kind="dense") as alone:
    alone.start()
    assert answers == [found(alone.submit(request)) for request in asked]
  counters = live.router.counters
  assert (counters.moved, counters.again, counters.failed) == (6, 0, 0)
  assert stages.worker.prompts == 6
  # Every page was pulled, and returned.
  token_bytes = 2 * 3 * 2 * (model.config.layers[0].attention.head_dim) * 4
  assert counters.moved_bytes == token_bytes * sum(
    request.prompt.size // PAGE * PAGE for request in asked
  )
  until(lambda: stages.worker.publisher.offered == 0)
  # It reads prompts, and never answers.
  refused(OptionError, lambda: live.router.set_role("stages", "both"), "stages")
  request = Request(prompt=prompts(1)[0], max_new_tokens=2, adapter="a")
  refused(OptionError, lambda: live.submit(request).result(), "adapter")
  # Pages must not return between two heartbeats, which renew their leases.
  refused(
    OptionError,
    lambda: cluster.PipelineWorker(
      stages.worker._stage,
      stages.worker._pages,
      key=KEY,
      router=live.router.address,
      longest=LONGEST,
      lease_s=1,
      beat_s=0.5,
    ),
    "four times beat_s",
  )
  stages.close()
  assert stages.results[0] == 6


@pytest.mark.long
def test_a_rank_that_is_lost_ends_the_instance(model, service):
  live, stages = service
  live.join("other", "prefill")
  # While the group reads a prompt, the first rank fails.
  real = stages.worker._stage.chunks

  def fails(tokens, count=None):
    stages.group[0].abandon(ArithmeticError("a broken device"))
    return real(tokens, count)

  stages.worker._stage.chunks = fails
  request = Request(prompt=prompts(1)[0], max_new_tokens=8)
  handles = [live.submit(request) for _ in range(2)]
  assert stages.worker.ended.wait(WAIT_S)
  assert isinstance(stages.worker.error, PeerError)
  assert "rank 0" in str(stages.worker.error)
  with engine(model, cache_kind="dense") as alone:
    alone.start()
    expected = found(alone.submit(request))
  assert [found(handle) for handle in handles] == [expected] * 2
  assert live.router.counters.again >= 1


@pytest.mark.long
def test_pages_are_those_of_an_engine(tmp_path):
  """Also of layers with windows, of two kinds, in a cache that keeps all."""
  checkpoints.write("gemma3_text", tmp_path / "model")
  model = rj.models.load(tmp_path / "model")
  ids = np.random.default_rng(2).integers(0, model.config.vocab, 60)
  ids = ids.astype(np.int32)
  options = dict(
    rows=1, capacity=128, longest=96, page=PAGE, cache_kind="dense"
  )
  with rj.serve.Engine(model, **options) as made:
    made.start()
    made.submit(Request(prompt=ids, max_new_tokens=1)).result()
    exported = export_prefix(made, ids)
  group, cut = Peers.in_threads(2, timeout_s=300.0), []

  def run(rank):
    stage = ChunkPipeline.load(tmp_path / "model", group[rank], tile=16)
    pages = cluster.gather_pages(stage, longest=96, page=PAGE, kind=DENSE)
    blocks = stage.read(ids, stage.chunks(60), keep="blocks").blocks
    if rank == 1:
      cut.append((pages.layout, pages.labels(ids, 3), pages.cut(blocks)))

  threads = [
    threading.Thread(target=run, args=(n,), daemon=True) for n in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(WAIT_S)
  for peers in group:
    peers.close()
  ((layout, labels, pages),) = cut
  assert layout == exported.layout
  assert labels == exported.labels
  for page, expected in zip(pages, exported.pages, strict=True):
    for x, y in zip(page, expected, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-4)


def test_the_layout_is_that_of_an_engine(model):
  made = engine(model, cache_kind="dense")
  try:
    whole = rj.models.abstract(
      MODEL | {"num_hidden_layers": 3}, dtype="float32"
    )
    layout = prefix_layout(made)
    pages = StagePages(
      whole,
      weights=weights_digest(model),
      longest=LONGEST,
      page=PAGE,
      dtype="float32",
      kind=DENSE,
    )
    assert pages.layout == layout
  finally:
    made.close()


@pytest.mark.parametrize(
  ("config", "kind", "words"),
  [
    ({}, "int8", "numbers as they are computed"),
    ({}, "dense:unrotated=true", "numbers as they are computed"),
    (
      {"model_type": "mistral", "sliding_window": 8},
      "windowed",
      "--cache=dense",
    ),
  ],
)
def test_caches_that_are_refused(config, kind, words):
  parsed, _ = rj.models.read_config(MODEL | config)
  refused(OptionError, lambda: check_pages(parsed, cache_kind(kind)), words)


def test_layers_that_keep_more_than_keys_are_refused():
  config = {
    "model_type": "mamba2", "vocab_size": 64, "hidden_size": 16,
    "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8,
    "n_groups": 1, "expand": 2,
  }  # fmt: skip
  parsed, _ = rj.models.read_config(config)
  refused(ConfigError, lambda: check_pages(parsed, DENSE), "mamba2")


def test_weights_that_differ_between_ranks():
  whole = rj.models.abstract(MODEL, dtype="float32")
  parts = {"embed.weight": [1, "00"]}, {"embed.weight": [2, "00"]}
  refused(OptionError, lambda: whole_digest(whole, parts), "two different")

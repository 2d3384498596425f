"""Chunked pipeline prefill with a thread for each rank: one device's answers.

The code is that of processes, links of TCP and pulled blocks included.
"""

from __future__ import annotations

import threading

import pytest

from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.infer.kv_runahead import kvr
from ringjax.infer.mooncake import chunk_pipeline
from ringjax.infer.mooncake.chunk_pipeline import ChunkPipeline
from ringjax.parallel.peers import Peers
from tests.helpers import refused
from tests.infer.ranks import far
from tests.infer.ranks import in_threads as ranks_in_threads

TOKENS, NEW, TILE = 41, 12, 8
PATIENCE_S = 600


def in_threads(model, ids, chunks, ranks, *, each=None, **read):
  """Each rank's reading, or its error.

  Args:
    model: the model.
    ids: the prompt.
    chunks: tokens of each, or of each rank what it calls chunks.
    ranks: how many.
    each: called with a rank and its group, returns a pause.
    **read: options.
  """

  def run(rank: int, peers: Peers) -> object:
    try:
      stage = ChunkPipeline(model, peers, tile=TILE)
      more = {} if each is None else {"pause": each(rank, peers)}
      own = chunks[rank] if isinstance(chunks, dict) else chunks
      return stage.read(ids, own, new_tokens=NEW, **read, **more)
    except (RingjaxError, ArithmeticError) as error:
      return error

  return ranks_in_threads(ranks, run)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "ranks", "chunks"),
  [
    ("llama3", 2, (17, 13, 11)),
    pytest.param("mistral", 2, (1, 39, 1), marks=pytest.mark.slow),
    pytest.param("llama2", 3, (25, 15, 1), marks=pytest.mark.slow),
    pytest.param("llama3", 1, (20, 21), marks=pytest.mark.slow),
    pytest.param("gemma3_text", 3, (9, 8, 8, 8, 8), marks=pytest.mark.long),
    pytest.param("falcon_7b", 2, (41,), marks=pytest.mark.slow),
  ],
)
def test_the_last_rank_has_what_one_device_has(
  loaded, alone, name, ranks, chunks
):
  model, _ = loaded(name)
  ids, logits, _, new = alone(name)
  readings = in_threads(model, ids, chunks, ranks)
  assert not [x for x in readings if isinstance(x, Exception)], readings
  *_, reading = readings
  assert [r for r, x in enumerate(readings) if x.session] == [ranks - 1]
  assert far(reading.logits, logits) < 5e-6
  assert kvr.follow(reading, NEW).tolist() == new
  # Activations of all tokens pass each link once, in float32.
  width = model.config.embed * 4
  links = {f"{x}-{x + 1}": TOKENS * width for x in range(ranks - 1)}
  assert reading.outcome.link_bytes == links
  spans = reading.outcome.timeline.spans
  sent = sum(s.nbytes for s in spans if s.kind == "send")
  assert sent == sum(links.values())
  # Each block of the other ranks' layers is pulled once, one for each chunk.
  layers = kvr.LayerPrograms(model).layers
  mine = len(layers) // ranks  # The first ranks have the layers that are over.
  pulled = [s for s in spans if s.kind == "pull"]
  assert len(pulled) == len(chunks) * (len(layers) - mine) or ranks == 1
  assert sum(s.nbytes for s in pulled) == TOKENS * sum(
    x.token_bytes("float32") for x in layers[: len(layers) - mine]
  )


@pytest.mark.slow
def test_blocks_stream_while_the_next_layer_waits(loaded, alone, monkeypatch):
  """The last rank has pulled a layer's block before the next layer begins."""
  model, _ = loaded("llama3")
  ids, logits, _, new = alone("llama3")
  assert len(model.config.layers) == 2
  pulled, waited = threading.Event(), []
  real = chunk_pipeline.pull

  def seen(*given, **options):
    found = real(*given, **options)
    pulled.set()
    return found

  def each(rank, peers):
    if rank == 0:
      real_tick, ticks = peers.tick, []

      def tick(step=0):
        # The first one is behind the first layer of the first chunk.
        ticks.append(step)
        if len(ticks) == 1:
          waited.append(pulled.wait(PATIENCE_S))
        real_tick(step)

      def pause(number):
        if number == 0:
          ticks.clear()
          peers.tick = tick

      return pause
    return kvr.nothing

  monkeypatch.setattr(chunk_pipeline, "pull", seen)
  # One rank has the first layer; its block is there before its second chunk.
  *_, reading = in_threads(model, ids, (30, 11), 2, each=each)
  assert waited == [True]
  assert far(reading.logits, logits) < 5e-6
  assert kvr.follow(reading, NEW).tolist() == new


@pytest.mark.slow
def test_stages_keep_what_they_have(loaded, alone):
  model, _ = loaded("llama3")
  ids, logits, *_ = alone("llama3")
  first, last = in_threads(model, ids, (20, 21), 2, keep="stages")
  assert first.logits is None and first.session is last.session is None
  assert far(last.logits, logits) < 5e-6
  kinds = {s.kind for s in last.outcome.timeline.spans}
  assert "pull" not in kinds


@pytest.mark.long
def test_a_rank_that_fails_is_named(loaded, alone):
  model, _ = loaded("llama3")
  ids, *_ = alone("llama3")

  def each(rank, peers):
    def pause(number):
      if rank == 0 and number == 1:
        raise ArithmeticError("a broken device")

    return pause

  first, last = in_threads(model, ids, (20, 21), 2, each=each)
  assert isinstance(first, ArithmeticError)
  assert isinstance(last, PeerError) and last.rank == 0
  assert "a broken device" in str(last)


def test_ranks_that_do_not_agree(loaded, alone):
  model, _ = loaded("llama3")
  ids, *_ = alone("llama3")
  found = in_threads(model, ids, {0: (20, 21), 1: (21, 20)}, 2)
  assert all(isinstance(one, PeerError) for one in found)
  assert "chunks" in str(found[0])
  found = in_threads(model, ids, {0: (20, 21), 1: (20, 20)}, 2)
  assert isinstance(found[0], PeerError) and found[0].rank == 1
  assert isinstance(found[1], OptionError)


def test_more_ranks_than_layers(loaded):
  model, _ = loaded("llama3")
  group = Peers.in_threads(3, timeout_s=300.0)
  try:
    refused(
      OptionError, lambda: ChunkPipeline(model, group[0]), "stages", "2 layers"
    )
    refused(
      OptionError,
      lambda: ChunkPipeline(model, group[0], stages=(1, 1)),
      "stages",
      "3 numbers",
    )
  finally:
    for one in group:
      one.close()

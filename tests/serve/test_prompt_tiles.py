"""Prompts pass through the layers in tiles, as many as a call holds."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv.storage.call_tiles import tile_sizes, tiles_of
from ringjax.serve import Engine, Request

PAGE = 16


def engine(model, **options):
  """An engine whose prompts are in tiles of 4, 16 and 64 tokens."""
  settings = dict(
    rows=8, longest=160, page=PAGE, piece=64, pieces=4, prompt_tile=4
  )
  return Engine(model, **settings | options)


def request(prompt, **options):
  return Request(prompt=prompt, max_new_tokens=3, logprobs=3, **options)


def numbers(handle):
  answer = handle.result().answers[0]
  return answer.tokens, answer.logprobs


def test_a_token_s_tile_follows_from_its_position():
  sizes = tile_sizes(4, 64)
  assert sizes == (4, 16, 64)
  covered = {}
  # Chunks of one prompt, begun at any place.
  for position in range(100):
    levels = tiles_of([position, 7], [50, 0], 64, sizes)
    places = []
    for tiles in levels:
      for row, start, filled in zip(
        tiles.row[: tiles.count],
        tiles.start[: tiles.count],
        tiles.filled[: tiles.count],
        strict=True,
      ):
        assert row == 0
        assert 0 < filled <= tiles.size
        for place in range(start, start + filled):
          covered.setdefault(position + place, set()).add(tiles.size)
          places.append(place)
    assert sorted(places) == list(range(50))
  assert covered == {n: {4 if n < 64 else 16} for n in range(149)}


def test_numbers_of_tiles_are_the_work_of_a_call():
  sizes = tile_sizes(16, 512)
  assert sizes == (16, 64, 256)
  count = lambda *lengths: [
    int(tiles.count) for tiles in tiles_of([0] * 4, lengths, 512, sizes)
  ]
  assert count(12, 0, 0, 0) == [1, 0, 0]
  assert count(0, 300, 0, 17) == [16 + 2, 1, 0]
  assert count(0, 0, 0, 0) == [0, 0, 0]


@pytest.mark.long
def test_alone_with_neighbours_and_at_any_alignment_bit_for_bit(loaded):
  """Neighbours, chunks and prefixes found move a token within its tiles."""
  model, _ = loaded("llama3")
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(0, model.config.vocab, n).astype(np.int32)
  prompt = draw(90)
  alone = numbers(engine(model).submit(request(prompt)))
  crowded = engine(model, share="nothing")
  for neighbours in range(8):
    before = [crowded.submit(request(draw(5 + n))) for n in range(neighbours)]
    handle = crowded.submit(request(prompt))
    assert numbers(handle) == alone
    for other in before:
      other.result()
  # Budgets end chunks, so that the next ones begin, at any place.
  for budget in (3, 7, 30, 61):
    cut = engine(model, budget=budget)
    assert numbers(cut.submit(request(prompt))) == alone
  shared = engine(model)
  for length in (17, 40, 70):
    shared.submit(request(prompt[:length])).result()
    found = shared.submit(request(prompt))
    assert numbers(found) == alone
    assert found.cached_tokens >= length // PAGE * PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
  "family", ["gpt_oss", "gemma2", "deepseek_v3", "qwen3_next", "mixtral"]
)
def test_tiles_answer_as_generate(loaded, family):
  model, _ = loaded(family)
  rng = np.random.default_rng(1)
  draw = lambda n: rng.integers(0, model.config.vocab, n).astype(np.int32)
  prompts = [draw(n) for n in (90, 3, 21, 80, 1)]
  at = engine(model, longest=96, piece=16)
  handles = [
    at.submit(Request(prompt=prompt, max_new_tokens=4)) for prompt in prompts
  ]
  for prompt, handle in zip(prompts, handles, strict=True):
    answer = rj.infer.generate(model, [prompt], max_new_tokens=4)[0]
    assert handle.result().tokens.tolist() == answer.tolist()


@pytest.mark.long
def test_calls_that_can_t_be_cut_are_refused_by_name(loaded):
  model, _ = loaded("llama3")
  with pytest.raises(OptionError, match="prompt_tile"):
    engine(model, prompt_tile=-1)
  shares, _ = loaded("gemma3n")
  with pytest.raises(OptionError, match=r"prompt_tile.*4, with layers that"):
    engine(shares, longest=96)
  engine(shares, longest=96, prompt_tile=None)
  mesh = jax.make_mesh(
    (2,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:2],
  )
  with pytest.raises(OptionError, match=r"prompt_tile.*mesh axis"):
    engine(rj.models.place(model, mesh), mesh=mesh)

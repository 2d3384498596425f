"""Blocks of tokens that are chosen by the memory of a device."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.parallel.memory import DeviceMemory
from ringjax.train import block_sizes
from ringjax.train.block_sizes import chosen_blocks, token_bytes
from tests.train.test_step import CONFIG

STAGE = rj.train.Stage(steps=2, length=16, batch=2)


@pytest.mark.parametrize(
  ("name", "memory", "want"),
  [
    # Logits of 151,936 or 128,256 ids are larger than a layer's numbers.
    ("qwen3-8b", 84_900_000_000, (8192, 2048)),
    ("qwen3-8b", 16_900_000_000, (4096, 512)),
    ("llama-3.1-8b", 102_800_000_000, (8192, 4096)),
    ("llama-3.1-8b", 1_000_000, (128, 128)),
    ("llama-3.1-8b", None, (2048, 1024)),
  ],
)
def test_blocks_by_the_memory_of_a_device(name, memory, want):
  config = rj.models.abstract(name).config
  per_token = token_bytes(config, 2)
  assert chosen_blocks(per_token, memory, 1 << 17) == want
  if memory is not None:
    # No more than half of a block is without a token.
    few = chosen_blocks(per_token, memory, 300)
    assert few == tuple(min(512, size) for size in want)


def test_a_model_axis_shards_the_widths_that_it_divides():
  config = rj.models.abstract(CONFIG).config
  mesh = rj.make_mesh((2,), ("model",), devices=jax.devices()[:2])
  one, two = token_bytes(config, 4), token_bytes(config, 4, mesh=mesh)
  width, vocab = config.layers[0].feedforward.width, config.vocab
  assert one.feedforward - two.feedforward == 4 * 4 * width // 2
  assert one.loss - two.loss == 3 * 4 * vocab // 2


@pytest.mark.long
def test_auto_trains_as_the_numbers_that_it_stands_for():
  draw = np.random.default_rng(0)
  documents = rj.data.Documents([draw.integers(0, 48, 20) for _ in range(20)])

  def trained(feedforward_block, block):
    recipe = rj.train.Recipe(
      stages=(STAGE,),
      feedforward_block=feedforward_block,
      objective=rj.train.Objective(block=block),
    )
    model = rj.models.create(CONFIG, seed=3)
    return rj.train.train(recipe, model, rj.train.Mixture([documents])).model

  got, want = trained("auto", "auto"), trained(128, 128)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(x, y)


def test_auto_stands_next_to_numbers_which_are_taken_as_they_are(monkeypatch):
  model = rj.models.abstract("qwen3-8b")
  stage = rj.train.Stage(steps=1, length=1 << 20, batch=4)
  monkeypatch.setattr(
    block_sizes, "device_memory", lambda *_: DeviceMemory(int(16.9e9), 0, None)
  )

  def sizes(feedforward_block, block, **axes):
    mesh = None
    if axes:
      devices = jax.devices()[: math.prod(axes.values())]
      mesh = rj.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    recipe = rj.train.Recipe(
      stages=(stage,),
      feedforward_block=feedforward_block,
      objective=rj.train.Objective(block=block),
    )
    recipe = recipe.with_block_sizes(model, mesh, None)
    return recipe.feedforward_block, recipe.objective.block

  assert sizes("auto", "auto") == (512, 128)
  # Rows are on all of these axes, and on no axis of experts.
  assert sizes("auto", "auto", data=2, stage=2) == (2048, 512)
  assert sizes("auto", "auto", data=2, expert=2) == (1024, 256)
  assert sizes(64, "auto") == (64, 128)
  # An estimate refuses nothing: these may fit.
  assert sizes(1 << 17, 1 << 16) == (1 << 17, 1 << 16)


def test_words_that_are_no_block_are_refused():
  with pytest.raises(OptionError, match="feedforward_block: got 'all'"):
    rj.train.Recipe(stages=(STAGE,), feedforward_block="all")
  with pytest.raises(OptionError, match="block"):
    rj.train.Objective(block=0)
  recipe = rj.train.Recipe(stages=(STAGE,), feedforward_block="auto")
  with pytest.raises(OptionError, match="with_block_sizes"):
    recipe.attend(None, None)

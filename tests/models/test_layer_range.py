"""Layers that are loaded without the others of their model."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer.mooncake.chunk_pipeline import ChunkPipeline
from ringjax.parallel.peers import Peers
from ringjax.serve.prefix.stage_pages import weight_sums, whole_digest
from ringjax.serve.prefix.store_link import weights_digest
from tests.helpers import refused

CONFIG = {
  "model_type": "llama",
  "vocab_size": 96,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 5,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 64,
}


@pytest.fixture(
  scope="module",
  params=[True, pytest.param(False, marks=pytest.mark.long)],
  ids=["tied", "untied"],
)
def saved(request, tmp_path_factory):
  """A model and its folder, whose head is its embedding or not."""
  config = CONFIG | {"tie_word_embeddings": request.param}
  model = rj.models.create(config, seed=3)
  folder = tmp_path_factory.mktemp("layers") / "model"
  rj.models.save(model, folder)
  return model, folder


def nbytes(tree) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_each_rank_has_its_layers_only(saved):
  model, folder = saved
  parts = [rj.models.load_layers(folder, *x) for x in ((0, 2), (2, 3), (3, 5))]
  layer = nbytes(model.stack) // 5
  table = nbytes(model.embed)
  tied = model.head is None
  sizes = [nbytes(part.model) for part in parts]
  assert sizes == [
    table + 2 * layer,
    layer,
    2 * layer + nbytes(model.norm) + (table if tied else nbytes(model.head)),
  ]
  assert sum(sizes) == nbytes(model) + tied * table
  # The numbers are those of the whole model.
  whole = model.stack.blocks[0][0].attention.q.weight.get_value()
  for part in parts:
    for path, x in part.weights().items():
      number, _, name = path.partition(".")
      if name == "attention.q.weight":
        np.testing.assert_array_equal(x, whole[int(number)])
        assert part.first <= int(number) < part.end


def test_parts_of_a_digest_are_that_of_the_whole(saved):
  model, folder = saved
  parts = [rj.models.load_layers(folder, *x) for x in ((0, 3), (3, 5))]
  sums = [weight_sums(part.weights()) for part in parts]
  assert whole_digest(parts[0].whole, sums) == weights_digest(model)
  refused(
    OptionError, lambda: whole_digest(parts[0].whole, sums[:1]), "no process"
  )
  # One number of one layer is another one.
  other = rj.models.create(
    CONFIG | {"tie_word_embeddings": model.head is None}, seed=3
  )
  weight = other.stack.blocks[0][0].feedforward.up.weight
  weight.set_value(weight.get_value().at[4, -1, -1].add(0.5))
  assert whole_digest(parts[0].whole, sums) != weights_digest(other)


def test_layers_that_there_are_not(saved):
  _, folder = saved
  refused(OptionError, lambda: rj.models.load_layers(folder, 5, 6), "first")
  refused(OptionError, lambda: rj.models.load_layers(folder, 3, 3), "end")
  refused(OptionError, lambda: rj.models.load_layers(folder, 0, 6), "end")


def test_a_pipeline_takes_the_layers_of_its_rank(saved):
  _, folder = saved
  part = rj.models.load_layers(folder, 0, 3)
  first, last = Peers.in_threads(2, timeout_s=300.0)
  try:
    assert ChunkPipeline(part, first).stages == (3, 2)
    refused(
      OptionError,
      lambda: ChunkPipeline(part, last),
      "layers 0 to 2",
      "layers 3 to 4",
    )
  finally:
    first.close()
    last.close()

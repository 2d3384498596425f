"""Memory of training a layer, blockwise and dense, on one device.

Compiles the gradients of the loss of one row of tokens, for a model with one
layer of the given model's widths, from shapes alone: no weight is read and
nothing is run. In all ways the layer is computed again for its backward pass,
and logits exist for a block of tokens at a time. Prints a JSON object with the
temporary bytes of the program, by tokens and by way:

  dense      attention over all scores, [T, T]; the feedforward of all tokens
  attention  blockwise attention; the feedforward of all tokens
  blockwise  blockwise attention and feedforward (arXiv 2305.19370)

  python -m benchmarks.blockwise_memory --tokens=4096,32768
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import ringjax as rj
from ringjax.json_text import json_text
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.train import remat
from ringjax.train.batch import Batch
from ringjax.train.objective import sums

WAYS: dict[str, dict[str, Any]] = {
  "dense": {"strategy": Gather(Dense()), "block": 1 << 30},
  "attention": {"block": 1 << 30},
  "blockwise": {},
}


def program_bytes(
  config: Mapping[str, Any], way: str, tokens: int, block: int | None = None
) -> int:
  """Temporary bytes of a program for a row's loss and gradients.

  Args:
    config: Configuration of the model, as in its config.json.
    way: Name of a way, of `WAYS`.
    tokens: Tokens of the row.
    block: Tokens of a step of the blockwise feedforward; default: the
      library's.
  """
  options: dict[str, Any] = {} if block is None else {"block": block}
  attend = rj.models.ContextParallel(
    remat=remat.policy("nothing"), **(options | WAYS[way])
  )
  model = rj.models.abstract(config, dtype=jnp.float32)

  def loss(model: Any, batch: Batch) -> jax.Array:
    totals = sums(model, batch, attend)
    return totals.loss / totals.weight

  field: Any = lambda dtype: jax.ShapeDtypeStruct((1, tokens), dtype)
  batch = Batch(field(jnp.int32), field(jnp.int32), field(jnp.float32))
  program = jax.jit(jax.grad(loss)).lower(model, batch)
  needs: Any = program.compile().memory_analysis()
  return int(needs.temp_size_in_bytes)


def main(argv: Sequence[str] | None = None) -> int:
  """Compiles the programs and prints their bytes."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--tokens", default="4096,32768")
  flags = parser.parse_args(argv)
  # The other layers' inputs alone would be kept, the same in all ways.
  config = {**open_model(flags.model).config, "num_hidden_layers": 1}
  lengths = [int(x) for x in flags.tokens.split(",")]
  table = {
    length: {way: program_bytes(config, way, length) for way in WAYS}
    for length in lengths
  }
  print(json_text({"model": flags.model, "bytes": table}))
  return 0


if __name__ == "__main__":
  sys.exit(main())

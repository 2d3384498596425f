"""The first layers of a model, as a model."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ringjax.checks import integer
from ringjax.models.transformer import Transformer
from ringjax.nn.block import Block
from ringjax.nn.stack import Run, Stack, runs


def first_layers(model: Transformer, count: int) -> Transformer:
  """A model of the first layers of another, with copies of their weights.

  Norm and head are those of the other model.

  Raises:
    OptionError: If it has fewer layers.
  """
  integer("count", count, least=1, most=len(model.config.layers))
  layers = model.config.layers[:count]
  blocks = {}
  for g, run in enumerate(model.stack.runs):
    for position in range(len(run.layers)):
      for repeat in range(run.repeats):
        blocks[run.number(position, repeat)] = (g, position, repeat)
  scan = any(run.repeats > 1 for run in model.stack.runs)
  result = copy.copy(model)
  result.config = dataclasses.replace(model.config, layers=layers)
  result.stack = nnx.eval_shape(
    lambda: Stack(nnx.Rngs(0), layers, model.config.embed, scan=scan)
  )

  def stacked_block(run: Run, position: int) -> Block:
    numbers = [run.number(position, n) for n in range(run.repeats)]
    parts = [model.stack.layer(*blocks[m]) for m in numbers]
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)

  result.stack.blocks = nnx.List(
    nnx.List(stacked_block(run, n) for n in range(len(run.layers)))
    for run in runs(layers, scan=scan)
  )
  return result

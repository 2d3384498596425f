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
    OptionError: more layers than it has.
  """
  integer("count", count, least=1, most=len(model.config.layers))
  layers = model.config.layers[:count]
  blocks = {}
  for run, stacks in zip(model.stack.runs, model.stack.blocks, strict=True):
    for position, stack in enumerate(stacks):
      for repeat in range(run.repeats):
        blocks[run.number(position, repeat)] = (stack, repeat)
  made = copy.copy(model)
  made.config = dataclasses.replace(model.config, layers=layers)
  made.stack = nnx.eval_shape(
    lambda: Stack(nnx.Rngs(0), layers, model.config.embed, scan=True)
  )

  def gathered(run: Run, position: int) -> Block:
    numbers = [run.number(position, n) for n in range(run.repeats)]
    parts = [
      jax.tree.map(lambda x, n=blocks[m][1]: x[n], blocks[m][0])
      for m in numbers
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)

  made.stack.blocks = nnx.List(
    nnx.List(gathered(run, n) for n in range(len(run.layers)))
    for run in runs(layers)
  )
  return made

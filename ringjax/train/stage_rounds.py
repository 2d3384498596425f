"""Rounds of a model's layers, for meshes whose axis "stage" shards layers.

Guarantees: the model computes the same, and is saved as the same folder.
Cost: of M groups of rows in V rounds over S stages a device is idle in S - 1 of
V M + S - 1 passes, each of which has a V-th of a stage's layers.
Ref: Narayanan et al. 2021, arXiv 2104.04473.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import lax

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.param import Rules
from ringjax.parallel.call_sharding import STAGE


def with_stage_rounds(
  model: Transformer, rounds: int, *, rules: Rules | None = None
) -> Transformer:
  """The model whose rows pass the stages several times, for shorter idle times.

  In a round each stage computes a contiguous part of the round's layers, so a
  stage has several parts of the model. A batch then needs at least as many
  groups of rows as there are stages.

  Args:
    model: Model on a mesh with an axis "stage", or its shapes with shardings.
    rounds: Number of rounds, V; with the stages it divides the number of equal
      layers of at least one run.
    rules: Rules by which the model was placed.

  Raises:
    OptionError: If the mesh has no stages, or the rounds do not divide layers.
  """
  positive_int("rounds", rounds)
  refuse_placed(model, "pass it in rounds", "load it without placement=")
  mesh, runs = model.mesh, model.stack.runs
  stages = 1 if mesh is None else dict(mesh.shape).get(STAGE, 1)
  if mesh is None or stages == 1:
    raise OptionError(
      "rounds",
      f"{rounds} on a mesh without stages",
      f"a mesh with an axis {STAGE!r} of 2 or more",
      "leave the rounds out, or place the model on such a mesh",
    )
  if all(run.repeats % (rounds * stages) for run in runs):
    raise OptionError(
      "rounds",
      f"{rounds} over {stages} stages for runs of "
      f"{', '.join(str(run.repeats) for run in runs)} equal layers",
      "a number that divides one of these together with the stages",
      "pass fewer rounds, or a mesh of fewer stages",
    )
  rules = rules or Rules()

  def cut(param: nnx.Variable, first: int, size: int) -> nnx.Variable:
    array = param.get_value()
    shape = jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype)
    sharding = rules.sharding(param.replace(shape), mesh)
    if isinstance(array, jax.ShapeDtypeStruct):
      return param.replace(
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
      )
    take = jax.jit(
      lambda x: lax.slice_in_dim(x, first, first + size),
      out_shardings=sharding,
    )
    return param.replace(take(array))

  result = jax.tree.map(lambda x: x, model)
  new_runs: list[Any] = []
  new_blocks: list[Any] = []
  for run, blocks in zip(runs, model.stack.blocks, strict=True):
    parts = 1 if run.repeats % (rounds * stages) else rounds
    size = run.repeats // parts
    for n in range(parts):
      first = run.first + n * size * len(run.layers)
      new_runs.append(dataclasses.replace(run, first=first, repeats=size))
      new_blocks.append(
        blocks
        if parts == 1
        else jax.tree.map(
          lambda p, n=n, size=size: cut(p, n * size, size),
          blocks,
          is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
      )
  result.stack.runs = tuple(new_runs)
  result.stack.blocks = nnx.List(new_blocks)
  return result

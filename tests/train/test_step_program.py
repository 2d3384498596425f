"""What a compiled step holds and sends: nothing as long as the sequence."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.bench.program import Program
from ringjax.models import checkpoint
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import remat, step
from ringjax.train.batch import Batch
from tests.train.test_step import CONFIG

# Sizes that no other size is a part of.
HIDDEN, VOCAB, LOCAL = 176, 1104, 2048
FFN_BLOCK, HEAD_BLOCK = 256, 128


@functools.cache
def compiled(shards: int, layout: str = "striped", local: int = LOCAL):
  """A step over so many shards of `local` tokens each, and no numbers."""
  mesh = rj.make_mesh((shards,), ("seq",), devices=jax.devices()[:shards])
  attend = ContextParallel(
    mesh=mesh,
    axis="seq",
    layout=rj.Striped() if layout == "striped" else rj.Contiguous(),
    block=FFN_BLOCK,
    remat=remat.policy("attention"),
  )
  config = CONFIG | {"intermediate_size": HIDDEN, "vocab_size": VOCAB}
  everywhere = NamedSharding(mesh, P())
  at = lambda x, sharding: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding
  )
  model = jax.tree.map(
    lambda x: at(x, everywhere), checkpoint.abstract(config, dtype="float32")
  )
  optimizer = optax.adamw(1e-3)
  moments = jax.eval_shape(optimizer.init, model)
  zero = jax.ShapeDtypeStruct((), jnp.int32)
  state = jax.tree.map(
    lambda x: at(x, everywhere), step.TrainState(zero, model, moments, zero)
  )
  rows = NamedSharding(mesh, P(None, None, "seq"))
  shape = (1, 1, shards * local)
  field = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
  batch = Batch(
    field(jnp.int32),
    field(jnp.int32),
    field(jnp.float32),
    field(jnp.int32),
    field(jnp.int32),
  )
  run = step.make_step(optimizer, attend, step.Objective(block=HEAD_BLOCK))
  return run.lower(state, None, batch).compile()


def shapes(program: Program):
  """(dtype, dims) of all that any instruction makes."""
  for instructions in program.computations.values():
    for i in instructions.values():
      yield from i.shapes


@pytest.mark.long
@pytest.mark.parametrize(
  "layout",
  ["striped", pytest.param("contiguous", marks=pytest.mark.slow)],
)
def test_no_array_is_as_long_as_the_sequence(layout):
  shards = 8
  program = Program(compiled(shards, layout).as_text())
  seen = set()
  for dtype, dims in shapes(program):
    seen.update(dims)
    # Nobody has the whole sequence, as [T, D], [T, F], [T, V] or otherwise.
    assert shards * LOCAL not in dims, (dtype, dims)
    if HIDDEN in dims:
      assert LOCAL not in dims, (dtype, dims)
      assert math.prod(dims) <= 4 * FFN_BLOCK * HIDDEN, (dtype, dims)
    if VOCAB in dims:
      assert LOCAL not in dims, (dtype, dims)
      assert math.prod(dims) <= 2 * HEAD_BLOCK * VOCAB, (dtype, dims)
    # Neither a square of a shard, for any head.
    assert math.prod(dims) < LOCAL * LOCAL, (dtype, dims)
  # What was looked for is what it works with.
  assert {LOCAL, HIDDEN, VOCAB} <= seen


@pytest.mark.long
@pytest.mark.parametrize("shards", [4, 8])
def test_a_step_of_the_head_has_a_block_of_each_shard(shards):
  # Fewer tokens are steps too small for a matrix unit, and as many times the
  # head's weights on the links where they are sharded.
  program = Program(compiled(shards).as_text())
  logits = {dims for _, dims in shapes(program) if VOCAB in dims}
  assert any(math.prod(dims) == HEAD_BLOCK * VOCAB for dims in logits)


@pytest.mark.long
def test_nothing_is_gathered():
  program = Program(compiled(8).as_text())
  ops = {
    i.op
    for instructions in program.computations.values()
    for i in instructions.values()
  }
  assert "collective-permute" in " ".join(ops)
  assert not any(op.startswith(("all-gather", "all-to-all")) for op in ops)


@pytest.mark.long
def test_memory_is_flat_in_the_number_of_shards():
  few, many = (compiled(n).memory_analysis().temp_size_in_bytes for n in (4, 8))
  assert many <= 1.05 * few


@pytest.mark.slow
def test_memory_is_linear_in_a_shard_s_length():
  short, long = (
    compiled(4, local=n).memory_analysis().temp_size_in_bytes
    for n in (LOCAL, 2 * LOCAL)
  )
  assert long <= 2.1 * short

"""Products of row tiles with one weight, by the kernel and by a loop."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ringjax.models.weights.coded_weights import _FP4_LEVELS, _NF4_LEVELS
from ringjax.ops.block_product_tpu import BlockCodes
from ringjax.ops.flat_product_tpu import (
  FlatProductTPU,
  LiveTiles,
  _WeightForm,
  flat_gated,
  flat_product,
)
from ringjax.parallel import chips
from ringjax.plan.compiler import aot

KERNEL = FlatProductTPU(interpret=True)
TILES, ROWS, INNER, OUTER = 5, 16, 256, 384
HOLDS = np.array([True, False, True, True, False])


def drawn(*shape, dtype="bfloat16", seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), dtype)


@functools.partial(jax.jit, static_argnums=0)
def multiplied(kernel, x, weight, layer, holds):
  live = LiveTiles.of(holds)
  if kernel is None:
    return flat_product(x, weight, live, (layer,))
  return kernel.product(x, weight, (layer,), live)


# Groups, levels, dtype of steps, and whether there are least numbers.
CODES = {
  "int8": (0, None, "float32", False),
  "8 bits in groups, as Q8_0": (32, None, "float16", False),
  "8 bits in groups of 16": (16, None, "float32", True),
  "int4": (64, tuple(range(16)), "float32", True),
  "4 bits in groups of 32, as Q4_0": (
    32, tuple(range(-8, 8)), "float16", False
  ),
  "nf4": (64, _NF4_LEVELS, "bfloat16", False),
  "mxfp4": (32, _FP4_LEVELS, "bfloat16", False),
}  # fmt: skip


def codes_of(kind, inner, outer, layers=2, seed=0):
  """Random codes of a stack of layers."""
  group, levels, dtype, has_least = CODES[kind]
  rng = np.random.default_rng(seed)
  group = group or inner
  groups, rows = inner // group, group if levels is None else group // 2
  bounds = (-128, 128, np.int8) if levels is None else (0, 256, np.uint8)
  codes = rng.integers(
    *bounds[:2], (layers, groups, rows, outer), dtype=bounds[2]
  )
  scales = layers, groups, outer
  step = rng.uniform(0.5, 1, scales) / 512
  minimum = rng.normal(size=scales) / 64 if has_least else None
  return BlockCodes(
    codes=jnp.asarray(codes),
    step=jnp.asarray(step, dtype),
    least=None if minimum is None else jnp.asarray(minimum, dtype),
    levels=levels,
  )


def decoded(weight):
  """Numbers of a stack of layers of codes, float64."""
  float64 = lambda x: np.asarray(x, np.float64)
  codes = np.asarray(weight.codes)
  numbers = float64(codes)
  if weight.levels is not None:
    table = np.array(weight.levels, np.float64)
    numbers = np.concatenate([table[codes >> 4], table[codes & 15]], 2)
  numbers = numbers * float64(weight.step)[:, :, None]
  if weight.least is not None:
    numbers = numbers + float64(weight.least)[:, :, None]
  return numbers.reshape(numbers.shape[0], -1, numbers.shape[-1])


class LittleMemory(FlatProductTPU):
  """A kernel that reads the tiles again for each block of columns."""

  def _blocks(self, *sizes):
    blocks = super()._blocks(*sizes)
    return blocks and dataclasses.replace(blocks, columns=128, resident=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", [FlatProductTPU, LittleMemory])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_with_rows_are_multiplied_by_a_layer(kind, dtype):
  x = drawn(TILES, ROWS, 1024, dtype=dtype)
  weight = drawn(2, 1024, OUTER, dtype=dtype, seed=1)
  float64 = lambda a: np.asarray(a, np.float64)
  want = float64(x) @ float64(weight)[1]
  for kernel in (kind(interpret=True), None):
    got = multiplied(kernel, x, weight, jnp.int32(1), jnp.asarray(HOLDS))
    assert got.dtype == x.dtype
    scale = {"float32": 1e-4, "bfloat16": 2e-2}[dtype] * np.abs(want).max()
    np.testing.assert_allclose(
      float64(got)[HOLDS], want[HOLDS], rtol=0, atol=scale
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", [FlatProductTPU, LittleMemory, None])
def test_a_gate_is_computed_with_its_products(kind):
  x, layer = drawn(TILES, ROWS, INNER), (jnp.int32(1),)
  weights = tuple(drawn(2, INNER, OUTER, seed=n) / 16 for n in (1, 2))
  combine = lambda gate, up: jax.nn.silu(gate) * up

  @jax.jit
  def gated(x, weights, holds):
    live = LiveTiles.of(holds)
    if kind is None:
      return flat_gated(x, weights, live, layer, combine)
    return kind(interpret=True).gated(x, weights, layer, live, combine)

  got = gated(x, weights, jnp.asarray(HOLDS))
  float32 = lambda a: np.asarray(a, np.float32)
  want = combine(*(float32(x) @ float32(w)[1] for w in weights))
  np.testing.assert_allclose(
    float32(got)[HOLDS], float32(want)[HOLDS], rtol=0.05, atol=0.05
  )


@pytest.mark.long
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_the_weight_that_they_stand_for(kind, dtype):
  """Alone and as a gate, by the kernel, by its loop, and tile after tile."""
  gate, up = (codes_of(kind, INNER, OUTER, seed=n) for n in (1, 2))
  x, holds = drawn(TILES, ROWS, INNER, dtype=dtype), jnp.asarray(HOLDS)
  rows = np.asarray(x, np.float64)[HOLDS]
  want = [rows @ decoded(weight)[1] for weight in (gate, up)]
  scale = {"float32": 2e-5, "bfloat16": 2e-2}[dtype]
  for kernel in (KERNEL, LittleMemory(interpret=True), None):
    run = functools.partial(multiplied, kernel)
    got = run(x, gate, jnp.int32(1), holds)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(
      np.asarray(got, np.float64)[HOLDS], want[0], rtol=scale, atol=scale
    )
    moved = jnp.full_like(x, jnp.nan).at[4, 3].set(x[2, 9])
    alone = run(moved, gate, jnp.int32(1), jnp.arange(TILES) == 4)[4, 3]
    np.testing.assert_array_equal(
      *(np.asarray(a, np.float32) for a in (alone, got[2, 9]))
    )
    product = gated_by(kernel, x, (gate, up), jnp.int32(1), holds)
    np.testing.assert_allclose(
      np.asarray(product, np.float64)[HOLDS],
      want[0] * want[1],
      rtol=2 * scale,
      atol=2 * scale,
    )


@functools.partial(jax.jit, static_argnums=0)
def gated_by(kernel, x, weights, layer, holds):
  live, index = LiveTiles.of(holds), (layer,)
  if kernel is None:
    return flat_gated(x, weights, live, index, jnp.multiply)
  return kernel.gated(x, weights, index, live, jnp.multiply)


def test_the_tiles_stay_in_the_vector_memory_where_they_fit():
  form = _WeightForm(inner=14336, outer=4096, maps=1)
  blocks = lambda tiles: FlatProductTPU(chip="tpu-v5e")._blocks(
    (tiles, 128, 14336), form, jnp.bfloat16
  )
  assert blocks(17).resident and blocks(17).columns == 128
  assert not blocks(34).resident and blocks(34).columns > 128


@pytest.mark.parametrize("kernel", [KERNEL, LittleMemory(interpret=True), None])
def test_the_bits_of_a_row_depend_on_that_row_alone(kernel):
  x = drawn(TILES, ROWS, INNER)
  weight = drawn(2, INNER, OUTER, seed=1)
  run = lambda x, holds: np.asarray(
    multiplied(kernel, x, weight, jnp.int32(0), jnp.asarray(holds)), np.float32
  )
  crowd = run(x, HOLDS)
  alone = np.zeros(TILES, bool)
  alone[4] = True
  # Another tile, another place in it, and no other rows.
  moved = jnp.full_like(x, jnp.nan).at[4, 3].set(x[2, 9])
  np.testing.assert_array_equal(run(moved, alone)[4, 3], crowd[2, 9])


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("heads", "width"),
  [(2, 128), (4, 256), (16, 128), (6, 64), (5, 192), (2, 200)],
)
def test_a_weight_by_heads_is_one_by_columns(heads, width, dtype):
  x = drawn(TILES, ROWS, 1024, dtype=dtype)
  weight = drawn(2, 1024, heads, width, dtype=dtype, seed=1)
  matrix = weight.reshape(2, 1024, heads * width)
  for kernel in (KERNEL, None):
    got, want = (
      multiplied(kernel, x, w, jnp.int32(1), jnp.asarray(HOLDS))[HOLDS]
      for w in (weight, matrix)
    )
    np.testing.assert_array_equal(*(np.asarray(a, "f4") for a in (got, want)))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_nothing_is_read_before_it_has_come_nor_overwritten_while_it_is(mode):
  """Copies are made as late, and as early, as their semaphores allow."""
  x, weight = drawn(TILES, ROWS, INNER), drawn(1, INNER, 4 * 4096, seed=1)
  kernel = FlatProductTPU(
    interpret=pltpu.InterpretParams(dma_execution_mode=mode)
  )
  form = _WeightForm.of((weight,), 1)
  assert kernel._blocks(x.shape, form, x.dtype).columns < 16384
  arguments = x, weight, jnp.int32(0), jnp.asarray(HOLDS)
  got, want = (multiplied(k, *arguments)[HOLDS] for k in (kernel, KERNEL))
  np.testing.assert_array_equal(*(np.asarray(a, "f4") for a in (got, want)))


@pytest.mark.long
def test_a_call_without_rows_is_computed():
  x, weight = drawn(TILES, ROWS, INNER), drawn(1, INNER, OUTER)
  no = jnp.zeros(TILES, bool)
  got = multiplied(KERNEL, x, weight, jnp.int32(0), no)
  assert got.shape == (TILES, ROWS, OUTER)


@pytest.mark.parametrize(
  ("x", "weight", "reason"),
  [
    ((2, 16, 200), (200, 128), "multiples of 128"),
    ((2, 16, 256), (256, 200), "multiples of 128"),
    ((2, 12, 256), (256, 128), "12 rows"),
    ((1, 16, 1 << 18), (1 << 18, 128), "do not fit"),
    ((2, 16, 256), (256, 3, 128), "3 heads"),
    ((2, 16, 256), (256, 28, 128), "28 heads"),
  ],
)
def test_what_the_kernel_does_not_serve_is_named(x, weight, reason):
  x, weight = np.zeros(x, jnp.bfloat16), np.zeros(weight, jnp.bfloat16)
  assert reason in KERNEL.decline(x, (weight,))


def test_other_dtypes_are_declined():
  x = np.zeros((2, 16, 256), jnp.bfloat16)
  half = np.zeros((2, 16, 256), np.float16)
  assert "float32" in KERNEL.decline(x, (np.zeros((256, 128), np.float32),))
  assert "float16" in KERNEL.decline(half, (np.zeros((256, 128), np.float16),))


def test_a_cpu_multiplies_tile_by_tile():
  x, weight = drawn(TILES, ROWS, INNER), drawn(INNER, 200)
  y = flat_product(x, weight, LiveTiles.of(jnp.asarray(HOLDS)))
  assert not np.any(np.asarray(y[~HOLDS], np.float32))
  assert np.all(np.any(np.asarray(y[HOLDS], np.float32), (1, 2)))


def shaped_product(devices, *, tiles, layers, kind=None):
  """Products with one layer of a stack after another, of floats or codes."""
  mesh = jax.sharding.Mesh(np.array(devices), ("data",))
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  kernel = FlatProductTPU(chip=chips.machine_name(devices[0].device_kind))

  def run(x, weight, holds, first):
    live = LiveTiles.of(holds)
    for n in range(layers):
      x = kernel.product(x, weight, ((first + n) % layers,), live)
    return x

  shaped = lambda shape, dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=replicated
  )
  weight = shaped((layers, 4096, 4096), jnp.bfloat16)
  if kind is not None:
    codes = codes_of(kind, 4096, 4096, layers)
    weight = jax.tree.map(lambda x: shaped(x.shape, x.dtype), codes)
  arguments = (
    shaped((tiles, 128, 4096), jnp.bfloat16),
    weight,
    shaped((tiles,), jnp.bool_),
    shaped((), jnp.int32),
  )
  return aot.Built(function=jax.jit(run), arguments=arguments, mesh=mesh)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1"])
def test_a_weight_is_read_once_and_no_layer_is_copied(topology):
  options = {"tiles": 17, "layers": 4}
  compiled = aot.compile(
    "tests.ops.test_flat_product:shaped_product", topology, options
  )
  weights, tiles = 4 * 2 * 4096**2, 2 * 17 * 128 * 4096
  assert compiled.traffic.total < 1.02 * (weights + 4 * 2 * tiles)
  assert compiled.memory.temporaries < 2 * tiles + (1 << 20)

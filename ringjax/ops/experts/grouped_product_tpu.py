"""Pallas TPU kernels for products of rows with the maps of their experts.

Guarantees: `products`, `gated` and `summed` multiply each block of rows by the
map of its expert, with float32 sums along D in one fixed order: a row's bits do
not depend on the other rows, nor on its place. `gradients` adds up the outer
products of an expert's rows, block by block, and is zero for an expert without
rows. Blocks after the last one that has rows are not computed: what their part
of a result holds is undefined. `decline` says where the kernels do not serve.
Cost: of the maps only those of experts that have rows are read, once for a call
and in place in the stack of layers. The next expert's map is loaded while all
blocks of the current one are computed. Rows are read once for each tile of
columns. Codes are decoded once for each expert and tile.
Memory: VMEM only: two tiles of each map, [D, columns].

  products   grid [F / columns, blocks]          sums [rows, columns]
  gradients  grid [D / depth, F / columns, visits]   sums [depth, columns]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax import tree
from ringjax.ops.code_numbers import (
  Levels,
  floats_of_bits,
  reason_against_decoding,
  reason_of_scales,
  with_bits,
  write_floats,
  write_levels,
)
from ringjax.ops.experts.row_blocks import RowBlocks, blocks_by_expert
from ringjax.ops.kernel_choice import register, relative_error
from ringjax.parallel import chips, collectives
from ringjax.typing import ArrayLeaf

# A Pallas reference to an array, for which JAX has no common class.
Ref = Any
# Function (float32 sums of each map, dtype) -> results.
Finish = Callable[[Sequence[Array], DTypeLike], tuple[Array, ...]]
# Function of the outputs of two maps, row by row and number by number.
Combine = Callable[[Array, Array], Array]
_LANES = 128
# Rows of a block: the fewest and the most.
_LEAST_ROWS, _MOST_ROWS = 16, 256
# Numbers of a row that one product multiplies. A loop along D over parts of
# 1,024 costs the matrix units a quarter of their time.
_DEPTH = 16_384
# The default for an unknown TPU.
_SOME = "tpu-v5e"
_NOT_LANES = "it takes multiples of 128"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMaps:
  """Maps of a mixture's experts, in place in the array of all layers.

  Attributes:
    stacked: Weights, [*layers, E, D, F] of floats; or of int8 codes; or codes
      in groups, [*layers, E, G, rows, F], as `BlockCodes` has them.
    step: Steps of codes, [*layers, E, F], or [*layers, E, G, F] for groups;
      None for floats.
    least: Numbers that are added to a group, [*layers, E, G, F], or None.
    index: Layer, an int32 [] for each axis before that of the experts.
    levels: Level of each code of 4 bits; None for other weights.
  """

  stacked: Shaped[ArrayLeaf, ...]
  step: Float[ArrayLeaf, ...] | None = None
  least: Float[ArrayLeaf, ...] | None = None
  index: tuple[Int[ArrayLeaf, ""], ...] = ()
  levels: Levels = None

  @property
  def grouped(self) -> bool:
    """Whether codes have a step for each group of inputs."""
    return self.stacked.ndim - len(self.index) == 4

  @property
  def group(self) -> int:
    """Number of weights of an output that share a step."""
    return self.stacked.shape[-2] * (1 if self.levels is None else 2)

  @property
  def form(self) -> tuple[Hashable, ...]:
    """Kind of the weights: maps that one call multiplies have the same."""
    parts = (self.stacked, self.step, self.least)
    dtypes = (None if x is None else np.dtype(x.dtype).name for x in parts)
    group = self.group if self.grouped else None
    sizes = self.inputs, self.outputs
    return *dtypes, group, self.levels, len(self.index), *sizes

  @property
  def experts(self) -> int:
    """E, number of experts."""
    return self.stacked.shape[len(self.index)]

  @property
  def inputs(self) -> int:
    """D, size of the inputs."""
    inner = self.stacked.shape[-2]
    return self.stacked.shape[-3] * self.group if self.grouped else inner

  @property
  def outputs(self) -> int:
    """F, size of the outputs."""
    return self.stacked.shape[-1]

  def layer(self) -> ExpertMaps:
    """Maps of the layer alone, copied out of the stack."""

    def entry(
      x: Shaped[Array, " ..."] | None,
    ) -> Shaped[Array, " ..."] | None:
      for n in () if x is None else self.index:
        x = lax.dynamic_index_in_dim(x, n, keepdims=False)
      return x

    return dataclasses.replace(
      self,
      stacked=entry(self.stacked),
      step=entry(self.step),
      least=entry(self.least),
      index=(),
    )

  def product(
    self, x: Float[Array, "n D"], expert: Int[Array, ""]
  ) -> Float[Array, "n F"]:
    """x times the map of an expert, for maps of one layer."""
    weight = jnp.asarray(self.stacked)[expert]
    step, least = (
      None if a is None else a[expert] for a in (self.step, self.least)
    )
    if step is None:
      return jnp.matmul(x, weight, preferred_element_type=x.dtype)
    if not self.grouped:
      y = jnp.matmul(
        x, weight.astype(x.dtype), preferred_element_type=jnp.float32
      )
      return (y * step[None]).astype(x.dtype)
    if self.levels is not None:
      table = jnp.asarray(self.levels, jnp.float32)
      weight = jnp.concatenate([table[weight >> 4], table[weight & 15]], 1)
    weight = weight.astype(jnp.float32) * step.astype(jnp.float32)[:, None]
    if least is not None:
      weight = weight + least.astype(jnp.float32)[:, None]
    weight = weight.astype(x.dtype).reshape(-1, self.outputs)
    return jnp.matmul(x, weight, preferred_element_type=x.dtype)


tree.register(
  ExpertMaps, data=("stacked", "step", "least", "index"), meta=("levels",)
)


@dataclasses.dataclass(frozen=True)
class GroupedProductTPU:
  """Pallas kernels for TPU for products of rows with their experts' maps.

  Attributes:
    chip: Machine of `chips.MACHINES` whose vector memory and rates count; None:
      one of them.
    interpret: Whether to run without a TPU, slowly, for tests, or how.
  """

  chip: str | None = None
  interpret: bool | pltpu.InterpretParams = False

  def block_rows(self, rows: int, experts: int) -> int:
    """Number of rows of a block: half of an expert's share, 16 to 256."""
    share = max(1, rows // (2 * experts))
    return min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (share - 1).bit_length()))

  def decline(self, dtype: DTypeLike, maps: Sequence[ExpertMaps]) -> str | None:
    """Return the reason not to serve a call with any number of rows, or None.

    Args:
      dtype: Dtype of the rows.
      maps: One map, or two of the same inputs and outputs.
    """
    name = np.dtype(dtype).name
    if name not in ("bfloat16", "float32"):
      return f"{name}: it multiplies bfloat16 and float32"
    for map_ in maps:
      reason = _why_not(name, map_)
      if reason is not None:
        return reason
    if len({map_.form for map_ in maps}) > 1:
      # Files of GGUF may code the maps of one layer differently.
      return "two maps of different kinds of weights"
    shapes = [self._shape(_MOST_ROWS, name, maps, False)]
    if maps[0].step is None:
      shapes.append(self._shape(_MOST_ROWS, name, maps[:1], True))
    if None in shapes:
      return (
        f"{maps[0].inputs} by {maps[0].outputs} {name}: two tiles of 128 "
        "columns do not fit the vector memory"
      )
    return None

  def products(
    self, x: Float[Array, "P D"], maps: Sequence[ExpertMaps], blocks: RowBlocks
  ) -> tuple[Float[Array, "P F"], ...]:
    """The rows times each of the maps of their experts."""
    return self._call((x,), maps, blocks, _each)

  def gated(
    self,
    x: Float[Array, "P D"],
    maps: Sequence[ExpertMaps],
    blocks: RowBlocks,
    combine: Combine,
  ) -> Float[Array, "P F"]:
    """`combine` of the rows times two maps, which is computed in the kernel."""
    together = lambda sums, dtype: (
      combine(*(x.astype(dtype) for x in sums)).astype(dtype),
    )
    return self._call((x,), maps, blocks, together, outputs=1)[0]

  def summed(
    self,
    y: Sequence[Float[Array, "P F"]],
    maps: Sequence[ExpertMaps],
    blocks: RowBlocks,
  ) -> Float[Array, "P D"]:
    """Sum of the rows of each of y times its transposed map."""
    total = lambda sums, dtype: (sum(sums[1:], sums[0]).astype(dtype),)
    rows, dtype = blocks.row.shape[1], y[0].dtype
    if self._shape(rows, dtype.name, maps, True) is None:
      # Rows of both do not fit the vector memory.
      parts = (
        self.summed((part,), (map_,), blocks)
        for part, map_ in zip(y, maps, strict=True)
      )
      return functools.reduce(jnp.add, parts)
    return self._call(y, maps, blocks, total, outputs=1, transposed=True)[0]

  def gradients(
    self,
    x: Float[Array, "P D"],
    y: Float[Array, "P F"],
    blocks: RowBlocks,
    experts: int,
    dtype: DTypeLike,
  ) -> Float[Array, "E D F"]:
    """For each expert x^T . y of its rows; padding has to be zero."""
    rows, inner, outer = blocks.row.shape[1], x.shape[1], y.shape[1]
    visits = _Visits.of(blocks, experts)
    budget = self._budget
    nbytes = lambda depth, columns: (
      depth * columns * (4 + 2 * np.dtype(dtype).itemsize)
      + 2 * rows * (depth + columns) * x.dtype.itemsize
    )
    tiles = [
      (depth, columns)
      for depth in _tiles(inner)
      for columns in _tiles(outer)
      if nbytes(depth, columns) <= budget
    ]
    # Rows are read again for each tile of the other side.
    depth, columns = min(
      tiles,
      key=lambda tile: (
        self._idle(inner // tile[0] * (outer // tile[1])),
        inner * (outer // tile[1]) + outer * (inner // tile[0]),
      ),
    )
    of_block = lambda tile: lambda a, b, v, expert, block, filled: (
      block[v], tile(a, b)
    )  # fmt: skip
    return pl.pallas_call(
      functools.partial(_gradient_kernel, min(depth, 2 * _LANES)),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(inner // depth, outer // columns, visits.count),
        in_specs=[
          pl.BlockSpec((rows, depth), of_block(lambda a, b: a)),
          pl.BlockSpec((rows, columns), of_block(lambda a, b: b)),
        ],
        out_specs=pl.BlockSpec(
          (None, depth, columns),
          lambda a, b, v, expert, block, filled: (expert[v], a, b),
        ),
        scratch_shapes=[pltpu.VMEM((depth, columns), jnp.float32)],
      ),
      out_shape=collectives.out_type((experts, inner, outer), dtype, x, y),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=self._limit,
      ),
      cost_estimate=self._cost(
        2 * x.shape[0] * inner * outer,
        x.nbytes
        + y.nbytes
        + experts * inner * outer * np.dtype(dtype).itemsize,
      ),
      interpret=self.interpret,
      name="ringjax_grouped_gradient",
    )(visits.expert, visits.block, visits.filled, x, y)

  @property
  def _limit(self) -> int:
    """Bytes of vector memory that a kernel may take; the rest is XLA's."""
    capacity = chips.core(self.chip or _SOME).vmem_bytes
    return capacity - capacity // 8

  @property
  def _budget(self) -> int:
    """Bytes of its tiles: products also hold parts of them in registers."""
    return self._limit // 4 * 3

  def _idle(self, tiles: int) -> int:
    """Number of cores without a tile in the last turn."""
    return -tiles % chips.core(self.chip or _SOME).cores

  def _call(
    self,
    inputs: Sequence[Float[Array, "P D"]],
    maps: Sequence[ExpertMaps],
    blocks: RowBlocks,
    finish: Finish,
    *,
    outputs: int | None = None,
    transposed: bool = False,
  ) -> tuple[Float[Array, "P F"], ...]:
    """Products of each block, and `finish` of their float32 sums.

    Args:
      inputs: Rows: one array for all maps, or one for each.
      maps: Maps.
      blocks: Experts of the blocks.
      finish: Function (sums, dtype) -> outputs.
      outputs: Number of outputs; by default one for each map.
      transposed: Whether rows are multiplied by transposed maps.
    """
    rows, dtype = blocks.row.shape[1], inputs[0].dtype
    shape = self._shape(rows, dtype.name, maps, transposed)
    assert shape is not None, "decline() was not asked"
    shape = dataclasses.replace(shape, outputs=outputs or len(maps))
    first, count = maps[0], len(maps)
    num_rows, number = blocks.slot.shape[0], np.dtype(dtype).itemsize
    runs = _Runs.of(blocks, first.experts)
    out_shape = collectives.out_type(
      (inputs[0].shape[0], shape.outer), dtype, inputs, maps
    )
    of_block = lambda j, i, *_: (i, 0)
    of_expert = lambda j, i, expert, following, run, *index: (
      *(n[0] for n in index), expert[i], 0, j
    )  # fmt: skip
    lead = (None,) * (len(first.index) + 1)
    scales = [
      a if a.ndim == len(lead) + 2 else a[..., None, :]
      for map_ in maps
      for a in (map_.step, map_.least)
      if a is not None
    ]
    stacks = [_rows_of_codes(map_) for map_ in maps]
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    tile = (shape.columns, shape.depth) if transposed else (
      stacks[0].shape[-2], shape.columns
    )  # fmt: skip
    decoded = [
      pltpu.VMEM((shape.depth, shape.columns), dtype)
      for map_ in maps
      if map_.step is not None
    ]
    steps = [
      pltpu.VMEM((a.shape[-2], shape.columns), jnp.float32)
      for a in (scales if shape.group else ())
    ]
    return pl.pallas_call(
      functools.partial(_kernel, shape, maps[0].levels, finish),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3 + len(first.index),
        grid=(shape.outer // shape.columns, runs.count),
        in_specs=[
          *[pl.BlockSpec((rows, shape.depth), of_block) for _ in inputs],
          *[
            pl.BlockSpec((*lead, a.shape[-2], shape.columns), of_expert)
            for a in scales
          ],
          *[in_memory for _ in maps],
        ],
        out_specs=[
          pl.BlockSpec((rows, shape.columns), lambda j, i, *_: (i, j))
          for _ in range(shape.outputs)
        ],
        scratch_shapes=[
          *[pltpu.VMEM((2, *tile), stack.dtype) for stack in stacks],
          *decoded,
          *steps,
          *[pltpu.VMEM((rows, shape.columns), jnp.float32) for _ in maps],
          pltpu.SemaphoreType.DMA((count, 2)),
        ],
      ),
      out_shape=[out_shape] * shape.outputs,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=self._limit,
      ),
      cost_estimate=self._cost(
        2 * len(maps) * num_rows * shape.depth * shape.outer,
        number * num_rows * (shape.inputs * shape.depth + shape.outer)
        + sum(
          # Of fewer rows than experts each has one expert at most.
          min(num_rows, first.experts)
          * math.prod(a.shape[len(first.index) + 1 :])
          * a.dtype.itemsize
          for a in (*stacks, *scales)
        ),
      ),
      interpret=self.interpret,
      name="ringjax_grouped_product",
    )(
      runs.expert,
      runs.following,
      runs.run,
      *(jnp.asarray(n, jnp.int32).reshape(1) for n in first.index),
      *inputs,
      *map(with_bits, scales),
      *stacks,
    )

  def _shape(
    self, rows: int, dtype: str, maps: Sequence[ExpertMaps], transposed: bool
  ) -> _CallSizes | None:
    """Sizes of a call; None where no tile fits the vector memory."""
    inner, outer = maps[0].inputs, maps[0].outputs
    if transposed:
      inner, outer = outer, inner
    number = np.dtype(dtype).itemsize

    def nbytes(columns: int) -> int:
      column = sum(
        2 * math.prod(map_.stacked.shape[len(map_.index) + 1 :])
        // map_.outputs * map_.stacked.dtype.itemsize
        if not transposed else 2 * inner * number
        for map_ in maps
      )  # fmt: skip
      if maps[0].step is not None:
        column += len(maps) * inner * number
      if maps[0].grouped:
        # Steps and least numbers, twice and as float32.
        column += 2 * 12 * len(maps) * inner // maps[0].group
      # Sums, results, and the products of a step before they are added.
      sums = (4 + 2 * number + 4) * len(maps) * rows
      inputs = 2 * rows * inner * number * (len(maps) if transposed else 1)
      return columns * (column + sums) + inputs

    tiles = [n for n in _tiles(outer) if nbytes(n) <= self._budget]
    if not tiles:
      return None
    columns = min(tiles, key=lambda n: (self._idle(outer // n), -n))
    return _CallSizes(
      rows=rows,
      depth=inner,
      step=max(n for n in _tiles(inner) if n <= _DEPTH),
      outer=outer,
      columns=columns,
      maps=len(maps),
      inputs=len(maps) if transposed else 1,
      scales=sum(x is not None for x in (maps[0].step, maps[0].least)),
      group=maps[0].group if maps[0].grouped else 0,
      transposed=transposed,
      layers=len(maps[0].index),
      experts=maps[0].experts,
      outputs=len(maps),
    )

  def _cost(self, flops: int, nbytes: int) -> pl.CostEstimate:
    """Cost estimate for XLA's scheduler."""
    return pl.CostEstimate(
      flops=flops, transcendentals=0, bytes_accessed=nbytes
    )


def _why_not(dtype: str, map_: ExpertMaps) -> str | None:
  """Reason not to multiply rows of a dtype by a map, or None."""
  inner, outer, kind = map_.inputs, map_.outputs, map_.stacked.dtype.name
  if inner % _LANES or outer % _LANES:
    return f"a map of {inner} by {outer}: {_NOT_LANES}"
  if map_.step is None:
    return None if kind == dtype else f"a map of {kind} for rows of {dtype}"
  if dtype != "bfloat16":
    return f"codes for rows of {dtype}: it multiplies them by bfloat16"
  scales = map_.step, map_.least
  if map_.grouped:
    return reason_against_decoding(map_.stacked, map_.group, scales)
  if reason := reason_of_scales(scales):
    return reason
  return None if kind == "int8" else f"codes of {kind}"


def _rows_of_codes(map_: ExpertMaps) -> Shaped[Array, "*layers E rows F"]:
  """Weights of an expert as [rows, F]: groups one after another."""
  x = map_.stacked
  if not map_.grouped:
    return x
  return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _tiles(size: int) -> list[int]:
  """Divisors of a size that are multiples of 128."""
  return [n for n in range(_LANES, size + 1, _LANES) if size % n == 0]


def _each(
  sums: Sequence[Float[Array, "n F"]], dtype: DTypeLike
) -> tuple[Float[Array, "n F"], ...]:
  return tuple(x.astype(dtype) for x in sums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CallSizes:
  """Static sizes of a call.

  Attributes:
    rows: Rows of a block.
    depth: Numbers of a row, which are multiplied and added up.
    step: Numbers of them in a step of the loop.
    outer: Numbers of a row of the result.
    columns: Numbers of them in a tile.
    maps: Number of maps.
    inputs: Number of arrays of rows.
    scales: Number of arrays of steps and least numbers of a map.
    group: Weights that share a step; 0 if there are no groups.
    transposed: Whether maps are transposed.
    layers: Number of axes of the stack before that of the experts.
    experts: Number of experts.
    outputs: Number of results.
  """

  rows: int
  depth: int
  step: int
  outer: int
  columns: int
  maps: int
  inputs: int
  scales: int
  group: int
  transposed: bool
  layers: int
  experts: int
  outputs: int


@dataclasses.dataclass(frozen=True)
class _Runs:
  """Blocks as runs of one expert each.

  Attributes:
    expert: Expert of each block, int32 [n].
    following: Expert of the next run; the number of experts after the last.
    run: Number of each block's run.
    count: Number of blocks to compute, at least one, int32 [].
  """

  expert: Int[Array, " n"]
  following: Int[Array, " n"]
  run: Int[Array, " n"]
  count: Int[Array, ""]

  @classmethod
  def of(cls, blocks: RowBlocks, experts: int) -> _Runs:
    expert = blocks.expert
    changes = jnp.diff(expert, prepend=expert[:1]) != 0
    next_run = jnp.searchsorted(expert, expert, side="right")
    following = expert.at[next_run].get(mode="fill", fill_value=experts)
    return cls(
      # Without any rows the one block that runs has any expert.
      expert=jnp.minimum(expert, experts - 1),
      following=following.astype(jnp.int32),
      run=jnp.cumsum(changes.astype(jnp.int32)),
      count=jnp.maximum(blocks.used, 1),
    )


@dataclasses.dataclass(frozen=True)
class _Visits:
  """Blocks of each expert in turn, and one visit for an expert without any.

  Attributes:
    expert: Expert of each visit, int32 [n], or more if there are fewer rows
      than experts.
    block: Block of the visit.
    filled: 1 if the block is the expert's, else 0.
    count: Number of visits, int32 [].
  """

  expert: Int[Array, " n"]
  block: Int[Array, " n"]
  filled: Int[Array, " n"]
  count: Int[Array, ""]

  @classmethod
  def of(cls, blocks: RowBlocks, experts: int) -> _Visits:
    counts = jnp.zeros((experts,), jnp.int32).at[blocks.expert].add(
      1, mode="drop"
    )  # fmt: skip
    visits = jnp.maximum(counts, 1)
    ends = jnp.cumsum(visits)
    # Of fewer rows than experts some have no visit of their own otherwise.
    rows = blocks.slot.shape[0]
    length = blocks.expert.shape[0] + max(0, experts - rows)
    number = jnp.arange(length, dtype=jnp.int32)
    expert = jnp.minimum(
      jnp.searchsorted(ends, number, side="right"), experts - 1
    )
    first = (jnp.cumsum(counts) - counts)[expert]
    block = first + number - (ends - visits)[expert]
    last = blocks.expert.shape[0] - 1
    return cls(
      expert=expert.astype(jnp.int32),
      block=jnp.clip(block, 0, last).astype(jnp.int32),
      filled=(counts[expert] > 0).astype(jnp.int32),
      count=ends[-1].astype(jnp.int32),
    )


def _kernel(
  shape: _CallSizes,
  levels: Levels,
  finish: Finish,
  expert: Ref,
  following: Ref,
  run: Ref,
  *refs: Ref,
) -> None:
  remaining, n = iter(refs), shape.maps
  take = lambda count: [next(remaining) for _ in range(count)]
  layer, xs = take(shape.layers), take(shape.inputs)
  scales = [take(shape.scales) for _ in range(n)]
  stacks, outs, buffers = take(n), take(shape.outputs), take(n)
  decoded = take(n if shape.scales else 0)
  steps = [take(shape.scales if shape.group else 0) for _ in range(n)]
  sums, (arrived,) = take(n), take(1)
  j, i = pl.program_id(0), pl.program_id(1)
  number = run[i]
  slot = lax.rem(number, 2)
  first = (i == 0) | (number != run[jnp.maximum(i - 1, 0)])
  columns = pl.ds(pl.multiple_of(j * shape.columns, _LANES), shape.columns)

  def copies(expert: Array, slot: Array) -> list[Any]:
    """Copies of the tiles of an expert's maps to the vector memory."""
    at = (*(index[0] for index in layer), expert)
    part = (columns,) if shape.transposed else (slice(None), columns)
    return [
      pltpu.make_async_copy(
        stack.at[*at, *part], buffer.at[slot], arrived.at[m, slot]
      )
      for m, (stack, buffer) in enumerate(zip(stacks, buffers, strict=True))
    ]

  @pl.when(first)
  def _() -> None:
    @pl.when(i == 0)
    def _() -> None:
      for copy in copies(expert[i], slot):
        copy.start()

    # Loaded while all blocks of this expert are computed. No block reads the
    # tiles that it overwrites any more.
    @pl.when(following[i] < shape.experts)
    def _() -> None:
      for copy in copies(following[i], 1 - slot):
        copy.start()

    for copy in copies(expert[i], slot):
      copy.wait()
    for m, target in enumerate(decoded):
      for scale, float32_scale in zip(scales[m], steps[m], strict=False):
        # A single row of 16 bits can't be read.
        float32_scale[...] = floats_of_bits(scale[...])
      codes = buffers[m].at[slot]
      if shape.group:
        write_floats(codes, steps[m], target, shape.group, levels)
      else:
        # A step of each output multiplies later.
        write_levels(codes, target)

  weights = decoded or [buffer.at[slot] for buffer in buffers]
  for m, weight in enumerate(weights):
    x = xs[m if shape.inputs > 1 else 0]
    _multiply(shape, x, weight, sums[m])
  totals = [total[...] for total in sums]
  if shape.scales and not shape.group:
    totals = [
      total * scale[0][...].astype(jnp.float32)
      for total, scale in zip(totals, scales, strict=True)
    ]
  results = finish(totals, outs[0].dtype)
  for out, result in zip(outs, results, strict=True):
    out[...] = result


def _multiply(shape: _CallSizes, x: Ref, weight: Ref, sums: Ref) -> None:
  """Writes x . weight, added up along D step by step."""
  dims = (((1,), (1 if shape.transposed else 0,)), ((), ()))
  exact = x.dtype == jnp.float32

  def part(k: Int[Array, ""]) -> Float[Array, "n F"]:
    inner = pl.ds(pl.multiple_of(k * shape.step, _LANES), shape.step)
    return lax.dot_general(
      x[:, inner],
      weight[:, inner] if shape.transposed else weight[inner, :],
      dims,
      precision=lax.Precision.HIGHEST if exact else None,
      preferred_element_type=jnp.float32,
    )

  sums[...] = part(jnp.int32(0))

  def add(k: Array, _: None) -> None:
    sums[...] += part(k)

  lax.fori_loop(1, shape.depth // shape.step, add, None)


def _gradient_kernel(
  step: int,
  expert: Ref,
  block: Ref,
  filled: Ref,
  x_ref: Ref,
  y_ref: Ref,
  out_ref: Ref,
  sums_ref: Ref,
) -> None:
  del block
  v, last = pl.program_id(2), pl.num_programs(2) - 1
  begins = (v == 0) | (expert[v] != expert[jnp.maximum(v - 1, 0)])
  ends = (v == last) | (expert[v] != expert[jnp.minimum(v + 1, last)])
  depth = sums_ref.shape[0]
  exact = x_ref.dtype == jnp.float32

  @pl.when(begins)
  def _() -> None:
    sums_ref[...] = jnp.zeros_like(sums_ref)

  @pl.when(filled[v] > 0)
  def _() -> None:
    def add(k: Array, _: None) -> None:
      rows = pl.ds(pl.multiple_of(k * step, _LANES), step)
      sums_ref[rows, :] += lax.dot_general(
        x_ref[:, rows],
        y_ref[...],
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
      )

    lax.fori_loop(0, depth // step, add, None)

  @pl.when(ends)
  def _() -> None:
    out_ref[...] = sums_ref[...].astype(out_ref.dtype)


# Kernels for products of rows with the maps of their experts.
GROUPED_PRODUCTS: dict[str, tuple[type, ...]] = {"tpu": (GroupedProductTPU,)}


def _largest_error(kernel: GroupedProductTPU) -> float:
  """Error for three experts, of which one has no rows, and two layers."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  chosen = jnp.asarray([2] * 21 + [0] * 19, jnp.int32)
  x, weight = draw(40, 256), draw(2, 3, 256, 128)

  def run(
    x: Array, weight: Array, layer: Array
  ) -> tuple[Float[Array, " ..."], ...]:
    blocks = blocks_by_expert(chosen, 3, 16)
    rows = x.at[blocks.row.reshape(-1)].get(mode="fill", fill_value=0)
    maps = (ExpertMaps(stacked=weight, index=(layer,)),)
    (y,) = kernel.products(rows, maps, blocks)
    back = kernel.summed((y,), maps, blocks)
    # Those after the last used one are undefined.
    inside = jnp.arange(rows.shape[0]) < blocks.used * 16
    y = jnp.where(inside[:, None], y, 0)
    gradient = kernel.gradients(rows, y, blocks, 3, jnp.float32)
    return y[blocks.slot], back[blocks.slot], gradient

  results = jax.jit(run)(x, weight, jnp.int32(1))
  exact = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
  rows, of_row = x.astype(jnp.float32), weight[1].astype(jnp.float32)[chosen]
  y = exact("nd,ndf->nf", rows, of_row).astype(x.dtype).astype(jnp.float32)
  gradient = exact(
    "nd,nf,ne->edf", rows, y, jax.nn.one_hot(chosen, 3, dtype=jnp.float32)
  )
  return relative_error(results, (y, exact("nf,ndf->nd", y, of_row), gradient))


register(GROUPED_PRODUCTS, _largest_error)

"""Pallas TPU kernel for the product of row tiles, some empty, with one weight.

Guarantees: y[t] = x[t] . w for each tile t that holds rows, or a function of
two such products, with float32 sums along D in one fixed order: a row's bits
depend on that row alone, not on its place, its tile or the number of tiles.
Tiles without rows are not computed: what the kernel's result holds there is
undefined. `decline` says where it does not serve.
Cost: the weight is read once for a call, in place in a stack of layers, however
many tiles hold rows; its next columns are loaded while all tiles are multiplied
by the current ones. The tiles that hold rows are read once if they fit the
vector memory together with the weight's columns, else once for each of them.
Codes of a weight are read in the place of floats, and a block of them is
decoded once for all tiles, to x's dtype; a step of each output multiplies the
sums.
A weight by heads, [D, N, H], is put in the order of a matrix in the vector
memory, a block of heads at a time. Of a weight whose last axis is no multiple
of 128 memory has the transpose, [N, D], which is multiplied as it is. Of a
device with two cores one multiplies.
Memory: VMEM only: two blocks of the weight's columns, and the tiles.

  grid [N / columns, tiles that hold rows]    [rows, D] . [D, columns]

All of D is one product: by the machine code for a v5e a loop over parts of it
takes at least 27 % more cycles.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
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
from ringjax.ops.block_product_tpu import BlockCodes
from ringjax.ops.code_numbers import (
  Levels,
  floats_of_bits,
  reason_against_decoding,
  reason_of_scales,
  with_bits,
  write_floats,
  write_levels,
)
from ringjax.ops.kernel_choice import (
  KernelChoice,
  first_serving,
  register,
  relative_error,
)
from ringjax.parallel import chips, collectives
from ringjax.parallel.call_sharding import product_device
from ringjax.typing import ArrayLeaf

# A Pallas reference to an array, for which JAX has no common class.
Ref = Any
# A weight in a stack of layers: floats [*layers, D, *out], or codes
# [*layers, G, rows, N], of which the position in the stack is given elsewhere.
FlatWeight = Float[ArrayLeaf, " ..."] | BlockCodes
# Function of the outputs of two maps, row by row and number by number.
Combine = Callable[[Array, Array], Array]
_LANES = 128
# Rows of a register of 32 bits, and of bfloat16.
_ROWS, _HALF_ROWS = 8, 16
# Most inputs of a head that are reordered at once.
_REORDERED = 512
# Bytes of a block of columns where tiles stay in the vector memory: nothing
# else runs while the first one is loaded.
_BLOCK_BYTES = 4 << 20
# The default for an unknown TPU.
_SOME = "tpu-v5e"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveTiles:
  """Tiles of rows of a call that hold any.

  Attributes:
    order: Numbers of the tiles, int32 [tiles], those that hold rows first.
    count: Number of tiles that hold rows, int32 [].
  """

  order: Int[ArrayLeaf, " tiles"]
  count: Int[ArrayLeaf, ""]

  @classmethod
  def of(cls, holds: Array) -> LiveTiles:
    """Tiles in their order, by whether each holds rows, bool [tiles]."""
    order = jnp.argsort(~holds, stable=True).astype(jnp.int32)
    return cls(order=order, count=jnp.sum(holds, dtype=jnp.int32))


tree.register(LiveTiles, data=("order", "count"), meta=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks:
  """Sizes of a call's blocks.

  Attributes:
    columns: Columns of the weight in a block.
    resident: Whether all tiles stay in the vector memory.
  """

  columns: int
  resident: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CodeForm:
  """Form of a weight of codes.

  Attributes:
    groups: G, number of groups of an output's inputs.
    rows: Number of rows of codes of all groups.
    group: Number of weights of a group.
    levels: Level of each code.
    scales: Number of arrays of steps and least numbers.
  """

  groups: int
  rows: int
  group: int
  levels: Levels
  scales: int

  @classmethod
  def of(cls, weight: BlockCodes) -> _CodeForm:
    """Form of codes."""
    groups, rows, _ = weight.codes.shape[-3:]
    return cls(
      groups=groups,
      rows=groups * rows,
      group=weight.group,
      levels=weight.levels,
      scales=1 if weight.least is None else 2,
    )

  @property
  def by_output(self) -> bool:
    """Whether a step multiplies an output's sum."""
    return self.groups == 1 and self.levels is None and self.scales == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WeightForm:
  """Shape of the weights of a call.

  Attributes:
    inner: D, number of inputs.
    outer: Number of outputs.
    maps: Number of weights.
    heads: Number of heads of the outputs; 0 for a matrix.
    transposed: Whether the kernel gets the transpose of a matrix, [outer,
      inner].
    codes: Form of weights of codes, or None.
  """

  inner: int
  outer: int
  maps: int
  heads: int = 0
  transposed: bool = False
  codes: _CodeForm | None = None

  @classmethod
  def of(cls, weights: Sequence[FlatWeight], layers: int) -> _WeightForm:
    """Form of weights whose first axes are `layers` axes of a stack."""
    first = weights[0]
    if isinstance(first, BlockCodes):
      codes = _CodeForm.of(first)
      return cls(
        inner=codes.groups * codes.group,
        outer=first.codes.shape[-1],
        maps=len(weights),
        codes=codes,
      )
    inner, *outputs = first.shape[layers:]
    # Compilers for TPUs choose such a layout where lanes would be empty.
    transposed = outputs[-1] % _LANES > 0
    heads = outputs[0] if len(outputs) == 2 and not transposed else 0
    return cls(
      inner=inner,
      outer=math.prod(outputs),
      maps=len(weights),
      heads=heads,
      transposed=transposed,
    )

  def operand(
    self, weight: FlatWeight, layers: int
  ) -> Shaped[Array, "*layers *columns"]:
    """A weight, or its codes, as the kernel reads it, in the same memory."""
    if isinstance(weight, BlockCodes):
      codes = jnp.asarray(weight.codes)
      assert self.codes is not None
      return codes.reshape(*codes.shape[:layers], self.codes.rows, self.outer)
    weight = jnp.asarray(weight)
    if not self.transposed:
      return weight
    weight = jnp.moveaxis(weight, layers, -1)
    return weight.reshape(*weight.shape[:layers], self.outer, self.inner)

  @property
  def width(self) -> int:
    """H, numbers of a head."""
    return self.outer // max(1, self.heads)

  def heads_of(self, columns: int) -> int:
    """Number of heads of a block of so many columns."""
    return columns // self.width

  def buffer(self, columns: int) -> tuple[int, ...]:
    """Shape of a buffer of a block; of heads each 128 numbers apart."""
    if self.codes is not None:
      return self.codes.rows, columns
    if self.transposed:
      return columns, self.inner
    if not self.heads:
      return self.inner, columns
    count = self.heads_of(columns)
    return self.width // _LANES, self.inner, count, _LANES

  def read_bytes(self, number: int) -> int:
    """Bytes of the weights of a column in the device's memory."""
    column = self.inner * number if self.codes is None else self.codes.rows
    return self.maps * column

  def columns(self) -> list[int]:
    """Numbers of columns that a block may have, ascending."""
    if not self.heads:
      sizes = range(_LANES, self.outer + 1, _LANES)
      return [n for n in sizes if self.outer % n == 0] or [self.outer]
    sizes = range(_ROWS, self.heads + 1, _ROWS)
    counts = [n for n in sizes if self.heads % n == 0] or [self.heads]
    return [n * self.width for n in counts]

  def bytes_of_column(self, rows: int, number: int) -> int:
    """Bytes of the vector memory for a column and its products.

    Args:
      rows: Rows of a tile.
      number: Bytes of a number.
    """
    column = self.inner * number
    # Weights, products and results, which may be float32; of heads and of codes
    # also the matrix, and of codes two blocks of scales and float32 ones.
    weights = column * (3 if self.heads else 2)
    if self.codes is not None:
      scales = 12 * self.codes.scales * max(_ROWS, self.codes.groups)
      weights = column + 2 * self.codes.rows + scales
    return self.maps * (weights + 4 * rows) + 8 * rows


@dataclasses.dataclass(frozen=True)
class FlatProductTPU:
  """A Pallas kernel for TPU for products of row tiles with one weight.

  Attributes:
    chip: Machine of `chips.MACHINES` whose vector memory counts; None: one of
      them.
    interpret: Whether to run without a TPU, slowly, for tests, or how.
  """

  chip: str | None = None
  interpret: bool | pltpu.InterpretParams = False

  def decline(
    self,
    x: Float[ArrayLeaf, "tiles rows D"],
    weights: Sequence[FlatWeight],
    layers: int = 0,
  ) -> str | None:
    """Return the reason not to serve a call, or None.

    Args:
      x: Tiles of rows.
      weights: One weight, or two of the same form.
      layers: Number of axes of the stack of layers.
    """
    form, kind = _WeightForm.of(weights, layers), x.dtype.name
    inner, outer = form.inner, form.outer
    if kind not in ("bfloat16", "float32"):
      return f"{kind}: it multiplies bfloat16 and float32"
    if reason := _reason_of_weights(weights, kind):
      return reason
    unit = _HALF_ROWS if form.transposed else _LANES
    if inner % _LANES or outer % unit:
      return (
        f"a weight of {inner} by {outer}: it takes multiples of {_LANES} "
        f"inputs and of {unit} outputs"
      )
    if form.heads and (reason := _reason_by_heads(form)):
      return reason
    if x.shape[1] % _HALF_ROWS:
      return f"tiles of {x.shape[1]} rows: it takes multiples of {_HALF_ROWS}"
    if self._blocks(x.shape, form, x.dtype) is None:
      return (
        f"{inner} by {outer} {kind}: two blocks of {form.columns()[0]} columns "
        "do not fit the vector memory"
      )
    return None

  def product(
    self,
    x: Float[Array, "tiles rows D"],
    weight: FlatWeight,
    index: tuple[Int[ArrayLeaf, ""], ...],
    live: LiveTiles,
    *,
    wide: bool = False,
  ) -> Float[Array, "tiles rows N"]:
    """Product of the tiles that hold rows; the others are undefined.

    Args:
      x: Tiles of rows.
      weight: Weight, [N] outputs or [heads, H], in a stack of layers if there
        is an `index`.
      index: Position in each axis of the stack, int32 [] each.
      live: Tiles that hold rows.
      wide: Whether the result is float32; else it is of x's dtype.
    """
    dtype = np.dtype(np.float32) if wide else x.dtype
    return self._call(x, (weight,), index, live, lambda y: y, dtype)

  def gated(
    self,
    x: Float[Array, "tiles rows D"],
    weights: tuple[FlatWeight, FlatWeight],
    index: tuple[Int[ArrayLeaf, ""], ...],
    live: LiveTiles,
    combine: Combine,
  ) -> Float[Array, "tiles rows N"]:
    """`combine` of two products, which is computed in the kernel."""
    return self._call(x, weights, index, live, combine, x.dtype)

  def _call(
    self,
    x: Float[Array, "tiles rows D"],
    weights: tuple[FlatWeight, ...],
    index: tuple[Int[ArrayLeaf, ""], ...],
    live: LiveTiles,
    combine: Callable[..., Array],
    dtype: np.dtype,
  ) -> Float[Array, "tiles rows N"]:
    """`combine` of the products with each weight, of a dtype."""
    tiles, rows, inner = x.shape
    form = _WeightForm.of(weights, len(index))
    outer, maps, codes = form.outer, form.maps, form.codes
    operands = [form.operand(weight, len(index)) for weight in weights]
    scales = [
      with_bits(jnp.asarray(array))
      for weight in weights
      if isinstance(weight, BlockCodes)
      for array in (weight.step, weight.least)
      if array is not None
    ]
    blocks = self._blocks(x.shape, form, x.dtype)
    assert blocks is not None, "decline() was not asked"
    columns = blocks.columns
    of_tile = pl.BlockSpec(
      (None, rows, inner), lambda j, i, order, *_: (order[i], 0, 0)
    )
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    of_columns = pl.BlockSpec(
      (*(None,) * len(index), 0 if codes is None else codes.groups, columns),
      lambda j, i, order, *index: (*(n[0] for n in index), 0, j),
    )
    resident = [
      pltpu.VMEM(x.shape, x.dtype),
      pltpu.SemaphoreType.DMA((2,)),
    ]
    return pl.pallas_call(
      functools.partial(_kernel, blocks, form, len(index), combine),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1 + len(index),
        # Without rows a tile of any numbers is multiplied.
        grid=(outer // columns, jnp.maximum(jnp.asarray(live.count), 1)),
        in_specs=[
          in_memory if blocks.resident else of_tile,
          *[in_memory] * maps,
          *[of_columns] * len(scales),
        ],
        out_specs=pl.BlockSpec(
          (None, rows, columns), lambda j, i, order, *_: (order[i], 0, j)
        ),
        scratch_shapes=[
          pltpu.VMEM((maps, 2, *form.buffer(columns)), operands[0].dtype),
          pltpu.SemaphoreType.DMA((maps, 2)),
          *(resident if blocks.resident else ()),
          *(
            [pltpu.VMEM((maps, inner, columns), x.dtype)]
            if form.heads or codes
            else ()
          ),
          *(
            pltpu.VMEM((codes.groups, columns), jnp.float32)
            for _ in scales
            if codes is not None
          ),
        ],
      ),
      out_shape=collectives.out_type((tiles, rows, outer), dtype, x, weights),
      compiler_params=pltpu.CompilerParams(
        # A block is loaded by the step of the block before it.
        dimension_semantics=("arbitrary", "arbitrary"),
        vmem_limit_bytes=self._limit,
      ),
      cost_estimate=pl.CostEstimate(
        flops=2 * maps * tiles * rows * inner * outer,
        transcendentals=0,
        bytes_accessed=(
          x.nbytes * (1 if blocks.resident else outer // columns)
          + form.read_bytes(x.dtype.itemsize) * outer
          + tiles * rows * outer * x.dtype.itemsize
        ),
      ),
      interpret=self.interpret,
      name="ringjax_flat_product",
    )(
      jnp.asarray(live.order),
      *(jnp.asarray(n, jnp.int32).reshape(1) for n in index),
      x,
      *operands,
      *scales,
    )

  def _blocks(
    self, shape: tuple[int, ...], form: _WeightForm, dtype: DTypeLike
  ) -> _Blocks | None:
    """Sizes of a call's blocks; None where none fits the vector memory.

    Args:
      shape: Shape of the tiles of rows.
      form: Form of the weights.
      dtype: Dtype of both.
    """
    tiles, rows, inner = shape
    number = np.dtype(dtype).itemsize
    column = form.bytes_of_column(rows, number)
    budget = self._limit // 4 * 3

    def fitting(rows_bytes: int) -> list[int]:
      """Numbers of columns whose blocks fit next to rows of x."""
      return [n for n in form.columns() if n * column <= budget - rows_bytes]

    if columns := fitting(tiles * rows * inner * number):
      limit = _BLOCK_BYTES // form.read_bytes(number)
      small = [n for n in columns if n <= limit]
      return _Blocks(columns=max(small, default=columns[0]), resident=True)
    if columns := fitting(2 * rows * inner * number):
      return _Blocks(columns=max(columns), resident=False)
    return None

  @property
  def _limit(self) -> int:
    """Bytes of vector memory that the kernel may take; the rest is XLA's."""
    capacity = chips.core(self.chip or _SOME).vmem_bytes
    return capacity - capacity // 8


def _reason_of_weights(weights: Sequence[FlatWeight], dtype: str) -> str:
  """Reason not to multiply rows of a dtype by weights, or ""."""
  forms: set[tuple[Any, ...]] = set()
  for weight in weights:
    if not isinstance(weight, BlockCodes):
      forms.add((weight.shape, np.dtype(weight.dtype)))
      if weight.dtype != dtype:
        return f"a weight of {weight.dtype.name} for rows of {dtype}"
      continue
    form, scales = _CodeForm.of(weight), (weight.step, weight.least)
    dtypes = (None if x is None else np.dtype(x.dtype) for x in scales)
    forms.add((form, np.dtype(weight.codes.dtype), weight.codes.shape, *dtypes))
    reason = (
      reason_of_scales(scales)
      if form.by_output
      else reason_against_decoding(weight.codes, form.group, scales)
    )
    if reason:
      return reason
  # Files of GGUF may code the maps of one layer differently.
  return "two weights of different forms" if len(forms) > 1 else ""


def _reason_by_heads(form: _WeightForm) -> str:
  """Reason not to read a weight by heads, or ""."""
  if form.heads % _ROWS and form.heads not in (2, 4):
    return f"{form.heads} heads: it takes 2, 4 or a multiple of {_ROWS}"
  return ""


def choose_flat(
  x: Float[ArrayLeaf, "tiles rows D"],
  weights: Sequence[FlatWeight],
  layers: int = 0,
) -> KernelChoice:
  """Choose the kernel for a product; None where a loop over tiles computes it.

  In a model's call the call's mesh gives the platform, see `on_mesh`.

  Args:
    x: Tiles of rows.
    weights: One weight, or two of the same form.
    layers: Number of axes of the stack of layers.
  """
  platform, kind, alone = product_device((x,))
  kernels = [
    kernel(chip=chips.machine_name(kind))
    for kernel in FLAT_PRODUCTS.get(platform, ())
  ]

  def decline(kernel: FlatProductTPU) -> str | None:
    if not alone:
      return "XLA cuts no kernel over several devices"
    return kernel.decline(x, weights, layers)

  return first_serving(kernels, decline, None)


def flat_product(
  x: Float[Array, "tiles rows D"],
  weight: FlatWeight,
  live: LiveTiles,
  index: tuple[Int[ArrayLeaf, ""], ...] = (),
  *,
  wide: bool = False,
) -> Float[Array, "tiles rows N"]:
  """Product of row tiles with a weight; undefined for tiles without rows.

  Args:
    x: Tiles of rows.
    weight: Weight, [N] outputs or [heads, H], in a stack of layers if there is
      an `index`.
    live: Tiles that hold rows.
    index: Position in each axis of the stack, int32 [] each.
    wide: Whether the result is float32; else it is of x's dtype.
  """
  kernel = choose_flat(x, (weight,), len(index)).algorithm
  if kernel is None:
    dtype = np.dtype(np.float32) if wide else x.dtype
    return _by_loop(x, (weight,), live, index, lambda y: y, dtype)
  return kernel.product(x, weight, index, live, wide=wide)


def flat_gated(
  x: Float[Array, "tiles rows D"],
  weights: tuple[FlatWeight, FlatWeight],
  live: LiveTiles,
  index: tuple[Int[ArrayLeaf, ""], ...],
  combine: Combine,
) -> Float[Array, "tiles rows N"]:
  """`combine` of the products with two weights, as `flat_product` of one."""
  kernel = choose_flat(x, weights, len(index)).algorithm
  if kernel is None:
    return _by_loop(x, weights, live, index, combine, x.dtype)
  return kernel.gated(x, weights, index, live, combine)


def _by_loop(
  x: Float[Array, "tiles rows D"],
  weights: Sequence[FlatWeight],
  live: LiveTiles,
  index: tuple[Int[ArrayLeaf, ""], ...],
  combine: Callable[..., Array],
  dtype: np.dtype,
) -> Float[Array, "tiles rows N"]:
  """`combine` of the products, tile by tile; zeros for tiles without rows."""
  at_layer = functools.partial(_at_layer, index=index, dtype=x.dtype)
  layers, steps = zip(*map(at_layer, weights), strict=True)
  order, outputs = jnp.asarray(live.order), layers[0].shape[1]
  if outputs == 1:
    # XLA's CPU compiler makes a product with a vector, whose sums for a row
    # depend on its place among the others.
    layers = [jnp.pad(layer, ((0, 0), (0, 1))) for layer in layers]

  def product(tile: Array, layer: Array, step: Array | None) -> Array:
    if step is None:
      return jnp.matmul(tile, layer, preferred_element_type=dtype)
    sums = jnp.matmul(tile, layer, preferred_element_type=jnp.float32)
    return (sums[:, :outputs] * step).astype(dtype)

  def one_tile(n: Array, y: Array) -> Array:
    tile = x[order[n]]
    products = (
      product(tile, *pair) for pair in zip(layers, steps, strict=True)
    )
    results = combine(*products).astype(dtype)[:, :outputs]
    return lax.dynamic_update_index_in_dim(y, results, order[n], 0)

  empty = collectives.zeros((*x.shape[:2], outputs), dtype, (x, layers))
  return lax.fori_loop(0, jnp.asarray(live.count), one_tile, empty)


def _at_layer(
  weight: FlatWeight, index: tuple[Int[ArrayLeaf, ""], ...], dtype: np.dtype
) -> tuple[Float[Array, "D N"], Float[Array, "1 N"] | None]:
  """A weight of one layer, of a dtype, and the steps of its outputs or None."""

  def entry(x: Array) -> Array:
    for n in index:
      x = lax.dynamic_index_in_dim(x, jnp.asarray(n), keepdims=False)
    return x

  if not isinstance(weight, BlockCodes):
    layer = entry(jnp.asarray(weight))
    return layer.reshape(layer.shape[0], -1), None
  layer = jax.tree.map(entry, weight)
  if _CodeForm.of(weight).by_output:
    codes = layer.codes.reshape(layer.codes.shape[1:])
    return codes.astype(dtype), layer.step.astype(jnp.float32)
  return layer.floats(dtype), None


def _kernel(
  blocks: _Blocks,
  form: _WeightForm,
  layers: int,
  combine: Callable[..., Array],
  order: Ref,
  *refs: Ref,
) -> None:
  remaining, maps, codes = iter(refs), form.maps, form.codes
  take = lambda count: [next(remaining) for _ in range(count)]
  num_scales = 0 if codes is None else codes.scales
  layer, (x,), weights = take(layers), take(1), take(maps)
  scales = [take(num_scales) for _ in range(maps)]
  out, buffers, arrived = take(3)
  tile_refs = take(2 if blocks.resident else 0)
  matrices = next(remaining) if form.heads or codes else None
  float32_scales = [take(num_scales) for _ in range(maps)]
  j, i = pl.program_id(0), pl.program_id(1)
  num_blocks, num_tiles = pl.num_programs(0), pl.num_programs(1)
  slot = lax.rem(j, 2)

  def columns(block: Array, slot: Array) -> list[Any]:
    """Copies of a block of columns to the vector memory."""
    every, size = slice(None), blocks.columns
    targets: list[tuple[Any, ...]] = [()]
    lead: tuple[Any, ...] = () if form.transposed else (every,)
    if not form.heads and size == form.outer:
      parts: list[tuple[Any, ...]] = [(every,)]
    elif not form.heads:
      parts = [(pl.ds(pl.multiple_of(block * size, _LANES), size),)]
    else:
      count = form.heads_of(size)
      # A few heads are one block.
      start = 0 if count % _ROWS else pl.multiple_of(block * count, _ROWS)
      lanes = range(form.width // _LANES)
      parts = [(pl.ds(start, count), pl.ds(n * _LANES, _LANES)) for n in lanes]
      targets = [(n,) for n in lanes]
    return [
      pltpu.make_async_copy(
        weight.at[(*(n[0] for n in layer), *lead, *part)],
        buffers.at[(m, slot, *target)],
        arrived.at[m, slot],
      )
      for m, weight in enumerate(weights)
      for part, target in zip(parts, targets, strict=True)
    ]

  @pl.when(i == 0)
  def _() -> None:
    @pl.when(j == 0)
    def _() -> None:
      for copy in columns(j, slot):
        copy.start()

    @pl.when(j + 1 < num_blocks)
    def _() -> None:
      for copy in columns(j + 1, 1 - slot):
        copy.start()

  rows = x
  if blocks.resident:
    tile_buffers, tile_arrived = tile_refs

    def tile(n: Array) -> Any:
      """Copy of the n-th tile to the vector memory, where it stays."""
      return pltpu.make_async_copy(
        x.at[order[n]], tile_buffers.at[n], tile_arrived.at[lax.rem(n, 2)]
      )

    @pl.when(j == 0)
    def _() -> None:
      @pl.when(i == 0)
      def _() -> None:
        tile(i).start()

      @pl.when(i + 1 < num_tiles)
      def _() -> None:
        tile(i + 1).start()

      tile(i).wait()

    rows = tile_buffers.at[i]

  @pl.when(i == 0)
  def _() -> None:
    for copy in columns(j, slot):
      copy.wait()
    if matrices is not None and codes is None:
      for m, n in itertools.product(range(maps), range(buffers.shape[2])):
        _reorder(buffers.at[m, slot, n], matrices.at[m], form, n * _LANES)

    if matrices is not None and codes is not None:
      for m in range(maps):
        for scale, target in zip(scales[m], float32_scales[m], strict=True):
          # A single row of 16 bits can't be read.
          target[...] = floats_of_bits(scale[...])
        block, matrix = buffers.at[m, slot], matrices.at[m]
        if codes.by_output:
          write_levels(block, matrix)
        else:
          write_floats(
            block, float32_scales[m], matrix, codes.group, codes.levels
          )

  exact = rows.dtype == jnp.float32
  products = [
    lax.dot_general(
      rows[...],
      buffers[m, slot] if matrices is None else matrices[m],
      (((1,), (1 if form.transposed else 0,)), ((), ())),
      precision=lax.Precision.HIGHEST if exact else None,
      preferred_element_type=jnp.float32,
    )
    for m in range(maps)
  ]
  if codes is not None and codes.by_output:
    products = [
      product * of_map[0][...]
      for product, of_map in zip(products, float32_scales, strict=True)
    ]
  results = combine(*(product.astype(out.dtype) for product in products))
  out[...] = results.astype(out.dtype)


def _reorder(heads: Ref, matrix: Ref, form: _WeightForm, lane: int) -> None:
  """Write a part of heads, [D, n, 128], to a matrix [D, columns].

  Neighbours along D are n rows apart in memory, and of 16 bits two heads are in
  a register's word.

  Args:
    heads: Numbers of each head from `lane` on.
    matrix: Matrix of the block.
    form: Form of the weights.
    lane: Number of the first in its head.
  """
  inner, width = heads.shape[0], form.width
  half = matrix.dtype.itemsize == 2
  words = heads.bitcast(jnp.uint32) if half else heads
  stride = words.shape[1]
  words = words.reshape(inner * stride, _LANES)
  size = math.gcd(inner, _REORDERED)

  def part(n: Array, _: None) -> None:
    rows = pl.ds(pl.multiple_of(n * size, size), size)
    first = pl.multiple_of(n * (size * stride), size * stride)
    inputs = words.at[pl.ds(first, size * stride)]
    for k in range(stride):
      read = inputs[pl.ds(k, size, stride=stride), :]
      numbers = [read]
      if half:
        # The upper 16 bits of a float32 are a bfloat16.
        bits = read << 16, read & jnp.uint32(0xFFFF0000)
        numbers = [lax.bitcast_convert_type(x, jnp.float32) for x in bits]
      for m, head in enumerate(numbers):
        column = (k * len(numbers) + m) * width + lane
        matrix[rows, column : column + _LANES] = head.astype(matrix.dtype)

  lax.fori_loop(0, inner // size, part, None)


# Kernels for products of row tiles with one weight.
FLAT_PRODUCTS: dict[str, tuple[type, ...]] = {"tpu": (FlatProductTPU,)}


def _largest_error(kernel: FlatProductTPU) -> float:
  """Error for three tiles, of which one is empty, and two layers."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  x, weight = draw(3, 32, 256), draw(2, 256, 2048)
  by_heads = weight.reshape(2, 256, 16, 128)
  narrow = weight.reshape(2, 256, 32, 64)
  live = LiveTiles.of(jnp.asarray([True, False, True]))

  def run(
    x: Array, weight: Array, layer: Array
  ) -> tuple[Float[Array, "n r N"], ...]:
    y = kernel.product(x, weight, (layer,), live)
    z = kernel.gated(x, (weight, weight), (layer,), live, jnp.multiply)
    heads = kernel.product(x, by_heads, (layer,), live)
    few = kernel.product(x, narrow, (layer,), live)
    return y[::2], z[::2], heads[::2], few[::2]

  results = jax.jit(run)(x, weight, jnp.int32(1))
  float32 = lambda a: a.astype(jnp.float32)
  y = jnp.matmul(
    float32(x[::2]), float32(weight[1]), precision=lax.Precision.HIGHEST
  )
  return relative_error(results, (y, y * y, y, y))


register(FLAT_PRODUCTS, _largest_error)

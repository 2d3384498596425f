"""Pallas TPU kernel for the product of a few rows with a weight of block codes.

Guarantees: y = x . (level(code) * step + least) for x of bfloat16, with exact
products of x and levels and float32 sums; a row's bits depend on that row
alone. `decline` says where it does not serve.
Cost: codes, steps and least numbers are read once, in place in a stack of
layers and of experts; the next block is loaded while one is computed.
Memory: VMEM only: two blocks of codes.

A register of codes, uint8 [32, 128], is read as int32 [8, 128]. Four bits of
each half of a word under the bits of 128 are 128 + code in bfloat16: three
instructions for 2,048 numbers, without a conversion. They are in another order
than the file's, so x is reordered, by a product with a permutation. All groups
that fill a matrix unit are multiplied at once, by rows of x that are zero
outside of one group. Sums of x times 128 are subtracted with the least
numbers. A code of 8 bits is two codes of 4, of which one counts 16 times.

  grid [O / columns, G / groups]    sums [rows, columns], float32, in VMEM
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
  floats_of,
  floats_of_bits,
  is_consecutive,
  reason_of_scales,
  with_bits,
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

# Most rows of x.
MOST_ROWS = 64
# A Pallas reference to an array, for which JAX has no common class.
Ref = Any
_LANES, _SUBLANES = 128, 8
# Rows of a register of bytes, and of bfloat16 numbers made of a quarter of it.
_BYTE_ROWS, _HALF_ROWS = 32, 16
# Rows of codes of a block, and its columns for wide and for narrow maps: about
# 1 MB, so that a step's fixed cost is small next to reading them.
_BLOCK_ROWS = 1024
_WIDE, _COLUMNS, _FEWER = 4096, 1024, 512
# Most sums of a product that are in registers at once.
_SUMS = 512 * 16
# The default for an unknown TPU.
_SOME = "tpu-v5e"
# Two bfloat16 numbers 128, and the bits of a code under each of them.
_NUMBERS, _CODES = np.int32(0x43004300), np.int32(0x000F000F)
# Shifts that bring each code of the halves of a word to the lowest bits, and
# for each whether it is the upper one of a byte and of which of two bytes.
_SHIFTS = (0, 4, 8, 12)
# Turns int8 codes into unsigned ones, 128 more.
_SIGNS = np.int32(np.uint32(0x80808080).astype(np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCodes:
  """Codes of a weight, with a step for each group of an output's inputs.

  It is made of arrays, or of their shapes.

  Attributes:
    codes: Codes, [*stack, G, rows, O]: int8 with a row for each weight of a
      group, or uint8 with two codes of 4 bits, of the group's first half in the
      upper bits and of its second half in the lower ones.
    step: Steps, [*stack, G, O].
    least: Numbers that are added, [*stack, G, O], or None.
    index: Position in the stack, an int32 [] for each of its axes.
    levels: Level of each code of 4 bits; None for 8 bits.
  """

  codes: Shaped[ArrayLeaf, "*stack G rows O"]
  step: Float[ArrayLeaf, "*stack G O"]
  least: Float[ArrayLeaf, "*stack G O"] | None
  index: tuple[Int[ArrayLeaf, ""], ...] = ()
  levels: Levels = None

  @property
  def group(self) -> int:
    """Number of weights of an output that share a step."""
    return self.codes.shape[-2] * (1 if self.levels is None else 2)

  @property
  def inputs(self) -> int:
    """Number of inputs, of all groups."""
    return self.codes.shape[-3] * self.group

  def floats(self, dtype: DTypeLike) -> Float[Array, "I O"]:
    """The decoded weight of one layer, without axes of a stack."""
    codes, step = jnp.asarray(self.codes), jnp.asarray(self.step)
    minimum = None if self.least is None else jnp.asarray(self.least)
    return floats_of(codes, step, minimum, self.levels, dtype)


tree.register(
  BlockCodes, data=("codes", "step", "least", "index"), meta=("levels",)
)


@dataclasses.dataclass(frozen=True)
class BlockProductTPU:
  """A Pallas kernel for TPU for products of few rows with block codes.

  Attributes:
    chip: Machine of `chips.MACHINES` whose rates give the kernel's cost
      estimate; None: one of them.
    interpret: Whether to run without a TPU, slowly, for tests.
  """

  chip: str | None = None
  interpret: bool = False

  def decline(self, x: Float[Array, "N I"], weight: BlockCodes) -> str | None:
    """Return the reason not to serve this call, or None."""
    if x.dtype != jnp.bfloat16:
      return f"{x.dtype}: it multiplies bfloat16"
    if not 0 < x.shape[0] <= MOST_ROWS:
      return f"{x.shape[0]} rows: it takes 1 to {MOST_ROWS}"
    if not is_consecutive(weight.levels):
      return "levels that are not consecutive"
    group, (total, rows, outer) = weight.group, weight.codes.shape[-3:]
    if group & (group - 1) or not 16 <= rows <= 128:
      return f"groups of {group}: it takes 16, 32, 64 and 128 rows of codes"
    if total * rows % _BYTE_ROWS:
      return f"{total} groups of {group}: half of a register of codes is left"
    if not outer:
      return "no outputs"
    return reason_of_scales((weight.step, weight.least))

  def product(
    self, x: Float[Array, "N I"], weight: BlockCodes, *, wide: bool = False
  ) -> Float[Array, "N O"]:
    """x . weight, float32 if `wide`, else of x's dtype."""
    *stack, total, rows, outer = weight.codes.shape
    shape = self._shape(x.shape[0], weight)
    blocks = -(-total // shape.groups)
    at_block = lambda o, k, *index: (*(i[0] for i in index), k, o)
    lead = (None,) * len(stack)
    scales = [a for a in (weight.step, weight.least) if a is not None]
    of_groups = pl.BlockSpec((*lead, shape.groups, shape.columns), at_block)
    stacks = (
      weight.codes.reshape(*stack, total * rows, outer),
      *map(with_bits, scales),
    )
    in_memory = (lambda a: a) if self.interpret else _in_memory
    return pl.pallas_call(
      functools.partial(_kernel, shape, len(stack)),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(stack),
        grid=(-(-outer // shape.columns), blocks),
        in_specs=[
          pl.BlockSpec(
            (shape.n, shape.groups * shape.group), lambda o, k, *_: (0, k)
          ),
          pl.BlockSpec(shape.order.shape, lambda o, k, *_: (0, 0)),
          pl.BlockSpec((*lead, shape.groups * rows, shape.columns), at_block),
          *([of_groups] * len(scales)),
        ],
        out_specs=pl.BlockSpec(
          (shape.n, shape.columns), lambda o, k, *_: (0, o)
        ),
        scratch_shapes=[
          pltpu.VMEM((shape.padded, shape.columns), jnp.float32),
          pltpu.VMEM((shape.padded, shape.units * shape.unit), jnp.float32),
          pltpu.VMEM(
            (shape.products, shape.share * shape.padded, shape.depth),
            jnp.bfloat16,
          ),
          pltpu.VMEM(
            (shape.columns // _LANES, shape.groups, _LANES), jnp.float32
          ),
          pltpu.VMEM((shape.groups, shape.columns), jnp.float32),
        ],
      ),
      out_shape=collectives.out_type(
        (shape.n, outer),
        jnp.float32 if wide else x.dtype,
        x,
        weight.codes,
        *scales,
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
      cost_estimate=self._cost(weight),
      interpret=self.interpret,
      name="ringjax_block_product",
    )(
      *(jnp.asarray(i, jnp.int32).reshape(1) for i in weight.index),
      x,
      jnp.asarray(shape.order, jnp.bfloat16),
      *map(in_memory, stacks),
    )

  def block(self, rows: int, weight: BlockCodes) -> tuple[int, int]:
    """Choose (groups, outputs) of a block for x of so many rows."""
    shape = self._shape(rows, weight)
    return shape.groups, shape.columns

  def _shape(self, rows: int, weight: BlockCodes) -> _Shape:
    cores = chips.core(self.chip or _SOME).cores
    return _Shape.of(rows, weight, cores, self.interpret)

  def _cost(self, weight: BlockCodes) -> pl.CostEstimate:
    """Cost estimate for XLA's scheduler that gives the time of reading."""
    skipped = len(weight.index)
    nbytes = sum(
      math.prod(a.shape[skipped:]) * a.dtype.itemsize
      for a in (weight.codes, weight.step, weight.least)
      if a is not None
    )
    chip = chips.MACHINES[self.chip or _SOME].chip
    seconds = nbytes / float(chip.hbm_bandwidth)
    return pl.CostEstimate(
      flops=int(seconds * chips.core(self.chip or _SOME).flops),
      transcendentals=0,
      bytes_accessed=nbytes,
    )


def _in_memory(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  """x in the device's memory.

  XLA would copy a stack that fits into vector memory there before each call,
  all layers for the one that is read.
  """
  return pltpu.with_memory_space_constraint(x, pltpu.HBM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
  """Static sizes of a call.

  Attributes:
    n: Rows of x.
    padded: The same in whole registers.
    group: Weights of a group.
    rows: Rows of codes of a group.
    total: Groups of the weight.
    groups: Groups of a block.
    columns: Outputs of a block.
    first: Level of code 0; None for codes of 8 bits.
    has_least: Whether there are least numbers.
    interpret: Whether Pallas' interpreter runs the kernel.
  """

  n: int
  padded: int
  group: int
  rows: int
  total: int
  groups: int
  columns: int
  first: int | None
  has_least: bool
  interpret: bool

  @classmethod
  def of(
    cls, n: int, weight: BlockCodes, cores: int, interpret: bool
  ) -> _Shape:
    total, rows, outer = weight.codes.shape[-3:]
    max_columns = _COLUMNS if outer >= _WIDE else _FEWER
    lanes = lambda x: -(-x // _LANES) * _LANES
    return cls(
      n=n,
      padded=-(-n // _SUBLANES) * _SUBLANES,
      group=weight.group,
      rows=rows,
      total=total,
      groups=_groups_of_block(total, rows),
      columns=min(max_columns, lanes(-(-outer // cores))),
      first=None if weight.levels is None else int(weight.levels[0]),
      has_least=weight.least is not None,
      interpret=interpret,
    )

  @property
  def doubled(self) -> int:
    """Numbers that the kernel makes of a weight: two of one of 8 bits."""
    return 2 if self.first is None else 1

  @property
  def depth(self) -> int:
    """Numbers of an output in one product."""
    return max(_LANES, self.group * self.doubled)

  @property
  def share(self) -> int:
    """Groups of one product."""
    return self.depth // (self.group * self.doubled)

  @property
  def unit(self) -> int:
    """Weights of an output whose x is reordered at once."""
    return max(_LANES, self.group)

  @property
  def spread(self) -> int:
    """Products of a unit."""
    return self.unit * self.doubled // self.depth

  @property
  def units(self) -> int:
    """Units of a block; the last one may end after it."""
    return -(-self.groups * self.group // self.unit)

  @property
  def products(self) -> int:
    """Products of a block."""
    return self.units * self.spread

  @property
  def excess(self) -> float:
    """Difference of the kernel's number of a code and its level."""
    if self.first is None:
      # 16 * (128 + upper) + 128 + lower, of the level plus 128.
      return 17.0 * 128 + 128
    return 128.0 - self.first

  @property
  def order(self) -> np.ndarray:
    """Matrix that reorders a unit of x and sums its groups, [unit, _].

    Columns: the numbers of the unit's products, in the order in which the
    kernel makes them, then a column for each group.
    """
    # Rows of bytes of a unit, by registers; of each register first the lower
    # and then the upper codes of the first of two bytes, and so on.
    byte_rows = self.unit // self.group * self.rows
    columns = []
    for start in range(0, byte_rows, _BYTE_ROWS):
      for shift in _SHIFTS:
        for row in range(_HALF_ROWS):
          byte = start + 2 * row + shift // 8
          columns.append((byte, shift % 8 == 4))
    matrix = np.zeros((self.unit, len(columns) + _LANES), np.float32)
    for column, (byte, upper) in enumerate(columns):
      group, row = divmod(byte, self.rows)
      if self.first is None:
        matrix[group * self.group + row, column] = 16 if upper else 1
      else:
        weight = row if upper else self.rows + row
        matrix[group * self.group + weight, column] = 1
    for weight in range(self.unit):
      matrix[weight, len(columns) + weight // self.group] = 1
    return matrix


def _groups_of_block(total: int, rows: int) -> int:
  """Groups of a block: all, or a divisor of them where there is one."""
  max_groups = _BLOCK_ROWS // rows
  if total <= max_groups:
    return total
  # Rows of steps of 16 bits are stored in pairs of registers' rows.
  divisors = [
    n for n in range(_HALF_ROWS, max_groups + 1, _HALF_ROWS) if total % n == 0
  ]
  return max(divisors, default=max_groups)


def _kernel(shape: _Shape, stack: int, *refs: Ref) -> None:
  x_ref, order_ref, codes_ref, step_in, *remaining = refs[stack:]
  least_in = remaining.pop(0) if shape.has_least else None
  out_ref, acc_ref, wide_ref, left_ref, step_ref, offset_ref = remaining
  k = pl.program_id(1)

  @pl.when(k == 0)
  def _() -> None:
    acc_ref[...] = jnp.zeros_like(acc_ref)

  totals = _spread_x(shape, k, x_ref, order_ref, wide_ref, left_ref)
  step = _inside(shape, k, floats_of_bits(step_in[...]))
  offset = step * jnp.float32(-shape.excess)
  if least_in is not None:
    offset = offset + _inside(shape, k, floats_of_bits(least_in[...]))
  offset_ref[...] = offset
  for tile in range(step_ref.shape[0]):
    step_ref[tile] = step[:, tile * _LANES : (tile + 1) * _LANES]

  rows = shape.share * shape.padded
  inner = max(_LANES, _SUMS // rows // _LANES * _LANES)
  for column in range(0, shape.columns, inner):
    lanes = pl.ds(column, min(inner, shape.columns - column))
    acc = acc_ref[:, lanes] + _dot(totals, offset_ref[:, lanes])
    for chunk, start in enumerate(range(0, shape.groups, shape.share)):
      count = min(shape.share, shape.groups - start)
      numbers = _numbers(
        codes_ref[pl.ds(start * shape.rows, count * shape.rows), lanes],
        shape.first is None,
      )
      x = left_ref[chunk, : count * shape.padded, : numbers.shape[0]]
      sums = _dot(x, numbers)
      for n in range(count):
        rows = sums[n * shape.padded : (n + 1) * shape.padded]
        acc += rows * _row(shape, step_ref, start + n, column, acc.shape)
    acc_ref[:, lanes] = acc

  @pl.when(k == pl.num_programs(1) - 1)
  def _() -> None:
    out_ref[...] = acc_ref[: shape.n].astype(out_ref.dtype)


def _spread_x(
  shape: _Shape,
  k: Any,
  x_ref: Ref,
  order_ref: Ref,
  wide_ref: Ref,
  left_ref: Ref,
) -> Any:
  """Writes the left sides of all products of a block; sums [rows, groups]."""
  length = shape.groups * shape.group
  if shape.padded > shape.n or wide_ref.shape[1] > length:
    wide_ref[...] = jnp.zeros_like(wide_ref)
  x = x_ref[...].astype(jnp.float32)
  if shape.total % shape.groups:
    used = (shape.total - k * shape.groups) * shape.group
    x = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < used, x, 0.0)
  wide_ref[: shape.n, :length] = x
  parts = [
    wide_ref[:, u * shape.unit : (u + 1) * shape.unit]
    for u in range(shape.units)
  ]
  ordered = _dot(jnp.concatenate(parts, 0).astype(jnp.bfloat16), order_ref[...])
  of_unit = shape.unit // shape.group
  owner = _owner(shape)
  totals = jnp.zeros((shape.padded, _LANES), jnp.float32)
  for u in range(shape.units):
    rows = ordered[u * shape.padded : (u + 1) * shape.padded]
    for s in range(shape.spread):
      part = rows[:, s * shape.depth : (s + 1) * shape.depth]
      part = jnp.concatenate([part] * shape.share, 0)
      if shape.share > 1:
        part = jnp.where(owner, part, 0.0)
      left_ref[u * shape.spread + s] = part.astype(jnp.bfloat16)
    sums = rows[:, shape.spread * shape.depth :]
    shift = u * of_unit
    totals += pltpu.roll(sums, shift, 1) if shift else sums
  return totals[:, : shape.groups]


def _row(
  shape: _Shape, step_ref: Ref, row: int, column: int, size: tuple[int, int]
) -> Any:
  """Row of steps from a column on, repeated to `size`."""
  tiles = []
  for tile in range(column // _LANES, (column + size[1]) // _LANES):
    if shape.interpret:
      steps = jnp.broadcast_to(
        step_ref[tile, row : row + 1], (_SUBLANES, _LANES)
      )
    else:
      # A load that repeats one row, instead of a rotation within registers.
      steps = step_ref[tile, pl.ds(row, _SUBLANES, stride=0)]
    tiles.append(steps)
  return jnp.concatenate(
    [jnp.concatenate(tiles, 1)] * (size[0] // _SUBLANES), 0
  )


def _owner(shape: _Shape) -> Any:
  """Whether a number of a product is of a row's group, [rows, depth]."""
  size = (shape.share * shape.padded, shape.depth)
  number = lax.broadcasted_iota(jnp.int32, size, 1)
  register, row = number >> 6, number & (_HALF_ROWS - 1)
  byte_row = register * _BYTE_ROWS + 2 * row
  group = byte_row >> (shape.rows.bit_length() - 1)
  first = group * shape.padded
  place = lax.broadcasted_iota(jnp.int32, size, 0)
  return (place >= first) & (place < first + shape.padded)


def _numbers(codes: Any, doubled: bool) -> Any:
  """bfloat16 numbers of 4 bits each, plus 128, in the order of `order`."""
  words = pltpu.bitcast(codes, jnp.int32)
  if doubled:
    words = words ^ _SIGNS
  pieces = []
  for start in range(0, words.shape[0], _SUBLANES):
    word = words[start : start + _SUBLANES]
    for shift in _SHIFTS:
      shifted = (
        lax.shift_right_logical(word, np.int32(shift)) if shift else word
      )
      pieces.append(pltpu.bitcast((shifted & _CODES) | _NUMBERS, jnp.bfloat16))
  return jnp.concatenate(pieces, 0)


def _inside(shape: _Shape, k: Any, x: Any) -> Any:
  """x [groups, columns] with zeros after the last group."""
  if not shape.total % shape.groups:
    return x
  row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
  return jnp.where(row < shape.total - k * shape.groups, x, 0.0)


def _dot(a: Any, b: Any) -> Any:
  exact = a.dtype == jnp.float32
  return lax.dot_general(
    a, b, (((1,), (0,)), ((), ())),
    precision=lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )  # fmt: skip


# Kernels for products of a few rows with weights of block codes.
PRODUCTS: dict[str, tuple[type, ...]] = {"tpu": (BlockProductTPU,)}


def choose_product(x: Float[Array, "N I"], weight: BlockCodes) -> KernelChoice:
  """Choose the kernel for x . weight; its algorithm is None for XLA's loops.

  In a model's call the call's mesh gives the platform, see `on_mesh`.
  """
  platform, kind, alone = product_device((x,))
  kernels = [
    kernel(chip=chips.machine_name(kind))
    for kernel in PRODUCTS.get(platform, ())
  ]
  whole = lambda kernel: (
    kernel.decline(x, weight)
    if alone
    else "XLA cuts no kernel over several devices"
  )
  return first_serving(kernels, whole, None)


def _largest_error(kernel: BlockProductTPU) -> float:
  """Error for the second of two maps of 4 bits in groups of 64."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  codes = jnp.asarray(rng.integers(0, 256, (2, 5, 32, 200)), jnp.uint8)
  step, least = draw(2, 5, 200), draw(2, 5, 200)
  x = jnp.asarray(rng.normal(size=(3, 320)), jnp.bfloat16)
  levels = jnp.concatenate([codes >> 4, codes & 15], 2)[1]
  numbers = levels.astype(jnp.float32) * step[1][:, None] + least[1][:, None]
  exact = jnp.matmul(
    x.astype(jnp.float32),
    numbers.reshape(320, 200),
    precision=lax.Precision.HIGHEST,
  )

  def multiply(x: jax.Array, *arrays: jax.Array) -> jax.Array:
    names = ("codes", "step", "least")
    weight = BlockCodes(
      **dict(zip(names, arrays, strict=True)),
      index=(jnp.int32(1),),
      levels=tuple(range(16)),
    )
    return kernel.product(x, weight)

  y = jax.jit(multiply)(x, codes, step, least)
  return relative_error((y,), (exact,))


register(PRODUCTS, _largest_error)

"""Linear maps of weights in blocks: codes, and a step for each group of inputs.

Guarantees: a weight is level(code) * step + least, float32, where the product
is exact for steps of at most 16 bits: a level has at most 8. So the decoded
weight is a file's number to the bit, before it is rounded to x's dtype. The
gradient of x is that of the decoded weight, see `coded_product`.
Cost: for up to 64 tokens on a TPU in bfloat16 the codes are read once, by the
kernel of `ops.block_product_tpu`, in place in the stack of layers; elsewhere
groups are read one after another. Neither makes floats of a whole map; for more
tokens, those of one map are made at a time.
Memory: 4 or 8 bits for each weight, and a step (and a least number) of 16 or 32
bits for each group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from ringjax.nn.linear import ExpertLinear, Linear, linear_product
from ringjax.nn.row_tiles import TiledWeight, current_row_tiles
from ringjax.nn.weights.coded_product import coded_product
from ringjax.nn.weights.layer_array import StackedEntry, stacked_entry
from ringjax.ops.block_product_tpu import BlockCodes, choose_product
from ringjax.ops.code_numbers import Levels, floats_of, numbers_of
from ringjax.ops.sharded_product import WeightShards, product_per_shard
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf

Tree = TypeVar("Tree")

# Maximum tokens of a call whose products are made group by group.
_FEW = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout:
  """Layout of the codes of a map.

  Attributes:
    group: Number of weights of an output that share a step, even.
    levels: Number that each code of 4 bits stands for, 16 of them: whole ones
      in -127 to 127, or floats in -1 to 1; None: codes are whole numbers
      themselves, of 8 bits.
    step: Dtype of steps.
    minimum: Dtype of the number that is added to a group, None for none.
  """

  group: int
  levels: Levels
  step: str
  minimum: str | None = None

  @property
  def rows(self) -> int:
    """Number of rows of codes of a group: two codes of 4 bits share a byte."""
    return self.group if self.levels is None else self.group // 2

  @property
  def dtype(self) -> str:
    """Dtype of the codes."""
    return "int8" if self.levels is None else "uint8"

  def numbers(
    self, codes: Shaped[Array, "*lead rows O"]
  ) -> tuple[Shaped[Array, "*lead rows O"], ...]:
    """Levels of codes: those of a group's first half, and of its second.

    For 8 bits there is one part. They are int8, or float32 if not whole.
    """
    return numbers_of(codes, self.levels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Products:
  """Products with a map's codes, and their transposes.

  Attributes:
    layout: Layout of the codes.
    shards: Mesh axes that shard them.
  """

  layout: BlockLayout
  shards: WeightShards

  def of_many(
    self,
    x: Float[Array, "*batch I"],
    entries: tuple[StackedEntry | None, ...],
  ) -> Float[Array, "*batch O"]:
    """x . weight, of x's dtype."""
    arrays = tuple(None if e is None else e.array() for e in entries)
    return linear_product(x, self.weight(arrays, x.dtype), 1)

  def transposed(
    self,
    gradient: Float[Array, "*batch O"],
    entries: tuple[StackedEntry | None, ...],
  ) -> Float[Array, "*batch I"]:
    """Gradient of x from that of y."""
    arrays = tuple(None if e is None else e.array() for e in entries)
    weight = self.weight(arrays, gradient.dtype)
    return linear_product(gradient, weight.T, 1)

  def of_few(
    self,
    x: Float[Array, "*batch I"],
    entries: tuple[StackedEntry | None, ...],
  ) -> Float[Array, "*batch O"]:
    """x . weight of x's dtype, on each shard of the weight by itself."""

    def product(x: jax.Array, arrays: tuple[Any, ...], wide: bool) -> jax.Array:
      entries = tuple(
        None if pair is None else StackedEntry(stacked=pair[0], index=pair[1])
        for pair in arrays
      )
      y = self._by_kernel(x, entries, wide)
      if y is not None:
        return y.reshape(*x.shape[:-1], y.shape[-1])
      layer = tuple(None if e is None else e.array() for e in entries)
      return self._by_groups(x, layer, wide)

    def spec_of(entry: StackedEntry, *axes: Any) -> tuple[Any, ...]:
      lead = len(entry.index)
      return P(*(None,) * lead, *axes), (P(),) * lead

    inputs, outputs = self.shards.inputs or None, self.shards.outputs or None
    codes, *scales = entries
    assert codes is not None
    specs = (
      spec_of(codes, inputs, None, outputs),
      *(None if e is None else spec_of(e, inputs, outputs) for e in scales),
    )
    arrays = tuple(None if e is None else (e.stacked, e.index) for e in entries)
    return product_per_shard(product, x, arrays, specs, self.shards)

  def _by_kernel(
    self,
    x: Float[Array, "*batch I"],
    entries: tuple[StackedEntry | None, ...],
    wide: bool,
  ) -> Float[Array, "N O"] | None:
    """x . weight by a kernel; None if none serves the call."""
    codes, step, minimum = entries
    assert codes is not None and step is not None
    weight = BlockCodes(
      codes=codes.stacked,
      step=step.stacked,
      least=None if minimum is None else minimum.stacked,
      index=codes.index,
      levels=self.layout.levels,
    )
    x = x.reshape(-1, x.shape[-1])
    kernel = choose_product(x, weight).algorithm
    return None if kernel is None else kernel.product(x, weight, wide=wide)

  def weight(
    self, arrays: tuple[jax.Array | None, ...], dtype: DTypeLike
  ) -> Float[Array, "I ..."]:
    """The decoded weight."""
    codes, step, minimum = arrays
    assert codes is not None and step is not None
    return floats_of(codes, step, minimum, self.layout.levels, dtype)

  def _by_groups(
    self,
    x: Float[Array, "*batch I"],
    arrays: tuple[jax.Array | None, ...],
    wide: bool,
  ) -> Float[Array, "*batch O"]:
    """x . weight, one group after another, whose floats are never stored."""
    codes, step, minimum = arrays
    assert codes is not None
    groups, outer = codes.shape[0], codes.shape[-1]
    parts = x.reshape(*x.shape[:-1], groups, self.layout.group)

    def add(y: jax.Array, group: tuple) -> tuple[jax.Array, None]:
      x, codes, step, minimum = group
      dot = lambda x, c: linear_product(x, c.astype(x.dtype), 1, wide=True)
      numbers = self.layout.numbers(codes)
      halves = jnp.split(x, len(numbers), -1)
      rows = (None,) * (y.ndim - 1)
      sums = sum(map(dot, halves, numbers))
      y = y + sums * step.astype(jnp.float32)[rows]
      if minimum is not None:
        total = jnp.sum(x, -1, keepdims=True, dtype=jnp.float32)
        y = y + total * minimum.astype(jnp.float32)[rows]
      return y, None

    shape = (*x.shape[:-1], outer)
    start = collectives.zeros(shape, jnp.float32, (x, arrays))
    scan_inputs = (jnp.moveaxis(parts, -2, 0), codes, step, minimum)
    y = lax.scan(add, start, scan_inputs)[0]
    return y if wide else y.astype(x.dtype)


class BlockCodesLinear(nnx.Module):
  """A `Linear` with its weight stored as codes in groups along its inputs.

  It is made of arrays, or of their shapes.

  Arrays have a leading axis of layers while their layers share one, and after
  it one of experts if it takes the place of an `ExpertLinear`. On a mesh those
  of experts are sharded by expert alone, whatever axis their widths have:
  `Rules(experts="model", ffn=None)` shards them. Output axes are one axis of
  the arrays, O, so that no product has to rearrange them; it is sharded as the
  first output axis would be.

  Attributes:
    layout: Layout of the codes.
    codes: Codes of the weight, int8 or uint8 [G, rows, O].
    step: Step of each group, [G, O].
    least: Number that is added to each group, [G, O], or None.
    inputs: Sizes of the axes that are contracted; the last group may end after
      them.
    outputs: Sizes of the output axes.
    axes: Names of the axes of the weight, of an expert's first.
    widened: Whether the decoded weight stays float32 when a model is cast.
    by_index: Whether a call reads some entries of the weight, see `param`.
    shards: Mesh axes that shard the arrays, see `with_shards`.
  """

  def __init__(
    self,
    base: Linear,
    layout: BlockLayout,
    codes: Shaped[ArrayLeaf, " ..."] | None,
    step: Shaped[ArrayLeaf, " ..."] | None,
    least: Shaped[ArrayLeaf, " ..."] | None,
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
  ):
    self.contracted, self.inputs, self.layout = base.contracted, inputs, layout
    self.outputs = outputs
    self.shards = WeightShards()
    metadata = base.weight.get_metadata()
    axes = self.axes = tuple(metadata["axes"])
    self.widened, self.by_index = bool(metadata["wide"]), base.by_index
    # Groups are sharded like the first axis of the inputs.
    lead, first = axes[: base.lead], axes[base.lead]
    out = axes[base.lead + self.contracted]
    if isinstance(base, ExpertLinear):
      # Shards run different experts at the same time, so they must not wait for
      # each other within a product, as they would for sharded groups.
      first, out = None, None
    marks = {
      "wide": True,
      "by_index": base.by_index,
      "in_place": True,
      # A shard has whole entries of the first output axis.
      "last_axis": outputs[0] if outputs else 1,
    }
    self.codes = nnx.Param(codes, axes=(*lead, first, None, out), **marks)
    self.step = nnx.Param(step, axes=(*lead, first, out), **marks)
    self.least = (
      None
      if least is None
      else nnx.Param(least, axes=(*lead, first, out), **marks)
    )
    self.bias = base.bias

  def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
    if (tiles := current_row_tiles()) is not None:
      bias = None if self.bias is None else self.bias[...]
      return tiles.product(x, self.tiled_weight(), bias)
    lead = x.shape[: x.ndim - self.contracted]
    rows = math.prod(lead)
    entries = tuple(
      None if p is None else stacked_entry(p)
      for p in (self.codes, self.step, self.least)
    )
    x = x.reshape(*lead, math.prod(self.inputs))
    num_padding = self.layout.group * self._groups - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, num_padding)])
    products = self._products
    product = products.of_few if rows <= _FEW else products.of_many
    y = coded_product(product, products.transposed, x, entries)
    y = y.reshape(*lead, *self.outputs)
    if self.bias is None:
      return y
    return y + self.bias[...][(None,) * len(lead)].astype(y.dtype)

  def tiled_weight(self) -> TiledWeight:
    """The weight for rows in tiles."""
    codes, step = map(stacked_entry, (self.codes, self.step))
    minimum = None if self.least is None else stacked_entry(self.least)
    return TiledWeight(
      stacked=BlockCodes(
        codes=codes.stacked,
        step=step.stacked,
        least=None if minimum is None else minimum.stacked,
        levels=self.layout.levels,
      ),
      index=codes.index,
      contracted=1,
      inputs=self._groups * self.layout.group,
      shards=self.shards,
    )

  def weight(self) -> Float[Array, " ..."]:
    """The decoded weight, float32 [*lead, *in, *out]."""
    arrays = tuple(
      None if p is None else p.get_value()
      for p in (self.codes, self.step, self.least)
    )
    lead = self.step[...].shape[:-2]
    decode = functools.partial(self._products.weight, dtype=jnp.float32)
    for _ in lead:
      decode = jax.vmap(decode)
    weight = decode(arrays)
    weight = lax.slice_in_dim(weight, 0, math.prod(self.inputs), axis=-2)
    return weight.reshape(*lead, *self.inputs, *self.outputs)

  @property
  def _products(self) -> _Products:
    return _Products(layout=self.layout, shards=self.shards)

  @property
  def _groups(self) -> int:
    return -(-math.prod(self.inputs) // self.layout.group)


def with_shards(
  model: Tree, spec_of: Callable[[nnx.Variable], P | None]
) -> Tree:
  """The model whose maps of block codes know which mesh axes shard them.

  In a trace no array knows its sharding.

  Args:
    model: Model, of arrays or of shapes.
    spec_of: Function from a parameter of codes of `model` to its sharding;
      None: it is on one device.
  """
  result = jax.tree.map(lambda x: x, model)
  maps_of = lambda tree: [
    module
    for _, module in nnx.iter_modules(tree)
    if isinstance(module, BlockCodesLinear)
  ]
  for old, new in zip(maps_of(model), maps_of(result), strict=True):
    new.shards = _shards(new.codes, spec_of(old.codes))
  return result


def _shards(codes: nnx.Variable, spec: P | None) -> WeightShards:
  """Mesh axes of the inputs and of the outputs of codes [..., G, rows, O]."""
  dims = codes.get_value().ndim
  axes = (*tuple(spec or ()), *(None,) * dims)[:dims]
  return WeightShards(
    inputs=collectives.names(axes[-3]), outputs=collectives.names(axes[-1])
  )

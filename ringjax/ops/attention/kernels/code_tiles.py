"""Decoding of a tile of packed codes inside a Pallas TPU kernel.

A kernel that multiplies a tile with many queries decodes it once, to numbers
in the order of a vector's elements. `decode_codes_tpu`, whose queries are few,
multiplies the codes instead and applies scales to the products.

Memory: registers and VMEM only: the elements of one head of a tile.

  codes int8 [X, slots] -> numbers [elements, slots], tokens in the lanes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.ops.attention.cached.code_format import CodeFormat
from ringjax.ops.attention.cached.pooled import PooledView
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.kernels.decode_codes_tpu import (
  Scales,
  gather_rows,
  level_table,
)
from ringjax.ops.attention.kernels.tile_ops import Ref

# Rows of a register of int32 or float32.
_ROWS = 8


def undecoded(keys: PooledView) -> str | None:
  """Reason why a tile of these pages' codes is not decoded, or None."""
  assert keys.decoders is not None
  arrays = (keys.k,) if keys.v is keys.k else (keys.k, keys.v)
  for decoder, x in zip(keys.decoders, arrays, strict=False):
    if x.dtype != jnp.int8:
      return f"codes that are {x.dtype}: it reads int8, whose tokens are last"
    form = decoder.format
    if form is None or (form.levels and not decoder.transformed):
      return f"{decoder.codec}: it decodes integers and levels"
    if form.by_channel:
      return f"{decoder.codec}: scales of channels"
    if form.dim % 64:
      return f"heads of {form.dim}: no multiples of 64"
    if form.groups > 1 and form.group % _ROWS:
      return f"groups of {form.group} elements: no multiples of {_ROWS}"
    if form.outliers and form.dim > 256:
      return f"{decoder.codec}: outliers of heads of more than 256 elements"
  return None


def formats(keys: PooledView) -> tuple[CodeFormat, ...]:
  """Formats of the arrays of codes: of keys, and of values if they differ."""
  if keys.decoders is None:
    return ()
  decoders = keys.decoders[: 1 if keys.v is keys.k else 2]
  code_formats = tuple(decoder.format for decoder in decoders)
  assert None not in code_formats
  return code_formats  # pyrefly: ignore


def level_tables(
  keys: PooledView,
) -> list[Float[Array, "_ M 128"] | None]:
  """Tables of levels, one for each of `formats`; None for integers."""
  return [
    level_table(form, constants) if form.looked_up else None
    for form, constants in zip(formats(keys), keys.constants, strict=False)
  ]


class CodeTile(NamedTuple):
  """Codes of a tile's keys or values.

  Fields:
    pages: References to the tile's pages, int8 [1, 1, heads, X, P] each.
    table: Reference to the levels, [heads or 1, M, 128], or None.
    form: Format of the codes.
    scales: Scales, zeros and outliers of all heads of the tile.
    nan_flags: NaN where scales were not finite, else 0, float32 [heads *
      groups, slots]; None if they are used as they are.
  """

  pages: Sequence[Ref]
  table: Ref | None
  form: CodeFormat
  scales: Scales
  nan_flags: Float[Array, "_ slots"] | None

  @classmethod
  def of(
    cls, pages: Sequence[Ref], table: Ref | None, form: CodeFormat, clean: bool
  ) -> CodeTile:
    """Unpack the scales of a tile; with `clean` non-finite ones become 0."""
    heads = pages[0].shape[2]
    parts = [Scales.of(ref.bitcast(jnp.int32), form, heads) for ref in pages]
    join = lambda *x: x[0] if len(x) == 1 else jnp.concatenate(x, 1)
    scales, nan_flags = jax.tree.map(join, *parts), None
    if clean:
      scales, nan_flags = scales.cleaned()
    return cls(pages, table, form, scales, nan_flags)

  def flag(self, head: int) -> Float[Array, "1 slots"]:
    """NaN for each token of which a scale of this head is not finite."""
    assert self.nan_flags is not None
    groups = self.form.groups
    rows = self.nan_flags[head * groups : (head + 1) * groups]
    return jnp.sum(rows, axis=0, keepdims=True)

  def numbers(
    self, head: int, dtype: DTypeLike
  ) -> Shaped[Array, "elements slots"]:
    """Elements of a head's vectors."""
    form, scales = self.form, self.scales
    codes = self._codes(head)
    x = self._levels(head, codes) if form.looked_up else codes
    x = x.astype(jnp.float32)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for place, value in scales.outliers:
      x = jnp.where(row == place[head : head + 1], value[head : head + 1], x)
    if scales.scale is not None:
      x = x * self._by_element(scales.scale, head)
    if scales.zero is not None:
      x = x + self._by_element(scales.zero, head)
    return x.astype(dtype)

  def _codes(self, head: int) -> Int[Array, "elements slots"]:
    """Codes of a head in the order of its elements, int32."""
    form = self.form
    packed = [ref[0, 0, head].astype(jnp.int32) for ref in self.pages]
    data = packed[0] if len(packed) == 1 else jnp.concatenate(packed, 1)
    codes: Any = None
    for part in form.parts:
      words = data[part.first : part.first + part.width]
      mask = (1 << part.size) - 1
      fields = [
        (words >> shift if shift else words) & mask
        for shift in range(0, 8, part.size)
      ]
      bits = fields[0] if len(fields) == 1 else jnp.concatenate(fields, 0)
      codes = bits if codes is None else codes | bits << part.low
    return codes

  def _levels(
    self, head: int, codes: Int[Array, "elements slots"]
  ) -> Float[Array, "elements slots"]:
    """Look up the levels of codes, a register of 8 rows at a time."""
    assert self.table is not None
    table = self.table[head if self.table.shape[0] > 1 else 0]
    table = tile_ops.widened(table, codes.shape[1])
    blocks = []
    for first in range(0, codes.shape[0], _ROWS):
      code = codes[first : first + _ROWS]
      low = code & (_ROWS - 1)
      levels = gather_rows(table[:_ROWS], low)
      if self.form.bits > 3:
        upper = gather_rows(table[_ROWS : 2 * _ROWS], low)
        levels = jnp.where(code >= _ROWS, upper, levels)
      blocks.append(levels)
    return jnp.concatenate(blocks, 0)

  def _by_element(
    self, x: Float[Array, "_ slots"], head: int
  ) -> Float[Array, "_ slots"]:
    """A head's rows of an array of all heads and groups, once per element."""
    groups, group, dim = self.form.groups, self.form.group, self.form.dim
    if groups == 1:
      return x[head : head + 1]
    blocks = []
    for n in range(groups):
      size = min(group, dim - n * group)
      row = x[head * groups + n : head * groups + n + 1]
      blocks.append(jnp.broadcast_to(row, (size, x.shape[1])))
    return jnp.concatenate(blocks, 0)

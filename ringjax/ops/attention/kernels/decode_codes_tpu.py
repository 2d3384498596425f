"""Pallas TPU kernel for decode attention over the packed codes of a cache.

Guarantees: equals `views.decode_attention` wherever it serves (`decline` says
where it does not), up to the rounding of weights; forward only.
Cost: as `decode_tpu`, for the bytes of the codes: they are unpacked in
registers, and no decoded tile is stored in memory.
Memory: VMEM only: two tiles of codes, and the decoded elements of one head.

Keys with per-channel scales are rotated after decoding, see `rotated_codes`.

Tokens are in the lanes, so that a head's codes [X, keys] become the right
operand of the product of queries and keys with a shift and a mask of 32 bits:
two codes are the low bits of two bfloat16 numbers, 128 + code. The bias of 128
and the scale and zero of each token's group cost no work per element:

  q . k = sum_groups scale (q . (128 + code) - 128 sum(q)) + zero sum(q)
  p . v = (p scale) . (128 + code) - 128 sum(p scale) + sum(p zero)

The queries of each group of elements are separate rows, with zeros elsewhere:
there are fewer queries than a register has rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ringjax.ops.attention.blockwise import pad_axis, tile_kinds
from ringjax.ops.attention.cached.code_format import CodeFormat
from ringjax.ops.attention.cached.views import (
  EncodedView,
  KVView,
  UnrotatedView,
)
from ringjax.ops.attention.kernels import rotated_codes, tile_ops
from ringjax.ops.attention.kernels.decoder_tpu import DecoderTPU
from ringjax.ops.attention.kernels.rotated_codes import RotatedRows, Turns
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import ScoreArgs, Scores, Terms
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Coords, distance, visible
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial, finite_max
from ringjax.ops.turns import Frequencies
from ringjax.parallel import collectives

# Most bytes of codes and most keys of a tile, see `decode_tpu`; the decoded
# elements of one head are in VMEM too.
_TILE_BYTES = 1 << 20
_MOST = 1024
# Rows of a register of float32, and of one of bfloat16.
_ROWS, _HALF_ROWS = 8, 16
# Two bfloat16 numbers 128, into whose low bits codes go.
_BIAS, _BIAS_BITS = 128.0, 0x43004300
_WORD = 4
# The smallest positive float16 number.
_TINY = 2.0**-24
# Elements of a register, and the approximate cycles to decode as many codes of
# each width: codes that are integers by their bits, and codes of levels.
_REGISTER = 1024
_CYCLES = (
  {2: 1.3, 3: 1.6, 4: 1.0, 8: 1.8},
  {2: 1.2, 3: 1.3, 4: 1.8},
)
# Cycles in addition to these: for an outlier of each vector, and for keys with
# per-channel scales.
_OUTLIER, _CHANNELS = 0.5, 1.3
# Number of keys whose codes are in registers at once.
_PIECE = 256


class Field(NamedTuple):
  """Codes that become bfloat16 numbers by a shift and a mask.

  Fields:
      first: First word, of 4 bytes each.
      words: Number of words.
      shift: Bits by which words are shifted right; negative: left.
      mask: Mask of a word, for both of its 16-bit halves.
  """

  first: int
  words: int
  shift: int
  mask: int


class Lookup(NamedTuple):
  """Codes that are row indices of a table of levels.

  Fields:
      odd: Index of the word, 0 or 1, that holds these codes, see `_nibbles`.
      shift: Bits to shift right for the lower of two codes; the other is 16 up.
  """

  odd: int
  shift: int


class Arrangement(NamedTuple):
  """Layout of a vector's codes as rows of a tile.

  Fields:
      fields: Fields that make the rows in order, two codes of each word.
      dims: Index of the vector's element to which each row adds, int [E]; rows
        with an index of at least the vector's length are padding.
  """

  fields: tuple[Any, ...]
  dims: np.ndarray

  @property
  def rows_per_element(self) -> int:
    """Number of rows that sum to one element."""
    return self.dims.size // np.unique(self.dims).size


@functools.cache
def arrangement(form: CodeFormat) -> Arrangement:
  """Return the layout of a vector's codes as the rows of a tile."""
  fields: list[Any] = []
  dims = []
  if form.looked_up:
    # `_nibbles` gives the words in this order.
    width = form.parts[0].width
    words = _WORD * np.arange(width // _WORD)[:, None]
    odds = (0,) if form.bits == 4 else (0, 1)
    for odd in odds:
      for byte in (0, 1):
        for n in (0, 1):
          fields.append(Lookup(odd, 8 * byte + 4 * n))
          word_dims = words + np.array([byte, byte + 2])
          dims.append((word_dims + (n * len(odds) + odd) * width).reshape(-1))
    return Arrangement(tuple(fields), np.concatenate(dims))
  for part in form.parts:
    words = part.width // _WORD
    # A bfloat16 number has 7 bits after its leading one. The highest of 8 bits
    # becomes a number of its own: in the exponent it makes 256 of 128.
    full_mask = ((1 << part.size) - 1) << part.low
    field_masks = (0x7F, 0x80) if part.size == 8 else (full_mask,)
    for byte in (0, 1):
      for n in range(8 // part.size):
        for mask in field_masks:
          shift = 8 * byte + part.size * n - part.low
          fields.append(
            Field(part.first // _WORD, words, shift, mask | mask << 16)
          )
          word_dims = _WORD * np.arange(words)[:, None] + [byte, byte + 2]
          dims.append((word_dims + n * part.width).reshape(-1))
  return Arrangement(tuple(fields), np.concatenate(dims))


class DecodeCodesTPU(DecoderTPU):
  """Pallas TPU kernel that decodes from a cache's packed codes."""

  def tile(
    self, q: Float[Array, "B K G T H"], keys: EncodedView | UnrotatedView
  ) -> tuple[int, int]:
    """Choose (heads, keys) of a tile for queries [B, K, G, T, H]."""
    keys, _ = _split_rotation(keys)
    row = sum(x.shape[3] for x in _code_arrays(keys))
    return self.tile_of(q, keys.k.shape[4], row, _TILE_BYTES, _MOST)

  def _vmem(
    self, q: jax.Array, keys: EncodedView, rotation: Rotation | None
  ) -> int:
    """Approximate bytes of vector memory that a step takes."""
    heads, kb = self.tile(q, keys)
    k_format, v_format = _formats(keys)
    row = sum(x.shape[3] for x in _code_arrays(keys))
    rows = QueryRows.of(q, (k_format, v_format)).total
    h, j = (
      tile_ops.lanes(_num_columns(x, q.dtype)) for x in (k_format, v_format)
    )
    stats = 3 * tile_ops.LANES
    # Inputs and outputs are double-buffered for the next step.
    in_flight = (
      2 * heads * (kb * row + 4 * rows * (h + j + stats + tile_ops.LANES))
    )
    scratch = 4 * heads * rows * (j + stats)
    numbers = 2 * _PIECE * (h + j)
    scores = 4 * 4 * rows * kb
    # Cosines and sines of positions, and products with them.
    tables = 0
    if k_format.by_channel:
      rotation_plan = _rotated_rows(k_format, rotation).plan
      tables = 4 * 3 * rotation_plan.count * kb + 4 * heads * rows * kb
      numbers += 4 * _PIECE * rotation_plan.products
    return in_flight + scratch + numbers + scores + tables

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    view, rotation = _split_rotation(keys)
    if not isinstance(view, EncodedView):
      return f"{type(view).__name__}: it reads EncodedView"
    if rotation is not None:
      form = view.decoders[0].format
      if form is None or not form.by_channel:
        return f"{view.decoders[0].codec}: keys before their rotation"
      if rotation.by_row:
        return "keys that rotate by the lengths of their rows"
      if rotation.after is not None:
        return "keys with a norm after their rotation"
    for n, (decoder, x) in enumerate(
      zip(view.decoders, (view.k, view.v), strict=True)
    ):
      if x.dtype != jnp.int8:
        return f"codes that are {x.dtype}: it reads int8, whose tokens are last"
      form = decoder.format
      if form is None or (form.levels and not decoder.transformed):
        return f"{decoder.codec}: it decodes integers and levels"
      if form.dim % 64 or x.shape[3] % _ROWS:
        return f"heads of {form.dim}: no multiples of 64"
      if form.by_channel and (n or view.v is view.k):
        return f"{decoder.codec}: values with scales of channels"
      if form.outliers and form.dim > 256:
        return f"{decoder.codec}: heads of more than 256 numbers"
    _, kb = self.tile(q, view)
    return self.unserved(
      q,
      keys,
      args,
      length=view.k.shape[4],
      block=kb,
      need=self._vmem(q, view, rotation),
    )

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Attention partial of q [B, K, G, T, H] over the keys of `context.k`."""
    check_serves(self, q, keys, args)
    keys, rotation = _split_rotation(keys)
    assert isinstance(keys, EncodedView)
    context, slopes = args.context, args.terms.slopes
    b, kv, g, t, _ = q.shape
    length = keys.k.shape[4]
    k_format, v_format = _formats(keys)
    heads, kb = self.tile(q, keys)
    columns = -(-length // kb)
    at = Coords(*(pad_axis(c, 1, columns * kb) for c in context.k))
    kinds = tile_kinds(context.mask, context.q, at, t, kb)
    steps = tile_ops.TileSteps.of(kinds)
    rows = QueryRows.of(q, (k_format, v_format))
    flat = q.reshape(b, kv, g * t, -1)
    rotation_plan, channel_operands, angles = None, _ChannelOperands(), []
    if k_format.by_channel:
      rotation_plan = _rotated_rows(k_format, rotation).plan
      if rotation_plan.count:
        angles = [pltpu.VMEM((2 * rotation_plan.count, kb), jnp.float32)]
      by_group, sums, channel_operands = _channel_operands(
        flat, k_format, rotation, keys.constants[0], rows, heads
      )
    else:
      by_group, sums = _queries(flat, k_format, rows)
    row_at = jnp.stack(tile_ops.by_row(context.q, q.shape), 2)
    shared = keys.v is keys.k
    num_columns, bias = (
      _num_columns(v_format, q.dtype),
      _bias(v_format, q.dtype),
    )
    operands = [
      by_group,
      sums,
      *(x for x in channel_operands if x is not None),
      rows.spread(row_at, 1),
      tile_ops.pair(at, b),
      *(
        []
        if slopes is None
        else [rows.spread(tile_ops.slopes_by_row(slopes, t), 1)[..., None]]
      ),
    ]
    codes = len(operands)
    operands += _code_arrays(keys)
    tables = [
      None if not form.looked_up else level_table(form, constants)
      for form, constants in zip(
        (k_format, v_format)[: 1 if shared else 2], keys.constants, strict=False
      )
    ]
    operands += [x for x in tables if x is not None]
    scalars = tile_ops.Scalars.of(
      Terms(), context._replace(heads=None, seed=None), steps
    )
    leaves, structure = jax.tree.flatten(scalars)
    layer = jnp.asarray(keys.layer, jnp.int32).reshape(1)
    # All queries are one row of tiles.
    column = lambda i, words: tile_ops.column_of(words[i])
    heads_block = lambda bi, ki, i, *_: (bi, ki, 0, 0)
    keys_block = lambda bi, ki, i, layer, words, *_: (
      layer[0], bi, ki, 0, column(i, words),
    )  # fmt: skip
    in_specs = [
      *(
        pl.BlockSpec((1, heads, *x.shape[2:]), heads_block)
        for x in operands[:2]
      ),
      *channel_operands.specs(heads, rows.total),
      pl.BlockSpec((1, rows.total, 2), lambda bi, ki, i, *_: (bi, 0, 0)),
      pl.BlockSpec(
        (1, 2, kb),
        lambda bi, ki, i, layer, words, *_: (bi, 0, column(i, words)),
      ),
    ]
    if slopes is not None:
      in_specs.append(
        pl.BlockSpec((heads, rows.total, 1), lambda bi, ki, i, *_: (ki, 0, 0))
      )
    in_specs += [
      pl.BlockSpec((1, 1, heads, x.shape[3], kb), keys_block)
      for x in _code_arrays(keys)
    ]
    for x in operands[codes + len(_code_arrays(keys)) :]:
      # A table is per head or common to all heads.
      per_head = x.shape[0] == kv
      in_specs.append(
        pl.BlockSpec(
          (heads if per_head else 1, *x.shape[1:]),
          lambda bi, ki, i, *_, per_head=per_head: (
            ki if per_head else 0,
            0,
            0,
          ),
        )
      )
    out_type = lambda n: collectives.out_type(
      (b, kv, rows.total, n),
      jnp.float32,
      q,
      keys.k,
      keys.v,
      args.terms,
      context,
    )
    acc, zeros, m, l = pl.pallas_call(  # noqa: E741
      functools.partial(
        _kernel,
        args.scores,
        jax.tree.structure(context.mask),
        structure,
        (k_format, v_format),
        rows,
        rotation_plan,
        tuple(x is not None for x in channel_operands),
        shared,
        slopes is not None,
        tuple(x is not None for x in tables),
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1 + len(leaves),
        grid=(b, kv // heads, steps.count),
        in_specs=in_specs,
        out_specs=[
          pl.BlockSpec((1, heads, rows.total, n), heads_block)
          for n in (num_columns, 1, 1, 1)
        ],
        scratch_shapes=[
          pltpu.VMEM((heads, rows.total, n), jnp.float32)
          for n in (num_columns, *(tile_ops.LANES,) * 3)
        ]
        + angles,
      ),
      out_shape=[out_type(n) for n in (num_columns, 1, 1, 1)],
      compiler_params=self.params(
        self._vmem(q, keys, rotation), "parallel", "parallel", "arbitrary"
      ),
      cost_estimate=self._cost(q, keys),
      interpret=self.interpret,
      name="ringjax_decode_codes",
    )(layer, *leaves, *operands)
    unflatten = lambda x, *last: x[:, :, : g * t].reshape(b, kv, g, t, *last)
    acc = unflatten(
      _element_sums(acc, zeros, v_format, rows, bias), v_format.dim
    )
    return Partial(acc, unflatten(m), unflatten(l))

  def _cost(self, q: jax.Array, keys: EncodedView) -> pl.CostEstimate:
    """Estimate the time: that of the memory or of the vector unit."""
    _, b, kv, _, length = keys.k.shape
    num_vectors = b * kv * length
    nbytes = num_vectors * sum(x.shape[3] for x in _code_arrays(keys))
    cycles = num_vectors * sum(decode_cycles(x) * x.dim for x in _formats(keys))
    return self.cost(nbytes, q.size // q.shape[4] * length, cycles)


def decode_cycles(form: CodeFormat) -> float:
  """Approximate cycles of a core to decode one element of such codes."""
  extra = _CHANNELS if form.by_channel else _OUTLIER * form.outliers
  return (_CYCLES[form.looked_up][form.bits] + extra) / _REGISTER


def _split_rotation(keys: KVView) -> tuple[Any, Rotation | None]:
  """Split keys into the stored view and the rotation on reading, if any."""
  if isinstance(keys, UnrotatedView):
    return keys.stored, keys.rotation
  return keys, None


def _rotated_rows(form: CodeFormat, rotation: Rotation | None) -> RotatedRows:
  """Rows of the decoded elements of keys with per-channel scales."""
  layout = arrangement(form)
  dims = layout.dims.reshape(len(layout.fields), -1, 2)
  pieces = np.moveaxis(dims, 2, 1).reshape(2 * len(layout.fields), -1)
  return RotatedRows.of(pieces, rotation, form.dim)


class _ChannelOperands(NamedTuple):
  """Additional operands of the kernel for keys with per-channel scales.

  Fields:
    frequencies: Frequencies of cosines and sines, int32 [2, count, 128], see
      `RotatedRows.frequencies`; None where no key is rotated.
    zeros: Queries times zeros, [B, K, N, 2 count], which multiply the cosines
      and sines; for codes with a sink [B, K, 2 N, 2 count], followed by queries
      times the sink; or None.
    queries: Queries that an outlier's cosine and sine multiply, [B, K, 2, N,
      lanes]; None without outliers.
    channels: Bits of each element's decoded code 0 and of its frequency's
      fields, int32 [K / heads, 3, heads, lanes]; for codes with a sink [K /
      heads, 5, heads, lanes], followed by the decoded code 0 near the sink and
      the factor; or None.
  """

  frequencies: Any = None
  zeros: Any = None
  queries: Any = None
  channels: Any = None

  def specs(self, heads: int, rows: int) -> list[pl.BlockSpec]:
    """Block specs of the operands that are not None, for a tile's heads."""
    specs = []
    if self.frequencies is not None:
      specs += [
        pl.BlockSpec(self.frequencies.shape, lambda *_: (0, 0, 0)),
        pl.BlockSpec(
          (1, heads, *self.zeros.shape[2:]),
          lambda bi, ki, *_: (bi, ki, 0, 0),
        ),
      ]
    if self.queries is not None:
      specs += [
        pl.BlockSpec(
          (1, heads, *self.queries.shape[2:]),
          lambda bi, ki, *_: (bi, ki, 0, 0, 0),
        ),
        pl.BlockSpec(
          (1, *self.channels.shape[1:]), lambda bi, ki, *_: (ki, 0, 0, 0)
        ),
      ]
    return specs


def _channel_operands(
  q: Float[Array, "B K R H"],
  form: CodeFormat,
  rotation: Rotation | None,
  constants: PyTree,
  rows: QueryRows,
  heads: int,
) -> tuple[Float[Array, "B K N E"], Float[Array, "B K N _"], _ChannelOperands]:
  """Queries as of `_queries`, and the operands for per-channel scales.

  For codes with a sink the sums are [B, K, N, 2]: of zeros and of the sink.
  """
  scale, zero, *sink_constants, levels = (
    jnp.asarray(x, jnp.float32) for x in constants
  )
  rotated_rows = _rotated_rows(form, rotation)
  # Copies are per group, and these keys have one group: the others are zeros.
  pad_rows = lambda fields: type(fields)(
    *(pad_axis(x, 2, rows.total) for x in fields)
  )
  channel_queries = pad_rows(rotated_rows.queries(q, rotation, scale, zero))
  if form.sinks:
    sink_queries = pad_rows(
      rotated_rows.queries(q, rotation, scale, sink_constants[0])
    )
    channel_queries = channel_queries._replace(
      zeros=jnp.concatenate([channel_queries.zeros, sink_queries.zeros], 2),
      unrotated_products=jnp.concatenate(
        [channel_queries.unrotated_products, sink_queries.unrotated_products], 3
      ),
    )
  frequencies = zeros = queries = channels = None
  if rotated_rows.plan.count:
    assert rotation is not None
    frequencies = rotated_rows.frequencies(rotation)
    zeros = channel_queries.zeros
  if form.outliers:
    lanes = tile_ops.lanes(form.dim)
    cos_sin_queries = jnp.stack(
      [channel_queries.straight, channel_queries.crossed], 2
    )
    queries = pad_axis(cos_sin_queries, 4, lanes)
    units, fractions = rotated_rows.element_frequencies(rotation, form.dim)
    level = rotated_codes.as_words(levels[:, :1] * scale + zero)
    turn = (units, rotated_codes.as_words(fractions))
    turn = (jnp.broadcast_to(x[None], zero.shape) for x in turn)
    parts = [level, *turn]
    if form.sinks:
      sink, factor = sink_constants
      factor = jnp.broadcast_to(factor, sink.shape)
      near_level = levels[:, :1] * scale * factor + sink
      parts += [rotated_codes.as_words(x) for x in (near_level, factor)]
    stacked = jnp.stack(parts, 1)
    stacked = stacked.reshape(-1, heads, len(parts), form.dim)
    channels = pad_axis(jnp.swapaxes(stacked, 1, 2), 3, lanes)
  return (
    channel_queries.rows,
    channel_queries.unrotated_products,
    _ChannelOperands(frequencies, zeros, queries, channels),
  )


def _code_arrays(keys: EncodedView) -> tuple[Any, ...]:
  """Return the arrays of codes, each once."""
  return tuple({id(x): x for x in (keys.k, keys.v)}.values())


def _formats(keys: EncodedView) -> tuple[CodeFormat, CodeFormat]:
  """Return the code formats of keys and of values."""
  k, v = keys.decoders
  k_format, v_format = k.format, (k if keys.v is keys.k else v).format
  assert k_format is not None and v_format is not None
  return k_format, v_format


def _bias(form: CodeFormat, dtype: DTypeLike) -> float:
  """Bias that bfloat16 codes keep; float32 has the digits to subtract it."""
  return _BIAS if dtype == jnp.bfloat16 and not form.looked_up else 0.0


def _num_columns(form: CodeFormat, dtype: DTypeLike) -> int:
  """Number of columns of the value sums: the codes' rows and the bias."""
  return arrangement(form).dims.size + (_HALF_ROWS if _bias(form, dtype) else 0)


def level_table(form: CodeFormat, constants: PyTree) -> Float[Array, "K M 128"]:
  """Levels of each head or of all heads, broadcast over the lanes."""
  levels = constants[-1] if form.by_constants else np.asarray([form.levels])
  levels = pad_axis(
    jnp.asarray(levels, jnp.float32), 1, max(_ROWS, 2**form.bits)
  )
  return jnp.broadcast_to(levels[..., None], (*levels.shape, tile_ops.LANES))


class QueryRows(NamedTuple):
  """Layout of a tile's query rows: the queries of a group's heads, in copies.

  The products of queries with each group of a vector's elements are separate
  rows, and so are the sums of values. Scores are the same in all copies.

  Fields:
    copies: Number of copies, that of the groups of keys or of values.
    copy_rows: Number of rows of a copy.
  """

  copies: int
  copy_rows: int

  @classmethod
  def of(
    cls,
    q: Shaped[Array, "B K G T H"],
    formats: tuple[CodeFormat, CodeFormat],
  ) -> QueryRows:
    """Rows for queries [B, K, G, T, H], rounded up to whole registers."""
    copies = max(x.groups for x in formats)
    multiple = _ROWS // math.gcd(copies, _ROWS)
    return cls(copies, -(-q.shape[2] * q.shape[3] // multiple) * multiple)

  @property
  def total(self) -> int:
    return self.copies * self.copy_rows

  def spread(
    self, x: Shaped[Array, " ..."], axis: int
  ) -> Shaped[Array, " ..."]:
    """Pad rows of queries to a copy's size and repeat them for each copy."""
    return jnp.concatenate(
      [pad_axis(x, axis, self.copy_rows)] * self.copies, axis
    )

  def merged(self, x: Float[Array, "N S"]) -> Float[Array, "N S"]:
    """Sum the copies; each copy gets the sum of all."""
    total = x
    for n in range(1, self.copies):
      total = total + pltpu.roll(x, n * self.copy_rows, 0)
    return total


def _queries(
  q: Float[Array, "B K R H"], form: CodeFormat, rows: QueryRows
) -> tuple[Float[Array, "B K N E"], Float[Array, "B K N 1"]]:
  """Queries as left operands of the codes, and the sums of their elements.

  A copy of the queries has zeros outside the elements of its group.
  """
  dims = arrangement(form).dims
  real = dims < form.dim
  spread_q = jnp.take(q, np.where(real, dims, 0), axis=3)
  parts, sums = [], []
  for n in range(rows.copies):
    in_group = real & (dims // form.group == n)
    parts.append(jnp.where(in_group, spread_q, jnp.zeros_like(spread_q)))
    group_q = q[..., n * form.group : (n + 1) * form.group].astype(jnp.float32)
    sums.append(jnp.sum(group_q, -1, keepdims=True))
  stack = lambda x: jnp.concatenate(
    [pad_axis(part, 2, rows.copy_rows) for part in x], 2
  )
  return stack(parts), stack(sums)


def _element_sums(
  acc: Float[Array, "B K N E"],
  zeros: Float[Array, "B K N 1"],
  form: CodeFormat,
  rows: QueryRows,
  bias: float,
) -> Float[Array, "B K R J"]:
  """Sums of values in element order, from the sums of codes and of zeros."""
  dims = arrangement(form).dims
  split_copies = lambda x: x.reshape(
    *x.shape[:2], rows.copies, rows.copy_rows, x.shape[3]
  )
  acc, zeros = split_copies(acc), split_copies(zeros)
  sums = acc[..., : dims.size]
  if bias:
    sums = sums - acc[..., dims.size : dims.size + 1]
  order = np.argsort(dims, kind="stable")
  order = order[dims[order] < form.dim]
  rows_per_element = arrangement(form).rows_per_element
  sums = jnp.take(sums, order, axis=4)
  sums = (
    jnp.sum(sums.reshape(*sums.shape[:4], form.dim, rows_per_element), -1)
    + zeros
  )
  return jnp.concatenate(
    [
      sums[:, :, n, :, n * form.group : (n + 1) * form.group]
      for n in range(form.groups)
    ],
    -1,
  )


class Scales(NamedTuple):
  """Scales, zeros and outliers that follow the codes of all heads of a tile.

  Fields:
    scale: Scales, float32 [heads * groups, keys]; None if they are per channel.
    zero: Zeros, float32 [heads * groups, keys], or None.
    outliers: Place, int32 [heads, keys], and value, float32, of each outlier;
      the value less the zero, in units of the scale. For per-channel scales see
      `of`.
    near_sink: Whether a vector is coded from the sink, bool [heads, keys]; or
      None.
  """

  scale: Float[Array, "_ keys"] | None
  zero: jax.Array | None
  outliers: tuple[tuple[jax.Array, jax.Array], ...] = ()
  near_sink: jax.Array | None = None

  @classmethod
  def of(
    cls,
    words: Ref,
    form: CodeFormat,
    heads: int,
    channels: Float[Array, "R C"] | None = None,
    near_channels: Float[Array, "R C"] | None = None,
  ) -> Scales:
    """Unpack the float16 numbers that follow the codes.

    All heads are unpacked at once: one row alone would fill a register.
    `channels`: decoded values of code 0, [heads, lanes], for a form with
    per-channel scales, whose outliers are differences from them.
    `near_channels`: decoded values of code 0 near the sink.
    """
    first = form.codes // _WORD

    count = form.outliers
    nbytes = 2 * form.groups * form.halves + 3 * count
    if not nbytes:
      return cls(None, None)
    num_words = -(-nbytes // _WORD)
    packed_words = jnp.concatenate(
      [words[0, 0, h, first : first + num_words, :] for h in range(heads)], 0
    )

    def halves(start: int, signed: bool) -> jax.Array:
      places = [start + n for n in range(form.groups)]
      rows = [h * num_words + n // 2 for h in range(heads) for n in places]
      packed = _take_rows(packed_words, rows)
      if form.groups == 1:
        packed = lax.shift_right_logical(packed, jnp.int32(16 * start))
      else:
        row = lax.broadcasted_iota(jnp.int32, packed.shape, 0)
        is_upper_half = (row % form.groups + start) % 2
        packed = lax.shift_right_logical(packed, is_upper_half * 16)
      return _half_to_float32(packed & 0xFFFF, signed)

    def byte(n: int) -> jax.Array:
      rows = [h * num_words + n // _WORD for h in range(heads)]
      shift = jnp.int32(n % _WORD * 8)
      return (
        lax.shift_right_logical(_take_rows(packed_words, rows), shift) & 0xFF
      )

    scale = halves(0, False) if form.halves else None
    zero = halves(form.groups, True) if form.halves == 2 else None
    if not count:
      return cls(scale, zero)
    if scale is not None:
      # A vector of equal numbers but for the outliers has a scale of 0.
      scale = jnp.maximum(scale, np.float32(_TINY))
    outliers, near_sink = [], None
    for n in range(count):
      start = 2 * form.groups * form.halves
      first_byte = start + count + 2 * n
      bits = byte(first_byte) | byte(first_byte + 1) << 8
      value, place = _half_to_float32(bits, True), byte(start + n)
      if form.by_channel:
        assert channels is not None
        level = _gather_places(channels, place)
        if form.sinks:
          assert near_channels is not None
          near_sink = bits & 1 != 0 if near_sink is None else near_sink
          level = jnp.where(
            near_sink, _gather_places(near_channels, place), level
          )
        outliers.append((place, value - level))
        continue
      assert scale is not None
      value = value if zero is None else value - zero
      outliers.append((place, value / scale))
    return cls(scale, zero, tuple(outliers), near_sink)

  def cleaned(self) -> tuple[Scales, Float[Array, " ..."]]:
    """Replace non-finite scales by 0, and mark them: NaN there, else 0.

    The marker has the shape of `scale`.
    """
    assert self.scale is not None
    zero = self.scale if self.zero is None else self.zero
    is_finite = tile_ops.finite(self.scale) & tile_ops.finite(zero)
    for _, x in self.outliers:
      is_finite = is_finite & tile_ops.finite(x)
    clean = lambda x: jnp.where(is_finite, x, jnp.zeros_like(x))
    outliers = tuple((place, clean(x)) for place, x in self.outliers)
    zero = None if self.zero is None else clean(zero)
    scales = Scales(clean(self.scale), zero, outliers)
    return scales, jnp.where(is_finite, 0.0, jnp.nan)


def _rows_of_head(
  x: Float[Array, "M S"], head: int, groups: int, rows: QueryRows
) -> Float[Array, "N S"]:
  """One head's rows of an array of all heads and groups, once per query."""
  row_groups = [head * groups + min(n, groups - 1) for n in range(rows.copies)]
  return _take_rows(x, [n for n in row_groups for _ in range(rows.copy_rows)])


def _take_rows(x: Shaped[Array, "M S"], index: list[int]) -> jax.Array:
  """Rows of `x` by index, a register at a time where they are together."""
  if index == list(range(x.shape[0])):
    return x
  blocks = []
  for n in range(0, len(index), _ROWS):
    part = index[n : n + _ROWS]
    first = part[0] // _ROWS * _ROWS
    register = x[first : first + _ROWS]
    if len({*part}) == 1:
      row = x[part[0] : part[0] + 1]
      blocks.append(jnp.broadcast_to(row, (len(part), x.shape[1])))
    elif len(part) == register.shape[0] == _ROWS and max(part) < first + _ROWS:
      blocks.append(_permute_rows(register, [i - first for i in part]))
    else:
      blocks += [x[i : i + 1] for i in part]
  return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 0)


def _permute_rows(x: Shaped[Array, "8 S"], index: list[int]) -> jax.Array:
  """Permute the rows of a register."""
  # A kernel may not capture constant arrays: this one is built from iota.
  row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
  source_row = jnp.zeros_like(row)
  for n, i in enumerate(index):
    source_row = jnp.where(row == n, i, source_row)
  return gather_rows(x, source_row)


def _repeat_row(x: Shaped[Array, "h S"], head: int, rows: int) -> jax.Array:
  """Repeat row `head` of `x` `rows` times."""
  return jnp.broadcast_to(x[head : head + 1], (rows, x.shape[1]))


def _gather_places(
  x: Shaped[Array, "h lanes"], place: Int[Array, "h S"]
) -> Shaped[Array, "h S"]:
  """Gather each row's elements at `place`, a register's lanes at a time."""
  lanes, blocks = tile_ops.LANES, []
  for first in range(0, place.shape[1], lanes):
    block_place = place[:, first : first + lanes]
    picked = None
    for start in range(0, x.shape[1], lanes):
      part = gather_rows(
        x[:, start : start + lanes], block_place & (lanes - 1), 1
      )
      picked = (
        part
        if picked is None
        else jnp.where(block_place >= start, part, picked)
      )
    blocks.append(picked)
  return jnp.concatenate(blocks, 1)


def gather_rows(
  x: Shaped[Array, "m S"], index: Int[Array, "n k"], axis: int = 0
) -> Shaped[Array, "n k"]:
  """Gather rows `index` of each column of `x`; with axis 1 columns of rows."""
  dims = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(axis,),
    start_index_map=(axis,),
    operand_batching_dims=(1 - axis,),
    start_indices_batching_dims=(1 - axis,),
  )
  return lax.gather(
    x,
    index[..., None],
    dims,
    (1, 1),
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )


def _half_to_float32(
  half: Int[Array, "h S"], signed: bool
) -> Float[Array, "h S"]:
  """Convert the 16 bits of float16 numbers, `signed` or not, to float32."""
  size = half & 0x7FFF
  bits = size << 13
  # The exponent of float32 begins 112 lower; infinities stay at its end.
  above = jnp.where(size >= 0x7C00, 224 << 23, 112 << 23)
  real = lax.bitcast_convert_type(bits + above, jnp.float32)
  # Subnormal numbers.
  small = size.astype(jnp.float32) * np.float32(2.0**-24)
  real = jnp.where(size < 0x400, small, real)
  if not signed:
    return real
  bits = lax.bitcast_convert_type(real, jnp.int32) | (half & 0x8000) << 16
  return lax.bitcast_convert_type(bits, jnp.float32)


class Codes(NamedTuple):
  """Codes of a tile's keys or values.

  Fields:
    words: Reference to the codes, int32 [1, 1, heads, X / 4, keys].
    table: Reference to the levels, [heads or 1, M, 128], or None.
    form: Format of the codes.
    outliers: Outliers of `Scales`, which replace levels.
    spots: Outliers for pairs of bfloat16; empty in float32.
  """

  words: Ref
  table: Ref | None
  form: CodeFormat
  outliers: tuple[tuple[jax.Array, jax.Array], ...] = ()
  spots: tuple[Any, ...] = ()

  @classmethod
  def of(
    cls,
    words: Ref,
    table: Ref | None,
    form: CodeFormat,
    outliers: tuple[tuple[Array, Array], ...],
    dtype: DTypeLike,
  ) -> Codes:
    """Codes for products of `dtype`."""
    if dtype != jnp.bfloat16:
      return cls(words, table, form, outliers)
    spots = tuple(Spot.of(form, table, *outlier) for outlier in outliers)
    return cls(words, table, form, spots=spots)

  def numbers(
    self, head: int, lanes: slice, dtype: DTypeLike
  ) -> Shaped[Array, "_ _"]:
    """Decode elements of a head, unscaled and with the bias, [E, keys]."""
    if self.form.looked_up:
      return _levels(self, head, lanes, dtype)
    return _integers(self, head, lanes, dtype)

  def load(
    self, head: int, first: int, words: int, lanes: slice
  ) -> Int[Array, "_ _"]:
    """Load words of a head."""
    packed = self.words[0, 0, head, first : first + words, lanes]
    # A register of bytes has two rows of words. The casts make registers of
    # four before the codes are unpacked, not after.
    return pltpu.bitcast(pltpu.bitcast(packed, jnp.bfloat16), jnp.int32)


def _levels(
  codes: Codes, head: int, lanes: slice, dtype: DTypeLike
) -> jax.Array:
  """Look up the levels of a head's codes, [E, keys]."""
  if dtype != jnp.bfloat16:
    pieces = _float32_levels(codes, head, lanes)
    packed = zip(pieces[::2], pieces[1::2], strict=True)
    size = pieces[0].shape[1]
    return jnp.concatenate(
      [jnp.stack(x, 1).reshape(-1, size) for x in packed], 0
    )
  form = codes.form
  parts, signs = _look_up_bits(codes, head, lanes, dtype)
  numbers = []
  rows = parts[0][0].shape[0]
  spots = [spot.of_head(head, lanes, rows) for spot in codes.spots]
  for field_index, (low, high) in enumerate(parts):
    packed = low | high
    if signs is not None:
      # The highest bits of both halves of a word.
      shift = arrangement(form).fields[field_index].shift
      packed = packed ^ ((signs << (15 - shift)) & -0x7FFF8000)
    for spot in spots:
      packed = spot.put(form, field_index, packed)
    numbers.append(pltpu.bitcast(packed, jnp.bfloat16))
  return jnp.concatenate(numbers, 0)


def _float32_levels(codes: Codes, head: int, lanes: slice) -> list[jax.Array]:
  """Levels in float32, a list of [R, S].

  Each field has two: of the lower halves of words, then of the upper ones.
  """
  form, pieces = codes.form, []
  parts, signs = _look_up_bits(codes, head, lanes, jnp.float32)
  outliers = [
    [x[head : head + 1, lanes] for x in outlier] for outlier in codes.outliers
  ]
  for field_index, halves in enumerate(parts):
    rows = halves[0].shape[0]
    dims = arrangement(form).dims.reshape(-1, rows, 2)[field_index]
    shift = arrangement(form).fields[field_index].shift
    row = lax.broadcasted_iota(jnp.int32, halves[0].shape, 0) * _WORD
    for half, x in enumerate(halves):
      if signs is not None:
        x = x ^ (signs << (31 - 16 * half - shift)) & -0x80000000
      x = lax.bitcast_convert_type(x, jnp.float32)
      for place, value in outliers:
        x = jnp.where(place == row + int(dims[0, half]), value, x)
      pieces.append(x)
  return pieces


def _look_up_bits(
  codes: Codes, head: int, lanes: slice, dtype: DTypeLike
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array | None]:
  """Look up the bits of the levels of codes.

  Returns:
    pairs: Levels of each field for the lower and the upper halves of words, at
      the bits where a pair of bfloat16 has them, or as float32.
    signs: Bits of the words that negate the levels, if the table is the upper
      half of mirrored levels; else None.
  """
  form, half = codes.form, dtype == jnp.bfloat16
  nibbles = _nibbles(codes, head, lanes)
  size = nibbles[0].shape[1]
  assert codes.table is not None
  levels = codes.table[head if codes.table.shape[0] > 1 else 0]
  # Bits in the lower and in the upper half of a word, or float32 in both.
  lower = upper = lax.bitcast_convert_type(
    levels.astype(dtype).astype(jnp.float32), jnp.int32
  )
  if half:
    lower = lax.shift_right_logical(upper, jnp.int32(16))
  # Repeat the levels over as many lanes as there are codes.
  lower, upper = (tile_ops.widened(x, size) for x in (lower, upper))
  # Where 16 levels are symmetric, the upper half is the table.
  signs = None
  if form.bits == 4 and form.mirrored:
    lower, upper = lower[_ROWS:], upper[_ROWS:]
    (words,) = nibbles
    signs = lax.shift_right_logical(~words, jnp.int32(3)) & 0x11111111
    nibbles = [words ^ ((signs << 3) - signs)]

  def look_up(table: jax.Array, words: jax.Array, shift: int) -> jax.Array:
    shifted = (
      lax.shift_right_logical(words, jnp.int32(shift)) if shift else words
    )
    low = shifted & (_ROWS - 1)
    picked = gather_rows(table[:_ROWS], low)
    if form.bits == 4 and signs is None:
      high_levels = gather_rows(table[_ROWS:], low)
      picked = jnp.where(shifted & _ROWS != 0, high_levels, picked)
    return picked

  parts = []
  for field in arrangement(form).fields:
    words = nibbles[field.odd]
    pieces = []
    for row in range(0, words.shape[0], _ROWS):
      register = words[row : row + _ROWS]
      pair = (
        look_up(lower, register, field.shift),
        look_up(upper, register, field.shift + 16),
      )
      pieces.append(pair)
    low, high = (jnp.concatenate(x, 0) for x in zip(*pieces, strict=True))
    parts.append((low, high))
  return parts, signs


class Spot(NamedTuple):
  """An outlier of each vector, to be placed into pairs of bfloat16.

  Fields:
    place: The number of its field times 256, plus its row there, int32 [heads,
      keys].
    bits: Bits that differ from level 0, its code's, int32 [heads, keys].
  """

  place: jax.Array
  bits: jax.Array

  @classmethod
  def of(
    cls,
    form: CodeFormat,
    table: Ref,
    place: Int[Array, "heads keys"],
    kept: Float[Array, "heads keys"],
  ) -> Spot:
    """Locate outliers of all heads at once: one row fills a register."""
    heads, size = place.shape
    width = form.parts[0].width
    part = jnp.zeros_like(place)
    for first in range(width, form.dim, width):
      part = part + (place >= first).astype(jnp.int32)
    dim_in_part = place - part * width
    first_level = lambda h: table[h if table.shape[0] > 1 else 0][:1]
    level = jnp.concatenate([first_level(h) for h in range(heads)], 0)
    half = lambda x: lax.bitcast_convert_type(
      x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32
    )
    bits = half(kept) ^ half(tile_ops.widened(level, size))
    lower = lax.shift_right_logical(bits, jnp.int32(16))
    return cls(
      (2 * part + (dim_in_part & 1)) << 8 | dim_in_part >> 2,
      jnp.where(dim_in_part & 2 != 0, bits, lower),
    )

  def of_head(self, head: int, lanes: slice, rows: int) -> Spot:
    """Repeat the outliers of a head for each row."""
    return Spot(*(_repeat_row(x[:, lanes], head, rows) for x in self))

  def put(
    self, form: CodeFormat, field: int, both: Int[Array, "R S"]
  ) -> Int[Array, "R S"]:
    """Replace the level of pairs of bfloat16 by the outlier where it is."""
    first = int(
      arrangement(form).dims.reshape(-1, both.shape[0], 2)[field, 0, 0]
    )
    width = form.parts[0].width
    field_number = 2 * (first // width) + first % width
    row = lax.broadcasted_iota(jnp.int32, both.shape, 0) | field_number << 8
    return both ^ jnp.where(row == self.place, self.bits, jnp.int32(0))


def _nibbles(codes: Codes, head: int, lanes: slice) -> list[jax.Array]:
  """A head's codes in 4 bits each, eight to a word.

  Codes of fewer than 4 bits make two words: the even and the odd ones of a
  byte's four codes.
  """
  form = codes.form
  words = [
    codes.load(head, part.first // _WORD, part.width // _WORD, lanes)
    for part in form.parts
  ]
  if form.bits == 4:
    return words
  low_bits = words[0]
  even, odd = low_bits & 0x33333333, (low_bits >> 2) & 0x33333333
  if form.bits == 3:
    # The third bits: half as many words, with the bits of two rows each.
    high_bits = jnp.concatenate([words[1], words[1] >> 1], 0)
    even = even | (high_bits & 0x11111111) << 2
    odd = odd | high_bits & 0x44444444
  return [even, odd]


def _integers(
  codes: Codes, head: int, lanes: slice, dtype: DTypeLike
) -> jax.Array:
  """Decode codes that are integers."""
  loaded: dict[int, jax.Array] = {}
  parts = []
  for field in arrangement(codes.form).fields:
    if field.first not in loaded:
      loaded[field.first] = codes.load(head, field.first, field.words, lanes)
    words = loaded[field.first]
    if field.shift > 0:
      words = lax.shift_right_logical(words, jnp.int32(field.shift))
    elif field.shift < 0:
      words = words << -field.shift
    words = (words & field.mask) | _BIAS_BITS
    parts.append(pltpu.bitcast(words, jnp.bfloat16))
  numbers = jnp.concatenate(parts, 0)
  if dtype == jnp.bfloat16:
    return numbers
  return numbers.astype(dtype) - _BIAS


def _kernel(
  scores: Scores,
  mask: jax.tree_util.PyTreeDef,
  structure: PyTree,
  formats: tuple[CodeFormat, CodeFormat],
  rows: QueryRows,
  rotation_plan: Turns | None,
  of_channels: tuple[bool, ...],
  shared: bool,
  sloped: bool,
  looked_up: tuple[bool, ...],
  *refs: Any,
) -> None:
  count = 1 + structure.num_leaves
  scalars = jax.tree.unflatten(structure, refs[1:count])
  q_ref, sums_ref, *remaining = refs[count:]
  optional: list[Any] = [
    remaining.pop(0) if present else None for present in of_channels
  ]
  frequencies, zeros, outlying, channels = optional
  q_at, k_at, *remaining = remaining
  slope_ref = remaining.pop(0) if sloped else None
  k_ref = remaining.pop(0)
  v_ref = k_ref if shared else remaining.pop(0)
  k_table, *own_table = (
    remaining.pop(0) if present else None for present in looked_up
  )
  v_table = k_table if shared else own_table[0]
  acc_out, zero_out, m_out, l_out, acc, zero_ref, m_ref, l_ref, *remaining = (
    remaining
  )
  tables: Any = remaining[0] if remaining else None
  k_format, v_format = formats
  b, i = pl.program_id(0), pl.program_id(2)
  word = scalars.words[i]
  heads, size = k_ref.shape[2], k_ref.shape[4]
  dtype = q_ref.dtype
  bias = _bias(v_format, dtype)
  pieces = [slice(n, min(size, n + _PIECE)) for n in range(0, size, _PIECE)]

  @pl.when(word & tile_ops.FIRST != 0)
  def _() -> None:
    acc[...] = jnp.zeros_like(acc)
    zero_ref[...] = jnp.zeros_like(zero_ref)
    m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
    l_ref[...] = jnp.zeros_like(l_ref)

  def tile(masked: bool) -> None:
    columns = Coords(k_at[0, 0:1, :], k_at[0, 1:2, :])
    row_at = Coords(q_at[0, :, 0:1], q_at[0, :, 1:2])
    allowed: Any = None
    if masked:
      leaf_of_example = lambda ref: ref[0 if ref.shape[0] == 1 else b]
      leaves = [leaf_of_example(ref) for ref in scalars.leaves]
      allowed = visible(jax.tree.unflatten(mask, leaves), row_at, columns)
    distances: Any = None
    if slope_ref is not None:
      distances = distance(row_at.pos, columns.pos)
    k_words, v_words = (ref.bitcast(jnp.int32) for ref in (k_ref, v_ref))
    channel_row = lambda n: rotated_codes.as_numbers(channels[0, n])
    k_scales = Scales.of(
      k_words,
      k_format,
      heads,
      None if channels is None else channel_row(0),
      channel_row(3) if k_format.sinks else None,
    )
    near_sink: Any = k_scales.near_sink
    factors: Any = None
    if k_format.sinks:
      factors = jnp.where(near_sink, channel_row(4)[:, :1], np.float32(1))
    v_scales = k_scales if shared else Scales.of(v_words, v_format, heads)
    nan_flags: Any = None
    if masked:
      v_scales, nan_flags = v_scales.cleaned()
    # Outliers of per-channel keys are added to the products instead.
    inside = k_scales.outliers if rotation_plan is None else ()
    k_codes = Codes.of(k_words, k_table, k_format, inside, dtype)
    v_codes = Codes.of(v_words, v_table, v_format, v_scales.outliers, dtype)
    # The bias adds a multiple of the scale to a product.
    k_zero = k_scales.zero
    if _bias(k_format, dtype):
      assert k_zero is not None and k_scales.scale is not None
      k_zero = k_zero - k_scales.scale * (
        _BIAS * arrangement(k_format).rows_per_element
      )
    rotated_zeros = None
    if frequencies is not None:
      for lanes in pieces:
        rotated_codes.fill(tables, frequencies[...], columns.pos, lanes, dtype)
      zero_queries = zeros[0].reshape(-1, zeros.shape[3])
      rotated_zeros = tile_ops.dot(
        zero_queries, tables[...].astype(dtype), tile_ops.NN
      )
    # Place, cosine (0) or sine (1), and factor of the queries, per outlier.
    outlier_terms = []
    if channels is not None:
      units, fractions = (
        channels[0, 1],
        rotated_codes.as_numbers(channels[0, 2]),
      )
      for place, excess in k_scales.outliers:
        frequency = Frequencies(
          _gather_places(units, place), _gather_places(fractions, place)
        )
        cos_sin = rotated_codes.cos_sin(frequency, columns.pos, dtype)
        outlier_terms += [(place, n, excess * x) for n, x in enumerate(cos_sin)]

    def of_keys(head: int, lanes: slice) -> jax.Array:
      if rotation_plan is None:
        return k_codes.numbers(head, lanes, dtype)
      levels = _float32_levels(k_codes, head, lanes)
      return rotated_codes.rotated(rotation_plan, levels, tables, lanes, dtype)

    def added(head: int) -> Iterator[jax.Array]:
      """Yield what per-channel scales add to the products of a head."""
      assert rotation_plan is not None
      if rotated_zeros is not None:
        rows_per_head = rotated_zeros.shape[0] // heads
        zero_products = rotated_zeros[
          head * rows_per_head : (head + 1) * rows_per_head
        ]
        if k_format.sinks:
          row_near_sink = (
            _repeat_row(near_sink.astype(jnp.int32), head, rows.total) != 0
          )
          zero_products = jnp.where(
            row_near_sink,
            zero_products[rows.total :],
            zero_products[: rows.total],
          )
        yield zero_products
      if None in rotation_plan.slots:
        still_products = sums_ref[0, head]
        if k_format.sinks:
          row_near_sink = (
            _repeat_row(near_sink.astype(jnp.int32), head, rows.total) != 0
          )
          still_products = jnp.where(
            row_near_sink, still_products[:, 1:], still_products[:, :1]
          )
        yield still_products
      for place, n, x in outlier_terms:
        row_place = _repeat_row(place, head, rows.total)
        yield (
          _gather_places(outlying[0, head, n], row_place) * x[head : head + 1]
        )

    all_lanes = lambda x: jnp.broadcast_to(x, m_ref.shape[1:])
    products, weights = [], []
    for head in range(heads):
      dot = jnp.concatenate(
        [
          tile_ops.dot(q_ref[0, head], of_keys(head, lanes), tile_ops.NN)
          for lanes in pieces
        ],
        1,
      )
      head_rows = functools.partial(
        _rows_of_head, head=head, groups=k_format.groups, rows=rows
      )
      if rotation_plan is None:
        assert k_scales.scale is not None
        dot = dot * head_rows(k_scales.scale)
      else:
        if k_format.sinks:
          dot = dot * factors[head : head + 1]
        dot = functools.reduce(jnp.add, added(head), dot)
      if k_zero is not None:
        dot = dot + sums_ref[0, head] * head_rows(k_zero)
      products.append(rows.merged(dot))
    for head, dot in enumerate(products):
      slope = None if slope_ref is None else slope_ref[head]
      s, c = tile_ops.power(scores, dot, slope, lambda: distances)
      head_rows = functools.partial(
        _rows_of_head, head=head, groups=v_format.groups, rows=rows
      )
      if masked:
        s = jnp.where(allowed, s + rows.merged(head_rows(nan_flags)), -jnp.inf)
      old_m = m_ref[head, :, 0:1]
      m = jnp.maximum(old_m, jnp.max(s, axis=1, keepdims=True) * c)
      safe = finite_max(m)
      p = jnp.exp2(s * c - safe)
      weight = jnp.exp2(old_m - safe)
      l_ref[head] = l_ref[head] * weight + _by_lane(p)
      m_ref[head] = all_lanes(m)
      if v_scales.zero is not None:
        zero_sum = _by_lane(p * head_rows(v_scales.zero))
        zero_ref[head] = zero_ref[head] * weight + zero_sum
      assert v_scales.scale is not None
      weights.append(((p * head_rows(v_scales.scale)).astype(dtype), weight))
    for head, (scaled, weight) in enumerate(weights):
      total = acc[head] * weight
      for lanes in pieces:
        numbers = v_codes.numbers(head, lanes, dtype)
        if bias:
          ones = jnp.full((_HALF_ROWS, numbers.shape[1]), bias, dtype)
          numbers = jnp.concatenate([numbers, ones], 0)
        sums = tile_ops.dot(scaled[:, lanes], numbers, tile_ops.NT)
        total = total + pad_axis(sums, 1, acc.shape[2])
      acc[head] = total

  # The last tile may end after the last key, as in `decode_tpu`.
  pl.when(word & tile_ops.MASKED != 0)(lambda: tile(True))
  pl.when(word & tile_ops.FULL != 0)(lambda: tile(False))

  @pl.when(word & tile_ops.LAST != 0)
  def _() -> None:
    acc_out[0] = acc[...]
    m_out[0] = m_ref[:, :, 0:1] * (1 / tile_ops.LOG2_E)
    lane_sum = lambda ref: jnp.sum(ref[...], axis=2, keepdims=True)
    zero_out[0], l_out[0] = lane_sum(zero_ref), lane_sum(l_ref)


def _by_lane(x: Float[Array, "N S"]) -> Float[Array, "N 128"]:
  """Sum the columns that are in the same lane."""
  size = x.shape[1]
  if size % tile_ops.LANES:
    x = pad_axis(x, 1, tile_ops.lanes(size))
  parts = [x[:, n : n + tile_ops.LANES] for n in range(0, size, tile_ops.LANES)]
  return functools.reduce(jnp.add, parts)

"""A kernel for TPU by which a few queries read the codes of a cache.

Guarantees: equals `views.decode_attention` wherever it serves (`decline` says
where it does not), up to the rounding of weights; forward only.
Cost: as `decode_tpu`, of the bytes of the codes: they are unpacked in
registers, and no decoded tile is in memory.
Memory: VMEM only: two tiles of codes, and the numbers of a head.

Keys with scales of channels are rotated in between, see `rotated_codes`.

Tokens are in the lanes, so that a head's codes [X, keys] become the right
operand of the product of queries and keys with a shift and a mask of 32 bits:
two codes are the low bits of two bfloat16 numbers, 128 + code. What is added
that way and the scale and zero of a group of each token are no work a number:

  q . k = sum_groups scale (q . (128 + code) - 128 sum(q)) + zero sum(q)
  p . v = (p scale) . (128 + code) - 128 sum(p scale) + sum(p zero)

The queries of a group's numbers are rows of their own, with zeros elsewhere;
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
from ringjax.ops.attention.code_format import CodeFormat
from ringjax.ops.attention.kernels import declined, rotated_codes, tile_ops
from ringjax.ops.attention.kernels.decoder_tpu import DecoderTPU
from ringjax.ops.attention.kernels.rotated_codes import RotatedRows, Turns
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import ScoreArgs, Scores, Terms
from ringjax.ops.attention.views import EncodedView, KVView, UnrotatedView
from ringjax.ops.mask import Coords, distance, visible
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial, finite_max
from ringjax.ops.turns import Frequencies
from ringjax.parallel import collectives

# Of a tile's codes: see `decode_tpu`; numbers of a head are in VMEM too.
_TILE_BYTES = 1 << 20
_MOST = 1024
# Rows of a register of float32, and of one of bfloat16.
_ROWS, _HALF_ROWS = 8, 16
# Two bfloat16 numbers 128, into whose low bits codes go.
_BIAS, _BIAS_BITS = 128.0, 0x43004300
_WORD = 4
# The smallest float16 number.
_TINY = 2.0**-24
# Numbers of a register, and cycles that as many codes take, about: integers by
# their bits, and codes of levels.
_REGISTER = 1024
_CYCLES = (
  {2: 1.3, 3: 1.6, 4: 1.0, 8: 1.8},
  {2: 1.2, 3: 1.3, 4: 1.8},
)
# The same of what is done beside: for an outlier of each vector, and to keys
# with scales of channels.
_OUTLIER, _CHANNELS = 0.5, 1.3
# Keys whose codes are in registers at a time.
_PIECE = 256


class Field(NamedTuple):
  """Codes of which a shift and a mask make bfloat16 numbers.

  Fields:
    first: the first word of 4 bytes.
    words: how many.
    shift: to the right, of the words; negative: to the left.
    mask: of both halves of a word.
  """

  first: int
  words: int
  shift: int
  mask: int


class Lookup(NamedTuple):
  """Codes that are numbers of rows of a table of levels.

  Fields:
    odd: of which of two words of codes of 4 bits, see `_nibbles`.
    shift: to the right, of the lower of two codes; the other is 16 bits up.
  """

  odd: int
  shift: int


class Arrangement(NamedTuple):
  """A vector's codes as rows of a tile.

  Fields:
    fields: which make the rows, two of each word.
    dims: int [E], of which number each row is a summand; those that are at
      least the vector's length are of none.
  """

  fields: tuple[Any, ...]
  dims: np.ndarray

  @property
  def many(self) -> int:
    """Of how many rows a number is the sum."""
    return self.dims.size // np.unique(self.dims).size


@functools.cache
def arrangement(form: CodeFormat) -> Arrangement:
  """The rows of a tile of codes."""
  fields: list[Any] = []
  dims = []
  if form.looked_up:
    # See `_nibbles`.
    width = form.parts[0].width
    words = _WORD * np.arange(width // _WORD)[:, None]
    odds = (0,) if form.bits == 4 else (0, 1)
    for odd in odds:
      for byte in (0, 1):
        for n in (0, 1):
          fields.append(Lookup(odd, 8 * byte + 4 * n))
          of_word = words + np.array([byte, byte + 2])
          dims.append((of_word + (n * len(odds) + odd) * width).reshape(-1))
    return Arrangement(tuple(fields), np.concatenate(dims))
  for part in form.parts:
    words = part.width // _WORD
    # A bfloat16 number has 7 bits behind its first one. The highest of 8 bits
    # is a number of its own: in the exponent it makes 256 of 128.
    masks = ((1 << part.size) - 1) << part.low
    each = (0x7F, 0x80) if part.size == 8 else (masks,)
    for byte in (0, 1):
      for n in range(8 // part.size):
        for mask in each:
          shift = 8 * byte + part.size * n - part.low
          fields.append(
            Field(part.first // _WORD, words, shift, mask | mask << 16)
          )
          of_word = _WORD * np.arange(words)[:, None] + [byte, byte + 2]
          dims.append((of_word + n * part.width).reshape(-1))
  return Arrangement(tuple(fields), np.concatenate(dims))


class DecodeCodesTPU(DecoderTPU):
  """A Pallas kernel for TPU that reads the codes of a cache."""

  def tile(
    self, q: Float[Array, "B K G T H"], keys: EncodedView | UnrotatedView
  ) -> tuple[int, int]:
    """(heads, keys) of a tile for queries [B, K, G, T, H]."""
    keys, _ = _opened(keys)
    row = sum(x.shape[3] for x in _arrays(keys))
    return self.tile_of(q, keys.k.shape[4], row, _TILE_BYTES, _MOST)

  def _vmem(
    self, q: jax.Array, keys: EncodedView, rotation: Rotation | None
  ) -> int:
    """Bytes of vector memory that a step takes, about."""
    heads, kb = self.tile(q, keys)
    of_k, of_v = _formats(keys)
    row = sum(x.shape[3] for x in _arrays(keys))
    rows = QueryRows.of(q, (of_k, of_v)).total
    h, j = (tile_ops.lanes(_columns(x, q.dtype)) for x in (of_k, of_v))
    stats = 3 * tile_ops.LANES
    # What comes and goes has two places, one for the next step.
    moved = 2 * heads * (kb * row + 4 * rows * (h + j + stats + tile_ops.LANES))
    kept = 4 * heads * rows * (j + stats)
    numbers = 2 * _PIECE * (h + j)
    scores = 4 * 4 * rows * kb
    # Cosines and sines of positions, and products with them.
    tables = 0
    if of_k.by_channel:
      turns = _rotated_rows(of_k, rotation).turns
      tables = 4 * 3 * turns.count * kb + 4 * heads * rows * kb
      numbers += 4 * _PIECE * turns.products
    return moved + kept + numbers + scores + tables

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Why it does not serve this call, or None."""
    view, rotation = _opened(keys)
    if not isinstance(view, EncodedView):
      return f"{type(view).__name__}: it reads EncodedView"
    if rotation is not None:
      form = view.decoders[0].format
      if form is None or not form.by_channel:
        return f"{view.decoders[0].codec}: keys before their rotation"
      if rotation.by_row:
        return "keys that rotate by the lengths of their rows"
      if rotation.after is not None:
        return "keys with a norm behind their rotation"
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
    """The partial of queries [B, K, G, T, H] over the keys of `context.k`."""
    declined.check(self, q, keys, args)
    keys, rotation = _opened(keys)
    assert isinstance(keys, EncodedView)
    context, slopes = args.context, args.terms.slopes
    b, kv, g, t, _ = q.shape
    length = keys.k.shape[4]
    of_k, of_v = _formats(keys)
    heads, kb = self.tile(q, keys)
    columns = -(-length // kb)
    at = Coords(*(pad_axis(c, 1, columns * kb) for c in context.k))
    kinds = tile_kinds(context.mask, context.q, at, t, kb)
    steps = tile_ops.TileSteps.of(kinds)
    rows = QueryRows.of(q, (of_k, of_v))
    flat = q.reshape(b, kv, g * t, -1)
    turns, of_channels, angles = None, _OfChannels(), []
    if of_k.by_channel:
      turns = _rotated_rows(of_k, rotation).turns
      if turns.count:
        angles = [pltpu.VMEM((2 * turns.count, kb), jnp.float32)]
      by_group, sums, of_channels = _by_channel(
        flat, of_k, rotation, keys.constants[0], rows, heads
      )
    else:
      by_group, sums = _queries(flat, of_k, rows)
    row_at = jnp.stack(tile_ops.by_row(context.q, q.shape), 2)
    shared = keys.v is keys.k
    wide, bias = _columns(of_v, q.dtype), _bias(of_v, q.dtype)
    operands = [
      by_group,
      sums,
      *(x for x in of_channels if x is not None),
      rows.spread(row_at, 1),
      tile_ops.pair(at, b),
      *(
        []
        if slopes is None
        else [rows.spread(tile_ops.slopes_by_row(slopes, t), 1)[..., None]]
      ),
    ]
    codes = len(operands)
    operands += _arrays(keys)
    tables = [
      None if not form.looked_up else _table(form, constants)
      for form, constants in zip(
        (of_k, of_v)[: 1 if shared else 2], keys.constants, strict=False
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
    of_heads = lambda bi, ki, i, *_: (bi, ki, 0, 0)
    of_keys = lambda bi, ki, i, layer, words, *_: (
      layer[0], bi, ki, 0, column(i, words),
    )  # fmt: skip
    in_specs = [
      *(pl.BlockSpec((1, heads, *x.shape[2:]), of_heads) for x in operands[:2]),
      *of_channels.specs(heads, rows.total),
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
      pl.BlockSpec((1, 1, heads, x.shape[3], kb), of_keys)
      for x in _arrays(keys)
    ]
    for x in operands[codes + len(_arrays(keys)) :]:
      # Of each head, or of all.
      own = x.shape[0] == kv
      in_specs.append(
        pl.BlockSpec(
          (heads if own else 1, *x.shape[1:]),
          lambda bi, ki, i, *_, own=own: (ki if own else 0, 0, 0),
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
        (of_k, of_v),
        rows,
        turns,
        tuple(x is not None for x in of_channels),
        shared,
        slopes is not None,
        tuple(x is not None for x in tables),
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1 + len(leaves),
        grid=(b, kv // heads, steps.count),
        in_specs=in_specs,
        out_specs=[
          pl.BlockSpec((1, heads, rows.total, n), of_heads)
          for n in (wide, 1, 1, 1)
        ],
        scratch_shapes=[
          pltpu.VMEM((heads, rows.total, n), jnp.float32)
          for n in (wide, *(tile_ops.LANES,) * 3)
        ]
        + angles,
      ),
      out_shape=[out_type(n) for n in (wide, 1, 1, 1)],
      compiler_params=self.params(
        self._vmem(q, keys, rotation), "parallel", "parallel", "arbitrary"
      ),
      cost_estimate=self._cost(q, keys),
      interpret=self.interpret,
      name="ringjax_decode_codes",
    )(layer, *leaves, *operands)
    back = lambda x, *last: x[:, :, : g * t].reshape(b, kv, g, t, *last)
    acc = back(_in_order(acc, zeros, of_v, rows, bias), of_v.dim)
    return Partial(acc, back(m), back(l))

  def _cost(self, q: jax.Array, keys: EncodedView) -> pl.CostEstimate:
    """It waits for the memory or for the vector unit."""
    _, b, kv, _, length = keys.k.shape
    each = b * kv * length
    nbytes = each * sum(x.shape[3] for x in _arrays(keys))
    cycles = each * sum(decode_cycles(x) * x.dim for x in _formats(keys))
    return self.cost(nbytes, q.size // q.shape[4] * length, cycles)


def decode_cycles(form: CodeFormat) -> float:
  """Cycles of a core that a number of such codes takes, about."""
  beside = _CHANNELS if form.by_channel else _OUTLIER * form.outliers
  return (_CYCLES[form.looked_up][form.bits] + beside) / _REGISTER


def _opened(keys: KVView) -> tuple[Any, Rotation | None]:
  """The stored keys, and what rotates them where they are read."""
  if isinstance(keys, UnrotatedView):
    return keys.stored, keys.rotation
  return keys, None


def _rotated_rows(form: CodeFormat, rotation: Rotation | None) -> RotatedRows:
  """Where the numbers of keys with scales of channels are, see `_pieces`."""
  made = arrangement(form)
  dims = made.dims.reshape(len(made.fields), -1, 2)
  pieces = np.moveaxis(dims, 2, 1).reshape(2 * len(made.fields), -1)
  return RotatedRows.of(pieces, rotation, form.dim)


class _OfChannels(NamedTuple):
  """What a kernel reads beside, of keys with scales of channels.

  Fields:
    frequencies: of cosines and sines, int32 [2, count, 128], see
      `RotatedRows.frequencies`; None where no key turns.
    zeros: [B, K, N, 2 count], queries times zeros, which they multiply; of
      codes with a sink [B, K, 2 N, 2 count], behind these times the sink; or
      None.
    queries: [B, K, 2, N, lanes], what an outlier's cosine and sine multiply;
      None where there are none.
    channels: int32 [K / heads, 3, heads, lanes], of each number of a head the
      bits of what a code 0 stands for, and of the fields of its frequency; of
      codes with a sink [K / heads, 5, heads, lanes], behind these what a code 0
      stands for near it, and the factor; or None.
  """

  frequencies: Any = None
  zeros: Any = None
  queries: Any = None
  channels: Any = None

  def specs(self, heads: int, rows: int) -> list[pl.BlockSpec]:
    """Of those that are there, for tiles of so many heads and their rows."""
    found = []
    if self.frequencies is not None:
      found += [
        pl.BlockSpec(self.frequencies.shape, lambda *_: (0, 0, 0)),
        pl.BlockSpec(
          (1, heads, *self.zeros.shape[2:]),
          lambda bi, ki, *_: (bi, ki, 0, 0),
        ),
      ]
    if self.queries is not None:
      found += [
        pl.BlockSpec(
          (1, heads, *self.queries.shape[2:]),
          lambda bi, ki, *_: (bi, ki, 0, 0, 0),
        ),
        pl.BlockSpec(
          (1, *self.channels.shape[1:]), lambda bi, ki, *_: (ki, 0, 0, 0)
        ),
      ]
    return found


def _by_channel(
  q: Float[Array, "B K R H"],
  form: CodeFormat,
  rotation: Rotation | None,
  constants: PyTree,
  rows: QueryRows,
  heads: int,
) -> tuple[Float[Array, "B K N E"], Float[Array, "B K N _"], _OfChannels]:
  """Queries as `_queries` has them, and what else is of channels.

  Of codes with a sink the sums are [B, K, N, 2]: of zeros and of the sink.
  """
  scale, zero, *of_sink, levels = (
    jnp.asarray(x, jnp.float32) for x in constants
  )
  held = _rotated_rows(form, rotation)
  # Copies are of groups, of which there is one: the others are zeros.
  fill = lambda found: type(found)(*(pad_axis(x, 2, rows.total) for x in found))
  found = fill(held.queries(q, rotation, scale, zero))
  if form.sinks:
    near = fill(held.queries(q, rotation, scale, of_sink[0]))
    found = found._replace(
      zeros=jnp.concatenate([found.zeros, near.zeros], 2),
      rest=jnp.concatenate([found.rest, near.rest], 3),
    )
  frequencies = zeros = queries = channels = None
  if held.turns.count:
    assert rotation is not None
    frequencies = held.frequencies(rotation)
    zeros = found.zeros
  if form.outliers:
    lanes = tile_ops.lanes(form.dim)
    both = jnp.stack([found.straight, found.crossed], 2)
    queries = pad_axis(both, 4, lanes)
    units, rest = held.each(rotation, form.dim)
    level = rotated_codes.as_words(levels[:, :1] * scale + zero)
    turn = (units, rotated_codes.as_words(rest))
    turn = (jnp.broadcast_to(x[None], zero.shape) for x in turn)
    parts = [level, *turn]
    if form.sinks:
      sink, factor = of_sink
      factor = jnp.broadcast_to(factor, sink.shape)
      near_level = levels[:, :1] * scale * factor + sink
      parts += [rotated_codes.as_words(x) for x in (near_level, factor)]
    each = jnp.stack(parts, 1)
    each = each.reshape(-1, heads, len(parts), form.dim)
    channels = pad_axis(jnp.swapaxes(each, 1, 2), 3, lanes)
  return (
    found.rows,
    found.rest,
    _OfChannels(frequencies, zeros, queries, channels),
  )


def _arrays(keys: EncodedView) -> tuple[Any, ...]:
  """Those of codes, each once."""
  return tuple({id(x): x for x in (keys.k, keys.v)}.values())


def _formats(keys: EncodedView) -> tuple[CodeFormat, CodeFormat]:
  """Of keys and values."""
  k, v = keys.decoders
  of_k, of_v = k.format, (k if keys.v is keys.k else v).format
  assert of_k is not None and of_v is not None
  return of_k, of_v


def _bias(form: CodeFormat, dtype: DTypeLike) -> float:
  """What is added to a code: float32 has room to take it away."""
  return _BIAS if dtype == jnp.bfloat16 and not form.looked_up else 0.0


def _columns(form: CodeFormat, dtype: DTypeLike) -> int:
  """Of the sums of values: those of the codes' rows, and of the bias."""
  return arrangement(form).dims.size + (_HALF_ROWS if _bias(form, dtype) else 0)


def _table(form: CodeFormat, constants: PyTree) -> Float[Array, "K M 128"]:
  """The levels of each head, or of all, each in all lanes of a row."""
  levels = constants[-1] if form.by_constants else np.asarray([form.levels])
  levels = pad_axis(
    jnp.asarray(levels, jnp.float32), 1, max(_ROWS, 2**form.bits)
  )
  return jnp.broadcast_to(levels[..., None], (*levels.shape, tile_ops.LANES))


class QueryRows(NamedTuple):
  """The rows of a tile: all queries of a group's heads, several times.

  The products of queries with each group of a vector's numbers are rows of
  their own, and so are the sums of values. Scores are the same in all copies.

  Fields:
    copies: how many, as many as there are groups of keys or of values.
    each: rows of a copy.
  """

  copies: int
  each: int

  @classmethod
  def of(
    cls,
    q: Shaped[Array, "B K G T H"],
    formats: tuple[CodeFormat, CodeFormat],
  ) -> QueryRows:
    """Whole registers of them for queries [B, K, G, T, H]."""
    copies = max(x.groups for x in formats)
    whole = _ROWS // math.gcd(copies, _ROWS)
    return cls(copies, -(-q.shape[2] * q.shape[3] // whole) * whole)

  @property
  def total(self) -> int:
    return self.copies * self.each

  def spread(self, x: Shaped[Array, " ..."], axis: int) -> jax.Array:
    """Rows of queries filled up, once for each copy."""
    return jnp.concatenate([pad_axis(x, axis, self.each)] * self.copies, axis)

  def merged(self, x: Float[Array, "N S"]) -> Float[Array, "N S"]:
    """In each copy the sum of all."""
    found = x
    for n in range(1, self.copies):
      found = found + pltpu.roll(x, n * self.each, 0)
    return found


def _queries(
  q: Float[Array, "B K R H"], form: CodeFormat, rows: QueryRows
) -> tuple[Float[Array, "B K N E"], Float[Array, "B K N 1"]]:
  """Queries as left operands of the codes, and the sums of their numbers.

  A copy of the queries has zeros beside the numbers of its group.
  """
  dims = arrangement(form).dims
  real = dims < form.dim
  spread = jnp.take(q, np.where(real, dims, 0), axis=3)
  parts, sums = [], []
  for n in range(rows.copies):
    here = real & (dims // form.group == n)
    parts.append(jnp.where(here, spread, jnp.zeros_like(spread)))
    own = q[..., n * form.group : (n + 1) * form.group].astype(jnp.float32)
    sums.append(jnp.sum(own, -1, keepdims=True))
  stack = lambda x: jnp.concatenate(
    [pad_axis(part, 2, rows.each) for part in x], 2
  )
  return stack(parts), stack(sums)


def _in_order(
  acc: Float[Array, "B K N E"],
  zeros: Float[Array, "B K N 1"],
  form: CodeFormat,
  rows: QueryRows,
  bias: float,
) -> Float[Array, "B K R J"]:
  """Sums of values from those of codes and of zeros, of all copies."""
  dims = arrangement(form).dims
  cut = lambda x: x.reshape(*x.shape[:2], rows.copies, rows.each, x.shape[3])
  acc, zeros = cut(acc), cut(zeros)
  sums = acc[..., : dims.size]
  if bias:
    sums = sums - acc[..., dims.size : dims.size + 1]
  order = np.argsort(dims, kind="stable")
  order = order[dims[order] < form.dim]
  many = arrangement(form).many
  sums = jnp.take(sums, order, axis=4)
  sums = jnp.sum(sums.reshape(*sums.shape[:4], form.dim, many), -1) + zeros
  return jnp.concatenate(
    [
      sums[:, :, n, :, n * form.group : (n + 1) * form.group]
      for n in range(form.groups)
    ],
    -1,
  )


class Scales(NamedTuple):
  """What is behind the codes of all heads of a tile.

  Fields:
    scale: float32 [heads * groups, keys]; None if channels have them.
    zero: the same, or None.
    outliers: for each of them its place, int32 [heads, keys], and the number,
      float32, with zero and scale taken away; of channels see `of`.
    near: whether a vector is coded from the sink, bool [heads, keys]; or None.
  """

  scale: Float[Array, "_ keys"] | None
  zero: jax.Array | None
  outliers: tuple[tuple[jax.Array, jax.Array], ...] = ()
  near: jax.Array | None = None

  @classmethod
  def of(
    cls,
    words: Ref,
    form: CodeFormat,
    heads: int,
    channels: Float[Array, "R C"] | None = None,
    near_channels: Float[Array, "R C"] | None = None,
  ) -> Scales:
    """From the float16 numbers behind the codes.

    Those of all heads are made at once: a row alone would fill a register.
    `channels`: what codes 0 stand for [heads, lanes], of a form whose scales
    are those of channels: its outliers are what they have more.
    `near_channels`: the same of codes near the sink.
    """
    first = form.codes // _WORD

    count = form.outliers
    nbytes = 2 * form.groups * form.halves + 3 * count
    if not nbytes:
      return cls(None, None)
    many = -(-nbytes // _WORD)
    both = jnp.concatenate(
      [words[0, 0, h, first : first + many, :] for h in range(heads)], 0
    )

    def halves(start: int, signed: bool) -> jax.Array:
      places = [start + n for n in range(form.groups)]
      rows = [h * many + n // 2 for h in range(heads) for n in places]
      found = _take_rows(both, rows)
      if form.groups == 1:
        found = lax.shift_right_logical(found, jnp.int32(16 * start))
      else:
        row = lax.broadcasted_iota(jnp.int32, found.shape, 0)
        odd = (row % form.groups + start) % 2
        found = lax.shift_right_logical(found, odd * 16)
      return _float(found & 0xFFFF, signed)

    def byte(n: int) -> jax.Array:
      rows = [h * many + n // _WORD for h in range(heads)]
      shift = jnp.int32(n % _WORD * 8)
      return lax.shift_right_logical(_take_rows(both, rows), shift) & 0xFF

    scale = halves(0, False) if form.halves else None
    zero = halves(form.groups, True) if form.halves == 2 else None
    if not count:
      return cls(scale, zero)
    if scale is not None:
      # A vector of equal numbers but for the outliers has a scale of 0.
      scale = jnp.maximum(scale, np.float32(_TINY))
    outliers, near = [], None
    for n in range(count):
      start = 2 * form.groups * form.halves
      first_byte = start + count + 2 * n
      bits = byte(first_byte) | byte(first_byte + 1) << 8
      number, place = _float(bits, True), byte(start + n)
      if form.by_channel:
        assert channels is not None
        level = _by_place(channels, place)
        if form.sinks:
          assert near_channels is not None
          near = bits & 1 != 0 if near is None else near
          level = jnp.where(near, _by_place(near_channels, place), level)
        outliers.append((place, number - level))
        continue
      assert scale is not None
      number = number if zero is None else number - zero
      outliers.append((place, number / scale))
    return cls(scale, zero, tuple(outliers), near)

  def cleaned(self) -> tuple[Scales, jax.Array]:
    """With 0 for what is no number; NaN for such, else 0, as `scale`."""
    assert self.scale is not None
    zero = self.scale if self.zero is None else self.zero
    good = tile_ops.finite(self.scale) & tile_ops.finite(zero)
    for _, x in self.outliers:
      good = good & tile_ops.finite(x)
    clean = lambda x: jnp.where(good, x, jnp.zeros_like(x))
    outliers = tuple((place, clean(x)) for place, x in self.outliers)
    zero = None if self.zero is None else clean(zero)
    found = Scales(clean(self.scale), zero, outliers)
    return found, jnp.where(good, 0.0, jnp.nan)


def _of_head(
  x: Float[Array, "M S"], head: int, groups: int, rows: QueryRows
) -> Float[Array, "N S"]:
  """Of numbers of all heads and groups those of a head, in each row."""
  own = [head * groups + min(n, groups - 1) for n in range(rows.copies)]
  return _take_rows(x, [n for n in own for _ in range(rows.each)])


def _take_rows(x: Shaped[Array, "M S"], index: list[int]) -> jax.Array:
  """Rows of `x`, of which a register's worth are one instruction."""
  if index == list(range(x.shape[0])):
    return x
  found = []
  for n in range(0, len(index), _ROWS):
    part = index[n : n + _ROWS]
    first = part[0] // _ROWS * _ROWS
    near = x[first : first + _ROWS]
    if len({*part}) == 1:
      one = x[part[0] : part[0] + 1]
      found.append(jnp.broadcast_to(one, (len(part), x.shape[1])))
    elif len(part) == near.shape[0] == _ROWS and max(part) < first + _ROWS:
      found.append(_permuted(near, [i - first for i in part]))
    else:
      found += [x[i : i + 1] for i in part]
  return found[0] if len(found) == 1 else jnp.concatenate(found, 0)


def _permuted(x: Shaped[Array, "8 S"], index: list[int]) -> jax.Array:
  """Rows of a register by their numbers."""
  # An array of constants, made of what a kernel may have.
  row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
  which = jnp.zeros_like(row)
  for n, i in enumerate(index):
    which = jnp.where(row == n, i, which)
  return _gathered(x, which)


def _rows_of(x: Shaped[Array, "h S"], head: int, rows: int) -> jax.Array:
  """A row of `x`, so many times."""
  return jnp.broadcast_to(x[head : head + 1], (rows, x.shape[1]))


def _by_place(
  x: Shaped[Array, "h lanes"], place: Int[Array, "h S"]
) -> Shaped[Array, "h S"]:
  """Of each row of `x` the numbers at `place`, a register's lanes at a time."""
  lanes, found = tile_ops.LANES, []
  for first in range(0, place.shape[1], lanes):
    here = place[:, first : first + lanes]
    own: Any = None
    for start in range(0, x.shape[1], lanes):
      part = _gathered(x[:, start : start + lanes], here & (lanes - 1), 1)
      own = part if own is None else jnp.where(here >= start, part, own)
    found.append(own)
  return jnp.concatenate(found, 1)


def _gathered(
  x: Shaped[Array, "m S"], which: Int[Array, "n k"], axis: int = 0
) -> Shaped[Array, "n k"]:
  """Of each column of `x` the rows `which`; of rows the columns, if `axis`."""
  dims = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(axis,),
    start_index_map=(axis,),
    operand_batching_dims=(1 - axis,),
    start_indices_batching_dims=(1 - axis,),
  )
  return lax.gather(
    x,
    which[..., None],
    dims,
    (1, 1),
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )


def _float(half: Int[Array, "h S"], signed: bool) -> Float[Array, "h S"]:
  """Float32 of the 16 bits of float16 numbers, `signed` or at least 0."""
  size = half & 0x7FFF
  bits = size << 13
  # The exponent of float32 begins 112 lower; infinities stay at its end.
  above = jnp.where(size >= 0x7C00, 224 << 23, 112 << 23)
  real = lax.bitcast_convert_type(bits + above, jnp.float32)
  # Below the smallest normal number.
  small = size.astype(jnp.float32) * np.float32(2.0**-24)
  real = jnp.where(size < 0x400, small, real)
  if not signed:
    return real
  bits = lax.bitcast_convert_type(real, jnp.int32) | (half & 0x8000) << 16
  return lax.bitcast_convert_type(bits, jnp.float32)


class Codes(NamedTuple):
  """The codes of keys or of values of a tile.

  Fields:
    words: int32 [1, 1, heads, X / 4, keys], a reference.
    table: levels [heads or 1, M, 128], a reference or None.
    form: the bytes.
    outliers: of `Scales`, that take the places of levels.
    spots: the same for pairs of bfloat16, or none in float32.
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
    """For products of `dtype`."""
    if dtype != jnp.bfloat16:
      return cls(words, table, form, outliers)
    spots = tuple(Spot.of(form, table, *one) for one in outliers)
    return cls(words, table, form, spots=spots)

  def numbers(self, head: int, lanes: slice, dtype: DTypeLike) -> jax.Array:
    """Some of a head's numbers, unscaled and with the bias, [E, keys]."""
    if self.form.looked_up:
      return _levels(self, head, lanes, dtype)
    return _integers(self, head, lanes, dtype)

  def load(self, head: int, first: int, words: int, lanes: slice) -> jax.Array:
    """Words of a head."""
    found = self.words[0, 0, head, first : first + words, lanes]
    # Bytes have two rows of words to a register. Four are wanted before they
    # are unpacked, not after; they are for what is of another type.
    return pltpu.bitcast(pltpu.bitcast(found, jnp.bfloat16), jnp.int32)


def _levels(
  codes: Codes, head: int, lanes: slice, dtype: DTypeLike
) -> jax.Array:
  """The levels of codes: a table's rows, one of which a register has each."""
  if dtype != jnp.bfloat16:
    pieces = _pieces(codes, head, lanes)
    both = zip(pieces[::2], pieces[1::2], strict=True)
    size = pieces[0].shape[1]
    return jnp.concatenate([jnp.stack(x, 1).reshape(-1, size) for x in both], 0)
  form = codes.form
  parts, signs = _looked_up(codes, head, lanes, dtype)
  found = []
  rows = parts[0][0].shape[0]
  spots = [spot.of_head(head, lanes, rows) for spot in codes.spots]
  for number, (low, high) in enumerate(parts):
    both = low | high
    if signs is not None:
      # The highest bits of both halves of a word.
      shift = arrangement(form).fields[number].shift
      both = both ^ ((signs << (15 - shift)) & -0x7FFF8000)
    for spot in spots:
      both = spot.put(form, number, both)
    found.append(pltpu.bitcast(both, jnp.bfloat16))
  return jnp.concatenate(found, 0)


def _pieces(codes: Codes, head: int, lanes: slice) -> list[jax.Array]:
  """Levels in float32, [R, S] each.

  Of each field those of the lower halves of words, then of the upper ones.
  """
  form, found = codes.form, []
  parts, signs = _looked_up(codes, head, lanes, jnp.float32)
  outliers = [
    [x[head : head + 1, lanes] for x in both] for both in codes.outliers
  ]
  for number, both in enumerate(parts):
    rows = both[0].shape[0]
    dims = arrangement(form).dims.reshape(-1, rows, 2)[number]
    shift = arrangement(form).fields[number].shift
    row = lax.broadcasted_iota(jnp.int32, both[0].shape, 0) * _WORD
    for half, x in enumerate(both):
      if signs is not None:
        x = x ^ (signs << (31 - 16 * half - shift)) & -0x80000000
      x = lax.bitcast_convert_type(x, jnp.float32)
      for place, kept in outliers:
        x = jnp.where(place == row + int(dims[0, half]), kept, x)
      found.append(x)
  return found


def _looked_up(
  codes: Codes, head: int, lanes: slice, dtype: DTypeLike
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array | None]:
  """Bits of the levels of codes.

  Returns:
    of each field those of the lower and of the upper halves of words, where a
    pair of bfloat16 has them, or float32; and what bits of the words negate
    them, if the levels are the upper half of those that mirror them.
  """
  form, half = codes.form, dtype == jnp.bfloat16
  nibbles = _nibbles(codes, head, lanes)
  size = nibbles[0].shape[1]
  assert codes.table is not None
  levels = codes.table[head if codes.table.shape[0] > 1 else 0]
  # Of the lower and the upper half of a word, or float32 for either.
  lower = upper = lax.bitcast_convert_type(
    levels.astype(dtype).astype(jnp.float32), jnp.int32
  )
  if half:
    lower = lax.shift_right_logical(upper, jnp.int32(16))
  # In as many registers as there are codes.
  lower, upper = (tile_ops.widened(x, size) for x in (lower, upper))
  # Where the lower half of 16 levels mirrors the upper one, that is the table.
  signs = None
  if form.bits == 4 and form.mirrored:
    lower, upper = lower[_ROWS:], upper[_ROWS:]
    (words,) = nibbles
    signs = lax.shift_right_logical(~words, jnp.int32(3)) & 0x11111111
    nibbles = [words ^ ((signs << 3) - signs)]

  def look(table: jax.Array, words: jax.Array, shift: int) -> jax.Array:
    which = lax.shift_right_logical(words, jnp.int32(shift)) if shift else words
    low = which & (_ROWS - 1)
    found = _gathered(table[:_ROWS], low)
    if form.bits == 4 and signs is None:
      more = _gathered(table[_ROWS:], low)
      found = jnp.where(which & _ROWS != 0, more, found)
    return found

  parts = []
  for field in arrangement(form).fields:
    words = nibbles[field.odd]
    pieces = []
    for row in range(0, words.shape[0], _ROWS):
      these = words[row : row + _ROWS]
      both = (
        look(lower, these, field.shift),
        look(upper, these, field.shift + 16),
      )
      pieces.append(both)
    low, high = (jnp.concatenate(x, 0) for x in zip(*pieces, strict=True))
    parts.append((low, high))
  return parts, signs


class Spot(NamedTuple):
  """An outlier of each vector, as pairs of bfloat16 look for it.

  Fields:
    where: int32 [heads, keys], the number of its field times 256, and of its
      row there.
    bits: int32 [heads, keys], those in which it is not level 0, its code's.
  """

  where: jax.Array
  bits: jax.Array

  @classmethod
  def of(
    cls,
    form: CodeFormat,
    table: Ref,
    place: Int[Array, "heads keys"],
    kept: Float[Array, "heads keys"],
  ) -> Spot:
    """Of all heads at once: a row alone would fill a register."""
    heads, size = place.shape
    width = form.parts[0].width
    part = jnp.zeros_like(place)
    for first in range(width, form.dim, width):
      part = part + (place >= first).astype(jnp.int32)
    within = place - part * width
    own = lambda h: table[h if table.shape[0] > 1 else 0][:1]
    level = jnp.concatenate([own(h) for h in range(heads)], 0)
    half = lambda x: lax.bitcast_convert_type(
      x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32
    )
    bits = half(kept) ^ half(tile_ops.widened(level, size))
    lower = lax.shift_right_logical(bits, jnp.int32(16))
    return cls(
      (2 * part + (within & 1)) << 8 | within >> 2,
      jnp.where(within & 2 != 0, bits, lower),
    )

  def of_head(self, head: int, lanes: slice, rows: int) -> Spot:
    """Of a head, in each row."""
    return Spot(*(_rows_of(x[:, lanes], head, rows) for x in self))

  def put(
    self, form: CodeFormat, field: int, both: Int[Array, "R S"]
  ) -> jax.Array:
    """Pairs of bfloat16 of a field with it in place of its level."""
    first = int(
      arrangement(form).dims.reshape(-1, both.shape[0], 2)[field, 0, 0]
    )
    width = form.parts[0].width
    number = 2 * (first // width) + first % width
    row = lax.broadcasted_iota(jnp.int32, both.shape, 0) | number << 8
    return both ^ jnp.where(row == self.where, self.bits, jnp.int32(0))


def _nibbles(codes: Codes, head: int, lanes: slice) -> list[jax.Array]:
  """A head's codes in 4 bits each, eight to a word.

  Of fewer bits than 4 there are two words: of a byte the even and the odd of
  four codes.
  """
  form = codes.form
  words = [
    codes.load(head, part.first // _WORD, part.width // _WORD, lanes)
    for part in form.parts
  ]
  if form.bits == 4:
    return words
  two = words[0]
  even, odd = two & 0x33333333, (two >> 2) & 0x33333333
  if form.bits == 3:
    # Half as many words, whose bytes have the next codes in between.
    one = jnp.concatenate([words[1], words[1] >> 1], 0)
    even = even | (one & 0x11111111) << 2
    odd = odd | one & 0x44444444
  return [even, odd]


def _integers(
  codes: Codes, head: int, lanes: slice, dtype: DTypeLike
) -> jax.Array:
  """Codes that are numbers themselves."""
  loaded: dict[int, jax.Array] = {}
  parts = []
  for field in arrangement(codes.form).fields:
    if field.first not in loaded:
      loaded[field.first] = codes.load(head, field.first, field.words, lanes)
    both = loaded[field.first]
    if field.shift > 0:
      both = lax.shift_right_logical(both, jnp.int32(field.shift))
    elif field.shift < 0:
      both = both << -field.shift
    both = (both & field.mask) | _BIAS_BITS
    parts.append(pltpu.bitcast(both, jnp.bfloat16))
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
  turns: Turns | None,
  of_channels: tuple[bool, ...],
  shared: bool,
  sloped: bool,
  looked_up: tuple[bool, ...],
  *refs: Any,
) -> None:
  count = 1 + structure.num_leaves
  scalars = jax.tree.unflatten(structure, refs[1:count])
  q_ref, sums_ref, *more = refs[count:]
  taken: list[Any] = [more.pop(0) if yes else None for yes in of_channels]
  frequencies, zeros, outlying, channels = taken
  q_at, k_at, *more = more
  slope_ref = more.pop(0) if sloped else None
  k_ref = more.pop(0)
  v_ref = k_ref if shared else more.pop(0)
  k_table, *own_table = (more.pop(0) if yes else None for yes in looked_up)
  v_table = k_table if shared else own_table[0]
  acc_out, zero_out, m_out, l_out, acc, zero_ref, m_ref, l_ref, *more = more
  tables: Any = more[0] if more else None
  of_k, of_v = formats
  b, i = pl.program_id(0), pl.program_id(2)
  word = scalars.words[i]
  heads, size = k_ref.shape[2], k_ref.shape[4]
  dtype = q_ref.dtype
  bias = _bias(of_v, dtype)
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
      of_example = lambda ref: ref[0 if ref.shape[0] == 1 else b]
      leaves = [of_example(ref) for ref in scalars.leaves]
      allowed = visible(jax.tree.unflatten(mask, leaves), row_at, columns)
    far: Any = None
    if slope_ref is not None:
      far = distance(row_at.pos, columns.pos)
    k_words, v_words = (ref.bitcast(jnp.int32) for ref in (k_ref, v_ref))
    number = lambda n: rotated_codes.as_numbers(channels[0, n])
    k_scales = Scales.of(
      k_words,
      of_k,
      heads,
      None if channels is None else number(0),
      number(3) if of_k.sinks else None,
    )
    near: Any = k_scales.near
    factors: Any = None
    if of_k.sinks:
      factors = jnp.where(near, number(4)[:, :1], np.float32(1))
    v_scales = k_scales if shared else Scales.of(v_words, of_v, heads)
    odd: Any = None
    if masked:
      v_scales, odd = v_scales.cleaned()
    # Those of channels are added to the products.
    inside = k_scales.outliers if turns is None else ()
    k_codes = Codes.of(k_words, k_table, of_k, inside, dtype)
    v_codes = Codes.of(v_words, v_table, of_v, v_scales.outliers, dtype)
    # What the bias adds to a product is a multiple of the scale.
    k_zero = k_scales.zero
    if _bias(of_k, dtype):
      assert k_zero is not None and k_scales.scale is not None
      k_zero = k_zero - k_scales.scale * (_BIAS * arrangement(of_k).many)
    turned: Any = None
    if frequencies is not None:
      for lanes in pieces:
        rotated_codes.fill(tables, frequencies[...], columns.pos, lanes, dtype)
      of_zeros = zeros[0].reshape(-1, zeros.shape[3])
      turned = tile_ops.dot(of_zeros, tables[...].astype(dtype), tile_ops.NN)
    # Of outliers their places and what multiplies queries there.
    beyond = []
    if channels is not None:
      units, rest = channels[0, 1], rotated_codes.as_numbers(channels[0, 2])
      for place, excess in k_scales.outliers:
        each = Frequencies(_by_place(units, place), _by_place(rest, place))
        turn = rotated_codes.cos_sin(each, columns.pos, dtype)
        beyond += [(place, n, excess * x) for n, x in enumerate(turn)]

    def of_keys(head: int, lanes: slice) -> jax.Array:
      if turns is None:
        return k_codes.numbers(head, lanes, dtype)
      levels = _pieces(k_codes, head, lanes)
      return rotated_codes.rotated(turns, levels, tables, lanes, dtype)

    def added(head: int) -> Iterator[jax.Array]:
      """What scales of channels add to the products of a head's queries."""
      assert turns is not None
      if turned is not None:
        many = turned.shape[0] // heads
        own = turned[head * many : (head + 1) * many]
        if of_k.sinks:
          here = _rows_of(near.astype(jnp.int32), head, rows.total) != 0
          own = jnp.where(here, own[rows.total :], own[: rows.total])
        yield own
      if None in turns.slots:
        own = sums_ref[0, head]
        if of_k.sinks:
          here = _rows_of(near.astype(jnp.int32), head, rows.total) != 0
          own = jnp.where(here, own[:, 1:], own[:, :1])
        yield own
      for place, n, x in beyond:
        where = _rows_of(place, head, rows.total)
        yield _by_place(outlying[0, head, n], where) * x[head : head + 1]

    wide = lambda x: jnp.broadcast_to(x, m_ref.shape[1:])
    products, weights = [], []
    for head in range(heads):
      dot = jnp.concatenate(
        [
          tile_ops.dot(q_ref[0, head], of_keys(head, lanes), tile_ops.NN)
          for lanes in pieces
        ],
        1,
      )
      own = functools.partial(
        _of_head, head=head, groups=of_k.groups, rows=rows
      )
      if turns is None:
        assert k_scales.scale is not None
        dot = dot * own(k_scales.scale)
      else:
        if of_k.sinks:
          dot = dot * factors[head : head + 1]
        dot = functools.reduce(jnp.add, added(head), dot)
      if k_zero is not None:
        dot = dot + sums_ref[0, head] * own(k_zero)
      products.append(rows.merged(dot))
    for head, dot in enumerate(products):
      slope = None if slope_ref is None else slope_ref[head]
      s, c = tile_ops.power(scores, dot, slope, lambda: far)
      own = functools.partial(
        _of_head, head=head, groups=of_v.groups, rows=rows
      )
      if masked:
        s = jnp.where(allowed, s + rows.merged(own(odd)), -jnp.inf)
      old = m_ref[head, :, 0:1]
      m = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True) * c)
      safe = finite_max(m)
      p = jnp.exp2(s * c - safe)
      weight = jnp.exp2(old - safe)
      l_ref[head] = l_ref[head] * weight + _by_lane(p)
      m_ref[head] = wide(m)
      if v_scales.zero is not None:
        more = _by_lane(p * own(v_scales.zero))
        zero_ref[head] = zero_ref[head] * weight + more
      assert v_scales.scale is not None
      weights.append(((p * own(v_scales.scale)).astype(dtype), weight))
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

  # The last tile may end behind the last key: see `decode_tpu`.
  pl.when(word & tile_ops.MASKED != 0)(lambda: tile(True))
  pl.when(word & tile_ops.FULL != 0)(lambda: tile(False))

  @pl.when(word & tile_ops.LAST != 0)
  def _() -> None:
    acc_out[0] = acc[...]
    m_out[0] = m_ref[:, :, 0:1] * (1 / tile_ops.LOG2_E)
    whole = lambda ref: jnp.sum(ref[...], axis=2, keepdims=True)
    zero_out[0], l_out[0] = whole(zero_ref), whole(l_ref)


def _by_lane(x: Float[Array, "N S"]) -> Float[Array, "N 128"]:
  """Sums of the columns that are in the same lane."""
  size = x.shape[1]
  if size % tile_ops.LANES:
    x = pad_axis(x, 1, tile_ops.lanes(size))
  parts = [x[:, n : n + tile_ops.LANES] for n in range(0, size, tile_ops.LANES)]
  return functools.reduce(jnp.add, parts)

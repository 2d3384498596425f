"""Pallas TPU kernel for decode attention over the keys of a cache.

Guarantees: equals `views.decode_attention` wherever it serves (`decline` says
where it does not); forward only.
Cost: it reads the tiles that count once, in place in the stack of all layers: a
step's memory traffic is that of its keys and values, and the next tile is
loaded while one is computed.
Memory: VMEM only: two tiles of keys and values.
Ref: Dao et al. 2023, Flash-Decoding (the keys' shards are its splits).

XLA's loops compute a tile in a dozen operations, each of which costs about as
much as reading the tile (see the README next to this file).

  grid [B, K / heads, steps]    acc [heads, rows, J], m, l of a group of heads

The rows of a tile are the queries of all heads of a group, its lanes are keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, PyTree

from ringjax.ops.attention.blockwise import pad_axis, tile_kinds
from ringjax.ops.attention.cached.views import ContiguousView, KVView
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.kernels.decoder_tpu import DecoderTPU
from ringjax.ops.attention.scores import ScoreArgs, Scores, Terms
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Coords, distance, visible
from ringjax.ops.softmax import Partial, finite_max
from ringjax.parallel import collectives

# Most bytes of a tile's keys and values: so many that a step's fixed cost is
# small next to reading them, and two tiles are a small part of VMEM.
_TILE_BYTES = 2 << 20
_MOST = 2048
# Rows of a register of bfloat16.
_SUBLANES = 16


class DecodeTPU(DecoderTPU):
  """A Pallas kernel for TPU for decode attention over the keys of a cache."""

  def tile(
    self, q: Float[Array, "B K G T H"], keys: ContiguousView
  ) -> tuple[int, int]:
    """Choose (heads, keys) of a tile for queries [B, K, G, T, H]."""
    return self.tile_of(
      q, keys.k.shape[3], _row_bytes(keys), _TILE_BYTES, _MOST
    )

  def _vmem(self, q: jax.Array, keys: ContiguousView) -> int:
    """Approximate bytes of vector memory that a step takes."""
    heads, kb = self.tile(q, keys)
    rows = _rows(q)
    h, j = tile_ops.lanes(q.shape[4]), tile_ops.lanes(keys.v.shape[4])
    stats = 2 * tile_ops.LANES
    # Inputs and outputs are double-buffered for the next step.
    in_flight = 2 * heads * (kb * _row_bytes(keys) + 4 * rows * (h + j + stats))
    scratch = 4 * heads * rows * (j + stats)
    scores = 4 * 4 * rows * kb
    return in_flight + scratch + scores

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    if not isinstance(keys, ContiguousView):
      return f"{type(keys).__name__}: it reads ContiguousView"
    _, kb = self.tile(q, keys)
    return self.unserved(
      q,
      keys,
      args,
      length=keys.k.shape[3],
      block=kb,
      need=self._vmem(q, keys),
      numbers=(keys.k, keys.v),
    )

  def decode(
    self, q: Float[Array, "B K G T H"], keys: ContiguousView, args: ScoreArgs
  ) -> Partial:
    """Attention partial of q [B, K, G, T, H] over the keys of `context.k`."""
    check_serves(self, q, keys, args)
    context, slopes = args.context, args.terms.slopes
    # Keys and values may be padded with zeros, which are read as well.
    q = pad_axis(q, 4, keys.k.shape[4])
    b, kv, g, t, h = q.shape
    length, j = keys.v.shape[3:]
    heads, kb = self.tile(q, keys)
    columns = -(-length // kb)
    at = Coords(*(pad_axis(c, 1, columns * kb) for c in context.k))
    kinds = tile_kinds(context.mask, context.q, at, t, kb)
    steps = tile_ops.TileSteps.of(kinds)
    rows = _rows(q)
    flatten_rows = lambda x, *last: pad_axis(
      x.reshape(b, kv, g * t, *last), 2, rows
    )
    row_at = jnp.stack(tile_ops.by_row(context.q, q.shape), 2)
    shared = keys.v is keys.k
    operands = [
      flatten_rows(q, h),
      pad_axis(row_at, 1, rows),
      tile_ops.pair(at, b),
      *(
        []
        if slopes is None
        else [pad_axis(tile_ops.slopes_by_row(slopes, t), 1, rows)[..., None]]
      ),
      keys.k,
      *([] if shared else [keys.v]),
    ]
    scalars = tile_ops.Scalars.of(
      Terms(), context._replace(heads=None, seed=None), steps
    )
    leaves, structure = jax.tree.flatten(scalars)
    layer = jnp.asarray(keys.layer, jnp.int32).reshape(1)
    # All queries are one row of tiles.
    row = lambda i, words: tile_ops.row_of(words[i])
    column = lambda i, words: tile_ops.column_of(words[i])
    rows_block = lambda bi, ki, i, layer, words, *_: (bi, ki, row(i, words), 0)
    keys_block = lambda bi, ki, i, layer, words, *_: (
      layer[0], bi, ki, column(i, words), 0,
    )  # fmt: skip
    in_specs = [
      pl.BlockSpec((1, heads, rows, h), rows_block),
      pl.BlockSpec(
        (1, rows, 2),
        lambda bi, ki, i, layer, words, *_: (bi, row(i, words), 0),
      ),
      pl.BlockSpec(
        (1, 2, kb),
        lambda bi, ki, i, layer, words, *_: (bi, 0, column(i, words)),
      ),
    ]
    if slopes is not None:
      in_specs.append(
        pl.BlockSpec(
          (heads, rows, 1),
          lambda bi, ki, i, layer, words, *_: (ki, row(i, words), 0),
        )
      )
    in_specs += [
      pl.BlockSpec((1, 1, heads, kb, n), keys_block)
      for n in ((h,) if shared else (h, j))
    ]
    out_type = lambda n: collectives.out_type(
      (b, kv, rows, n), jnp.float32, q, keys, args.terms, context
    )
    acc, m, l = pl.pallas_call(  # noqa: E741
      functools.partial(
        _kernel,
        args.scores,
        jax.tree.structure(context.mask),
        structure,
        shared,
        slopes is not None,
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1 + len(leaves),
        grid=(b, kv // heads, steps.count),
        in_specs=in_specs,
        out_specs=[
          pl.BlockSpec((1, heads, rows, n), rows_block) for n in (j, 1, 1)
        ],
        scratch_shapes=[
          pltpu.VMEM((heads, rows, j), jnp.float32),
          pltpu.VMEM((heads, rows, tile_ops.LANES), jnp.float32),
          pltpu.VMEM((heads, rows, tile_ops.LANES), jnp.float32),
        ],
      ),
      out_shape=[out_type(n) for n in (j, 1, 1)],
      compiler_params=self.params(
        self._vmem(q, keys), "parallel", "parallel", "arbitrary"
      ),
      cost_estimate=self._cost(q, keys, shared),
      interpret=self.interpret,
      name="ringjax_decode",
    )(layer, *leaves, *operands)
    unflatten = lambda x, *last: x[:, :, : g * t].reshape(b, kv, g, t, *last)
    return Partial(
      unflatten(acc, j)[..., : keys.shape[4]], unflatten(m), unflatten(l)
    )

  def _cost(
    self, q: jax.Array, keys: ContiguousView, shared: bool
  ) -> pl.CostEstimate:
    b, kv, length, h = keys.k.shape[1:]
    nbytes = b * kv * length * h * keys.k.dtype.itemsize
    if not shared:
      nbytes += nbytes // h * keys.v.shape[4]
    return self.cost(nbytes, q.size // h * length)


def _rows(q: jax.Array) -> int:
  """Rows of a tile: the queries of a group's heads, in whole registers."""
  return -(-q.shape[2] * q.shape[3] // _SUBLANES) * _SUBLANES


def _row_bytes(keys: ContiguousView) -> int:
  """Bytes in VMEM of a head's key and value, padded to whole lanes."""
  arrays = {id(x): x for x in (keys.k, keys.v)}.values()
  return sum(tile_ops.lanes(x.shape[4]) * x.dtype.itemsize for x in arrays)


def _kernel(
  scores: Scores,
  mask: jax.tree_util.PyTreeDef,
  structure: PyTree,
  shared: bool,
  sloped: bool,
  *refs: Any,
) -> None:
  count = 1 + structure.num_leaves
  scalars = jax.tree.unflatten(structure, refs[1:count])
  q_ref, q_at, k_at, *remaining = refs[count:]
  slope_ref = remaining.pop(0) if sloped else None
  k_ref = remaining.pop(0)
  v_ref = k_ref if shared else remaining.pop(0)
  acc_out, m_out, l_out, acc, m_ref, l_ref = remaining
  b, i = pl.program_id(0), pl.program_id(2)
  word = scalars.words[i]
  heads = k_ref.shape[2]

  @pl.when(word & tile_ops.FIRST != 0)
  def _() -> None:
    acc[...] = jnp.zeros_like(acc)
    m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
    l_ref[...] = jnp.zeros_like(l_ref)

  def tile(masked: bool) -> None:
    rows = Coords(q_at[0, :, 0:1], q_at[0, :, 1:2])
    columns = Coords(k_at[0, 0:1, :], k_at[0, 1:2, :])
    allowed: Any = None
    if masked:
      leaf_of_example = lambda ref: ref[0 if ref.shape[0] == 1 else b]
      leaves = [leaf_of_example(ref) for ref in scalars.leaves]
      allowed = visible(jax.tree.unflatten(mask, leaves), rows, columns)
    distances: Any = None
    if slope_ref is not None:
      distances = distance(rows.pos, columns.pos)
    for head in range(heads):
      q = q_ref[0, head]
      k, v = (ref[0, 0, head].astype(q.dtype) for ref in (k_ref, v_ref))
      slope = None if slope_ref is None else slope_ref[head]
      dot = tile_ops.dot(q, k, tile_ops.NT)
      s, c = tile_ops.power(scores, dot, slope, lambda: distances)
      if masked:
        v, nan_flags = tile_ops.cleaned(v)
        s = jnp.where(allowed, s + nan_flags, -jnp.inf)
      old_m = m_ref[head, :, 0:1]
      m = jnp.maximum(old_m, jnp.max(s, axis=1, keepdims=True) * c)
      safe = finite_max(m)
      p = jnp.exp2(s * c - safe)
      weight = jnp.exp2(old_m - safe)
      total = jnp.sum(p, axis=1, keepdims=True)
      all_lanes = lambda x: jnp.broadcast_to(x, m_ref.shape[1:])
      l_ref[head] = all_lanes(l_ref[head, :, 0:1] * weight + total)
      m_ref[head] = all_lanes(m)
      sums = tile_ops.dot(p.astype(v.dtype), v, tile_ops.NN)
      acc[head] = acc[head] * weight + sums

  # The last tile may end after the last key: the coordinates there are empty,
  # so that it needs a mask.
  pl.when(word & tile_ops.MASKED != 0)(lambda: tile(True))
  pl.when(word & tile_ops.FULL != 0)(lambda: tile(False))

  @pl.when(word & tile_ops.LAST != 0)
  def _() -> None:
    acc_out[0] = acc[...]
    m_out[0] = m_ref[:, :, 0:1] * (1 / tile_ops.LOG2_E)
    l_out[0] = l_ref[:, :, 0:1]

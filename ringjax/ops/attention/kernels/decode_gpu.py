"""Pallas kernel for GPUs: decode attention over the keys of a cache.

Guarantees: equals `views.decode_attention` wherever it serves (`decline` says
where it does not); forward only.
Cost: it reads the tiles that count once for each `_ROWS` queries, in place in
the stack of all layers. The keys of a head are split over as many programs as
fill the GPU; XLA merges their partials.
Memory: a partial [rows, J] in float32 of each program.
Ref: Dao et al. 2023, Flash-Decoding.

XLA's loops start a dozen kernels for every tile, each of which takes the time
of reading some megabytes, and copy the tile before they multiply it.

  grid [B * K, rows / _ROWS, splits]    acc [_ROWS, J], m, l in registers

Rows are the queries of all heads of a group, one head after another.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, PyTree

from ringjax.ops.attention.blockwise import (
  check_positive,
  pad_axis,
  tile_kinds,
  tile_lists,
)
from ringjax.ops.attention.cached.views import ContiguousView, KVView, tiled
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import ScoreArgs, Scores
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Coords, distance, visible
from ringjax.ops.softmax import Partial, finite_max
from ringjax.parallel import collectives
from ringjax.typing import Index


def _backend() -> Any:
  """Import Pallas' Triton backend, or None; JAX 0.12 deprecates it."""
  try:
    return importlib.import_module("jax.experimental.pallas.triton")
  except ImportError:
    return None


plgpu = _backend()

# The smallest side of a product of the matrix units, and the most rows whose
# sums stay in registers; then the keys of a tile.
_LEAST, _ROWS = 16, 64
_KEYS = 64
# Tiles of a list entry: fewer entries to sort, as each layer sorts its list.
_RUN = 16
# Programs that fill any GPU: several for each of 132 to 192 multiprocessors.
_PROGRAMS = 512


@dataclasses.dataclass(frozen=True)
class DecodeGPU:
  """A Pallas kernel, through Triton, for decode attention over a cache.

  Attributes:
    kv_block: Most keys of a tile, a power of two from 16 on; None: 64.
    chip: Machine, as every kernel takes it; not used by this one.
    interpret: Whether to run without a GPU, slowly, for tests.
  """

  kv_block: int | None = None
  chip: str | None = None
  interpret: bool = False

  def __post_init__(self) -> None:
    check_positive(self, "kv_block")

  def tile(self, keys: ContiguousView) -> int:
    """Number of keys of a tile; at most the shard's."""
    length = keys.k.shape[3]
    return min(self.kv_block or _KEYS, 1 << (length.bit_length() - 1))

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    if not isinstance(keys, ContiguousView):
      return f"{type(keys).__name__}: it reads ContiguousView"
    if plgpu is None:
      return f"JAX {jax.__version__}: it has no Triton backend of Pallas"
    if self.kv_block is not None and not _is_power(self.kv_block):
      return f"tiles of {self.kv_block} keys: no power of two from {_LEAST} on"
    if keys.k.shape[3] < _LEAST:
      return f"{keys.k.shape[3]} keys a shard: at least {_LEAST}"
    return tile_ops.undecoded(
      q,
      keys,
      args,
      dtypes=("bfloat16", "float16", "float32"),
      widest=256,
      numbers=(keys.k, keys.v),
    )

  def decode(
    self, q: Float[Array, "B K G T H"], keys: ContiguousView, args: ScoreArgs
  ) -> Partial:
    """Attention partial of q [B, K, G, T, H] over the keys of `context.k`."""
    check_serves(self, q, keys, args)
    context, slopes = args.context, args.terms.slopes
    b, kv, g, t, h = q.shape
    j = keys.v.shape[4]
    kb = self.tile(keys)
    run = min(_RUN, keys.k.shape[3] // kb)
    at = tiled(context.k, run * kb)
    kinds = tile_kinds(context.mask, context.q, at, t, run * kb)
    lists = tile_lists(kinds, masked=False)
    rows = min(_ROWS, _padded_side(g * t))
    num_blocks = -(-g * t // rows)
    row_at = tile_ops.by_row(context.q, q.shape)
    shared = keys.v is keys.k
    if slopes is not None:
      slopes = pad_axis(tile_ops.slopes_by_row(slopes, t), 1, num_blocks * rows)
    leaves, mask = jax.tree.flatten(context.mask)
    operands = [
      jnp.asarray(keys.layer, jnp.int32).reshape(1),
      *(x.reshape(-1) for x in lists),
      *(jnp.asarray(a, jnp.int32).reshape(-1) for a in leaves),
      pad_axis(q.reshape(b, kv, g * t, h), 2, num_blocks * rows),
      *(pad_axis(c, 1, num_blocks * rows) for c in row_at),
      *[jnp.broadcast_to(c, (b, c.shape[1])) for c in at],
      *([] if slopes is None else [slopes]),
      keys.k,
      *([] if shared else [keys.v]),
    ]
    splits = max(
      1, min(kinds.shape[1] * run, _PROGRAMS // (b * kv * num_blocks))
    )
    operands_like = (q, keys, args.terms, context)
    out_type = lambda *last: collectives.out_type(
      (b, kv, splits, num_blocks * rows, *last), jnp.float32, operands_like
    )
    partials = pl.pallas_call(
      functools.partial(
        _kernel,
        args.scores,
        mask,
        (kv, rows, splits, kb, run),
        shared,
        slopes is not None,
      ),
      grid=(b * kv, num_blocks, splits),
      out_shape=[out_type(_padded_side(j)), out_type(), out_type()],
      compiler_params=plgpu.CompilerParams(
        num_warps=4 if rows <= 32 else 8, num_stages=3
      ),
      interpret=self.interpret,
      name="ringjax_decode",
    )(*operands)
    merged = _merge_splits(Partial(*partials))
    unflatten = lambda x: x[:, :, : g * t].reshape(b, kv, g, t, *x.shape[3:])
    return Partial(
      unflatten(merged.acc[..., :j]), unflatten(merged.m), unflatten(merged.l)
    )


def _is_power(n: int) -> bool:
  return n >= _LEAST and n & (n - 1) == 0


def _padded_side(n: int) -> int:
  """Round `n` up to a power of two that is a legal side of a product."""
  return pl.next_power_of_2(max(_LEAST, n))


def _load_rows(ref: Ref, *place: Any) -> jax.Array:
  """Load rows [n, _padded_side(H)] of a ref [..., T, H], padded with zeros."""
  h = ref.shape[-1]
  if h == _padded_side(h):
    return plgpu.load(ref.at[(*place, slice(None))])
  column = lax.broadcasted_iota(jnp.int32, (1, _padded_side(h)), 1)
  *outer, rows = place
  row = rows.start + lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0)
  return plgpu.load(
    ref.at[(*outer, row, column)],
    mask=jnp.broadcast_to(column < h, (rows.size, _padded_side(h))),
    other=0.0,
  )


def _merge_splits(parts: Partial) -> Partial:
  """Merge the partials of all splits, which are axis 2."""
  m = jnp.max(parts.m, 2)
  weight = jnp.exp(parts.m - finite_max(m)[:, :, None])
  return Partial(
    jnp.sum(parts.acc * weight[..., None], 2), m, jnp.sum(parts.l * weight, 2)
  )


def _kernel(
  scores: Scores,
  mask: jax.tree_util.PyTreeDef,
  sizes: tuple[int, int, int, int, int],
  shared: bool,
  sloped: bool,
  *refs: Any,
) -> None:
  kv, rows, splits, kb, run = sizes
  layer_ref, *lists = refs[:5]
  leaves, refs = refs[5 : 5 + mask.num_leaves], refs[5 + mask.num_leaves :]
  q_ref, row_pos, row_seg, k_pos, k_seg, *remaining = refs
  slope_ref = remaining.pop(0) if sloped else None
  k_ref = remaining.pop(0)
  v_ref = k_ref if shared else remaining.pop(0)
  acc_out, m_out, l_out = remaining
  example, head = pl.program_id(0) // kv, pl.program_id(0) % kv
  row_slice = pl.ds(pl.program_id(1) * rows, rows)
  split = pl.program_id(2)
  layer, length = layer_ref[0], k_ref.shape[3]

  q = _load_rows(q_ref, example, head, row_slice)
  at_q = Coords(
    row_pos[example, row_slice][:, None], row_seg[example, row_slice][:, None]
  )
  slopes = None if slope_ref is None else slope_ref[head, row_slice][:, None]
  leaf_of_example = lambda ref: ref[0 if ref.shape[0] == 1 else example]
  example_mask = jax.tree.unflatten(
    mask, [leaf_of_example(ref) for ref in leaves]
  )

  def step(masked: bool, columns: Ref, i: Index, carry: PyTree) -> PyTree:
    acc, old_m, total = carry
    first, inside = columns[i // run] * (run * kb), i % run * kb
    # The last entry ends with the last key; its coordinates mask the keys that
    # it shares with the one before (`tiled`).
    key_slice = pl.ds(jnp.minimum(first, length - run * kb) + inside, kb)
    places = pl.ds(first + inside, kb)
    k = _load_rows(k_ref, layer, example, head, key_slice).astype(q.dtype)
    v = k
    if not shared:
      v = _load_rows(v_ref, layer, example, head, key_slice).astype(q.dtype)
    at_k = Coords(k_pos[example, places][None], k_seg[example, places][None])
    distances = lambda: distance(at_q.pos, at_k.pos)
    s, c = tile_ops.power(
      scores, tile_ops.dot(q, k, tile_ops.NT), slopes, distances
    )
    if masked:
      nonfinite = ~tile_ops.finite(v)
      nan_flags = jnp.where(
        jnp.max(nonfinite.astype(jnp.float32), 1) > 0, jnp.nan, 0.0
      )
      v = jnp.where(nonfinite, jnp.zeros_like(v), v)
      s = jnp.where(
        visible(example_mask, at_q, at_k), s + nan_flags[None], -jnp.inf
      )
    m = jnp.maximum(old_m, jnp.max(s, 1) * c)
    safe = finite_max(m)
    p = jnp.exp2(s * c - safe[:, None])
    weight = jnp.exp2(old_m - safe)
    sums = tile_ops.dot(p.astype(v.dtype), v, tile_ops.NN)
    return acc * weight[:, None] + sums, m, total * weight + jnp.sum(p, 1)

  carry = (
    jnp.zeros((rows, _padded_side(v_ref.shape[-1])), jnp.float32),
    jnp.full((rows,), -jnp.inf, jnp.float32),
    jnp.zeros((rows,), jnp.float32),
  )
  full, full_count, masked, masked_count = lists
  for has_mask, columns, count in (
    (False, full, full_count),
    (True, masked, masked_count),
  ):
    steps = count[0] * run
    steps_per_split = (steps + splits - 1) // splits
    first = split * steps_per_split
    carry = lax.fori_loop(
      first,
      jnp.minimum(first + steps_per_split, steps),
      functools.partial(step, has_mask, columns),
      carry,
    )
  acc, m, total = carry
  acc_out[example, head, split, row_slice, :] = acc
  m_out[example, head, split, row_slice] = m * (1 / tile_ops.LOG2_E)
  l_out[example, head, split, row_slice] = total

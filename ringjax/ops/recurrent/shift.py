"""Token shift: y_t = x_{t - by}, over documents and over shards.

Guarantees: positions are true ones, whatever the layout and the number of
shards; a token whose neighbour does not exist, is padding or belongs to another
document gets `fill`. Linear in x; its gradient is the shift back, exactly.
Cost: contiguous shards send |by| tokens each, one hop (whole shards, in two
parts, if `by` is more than a shard). Zigzag shards send |by| tokens either way;
stripes of b tokens min(|by|, b) of each b, so with b = 1 all shards pass
everything on by one hop. Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax.checks import as_array
from ringjax.errors import DtypeError, OptionError, ShapeError
from ringjax.ops.recurrent import sequence
from ringjax.ops.recurrent.sequence import Shards
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout, Striped
from ringjax.typing import Index


def token_shift(
  x: Shaped[Array, "B T ..."],
  by: int = 1,
  *,
  fill: ArrayLike = 0,
  segment_ids: Int[Array, "B T"] | None = None,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = None,
  layout: Layout | None = None,
) -> Shaped[Array, "B T ..."]:
  """Shift a sequence by `by` tokens, over all its shards.

  With by=1 a token sees the one before it (token shift, RWKV: Peng et al.
  2023, arXiv 2305.13048); with by=-1 the next one: labels, and with -2, -3, ...
  those of multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737).

  Args:
    x: Tokens, [B, T, ...] of any dtype, T over `axis`, in the order of
      `layout`. Inside a shard_map where the axis is manual T is that of the
      shard.
    by: Number of tokens to shift by, either way; it may exceed a shard.
    fill: Value for tokens without a neighbour, a number, or an array of no
      dimensions; x's dtype must hold it.
    segment_ids: Document of each token, int32 [B, T], 0 is padding. A token
      whose neighbour is of another document gets `fill`, and so does padding.
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis that shards T. Default: that of x, else the current mesh's
      "seq" axis, else one device.
    layout: Order of the tokens on the shards, any; default `Contiguous()`.

  Returns:
    Shifted tokens [B, T, ...] in x's dtype. Differentiable in x and in `fill`.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  x = sequence.tokens("x", x)
  if not isinstance(by, numbers.Integral) or isinstance(by, bool):
    raise OptionError(
      "by", repr(by), "an int, known when this is traced", "pass by=1"
    )
  seg = sequence.documents(segment_ids, x)
  fill = _fill_value(fill, x.dtype)
  split_operands = (x,) if seg is None else (x, seg)
  place, layout = sequence.sharding_and_layout(
    split_operands, "x", mesh, axis, layout, False
  )
  dims = sequence.letters(x.ndim)
  (y,) = sequence.run(
    _Shift(int(by)), place, layout, (x, fill, seg), (dims, "", "bt"), (dims,)
  )
  return y


def _fill_value(fill: ArrayLike, dtype: DTypeLike) -> jax.Array:
  if isinstance(fill, numbers.Number):
    # Too large a number becomes infinite in a float, and wraps in an int.
    with np.errstate(all="ignore"):
      converted = np.asarray(fill).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) and converted != fill:
      raise DtypeError(
        "fill",
        f"{fill!r} for tokens of {dtype}",
        "a number that this dtype holds",
        "pass another, or cast x",
      )
    return jnp.asarray(converted)
  fill = as_array("fill", fill)
  if fill.shape or fill.dtype != dtype:
    raise ShapeError(
      "fill",
      f"{fill.dtype} of shape {fill.shape}",
      f"a number, or {dtype} of shape ()",
      "broadcasting takes jnp.where on the result",
    )
  return fill


@dataclasses.dataclass(frozen=True)
class _Shift:
  """`token_shift` of one shard's tokens."""

  by: int

  def __call__(
    self, shards: Shards, x: jax.Array, fill: jax.Array, seg: jax.Array | None
  ) -> tuple[jax.Array]:
    y, exists = shifted(shards, x, self.by, seg)
    return (jnp.where(sequence.beside(exists, y), y, fill),)


def shifted(
  shards: Shards,
  x: Shaped[Array, "B T ..."],
  by: int,
  seg: Int[Array, "B T"] | None,
) -> tuple[Shaped[Array, "B T ..."], Bool[Array, " T"] | Bool[Array, "B T"]]:
  """Shift per shard: x_{t - by} [B, L, ...], and whether the token exists.

  Where it does not, by bool [L] or [B, L], the value is undefined.
  """
  at = shards.positions
  if not -shards.length < by < shards.length:
    return x, at < 0
  exists = (at >= by) & (at < shards.length + min(by, 0))
  y, neighbour_seg = _shift_tokens(shards, (x, seg), by)
  if seg is None:
    return y, exists
  return y, exists[None] & (neighbour_seg == seg) & (seg > 0)


def _shift_tokens(shards: Shards, tree: PyTree, by: int) -> PyTree:
  """Shift to x_{t - by} where that token exists; elsewhere undefined."""
  layout = shards.layout
  if by == 0:
    return tree
  if isinstance(layout, Contiguous | Striped):
    block = layout.block if isinstance(layout, Striped) else shards.local
    return jax.tree.map(lambda x: _shift_stripes(shards, x, by, block), tree)
  messages = _messages(shards, by)
  return jax.tree.map(lambda x: _deliver(shards, x, messages), tree)


def _rotate(shards: Shards, x: jax.Array, hops: int) -> jax.Array:
  if hops % shards.size == 0:
    return x
  assert shards.axis is not None
  return collectives.rotate(x, shards.axis, hops)


def _shift_stripes(
  shards: Shards, x: jax.Array, by: int, block: int
) -> jax.Array:
  """Shift in stripes of `block` tokens; contiguous shards have one each.

  A round of stripes, one of each shard, is a ring of tokens that is rotated by
  the rest of `by`. Those that wrap around its end are of the round before.
  """
  span = block * shards.size
  rounds, remainder = divmod(by, span)
  hops, inner = divmod(remainder, block)
  stripes = x.shape[1] // block
  y = x.reshape(x.shape[0], stripes, block, *x.shape[2:])
  # Rounds that no token of this sequence leaves are not sent.
  base = rounds if rounds >= 0 else rounds + 1
  y = y[:, : stripes - base] if base > 0 else y[:, -base:]
  parts = [_rotate(shards, y[:, :, : block - inner], hops)]
  if inner:
    parts.insert(0, _rotate(shards, y[:, :, block - inner :], hops + 1))
  y = jnp.concatenate(parts, 2)
  if stripes > 1:
    padding = ((0, 0), (max(base, 0), max(-base, 0)), *((0, 0),) * (y.ndim - 2))
    y = jnp.pad(y, padding)
    wrapped = (
      shards.index * block + jnp.arange(block, dtype=jnp.int32) < remainder
    )
    wrapped = wrapped.reshape(1, 1, block, *(1,) * (y.ndim - 3))
    earlier = jnp.roll(y, rounds + 1 - base, 1)
    y = jnp.where(wrapped, earlier, jnp.roll(y, rounds - base, 1))
  return y.reshape(x.shape)


class _Message(NamedTuple):
  """Runs of tokens that move by the same number of shards.

  Fields:
    hops: Shards to move by, from shard i to shard i + hops.
    rows: Length of the longest run.
    source: Slot from which each shard sends `rows` tokens, [R].
    offset: Slot of each receiver for the first row that it gets, [R].
    first, last: Range of each receiver's slots to write, [R], last excluded.
  """

  hops: int
  rows: int
  source: np.ndarray
  offset: np.ndarray
  first: np.ndarray
  last: np.ndarray


def _messages(shards: Shards, by: int) -> list[_Message]:
  """Messages of a shift, each with one run between two shards."""
  size, local = shards.size, shards.local
  runs = _runs(shards)
  runs_by_message: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
  for receiver, receiver_runs in enumerate(runs):
    for source, sender_runs in enumerate(runs):
      index = 0
      for slot, start, count in receiver_runs:
        for its_slot, its_start, its_count in sender_runs:
          low = max(start, its_start + by)
          high = min(start + count, its_start + its_count + by)
          if low < high:
            run = (its_slot + low - by - its_start, slot + low - start)
            key = ((receiver - source) % size, index)
            runs_by_message.setdefault(key, {})[receiver] = (*run, high - low)
            index += 1
  messages = []
  for (hops, _), by_receiver in sorted(runs_by_message.items()):
    rows = max(count for _, _, count in by_receiver.values())
    source, offset, first, last = np.zeros((4, size), int)
    # Shards without a run copy the entries of another one: equal entries become
    # a constant of the program.
    send, receive, _ = next(iter(by_receiver.values()))
    begin = min(send, local - rows)
    source[:], offset[:] = begin, receive - (send - begin)
    for receiver, (send, receive, count) in by_receiver.items():
      begin = min(send, local - rows)
      source[(receiver - hops) % size] = begin
      offset[receiver] = receive - (send - begin)
      first[receiver], last[receiver] = receive, receive + count
    messages.append(_Message(hops, rows, source, offset, first, last))
  return messages


def _runs(shards: Shards) -> list[list[tuple[int, int, int]]]:
  """List (slot, position, tokens) of each shard's runs of tokens."""
  rows = shards.local * shards.size
  order = shards.layout.padded_order(rows, shards.size)
  order = order.reshape(shards.size, -1)
  runs = []
  for row in order:
    real = np.flatnonzero((row >= 0) & (row < shards.length))
    broken = np.flatnonzero(np.diff(row[real]) != 1) + 1
    parts = np.split(real, broken) if real.size else []
    runs.append([(int(p[0]), int(row[p[0]]), p.size) for p in parts])
  return runs


def _deliver(
  shards: Shards, x: jax.Array, messages: list[_Message]
) -> jax.Array:
  y, local, shard = x, x.shape[1], shards.index
  slots = jnp.arange(local, dtype=jnp.int32)
  entry = lambda table: jnp.asarray(table, jnp.int32)[shard]
  for m in messages:
    rows = _window(x, m.source, shard, m.rows)
    received = _rotate(shards, rows, m.hops)
    padding = ((0, 0), (local, local), *((0, 0),) * (x.ndim - 2))
    placed = _window(jnp.pad(received, padding), local - m.offset, shard, local)
    in_run = (slots >= entry(m.first)) & (slots < entry(m.last))
    y = jnp.where(sequence.beside(in_run, y), placed, y)
  return y


def _window(x: jax.Array, start: np.ndarray, me: Index, rows: int) -> jax.Array:
  """Slice `rows` tokens of x from this shard's entry of `start` on."""
  if np.all(start == start[0]):
    return lax.slice_in_dim(x, int(start[0]), int(start[0]) + rows, axis=1)
  first = jnp.asarray(start, jnp.int32)[me]
  return lax.dynamic_slice_in_dim(x, first, rows, axis=1)

"""Each token's neighbour: y_t = x_{t - by}, over documents and over shards.

Guarantees: positions are true ones, whatever the layout and the number of
shards; a token whose neighbour does not exist, is padding or belongs to another
document gets `fill`. Linear in x; its gradient is the shift back, exactly.
Cost: contiguous shards send |by| tokens each, one hop (whole shards, in two
parts, where `by` is more than a shard). Zigzag shards send |by| tokens either
way; stripes of b tokens min(|by|, b) of each b, so with b = 1 all shards pass
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
from jaxtyping import Array, Int, PyTree, Shaped

from ringjax.checks import as_array
from ringjax.errors import DtypeError, OptionError, ShapeError
from ringjax.ops import sequence
from ringjax.ops.sequence import Shards
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
) -> jax.Array:
  """Moves a sequence along by `by` tokens, over all its shards.

  With by=1 a token sees the one before it (token shift, RWKV: Peng et al.
  2023, arXiv 2305.13048); with by=-1 the next one: labels, and with -2, -3, ...
  those of multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737).

  Args:
    x: [B, T, ...] of any dtype, T over `axis`, in the order of `layout`.
      Inside a shard_map where the axis is manual T is that of the shard.
    by: how far in tokens, either way; it may be more than a shard holds.
    fill: a number, or an array of no dimensions, for tokens without a
      neighbour; x's dtype must hold it.
    segment_ids: int32 [B, T], the document of each token, 0 is padding. A
      token whose neighbour is of another document gets `fill`, and so does
      padding.
    mesh: the mesh; default: the operands', else the current one.
    axis: the mesh axis that shards T. Default: what shards x, else the current
      mesh's "seq" axis, else one device.
    layout: the order in which tokens lie on the shards, any; default
      `Contiguous()`.

  Returns:
    [B, T, ...] in x's dtype. Differentiable in x and in `fill`.

  Raises:
    RingjaxError: in Python, before anything is compiled.
  """
  x = sequence.tokens("x", x)
  if not isinstance(by, numbers.Integral) or isinstance(by, bool):
    raise OptionError(
      "by", repr(by), "an int, known when this is traced", "pass by=1"
    )
  seg = sequence.documents(segment_ids, x)
  fill = _filling(fill, x.dtype)
  cut = (x,) if seg is None else (x, seg)
  place, layout = sequence.found(cut, "x", mesh, axis, layout, False)
  dims = sequence.letters(x.ndim)
  (y,) = sequence.run(
    _Shift(int(by)), place, layout, (x, fill, seg), (dims, "", "bt"), (dims,)
  )
  return y


def _filling(fill: ArrayLike, dtype: DTypeLike) -> jax.Array:
  if isinstance(fill, numbers.Number):
    # Too large a number is infinite in a float, and another one in an int.
    with np.errstate(all="ignore"):
      same = np.asarray(fill).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) and same != fill:
      raise DtypeError(
        "fill",
        f"{fill!r} for tokens of {dtype}",
        "a number that this dtype holds",
        "pass another, or cast x",
      )
    return jnp.asarray(same)
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
    y, there = shifted(shards, x, self.by, seg)
    return (jnp.where(sequence.beside(there, y), y, fill),)


def shifted(
  shards: Shards,
  x: Shaped[Array, "B T ..."],
  by: int,
  seg: Int[Array, "B T"] | None,
) -> tuple[jax.Array, jax.Array]:
  """Per shard: x_{t - by} [B, L, ...], and whether there is such a token.

  Where there is none, bool [L] or [B, L], the number is any.
  """
  at = shards.positions
  if not -shards.length < by < shards.length:
    return x, at < 0
  there = (at >= by) & (at < shards.length + min(by, 0))
  y, before = _moved(shards, (x, seg), by)
  if seg is None:
    return y, there
  return y, there[None] & (before == seg) & (seg > 0)


def _moved(shards: Shards, tree: PyTree, by: int) -> PyTree:
  """x_{t - by} wherever there is such a token, and elsewhere any."""
  layout = shards.layout
  if by == 0:
    return tree
  if isinstance(layout, Contiguous | Striped):
    block = layout.block if isinstance(layout, Striped) else shards.local
    return jax.tree.map(lambda x: _round(shards, x, by, block), tree)
  messages = _messages(shards, by)
  return jax.tree.map(lambda x: _delivered(shards, x, messages), tree)


def _sent(shards: Shards, x: jax.Array, hops: int) -> jax.Array:
  if hops % shards.size == 0:
    return x
  assert shards.axis is not None
  return collectives.rotate(x, shards.axis, hops)


def _round(shards: Shards, x: jax.Array, by: int, block: int) -> jax.Array:
  """The shift of stripes of `block` tokens; contiguous shards have one each.

  A round of stripes, one of each shard, is a ring of tokens that is turned by
  the rest of `by`. Those that come around its end are of the round before.
  """
  span = block * shards.size
  rounds, rest = divmod(by, span)
  hops, inner = divmod(rest, block)
  every = x.shape[1] // block
  y = x.reshape(x.shape[0], every, block, *x.shape[2:])
  # Rounds that no token of this sequence is moved out of are not sent.
  base = rounds if rounds >= 0 else rounds + 1
  y = y[:, : every - base] if base > 0 else y[:, -base:]
  parts = [_sent(shards, y[:, :, : block - inner], hops)]
  if inner:
    parts.insert(0, _sent(shards, y[:, :, block - inner :], hops + 1))
  y = jnp.concatenate(parts, 2)
  if every > 1:
    more = ((0, 0), (max(base, 0), max(-base, 0)), *((0, 0),) * (y.ndim - 2))
    y = jnp.pad(y, more)
    around = shards.index * block + jnp.arange(block, dtype=jnp.int32) < rest
    around = around.reshape(1, 1, block, *(1,) * (y.ndim - 3))
    earlier = jnp.roll(y, rounds + 1 - base, 1)
    y = jnp.where(around, earlier, jnp.roll(y, rounds - base, 1))
  return y.reshape(x.shape)


class _Message(NamedTuple):
  """Runs of tokens that go the same number of shards along.

  Fields:
    hops: from shard i to shard i + hops.
    rows: the longest run.
    source: [R], the slot from which a shard sends `rows` of them.
    offset: [R], the slot of a receiver for the first row that it gets.
    first, last: [R], the slots of a receiver that are meant, last excluded.
  """

  hops: int
  rows: int
  source: np.ndarray
  offset: np.ndarray
  first: np.ndarray
  last: np.ndarray


def _messages(shards: Shards, by: int) -> list[_Message]:
  """What is sent for a shift: between two shards one run in each message."""
  size, local = shards.size, shards.local
  runs = _runs(shards)
  found: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
  for to, mine in enumerate(runs):
    for source, theirs in enumerate(runs):
      number = 0
      for slot, start, count in mine:
        for its_slot, its_start, its_count in theirs:
          low = max(start, its_start + by)
          high = min(start + count, its_start + its_count + by)
          if low < high:
            run = (its_slot + low - by - its_start, slot + low - start)
            key = ((to - source) % size, number)
            found.setdefault(key, {})[to] = (*run, high - low)
            number += 1
  messages = []
  for (hops, _), by_receiver in sorted(found.items()):
    rows = max(count for _, _, count in by_receiver.values())
    source, offset, first, last = np.zeros((4, size), int)
    # Shards without a run do as another one does: what is the same for all is
    # a constant of the program.
    send, receive, _ = next(iter(by_receiver.values()))
    begin = min(send, local - rows)
    source[:], offset[:] = begin, receive - (send - begin)
    for to, (send, receive, count) in by_receiver.items():
      begin = min(send, local - rows)
      source[(to - hops) % size] = begin
      offset[to] = receive - (send - begin)
      first[to], last[to] = receive, receive + count
    messages.append(_Message(hops, rows, source, offset, first, last))
  return messages


def _runs(shards: Shards) -> list[list[tuple[int, int, int]]]:
  """(slot, position, tokens) of each shard's runs of consecutive tokens."""
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


def _delivered(
  shards: Shards, x: jax.Array, messages: list[_Message]
) -> jax.Array:
  y, local, me = x, x.shape[1], shards.index
  slots = jnp.arange(local, dtype=jnp.int32)
  mine = lambda table: jnp.asarray(table, jnp.int32)[me]
  for m in messages:
    rows = _window(x, m.source, me, m.rows)
    got = _sent(shards, rows, m.hops)
    around = ((0, 0), (local, local), *((0, 0),) * (x.ndim - 2))
    placed = _window(jnp.pad(got, around), local - m.offset, me, local)
    meant = (slots >= mine(m.first)) & (slots < mine(m.last))
    y = jnp.where(sequence.beside(meant, y), placed, y)
  return y


def _window(x: jax.Array, start: np.ndarray, me: Index, rows: int) -> jax.Array:
  """`rows` tokens of x from this shard's entry of `start` on."""
  if np.all(start == start[0]):
    return lax.slice_in_dim(x, int(start[0]), int(start[0]) + rows, axis=1)
  at = jnp.asarray(start, jnp.int32)[me]
  return lax.dynamic_slice_in_dim(x, at, rows, axis=1)

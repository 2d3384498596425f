"""Halo attention: neighbouring shards send the keys that a window reaches.

Guarantees: equals `reference` on the gathered sequence for masks with a window,
over consecutive tokens on consecutive shards; forward and backward.
Cost: a query that sees W - 1 keys behind it and A ahead needs that many tokens
from the shards next to its own, and no more is sent: K and V of W - 1 + A
tokens to one neighbour each way, or to as many as have these tokens; backward
the same and as many rows of the float32 sums dK, dV back. One call of the
local algorithm, nothing to merge.
Memory: the keys that a shard's queries see.

A ring cut to a window (`Ring` cuts itself) sends whole shards and hands them
on; this is for windows that are short beside a shard, and where each message
costs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.kv_block import KVBlock, KVStrategy
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.wire_format import WireLike, pack, unpack
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout


class _HaloMessage(NamedTuple):
  """Keys that a shard sends to another.

  Fields:
    shift: how many shards on they go.
    tokens: how many they are.
    start: the first of them, counted among those of the shard that sends.
    place: the same, counted among the keys in reach of the other shard.
  """

  shift: int
  tokens: int
  start: int
  place: int


@dataclasses.dataclass(frozen=True)
class Halo(KVStrategy):
  """Halo exchange around a local algorithm.

  Attributes:
    local: `Blockwise()` or `Dense()`.
    axis: the axis; filled in by the functions that take `axis=`.
    reach: (behind, ahead), tokens that a query sees on either side; filled in
      from the mask.
    wire: how keys and values travel, as in `Ring`.
  """

  reach: tuple[int, int] = (0, 0)
  wire: WireLike | None = None

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Halo:
    """This halo as wide as `mask` needs it.

    `derived`: queries and keys are the same tokens, where the layout has them.

    Raises:
      OptionError: no window, or shards without consecutive tokens.
    """
    behind, ahead = mask.reach
    if behind is None or ahead is None:
      raise OptionError(
        "strategy",
        f"a halo with the mask {mask}",
        "a mask with a window, such as Causal() & Window(4096)",
        "pass local_window_size=, or strategy='ring'",
      )
    self._check_consecutive(layout, derived, Contiguous, "layout=Contiguous()")
    return dataclasses.replace(self, reach=(behind, ahead))

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    if self.axis is not None:
      # Columns for the slots before the first token and behind the last.
      edges = self._edges(x.k.shape[2])
      terms = terms._replace(bias=_widen(terms.bias, edges))
      context = context._replace(allow=_widen(context.allow, edges))
    return super().attend(scores, x, terms, context)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Folds the keys in reach into `carry`.

    The columns of the bias and the boolean mask begin as far before the first
    token as a query looks back.
    """
    return self.local.forward(*self._in_reach(x, args), carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Gradients of a shard's own keys; adds to `carry`, (dq, dterms)."""
    length = x.k.shape[2]
    grads = self.local.backward(*self._in_reach(x, args), residuals, carry)
    sums = pack(grads.k, grads.v)
    axis = 3 if isinstance(sums, jax.Array) else 2
    mine = _cut(sums, self._edges(length)[0], length, axis)
    for m in self._messages(length):
      back = self._move(_cut(sums, m.place, m.tokens, axis), -m.shift)
      add = functools.partial(_add_at, start=m.start, axis=axis)
      mine = jax.tree.map(add, mine, back)
    dk, dv = unpack(mine)
    return grads._replace(k=dk, v=dv)

  def _in_reach(self, x: Local, args: ScoreArgs) -> tuple[Local, ScoreArgs]:
    """A shard's keys between those before and those behind them."""
    if self.axis is None:
      return x, args
    length = x.k.shape[2]
    sent, kv_axis = KVBlock.with_axis(x, args.context, self._wire)
    pieces = {self._edges(length)[0]: (x, args.context.k)}
    for m in self._messages(length):
      part = KVBlock(
        _cut(sent.kv, m.start, m.tokens, kv_axis),
        _cut(sent.at, m.start, m.tokens, sent.axis_of_tokens),
      )
      there, seen = self._move(part, m.shift).seen_by(x, args, 0, self._wire)
      pieces[m.place] = there, seen.context.k
    every = [pieces[place] for place in sorted(pieces)]
    join = lambda parts, axis: jnp.concatenate(parts, axis)
    k = join([part.k for part, _ in every], 2)
    v = join([part.v for part, _ in every], 2)
    at = jax.tree.map(lambda *parts: join(parts, 1), *(at for _, at in every))
    column = args.column + self._place()[1] * length
    return Local(x.q, k, v), args.of_keys(at, column)

  def _edges(self, length: int) -> tuple[int, int]:
    """Tokens before and behind a shard's own that its queries may see."""
    most = (self._place()[0] - 1) * length
    behind, ahead = self.reach
    return min(behind, most), min(ahead, most)

  def _messages(self, length: int) -> list[_HaloMessage]:
    """What each shard sends for the keys in reach of others."""
    behind, ahead = self._edges(length)
    found = []
    for n, left in enumerate(range(behind, 0, -length), 1):
      tokens = min(length, left)
      found.append(_HaloMessage(n, tokens, length - tokens, left - tokens))
    for n, done in enumerate(range(0, ahead, length), 1):
      tokens = min(length, ahead - done)
      found.append(_HaloMessage(-n, tokens, 0, behind + length + done))
    return found

  def _move(self, tree: PyTree, shift: int) -> PyTree:
    """Sends to the shard `shift` places on; the ends of the row get nothing."""
    assert self.axis is not None
    return collectives.shift(tree, self.axis, shift)


def _widen(pair: jax.Array | None, edges: tuple[int, int]) -> jax.Array | None:
  if pair is None or pair.shape[4] == 1:
    return pair
  return jnp.pad(pair, ((0, 0),) * 4 + (edges,))


def _cut(tree: PyTree, start: int, size: int, axis: int) -> PyTree:
  return jax.tree.map(
    lambda a: lax.slice_in_dim(a, start, start + size, axis=axis), tree
  )


def _add_at(a: jax.Array, b: jax.Array, start: int, axis: int) -> jax.Array:
  widths = [(0, 0)] * a.ndim
  widths[axis] = (start, a.shape[axis] - start - b.shape[axis])
  return a + jnp.pad(b, widths)

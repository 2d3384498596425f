"""Halo attention: a window's keys come from the neighbours at once.

Law:   equals `reference` on the gathered sequence for masks with a window,
       over consecutive tokens on consecutive shards; forward and backward.
Cost:  a query that sees W - 1 keys behind it and A ahead needs that many
       tokens from the shards next to its own, and no more is sent: K and V of
       W - 1 + A tokens to one neighbour each way, or to as many as these
       tokens lie on; backward the same and as many rows of the float32 sums
       dK, dV back. One call of the local algorithm, nothing to merge.
Memory: the keys that a shard's queries see.

A ring cut to a window (`Ring` cuts itself) sends whole shards and hands them
on; this is for windows that are short beside a shard, and where each message
costs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  Residuals,
)
from ringjax.ops.attention.kv_block import KVBlock, pack, unpack
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.strategy import Strategy
from ringjax.ops.attention.wire_format import as_wire
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout


@dataclasses.dataclass(frozen=True)
class Halo(Strategy):
  """Halo exchange around a local algorithm.

  Attributes:
    local: `Blockwise()` or `Dense()`.
    axis: the axis; filled in by the functions that take `axis=`.
    reach: (behind, ahead), tokens that a query sees on either side; filled in
      from the mask.
    wire: how keys and values travel, as in `Ring`.
  """

  reach: tuple[int, int] = (0, 0)
  wire: Any = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "wire", as_wire(self.wire, self.local))

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Halo:
    """This halo as wide as `mask` needs it.

    `derived`: queries and keys are the same tokens, where the layout has them.

    Raises:
      OptionError: no window, or tokens that do not lie in a row.
    """
    behind, ahead = mask.reach
    if behind is None or ahead is None:
      raise OptionError(
        "strategy",
        f"a halo with the mask {mask}",
        "a mask with a window, such as Causal() & Window(4096)",
        "pass local_window_size=, or strategy='ring'",
      )
    if not derived or not isinstance(layout, Contiguous):
      how = (
        f"the layout {layout}"
        if derived
        else "positions of your own, or keys of another length"
      )
      raise OptionError(
        "strategy",
        f"a halo with {how}",
        "consecutive tokens on consecutive shards",
        "pass layout=Contiguous(), or strategy='ring'",
      )
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

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial:
    """Folds the keys in reach into `carry`.

    The columns of `terms.bias` and `context.allow` begin as far before the
    first token as a query looks back.
    """
    length, (_, me) = x.k.shape[2], self._place()
    there, seen = self._in_reach(x, context)
    at = column + me * length
    return self.local.forward(scores, there, terms, seen, at, carry)

  def backward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    residuals: Residuals,
    carry: tuple[jax.Array, Terms],
  ) -> Gradients:
    """Gradients of a shard's own keys; adds to `carry`, (dq, dterms)."""
    length, (_, me) = x.k.shape[2], self._place()
    there, seen = self._in_reach(x, context)
    at = column + me * length
    grads = self.local.backward(
      scores, there, terms, seen, at, residuals, carry
    )
    sums = pack(grads.k, grads.v)
    axis = 3 if isinstance(sums, jax.Array) else 2
    behind = self._edges(length)[0]
    cut = lambda tree, start, stop: jax.tree.map(
      lambda a: lax.slice_in_dim(a, start, stop, axis=axis), tree
    )
    mine = cut(sums, behind, behind + length)
    for shift, tokens in self._sends(length):
      # Where these tokens stand among the keys in reach.
      far = (abs(shift) - 1) * length
      start = behind - far - tokens if shift > 0 else behind + length + far
      back = self._move(cut(sums, start, start + tokens), -shift)
      first = length - tokens if shift > 0 else 0
      mine = jax.tree.map(
        lambda m, b, first=first: _add_at(m, b, first, axis), mine, back
      )
    dk, dv = unpack(mine)
    return grads._replace(k=dk, v=dv)

  def _in_reach(self, x: Local, context: Context) -> tuple[Local, Context]:
    """A shard's keys between those before and those behind them."""
    if self.axis is None:
      return x, context
    length = x.k.shape[2]
    own = KVBlock.of(x, context)
    sent = KVBlock.of(x, context, self.wire)
    kv_axis = 3 if x.k.shape == x.v.shape else 2
    before: list[tuple[Local, Context]] = []
    after: list[tuple[Local, Context]] = []
    for shift, tokens in self._sends(length):
      start = length - tokens if shift > 0 else 0
      cut = lambda a, axis, start=start, stop=start + tokens: lax.slice_in_dim(
        a, start, stop, axis=axis
      )
      part = KVBlock(
        jax.tree.map(lambda a, cut=cut: cut(a, kv_axis), sent.kv),
        jax.tree.map(lambda a, cut=cut: cut(a, own.axis_of_tokens), sent.at),
      )
      came = self._move(part, shift).seen_by(x, context, self.wire)
      if shift > 0:
        before.insert(0, came)
      else:
        after.append(came)
    every = [*before, own.seen_by(x, context), *after]
    join = lambda parts, axis: jnp.concatenate(parts, axis)
    k = join([part.k for part, _ in every], 2)
    v = join([part.v for part, _ in every], 2)
    at = jax.tree.map(
      lambda *parts: join(parts, 1), *(seen.k for _, seen in every)
    )
    return Local(x.q, k, v), context._replace(k=at)

  def _edges(self, length: int) -> tuple[int, int]:
    """Tokens before and behind a shard's own that its queries may see."""
    most = (self._place()[0] - 1) * length
    behind, ahead = self.reach
    return min(behind, most), min(ahead, most)

  def _sends(self, length: int) -> list[tuple[int, int]]:
    """(how many shards on, how many tokens) of each message."""
    if self.axis is None:
      return []
    found = []
    for tokens, way in zip(self._edges(length), (1, -1), strict=True):
      for n in range(-(-tokens // length)):
        found.append((way * (n + 1), min(length, tokens - n * length)))
    return found

  def _move(self, tree: Any, shift: int) -> Any:
    """Sends to the shard `shift` places on; the ends of the row get nothing."""
    assert self.axis is not None
    return collectives.shift(tree, self.axis, shift)


def _widen(pair: Any, edges: tuple[int, int]) -> Any:
  if pair is None or pair.shape[4] == 1:
    return pair
  return jnp.pad(pair, ((0, 0),) * 4 + (edges,))


def _add_at(a: jax.Array, b: jax.Array, start: int, axis: int) -> jax.Array:
  widths = [(0, 0)] * a.ndim
  widths[axis] = (start, a.shape[axis] - start - b.shape[axis])
  return a + jnp.pad(b, widths)

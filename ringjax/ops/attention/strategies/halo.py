"""Halo attention: neighbouring shards send the keys that a window reaches.

Guarantees: equals `reference` on the gathered sequence for masks with a window,
over consecutive tokens on consecutive shards; forward and backward.
Cost: a query that sees W - 1 keys before it and A after it needs that many
tokens from neighbouring shards, and no more is sent: K and V of W - 1 + A
tokens to one neighbour each way, or to as many as have these tokens; backward
the same and as many rows of the float32 sums dK, dV back. One call of the local
algorithm, nothing to merge.
Memory: the keys that a shard's queries see.

A ring cut to a window (`Ring` cuts itself) sends whole shards and passes them
on; a halo suits windows that are shorter than a shard, where each message
costs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.strategies.kv_block import KVBlock, KVStrategy
from ringjax.ops.attention.strategies.wire_format import WireLike, pack, unpack
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import Partial
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout


class _HaloMessage(NamedTuple):
  """Keys that a shard sends to another.

  Fields:
    shift: Number of shards by which they move.
    tokens: Number of keys.
    start: Index of the first among the sender's keys.
    place: Index of the first among the receiver's keys in reach.
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
    axis: Mesh axis; filled in by the functions that take `axis=`.
    reach: (back, forward) tokens that a query sees on either side; filled in
      from the mask.
    wire: Wire format of keys and values, as in `Ring`.
  """

  layouts: ClassVar[tuple[type[Layout], ...]] = (Contiguous,)

  reach: tuple[int, int] = (0, 0)
  wire: WireLike | None = None

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Halo:
    """Adapt the halo's width to `mask`.

    `derived`: whether queries and keys are the same tokens, at the same places.

    Raises:
      OptionError: If the mask has no window, or shards no consecutive tokens.
    """
    keys_before, keys_after = mask.reach
    if keys_before is None or keys_after is None:
      raise OptionError(
        "strategy",
        f"a halo with the mask {mask}",
        "a mask with a window, such as Causal() & Window(4096)",
        "pass local_window_size=, or strategy='ring'",
      )
    self._check_consecutive(layout, derived, "layout=Contiguous()")
    return dataclasses.replace(self, reach=(keys_before, keys_after))

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
    if self.axis is not None:
      # Columns for the slots before the first token and after the last.
      edges = self._edges(x.k.shape[2])
      terms = terms._replace(bias=_widen(terms.bias, edges))
      context = context._replace(allow=_widen(context.allow, edges))
    return super().attend(scores, x, terms, context)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys in reach into `carry`.

    The columns of the bias and the boolean mask begin as far before the first
    token as a query looks back.
    """
    return self.local.forward(*self._in_reach(x, args), carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of a shard's own keys to `carry`, (dq, dterms)."""
    length = x.k.shape[2]
    grads = self.local.backward(*self._in_reach(x, args), residuals, carry)
    sums = pack(grads.k, grads.v)
    axis = 3 if isinstance(sums, jax.Array) else 2
    own_sums = _slice(sums, self._edges(length)[0], length, axis)
    for m in self._messages(length):
      returned = self._move(_slice(sums, m.place, m.tokens, axis), -m.shift)
      add = functools.partial(_add_at, start=m.start, axis=axis)
      own_sums = jax.tree.map(add, own_sums, returned)
    dk, dv = unpack(own_sums)
    return grads._replace(k=dk, v=dv)

  def _in_reach(self, x: Local, args: ScoreArgs) -> tuple[Local, ScoreArgs]:
    """Join a shard's keys with those of its neighbours in reach."""
    if self.axis is None:
      return x, args
    length = x.k.shape[2]
    sent, kv_axis = KVBlock.with_axis(x, args.context, self._wire)
    pieces = {self._edges(length)[0]: (x, args.context.k)}
    for m in self._messages(length):
      part = KVBlock(
        _slice(sent.kv, m.start, m.tokens, kv_axis),
        _slice(sent.at, m.start, m.tokens, sent.axis_of_tokens),
      )
      neighbour, neighbour_args = self._move(part, m.shift).seen_by(
        x, args, 0, self._wire
      )
      pieces[m.place] = neighbour, neighbour_args.context.k
    by_place = [pieces[place] for place in sorted(pieces)]
    join = lambda parts, axis: jnp.concatenate(parts, axis)
    k = join([part.k for part, _ in by_place], 2)
    v = join([part.v for part, _ in by_place], 2)
    at = jax.tree.map(
      lambda *parts: join(parts, 1), *(at for _, at in by_place)
    )
    column = args.column + self._place()[1] * length
    return Local(x.q, k, v), args.of_keys(at, column)

  def _edges(self, length: int) -> tuple[int, int]:
    """Numbers of tokens before and after a shard that its queries may see."""
    max_tokens = (self._place()[0] - 1) * length
    keys_before, keys_after = self.reach
    return min(keys_before, max_tokens), min(keys_after, max_tokens)

  def _messages(self, length: int) -> list[_HaloMessage]:
    """Messages by which a shard's keys reach the shards that see them."""
    keys_before, keys_after = self._edges(length)
    messages = []
    for n, remaining in enumerate(range(keys_before, 0, -length), 1):
      tokens = min(length, remaining)
      messages.append(
        _HaloMessage(n, tokens, length - tokens, remaining - tokens)
      )
    for n, sent in enumerate(range(0, keys_after, length), 1):
      tokens = min(length, keys_after - sent)
      messages.append(_HaloMessage(-n, tokens, 0, keys_before + length + sent))
    return messages

  def _move(self, tree: PyTree, shift: int) -> PyTree:
    """Send to the shard `shift` places on; the row's ends get nothing."""
    assert self.axis is not None
    return collectives.shift(tree, self.axis, shift)


def _widen(pair: jax.Array | None, edges: tuple[int, int]) -> jax.Array | None:
  if pair is None or pair.shape[4] == 1:
    return pair
  return jnp.pad(pair, ((0, 0),) * 4 + (edges,))


def _slice(tree: PyTree, start: int, size: int, axis: int) -> PyTree:
  return jax.tree.map(
    lambda a: lax.slice_in_dim(a, start, start + size, axis=axis), tree
  )


def _add_at(a: jax.Array, b: jax.Array, start: int, axis: int) -> jax.Array:
  widths = [(0, 0)] * a.ndim
  widths[axis] = (start, a.shape[axis] - start - b.shape[axis])
  return a + jnp.pad(b, widths)

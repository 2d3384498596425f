"""The contract of a selection: which keys each query reads.

A selection chooses, for each query, blocks of `block` neighbouring keys; tokens
are blocks of one. A key's number is its index in the natural order of the
sequence, and its position, too, where the call has no positions of keys. Block
i holds the numbers from i * block to (i + 1) * block - 1. Of a chosen block a
query reads the keys that the call's mask shows. No gradient flows through a
choice.

A new kind is a file with a subclass of `BlockSelection` and a case in
`tests/contracts/sparse.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import ShapeError
from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.sparse.gathered import GatherChosen
from ringjax.ops.mask import Coords, Mask
from ringjax.parallel import collectives

# Leading dimensions of arrays, by field; "?" follows one that may be 1.
Dimensions = dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTokens:
  """Per shard: what a selection may look at.

  Attributes:
    q: Queries, [B, T, N, H].
    k: Keys, [B, S, K, H].
    q_at: Coordinates of the queries, [B or 1, T].
    k_at: Coordinates of the keys, [B or 1, S].
    number: Index of each key in the whole sequence, int32 [S].
    mask: Pairs that are visible.
    axis: Manual axis that shards T and S, or None.
    length: Number of keys of the whole sequence.
  """

  q: Float[Array, "B T N H"]
  k: Float[Array, "B S K H"]
  q_at: Coords
  k_at: Coords
  number: Int[Array, " S"]
  mask: Mask
  axis: str | tuple[str, ...] | None
  length: int


class KeyChoice(abc.ABC):
  """Base class of choices of keys: frozen dataclasses that are pytrees.

  Attributes:
    dimensions: Leading dimensions of each array, as in `arguments`.
  """

  dimensions: ClassVar[Dimensions] = {}

  @property
  def by_position(self) -> bool:
    """Whether blocks hold positions, which are those of the layout."""
    return True

  @property
  def sums_heads(self) -> bool:
    """Whether query heads of a kv head choose together, so on one shard."""
    return False

  @abc.abstractmethod
  def choice_heads(self, heads: int, kv_heads: int) -> int:
    """Number of heads that choose: 1 (for all), `kv_heads` or `heads`."""

  @abc.abstractmethod
  def check(self, q: tuple[int, ...], k: tuple[int, ...], mask: Mask) -> None:
    """Raise RingjaxError if the selection does not fit a call.

    Args:
      q: Shape of the queries, [B, T, N, H].
      k: Shape of the keys, [B, S, K, H], S counting those of all shards.
      mask: Mask over coordinates.
    """

  @abc.abstractmethod
  def attend(
    self,
    tokens: ShardTokens,
    v: Float[Array, "B S K J"],
    scores: Scores,
    sinks: Float[Array, " N"] | None,
    head_axes: tuple[str, ...],
  ) -> tuple[
    Float[Array, "B T N _"], Float[Array, "B T N"], Int[Array, "B T M n"]
  ]:
    """Per shard: the output, the log-sum-exp and a record of the choice.

    Args:
      tokens: Queries and keys with their coordinates.
      v: Values.
      scores: Scores of queries and keys.
      sinks: Sink logits of the heads, or None.
      head_axes: Manual axes that shard the heads.
    """

  def map_arrays(self, f: Callable[[Any, tuple[str, ...]], Any]) -> KeyChoice:
    """Replace each array that is not None by f(array, its dimensions)."""
    arrays = {
      name: f(getattr(self, name), dimensions)
      for name, dimensions in self.dimensions.items()
      if getattr(self, name) is not None
    }
    return tree.with_leaves(self, **arrays)


class BlockSelection(KeyChoice):
  """Base class of the kinds in which each query has a list of blocks."""

  @property
  @abc.abstractmethod
  def block_size(self) -> int:
    """Number of positions of a block; 1 chooses tokens."""

  @abc.abstractmethod
  def choose(self, tokens: ShardTokens) -> Int[Array, "B T _ n"]:
    """Per shard: the distinct blocks of each query, -1 for none.

    The third dimension is that of `choice_heads`.
    """

  def attend(
    self,
    tokens: ShardTokens,
    v: Float[Array, "B S K J"],
    scores: Scores,
    sinks: Float[Array, " N"] | None,
    head_axes: tuple[str, ...],
  ) -> tuple[
    Float[Array, "B T N _"], Float[Array, "B T N"], Int[Array, "B T M n"]
  ]:
    """Per shard: the output, the log-sum-exp and the blocks of each query.

    Values without numbers stand for the keys themselves.

    Args:
      tokens: Queries and keys with their coordinates.
      v: Values.
      scores: Scores of queries and keys.
      sinks: Sink logits of the heads, or None.
      head_axes: Manual axes that shard the heads.
    """
    del head_axes
    b, t, n, h = tokens.q.shape
    selection, q, k = lax.stop_gradient((self, tokens.q, tokens.k))
    chosen = selection.choose(dataclasses.replace(tokens, q=q, k=k))
    chosen = lax.stop_gradient(chosen)
    kv_heads = tokens.k.shape[2]
    heads = n if chosen.shape[2] == n else kv_heads
    local = Local(
      jnp.transpose(
        tokens.q.reshape(b, t, heads, n // heads, h), (0, 2, 3, 1, 4)
      ),
      jnp.swapaxes(tokens.k, 1, 2),
      jnp.swapaxes(v, 1, 2),
    )
    context = Context(
      tokens.q_at,
      tokens.k_at,
      tokens.mask,
      chosen=chosen,
      number=tokens.number,
    )
    terms = Terms(sinks=None if sinks is None else sinks.reshape(heads, -1))
    algorithm = GatherChosen(tokens.length, self.block_size, tokens.axis)
    out, lse = attend(algorithm, scores, local, terms, context)
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
    lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(b, t, n)
    return out, lse, chosen


class ScoredBlocks(BlockSelection):
  """Base class of the kinds whose blocks get scores of an index, which learns.

  A query is offered the blocks among which its scores choose: those that it
  reads in any case are not.
  """

  @property
  @abc.abstractmethod
  def queries(self) -> tuple[Any, ...]:
    """Arrays of the index's queries, [B, T, ...] each."""

  @abc.abstractmethod
  def units(self, tokens: ShardTokens) -> PyTree:
    """Per shard: what scores need of the keys of the whole sequence."""

  @abc.abstractmethod
  def scores_per_query(self, blocks: int) -> int:
    """Number of products of the index for the scores of so many blocks."""

  @abc.abstractmethod
  def unit_scores(
    self,
    queries: tuple[Any, ...],
    q_at: Coords,
    units: PyTree,
    mask: Mask,
    blocks: Int[Array, "B q M n"] | None = None,
  ) -> tuple[Float[Array, "B q M c"], Bool[Array, "B q M c"]]:
    """Scores of blocks, and whether a query is offered each.

    Args:
      queries: `queries` of some tokens.
      q_at: Their coordinates, [B, q].
      units: Arrays that `units` returned.
      mask: Pairs that are visible.
      blocks: Numbers of the blocks, -1 for none; None: all blocks.
    """


def keys_by_position(
  tokens: ShardTokens, keys: Shaped[Array, "B S E"], length: int
) -> tuple[Shaped[Array, "B A E"], Int[Array, "B A"]]:
  """Gather an index's keys, and their documents, of the whole sequence.

  Args:
    tokens: Tokens of a shard.
    keys: Index keys of the shard's tokens, or other numbers of theirs.
    length: Number of positions, A; those without a token are zeros.
  """
  b, size, _ = keys.shape
  seg = jnp.broadcast_to(tokens.k_at.seg, (b, size))
  shard = keys, seg, tokens.number
  if tokens.axis is not None:
    axes = collectives.varying_axes(shard) | {*collectives.names(tokens.axis)}
    keys, seg, number = collectives.vary(shard, axes)
    keys, seg = collectives.gather((keys, seg), tokens.axis, 1)
    number = collectives.gather(number, tokens.axis, 0)
  else:
    keys, seg, number = shard
  put = lambda x: (
    collectives.zeros((b, length, *x.shape[2:]), x.dtype, (x, number))
    .at[:, number]
    .set(x, mode="drop")
  )
  return put(keys), put(seg)


def check_shape(
  name: str, x: Shaped[Array, ...], expected: tuple[int | None, ...], words: str
) -> None:
  """Raise ShapeError unless the sizes of `x` are those that are not None."""
  matches = x.ndim == len(expected) and all(
    want is None or have == want
    for have, want in zip(x.shape, expected, strict=True)
  )
  if not matches:
    shown = ", ".join("any" if n is None else str(n) for n in expected)
    raise ShapeError(
      name, f"shape {x.shape}", f"[{shown}]: {words}", "pass arrays of the call"
    )

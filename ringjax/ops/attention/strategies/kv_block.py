"""Keys and values in flight between shards."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.scores import Context, ScoreArgs
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.attention.strategies.wire_format import (
  Wire,
  as_wire,
  pack,
  token_axis,
  unpack,
)
from ringjax.ops.mask import Coords
from ringjax.typing import Index


class KVBlock(NamedTuple):
  """Keys and values in flight, in the order of axes of `Local`.

  Fields:
    kv: Keys and values, [2, B, K, S, H], or the pair (k, v) where the head dims
      differ; or the wire format's encoding of them.
    at: Coordinates, int32 [2, B or 1, S], or the pair (pos, seg) where their
      shapes differ.
  """

  kv: PyTree
  at: jax.Array | tuple[jax.Array, ...]

  @property
  def axis_of_tokens(self) -> int:
    """Dimension of `at` that runs over tokens."""
    return 1 if isinstance(self.at, tuple) else 2

  @classmethod
  def of(cls, x: Local, context: Context, wire: Wire | None = None) -> KVBlock:
    """Make a block of a shard's own keys."""
    return cls.with_axis(x, context, wire)[0]

  @classmethod
  def with_axis(
    cls, x: Local, context: Context, wire: Wire | None = None
  ) -> tuple[KVBlock, int]:
    """Make a block of a shard's own keys, and find its dimension of tokens."""
    if wire is None:
      kv, axis = pack(x.k, x.v), token_axis(x.k, x.v)
    else:
      kv, axis = wire.send(x.k, x.v)
    return cls(kv, pack(*context.k)), axis

  def seen_by(
    self,
    x: Local,
    args: ScoreArgs,
    column: Index,
    wire: Wire | None = None,
  ) -> tuple[Local, ScoreArgs]:
    """Operands of queries `x.q` over these keys, which begin at `column`."""
    if wire is None:
      k, v = unpack(self.kv)
    else:
      k, v = wire.receive(self.kv, x.k, x.v)
    return Local(x.q, k, v), args.of_keys(Coords(*unpack(self.at)), column)


class KVStrategy(Strategy):
  """A strategy that sends keys and values, in the format `wire`."""

  @property
  def wire(self) -> Any:
    """Wire format of keys and values; a field of every subclass."""

  def __post_init__(self) -> None:
    object.__setattr__(self, "wire", as_wire(self.wire, self.local))

  @property
  def _wire(self) -> Wire | None:
    """`wire` as converted by `__post_init__`."""
    return self.wire

  def _operands(
    self, x: Local, args: ScoreArgs, block: KVBlock | None, distance: Index
  ) -> tuple[Local, ScoreArgs]:
    """Operands of the queries over the keys of the shard `distance` before.

    A block of None stands for the shard's own keys, as they are.
    """
    length = self.local.span(x.k.shape[2])
    column = args.column + self._source(distance) * length
    if block is None:
      return x, args._replace(column=column)
    return block.seen_by(x, args, column, self._wire)

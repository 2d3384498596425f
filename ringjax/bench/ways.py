"""Strategies of attention by the names that commands take.

A name stands for a layout of the tokens and a strategy over it, as in
`infer.prefill`. Two more are baselines: `gather`, which brings all keys to all
shards, and `plain`, which also writes whole rows of scores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.strategies import nesting, registry
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.parallel.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedStrategy:
  """Strategy of a name, with its layout and its local algorithm.

  Attributes:
    layout: Layout of the tokens.
    strategy: Strategy of attention over the shards.
    local: Local algorithm, which computes on a shard.
    visits: Whether a call of it sees one shard's keys at a time, not all.
  """

  layout: Layout
  strategy: Strategy
  local: Any
  visits: bool

  def blocks(self, queries: int, keys: int) -> tuple[int, int]:
    """Tile size, (queries, keys), for these local lengths."""
    if hasattr(self.local, "blocks"):
      return self.local.blocks(queries, keys)
    return queries, keys


# Names for commands; "plain" is `gather` that writes whole rows of scores.
NAMES = (*registry.NAMES, "plain")

_LOCALS = {"best": AutoKernel, "blockwise": Blockwise}


def way(
  name: str,
  q_block: int | None = None,
  kv_block: int | None = None,
  local: str = "best",
) -> NamedStrategy:
  """Looks up a strategy by its name.

  Args:
    name: Name of `NAMES`; "hybrid:4" and "two_level:4" have groups of 4 shards.
    q_block: Queries of a tile; None chooses by the local length.
    kv_block: Keys of a tile; None chooses by the local length.
    local: Local algorithm: "best", the kernel of the devices, or "blockwise",
      XLA's loops.

  Raises:
    OptionError: If the name is unknown, or "plain" gets a tile size.
  """
  one_of("local", local, _LOCALS)
  kind, colon, group = name.partition(":")
  registered = registry.find("gather" if name == "plain" else kind)
  valid = registered is not None and (
    group.isdecimal() and int(group) > 0 if registered.grouped else not colon
  )
  if registered is None or not valid:
    raise OptionError(
      "strategy",
      repr(name),
      f"one of {', '.join(NAMES)}",
      "pass one of these names",
    )
  if name == "plain" and (q_block, kv_block) != (None, None):
    raise OptionError(
      "q_block, kv_block",
      f"{q_block}, {kv_block} with strategy='plain'",
      "no tiles, for whole rows of scores are written",
      "leave q_block and kv_block out",
    )
  algorithm = Dense() if name == "plain" else _LOCALS[local](q_block, kv_block)
  strategy = nesting.around(registered.strategy, algorithm)
  if registered.grouped:
    strategy = dataclasses.replace(strategy, inner=int(group))
  return NamedStrategy(
    layout=registered.layout,
    strategy=strategy,
    local=algorithm,
    visits=registered.visits,
  )

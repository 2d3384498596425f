"""Ways to move attention, by the names that commands take.

A way is a layout of the tokens and a strategy over it, as `infer.prefill` has
them, and beside them what they are compared with: `gather`, which brings all
keys everywhere, and `plain`, which also writes whole rows of scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ringjax.errors import OptionError, message
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.chain import Chain
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.halo import Halo
from ringjax.ops.attention.kernels.best import Best
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.ring_q import RingQ
from ringjax.ops.attention.ulysses import Ulysses
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
  """How attention runs.

  Attributes:
    layout: of the tokens.
    strategy: what moves.
    local: what computes on a shard.
    visits: whether a call of it sees one shard's keys at a time, not all.
  """

  layout: Layout
  strategy: Any
  local: Any
  visits: bool

  def blocks(self, queries: int, keys: int) -> tuple[int, int]:
    """The tile that serves these local lengths."""
    if hasattr(self.local, "blocks"):
      return self.local.blocks(queries, keys)
    return queries, keys


# name: (layout, strategy of a local algorithm, whether keys come by and by)
WAYS: dict[str, tuple[Layout, Callable[[Any], Any], bool]] = {
  "ring": (Contiguous(), Ring, True),
  "striped": (Striped(), Ring, True),
  "zigzag": (Zigzag(), Ring, True),
  "bidirectional": (Striped(), lambda x: Ring(x, two_way=True), True),
  "ring_q": (Striped(), RingQ, True),
  "chain": (Contiguous(), Chain, True),
  "halo": (Contiguous(), Halo, True),
  "documents": (Contiguous(), lambda x: Ring(x, by_document=True), True),
  "gather": (Contiguous(), Gather, False),
  "ulysses": (Contiguous(), Ulysses, False),
  "plain": (Contiguous(), Gather, False),
}
# The same of two levels, with how many neighbours are a group: "hybrid:4".
_GROUPED: dict[str, tuple[Layout, Callable[[Any, int], Any]]] = {
  "hybrid": (Striped(), lambda x, n: Ulysses(Ring(x), inner=n)),
  "two_level": (Striped(), lambda x, n: Ring(Ring(x), inner=n)),
}
NAMES = (*WAYS, *(f"{name}:N" for name in _GROUPED))

_LOCALS = {"best": Best, "blockwise": Blockwise}


def way(
  name: str,
  q_block: int | None = None,
  kv_block: int | None = None,
  local: str = "best",
) -> Way:
  """A way by its name.

  Args:
    name: of `NAMES`, N the neighbours that are a group.
    q_block: queries of a tile; None chooses by the local length.
    kv_block: keys of a tile.
    local: what computes on a shard: "best", the kernel of the devices, or
      "blockwise", XLA's loops.

  Raises:
    OptionError: an unknown name, or tiles where there are none.
  """
  if local not in _LOCALS:
    raise OptionError(
      message(
        "local",
        repr(local),
        f"one of {', '.join(_LOCALS)}",
        "pass one of these names",
      )
    )
  kind, _, group = name.partition(":")
  grouped = kind in _GROUPED and group.isdecimal() and int(group) > 0
  if not grouped and name not in WAYS:
    raise OptionError(
      message(
        "strategy",
        repr(name),
        f"one of {', '.join(NAMES)}",
        "pass one of these names",
      )
    )
  if name == "plain" and (q_block, kv_block) != (None, None):
    raise OptionError(
      message(
        "q_block, kv_block",
        f"{q_block}, {kv_block} with strategy='plain'",
        "no tiles, for whole rows of scores are written",
        "leave them out",
      )
    )
  made = Dense() if name == "plain" else _LOCALS[local](q_block, kv_block)
  if grouped:
    layout, around = _GROUPED[kind]
    inner = around(made, int(group))
    return Way(layout=layout, strategy=inner, local=made, visits=True)
  layout, strategy, visits = WAYS[name]
  return Way(layout=layout, strategy=strategy(made), local=made, visits=visits)

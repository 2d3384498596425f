"""The strategies by name: what builds each, what it supports, what it costs.

A new strategy is a file of its own, a function in `predict` and an entry here;
commands, benchmarks, the choice by cost and compiled plans read this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.ops.attention import predict as costs
from ringjax.ops.attention.call_shape import CallShape, Prediction, Refusal
from ringjax.ops.attention.chain import Chain
from ringjax.ops.attention.cost_terms import CostTerms
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.halo import Halo
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.ring_q import RingQ
from ringjax.ops.attention.strategy import Strategy
from ringjax.ops.attention.ulysses import Ulysses
from ringjax.ops.attention.wire_format import WireLike
from ringjax.parallel.chips import Machine
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyEntry:
  """A strategy that has a name.

  Attributes:
    strategy: the strategy, without its axis.
    cost: what it costs in a `CostTerms`, or the reason why it is not for the
      call; of two levels also by the devices of a group.
    layout: the order of tokens that it is measured and compiled with.
    consecutive: whether shards have to hold consecutive tokens.
    same_tokens: whether queries and keys have to be the same tokens, under a
      mask that is known when the call is traced.
    wired: whether keys may be chosen to travel as codes.
    visits: whether a call of the local algorithm sees one shard's keys.
    some_pairs: whether only some devices send at a time, which `jax.vmap` has
      no rule for.
  """

  strategy: Strategy
  cost: Callable[..., Prediction | str]
  layout: Layout
  consecutive: bool = False
  same_tokens: bool = False
  wired: bool = False
  visits: bool = True
  some_pairs: bool = False

  @property
  def grouped(self) -> bool:
    """Whether it has two levels, hence groups of devices."""
    return isinstance(self.strategy.local, Strategy)


# The order decides between equals in cost, the plainer one first.
STRATEGIES: dict[str, StrategyEntry] = {
  "halo": StrategyEntry(
    strategy=Halo(), cost=costs.halo, layout=Contiguous(), consecutive=True,
    same_tokens=True,
  ),
  "documents": StrategyEntry(
    strategy=Ring(by_document=True), cost=costs.documents, layout=Contiguous(),
    consecutive=True, wired=True,
  ),
  "ring": StrategyEntry(
    strategy=Ring(), cost=costs.ring, layout=Contiguous(), wired=True
  ),
  "chain": StrategyEntry(
    strategy=Chain(), cost=costs.chain, layout=Contiguous(), consecutive=True,
    same_tokens=True, wired=True, some_pairs=True,
  ),
  "gather": StrategyEntry(
    strategy=Gather(), cost=costs.gather, layout=Contiguous(), wired=True,
    visits=False,
  ),
  "ulysses": StrategyEntry(
    strategy=Ulysses(), cost=costs.ulysses, layout=Contiguous(), visits=False
  ),
  "bidirectional": StrategyEntry(
    strategy=Ring(two_way=True), cost=costs.bidirectional, layout=Striped(),
    wired=True,
  ),
  "hybrid": StrategyEntry(
    strategy=Ulysses(Ring()), cost=costs.hybrid, layout=Striped(), wired=True
  ),
  "two_level": StrategyEntry(
    strategy=Ring(Ring()), cost=costs.two_level, layout=Striped(), wired=True
  ),
  "ring_q": StrategyEntry(
    strategy=RingQ(), cost=costs.ring_q, layout=Striped()
  ),
}  # fmt: skip
GROUPED = tuple(name for name, one in STRATEGIES.items() if one.grouped)
WIRED = tuple(name for name, one in STRATEGIES.items() if one.wired)
# The ring over tokens in another order has a name of its own.
REORDERED: dict[str, Layout] = {"striped": Striped(), "zigzag": Zigzag()}
# What commands take, N the devices of a group: "hybrid:4".
NAMES = (
  *(f"{name}:N" if name in GROUPED else name for name in STRATEGIES),
  *REORDERED,
)


def find(name: str) -> StrategyEntry | None:
  """The entry of a name; of one of `REORDERED` the ring's with its layout."""
  if name in REORDERED:
    return dataclasses.replace(STRATEGIES["ring"], layout=REORDERED[name])
  return STRATEGIES.get(name)


def predict(
  strategy: str,
  call: CallShape,
  machine: Machine,
  layout: Layout,
  *,
  inner: int | None = None,
  wire: WireLike | None = None,
) -> Prediction | Refusal:
  """What one strategy costs, or why it is not for this call.

  Args:
    strategy: of `STRATEGIES`.
    call: what is to be computed.
    machine: on what.
    layout: order of the tokens on the shards.
    inner: devices of a group, for hybrid and two_level.
    wire: of `WIRES` or a `Wire`, or None to send K and V as they are.

  Raises:
    OptionError: there is no such strategy, or it takes no such option.
  """
  found = STRATEGIES[one_of("strategy", strategy, STRATEGIES)]
  if found.grouped != (inner is not None):
    raise OptionError(
      "inner",
      f"{inner!r} for {strategy}",
      f"an int for {' and '.join(GROUPED)} alone",
      "pass inner=4 or leave it out",
    )
  if wire is not None and not found.wired:
    raise OptionError(
      "wire",
      f"{wire!r} for {strategy}",
      f"it for {', '.join(WIRED)} alone",
      "leave it out",
    )
  options = {} if inner is None else {"inner": inner}
  if inner is not None and (call.shards % inner or not 1 < inner < call.shards):
    cost = f"groups of {inner} do not divide {call.shards} shards"
  else:
    cost = found.cost(
      CostTerms(strategy, call, machine, layout, wire), **options
    )
  if isinstance(cost, str):
    return Refusal(strategy=strategy, reason=cost, options=options)
  return cost

"""Registry of the strategies by name: objects, properties and costs.

A new strategy is a file, a function in `predict`, an entry here and a picture
(`plan/pictures.py`); commands, benchmarks, the choice by cost and compiled
plans read this table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.ops.attention.cost import predict as costs
from ringjax.ops.attention.cost.call_shape import (
  FORMS,
  CallShape,
  Prediction,
  Refusal,
)
from ringjax.ops.attention.cost.cost_terms import CostTerms
from ringjax.ops.attention.strategies.chain import Chain
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.halo import Halo
from ringjax.ops.attention.strategies.kv_block import KVStrategy
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.attention.strategies.ring_q import RingQ
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.attention.strategies.ulysses import Ulysses
from ringjax.ops.attention.strategies.wire_format import WireLike
from ringjax.parallel.chips import Machine
from ringjax.parallel.layout import LAYOUTS, Contiguous, Layout, Striped


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyEntry:
  """A strategy that has a name.

  Attributes:
    strategy: The strategy, without its axis.
    cost: Function that predicts its cost from `CostTerms`, or gives the reason
      why it does not serve the call; with two levels also of the group size.
    layout: Layout with which it is benchmarked and compiled.
    prefills: Whether prompts are read with it into a cache.
    layouts: Layouts that it is meant for; None: those that it serves.
    same_tokens: Whether queries and keys have to be the same tokens, under a
      mask that is known when the call is traced.
    wired: Whether keys may be sent in a lossy format.
    visits: Whether a call of the local algorithm sees one shard's keys.
    some_pairs: Whether only some devices send at a time, for which `jax.vmap`
      has no rule.
  """

  strategy: Strategy
  cost: Callable[..., Prediction | str]
  layout: Layout
  prefills: bool = False
  layouts: tuple[type[Layout], ...] | None = None
  same_tokens: bool = False
  wired: bool = False
  visits: bool = True
  some_pairs: bool = False

  @property
  def served_layouts(self) -> tuple[type[Layout], ...]:
    """Types of the layouts in which it is considered."""
    return self.strategy.layouts if self.layouts is None else self.layouts

  @property
  def consecutive(self) -> bool:
    """Whether shards have to hold consecutive tokens."""
    return Layout not in self.served_layouts

  @property
  def grouped(self) -> bool:
    """Whether it has two levels, hence groups of devices."""
    return isinstance(self.strategy.local, Strategy)

  @property
  def sends_rows(self) -> bool:
    """Whether it can send rows of latent attention, not keys of all heads."""
    return isinstance(self.strategy, KVStrategy)


# Equal costs are decided by this order, the plainer strategy first.
STRATEGIES: dict[str, StrategyEntry] = {
  "halo": StrategyEntry(
    strategy=Halo(), cost=costs.halo, layout=Contiguous(), same_tokens=True,
  ),
  "documents": StrategyEntry(
    strategy=Ring(by_document=True), cost=costs.documents, layout=Contiguous(),
    layouts=(Contiguous,), wired=True,
  ),
  "ring": StrategyEntry(
    strategy=Ring(), cost=costs.ring, layout=Contiguous(), wired=True,
    prefills=True,
  ),
  "chain": StrategyEntry(
    strategy=Chain(), cost=costs.chain, layout=Contiguous(), same_tokens=True,
    wired=True, some_pairs=True,
  ),
  "gather": StrategyEntry(
    strategy=Gather(), cost=costs.gather, layout=Contiguous(), wired=True,
    visits=False, prefills=True,
  ),
  "ulysses": StrategyEntry(
    strategy=Ulysses(), cost=costs.ulysses, layout=Contiguous(), visits=False,
    prefills=True,
  ),
  "bidirectional": StrategyEntry(
    strategy=Ring(two_way=True), cost=costs.bidirectional, layout=Striped(),
    wired=True, prefills=True,
  ),
  "hybrid": StrategyEntry(
    strategy=Ulysses(Ring()), cost=costs.hybrid, layout=Striped(), wired=True,
    prefills=True,
  ),
  "two_level": StrategyEntry(
    strategy=Ring(Ring()), cost=costs.two_level, layout=Striped(), wired=True
  ),
  "ring_q": StrategyEntry(
    strategy=RingQ(), cost=costs.ring_q, layout=Striped()
  ),
}  # fmt: skip
GROUPED = tuple(name for name, entry in STRATEGIES.items() if entry.grouped)
WIRED = tuple(name for name, entry in STRATEGIES.items() if entry.wired)
# Most time that latent attention may take with rows, as a multiple of that with
# keys of all heads. A send that tiles hide is free in the model, but takes the
# link from other traffic, and its blocks take memory.
ROWS_SLOWER = 1.125
# Names of the ring over tokens in another order.
REORDERED: dict[str, Layout] = {
  name: LAYOUTS[name] for name in ("striped", "zigzag")
}
# Names of the strategies that read prompts into a cache.
PREFILLS = (
  *(name for name, entry in STRATEGIES.items() if entry.prefills),
  *REORDERED,
)
# Names that commands take, N the devices of a group: "hybrid:4".
NAMES = (
  *(f"{name}:N" if name in GROUPED else name for name in STRATEGIES),
  *REORDERED,
)


def find(name: str) -> StrategyEntry | None:
  """Find the entry of a name; for `REORDERED` the ring's with that layout."""
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
  """Predict the cost of a strategy, or the reason not to use it.

  Latent attention is predicted in the form of `latent_form`.

  Args:
    strategy: Name in `STRATEGIES`.
    call: Shapes, mask and mesh axes of the call.
    machine: Machine that runs it.
    layout: Order of the tokens on the shards.
    inner: Devices of a group, for hybrid and two_level.
    wire: Format of K and V, of `WIRES` or a `Wire`, or None to send them as
      they are.

  Raises:
    OptionError: If there is no such strategy, or it has no such option.
  """
  entry = STRATEGIES[one_of("strategy", strategy, STRATEGIES)]
  if entry.grouped != (inner is not None):
    raise OptionError(
      "inner",
      f"{inner!r} for {strategy}",
      f"an int for {' and '.join(GROUPED)} alone",
      "pass inner=4 or leave it out",
    )
  if wire is not None and not entry.wired:
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
    costs = _form_costs(strategy, call, machine, layout, wire, **options)
    cost = costs[_form(call, costs)]
  if isinstance(cost, str):
    return Refusal(strategy=strategy, reason=cost, options=options)
  return cost


def latent_form(
  strategy: Strategy, call: CallShape, machine: Machine, layout: Layout
) -> str:
  """Choose what a strategy sends of a token of latent attention, of `FORMS`.

  Rows, unless they have no fewer numbers than keys and values of a device's
  heads, or take more time by more than `ROWS_SLOWER`.

  Args:
    strategy: Strategy; of several levels the outermost one counts.
    call: Shapes, mask and mesh axes of the call, with `rows`.
    machine: Machine that runs it.
    layout: Order of the tokens on the shards.
  """
  if not isinstance(strategy, KVStrategy):
    return "heads"
  option = lambda x: [getattr(x, n, None) for n in ("two_way", "by_document")]
  names = [
    name
    for name, entry in STRATEGIES.items()
    if type(entry.strategy) is type(strategy)
    and not entry.grouped
    and option(entry.strategy) == option(strategy)
  ]
  # The ring serves masks and layouts that the cost of others refuses.
  for name in (*names, "ring"):
    costs = _form_costs(name, call, machine, layout, strategy.wire)
    if not isinstance(costs["heads"], str):
      return _form(call, costs)
  return "rows"


def _form_costs(
  strategy: str,
  call: CallShape,
  machine: Machine,
  layout: Layout,
  wire: WireLike | None,
  **options: int,
) -> dict[str, Prediction | str]:
  """Predicted cost of a strategy in each form that it can send."""
  entry = STRATEGIES[strategy]
  forms = FORMS if call.rows is not None and entry.sends_rows else FORMS[:1]
  cost_of = lambda form: entry.cost(
    CostTerms(
      strategy, call, machine, layout, wire, entry.served_layouts, form
    ),
    **options,
  )
  return {form: cost_of(form) for form in forms}


def _form(call: CallShape, costs: dict[str, Prediction | str]) -> str:
  """The form in which to send, given the cost of each."""
  seconds = {
    form: math.inf if isinstance(cost, str) else cost.seconds
    for form, cost in costs.items()
  }
  heads_s = seconds.pop("heads")
  if not seconds or call.rows is None:
    return "heads"
  value_dim = call.value_dim or call.head_dim
  fewer = call.rows.size < call.kv_heads * (call.head_dim + value_dim)
  form = min(seconds, key=seconds.__getitem__)
  return form if fewer and seconds[form] <= ROWS_SLOWER * heads_s else "heads"
